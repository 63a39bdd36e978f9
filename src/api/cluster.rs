//! The Cluster service: who the members are, and changing them.
//!
//! A change is checked here against the health of the cluster as this member sees it, proposed, and judged again when it
//! is applied. That Raft's membership follows is `raft/membership`'s work; an answer waits for it.

use std::sync::Arc;
use std::time::Duration;

use tonic::{Request, Response, Status};

use super::Context;
use super::caller::Caller;
use super::error::Error;
use super::kv::unexpected;
use crate::apply::Reply;
use crate::clock;
use crate::cluster::id::MemberId;
use crate::config::Url;
use crate::proto::etcdserverpb as pb;
use crate::proto::server::cluster_server::Cluster;
use crate::proto::skegpb;
use crate::proto::skegpb::command::Kind;

/// Time for which a quorum must have answered before a member is added. etcd: `HealthInterval`.
const HEALTHY_FOR: Duration = Duration::from_secs(5);
/// Share of the leader's log that a learner must hold to be promoted. etcd: `readyPercentThreshold`.
const READY_SHARE: f64 = 0.9;
/// Longest wait for Raft's membership to follow a change; the change itself stands by then.
const SETTLE_MAX: Duration = Duration::from_secs(5);
/// Time between looks whether it has.
const SETTLE_LOOK: Duration = Duration::from_millis(10);

/// The Cluster service.
#[derive(Clone)]
pub(super) struct ClusterService(pub(super) Arc<Context>);

#[tonic::async_trait]
impl Cluster for ClusterService {
    async fn member_add(
        &self,
        request: Request<pb::MemberAddRequest>,
    ) -> Result<Response<pb::MemberAddResponse>, Status> {
        let caller = Caller::of(&request);
        let request = request.into_inner();
        if request.peer_urls.is_empty() || request.peer_urls.iter().any(|url| Url::parse(url).is_err()) {
            return Err(Error::MemberBadUrls.into());
        }
        let context = &self.0;
        if context.limits.strict_reconfig_check {
            context.check_addition(request.is_learner)?;
        }
        let mut peer_urls = request.peer_urls;
        peer_urls.sort();
        let seconds = i64::try_from(clock::unix_millis() / 1000).unwrap_or(i64::MAX);
        let id = MemberId::when_added(peer_urls.iter().map(String::as_str), seconds).get();
        let is_learner = request.is_learner;
        let max_learners = context.limits.max_learners;
        let added = skegpb::MemberAdd { id, peer_urls: peer_urls.clone(), is_learner, max_learners };
        let members = self.change(&caller, Kind::MemberAdd(added)).await?;
        let member = pb::Member { id, peer_urls, is_learner, ..pb::Member::default() };
        let header = Some(context.header_at(0));
        Ok(Response::new(pb::MemberAddResponse { header, member: Some(member), members }))
    }

    async fn member_remove(
        &self,
        request: Request<pb::MemberRemoveRequest>,
    ) -> Result<Response<pb::MemberRemoveResponse>, Status> {
        let caller = Caller::of(&request);
        let id = request.into_inner().id;
        if self.0.limits.strict_reconfig_check {
            self.0.check_removal(id)?;
        }
        let members = self.change(&caller, Kind::MemberRemove(skegpb::MemberRemove { id })).await?;
        Ok(Response::new(pb::MemberRemoveResponse { header: Some(self.0.header_at(0)), members }))
    }

    async fn member_update(
        &self,
        request: Request<pb::MemberUpdateRequest>,
    ) -> Result<Response<pb::MemberUpdateResponse>, Status> {
        let caller = Caller::of(&request);
        let pb::MemberUpdateRequest { id, peer_urls } = request.into_inner();
        let members =
            self.change(&caller, Kind::MemberUpdate(skegpb::MemberUpdate { id, peer_urls })).await?;
        Ok(Response::new(pb::MemberUpdateResponse { header: Some(self.0.header_at(0)), members }))
    }

    async fn member_promote(
        &self,
        request: Request<pb::MemberPromoteRequest>,
    ) -> Result<Response<pb::MemberPromoteResponse>, Status> {
        let caller = Caller::of(&request);
        let id = request.into_inner().id;
        let counters = &self.0.metrics.server;
        let promoted = match self.0.check_promotion(id).await {
            Ok(()) => self.change(&caller, Kind::MemberPromote(skegpb::MemberPromote { id })).await,
            Err(refusal) => Err(refusal.into()),
        };
        let members = promoted.inspect_err(|status| {
            counters.failed_promotions.with_label_values(&[status.message()]).inc();
        })?;
        counters.promotions.inc();
        Ok(Response::new(pb::MemberPromoteResponse { header: Some(self.0.header_at(0)), members }))
    }

    async fn member_list(
        &self,
        request: Request<pb::MemberListRequest>,
    ) -> Result<Response<pb::MemberListResponse>, Status> {
        if request.into_inner().linearizable {
            self.0.node.read_barrier().await.map_err(Error::from)?;
        }
        let members = self.0.members();
        Ok(Response::new(pb::MemberListResponse { header: Some(self.0.header_at(0)), members }))
    }
}

impl ClusterService {
    /// Proposes a change and waits until it is in force; gives all members.
    async fn change(&self, caller: &Caller, change: Kind) -> Result<Vec<pb::Member>, Status> {
        match self.0.apply_for(caller, change).await? {
            Reply::Members(members) => {
                self.await_settled().await;
                Ok(members.into_iter().map(member_to_client).collect())
            }
            other => Err(unexpected(&other)),
        }
    }

    async fn await_settled(&self) {
        let settling = async {
            while !self.0.node.is_membership_settled() {
                tokio::time::sleep(SETTLE_LOOK).await;
            }
        };
        let _ = tokio::time::timeout(SETTLE_MAX, settling).await;
    }
}

fn member_to_client(member: skegpb::Member) -> pb::Member {
    pb::Member {
        id: member.id,
        name: member.name,
        peer_urls: member.peer_urls,
        client_urls: member.client_urls,
        is_learner: member.is_learner,
    }
}

/// The least number of voters that decide.
fn quorum(voters: usize) -> usize {
    voters / 2 + 1
}

impl Context {
    /// All members, as clients see them, by id.
    pub fn members(&self) -> Vec<pb::Member> {
        self.state.cluster.read().members().cloned().map(member_to_client).collect()
    }

    /// How many members vote or are to vote, and how many of these have run.
    fn voters(&self) -> (usize, usize) {
        let cluster = self.state.cluster.read();
        let voters: Vec<_> = cluster.members().filter(|member| !member.is_learner).collect();
        let started = voters.iter().filter(|member| !member.name.is_empty()).count();
        (voters.len(), started)
    }

    /// etcd: `mayAddMember` in `server/etcdserver/server.go`.
    fn check_addition(&self, learner: bool) -> Result<(), Error> {
        let (voters, started) = self.voters();
        let founder_alone = voters == 1 && started == 1;
        if !learner && !founder_alone && started < quorum(voters + 1) {
            return Err(Error::MemberNotEnoughStarted);
        }
        if voters > 1 && self.node.answering_voters(HEALTHY_FOR) < quorum(voters + 1) {
            return Err(Error::Unhealthy);
        }
        Ok(())
    }

    /// etcd: `mayRemoveMember` in `server/etcdserver/server.go`.
    fn check_removal(&self, id: u64) -> Result<(), Error> {
        let removed = self.state.cluster.read().member(id).cloned();
        if removed.as_ref().is_some_and(|member| member.is_learner) {
            // That risks nothing.
            return Ok(());
        }
        let (voters, started) = self.voters();
        let leaves = usize::from(removed.is_some());
        let leaves_started = usize::from(removed.is_some_and(|member| !member.name.is_empty()));
        if started - leaves_started < quorum(voters - leaves) {
            return Err(Error::MemberNotEnoughStarted);
        }
        if !self.node.answers(id) {
            // It is no part of the quorum that answers; what there is not is refused when it is applied.
            return Ok(());
        }
        let active = self.node.answering_voters(HEALTHY_FOR);
        if active < 2 + (voters - 1) / 2 { Err(Error::Unhealthy) } else { Ok(()) }
    }

    async fn check_promotion(&self, id: u64) -> Result<(), Error> {
        let (matched, last) = self.node.progress(id).await?;
        {
            let cluster = self.state.cluster.read();
            let member = cluster.member(id).ok_or(Error::MemberNotFound)?;
            if !member.is_learner {
                return Err(Error::MemberNotLearner);
            }
        }
        #[expect(clippy::cast_precision_loss, reason = "a share of two indexes")]
        if (matched as f64) < last as f64 * READY_SHARE {
            return Err(Error::LearnerNotReady);
        }
        let (voters, started) = self.voters();
        if self.limits.strict_reconfig_check && started + 1 < quorum(voters + 1) {
            return Err(Error::MemberNotEnoughStarted);
        }
        Ok(())
    }
}
