//! The table of settings: one row per flag, and everything about the flag in its row.
//!
//! ```text
//! Section {
//!     "flag-name" field: Kind = "default" [shown "default in the help"] [file "its/path"],
//!         Status, "Help sentence.";
//! }
//! ```
//!
//! Flags, `ETCD_*` variables, config files, `--help` and the list in `docs/compatibility.md` all come from here. A default is
//! a text read by the same parser as the user's value. In a config file a setting has its flag's name unless `file` gives a
//! path through sections, or nothing, for what cannot be set there.
//!
//! Names and defaults are etcd's (etcd: `server/embed/config.go`); the sentences are ours. Checks that involve several
//! settings are in `check`.

use serde_json::Value;

use super::kind::{
    Anything, DeprecationText, FallbackText, Gates, HostSet, Kind, Origins, Signed, Span, StateText, Switch,
    Text, TextList, TextSet, Unsigned, Unsigned32, Urls,
};
use super::syntax::ValueError;

use Section::{
    Auth, Clustering, Features, Hidden, Logging, Member, Monitoring, Other, Security, Skeg, Tracing, Unsafe,
};
use Status::{Effective, Ignored, NotYet};

/// One row of the table.
pub(super) struct Setting {
    /// Flag name, without dashes.
    pub(super) name: &'static str,
    /// Where the help lists it.
    pub(super) section: Section,
    /// What it does here.
    pub(super) status: Status,
    /// What it means, in a sentence.
    pub(super) help: &'static str,
    /// The value it has when nobody sets it, as a text.
    pub(super) default: &'static str,
    /// The default as the help shows it, where the text says too little.
    pub(super) shown_default: &'static str,
    /// Its place in a config file: names of sections and its own, separated by slashes; empty for none.
    pub(super) file_path: &'static str,
    /// Whether the flag may stand without a value.
    pub(super) switch: bool,
    /// Takes in a text.
    pub(super) set: fn(&mut Values, &str) -> Result<(), ValueError>,
    /// Takes in a value of a config file.
    pub(super) set_from_file: fn(&mut Values, &Value) -> Result<(), ValueError>,
    /// Says whether both hold the same value.
    pub(super) same: fn(&Values, &Values) -> bool,
}

/// A heading of the help.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Section {
    Member,
    Clustering,
    Security,
    Auth,
    Monitoring,
    Logging,
    Tracing,
    Features,
    Unsafe,
    Skeg,
    /// Listed with the usage, not among the settings.
    Other,
    /// Accepted and not listed.
    Hidden,
}

/// What a setting does in this build.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Status {
    /// What it says.
    Effective,
    /// Nothing, and it never will; with the reason.
    Ignored(&'static str),
    /// Nothing so far; with what happens instead. Setting it is answered with a warning at start-up.
    NotYet(&'static str),
}

impl Section {
    /// Every section that the help lists, in its order.
    pub(super) const LISTED: [Self; 10] =
        [Member, Clustering, Security, Auth, Monitoring, Logging, Tracing, Features, Unsafe, Skeg];

    /// Returns the heading.
    pub(super) fn title(self) -> &'static str {
        match self {
            Member => "Member",
            Clustering => "Clustering",
            Security => "Security",
            Auth => "Auth",
            Monitoring => "Profiling and Monitoring",
            Logging => "Logging",
            Tracing => "Distributed tracing",
            Features => "Features",
            Unsafe => "Unsafe feature",
            Skeg => "Skeg (not in etcd)",
            Other => "Other",
            Hidden => "Accepted and ignored",
        }
    }
}

/// Picks the last of one or two literals.
macro_rules! last {
    ($first:expr) => {
        $first
    };
    ($first:expr, $second:expr) => {
        $second
    };
}

macro_rules! settings {
    ($($section:ident { $(
        $flag:literal $field:ident: $kind:ident = $default:literal $(shown $shown:literal)? $(file $file:literal)?,
        $status:expr, $help:literal;
    )* })*) => {
        /// The value of every setting, a field per row.
        #[derive(Clone)]
        pub(super) struct Values {
            $($(pub(super) $field: <$kind as Kind>::Stored,)*)*
        }

        /// All rows.
        pub(super) static SETTINGS: &[Setting] = &[$($(Setting {
            name: $flag,
            section: $section,
            status: $status,
            help: $help,
            default: $default,
            shown_default: last!($default $(, $shown)?),
            file_path: last!($flag $(, $file)?),
            switch: <$kind as Kind>::SWITCH,
            set: |values, text| <$kind as Kind>::set(&mut values.$field, text),
            set_from_file: |values, value| <$kind as Kind>::set_from_file(&mut values.$field, value),
            same: |a, b| a.$field == b.$field,
        },)*)*];

        impl Values {
            fn unset() -> Self {
                Self { $($($field: Default::default(),)*)* }
            }
        }
    };
}

impl Values {
    /// Every setting at its default.
    pub(super) fn defaults() -> Self {
        let mut values = Self::unset();
        for setting in SETTINGS.iter().filter(|setting| !setting.default.is_empty()) {
            (setting.set)(&mut values, setting.default)
                .expect("the defaults of the table can be read, as its test shows");
        }
        values
    }
}

/// Finds a setting by its flag name.
pub(super) fn find(name: &str) -> Option<&'static Setting> {
    SETTINGS.iter().find(|setting| setting.name == name)
}

settings! {
    Member {
        "name" name: Text = "default",
            Effective, "Name of this member; members of one cluster need different ones.";
        "data-dir" data_dir: Text = "" shown "${name}.etcd",
            Effective, "Directory that holds everything this member stores.";
        "wal-dir" wal_dir: Text = "",
            Effective, "Directory for the Raft log alone, for instance on a disk of its own; empty keeps it in the data directory.";
        "snapshot-count" snapshot_count: Unsigned = "10000",
            Effective, "Applied entries after which the log may be shortened.";
        "snapshot-catchup-entries" snapshot_catchup_entries: Unsigned = "5000",
            Effective, "Entries kept behind the shortened log for followers that lag.";
        "heartbeat-interval" heartbeat_interval: Unsigned = "100",
            Effective, "Milliseconds between two heartbeats of the leader.";
        "election-timeout" election_timeout: Unsigned = "1000",
            Effective, "Milliseconds without a heartbeat after which a follower stands for election; at least five heartbeats, at most 50000.";
        "initial-election-tick-advance" initial_election_tick_advance: Switch = "true",
            NotYet("elections start after the usual timeout"), "Shorten the wait before the first election.";
        "listen-peer-urls" listen_peer_urls: Urls = "http://localhost:2380",
            Effective, "Comma-separated URLs to listen on for other members.";
        "listen-client-urls" listen_client_urls: Urls = "http://localhost:2379",
            Effective, "Comma-separated URLs to listen on for clients: gRPC, and HTTP unless --listen-client-http-urls is given.";
        "listen-client-http-urls" listen_client_http_urls: Urls = "",
            Effective, "Comma-separated URLs to listen on for HTTP clients alone; --listen-client-urls then serve gRPC alone.";
        "max-snapshots" max_snapshots: Unsigned = "5",
            Ignored("deprecated in etcd; one settled state is kept here"), "Snapshot files to keep. Deprecated.";
        "max-wals" max_wals: Unsigned = "5",
            Ignored("log segments are reused as soon as nothing needs them"), "Log files to keep; 0 keeps all.";
        "memory-mlock" memory_mlock: Switch = "false",
            NotYet("pages are not locked into memory"), "Keep the pages of the process in memory.";
        "quota-backend-bytes" quota_backend_bytes: Signed = "0",
            Effective, "Size of the stored data in bytes above which the NOSPACE alarm is raised; 0 means 2 GiB, below 0 no limit.";
        "backend-bbolt-freelist-type" backend_bbolt_freelist_type: Text = "" shown "map",
            Ignored("the store here is RocksDB, which has no such setting"), "Kind of free list of etcd's store: array or map.";
        "backend-batch-interval" backend_batch_interval: Span = "0s" shown "",
            Ignored("the store here is RocksDB, which has no such setting"), "Longest time between two commits of etcd's store.";
        "backend-batch-limit" backend_batch_limit: Signed = "0",
            Ignored("the store here is RocksDB, which has no such setting"), "Most operations in one commit of etcd's store.";
        "max-txn-ops" max_txn_ops: Unsigned = "128",
            Effective, "Most operations in one transaction.";
        "max-request-bytes" max_request_bytes: Unsigned = "1572864",
            Effective, "Largest request of a client, in bytes.";
        "max-concurrent-streams" max_concurrent_streams: Unsigned32 = "4294967295",
            Effective, "Most streams a client connection may have open.";
        "grpc-keepalive-min-time" grpc_keepalive_min_time: Span = "5s",
            Effective, "Shortest time a client must leave between two pings.";
        "grpc-keepalive-interval" grpc_keepalive_interval: Span = "2h",
            Effective, "Time without traffic after which the server pings a client; 0 never pings.";
        "grpc-keepalive-timeout" grpc_keepalive_timeout: Span = "20s",
            Effective, "Time a client has to answer a ping before it is disconnected; 0 never disconnects.";
        "socket-reuse-port" socket_reuse_port: Switch = "false" file "socket-options/reuse-port",
            Effective, "Set SO_REUSEPORT on listeners, so that a port in use can be bound again.";
        "socket-reuse-address" socket_reuse_address: Switch = "false" file "socket-options/reuse-address",
            Effective, "Set SO_REUSEADDR on listeners, so that an address in TIME_WAIT can be bound.";
        "enable-grpc-gateway" enable_grpc_gateway: Switch = "true",
            NotYet("the JSON gateway is not served yet"), "Serve the JSON gateway under /v3/.";
        "raft-read-timeout" raft_read_timeout: Span = "5s" file "",
            Ignored("connections between members are pinged, and closed when that is not answered"), "Time to wait for bytes from another member; less than 5s is raised to it.";
        "raft-write-timeout" raft_write_timeout: Span = "5s" file "",
            Ignored("connections between members are pinged, and closed when that is not answered"), "Time to wait for another member to take bytes; less than 5s is raised to it.";
        "feature-gates" feature_gates: Gates = "",
            Effective, "Comma-separated NAME=true or NAME=false. Gates:";
    }
    Clustering {
        "initial-advertise-peer-urls" initial_advertise_peer_urls: Urls = "http://localhost:2380",
            Effective, "Comma-separated peer URLs by which other members reach this one.";
        "initial-cluster" initial_cluster: Text = "default=http://localhost:2380",
            Effective, "Members of a new cluster: comma-separated NAME=PEER-URL.";
        "initial-cluster-state" initial_cluster_state: StateText = "new",
            Effective, "Whether to found a cluster ('new') or to join one ('existing'); without meaning once the member has data.";
        "initial-cluster-token" initial_cluster_token: Text = "etcd-cluster",
            Effective, "Text that tells clusters with the same addresses apart; part of their ids.";
        "advertise-client-urls" advertise_client_urls: Urls = "http://localhost:2379",
            Effective, "Comma-separated client URLs that this member tells to clients.";
        "discovery-token" discovery_token: Text = "" file "discovery-config/token",
            Effective, "Token of the cluster at the discovery service.";
        "discovery-endpoints" discovery_endpoints: TextSet = "" file "discovery-config/client/endpoints",
            Effective, "Comma-separated endpoints of the discovery service.";
        "discovery-dial-timeout" discovery_dial_timeout: Span = "2s" file "discovery-config/client/dial-timeout",
            Effective, "Time to connect to the discovery service.";
        "discovery-request-timeout" discovery_request_timeout: Span = "5s" file "discovery-config/client/request-timeout",
            Effective, "Time for one request to the discovery service.";
        "discovery-keepalive-time" discovery_keepalive_time: Span = "2s" file "discovery-config/client/keepalive-time",
            Ignored("each question has a connection of its own"), "Time between pings to the discovery service.";
        "discovery-keepalive-timeout" discovery_keepalive_timeout: Span = "6s" file "discovery-config/client/keepalive-timeout",
            Ignored("each question has a connection of its own"), "Time to wait for an answer to such a ping.";
        "discovery-insecure-transport" discovery_insecure_transport: Switch = "true" file "discovery-config/client/secure/insecure-transport",
            NotYet("connections are not encrypted yet"), "Talk to the discovery service in the clear.";
        "discovery-insecure-skip-tls-verify" discovery_insecure_skip_tls_verify: Switch = "false" file "discovery-config/client/secure/insecure-skip-tls-verify",
            NotYet("connections are not encrypted yet"), "Trust any certificate of the discovery service.";
        "discovery-cert" discovery_cert: Text = "" file "discovery-config/client/secure/cert",
            NotYet("connections are not encrypted yet"), "Client certificate for the discovery service.";
        "discovery-key" discovery_key: Text = "" file "discovery-config/client/secure/key",
            NotYet("connections are not encrypted yet"), "Key of that certificate.";
        "discovery-cacert" discovery_cacert: Text = "" file "discovery-config/client/secure/cacert",
            NotYet("connections are not encrypted yet"), "Authorities that sign the certificate of the discovery service.";
        "discovery-user" discovery_user: Text = "" file "discovery-config/client/auth/username",
            NotYet("nobody logs in at the discovery service yet"), "User name at the discovery service.";
        "discovery-password" discovery_password: Text = "" file "discovery-config/client/auth/password",
            NotYet("nobody logs in at the discovery service yet"), "Password of that user.";
        "discovery-fallback" discovery_fallback: FallbackText = "exit" file "",
            Ignored("there is no proxy to fall back to"), "What to do when discovery fails; only 'exit' is left.";
        "discovery-srv" discovery_srv: Text = "",
            Effective, "Domain whose SRV records name the members.";
        "discovery-srv-name" discovery_srv_name: Text = "",
            Effective, "Suffix of the service name in those records.";
        "strict-reconfig-check" strict_reconfig_check: Switch = "true",
            Effective, "Refuse changes of membership that would cost the quorum.";
        "pre-vote" pre_vote: Switch = "true",
            Effective, "Ask the others before standing for election.";
        "auto-compaction-retention" auto_compaction_retention: Text = "0",
            Effective, "History to keep: a time (bare numbers are hours) or a number of revisions; 0 compacts only on request.";
        "auto-compaction-mode" auto_compaction_mode: Text = "periodic",
            Effective, "What --auto-compaction-retention counts: 'periodic' time or 'revision' numbers.";
        "v2-deprecation" v2_deprecation: DeprecationText = "" shown "write-only-drop-data",
            Ignored("deprecated in etcd; version 2 of the API is gone"), "Stage of the farewell to version 2. Deprecated.";
    }
    Security {
        "cert-file" cert_file: Text = "" file "client-transport-security/cert-file",
            NotYet("connections are not encrypted yet"), "Certificate shown to clients.";
        "key-file" key_file: Text = "" file "client-transport-security/key-file",
            NotYet("connections are not encrypted yet"), "Key of that certificate.";
        "client-cert-auth" client_cert_auth: Switch = "false" file "client-transport-security/client-cert-auth",
            NotYet("connections are not encrypted yet"), "Demand a certificate from clients.";
        "client-cert-file" client_cert_file: Text = "" file "client-transport-security/client-cert-file",
            NotYet("connections are not encrypted yet"), "Certificate for connections that this member opens, if not the one above.";
        "client-key-file" client_key_file: Text = "" file "client-transport-security/client-key-file",
            NotYet("connections are not encrypted yet"), "Key of that certificate.";
        "client-crl-file" client_crl_file: Text = "" file "",
            NotYet("connections are not encrypted yet"), "Certificates of clients that are revoked.";
        "client-cert-allowed-hostname" client_cert_allowed_hostname: TextList = "" file "client-transport-security/allowed-hostname",
            NotYet("connections are not encrypted yet"), "Comma-separated host names of which a client certificate must hold one.";
        "trusted-ca-file" trusted_ca_file: Text = "" file "client-transport-security/trusted-ca-file",
            NotYet("connections are not encrypted yet"), "Authorities that sign the certificates of clients.";
        "auto-tls" auto_tls: Switch = "false" file "client-transport-security/auto-tls",
            NotYet("connections are not encrypted yet"), "Make a certificate for clients if none is given.";
        "peer-cert-file" peer_cert_file: Text = "" file "peer-transport-security/cert-file",
            NotYet("connections are not encrypted yet"), "Certificate shown to other members.";
        "peer-key-file" peer_key_file: Text = "" file "peer-transport-security/key-file",
            NotYet("connections are not encrypted yet"), "Key of that certificate.";
        "peer-client-cert-auth" peer_client_cert_auth: Switch = "false" file "peer-transport-security/client-cert-auth",
            NotYet("connections are not encrypted yet"), "Demand a certificate from other members.";
        "peer-client-cert-file" peer_client_cert_file: Text = "" file "peer-transport-security/client-cert-file",
            NotYet("connections are not encrypted yet"), "Certificate for connections that this member opens, if not the one above.";
        "peer-client-key-file" peer_client_key_file: Text = "" file "peer-transport-security/client-key-file",
            NotYet("connections are not encrypted yet"), "Key of that certificate.";
        "peer-trusted-ca-file" peer_trusted_ca_file: Text = "" file "peer-transport-security/trusted-ca-file",
            NotYet("connections are not encrypted yet"), "Authorities that sign the certificates of other members.";
        "peer-auto-tls" peer_auto_tls: Switch = "false" file "peer-transport-security/auto-tls",
            NotYet("connections are not encrypted yet"), "Make a certificate for other members if none is given.";
        "peer-cert-allowed-cn" peer_cert_allowed_cn: TextList = "" file "peer-transport-security/allowed-cn",
            NotYet("connections are not encrypted yet"), "Comma-separated common names of which a member's certificate must hold one.";
        "peer-cert-allowed-hostname" peer_cert_allowed_hostname: TextList = "" file "peer-transport-security/allowed-hostname",
            NotYet("connections are not encrypted yet"), "Comma-separated host names of which a member's certificate must hold one.";
        "peer-crl-file" peer_crl_file: Text = "" file "",
            NotYet("connections are not encrypted yet"), "Certificates of members that are revoked.";
        "peer-skip-client-san-verification" peer_skip_client_san_verification: Switch = "false" file "peer-transport-security/skip-client-san-verification",
            NotYet("connections are not encrypted yet"), "Do not compare a member's address with its certificate.";
        "self-signed-cert-validity" self_signed_cert_validity: Unsigned = "1",
            NotYet("connections are not encrypted yet"), "Years that certificates made by --auto-tls and --peer-auto-tls are valid.";
        "cipher-suites" cipher_suites: TextList = "",
            NotYet("connections are not encrypted yet"), "Comma-separated cipher suites; empty leaves the choice to the library.";
        "tls-min-version" tls_min_version: Text = "TLS1.2",
            NotYet("connections are not encrypted yet"), "Oldest TLS version: TLS1.2 or TLS1.3.";
        "tls-max-version" tls_max_version: Text = "",
            NotYet("connections are not encrypted yet"), "Newest TLS version: TLS1.2 or TLS1.3; empty means the newest known.";
        "cors" cors: Origins = "*",
            Effective, "Comma-separated origins of web pages that may ask; * means all.";
        "host-whitelist" host_whitelist: HostSet = "*",
            Effective, "Comma-separated host names that HTTP requests in the clear may carry; * means all.";
    }
    Auth {
        "auth-token" auth_token: Text = "simple",
            Effective, "Kind of token and its options: simple, or jwt,OPTION=VALUE...";
        "bcrypt-cost" bcrypt_cost: Unsigned = "10",
            Effective, "Cost of hashing a password, 4 to 31.";
        "auth-token-ttl" auth_token_ttl: Unsigned = "300",
            Effective, "Seconds that a simple token lives without use.";
    }
    Monitoring {
        "enable-pprof" enable_pprof: Switch = "false",
            Effective, "Answer under /debug/pprof/. There is no Go runtime here to profile, and the answer says so.";
        "metrics" metrics: Text = "basic",
            Effective, "Level of detail of the metrics: basic or extensive.";
        "listen-metrics-urls" listen_metrics_urls: Urls = "",
            Effective, "Comma-separated URLs that serve /metrics and health checks alone.";
    }
    Logging {
        "logger" logger: Text = "zap",
            Effective, "Form of the log; 'zap' is the only value.";
        "log-outputs" log_outputs: TextSet = "default",
            Effective, "Comma-separated places for the log: stderr, stdout, systemd/journal, file paths; default means stderr.";
        "log-level" log_level: Text = "info",
            Effective, "Least level that is logged: debug, info, warn, error, panic or fatal.";
        "log-format" log_format: Text = "json",
            Effective, "Form of a line: json or console.";
        "enable-log-rotation" enable_log_rotation: Switch = "false",
            NotYet("log files are not rotated; use a tool that copies and truncates"), "Rotate the one log file among the outputs.";
        "log-rotation-config-json" log_rotation_config_json: Text = "{\"maxsize\": 100, \"maxage\": 0, \"maxbackups\": 0, \"localtime\": false, \"compress\": false}",
            NotYet("log files are not rotated; use a tool that copies and truncates"), "Limits of that rotation: size in MB, age in days, number of files, time zone, compression.";
        "warning-unary-request-duration" warning_unary_request_duration: Span = "300ms",
            Effective, "Time of one request above which a warning is logged.";
    }
    Tracing {
        "enable-distributed-tracing" enable_distributed_tracing: Switch = "false",
            NotYet("no spans are exported yet"), "Export spans of requests.";
        "distributed-tracing-address" distributed_tracing_address: Text = "localhost:4317",
            NotYet("no spans are exported yet"), "Address of the collector.";
        "distributed-tracing-service-name" distributed_tracing_service_name: Text = "etcd",
            NotYet("no spans are exported yet"), "Service name in the spans, the same for all members.";
        "distributed-tracing-instance-id" distributed_tracing_instance_id: Text = "",
            NotYet("no spans are exported yet"), "Instance name in the spans, different for each member.";
        "distributed-tracing-sampling-rate" distributed_tracing_sampling_rate: Signed = "0",
            NotYet("no spans are exported yet"), "Spans to keep per million.";
    }
    Features {
        "corrupt-check-time" corrupt_check_time: Span = "0s",
            Effective, "Time between two comparisons of members' data; 0 never compares.";
        "compact-hash-check-time" compact_hash_check_time: Span = "1m",
            Effective, "Time between two comparisons of compaction hashes.";
        "compaction-batch-limit" compaction_batch_limit: Signed = "0" shown "1000",
            Ignored("space of old versions comes back in RocksDB's own compactions"), "Most versions removed in one step of a compaction.";
        "compaction-sleep-interval" compaction_sleep_interval: Span = "0s" shown "10ms",
            Ignored("space of old versions comes back in RocksDB's own compactions"), "Pause between two steps of a compaction.";
        "watch-progress-notify-interval" watch_progress_notify_interval: Span = "0s" shown "10m",
            Effective, "Time without events after which a watcher that asked for it is told the revision; at least 100ms.";
        "warning-apply-duration" warning_apply_duration: Span = "100ms",
            Effective, "Time to apply an entry above which a warning is logged.";
        "bootstrap-defrag-threshold-megabytes" bootstrap_defrag_threshold_megabytes: Unsigned = "0",
            Ignored("space comes back while the server runs"), "Defragment at start-up when at least this much space would be freed; 0 never does.";
        "max-learners" max_learners: Signed = "1",
            Effective, "Most learners in the cluster.";
        "downgrade-check-time" downgrade_check_time: Span = "5s",
            Ignored("no member goes down to the version before: a downgrade stays until it is cancelled"), "Time between two checks whether a downgrade is done.";
    }
    Unsafe {
        "force-new-cluster" force_new_cluster: Switch = "false",
            Effective, "Start from the data of one member as a cluster of its own.";
        "unsafe-no-fsync" unsafe_no_fsync: Switch = "false",
            Effective, "Do not wait for the disk: acknowledged writes may be lost in a crash.";
    }
    Skeg {
        "skeg-memtable-bytes" skeg_memtable_bytes: Unsigned = "134217728",
            Effective, "Memory for writes that are not in a table file yet.";
        "skeg-block-cache-bytes" skeg_block_cache_bytes: Unsigned = "67108864",
            Effective, "Memory for blocks read from table files.";
        "skeg-metadata-cache-bytes" skeg_metadata_cache_bytes: Unsigned = "33554432",
            Effective, "Memory for revisions, versions and leases of hot keys.";
        "skeg-watch-ring-bytes" skeg_watch_ring_bytes: Unsigned = "67108864",
            Effective, "Memory for recent events; watchers further behind read from disk.";
        "skeg-log-tail-bytes" skeg_log_tail_bytes: Unsigned = "16777216",
            Effective, "Memory for recent log entries.";
        "skeg-nospace-low-water" skeg_nospace_low_water: Unsigned = "0",
            Effective, "Percentage of the quota below which a member's NOSPACE alarm ends by itself; 0 leaves it until it is cleared.";
        "skeg-mend-divergence" skeg_mend_divergence: Switch = "true",
            Effective, "A member whose data differs from the quorum's, or cannot be read, takes a peer's in its place; otherwise it stays out of service.";
        "skeg-scrub-interval" skeg_scrub_interval: Span = "168h" shown "168h0m0s",
            Effective, "Time between two slow readings of everything stored, to find what can no longer be read; 0 never reads.";
        "skeg-join" skeg_join: Text = "",
            Effective, "Peer URLs of running members: a member without data has itself added there, catches up and votes.";
        "skeg-replace" skeg_replace: Text = "",
            Effective, "Name or id of a dead member whose place a joining member takes.";
    }
    Other {
        "config-file" config_file: Text = "" file "",
            Effective, "YAML or JSON file with the settings; flags and variables are then ignored.";
        "version" version: Switch = "false" file "",
            Effective, "Print the version and exit.";
    }
    Hidden {
        "cluster-active-size" cluster_active_size: Anything = "" file "",
            Ignored("gone from etcd long ago"), "No effect.";
        "cluster-remove-delay" cluster_remove_delay: Anything = "" file "",
            Ignored("gone from etcd long ago"), "No effect.";
        "cluster-sync-interval" cluster_sync_interval: Anything = "" file "",
            Ignored("gone from etcd long ago"), "No effect.";
        "config" config: Anything = "" file "",
            Ignored("gone from etcd long ago"), "No effect.";
        "force" force: Anything = "" file "",
            Ignored("gone from etcd long ago"), "No effect.";
        "max-result-buffer" max_result_buffer: Anything = "" file "",
            Ignored("gone from etcd long ago"), "No effect.";
        "max-retry-attempts" max_retry_attempts: Anything = "" file "",
            Ignored("gone from etcd long ago"), "No effect.";
        "peer-heartbeat-interval" peer_heartbeat_interval: Anything = "" file "",
            Ignored("gone from etcd long ago"), "No effect.";
        "peer-election-timeout" peer_election_timeout: Anything = "" file "",
            Ignored("gone from etcd long ago"), "No effect.";
        "retry-interval" retry_interval: Anything = "" file "",
            Ignored("gone from etcd long ago"), "No effect.";
        "snapshot" snapshot: Anything = "" file "",
            Ignored("gone from etcd long ago"), "No effect.";
        "v" v: Anything = "" file "",
            Ignored("gone from etcd long ago"), "No effect.";
        "vv" vv: Anything = "" file "",
            Ignored("gone from etcd long ago"), "No effect.";
        "test.coverprofile" test_coverprofile: Anything = "" file "",
            Ignored("gone from etcd long ago"), "No effect.";
        "test.outputdir" test_outputdir: Anything = "" file "",
            Ignored("gone from etcd long ago"), "No effect.";
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::{SETTINGS, Section, Values, find};

    #[test]
    fn every_default_can_be_read() {
        for setting in SETTINGS.iter().filter(|setting| !setting.default.is_empty()) {
            let read = (setting.set)(&mut Values::unset(), setting.default);
            assert_eq!(read, Ok(()), "--{}", setting.name);
        }
    }

    #[test]
    fn names_and_places_in_files_are_unique() {
        let names: BTreeSet<_> = SETTINGS.iter().map(|setting| setting.name).collect();
        assert_eq!(names.len(), SETTINGS.len());
        let paths: Vec<_> =
            SETTINGS.iter().map(|setting| setting.file_path).filter(|path| !path.is_empty()).collect();
        assert_eq!(paths.iter().collect::<BTreeSet<_>>().len(), paths.len());
        assert!(find("data-dir").is_some_and(|setting| setting.section == Section::Member));
    }

    #[test]
    fn help_is_a_sentence() {
        for setting in SETTINGS {
            assert!(setting.help.ends_with(['.', ':']), "--{}", setting.name);
            assert!(setting.help.starts_with(char::is_uppercase), "--{}", setting.name);
        }
    }
}
