package conformance

import (
	"fmt"
	"math"
	"strings"
	"testing"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"skeg.local/conformance/pair"
)

func TestRanges(t *testing.T) {
	spans := [][2]string{
		{"a", ""}, {"a", "c"}, {"b", "\x00"}, {"\x00", "\x00"}, {"c", "a"}, {"b", "b"}, {"z", ""}, {"a", "a\x00"},
		{"\xff", "\x00"}, {"a\x00", "b"}, {"", "z"}, {"", ""}, {"", "\x00"}, {"\x00", "\x00\x00"}, {"a", "\xff\xff"},
	}
	script := func(s *pair.Session) {
		for _, key := range []string{"a", "a\x00", "a\x00\x00b", "ab", "b", "c", "\x00", "\x00\x00", "\xff", "\xff\xff", "\xff\x00"} {
			s.Put(put(key, "v"))
		}
		for _, span := range spans {
			s.Range(&pb.RangeRequest{Key: []byte(span[0]), RangeEnd: []byte(span[1])})
			s.Range(&pb.RangeRequest{Key: []byte(span[0]), RangeEnd: []byte(span[1]), CountOnly: true})
			s.Txn(txn(compares(over(ifVersion(span[0], equal, 1), span[1])), nil, nil))
		}
		for _, span := range spans {
			s.Delete(delPrev(span[0], span[1]))
			s.Put(put("a", "again"))
			s.Put(put("b", "again"))
		}
	}
	check(t, []scenario{{name: "kv/1.2-ranges", script: script}})
}

func TestRange(t *testing.T) {
	check(t, []scenario{
		{name: "kv/4.1-versions-and-incarnations", fresh: true, script: func(s *pair.Session) {
			s.Range(get("a"))
			s.Put(put("a", "1"))
			s.Put(put("a", "2"))
			s.Put(put("b", "1"))
			s.Range(everything())
			s.Delete(del("a", ""))
			s.Range(get("a"))
			s.Delete(del("a", ""))
			s.Put(put("a", "3"))
			s.Put(put("a", "4"))
			s.Range(get("a"))
			for revision := range s.Current() + 1 {
				s.Range(with(everything(), func(r *pb.RangeRequest) { r.Revision = revision }))
			}
		}},
		{name: "kv/4.1-no-change-no-revision", script: func(s *pair.Session) {
			s.Delete(del("none", ""))
			s.Delete(del("none", fromKey))
			s.Txn(do())
			s.Txn(do(get("a")))
			s.Txn(do(del("none", "")))
			s.Txn(txn(compares(ifVersion("none", equal, 0)), ops(get("a")), ops(put("a", "1"))))
			s.Range(get("a"))
		}},
		{name: "kv/4.2-empty-key", script: func(s *pair.Session) {
			s.Range(get(""))
			s.Range(span("", "z"))
			s.Range(with(get(""), func(r *pb.RangeRequest) { r.SortOrder = 9 }))
			s.Range(with(get(""), func(r *pb.RangeRequest) { r.Revision = math.MaxInt64 }))
		}},
		{name: "kv/4.2-unknown-sort-values", script: func(s *pair.Session) {
			fill(s)
			for _, order := range []int32{-1, 0, 1, 2, 3, 1000, math.MaxInt32, math.MinInt32} {
				for _, target := range []int32{-1, 0, 4, 5, math.MaxInt32, math.MinInt32} {
					s.Range(with(everything(), func(r *pb.RangeRequest) {
						r.SortOrder, r.SortTarget = pb.RangeRequest_SortOrder(order), pb.RangeRequest_SortTarget(target)
					}))
				}
			}
		}},
		{name: "kv/4.2-revisions", script: func(s *pair.Session) {
			fill(s)
			current := s.Current()
			for _, revision := range []int64{math.MinInt64, -2, -1, 0, current - 3, current, current + 1, math.MaxInt64} {
				s.Range(with(everything(), func(r *pb.RangeRequest) { r.Revision = revision }))
				s.Range(with(get("a"), func(r *pb.RangeRequest) { r.Revision = revision; r.CountOnly = true }))
				s.Range(with(get("a"), func(r *pb.RangeRequest) { r.Revision = revision; r.KeysOnly = true }))
				s.Range(with(get("a"), func(r *pb.RangeRequest) { r.Revision = revision; r.Serializable = true }))
			}
			s.Compact(compact(current-3, true))
			for revision := current - 5; revision <= current+1; revision++ {
				s.Range(with(everything(), func(r *pb.RangeRequest) { r.Revision = revision }))
				s.Range(with(everything(), func(r *pb.RangeRequest) { r.Revision = revision; r.CountOnly = true }))
			}
		}},
		{name: "kv/4.2.2-limit", script: func(s *pair.Session) {
			fill(s)
			for _, limit := range []int64{math.MinInt64, -1, 0, 1, 4, 5, 6, math.MaxInt32, math.MaxInt64 - 1, math.MaxInt64} {
				s.Range(with(everything(), func(r *pb.RangeRequest) { r.Limit = limit }))
				s.Range(with(everything(), func(r *pb.RangeRequest) { r.Limit = limit; r.KeysOnly = true }))
				s.Range(with(everything(), func(r *pb.RangeRequest) { r.Limit = limit; r.CountOnly = true }))
				s.Range(with(get("a"), func(r *pb.RangeRequest) { r.Limit = limit }))
				s.Range(with(everything(), func(r *pb.RangeRequest) { r.Limit = limit; r.Revision = s.Current() - 2 }))
			}
		}},
		{name: "kv/4.2.3-limit-with-sort", script: func(s *pair.Session) {
			fill(s)
			eachSort(func(order pb.RangeRequest_SortOrder, target pb.RangeRequest_SortTarget) {
				for limit := int64(-1); limit <= 6; limit++ {
					s.Range(with(everything(), func(r *pb.RangeRequest) { r.SortOrder, r.SortTarget, r.Limit = order, target, limit }))
				}
			})
		}},
		{name: "kv/4.2.3-limit-with-filters", script: func(s *pair.Session) {
			fill(s)
			base := s.Revision
			for limit := int64(0); limit <= 4; limit++ {
				for _, offset := range []int64{-100, 1, 3, 5, 8, 100} {
					for field := range 4 {
						s.Range(with(everything(), func(r *pb.RangeRequest) {
							r.Limit = limit
							*[]*int64{&r.MinModRevision, &r.MaxModRevision, &r.MinCreateRevision, &r.MaxCreateRevision}[field] = base + offset
						}))
					}
				}
			}
		}},
		{name: "kv/4.2.4-filters", script: func(s *pair.Session) {
			fill(s)
			base := s.Revision
			for _, low := range []int64{0, math.MinInt64, -1, 1, base + 2, base + 5, math.MaxInt64} {
				for _, high := range []int64{0, math.MinInt64, -1, 1, base + 3, base + 7, math.MaxInt64} {
					s.Range(with(everything(), func(r *pb.RangeRequest) { r.MinModRevision, r.MaxModRevision = low, high }))
					s.Range(with(everything(), func(r *pb.RangeRequest) { r.MinCreateRevision, r.MaxCreateRevision = low, high }))
					s.Range(with(everything(), func(r *pb.RangeRequest) {
						r.MinModRevision, r.MaxCreateRevision, r.KeysOnly = low, high, true
						r.SortTarget, r.SortOrder = pb.RangeRequest_MOD, pb.RangeRequest_DESCEND
					}))
				}
			}
		}},
		{name: "kv/4.2.5-sort", script: func(s *pair.Session) {
			fill(s)
			eachSort(func(order pb.RangeRequest_SortOrder, target pb.RangeRequest_SortTarget) {
				for _, flags := range []string{"", "keys", "count", "serializable", "old"} {
					s.Range(with(everything(), func(r *pb.RangeRequest) {
						r.SortOrder, r.SortTarget = order, target
						r.KeysOnly, r.CountOnly, r.Serializable = flags == "keys", flags == "count", flags == "serializable"
						if flags == "old" {
							r.Revision = s.Revision + 6
						}
						if target == pb.RangeRequest_VERSION {
							// Only keys with versions of their own: the order among equals is not defined.
							r.Key, r.RangeEnd = []byte("c"), []byte("e")
						}
					}))
				}
			})
		}},
		{name: "kv/4.2.5-sort-none-with-target-and-limit", script: func(s *pair.Session) {
			fill(s)
			for target := pb.RangeRequest_KEY; target <= pb.RangeRequest_VALUE; target++ {
				for limit := int64(0); limit < 4; limit++ {
					s.Range(with(span("b", "e"), func(r *pb.RangeRequest) { r.SortTarget, r.Limit = target, limit }))
				}
			}
		}},
		{name: "kv/4.2.6-more", script: func(s *pair.Session) {
			fill(s)
			for limit := int64(1); limit <= 3; limit++ {
				s.Range(with(span("b", "d"), func(r *pb.RangeRequest) { r.Limit = limit }))
				s.Range(with(span("b", "d"), func(r *pb.RangeRequest) { r.Limit = limit; r.SortOrder = pb.RangeRequest_DESCEND }))
				s.Range(with(everything(), func(r *pb.RangeRequest) { r.Limit = limit; r.MinModRevision = s.Revision + 7 }))
			}
		}},
		{name: "kv/4.2.7-count-of-many-pages", script: func(s *pair.Session) {
			many(s, 300)
			next := "k"
			for {
				page := s.Range(with(span(next, "l"), func(r *pb.RangeRequest) { r.Limit = 70 }))
				if !page.More {
					break
				}
				next = string(page.Kvs[len(page.Kvs)-1].Key) + "\x00"
			}
			s.Delete(del("k0100", "k0200"))
			s.Range(with(span("k", "l"), func(r *pb.RangeRequest) { r.CountOnly = true }))
			s.Range(with(span("k", "l"), func(r *pb.RangeRequest) { r.CountOnly = true; r.Revision = s.Current() - 1 }))
			s.Range(with(span("k0050", "k0150"), func(r *pb.RangeRequest) { r.Limit = 1 }))
			s.Range(with(span("k0050", "k0150"), func(r *pb.RangeRequest) { r.Limit = 1; r.Revision = s.Current() - 1 }))
			s.Range(with(span("k0050", "k0150"), func(r *pb.RangeRequest) { r.Limit = 1; r.Revision = s.Current() - 2 }))
		}},
		{name: "kv/4.2.8-count-only", script: func(s *pair.Session) {
			fill(s)
			eachSort(func(order pb.RangeRequest_SortOrder, target pb.RangeRequest_SortTarget) {
				s.Range(with(everything(), func(r *pb.RangeRequest) {
					r.SortOrder, r.SortTarget, r.Limit, r.CountOnly, r.MinModRevision = order, target, 2, true, s.Revision+4
				}))
			})
			s.Range(with(everything(), func(r *pb.RangeRequest) { r.CountOnly, r.KeysOnly = true, true }))
			s.Range(with(get("none"), func(r *pb.RangeRequest) { r.CountOnly = true }))
			s.Range(with(span("c", "a"), func(r *pb.RangeRequest) { r.CountOnly = true }))
		}},
		{name: "kv/4.2.9-keys-only-and-lease", script: func(s *pair.Session) {
			s.Grant(77, 1000)
			s.Put(leased("b", "1", 77))
			s.Put(leased("a", "2", 77))
			s.Put(put("c", "0"))
			eachSort(func(order pb.RangeRequest_SortOrder, target pb.RangeRequest_SortTarget) {
				if target != pb.RangeRequest_VERSION {
					s.Range(with(everything(), func(r *pb.RangeRequest) { r.SortOrder, r.SortTarget, r.KeysOnly = order, target, true }))
				}
			})
			s.Range(with(get("a"), func(r *pb.RangeRequest) { r.KeysOnly = true }))
			s.Range(with(everything(), func(r *pb.RangeRequest) { r.KeysOnly, r.Limit = true, 1 }))
			s.Range(with(everything(), func(r *pb.RangeRequest) { r.KeysOnly, r.Revision = true, s.Current()-1 }))
			s.Txn(do(with(everything(), func(r *pb.RangeRequest) { r.KeysOnly = true })))
			s.Txn(do(put("d", "x"), with(everything(), func(r *pb.RangeRequest) { r.KeysOnly = true })))
		}},
		{name: "kv/4.2.10-header-of-an-old-read", script: func(s *pair.Session) {
			fill(s)
			s.Range(with(everything(), func(r *pb.RangeRequest) { r.Revision = s.Revision + 1 }))
			s.Range(with(everything(), func(r *pb.RangeRequest) { r.Revision = s.Revision + 1; r.Serializable = true }))
		}},
		{name: "kv/4.2.11-missing-key", script: func(s *pair.Session) {
			s.Range(get("missing"))
			s.Range(span("x", "y"))
			s.Put(put("x", ""))
			s.Delete(del("x", ""))
			s.Range(get("x"))
			s.Range(with(get("x"), func(r *pb.RangeRequest) { r.Revision = s.Current() - 1 }))
		}},
		{name: "kv/4.2-big-answer", script: func(s *pair.Session) {
			for i := range 8 {
				s.Put(put(fmt.Sprintf("big%d", i), strings.Repeat("x", 1<<20)))
			}
			s.Range(span("big", "bih"))
			s.Range(with(span("big", "bih"), func(r *pb.RangeRequest) { r.SortOrder = pb.RangeRequest_DESCEND; r.Limit = 3 }))
		}},
		{name: "kv/4.2-unknown-fields", script: func(s *pair.Session) {
			s.Put(put("a", "1"))
			request := get("a")
			// Field 999, varint 5, and field 1000, two bytes.
			request.ProtoReflect().SetUnknown([]byte{0xb8, 0x3e, 0x05, 0xc2, 0x3e, 0x02, 0x68, 0x69})
			s.Range(request)
		}},
	})
}

func eachSort(visit func(pb.RangeRequest_SortOrder, pb.RangeRequest_SortTarget)) {
	for order := pb.RangeRequest_NONE; order <= pb.RangeRequest_DESCEND; order++ {
		for target := pb.RangeRequest_KEY; target <= pb.RangeRequest_VALUE; target++ {
			visit(order, target)
		}
	}
}

// many puts k0000 … in txns of 100.
func many(s *pair.Session, count int) {
	for start := 0; start < count; start += 100 {
		request := do()
		for i := start; i < min(start+100, count); i++ {
			request.Success = append(request.Success, op(put(fmt.Sprintf("k%04d", i), fmt.Sprintf("value %d", i))))
		}
		s.Txn(request)
	}
}

func TestRangeStream(t *testing.T) {
	// both asks the same as a stream and at once; the merged stream must equal the range on each store.
	both := func(s *pair.Session, r *pb.RangeRequest) {
		parts := s.RangeStream(r)
		s.Range(r)
		for i, part := range parts {
			if i < len(parts)-1 {
				s.Require(part.Header == nil && part.Count == 0 && !part.More, "a message before the last has more than kvs: %s", pair.Text(part))
			} else {
				s.Require(part.Header != nil, "the last message has no header")
			}
		}
	}
	check(t, []scenario{
		{name: "range-stream/5-equals-range", script: func(s *pair.Session) {
			many(s, 500)
			s.Delete(del("k0100", "k0110"))
			for _, r := range []*pb.RangeRequest{
				span("k", "l"), everything(), get("k0001"), get("none"), span("z", "a"), span("k0490", fromKey),
				with(span("k", "l"), func(r *pb.RangeRequest) { r.Limit = 123 }),
				with(span("k", "l"), func(r *pb.RangeRequest) { r.Limit = 10 }),
				with(span("k", "l"), func(r *pb.RangeRequest) { r.Limit = 490 }),
				with(span("k", "l"), func(r *pb.RangeRequest) { r.Limit = 1 }),
				with(span("k", "l"), func(r *pb.RangeRequest) { r.Limit = -5 }),
				with(span("k", "l"), func(r *pb.RangeRequest) { r.KeysOnly = true }),
				with(span("k", "l"), func(r *pb.RangeRequest) { r.CountOnly = true }),
				with(span("k", "l"), func(r *pb.RangeRequest) { r.CountOnly = true; r.Limit = 3 }),
				with(span("k", "l"), func(r *pb.RangeRequest) { r.Serializable = true }),
				with(span("k", "l"), func(r *pb.RangeRequest) { r.Revision = s.Revision + 3 }),
				with(span("k", "l"), func(r *pb.RangeRequest) { r.SortOrder = pb.RangeRequest_ASCEND }),
			} {
				both(s, r)
			}
		}},
		{name: "range-stream/5-target-without-order", script: func(s *pair.Session) {
			fill(s)
			// Each message is sorted by itself in etcd; only the whole of them is defined.
			for target := pb.RangeRequest_KEY; target <= pb.RangeRequest_VALUE; target++ {
				s.RangeStreamUnordered(with(everything(), func(r *pb.RangeRequest) { r.SortTarget = target }))
			}
		}},
		{name: "range-stream/5-refusals", script: func(s *pair.Session) {
			fill(s)
			s.RangeStream(get(""))
			s.RangeStream(with(get("a"), func(r *pb.RangeRequest) { r.SortOrder = 7 }))
			s.RangeStream(with(get("a"), func(r *pb.RangeRequest) { r.SortTarget = 7 }))
			eachSort(func(order pb.RangeRequest_SortOrder, target pb.RangeRequest_SortTarget) {
				s.RangeStream(with(get("a"), func(r *pb.RangeRequest) { r.SortOrder, r.SortTarget = order, target }))
			})
			s.RangeStream(with(get("a"), func(r *pb.RangeRequest) { r.MinModRevision = 1 }))
			s.RangeStream(with(get("a"), func(r *pb.RangeRequest) { r.MaxModRevision = -1 }))
			s.RangeStream(with(get("a"), func(r *pb.RangeRequest) { r.MinCreateRevision = 1 }))
			s.RangeStream(with(get("a"), func(r *pb.RangeRequest) { r.MaxCreateRevision = 1 }))
			s.RangeStream(with(get("a"), func(r *pb.RangeRequest) { r.MaxCreateRevision = 1; r.SortOrder = pb.RangeRequest_DESCEND }))
			s.RangeStream(with(get("a"), func(r *pb.RangeRequest) { r.Revision = s.Current() + 1 }))
			s.Compact(compact(s.Current(), true))
			s.RangeStream(with(get("a"), func(r *pb.RangeRequest) { r.Revision = s.Current() - 1 }))
			s.RangeStream(with(get("a"), func(r *pb.RangeRequest) { r.Revision = s.Current() }))
			s.RangeStream(with(get("a"), func(r *pb.RangeRequest) { r.Revision = -1 }))
		}},
		{name: "range-stream/5-big-values", script: func(s *pair.Session) {
			for i := range 12 {
				s.Put(put(fmt.Sprintf("big%02d", i), strings.Repeat("y", 700_000)))
			}
			both(s, span("big", "bih"))
			both(s, with(span("big", "bih"), func(r *pb.RangeRequest) { r.Limit = 11 }))
		}},
	})
}
