package boot

import (
	"errors"
	"fmt"
	"net/http"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

// Options choose the parts of a control plane and what differs from the smallest one that works.
type Options struct {
	// Binaries is the folder that scripts/kubernetes.sh prints.
	Binaries string
	// Folder takes certificates, kubeconfig files and logs.
	Folder string
	// Stores are the client URLs of the store.
	Stores []string
	// Port is where kube-apiserver listens; 0 finds a free one.
	Port int
	// APIServerFlags come after ours, so they win.
	APIServerFlags []string
	// Environment is added to kube-apiserver's.
	Environment []string
	// Controllers also starts kube-controller-manager and kube-scheduler.
	Controllers bool
	// Grace bounds how long each part may take to stop.
	Grace time.Duration
}

// ControlPlane is a running kube-apiserver and, if asked for, the controllers that make it a cluster.
type ControlPlane struct {
	options      Options
	certificates *certificates
	url          string
	kubeconfig   string
	apiServer    *Process
	controllers  []*Process
}

// Start makes certificates and starts the parts, each once the one before it is ready. On an error what was started is stopped.
func Start(options Options) (*ControlPlane, error) {
	if options.Grace == 0 {
		options.Grace = 20 * time.Second
	}
	if options.Port == 0 {
		ports, err := FreePorts(1)
		if err != nil {
			return nil, err
		}
		options.Port = ports[0]
	}
	set, err := makeCertificates(filepath.Join(options.Folder, "certificates"))
	if err != nil {
		return nil, err
	}
	plane := &ControlPlane{options: options, certificates: set, url: fmt.Sprintf("https://127.0.0.1:%d", options.Port)}
	if plane.kubeconfig, err = set.kubeconfig(adminPair, plane.url); err != nil {
		return nil, err
	}
	if err := plane.start(); err != nil {
		return nil, errors.Join(err, plane.Stop())
	}
	return plane, nil
}

func (c *ControlPlane) start() error {
	if err := c.StartAPIServer(); err != nil {
		return err
	}
	if !c.options.Controllers {
		return nil
	}
	if err := c.startController("kube-controller-manager", controllersPair,
		"--service-account-private-key-file="+c.certificates.privateKey(serviceAccountPair),
		"--root-ca-file="+c.certificates.certificate(authorityPair),
		"--cluster-signing-cert-file="+c.certificates.certificate(authorityPair),
		"--cluster-signing-key-file="+c.certificates.privateKey(authorityPair),
		"--use-service-account-credentials=true",
	); err != nil {
		return err
	}
	return c.startController("kube-scheduler", schedulerPair)
}

// StartAPIServer starts kube-apiserver, again if it had ended, and waits until it is ready.
func (c *ControlPlane) StartAPIServer() error {
	path, err := binary(c.options.Binaries, "kube-apiserver")
	if err != nil {
		return err
	}
	set := c.certificates
	args := append([]string{
		"--etcd-servers=" + strings.Join(c.options.Stores, ","),
		"--bind-address=127.0.0.1",
		"--secure-port=" + strconv.Itoa(c.options.Port),
		"--advertise-address=127.0.0.1",
		"--endpoint-reconciler-type=none", // it would publish the advertised address, and refuse a loopback one
		"--service-cluster-ip-range=10.0.0.0/24",
		"--service-account-issuer=https://kubernetes.default.svc.cluster.local",
		"--service-account-key-file=" + set.certificate(serviceAccountPair),
		"--service-account-signing-key-file=" + set.privateKey(serviceAccountPair),
		"--client-ca-file=" + set.certificate(authorityPair),
		"--tls-cert-file=" + set.certificate(servingPair),
		"--tls-private-key-file=" + set.privateKey(servingPair),
		"--authorization-mode=Node,RBAC",
		"--allow-privileged=true",
		"--cert-dir=" + set.folder,
	}, c.options.APIServerFlags...)
	process, err := start("kube-apiserver", c.log("kube-apiserver"), c.options.Environment, path, args...)
	if err != nil {
		return err
	}
	c.apiServer = process
	return c.awaitReady(process, c.url+"/readyz")
}

// startController starts a client of kube-apiserver. It runs without leader election: it is the only one, and with it a store
// that is away for ten seconds would end it.
func (c *ControlPlane) startController(name, pair string, flags ...string) error {
	path, err := binary(c.options.Binaries, name)
	if err != nil {
		return err
	}
	ports, err := FreePorts(1)
	if err != nil {
		return err
	}
	kubeconfig, err := c.certificates.kubeconfig(pair, c.url)
	if err != nil {
		return err
	}
	args := append([]string{
		"--kubeconfig=" + kubeconfig,
		"--leader-elect=false",
		"--bind-address=127.0.0.1",
		"--secure-port=" + strconv.Itoa(ports[0]),
		"--tls-cert-file=" + c.certificates.certificate(servingPair),
		"--tls-private-key-file=" + c.certificates.privateKey(servingPair),
		"--authorization-always-allow-paths=/healthz,/readyz,/livez,/metrics",
	}, flags...)
	process, err := start(name, c.log(name), nil, path, args...)
	if err != nil {
		return err
	}
	c.controllers = append(c.controllers, process)
	return c.awaitReady(process, fmt.Sprintf("https://127.0.0.1:%d/healthz", ports[0]))
}

// URL is where kube-apiserver listens.
func (c *ControlPlane) URL() string { return c.url }

// Kubeconfig is the path of the administrator's kubeconfig file.
func (c *ControlPlane) Kubeconfig() string { return c.kubeconfig }

// APIServer is the running or last process of kube-apiserver.
func (c *ControlPlane) APIServer() *Process { return c.apiServer }

// Processes are all parts that were started, in that order.
func (c *ControlPlane) Processes() []*Process {
	if c.apiServer == nil {
		return nil
	}
	return append([]*Process{c.apiServer}, c.controllers...)
}

// Stop ends the parts in reverse order; parts that do not stop in time are killed and named in the error.
func (c *ControlPlane) Stop() error {
	var failures []error
	processes := c.Processes()
	for at := len(processes) - 1; at >= 0; at-- {
		failures = append(failures, processes[at].Stop(c.options.Grace))
	}
	return errors.Join(failures...)
}

func (c *ControlPlane) log(name string) string { return filepath.Join(c.options.Folder, name+".log") }

func (c *ControlPlane) awaitReady(process *Process, url string) error {
	trust, err := c.certificates.client(adminPair)
	if err != nil {
		return err
	}
	transport := &http.Transport{TLSClientConfig: trust}
	defer transport.CloseIdleConnections()
	client := &http.Client{Transport: transport, Timeout: 5 * time.Second}
	return process.await(120*time.Second, func() error { return getOK(client, url) })
}
