//! The log thread: takes what is queued, writes it as one batch, syncs once, reports.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;

use super::append::Appender;
use super::disk::Disk;
use super::format::{BatchBuilder, FRAME_HEADER_BYTES, Kind, SEGMENT_HEADER_BYTES};
use super::queue::{Op, Record, Shared};
use super::segment::{Change, SegmentFile};
use super::supply::Supply;
use crate::clock;

/// A batch's frames are written when this much has gathered, so the buffer stays small.
const WRITE_BYTES: usize = 1 << 20;

/// Pause before a write that found the disk full is made again.
const FULL_PAUSE: Duration = Duration::from_millis(100);

/// Each next segment is this much larger, up to the full size: a fresh member is ready at once, and the zeros written
/// ahead stay in proportion to what is written at all.
const GROWTH: u64 = 4;

/// The records that every segment repeats at its start, so that the ones before it can go.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Standing {
    pub(super) purged: Option<(u64, Bytes)>,
    pub(super) vote: Option<Bytes>,
    pub(super) committed: Option<Bytes>,
}

impl Standing {
    /// The frames that repeat them, in their order.
    pub(super) fn frames(&self) -> impl Iterator<Item = (Kind, u64, Bytes)> {
        let purged = self.purged.iter().map(|(index, payload)| (Kind::Purge, *index, payload.clone()));
        let vote = self.vote.iter().map(|payload| (Kind::Vote, 0, payload.clone()));
        let committed = self.committed.iter().map(|payload| (Kind::Committed, 0, payload.clone()));
        purged.chain(vote).chain(committed)
    }
}

/// Where writing goes on.
#[derive(Debug)]
pub(super) struct Position {
    pub(super) segment: Arc<SegmentFile>,
    /// Where the next batch goes.
    pub(super) offset: u64,
    /// The next batch's number.
    pub(super) batch: u32,
    /// Where the segment before ends.
    pub(super) previous_end: u64,
    /// The index of the entry that is written next.
    pub(super) next_index: u64,
}

pub(super) struct Writer {
    shared: Arc<Shared>,
    supply: Arc<Supply>,
    appender: Appender,
    segment_bytes: u64,
    standing: Standing,
    at: Position,
    batch: BatchBuilder,
    /// Bytes of the batch that are written already.
    written: u64,
    /// The segment after this one is ordered or made.
    ordered: bool,
    changes: Vec<Change>,
    total_bytes: u64,
}

impl Writer {
    pub(super) fn new(
        shared: Arc<Shared>,
        supply: Arc<Supply>,
        disk: Disk,
        segment_bytes: u64,
        standing: Standing,
        at: Position,
        next_is_ready: bool,
    ) -> io::Result<Self> {
        let batch = BatchBuilder::new(at.batch, at.segment.stamp);
        let mut appender = Appender::new(disk);
        appender.start(&at.segment, at.offset)?;
        let mut writer = Self {
            shared,
            supply,
            appender,
            segment_bytes,
            standing,
            at,
            batch,
            written: 0,
            ordered: next_is_ready,
            changes: Vec::new(),
            total_bytes: 0,
        };
        writer.order_next();
        Ok(writer)
    }

    pub(super) fn run(mut self) {
        let shared = Arc::clone(&self.shared);
        let _alarm = PanicAlarm(&shared);
        while let Some(ops) = shared.take() {
            if !self.take_batch(ops) {
                return;
            }
        }
    }

    /// What it shares with callers.
    #[cfg(feature = "sim")]
    pub(super) fn shared(&self) -> Arc<Shared> {
        Arc::clone(&self.shared)
    }

    /// Writes what was queued and reports; false when that ended the log.
    pub(super) fn take_batch(&mut self, ops: Vec<Op>) -> bool {
        self.shared.set_busy(Some(clock::now()));
        if let Err(error) = self.write(&ops) {
            self.shared.fail(&error, ops);
            return false;
        }
        let changes = std::mem::take(&mut self.changes);
        self.shared.set_busy(None);
        let retired = self.shared.settle(&ops, changes, std::mem::take(&mut self.total_bytes));
        for done in ops.into_iter().filter_map(|op| op.done) {
            done(Ok(()));
        }
        if !retired.is_empty() {
            self.supply.retire(retired);
        }
        true
    }

    /// Writes the operations and syncs them.
    fn write(&mut self, ops: &[Op]) -> io::Result<()> {
        for op in ops {
            match &op.record {
                Record::Append(entries) => {
                    for (index, payload) in entries {
                        self.put(Kind::Entry, *index, payload)?;
                    }
                }
                Record::Vote(payload) => {
                    self.put(Kind::Vote, 0, payload)?;
                    self.standing.vote = Some(payload.clone());
                }
                Record::Committed(payload) => {
                    self.put(Kind::Committed, 0, payload)?;
                    self.standing.committed = Some(payload.clone());
                }
                Record::Truncate(from) => self.put(Kind::Truncate, *from, &[])?,
                Record::Purge(index, payload) => {
                    if self.standing.purged.as_ref().is_none_or(|(purged, _)| purged < index) {
                        self.put(Kind::Purge, *index, payload)?;
                        self.standing.purged = Some((*index, payload.clone()));
                    }
                }
            }
        }
        self.finish_batch()
    }

    fn put(&mut self, kind: Kind, index: u64, payload: &[u8]) -> io::Result<()> {
        let frame_bytes = (FRAME_HEADER_BYTES + payload.len()) as u64;
        if self.has_started()
            && self.end() + frame_bytes > self.at.segment.capacity_bytes
            && let Some(next) = self.supply.take_ready()
        {
            self.finish_batch()?;
            self.roll(next)?;
        }
        if !self.has_started() {
            self.push_start()?;
        }
        self.push(kind, index, payload)
    }

    fn push_start(&mut self) -> io::Result<()> {
        self.changes.push(Change::Rolled(Arc::clone(&self.at.segment)));
        self.push(Kind::Start, self.at.next_index, &self.at.previous_end.to_le_bytes())?;
        let standing: Vec<_> = self.standing.frames().collect();
        for (kind, index, payload) in standing {
            self.push(kind, index, &payload)?;
        }
        Ok(())
    }

    fn push(&mut self, kind: Kind, index: u64, payload: &[u8]) -> io::Result<()> {
        if self.batch.len() >= WRITE_BYTES {
            self.batch.seal();
            self.write_out()?;
        }
        let Ok(offset) = u32::try_from(self.end()) else {
            return Err(io::Error::other("the log segment is full, and no next one could be made"));
        };
        self.batch.push(kind, index, payload);
        match kind {
            Kind::Entry => {
                self.changes.push(Change::Placed { index, offset });
                self.at.next_index = index + 1;
            }
            Kind::Truncate => {
                self.changes.push(Change::Truncated(index));
                self.at.next_index = self.at.next_index.min(index);
            }
            Kind::Purge => {
                self.changes.push(Change::Purged(index));
                self.at.next_index = self.at.next_index.max(index + 1);
            }
            Kind::Vote | Kind::Committed | Kind::Start => {}
        }
        Ok(())
    }

    /// The file offset behind all frames of this batch.
    fn end(&self) -> u64 {
        self.at.offset + self.written + self.batch.len() as u64
    }

    fn has_started(&self) -> bool {
        self.end() > SEGMENT_HEADER_BYTES as u64
    }

    fn write_out(&mut self) -> io::Result<()> {
        let bytes = self.batch.bytes();
        let started = clock::now();
        while let Err(error) = self.appender.write(&self.at.segment, bytes, self.at.offset + self.written) {
            // Nothing was synced, so the same write can be made again; giving up would end the member.
            if error.kind() != io::ErrorKind::StorageFull {
                return Err(error);
            }
            if let Some(observer) = &self.shared.observer {
                observer.disk_full();
            }
            if !self.shared.pause(FULL_PAUSE) {
                return Err(error);
            }
            self.appender.start(&self.at.segment, self.at.offset + self.written)?;
        }
        if let Some(observer) = &self.shared.observer {
            observer.wrote(bytes.len(), clock::now() - started);
        }
        self.written += bytes.len() as u64;
        self.batch.clear();
        Ok(())
    }

    /// Writes what is left of the batch and syncs it: only then may the next one be written.
    fn finish_batch(&mut self) -> io::Result<()> {
        if self.batch.len() == 0 {
            assert_eq!(self.written, 0, "a batch is written to its end");
            return Ok(());
        }
        self.batch.finish();
        self.write_out()?;
        let started = clock::now();
        self.appender.sync(&self.at.segment)?;
        if let Some(observer) = &self.shared.observer {
            observer.synced(clock::now() - started);
        }
        self.total_bytes += self.written;
        self.at.offset += std::mem::take(&mut self.written);
        self.at.batch += 1;
        self.batch.restart(self.at.batch, self.at.segment.stamp);
        self.order_next();
        Ok(())
    }

    /// Goes on in the next segment, with what this one holds synced.
    fn roll(&mut self, next: Arc<SegmentFile>) -> io::Result<()> {
        self.at.previous_end = self.at.offset;
        self.at.offset = SEGMENT_HEADER_BYTES as u64;
        self.at.batch = 1;
        self.at.segment = next;
        self.batch.restart(self.at.batch, self.at.segment.stamp);
        self.ordered = false;
        self.appender.start(&self.at.segment, self.at.offset)
    }

    /// Has the next segment made, once this one's start is on disk.
    fn order_next(&mut self) {
        if !self.ordered && self.at.offset > SEGMENT_HEADER_BYTES as u64 {
            let capacity = self.at.segment.capacity_bytes.saturating_mul(GROWTH).min(self.segment_bytes);
            self.supply.order(self.at.segment.sequence + 1, capacity);
            self.ordered = true;
        }
    }
}

/// A panic of the log thread, or of a callback on it, must not leave callers waiting for ever.
struct PanicAlarm<'a>(&'a Shared);

impl Drop for PanicAlarm<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.fail(&io::Error::other("the log thread panicked"), Vec::new());
        }
    }
}
