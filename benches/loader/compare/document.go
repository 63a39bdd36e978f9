package compare

import (
	"bytes"
	"fmt"
	"os"
	"runtime"
	"strings"
	"time"
)

// The parts of the document that Write replaces, each by its markers.
var (
	OneMember    = Part{"<!-- benches/run: begin -->\n", "<!-- benches/run: end -->\n"}
	ThreeMembers = Part{"<!-- benches/run: begin cluster -->\n", "<!-- benches/run: end cluster -->\n"}
)

// Part is what stands between two lines of a document.
type Part struct{ begin, end string }

// Write puts a table under the setting it was measured in, in place of the last one.
func (p Part) Write(path, setting, table string) error {
	document, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	before, rest, hasBegin := bytes.Cut(document, []byte(p.begin))
	_, after, hasEnd := bytes.Cut(rest, []byte(p.end))
	if !hasBegin || !hasEnd {
		return fmt.Errorf("%s lacks the markers %q and %q", path, p.begin, p.end)
	}
	text := string(before) + p.begin + setting + "\n\n" + table + p.end + string(after)
	return os.WriteFile(path, []byte(text), 0o644)
}

// Setting says what was measured, when, and on what.
func Setting(commit string, quick bool) string {
	rounds := "medians of interleaved rounds"
	if quick {
		rounds = "one short round"
	}
	memory := "?"
	if text, err := os.ReadFile("/proc/meminfo"); err == nil {
		var kilobytes int64
		if _, err := fmt.Sscanf(string(text), "MemTotal: %d kB", &kilobytes); err == nil {
			memory = fmt.Sprintf("%.0f", float64(kilobytes)/megabyte)
		}
	}
	kernel, _ := os.ReadFile("/proc/sys/kernel/osrelease")
	return fmt.Sprintf("Commit %s, %s; %d cores (%s), %s GiB, Linux %s; both servers with `%s`, %s.",
		commit, time.Now().UTC().Format("2006-01-02"), runtime.NumCPU(), processor(), memory,
		strings.TrimSpace(string(kernel)), strings.Join(flags, " "), rounds)
}

func processor() string {
	text, err := os.ReadFile("/proc/cpuinfo")
	if err != nil {
		return "unknown"
	}
	for line := range strings.Lines(string(text)) {
		if name, ok := strings.CutPrefix(line, "model name"); ok {
			return strings.TrimSpace(strings.TrimLeft(name, "\t :"))
		}
	}
	return runtime.GOARCH
}
