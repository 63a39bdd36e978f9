//! The Lease service. Grants and revocations go through the log; renewals move only the leader's clock.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use futures::StreamExt;
use futures::stream::{self, BoxStream};
use tonic::{Request, Response, Status, Streaming};

use super::Context;
use super::caller::Caller;
use super::error::Error;
use super::grpc_go::unreadable;
use super::kv::{on_thread, unexpected};
use crate::apply::Reply;
use crate::auth::{Access, Demand, Identity, Right};
use crate::clock;
use crate::lease::attached_keys;
use crate::proto::etcdserverpb as pb;
use crate::proto::server::lease_server::Lease;
use crate::proto::skegpb::command::Kind;
use crate::storage::mvcc::KeyRange;

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
        let caller = Caller::of(&request);
        let mut request = request.into_inner();
        self.context.check_quota(&Kind::LeaseGrant(request)).await?;
        request.ttl = request.ttl.max(self.context.limits.min_lease_ttl);
        if request.id == 0 {
            request.id = self.ids.next();
        }
        match self.context.apply_for(&caller, Kind::LeaseGrant(request)).await? {
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
        let caller = Caller::of(&request);
        match self.context.apply_for(&caller, Kind::LeaseRevoke(request.into_inner())).await? {
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
        let caller = Caller::of(&request);
        let state = (Arc::clone(&self.context), caller, request.into_inner());
        let answers = stream::try_unfold(state, |(context, caller, mut requests)| async move {
            match requests.message().await.map_err(unreadable)? {
                None => Ok(None),
                Some(request) => {
                    let header = Some(context.header());
                    context.judge_attached(&caller, vec![request.id], Right::Write).await?;
                    let ttl = context.node.renew_lease(request.id).await.map_err(Error::from)?;
                    let response = pb::LeaseKeepAliveResponse { header, id: request.id, ttl };
                    Ok(Some((response, (context, caller, requests))))
                }
            }
        });
        Ok(Response::new(answers.boxed()))
    }

    async fn lease_time_to_live(
        &self,
        request: Request<pb::LeaseTimeToLiveRequest>,
    ) -> Result<Response<pb::LeaseTimeToLiveResponse>, Status> {
        let caller = Caller::of(&request);
        let request = request.into_inner();
        let context = &self.context;
        let who = if request.keys {
            context.judge_attached(&caller, vec![request.id], Right::Read).await?
        } else {
            None
        };
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
        context.check_unchanged(who.as_ref())?;
        response.header = Some(context.header());
        Ok(Response::new(response))
    }

    async fn lease_leases(
        &self,
        request: Request<pb::LeaseLeasesRequest>,
    ) -> Result<Response<pb::LeaseLeasesResponse>, Status> {
        let ids: Vec<i64> = self.context.node.deadlines().lock().ids_by_expiry().collect();
        self.context.judge_attached(&Caller::of(&request), ids.clone(), Right::Read).await?;
        let leases = ids.into_iter().map(|id| pb::LeaseStatus { id }).collect();
        Ok(Response::new(pb::LeaseLeasesResponse { header: Some(self.context.header()), leases }))
    }
}

impl Context {
    /// Decides whether a caller may do something with all keys attached to leases. A lease that does not exist has none.
    pub(super) async fn judge_attached(
        &self,
        caller: &Caller,
        ids: Vec<i64>,
        right: Right,
    ) -> Result<Option<Identity>, Error> {
        let who = self.identify(caller).await?;
        let mut accesses = Vec::new();
        if self.state.auth.read().asks_for_attached_keys(who.as_ref()) {
            let store = self.state.store();
            let read = move || -> Result<Vec<Access>, Error> {
                let mut accesses = Vec::new();
                for id in ids {
                    let keys = attached_keys(store.engine(), id)?;
                    accesses
                        .extend(keys.into_iter().map(|key| Access { right, range: KeyRange::single(key) }));
                }
                Ok(accesses)
            };
            accesses = on_thread(read).await?;
        }
        self.state.auth.read().authorise(who.as_ref(), &Demand::AttachedKeys(accesses))?;
        Ok(who)
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
