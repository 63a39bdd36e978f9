package conformance

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/proto"

	"skeg.local/conformance/pair"
)

// list records what every member says of the members.
func list(c *pair.Cluster, members ...int) {
	for _, at := range members {
		c.Call(at, "Cluster/MemberList", &pb.MemberListRequest{Linearizable: true}, &pb.MemberListResponse{})
	}
	c.Call(members[0], "Cluster/MemberList", &pb.MemberListRequest{}, &pb.MemberListResponse{})
}

// once records a call that is made again for as long as the cluster calls itself unhealthy, or a learner not level.
func once(c *pair.Cluster, at int, method string, request, response proto.Message) {
	var err error
	c.Await(method+" is taken", func() bool {
		err = c.Ask(at, method, request, response)
		return err == nil || !strings.Contains(err.Error(), "unhealthy cluster") && !strings.Contains(err.Error(), "in sync with leader")
	})
	c.Record(at, method, response, err)
}

// add adds a member and names it.
func add(c *pair.Cluster, through int, name, url string, learner bool) {
	request := &pb.MemberAddRequest{PeerURLs: []string{url}, IsLearner: learner}
	response := &pb.MemberAddResponse{}
	var err error
	c.Await("the cluster is healthy", func() bool {
		err = c.Ask(through, "Cluster/MemberAdd", request, response)
		return err == nil || !strings.Contains(err.Error(), "unhealthy cluster")
	})
	if err == nil {
		c.Name(response.Member.ID, name)
	}
	c.Record(through, "MemberAdd "+name, response, err)
}

func TestClusterMembers(t *testing.T) {
	pool.CompareClusters(t, etcdctl, 1, func(c *pair.Cluster) {
		list(c, 0, 1, 2)
		for at := range 3 {
			c.Call(at, "Maintenance/Status", &pb.StatusRequest{}, &pb.StatusResponse{})
		}
		m0, m1, m2 := c.ID("m0"), c.ID("m1"), c.ID("m2")
		unknown := uint64(0x7766554433221100)
		c.Name(unknown, "unknown")
		for _, at := range []int{0, 1} {
			c.Call(at, "Cluster/MemberAdd", &pb.MemberAddRequest{}, &pb.MemberAddResponse{})
			c.Call(at, "Cluster/MemberAdd", &pb.MemberAddRequest{PeerURLs: []string{"nonsense"}}, &pb.MemberAddResponse{})
			c.Call(at, "Cluster/MemberAdd", &pb.MemberAddRequest{PeerURLs: []string{"http://127.0.0.1"}}, &pb.MemberAddResponse{})
			c.Call(at, "Cluster/MemberAdd", &pb.MemberAddRequest{PeerURLs: []string{"http://127.0.0.1:1/path"}}, &pb.MemberAddResponse{})
			c.Call(at, "Cluster/MemberRemove", &pb.MemberRemoveRequest{ID: unknown}, &pb.MemberRemoveResponse{})
			c.Call(at, "Cluster/MemberUpdate", &pb.MemberUpdateRequest{ID: unknown, PeerURLs: []string{"http://127.0.0.1:1"}}, &pb.MemberUpdateResponse{})
			c.Call(at, "Cluster/MemberUpdate", &pb.MemberUpdateRequest{ID: m1, PeerURLs: []string{c.PeerURL(2)}}, &pb.MemberUpdateResponse{})
			c.Call(at, "Cluster/MemberUpdate", &pb.MemberUpdateRequest{ID: m1, PeerURLs: []string{c.PeerURL(1)}}, &pb.MemberUpdateResponse{})
			c.Call(at, "Cluster/MemberPromote", &pb.MemberPromoteRequest{ID: unknown}, &pb.MemberPromoteResponse{})
			c.Call(at, "Cluster/MemberPromote", &pb.MemberPromoteRequest{ID: m2}, &pb.MemberPromoteResponse{})
			c.Call(at, "Maintenance/MoveLeader", &pb.MoveLeaderRequest{TargetID: unknown}, &pb.MoveLeaderResponse{})
			c.Call(at, "Maintenance/MoveLeader", &pb.MoveLeaderRequest{TargetID: m0}, &pb.MoveLeaderResponse{})
		}
		add(c, 1, "taken", c.PeerURL(2), false)
		c.Call(1, "Cluster/MemberUpdate", &pb.MemberUpdateRequest{ID: m2, PeerURLs: []string{c.PeerURL(2), "http://127.0.0.1:1"}}, &pb.MemberUpdateResponse{})
		list(c, 0, 1, 2)
		c.Call(1, "Cluster/MemberUpdate", &pb.MemberUpdateRequest{ID: m2, PeerURLs: []string{c.PeerURL(2)}}, &pb.MemberUpdateResponse{})

		add(c, 1, "m3", c.PeerURL(3), true)
		add(c, 1, "second", "http://127.0.0.1:2", true)
		for _, at := range []int{0, 1} {
			c.Call(at, "Cluster/MemberPromote", &pb.MemberPromoteRequest{ID: c.ID("m3")}, &pb.MemberPromoteResponse{})
			c.Call(at, "Maintenance/MoveLeader", &pb.MoveLeaderRequest{TargetID: c.ID("m3")}, &pb.MoveLeaderResponse{})
		}
		c.Join(3, 0, 1, 2)
		learner(c, 3)
		once(c, 1, "Cluster/MemberPromote", &pb.MemberPromoteRequest{ID: c.ID("m3")}, &pb.MemberPromoteResponse{})
		c.Call(0, "Cluster/MemberPromote", &pb.MemberPromoteRequest{ID: c.ID("m3")}, &pb.MemberPromoteResponse{})
		c.Await("the member votes", func() bool { return c.Ask(3, "KV/Put", put("from/m3", "1"), &pb.PutResponse{}) == nil })
		c.Call(3, "KV/Range", get("from/m3"), &pb.RangeResponse{})

		once(c, 1, "Cluster/MemberRemove", &pb.MemberRemoveRequest{ID: c.ID("m3")}, &pb.MemberRemoveResponse{})
		c.Call(2, "Cluster/MemberRemove", &pb.MemberRemoveRequest{ID: c.ID("m3")}, &pb.MemberRemoveResponse{})
		c.Await("the removed member ends", func() bool { return !c.Members[3].Alive() })
		c.Call(2, "Cluster/MemberUpdate", &pb.MemberUpdateRequest{ID: c.ID("m3"), PeerURLs: []string{c.PeerURL(3)}}, &pb.MemberUpdateResponse{})
		list(c, 0, 1, 2)

		// Members that never start.
		for _, name := range []string{"absent-1", "absent-2", "absent-3"} {
			add(c, 0, name, "http://127.0.0.1:"+name[len(name)-1:], false)
		}
		for _, id := range []uint64{unknown, m2} {
			c.Call(0, "Cluster/MemberRemove", &pb.MemberRemoveRequest{ID: id}, &pb.MemberRemoveResponse{})
		}
		for _, name := range []string{"absent-1", "absent-2"} {
			once(c, 0, "Cluster/MemberRemove", &pb.MemberRemoveRequest{ID: c.ID(name)}, &pb.MemberRemoveResponse{})
		}
		list(c, 0, 1, 2)
		c.Call(0, "Maintenance/MoveLeader", &pb.MoveLeaderRequest{TargetID: m2}, &pb.MoveLeaderResponse{})
		c.Await("the other leads", func() bool { return c.Leader(0, 1, 2) == 2 })
		once(c, 0, "Cluster/MemberRemove", &pb.MemberRemoveRequest{ID: m2}, &pb.MemberRemoveResponse{})
		c.Await("the removed leader ends", func() bool { return !c.Members[2].Alive() })
		// A leader of two that removes itself may end before the other has heard of it, and leaves etcd's without a quorum.
		c.Await("the one that stays leads", func() bool {
			leader := c.Leader(0, 1)
			if leader == 1 {
				_ = c.Ask(1, "Maintenance/MoveLeader", &pb.MoveLeaderRequest{TargetID: m0}, &pb.MoveLeaderResponse{})
			}
			return leader == 0
		})
		list(c, 0, 1)

		// With one of two voters unstarted every removal of a voter is refused before anybody looks for the member.
		once(c, 0, "Cluster/MemberRemove", &pb.MemberRemoveRequest{ID: m1}, &pb.MemberRemoveResponse{})
		c.Await("the removed member ends", func() bool { return !c.Members[1].Alive() })
		add(c, 0, "absent", "http://127.0.0.1:3", false)
		for _, id := range []uint64{unknown, m0, m2} {
			c.Call(0, "Cluster/MemberRemove", &pb.MemberRemoveRequest{ID: id}, &pb.MemberRemoveResponse{})
		}
	})
}

// learner records what a learner refuses.
func learner(c *pair.Cluster, at int) {
	c.Await("the learner has caught up", func() bool {
		status := &pb.StatusResponse{}
		// etcd writes the new storage version some time after it knows the cluster's.
		return c.Ask(at, "Maintenance/Status", &pb.StatusRequest{}, status) == nil && status.IsLearner && status.StorageVersion == "3.7.0"
	})
	c.Call(at, "Maintenance/Status", &pb.StatusRequest{}, &pb.StatusResponse{})
	c.Call(at, "KV/Range", &pb.RangeRequest{Key: []byte("a"), Serializable: true}, &pb.RangeResponse{})
	requests := map[string][2]proto.Message{
		"KV/Range":               {get("a"), &pb.RangeResponse{}},
		"KV/Put":                 {put("a", "1"), &pb.PutResponse{}},
		"KV/DeleteRange":         {&pb.DeleteRangeRequest{Key: []byte("a")}, &pb.DeleteRangeResponse{}},
		"KV/Txn":                 {&pb.TxnRequest{}, &pb.TxnResponse{}},
		"KV/Compact":             {&pb.CompactionRequest{Revision: 1}, &pb.CompactionResponse{}},
		"Lease/LeaseGrant":       {&pb.LeaseGrantRequest{TTL: 60}, &pb.LeaseGrantResponse{}},
		"Lease/LeaseRevoke":      {&pb.LeaseRevokeRequest{ID: 1}, &pb.LeaseRevokeResponse{}},
		"Lease/LeaseTimeToLive":  {&pb.LeaseTimeToLiveRequest{ID: 1}, &pb.LeaseTimeToLiveResponse{}},
		"Lease/LeaseLeases":      {&pb.LeaseLeasesRequest{}, &pb.LeaseLeasesResponse{}},
		"Cluster/MemberList":     {&pb.MemberListRequest{}, &pb.MemberListResponse{}},
		"Cluster/MemberAdd":      {&pb.MemberAddRequest{PeerURLs: []string{"http://127.0.0.1:9"}}, &pb.MemberAddResponse{}},
		"Cluster/MemberRemove":   {&pb.MemberRemoveRequest{ID: 1}, &pb.MemberRemoveResponse{}},
		"Cluster/MemberUpdate":   {&pb.MemberUpdateRequest{ID: 1}, &pb.MemberUpdateResponse{}},
		"Cluster/MemberPromote":  {&pb.MemberPromoteRequest{ID: 1}, &pb.MemberPromoteResponse{}},
		"Maintenance/Alarm":      {&pb.AlarmRequest{}, &pb.AlarmResponse{}},
		"Maintenance/Defragment": {&pb.DefragmentRequest{}, &pb.DefragmentResponse{}},
		"Maintenance/Hash":       {&pb.HashRequest{}, &pb.HashResponse{}},
		"Maintenance/HashKV":     {&pb.HashKVRequest{}, &pb.HashKVResponse{}},
		"Maintenance/MoveLeader": {&pb.MoveLeaderRequest{TargetID: 1}, &pb.MoveLeaderResponse{}},
	}
	for _, method := range slices.Sorted(maps.Keys(requests)) {
		c.Note("learner: "+method, pair.ErrorText(c.Ask(at, method, requests[method][0], requests[method][1])))
	}
	health := grpc_health_v1.NewHealthClient(c.Members[at].Conn)
	_, err := health.Check(context.Background(), &grpc_health_v1.HealthCheckRequest{})
	c.Note("learner: Health/Check", pair.ErrorText(err))
	c.Note("learner: Watch", pair.ErrorText(watchError(c, at)))
	c.Note("learner: LeaseKeepAlive", pair.ErrorText(keepAliveError(c, at, context.Background())))
}

func watchError(c *pair.Cluster, at int) error {
	ctx, cancel := context.WithTimeout(context.Background(), 15*time.Second)
	defer cancel()
	stream, err := pb.NewWatchClient(c.Members[at].Conn).Watch(ctx)
	if err == nil {
		_ = stream.Send(&pb.WatchRequest{RequestUnion: &pb.WatchRequest_CreateRequest{CreateRequest: &pb.WatchCreateRequest{Key: []byte("a")}}})
		_, err = stream.Recv()
	}
	return err
}

func keepAliveError(c *pair.Cluster, at int, ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 15*time.Second)
	defer cancel()
	stream, err := pb.NewLeaseClient(c.Members[at].Conn).LeaseKeepAlive(ctx)
	if err == nil {
		_ = stream.Send(&pb.LeaseKeepAliveRequest{ID: 1})
		_, err = stream.Recv()
	}
	return err
}

func TestClusterEtcdctl(t *testing.T) {
	pool.CompareClusters(t, etcdctl, 1, func(c *pair.Cluster) {
		all := []int{0, 1, 2}
		c.Ctl(all, "put", "a", "1")
		c.Await("all members have it", func() bool {
			for at := range 3 {
				answer := &pb.RangeResponse{}
				if c.Ask(at, "KV/Range", &pb.RangeRequest{Key: []byte("a"), Serializable: true}, answer) != nil || answer.Count == 0 {
					return false
				}
			}
			return true
		})
		for _, format := range formats {
			c.Ctl(all[:1], "member", "list", "-w", format)
			c.Ctl(all[:1], "endpoint", "hashkv", "--cluster", "-w", format)
		}
		for _, format := range []string{"simple", "table"} {
			c.Ctl(all[:1], "endpoint", "health", "--cluster", "-w", format)
		}
		for _, format := range []string{"json", "fields"} {
			c.Ctl(all[:1], "endpoint", "status", "--cluster", "-w", format)
		}
		c.Ctl(all, "move-leader", fmt.Sprintf("%x", c.ID("m1")))
		c.Await("it leads", func() bool { return c.Leader(0, 1, 2) == 1 })
		c.Ctl(all[:1], "move-leader", fmt.Sprintf("%x", c.ID("m2")))
		c.Ctl(all, "move-leader", "77")
		c.Ctl(all, "move-leader")
		add(c, 0, "m3", c.PeerURL(3), true)
		hex := fmt.Sprintf("%x", c.ID("m3"))
		for _, line := range []string{
			"member add", "member add x", "member add x --peer-urls=nonsense", "member add x --peer-urls=" + c.PeerURL(0),
			"member add x --learner --peer-urls=http://127.0.0.1:1", "member promote " + hex, "member promote 77", "member promote",
			"member update " + hex, "member update " + hex + " --peer-urls=" + c.PeerURL(0), "member update " + hex + " --peer-urls=" + c.PeerURL(3),
			"member remove 77", "member remove", "member remove " + hex, "member remove " + hex,
		} {
			c.Ctl(all[:1], strings.Fields(line)...)
		}
		c.Ctl(all[:1], "member", "list", "-w", "fields")
	})
}

// atOnce records calls that take long, all at once, in this order.
func atOnce(c *pair.Cluster, calls ...func() func()) {
	record := make([]func(), len(calls))
	var done sync.WaitGroup
	for i, call := range calls {
		done.Go(func() { record[i] = call() })
	}
	done.Wait()
	for _, record := range record {
		record()
	}
}

// without asks one member what it can do without the others.
func without(c *pair.Cluster, at int) {
	slow := func(method string, request, response proto.Message) func() func() {
		return func() func() {
			err := c.Ask(at, method, request, response)
			return func() { c.Record(at, method+" without a quorum", response, err) }
		}
	}
	atOnce(c,
		slow("KV/Put", put("a", "2"), &pb.PutResponse{}),
		slow("KV/Range", get("a"), &pb.RangeResponse{}),
		slow("KV/Range", &pb.RangeRequest{Key: []byte("a"), Serializable: true}, &pb.RangeResponse{}),
		slow("KV/Txn", &pb.TxnRequest{Success: []*pb.RequestOp{{Request: &pb.RequestOp_RequestRange{RequestRange: get("a")}}}}, &pb.TxnResponse{}),
		slow("Lease/LeaseGrant", &pb.LeaseGrantRequest{ID: 5, TTL: 60}, &pb.LeaseGrantResponse{}),
		slow("Lease/LeaseLeases", &pb.LeaseLeasesRequest{}, &pb.LeaseLeasesResponse{}),
		slow("Lease/LeaseTimeToLive", &pb.LeaseTimeToLiveRequest{ID: 1}, &pb.LeaseTimeToLiveResponse{}),
		slow("Cluster/MemberList", &pb.MemberListRequest{Linearizable: true}, &pb.MemberListResponse{}),
		slow("Cluster/MemberList", &pb.MemberListRequest{}, &pb.MemberListResponse{}),
		slow("Cluster/MemberPromote", &pb.MemberPromoteRequest{ID: c.ID("m1")}, &pb.MemberPromoteResponse{}),
		slow("Cluster/MemberAdd", &pb.MemberAddRequest{PeerURLs: []string{"http://127.0.0.1:1"}}, &pb.MemberAddResponse{}),
		slow("Maintenance/HashKV", &pb.HashKVRequest{}, &pb.HashKVResponse{}),
		slow("Maintenance/Alarm", &pb.AlarmRequest{}, &pb.AlarmResponse{}),
		slow("Maintenance/MoveLeader", &pb.MoveLeaderRequest{TargetID: c.ID("m1")}, &pb.MoveLeaderResponse{}),
		slow("Maintenance/Status", &pb.StatusRequest{}, &pb.StatusResponse{}),
		func() func() {
			err := keepAliveError(c, at, context.Background())
			return func() { c.Note("LeaseKeepAlive without a quorum", pair.ErrorText(err)) }
		},
	)
	ctx := metadata.AppendToOutgoingContext(context.Background(), "hasleader", "true")
	wantingALeader := func(method string, request, response proto.Message) {
		ctx, cancel := context.WithTimeout(ctx, 15*time.Second)
		defer cancel()
		err := c.Members[at].Conn.Invoke(ctx, "/etcdserverpb."+method, request, response)
		c.Note(method+" that wants a leader", pair.ErrorText(err))
	}
	wantingALeader("KV/Put", put("a", "2"), &pb.PutResponse{})
	wantingALeader("KV/Range", &pb.RangeRequest{Key: []byte("a"), Serializable: true}, &pb.RangeResponse{})
	c.Note("LeaseKeepAlive that wants a leader", pair.ErrorText(keepAliveError(c, at, ctx)))
}

// wantsLeader opens a watch and a keep-alive stream that want a leader, and gives what ends them once they have answered.
func wantsLeader(c *pair.Cluster, at int) (watchEnds, keepAliveEnds chan error) {
	watchEnds, keepAliveEnds = make(chan error, 1), make(chan error, 1)
	ctx := metadata.AppendToOutgoingContext(context.Background(), "hasleader", "true")
	watch, err := pb.NewWatchClient(c.Members[at].Conn).Watch(ctx)
	if err == nil {
		_ = watch.Send(&pb.WatchRequest{RequestUnion: &pb.WatchRequest_CreateRequest{CreateRequest: &pb.WatchCreateRequest{Key: []byte("a")}}})
		var created *pb.WatchResponse
		created, err = watch.Recv()
		c.Note("a watch that wants a leader", fmt.Sprint(created.GetCreated(), err))
	}
	go func() {
		for err == nil {
			_, err = watch.Recv()
		}
		watchEnds <- err
	}()
	renewals, problem := pb.NewLeaseClient(c.Members[at].Conn).LeaseKeepAlive(ctx)
	if problem == nil {
		_ = renewals.Send(&pb.LeaseKeepAliveRequest{ID: 1})
		_, problem = renewals.Recv()
		c.Note("a keep-alive stream that wants a leader", pair.ErrorText(problem))
	}
	go func() {
		for problem == nil {
			_, problem = renewals.Recv()
		}
		keepAliveEnds <- problem
	}()
	return watchEnds, keepAliveEnds
}

func TestClusterWithoutQuorum(t *testing.T) {
	pool.CompareClusters(t, etcdctl, 0, func(c *pair.Cluster) {
		c.Call(0, "KV/Put", put("a", "1"), &pb.PutResponse{})
		c.Call(1, "KV/Range", get("a"), &pb.RangeResponse{})
		// Streams that want a leader, opened while there is one.
		watchEnds, keepAliveEnds := wantsLeader(c, 0)
		c.Kill(1, 2)
		// What was under way when the others went.
		err := c.Ask(0, "KV/Put", put("a", "under way"), &pb.PutResponse{})
		c.Note("a put at the leader that lost its quorum", pair.ErrorText(err))
		c.Await("the member knows of no leader", func() bool {
			status := &pb.StatusResponse{}
			return c.Ask(0, "Maintenance/Status", &pb.StatusRequest{}, status) == nil && status.Leader == 0
		})
		c.Note("a watch that wants a leader ends with", pair.ErrorText(<-watchEnds))
		c.Note("a keep-alive stream that wants a leader ends with", pair.ErrorText(<-keepAliveEnds))
		without(c, 0)
		c.Start(1, 2)
		c.Await("the cluster serves again", func() bool { return c.Ask(0, "KV/Put", put("b", "1"), &pb.PutResponse{}) == nil })
	})
}
