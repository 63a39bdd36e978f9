// Package boot starts a store and a stock Kubernetes control plane over it, as processes on loopback.
//
//	Store ── gRPC ── APIServer ── TLS, client certificates ── ControllerManager, Scheduler, kubectl
//
// It makes what they need (free ports, certificates, kubeconfig files, log files) in a folder, starts them in the order of
// their needs, says when each is ready, and stops them in reverse. It knows nothing of Kubernetes' Go packages, so that
// it compiles in a second; the stock binaries come from scripts/kubernetes.sh, the store is skeg or etcd: the flags are
// the same.
package boot
