# Sourced by the other scripts: where builds that outlive a checkout are cached, and what the machine needs.
# Everything under SKEG_CACHE can be deleted at any time; the next run makes it again.

set -euo pipefail
SKEG_ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
SKEG_CACHE=${SKEG_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/skeg}
mkdir -p "$SKEG_CACHE"
export SKEG_ROOT SKEG_CACHE

say() { printf '== %s\n' "$*" >&2; }

# need COMMAND PACKAGE...: installs Debian packages when COMMAND is missing.
need() {
  local command=$1
  shift
  command -v "$command" >/dev/null 2>&1 && return 0
  install_packages "$@"
}

install_packages() {
  say "installing $*"
  local sudo=
  [ "$(id -u)" = 0 ] || sudo=sudo
  if ! $sudo env DEBIAN_FRONTEND=noninteractive apt-get install -y -q "$@" >/dev/null 2>&1; then
    $sudo apt-get update -q >/dev/null
    $sudo env DEBIAN_FRONTEND=noninteractive apt-get install -y -q "$@" >/dev/null
  fi
}

# have_libclang: bindgen loads libclang at build time, by these names; libclang-cpp is another library.
have_libclang() {
  local folder
  for folder in /usr/lib/llvm-*/lib /usr/lib/*-linux-gnu /usr/lib /usr/local/lib; do
    compgen -G "$folder/libclang.so*" >/dev/null && return 0
    compgen -G "$folder/libclang-[0-9]*.so*" >/dev/null && return 0
  done
  return 1
}

need_toolchain() {
  command -v cargo >/dev/null 2>&1 || { say "Rust is missing: see rustup.rs"; exit 1; }
  need c++ g++
  need make make
  need protoc protobuf-compiler
  have_libclang || install_packages libclang-dev
}

# have_rocksdb: sets what cargo needs to link skeg, building RocksDB when the cache has no archive.
have_rocksdb() {
  ROCKSDB_LIB_DIR=$("$SKEG_ROOT/scripts/rocksdb.sh")
  export ROCKSDB_LIB_DIR ROCKSDB_STATIC=1
}

# share_target: one cargo target folder in the cache for all checkouts with the same dependencies and compiler, so that a fresh
# clone compiles only what is ours. A CARGO_TARGET_DIR that is set already is kept.
share_target() {
  [ -z "${CARGO_TARGET_DIR:-}" ] || return 0
  local key
  key=$(cat "$SKEG_ROOT/Cargo.lock" "$SKEG_ROOT/.cargo/config.toml" <(rustc -vV) | sha256sum | cut -c1-16)
  export CARGO_TARGET_DIR="$SKEG_CACHE/target-$key"
  # Folders of dependency sets that nobody has built with for a week, and one that has grown out of bounds, are made again.
  find "$SKEG_CACHE" -maxdepth 1 -name 'target-*' ! -name "target-$key*" -mtime +7 -exec rm -rf {} +
  if [ -d "$CARGO_TARGET_DIR" ] && [ "$(du -sm "$CARGO_TARGET_DIR" | cut -f1)" -gt "$TARGET_MIB_MAX" ]; then
    rm -rf "$CARGO_TARGET_DIR"
  fi
  mkdir -p "$CARGO_TARGET_DIR"
  touch "$CARGO_TARGET_DIR"
}
TARGET_MIB_MAX=16384
