package conformance

import (
	"bytes"
	"fmt"
	"math"
	"strings"
	"testing"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	_ "google.golang.org/grpc/encoding/gzip" // Registers the compressor that UseCompressor names.
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"skeg.local/conformance/pair"
)

// maxMessage is the default receive limit: max-request-bytes and 512 KiB.
const maxMessage = 1_572_864 + 524_288

// putOfSize builds a put whose encoding has exactly that many bytes.
func putOfSize(size int) *pb.PutRequest {
	r := put("big", strings.Repeat("v", size-32))
	for proto.Size(r) < size {
		r.Value = append(r.Value, 'v')
	}
	return r
}

func TestTransport(t *testing.T) {
	encode := func(s *pair.Session, message proto.Message) []byte {
		payload, err := proto.Marshal(message)
		s.Require(err == nil, "encode: %v", err)
		return payload
	}
	check(t, []scenario{
		{name: "errors/2.8-message-too-large", script: func(s *pair.Session) {
			for _, size := range []int{maxMessage, maxMessage + 1, 4 << 20, 40 << 20} {
				s.Put(putOfSize(size))
			}
			s.Range(with(get("a"), func(r *pb.RangeRequest) { r.RangeEnd = bytes.Repeat([]byte("z"), maxMessage) }))
			s.Range(get("big"))
		}},
		{name: "errors/2.8-message-too-large-by-flag", flags: []string{"--max-request-bytes", "1000"}, script: func(s *pair.Session) {
			for _, size := range []int{900, 1100, 500_000, 525_288, 525_289} {
				s.Put(putOfSize(size))
			}
		}},
		{name: "errors/2.1-request-too-large", flags: []string{"--max-request-bytes", "10000"}, script: func(s *pair.Session) {
			for _, size := range []int{9_900, 10_100, 100_000} {
				s.Put(putOfSize(size))
				s.Txn(do(putOfSize(size)))
				s.Txn(do(with(get("a"), func(r *pb.RangeRequest) { r.RangeEnd = bytes.Repeat([]byte("z"), size) })))
				s.Delete(del("a", strings.Repeat("z", size)))
				s.Range(span("a", strings.Repeat("z", size)))
				s.Put(with(leased("", strings.Repeat("z", size), 404), func(r *pb.PutRequest) { r.IgnoreLease = true }))
				s.Put(leased("a", strings.Repeat("z", size), 404))
			}
			s.Range(get("big"))
		}},
		{name: "transport/pings-without-a-call", script: func(s *pair.Session) {
			p := s.Pinging()
			defer p.Close()
			p.Ping(9, 0)
		}},
		{name: "transport/pings-after-a-call", flags: []string{"--grpc-keepalive-min-time", "10ms"}, script: func(s *pair.Session) {
			p := s.Pinging()
			defer p.Close()
			p.Open("/etcdserverpb.KV/Range", encode(s, get("a")), true)
			p.Answered()
			p.Ping(9, 150*time.Millisecond)
		}},
		{name: "transport/pings-with-a-watch", flags: []string{"--grpc-keepalive-min-time", "10ms"}, script: func(s *pair.Session) {
			p := s.Pinging()
			defer p.Close()
			p.Open("/etcdserverpb.Watch/Watch", nil, false)
			p.Ping(9, 150*time.Millisecond)
		}},
		{name: "transport/pings-too-soon-with-a-watch", flags: []string{"--grpc-keepalive-min-time", "1m"}, script: func(s *pair.Session) {
			p := s.Pinging()
			defer p.Close()
			p.Open("/etcdserverpb.Watch/Watch", nil, false)
			p.Ping(9, 150*time.Millisecond)
		}},
		{name: "transport/pings-between-answers", script: func(s *pair.Session) {
			p := s.Pinging()
			defer p.Close()
			for range 5 {
				p.Ping(2, 0)
				p.Open("/etcdserverpb.KV/Range", encode(s, get("a")), true)
				p.Answered()
			}
			p.Ping(9, 0)
		}},
		{name: "transport/pings-without-a-limit-set", flags: []string{"--grpc-keepalive-min-time", "0s"}, script: func(s *pair.Session) {
			p := s.Pinging()
			defer p.Close()
			p.Open("/etcdserverpb.Watch/Watch", nil, false)
			p.Ping(9, 150*time.Millisecond)
		}},
		{name: "errors/2.8-unknown-rpc", script: func(s *pair.Session) {
			for _, path := range []string{
				"/etcdserverpb.KV/Nothing", "/etcdserverpb.Nothing/Range", "/KV/Range", "/etcdserverpb.KV/range", "/etcdserverpb.Lease/Range",
				"/grpc.reflection.v1.ServerReflection/ServerReflectionInfo", "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
				"/a/b/c", "/etcdserverpb.KV/Range/x", "/etcdserverpb.KV/", "/x/", "/mvccpb.KV/Range",
			} {
				s.Raw(path, nil)
			}
		}},
		{name: "errors/2.8-undecodable-requests", script: func(s *pair.Session) {
			s.Put(put("a", "1"))
			for _, payload := range []string{
				"\xff", "\x0a", "\x0a\xff", "\x0a\x05ab", "\x08", "\x0a\x01a\x1f", "\x0f", "\x00\x00", "\x0a\x01a\x18\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01",
				"\x0b", "\x0c", "\x0a\xff\xff\xff\xff\x0f", strings.Repeat("\x80", 20),
			} {
				for _, path := range []string{"/etcdserverpb.KV/Range", "/etcdserverpb.KV/Put", "/etcdserverpb.KV/Txn", "/etcdserverpb.Lease/LeaseGrant", "/etcdserverpb.KV/RangeStream"} {
					s.Raw(path, []byte(payload))
				}
			}
			s.Range(get("a"))
		}},
		{name: "errors/2.8-odd-but-decodable-requests", script: func(s *pair.Session) {
			s.Put(put("a", "1"))
			for _, payload := range []string{
				"", "\x0a\x01a", "\x0a\x01x\x0a\x01a", "\x0a\x01a\x18\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", "\x0a\x01a\xb8\x3e\x05",
				"\x12\x00\x0a\x01a", "\x0a\x01a\x28\x02\x28\x00", "\x0a\x01a\x28\xff\xff\xff\xff\x0f", "\x0a\x01a\x38\x02",
				"\x0a\x01a\xa3\x06\xa4\x06",
			} {
				s.Raw("/etcdserverpb.KV/Range", []byte(payload))
			}
			// A put and a range in one oneof: the last one wins.
			both := encode(s, do(put("b", "1"), get("a")))
			s.Raw("/etcdserverpb.KV/Txn", both)
			operation := append(encode(s, op(put("c", "1"))), encode(s, op(get("a")))...)
			s.Raw("/etcdserverpb.KV/Txn", append([]byte{0x12, byte(len(operation))}, operation...))
			operation = append(encode(s, op(get("a"))), encode(s, op(put("c", "1")))...)
			s.Raw("/etcdserverpb.KV/Txn", append([]byte{0x12, byte(len(operation))}, operation...))
			operation = append(encode(s, op(put("d", "1"))), encode(s, op(put("", "2")))...)
			s.Raw("/etcdserverpb.KV/Txn", append([]byte{0x12, byte(len(operation))}, operation...))
			s.Range(everything())
		}},
		{name: "errors/2.8-nested-to-the-decoder's-limit", script: func(s *pair.Session) {
			for _, depth := range []int{20, deepest - 1} {
				request := do()
				for range depth {
					request = do(request)
				}
				s.Txn(request)
			}
			s.Range(get("a"))
		}},
		{name: "errors/2.8-gzip", script: func(s *pair.Session) {
			s.Call("KV/Put", put("a", strings.Repeat("x", 100_000)), &pb.PutResponse{}, grpc.UseCompressor("gzip"))
			s.Call("KV/Range", get("a"), &pb.RangeResponse{}, grpc.UseCompressor("gzip"))
			// Small on the wire, too large once unpacked.
			s.Call("KV/Put", putOfSize(maxMessage+1), &pb.PutResponse{}, grpc.UseCompressor("gzip"))
			s.Call("KV/Put", putOfSize(60<<20), &pb.PutResponse{}, grpc.UseCompressor("gzip"))
		}},
		{name: "errors/2.8-other-encodings", script: func(s *pair.Session) {
			for _, encoding := range []string{"deflate", "zstd", "snappy", "identity", "nonsense"} {
				for _, flag := range []byte{0, 1} {
					s.HTTP2("/etcdserverpb.KV/Range", [][2]string{{"content-type", "application/grpc"}, {"te", "trailers"}, {"grpc-encoding", encoding}}, frame(flag, encode(s, get("a"))))
				}
			}
			s.HTTP2("/etcdserverpb.KV/Range", [][2]string{{"content-type", "application/grpc"}, {"te", "trailers"}}, frame(1, encode(s, get("a"))))
			s.HTTP2("/etcdserverpb.KV/Range", [][2]string{{"content-type", "application/grpc"}, {"te", "trailers"}, {"grpc-encoding", "gzip"}}, frame(1, []byte("not gzip")))
			s.HTTP2("/etcdserverpb.KV/Range", [][2]string{{"content-type", "application/grpc"}, {"te", "trailers"}}, frame(7, encode(s, get("a"))))
		}},
		{name: "errors/2.8-content-types", script: func(s *pair.Session) {
			for _, kind := range []string{"application/grpc", "application/grpc+proto", "application/grpc+json", "application/grpc;x", "application/grpcx", "application/json", "text/plain", ""} {
				s.HTTP2("/etcdserverpb.KV/Range", [][2]string{{"content-type", kind}, {"te", "trailers"}}, frame(0, encode(s, get("a"))))
			}
		}},
		{name: "errors/2.8-broken-frames", script: func(s *pair.Session) {
			good := frame(0, encode(s, get("a")))
			headers := [][2]string{{"content-type", "application/grpc"}, {"te", "trailers"}}
			s.HTTP2("/etcdserverpb.KV/Range", headers, nil)
			s.HTTP2("/etcdserverpb.KV/Range", headers, good[:3])
			s.HTTP2("/etcdserverpb.KV/Range", headers, good[:len(good)-1])
			s.HTTP2("/etcdserverpb.KV/Range", headers, append(append([]byte{}, good...), good...))
			s.HTTP2("/etcdserverpb.KV/Range", headers, []byte{0, 0xff, 0xff, 0xff, 0xff})
			s.HTTP2("/etcdserverpb.KV/Range", append(headers, [2]string{"grpc-timeout", "10S"}), good)
			for _, path := range []string{"/etcdserverpb.Lease/LeaseRevoke", "/etcdserverpb.KV/RangeStream", "/etcdserverpb.Maintenance/HashKV"} {
				s.HTTP2(path, headers, nil)
				s.HTTP2(path, headers, good[:len(good)-1])
			}
			s.HTTP2("/etcdserverpb.Watch/Watch", headers, good[:len(good)-1])
			s.HTTP2("/etcdserverpb.Lease/LeaseKeepAlive", headers, good[:len(good)-1])
		}},
		{name: "errors/2.6-client-api-version", script: func(s *pair.Session) {
			for _, version := range []string{"3.7", "", "abc", "99"} {
				s.HTTP2("/etcdserverpb.KV/Range", [][2]string{{"content-type", "application/grpc"}, {"te", "trailers"}, {"client-api-version", version}}, frame(0, encode(s, get("a"))))
			}
			s.HTTP2("/etcdserverpb.KV/Range", [][2]string{{"content-type", "application/grpc"}, {"te", "trailers"}, {"client-api-version", "\xff\xfe"}}, frame(0, encode(s, get("a"))))
			s.HTTP2("/etcdserverpb.Watch/Watch", [][2]string{{"content-type", "application/grpc"}, {"te", "trailers"}, {"client-api-version", "\xff\xfe"}}, frame(0, nil))
		}},
		{name: "errors/2.6-deadline", script: func(s *pair.Session) {
			s.HTTP2("/etcdserverpb.KV/Range", [][2]string{{"content-type", "application/grpc"}, {"te", "trailers"}, {"grpc-timeout", "1M"}}, frame(0, encode(s, get("a"))))
			s.With("hasleader", "true").Range(get("a"))
			s.Put(put("a", "1"))
		}},
		{name: "errors/2.5-token-while-auth-is-off", script: func(s *pair.Session) {
			s.With("token", "nonsense").Put(put("a", "1"))
			s.With("authorization", "Bearer nonsense").Range(get("a"))
		}},
	})
}

// frame prefixes a gRPC message with its flag and length.
func frame(flag byte, payload []byte) []byte {
	size := len(payload)
	return append([]byte{flag, byte(size >> 24), byte(size >> 16), byte(size >> 8), byte(size)}, payload...)
}

// TestOrderOfChecks is about requests with more than one fault: the one reported must be the same.
func TestOrderOfChecks(t *testing.T) {
	big := strings.Repeat("x", 1_600_000)
	check(t, []scenario{
		{name: "order/15-validation-before-size", script: func(s *pair.Session) {
			s.Put(put("", big))
			s.Put(with(put("a", big), func(r *pb.PutRequest) { r.IgnoreValue = true }))
			s.Put(leased("a", big, 404))
			s.Txn(do(put("a", big), put("a", "2")))
			s.Txn(do(put("a", big), leased("b", "2", 404)))
			s.Txn(do(put("a", big)))
			s.Delete(del("", big))
		}},
		{name: "order/15-revision-after-validation", script: func(s *pair.Session) {
			s.Range(with(get(""), func(r *pb.RangeRequest) { r.Revision = math.MaxInt64 }))
			s.Range(with(get("a"), func(r *pb.RangeRequest) { r.Revision, r.SortOrder = math.MaxInt64, 5 }))
			s.RangeStream(with(get(""), func(r *pb.RangeRequest) { r.Revision, r.SortOrder = math.MaxInt64, 2 }))
			s.RangeStream(with(get("a"), func(r *pb.RangeRequest) { r.Revision, r.SortOrder = math.MaxInt64, 2 }))
		}},
		{name: "order/15-lease-before-ignore", script: func(s *pair.Session) {
			s.Put(with(leased("none", "", 404), func(r *pb.PutRequest) { r.IgnoreValue = true }))
			s.Put(put("there", "1"))
			s.Put(with(leased("there", "", 404), func(r *pb.PutRequest) { r.IgnoreValue = true }))
			s.Txn(do(with(leased("none", "", 404), func(r *pb.PutRequest) { r.IgnoreValue = true })))
			s.Txn(do(with(leased("there", "", 404), func(r *pb.PutRequest) { r.IgnoreValue = true })))
		}},
		{name: "order/15-grant", script: func(s *pair.Session) {
			s.Grant(1801, 1000)
			s.Grant(1801, math.MaxInt64)
			s.Grant(1801, math.MinInt64)
		}},
		{name: "order/15-quota-before-validation", fresh: true, flags: []string{"--quota-backend-bytes", "1"}, script: func(s *pair.Session) {
			s.Range(get("a"))
			s.Delete(del("a", ""))
			s.Txn(do(del("a", "")))
			s.Txn(do(get("")))
			s.Put(put("", "1"))
			s.Alarm(&pb.AlarmRequest{})
			s.Put(put("a", "1"))
			s.Txn(do(put("a", "1"), put("a", "2")))
			s.Txn(do(del("a", ""), &pb.RequestOp{}))
			s.Txn(txn(compares(ifVersion("", equal, 0)), nil, ops(put("a", "1"))))
			s.Grant(1, math.MaxInt64)
			s.Status()
		}},
		{name: "order/15-corrupt-before-no-space", fresh: true, script: func(s *pair.Session) {
			s.Alarm(&pb.AlarmRequest{Action: pb.AlarmRequest_ACTIVATE, MemberID: 1, Alarm: pb.AlarmType_NOSPACE})
			s.Put(put("a", "1"))
			s.Alarm(&pb.AlarmRequest{Action: pb.AlarmRequest_ACTIVATE, MemberID: 1, Alarm: pb.AlarmType_CORRUPT})
			s.Put(put("a", "1"))
			s.Txn(do(put("a", "1")))
			s.Txn(do(del("a", "")))
			s.Grant(1, 1000)
			s.Put(put("a", big))
		}},
	})
}

// TestBadInput sends what has killed servers; both stores must answer the same, and go on.
func TestBadInput(t *testing.T) {
	check(t, []scenario{
		{name: "bad-input/absurd-numbers", script: func(s *pair.Session) {
			numbers := []int64{math.MinInt64, math.MinInt64 + 1, -1, 0, 1, math.MaxInt64 - 1, math.MaxInt64}
			s.Put(put("a", "1"))
			for _, a := range numbers {
				for _, b := range numbers {
					s.Range(&pb.RangeRequest{Key: []byte("a"), RangeEnd: []byte{0}, Limit: a, MinModRevision: b, MaxModRevision: a, MinCreateRevision: a, MaxCreateRevision: b})
					s.Range(&pb.RangeRequest{Key: []byte("a"), RangeEnd: []byte{0}, Limit: a, Revision: b})
				}
				s.TimeToLive(a, true)
				s.HashKV(a)
			}
		}},
		{name: "bad-input/negative-compactions", script: func(s *pair.Session) {
			s.Put(put("a", "1"))
			for _, revision := range []int64{math.MinInt64, -1, 0, math.MaxInt64} {
				s.Compact(compact(revision, true))
				s.Compact(compact(revision, false))
			}
			s.Put(put("a", "2"))
		}},
		{name: "bad-input/thousand-watchers", script: func(s *pair.Session) {
			w := s.Watch()
			for i := range 1000 {
				w.SendCreate(watchKey(fmt.Sprintf("k%d", i)))
			}
			for range 1000 {
				w.Next()
			}
			s.Txn(do(put("k1", "1"), put("k999", "1")))
			w.Events(map[int64]int{1: 1, 999: 1})
			w.Cancel()
		}},
		{name: "bad-input/thousand-leases", script: func(s *pair.Session) {
			for i := range int64(1000) {
				s.Grant(10_000+i, 1000)
			}
			s.Leases()
			for i := range int64(1000) {
				s.Revoke(10_000 + i)
			}
			s.Leases()
		}},
		{name: "bad-input/long-keys", script: func(s *pair.Session) {
			long := strings.Repeat("k", 1_500_000)
			s.Put(put(long, "1"))
			s.Range(get(long))
			s.Range(with(span(long[:1_000_000], long+"z"), func(r *pb.RangeRequest) { r.KeysOnly = true }))
			s.Txn(txn(compares(ifValue(long, equal, "1")), nil, nil))
			w := s.Watch()
			w.Create(watchSpan(long[:100], "z"))
			s.Delete(delPrev(long, ""))
			w.Next()
			w.Cancel()
			s.HashKV(0)
		}},
	})
}

// TestDeadlyRequests sends skeg what ends etcd 3.7.3 for good: a transaction that puts, with ignore_value, a key that an earlier from-key delete
// of the same transaction has removed; and a compaction at the revision of a transaction that deletes and then puts a key (etcd drops the put
// but not its index entry, and dies on the next read); and an alarm request with an unknown action. None is sent to etcd. skeg must refuse or
// carry out the first, lose nothing in the second, refuse the third, and serve on.
func TestDeadlyRequests(t *testing.T) {
	stores := freshPair(t)
	store := stores.Skeg
	onlySkeg(t, store)
	s := pair.NewSession(store)
	for _, change := range []func(*pb.PutRequest){
		func(r *pb.PutRequest) { r.IgnoreValue = true },
		func(r *pb.PutRequest) { r.IgnoreLease = true },
		func(r *pb.PutRequest) { r.IgnoreLease, r.IgnoreValue = true, true },
	} {
		for _, deletes := range []*pb.DeleteRangeRequest{del("a", fromKey), del("\x00", fromKey)} {
			deadly := []*pb.TxnRequest{
				do(deletes, with(put("b", ""), change)),
				do(do(deletes), with(put("b", ""), change)),
				do(do(deletes), do(with(put("b", ""), change))),
				do(put("x", "1"), deletes, get("b"), with(put("b", ""), change)),
				txn(nil, nil, nil),
			}
			deadly[4] = txn(compares(ifVersion("b", equal, 0)), nil, ops(deletes, with(put("b", ""), change)))
			for _, request := range deadly {
				if err := s.Quietly("KV/Put", put("b", "kept"), &pb.PutResponse{}); err != nil {
					t.Fatalf("after %s: %v", pair.Text(request), err)
				}
				before := s.Current()
				err := s.Quietly("KV/Txn", request, &pb.TxnResponse{})
				answer := &pb.RangeResponse{}
				if err := s.Quietly("KV/Range", everything(), answer); err != nil {
					t.Fatalf("after %s: %v", pair.Text(request), err)
				}
				if err != nil {
					if got := pair.ErrorText(err); got != "error InvalidArgument: etcdserver: key not found" {
						t.Errorf("%s: %s", pair.Text(request), got)
					}
					if answer.Header.Revision != before || answer.Count != 1 || string(answer.Kvs[0].Value) != "kept" {
						t.Errorf("%s: refused, but the store changed: %s", pair.Text(request), pair.Text(answer))
					}
				}
			}
		}
	}
	if err := s.Quietly("KV/Txn", do(del("a", fromKey), put("b", "after the delete"), put("c", "new")), &pb.TxnResponse{}); err != nil {
		t.Fatal(err)
	}
	if err := s.Quietly("KV/Compact", compact(s.Current(), true), &pb.CompactionResponse{}); err != nil {
		t.Fatal(err)
	}
	answer := &pb.RangeResponse{}
	if err := s.Quietly("KV/Range", everything(), answer); err != nil {
		t.Fatal(err)
	}
	if answer.Count != 2 || string(answer.Kvs[0].Value) != "after the delete" || string(answer.Kvs[1].Value) != "new" {
		t.Errorf("after the compaction: %s", pair.Text(answer))
	}
	for _, action := range []pb.AlarmRequest_AlarmAction{3, -1, 1 << 30} {
		if err := s.Quietly("Maintenance/Alarm", &pb.AlarmRequest{Action: action, MemberID: 5, Alarm: pb.AlarmType_NOSPACE}, &pb.AlarmResponse{}); status.Code(err) != codes.InvalidArgument {
			t.Errorf("alarm action %d: %v", action, err)
		}
	}
	if err := store.Restart(9); err != nil {
		t.Fatal(err)
	}
	if err := pair.NewSession(store).Quietly("KV/Put", put("alive", "1"), &pb.PutResponse{}); err != nil {
		t.Fatal(err)
	}
}
