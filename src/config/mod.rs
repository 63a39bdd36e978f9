//! Settings: flags, environment and config file become one checked [`Config`].
//!
//! ```text
//! arguments ─┐
//! ETCD_*    ─┤→ source (syntax, which of them counts) → check (what fits together) → Config
//! file      ─┘        ↑ setting: the table, one row per flag
//! ```
//!
//! What one process may choose for itself is in [`MemberSettings`], what all members of a cluster must agree on in
//! [`ClusterSettings`]. Both hold typed values (URLs, durations, sizes), so nobody parses a setting twice.
//!
//! A value that cannot be read or contradicts another is a [`Refusal`] that names the flag: exit status 2 for bad syntax, 1
//! for the rest, as etcd. A flag of etcd that does nothing here is accepted, and [`Config::notices`] says so.
//!
//! Nothing here opens, binds or creates anything; the config file is the only thing read.

mod check;
mod feature_gate;
mod help;
mod kind;
mod setting;
mod source;
mod syntax;
#[cfg(test)]
mod tests;
mod url;

use std::ffi::OsString;
use std::num::NonZeroU64;
use std::path::PathBuf;
use std::time::Duration;

pub use self::check::first_membership;
pub use self::feature_gate::{FeatureGate, FeatureGates, Stage};
pub use self::help::USAGE;
pub use self::syntax::ValueError;
pub use self::url::{ListenAddress, ListenUrl, Scheme, Url};

/// Everything the command line can ask for.
#[derive(Debug, Clone)]
pub enum Request {
    /// Run the server.
    Run(Box<Config>),
    /// Print this and exit.
    Help(String),
    /// Print the version and exit.
    Version,
}

/// Why the settings are refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// The command line cannot be read; exit status 2, with the usage.
    #[error("{0}")]
    Usage(String),
    /// A value is out of bounds or contradicts another; exit status 1.
    #[error("{0}")]
    Invalid(String),
}

/// The settings of one process, checked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    /// What this process chose.
    pub member: MemberSettings,
    /// What all members must agree on.
    pub cluster: ClusterSettings,
    /// Where and how to log.
    pub log: LogSettings,
    /// What to say about the settings once the log is open.
    pub notices: Vec<Notice>,
}

/// What one process may choose for itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemberSettings {
    /// Name of this member.
    pub name: String,
    /// Directory that holds everything this member stores.
    pub data_dir: PathBuf,
    /// Directory of the Raft log, when it is not below `data_dir`.
    pub wal_dir: Option<PathBuf>,
    /// Where other members reach this one.
    pub listen_peer_urls: Vec<ListenUrl>,
    /// Where clients reach gRPC, and HTTP too when `listen_client_http_urls` is empty.
    pub listen_client_urls: Vec<ListenUrl>,
    /// Where clients reach HTTP alone; never an address of `listen_client_urls`.
    pub listen_client_http_urls: Vec<ListenUrl>,
    /// Where metrics and health checks are served alone.
    pub listen_metrics_urls: Vec<ListenUrl>,
    /// What other members are told to dial.
    pub initial_advertise_peer_urls: Vec<Url>,
    /// What clients are told to dial.
    pub advertise_client_urls: Vec<Url>,
    /// Set SO_REUSEPORT on listeners.
    pub socket_reuse_port: bool,
    /// Set SO_REUSEADDR on listeners.
    pub socket_reuse_address: bool,
    /// Applied entries after which the log may be shortened.
    pub snapshot_count: u64,
    /// Entries kept behind the shortened log.
    pub snapshot_catchup_entries: u64,
    /// Stored bytes above which NOSPACE is raised; none for no limit.
    pub quota_backend_bytes: Option<NonZeroU64>,
    /// Most operations in a transaction.
    pub max_txn_ops: u64,
    /// Largest request.
    pub max_request_bytes: u64,
    /// Most streams of a client connection.
    pub max_concurrent_streams: u32,
    /// How connections of clients are kept alive.
    pub keepalive: KeepAlive,
    /// Quiet time after which a watcher that asked for it is told the revision.
    pub watch_progress_notify_interval: Duration,
    /// Time to apply an entry above which a warning is logged.
    pub warning_apply_duration: Duration,
    /// Time of a request above which a warning is logged.
    pub warning_unary_request_duration: Duration,
    /// Percentage of the quota below which the NOSPACE alarm ends by itself, at most 99; 0 for never.
    pub nospace_low_water_percent: u64,
    /// Replace damaged data by a peer's.
    pub mend_divergence: bool,
    /// Time between readings of everything stored; zero for never.
    pub scrub_interval: Duration,
    /// What is compacted unasked.
    pub auto_compaction: AutoCompaction,
    /// Origins of web pages that may ask; `*` or none for all.
    pub cors: Vec<String>,
    /// Host names that plain HTTP requests may carry; `*` or none for all.
    pub host_whitelist: Vec<String>,
    /// Keep a latency histogram per method.
    pub extensive_metrics: bool,
    /// Answer under /debug/pprof/.
    pub enable_pprof: bool,
    /// Do not wait for the disk.
    pub unsafe_no_fsync: bool,
    /// Refuse changes of the members that put the quorum at risk.
    pub strict_reconfig_check: bool,
    /// Ask the others before standing for election.
    pub pre_vote: bool,
    /// Go on alone, without the other members.
    pub force_new_cluster: bool,
    /// Time between comparisons of the members' histories; zero for never.
    pub corrupt_check_time: Duration,
    /// Time between comparisons of compaction hashes, when their feature is on.
    pub compact_hash_check_time: Duration,
    /// Learners that there may be; 0 for any number.
    pub max_learners: u32,
    /// Kind of token and its options.
    pub auth_token: String,
    /// Life of a simple token after its last use.
    pub auth_token_ttl: Duration,
    /// Cost of hashing a password.
    pub bcrypt_cost: u32,
    /// Switches of features.
    pub feature_gates: FeatureGates,
    /// Memory that does not depend on the amount of data.
    pub memory: MemoryBudget,
}

/// What all members of a cluster must agree on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClusterSettings {
    /// The members of a new cluster as the flag has them; read and checked by [`Config::bootstrap`] alone.
    pub initial_cluster: String,
    /// Tells clusters with the same addresses apart; part of their ids.
    pub initial_cluster_token: String,
    /// Where the first members find each other, instead of in `initial_cluster`.
    pub discovery: Option<Discovery>,
    /// The DNS records that name the first members, instead of `initial_cluster`.
    pub srv: Option<SrvDiscovery>,
    /// Which members a member without data asks to be let in, instead of having been added before.
    pub join: Option<Join>,
    /// Found a cluster, or join one.
    pub initial_cluster_state: InitialClusterState,
    /// Time between heartbeats of the leader; at least 1 ms.
    pub heartbeat_interval: Duration,
    /// Quiet time after which a follower stands for election; at least five heartbeats, at most 50 s.
    pub election_timeout: Duration,
}

/// A discovery service: another cluster in whose keys the members of a new one register.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Discovery {
    /// Its addresses.
    pub endpoints: Vec<String>,
    /// Names the cluster that is to begin.
    pub token: String,
    /// Time to connect.
    pub dial_timeout: Duration,
    /// Time for a request.
    pub request_timeout: Duration,
}

/// DNS records that say where the first members are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SrvDiscovery {
    /// The domain that has them.
    pub domain: String,
    /// What follows the name of the service, after a hyphen; empty for nothing.
    pub service_name: String,
}

/// How a member without data has itself added to a running cluster.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Join {
    /// Peer URLs of running members.
    pub members: Vec<Url>,
    /// Name or id of the member whose place it takes; empty for none.
    pub replaces: String,
}

/// One member of `--initial-cluster`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InitialMember {
    /// Its name.
    pub name: String,
    /// Where the others reach it; sorted.
    pub peer_urls: Vec<Url>,
}

/// The members of `--initial-cluster`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FirstMembership {
    /// This one.
    pub local: InitialMember,
    /// All of them, this one too.
    pub members: Vec<InitialMember>,
}

/// Whether a member without data founds a cluster.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum InitialClusterState {
    /// It does.
    New,
    /// It joins one that runs.
    Existing,
}

/// How client connections are kept alive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KeepAlive {
    /// Shortest time a client must leave between pings.
    pub min_time: Duration,
    /// Quiet time after which the server pings; none for never.
    pub interval: Option<Duration>,
    /// Time to answer such a ping; none for any time.
    pub timeout: Option<Duration>,
}

/// What is compacted unasked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AutoCompaction {
    /// Nothing.
    Off,
    /// Revisions older than this.
    Periodic(Duration),
    /// Revisions further back than this many.
    Revision(NonZeroU64),
}

/// Memory that the server may hold at any size of the data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryBudget {
    /// Writes that are not in a table file yet.
    pub memtable_bytes: usize,
    /// Blocks read from table files.
    pub block_cache_bytes: usize,
    /// Revisions, versions and leases of hot keys.
    pub metadata_cache_bytes: usize,
    /// Recent events.
    pub watch_ring_bytes: usize,
    /// Recent log entries.
    pub log_tail_bytes: usize,
}

/// Where and how to log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LogSettings {
    /// The least level that is logged.
    pub level: LogLevel,
    /// The form of a line.
    pub format: LogFormat,
    /// The places that get each line; distinct, none to discard them.
    pub outputs: Vec<LogOutput>,
}

/// How grave a log line is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum LogLevel {
    /// Details for developers.
    Debug,
    /// A change of state.
    Info,
    /// Odd, but it went on.
    Warn,
    /// A person must look.
    Error,
    /// A bug ends the process.
    Panic,
    /// The process ends.
    Fatal,
}

/// The form of a log line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogFormat {
    /// One JSON object.
    Json,
    /// Columns separated by tabs.
    Console,
}

/// A place for log lines.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum LogOutput {
    /// Standard error.
    Stderr,
    /// Standard output.
    Stdout,
    /// The systemd journal.
    Journal,
    /// A file, appended to.
    File(PathBuf),
}

/// Something to say about the settings when the log is open.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Notice {
    /// How grave it is: info or warn.
    pub level: LogLevel,
    /// What is said.
    pub text: String,
    /// The flag it is about, without dashes; empty when it is about none.
    pub flag: &'static str,
}

/// Reads a duration as Go writes it; `None` for one that is none, or negative.
pub fn duration(text: &str) -> Option<Duration> {
    syntax::duration(text).ok().and_then(|nanos| u64::try_from(nanos).ok()).map(Duration::from_nanos)
}

/// Takes in the arguments (the program's name aside) and the environment.
///
/// # Errors
/// [`Refusal`], naming the flag.
pub fn load(
    arguments: impl IntoIterator<Item = OsString>,
    environment: impl IntoIterator<Item = (OsString, OsString)>,
) -> Result<Request, Refusal> {
    match source::read(arguments, environment)? {
        source::Wish::Help => Ok(Request::Help(help::flags())),
        source::Wish::Version => Ok(Request::Version),
        source::Wish::Settings(given) => check::check(&given).map(|config| Request::Run(Box::new(config))),
    }
}

impl Config {
    /// Returns the first membership; cluster and member ids derive from it and the token. For a member without data only:
    /// one with data keeps the membership it stored, and its initial-cluster flags have no meaning.
    ///
    /// # Errors
    /// [`Refusal::Invalid`] when the initial cluster cannot be read, lacks this member or its URLs, or repeats a URL.
    pub fn bootstrap(&self) -> Result<FirstMembership, Refusal> {
        check::bootstrap(self)
    }
}

impl MemberSettings {
    /// Returns the time a request may take: 5 s, and two elections.
    pub fn request_timeout(&self, cluster: &ClusterSettings) -> Duration {
        Duration::from_secs(5) + 2 * cluster.election_timeout
    }
}

impl LogLevel {
    /// Returns the name used in flags and log lines.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Debug => "debug",
            Self::Info => "info",
            Self::Warn => "warn",
            Self::Error => "error",
            Self::Panic => "panic",
            Self::Fatal => "fatal",
        }
    }
}

impl Default for LogSettings {
    /// What is logged before the settings are known.
    fn default() -> Self {
        Self { level: LogLevel::Info, format: LogFormat::Json, outputs: vec![LogOutput::Stderr] }
    }
}
