//! One member's part in consensus: starting it, proposing, reading, and what it knows of the leader.

use std::collections::BTreeMap;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use bytes::Bytes;
use openraft::async_runtime::WatchReceiver;
use openraft::errors::{ClientWriteError, RaftError};
use openraft::{Config, SnapshotPolicy};
use parking_lot::Mutex;
use prost::Message;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;
use tracing::info;

use super::codec;
use super::log_store::LogStore;
use super::network::Network;
use super::read_index::{self, ReadError, ReadIndex};
use super::state_machine::{Listeners, Machine};
use super::types::{Peer, Proposal, Raft};
use crate::apply::{Compaction, Outcome, State};
use crate::lease::deadlines::Deadlines;
use crate::proto::skegpb::Command;
use crate::proto::skegpb::command::Kind;
use crate::storage::log::{Log, LogError, LogObserver, LogOptions, LogStats, Recovered};
use crate::storage::schema::{Family, MetaKey};
use crate::telemetry::metrics::Metrics;
use crate::watch::Hub;

/// Bytes of proposals that may be under way; more are refused as too many requests. They are held in memory.
const PROPOSED_BYTES_MAX: usize = 64 << 20;
/// Assumed memory of a proposal besides its bytes.
const PROPOSAL_OVERHEAD_BYTES: usize = 512;

/// How a member takes part.
#[derive(Clone)]
pub struct NodeOptions {
    /// This member.
    pub member_id: u64,
    /// The members at bootstrap, with their peer URLs; used only for a new log.
    pub initial_members: BTreeMap<u64, Vec<String>>,
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
    /// Raft refused its settings or stopped.
    #[error("raft: {0}")]
    Raft(String),
}

/// Why a proposal was not applied, or may not have been.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ProposeError {
    /// The encoded command is over the limit.
    #[error("request is too large")]
    TooLarge,
    /// Too much is under way.
    #[error("too many requests")]
    TooManyRequests,
    /// Not applied in time; it may still be.
    #[error("request timed out")]
    TimedOut,
    /// Another member leads now; the command may still be applied.
    #[error("leader changed")]
    LeaderChanged,
    /// The member is stopping.
    #[error("server stopped")]
    Stopped,
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
    raft: Raft,
    log: Log,
    read_index: ReadIndex,
    applied: watch::Receiver<u64>,
    term: Arc<AtomicU64>,
    in_flight: Arc<AtomicUsize>,
    counts: Arc<NodeCounts>,
    deadlines: Arc<Mutex<Deadlines>>,
    options: Arc<NodeOptions>,
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
        let (log, recovered) = Log::open(log_options)?;
        let is_new = check_position(&state, &recovered)?;
        info!(
            first = recovered.first_index,
            next = recovered.next_index,
            cut_bytes = recovered.cut_bytes,
            "raft log opened"
        );

        let (compactions, to_compact) = mpsc::unbounded_channel();
        let applied_index = stored_applied(&state)?.map_or(0, |index| index + 1);
        let (applied_sender, applied) = watch::channel(applied_index);
        let deadlines = Arc::new(Mutex::new(Deadlines::default()));
        let listeners = Listeners {
            hub,
            deadlines: Arc::clone(&deadlines),
            compactions,
            applied: applied_sender,
            metrics: Arc::clone(&options.metrics),
            slow: options.slow_apply,
        };
        let machine = Machine::new(state, listeners)?;
        let store = LogStore::new(log.clone(), recovered)?;
        let config = raft_config(&options).map_err(StartError::Raft)?;
        let raft = Raft::new(options.member_id, Arc::new(config), Network, store, machine)
            .await
            .map_err(|error| StartError::Raft(error.to_string()))?;
        if is_new {
            let members: BTreeMap<u64, Peer> = options
                .initial_members
                .iter()
                .map(|(id, urls)| (*id, Peer { peer_urls: urls.clone() }))
                .collect();
            raft.initialize(members).await.map_err(|error| StartError::Raft(error.to_string()))?;
        } else if options.initial_members.len() == 1 {
            // Nobody else can lead, so there is nothing to wait for.
            raft.trigger().elect(false).await.map_err(|error| StartError::Raft(error.to_string()))?;
        }
        let counts: Arc<NodeCounts> = Arc::default();
        let (read_index, queue) = read_index::channel(options.request_timeout, Arc::clone(&counts));
        let answering =
            tokio::spawn(read_index::run(raft.clone(), queue, applied.clone(), Arc::clone(&counts)));
        let term = Arc::new(AtomicU64::new(0));
        let following = tokio::spawn(follow_term(raft.clone(), Arc::clone(&term), Arc::clone(&counts)));
        let node = Node {
            raft,
            log,
            read_index,
            applied,
            term,
            in_flight: Arc::default(),
            counts,
            deadlines,
            options: Arc::new(options),
            tasks: Arc::new(Mutex::new(vec![answering, following])),
        };
        Ok((node, to_compact))
    }

    /// Proposes a command and waits until it is applied here. May be cancelled; the command is then still applied.
    ///
    /// On return the command is in the log on a majority's disks and visible to reads.
    ///
    /// # Errors
    /// See [`ProposeError`]: only [`ProposeError::TooLarge`] and [`ProposeError::TooManyRequests`] say that it never
    /// will be applied.
    pub async fn propose(&self, kind: Kind) -> Result<Outcome, ProposeError> {
        let encoded = Bytes::from(Command { kind: Some(kind) }.encode_to_vec());
        if encoded.len() > self.options.max_request_bytes {
            return Err(ProposeError::TooLarge);
        }
        let _admission = self.admit(encoded.len() + PROPOSAL_OVERHEAD_BYTES)?;
        let outcome = self.write(encoded).await;
        if outcome.is_err() {
            self.counts.failed.fetch_add(1, Ordering::Relaxed);
        }
        outcome
    }

    async fn write(&self, encoded: Bytes) -> Result<Outcome, ProposeError> {
        let written = self.raft.client_write(Proposal(encoded));
        match tokio::time::timeout(self.options.request_timeout, written).await {
            Err(_) => Err(ProposeError::TimedOut),
            Ok(Ok(response)) => Ok(response.data.0.unwrap_or(Ok(crate::apply::Reply::None))),
            Ok(Err(RaftError::Fatal(_))) => Err(ProposeError::Stopped),
            Ok(Err(RaftError::APIError(error))) => Err(match error {
                ClientWriteError::ForwardToLeader(_)
                | ClientWriteError::LogEntryDiscarded(_)
                | ClientWriteError::PreconditionFailed(_) => ProposeError::LeaderChanged,
                ClientWriteError::ChangeMembershipError(_) => ProposeError::Stopped,
            }),
        }
    }

    fn admit(&self, bytes: usize) -> Result<Admission, ProposeError> {
        let before = self.in_flight.fetch_add(bytes, Ordering::Relaxed);
        self.counts.pending.fetch_add(1, Ordering::Relaxed);
        let admission =
            Admission { in_flight: Arc::clone(&self.in_flight), counts: Arc::clone(&self.counts), bytes };
        if before > 0 && before + bytes > PROPOSED_BYTES_MAX {
            return Err(ProposeError::TooManyRequests);
        }
        Ok(admission)
    }

    /// Waits until the local state holds everything acknowledged before the call; see [`super::read_index`].
    pub async fn read_barrier(&self) -> Result<(), ReadError> {
        self.read_index.barrier().await
    }

    /// The current term, for response headers.
    pub fn term(&self) -> u64 {
        self.term.load(Ordering::Relaxed)
    }

    /// What the member knows of consensus.
    pub fn status(&self) -> RaftStatus {
        let metrics = self.raft.metrics();
        let metrics = metrics.borrow_watched();
        RaftStatus {
            leader: metrics.current_leader.unwrap_or(0),
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

    /// True while this member leads.
    pub fn is_leader(&self) -> bool {
        self.raft.is_leader()
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
        let closed = tokio::task::spawn_blocking(move || log.close()).await;
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

/// Bytes counted as under way until dropped.
struct Admission {
    in_flight: Arc<AtomicUsize>,
    counts: Arc<NodeCounts>,
    bytes: usize,
}

impl Drop for Admission {
    fn drop(&mut self) {
        self.in_flight.fetch_sub(self.bytes, Ordering::Relaxed);
        self.counts.pending.fetch_sub(1, Ordering::Relaxed);
    }
}

async fn follow_term(raft: Raft, term: Arc<AtomicU64>, counts: Arc<NodeCounts>) {
    let mut leader = None;
    let mut metrics = raft.server_metrics();
    loop {
        {
            let seen = metrics.borrow_watched();
            term.store(seen.vote.leader_id().term, Ordering::Relaxed);
            if seen.current_leader.is_some() && seen.current_leader != leader {
                leader = seen.current_leader;
                counts.leader_changes.fetch_add(1, Ordering::Relaxed);
            }
        }
        if metrics.changed().await.is_err() {
            return;
        }
    }
}

fn raft_config(options: &NodeOptions) -> Result<Config, String> {
    let millis = |duration: Duration| u64::try_from(duration.as_millis()).unwrap_or(u64::MAX);
    let election = millis(options.election_timeout);
    let config = Config {
        cluster_name: "skeg".to_owned(),
        heartbeat_interval: millis(options.heartbeat_interval),
        election_timeout_min: election,
        election_timeout_max: election * 2,
        enable_pre_vote: Some(true),
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
    let stored = state.store.engine().get(Family::Meta, &MetaKey::Applied.encode());
    let stored = stored.map_err(io::Error::other)?;
    stored.map(|bytes| codec::decode_log_id(&bytes).map(|log_id| log_id.index())).transpose()
}

/// Checks that log and files belong together; true if neither holds anything.
fn check_position(state: &State, recovered: &Recovered) -> Result<bool, StartError> {
    let applied = stored_applied(state)?;
    let next_to_apply = applied.map_or(0, |index| index + 1);
    if next_to_apply < recovered.first_index || next_to_apply > recovered.next_index {
        return Err(StartError::Mismatch {
            first: recovered.first_index,
            last: i128::from(recovered.next_index) - 1,
            applied: i128::from(next_to_apply) - 1,
        });
    }
    Ok(applied.is_none() && recovered.next_index == 0 && recovered.vote.is_none())
}
