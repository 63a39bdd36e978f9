//! Writing at a segment's end, past the page cache where the file system allows it.
//!
//! ```text
//! block       |--------|--------|--------|--------|
//! batch 1     |=====|                                block 0, filled up with zeros
//! batch 2           |==============|                 blocks 0 to 2: block 0 again, with what batch 1 left in it
//! ```
//! Through the page cache each batch would send whole pages of 4 KiB to the disk, its first and its last mostly of bytes
//! that are there already; a single put then costs 4 to 8 KiB. Direct writes go by blocks, nearly always of 512 bytes, and
//! the kernel neither keeps pages of what nobody reads again nor counts a whole folio of them as written for each put.
//!
//! The zeros behind a batch do no harm: they are no frame, and what a recycled segment has there is dead.

use std::fs::File;
use std::io;

use super::disk::{DIRECT_ALIGN_MAX, Direct, Disk, Purpose, read_full};
use super::segment::SegmentFile;

/// Copied and written at once.
const PIECE_BYTES: usize = 1 << 20;

/// Appends to the segment it was last started on.
pub(super) struct Appender {
    disk: Disk,
    direct: Option<Direct>,
    /// Holds an aligned piece; empty until a direct write is made.
    buffer: Vec<u8>,
    /// What the block that the next write starts in holds before it.
    partial: Vec<u8>,
}

impl Appender {
    pub(super) fn new(disk: Disk) -> Self {
        Self { disk, direct: None, buffer: Vec::new(), partial: Vec::new() }
    }

    /// Goes on in this segment, behind the bytes before `offset`.
    pub(super) fn start(&mut self, segment: &SegmentFile, offset: u64) -> io::Result<()> {
        self.partial.clear();
        self.direct = self.disk.open_direct(&segment.name());
        if let Some(direct) = &self.direct {
            let before = bytes_before(offset, direct.align);
            self.partial.resize(before, 0);
            let filled = read_full(&segment.file, &mut self.partial, offset - before as u64)?;
            if filled < before {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
        }
        Ok(())
    }

    /// Writes at the end, which is `offset`. Not durable before [`Appender::sync`].
    pub(super) fn write(&mut self, segment: &SegmentFile, mut bytes: &[u8], offset: u64) -> io::Result<()> {
        let Some(Direct { file, align }) = &self.direct else {
            return self.disk.write(Purpose::Append, &segment.file, bytes, offset);
        };
        let align = *align;
        if self.buffer.is_empty() {
            self.buffer = vec![0; PIECE_BYTES + DIRECT_ALIGN_MAX];
        }
        let aligned_from = self.buffer.as_ptr().align_offset(DIRECT_ALIGN_MAX);
        let piece = &mut self.buffer[aligned_from..aligned_from + PIECE_BYTES];
        assert_eq!(self.partial.len(), bytes_before(offset, align), "a write goes to the end");
        let mut at = offset - self.partial.len() as u64;
        while !bytes.is_empty() {
            let held = self.partial.len();
            let taken = bytes.len().min(PIECE_BYTES - held);
            let end = held + taken;
            let whole = end.next_multiple_of(align);
            piece[..held].copy_from_slice(&self.partial);
            piece[held..end].copy_from_slice(&bytes[..taken]);
            piece[end..whole].fill(0);
            self.disk.write(Purpose::Append, file, &piece[..whole], at)?;
            self.partial.clear();
            self.partial.extend_from_slice(&piece[end - end % align..end]);
            at += (end - end % align) as u64;
            bytes = &bytes[taken..];
        }
        Ok(())
    }

    /// Makes all that was written to the segment durable. Never to be tried again after an error.
    pub(super) fn sync(&self, segment: &SegmentFile) -> io::Result<()> {
        let file: &File = self.direct.as_ref().map_or(&segment.file, |direct| &direct.file);
        self.disk.sync(Purpose::Append, file)
    }
}

/// How far into its block an offset is.
fn bytes_before(offset: u64, align: usize) -> usize {
    usize::try_from(offset % align as u64).expect("less than a block")
}
