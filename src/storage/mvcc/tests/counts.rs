//! Counts over more keys than a bucket of the index holds.

use std::collections::BTreeSet;
use std::sync::atomic::AtomicBool;

use super::*;

fn name(number: u32) -> Bytes {
    format!("key{number:06}").into()
}

fn before(number: u32) -> RangeEnd {
    RangeEnd::Before(name(number))
}

fn change(store: &Store, txns: &[(bool, std::ops::Range<u32>)]) {
    let mut run = WriteRun::new(store);
    for (alive, numbers) in txns {
        let mut txn = run.begin();
        for number in numbers.clone() {
            if *alive {
                txn.put(name(number), Bytes::new(), 0).expect("the put is written");
            } else {
                txn.delete(&name(number)).expect("the delete is written");
            }
        }
        txn.finish();
    }
    run.commit().expect("the run commits");
}

fn check(store: &Store, live: &BTreeSet<u32>, revision: i64, random: &mut fastrand::Rng) {
    for _ in 0..20 {
        let (a, b) = (random.u32(..9000), random.u32(..9000));
        let range = KeyRange { start: name(a), end: before(b) };
        let expected = if a < b { live.range(a..b).count() } else { 0 };
        let found = store.count(&range, revision).expect("the range counts");
        assert_eq!(found, i64::try_from(expected).expect("few keys"), "[{a}, {b}) at {revision}");
    }
    let all = store.count(&everything(), revision).expect("the range counts");
    assert_eq!(all, i64::try_from(live.len()).expect("few keys"));
}

#[test]
fn counts_follow_creates_and_deletes_through_splits() {
    for seed in 0..4 {
        let mut random = fastrand::Rng::with_seed(seed);
        let dir = tempfile::tempdir().expect("a directory");
        let store = open(dir.path());
        let mut live = BTreeSet::new();
        let mut past = Vec::new();
        println!("seed {seed}");
        for step in 0..60 {
            let txns: Vec<(bool, std::ops::Range<u32>)> = (0..random.usize(1..6))
                .map(|_| {
                    let start = random.u32(..8000);
                    (random.u8(..5) < 3, start..start + random.u32(1..700))
                })
                .collect();
            for (alive, numbers) in &txns {
                if *alive {
                    live.extend(numbers.clone());
                } else {
                    live.retain(|number| !numbers.contains(number));
                }
            }
            change(&store, &txns);
            past.push((store.revision(), live.clone()));
            if step == 10 {
                store.build_counts().expect("the index builds");
            }
            assert_eq!(store.counts_quickly(store.revision()), step >= 10);
            check(&store, &live, store.revision(), &mut random);
            let (revision, then) = &past[random.usize(..past.len())];
            check(&store, then, *revision, &mut random);
        }
        let total = i64::try_from(live.len()).expect("few keys");
        assert_eq!(store.live_keys(), Some(total));
    }
}

#[test]
fn a_bucket_that_is_emptied_in_the_run_that_filled_it_is_not_split() {
    let dir = tempfile::tempdir().expect("a directory");
    let store = open(dir.path());
    // Two buckets: 0..256 with few keys left, and from 256 on with one short of full.
    change(&store, &[(true, 0..767)]);
    store.build_counts().expect("the index builds");
    change(&store, &[(false, 100..256)]);
    change(&store, &[(false, 512..767), (true, 512..767)]);
    // Fills the second, empties it, and makes new keys where it was.
    change(&store, &[(true, 767..1100), (false, 256..2000), (true, 256..600)]);
    let live: BTreeSet<u32> = (0..100).chain(256..600).collect();
    check(&store, &live, store.revision(), &mut fastrand::Rng::with_seed(1));
    for number in 0..600 {
        let range = KeyRange { start: name(0), end: before(number) };
        let expected = i64::try_from(live.range(..number).count()).expect("few keys");
        assert_eq!(
            store.count(&range, store.revision()).expect("the range counts"),
            expected,
            "below {number}"
        );
    }
}

#[test]
fn the_index_is_built_beside_writes() {
    let dir = tempfile::tempdir().expect("a directory");
    let store = open(dir.path());
    change(&store, &[(true, 0..3000)]);
    let mut live: BTreeSet<u32> = (0..3000).collect();
    let built = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for _ in 0..20 {
                store.build_counts().expect("the index builds");
            }
            built.store(true, Ordering::Release);
        });
        let mut random = fastrand::Rng::with_seed(7);
        while !built.load(Ordering::Acquire) {
            let start = random.u32(..8000);
            let (alive, numbers) = (random.bool(), start..start + random.u32(1..200));
            change(&store, &[(alive, numbers.clone())]);
            if alive {
                live.extend(numbers);
            } else {
                live.retain(|number| !numbers.contains(number));
            }
            check(&store, &live, store.revision(), &mut random);
        }
    });
    assert!(store.counts_quickly(store.revision()));
    check(&store, &live, store.revision(), &mut fastrand::Rng::with_seed(8));
}

#[test]
fn a_bucket_filled_many_times_over_by_one_run_is_cut_to_size() {
    let dir = tempfile::tempdir().expect("a directory");
    let store = open(dir.path());
    store.build_counts().expect("the index is built");
    for run in 0..4 {
        change(&store, &[(true, run * 3000..run * 3000 + 1700), (true, run * 3000 + 1700..(run + 1) * 3000)]);
        assert!(store.fullest_bucket() < 512, "{} keys in a bucket", store.fullest_bucket());
    }
    let live: BTreeSet<u32> = (0..12_000).collect();
    check(&store, &live, store.revision(), &mut fastrand::Rng::with_seed(1));
}
