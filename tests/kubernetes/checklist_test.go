package kubernetes

import (
	"context"
	"math"
	"os"
	"testing"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/client/v3/kubernetes"
	"go.uber.org/zap"
	"google.golang.org/grpc"

	"skeg.local/boot"
)

// TestChecklist is the list of what kube-apiserver needs from its store, a test or a few for each line. Line 12 (no leader) needs
// several members and is not here.
func TestChecklist(t *testing.T) {
	for _, line := range []struct {
		name  string
		check func(*testing.T)
	}{
		// These measure or break the store, and run alone. The others say t.Parallel.
		{"14-probes-under-load", checkProbesUnderLoad},
		{"18-crash", checkCrash},
		{"01-fresh-store", checkFreshStore},
		{"02-header-revisions", checkHeaderRevisions},
		{"03-counts", checkCounts},
		{"04-continue-keys", checkContinueKeys},
		{"04-large-values", checkLargeValues},
		{"05-range-stream", checkRangeStream},
		{"05-range-stream-compacted", checkRangeStreamCompacted},
		{"05-range-stream-slow-reader", checkRangeStreamSlowReader},
		{"06-transactions", checkTransactions},
		{"06-lease-detach", checkLeaseDetach},
		{"07-compaction-lock", checkCompactionLock},
		{"08-watch-start-revisions", checkWatchStartRevisions},
		{"08-watch-far-past-while-writing", checkWatchFarPast},
		{"08-watch-slow-reader", checkWatchSlowReader},
		{"09-prev-kv", checkPrevKV},
		{"09-prev-kv-of-expiry", checkPrevKVOfExpiry},
		{"10-watch-acknowledgements", checkWatchAcknowledgements},
		{"11-progress-idle", checkProgressIdle},
		{"11-progress-busy", checkProgressBusy},
		{"11-progress-unsynced", checkProgressUnsynced},
		{"11-progress-durable", checkProgressDurable},
		{"11-progress-interval", checkProgressInterval},
		{"13-status", checkStatus},
		{"15-thousand-connections", checkThousandConnections},
		{"16-http", checkHTTP},
		{"16-command-line", checkCommandLine},
		{"16-sigterm", checkSIGTERM},
		{"17-consistency-checker", checkChurn},
	} {
		t.Run(line.name, line.check)
	}
}

// bare is a store without a control plane, and clients of it.
type bare struct {
	*clientv3.Client
	Kubernetes kubernetes.Interface
	store      *boot.Store
	kv         pb.KVClient
	watch      pb.WatchClient
}

func newBare(t *testing.T, flags ...string) *bare {
	t.Helper()
	store, err := boot.NewStore(os.Getenv("STORE_BIN"), t.TempDir(), flags...)
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
		Endpoints: []string{store.URL()}, DialTimeout: 20 * time.Second, Logger: zap.NewNop(),
		DialKeepAliveTime: 30 * time.Second, DialKeepAliveTimeout: 10 * time.Second,
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = client.Close() }) // nothing waits for it
	connection := client.ActiveConnection()
	return &bare{Client: client.Client, Kubernetes: client, store: store, kv: pb.NewKVClient(connection), watch: pb.NewWatchClient(connection)}
}

// put writes a key and returns the revision.
func (b *bare) put(t *testing.T, key, value string) int64 {
	t.Helper()
	response, err := b.Put(t.Context(), key, value)
	if err != nil {
		t.Fatal(err)
	}
	return response.Header.Revision
}

// fill writes count keys, named by name, with as few requests as may be.
func (b *bare) fill(t *testing.T, count int, name func(int) string, value string) int64 {
	t.Helper()
	const most = 100 // operations in a transaction; the default limit is 128
	revision := int64(0)
	for from := 0; from < count; from += most {
		operations := []clientv3.Op{}
		for i := from; i < min(count, from+most); i++ {
			operations = append(operations, clientv3.OpPut(name(i), value))
		}
		response, err := b.Txn(t.Context()).Then(operations...).Commit()
		if err != nil {
			t.Fatal(err)
		}
		revision = response.Header.Revision
	}
	return revision
}

// compact compacts to a revision.
func (b *bare) compact(t *testing.T, revision int64) {
	t.Helper()
	if _, err := b.Compact(t.Context(), revision); err != nil {
		t.Fatal(err)
	}
}

// rawWatch is a watch stream without the client's own logic in between. Responses are read in the background.
type rawWatch struct {
	pb.Watch_WatchClient
	responses chan *pb.WatchResponse
	cancel    context.CancelFunc
}

func (b *bare) openWatch(t *testing.T) *rawWatch {
	t.Helper()
	ctx, cancel := context.WithCancel(clientv3.WithRequireLeader(context.Background()))
	t.Cleanup(cancel)
	stream, err := b.watch.Watch(ctx, unbounded)
	if err != nil {
		t.Fatal(err)
	}
	watch := &rawWatch{Watch_WatchClient: stream, responses: make(chan *pb.WatchResponse, 1024), cancel: cancel}
	go func() {
		defer close(watch.responses)
		for {
			response, err := stream.Recv()
			if err != nil {
				return
			}
			watch.responses <- response
		}
	}()
	return watch
}

func (w *rawWatch) create(t *testing.T, request *pb.WatchCreateRequest) {
	t.Helper()
	w.send(t, &pb.WatchRequest{RequestUnion: &pb.WatchRequest_CreateRequest{CreateRequest: request}})
}

func (w *rawWatch) progress(t *testing.T) {
	t.Helper()
	w.send(t, &pb.WatchRequest{RequestUnion: &pb.WatchRequest_ProgressRequest{ProgressRequest: &pb.WatchProgressRequest{}}})
}

func (w *rawWatch) remove(t *testing.T, id int64) {
	t.Helper()
	w.send(t, &pb.WatchRequest{RequestUnion: &pb.WatchRequest_CancelRequest{CancelRequest: &pb.WatchCancelRequest{WatchId: id}}})
}

func (w *rawWatch) send(t *testing.T, request *pb.WatchRequest) {
	t.Helper()
	if err := w.Send(request); err != nil {
		t.Fatal(err)
	}
}

// next waits for a response.
func (w *rawWatch) next(t *testing.T) *pb.WatchResponse {
	t.Helper()
	select {
	case response, open := <-w.responses:
		if !open {
			t.Fatal("the watch stream ended")
		}
		return response
	case <-time.After(20 * time.Second):
		t.Fatal("no watch response in 20 s")
	}
	return nil
}

// silent wants no response for a while.
func (w *rawWatch) silent(t *testing.T, length time.Duration) {
	t.Helper()
	select {
	case response, open := <-w.responses:
		t.Errorf("instead of silence: %v (open: %t)", response, open)
	case <-time.After(length):
	}
}

// unbounded is what the client library sets for its own calls: answers of any size.
var unbounded = grpc.MaxCallRecvMsgSize(math.MaxInt32)

// prefix is a range over the keys that begin so.
func prefix(key string) (start, end []byte) {
	return []byte(key), []byte(clientv3.GetPrefixRangeEnd(key))
}

// keysOf lists the keys of a response.
func keysOf(kvs []*mvccpb.KeyValue) []string {
	keys := make([]string, len(kvs))
	for at, kv := range kvs {
		keys[at] = string(kv.Key)
	}
	return keys
}
