//! The shape of requests, before anything else looks at them. etcd: `server/etcdserver/api/v3rpc/key.go`.

use std::collections::BTreeSet;

use bytes::Bytes;

use super::error::Error;
use crate::proto::etcdserverpb as pb;
use crate::proto::etcdserverpb::range_request::{SortOrder, SortTarget};
use crate::proto::etcdserverpb::request_op::Request;
use crate::storage::mvcc::{KeyRange, KeyRanges, RangeEnd};

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

/// Transactions nested in each other. The log's decoder refuses more than a hundred messages in each other, so does the
/// one that requests come through, and what the first cannot read must never be proposed. etcd has no such bound.
const NESTED_TXNS_MAX: usize = 48;

/// Checks a transaction: sizes and operations first, then keys that it would change twice.
pub(super) fn txn(request: &pb::TxnRequest, max_ops: usize) -> Result<(), Error> {
    shape(request, max_ops, NESTED_TXNS_MAX)?;
    changes(&request.success)?;
    changes(&request.failure)?;
    Ok(())
}

/// The budget of a nested transaction is what its parent's widest list leaves.
fn shape(request: &pb::TxnRequest, budget: usize, nested_max: usize) -> Result<(), Error> {
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
            Some(Request::RequestTxn(_)) if nested_max == 0 => return Err(Error::TooManyOps),
            Some(Request::RequestTxn(request)) => shape(request, budget - widest, nested_max - 1)?,
            None => return Err(Error::KeyNotFound),
        }
    }
    Ok(())
}

/// The keys put and deleted by some operations.
#[derive(Default)]
struct Changes {
    puts: BTreeSet<Bytes>,
    deletes: KeyRanges,
}

impl Changes {
    fn has(&self, key: &Bytes) -> bool {
        self.puts.contains(key) || self.deletes.contains(key)
    }

    fn delete(&mut self, request: &pb::DeleteRangeRequest) {
        let (start, range_end) = (request.key.clone(), request.range_end.clone());
        // An end of the single byte 0x00 covers nothing here: etcd takes it literally in this check.
        let end = if range_end.is_empty() { RangeEnd::Single } else { RangeEnd::Before(range_end) };
        self.deletes.insert(&KeyRange { start, end });
    }

    fn extend(&mut self, mut other: Changes) {
        if self.puts.len() < other.puts.len() {
            std::mem::swap(&mut self.puts, &mut other.puts);
        }
        self.puts.extend(other.puts);
        self.deletes.extend(other.deletes);
    }
}

/// Refuses a branch that changes a key twice; returns what it changes, nested branches included.
///
/// A nested transaction is checked against the deletes of its level and against what came before it: a delete in a later
/// one does not see it. Its own two branches exclude each other. etcd: `checkIntervals`
fn changes(ops: &[pb::RequestOp]) -> Result<Changes, Error> {
    let mut level = Changes::default();
    for op in ops {
        if let Some(Request::RequestDeleteRange(delete)) = &op.request {
            level.delete(delete);
        }
    }
    for op in ops {
        let Some(Request::RequestTxn(nested)) = &op.request else { continue };
        let success = changes(&nested.success)?;
        let failure = changes(&nested.failure)?;
        if success.puts.iter().chain(&failure.puts).any(|key| level.has(key)) {
            return Err(Error::DuplicateKey);
        }
        level.extend(success);
        level.extend(failure);
    }
    for op in ops {
        let Some(Request::RequestPut(put)) = &op.request else { continue };
        if level.has(&put.key) {
            return Err(Error::DuplicateKey);
        }
        level.puts.insert(put.key.clone());
    }
    Ok(level)
}

#[cfg(test)]
mod tests;
