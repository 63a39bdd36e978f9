#!/usr/bin/env bash
# Builds the RocksDB archive once into the cache, keyed by crate version, compiler and flags, and prints its folder.
# RocksDB takes 11-19 minutes on two cores; sharing one archive keeps profiles, checkouts and CI runs from paying again.
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"
need_toolchain >&2

crate_version=0.19.0+11.8.1
flags="$(cat "$SKEG_ROOT/.cargo/config.toml")"
key=$(printf '%s\n%s\n%s\n%s\n' "$crate_version" "$flags" "$(c++ -dumpfullversion)" "$(uname -m)" | sha256sum | cut -c1-16)
archive="$SKEG_CACHE/rocksdb-$key"

build() {
  say "building RocksDB into $archive (once, 11-19 minutes on two cores)"
  local work="$archive.build"
  mkdir -p "$work/src" "$work/.cargo"
  cp "$SKEG_ROOT/.cargo/config.toml" "$work/.cargo/config.toml"
  : >"$work/src/lib.rs"
  cat >"$work/Cargo.toml" <<TOML
[package]
name = "rocksdb-archive"
version = "0.0.0"
edition = "2021"

[dependencies]
librocksdb-sys = { version = "=$crate_version", default-features = false, features = ["static", "lz4", "bindgen-runtime"] }

[workspace]
TOML
  (cd "$work" && env -u ROCKSDB_LIB_DIR -u RUSTFLAGS CARGO_TARGET_DIR="$work/target" cargo build --release --quiet) >&2
  local built
  built=$(find "$work/target/release/build" -name librocksdb.a | head -n 1)
  mkdir -p "$archive.tmp"
  cp "$built" "$archive.tmp/librocksdb.a"
  strip --strip-debug "$archive.tmp/librocksdb.a"
  mv -T "$archive.tmp" "$archive"
  rm -rf "$work"
}

(
  flock 9
  [ -f "$archive/librocksdb.a" ] || build
) 9>"$archive.lock"
echo "$archive"
