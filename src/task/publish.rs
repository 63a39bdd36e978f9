//! What a member tells its cluster when it has joined: its name and client URLs, and the cluster version.

use std::time::Duration;

use tracing::{info, warn};

use crate::apply::State;
use crate::proto::skegpb::command::Kind;
use crate::proto::skegpb::{ClusterVersionSet, MemberAttributes};
use crate::raft::{Node, ProposeError, ReadError};

/// The cluster version that this build brings: etcd's, without the patch.
pub const CLUSTER_VERSION: &str = "3.7.0";

/// Time between words about catching up.
const SAY_EVERY: Duration = Duration::from_secs(1);
/// Pause before a cluster that has no leader is asked again.
const ASK_AGAIN: Duration = Duration::from_millis(100);

/// Waits until this member is level with its cluster, then publishes attributes, if they are not what the cluster already knows, and
/// the version, if there is none. Waits for as long as it takes: a cluster begins when enough of its members are there.
///
/// # Errors
/// When consensus has stopped.
pub async fn join(node: &Node, state: &State, attributes: MemberAttributes) -> Result<(), ProposeError> {
    loop {
        match level(node).await {
            Ok(()) => match publish(node, state, attributes.clone()).await {
                Err(ProposeError::Stopped) => return Err(ProposeError::Stopped),
                Err(error) => warn!(%error, "not published yet"),
                Ok(()) => return Ok(()),
            },
            Err(ReadError::Stopped) => return Err(ProposeError::Stopped),
            Err(error) => warn!(%error, "waiting for a leader"),
        }
        tokio::time::sleep(ASK_AGAIN).await;
    }
}

/// Waits until this member is level with its cluster, and says how far it has come.
async fn level(node: &Node) -> Result<(), ReadError> {
    let mut ticks = tokio::time::interval(SAY_EVERY);
    ticks.tick().await;
    let mut barrier = std::pin::pin!(node.read_barrier());
    loop {
        tokio::select! {
            level = &mut barrier => {
                if level.is_ok() {
                    info!(percent = 100, applied = node.status().applied, "caught up with the cluster");
                }
                return level;
            }
            _ = ticks.tick() => {
                if let Ok((matched, last)) = node.progress(node.identity().member_id).await
                    && last > 0
                {
                    let percent = u128::from(node.status().applied.min(last)) * 100 / u128::from(last);
                    info!(percent, matched, last, "catching up with the cluster");
                }
            }
        }
    }
}

/// Publishes attributes, if they are not what the cluster already knows, and the version, if there is none.
///
/// # Errors
/// The proposal's.
async fn publish(node: &Node, state: &State, attributes: MemberAttributes) -> Result<(), ProposeError> {
    let (known, version) = {
        let cluster = state.cluster.read();
        let known = cluster.members().any(|member| {
            member.id == attributes.member_id
                && member.name == attributes.name
                && member.client_urls == attributes.client_urls
        });
        (known, cluster.version().map(str::to_owned))
    };
    if !known {
        let name = attributes.name.clone();
        let _ = node.propose(Kind::MemberAttributes(attributes)).await?;
        info!(name, "published local member to cluster through raft");
    }
    if version.is_none() {
        let set = ClusterVersionSet { version: CLUSTER_VERSION.to_owned() };
        let _ = node.propose(Kind::ClusterVersionSet(set)).await?;
        info!(cluster_version = CLUSTER_VERSION, "set cluster version");
    }
    Ok(())
}
