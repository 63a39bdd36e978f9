package compare

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"syscall"
	"time"

	"skeg.local/benches/load"
	"skeg.local/benches/process"
)

const (
	// clusterSize is the number of members.
	clusterSize = 3
	// electionTimeout is the default of both servers, and passed to both.
	electionTimeout = time.Second
	// outageLimit is how long a leader may be missing at worst: any draw of [T, 2T), and what an election itself takes.
	outageLimit = 2*electionTimeout + 500*time.Millisecond
	// handOverLimit is how long writes may pause when a leader is told to end.
	handOverLimit = 50 * time.Millisecond

	// writeEvery is the pace of the writer that looks for gaps. It has recovered when recoveredShare of what it started in
	// recoveredWindow is acknowledged.
	writeEvery      = 5 * time.Millisecond
	recoveredWindow = 250 * time.Millisecond
	recoveredShare  = 0.8
	recoverLimit    = 20 * time.Second

	// catchUpLimit bounds how long a new member takes; it is level once it shows what the leader had shown levelWithin before.
	catchUpLimit = 2 * time.Minute
	levelWithin  = 100 * time.Millisecond
	// warm is how long a load opens connections before it counts.
	warm = 2 * time.Second
)

// clusterScenarios are the loads on three members. Servers and client share all cores.
func clusterScenarios() []Scenario {
	scenarios := []Scenario{clusterPuts(1, 2_500, 5), clusterPuts(100, 60_000, 3), clusterPuts(1000, 100_000, 3), clusterRange(100), clusterRange(1000)}
	const killed, ended = "leader killed, to the next acknowledged write", "leader ended by SIGTERM, longest pause of writes"
	const joining, behind = "new member, 1 M keys, half of the most puts", "follower stopped under puts, then going on"
	scenarios = append(scenarios,
		Scenario{Name: "cluster-leader-killed", Rounds: 1, Measure: leaderKilled, Goals: []Goal{
			{Work: killed, What: "median of 20", Figure: "leader-killed.median_ms", Most: 1},
			{Work: killed, What: "worst of 20", Figure: "leader-killed.worst_ms", Most: milliseconds(outageLimit), Absolute: true},
		}},
		Scenario{Name: "cluster-leader-ended", Rounds: 1, Measure: leaderEnded, Goals: []Goal{
			{Work: ended, What: "median of 20", Figure: "leader-ended.median_ms"},
			{Work: ended, What: "worst of 20", Figure: "leader-ended.worst_ms", Most: milliseconds(handOverLimit), Absolute: true},
			{Work: ended, What: "failed writes", Figure: "leader-ended.failed_writes", Zero: true, Absolute: true},
		}},
		Scenario{Name: "cluster-new-member", Rounds: 1, Measure: newMember, Goals: []Goal{
			{Work: joining, What: "from its start to level with the leader", Figure: "new-member.took_s", Most: 0.4},
			{Work: joining, What: "put p99 meanwhile, against before", Figure: "new-member-during.p99_ms", Against: "new-member-before.p99_ms", Most: 1.5},
			{Work: joining, What: "put p99 meanwhile", Figure: "new-member-during.p99_ms"},
		}},
		Scenario{Name: "cluster-behind", Rounds: 1, SkegOnly: true, Measure: fallenBehind, Goals: []Goal{
			{Work: behind, What: "most memory of the follower", Figure: "behind-follower.peak_MB", Most: memoryBudget, Absolute: true},
			{Work: behind, What: "most memory of the leader", Figure: "behind-leader.peak_MB", Most: memoryBudget, Absolute: true},
		}},
	)
	for i := range scenarios {
		scenarios[i].Cluster = true
	}
	return scenarios
}

func milliseconds(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

// clusterPuts puts new keys, first all to the leader, then spread over all members; a lone client's connection goes to a follower then.
func clusterPuts(clients, total, rounds int) Scenario {
	measure := func(ctx context.Context, b *Bench, name string) (Sample, error) {
		onServer, onClient := b.bothCores()
		if clients == 1 {
			onServer.RealTime, onClient.RealTime = true, true
		}
		cluster, leader, err := b.startCluster(ctx, name, onServer)
		if err != nil {
			return nil, err
		}
		defer cluster.Remove()
		sample := Sample{}
		for _, way := range []string{"leader", "spread"} {
			entry := cluster.Through(leader)
			if way == "spread" {
				entry = cluster.Through(append(cluster.Followers(leader), leader)...)
			}
			// The first puts open connections and files.
			if _, err = b.etcds(ctx, entry, onClient, clients, append(newKeys(), strconv.Itoa(total/10))...); err != nil {
				return nil, err
			}
			done, err := b.etcds(ctx, entry, onClient, clients, append(newKeys(), strconv.Itoa(b.pick(total, total/4)))...)
			if err != nil {
				return nil, err
			}
			sample.add(done.sample(fmt.Sprintf("cluster-put-%d-%s", clients, way)))
		}
		return sample, nil
	}
	name := fmt.Sprintf("cluster-put-%d", clients)
	who, through := fmt.Sprintf("%d clients", clients), "spread over all members"
	if clients == 1 {
		who, through = "1 client", "to a follower"
	}
	goals := func(name, work string) []Goal {
		least, most, cpu := 2.0, 0.6, 0.5
		if clients == 1 {
			least, most, cpu = 1, 1, 0
		}
		return []Goal{
			{Work: work, What: "throughput", Figure: name + ".per_s", Least: least},
			{Work: work, What: "p99", Figure: name + ".p99_ms", Most: most},
			{Work: work, What: "CPU of all members", Figure: name + ".cpu_us", Most: cpu},
		}
	}
	return Scenario{Name: name + "-", Rounds: rounds, Measure: measure, Goals: append(
		goals(name+"-leader", fmt.Sprintf("put, %s, to the leader", who)),
		goals(name+"-spread", fmt.Sprintf("put, %s, %s", who, through))...,
	)}
}

func clusterRange(clients int) Scenario {
	name := fmt.Sprintf("cluster-range-%d", clients)
	work := fmt.Sprintf("linearizable range of a key, %d clients, spread over all members", clients)
	measure := func(ctx context.Context, b *Bench, server string) (Sample, error) {
		onServer, onClient := b.bothCores()
		cluster, leader, err := b.startCluster(ctx, server, onServer)
		if err != nil {
			return nil, err
		}
		defer cluster.Remove()
		if err = b.fillCluster(ctx, cluster.Through(leader), onClient, 10_000); err != nil {
			return nil, err
		}
		done, err := b.etcds(ctx, cluster.Through(cluster.Members...), onClient, clients, "range", "/registry/pods/default/pod-0005000",
			"--consistency", "l", "--total", strconv.Itoa(b.pick(100_000, 30_000)))
		return done.sample(name), err
	}
	return Scenario{Name: name, Rounds: 3, Measure: measure, Goals: []Goal{
		{Work: work, What: "throughput", Figure: name + ".per_s", Least: 1.5},
		{Work: work, What: "p99", Figure: name + ".p99_ms"},
		{Work: work, What: "CPU of all members", Figure: name + ".cpu_us"},
	}}
}

// leaderKilled ends a leader by SIGKILL again and again.
func leaderKilled(ctx context.Context, b *Bench, name string) (Sample, error) {
	gaps, _, err := b.leaderLost(ctx, name, syscall.SIGKILL)
	return gapSample("leader-killed", gaps), err
}

// leaderEnded ends a leader by SIGTERM again and again.
func leaderEnded(ctx context.Context, b *Bench, name string) (Sample, error) {
	gaps, failed, err := b.leaderLost(ctx, name, syscall.SIGTERM)
	sample := gapSample("leader-ended", gaps)
	sample["leader-ended.failed_writes"] = float64(len(failed))
	if len(failed) > 0 {
		_, _ = fmt.Fprintf(b.Progress, "%s: %d writes failed, the first with: %v\n", name, len(failed), failed[0])
	}
	return sample, err
}

func gapSample(name string, gaps []time.Duration) Sample {
	if len(gaps) == 0 {
		return Sample{}
	}
	slices.Sort(gaps)
	middle := (gaps[(len(gaps)-1)/2] + gaps[len(gaps)/2]) / 2
	return Sample{name + ".median_ms": milliseconds(middle), name + ".worst_ms": milliseconds(gaps[len(gaps)-1])}
}

// leaderLost takes the leader away from a writer that goes through another member, and starts it again, round by round. It returns
// the longest gap between two acknowledgements of each round, and the writes that failed.
func (b *Bench) leaderLost(ctx context.Context, name string, signal syscall.Signal) (gaps []time.Duration, failed []error, err error) {
	onServer, _ := b.bothCores()
	cluster, _, err := b.startCluster(ctx, name, onServer)
	if err != nil {
		return nil, nil, err
	}
	defer cluster.Remove()
	for round := range b.pick(20, 3) {
		leader, err := cluster.Leader(ctx)
		if err != nil {
			return nil, nil, err
		}
		others := cluster.Followers(leader)
		gap, lost, err := loseLeader(ctx, leader, others[round%len(others)], signal)
		if err != nil {
			return nil, nil, fmt.Errorf("round %d: %w", round, err)
		}
		gaps, failed = append(gaps, gap), append(failed, lost...)
		if _, err = leader.Launch(); err != nil {
			return nil, nil, err
		}
		// The others hear from it again, and the election is over.
		time.Sleep(electionTimeout)
	}
	return gaps, failed, nil
}

func loseLeader(ctx context.Context, leader, through *process.Server, signal syscall.Signal) (time.Duration, []error, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	writer, err := load.StartSteady(ctx, through.Address, writeEvery)
	if err != nil {
		return 0, nil, err
	}
	if err = recovered(writer); err != nil {
		return 0, nil, err
	}
	lost := time.Now()
	if err = leader.Signal(signal); err != nil {
		return 0, nil, err
	}
	time.Sleep(2 * recoveredWindow)
	if err = recovered(writer); err != nil {
		return 0, nil, err
	}
	if signal == syscall.SIGKILL {
		// What was on its way to the killed leader may wait for long, and is allowed to fail.
		cancel()
	}
	gap, failed := writer.Finish(lost)
	leader.Wait()
	return gap, failed, nil
}

// recovered waits until writes are acknowledged at the pace at which they are made.
func recovered(writer *load.Steady) error {
	for limit := time.Now().Add(recoverLimit); time.Now().Before(limit); time.Sleep(writeEvery) {
		if float64(writer.Recent(time.Now().Add(-recoveredWindow))) >= recoveredShare*float64(recoveredWindow/writeEvery) {
			return nil
		}
	}
	return errors.New("writes are not acknowledged again")
}

// newMember adds an empty learner to a cluster that holds a million keys and is written to at half of the pace it can take.
func newMember(ctx context.Context, b *Bench, name string) (Sample, error) {
	onServer, onClient := b.bothCores()
	cluster, leader, err := b.startCluster(ctx, name, onServer)
	if err != nil {
		return nil, err
	}
	defer cluster.Remove()
	keys := b.pick(million, million/10)
	entry := cluster.Through(leader)
	if err = b.fillCluster(ctx, entry, onClient, keys); err != nil {
		return nil, err
	}
	putters := []string{"-clients", "100", "-connections", "100", "-keys", strconv.Itoa(keys), "-duration"}
	most, err := b.own(ctx, entry, onClient, "put", append(putters, b.seconds(6))...)
	if err != nil {
		return nil, err
	}
	sample := most.sample("new-member-most")
	half := []string{"-warm", warm.String(), "-rate", strconv.Itoa(int(sample["new-member-most.per_s"] / 2))}
	before, err := b.own(ctx, entry, onClient, "put", append(append(putters, b.seconds(12)), half...)...)
	if err != nil {
		return nil, err
	}
	sample.add(before.sample("new-member-before"))

	loading, stop := context.WithCancel(ctx)
	defer stop()
	finish, err := b.begin(loading, entry, onClient, "put", append(append(putters, catchUpLimit.String()), half...)...)
	if err != nil {
		return nil, err
	}
	time.Sleep(warm)
	started := time.Now()
	joining, err := cluster.Join(ctx, leader)
	if err == nil {
		err = level(ctx, leader, joining)
	}
	took := time.Since(started)
	stop()
	during, loadErr := finish()
	if err = errors.Join(err, loadErr); err != nil {
		return nil, err
	}
	sample["new-member.took_s"] = took.Seconds()
	sample.add(during.sample("new-member-during"))
	return sample, nil
}

// level waits until a member shows the revision that the leader showed a moment ago.
func level(ctx context.Context, leader, behind *process.Server) error {
	for limit := time.Now().Add(catchUpLimit); time.Now().Before(limit); {
		asked := time.Now()
		ahead, err := leader.Status(ctx)
		if err != nil {
			return err
		}
		for time.Since(asked) < levelWithin {
			own, err := behind.Status(ctx)
			if err == nil && own.Header.Revision >= ahead.Header.Revision {
				return nil
			}
			time.Sleep(levelWithin / 10)
		}
	}
	return errors.New("the member is not level in time")
}

// fallenBehind stops a follower under as many puts as the others take, lets it go on and looks at the most memory that it and the
// leader need until it is level.
func fallenBehind(ctx context.Context, b *Bench, name string) (Sample, error) {
	onServer, onClient := b.bothCores()
	cluster, leader, err := b.startCluster(ctx, name, onServer)
	if err != nil {
		return nil, err
	}
	defer cluster.Remove()
	follower := cluster.Followers(leader)[0]
	if err = follower.Signal(syscall.SIGSTOP); err != nil {
		return nil, err
	}
	done, err := b.own(ctx, cluster.Through(leader), onClient, "put", "-clients", "100", "-connections", "100", "-keys", strconv.Itoa(million),
		"-duration", fmt.Sprintf("%ds", b.pick(120, 15)))
	if err != nil {
		return nil, err
	}
	sample := done.sample("behind")
	if err = follower.Signal(syscall.SIGCONT); err != nil {
		return nil, err
	}
	started := time.Now()
	if err = level(ctx, leader, follower); err != nil {
		return nil, err
	}
	sample["behind.took_s"] = time.Since(started).Seconds()
	for name, server := range map[string]*process.Server{"leader": leader, "follower": follower} {
		usage, err := server.Usage()
		if err != nil {
			return nil, err
		}
		sample["behind-"+name+".peak_MB"] = float64(usage.PeakBytes) / megabyte
	}
	return sample, nil
}

// startCluster runs fresh members by name and says which of them leads.
func (b *Bench) startCluster(ctx context.Context, name string, placement process.Placement) (*process.Cluster, *process.Server, error) {
	if err := os.MkdirAll(b.dir, 0o700); err != nil {
		return nil, nil, err
	}
	timings := []string{"--election-timeout", strconv.FormatInt(electionTimeout.Milliseconds(), 10)}
	cluster, err := process.StartCluster(name, b.binary(name), filepath.Clean(b.dir), placement, clusterSize, append(timings, flags...)...)
	if err != nil {
		return nil, nil, err
	}
	leader, err := cluster.Leader(ctx)
	if err != nil {
		cluster.Remove()
	}
	return cluster, leader, err
}

func (b *Bench) fillCluster(ctx context.Context, entry process.Entry, onClient process.Placement, keys int) error {
	_, err := b.own(ctx, entry, onClient, "fill", "-keys", strconv.Itoa(keys), "-txn-ops", "50", "-clients", "20", "-connections", "4")
	return err
}
