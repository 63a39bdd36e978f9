//! Finding the first members through a discovery service: another cluster, in whose keys the members of a new one register.
//! etcd: `server/etcdserver/api/v3discovery`.
//!
//! ```text
//! /_etcd/registry/TOKEN/_config/size        how many members the cluster begins with; put there beforehand
//! /_etcd/registry/TOKEN/members/ID          name=URL,name=URL of a member; the first so many count
//! ```

use std::time::Duration;

use anyhow::{Context as _, bail};
use tracing::{info, warn};

use crate::cluster::id::MemberId;
use crate::config::Discovery;
use crate::proto::client::kv_client::KvClient;
use crate::proto::etcdserverpb::{PutRequest, RangeRequest, RangeResponse};
use crate::proto::mvccpb::KeyValue;
use crate::raft;

/// Pause before the service is asked again who has registered.
const ASK_AGAIN: Duration = Duration::from_millis(500);
/// First pause after a failed request; it doubles, up to [`RETRY_MAX`].
const RETRY_FIRST: Duration = Duration::from_secs(2);
/// Longest such pause.
const RETRY_MAX: Duration = Duration::from_secs(256);

/// Registers this member and waits until all have; gives the initial cluster as text.
///
/// `own` is this member as the initial cluster has it: `name=URL,name=URL`. Waits for as long as it takes.
///
/// # Errors
/// When the token is not known to the service, its size is no number, or the cluster is full.
pub(super) async fn discover(settings: &Discovery, id: MemberId, own: &str) -> anyhow::Result<String> {
    let registry = Registry { settings, prefix: format!("/_etcd/registry/{}", settings.token) };
    let key = format!("{}/members/{id}", registry.prefix);
    registry.check(&key).await?;
    registry.retried(async || registry.put(&key, own).await).await;
    info!(members = own, "registered with the discovery service");
    loop {
        let (size, members) = registry.check(&key).await?;
        if members.len() >= size {
            let first: Vec<String> = members
                .into_iter()
                .take(size)
                .map(|member| String::from_utf8_lossy(&member.value).trim().to_owned())
                .collect();
            info!(size, "found all members at the discovery service");
            return Ok(first.join(","));
        }
        info!(size, found = members.len(), "waiting for the other members to register");
        tokio::time::sleep(ASK_AGAIN).await;
    }
}

struct Registry<'s> {
    settings: &'s Discovery,
    prefix: String,
}

impl Registry<'_> {
    /// The size of the cluster and who has registered, first come first; fails if others have taken all places.
    async fn check(&self, own_key: &str) -> anyhow::Result<(usize, Vec<KeyValue>)> {
        let key = format!("{}/_config/size", self.prefix);
        let found = self.retried(async || self.range(&key, "").await).await;
        let Some(size) = found.kvs.first() else { bail!("discovery: size key not found") };
        let size = std::str::from_utf8(&size.value).ok().and_then(|text| text.parse().ok());
        let size: usize = size.filter(|size| *size > 0).context("discovery: size key is bad")?;
        let members = format!("{}/members", self.prefix);
        let end = format!("{}/membert", self.prefix);
        let found = self.retried(async || self.range(&members, &end).await).await;
        let mut members: Vec<KeyValue> =
            found.kvs.into_iter().filter(|kv| kv.value.contains(&b'=')).collect();
        members.sort_by_key(|kv| kv.create_revision);
        let others_first = members.iter().take(size).filter(|kv| kv.key != own_key).count();
        if others_first >= size {
            bail!("discovery: cluster is full");
        }
        Ok((size, members))
    }

    async fn range(&self, key: &str, end: &str) -> anyhow::Result<RangeResponse> {
        let request = RangeRequest {
            key: key.to_owned().into(),
            range_end: end.to_owned().into(),
            ..RangeRequest::default()
        };
        let mut client = self.client().await?;
        let asked = tokio::time::timeout(self.settings.request_timeout, client.range(request)).await;
        Ok(asked.context("no answer in time")??.into_inner())
    }

    async fn put(&self, key: &str, value: &str) -> anyhow::Result<()> {
        let request = PutRequest {
            key: key.to_owned().into(),
            value: value.to_owned().into(),
            ..PutRequest::default()
        };
        let mut client = self.client().await?;
        let asked = tokio::time::timeout(self.settings.request_timeout, client.put(request)).await;
        asked.context("no answer in time")??;
        Ok(())
    }

    /// A client of the first endpoint that can be connected to.
    async fn client(&self) -> anyhow::Result<KvClient<raft::Opened>> {
        let mut failure = anyhow::anyhow!("no endpoint is given");
        for endpoint in &self.settings.endpoints {
            let url = if endpoint.contains("://") { endpoint.clone() } else { format!("http://{endpoint}") };
            match raft::dial(&url, self.settings.dial_timeout).await {
                Ok((opened, origin)) => return Ok(KvClient::with_origin(opened, origin)),
                Err(error) => failure = anyhow::Error::from(error).context(url),
            }
        }
        Err(failure)
    }

    /// Asks until there is an answer.
    async fn retried<T>(&self, ask: impl AsyncFn() -> anyhow::Result<T>) -> T {
        let mut pause = RETRY_FIRST;
        loop {
            match ask().await {
                Ok(answer) => return answer,
                Err(error) => {
                    warn!(error = format!("{error:#}"), ?pause, "the discovery service does not answer")
                }
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(RETRY_MAX);
        }
    }
}
