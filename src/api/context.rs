//! What every service works on.

use std::sync::Arc;
use std::time::Duration;

use tonic::Status;

use super::error::Error;
use crate::apply::{Outcome, Reply, State, guard};
use crate::cluster::id::{ClusterId, MemberId};
use crate::proto::etcdserverpb::{AlarmRequest, AlarmType, alarm_request::AlarmAction};
use crate::proto::skegpb::command::Kind;
use crate::raft::Node;
use crate::watch::Hub;

/// The member's limits on requests.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Operations in a transaction.
    pub max_txn_ops: usize,
    /// Encoded size of a proposal, in bytes; also the aim for messages of a stream.
    pub max_request_bytes: usize,
    /// Database size from which writes are refused; `None` for no quota.
    pub quota_bytes: Option<u64>,
    /// Time between progress messages to idle watchers that want them.
    pub progress_interval: Duration,
    /// Smallest time to live of a lease, in seconds.
    pub min_lease_ttl: i64,
}

/// What every service works on; shared.
pub struct Context {
    /// This member.
    pub member_id: MemberId,
    /// Its cluster.
    pub cluster_id: ClusterId,
    /// Consensus.
    pub node: Node,
    /// The replicated state, to read.
    pub state: State,
    /// Watchers.
    pub hub: Arc<Hub>,
    /// Limits on requests.
    pub limits: Limits,
}

impl Context {
    /// Proposes a command and gives its reply.
    pub(super) async fn apply(&self, command: Kind) -> Result<Reply, Status> {
        let outcome: Outcome = self.node.propose(command).await.map_err(Error::from)?;
        Ok(outcome.map_err(Error::from)?)
    }

    /// Refuses what would grow the database past its quota, and raises the alarm.
    ///
    /// etcd: `server/etcdserver/api/v3rpc/quota.go`
    pub(super) async fn check_quota(&self, command: &Kind) -> Result<(), Status> {
        let Some(quota) = self.limits.quota_bytes else { return Ok(()) };
        let cost = guard::cost(command);
        if cost == 0 || self.state.store.size_estimate() + cost < quota {
            return Ok(());
        }
        let raise = AlarmRequest {
            action: AlarmAction::Activate as i32,
            member_id: self.member_id.get(),
            alarm: AlarmType::Nospace as i32,
        };
        if !self.state.cluster.read().is_raised(AlarmType::Nospace) {
            self.apply(Kind::Alarm(raise)).await?;
        }
        Err(Error::NoSpace.into())
    }
}
