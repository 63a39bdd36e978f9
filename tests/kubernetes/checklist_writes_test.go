package kubernetes

import (
	"slices"
	"testing"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/client/v3/kubernetes"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

func checkTransactions(t *testing.T) {
	t.Parallel()
	b := newBare(t)
	const key = "/registry/pods/a"
	kube := b.Kubernetes
	made, err := kube.OptimisticPut(t.Context(), key, []byte("1"), 0, kubernetes.PutOptions{})
	if err != nil || !made.Succeeded {
		t.Fatalf("creating: %+v, %v", made, err)
	}
	// A create has no other branch: its failure has no responses at all.
	again, err := b.Txn(t.Context()).If(clientv3.Compare(clientv3.ModRevision(key), "=", 0)).Then(clientv3.OpPut(key, "x")).Commit()
	if err != nil || again.Succeeded || len(again.Responses) != 0 || again.Header.Revision != made.Revision {
		t.Errorf("creating it again: %+v, %v", again, err)
	}
	// An update at revision 0 creates.
	other, err := kube.OptimisticPut(t.Context(), key+"b", []byte("1"), 0, kubernetes.PutOptions{GetOnFailure: true})
	if err != nil || !other.Succeeded || other.Revision != made.Revision+1 {
		t.Errorf("updating what is not there: %+v, %v", other, err)
	}
	updated, err := kube.OptimisticPut(t.Context(), key, []byte("2"), made.Revision, kubernetes.PutOptions{GetOnFailure: true})
	if err != nil || !updated.Succeeded || updated.Revision != other.Revision+1 {
		t.Errorf("updating: %+v, %v", updated, err)
	}
	stale, err := kube.OptimisticPut(t.Context(), key, []byte("3"), made.Revision, kubernetes.PutOptions{GetOnFailure: true})
	if err != nil || stale.Succeeded || string(stale.KV.Value) != "2" || stale.KV.ModRevision != updated.Revision ||
		stale.KV.CreateRevision != made.Revision || stale.KV.Version != 2 || stale.Revision != updated.Revision {
		t.Errorf("updating a stale revision: %+v, %v", stale, err)
	}
	kept, err := kube.OptimisticDelete(t.Context(), key, made.Revision, kubernetes.DeleteOptions{GetOnFailure: true})
	if err != nil || kept.Succeeded || string(kept.KV.Value) != "2" || kept.Revision != updated.Revision {
		t.Errorf("deleting a stale revision: %+v, %v", kept, err)
	}
	deleted, err := b.Txn(t.Context()).If(clientv3.Compare(clientv3.ModRevision(key), "=", updated.Revision)).
		Then(clientv3.OpDelete(key)).Else(clientv3.OpGet(key)).Commit()
	if err != nil || !deleted.Succeeded || deleted.Header.Revision != updated.Revision+1 ||
		deleted.Responses[0].GetResponseDeleteRange().GetDeleted() != 1 {
		t.Errorf("deleting: %+v, %v", deleted, err)
	}
	gone, err := kube.OptimisticDelete(t.Context(), key, updated.Revision, kubernetes.DeleteOptions{GetOnFailure: true})
	if err != nil || gone.Succeeded || gone.KV != nil || gone.Revision != deleted.Header.Revision {
		t.Errorf("deleting what is deleted: %+v, %v", gone, err)
	}
	recreated, err := kube.OptimisticPut(t.Context(), key, []byte("4"), 0, kubernetes.PutOptions{})
	if err != nil || !recreated.Succeeded {
		t.Fatalf("creating it once more: %+v, %v", recreated, err)
	}
	got, err := kube.Get(t.Context(), key, kubernetes.GetOptions{})
	if err != nil || got.KV.Version != 1 || got.KV.CreateRevision != recreated.Revision {
		t.Errorf("a new life: %+v, %v", got.KV, err)
	}
}

func checkLeaseDetach(t *testing.T) {
	t.Parallel()
	b := newBare(t)
	granted, err := b.Grant(t.Context(), 4)
	if err != nil || granted.ID <= 0 {
		t.Fatalf("granting: %+v, %v", granted, err)
	}
	for _, key := range []string{"/registry/events/kept", "/registry/events/lost"} {
		made, err := b.Kubernetes.OptimisticPut(t.Context(), key, []byte("1"), 0, kubernetes.PutOptions{LeaseID: granted.ID})
		if err != nil || !made.Succeeded {
			t.Fatalf("creating under a lease: %+v, %v", made, err)
		}
		if key == "/registry/events/kept" {
			if freed, err := b.Kubernetes.OptimisticPut(t.Context(), key, []byte("2"), made.Revision, kubernetes.PutOptions{}); err != nil || !freed.Succeeded {
				t.Fatalf("updating without a lease: %+v, %v", freed, err)
			}
		}
	}
	eventually(t, 15*time.Second, func() error {
		left, err := b.Kubernetes.List(t.Context(), "/registry/events/", kubernetes.ListOptions{})
		if err == nil && left.Count != 1 {
			err = rpctypes.ErrTimeout
		}
		if err == nil && (string(left.Kvs[0].Key) != "/registry/events/kept" || left.Kvs[0].Lease != 0) {
			t.Fatalf("left is %v", left.Kvs)
		}
		return err
	})
	if _, err := b.Kubernetes.OptimisticPut(t.Context(), "/registry/events/late", nil, 0, kubernetes.PutOptions{LeaseID: granted.ID}); err != rpctypes.ErrLeaseNotFound {
		t.Errorf("creating under an expired lease: %v", err)
	}
}

// checkCompactionLock is the compactor's round: a transaction on the version of compact_rev_key, and then a compaction.
func checkCompactionLock(t *testing.T) {
	t.Parallel()
	b := newBare(t)
	const lock = "compact_rev_key"
	take := func(version int64, value string) *clientv3.TxnResponse {
		t.Helper()
		response, err := b.Txn(t.Context()).If(clientv3.Compare(clientv3.Version(lock), "=", version)).
			Then(clientv3.OpPut(lock, value)).Else(clientv3.OpGet(lock)).Commit()
		if err != nil {
			t.Fatal(err)
		}
		return response
	}
	if won := take(0, "0"); !won.Succeeded {
		t.Errorf("the first round: %+v", won)
	}
	old := b.put(t, "/registry/a", "1")
	current := b.put(t, "/registry/a", "2")
	if won := take(1, "3"); !won.Succeeded {
		t.Errorf("the second round: %+v", won)
	}
	lost := take(1, "4")
	if kvs := lost.Responses[0].GetResponseRange().GetKvs(); lost.Succeeded || len(kvs) != 1 || kvs[0].Version != 2 || string(kvs[0].Value) != "3" {
		t.Errorf("a round that another won: %+v", lost)
	}
	b.compact(t, current)
	for _, test := range []struct {
		name    string
		call    func() error
		message string
	}{
		{"a read below", func() error {
			_, err := b.kv.Range(t.Context(), &pb.RangeRequest{Key: []byte("/registry/a"), Revision: old})
			return err
		}, "etcdserver: mvcc: required revision has been compacted"},
		{"compacting again", func() error {
			_, err := b.kv.Compact(t.Context(), &pb.CompactionRequest{Revision: current})
			return err
		}, "etcdserver: mvcc: required revision has been compacted"},
		{"compacting the future", func() error {
			_, err := b.kv.Compact(t.Context(), &pb.CompactionRequest{Revision: current + 100})
			return err
		}, "etcdserver: mvcc: required revision is a future revision"},
	} {
		if err := test.call(); status.Code(err) != codes.OutOfRange || status.Convert(err).Message() != test.message {
			t.Errorf("%s: %v", test.name, err)
		}
	}
	kept, err := b.Kubernetes.Get(t.Context(), "/registry/a", kubernetes.GetOptions{Revision: current})
	if err != nil || string(kept.KV.Value) != "2" {
		t.Errorf("reading at the compacted revision itself: %+v, %v", kept, err)
	}
}

func checkPrevKV(t *testing.T) {
	t.Parallel()
	b := newBare(t)
	const key = "/registry/pods/a"
	start, end := prefix("/registry/pods/")
	watch := b.openWatch(t)
	watch.create(t, &pb.WatchCreateRequest{Key: start, RangeEnd: end, PrevKv: true})
	if created := watch.next(t); !created.Created {
		t.Fatalf("instead of the acknowledgement: %v", created)
	}
	b.put(t, key, "1")
	b.put(t, key, "2")
	deletion, err := b.Delete(t.Context(), key)
	if err != nil {
		t.Fatal(err)
	}
	b.put(t, key, "3")

	next := func() (event struct {
		deleted, created                              bool
		value, previous                               string
		hasPrevious                                   bool
		createRevision, modRevision, version, leaseID int64
	}) {
		t.Helper()
		response := watch.next(t)
		if len(response.Events) != 1 {
			t.Fatalf("%d events in one response: %v", len(response.Events), response)
		}
		got := response.Events[0]
		event.deleted, event.created = got.Type == clientv3.EventTypeDelete, got.Kv.CreateRevision == got.Kv.ModRevision
		event.value, event.previous, event.hasPrevious = string(got.Kv.Value), string(got.PrevKv.GetValue()), got.PrevKv != nil
		event.createRevision, event.modRevision, event.version, event.leaseID = got.Kv.CreateRevision, got.Kv.ModRevision, got.Kv.Version, got.Kv.Lease
		return event
	}
	if made := next(); made.deleted || !made.created || made.hasPrevious || made.value != "1" {
		t.Errorf("the creation: %+v", made)
	}
	if updated := next(); updated.deleted || updated.created || updated.previous != "1" || updated.value != "2" || updated.version != 2 {
		t.Errorf("the update: %+v", updated)
	}
	if deleted := next(); !deleted.deleted || deleted.previous != "2" || deleted.value != "" || deleted.createRevision != 0 ||
		deleted.version != 0 || deleted.modRevision != deletion.Header.Revision {
		t.Errorf("the deletion: %+v", deleted)
	}
	if again := next(); again.deleted || !again.created || again.hasPrevious || again.version != 1 || again.value != "3" {
		t.Errorf("the creation after it: %+v", again)
	}
	// History shows the same; only what was compacted away is not there as a previous value.
	compacted := deletion.Header.Revision
	b.compact(t, compacted)
	late := b.openWatch(t)
	late.create(t, &pb.WatchCreateRequest{Key: start, RangeEnd: end, PrevKv: true, StartRevision: compacted + 1})
	late.next(t)
	if response := late.next(t); len(response.Events) != 1 || response.Events[0].PrevKv != nil || string(response.Events[0].Kv.Value) != "3" {
		t.Errorf("from after the compaction: %v", response)
	}
}

func checkPrevKVOfExpiry(t *testing.T) {
	t.Parallel()
	b := newBare(t)
	start, end := prefix("/registry/events/")
	watch := b.openWatch(t)
	watch.create(t, &pb.WatchCreateRequest{Key: start, RangeEnd: end, PrevKv: true,
		Filters: []pb.WatchCreateRequest_FilterType{pb.WatchCreateRequest_NOPUT}})
	watch.next(t)
	begun := time.Now()
	granted, err := b.Grant(t.Context(), 3)
	if err != nil {
		t.Fatal(err)
	}
	names := []string{"/registry/events/a", "/registry/events/b", "/registry/events/c"}
	for _, name := range names {
		if _, err := b.Put(t.Context(), name, "of "+name, clientv3.WithLease(granted.ID)); err != nil {
			t.Fatal(err)
		}
	}
	// All keys of a lease go in one revision, hence in one response.
	response := watch.next(t)
	if lived := time.Since(begun); lived < 3*time.Second {
		t.Errorf("a lease of 3 s ended after %s", lived)
	}
	gone := []string{}
	for _, event := range response.Events {
		if event.Type != clientv3.EventTypeDelete || string(event.PrevKv.GetValue()) != "of "+string(event.Kv.Key) ||
			event.PrevKv.GetLease() != int64(granted.ID) || event.Kv.ModRevision != response.Header.Revision {
			t.Errorf("the expiry: %v", event)
		}
		gone = append(gone, string(event.Kv.Key))
	}
	slices.Sort(gone)
	if !slices.Equal(gone, names) {
		t.Errorf("one response deletes %v", gone)
	}
}
