//! Range with all its options, over the store or inside a transaction. etcd: `server/etcdserver/txn/range.go`.

use bytes::Bytes;

use crate::proto::etcdserverpb::range_request::{SortOrder, SortTarget};
use crate::proto::etcdserverpb::{RangeRequest, RangeResponse};
use crate::proto::mvccpb;
use crate::storage::StorageError;
use crate::storage::mvcc::write::Txn;
use crate::storage::mvcc::{KeyRange, Store};
use crate::storage::schema::KeyMeta;

/// Sees a key, what is known of it, and its value; false ends the visit.
pub type Visit<'v> = dyn FnMut(&[u8], &KeyMeta, &[u8]) -> bool + 'v;

/// Where a range reads from.
pub trait Source {
    /// Visits live keys in order until `visit` returns false.
    fn visit(&self, range: &KeyRange, visit: &mut Visit<'_>) -> Result<(), StorageError>;

    /// Counts live keys.
    fn count(&self, range: &KeyRange) -> Result<i64, StorageError>;
}

/// The store at a revision.
pub struct At<'s> {
    /// The store.
    pub store: &'s Store,
    /// The revision, already checked.
    pub revision: i64,
}

impl Source for At<'_> {
    fn visit(&self, range: &KeyRange, visit: &mut Visit<'_>) -> Result<(), StorageError> {
        if range.is_empty() {
            return Ok(());
        }
        if let Some(key) = range.as_single() {
            if let Some((meta, value)) = self.store.get(key, self.revision)? {
                visit(key, &meta, &value);
            }
            return Ok(());
        }
        let mut scan = self.store.scan(range, self.revision);
        while let Some(record) = scan.next()? {
            if !visit(record.key, &record.meta, record.value) {
                break;
            }
        }
        Ok(())
    }

    fn count(&self, range: &KeyRange) -> Result<i64, StorageError> {
        self.store.count(range, self.revision)
    }
}

impl Source for Txn<'_, '_> {
    fn visit(&self, range: &KeyRange, visit: &mut Visit<'_>) -> Result<(), StorageError> {
        self.range(range, visit)
    }

    fn count(&self, range: &KeyRange) -> Result<i64, StorageError> {
        let mut count = 0;
        self.range(range, |_, _, _| {
            count += 1;
            true
        })?;
        Ok(count)
    }
}

/// True if the answer comes in key order with the limit applied while reading.
pub fn is_default_order(request: &RangeRequest) -> bool {
    request.sort_order == SortOrder::None as i32
        || (request.sort_order == SortOrder::Ascend as i32 && request.sort_target == SortTarget::Key as i32)
}

/// True if keys are dropped by their revisions.
pub fn has_filters(request: &RangeRequest) -> bool {
    request.min_mod_revision != 0
        || request.max_mod_revision != 0
        || request.min_create_revision != 0
        || request.max_create_revision != 0
}

/// Executes a checked range request; the header is left to the caller.
pub fn execute(source: &dyn Source, request: &RangeRequest) -> Result<RangeResponse, StorageError> {
    let range = KeyRange::from_request(&request.key, &request.range_end);
    if request.count_only {
        return Ok(RangeResponse { count: source.count(&range)?, ..Default::default() });
    }
    let limit = usize::try_from(request.limit).unwrap_or(0);
    let pushdown = is_default_order(request) && !has_filters(request);
    let fetch = if pushdown && limit > 0 { limit + 1 } else { usize::MAX };
    let index_only = request.keys_only && request.sort_target != SortTarget::Value as i32;
    let mut seen = 0;
    let mut kvs = Vec::new();
    source.visit(&range, &mut |key, meta, value| {
        seen += 1;
        if passes(request, meta) {
            kvs.push(mvccpb::KeyValue {
                key: Bytes::copy_from_slice(key),
                create_revision: meta.create_revision,
                mod_revision: meta.modified.main,
                version: meta.version,
                value: if index_only { Bytes::new() } else { Bytes::copy_from_slice(value) },
                lease: if index_only { 0 } else { meta.lease },
            });
        }
        seen < fetch
    })?;
    let cut_short = fetch != usize::MAX && seen == fetch;
    let count = if cut_short { source.count(&range)? } else { i64::try_from(seen).unwrap_or(i64::MAX) };
    sort(&mut kvs, request);
    let more = limit > 0 && kvs.len() > limit;
    if more {
        kvs.truncate(limit);
    }
    if request.keys_only {
        for kv in &mut kvs {
            kv.value = Bytes::new();
        }
    }
    Ok(RangeResponse { header: None, kvs, more, count })
}

fn passes(request: &RangeRequest, meta: &KeyMeta) -> bool {
    let within = |value: i64, min: i64, max: i64| (min == 0 || value >= min) && (max == 0 || value <= max);
    within(meta.modified.main, request.min_mod_revision, request.max_mod_revision)
        && within(meta.create_revision, request.min_create_revision, request.max_create_revision)
}

/// Sorts by the request's target; a target other than the key without an order sorts ascending, as etcd does. Equal keys
/// stay in key order, descending too, as they do in etcd while there are few.
fn sort(kvs: &mut [mvccpb::KeyValue], request: &RangeRequest) {
    let target = SortTarget::try_from(request.sort_target).unwrap_or(SortTarget::Key);
    let compare = |a: &mvccpb::KeyValue, b: &mvccpb::KeyValue| match target {
        SortTarget::Key => a.key.cmp(&b.key),
        SortTarget::Version => a.version.cmp(&b.version),
        SortTarget::Create => a.create_revision.cmp(&b.create_revision),
        SortTarget::Mod => a.mod_revision.cmp(&b.mod_revision),
        SortTarget::Value => a.value.cmp(&b.value),
    };
    if request.sort_order == SortOrder::Descend as i32 {
        kvs.sort_by(|a, b| compare(b, a));
    } else if target != SortTarget::Key {
        kvs.sort_by(compare);
    }
}
