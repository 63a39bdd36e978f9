//! What a command, or a read of the same shape, must be allowed to do. etcd: `server/etcdserver/apply/auth.go`.

use crate::auth::{Access, Demand};
use crate::proto::etcdserverpb as pb;
use crate::proto::etcdserverpb::request_op::Request;
use crate::proto::skegpb::command::Kind;

/// What a command demands of the client that asked for it; `asked` is false for one that no client is named for.
///
/// Members propose compactions, alarms and changes of the members also of their own. A client's are not proposed without saying
/// who it is while authentication is on.
pub fn demand(command: &Kind, asked: bool) -> Demand {
    match command {
        Kind::Put(put) => Demand::Keys(put_accesses(put)),
        Kind::DeleteRange(delete) => Demand::Keys(delete_accesses(delete)),
        Kind::Txn(txn) => txn_demand(txn),
        Kind::LeaseGrant(_) => Demand::Known,
        Kind::LeaseRevoke(_) => Demand::AttachedKeys(Vec::new()),
        Kind::Alarm(request) if asked && request.action == pb::alarm_request::AlarmAction::Get as i32 => {
            Demand::Known
        }
        Kind::Compaction(_)
        | Kind::Alarm(_)
        | Kind::DowngradeSet(_)
        | Kind::MemberAdd(_)
        | Kind::MemberRemove(_)
        | Kind::MemberUpdate(_)
        | Kind::MemberPromote(_) => {
            if asked {
                Demand::Root
            } else {
                Demand::Nothing
            }
        }
        Kind::AuthEnable(_)
        | Kind::AuthDisable(_)
        | Kind::UserAdd(_)
        | Kind::UserDelete(_)
        | Kind::UserChangePassword(_)
        | Kind::UserGrantRole(_)
        | Kind::UserRevokeRole(_)
        | Kind::RoleAdd(_)
        | Kind::RoleDelete(_)
        | Kind::RoleGrantPermission(_)
        | Kind::RoleRevokePermission(_) => Demand::Root,
        // Of the members' own.
        Kind::MemberKeepOnly(_)
        | Kind::MemberAttributes(_)
        | Kind::ClusterVersionSet(_)
        | Kind::ClusterLevelSet(_)
        | Kind::LeaseCheckpoint(_)
        | Kind::LeaseExpire(_)
        | Kind::AuthIssue(_) => Demand::Nothing,
    }
}

/// What a transaction demands: all its compares and all operations of both branches, nested ones included.
pub fn txn_demand(txn: &pb::TxnRequest) -> Demand {
    let mut accesses = Vec::new();
    put_txn_accesses(txn, &mut accesses);
    Demand::Keys(accesses)
}

/// The leases whose attached keys a command must be allowed to change.
pub fn leases(command: &Kind) -> Vec<i64> {
    let mut ids = Vec::new();
    match command {
        Kind::Put(put) => ids.push(put.lease),
        Kind::Txn(txn) => put_txn_leases(txn, &mut ids),
        Kind::LeaseRevoke(request) => ids.push(request.id),
        _ => {}
    }
    ids.retain(|id| *id != 0);
    ids.sort_unstable();
    ids.dedup();
    ids
}

fn put_txn_accesses(txn: &pb::TxnRequest, accesses: &mut Vec<Access>) {
    accesses.extend(txn.compare.iter().map(|compare| Access::read(&compare.key, &compare.range_end)));
    for op in txn.success.iter().chain(&txn.failure) {
        match &op.request {
            Some(Request::RequestRange(range)) => accesses.push(Access::read(&range.key, &range.range_end)),
            Some(Request::RequestPut(put)) => accesses.extend(put_accesses(put)),
            Some(Request::RequestDeleteRange(delete)) => accesses.extend(delete_accesses(delete)),
            Some(Request::RequestTxn(inner)) => put_txn_accesses(inner, accesses),
            None => {}
        }
    }
}

fn put_txn_leases(txn: &pb::TxnRequest, ids: &mut Vec<i64>) {
    for op in txn.success.iter().chain(&txn.failure) {
        match &op.request {
            Some(Request::RequestPut(put)) => ids.push(put.lease),
            Some(Request::RequestTxn(inner)) => put_txn_leases(inner, ids),
            _ => {}
        }
    }
}

fn put_accesses(put: &pb::PutRequest) -> Vec<Access> {
    let single = bytes::Bytes::new();
    let mut accesses = vec![Access::write(&put.key, &single)];
    if put.prev_kv {
        accesses.push(Access::read(&put.key, &single));
    }
    accesses
}

fn delete_accesses(delete: &pb::DeleteRangeRequest) -> Vec<Access> {
    let mut accesses = vec![Access::write(&delete.key, &delete.range_end)];
    if delete.prev_kv {
        accesses.push(Access::read(&delete.key, &delete.range_end));
    }
    accesses
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::*;
    use crate::auth::Right;

    fn op(request: Request) -> pb::RequestOp {
        pb::RequestOp { request: Some(request) }
    }

    fn key(name: &'static str) -> Bytes {
        Bytes::from_static(name.as_bytes())
    }

    #[test]
    fn a_transaction_demands_all_of_both_branches_at_any_depth() {
        let put = pb::PutRequest { key: key("p"), prev_kv: true, lease: 3, ..Default::default() };
        let delete = pb::DeleteRangeRequest { key: key("d"), range_end: key("e"), prev_kv: true };
        let range = pb::RangeRequest { key: key("r"), ..Default::default() };
        let inner = pb::TxnRequest {
            compare: vec![pb::Compare { key: key("c"), range_end: key("d"), ..Default::default() }],
            success: vec![],
            failure: vec![op(Request::RequestPut(put)), op(Request::RequestDeleteRange(delete))],
        };
        let txn = pb::TxnRequest {
            compare: vec![],
            success: vec![op(Request::RequestRange(range))],
            failure: vec![op(Request::RequestTxn(inner))],
        };
        let Demand::Keys(accesses) = txn_demand(&txn) else { panic!("it is about keys") };
        let shown: Vec<_> = accesses.iter().map(|access| (access.right, &access.range.start[..])).collect();
        let (read, write) = (Right::Read, Right::Write);
        assert_eq!(
            shown,
            [(read, &b"r"[..]), (read, b"c"), (write, b"p"), (read, b"p"), (write, b"d"), (read, b"d")]
        );
        assert_eq!(leases(&Kind::Txn(txn)), [3]);
    }
}
