//! Asking a running member who its cluster is, and to be let in, before this one belongs to it.

use std::sync::Arc;
use std::sync::atomic::AtomicU32;
use std::time::Duration;

use super::channel::{Channel, Timeouts};
use super::links::{Link, Near, Verdict};
use crate::proto::skegpb::{DescribeRequest, DescribeResponse, InviteRequest};
use crate::storage::data_dir::Identity;

/// Asks the member at `peer_urls`; `None` if it does not answer in time.
pub async fn describe(peer_urls: Vec<String>, within: Duration) -> Option<DescribeResponse> {
    let link = Link::new(nobody(0, within), 0, peer_urls, None);
    let asking = async {
        let mut client = Channel::default().open(&link).await.ok()?;
        client.describe(DescribeRequest::default()).await.ok()
    };
    Some(tokio::time::timeout(within, asking).await.ok()??.into_inner())
}

/// Asks a described member to make the one at `peer_urls` a member, in the place of `replaces` if that is not 0; gives its id.
///
/// # Errors
/// The refusal, or why there was no answer.
pub async fn ask_to_join(
    described: &DescribeResponse,
    at: Vec<String>,
    peer_urls: Vec<String>,
    replaces: u64,
    within: Duration,
) -> Result<u64, String> {
    let near = nobody(described.cluster_id, within);
    let link = Link::new(near, described.member_id, at, None);
    let asked =
        link.ask(InviteRequest { peer_urls, replaces }, async |client, request| client.invite(request).await);
    let answered = tokio::time::timeout(within, asked).await.map_err(|_| "no answer in time".to_owned())?;
    let response = answered.map_err(|status| status.message().to_owned())?;
    if response.refusal.is_empty() { Ok(response.member_id) } else { Err(response.refusal) }
}

/// One that asks and is no member.
fn nobody(cluster_id: u64, within: Duration) -> Arc<Near> {
    let timeouts = Timeouts { connect: within, ping_every: within, ping_answer: within };
    let identity = Identity { member_id: 0, cluster_id };
    Arc::new(Near { identity, timeouts, kin: None, level: AtomicU32::new(0), verdict: Verdict::default() })
}
