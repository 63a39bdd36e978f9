package conformance

import (
	"errors"
	"fmt"
	"io"
	"testing"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/protobuf/proto"

	"skeg.local/conformance/pair"
)

// Leases of the matrix: of nobody, with a key that alice may write, with one that she may not, and with both.
const (
	bare = 9000 + iota
	hers
	theirs
	mixed
)

// probe is one call of the matrix; what it records must be equal on both stores.
type probe struct {
	name string
	ask  func(asker)
}

func unary(method string, request, response proto.Message) probe {
	return probe{method + " " + pair.Text(request), func(a asker) { _ = a.ask(method, proto.Clone(request), proto.Clone(response)) }}
}

// outcome is a call of which only code and message are recorded.
func outcome(method string, request, response proto.Message) probe {
	return probe{method, func(a asker) {
		ctx, cancel := a.context(pair.AnswerLimit)
		defer cancel()
		err := a.s.Store.Conn.Invoke(ctx, "/etcdserverpb."+method, proto.Clone(request), proto.Clone(response))
		a.s.Note(a.name+" "+method, pair.ErrorText(err))
	}}
}

// nested puts operations into a transaction in a transaction that takes the other branch.
func nested(ops ...*pb.RequestOp) *pb.TxnRequest {
	inner := &pb.TxnRequest{Failure: ops}
	never := &pb.Compare{Result: pb.Compare_EQUAL, Target: pb.Compare_VERSION, Key: []byte("b"), TargetUnion: &pb.Compare_Version{Version: 1 << 40}}
	return &pb.TxnRequest{Compare: []*pb.Compare{never}, Success: []*pb.RequestOp{{Request: &pb.RequestOp_RequestTxn{RequestTxn: inner}}}}
}

// probes are the calls of the matrix: every RPC at least once, with requests inside and outside of what alice may do.
func probes() []probe {
	list := []probe{}
	for _, key := range []string{"a", "b", "c", "d", "z"} {
		list = append(list,
			unary("KV/Range", get(key), &pb.RangeResponse{}),
			unary("KV/Range", with(get(key), func(r *pb.RangeRequest) { r.Serializable = true }), &pb.RangeResponse{}),
			unary("KV/Put", put(key, "new"), &pb.PutResponse{}),
			unary("KV/Put", with(put(key, "new"), func(r *pb.PutRequest) { r.PrevKv = true }), &pb.PutResponse{}),
			unary("KV/Put", with(put(key, ""), func(r *pb.PutRequest) { r.IgnoreValue = true }), &pb.PutResponse{}),
			unary("KV/DeleteRange", del(key+"0", ""), &pb.DeleteRangeResponse{}),
			unary("KV/DeleteRange", delPrev(key+"0", ""), &pb.DeleteRangeResponse{}),
			unary("KV/Txn", &pb.TxnRequest{Compare: []*pb.Compare{{Key: []byte(key)}}}, &pb.TxnResponse{}),
			unary("KV/Txn", &pb.TxnRequest{Failure: []*pb.RequestOp{op(get(key))}}, &pb.TxnResponse{}),
			unary("KV/Txn", &pb.TxnRequest{Success: []*pb.RequestOp{op(put(key, "txn"))}}, &pb.TxnResponse{}),
			unary("KV/Txn", nested(op(get(key))), &pb.TxnResponse{}),
			unary("KV/Txn", nested(op(put(key, "nested"))), &pb.TxnResponse{}),
			unary("KV/Txn", nested(op(with(put(key, "nested"), func(r *pb.PutRequest) { r.PrevKv = true }))), &pb.TxnResponse{}),
			unary("KV/Txn", nested(op(delPrev(key, ""))), &pb.TxnResponse{}),
			unary("KV/Txn", nested(op(leased(key, "1", theirs))), &pb.TxnResponse{}),
		)
	}
	for _, place := range [][2]string{{"a", "c"}, {"a", "b"}, {"a", "d"}, {"b", "d"}, {"a", fromKey}, {"\x00", fromKey}, {"b", "c"}, {"c", "d"}, {"b", "a"}, {"d", "b"}, {"c", "a"}, {"b", "b"}} {
		list = append(list,
			unary("KV/Range", span(place[0], place[1]), &pb.RangeResponse{}),
			unary("KV/Range", with(span(place[0], place[1]), func(r *pb.RangeRequest) { r.CountOnly = true }), &pb.RangeResponse{}),
			unary("KV/DeleteRange", del(place[0]+"0", place[1]), &pb.DeleteRangeResponse{}),
			unary("KV/Txn", &pb.TxnRequest{Compare: []*pb.Compare{{Key: []byte(place[0]), RangeEnd: []byte(place[1])}}, Success: []*pb.RequestOp{op(put("b", "range"))}}, &pb.TxnResponse{}),
			probe{"RangeStream", func(a asker) { a.rangeStream(span(place[0], place[1])) }},
			probe{"Watch", func(a asker) { a.watch(place[0], place[1]) }},
		)
	}
	for _, lease := range []int64{bare, hers, theirs, mixed, 404} {
		list = append(list,
			unary("KV/Put", leased("b", "leased", lease), &pb.PutResponse{}),
			unary("Lease/LeaseTimeToLive", &pb.LeaseTimeToLiveRequest{ID: lease}, &pb.LeaseTimeToLiveResponse{}),
			unary("Lease/LeaseTimeToLive", &pb.LeaseTimeToLiveRequest{ID: lease, Keys: true}, &pb.LeaseTimeToLiveResponse{}),
			probe{"LeaseKeepAlive", func(a asker) { a.keepAlive(lease) }},
		)
	}
	return append(list,
		unary("KV/Txn", &pb.TxnRequest{}, &pb.TxnResponse{}),
		unary("KV/Txn", &pb.TxnRequest{Success: []*pb.RequestOp{{}}}, &pb.TxnResponse{}),
		probe{"Watch", func(a asker) { a.watch("a", "") }},
		probe{"Watch", func(a asker) { a.watch("", "") }},
		outcome("KV/Compact", compact(1<<40, false), &pb.CompactionResponse{}),
		unary("Lease/LeaseLeases", &pb.LeaseLeasesRequest{}, &pb.LeaseLeasesResponse{}),
		outcome("Lease/LeaseGrant", &pb.LeaseGrantRequest{ID: 8000, TTL: 1000}, &pb.LeaseGrantResponse{}),
		outcome("Lease/LeaseRevoke", &pb.LeaseRevokeRequest{ID: 8000}, &pb.LeaseRevokeResponse{}),
		outcome("Lease/LeaseRevoke", &pb.LeaseRevokeRequest{ID: 404}, &pb.LeaseRevokeResponse{}),
		outcome("Cluster/MemberList", &pb.MemberListRequest{}, &pb.MemberListResponse{}),
		outcome("Cluster/MemberList", &pb.MemberListRequest{Linearizable: true}, &pb.MemberListResponse{}),
		outcome("Cluster/MemberRemove", &pb.MemberRemoveRequest{ID: 404}, &pb.MemberRemoveResponse{}),
		outcome("Cluster/MemberUpdate", &pb.MemberUpdateRequest{ID: 404, PeerURLs: []string{"http://127.0.0.1:9"}}, &pb.MemberUpdateResponse{}),
		outcome("Cluster/MemberPromote", &pb.MemberPromoteRequest{ID: 404}, &pb.MemberPromoteResponse{}),
		outcome("Maintenance/Alarm", &pb.AlarmRequest{Action: pb.AlarmRequest_GET}, &pb.AlarmResponse{}),
		outcome("Maintenance/Alarm", &pb.AlarmRequest{Action: pb.AlarmRequest_DEACTIVATE, Alarm: pb.AlarmType_NOSPACE}, &pb.AlarmResponse{}),
		outcome("Maintenance/Alarm", &pb.AlarmRequest{Action: pb.AlarmRequest_ACTIVATE}, &pb.AlarmResponse{}),
		outcome("Maintenance/Status", &pb.StatusRequest{}, &pb.StatusResponse{}),
		outcome("Maintenance/Defragment", &pb.DefragmentRequest{}, &pb.DefragmentResponse{}),
		outcome("Maintenance/Hash", &pb.HashRequest{}, &pb.HashResponse{}),
		outcome("Maintenance/HashKV", &pb.HashKVRequest{}, &pb.HashKVResponse{}),
		outcome("Maintenance/MoveLeader", &pb.MoveLeaderRequest{TargetID: 404}, &pb.MoveLeaderResponse{}),
		probe{"Snapshot", asker.snapshot},
		unary("Auth/AuthStatus", &pb.AuthStatusRequest{}, &pb.AuthStatusResponse{}),
		unary("Auth/UserList", &pb.AuthUserListRequest{}, &pb.AuthUserListResponse{}),
		unary("Auth/RoleList", &pb.AuthRoleListRequest{}, &pb.AuthRoleListResponse{}),
		unary("Auth/UserGet", &pb.AuthUserGetRequest{Name: "alice"}, &pb.AuthUserGetResponse{}),
		unary("Auth/UserGet", &pb.AuthUserGetRequest{Name: "root"}, &pb.AuthUserGetResponse{}),
		unary("Auth/UserGet", &pb.AuthUserGetRequest{Name: "none"}, &pb.AuthUserGetResponse{}),
		unary("Auth/RoleGet", &pb.AuthRoleGetRequest{Role: "reader"}, &pb.AuthRoleGetResponse{}),
		unary("Auth/RoleGet", &pb.AuthRoleGetRequest{Role: "root"}, &pb.AuthRoleGetResponse{}),
		unary("Auth/RoleGet", &pb.AuthRoleGetRequest{Role: "none"}, &pb.AuthRoleGetResponse{}),
		// Those that change users and roles are asked for what fails when they are allowed, so that the next client finds the same.
		unary("Auth/UserAdd", &pb.AuthUserAddRequest{Name: "alice", Password: "x"}, &pb.AuthUserAddResponse{}),
		unary("Auth/UserDelete", &pb.AuthUserDeleteRequest{Name: "none"}, &pb.AuthUserDeleteResponse{}),
		unary("Auth/UserChangePassword", &pb.AuthUserChangePasswordRequest{Name: "none", Password: "x"}, &pb.AuthUserChangePasswordResponse{}),
		unary("Auth/UserGrantRole", &pb.AuthUserGrantRoleRequest{User: "none", Role: "root"}, &pb.AuthUserGrantRoleResponse{}),
		unary("Auth/UserRevokeRole", &pb.AuthUserRevokeRoleRequest{Name: "none", Role: "root"}, &pb.AuthUserRevokeRoleResponse{}),
		unary("Auth/RoleAdd", &pb.AuthRoleAddRequest{Name: "reader"}, &pb.AuthRoleAddResponse{}),
		unary("Auth/RoleDelete", &pb.AuthRoleDeleteRequest{Role: "none"}, &pb.AuthRoleDeleteResponse{}),
		unary("Auth/RoleGrantPermission", &pb.AuthRoleGrantPermissionRequest{Name: "reader"}, &pb.AuthRoleGrantPermissionResponse{}),
		unary("Auth/RoleRevokePermission", &pb.AuthRoleRevokePermissionRequest{Role: "reader", Key: []byte("none")}, &pb.AuthRoleRevokePermissionResponse{}),
		unary("Auth/AuthEnable", &pb.AuthEnableRequest{}, &pb.AuthEnableResponse{}),
	)
}

func (a asker) rangeStream(r *pb.RangeRequest) {
	ctx, cancel := a.context(pair.AnswerLimit)
	defer cancel()
	stream, err := pb.NewKVClient(a.s.Store.Conn).RangeStream(ctx, r)
	merged := &pb.RangeResponse{}
	for err == nil {
		var part *pb.RangeStreamResponse
		if part, err = stream.Recv(); err == nil {
			proto.Merge(merged, part.RangeResponse)
		}
	}
	answer := pair.ErrorText(err)
	if errors.Is(err, io.EOF) {
		answer = pair.Text(pair.Normalise(merged))
	}
	a.s.Note(a.name+" KV/RangeStream "+pair.Text(r), answer)
}

// watch creates a watcher and records the first message.
func (a asker) watch(key, end string) {
	ctx, cancel := a.context(pair.AnswerLimit)
	defer cancel()
	stream, err := pb.NewWatchClient(a.s.Store.Conn).Watch(ctx)
	create := &pb.WatchCreateRequest{Key: []byte(key), RangeEnd: []byte(end)}
	if err == nil {
		err = stream.Send(&pb.WatchRequest{RequestUnion: &pb.WatchRequest_CreateRequest{CreateRequest: create}})
	}
	a.s.Require(err == nil, "no stream: %v", err)
	first, err := stream.Recv()
	answer := pair.ErrorText(err)
	if err == nil {
		answer = pair.Text(pair.Normalise(first))
	}
	a.s.Note(a.name+" watch "+pair.Text(create), answer)
}

func (a asker) keepAlive(lease int64) {
	ctx, cancel := a.context(pair.AnswerLimit)
	defer cancel()
	stream, err := pb.NewLeaseClient(a.s.Store.Conn).LeaseKeepAlive(ctx)
	if err == nil {
		err = stream.Send(&pb.LeaseKeepAliveRequest{ID: lease})
	}
	a.s.Require(err == nil, "no stream: %v", err)
	first, err := stream.Recv()
	answer := pair.ErrorText(err)
	if err == nil {
		answer = pair.Text(pair.Normalise(first))
	}
	a.s.Note(fmt.Sprintf("%s keep alive %d", a.name, lease), answer)
}

// snapshot records whether there is one.
func (a asker) snapshot() {
	ctx, cancel := a.context(pair.AnswerLimit)
	defer cancel()
	stream, err := pb.NewMaintenanceClient(a.s.Store.Conn).Snapshot(ctx, &pb.SnapshotRequest{})
	if err == nil {
		_, err = stream.Recv()
	}
	a.s.Note(a.name+" snapshot", pair.ErrorText(err))
}

// states are what authentication can be in, each made from the one before it.
var states = []struct {
	name   string
	change func(asker)
}{
	{"no users", func(asker) {}},
	{"users, never on", town},
	{"on", asker.enable},
	{"off again", func(a asker) { a.login("root", "pw-root").disable() }},
	{"on again, with other roles", func(a asker) {
		a.revokeRole("alice", "writer")
		a.grantRole("bob", "writer")
		a.grantRole("carl", "root")
		a.enable()
	}},
}

// TestAuthMatrix asks every RPC in each state of authentication, as each user, with each kind of token.
func TestAuthMatrix(t *testing.T) {
	stores := freshPair(t, cheap...)
	difference := stores.Compare(func(s *pair.Session) {
		a := anonymous(s)
		for _, key := range []string{"a", "b", "c", "d", "z"} {
			s.Put(put(key, "old "+key))
		}
		for _, lease := range []int64{bare, hers, theirs, mixed} {
			s.Grant(lease, 1000)
		}
		for _, request := range []*pb.PutRequest{leased("b1", "", hers), leased("z1", "", theirs), leased("b2", "", mixed), leased("z2", "", mixed)} {
			s.Put(request)
		}
		for _, state := range states {
			state.change(a)
			askers := []asker{{s: s, name: state.name + ": nobody"}, {s: s, name: state.name + ": nonsense", md: []string{"token", "nonsense.1"}}}
			for _, user := range []string{"root", "alice", "bob", "carl"} {
				in := a.login(user, "pw-"+user)
				if in.md[1] == "" {
					continue
				}
				askers = append(askers, asker{s: s, name: state.name + ": " + user, md: in.md})
				if user == "alice" {
					askers = append(askers, asker{s: s, name: state.name + ": alice by header", md: []string{"authorization", "Bearer " + in.md[1]}})
				}
			}
			if state.name == "on" {
				// A user that goes while it is logged in, and a token that a change of the password made void.
				gone := anonymous(s)
				root := a.login("root", "pw-root")
				root.userAdd("gone", "pw")
				gone = gone.login("gone", "pw")
				_ = root.ask("Auth/UserDelete", &pb.AuthUserDeleteRequest{Name: "gone"}, &pb.AuthUserDeleteResponse{})
				askers = append(askers, asker{s: s, name: state.name + ": gone", md: gone.md})
			}
			for _, who := range askers {
				for _, probe := range probes() {
					probe.ask(who)
				}
			}
		}
	})
	if difference != nil {
		t.Error("the stores differ:\n" + difference.Text)
	}
}

// TestAuthTakenAway takes a right away from a client that is watching, and one that waits for a lock. etcd tells it on; skeg does not.
func TestAuthTakenAway(t *testing.T) {
	stores := freshPair(t, cheap...)
	onlySkeg(t, stores.Skeg)
	s := pair.NewSession(stores.Skeg)
	a := anonymous(s)
	// Watches from before authentication was on are nobody's.
	before := openWatch(t, a, "a", "c")
	town(a)
	a.enable()
	root, alice := a.login("root", "pw-root"), a.login("alice", "pw-alice")
	if message := before.next(); !message.Canceled || message.CancelReason != "rpc error: code = InvalidArgument desc = etcdserver: user name is empty" {
		t.Errorf("a watch of nobody: %v", message)
	}
	both, one := openWatch(t, alice, "a", "c"), openWatch(t, alice, "b", "")
	root.permit("writer", 0, "b", "")
	_ = root.ask("KV/Put", put("b", "1"), &pb.PutResponse{})
	for _, watch := range []*openedWatch{both, one} {
		if message := watch.next(); len(message.Events) != 1 {
			t.Errorf("a watch that is allowed: %v", message)
		}
	}
	root.forbid("reader", "a", "c")
	_ = root.ask("KV/Put", put("b", "2"), &pb.PutResponse{})
	if message := both.next(); !message.Canceled || len(message.Events) != 0 || message.CancelReason != "rpc error: code = PermissionDenied desc = etcdserver: permission denied" {
		t.Errorf("a watch whose range is not allowed any more: %v", message)
	}
	if message := one.next(); len(message.Events) != 1 {
		t.Errorf("a watch that is still allowed: %v", message)
	}
}

// openedWatch is a stream with one watcher.
type openedWatch struct {
	t      *testing.T
	stream pb.Watch_WatchClient
}

func openWatch(t *testing.T, a asker, key, end string) *openedWatch {
	t.Helper()
	ctx, cancel := a.context(time.Minute)
	t.Cleanup(cancel)
	stream, err := pb.NewWatchClient(a.s.Store.Conn).Watch(ctx)
	if err != nil {
		t.Fatal(err)
	}
	create := &pb.WatchCreateRequest{Key: []byte(key), RangeEnd: []byte(end)}
	if err := stream.Send(&pb.WatchRequest{RequestUnion: &pb.WatchRequest_CreateRequest{CreateRequest: create}}); err != nil {
		t.Fatal(err)
	}
	watch := &openedWatch{t, stream}
	if message := watch.next(); !message.Created || message.Canceled {
		t.Fatalf("no watch: %v", message)
	}
	return watch
}

func (w *openedWatch) next() *pb.WatchResponse {
	w.t.Helper()
	message, err := w.stream.Recv()
	if err != nil {
		w.t.Fatal(err)
	}
	return message
}
