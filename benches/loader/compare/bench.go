// Package compare runs every load against etcd and skeg in turn and sets their figures against each other.
//
// A Scenario measures one server and returns a Sample: figures by name. Rounds alternate between the servers, so that a slow minute
// of the machine falls on both, and the medians are compared. A Goal is a row of the result: which figure, and how skeg's must relate to
// etcd's.
package compare

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"skeg.local/benches/process"
)

// Sample is what a measurement of one server found: figures by name, the unit last.
type Sample map[string]float64

func (s Sample) add(other Sample) { maps.Copy(s, other) }

// Scenario is a load and the rows it fills.
type Scenario struct {
	// Name is what --rows chooses by.
	Name string
	// Rounds is how often each server is measured.
	Rounds int
	// SkegOnly leaves etcd out: the goals are absolute.
	SkegOnly bool
	// Cluster puts its rows into the table of three members.
	Cluster bool
	Measure func(ctx context.Context, b *Bench, server string) (Sample, error)
	Goals   []Goal
}

// Goal is a row: the ratio skeg/etcd of a figure, or skeg's figure alone, and its bound.
type Goal struct {
	// Work and What name the row.
	Work, What string
	// Figure is compared with etcd's, or with skeg's own figure Against.
	Figure, Against string
	// Least and Most bound the ratio; 0 is no bound. Absolute bounds the figure itself.
	// Zero demands that it be 0.
	Least, Most float64
	Absolute    bool
	Zero        bool
}

// Bench is one run.
type Bench struct {
	// Binaries.
	Etcd, Skeg, Tool, Etcdctl, Self string
	// Quick does one short round of everything.
	Quick bool
	// Nice is the priority of servers and clients.
	Nice int
	// Progress gets a line per measurement.
	Progress io.Writer

	dir string
}

// flags are the same for both servers and all rows. The quota is etcd's usual advice for more than 2 GB.
var flags = []string{"--quota-backend-bytes", "8589934592"}

// Results are the samples of each scenario by server.
type Results map[string]map[string][]Sample

// Run measures the scenarios whose names start with one of the wanted names, all if there is none. One that fails leaves its rows out.
func (b *Bench) Run(ctx context.Context, wanted []string) (Results, error) {
	dir, err := temporary()
	if err != nil {
		return nil, err
	}
	b.dir = dir
	defer func() { _ = os.RemoveAll(dir) }()
	results := Results{}
	var failures []error
	for _, scenario := range Scenarios() {
		if chosen(scenario.Name, wanted) && ctx.Err() == nil {
			samples, err := b.measureAll(ctx, scenario)
			results[scenario.Name] = samples
			failures = append(failures, err)
		}
	}
	return results, errors.Join(append(failures, ctx.Err())...)
}

// measureAll measures both servers in turn, until one fails.
func (b *Bench) measureAll(ctx context.Context, scenario Scenario) (map[string][]Sample, error) {
	rounds := scenario.Rounds
	if b.Quick {
		rounds = 1
	}
	samples := map[string][]Sample{}
	for round := range rounds {
		servers := []string{"etcd", "skeg"}
		if scenario.SkegOnly {
			servers = []string{"skeg"}
		}
		if round%2 == 1 {
			slices.Reverse(servers)
		}
		for _, server := range servers {
			started := time.Now()
			sample, err := scenario.Measure(ctx, b, server)
			if err != nil {
				return samples, fmt.Errorf("%s, %s: %w", scenario.Name, server, err)
			}
			samples[server] = append(samples[server], sample)
			b.report(scenario.Name, server, sample, time.Since(started))
		}
	}
	return samples, nil
}

func chosen(name string, wanted []string) bool {
	return len(wanted) == 0 || slices.ContainsFunc(wanted, func(prefix string) bool { return strings.HasPrefix(name, prefix) })
}

func (b *Bench) report(scenario, server string, sample Sample, took time.Duration) {
	load, _ := os.ReadFile("/proc/loadavg")
	_, _ = fmt.Fprintf(b.Progress, "%-16s %s  (%.0f s, load %s)\n", scenario, server, took.Seconds(), strings.Fields(string(load))[0])
	for _, figure := range slices.Sorted(maps.Keys(sample)) {
		_, _ = fmt.Fprintf(b.Progress, "    %-32s %12.3f\n", figure, sample[figure])
	}
}

// onePinned puts the server on the first core and the client on the second.
func (b *Bench) onePinned() (server, client process.Placement) {
	return process.Placement{Cores: "0", Nice: b.Nice}, process.Placement{Cores: "1", Nice: b.Nice}
}

// bothCores lets server and client run anywhere.
func (b *Bench) bothCores() (server, client process.Placement) {
	return process.Placement{Nice: b.Nice}, process.Placement{Nice: b.Nice}
}

// realTime is onePinned, before all other processes.
func (b *Bench) realTime() (server, client process.Placement) {
	server, client = b.onePinned()
	server.RealTime, client.RealTime = true, true
	return server, client
}

// start runs a fresh server by name.
func (b *Bench) start(name string, placement process.Placement) (*process.Server, error) {
	return b.startIn(name, b.dir, placement)
}

func (b *Bench) startIn(name, dir string, placement process.Placement) (*process.Server, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	return process.Start(name, b.binary(name), filepath.Clean(dir), placement, flags...)
}

func (b *Bench) binary(name string) string {
	if name == "skeg" {
		return b.Skeg
	}
	return b.Etcd
}

// pick returns the full size of a load, or the quick one.
func (b *Bench) pick(full, quick int) int {
	if b.Quick {
		return quick
	}
	return full
}
