//! Putting records in the order of their revisions, in bounded memory.
//!
//! Records that do not fit are written in sorted runs to a file without a name, which the system removes with the process,
//! and merged when they are read. They can be read any number of times.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::ops::Range;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags};

use super::ExportError;
use crate::clock;
use crate::storage::schema::SubRevision;

/// Bytes of a record in a run before its payload: main, sub, length of the payload.
const RECORD_HEADER: usize = 16;
/// Bytes read of a run at a time, at most and at least; all runs together have [`MERGE_BYTES`].
const READ_BYTES: std::ops::RangeInclusive<usize> = 8 << 10..=256 << 10;
const MERGE_BYTES: usize = 8 << 20;

/// Takes records in any order.
pub(super) struct Sorter {
    dir: PathBuf,
    memory_bytes: usize,
    file_bytes_max: u64,
    entries: Vec<Entry>,
    payloads: Vec<u8>,
    file: Option<File>,
    file_bytes: u64,
    runs: Vec<Range<u64>>,
}

struct Entry {
    revision: SubRevision,
    payload: Range<usize>,
}

impl Sorter {
    /// Starts with `memory_bytes` of memory, and a file in `dir` of at most `file_bytes_max` when that is used up.
    pub(super) fn new(dir: &Path, memory_bytes: usize, file_bytes_max: u64) -> Sorter {
        Sorter {
            dir: dir.to_owned(),
            memory_bytes,
            file_bytes_max,
            entries: Vec::new(),
            // At once: growing would hold the old and the new for a moment. What is not used is never touched.
            payloads: Vec::with_capacity(memory_bytes),
            file: None,
            file_bytes: 0,
            runs: Vec::new(),
        }
    }

    /// Adds a record, whose payload is `parts` one after the other.
    ///
    /// # Errors
    /// [`ExportError::NoRoom`], [`ExportError::Io`].
    pub(super) fn push(&mut self, revision: SubRevision, parts: &[&[u8]]) -> Result<(), ExportError> {
        let length: usize = parts.iter().map(|part| part.len()).sum();
        let held = self.payloads.len() + self.entries.len() * size_of::<Entry>();
        if !self.entries.is_empty() && held + length > self.memory_bytes {
            self.spill()?;
        }
        let start = self.payloads.len();
        for part in parts {
            self.payloads.extend_from_slice(part);
        }
        self.entries.push(Entry { revision, payload: start..start + length });
        Ok(())
    }

    /// Bytes that the file may still take.
    pub(super) fn file_bytes_left(&self) -> u64 {
        self.file_bytes_max - self.file_bytes
    }

    fn spill(&mut self) -> Result<(), ExportError> {
        self.entries.sort_unstable_by_key(|entry| entry.revision);
        let size = (self.payloads.len() + self.entries.len() * RECORD_HEADER) as u64;
        if size > self.file_bytes_left() {
            return Err(ExportError::NoRoom { needed_bytes: self.file_bytes + size });
        }
        let file = match &self.file {
            Some(file) => file,
            None => self.file.insert(unnamed_file(&self.dir)?),
        };
        let start = self.file_bytes;
        let mut out = io::BufWriter::with_capacity(*READ_BYTES.end(), At { file, offset: start });
        for entry in &self.entries {
            let payload = &self.payloads[entry.payload.clone()];
            let length =
                u32::try_from(payload.len()).map_err(|_| io::Error::from(io::ErrorKind::FileTooLarge))?;
            io::Write::write_all(&mut out, &entry.revision.main.to_le_bytes())?;
            io::Write::write_all(&mut out, &entry.revision.sub.to_le_bytes())?;
            io::Write::write_all(&mut out, &length.to_le_bytes())?;
            io::Write::write_all(&mut out, payload)?;
        }
        io::Write::flush(&mut out)?;
        drop(out);
        self.file_bytes += size;
        self.runs.push(start..start + size);
        self.entries.clear();
        self.payloads.clear();
        Ok(())
    }

    /// Ends taking.
    pub(super) fn finish(mut self) -> Sorted {
        self.entries.sort_unstable_by_key(|entry| entry.revision);
        Sorted { entries: self.entries, payloads: self.payloads, file: self.file, runs: self.runs }
    }
}

/// A file that ends with its last user.
fn unnamed_file(dir: &Path) -> io::Result<File> {
    let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
    if let Ok(file) = rustix::fs::open(dir, flags, Mode::RUSR | Mode::WUSR) {
        return Ok(file.into());
    }
    // A file system that knows no such files: it has a name for a moment.
    let random = u64::from_le_bytes(clock::random());
    let path = dir.join(format!("sorting-{random:016x}.tmp"));
    let file = OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(&path)?;
    fs::remove_file(&path)?;
    Ok(file)
}

struct At<'f> {
    file: &'f File,
    offset: u64,
}

impl io::Write for At<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.file.write_at(bytes, self.offset)?;
        self.offset += written as u64;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Records that have all been taken.
pub(super) struct Sorted {
    entries: Vec<Entry>,
    payloads: Vec<u8>,
    file: Option<File>,
    runs: Vec<Range<u64>>,
}

impl Sorted {
    /// Reads all records, from the lowest revision to the highest.
    ///
    /// # Errors
    /// The file's.
    pub(super) fn read(&self) -> io::Result<Merge<'_>> {
        let piece = (MERGE_BYTES / self.runs.len().max(1)).clamp(*READ_BYTES.start(), *READ_BYTES.end());
        let mut merge =
            Merge { sorted: self, in_memory: 0, runs: Vec::new(), next: BinaryHeap::new(), last: None };
        for range in &self.runs {
            merge.runs.push(Run { unread: range.clone(), buffer: Vec::new(), at: 0, piece });
            merge.queue(merge.runs.len() - 1)?;
        }
        merge.queue(merge.runs.len())?;
        Ok(merge)
    }
}

/// One reading of all records; see [`Sorted::read`].
pub(super) struct Merge<'s> {
    sorted: &'s Sorted,
    /// The next of the records that are in memory.
    in_memory: usize,
    runs: Vec<Run>,
    /// The next revision of each run; what is in memory is the last.
    next: BinaryHeap<Reverse<(SubRevision, usize)>>,
    /// The run that the last record came from.
    last: Option<usize>,
}

impl Merge<'_> {
    /// The next record: its revision and payload.
    ///
    /// # Errors
    /// The file's.
    pub(super) fn next(&mut self) -> io::Result<Option<(SubRevision, &[u8])>> {
        if let Some(run) = self.last.take() {
            self.queue(run)?;
        }
        let Some(Reverse((revision, run))) = self.next.pop() else { return Ok(None) };
        self.last = Some(run);
        let payload = match self.runs.get_mut(run) {
            Some(run) => run.take(),
            None => {
                self.in_memory += 1;
                &self.sorted.payloads[self.sorted.entries[self.in_memory - 1].payload.clone()]
            }
        };
        Ok(Some((revision, payload)))
    }

    fn queue(&mut self, run: usize) -> io::Result<()> {
        let revision = match (self.runs.get_mut(run), &self.sorted.file) {
            (Some(run), Some(file)) => run.peek(file)?,
            _ => self.sorted.entries.get(self.in_memory).map(|entry| entry.revision),
        };
        self.next.extend(revision.map(|revision| Reverse((revision, run))));
        Ok(())
    }
}

/// A run as far as it is read.
struct Run {
    unread: Range<u64>,
    buffer: Vec<u8>,
    at: usize,
    piece: usize,
}

impl Run {
    /// Has the next record in the buffer whole, and gives its revision; `None` at the end.
    fn peek(&mut self, file: &File) -> io::Result<Option<SubRevision>> {
        if !self.fill(file, RECORD_HEADER)? {
            return Ok(None);
        }
        let length = self.payload_len();
        if !self.fill(file, RECORD_HEADER + length)? {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let header = &self.buffer[self.at..];
        let main = i64::from_le_bytes(header[..8].try_into().expect("eight bytes"));
        let sub = u32::from_le_bytes(header[8..12].try_into().expect("four bytes"));
        Ok(Some(SubRevision { main, sub }))
    }

    fn payload_len(&self) -> usize {
        let length = &self.buffer[self.at + 12..self.at + RECORD_HEADER];
        usize::try_from(u32::from_le_bytes(length.try_into().expect("four bytes"))).expect("32 bits fit")
    }

    /// Has `wanted` bytes in the buffer; false if there is nothing more.
    fn fill(&mut self, file: &File, wanted: usize) -> io::Result<bool> {
        let held = self.buffer.len() - self.at;
        if held >= wanted {
            return Ok(true);
        }
        self.buffer.drain(..self.at);
        self.at = 0;
        let left = usize::try_from(self.unread.end - self.unread.start).unwrap_or(usize::MAX);
        let more = (wanted - held).max(self.piece).min(left);
        self.buffer.resize(held + more, 0);
        file.read_exact_at(&mut self.buffer[held..], self.unread.start)?;
        self.unread.start += more as u64;
        Ok(held + more >= wanted)
    }

    fn take(&mut self) -> &[u8] {
        let start = self.at + RECORD_HEADER;
        let end = start + self.payload_len();
        self.at = end;
        &self.buffer[start..end]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_come_back_in_order_whether_or_not_they_fit() {
        let dir = tempfile::tempdir().expect("a directory");
        for (seed, memory) in [(1, 1 << 20), (2, 4000), (3, 100), (4, 1)] {
            let mut random = fastrand::Rng::with_seed(seed);
            let mut expected: Vec<(SubRevision, Vec<u8>)> = (0..500)
                .map(|at| {
                    let payload = vec![random.u8(..); random.usize(0..200) * random.usize(0..200)];
                    (SubRevision { main: at / 3, sub: u32::try_from(at % 3).expect("small") }, payload)
                })
                .collect();
            let mut sorter = Sorter::new(dir.path(), memory, u64::MAX);
            random.shuffle(&mut expected);
            for (revision, payload) in &expected {
                let (one, other) = payload.split_at(payload.len() / 2);
                sorter.push(*revision, &[one, other]).expect("there is room");
            }
            expected.sort();
            let sorted = sorter.finish();
            for _ in 0..2 {
                let mut read = sorted.read().expect("it reads");
                for (revision, payload) in &expected {
                    let found = read.next().expect("it reads");
                    assert_eq!(found, Some((*revision, &payload[..])), "seed {seed}");
                }
                assert_eq!(read.next().expect("it reads"), None);
            }
        }
        assert_eq!(fs::read_dir(dir.path()).expect("it lists").count(), 0, "nothing is left behind");
    }

    #[test]
    fn a_file_that_would_grow_past_its_bound_is_not_written() {
        let dir = tempfile::tempdir().expect("a directory");
        let mut sorter = Sorter::new(dir.path(), 1000, 5000);
        let pushed = (0..100).try_for_each(|main| sorter.push(SubRevision { main, sub: 0 }, &[&[0; 100]]));
        assert!(matches!(pushed, Err(ExportError::NoRoom { .. })));
    }
}
