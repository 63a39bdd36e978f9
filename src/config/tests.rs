use std::ffi::OsString;
use std::time::Duration;

use super::source::read_file_text;
use super::{AutoCompaction, Config, FeatureGate, LogLevel, LogOutput, Refusal, Request, check, load};

fn request(arguments: &[&str], environment: &[(&str, &str)]) -> Result<Request, Refusal> {
    load(
        arguments.iter().map(OsString::from),
        environment.iter().map(|(name, value)| (OsString::from(name), OsString::from(value))),
    )
}

fn config(arguments: &[&str]) -> Config {
    match request(arguments, &[]) {
        Ok(Request::Run(config)) => *config,
        other => panic!("{arguments:?}: {other:?}"),
    }
}

#[track_caller]
fn refuses(arguments: &[&str], part: &str) {
    match request(arguments, &[]).and_then(|request| match request {
        Request::Run(config) => config.bootstrap().map(drop),
        _ => Ok(()),
    }) {
        Err(Refusal::Invalid(text)) => assert!(text.contains(part), "{arguments:?}: {text}"),
        other => panic!("{arguments:?}: {other:?}"),
    }
}

#[track_caller]
fn misuses(arguments: &[&str], part: &str) {
    match request(arguments, &[]) {
        Err(Refusal::Usage(text)) => assert!(text.contains(part), "{arguments:?}: {text}"),
        other => panic!("{arguments:?}: {other:?}"),
    }
}

fn file(text: &str) -> Result<Config, String> {
    let given = read_file_text(text)?;
    check::check(&given).map_err(|refusal| refusal.to_string())
}

#[test]
fn defaults_are_etcds() {
    let config = config(&[]);
    assert_eq!(config.member.name, "default");
    assert_eq!(config.member.data_dir.to_str(), Some("default.etcd"));
    assert_eq!(config.member.wal_dir, None);
    assert_eq!(config.member.quota_backend_bytes.map(std::num::NonZero::get), Some(2 << 30));
    assert_eq!(config.member.max_request_bytes, 1_572_864);
    assert_eq!(config.member.watch_progress_notify_interval, Duration::from_secs(600));
    assert_eq!(config.cluster.election_timeout, Duration::from_secs(1));
    assert_eq!(config.member.request_timeout(&config.cluster), Duration::from_secs(7));
    assert_eq!(config.member.auto_compaction, AutoCompaction::Off);
    let member = config.bootstrap().unwrap().local;
    assert_eq!((member.name.as_str(), member.peer_urls[0].as_str()), ("default", "http://localhost:2380"));
}

#[test]
fn flags_are_written_gos_way() {
    for arguments in [
        &["--name=a", "-snapshot-count", "7", "-unsafe-no-fsync"][..],
        &["-name", "a", "--snapshot-count=0x7", "--unsafe-no-fsync=T"],
        &["--name=b", "--name=a", "--snapshot-count=07", "--unsafe-no-fsync=false", "--unsafe-no-fsync"],
    ] {
        let config = config(arguments);
        assert_eq!(config.member.name, "a");
        assert_eq!(config.member.snapshot_count, 7);
        assert!(config.member.unsafe_no_fsync);
    }
    assert_eq!(config(&["--name=a=b"]).member.name, "a=b");
    assert_eq!(config(&["--name", "--"]).member.name, "--", "a value may look like a flag");
}

#[test]
fn bad_syntax_is_misuse() {
    misuses(&["--bogus"], "not defined: -bogus");
    misuses(&["---name=a"], "bad flag syntax: ---name=a");
    misuses(&["--=a"], "bad flag syntax");
    misuses(&["--name"], "needs an argument: -name");
    misuses(&["--snapshot-count", "-1"], "-snapshot-count");
    misuses(&["--snapshot-count", "18446744073709551616"], "out of range");
    misuses(&["--unsafe-no-fsync=maybe"], "-unsafe-no-fsync");
    misuses(&["--listen-client-urls", "localhost:2379"], "-listen-client-urls");
    misuses(&["--initial-cluster-state=old"], "-initial-cluster-state");
    misuses(&["--feature-gates=Nope=true"], "-feature-gates");
    misuses(&["--experimental-corrupt-check-time=1s"], "not defined");
}

#[test]
fn what_comes_first_is_answered_first() {
    assert!(matches!(request(&["--help", "--bogus"], &[]), Ok(Request::Help(_))));
    assert!(matches!(request(&["--version", "-h"], &[]), Ok(Request::Help(_))));
    assert!(matches!(request(&["--version", "--name=a"], &[]), Ok(Request::Version)));
    misuses(&["--bogus", "--help"], "bogus");
    refuses(&["--version", "extra"], "\"extra\" is not a valid flag");
    refuses(&["--", "--version"], "\"--version\" is not a valid flag");
    refuses(&["-"], "\"-\" is not a valid flag");
    refuses(&[""], "\"\" is not a valid flag");
}

#[test]
fn arguments_that_are_not_utf8_are_misuse() {
    use std::os::unix::ffi::OsStringExt;
    for bytes in [&b"--name=\xff"[..], b"--\xff=1"] {
        let refusal = load([OsString::from_vec(bytes.to_vec())], []).unwrap_err();
        assert!(matches!(refusal, Refusal::Usage(_)), "{refusal:?}");
    }
}

#[test]
fn variables_stand_for_flags() {
    let Ok(Request::Run(config)) = request(
        &["--name=a"],
        &[
            ("ETCD_SNAPSHOT_COUNT", "9"),
            ("ETCD_WAL_DIR", ""),
            ("ETCD_VERSION", "3.7"),
            ("ETCD_NONSENSE", "1"),
            ("HOME", "/"),
        ],
    ) else {
        panic!("refused");
    };
    assert_eq!(config.member.snapshot_count, 9);
    assert_eq!(config.member.wal_dir, None);
    let warnings: Vec<_> = config.notices.iter().filter(|notice| notice.text.contains("ETCD_")).collect();
    assert_eq!(warnings.len(), 1);
    assert!(warnings[0].text.contains("ETCD_NONSENSE"));
}

#[test]
fn a_variable_beside_its_flag_is_refused() {
    let refusal = request(&["--name=a"], &[("ETCD_NAME", "")]).unwrap_err();
    assert!(
        matches!(&refusal, Refusal::Invalid(text) if text.contains("ETCD_NAME") && text.contains("--name")),
        "{refusal}"
    );
    let refusal = request(&[], &[("ETCD_SNAPSHOT_COUNT", "x")]).unwrap_err();
    assert!(matches!(&refusal, Refusal::Invalid(text) if text.contains("ETCD_SNAPSHOT_COUNT")), "{refusal}");
}

#[test]
fn what_does_not_fit_together_is_refused() {
    refuses(&["--heartbeat-interval=0"], "--heartbeat-interval");
    refuses(&["--election-timeout=0"], "--election-timeout");
    refuses(&["--election-timeout=499"], "--election-timeout[499ms]");
    refuses(&["--election-timeout=50001"], "too long");
    refuses(&["--heartbeat-interval=18446744073709551615"], "--election-timeout");
    refuses(&["--listen-client-urls=http://127.0.0.1:1"], "--advertise-client-urls is required");
    refuses(&["--listen-peer-urls=http://example.com:1"], "--listen-peer-urls: expected IP");
    refuses(&["--listen-metrics-urls=http://:1"], "--listen-metrics-urls");
    refuses(&["--advertise-client-urls=http://:1"], "--advertise-client-urls");
    refuses(&["--initial-cluster=a=http://h:1", "--discovery-srv=d"], "--initial-cluster");
    refuses(&["--discovery-token=t"], "--discovery-endpoints");
    refuses(&["--discovery-srv=d", "--discovery-endpoints=e", "--discovery-token=t"], "--discovery-srv");
    refuses(&["--discovery-fallback=proxy"], "--discovery-fallback");
    refuses(&["--auto-compaction-mode=never"], "--auto-compaction-mode");
    refuses(&["--auto-compaction-retention=soon"], "--auto-compaction-retention");
    refuses(&["--compact-hash-check-time=0"], "--compact-hash-check-time");
    refuses(&["--feature-gates=LeaseCheckpointPersist=true"], "LeaseCheckpointPersist");
    refuses(&["--tls-min-version=TLS1.1"], "--tls-min-version");
    refuses(&["--tls-min-version=TLS1.3", "--tls-max-version=TLS1.2"], "--tls-max-version");
    refuses(&["--logger=capnslog"], "--logger");
    refuses(&["--log-level=loud"], "--log-level");
    refuses(&["--log-format=xml"], "--log-format");
    refuses(&["--log-outputs=default,stderr"], "--log-outputs");
    for url in ["nothing:x", "http://x/y", "file:x.log", "file://host/x", "file:///x?y", "stdout,a:b"] {
        refuses(&[&format!("--log-outputs={url}")], "--log-outputs");
    }
    refuses(&["--enable-log-rotation"], "--log-outputs");
    refuses(&["--listen-peer-urls=https://127.0.0.1:1"], "TLS is not served yet");
    refuses(&["--skeg-nospace-low-water=100"], "--skeg-nospace-low-water");
    refuses(&["--skeg-watch-ring-bytes=0"], "--skeg-watch-ring-bytes");
    let same = ["--listen-client-urls=http://127.0.0.1:1", "--advertise-client-urls=http://127.0.0.1:1"];
    refuses(&[same[0], same[1], "--listen-client-http-urls=http://localhost:1"], "--listen-client-http-urls");
}

#[test]
fn the_first_membership_is_checked() {
    refuses(&["--initial-cluster=b=http://localhost:2380"], "--name \"default\"");
    refuses(&["--initial-cluster="], "--initial-cluster");
    refuses(
        &["--initial-advertise-peer-urls=http://10.0.0.1:2380"],
        "missing from --initial-advertise-peer-urls",
    );
    refuses(&["--initial-cluster=default"], "--initial-cluster");
    refuses(&["--name="], "--name \"\"");
    refuses(&["--name=a,b"], "--initial-cluster");
    refuses(&["--initial-cluster=default=http://localhost:2380,b=http://localhost:2380"], "duplicate");
    let two = config(&["--initial-cluster=default=http://localhost:2380,b=http://h:2380"]);
    assert_eq!(two.bootstrap().unwrap().members.len(), 2);
    let urls = "http://10.0.0.1:2380,http://10.0.0.2:2380";
    let config = config(&["--name=a", &format!("--initial-advertise-peer-urls={urls}")]);
    assert_eq!(config.bootstrap().unwrap().local.peer_urls.len(), 2, "the cluster follows the name");
}

#[test]
fn zero_often_means_the_default() {
    let config = config(&[
        "--snapshot-count=0",
        "--snapshot-catchup-entries=0",
        "--quota-backend-bytes=-1",
        "--grpc-keepalive-interval=0",
        "--grpc-keepalive-timeout=-1s",
        "--watch-progress-notify-interval=1ms",
    ]);
    assert_eq!(config.member.snapshot_count, 10_000);
    assert_eq!(config.member.snapshot_catchup_entries, 5_000);
    assert_eq!(config.member.quota_backend_bytes, None);
    assert_eq!((config.member.keepalive.interval, config.member.keepalive.timeout), (None, None));
    assert_eq!(config.member.watch_progress_notify_interval, Duration::from_millis(100));
}

#[test]
fn compaction_counts_hours_times_or_revisions() {
    let auto = |arguments: &[&str]| config(arguments).member.auto_compaction;
    assert_eq!(
        auto(&["--auto-compaction-retention=2"]),
        AutoCompaction::Periodic(Duration::from_secs(7_200))
    );
    assert_eq!(auto(&["--auto-compaction-retention=5m"]), AutoCompaction::Periodic(Duration::from_secs(300)));
    let revisions = auto(&["--auto-compaction-mode=revision", "--auto-compaction-retention=1000"]);
    assert!(matches!(revisions, AutoCompaction::Revision(count) if count.get() == 1000));
}

#[test]
fn settings_without_effect_say_so_once_they_are_used() {
    let told = |arguments: &[&str]| -> Vec<&str> {
        config(arguments)
            .notices
            .iter()
            .filter(|notice| notice.level == LogLevel::Warn && notice.text.contains("setting"))
            .map(|notice| notice.flag)
            .collect()
    };
    assert_eq!(
        told(&["--cert-file=c", "--client-cert-auth=false", "--max-wals=3"]),
        ["max-wals", "cert-file"]
    );
    assert!(told(&["--pre-vote=true"]).is_empty());
    assert_eq!(told(&["--vv"]), ["vv"]);
}

#[test]
fn log_outputs_are_places() {
    let outputs = |flag: &str| config(&[flag]).log.outputs;
    assert_eq!(outputs("--log-outputs=stdout,stderr,stdout"), [LogOutput::Stderr, LogOutput::Stdout]);
    assert_eq!(outputs("--log-outputs=/var/log/s"), [LogOutput::File("/var/log/s".into())]);
    for name in ["file:///var/log/s", "file://localhost/var/log/s"] {
        assert_eq!(outputs(&format!("--log-outputs={name}")), [LogOutput::File("/var/log/s".into())]);
    }
    assert_eq!(outputs("--log-outputs=/a/b:c"), [LogOutput::File("/a/b:c".into())]);
    assert!(outputs("--log-outputs=/dev/null,stderr").is_empty());
    assert_eq!(config(&["--log-level=WARN"]).log.level, LogLevel::Warn);
}

#[test]
fn a_file_sets_what_flags_set() {
    let config = file(
        "name: '17'\nsnapshot-count: 3\nheartbeat-interval: 10\ngrpc-keepalive-interval: 5000000000\n\
         log-outputs: [stderr]\nfeature-gates: LeaseCheckpoint=true\nsocket-options:\n  reuse-port: true\n\
         client-transport-security:\n  cert-file: c\nunknown-key: 1\nWal-Dir: w\n\
         listen-client-urls: http://127.0.0.1:1,unix://localhost:m0\n",
    )
    .unwrap();
    assert_eq!(config.member.name, "17");
    assert_eq!(config.member.snapshot_count, 3);
    assert_eq!(config.member.keepalive.interval, Some(Duration::from_secs(5)));
    assert!(config.member.socket_reuse_port);
    assert!(config.member.feature_gates.enabled(FeatureGate::LeaseCheckpoint));
    assert_eq!(config.member.wal_dir.as_deref(), Some("w".as_ref()));
    assert_eq!(config.member.listen_client_urls.len(), 2);
    assert!(config.notices.iter().any(|notice| notice.flag == "cert-file"));
    assert_eq!(file("{\"name\": \"j\"}").unwrap().member.name, "j");
    assert_eq!(file("").unwrap().member.name, "default");
}

/// A few lines that stand for a billion values.
const BOMB: &str = "a: &a [x,x,x,x,x,x,x,x,x]\nb: &b [*a,*a,*a,*a,*a,*a,*a,*a,*a]\nc: &c [*b,*b,*b,*b,*b,*b,*b,*b,*b]\n\
                    d: &d [*c,*c,*c,*c,*c,*c,*c,*c,*c]\ne: &e [*d,*d,*d,*d,*d,*d,*d,*d,*d]\nf: &f [*e,*e,*e,*e,*e,*e,*e,*e,*e]\n\
                    g: &g [*f,*f,*f,*f,*f,*f,*f,*f,*f]\nh: &h [*g,*g,*g,*g,*g,*g,*g,*g,*g]\n";

#[test]
fn a_file_is_strict_about_kinds() {
    for (text, part) in [
        ("name: 17", "--name"),
        ("snapshot-count: \"3\"", "--snapshot-count"),
        ("snapshot-count: -3", "--snapshot-count"),
        ("grpc-keepalive-interval: 5s", "--grpc-keepalive-interval"),
        ("unsafe-no-fsync: 1", "--unsafe-no-fsync"),
        ("log-outputs: stderr", "--log-outputs"),
        ("listen-peer-urls: [a]", "--listen-peer-urls"),
        ("peer-transport-security: yes please", "peer-transport-security"),
        ("initial-cluster-state: old", "--initial-cluster-state"),
        ("[1, 2]", "outermost"),
        ("name: [", ""),
        ("a: *b", ""),
        (BOMB, "repetition"),
    ] {
        let error = file(text).unwrap_err();
        assert!(error.contains(part), "{text}: {error}");
    }
}

#[test]
fn with_a_file_nothing_else_counts() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("skeg.yaml");
    std::fs::write(&path, "name: from-file\n").unwrap();
    let path = path.to_str().unwrap();
    for (arguments, environment) in [
        (&["--config-file", path, "--name=flag", "--heartbeat-interval=0"][..], &[("ETCD_NAME", "env")][..]),
        (&["--name=flag"], &[("ETCD_CONFIG_FILE", path)]),
    ] {
        let Ok(Request::Run(config)) = request(arguments, environment) else { panic!("{arguments:?}") };
        assert_eq!(config.member.name, "from-file");
        assert_eq!(config.cluster.heartbeat_interval, Duration::from_millis(100));
    }
    refuses(&["--config-file=/nowhere/at/all"], "--config-file");
    refuses(&["--config-file=/dev/zero"], "more than");
}

#[test]
fn a_listener_open_to_all_advertises_an_address() {
    let config = config(&["--listen-peer-urls=http://0.0.0.0:1234"]);
    let advertised = &config.member.initial_advertise_peer_urls[0];
    let detected = config.notices.iter().any(|notice| notice.text.starts_with("advertising the detected"));
    assert_eq!(detected, advertised.port() == "1234");
    assert_eq!(!detected, advertised.as_str() == "http://localhost:2380");
}
