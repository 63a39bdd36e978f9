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

# have_libclang: bindgen loads libclang at build time.
have_libclang() {
  compgen -G '/usr/lib/llvm-*/lib/libclang*.so*' >/dev/null || compgen -G '/usr/lib/*/libclang*.so*' >/dev/null
}

need_toolchain() {
  command -v cargo >/dev/null 2>&1 || { say "Rust is missing: see rustup.rs"; exit 1; }
  need c++ g++
  need make make
  have_libclang || install_packages libclang-dev
}
