//! Arbitrary requests: what passes the checks must be readable from the log, must apply without a panic as an in-memory
//! model says, and if it is refused must change nothing.
//!
//! The model knows etcd's rules and not our code: keys in one map per revision, a transaction as a recursion over it.
//! Input is a script that builds requests from few keys, or a `TxnRequest` as it comes off the wire. Run with coverage
//! by `fuzz/` and on seeds by the unit tests.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bytes::Bytes;
use prost::Message;

use super::validate;
use crate::apply::{self, Outcome, Refusal, Reply, Run, State};
use crate::lease;
use crate::proto::etcdserverpb as pb;
use crate::proto::etcdserverpb::compare::TargetUnion;
use crate::proto::etcdserverpb::request_op::Request;
use crate::proto::etcdserverpb::response_op::Response;
use crate::proto::mvccpb::KeyValue;
use crate::proto::skegpb::command::Kind;
use crate::proto::skegpb::{Command, LogId};
use crate::storage::EngineOptions;
use crate::storage::mvcc::{KeyRange, NEVER_COMPACTED, RangeEnd, Store, StoreOptions};

/// Scripts checked on one store before a new one is made, so that it stays small.
const SCRIPTS_PER_STORE: u32 = 500;
/// Commands in a script.
const COMMANDS_MAX: usize = 24;
/// Operations in a transaction, as by default.
const TXN_OPS_MAX: usize = 128;

/// Checks scripts one after the other; each starts without keys and leases.
pub struct Checker {
    dir: PathBuf,
    scripts: u32,
    state: State,
    model: Model,
    index: u64,
}

impl Checker {
    /// Makes a checker that keeps its stores in an empty directory.
    pub fn new(dir: &Path) -> Checker {
        let state = open(&dir.join("0"));
        Checker { dir: dir.to_owned(), scripts: 0, state, model: Model::new(), index: 0 }
    }

    /// Checks one script.
    ///
    /// # Panics
    /// When something does not hold.
    pub fn check(&mut self, script: &[u8]) {
        self.clear();
        let (kind, rest) = script.split_first().unwrap_or((&1, &[]));
        if kind % 2 == 0 {
            if let Ok(request) = pb::TxnRequest::decode(rest) {
                self.apply(vec![Kind::Txn(request)]);
            }
            return;
        }
        let mut script = Script { bytes: rest.iter(), revision: 0 };
        for _ in 0..COMMANDS_MAX {
            script.revision = self.model.revision;
            if script.bytes.len() == 0 {
                break;
            }
            let together = if script.below(4) == 0 { 3 } else { 1 };
            self.apply((0..together).map(|_| script.command()).collect());
        }
    }

    /// Takes away what the last script left.
    fn clear(&mut self) {
        self.scripts += 1;
        if self.scripts.is_multiple_of(SCRIPTS_PER_STORE) {
            let old = self.dir.join((self.scripts / SCRIPTS_PER_STORE - 1).to_string());
            self.state = open(&self.dir.join((self.scripts / SCRIPTS_PER_STORE).to_string()));
            std::fs::remove_dir_all(old).expect("an old store goes");
            (self.model, self.index) = (Model::new(), 0);
        }
        let everything = pb::DeleteRangeRequest {
            key: Bytes::from_static(b"\0"),
            range_end: Bytes::from_static(b"\0"),
            prev_kv: false,
        };
        let mut commands = vec![Kind::DeleteRange(everything)];
        commands
            .extend(self.model.leases.iter().map(|id| Kind::LeaseRevoke(pb::LeaseRevokeRequest { id: *id })));
        self.apply(commands);
        let past = self.model.past.split_off(&self.model.revision);
        self.model.past = past;
        let revision = self.model.revision;
        self.apply(vec![Kind::Compaction(pb::CompactionRequest { revision, physical: false })]);
    }

    /// Applies commands in one run, those that pass the checks, to the store and to the model.
    fn apply(&mut self, commands: Vec<Kind>) {
        let store = self.state.store();
        let mut run = Run::new(&self.state, &store);
        let mut expected_events = self.model.changes;
        for command in commands {
            let checked = match &command {
                Kind::Put(request) => validate::put(request),
                Kind::DeleteRange(request) => validate::delete_range(request),
                Kind::Txn(request) => validate::txn(request, TXN_OPS_MAX),
                _ => Ok(()),
            };
            if checked.is_err() {
                continue;
            }
            let proposed = Command { kind: Some(command.clone()), ..Command::default() }.encode_to_vec();
            let (read, ..) =
                apply::decode(proposed.into()).expect("what is proposed can be read from the log");
            assert_eq!(read, command);
            self.index += 1;
            let position = LogId { term: 1, node_id: 0, index: self.index };
            let outcome = run.apply(read, None, position).expect("the store works");
            assert_eq!(outcome, self.model.apply(&command), "{command:?}");
        }
        let effects = run.commit().expect("the store works");
        expected_events = self.model.changes - expected_events;
        assert_eq!(effects.events.len(), expected_events);
        self.compare();
    }

    /// The store must hold what the model holds.
    fn compare(&self) {
        let store = self.state.store();
        assert_eq!((store.revision(), store.compacted()), (self.model.revision, self.model.compacted));
        let all = KeyRange { start: Bytes::new(), end: RangeEnd::Unbounded };
        let mut scan = store.scan(&all, store.revision());
        let mut expected = self.model.live.values();
        while let Some(record) = scan.next().expect("the store works") {
            let found = KeyValue {
                key: Bytes::copy_from_slice(record.key),
                create_revision: record.meta.create_revision,
                mod_revision: record.meta.modified.main,
                version: record.meta.version,
                value: Bytes::copy_from_slice(record.value),
                lease: record.meta.lease,
            };
            assert_eq!(Some(&found), expected.next());
        }
        assert_eq!(expected.next(), None);
        for id in &self.model.leases {
            let found = lease::attached_keys(store.engine(), *id).expect("the store works");
            assert_eq!(found, self.model.attached(*id));
        }
    }
}

fn open(dir: &Path) -> State {
    let engine = EngineOptions { memtable_bytes: 8 << 20, block_cache_bytes: 4 << 20 };
    let store = Store::open(dir, StoreOptions { engine, heads_bytes: 1 << 12 }).expect("the store opens");
    State::open(Arc::new(store)).expect("the leases and members load")
}

/// Builds requests from bytes; when they run out, from zeroes.
struct Script<'s> {
    bytes: std::slice::Iter<'s, u8>,
    revision: i64,
}

impl Script<'_> {
    fn below(&mut self, bound: u8) -> u8 {
        self.bytes.next().map_or(0, |byte| byte % bound)
    }

    fn flag(&mut self) -> bool {
        self.below(4) == 1
    }

    fn key(&mut self) -> Bytes {
        const KEYS: [&[u8]; 8] = [b"a", b"a\0", b"ab", b"b", b"\0", b"\xff", b"c", b""];
        // The empty key is refused: it should be rare.
        let at = self.below(32);
        Bytes::from_static(KEYS[usize::from(if at == 31 { 7 } else { at % 7 })])
    }

    fn range_end(&mut self) -> Bytes {
        match self.below(4) {
            0 | 1 => Bytes::new(),
            2 => Bytes::from_static(b"\0"),
            _ => self.key(),
        }
    }

    /// A revision near the present, or none.
    fn near(&mut self) -> i64 {
        match self.below(8) {
            0..5 => 0,
            5 => self.revision - i64::from(self.below(6)),
            6 => self.revision + i64::from(self.below(3)),
            _ => -1,
        }
    }

    fn put(&mut self) -> pb::PutRequest {
        let (ignore_value, ignore_lease) = (self.flag(), self.flag());
        pb::PutRequest {
            key: self.key(),
            value: if ignore_value { Bytes::new() } else { vec![b'v'; usize::from(self.below(3))].into() },
            lease: if ignore_lease { 0 } else { i64::from(self.below(12) / 3) },
            prev_kv: self.flag(),
            ignore_value,
            ignore_lease,
        }
    }

    fn delete(&mut self) -> pb::DeleteRangeRequest {
        pb::DeleteRangeRequest { key: self.key(), range_end: self.range_end(), prev_kv: self.flag() }
    }

    fn range(&mut self) -> pb::RangeRequest {
        pb::RangeRequest {
            key: self.key(),
            range_end: self.range_end(),
            limit: i64::from(self.below(5)) - 1,
            revision: self.near(),
            sort_order: i32::from(self.below(6) / 2),
            sort_target: i32::from(self.below(6)),
            serializable: self.flag(),
            keys_only: self.flag(),
            count_only: self.flag(),
            min_mod_revision: if self.flag() { self.near() } else { 0 },
            max_mod_revision: if self.flag() { self.near() } else { 0 },
            min_create_revision: if self.flag() { self.near() } else { 0 },
            max_create_revision: if self.flag() { self.near() } else { 0 },
        }
    }

    fn compare(&mut self) -> pb::Compare {
        let number = i64::from(self.below(3));
        let target_union = match self.below(7) {
            0 => None,
            1 => Some(TargetUnion::Version(number)),
            2 => Some(TargetUnion::CreateRevision(self.near())),
            3 => Some(TargetUnion::ModRevision(self.near())),
            4 => Some(TargetUnion::Lease(number)),
            _ => Some(TargetUnion::Value(vec![b'v'; usize::from(self.below(3))].into())),
        };
        pb::Compare {
            result: i32::from(self.below(5)),
            target: i32::from(self.below(6)),
            key: self.key(),
            range_end: self.range_end(),
            target_union,
        }
    }

    fn txn(&mut self, depth: u8) -> pb::TxnRequest {
        let compare = (0..self.below(3)).map(|_| self.compare()).collect();
        let success = (0..self.below(4)).map(|_| self.op(depth)).collect();
        let failure = (0..self.below(3)).map(|_| self.op(depth)).collect();
        pb::TxnRequest { compare, success, failure }
    }

    fn op(&mut self, depth: u8) -> pb::RequestOp {
        let request = match self.below(if depth == 0 { 8 } else { 10 }) {
            0..3 => Request::RequestPut(self.put()),
            3..5 => Request::RequestDeleteRange(self.delete()),
            5..8 => Request::RequestRange(self.range()),
            _ => Request::RequestTxn(self.txn(depth - 1)),
        };
        pb::RequestOp { request: Some(request) }
    }

    fn command(&mut self) -> Kind {
        match self.below(16) {
            0..4 => Kind::Put(self.put()),
            4 | 5 => Kind::DeleteRange(self.delete()),
            6..12 => Kind::Txn(self.txn(3)),
            12 => Kind::Compaction(pb::CompactionRequest { revision: self.near(), physical: false }),
            13 | 14 => Kind::LeaseGrant(pb::LeaseGrantRequest { ttl: 60, id: 1 + i64::from(self.below(3)) }),
            _ => Kind::LeaseRevoke(pb::LeaseRevokeRequest { id: 1 + i64::from(self.below(3)) }),
        }
    }
}

type Live = BTreeMap<Bytes, KeyValue>;

/// The state machine by the book.
struct Model {
    revision: i64,
    compacted: i64,
    live: Live,
    /// The live keys at earlier revisions.
    past: BTreeMap<i64, Live>,
    leases: BTreeSet<i64>,
    /// Changes of keys so far.
    changes: usize,
}

/// The branches that a transaction takes.
struct Taken {
    succeeded: bool,
    nested: Vec<Taken>,
}

impl Model {
    fn new() -> Model {
        Model {
            revision: 1,
            compacted: NEVER_COMPACTED,
            live: Live::new(),
            past: BTreeMap::from([(1, Live::new())]),
            leases: BTreeSet::new(),
            changes: 0,
        }
    }

    fn attached(&self, id: i64) -> Vec<Bytes> {
        self.live.values().filter(|kv| kv.lease == id).map(|kv| kv.key.clone()).collect()
    }

    fn apply(&mut self, command: &Kind) -> Outcome {
        let before = self.changes;
        let reply = match command {
            Kind::Put(request) => {
                self.check_put(request, &self.live.keys().cloned().collect())?;
                Reply::Put(self.put(request, before))
            }
            Kind::DeleteRange(request) => Reply::DeleteRange(self.delete(request, before)),
            Kind::Txn(request) => {
                let taken = self.choose(request);
                self.check(request, &taken, &mut self.live.keys().cloned().collect())?;
                let mut response = self.execute(request, &taken, before);
                response.header = self.header(before);
                Reply::Txn(response)
            }
            Kind::Compaction(request) => {
                if request.revision <= self.compacted {
                    return Err(Refusal::Compacted);
                }
                if request.revision > self.revision {
                    return Err(Refusal::FutureRevision);
                }
                self.compacted = request.revision;
                Reply::Compaction(pb::CompactionResponse { header: self.header(before) })
            }
            Kind::LeaseGrant(request) => {
                if !self.leases.insert(request.id) {
                    return Err(Refusal::LeaseExists);
                }
                let (header, id, ttl) = (self.header(before), request.id, request.ttl);
                Reply::LeaseGrant(pb::LeaseGrantResponse { header, id, ttl, error: String::new() })
            }
            Kind::LeaseRevoke(request) => {
                if !self.leases.remove(&request.id) {
                    return Err(Refusal::LeaseNotFound);
                }
                for key in self.attached(request.id) {
                    self.live.remove(&key);
                    self.changes += 1;
                }
                Reply::LeaseRevoke(pb::LeaseRevokeResponse { header: self.header(before) })
            }
            other => unreachable!("scripts do not make {other:?}"),
        };
        if self.changes > before {
            self.revision += 1;
            self.past.insert(self.revision, self.live.clone());
        }
        Ok(reply)
    }

    /// The new revision once something changed.
    fn header(&self, before: usize) -> Option<pb::ResponseHeader> {
        let revision = self.revision + i64::from(self.changes > before);
        Some(pb::ResponseHeader { revision, ..Default::default() })
    }

    fn choose(&self, request: &pb::TxnRequest) -> Taken {
        let succeeded = request.compare.iter().all(|compare| self.holds(compare));
        let nested = branch(request, succeeded).iter().filter_map(|op| match &op.request {
            Some(Request::RequestTxn(inner)) => Some(self.choose(inner)),
            _ => None,
        });
        Taken { succeeded, nested: nested.collect() }
    }

    fn holds(&self, compare: &pb::Compare) -> bool {
        let found = in_range(&self.live, &compare.key, &compare.range_end);
        if found.is_empty() {
            return compare.target != 3 && compares(compare, &KeyValue::default());
        }
        found.iter().all(|kv| compares(compare, kv))
    }

    /// Walks the path with the keys that exist on it at each point.
    fn check(
        &self,
        request: &pb::TxnRequest,
        taken: &Taken,
        exist: &mut BTreeSet<Bytes>,
    ) -> Result<(), Refusal> {
        let mut nested = taken.nested.iter();
        for op in branch(request, taken.succeeded) {
            match op.request.as_ref().expect("an operation without a request is refused before") {
                Request::RequestPut(put) => {
                    self.check_put(put, exist)?;
                    exist.insert(put.key.clone());
                }
                Request::RequestDeleteRange(delete) => {
                    exist.retain(|key| !covers(&delete.key, &delete.range_end, key));
                }
                Request::RequestRange(range) if range.revision > self.revision => {
                    return Err(Refusal::FutureRevision);
                }
                Request::RequestRange(range) if range.revision != 0 && range.revision < self.compacted => {
                    return Err(Refusal::Compacted);
                }
                Request::RequestRange(_) => {}
                Request::RequestTxn(inner) => {
                    self.check(inner, nested.next().expect("its branch was chosen"), exist)?;
                }
            }
        }
        Ok(())
    }

    fn check_put(&self, put: &pb::PutRequest, exist: &BTreeSet<Bytes>) -> Result<(), Refusal> {
        if put.lease != 0 && !self.leases.contains(&put.lease) {
            return Err(Refusal::LeaseNotFound);
        }
        if (put.ignore_value || put.ignore_lease) && !exist.contains(&put.key) {
            return Err(Refusal::KeyNotFound);
        }
        Ok(())
    }

    fn execute(&mut self, request: &pb::TxnRequest, taken: &Taken, before: usize) -> pb::TxnResponse {
        let mut nested = taken.nested.iter();
        let mut responses = Vec::new();
        for op in branch(request, taken.succeeded) {
            let response =
                match op.request.as_ref().expect("an operation without a request is refused before") {
                    Request::RequestPut(put) => Response::ResponsePut(self.put(put, before)),
                    Request::RequestDeleteRange(delete) => {
                        Response::ResponseDeleteRange(self.delete(delete, before))
                    }
                    Request::RequestRange(range) => Response::ResponseRange(self.range(range, before)),
                    Request::RequestTxn(inner) => {
                        let taken = nested.next().expect("its branch was chosen");
                        let mut response = self.execute(inner, taken, before);
                        response.header = Some(pb::ResponseHeader::default());
                        Response::ResponseTxn(response)
                    }
                };
            responses.push(pb::ResponseOp { response: Some(response) });
        }
        pb::TxnResponse { header: None, succeeded: taken.succeeded, responses }
    }

    fn put(&mut self, put: &pb::PutRequest, before: usize) -> pb::PutResponse {
        let old = self.live.get(&put.key).cloned();
        let main = self.revision + 1;
        let kept = |keep: bool| old.as_ref().filter(|_| keep);
        let kv = KeyValue {
            key: put.key.clone(),
            create_revision: old.as_ref().map_or(main, |old| old.create_revision),
            mod_revision: main,
            version: old.as_ref().map_or(1, |old| old.version + 1),
            value: kept(put.ignore_value).map_or(put.value.clone(), |old| old.value.clone()),
            lease: kept(put.ignore_lease).map_or(put.lease, |old| old.lease),
        };
        self.live.insert(put.key.clone(), kv);
        self.changes += 1;
        pb::PutResponse { header: self.header(before), prev_kv: old.filter(|_| put.prev_kv) }
    }

    fn delete(&mut self, delete: &pb::DeleteRangeRequest, before: usize) -> pb::DeleteRangeResponse {
        let gone = in_range(&self.live, &delete.key, &delete.range_end);
        for kv in &gone {
            self.live.remove(&kv.key);
        }
        self.changes += gone.len();
        let deleted = i64::try_from(gone.len()).expect("few keys");
        let prev_kvs = if delete.prev_kv { gone } else { Vec::new() };
        pb::DeleteRangeResponse { header: self.header(before), deleted, prev_kvs }
    }

    fn range(&self, range: &pb::RangeRequest, before: usize) -> pb::RangeResponse {
        let live = if range.revision > 0 { &self.past[&range.revision] } else { &self.live };
        let mut kvs = in_range(live, &range.key, &range.range_end);
        let count = i64::try_from(kvs.len()).expect("few keys");
        let header = self.header(before);
        if range.count_only {
            return pb::RangeResponse { header, count, ..Default::default() };
        }
        let limit = usize::try_from(range.limit).ok().filter(|limit| *limit > 0).unwrap_or(usize::MAX);
        let bounds = [
            range.min_mod_revision,
            range.max_mod_revision,
            range.min_create_revision,
            range.max_create_revision,
        ];
        let default_order = range.sort_order == 0 || (range.sort_order == 1 && range.sort_target == 0);
        if default_order && bounds == [0; 4] {
            kvs.truncate(limit.saturating_add(1));
        }
        kvs.retain(|kv| {
            (bounds[0] == 0 || kv.mod_revision >= bounds[0])
                && (bounds[1] == 0 || kv.mod_revision <= bounds[1])
                && (bounds[2] == 0 || kv.create_revision >= bounds[2])
                && (bounds[3] == 0 || kv.create_revision <= bounds[3])
        });
        // Equal ones stay in key order, whichever way the rest is sorted.
        kvs.sort_by(|a, b| {
            let ordering = match range.sort_target {
                0 => a.key.cmp(&b.key),
                1 => a.version.cmp(&b.version),
                2 => a.create_revision.cmp(&b.create_revision),
                3 => a.mod_revision.cmp(&b.mod_revision),
                _ => a.value.cmp(&b.value),
            };
            if range.sort_order == 2 { ordering.reverse() } else { ordering }
        });
        let more = kvs.len() > limit;
        kvs.truncate(limit);
        if range.keys_only {
            for kv in &mut kvs {
                kv.value = Bytes::new();
                kv.lease = if range.sort_target == 4 { kv.lease } else { 0 };
            }
        }
        pb::RangeResponse { header, kvs, more, count }
    }
}

fn branch(request: &pb::TxnRequest, succeeded: bool) -> &[pb::RequestOp] {
    if succeeded { &request.success } else { &request.failure }
}

fn covers(start: &[u8], end: &[u8], key: &[u8]) -> bool {
    match end {
        [] => key == start,
        [0] => key >= start,
        end => key >= start && key < end,
    }
}

fn in_range(live: &Live, start: &[u8], end: &[u8]) -> Vec<KeyValue> {
    live.values().filter(|kv| covers(start, end, &kv.key)).cloned().collect()
}

fn compares(compare: &pb::Compare, kv: &KeyValue) -> bool {
    let number = |found: i64, wanted: Option<i64>| found.cmp(&wanted.unwrap_or(0));
    let union = compare.target_union.as_ref();
    let ordering = match compare.target {
        0 => number(
            kv.version,
            union.and_then(|u| if let TargetUnion::Version(v) = u { Some(*v) } else { None }),
        ),
        1 => number(
            kv.create_revision,
            union.and_then(|u| if let TargetUnion::CreateRevision(v) = u { Some(*v) } else { None }),
        ),
        2 => number(
            kv.mod_revision,
            union.and_then(|u| if let TargetUnion::ModRevision(v) = u { Some(*v) } else { None }),
        ),
        3 => {
            let wanted =
                union.and_then(|u| if let TargetUnion::Value(v) = u { Some(v.clone()) } else { None });
            kv.value.cmp(&wanted.unwrap_or_default())
        }
        4 => {
            number(kv.lease, union.and_then(|u| if let TargetUnion::Lease(v) = u { Some(*v) } else { None }))
        }
        _ => std::cmp::Ordering::Equal,
    };
    match compare.result {
        0 => ordering.is_eq(),
        1 => ordering.is_gt(),
        2 => ordering.is_lt(),
        3 => ordering.is_ne(),
        _ => true,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scripts_from_seeds_hold() {
        let dir = tempfile::tempdir().expect("a directory");
        let mut checker = Checker::new(dir.path());
        for seed in 0..1500 {
            let mut random = fastrand::Rng::with_seed(seed);
            let mut script: Vec<u8> = (0..random.usize(..400)).map(|_| random.u8(..)).collect();
            if let Some(kind) = script.first_mut() {
                *kind |= u8::from(seed % 16 > 0);
            }
            println!("seed {seed}");
            checker.check(&script);
        }
    }
}
