//! What every service works on.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::watch;
use tonic::Status;

use super::Passwords;
use super::caller::Caller;
use super::error::Error;
use crate::apply::{self, Outcome, Reply, State, guard};
use crate::auth::Identity;
use crate::auth::token::Tokens;
use crate::clock;
use crate::cluster::id::{ClusterId, MemberId};
use crate::proto::etcdserverpb::{AlarmType, alarm_request::AlarmAction};
use crate::proto::skegpb::command::Kind;
use crate::raft::Node;
use crate::storage::Space;
use crate::storage::mvcc::{KeyRange, RangeEnd};
use crate::telemetry::metrics::Metrics;
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
    /// Time of a unary call above which a warning is logged.
    pub slow_request: Duration,
    /// Time of a local read above which a warning is logged.
    pub slow_read: Duration,
    /// Time that a request may take.
    pub request_timeout: Duration,
    /// Time between progress messages to idle watchers that want them.
    pub progress_interval: Duration,
    /// Smallest time to live of a lease, in seconds.
    pub min_lease_ttl: i64,
    /// Refuse changes of the members that put the quorum at risk.
    pub strict_reconfig_check: bool,
    /// Learners that there may be; 0 for any number.
    pub max_learners: u32,
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
    /// Counters to add to.
    pub metrics: Arc<Metrics>,
    /// Who is known by what.
    pub tokens: Arc<Tokens>,
    /// Hashes passwords.
    pub passwords: Passwords,
    /// Room on the disk.
    pub space: Arc<Space>,
    /// The latest compaction whose second half is done, told by its task.
    pub finished_compaction: watch::Receiver<i64>,
}

impl Context {
    /// Proposes a command of the member's own and gives its reply.
    pub(super) async fn apply(&self, command: Kind) -> Result<Reply, Status> {
        self.apply_as(None, command).await
    }

    /// Proposes a client's command and gives its reply.
    pub(super) async fn apply_for(&self, caller: &Caller, command: Kind) -> Result<Reply, Status> {
        let who = self.identify_for(caller, &command).await?;
        self.apply_as(who, command).await
    }

    async fn apply_as(&self, who: Option<Identity>, command: Kind) -> Result<Reply, Status> {
        let started = clock::now();
        let operation = apply::operation(&command);
        let proposed = self.node.propose_for(command, who).await;
        let took = clock::now().duration_since(started);
        let success = matches!(proposed, Ok(Ok(_)));
        self.metrics.server.request_duration.observe(operation, success, took);
        let outcome: Outcome = proposed.map_err(Error::from)?;
        Ok(outcome.map_err(Error::from)?)
    }

    /// Checks that keys can be read: from local state alone, or as everything acknowledged has it.
    ///
    /// # Errors
    /// What a client's range would get.
    pub async fn check_readable(&self, serializable: bool) -> Result<(), Error> {
        if !serializable {
            let barrier = tokio::time::timeout(self.limits.request_timeout, self.node.read_barrier());
            barrier.await.map_err(|_| Error::TimedOut)??;
        }
        let everything = KeyRange { start: Bytes::new(), end: RangeEnd::Unbounded };
        let store = self.state.store();
        store.scan(&everything, store.revision()).next()?;
        Ok(())
    }

    /// Refuses what would grow the database past its quota or the room on the disk, and raises the alarm.
    ///
    /// etcd: `server/etcdserver/api/v3rpc/quota.go`
    pub(super) async fn check_quota(&self, command: &Kind) -> Result<(), Status> {
        let cost = guard::cost(command);
        if cost == 0 {
            return Ok(());
        }
        if !self.space.has_room(cost) && self.space.look().is_ok() && !self.space.has_room(cost) {
            // Its task raises the alarm, for all members.
            return Err(Error::NoSpace.into());
        }
        let Some(quota) = self.limits.quota_bytes else { return Ok(()) };
        let store = self.state.store();
        if store.size_estimate() + cost < quota {
            return Ok(());
        }
        // An alarm stays until someone clears it, so it is raised by a size just read.
        if store.sizes().total_bytes + cost < quota {
            return Ok(());
        }
        if !self.state.cluster.read().is_raised(AlarmType::Nospace) {
            let raise = apply::alarm(AlarmAction::Activate, self.member_id.get(), AlarmType::Nospace);
            self.apply(raise).await?;
        }
        Err(Error::NoSpace.into())
    }
}
