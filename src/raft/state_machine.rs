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
use tracing::{info, warn};

use super::codec;
use super::network::Links;
use super::outcomes::Outcomes;
use super::snapshot::{self, Files, Source, stored_position};
use super::types::{Applied, LogId, Membership, SnapshotMeta, StoredMembership, TypeConfig};
use crate::apply::{self, AuthEffect, Compaction, LeaseChange, Run, State};
use crate::auth::token::{TokenChange, Tokens};
use crate::blocking;
use crate::clock;
use crate::lease::deadlines::Deadlines;
use crate::proto::skegpb::Member;
use crate::storage::log::Log;
use crate::storage::mvcc::Store;
use crate::telemetry::metrics::{Metrics, Operation};
use crate::watch::Hub;

/// Entries applied in one batch: what holds the core thread is bounded.
pub(super) const RUN_ENTRIES_MAX: usize = 256;

/// Who hears of what was applied.
pub(crate) struct Listeners {
    pub(crate) hub: Arc<Hub>,
    pub(crate) deadlines: Arc<Mutex<Deadlines>>,
    /// Compactions whose second half is to be done.
    pub(crate) compactions: mpsc::UnboundedSender<Compaction>,
    /// Index of the last applied entry, plus one.
    pub(crate) applied: watch::Sender<u64>,
    /// Told when the store was replaced.
    pub(crate) replaced: watch::Sender<()>,
    /// Who waits here for what another member wrote.
    pub(crate) outcomes: Arc<Outcomes>,
    pub(crate) links: Arc<Links>,
    /// Who is known by what.
    pub(crate) tokens: Arc<Tokens>,
    pub(crate) metrics: Arc<Metrics>,
    /// Time of a command or of a run's batch above which a warning is logged.
    pub(crate) slow: Duration,
}

/// The state machine as openraft drives it; clones share it.
#[derive(Clone)]
pub(crate) struct Machine {
    pub(super) state: State,
    pub(super) log: Log,
    pub(super) listeners: Arc<Listeners>,
    flushed: Flushed,
    /// Held by whoever applies a run, or puts a store in place that must be level with what is applied.
    pub(super) turn: Arc<Mutex<()>>,
    /// Held while a store is put in place, from the first step that the next start sees to the last.
    pub(super) placing: Arc<tokio::sync::Mutex<()>>,
}

/// What the state machine's files are known to hold.
#[derive(Clone)]
pub(crate) struct Flushed {
    state: State,
    source: Arc<Source>,
    at: Arc<Mutex<SnapshotMeta>>,
}

impl Machine {
    /// Takes over an opened state, all of which is on disk.
    pub(crate) fn new(
        state: State,
        log: Log,
        source: Arc<Source>,
        listeners: Listeners,
    ) -> io::Result<Machine> {
        let (last_log_id, last_membership) = stored_position(&state.store())?;
        let at = Arc::new(Mutex::new(SnapshotMeta { last_log_id, last_membership }));
        let flushed = Flushed { state: state.clone(), source, at };
        Ok(Machine {
            state,
            log,
            listeners: Arc::new(listeners),
            flushed,
            turn: Arc::default(),
            placing: Arc::default(),
        })
    }

    /// Applies one run, once this member's own log has it: the others may have committed it without, and files that hold
    /// what a power cut then takes from the log fit it no more.
    async fn apply_synced(&self, entries: Vec<EntryResponder<TypeConfig>>) -> io::Result<()> {
        if let Some((last, _)) = entries.last() {
            self.log.synced(last.log_id.index()).await?;
        }
        self.apply_run(entries)
    }

    /// Applies one run and answers its callers, in this order: visible, published, answered.
    fn apply_run(&self, entries: Vec<EntryResponder<TypeConfig>>) -> io::Result<()> {
        let _turn = self.turn.lock();
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
                    let (command, who, request_id) = apply::decode(proposal.0).map_err(io::Error::other)?;
                    let operation = apply::operation(&command);
                    members_changed |=
                        matches!(operation, Operation::ConfChange | Operation::ClusterLevelSet);
                    let outcome = run.apply(command, who.as_ref(), position).map_err(io::Error::other)?;
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
                    set_membership(&mut run, entry.log_id, membership);
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
        if effects.auth_changed {
            self.listeners.hub.wake();
        }
        for effect in effects.auth {
            self.listeners.tokens.follow(token_change(effect));
        }
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

    /// Puts a peer's store in the place of this member's, and everything that follows the store with it; `index` is the last
    /// entry in it.
    pub(super) fn replace_store(&self, store: Arc<Store>, index: u64) -> io::Result<()> {
        let Listeners { hub, deadlines, compactions, applied, replaced, links, tokens, .. } =
            &*self.listeners;
        let old = self.state.replace_store(Arc::clone(&store)).map_err(io::Error::other)?;
        deadlines.lock().take_over(&self.state.leases.read(), clock::now(), Duration::ZERO);
        links.follow_cluster(&self.state.cluster.read());
        // What was passed over may have made some of them void.
        tokens.follow(TokenChange::AllVoid);
        // Whoever waits for the compactions that this member has not applied itself: the files have them.
        let compacted = store.compacted();
        let _ = compactions.send(Compaction { previous: compacted, revision: compacted });
        info!(index, revision = store.revision(), "a peer's files are in place");
        hub.reset(store);
        applied.send_replace(index + 1);
        replaced.send_replace(());
        tokio::spawn(snapshot::retire(old));
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

/// Applies an entry that says who votes.
pub(super) fn set_membership(run: &mut Run<'_>, log_id: LogId, membership: Membership) {
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
    let stored = StoredMembership::new(Some(log_id), membership);
    run.set_membership(&codec::encode_membership(&stored), members, codec::log_id_to_proto(&log_id));
}

fn token_change(effect: AuthEffect) -> TokenChange {
    match effect {
        AuthEffect::Issued { user, digest, index } => TokenChange::Issued { user, digest, index },
        AuthEffect::UserVoid(user) => TokenChange::UserVoid(user),
        AuthEffect::AllVoid => TokenChange::AllVoid,
    }
}

/// The time since `since`, which is moved to now.
fn lap(since: &mut Instant) -> Duration {
    let now = clock::now();
    now.duration_since(std::mem::replace(since, now))
}

impl RaftStateMachine<TypeConfig> for Machine {
    type SnapshotData = Files;
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
                self.apply_synced(std::mem::take(&mut run)).await?;
                tokio::task::yield_now().await;
            }
        }
        if run.is_empty() { Ok(()) } else { self.apply_synced(run).await }
    }

    async fn get_snapshot_builder(&mut self) -> Flushed {
        self.flushed.clone()
    }

    async fn install_snapshot(&mut self, meta: &SnapshotMeta, files: Files) -> Result<(), io::Error> {
        let Files::Arrived(arrival) = files else {
            return Err(io::Error::other("the files here are behind a snapshot of themselves"));
        };
        let installs = &self.listeners.metrics.server.snapshot_installs;
        installs.inc();
        let _placing = self.placing.lock().await;
        let settled = blocking::spawn(move || arrival.settle()).await.map_err(io::Error::other);
        let placed = settled
            .flatten()
            .and_then(|store| self.replace_store(store, meta.last_log_id.map_or(0, |last| last.index())));
        installs.dec();
        if placed.is_ok() {
            *self.flushed.at.lock() = meta.clone();
        }
        placed
    }

    async fn get_current_snapshot(
        &mut self,
    ) -> Result<Option<Snapshot<LeaderTerm, u64, super::types::Peer, Files>>, io::Error> {
        let meta = self.flushed.at.lock().clone();
        let source = Arc::clone(&self.flushed.source);
        Ok(meta.last_log_id.is_some().then_some(Snapshot { meta, snapshot: Files::Here(source) }))
    }
}

type LeaderTerm = openraft::alias::CommittedLeaderIdOf<TypeConfig>;

impl RaftSnapshotBuilder<TypeConfig> for Flushed {
    type SnapshotData = Files;

    /// Flushes the store: what was applied before the call is in its files afterwards.
    async fn build_snapshot(
        &mut self,
    ) -> Result<Snapshot<LeaderTerm, u64, super::types::Peer, Files>, io::Error> {
        let store = self.state.store();
        let (last_log_id, last_membership) = stored_position(&store)?;
        blocking::spawn(move || store.engine().flush())
            .await
            .map_err(io::Error::other)?
            .map_err(io::Error::other)?;
        let meta = self.source.limit(SnapshotMeta { last_log_id, last_membership });
        {
            let mut at = self.at.lock();
            // A peer's files may have been put in place meanwhile.
            if meta.last_log_id > at.last_log_id {
                *at = meta.clone();
            }
        }
        Ok(Snapshot { meta, snapshot: Files::Here(Arc::clone(&self.source)) })
    }
}
