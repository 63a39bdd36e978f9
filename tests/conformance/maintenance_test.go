package conformance

import (
	"fmt"
	"math"
	"syscall"
	"testing"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/grpc/health/grpc_health_v1"

	"skeg.local/conformance/pair"
)

func restart(t *testing.T, stores *pair.Pair) {
	t.Helper()
	for _, store := range []*pair.Store{stores.Etcd, stores.Skeg} {
		if err := store.Restart(syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
	}
}

func TestMaintenance(t *testing.T) {
	member := func(s *pair.Session) uint64 {
		answer := &pb.StatusResponse{}
		s.Require(s.Quietly("Maintenance/Status", &pb.StatusRequest{}, answer) == nil, "status")
		return answer.Header.MemberId
	}
	alarm := func(s *pair.Session, action pb.AlarmRequest_AlarmAction, member uint64, kind pb.AlarmType) {
		s.Alarm(&pb.AlarmRequest{Action: action, MemberID: member, Alarm: kind})
	}
	const (
		list  = pb.AlarmRequest_GET
		raise = pb.AlarmRequest_ACTIVATE
		clear = pb.AlarmRequest_DEACTIVATE
	)
	check(t, []scenario{
		{name: "maintenance/8-ids", fresh: true, script: func(s *pair.Session) {
			s.Require(member(s) == 3319814642761637952, "member ID %d", member(s))
			s.Range(get("a"))
			for _, linearizable := range []bool{false, true} {
				s.Call("Cluster/MemberList", &pb.MemberListRequest{Linearizable: linearizable}, &pb.MemberListResponse{})
			}
		}},
		{name: "maintenance/8-ids-by-token-and-name", flags: []string{"--initial-cluster-token", "another", "--name", "m1", "--initial-cluster", "m1=" + pair.AdvertisedPeer}, script: func(s *pair.Session) {
			s.Call("Cluster/MemberList", &pb.MemberListRequest{}, &pb.MemberListResponse{})
		}},
		{name: "maintenance/9-alarms", fresh: true, script: func(s *pair.Session) {
			alarm(s, list, 0, 0)
			alarm(s, raise, 5, pb.AlarmType_NONE)
			alarm(s, raise, 5, pb.AlarmType_NOSPACE)
			alarm(s, raise, 5, pb.AlarmType_NOSPACE)
			alarm(s, raise, 6, pb.AlarmType_NOSPACE)
			alarm(s, raise, 5, pb.AlarmType_CORRUPT)
			alarm(s, raise, 0, pb.AlarmType_NOSPACE)
			alarm(s, raise, math.MaxUint64, pb.AlarmType_NOSPACE)
			for _, kind := range []pb.AlarmType{0, 1, 2, 3, -1} {
				alarm(s, list, 0, kind)
				alarm(s, list, 5, kind)
				alarm(s, list, 99, kind)
			}
			s.Status()
			alarm(s, clear, 0, pb.AlarmType_NOSPACE)
			alarm(s, clear, 0, pb.AlarmType_NOSPACE)
			alarm(s, clear, 5, pb.AlarmType_NONE)
			alarm(s, clear, 5, pb.AlarmType_NOSPACE)
			alarm(s, clear, 77, pb.AlarmType_NOSPACE)
			alarm(s, list, 0, 0)
			alarm(s, clear, 6, pb.AlarmType_NOSPACE)
			alarm(s, clear, math.MaxUint64, pb.AlarmType_NOSPACE)
			alarm(s, clear, 5, pb.AlarmType_CORRUPT)
			alarm(s, list, 0, 0)
			s.Put(put("a", "1"))
		}},
		{name: "maintenance/9-alarm-with-unknown-type", fresh: true, script: func(s *pair.Session) {
			for round, kind := range []pb.AlarmType{9, -1, 3, math.MaxInt32, math.MinInt32} {
				alarm(s, raise, 5, kind)
				alarm(s, raise, 5, kind)
				alarm(s, list, 0, 0)
				alarm(s, list, 0, kind)
				s.Status()
				for _, path := range []string{"/health", fmt.Sprintf("/health?exclude=%d", kind), "/health?exclude=UNKNOWN", "/livez?verbose", "/readyz?verbose"} {
					s.HTTP("GET", path)
				}
				s.Run("", etcdctl, "alarm", "list")
				values, _ := s.Metrics()
				_, present := values[fmt.Sprintf(`etcd_debugging_server_alarms{alarm_type="%d",server_id="5"}`, kind)]
				s.Note("in metrics", present)
				s.Put(put("a", "1"))
				s.Txn(do(put("b", "1")))
				s.Grant(100+int64(round), 100)
				alarm(s, clear, 6, kind)
				alarm(s, clear, 5, kind+1)
				alarm(s, clear, 5, kind)
				alarm(s, clear, 5, kind)
				alarm(s, list, 0, 0)
				s.HTTP("GET", "/health")
			}
		}},
		{name: "maintenance/9-status", script: func(s *pair.Session) {
			s.Put(put("a", "1"))
			s.Status()
			answer := &pb.StatusResponse{}
			s.Require(s.Quietly("Maintenance/Status", &pb.StatusRequest{}, answer) == nil, "status")
			s.Require(answer.Leader == answer.Header.MemberId && answer.RaftIndex >= answer.RaftAppliedIndex && answer.RaftAppliedIndex > 0 &&
				answer.DbSize >= answer.DbSizeInUse && answer.DbSizeInUse > 0, "status %s", pair.Text(answer))
		}},
		{name: "maintenance/9-status-quota", flags: []string{"--quota-backend-bytes", "123456789"}, script: func(s *pair.Session) { s.Status() }},
		{name: "maintenance/9-status-no-quota", flags: []string{"--quota-backend-bytes", "-1"}, script: func(s *pair.Session) { s.Status() }},
		{name: "maintenance/9-defragment", script: func(s *pair.Session) {
			many(s, 500)
			s.Delete(del("k", "l"))
			s.Put(put("a", "1"))
			s.Compact(compact(s.Current(), true))
			s.HashKV(0)
			s.Call("Maintenance/Defragment", &pb.DefragmentRequest{}, &pb.DefragmentResponse{})
			s.HashKV(0)
			s.Range(everything())
			s.Put(put("a", "2"))
		}},
		{name: "maintenance/9-hash", script: func(s *pair.Session) {
			s.Put(put("a", "1"))
			s.Call("Maintenance/Hash", &pb.HashRequest{}, &pb.HashResponse{})
			hash := func() uint32 {
				answer := &pb.HashResponse{}
				s.Require(s.Quietly("Maintenance/Hash", &pb.HashRequest{}, answer) == nil, "hash")
				return answer.Hash
			}
			first := hash()
			s.Require(first == hash(), "the hash of an idle store changes")
			s.Put(put("a", "2"))
			s.Require(first != hash(), "the hash does not see a write")
		}},
		{name: "maintenance/14-health", script: func(s *pair.Session) {
			for _, service := range []string{"", "etcdserverpb.KV", "none"} {
				s.Health(&grpc_health_v1.HealthCheckRequest{Service: service})
			}
			s.HealthList()
			s.HealthWatch("")
			s.HealthWatch("none")
		}},
	})
}

func TestHashKV(t *testing.T) {
	check(t, []scenario{
		{name: "hash-kv/10-vectors", fresh: true, script: func(s *pair.Session) {
			s.Require(s.HashKV(0).Hash == 1084519789, "the hash of an empty store")
			s.HashKV(1)
			s.HashKV(2)
			for _, pair := range [][2]string{{"a", "v1"}, {"b1", "x1"}, {"a", "v2"}, {"b2", "x2"}, {"a", "v3"}, {"b3", "x3"}} {
				s.Put(put(pair[0], pair[1]))
			}
			s.Delete(del("b1", ""))
			s.Grant(2324035718736983308, 1000)
			s.Put(leased("c", "lv", 2324035718736983308))
			s.Txn(do(put("p1", "1"), put("p2", "2"), del("b2", "")))
			vector := func(revision int64, hash uint32) {
				s.Require(s.HashKV(revision).Hash == hash, "the hash at %d", revision)
			}
			vector(0, 65650297)
			vector(10, 65650297)
			vector(8, 1544106079)
			vector(5, 3711152918)
			s.Compact(compact(8, true))
			vector(10, 2032974217)
			vector(9, 3111960879)
			vector(8, 1544106079)
			s.HashKV(7)
			s.HashKV(11)
		}},
		{name: "hash-kv/10-bounds", script: func(s *pair.Session) {
			fill(s)
			for _, revision := range []int64{math.MinInt64, -1, 0, 1, s.Current(), s.Current() + 1, math.MaxInt64} {
				s.HashKV(revision)
			}
			s.Compact(compact(s.Current()-2, true))
			for offset := range int64(6) {
				s.HashKV(s.Current() - offset)
			}
		}},
		{name: "hash-kv/10-superseded-after-the-compaction", script: func(s *pair.Session) {
			s.Put(put("a", "1"))
			s.Put(put("b", "1"))
			s.Put(put("c", "1"))
			s.Compact(compact(s.Current(), true))
			s.Put(put("a", "2"))
			s.Delete(del("b", ""))
			for offset := range int64(3) {
				s.HashKV(s.Current() - offset)
			}
		}},
		{name: "hash-kv/10-nothing-kept", script: func(s *pair.Session) {
			s.Put(put("a", "1"))
			s.Put(put("b", "1"))
			s.Delete(del("a", "c"))
			s.Compact(compact(s.Current(), true))
			s.HashKV(0)
			s.HashKV(s.Current())
			s.Put(put("a", "2"))
			s.HashKV(0)
			s.HashKV(s.Current() - 1)
			s.Delete(del("a", ""))
			s.HashKV(0)
		}},
		{name: "hash-kv/10-cache-of-compactions", fresh: true, script: func(s *pair.Session) {
			var compacted []int64
			for i := range 13 {
				s.Put(put("a", fmt.Sprint(i)))
				s.Put(put(fmt.Sprintf("b%d", i%4), fmt.Sprint(i)))
				if i%3 == 0 {
					s.Delete(del("b1", ""))
				}
				revision := s.Current()
				s.HashKV(revision)
				s.Compact(compact(revision, true))
				compacted = append(compacted, revision)
				s.HashKV(revision)
				for _, earlier := range compacted {
					s.HashKV(earlier)
				}
				s.HashKV(revision - 1)
				s.HashKV(0)
			}
		}},
		{name: "hash-kv/10-cache-keeps-ten", fresh: true, script: func(s *pair.Session) {
			for range 15 {
				s.Put(put("a", "x"))
				s.Compact(compact(s.Current(), true))
			}
			for revision := int64(1); revision <= s.Current(); revision++ {
				s.HashKV(revision)
			}
		}},
		{name: "hash-kv/10-logical-compaction", fresh: true, script: func(s *pair.Session) {
			fill(s)
			s.Compact(compact(6, false))
			s.Await("the compaction has finished", func() bool {
				answer := &pb.HashKVResponse{}
				return s.Quietly("Maintenance/HashKV", &pb.HashKVRequest{Revision: 6}, answer) == nil && answer.CompactRevision == -1
			})
			for revision := int64(5); revision <= s.Current(); revision++ {
				s.HashKV(revision)
			}
		}},
	})
}
