package conformance

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"skeg.local/conformance/pair"
)

// pool serves all tests, etcds (both roles played by etcd) those that test the tests; etcdctl is the client binary, etcdutl the one for
// files, skegutl ours; its name is that of the server with "utl" behind it.
var (
	pool    *pair.Pool
	etcds   *pair.Pool
	etcdctl string
	etcdutl string
	skegutl string
)

func TestMain(m *testing.M) {
	os.Exit(run(m))
}

func run(m *testing.M) int {
	etcd, skeg := os.Getenv("ETCD_BIN"), os.Getenv("SKEG_BIN")
	if etcd == "" || skeg == "" {
		fmt.Fprintln(os.Stderr, "ETCD_BIN and SKEG_BIN must name the servers: run scripts/conformance.sh")
		return 1
	}
	dir, err := os.MkdirTemp("", "conformance-")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer func() { _ = os.RemoveAll(dir) }()
	etcdctl, etcdutl = filepath.Join(filepath.Dir(etcd), "etcdctl"), filepath.Join(filepath.Dir(etcd), "etcdutl")
	skegutl = skeg + "utl"
	pool = &pair.Pool{EtcdBin: etcd, SkegBin: skeg, Dir: dir}
	defer pool.Stop()
	etcds = &pair.Pool{EtcdBin: etcd, SkegBin: etcd, Dir: dir}
	defer etcds.Stop()
	return m.Run()
}

// scenario is one script and the servers it needs.
type scenario struct {
	name string
	// fresh asks for servers at revision 1 without a history. Flags are given to both servers.
	fresh  bool
	flags  []string
	script func(*pair.Session)
}

// check runs each scenario as a subtest.
func check(t *testing.T, scenarios []scenario) {
	t.Helper()
	for _, scenario := range scenarios {
		t.Run(scenario.name, func(t *testing.T) {
			stores := stores(t, scenario)
			if difference := stores.Compare(scenario.script); difference != nil {
				t.Error("the stores differ:\n" + difference.Text)
			}
			for _, store := range []*pair.Store{stores.Etcd, stores.Skeg} {
				if !store.Alive() {
					t.Errorf("%s has ended:\n%s", store.Name, store.Log())
				}
			}
		})
	}
}

func stores(t *testing.T, scenario scenario) *pair.Pair {
	t.Helper()
	if scenario.fresh {
		return freshPair(t, scenario.flags...)
	}
	stores, err := pool.Shared(scenario.flags...)
	if err != nil {
		t.Fatal(err)
	}
	return stores
}

func freshPair(t *testing.T, flags ...string) *pair.Pair {
	t.Helper()
	stores, err := pool.Fresh(flags...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(stores.Stop)
	return stores
}

// onlySkeg skips a test of a deliberate difference when etcd plays skeg.
func onlySkeg(t *testing.T, store *pair.Store) {
	t.Helper()
	if !store.IsSkeg {
		t.Skip("SKEG_BIN is an etcd")
	}
}
