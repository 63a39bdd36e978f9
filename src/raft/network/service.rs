//! What a member answers to its peers.
//!
//! Every call is checked before its messages are read: the cluster, the receiver and the protocol must be this member's,
//! and the sender must not have been removed, and know the cluster's level. A refusal says what is wrong, for the sender's log.

use std::collections::VecDeque;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use futures::stream::{BoxStream, FuturesUnordered};
use futures::{Stream, StreamExt};
use openraft::async_runtime::WatchReceiver;
use parking_lot::Mutex;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio_stream::wrappers::ReceiverStream;
use tonic::metadata::MetadataMap;
use tonic::{Request, Response, Status, Streaming};
use tracing::warn;

use super::channel::{CLUSTER, FROM, LIFE, MESSAGE_BYTES_MAX, PROTOCOL, PROTOCOL_VERSION, TO, is_refusal};
use super::snapshot::{self, Receiving};
use super::wire;
use crate::clock;
use crate::cluster::id::{ClusterId, MemberId};
use crate::cluster::level::LEVEL;
use crate::proto::etcdserverpb;
use crate::proto::server::peer_server::{Peer, PeerServer};
use crate::proto::skegpb as pb;
use crate::raft::Node;
use crate::raft::codec::log_id_from_proto;
use crate::storage::lives::Lives;
use crate::storage::mvcc::hash::RevisionHash;
use crate::storage::schema::Trail;

/// Bytes of entries that one stream may have under way between the socket and the log.
const APPEND_BYTES_MAX: usize = 8 << 20;
/// Bytes that a message counts for besides its entries.
const MESSAGE_OVERHEAD_BYTES: usize = 256;
/// Proposals of one peer under way.
const PROPOSALS_MAX: usize = 16_384;
/// Results in one message.
const RESULTS_MAX: usize = 1024;

/// The Peer service.
#[derive(Clone)]
pub(super) struct PeerService {
    node: Node,
    members: Arc<dyn Fn() -> Membership + Send + Sync>,
    receiving: Arc<Receiving>,
}

/// What peers are told of the cluster.
pub struct Membership {
    /// The members, as clients are told.
    pub members: Vec<etcdserverpb::Member>,
    /// The cluster version, empty until decided.
    pub version: String,
}

impl PeerService {
    /// Makes the service.
    pub(super) fn server(
        node: Node,
        members: impl Fn() -> Membership + Send + Sync + 'static,
    ) -> PeerServer<PeerService> {
        PeerServer::new(PeerService { node, members: Arc::new(members), receiving: Arc::default() })
            .max_decoding_message_size(MESSAGE_BYTES_MAX)
            .max_encoding_message_size(MESSAGE_BYTES_MAX)
    }

    /// Checks who calls whom; gives the sender.
    async fn check(&self, metadata: &MetadataMap) -> Result<u64, Status> {
        let field = |name: &'static str| {
            let value = metadata.get(name).and_then(|value| value.to_str().ok());
            value.ok_or_else(|| format!("{name} is missing"))
        };
        let id = |name: &'static str| {
            u64::from_str_radix(field(name)?, 16).map_err(|_| format!("{name} is no id"))
        };
        let identity = self.node.identity();
        let named = || {
            let protocol = field(PROTOCOL)?;
            if protocol != PROTOCOL_VERSION {
                return Err(format!("peer protocol {protocol} is not spoken here, only {PROTOCOL_VERSION}"));
            }
            Ok((id(CLUSTER)?, id(FROM)?, id(TO)?))
        };
        let (cluster, from, to) = named().map_err(|wrong| {
            let refusal = format!("not a peer: {wrong}");
            if self.node.note_refused(&refusal) {
                warn!(refusal, "refused a peer");
            }
            Status::permission_denied(refusal)
        })?;
        let link = self.node.links.get(from);
        let refusal = if cluster != identity.cluster_id {
            format!("cluster ID mismatch: here it is {}", ClusterId::new(identity.cluster_id))
        } else if to != identity.member_id {
            format!("the member here is {}", MemberId::new(identity.member_id))
        } else if self.node.is_removed(from) {
            super::REMOVED.to_owned()
        } else if link.as_ref().is_some_and(|link| link.has_forgotten()) {
            super::FORGOT.to_owned()
        } else {
            // One of an earlier version does not say.
            let admitted = match (&link, id(LIFE)) {
                (Some(link), Ok(life)) => link.admit(life).await,
                _ => Ok(()),
            };
            let known = |()| link.as_ref().map_or(Ok(()), |link| link.check_level());
            match admitted.and_then(known) {
                Ok(()) => return Ok(from),
                Err(refused) if is_refusal(&refused) => refused.message().to_owned(),
                Err(unclear) => return Err(unclear),
            }
        };
        let (sender, cluster) = (MemberId::new(from), ClusterId::new(cluster));
        if self.node.note_refused(&format!("{sender}: {refusal}")) {
            warn!(%sender, %cluster, refusal, "refused a peer");
        }
        Err(Status::failed_precondition(refusal))
    }
}

/// What a peer that does not follow the protocol gets.
fn malformed(error: io::Error) -> Status {
    Status::invalid_argument(error.to_string())
}

#[tonic::async_trait]
impl Peer for PeerService {
    type AppendStream = BoxStream<'static, Result<pb::AppendResponse, Status>>;
    type ProposeStream = Proposals;
    type InstallSnapshotStream = ReceiverStream<Result<pb::SnapshotResponse, Status>>;

    async fn append(
        &self,
        request: Request<Streaming<pb::AppendRequest>>,
    ) -> Result<Response<Self::AppendStream>, Status> {
        let from = self.node.links.get(self.check(request.metadata()).await?);
        let counters = from.and_then(|link| link.counters().cloned());
        let budget = Arc::new(Semaphore::new(APPEND_BYTES_MAX));
        let held: Arc<Mutex<VecDeque<OwnedSemaphorePermit>>> = Arc::default();
        let holding = Arc::clone(&held);
        let node = self.node.clone();
        let requests = request.into_inner().map(move |message| {
            let read = message.map_err(io::Error::other).and_then(|message| {
                let bytes: usize = message.entries.iter().map(entry_bytes).sum();
                let request = wire::append_from_proto(message);
                Ok((request.inspect_err(|error| warn!(%error, "a peer's entries are malformed"))?, bytes))
            });
            if let (Err(_), Some(counters)) = (&read, &counters) {
                counters.received_failures.inc();
            }
            read.ok()
        });
        let requests = requests
            .take_while(|request| std::future::ready(request.is_some()))
            .filter_map(std::future::ready);
        let requests = requests.then(move |(request, bytes)| {
            let (budget, held) = (Arc::clone(&budget), Arc::clone(&holding));
            let bytes = (bytes + MESSAGE_OVERHEAD_BYTES).min(APPEND_BYTES_MAX);
            async move {
                let permits = u32::try_from(bytes).unwrap_or(u32::MAX);
                if let Ok(permit) = budget.acquire_many_owned(permits).await {
                    held.lock().push_back(permit);
                }
                request
            }
        });
        let vote_seen = node.clone();
        let requests = requests.inspect(move |request| {
            vote_seen.heard_from(&request.vote);
            if let Some(committed) = &request.leader_commit {
                vote_seen.links.heard_committed(committed.index());
            }
        });
        let answers = node.raft().stream_append(requests).map(move |answer| {
            drop(held.lock().pop_front());
            match answer {
                Ok(result) => Ok(wire::appended_to_proto(result)),
                Err(fatal) => Err(Status::unavailable(fatal.to_string())),
            }
        });
        Ok(Response::new(answers.boxed()))
    }

    async fn ask_vote(
        &self,
        request: Request<pb::VoteRequest>,
    ) -> Result<Response<pb::VoteResponse>, Status> {
        self.check(request.metadata()).await?;
        let request = request.into_inner();
        let pre_vote = request.pre_vote;
        let asked = wire::vote_request_from_proto(request).map_err(malformed)?;
        let raft = self.node.raft();
        // What is committed and neither has can be on few members only, some of which may have forgotten that they have it.
        let links = &self.node.links;
        let candidate = asked.last_log_id.as_ref().map_or(0, |last| last.index());
        let here = raft.metrics().borrow_watched().last_log_index.unwrap_or(0);
        if links.lacks_committed(candidate) && links.lacks_committed(here) {
            return Err(Status::aborted("the candidate lacks what is committed"));
        }
        let answer = if pre_vote { raft.pre_vote(asked).await } else { raft.vote(asked).await };
        let answer = answer.map_err(|error| Status::unavailable(error.to_string()))?;
        Ok(Response::new(wire::vote_response_to_proto(&answer)))
    }

    async fn transfer_leader(
        &self,
        request: Request<pb::TransferLeaderRequest>,
    ) -> Result<Response<pb::TransferLeaderResponse>, Status> {
        self.check(request.metadata()).await?;
        if self.node.withholds() {
            let refusal = "the member does not serve keys".to_owned();
            return Ok(Response::new(pb::TransferLeaderResponse { refusal }));
        }
        let asked = wire::transfer_from_proto(request.into_inner()).map_err(malformed)?;
        let answer = self.node.raft().handle_transfer_leader(asked).await;
        let answer = answer.map_err(|error| Status::unavailable(error.to_string()))?;
        let refusal = answer.err().map(|error| error.to_string()).unwrap_or_default();
        Ok(Response::new(pb::TransferLeaderResponse { refusal }))
    }

    async fn install_snapshot(
        &self,
        request: Request<Streaming<pb::SnapshotChunk>>,
    ) -> Result<Response<Self::InstallSnapshotStream>, Status> {
        let peers = &self.node.links.metrics().peers;
        let from = self.check(request.metadata()).await.inspect_err(|_| peers.refused_snapshot())?;
        let (answers, outgoing) = mpsc::channel(2);
        let (node, receiving) = (self.node.clone(), Arc::clone(&self.receiving));
        tokio::spawn(snapshot::receive(node, receiving, from, request.into_inner(), answers));
        Ok(Response::new(ReceiverStream::new(outgoing)))
    }

    async fn send_files(
        &self,
        request: Request<pb::SendFilesRequest>,
    ) -> Result<Response<pb::SendFilesResponse>, Status> {
        let to = self.check(request.metadata()).await?;
        let from = request.into_inner().from.map(log_id_from_proto);
        let sent = snapshot::send_asked_for(&self.node, to, from).await;
        let refusal = sent.err().map(|error| error.to_string()).unwrap_or_default();
        Ok(Response::new(pb::SendFilesResponse { refusal }))
    }

    async fn propose(
        &self,
        request: Request<Streaming<pb::ProposeRequest>>,
    ) -> Result<Response<Self::ProposeStream>, Status> {
        self.check(request.metadata()).await?;
        Ok(Response::new(Proposals {
            node: self.node.clone(),
            nonce: u64::from_le_bytes(clock::random()),
            greeted: false,
            requests: Some(request.into_inner()),
            under_way: FuturesUnordered::new(),
        }))
    }

    async fn read_index(
        &self,
        request: Request<pb::ReadIndexRequest>,
    ) -> Result<Response<pb::ReadIndexResponse>, Status> {
        self.check(request.metadata()).await?;
        let index = self.node.leader_read_index().await;
        Ok(Response::new(pb::ReadIndexResponse { index }))
    }

    async fn renew_lease(
        &self,
        request: Request<pb::RenewLeaseRequest>,
    ) -> Result<Response<pb::RenewLeaseResponse>, Status> {
        self.check(request.metadata()).await?;
        let renewed = self.node.renew_here(request.into_inner().id).await;
        Ok(Response::new(match renewed {
            Some(ttl) => pb::RenewLeaseResponse { leads: true, ttl },
            None => pb::RenewLeaseResponse { leads: false, ttl: 0 },
        }))
    }

    async fn lease_time(
        &self,
        request: Request<pb::LeaseTimeRequest>,
    ) -> Result<Response<pb::LeaseTimeResponse>, Status> {
        self.check(request.metadata()).await?;
        let found = self.node.lease_time_here(request.into_inner().id);
        Ok(Response::new(match found {
            Some(remaining) => pb::LeaseTimeResponse {
                leads: true,
                exists: remaining.is_some(),
                remaining: remaining.unwrap_or(0),
            },
            None => pb::LeaseTimeResponse::default(),
        }))
    }

    async fn member_progress(
        &self,
        request: Request<pb::MemberProgressRequest>,
    ) -> Result<Response<pb::MemberProgressResponse>, Status> {
        self.check(request.metadata()).await?;
        let progress = self.node.progress_here(request.into_inner().member_id);
        Ok(Response::new(match progress {
            Some((matched, last)) => pb::MemberProgressResponse { leads: true, matched, last },
            None => pb::MemberProgressResponse::default(),
        }))
    }

    async fn hash_history(
        &self,
        request: Request<pb::HashHistoryRequest>,
    ) -> Result<Response<pb::HashHistoryResponse>, Status> {
        self.check(request.metadata()).await?;
        let found = self.node.hash_here(request.into_inner().revision).await;
        let hash = found.map(|RevisionHash { hash, compact_revision, revision }| pb::HistoryHash {
            hash,
            compact_revision,
            revision,
        });
        Ok(Response::new(pb::HashHistoryResponse { hash }))
    }

    async fn invite(
        &self,
        request: Request<pb::InviteRequest>,
    ) -> Result<Response<pb::InviteResponse>, Status> {
        self.check(request.metadata()).await?;
        let pb::InviteRequest { peer_urls, replaces } = request.into_inner();
        let response = match self.node.invite(peer_urls, replaces).await {
            Ok(member_id) => pb::InviteResponse { member_id, refusal: String::new() },
            Err(refusal) => pb::InviteResponse { member_id: 0, refusal },
        };
        Ok(Response::new(response))
    }

    async fn describe(
        &self,
        request: Request<pb::DescribeRequest>,
    ) -> Result<Response<pb::DescribeResponse>, Status> {
        // One that is to join does not know the cluster yet.
        let mut trail = None;
        if request.metadata().contains_key(CLUSTER) {
            self.check(request.metadata()).await?;
            if let Some(next) = request.get_ref().trail_before {
                trail = self.node.trail_before(next);
            }
        }
        let trail =
            trail.map(|Trail { origin, next, hash }| pb::Trail { recipe: Trail::RECIPE, origin, next, hash });
        let identity = self.node.identity();
        let Membership { members, version } = (self.members)();
        let lives = self.node.links.kin().map(|kin| &kin.own);
        Ok(Response::new(pb::DescribeResponse {
            cluster_id: identity.cluster_id,
            member_id: identity.member_id,
            members,
            cluster_version: version,
            leader: self.node.status().leader,
            trail,
            starts: lives.map_or(0, Lives::starts),
            lives: lives.map(|lives| lives.ids().to_vec()).unwrap_or_default(),
            level: LEVEL,
            cluster_level: self.node.state.cluster.read().level(),
        }))
    }
}

fn entry_bytes(entry: &pb::LogEntry) -> usize {
    match &entry.payload {
        Some(pb::log_entry::Payload::Command(command)) => command.len() + MESSAGE_OVERHEAD_BYTES,
        _ => MESSAGE_OVERHEAD_BYTES,
    }
}

type UnderWay = Pin<Box<dyn Future<Output = pb::ProposedResult> + Send>>;

/// A peer's proposals under way: takes commands in and gives results out, within one task.
pub(super) struct Proposals {
    node: Node,
    /// What each message must name: only who reads this stream knows it.
    nonce: u64,
    /// The peer was told it.
    greeted: bool,
    /// `None` once the peer has closed its side.
    requests: Option<Streaming<pb::ProposeRequest>>,
    under_way: FuturesUnordered<UnderWay>,
}

impl Proposals {
    fn take_in(&mut self, message: pb::ProposeRequest) {
        for pb::ProposedCommand { id, command } in message.commands {
            self.under_way.push(Box::pin(propose(self.node.clone(), id, command)));
        }
    }
}

async fn propose(node: Node, id: u64, command: Bytes) -> pb::ProposedResult {
    // The slice would keep the whole message in memory for as long as the log keeps the command.
    let (status, index) = node.propose_for_peer(Bytes::copy_from_slice(&command)).await;
    pb::ProposedResult { id, status: status as i32, index }
}

impl Stream for Proposals {
    type Item = Result<pb::ProposeResponse, Status>;

    fn poll_next(mut self: Pin<&mut Self>, task: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if !std::mem::replace(&mut self.greeted, true) {
            let nonce = self.nonce;
            return Poll::Ready(Some(Ok(pb::ProposeResponse { results: Vec::new(), nonce })));
        }
        while self.under_way.len() < PROPOSALS_MAX {
            let Some(requests) = &mut self.requests else { break };
            match Pin::new(requests).poll_next(task) {
                Poll::Ready(Some(Ok(message))) if message.nonce != self.nonce => {
                    warn!("proposals that were sent before are refused");
                    self.requests = None;
                }
                Poll::Ready(Some(Ok(message))) => self.take_in(message),
                Poll::Ready(Some(Err(_)) | None) => self.requests = None,
                Poll::Pending => break,
            }
        }
        let mut results = Vec::new();
        while results.len() < RESULTS_MAX
            && let Poll::Ready(Some(result)) = self.under_way.poll_next_unpin(task)
        {
            results.push(result);
        }
        if !results.is_empty() {
            return Poll::Ready(Some(Ok(pb::ProposeResponse { results, nonce: 0 })));
        }
        if self.requests.is_none() && self.under_way.is_empty() { Poll::Ready(None) } else { Poll::Pending }
    }
}
