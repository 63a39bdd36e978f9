//! What only the leader knows: renewing leases, their time, how far a member has come. Asked here when this member leads, of
//! the leader otherwise.

use std::sync::Arc;
use std::time::Duration;

use super::network::Link;
use super::node::Node;
use super::propose::ProposeError;
use super::read_index::ReadError;
use crate::clock;
use crate::lease::deadlines::Renewal;
use crate::proto::etcdserverpb::{LeaseCheckpoint, LeaseCheckpointRequest};
use crate::proto::skegpb::command::Kind;

/// Pause before a leader that cannot answer is asked again. etcd: `server/etcdserver/v3_server.go`.
const ASK_AGAIN: Duration = Duration::from_millis(50);

/// Why the leader could not be asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AskError {
    /// No leader was found within an election time-out.
    #[error("no leader")]
    NoLeader,
    /// No answer within the request time-out.
    #[error("request timed out")]
    TimedOut,
    /// The member is stopping.
    #[error("server stopped")]
    Stopped,
}

impl From<ProposeError> for AskError {
    fn from(error: ProposeError) -> AskError {
        if error == ProposeError::Stopped { AskError::Stopped } else { AskError::TimedOut }
    }
}

impl From<ReadError> for AskError {
    fn from(error: ReadError) -> AskError {
        if error == ReadError::Stopped { AskError::Stopped } else { AskError::TimedOut }
    }
}

/// The leader: this member or another.
enum Asked {
    Here,
    There(Arc<Link>),
}

impl Node {
    /// Renews a lease; gives its time to live in seconds, 0 if it does not exist (any more). May be cancelled.
    ///
    /// # Errors
    /// See [`AskError`]; the lease may have been renewed.
    pub async fn renew_lease(&self, id: i64) -> Result<i64, AskError> {
        self.within_time(async {
            loop {
                let renewed = match self.leader_to_ask().await? {
                    Asked::Here => self.renew_here(id).await,
                    Asked::There(leader) => leader.renew_lease(id).await,
                };
                match renewed {
                    Some(ttl) => return Ok(ttl),
                    None => tokio::time::sleep(ASK_AGAIN).await,
                }
            }
        })
        .await
    }

    /// The whole seconds left of a lease; `None` if it does not exist.
    ///
    /// # Errors
    /// See [`AskError`].
    pub async fn lease_remaining(&self, id: i64) -> Result<Option<i64>, AskError> {
        self.within_time(async {
            loop {
                let found = match self.leader_to_ask().await? {
                    Asked::Here if self.await_lease_clock().await => self.lease_time_here(id),
                    Asked::Here => None,
                    Asked::There(leader) => leader.lease_time(id).await,
                };
                match found {
                    Some(remaining) => return Ok(remaining),
                    None => tokio::time::sleep(ASK_AGAIN).await,
                }
            }
        })
        .await
    }

    /// What a member is known to hold of the log, and the leader's last index.
    ///
    /// # Errors
    /// See [`AskError`].
    pub async fn progress(&self, member_id: u64) -> Result<(u64, u64), AskError> {
        self.within_time(async {
            loop {
                let found = match self.leader_to_ask().await? {
                    Asked::Here => self.progress_here(member_id),
                    Asked::There(leader) => leader.member_progress(member_id).await,
                };
                match found {
                    Some(progress) => return Ok(progress),
                    None => tokio::time::sleep(ASK_AGAIN).await,
                }
            }
        })
        .await
    }

    async fn within_time<T>(
        &self,
        asking: impl Future<Output = Result<T, AskError>> + Send,
    ) -> Result<T, AskError> {
        tokio::time::timeout(self.options.request_timeout, asking).await.unwrap_or(Err(AskError::TimedOut))
    }

    /// Who leads, as soon as somebody shows that.
    async fn leader_to_ask(&self) -> Result<Asked, AskError> {
        let found = tokio::time::timeout(self.options.election_timeout, self.await_shown_leader()).await;
        let leader = found.map_err(|_| AskError::NoLeader)?;
        if leader == self.options.identity.member_id {
            return Ok(Asked::Here);
        }
        self.links.get(leader).map(Asked::There).ok_or(AskError::NoLeader)
    }

    /// Waits for a leader that shows that it leads.
    async fn await_shown_leader(&self) -> u64 {
        loop {
            match self.leader() {
                0 => tokio::time::sleep(ASK_AGAIN).await,
                leader => return leader,
            }
        }
    }

    /// What is left of a lease by this member's clock; `None` if that does not count.
    pub(super) fn lease_time_here(&self, id: i64) -> Option<Option<i64>> {
        let leads = self.keeps_lease_clock() && self.leader() == self.options.identity.member_id;
        leads.then(|| self.deadlines.lock().remaining_seconds(id, clock::now()))
    }

    /// Renews a lease on this member's clock; `None` if that does not count, or the renewal cannot be made good.
    pub(super) async fn renew_here(&self, id: i64) -> Option<i64> {
        if !self.await_lease_clock().await {
            return None;
        }
        let mut looked_again = false;
        loop {
            // A leader that was paused may have been replaced: what it promises then would not be kept.
            if !self.keeps_lease_clock() || self.leader() != self.options.identity.member_id {
                return None;
            }
            let changes = self.applied_changes();
            let renewal = self.deadlines.lock().renew(id, clock::now());
            match renewal {
                Renewal::Renewed(ttl) => {
                    self.options.metrics.lease.renewed.inc();
                    return Some(ttl);
                }
                Renewal::ClearFirst => {
                    let checkpoint = LeaseCheckpoint { id, remaining_ttl: 0 };
                    let request = LeaseCheckpointRequest { checkpoints: vec![checkpoint] };
                    self.propose(Kind::LeaseCheckpoint(request)).await.ok()?.ok()?;
                    self.deadlines.lock().cleared(id);
                }
                // Its revocation is on the way: wait for the log to say so.
                Renewal::Expired => changes.next().await.ok()?,
                Renewal::Unknown if looked_again => return Some(0),
                Renewal::Unknown => {
                    self.read_barrier().await.ok()?;
                    looked_again = true;
                }
            }
        }
    }
}
