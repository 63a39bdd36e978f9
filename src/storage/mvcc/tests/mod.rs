//! The store against an in-memory model that keeps everything, and etcd's published hashes.
//!
//! [`model`] is the model, [`random`] random histories against it with flushes, rewrites, restarts and crashes,
//! [`counts`] counts over many keys, [`readers`] reads beside commits.

mod counts;
mod hashes;
mod model;
mod random;
mod readers;

use bytes::Bytes;

use super::write::{Txn, WriteRun};
use super::*;

fn open(dir: &Path) -> Store {
    let engine = EngineOptions { memtable_bytes: 4 << 20, block_cache_bytes: 4 << 20 };
    // Room for a few dozen heads: most lookups of these tests miss.
    Store::open(dir, StoreOptions { engine, heads_bytes: 1 << 13 }).expect("the store opens")
}

/// One transaction, committed alone.
fn commit(store: &Store, change: impl FnOnce(&mut Txn<'_, '_>)) -> i64 {
    let mut run = WriteRun::new(store);
    let mut txn = run.begin();
    change(&mut txn);
    txn.finish();
    run.commit().expect("the run commits");
    store.revision()
}

fn put(store: &Store, key: &'static str, value: &'static str, lease: i64) -> i64 {
    commit(store, |txn| {
        txn.put(key.into(), value.into(), lease).expect("the put is written");
    })
}

fn delete(store: &Store, key: &'static str) -> i64 {
    commit(store, |txn| assert!(txn.delete(&key.into()).expect("the delete is written")))
}

/// Compacts logically; the second half is left to the test.
fn compact(store: &Store, revision: i64) {
    let mut run = WriteRun::new(store);
    run.compact(revision);
    run.commit().expect("the compaction commits");
}

fn finish(store: &Store, previous: i64, revision: i64) {
    store.finish_compaction(previous, revision).expect("the compaction finishes");
}

fn everything() -> KeyRange {
    KeyRange { start: Bytes::new(), end: RangeEnd::Unbounded }
}
