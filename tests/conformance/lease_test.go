package conformance

import (
	"fmt"
	"math"
	"testing"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"skeg.local/conformance/pair"
)

func TestLease(t *testing.T) {
	check(t, []scenario{
		{name: "lease/7.1-ids", script: func(s *pair.Session) {
			for _, id := range []int64{1, 1, -1, -1, math.MaxInt64, math.MinInt64, math.MinInt64, 42} {
				s.Grant(id, 1000)
			}
			s.Leases()
			for _, id := range []int64{1, -1, math.MaxInt64, math.MinInt64} {
				s.Put(leased("a", fmt.Sprint(id), id))
				s.Range(get("a"))
				s.TimeToLive(id, true)
			}
			for _, id := range []int64{math.MinInt64, math.MaxInt64, -1, 1} {
				s.Revoke(id)
			}
			s.Leases()
		}},
		{name: "lease/7.1-id-zero", script: func(s *pair.Session) {
			first, second := &pb.LeaseGrantResponse{}, &pb.LeaseGrantResponse{}
			s.Require(s.Quietly("Lease/LeaseGrant", &pb.LeaseGrantRequest{TTL: 500}, first) == nil, "grant")
			s.Require(s.Quietly("Lease/LeaseGrant", &pb.LeaseGrantRequest{TTL: 500}, second) == nil, "grant")
			s.Require(first.ID > 0 && second.ID > 0 && first.ID != second.ID, "ids %d, %d", first.ID, second.ID)
			// The low 16 bits of the member ID lead the lease ID; its top bit is cut off.
			s.Note("id prefix", first.ID>>48)
			s.Note("id prefix", second.ID>>48)
			s.Note("granted", pair.Text(&pb.LeaseGrantResponse{TTL: first.TTL, Error: first.Error, Header: &pb.ResponseHeader{Revision: first.Header.Revision}}))
		}},
		{name: "lease/7.1-ttls", script: func(s *pair.Session) {
			for i, ttl := range []int64{math.MinInt64, -1, 0, 1, 2, 3, 60, 8_999_999_999, 9_000_000_000, 9_000_000_001, math.MaxInt64} {
				s.Grant(int64(100+i), ttl)
				s.TimeToLive(int64(100+i), false)
			}
			s.Grant(100, math.MaxInt64)
			s.Grant(108, 9_000_000_001)
			s.Revoke(108)
			s.Grant(108, 9_000_000_000)
		}},
		{name: "lease/7.1-minimum-ttl-follows-the-election-timeout", flags: []string{"--election-timeout", "5000", "--heartbeat-interval", "300"}, script: func(s *pair.Session) {
			s.Grant(1, 1)
			s.Grant(2, 7)
			s.Grant(3, 8)
			s.Grant(4, 9)
		}},
		{name: "lease/7.1-no-revision", script: func(s *pair.Session) {
			s.Grant(1601, 1000)
			s.Range(get("a"))
			s.Revoke(1601)
			s.Range(get("a"))
		}},
		{name: "lease/7.2-keep-alive", script: func(s *pair.Session) {
			s.Grant(1602, 1000)
			s.Grant(1603, 500)
			k := s.KeepAlive()
			for _, id := range []int64{1602, 1603, 404, 0, -5, 1602, math.MaxInt64} {
				k.Send(id)
				k.Next()
			}
			k.Send(1602)
			k.Send(404)
			k.Send(1603)
			k.Next()
			k.Next()
			k.Next()
			s.Revoke(1602)
			s.Put(put("a", "1"))
			k.Send(1602)
			k.Next()
			k.Send(1603)
			k.CloseSend()
			k.Next()
			k.Next()
			k.Cancel()
		}},
		{name: "lease/7.2-half-close-at-once", script: func(s *pair.Session) {
			k := s.KeepAlive()
			k.CloseSend()
			k.Next()
			k.Cancel()
		}},
		{name: "lease/7.2-keep-alive-renews", script: func(s *pair.Session) {
			s.Grant(1604, 2)
			s.Grant(1605, 2)
			s.Put(leased("kept", "1", 1604))
			s.Put(leased("dropped", "1", 1605))
			w := s.Watch()
			w.Create(watchSpan("a", "z"))
			stop := make(chan struct{})
			go func() {
				for s.Renew(1604) == nil {
					select {
					case <-stop:
						return
					case <-time.After(100 * time.Millisecond):
					}
				}
			}()
			w.Next()
			close(stop)
			s.Range(everything())
			w.Cancel()
		}},
		{name: "lease/7.3-revoke-is-one-revision", script: func(s *pair.Session) {
			s.Grant(1606, 1000)
			for _, key := range []string{"c", "a", "b", "\x00", "\xff", "a\x00"} {
				s.Put(leased(key, "1", 1606))
			}
			s.Put(leased("a", "2", 1606))
			s.Put(put("d", "1"))
			w := s.Watch()
			r := watchSpan("\x00", "\x00")
			r.PrevKv = true
			w.Create(r)
			s.Revoke(1606)
			w.Next()
			s.Revoke(1606)
			s.Range(everything())
			s.HashKV(0)
			s.TimeToLive(1606, true)
			w.Cancel()
		}},
		{name: "lease/7.3-revoke-unknown", script: func(s *pair.Session) {
			for _, id := range []int64{0, -1, 404, math.MaxInt64, math.MinInt64} {
				s.Revoke(id)
			}
		}},
		{name: "lease/7.3-expiry", script: func(s *pair.Session) {
			s.Grant(1607, 1)
			s.Put(leased("a", "1", 1607))
			s.Await("the lease is gone", func() bool {
				answer := &pb.LeaseTimeToLiveResponse{}
				s.Require(s.Quietly("Lease/LeaseTimeToLive", &pb.LeaseTimeToLiveRequest{ID: 1607}, answer) == nil, "time to live")
				return answer.TTL == -1 && answer.GrantedTTL == 0
			})
			s.Range(get("a"))
			s.TimeToLive(1607, true)
			s.Revoke(1607)
			k := s.KeepAlive()
			k.Send(1607)
			k.Next()
			k.Cancel()
			s.Put(leased("a", "2", 1607))
			s.Grant(1607, 1000)
		}},
		{name: "lease/7.4-time-to-live", script: func(s *pair.Session) {
			s.Grant(1608, 1000)
			for _, keys := range []bool{false, true} {
				for _, id := range []int64{0, -1, 404, 1608, math.MaxInt64, math.MinInt64} {
					s.TimeToLive(id, keys)
				}
			}
			s.Txn(do(leased("b", "1", 1608), leased("a", "1", 1608)))
			s.TimeToLive(1608, false)
			s.TimeToLive(1608, true)
		}},
		{name: "lease/7.5-leases", script: func(s *pair.Session) {
			s.Leases()
			for id := range int64(20) {
				s.Grant(2000+id, 1000+id)
			}
			s.Leases()
			for id := range int64(10) {
				s.Revoke(2000 + 2*id)
			}
			s.Leases()
		}},
		{name: "lease/7.6-attachment", script: func(s *pair.Session) {
			s.Grant(1609, 1000)
			s.Grant(1610, 1000)
			s.Put(leased("a", "1", 1609))
			s.Put(leased("a", "2", 1609))
			s.Put(leased("b", "1", 1609))
			s.TimeToLive(1609, true)
			s.Put(leased("b", "2", 1610))
			s.TimeToLive(1609, true)
			s.TimeToLive(1610, true)
			s.Delete(del("a", ""))
			s.TimeToLive(1609, true)
			s.Txn(do(put("b", "3")))
			s.TimeToLive(1610, true)
			s.Revoke(1609)
			s.Revoke(1610)
			s.Range(everything())
		}},
	})
}

// TestRestart requires that what a client can see is the same after both servers were killed and started again.
func TestRestart(t *testing.T) {
	stores := freshPair(t)
	before := func(s *pair.Session) {
		s.Grant(1701, 1000)
		s.Grant(-1702, 9_000_000_000)
		fill(s)
		s.Put(leased("a", "leased", 1701))
		s.Put(leased("b", "leased", 1701))
		s.Put(leased("b", "moved", -1702))
		s.Delete(del("c", ""))
		s.Txn(do(put("x", "1"), do(put("y", "1")), del("d", "")))
		s.Compact(compact(6, true))
		s.Put(put("a", "no lease"))
		s.Alarm(&pb.AlarmRequest{Action: pb.AlarmRequest_ACTIVATE, MemberID: 7, Alarm: pb.AlarmType_NOSPACE})
		s.HashKV(0)
	}
	after := func(s *pair.Session) {
		s.Range(everything())
		s.Range(with(everything(), func(r *pb.RangeRequest) { r.Revision = 6 }))
		s.Range(with(everything(), func(r *pb.RangeRequest) { r.Revision = 5 }))
		s.Leases()
		s.TimeToLive(1701, true)
		s.TimeToLive(-1702, true)
		s.HashKV(0)
		for revision := int64(5); revision <= s.Current(); revision++ {
			s.HashKV(revision)
		}
		s.Alarm(&pb.AlarmRequest{})
		s.Put(put("a", "refused"))
		s.Alarm(&pb.AlarmRequest{Action: pb.AlarmRequest_DEACTIVATE, MemberID: 7, Alarm: pb.AlarmType_NOSPACE})
		s.Revoke(1701)
		s.Put(put("a", "after"))
		s.Range(everything())
		w := s.Watch()
		w.Create(watchFrom("\x00", "\x00", 6))
		w.Drain(s.Current())
		w.Cancel()
		s.Call("Cluster/MemberList", &pb.MemberListRequest{}, &pb.MemberListResponse{})
		s.Status()
	}
	for _, step := range []struct {
		name   string
		script func(*pair.Session)
	}{{"before", before}, {"after", after}} {
		if difference := stores.Compare(step.script); difference != nil {
			t.Fatalf("the stores differ %s the restart:\n%s", step.name, difference.Text)
		}
		if step.name == "before" {
			restart(t, stores)
		}
	}
}
