package conformance

import (
	_ "embed"
	"slices"
	"sort"
	"strings"
	"testing"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"skeg.local/conformance/pair"
)

//go:embed testdata/metrics_absent.txt
var metricsAbsent string

func TestHTTP(t *testing.T) {
	healthPaths := []string{
		"/health", "/health?exclude=NOSPACE", "/health?exclude=CORRUPT", "/health?exclude=NOSPACE&exclude=CORRUPT", "/health?exclude=nothing", "/health?exclude=",
		"/health?serializable=true", "/health?serializable=x", "/health?verbose",
		"/livez", "/livez?verbose", "/livez/serializable_read", "/livez/serializable_read?verbose", "/livez?exclude=serializable_read&verbose", "/livez?exclude=nothing&verbose",
		"/readyz", "/readyz?verbose", "/readyz/data_corruption", "/readyz/serializable_read?verbose", "/readyz/linearizable_read?verbose", "/readyz/non_learner?verbose",
		"/readyz?exclude=data_corruption&verbose", "/readyz?exclude=data_corruption&exclude=linearizable_read&verbose", "/readyz?exclude=data_corruption",
		"/readyz?exclude=serializable_read&exclude=data_corruption&exclude=linearizable_read&exclude=non_learner&verbose",
		"/readyz/data_corruption?exclude=data_corruption&verbose",
	}
	ask := func(s *pair.Session, paths ...string) {
		for _, path := range paths {
			s.HTTP("GET", path)
		}
	}
	check(t, []scenario{
		{name: "http/2-version", script: func(s *pair.Session) { ask(s, "/version", "/version/", "/version?x=y") }},
		{name: "http/2.1-and-2.2-healthy", script: func(s *pair.Session) { ask(s, healthPaths...) }},
		{name: "http/2-methods", script: func(s *pair.Session) {
			for _, method := range []string{"POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH"} {
				for _, path := range []string{"/health", "/livez", "/livez/serializable_read", "/readyz", "/version", "/nothing"} {
					s.HTTP(method, path)
				}
			}
		}},
		{name: "http/2-not-found", script: func(s *pair.Session) {
			ask(s, "/", "/nothing", "/healthz", "/health/", "/livez/", "/livez/data_corruption", "/livez/nothing", "/readyz/", "/readyz/nothing", "/v2/keys", "/v2/members",
				"/config/local/log", "/metrics/", "/versions", "/debug/pprof/", "/debug/pprof/heap", "/debug/requests", "/members", "/raft")
		}},
		{name: "http/2-paths-that-are-not-clean", script: func(s *pair.Session) {
			for _, method := range []string{"GET", "HEAD", "POST", "OPTIONS"} {
				for _, path := range []string{
					"//version", "/a/../version", "/version/.", "/version/..", "/./health", "/version//", "/livez//serializable_read", "//metrics?x=y", "/..//", "/a//b/?",
					"//evil.test/../health?a=b&c='d'", "/b%20c//d", "/a!//(x)", "/%2e%2e/version", "/version%2f", "/debug/pprof", "/x/...",
				} {
					s.HTTP(method, path)
				}
			}
		}},
		{name: "http/2-profiles", flags: []string{"--enable-pprof"}, script: func(s *pair.Session) { ask(s, "/debug/pprof", "/debug/pprof?x=y", "/debug//pprof/") }},
		{name: "http/2-metrics-as-asked-for", script: func(s *pair.Session) {
			for _, encodings := range []string{
				"gzip", "deflate, gzip;q=0.5", "identity;q=0.5, gzip", "gzip ; q=1", "gzip;q=0.001", "gzip, identity", "identity, gzip;q=0.9", "gzip;q=0", "gzip;q=abc", "GZIP", "*", "br, *;q=0.1",
				"*;q=0", "zstd", "identity", ";",
			} {
				s.MetricsAs("Accept-Encoding", encodings)
			}
			for _, types := range []string{
				"*/*", "text/plain", "application/json", "application/openmetrics-text", "application/openmetrics-text; version=1.0.0",
				"application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.5,application/openmetrics-text;version=0.0.1;q=0.4,text/plain;version=1.0.0;escaping=allow-utf-8;q=0.3,text/plain;version=0.0.4;q=0.2,*/*;q=0.1",
				"text/plain;version=0.0.4,text/plain;version=1.0.0;escaping=values;q=0.5", "application/x;escaping=allow-utf-8,text/html;escaping=values;q=0.5", "text/plain;escaping=nothing",
			} {
				s.MetricsAs("Accept", types)
			}
		}},
		{name: "http/2.1-and-2.2-no-space", fresh: true, script: func(s *pair.Session) {
			s.Alarm(&pb.AlarmRequest{Action: pb.AlarmRequest_ACTIVATE, MemberID: 1, Alarm: pb.AlarmType_NOSPACE})
			ask(s, healthPaths...)
		}},
		{name: "http/2.1-and-2.2-corrupt", fresh: true, script: func(s *pair.Session) {
			s.Alarm(&pb.AlarmRequest{Action: pb.AlarmRequest_ACTIVATE, MemberID: 1, Alarm: pb.AlarmType_CORRUPT})
			ask(s, healthPaths...)
			s.Alarm(&pb.AlarmRequest{Action: pb.AlarmRequest_DEACTIVATE, MemberID: 1, Alarm: pb.AlarmType_CORRUPT})
			ask(s, "/health", "/readyz?verbose")
		}},
	})
}

// work does a little of everything, so that metrics which appear on first use are there.
func work(s *pair.Session) {
	s.Grant(1, 1000)
	s.Put(leased("a", "1", 1))
	s.Put(put("b", "2"))
	s.Put(put("", "2"))
	s.Range(everything())
	s.Txn(do(put("c", "1"), get("a")))
	s.Txn(do(get("a")))
	s.Delete(del("b", ""))
	s.Compact(compact(3, true))
	k := s.KeepAlive()
	k.Send(1)
	k.Next()
	k.CloseSend()
	k.Next()
	k.Cancel()
	w := s.Watch()
	w.Create(watchKey("a"))
	s.Put(put("a", "3"))
	w.Next()
	s.RawWatch([]byte{0xff})
	s.Raw("/etcdserverpb.Lease/LeaseKeepAlive", []byte{0xff})
	s.HTTP2("/etcdserverpb.Watch/Watch", [][2]string{{"content-type", "application/grpc"}, {"te", "trailers"}}, []byte{0, 0, 0, 0, 9, 1})
	s.HashKV(0)
	s.Call("Maintenance/Hash", &pb.HashRequest{}, &pb.HashResponse{})
	s.Call("Maintenance/Defragment", &pb.DefragmentRequest{}, &pb.DefragmentResponse{})
	s.HTTP("GET", "/health")
	s.HTTP("GET", "/livez")
	s.HTTP("GET", "/readyz")
	s.Alarm(&pb.AlarmRequest{})
}

// TestMetrics requires every metric of etcd, with type and label names, except those listed in testdata/metrics_absent.txt.
func TestMetrics(t *testing.T) {
	stores := freshPair(t)
	shapes := map[string]map[string]string{}
	for _, store := range []*pair.Store{stores.Etcd, stores.Skeg} {
		s := pair.NewSession(store)
		work(s)
		values, types := s.Metrics()
		shapes[store.Name] = shape(values, types)
	}
	absent := map[string]bool{}
	for line := range strings.Lines(metricsAbsent) {
		if line = strings.TrimSpace(line); line != "" && !strings.HasPrefix(line, "#") {
			absent[strings.Fields(line)[0]] = true
		}
	}
	for _, name := range sortedKeys(shapes["etcd"]) {
		got, present := shapes["skeg"][name]
		switch {
		case strings.HasPrefix(name, "go_"):
		case absent[name] && present && stores.Skeg.IsSkeg:
			t.Errorf("%s exists: take it out of metrics_absent.txt", name)
		case !present && !absent[name]:
			t.Errorf("missing: %s, %s", name, shapes["etcd"][name])
		case present && got != shapes["etcd"][name]:
			t.Errorf("%s is %s, in etcd %s", name, got, shapes["etcd"][name])
		}
	}
	for name := range absent {
		if _, known := shapes["etcd"][name]; !known {
			t.Errorf("metrics_absent.txt has %s, which etcd does not have", name)
		}
	}
}

// shape maps each metric to its type and the names of its labels.
func shape(values, types map[string]string) map[string]string {
	labels := map[string]map[string]bool{}
	for series := range values {
		name, inside, _ := strings.Cut(series, "{")
		if _, known := types[name]; !known {
			for _, suffix := range []string{"_bucket", "_sum", "_count"} {
				name = strings.TrimSuffix(name, suffix)
			}
		}
		if labels[name] == nil {
			labels[name] = map[string]bool{}
		}
		for _, label := range strings.Split(strings.TrimSuffix(inside, "}"), "\",") {
			if label, _, found := strings.Cut(label, "="); found {
				labels[name][strings.TrimSpace(label)] = true
			}
		}
	}
	shapes := map[string]string{}
	for name, kind := range types {
		if names, used := labels[name]; used {
			shapes[name] = kind + " " + strings.Join(sortedKeys(names), ",")
		}
	}
	return shapes
}

// TestMetricValues compares the metrics whose value follows from what clients did.
func TestMetricValues(t *testing.T) {
	counted := []string{
		`etcd_cluster_version{cluster_version="3.7"}`, `etcd_server_version{server_version="3.7.3"}`, `etcd_server_id{server_id="2e1259d415f2a040"}`,
		"etcd_server_has_leader", "etcd_server_is_leader", "etcd_server_is_learner", "etcd_server_proposals_failed_total", "etcd_server_proposals_pending",
		"etcd_server_quota_backend_bytes", "etcd_debugging_mvcc_keys_total", "etcd_debugging_mvcc_current_revision", "etcd_debugging_mvcc_compact_revision",
		"etcd_debugging_mvcc_watch_stream_total", "etcd_debugging_mvcc_watcher_total", "etcd_debugging_mvcc_events_total", "etcd_debugging_mvcc_total_put_size_in_bytes",
		"etcd_debugging_lease_granted_total", "etcd_debugging_lease_revoked_total", "etcd_debugging_lease_renewed_total", "etcd_debugging_auth_revision",
		"etcd_mvcc_put_total", "etcd_mvcc_delete_total", "etcd_mvcc_txn_total",
		`grpc_server_started_total{grpc_method="Put",grpc_service="etcdserverpb.KV",grpc_type="unary"}`,
		`grpc_server_handled_total{grpc_code="OK",grpc_method="Put",grpc_service="etcdserverpb.KV",grpc_type="unary"}`,
		`grpc_server_handled_total{grpc_code="InvalidArgument",grpc_method="Put",grpc_service="etcdserverpb.KV",grpc_type="unary"}`,
		`grpc_server_handled_total{grpc_code="DataLoss",grpc_method="Compact",grpc_service="etcdserverpb.KV",grpc_type="unary"}`,
		`grpc_server_handled_total{grpc_code="OK",grpc_method="LeaseKeepAlive",grpc_service="etcdserverpb.Lease",grpc_type="bidi_stream"}`,
		`grpc_server_started_total{grpc_method="Watch",grpc_service="etcdserverpb.Watch",grpc_type="bidi_stream"}`,
		`grpc_server_msg_received_total{grpc_method="Watch",grpc_service="etcdserverpb.Watch",grpc_type="bidi_stream"}`,
		`grpc_server_msg_sent_total{grpc_method="Watch",grpc_service="etcdserverpb.Watch",grpc_type="bidi_stream"}`,
		`grpc_server_started_total{grpc_method="Snapshot",grpc_service="etcdserverpb.Maintenance",grpc_type="server_stream"}`,
		`etcd_server_healthcheck{name="linearizable_read",type="readyz"}`, `etcd_server_healthchecks_total{name="serializable_read",status="success",type="livez"}`,
		`etcd_network_server_stream_failures_total{API="watch",Type="receive"}`, `etcd_network_server_stream_failures_total{API="lease-keepalive",Type="receive"}`,
		"etcd_server_health_success", "etcd_server_health_failures",
	}
	check(t, []scenario{{name: "http/9-metric-values", fresh: true, script: func(s *pair.Session) {
		work(s)
		values, _ := s.Metrics()
		for _, series := range counted {
			s.Note(series, values[series])
		}
	}}})
}

func sortedKeys[V any](m map[string]V) []string {
	var keys []string
	for key := range m {
		keys = append(keys, key)
	}
	sort.Strings(keys)
	return slices.Compact(keys)
}
