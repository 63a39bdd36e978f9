//! The log from outside: what callers see, what a crash leaves, what damage does, and a model of it all.

mod crash;
mod damage;
mod direct;
mod failure;
mod model;

use std::io;
use std::path::Path;
use std::sync::mpsc;
use std::time::Duration;

use bytes::Bytes;

use super::disk::Disk;
use super::format::{FrameHead, SegmentHeader};
use super::{Log, LogError, LogOptions, Recovered, fuzz};
use crate::clock;

/// Longer than anything here takes on a slow machine.
const PATIENCE: Duration = Duration::from_secs(20);

/// Small segments, so that tests see many. Tests look at bytes and not at a power cut, so they need no sync.
fn options(dir: &Path) -> LogOptions {
    LogOptions { segment_bytes: 4 << 10, no_fsync: true, ..LogOptions::new(dir) }
}

fn open(dir: &Path) -> (Log, Recovered) {
    Log::open(options(dir)).expect("the log opens")
}

/// Opens the log on a disk whose faults the test orders.
fn open_faulty(dir: &Path) -> (Log, Disk) {
    let disk = Disk::new(dir.to_path_buf(), true);
    let (log, _) = Log::open_on(disk.clone(), options(dir)).expect("the log opens");
    (log, disk)
}

/// Calls an operation and waits until it is done.
fn wait<R>(operation: impl FnOnce(Box<dyn FnOnce(io::Result<()>) + Send>) -> R) -> io::Result<()> {
    let (sender, receiver) = mpsc::channel();
    operation(Box::new(move |result| sender.send(result).expect("the test waits")));
    receiver.recv_timeout(PATIENCE).expect("the operation is done in time")
}

/// Appends payloads as one batch and waits.
fn append(log: &Log, payloads: &[&[u8]]) {
    let next = log.bounds().end;
    let entries = (next..).zip(payloads.iter().map(|payload| Bytes::copy_from_slice(payload))).collect();
    wait(|done| log.append(entries, done).expect("they follow")).expect("they are durable");
}

/// Stops the log thread inside a callback, so that what `fill_queue` does becomes one batch.
fn as_one_batch(log: &Log, fill_queue: impl FnOnce()) {
    let (go_on, gate) = mpsc::channel::<()>();
    let (entered, inside) = mpsc::channel();
    log.append(Vec::new(), move |_| {
        entered.send(()).expect("the test waits");
        gate.recv_timeout(PATIENCE).expect("the test goes on");
    })
    .expect("nothing follows anything");
    inside.recv_timeout(PATIENCE).expect("the log thread calls back");
    fill_queue();
    go_on.send(()).expect("the log thread waits");
    flush(log);
}

fn flush(log: &Log) {
    wait(|done| log.append(Vec::new(), done).expect("nothing follows anything")).expect("the log works");
}

/// All that the log holds.
fn contents(log: &Log) -> Vec<(u64, Vec<u8>)> {
    let mut found = Vec::new();
    let bounds = log.bounds();
    let mut next = bounds.start;
    while next < bounds.end {
        let entries = log.read(next..bounds.end, 700).expect("the log reads");
        assert!(!entries.is_empty(), "entry {next} of {bounds:?} is there");
        for (index, payload) in entries {
            assert_eq!(index, next);
            next += 1;
            found.push((index, payload.to_vec()));
        }
    }
    found
}

/// Waits until the supply thread has brought about what the test needs.
fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = clock::now() + PATIENCE;
    while !holds() {
        assert!(clock::now() < deadline, "{what} in time");
        std::thread::yield_now();
    }
}

fn file_names(dir: &Path) -> Vec<String> {
    Disk::new(dir.to_path_buf(), true).list().expect("the directory lists")
}

/// Waits until purged segments are gone and the next one is made, so that no file changes by itself.
fn settled_names(dir: &Path, log: &Log) -> Vec<String> {
    flush(log);
    eventually("the supply thread is done", || {
        let names = file_names(dir);
        let segments: Vec<_> = names.iter().filter(|name| name.ends_with(".log")).collect();
        segments.len() == log.stats().segments + 1 && is_unbegun(&dir.join(segments[segments.len() - 1]))
    });
    file_names(dir)
}

fn is_unbegun(segment: &Path) -> bool {
    let bytes = std::fs::read(segment).expect("the segment reads");
    let header =
        SegmentHeader::decode(bytes[..64].try_into().expect("64 bytes")).expect("the header is good");
    FrameHead::decode(&bytes[64..], header.stamp()).is_none()
}

#[test]
fn entries_are_readable_at_once_and_after_reopening() {
    let dir = tempfile::tempdir().expect("a directory");
    let (log, recovered) = open(dir.path());
    let empty =
        Recovered { first_index: 0, next_index: 0, purged: None, vote: None, committed: None, cut_bytes: 0 };
    assert_eq!(recovered, empty);
    as_one_batch(&log, || {
        log.append(vec![(0, Bytes::from_static(b"a")), (1, Bytes::new())], |_| ()).expect("they follow");
        let read = log.read(0..9, 99).expect("the log reads");
        assert_eq!(read, [(0, Bytes::from_static(b"a")), (1, Bytes::new())]);
    });
    wait(|done| log.save_vote(Bytes::from_static(b"vote 1"), done).expect("small")).expect("saved");
    wait(|done| log.save_vote(Bytes::from_static(b"vote 2"), done).expect("small")).expect("saved");
    log.save_committed(Bytes::from_static(b"1")).expect("small");
    log.close().expect("a clean end");

    let (log, recovered) = open(dir.path());
    assert_eq!((recovered.first_index, recovered.next_index, recovered.cut_bytes), (0, 2, 0));
    assert_eq!(recovered.vote.as_deref(), Some(&b"vote 2"[..]));
    assert_eq!(recovered.committed.as_deref(), Some(&b"1"[..]));
    assert_eq!(contents(&log), [(0, b"a".to_vec()), (1, Vec::new())]);
}

#[test]
fn the_committed_hint_is_written_without_other_work() {
    let dir = tempfile::tempdir().expect("a directory");
    let (log, _) = open(dir.path());
    append(&log, &[b"a"]);
    let batches = log.stats().batches;
    log.save_committed(Bytes::from_static(b"0")).expect("small");
    eventually("the hint is written", || log.stats().batches > batches);
}

#[test]
fn one_sync_covers_all_that_is_queued() {
    let dir = tempfile::tempdir().expect("a directory");
    let (log, _) = open(dir.path());
    as_one_batch(&log, || {
        let before = log.stats().batches;
        for index in 0..100 {
            log.append(vec![(index, Bytes::from_static(b"entry"))], |_| ()).expect("they follow");
        }
        assert!(log.backlog_bytes() > 500);
        assert!(log.stats().batches <= before + 1);
    });
    // The gate, the hundred, the flush.
    assert!(log.stats().batches <= 3, "{:?}", log.stats());
    assert_eq!(log.backlog_bytes(), 0);
}

#[test]
fn callbacks_come_in_order() {
    let dir = tempfile::tempdir().expect("a directory");
    let (log, _) = open(dir.path());
    let (sender, receiver) = mpsc::channel();
    for index in 0..200 {
        let sender = sender.clone();
        log.append(vec![(index, Bytes::from_static(b"entry"))], move |result| {
            result.expect("durable");
            sender.send(index).expect("the test waits");
        })
        .expect("they follow");
    }
    log.close().expect("a clean end");
    assert_eq!(receiver.try_iter().collect::<Vec<_>>(), (0..200).collect::<Vec<_>>());
}

#[test]
fn entries_out_of_order_are_refused() {
    let dir = tempfile::tempdir().expect("a directory");
    let (log, _) = open(dir.path());
    append(&log, &[b"a", b"b"]);
    let refused = |entries: &[u64]| {
        let entries = entries.iter().map(|index| (*index, Bytes::new())).collect();
        match log.append(entries, |_| panic!("a refused append is not done")) {
            Err(LogError::NotNext { expected, found }) => (expected, found),
            other => panic!("not refused: {other:?}"),
        }
    };
    assert_eq!(refused(&[1]), (2, 1));
    assert_eq!(refused(&[3]), (2, 3));
    assert_eq!(refused(&[2, 4]), (3, 4));
    assert_eq!(log.bounds(), 0..2);
}

#[test]
fn truncated_entries_are_replaced() {
    let dir = tempfile::tempdir().expect("a directory");
    let (log, _) = open(dir.path());
    append(&log, &[b"a", b"b", b"c"]);
    wait(|done| log.truncate_from(1, done).expect("within")).expect("truncated");
    append(&log, &[b"B"]);
    let expected = [(0, b"a".to_vec()), (1, b"B".to_vec())];
    assert_eq!(contents(&log), expected);
    log.close().expect("a clean end");
    let (log, _) = open(dir.path());
    assert_eq!(contents(&log), expected);
    wait(|done| log.truncate_from(0, done).expect("within")).expect("truncated");
    assert_eq!(log.bounds(), 0..0);
}

#[test]
fn a_purge_above_the_end_moves_the_log_there() {
    let dir = tempfile::tempdir().expect("a directory");
    let (log, _) = open(dir.path());
    append(&log, &[b"a", b"b"]);
    wait(|done| log.purge_to(9, Bytes::from_static(b"nine"), done).expect("small")).expect("purged");
    assert_eq!(log.bounds(), 10..10);
    assert!(matches!(log.read(9..11, 99), Err(LogError::Purged { index: 9, first: 10 })));
    assert!(matches!(log.truncate_from(9, |_| ()), Err(LogError::Purged { index: 9, first: 10 })));
    append(&log, &[b"ten"]);
    // An older purge changes nothing.
    wait(|done| log.purge_to(3, Bytes::from_static(b"three"), done).expect("small")).expect("done");
    log.close().expect("a clean end");
    let (log, recovered) = open(dir.path());
    assert_eq!(recovered.purged.as_deref(), Some(&b"nine"[..]));
    assert_eq!((recovered.first_index, recovered.next_index), (10, 11));
    assert_eq!(contents(&log), [(10, b"ten".to_vec())]);
}

#[test]
fn old_entries_leave_memory_and_are_read_from_disk() {
    let dir = tempfile::tempdir().expect("a directory");
    let small_tail = || LogOptions { tail_bytes: 1000, ..options(dir.path()) };
    let (log, _) = Log::open(small_tail()).expect("the log opens");
    let payload = |index: u64| format!("{index:0100}").into_bytes();
    for index in 0..200 {
        append(&log, &[&payload(index)]);
        if index % 20 == 0 {
            settled_names(dir.path(), &log);
        }
    }
    let check = |log: &Log| {
        assert!(!log.in_memory(0) && log.in_memory(199));
        assert!(log.stats().tail_bytes <= 1000, "{:?}", log.stats());
        assert!(log.stats().segments > 3, "{:?}", log.stats());
        assert_eq!(contents(log), (0..200).map(|index| (index, payload(index))).collect::<Vec<_>>());
        // Across the border, whole and limited.
        assert_eq!(log.read(100..200, 1 << 20).expect("the log reads").len(), 100);
        assert_eq!(log.read(180..200, 1000).expect("the log reads").len(), 10);
        assert_eq!(log.read(3..7, 0).expect("the log reads").len(), 1);
    };
    check(&log);
    log.close().expect("a clean end");
    check(&Log::open(small_tail()).expect("the log opens").0);
}

#[test]
fn purged_segments_are_recycled_and_removed() {
    let dir = tempfile::tempdir().expect("a directory");
    let (log, _) = open(dir.path());
    let payload = [7; 500];
    for round in 1..=40u64 {
        append(&log, &[&payload[..]; 5]);
        wait(|done| log.purge_to(round * 5 - 3, Bytes::new(), done).expect("small")).expect("purged");
        settled_names(dir.path(), &log);
    }
    let names = file_names(dir.path());
    assert!(names.len() <= 4, "{names:?}");
    let newest = names.iter().rev().find(|name| name.ends_with(".log")).expect("there is a segment");
    let bytes = std::fs::read(dir.path().join(newest)).expect("the segment reads");
    assert_eq!(bytes[48], 1, "the newest segment was made from an old one");
    let expected: Vec<_> = log.bounds().map(|index| (index, payload.to_vec())).collect();
    assert_eq!(contents(&log), expected);
    log.close().expect("a clean end");
    let (log, recovered) = open(dir.path());
    assert_eq!(recovered.cut_bytes, 0, "old bytes are no torn tail");
    assert_eq!(contents(&log), expected);
}

#[test]
fn a_record_larger_than_a_segment_is_kept() {
    let dir = tempfile::tempdir().expect("a directory");
    let (log, _) = open(dir.path());
    let large = vec![3; 3 << 20];
    append(&log, &[b"a", &large, b"b", &large]);
    log.close().expect("a clean end");
    let (log, _) = open(dir.path());
    assert_eq!(
        contents(&log).iter().map(|(_, payload)| payload.len()).collect::<Vec<_>>(),
        [1, 3 << 20, 1, 3 << 20]
    );
}

#[test]
fn the_last_handle_closes_the_log_even_from_a_callback() {
    let dir = tempfile::tempdir().expect("a directory");
    let (log, _) = open(dir.path());
    let (sender, receiver) = mpsc::channel();
    let held = log.clone();
    log.append(vec![(0, Bytes::from_static(b"a"))], move |result| {
        drop(held);
        sender.send(result).expect("the test waits");
    })
    .expect("it follows");
    drop(log);
    receiver.recv_timeout(PATIENCE).expect("it is called").expect("durable");
    let (log, _) = open(dir.path());
    assert_eq!(contents(&log), [(0, b"a".to_vec())]);
    let other = log.clone();
    log.close().expect("a clean end");
    wait(|done| other.append(vec![(1, Bytes::new())], done).expect("accepted"))
        .expect_err("the log is closed");
}

#[test]
fn arbitrary_files_are_refused_or_read() {
    let dir = tempfile::tempdir().expect("a directory");
    for seed in 0..2000 {
        let mut random = fastrand::Rng::with_seed(seed);
        let script: Vec<u8> = (0..random.usize(0..120)).map(|_| random.u8(..)).collect();
        let outcome = std::panic::catch_unwind(|| fuzz::check(dir.path(), &script));
        assert!(outcome.is_ok(), "failed for seed {seed}, script {script:?}");
    }
}

#[test]
fn scripts_that_once_failed() {
    let dir = tempfile::tempdir().expect("a directory");
    // A truncation below a purge of the same batch was taken; removing segments lost a purge mark the last did not repeat.
    let unrepeated = [
        27, 146, 76, 198, 178, 150, 160, 152, 135, 97, 178, 35, 137, 185, 231, 100, 38, 113, 122, 231, 111,
        188, 200, 31, 139, 194, 118,
    ];
    for script in [&[63, 63, 44, 0, 0, 67, 67, 67][..], &unrepeated] {
        fuzz::check(dir.path(), script);
    }
}

#[test]
fn entries_that_replace_others_are_not_read_from_disk_too_early() {
    let dir = tempfile::tempdir().expect("a directory");
    let (log, _) = Log::open(LogOptions { tail_bytes: 0, ..options(dir.path()) }).expect("the log opens");
    append(&log, &[b"old 0", b"old 1", b"old 2"]);
    let (sender, receiver) = mpsc::channel();
    as_one_batch(&log, || {
        // Fills a batch of its own, so that its callback comes while the truncation is still queued.
        let reader = log.clone();
        let large = vec![(3, Bytes::from(vec![0; 9 << 20])), (4, Bytes::from_static(b"old 4"))];
        let read = move |_| sender.send(reader.read(1..9, 99)).expect("the test waits");
        log.append(large, read).expect("they follow");
        log.truncate_from(1, |_| ()).expect("within");
        log.append(vec![(1, Bytes::from_static(b"new 1"))], |_| ()).expect("it follows");
    });
    let expected = [(1, Bytes::from_static(b"new 1"))];
    assert_eq!(receiver.recv_timeout(PATIENCE).expect("it is called").expect("the log reads"), expected);
    assert_eq!(log.read(1..9, 99).expect("the log reads"), expected);
}
