//! Making Raft's membership what the members agreed on.
//!
//! Clients change the *members*, by commands like any other; who votes follows. The leader compares the two and takes one
//! step at a time, each a log entry that openraft checks:
//!
//! ```text
//! member added ──> node learns ──> has caught up, is to vote ──> node votes
//! member removed ──> node is out
//! ```
//!
//! So a member that is added and never started costs nothing: it does not count for the quorum until it holds the log. A
//! removed leader steps down when its own removal is committed.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use openraft::EntryPayload;
use openraft::async_runtime::WatchReceiver;
use openraft::raft::Precondition;
use tracing::{info, warn};

use super::node::Node;
use super::types::{Membership, Peer, TypeConfig};
use crate::clock;
use crate::cluster::id::MemberId;
use crate::cluster::level::LEVEL;
use crate::proto::etcdserverpb::AlarmType;
use crate::proto::skegpb::command::Kind;
use crate::proto::skegpb::{MemberAdd, MemberRemove};
use crate::storage::StorageError;

/// Time between looks.
const LOOK_EVERY: Duration = Duration::from_millis(50);
/// Looks after which a removed member ends even if Raft's membership still has it.
const REMOVED_LOOKS_MAX: u32 = 100;
/// Entries that a node may be behind and still be given a vote: what it gets while the change is made.
const BEHIND_MAX: u64 = 1000;

/// A member as the applied log has it.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Wanted {
    peer_urls: Vec<String>,
    votes: bool,
}

/// Who is in Raft's membership.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Nodes {
    voters: BTreeSet<u64>,
    nodes: BTreeMap<u64, Peer>,
}

impl Nodes {
    /// The next step towards `wanted`; `None` if there is none to take now.
    ///
    /// `here` is the leader, `caught_up` tells who holds the log.
    fn step(
        &self,
        wanted: &BTreeMap<u64, Wanted>,
        here: u64,
        caught_up: impl Fn(u64) -> bool,
    ) -> Option<Nodes> {
        let mut next = self.clone();
        for (id, member) in wanted {
            next.nodes
                .entry(*id)
                .or_insert_with(|| Peer { peer_urls: member.peer_urls.clone(), name: String::new() });
        }
        next.nodes.retain(|id, _| wanted.contains_key(id) || self.voters.contains(id));
        if next != *self {
            return Some(next);
        }
        // Last of all the leader goes: somebody else has to make the other steps otherwise.
        let gone = self.voters.iter().filter(|id| !wanted.contains_key(id));
        if let Some(gone) = gone.min_by_key(|id| **id == here)
            && (*gone != here || self.voters.len() > 1)
            && (*gone != here || !wanted.iter().any(|(id, member)| member.votes && !self.voters.contains(id)))
        {
            next.voters.remove(gone);
            next.nodes.remove(gone);
            return Some(next);
        }
        let ready = wanted.iter().find(|(id, member)| {
            member.votes && !self.voters.contains(id) && self.nodes.contains_key(id) && caught_up(**id)
        });
        let (ready, _) = ready?;
        next.voters.insert(*ready);
        Some(next)
    }
}

/// Why leadership was not handed over.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TransferError {
    /// This member does not lead.
    #[error("not leader")]
    NotLeader,
    /// No voter has that id.
    #[error("bad leader transferee")]
    BadTarget,
    /// Not done within the request time-out.
    #[error("leader transfer took too long")]
    TimedOut,
    /// The member is stopping.
    #[error("server stopped")]
    Stopped,
}

impl Node {
    /// The nodes that vote.
    pub(super) fn voters(&self) -> Vec<u64> {
        self.raft.metrics().borrow_watched().membership_config.membership().voter_ids().collect()
    }

    /// How many voters have answered for that long, this member included.
    pub fn answering_voters(&self, at_least: Duration) -> usize {
        self.voters().into_iter().filter(|id| self.has_answered_for(*id, at_least)).count()
    }

    /// True if the member answers.
    pub fn answers(&self, member_id: u64) -> bool {
        self.has_answered_for(member_id, Duration::ZERO)
    }

    /// The level that a member's build knows; `None` if it does not answer now.
    pub fn level_of(&self, member_id: u64) -> Option<u32> {
        if member_id == self.options.identity.member_id {
            return Some(LEVEL);
        }
        self.links.get(member_id)?.level()
    }

    /// True if the member has answered for that long; this one always has.
    fn has_answered_for(&self, member_id: u64, at_least: Duration) -> bool {
        let answers_for = || self.links.get(member_id).and_then(|link| link.answers_for());
        member_id == self.options.identity.member_id || answers_for() >= Some(at_least)
    }

    /// What a member is known to hold and this one's last index; `None` if this member does not lead.
    pub(super) fn progress_here(&self, member_id: u64) -> Option<(u64, u64)> {
        let metrics = self.raft.metrics();
        let metrics = metrics.borrow_watched();
        let replication = metrics.replication.as_ref()?;
        let matched = replication.get(&member_id).and_then(|matched| matched.as_ref().map(|at| at.index()));
        Some((matched.unwrap_or(0), metrics.last_log_index.unwrap_or(0)))
    }

    /// Makes somebody a member who asks for it, in the place of another if `replaces` is not 0; gives its id. One who asks
    /// again is a member already.
    pub(super) async fn invite(&self, mut peer_urls: Vec<String>, replaces: u64) -> Result<u64, String> {
        peer_urls.sort();
        let known = {
            let cluster = self.state.cluster.read();
            cluster.members().find(|member| member.peer_urls == peer_urls).map(|member| member.id)
        };
        if let Some(known) = known {
            return Ok(known);
        }
        if replaces != 0 && !self.is_removed(replaces) {
            // Asked anew: one that has just been started, or has just died, is not known to.
            if let Some(link) = self.links.get(replaces) {
                let _trail = link.probe(0).await;
            }
            if self.answers(replaces) {
                return Err(format!("member {} still answers: stop it first", MemberId::new(replaces)));
            }
            self.change(Kind::MemberRemove(MemberRemove { id: replaces })).await?;
        }
        let seconds = i64::try_from(clock::unix_millis() / 1000).unwrap_or(i64::MAX);
        let id = MemberId::when_added(peer_urls.iter().map(String::as_str), seconds).get();
        self.change(Kind::MemberAdd(MemberAdd { id, peer_urls, is_learner: false, max_learners: 0 })).await?;
        Ok(id)
    }

    async fn change(&self, change: Kind) -> Result<(), String> {
        let outcome = self.propose(change).await.map_err(|error| error.to_string())?;
        outcome.map(drop).map_err(|refusal| refusal.to_string())
    }

    /// Hands leadership to another voter and waits until it leads.
    ///
    /// # Errors
    /// See [`TransferError`]; this member may lead on, or soon somebody else.
    pub async fn transfer_leadership(&self, to: u64) -> Result<(), TransferError> {
        if self.leader() != self.options.identity.member_id {
            return Err(TransferError::NotLeader);
        }
        if !self.voters().contains(&to) {
            return Err(TransferError::BadTarget);
        }
        if to == self.options.identity.member_id {
            return Ok(());
        }
        let within = self.options.request_timeout;
        let moved = async {
            let mut metrics = self.raft.server_metrics();
            self.raft.trigger().transfer_leader(to).await.map_err(|_| TransferError::Stopped)?;
            loop {
                if metrics.borrow_watched().current_leader == Some(to) {
                    return Ok(());
                }
                metrics.changed().await.map_err(|_| TransferError::Stopped)?;
            }
        };
        tokio::time::timeout(within, moved).await.unwrap_or(Err(TransferError::TimedOut))
    }

    /// The voter that holds most of the log besides this member, if this one leads; none whose data is known to be wrong.
    pub fn best_successor(&self) -> Option<u64> {
        let here = self.options.identity.member_id;
        let cluster = self.state.cluster.read();
        let is_fit = |id: u64| id != here && self.answers(id) && !cluster.has_raised(id, AlarmType::Corrupt);
        let others = self.voters().into_iter().filter(|id| is_fit(*id));
        others.max_by_key(|id| self.progress_here(*id).map(|(matched, _)| matched))
    }

    /// Waits until this member is removed from the cluster, and the cluster no longer needs it.
    pub async fn removed(&self) {
        let mut looks_left = REMOVED_LOOKS_MAX;
        loop {
            if self.links.is_expelled() {
                return;
            }
            if self.is_removed(self.options.identity.member_id) {
                looks_left -= 1;
                if looks_left == 0 || !self.is_in_membership() {
                    return;
                }
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }

    /// Waits until a peer shows that this member is not what it was, or has lost part of its log; gives what it says.
    pub async fn forgot(&self) -> &'static str {
        loop {
            if let Some(forgot) = self.links.forgot() {
                return forgot;
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }

    /// Waits until a peer says that the cluster is at a level that this build does not know.
    pub async fn outgrown(&self) -> StorageError {
        loop {
            if let Err(outgrown) = self.links.check_level() {
                return outgrown;
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }

    /// True if this member has a place in Raft's membership as last committed.
    fn is_in_membership(&self) -> bool {
        let metrics = self.raft.metrics();
        let metrics = metrics.borrow_watched();
        let here = self.options.identity.member_id;
        metrics.committed_membership_config.membership().get_node(&here).is_some()
    }

    /// True if Raft's membership is what the members are.
    pub fn is_membership_settled(&self) -> bool {
        let metrics = self.raft.metrics();
        let metrics = metrics.borrow_watched();
        let wanted = self.wanted();
        let nodes: BTreeSet<u64> =
            metrics.committed_membership_config.membership().nodes().map(|(id, _)| *id).collect();
        nodes == wanted.keys().copied().collect()
    }

    fn wanted(&self) -> BTreeMap<u64, Wanted> {
        let cluster = self.state.cluster.read();
        let members = cluster.members().map(|member| {
            (member.id, Wanted { peer_urls: member.peer_urls.clone(), votes: !member.is_learner })
        });
        members.collect()
    }

    /// Takes one step, if this member leads and there is one to take.
    async fn settle_membership(&self) {
        // Only a leader that has applied everything of earlier terms knows who the members are.
        if !self.keeps_lease_clock() {
            return;
        }
        let Some((now, precondition)) = self.settled_nodes() else { return };
        let wanted = self.wanted();
        if wanted.is_empty() {
            return;
        }
        let caught_up = |id| {
            self.answers(id)
                && self
                    .progress_here(id)
                    .is_some_and(|(matched, last)| matched > 0 && matched + BEHIND_MAX >= last)
        };
        let Some(next) = now.step(&wanted, self.options.identity.member_id, caught_up) else { return };
        let voters: Vec<String> = next.voters.iter().map(|id| MemberId::new(*id).to_string()).collect();
        let Ok(membership) = Membership::new(vec![next.voters], next.nodes) else { return };
        let learners = membership.learner_ids().count();
        let appended = self.raft.append_membership(membership, EntryPayload::Blank, [precondition]).await;
        match appended {
            Ok(_) => info!(?voters, learners, "raft membership changed"),
            Err(error) => warn!(%error, "raft membership not changed, trying again"),
        }
    }

    /// The membership as it stands, if this member leads and the last change is committed.
    fn settled_nodes(&self) -> Option<(Nodes, Precondition<TypeConfig>)> {
        let metrics = self.raft.metrics();
        let metrics = metrics.borrow_watched();
        let (effective, committed) = (&metrics.membership_config, &metrics.committed_membership_config);
        if !metrics.state.is_leader() || effective.log_id() != committed.log_id() {
            return None;
        }
        let membership = effective.membership();
        let nodes = membership.nodes().map(|(id, peer)| (*id, peer.clone())).collect();
        let precondition = Precondition::LastMembershipLogId { last_membership_log_id: *effective.log_id() };
        Some((Nodes { voters: membership.voter_ids().collect(), nodes }, precondition))
    }
}

/// Settles the membership for as long as the member runs.
pub(super) async fn follow(node: Node) {
    let mut ticks = tokio::time::interval(LOOK_EVERY);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        node.settle_membership().await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nodes(voters: &[u64], learners: &[u64]) -> Nodes {
        let peer = || Peer { peer_urls: vec!["http://a:1".to_owned()], name: String::new() };
        let nodes = voters.iter().chain(learners).map(|id| (*id, peer())).collect();
        Nodes { voters: voters.iter().copied().collect(), nodes }
    }

    fn wanted(voters: &[u64], learners: &[u64]) -> BTreeMap<u64, Wanted> {
        let member = |votes| Wanted { peer_urls: vec!["http://a:1".to_owned()], votes };
        let voting = voters.iter().map(|id| (*id, member(true)));
        voting.chain(learners.iter().map(|id| (*id, member(false)))).collect()
    }

    /// Each step, by voters and learners, until there is none.
    fn steps(from: Nodes, to: &BTreeMap<u64, Wanted>, caught_up: &[u64]) -> Vec<Nodes> {
        let mut all = vec![from];
        while let Some(next) = all[all.len() - 1].step(to, 1, |id| caught_up.contains(&id)) {
            assert!(all.len() < 10, "it ends");
            all.push(next);
        }
        all.split_off(1)
    }

    #[test]
    fn a_new_member_learns_first_and_votes_when_it_has_caught_up() {
        let to = wanted(&[1, 2], &[]);
        assert_eq!(steps(nodes(&[1], &[]), &to, &[]), [nodes(&[1], &[2])]);
        assert_eq!(steps(nodes(&[1], &[]), &to, &[2]), [nodes(&[1], &[2]), nodes(&[1, 2], &[])]);
        assert_eq!(steps(nodes(&[1], &[]), &wanted(&[1], &[2]), &[2]), [nodes(&[1], &[2])]);
    }

    #[test]
    fn voters_go_one_at_a_time_and_the_leader_last() {
        let found = steps(nodes(&[1, 2, 3], &[4]), &wanted(&[2], &[]), &[]);
        assert_eq!(found, [nodes(&[1, 2, 3], &[]), nodes(&[1, 2], &[]), nodes(&[2], &[])]);
    }

    #[test]
    fn the_leader_stays_until_its_successor_votes() {
        let to = wanted(&[2], &[]);
        assert_eq!(steps(nodes(&[1], &[]), &to, &[]), [nodes(&[1], &[2])]);
        assert_eq!(
            steps(nodes(&[1], &[]), &to, &[2]),
            [nodes(&[1], &[2]), nodes(&[1, 2], &[]), nodes(&[2], &[])]
        );
    }
}
