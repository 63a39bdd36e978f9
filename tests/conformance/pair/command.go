package pair

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"time"
)

// commandLimit bounds one run of a command line client.
const commandLimit = 30 * time.Second

// variable is what the output of a client may say differently about two correct servers.
var variable = []struct {
	pattern     *regexp.Regexp
	replacement string
}{
	{regexp.MustCompile(`"(raft_?[tT]erm|raft_?[iI]ndex|raft_?[aA]pplied_?[iI]ndex|db_?[sS]ize|db_?[sS]ize_?[iI]n_?[uU]se)":\d+`), `"$1":N`},
	{regexp.MustCompile(`"(RaftTerm|RaftIndex|RaftAppliedIndex|DBSize|DBSizeInUse)" : \d+`), `"$1" : N`},
	{regexp.MustCompile(`[tT]ook[" ]*[:=]+ *"?[0-9.]+(µs|ms|s|m)"?`), "took T"},
	{regexp.MustCompile(`[0-9.]+(µs|ms)`), "T"},
	// The client's own log: of its lines only the error is of interest.
	{regexp.MustCompile(`(?m)^\{"level":"warn".*"error":("(?:[^"\\]|\\.)*")\}$`), "client warns: $1"},
	{regexp.MustCompile(`remaining\(\d{2,}s\)`), "remaining(Ns)"},
	{regexp.MustCompile(`"ttl":\d{2,}`), `"ttl":N`},
	{regexp.MustCompile(`"TTL" : \d{2,}`), `"TTL" : N`},
	{regexp.MustCompile(`\d+(\.\d+)? [kMG]?B\b`), "SIZE"},
	{regexp.MustCompile(`-?\d+%`), "PERCENT"},
	// Lease IDs chosen by the server begin with the low 16 bits of the member ID.
	{regexp.MustCompile(`\b20[0-9a-f]{2}a040[0-9a-f]{8}\b|\b2040[0-9a-f]{12}\b`), "LEASE"},
}

// Run runs a command line client against the store and records exit status and output. The address of the store replaces
// "{client}" in the arguments.
func (s *Session) Run(input string, command ...string) string {
	started := s.Launch(input, command...)
	out := started.wait()
	s.record("run "+commandLine(command)+" < "+Bytes([]byte(input)), out)
	return out
}

// Launch starts a command line client that goes on until it is interrupted.
func (s *Session) Launch(input string, command ...string) *Command {
	ctx, cancel := context.WithTimeout(s.ctx, commandLimit)
	arguments := make([]string, len(command))
	for i := range command {
		arguments[i] = strings.ReplaceAll(command[i], "{client}", s.Store.ClientAddress)
	}
	c := &Command{s: s, cancel: cancel, asked: commandLine(command)}
	c.process = exec.CommandContext(ctx, arguments[0], arguments[1:]...)
	c.process.Env = append(os.Environ(), "ETCDCTL_ENDPOINTS="+s.Store.ClientAddress)
	c.process.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	c.process.Stderr = &c.stderr
	var err error
	if c.stdin, err = c.process.StdinPipe(); err == nil {
		var stdout io.ReadCloser
		if stdout, err = c.process.StdoutPipe(); err == nil {
			c.stdout = bufio.NewReader(stdout)
			err = c.process.Start()
		}
	}
	s.Require(err == nil, "start %s: %v", c.asked, err)
	_, _ = io.WriteString(c.stdin, input)
	return c
}

// Command is a running command line client.
type Command struct {
	s       *Session
	cancel  context.CancelFunc
	asked   string
	process *exec.Cmd
	stdin   io.WriteCloser
	stdout  *bufio.Reader
	stderr  bytes.Buffer
}

// Write gives the client a line of input.
func (c *Command) Write(line string) {
	_, err := io.WriteString(c.stdin, line+"\n")
	c.s.Require(err == nil, "%s: input: %v", c.asked, err)
}

// Lines reads that many lines of output and records them.
func (c *Command) Lines(count int) []string {
	var lines []string
	for range count {
		line, err := c.stdout.ReadString('\n')
		if err != nil {
			_ = c.process.Wait()
			c.s.breakOff(fmt.Sprintf("%s: %s ended after %q: %s", c.s.Store.Name, c.asked, lines, c.stderr.String()))
		}
		lines = append(lines, c.s.normaliseOutput(line))
	}
	c.s.record("lines of "+c.asked, fmt.Sprintf("%q", lines))
	return lines
}

// Interrupt lets the client clean up and end, without recording anything.
func (c *Command) Interrupt() { c.stop(os.Interrupt) }

// Kill ends the client at once, without recording anything.
func (c *Command) Kill() { c.stop(os.Kill) }

func (c *Command) stop(signal os.Signal) {
	_ = c.process.Process.Signal(signal)
	_, _ = io.Copy(io.Discard, c.stdout)
	_ = c.process.Wait()
	c.cancel()
}

// Finish closes the input and records the rest of the output and the exit status.
func (c *Command) Finish() {
	c.s.record("end of "+c.asked, c.wait())
}

func (c *Command) wait() string {
	defer c.cancel()
	_ = c.stdin.Close()
	stdout, _ := io.ReadAll(c.stdout)
	err := c.process.Wait()
	code := 0
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		code = exit.ExitCode()
	} else if err != nil {
		c.s.breakOff(c.asked + ": " + err.Error())
	}
	return fmt.Sprintf("exit %d\n%s%s", code, c.s.normaliseOutput(string(stdout)), c.s.normaliseOutput(c.stderr.String()))
}

func (s *Session) normaliseOutput(text string) string {
	text = strings.ReplaceAll(text, s.Store.ClientAddress, "ENDPOINT")
	for _, variable := range variable {
		text = variable.pattern.ReplaceAllString(text, variable.replacement)
	}
	if strings.Contains(text, "┌─") {
		// A table is as wide as its cells, which hold addresses and sizes.
		lines := strings.Split(text, "\n")
		for i, line := range lines {
			lines[i] = regexp.MustCompile(`─+`).ReplaceAllString(strings.Join(strings.Fields(line), " "), "─")
		}
		text = strings.Join(lines, "\n")
	}
	return text
}

// Output waits for the client and returns what it printed, as it is, without recording it.
func (c *Command) Output() string {
	defer c.cancel()
	_ = c.stdin.Close()
	stdout, _ := io.ReadAll(c.stdout)
	err := c.process.Wait()
	c.s.Require(err == nil, "%s: %v: %s", c.asked, err, c.stderr.String())
	return string(stdout)
}

// commandLine is how a transcript names a command: without the folder of the program.
func commandLine(command []string) string {
	return strings.Join(append([]string{filepath.Base(command[0])}, command[1:]...), " ")
}
