package boot

import (
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"time"
)

// Store is one member of skeg or etcd with its data directory and its ports. It can be started again after it has ended,
// on the same ports and data.
type Store struct {
	binary  string
	folder  string
	flags   []string
	client  int
	peer    int
	process *Process
}

// NewStore prepares a member in a folder without starting it. The flags are added after our own.
func NewStore(binary, folder string, flags ...string) (*Store, error) {
	if err := os.MkdirAll(folder, 0o700); err != nil {
		return nil, fmt.Errorf("making the store's folder: %w", err)
	}
	ports, err := FreePorts(2)
	if err != nil {
		return nil, err
	}
	return &Store{binary: binary, folder: folder, flags: flags, client: ports[0], peer: ports[1]}, nil
}

// URL is the client URL.
func (s *Store) URL() string { return fmt.Sprintf("http://127.0.0.1:%d", s.client) }

// PeerURL is the URL for other members.
func (s *Store) PeerURL() string { return fmt.Sprintf("http://127.0.0.1:%d", s.peer) }

// NewCluster prepares members that found a cluster, each in a folder of its own.
func NewCluster(binary, folder string, size int, flags ...string) ([]*Store, error) {
	members := make([]*Store, size)
	initial := make([]string, size)
	for at := range members {
		member, err := NewStore(binary, filepath.Join(folder, fmt.Sprintf("member-%d", at)))
		if err != nil {
			return nil, err
		}
		members[at] = member
		initial[at] = fmt.Sprintf("member-%d=%s", at, member.PeerURL())
	}
	for at, member := range members {
		member.flags = append([]string{
			fmt.Sprintf("--name=member-%d", at),
			"--initial-cluster=" + strings.Join(initial, ","),
		}, flags...)
	}
	return members, nil
}

// StartAll starts members at once, for a cluster begins only when enough of them are there.
func StartAll(members []*Store) error {
	failures := make(chan error, len(members))
	for _, member := range members {
		go func() { failures <- member.Start() }()
	}
	var all []error
	for range members {
		all = append(all, <-failures)
	}
	return errors.Join(all...)
}

// Process is the running or last process; nil before the first start.
func (s *Store) Process() *Process { return s.process }

// Start starts the member and waits until it is healthy: it has elected itself and serves linearizable reads.
func (s *Store) Start() error {
	peer := s.PeerURL()
	args := append([]string{
		"--name=store",
		"--data-dir=" + filepath.Join(s.folder, "data"),
		"--listen-client-urls=" + s.URL(),
		"--advertise-client-urls=" + s.URL(),
		"--listen-peer-urls=" + peer,
		"--initial-advertise-peer-urls=" + peer,
		"--initial-cluster=store=" + peer,
		"--log-level=warn",
	}, s.flags...)
	process, err := start("the store", filepath.Join(s.folder, "store.log"), nil, s.binary, args...)
	if err != nil {
		return err
	}
	s.process = process
	client := &http.Client{Timeout: 2 * time.Second}
	return process.await(60*time.Second, func() error { return getOK(client, s.URL()+"/health") })
}

// Stop ends the member in order.
func (s *Store) Stop() error {
	if s.process == nil {
		return nil
	}
	return s.process.Stop(15 * time.Second)
}

// Kill ends the member as a crash of its process would.
func (s *Store) Kill() {
	if s.process != nil {
		s.process.Kill()
	}
}

// getOK asks for a URL and wants status 200.
func getOK(client *http.Client, url string) error {
	response, err := client.Get(url)
	if err != nil {
		return err
	}
	defer response.Body.Close()
	if response.StatusCode != http.StatusOK {
		return fmt.Errorf("%s answered %s", url, response.Status)
	}
	return nil
}
