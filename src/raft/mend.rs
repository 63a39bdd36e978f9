//! Putting a peer's store in the place of one that is not what it should be.
//!
//! To openraft nothing happens: the member stands at the entry at which it stood, with another store.
//!
//! ```text
//! this member        entry 100: differs        ... goes on applying ...        entry 250
//! asks a peer        ── SendFiles(100) ──> checkpoint at 180 ── InstallSnapshot ──> staging, opened beside
//! the other store    180 ── 181..250 from this member's log, applied as they were ──> 250: it is the store
//! ```
//!
//! The log behind entry 100 is kept for that time. The pointer to the new store is moved before the last entries are applied, so
//! a crash leaves one of the two stores, with a log that goes on behind it. The old store is removed: it is only ever
//! replaced by what a majority of the voters agrees on, and would take the room of the next one.
//!
//! A member whose store is known to be damaged says so, *withholds* its keys, and stands for no election, until the store has
//! been replaced; all of that outlives a restart. Its log and its votes are as good as any. A member that is the only voter
//! withholds nothing: nobody else has what can still be read there. `task/mend` decides what is done when.

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use openraft::EntryPayload;
use openraft::async_runtime::WatchReceiver;
use parking_lot::Mutex;
use tokio::sync::{oneshot, watch};
use tracing::{error, info, warn};

use super::codec;
use super::node::Node;
use super::snapshot::{Arrival, Source, stored_position};
use super::state_machine::{Machine, RUN_ENTRIES_MAX, set_membership};
use super::types::SnapshotMeta;
use crate::apply::{self, Run, State};
use crate::blocking;
use crate::cluster::id::MemberId;
use crate::storage::mvcc::Store;
use crate::storage::mvcc::hash::RevisionHash;
use crate::storage::snapshot::{Damage, Generations};

/// Bytes of entries that are read from the log at a time, for one batch.
const RUN_BYTES_MAX: usize = 1 << 20;
/// How long this member may take to apply what a peer's files hold already.
const LEVEL_WITHIN: Duration = Duration::from_secs(60);
/// How long files may take to be handed over once their sender says that they have arrived.
const HANDED_OVER_WITHIN: Duration = Duration::from_secs(10);

/// What a comparison of everything stored has found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Examined {
    /// Voters that hold the same, and with or without this member are a majority; this member is not among them. None if
    /// there is no majority that does.
    pub agreeing: Vec<u64>,
    /// This member holds something else than they, or cannot read what it holds.
    pub differs: bool,
    /// Other voters that answered, if all of them hold the same.
    pub unanimous: Vec<u64>,
}

/// Why a store was not replaced.
#[derive(Debug, thiserror::Error)]
pub enum MendError {
    /// A leader has promised what its own store must answer.
    #[error("this member leads")]
    Leads,
    /// The peer is not known.
    #[error("no such peer")]
    NoPeer,
    /// The peer does not send.
    #[error("the peer does not send its files: {0}")]
    NotSent(String),
    /// This member does not come as far as the files.
    #[error("this member has not applied what the files hold")]
    Behind,
    /// The leader's files have taken the place of the store meanwhile.
    #[error("the store was replaced by the leader")]
    Replaced,
    /// Files or log; nothing was replaced.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// The next start opens the new store, and it cannot be brought level with this one: the member must end.
    #[error("the new store is not level with the log: {0}")]
    HalfDone(#[source] io::Error),
}

/// What mending works with, and what is known of this member's store.
pub(super) struct Mending {
    machine: Machine,
    source: Arc<Source>,
    damage: watch::Sender<Option<Damage>>,
    /// Who waits for a peer's files.
    waiting: Mutex<Option<oneshot::Sender<Arrival>>>,
}

impl Mending {
    /// A store that was found damaged in an earlier life is so in this one.
    pub(super) fn new(machine: Machine, source: Arc<Source>, generations: &Generations) -> Mending {
        let damage = watch::Sender::new(generations.marked_damage());
        Mending { machine, source, damage, waiting: Mutex::default() }
    }
}

impl Node {
    /// What is wrong with this member's store, if anything is known to be.
    pub fn damage(&self) -> Option<Damage> {
        *self.mending.damage.borrow()
    }

    /// True while this member must not serve keys, for its store is damaged and other members have them.
    pub fn withholds(&self) -> bool {
        self.damage().is_some() && !self.is_only_voter()
    }

    /// Waits until this member must not serve keys.
    pub async fn withheld(&self) {
        let mut damage = self.mending.damage.subscribe();
        // It lives as long as the node.
        while damage.wait_for(Option::is_some).await.is_ok() && !self.withholds() {
            let _ = damage.changed().await;
        }
    }

    /// True if nobody but this member votes.
    pub fn is_only_voter(&self) -> bool {
        let membership = Arc::clone(&self.raft.metrics().borrow_watched().membership_config);
        let mut voters = membership.membership().voter_ids();
        voters.next() == Some(self.identity().member_id) && voters.next().is_none()
    }

    /// Takes note that the store is damaged, for the next start too.
    pub fn distrust(&self, damage: Damage) {
        let is_news = self.mending.damage.send_if_modified(|known| {
            // What cannot be read has to be replaced, whatever a comparison says of the rest.
            let is_news = known.is_none() || (*known != Some(damage) && damage == Damage::Unreadable);
            if is_news {
                *known = Some(damage);
            }
            is_news
        });
        if is_news {
            self.stand_for_election();
            error!(?damage, withheld = self.withholds(), "the store of this member is damaged");
            if let Err(error) = self.generations().mark_damaged(damage) {
                warn!(%error, "the next start will not know that the store is damaged");
            }
        }
    }

    /// Takes note that the store is as it should be.
    pub fn trust(&self) {
        if let Err(error) = self.generations().unmark_damaged() {
            warn!(%error, "the next start will take the store for damaged");
        }
        if self.mending.damage.send_replace(None).is_some() {
            self.stand_for_election();
            info!("this member serves keys again");
        }
    }

    /// Lets this member stand for election if its keys are served; to be called again, for who votes is not known at once.
    pub fn stand_for_election(&self) {
        self.raft.runtime_config().elect(!self.withholds());
    }

    /// Where this member's files are sent from.
    pub(super) fn source(&self) -> &Arc<Source> {
        &self.mending.source
    }

    /// Where the store stands.
    pub(super) fn position(&self) -> io::Result<SnapshotMeta> {
        let (last_log_id, last_membership) = stored_position(&self.state.store())?;
        Ok(SnapshotMeta { last_log_id, last_membership })
    }

    /// Gives who waits for a peer's files, once.
    pub(super) fn take_waiting(&self) -> Option<oneshot::Sender<Arrival>> {
        self.mending.waiting.lock().take()
    }

    /// Hashes all keys that are stored here and at the voters that answer, at one revision. All of them read all they have.
    pub async fn examine(&self) -> Examined {
        let here = self.state.store().revision();
        let found = self.examine_at(here).await;
        if !found.agreeing.is_empty() {
            return found;
        }
        // It may be ahead of the others, who have stopped where they are.
        let reached = self.hashes_of_voters(0).await.into_iter().map(|(_, found)| found.revision).min();
        match reached.filter(|reached| *reached < here) {
            Some(reached) => self.examine_at(reached).await,
            None => found,
        }
    }

    async fn examine_at(&self, revision: i64) -> Examined {
        let (own, others) =
            futures::future::join(self.hash_here(revision), self.hashes_of_voters(revision)).await;
        judge(self.identity().member_id, own, &others, &self.voters())
    }

    /// What other voters that answer have at a revision, 0 for the one at which they are.
    async fn hashes_of_voters(&self, revision: i64) -> Vec<(u64, RevisionHash)> {
        let voters = self.voters();
        let links = self.links.all();
        let voting = links.iter().filter(|link| voters.contains(&link.member_id()));
        let asked = voting.map(|link| async { Some((link.member_id(), link.hash_history(revision).await?)) });
        futures::future::join_all(asked).await.into_iter().flatten().collect()
    }

    /// Puts the store of a peer in the place of this member's, without its clients or openraft noticing more than a pause.
    ///
    /// # Errors
    /// See [`MendError`]; but for the last, nothing has changed, and it may be tried again.
    pub async fn mend_from(&self, peer: u64) -> Result<(), MendError> {
        if self.is_leader() {
            return Err(MendError::Leads);
        }
        let link = self.links.get(peer).ok_or(MendError::NoPeer)?;
        let damaged = self.state.store();
        let position = self.position()?;
        let from = position.last_log_id.ok_or_else(|| io::Error::other("nothing was ever applied here"))?;
        // What is applied from here on will have to be applied once more.
        let _kept = self.mending.source.begin(&position);
        let (give, given) = oneshot::channel();
        *self.mending.waiting.lock() = Some(give);
        let sent = link.send_files(from).await;
        drop(self.take_waiting());
        sent.map_err(MendError::NotSent)?;
        let arrival = tokio::time::timeout(HANDED_OVER_WITHIN, given).await;
        let Ok(Ok(arrival)) = arrival else { return Err(MendError::NotSent("they did not arrive".into())) };
        let index = self.mending.machine.mend(&damaged, arrival).await?;
        info!(peer = %MemberId::new(peer), index, "this member's store was replaced by a peer's");
        Ok(())
    }
}

/// Judges the member `here`, with the hash `own` if it has one, by those of other voters at the same revision.
fn judge(here: u64, own: Option<RevisionHash>, others: &[(u64, RevisionHash)], voters: &[u64]) -> Examined {
    let key = |found: &RevisionHash| (found.compact_revision, found.hash);
    let mut by_hash: BTreeMap<(i64, u32), Vec<u64>> = BTreeMap::new();
    for (member, found) in others {
        by_hash.entry(key(found)).or_default().push(*member);
    }
    let unanimous =
        if by_hash.len() == 1 { by_hash.values().flatten().copied().collect() } else { Vec::new() };
    let votes = usize::from(voters.contains(&here));
    let own = own.as_ref().map(key);
    let majority = by_hash.into_iter().find(|(hash, members)| {
        members.len() + if own == Some(*hash) { votes } else { 0 } > voters.len() / 2
    });
    let Some((right, agreeing)) = majority else {
        return Examined { unanimous, ..Examined::default() };
    };
    // After another compaction there is less to hash, which says nothing.
    let differs = own.is_none_or(|own| own.0 == right.0 && own != right);
    Examined { agreeing, differs, unanimous }
}

impl Machine {
    /// Brings a peer's store level with this member's, which must be `damaged` to the end, and puts it in its place; gives the
    /// index at which that was.
    async fn mend(&self, damaged: &Arc<Store>, arrival: Arrival) -> Result<u64, MendError> {
        let store = arrival.store().map(Arc::clone).ok_or_else(|| io::Error::other("the files are used"))?;
        let incoming = State::open(Arc::clone(&store)).map_err(io::Error::other)?;
        let last = arrival.meta().last_log_id.map_or(0, |last| last.index());
        let mut applied = self.listeners.applied.subscribe();
        let reached = tokio::time::timeout(LEVEL_WITHIN, applied.wait_for(|next| *next > last)).await;
        drop(reached.map_err(|_| MendError::Behind)?.map_err(io::Error::other)?);
        self.follow_to_end(&incoming).await?;
        // The log may have been purged up to what the damaged store's files hold.
        let flushing = Arc::clone(&store);
        let flushed = blocking::spawn(move || flushing.engine().flush()).await;
        flushed.map_err(io::Error::other)?.map_err(io::Error::other)?;
        let _placing = self.placing.lock().await;
        if !Arc::ptr_eq(damaged, &self.state.store()) {
            return Err(MendError::Replaced);
        }
        self.follow_to_end(&incoming).await?;
        let settled = blocking::spawn(move || arrival.settle()).await.map_err(io::Error::other);
        let store = settled.flatten().map_err(MendError::HalfDone)?;
        loop {
            {
                let _turn = self.turn.lock();
                if self.follow(&incoming).map_err(MendError::HalfDone)? {
                    let index = self.next_to_apply().saturating_sub(1);
                    self.replace_store(store, index).map_err(MendError::HalfDone)?;
                    return Ok(index);
                }
            }
            tokio::task::yield_now().await;
        }
    }

    fn next_to_apply(&self) -> u64 {
        *self.listeners.applied.borrow()
    }

    /// Applies to another state what was applied to this one.
    async fn follow_to_end(&self, incoming: &State) -> io::Result<()> {
        while !self.follow(incoming)? {
            tokio::task::yield_now().await;
        }
        Ok(())
    }

    /// Applies to another state the next of the entries that were applied to this one; true if there are no more.
    fn follow(&self, incoming: &State) -> io::Result<bool> {
        let store = incoming.store();
        let (from, to) = (incoming.trails.read().last().next, self.next_to_apply());
        let until = to.min(from + RUN_ENTRIES_MAX as u64);
        let entries = self.log.read(from..until, RUN_BYTES_MAX).map_err(io::Error::other)?;
        if from < to && entries.first().is_none_or(|(index, _)| *index != from) {
            return Err(io::Error::other("the log no longer has what follows the files"));
        }
        let mut run = Run::new(incoming, &store);
        for (_, encoded) in entries {
            let entry = codec::decode_entry(encoded)?;
            let position = codec::log_id_to_proto(&entry.log_id);
            match entry.payload {
                EntryPayload::Blank => run.pass(position),
                EntryPayload::Normal(proposal) => {
                    let (command, who, _) = apply::decode(proposal.0).map_err(io::Error::other)?;
                    // Whoever waited for its outcome has it.
                    let _outcome = run.apply(command, who.as_ref(), position).map_err(io::Error::other)?;
                }
                EntryPayload::Membership(membership) => set_membership(&mut run, entry.log_id, membership),
            }
        }
        // Watchers find the events in the history.
        run.commit().map_err(io::Error::other)?;
        Ok(incoming.trails.read().last().next >= to)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn judged(own: Option<(i64, u32)>, others: &[(u64, i64, u32)], voters: &[u64]) -> Examined {
        let hash = |compact_revision, hash| RevisionHash { hash, compact_revision, revision: 9 };
        let others: Vec<_> =
            others.iter().map(|(id, compacted, found)| (*id, hash(*compacted, *found))).collect();
        judge(1, own.map(|(compacted, found)| hash(compacted, found)), &others, voters)
    }

    fn agreeing(agreeing: &[u64], differs: bool) -> Examined {
        Examined { agreeing: agreeing.to_vec(), differs, unanimous: agreeing.to_vec() }
    }

    #[test]
    fn only_a_majority_of_the_voters_can_say_that_a_member_is_wrong() {
        let three = &[1, 2, 3];
        assert_eq!(judged(Some((0, 8)), &[(2, 0, 7), (3, 0, 7)], three), agreeing(&[2, 3], true));
        assert_eq!(judged(None, &[(2, 0, 7), (3, 0, 7)], three), agreeing(&[2, 3], true), "unreadable");
        assert_eq!(
            judged(Some((5, 8)), &[(2, 0, 7), (3, 0, 7)], three),
            agreeing(&[2, 3], false),
            "compacted"
        );
        let learner = judged(Some((0, 8)), &[(2, 0, 7), (3, 0, 7)], &[2, 3, 4]);
        assert_eq!(learner, agreeing(&[2, 3], true));
        for found in [
            judged(Some((0, 8)), &[(2, 0, 7)], three),
            judged(Some((0, 8)), &[(2, 0, 7), (3, 0, 9)], three),
            judged(Some((0, 8)), &[(2, 0, 7)], &[1, 2]),
            judged(Some((0, 8)), &[(2, 0, 8), (3, 0, 9), (4, 0, 9)], &[2, 3, 4, 5]),
            judged(Some((0, 7)), &[], &[1]),
            judged(None, &[(2, 0, 7)], three),
        ] {
            assert_eq!((&found.agreeing[..], found.differs), (&[][..], false), "{found:?}");
        }
    }

    #[test]
    fn a_member_that_is_right_counts_for_the_majority() {
        let three = &[1, 2, 3];
        assert_eq!(judged(Some((0, 7)), &[(2, 0, 7), (3, 0, 7)], three), agreeing(&[2, 3], false));
        assert_eq!(judged(Some((0, 7)), &[(2, 0, 7)], three), agreeing(&[2], false));
        let apart = judged(Some((0, 7)), &[(2, 0, 7), (3, 0, 8)], three);
        assert_eq!(apart, Examined { agreeing: vec![2], differs: false, unanimous: vec![] });
        let learner = judged(Some((0, 7)), &[(2, 0, 7)], &[2, 3]);
        assert_eq!(learner.agreeing, Vec::<u64>::new(), "it has no vote");
    }

    #[test]
    fn what_the_others_have_is_known_without_a_majority() {
        assert_eq!(judged(None, &[(2, 0, 7)], &[1, 2]).unanimous, [2]);
        assert_eq!(judged(None, &[(2, 0, 7), (3, 0, 8)], &[1, 2, 3, 4]).unanimous, Vec::<u64>::new());
    }
}
