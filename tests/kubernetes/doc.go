// Package kubernetes tests that a store is good enough for a stock Kubernetes control plane.
//
// Two kinds of tests share the package. The first kind starts the store, kube-apiserver and its controllers as processes
// (skeg.local/boot) and acts on them as users do, by kubectl and client-go. The second, TestChecklist, speaks to the store
// alone, in the shapes in which kube-apiserver does; it states what must be so, where tests/conformance only compares with etcd.
//
// Any store with etcd's flags will do; both skeg and etcd 3.7.3 must pass. scripts/kubernetes-test.sh sets
// STORE_BIN (the store's binary) and KUBERNETES_BIN (the folder of stock binaries).
package kubernetes
