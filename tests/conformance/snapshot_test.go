package conformance

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"math/rand"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	bolt "go.etcd.io/bbolt"
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/protobuf/proto"

	"skeg.local/conformance/pair"
)

// toolLimit bounds a run of etcdctl or etcdutl.
const toolLimit = time.Minute

// TestSnapshot gives both stores the same histories, takes snapshots of both with etcdctl, and requires that ours holds what etcd's
// holds, that every page of it passes bbolt's check, that etcdutl accepts it, and that an etcd started from it answers as skeg does.
func TestSnapshot(t *testing.T) {
	fresh := time.Now().UnixNano()%1_000_000 + 1000
	for _, seed := range []int64{1, 2, 3, fresh} {
		t.Run(fmt.Sprintf("seed-%d", seed), func(t *testing.T) {
			stores := freshPair(t)
			if difference := stores.Compare(func(s *pair.Session) { writeHistory(s, seed) }); difference != nil {
				t.Fatal("the stores differ:\n" + difference.Text)
			}
			theirs, ours := save(t, stores.Etcd), save(t, stores.Skeg)
			compareFiles(t, theirs, ours)
			compareStatus(t, theirs, ours)
			source := pair.NewSession(stores.Skeg)
			hashes := hashes(t, source)
			for revision, hash := range hashes {
				var found struct{ Hash uint32 }
				tool(t, &found, etcdutl, "hashkv", theirs, "--rev", strconv.FormatInt(revision, 10), "-w", "json")
				if found.Hash != hash {
					t.Errorf("etcdutl's hash of etcd's snapshot at %d is %d, skeg's %d", revision, found.Hash, hash)
				}
			}
			restored := restore(t, ours)
			compareRunning(t, source, pair.NewSession(restored), hashes)
		})
	}
}

// TestSnapshotOfLittle is TestSnapshot for stores without keys, or with one.
func TestSnapshotOfLittle(t *testing.T) {
	stores := freshPair(t)
	for _, script := range []func(*pair.Session){
		func(*pair.Session) {},
		func(s *pair.Session) { s.Put(put("a", "")) },
		func(s *pair.Session) { s.Delete(del("a", "")); s.Compact(compact(s.Current(), true)) },
	} {
		if difference := stores.Compare(script); difference != nil {
			t.Fatal("the stores differ:\n" + difference.Text)
		}
		theirs, ours := save(t, stores.Etcd), save(t, stores.Skeg)
		compareFiles(t, theirs, ours)
		compareStatus(t, theirs, ours)
		source := pair.NewSession(stores.Skeg)
		compareRunning(t, source, pair.NewSession(restore(t, ours)), hashes(t, source))
	}
}

// TestSnapshotStream compares the messages of the call itself.
func TestSnapshotStream(t *testing.T) {
	check(t, []scenario{{name: "maintenance/9-snapshot", script: func(s *pair.Session) {
		many(s, 2000)
		ctx, cancel := context.WithTimeout(context.Background(), toolLimit)
		defer cancel()
		stream, err := pb.NewMaintenanceClient(s.Store.Conn).Snapshot(ctx, &pb.SnapshotRequest{})
		s.Require(err == nil, "snapshot: %v", err)
		var file []byte
		var messages []*pb.SnapshotResponse
		for {
			message, err := stream.Recv()
			if errors.Is(err, io.EOF) {
				break
			}
			s.Require(err == nil, "snapshot: %v", err)
			messages = append(messages, message)
			file = append(file, message.Blob...)
		}
		last := messages[len(messages)-1]
		data := file[:len(file)-len(last.Blob)]
		sum := sha256.Sum256(data)
		s.Require(bytes.Equal(sum[:], last.Blob), "the last message is %x, the sum %x", last.Blob, sum)
		left := len(data)
		for i, message := range messages {
			if i < len(messages)-1 {
				s.Require(len(message.Blob) == min(left, 32<<10), "message %d has %d bytes, with %d to come", i, len(message.Blob), left)
				left -= len(message.Blob)
			}
			s.Require(message.RemainingBytes == uint64(left), "message %d says that %d bytes remain of %d", i, message.RemainingBytes, left)
			s.Require(message.Header == nil, "message %d has a header", i)
			s.Require(message.Version == last.Version, "message %d has version %q", i, message.Version)
		}
		s.Note("version", last.Version)
		s.Note("size", len(data)%4096)
	}}})
}

// TestSnapshotUnderLoad takes snapshots while keys are written: each is a whole revision, and nobody waits for them.
func TestSnapshotUnderLoad(t *testing.T) {
	stores := freshPair(t)
	s := pair.NewSession(stores.Skeg)
	for start := 0; start < 5000; start += 100 {
		request := do()
		for i := start; i < start+100; i++ {
			request.Success = append(request.Success, op(put(fmt.Sprintf("balance%04d", i), "1000")))
		}
		if err := s.Quietly("KV/Txn", request, &pb.TxnResponse{}); err != nil {
			t.Fatal(err)
		}
	}
	// More than is sorted in memory.
	const ballast = 32_000
	for start := 0; start < ballast; start += 100 {
		request := do()
		for i := start; i < start+100; i++ {
			request.Success = append(request.Success, op(put(fmt.Sprintf("ballast%05d", (i*7919)%ballast), strings.Repeat(strconv.Itoa(i%10), 1000))))
		}
		if err := s.Quietly("KV/Txn", request, &pb.TxnResponse{}); err != nil {
			t.Fatal(err)
		}
	}
	// Whoever does not take the rest of a snapshot does not keep others from theirs.
	for range 8 {
		ctx, cancel := context.WithTimeout(context.Background(), toolLimit)
		stream, err := pb.NewMaintenanceClient(stores.Skeg.Conn).Snapshot(ctx, &pb.SnapshotRequest{})
		if err == nil {
			_, err = stream.Recv()
		}
		cancel()
		if err != nil {
			t.Fatal(err)
		}
	}
	stop, stopped := make(chan struct{}), make(chan error, 1)
	written := 0
	go func() {
		random := rand.New(rand.NewSource(1))
		for {
			select {
			case <-stop:
				stopped <- nil
				return
			default:
			}
			// Two keys of a transaction always have the same value: a snapshot between them would show.
			at, value := random.Intn(2500), strconv.Itoa(written)
			request := do(put(fmt.Sprintf("balance%04d", at*2), value), put(fmt.Sprintf("balance%04d", at*2+1), value))
			if err := s.Quietly("KV/Txn", request, &pb.TxnResponse{}); err != nil {
				stopped <- err
				return
			}
			written++
			if written%200 == 0 {
				if err := s.Quietly("KV/Compact", compact(s.Current()-20, false), &pb.CompactionResponse{}); err != nil {
					stopped <- err
					return
				}
			}
		}
	}()
	for range 3 {
		file := save(t, stores.Skeg)
		restored := pair.NewSession(restore(t, file))
		answer := &pb.RangeResponse{}
		if err := restored.Quietly("KV/Range", span("ballast", "ballasu"), answer); err != nil {
			t.Fatal(err)
		}
		if len(answer.Kvs) != ballast {
			t.Errorf("%d keys of ballast, not %d", len(answer.Kvs), ballast)
		}
		for _, kv := range answer.Kvs {
			if len(kv.Value) != 1000 || strings.Trim(string(kv.Value), string(kv.Value[:1])) != "" {
				t.Fatalf("%s holds %.20q", kv.Key, kv.Value)
			}
		}
		answer.Reset()
		if err := restored.Quietly("KV/Range", span("balance", "balancf"), answer); err != nil {
			t.Fatal(err)
		}
		if len(answer.Kvs) != 5000 {
			t.Errorf("%d keys, not 5000", len(answer.Kvs))
		}
		for i := 0; i+1 < len(answer.Kvs); i += 2 {
			if one, other := answer.Kvs[i], answer.Kvs[i+1]; !bytes.Equal(one.Value, other.Value) || one.ModRevision != other.ModRevision {
				t.Errorf("half a transaction: %s and %s", pair.Text(one), pair.Text(other))
			}
		}
	}
	close(stop)
	if err := <-stopped; err != nil {
		t.Error(err)
	}
	if written < 100 {
		t.Errorf("only %d writes went on beside the snapshots", written)
	}
}

// writeHistory writes puts of all sizes, deletes, leases, transactions and compactions.
func writeHistory(s *pair.Session, seed int64) {
	random := rand.New(rand.NewSource(seed))
	require := func(err error) { s.Require(err == nil, "%v", err) }
	key := func() string {
		if random.Intn(4) == 0 {
			binary := make([]byte, 1+random.Intn(12))
			random.Read(binary)
			return string(binary)
		}
		return fmt.Sprintf("key/%05d", random.Intn(8000))
	}
	compacted := int64(0)
	leases := []int64{0}
	for i := range 40 {
		id := random.Int63()
		require(s.Quietly("Lease/LeaseGrant", &pb.LeaseGrantRequest{ID: id, TTL: int64(10_000 + i)}, &pb.LeaseGrantResponse{}))
		leases = append(leases, id)
	}
	// Tens of thousands of keys in all, a hundred to a transaction.
	for range 250 {
		request := do()
		seen := map[string]bool{}
		for len(request.Success) < 100 {
			k := key()
			if seen[k] {
				continue
			}
			seen[k] = true
			if random.Intn(10) == 0 {
				request.Success = append(request.Success, op(del(k, "")))
				continue
			}
			value := make([]byte, random.Intn(80))
			if random.Intn(100) == 0 {
				value = make([]byte, random.Intn(4000))
			}
			random.Read(value)
			lease := int64(0)
			if random.Intn(3) == 0 {
				lease = leases[random.Intn(len(leases))]
			}
			request.Success = append(request.Success, op(leased(k, string(value), lease)))
		}
		require(s.Quietly("KV/Txn", request, &pb.TxnResponse{}))
		switch random.Intn(40) {
		case 0:
			if revision := s.Current() - int64(random.Intn(5)); revision > compacted {
				require(s.Quietly("KV/Compact", compact(revision, true), &pb.CompactionResponse{}))
				compacted = revision
			}
		case 1:
			at := 1 + random.Intn(len(leases)-1)
			require(s.Quietly("Lease/LeaseRevoke", &pb.LeaseRevokeRequest{ID: leases[at]}, &pb.LeaseRevokeResponse{}))
			leases = slices.Delete(leases, at, at+1)
		case 2:
			require(s.Quietly("KV/Put", put(key(), strings.Repeat("x", 1_500_000)), &pb.PutResponse{}))
		}
	}
	require(s.Quietly("KV/Put", put("empty", ""), &pb.PutResponse{}))
	require(s.Quietly("KV/Put", put("large", strings.Repeat("y", 1_500_000)), &pb.PutResponse{}))
	require(s.Quietly("KV/DeleteRange", del("key/00", "key/01"), &pb.DeleteRangeResponse{}))
	if seed%2 == 0 {
		// The newest revision is a deletion, and compacted.
		require(s.Quietly("KV/Compact", compact(s.Current(), true), &pb.CompactionResponse{}))
	}
	require(s.Quietly("Maintenance/Alarm", &pb.AlarmRequest{Action: pb.AlarmRequest_ACTIVATE, MemberID: 77, Alarm: pb.AlarmType_NOSPACE}, &pb.AlarmResponse{}))
	s.Note("revision", s.Current())
}

// save takes a snapshot with etcdctl.
func save(t *testing.T, store *pair.Store) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), store.Name+".db")
	tool(t, nil, etcdctl, "--endpoints", store.ClientAddress, "snapshot", "save", path)
	return path
}

// restore makes a data directory of a snapshot with etcdutl, and starts an etcd on it.
func restore(t *testing.T, snapshot string, flags ...string) *pair.Store {
	t.Helper()
	return restoreWith(t, "3.7", snapshot, flags...)
}

// restoreWith is restore with the tools of a version of etcd.
func restoreWith(t *testing.T, version, snapshot string, flags ...string) *pair.Store {
	t.Helper()
	suffix := map[string]string{"3.5": "35", "3.6": "36", "3.7": ""}[version]
	prepare := func(data string) error {
		return runTool(nil, append([]string{etcdutl + suffix, "snapshot", "restore", snapshot, "--data-dir", data, "--name", "default",
			"--initial-cluster", "default=" + pair.AdvertisedPeer, "--initial-advertise-peer-urls", pair.AdvertisedPeer}, flags...)...)
	}
	store, err := pair.StartOn("restored", pool.EtcdBin+suffix, t.TempDir(), prepare)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(store.Stop)
	return store
}

// tool runs a command that must succeed, and decodes its output if somebody wants it.
func tool(t *testing.T, into any, command ...string) {
	t.Helper()
	if err := runTool(into, command...); err != nil {
		t.Fatal(err)
	}
}

func runTool(into any, command ...string) error {
	ctx, cancel := context.WithTimeout(context.Background(), toolLimit)
	defer cancel()
	process := exec.CommandContext(ctx, command[0], command[1:]...)
	var problems bytes.Buffer
	process.Stderr = &problems
	out, err := process.Output()
	if err != nil {
		return fmt.Errorf("%s: %w\n%s%s", strings.Join(command, " "), err, out, problems.Bytes())
	}
	if into == nil {
		return nil
	}
	return json.Unmarshal(out, into)
}

// readBolt checks every page of a file and reads all of it.
func readBolt(t *testing.T, path string) map[string]map[string]string {
	t.Helper()
	db, err := bolt.Open(path, 0o400, &bolt.Options{ReadOnly: true, Timeout: toolLimit})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = db.Close() }()
	buckets := map[string]map[string]string{}
	err = db.View(func(tx *bolt.Tx) error {
		for problem := range tx.Check() {
			t.Errorf("%s: %v", path, problem)
		}
		info, err := os.Stat(path)
		if err != nil {
			return err
		}
		if tx.Size()+sha256.Size != info.Size() {
			t.Errorf("%s has %d bytes, its pages %d", path, info.Size(), tx.Size())
		}
		return tx.ForEach(func(name []byte, bucket *bolt.Bucket) error {
			entries := map[string]string{}
			buckets[string(name)] = entries
			return bucket.ForEach(func(key, value []byte) error {
				entries[string(key)] = string(value)
				return nil
			})
		})
	})
	if err != nil {
		t.Fatal(err)
	}
	return buckets
}

// compareFiles requires the same buckets with the same entries, but for where the log stands.
func compareFiles(t *testing.T, theirs, ours string) {
	t.Helper()
	etcd, skeg := readBolt(t, theirs), readBolt(t, ours)
	if names := slices.Sorted(maps.Keys(etcd)); !slices.Equal(names, slices.Sorted(maps.Keys(skeg))) {
		t.Fatalf("buckets of etcd %q, of skeg %q", names, slices.Sorted(maps.Keys(skeg)))
	}
	for name, expected := range etcd {
		found := skeg[name]
		for _, key := range slices.Sorted(maps.Keys(expected)) {
			value, present := found[key]
			own := name == "meta" && (key == "consistent_index" || key == "term")
			if !present || value != expected[key] && !own {
				t.Errorf("%s/%q: etcd %.100q, skeg %.100q (%v)", name, key, expected[key], value, present)
			}
			if own && (len(value) != 8 || value == "\x00\x00\x00\x00\x00\x00\x00\x00") {
				t.Errorf("%s/%s is %q", name, key, value)
			}
			if t.Failed() {
				return
			}
		}
		if len(found) != len(expected) {
			t.Errorf("%s: etcd has %d entries, skeg %d", name, len(expected), len(found))
		}
	}
}

// compareStatus requires the same of etcdutl's status, but the size and the hash of all, which holds where the log stands.
func compareStatus(t *testing.T, theirs, ours string) {
	t.Helper()
	type status struct {
		Revision, TotalKey, TotalSize int64
		Version                       string
	}
	var etcd, skeg status
	tool(t, &etcd, etcdutl, "snapshot", "status", theirs, "-w", "json")
	tool(t, &skeg, etcdutl, "snapshot", "status", ours, "-w", "json")
	info, err := os.Stat(ours)
	if err != nil {
		t.Fatal(err)
	}
	if skeg.TotalSize != info.Size()-sha256.Size {
		t.Errorf("status says %d bytes of %d", skeg.TotalSize, info.Size())
	}
	etcd.TotalSize, skeg.TotalSize = 0, 0
	if etcd != skeg {
		t.Errorf("status of etcd's %+v, of skeg's %+v", etcd, skeg)
	}
}

// hashes asks for the hash at every revision above the compaction. At the compaction itself a store that has done it answers with the
// hash from before, until it is started again.
func hashes(t *testing.T, s *pair.Session) map[int64]uint32 {
	t.Helper()
	found := map[int64]uint32{}
	newest := &pb.HashKVResponse{}
	if err := s.Quietly("Maintenance/HashKV", &pb.HashKVRequest{}, newest); err != nil {
		t.Fatal(err)
	}
	for revision := newest.Header.Revision; revision > max(newest.CompactRevision, 0) && len(found) < 40; revision-- {
		answer := &pb.HashKVResponse{}
		if err := s.Quietly("Maintenance/HashKV", &pb.HashKVRequest{Revision: revision}, answer); err != nil {
			t.Fatal(err)
		}
		found[revision] = answer.Hash
	}
	return found
}

// compareRunning requires that a store which was started from a snapshot answers as the one that it is of.
func compareRunning(t *testing.T, source, restored *pair.Session, hashes map[int64]uint32) {
	t.Helper()
	for revision, hash := range hashes {
		answer := &pb.HashKVResponse{}
		if err := restored.Quietly("Maintenance/HashKV", &pb.HashKVRequest{Revision: revision}, answer); err != nil || answer.Hash != hash {
			t.Errorf("the hash at %d is %d, was %d: %v", revision, answer.Hash, hash, err)
		}
	}
	ask := func(method string, request proto.Message, response func() proto.Message) {
		t.Helper()
		before, after := response(), response()
		if err := errors.Join(source.Quietly(method, request, before), restored.Quietly(method, request, after)); err != nil {
			t.Errorf("%s: %v", method, err)
			return
		}
		for _, response := range []proto.Message{before, after} {
			// It names another term.
			message := response.ProtoReflect()
			message.Clear(message.Descriptor().Fields().ByName("header"))
		}
		if !proto.Equal(before, after) {
			t.Errorf("%s: was %.300s, is %.300s", method, pair.Text(before), pair.Text(after))
		}
	}
	ask("KV/Range", everything(), func() proto.Message { return &pb.RangeResponse{} })
	ask("Maintenance/Alarm", &pb.AlarmRequest{}, func() proto.Message { return &pb.AlarmResponse{} })
	leases := &pb.LeaseLeasesResponse{}
	if err := source.Quietly("Lease/LeaseLeases", &pb.LeaseLeasesRequest{}, leases); err != nil {
		t.Fatal(err)
	}
	ask("Lease/LeaseLeases", &pb.LeaseLeasesRequest{}, func() proto.Message { return &pb.LeaseLeasesResponse{} })
	for _, lease := range leases.Leases {
		before, after := &pb.LeaseTimeToLiveResponse{}, &pb.LeaseTimeToLiveResponse{}
		request := &pb.LeaseTimeToLiveRequest{ID: lease.ID, Keys: true}
		if err := errors.Join(source.Quietly("Lease/LeaseTimeToLive", request, before), restored.Quietly("Lease/LeaseTimeToLive", request, after)); err != nil {
			t.Fatal(err)
		}
		sorted := func(keys [][]byte) [][]byte { return slices.SortedFunc(slices.Values(keys), bytes.Compare) }
		if before.GrantedTTL != after.GrantedTTL || !slices.EqualFunc(sorted(before.Keys), sorted(after.Keys), bytes.Equal) {
			t.Errorf("lease %x: %d s and %d keys, was %d s and %d keys", lease.ID, after.GrantedTTL, len(after.Keys), before.GrantedTTL, len(before.Keys))
		}
	}
	if err := restored.Quietly("Maintenance/Alarm", &pb.AlarmRequest{Action: pb.AlarmRequest_DEACTIVATE, MemberID: 77, Alarm: pb.AlarmType_NOSPACE}, &pb.AlarmResponse{}); err != nil {
		t.Error(err)
	}
	revision := restored.Current()
	if revision != source.Current() {
		t.Errorf("revision %d, was %d", revision, source.Current())
	}
	answer := &pb.PutResponse{}
	if err := restored.Quietly("KV/Put", put("after", "the snapshot"), answer); err != nil || answer.Header.Revision != revision+1 {
		t.Errorf("the next write has revision %d after %d: %v", answer.Header.GetRevision(), revision, err)
	}
}
