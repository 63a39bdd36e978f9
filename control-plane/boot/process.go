package boot

import (
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"
)

// Process is a running child whose output goes to a file.
type Process struct {
	name    string
	command *exec.Cmd
	log     string
	exited  chan struct{}
}

// start runs a program in a process group of its own, so that a terminal's ctrl-C reaches only us and we choose the order
// in which children stop. The kernel ends the child if we die first. The log file is appended to.
func start(name, log string, environment []string, path string, args ...string) (*Process, error) {
	output, err := os.OpenFile(log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, fmt.Errorf("opening the log of %s: %w", name, err)
	}
	defer output.Close()
	command := exec.Command(path, args...)
	command.Stdout, command.Stderr = output, output
	command.Env = append(os.Environ(), environment...)
	command.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	if err := command.Start(); err != nil {
		return nil, fmt.Errorf("starting %s: %w", name, err)
	}
	process := &Process{name: name, command: command, log: log, exited: make(chan struct{})}
	go func() {
		_ = command.Wait() // the state is read from command.ProcessState
		close(process.exited)
	}()
	return process, nil
}

// Exited is closed once the process has ended.
func (p *Process) Exited() <-chan struct{} { return p.exited }

// Name is what messages call the process.
func (p *Process) Name() string { return p.name }

// PID is the process id.
func (p *Process) PID() int { return p.command.Process.Pid }

// State tells how the process ended; nil while it runs.
func (p *Process) State() *os.ProcessState {
	select {
	case <-p.exited:
		return p.command.ProcessState
	default:
		return nil
	}
}

// Signal sends one signal.
func (p *Process) Signal(signal os.Signal) error { return p.command.Process.Signal(signal) }

// Kill ends the process as a crash would, and waits until it is gone.
func (p *Process) Kill() {
	_ = p.command.Process.Kill() // it may have ended by itself
	<-p.exited
}

// Stop asks the process to end and waits; after the grace period it is killed and that is an error.
func (p *Process) Stop(grace time.Duration) error {
	_ = p.Signal(syscall.SIGTERM) // it may have ended by itself
	select {
	case <-p.exited:
		return nil
	case <-time.After(grace):
		p.Kill()
		return fmt.Errorf("%s did not stop within %s of SIGTERM", p.name, grace)
	}
}

// LogTail returns the last lines of the process's output, for error messages.
func (p *Process) LogTail(lines int) string {
	content, err := os.ReadFile(p.log)
	if err != nil {
		return err.Error()
	}
	all := strings.Split(strings.TrimRight(string(content), "\n"), "\n")
	return strings.Join(all[max(0, len(all)-lines):], "\n")
}

// await polls ready until it returns nil, the process ends or the time is over.
func (p *Process) await(limit time.Duration, ready func() error) error {
	deadline := time.Now().Add(limit)
	for {
		err := ready()
		if err == nil {
			return nil
		}
		select {
		case <-p.exited:
			return fmt.Errorf("%s ended (%s) before it was ready; the end of %s:\n%s", p.name, p.State(), p.log, p.LogTail(20))
		case <-time.After(50 * time.Millisecond):
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("%s is not ready after %s: %w; the end of %s:\n%s", p.name, limit, err, p.log, p.LogTail(20))
		}
	}
}

// FreePorts finds TCP ports on loopback that nothing listens on now. All are held until the last is found, so they differ.
func FreePorts(count int) ([]int, error) {
	ports := make([]int, 0, count)
	for range count {
		listener, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			return nil, fmt.Errorf("finding a free port: %w", err)
		}
		defer listener.Close()
		ports = append(ports, listener.Addr().(*net.TCPAddr).Port)
	}
	return ports, nil
}

// binary finds a program in a folder.
func binary(folder, name string) (string, error) {
	path := filepath.Join(folder, name)
	if _, err := os.Stat(path); err != nil {
		return "", fmt.Errorf("finding %s (scripts/kubernetes.sh builds it): %w", name, err)
	}
	return path, nil
}
