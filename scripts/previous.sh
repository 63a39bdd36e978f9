#!/usr/bin/env bash
# Builds the skeg that a cluster is rolled from, unoptimised, once into the cache, and prints the path of the binary.
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"

# The last commit before the cluster had a level. The next release names its predecessor here.
commit=c3ea722478d0765c21cf10f57e5a66cf829a5956
binary="$SKEG_CACHE/previous-$commit"

build() {
  git -C "$SKEG_ROOT" cat-file -e "$commit^{commit}" 2>/dev/null || {
    say "commit $commit, from which a cluster is rolled, is not in the history of $SKEG_ROOT: get all of it (git fetch --unshallow)"
    exit 1
  }
  say "building the skeg of $commit into $binary (once, 2 minutes, up to 6 if its dependencies are not built yet)"
  need_toolchain >&2
  have_rocksdb
  local work="$binary.build"
  rm -rf "$work"
  mkdir -p "$work/source" "$work/target/debug"
  git -C "$SKEG_ROOT" archive "$commit" | tar -x -C "$work/source"
  take_packages "${CARGO_TARGET_DIR:-$SKEG_ROOT/target}/debug" "$work"
  (cd "$work/source" && CARGO_INCREMENTAL=0 CARGO_TARGET_DIR="$work/target" cargo build --quiet --locked --bin skeg) >&2
  mv "$work/target/debug/skeg" "$binary"
  rm -rf "$work"
}

# take_packages FOLDER WORK: copies what is compiled there of packages that both commits depend on. What is ours is not, for cargo
# goes by the time of a file, and those of the older commit are older than what was compiled of the newer one.
take_packages() {
  local from=$1 work=$2 same
  for same in Cargo.lock .cargo stand-ins; do
    diff -qr "$SKEG_ROOT/$same" "$work/source/$same" >/dev/null || return 0
  done
  [ -d "$from/.fingerprint" ] || return 0
  (cd "$from" && find .fingerprint build deps \( -name 'skeg*' -o -name 'libskeg*' -o -path 'deps/*' ! -name '*.*' \) -prune -o -type f -print0 |
    xargs -0 cp -a --parents -t "$work/target/debug")
}

(
  flock 9
  [ -x "$binary" ] || build
) 9>"$binary.lock"
echo "$binary"
