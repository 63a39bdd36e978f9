//! Acting on members whose rolling hashes differ (`raft/trails` compares them).
//!
//! A member that a majority agrees against no longer serves keys (`task/mend` has the rest) and raises the CORRUPT alarm for
//! itself, and the leader raises it for those that differ: whichever can. Without a majority it is the leader that is believed, as in etcd's checks: the alarm then says that somebody
//! has to look.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use tracing::{error, info, warn};

use super::corruption_check::raise;
use crate::apply::State;
use crate::clock;
use crate::cluster::id::MemberId;
use crate::proto::skegpb::ClusterVersionSet;
use crate::proto::skegpb::command::Kind;
use crate::raft::Node;
use crate::storage::snapshot::Damage;

/// Pause between two attempts to have all trails begin at one entry.
const BEGIN_AGAIN: Duration = Duration::from_secs(10);

/// Acts on each comparison for as long as the member runs.
pub async fn run(node: Node, state: State) {
    let mut comparisons = node.trail_comparisons();
    let here = node.identity().member_id;
    let mut said = BTreeSet::new();
    let mut begun: Option<Instant> = None;
    while comparisons.changed().await.is_ok() {
        let found = comparisons.borrow_and_update().clone();
        let mut differing = BTreeSet::new();
        if !found.against_here.is_empty() {
            differing.insert(here);
            node.distrust(Damage::Differs);
        }
        if node.is_leader() {
            differing.extend(&found.others);
        }
        for member in &differing {
            if said.insert(*member) {
                error!(member = %MemberId::new(*member), "found a member that has applied something else");
            }
            raise(&node, &state, *member).await;
        }
        said.retain(|member| differing.contains(member));
        let is_due = begun.is_none_or(|at| clock::now().duration_since(at) >= BEGIN_AGAIN);
        if found.begin_apart && differing.is_empty() && node.is_leader() && is_due {
            begun = Some(clock::now());
            begin_together(&node, &state).await;
        }
    }
}

/// Has the trails of all members begin at one entry, by setting the cluster version that is set.
async fn begin_together(node: &Node, state: &State) {
    let version = state.cluster.read().version().map(str::to_owned);
    let Some(version) = version else { return };
    match node.propose(Kind::ClusterVersionSet(ClusterVersionSet { version })).await {
        Ok(_) => info!("members are compared from here on"),
        Err(error) => warn!(%error, "members are not compared yet"),
    }
}
