#!/usr/bin/env bash
# Runs kube-apiserver's own storage tests against a store and compares with tests/apiserver-storage/expected.txt.
#   scripts/apiserver-storage.sh [STORE_BIN] [-write] [-run REGEXP] [-bench REGEXP]
# STORE_BIN is the binary of skeg (built when none is given) or etcd.
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"
command -v go >/dev/null 2>&1 || { say "Go is missing: install golang 1.26 or newer"; exit 1; }

case ${1:-} in
  '' | -*) store=$("$SKEG_ROOT/scripts/skeg.sh") ;;
  *)
    store=$(realpath "$1")
    shift
    ;;
esac
export STORE_BIN=$store CGO_ENABLED=0 GOFLAGS="-buildvcs=false -trimpath"
suite="$SKEG_ROOT/tests/apiserver-storage"
cd "$suite"
module=$(go mod download -json k8s.io/apiserver | sed -n 's/^\t"Dir": "\(.*\)",$/\1/p')
go test ./cmd/suite >&2
exec go run ./cmd/suite -expected "$suite/expected.txt" -module "$module" -launcher "$suite/testserver" \
  -boot "$SKEG_ROOT/control-plane/boot" "$@"
