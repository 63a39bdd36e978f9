package conformance

import (
	"fmt"
	"math"
	"testing"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"skeg.local/conformance/pair"
)

func TestTxnValidation(t *testing.T) {
	opsOf := func(count int) []*pb.RequestOp {
		var list []*pb.RequestOp
		for i := range count {
			list = append(list, op(put(fmt.Sprintf("k%d", i), "v")))
		}
		return list
	}
	comparesOf := func(count int) []*pb.Compare {
		var list []*pb.Compare
		for i := range count {
			list = append(list, ifVersion(fmt.Sprintf("k%d", i), equal, 0))
		}
		return list
	}
	ignoring := func(key string) *pb.PutRequest {
		return with(put(key, ""), func(r *pb.PutRequest) { r.IgnoreValue = true })
	}
	check(t, []scenario{
		{name: "kv/4.5-too-many-ops", script: func(s *pair.Session) {
			for _, count := range []int{127, 128, 129, 300} {
				s.Txn(txn(nil, opsOf(count), nil))
				s.Txn(txn(nil, nil, opsOf(count)))
				s.Txn(txn(comparesOf(count), nil, nil))
			}
			s.Txn(txn(comparesOf(128), opsOf(128), opsOf(128)))
		}},
		{name: "kv/4.5-too-many-ops-nested", script: func(s *pair.Session) {
			nested := func(counts ...int) *pb.TxnRequest {
				var inner *pb.TxnRequest
				for i := len(counts) - 1; i >= 0; i-- {
					list := []*pb.RequestOp{}
					for j := range counts[i] {
						if j == 0 && inner != nil {
							list = append(list, op(inner))
						} else {
							list = append(list, op(put(fmt.Sprintf("level%d-%d", i, j), "v")))
						}
					}
					inner = txn(nil, list, nil)
				}
				return inner
			}
			s.Txn(nested(1, 127))
			s.Txn(nested(1, 128))
			s.Txn(nested(64, 64))
			s.Txn(nested(64, 65))
			s.Txn(nested(128, 0))
			s.Txn(nested(128, 1))
			s.Txn(nested(40, 40, 48))
			s.Txn(nested(40, 40, 49))
			s.Txn(do(nested(60), nested(60), nested(60)))
			s.Txn(do(txn(nil, opsOf(125), nil), txn(nil, nil, opsOf(125))))
			s.Txn(do(txn(nil, opsOf(127), nil), txn(nil, nil, opsOf(127))))
			s.Txn(txn(comparesOf(100), ops(txn(comparesOf(28), nil, nil)), nil))
			s.Txn(txn(comparesOf(100), ops(txn(comparesOf(29), nil, nil)), nil))
			s.Txn(txn(comparesOf(2), ops(txn(nil, nil, opsOf(127))), nil))
		}},
		{name: "kv/4.5-deeply-nested", script: func(s *pair.Session) {
			for _, depth := range []int{2, 5, 20, 40, deepest} {
				request := do(put("deep", fmt.Sprint(depth)))
				for range depth - 1 {
					request = do(request)
				}
				s.Txn(request)
				s.Range(get("deep"))
			}
		}},
		{name: "kv/4.5-invalid-members", script: func(s *pair.Session) {
			s.Put(put("a", "1"))
			s.Txn(txn(compares(ifVersion("", equal, 0)), nil, nil))
			s.Txn(do(get("")))
			s.Txn(do(put("", "v")))
			s.Txn(do(del("", "")))
			s.Txn(do(del("", "z")))
			s.Txn(do(&pb.RequestOp{}))
			s.Txn(do(&pb.RequestOp{Request: &pb.RequestOp_RequestRange{}}))
			s.Txn(do(&pb.RequestOp{Request: &pb.RequestOp_RequestPut{RequestPut: &pb.PutRequest{}}}))
			s.Txn(do(with(put("a", "v"), func(r *pb.PutRequest) { r.IgnoreValue = true })))
			s.Txn(do(with(leased("a", "v", 1), func(r *pb.PutRequest) { r.IgnoreLease = true })))
			s.Txn(do(with(get("a"), func(r *pb.RangeRequest) { r.SortOrder = 9 })))
			s.Txn(do(with(get("a"), func(r *pb.RangeRequest) { r.SortTarget = -9 })))
			s.Txn(txn(nil, nil, ops(get(""))))
			s.Txn(txn(nil, nil, ops(&pb.RequestOp{})))
			s.Txn(do(do(put("", "v"))))
			s.Txn(do(do(&pb.RequestOp{})))
			s.Txn(do(txn(nil, nil, ops(txn(compares(ifValue("", less, "x")), nil, nil)))))
		}},
		{name: "kv/4.5-first-error-wins", script: func(s *pair.Session) {
			s.Txn(txn(compares(ifVersion("", equal, 0)), ops(&pb.RequestOp{}), nil))
			s.Txn(txn(nil, ops(&pb.RequestOp{}), ops(put("", ""))))
			s.Txn(txn(nil, ops(put("a", ""), &pb.RequestOp{}, put("", "")), nil))
			s.Txn(txn(nil, ops(put("a", ""), put("a", "")), ops(put("", ""))))
			s.Txn(txn(nil, append(opsOf(129), op(put("", ""))), nil))
			s.Txn(txn(nil, ops(put("a", ""), put("a", ""), leased("b", "", 404)), nil))
			s.Txn(txn(nil, ops(leased("b", "", 404), with(get("a"), func(r *pb.RangeRequest) { r.Revision = math.MaxInt64 })), nil))
			s.Txn(txn(nil, ops(with(get("a"), func(r *pb.RangeRequest) { r.Revision = math.MaxInt64 }), leased("b", "", 404)), nil))
			s.Txn(txn(nil, ops(ignoring("none"), leased("b", "", 404)), nil))
			s.Txn(txn(nil, ops(with(leased("none", "", 404), func(r *pb.PutRequest) { r.IgnoreValue = true })), nil))
		}},
		{name: "kv/4.5-duplicate-keys", script: func(s *pair.Session) {
			for _, branch := range [][]*pb.RequestOp{
				ops(put("a", "1"), put("a", "2")),
				ops(put("a", "1"), put("b", "2")),
				ops(put("a", "1"), del("a", "")),
				ops(del("a", ""), put("a", "1")),
				ops(del("a", "c"), put("b", "1")),
				ops(put("b", "1"), del("a", "c")),
				ops(put("c", "1"), del("a", "c")),
				ops(put("a", "1"), del("a", "c")),
				ops(del("a", "c"), del("b", "d")),
				ops(del("a", ""), del("a", "")),
				ops(put("b", "1"), del("c", "a")),
				ops(put("a", "1"), get("a"), span("a", "z")),
				ops(del("a", fromKey), put("b", "1")),
				ops(put("b", "1"), del("a", fromKey)),
				ops(del("\x00", fromKey), put("b", "1")),
				ops(put("\x00", "1"), del("\x00", "\x00")),
				ops(put("b", "1"), del("b", "b\x00")),
				ops(put("b\x00", "1"), del("b", "b\x00")),
				// Nested against the parent level.
				ops(put("a", "1"), do(put("a", "2"))),
				ops(do(put("a", "2")), put("a", "1")),
				ops(put("a", "1"), do(del("a", ""))),
				ops(do(del("a", "")), put("a", "1")),
				ops(do(del("a", "c")), put("b", "1")),
				ops(del("a", "c"), do(put("b", "1"))),
				ops(do(put("b", "1")), del("a", "c")),
				ops(del("a", "c"), do(do(put("b", "1")))),
				ops(do(do(put("b", "1"))), put("b", "2")),
				ops(put("b", "2"), do(do(del("b", "")))),
				ops(del("a", "c"), do(del("a", "c"))),
				ops(do(get("a")), put("a", "1")),
				// Siblings.
				ops(do(put("a", "1")), do(put("a", "2"))),
				ops(do(del("a", "")), do(put("a", "2"))),
				ops(do(put("a", "2")), do(del("a", ""))),
				ops(do(del("a", "c")), do(do(put("b", "2")))),
				ops(do(put("a", "1")), do(put("b", "2"))),
				ops(do(del("a", "c")), do(del("b", "d"))),
				// The two branches of one nested transaction.
				ops(txn(nil, ops(put("a", "1")), ops(put("a", "2")))),
				ops(txn(nil, ops(del("a", "")), ops(put("a", "2")))),
				ops(txn(nil, ops(put("a", "1")), ops(del("a", "")))),
				ops(put("a", "1"), txn(nil, nil, ops(put("a", "2")))),
				ops(txn(nil, nil, ops(put("a", "2"))), put("a", "1")),
				ops(txn(nil, nil, ops(put("a", "2"))), txn(nil, ops(put("a", "1")), nil)),
				ops(txn(nil, ops(put("a", "1"), put("a", "2")), nil)),
				ops(txn(nil, nil, ops(put("a", "1"), put("a", "2")))),
				ops(txn(nil, ops(put("a", "1")), ops(put("a", "1"))), do(put("a", "3"))),
				ops(txn(nil, ops(del("a", "")), ops(del("b", ""))), do(put("b", "3"))),
			} {
				s.Txn(txn(nil, branch, nil))
				s.Txn(txn(nil, nil, branch))
				s.Range(everything())
			}
			s.Txn(txn(nil, ops(put("a", "1")), ops(put("a", "2"))))
			s.HashKV(0)
		}},
	})
}

func TestTxnCompares(t *testing.T) {
	results := []pb.Compare_CompareResult{equal, greater, less, notEqual, 4, -1, math.MaxInt32}
	prepare := func(s *pair.Session) {
		s.Grant(1301, 1000)
		fill(s)
		s.Put(leased("f", "x", 1301))
		s.Put(put("empty", ""))
	}
	holds := func(s *pair.Session, list ...*pb.Compare) { s.Txn(txn(list, ops(get("a")), nil)) }
	check(t, []scenario{
		{name: "kv/4.5-compare-targets", script: func(s *pair.Session) {
			prepare(s)
			base := s.Revision
			for _, result := range results {
				for _, key := range []string{"a", "f", "none", "empty"} {
					for _, number := range []int64{math.MinInt64, -1, 0, 1, 3, base + 2, base + 7, base + 9, 1301, math.MaxInt64} {
						holds(s, ifVersion(key, result, number))
						holds(s, ifCreate(key, result, number))
						holds(s, ifMod(key, result, number))
						holds(s, ifLease(key, result, number))
					}
					for _, value := range []string{"", "0", "1", "x", "\xff", "x\x00"} {
						holds(s, ifValue(key, result, value))
					}
				}
			}
		}},
		{name: "kv/4.5-compare-ranges", script: func(s *pair.Session) {
			prepare(s)
			for _, result := range results {
				for _, span := range [][2]string{{"a", "c"}, {"a", "z"}, {"a", "\x00"}, {"x", "z"}, {"x", "\x00"}, {"c", "a"}, {"\x00", "\x00"}, {"b", "b"}} {
					holds(s, over(ifVersion(span[0], result, 1), span[1]))
					holds(s, over(ifVersion(span[0], result, 0), span[1]))
					holds(s, over(ifCreate(span[0], result, s.Revision+3), span[1]))
					holds(s, over(ifMod(span[0], result, 0), span[1]))
					holds(s, over(ifLease(span[0], result, 0), span[1]))
					holds(s, over(ifValue(span[0], result, "5"), span[1]))
				}
			}
		}},
		{name: "kv/4.5-compare-absent-or-mismatched-union", script: func(s *pair.Session) {
			prepare(s)
			for _, result := range results {
				for target := range int32(7) {
					for _, key := range []string{"a", "none", "empty"} {
						base := &pb.Compare{Key: []byte(key), Result: result, Target: pb.Compare_CompareTarget(target - 1)}
						holds(s, base)
						for _, union := range []*pb.Compare{
							ifVersion(key, result, 3), ifCreate(key, result, 3), ifMod(key, result, 3), ifValue(key, result, "0"), ifLease(key, result, 3),
						} {
							union.Target = base.Target
							holds(s, union)
						}
					}
				}
			}
		}},
		{name: "kv/4.5-compare-conjunction", script: func(s *pair.Session) {
			prepare(s)
			yes, no := ifVersion("a", equal, 3), ifVersion("a", equal, 4)
			holds(s)
			holds(s, yes, yes)
			holds(s, yes, no)
			holds(s, no, yes)
			holds(s, no, no)
			s.Txn(txn(compares(yes, no), ops(get("a")), ops(get("b"), put("c", "else"))))
			s.Txn(txn(compares(yes), ops(get("a"), put("c", "then")), ops(get("b"))))
			s.Txn(txn(compares(yes), nil, ops(get("b"))))
			s.Txn(txn(compares(no), ops(get("b")), nil))
		}},
		{name: "kv/4.5-nested-compares-see-the-state-before", script: func(s *pair.Session) {
			s.Put(put("a", "1"))
			s.Txn(do(put("a", "2"), txn(compares(ifValue("a", equal, "1")), ops(put("b", "then")), ops(put("b", "else")))))
			s.Range(everything())
			s.Txn(do(del("a", ""), txn(compares(ifVersion("a", equal, 0)), ops(put("c", "then")), ops(put("c", "else")))))
			s.Range(everything())
			s.Txn(do(put("n", "1"), txn(compares(ifVersion("n", equal, 0)), ops(txn(compares(ifVersion("n", greater, 0)), ops(get("a")), ops(get("n")))), nil)))
		}},
	})
}

func TestTxnExecution(t *testing.T) {
	at := func(r *pb.RangeRequest, revision int64) *pb.RangeRequest {
		r.Revision = revision
		return r
	}
	check(t, []scenario{
		{name: "kv/4.5-path-checks", script: func(s *pair.Session) {
			fill(s)
			s.Compact(compact(s.Revision+4, true))
			current := s.Current()
			for _, revision := range []int64{math.MinInt64, -1, 0, 1, current - 5, current - 4, current, current + 1, math.MaxInt64} {
				s.Txn(do(at(get("a"), revision)))
				s.Txn(do(put("p", "x"), at(get("a"), revision)))
				s.Txn(do(at(get("a"), revision), put("p", "x")))
				s.Txn(txn(nil, ops(put("p", "y")), ops(at(get("a"), revision))))
				s.Txn(do(do(at(get("a"), revision))))
				s.Txn(txn(nil, ops(get("a")), ops(at(get("a"), revision))))
			}
			s.Range(everything())
		}},
		{name: "kv/4.5-negative-revision-never-compacted", fresh: true, script: func(s *pair.Session) {
			s.Put(put("a", "1"))
			for _, revision := range []int64{-1, -2, math.MinInt64, 0, 1, 2, 3} {
				s.Txn(do(at(get("a"), revision)))
				s.Txn(do(put("b", "1"), at(get("a"), revision)))
				s.Range(at(get("a"), revision))
			}
		}},
		{name: "kv/4.5-path-checks-of-puts", script: func(s *pair.Session) {
			ignoreValue := func(r *pb.PutRequest) { r.IgnoreValue = true }
			ignoreLease := func(r *pb.PutRequest) { r.IgnoreLease = true }
			s.Txn(do(put("a", "1"), leased("b", "1", 404)))
			s.Txn(do(put("a", "1"), with(put("b", ""), ignoreValue)))
			s.Txn(do(put("a", "1"), with(put("b", "x"), ignoreLease)))
			s.Txn(do(put("a", "1"), do(with(put("b", "x"), ignoreLease))))
			s.Txn(do(put("a", "1"), txn(compares(ifVersion("b", greater, 0)), ops(with(put("b", "x"), ignoreLease)), nil)))
			s.Txn(txn(nil, ops(put("c", "1")), ops(leased("b", "1", 404))))
			s.Range(everything())
			s.Grant(1401, 1000)
			s.Txn(do(leased("b", "1", 1401), leased("c", "1", 1401)))
			s.Txn(do(with(put("b", ""), ignoreValue), with(put("c", "2"), ignoreLease)))
			s.Range(everything())
			s.TimeToLive(1401, true)
		}},
		{name: "kv/4.5-execution-order", script: func(s *pair.Session) {
			s.Put(put("a", "0"))
			s.Put(put("b", "0"))
			s.Txn(do(get("a"), put("a", "1"), get("a"), everything(), delPrev("b", ""), everything(), put("c", "1"), everything()))
			s.Txn(do(everything(), del("none", ""), everything()))
			s.Txn(do(get("a"), del("none", ""), get("a"), put("a", "2"), del("none", ""), get("a")))
			s.Txn(do(with(put("a", "3"), func(r *pb.PutRequest) { r.PrevKv = true }), at(get("a"), s.Revision+1), delPrev("c", fromKey)))
			s.Txn(do(with(put("a", "3"), func(r *pb.PutRequest) { r.PrevKv = true }), at(get("a"), s.Current())))
			s.HashKV(0)
		}},
		{name: "kv/4.5-from-key-delete-after-put", script: func(s *pair.Session) {
			s.Put(put("a", "0"))
			s.Put(put("m", "0"))
			s.Txn(do(put("b", "1"), delPrev("a", fromKey), everything()))
			s.Range(everything())
			s.Txn(do(delPrev("a", fromKey), put("b", "1"), everything()))
			s.Range(everything())
			s.Txn(do(put("b", "2"), delPrev("b", fromKey), put("c", "2"), delPrev("a", fromKey), put("d", "3"), everything()))
			s.Range(everything())
			s.HashKV(0)
			w := s.Watch()
			w.Create(&pb.WatchCreateRequest{Key: []byte("\x00"), RangeEnd: []byte{0}, StartRevision: s.Revision + 1, PrevKv: true})
			w.Drain(s.Current())
			w.Cancel()
		}},
		{name: "kv/4.5-delete-and-put-in-siblings", script: func(s *pair.Session) {
			s.Put(put("a", "0"))
			s.Grant(1402, 1000)
			s.Txn(do(do(leased("a", "1", 1402)), do(delPrev("a", ""))))
			s.Range(get("a"))
			s.TimeToLive(1402, true)
			s.Txn(do(do(put("x", "1")), do(delPrev("a", "z"))))
			s.Range(everything())
			s.HashKV(0)
		}},
		{name: "kv/4.5-responses-of-nested-txns", script: func(s *pair.Session) {
			s.Put(put("a", "0"))
			s.Txn(do(do()))
			s.Txn(do(do(), do(do())))
			s.Txn(do(do(get("a"))))
			s.Txn(do(put("a", "1"), do(get("a"), do(put("b", "1"), get("b"))), get("a")))
			s.Txn(do(txn(compares(ifVersion("a", equal, 99)), ops(get("a")), ops(del("none", "")))))
			s.Txn(do(txn(compares(ifVersion("a", equal, 99)), ops(get("a")), nil)))
		}},
		{name: "kv/4.5-read-only", script: func(s *pair.Session) {
			fill(s)
			s.Txn(do(everything(), with(everything(), func(r *pb.RangeRequest) { r.CountOnly = true }),
				with(everything(), func(r *pb.RangeRequest) { r.Limit = 2; r.SortOrder = pb.RangeRequest_DESCEND }),
				with(everything(), func(r *pb.RangeRequest) { r.Serializable = true })))
			s.Txn(do(with(everything(), func(r *pb.RangeRequest) { r.Serializable = true })))
			s.Txn(txn(compares(ifVersion("a", equal, 3)), nil, nil))
			s.Txn(txn(compares(ifVersion("a", equal, 4)), ops(get("a")), ops(get("b"))))
			s.Txn(txn(nil, nil, ops(get("a"))))
		}},
		{name: "kv/4.5-sub-revisions", script: func(s *pair.Session) {
			s.Txn(do(put("z", "1"), put("a", "1"), put("m", "1")))
			s.Txn(do(del("a", "n"), put("b2", "x"), get("z")))
			s.Txn(do(put("q", "1"), del("z", ""), put("c", "1")))
			w := s.Watch()
			w.Create(&pb.WatchCreateRequest{Key: []byte("\x00"), RangeEnd: []byte{0}, StartRevision: s.Revision + 1})
			w.Drain(s.Current())
			w.Cancel()
			for revision := s.Revision; revision <= s.Current(); revision++ {
				s.HashKV(revision)
			}
		}},
		{name: "kv/4.5-lease-moves-within-txn", script: func(s *pair.Session) {
			s.Grant(1403, 1000)
			s.Grant(1404, 1000)
			s.Put(leased("a", "1", 1403))
			s.Txn(do(leased("a", "2", 1404), leased("b", "2", 1403)))
			s.TimeToLive(1403, true)
			s.TimeToLive(1404, true)
			s.Revoke(1403)
			s.Range(everything())
			s.Revoke(1404)
			s.Range(everything())
		}},
		{name: "kv/4.5-max-txn-ops-flag", flags: []string{"--max-txn-ops", "3"}, script: func(s *pair.Session) {
			s.Txn(do(put("a", "1"), put("b", "1"), put("c", "1")))
			s.Txn(do(put("a", "1"), put("b", "1"), put("c", "1"), put("d", "1")))
			s.Txn(do(do(put("a", "1"), put("b", "1"))))
			s.Txn(do(do(put("a", "1"), put("b", "1"), put("c", "1"))))
		}},
	})
}
