//! What a member tells its cluster when it has joined: its name and client URLs, and the cluster version.

use tracing::info;

use crate::apply::State;
use crate::proto::skegpb::command::Kind;
use crate::proto::skegpb::{ClusterVersionSet, MemberAttributes};
use crate::raft::{Node, ProposeError};

/// The cluster version that this build brings: etcd's, without the patch.
pub const CLUSTER_VERSION: &str = "3.7.0";

/// Publishes attributes and version, if they are not what the cluster already knows.
///
/// # Errors
/// The proposal's.
pub async fn publish(node: &Node, state: &State, attributes: MemberAttributes) -> Result<(), ProposeError> {
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
    if version.as_deref() != Some(CLUSTER_VERSION) {
        let set = ClusterVersionSet { version: CLUSTER_VERSION.to_owned() };
        let _ = node.propose(Kind::ClusterVersionSet(set)).await?;
        info!(cluster_version = CLUSTER_VERSION, "set cluster version");
    }
    Ok(())
}
