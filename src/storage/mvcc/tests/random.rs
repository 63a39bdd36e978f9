//! Random histories: the store must answer as the model does, whatever happens to its files meanwhile.

use std::collections::{BTreeMap, VecDeque};
use std::ffi::OsString;

use super::model::{Model, Op, View};
use super::*;
use crate::storage::mvcc::read::{Event, Wish};

/// Histories per test, and steps in each.
const HISTORIES: u64 = 6;
const STEPS: usize = 80;

/// Copies a store's directory as a crash would leave it: what is in memory is lost.
pub(super) fn copy(from: &Path) -> tempfile::TempDir {
    // RocksDB works in the background: a copy counts only if no file came or went while it was taken.
    loop {
        let before = files(from);
        let to = tempfile::tempdir().expect("a directory");
        let copied = before.keys().all(|name| std::fs::copy(from.join(name), to.path().join(name)).is_ok());
        if copied && files(from) == before {
            return to;
        }
    }
}

fn files(dir: &Path) -> BTreeMap<OsString, u64> {
    let entries = std::fs::read_dir(dir).expect("the directory lists");
    entries
        .filter_map(|entry| {
            let entry = entry.expect("the directory lists");
            Some((entry.file_name(), entry.metadata().ok()?.len()))
        })
        .collect()
}

/// Keys that are prefixes of each other, with bytes that the encoding escapes.
fn key(random: &mut fastrand::Rng) -> Bytes {
    const BYTES: [u8; 6] = [0, 1, b'a', b'b', 0xFE, 0xFF];
    let length = random.usize(1..4);
    (0..length).map(|_| BYTES[random.usize(..BYTES.len())]).collect()
}

fn range(random: &mut fastrand::Rng) -> KeyRange {
    let end = match random.u8(..4) {
        0 => RangeEnd::Single,
        1 => RangeEnd::Unbounded,
        _ => RangeEnd::Before(key(random)),
    };
    KeyRange { start: key(random), end }
}

fn ops(random: &mut fastrand::Rng) -> Vec<Op> {
    (0..random.usize(..5))
        .map(|_| match random.u8(..10) {
            0..7 => {
                // From 1 KiB on, values live in blob files.
                let length = if random.u8(..8) == 0 { 1500 } else { random.usize(..20) };
                let value: Vec<u8> = (0..length).map(|_| random.u8(..)).collect();
                Op::Put(key(random), value.into(), random.i64(0..3))
            }
            7..9 => Op::Delete(key(random)),
            _ => Op::DeleteRange(range(random)),
        })
        .collect()
}

fn apply(run: &mut WriteRun<'_>, ops: &[Op]) {
    let mut txn = run.begin();
    for op in ops {
        match op {
            Op::Put(key, value, lease) => {
                txn.put(key.clone(), value.clone(), *lease).expect("the put is written");
            }
            Op::Delete(key) => {
                txn.delete(key).expect("the delete is written");
            }
            Op::DeleteRange(range) => {
                for record in txn.collect(range, 0).expect("the range reads") {
                    assert!(txn.delete(&record.key).expect("the delete is written"));
                }
            }
        }
    }
    txn.finish();
}

fn scan(store: &Store, range: &KeyRange, revision: i64) -> View {
    let mut scan = store.scan(range, revision);
    let mut found = View::new();
    while let Some(record) = scan.next().expect("the scan reads") {
        let key = Bytes::copy_from_slice(record.key);
        assert!(found.last_key_value().is_none_or(|(last, _)| *last < key), "keys ascend");
        found.insert(key, (record.meta, Bytes::copy_from_slice(record.value)));
    }
    found
}

fn history(store: &Store, from: i64, to: i64) -> Vec<Event> {
    let mut events = Vec::new();
    store.history(from, to, |_, _, _| Wish::Read, |event| events.push(event)).expect("the history reads");
    events
}

fn check_at(random: &mut fastrand::Rng, store: &Store, model: &Model, revision: i64) {
    let expected = model.at(revision);
    assert_eq!(scan(store, &everything(), revision), expected, "all keys at {revision}");
    for _ in 0..3 {
        let range = range(random);
        let inside: View = expected
            .iter()
            .filter(|(key, _)| range.contains(key))
            .map(|(k, v)| (k.clone(), v.clone()))
            .collect();
        if range.as_single().is_none() && !range.is_empty() {
            assert_eq!(scan(store, &range, revision), inside, "{range:?} at {revision}");
        }
        let count = store.count(&range, revision).expect("the range counts");
        assert_eq!(count, i64::try_from(inside.len()).expect("few keys"), "{range:?} at {revision}");
        let key = key(random);
        assert_eq!(store.get(&key, revision).expect("the key reads"), expected.get(&key).cloned(), "{key:?}");
    }
}

/// Everything that can be asked of the store.
fn check(random: &mut fastrand::Rng, store: &Store, model: &Model) {
    assert_eq!((store.revision(), store.compacted()), (model.revision, model.compacted));
    let oldest = model.compacted.max(FIRST_REVISION);
    let old = random.i64(oldest..=model.revision);
    check_at(random, store, model, model.revision);
    check_at(random, store, model, old);
    let to = random.i64(old..=model.revision);
    let mut events = history(store, old, to);
    events.retain(|event| !model.is_ambiguous(event));
    assert_eq!(events, model.events(old, to));
    if let Some(event) = (!events.is_empty()).then(|| &events[random.usize(..events.len())]) {
        let before = event.revision.main - 1;
        let expected = (!event.is_create() && before >= model.compacted)
            .then(|| model.at(before).get(&event.key).cloned())
            .flatten();
        assert_eq!(store.version_before(event).expect("the version reads"), expected, "{event:?}");
    }
    let mut run = WriteRun::new(store);
    let txn = run.begin();
    for key in model.live.keys().take(3) {
        assert_eq!(txn.head(key).expect("the head reads"), model.live.get(key).map(|(meta, _)| *meta));
    }
}

#[test]
fn random_histories_read_as_the_model() {
    for seed in 0..HISTORIES {
        let mut random = fastrand::Rng::with_seed(seed);
        let dir = tempfile::tempdir().expect("a directory");
        let (mut store, mut model) = (open(dir.path()), Model::new());
        let mut unfinished: VecDeque<(i64, i64)> = VecDeque::new();
        println!("seed {seed}");
        for _ in 0..STEPS {
            match random.u8(..20) {
                0..11 => {
                    let mut run = WriteRun::new(&store);
                    let before = model.revision;
                    for _ in 0..random.usize(1..4) {
                        let ops = ops(&mut random);
                        apply(&mut run, &ops);
                        model.apply(&ops);
                        assert_eq!(run.revision(), model.revision);
                    }
                    assert_eq!(store.revision(), before, "a run is invisible before its commit");
                    let events = run.commit().expect("the run commits");
                    for event in &events {
                        let before = model.at(event.revision.main - 1);
                        let expected = before.get(&event.key).cloned().filter(|_| !event.is_create());
                        assert_eq!(store.version_before(event).expect("it reads"), expected, "{event:?}");
                    }
                    let told: Vec<Event> =
                        events.into_iter().map(|event| Event { previous: None, ..event }).collect();
                    assert_eq!(told, model.events(before + 1, model.revision));
                }
                11 => {
                    let mut run = WriteRun::new(&store);
                    apply(&mut run, &ops(&mut random));
                    drop(run);
                }
                12..14 if model.revision > model.compacted.max(1) => {
                    let to = random.i64(model.compacted.max(1)..=model.revision).max(model.compacted + 1);
                    assert!(Store::check_compaction(to, store.compacted(), store.revision()).is_ok());
                    compact(&store, to);
                    unfinished.push_back((model.compacted, to));
                    model.compacted = to;
                }
                14..16 => {
                    if let Some((previous, compacted)) = unfinished.pop_front() {
                        finish(&store, previous, compacted);
                        model.finish_compaction(previous, compacted);
                    }
                }
                16 => store.engine().flush().expect("the store flushes"),
                17 => store.rewrite().expect("the files are rewritten"),
                18 => store.build_counts().expect("the index builds"),
                _ => {
                    drop(store);
                    store = open(dir.path());
                    unfinished.clear();
                    model.restart();
                }
            }
            check(&mut random, &store, &model);
            let revision = random.i64(model.compacted.max(FIRST_REVISION)..=model.revision);
            assert_eq!(store.hash_kv(revision).expect("it hashes").0, model.hash_kv(revision));
        }
        for (previous, compacted) in unfinished {
            finish(&store, previous, compacted);
            model.finish_compaction(previous, compacted);
        }
        store.rewrite().expect("the files are rewritten");
        check(&mut random, &store, &model);
        let revision = model.revision;
        assert_eq!(store.hash_kv(revision).expect("it hashes").0, model.hash_kv(revision));
    }
}

/// One entry of a log that can be applied again.
enum Entry {
    Run(Vec<Vec<Op>>),
    Compact(i64),
}

fn replay(store: &Store, at: usize, entry: &Entry) {
    let mut run = WriteRun::new(store);
    match entry {
        Entry::Run(txns) => txns.iter().for_each(|ops| apply(&mut run, ops)),
        Entry::Compact(revision) => run.compact(*revision),
    }
    run.batch().put(Family::Meta, &MetaKey::Applied.encode(), &(at as u64).to_be_bytes());
    let previous = store.compacted();
    run.commit().expect("the run commits");
    if let Entry::Compact(revision) = entry {
        finish(store, previous, *revision);
    }
}

fn applied(store: &Store) -> Option<usize> {
    let stored = store.engine().get(Family::Meta, &MetaKey::Applied.encode()).expect("it reads")?;
    let bytes = stored.as_ref().try_into().expect("eight bytes");
    Some(usize::try_from(u64::from_be_bytes(bytes)).expect("a small number"))
}

#[test]
fn a_crash_leaves_a_whole_run_and_a_replay_the_same_store() {
    for seed in 100..100 + HISTORIES {
        let mut random = fastrand::Rng::with_seed(seed);
        let dir = tempfile::tempdir().expect("a directory");
        let (store, mut model) = (open(dir.path()), Model::new());
        let (mut log, mut models, mut flushed) = (Vec::new(), Vec::new(), None);
        let mut copies = Vec::new();
        println!("seed {seed}");
        for at in 0..STEPS {
            let entry = if random.u8(..16) == 0 && model.revision > model.compacted.max(1) {
                let to = random.i64(model.compacted.max(1)..=model.revision).max(model.compacted + 1);
                let previous = std::mem::replace(&mut model.compacted, to);
                model.finish_compaction(previous, to);
                flushed = Some(at);
                Entry::Compact(to)
            } else {
                let txns: Vec<Vec<Op>> = (0..random.usize(1..4)).map(|_| ops(&mut random)).collect();
                txns.iter().for_each(|ops| model.apply(ops));
                Entry::Run(txns)
            };
            replay(&store, at, &entry);
            log.push(entry);
            models.push(model.clone());
            match random.u8(..24) {
                0 => {
                    store.engine().flush().expect("the store flushes");
                    flushed = Some(at);
                }
                1 => {
                    store.rewrite().expect("the files are rewritten");
                    flushed = Some(at);
                }
                2..4 => copies.push((copy(dir.path()), flushed)),
                _ => {}
            }
        }
        for (dir, flushed) in copies {
            let store = open(dir.path());
            let stands = applied(&store);
            assert!(stands >= flushed, "what was flushed is there");
            let mut model = stands.map_or_else(Model::new, |at| models[at].clone());
            model.restart();
            check(&mut random, &store, &model);
            let next = stands.map_or(0, |at| at + 1);
            for (at, entry) in log.iter().enumerate().skip(next) {
                replay(&store, at, entry);
                if let Entry::Compact(to) = entry {
                    let expected = models[at].hash_kv(*to);
                    assert_eq!(
                        store.hash_kv(*to).expect("it hashes").0,
                        expected,
                        "replayed compaction at {to}"
                    );
                }
            }
            let last = models.last().expect("there were steps");
            check(&mut random, &store, last);
            let mut same = last.clone();
            same.restart();
            let found = store.hash_kv(0).expect("it hashes").0;
            if found.compact_revision == same.compacted {
                assert_eq!(found, same.hash_kv(same.revision));
            }
        }
    }
}
