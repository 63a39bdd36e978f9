// Command suite runs kube-apiserver's own storage tests (k8s.io/apiserver, pkg/storage/etcd3) against the store that
// STORE_BIN names, and compares what passes and what is skipped with a committed list.
//
// The module is copied out of the module cache, where nothing may be changed; in the copy one package is replaced, the
// launcher of the store. The copy is made at each run and removed after it: nothing of Kubernetes is kept.
//
//	suite -expected FILE           run and compare
//	suite -expected FILE -write    run and write the list; reasons given in the old list stay
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"
)

// limit bounds one run; two cores need about five minutes.
const limit = 15 * time.Minute

// listed are the packages that the committed list is about.
const listed = "./pkg/storage/etcd3/..."

// settings of one run, all from flags.
type settings struct {
	expected string
	write    bool
	module   string
	boot     string
	launcher string
	packages string
	run      string
	bench    string
}

func main() {
	var s settings
	flag.StringVar(&s.expected, "expected", "expected.txt", "the committed list")
	flag.BoolVar(&s.write, "write", false, "write the list instead of comparing with it")
	flag.StringVar(&s.module, "module", "", "folder of k8s.io/apiserver in the module cache")
	flag.StringVar(&s.boot, "boot", "", "folder of the module skeg.local/boot")
	flag.StringVar(&s.launcher, "launcher", "", "folder of the package that replaces testserver")
	flag.StringVar(&s.packages, "packages", listed, "packages to test; nothing is compared but for the default")
	flag.StringVar(&s.run, "run", "", "only tests that match; nothing is compared")
	flag.StringVar(&s.bench, "bench", "", "also benchmarks that match, one round each")
	flag.Parse()
	ctx, release := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer release()
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	if err := s.execute(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "suite:", err)
		os.Exit(1)
	}
}

func (s settings) execute(ctx context.Context) error {
	work, err := os.MkdirTemp("", "apiserver-storage-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(work)
	module := filepath.Join(work, "apiserver")
	if err := s.prepare(ctx, module); err != nil {
		return err
	}
	results, err := s.test(ctx, module)
	if err != nil {
		return err
	}
	fmt.Println(summary(results))
	if s.run != "" || s.packages != listed {
		return results.failures()
	}
	expected, err := readList(s.expected)
	if err != nil {
		return err
	}
	if s.write {
		return errors.Join(results.failures(), writeList(s.expected, results, expected))
	}
	return compare(results, expected)
}

// prepare copies the module and puts our launcher in the place of its own.
func (s settings) prepare(ctx context.Context, module string) error {
	if err := os.CopyFS(module, os.DirFS(s.module)); err != nil {
		return fmt.Errorf("copying the module: %w", err)
	}
	// Files of the module cache are read-only, and so are their copies.
	err := filepath.WalkDir(module, func(path string, entry os.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if entry.IsDir() {
			return os.Chmod(path, 0o755)
		}
		return os.Chmod(path, 0o644)
	})
	if err != nil {
		return fmt.Errorf("making the copy writable: %w", err)
	}
	launcher := filepath.Join(module, "pkg", "storage", "etcd3", "testserver")
	if err := os.RemoveAll(launcher); err != nil {
		return fmt.Errorf("removing the launcher: %w", err)
	}
	if err := os.CopyFS(launcher, os.DirFS(s.launcher)); err != nil {
		return fmt.Errorf("copying our launcher: %w", err)
	}
	command := exec.CommandContext(ctx, "go", "mod", "edit",
		"-require=skeg.local/boot@v0.0.0", "-replace=skeg.local/boot="+s.boot)
	command.Dir = module
	if output, err := command.CombinedOutput(); err != nil {
		return fmt.Errorf("adding our module to the copy: %w: %s", err, output)
	}
	return nil
}

// event is a line of `go test -json`, as far as it is used here.
type event struct {
	Action  string
	Package string
	Test    string
	Output  string
}

// results maps a test, as PACKAGE.NAME with the package relative to pkg/storage, to pass, skip or fail.
type results map[string]string

// test runs the suite and prints the output of what fails.
func (s settings) test(ctx context.Context, module string) (results, error) {
	args := []string{"test", "-json", "-vet=off", "-count=1", "-timeout=" + (limit - time.Minute).String(), "-run=" + s.run}
	if s.bench != "" {
		args = append(args, "-bench="+s.bench, "-benchtime=1x")
	}
	command := exec.CommandContext(ctx, "go", append(args, s.packages)...)
	command.Dir = module
	command.Stderr = os.Stderr
	command.Cancel = func() error { return command.Process.Signal(os.Interrupt) }
	command.WaitDelay = 10 * time.Second
	output, err := command.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := command.Start(); err != nil {
		return nil, fmt.Errorf("starting go test: %w", err)
	}
	found, packages, err := collect(output)
	failed := command.Wait()
	if err != nil {
		return nil, err
	}
	if failed != nil && found.failures() == nil {
		return nil, fmt.Errorf("go test: %w (%s)", failed, strings.Join(packages, ", "))
	}
	return found, nil
}

// collect reads go test's events. It also returns the packages that failed as a whole.
func collect(output io.Reader) (results, []string, error) {
	found, printed, packages := results{}, map[string][]string{}, []string{}
	lines := bufio.NewScanner(output)
	lines.Buffer(nil, 16<<20)
	for lines.Scan() {
		var event event
		if err := json.Unmarshal(lines.Bytes(), &event); err != nil {
			return nil, nil, fmt.Errorf("reading go test's output: %w: %s", err, lines.Text())
		}
		_, folder, _ := strings.Cut(event.Package, "pkg/storage/")
		name := folder + "." + event.Test
		switch event.Action {
		case "output", "build-output":
			printed[name] = append(printed[name], event.Output)
		case "pass", "skip", "fail":
			if event.Action == "fail" {
				fmt.Printf("--- %s failed:\n%s\n", name, strings.Join(printed[name], ""))
			}
			delete(printed, name)
			switch {
			case event.Test != "":
				found[name] = event.Action
			case event.Action == "fail":
				packages = append(packages, folder)
			}
		}
	}
	return found, packages, lines.Err()
}

func (r results) failures() error {
	failed := []string{}
	for name, result := range r {
		if result == "fail" {
			failed = append(failed, name)
		}
	}
	if len(failed) == 0 {
		return nil
	}
	slices.Sort(failed)
	return fmt.Errorf("%d failed:\n  %s", len(failed), strings.Join(failed, "\n  "))
}

// summary is the line that CI counts.
func summary(results results) string {
	count := map[string]int{}
	for _, result := range results {
		count[result]++
	}
	return fmt.Sprintf("%d passed, %d failed, %d skipped", count["pass"], count["fail"], count["skip"])
}

// expectation is a line of the committed list: NAME, then pass or skip, then why it is skipped.
type expectation struct{ result, why string }

func readList(path string) (map[string]expectation, error) {
	content, err := os.ReadFile(path)
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("reading the list: %w", err)
	}
	list := map[string]expectation{}
	for line := range strings.Lines(string(content)) {
		line = strings.TrimSpace(line)
		if line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		fields := strings.SplitN(line, " ", 3)
		if len(fields) < 2 {
			return nil, fmt.Errorf("reading the list: a line without a test: %q", line)
		}
		fields = append(fields, "")
		list[fields[1]] = expectation{fields[0], fields[2]}
	}
	return list, nil
}

func writeList(path string, results results, old map[string]expectation) error {
	var text strings.Builder
	text.WriteString("# What the storage tests of k8s.io/apiserver give with skeg and with etcd 3.7.3: result, test, why it is skipped.\n")
	text.WriteString("# Written by scripts/apiserver-storage.sh -write; a reason is added by hand and stays.\n")
	for _, name := range slices.Sorted(maps.Keys(results)) {
		line := results[name] + " " + name
		if why := old[name].why; why != "" && results[name] == "skip" {
			line += " " + why
		}
		text.WriteString(line + "\n")
	}
	return os.WriteFile(path, []byte(text.String()), 0o644)
}

// compare wants the same tests with the same results, and a reason for each that is skipped.
func compare(results results, expected map[string]expectation) error {
	differences := []string{}
	for name, result := range results {
		switch want, listed := expected[name]; {
		case !listed:
			differences = append(differences, fmt.Sprintf("%s: %s, not in the list", name, result))
		case want.result != result:
			differences = append(differences, fmt.Sprintf("%s: %s, want %s", name, result, want.result))
		case result == "skip" && want.why == "":
			differences = append(differences, name+": skipped without a reason in the list")
		}
	}
	for name, want := range expected {
		if _, ran := results[name]; !ran {
			differences = append(differences, fmt.Sprintf("%s: did not run, want %s", name, want.result))
		}
	}
	if len(differences) == 0 {
		return nil
	}
	slices.Sort(differences)
	return fmt.Errorf("%d differences from the list:\n  %s", len(differences), strings.Join(differences, "\n  "))
}
