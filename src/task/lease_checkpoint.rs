//! Recording what is left of leases, so that a restart does not start them anew; see `lease/deadlines`.

use std::time::Duration;

use tracing::warn;

use crate::clock;
use crate::proto::etcdserverpb::{LeaseCheckpoint, LeaseCheckpointRequest};
use crate::proto::skegpb::command::Kind;
use crate::raft::Node;

/// Time between looks.
const LOOK_EVERY: Duration = Duration::from_millis(500);
/// Leases in one entry.
const BATCH_MAX: usize = 1000;

/// Records remainders for as long as the member runs.
pub async fn run(node: Node) {
    let mut ticks = tokio::time::interval(LOOK_EVERY);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        if node.keeps_lease_clock() {
            record(&node, false).await;
        }
    }
}

/// Records every remainder that is shorter than its record; before a stop.
pub async fn record_all(node: &Node) {
    if node.keeps_lease_clock() {
        record(node, true).await;
    }
}

async fn record(node: &Node, all: bool) {
    loop {
        let due = node.deadlines().lock().take_checkpoints(clock::now(), BATCH_MAX, all);
        if due.is_empty() {
            return;
        }
        let more = due.len() == BATCH_MAX;
        let checkpoints =
            due.into_iter().map(|(id, remaining_ttl)| LeaseCheckpoint { id, remaining_ttl }).collect();
        let request = LeaseCheckpointRequest { checkpoints };
        if let Err(error) = node.propose(Kind::LeaseCheckpoint(request)).await {
            warn!(%error, "remaining lease times not recorded");
            return;
        }
        if !more {
            return;
        }
    }
}
