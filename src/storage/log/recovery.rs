//! Opening: which bytes of the log were promised, and is every one of them there?
//!
//! A batch is written only after the one before it was synced. So of all batches only the last may be torn, and it was not
//! acknowledged: it is cut off whole. Whether a bad frame is in the last batch is decided by what follows it. Say batch 7
//! is the last that is whole:
//!
//! ```text
//! ... 6 6 | 7 7 7 | ? ? ?            nothing valid follows            the end, or 8 was torn: cut
//! ... 6 6 | 7 7 7 | 8 ? 8            only frames of 8 follow          8 was torn: cut, its valid frames too
//! ... 6 6 | 7 7 7 | 8 ? 8 | 9        a frame of 9 follows             8 was synced before 9: damage, refused
//! ... 6 6 | 7 ? 7 | start of the next segment, which says where this one ends: damage, refused
//! ```
//!
//! What this cannot see is damage in the last batch that was acknowledged and has nothing after it. The committed hint that
//! follows within a second of the last write, and at a close, narrows that to what was written in the last second.
//!
//! Everything is checked before anything is changed: a refused log stays as it was found. The cut is made with zeros, synced
//! before the log is used, so that no torn frame can ever be taken for one of a later batch.

use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::sync::Arc;

use bytes::Bytes;
use tracing::{info, warn};

use super::disk::{Disk, Purpose, read_full};
use super::error::LogError;
use super::format::{
    FRAME_HEADER_BYTES, FrameHead, HeaderFault, Kind, LogId, SEGMENT_HEADER_BYTES, SegmentHeader, u64_at,
};
use super::segment::{Change, FrameReader, LiveIndex, SegmentFile, segment_name};
use super::supply::{SPARES, Spare, UNFINISHED_NAME, fill};
use super::writer::{Position, Standing};
use crate::clock;

const START: u64 = SEGMENT_HEADER_BYTES as u64;

/// Zero-filled before a new log is opened: what a fresh start waits for.
const FIRST_SEGMENT_BYTES: u64 = 1 << 20;

/// Read at once when looking for what follows the end.
const SEARCH_BYTES: usize = 1 << 20;

/// Compared at once to pass over zeros.
const ZEROS: [u8; 4096] = [0; 4096];

/// A log as it was found, repaired and ready to go on.
#[derive(Debug)]
pub(super) struct Found {
    pub(super) log_id: LogId,
    pub(super) live: LiveIndex,
    pub(super) first_index: u64,
    pub(super) standing: Standing,
    pub(super) at: Position,
    /// The segment after the current one, if it was made already.
    pub(super) ready: Option<Arc<SegmentFile>>,
    /// Segments in which nothing is live, oldest first.
    pub(super) retired: Vec<Arc<SegmentFile>>,
    pub(super) spares: Vec<Spare>,
    pub(super) cut_bytes: u64,
}

/// Opens the log in the directory, or makes a new one if there is none.
pub(super) fn recover(disk: &Disk, segment_bytes: u64) -> Result<Found, LogError> {
    disk.create_dir()?;
    let names = Names::list(disk)?;
    let Some(newest) = names.segments.last().copied() else {
        if let Some(spare) = names.spares.first() {
            let reason = format!("{spare} is there, which only ever stands beside segments");
            return Err(LogError::Missing { dir: disk.dir().to_path_buf(), reason });
        }
        return fresh(disk, segment_bytes);
    };

    // Purged segments go oldest first, but a crash may undo any of the removals: what a hole separates from the newest
    // segment is a leftover, unless the entries turn out to be needed.
    let held =
        names.segments.iter().rev().zip((0..=newest).rev()).take_while(|(have, want)| *have == want).count();
    let held_from = names.segments.len() - held;
    let leftovers = names.segments[..held_from].to_vec();
    let held = names.segments[held_from..].iter();
    let mut segments = held.map(|sequence| Opened::open(disk, *sequence)).collect::<Result<Vec<_>, _>>()?;
    let log_id = segments[0].header.log_id;
    if let Some(other) = segments.iter().find(|segment| segment.header.log_id != log_id) {
        let reason = "it carries another log's identity".to_owned();
        return Err(LogError::Foreign { path: disk.path(&other.file.name()), reason });
    }

    // The newest may have been made ahead and not begun.
    let ahead = if segments.len() > 1 && segments[segments.len() - 1].start.is_none() {
        segments.pop()
    } else {
        None
    };
    let mut replay = Replay::new(segments[0].file.sequence);
    let mut end = BatchEnd { offset: START, batch: 0, bad: START };
    for (position, segment) in segments.iter().enumerate() {
        let successor = segments.get(position + 1);
        let until = match successor.map(|successor| successor.start.as_ref()) {
            None => None,
            Some(Some(start)) => Some(start.previous_end),
            Some(None) => {
                let reason = "its first frame is bad, but later segments were written".to_owned();
                return Err(damaged(disk, &segments[position + 1].file, START, reason));
            }
        };
        end = replay.run(disk, &segment.file, until)?;
    }
    let current = segments.last().expect("the newest but an unbegun one");
    let cut = Cut::find(disk, &current.file, end)?;
    let ahead_cut = match &ahead {
        None => Cut::default(),
        Some(ahead) => Cut::find(disk, &ahead.file, BatchEnd { offset: START, batch: 0, bad: START })?,
    };
    if ahead_cut.has_frames && cut.bytes() > 0 {
        let reason = "a frame is bad, but a later segment was written".to_owned();
        return Err(damaged(disk, &current.file, end.bad, reason));
    }
    let first_index = replay.check_complete(disk)?;
    let previous_end = match (&current.start, end.batch) {
        (Some(start), 1..) => start.previous_end,
        // Its start was torn: it begins anew behind what the segment before it was found to hold.
        _ => replay.previous_end,
    };

    // From here on the log is accepted, and changed.
    cut.make(disk, &current.file)?;
    if let Some(ahead) = &ahead {
        ahead_cut.make(disk, &ahead.file)?;
    }
    let spares = names.sweep(disk, &leftovers, segment_bytes)?;
    let mut live = replay.live;
    let retired = replay.standing.purged.as_ref().map(|(purged, _)| live.retire(*purged)).unwrap_or_default();
    let at = Position {
        segment: Arc::clone(&current.file),
        offset: end.offset,
        batch: end.batch + 1,
        previous_end,
        next_index: live.next,
    };
    Ok(Found {
        log_id,
        live,
        first_index,
        standing: replay.standing,
        at,
        ready: ahead.map(|segment| segment.file),
        retired,
        spares,
        cut_bytes: cut.bytes() + ahead_cut.bytes(),
    })
}

/// Makes a log that holds nothing.
fn fresh(disk: &Disk, segment_bytes: u64) -> Result<Found, LogError> {
    let log_id = clock::random();
    let failed = |source| LogError::Io { action: "create", path: disk.path(&segment_name(1)), source };
    let segment = fill(disk, log_id, 1, segment_bytes.min(FIRST_SEGMENT_BYTES), || true).map_err(failed)?;
    let segment = Arc::new(segment.expect("nothing made it give up"));
    info!(dir = %disk.dir().display(), "created a new log");
    Ok(Found {
        log_id,
        live: LiveIndex::default(),
        first_index: 0,
        standing: Standing::default(),
        at: Position { segment, offset: START, batch: 1, previous_end: 0, next_index: 0 },
        ready: None,
        retired: Vec::new(),
        spares: Vec::new(),
        cut_bytes: 0,
    })
}

/// The files of the directory.
struct Names {
    /// Sequence numbers, rising.
    segments: Vec<u64>,
    spares: Vec<String>,
    unfinished: bool,
}

impl Names {
    fn list(disk: &Disk) -> Result<Self, LogError> {
        let mut names = Self { segments: Vec::new(), spares: Vec::new(), unfinished: false };
        for name in disk.list()? {
            if let Some(stem) = name.strip_suffix(".log") {
                let sequence =
                    u64::from_str_radix(stem, 16).ok().filter(|sequence| segment_name(*sequence) == name);
                let Some(sequence) = sequence else {
                    let reason = "it is named like a segment, but not numbered like one".to_owned();
                    return Err(LogError::Foreign { path: disk.path(&name), reason });
                };
                names.segments.push(sequence);
            } else if name.ends_with(".spare") {
                names.spares.push(name);
            } else if name == UNFINISHED_NAME {
                names.unfinished = true;
            }
        }
        names.segments.sort_unstable();
        Ok(names)
    }

    /// Removes what has no use and returns the spares that are kept.
    fn sweep(self, disk: &Disk, leftovers: &[u64], segment_bytes: u64) -> Result<Vec<Spare>, LogError> {
        let mut useless: Vec<String> = leftovers.iter().map(|sequence| segment_name(*sequence)).collect();
        useless.extend(self.unfinished.then(|| UNFINISHED_NAME.to_owned()));
        let mut kept = Vec::new();
        for name in self.spares {
            let failed = |source| LogError::Io { action: "open", path: disk.path(&name), source };
            let file = disk.open(&name).map_err(failed)?;
            let bytes = file.metadata().map_err(failed)?.len();
            if bytes >= segment_bytes && kept.len() < SPARES {
                kept.push(Spare { name, file, bytes });
            } else {
                useless.push(name);
            }
        }
        for name in useless {
            disk.remove(&name).map_err(|source| LogError::Io {
                action: "remove",
                path: disk.path(&name),
                source,
            })?;
        }
        disk.sync_dir().map_err(|source| LogError::Io {
            action: "sync",
            path: disk.dir().to_path_buf(),
            source,
        })?;
        Ok(kept)
    }
}

/// A segment whose header is good.
struct Opened {
    file: Arc<SegmentFile>,
    header: SegmentHeader,
    start: Option<StartFrame>,
}

/// What a segment's first frame says.
struct StartFrame {
    previous_end: u64,
}

impl Opened {
    fn open(disk: &Disk, sequence: u64) -> Result<Self, LogError> {
        let name = segment_name(sequence);
        let failed = |source| LogError::Io { action: "open", path: disk.path(&name), source };
        let file = disk.open(&name).map_err(failed)?;
        let capacity_bytes = file.metadata().map_err(failed)?.len();
        let header = read_header(disk, &name, &file)?;
        if header.sequence != sequence {
            let reason = format!("it holds segment {:016x}", header.sequence);
            return Err(LogError::Foreign { path: disk.path(&name), reason });
        }
        let stamp = header.stamp();
        let file = SegmentFile { file, sequence, stamp, recycled: header.recycled, capacity_bytes };
        let start = read_start(&file).map_err(failed)?;
        Ok(Self { file: Arc::new(file), header, start })
    }
}

fn read_header(disk: &Disk, name: &str, file: &File) -> Result<SegmentHeader, LogError> {
    let path = || disk.path(name);
    let mut bytes = [0; SEGMENT_HEADER_BYTES];
    let filled = read_full(file, &mut bytes, 0);
    let filled = filled.map_err(|source| LogError::Io { action: "read", path: path(), source })?;
    if filled < bytes.len() {
        return Err(LogError::Damaged {
            path: path(),
            offset: 0,
            reason: "it is shorter than its header".to_owned(),
        });
    }
    SegmentHeader::decode(&bytes).map_err(|fault| match fault {
        HeaderFault::Magic => LogError::Damaged {
            path: path(),
            offset: 0,
            reason: "it does not begin like a segment of a skeg log".to_owned(),
        },
        HeaderFault::Version(version) => LogError::Foreign {
            path: path(),
            reason: format!("it has format version {version}, which this skeg does not read"),
        },
        HeaderFault::Checksum => LogError::Damaged {
            path: path(),
            offset: 12,
            reason: "the checksum of its header is wrong".to_owned(),
        },
    })
}

fn read_start(segment: &SegmentFile) -> io::Result<Option<StartFrame>> {
    let mut reader = FrameReader::new(segment)?;
    let frame = reader.frame_at(START)?;
    Ok(frame.and_then(|(head, payload)| {
        let is_start = head.kind == Kind::Start && head.batch == 1 && payload.len() == 8;
        is_start.then(|| StartFrame { previous_end: u64_at(payload, 0) })
    }))
}

fn damaged(disk: &Disk, segment: &SegmentFile, offset: u64, reason: String) -> LogError {
    LogError::Damaged { path: disk.path(&segment.name()), offset, reason }
}

/// Where the last whole batch of a segment ends.
#[derive(Debug, Clone, Copy)]
struct BatchEnd {
    offset: u64,
    /// Its number.
    batch: u32,
    /// Where the first frame starts that is not good.
    bad: u64,
}

/// Builds the log's state from its frames, a whole batch at a time.
struct Replay {
    live: LiveIndex,
    standing: Standing,
    /// Entries below are in no segment that is held. Unknown until the first segment starts.
    floor: Option<u64>,
    /// Where the last but one segment ends.
    previous_end: u64,
    pending: Vec<Pending>,
    /// The indexes of the first entry and of the one that follows, what is pending included.
    first: u64,
    next: u64,
    /// What the segment must repeat next, for the segments before it may have been removed because of that.
    owed: VecDeque<(Kind, u64, Bytes)>,
}

enum Pending {
    Floor(u64),
    Change(Change),
    Vote(Bytes),
    Committed(Bytes),
    Purged(u64, Bytes),
}

impl Replay {
    fn new(first_sequence: u64) -> Self {
        Self {
            live: LiveIndex::default(),
            standing: Standing::default(),
            floor: (first_sequence == 1).then_some(0),
            previous_end: 0,
            pending: Vec::new(),
            first: 0,
            next: 0,
            owed: VecDeque::new(),
        }
    }

    /// Replays a segment up to where its successor says it ends, or, of the last, as far as its batches are whole.
    fn run(
        &mut self,
        disk: &Disk,
        segment: &Arc<SegmentFile>,
        until: Option<u64>,
    ) -> Result<BatchEnd, LogError> {
        let failed = |source| LogError::Io { action: "read", path: disk.path(&segment.name()), source };
        let mut reader = FrameReader::new(segment).map_err(failed)?;
        let mut offset = START;
        let mut end = BatchEnd { offset, batch: 0, bad: offset };
        while until.is_none_or(|until| offset < until) {
            let frame = reader.frame_at(offset).map_err(failed)?;
            let Some((head, payload)) = frame.filter(|(head, _)| head.batch == end.batch + 1) else { break };
            if offset == START {
                self.pending.push(Pending::Change(Change::Rolled(Arc::clone(segment))));
            }
            self.add(&head, payload, offset).map_err(|reason| damaged(disk, segment, offset, reason))?;
            offset += head.frame_bytes() as u64;
            if head.last_in_batch {
                if !self.owed.is_empty() {
                    let reason = "the segment's first batch does not repeat all that stands".to_owned();
                    return Err(damaged(disk, segment, START, reason));
                }
                self.commit();
                end = BatchEnd { offset, batch: head.batch, bad: offset };
            }
        }
        self.pending.clear();
        self.owed.clear();
        self.first = self.first_index();
        self.next = self.live.next;
        end.bad = offset;
        match until {
            Some(until) if end.offset != until => Err(damaged(
                disk,
                segment,
                offset,
                format!("a frame is bad, but the segment goes on to {until}"),
            )),
            Some(until) => {
                self.previous_end = until;
                Ok(end)
            }
            None => Ok(end),
        }
    }

    /// Takes a good frame; says what is wrong if it cannot be where it is.
    fn add(&mut self, head: &FrameHead, payload: &[u8], offset: u64) -> Result<(), String> {
        let index = head.index;
        if (head.kind == Kind::Start) != (offset == START) {
            return Err("a segment's start is elsewhere than at its start".to_owned());
        }
        if let Some((kind, owed_index, owed)) = self.owed.pop_front()
            && (kind, owed_index, owed.as_ref()) != (head.kind, index, payload)
        {
            return Err("the segment does not repeat what stands".to_owned());
        }
        match head.kind {
            Kind::Start => {
                self.owed = self.standing.frames().collect();
                if self.floor.is_none() {
                    self.pending.push(Pending::Floor(index));
                } else if index != self.next {
                    return Err(format!(
                        "the segment starts before entry {index}, but entry {} is next",
                        self.next
                    ));
                }
                self.next = index;
            }
            Kind::Entry => {
                if index != self.next {
                    return Err(format!("it holds entry {index}, but entry {} is next", self.next));
                }
                let offset =
                    u32::try_from(offset).map_err(|_| "it is behind the largest offset".to_owned())?;
                self.next = index + 1;
                self.pending.push(Pending::Change(Change::Placed { index, offset }));
            }
            Kind::Vote => self.pending.push(Pending::Vote(Bytes::copy_from_slice(payload))),
            Kind::Committed => self.pending.push(Pending::Committed(Bytes::copy_from_slice(payload))),
            Kind::Truncate => {
                if index < self.first {
                    return Err(format!("it truncates to entry {index}, which was purged"));
                }
                self.next = self.next.min(index);
                self.pending.push(Pending::Change(Change::Truncated(index)));
            }
            Kind::Purge => {
                self.first = self.first.max(index + 1);
                self.next = self.next.max(index + 1);
                self.pending.push(Pending::Change(Change::Purged(index)));
                self.pending.push(Pending::Purged(index, Bytes::copy_from_slice(payload)));
            }
        }
        Ok(())
    }

    fn commit(&mut self) {
        for pending in self.pending.drain(..) {
            match pending {
                Pending::Floor(index) => {
                    self.live.next = index;
                    self.floor = Some(index);
                }
                Pending::Change(change) => {
                    if let (Change::Truncated(from), Some(floor)) = (&change, &mut self.floor) {
                        *floor = (*floor).min(*from);
                    }
                    self.live.apply(change);
                }
                Pending::Vote(vote) => self.standing.vote = Some(vote),
                Pending::Committed(committed) => self.standing.committed = Some(committed),
                Pending::Purged(index, payload) => {
                    if self.standing.purged.as_ref().is_none_or(|(purged, _)| *purged < index) {
                        self.standing.purged = Some((index, payload));
                    }
                }
            }
        }
    }

    fn first_index(&self) -> u64 {
        self.standing.purged.as_ref().map_or(0, |(purged, _)| purged + 1)
    }

    /// Checks that every entry that was not purged is there, and returns the first one's index.
    fn check_complete(&self, disk: &Disk) -> Result<u64, LogError> {
        let first = self.first_index();
        let reason = match self.floor {
            None => "the first one there was never begun".to_owned(),
            Some(floor) if floor > first => format!("entries {first} to {} are in none", floor - 1),
            Some(_) => return Ok(first),
        };
        Err(LogError::Missing { dir: disk.dir().to_path_buf(), reason })
    }
}

/// Bytes behind the last whole batch that were written and never synced.
#[derive(Debug, Default)]
struct Cut {
    from: u64,
    until: u64,
    /// Among them is a frame that can be read.
    has_frames: bool,
}

impl Cut {
    /// Looks through all that follows the last whole batch.
    fn find(disk: &Disk, segment: &SegmentFile, end: BatchEnd) -> Result<Self, LogError> {
        let failed = |source| LogError::Io { action: "read", path: disk.path(&segment.name()), source };
        let torn = end.batch + 1;
        let after = search(segment, end.offset, torn).map_err(failed)?;
        if after.newest_batch > torn {
            let reason = format!(
                "a frame of batch {torn} is bad, but batch {} was written after it",
                after.newest_batch
            );
            return Err(damaged(disk, segment, end.bad, reason));
        }
        let mut until = after.end.max(end.bad);
        // Of a recycled segment, the bytes behind are those of its earlier life. Only a frame's good head tells a torn one.
        let head =
            FrameReader::new(segment).and_then(|mut reader| reader.head_at(end.bad)).map_err(failed)?;
        if let Some(head) = head.filter(|head| head.batch == torn) {
            let file_bytes = segment.file.metadata().map_err(failed)?.len();
            until = until.max(file_bytes.min(end.bad + head.frame_bytes() as u64));
        }
        Ok(Self { from: end.offset, until, has_frames: after.newest_batch > 0 })
    }

    fn bytes(&self) -> u64 {
        self.until - self.from
    }

    /// Overwrites them with zeros, durably.
    fn make(&self, disk: &Disk, segment: &SegmentFile) -> Result<(), LogError> {
        if self.bytes() == 0 {
            return Ok(());
        }
        let path = disk.path(&segment.name());
        warn!(file = %path.display(), offset = self.from, bytes = self.bytes(), "cut off the log's torn tail");
        let mut offset = self.from;
        let zeroed = loop {
            let count = usize::try_from(self.until - offset).unwrap_or(usize::MAX).min(ZEROS.len());
            if count == 0 {
                break disk.sync(Purpose::Append, &segment.file);
            }
            if let Err(error) = disk.write(Purpose::Append, &segment.file, &ZEROS[..count], offset) {
                break Err(error);
            }
            offset += count as u64;
        };
        zeroed.map_err(|source| LogError::Io { action: "cut the torn tail of", path, source })
    }
}

/// What the bytes behind the last whole batch hold.
#[derive(Debug, Default)]
struct After {
    /// The highest batch of the good frames; zero if there is none.
    newest_batch: u32,
    /// Where the last good frame ends, or, in a segment that was zero-filled, the last byte that is not zero.
    end: u64,
}

/// Looks at every offset from `from` on for good frames of the batch `torn` or a later one.
fn search(segment: &SegmentFile, from: u64, torn: u32) -> io::Result<After> {
    let mut reader = FrameReader::new(segment)?;
    let mut after = After { newest_batch: 0, end: from };
    let rest_bytes = segment.file.metadata()?.len().saturating_sub(from);
    // One more, so that a short read tells the end.
    let mut window = vec![0; usize::try_from(rest_bytes + 1).unwrap_or(usize::MAX).min(SEARCH_BYTES)];
    let mut offset = from;
    loop {
        let filled = read_full(&segment.file, &mut window, offset)?;
        let bytes = &window[..filled];
        if !segment.recycled
            && let Some(last) = last_nonzero(bytes)
        {
            after.end = after.end.max(offset + last as u64 + 1);
        }
        let mut at = 0;
        while at + FRAME_HEADER_BYTES <= bytes.len() {
            if bytes[at..].starts_with(&ZEROS) {
                // No index field lies whole within the zeros.
                at += ZEROS.len() - FRAME_HEADER_BYTES;
                continue;
            }
            let here = offset + at as u64;
            at += 1;
            let head = FrameHead::decode(&bytes[at - 1..], segment.stamp);
            if head.is_none_or(|head| head.batch < torn) {
                continue;
            }
            if let Some((head, _)) = reader.frame_at(here)? {
                after.newest_batch = after.newest_batch.max(head.batch);
                after.end = after.end.max(here + head.frame_bytes() as u64);
                at += head.frame_bytes() - 1;
            }
        }
        if filled < window.len() {
            return Ok(after);
        }
        offset += at as u64;
    }
}

fn last_nonzero(bytes: &[u8]) -> Option<usize> {
    let mut end = bytes.len();
    while end > 0 {
        let start = end.saturating_sub(ZEROS.len());
        if bytes[start..end] != ZEROS[..end - start] {
            return bytes[..end].iter().rposition(|byte| *byte != 0);
        }
        end = start;
    }
    None
}
