//! The KV service.

use std::sync::Arc;
use std::time::Instant;

use bytes::{BufMut, BytesMut};
use futures::stream::{self, BoxStream, StreamExt};
use prost::encoding::{WireType, encode_key, encode_varint};
use tonic::body::Body;
use tonic::{Request, Response, Status};
use tracing::warn;

use super::caller::Caller;
use super::error::Error;
use super::large_range::Rest;
use super::range_encoder::{INLINE_BYTES, INLINE_KEYS, Progress, RangeEncoder};
use super::unary::{self, Pieces};
use super::{Context, validate};
use crate::apply::{self, Reply, guard, range};
use crate::auth::Identity;
use crate::blocking;
use crate::clock;
use crate::proto::etcdserverpb as pb;
use crate::proto::server::kv_server::Kv;
use crate::proto::skegpb::command::Kind;
use crate::proto::wire::Encoded;
use crate::storage::mvcc::activity::Tally;
use crate::storage::mvcc::{KeyRange, MvccError, Store};
use crate::telemetry::metrics::Operation;

/// Keys in the first message of a stream. etcd: `server/etcdserver/v3_server.go`.
const STREAM_FIRST_KEYS: usize = 10;

/// The KV service.
#[derive(Clone)]
pub(super) struct KvService(pub(super) Arc<Context>);

/// What the generated server is for; the other calls of the service go by [`unary`].
#[tonic::async_trait]
impl Kv for KvService {
    type RangeStreamStream = BoxStream<'static, Result<Encoded, Status>>;

    async fn range_stream(
        &self,
        request: Request<pb::RangeRequest>,
    ) -> Result<Response<Self::RangeStreamStream>, Status> {
        let caller = Caller::of(&request);
        let request = request.into_inner();
        validate::range(&request)?;
        if !range::is_default_order(&request) {
            return Err(Error::StreamSorted.into());
        }
        if range::has_filters(&request) {
            return Err(Error::StreamFiltered.into());
        }
        let context = Arc::clone(&self.0);
        if !request.serializable {
            context.node.read_barrier().await.map_err(Error::from)?;
        }
        let who = context.judge_read(&caller, &request.key, &request.range_end).await?;
        Ok(Response::new(stream_range(&context, request, who)?))
    }
}

impl KvService {
    /// Answers a range; a large answer is sent while it is read.
    pub(super) async fn range(&self, request: pb::RangeRequest, caller: &Caller) -> http::Response<Body> {
        match self.checked_range(request, caller).await {
            Ok(Ranged::Whole(encoded)) => unary::respond(Ok(encoded)),
            Ok(Ranged::InPieces(pieces)) => unary::respond_in_pieces(pieces),
            Err(status) => status.into_http(),
        }
    }

    async fn checked_range(&self, request: pb::RangeRequest, caller: &Caller) -> Result<Ranged, Status> {
        if !request.serializable && self.0.state.cluster.read().is_learner(self.0.member_id.get()) {
            return Err(Error::NotSupportedForLearner.into());
        }
        validate::range(&request)?;
        let started = clock::now();
        let served = self.readable_range(request, caller).await;
        self.0.note_read(Operation::Range, started, served.is_ok());
        served
    }

    async fn readable_range(&self, request: pb::RangeRequest, caller: &Caller) -> Result<Ranged, Status> {
        if !request.serializable {
            self.0.node.read_barrier().await.map_err(Error::from)?;
        }
        let who = self.0.judge_read(caller, &request.key, &request.range_end).await?;
        let ranged = self.0.range(request).await?;
        self.0.check_unchanged(who.as_ref())?;
        Ok(ranged)
    }

    pub(super) async fn put(
        &self,
        request: pb::PutRequest,
        caller: &Caller,
    ) -> Result<pb::PutResponse, Status> {
        let command = Kind::Put(request);
        self.0.check_quota(&command).await?;
        if let Kind::Put(request) = &command {
            validate::put(request)?;
        }
        match self.0.apply_for(caller, command).await? {
            Reply::Put(mut response) => {
                self.0.stamp(&mut response.header);
                Ok(response)
            }
            other => Err(unexpected(&other)),
        }
    }

    pub(super) async fn delete_range(
        &self,
        request: pb::DeleteRangeRequest,
        caller: &Caller,
    ) -> Result<pb::DeleteRangeResponse, Status> {
        validate::delete_range(&request)?;
        match self.0.apply_for(caller, Kind::DeleteRange(request)).await? {
            Reply::DeleteRange(mut response) => {
                self.0.stamp(&mut response.header);
                Ok(response)
            }
            other => Err(unexpected(&other)),
        }
    }

    pub(super) async fn txn(
        &self,
        request: pb::TxnRequest,
        caller: &Caller,
    ) -> Result<pb::TxnResponse, Status> {
        let command = Kind::Txn(request);
        self.0.check_quota(&command).await?;
        if let Kind::Txn(request) = &command {
            validate::txn(request, self.0.limits.max_txn_ops)?;
            if apply::is_read_only(request) {
                let started = clock::now();
                let served = self.0.read_txn(request, caller).await;
                self.0.note_read(Operation::ReadonlyTxn, started, served.is_ok());
                return served;
            }
        }
        match self.0.apply_for(caller, command).await? {
            Reply::Txn(mut response) => {
                self.0.stamp(&mut response.header);
                Ok(response)
            }
            other => Err(unexpected(&other)),
        }
    }

    pub(super) async fn compact(
        &self,
        request: pb::CompactionRequest,
        caller: &Caller,
    ) -> Result<pb::CompactionResponse, Status> {
        let physical = request.physical;
        let applied = self.0.apply_for(caller, Kind::Compaction(request)).await;
        if physical {
            // Also when it is refused: an earlier one of the same revision may still be under way.
            self.0.compactions_finished().await?;
        }
        match applied? {
            Reply::Compaction(mut response) => {
                if physical {
                    self.0.rewrite().await?;
                }
                self.0.stamp(&mut response.header);
                Ok(response)
            }
            other => Err(unexpected(&other)),
        }
    }
}

/// An answer to a range.
pub(super) enum Ranged {
    /// All of it.
    Whole(Encoded),
    /// A large one, in the making.
    InPieces(Pieces),
}

/// A reply of the wrong kind is a fault of ours; it must not end the process.
pub(super) fn unexpected(reply: &Reply) -> Status {
    Status::internal(format!("unexpected reply {:?}", std::mem::discriminant(reply)))
}

impl Context {
    /// Counts a read, and warns if it took long.
    fn note_read(&self, operation: Operation, started: Instant, success: bool) {
        let took = clock::now().duration_since(started);
        self.metrics.server.request_duration.observe(operation, success, took);
        let expected = self.limits.slow_read;
        if took > expected {
            self.metrics.server.slow_apply.inc();
            let request = operation.name();
            warn!(took = ?took, "expected-duration" = ?expected, request, "apply request took too long");
        }
    }

    /// Serves a checked range from the local state.
    async fn range(self: &Arc<Self>, request: pb::RangeRequest) -> Result<Ranged, Status> {
        let started = clock::now();
        let store = self.state.store();
        store.activity().add(Tally { ranges: 1, ..Tally::default() });
        let served = self.range_at_readable(&store, request).await;
        self.metrics.server.range_served(clock::now().duration_since(started), served.is_ok());
        served
    }

    async fn range_at_readable(
        self: &Arc<Self>,
        store: &Arc<Store>,
        request: pb::RangeRequest,
    ) -> Result<Ranged, Status> {
        loop {
            let revision = store.resolve(request.revision).map_err(Error::from)?;
            let header = self.header_at(store.revision());
            match self.range_at(store, &request, revision, &header).await {
                // The revision was the latest when the read began; it was compacted under it, so read a newer one.
                Err(Error::Compacted) if request.revision <= 0 => {}
                done => return Ok(done?),
            }
        }
    }

    async fn range_at(
        self: &Arc<Self>,
        store: &Arc<Store>,
        request: &pb::RangeRequest,
        revision: i64,
        header: &pb::ResponseHeader,
    ) -> Result<Ranged, Error> {
        let range = KeyRange::from_request(&request.key, &request.range_end);
        let plain = range::is_default_order(request)
            && !range::has_filters(request)
            && request.sort_target == pb::range_request::SortTarget::Key as i32;
        let mut encoder = RangeEncoder::new(request);
        if plain && !request.count_only {
            encoder.put_header(header);
            if let Some(key) = range.as_single() {
                if let Some((meta, value)) = store.get(key, revision)? {
                    encoder.put_record(key, &meta, &value);
                }
                store.check_readable(revision)?;
                let count = i64::try_from(encoder.taken).unwrap_or(i64::MAX);
                return Ok(Ranged::Whole(Encoded(encoder.finish(false, count))));
            }
            let limit = usize::try_from(request.limit).unwrap_or(0);
            let progress = encoder.read(store, &range, revision, limit, INLINE_KEYS, INLINE_BYTES)?;
            if progress == Progress::Exhausted
                || (progress == Progress::Limited && store.counts_quickly(revision))
            {
                let count = encoder.count(store, &range, revision, progress)?;
                store.check_readable(revision)?;
                return Ok(Ranged::Whole(Encoded(encoder.finish(progress == Progress::Limited, count))));
            }
            let store = Arc::clone(store);
            let rest = Rest { store, encoder, progress, range, revision, limit };
            return rest.read_on_thread().await;
        }
        let quick = request.count_only && (range.as_single().is_some() || store.counts_quickly(revision));
        let (store, request, header) = (Arc::clone(store), request.clone(), *header);
        let work = move || -> Result<Ranged, Error> {
            let mut response = range::execute(&range::At { store: &store, revision }, &request)?;
            store.check_readable(revision)?;
            response.header = Some(header);
            Ok(Ranged::Whole(Encoded::new(&response)))
        };
        if quick { work() } else { on_thread(work).await }
    }

    /// Serves a transaction that only reads. It is serializable if all its ranges are, also if there are none.
    async fn read_txn(
        self: &Arc<Self>,
        request: &pb::TxnRequest,
        caller: &Caller,
    ) -> Result<pb::TxnResponse, Status> {
        if !apply::is_serializable(request) {
            self.node.read_barrier().await.map_err(Error::from)?;
        }
        let who = self.identify(caller).await?;
        if who.is_some() || self.state.auth.read().is_enabled() {
            self.state
                .auth
                .read()
                .authorise(who.as_ref(), &guard::txn_demand(request))
                .map_err(Error::from)?;
        }
        let (context, request) = (Arc::clone(self), request.clone());
        let work = move || -> Result<pb::TxnResponse, Error> {
            let store = context.state.store();
            loop {
                let revision = store.revision();
                let answer = apply::read_txn(&store, revision, &request)?;
                // A compaction past what is the latest here may have taken versions from under the read: read anew.
                if store.check_readable(revision).is_err() {
                    continue;
                }
                let mut response = answer?;
                response.header = Some(context.header_at(revision));
                return Ok(response);
            }
        };
        let answer = on_thread(work).await?;
        self.check_unchanged(who.as_ref())?;
        Ok(answer)
    }

    /// Waits until the second half of every compaction so far is done.
    async fn compactions_finished(&self) -> Result<(), Error> {
        let compacted = self.state.store().compacted();
        let mut finished = self.finished_compaction.clone();
        finished.wait_for(|finished| *finished >= compacted).await.map_err(|_| Error::Stopped)?;
        Ok(())
    }

    /// Rewrites the store's files without unreachable versions.
    pub(super) async fn rewrite(&self) -> Result<(), Error> {
        let store = self.state.store();
        on_thread(move || Ok(store.rewrite()?)).await
    }
}

/// Runs work that takes long on a blocking thread.
pub(super) async fn on_thread<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, Error> + Send + 'static,
) -> Result<T, Error> {
    match blocking::spawn(work).await {
        Ok(result) => result,
        Err(error) if error.is_cancelled() => Err(Error::Stopped),
        Err(error) => Err(Error::Storage(format!("a read ended early: {error}"))),
    }
}

/// A range stream between two messages.
struct Streaming {
    context: Arc<Context>,
    who: Option<Identity>,
    store: Arc<Store>,
    max_request_bytes: usize,
    request: pb::RangeRequest,
    range: KeyRange,
    revision: i64,
    header: pb::ResponseHeader,
    encoder: RangeEncoder,
    keys: usize,
    done: bool,
}

fn stream_range(
    context: &Arc<Context>,
    request: pb::RangeRequest,
    who: Option<Identity>,
) -> Result<BoxStream<'static, Result<Encoded, Status>>, Error> {
    let store = context.state.store();
    let revision = store.resolve(request.revision)?;
    let header = context.header_at(store.revision());
    let range = KeyRange::from_request(&request.key, &request.range_end);
    let encoder = RangeEncoder::new(&request);
    store.activity().add(Tally { ranges: 1, ..Tally::default() });
    let streaming = Streaming {
        context: Arc::clone(context),
        who,
        store,
        max_request_bytes: context.limits.max_request_bytes,
        request,
        range,
        revision,
        header,
        encoder,
        keys: STREAM_FIRST_KEYS,
        done: false,
    };
    Ok(stream::try_unfold(streaming, |streaming| async move {
        if streaming.done {
            return Ok(None);
        }
        let (context, who) = (Arc::clone(&streaming.context), streaming.who.clone());
        let next = if streaming.keys <= INLINE_KEYS {
            streaming.next_message()
        } else {
            on_thread(move || streaming.next_message()).await
        };
        let next = next?;
        // What was read before a change of users and roles is not shown after it.
        context.check_unchanged(who.as_ref())?;
        Ok(Some(next))
    })
    .boxed())
}

impl Streaming {
    /// Reads one message; pieces grow towards the request limit, as etcd's do.
    fn next_message(mut self) -> Result<(Encoded, Streaming), Error> {
        let aim = self.max_request_bytes;
        let limit = usize::try_from(self.request.limit).unwrap_or(0);
        let progress = if self.request.count_only {
            Progress::Exhausted
        } else {
            self.encoder.read(&self.store, &self.range, self.revision, limit, self.keys, aim)?
        };
        let size = self.encoder.len();
        if size < aim / 2 {
            self.keys = self.keys.saturating_mul(2);
        } else if size > aim.saturating_mul(2) {
            self.keys = (self.keys / 2).max(1);
        }
        if progress != Progress::Paused {
            let count = if self.request.count_only {
                self.store.count(&self.range, self.revision)?
            } else {
                self.encoder.count(&self.store, &self.range, self.revision, progress)?
            };
            self.encoder.put_header(&self.header);
            self.encoder.put_trailer(progress == Progress::Limited, count);
            self.done = true;
        }
        self.store.check_readable(self.revision).map_err(|error: MvccError| Error::from(error))?;
        let piece = self.encoder.take();
        let mut message = BytesMut::with_capacity(piece.len() + 8);
        encode_key(1, WireType::LengthDelimited, &mut message);
        encode_varint(piece.len() as u64, &mut message);
        message.put(piece);
        Ok((Encoded(message.freeze()), self))
    }
}
