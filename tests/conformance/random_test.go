package conformance

import (
	"fmt"
	"math/rand"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"skeg.local/conformance/pair"
)

const (
	// shrinkLimit bounds the search for a smaller history.
	shrinkLimit = 3 * time.Minute
	// fixedSeed is the first of the seeds that are the same in every run.
	fixedSeed = 1
)

// TestRandomHistories gives both stores the same random operations, one after the other, and compares every answer, what every watcher got,
// and the hashes. See the package comment for the environment it reads.
func TestRandomHistories(t *testing.T) {
	length := number("SKEG_OPS", 120)
	var seeds []int64
	if one := number("SKEG_SEED", 0); one != 0 {
		seeds = []int64{one}
	} else {
		count := number("SKEG_SEEDS", 32)
		fresh := time.Now().UnixNano()
		for i := range count {
			if i%2 == 0 {
				seeds = append(seeds, fixedSeed+i/2)
			} else {
				seeds = append(seeds, (fresh+i)%1_000_000_007+1_000)
			}
		}
	}
	t.Logf("seeds %v, %d operations each", seeds, length)
	for _, seed := range seeds {
		t.Run(fmt.Sprintf("seed-%d", seed), func(t *testing.T) {
			history := newHistory(seed, int(length))
			difference := history.compare(t, freshStores)
			if difference == nil {
				return
			}
			t.Errorf("SKEG_SEED=%d SKEG_OPS=%d: the stores differ:\n%s", seed, length, difference.Text)
			smallest, difference := history.shrink(t, freshStores, difference)
			t.Errorf("the smallest history that differs has %d of %d operations:\n  %s\n%s",
				len(smallest), len(history), strings.Join(smallest.names(), "\n  "), difference.Text)
		})
	}
}

func number(name string, otherwise int64) int64 {
	if value, err := strconv.ParseInt(os.Getenv(name), 10, 64); err == nil {
		return value
	}
	return otherwise
}

// step is one operation of a history. It looks at the state of its run for revisions and watchers only, so that any subset of a
// history is a history.
type step struct {
	name string
	do   func(*state)
}

type history []step

// state is what a run of a history carries along: the watchers it has opened.
type state struct {
	*pair.Session
	watches []watcher
}

type watcher struct {
	*pair.Watch
	start int64
}

func (h history) names() []string {
	var names []string
	for _, step := range h {
		names = append(names, step.name)
	}
	return names
}

// freshStores starts the pair that a history runs on, and returns how to end it.
func freshStores(t *testing.T) (*pair.Pair, func()) {
	t.Helper()
	stores, err := pool.Fresh()
	if err != nil {
		t.Fatal(err)
	}
	return stores, stores.Stop
}

func (h history) compare(t *testing.T, start func(*testing.T) (*pair.Pair, func())) *pair.Difference {
	t.Helper()
	stores, stop := start(t)
	defer stop()
	return stores.Compare(h.run)
}

func (h history) run(s *pair.Session) {
	state := &state{Session: s}
	for _, step := range h {
		s.Note("step", step.name)
		step.do(state)
	}
	// Watchers of the future give no progress: go past them.
	for _, watcher := range state.watches {
		for s.Current() < watcher.start {
			s.Put(put("~past", "x"))
		}
	}
	state.drain()
	s.Range(everything())
	s.Leases()
	for revision := s.Current(); revision > max(0, s.Current()-4); revision-- {
		s.HashKV(revision)
	}
}

// drain brings every watcher that has begun up to date, so that what it has been sent does not depend on timing.
func (s *state) drain() {
	current := s.Current()
	for _, watcher := range s.watches {
		if watcher.start <= current {
			watcher.Drain(current)
		}
	}
}

// shrink removes operations as long as the stores still differ: first many at a time, then fewer (delta debugging).
func (h history) shrink(t *testing.T, start func(*testing.T) (*pair.Pair, func()), difference *pair.Difference) (history, *pair.Difference) {
	t.Helper()
	deadline := time.Now().Add(shrinkLimit)
	for size := (len(h) + 1) / 2; size > 0 && time.Now().Before(deadline); {
		removed := false
		for at := 0; at < len(h) && time.Now().Before(deadline); {
			candidate := append(append(history{}, h[:at]...), h[min(at+size, len(h)):]...)
			if found := candidate.compare(t, start); found != nil {
				h, difference, removed = candidate, found, true
			} else {
				at += size
			}
		}
		if !removed || size > len(h) {
			size /= 2
		}
	}
	return h, difference
}

var (
	keys   = []string{"a", "a\x00", "ab", "b", "b\x00\xff", "c", "d", "\xff", "\x00"}
	ends   = []string{"", "", "", "\x00", "b", "c", "d\x00", "\xff\xff", "a"}
	values = []string{"", "0", "1", "x", "\x00", "longer value"}
	leases = []int64{1, 2, 3, -4, 1 << 62}
)

// newHistory builds the operations of a seed.
func newHistory(seed int64, length int) history {
	r := rand.New(rand.NewSource(seed))
	var h history
	for range length {
		h = append(h, newStep(r))
	}
	return h
}

func newStep(r *rand.Rand) step {
	switch n := r.Intn(100); {
	case n < 22:
		request := randomPut(r)
		return step{"put " + pair.Text(request), func(s *state) { s.Put(request) }}
	case n < 44:
		return randomRange(r)
	case n < 52:
		request := randomDelete(r)
		return step{"delete " + pair.Text(request), func(s *state) { s.Delete(request) }}
	case n < 72:
		request := randomTxn(r, 0)
		return step{"txn " + pair.Text(request), func(s *state) { s.Txn(request) }}
	case n < 76:
		return randomCompaction(r)
	case n < 88:
		return randomLease(r)
	case n < 94:
		return randomWatch(r)
	default:
		back := int64(r.Intn(8) - 1)
		return step{fmt.Sprintf("hash %d back", back), func(s *state) { s.HashKV(s.Current() - back) }}
	}
}

func pick[T any](r *rand.Rand, list []T) T { return list[r.Intn(len(list))] }

func chance(r *rand.Rand, percent int) bool { return r.Intn(100) < percent }

func randomPut(r *rand.Rand) *pb.PutRequest {
	request := put(pick(r, keys), pick(r, values))
	if chance(r, 30) {
		request.Lease = pick(r, leases)
	}
	request.PrevKv = chance(r, 30)
	if chance(r, 12) {
		request.IgnoreValue = true
		if !chance(r, 10) {
			request.Value = nil
		}
	}
	if chance(r, 12) {
		request.IgnoreLease = true
		if !chance(r, 10) {
			request.Lease = 0
		}
	}
	if chance(r, 1) {
		request.Key = nil
	}
	return request
}

func randomDelete(r *rand.Rand) *pb.DeleteRangeRequest {
	request := del(pick(r, keys), pick(r, ends))
	request.PrevKv = chance(r, 50)
	return request
}

// options fills the options of a range but for its revisions.
func options(r *rand.Rand) *pb.RangeRequest {
	request := span(pick(r, keys), pick(r, ends))
	if chance(r, 40) {
		request.Limit = int64(r.Intn(7) - 1)
	}
	if chance(r, 40) {
		request.SortOrder = pb.RangeRequest_SortOrder(r.Intn(3))
		// The order among keys with equal targets is not defined: mod revisions differ outside of transactions only, so only KEY can be
		// compared in a history that has them.
		request.SortTarget = pb.RangeRequest_KEY
	}
	request.KeysOnly = chance(r, 20)
	request.CountOnly = chance(r, 15)
	request.Serializable = chance(r, 30)
	return request
}

func randomRange(r *rand.Rand) step {
	request := options(r)
	var back [5]int64
	var use [5]bool
	use[0] = chance(r, 40)
	for i := range back {
		back[i] = int64(r.Intn(14) - 2)
		if i > 0 {
			use[i] = chance(r, 8)
		}
	}
	stream := chance(r, 25)
	return step{fmt.Sprintf("range %s, revisions back %v of %v, stream %v", pair.Text(request), use, back, stream), func(s *state) {
		current := s.Current()
		asked := span(string(request.Key), string(request.RangeEnd))
		asked.Limit, asked.SortOrder, asked.SortTarget = request.Limit, request.SortOrder, request.SortTarget
		asked.KeysOnly, asked.CountOnly, asked.Serializable = request.KeysOnly, request.CountOnly, request.Serializable
		for i, field := range []*int64{&asked.Revision, &asked.MinModRevision, &asked.MaxModRevision, &asked.MinCreateRevision, &asked.MaxCreateRevision} {
			if use[i] {
				*field = current - back[i]
			}
		}
		if stream {
			s.RangeStream(asked)
			return
		}
		s.Range(asked)
	}}
}

func randomTxn(r *rand.Rand, depth int) *pb.TxnRequest {
	request := &pb.TxnRequest{}
	for range r.Intn(3) {
		request.Compare = append(request.Compare, randomCompare(r))
	}
	branch := func() []*pb.RequestOp {
		var list []*pb.RequestOp
		for range r.Intn(4) {
			switch n := r.Intn(10); {
			case n < 3:
				list = append(list, op(options(r)))
			case n < 7:
				list = append(list, op(randomPut(r)))
			case n < 8:
				list = append(list, op(randomDelete(r)))
			case depth < 3:
				list = append(list, op(randomTxn(r, depth+1)))
			}
		}
		return list
	}
	request.Success, request.Failure = branch(), branch()
	if depth == 0 {
		disarm(request)
	}
	return request
}

// disarm narrows from-key deletes of a transaction that cover the key of one of its puts to their first key: etcd can be ended by such a
// transaction in two ways (TestDeadlyRequests).
func disarm(request *pb.TxnRequest) {
	var puts []string
	eachOp(request, func(operation *pb.RequestOp) {
		if r := operation.GetRequestPut(); r != nil {
			puts = append(puts, string(r.Key))
		}
	})
	eachOp(request, func(operation *pb.RequestOp) {
		r := operation.GetRequestDeleteRange()
		if r != nil && string(r.RangeEnd) == fromKey && slices.ContainsFunc(puts, func(key string) bool { return key >= string(r.Key) }) {
			r.RangeEnd = nil
		}
	})
}

func eachOp(request *pb.TxnRequest, visit func(*pb.RequestOp)) {
	for _, branch := range [][]*pb.RequestOp{request.Success, request.Failure} {
		for _, operation := range branch {
			visit(operation)
			if inner := operation.GetRequestTxn(); inner != nil {
				eachOp(inner, visit)
			}
		}
	}
}

func randomCompare(r *rand.Rand) *pb.Compare {
	key, result := pick(r, keys), pb.Compare_CompareResult(r.Intn(4))
	var compare *pb.Compare
	switch r.Intn(5) {
	case 0:
		compare = ifVersion(key, result, int64(r.Intn(3)))
	case 1:
		compare = ifCreate(key, result, int64(r.Intn(60)))
	case 2:
		compare = ifMod(key, result, int64(r.Intn(60)))
	case 3:
		compare = ifValue(key, result, pick(r, values))
	default:
		compare = ifLease(key, result, pick(r, append([]int64{0}, leases...)))
	}
	if chance(r, 25) {
		compare.RangeEnd = []byte(pick(r, ends))
	}
	return compare
}

// randomCompaction compacts physically: when a logical one has finished can be seen in HashKV, and depends on timing.
func randomCompaction(r *rand.Rand) step {
	back := int64(r.Intn(12) - 1)
	return step{fmt.Sprintf("compact %d back", back), func(s *state) {
		s.drain()
		// Compacting at 0 makes etcd's HashKV(0) answer from its cache for ever: docs/compatibility.md.
		if revision := s.Current() - back; revision != 0 {
			s.Compact(compact(revision, true))
		}
	}}
}

func randomLease(r *rand.Rand) step {
	id := pick(r, leases)
	switch n := r.Intn(10); {
	case n < 5:
		ttl := pick(r, []int64{1000, 5000, 100_000})
		return step{fmt.Sprintf("grant %d for %d", id, ttl), func(s *state) { s.Grant(id, ttl) }}
	case n < 7:
		return step{fmt.Sprintf("revoke %d", id), func(s *state) { s.Revoke(id) }}
	case n < 9:
		return step{fmt.Sprintf("time to live of %d", id), func(s *state) { s.TimeToLive(id, true) }}
	default:
		return step{fmt.Sprintf("keep alive %d", id), func(s *state) {
			stream := s.KeepAlive()
			stream.Send(id)
			stream.Next()
			stream.Cancel()
		}}
	}
}

func randomWatch(r *rand.Rand) step {
	request := watchSpan(pick(r, keys), pick(r, ends))
	request.PrevKv = chance(r, 50)
	request.Fragment = chance(r, 20)
	if chance(r, 20) {
		request.Filters = []pb.WatchCreateRequest_FilterType{pb.WatchCreateRequest_FilterType(r.Intn(2))}
	}
	back, now := int64(r.Intn(30)-2), chance(r, 25)
	return step{fmt.Sprintf("watch %s from %d back, now %v", pair.Text(request), back, now), func(s *state) {
		asked := watchSpan(string(request.Key), string(request.RangeEnd))
		asked.PrevKv, asked.Fragment, asked.Filters = request.PrevKv, request.Fragment, request.Filters
		if !now {
			asked.StartRevision = max(0, s.Current()-back)
		}
		watch := s.Watch()
		if watch.Create(asked).Canceled {
			watch.Cancel()
			return
		}
		// Whether it is canceled for a compaction is known once it has caught up.
		if asked.StartRevision <= s.Current() && watch.Drain(s.Current()) {
			watch.Cancel()
			return
		}
		s.watches = append(s.watches, watcher{watch, asked.StartRevision})
	}}
}
