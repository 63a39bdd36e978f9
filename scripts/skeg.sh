#!/usr/bin/env bash
# Builds skeg as it is released and prints the path of the binary. Quick when nothing changed.
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"
need_toolchain >&2
have_rocksdb
share_target

# Checkouts share the target folder, so each keeps its binary under a name of its own.
binary="$SKEG_CACHE/skeg-$(sha256sum <<<"$SKEG_ROOT" | cut -c1-16)"
(
  flock 9
  cd "$SKEG_ROOT"
  cargo build --locked --release --bin skeg >&2
  if ! cmp -s "$CARGO_TARGET_DIR/release/skeg" "$binary"; then
    cp "$CARGO_TARGET_DIR/release/skeg" "$binary.tmp"
    mv "$binary.tmp" "$binary"
  fi
) 9>"$binary.lock"
echo "$binary"
