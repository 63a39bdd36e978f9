#!/usr/bin/env bash
# Builds what is missing, then runs tests/conformance: the same calls to a real etcd 3.7.3 and to skeg. Arguments go to go test.
# SKEG_BIN, when set, is the skeg to test, beside a skegutl whose name is that with "utl" behind it; otherwise the release binaries are built.
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"
tools=$("$SKEG_ROOT/scripts/etcd.sh")
export ETCD_BIN="$tools/etcd" CGO_ENABLED=0
if [ -z "${SKEG_BIN:-}" ]; then
  archive=$("$SKEG_ROOT/scripts/rocksdb.sh")
  (cd "$SKEG_ROOT" && ROCKSDB_LIB_DIR="$archive" ROCKSDB_STATIC=1 cargo build --release --bin skeg --bin skegutl) >&2
  SKEG_BIN="${CARGO_TARGET_DIR:-$SKEG_ROOT/target}/release/skeg"
fi
export SKEG_BIN
cd "$SKEG_ROOT/tests/conformance"
unformatted=$(gofmt -l .)
[ -z "$unformatted" ] || { say "gofmt: $unformatted"; exit 1; }
go vet ./...
exec go test -timeout 20m "$@" ./...
