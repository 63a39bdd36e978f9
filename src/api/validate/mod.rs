//! The shape of requests, before anything else looks at them. etcd: `server/etcdserver/api/v3rpc/key.go`.

use std::collections::BTreeSet;

use bytes::Bytes;

use super::error::Error;
use crate::proto::etcdserverpb as pb;
use crate::proto::etcdserverpb::range_request::{SortOrder, SortTarget};
use crate::proto::etcdserverpb::request_op::Request;

/// Checks a range.
pub(super) fn range(request: &pb::RangeRequest) -> Result<(), Error> {
    if request.key.is_empty() {
        return Err(Error::EmptyKey);
    }
    if SortOrder::try_from(request.sort_order).is_err() || SortTarget::try_from(request.sort_target).is_err()
    {
        return Err(Error::InvalidSortOption);
    }
    Ok(())
}

/// Checks a put.
pub(super) fn put(request: &pb::PutRequest) -> Result<(), Error> {
    if request.key.is_empty() {
        return Err(Error::EmptyKey);
    }
    if request.ignore_value && !request.value.is_empty() {
        return Err(Error::ValueProvided);
    }
    if request.ignore_lease && request.lease != 0 {
        return Err(Error::LeaseProvided);
    }
    Ok(())
}

/// Checks a range delete.
pub(super) fn delete_range(request: &pb::DeleteRangeRequest) -> Result<(), Error> {
    if request.key.is_empty() { Err(Error::EmptyKey) } else { Ok(()) }
}

/// Checks a transaction: sizes and operations first, then keys that it would change twice.
pub(super) fn txn(request: &pb::TxnRequest, max_ops: usize) -> Result<(), Error> {
    shape(request, max_ops)?;
    changes(&request.success)?;
    changes(&request.failure)?;
    Ok(())
}

/// The budget of a nested transaction is what its parent's widest list leaves.
fn shape(request: &pb::TxnRequest, budget: usize) -> Result<(), Error> {
    let widest = request.compare.len().max(request.success.len()).max(request.failure.len());
    if widest > budget {
        return Err(Error::TooManyOps);
    }
    if request.compare.iter().any(|compare| compare.key.is_empty()) {
        return Err(Error::EmptyKey);
    }
    for op in request.success.iter().chain(&request.failure) {
        match &op.request {
            Some(Request::RequestRange(request)) => range(request)?,
            Some(Request::RequestPut(request)) => put(request)?,
            Some(Request::RequestDeleteRange(request)) => delete_range(request)?,
            Some(Request::RequestTxn(request)) => shape(request, budget - widest)?,
            None => return Err(Error::KeyNotFound),
        }
    }
    Ok(())
}

/// The keys put and the ranges deleted by some operations.
#[derive(Default)]
struct Changes {
    puts: BTreeSet<Bytes>,
    deletes: Vec<(Bytes, Bytes)>,
}

impl Changes {
    /// A delete whose end is the single byte 0x00 covers nothing here: etcd takes it literally in this check.
    fn deleted(&self, key: &Bytes) -> bool {
        self.deletes
            .iter()
            .any(|(start, end)| if end.is_empty() { key == start } else { start <= key && key < end })
    }
}

/// Refuses a branch that changes a key twice; returns what it changes, nested branches included.
///
/// etcd: `checkIntervals`
fn changes(ops: &[pb::RequestOp]) -> Result<Changes, Error> {
    let mut level = Changes::default();
    for op in ops {
        if let Some(Request::RequestDeleteRange(delete)) = &op.request {
            level.deletes.push((delete.key.clone(), delete.range_end.clone()));
        }
    }
    for op in ops {
        let Some(Request::RequestTxn(nested)) = &op.request else { continue };
        let success = changes(&nested.success)?;
        let failure = changes(&nested.failure)?;
        for key in success.puts.iter().chain(&failure.puts) {
            if level.deleted(key) || level.puts.contains(key) {
                return Err(Error::DuplicateKey);
            }
        }
        level.puts.extend(success.puts);
        level.puts.extend(failure.puts);
        level.deletes.extend(success.deletes);
        level.deletes.extend(failure.deletes);
    }
    for op in ops {
        let Some(Request::RequestPut(put)) = &op.request else { continue };
        if level.deleted(&put.key) || !level.puts.insert(put.key.clone()) {
            return Err(Error::DuplicateKey);
        }
    }
    Ok(level)
}
