#!/usr/bin/env bash
# Tests a store under a stock Kubernetes control plane, and with the checklist of what kube-apiserver needs.
#   scripts/kubernetes-test.sh [STORE_BIN] [GO TEST FLAG...]
# STORE_BIN is the binary of skeg (built when none is given) or etcd.
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"

case ${1:-} in
  '' | -*) store=$("$SKEG_ROOT/scripts/skeg.sh") ;;
  *)
    store=$(realpath "$1")
    shift
    ;;
esac
KUBERNETES_BIN=$("$SKEG_ROOT/scripts/kubernetes.sh")
export STORE_BIN=$store KUBERNETES_BIN CGO_ENABLED=0 GOFLAGS="-buildvcs=false -trimpath"
cd "$SKEG_ROOT/tests/kubernetes"
exec go test -count=1 -parallel=6 -timeout=15m . "$@"
