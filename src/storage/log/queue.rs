//! What callers and the log thread share: the queue, the tail in memory and the index of what is on disk.

use std::collections::VecDeque;
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use parking_lot::{Condvar, Mutex};
use tokio::sync::watch;

use super::error::LogError;
use super::format::FRAME_HEADER_BYTES;
use super::segment::{Change, FrameReader, LiveIndex, SegmentFile};
use super::tail::{Tail, cost_bytes};
use super::{LogObserver, LogStats};
use crate::clock;

/// A batch takes at most this much more than one record: a caller then waits for 8 MiB of writing before the sync, not for
/// all that others queued.
const BATCH_BYTES: usize = 8 << 20;

/// How long a batch may wait for company. On a fast disk with a core of its own the log would otherwise sync for a few
/// entries at a time, and waking it costs as much as the sync itself.
const GATHER: Duration = Duration::from_micros(100);

/// A batch waits only if the one before it was at least this large: several callers are about. A lone caller never waits.
const GATHER_FROM_BYTES: usize = 4 << 10;

/// How long a committed hint may wait for others to be written with.
const HINT_DELAY: Duration = Duration::from_secs(1);

/// What stands for an index when the log has ended.
pub(super) const ENDED: u64 = u64::MAX;

/// Called once from the log thread.
pub(super) type Done = Box<dyn FnOnce(io::Result<()>) + Send>;

#[derive(Debug)]
pub(super) enum Record {
    Append(Vec<(u64, Bytes)>),
    Vote(Bytes),
    Committed(Bytes),
    /// Drops entries from here on.
    Truncate(u64),
    /// Drops entries up to here, and keeps the payload.
    Purge(u64, Bytes),
}

pub(super) struct Op {
    pub(super) record: Record,
    pub(super) done: Option<Done>,
    bytes: usize,
}

pub(super) struct Shared {
    state: Mutex<State>,
    /// The log thread waits here.
    work: Condvar,
    /// And here while it gathers: nobody wakes it.
    gathered: Condvar,
    tail_bytes: usize,
    pub(super) observer: Option<Arc<dyn LogObserver>>,
    /// Since when the log thread is at its batch.
    busy_since: Mutex<Option<Instant>>,
    /// One above the last durable entry, or [`ENDED`].
    pub(super) durable: watch::Sender<u64>,
}

struct State {
    queue: VecDeque<Op>,
    /// Payload bytes queued or being written.
    backlog_bytes: usize,
    /// The log's first index; equal to the tail's end when it is empty.
    first: u64,
    tail: Tail,
    live: LiveIndex,
    /// While a truncation is queued, `live` may still show entries that memory holds anew.
    truncates_queued: usize,
    hint: Option<Hint>,
    /// Bytes of the batch taken last.
    last_batch_bytes: usize,
    stopping: bool,
    dead: Option<Dead>,
    stats: LogStats,
}

struct Hint {
    payload: Bytes,
    due: Instant,
}

/// Why the log takes nothing any more; `io::Error` cannot be cloned.
struct Dead {
    kind: io::ErrorKind,
    text: String,
}

impl Dead {
    fn error(&self) -> io::Error {
        io::Error::new(self.kind, self.text.clone())
    }
}

impl Shared {
    /// Since when the log thread is at its batch; `None` while it has nothing to do.
    pub(super) fn busy_since(&self) -> Option<Instant> {
        *self.busy_since.lock()
    }

    pub(super) fn set_busy(&self, since: Option<Instant>) {
        *self.busy_since.lock() = since;
    }

    /// The log thread waits, and is told whether to go on.
    pub(super) fn pause(&self, time: Duration) -> bool {
        let mut state = self.state.lock();
        if !state.stopping {
            self.gathered.wait_for(&mut state, time);
        }
        !state.stopping
    }

    pub(super) fn new(
        live: LiveIndex,
        first: u64,
        tail: Tail,
        tail_bytes: usize,
        observer: Option<Arc<dyn LogObserver>>,
    ) -> Self {
        let state = State {
            queue: VecDeque::new(),
            backlog_bytes: 0,
            first,
            tail,
            live,
            truncates_queued: 0,
            hint: None,
            last_batch_bytes: 0,
            stopping: false,
            dead: None,
            stats: LogStats::default(),
        };
        let durable = watch::Sender::new(state.live.next);
        let (work, gathered) = (Condvar::new(), Condvar::new());
        Self {
            state: Mutex::new(state),
            work,
            gathered,
            tail_bytes,
            observer,
            busy_since: Mutex::default(),
            durable,
        }
    }

    pub(super) fn append(&self, entries: Vec<(u64, Bytes)>, done: Done) -> Result<(), LogError> {
        let mut state = self.state.lock();
        if state.accepts() {
            for ((index, _), expected) in entries.iter().zip(state.tail.end()..) {
                if *index != expected {
                    return Err(LogError::NotNext { expected, found: *index });
                }
            }
            for (_, payload) in &entries {
                state.tail.push(payload.clone());
            }
        }
        self.push(state, Record::Append(entries), done);
        Ok(())
    }

    pub(super) fn save_vote(&self, payload: Bytes, done: Done) {
        self.push(self.state.lock(), Record::Vote(payload), done);
    }

    pub(super) fn save_committed(&self, payload: Bytes) {
        let mut state = self.state.lock();
        if let Some(hint) = &mut state.hint {
            hint.payload = payload;
        } else if state.accepts() {
            state.hint = Some(Hint { payload, due: clock::now() + HINT_DELAY });
            // It may be waiting without a time limit.
            self.work.notify_one();
        }
    }

    pub(super) fn truncate_from(&self, from: u64, done: Done) -> Result<(), LogError> {
        let mut state = self.state.lock();
        if from < state.first {
            return Err(LogError::Purged { index: from, first: state.first });
        }
        if state.accepts() {
            state.tail.truncate_from(from);
            state.truncates_queued += 1;
        }
        self.push(state, Record::Truncate(from), done);
        Ok(())
    }

    pub(super) fn purge_to(&self, index: u64, payload: Bytes, done: Done) {
        let mut state = self.state.lock();
        if state.accepts() {
            state.first = state.first.max(index + 1);
            let first = state.first;
            state.tail.drop_below(first);
        }
        self.push(state, Record::Purge(index, payload), done);
    }

    fn push(&self, mut state: parking_lot::MutexGuard<'_, State>, record: Record, done: Done) {
        let refused = match &state.dead {
            Some(dead) => Some(dead.error()),
            None if state.stopping => Some(io::Error::other("the log is closed")),
            None => None,
        };
        if let Some(error) = refused {
            drop(state);
            done(Err(error));
            return;
        }
        state.enqueue(record, Some(done));
        drop(state);
        self.work.notify_one();
    }

    /// Waits for work and takes it; the log ends with nothing.
    pub(super) fn take(&self) -> Option<Vec<Op>> {
        let mut state = self.state.lock();
        let mut gathering = true;
        loop {
            state.queue_hint();
            if !state.queue.is_empty() {
                if std::mem::take(&mut gathering) && state.expects_company() {
                    self.gathered.wait_for(&mut state, GATHER);
                    continue;
                }
                return Some(state.dequeue());
            }
            if state.stopping {
                return None;
            }
            match state.hint.as_ref().map(|hint| hint.due) {
                Some(due) => drop(self.work.wait_until(&mut state, due)),
                None => self.work.wait(&mut state),
            }
        }
    }

    /// Takes what is queued, if anything is.
    #[cfg(feature = "sim")]
    pub(super) fn take_queued(&self) -> Option<Vec<Op>> {
        let mut state = self.state.lock();
        state.queue_hint();
        (!state.queue.is_empty()).then(|| state.dequeue())
    }

    /// Takes note of what is on disk now, and returns the segments that hold nothing live any more.
    pub(super) fn settle(
        &self,
        ops: &[Op],
        changes: Vec<Change>,
        written_bytes: u64,
    ) -> Vec<Arc<SegmentFile>> {
        let mut state = self.state.lock();
        for change in changes {
            state.live.apply(change);
        }
        for op in ops {
            state.backlog_bytes -= op.bytes;
            if matches!(op.record, Record::Truncate(_)) {
                state.truncates_queued -= 1;
            }
        }
        self.durable.send_replace(state.live.next);
        state.stats.written_bytes += written_bytes;
        state.stats.batches += 1;
        state.evict(self.tail_bytes);
        // Only what was purged on disk may go, and a purge still queued is not yet there.
        match ops
            .iter()
            .filter_map(|op| if let Record::Purge(index, _) = op.record { Some(index) } else { None })
            .max()
        {
            Some(purged) => state.live.retire(purged),
            None => Vec::new(),
        }
    }

    /// Ends the log: these operations and all later ones get the error.
    pub(super) fn fail(&self, error: &io::Error, ops: Vec<Op>) {
        let dead = Dead { kind: error.kind(), text: error.to_string() };
        let mut state = self.state.lock();
        let queued = std::mem::take(&mut state.queue);
        state.hint = None;
        let error = dead.error();
        state.dead = Some(dead);
        drop(state);
        self.durable.send_replace(ENDED);
        if let Some(observer) = &self.observer {
            observer.failed(&error);
        }
        for done in ops.into_iter().chain(queued).filter_map(|op| op.done) {
            done(Err(io::Error::new(error.kind(), error.to_string())));
        }
    }

    pub(super) fn stop(&self) {
        self.state.lock().stopping = true;
        self.work.notify_one();
    }

    pub(super) fn failure(&self) -> Option<io::Error> {
        self.state.lock().dead.as_ref().map(Dead::error)
    }

    pub(super) fn bounds(&self) -> Range<u64> {
        let state = self.state.lock();
        state.first..state.tail.end()
    }

    pub(super) fn backlog_bytes(&self) -> usize {
        self.state.lock().backlog_bytes
    }

    pub(super) fn in_memory(&self, index: u64) -> bool {
        let state = self.state.lock();
        index >= state.tail.first()
    }

    pub(super) fn stats(&self) -> LogStats {
        let state = self.state.lock();
        LogStats {
            segments: state.live.segment_count(),
            tail_bytes: state.tail.bytes(),
            backlog_bytes: state.backlog_bytes,
            ..state.stats
        }
    }

    pub(super) fn read(&self, range: Range<u64>, max_bytes: usize) -> Result<Vec<(u64, Bytes)>, LogError> {
        let mut entries = Entries { found: Vec::new(), bytes: 0, max_bytes };
        let state = self.state.lock();
        if range.start < state.first && range.start < range.end {
            return Err(LogError::Purged { index: range.start, first: state.first });
        }
        if range.start >= state.tail.first() {
            let _ = state.tail.range(range).all(|(index, payload)| entries.push(index, payload.clone()));
            return Ok(entries.found);
        }
        let on_disk = state.live.plan(range.start, range.end.min(state.tail.first()), max_bytes);
        let mut newer = Entries { found: Vec::new(), bytes: 0, max_bytes };
        let _ = state.tail.range(range.clone()).all(|(index, payload)| newer.push(index, payload.clone()));
        let memory_starts = state.tail.first();
        drop(state);

        let next = read_planned(range.start, &on_disk, &mut entries)?;
        if next == memory_starts {
            let _ = newer.found.into_iter().all(|(index, payload)| entries.push(index, payload));
        }
        Ok(entries.found)
    }
}

impl State {
    fn accepts(&self) -> bool {
        self.dead.is_none() && !self.stopping
    }

    /// Queues the committed hint if it has waited long enough.
    fn queue_hint(&mut self) {
        let stopping = self.stopping;
        if let Some(hint) = self.hint.take_if(|hint| stopping || hint.due <= clock::now()) {
            // At the queue's end: whatever it says is committed was queued before.
            self.enqueue(Record::Committed(hint.payload), None);
        }
    }

    fn enqueue(&mut self, record: Record, done: Option<Done>) {
        let bytes = match &record {
            Record::Append(entries) => entries.iter().map(|(_, payload)| cost_bytes(payload)).sum(),
            Record::Vote(payload) | Record::Committed(payload) | Record::Purge(_, payload) => payload.len(),
            Record::Truncate(_) => 0,
        };
        self.backlog_bytes += bytes;
        self.queue.push_back(Op { record, done, bytes });
    }

    /// True if the callers of the last batch are likely to add to this one.
    fn expects_company(&self) -> bool {
        !self.stopping
            && self.last_batch_bytes >= GATHER_FROM_BYTES
            && self.queue.iter().map(|op| op.bytes).sum::<usize>() < self.last_batch_bytes
    }

    fn dequeue(&mut self) -> Vec<Op> {
        let mut bytes = 0;
        let mut count = 0;
        for op in &self.queue {
            if bytes >= BATCH_BYTES {
                break;
            }
            bytes += op.bytes;
            count += 1;
        }
        self.last_batch_bytes = bytes;
        self.queue.drain(..count).collect()
    }

    /// Frees memory of the oldest entries, as far as they can be read from disk.
    fn evict(&mut self, tail_bytes: usize) {
        while self.tail.bytes() > tail_bytes
            && self.truncates_queued == 0
            && self.tail.first() < self.live.next
        {
            self.tail.pop_first();
        }
    }
}

/// Entries of one answer, up to its limit; the first is always taken.
struct Entries {
    found: Vec<(u64, Bytes)>,
    bytes: usize,
    max_bytes: usize,
}

impl Entries {
    fn push(&mut self, index: u64, payload: Bytes) -> bool {
        let fits = self.found.is_empty() || self.bytes + payload.len() <= self.max_bytes;
        if fits {
            self.bytes += payload.len();
            self.found.push((index, payload));
        }
        fits
    }
}

/// Entries of one segment that are to be read.
type Planned = (Arc<SegmentFile>, Vec<u32>);

impl LiveIndex {
    /// Returns where entries are, enough for `max_bytes` of payload: sizes are known here from one offset to the next only.
    fn plan(&self, from: u64, until: u64, max_bytes: usize) -> Vec<Planned> {
        let mut plan = Vec::new();
        let mut bytes = 0;
        for (file, _, offsets) in self.places(from, until) {
            let mut count = 1;
            for pair in offsets.windows(2) {
                bytes += usize::try_from(pair[1] - pair[0])
                    .expect("32 bits fit")
                    .saturating_sub(FRAME_HEADER_BYTES);
                if bytes > max_bytes {
                    break;
                }
                count += 1;
            }
            plan.push((Arc::clone(file), offsets[..count].to_vec()));
            if bytes > max_bytes {
                break;
            }
        }
        plan
    }
}

/// Reads the planned entries from `index` on, and returns the index after the last one taken.
fn read_planned(mut index: u64, plan: &[Planned], entries: &mut Entries) -> Result<u64, LogError> {
    for (segment, offsets) in plan {
        let failed = |source| LogError::Io { action: "read", path: segment.name().into(), source };
        let mut reader = FrameReader::new(segment).map_err(failed)?;
        for offset in offsets {
            let frame = reader.frame_at(u64::from(*offset)).map_err(failed)?;
            let Some((_, payload)) = frame.filter(|(head, _)| head.index == index) else {
                return Err(LogError::Damaged {
                    path: segment.name().into(),
                    offset: u64::from(*offset),
                    reason: format!("entry {index} does not read back as it was written"),
                });
            };
            if !entries.push(index, Bytes::copy_from_slice(payload)) {
                return Ok(index);
            }
            index += 1;
        }
    }
    Ok(index)
}

/// Loads the newest entries into memory, at most `tail_bytes` of them.
pub(super) fn load_tail(live: &LiveIndex, first: u64, tail_bytes: usize) -> Result<Tail, LogError> {
    // From frame offsets: near enough for a budget, and settled exactly by evicting.
    let mut from = live.next;
    let mut bytes = 0;
    for (_, segment_first, offsets) in live.places(first, live.next).collect::<Vec<_>>().into_iter().rev() {
        let mut end = offsets.last().copied().unwrap_or_default();
        for (slot, offset) in offsets.iter().enumerate().rev() {
            bytes += u64::from(end - offset) + cost_bytes(&Bytes::new()) as u64;
            end = *offset;
            if bytes > tail_bytes as u64 {
                break;
            }
            from = segment_first + slot as u64;
        }
        if bytes > tail_bytes as u64 {
            break;
        }
    }
    let mut tail = Tail::starting_at(from);
    while tail.end() < live.next {
        let mut entries = Entries { found: Vec::new(), bytes: 0, max_bytes: 1 << 20 };
        let plan = live.plan(tail.end(), live.next, entries.max_bytes);
        read_planned(tail.end(), &plan, &mut entries)?;
        for (_, payload) in entries.found {
            tail.push(payload);
        }
    }
    while tail.bytes() > tail_bytes && tail.end() > tail.first() {
        tail.pop_first();
    }
    Ok(tail)
}
