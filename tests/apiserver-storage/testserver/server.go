// Package testserver takes the place of the package of that name in k8s.io/apiserver/pkg/storage/etcd3, in a copy of that
// module made for one test run (cmd/suite). The original embeds an etcd server in the test; this one starts the store
// that STORE_BIN names as a process. The exported functions are the original's, since its tests call them.
package testserver

import (
	"os"
	"strconv"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/client/v3/kubernetes"
	"go.etcd.io/etcd/server/v3/embed"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest"
	storagetesting "k8s.io/apiserver/pkg/storage/testing"

	"skeg.local/boot"
)

// NewTestConfig returns a configuration that RunEtcd understands: tests change the progress interval and the quota in it.
// Addresses in it mean nothing here.
func NewTestConfig(t testing.TB) *embed.Config {
	config := embed.NewConfig()
	config.Dir = t.TempDir()
	config.UnsafeNoFsync = true // as the original: no test starts its store again
	return config
}

// RunEtcd starts the store, with NewTestConfig if config is nil, and returns a client of it. Both end with the test.
func RunEtcd(t testing.TB, config *embed.Config) *kubernetes.Client {
	t.Helper()
	if config == nil {
		config = NewTestConfig(t)
	}
	binary := os.Getenv("STORE_BIN")
	if binary == "" {
		t.Fatal("STORE_BIN must name the store: run scripts/apiserver-storage.sh")
	}
	store, err := boot.NewStore(binary, config.Dir, flags(config)...)
	if err != nil {
		t.Fatal(err)
	}
	if err := store.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if state := store.Process().State(); state != nil {
			t.Errorf("the store ended during the test (%s):\n%s", state, store.Process().LogTail(20))
		}
		if err := store.Stop(); err != nil {
			t.Error(err)
		}
	})

	client, err := kubernetes.New(clientv3.Config{
		Endpoints:   []string{store.URL()},
		DialTimeout: 10 * time.Second,
		Logger:      zaptest.NewLogger(t, zaptest.Level(zapcore.ErrorLevel)).Named("client"),
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = client.Close() }) // a test may have closed it
	// The suite counts calls through these, as the original arranges.
	recorder := storagetesting.NewKubernetesRecorder(client.Kubernetes)
	client.KV = storagetesting.NewKVRecorder(client.KV, recorder)
	client.Kubernetes = recorder
	return client
}

func flags(config *embed.Config) []string {
	flags := []string{"--unsafe-no-fsync=" + strconv.FormatBool(config.UnsafeNoFsync)}
	if config.WatchProgressNotifyInterval != 0 {
		flags = append(flags, "--watch-progress-notify-interval="+config.WatchProgressNotifyInterval.String())
	}
	if config.QuotaBackendBytes != 0 {
		flags = append(flags, "--quota-backend-bytes="+strconv.FormatInt(config.QuotaBackendBytes, 10))
	}
	return flags
}
