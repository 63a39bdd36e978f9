//! The Lease service. Grants and revocations go through the log; renewals move only the leader's clock.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use futures::StreamExt;
use futures::stream::{self, BoxStream};
use tonic::{Request, Response, Status, Streaming};

use super::Context;
use super::error::Error;
use super::grpc_go::unreadable;
use super::kv::{on_thread, unexpected};
use crate::apply::Reply;
use crate::clock;
use crate::lease::attached_keys;
use crate::proto::etcdserverpb as pb;
use crate::proto::server::lease_server::Lease;
use crate::proto::skegpb::command::Kind;

/// Time to live in answers about a lease that does not exist.
const NO_SUCH_LEASE_TTL: i64 = -1;

/// The Lease service.
#[derive(Clone)]
pub(super) struct LeaseService {
    context: Arc<Context>,
    ids: Arc<LeaseIds>,
}

impl LeaseService {
    pub(super) fn new(context: Arc<Context>) -> LeaseService {
        let ids = Arc::new(LeaseIds::new(context.member_id.get()));
        LeaseService { context, ids }
    }
}

#[tonic::async_trait]
impl Lease for LeaseService {
    type LeaseKeepAliveStream = BoxStream<'static, Result<pb::LeaseKeepAliveResponse, Status>>;

    async fn lease_grant(
        &self,
        request: Request<pb::LeaseGrantRequest>,
    ) -> Result<Response<pb::LeaseGrantResponse>, Status> {
        let mut request = request.into_inner();
        self.context.check_quota(&Kind::LeaseGrant(request)).await?;
        request.ttl = request.ttl.max(self.context.limits.min_lease_ttl);
        if request.id == 0 {
            request.id = self.ids.next();
        }
        match self.context.apply(Kind::LeaseGrant(request)).await? {
            Reply::LeaseGrant(mut response) => {
                self.context.stamp(&mut response.header);
                Ok(Response::new(response))
            }
            other => Err(unexpected(&other)),
        }
    }

    async fn lease_revoke(
        &self,
        request: Request<pb::LeaseRevokeRequest>,
    ) -> Result<Response<pb::LeaseRevokeResponse>, Status> {
        match self.context.apply(Kind::LeaseRevoke(request.into_inner())).await? {
            Reply::LeaseRevoke(mut response) => {
                self.context.stamp(&mut response.header);
                Ok(Response::new(response))
            }
            other => Err(unexpected(&other)),
        }
    }

    async fn lease_keep_alive(
        &self,
        request: Request<Streaming<pb::LeaseKeepAliveRequest>>,
    ) -> Result<Response<Self::LeaseKeepAliveStream>, Status> {
        let state = (Arc::clone(&self.context), request.into_inner());
        let answers = stream::try_unfold(state, |(context, mut requests)| async move {
            match requests.message().await.map_err(unreadable)? {
                None => Ok(None),
                Some(request) => {
                    let header = Some(context.header());
                    let ttl = context.node.renew_lease(request.id).await.map_err(Error::from)?;
                    let response = pb::LeaseKeepAliveResponse { header, id: request.id, ttl };
                    Ok(Some((response, (context, requests))))
                }
            }
        });
        Ok(Response::new(answers.boxed()))
    }

    async fn lease_time_to_live(
        &self,
        request: Request<pb::LeaseTimeToLiveRequest>,
    ) -> Result<Response<pb::LeaseTimeToLiveResponse>, Status> {
        let request = request.into_inner();
        let context = &self.context;
        let remaining = context.node.lease_remaining(request.id).await.map_err(Error::from)?;
        if remaining.is_some() && !context.state.leases.read().contains(request.id) {
            context.node.read_barrier().await.map_err(Error::from)?;
        }
        let record = context.state.leases.read().get(request.id);
        let mut response =
            pb::LeaseTimeToLiveResponse { id: request.id, ttl: NO_SUCH_LEASE_TTL, ..Default::default() };
        if let (Some(record), Some(remaining)) = (record, remaining) {
            response.ttl = remaining;
            response.granted_ttl = record.ttl_seconds;
            if request.keys {
                let store = context.state.store();
                response.keys = on_thread(move || Ok(attached_keys(store.engine(), request.id)?)).await?;
            }
        }
        response.header = Some(context.header());
        Ok(Response::new(response))
    }

    async fn lease_leases(
        &self,
        _: Request<pb::LeaseLeasesRequest>,
    ) -> Result<Response<pb::LeaseLeasesResponse>, Status> {
        let ids: Vec<i64> = self.context.node.deadlines().lock().ids_by_expiry().collect();
        let leases = ids.into_iter().map(|id| pb::LeaseStatus { id }).collect();
        Ok(Response::new(pb::LeaseLeasesResponse { header: Some(self.context.header()), leases }))
    }
}

/// Makes lease ids that no other member makes: member, time, counter. etcd: `pkg/idutil`.
struct LeaseIds {
    next: AtomicU64,
    member: u64,
}

impl LeaseIds {
    fn new(member_id: u64) -> LeaseIds {
        const TIME_MASK: u64 = (1 << 40) - 1;
        let start = (clock::unix_millis() & TIME_MASK) << 8;
        LeaseIds { next: AtomicU64::new(start), member: (member_id & 0xFFFF) << 48 }
    }

    fn next(&self) -> i64 {
        const SUFFIX_MASK: u64 = (1 << 48) - 1;
        let id = self.member | ((self.next.fetch_add(1, Ordering::Relaxed) + 1) & SUFFIX_MASK);
        let id = (id & i64::MAX.cast_unsigned()).cast_signed();
        if id == 0 { 1 } else { id }
    }
}
