//! The etcd 3.7 wire contract and skeg's own peer and log messages.
//!
//! The `.proto` files under `proto/etcd` and `proto/grpc` hold the whole client contract: packages,
//! names, numbers, types and streaming are etcd's, files and comments ours. `tests/contract` compares
//! them with the descriptors that etcd ships. `proto/skeg` holds what skeg stores and sends to peers.
//!
//! Generated code comes in three passes. The messages are in one module per package. [`server`] has
//! the service traits; there the bulky responses (RangeStream, Watch) are [`wire::Encoded`], so that
//! they are encoded once, from storage slices, and KV has its stream alone: its other calls are read
//! and written by hand. [`client`] has clients with the plain types.
//! All `bytes` fields are [`bytes::Bytes`]: a decoded request shares the buffer it came in.
//!
//! Left out: the HTTP annotations and field versions of etcd's files, and its internal Raft messages.

mod generated;
mod secret;
pub mod wire;

pub use generated::{authpb, client, etcdserverpb, health, mvccpb, server, skegpb, v3electionpb, v3lockpb};

/// The descriptors of all packages: an encoded `google.protobuf.FileDescriptorSet`.
pub const FILE_DESCRIPTOR_SET: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/descriptors.bin"));

#[cfg(test)]
mod tests;
