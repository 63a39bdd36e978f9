//! Raising the cluster's level when all members can read more; see [`crate::cluster::level`].

use std::time::Duration;

use tracing::{info, warn};

use crate::apply::State;
use crate::cluster::level::LEVEL;
use crate::proto::skegpb::command::Kind;
use crate::raft::Node;

/// Time between looks: what needs the level waits for it.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// Raises the level when this member leads, until it is at the highest that this build knows.
pub async fn run(node: Node, state: State) {
    let mut ticks = tokio::time::interval(LOOK_EVERY);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    while state.cluster.read().level() < LEVEL {
        ticks.tick().await;
        // Only a leader that has applied everything of earlier terms knows who the members are.
        if !node.keeps_lease_clock() {
            continue;
        }
        let next = state.cluster.read().next_level(|member_id| node.level_of(member_id));
        let Some(set) = next else { continue };
        let level = set.level;
        match node.propose(Kind::ClusterLevelSet(set)).await {
            Ok(_) if state.cluster.read().level() >= level => info!(level, "cluster level raised"),
            Ok(_) => info!(level, "cluster level not raised: a member was added"),
            Err(error) => warn!(%error, level, "cluster level not raised"),
        }
    }
}
