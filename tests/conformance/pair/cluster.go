package pair

import (
	"cmp"
	"context"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"
)

var dashes = regexp.MustCompile(`─+`)

// callLimit bounds a call to a cluster: longer than the server's own limit of 7 seconds.
const callLimit = 15 * time.Second

// Cluster is several members of one server, and the transcript of what they were asked. The cluster of the other server gets the same
// ports after this one has ended, so that all IDs are the same but those of members that are added: they hold the time.
type Cluster struct {
	IsSkeg  bool
	Members []*Store
	// Flags are given to members that start from now on.
	Flags []string

	t        *testing.T
	etcdctl  string
	peers    []string
	initial  string
	names    map[uint64]string
	mutex    sync.Mutex
	lines    []line
	existing map[int]bool
}

// CompareClusters runs a script with three members of etcd, then with three of skeg, and fails at every line that differs. spare is
// how many members more the script may start.
func (p *Pool) CompareClusters(t *testing.T, etcdctl string, spare int, script func(*Cluster)) {
	t.Helper()
	var clients, peers []string
	for range 3 + spare {
		for _, list := range []*[]string{&clients, &peers} {
			*list = append(*list, Reserve(t))
		}
	}
	etcd := p.runCluster(t, p.EtcdBin, etcdctl, clients, peers, script)
	skeg := p.runCluster(t, p.SkegBin, etcdctl, clients, peers, script)
	for i := range max(len(etcd), len(skeg)) {
		theirs, ours := lineAt(etcd, i), lineAt(skeg, i)
		if theirs != ours {
			t.Errorf("line %d\n  etcd %s\n    -> %s\n  skeg %s\n    -> %s", i, theirs.request, theirs.answer, ours.request, ours.answer)
		}
	}
}

// reserve finds a free port that the kernel gives to no connection: it must be free for as long as the test takes.
func Reserve(t *testing.T) string {
	for range 1000 {
		address := fmt.Sprintf("127.0.0.1:%d", 21000+rand.IntN(11000))
		if listener, err := net.Listen("tcp", address); err == nil {
			_ = listener.Close()
			return address
		}
	}
	t.Fatal("no port is free")
	return ""
}

func (p *Pool) runCluster(t *testing.T, bin, etcdctl string, clients, peers []string, script func(*Cluster)) []line {
	t.Helper()
	isSkeg, err := reportsSkeg(bin)
	if err != nil {
		t.Fatal(err)
	}
	c := &Cluster{IsSkeg: isSkeg, t: t, etcdctl: etcdctl, peers: peers, names: map[uint64]string{}, existing: map[int]bool{}}
	defer func() {
		for _, member := range c.Members {
			if t.Failed() && member.command != nil {
				t.Logf("end of the log of %s:\n%s", member.Name, member.Log())
			}
			member.Stop()
		}
	}()
	var initial []string
	for i, client := range clients {
		member := &Store{Name: fmt.Sprintf("m%d", i), IsSkeg: isSkeg, ClientAddress: client, bin: bin}
		if member.dir, err = os.MkdirTemp(p.Dir, member.Name+"-"); err != nil {
			t.Fatal(err)
		}
		c.Members = append(c.Members, member)
		if i < 3 {
			initial = append(initial, member.Name+"="+c.PeerURL(i))
		}
	}
	c.initial = strings.Join(initial, ",")
	c.start(0, 1, 2)
	for i := range 3 {
		status := &pb.StatusResponse{}
		c.require(c.Ask(i, "Maintenance/Status", &pb.StatusRequest{}, status))
		c.Name(status.Header.MemberId, c.Members[i].Name)
	}
	c.Lead(0)
	script(c)
	return c.lines
}

// PeerURL is where a member is or would be reached by the others.
func (c *Cluster) PeerURL(at int) string { return "http://" + c.peers[at] }

// Join starts a member that was added; all that are members by now are named.
func (c *Cluster) Join(at int, members ...int) {
	var initial []string
	for _, member := range append(members, at) {
		initial = append(initial, c.Members[member].Name+"="+c.PeerURL(member))
	}
	c.initial = strings.Join(initial, ",")
	c.existing[at] = true
	c.start(at)
}

// Start starts members again.
func (c *Cluster) Start(at ...int) { c.start(at...) }

// Restart ends a member with a signal, and starts it again.
func (c *Cluster) Restart(at int, signal syscall.Signal) {
	c.Members[at].end(signal)
	c.start(at)
}

// Kill ends members at once.
func (c *Cluster) Kill(at ...int) {
	for _, member := range at {
		c.Members[member].end(syscall.SIGKILL)
	}
}

func (c *Cluster) start(at ...int) {
	c.t.Helper()
	failures := make(chan error)
	for _, i := range at {
		state := "new"
		if c.existing[i] {
			state = "existing"
		}
		member := c.Members[i]
		go func() {
			failures <- member.run(append([]string{
				"--name", member.Name,
				"--data-dir", filepath.Join(member.dir, "data"),
				"--listen-client-urls", "http://" + member.ClientAddress, "--advertise-client-urls", "http://" + member.ClientAddress,
				"--listen-peer-urls", c.PeerURL(i), "--initial-advertise-peer-urls", c.PeerURL(i),
				"--initial-cluster", c.initial, "--initial-cluster-state", state, "--unsafe-no-fsync",
			}, c.Flags...))
		}()
	}
	for range at {
		c.require(<-failures)
	}
}

func (c *Cluster) require(err error) {
	c.t.Helper()
	if err != nil {
		c.t.Fatal(err)
	}
}

// Ask asks a member without recording anything.
func (c *Cluster) Ask(at int, method string, request, response proto.Message, options ...grpc.CallOption) error {
	ctx, cancel := context.WithTimeout(context.Background(), callLimit)
	defer cancel()
	return c.Members[at].Conn.Invoke(ctx, "/etcdserverpb."+method, request, response, options...)
}

// Call asks a member and records what it answers.
func (c *Cluster) Call(at int, method string, request, response proto.Message) {
	c.Record(at, method+" "+Text(request), response, c.Ask(at, method, request, response))
}

// Record records an answer.
func (c *Cluster) Record(at int, asked string, response proto.Message, err error) {
	answer := ErrorText(err)
	if err == nil {
		bare := Normalise(response)
		listed, lists := response.(interface{ GetMembers() []*pb.Member })
		if lists {
			bare.ProtoReflect().Clear(bare.ProtoReflect().Descriptor().Fields().ByName("members"))
		}
		answer = Text(bare)
		if lists {
			answer += c.members(listed.GetMembers())
		}
	}
	c.Note(fmt.Sprintf("%s: %s", c.Members[at].Name, asked), answer)
}

// members is a list of members whose order does not rest on the IDs of those that were added, and whether it was in the order of IDs.
func (c *Cluster) members(members []*pb.Member) string {
	inOrder := slices.IsSortedFunc(members, func(a, b *pb.Member) int { return cmp.Compare(a.ID, b.ID) })
	var texts []string
	for _, member := range members {
		texts = append(texts, c.normalise(Text(member)))
	}
	slices.Sort(texts)
	return fmt.Sprintf(" members in order: %t: %s", inOrder, strings.Join(texts, " "))
}

// Note records something.
func (c *Cluster) Note(what, fact string) {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	c.lines = append(c.lines, line{c.normalise(what), c.normalise(fact)})
}

// Name gives an ID a name in the transcript.
func (c *Cluster) Name(id uint64, name string) { c.names[id] = name }

// ID is the ID that was given this name.
func (c *Cluster) ID(name string) uint64 {
	for id, given := range c.names {
		if given == name {
			return id
		}
	}
	c.t.Fatalf("nothing is named %s", name)
	return 0
}

func (c *Cluster) normalise(text string) string {
	for id, name := range c.names {
		text = strings.ReplaceAll(text, strconv.FormatUint(id, 10), "ID-"+name)
		text = strings.ReplaceAll(text, strconv.FormatUint(id, 16), "ID-"+name)
	}
	for _, variable := range variable {
		text = variable.pattern.ReplaceAllString(text, variable.replacement)
	}
	return text
}

// Leader is which member leads, -1 if they do not agree on one.
func (c *Cluster) Leader(among ...int) int {
	leaders := map[uint64]bool{}
	found := -1
	for _, i := range among {
		status := &pb.StatusResponse{}
		if c.Ask(i, "Maintenance/Status", &pb.StatusRequest{}, status) != nil {
			return -1
		}
		leaders[status.Leader] = true
		if status.Leader != 0 && status.Leader == status.Header.MemberId {
			found = i
		}
	}
	if len(leaders) != 1 {
		return -1
	}
	return found
}

// Lead has a member lead.
func (c *Cluster) Lead(at int) {
	c.t.Helper()
	c.Await("member "+c.Members[at].Name+" leads", func() bool {
		leader := c.Leader(0, 1, 2)
		if leader >= 0 && leader != at {
			target := c.ID(c.Members[at].Name)
			_ = c.Ask(leader, "Maintenance/MoveLeader", &pb.MoveLeaderRequest{TargetID: target}, &pb.MoveLeaderResponse{})
			return false
		}
		return leader == at
	})
}

// Await waits until something is so.
func (c *Cluster) Await(what string, condition func() bool) {
	c.t.Helper()
	for deadline := time.Now().Add(60 * time.Second); !condition(); time.Sleep(50 * time.Millisecond) {
		if time.Now().After(deadline) {
			c.t.Fatalf("it does not come about that %s", what)
		}
	}
}

// Ctl runs etcdctl with the clients' ports of these members and records what it prints, each line by itself.
func (c *Cluster) Ctl(endpoints []int, arguments ...string) {
	var addresses []string
	for _, at := range endpoints {
		addresses = append(addresses, c.Members[at].ClientAddress)
	}
	ctx, cancel := context.WithTimeout(context.Background(), callLimit)
	defer cancel()
	command := exec.CommandContext(ctx, c.etcdctl, append([]string{"--endpoints=" + strings.Join(addresses, ",")}, arguments...)...)
	output, err := command.CombinedOutput()
	lines := strings.Split(strings.TrimSpace(string(output)), "\n")
	if slices.Contains(arguments, "--cluster") {
		// Members are asked all at once, and printed as they answer.
		slices.Sort(lines)
	}
	for _, line := range append(lines, fmt.Sprint(err)) {
		// A table is as wide as its cells, which hold times and sizes.
		line = dashes.ReplaceAllString(strings.Join(strings.Fields(line), " "), "─")
		c.Note("etcdctl "+strings.Join(arguments, " "), line)
	}
}
