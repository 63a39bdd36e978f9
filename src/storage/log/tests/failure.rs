//! A disk that refuses: work ahead goes on later, a full one holds the log up, a failed sync ends it.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use bytes::Bytes;

use super::{append, contents, file_names, open, open_faulty, options, wait};
use crate::storage::log::disk::Disk;
use crate::storage::log::{Log, LogObserver, LogOptions};

#[derive(Default)]
struct Counts {
    wrote: AtomicUsize,
    synced: AtomicUsize,
    failed: AtomicUsize,
    full: AtomicUsize,
}

impl LogObserver for Counts {
    fn wrote(&self, bytes: usize, _: Duration) {
        self.wrote.fetch_add(bytes, Ordering::SeqCst);
    }

    fn synced(&self, _: Duration) {
        self.synced.fetch_add(1, Ordering::SeqCst);
    }

    fn disk_full(&self) {
        self.full.fetch_add(1, Ordering::SeqCst);
    }

    fn failed(&self, _: &io::Error) {
        self.failed.fetch_add(1, Ordering::SeqCst);
    }
}

#[test]
fn a_disk_too_full_for_the_next_segment_does_not_end_the_log() {
    let dir = tempfile::tempdir().expect("a directory");
    let disk = Disk::new(dir.path().to_path_buf(), true);
    let (log, _) = Log::open_on(disk.clone(), options(dir.path())).expect("the log opens");
    disk.faults.prepare_full.store(true, Ordering::SeqCst);
    for _ in 0..40 {
        append(&log, &[&[1; 500]]);
    }
    assert_eq!(log.stats().segments, 1, "it goes on in the first one");
    let expected = contents(&log);
    log.close().expect("a clean end");
    assert_eq!(file_names(dir.path()).len(), 1);
    let (log, _) = open(dir.path());
    assert_eq!(contents(&log), expected);
}

#[test]
fn a_failed_sync_is_final() {
    let dir = tempfile::tempdir().expect("a directory");
    let disk = Disk::new(dir.path().to_path_buf(), true);
    let counts = Arc::new(Counts::default());
    let observer: Arc<dyn LogObserver> = Arc::<Counts>::clone(&counts);
    let options = LogOptions { observer: Some(observer), ..options(dir.path()) };
    let (log, _) = Log::open_on(disk.clone(), options).expect("the log opens");
    append(&log, &[b"a"]);
    assert_eq!(counts.synced.load(Ordering::SeqCst), 1);
    assert!(counts.wrote.load(Ordering::SeqCst) > 20);
    assert!(log.failure().is_none());
    disk.faults.sync_fails.store(true, Ordering::SeqCst);
    wait(|done| log.append(vec![(1, Bytes::from_static(b"b"))], done).expect("it follows"))
        .expect_err("the sync fails");
    disk.faults.sync_fails.store(false, Ordering::SeqCst);
    assert_eq!(counts.failed.load(Ordering::SeqCst), 1);
    let error = wait(|done| log.save_vote(Bytes::new(), done).expect("small")).expect_err("the log is dead");
    assert!(error.to_string().contains("sync fault"), "{error}");
    wait(|done| log.append(vec![(2, Bytes::new())], done).expect("taken")).expect_err("the log is dead");
    wait(|done| log.truncate_from(0, done).expect("taken")).expect_err("the log is dead");
    wait(|done| log.purge_to(0, Bytes::new(), done).expect("taken")).expect_err("the log is dead");
    log.save_committed(Bytes::new()).expect("small");
    assert!(log.failure().is_some());
    log.close().expect_err("the log is dead");
}

#[test]
fn a_full_disk_holds_the_log_up_until_there_is_room() {
    let dir = tempfile::tempdir().expect("a directory");
    let disk = Disk::new(dir.path().to_path_buf(), true);
    let counts = Arc::new(Counts::default());
    let observer: Arc<dyn LogObserver> = Arc::<Counts>::clone(&counts);
    let options = LogOptions { observer: Some(observer), ..options(dir.path()) };
    let (log, _) = Log::open_on(disk.clone(), options).expect("the log opens");
    append(&log, &[b"a", b"b"]);
    disk.faults.append_full.store(true, Ordering::SeqCst);
    let (done, written) = std::sync::mpsc::channel();
    log.append(vec![(2, Bytes::from_static(b"c"))], move |result| drop(done.send(result)))
        .expect("it follows");
    super::eventually("it is told", || counts.full.load(Ordering::SeqCst) > 1);
    assert!(log.busy_since().is_some() && written.try_recv().is_err(), "it waits");
    disk.faults.append_full.store(false, Ordering::SeqCst);
    written.recv().expect("it answers").expect("there is room");
    let expected = contents(&log);
    log.close().expect("a clean end");
    let (log, _) = open(dir.path());
    assert_eq!(contents(&log), expected);
}

#[test]
fn a_log_that_waits_for_room_ends_when_it_is_closed_and_keeps_what_it_acknowledged() {
    let dir = tempfile::tempdir().expect("a directory");
    let (log, disk) = open_faulty(dir.path());
    append(&log, &[b"a", b"b"]);
    disk.faults.append_full.store(true, Ordering::SeqCst);
    let (done, written) = std::sync::mpsc::channel();
    log.append(vec![(2, Bytes::new())], move |result| drop(done.send(result))).expect("it follows");
    drop(log);
    let error = written.recv().expect("it answers").expect_err("it is full");
    assert_eq!(error.kind(), io::ErrorKind::StorageFull);
    let (log, _) = open(dir.path());
    assert_eq!(contents(&log), [(0, b"a".to_vec()), (1, b"b".to_vec())]);
}

#[test]
fn a_panicking_callback_fails_the_log() {
    let dir = tempfile::tempdir().expect("a directory");
    let (log, _) = open(dir.path());
    log.append(vec![(0, Bytes::new())], |_| panic!("a callback that panics, as this test wants"))
        .expect("it follows");
    super::eventually("the log is dead", || log.failure().is_some());
    wait(|done| log.append(vec![(1, Bytes::new())], done).expect("taken")).expect_err("the log is dead");
}
