//! Talking to peers.
//!
//! ```text
//! RaftCore ─ replication ─> Append stream   (a connection of its own, pipelined)
//!          ─ heartbeats ──> Append stream   (another: never behind entries)
//!          ─ votes, transfer ─┐
//! forward, read index, leases ┴> the link's shared connection
//!          ─ snapshot ────> InstallSnapshot (a third), also for a member that asks for files (SendFiles)
//! ```
//!
//! A call carries who talks to whom ([`channel`]); [`service`] refuses what does not fit. An answer says what is on the
//! answering member's disk, never what is only in its memory.

mod ask;
mod channel;
mod counted;
mod describe;
mod forward;
mod kin;
mod links;
mod service;
mod snapshot;
mod wire;

use std::future::Future;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::{Stream, StreamExt, TryStreamExt};
use openraft::OptionalSend;
use openraft::alias::{SnapshotOf, VoteOf};
use openraft::base::{BoxFuture, BoxStream};
use openraft::errors::{NetworkError, RPCError, ReplicationClosed, StreamingError, Unreachable};
use openraft::network::{Backoff, RPCOption, RaftNetworkFactory, RaftNetworkV2};
use openraft::raft::{
    AppendEntriesRequest, AppendEntriesResponse, SnapshotResponse, StreamAppendError, StreamAppendResult,
    TransferLeaderRequest, TransferLeaderResponse, VoteRequest, VoteResponse,
};
use tonic::Status;
use tracing::warn;

pub(crate) use channel::Timeouts;
pub use channel::{Opened, dial};
pub use counted::Served;
pub use describe::{ask_to_join, describe};
pub(crate) use forward::{Answer, Forwarder};
pub(crate) use kin::Kin;
pub(crate) use links::{Link, Links};
pub use service::Membership;

use super::snapshot::Files;
use super::types::{Peer, TypeConfig};
use crate::clock;
use crate::cluster::id::MemberId;
use channel::{Channel, addressed};

/// What a removed member is told; it ends then.
const REMOVED: &str = "the member has been permanently removed from the cluster";

/// What a member is told whose log no longer holds what it acknowledged; it ends then. openraft would end the leader.
pub(crate) const FORGOT: &str = "the member has forgotten entries that it acknowledged: its data directory is an old copy, or \
    was lost; remove the member and add it anew";

/// What a member is told that does not go on from its last known life; it ends then.
const COPIED: &str = "the member has forgotten what it was: another process has run as this member since its data directory \
    was copied, or lost; if that one still runs, stop one of them, else remove the member and add it anew";

/// Pause before a peer that could not be reached is tried again.
const RETRY_FIRST: Duration = Duration::from_millis(20);
/// Longest such pause.
const RETRY_MAX: Duration = Duration::from_millis(500);

type Failure = RPCError<TypeConfig>;

/// Makes connections to peers.
pub(crate) struct Network {
    pub(crate) links: Arc<Links>,
    pub(crate) heartbeat_interval: Duration,
}

/// What openraft's tasks talk to one peer through; each has its own.
pub(crate) struct Connection {
    links: Arc<Links>,
    link: Arc<Link>,
    /// For streams of entries.
    channel: Channel,
    /// Of one that carries heartbeats alone.
    beats: Option<Beats>,
}

/// Whether heartbeats leave in time.
struct Beats {
    /// Time between two, at most, without being counted as late. etcd: twice the interval.
    at_most: Duration,
    last: Option<Instant>,
}

impl Beats {
    /// Notes that one leaves; true if it is late.
    fn note(&mut self, now: Instant) -> bool {
        let last = self.last.replace(now);
        last.is_some_and(|last| now.duration_since(last) > self.at_most)
    }
}

impl RaftNetworkFactory<TypeConfig> for Network {
    type Network = Connection;

    async fn new_client(&mut self, target: u64, node: &Peer) -> Connection {
        Connection {
            links: Arc::clone(&self.links),
            link: self.links.ensure(target, &node.peer_urls),
            channel: Channel::default(),
            beats: None,
        }
    }

    async fn new_heartbeat_client(&mut self, target: u64, node: &Peer) -> Connection {
        let beats = Beats { at_most: 2 * self.heartbeat_interval, last: None };
        Connection { beats: Some(beats), ..self.new_client(target, node).await }
    }
}

fn unreachable(error: &(impl std::error::Error + 'static)) -> Failure {
    RPCError::Unreachable(Unreachable::new(error))
}

fn broken(error: &(impl std::error::Error + 'static)) -> Failure {
    RPCError::Network(NetworkError::new(error))
}

impl RaftNetworkV2<TypeConfig> for Connection {
    type SnapshotData = Files;

    async fn append_entries(
        &mut self,
        request: AppendEntriesRequest<TypeConfig>,
        option: RPCOption,
    ) -> Result<AppendEntriesResponse<TypeConfig>, Failure> {
        let mut answers = self.stream_append(futures::stream::iter([request]), option).await?;
        match answers.next().await {
            Some(answer) => Ok(answer?.into()),
            None => Err(broken(&io::Error::from(io::ErrorKind::UnexpectedEof))),
        }
    }

    fn stream_append<'s, S>(
        &'s mut self,
        input: S,
        _: RPCOption,
    ) -> BoxFuture<'s, Result<BoxStream<'s, Result<StreamAppendResult<TypeConfig>, Failure>>, Failure>>
    where
        S: Stream<Item = AppendEntriesRequest<TypeConfig>> + OptionalSend + Unpin + 'static,
    {
        Box::pin(async move {
            // openraft waits after failures in here; connecting before that would be trying again at once.
            let mut input = input;
            let Some(first) = input.next().await else {
                return Ok(Box::pin(futures::stream::empty()) as BoxStream<'s, _>);
            };
            if self.beats.as_mut().is_some_and(|beats| beats.note(clock::now())) {
                self.links.metrics().peers.late_heartbeats.inc();
            }
            let term = first.vote.leader_id().term;
            let links = Arc::clone(&self.links);
            let input =
                futures::stream::once(std::future::ready(first)).chain(input).inspect(move |request| {
                    links.heard_committed(request.leader_commit.as_ref().map_or(0, |last| last.index()));
                });
            let opened = self.channel.open(&self.link).await;
            let mut client =
                opened.inspect_err(|_| self.link.count_failure()).map_err(|error| unreachable(&error))?;
            let requests = addressed(&self.link, input.map(wire::append_to_proto));
            let answered = client.append(requests).await;
            self.link.note(answered.as_ref().err());
            let answers = match answered {
                Ok(answers) => answers.into_inner(),
                Err(status) => {
                    self.channel.close();
                    return Err(unreachable(&status));
                }
            };
            let (link, links) = (Arc::clone(&self.link), Arc::clone(&self.links));
            let failing = Arc::clone(&self.link);
            let answers = answers.map_err(move |status: Status| {
                failing.count_failure();
                broken(&status)
            });
            let answers = answers.and_then(move |answer| {
                let answer = wire::appended_from_proto(answer).map_err(|error| broken(&error));
                std::future::ready(
                    answer.and_then(|answer| remembered(&link, term, links.committed(), answer)),
                )
            });
            Ok(Box::pin(answers) as BoxStream<'s, _>)
        })
    }

    async fn vote(
        &mut self,
        request: VoteRequest<TypeConfig>,
        _: RPCOption,
    ) -> Result<VoteResponse<TypeConfig>, Failure> {
        self.ask_vote(&request, false).await
    }

    async fn pre_vote(
        &mut self,
        request: VoteRequest<TypeConfig>,
        _: RPCOption,
    ) -> Result<VoteResponse<TypeConfig>, Failure> {
        self.ask_vote(&request, true).await
    }

    async fn full_snapshot(
        &mut self,
        vote: VoteOf<TypeConfig>,
        snapshot: SnapshotOf<TypeConfig, Files>,
        cancel: impl Future<Output = ReplicationClosed> + OptionalSend + 'static,
        _: RPCOption,
    ) -> Result<SnapshotResponse<TypeConfig>, StreamingError<TypeConfig>> {
        let Files::Here(source) = snapshot.snapshot else {
            return Err(StreamingError::Closed(ReplicationClosed::new(
                "another member's files are not sent on",
            )));
        };
        let background = Arc::clone(source.background());
        let sending = snapshot::send(
            Arc::clone(&self.link),
            vote,
            snapshot.meta,
            None,
            source,
            Arc::clone(&self.links),
        );
        let sent = tokio::select! {
            closed = cancel => return Err(StreamingError::Closed(closed)),
            sent = background.run(sending) => sent,
        };
        match sent.unwrap_or_else(|| Err(io::Error::other("the member is stopping"))) {
            Ok(vote) => Ok(SnapshotResponse::new(vote)),
            Err(error) => {
                warn!(peer = %MemberId::new(self.link.member_id()), %error, "a snapshot is not sent");
                // Unreachable, whatever it was: the next attempt then waits a moment.
                Err(StreamingError::Unreachable(Unreachable::new(&error)))
            }
        }
    }

    fn backoff(&self) -> Option<Backoff> {
        let doubling = std::iter::successors(Some(RETRY_FIRST), |pause| Some((*pause * 2).min(RETRY_MAX)));
        Some(Backoff::new(doubling))
    }

    async fn transfer_leader(
        &mut self,
        request: TransferLeaderRequest<TypeConfig>,
        _: RPCOption,
    ) -> Result<TransferLeaderResponse<TypeConfig>, Failure> {
        let request = wire::transfer_to_proto(&request);
        let answer =
            self.link.ask(request, async |client, request| client.transfer_leader(request).await).await;
        let answer = answer.map_err(|status| unreachable(&status))?;
        if answer.refusal.is_empty() {
            return Ok(Ok(()));
        }
        Err(broken(&io::Error::other(answer.refusal)))
    }
}

/// Compares an answer with what the peer has acknowledged, which openraft takes for granted.
fn remembered(
    link: &Link,
    term: u64,
    committed: u64,
    answer: StreamAppendResult<TypeConfig>,
) -> Result<StreamAppendResult<TypeConfig>, Failure> {
    match &answer {
        Ok(Some(last)) => link.acknowledges(term, last.index(), committed),
        Err(StreamAppendError::Conflict(at)) if link.lacks(term, at.index()) => {
            return Err(unreachable(&io::Error::other(FORGOT)));
        }
        _ => {}
    }
    Ok(answer)
}

impl Connection {
    async fn ask_vote(
        &self,
        request: &VoteRequest<TypeConfig>,
        pre_vote: bool,
    ) -> Result<VoteResponse<TypeConfig>, Failure> {
        if self.links.lacks_committed(request.last_log_id.as_ref().map_or(0, |last| last.index())) {
            return Err(unreachable(&io::Error::other("this member lacks what is committed")));
        }
        let request = wire::vote_request_to_proto(request, pre_vote);
        let answer = self.link.ask(request, async |client, request| client.ask_vote(request).await).await;
        let answer = answer.map_err(|status| unreachable(&status))?;
        wire::vote_response_from_proto(answer).map_err(|error| broken(&error))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_heartbeat_is_late_after_two_intervals() {
        let mut beats = Beats { at_most: Duration::from_millis(200), last: None };
        let start = clock::now();
        let late = [0, 200, 401, 500].map(|at| beats.note(start + Duration::from_millis(at)));
        assert_eq!(late, [false, false, true, false]);
    }
}
