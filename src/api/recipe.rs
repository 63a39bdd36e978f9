//! What Lock and Election share: callers that queue up by keys under a prefix, each held by a lease, oldest first.
//!
//! ```text
//! NAME/LEASE-A  created at 7   its caller holds the lock, or leads
//! NAME/LEASE-B  created at 9   waits for A's key to go
//! NAME/LEASE-C  created at 12  waits for B's key to go, then looks for whoever is before it now
//! ```
//!
//! The keys are ordinary ones, in the layout of etcd's clients: both kinds of callers may share a queue. Errors reach the caller with
//! the text that a client of the KV service would get, but with code UNKNOWN, since etcd's server is a client here. etcd:
//! `client/v3/concurrency`

use std::sync::Arc;

use bytes::Bytes;
use prost::Message as _;
use tonic::{Code, Request, Status};

use super::Context;
use super::caller::Caller;
use super::error::Error;
use super::kv::KvService;
use super::lease::LeaseService;
use crate::auth::Right;
use crate::proto::etcdserverpb as pb;
use crate::proto::etcdserverpb::compare::{CompareResult, CompareTarget, TargetUnion};
use crate::proto::etcdserverpb::range_request::{SortOrder, SortTarget};
use crate::proto::etcdserverpb::request_op::Request as Op;
use crate::proto::etcdserverpb::response_op::Response as Answer;
use crate::proto::mvccpb::{Event, KeyValue};
use crate::proto::server::lease_server::Lease;
use crate::storage::mvcc::KeyRange;
use crate::watch::{Filters, Message, NewWatch, WatchStream};

/// Time to live of a lease that a caller did not bring, in seconds. etcd: `client/v3/concurrency/session.go`
const TTL_SECONDS: i64 = 60;

/// Turns an error into what etcd's caller gets.
pub(super) fn from_client(status: Status) -> Status {
    match status.code() {
        Code::Cancelled | Code::DeadlineExceeded => status,
        _ => Status::unknown(status.message()),
    }
}

/// The services that a recipe is made of.
#[derive(Clone)]
pub(super) struct Recipe {
    pub(super) kv: KvService,
    lease: LeaseService,
    /// On whose behalf.
    pub(super) caller: Caller,
}

/// A caller's place in a queue.
#[derive(Clone, Debug)]
pub(super) struct Place {
    pub(super) prefix: Bytes,
    pub(super) key: Bytes,
    /// Create revision of the key.
    pub(super) created: i64,
}

/// What joining a queue found.
pub(super) struct Joined {
    pub(super) place: Place,
    pub(super) header: Option<pb::ResponseHeader>,
    /// The key, if it was there before.
    pub(super) existing: Option<KeyValue>,
    /// True if nobody is before the caller.
    pub(super) is_first: bool,
}

impl Recipe {
    pub(super) fn new(kv: KvService, lease: LeaseService) -> Recipe {
        Recipe { kv, lease, caller: Caller::default() }
    }

    /// The services, for who makes a call.
    pub(super) fn for_caller<T>(&self, request: &Request<T>) -> Recipe {
        Recipe { caller: Caller::of(request), ..self.clone() }
    }

    fn context(&self) -> &Arc<Context> {
        &self.kv.0
    }

    /// The lease to hold keys with: the caller's, or a new one.
    pub(super) async fn lease(&self, given: i64) -> Result<i64, Status> {
        if given != 0 {
            return Ok(given);
        }
        let request = pb::LeaseGrantRequest { ttl: TTL_SECONDS, id: 0 };
        let mut request = Request::new(request);
        request.extensions_mut().insert(self.caller.clone());
        Ok(self.lease.lease_grant(request).await?.into_inner().id)
    }

    /// Renews a lease once, and does something with it; whether there is such a lease shows then.
    pub(super) async fn with_lease<T>(&self, id: i64, work: impl Future<Output = T>) -> T {
        let context = self.context();
        let renew = async {
            // Who may not renew it goes on without.
            if context.judge_attached(&self.caller, vec![id], Right::Write).await.is_ok() {
                let _ = context.node.renew_lease(id).await;
            }
        };
        let ((), done) = tokio::join!(renew, work);
        done
    }

    /// Puts a key at the end of the queue, unless the lease has one there.
    pub(super) async fn join(&self, name: &[u8], lease: i64, value: Bytes) -> Result<Joined, Status> {
        let prefix = prefix(name);
        let key = Bytes::from([&prefix[..], signed_hex(lease).as_bytes()].concat());
        let put = pb::PutRequest { key: key.clone(), value, lease, ..Default::default() };
        let txn = pb::TxnRequest {
            compare: vec![created_at(&key, 0)],
            success: vec![op(Op::RequestPut(put)), op(Op::RequestRange(first_under(&prefix)))],
            failure: vec![op(Op::RequestRange(one(&key))), op(Op::RequestRange(first_under(&prefix)))],
        };
        let response = self.kv.txn(txn, &self.caller).await?;
        let revision = response.header.as_ref().map_or(0, |header| header.revision);
        let mut found = response.responses.into_iter().map(keys_of);
        let existing = found.next().and_then(|mut keys| keys.pop()).filter(|_| !response.succeeded);
        let created = existing.as_ref().map_or(revision, |existing| existing.create_revision);
        let owner = found.next().and_then(|mut keys| keys.pop());
        let is_first = owner.is_none_or(|owner| owner.create_revision == created);
        Ok(Joined { place: Place { prefix, key, created }, header: response.header, existing, is_first })
    }

    /// Waits until nobody is before a place.
    pub(super) async fn wait_for_turn(&self, place: &Place) -> Result<(), Status> {
        loop {
            let before = pb::RangeRequest {
                range_end: prefix_end(&place.prefix),
                sort_order: SortOrder::Descend as i32,
                max_create_revision: place.created - 1,
                ..first_under(&place.prefix)
            };
            // As for etcd: a bound of zero would be none, but nothing is created before revision 1 either.
            if before.max_create_revision <= 0 {
                return Ok(());
            }
            let (header, mut keys) = self.get(before).await?;
            let Some(before) = keys.pop() else { return Ok(()) };
            let mut watch = self.watch(KeyRange::single(before.key), header.revision).await?;
            while !watch.next().await?.1.iter().any(is_delete) {}
        }
    }

    /// Deletes a place's key, if it is still the one of that place.
    pub(super) async fn leave(&self, key: &Bytes, created: i64) -> Result<pb::TxnResponse, Status> {
        let delete = pb::DeleteRangeRequest { key: key.clone(), ..Default::default() };
        let success = vec![op(Op::RequestDeleteRange(delete))];
        let txn = pb::TxnRequest { compare: vec![created_at(key, created)], success, failure: Vec::new() };
        self.kv.txn(txn, &self.caller).await
    }

    /// The first in the queue.
    pub(super) async fn first(&self, name: &[u8]) -> Result<(pb::ResponseHeader, Option<KeyValue>), Status> {
        let (header, mut keys) = self.get(first_under(&prefix(name))).await?;
        Ok((header, keys.pop()))
    }

    /// A linearizable read.
    pub(super) async fn get(
        &self,
        range: pb::RangeRequest,
    ) -> Result<(pb::ResponseHeader, Vec<KeyValue>), Status> {
        let txn = pb::TxnRequest { success: vec![op(Op::RequestRange(range))], ..Default::default() };
        let response = self.kv.txn(txn, &self.caller).await?;
        let keys = response.responses.into_iter().next().map(keys_of).unwrap_or_default();
        Ok((response.header.unwrap_or_default(), keys))
    }

    /// Watches from a revision on.
    pub(super) async fn watch(&self, range: KeyRange, start_revision: i64) -> Result<Watch, Status> {
        let context = Arc::clone(self.context());
        let user = context.identify(&self.caller).await?.map(|who| who.name);
        context.judge_again(user.as_deref(), &range)?;
        let stream = context.hub.open_stream();
        let watched = range.clone();
        stream.create(NewWatch {
            range,
            start_revision,
            filters: Filters { no_put: false, no_delete: false },
            prev_kv: false,
            watch_id: 0,
            progress_notify: false,
            fragment: false,
        });
        Ok(Watch { stream, context, user, range: watched })
    }

    /// Has a caller leave its place when it goes away while it waits.
    pub(super) fn leave_when_dropped(&self, place: &Place) -> Leaving {
        Leaving { waiting: Some((self.clone(), place.key.clone(), place.created)) }
    }
}

/// Watched events, as they come.
pub(super) struct Watch {
    stream: WatchStream,
    context: Arc<Context>,
    user: Option<String>,
    range: KeyRange,
}

impl Watch {
    /// The next events, at least one, with their header. May be cancelled.
    pub(super) async fn next(&mut self) -> Result<(pb::ResponseHeader, Vec<Event>), Status> {
        loop {
            let Some(outgoing) = std::future::poll_fn(|task| self.stream.poll_next(task)).await else {
                return Err(Error::Stopped.into());
            };
            match outgoing.message {
                Message::Events(events) => {
                    // The right to see them may have been taken away meanwhile.
                    self.context.judge_again(self.user.as_deref(), &self.range)?;
                    let events = events.iter().map(|event| Event::decode(event.bytes.clone()));
                    let events = events
                        .collect::<Result<Vec<_>, _>>()
                        .map_err(|error| Status::internal(format!("an event does not decode: {error}")))?;
                    return Ok((self.context.header_at(outgoing.revision), events));
                }
                Message::Compacted(_) => return Err(Error::Compacted.into()),
                Message::Refused(reason) | Message::Ended(reason) => return Err(Status::unknown(reason)),
                Message::Created | Message::Progress | Message::Canceled => {}
            }
        }
    }
}

/// Leaves a place when dropped, in a task of its own.
pub(super) struct Leaving {
    waiting: Option<(Recipe, Bytes, i64)>,
}

impl Leaving {
    /// The caller has got its turn, or has left.
    pub(super) fn disarm(mut self) {
        self.waiting = None;
    }
}

impl Drop for Leaving {
    fn drop(&mut self) {
        let Some((recipe, key, created)) = self.waiting.take() else { return };
        // Without a runtime the member is going down: the lease will end the wait.
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            runtime.spawn(async move {
                if let Err(error) = recipe.leave(&key, created).await {
                    tracing::warn!(%error, "the place of a caller that went away is left to its lease");
                }
            });
        }
    }
}

pub(super) fn is_delete(event: &Event) -> bool {
    event.r#type == crate::proto::mvccpb::event::EventType::Delete as i32
}

/// A lease in the key that it holds: as Go prints it, with a sign.
fn signed_hex(lease: i64) -> String {
    format!("{}{:x}", if lease < 0 { "-" } else { "" }, lease.unsigned_abs())
}

pub(super) fn prefix(name: &[u8]) -> Bytes {
    [name, b"/"].concat().into()
}

/// The end of all keys with a prefix that ends in `/`.
pub(super) fn prefix_end(prefix: &[u8]) -> Bytes {
    debug_assert_eq!(prefix.last(), Some(&b'/'));
    [&prefix[..prefix.len() - 1], b"0"].concat().into()
}

pub(super) fn one(key: &Bytes) -> pb::RangeRequest {
    pb::RangeRequest { key: key.clone(), ..Default::default() }
}

fn first_under(prefix: &Bytes) -> pb::RangeRequest {
    pb::RangeRequest {
        key: prefix.clone(),
        range_end: prefix_end(prefix),
        limit: 1,
        sort_order: SortOrder::Ascend as i32,
        sort_target: SortTarget::Create as i32,
        ..Default::default()
    }
}

pub(super) fn created_at(key: &Bytes, revision: i64) -> pb::Compare {
    pb::Compare {
        result: CompareResult::Equal as i32,
        target: CompareTarget::Create as i32,
        key: key.clone(),
        range_end: Bytes::new(),
        target_union: Some(TargetUnion::CreateRevision(revision)),
    }
}

pub(super) fn op(request: Op) -> pb::RequestOp {
    pb::RequestOp { request: Some(request) }
}

fn keys_of(response: pb::ResponseOp) -> Vec<KeyValue> {
    match response.response {
        Some(Answer::ResponseRange(range)) => range.kvs,
        _ => Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lease_is_written_as_go_writes_it() {
        assert_eq!(signed_hex(0x2a), "2a");
        assert_eq!(signed_hex(-2), "-2");
        assert_eq!(signed_hex(i64::MIN), "-8000000000000000");
    }
}
