package conformance

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"skeg.local/conformance/pair"
)

// peerMetrics are the metrics that there are only with peers, learners or snapshots between members, each with its type, its labels
// and the bounds of its buckets. etcd makes some of them when something fails for the first time.
var peerMetrics = map[string]string{
	"etcd_network_active_peers":                            "gauge Local,Remote",
	"etcd_network_disconnected_peers_total":                "counter Local,Remote",
	"etcd_network_known_peers":                             "gauge Local,Remote",
	"etcd_network_peer_sent_bytes_total":                   "counter To",
	"etcd_network_peer_received_bytes_total":               "counter From",
	"etcd_network_peer_sent_failures_total":                "counter To",
	"etcd_network_peer_received_failures_total":            "counter From",
	"etcd_network_peer_round_trip_time_seconds":            "histogram To,le" + doubling(0.0001, 16),
	"etcd_network_snapshot_send_success":                   "counter To",
	"etcd_network_snapshot_send_failures":                  "counter To",
	"etcd_network_snapshot_send_inflights_total":           "gauge To",
	"etcd_network_snapshot_send_total_duration_seconds":    "histogram To,le" + doubling(0.1, 10),
	"etcd_network_snapshot_receive_success":                "counter From",
	"etcd_network_snapshot_receive_failures":               "counter From",
	"etcd_network_snapshot_receive_inflights_total":        "gauge From",
	"etcd_network_snapshot_receive_total_duration_seconds": "histogram From,le" + doubling(0.1, 10),
	"etcd_snap_db_fsync_duration_seconds":                  "histogram le" + doubling(0.001, 14),
	"etcd_snap_db_save_total_duration_seconds":             "histogram le" + doubling(0.1, 10),
	"etcd_disk_backend_snapshot_duration_seconds":          "histogram le" + doubling(0.01, 17),
	"etcd_server_heartbeat_send_failures_total":            "counter ",
	"etcd_server_leader_changes_seen_total":                "counter ",
	"etcd_server_is_learner":                               "gauge ",
	"etcd_server_snapshot_apply_in_progress_total":         "gauge ",
	"etcd_server_learner_promote_failures":                 "counter Reason",
	"etcd_server_learner_promote_successes":                "counter ",
}

// mayBeAbsent are those that an etcd which nothing has failed for does not have.
var mayBeAbsent = []string{
	"etcd_network_peer_received_failures_total", "etcd_network_snapshot_send_failures", "etcd_network_snapshot_receive_failures",
}

func doubling(first float64, count int) string {
	text := ""
	for ; count > 0; count-- {
		text += " " + strconv.FormatFloat(first, 'g', 6, 64)
		first *= 2
	}
	return text
}

// peerShapes are the shapes of the metrics of one member.
func peerShapes(values, types map[string]string) map[string]string {
	shapes := shape(values, types)
	for name := range peerMetrics {
		if !strings.HasPrefix(shapes[name], "histogram") {
			continue
		}
		var bounds []float64
		for series := range values {
			if rest, found := strings.CutPrefix(series, name+"_bucket{"); found {
				_, bound, _ := strings.Cut(rest, `le="`)
				if bound, err := strconv.ParseFloat(strings.TrimSuffix(bound, `"}`), 64); err == nil && bound < 1e9 {
					bounds = append(bounds, bound)
				}
			}
		}
		slices.Sort(bounds)
		for _, bound := range slices.Compact(bounds) {
			shapes[name] += " " + strconv.FormatFloat(bound, 'g', 6, 64)
		}
	}
	return shapes
}

// total adds up the series of a member's metric whose labels hold all of these texts.
func total(t *testing.T, c *pair.Cluster, at int, name string, labels ...string) float64 {
	values, _, err := c.Members[at].Metrics()
	if err != nil {
		t.Fatal(err)
	}
	sum := 0.0
	for series, value := range values {
		metric, inside, _ := strings.Cut(series, "{")
		if metric == name && !slices.ContainsFunc(labels, func(label string) bool { return !strings.Contains(inside, label) }) {
			number, err := strconv.ParseFloat(value, 64)
			if err != nil {
				t.Fatal(series, value)
			}
			sum += number
		}
	}
	return sum
}

func TestClusterMetrics(t *testing.T) {
	pool.CompareClusters(t, etcdctl, 1, func(c *pair.Cluster) {
		// So few entries kept that a new member is sent a snapshot.
		c.Kill(0, 1, 2)
		c.Flags = []string{"--snapshot-count=10", "--snapshot-catchup-entries=1"}
		c.Start(0, 1, 2)
		c.Lead(0)
		var writers sync.WaitGroup
		for writer := range 30 {
			writers.Go(func() {
				for i := range 100 {
					if err := c.Ask(writer%3, "KV/Put", put(fmt.Sprintf("key/%d/%d", writer, i), "1"), &pb.PutResponse{}); err != nil {
						c.Note("a put fails", err.Error())
					}
				}
			})
		}
		writers.Wait()
		peer := func(label string, at int) string { return fmt.Sprintf(`%s="%x"`, label, c.ID(c.Members[at].Name)) }
		above := func(at int, name string, labels ...string) {
			what := fmt.Sprintf("%s of m%d with %s is above 0", name, at, labels)
			c.Await(what, func() bool { return total(t, c, at, name, labels...) > 0 })
			c.Note(what, "yes")
		}
		exactly := func(at int, value float64, name string, labels ...string) {
			what := fmt.Sprintf("%s of m%d with %s is %v", name, at, labels, value)
			c.Await(what, func() bool { return total(t, c, at, name, labels...) == value })
			c.Note(what, "yes")
		}
		for at := range 3 {
			above(at, "etcd_server_leader_changes_seen_total")
			for other := range 3 {
				exactly(at, 1, "etcd_network_known_peers", peer("Local", at), peer("Remote", other))
				if other == at {
					continue
				}
				exactly(at, 1, "etcd_network_active_peers", peer("Local", at), peer("Remote", other))
				above(at, "etcd_network_peer_sent_bytes_total", peer("To", other))
				above(at, "etcd_network_peer_received_bytes_total", peer("From", other))
				above(at, "etcd_network_peer_round_trip_time_seconds_count", peer("To", other))
			}
		}

		add(c, 0, "m3", c.PeerURL(3), true)
		c.Call(0, "Cluster/MemberPromote", &pb.MemberPromoteRequest{ID: c.ID("m3")}, &pb.MemberPromoteResponse{})
		exactly(0, 1, "etcd_server_learner_promote_failures", `Reason="etcdserver: can only promote a learner member which is in sync with leader"`)
		c.Join(3, 0, 1, 2)
		c.Await("the learner has the keys", func() bool {
			answer := &pb.RangeResponse{}
			return c.Ask(3, "KV/Range", &pb.RangeRequest{Key: []byte("key/29/99"), Serializable: true}, answer) == nil && answer.Count == 1
		})
		exactly(3, 1, "etcd_server_is_learner")
		above(0, "etcd_network_snapshot_send_success", peer("To", 3))
		above(0, "etcd_network_snapshot_send_total_duration_seconds_count", peer("To", 3))
		exactly(0, 0, "etcd_network_snapshot_send_inflights_total", peer("To", 3))
		above(0, "etcd_disk_backend_snapshot_duration_seconds_count")
		above(3, "etcd_network_snapshot_receive_success", peer("From", 0))
		above(3, "etcd_network_snapshot_receive_total_duration_seconds_count", peer("From", 0))
		exactly(3, 0, "etcd_network_snapshot_receive_inflights_total", peer("From", 0))
		above(3, "etcd_snap_db_fsync_duration_seconds_count")
		above(3, "etcd_snap_db_save_total_duration_seconds_count")
		exactly(3, 0, "etcd_server_snapshot_apply_in_progress_total")
		once(c, 0, "Cluster/MemberPromote", &pb.MemberPromoteRequest{ID: c.ID("m3")}, &pb.MemberPromoteResponse{})
		exactly(0, 1, "etcd_server_learner_promote_successes")
		exactly(3, 0, "etcd_server_is_learner")

		changes := total(t, c, 1, "etcd_server_leader_changes_seen_total")
		c.Kill(2)
		above(0, "etcd_network_peer_sent_failures_total", peer("To", 2))
		above(0, "etcd_network_disconnected_peers_total", peer("Local", 0), peer("Remote", 2))
		exactly(0, 0, "etcd_network_active_peers", peer("Remote", 2))
		c.Start(2)
		exactly(0, 1, "etcd_network_active_peers", peer("Remote", 2))
		c.Call(0, "Maintenance/MoveLeader", &pb.MoveLeaderRequest{TargetID: c.ID("m1")}, &pb.MoveLeaderResponse{})
		c.Await("m1 leads", func() bool { return c.Leader(0, 1, 2, 3) == 1 })
		c.Note("changes of the leader that m1 has seen meanwhile", fmt.Sprint(total(t, c, 1, "etcd_server_leader_changes_seen_total")-changes))

		shapes := map[string]string{}
		for at := range 4 {
			values, types, err := c.Members[at].Metrics()
			if err != nil {
				t.Fatal(err)
			}
			for name, shape := range peerShapes(values, types) {
				if wanted, known := peerMetrics[name]; known && shape != wanted {
					t.Errorf("%s of m%d is %s, not %s", name, at, shape, wanted)
				}
				shapes[name] = shape
			}
		}
		for name := range peerMetrics {
			if shapes[name] == "" && (c.IsSkeg || !slices.Contains(mayBeAbsent, name)) {
				t.Errorf("no member has %s", name)
			}
		}
	})
}
