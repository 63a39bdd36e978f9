//! The Election service. etcd: `server/etcdserver/api/v3election/election.go`

use bytes::Bytes;
use futures::stream::BoxStream;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status};

use super::recipe::{Recipe, created_at, from_client, is_delete, op, prefix, prefix_end};
use crate::proto::etcdserverpb as etcd;
use crate::proto::etcdserverpb::request_op::Request as Op;
use crate::proto::mvccpb::KeyValue;
use crate::proto::server::election_server::Election;
use crate::proto::v3electionpb as pb;
use crate::storage::mvcc::KeyRange;

const NOT_LEADER: &str = "election: not leader";
const NO_LEADER: &str = "election: no leader";
const NO_LEADER_FIELD: &str = "\"leader\" field must be provided";

/// The Election service.
#[derive(Clone)]
pub(super) struct ElectionService(pub(super) Recipe);

impl ElectionService {
    fn for_caller<T>(&self, request: &Request<T>) -> ElectionService {
        ElectionService(self.0.for_caller(request))
    }

    /// Waits until the caller leads; one that goes away meanwhile leaves the queue.
    async fn win(&self, request: pb::CampaignRequest) -> Result<pb::CampaignResponse, Status> {
        let recipe = &self.0;
        let lease = recipe.lease(request.lease).await?;
        let join = recipe.join(&request.name, lease, request.value.clone());
        let joined = recipe.with_lease(lease, join).await?;
        let place = joined.place;
        let leaving = recipe.leave_when_dropped(&place);
        if joined.existing.is_some_and(|existing| existing.value != request.value) {
            // One that cannot show its value leaves, as on any way out before its turn.
            self.show(&place.key, place.created, lease, request.value).await?;
        }
        let turn = recipe.wait_for_turn(&place).await;
        leaving.disarm();
        turn?;
        let leader = pb::LeaderKey { name: request.name, key: place.key, rev: place.created, lease };
        Ok(pb::CampaignResponse { header: joined.header, leader: Some(leader) })
    }

    /// Changes the value at a key that is still the one created at a revision.
    async fn show(
        &self,
        key: &Bytes,
        created: i64,
        lease: i64,
        value: Bytes,
    ) -> Result<Option<etcd::ResponseHeader>, Status> {
        let put = etcd::PutRequest { key: key.clone(), value, lease, ..Default::default() };
        let txn = etcd::TxnRequest {
            compare: vec![created_at(key, created)],
            success: vec![op(Op::RequestPut(put))],
            failure: Vec::new(),
        };
        let response = self.0.kv.txn(txn, &self.0.caller).await?;
        if response.succeeded { Ok(response.header) } else { Err(Status::unknown(NOT_LEADER)) }
    }

    /// Tells of every leader and its values; ends when nobody listens, or nothing can be told any more.
    async fn tell(&self, name: &[u8], listener: &mpsc::Sender<Told>) -> Result<(), Status> {
        loop {
            let (header, kv) = match self.0.first(name).await? {
                (header, Some(kv)) => (header, kv),
                (header, None) => self.next_put(name, header.revision).await?,
            };
            let (key, from) = (kv.key.clone(), header.revision + 1);
            send(listener, header, kv).await?;
            let mut watch = self.0.watch(KeyRange::single(key), from).await?;
            'leads: loop {
                let (header, events) = watch.next().await?;
                for event in events {
                    if is_delete(&event) {
                        break 'leads;
                    }
                    send(listener, header, event.kv.unwrap_or_default()).await?;
                }
            }
        }
    }

    /// The first key that is put under a name from a revision on.
    async fn next_put(&self, name: &[u8], from: i64) -> Result<(etcd::ResponseHeader, KeyValue), Status> {
        let prefix = prefix(name);
        let mut watch = self.0.watch(KeyRange::from_request(&prefix, &prefix_end(&prefix)), from).await?;
        loop {
            let (mut header, events) = watch.next().await?;
            if let Some(kv) = events.into_iter().find(|event| !is_delete(event)).and_then(|event| event.kv) {
                header.revision = kv.mod_revision;
                return Ok((header, kv));
            }
        }
    }
}

type Told = Result<pb::LeaderResponse, Status>;

async fn send(
    listener: &mpsc::Sender<Told>,
    header: etcd::ResponseHeader,
    kv: KeyValue,
) -> Result<(), Status> {
    let response = pb::LeaderResponse { header: Some(header), kv: Some(kv) };
    listener.send(Ok(response)).await.map_err(|_| Status::cancelled("nobody listens"))
}

#[tonic::async_trait]
impl Election for ElectionService {
    type ObserveStream = BoxStream<'static, Told>;

    async fn campaign(
        &self,
        request: Request<pb::CampaignRequest>,
    ) -> Result<Response<pb::CampaignResponse>, Status> {
        let service = self.for_caller(&request);
        service.win(request.into_inner()).await.map(Response::new).map_err(from_client)
    }

    async fn proclaim(
        &self,
        request: Request<pb::ProclaimRequest>,
    ) -> Result<Response<pb::ProclaimResponse>, Status> {
        let service = self.for_caller(&request);
        let pb::ProclaimRequest { leader, value } = request.into_inner();
        let leader = leader.ok_or_else(|| Status::unknown(NO_LEADER_FIELD))?;
        let lease = service.0.lease(leader.lease).await.map_err(from_client)?;
        let show = service.show(&leader.key, leader.rev, lease, value);
        let header = service.0.with_lease(lease, show).await.map_err(from_client)?;
        Ok(Response::new(pb::ProclaimResponse { header }))
    }

    async fn leader(
        &self,
        request: Request<pb::LeaderRequest>,
    ) -> Result<Response<pb::LeaderResponse>, Status> {
        let service = self.for_caller(&request);
        let (header, kv) = service.0.first(&request.into_inner().name).await.map_err(from_client)?;
        let kv = kv.ok_or_else(|| Status::unknown(NO_LEADER))?;
        Ok(Response::new(pb::LeaderResponse { header: Some(header), kv: Some(kv) }))
    }

    async fn observe(
        &self,
        request: Request<pb::LeaderRequest>,
    ) -> Result<Response<Self::ObserveStream>, Status> {
        let (listener, told) = mpsc::channel(1);
        let (service, name) = (self.for_caller(&request), request.into_inner().name);
        tokio::spawn(async move {
            tokio::select! {
                () = listener.closed() => {}
                // etcd's stream ends without an error, whatever ended it.
                _ = service.tell(&name, &listener) => {}
            }
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(told))))
    }

    async fn resign(
        &self,
        request: Request<pb::ResignRequest>,
    ) -> Result<Response<pb::ResignResponse>, Status> {
        let service = self.for_caller(&request);
        let leader = request.into_inner().leader.ok_or_else(|| Status::unknown(NO_LEADER_FIELD))?;
        let lease = service.0.lease(leader.lease).await.map_err(from_client)?;
        let leave = service.0.leave(&leader.key, leader.rev);
        let left = service.0.with_lease(lease, leave).await.map_err(from_client)?;
        Ok(Response::new(pb::ResignResponse { header: left.header }))
    }
}
