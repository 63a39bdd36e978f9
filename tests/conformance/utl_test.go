package conformance

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	bolt "go.etcd.io/bbolt"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"skeg.local/conformance/pair"
)

// said is what a tool printed and how it ended.
type said struct {
	status        int
	out, problems string
}

func ask(t *testing.T, command ...string) said {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), toolLimit)
	defer cancel()
	process := exec.CommandContext(ctx, command[0], command[1:]...)
	process.Dir = t.TempDir()
	var out, problems bytes.Buffer
	process.Stdout, process.Stderr = &out, &problems
	err := process.Run()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		t.Fatal(err)
	}
	return said{process.ProcessState.ExitCode(), out.String(), problems.String()}
}

// errorLine is the line that says why a tool failed; etcdutl logs others, and says some twice.
var errorLine = regexp.MustCompile(`(?m)^Error: .*$`)

// requireOurs skips a test when there is no skegutl: SKEG_BIN is an etcd.
func requireOurs(t *testing.T) {
	t.Helper()
	if _, err := os.Stat(skegutl); err != nil {
		t.Skipf("no skegutl beside SKEG_BIN: %v", err)
	}
}

// TestUtlCommandLines gives both tools the same command lines without a file: same status, same reason.
func TestUtlCommandLines(t *testing.T) {
	requireOurs(t)
	for _, line := range []string{
		"", "help", "nonsense", "snapshot", "snapshot nonsense", "snapshot status", "snapshot status a b", "snapshot status /none", "snapshot status --bogus x", "snapshot status -w bad /none",
		"hashkv", "hashkv a b", "hashkv /none", "hashkv --rev x /none", "hashkv --rev", "-w", "-x version", "--version", "--timeout x version", "--timeout 1s -w json snap st /none", "snapshot restore", "snapshot restore a b",
		"snapshot restore --bump-revision 5 x", "snapshot restore --mark-compacted x", "snapshot restore --bump-revision=x y", "snapshot restore --skip-hash-check=maybe y",
		"defrag", "defrag --data-dir", "migrate", "migrate --data-dir x", "migrate --data-dir x --target-version 3", "migrate --data-dir x --target-version 3.4", "migrate --data-dir x --target-version 3.4.1", "migrate --force --target-version 3.6",
	} {
		theirs := ask(t, append([]string{etcdutl}, strings.Fields(line)...)...)
		ours := ask(t, append([]string{skegutl}, strings.Fields(line)...)...)
		reason := errorLine.FindString(theirs.problems)
		found := strings.ReplaceAll(errorLine.FindString(ours.problems), "skegutl", "etcdutl")
		if theirs.status != ours.status || reason != found {
			t.Errorf("%q: etcdutl %d %s, skegutl %d %s", line, theirs.status, reason, ours.status, found)
		}
	}
}

// TestUtlReads gives both tools the same files to read.
func TestUtlReads(t *testing.T) {
	requireOurs(t)
	stores := freshPair(t)
	if difference := stores.Compare(func(s *pair.Session) { writeHistory(s, 5) }); difference != nil {
		t.Fatal("the stores differ:\n" + difference.Text)
	}
	little := freshPair(t)
	revision := pair.NewSession(stores.Skeg).Current()
	for _, file := range []string{save(t, stores.Etcd), save(t, stores.Skeg), save(t, little.Etcd), save(t, little.Skeg)} {
		before := sum(t, file)
		var lines [][]string
		for _, format := range []string{"simple", "json", "fields", "table", "protobuf", "bad"} {
			lines = append(lines, []string{"snapshot", "status", "{}", "-w", format}, []string{"hashkv", "{}", "-w", format})
		}
		for _, at := range []int64{0, 1, 2, revision / 2, revision - 1, revision, revision + 1} {
			lines = append(lines, []string{"hashkv", "{}", fmt.Sprintf("--rev=%d", at), "--write-out", "json"})
		}
		for _, line := range lines {
			answer := func(tool, file string) said {
				command := []string{tool}
				for _, word := range line {
					command = append(command, strings.ReplaceAll(word, "{}", file))
				}
				found := ask(t, command...)
				found.problems = errorLine.FindString(found.problems)
				return found
			}
			// etcdutl writes to the file that it hashes.
			if theirs, ours := answer(etcdutl, duplicate(t, file)), answer(skegutl, file); theirs != ours {
				t.Errorf("%s %v: etcdutl %+v, skegutl %+v", file, line, theirs, ours)
			}
		}
		if sum(t, file) != before {
			t.Errorf("%s has been changed", file)
		}
	}
}

// TestUtlRestore restores snapshots of etcd and of skeg with skegutl: a skeg started from them answers as the source did, and its own
// snapshot restores an etcd that does.
func TestUtlRestore(t *testing.T) {
	requireOurs(t)
	for seed := int64(11); seed < 14; seed++ {
		t.Run(fmt.Sprintf("seed-%d", seed), func(t *testing.T) {
			stores := freshPair(t)
			if difference := stores.Compare(func(s *pair.Session) { writeHistory(s, seed) }); difference != nil {
				t.Fatal("the stores differ:\n" + difference.Text)
			}
			source := pair.NewSession(stores.Etcd)
			expected := hashes(t, source)
			theirs := save(t, stores.Etcd)
			for _, file := range []string{theirs, save(t, stores.Skeg)} {
				restored := restoreOurs(t, file)
				again := save(t, restored)
				compareRestored(t, theirs, again)
				compareRunning(t, source, pair.NewSession(restored), expected)
				if err := restored.Restart(syscall.SIGTERM); err != nil {
					t.Fatal(err)
				}
				if err := pair.NewSession(restored).Quietly("KV/Put", put("later", "x"), &pb.PutResponse{}); err != nil {
					t.Error(err)
				}
				compareRunning(t, source, pair.NewSession(restore(t, again)), expected)
			}
		})
	}
}

// TestUtlRestoreRaised raises the revision as etcdutl does, and compares what clients then see.
func TestUtlRestoreRaised(t *testing.T) {
	requireOurs(t)
	stores := freshPair(t)
	if difference := stores.Compare(func(s *pair.Session) { writeHistory(s, 21) }); difference != nil {
		t.Fatal("the stores differ:\n" + difference.Text)
	}
	file := save(t, stores.Etcd)
	raise := []string{"--bump-revision", "1000000", "--mark-compacted"}
	theirs := pair.NewSession(restore(t, file, raise...))
	ours := pair.NewSession(restoreOurs(t, file, raise...))
	if theirs.Current() != ours.Current() {
		t.Errorf("revision of etcd %d, of skeg %d", theirs.Current(), ours.Current())
	}
	for _, request := range []*pb.RangeRequest{
		everything(), with(everything(), func(r *pb.RangeRequest) { r.Revision = theirs.Current() - 1 }), with(everything(), func(r *pb.RangeRequest) { r.Revision = theirs.Current() }),
		with(everything(), func(r *pb.RangeRequest) { r.Revision = theirs.Current() + 1 }),
	} {
		etcd, skeg := &pb.RangeResponse{}, &pb.RangeResponse{}
		etcdErr, skegErr := theirs.Quietly("KV/Range", request, etcd), ours.Quietly("KV/Range", request, skeg)
		etcd.Header, skeg.Header = nil, nil
		if pair.Text(etcd) != pair.Text(skeg) || pair.ErrorText(etcdErr) != pair.ErrorText(skegErr) {
			t.Errorf("at %d: etcd %.200s %v, skeg %.200s %v", request.Revision, pair.Text(etcd), etcdErr, pair.Text(skeg), skegErr)
		}
	}
}

// TestUtlRestoreMembers makes the members of a cluster of one snapshot.
func TestUtlRestoreMembers(t *testing.T) {
	requireOurs(t)
	stores := freshPair(t)
	s := pair.NewSession(stores.Etcd)
	many(s, 300)
	file := save(t, stores.Etcd)
	expected := &pb.RangeResponse{}
	if err := s.Quietly("KV/Range", everything(), expected); err != nil {
		t.Fatal(err)
	}
	names := []string{"a", "b", "c"}
	var urls, initial []string
	for _, name := range names {
		url := "http://" + pair.Reserve(t)
		urls, initial = append(urls, url), append(initial, name+"="+url)
	}
	members := make([]*pair.Store, len(names))
	failures := make([]error, len(names))
	var wait sync.WaitGroup
	for at, name := range names {
		dir := t.TempDir()
		flags := []string{"--name", name, "--initial-advertise-peer-urls", urls[at], "--initial-cluster", strings.Join(initial, ","), "--initial-cluster-token", "restored"}
		prepare := func(data string) error {
			return runTool(nil, append([]string{skegutl, "snapshot", "restore", file, "--data-dir", data}, flags...)...)
		}
		wait.Go(func() {
			members[at], failures[at] = pair.StartOn(name, pool.SkegBin, dir, prepare, append(flags, "--listen-peer-urls", urls[at])...)
		})
	}
	wait.Wait()
	for _, member := range members {
		if member != nil {
			t.Cleanup(member.Stop)
		}
	}
	if err := errors.Join(failures...); err != nil {
		t.Fatal(err)
	}
	for at, member := range members {
		session := pair.NewSession(member)
		found := &pb.RangeResponse{}
		if err := session.Quietly("KV/Range", everything(), found); err != nil {
			t.Fatal(err)
		}
		found.Header, expected.Header = nil, nil
		if at == 0 && pair.Text(found) != pair.Text(expected) {
			t.Errorf("member %d holds something else", at)
		}
		if err := session.Quietly("KV/Put", put(fmt.Sprintf("z%d", at), "after"), &pb.PutResponse{}); err != nil {
			t.Error(err)
		}
		list := &pb.MemberListResponse{}
		if err := session.Quietly("Cluster/MemberList", &pb.MemberListRequest{Linearizable: true}, list); err != nil || len(list.Members) != 3 {
			t.Errorf("members %s: %v", pair.Text(list), err)
		}
	}
}

// TestUtlRefuses gives both tools files that are no good: an error, no output left, and the file as it was.
func TestUtlRefuses(t *testing.T) {
	requireOurs(t)
	stores := freshPair(t)
	s := pair.NewSession(stores.Etcd)
	many(s, 3000)
	good := save(t, stores.Etcd)
	whole, err := os.ReadFile(good)
	if err != nil {
		t.Fatal(err)
	}
	changed := func(change func([]byte) []byte) string {
		path := filepath.Join(t.TempDir(), "changed.db")
		if err := os.WriteFile(path, change(bytes.Clone(whole)), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	setMeta := func(key, value string) string {
		return reseal(t, good, func(tx *bolt.Tx) error { return tx.Bucket([]byte("meta")).Put([]byte(key), []byte(value)) })
	}
	// The pages that are in use are not known here: each says that it is another.
	misnumbered := changed(func(file []byte) []byte {
		for at := 2 * 4096; at+4096 <= len(file); at += 4096 {
			file[at] ^= 4
		}
		return file
	})
	flipped := func(at int) string { return changed(func(file []byte) []byte { file[at] ^= 4; return file }) }
	for _, refused := range []struct {
		name, file, reason string
		flags              []string
		// etcdutl takes it.
		theirs bool
	}{
		{name: "missing", file: "/none.db", reason: "no such file"},
		{name: "empty", file: changed(func([]byte) []byte { return nil }), reason: "not a bbolt file"},
		{name: "foreign", file: changed(func([]byte) []byte { return bytes.Repeat([]byte("hello\n"), 9000) }), reason: "not a bbolt file"},
		{name: "cut", file: changed(func(file []byte) []byte { return file[:len(file)/2] }), reason: "is cut off"},
		{name: "cut, not checked", file: changed(func(file []byte) []byte { return file[:len(file)/2/4096*4096] }), reason: "is cut off", flags: []string{"--skip-hash-check"}},
		{name: "without its sum", file: changed(func(file []byte) []byte { return file[:len(file)-32] }), reason: "snapshot missing hash but --skip-hash-check=false"},
		{name: "flipped in a value", file: flipped(len(whole) / 2), reason: "expected sha256 ["},
		{name: "flipped in the sum", file: flipped(len(whole) - 5), reason: "expected sha256 ["},
		{name: "misnumbered pages, not checked", file: misnumbered, reason: "is damaged at byte", flags: []string{"--skip-hash-check"}},
		{name: "newer", file: setMeta("storageVersion", "3.8.0"), reason: "is of etcd 3.8.0", theirs: true},
		{name: "not etcd's", file: reseal(t, good, func(tx *bolt.Tx) error { return tx.DeleteBucket([]byte("meta")) }), reason: "no bucket \"meta\"", theirs: true},
		{name: "a bad record", file: reseal(t, good, func(tx *bolt.Tx) error { return tx.Bucket([]byte("key")).Put([]byte("short"), []byte("x")) }), reason: "does not decode", theirs: true},
		{name: "another name", file: good, reason: "couldn't find local", flags: []string{"--name", "other"}},
		{name: "other URLs", file: good, reason: "missing from --initial-advertise-peer-urls", flags: []string{"--initial-cluster", "default=http://127.0.0.1:1"}},
	} {
		t.Run(refused.name, func(t *testing.T) {
			before := ""
			if refused.file != "/none.db" {
				before = sum(t, refused.file)
			}
			dir := t.TempDir()
			data := filepath.Join(dir, "data")
			command := append([]string{"snapshot", "restore", refused.file, "--data-dir", data}, refused.flags...)
			ours := ask(t, append([]string{skegutl}, command...)...)
			if ours.status != 1 || !strings.Contains(errorLine.FindString(ours.problems), refused.reason) || ours.out != "" {
				t.Errorf("skegutl: %+v", ours)
			}
			if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
				t.Errorf("left behind: %v %v", left, err)
			}
			if before != "" && sum(t, refused.file) != before {
				t.Error("the file has been changed")
			}
			if !refused.theirs {
				theirs := ask(t, append([]string{etcdutl}, command...)...)
				if theirs.status == 0 {
					t.Errorf("etcdutl takes it: %+v", theirs)
				}
			}
		})
	}
	t.Run("a directory in use", func(t *testing.T) {
		data := t.TempDir()
		if err := os.WriteFile(filepath.Join(data, "something"), nil, 0o600); err != nil {
			t.Fatal(err)
		}
		for _, tool := range []string{etcdutl, skegutl} {
			found := ask(t, tool, "snapshot", "restore", good, "--data-dir", data)
			if found.status != 1 || !strings.Contains(found.problems, fmt.Sprintf("data-dir %q not empty or could not be read", data)) {
				t.Errorf("%s: %+v", tool, found)
			}
			found = ask(t, tool, "snapshot", "restore", good, "--data-dir", filepath.Join(data, "new"), "--wal-dir", data)
			if found.status != 1 || !strings.Contains(found.problems, fmt.Sprintf("wal-dir %q exists", data)) {
				t.Errorf("%s: %+v", tool, found)
			}
		}
		if left, err := os.ReadDir(data); err != nil || len(left) != 1 {
			t.Errorf("left behind: %v %v", left, err)
		}
	})
}

// restoreOurs makes a data directory of a snapshot with skegutl, and starts a skeg on it.
func restoreOurs(t *testing.T, snapshot string, flags ...string) *pair.Store {
	t.Helper()
	prepare := func(data string) error {
		return runTool(nil, append([]string{skegutl, "snapshot", "restore", snapshot, "--data-dir", data, "--name", "default",
			"--initial-cluster", "default=" + pair.AdvertisedPeer, "--initial-advertise-peer-urls", pair.AdvertisedPeer}, flags...)...)
	}
	store, err := pair.StartOn("restored", pool.SkegBin, t.TempDir(), prepare)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(store.Stop)
	return store
}

// compareRestored requires that a snapshot of a restored store holds what the one holds that it was restored from, but for the members that
// were, and where the log stands.
func compareRestored(t *testing.T, source, restored string) {
	t.Helper()
	before, after := readBolt(t, source), readBolt(t, restored)
	for _, name := range []string{"key", "lease", "alarm", "auth", "authUsers", "authRoles", "cluster", "members"} {
		if len(before[name]) != len(after[name]) {
			t.Errorf("%s had %d entries, has %d", name, len(before[name]), len(after[name]))
		}
		for key, value := range before[name] {
			if found, present := after[name][key]; !present || found != value {
				t.Errorf("%s/%q: was %.100q, is %.100q (%v)", name, key, value, found, present)
				return
			}
		}
	}
	for _, key := range []string{"finishedCompactRev", "scheduledCompactRev", "storageVersion", "confState"} {
		if before["meta"][key] != after["meta"][key] {
			t.Errorf("meta/%s was %q, is %q", key, before["meta"][key], after["meta"][key])
		}
	}
}

func sum(t *testing.T, path string) string {
	t.Helper()
	file, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return fmt.Sprintf("%x", sha256.Sum256(file))
}

func duplicate(t *testing.T, path string) string {
	t.Helper()
	file, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	to := filepath.Join(t.TempDir(), filepath.Base(path))
	if err := os.WriteFile(to, file, 0o600); err != nil {
		t.Fatal(err)
	}
	return to
}

// TestUtlAuth carries users and roles from etcd through skeg's directory; TestAuthSnapshot does so with authentication on.
func TestUtlAuth(t *testing.T) {
	requireOurs(t)
	stores := freshPair(t)
	ctl := func(arguments ...string) {
		tool(t, nil, append([]string{etcdctl, "--endpoints", stores.Etcd.ClientAddress}, arguments...)...)
	}
	ctl("user", "add", "root:pw")
	ctl("user", "add", "u", "--no-password")
	ctl("role", "add", "r")
	ctl("role", "grant-permission", "r", "readwrite", "a", "z")
	ctl("user", "grant-role", "u", "r")
	ctl("put", "a", "1")
	// Not enabled: it starts, and gives all of it back.
	file := save(t, stores.Etcd)
	restored := restoreOurs(t, file)
	again := save(t, restored)
	compareRestored(t, file, again)
	if users := readBolt(t, again)["authUsers"]; len(users) != 2 {
		t.Errorf("users %q", users)
	}
}

// TestUtlRestoreKilled kills restores at any time: what is there then is whole, or does not start, and the restore can be run again.
func TestUtlRestoreKilled(t *testing.T) {
	requireOurs(t)
	stores := freshPair(t)
	s := pair.NewSession(stores.Skeg)
	writeHistory(s, 31)
	file := save(t, stores.Skeg)
	begin := time.Now()
	if found := ask(t, skegutl, "snapshot", "restore", file, "--data-dir", filepath.Join(t.TempDir(), "data")); found.status != 0 {
		t.Fatalf("%+v", found)
	}
	whole := time.Since(begin)
	listen := []string{"--listen-client-urls", "http://127.0.0.1:0", "--advertise-client-urls", "http://127.0.0.1:1", "--listen-peer-urls", "http://127.0.0.1:0"}
	unfinished := 0
	for round := range 24 {
		data := filepath.Join(t.TempDir(), "data")
		process := exec.Command(skegutl, "snapshot", "restore", file, "--data-dir", data)
		if err := process.Start(); err != nil {
			t.Fatal(err)
		}
		time.Sleep(whole * time.Duration(round) / 20)
		_ = process.Process.Kill()
		_ = process.Wait()
		if _, err := os.Stat(filepath.Join(data, "member")); err == nil {
			continue
		}
		if _, err := os.Stat(filepath.Join(data, "restoring")); err == nil {
			unfinished++
			if found := ask(t, append([]string{pool.SkegBin, "--data-dir", data}, listen...)...); found.status != 1 || !strings.Contains(found.problems, "holds a restore that was not finished") {
				t.Errorf("round %d: skeg starts: %+v", round, found)
			}
		}
		if found := ask(t, skegutl, "snapshot", "restore", file, "--data-dir", data); found.status != 0 {
			t.Errorf("round %d: it cannot be run again: %+v", round, found)
		}
	}
	if unfinished == 0 {
		t.Error("no restore was killed at its work")
	}
	// The ones that were not killed in time are whole, and so is one that was run again: TestUtlRestore compares such.
}

// TestUtlRestoreOlder restores a file as older etcds wrote it: without the records that came later.
func TestUtlRestoreOlder(t *testing.T) {
	requireOurs(t)
	stores := freshPair(t)
	source := pair.NewSession(stores.Etcd)
	writeHistory(source, 41)
	good := save(t, stores.Etcd)
	for _, version := range []string{"3.4.0", "3.5.0", "3.6.0"} {
		older := reseal(t, good, func(tx *bolt.Tx) error {
			meta := tx.Bucket([]byte("meta"))
			err := tx.Bucket([]byte("cluster")).Put([]byte("clusterVersion"), []byte(version))
			if version == "3.6.0" {
				return errors.Join(err, meta.Put([]byte("storageVersion"), []byte(version)))
			}
			err = errors.Join(err, meta.Delete([]byte("storageVersion")))
			if version == "3.4.0" {
				err = errors.Join(err, meta.Delete([]byte("term")), meta.Delete([]byte("confState")), meta.Delete([]byte("scheduledCompactRev")))
			}
			return err
		})
		compareRunning(t, source, pair.NewSession(restoreOurs(t, older)), hashes(t, source))
	}
}

// reseal changes a snapshot and gives it a new checksum.
func reseal(t *testing.T, snapshot string, change func(*bolt.Tx) error) string {
	t.Helper()
	path := duplicate(t, snapshot)
	file, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, file[:len(file)-sha256.Size], 0o600); err != nil {
		t.Fatal(err)
	}
	db, err := bolt.Open(path, 0o600, nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(db.Update(change), db.Close()); err != nil {
		t.Fatal(err)
	}
	if file, err = os.ReadFile(path); err != nil {
		t.Fatal(err)
	}
	digest := sha256.Sum256(file)
	if err := os.WriteFile(path, append(file, digest[:]...), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// TestUtlExport makes files for older etcds of a snapshot: the same records, other versions; and each of those etcds starts from it, with
// the same history.
func TestUtlExport(t *testing.T) {
	requireOurs(t)
	stores := freshPair(t)
	source := pair.NewSession(stores.Skeg)
	writeHistory(source, 51)
	file := save(t, stores.Skeg)
	expected := hashes(t, source)
	for _, target := range []string{"3.5", "3.6", "3.7"} {
		t.Run(target, func(t *testing.T) {
			output := filepath.Join(t.TempDir(), "older.db")
			command := []string{skegutl, "snapshot", "export", file, "--target-version", target, "--output", output}
			tool(t, nil, command...)
			if found := ask(t, command...); found.status != 1 || !strings.Contains(found.problems, "exists") {
				t.Errorf("a second time: %+v", found)
			}
			before, after := readBolt(t, file), readBolt(t, output)
			for name, entries := range before {
				for key, value := range entries {
					switch name + "/" + key {
					case "meta/storageVersion":
						value = target + ".0"
						if target == "3.5" {
							value = ""
						}
					case "cluster/clusterVersion":
						value = target + ".0"
					}
					if after[name][key] != value {
						t.Errorf("%s/%q: %.100q, not %.100q", name, key, after[name][key], value)
					}
				}
				if _, present := after["meta"]["storageVersion"]; present != (target != "3.5") {
					t.Errorf("storage version is present: %v", present)
				}
			}
			for revision, hash := range expected {
				var found struct{ Hash uint32 }
				tool(t, &found, skegutl, "hashkv", output, "--rev", fmt.Sprint(revision), "-w", "json")
				if found.Hash != hash {
					t.Errorf("the hash at %d is %d, was %d", revision, found.Hash, hash)
				}
			}
			older := restoreWith(t, target, output)
			compareRunning(t, source, pair.NewSession(older), expected)
			// And back, with what that etcd has written since.
			session := pair.NewSession(older)
			compareRunning(t, session, pair.NewSession(restoreOurs(t, save(t, older))), hashes(t, session))
		})
	}
	if found := ask(t, skegutl, "snapshot", "export", file+"none", "--target-version", "3.6", "--output", file+"out"); found.status != 1 {
		t.Errorf("%+v", found)
	}
}
