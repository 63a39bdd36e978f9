//! Plain HTTP and metrics of a running member, asked by hand over TCP; gRPC calls are made by etcd's own etcdctl.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use skeg::clock;
use tempfile::TempDir;

use crate::ports::free_port;
use crate::programs::{etcd, skeg};

/// A start takes half a second; this only keeps a hang from stopping the tests.
const PATIENCE: Duration = Duration::from_secs(30);

/// A member that runs until it is dropped.
struct Member {
    process: Child,
    directory: TempDir,
    client: u16,
    http: u16,
    metrics: u16,
}

/// Status line and headers, and body.
pub(crate) struct Answer {
    pub(crate) head: String,
    pub(crate) body: String,
}

impl Member {
    /// Starts a member with HTTP on the client port, or on one of its own.
    fn start(http_apart: bool, flags: &[&str]) -> Member {
        let directory = tempfile::tempdir().expect("a directory for the test");
        let [client, peer, http, metrics] = [(); 4].map(|()| free_port());
        let url = |port: u16| format!("http://127.0.0.1:{port}");
        let log = File::create(directory.path().join("log")).expect("a file for the log");
        let mut command = Command::new(skeg());
        command.args(["--name=m", "--unsafe-no-fsync", "--data-dir=data"]);
        command.arg(format!("--listen-client-urls={}", url(client)));
        command.arg(format!("--advertise-client-urls={}", url(client)));
        command.arg(format!("--listen-peer-urls={}", url(peer)));
        command.arg(format!("--initial-advertise-peer-urls={}", url(peer)));
        command.arg(format!("--initial-cluster=m={}", url(peer)));
        command.arg(format!("--listen-metrics-urls={}", url(metrics)));
        if http_apart {
            command.arg(format!("--listen-client-http-urls={}", url(http)));
        }
        let process = command
            .args(flags)
            .env_clear()
            .current_dir(directory.path())
            .stdin(Stdio::null())
            .stderr(log)
            .spawn()
            .expect("skeg starts");
        let http = if http_apart { http } else { client };
        let member = Member { process, directory, client, http, metrics };
        member.wait_for("the client port", || TcpStream::connect(("127.0.0.1", client)).is_ok());
        member.wait_for("health", || member.get("/health").head.contains("200"));
        member
    }

    #[expect(clippy::disallowed_methods, reason = "another process gives no sign to wait for")]
    fn wait_for(&self, what: &str, mut done: impl FnMut() -> bool) {
        let until = clock::now() + PATIENCE;
        while !done() {
            assert!(clock::now() < until, "no {what}: {}", self.log());
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.directory.path().join("log")).expect("the log is a file")
    }

    fn get(&self, path: &str) -> Answer {
        ask(self.http, path).unwrap_or(Answer { head: String::new(), body: String::new() })
    }

    /// The value of a series on the metrics port.
    fn metric(&self, series: &str) -> Option<f64> {
        let text = ask(self.metrics, "/metrics").expect("metrics are answered").body;
        let line = text.lines().find_map(|line| line.strip_prefix(series)?.strip_prefix(' '));
        line.map(|value| value.parse().expect("a number"))
    }

    fn etcdctl(&self, port: u16, arguments: &[&str]) -> Command {
        let mut command = Command::new(etcd().with_file_name("etcdctl"));
        command
            .arg(format!("--endpoints=http://127.0.0.1:{port}"))
            .arg("--command-timeout=2s")
            .args(arguments);
        command.env_clear().stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    /// Runs etcdctl against the client port; gives its output if it succeeds.
    fn call(&self, arguments: &[&str]) -> Result<String, String> {
        let output = self.etcdctl(self.client, arguments).output().expect("etcdctl starts");
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        if output.status.success() { Ok(text(&output.stdout)) } else { Err(text(&output.stderr)) }
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        // It may have ended by itself; either way nothing is left of it.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// The body of what a member at this address answers to a GET by HTTP.
pub(crate) fn get(address: &str, path: &str) -> String {
    let (_, port) = address.rsplit_once(':').expect("an address has a port");
    ask(port.parse().expect("a port is a number"), path).expect("it speaks HTTP").body
}

/// Asks by HTTP/1.1; none if the other side does not speak it.
pub(crate) fn ask(port: u16, path: &str) -> Option<Answer> {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).ok()?;
    stream.set_read_timeout(Some(PATIENCE)).ok()?;
    write!(stream, "GET {path} HTTP/1.1\r\nHost: localhost:1\r\nConnection: close\r\n\r\n").ok()?;
    let mut bytes = Vec::new();
    stream.read_to_end(&mut bytes).ok()?;
    let text = String::from_utf8(bytes).ok()?;
    let (head, body) = text.split_once("\r\n\r\n")?;
    head.starts_with("HTTP/1.1 ").then(|| Answer { head: head.to_lowercase(), body: body.to_owned() })
}

#[test]
fn http_and_grpc_can_have_ports_of_their_own() {
    let member = Member::start(true, &[]);
    assert_eq!(
        member.get("/version").body,
        r#"{"etcdserver":"3.7.3","etcdcluster":"3.7.0","storage":"3.7.0"}"#
    );
    assert!(ask(member.client, "/version").is_none(), "the client port speaks gRPC alone");
    member.call(&["put", "k", "v"]).expect("and that it does");
    let apart = member.etcdctl(member.http, &["get", "k"]).output().expect("etcdctl starts");
    assert!(!apart.status.success(), "the HTTP port does not");
    for (path, status) in [("/health", "200"), ("/readyz", "200"), ("/metrics", "200"), ("/version", "404")] {
        let answer = ask(member.metrics, path).expect("an answer");
        assert!(answer.head.starts_with(&format!("http/1.1 {status}")), "{path}: {}", answer.head);
    }
}

#[test]
fn one_port_serves_both_unless_told_otherwise() {
    let member = Member::start(false, &[]);
    member.call(&["put", "k", "v"]).expect("gRPC");
    let answer = member.get("/readyz?verbose");
    assert!(
        answer.head.starts_with("http/1.1 200") && answer.head.contains("x-content-type-options: nosniff")
    );
    let mut lines: Vec<&str> = answer.body.lines().collect();
    assert_eq!(lines.pop(), Some("ok"));
    lines.sort_unstable();
    let checks = ["data_corruption", "linearizable_read", "non_learner", "serializable_read"];
    assert_eq!(lines, checks.map(|check| format!("[+]{check} ok")));
}

#[test]
fn calls_are_counted() {
    let member = Member::start(false, &["--metrics=extensive"]);
    let put = r#"grpc_method="Put",grpc_service="etcdserverpb.KV",grpc_type="unary""#;
    let watch = r#"grpc_method="Watch",grpc_service="etcdserverpb.Watch",grpc_type="bidi_stream""#;
    let started = |method: &str| member.metric(&format!("grpc_server_started_total{{{method}}}"));
    let handled = |code: &str, method: &str| {
        member.metric(&format!("grpc_server_handled_total{{grpc_code=\"{code}\",{method}}}"))
    };
    assert_eq!((started(put), handled("DataLoss", put)), (Some(0.0), Some(0.0)), "there from the start");
    member.call(&["put", "k", "value"]).expect("a put");
    member.call(&["put", "", "value"]).expect_err("a put without a key");
    assert_eq!(
        (started(put), handled("OK", put), handled("InvalidArgument", put)),
        (Some(2.0), Some(1.0), Some(1.0))
    );
    assert_eq!(member.metric(&format!("grpc_server_msg_sent_total{{{put}}}")), Some(1.0));
    assert_eq!(member.metric(&format!("grpc_server_handling_seconds_count{{{put}}}")), Some(2.0));

    let mut watcher =
        member.etcdctl(member.client, &["watch", "k", "--rev=1"]).spawn().expect("etcdctl starts");
    member.wait_for("event", || member.metric("etcd_debugging_mvcc_events_total") == Some(1.0));
    assert_eq!((started(watch), handled("Canceled", watch)), (Some(1.0), Some(0.0)));
    assert_eq!(member.metric("etcd_debugging_mvcc_watcher_total"), Some(1.0));
    watcher.kill().expect("etcdctl runs");
    watcher.wait().expect("etcdctl ends");
    member.wait_for("end of the stream", || handled("Canceled", watch) == Some(1.0));
    assert_eq!(member.metric("etcd_debugging_mvcc_watcher_total"), Some(0.0));
}

#[test]
fn the_state_of_the_member_is_measured() {
    let member = Member::start(false, &[]);
    member.call(&["put", "k", "value"]).expect("a put");
    member.call(&["lease", "grant", "100"]).expect("a grant");
    member.call(&["compaction", "2"]).expect("a compaction");
    for (series, value) in [
        ("etcd_server_has_leader", 1.0),
        ("etcd_server_is_leader", 1.0),
        ("etcd_server_leader_changes_seen_total", 1.0),
        ("etcd_server_quota_backend_bytes", 2_147_483_648.0),
        ("etcd_mvcc_put_total", 1.0),
        ("etcd_debugging_mvcc_keys_total", 1.0),
        ("etcd_debugging_mvcc_current_revision", 2.0),
        ("etcd_debugging_mvcc_compact_revision", 2.0),
        ("etcd_debugging_mvcc_total_put_size_in_bytes", 6.0),
        ("etcd_debugging_lease_granted_total", 1.0),
        ("etcd_cluster_version{cluster_version=\"3.7\"}", 1.0),
        ("etcd_server_client_requests_total{client_api_version=\"3.7\",type=\"unary\"}", 3.0),
        ("etcd_server_apply_duration_seconds_count{op=\"Put\",success=\"true\",version=\"v3\"}", 1.0),
        ("etcd_server_request_duration_seconds_count{success=\"true\",type=\"Compaction\"}", 1.0),
    ] {
        assert_eq!(member.metric(series), Some(value), "{series}");
    }
    for series in [
        "process_resident_memory_bytes",
        "etcd_mvcc_db_total_size_in_bytes",
        "etcd_mvcc_db_total_size_in_use_in_bytes",
        "etcd_disk_wal_fsync_duration_seconds_count",
        "etcd_disk_wal_write_bytes_total",
        "etcd_disk_backend_commit_duration_seconds_count",
        "etcd_server_proposals_committed_total",
        "etcd_server_proposals_applied_total",
        "etcd_network_client_grpc_received_bytes_total",
        "etcd_network_client_grpc_sent_bytes_total",
        "skeg_metadata_cache_bytes",
    ] {
        assert!(
            member.metric(series).is_some_and(|value| value > 0.0),
            "{series}: {:?}",
            member.metric(series)
        );
    }
}

#[test]
fn a_full_database_is_unhealthy_until_disarmed() {
    let member = Member::start(false, &["--quota-backend-bytes=400000"]);
    let value = "v".repeat(16 << 10);
    let refused = (0..100).find_map(|key| member.call(&["put", &key.to_string(), &value]).err());
    let refused = refused.expect("a quota of 400 kB is not enough for 1.6 MB");
    assert!(refused.contains("database space exceeded"), "{refused}");
    let health = member.get("/health");
    assert!(health.head.starts_with("http/1.1 503"), "{}", health.head);
    assert_eq!(health.body, "{\"health\":\"false\",\"reason\":\"ALARM NOSPACE\"}\n");
    assert!(member.get("/health?exclude=NOSPACE").head.starts_with("http/1.1 200"));
    assert!(member.get("/readyz").head.starts_with("http/1.1 200"), "reads go on");
    assert_eq!(member.metric("etcd_server_health_failures"), Some(1.0));
    member.call(&["alarm", "disarm"]).expect("alarms can be disarmed");
    assert!(member.get("/health").head.starts_with("http/1.1 200"));
}

#[test]
fn slow_calls_are_logged_without_their_content() {
    let member =
        Member::start(false, &["--warning-unary-request-duration=1ns", "--warning-apply-duration=1ns"]);
    member.call(&["put", "secretkey", "secretvalue"]).expect("a put");
    member.call(&["get", "secretkey"]).expect("a get");
    let log = member.log();
    for part in
        ["\"request stats\"", "/etcdserverpb.KV/Put", "/etcdserverpb.KV/Range", "apply request took too long"]
    {
        assert!(log.contains(part), "{part} in {log}");
    }
    assert!(!log.contains("secret"), "{log}");
    assert!(!log.contains("openraft"), "openraft's own chatter is not shown: {log}");
    assert!(member.metric("etcd_server_slow_apply_total").is_some_and(|count| count >= 2.0));
}

#[test]
fn etcdctl_finds_the_memory_that_check_datascale_needs() {
    let member = Member::start(false, &[]);
    let arguments = ["check", "datascale", "--load=s", "--auto-compact"].map(OsStr::new);
    let mut command = member.etcdctl(member.client, &[]);
    let output = command.args(arguments).output().expect("etcdctl starts");
    let text =
        String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert!(text.contains("PASS: Approximate system memory used"), "{text}");
}
