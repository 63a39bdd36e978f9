//! One member's part in consensus: starting it, proposing, reading, and what it knows of the leader.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use openraft::async_runtime::WatchReceiver;
use openraft::{Config, SnapshotPolicy};
use parking_lot::Mutex;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;
use tracing::info;

use super::codec;
use super::force;
use super::leadership::{self, Leadership};
use super::log_store::LogStore;
use super::membership;
use super::mend::Mending;
use super::network::{Forwarder, Kin, Links, Network, Timeouts};
use super::outcomes::Outcomes;
use super::read_index::{self, ReadError, ReadIndex};
use super::snapshot::Source;
use super::state_machine::{Listeners, Machine};
use super::trails::{self, TrailComparison};
use super::types::{LogId, Peer, Raft, SnapshotMeta, Vote};
use crate::apply::{Compaction, State};
use crate::auth::token::Tokens;
use crate::blocking::{self, Background};
use crate::clock;
use crate::lease::deadlines::Deadlines;
use crate::storage::data_dir::Identity;
use crate::storage::lives::LivesError;
use crate::storage::log::{Log, LogError, LogObserver, LogOptions, LogStats, Recovered};
use crate::storage::schema::{Family, MetaKey};
use crate::storage::snapshot::Generations;
use crate::telemetry::metrics::Metrics;
use crate::watch::Hub;

/// How a member takes part.
#[derive(Clone)]
pub struct NodeOptions {
    /// This member and its cluster.
    pub identity: Identity,
    /// How a member without a log begins.
    pub beginning: Beginning,
    /// Where the Raft log lives.
    pub log_dir: PathBuf,
    /// Memory for the log's newest entries, in bytes.
    pub log_tail_bytes: usize,
    /// Never sync the log.
    pub no_fsync: bool,
    /// Hears of the log's writes and syncs.
    pub observer: Option<Arc<dyn LogObserver>>,
    /// Time between heartbeats.
    pub heartbeat_interval: Duration,
    /// Time without a heartbeat before an election.
    pub election_timeout: Duration,
    /// Ask the others before standing for election.
    pub pre_vote: bool,
    /// Go on alone, without the other members.
    pub force_new_cluster: bool,
    /// How long a proposal or a read index may take.
    pub request_timeout: Duration,
    /// Encoded size of the largest proposal, in bytes.
    pub max_request_bytes: usize,
    /// Counters to add to.
    pub metrics: Arc<Metrics>,
    /// Time to apply something above which a warning is logged.
    pub slow_apply: Duration,
    /// Log entries kept behind the last flush, for slow followers.
    pub keep_entries: u64,
    /// The directories of the store.
    pub generations: Arc<Generations>,
    /// Who is known by what.
    pub tokens: Arc<Tokens>,
    /// Where the lives of this member and its peers are kept.
    pub lives_dir: PathBuf,
}

/// How a member without a log begins.
#[derive(Clone, Debug)]
pub enum Beginning {
    /// As one of these, by id, with name and peer URLs; each of them begins the same way.
    Founding(BTreeMap<u64, (String, Vec<String>)>),
    /// Without a log, waiting to be given one; these are reached at these URLs.
    Joining(BTreeMap<u64, Vec<String>>),
    /// With the log that it has.
    Restarting,
}

/// Why a member cannot start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The log cannot be opened.
    #[error(transparent)]
    Log(#[from] LogError),
    /// A record does not decode.
    #[error("raft records: {0}")]
    Records(#[from] io::Error),
    /// The system gives no thread.
    #[error("cannot start a thread: {0}")]
    Thread(#[source] io::Error),
    /// Log and state do not fit together.
    #[error(
        "the raft log holds entries {first} to {last} but the state machine stands at {applied}: part of the data is \
         missing, restore the directory that belongs to it or start this member anew"
    )]
    Mismatch {
        /// First index in the log.
        first: u64,
        /// Last index in the log.
        last: i128,
        /// Last index applied to the files.
        applied: i128,
    },
    /// The lives cannot be read or written.
    #[error(transparent)]
    Lives(#[from] LivesError),
    /// Raft refused its settings or stopped.
    #[error("raft: {0}")]
    Raft(String),
}

/// What the member knows of consensus.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RaftStatus {
    /// The leader's id, 0 if none is known.
    pub leader: u64,
    /// Current term.
    pub term: u64,
    /// Index of the last committed entry.
    pub committed: u64,
    /// Index of the last applied entry.
    pub applied: u64,
    /// Index of the first entry in the log.
    pub log_first: u64,
}

/// What went by since the start, for metrics.
#[derive(Debug, Default)]
pub struct NodeCounts {
    /// Proposals under way.
    pub pending: AtomicUsize,
    /// Proposals without an outcome.
    pub failed: AtomicU64,
    /// Times that another leader was seen.
    pub leader_changes: AtomicU64,
    /// Questions to the leadership that were asked again.
    pub slow_reads: AtomicU64,
    /// Reads without an answer from the leadership.
    pub failed_reads: AtomicU64,
}

/// The member's handle on consensus; clones share it.
#[derive(Clone)]
pub struct Node {
    pub(super) raft: Raft,
    log: Log,
    pub(super) state: State,
    read_index: ReadIndex,
    pub(super) applied: watch::Receiver<u64>,
    replaced: watch::Receiver<()>,
    pub(super) leadership: Arc<Leadership>,
    pub(super) links: Arc<Links>,
    pub(super) forwarder: Forwarder,
    pub(super) outcomes: Arc<Outcomes>,
    pub(super) in_flight: Arc<AtomicUsize>,
    background: Arc<Background>,
    pub(super) counts: Arc<NodeCounts>,
    pub(super) deadlines: Arc<Mutex<Deadlines>>,
    pub(super) options: Arc<NodeOptions>,
    /// What mending works with.
    pub(super) mending: Arc<Mending>,
    /// What came of the last comparison with the peers.
    pub(super) compared: watch::Sender<TrailComparison>,
    /// Refusals of peers that were logged.
    refused: Arc<Mutex<BTreeSet<String>>>,
    tasks: Arc<Mutex<Vec<JoinHandle<()>>>>,
}

impl Node {
    /// Opens the log, recovers, and starts to take part. Returns before a leader is known.
    ///
    /// # Errors
    /// [`StartError`]; nothing was changed on disk, except that a torn end of the log was cut.
    pub async fn start(
        options: NodeOptions,
        state: State,
        hub: Arc<Hub>,
    ) -> Result<(Node, mpsc::UnboundedReceiver<Compaction>), StartError> {
        let mut log_options = LogOptions::new(options.log_dir.clone());
        log_options.tail_bytes = options.log_tail_bytes;
        log_options.no_fsync = options.no_fsync;
        log_options.observer.clone_from(&options.observer);
        let (log, mut recovered) = Log::open(log_options)?;
        let is_new = check_position(&state, &recovered, options.generations.installed_index())?;
        info!(
            first = recovered.first_index,
            next = recovered.next_index,
            cut_bytes = recovered.cut_bytes,
            "raft log opened"
        );

        if options.force_new_cluster {
            force::stand_alone(&log, &mut recovered, &state, options.identity.member_id)?;
        }
        let kin = Kin::begin(&options.lives_dir)?;
        let links = Links::new(options.identity, kin, timeouts(&options), Arc::clone(&options.metrics));
        let links = Arc::new(links);
        if let Beginning::Joining(members) = &options.beginning {
            links.follow(members.iter().map(|(id, urls)| (*id, urls.as_slice())));
        }
        links.follow_cluster(&state.cluster.read());
        options.tokens.begin_at(recovered.next_index);
        let (compactions, to_compact) = mpsc::unbounded_channel();
        let applied_index = stored_applied(&state)?.map_or(0, |index| index + 1);
        let (applied_sender, applied) = watch::channel(applied_index);
        let (replaced_sender, replaced) = watch::channel(());
        let deadlines = Arc::new(Mutex::new(Deadlines::default()));
        let outcomes: Arc<Outcomes> = Arc::default();
        let listeners = Listeners {
            hub,
            deadlines: Arc::clone(&deadlines),
            compactions,
            applied: applied_sender,
            replaced: replaced_sender,
            outcomes: Arc::clone(&outcomes),
            links: Arc::clone(&links),
            tokens: Arc::clone(&options.tokens),
            metrics: Arc::clone(&options.metrics),
            slow: options.slow_apply,
        };
        let background = Background::start("skeg-background").map_err(StartError::Thread)?;
        let background = Arc::new(background);
        let source = Source::new(
            state.clone(),
            Arc::clone(&options.generations),
            log.clone(),
            Arc::clone(&background),
        );
        let machine = Machine::new(state.clone(), log.clone(), Arc::clone(&source), listeners)?;
        let store = LogStore::new(log.clone(), recovered)?;
        let config = raft_config(&options).map_err(StartError::Raft)?;
        let heartbeat_interval = options.heartbeat_interval;
        let network = Network { links: Arc::clone(&links), heartbeat_interval };
        let raft = Raft::new(options.identity.member_id, Arc::new(config), network, store, machine.clone())
            .await
            .map_err(|error| StartError::Raft(error.to_string()))?;
        begin(&raft, &options.beginning, is_new).await?;
        let counts: Arc<NodeCounts> = Arc::default();
        let (read_index, queue) = read_index::channel(options.request_timeout, Arc::clone(&counts));
        let (forwarder, forwarding) = Forwarder::new(Arc::clone(&links));
        let node = Node {
            raft,
            log,
            state,
            read_index,
            applied,
            replaced,
            leadership: Arc::new(Leadership::new(options.election_timeout)),
            links,
            forwarder,
            outcomes,
            in_flight: Arc::default(),
            background,
            counts,
            deadlines,
            mending: Arc::new(Mending::new(machine, source, &options.generations)),
            options: Arc::new(options),
            compared: watch::Sender::default(),
            refused: Arc::default(),
            tasks: Arc::default(),
        };
        let tasks = vec![
            tokio::spawn(forwarding),
            tokio::spawn(trails::compare_often(node.clone())),
            tokio::spawn(read_index::run(node.clone(), queue)),
            tokio::spawn(leadership::follow(node.clone())),
            tokio::spawn(leadership::notice_loss(node.clone())),
            tokio::spawn(membership::follow(node.clone())),
        ];
        *node.tasks.lock() = tasks;
        node.stand_for_election();
        Ok((node, to_compact))
    }

    /// Waits until the local state holds everything acknowledged before the call; see [`super::read_index`].
    pub async fn read_barrier(&self) -> Result<(), ReadError> {
        self.read_index.barrier().await
    }

    /// The current term, for response headers.
    pub fn term(&self) -> u64 {
        self.leadership.term()
    }

    /// This member and its cluster.
    pub fn identity(&self) -> Identity {
        self.options.identity
    }

    /// Waits until the entry at an index is applied here; false if that takes longer than `at_most`.
    pub async fn await_applied(&self, index: u64, at_most: Duration) -> bool {
        let mut applied = self.applied.clone();
        let waited = tokio::time::timeout(at_most, applied.wait_for(|applied| *applied > index)).await;
        matches!(waited, Ok(Ok(_)))
    }

    /// What the member knows of consensus.
    pub fn status(&self) -> RaftStatus {
        let leader = self.leader();
        let metrics = self.raft.metrics();
        let metrics = metrics.borrow_watched();
        RaftStatus {
            leader,
            term: metrics.current_term,
            committed: metrics.local_committed.map_or(0, |log_id| log_id.index()),
            applied: self.applied.borrow().saturating_sub(1),
            log_first: self.log.bounds().start,
        }
    }

    /// Notes where the applied log stands now, to wait for it to move on.
    pub fn applied_changes(&self) -> AppliedChanges {
        let mut applied = self.applied.clone();
        applied.mark_unchanged();
        AppliedChanges { applied, timeout: self.options.request_timeout }
    }

    /// Is told whenever the store was replaced by a peer's.
    pub fn store_replacements(&self) -> watch::Receiver<()> {
        self.replaced.clone()
    }

    /// Where what must not get in the way of requests is done.
    pub fn background(&self) -> &Arc<Background> {
        &self.background
    }

    /// A directory that does not exist, for links to the store's files; what is left of it is removed by the next start.
    pub fn checkpoint_dir(&self) -> PathBuf {
        self.options.generations.checkpoint_dir()
    }

    /// The directories of the store.
    pub(super) fn generations(&self) -> &Arc<Generations> {
        &self.options.generations
    }

    /// Checks that a snapshot from a peer fits what is committed here, which openraft takes for granted.
    pub(super) fn check_snapshot(&self, meta: &SnapshotMeta) -> Result<(), &'static str> {
        let committed = self.raft.metrics().borrow_watched().local_committed;
        let at = |log_id: Option<LogId>| log_id.map(|log_id| log_id.index());
        if meta.last_log_id > committed && at(meta.last_log_id) <= at(committed) {
            return Err("it contradicts what is committed");
        }
        Ok(())
    }

    /// True while this member leads.
    pub fn is_leader(&self) -> bool {
        self.raft.is_leader()
    }

    /// openraft's handle, for the service that peers call.
    pub(super) fn raft(&self) -> &Raft {
        &self.raft
    }

    /// Takes note of an append from the holder of a vote.
    pub(super) fn heard_from(&self, vote: &Vote) {
        let leader = vote.leader_id();
        if vote.is_committed() && leader.term >= self.term() {
            self.leadership.heard(leader.voted_for);
        }
    }

    /// Notes that something was refused; true the first time.
    pub(super) fn note_refused(&self, refusal: &str) -> bool {
        const REMEMBERED_MAX: usize = 1024;
        let mut refused = self.refused.lock();
        refused.len() < REMEMBERED_MAX && refused.insert(refusal.to_owned())
    }

    /// True for a member that was removed from the cluster.
    pub(super) fn is_removed(&self, member_id: u64) -> bool {
        self.state.cluster.read().is_removed(member_id)
    }

    /// The leader's clock over the leases.
    pub fn deadlines(&self) -> &Mutex<Deadlines> {
        &self.deadlines
    }

    /// The settings it was started with.
    pub fn options(&self) -> &NodeOptions {
        &self.options
    }

    /// Bytes of proposals under way.
    pub fn proposed_bytes(&self) -> usize {
        self.in_flight.load(Ordering::Relaxed)
    }

    /// What went by since the start.
    pub fn counts(&self) -> &NodeCounts {
        &self.counts
    }

    /// How long the log's disk has not got a sync done, if that is more than two election time-outs.
    pub fn log_stall(&self) -> Option<Duration> {
        let busy = clock::now().duration_since(self.log.busy_since()?);
        (busy > 2 * self.options.election_timeout).then_some(busy)
    }

    /// The state of the log.
    pub fn log_stats(&self) -> LogStats {
        self.log.stats()
    }

    /// Flushes the state machine's files and lets the log drop what they hold.
    pub async fn checkpoint(&self) -> Result<(), StartError> {
        self.raft.trigger().snapshot().await.map_err(|error| StartError::Raft(error.to_string()))
    }

    /// Waits until consensus has failed for good, and says why. A member in that state serves nothing and must end.
    pub async fn failed(&self) -> String {
        let mut metrics = self.raft.metrics();
        loop {
            if let Err(fatal) = &metrics.borrow_watched().running_state {
                return fatal.to_string();
            }
            if metrics.changed().await.is_err() {
                return "raft has stopped".to_owned();
            }
        }
    }

    /// Stops taking part and closes the log.
    pub async fn stop(self) -> io::Result<()> {
        let stopped = self.raft.shutdown().await;
        let tasks = std::mem::take(&mut *self.tasks.lock());
        for task in tasks {
            task.abort();
        }
        let log = self.log.clone();
        let closed = blocking::spawn(move || log.close()).await;
        stopped.map_err(io::Error::other)?;
        closed.map_err(io::Error::other)?
    }
}

/// A wait for the applied log to move on; see [`Node::applied_changes`].
pub struct AppliedChanges {
    applied: watch::Receiver<u64>,
    timeout: Duration,
}

impl AppliedChanges {
    /// Waits for at least one more applied entry, within the request time-out.
    pub async fn next(mut self) -> Result<(), ReadError> {
        match tokio::time::timeout(self.timeout, self.applied.changed()).await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(_)) => Err(ReadError::Stopped),
            Err(_) => Err(ReadError::TimedOut),
        }
    }
}

/// Gives a member without a log its first entry, or has a lone one lead at once.
async fn begin(raft: &Raft, beginning: &Beginning, is_new: bool) -> Result<(), StartError> {
    let failed = |error: &dyn std::fmt::Display| StartError::Raft(error.to_string());
    match beginning {
        Beginning::Founding(members) if is_new => {
            let members: BTreeMap<u64, Peer> = members
                .iter()
                .map(|(id, (name, urls))| (*id, Peer { peer_urls: urls.clone(), name: name.clone() }))
                .collect();
            raft.initialize(members).await.map_err(|error| failed(&error))
        }
        _ => {
            let membership = Arc::clone(&raft.metrics().borrow_watched().membership_config);
            let mut voters = membership.membership().voter_ids();
            let alone = voters.next() == Some(*raft.node_id()) && voters.next().is_none();
            if alone {
                // Nobody else can lead, so there is nothing to wait for.
                raft.trigger().elect(false).await.map_err(|error| failed(&error))?;
            }
            Ok(())
        }
    }
}

/// How long things between members may take, from the timing of elections.
fn timeouts(options: &NodeOptions) -> Timeouts {
    Timeouts {
        connect: options.election_timeout,
        ping_every: options.election_timeout / 2,
        ping_answer: options.election_timeout,
    }
}

fn raft_config(options: &NodeOptions) -> Result<Config, String> {
    let millis = |duration: Duration| u64::try_from(duration.as_millis()).unwrap_or(u64::MAX);
    let election = millis(options.election_timeout);
    // openraft's election starts a lease (the maximum) and a draw from [minimum, maximum) after the last heartbeat:
    // together in [1, 1.3) time-outs. etcd draws from [1, 2), but counts ticks, on average half of one too soon: with a
    // tick of a tenth, the first of two followers stands after 1.2 in the middle, here after 1.09.
    let (shortest, longest) = (election * 35 / 100, election * 65 / 100);
    let config = Config {
        cluster_name: "skeg".to_owned(),
        heartbeat_interval: millis(options.heartbeat_interval),
        election_timeout_min: shortest.max(millis(options.heartbeat_interval) + 1),
        election_timeout_max: longest,
        enable_pre_vote: Some(options.pre_vote),
        quorum_loss_probe_interval: Some(election * 4),
        snapshot_policy: SnapshotPolicy::Never,
        max_in_snapshot_log_to_keep: options.keep_entries,
        purge_batch_size: 1_000,
        enable_leader_restore: Some(false),
        ..Config::default()
    };
    config.validate().map_err(|error| error.to_string())
}

fn stored_applied(state: &State) -> io::Result<Option<u64>> {
    let store = state.store();
    let stored = store.engine().get(Family::Meta, &MetaKey::Applied.encode());
    let stored = stored.map_err(io::Error::other)?;
    stored.map(|bytes| codec::decode_log_id(&bytes).map(|log_id| log_id.index())).transpose()
}

/// Checks that log and files belong together; true if neither holds anything.
///
/// `installed` is the last entry in files that a peer sent. They are put in place before the log is purged up to there, so
/// a crash may leave them with a log that ends before: it then begins behind them.
fn check_position(state: &State, recovered: &Recovered, installed: Option<u64>) -> Result<bool, StartError> {
    let applied = stored_applied(state)?;
    let next_to_apply = applied.map_or(0, |index| index + 1);
    let just_installed = applied.is_some()
        && applied == installed
        && recovered.vote.is_some()
        && recovered.next_index <= next_to_apply;
    if !just_installed && (next_to_apply < recovered.first_index || next_to_apply > recovered.next_index) {
        return Err(StartError::Mismatch {
            first: recovered.first_index,
            last: i128::from(recovered.next_index) - 1,
            applied: i128::from(next_to_apply) - 1,
        });
    }
    Ok(applied.is_none() && recovered.next_index == 0 && recovered.vote.is_none())
}
