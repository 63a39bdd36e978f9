package compare

import (
	"context"
	"fmt"
	"path/filepath"
	"regexp"
	"strconv"
	"time"

	"skeg.local/benches/loopdisk"
	"skeg.local/benches/process"
	"skeg.local/benches/slowdisk"
)

const (
	// memoryBudget is what the default caches, buffers and rings of skeg may come to, in MB.
	memoryBudget = 1024
	// syncDelay is how long the slow disk takes.
	syncDelay = 10 * time.Millisecond

	// settling is how long a server is left alone before its memory or its disk is looked at.
	settling = 5 * time.Second

	million = 1_000_000
)

// Scenarios are all loads, in the order of the tables: one member, then clusters.
func Scenarios() []Scenario {
	scenarios := []Scenario{
		{Name: "put-1-", Rounds: 5, Measure: puts(1, 2_500, (*Bench).realTime), Goals: []Goal{
			{Work: "put, 1 client", What: "p50", Figure: "put-1.p50_ms", Most: 1},
			{Work: "put, 1 client", What: "p99", Figure: "put-1.p99_ms", Most: 1},
			{Work: "put, 1 client", What: "server CPU", Figure: "put-1.cpu_us"},
		}},
		putScenario(100, 60_000, "one core", (*Bench).onePinned, 0.6),
		putScenario(100, 80_000, "two cores", (*Bench).bothCores, 0.5),
		putScenario(1000, 80_000, "one core", (*Bench).onePinned, 0.6),
		putScenario(1000, 100_000, "two cores", (*Bench).bothCores, 0.5),
	}
	for _, kind := range []string{"linearizable", "serializable"} {
		for _, clients := range []int{100, 1000} {
			scenarios = append(scenarios, rangeScenario(kind, clients))
		}
	}
	scenarios = append(scenarios,
		Scenario{Name: "list", Rounds: 3, Measure: lists, Goals: []Goal{
			{Work: "list of 100 k keys", What: "by RangeStream, keys/s", Figure: "list-stream.per_s", Least: 1.5},
			{Work: "list of 100 k keys", What: "by pages of 500, keys/s", Figure: "list-page.per_s", Least: 3},
			{Work: "list of 100 k keys", What: "by RangeStream, server CPU per key", Figure: "list-stream.cpu_us"},
			{Work: "list of 100 k keys", What: "by pages of 500, server CPU per key", Figure: "list-page.cpu_us"},
		}},
		Scenario{Name: "txn", Rounds: 3, Measure: txns, Goals: []Goal{
			{Work: "apiserver-shaped txn, 100 clients", What: "throughput", Figure: "txn.per_s", Least: 1.7},
			{Work: "apiserver-shaped txn, 100 clients", What: "p99", Figure: "txn.p99_ms"},
			{Work: "apiserver-shaped txn, 100 clients", What: "server CPU", Figure: "txn.cpu_us"},
			{Work: "txn of one put (etcd's tool)", What: "throughput", Figure: "txn-put.per_s"},
		}},
		Scenario{Name: "watch-paced", Rounds: 3, Measure: watchPaced, Goals: []Goal{
			{Work: "100 watchers, 500 puts/s", What: "server CPU per event", Figure: "watch-paced.cpu_us", Most: 0.5},
			{Work: "100 watchers, 500 puts/s", What: "p99 delay", Figure: "watch-paced.p99_ms", Most: 1},
		}},
		Scenario{Name: "watch-flat", Rounds: 3, Measure: watchFlat, Goals: []Goal{
			{Work: "100 watchers, flat out", What: "events/s", Figure: "watch-flat.per_s", Least: 2},
			{Work: "100 watchers, flat out", What: "server CPU per event", Figure: "watch-flat.cpu_us"},
		}},
		Scenario{Name: "watch-tool", Rounds: 1, Measure: watchTool, Goals: []Goal{
			{Work: "etcd's watch benchmark", What: "events/s", Figure: "watch-tool.per_s"},
		}},
		Scenario{Name: "keepalive", Rounds: 3, Measure: keepAlives, Goals: []Goal{
			{Work: "lease keep-alives, 100 clients", What: "throughput", Figure: "keepalive.per_s", Least: 1.5},
			{Work: "lease keep-alives, 100 clients", What: "server CPU", Figure: "keepalive.cpu_us"},
		}},
		Scenario{Name: "million", Rounds: 1, Measure: millionKeys, Goals: []Goal{
			{Work: "one page of 500 in the middle of 1 M keys", What: "server CPU", Figure: "middle.cpu_us", Most: 0.05},
			{Work: "one page of 500 in the middle of 1 M keys", What: "p50", Figure: "middle.p50_ms"},
			{Work: "count of 1 M keys", What: "counts/s", Figure: "count.per_s", Least: 50},
			{Work: "resident memory", What: "idle", Figure: "idle.resident_MB", Most: 1},
			{Work: "resident memory", What: "1 M keys of 256 B", Figure: "million.resident_MB", Most: 0.5},
			{Work: "resident memory", What: "then 5 revisions each", Figure: "revisions.resident_MB", Most: 0.5},
			{Work: "1 M puts, 1,000 clients, two cores", What: "throughput", Figure: "million.per_s"},
			{Work: "restart to first linearizable read, 1 M keys", What: "after a clean stop", Figure: "restart-clean.took_ms", Most: 0.3},
			{Work: "restart to first linearizable read, 1 M keys", What: "after kill -9", Figure: "restart-kill.took_ms", Most: 0.7},
		}},
		Scenario{Name: "four-million", Rounds: 1, SkegOnly: true, Measure: fourMillion, Goals: []Goal{
			{Work: "resident memory", What: "4 M keys, the most ever", Figure: "four-million.peak_MB", Most: memoryBudget, Absolute: true},
			{Work: "count of 4 M keys", What: "against 1 M keys, server CPU", Figure: "count-4m.cpu_us", Against: "count.cpu_us", Most: 1.2},
		}},
		Scenario{Name: "big-list", Rounds: 1, Measure: bigLists, Goals: []Goal{
			{Work: "five clients list 10 k × 100 kB", What: "most memory, by RangeStream", Figure: "big-stream.peak_MB", Most: memoryBudget, Absolute: true},
			{Work: "five clients list 10 k × 100 kB", What: "most memory, by pages of 500", Figure: "big-page.peak_MB", Most: memoryBudget, Absolute: true},
			{Work: "five clients list 10 k × 100 kB", What: "most memory, in one answer", Figure: "big-unary.peak_MB", Most: memoryBudget, Absolute: true},
			{Work: "five clients list 10 k × 100 kB", What: "by RangeStream, keys/s", Figure: "big-stream.per_s"},
		}},
		Scenario{Name: "read-under-puts", Rounds: 3, Measure: readUnderPuts, Goals: []Goal{
			{Work: "read under 100 flat-out putters", What: "p99", Figure: "read-under-puts.p99_ms", Most: 0.4},
			{Work: "read under 100 flat-out putters", What: "p50", Figure: "read-under-puts.p50_ms"},
		}},
		Scenario{Name: "slow-disk", Rounds: 3, Measure: slowDisk, Goals: []Goal{
			{Work: "put, sync takes 10 ms, 1 client", What: "throughput", Figure: "slow-disk-1.per_s", Least: 1},
			{Work: "put, sync takes 10 ms, 100 clients", What: "throughput", Figure: "slow-disk-100.per_s", Least: 1},
		}},
		Scenario{Name: "written", Rounds: 1, Measure: written, Goals: []Goal{
			{Work: "bytes written to disk per put", What: "etcd's tool: one value for all", Figure: "written-same.disk_B", Most: 0.6},
			{Work: "bytes written to disk per put", What: "random values, which do not compress", Figure: "written-random.disk_B", Most: 0.6},
		}},
		Scenario{Name: "check", Rounds: 1, Measure: checks, Goals: []Goal{
			{Work: "etcdctl check perf --load l", What: "throughput", Figure: "check-perf.per_s"},
			{Work: "etcdctl check datascale --load m", What: "memory used", Figure: "check-datascale.used_MB"},
		}},
	)
	return append(scenarios, clusterScenarios()...)
}

type placing func(*Bench) (server, client process.Placement)

func putScenario(clients, total int, cores string, place placing, cpu float64) Scenario {
	name := fmt.Sprintf("put-%d", clients)
	work := fmt.Sprintf("put, %d clients, %s", clients, cores)
	short := map[string]string{"one core": "-one-core", "two cores": "-two-cores"}[cores]
	return Scenario{Name: name + short, Rounds: 3, Measure: puts(clients, total, place), Goals: []Goal{
		{Work: work, What: "throughput", Figure: name + ".per_s", Least: 1.7},
		{Work: work, What: "p99", Figure: name + ".p99_ms", Most: 0.6},
		{Work: work, What: "server CPU", Figure: name + ".cpu_us", Most: cpu},
	}}
}

// puts writes new keys of 32 B one after the other.
func puts(clients, total int, place placing) func(context.Context, *Bench, string) (Sample, error) {
	return func(ctx context.Context, b *Bench, name string) (Sample, error) {
		onServer, onClient := place(b)
		server, err := b.start(name, onServer)
		if err != nil {
			return nil, err
		}
		defer server.Remove()
		arguments := newKeys()
		// The first puts open connections and files.
		if _, err = b.etcds(ctx, server, onClient, clients, append(arguments, strconv.Itoa(total/10))...); err != nil {
			return nil, err
		}
		done, err := b.etcds(ctx, server, onClient, clients, append(arguments, strconv.Itoa(b.pick(total, total/4)))...)
		return done.sample(fmt.Sprintf("put-%d", clients)), err
	}
}

// newKeys are the arguments of etcd's tool for puts of new keys; the total follows.
func newKeys() []string {
	return []string{"put", "--sequential-keys", "--key-space-size", "100000000", "--key-size", "32", "--val-size", "256", "--total"}
}

func rangeScenario(kind string, clients int) Scenario {
	name := fmt.Sprintf("range-%s-%d", kind, clients)
	work := fmt.Sprintf("%s range of a key, %d clients", kind, clients)
	measure := func(ctx context.Context, b *Bench, server string) (Sample, error) {
		return b.onFilled(ctx, server, (*Bench).onePinned, 10_000, func(server *process.Server, onClient process.Placement) (Sample, error) {
			done, err := b.etcds(ctx, server, onClient, clients, "range", "/registry/pods/default/pod-0005000",
				"--consistency", kind[:1], "--total", strconv.Itoa(b.pick(100_000, 30_000)))
			return done.sample(name), err
		})
	}
	return Scenario{Name: name, Rounds: 3, Measure: measure, Goals: []Goal{
		{Work: work, What: "throughput", Figure: name + ".per_s", Least: 1.5},
		{Work: work, What: "p99", Figure: name + ".p99_ms"},
		{Work: work, What: "server CPU", Figure: name + ".cpu_us", Most: 0.6},
	}}
}

// onFilled starts a server, fills it with keys of 256 B and measures.
func (b *Bench) onFilled(
	ctx context.Context, name string, place placing, keys int,
	measure func(*process.Server, process.Placement) (Sample, error),
) (Sample, error) {
	onServer, onClient := place(b)
	server, err := b.start(name, onServer)
	if err != nil {
		return nil, err
	}
	defer server.Remove()
	if _, err = b.own(ctx, server, onClient, "fill", "-keys", strconv.Itoa(keys), "-txn-ops", "50", "-clients", "20", "-connections", "4"); err != nil {
		return nil, err
	}
	return measure(server, onClient)
}

func (b *Bench) seconds(full int) string { return fmt.Sprintf("%ds", b.pick(full, max(1, full/3))) }

func lists(ctx context.Context, b *Bench, name string) (Sample, error) {
	keys := 100_000
	return b.onFilled(ctx, name, (*Bench).onePinned, keys, func(server *process.Server, onClient process.Placement) (Sample, error) {
		sample := Sample{}
		for _, method := range []string{"stream", "page"} {
			done, err := b.own(ctx, server, onClient, "list", "-method", method, "-keys", strconv.Itoa(keys), "-duration", b.seconds(4))
			if err != nil {
				return nil, err
			}
			sample.add(done.sample("list-" + method))
		}
		return sample, nil
	})
}

func txns(ctx context.Context, b *Bench, name string) (Sample, error) {
	onServer, onClient := b.onePinned()
	server, err := b.start(name, onServer)
	if err != nil {
		return nil, err
	}
	defer server.Remove()
	done, err := b.own(ctx, server, onClient, "txn", "-keys", "20000", "-clients", "100", "-connections", "100", "-duration", b.seconds(5))
	if err != nil {
		return nil, err
	}
	sample := done.sample("txn")
	done, err = b.etcds(ctx, server, onClient, 100, "txn-put", "--key-size", "32", "--val-size", "256", "--key-space-size", "100000",
		"--total", strconv.Itoa(b.pick(30_000, 10_000)))
	sample.add(done.sample("txn-put"))
	return sample, err
}

func watchPaced(ctx context.Context, b *Bench, name string) (Sample, error) {
	return watch(ctx, b, name, "watch-paced", "-rate", "500", "-clients", "20", "-total", strconv.Itoa(b.pick(3_000, 1_000)))
}

func watchFlat(ctx context.Context, b *Bench, name string) (Sample, error) {
	return watch(ctx, b, name, "watch-flat", "-clients", "20", "-total", strconv.Itoa(b.pick(10_000, 3_000)))
}

func watch(ctx context.Context, b *Bench, server, name string, arguments ...string) (Sample, error) {
	return b.onFilled(ctx, server, (*Bench).onePinned, 1_000, func(server *process.Server, onClient process.Placement) (Sample, error) {
		arguments := append([]string{"-watchers", "100", "-connections", "10", "-duration", "60s"}, arguments...)
		done, err := b.own(ctx, server, onClient, "fanout", arguments...)
		return done.sample(name), err
	})
}

func watchTool(ctx context.Context, b *Bench, name string) (Sample, error) {
	onServer, onClient := b.onePinned()
	server, err := b.start(name, onServer)
	if err != nil {
		return nil, err
	}
	defer server.Remove()
	done, err := b.etcds(ctx, server, onClient, 10, "watch", "--streams", "10", "--watch-per-stream", "100", "--watched-key-total", "100",
		"--key-space-size", "1000000", "--put-total", strconv.Itoa(b.pick(20_000, 5_000)))
	return done.sample("watch-tool"), err
}

func keepAlives(ctx context.Context, b *Bench, name string) (Sample, error) {
	onServer, onClient := b.onePinned()
	server, err := b.start(name, onServer)
	if err != nil {
		return nil, err
	}
	defer server.Remove()
	done, err := b.etcds(ctx, server, onClient, 100, "lease-keepalive", "--total", strconv.Itoa(b.pick(60_000, 20_000)))
	return done.sample("keepalive"), err
}

const megabyte = 1 << 20

// resident returns the resident memory of a server once it has been left alone for a moment.
func resident(server *process.Server, name string) (Sample, error) {
	time.Sleep(settling)
	usage, err := server.Usage()
	return Sample{name + ".resident_MB": float64(usage.ResidentBytes) / megabyte}, err
}

// millionKeys puts a million keys one by one, reads among them, restarts, and puts each five times more.
func millionKeys(ctx context.Context, b *Bench, name string) (Sample, error) {
	keys := strconv.Itoa(b.pick(million, million/10))
	onServer, onClient := b.bothCores()
	server, err := b.start(name, onServer)
	if err != nil {
		return nil, err
	}
	defer server.Remove()
	sample, err := resident(server, "idle")
	if err != nil {
		return nil, err
	}
	filled, err := b.own(ctx, server, onClient, "fill", "-keys", keys, "-clients", "1000", "-connections", "100")
	if err != nil {
		return nil, err
	}
	sample.add(filled.sample("million"))
	after, err := resident(server, "million")
	if err != nil {
		return nil, err
	}
	sample.add(after)
	for _, load := range []string{"middle", "count"} {
		done, err := b.own(ctx, server, onClient, load, "-keys", keys, "-duration", b.seconds(4))
		if err != nil {
			return nil, err
		}
		sample.add(done.sample(load))
	}
	if err = restarts(ctx, b, server, onClient, sample); err != nil {
		return nil, err
	}
	for range 5 {
		if _, err = b.own(ctx, server, onClient, "fill", "-keys", keys, "-txn-ops", "50", "-clients", "20", "-connections", "4"); err != nil {
			return nil, err
		}
	}
	// Single puts push the large transactions out of the log that is kept in memory.
	if _, err = b.own(ctx, server, onClient, "fill", "-keys", "30000", "-clients", "100", "-connections", "100"); err != nil {
		return nil, err
	}
	after, err = resident(server, "revisions")
	sample.add(after)
	return sample, err
}

// restarts stops and starts a server three times each way; before a kill it writes, so that there is a tail to replay.
func restarts(ctx context.Context, b *Bench, server *process.Server, onClient process.Placement, sample Sample) error {
	var clean, killed []Sample
	for range 3 {
		server.Terminate()
		took, err := server.Launch()
		if err != nil {
			return err
		}
		clean = append(clean, Sample{"took_ms": took.Seconds() * 1e3})
		if _, err = b.own(ctx, server, onClient, "fill", "-keys", "30000", "-clients", "100", "-connections", "100"); err != nil {
			return err
		}
		server.Kill()
		if took, err = server.Launch(); err != nil {
			return err
		}
		killed = append(killed, Sample{"took_ms": took.Seconds() * 1e3})
	}
	sample["restart-clean.took_ms"], _ = median(clean, "took_ms")
	sample["restart-kill.took_ms"], _ = median(killed, "took_ms")
	return nil
}

func fourMillion(ctx context.Context, b *Bench, name string) (Sample, error) {
	keys := b.pick(4*million, 4*million/10)
	return b.onFilled(ctx, name, (*Bench).bothCores, keys, func(server *process.Server, onClient process.Placement) (Sample, error) {
		sample, err := resident(server, "four-million")
		if err != nil {
			return nil, err
		}
		done, err := b.own(ctx, server, onClient, "count", "-keys", strconv.Itoa(keys), "-duration", b.seconds(4))
		if err != nil {
			return nil, err
		}
		sample.add(done.sample("count-4m"))
		usage, err := server.Usage()
		sample["four-million.peak_MB"] = float64(usage.PeakBytes) / megabyte
		return sample, err
	})
}

// bigLists lets five clients list 1 GB each at once, in three ways.
func bigLists(ctx context.Context, b *Bench, name string) (Sample, error) {
	keys, bytes := strconv.Itoa(b.pick(10_000, 2_000)), "100000"
	onServer, onClient := b.bothCores()
	server, err := b.start(name, onServer)
	if err != nil {
		return nil, err
	}
	defer server.Remove()
	if _, err = b.own(ctx, server, onClient, "fill", "-keys", keys, "-value-bytes", bytes, "-clients", "10", "-connections", "10"); err != nil {
		return nil, err
	}
	sample := Sample{}
	for _, method := range []string{"stream", "page", "unary"} {
		if err = server.ResetPeak(); err != nil {
			return nil, err
		}
		done, err := b.own(ctx, server, onClient, "list", "-method", method, "-keys", keys, "-value-bytes", bytes,
			"-clients", "5", "-connections", "5", "-total", "5")
		if err != nil {
			return nil, err
		}
		usage, err := server.Usage()
		if err != nil {
			return nil, err
		}
		sample.add(done.sample("big-" + method))
		sample["big-"+method+".peak_MB"] = float64(usage.PeakBytes) / megabyte
	}
	return sample, nil
}

// readUnderPuts times one reader, of a higher priority than the putters beside it, which saturate their core.
func readUnderPuts(ctx context.Context, b *Bench, name string) (Sample, error) {
	return b.onFilled(ctx, name, (*Bench).onePinned, 10_000, func(server *process.Server, onClient process.Placement) (Sample, error) {
		ctx, cancel := context.WithCancel(ctx)
		defer cancel()
		putters := onClient.Command(ctx, b.Tool, "--endpoints", server.Address, "--conns", "100", "--clients", "100",
			"put", "--key-space-size", "100000", "--key-size", "32", "--val-size", "256", "--total", "100000000")
		if err := putters.Start(); err != nil {
			return nil, err
		}
		defer func() {
			cancel()
			_ = putters.Wait()
		}()
		time.Sleep(time.Second)
		reader := process.Placement{Cores: onClient.Cores, Nice: onClient.Nice - 5}
		done, err := b.own(ctx, server, reader, "read", "-keys", "10000", "-duration", b.seconds(6))
		return done.sample("read-under-puts"), err
	})
}

// slowDisk puts on a disk whose every sync takes 10 ms more.
func slowDisk(ctx context.Context, b *Bench, name string) (Sample, error) {
	mountPoint := filepath.Join(b.dir, "slow")
	unmount, err := slowdisk.Mount(filepath.Join(b.dir, "slow-backing"), mountPoint, syncDelay)
	if err != nil {
		return nil, err
	}
	defer unmount()
	onServer, onClient := b.bothCores()
	server, err := b.startIn(name, mountPoint, onServer)
	if err != nil {
		return nil, err
	}
	defer server.Remove()
	sample := Sample{}
	for clients, total := range map[int]int{1: b.pick(300, 100), 100: b.pick(20_000, 5_000)} {
		done, err := b.etcds(ctx, server, onClient, clients, append(newKeys(), strconv.Itoa(total))...)
		if err != nil {
			return nil, err
		}
		sample.add(done.sample(fmt.Sprintf("slow-disk-%d", clients)))
	}
	return sample, nil
}

// written counts what reaches the disk for each put: flushes and compactions behind the puts belong to them. Values as etcd's tool
// makes them, and random ones.
func written(ctx context.Context, b *Bench, name string) (Sample, error) {
	total := strconv.Itoa(b.pick(200_000, 50_000))
	sample := Sample{}
	for figure, fill := range map[string]func(*process.Server, process.Placement) (measured, error){
		"written-same.disk_B": func(server *process.Server, onClient process.Placement) (measured, error) {
			return b.etcds(ctx, server, onClient, 100, append(newKeys(), total)...)
		},
		"written-random.disk_B": func(server *process.Server, onClient process.Placement) (measured, error) {
			return b.own(ctx, server, onClient, "fill", "-keys", total, "-clients", "100", "-connections", "100")
		},
	} {
		perPut, err := b.diskBytes(name, fill)
		if err != nil {
			return nil, err
		}
		sample[figure] = perPut
	}
	return sample, nil
}

// diskBytes runs a load on a disk of its own and returns the bytes written for each of its operations.
func (b *Bench) diskBytes(name string, load func(*process.Server, process.Placement) (measured, error)) (float64, error) {
	disk, err := loopdisk.Mount(b.dir)
	if err != nil {
		return 0, err
	}
	defer disk.Remove()
	onServer, onClient := b.bothCores()
	server, err := b.startIn(name, disk.Path, onServer)
	if err != nil {
		return 0, err
	}
	defer server.Remove()
	before, err := disk.WrittenBytes()
	if err != nil {
		return 0, err
	}
	done, err := load(server, onClient)
	if err != nil {
		return 0, err
	}
	time.Sleep(settling)
	after, err := disk.WrittenBytes()
	return float64(after-before) / float64(done.Operations), err
}

var (
	perfLine      = regexp.MustCompile(`Throughput (?:is|too low:?)[^0-9]*([0-9]+)`)
	datascaleLine = regexp.MustCompile(`system memory used : ([0-9.]+) (\w+)`)
)

// checks runs etcdctl's own two.
func checks(ctx context.Context, b *Bench, name string) (Sample, error) {
	onServer, onClient := b.bothCores()
	server, err := b.start(name, onServer)
	if err != nil {
		return nil, err
	}
	defer server.Remove()
	text, err := b.etcdctl(ctx, server, onClient, "check", "perf", "--load", "l")
	if err != nil {
		return nil, fmt.Errorf("%w: %s", err, text)
	}
	_, _ = fmt.Fprintf(b.Progress, "%s: %s\n", name, text)
	sample := Sample{}
	if found := perfLine.FindStringSubmatch(text); found != nil {
		sample["check-perf.per_s"], _ = strconv.ParseFloat(found[1], 64)
	}
	text, err = b.etcdctl(ctx, server, onClient, "check", "datascale", "--load", "m")
	_, _ = fmt.Fprintf(b.Progress, "%s: %s\n", name, text)
	if found := datascaleLine.FindStringSubmatch(text); found != nil {
		sample["check-datascale.used_MB"], _ = strconv.ParseFloat(found[1], 64)
	}
	return sample, err
}
