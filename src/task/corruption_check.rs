//! Looking for members that hold something else than the others: the leader compares hashes of the history now and then, and
//! raises the CORRUPT alarm for whoever differs. etcd: `server/etcdserver/corrupt.go`

use std::time::Duration;

use tracing::{error, info, warn};

use crate::apply::{self, State};
use crate::cluster::id::MemberId;
use crate::proto::etcdserverpb::{AlarmType, alarm_request::AlarmAction};
use crate::raft::Node;

/// Compares the history at its current revision, every so often, while this member leads.
pub async fn watch_history(node: Node, state: State, every: Duration) {
    let mut ticks = tokio::time::interval(every);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    ticks.tick().await;
    loop {
        ticks.tick().await;
        if node.is_leader() && node.read_barrier().await.is_ok() {
            check(&node, &state, 0).await;
        }
    }
}

/// Compares the hashes of compactions, which are there already, every so often, while this member leads.
pub async fn watch_compactions(node: Node, state: State, every: Duration) {
    let mut ticks = tokio::time::interval(every);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    ticks.tick().await;
    let mut checked = 0;
    loop {
        ticks.tick().await;
        if !node.is_leader() {
            continue;
        }
        for revision in state.store().hashed_compactions() {
            if revision <= checked {
                break;
            }
            if check(&node, &state, revision).await {
                info!(revision, "compaction hash check passed by all members");
                checked = revision;
                break;
            }
        }
    }
}

/// Compares the members at a revision, 0 for the current one, and raises the alarm for those that differ; true if all
/// members answered and agree.
async fn check(node: &Node, state: &State, revision: i64) -> bool {
    let here = node.identity().member_id;
    let comparison = node.compare_history(revision).await;
    let differing = comparison.differing(here);
    for member in &differing {
        error!(member = %MemberId::new(*member), revision, "found a member whose data differs");
        raise(node, state, *member).await;
    }
    let members = state.cluster.read().members().count();
    differing.is_empty() && comparison.answers() == members
}

/// Raises the alarm of a member whose data is not what it should be, unless it is raised.
pub(super) async fn raise(node: &Node, state: &State, member_id: u64) {
    if state.cluster.read().has_raised(member_id, AlarmType::Corrupt) {
        return;
    }
    let command = apply::alarm(AlarmAction::Activate, member_id, AlarmType::Corrupt);
    if let Err(error) = node.propose(command).await {
        warn!(%error, "alarm of a corrupt member not raised");
    }
}

/// True if this member holds what the others hold, as far as they answer; before it serves.
pub async fn agrees(node: &Node) -> bool {
    let comparison = node.compare_history(0).await;
    let here = node.identity().member_id;
    // Nobody is trusted: only a majority can say that this member is the one that is wrong.
    !comparison.differing(0).contains(&here)
}
