//! Segment files, and where in them the live entries are.

use std::fs::File;
use std::io;
use std::sync::Arc;

use super::disk::read_full;
use super::format::{FRAME_HEADER_BYTES, FrameHead, Stamp};

/// Bytes read ahead: a page of catch-up entries in one call.
const READ_CHUNK_BYTES: usize = 256 << 10;

/// An open segment. Whoever still holds it keeps its bytes: it is recycled only when nobody does.
#[derive(Debug)]
pub(super) struct SegmentFile {
    pub(super) file: File,
    pub(super) sequence: u64,
    pub(super) stamp: Stamp,
    pub(super) recycled: bool,
    /// Writing up to here changes no metadata, so it syncs fast. Going on behind it works too.
    pub(super) capacity_bytes: u64,
}

impl SegmentFile {
    pub(super) fn name(&self) -> String {
        segment_name(self.sequence)
    }
}

pub(super) fn segment_name(sequence: u64) -> String {
    format!("{sequence:016x}.log")
}

pub(super) fn spare_name(sequence: u64) -> String {
    format!("{sequence:016x}.spare")
}

/// What the frames of a batch do to the entries on disk, in their order.
#[derive(Debug)]
pub(super) enum Change {
    /// The following frames are in this segment.
    Rolled(Arc<SegmentFile>),
    Placed {
        index: u64,
        offset: u32,
    },
    /// Drops the entries from this index on.
    Truncated(u64),
    /// Drops the entries up to this index.
    Purged(u64),
}

/// The entries on disk: the live ones of each segment follow each other, and the segments do too.
#[derive(Debug, Default)]
pub(super) struct LiveIndex {
    segments: Vec<Segment>,
    /// The index that is written next.
    pub(super) next: u64,
}

/// Four bytes an entry, while a frame has at least twenty: the index is small beside what it points into.
#[derive(Debug)]
struct Segment {
    file: Arc<SegmentFile>,
    first: u64,
    offsets: Vec<u32>,
}

impl Segment {
    fn end(&self) -> u64 {
        self.first + self.offsets.len() as u64
    }
}

impl LiveIndex {
    pub(super) fn apply(&mut self, change: Change) {
        match change {
            Change::Rolled(file) => {
                self.segments.push(Segment { file, first: self.next, offsets: Vec::new() });
            }
            Change::Placed { index, offset } => {
                assert_eq!(index, self.next, "entries are written in order");
                let segment = self.segments.last_mut().expect("an entry is written into a segment");
                if segment.offsets.is_empty() {
                    segment.first = index;
                }
                assert_eq!(index, segment.end(), "a segment's live entries follow each other");
                segment.offsets.push(offset);
                self.next = index + 1;
            }
            Change::Truncated(from) => {
                self.next = self.next.min(from);
                for segment in self.segments.iter_mut().rev() {
                    let kept = usize::try_from(from.saturating_sub(segment.first)).unwrap_or(usize::MAX);
                    segment.offsets.truncate(kept);
                    if !segment.offsets.is_empty() {
                        break;
                    }
                }
            }
            Change::Purged(index) => {
                if index >= self.next {
                    self.next = index + 1;
                    self.segments.iter_mut().for_each(|segment| segment.offsets.clear());
                }
            }
        }
    }

    /// Takes out the segments that hold only entries up to `purged`, oldest first; never the newest segment.
    pub(super) fn retire(&mut self, purged: u64) -> Vec<Arc<SegmentFile>> {
        let newest = self.segments.len().saturating_sub(1);
        let dead = self.segments[..newest]
            .iter()
            .take_while(|segment| segment.offsets.is_empty() || segment.end() <= purged + 1)
            .count();
        self.segments.drain(..dead).map(|segment| segment.file).collect()
    }

    pub(super) fn segment_count(&self) -> usize {
        self.segments.len()
    }

    /// Returns the segments that hold `from..until` and the offsets of those entries.
    pub(super) fn places(
        &self,
        from: u64,
        until: u64,
    ) -> impl Iterator<Item = (&Arc<SegmentFile>, u64, &[u32])> {
        self.segments.iter().filter_map(move |segment| {
            let first = from.max(segment.first);
            let end = until.min(segment.end());
            if first >= end {
                return None;
            }
            let slot = |index: u64| usize::try_from(index - segment.first).expect("a slot of a vector");
            Some((&segment.file, first, &segment.offsets[slot(first)..slot(end)]))
        })
    }
}

/// Reads frames from a segment at any offset, fast when the offsets rise.
#[derive(Debug)]
pub(super) struct FrameReader<'a> {
    segment: &'a SegmentFile,
    file_bytes: u64,
    buffer: Vec<u8>,
    /// The file offset of the buffer's first byte.
    start: u64,
}

impl<'a> FrameReader<'a> {
    pub(super) fn new(segment: &'a SegmentFile) -> io::Result<Self> {
        let file_bytes = segment.file.metadata()?.len();
        Ok(Self { segment, file_bytes, buffer: Vec::new(), start: 0 })
    }

    /// Returns the frame at the offset, or nothing if there is no whole and intact one.
    pub(super) fn frame_at(&mut self, offset: u64) -> io::Result<Option<(FrameHead, &[u8])>> {
        let stamp = self.segment.stamp;
        let Some(head) = self.head_at(offset)? else { return Ok(None) };
        let Some(frame) = self.bytes_at(offset, head.frame_bytes())? else { return Ok(None) };
        Ok(head.checks(frame, stamp).then(|| (head, &frame[FRAME_HEADER_BYTES..])))
    }

    /// Returns what looks like a frame's head at the offset; its bytes are not checked.
    pub(super) fn head_at(&mut self, offset: u64) -> io::Result<Option<FrameHead>> {
        let stamp = self.segment.stamp;
        Ok(self.bytes_at(offset, FRAME_HEADER_BYTES)?.and_then(|bytes| FrameHead::decode(bytes, stamp)))
    }

    /// Returns the bytes there, or nothing if the file ends before.
    fn bytes_at(&mut self, offset: u64, length: usize) -> io::Result<Option<&[u8]>> {
        if offset.saturating_add(length as u64) > self.file_bytes {
            return Ok(None);
        }
        let held = self.start..=self.start + self.buffer.len() as u64;
        if !(held.contains(&offset) && held.contains(&(offset + length as u64))) {
            let rest_bytes = usize::try_from(self.file_bytes - offset).unwrap_or(usize::MAX);
            self.buffer.resize(rest_bytes.min(READ_CHUNK_BYTES).max(length), 0);
            let filled = read_full(&self.segment.file, &mut self.buffer, offset)?;
            self.buffer.truncate(filled);
            self.start = offset;
        }
        let at = usize::try_from(offset - self.start).expect("within the buffer");
        Ok(self.buffer.get(at..at + length))
    }
}
