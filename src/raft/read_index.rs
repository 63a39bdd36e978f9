//! Linearizable reads: one question to the leadership, shared by every read that came before it was asked.
//!
//! ```text
//! read ─┐                 ┌─ read        (arrived while one is out: waits for the next)
//! read ─┼─> ReadIndex ────┘
//! read ─┘       │ index, applied?
//!               ▼
//!            all three go on
//! ```
//!
//! A read may only use an index that was asked for after the read began; so it never joins a question that is already
//! out. Leases are not used: a restarted follower votes at once, whatever a leader believes of its lease.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use openraft::ReadPolicy;
use openraft::async_runtime::WatchReceiver;
use openraft::errors::{LinearizableReadError, RaftError};
use tokio::sync::{mpsc, oneshot, watch};

use super::node::{Node, NodeCounts};
#[cfg(feature = "sim")]
use crate::sim;

/// How long a failed question waits at most before it is asked again. etcd: `readIndexRetryTime`.
const RETRY_AFTER: Duration = Duration::from_millis(500);
/// How long it waits the first time. A member that has just started asks before its election is over; waiting long for
/// that would double the time of a restart.
const FIRST_RETRY_AFTER: Duration = Duration::from_millis(5);
/// Reads that may wait for an answer; more are refused like any overload.
const WAITING_MAX: usize = 65_536;

/// Why a linearizable read could not be served.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReadError {
    /// No answer within the request time-out.
    #[error("request timed out")]
    TimedOut,
    /// Too many reads wait already.
    #[error("too many requests")]
    TooManyRequests,
    /// The member is stopping.
    #[error("server stopped")]
    Stopped,
}

/// The handle; the loop is [`run`].
#[derive(Clone)]
pub(super) struct ReadIndex {
    requests: mpsc::Sender<oneshot::Sender<()>>,
    timeout: Duration,
    counts: Arc<NodeCounts>,
}

pub(super) fn channel(
    timeout: Duration,
    counts: Arc<NodeCounts>,
) -> (ReadIndex, mpsc::Receiver<oneshot::Sender<()>>) {
    let (requests, queue) = mpsc::channel(WAITING_MAX);
    (ReadIndex { requests, timeout, counts }, queue)
}

impl ReadIndex {
    /// Waits until the local state holds everything acknowledged before the call. May be cancelled.
    pub(super) async fn barrier(&self) -> Result<(), ReadError> {
        let (done, ready) = oneshot::channel();
        self.requests.try_send(done).map_err(|error| match error {
            mpsc::error::TrySendError::Full(_) => ReadError::TooManyRequests,
            mpsc::error::TrySendError::Closed(_) => ReadError::Stopped,
        })?;
        let failure = match tokio::time::timeout(self.timeout, ready).await {
            Ok(Ok(())) => return Ok(()),
            Ok(Err(_)) => ReadError::Stopped,
            Err(_) => ReadError::TimedOut,
        };
        self.counts.failed_reads.fetch_add(1, Ordering::Relaxed);
        Err(failure)
    }
}

impl Node {
    /// An index that covers everything acknowledged before the call, from this member as the leader; `None` if it does not
    /// lead, or cannot tell that it still does.
    pub(super) async fn leader_read_index(&self) -> Option<u64> {
        let linearizer = self.raft.get_read_linearizer(ReadPolicy::ReadIndex).await.ok()?;
        Some(linearizer.read_log_id().index())
    }

    /// Such an index from another member as the leader.
    async fn remote_read_index(&self, leader: u64) -> Option<u64> {
        let link = self.links.get(leader)?;
        tokio::time::timeout(self.options.election_timeout, link.read_index()).await.ok()?
    }

    /// Such an index from whoever leads; `Err` when consensus has stopped.
    async fn read_index(&self) -> Result<Option<u64>, Stopped> {
        let leader = match self.raft.get_read_linearizer(ReadPolicy::ReadIndex).await {
            Ok(linearizer) => return Ok(Some(linearizer.read_log_id().index())),
            Err(RaftError::Fatal(_)) => return Err(Stopped),
            Err(RaftError::APIError(LinearizableReadError::ForwardToLeader(forward))) => forward.leader_id,
            Err(RaftError::APIError(LinearizableReadError::QuorumNotEnough(_))) => None,
        };
        match leader {
            Some(leader) if leader != self.options.identity.member_id => {
                Ok(self.remote_read_index(leader).await)
            }
            _ => Ok(None),
        }
    }
}

/// Consensus has stopped.
#[derive(Debug, PartialEq, Eq)]
struct Stopped;

/// Waits until an entry is applied; false if it is not within so long.
async fn is_applied(
    applied: &mut watch::Receiver<u64>,
    index: u64,
    within: Duration,
) -> Result<bool, Stopped> {
    match tokio::time::timeout(within, applied.wait_for(|applied| *applied > index)).await {
        Ok(Ok(_)) => Ok(true),
        Ok(Err(_)) => Err(Stopped),
        Err(_) => Ok(false),
    }
}

/// Answers barriers until every handle is gone or Raft stops.
pub(super) async fn run(node: Node, mut queue: mpsc::Receiver<oneshot::Sender<()>>) {
    let mut applied = node.applied.clone();
    let mut waiting = Vec::new();
    let mut leadership = node.raft.server_metrics();
    while queue.recv_many(&mut waiting, WAITING_MAX).await > 0 {
        let mut retry_after = FIRST_RETRY_AFTER;
        loop {
            waiting.retain(|reader| !reader.is_closed());
            if waiting.is_empty() {
                break;
            }
            match node.read_index().await {
                Ok(Some(index)) => {
                    #[cfg(feature = "sim")]
                    let index = if sim::planted(sim::Bug::ReadBeforeApplied) { 0 } else { index };
                    // Who waits by then has come to the end of its own time, and others wait behind them.
                    match is_applied(&mut applied, index, node.options.request_timeout).await {
                        Err(Stopped) => return,
                        Ok(false) => continue,
                        Ok(true) => {}
                    }
                    for reader in waiting.drain(..) {
                        let _ = reader.send(());
                    }
                    break;
                }
                Err(Stopped) => return,
                Ok(None) => {
                    if retry_after == RETRY_AFTER {
                        node.counts.slow_reads.fetch_add(1, Ordering::Relaxed);
                    }
                    // A leader that has just been found is worth asking at once; one that is gone changes nothing.
                    let _ = tokio::time::timeout(retry_after, leadership.changed()).await;
                    retry_after = (2 * retry_after).min(RETRY_AFTER);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_read_does_not_wait_for_ever_for_what_is_never_applied() {
        let within = Duration::from_secs(7);
        let (sender, mut applied) = watch::channel(5);
        assert_eq!(is_applied(&mut applied, 4, within).await, Ok(true));
        assert_eq!(is_applied(&mut applied, 5, within).await, Ok(false));
        let (seen, _) = tokio::join!(is_applied(&mut applied, 5, within), async { sender.send_replace(6) });
        assert_eq!(seen, Ok(true));
        drop(sender);
        assert_eq!(is_applied(&mut applied, 6, within).await, Err(Stopped));
    }
}
