package kubernetes

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/dynamic"
	client "k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"skeg.local/boot"
)

// eventTTL is how long events live in the shared control plane.
const eventTTL = 12 * time.Second

// advertised is what kube-apiserver publishes as its address: an address for documentation that nothing uses. With it, unlike
// with loopback, kube-apiserver keeps its master lease in the store.
const advertised = "192.0.2.1"

func TestMain(m *testing.M) {
	code := m.Run()
	if err := stopShared(); err != nil {
		fmt.Fprintln(os.Stderr, "stopping the shared control plane:", err)
		code = 1
	}
	os.Exit(code)
}

// cluster is a store, a control plane over it, and clients of both.
type cluster struct {
	store   *boot.Store
	plane   *boot.ControlPlane
	etcd    *clientv3.Client
	config  *rest.Config
	client  client.Interface
	dynamic dynamic.Interface
	kubectl string
	folder  string
}

var shared struct {
	once    sync.Once
	cluster *cluster
	err     error
}

// sharedCluster is the control plane that most tests use, each in a namespace of its own; the first caller starts it.
// It compacts each ten seconds, lets events expire soon, and compares its caches with the store each few seconds.
func sharedCluster(t *testing.T) *cluster {
	t.Helper()
	shared.once.Do(func() {
		folder, err := os.MkdirTemp("", "kubernetes-test-")
		if err != nil {
			shared.err = err
			return
		}
		shared.cluster, shared.err = startCluster(folder, true,
			"--etcd-compaction-interval=10s",
			"--event-ttl="+eventTTL.String(),
			"--endpoint-reconciler-type=lease",
			"--advertise-address="+advertised)
	})
	if shared.err != nil {
		t.Fatal(shared.err)
	}
	return shared.cluster
}

func stopShared() error {
	if shared.cluster == nil {
		return nil
	}
	ended := []string{}
	for _, process := range append(shared.cluster.plane.Processes(), shared.cluster.store.Process()) {
		if state := process.State(); state != nil {
			ended = append(ended, fmt.Sprintf("%s ended by itself (%s):\n%s", process.Name(), state, process.LogTail(40)))
		}
	}
	err := shared.cluster.stop()
	if len(ended) > 0 {
		return fmt.Errorf("%s (the logs stay in %s)", strings.Join(ended, "\n"), shared.cluster.folder)
	}
	if err != nil {
		return err
	}
	return os.RemoveAll(shared.cluster.folder)
}

// ownCluster is a control plane for one test, which may break its store.
func ownCluster(t *testing.T, flags ...string) *cluster {
	t.Helper()
	started, err := startCluster(t.TempDir(), false, flags...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := started.stop(); err != nil {
			t.Error(err)
		}
	})
	return started
}

func startCluster(folder string, controllers bool, flags ...string) (*cluster, error) {
	binaries := os.Getenv("KUBERNETES_BIN")
	store, err := boot.NewStore(os.Getenv("STORE_BIN"), folder)
	if err != nil {
		return nil, err
	}
	if err := store.Start(); err != nil {
		return nil, err
	}
	started := &cluster{store: store, folder: folder, kubectl: filepath.Join(binaries, "kubectl")}
	started.plane, err = boot.Start(boot.Options{
		Binaries:       binaries,
		Folder:         folder,
		Stores:         []string{store.URL()},
		APIServerFlags: flags,
		Environment: []string{
			"KUBE_WATCHCACHE_CONSISTENCY_CHECKER=true", // a cache that differs from the store ends kube-apiserver
			"KUBE_PANIC_WATCH_DECODE_ERROR=true",
			"CONSISTENCY_CHECK_PERIOD=3s",
		},
		Controllers: controllers,
	})
	if err == nil {
		err = started.connect()
	}
	if err != nil {
		store.Kill()
		return nil, err
	}
	return started, nil
}

func (c *cluster) connect() (err error) {
	if c.etcd, err = connect(c.store.URL()); err != nil {
		return err
	}
	if c.config, err = clientcmd.BuildConfigFromFlags("", c.plane.Kubeconfig()); err != nil {
		return err
	}
	c.config.QPS = -1 // the tests set their own pace
	if c.client, err = client.NewForConfig(c.config); err != nil {
		return err
	}
	c.dynamic, err = dynamic.NewForConfig(c.config)
	return err
}

func (c *cluster) stop() error {
	_ = c.etcd.Close() // nothing waits for it
	if err := c.plane.Stop(); err != nil {
		c.store.Kill()
		return err
	}
	return c.store.Stop()
}

// connect returns a client of a store with the settings that kube-apiserver's has.
func connect(url string) (*clientv3.Client, error) {
	return clientv3.New(clientv3.Config{
		Endpoints:            []string{url},
		DialTimeout:          20 * time.Second,
		DialKeepAliveTime:    30 * time.Second,
		DialKeepAliveTimeout: 10 * time.Second,
		Logger:               zap.NewNop(),
	})
}

// namespace makes a namespace for one test.
func (c *cluster) namespace(t *testing.T) string {
	t.Helper()
	made, err := c.client.CoreV1().Namespaces().Create(t.Context(), &corev1.Namespace{
		ObjectMeta: metav1.ObjectMeta{GenerateName: "test-"},
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return made.Name
}

// run calls kubectl, wants success, and returns what it printed to stdout.
func (c *cluster) run(t *testing.T, input string, args ...string) string {
	t.Helper()
	output, problem, err := c.try(t, input, args...)
	if err != nil {
		t.Fatalf("kubectl %s: %v\n%s", strings.Join(args, " "), err, problem)
	}
	return output
}

// try calls kubectl and returns stdout, stderr and how it ended.
func (c *cluster) try(t *testing.T, input string, args ...string) (string, string, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	command := exec.CommandContext(ctx, c.kubectl, append([]string{"--kubeconfig=" + c.plane.Kubeconfig(),
		"--cache-dir=" + filepath.Join(c.folder, "kubectl")}, args...)...)
	var output, problem bytes.Buffer
	command.Stdin, command.Stdout, command.Stderr = strings.NewReader(input), &output, &problem
	err := command.Run()
	return output.String(), problem.String(), err
}

// get reads a path of kube-apiserver.
func (c *cluster) get(t *testing.T, path string) string {
	t.Helper()
	body, err := c.client.CoreV1().RESTClient().Get().RequestURI(path).DoRaw(t.Context())
	if err != nil {
		t.Fatalf("%s: %v\n%s", path, err, body)
	}
	return string(body)
}

// metric sums the samples of kube-apiserver's metric of that name whose labels include these, written as key="value".
func (c *cluster) metric(t *testing.T, name string, labels ...string) float64 {
	t.Helper()
	sum := 0.0
samples:
	for line := range strings.Lines(c.get(t, "/metrics")) {
		rest, found := strings.CutPrefix(line, name)
		if !found || (rest[0] != '{' && rest[0] != ' ') {
			continue
		}
		for _, label := range labels {
			if !strings.Contains(rest, label) {
				continue samples
			}
		}
		value, err := strconv.ParseFloat(strings.TrimSpace(rest[strings.LastIndexByte(rest, ' '):]), 64)
		if err != nil {
			t.Fatalf("reading the metric %q: %v", line, err)
		}
		sum += value
	}
	return sum
}

// eventually polls until the condition gives no error.
func eventually(t *testing.T, limit time.Duration, condition func() error) {
	t.Helper()
	deadline := time.Now().Add(limit)
	for {
		err := condition()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("not so after %s: %v", limit, err)
		}
		time.Sleep(100 * time.Millisecond)
	}
}

// revisionOf reads a resource version as the store's revision.
func revisionOf(t *testing.T, resourceVersion string) int64 {
	t.Helper()
	revision, err := strconv.ParseInt(resourceVersion, 10, 64)
	if err != nil {
		t.Fatal(err)
	}
	return revision
}
