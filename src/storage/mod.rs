//! Bytes on disk: the RocksDB engine, every stored key, the Raft log, and the multi-version store.
//!
//! This is the only module that names RocksDB, and [`schema`] is the only place that encodes a stored key.
//! Nothing here knows Raft, gRPC or time. [`log`] holds what was proposed, in order, and its sync is the only one that a
//! write waits for; the engine follows it.

pub mod bolt;
pub mod data_dir;
mod engine;
pub mod etcd;
pub mod lives;
mod load;
#[cfg_attr(feature = "sim", allow(dead_code, reason = "what its threads run, tasks do there"))]
pub mod log;
pub mod mvcc;
mod restoring;
pub mod schema;
mod scrub;
pub mod snapshot;
mod space;

pub use engine::{Engine, EngineOptions, EngineSizes, FORMAT_LEVELLED, StorageError};
pub use restoring::Restoring;
pub use scrub::Scrub;
pub use space::Space;
