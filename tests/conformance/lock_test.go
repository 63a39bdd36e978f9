package conformance

import (
	"context"
	"fmt"
	"testing"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	epb "go.etcd.io/etcd/server/v3/etcdserver/api/v3election/v3electionpb"
	lpb "go.etcd.io/etcd/server/v3/etcdserver/api/v3lock/v3lockpb"
	"google.golang.org/protobuf/proto"

	"skeg.local/conformance/pair"
)

// The services that queue callers up by keys: Lock and Election.

// ask records a call of one of them, and returns what came.
func askQueue[Request, Response proto.Message](s *pair.Session, name string, call func(context.Context, Request) (Response, error), request Request) Response {
	ctx, cancel := context.WithTimeout(context.Background(), pair.AnswerLimit)
	defer cancel()
	response, err := call(ctx, request)
	noteAnswer(s, name+" "+pair.Text(request), response, err)
	return response
}

func noteAnswer(s *pair.Session, asked string, response proto.Message, err error) {
	if err != nil {
		s.Note(asked, pair.ErrorText(err))
	} else {
		s.Note(asked, pair.Text(pair.Normalise(response)))
	}
}

// waiting is a call under way.
type waiting[Response proto.Message] struct {
	asked  string
	cancel context.CancelFunc
	done   chan struct{}

	response Response
	err      error
}

// wait begins a call that has to wait until others have gone: until there are so many keys.
func wait[Request, Response proto.Message](s *pair.Session, name string, keys int64, call func(context.Context, Request) (Response, error), request Request) *waiting[Response] {
	ctx, cancel := context.WithTimeout(context.Background(), pair.AnswerLimit)
	w := &waiting[Response]{asked: name + " " + pair.Text(request), cancel: cancel, done: make(chan struct{})}
	go func() {
		defer close(w.done)
		w.response, w.err = call(ctx, request)
	}()
	s.Await(fmt.Sprintf("%d keys", keys), func() bool { return countKeys(s) == keys })
	return w
}

func countKeys(s *pair.Session) int64 {
	found := &pb.RangeResponse{}
	r := everything()
	r.CountOnly = true
	if s.Quietly("KV/Range", r, found) != nil {
		return -1
	}
	return found.Count
}

func (w *waiting[Response]) waits(s *pair.Session) {
	select {
	case <-w.done:
		s.Require(false, "%s did not wait: %v", w.asked, w.err)
	case <-time.After(50 * time.Millisecond):
	}
}

func (w *waiting[Response]) ends(s *pair.Session) {
	<-w.done
	w.cancel()
	noteAnswer(s, w.asked, w.response, w.err)
}

func TestLock(t *testing.T) {
	lock := func(name string, lease int64) *lpb.LockRequest {
		return &lpb.LockRequest{Name: []byte(name), Lease: lease}
	}
	type client struct {
		lock   func(context.Context, *lpb.LockRequest) (*lpb.LockResponse, error)
		unlock func(context.Context, *lpb.UnlockRequest) (*lpb.UnlockResponse, error)
	}
	of := func(s *pair.Session) client {
		c := lpb.NewLockClient(s.Store.Conn)
		return client{
			func(ctx context.Context, r *lpb.LockRequest) (*lpb.LockResponse, error) { return c.Lock(ctx, r) },
			func(ctx context.Context, r *lpb.UnlockRequest) (*lpb.UnlockResponse, error) { return c.Unlock(ctx, r) },
		}
	}
	unlock := func(key string) *lpb.UnlockRequest { return &lpb.UnlockRequest{Key: []byte(key)} }
	check(t, []scenario{
		{name: "lock/12-free", script: func(s *pair.Session) {
			c := of(s)
			s.Grant(0x1234, 1000)
			s.Grant(-2, 1000)
			for _, name := range []string{"a", "a", "", "a/b", "\xff"} {
				askQueue(s, "Lock", c.lock, lock(name, 0x1234))
			}
			askQueue(s, "Lock", c.lock, lock("negative", -2))
			s.Range(everything())
			for _, key := range []string{"a/1234", "a/1234", "none", "", "/1234"} {
				askQueue(s, "Unlock", c.unlock, unlock(key))
			}
			askQueue(s, "Lock", c.lock, lock("a", 0xdead))
			s.Range(everything())
		}},
		{name: "lock/12-lease-of-its-own", script: func(s *pair.Session) {
			c := of(s)
			ctx, cancel := context.WithTimeout(context.Background(), pair.AnswerLimit)
			defer cancel()
			got, err := c.lock(ctx, lock("mine", 0))
			s.Require(err == nil, "lock: %v", err)
			held := &pb.LeaseLeasesResponse{}
			s.Require(s.Quietly("Lease/LeaseLeases", &pb.LeaseLeasesRequest{}, held) == nil, "leases")
			s.Require(len(held.Leases) == 1, "leases %v", held.Leases)
			id := held.Leases[0].ID
			s.Require(string(got.Key) == fmt.Sprintf("mine/%x", id), "key %s of lease %x", got.Key, id)
			left := &pb.LeaseTimeToLiveResponse{}
			s.Require(s.Quietly("Lease/LeaseTimeToLive", &pb.LeaseTimeToLiveRequest{ID: id}, left) == nil, "time to live")
			s.Note("granted", left.GrantedTTL)
			s.Require(s.Quietly("Lease/LeaseRevoke", &pb.LeaseRevokeRequest{ID: id}, &pb.LeaseRevokeResponse{}) == nil, "revoke")
		}},
		{name: "lock/12-turns", script: func(s *pair.Session) {
			c := of(s)
			for id := int64(1); id <= 3; id++ {
				s.Grant(id, 1000)
			}
			askQueue(s, "Lock", c.lock, lock("a", 1))
			second := wait(s, "Lock", 2, c.lock, lock("a", 2))
			third := wait(s, "Lock", 3, c.lock, lock("a", 3))
			second.waits(s)
			third.waits(s)
			askQueue(s, "Unlock", c.unlock, unlock("a/1"))
			second.ends(s)
			third.waits(s)
			s.Revoke(2)
			third.ends(s)
			s.Range(everything())
		}},
		{name: "lock/12-a-waiter-goes-away", script: func(s *pair.Session) {
			c := of(s)
			for id := int64(1); id <= 3; id++ {
				s.Grant(id, 1000)
			}
			askQueue(s, "Lock", c.lock, lock("a", 1))
			second := wait(s, "Lock", 2, c.lock, lock("a", 2))
			third := wait(s, "Lock", 3, c.lock, lock("a", 3))
			second.cancel()
			second.ends(s)
			s.Await("its key is gone", func() bool { return countKeys(s) == 2 })
			third.waits(s)
			askQueue(s, "Unlock", c.unlock, unlock("a/1"))
			third.ends(s)
			s.Range(everything())
		}},
		{name: "lock/12-a-waiters-lease-ends", script: func(s *pair.Session) {
			c := of(s)
			s.Grant(1, 1000)
			s.Grant(2, 1000)
			askQueue(s, "Lock", c.lock, lock("a", 1))
			second := wait(s, "Lock", 2, c.lock, lock("a", 2))
			s.Revoke(2)
			second.waits(s)
			askQueue(s, "Unlock", c.unlock, unlock("a/1"))
			second.ends(s)
			s.Range(everything())
		}},
	})
}

func TestElection(t *testing.T) {
	campaign := func(name string, lease int64, value string) *epb.CampaignRequest {
		return &epb.CampaignRequest{Name: []byte(name), Lease: lease, Value: []byte(value)}
	}
	named := func(name string) *epb.LeaderRequest { return &epb.LeaderRequest{Name: []byte(name)} }
	type client struct {
		campaign func(context.Context, *epb.CampaignRequest) (*epb.CampaignResponse, error)
		proclaim func(context.Context, *epb.ProclaimRequest) (*epb.ProclaimResponse, error)
		leader   func(context.Context, *epb.LeaderRequest) (*epb.LeaderResponse, error)
		resign   func(context.Context, *epb.ResignRequest) (*epb.ResignResponse, error)
	}
	of := func(s *pair.Session) client {
		c := epb.NewElectionClient(s.Store.Conn)
		return client{
			func(ctx context.Context, r *epb.CampaignRequest) (*epb.CampaignResponse, error) {
				return c.Campaign(ctx, r)
			},
			func(ctx context.Context, r *epb.ProclaimRequest) (*epb.ProclaimResponse, error) {
				return c.Proclaim(ctx, r)
			},
			func(ctx context.Context, r *epb.LeaderRequest) (*epb.LeaderResponse, error) { return c.Leader(ctx, r) },
			func(ctx context.Context, r *epb.ResignRequest) (*epb.ResignResponse, error) { return c.Resign(ctx, r) },
		}
	}
	check(t, []scenario{
		{name: "election/13-one-candidate", script: func(s *pair.Session) {
			c := of(s)
			s.Grant(0x77, 1000)
			askQueue(s, "Leader", c.leader, named("e"))
			won := askQueue(s, "Campaign", c.campaign, campaign("e", 0x77, "first")).GetLeader()
			askQueue(s, "Leader", c.leader, named("e"))
			askQueue(s, "Campaign", c.campaign, campaign("e", 0x77, "first"))
			askQueue(s, "Campaign", c.campaign, campaign("e", 0x77, "second"))
			askQueue(s, "Leader", c.leader, named("e"))
			askQueue(s, "Proclaim", c.proclaim, &epb.ProclaimRequest{Leader: won, Value: []byte("third")})
			s.Range(everything())
			stale := &epb.LeaderKey{Name: won.GetName(), Key: won.GetKey(), Rev: won.GetRev() + 1, Lease: won.GetLease()}
			askQueue(s, "Proclaim", c.proclaim, &epb.ProclaimRequest{Leader: stale, Value: []byte("fourth")})
			askQueue(s, "Resign", c.resign, &epb.ResignRequest{Leader: stale})
			askQueue(s, "Leader", c.leader, named("e"))
			askQueue(s, "Resign", c.resign, &epb.ResignRequest{Leader: won})
			askQueue(s, "Leader", c.leader, named("e"))
			askQueue(s, "Resign", c.resign, &epb.ResignRequest{Leader: won})
			askQueue(s, "Proclaim", c.proclaim, &epb.ProclaimRequest{Leader: won, Value: []byte("fifth")})
		}},
		{name: "election/13-bad-requests", script: func(s *pair.Session) {
			c := of(s)
			askQueue(s, "Proclaim", c.proclaim, &epb.ProclaimRequest{Value: []byte("v")})
			askQueue(s, "Resign", c.resign, &epb.ResignRequest{})
			askQueue(s, "Campaign", c.campaign, campaign("e", 0xdead, "v"))
			askQueue(s, "Leader", c.leader, named(""))
			s.Grant(5, 1000)
			askQueue(s, "Campaign", c.campaign, campaign("", 5, ""))
			askQueue(s, "Leader", c.leader, named(""))
			askQueue(s, "Resign", c.resign, &epb.ResignRequest{Leader: &epb.LeaderKey{Lease: 5}})
			askQueue(s, "Proclaim", c.proclaim, &epb.ProclaimRequest{Leader: &epb.LeaderKey{Lease: 5}})
		}},
		{name: "election/13-turns", script: func(s *pair.Session) {
			c := of(s)
			for id := int64(1); id <= 3; id++ {
				s.Grant(id, 1000)
			}
			first := askQueue(s, "Campaign", c.campaign, campaign("e", 1, "one")).GetLeader()
			second := wait(s, "Campaign", 2, c.campaign, campaign("e", 2, "two"))
			third := wait(s, "Campaign", 3, c.campaign, campaign("e", 3, "three"))
			second.waits(s)
			second.cancel()
			second.ends(s)
			s.Await("its key is gone", func() bool { return countKeys(s) == 2 })
			third.waits(s)
			askQueue(s, "Resign", c.resign, &epb.ResignRequest{Leader: first})
			third.ends(s)
			askQueue(s, "Leader", c.leader, named("e"))
		}},
		{name: "election/13-observe", script: func(s *pair.Session) {
			c := of(s)
			s.Grant(1, 1000)
			s.Grant(2, 1000)
			ctx, cancel := context.WithTimeout(context.Background(), pair.AnswerLimit)
			defer cancel()
			stream, err := epb.NewElectionClient(s.Store.Conn).Observe(ctx, named("e"))
			s.Require(err == nil, "observe: %v", err)
			next := func() {
				told, err := stream.Recv()
				noteAnswer(s, "Observe", told, err)
			}
			first := askQueue(s, "Campaign", c.campaign, campaign("e", 1, "one")).GetLeader()
			next()
			askQueue(s, "Proclaim", c.proclaim, &epb.ProclaimRequest{Leader: first, Value: []byte("still one")})
			next()
			second := wait(s, "Campaign", 2, c.campaign, campaign("e", 2, "two"))
			s.Revoke(1)
			second.ends(s)
			next()
		}},
	})
}
