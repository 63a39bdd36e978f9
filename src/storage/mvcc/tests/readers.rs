//! Reads from other threads while runs commit: a revision that can be seen is seen whole.

use std::collections::BTreeMap;
use std::sync::atomic::AtomicBool;

use super::*;

/// Revisions written; each of them puts a few keys of [`KEYS`] and deletes one.
const REVISIONS: i64 = 2000;
const KEYS: i64 = 40;

fn name(number: i64) -> Bytes {
    format!("k{:02}", number.rem_euclid(KEYS)).into()
}

/// The changes of a revision, known beforehand: three puts and a delete.
fn write(txn: &mut Txn<'_, '_>, revision: i64) {
    for step in 0..3 {
        let value = format!("{revision}").into();
        txn.put(name(revision * 7 + step), value, 0).expect("the put is written");
    }
    txn.delete(&name(revision * 7 + 20)).expect("the delete is written");
}

/// The value of every key at a revision, from the changes alone.
fn expected(revision: i64) -> BTreeMap<Bytes, String> {
    let mut live = BTreeMap::new();
    for made in 2..=revision {
        for step in 0..3 {
            live.insert(name(made * 7 + step), made.to_string());
        }
        live.remove(&name(made * 7 + 20));
    }
    live
}

#[test]
fn readers_see_whole_revisions() {
    let dir = tempfile::tempdir().expect("a directory");
    let store = open(dir.path());
    let states: Vec<BTreeMap<Bytes, String>> = {
        let mut states = vec![BTreeMap::new(), BTreeMap::new()];
        for revision in 2..=REVISIONS {
            let mut next = states[states.len() - 1].clone();
            for step in 0..3 {
                next.insert(name(revision * 7 + step), revision.to_string());
            }
            next.remove(&name(revision * 7 + 20));
            states.push(next);
        }
        states
    };
    assert_eq!(states[100], expected(100));
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for reader in 0..2_u64 {
            let (store, states, done) = (&store, &states, &done);
            scope.spawn(move || {
                let mut random = fastrand::Rng::with_seed(reader);
                let mut last = 0;
                while !done.load(Ordering::Acquire) {
                    let revision = store.resolve(0).expect("the latest revision can always be read");
                    assert!(revision >= last, "revisions do not go back");
                    last = revision;
                    read(store, states, revision, &mut random);
                    let compacted = store.compacted();
                    if compacted > 0 && compacted < revision {
                        let old = random.i64(compacted..=revision);
                        read(store, states, old, &mut random);
                    }
                }
            });
        }
        let mut random = fastrand::Rng::with_seed(99);
        while store.revision() < REVISIONS {
            let mut run = WriteRun::new(&store);
            for _ in 0..random.i64(1..6).min(REVISIONS - store.revision()) {
                let mut txn = run.begin();
                let revision = txn.store().revision().max(txn.revision()) + 1;
                write(&mut txn, revision);
                assert_eq!(txn.finish(), revision);
            }
            let previous = run.compacted();
            let to = run.revision() - 3;
            let compacts = random.u8(..50) == 0 && to > previous;
            if compacts {
                run.compact(if random.bool() { to } else { run.revision() });
            }
            let compacted = run.compacted();
            run.commit().expect("the run commits");
            if compacts {
                finish(&store, previous, compacted);
                if random.u8(..3) == 0 {
                    store.rewrite().expect("the files are rewritten");
                }
            }
            if store.revision() > REVISIONS / 2 && store.live_keys().is_none() {
                store.build_counts().expect("the index builds");
            }
        }
        done.store(true, Ordering::Release);
    });
}

/// Reads one revision; what is found counts only if it is still readable afterwards, as for every reader.
fn read(store: &Store, states: &[BTreeMap<Bytes, String>], revision: i64, random: &mut fastrand::Rng) {
    let expected = &states[usize::try_from(revision).expect("a small revision")];
    let mut found = BTreeMap::new();
    let mut scan = store.scan(&everything(), revision);
    while let Some(record) = scan.next().expect("the scan reads") {
        found.insert(Bytes::copy_from_slice(record.key), String::from_utf8_lossy(record.value).into_owned());
    }
    let count = store.count(&everything(), revision).expect("it counts");
    let key = name(random.i64(..KEYS));
    let value = store.get(&key, revision).expect("the key reads");
    if store.check_readable(revision).is_ok() {
        assert_eq!(&found, expected, "at {revision}");
        assert_eq!(count, i64::try_from(expected.len()).expect("few keys"), "at {revision}");
        let value = value.map(|(_, value)| String::from_utf8_lossy(&value).into_owned());
        assert_eq!(value.as_ref(), expected.get(&key), "{key:?} at {revision}");
    }
}
