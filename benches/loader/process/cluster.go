package process

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"strings"
	"syscall"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/grpc"
)

// member is who a process is within its cluster. Its addresses stay, for the others know them.
type member struct {
	name, client, peer string
	// advertised is where the others are told that it is; initial names all members, state says whether they are new.
	advertised, initial, state string
}

// Cluster is a store of several members on loopback.
type Cluster struct {
	Members []*Server

	parent string
}

// leaderLimit bounds an election.
const leaderLimit = 30 * time.Second

// StartCluster runs that many members on fresh data directories below parent, and waits for a leader and each member's first
// linearizable read.
func StartCluster(name, bin, parent string, placement Placement, size int, flags ...string) (*Cluster, error) {
	cluster := &Cluster{parent: parent}
	addresses, err := stableAddresses(2 * size)
	if err != nil {
		return nil, err
	}
	var initial []string
	for i := range size {
		identity := &member{name: fmt.Sprintf("m%d", i), client: addresses[2*i], peer: addresses[2*i+1], advertised: addresses[2*i+1], state: "new"}
		initial = append(initial, identity.name+"=http://"+identity.peer)
		cluster.Members = append(cluster.Members, &Server{Name: name, bin: bin, placement: placement, flags: flags, member: identity})
	}
	for _, server := range cluster.Members {
		server.member.initial = strings.Join(initial, ",")
		if server.dir, err = os.MkdirTemp(parent, name+"-"); err == nil {
			err = server.spawn()
		}
		if err != nil {
			cluster.Remove()
			return nil, err
		}
	}
	if err = cluster.await(); err != nil {
		cluster.Remove()
		return nil, err
	}
	return cluster, nil
}

func (c *Cluster) await() error {
	for _, server := range c.Members {
		if err := server.awaitRead(); err != nil {
			return fmt.Errorf("%s, %s did not start: %w\n%s", server.Name, server.member.name, err, server.Log())
		}
	}
	_, err := c.Leader(context.Background())
	return err
}

// Leader returns the member that says of itself that it leads, once there is one.
func (c *Cluster) Leader(ctx context.Context) (*Server, error) {
	ctx, cancel := context.WithTimeout(ctx, leaderLimit)
	defer cancel()
	for ctx.Err() == nil {
		for _, server := range c.Members {
			if server.ended() {
				continue
			}
			status, err := server.Status(ctx)
			if err == nil && status.Leader == status.Header.MemberId {
				return server, nil
			}
		}
		time.Sleep(20 * time.Millisecond)
	}
	return nil, errors.New("no member leads")
}

// Followers are the members but the leader.
func (c *Cluster) Followers(leader *Server) []*Server {
	var others []*Server
	for _, server := range c.Members {
		if server != leader {
			others = append(others, server)
		}
	}
	return others
}

// Join adds a learner on a fresh data directory and starts it; it waits for nothing.
func (c *Cluster) Join(ctx context.Context, through *Server) (*Server, error) {
	addresses, err := stableAddresses(2)
	if err != nil {
		return nil, err
	}
	identity := &member{name: fmt.Sprintf("m%d", len(c.Members)), client: addresses[0], peer: addresses[1], advertised: addresses[1], state: "existing"}
	err = through.ask(ctx, func(ctx context.Context, conn *grpc.ClientConn) error {
		request := &pb.MemberAddRequest{PeerURLs: []string{"http://" + identity.peer}, IsLearner: true}
		_, err := pb.NewClusterClient(conn).MemberAdd(ctx, request)
		return err
	})
	if err != nil {
		return nil, err
	}
	identity.initial = through.member.initial + "," + identity.name + "=http://" + identity.peer
	joining := &Server{Name: through.Name, bin: through.bin, placement: through.placement, flags: through.flags, member: identity}
	if joining.dir, err = os.MkdirTemp(c.parent, joining.Name+"-"); err != nil {
		return nil, err
	}
	c.Members = append(c.Members, joining)
	return joining, joining.spawn()
}

// Usage sums the processor time of all members.
func (c *Cluster) Usage() (Usage, error) {
	var sum Usage
	for _, server := range c.Members {
		usage, err := server.Usage()
		if err != nil {
			return sum, err
		}
		sum.CPU += usage.CPU
	}
	return sum, nil
}

// Remove kills all members and removes their data.
func (c *Cluster) Remove() {
	for _, server := range c.Members {
		_ = server.Signal(syscall.SIGKILL)
	}
	for _, server := range c.Members {
		server.Remove()
	}
}

// Entry is a cluster whose clients go to some of its members only; what they cost is still what all members use.
type Entry struct {
	*Cluster
	endpoints string
}

// Through lets clients go to these members, each connection to the next of them.
func (c *Cluster) Through(servers ...*Server) Entry {
	var addresses []string
	for _, server := range servers {
		addresses = append(addresses, server.Address)
	}
	return Entry{c, strings.Join(addresses, ",")}
}

// Endpoints is where clients go.
func (e Entry) Endpoints() string { return e.endpoints }

// stableAddresses returns free addresses below the ports that the kernel gives to outgoing connections: a member that is started
// again finds its own still free.
func stableAddresses(count int) ([]string, error) {
	const first, limit, attempts = 12_000, 32_000, 1_000
	addresses := make([]string, 0, count)
	for range attempts {
		if len(addresses) == count {
			return addresses, nil
		}
		listener, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", first+rand.IntN(limit-first)))
		if err != nil {
			continue
		}
		// Closed on return only, so that all are different.
		defer func() { _ = listener.Close() }()
		addresses = append(addresses, listener.Addr().String())
	}
	return nil, errors.New("no free ports")
}
