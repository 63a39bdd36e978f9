package kubernetes

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/keepalive"
	"k8s.io/apimachinery/pkg/util/version"
)

func checkStatus(t *testing.T) {
	t.Parallel()
	b := newBare(t)
	b.put(t, "/registry/a", "1")
	status, err := b.Status(t.Context(), b.Endpoints()[0])
	if err != nil {
		t.Fatal(err)
	}
	if status.DbSize <= 0 || status.DbSizeInUse <= 0 || status.Leader == 0 || status.RaftTerm == 0 || status.RaftIndex == 0 ||
		status.RaftAppliedIndex == 0 || status.Header.MemberId == 0 || status.Header.ClusterId == 0 || status.Leader != status.Header.MemberId {
		t.Errorf("the status has an empty field: %+v", status)
	}
	wantVersion(t, status.Version)
}

// wantVersion wants what kube-apiserver wants before it asks for progress notifications, and kubeadm 1.36 of an external store.
func wantVersion(t *testing.T, text string) {
	t.Helper()
	parsed, err := version.ParseSemantic(text)
	if err != nil || parsed.LessThan(version.MustParseSemantic("3.5.24")) {
		t.Errorf("the version is %q, %v", text, err)
	}
}

func checkProbesUnderLoad(t *testing.T) {
	b := newBare(t)
	ctx, cancel := context.WithTimeout(t.Context(), 4*time.Second)
	defer cancel()
	var writers sync.WaitGroup
	for writer := range 50 {
		writers.Go(func() {
			for i := 0; ctx.Err() == nil; i++ {
				_, _ = b.Put(ctx, fmt.Sprintf("/registry/pods/%d-%d", writer, i%100), strings.Repeat("v", 1_000)) // ctx ends in one
			}
		})
	}
	times := []time.Duration{}
	for ctx.Err() == nil {
		begun := time.Now()
		got, err := b.Get(t.Context(), "/registry/health")
		if err != nil || got.Count != 0 {
			t.Fatalf("a probe: %v, %v", got, err)
		}
		times = append(times, time.Since(begun))
		time.Sleep(5 * time.Millisecond)
	}
	writers.Wait()
	slices.Sort(times)
	if p99 := times[len(times)*99/100]; p99 >= 100*time.Millisecond || len(times) < 50 {
		t.Errorf("of %d probes the slowest hundredth took %s and more", len(times), p99)
	}
}

// checkThousandConnections is a control plane with a thousand resources: each has its own connection with one watch, which pings. Ten
// seconds between pings is the least that the client library allows; kube-apiserver has thirty.
func checkThousandConnections(t *testing.T) {
	t.Parallel()
	b := newBare(t)
	const count = 1_000
	watches := make([]grpc.BidiStreamingClient[pb.WatchRequest, pb.WatchResponse], count)
	for i := range watches {
		connection, err := grpc.NewClient("passthrough:///"+strings.TrimPrefix(b.store.URL(), "http://"),
			grpc.WithTransportCredentials(insecure.NewCredentials()),
			grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: 10 * time.Second, Timeout: 10 * time.Second}))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = connection.Close() }) // nothing waits for it
		if watches[i], err = pb.NewWatchClient(connection).Watch(t.Context()); err != nil {
			t.Fatalf("connection %d: %v", i, err)
		}
		if err := watches[i].Send(&pb.WatchRequest{RequestUnion: &pb.WatchRequest_CreateRequest{
			CreateRequest: &pb.WatchCreateRequest{Key: []byte("/registry/boats/"), RangeEnd: []byte("/registry/boats0")}}}); err != nil {
			t.Fatalf("connection %d: %v", i, err)
		}
	}
	for i, watch := range watches {
		if created, err := watch.Recv(); err != nil || !created.Created {
			t.Fatalf("connection %d: %v, %v", i, created, err)
		}
	}
	time.Sleep(25 * time.Second)
	written := b.put(t, "/registry/boats/a", "1")
	for i, watch := range watches {
		if response, err := watch.Recv(); err != nil || len(response.Events) != 1 || response.Events[0].Kv.ModRevision != written {
			t.Fatalf("connection %d: %v, %v", i, response, err)
		}
	}
}

// checkHTTP asks over HTTP/1 on the client port, as installers and scripts do. The JSON gateway is not among it yet.
func checkHTTP(t *testing.T) {
	t.Parallel()
	b := newBare(t)
	get := func(path string) []byte {
		t.Helper()
		response, err := http.Get(b.store.URL() + path)
		if err != nil {
			t.Fatal(err)
		}
		defer response.Body.Close()
		body, err := io.ReadAll(response.Body)
		if err != nil || response.StatusCode != http.StatusOK {
			t.Errorf("%s: %s, %v, %s", path, response.Status, err, body)
		}
		return body
	}
	var health struct{ Health string }
	if body := get("/health"); json.Unmarshal(body, &health) != nil || health.Health != "true" {
		t.Errorf("/health: %s", body)
	}
	var versions struct{ EtcdServer, EtcdCluster string }
	if body := get("/version"); json.Unmarshal(body, &versions) != nil {
		t.Errorf("/version: %s", body)
	}
	wantVersion(t, versions.EtcdServer)
	wantVersion(t, versions.EtcdCluster)
	for _, path := range []string{"/livez", "/readyz"} {
		get(path)
	}
	metrics := string(get("/metrics"))
	for _, sample := range []string{"etcd_server_has_leader 1", "etcd_server_is_leader 1", "etcd_mvcc_db_total_size_in_bytes "} {
		if !strings.Contains(metrics, "\n"+sample) {
			t.Errorf("/metrics lacks %q", sample)
		}
	}
}

func checkCommandLine(t *testing.T) {
	t.Parallel()
	run := func(flag string) string {
		t.Helper()
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		defer cancel()
		output, err := exec.CommandContext(ctx, os.Getenv("STORE_BIN"), flag).CombinedOutput()
		if err != nil {
			t.Errorf("%s: %v", flag, err)
		}
		return string(output)
	}
	// Scripts cut the third field of the first line.
	first, _, _ := strings.Cut(run("--version"), "\n")
	if fields := strings.Fields(first); len(fields) != 3 || fields[0] != "etcd" || fields[1] != "Version:" {
		t.Errorf("--version begins with %q", first)
	} else {
		wantVersion(t, fields[2])
	}
	// envtest looks for flags in the help before it uses them.
	help := run("--help")
	for _, flag := range []string{"--unsafe-no-fsync", "--listen-client-urls", "--data-dir", "--quota-backend-bytes", "--watch-progress-notify-interval"} {
		if !strings.Contains(help, flag+" ") {
			t.Errorf("--help lacks %s", flag)
		}
	}
	// Kubernetes' integration framework writes flags with one dash.
	b := newBare(t, "-log-level=warn", "-unsafe-no-fsync")
	b.put(t, "/registry/a", "1")
}

func checkSIGTERM(t *testing.T) {
	t.Parallel()
	b := newBare(t)
	watch := b.openWatch(t)
	watch.create(t, &pb.WatchCreateRequest{Key: []byte("/registry/a")})
	watch.next(t)
	written := b.put(t, "/registry/a", "1")
	watch.next(t)
	watch.cancel() // with an open stream etcd waits seven seconds; the connection stays
	// Kubernetes' integration framework kills it after five seconds.
	if err := b.store.Process().Stop(5 * time.Second); err != nil {
		t.Error(err)
	}
	if err := b.store.Start(); err != nil {
		t.Fatal(err)
	}
	got, err := b.Get(t.Context(), "/registry/a")
	if err != nil || len(got.Kvs) != 1 || got.Kvs[0].ModRevision != written {
		t.Errorf("after the restart: %v, %v", got, err)
	}
}
