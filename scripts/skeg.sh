#!/usr/bin/env bash
# Builds skeg and skegutl as they are released and prints the path of skeg; skegutl is at that path with "utl" behind it. Quick when
# nothing changed.
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"
need_toolchain >&2
have_rocksdb
share_target

# Checkouts share the target folder, so each keeps its binary under a name of its own.
binary="$SKEG_CACHE/skeg-$(sha256sum <<<"$SKEG_ROOT" | cut -c1-16)"
(
  flock 9
  cd "$SKEG_ROOT"
  cargo build --locked --release --bin skeg --bin skegutl >&2
  for suffix in '' utl; do
    if ! cmp -s "$CARGO_TARGET_DIR/release/skeg$suffix" "$binary$suffix"; then
      cp "$CARGO_TARGET_DIR/release/skeg$suffix" "$binary.tmp"
      mv "$binary.tmp" "$binary$suffix"
    fi
  done
) 9>"$binary.lock"
echo "$binary"
