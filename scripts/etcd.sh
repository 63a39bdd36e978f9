#!/usr/bin/env bash
# Builds etcd, etcdctl and etcdutl 3.7.3, etcd and etcdutl 3.6.8 and 3.5.21, and etcd's own load tool (3.6.8) once into the cache, and
# prints the folder. The versions are the ones in tests/conformance/tools/**/go.mod; all come from the Go module proxy. About 240 s cold
# on two cores.
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"
command -v go >/dev/null 2>&1 || { say "Go is missing: install golang 1.26 or newer"; exit 1; }

tools="$SKEG_ROOT/tests/conformance/tools"
export CGO_ENABLED=0 GOFLAGS="-buildvcs=false -trimpath"
key=$(cat "$tools"/go.{mod,sum} "$tools"/{benchmark,etcd36,etcd35}/go.{mod,sum} <(go version; echo "$GOFLAGS") |
  sha256sum | cut -c1-16)
built="$SKEG_CACHE/etcd-$key"

# compile MODULE_FOLDER PACKAGE BINARY
compile() {
  (cd "$1" && nice -n 5 go build -ldflags='-s -w' -o "$built.tmp/bin/$3" "$2") >&2
}

build() {
  say "building etcd and its tools into $built (once, about 240 s)"
  rm -rf "$built.tmp"
  mkdir -p "$built.tmp/bin"
  compile "$tools" go.etcd.io/etcd/server/v3 etcd
  compile "$tools" go.etcd.io/etcd/etcdctl/v3 etcdctl
  compile "$tools" go.etcd.io/etcd/etcdutl/v3 etcdutl
  for version in 36 35; do
    compile "$tools/etcd$version" go.etcd.io/etcd/server/v3 "etcd$version"
    compile "$tools/etcd$version" go.etcd.io/etcd/etcdutl/v3 "etcdutl$version"
  done
  compile "$tools/benchmark" go.etcd.io/etcd/v3/tools/benchmark benchmark
  mv -T "$built.tmp" "$built"
}

(
  flock 9
  [ -x "$built/bin/benchmark" ] || build
) 9>"$built.lock"
echo "$built/bin"
