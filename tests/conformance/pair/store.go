// Package pair runs a real etcd and a real skeg side by side, gives both the same script, and says where their answers differ.
//
// A Store is one process. A Session is one script run against one store: every call it makes and every answer, error and stream
// message it sees becomes a line of its transcript, after Normalise has taken out what may differ between two correct servers
// (raft terms and indexes, file sizes, clocks). Compare runs a script against both stores at once and reports the first line
// that is not the same.
//
// Both stores advertise the same URLs although they listen on different ports, so member and cluster IDs are equal and compared
// as they are.
package pair

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
)

const (
	// startLimit bounds one attempt to start a store, stopLimit its graceful end.
	startLimit = 30 * time.Second
	stopLimit  = 15 * time.Second

	// AdvertisedPeer and AdvertisedClient are what every store says its URLs are. Nobody connects to them: a single member
	// has no peers. The member ID of AdvertisedPeer is a test vector of docs (3319814642761637952).
	AdvertisedPeer   = "http://127.0.0.1:23800"
	AdvertisedClient = "http://127.0.0.1:23790"
)

// Store is a running server process with one connection to it.
type Store struct {
	// Name is "etcd" or "skeg": the role, also when both roles are played by etcd.
	Name string
	// IsSkeg is false when etcd plays skeg, to check the tests themselves: then deliberate differences are not expected.
	IsSkeg bool
	// ClientAddress is host:port of the client listener.
	ClientAddress string
	// Conn has no message limits of its own, so that the server's show.
	Conn *grpc.ClientConn

	bin     string
	flags   []string
	dir     string
	command *exec.Cmd
	exited  chan struct{}
}

// Start runs bin with a fresh data directory under dir and waits until it serves. "{client}" in a flag becomes host:port of the client
// listener.
func Start(name, bin, dir string, flags ...string) (*Store, error) {
	return StartOn(name, bin, dir, nil, flags...)
}

// StartOn is Start with a data directory that prepare has made.
func StartOn(name, bin, dir string, prepare func(data string) error, flags ...string) (*Store, error) {
	isSkeg, err := reportsSkeg(bin)
	if err != nil {
		return nil, err
	}
	store := &Store{Name: name, IsSkeg: isSkeg, bin: bin, flags: flags}
	if store.dir, err = os.MkdirTemp(dir, name+"-"); err != nil {
		return nil, err
	}
	if prepare != nil {
		if err = prepare(store.data()); err != nil {
			return nil, err
		}
	}
	// A port found free can be taken before the server binds it: try again with others.
	for attempt := 0; ; attempt++ {
		if err = store.launch(); err == nil {
			return store, nil
		}
		if attempt == 3 {
			return nil, err
		}
	}
}

// Restart ends the process with a signal and starts it again on the same data directory.
func (s *Store) Restart(signal syscall.Signal) error {
	s.end(signal)
	return s.launch()
}

// Stop kills the process and removes its data.
func (s *Store) Stop() {
	s.end(syscall.SIGKILL)
	_ = os.RemoveAll(s.dir)
}

// Alive reports whether the process still runs.
func (s *Store) Alive() bool {
	select {
	case <-s.exited:
		return false
	default:
		return true
	}
}

// Log returns the end of what the process has written.
func (s *Store) Log() string {
	text, err := os.ReadFile(s.logPath())
	if err != nil {
		return err.Error()
	}
	if len(text) > 4000 {
		text = text[len(text)-4000:]
	}
	return string(text)
}

// URL returns the http URL of a path on the client listener.
func (s *Store) URL(path string) string { return "http://" + s.ClientAddress + path }

func (s *Store) data() string { return filepath.Join(s.dir, "data") }

func (s *Store) logPath() string { return filepath.Join(s.dir, "log") }

func (s *Store) launch() error {
	client, err := freeAddress()
	if err != nil {
		return err
	}
	peer, err := freeAddress()
	if err != nil {
		return err
	}
	s.ClientAddress = client
	arguments := append([]string{
		"--name", "default",
		"--data-dir", s.data(),
		"--listen-client-urls", "http://" + client,
		"--advertise-client-urls", AdvertisedClient,
		"--listen-peer-urls", "http://" + peer,
		"--initial-advertise-peer-urls", AdvertisedPeer,
		"--initial-cluster", "default=" + AdvertisedPeer,
		"--unsafe-no-fsync",
	}, s.flags...)
	for i := range arguments {
		arguments[i] = strings.ReplaceAll(arguments[i], "{client}", client)
	}
	return s.run(arguments)
}

// run starts the process and waits until it serves at ClientAddress.
func (s *Store) run(arguments []string) error {
	log, err := os.OpenFile(s.logPath(), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	s.command = exec.Command(s.bin, arguments...)
	s.command.Stdout, s.command.Stderr = log, log
	// The servers must not outlive a test binary that is killed.
	s.command.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	err = s.command.Start()
	_ = log.Close()
	if err != nil {
		return err
	}
	exited := make(chan struct{})
	s.exited = exited
	command := s.command
	go func() {
		_ = command.Wait()
		close(exited)
	}()
	s.Conn, err = grpc.NewClient(s.ClientAddress,
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(1<<30), grpc.MaxCallSendMsgSize(1<<30)))
	if err != nil {
		return err
	}
	if err = s.awaitReady(); err != nil {
		log := s.Log()
		s.end(syscall.SIGKILL)
		return fmt.Errorf("%s did not start: %w\n%s", s.Name, err, log)
	}
	return nil
}

// awaitReady waits until gRPC is answered, which opens the connection so that no test pays for its back-off, and until the
// storage has the version of the server, or the one that a downgrade goes to: etcd changes it in the background after it is ready.
func (s *Store) awaitReady() error {
	ctx, cancel := context.WithTimeout(context.Background(), startLimit)
	defer cancel()
	go func() {
		select {
		case <-s.exited:
			cancel()
		case <-ctx.Done():
		}
	}()
	for ctx.Err() == nil {
		status, err := pb.NewMaintenanceClient(s.Conn).Status(ctx, &pb.StatusRequest{})
		// etcd has storage versions from 3.6 on.
		minor := status.GetVersion()[:strings.LastIndexByte(status.GetVersion(), '.')+1]
		// Whoever asks who has no name: it serves.
		if err != nil && strings.Contains(err.Error(), "user name is empty") {
			return nil
		}
		wanted := minor + "0"
		if status.GetDowngradeInfo().GetEnabled() {
			wanted = status.DowngradeInfo.TargetVersion
		}
		if err == nil && (status.StorageVersion == wanted || minor == "3.5.") {
			return nil
		}
		s.Conn.ResetConnectBackoff()
		time.Sleep(10 * time.Millisecond)
	}
	if !s.Alive() {
		return errors.New("the process ended")
	}
	return errors.New("not ready in time")
}

func (s *Store) end(signal syscall.Signal) {
	if s.Conn != nil {
		_ = s.Conn.Close()
	}
	if s.command == nil || s.command.Process == nil {
		return
	}
	_ = s.command.Process.Signal(signal)
	select {
	case <-s.exited:
	case <-time.After(stopLimit):
		_ = s.command.Process.Kill()
		<-s.exited
	}
}

func reportsSkeg(bin string) (bool, error) {
	text, err := exec.Command(bin, "--version").CombinedOutput()
	if err != nil {
		return false, fmt.Errorf("%s --version: %w: %s", bin, err, text)
	}
	return strings.Contains(string(text), "skeg"), nil
}

func freeAddress() (string, error) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", err
	}
	defer func() { _ = listener.Close() }()
	return listener.Addr().String(), nil
}
