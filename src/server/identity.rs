//! Who this member is, and how it begins: what its directory says, or for a new one what the settings and the running
//! members say.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use futures::future::join_all;
use tracing::{info, warn};

use super::discovery::discover;
use super::srv;
use crate::cluster::id::{ClusterId, MemberId};
use crate::cluster::level;
use crate::config::{Config, FirstMembership, InitialClusterState, InitialMember, Join, Url};
use crate::proto::etcdserverpb::Member;
use crate::proto::skegpb::DescribeResponse;
use crate::raft::{self, Beginning};
use crate::storage::data_dir::{DataDir, Identity};

/// Time for the running members to say who they are.
const DESCRIBE_WITHIN: Duration = Duration::from_secs(5);
/// The same when there need not be any.
const DESCRIBE_AT_FOUNDING: Duration = Duration::from_millis(500);

/// Finds out who the member in `data_dir` is; a new one claims the directory.
///
/// # Errors
/// When the settings contradict each other or what the running members say.
pub(super) async fn identify(config: &Config, data_dir: &DataDir) -> anyhow::Result<(Identity, Beginning)> {
    if let Some(identity) = data_dir.identity()? {
        return Ok((identity, Beginning::Restarting));
    }
    if let Some(join) = &config.cluster.join {
        let (identity, beginning) = let_in(config, join).await?;
        data_dir.claim(identity)?;
        return Ok((identity, beginning));
    }
    let discovered = discovered(config).await?;
    let config = discovered.as_ref().unwrap_or(config);
    let first = config.bootstrap()?;
    let (identity, beginning) = match config.cluster.initial_cluster_state {
        InitialClusterState::New => found(config, &first).await?,
        InitialClusterState::Existing => join(&first).await?,
    };
    data_dir.claim(identity)?;
    Ok((identity, beginning))
}

/// How a member begins whose directory is claimed and holds nothing else: its first start was cut off.
///
/// If the settings do not say, it waits for the leader of its cluster.
pub(super) async fn begin_again(config: &Config, identity: Identity) -> Beginning {
    match as_at_first(config, identity).await {
        Ok(beginning) => {
            info!("the first start was cut off: it is made again");
            beginning
        }
        Err(error) => {
            warn!(%error, "the first start was cut off, and cannot be made again: waiting for the cluster's leader");
            Beginning::Restarting
        }
    }
}

async fn as_at_first(config: &Config, identity: Identity) -> anyhow::Result<Beginning> {
    if let Some(join) = &config.cluster.join {
        return rejoin(raft::describe(texts(&join.members), DESCRIBE_WITHIN).await, identity);
    }
    let discovered = discovered(config).await?;
    let config = discovered.as_ref().unwrap_or(config);
    let first = config.bootstrap()?;
    match config.cluster.initial_cluster_state {
        InitialClusterState::New => {
            let (by_settings, beginning) = found(config, &first).await?;
            anyhow::ensure!(by_settings == identity, "the settings are those of another member");
            Ok(beginning)
        }
        InitialClusterState::Existing => rejoin(describe(others(&first), DESCRIBE_WITHIN).await, identity),
    }
}

/// Goes to the members that one of its cluster names.
fn rejoin(
    described: impl IntoIterator<Item = DescribeResponse>,
    identity: Identity,
) -> anyhow::Result<Beginning> {
    let knows = |running: &DescribeResponse| {
        running.cluster_id == identity.cluster_id
            && running.members.iter().any(|member| member.id == identity.member_id)
    };
    let Some(running) = described.into_iter().find(knows) else {
        anyhow::bail!("no member of its cluster answers");
    };
    Ok(Beginning::Joining(running.members.into_iter().map(|member| (member.id, member.peer_urls)).collect()))
}

/// The settings with the first members filled in by DNS or the discovery service, if there is one.
async fn discovered(config: &Config) -> anyhow::Result<Option<Config>> {
    if let Some(settings) = &config.cluster.srv {
        let advertised = &config.member.initial_advertise_peer_urls;
        let found = srv::look_up(settings, &config.member.name, advertised).await?;
        let mut filled = config.clone();
        filled.cluster.initial_cluster = found.initial_cluster;
        // What is advertised leads to the same places: the members have to agree on the texts.
        filled.member.initial_advertise_peer_urls = found.own_urls;
        return Ok(Some(filled));
    }
    let Some(discovery) = &config.cluster.discovery else { return Ok(None) };
    let mut urls = texts(&config.member.initial_advertise_peer_urls);
    urls.sort();
    let id = MemberId::at_bootstrap(urls.iter().map(String::as_str), &discovery.token);
    let own: Vec<String> = urls.iter().map(|url| format!("{}={url}", config.member.name)).collect();
    let mut filled = config.clone();
    filled.cluster.initial_cluster = discover(discovery, id, &own.join(",")).await?;
    filled.cluster.initial_cluster_token.clone_from(&discovery.token);
    Ok(Some(filled))
}

/// Urls as text.
fn texts(urls: &[Url]) -> Vec<String> {
    urls.iter().map(|url| url.as_str().to_owned()).collect()
}

fn others(first: &FirstMembership) -> impl Iterator<Item = &InitialMember> {
    first.members.iter().filter(|member| member.name != first.local.name)
}

/// Begins a cluster, as each of its first members does. etcd: `bootstrapNewClusterNoWAL` in `server/etcdserver/bootstrap.go`.
async fn found(config: &Config, first: &FirstMembership) -> anyhow::Result<(Identity, Beginning)> {
    let token = &config.cluster.initial_cluster_token;
    let id = |member: &InitialMember| {
        MemberId::at_bootstrap(texts(&member.peer_urls).iter().map(String::as_str), token)
    };
    let here = id(&first.local);
    let members: BTreeMap<u64, (String, Vec<String>)> = first
        .members
        .iter()
        .map(|member| (id(member).get(), (member.name.clone(), texts(&member.peer_urls))))
        .collect();
    if members.len() < first.members.len() {
        anyhow::bail!("two members of --initial-cluster have the same id: their peer URLs are the same");
    }
    let cluster_id = ClusterId::at_bootstrap(members.keys().map(|id| MemberId::new(*id)));
    for described in describe(others(first), DESCRIBE_AT_FOUNDING).await {
        let known = described.members.iter().find(|member| member.id == here.get());
        if described.cluster_id == cluster_id.get()
            && known.is_some_and(|member| !member.client_urls.is_empty())
        {
            anyhow::bail!("member {here} has already been bootstrapped");
        }
    }
    let identity = Identity { member_id: here.get(), cluster_id: cluster_id.get() };
    Ok((identity, Beginning::Founding(members)))
}

/// Joins a running cluster. etcd: `bootstrapExistingClusterNoWAL` and `ValidateClusterAndAssignIDs`.
///
/// One that answers may not know yet that this member was added: another that does will do.
async fn join(first: &FirstMembership) -> anyhow::Result<(Identity, Beginning)> {
    let mut described = describe(others(first), DESCRIBE_WITHIN).await;
    described.sort_by_key(|described| described.leader == 0);
    let mut wrong = None;
    for running in described {
        level::check(running.cluster_level)?;
        match join_as_described(first, running) {
            Ok(joined) => return Ok(joined),
            Err(error) => wrong = wrong.or(Some(error)),
        }
    }
    Err(wrong.unwrap_or_else(|| {
        anyhow::anyhow!(
            "cannot fetch cluster info from peer urls: could not retrieve cluster information from the given URLs"
        )
    }))
}

/// Joins a cluster as one of its members describes it.
fn join_as_described(
    first: &FirstMembership,
    running: DescribeResponse,
) -> anyhow::Result<(Identity, Beginning)> {
    if running.members.len() != first.members.len() {
        anyhow::bail!(
            "error validating peerURLs: member count is unequal: the cluster has {} members, --initial-cluster {}",
            running.members.len(),
            first.members.len()
        );
    }
    let mut here = None;
    for member in &running.members {
        let urls: BTreeSet<&str> = member.peer_urls.iter().map(String::as_str).collect();
        let named = first
            .members
            .iter()
            .find(|named| named.peer_urls.iter().map(Url::as_str).collect::<BTreeSet<_>>() == urls);
        let Some(named) = named else {
            let id = MemberId::new(member.id);
            anyhow::bail!(
                "error validating peerURLs: unmatched member while checking PeerURLs: no member of --initial-cluster \
                 has the URLs {:?} of member {id}",
                member.peer_urls
            );
        };
        if named.name == first.local.name {
            here = Some(member.id);
        }
    }
    let Some(member_id) = here else {
        anyhow::bail!(
            "the cluster has no member with the peer URLs of --name {:?}: add it first",
            first.local.name
        );
    };
    info!(member_id = %MemberId::new(member_id), "joining a running cluster");
    let members =
        running.members.into_iter().map(|member| (member.id, member.peer_urls)).collect::<BTreeMap<_, _>>();
    Ok((Identity { member_id, cluster_id: running.cluster_id }, Beginning::Joining(members)))
}

/// Has this member added to a running cluster, in the place of another if the settings name one.
async fn let_in(config: &Config, join: &Join) -> anyhow::Result<(Identity, Beginning)> {
    let at = texts(&join.members);
    let Some(running) = raft::describe(at.clone(), DESCRIBE_WITHIN).await else {
        anyhow::bail!("--skeg-join: no member answers at {}", at.join(","));
    };
    level::check(running.cluster_level)?;
    let replaces = match join.replaces.as_str() {
        "" => 0,
        named => {
            let is_meant = |member: &&Member| member.name == named || format!("{:x}", member.id) == named;
            match running.members.iter().find(is_meant) {
                Some(member) => member.id,
                None => anyhow::bail!("--skeg-replace: the cluster has no member {named:?}"),
            }
        }
    };
    let own = texts(&config.member.initial_advertise_peer_urls);
    let member_id = raft::ask_to_join(&running, at.clone(), own, replaces, DESCRIBE_WITHIN)
        .await
        .map_err(|refusal| anyhow::anyhow!("--skeg-join: {refusal}"))?;
    info!(member_id = %MemberId::new(member_id), "added to a running cluster");
    let members = running.members.into_iter().map(|member| (member.id, member.peer_urls)).collect();
    Ok((Identity { member_id, cluster_id: running.cluster_id }, Beginning::Joining(members)))
}

/// What those members that answer say of their cluster.
async fn describe<'m>(
    members: impl Iterator<Item = &'m InitialMember>,
    within: Duration,
) -> Vec<DescribeResponse> {
    let asked = members.map(|member| raft::describe(texts(&member.peer_urls), within));
    join_all(asked).await.into_iter().flatten().collect()
}
