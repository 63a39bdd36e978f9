//! The Cluster service: who the members are. Changing them comes with clusters of more than one.

use std::sync::Arc;

use tonic::{Request, Response, Status};

use super::error::Error;
use super::{Context, later};
use crate::proto::etcdserverpb as pb;
use crate::proto::server::cluster_server::Cluster;

/// The Cluster service.
#[derive(Clone)]
pub(super) struct ClusterService(pub(super) Arc<Context>);

#[tonic::async_trait]
impl Cluster for ClusterService {
    async fn member_add(
        &self,
        _: Request<pb::MemberAddRequest>,
    ) -> Result<Response<pb::MemberAddResponse>, Status> {
        Err(later::not_yet("etcdserverpb.Cluster/MemberAdd"))
    }

    async fn member_remove(
        &self,
        _: Request<pb::MemberRemoveRequest>,
    ) -> Result<Response<pb::MemberRemoveResponse>, Status> {
        Err(later::not_yet("etcdserverpb.Cluster/MemberRemove"))
    }

    async fn member_update(
        &self,
        _: Request<pb::MemberUpdateRequest>,
    ) -> Result<Response<pb::MemberUpdateResponse>, Status> {
        Err(later::not_yet("etcdserverpb.Cluster/MemberUpdate"))
    }

    async fn member_promote(
        &self,
        _: Request<pb::MemberPromoteRequest>,
    ) -> Result<Response<pb::MemberPromoteResponse>, Status> {
        Err(later::not_yet("etcdserverpb.Cluster/MemberPromote"))
    }

    async fn member_list(
        &self,
        request: Request<pb::MemberListRequest>,
    ) -> Result<Response<pb::MemberListResponse>, Status> {
        if request.into_inner().linearizable {
            self.0.node.read_barrier().await.map_err(Error::from)?;
        }
        let members = self
            .0
            .state
            .cluster
            .read()
            .members()
            .map(|member| pb::Member {
                id: member.id,
                name: member.name.clone(),
                peer_urls: member.peer_urls.clone(),
                client_urls: member.client_urls.clone(),
                is_learner: member.is_learner,
            })
            .collect();
        Ok(Response::new(pb::MemberListResponse { header: Some(self.0.header_at(0)), members }))
    }
}
