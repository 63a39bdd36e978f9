//! The replicated state machine: what each committed command does.
//!
//! Everything here is a function of the log alone: no clock, no randomness, no task, no hash order. The same log gives
//! the same bytes and the same answers on every member. What a command may not do is a [`Refusal`], an outcome like any
//! other; a [`StorageError`] is not an outcome but the end of the member.
//!
//! ```text
//! committed run ──> Run::apply per entry ──> Run::commit ──> Effects: events, lease changes, compactions
//!                   guard: auth, alarms       one batch        (published by raft/state_machine)
//!                   txn, lease, alarm ...
//! ```

mod auth;
mod command;
pub mod guard;
mod members;
mod outcome;
pub mod range;
mod trail;
mod txn;

use std::sync::Arc;

use parking_lot::RwLock;
use prost::Message;

pub use auth::AuthEffect;
pub use command::{CommandError, alarm, decode, level_needed, operation};
pub use outcome::{Outcome, Refusal, Reply};
pub use trail::Trails;
pub use txn::{is_read_only, is_serializable, read_txn};

use crate::auth::{Auth, Identity};
use crate::cluster::{self, Cluster, level};
use crate::lease::{self, Leases};
use crate::proto::etcdserverpb as pb;
use crate::proto::skegpb::command::Kind;
use crate::proto::skegpb::{ClusterLevelSet, LeaseRecord, LogId, Member};
use crate::storage::mvcc::activity::Tally;
use crate::storage::mvcc::read::Event;
use crate::storage::mvcc::write::WriteRun;
use crate::storage::mvcc::{MvccError, Store};
use crate::storage::schema::{self, Family, MetaKey};
use crate::storage::{FORMAT_LEVELLED, StorageError};
use trail::TrailRun;

/// Longest time to live of a lease, in seconds. etcd: `server/lease/lessor.go`.
const TTL_MAX_SECONDS: i64 = 9_000_000_000;

/// The replicated state. Changed only by [`Run`]; read by everyone.
#[derive(Clone)]
pub struct State {
    /// Keys and their history; another one after [`State::replace_store`].
    store: Arc<RwLock<Arc<Store>>>,
    /// Lease records.
    pub leases: Arc<RwLock<Leases>>,
    /// Members, alarms, cluster version.
    pub cluster: Arc<RwLock<Cluster>>,
    /// Users and roles.
    pub auth: Arc<RwLock<Auth>>,
    /// The rolling hash of what was applied.
    pub trails: Arc<RwLock<Trails>>,
}

impl State {
    /// Takes a store, and reads the leases and members that it holds, and its trail.
    ///
    /// # Errors
    /// The storage's.
    pub fn open(store: Arc<Store>) -> Result<State, StorageError> {
        let leases = lease::load(store.engine())?;
        let cluster = cluster::load(store.engine())?;
        let auth = crate::auth::load(store.engine())?;
        let trails = trail::load(store.engine())?;
        Ok(State {
            store: Arc::new(RwLock::new(store)),
            leases: Arc::new(RwLock::new(leases)),
            cluster: Arc::new(RwLock::new(cluster)),
            auth: Arc::new(RwLock::new(auth)),
            trails: Arc::new(RwLock::new(trails)),
        })
    }

    /// The store as of now. Who asks once and keeps it has one view to the end, also when it is replaced meanwhile.
    pub fn store(&self) -> Arc<Store> {
        Arc::clone(&self.store.read())
    }

    /// Puts another store in the place of this one, with its leases and members; gives the old one, which lives on until
    /// its last user is done. Not to be called while a [`Run`] is under way.
    ///
    /// # Errors
    /// The storage's; nothing is replaced then.
    pub fn replace_store(&self, store: Arc<Store>) -> Result<Arc<Store>, StorageError> {
        let State { leases, cluster, auth, trails, .. } = State::open(Arc::clone(&store))?;
        std::mem::swap(&mut *self.leases.write(), &mut leases.write());
        std::mem::swap(&mut *self.cluster.write(), &mut cluster.write());
        std::mem::swap(&mut *self.auth.write(), &mut auth.write());
        std::mem::swap(&mut *self.trails.write(), &mut trails.write());
        Ok(std::mem::replace(&mut self.store.write(), store))
    }
}

/// A change to the leases, for the clock that the leader keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LeaseChange {
    /// Granted, with its time to live in seconds.
    Granted(i64, i64),
    /// Gone.
    Revoked(i64),
}

/// A compaction whose second half is still to be done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Compaction {
    /// Compact revision before.
    pub previous: i64,
    /// Compact revision now.
    pub revision: i64,
}

/// What a committed run has to tell the rest of the member.
#[derive(Debug, Default)]
pub struct Effects {
    /// Changes in revision order, for watchers.
    pub events: Vec<Event>,
    /// Lease changes, in order.
    pub leases: Vec<LeaseChange>,
    /// Compactions, in order.
    pub compactions: Vec<Compaction>,
    /// Tokens issued and void, in order.
    pub auth: Vec<AuthEffect>,
    /// Users or roles have changed, or whether they are asked for.
    pub auth_changed: bool,
}

/// Applies a run of committed entries; see the module.
pub struct Run<'s> {
    state: &'s State,
    store: &'s Store,
    write: WriteRun<'s>,
    applied: Option<LogId>,
    trail: TrailRun,
    effects: Effects,
}

impl<'s> Run<'s> {
    /// Starts a run on a state and its store.
    pub fn new(state: &'s State, store: &'s Store) -> Run<'s> {
        let trail = TrailRun::new(state.trails.read().last());
        Run { state, store, write: WriteRun::new(store), applied: None, trail, effects: Effects::default() }
    }

    /// Applies one command, which stands at `position` in the log; `who` asked for it, if a client did and is known.
    ///
    /// # Errors
    /// Only storage failures; the member must stop then.
    pub fn apply(
        &mut self,
        command: Kind,
        who: Option<&Identity>,
        position: LogId,
    ) -> Result<Outcome, StorageError> {
        let begins_trail = matches!(command, Kind::ClusterVersionSet(_));
        let outcome = self.dispatch(command, who, position)?;
        self.pass(position);
        if begins_trail {
            self.trail.begin_anew();
        }
        Ok(outcome)
    }

    /// Notes an entry; on its own for one without a command.
    pub fn pass(&mut self, position: LogId) {
        self.trail.step(position.index, self.write.batch().take_digest());
        self.applied = Some(position);
    }

    /// Notes a Raft membership, encoded. The first one names the founding members; later ones follow the members.
    pub fn set_membership(&mut self, membership: &[u8], nodes: Vec<Member>, position: LogId) {
        self.write.batch().note(MetaKey::Membership, membership);
        let mut cluster = self.state.cluster.write();
        if cluster.is_empty() {
            for member in nodes {
                let key = MetaKey::Member(member.id).encode();
                self.write.batch().put(Family::Meta, &key, &member.encode_to_vec());
                cluster.put(member);
            }
        }
        drop(cluster);
        self.pass(position);
    }

    fn dispatch(
        &mut self,
        command: Kind,
        who: Option<&Identity>,
        position: LogId,
    ) -> Result<Outcome, StorageError> {
        let term = position.term;
        if let Err(error) = self.authorise(&command, who)? {
            return Ok(Err(Refusal::Auth(error)));
        }
        if let Err(refusal) = guard::check(&self.state.cluster.read(), &command) {
            return Ok(Err(refusal));
        }
        if reads_through_iterators(&command) {
            self.make_visible()?;
        }
        match command {
            Kind::Put(request) => txn::put(self, request),
            Kind::DeleteRange(request) => txn::delete_range(self, &request),
            Kind::Txn(request) => txn::txn(self, &request),
            Kind::Compaction(request) => Ok(self.compact(&request)),
            Kind::LeaseGrant(request) => Ok(self.grant(&request)),
            Kind::LeaseRevoke(request) => self.revoke(request.id),
            Kind::LeaseExpire(request) if request.term != term => Ok(Err(Refusal::StaleJudgement)),
            Kind::LeaseExpire(request) => self.revoke(request.id),
            Kind::LeaseCheckpoint(request) => Ok(self.checkpoint(&request)),
            Kind::Alarm(request) => Ok(self.alarm(&request)),
            Kind::ClusterVersionSet(request) => {
                self.write.batch().put(
                    Family::Meta,
                    &MetaKey::ClusterVersion.encode(),
                    request.version.as_bytes(),
                );
                self.state.cluster.write().set_version(&request.version);
                Ok(Ok(Reply::None))
            }
            Kind::DowngradeSet(request) => {
                let target = request.target_version;
                self.write.batch().put(Family::Meta, &MetaKey::Downgrade.encode(), target.as_bytes());
                self.state.cluster.write().set_downgrade(&target);
                Ok(Ok(Reply::None))
            }
            Kind::ClusterLevelSet(request) => self.raise_level(&request),
            Kind::MemberAttributes(request) => Ok(self.set_attributes(&request)),
            Kind::MemberAdd(request) => Ok(self.add_member(request)),
            Kind::MemberRemove(request) => Ok(self.remove_member(request)),
            Kind::MemberUpdate(request) => Ok(self.update_member(request)),
            Kind::MemberPromote(request) => Ok(self.promote_member(request)),
            Kind::MemberKeepOnly(request) => Ok(self.keep_only(request)),
            Kind::AuthIssue(_)
            | Kind::AuthEnable(_)
            | Kind::AuthDisable(_)
            | Kind::UserAdd(_)
            | Kind::UserDelete(_)
            | Kind::UserChangePassword(_)
            | Kind::UserGrantRole(_)
            | Kind::UserRevokeRole(_)
            | Kind::RoleAdd(_)
            | Kind::RoleDelete(_)
            | Kind::RoleGrantPermission(_)
            | Kind::RoleRevokePermission(_) => Ok(self.change_auth(command, position.index)),
        }
    }

    /// Makes the entries so far visible in the store below, so that its iterators show them.
    fn make_visible(&mut self) -> Result<(), StorageError> {
        if !self.write.is_clean() {
            self.note_applied();
            let done = std::mem::replace(&mut self.write, WriteRun::new(self.store));
            self.effects.events.extend(done.commit()?);
            self.write = WriteRun::new(self.store);
        }
        Ok(())
    }

    /// Every batch says after which entry it stands: a crash may keep it and lose the next one.
    fn note_applied(&mut self) {
        if let Some(applied) = &self.applied {
            self.write.batch().note(MetaKey::Applied, &applied.encode_to_vec());
            self.write.batch().note(MetaKey::Trail, &self.trail.last().encode());
        }
    }

    /// Makes the run visible; see [`WriteRun::commit`].
    pub fn commit(mut self) -> Result<Effects, StorageError> {
        self.note_applied();
        self.effects.events.extend(self.write.commit()?);
        self.state.trails.write().follow(self.trail);
        Ok(self.effects)
    }

    fn header(&self) -> Option<pb::ResponseHeader> {
        Some(pb::ResponseHeader { revision: self.write.revision(), ..Default::default() })
    }

    fn compact(&mut self, request: &pb::CompactionRequest) -> Outcome {
        let previous = self.write.compacted();
        match Store::check_compaction(request.revision, previous, self.write.revision()) {
            Err(MvccError::FutureRevision) => return Err(Refusal::FutureRevision),
            Err(_) => return Err(Refusal::Compacted),
            Ok(()) => {}
        }
        self.write.compact(request.revision);
        self.effects.compactions.push(Compaction { previous, revision: request.revision });
        Ok(Reply::Compaction(pb::CompactionResponse { header: self.header() }))
    }

    fn raise_level(&mut self, set: &ClusterLevelSet) -> Result<Outcome, StorageError> {
        let mut cluster = self.state.cluster.write();
        if cluster.rises_by(set) {
            level::check(set.level)?;
            cluster.set_level(set.level);
            let batch = self.write.batch();
            batch.put(Family::Meta, &MetaKey::ClusterLevel.encode(), &set.level.to_be_bytes());
            batch.put(Family::Meta, &MetaKey::Format.encode(), &FORMAT_LEVELLED.to_be_bytes());
        }
        Ok(Ok(Reply::None))
    }

    fn grant(&mut self, request: &pb::LeaseGrantRequest) -> Outcome {
        if request.ttl > TTL_MAX_SECONDS {
            return Err(Refusal::LeaseTtlTooLarge);
        }
        let record = self.state.leases.write().grant(request.id, request.ttl).ok_or(Refusal::LeaseExists)?;
        self.write_lease(&record);
        self.effects.leases.push(LeaseChange::Granted(record.id, record.ttl_seconds));
        let (id, ttl) = (record.id, record.ttl_seconds);
        Ok(Reply::LeaseGrant(pb::LeaseGrantResponse { header: self.header(), id, ttl, error: String::new() }))
    }

    fn revoke(&mut self, id: i64) -> Result<Outcome, StorageError> {
        if !self.state.leases.read().contains(id) {
            return Ok(Err(Refusal::LeaseNotFound));
        }
        let keys = lease::attached_keys(self.store.engine(), id)?;
        let mut txn = self.write.begin();
        for key in &keys {
            txn.delete(key)?;
        }
        txn.finish();
        self.store.activity().add(Tally { deletes: keys.len() as u64, ..Tally::default() });
        self.state.leases.write().remove(id);
        self.write.batch().delete(Family::Lease, &schema::lease_key(id));
        self.effects.leases.push(LeaseChange::Revoked(id));
        Ok(Ok(Reply::LeaseRevoke(pb::LeaseRevokeResponse { header: self.header() })))
    }

    fn checkpoint(&mut self, request: &pb::LeaseCheckpointRequest) -> Outcome {
        for checkpoint in &request.checkpoints {
            let record = self.state.leases.write().checkpoint(checkpoint.id, checkpoint.remaining_ttl);
            if let Some(record) = record {
                self.write_lease(&record);
            }
        }
        Ok(Reply::None)
    }

    fn write_lease(&mut self, record: &LeaseRecord) {
        let key = schema::lease_key(record.id);
        self.write.batch().put(Family::Lease, &key, &record.encode_to_vec());
    }

    fn alarm(&mut self, request: &pb::AlarmRequest) -> Outcome {
        let mut cluster = self.state.cluster.write();
        let alarm = request.alarm;
        let key = MetaKey::Alarm(request.member_id, alarm).encode();
        let alarms = match pb::alarm_request::AlarmAction::try_from(request.action) {
            Ok(pb::alarm_request::AlarmAction::Get) => cluster.alarms_of_type(alarm),
            Ok(pb::alarm_request::AlarmAction::Activate) if alarm == pb::AlarmType::None as i32 => Vec::new(),
            Ok(pb::alarm_request::AlarmAction::Activate) => {
                self.write.batch().put(Family::Meta, &key, b"");
                vec![cluster.raise(request.member_id, alarm)]
            }
            Ok(pb::alarm_request::AlarmAction::Deactivate) => {
                let cleared = cluster.clear(request.member_id, alarm);
                if cleared.is_some() {
                    self.write.batch().delete(Family::Meta, &key);
                }
                cleared.into_iter().collect()
            }
            Err(_) => return Err(Refusal::UnknownAlarmAction),
        };
        Ok(Reply::Alarm(pb::AlarmResponse { header: self.header(), alarms }))
    }
}

/// True for commands that walk the store below instead of asking for single keys.
fn reads_through_iterators(command: &Kind) -> bool {
    match command {
        Kind::LeaseRevoke(_) | Kind::LeaseExpire(_) => true,
        Kind::DeleteRange(request) => !request.range_end.is_empty(),
        Kind::Txn(request) => txn::reads_history(request),
        _ => false,
    }
}

#[cfg(test)]
mod tests;
