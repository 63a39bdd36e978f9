// Package conformance drives a real etcd 3.7.3 and a real skeg through the same calls and requires the same answers.
//
// Run it with
//
//	scripts/conformance.sh [go test flags]
//
// which builds etcd, etcdctl and skeg when they are missing. By hand:
//
//	ETCD_BIN=…/etcd SKEG_BIN=…/skeg go test ./...
//
// etcdctl, etcdutl and older etcds are looked for beside ETCD_BIN, skegutl at SKEG_BIN with "utl" behind it. With SKEG_BIN naming an etcd the tests check themselves: two etcds must agree in everything, and
// the tests of deliberate differences (docs/compatibility.md) are left out.
//
// Subtests are named after the paragraph of the behavioural reference they cover (kv/4.2.3-limit-with-sort) or the error row
// (errors/2.1-EmptyKey). A scenario runs on a pair of servers it shares with others, emptied of keys and leases, unless it
// needs a fresh one. The random histories print the seed of a failure and the smallest list of operations that still shows it:
//
//	SKEG_SEEDS=N    histories to run, half of them from fixed seeds, half from fresh ones (default 32)
//	SKEG_SEED=S     one history: seed S
//	SKEG_OPS=N      operations in a history (default 120)
package conformance
