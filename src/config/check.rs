//! What fits together: the given values become a [`Config`], or a refusal that names the flag.
//!
//! The order of the checks is etcd's, so that of two mistakes both report the same one. What depends on the data directory
//! is in [`bootstrap`], which only a member without data runs.

use std::net::{IpAddr, Ipv4Addr, UdpSocket};
use std::num::NonZeroU64;
use std::path::PathBuf;
use std::time::Duration;

use super::feature_gate::FeatureGate;
use super::setting::{SETTINGS, Status, Values, find};
use super::source::Given;
use super::syntax::{self, show_duration};
use super::url::{ListenUrl, Url};
use super::{
    AutoCompaction, ClusterSettings, Config, Discovery, FirstMembership, InitialClusterState, InitialMember,
    Join, KeepAlive, LogFormat, LogLevel, LogOutput, LogSettings, MemberSettings, MemoryBudget, Notice,
    Refusal, SrvDiscovery,
};

/// A longer election timeout is taken for a mistake.
const ELECTION_TIMEOUT_MAX_MS: u64 = 50_000;
/// Heartbeats that must fit into an election timeout.
const HEARTBEATS_PER_ELECTION: u64 = 5;
/// The quota when none is given.
const QUOTA_DEFAULT_BYTES: u64 = 2 << 30;
/// More than this is a quota etcd was not tried with; it warns.
const QUOTA_ADVISED_BYTES: u64 = 8 << 30;
/// Requests larger than this slow everybody down; etcd warns.
const REQUEST_ADVISED_BYTES: u64 = 10 << 20;
/// Entries after which the log is shortened when 0 is given.
const SNAPSHOT_COUNT_DEFAULT: u64 = 10_000;
/// Entries kept for followers when 0 is given.
const CATCHUP_ENTRIES_DEFAULT: u64 = 5_000;
/// Seconds that a simple token lives without use, when 0 is asked for. etcd: `simpleTokenTTLDefault`.
const AUTH_TOKEN_TTL_DEFAULT: u64 = 300;
/// Costs of bcrypt, and the one in the place of others.
const BCRYPT_COSTS: std::ops::RangeInclusive<u64> = 4..=31;
const BCRYPT_COST_DEFAULT: u32 = 10;
/// Progress reports, unless asked otherwise.
const PROGRESS_DEFAULT: Duration = Duration::from_secs(600);
/// Progress reports more often than this are a load of their own.
const PROGRESS_MIN: Duration = Duration::from_millis(100);
/// Below this a part of the memory budget cannot do its work.
const MEMORY_PART_MIN_BYTES: u64 = 1 << 20;
/// Above this a part of the memory budget is taken for a mistake.
const MEMORY_PART_MAX_BYTES: u64 = 1 << 40;

/// Checks what was given.
pub(super) fn check(given: &Given) -> Result<Config, Refusal> {
    let values = &given.values;
    if !given.from_file && values.discovery_fallback == "proxy" {
        return invalid("--discovery-fallback can't be \"proxy\": etcd's version 2 proxy is gone");
    }
    let log = log_settings(values)?;
    let listen = listen_urls(values)?;
    check_hosts("initial-advertise-peer-urls", &values.initial_advertise_peer_urls)?;
    check_hosts("advertise-client-urls", &values.advertise_client_urls)?;
    let discovers = !values.discovery_srv.is_empty() || !values.discovery_endpoints.is_empty();
    let state = cluster_state(values)?;
    let initial_cluster_text = check_discovery(given, discovers)?;
    check_election(values)?;
    let client_urls_given = given.has("listen-client-urls") && !given.from_file;
    if client_urls_given && !given.has("advertise-client-urls") {
        return invalid("--advertise-client-urls is required when --listen-client-urls is set explicitly");
    }
    let auto_compaction_mode = auto_compaction_mode(values)?;
    check_gates(values)?;
    check_tls_versions(values)?;
    refuse_tls(&listen)?;
    check_shared_addresses(&listen)?;
    let auto_compaction = auto_compaction(auto_compaction_mode, &values.auto_compaction_retention)?;

    let mut notices = notices(given);
    let (peer_urls, client_urls) = advertised(values, &listen, &mut notices);
    let initial_cluster = follow_name(values, initial_cluster_text, &peer_urls);
    let cluster = ClusterSettings {
        initial_cluster,
        initial_cluster_token: values.initial_cluster_token.clone(),
        discovery: discovery(values),
        srv: srv_discovery(values),
        join: join_settings(values)?,
        initial_cluster_state: state,
        heartbeat_interval: Duration::from_millis(values.heartbeat_interval),
        election_timeout: Duration::from_millis(values.election_timeout),
    };
    let [listen_peer_urls, listen_client_urls, listen_client_http_urls, listen_metrics_urls] = listen;
    let member = MemberSettings {
        name: values.name.clone(),
        data_dir: data_dir(values, &mut notices),
        wal_dir: Some(&values.wal_dir).filter(|dir| !dir.is_empty()).map(PathBuf::from),
        listen_peer_urls,
        listen_client_urls,
        listen_client_http_urls,
        listen_metrics_urls,
        initial_advertise_peer_urls: peer_urls,
        advertise_client_urls: client_urls,
        socket_reuse_port: values.socket_reuse_port,
        socket_reuse_address: values.socket_reuse_address,
        snapshot_count: or_default(values.snapshot_count, SNAPSHOT_COUNT_DEFAULT),
        snapshot_catchup_entries: or_default(values.snapshot_catchup_entries, CATCHUP_ENTRIES_DEFAULT),
        quota_backend_bytes: quota(values, &mut notices),
        nospace_low_water_percent: low_water(values)?,
        mend_divergence: values.skeg_mend_divergence,
        scrub_interval: span(values.skeg_scrub_interval),
        max_txn_ops: values.max_txn_ops,
        max_request_bytes: max_request_bytes(values, &mut notices),
        max_concurrent_streams: values.max_concurrent_streams,
        keepalive: keepalive(values),
        watch_progress_notify_interval: progress_interval(values, &mut notices),
        warning_apply_duration: span(values.warning_apply_duration),
        warning_unary_request_duration: warning_request_duration(values),
        auto_compaction,
        cors: values.cors.clone(),
        host_whitelist: values.host_whitelist.clone(),
        extensive_metrics: values.metrics == "extensive",
        enable_pprof: values.enable_pprof,
        unsafe_no_fsync: values.unsafe_no_fsync,
        strict_reconfig_check: values.strict_reconfig_check,
        pre_vote: values.pre_vote,
        corrupt_check_time: span(values.corrupt_check_time),
        compact_hash_check_time: span(values.compact_hash_check_time),
        force_new_cluster: values.force_new_cluster,
        max_learners: u32::try_from(values.max_learners).unwrap_or(0),
        auth_token: values.auth_token.clone(),
        auth_token_ttl: Duration::from_secs(or_default(values.auth_token_ttl, AUTH_TOKEN_TTL_DEFAULT)),
        bcrypt_cost: bcrypt_cost(values, &mut notices),
        feature_gates: values.feature_gates.clone(),
        memory: memory(values)?,
    };
    Ok(Config { member, cluster, log, notices })
}

/// Checks the first membership. etcd: `server/config/config.go`
pub(super) fn bootstrap(config: &Config) -> Result<FirstMembership, Refusal> {
    let is_new = config.cluster.initial_cluster_state == InitialClusterState::New;
    let advertised = is_new.then_some(&config.member.initial_advertise_peer_urls[..]);
    first_membership(&config.member.name, &config.cluster.initial_cluster, advertised)
}

/// Reads who the members of a new cluster are, and checks that the one with this name is advertised as it says, if it is.
///
/// # Errors
/// [`Refusal::Invalid`].
pub fn first_membership(
    name: &str,
    initial_cluster: &str,
    advertised: Option<&[Url]>,
) -> Result<FirstMembership, Refusal> {
    let members = initial_members(initial_cluster)?;
    let Some(local) = members.iter().find(|member| member.name == *name) else {
        return invalid(format!("couldn't find local --name {name:?} in --initial-cluster"));
    };
    if let Some(advertised) = advertised {
        check_advertised(local, advertised)?;
    }
    let mut urls: Vec<&Url> = members.iter().flat_map(|member| &member.peer_urls).collect();
    let count = urls.len();
    urls.sort();
    urls.dedup();
    if urls.len() != count {
        return invalid("--initial-cluster has a duplicate URL");
    }
    Ok(FirstMembership { local: local.clone(), members })
}

fn check_advertised(local: &InitialMember, advertised: &[Url]) -> Result<(), Refusal> {
    let lacks = |urls: &[Url], url: &Url| !urls.iter().any(|other| other.same_place(url));
    if let Some(url) = local.peer_urls.iter().find(|url| lacks(advertised, url)) {
        let name = &local.name;
        let list = join(advertised);
        return invalid(format!(
            "--initial-cluster has {name}={url} but missing from --initial-advertise-peer-urls={list}"
        ));
    }
    if let Some(url) = advertised.iter().find(|url| lacks(&local.peer_urls, url)) {
        let name = &local.name;
        return invalid(format!(
            "--initial-advertise-peer-urls has {url} but missing from --initial-cluster for {name:?}"
        ));
    }
    Ok(())
}

fn invalid<T>(text: impl Into<String>) -> Result<T, Refusal> {
    Err(Refusal::Invalid(text.into()))
}

fn join(urls: &[Url]) -> String {
    urls.iter().map(Url::as_str).collect::<Vec<_>>().join(",")
}

fn log_settings(values: &Values) -> Result<LogSettings, Refusal> {
    match values.logger.as_str() {
        "zap" => {}
        "capnslog" => return invalid("--logger=capnslog is removed since etcd 3.5"),
        other => return invalid(format!("unknown --logger {other:?}: the only value is \"zap\"")),
    }
    let level = match values.log_level.to_ascii_lowercase().as_str() {
        "debug" => LogLevel::Debug,
        "info" | "" => LogLevel::Info,
        "warn" | "warning" => LogLevel::Warn,
        "error" => LogLevel::Error,
        "dpanic" | "panic" => LogLevel::Panic,
        "fatal" => LogLevel::Fatal,
        _ => return invalid(format!("unrecognized --log-level {:?}", values.log_level)),
    };
    let format = match values.log_format.as_str() {
        "json" | "" => LogFormat::Json,
        "console" => LogFormat::Console,
        other => {
            return invalid(format!("unknown --log-format {other:?}: supported values are json, console"));
        }
    };
    let names: &[String] = &values.log_outputs;
    if names.len() > 1 && names.iter().any(|name| name == "default") {
        return invalid("--log-outputs: \"default\" cannot be combined with other outputs");
    }
    if names.len() > 1 && names.iter().any(|name| name == "systemd/journal") {
        return invalid("--log-outputs: \"systemd/journal\" cannot be combined with other outputs");
    }
    let mut outputs = names.iter().map(|name| log_output(name)).collect::<Result<Vec<_>, _>>()?;
    if outputs.is_empty() {
        outputs.push(LogOutput::Stderr);
    }
    if outputs.contains(&LogOutput::File(PathBuf::from("/dev/null"))) {
        outputs.clear();
    }
    outputs.sort();
    outputs.dedup();
    check_rotation(values, &outputs)?;
    Ok(LogSettings { level, format, outputs })
}

fn log_output(name: &str) -> Result<LogOutput, Refusal> {
    Ok(match name {
        "default" | "stderr" => LogOutput::Stderr,
        "stdout" => LogOutput::Stdout,
        "systemd/journal" => LogOutput::Journal,
        "" => return invalid("--log-outputs has an empty name"),
        name => LogOutput::File(log_file(name)?),
    })
}

/// The path of a log: as it is, or as a `file` URL; other URLs are of nothing that can be logged to.
fn log_file(name: &str) -> Result<PathBuf, Refusal> {
    let host_and_path =
        name.strip_prefix("file://").map(|rest| rest.split_at(rest.find('/').unwrap_or(rest.len())));
    match host_and_path {
        Some(("" | "localhost", path)) if !path.contains(['?', '#']) => Ok(PathBuf::from(path)),
        Some(_) => invalid(format!("--log-outputs: {name:?} is not file:// and a path alone")),
        // A path can have a colon, but a URL has it before the first slash.
        None if name.split('/').next().is_some_and(|first| first.contains(':')) => {
            invalid(format!("--log-outputs: {name:?} is of a scheme that cannot be logged to"))
        }
        None => Ok(PathBuf::from(name)),
    }
}

fn check_rotation(values: &Values, outputs: &[LogOutput]) -> Result<(), Refusal> {
    if !values.enable_log_rotation {
        return Ok(());
    }
    let files = outputs.iter().filter(|output| matches!(output, LogOutput::File(_))).count();
    if files > 1 || (files == 0 && outputs.len() == 1) {
        return invalid("--log-outputs requires a single file path with --enable-log-rotation");
    }
    let config: Result<serde_json::Value, _> = serde_json::from_str(&values.log_rotation_config_json);
    match config {
        Ok(config) if config.is_object() => Ok(()),
        Ok(_) => invalid("invalid --log-rotation-config-json: expected an object"),
        Err(error) => invalid(format!("improperly formatted --log-rotation-config-json: {error}")),
    }
}

/// Resolves the URLs to listen on: of peers, clients, HTTP clients and metrics.
fn listen_urls(values: &Values) -> Result<[Vec<ListenUrl>; 4], Refusal> {
    let resolve = |flag: &str, urls: &[Url]| {
        urls.iter()
            .map(Url::listen)
            .collect::<Result<Vec<_>, _>>()
            .map_err(|error| Refusal::Invalid(format!("--{flag}: {error}")))
    };
    Ok([
        resolve("listen-peer-urls", &values.listen_peer_urls)?,
        resolve("listen-client-urls", &values.listen_client_urls)?,
        resolve("listen-client-http-urls", &values.listen_client_http_urls)?,
        resolve("listen-metrics-urls", &values.listen_metrics_urls)?,
    ])
}

fn check_hosts(flag: &str, urls: &[Url]) -> Result<(), Refusal> {
    match urls.iter().find(|url| !url.scheme().is_unix() && url.host().is_empty()) {
        Some(url) => {
            invalid(format!("--{flag} {:?} must be \"host:port\": unexpected empty host ({url})", join(urls)))
        }
        None => Ok(()),
    }
}

fn cluster_state(values: &Values) -> Result<InitialClusterState, Refusal> {
    match values.initial_cluster_state.as_str() {
        "new" | "" => Ok(InitialClusterState::New),
        "existing" => Ok(InitialClusterState::Existing),
        other => invalid(format!("unexpected --initial-cluster-state {other:?}")),
    }
}

/// Checks the ways to find the first members, and returns the text of the initial cluster.
fn check_discovery(given: &Given, discovers: bool) -> Result<String, Refusal> {
    let values = &given.values;
    let default = find("initial-cluster").map_or("", |setting| setting.default);
    let mut text = values.initial_cluster.clone();
    let left_at_default = if given.from_file { text == default } else { !given.has("initial-cluster") };
    let by_service = discovers || (!given.from_file && !values.discovery_srv_name.is_empty());
    if by_service && left_at_default {
        text.clear();
    }
    let ways = [!text.is_empty(), !values.discovery_srv.is_empty(), !values.discovery_endpoints.is_empty()];
    if ways.into_iter().filter(|given| *given).count() > 1 {
        return invalid("choose one of --initial-cluster, --discovery-endpoints and --discovery-srv");
    }
    if values.discovery_token.is_empty() != values.discovery_endpoints.is_empty() {
        return invalid("both --discovery-token and --discovery-endpoints must be set");
    }
    if values.discovery_endpoints.iter().any(|endpoint| endpoint.trim().is_empty()) {
        return invalid("--discovery-endpoints must not contain empty endpoints");
    }
    Ok(text)
}

fn join_settings(values: &Values) -> Result<Option<Join>, Refusal> {
    if values.skeg_join.is_empty() {
        if !values.skeg_replace.is_empty() {
            return invalid("--skeg-replace needs --skeg-join");
        }
        return Ok(None);
    }
    let members = Url::parse_list(&values.skeg_join)
        .map_err(|error| Refusal::Invalid(format!("--skeg-join: {error}")))?;
    Ok(Some(Join { members, replaces: values.skeg_replace.clone() }))
}

fn discovery(values: &Values) -> Option<Discovery> {
    (!values.discovery_endpoints.is_empty()).then(|| Discovery {
        endpoints: values.discovery_endpoints.iter().map(|endpoint| endpoint.trim().to_owned()).collect(),
        token: values.discovery_token.clone(),
        dial_timeout: span(values.discovery_dial_timeout),
        request_timeout: span(values.discovery_request_timeout),
    })
}

fn srv_discovery(values: &Values) -> Option<SrvDiscovery> {
    (!values.discovery_srv.is_empty()).then(|| SrvDiscovery {
        domain: values.discovery_srv.clone(),
        service_name: values.discovery_srv_name.clone(),
    })
}

fn check_election(values: &Values) -> Result<(), Refusal> {
    let (heartbeat, election) = (values.heartbeat_interval, values.election_timeout);
    if heartbeat == 0 {
        return invalid("--heartbeat-interval must be >0 (set to 0ms)");
    }
    if election == 0 {
        return invalid("--election-timeout must be >0 (set to 0ms)");
    }
    if heartbeat.saturating_mul(HEARTBEATS_PER_ELECTION) > election {
        return invalid(format!(
            "--election-timeout[{election}ms] should be at least {HEARTBEATS_PER_ELECTION} times --heartbeat-interval[{heartbeat}ms]"
        ));
    }
    if election > ELECTION_TIMEOUT_MAX_MS {
        return invalid(format!(
            "--election-timeout[{election}ms] is too long, it should be at most {ELECTION_TIMEOUT_MAX_MS}ms"
        ));
    }
    Ok(())
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Retention {
    Time,
    Revisions,
}

fn auto_compaction_mode(values: &Values) -> Result<Retention, Refusal> {
    match values.auto_compaction_mode.as_str() {
        "periodic" => Ok(Retention::Time),
        "revision" => Ok(Retention::Revisions),
        "" => invalid("undefined --auto-compaction-mode"),
        other => invalid(format!("unknown --auto-compaction-mode {other:?}")),
    }
}

/// Reads the retention: a bare number counts hours or revisions, all else is a time.
fn auto_compaction(mode: Retention, text: &str) -> Result<AutoCompaction, Refusal> {
    let refuse = |why: &str| invalid(format!("error parsing --auto-compaction-retention {text:?}: {why}"));
    let digits = text.strip_prefix('+').unwrap_or(text);
    let bare = !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit());
    match mode {
        _ if text.is_empty() => Ok(AutoCompaction::Off),
        Retention::Revisions if bare => match digits.parse::<u64>() {
            Ok(count) => Ok(NonZeroU64::new(count).map_or(AutoCompaction::Off, AutoCompaction::Revision)),
            Err(_) => refuse("value out of range"),
        },
        Retention::Revisions => refuse("expected a number of revisions"),
        Retention::Time => {
            let hours = digits.parse::<i64>().ok().filter(|_| bare);
            let nanos = match hours {
                Some(hours) => hours
                    .checked_mul(3_600_000_000_000)
                    .ok_or_else(|| syntax::ValueError::new("out of range")),
                None => syntax::duration(text),
            };
            match nanos {
                Ok(0) => Ok(AutoCompaction::Off),
                Ok(nanos) if nanos > 0 => Ok(AutoCompaction::Periodic(span(nanos))),
                Ok(_) => refuse("it is negative"),
                Err(error) => refuse(&error.0),
            }
        }
    }
}

fn low_water(values: &Values) -> Result<u64, Refusal> {
    match values.skeg_nospace_low_water {
        percent @ 0..=99 => Ok(percent),
        percent => invalid(format!("--skeg-nospace-low-water is a percentage below 100 (set to {percent})")),
    }
}

fn check_gates(values: &Values) -> Result<(), Refusal> {
    let gates = &values.feature_gates;
    if gates.enabled(FeatureGate::LeaseCheckpointPersist) && !gates.enabled(FeatureGate::LeaseCheckpoint) {
        return invalid("--feature-gates: LeaseCheckpointPersist requires LeaseCheckpoint");
    }
    if values.compact_hash_check_time <= 0 {
        let time = show_duration(values.compact_hash_check_time);
        return invalid(format!("--compact-hash-check-time must be >0 (set to {time})"));
    }
    Ok(())
}

fn check_tls_versions(values: &Values) -> Result<(), Refusal> {
    let version = |flag: &str, text: &str| match text {
        "" => Ok(None),
        "TLS1.2" => Ok(Some(12)),
        "TLS1.3" => Ok(Some(13)),
        other => invalid(format!("unexpected --{flag} {other:?}: expected TLS1.2 or TLS1.3")),
    };
    let min = version("tls-min-version", &values.tls_min_version)?;
    let max = version("tls-max-version", &values.tls_max_version)?;
    if max.is_some() && min > max {
        return invalid(format!(
            "--tls-min-version ({}) is greater than --tls-max-version ({})",
            values.tls_min_version, values.tls_max_version
        ));
    }
    if min == Some(13) && !values.cipher_suites.is_empty() {
        return invalid("--cipher-suites cannot be configured when --tls-min-version is TLS1.3");
    }
    Ok(())
}

const LISTEN_FLAGS: [&str; 4] =
    ["listen-peer-urls", "listen-client-urls", "listen-client-http-urls", "listen-metrics-urls"];

fn refuse_tls(listen: &[Vec<ListenUrl>; 4]) -> Result<(), Refusal> {
    for (flag, urls) in LISTEN_FLAGS.iter().zip(listen) {
        if let Some(listen) = urls.iter().find(|listen| listen.url.scheme().is_tls()) {
            let url = &listen.url;
            return invalid(format!("--{flag} {url}: TLS is not served yet; use http or unix"));
        }
    }
    Ok(())
}

fn check_shared_addresses(listen: &[Vec<ListenUrl>; 4]) -> Result<(), Refusal> {
    let [_, client, http, _] = listen;
    match http.iter().find(|url| client.iter().any(|other| other.address == url.address)) {
        Some(listen) => {
            let url = &listen.url;
            invalid(format!(
                "cannot bind both --listen-client-urls and --listen-client-http-urls on the same url {url}"
            ))
        }
        None => Ok(()),
    }
}

/// Says which settings were given that do nothing, and which variables are no settings.
fn notices(given: &Given) -> Vec<Notice> {
    let defaults = Values::defaults();
    let mut notices = Vec::new();
    for setting in SETTINGS.iter().filter(|setting| given.has(setting.name)) {
        let why = match setting.status {
            Status::Effective => continue,
            Status::Ignored(why) => format!("this setting is accepted and ignored: {why}"),
            Status::NotYet(why) => format!("this setting has no effect yet: {why}"),
        };
        // The default asks for nothing; saying so would only make noise. A flag without a value to compare is always told.
        if (setting.same)(&given.values, &defaults) && !setting.default.is_empty() {
            continue;
        }
        notices.push(Notice { level: LogLevel::Warn, text: why, flag: setting.name });
    }
    for (gate, on) in given.values.feature_gates.explicitly_set() {
        if on != gate.default_value() {
            let text = format!("feature gate {} is set to {on} and has no effect yet", gate.name());
            notices.push(Notice { level: LogLevel::Warn, text, flag: "feature-gates" });
        }
    }
    for name in &given.unknown_variables {
        let text = format!("unrecognized environment variable {name}");
        notices.push(Notice { level: LogLevel::Warn, text, flag: "" });
    }
    if given.values.name == "default" {
        let text = "members of one cluster need different names; this one has the default".to_owned();
        notices.push(Notice { level: LogLevel::Info, text, flag: "name" });
    }
    notices
}

/// Returns the advertised URLs of peers and clients; a default one takes the address of this host when the listener is open
/// to all.
fn advertised(
    values: &Values,
    listen: &[Vec<ListenUrl>; 4],
    notices: &mut Vec<Notice>,
) -> (Vec<Url>, Vec<Url>) {
    let [peer, client, ..] = listen;
    let mut detect = |flag: &'static str, urls: &[Url], listen: &[ListenUrl]| {
        let default = find(flag).map_or("", |setting| setting.default);
        let open = listen.first().filter(|first| first.url.host() == "0.0.0.0");
        let ([url], Some(open)) = (urls, open) else { return urls.to_vec() };
        if url.as_str() != default {
            return urls.to_vec();
        }
        let Some(host) = default_host() else {
            let text = "failed to detect the default host; advertising localhost".to_owned();
            notices.push(Notice { level: LogLevel::Warn, text, flag });
            return urls.to_vec();
        };
        let text = format!("advertising the detected default host {host}");
        notices.push(Notice { level: LogLevel::Info, text, flag });
        vec![url.with_host(host, open.url.port())]
    };
    let peer_urls = detect("initial-advertise-peer-urls", &values.initial_advertise_peer_urls, peer);
    let client_urls = detect("advertise-client-urls", &values.advertise_client_urls, client);
    (peer_urls, client_urls)
}

/// Returns the address of the interface that leads out. Connecting a datagram socket sends nothing: it only makes the kernel
/// choose the route.
fn default_host() -> Option<IpAddr> {
    let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).ok()?;
    // An address set aside for documentation: routed like any other, owned by nobody.
    socket.connect((Ipv4Addr::new(192, 0, 2, 1), 9)).ok()?;
    socket
        .local_addr()
        .ok()
        .map(|address| address.ip())
        .filter(|ip| !ip.is_unspecified() && !ip.is_loopback())
}

/// Returns the text of the initial cluster, which follows the name and the peer URLs when only those were given.
fn follow_name(values: &Values, text: String, peer_urls: &[Url]) -> String {
    let default = find("initial-cluster").map_or("", |setting| setting.default);
    if values.name == "default" || text != default {
        return text;
    }
    let name = if values.name.is_empty() { "default" } else { &values.name };
    peer_urls.iter().map(|url| format!("{name}={url}")).collect::<Vec<_>>().join(",")
}

/// Reads `name=url,name=url`; repeated names add up.
fn initial_members(text: &str) -> Result<Vec<InitialMember>, Refusal> {
    let mut members: Vec<InitialMember> = Vec::new();
    for pair in text.split(',').filter(|pair| !pair.is_empty()) {
        let (name, url) = pair.split_once('=').unwrap_or((pair, ""));
        let url = Url::parse(url)
            .map_err(|error| Refusal::Invalid(format!("--initial-cluster: {name:?}: {error}")))?;
        match members.iter_mut().find(|member| member.name == name) {
            Some(member) => member.peer_urls.push(url),
            None => members.push(InitialMember { name: name.to_owned(), peer_urls: vec![url] }),
        }
    }
    for member in &mut members {
        member.peer_urls.sort();
    }
    Ok(members)
}

fn data_dir(values: &Values, notices: &mut Vec<Notice>) -> PathBuf {
    if !values.data_dir.is_empty() {
        return PathBuf::from(&values.data_dir);
    }
    let default = format!("{}.etcd", values.name);
    notices.push(Notice {
        level: LogLevel::Warn,
        text: format!("data-dir is empty; using {default}"),
        flag: "data-dir",
    });
    PathBuf::from(default)
}

fn or_default(value: u64, default: u64) -> u64 {
    if value == 0 { default } else { value }
}

fn quota(values: &Values, notices: &mut Vec<Notice>) -> Option<NonZeroU64> {
    let bytes = u64::try_from(values.quota_backend_bytes).ok()?;
    let bytes = or_default(bytes, QUOTA_DEFAULT_BYTES);
    if bytes > QUOTA_ADVISED_BYTES {
        let text = format!("the quota of {bytes} bytes exceeds the advised maximum of {QUOTA_ADVISED_BYTES}");
        notices.push(Notice { level: LogLevel::Warn, text, flag: "quota-backend-bytes" });
    }
    NonZeroU64::new(bytes)
}

fn max_request_bytes(values: &Values, notices: &mut Vec<Notice>) -> u64 {
    let bytes = values.max_request_bytes;
    if bytes > REQUEST_ADVISED_BYTES {
        let text = format!("requests of {bytes} bytes exceed the advised maximum of {REQUEST_ADVISED_BYTES}");
        notices.push(Notice { level: LogLevel::Warn, text, flag: "max-request-bytes" });
    }
    bytes
}

fn bcrypt_cost(values: &Values, notices: &mut Vec<Notice>) -> u32 {
    let asked = values.bcrypt_cost;
    match u32::try_from(asked) {
        Ok(cost) if BCRYPT_COSTS.contains(&asked) => cost,
        _ => {
            let text = format!("bcrypt has no cost of {asked}: {BCRYPT_COST_DEFAULT} is used instead");
            notices.push(Notice { level: LogLevel::Warn, text, flag: "bcrypt-cost" });
            BCRYPT_COST_DEFAULT
        }
    }
}

fn keepalive(values: &Values) -> KeepAlive {
    let unless_off = |nanos: i64| Some(span(nanos)).filter(|time| !time.is_zero());
    KeepAlive {
        min_time: span(values.grpc_keepalive_min_time),
        interval: unless_off(values.grpc_keepalive_interval),
        timeout: unless_off(values.grpc_keepalive_timeout),
    }
}

fn progress_interval(values: &Values, notices: &mut Vec<Notice>) -> Duration {
    let interval = span(values.watch_progress_notify_interval);
    if interval.is_zero() {
        return PROGRESS_DEFAULT;
    }
    if interval < PROGRESS_MIN {
        let text = "the interval is below the minimum; using 100ms".to_owned();
        notices.push(Notice { level: LogLevel::Warn, text, flag: "watch-progress-notify-interval" });
        return PROGRESS_MIN;
    }
    interval
}

/// Turns nanoseconds into a time; a negative one means none, as where etcd compares with zero.
fn span(nanos: i64) -> Duration {
    Duration::from_nanos(u64::try_from(nanos).unwrap_or(0))
}

/// Returns the limit; zero stands for the default, as in etcd.
fn warning_request_duration(values: &Values) -> Duration {
    match values.warning_unary_request_duration {
        0 => Duration::from_millis(300),
        nanos => span(nanos),
    }
}

fn memory(values: &Values) -> Result<MemoryBudget, Refusal> {
    let part = |flag: &str, bytes: u64| {
        if !(MEMORY_PART_MIN_BYTES..=MEMORY_PART_MAX_BYTES).contains(&bytes) {
            return invalid(format!(
                "--{flag} must be from {MEMORY_PART_MIN_BYTES} to {MEMORY_PART_MAX_BYTES} (set to {bytes})"
            ));
        }
        usize::try_from(bytes).map_err(|_| Refusal::Invalid(format!("--{flag} exceeds the address space")))
    };
    Ok(MemoryBudget {
        memtable_bytes: part("skeg-memtable-bytes", values.skeg_memtable_bytes)?,
        block_cache_bytes: part("skeg-block-cache-bytes", values.skeg_block_cache_bytes)?,
        metadata_cache_bytes: part("skeg-metadata-cache-bytes", values.skeg_metadata_cache_bytes)?,
        watch_ring_bytes: part("skeg-watch-ring-bytes", values.skeg_watch_ring_bytes)?,
        log_tail_bytes: part("skeg-log-tail-bytes", values.skeg_log_tail_bytes)?,
    })
}
