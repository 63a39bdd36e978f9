package conformance

import (
	"context"
	"encoding/base64"
	"fmt"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"go.etcd.io/etcd/api/v3/authpb"
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/proto"

	"skeg.local/conformance/pair"
)

// cheap makes hashing passwords fast enough for tests.
var cheap = []string{"--bcrypt-cost", "4"}

// simpleToken is what a simple token looks like.
var simpleToken = regexp.MustCompile(`^[a-zA-Z]{16}\.[0-9]+$`)

// shared is a hash of "allmine" that both stores are given as it is.
var shared = base64.StdEncoding.EncodeToString([]byte("$2a$10$XajjQvNhvvRt5GSeFk1xFeyqRrsxkhBkUiQeg0dt.wU1qD4aFDcga"))

// asker asks one store as one client, and records questions and answers under its name.
type asker struct {
	s    *pair.Session
	name string
	md   []string
}

func anonymous(s *pair.Session) asker { return asker{s: s, name: "nobody"} }

func (a asker) context(limit time.Duration) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	return metadata.AppendToOutgoingContext(ctx, a.md...), cancel
}

// ask records what a unary call answers.
func (a asker) ask(method string, request, response proto.Message) error {
	ctx, cancel := a.context(pair.AnswerLimit)
	defer cancel()
	err := a.s.Store.Conn.Invoke(ctx, "/etcdserverpb."+method, request, response)
	answer := pair.ErrorText(err)
	if err == nil {
		if found, is := response.(*pb.AuthenticateResponse); is {
			found = proto.Clone(found).(*pb.AuthenticateResponse)
			a.s.Require(simpleToken.MatchString(found.Token), "a token of another form")
			found.Token = "a token"
			response = found
		}
		answer = pair.Text(pair.Normalise(response))
	}
	a.s.Note(a.name+" "+method+" "+pair.Text(request), answer)
	return err
}

func (a asker) userAdd(name, password string) {
	_ = a.ask("Auth/UserAdd", &pb.AuthUserAddRequest{Name: name, Password: password}, &pb.AuthUserAddResponse{})
}

func (a asker) grantRole(user, role string) {
	_ = a.ask("Auth/UserGrantRole", &pb.AuthUserGrantRoleRequest{User: user, Role: role}, &pb.AuthUserGrantRoleResponse{})
}

func (a asker) revokeRole(user, role string) {
	_ = a.ask("Auth/UserRevokeRole", &pb.AuthUserRevokeRoleRequest{Name: user, Role: role}, &pb.AuthUserRevokeRoleResponse{})
}

func (a asker) roleAdd(name string) {
	_ = a.ask("Auth/RoleAdd", &pb.AuthRoleAddRequest{Name: name}, &pb.AuthRoleAddResponse{})
}

func (a asker) permit(role string, kind authpb.Permission_Type, key, end string) {
	permission := &authpb.Permission{PermType: kind, Key: []byte(key), RangeEnd: []byte(end)}
	_ = a.ask("Auth/RoleGrantPermission", &pb.AuthRoleGrantPermissionRequest{Name: role, Perm: permission}, &pb.AuthRoleGrantPermissionResponse{})
}

func (a asker) forbid(role, key, end string) {
	_ = a.ask("Auth/RoleRevokePermission", &pb.AuthRoleRevokePermissionRequest{Role: role, Key: []byte(key), RangeEnd: []byte(end)}, &pb.AuthRoleRevokePermissionResponse{})
}

func (a asker) enable() {
	_ = a.ask("Auth/AuthEnable", &pb.AuthEnableRequest{}, &pb.AuthEnableResponse{})
}

func (a asker) disable() {
	_ = a.ask("Auth/AuthDisable", &pb.AuthDisableRequest{}, &pb.AuthDisableResponse{})
}

func (a asker) status() {
	_ = a.ask("Auth/AuthStatus", &pb.AuthStatusRequest{}, &pb.AuthStatusResponse{})
}

// login returns a client with a token.
func (a asker) login(name, password string) asker {
	found := &pb.AuthenticateResponse{}
	_ = a.ask("Auth/Authenticate", &pb.AuthenticateRequest{Name: name, Password: password}, found)
	return asker{s: a.s, name: name, md: []string{"token", found.Token}}
}

// shown records users, roles and the auth revision.
func (a asker) shown(users, roles []string) {
	a.status()
	_ = a.ask("Auth/UserList", &pb.AuthUserListRequest{}, &pb.AuthUserListResponse{})
	_ = a.ask("Auth/RoleList", &pb.AuthRoleListRequest{}, &pb.AuthRoleListResponse{})
	for _, user := range users {
		_ = a.ask("Auth/UserGet", &pb.AuthUserGetRequest{Name: user}, &pb.AuthUserGetResponse{})
	}
	for _, role := range roles {
		_ = a.ask("Auth/RoleGet", &pb.AuthRoleGetRequest{Role: role}, &pb.AuthRoleGetResponse{})
	}
}

// town founds the users of the tests: root, alice with a role to read a..c and write b..d, bob without a role, carl with a role of
// everything, dora without a password.
func town(a asker) {
	for _, user := range []string{"root", "alice", "bob", "carl"} {
		a.userAdd(user, "pw-"+user)
	}
	_ = a.ask("Auth/UserAdd", &pb.AuthUserAddRequest{Name: "dora", Options: &authpb.UserAddOptions{NoPassword: true}}, &pb.AuthUserAddResponse{})
	a.roleAdd("reader")
	a.roleAdd("writer")
	a.roleAdd("all")
	a.permit("reader", authpb.Permission_READ, "a", "c")
	a.permit("writer", authpb.Permission_WRITE, "b", "d")
	a.permit("all", authpb.Permission_READWRITE, "\x00", fromKey)
	a.grantRole("root", "root")
	a.grantRole("alice", "reader")
	a.grantRole("alice", "writer")
	a.grantRole("carl", "all")
}

// TestAuth gives both stores the same changes of users and roles.
func TestAuth(t *testing.T) {
	check(t, []scenario{
		{name: "auth/11.2-users-and-roles", fresh: true, flags: cheap, script: func(s *pair.Session) {
			a := anonymous(s)
			a.shown([]string{"none"}, []string{"none", "root"})
			a.enable()
			a.disable()
			a.login("root", "pw")
			a.userAdd("", "pw")
			a.userAdd("root", "pw")
			a.userAdd("root", "pw")
			a.enable()
			a.userAdd("empty", "")
			a.userAdd("long", strings.Repeat("x", 72))
			a.userAdd("longer", strings.Repeat("x", 73))
			a.userAdd("z\u00fc", "pw")
			_ = a.ask("Auth/UserAdd", &pb.AuthUserAddRequest{Name: "dora", Options: &authpb.UserAddOptions{NoPassword: true}, Password: "ignored"}, &pb.AuthUserAddResponse{})
			a.grantRole("none", "none")
			a.grantRole("root", "none")
			a.grantRole("root", "root")
			a.grantRole("root", "root")
			a.roleAdd("")
			for _, role := range []string{"r", "r", "b", "root", "a"} {
				a.roleAdd(role)
			}
			for _, role := range []string{"r", "a", "b", "r"} {
				a.grantRole("empty", role)
			}
			a.revokeRole("none", "r")
			a.revokeRole("empty", "none")
			a.revokeRole("empty", "a")
			_ = a.ask("Auth/RoleGrantPermission", &pb.AuthRoleGrantPermissionRequest{Name: "r"}, &pb.AuthRoleGrantPermissionResponse{})
			for _, place := range [][2]string{{"", ""}, {"", fromKey}, {"b", "a"}, {"b", "b"}, {"b", ""}, {"a", fromKey}, {"\x00", fromKey}, {"a", "z"}, {"a", ""}, {"b", "c"}} {
				a.permit("r", authpb.Permission_READ, place[0], place[1])
				a.permit("none", authpb.Permission_READ, place[0], place[1])
			}
			a.permit("r", authpb.Permission_READWRITE, "b", "")
			a.permit("r", authpb.Permission_Type(7), "q", "")
			a.permit("root", authpb.Permission_READ, "q", "")
			a.forbid("none", "b", "")
			a.forbid("r", "b", "z")
			a.forbid("r", "b", "")
			a.shown([]string{"root", "empty", "long", "dora", "z\u00fc", "none", ""}, []string{"r", "root", "a", "none", ""})
			change := func(r *pb.AuthUserChangePasswordRequest) {
				_ = a.ask("Auth/UserChangePassword", r, &pb.AuthUserChangePasswordResponse{})
			}
			change(&pb.AuthUserChangePasswordRequest{Name: "none", Password: "pw"})
			change(&pb.AuthUserChangePasswordRequest{Name: "none", HashedPassword: "!"})
			change(&pb.AuthUserChangePasswordRequest{Name: "empty", Password: strings.Repeat("x", 73)})
			change(&pb.AuthUserChangePasswordRequest{Name: "empty", HashedPassword: "!"})
			change(&pb.AuthUserChangePasswordRequest{Name: "empty", HashedPassword: "YQ=="})
			change(&pb.AuthUserChangePasswordRequest{Name: "dora", HashedPassword: "!"})
			change(&pb.AuthUserChangePasswordRequest{Name: "empty", Password: "full"})
			for _, role := range []string{"none", "a", "b"} {
				_ = a.ask("Auth/RoleDelete", &pb.AuthRoleDeleteRequest{Role: role}, &pb.AuthRoleDeleteResponse{})
			}
			for _, user := range []string{"none", "long"} {
				_ = a.ask("Auth/UserDelete", &pb.AuthUserDeleteRequest{Name: user}, &pb.AuthUserDeleteResponse{})
			}
			a.shown([]string{"root", "empty"}, []string{"r"})
		}},
		{name: "auth/11.2-enabled", fresh: true, flags: cheap, script: func(s *pair.Session) {
			a := anonymous(s)
			town(a)
			a.enable()
			a.enable()
			a.status()
			a.shown([]string{"alice"}, []string{"reader"})
			for _, who := range [][2]string{{"root", "wrong"}, {"none", "pw"}, {"dora", "pw"}, {"dora", ""}, {"", ""}, {"alice", ""}} {
				a.login(who[0], who[1])
			}
			root, alice := a.login("root", "pw-root"), a.login("alice", "pw-alice")
			root.enable()
			root.shown([]string{"root", "alice", "none"}, []string{"root", "reader", "none"})
			alice.shown([]string{"root", "alice", "none"}, []string{"root", "reader", "writer", "all", "none"})
			root.revokeRole("root", "root")
			for _, request := range []proto.Message{&pb.AuthUserDeleteRequest{Name: "root"}, &pb.AuthRoleDeleteRequest{Role: "root"}} {
				switch request := request.(type) {
				case *pb.AuthUserDeleteRequest:
					_ = root.ask("Auth/UserDelete", request, &pb.AuthUserDeleteResponse{})
				case *pb.AuthRoleDeleteRequest:
					_ = root.ask("Auth/RoleDelete", request, &pb.AuthRoleDeleteResponse{})
				}
			}
			// Tokens of a user whose password changes are void, and those of one that goes.
			bob, carl := a.login("bob", "pw-bob"), a.login("carl", "pw-carl")
			read := func(who asker) { _ = who.ask("KV/Range", get("a"), &pb.RangeResponse{}) }
			read(bob)
			read(carl)
			_ = root.ask("Auth/UserChangePassword", &pb.AuthUserChangePasswordRequest{Name: "carl", Password: "other"}, &pb.AuthUserChangePasswordResponse{})
			_ = root.ask("Auth/UserDelete", &pb.AuthUserDeleteRequest{Name: "bob"}, &pb.AuthUserDeleteResponse{})
			read(bob)
			read(carl)
			read(alice)
			a.login("carl", "pw-carl")
			read(a.login("carl", "other"))
			_ = root.ask("Auth/UserChangePassword", &pb.AuthUserChangePasswordRequest{Name: "carl", HashedPassword: shared}, &pb.AuthUserChangePasswordResponse{})
			a.login("carl", "other")
			read(a.login("carl", "allmine"))
			// A simple token is as new as its use.
			root.roleAdd("another")
			read(alice)
			alice.disable()
			root.disable()
			a.status()
			read(alice)
			a.userAdd("root", "pw")
			a.enable()
			read(alice)
			read(a.login("alice", "pw-alice"))
			a.login("root", "pw-root").disable()
		}},
		{name: "auth/11.3-tokens", fresh: true, flags: cheap, script: func(s *pair.Session) {
			a := anonymous(s)
			town(a)
			a.enable()
			alice, carl := a.login("alice", "pw-alice"), a.login("carl", "pw-carl")
			token, other := alice.md[1], carl.md[1]
			letters := token[:16]
			for _, shown := range [][]string{
				{"none"},
				{"empty", "token", ""},
				{"nonsense", "token", "nonsense"},
				{"authorization", "authorization", token},
				{"bearer", "authorization", "Bearer " + token},
				{"bearer in token", "token", "Bearer " + token},
				{"lower case", "authorization", "bearer " + token},
				{"two", "token", token, "token", "nonsense"},
				{"two the other way", "token", "nonsense", "token", token},
				{"both", "authorization", "nonsense", "token", token},
				{"both the other way", "authorization", token, "token", "nonsense"},
				{"letters alone", "token", letters},
				{"no letters", "token", token[16:]},
				{"other index", "token", letters + other[16:]},
				{"zero in front", "token", letters + ".0" + token[17:]},
				{"two dots", "token", token + ".1"},
				{"no number", "token", letters + ".x"},
				{"sign", "token", letters + ".-1"},
				{"index 0", "token", letters + ".0"},
				{"too large", "token", letters + ".99999999999999999999999"},
				{"space", "token", token + " "},
			} {
				who := asker{s: s, name: shown[0], md: shown[1:]}
				_ = who.ask("KV/Range", get("a"), &pb.RangeResponse{})
				_ = who.ask("KV/Put", put("b", "1"), &pb.PutResponse{})
				_ = who.ask("Lease/LeaseGrant", &pb.LeaseGrantRequest{ID: 1, TTL: 100}, &pb.LeaseGrantResponse{})
				_ = who.ask("Maintenance/HashKV", &pb.HashKVRequest{}, &pb.HashKVResponse{})
				_ = who.ask("Auth/UserList", &pb.AuthUserListRequest{}, &pb.AuthUserListResponse{})
				_ = who.ask("Auth/AuthStatus", &pb.AuthStatusRequest{}, &pb.AuthStatusResponse{})
			}
		}},
		{name: "auth/11.3-token-ttl", fresh: true, flags: append([]string{"--auth-token-ttl", "3"}, cheap...), script: func(s *pair.Session) {
			a := anonymous(s)
			town(a)
			a.enable()
			carl, alice := a.login("carl", "pw-carl"), a.login("alice", "pw-alice")
			// Used again and again, it lives on.
			for range 7 {
				time.Sleep(700 * time.Millisecond)
				_ = carl.ask("KV/Range", get("a"), &pb.RangeResponse{})
			}
			_ = alice.ask("KV/Range", get("a"), &pb.RangeResponse{})
		}},
	})
}

// TestEtcdctlAuth gives both stores the command lines of etcdctl that are about users and roles.
func TestEtcdctlAuth(t *testing.T) {
	run := func(s *pair.Session, lines ...string) {
		for _, line := range lines {
			s.Run("", append([]string{etcdctl}, strings.Fields(line)...)...)
		}
	}
	inFormats := func(s *pair.Session, lines ...string) {
		for _, line := range lines {
			for _, format := range formats {
				run(s, line+" -w "+format)
			}
		}
	}
	check(t, []scenario{
		{name: "etcdctl/auth", fresh: true, flags: cheap, script: func(s *pair.Session) {
			inFormats(s, "auth status", "user list", "role list", "user get none", "role get none")
			run(s, "auth enable", "user add root:pw", "user add root:pw", "user add u:pw", "user add n --no-password", "user add", "user add :pw")
			s.Run("secret\nsecret\n", etcdctl, "user", "add", "asked")
			s.Run("secret\n", etcdctl, "user", "add", "piped", "--interactive=false")
			run(s, "role add r", "role add r", "role add root", "role grant-permission r read a", "role grant-permission r write b c", "role grant-permission r readwrite --prefix p",
				"role grant-permission r readwrite --from-key x", "role grant-permission r nonsense a", "role grant-permission none read a", "role grant-permission r read z a")
			inFormats(s, "role get r", "role get root")
			run(s, "role revoke-permission r b c", "role revoke-permission r b", "role revoke-permission r --prefix p", "role revoke-permission r --from-key x", "role get r")
			inFormats(s, "user grant-role u r", "user get u", "user get u --detail")
			run(s, "user grant-role u none", "user grant-role none r", "user grant-role root root", "user revoke-role u none", "user get n")
			inFormats(s, "user list", "role list")
			run(s, "auth enable", "auth status", "auth disable", "--user root:pw auth status", "--user root:pw auth enable", "get a", "put a 1", "--user u:pw get a", "--user u:pw put a 1", "--user u:wrong get a",
				"--user none:pw get a", "--user n:pw get a", "--user u --password pw get a", "--user u:pw get a z", "--user u:pw user get u", "--user u:pw user get root", "--user u:pw role get r", "--user u:pw role get root", "--user u:pw user list",
				"--user root:pw user list", "--user root:pw get a", "--user u:pw lease grant 100", "lease grant 100", "--user u:pw member list -w json", "member list", "--user u:pw member remove 1", "--user u:pw alarm list", "--user u:pw alarm disarm",
				"--user u:pw compact 1", "endpoint hashkv", "--user u:pw endpoint hashkv", "--user u:pw move-leader 1", "--user u:pw defrag", "--user u:pw watch b --rev=1")
			s.Run("other\n", etcdctl, "--user", "root:pw", "user", "passwd", "u", "--interactive=false")
			run(s, "--user u:pw get a", "--user u:other get a", "--user root:pw user revoke-role u r", "--user u:other get a", "--user root:pw role delete r", "--user root:pw user delete u", "--user u:other get a", "--user root:pw user delete root",
				"--user root:pw role delete root", "--user root:pw user revoke-role root root", "--user root:pw auth disable", "get a", "role delete root", "user delete root")
		}},
	})
}

// TestAuthSnapshot carries users, roles and whether they are asked for from etcd to skeg and back.
func TestAuthSnapshot(t *testing.T) {
	requireOurs(t)
	stores := freshPair(t, cheap...)
	if difference := stores.Compare(func(s *pair.Session) {
		a := anonymous(s)
		a.s.Put(put("a", "1"))
		// Without salts of its own, what is stored is equal.
		for _, user := range []string{"root", "alice", "dora"} {
			_ = a.ask("Auth/UserAdd", &pb.AuthUserAddRequest{Name: user, Options: &authpb.UserAddOptions{NoPassword: user == "dora"}}, &pb.AuthUserAddResponse{})
			_ = a.ask("Auth/UserChangePassword", &pb.AuthUserChangePasswordRequest{Name: user, HashedPassword: shared}, &pb.AuthUserChangePasswordResponse{})
		}
		for _, role := range []string{"r", "b", "root"} {
			a.roleAdd(role)
			a.permit(role, authpb.Permission_READWRITE, "k", "")
			a.permit(role, authpb.Permission_WRITE, "a", fromKey)
			a.permit(role, authpb.Permission_READ, "a", "c")
			a.grantRole("alice", role)
		}
		a.revokeRole("alice", "root")
		a.grantRole("root", "root")
	}); difference != nil {
		t.Fatal("the stores differ:\n" + difference.Text)
	}
	theirs, ours := save(t, stores.Etcd), save(t, stores.Skeg)
	compareFiles(t, theirs, ours)
	for _, store := range []*pair.Store{stores.Etcd, stores.Skeg} {
		anonymous(pair.NewSession(store)).enable()
	}
	save := func(store *pair.Store) string {
		path := filepath.Join(t.TempDir(), "auth.db")
		tool(t, nil, etcdctl, "--endpoints", store.ClientAddress, "--user", "root:allmine", "snapshot", "save", path)
		return path
	}
	theirs, ours = save(stores.Etcd), save(stores.Skeg)
	for _, bucket := range []string{"auth", "authUsers", "authRoles"} {
		if theirs, ours := readBolt(t, theirs)[bucket], readBolt(t, ours)[bucket]; fmt.Sprint(theirs) != fmt.Sprint(ours) {
			t.Errorf("bucket %s: etcd %q, skeg %q", bucket, theirs, ours)
		}
	}
	for name, store := range map[string]*pair.Store{"skeg from etcd's": restoreOurs(t, theirs), "etcd from skeg's": restore(t, ours)} {
		ctx, cancel := context.WithTimeout(context.Background(), pair.AnswerLimit)
		defer cancel()
		_, err := pb.NewKVClient(store.Conn).Range(ctx, get("a"))
		if found := pair.ErrorText(err); !strings.Contains(found, "user name is empty") {
			t.Errorf("%s answers somebody unknown: %s", name, found)
		}
		tool(t, nil, etcdctl, "--endpoints", store.ClientAddress, "--user", "alice:allmine", "get", "a", "b")
	}
}
