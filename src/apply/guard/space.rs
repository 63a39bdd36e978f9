//! What a request may add to the database, for the quota. etcd: `server/storage/quota.go`.

use crate::proto::etcdserverpb as pb;
use crate::proto::skegpb::command::Kind;

/// Assumed bookkeeping of one key, in bytes.
const KEY_OVERHEAD_BYTES: u64 = 256;
/// Assumed size of a lease, in bytes.
const LEASE_BYTES: u64 = 64;

/// Bytes that a command may add; 0 for what never grows the database and so is never refused for space.
pub fn cost(command: &Kind) -> u64 {
    match command {
        Kind::Put(put) => put_cost(put),
        Kind::Txn(txn) => txn_cost(txn),
        Kind::LeaseGrant(_) => LEASE_BYTES,
        _ => 0,
    }
}

fn put_cost(put: &pb::PutRequest) -> u64 {
    KEY_OVERHEAD_BYTES + put.key.len() as u64 + put.value.len() as u64
}

fn txn_cost(txn: &pb::TxnRequest) -> u64 {
    branch_cost(&txn.success).max(branch_cost(&txn.failure))
}

fn branch_cost(ops: &[pb::RequestOp]) -> u64 {
    ops.iter()
        .map(|op| match &op.request {
            Some(pb::request_op::Request::RequestPut(put)) => put_cost(put),
            Some(pb::request_op::Request::RequestTxn(txn)) => txn_cost(txn),
            _ => 0,
        })
        .sum()
}
