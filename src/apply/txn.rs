//! Puts, deletes and transactions. etcd: `server/etcdserver/txn/txn.go`.
//!
//! A transaction is decided before it does anything:
//!
//! 1. compares, nested ones included, against the state before it: that fixes the path through all branches;
//! 2. checks of every operation on the path, still against that state, so that nothing on it can fail any more;
//! 3. execution in order, each operation seeing the ones before it.
//!
//! etcd's second step forgets that an earlier delete of the same path can take away the key that a put with
//! `ignore_value` relies on, and dies at the third. Here the check follows the path's own deletes.

use std::collections::BTreeSet;

use bytes::Bytes;

use super::{Outcome, Refusal, Reply, Run, range};
use crate::lease::Leases;
use crate::proto::etcdserverpb as pb;
use crate::proto::etcdserverpb::compare::{CompareResult, CompareTarget, TargetUnion};
use crate::proto::etcdserverpb::request_op::Request;
use crate::proto::etcdserverpb::response_op::Response;
use crate::proto::mvccpb;
use crate::storage::StorageError;
use crate::storage::mvcc::activity::Tally;
use crate::storage::mvcc::write::Txn;
use crate::storage::mvcc::{KeyRange, KeyRanges, Store};
use crate::storage::schema::KeyMeta;

/// Applies a put.
pub(super) fn put(run: &mut Run<'_>, request: pb::PutRequest) -> Result<Outcome, StorageError> {
    if request.lease != 0 && !run.state.leases.read().contains(request.lease) {
        return Ok(Err(Refusal::LeaseNotFound));
    }
    let mut txn = run.write.begin();
    if (request.ignore_value || request.ignore_lease) && txn.head(&request.key)?.is_none() {
        return Ok(Err(Refusal::KeyNotFound));
    }
    let mut response = execute_put(&mut txn, &request)?;
    txn.finish();
    run.store.activity().add(tally_put(&request));
    response.header = run.header();
    Ok(Ok(Reply::Put(response)))
}

/// Applies a range delete.
pub(super) fn delete_range(
    run: &mut Run<'_>,
    request: &pb::DeleteRangeRequest,
) -> Result<Outcome, StorageError> {
    let mut txn = run.write.begin();
    let mut response = execute_delete(&mut txn, request)?;
    txn.finish();
    run.store.activity().add(tally_delete(request));
    response.header = run.header();
    Ok(Ok(Reply::DeleteRange(response)))
}

/// Applies a transaction.
pub(super) fn txn(run: &mut Run<'_>, request: &pb::TxnRequest) -> Result<Outcome, StorageError> {
    let leases = run.state.leases.read();
    let mut txn = run.write.begin();
    let path = choose(&txn, request)?;
    let mut checks =
        PathChecks { txn: &txn, leases: &leases, deleted: KeyRanges::default(), put: BTreeSet::new() };
    if let Err(refusal) = checks.walk(request, &path)? {
        return Ok(Err(refusal));
    }
    drop(leases);
    let mut response = execute(&mut txn, request, &path)?;
    txn.finish();
    // etcd evaluates in a transaction of its own.
    let activity = run.store.activity();
    activity.add(Tally { ranges: compares(request, &path), ..Tally::default() });
    activity.add(tally(request, &path));
    response.header = run.header();
    Ok(Ok(Reply::Txn(response)))
}

/// True if the transaction must see the store below as of this point of the log: it walks ranges or reads old revisions.
pub(super) fn reads_history(request: &pb::TxnRequest) -> bool {
    request.compare.iter().any(|compare| !compare.range_end.is_empty())
        || request.success.iter().chain(&request.failure).any(|op| match &op.request {
            Some(Request::RequestRange(range)) => !range.range_end.is_empty() || range.revision != 0,
            Some(Request::RequestDeleteRange(delete)) => !delete.range_end.is_empty(),
            Some(Request::RequestTxn(txn)) => reads_history(txn),
            Some(Request::RequestPut(_)) | None => false,
        })
}

/// True if the transaction cannot change anything: every operation of both branches is a range.
pub fn is_read_only(request: &pb::TxnRequest) -> bool {
    let mut ops = request.success.iter().chain(&request.failure);
    ops.all(|op| matches!(op.request, Some(Request::RequestRange(_))))
}

/// True if a read-only transaction may be served from local state: all its ranges may, also if it has none.
pub fn is_serializable(request: &pb::TxnRequest) -> bool {
    let mut ops = request.success.iter().chain(&request.failure);
    ops.all(|op| matches!(&op.request, Some(Request::RequestRange(range)) if range.serializable))
}

/// Serves a read-only transaction at the store's current revision.
pub fn read_txn(
    store: &Store,
    revision: i64,
    request: &pb::TxnRequest,
) -> Result<Result<pb::TxnResponse, Refusal>, StorageError> {
    let source = range::At { store, revision };
    let succeeded = compares_hold(&request.compare, &source)?;
    let mut responses = Vec::new();
    let ranges = request.compare.len() + branch(request, succeeded).len();
    store.activity().add(Tally { ranges: ranges as u64, ..Tally::default() });
    for op in branch(request, succeeded) {
        let Some(Request::RequestRange(range)) = &op.request else { continue };
        if range.revision > revision {
            return Ok(Err(Refusal::FutureRevision));
        }
        if range.revision != 0 && range.revision < store.compacted() {
            return Ok(Err(Refusal::Compacted));
        }
        let at = if range.revision > 0 { range.revision } else { revision };
        let mut response = range::execute(&range::At { store, revision: at }, range)?;
        if range.revision != 0 && range.revision < store.compacted() {
            // Compacted during the read, which may have missed something.
            return Ok(Err(Refusal::Compacted));
        }
        response.header = Some(pb::ResponseHeader { revision, ..Default::default() });
        responses.push(pb::ResponseOp { response: Some(Response::ResponseRange(response)) });
    }
    Ok(Ok(pb::TxnResponse { header: None, succeeded, responses }))
}

fn compares_hold(compares: &[pb::Compare], source: &dyn range::Source) -> Result<bool, StorageError> {
    for compare in compares {
        if !holds(compare, source)? {
            return Ok(false);
        }
    }
    Ok(true)
}

/// The branches taken: this transaction's, then those of nested ones on its path, in order.
struct Path {
    succeeded: bool,
    nested: Vec<Path>,
}

fn choose(txn: &Txn<'_, '_>, request: &pb::TxnRequest) -> Result<Path, StorageError> {
    let succeeded = compares_hold(&request.compare, txn)?;
    let mut nested = Vec::new();
    for op in branch(request, succeeded) {
        if let Some(Request::RequestTxn(inner)) = &op.request {
            nested.push(choose(txn, inner)?);
        }
    }
    Ok(Path { succeeded, nested })
}

fn branch(request: &pb::TxnRequest, succeeded: bool) -> &[pb::RequestOp] {
    if succeeded { &request.success } else { &request.failure }
}

/// A compare holds if every key of its range satisfies it; no key at all compares as zero, except by value: false.
fn holds(compare: &pb::Compare, source: &dyn range::Source) -> Result<bool, StorageError> {
    let range = KeyRange::from_request(&compare.key, &compare.range_end);
    let by_value = compare.target == CompareTarget::Value as i32;
    let mut any = false;
    let mut all = true;
    source.visit(&range, &mut |_, meta, value| {
        any = true;
        all = satisfies(compare, Some(meta), value);
        all
    })?;
    if any {
        return Ok(all);
    }
    Ok(!by_value && satisfies(compare, None, b""))
}

fn satisfies(compare: &pb::Compare, meta: Option<&KeyMeta>, value: &[u8]) -> bool {
    use std::cmp::Ordering;
    let field = |pick: fn(&KeyMeta) -> i64| meta.map_or(0, pick);
    let wanted = compare.target_union.as_ref();
    let ordering = match CompareTarget::try_from(compare.target) {
        Ok(CompareTarget::Version) => {
            let wanted = if let Some(TargetUnion::Version(v)) = wanted { *v } else { 0 };
            field(|meta| meta.version).cmp(&wanted)
        }
        Ok(CompareTarget::Create) => {
            let wanted = if let Some(TargetUnion::CreateRevision(v)) = wanted { *v } else { 0 };
            field(|meta| meta.create_revision).cmp(&wanted)
        }
        Ok(CompareTarget::Mod) => {
            let wanted = if let Some(TargetUnion::ModRevision(v)) = wanted { *v } else { 0 };
            field(|meta| meta.modified.main).cmp(&wanted)
        }
        Ok(CompareTarget::Lease) => {
            let wanted = if let Some(TargetUnion::Lease(v)) = wanted { *v } else { 0 };
            field(|meta| meta.lease).cmp(&wanted)
        }
        Ok(CompareTarget::Value) => {
            let wanted: &[u8] = if let Some(TargetUnion::Value(v)) = wanted { v } else { b"" };
            value.cmp(wanted)
        }
        Err(_) => Ordering::Equal,
    };
    match CompareResult::try_from(compare.result) {
        Ok(CompareResult::Equal) => ordering.is_eq(),
        Ok(CompareResult::NotEqual) => ordering.is_ne(),
        Ok(CompareResult::Greater) => ordering.is_gt(),
        Ok(CompareResult::Less) => ordering.is_lt(),
        Err(_) => true,
    }
}

/// Step 2: nothing on the path can fail once this passes.
struct PathChecks<'a, 'r, 's> {
    txn: &'a Txn<'r, 's>,
    leases: &'a Leases,
    deleted: KeyRanges,
    put: BTreeSet<Bytes>,
}

impl PathChecks<'_, '_, '_> {
    fn walk(&mut self, request: &pb::TxnRequest, path: &Path) -> Result<Result<(), Refusal>, StorageError> {
        let mut nested = path.nested.iter();
        for op in branch(request, path.succeeded) {
            let checked = match &op.request {
                Some(Request::RequestRange(range)) => self.check_range(range),
                Some(Request::RequestPut(put)) => self.check_put(put)?,
                Some(Request::RequestDeleteRange(delete)) => {
                    self.note_delete(delete);
                    Ok(())
                }
                Some(Request::RequestTxn(inner)) => match nested.next() {
                    Some(path) => self.walk(inner, path)?,
                    None => Ok(()),
                },
                None => Ok(()),
            };
            if checked.is_err() {
                return Ok(checked);
            }
        }
        Ok(Ok(()))
    }

    /// Only revision 0 means the latest here, unlike in a plain range.
    fn check_range(&self, range: &pb::RangeRequest) -> Result<(), Refusal> {
        if range.revision > self.txn.revision() {
            return Err(Refusal::FutureRevision);
        }
        if range.revision != 0 && range.revision < self.txn.compacted() {
            return Err(Refusal::Compacted);
        }
        Ok(())
    }

    fn check_put(&mut self, put: &pb::PutRequest) -> Result<Result<(), Refusal>, StorageError> {
        if put.lease != 0 && !self.leases.contains(put.lease) {
            return Ok(Err(Refusal::LeaseNotFound));
        }
        if (put.ignore_value || put.ignore_lease) && !self.exists_on_path(&put.key)? {
            return Ok(Err(Refusal::KeyNotFound));
        }
        self.put.insert(put.key.clone());
        Ok(Ok(()))
    }

    fn exists_on_path(&self, key: &Bytes) -> Result<bool, StorageError> {
        if self.put.contains(key) {
            return Ok(true);
        }
        if self.deleted.contains(key) {
            return Ok(false);
        }
        Ok(self.txn.head(key)?.is_some())
    }

    fn note_delete(&mut self, delete: &pb::DeleteRangeRequest) {
        let range = KeyRange::from_request(&delete.key, &delete.range_end);
        if range.is_empty() {
            return;
        }
        while let Some(key) = self.put.range::<[u8], _>(range.bounds()).next().cloned() {
            self.put.remove(&key);
        }
        self.deleted.insert(&range);
    }
}

fn execute(
    txn: &mut Txn<'_, '_>,
    request: &pb::TxnRequest,
    path: &Path,
) -> Result<pb::TxnResponse, StorageError> {
    let mut nested = path.nested.iter();
    let mut responses = Vec::new();
    for op in branch(request, path.succeeded) {
        let response = match &op.request {
            Some(Request::RequestRange(request)) => Response::ResponseRange(execute_range(txn, request)?),
            Some(Request::RequestPut(request)) => {
                let mut response = execute_put(txn, request)?;
                response.header = header(txn);
                Response::ResponsePut(response)
            }
            Some(Request::RequestDeleteRange(request)) => {
                let mut response = execute_delete(txn, request)?;
                response.header = header(txn);
                Response::ResponseDeleteRange(response)
            }
            Some(Request::RequestTxn(inner)) => {
                let path = nested.next().expect("the path has an entry for each nested transaction on it");
                let mut response = execute(txn, inner, path)?;
                response.header = Some(pb::ResponseHeader::default());
                Response::ResponseTxn(response)
            }
            None => continue,
        };
        responses.push(pb::ResponseOp { response: Some(response) });
    }
    Ok(pb::TxnResponse { header: None, succeeded: path.succeeded, responses })
}

/// What the operations on a path count for.
fn tally(request: &pb::TxnRequest, path: &Path) -> Tally {
    let mut nested = path.nested.iter();
    let mut sum = Tally::default();
    for op in branch(request, path.succeeded) {
        let more = match &op.request {
            Some(Request::RequestRange(_)) => Tally { ranges: 1, ..Tally::default() },
            Some(Request::RequestPut(put)) => tally_put(put),
            Some(Request::RequestDeleteRange(delete)) => tally_delete(delete),
            Some(Request::RequestTxn(inner)) => {
                nested.next().map(|path| tally(inner, path)).unwrap_or_default()
            }
            None => Tally::default(),
        };
        sum = Tally {
            ranges: sum.ranges + more.ranges,
            puts: sum.puts + more.puts,
            deletes: sum.deletes + more.deletes,
            put_bytes: sum.put_bytes + more.put_bytes,
        };
    }
    sum
}

/// The compares on a path, each of which reads a range.
fn compares(request: &pb::TxnRequest, path: &Path) -> u64 {
    let mut nested = path.nested.iter();
    let inner = branch(request, path.succeeded).iter().filter_map(|op| match &op.request {
        Some(Request::RequestTxn(inner)) => nested.next().map(|path| compares(inner, path)),
        _ => None,
    });
    request.compare.len() as u64 + inner.sum::<u64>()
}

/// A put that needs the previous version reads it first.
fn tally_put(put: &pb::PutRequest) -> Tally {
    let reads = put.prev_kv || put.ignore_value || put.ignore_lease;
    let put_bytes = (put.key.len() + put.value.len()) as u64;
    Tally { ranges: u64::from(reads), puts: 1, deletes: 0, put_bytes }
}

fn tally_delete(delete: &pb::DeleteRangeRequest) -> Tally {
    Tally { ranges: u64::from(delete.prev_kv), deletes: 1, ..Tally::default() }
}

fn header(txn: &Txn<'_, '_>) -> Option<pb::ResponseHeader> {
    Some(pb::ResponseHeader { revision: txn.revision(), ..Default::default() })
}

fn execute_range(txn: &Txn<'_, '_>, request: &pb::RangeRequest) -> Result<pb::RangeResponse, StorageError> {
    let mut response = if request.revision > 0 && request.revision <= txn.store().revision() {
        range::execute(&range::At { store: txn.store(), revision: request.revision }, request)?
    } else {
        range::execute(txn, request)?
    };
    response.header = header(txn);
    Ok(response)
}

fn execute_put(txn: &mut Txn<'_, '_>, request: &pb::PutRequest) -> Result<pb::PutResponse, StorageError> {
    let mut value = request.value.clone();
    let mut lease = request.lease;
    let mut prev_kv = None;
    if request.prev_kv || request.ignore_value {
        if let Some((meta, previous)) = txn.get(&request.key)? {
            if request.ignore_value {
                value = previous.clone();
            }
            if request.ignore_lease {
                lease = meta.lease;
            }
            if request.prev_kv {
                prev_kv = Some(key_value(request.key.clone(), &meta, previous));
            }
        }
    } else if request.ignore_lease
        && let Some(meta) = txn.head(&request.key)?
    {
        lease = meta.lease;
    }
    txn.put(request.key.clone(), value, lease)?;
    Ok(pb::PutResponse { header: None, prev_kv })
}

fn execute_delete(
    txn: &mut Txn<'_, '_>,
    request: &pb::DeleteRangeRequest,
) -> Result<pb::DeleteRangeResponse, StorageError> {
    let range = KeyRange::from_request(&request.key, &request.range_end);
    let mut keys = Vec::new();
    let mut prev_kvs = Vec::new();
    match range.as_single() {
        Some(key) if !request.prev_kv => keys.push(key.clone()),
        _ => txn.range(&range, |key, meta, value| {
            let key = Bytes::copy_from_slice(key);
            if request.prev_kv {
                prev_kvs.push(key_value(key.clone(), meta, Bytes::copy_from_slice(value)));
            }
            keys.push(key);
            true
        })?,
    }
    let mut deleted = 0;
    for key in &keys {
        deleted += i64::from(txn.delete(key)?);
    }
    Ok(pb::DeleteRangeResponse { header: None, deleted, prev_kvs })
}

fn key_value(key: Bytes, meta: &KeyMeta, value: Bytes) -> mvccpb::KeyValue {
    mvccpb::KeyValue {
        key,
        create_revision: meta.create_revision,
        mod_revision: meta.modified.main,
        version: meta.version,
        value,
        lease: meta.lease,
    }
}
