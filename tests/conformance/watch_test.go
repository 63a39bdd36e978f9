package conformance

import (
	"fmt"
	"math"
	"strings"
	"testing"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"skeg.local/conformance/pair"
)

func watchKey(key string) *pb.WatchCreateRequest { return &pb.WatchCreateRequest{Key: []byte(key)} }

func watchSpan(key, end string) *pb.WatchCreateRequest {
	return &pb.WatchCreateRequest{Key: []byte(key), RangeEnd: []byte(end)}
}

func watchFrom(key, end string, revision int64) *pb.WatchCreateRequest {
	return &pb.WatchCreateRequest{Key: []byte(key), RangeEnd: []byte(end), StartRevision: revision}
}

func withID(id int64) *pb.WatchCreateRequest {
	return &pb.WatchCreateRequest{Key: []byte("a"), WatchId: id}
}

func TestWatchCreate(t *testing.T) {
	check(t, []scenario{
		{name: "watch/6.1-ids-by-the-server", script: func(s *pair.Session) {
			w := s.Watch()
			w.Create(watchKey("a"))
			w.Create(watchKey("a"))
			w.SendCancel(0)
			w.Next()
			w.Create(watchKey("a"))
			w.Create(withID(3))
			w.Create(withID(4))
			w.Create(watchKey("a"))
			w.Create(watchKey("a"))
			other := s.Watch()
			other.Create(watchKey("a"))
			w.Cancel()
			w.End()
			s.Put(put("a", "1"))
			other.Next()
			other.Cancel()
		}},
		{name: "watch/6.1-ids-by-the-client", script: func(s *pair.Session) {
			w := s.Watch()
			for _, id := range []int64{5, 5, -7, -7, -1, math.MaxInt64, math.MinInt64, 1, 1} {
				w.Create(withID(id))
			}
			w.SendCancel(5)
			w.Next()
			w.Create(withID(5))
			w.Create(watchKey("a"))
			w.Create(watchKey("a"))
			w.SendCancel(math.MinInt64)
			w.Next()
			w.SendCancel(math.MinInt64)
			w.Create(withID(math.MinInt64))
			w.Cancel()
		}},
		{name: "watch/6.1-id-of-a-compacted-watcher", script: func(s *pair.Session) {
			fill(s)
			s.Compact(compact(s.Current(), true))
			w := s.Watch()
			r := watchFrom("a", "z", s.Revision+1)
			r.WatchId = 9
			w.Create(r)
			w.Next()
			w.Create(r)
			w.SendCancel(9)
			w.Next()
			w.Create(withID(9))
			w.Cancel()
		}},
		{name: "watch/6.2-refusals-in-band", script: func(s *pair.Session) {
			w := s.Watch()
			w.Create(watchFrom("a", "", -1))
			w.Create(watchFrom("a", "", math.MinInt64))
			w.Create(watchSpan("b", "a"))
			w.Create(watchSpan("b", "b"))
			w.Create(watchSpan("b", "\x00"))
			w.Create(watchSpan("b", "\x00\x00"))
			w.Create(watchSpan("\x00", "\x00"))
			w.Create(watchSpan("\x00\x00", "\x00"))
			w.Create(watchKey(""))
			w.Create(watchSpan("", "\x00"))
			w.Create(watchSpan("", "z"))
			w.Create(watchFrom("b", "a", -1))
			duplicate := watchSpan("b", "a")
			duplicate.WatchId = 1
			w.Create(duplicate)
			w.Cancel()
		}},
		{name: "watch/6.2-empty-key", script: func(s *pair.Session) {
			w := s.Watch()
			w.Create(watchKey(""))
			w.Create(watchSpan("", "\x00"))
			s.Put(put("\x00", "nul"))
			w.Events(map[int64]int{0: 1, 1: 1})
			s.Put(put("a", "1"))
			w.Events(map[int64]int{1: 1})
			w.Cancel()
		}},
		{name: "watch/6-unknown-request", script: func(s *pair.Session) {
			w := s.Watch()
			w.Send(&pb.WatchRequest{})
			w.Send(&pb.WatchRequest{RequestUnion: &pb.WatchRequest_CreateRequest{}})
			w.Next()
			w.Send(&pb.WatchRequest{RequestUnion: &pb.WatchRequest_CancelRequest{CancelRequest: &pb.WatchCancelRequest{WatchId: 77}}})
			w.Create(watchKey("a"))
			w.Cancel()
		}},
		{name: "watch/6.2-unknown-filters", script: func(s *pair.Session) {
			w := s.Watch()
			r := watchKey("a")
			r.Filters = []pb.WatchCreateRequest_FilterType{7, -1}
			w.Create(r)
			s.Put(put("a", "1"))
			w.Next()
			w.Cancel()
		}},
	})
}

func TestWatchStart(t *testing.T) {
	check(t, []scenario{
		{name: "watch/6.3-now", script: func(s *pair.Session) {
			s.Put(put("a", "before"))
			w := s.Watch()
			w.Create(watchKey("a"))
			s.Put(put("b", "other"))
			s.Put(put("a", "1"))
			w.Next()
			s.Delete(del("a", ""))
			w.Next()
			w.Cancel()
		}},
		{name: "watch/6.3-history", script: func(s *pair.Session) {
			fill(s)
			s.Delete(del("a", "c"))
			s.Put(put("a", "again"))
			for revision := s.Revision; revision <= s.Current(); revision++ {
				w := s.Watch()
				w.Create(watchFrom("a", "z", revision))
				w.Create(watchFrom("a", "", revision))
				w.Drain(s.Current())
				w.Cancel()
			}
		}},
		{name: "watch/6.3-history-from-revision-one", fresh: true, script: func(s *pair.Session) {
			fill(s)
			w := s.Watch()
			w.Create(watchFrom("\x00", "\x00", 1))
			w.Drain(s.Current())
			s.Put(put("a", "live"))
			w.Next()
			w.Cancel()
		}},
		{name: "watch/6.3-future", script: func(s *pair.Session) {
			w := s.Watch()
			w.Create(watchFrom("a", "", s.Revision+3))
			w.Create(watchKey("a"))
			s.Put(put("a", "1"))
			w.Next()
			s.Put(put("a", "2"))
			w.Next()
			s.Put(put("a", "3"))
			w.Events(map[int64]int{0: 1, 1: 1})
			w.Create(watchFrom("a", "", math.MaxInt64))
			w.Cancel()
		}},
		{name: "watch/6.3-compacted", script: func(s *pair.Session) {
			fill(s)
			s.Compact(compact(s.Revision+4, true))
			w := s.Watch()
			w.Create(watchFrom("a", "z", s.Revision+3))
			w.Next()
			w.Create(watchFrom("a", "z", 1))
			w.Next()
			w.Create(watchFrom("d", "", s.Revision+4))
			w.Events(map[int64]int{2: 1})
			w.SendCancel(0)
			w.Next()
			s.Put(put("d", "live"))
			w.Next()
			w.Cancel()
		}},
		{name: "watch/6.3-at-the-compact-revision", script: func(s *pair.Session) {
			s.Txn(do(put("a", "1"), put("b", "1"), put("c", "1")))
			s.Txn(do(put("a", "2"), del("b", ""), put("d", "1")))
			s.Compact(compact(s.Current(), true))
			w := s.Watch()
			w.Create(watchFrom("a", "z", s.Revision+2))
			w.Drain(s.Current())
			w.Cancel()
			s.Txn(do(put("a", "3"), del("d", "")))
			w = s.Watch()
			r := watchFrom("a", "z", s.Revision+2)
			r.PrevKv = true
			w.Create(r)
			w.Drain(s.Current())
			w.Cancel()
		}},
		{name: "watch/6.3-long-history", script: func(s *pair.Session) {
			for i := range 2500 {
				s.Require(s.Quietly("KV/Put", put(fmt.Sprintf("k%d", i%10), fmt.Sprint(i)), &pb.PutResponse{}) == nil, "put")
			}
			w := s.Watch()
			w.Create(watchFrom("k", "l", s.Revision+1))
			w.Create(watchFrom("k3", "", s.Revision+1000))
			w.Drain(s.Current())
			w.Cancel()
		}},
	})
}

func TestWatchEvents(t *testing.T) {
	check(t, []scenario{
		{name: "watch/6.4-puts-and-deletes", script: func(s *pair.Session) {
			s.Grant(1501, 1000)
			s.Put(leased("a", "1", 1501))
			w := s.Watch()
			w.Create(watchSpan("a", "z"))
			r := watchSpan("a", "z")
			r.PrevKv = true
			w.Create(r)
			for _, step := range []func(){
				func() { s.Put(leased("a", "2", 1501)) },
				func() { s.Put(put("b", "")) },
				func() { s.Delete(del("b", "")) },
				func() { s.Put(put("b", "2")) },
				func() { s.Revoke(1501) },
			} {
				step()
				w.Events(map[int64]int{0: 1, 1: 1})
			}
			w.Cancel()
		}},
		{name: "watch/6.4-txn-is-one-message", script: func(s *pair.Session) {
			s.Put(put("x", "0"))
			w := s.Watch()
			r := watchSpan("a", "z")
			r.PrevKv = true
			w.Create(r)
			s.Txn(do(put("b", "1"), put("a", "1"), delPrev("x", ""), put("c", "1")))
			w.Next()
			s.Delete(del("a", "z"))
			w.Next()
			s.Txn(do(do(put("a", "1")), do(del("a", "b"))))
			w.Next()
			w.Cancel()
		}},
		{name: "watch/6.4-lease-expiry-is-a-delete", script: func(s *pair.Session) {
			w := s.Watch()
			w.Create(watchSpan("a", "z"))
			s.Grant(1502, 1)
			s.Txn(do(leased("b", "1", 1502), leased("a", "1", 1502)))
			w.Next()
			w.Next()
			s.TimeToLive(1502, true)
			s.Leases()
			w.Cancel()
		}},
		{name: "watch/6.4-prev-kv-of-compacted-revisions", script: func(s *pair.Session) {
			s.Put(put("a", "1"))
			s.Put(put("a", "2"))
			s.Put(put("a", "3"))
			s.Compact(compact(s.Revision+2, true))
			w := s.Watch()
			r := watchFrom("a", "", s.Revision+2)
			r.PrevKv = true
			w.Create(r)
			w.Drain(s.Current())
			w.Cancel()
		}},
		{name: "watch/6.4-filters", script: func(s *pair.Session) {
			filters := [][]pb.WatchCreateRequest_FilterType{{0}, {1}, {0, 1}, {1, 1}, {}}
			steps := func() {
				s.Put(put("a", "1"))
				s.Txn(do(put("b", "1"), del("a", "")))
				s.Delete(del("b", ""))
				s.Put(put("c", "1"))
			}
			live := s.Watch()
			for _, list := range filters {
				r := watchSpan("a", "z")
				r.Filters, r.PrevKv = list, true
				live.Create(r)
			}
			steps()
			live.Drain(s.Current())
			live.Cancel()
			late := s.Watch()
			for _, list := range filters {
				r := watchFrom("a", "z", s.Revision+1)
				r.Filters, r.PrevKv = list, true
				late.Create(r)
			}
			late.Drain(s.Current())
			late.Cancel()
		}},
		{name: "watch/6.4-many-watchers-of-one-stream", script: func(s *pair.Session) {
			w := s.Watch()
			want := map[int64]int{}
			for i := range 100 {
				w.Create([]*pb.WatchCreateRequest{watchKey("a"), watchSpan("a", "b"), watchSpan("\x00", "\x00"), watchSpan("a", "\x00")}[i%4])
				want[int64(i)] = 1
			}
			for i := range 5 {
				s.Put(put("a", fmt.Sprint(i)))
				w.Events(want)
			}
			w.Cancel()
		}},
		{name: "watch/6.4-no-gap-between-catching-up-and-live", script: func(s *pair.Session) {
			for i := range 1500 {
				s.Require(s.Quietly("KV/Put", put("a", fmt.Sprint(i)), &pb.PutResponse{}) == nil, "put")
			}
			w := s.Watch()
			w.SendCreate(watchFrom("a", "", s.Revision+1))
			for i := range 1500 {
				s.Require(s.Quietly("KV/Put", put("a", fmt.Sprint(1500+i)), &pb.PutResponse{}) == nil, "put")
			}
			s.Require(w.Take().Created, "created")
			w.Events(map[int64]int{0: 3000})
			w.Cancel()
		}},
	})
}

func TestWatchFragments(t *testing.T) {
	value := strings.Repeat("f", 500_000)
	check(t, []scenario{
		{name: "watch/6.5-fragments", script: func(s *pair.Session) {
			for _, fragment := range []bool{true, false} {
				first := s.Current() + 1
				for i := range 10 {
					s.Put(put(fmt.Sprintf("f%d", i), value))
				}
				w := s.Watch()
				r := watchFrom("f", "g", first)
				r.Fragment = fragment
				w.Create(r)
				messages := 0
				for events := 0; events < 10; {
					message := w.Take()
					messages++
					s.Require(len(message.Events) > 0, "a message without events: %s", pair.Text(message))
					events += len(message.Events)
					s.Require(message.Fragment == (fragment && events < 10), "fragment flag after %d events: %v", events, message.Fragment)
				}
				s.Require(fragment == (messages > 1), "%d messages", messages)
				w.Cancel()
			}
		}},
		{name: "watch/6.5-fragments-of-one-revision", flags: []string{"--max-request-bytes", "16777216"}, script: func(s *pair.Session) {
			w := s.Watch()
			r := watchSpan("f", "g")
			r.Fragment, r.PrevKv = true, true
			w.Create(r)
			for range 2 {
				request := do()
				for i := range 25 {
					request.Success = append(request.Success, op(put(fmt.Sprintf("f%02d", i), value)))
				}
				s.Txn(request)
				w.Events(map[int64]int{0: 25})
			}
			w.Cancel()
		}},
	})
}

func TestWatchProgress(t *testing.T) {
	check(t, []scenario{
		{name: "watch/6.6-headers", script: func(s *pair.Session) {
			w := s.Watch()
			w.Create(watchKey("a"))
			s.Put(put("other", "1"))
			w.Create(watchKey("b"))
			w.SendCancel(0)
			w.Next()
			w.Create(watchSpan("b", "a"))
			s.Put(put("b", "1"))
			w.Next()
			w.Cancel()
		}},
		{name: "watch/6.7-on-request", script: func(s *pair.Session) {
			w := s.Watch()
			w.SendProgress()
			w.Create(watchKey("a"))
			w.Progress()
			s.Put(put("other", "1"))
			w.Progress()
			s.Put(put("a", "1"))
			w.Next()
			w.Progress()
			w.SendCancel(0)
			w.Next()
			w.SendProgress()
			w.Create(watchKey("b"))
			w.Cancel()
		}},
		{name: "watch/6.7-on-request-after-catching-up", script: func(s *pair.Session) {
			fill(s)
			w := s.Watch()
			w.Create(watchFrom("a", "z", s.Revision+1))
			w.Events(map[int64]int{0: 8})
			w.Progress()
			w.Create(watchFrom("none", "", s.Revision+1))
			w.Progress()
			w.Cancel()
		}},
		{name: "watch/6.7-not-while-a-compacted-watcher-is-known", script: func(s *pair.Session) {
			fill(s)
			s.Compact(compact(s.Current(), true))
			w := s.Watch()
			w.Create(watchFrom("a", "", 1))
			w.Next()
			w.Create(watchKey("a"))
			w.SendProgress()
			w.Create(watchKey("b"))
			w.SendCancel(0)
			w.Next()
			w.Progress()
			w.Cancel()
		}},
		{name: "watch/6.7-not-for-a-watcher-of-the-future", script: func(s *pair.Session) {
			w := s.Watch()
			w.Create(watchFrom("a", "", s.Revision+2))
			w.SendProgress()
			s.Put(put("b", "1"))
			w.SendProgress()
			w.Create(watchKey("z"))
			s.Put(put("a", "1"))
			w.Next()
			w.Progress()
			w.Cancel()
		}},
		{name: "watch/6.7-timer", flags: []string{"--watch-progress-notify-interval", "200ms"}, script: func(s *pair.Session) {
			w := s.Watch()
			r := watchKey("a")
			r.ProgressNotify = true
			w.Create(r)
			w.Next()
			s.Put(put("other", "1"))
			s.Await("a tick after the put", func() bool {
				message := w.Take()
				s.Require(message.WatchId == 0 && len(message.Events) == 0 && !message.Created && !message.Canceled, "no progress message: %s", pair.Text(message))
				return message.Header.Revision == s.Current()
			})
			silent := s.Watch()
			silent.Create(watchKey("a"))
			w.Take()
			w.Take()
			s.Put(put("a", "1"))
			silent.Next()
			w.Cancel()
			silent.Cancel()
		}},
		{name: "watch/6.7-timer-not-for-the-future", flags: []string{"--watch-progress-notify-interval", "200ms"}, script: func(s *pair.Session) {
			w := s.Watch()
			future := watchFrom("a", "", s.Revision+2)
			future.ProgressNotify = true
			w.Create(future)
			now := watchKey("b")
			now.ProgressNotify = true
			w.Create(now)
			for range 3 {
				s.Require(w.Take().WatchId == 1, "progress of a watcher of the future")
			}
			s.Put(put("x", "1"))
			s.Put(put("x", "2"))
			seen := map[int64]bool{}
			s.Await("progress of both", func() bool {
				seen[w.Take().WatchId] = true
				return seen[0] && seen[1]
			})
			w.Cancel()
		}},
	})
}

func TestWatchEnd(t *testing.T) {
	check(t, []scenario{
		{name: "watch/6.8-cancel", script: func(s *pair.Session) {
			w := s.Watch()
			w.Create(watchKey("a"))
			w.SendCancel(12)
			w.SendCancel(-1)
			w.SendCancel(0)
			w.Next()
			w.SendCancel(0)
			s.Put(put("a", "1"))
			w.Create(watchKey("a"))
			s.Put(put("a", "2"))
			w.Next()
			w.Cancel()
		}},
		{name: "watch/6.8-cancel-while-catching-up", script: func(s *pair.Session) {
			fill(s)
			w := s.Watch()
			w.SendCreate(watchFrom("none", "", s.Revision+1))
			w.SendCancel(0)
			w.Next()
			w.Next()
			w.Create(watchKey("a"))
			w.Cancel()
		}},
		{name: "watch/6.8-half-close", script: func(s *pair.Session) {
			w := s.Watch()
			w.Create(watchKey("a"))
			w.CloseSend()
			s.Put(put("a", "1"))
			w.Next()
			s.Put(put("a", "2"))
			w.Next()
			w.Cancel()
			w.End()
		}},
		{name: "watch/6.8-require-leader", script: func(s *pair.Session) {
			s.With("hasleader", "true")
			w := s.Watch()
			w.Create(watchKey("a"))
			s.Put(put("a", "1"))
			w.Next()
			w.Cancel()
			w.End()
		}},
		{name: "watch/6-undecodable-request", script: func(s *pair.Session) {
			s.RawWatch([]byte{0xff, 0xff, 0xff})
			s.RawWatch([]byte{0x0a, 0x7f})
			s.Range(get("a"))
		}},
	})
}
