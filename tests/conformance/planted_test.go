package conformance

import (
	"slices"
	"testing"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"skeg.local/conformance/pair"
)

// lie decodes the answers of one method, lets change at them and encodes them again.
func lie[R any, M interface {
	*R
	proto.Message
}](method string, change func(M) error) pair.Lie {
	return func(asked string, answer []byte) ([]byte, error) {
		if asked != "/etcdserverpb."+method {
			return answer, nil
		}
		message := M(new(R))
		if err := proto.Unmarshal(answer, message); err != nil {
			return nil, err
		}
		if err := change(message); err != nil {
			return nil, err
		}
		return proto.Marshal(message)
	}
}

// TestPlantedDifferences puts a proxy that lies a little in front of an etcd and requires that it is found out.
func TestPlantedDifferences(t *testing.T) {
	watch := func(s *pair.Session) {
		w := s.Watch()
		w.Create(watchSpan("a", "z"))
		s.Txn(do(put("a", "1"), put("b", "1")))
		w.Next()
		w.Cancel()
	}
	for _, planted := range []struct {
		name   string
		lie    pair.Lie
		script func(*pair.Session)
	}{
		{"header revision", lie("KV/Put", func(r *pb.PutResponse) error { r.Header.Revision++; return nil }), func(s *pair.Session) { s.Put(put("a", "1")) }},
		{"member ID", lie("KV/Range", func(r *pb.RangeResponse) error { r.Header.MemberId++; return nil }), func(s *pair.Session) { s.Range(get("a")) }},
		{"no header", lie("KV/Range", func(r *pb.RangeResponse) error { r.Header = nil; return nil }), func(s *pair.Session) { s.Note("header", s.Range(get("a")).Header != nil) }},
		{"a header too many", lie("Maintenance/Defragment", func(r *pb.DefragmentResponse) error { r.Header = &pb.ResponseHeader{}; return nil }), func(s *pair.Session) {
			s.Call("Maintenance/Defragment", &pb.DefragmentRequest{}, &pb.DefragmentResponse{})
		}},
		{"more", lie("KV/Range", func(r *pb.RangeResponse) error { r.More = len(r.Kvs) > 0; return nil }), func(s *pair.Session) {
			fill(s)
			s.Range(everything())
		}},
		{"order of keys", lie("KV/Range", func(r *pb.RangeResponse) error { slices.Reverse(r.Kvs); return nil }), func(s *pair.Session) {
			fill(s)
			s.Range(everything())
		}},
		{"error text", lie("KV/Compact", func(*pb.CompactionResponse) error {
			return status.Error(codes.OutOfRange, "etcdserver: mvcc: required revision was compacted")
		}), func(s *pair.Session) { s.Compact(compact(s.Current(), false)) }},
		{"error for an answer", lie("KV/Put", func(*pb.PutResponse) error { return status.Error(codes.Internal, "no") }), func(s *pair.Session) { s.Put(put("a", "1")) }},
		{"hash", lie("Maintenance/HashKV", func(r *pb.HashKVResponse) error { r.Hash ^= 1; return nil }), func(s *pair.Session) { s.HashKV(0) }},
		{"lease TTL", lie("Lease/LeaseTimeToLive", func(r *pb.LeaseTimeToLiveResponse) error { r.TTL -= ttlOff; return nil }), func(s *pair.Session) {
			s.Grant(1, 1000)
			s.TimeToLive(1, false)
		}},
		{"keep-alive TTL", lie("Lease/LeaseKeepAlive", func(r *pb.LeaseKeepAliveResponse) error { r.TTL--; return nil }), func(s *pair.Session) {
			s.Grant(1, 1000)
			k := s.KeepAlive()
			k.Send(1)
			k.Next()
			k.Cancel()
		}},
		{"order of events", lie("Watch/Watch", func(r *pb.WatchResponse) error { slices.Reverse(r.Events); return nil }), watch},
		{"a lost event", lie("Watch/Watch", func(r *pb.WatchResponse) error { r.Events = r.Events[:len(r.Events)/2]; return nil }), watch},
		{"watch ID", lie("Watch/Watch", func(r *pb.WatchResponse) error { r.WatchId++; return nil }), watch},
		{"merged stream", lie("KV/RangeStream", func(r *pb.RangeStreamResponse) error { r.RangeResponse.Count = 0; return nil }), func(s *pair.Session) {
			fill(s)
			s.RangeStream(everything())
		}},
		{"alarm", lie("Maintenance/Alarm", func(r *pb.AlarmResponse) error { r.Alarms = nil; return nil }), func(s *pair.Session) {
			s.Alarm(&pb.AlarmRequest{Action: pb.AlarmRequest_ACTIVATE, MemberID: 1, Alarm: pb.AlarmType_NOSPACE})
		}},
	} {
		t.Run(planted.name, func(t *testing.T) {
			stores, stop := liars(t, planted.lie)
			defer stop()
			if stores.Compare(planted.script) == nil {
				t.Error("not found out")
			}
			// The same script against the honest store: the lie was the difference.
			honest, end := liars(t, func(_ string, answer []byte) ([]byte, error) { return answer, nil })
			defer end()
			if difference := honest.Compare(planted.script); difference != nil {
				t.Errorf("found without a lie:\n%s", difference.Text)
			}
		})
	}
}

// ttlOff is more than what Normalise forgives.
const ttlOff = 100

// TestPlantedDifferenceIsShrunk requires that a random history finds a lie told in rare cases, and becomes short.
func TestPlantedDifferenceIsShrunk(t *testing.T) {
	start := func(t *testing.T) (*pair.Pair, func()) {
		return liars(t, lie("KV/DeleteRange", func(r *pb.DeleteRangeResponse) error {
			if len(r.PrevKvs) > 1 {
				slices.Reverse(r.PrevKvs)
			}
			return nil
		}))
	}
	history := newHistory(fixedSeed, 400)
	difference := history.compare(t, start)
	if difference == nil {
		t.Fatal("not found out")
	}
	smallest, _ := history.shrink(t, start, difference)
	// Two keys and a delete of both show it; half a dozen operations is short enough to read.
	if len(smallest) > 6 {
		t.Errorf("%d operations: %v", len(smallest), smallest.names())
	}
	t.Logf("%v", smallest.names())
}

// liars returns two etcds, emptied, the second behind a lying proxy.
func liars(t *testing.T, lie pair.Lie) (*pair.Pair, func()) {
	t.Helper()
	stores, err := etcds.Shared()
	if err != nil {
		t.Fatal(err)
	}
	liar, stop, err := stores.Skeg.Through(lie)
	if err != nil {
		t.Fatal(err)
	}
	return &pair.Pair{Etcd: stores.Etcd, Skeg: liar}, stop
}
