//! The Watch service: one stream carries many watchers.

use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context as TaskContext, Poll};
use std::time::Duration;

use bytes::{BufMut, BytesMut};
use futures::Stream;
use futures::future::BoxFuture;
use prost::Message as _;
use prost::encoding::{encode_varint, encoded_len_varint};
use tokio::time::{Interval, MissedTickBehavior};
use tonic::{Code, Request, Response, Status, Streaming};

use super::Context;
use super::caller::Caller;
use super::error::Error;
use super::grpc_go::unreadable;
use crate::auth::{Access, AuthError, Demand, Identity};
use crate::clock;
use crate::proto::etcdserverpb as pb;
use crate::proto::etcdserverpb::watch_create_request::FilterType;
use crate::proto::etcdserverpb::watch_request::RequestUnion;
use crate::proto::server::watch_server::Watch;
use crate::proto::wire::Encoded;
use crate::storage::mvcc::KeyRange;
use crate::watch::{EncodedEvent, Filters, Message, NewWatch, Outgoing, WatchStream};

/// The cancel reason for a negative start revision; etcd leaves the compact revision out.
const NEGATIVE_START: &str = "etcdserver: mvcc: required revision has been compacted";
/// Room above the request limit that a message may take before it is split. etcd: `grpcOverheadBytes`.
const FRAGMENT_ROOM_BYTES: usize = 512 << 10;
/// First byte of the `events` field: number 11, length-delimited.
const EVENTS_TAG: u8 = 0x5A;

/// Who asks.
type Identified = Result<Option<Identity>, Error>;

/// The Watch service.
#[derive(Clone)]
pub(super) struct WatchService(pub(super) Arc<Context>);

#[tonic::async_trait]
impl Watch for WatchService {
    type WatchStream = Responses;

    async fn watch(
        &self,
        request: Request<Streaming<pb::WatchRequest>>,
    ) -> Result<Response<Responses>, Status> {
        let context = Arc::clone(&self.0);
        let caller = Caller::of(&request);
        let watchers = context.hub.open_stream();
        let ticks = progress_ticks(context.limits.progress_interval);
        Ok(Response::new(Responses {
            context,
            watchers,
            caller,
            judging: None,
            user: None,
            judged_at: None,
            requests: Some(request.into_inner()),
            ticks,
            split: VecDeque::new(),
            ended: false,
        }))
    }
}

/// The tick of periodic progress, with up to a tenth added so that streams do not tick together.
fn progress_ticks(period: Duration) -> Interval {
    let chance = f64::from(u16::from_le_bytes(clock::random())) / f64::from(u16::MAX);
    let period = period + period.mul_f64(chance / 10.0);
    let mut ticks = tokio::time::interval_at((clock::now() + period).into(), period);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    ticks
}

/// The answers of one stream: it takes requests in and gives messages out, within one task.
pub(super) struct Responses {
    context: Arc<Context>,
    watchers: WatchStream,
    caller: Caller,
    /// A request for a watcher, while it is found out who asks.
    judging: Option<(pb::WatchCreateRequest, BoxFuture<'static, Identified>)>,
    /// Who asked for the watchers.
    user: Option<String>,
    /// The auth revision under which all watchers are allowed; `None` while authentication is off.
    judged_at: Option<u64>,
    /// `None` once the client has closed its side; the watchers live on.
    requests: Option<Streaming<pb::WatchRequest>>,
    ticks: Interval,
    /// Parts of a split message, still to be sent.
    split: VecDeque<Encoded>,
    ended: bool,
}

impl Stream for Responses {
    type Item = Result<Encoded, Status>;

    fn poll_next(mut self: Pin<&mut Self>, task: &mut TaskContext<'_>) -> Poll<Option<Self::Item>> {
        if let Poll::Ready(status) = self.poll_requests(task) {
            return Poll::Ready(Some(Err(status)));
        }
        self.judge_again();
        while self.ticks.poll_tick(task).is_ready() {
            self.watchers.tick_progress();
        }
        if let Some(part) = self.split.pop_front() {
            return Poll::Ready(Some(Ok(part)));
        }
        match self.watchers.poll_next(task) {
            Poll::Pending => Poll::Pending,
            Poll::Ready(None) if self.ended => Poll::Ready(None),
            Poll::Ready(None) => {
                self.ended = true;
                Poll::Ready(Some(Err(Error::Stopped.into())))
            }
            Poll::Ready(Some(message)) => Poll::Ready(Some(Ok(self.encode(message)))),
        }
    }
}

impl Responses {
    /// Takes in what the client has sent; ready only when the client has gone.
    fn poll_requests(&mut self, task: &mut TaskContext<'_>) -> Poll<Status> {
        loop {
            if let Some((_, judging)) = &mut self.judging {
                let Poll::Ready(identified) = judging.as_mut().poll(task) else { return Poll::Pending };
                if let Some((request, _)) = self.judging.take() {
                    self.create_if_allowed(&request, identified);
                }
            }
            let Some(requests) = &mut self.requests else { return Poll::Pending };
            match Pin::new(requests).poll_next(task) {
                Poll::Pending => return Poll::Pending,
                Poll::Ready(None) => self.requests = None,
                Poll::Ready(Some(Ok(request))) => self.take_in(request),
                Poll::Ready(Some(Err(status))) if status.code() == Code::Cancelled => {
                    return Poll::Ready(Status::cancelled("etcdserver: watch canceled"));
                }
                Poll::Ready(Some(Err(status))) => return Poll::Ready(unreadable(status)),
            }
        }
    }

    fn take_in(&mut self, request: pb::WatchRequest) {
        match request.request_union {
            Some(RequestUnion::CreateRequest(request)) => self.take_in_create(request),
            Some(RequestUnion::CancelRequest(request)) => self.watchers.cancel(request.watch_id),
            Some(RequestUnion::ProgressRequest(_)) => self.watchers.request_progress(),
            None => {}
        }
    }

    fn take_in_create(&mut self, mut request: pb::WatchCreateRequest) {
        if request.start_revision < 0 {
            self.watchers.refuse_now(NEGATIVE_START);
            return;
        }
        if request.key.is_empty() {
            request.key = bytes::Bytes::from_static(b"\0");
        }
        if self.context.state.auth.read().is_enabled() {
            let (context, caller) = (Arc::clone(&self.context), self.caller.clone());
            let identify = async move { context.identify(&caller).await };
            self.judging = Some((request, Box::pin(identify)));
        } else {
            self.create(&request);
        }
    }

    /// Creates a watcher that its client may have.
    fn create_if_allowed(&mut self, request: &pb::WatchCreateRequest, identified: Identified) {
        let allowed = identified.and_then(|who| {
            let demand = Demand::Keys(vec![Access::read(&request.key, &request.range_end)]);
            self.context.state.auth.read().authorise(who.as_ref(), &demand)?;
            Ok(who)
        });
        match allowed {
            Ok(who) => {
                self.user = who.map(|who| who.name).or(self.user.take());
                self.create(request);
            }
            Err(error) => self.watchers.refuse_now(reason(&error)),
        }
    }

    /// Ends the watchers that their client may not have any more, before anything more is sent for them. etcd asks only when a
    /// watcher is created.
    fn judge_again(&mut self) {
        let now = {
            let auth = self.context.state.auth.read();
            auth.is_enabled().then(|| auth.revision())
        };
        if now == self.judged_at {
            return;
        }
        self.judged_at = now;
        if now.is_none() {
            return;
        }
        for (id, range) in self.watchers.ranges() {
            if let Err(error) = self.context.judge_again(self.user.as_deref(), &range) {
                self.watchers.end(id, reason(&error));
            }
        }
    }

    fn create(&self, request: &pb::WatchCreateRequest) {
        let has = |filter: FilterType| request.filters.contains(&(filter as i32));
        self.watchers.create(NewWatch {
            range: KeyRange::from_request(&request.key, &request.range_end),
            start_revision: request.start_revision,
            filters: Filters { no_put: has(FilterType::Noput), no_delete: has(FilterType::Nodelete) },
            prev_kv: request.prev_kv,
            watch_id: request.watch_id,
            progress_notify: request.progress_notify,
            fragment: request.fragment,
        });
    }

    /// Encodes a message; the rest of a split one waits in `split`.
    fn encode(&mut self, outgoing: Outgoing) -> Encoded {
        let header = Some(self.context.header_at(outgoing.revision));
        let base = pb::WatchResponse { header, watch_id: outgoing.watch_id, ..Default::default() };
        let control = match outgoing.message {
            Message::Events(events) => {
                let max = self.context.limits.max_request_bytes + FRAGMENT_ROOM_BYTES;
                if outgoing.fragment && events.len() > 1 && with_events_len(&base, &events) >= max {
                    return self.split_events(base, &events, max);
                }
                return with_events(&base, &events);
            }
            Message::Created => pb::WatchResponse { created: true, ..base },
            Message::Refused(reason) => {
                pb::WatchResponse { created: true, canceled: true, cancel_reason: reason.to_owned(), ..base }
            }
            Message::Progress => base,
            Message::Canceled => pb::WatchResponse { canceled: true, ..base },
            Message::Ended(reason) => {
                pb::WatchResponse { canceled: true, cancel_reason: reason.to_owned(), ..base }
            }
            Message::Compacted(compact_revision) => {
                pb::WatchResponse { canceled: true, compact_revision, ..base }
            }
        };
        Encoded::new(&control)
    }

    fn split_events(&mut self, base: pb::WatchResponse, events: &[EncodedEvent], max: usize) -> Encoded {
        let mut rest = events;
        while !rest.is_empty() {
            let mut size = 0;
            let fits = rest
                .iter()
                .take_while(|event| {
                    size += event.bytes.len();
                    size < max
                })
                .count()
                .max(1);
            let (part, after) = rest.split_at(fits);
            rest = after;
            let base = pb::WatchResponse { fragment: !rest.is_empty(), ..base.clone() };
            self.split.push_back(with_events(&base, part));
        }
        self.split.pop_front().expect("a message with events has a first part")
    }
}

/// Why a watcher is refused, or ended, in the words of etcd's client errors.
fn reason(error: &Error) -> &'static str {
    match error {
        Error::Auth(AuthError::InvalidAuthToken) => {
            "rpc error: code = Unauthenticated desc = etcdserver: invalid auth token"
        }
        Error::Auth(AuthError::AuthOldRevision) => {
            "rpc error: code = InvalidArgument desc = etcdserver: revision of auth store is old"
        }
        Error::Auth(AuthError::UserEmpty) => {
            "rpc error: code = InvalidArgument desc = etcdserver: user name is empty"
        }
        _ => "rpc error: code = PermissionDenied desc = etcdserver: permission denied",
    }
}

fn with_events_len(base: &pb::WatchResponse, events: &[EncodedEvent]) -> usize {
    let field = |length: usize| 1 + encoded_len_varint(length as u64) + length;
    base.encoded_len() + events.iter().map(|event| field(event.bytes.len())).sum::<usize>()
}

/// Appends shared event bytes to a message of their own.
fn with_events(base: &pb::WatchResponse, events: &[EncodedEvent]) -> Encoded {
    let mut out = BytesMut::with_capacity(with_events_len(base, events));
    base.encode_raw(&mut out);
    for event in events {
        out.put_u8(EVENTS_TAG);
        encode_varint(event.bytes.len() as u64, &mut out);
        out.put_slice(&event.bytes);
    }
    Encoded(out.freeze())
}
