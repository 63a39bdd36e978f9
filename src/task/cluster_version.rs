//! Keeping the cluster version at what it is to be: that of this build, or the one that a downgrade goes to.

use std::time::Duration;

use tracing::{info, warn};

use super::publish::CLUSTER_VERSION;
use crate::apply::State;
use crate::cluster::Cluster;
use crate::proto::skegpb::ClusterVersionSet;
use crate::proto::skegpb::command::Kind;
use crate::raft::Node;

/// Time between looks.
const LOOK_EVERY: Duration = Duration::from_millis(250);

/// Changes the version for as long as the member runs, when it leads.
pub async fn run(node: Node, state: State) {
    let mut ticks = tokio::time::interval(LOOK_EVERY);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        // Only a leader that has applied everything of earlier terms knows what was asked for.
        if !node.keeps_lease_clock() {
            continue;
        }
        let next = next(&state.cluster.read());
        let Some(version) = next else { continue };
        match node.propose(Kind::ClusterVersionSet(ClusterVersionSet { version: version.clone() })).await {
            Ok(_) => info!(cluster_version = version, "updated cluster version"),
            Err(error) => warn!(%error, cluster_version = version, "cluster version not updated"),
        }
    }
}

/// The version to change to, if it is another. The first one is set by whoever joins first.
fn next(cluster: &Cluster) -> Option<String> {
    let wanted = cluster.downgrade_target().unwrap_or(CLUSTER_VERSION);
    cluster.version().filter(|version| *version != wanted).map(|_| wanted.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_version_follows_a_downgrade_down_and_back() {
        let mut cluster = Cluster::default();
        assert_eq!(next(&cluster), None, "not decided yet");
        cluster.set_version(CLUSTER_VERSION);
        assert_eq!(next(&cluster), None);
        cluster.set_downgrade("3.6.0");
        assert_eq!(next(&cluster).as_deref(), Some("3.6.0"));
        cluster.set_version("3.6.0");
        assert_eq!(next(&cluster), None);
        cluster.set_downgrade("");
        assert_eq!(next(&cluster).as_deref(), Some(CLUSTER_VERSION));
    }
}
