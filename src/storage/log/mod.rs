//! The log: what was proposed, in order, on disk before anyone is told so. It knows indexes and opaque payloads, nothing of
//! Raft: a term, a vote or a membership is bytes to it.
//!
//! # Terms
//! * **entry**: an index and a payload. Indexes follow each other without holes, from 0 or behind the last purge.
//! * **frame**: one record on disk: an entry, a vote, a committed hint, a truncation, a purge, or a segment's start.
//! * **batch**: the frames written between two syncs. It is there whole or, after a crash, not at all.
//! * **segment**: a file of frames. **spare**: a segment nothing is live in, kept to be written again.
//! * **tail**: the newest entries, in memory.
//!
//! # How an entry travels
//! ```text
//! caller            log thread                         supply thread
//! append ──queue──→ take all that is queued            zero-fill the next segment, a little at a time
//!   │ (in the tail  frame, crc, pwrite                     │ ready
//!   │  and readable ONE fdatasync                          ▼
//!   ▼  at once)     index offsets, free old tail ←── roll when the segment is full
//! returns           done(Ok) for each operation
//!                   purged segments ──retired────────→ rename to a spare, or remove
//! ```
//! The naive order, write and sync each append in the caller, costs a sync per entry. Here whatever arrives during one sync
//! shares the next, so the group grows with the load and nobody waits for it to fill.
//!
//! # What it keeps true
//! 1. `done(Ok)` is called only when the operation, and every one queued before it, survives a power cut.
//! 2. Operations take effect on disk in the order of the calls. A batch is written only after the one before it was synced.
//! 3. An entry is readable from the call that appends it until the call that truncates or purges it.
//! 4. A segment begins with all that stands (purge mark, vote, committed hint), so the ones before it may go once
//!    no live entry is in them, and go only after the purge mark is durable.
//! 5. A failed write or sync is final: the operations of that batch and all later ones get the error. A sync is never
//!    tried again, for the kernel may have dropped the pages. Only work ahead (the next segment) may fail and go on.
//! 6. Opening finds every acknowledged operation or refuses to start; see `recovery.rs`.
//!
//! # Bounds
//! The queue has none of its own: `append` never waits and never refuses. Whoever admits requests bounds
//! [`Log::backlog_bytes`]. The tail keeps to its budget as soon as entries are on disk. The index of a segment takes 4 bytes
//! an entry, at most a fifth of what it points into.
//!
//! # Left out
//! * Compression and encryption: entries are small, and a block device does the second better.
//! * A lock against a second process: it covers the whole data directory and is taken there.
//!
//! `docs/data_model.md` has the bytes.

mod append;
mod disk;
mod error;
mod format;
#[cfg(any(test, fuzzing))]
pub mod fuzz;
mod queue;
mod recovery;
mod segment;
mod supply;
mod tail;
#[cfg(feature = "sim")]
mod tasks;
#[cfg(not(feature = "sim"))]
mod threads;
mod writer;

#[cfg(test)]
mod tests;

use std::io;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;

pub use self::error::LogError;

use self::disk::Disk;
use self::format::{INDEX_LIMIT, PAYLOAD_LIMIT_BYTES};
use self::queue::Shared;
use self::supply::{Supplier, Supply};
#[cfg(feature = "sim")]
use self::tasks::Workers;
#[cfg(not(feature = "sim"))]
use self::threads::Workers;
use self::writer::Writer;

/// The largest segment: offsets take 32 bits, and a late supply may let a segment grow to four times its size.
const SEGMENT_LIMIT_BYTES: u64 = 1 << 30;
/// The size at which a segment is usually closed.
pub const SEGMENT_BYTES: u64 = 2 << 20;
/// The smallest segment: below, the headers would outweigh the entries.
const SEGMENT_MIN_BYTES: u64 = 4 << 10;

/// How a log is opened.
#[derive(Clone)]
pub struct LogOptions {
    /// Its directory, made if there is none.
    pub dir: PathBuf,
    /// The size at which a segment is closed, from 4 KiB to 1 GiB; the first ones are smaller. A new segment begins when
    /// the next one is ready, so it may grow somewhat above.
    pub segment_bytes: u64,
    /// The memory for the newest entries, their overhead included.
    pub tail_bytes: usize,
    /// Never sync. After a power cut the log may be short or refused.
    pub no_fsync: bool,
    /// Told of each write and sync.
    pub observer: Option<Arc<dyn LogObserver>>,
}

impl LogOptions {
    /// Returns the usual options: segments of 2 MiB, a tail of 64 MiB.
    ///
    /// Segments are small so that a new member soon writes into recycled ones: until then every byte is written twice,
    /// first as zero.
    pub fn new(dir: impl Into<PathBuf>) -> Self {
        Self {
            dir: dir.into(),
            segment_bytes: SEGMENT_BYTES,
            tail_bytes: 64 << 20,
            no_fsync: false,
            observer: None,
        }
    }
}

/// What telemetry hangs on. Called from the log thread, which waits for it.
pub trait LogObserver: Send + Sync {
    /// Frames were handed to the system.
    fn wrote(&self, bytes: usize, took: Duration);
    /// They were made durable.
    fn synced(&self, took: Duration);
    /// A write found the disk full; it is tried again until there is room. Called before each try.
    fn disk_full(&self) {}
    /// The log is dead: the process must end. Called once, before the callbacks get the error.
    fn failed(&self, error: &io::Error);
}

/// What was found on opening.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Recovered {
    /// The index of the first entry, or of the one to come if there is none.
    pub first_index: u64,
    /// The index that is appended next: one above the last entry's, equal to `first_index` if there is none.
    pub next_index: u64,
    /// The payload of the last purge.
    pub purged: Option<Bytes>,
    /// The last vote.
    pub vote: Option<Bytes>,
    /// The last committed hint; up to a second old when the process was killed.
    pub committed: Option<Bytes>,
    /// Bytes of a torn, never acknowledged batch that were cut off.
    pub cut_bytes: u64,
}

/// The state of a running log, for metrics.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct LogStats {
    /// Segments with live entries or in use; not the one made ahead and the spare.
    pub segments: usize,
    /// Memory held for the newest entries.
    pub tail_bytes: usize,
    /// Queued or being written.
    pub backlog_bytes: usize,
    /// Written since opening, headers and overhead of frames included, zeros written ahead not.
    pub written_bytes: u64,
    /// Batches since opening.
    pub batches: u64,
}

/// A handle to the log; clones share it. The last one dropped closes it.
#[derive(Clone)]
pub struct Log {
    handle: Arc<Handle>,
}

impl Log {
    /// Opens the log and starts its two threads. Blocks while the segments are read: some hundred MB a second at worst.
    ///
    /// # Errors
    /// [`LogError::Damaged`], [`LogError::Missing`] and [`LogError::Foreign`] leave the files untouched and come again
    /// until someone acts. [`LogError::Io`] may pass.
    pub fn open(options: LogOptions) -> Result<(Self, Recovered), LogError> {
        let disk = Disk::new(options.dir.clone(), options.no_fsync);
        Self::open_on(disk, options)
    }

    fn open_on(disk: Disk, options: LogOptions) -> Result<(Self, Recovered), LogError> {
        let segment_bytes = options.segment_bytes.clamp(SEGMENT_MIN_BYTES, SEGMENT_LIMIT_BYTES);
        let found = recovery::recover(&disk, segment_bytes)?;
        let recovered = Recovered {
            first_index: found.first_index,
            next_index: found.live.next,
            purged: found.standing.purged.as_ref().map(|(_, payload)| payload.clone()),
            vote: found.standing.vote.clone(),
            committed: found.standing.committed.clone(),
            cut_bytes: found.cut_bytes,
        };
        let tail = queue::load_tail(&found.live, found.first_index, options.tail_bytes)?;
        let shared =
            Arc::new(Shared::new(found.live, found.first_index, tail, options.tail_bytes, options.observer));
        let next_is_ready = found.ready.is_some();
        let supply = Arc::new(Supply::with_ready(found.ready));
        supply.retire(found.retired);
        let supplier = Supplier {
            disk: disk.clone(),
            log_id: found.log_id,
            segment_bytes,
            supply: Arc::clone(&supply),
            spares: found.spares,
        };
        let writer = Writer::new(
            Arc::clone(&shared),
            Arc::clone(&supply),
            disk,
            segment_bytes,
            found.standing,
            found.at,
            next_is_ready,
        )
        .map_err(|source| LogError::Io {
            action: "read the end of",
            path: options.dir.clone(),
            source,
        })?;
        let workers = Workers::start(&options.dir, writer, supplier)?;
        Ok((Self { handle: Arc::new(Handle { shared, supply, workers }) }, recovered))
    }

    /// Appends entries that follow the last one. They are readable on return; `done` is called from the log thread once
    /// they are durable, or with the error that ended the log. Never waits.
    ///
    /// The payloads stay in memory for a while, and with them the buffers they are slices of.
    ///
    /// # Errors
    /// [`LogError::NotNext`] and [`LogError::TooLarge`]: nothing was appended and `done` is not called.
    pub fn append(
        &self,
        entries: Vec<(u64, Bytes)>,
        done: impl FnOnce(io::Result<()>) + Send + 'static,
    ) -> Result<(), LogError> {
        for (index, payload) in &entries {
            check_index(*index)?;
            check_payload(payload)?;
        }
        self.handle.shared.append(entries, Box::new(done))
    }

    /// Saves the vote in the place of the last one; durable when `done` is called.
    ///
    /// # Errors
    /// [`LogError::TooLarge`]: nothing was saved and `done` is not called.
    pub fn save_vote(
        &self,
        payload: Bytes,
        done: impl FnOnce(io::Result<()>) + Send + 'static,
    ) -> Result<(), LogError> {
        check_payload(&payload)?;
        self.handle.shared.save_vote(payload, Box::new(done));
        Ok(())
    }

    /// Saves how far entries are committed, as a hint for the next start. Written within a second with other
    /// records, or alone when there are none, and on close. Entries it speaks of must have been appended before.
    ///
    /// # Errors
    /// [`LogError::TooLarge`].
    pub fn save_committed(&self, payload: Bytes) -> Result<(), LogError> {
        check_payload(&payload)?;
        self.handle.shared.save_committed(payload);
        Ok(())
    }

    /// Drops the entries from `from` on: at once for readers, durably when `done` is called.
    ///
    /// # Errors
    /// [`LogError::Purged`] if `from` is below the first index: nothing is dropped and `done` is not called.
    pub fn truncate_from(
        &self,
        from: u64,
        done: impl FnOnce(io::Result<()>) + Send + 'static,
    ) -> Result<(), LogError> {
        check_index(from)?;
        self.handle.shared.truncate_from(from, Box::new(done))
    }

    /// Drops the entries up to `index`, which may be above the last: the log then goes on behind it. Keeps `payload` for
    /// [`Recovered::purged`]. At once for readers, durably when `done` is called; files go after that. A purge
    /// below an earlier one changes nothing.
    ///
    /// # Errors
    /// [`LogError::TooLarge`]: nothing was dropped and `done` is not called.
    pub fn purge_to(
        &self,
        index: u64,
        payload: Bytes,
        done: impl FnOnce(io::Result<()>) + Send + 'static,
    ) -> Result<(), LogError> {
        check_index(index)?;
        check_payload(&payload)?;
        self.handle.shared.purge_to(index, payload, Box::new(done));
        Ok(())
    }

    /// Returns entries from the start of the range on, as many as there are, within `max_bytes` of payload; the first one
    /// always. What [`Log::in_memory`] says no to is read from disk, on this thread.
    ///
    /// # Errors
    /// [`LogError::Purged`] if the range starts below the first index. [`LogError::Io`] and [`LogError::Damaged`] if
    /// the disk does not give back what was written.
    pub fn read(&self, range: Range<u64>, max_bytes: usize) -> Result<Vec<(u64, Bytes)>, LogError> {
        self.handle.shared.read(range, max_bytes)
    }

    /// Says if a read from this index on needs no disk.
    pub fn in_memory(&self, index: u64) -> bool {
        self.handle.shared.in_memory(index)
    }

    /// Returns the index of the first entry and the one that is appended next.
    pub fn bounds(&self) -> Range<u64> {
        self.handle.shared.bounds()
    }

    /// Returns the bytes that are queued or being written: what admission bounds.
    pub fn backlog_bytes(&self) -> usize {
        self.handle.shared.backlog_bytes()
    }

    /// Returns the log's state.
    pub fn stats(&self) -> LogStats {
        self.handle.shared.stats()
    }

    /// Waits until the entry is durable.
    ///
    /// # Errors
    /// When the log has ended.
    pub async fn synced(&self, index: u64) -> io::Result<()> {
        let mut durable = self.handle.shared.durable.subscribe();
        match durable.wait_for(|next| *next > index).await {
            Ok(next) if *next != queue::ENDED => Ok(()),
            _ => Err(io::Error::other("the log has ended")),
        }
    }

    /// Returns since when the log thread is at the batch that it is at; `None` while it has nothing to do.
    pub fn busy_since(&self) -> Option<Instant> {
        self.handle.shared.busy_since()
    }

    /// Returns the error that ended the log, if one did.
    pub fn failure(&self) -> Option<io::Error> {
        self.handle.shared.failure()
    }

    /// Writes what is queued and the committed hint, syncs, and joins the threads. Other handles get errors from then on.
    ///
    /// # Errors
    /// The error that ended the log, if one did.
    pub fn close(self) -> io::Result<()> {
        self.handle.stop();
        self.failure().map_or(Ok(()), Err)
    }
}

fn check_index(index: u64) -> Result<(), LogError> {
    if index < INDEX_LIMIT - 1 {
        Ok(())
    } else {
        Err(LogError::NotNext { expected: INDEX_LIMIT - 2, found: index })
    }
}

fn check_payload(payload: &Bytes) -> Result<(), LogError> {
    let bytes = payload.len();
    if bytes <= PAYLOAD_LIMIT_BYTES {
        Ok(())
    } else {
        Err(LogError::TooLarge { bytes, limit: PAYLOAD_LIMIT_BYTES })
    }
}

struct Handle {
    shared: Arc<Shared>,
    supply: Arc<Supply>,
    workers: Workers,
}

impl Handle {
    fn stop(&self) {
        self.workers.stop(&self.shared, &self.supply);
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.stop();
    }
}
