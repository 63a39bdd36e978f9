package compare

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"strconv"
	"time"

	"skeg.local/benches/load"
	"skeg.local/benches/process"
)

const (
	// loadLimit bounds one load, interruptLimit how long it takes to end when it is told to.
	loadLimit      = 3 * time.Minute
	interruptLimit = 10 * time.Second
)

// measured is a load's result with what it cost the server and the client.
type measured struct {
	load.Result
	serverCPU, clientCPU time.Duration
}

// sample names the figures of a load after it.
func (m measured) sample(name string) Sample {
	operations := float64(m.Operations)
	return Sample{
		name + ".per_s":     operations / m.Seconds,
		name + ".p50_ms":    m.P50 * 1e3,
		name + ".p99_ms":    m.P99 * 1e3,
		name + ".cpu_us":    float64(m.serverCPU.Microseconds()) / operations,
		name + ".client_us": float64(m.clientCPU.Microseconds()) / operations,
	}
}

// target is what a load goes to: a server, or a way into a cluster.
type target interface {
	Endpoints() string
	Usage() (process.Usage, error)
}

// own runs one of our loads against a server.
func (b *Bench) own(ctx context.Context, server target, placement process.Placement, name string, arguments ...string) (measured, error) {
	finish, err := b.begin(ctx, server, placement, name, arguments...)
	if err != nil {
		return measured{}, err
	}
	return finish()
}

// begin starts one of our loads; what it returns waits for the end, which comes early when the context is cancelled.
func (b *Bench) begin(
	ctx context.Context, server target, placement process.Placement, name string, arguments ...string,
) (finish func() (measured, error), err error) {
	arguments = append([]string{"load", name, "-address", server.Endpoints()}, arguments...)
	return b.launch(ctx, server, placement, b.Self, arguments, func(output []byte) (load.Result, error) {
		var result load.Result
		err := json.Unmarshal(output, &result)
		return result, err
	})
}

// etcds runs etcd's load tool with that many clients over at most 100 connections.
func (b *Bench) etcds(ctx context.Context, server target, placement process.Placement, clients int, arguments ...string) (measured, error) {
	arguments = append([]string{
		"--endpoints", server.Endpoints(), "--precise",
		"--conns", strconv.Itoa(min(clients, 100)), "--clients", strconv.Itoa(clients),
	}, arguments...)
	finish, err := b.launch(ctx, server, placement, b.Tool, arguments, readSummary)
	if err != nil {
		return measured{}, err
	}
	return finish()
}

// launch starts a load as a process, which is interrupted when the context ends.
func (b *Bench) launch(
	ctx context.Context, server target, placement process.Placement,
	program string, arguments []string, read func([]byte) (load.Result, error),
) (finish func() (measured, error), err error) {
	ctx, cancel := context.WithTimeout(ctx, loadLimit)
	command := placement.Command(ctx, program, arguments...)
	command.Cancel = func() error { return command.Process.Signal(os.Interrupt) }
	command.WaitDelay = interruptLimit
	var output, stderr bytes.Buffer
	command.Stdout, command.Stderr = &output, &stderr
	before, err := server.Usage()
	if err == nil {
		err = command.Start()
	}
	if err != nil {
		cancel()
		return nil, err
	}
	return func() (measured, error) {
		defer cancel()
		err := command.Wait()
		if err != nil && !(command.ProcessState.Success() && errors.Is(ctx.Err(), context.Canceled)) {
			return measured{}, fmt.Errorf("%s %v: %w: %s", program, arguments, err, tail(stderr.Bytes()))
		}
		after, err := server.Usage()
		if err != nil {
			return measured{}, err
		}
		result, err := read(output.Bytes())
		if err != nil {
			return measured{}, fmt.Errorf("%s %v: %w: %s", program, arguments, err, tail(output.Bytes()))
		}
		return measured{
			Result:    result,
			serverCPU: after.CPU - before.CPU,
			clientCPU: command.ProcessState.UserTime() + command.ProcessState.SystemTime(),
		}, nil
	}, nil
}

var (
	totalLine   = regexp.MustCompile(`Total:\s+([0-9.e+-]+) secs`)
	rateLine    = regexp.MustCompile(`Requests/sec:\s+([0-9.e+-]+)`)
	medianLine  = regexp.MustCompile(`50% in ([0-9.e+-]+) secs`)
	highLine    = regexp.MustCompile(` 99% in ([0-9.e+-]+) secs`)
	failureLine = regexp.MustCompile(`Error distribution:`)
)

// readSummary reads the last summary that etcd's load tool printed.
func readSummary(output []byte) (load.Result, error) {
	if failureLine.Match(output) {
		return load.Result{}, errors.New("requests failed")
	}
	var failures []error
	last := func(line *regexp.Regexp) float64 {
		found := line.FindAllSubmatch(output, -1)
		if len(found) == 0 {
			failures = append(failures, fmt.Errorf("no line %q", line))
			return 0
		}
		number, err := strconv.ParseFloat(string(found[len(found)-1][1]), 64)
		failures = append(failures, err)
		return number
	}
	result := load.Result{Seconds: last(totalLine), P50: last(medianLine), P99: last(highLine)}
	result.Operations = int64(last(rateLine)*result.Seconds + 0.5)
	return result, errors.Join(failures...)
}

// etcdctl runs one of etcdctl's own checks and returns what it printed.
func (b *Bench) etcdctl(ctx context.Context, server *process.Server, placement process.Placement, arguments ...string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, loadLimit)
	defer cancel()
	arguments = append([]string{"--endpoints", server.Address, "--command-timeout", "60s"}, arguments...)
	output, err := placement.Command(ctx, b.Etcdctl, arguments...).CombinedOutput()
	var exit *exec.ExitError
	if errors.As(err, &exit) && exit.ExitCode() == 1 {
		// A check that is not passed: its text says so.
		err = nil
	}
	return string(output), err
}

func tail(text []byte) []byte { return text[max(0, len(text)-2000):] }

func temporary() (string, error) { return os.MkdirTemp("", "skeg-bench-") }
