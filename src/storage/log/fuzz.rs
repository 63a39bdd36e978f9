//! Arbitrary bytes as the files of a log: opening them must not panic, a refusal must leave them untouched, and what is
//! accepted must read back, go on, and be the same again after a restart.
//!
//! Plain bytes would never pass a checksum, so the input is a script: it writes good frames in any order and number, then
//! raw bytes and flipped bits among them. Run with coverage by `fuzz/` and on seeds by the unit tests.

use std::collections::BTreeMap;
use std::io;
use std::path::Path;
use std::sync::mpsc;

use bytes::Bytes;

use super::disk::Disk;
use super::format::{BatchBuilder, Kind, SEGMENT_HEADER_BYTES, SegmentHeader};
use super::segment::segment_name;
use super::writer::Standing;
use super::{Log, LogOptions};

/// Opens the files the script describes, in this directory, and checks what must hold. Removes them afterwards.
pub fn check(dir: &Path, script: &[u8]) {
    let files = Files::write(script);
    for (name, bytes) in &files {
        std::fs::write(dir.join(name), bytes).expect("the test's file writes");
    }
    match open(dir) {
        Err(_) => assert_eq!(read_files(dir), files, "a refused log is not touched"),
        Ok(log) => {
            let mut expected = contents(&log);
            let next = log.bounds().end;
            let payload = Bytes::from_static(b"one more");
            let (sender, receiver) = mpsc::channel();
            let appended = log.append(vec![(next, payload.clone())], move |result: io::Result<()>| {
                sender.send(result).expect("the test waits");
            });
            if appended.is_ok() {
                receiver.recv().expect("the log answers").expect("the log works");
                expected.push((next, payload));
            }
            log.close().expect("a clean end");
            let log = open(dir).expect("what was accepted opens again");
            assert_eq!(contents(&log), expected);
            log.close().expect("a clean end");
        }
    }
    for name in read_files(dir).keys() {
        std::fs::remove_file(dir.join(name)).expect("the test's file goes");
    }
}

fn open(dir: &Path) -> Result<Log, super::LogError> {
    let options =
        LogOptions { segment_bytes: 4 << 10, tail_bytes: 500, no_fsync: true, ..LogOptions::new(dir) };
    Log::open(options).map(|(log, recovered)| {
        assert_eq!(log.bounds(), recovered.first_index..recovered.next_index);
        log
    })
}

fn contents(log: &Log) -> Vec<(u64, Bytes)> {
    let bounds = log.bounds();
    let mut found = Vec::new();
    while let Some(next) = Some(bounds.start + found.len() as u64).filter(|next| *next < bounds.end) {
        let entries = log.read(next..bounds.end, 1000).expect("what was accepted reads");
        assert_eq!(entries.first().map(|(index, _)| *index), Some(next));
        found.extend(entries);
    }
    found
}

fn read_files(dir: &Path) -> BTreeMap<String, Vec<u8>> {
    let names = Disk::new(dir.to_path_buf(), true).list().expect("the directory lists");
    names
        .into_iter()
        .map(|name| (name.clone(), std::fs::read(dir.join(name)).expect("the file reads")))
        .collect()
}

/// What a script has written so far.
struct Files {
    done: BTreeMap<String, Vec<u8>>,
    sequence: u64,
    segment: Vec<u8>,
    batch: BatchBuilder,
    number: u32,
    next: u64,
    standing: Standing,
}

impl Files {
    fn write(script: &[u8]) -> BTreeMap<String, Vec<u8>> {
        let mut files = Self {
            done: BTreeMap::new(),
            sequence: 0,
            segment: Vec::new(),
            batch: BatchBuilder::new(0, header(0, false).stamp()),
            number: 0,
            next: 0,
            standing: Standing::default(),
        };
        files.start_segment(false);
        let mut script = script.iter().copied();
        while let Some(step) = script.next() {
            let argument = script.next().unwrap_or_default();
            files.step(step, argument, &mut script);
        }
        files.batch.seal();
        files.close_segment();
        files.done
    }

    fn step(&mut self, step: u8, argument: u8, script: &mut impl Iterator<Item = u8>) {
        let near = (self.next + u64::from(argument)).saturating_sub(8);
        let payload = vec![argument; usize::from(argument) * 3];
        match step % 18 {
            0..5 => {
                self.batch.push(Kind::Entry, self.next, &payload);
                self.next += 1;
            }
            5 => self.batch.push(Kind::Entry, near, &payload),
            6 => {
                self.batch.push(Kind::Vote, 0, &payload);
                self.standing.vote = Some(payload.into());
            }
            7 => {
                self.batch.push(Kind::Committed, 0, &payload);
                self.standing.committed = Some(payload.into());
            }
            8 => {
                self.batch.push(Kind::Truncate, near, &[]);
                self.next = self.next.min(near);
            }
            9 => {
                self.batch.push(Kind::Purge, near, &payload);
                self.next = self.next.max(near + 1);
                if self.standing.purged.as_ref().is_none_or(|(purged, _)| *purged < near) {
                    self.standing.purged = Some((near, payload.into()));
                }
            }
            10 => self.batch.push(Kind::Start, near, &payload),
            11 | 12 => self.finish_batch(1),
            13 => self.finish_batch(u32::from(argument)),
            14 => {
                self.batch.seal();
                self.take_batch();
                self.segment.extend(script.take(usize::from(argument)));
            }
            15 => self.segment.extend(vec![0; usize::from(argument) * 64]),
            16 => {
                self.finish_batch(1);
                self.close_segment();
                self.start_segment(argument % 2 == 1);
            }
            _ => {
                let at = usize::from(argument) * 7 % self.segment.len();
                self.segment[at] ^= script.next().unwrap_or(1);
            }
        }
    }

    fn start_segment(&mut self, recycled: bool) {
        let previous_end = self.segment.len() as u64;
        self.sequence += 1;
        let header = header(self.sequence, recycled);
        self.segment = header.encode().to_vec();
        self.number = 1;
        self.batch = BatchBuilder::new(self.number, header.stamp());
        self.batch.push(Kind::Start, self.next, &previous_end.to_le_bytes());
        for (kind, index, payload) in self.standing.frames() {
            self.batch.push(kind, index, &payload);
        }
    }

    fn close_segment(&mut self) {
        self.take_batch();
        assert!(self.segment.len() >= SEGMENT_HEADER_BYTES);
        self.done.insert(segment_name(self.sequence), self.segment.clone());
    }

    fn finish_batch(&mut self, step: u32) {
        self.batch.finish();
        self.take_batch();
        self.number += step;
        let stamp = header(self.sequence, false).stamp();
        self.batch.restart(self.number, stamp);
    }

    fn take_batch(&mut self) {
        self.segment.extend_from_slice(self.batch.bytes());
        self.batch.clear();
    }
}

/// Segment headers of one log; with a fixed salt, for the same script must give the same files.
fn header(sequence: u64, recycled: bool) -> SegmentHeader {
    SegmentHeader {
        log_id: *b"the fuzzed log..",
        sequence,
        salt: 1 << 63 | 0x5eed << 32 | sequence,
        recycled,
    }
}
