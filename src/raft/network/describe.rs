//! Asking a running member who its cluster is, before this one belongs to it.

use std::sync::Arc;
use std::time::Duration;

use super::channel::{Channel, Timeouts};
use super::links::Link;
use crate::proto::skegpb::{DescribeRequest, DescribeResponse};
use crate::storage::data_dir::Identity;

/// Asks the member at `peer_urls`; `None` if it does not answer in time.
pub async fn describe(peer_urls: Vec<String>, within: Duration) -> Option<DescribeResponse> {
    let timeouts = Timeouts { connect: within, ping_every: within, ping_answer: within };
    let nobody = Identity { member_id: 0, cluster_id: 0 };
    let link = Link::new(nobody, 0, timeouts, peer_urls, Arc::default());
    let asking = async {
        let mut client = Channel::default().open(&link).await.ok()?;
        client.describe(DescribeRequest {}).await.ok()
    };
    Some(tokio::time::timeout(within, asking).await.ok()??.into_inner())
}
