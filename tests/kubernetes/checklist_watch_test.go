package kubernetes

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"
)

// requested is the watch id of an answer to a progress request: it is about the whole stream.
const requested = -1

func checkWatchStartRevisions(t *testing.T) {
	t.Parallel()
	b := newBare(t)
	start, end := prefix("/registry/pods/")
	first := b.put(t, "/registry/pods/a", "1")
	second := b.put(t, "/registry/pods/a", "2")
	current := b.put(t, "/registry/pods/a", "3")

	next := b.openWatch(t)
	next.create(t, &pb.WatchCreateRequest{Key: start, RangeEnd: end, StartRevision: current + 1, PrevKv: true, ProgressNotify: true})
	if created := next.next(t); !created.Created || created.Canceled || created.Header.Revision != current {
		t.Errorf("a watch from the next revision: %v", created)
	}
	next.silent(t, 300*time.Millisecond)
	written := b.put(t, "/registry/pods/a", "4")
	if response := next.next(t); len(response.Events) != 1 || response.Events[0].Kv.ModRevision != written {
		t.Errorf("its first event: %v", response)
	}

	far := b.openWatch(t)
	far.create(t, &pb.WatchCreateRequest{Key: start, RangeEnd: end, StartRevision: written + 3})
	far.next(t)
	for i := range 4 {
		b.put(t, "/registry/pods/a", fmt.Sprint("far", i))
	}
	for _, revision := range []int64{written + 3, written + 4} {
		if response := far.next(t); len(response.Events) != 1 || response.Events[0].Kv.ModRevision != revision {
			t.Errorf("a watch from revision %d: %v", written+3, response)
		}
	}

	b.compact(t, second)
	late := b.openWatch(t)
	late.create(t, &pb.WatchCreateRequest{Key: start, RangeEnd: end, StartRevision: first})
	if created := late.next(t); !created.Created || created.Canceled {
		t.Errorf("a watch from a compacted revision: %v", created)
	}
	if canceled := late.next(t); !canceled.Canceled || canceled.CompactRevision != second || len(canceled.Events) != 0 {
		t.Errorf("a watch from a compacted revision: %v, want it canceled with compact revision %d", canceled, second)
	}
	// The stream is still good for another, from the compacted revision itself.
	late.create(t, &pb.WatchCreateRequest{Key: start, RangeEnd: end, StartRevision: second})
	if created := late.next(t); !created.Created || created.Canceled {
		t.Errorf("a watch from the compaction's revision: %v", created)
	}
	if response := late.next(t); len(response.Events) == 0 || response.Events[0].Kv.ModRevision != second {
		t.Errorf("its first events: %v", response)
	}
}

// expectRun reads events until one of the last revision, and wants each revision between, once, in order.
func expectRun(t *testing.T, watch *rawWatch, first, last int64) {
	t.Helper()
	for want := first; want <= last; {
		response := watch.next(t)
		for _, event := range response.Events {
			if event.Kv.ModRevision != want {
				t.Fatalf("an event of revision %d instead of %d", event.Kv.ModRevision, want)
			}
			want++
		}
		if response.Canceled || len(response.Events) == 0 {
			t.Fatalf("instead of the event of revision %d: %v", want, response)
		}
	}
}

// checkWatchFarPast opens watches at the beginning of a long history while it grows: the passage from history to what is new must
// neither lose nor repeat.
func checkWatchFarPast(t *testing.T) {
	t.Parallel()
	b := newBare(t)
	start, end := prefix("/registry/pods/")
	for i := range 1_500 {
		b.put(t, fmt.Sprintf("/registry/pods/%d", i%50), strings.Repeat("v", 500))
	}
	written := make(chan int64)
	go func() {
		last := int64(0)
		for i := range 1_500 {
			response, err := b.Put(t.Context(), fmt.Sprintf("/registry/pods/%d", i%50), "new")
			if err != nil {
				t.Error(err)
				break
			}
			last = response.Header.Revision
		}
		written <- last
	}()
	watches := []*rawWatch{}
	for i := range 6 {
		watch := b.openWatch(t)
		watch.create(t, &pb.WatchCreateRequest{Key: start, RangeEnd: end, StartRevision: 2 + int64(i)*100, PrevKv: true})
		if created := watch.next(t); !created.Created {
			t.Fatalf("instead of the acknowledgement: %v", created)
		}
		watches = append(watches, watch)
		time.Sleep(20 * time.Millisecond)
	}
	last := <-written
	for i, watch := range watches {
		expectRun(t, watch, 2+int64(i)*100, last)
	}
}

// checkWatchSlowReader leaves one watch unread among many.
func checkWatchSlowReader(t *testing.T) {
	t.Parallel()
	b := newBare(t)
	start, end := prefix("/registry/pods/")
	slow, err := b.watch.Watch(t.Context(), unbounded)
	if err != nil {
		t.Fatal(err)
	}
	if err := slow.Send(&pb.WatchRequest{RequestUnion: &pb.WatchRequest_CreateRequest{
		CreateRequest: &pb.WatchCreateRequest{Key: start, RangeEnd: end, PrevKv: true}}}); err != nil {
		t.Fatal(err)
	}
	if created, err := slow.Recv(); err != nil || !created.Created {
		t.Fatalf("instead of the acknowledgement: %v, %v", created, err)
	}
	others := []*rawWatch{}
	for range 10 {
		watch := b.openWatch(t)
		watch.create(t, &pb.WatchCreateRequest{Key: start, RangeEnd: end})
		watch.next(t)
		others = append(others, watch)
	}
	first, last := int64(0), int64(0)
	for i := range 150 {
		last = b.put(t, fmt.Sprintf("/registry/pods/%d", i%7), strings.Repeat("v", 100_000))
		if i == 0 {
			first = last
		}
	}
	for _, watch := range others {
		expectRun(t, watch, first, last)
	}
	// It was not forgotten: all events are there once it reads.
	for want := first; want <= last; {
		response, err := slow.Recv()
		if err != nil || response.Canceled {
			t.Fatalf("the slow watch at revision %d: %v, %v", want, response, err)
		}
		for _, event := range response.Events {
			if event.Kv.ModRevision != want {
				t.Fatalf("the slow watch has revision %d instead of %d", event.Kv.ModRevision, want)
			}
			want++
		}
	}
}

func checkWatchAcknowledgements(t *testing.T) {
	t.Parallel()
	b := newBare(t)
	for i := range 300 {
		b.put(t, fmt.Sprintf("/registry/pods/%d", i), "v")
	}
	watch := b.openWatch(t)
	const count = 50
	for i := range count {
		// Some begin in the past, so that their catching up could come between the acknowledgements.
		watch.create(t, &pb.WatchCreateRequest{Key: fmt.Appendf(nil, "/registry/pods/%d", i), StartRevision: int64(i%2) * 2})
	}
	ids, past := []int64{}, 0
	for len(ids) < count || past < count/2 {
		response := watch.next(t)
		past += len(response.Events)
		if response.Created {
			if response.Canceled || (len(ids) > 0 && response.WatchId <= ids[len(ids)-1]) {
				t.Errorf("after %v comes %v", ids, response)
			}
			ids = append(ids, response.WatchId)
		}
	}
	// An event for one watch names it.
	written := b.put(t, "/registry/pods/7", "new")
	if response := watch.next(t); len(response.Events) != 1 || response.Events[0].Kv.ModRevision != written || response.WatchId != ids[7] {
		t.Errorf("instead of the event of revision %d for watch %d: %v", written, ids[7], response)
	}
	watch.remove(t, ids[3])
	if canceled := watch.next(t); !canceled.Canceled || canceled.WatchId != ids[3] || canceled.Created {
		t.Errorf("a cancellation: %v", canceled)
	}
	watch.remove(t, ids[3]) // again
	watch.remove(t, 12345)  // never there
	watch.silent(t, 300*time.Millisecond)
	watch.create(t, &pb.WatchCreateRequest{Key: []byte("x"), WatchId: ids[5]})
	if refused := watch.next(t); !refused.Canceled || refused.CancelReason == "" {
		t.Errorf("an id that is in use: %v", refused)
	}
}

// askProgress asks until an answer comes, as kube-apiserver does: a store may drop the question while a watch is not level.
func askProgress(t *testing.T, watch *rawWatch) *pb.WatchResponse {
	t.Helper()
	for range 30 {
		watch.progress(t)
		select {
		case response, open := <-watch.responses:
			if !open {
				t.Fatal("the watch stream ended")
			}
			return response
		case <-time.After(100 * time.Millisecond):
		}
	}
	t.Fatal("no progress in 3 s")
	return nil
}

func checkProgressIdle(t *testing.T) {
	t.Parallel()
	b := newBare(t)
	start, end := prefix("/registry/pods/")
	watch := b.openWatch(t)
	watch.create(t, &pb.WatchCreateRequest{Key: start, RangeEnd: end, PrevKv: true, ProgressNotify: true})
	watch.next(t)
	revision := int64(1)
	for i := range 5 {
		if answer := askProgress(t, watch); answer.WatchId != requested || len(answer.Events) != 0 || answer.Header.Revision != revision {
			t.Errorf("answer %d: %v, want revision %d", i, answer, revision)
		}
		watch.silent(t, 150*time.Millisecond) // one answer each
		revision = b.put(t, "/registry/other/a", "outside of the watch")
	}
}

func checkProgressBusy(t *testing.T) {
	t.Parallel()
	b := newBare(t)
	start, end := prefix("/registry/pods/")
	watch := b.openWatch(t)
	for range 20 { // all on one stream: an answer is about all of them
		watch.create(t, &pb.WatchCreateRequest{Key: start, RangeEnd: end, PrevKv: true})
		watch.next(t)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second)
	defer cancel()
	go func() {
		for i := 0; ctx.Err() == nil; i++ {
			_, _ = b.Put(ctx, fmt.Sprintf("/registry/pods/%d", i%20), "v") // the end of ctx is no failure
		}
	}()
	go func() {
		for ctx.Err() == nil {
			_ = watch.Send(&pb.WatchRequest{RequestUnion: &pb.WatchRequest_ProgressRequest{ProgressRequest: &pb.WatchProgressRequest{}}})
			time.Sleep(5 * time.Millisecond)
		}
	}()
	// Each revision is an event here, so an answer may name no revision that some watch has not been sent.
	delivered, promised, answers := map[int64]int64{}, int64(0), 0
	for ctx.Err() == nil {
		select {
		case <-ctx.Done():
		case response := <-watch.responses:
			if response.WatchId != requested {
				for _, event := range response.Events {
					if event.Kv.ModRevision <= promised {
						t.Fatalf("an event of revision %d follows the promise of %d", event.Kv.ModRevision, promised)
					}
					delivered[response.WatchId] = event.Kv.ModRevision
				}
				continue
			}
			answers++
			if response.Header.Revision < promised {
				t.Fatalf("the promise of %d follows one of %d", response.Header.Revision, promised)
			}
			promised = response.Header.Revision
			for id, revision := range delivered {
				if revision < promised {
					t.Fatalf("revision %d is promised, watch %d has been sent %d", promised, id, revision)
				}
			}
		}
	}
	if answers < 2 {
		t.Errorf("%d answers in three seconds", answers)
	}
}

func checkProgressUnsynced(t *testing.T) {
	t.Parallel()
	b := newBare(t)
	start, end := prefix("/registry/pods/")
	last := int64(0)
	for i := range 600 {
		last = b.put(t, fmt.Sprintf("/registry/pods/%d", i%20), strings.Repeat("v", 10_000))
	}
	watch := b.openWatch(t)
	watch.create(t, &pb.WatchCreateRequest{Key: start, RangeEnd: end, PrevKv: true, StartRevision: 2})
	for range 10 {
		watch.progress(t)
	}
	sent := int64(1)
	for sent < last {
		response := watch.next(t)
		for _, event := range response.Events {
			sent = event.Kv.ModRevision
		}
		if response.WatchId == requested && response.Header.Revision > sent {
			t.Fatalf("revision %d is promised after event %d of %d", response.Header.Revision, sent, last)
		}
	}
	eventually(t, 5*time.Second, func() error {
		if answer := askProgress(t, watch); answer.WatchId != requested || answer.Header.Revision != last {
			return fmt.Errorf("once level: %v, want revision %d", answer, last)
		}
		return nil
	})
}

// checkProgressDurable kills the store after it has named a revision: what it names must be on disk already, so that no later write
// gets the same revision.
func checkProgressDurable(t *testing.T) {
	t.Parallel()
	b := newBare(t)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	for round := range 3 {
		writing, stop := context.WithCancel(ctx)
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			for i := 0; writing.Err() == nil; i++ {
				call, done := context.WithTimeout(writing, time.Second)
				_, _ = b.Put(call, fmt.Sprintf("/registry/pods/%d", i%20), fmt.Sprint(round)) // the store is killed under it
				done()
			}
		}()
		watch := b.openWatch(t)
		start, end := prefix("/registry/other/")
		watch.create(t, &pb.WatchCreateRequest{Key: start, RangeEnd: end})
		watch.next(t)
		promised := int64(0)
		for range 40 {
			promised = askProgress(t, watch).Header.Revision
			time.Sleep(5 * time.Millisecond)
		}
		b.store.Kill()
		stop()
		<-ended
		if err := b.store.Start(); err != nil {
			t.Fatal(err)
		}
		got, err := b.Get(t.Context(), "/registry/health")
		if err != nil || got.Header.Revision < promised {
			t.Fatalf("after the crash the store is at %d, it had named %d (%v)", got.Header.Revision, promised, err)
		}
		if written := b.put(t, "/registry/pods/after", "v"); written <= promised {
			t.Errorf("revision %d was given again: %d had been named", written, promised)
		}
	}
	// A client that reconnects gets answers as before.
	reconnected := b.Watch(clientv3.WithRequireLeader(ctx), "/registry/other/", clientv3.WithPrefix())
	eventually(t, 10*time.Second, func() error {
		if err := b.RequestProgress(clientv3.WithRequireLeader(ctx)); err != nil {
			return err
		}
		select {
		case response := <-reconnected:
			if !response.IsProgressNotify() {
				return fmt.Errorf("instead of progress: %v", response)
			}
			return nil
		case <-time.After(200 * time.Millisecond):
			return fmt.Errorf("no answer")
		}
	})
}

func checkProgressInterval(t *testing.T) {
	t.Parallel()
	b := newBare(t, "--watch-progress-notify-interval=300ms")
	start, end := prefix("/registry/pods/")
	watch := b.openWatch(t)
	watch.create(t, &pb.WatchCreateRequest{Key: start, RangeEnd: end, ProgressNotify: true})
	created := watch.next(t)
	quiet := b.openWatch(t)
	quiet.create(t, &pb.WatchCreateRequest{Key: start, RangeEnd: end})
	quiet.next(t)
	revision := b.put(t, "/registry/other/a", "outside of the watch")
	for range 3 {
		eventually(t, 2*time.Second, func() error {
			notice := watch.next(t)
			if notice.WatchId != created.WatchId || len(notice.Events) != 0 {
				t.Errorf("instead of a notification: %v", notice)
			}
			if notice.Header.Revision != revision {
				return fmt.Errorf("the notification says %d, want %d", notice.Header.Revision, revision)
			}
			return nil
		})
	}
	quiet.silent(t, 500*time.Millisecond)
}
