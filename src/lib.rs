//! skeg: a Raft-replicated, etcd-compatible key-value store.
//!
//! Modules in reading order; arrows between them point one way only (`tests/tidy.rs` checks it):
//!
//! ```text
//! main -> server -> gateway -> api -> raft -> apply -> auth, lease, cluster -> storage -> RocksDB
//!               \-> task ----------->/    \-> watch ------------------------->/
//! bin/utl -> utl ------------> raft, cluster, storage
//! ```
//!
//! Leaves, usable by all: `proto` (the wire types), `config`, `clock`, `blocking`, `telemetry`, and in the simulation `sim`.

pub use skeg_proto as proto;

pub mod api;
pub mod apply;
pub mod auth;
pub mod blocking;
pub mod clock;
pub mod cluster;
pub mod config;
pub mod gateway;
pub mod lease;
pub mod process;
pub mod raft;
pub mod server;
#[cfg(feature = "sim")]
pub mod sim;
pub mod storage;
pub mod task;
pub mod telemetry;
pub mod utl;
pub mod watch;
