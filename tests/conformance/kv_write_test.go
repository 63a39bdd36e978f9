package conformance

import (
	"fmt"
	"math"
	"strings"
	"testing"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"skeg.local/conformance/pair"
)

func TestPut(t *testing.T) {
	check(t, []scenario{
		{name: "kv/4.3-validation", script: func(s *pair.Session) {
			s.Put(put("", "v"))
			s.Put(with(put("a", "v"), func(r *pb.PutRequest) { r.IgnoreValue = true }))
			s.Put(with(leased("a", "v", 5), func(r *pb.PutRequest) { r.IgnoreLease = true }))
			s.Put(with(leased("", "v", 5), func(r *pb.PutRequest) { r.IgnoreLease, r.IgnoreValue = true, true }))
			s.Put(with(leased("a", "v", 5), func(r *pb.PutRequest) { r.IgnoreLease, r.IgnoreValue = true, true }))
			s.Put(with(leased("a", "", -5), func(r *pb.PutRequest) { r.IgnoreLease = true }))
			s.Range(get("a"))
		}},
		{name: "kv/4.3-ignore-value", script: func(s *pair.Session) {
			s.Put(with(put("a", ""), func(r *pb.PutRequest) { r.IgnoreValue = true }))
			s.Grant(1001, 1000)
			s.Put(leased("a", "kept", 1001))
			s.Put(with(put("a", ""), func(r *pb.PutRequest) { r.IgnoreValue, r.PrevKv = true, true }))
			s.Range(get("a"))
			s.TimeToLive(1001, true)
			s.Put(with(leased("a", "", 1001), func(r *pb.PutRequest) { r.IgnoreValue = true }))
			s.Range(get("a"))
			s.TimeToLive(1001, true)
			s.Put(with(leased("a", "", 404), func(r *pb.PutRequest) { r.IgnoreValue = true }))
			s.Put(with(leased("none", "", 404), func(r *pb.PutRequest) { r.IgnoreValue = true }))
		}},
		{name: "kv/4.3-ignore-lease", script: func(s *pair.Session) {
			s.Put(with(put("a", "v"), func(r *pb.PutRequest) { r.IgnoreLease = true }))
			s.Grant(1002, 1000)
			s.Put(leased("a", "1", 1002))
			s.Put(with(put("a", "2"), func(r *pb.PutRequest) { r.IgnoreLease, r.PrevKv = true, true }))
			s.Range(get("a"))
			s.Put(with(put("a", ""), func(r *pb.PutRequest) { r.IgnoreLease, r.IgnoreValue = true, true }))
			s.Range(get("a"))
			s.Put(put("b", "1"))
			s.Put(with(put("b", "2"), func(r *pb.PutRequest) { r.IgnoreLease = true }))
			s.Range(get("b"))
			s.Delete(del("a", ""))
			s.Put(with(put("a", "3"), func(r *pb.PutRequest) { r.IgnoreLease = true }))
			s.TimeToLive(1002, true)
		}},
		{name: "kv/4.3-lease-must-exist", script: func(s *pair.Session) {
			s.Put(leased("a", "v", 404))
			s.Put(leased("a", "v", -1))
			s.Put(leased("a", "v", math.MaxInt64))
			s.Put(leased("a", "v", math.MinInt64))
			s.Range(get("a"))
		}},
		{name: "kv/4.3-put-replaces-the-lease", script: func(s *pair.Session) {
			s.Grant(1003, 1000)
			s.Grant(1004, 1000)
			s.Put(leased("a", "1", 1003))
			s.Put(leased("a", "2", 1004))
			s.TimeToLive(1003, true)
			s.TimeToLive(1004, true)
			s.Put(put("a", "3"))
			s.TimeToLive(1004, true)
			s.Revoke(1004)
			s.Range(get("a"))
		}},
		{name: "kv/4.3-prev-kv", script: func(s *pair.Session) {
			previous := func(r *pb.PutRequest) { r.PrevKv = true }
			s.Grant(1005, 1000)
			s.Put(with(leased("a", "1", 1005), previous))
			s.Put(with(put("a", "2"), previous))
			s.Put(with(put("a", ""), previous))
			s.Put(with(put("a", "4"), previous))
			s.Delete(del("a", ""))
			s.Put(with(put("a", "5"), previous))
		}},
		{name: "kv/4.3-any-bytes", script: func(s *pair.Session) {
			for _, key := range []string{"\x00", "\x00\x00", "\xff", "\xff\xff\xff", "é\x00ü", "\x00\x01", "\x00\xff", "a\x00", strings.Repeat("k", 40_000)} {
				s.Put(put(key, key))
				s.Put(put(key, ""))
				s.Range(get(key))
			}
			s.Range(everything())
			s.HashKV(0)
		}},
	})
}

func TestDeleteRange(t *testing.T) {
	check(t, []scenario{
		{name: "kv/4.4-delete", script: func(s *pair.Session) {
			fill(s)
			s.Delete(delPrev("a", ""))
			s.Delete(delPrev("a", ""))
			s.Delete(del("", ""))
			s.Delete(del("", "z"))
			s.Delete(delPrev("c", "a"))
			s.Delete(delPrev("b", "b"))
			s.Delete(delPrev("b", "d"))
			s.Delete(delPrev("d", fromKey))
			s.Range(everything())
		}},
		{name: "kv/4.4-delete-everything", script: func(s *pair.Session) {
			fill(s)
			s.Delete(del("\x00", fromKey))
			s.Delete(delPrev("\x00", fromKey))
			s.Range(everything())
		}},
		{name: "kv/4.4-delete-detaches", script: func(s *pair.Session) {
			s.Grant(1101, 1000)
			s.Put(leased("a", "1", 1101))
			s.Put(leased("b", "1", 1101))
			s.Delete(delPrev("a", ""))
			s.TimeToLive(1101, true)
			s.Put(put("a", "mine"))
			s.Revoke(1101)
			s.Range(everything())
		}},
		{name: "kv/4.4-delete-many", script: func(s *pair.Session) {
			many(s, 1200)
			s.Delete(delPrev("k", "l"))
			s.HashKV(0)
			s.Range(with(span("k", "l"), func(r *pb.RangeRequest) { r.Revision = s.Current() - 1; r.Limit = 3 }))
		}},
	})
}

func TestCompact(t *testing.T) {
	check(t, []scenario{
		{name: "kv/4.6-never-compacted", fresh: true, script: func(s *pair.Session) {
			s.Compact(compact(-1, false))
			s.Compact(compact(math.MinInt64, false))
			s.Compact(compact(2, false))
			s.Compact(compact(math.MaxInt64, true))
			s.HashKV(0)
			// From here on etcd answers HashKV(0) with the hash it has kept of "revision 0", whatever is written: see
			// docs/compatibility.md.
			s.Compact(compact(0, false))
			s.Compact(compact(0, false))
			s.Compact(compact(0, true))
			s.HashKV(1)
			s.Compact(compact(1, false))
			s.Compact(compact(1, true))
			s.HashKV(1)
			fill(s)
			s.Compact(compact(1, false))
			s.Range(with(everything(), func(r *pb.RangeRequest) { r.Revision = 1 }))
		}},
		{name: "kv/4.6-zero-physical", fresh: true, script: func(s *pair.Session) {
			s.Compact(compact(0, true))
			s.Compact(compact(0, true))
			s.Put(put("a", "1"))
			s.HashKV(2)
		}},
		{name: "kv/4.6-bounds", script: func(s *pair.Session) {
			fill(s)
			current := s.Current()
			s.Compact(compact(current+1, false))
			s.Compact(compact(current-2, false))
			s.Compact(compact(current-2, false))
			s.Compact(compact(current-3, true))
			s.Compact(compact(-7, true))
			s.Compact(compact(current, true))
			s.Compact(compact(current, true))
			s.Range(with(everything(), func(r *pb.RangeRequest) { r.Revision = current - 1 }))
			s.Range(with(everything(), func(r *pb.RangeRequest) { r.Revision = current }))
		}},
		{name: "kv/4.6-visible-at-once", script: func(s *pair.Session) {
			for i := range 50 {
				s.Put(put(fmt.Sprintf("k%d", i%7), fmt.Sprint(i)))
			}
			s.Compact(compact(s.Revision+20, false))
			for _, revision := range []int64{s.Revision + 1, s.Revision + 19, s.Revision + 20, s.Revision + 21} {
				s.Range(with(everything(), func(r *pb.RangeRequest) { r.Revision = revision }))
			}
		}},
		{name: "kv/4.6-tombstone-at-the-compact-revision", script: func(s *pair.Session) {
			s.Put(put("a", "1"))
			s.Put(put("b", "1"))
			s.Delete(del("a", ""))
			s.Compact(compact(s.Current(), true))
			s.HashKV(0)
			s.Put(put("a", "2"))
			s.Range(get("a"))
			w := s.Watch()
			w.Create(&pb.WatchCreateRequest{Key: []byte("\x00"), RangeEnd: []byte{0}, StartRevision: s.Revision + 3})
			w.Drain(s.Current())
			w.Cancel()
			s.Compact(compact(s.Current(), true))
			s.HashKV(0)
			s.HashKV(s.Current())
		}},
		{name: "kv/4.6-versions-survive", script: func(s *pair.Session) {
			for i := range 5 {
				s.Put(put("a", fmt.Sprint(i)))
			}
			s.Compact(compact(s.Current(), true))
			s.Put(put("a", "next"))
			s.Range(get("a"))
			s.Delete(delPrev("a", ""))
			s.Compact(compact(s.Current(), true))
			s.Put(put("a", "new"))
			s.Range(get("a"))
		}},
	})
}

func TestQuota(t *testing.T) {
	flags := []string{"--quota-backend-bytes", fmt.Sprint(8 << 20)}
	// exhaust writes until the store refuses; at which write depends on the file format.
	exhaust := func(s *pair.Session) {
		value := []byte(strings.Repeat("z", 512<<10))
		s.Await("the quota is exhausted", func() bool {
			err := s.Quietly("KV/Put", &pb.PutRequest{Key: []byte("fill"), Value: value}, &pb.PutResponse{})
			return err != nil && pair.ErrorText(err) == "error ResourceExhausted: etcdserver: mvcc: database space exceeded"
		})
	}
	quotaLine := func(s *pair.Session, what string, request any) {
		var err error
		switch request := request.(type) {
		case *pb.PutRequest:
			err = s.Quietly("KV/Put", request, &pb.PutResponse{})
		case *pb.TxnRequest:
			err = s.Quietly("KV/Txn", request, &pb.TxnResponse{})
		case *pb.LeaseGrantRequest:
			err = s.Quietly("Lease/LeaseGrant", request, &pb.LeaseGrantResponse{})
		case *pb.DeleteRangeRequest:
			err = s.Quietly("KV/DeleteRange", request, &pb.DeleteRangeResponse{})
		case *pb.RangeRequest:
			err = s.Quietly("KV/Range", request, &pb.RangeResponse{})
		case *pb.LeaseRevokeRequest:
			err = s.Quietly("Lease/LeaseRevoke", request, &pb.LeaseRevokeResponse{})
		case *pb.CompactionRequest:
			err = s.Quietly("KV/Compact", request, &pb.CompactionResponse{})
		}
		s.Note(what, pair.ErrorText(err))
	}
	// alarms asks for an alarm action and records the alarms alone: the revision depends on when the store was full.
	alarms := func(s *pair.Session, request *pb.AlarmRequest) {
		answer := &pb.AlarmResponse{}
		err := s.Quietly("Maintenance/Alarm", request, answer)
		s.Note(pair.Text(request), fmt.Sprint(pair.ErrorText(err), pair.Text(&pb.AlarmResponse{Alarms: answer.Alarms})))
	}
	errorsOf := func(s *pair.Session) {
		answer := &pb.StatusResponse{}
		s.Require(s.Quietly("Maintenance/Status", &pb.StatusRequest{}, answer) == nil, "status")
		s.Note("status errors", pair.Text(pair.Normalise(&pb.StatusResponse{Errors: answer.Errors})))
	}
	check(t, []scenario{
		{name: "kv/4.7-quota", fresh: true, flags: flags, script: func(s *pair.Session) {
			s.Status()
			s.Grant(1201, 1000)
			s.Put(leased("leased", "1", 1201))
			exhaust(s)
			alarms(s, &pb.AlarmRequest{})
			errorsOf(s)
			quotaLine(s, "put", put("a", "1"))
			quotaLine(s, "txn with a put", do(put("a", "1")))
			quotaLine(s, "txn with a put in the branch not taken", txn(nil, nil, ops(put("a", "1"))))
			quotaLine(s, "txn with a nested put", do(do(put("a", "1"))))
			quotaLine(s, "txn with a delete", do(del("a", "")))
			quotaLine(s, "txn with a read", do(get("a")))
			quotaLine(s, "grant", &pb.LeaseGrantRequest{ID: 1202, TTL: 1000})
			quotaLine(s, "grant of a TTL too large", &pb.LeaseGrantRequest{ID: 1202, TTL: math.MaxInt64})
			quotaLine(s, "range", get("a"))
			quotaLine(s, "delete", del("a", ""))
			quotaLine(s, "revoke", &pb.LeaseRevokeRequest{ID: 1201})
			quotaLine(s, "compaction", compact(2, true))
			answer := &pb.HashKVResponse{}
			s.Require(s.Quietly("Maintenance/HashKV", &pb.HashKVRequest{Revision: 2}, answer) == nil, "hash")
			s.Note("hash of revision 2", answer.Hash)
		}},
		{name: "kv/4.7-disarm", fresh: true, flags: flags, script: func(s *pair.Session) {
			exhaust(s)
			quotaLine(s, "delete", del("\x00", fromKey))
			quotaLine(s, "compaction", compact(s.Current(), true))
			s.Require(s.Quietly("Maintenance/Defragment", &pb.DefragmentRequest{}, &pb.DefragmentResponse{}) == nil, "defragment")
			quotaLine(s, "still armed", put("a", "1"))
			member := &pb.StatusResponse{}
			s.Require(s.Quietly("Maintenance/Status", &pb.StatusRequest{}, member) == nil, "status")
			alarms(s, &pb.AlarmRequest{Action: pb.AlarmRequest_DEACTIVATE, Alarm: pb.AlarmType_NOSPACE})
			alarms(s, &pb.AlarmRequest{Action: pb.AlarmRequest_DEACTIVATE, MemberID: member.Header.MemberId, Alarm: pb.AlarmType_CORRUPT})
			quotaLine(s, "still armed", put("a", "1"))
			alarms(s, &pb.AlarmRequest{Action: pb.AlarmRequest_DEACTIVATE, MemberID: member.Header.MemberId, Alarm: pb.AlarmType_NOSPACE})
			quotaLine(s, "disarmed", put("a", "1"))
			errorsOf(s)
		}},
		{name: "kv/4.7-raised-by-hand", fresh: true, script: func(s *pair.Session) {
			s.Grant(1203, 1000)
			s.Put(leased("a", "1", 1203))
			s.Alarm(&pb.AlarmRequest{Action: pb.AlarmRequest_ACTIVATE, MemberID: 42, Alarm: pb.AlarmType_NOSPACE})
			s.Put(put("a", "2"))
			s.Put(put("", "2"))
			s.Put(leased("a", "2", 404))
			s.Put(with(put("none", ""), func(r *pb.PutRequest) { r.IgnoreValue = true }))
			s.Grant(1204, 1000)
			s.Grant(1203, 1000)
			s.Grant(1204, math.MaxInt64)
			s.Txn(do(put("a", "2")))
			s.Txn(txn(nil, nil, ops(put("a", "2"))))
			s.Txn(txn(nil, ops(get("a")), ops(put("a", "2"))))
			s.Txn(do(do(put("a", "2"))))
			s.Txn(do(put("a", "2"), put("a", "3")))
			s.Txn(do(get("a"), del("b", "")))
			s.Txn(do(get("a")))
			s.Txn(do(do()))
			s.Range(everything())
			s.Delete(del("b", ""))
			s.Revoke(1203)
			s.Revoke(1204)
			s.Compact(compact(s.Current(), true))
			s.Alarm(&pb.AlarmRequest{Action: pb.AlarmRequest_DEACTIVATE, MemberID: 42, Alarm: pb.AlarmType_NOSPACE})
			s.Put(put("a", "3"))
			s.Grant(1204, 1000)
			s.HashKV(0)
		}},
		{name: "kv/4.8-corrupt-alarm", fresh: true, script: func(s *pair.Session) {
			s.Grant(1205, 1000)
			s.Put(leased("a", "1", 1205))
			w := s.Watch()
			w.Create(&pb.WatchCreateRequest{Key: []byte("a")})
			s.Alarm(&pb.AlarmRequest{Action: pb.AlarmRequest_ACTIVATE, MemberID: 42, Alarm: pb.AlarmType_CORRUPT})
			s.Put(put("a", "2"))
			s.Put(put("", "2"))
			s.Put(leased("a", "2", 404))
			s.Delete(del("a", ""))
			s.Delete(del("none", ""))
			s.Txn(do(put("a", "2")))
			s.Txn(do(del("a", "")))
			s.Txn(do(do()))
			s.Txn(do(get("a")))
			s.Txn(do(put("a", "2"), put("a", "3")))
			s.Range(everything())
			s.RangeStream(everything())
			s.Compact(compact(2, false))
			s.Compact(compact(99, false))
			s.Grant(1206, 1000)
			s.Revoke(1205)
			s.Revoke(404)
			s.TimeToLive(1205, true)
			s.HashKV(0)
			s.Status()
			s.Alarm(&pb.AlarmRequest{Action: pb.AlarmRequest_ACTIVATE, MemberID: 43, Alarm: pb.AlarmType_NOSPACE})
			s.Put(put("a", "2"))
			s.Alarm(&pb.AlarmRequest{Action: pb.AlarmRequest_DEACTIVATE, MemberID: 42, Alarm: pb.AlarmType_CORRUPT})
			s.Put(put("a", "2"))
			s.Alarm(&pb.AlarmRequest{Action: pb.AlarmRequest_DEACTIVATE, MemberID: 43, Alarm: pb.AlarmType_NOSPACE})
			s.Put(put("a", "2"))
			w.Events(map[int64]int{0: 1})
		}},
	})
}
