//! The log alone: what an entry of 300 bytes costs at 1, 16 and 256 a batch, synced, on the disk of the temporary directory.
//!
//! `cargo bench --bench log`. Each batch waits for the one before, as the worst case of one client. The first rounds run
//! while segments are still zero-filled behind; `unsynced` leaves out the disk and shows the thread hand-over and framing.

#![allow(clippy::print_stdout, reason = "a benchmark prints its figures")]

use std::sync::mpsc;
use std::time::Duration;

use bytes::Bytes;
use skeg::clock;
use skeg::storage::log::{Log, LogOptions};

const PAYLOAD_BYTES: usize = 300;
const TIME: Duration = Duration::from_secs(2);

fn main() {
    println!(
        "{:>10} {:>8} {:>12} {:>12} {:>12} {:>12}",
        "", "entries", "µs/entry", "batch p50", "batch p99", "batches"
    );
    for no_fsync in [false, true] {
        for entries in [1, 16, 256] {
            measure(no_fsync, entries);
        }
    }
}

fn measure(no_fsync: bool, entries: u64) {
    let dir = tempfile::tempdir().expect("a directory");
    let (log, _) = Log::open(LogOptions { no_fsync, ..LogOptions::new(dir.path()) }).expect("the log opens");
    let (sender, receiver) = mpsc::channel();
    let mut next = 0;
    let mut took = Vec::new();
    let started = clock::now();
    while clock::now() - started < TIME {
        let before = clock::now();
        let batch =
            (next..next + entries).map(|index| (index, Bytes::from(vec![7; PAYLOAD_BYTES]))).collect();
        next += entries;
        let sender = sender.clone();
        log.append(batch, move |result| sender.send(result).expect("the benchmark waits"))
            .expect("they follow");
        receiver.recv().expect("the log answers").expect("the log works");
        took.push(clock::now() - before);
        if next % (64 << 10) < entries {
            log.purge_to(next - 1, Bytes::new(), |_| ()).expect("a small record");
        }
    }
    let total = clock::now() - started;
    took.sort_unstable();
    let name = if no_fsync { "unsynced" } else { "synced" };
    println!(
        "{name:>10} {entries:>8} {:>12.3} {:>12.1?} {:>12.1?} {:>12}",
        total.as_secs_f64() * 1e6 / f64::from(u32::try_from(next).expect("a short run")),
        took[took.len() / 2],
        took[took.len() * 99 / 100],
        took.len()
    );
    log.close().expect("a clean end");
}
