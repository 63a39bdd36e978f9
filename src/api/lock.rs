//! The Lock service. etcd: `server/etcdserver/api/v3lock/lock.go`

use bytes::Bytes;
use tonic::{Request, Response, Status};

use super::caller::Caller;
use super::recipe::{Recipe, from_client, one};
use crate::proto::etcdserverpb::DeleteRangeRequest;
use crate::proto::server::lock_server::Lock;
use crate::proto::v3lockpb as pb;

/// What a caller gets whose key went away while it waited.
const SESSION_EXPIRED: &str = "mutex: session is expired";

/// The Lock service.
#[derive(Clone)]
pub(super) struct LockService(pub(super) Recipe);

impl LockService {
    /// Waits for the lock; a caller that goes away meanwhile leaves the queue.
    async fn acquire(&self, request: pb::LockRequest) -> Result<pb::LockResponse, Status> {
        let recipe = &self.0;
        let lease = recipe.lease(request.lease).await?;
        let joined = recipe.with_lease(lease, recipe.join(&request.name, lease, Bytes::new())).await?;
        let place = joined.place;
        if joined.is_first {
            return Ok(pb::LockResponse { header: joined.header, key: place.key });
        }
        let leaving = recipe.leave_when_dropped(&place);
        recipe.wait_for_turn(&place).await?;
        // The lease may have ended while others held the lock.
        let (header, keys) = recipe.get(one(&place.key)).await?;
        leaving.disarm();
        if keys.is_empty() {
            return Err(Status::unknown(SESSION_EXPIRED));
        }
        Ok(pb::LockResponse { header: Some(header), key: place.key })
    }
}

#[tonic::async_trait]
impl Lock for LockService {
    async fn lock(&self, request: Request<pb::LockRequest>) -> Result<Response<pb::LockResponse>, Status> {
        let service = LockService(self.0.for_caller(&request));
        service.acquire(request.into_inner()).await.map(Response::new).map_err(from_client)
    }

    async fn unlock(
        &self,
        request: Request<pb::UnlockRequest>,
    ) -> Result<Response<pb::UnlockResponse>, Status> {
        let caller = Caller::of(&request);
        let delete = DeleteRangeRequest { key: request.into_inner().key, ..Default::default() };
        let deleted = self.0.kv.delete_range(delete, &caller).await.map_err(from_client)?;
        Ok(Response::new(pb::UnlockResponse { header: deleted.header }))
    }
}
