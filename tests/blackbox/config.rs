//! Settings, compared with a stock etcd 3.7.3: the same command line, environment or file must be taken or refused alike,
//! with the same exit status, and our refusal must name the flag.
//!
//! No server is started: every command line ends in `--version`, or holds a mistake. To learn that all else was accepted,
//! a mistake is added that etcd checks last ([`LAST_MISTAKE`]).

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::path::Path;
use std::sync::Mutex;

use crate::programs::{Finished, etcd, for_each, run, skeg};

/// The contradiction that etcd looks for after all others.
const LAST_MISTAKE: [&str; 2] = ["--tls-min-version=TLS1.3", "--cipher-suites=X"];

/// Flags that let etcd start anywhere without meeting another etcd; a later flag overrides them.
const NOWHERE: [&str; 3] = [
    "--listen-client-urls=http://127.0.0.1:0",
    "--advertise-client-urls=http://127.0.0.1:0",
    "--listen-peer-urls=http://127.0.0.1:0",
];

/// Both programs' answers to one command line.
struct Answers {
    etcd: Finished,
    skeg: Finished,
}

fn strings(arguments: &[&str]) -> Vec<OsString> {
    arguments.iter().map(OsString::from).collect()
}

fn ask(arguments: &[OsString], environment: &[(&str, &str)]) -> Answers {
    let directory = tempfile::tempdir().expect("a directory for the test");
    ask_in(directory.path(), arguments, environment)
}

fn ask_in(directory: &Path, arguments: &[OsString], environment: &[(&str, &str)]) -> Answers {
    let ask = |program: &Path| run(program, directory, arguments.iter().cloned(), environment);
    Answers { etcd: ask(etcd()), skeg: ask(skeg()) }
}

/// Fails unless both refuse with `code`, and our words hold `names`.
fn check_refusal(answers: &Answers, code: i32, names: &str, what: &str) {
    let Answers { etcd, skeg } = answers;
    assert_eq!(etcd.code, Some(code), "{what}: etcd: {}{}", etcd.stdout, etcd.stderr);
    assert_eq!(skeg.code, Some(code), "{what}: skeg: {}{}", skeg.stdout, skeg.stderr);
    assert!(skeg.stderr.contains(names), "{what}: {names:?} is not named: {}", skeg.stderr);
    assert!(!skeg.stderr.contains("panicked"), "{what}: {}", skeg.stderr);
}

fn flag_names(program: &Path) -> Vec<String> {
    let directory = tempfile::tempdir().expect("a directory for the test");
    let help = run(program, directory.path(), strings(&["--help"]), &[]);
    assert_eq!(help.code, Some(0), "{}", help.stderr);
    assert!(help.stderr.starts_with("Usage:"), "{}", help.stderr);
    let names = help.stdout.lines().filter_map(|line| line.strip_prefix("  --")?.split(' ').next());
    let mut names: Vec<String> = names.map(str::to_owned).collect();
    names.sort();
    names
}

#[test]
fn help_lists_every_flag_of_etcd() {
    // In etcd's help, but refused by its parser.
    let gone = ["discovery", "discovery-proxy"];
    let theirs: Vec<String> =
        flag_names(etcd()).into_iter().filter(|name| !gone.contains(&name.as_str())).collect();
    let ours: Vec<String> =
        flag_names(skeg()).into_iter().filter(|name| !name.starts_with("skeg-")).collect();
    assert_eq!(ours, theirs);
    check_refusal(&ask(&strings(&["--discovery=x"]), &[]), 2, "-discovery", "--discovery");
}

#[test]
fn the_version_has_etcds_lines() {
    for arguments in [&["--version"][..], &["-version"], &["--version=true"], &["--name=a", "--version"]] {
        let Answers { etcd, skeg } =
            ask(&strings(arguments), &[("ETCD_NAME", "shadowed, but never looked at")]);
        assert_eq!((etcd.code, skeg.code), (Some(0), Some(0)), "{arguments:?}");
        let first = |finished: &Finished| finished.stdout.lines().next().map(str::to_owned);
        assert_eq!(first(&etcd), first(&skeg));
        let labels = |finished: &Finished| -> Vec<String> {
            finished.stdout.lines().filter_map(|line| Some(line.split_once(": ")?.0.to_owned())).collect()
        };
        assert_eq!(labels(&skeg)[..4], labels(&etcd));
    }
}

/// Every flag with every hostile value: read or refused alike. The flags that we accept go to one etcd together.
#[test]
fn every_flag_reads_hostile_values_alike() {
    let flags = flag_names(skeg()).into_iter().filter(|name| !name.starts_with("skeg-")).collect::<Vec<_>>();
    let long = "9".repeat(1 << 12);
    let values =
        ["", "-1", "0x1F", "1_0", "18446744073709551616", "4294967296", "1.5h", "TRUE", "new", " ", &long];
    for value in values {
        let accepted = Mutex::new(Vec::new());
        for_each(&flags, |flag| {
            let arguments = strings(&[&format!("--{flag}={value}"), "--version"]);
            let directory = tempfile::tempdir().expect("a directory for the test");
            let ours = run(skeg(), directory.path(), arguments.iter().cloned(), &[]);
            if ours.code == Some(0) {
                accepted.lock().expect("no panic under this lock").push(flag.clone());
                return;
            }
            let theirs = run(etcd(), directory.path(), arguments, &[]);
            let shown = &value[..value.len().min(30)];
            check_refusal(
                &Answers { etcd: theirs, skeg: ours },
                2,
                &format!("-{flag}"),
                &format!("--{flag}={shown:?}"),
            );
        });
        let accepted = accepted.into_inner().expect("no panic under this lock");
        let mut arguments: Vec<String> = accepted.iter().map(|flag| format!("--{flag}={value}")).collect();
        arguments.push("--version".to_owned());
        let directory = tempfile::tempdir().expect("a directory for the test");
        let theirs = run(etcd(), directory.path(), arguments.iter().map(OsString::from), &[]);
        let shown = theirs.stderr.lines().next().unwrap_or_default();
        assert_eq!(theirs.code, Some(0), "etcd refuses what we accept: {}", &shown[..shown.len().min(200)]);
    }
}

#[test]
fn bad_syntax_ends_with_status_2() {
    let cases: &[(&[&str], &str)] = &[
        (&["--bogus"], "-bogus"),
        (&["-bogus=1", "--help"], "-bogus"),
        (&["---name=a"], "---name=a"),
        (&["--=a"], "--=a"),
        (&["-=a"], "-=a"),
        (&["--name"], "-name"),
        (&["--name=a", "--wal-dir"], "-wal-dir"),
        (&["--unsafe-no-fsync=yes"], "-unsafe-no-fsync"),
        (&["--snapshot-count", "--name"], "-snapshot-count"),
        (&["--snapshot-count=1", "--snapshot-count=x"], "-snapshot-count"),
        (&["--NAME=a"], "-NAME"),
        (&["--grpc-keepalive-interval=5"], "-grpc-keepalive-interval"),
        (&["--listen-client-urls=127.0.0.1:2379"], "-listen-client-urls"),
        (&["--listen-client-urls=http://127.0.0.1:2379,"], "-listen-client-urls"),
        (&["--listen-peer-urls=http://127.0.0.1"], "-listen-peer-urls"),
        (&["--listen-peer-urls=http://::1:2380"], "-listen-peer-urls"),
        (&["--advertise-client-urls=http://h:1/path"], "-advertise-client-urls"),
        (&["--advertise-client-urls=ftp://h:1"], "-advertise-client-urls"),
        (&["--initial-cluster-state=old"], "-initial-cluster-state"),
        (&["--discovery-fallback=never"], "-discovery-fallback"),
        (&["--v2-deprecation=not-yet"], "-v2-deprecation"),
        (&["--feature-gates=Bogus=true"], "-feature-gates"),
        (&["--feature-gates=LeaseCheckpoint"], "-feature-gates"),
        (&["--feature-gates=LeaseCheckpoint=on"], "-feature-gates"),
        (&["--max-concurrent-streams=-1"], "-max-concurrent-streams"),
        (&["--cors=x"], "-cors"),
        (&["--experimental-corrupt-check-time=1s"], "-experimental-corrupt-check-time"),
    ];
    for_each(cases, |(arguments, names)| {
        check_refusal(&ask(&strings(arguments), &[]), 2, names, &format!("{arguments:?}"));
    });
}

/// URLs that flags hold, with the answers of both; the list is what Go's URL parser is known to be particular about.
#[test]
fn urls_are_read_alike() {
    let urls = [
        "http://[::1]:2379",
        "http://[::1]",
        "http://[::1:2379",
        "HTTP://H:1",
        "http://u@h:1",
        "http://h:1?x",
        "http://h:1#f",
        "http://h:99999",
        "http://h:-1",
        "http://h:",
        "http://:2379",
        "http://",
        "http:h:1",
        "http:///x",
        "http://h:1/",
        "http://a b:1",
        "http://a_b:1",
        "http://h%41:1",
        " http://h:1 ",
        "unix:///abs/path",
        "unix:/abs",
        "unix:rel",
        "unix://rel/x",
        "unix://localhost:12",
        "unixs://x",
        "://h:1",
        "h",
        "*",
        "http://h:1,http://h:1",
        "http://h:1,,http://h:2",
    ];
    for_each(&urls, |url| {
        let answers = ask(&strings(&[&format!("--advertise-client-urls={url}"), "--version"]), &[]);
        assert_eq!(
            answers.skeg.code, answers.etcd.code,
            "{url:?}: {} / {}",
            answers.skeg.stderr, answers.etcd.stderr
        );
    });
}

#[test]
fn contradictions_end_with_status_1() {
    let cases: &[(&[&str], &str)] = &[
        (&["extra"], "extra"),
        (&["--name=a", "extra", "--bogus"], "extra"),
        (&["--", "--version"], "--version"),
        (&["-"], "-"),
        (&[""], "\\\"\\\" is not a valid flag"),
        (&["--unsafe-no-fsync", "false"], "false"),
        (&["--version=false", "--version", "x"], "x"),
        (&["--heartbeat-interval=0"], "--heartbeat-interval"),
        (&["--election-timeout=0"], "--election-timeout"),
        (&["--election-timeout=499"], "--election-timeout"),
        (&["--election-timeout=50001"], "--election-timeout"),
        (&["--election-timeout=18446744073709551615"], "--election-timeout"),
        (&["--listen-peer-urls=http://example.com:2380"], "--listen-peer-urls"),
        (&["--listen-client-urls=http://example.com:2379"], "--listen-client-urls"),
        (&["--listen-client-urls=http://:2379"], "--listen-client-urls"),
        (&["--listen-client-http-urls=http://h:1"], "--listen-client-http-urls"),
        (&["--listen-metrics-urls=http://h:1"], "--listen-metrics-urls"),
        (&["--initial-advertise-peer-urls=http://:1"], "--initial-advertise-peer-urls"),
        (&["--advertise-client-urls=http://:1"], "--advertise-client-urls"),
        (&["--initial-cluster=a=http://127.0.0.1:1", "--discovery-srv=d"], "--initial-cluster"),
        (&["--discovery-token=t"], "--discovery-endpoints"),
        (&["--discovery-endpoints=http://127.0.0.1:1"], "--discovery-token"),
        (&["--discovery-endpoints=", "--discovery-token=t"], "--discovery-endpoints"),
        (&["--discovery-fallback=proxy"], "--discovery-fallback"),
        (&["--auto-compaction-mode=never"], "--auto-compaction-mode"),
        (&["--auto-compaction-mode="], "--auto-compaction-mode"),
        (&["--auto-compaction-retention=soon"], "--auto-compaction-retention"),
        (&["--auto-compaction-retention=-1"], "--auto-compaction-retention"),
        (&["--compact-hash-check-time=0"], "--compact-hash-check-time"),
        (&["--feature-gates=LeaseCheckpointPersist=true"], "LeaseCheckpointPersist"),
        (&["--tls-min-version=TLS1.1"], "--tls-min-version"),
        (&["--tls-min-version=TLS1.3", "--tls-max-version=TLS1.2"], "--tls-max-version"),
        (&["--tls-min-version=TLS1.3", "--cipher-suites=X"], "--cipher-suites"),
        (&["--logger=capnslog"], "--logger"),
        (&["--logger="], "--logger"),
        (&["--log-format=xml"], "--log-format"),
        (&["--log-outputs=default,stderr"], "--log-outputs"),
        (&["--log-outputs=systemd/journal,stderr"], "--log-outputs"),
        (&["--log-outputs=systemd/journal"], "--log-outputs"),
        (&["--log-outputs=/nowhere/at/all"], "--log-outputs"),
        (&["--log-outputs="], "--log-outputs"),
        (&["--enable-log-rotation"], "--log-outputs"),
        (
            &["--enable-log-rotation", "--log-outputs=a", "--log-rotation-config-json={"],
            "--log-rotation-config-json",
        ),
        (&["--enable-log-rotation", "--log-outputs=a,b"], "--log-outputs"),
        (&["--config-file=/nowhere/at/all"], "--config-file"),
        (&["--config-file=."], "--config-file"),
        (&["--initial-cluster=b=http://127.0.0.1:2380"], "--initial-cluster"),
        (&["--initial-cluster="], "--initial-cluster"),
        (&["--initial-cluster=default"], "--initial-cluster"),
        (&["--name="], "--name"),
        (&["--name=a,b"], "--initial-cluster"),
        (&["--name=a=b"], "--initial-cluster"),
        (&["--initial-cluster=default=x"], "--initial-cluster"),
        (&["--initial-advertise-peer-urls=http://127.0.0.1:1"], "--initial-advertise-peer-urls"),
        (&["--initial-cluster=default=http://localhost:2380,b=http://localhost:2380"], "--initial-cluster"),
        (&["--listen-client-urls=https://127.0.0.1:0"], "--listen-client-urls"),
        (&["--listen-client-http-urls=https://127.0.0.1:0"], "--listen-client-http-urls"),
    ];
    for_each(cases, |(arguments, names)| {
        let arguments = [&NOWHERE[..], arguments].concat();
        check_refusal(&ask(&strings(&arguments), &[]), 1, names, &format!("{arguments:?}"));
    });
}

/// `--advertise-client-urls` must come with `--listen-client-urls`, from whichever source.
#[test]
fn listening_for_clients_needs_an_advertised_url() {
    let listen = "--listen-client-urls=http://127.0.0.1:0";
    check_refusal(&ask(&strings(&[listen]), &[]), 1, "--advertise-client-urls", listen);
    check_refusal(&ask(&strings(&["--listen-client-urls="]), &[]), 1, "--advertise-client-urls", "empty");
    let environment = [("ETCD_LISTEN_CLIENT_URLS", "http://127.0.0.1:0")];
    check_refusal(&ask(&[], &environment), 1, "--advertise-client-urls", "variable");
}

/// What etcd accepts, we accept: only the mistake that is checked last is refused.
#[test]
fn what_etcd_accepts_is_accepted() {
    let cases: &[&[&str]] = &[
        &[],
        &["--name", "--wal-dir", "--snapshot-count", "0x10"],
        &["-log-level", "warn", "-max-txn-ops=0", "-max-request-bytes", "18446744073709551615"],
        &["--election-timeout=50000", "--heartbeat-interval=10000"],
        &["--quota-backend-bytes=-1", "--quota-backend-bytes=9223372036854775807"],
        &["--listen-peer-urls=http://localhost:0", "--initial-advertise-peer-urls=http://example.com:0"],
        &["--listen-client-urls=unix:///tmp/x,unix://rel/x", "--advertise-client-urls=unix://localhost:12"],
        &["--listen-client-urls=http://[::1]:2379,http://0.0.0.0:2379"],
        &[
            "--grpc-keepalive-min-time=-1s",
            "--grpc-keepalive-interval=0",
            "--grpc-keepalive-timeout=1h2m3.5s",
        ],
        &["--log-outputs=stderr,stdout,stderr", "--log-format=console", "--log-level=ERROR"],
        &["--log-outputs=/dev/null,stderr"],
        &["--enable-log-rotation", "--log-outputs=rotated"],
        &["--auto-compaction-mode=revision", "--auto-compaction-retention=1000"],
        &["--auto-compaction-retention=5m"],
        &["--feature-gates=AllAlpha=true,,AllBeta=f", "--feature-gates", " InitialCorruptCheck = T "],
        &["--feature-gates=LeaseCheckpoint=true,LeaseCheckpointPersist=true"],
        &["--initial-cluster=a=http://127.0.0.1:1,a=http://127.0.0.1:2,b=http://127.0.0.1:3"],
        &["--initial-cluster-state=existing", "--initial-cluster-token="],
        &[
            "--enable-pprof",
            "--metrics=extensive",
            "--metrics=anything",
            "--pre-vote=0",
            "--strict-reconfig-check=F",
        ],
        &["--cors=*", "--host-whitelist=a,b", "--cors=http://a:1,https://b:2"],
        &["--config=x", "--force", "--snapshot=false", "--vv", "--v=9"],
        &["--max-snapshots=1", "--max-wals=0", "--v2-deprecation=gone,write-only"],
        &["--watch-progress-notify-interval=-5s", "--watch-progress-notify-interval=1ns"],
        &[
            "--backend-batch-interval=1s",
            "--backend-batch-limit=-5",
            "--backend-bbolt-freelist-type=anything",
        ],
        &["--cert-file=nowhere", "--client-cert-auth", "--peer-auto-tls", "--self-signed-cert-validity=0"],
        &["--auth-token=jwt,nonsense", "--bcrypt-cost=99", "--auth-token-ttl=0"],
        &["--unsafe-no-fsync", "--unsafe-no-fsync=false", "--data-dir=", "--wal-dir="],
        &["--compaction-batch-limit=-1", "--compaction-sleep-interval=-1s", "--max-learners=-3"],
        &["--raft-read-timeout=1ms", "--raft-write-timeout=-1h", "--downgrade-check-time=0s"],
        &["--discovery-dial-timeout=0", "--discovery-user=u", "--discovery-password=p"],
    ];
    for_each(cases, |arguments| {
        let arguments = [&NOWHERE[..], arguments, &LAST_MISTAKE].concat();
        // Half of the lines log to places of their own, so the mistake is looked for where both can be expected to put it.
        let answers = ask(&strings(&arguments), &[]);
        assert_eq!((answers.etcd.code, answers.skeg.code), (Some(1), Some(1)), "{arguments:?}");
        let theirs = format!("{}{}", answers.etcd.stdout, answers.etcd.stderr);
        assert!(theirs.contains("cipher suites") || hides_log(&arguments), "{arguments:?}: etcd: {theirs}");
        assert!(answers.skeg.stderr.contains("--cipher-suites"), "{arguments:?}: {}", answers.skeg.stderr);
    });
}

/// etcd writes its refusal into the log that was asked for; we write it to standard error.
fn hides_log(arguments: &[&str]) -> bool {
    arguments
        .iter()
        .any(|argument| argument.starts_with("--log-outputs=") || argument.starts_with("--log-level="))
}

/// A name and a path may hold any bytes in etcd; here every value is UTF-8. Neither accepts such a flag name.
#[test]
fn bytes_that_are_no_text_are_refused() {
    let flag = OsString::from_vec(b"--\xff\xfe=1".to_vec());
    check_refusal(&ask(&[flag], &[]), 2, "not defined", "a flag of bytes");
    let positional = OsString::from_vec(b"\xff".to_vec());
    check_refusal(&ask(&[positional], &[]), 1, "is not a valid flag", "an argument of bytes");
    let directory = tempfile::tempdir().expect("a directory for the test");
    let value = OsString::from_vec(b"--name=\xff".to_vec());
    let skeg = run(skeg(), directory.path(), [value, OsString::from("--version")], &[]);
    assert_eq!(skeg.code, Some(2), "{}", skeg.stderr);
    assert!(skeg.stderr.contains("-name: not UTF-8"), "{}", skeg.stderr);
}

#[test]
fn variables_are_taken_or_refused_alike() {
    type Variables = &'static [(&'static str, &'static str)];
    let cases: &[(Variables, &[&str], &str)] = &[
        (&[("ETCD_NAME", "a")], &["--name=a"], "ETCD_NAME"),
        (&[("ETCD_NAME", "")], &["--name=a"], "ETCD_NAME"),
        (&[("ETCD_SNAPSHOT_COUNT", "x")], &[], "ETCD_SNAPSHOT_COUNT"),
        (&[("ETCD_SNAPSHOT_COUNT", "10 # many")], &[], "ETCD_SNAPSHOT_COUNT"),
        (&[("ETCD_UNSAFE_NO_FSYNC", "yes")], &[], "ETCD_UNSAFE_NO_FSYNC"),
        (&[("ETCD_LISTEN_PEER_URLS", "127.0.0.1:1")], &[], "ETCD_LISTEN_PEER_URLS"),
        (&[("ETCD_HEARTBEAT_INTERVAL", "0")], &[], "--heartbeat-interval"),
        (&[("ETCD_CONFIG_FILE", "/nowhere/at/all")], &[], "--config-file"),
        (&[("ETCD_FEATURE_GATES", "Bogus=true")], &[], "ETCD_FEATURE_GATES"),
        // Accepted: the last mistake is what is left.
        (
            &[("ETCD_NAME", ""), ("ETCD_BOGUS", "1"), ("ETCD_VERSION", "true")],
            &LAST_MISTAKE,
            "--cipher-suites",
        ),
        (&[("ETCD_TLS_MIN_VERSION", "TLS1.3"), ("ETCD_CIPHER_SUITES", "X")], &[], "--cipher-suites"),
        (&[("ETCD_VV", "9"), ("ETCD_MAX_WALS", "0x5"), ("etcd_name", "a")], &LAST_MISTAKE, "--cipher-suites"),
    ];
    for_each(cases, |(environment, arguments, names)| {
        let arguments = [&NOWHERE[..], arguments].concat();
        check_refusal(&ask(&strings(&arguments), environment), 1, names, &format!("{environment:?}"));
    });
}

/// A file of one odd setting, and a mistake that only shows when all of the file could be read.
#[test]
fn files_are_taken_or_refused_alike() {
    const SENTINEL: &str = "heartbeat-interval: 0\n";
    let taken = [
        "",
        "# nothing\n",
        "name: '17'\n",
        "name:\n",
        "unknown-key: [1, 2]\n",
        "Name: a\nWAL-DIR: w\n",
        "name: a\nname: b\n",
        "grpc-keepalive-interval: 5000000000\n",
        "quota-backend-bytes: -5\n",
        "max-concurrent-streams: 4294967295\n",
        "log-outputs: [stderr, stderr]\n",
        "listen-client-urls: http://127.0.0.1:0,unix:///tmp/x\n",
        "listen-client-urls: ''\n",
        "cors: ''\nhost-whitelist: a,b\n",
        "feature-gates: LeaseCheckpoint=true\n",
        "client-transport-security:\n  cert-file: a\n  client-cert-auth: true\n  allowed-hostname: [a]\n",
        "peer-transport-security: {cert-file: a, allowed-cn: [a]}\n",
        "client-transport-security:\n",
        "socket-options: {reuse-port: true, reuse-address: false}\n",
        "discovery-config: {client: {dial-timeout: 5, secure: {cert: c}, auth: {username: u}}}\n",
        "cipher-suites: [A, B]\n",
        "initial-cluster-state: ''\n",
        "v2-deprecation: anything\nmax-snapshots: 3\n",
        "unsafe-no-fsync: true\n",
        "discovery-fallback: proxy\nclient-crl-file: x\nraft-read-timeout: 5s\nskeg: 1\n",
    ];
    for_each(&taken, |text| {
        let answers = ask_file(&format!("{text}{SENTINEL}"));
        check_refusal(&answers, 1, "--heartbeat-interval", text);
        assert!(
            answers.etcd.stderr.contains("--heartbeat-interval must be"),
            "{text}: {}",
            answers.etcd.stderr
        );
    });
    let refused = [
        ("name: 17\n", "--name"),
        ("name: true\n", "--name"),
        ("snapshot-count: '3'\n", "--snapshot-count"),
        ("snapshot-count: -3\n", "--snapshot-count"),
        ("snapshot-count: 1.5\n", "--snapshot-count"),
        ("snapshot-count: 18446744073709551616\n", "snapshot-count"),
        ("grpc-keepalive-interval: 5s\n", "--grpc-keepalive-interval"),
        ("unsafe-no-fsync: 'true'\n", "--unsafe-no-fsync"),
        ("unsafe-no-fsync: 1\n", "--unsafe-no-fsync"),
        ("max-concurrent-streams: 4294967296\n", "--max-concurrent-streams"),
        ("log-outputs: stderr\n", "--log-outputs"),
        ("name: [a]\n", "--name"),
        ("listen-peer-urls: [http://127.0.0.1:0]\n", "--listen-peer-urls"),
        ("listen-peer-urls: 127.0.0.1:0\n", "--listen-peer-urls"),
        ("listen-peer-urls: http://example.com:0\n", "--listen-peer-urls"),
        ("peer-transport-security: x\n", "peer-transport-security"),
        ("client-transport-security: {cert-file: [a]}\n", "--cert-file"),
        ("initial-cluster-state: old\n", "--initial-cluster-state"),
        ("feature-gates: Bogus=true\n", "--feature-gates"),
        ("auto-compaction-mode: never\n", "--auto-compaction-mode"),
        ("- a\n- b\n", "--config-file"),
        ("just text\n", "--config-file"),
        ("name: {\n", "--config-file"),
        ("name: *nowhere\n", "--config-file"),
        ("\tname: a\n", "--config-file"),
    ];
    for_each(&refused, |(text, names)| check_refusal(&ask_file(text), 1, names, text));
}

fn ask_file(text: &str) -> Answers {
    let directory = tempfile::tempdir().expect("a directory for the test");
    std::fs::write(directory.path().join("settings"), text).expect("a file for the test");
    // Flags beside a file do not count, not even contradictory ones.
    ask_in(
        directory.path(),
        &strings(&["--config-file=settings", "--election-timeout=0"]),
        &[("ETCD_NAME", "x")],
    )
}
