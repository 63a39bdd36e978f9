//! Power cuts: rebuilds what may have survived of the last batch, byte by byte and sector by sector, and opens it.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;

use bytes::Bytes;

use super::{append, as_one_batch, contents, file_names, flush, open, settled_names, wait};
use crate::storage::log::{Log, Recovered};

/// A directory's files.
type Image = BTreeMap<String, Vec<u8>>;

fn capture(dir: &Path) -> Image {
    let read = |name: String| {
        let bytes = std::fs::read(dir.join(&name)).expect("the file reads");
        (name, bytes)
    };
    file_names(dir).into_iter().map(read).collect()
}

fn restore(image: &Image) -> tempfile::TempDir {
    let dir = tempfile::tempdir().expect("a directory");
    for (name, bytes) in image {
        std::fs::write(dir.path().join(name), bytes).expect("the file writes");
    }
    dir
}

/// The log before and after its last batch.
struct LastBatch {
    before: Image,
    after: Image,
    /// The segment it went to, and where.
    name: String,
    bytes: Range<usize>,
    entries_before: Vec<(u64, Vec<u8>)>,
    entries_after: Vec<(u64, Vec<u8>)>,
}

impl LastBatch {
    fn write(dir: &Path, log: Log, batch: impl FnOnce(&Log)) -> Self {
        settled_names(dir, &log);
        let before = capture(dir);
        let entries_before = contents(&log);
        as_one_batch(&log, || batch(&log));
        let after = capture(dir);
        let entries_after = contents(&log);
        log.close().expect("a clean end");
        let changed: Vec<_> = before.iter().filter(|(name, bytes)| after[*name] != **bytes).collect();
        let [(name, old)] = changed[..] else { panic!("{} files were written", changed.len()) };
        let new = &after[name];
        let differs = |at: &usize| old.get(*at) != new.get(*at);
        let start = (0..new.len()).find(differs).expect("it differs");
        let end = (0..new.len()).rev().find(differs).expect("it differs") + 1;
        let (name, bytes) = (name.clone(), start..end);
        Self { before, after, name, bytes, entries_before, entries_after }
    }

    /// Opens the log with these bytes in the segment; it must hold the batch whole or not at all, and go on.
    fn check(&self, segment: Vec<u8>, whole: bool) -> Recovered {
        let mut image = self.before.clone();
        image.insert(self.name.clone(), segment);
        let dir = restore(&image);
        let (log, recovered) = open(dir.path());
        let expected = if whole { &self.entries_after } else { &self.entries_before };
        assert_eq!(&contents(&log), expected);
        append(&log, &[b"next", b"and next"]);
        let expected = contents(&log);
        log.close().expect("a clean end");
        let (log, again) = open(dir.path());
        assert_eq!(contents(&log), expected);
        assert_eq!(again.cut_bytes, 0, "cut once");
        recovered
    }
}

/// A log whose current segment was zero-filled.
fn zero_filled() -> (tempfile::TempDir, Log) {
    let dir = tempfile::tempdir().expect("a directory");
    let (log, _) = open(dir.path());
    append(&log, &[b"one", b"two"]);
    append(&log, &[b"three"]);
    (dir, log)
}

/// A log whose current segment is full of frames from its earlier life.
fn recycled() -> (tempfile::TempDir, Log) {
    let dir = tempfile::tempdir().expect("a directory");
    let (log, _) = open(dir.path());
    for _ in 0..30 {
        append(&log, &[&b"some old entry"[..]; 30]);
        let last = log.bounds().end - 1;
        wait(|done| log.purge_to(last, Bytes::new(), done).expect("small")).expect("purged");
        settled_names(dir.path(), &log);
    }
    // Into a segment that has only begun.
    let segments = log.stats().segments;
    while log.stats().segments == segments {
        append(&log, &[&[1; 200]]);
    }
    append(&log, &[b"three"]);
    settled_names(dir.path(), &log);
    let name = current_segment(dir.path());
    assert_eq!(capture(dir.path())[&name][48], 1, "{name} was recycled");
    (dir, log)
}

/// The newest segment that has begun.
fn current_segment(dir: &Path) -> String {
    let mut names = file_names(dir).into_iter().filter(|name| name.ends_with(".log")).rev();
    let _ahead = names.next().expect("the next one is made");
    names.next().expect("one has begun")
}

fn small_batch(log: &Log) {
    let next = log.bounds().end;
    log.append(vec![(next, Bytes::from_static(b"four")), (next + 1, Bytes::from_static(b"five"))], |_| ())
        .expect("they follow");
    log.save_vote(Bytes::from_static(b"vote"), |_| ()).expect("small");
    log.append(vec![(next + 2, Bytes::from_static(b"six"))], |_| ()).expect("it follows");
}

fn cut_at_every_byte((dir, log): (tempfile::TempDir, Log)) {
    let last = LastBatch::write(dir.path(), log, small_batch);
    let (before, after) = (&last.before[&last.name], &last.after[&last.name]);
    assert!(last.bytes.len() > 80, "four frames");
    for cut in last.bytes.clone() {
        // What was there before, zeros, garbage.
        for filler in [None, Some(0), Some(0xa5)] {
            let mut segment = after.clone();
            for at in cut..last.bytes.end {
                segment[at] = filler.unwrap_or(before[at]);
            }
            if segment != *after {
                last.check(segment, false);
            }
        }
    }
    last.check(after.clone(), true);
    let recovered = last.check(before.clone(), false);
    assert_eq!(recovered.cut_bytes, 0, "nothing was torn");
}

#[test]
fn a_batch_cut_at_any_byte_is_dropped_whole() {
    cut_at_every_byte(zero_filled());
}

#[test]
fn a_batch_cut_at_any_byte_of_a_recycled_segment_is_dropped_whole() {
    cut_at_every_byte(recycled());
}

/// Sectors reach the disk in any order: every subset of them is a possible past.
fn lose_sectors((dir, log): (tempfile::TempDir, Log)) {
    const SECTOR: usize = 64;
    let last = LastBatch::write(dir.path(), log, |log| {
        let next = log.bounds().end;
        let entries = (next..next + 12).map(|index| (index, Bytes::from(vec![b'x'; 20]))).collect();
        log.append(entries, |_| ()).expect("they follow");
    });
    let sectors = last.bytes.start / SECTOR..last.bytes.end.div_ceil(SECTOR);
    assert!((7..=10).contains(&sectors.len()), "{sectors:?}");
    let (before, after) = (&last.before[&last.name], &last.after[&last.name]);
    for survived in 0..1u32 << sectors.len() {
        let mut segment = before.clone();
        for (bit, sector) in sectors.clone().enumerate() {
            if survived >> bit & 1 == 1 {
                let sector = sector * SECTOR..(sector + 1) * SECTOR;
                segment[sector.clone()].copy_from_slice(&after[sector]);
            }
        }
        let recovered = last.check(segment.clone(), segment == *after);
        let torn = segment != *after && segment != *before;
        assert!(torn || recovered.cut_bytes == 0);
        if torn && survived & 1 == 1 {
            assert!(recovered.cut_bytes > 0, "the first frame's head survived, so its batch shows");
        }
    }
}

#[test]
fn any_sectors_of_the_last_batch_may_be_lost() {
    lose_sectors(zero_filled());
}

#[test]
fn any_sectors_of_the_last_batch_of_a_recycled_segment_may_be_lost() {
    lose_sectors(recycled());
}

#[test]
fn the_first_batch_of_a_segment_may_be_torn() {
    let dir = tempfile::tempdir().expect("a directory");
    let (log, _) = open(dir.path());
    wait(|done| log.save_vote(Bytes::from_static(b"vote"), done).expect("small")).expect("saved");
    let fill = &[9; 1000][..];
    append(&log, &[fill; 3]);
    // The next entry does not fit any more.
    let last = LastBatch::write(dir.path(), log, |log| {
        let next = log.bounds().end;
        log.append(vec![(next, Bytes::from(vec![1; 1500]))], |_| ()).expect("it follows");
    });
    assert_eq!(last.bytes.start, 64, "it begins a segment");
    let after = &last.after[&last.name];
    for cut in last.bytes.clone().step_by(7) {
        let mut segment = after.clone();
        segment[cut..last.bytes.end].fill(0);
        let recovered = last.check(segment, false);
        assert_eq!(recovered.vote.as_deref(), Some(&b"vote"[..]));
        // The later sectors alone.
        let mut segment = after.clone();
        segment[last.bytes.start..cut + 1].fill(0);
        last.check(segment, false);
    }
    last.check(after.clone(), true);
}

#[test]
fn a_crash_while_the_next_segment_is_made_leaves_no_trace() {
    let (dir, log) = zero_filled();
    settled_names(dir.path(), &log);
    flush(&log);
    let mut image = capture(dir.path());
    let expected = contents(&log);
    let (ahead, _) = image.pop_last().expect("the next one is made");
    assert!(ahead.ends_with(".log"));
    image.insert("next.tmp".to_owned(), vec![0; 1000]);
    let dir = restore(&image);
    let (log, _) = open(dir.path());
    assert_eq!(contents(&log), expected);
    settled_names(dir.path(), &log);
}
