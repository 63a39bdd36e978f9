//! The store against an in-memory model, and etcd's published hashes.

use bytes::Bytes;

use super::write::WriteRun;
use super::*;

fn open(dir: &Path) -> Store {
    let engine = EngineOptions { memtable_bytes: 4 << 20, block_cache_bytes: 4 << 20 };
    Store::open(dir, StoreOptions { engine, heads_bytes: 1 << 16 }).expect("the store opens")
}
