//! Proposing commands: here when this member leads, through the leader otherwise.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures::FutureExt;
use openraft::async_runtime::WatchReceiver;
use openraft::errors::{ClientWriteError, RaftError};
use prost::Message;
use tokio::sync::watch;

use super::network::Answer;
use super::node::{Node, NodeCounts};
use super::types::Proposal;
use crate::apply::{self, Outcome, Reply};
use crate::auth::Identity;
use crate::clock;
use crate::proto::skegpb::Command;
use crate::proto::skegpb::command::Kind;
use crate::proto::skegpb::proposed_result::Status;

/// Bytes of proposals that may be under way; more are refused as too many requests. They are held in memory.
const PROPOSED_BYTES_MAX: usize = 64 << 20;
/// Assumed memory of a proposal besides its bytes.
const PROPOSAL_OVERHEAD_BYTES: usize = 512;
/// Pause before a member that said it does not lead is asked again.
const ASK_AGAIN: Duration = Duration::from_millis(10);

/// Wait for the level that a command needs: until the leader has heard of all members of a new cluster.
const LEVEL_WAIT: Duration = Duration::from_secs(3);

/// Why a proposal was not applied, or may not have been.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ProposeError {
    /// The encoded command is over the limit.
    #[error("request is too large")]
    TooLarge,
    /// Too much is under way.
    #[error("too many requests")]
    TooManyRequests,
    /// Not all members could read it: it never will be applied.
    #[error("not before all members run a newer version")]
    Level,
    /// There was no leader to take it in time; it never will be applied.
    #[error("context deadline exceeded")]
    NoLeader,
    /// Not applied in time; it may still be.
    #[error("request timed out")]
    TimedOut,
    /// Not applied in time, or lost by this member, for the leader changed about when it was proposed; it may still be
    /// applied.
    #[error("request timed out, possibly due to previous leader failure")]
    TimedOutLeaderFailed,
    /// Not applied in time, and the leader or a quorum could not be reached; it may still be.
    #[error("request timed out, possibly due to connection lost")]
    TimedOutConnectionLost,
    /// The member is stopping.
    #[error("server stopped")]
    Stopped,
}

/// How a proposal to this member's own log ended.
enum Written {
    Applied(Outcome, u64),
    /// It is not in the log and never will be.
    NotLeader,
    /// It is no longer in this member's log; another member may still commit it.
    Discarded,
    Stopped,
}

impl Node {
    /// Proposes a command and waits until it is applied here. May be cancelled; the command may then still be applied.
    ///
    /// On return the command is in the log on a majority's disks and visible to reads of this member.
    ///
    /// # Errors
    /// See [`ProposeError`]: only [`ProposeError::TooLarge`], [`ProposeError::TooManyRequests`], [`ProposeError::Level`] and
    /// [`ProposeError::NoLeader`] say that it never will be applied.
    pub async fn propose(&self, kind: Kind) -> Result<Outcome, ProposeError> {
        self.propose_for(kind, None).await
    }

    /// As [`Node::propose`], for a client that is known as `who`.
    ///
    /// # Errors
    /// As [`Node::propose`].
    pub async fn propose_for(&self, kind: Kind, who: Option<Identity>) -> Result<Outcome, ProposeError> {
        self.await_level(apply::level_needed(&kind)).await?;
        let command = Command { kind: Some(kind), identity: who, request_id: 0 };
        let encoded = Bytes::from(command.encode_to_vec());
        if encoded.len() > self.options.max_request_bytes {
            return Err(ProposeError::TooLarge);
        }
        let _admission = self.admit(encoded.len() + PROPOSAL_OVERHEAD_BYTES)?;
        let started = clock::now();
        let in_doubt = AtomicBool::new(false);
        let writing = self.write(command, encoded, &in_doubt);
        let written = tokio::time::timeout(self.options.request_timeout, writing).await;
        let outcome = written.unwrap_or_else(|_| {
            Err(if in_doubt.load(Ordering::Relaxed) {
                self.why_timed_out(started)
            } else {
                ProposeError::NoLeader
            })
        });
        if outcome.is_err() {
            self.counts.failed.fetch_add(1, Ordering::Relaxed);
        }
        outcome
    }

    /// Waits for the level that a command needs: a new cluster gets there in a moment.
    pub(super) async fn await_level(&self, needed: u32) -> Result<(), ProposeError> {
        if needed == 0 {
            return Ok(());
        }
        let rising = async {
            while self.state.cluster.read().level() < needed {
                tokio::time::sleep(ASK_AGAIN).await;
            }
        };
        tokio::time::timeout(LEVEL_WAIT, rising).await.map_err(|_| ProposeError::Level)
    }

    /// Writes a command to the leader's log; `in_doubt` says whether it may be there by now.
    async fn write(
        &self,
        mut command: Command,
        encoded: Bytes,
        in_doubt: &AtomicBool,
    ) -> Result<Outcome, ProposeError> {
        loop {
            if self.has_stopped() {
                return Err(ProposeError::Stopped);
            }
            // One that does not show that it leads would take the command and keep it in doubt.
            let leader = self.leader();
            if leader == 0 {
                self.pause(ASK_AGAIN).await?;
                continue;
            }
            if leader == self.options.identity.member_id {
                #[cfg(feature = "sim")]
                if let Some(outcome) = self.planted_answer(&command, &encoded).await {
                    return Ok(outcome);
                }
                in_doubt.store(true, Ordering::Relaxed);
                match self.write_here(encoded.clone()).await {
                    Written::Applied(outcome, _) => return Ok(outcome),
                    Written::Discarded => return Err(ProposeError::TimedOutLeaderFailed),
                    Written::Stopped => return Err(ProposeError::Stopped),
                    Written::NotLeader => {
                        in_doubt.store(false, Ordering::Relaxed);
                        self.pause(ASK_AGAIN).await?;
                        continue;
                    }
                }
            }
            in_doubt.store(true, Ordering::Relaxed);
            let mut replaced = self.store_replacements();
            replaced.mark_unchanged();
            let mut waiting = self.outcomes.expect();
            command.request_id = waiting.id();
            let forwarded = self.forwarder.propose(leader, waiting.id(), command.encode_to_vec().into());
            let answer = tokio::select! {
                biased;
                outcome = waiting.outcome() => return Ok(outcome),
                answer = forwarded => answer,
            };
            match answer {
                Answer::Committed(index) => {
                    return tokio::select! {
                        biased;
                        outcome = waiting.outcome() => Ok(outcome),
                        // A peer's files have it: nobody here has seen what came of it.
                        () = passed_over(self.applied.clone(), replaced, index) => Err(ProposeError::TimedOut),
                    };
                }
                // In doubt it may still come, by another leader.
                Answer::Unknown => return Ok(waiting.outcome().await),
                Answer::Overloaded => return Err(ProposeError::TooManyRequests),
                Answer::NotLeader => {
                    in_doubt.store(false, Ordering::Relaxed);
                    self.pause(ASK_AGAIN).await?;
                }
            }
        }
    }

    /// Waits a moment, or until another leader is known.
    async fn pause(&self, at_most: Duration) -> Result<(), ProposeError> {
        let mut changes = self.raft.server_metrics();
        // What has changed since the start was not news.
        let _ = changes.changed().now_or_never();
        match tokio::time::timeout(at_most, changes.changed()).await {
            Ok(Err(_)) => Err(ProposeError::Stopped),
            Ok(Ok(())) | Err(_) => Ok(()),
        }
    }

    /// An answer that the leader is not entitled to: a put's before it is committed.
    #[cfg(feature = "sim")]
    async fn planted_answer(&self, command: &Command, encoded: &Bytes) -> Option<Outcome> {
        use crate::proto::etcdserverpb::{PutResponse, ResponseHeader};
        let planted = crate::sim::planted(crate::sim::Bug::AckBeforeCommit);
        if !planted || !matches!(command.kind, Some(Kind::Put(_))) {
            return None;
        }
        let (raft, proposal) = (self.raft.clone(), Proposal(encoded.clone()));
        tokio::spawn(async move { raft.client_write(proposal).await });
        tokio::time::sleep(Duration::from_millis(2)).await;
        let header =
            ResponseHeader { revision: self.state.store().revision() + 1, ..ResponseHeader::default() };
        Some(Ok(Reply::Put(PutResponse { header: Some(header), prev_kv: None })))
    }

    async fn write_here(&self, encoded: Bytes) -> Written {
        match self.raft.client_write(Proposal(encoded)).await {
            Ok(response) => {
                Written::Applied(response.data.0.unwrap_or(Ok(Reply::None)), response.log_id.index())
            }
            Err(RaftError::APIError(
                ClientWriteError::ForwardToLeader(_) | ClientWriteError::PreconditionFailed(_),
            )) => Written::NotLeader,
            Err(RaftError::APIError(ClientWriteError::LogEntryDiscarded(_))) => Written::Discarded,
            Err(RaftError::Fatal(_) | RaftError::APIError(ClientWriteError::ChangeMembershipError(_))) => {
                Written::Stopped
            }
        }
    }

    /// Writes a peer's encoded command to the log, if this member leads; gives how it ended and where it stands.
    pub(super) async fn propose_for_peer(&self, encoded: Bytes) -> (Status, u64) {
        if encoded.len() > self.options.max_request_bytes + PROPOSAL_OVERHEAD_BYTES {
            return (Status::Overloaded, 0);
        }
        let Ok(_admission) = self.admit(encoded.len() + PROPOSAL_OVERHEAD_BYTES) else {
            return (Status::Overloaded, 0);
        };
        if !self.raft.is_leader() {
            return (Status::NotLeader, 0);
        }
        let written = tokio::time::timeout(self.options.request_timeout, self.write_here(encoded)).await;
        match written {
            Ok(Written::Applied(_, index)) => (Status::Committed, index),
            Ok(Written::NotLeader) => (Status::NotLeader, 0),
            Ok(Written::Discarded | Written::Stopped) | Err(_) => (Status::Unknown, 0),
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

    /// Why a proposal that began at `started` was not done in time. etcd: `parseProposeCtxErr`.
    fn why_timed_out(&self, started: Instant) -> ProposeError {
        let (_, elected) = self.leadership.leader_since();
        if let Some(elected) = elected
            && started < elected
            && elected < started + 2 * self.options.election_timeout
        {
            return ProposeError::TimedOutLeaderFailed;
        }
        let waited = clock::now().duration_since(started);
        let (here, leader) = (self.options.identity.member_id, self.leader());
        let connected = if leader == here {
            self.answering_voters(waited) > self.voters().len() / 2
        } else {
            leader == 0 || self.links.get(leader).and_then(|link| link.answers_for()) >= Some(waited)
        };
        if connected { ProposeError::TimedOut } else { ProposeError::TimedOutConnectionLost }
    }
}

/// Waits until a peer's files have taken the place of an entry that was to be applied here.
async fn passed_over(applied: watch::Receiver<u64>, mut replaced: watch::Receiver<()>, index: u64) {
    while replaced.changed().await.is_ok() {
        if *applied.borrow() > index {
            return;
        }
    }
    std::future::pending().await
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

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn an_entry_is_passed_over_by_files_that_have_it_and_by_nothing_else() {
        let (applied, at) = watch::channel(5);
        let (replaced, mut files) = watch::channel(());
        files.mark_unchanged();
        let mut waits = Box::pin(passed_over(at, files, 7));
        assert_eq!(waits.as_mut().now_or_never(), None);
        applied.send_replace(6);
        replaced.send_replace(());
        assert_eq!(waits.as_mut().now_or_never(), None, "these files end before it");
        applied.send_replace(8);
        assert_eq!(waits.as_mut().now_or_never(), None, "it was applied here");
        replaced.send_replace(());
        assert_eq!(waits.as_mut().now_or_never(), Some(()));
    }
}
