//! Every rule about the shape of requests, also what etcd does not notice.

use prost::Message;

use super::*;
use crate::proto::skegpb::Command;
use crate::proto::skegpb::command::Kind;

fn bytes(text: &str) -> Bytes {
    Bytes::copy_from_slice(text.as_bytes())
}

fn op(request: Request) -> pb::RequestOp {
    pb::RequestOp { request: Some(request) }
}

fn get(key: &str) -> pb::RequestOp {
    op(Request::RequestRange(pb::RangeRequest { key: bytes(key), ..Default::default() }))
}

fn put_op(key: &str) -> pb::RequestOp {
    op(Request::RequestPut(pb::PutRequest { key: bytes(key), ..Default::default() }))
}

fn delete(key: &str, range_end: &str) -> pb::RequestOp {
    let request = pb::DeleteRangeRequest { key: bytes(key), range_end: bytes(range_end), prev_kv: false };
    op(Request::RequestDeleteRange(request))
}

fn then_else(success: Vec<pb::RequestOp>, failure: Vec<pb::RequestOp>) -> pb::TxnRequest {
    pb::TxnRequest { compare: Vec::new(), success, failure }
}

fn nested(success: Vec<pb::RequestOp>, failure: Vec<pb::RequestOp>) -> pb::RequestOp {
    op(Request::RequestTxn(then_else(success, failure)))
}

/// The error of a transaction with these operations, in either branch.
fn refused(ops: Vec<pb::RequestOp>) -> Option<Error> {
    let success = txn(&then_else(ops.clone(), Vec::new()), 128);
    let failure = txn(&then_else(Vec::new(), ops), 128);
    assert_eq!(format!("{success:?}"), format!("{failure:?}"));
    success.err()
}

#[test]
fn single_requests() {
    let good = pb::RangeRequest { key: bytes("a"), ..Default::default() };
    assert!(range(&good).is_ok());
    assert!(matches!(range(&pb::RangeRequest { key: Bytes::new(), ..good.clone() }), Err(Error::EmptyKey)));
    for (sort_order, sort_target) in [(3, 0), (-1, 0), (0, 5), (0, -1)] {
        let request = pb::RangeRequest { sort_order, sort_target, ..good.clone() };
        assert!(matches!(range(&request), Err(Error::InvalidSortOption)));
    }
    // The key comes first.
    let both = pb::RangeRequest { sort_order: 9, ..Default::default() };
    assert!(matches!(range(&both), Err(Error::EmptyKey)));

    let good = pb::PutRequest { key: bytes("a"), value: bytes("v"), lease: 7, ..Default::default() };
    assert!(put(&good).is_ok());
    assert!(matches!(put(&pb::PutRequest { key: Bytes::new(), ..good.clone() }), Err(Error::EmptyKey)));
    let ignoring = pb::PutRequest { ignore_value: true, ignore_lease: true, ..good };
    assert!(matches!(put(&ignoring), Err(Error::ValueProvided)));
    let ignoring = pb::PutRequest { value: Bytes::new(), ..ignoring };
    assert!(matches!(put(&ignoring), Err(Error::LeaseProvided)));
    assert!(put(&pb::PutRequest { lease: 0, ..ignoring }).is_ok());

    let empty = pb::DeleteRangeRequest { range_end: bytes("z"), ..Default::default() };
    assert!(matches!(delete_range(&empty), Err(Error::EmptyKey)));
}

#[test]
fn operations_of_a_transaction_are_checked_in_both_branches() {
    assert!(refused(vec![get("a"), put_op("b"), delete("c", "")]).is_none());
    assert!(matches!(refused(vec![put_op("")]), Some(Error::EmptyKey)));
    assert!(matches!(refused(vec![get("")]), Some(Error::EmptyKey)));
    assert!(matches!(refused(vec![delete("", "")]), Some(Error::EmptyKey)));
    assert!(matches!(refused(vec![pb::RequestOp { request: None }]), Some(Error::KeyNotFound)));
    assert!(matches!(refused(vec![nested(vec![], vec![put_op("")])]), Some(Error::EmptyKey)));
    let compare = pb::Compare::default();
    let request = pb::TxnRequest {
        compare: vec![compare],
        success: vec![pb::RequestOp { request: None }],
        failure: vec![],
    };
    assert!(matches!(txn(&request, 128), Err(Error::EmptyKey)), "compares come first");
    // Shapes of both branches come before keys changed twice.
    let request = then_else(vec![put_op("a"), put_op("a")], vec![put_op("")]);
    assert!(matches!(txn(&request, 128), Err(Error::EmptyKey)));
}

#[test]
fn budgets_shrink_by_the_widest_list() {
    let wide = |count: usize| (0..count).map(|_| get("a")).collect::<Vec<_>>();
    assert!(txn(&then_else(wide(5), wide(3)), 5).is_ok());
    assert!(matches!(txn(&then_else(wide(5), wide(6)), 5), Err(Error::TooManyOps)));
    let compare = vec![pb::Compare { key: bytes("a"), ..Default::default() }; 6];
    let request = pb::TxnRequest { compare, success: wide(1), failure: Vec::new() };
    assert!(matches!(txn(&request, 5), Err(Error::TooManyOps)));
    // Two siblings get what their parent's two operations leave, each.
    let siblings = |count| then_else(vec![nested(wide(count), vec![]), nested(vec![], wide(count))], vec![]);
    assert!(txn(&siblings(3), 5).is_ok());
    assert!(matches!(txn(&siblings(4), 5), Err(Error::TooManyOps)));
}

#[test]
fn keys_changed_twice_are_refused() {
    let duplicate = |ops: Vec<pb::RequestOp>| match refused(ops) {
        None => false,
        Some(Error::DuplicateKey) => true,
        Some(other) => panic!("unexpected {other:?}"),
    };
    // One level: puts among each other and with deletes, in any order.
    assert!(duplicate(vec![put_op("a"), put_op("a")]));
    assert!(duplicate(vec![put_op("a"), delete("a", "")]));
    assert!(duplicate(vec![delete("a", "c"), put_op("b")]));
    assert!(duplicate(vec![put_op("b"), delete("a", "c")]));
    assert!(!duplicate(vec![put_op("c"), delete("a", "c")]));
    assert!(!duplicate(vec![put_op("ab"), delete("a", "")]));
    assert!(!duplicate(vec![delete("a", "c"), delete("b", "d"), delete("b", "")]));
    assert!(!duplicate(vec![get("a"), put_op("a"), get("a")]));
    // A put below the level, in either branch, against the level's deletes and puts.
    for inside in [nested(vec![put_op("b")], vec![]), nested(vec![], vec![put_op("b")])] {
        assert!(duplicate(vec![inside.clone(), delete("a", "c")]));
        assert!(duplicate(vec![inside.clone(), put_op("b")]));
        assert!(duplicate(vec![put_op("b"), inside.clone()]));
        assert!(duplicate(vec![nested(vec![delete("a", "c")], vec![]), inside.clone()]));
        assert!(duplicate(vec![nested(vec![], vec![put_op("b")]), inside.clone()]));
        assert!(duplicate(vec![nested(vec![nested(vec![put_op("b")], vec![])], vec![]), inside.clone()]));
        assert!(
            !duplicate(vec![inside, nested(vec![delete("a", "c")], vec![])]),
            "a later delete is not noticed"
        );
    }
    // A put of the level against deletes inside.
    assert!(duplicate(vec![put_op("b"), nested(vec![], vec![delete("a", "c")])]));
    assert!(duplicate(vec![nested(vec![nested(vec![delete("b", "")], vec![])], vec![]), put_op("b")]));
    // Branches of one transaction exclude each other.
    assert!(!duplicate(vec![nested(vec![put_op("b")], vec![put_op("b")])]));
    assert!(!duplicate(vec![nested(vec![put_op("b")], vec![delete("a", "c")])]));
    assert!(txn(&then_else(vec![put_op("b")], vec![put_op("b"), delete("c", "")]), 128).is_ok());
    // "From this key on" is taken literally, and covers nothing.
    assert!(!duplicate(vec![delete("a", "\0"), put_op("b")]));
    assert!(!duplicate(vec![delete("\0", "\0"), put_op("a")]));
    assert!(!duplicate(vec![delete("c", "a"), put_op("b")]));
}

/// A chain of nested transactions with a put at its end.
fn chain(levels: usize) -> pb::TxnRequest {
    (0..levels).fold(then_else(vec![put_op("a")], vec![]), |inner, _| {
        then_else(vec![op(Request::RequestTxn(inner))], vec![])
    })
}

/// What passes here is decoded from the log for ever after: it must be decodable there.
#[test]
fn what_is_proposed_can_be_read_from_the_log() {
    assert!(pb::TxnRequest::decode(chain(NESTED_TXNS_MAX + 1).encode_to_vec().as_slice()).is_ok());
    assert!(matches!(txn(&chain(NESTED_TXNS_MAX + 1), 1000), Err(Error::TooManyOps)));
    assert!(txn(&chain(NESTED_TXNS_MAX), 1000).is_ok());
    let command = Command { kind: Some(Kind::Txn(chain(NESTED_TXNS_MAX))), ..Command::default() };
    let decoded = crate::apply::decode(command.encode_to_vec().into()).expect("the log can be read");
    assert_eq!(Some(decoded.0), command.kind);
    let command = Command { kind: Some(Kind::Txn(chain(NESTED_TXNS_MAX + 1))), ..Command::default() };
    assert!(
        crate::apply::decode(command.encode_to_vec().into()).is_err(),
        "the bound is not lower than it must be"
    );
}

/// As many changes as a request may hold, all in nested transactions: checking them must not take their square.
#[test]
fn many_changes_are_checked_in_passable_time() {
    let many = |make: &dyn Fn(usize) -> pb::RequestOp| -> Vec<pb::RequestOp> {
        (0..50)
            .map(|outer| nested((0..700).map(|inner| make(outer * 700 + inner)).collect(), vec![]))
            .collect()
    };
    let mut ops = many(&|number| delete(&format!("d{number}"), ""));
    ops.extend(many(&|number| put_op(&format!("p{number}"))));
    let started = crate::clock::now();
    assert!(txn(&then_else(ops, vec![]), 100_000).is_ok());
    assert!(started.elapsed() < std::time::Duration::from_secs(10));
}
