//! Writes past the page cache: batches of every size, across blocks, segments and restarts.

use bytes::Bytes;

use super::super::disk::Disk;
use super::{append, contents, options, wait};
use crate::storage::log::{Log, LogOptions};

fn synced(dir: &std::path::Path) -> LogOptions {
    LogOptions { no_fsync: false, ..options(dir) }
}

/// On the disk of the build: the directory for temporary files may be in memory.
fn on_disk() -> tempfile::TempDir {
    let program = std::env::current_exe().expect("a program has a path");
    tempfile::tempdir_in(program.parent().expect("it is in a directory")).expect("a directory")
}

#[test]
fn batches_of_all_sizes_are_there_after_restarts() {
    let dir = on_disk();
    let mut random = fastrand::Rng::with_seed(7);
    let mut expected = Vec::new();
    for round in 0..6u64 {
        let (log, recovered) = Log::open(synced(dir.path())).expect("the log opens");
        assert_eq!(recovered.cut_bytes, 0, "what was padded is no torn tail");
        assert_eq!(contents(&log), expected);
        for size in [0, 1, 400, 447, 448, 449, 512, 3000, 5000] {
            let payloads: Vec<Vec<u8>> = (0..random.usize(1..5)).map(|_| vec![random.u8(..); size]).collect();
            append(&log, &payloads.iter().map(Vec::as_slice).collect::<Vec<_>>());
            let next = expected.last().map_or(log.bounds().start, |(index, _)| index + 1);
            expected.extend((next..).zip(payloads));
        }
        if round % 2 == 1 {
            // Segments are recycled from then on.
            let last = expected[expected.len() / 2].0;
            wait(|done| log.purge_to(last, Bytes::new(), done).expect("small")).expect("purged");
            expected.retain(|(index, _)| *index > last);
        }
        assert_eq!(contents(&log), expected);
        log.close().expect("a clean end");
    }
}

#[test]
fn a_record_of_several_pieces_is_kept() {
    let dir = on_disk();
    let (log, _) = Log::open(synced(dir.path())).expect("the log opens");
    let large: Vec<u8> = (0..3u32 << 18).flat_map(u32::to_le_bytes).collect();
    append(&log, &[b"a", &large, b"b"]);
    log.close().expect("a clean end");
    let (log, _) = Log::open(LogOptions { tail_bytes: 0, ..synced(dir.path()) }).expect("the log opens");
    let found: Vec<_> = contents(&log).into_iter().map(|(_, payload)| payload).collect();
    assert_eq!(found, [b"a".to_vec(), large, b"b".to_vec()]);
}

#[test]
fn without_syncs_the_page_cache_is_used() {
    let dir = tempfile::tempdir().expect("a directory");
    let disk = Disk::new(dir.path().to_path_buf(), true);
    disk.create("file").expect("it is created");
    assert!(disk.open_direct("file").is_none());
}
