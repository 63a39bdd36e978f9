//! Revoking leases that have run out. Only the leader's clock decides, and what it decides carries its term.

use std::sync::Arc;
use std::time::Duration;

use futures::{StreamExt, stream};
use tracing::{info, warn};

use crate::apply::Refusal;
use crate::clock;
use crate::proto::skegpb::LeaseExpire;
use crate::proto::skegpb::command::Kind;
use crate::raft::Node;
use crate::telemetry::metrics::Metrics;

/// Time between looks. etcd: `server/lease/lessor.go`.
const LOOK_EVERY: Duration = Duration::from_millis(500);
/// Leases revoked per look.
const REVOKED_PER_LOOK: usize = 500;
/// Revocations under way at once.
const REVOKING_MAX: usize = 16;

/// Revokes expired leases for as long as the member runs.
pub async fn run(node: Node, metrics: Arc<Metrics>) {
    let mut ticks = tokio::time::interval(LOOK_EVERY);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        if !node.keeps_lease_clock() {
            continue;
        }
        let expired = node.deadlines().lock().expired(clock::now(), REVOKED_PER_LOOK);
        if expired.is_empty() {
            continue;
        }
        let term = node.term();
        info!(leases = expired.len(), "revoking expired leases");
        let revocations =
            expired.into_iter().map(|id| node.propose(Kind::LeaseExpire(LeaseExpire { id, term })));
        let mut results = stream::iter(revocations).buffer_unordered(REVOKING_MAX);
        while let Some(result) = results.next().await {
            match result {
                Ok(Ok(_)) => metrics.server.lease_expired.inc(),
                Ok(Err(Refusal::LeaseNotFound)) => {}
                Ok(Err(refusal)) => warn!(%refusal, "expired lease not revoked, trying again"),
                Err(error) => warn!(%error, "expired lease not revoked, trying again"),
            }
        }
    }
}
