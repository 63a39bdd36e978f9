package conformance

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"skeg.local/conformance/pair"
)

// rollers is how many clients write while members come and go.
const rollers = 4

// roll is the work that goes on meanwhile, by stock clients that know all endpoints: each puts numbered keys, one after the other.
type roll struct {
	t       *testing.T
	clients []*clientv3.Client
	// stopWriting ends the writers, and stop what follows them.
	stopWriting, stop context.CancelFunc
	writing, done     sync.WaitGroup

	acknowledged [rollers]atomic.Int64
	mutex        sync.Mutex
	failures     []error
	lease        clientv3.LeaseID
	renewals     atomic.Int64
	leaseEnded   atomic.Bool
	// seen counts the events of each key.
	seen         map[string]int
	lastRevision int64
}

func startRoll(t *testing.T, c *pair.Cluster) *roll {
	var endpoints []string
	for _, member := range c.Members {
		endpoints = append(endpoints, member.ClientAddress)
	}
	ctx, stop := context.WithCancel(context.Background())
	writing, stopWriting := context.WithCancel(ctx)
	r := &roll{t: t, stop: stop, stopWriting: stopWriting, seen: map[string]int{}}
	for range rollers + 1 {
		client, err := clientv3.New(clientv3.Config{Endpoints: endpoints, DialTimeout: pair.AnswerLimit, Logger: zap.NewNop()})
		if err != nil {
			t.Fatal(err)
		}
		r.clients = append(r.clients, client)
	}
	r.follow(ctx, r.clients[rollers])
	for i := range rollers {
		r.writing.Go(func() { r.write(writing, i) })
	}
	return r
}

func (r *roll) write(ctx context.Context, i int) {
	for number := int64(1); ctx.Err() == nil; {
		_, err := r.clients[i].Put(ctx, fmt.Sprintf("roll/%d/%06d", i, number), "v")
		switch {
		case err == nil:
			r.acknowledged[i].Store(number)
			number++
		case ctx.Err() == nil:
			r.mutex.Lock()
			r.failures = append(r.failures, err)
			r.mutex.Unlock()
		}
	}
}

// follow watches what the clients put, and keeps a lease alive.
func (r *roll) follow(ctx context.Context, client *clientv3.Client) {
	events := client.Watch(clientv3.WithRequireLeader(ctx), "roll/", clientv3.WithPrefix(), clientv3.WithRev(1))
	r.done.Go(func() {
		from := int64(1)
		for {
			for answer := range events {
				r.mutex.Lock()
				for _, event := range answer.Events {
					if event.Kv.ModRevision <= r.lastRevision {
						r.t.Errorf("event of revision %d after %d", event.Kv.ModRevision, r.lastRevision)
					}
					r.lastRevision = event.Kv.ModRevision
					r.seen[string(event.Kv.Key)]++
				}
				from = r.lastRevision + 1
				r.mutex.Unlock()
			}
			if ctx.Err() != nil {
				return
			}
			// A member without a leader sends watchers that want one elsewhere.
			events = client.Watch(clientv3.WithRequireLeader(ctx), "roll/", clientv3.WithPrefix(), clientv3.WithRev(from))
		}
	})
	granted, err := client.Grant(ctx, 10)
	if err != nil {
		r.t.Fatal(err)
	}
	r.lease = granted.ID
	renewed, err := client.KeepAlive(ctx, granted.ID)
	if err != nil {
		r.t.Fatal(err)
	}
	r.done.Go(func() {
		for range renewed {
			r.renewals.Add(1)
		}
		r.leaseEnded.Store(ctx.Err() == nil)
	})
}

// codeOf is the code of what a call of clientv3 fails with: an error of etcd's own, or of gRPC.
func codeOf(err error) codes.Code {
	var known rpctypes.EtcdError
	if errors.As(err, &known) {
		return known.Code()
	}
	return status.Code(err)
}

// goesOn waits until every client has had so many more puts acknowledged, and gives what failed since the last time.
func (r *roll) goesOn(c *pair.Cluster, puts int64) []error {
	for i := range r.acknowledged {
		wanted := r.acknowledged[i].Load() + puts
		c.Await(fmt.Sprintf("client %d goes on", i), func() bool { return r.acknowledged[i].Load() >= wanted })
	}
	r.mutex.Lock()
	defer r.mutex.Unlock()
	failed := r.failures
	r.failures = nil
	return failed
}

// end checks that nothing was lost or seen twice.
func (r *roll) end(c *pair.Cluster) {
	r.stopWriting()
	r.writing.Wait()
	reader := r.clients[rollers]
	ctx, cancel := context.WithTimeout(context.Background(), pair.AnswerLimit)
	defer cancel()
	if left, err := reader.TimeToLive(ctx, r.lease); err != nil || left.TTL <= 0 || r.leaseEnded.Load() || r.renewals.Load() == 0 {
		r.t.Errorf("the lease that was kept alive: %v %v, %d renewals", left, err, r.renewals.Load())
	}
	all, err := reader.Get(ctx, "roll/", clientv3.WithPrefix())
	if err != nil {
		r.t.Fatal(err)
	}
	c.Await("the watcher has seen everything", func() bool {
		r.mutex.Lock()
		defer r.mutex.Unlock()
		return r.lastRevision >= all.Header.Revision
	})
	r.stop()
	r.done.Wait()
	stored := map[string]int64{}
	for _, kv := range all.Kvs {
		stored[string(kv.Key)] = kv.Version
	}
	for i := range r.acknowledged {
		for number := int64(1); number <= r.acknowledged[i].Load(); number++ {
			if key := fmt.Sprintf("roll/%d/%06d", i, number); stored[key] == 0 {
				r.t.Errorf("%s was acknowledged and is lost", key)
			}
		}
	}
	for key, version := range stored {
		if int64(r.seen[key]) != version {
			r.t.Errorf("%s was put %d times, and seen %d times", key, version, r.seen[key])
		}
	}
	for _, client := range r.clients {
		_ = client.Close()
	}
}

// Members are added, restarted and removed one after the other, from three to five and back to three others, while stock clients write. What does
// not end a member fails no call; what does fails only those that were on their way to it, which clients cannot try again.
func TestClusterRoll(t *testing.T) {
	pool.CompareClusters(t, etcdctl, 2, func(c *pair.Cluster) {
		r := startRoll(t, c)
		// goesOn allows for so many calls that were on their way to a member that ended.
		goesOn := func(what string, lost int) {
			failed := r.goesOn(c, 30)
			t.Logf("skeg: %t, %s: %d calls failed", c.IsSkeg, what, len(failed))
			if !c.IsSkeg {
				return
			}
			for _, err := range failed {
				if codeOf(err) != codes.Unavailable {
					t.Errorf("%s: %v", what, err)
				}
			}
			if len(failed) > lost {
				t.Errorf("%s: %d calls failed: %v", what, len(failed), errors.Join(failed...))
			}
		}
		quiet := func(what string) { goesOn(what, 0) }
		ended := func(what string) { goesOn(what, rollers) }
		quiet("three members")
		for _, leader := range []int{1, 2, 0} {
			c.Lead(leader)
			quiet("another leads")
		}
		add(c, 1, "m3", c.PeerURL(3), true)
		c.Join(3, 0, 1, 2)
		once(c, 1, "Cluster/MemberPromote", &pb.MemberPromoteRequest{ID: c.ID("m3")}, &pb.MemberPromoteResponse{})
		quiet("a learner was promoted")
		add(c, 2, "m4", c.PeerURL(4), false)
		c.Join(4, 0, 1, 2, 3)
		quiet("a fifth member")
		for _, at := range []int{0, 1} {
			c.Restart(at, syscall.SIGTERM)
			ended("a member was restarted")
		}
		c.Await("there is a leader", func() bool { return c.Leader(0, 1, 2, 3, 4) >= 0 })
		for _, gone := range []int{0, 1} {
			once(c, 2, "Cluster/MemberRemove", &pb.MemberRemoveRequest{ID: c.ID(c.Members[gone].Name)}, &pb.MemberRemoveResponse{})
			c.Await("the removed member ends", func() bool { return !c.Members[gone].Alive() })
			ended("a member was removed")
		}
		c.Await("there is a leader", func() bool { return c.Leader(2, 3, 4) >= 0 })
		leader := c.Leader(2, 3, 4)
		c.Kill(leader)
		time.Sleep(100 * time.Millisecond)
		c.Start(leader)
		ended("the leader was killed")
		r.end(c)
	})
}
