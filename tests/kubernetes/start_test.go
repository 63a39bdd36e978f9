package kubernetes

import (
	"bufio"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"skeg.local/boot"
)

// TestStartCommand starts store and control plane by the command that scripts/control-plane runs, interrupts it as ctrl-C does, and
// starts it again: all parts must have ended, and what was made must be there.
func TestStartCommand(t *testing.T) {
	program := filepath.Join(t.TempDir(), "start")
	if output, err := exec.CommandContext(t.Context(), "go", "build", "-o", program, "skeg.local/boot/cmd/start").CombinedOutput(); err != nil {
		t.Fatalf("building it: %v\n%s", err, output)
	}
	folder := filepath.Join(t.TempDir(), "control-plane")
	ports, err := boot.FreePorts(1)
	if err != nil {
		t.Fatal(err)
	}
	for round, verb := range []string{"create", "get"} {
		command := exec.CommandContext(t.Context(), program, "-store", os.Getenv("STORE_BIN"), "-kubernetes", os.Getenv("KUBERNETES_BIN"),
			"-folder", folder, "-port", strconv.Itoa(ports[0]))
		command.Stderr = os.Stderr
		printed, err := command.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := command.Start(); err != nil {
			t.Fatal(err)
		}
		kubeconfig := ""
		for lines := bufio.NewScanner(printed); lines.Scan(); {
			if path, found := strings.CutPrefix(lines.Text(), "kubeconfig:"); found {
				kubeconfig = strings.TrimSpace(path)
			}
			if strings.HasPrefix(lines.Text(), "ctrl-C") {
				break
			}
		}
		kubectl := exec.CommandContext(t.Context(), filepath.Join(os.Getenv("KUBERNETES_BIN"), "kubectl"), "--kubeconfig="+kubeconfig,
			"--cache-dir="+filepath.Join(folder, "kubectl"), verb, "namespace", "kept")
		if output, err := kubectl.CombinedOutput(); err != nil {
			t.Errorf("round %d: %v\n%s", round, err, output)
		}
		children := childrenOf(t, command.Process.Pid)
		if len(children) != 4 {
			t.Errorf("round %d: it runs %d processes, want store, kube-apiserver and two controllers", round, len(children))
		}
		if err := command.Process.Signal(syscall.SIGINT); err != nil {
			t.Fatal(err)
		}
		ended := make(chan error, 1)
		go func() { ended <- command.Wait() }()
		select {
		case err := <-ended:
			if err != nil {
				t.Errorf("round %d: it ended with %v", round, err)
			}
		case <-time.After(60 * time.Second):
			t.Fatalf("round %d: it did not end in 60 s", round)
		}
		for _, child := range children {
			if _, err := os.Stat(filepath.Join("/proc", child)); err == nil {
				t.Errorf("round %d: process %s is still there", round, child)
			}
		}
	}
}

// childrenOf lists the ids of a process's children.
func childrenOf(t *testing.T, pid int) []string {
	t.Helper()
	children := []string{}
	tasks, err := filepath.Glob(filepath.Join("/proc", strconv.Itoa(pid), "task", "*", "children"))
	if err != nil {
		t.Fatal(err)
	}
	for _, task := range tasks {
		content, err := os.ReadFile(task)
		if err != nil {
			continue // a thread that has ended
		}
		children = append(children, strings.Fields(string(content))...)
	}
	return children
}
