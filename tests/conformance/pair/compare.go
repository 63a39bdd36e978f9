package pair

import (
	"fmt"
	"runtime/debug"
	"strings"
	"sync"
)

// shownBefore is how many equal lines a difference shows before the first unequal one.
const shownBefore = 6

// Difference says where two transcripts part.
type Difference struct {
	// Line is the index of the first unequal line.
	Line int
	// Text shows it, with what came before.
	Text string
}

func (d *Difference) Error() string { return d.Text }

// Pair is the two stores that get the same scripts.
type Pair struct {
	Etcd, Skeg *Store
}

// Stop ends both processes and removes their data.
func (p *Pair) Stop() {
	p.Etcd.Stop()
	p.Skeg.Stop()
}

// Compare runs the script against both stores at once and returns the first difference, or nil. A script that breaks off
// (a missing answer, a broken requirement, a panic) is a difference even when both stores break it off alike.
func (p *Pair) Compare(script func(*Session)) *Difference {
	sessions := [2]*Session{NewSession(p.Etcd), NewSession(p.Skeg)}
	var wait sync.WaitGroup
	for _, session := range sessions {
		wait.Go(func() { session.run(script) })
	}
	wait.Wait()
	etcd, skeg := sessions[0].lines, sessions[1].lines
	for i := range max(len(etcd), len(skeg)) {
		a, b := lineAt(etcd, i), lineAt(skeg, i)
		if a != b {
			return &Difference{Line: i, Text: describe(etcd, skeg, i)}
		}
		if strings.HasPrefix(a.answer, broken) {
			return &Difference{Line: i, Text: describe(etcd, skeg, i)}
		}
	}
	return nil
}

// broken starts the line of a script that could not go on.
const broken = "BROKEN OFF: "

type line struct{ request, answer string }

func lineAt(lines []line, i int) line {
	if i < len(lines) {
		return lines[i]
	}
	return line{"", "(nothing)"}
}

func describe(etcd, skeg []line, at int) string {
	var out strings.Builder
	first := max(0, at-shownBefore)
	if first > 0 {
		fmt.Fprintf(&out, "  (%d equal lines)\n", first)
	}
	for i := first; i < at; i++ {
		fmt.Fprintf(&out, "  %s\n     = %s\n", etcd[i].request, etcd[i].answer)
	}
	a, b := lineAt(etcd, at), lineAt(skeg, at)
	fmt.Fprintf(&out, "  %s\n", a.request)
	if a.request != b.request {
		fmt.Fprintf(&out, "  skeg was asked: %s\n", b.request)
	}
	fmt.Fprintf(&out, "  etcd = %s\n  skeg = %s", a.answer, b.answer)
	return out.String()
}

// brokenOff is what a session panics with to leave its script.
type brokenOff string

func (s *Session) run(script func(*Session)) {
	defer s.close()
	defer func() {
		switch reason := recover().(type) {
		case nil:
		case brokenOff:
			s.record("script", broken+string(reason))
		default:
			s.record("script", fmt.Sprintf("%s%v\n%s", broken, reason, debug.Stack()))
		}
	}()
	script(s)
}
