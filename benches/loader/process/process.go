// Package process starts the servers under test and reads what they cost from /proc.
//
// A Server is one store process, alone or a member of a Cluster, pinned to the cores its Placement names before it starts (Go sizes its scheduler from them),
// at a raised priority where the machine allows it, so that other work on the machine shows less. Usage is cumulative: a
// measurement takes it before and after.
package process

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
)

const (
	// startLimit bounds a start, recovery of a large store included; stopLimit a graceful end.
	startLimit = 120 * time.Second
	stopLimit  = 30 * time.Second
	// clockTick is the unit of utime and stime in /proc/PID/stat: USER_HZ is 100 on every Linux.
	clockTick = 10 * time.Millisecond
)

// Placement says where a process runs: Cores is a taskset list ("" for all), Nice its priority. RealTime runs it before all ordinary
// processes: for loads that wait more than they work, whose every hop would else include somebody else's time slice.
type Placement struct {
	Cores    string
	Nice     int
	RealTime bool
}

// mayRealTime is whether this user has the right to it.
var mayRealTime = sync.OnceValue(func() bool { return exec.Command("chrt", "--rr", "1", "true").Run() == nil })

// Command builds a command line that runs a program so placed. It keeps the pid: each wrapper replaces itself.
func (p Placement) Command(ctx context.Context, program string, arguments ...string) *exec.Cmd {
	line := []string{"nice", "-n", strconv.Itoa(p.Nice)}
	if p.RealTime && mayRealTime() {
		line = append(line, "chrt", "--rr", "1")
	}
	if p.Cores != "" {
		line = append(line, "taskset", "-c", p.Cores)
	}
	line = append(append(line, program), arguments...)
	return exec.CommandContext(ctx, line[0], line[1:]...)
}

// RaiseSession gives the whole session a priority: where the kernel groups processes by session, a process's own priority counts only
// within its group. It does nothing elsewhere, or without the right to.
func RaiseSession(nice int) { _ = os.WriteFile("/proc/self/autogroup", []byte(strconv.Itoa(nice)), 0) }

// Server is a running store with its own data directory.
type Server struct {
	// Name is "etcd" or "skeg".
	Name string
	// Address is host:port of the client listener.
	Address string

	bin       string
	dir       string
	placement Placement
	flags     []string
	// member is set for the members of a Cluster.
	member  *member
	command *exec.Cmd
	exited  chan struct{}
}

// Start runs bin on a fresh data directory below parent and waits for its first linearizable read.
func Start(name, bin, parent string, placement Placement, flags ...string) (*Server, error) {
	dir, err := os.MkdirTemp(parent, name+"-")
	if err != nil {
		return nil, err
	}
	server := &Server{Name: name, bin: bin, dir: dir, placement: placement, flags: flags}
	if _, err = server.Launch(); err != nil {
		return nil, err
	}
	return server, nil
}

// Launch starts the process on its data directory and returns how long its first linearizable read took to come.
func (s *Server) Launch() (time.Duration, error) {
	started := time.Now()
	if err := s.spawn(); err != nil {
		return 0, err
	}
	if err := s.awaitRead(); err != nil {
		s.end(syscall.SIGKILL)
		return 0, fmt.Errorf("%s did not start: %w\n%s", s.Name, err, s.Log())
	}
	return time.Since(started), nil
}

// spawn starts the process and waits for nothing.
func (s *Server) spawn() error {
	identity := s.member
	if identity == nil {
		addresses, err := freeAddresses(2)
		if err != nil {
			return err
		}
		const advertised = "127.0.0.1:23800"
		identity = &member{name: "bench", client: addresses[0], peer: addresses[1], advertised: advertised, initial: "bench=http://" + advertised, state: "new"}
	}
	arguments := append([]string{
		"--name", identity.name,
		"--data-dir", filepath.Join(s.dir, "data"),
		"--listen-client-urls", "http://" + identity.client,
		"--advertise-client-urls", "http://" + identity.client,
		"--listen-peer-urls", "http://" + identity.peer,
		"--initial-advertise-peer-urls", "http://" + identity.advertised,
		"--initial-cluster", identity.initial,
		"--initial-cluster-state", identity.state,
		"--log-level", "error",
	}, s.flags...)
	log, err := os.OpenFile(s.logPath(), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer func() { _ = log.Close() }()
	command := s.placement.Command(context.Background(), s.bin, arguments...)
	command.Stdout, command.Stderr = log, log
	// The servers must not outlive a run that is killed.
	command.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err = command.Start(); err != nil {
		return err
	}
	exited := make(chan struct{})
	go func() {
		_ = command.Wait()
		close(exited)
	}()
	s.Address, s.command, s.exited = identity.client, command, exited
	return nil
}

// Terminate ends the process with SIGTERM and waits for it; its data stays.
func (s *Server) Terminate() { s.end(syscall.SIGTERM) }

// Kill ends the process with SIGKILL; its data stays.
func (s *Server) Kill() { s.end(syscall.SIGKILL) }

// Signal sends a signal, if the process was started, and waits for nothing.
func (s *Server) Signal(signal syscall.Signal) error {
	if s.command == nil {
		return nil
	}
	return s.command.Process.Signal(signal)
}

// Endpoints is where clients of this server go.
func (s *Server) Endpoints() string { return s.Address }

// Remove kills the process and removes its data.
func (s *Server) Remove() {
	s.end(syscall.SIGKILL)
	_ = os.RemoveAll(s.dir)
}

// Log returns the end of what the process has written.
func (s *Server) Log() string {
	text, err := os.ReadFile(s.logPath())
	if err != nil {
		return err.Error()
	}
	return string(text[max(0, len(text)-4000):])
}

// Usage is what a process has used since it started.
type Usage struct {
	// CPU is user and system time of all its threads.
	CPU time.Duration
	// ResidentBytes is the memory resident now, PeakBytes the most it ever was, both with mapped files.
	ResidentBytes, PeakBytes int64
}

// Usage reads the counters of the process.
func (s *Server) Usage() (Usage, error) {
	folder := fmt.Sprintf("/proc/%d/", s.command.Process.Pid)
	stat, err := os.ReadFile(folder + "stat")
	if err != nil {
		return Usage{}, err
	}
	// The name in parentheses may hold spaces: fields are counted after it. utime and stime are the 14th and 15th of all.
	fields := bytes.Fields(stat[bytes.LastIndexByte(stat, ')')+1:])
	user, userErr := strconv.ParseInt(string(fields[11]), 10, 64)
	system, systemErr := strconv.ParseInt(string(fields[12]), 10, 64)
	resident, residentErr := field(folder+"status", "VmRSS:")
	peak, peakErr := field(folder+"status", "VmHWM:")
	usage := Usage{
		CPU:           time.Duration(user+system) * clockTick,
		ResidentBytes: resident * 1024,
		PeakBytes:     peak * 1024,
	}
	return usage, errors.Join(userErr, systemErr, residentErr, peakErr)
}

// ResetPeak makes PeakBytes count from now.
func (s *Server) ResetPeak() error {
	return os.WriteFile(fmt.Sprintf("/proc/%d/clear_refs", s.command.Process.Pid), []byte("5"), 0)
}

// field reads a number by its label from a file of "label number" lines.
func field(path, label string) (int64, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(text)) {
		if rest, ok := strings.CutPrefix(line, label); ok {
			return strconv.ParseInt(strings.Fields(rest)[0], 10, 64)
		}
	}
	return 0, fmt.Errorf("%s has no %s", path, label)
}

// awaitRead returns when a linearizable read is answered. It dials TCP itself, for a gRPC connection backs off.
func (s *Server) awaitRead() error {
	ctx, cancel := context.WithTimeout(context.Background(), startLimit)
	defer cancel()
	for ctx.Err() == nil {
		select {
		case <-s.exited:
			return errors.New("the process ended")
		case <-time.After(2 * time.Millisecond):
		}
		probe, err := net.Dial("tcp", s.Address)
		if err != nil {
			continue
		}
		_ = probe.Close()
		if s.read(ctx) == nil {
			return nil
		}
	}
	return errors.New("not ready in time")
}

func (s *Server) read(ctx context.Context) error {
	return s.ask(ctx, func(ctx context.Context, conn *grpc.ClientConn) error {
		_, err := pb.NewKVClient(conn).Range(ctx, &pb.RangeRequest{Key: []byte("first read")})
		return err
	})
}

// Status asks the server for its own.
func (s *Server) Status(ctx context.Context) (*pb.StatusResponse, error) {
	var status *pb.StatusResponse
	err := s.ask(ctx, func(ctx context.Context, conn *grpc.ClientConn) (err error) {
		status, err = pb.NewMaintenanceClient(conn).Status(ctx, &pb.StatusRequest{})
		return err
	})
	return status, err
}

// askLimit bounds one question.
const askLimit = 5 * time.Second

// ask makes one call over a connection of its own.
func (s *Server) ask(ctx context.Context, question func(context.Context, *grpc.ClientConn) error) error {
	ctx, cancel := context.WithTimeout(ctx, askLimit)
	defer cancel()
	conn, err := grpc.NewClient(s.Address, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close() }()
	return question(ctx, conn)
}

func (s *Server) logPath() string { return filepath.Join(s.dir, "log") }

// ended is whether the process has ended or was never started.
func (s *Server) ended() bool {
	if s.command == nil {
		return true
	}
	select {
	case <-s.exited:
		return true
	default:
		return false
	}
}

func (s *Server) end(signal syscall.Signal) {
	if s.command == nil {
		return
	}
	_ = s.command.Process.Signal(signal)
	s.Wait()
}

// Wait returns when the process has ended, which is waited for as long as a graceful end may take.
func (s *Server) Wait() {
	select {
	case <-s.exited:
	case <-time.After(stopLimit):
		_ = s.command.Process.Kill()
		<-s.exited
	}
}

func freeAddresses(count int) ([]string, error) {
	addresses := make([]string, 0, count)
	for range count {
		listener, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			return nil, err
		}
		// Closed on return only, so that all are different.
		defer func() { _ = listener.Close() }()
		addresses = append(addresses, listener.Addr().String())
	}
	return addresses, nil
}
