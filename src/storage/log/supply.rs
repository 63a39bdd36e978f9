//! The thread that works ahead of the log thread and cleans up behind it.
//!
//! It makes the next segment while the current one fills, for a sync is a third cheaper when it finds the blocks written
//! before: in a file that is zero-filled, or that was a segment already. It writes a little at a time, so that the log
//! thread's syncs are not queued behind it. When it is late, or the disk is too full for it, the log thread
//! goes on writing behind the current segment's capacity: slower, but nothing waits.

use std::fs::File;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use tracing::warn;

use super::disk::{Disk, Purpose};
use super::format::{LogId, SEGMENT_HEADER_BYTES, SegmentHeader};
use super::segment::{SegmentFile, segment_name, spare_name};
use crate::clock;

/// What a segment is called until it is whole.
pub(super) const UNFINISHED_NAME: &str = "next.tmp";

/// Retired segments kept for reuse. In steady state one is retired for each one used, but all that a flush of the state
/// machine made useless come at once.
pub(super) const SPARES: usize = 8;

/// Zeros written and synced at once: some milliseconds on a slow disk, which is what they may delay the log's own sync.
const FILL_BYTES: usize = 1 << 20;
/// The pause after each of them: 2 MiB then take some ten milliseconds, a put load fills them in a third of a second.
const FILL_PAUSE: Duration = Duration::from_millis(5);
/// How long to wait after a full disk refused the next segment.
const RETRY_PAUSE: Duration = Duration::from_secs(5);

/// What the log thread and this one hand to each other.
#[derive(Debug, Default)]
pub(super) struct Supply {
    orders: Mutex<Orders>,
    /// The supply thread waits here.
    wake: Condvar,
}

#[derive(Debug, Default)]
struct Orders {
    wanted: Option<Wanted>,
    ready: Option<Arc<SegmentFile>>,
    retired: Vec<Arc<SegmentFile>>,
    stopping: bool,
}

#[derive(Debug, Clone, Copy)]
struct Wanted {
    sequence: u64,
    capacity_bytes: u64,
}

impl Supply {
    pub(super) fn with_ready(ready: Option<Arc<SegmentFile>>) -> Self {
        Self { orders: Mutex::new(Orders { ready, ..Orders::default() }), wake: Condvar::new() }
    }

    /// Orders the next segment. The current one must have its start on disk: recovery takes it for damage if only a later
    /// segment was ever written.
    pub(super) fn order(&self, sequence: u64, capacity_bytes: u64) {
        self.orders.lock().wanted = Some(Wanted { sequence, capacity_bytes });
        self.wake.notify_one();
    }

    pub(super) fn take_ready(&self) -> Option<Arc<SegmentFile>> {
        self.orders.lock().ready.take()
    }

    /// Hands over segments, oldest first, that nothing live is in any more, durably.
    pub(super) fn retire(&self, segments: Vec<Arc<SegmentFile>>) {
        self.orders.lock().retired.extend(segments);
        self.wake.notify_one();
    }

    pub(super) fn stop(&self) {
        self.orders.lock().stopping = true;
        self.wake.notify_one();
    }

    /// Waits, and says whether to go on.
    fn pause(&self, time: Duration) -> bool {
        let mut orders = self.orders.lock();
        if !orders.stopping && cfg!(not(feature = "sim")) {
            self.wake.wait_for(&mut orders, time);
        }
        !orders.stopping
    }
}

enum Job {
    Retire(Vec<Arc<SegmentFile>>),
    Make(Wanted),
}

/// The supply thread.
pub(super) struct Supplier {
    pub(super) disk: Disk,
    pub(super) log_id: LogId,
    /// What a segment must hold to be worth keeping for reuse.
    pub(super) segment_bytes: u64,
    pub(super) supply: Arc<Supply>,
    pub(super) spares: Vec<Spare>,
}

/// A retired segment that waits to become a new one.
#[derive(Debug)]
pub(super) struct Spare {
    pub(super) name: String,
    pub(super) file: File,
    pub(super) bytes: u64,
}

impl Supplier {
    pub(super) fn run(mut self) {
        let mut not_before = None;
        while let Some(job) = self.next_job(not_before) {
            not_before = self.perform(job);
        }
    }

    /// Does a job; after a failure gives when to go on.
    fn perform(&mut self, job: Job) -> Option<Instant> {
        match job {
            Job::Retire(segments) => {
                if let Err(error) = self.retire(segments) {
                    // They stay, as purged segments do after a crash, and the next start removes them.
                    warn!(%error, dir = %self.disk.dir().display(), "cannot remove purged log segments");
                }
                None
            }
            Job::Make(wanted) => match self.make(wanted) {
                Ok(segment) => {
                    let mut orders = self.supply.orders.lock();
                    orders.wanted = None;
                    orders.ready = segment.map(Arc::new);
                    None
                }
                Err(error) => {
                    warn!(%error, dir = %self.disk.dir().display(), "cannot make the next log segment, going on in this one");
                    Some(clock::now() + RETRY_PAUSE)
                }
            },
        }
    }

    /// Does one job, if there is any.
    #[cfg(feature = "sim")]
    pub(super) fn step(&mut self) {
        let job = {
            let mut orders = self.supply.orders.lock();
            let retired = std::mem::take(&mut orders.retired);
            match orders.wanted.filter(|_| !orders.stopping) {
                _ if !retired.is_empty() => Job::Retire(retired),
                Some(wanted) => Job::Make(wanted),
                None => return,
            }
        };
        self.perform(job);
    }

    fn next_job(&self, not_before: Option<Instant>) -> Option<Job> {
        let mut orders = self.supply.orders.lock();
        loop {
            if !orders.retired.is_empty() {
                return Some(Job::Retire(std::mem::take(&mut orders.retired)));
            }
            if orders.stopping {
                return None;
            }
            match (orders.wanted, not_before) {
                (Some(wanted), Some(time)) if time <= clock::now() => return Some(Job::Make(wanted)),
                (Some(_), Some(time)) => drop(self.supply.wake.wait_until(&mut orders, time)),
                (Some(wanted), None) => return Some(Job::Make(wanted)),
                (None, _) => self.supply.wake.wait(&mut orders),
            }
        }
    }

    fn retire(&mut self, segments: Vec<Arc<SegmentFile>>) -> io::Result<()> {
        let mut kept = Vec::new();
        for segment in segments {
            let bytes = segment.file.metadata()?.len();
            let fits = bytes >= self.segment_bytes && bytes <= 2 * self.segment_bytes;
            let wanted = fits && self.spares.len() + kept.len() < SPARES;
            match Arc::try_unwrap(segment) {
                Ok(segment) if wanted => {
                    let name = spare_name(segment.sequence);
                    self.disk.rename(&segment.name(), &name)?;
                    kept.push(Spare { name, file: segment.file, bytes });
                }
                // Someone may still be reading it: the name goes now, the bytes with the last reader.
                Ok(segment) => self.disk.remove(&segment.name())?,
                Err(shared) => self.disk.remove(&shared.name())?,
            }
        }
        self.disk.sync_dir()?;
        // Only now that its old name is gone for good may its header be written over.
        self.spares.extend(kept);
        Ok(())
    }

    fn make(&mut self, wanted: Wanted) -> io::Result<Option<SegmentFile>> {
        if let Some(spare) = self.spares.pop() {
            return reuse(&self.disk, self.log_id, wanted.sequence, spare).map(Some);
        }
        fill(&self.disk, self.log_id, wanted.sequence, wanted.capacity_bytes, || {
            self.supply.pause(FILL_PAUSE)
        })
    }
}

/// Makes a zero-filled segment under its name, durably. Gives up, with nothing, when `go_on` says no.
pub(super) fn fill(
    disk: &Disk,
    log_id: LogId,
    sequence: u64,
    capacity_bytes: u64,
    go_on: impl Fn() -> bool,
) -> io::Result<Option<SegmentFile>> {
    let file = disk.create(UNFINISHED_NAME)?;
    let filled = fill_zeros(disk, &file, capacity_bytes, go_on);
    if !matches!(filled, Ok(true)) {
        disk.remove(UNFINISHED_NAME)?;
        return filled.map(|_| None);
    }
    let header = SegmentHeader::new(log_id, sequence, false);
    publish(disk, file, header, UNFINISHED_NAME, capacity_bytes).map(Some)
}

fn fill_zeros(disk: &Disk, file: &File, capacity_bytes: u64, go_on: impl Fn() -> bool) -> io::Result<bool> {
    let zeros = vec![0; FILL_BYTES];
    let mut offset = 0;
    while offset < capacity_bytes {
        let count = usize::try_from(capacity_bytes - offset).unwrap_or(usize::MAX).min(FILL_BYTES);
        disk.write(Purpose::Prepare, file, &zeros[..count], offset)?;
        disk.sync(Purpose::Prepare, file)?;
        offset += count as u64;
        if offset < capacity_bytes && !go_on() {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Turns a spare into a segment, durably.
fn reuse(disk: &Disk, log_id: LogId, sequence: u64, spare: Spare) -> io::Result<SegmentFile> {
    let header = SegmentHeader::new(log_id, sequence, true);
    publish(disk, spare.file, header, &spare.name, spare.bytes)
}

/// Writes the header before the file gets its name: a segment whose header is bad is damaged, never just unborn.
fn publish(
    disk: &Disk,
    file: File,
    header: SegmentHeader,
    old_name: &str,
    capacity_bytes: u64,
) -> io::Result<SegmentFile> {
    assert!(capacity_bytes > SEGMENT_HEADER_BYTES as u64, "a segment holds more than its header");
    disk.write(Purpose::Prepare, &file, &header.encode(), 0)?;
    disk.sync(Purpose::Prepare, &file)?;
    disk.rename(old_name, &segment_name(header.sequence))?;
    disk.sync_dir()?;
    Ok(SegmentFile {
        file,
        sequence: header.sequence,
        stamp: header.stamp(),
        recycled: header.recycled,
        capacity_bytes,
    })
}
