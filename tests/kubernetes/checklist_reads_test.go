package kubernetes

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"testing"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/client/v3/kubernetes"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

func checkFreshStore(t *testing.T) {
	t.Parallel()
	b := newBare(t)
	for range 3 {
		got, err := b.Kubernetes.Get(t.Context(), "/registry/pods", kubernetes.GetOptions{})
		if err != nil || got.Revision != 1 || got.KV != nil {
			t.Fatalf("reading a fresh store: %+v, %v", got, err)
		}
	}
	failed, err := b.Kubernetes.OptimisticPut(t.Context(), "/registry/a", []byte("1"), 7, kubernetes.PutOptions{GetOnFailure: true})
	if err != nil || failed.Succeeded || failed.Revision != 1 || failed.KV != nil {
		t.Errorf("a failed update: %+v, %v", failed, err)
	}
	made, err := b.Kubernetes.OptimisticPut(t.Context(), "/registry/a", []byte("1"), 0, kubernetes.PutOptions{})
	if err != nil || !made.Succeeded || made.Revision != 2 {
		t.Errorf("the first write: %+v, %v", made, err)
	}
}

func checkHeaderRevisions(t *testing.T) {
	t.Parallel()
	b := newBare(t)
	first := b.put(t, "/registry/a", "1")
	second := b.put(t, "/registry/a", "2")
	if second != first+1 {
		t.Errorf("two writes are at %d and %d", first, second)
	}
	pinned, err := b.Kubernetes.List(t.Context(), "/registry/", kubernetes.ListOptions{Revision: first})
	if err != nil || pinned.Revision != second || string(pinned.Kvs[0].Value) != "1" {
		t.Errorf("a list at %d: %+v, %v; the header must say %d", first, pinned, err, second)
	}
	unpinned, err := b.Kubernetes.List(t.Context(), "/registry/", kubernetes.ListOptions{})
	if err != nil || unpinned.Revision != second || string(unpinned.Kvs[0].Value) != "2" {
		t.Errorf("a list: %+v, %v", unpinned, err)
	}
	failed, err := b.Kubernetes.OptimisticPut(t.Context(), "/registry/a", []byte("3"), first, kubernetes.PutOptions{GetOnFailure: true})
	if err != nil || failed.Succeeded || failed.Revision != second || failed.KV.ModRevision != second {
		t.Errorf("a failed update: %+v, %v", failed, err)
	}
	made, err := b.Kubernetes.OptimisticPut(t.Context(), "/registry/a", []byte("2"), second, kubernetes.PutOptions{})
	if err != nil || !made.Succeeded || made.Revision != second+1 {
		t.Errorf("an update with an equal value: %+v, %v", made, err)
	}
	got, err := b.Kubernetes.Get(t.Context(), "/registry/a", kubernetes.GetOptions{})
	if err != nil || got.KV.ModRevision != made.Revision {
		t.Errorf("the object is at %+v, the answer said %d (%v)", got.KV, made.Revision, err)
	}
	for _, pin := range []int64{0, first} {
		whole := b.stream(t, &pb.RangeRequest{Key: []byte("/registry/"), RangeEnd: []byte("/registry0"), Revision: pin})
		if whole.header.GetRevision() != made.Revision {
			t.Errorf("a stream at %d says %d in its header, want %d", pin, whole.header.GetRevision(), made.Revision)
		}
	}
	if _, err := b.Kubernetes.List(t.Context(), "/registry/", kubernetes.ListOptions{Revision: made.Revision + 1}); err != rpctypes.ErrFutureRev {
		t.Errorf("a list in the future: %v", err)
	}
}

func checkCounts(t *testing.T) {
	t.Parallel()
	b := newBare(t)
	before := b.fill(t, 300, func(i int) string { return fmt.Sprintf("/registry/pods/%03d", i) }, "v")
	b.fill(t, 50, func(i int) string { return fmt.Sprintf("/registry/pods.metrics/%03d", i) }, "v")
	if _, err := b.Delete(t.Context(), "/registry/pods/1", clientv3.WithPrefix()); err != nil {
		t.Fatal(err)
	}
	if count, err := b.Kubernetes.Count(t.Context(), "/registry/pods/", kubernetes.CountOptions{}); err != nil || count != 200 {
		t.Errorf("the count is %d, %v", count, err)
	}
	for _, test := range []struct {
		name    string
		options kubernetes.ListOptions
		count   int64
		kvs     int
	}{
		{"limited", kubernetes.ListOptions{Limit: 7}, 200, 7},
		{"from the middle", kubernetes.ListOptions{Limit: 7, Continue: "/registry/pods/250\x00"}, 49, 7},
		{"at an older revision", kubernetes.ListOptions{Limit: 7, Revision: before}, 300, 7},
		{"from the middle, at an older revision", kubernetes.ListOptions{Limit: 500, Continue: "/registry/pods/150", Revision: before}, 150, 150},
		{"past the end", kubernetes.ListOptions{Limit: 7, Continue: "/registry/pods/999"}, 0, 0},
	} {
		got, err := b.Kubernetes.List(t.Context(), "/registry/pods/", test.options)
		if err != nil || got.Count != test.count || len(got.Kvs) != test.kvs {
			t.Errorf("%s: count %d with %d objects, want %d with %d (%v)", test.name, got.Count, len(got.Kvs), test.count, test.kvs, err)
		}
	}
}

func checkContinueKeys(t *testing.T) {
	t.Parallel()
	b := newBare(t)
	const total, page = 25_000, 10_000
	name := func(i int) string { return fmt.Sprintf("/registry/pods/ns/%05d", i) }
	b.fill(t, total, name, strings.Repeat("v", 100))
	listed, next, sizes := 0, "", []int{}
	pinned := int64(0)
	for {
		got, err := b.Kubernetes.List(t.Context(), "/registry/pods/", kubernetes.ListOptions{Limit: page, Continue: next, Revision: pinned})
		if err != nil {
			t.Fatal(err)
		}
		if pinned == 0 {
			pinned = got.Revision
			b.put(t, name(total-1)+"-late", "") // not in the pages to come
		}
		for at, kv := range got.Kvs {
			if string(kv.Key) != name(listed+at) {
				t.Fatalf("object %d is %s", listed+at, kv.Key)
			}
		}
		listed += len(got.Kvs)
		sizes = append(sizes, len(got.Kvs))
		if int64(len(got.Kvs)) == got.Count {
			break
		}
		next = string(got.Kvs[len(got.Kvs)-1].Key) + "\x00"
	}
	if !slices.Equal(sizes, []int{page, page, total - 2*page}) {
		t.Errorf("the pages hold %v", sizes)
	}
	// Tokens that API users hold may name a key itself: it is then the first.
	for start, first := range map[string]string{name(123): name(123), name(123) + "\x00": name(124)} {
		got, err := b.Kubernetes.List(t.Context(), "/registry/pods/", kubernetes.ListOptions{Limit: 1, Continue: start})
		if err != nil || string(got.Kvs[0].Key) != first {
			t.Errorf("continuing at %q: %v, %v", start, keysOf(got.Kvs), err)
		}
	}
}

func checkLargeValues(t *testing.T) {
	t.Parallel()
	b := newBare(t)
	for _, size := range []int{0, 1, 64 << 10, 1_500_000} {
		key := fmt.Sprintf("/registry/configmaps/%d", size)
		value := bytes.Repeat([]byte{0, 'k', 0xff}, size/3+1)[:size]
		made, err := b.Kubernetes.OptimisticPut(t.Context(), key, value, 0, kubernetes.PutOptions{})
		if err != nil || !made.Succeeded {
			t.Fatalf("writing %d bytes: %v", size, err)
		}
		got, err := b.Kubernetes.Get(t.Context(), key, kubernetes.GetOptions{})
		if err != nil || got.KV == nil || !bytes.Equal(got.KV.Value, value) {
			t.Errorf("reading %d bytes: %v", size, err)
		}
		again, err := b.Kubernetes.OptimisticPut(t.Context(), key, value, made.Revision, kubernetes.PutOptions{})
		if err != nil || !again.Succeeded || again.Revision != made.Revision+1 {
			t.Errorf("writing the same %d bytes again: %+v, %v", size, again, err)
		}
	}
	_, err := b.Kubernetes.OptimisticPut(t.Context(), "/registry/configmaps/huge", make([]byte, 1_600_000), 0, kubernetes.PutOptions{})
	if err != rpctypes.ErrRequestTooLarge {
		t.Errorf("writing more than fits a request: %v", err)
	}
	whole, err := b.Kubernetes.List(t.Context(), "/registry/configmaps/", kubernetes.ListOptions{})
	if err != nil || whole.Count != 4 {
		t.Errorf("listing all: %d, %v", whole.Count, err)
	}
}

// streamed is what a RangeStream gave.
type streamed struct {
	header *pb.ResponseHeader
	kvs    []*mvccpb.KeyValue
	chunks []int
	count  int64
	more   bool
}

// stream reads a whole RangeStream and checks what holds for each: header, count and more come with the last message only, and no
// other message is without keys.
func (b *bare) stream(t *testing.T, request *pb.RangeRequest) streamed {
	t.Helper()
	got, err := b.tryStream(t, request)
	if err != nil {
		t.Fatal(err)
	}
	return got
}

func (b *bare) tryStream(t *testing.T, request *pb.RangeRequest) (streamed, error) {
	t.Helper()
	stream, err := b.kv.RangeStream(t.Context(), request, unbounded)
	if err != nil {
		return streamed{}, err
	}
	whole := streamed{}
	for {
		message, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			if whole.header == nil {
				t.Error("the stream ended without a header")
			}
			return whole, nil
		}
		if err != nil {
			return whole, err
		}
		if whole.header != nil {
			t.Error("a message follows the one with the header")
		}
		part := message.GetRangeResponse()
		whole.header, whole.count, whole.more = part.GetHeader(), part.GetCount(), part.GetMore()
		if part.GetHeader() == nil && (len(part.GetKvs()) == 0 || part.GetCount() != 0 || part.GetMore()) {
			t.Errorf("a message before the last has %d keys, count %d, more %t", len(part.GetKvs()), part.GetCount(), part.GetMore())
		}
		whole.kvs = append(whole.kvs, part.GetKvs()...)
		whole.chunks = append(whole.chunks, len(part.GetKvs()))
	}
}

func checkRangeStream(t *testing.T) {
	t.Parallel()
	b := newBare(t)
	start, end := prefix("/registry/pods/")
	if empty := b.stream(t, &pb.RangeRequest{Key: start, RangeEnd: end}); len(empty.kvs) != 0 || empty.count != 0 || empty.more || empty.header.GetRevision() != 1 {
		t.Errorf("an empty range: %+v", empty)
	}
	name := func(i int) string { return fmt.Sprintf("/registry/pods/%04d", i) }
	before := b.fill(t, 5_000, name, strings.Repeat("v", 1_000))
	after := b.put(t, name(5_000), "late")

	whole := b.stream(t, &pb.RangeRequest{Key: start, RangeEnd: end})
	if len(whole.kvs) != 5_001 || whole.count != 5_001 || whole.more || whole.header.GetRevision() != after {
		t.Errorf("the whole range: %d keys, count %d, more %t, header %v", len(whole.kvs), whole.count, whole.more, whole.header)
	}
	for at, kv := range whole.kvs {
		if string(kv.Key) != name(at) {
			t.Fatalf("object %d is %s", at, kv.Key)
		}
	}
	// Messages grow from a first small one to what a request may hold, so that decoding starts early and ends in few messages.
	if len(whole.chunks) < 3 || len(whole.chunks) > 100 || whole.chunks[0] > slices.Max(whole.chunks) {
		t.Errorf("%d messages of %v keys", len(whole.chunks), whole.chunks)
	}
	for at, kvs := range whole.chunks {
		if kvs*1_000 > 3<<20 {
			t.Errorf("message %d holds %d keys of 1 kB", at, kvs)
		}
	}
	cut := b.stream(t, &pb.RangeRequest{Key: start, RangeEnd: end, Limit: 1_234})
	if len(cut.kvs) != 1_234 || cut.count != 5_001 || !cut.more {
		t.Errorf("cut by a limit: %d keys, count %d, more %t", len(cut.kvs), cut.count, cut.more)
	}
	middle := b.stream(t, &pb.RangeRequest{Key: []byte(name(4_990) + "\x00"), RangeEnd: end, Revision: before, Limit: 100})
	if len(middle.kvs) != 9 || middle.count != 9 || middle.more || middle.header.GetRevision() != after {
		t.Errorf("from the middle at an older revision: %d keys, count %d, more %t, header %v", len(middle.kvs), middle.count, middle.more, middle.header)
	}
	_, err := b.tryStream(t, &pb.RangeRequest{Key: start, RangeEnd: end, Revision: after + 1})
	if status.Code(err) != codes.OutOfRange || status.Convert(err).Message() != "etcdserver: mvcc: required revision is a future revision" {
		t.Errorf("at a future revision: %v", err)
	}
	_, err = b.tryStream(t, &pb.RangeRequest{Key: start, RangeEnd: end, SortTarget: pb.RangeRequest_VALUE, SortOrder: pb.RangeRequest_DESCEND})
	if status.Code(err) != codes.Unimplemented {
		t.Errorf("sorted by value: %v", err)
	}
	// A client that goes away in the middle leaves a store that serves the next.
	ctx, cancel := context.WithCancel(t.Context())
	stream, err := b.kv.RangeStream(ctx, &pb.RangeRequest{Key: start, RangeEnd: end}, unbounded)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := stream.Recv(); err != nil {
		t.Fatal(err)
	}
	cancel()
	if again := b.stream(t, &pb.RangeRequest{Key: start, RangeEnd: end}); again.count != 5_001 {
		t.Errorf("after a cancelled stream: count %d", again.count)
	}
}

func checkRangeStreamCompacted(t *testing.T) {
	t.Parallel()
	b := newBare(t)
	start, end := prefix("/registry/pods/")
	name := func(i int) string { return fmt.Sprintf("/registry/pods/%05d", i) }
	old := b.fill(t, 20_000, name, strings.Repeat("a", 1_000))
	stream, err := b.kv.RangeStream(t.Context(), &pb.RangeRequest{Key: start, RangeEnd: end}, unbounded)
	if err != nil {
		t.Fatal(err)
	}
	first, err := stream.Recv()
	if err != nil {
		t.Fatal(err)
	}
	kvs := first.GetRangeResponse().GetKvs()
	b.compact(t, b.fill(t, 20_000, name, strings.Repeat("b", 1_000)))
	// It must end as compacted, or go on with what was there when it began.
	for {
		message, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			if status.Convert(err).Message() != "etcdserver: mvcc: required revision has been compacted" || status.Code(err) != codes.OutOfRange {
				t.Errorf("the stream ended with %v", err)
			}
			break
		}
		kvs = append(kvs, message.GetRangeResponse().GetKvs()...)
		if header := message.GetRangeResponse().GetHeader(); header != nil && len(kvs) != 20_000 {
			t.Errorf("a stream that goes on gave %d objects", len(kvs))
		}
	}
	for at, kv := range kvs {
		if string(kv.Key) != name(at) || kv.Value[0] != 'a' {
			t.Fatalf("object %d is %s with %q", at, kv.Key, kv.Value[0])
		}
	}
	_, err = b.tryStream(t, &pb.RangeRequest{Key: start, RangeEnd: end, Revision: old})
	if status.Code(err) != codes.OutOfRange || status.Convert(err).Message() != "etcdserver: mvcc: required revision has been compacted" {
		t.Errorf("a new stream at the old revision: %v", err)
	}
}

// checkRangeStreamSlowReader reads slowly while others read and write: they must not wait for it.
func checkRangeStreamSlowReader(t *testing.T) {
	t.Parallel()
	b := newBare(t)
	start, end := prefix("/registry/pods/")
	b.fill(t, 3_000, func(i int) string { return fmt.Sprintf("/registry/pods/%05d", i) }, strings.Repeat("a", 10_000))
	stream, err := b.kv.RangeStream(t.Context(), &pb.RangeRequest{Key: start, RangeEnd: end}, unbounded)
	if err != nil {
		t.Fatal(err)
	}
	first, err := stream.Recv() // from here on the stream is a snapshot of before the writes
	if err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() {
		kvs := first.GetRangeResponse().GetKvs()
		for {
			time.Sleep(100 * time.Millisecond)
			message, err := stream.Recv()
			if errors.Is(err, io.EOF) {
				break
			}
			if err != nil {
				ended <- err
				return
			}
			kvs = append(kvs, message.GetRangeResponse().GetKvs()...)
		}
		if later := slices.IndexFunc(kvs, func(kv *mvccpb.KeyValue) bool { return kv.Value[0] != 'a' }); len(kvs) != 3_000 || later >= 0 {
			ended <- fmt.Errorf("it read %d objects; the one at %d is of a later time", len(kvs), later)
			return
		}
		ended <- nil
	}()
	for i := range 20 {
		begun := time.Now()
		b.put(t, fmt.Sprintf("/registry/pods/%05d", 3_000-1-i), "b")
		if took := time.Since(begun); took > 2*time.Second {
			t.Errorf("a write beside a slow reader took %s", took)
		}
	}
	if err := <-ended; err != nil {
		t.Error(err)
	}
}
