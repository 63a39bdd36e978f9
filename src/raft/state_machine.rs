//! Applying what is committed, and telling everyone who waits for it.

use std::collections::BTreeSet;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::{Stream, StreamExt};
use openraft::storage::{EntryResponder, RaftSnapshotBuilder, RaftStateMachine, Snapshot};
use openraft::{EntryPayload, OptionalSend};
use parking_lot::Mutex;
use tokio::sync::{mpsc, watch};
use tracing::warn;

use super::codec;
use super::network::Links;
use super::outcomes::Outcomes;
use super::types::{Applied, LogId, SnapshotMeta, StoredMembership, TypeConfig};
use crate::apply::{self, Compaction, LeaseChange, Run, State};
use crate::clock;
use crate::lease::deadlines::Deadlines;
use crate::proto::skegpb::Member;
use crate::storage::mvcc::Store;
use crate::storage::schema::{Family, MetaKey};
use crate::telemetry::metrics::{Metrics, Operation};
use crate::watch::Hub;

/// Entries applied in one batch: what holds the core thread is bounded.
const RUN_ENTRIES_MAX: usize = 256;

/// Who hears of what was applied.
pub(crate) struct Listeners {
    pub(crate) hub: Arc<Hub>,
    pub(crate) deadlines: Arc<Mutex<Deadlines>>,
    /// Compactions whose second half is to be done.
    pub(crate) compactions: mpsc::UnboundedSender<Compaction>,
    /// Index of the last applied entry, plus one.
    pub(crate) applied: watch::Sender<u64>,
    /// Who waits here for what another member wrote.
    pub(crate) outcomes: Arc<Outcomes>,
    pub(crate) links: Arc<Links>,
    pub(crate) metrics: Arc<Metrics>,
    /// Time of a command or of a run's batch above which a warning is logged.
    pub(crate) slow: Duration,
}

/// The state machine as openraft drives it.
pub(crate) struct Machine {
    state: State,
    listeners: Listeners,
    flushed: Flushed,
}

/// What the state machine's files are known to hold.
#[derive(Clone)]
pub(crate) struct Flushed {
    state: State,
    at: Arc<Mutex<SnapshotMeta>>,
}

impl Machine {
    /// Takes over an opened state, all of which is on disk.
    pub(crate) fn new(state: State, listeners: Listeners) -> io::Result<Machine> {
        let (last_log_id, last_membership) = stored_position(&state.store())?;
        let at = Arc::new(Mutex::new(SnapshotMeta { last_log_id, last_membership }));
        Ok(Machine { flushed: Flushed { state: state.clone(), at }, state, listeners })
    }

    /// Applies one run and answers its callers, in this order: visible, published, answered.
    fn apply_run(&self, entries: Vec<EntryResponder<TypeConfig>>) -> io::Result<()> {
        let entries_count = entries.len();
        let mut now = clock::now();
        let store = self.state.store();
        let mut run = Run::new(&self.state, &store);
        let mut answers = Vec::with_capacity(entries.len());
        let mut awaited = Vec::new();
        let mut members_changed = false;
        let mut last = 0;
        for (entry, responder) in entries {
            let position = codec::log_id_to_proto(&entry.log_id);
            last = entry.log_id.index();
            let outcome = match entry.payload {
                EntryPayload::Blank => {
                    run.pass(position);
                    None
                }
                EntryPayload::Normal(proposal) => {
                    let (command, request_id) = apply::decode(proposal.0).map_err(io::Error::other)?;
                    let operation = apply::operation(&command);
                    members_changed |= operation == Operation::ConfChange;
                    let outcome = run.apply(command, position).map_err(io::Error::other)?;
                    let took = lap(&mut now);
                    self.listeners.metrics.server.apply_duration.observe(operation, outcome.is_ok(), took);
                    if took > self.listeners.slow {
                        self.warn_slow(operation.name(), 1, took);
                    }
                    if request_id != 0 {
                        awaited.push((request_id, outcome.clone()));
                    }
                    Some(outcome)
                }
                EntryPayload::Membership(membership) => {
                    let voters: BTreeSet<u64> = membership.voter_ids().collect();
                    let members: Vec<Member> = membership
                        .nodes()
                        .map(|(id, peer)| Member {
                            id: *id,
                            name: peer.name.clone(),
                            peer_urls: peer.peer_urls.clone(),
                            is_learner: !voters.contains(id),
                            ..Member::default()
                        })
                        .collect();
                    let stored = StoredMembership::new(Some(entry.log_id), membership);
                    run.set_membership(&codec::encode_membership(&stored), members, position);
                    members_changed = true;
                    None
                }
            };
            answers.push((responder, outcome));
        }
        let _ = lap(&mut now);
        let effects = run.commit().map_err(io::Error::other)?;
        let took = lap(&mut now);
        self.listeners.metrics.disk.backend_commit.observe(took.as_secs_f64());
        if took > self.listeners.slow {
            self.warn_slow("write of a run", entries_count, took);
        }
        self.listeners.hub.publish(&effects.events, store.revision()).map_err(io::Error::other)?;
        self.tell_leases(&effects.leases);
        for compaction in effects.compactions {
            let _ = self.listeners.compactions.send(compaction);
        }
        self.listeners.applied.send_replace(last + 1);
        if members_changed {
            self.listeners.links.follow_cluster(&self.state.cluster.read());
        }
        for (request_id, outcome) in &awaited {
            self.listeners.outcomes.tell(*request_id, outcome);
        }
        for (responder, outcome) in answers {
            if let Some(responder) = responder {
                responder.send(Applied(outcome));
            }
        }
        Ok(())
    }

    /// Counts and logs what took long, without saying what was in it.
    fn warn_slow(&self, what: &str, entries: usize, took: Duration) {
        self.listeners.metrics.server.slow_apply.inc();
        let expected = self.listeners.slow;
        warn!(took = ?took, "expected-duration" = ?expected, request = what, entries, "apply request took too long");
    }

    fn tell_leases(&self, changes: &[LeaseChange]) {
        if changes.is_empty() {
            return;
        }
        let now = clock::now();
        let metrics = &self.listeners.metrics.lease;
        let mut deadlines = self.listeners.deadlines.lock();
        for change in changes {
            match *change {
                LeaseChange::Granted(id, ttl) => {
                    deadlines.grant(id, ttl, now);
                    metrics.granted.inc();
                    #[expect(
                        clippy::cast_precision_loss,
                        reason = "the bounds of the buckets are far below"
                    )]
                    metrics.ttl.observe(ttl as f64);
                }
                LeaseChange::Revoked(id) => {
                    deadlines.revoke(id);
                    metrics.revoked.inc();
                }
            }
        }
    }
}

/// The time since `since`, which is moved to now.
fn lap(since: &mut Instant) -> Duration {
    let now = clock::now();
    now.duration_since(std::mem::replace(since, now))
}

/// The position and membership that the store's records speak of.
fn stored_position(store: &Store) -> io::Result<(Option<LogId>, StoredMembership)> {
    let engine = store.engine();
    let read = |key: MetaKey| engine.get(Family::Meta, &key.encode()).map_err(io::Error::other);
    let applied = read(MetaKey::Applied)?.map(|bytes| codec::decode_log_id(&bytes)).transpose()?;
    let membership = read(MetaKey::Membership)?.map(|bytes| codec::decode_membership(&bytes)).transpose()?;
    Ok((applied, membership.unwrap_or_default()))
}

impl RaftStateMachine<TypeConfig> for Machine {
    type SnapshotData = ();
    type SnapshotBuilder = Flushed;

    async fn applied_state(&mut self) -> Result<(Option<LogId>, StoredMembership), io::Error> {
        stored_position(&self.state.store())
    }

    async fn apply<Strm>(&mut self, mut entries: Strm) -> Result<(), io::Error>
    where
        Strm: Stream<Item = Result<EntryResponder<TypeConfig>, io::Error>> + Unpin + OptionalSend,
    {
        let mut run = Vec::new();
        while let Some(entry) = entries.next().await {
            run.push(entry?);
            if run.len() == RUN_ENTRIES_MAX {
                self.apply_run(std::mem::take(&mut run))?;
                tokio::task::yield_now().await;
            }
        }
        if run.is_empty() { Ok(()) } else { self.apply_run(run) }
    }

    async fn get_snapshot_builder(&mut self) -> Flushed {
        self.flushed.clone()
    }

    async fn install_snapshot(&mut self, _: &SnapshotMeta, (): ()) -> Result<(), io::Error> {
        Err(io::Error::new(
            io::ErrorKind::Unsupported,
            "a one-member cluster has nobody to send it a snapshot",
        ))
    }

    async fn get_current_snapshot(
        &mut self,
    ) -> Result<Option<Snapshot<LeaderTerm, u64, super::types::Peer, ()>>, io::Error> {
        let meta = self.flushed.at.lock().clone();
        Ok(meta.last_log_id.is_some().then_some(Snapshot { meta, snapshot: () }))
    }
}

type LeaderTerm = openraft::alias::CommittedLeaderIdOf<TypeConfig>;

impl RaftSnapshotBuilder<TypeConfig> for Flushed {
    type SnapshotData = ();

    /// Flushes the store: what was applied before the call is in its files afterwards.
    async fn build_snapshot(
        &mut self,
    ) -> Result<Snapshot<LeaderTerm, u64, super::types::Peer, ()>, io::Error> {
        let store = self.state.store();
        let (last_log_id, last_membership) = stored_position(&store)?;
        tokio::task::spawn_blocking(move || store.engine().flush())
            .await
            .map_err(io::Error::other)?
            .map_err(io::Error::other)?;
        let meta = SnapshotMeta { last_log_id, last_membership };
        *self.at.lock() = meta.clone();
        Ok(Snapshot { meta, snapshot: () })
    }
}
