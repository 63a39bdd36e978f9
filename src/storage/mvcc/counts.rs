//! Exact counts without a walk.
//!
//! The key space is cut by *fence* keys into buckets, each with the number of live keys in it. A count is the sum of
//! the buckets inside the range plus a short scan at either edge:
//!
//! ```text
//! fences   |      |      |      |      |
//! range        [----------------------)
//!              scan  sum    sum    scan
//! ```
//!
//! Only creates and deletes touch it. The recent ones are kept with their revisions, so a count at an older revision
//! takes back what happened since; older than that list reaches, the range is scanned. The index is in memory and built
//! in the background after a start; until then counts scan.

use std::collections::VecDeque;

use bytes::Bytes;

use super::{KeyRange, RangeEnd, Store};
use crate::storage::StorageError;

/// Live keys in a bucket when it is cut in two; an edge scan walks at most this many.
const SPLIT_AT: u32 = 512;
/// Creates and deletes remembered, for counts at older revisions.
const RECENT_MAX: usize = 65_536;
/// Creates and deletes remembered while the index is being built.
const RECENT_MAX_BUILDING: usize = 4_000_000;

struct Fence {
    /// First key that may be in the bucket.
    start: Box<[u8]>,
    live: u32,
}

/// One create (true) or delete.
struct Birth {
    revision: i64,
    key: Bytes,
    alive: bool,
}

/// The index; see the module.
pub(super) struct LiveCounts {
    /// Sorted by start, the first one empty; `None` until built.
    fences: Option<Vec<Fence>>,
    recent: VecDeque<Birth>,
    /// Births at or below this revision are no longer in `recent`.
    forgotten: i64,
}

/// How to compute a count: scan two edges, add the middle.
struct Plan {
    left: KeyRange,
    inner: i64,
    right: Option<KeyRange>,
}

impl LiveCounts {
    pub(super) fn unbuilt() -> LiveCounts {
        LiveCounts { fences: None, recent: VecDeque::new(), forgotten: 0 }
    }

    fn reaches(&self, revision: i64) -> bool {
        self.fences.is_some() && revision >= self.forgotten
    }

    fn remember(&mut self, births: Vec<(i64, Bytes, bool)>) {
        let max = if self.fences.is_some() { RECENT_MAX } else { RECENT_MAX_BUILDING };
        for (revision, key, alive) in births {
            self.recent.push_back(Birth { revision, key: Bytes::copy_from_slice(&key), alive });
        }
        while self.recent.len() > max {
            if let Some(birth) = self.recent.pop_front() {
                self.forgotten = birth.revision;
            }
        }
    }

    /// Index of the bucket that `key` falls into.
    fn bucket(fences: &[Fence], key: &[u8]) -> usize {
        fences.partition_point(|fence| *fence.start <= *key).saturating_sub(1)
    }

    /// Counts one create or delete; true if its bucket should be split.
    fn apply(fences: &mut Vec<Fence>, key: &[u8], alive: bool) -> bool {
        let at = Self::bucket(fences, key);
        let bucket = &mut fences[at];
        if alive {
            bucket.live += 1;
            return bucket.live >= SPLIT_AT;
        }
        bucket.live = bucket.live.saturating_sub(1);
        if bucket.live == 0 && at > 0 {
            fences.remove(at);
        }
        false
    }

    /// The bucket of `key` and its number of live keys, if it is full.
    fn full_bucket(&self, key: &[u8]) -> Option<(KeyRange, u32)> {
        let fences = self.fences.as_ref()?;
        let at = Self::bucket(fences, key);
        (fences[at].live >= SPLIT_AT).then(|| (Self::bucket_range(fences, at), fences[at].live))
    }

    fn bucket_range(fences: &[Fence], at: usize) -> KeyRange {
        let end = match fences.get(at + 1) {
            Some(next) => RangeEnd::Before(Bytes::copy_from_slice(&next.start)),
            None => RangeEnd::Unbounded,
        };
        KeyRange { start: Bytes::copy_from_slice(&fences[at].start), end }
    }

    fn plan(&self, range: &KeyRange, revision: i64) -> Option<Plan> {
        let fences = self.fences.as_ref().filter(|_| self.reaches(revision))?;
        let first = Self::bucket(fences, &range.start) + 1;
        let last = match &range.end {
            RangeEnd::Single => first,
            RangeEnd::Unbounded => fences.len(),
            RangeEnd::Before(end) => Self::bucket(fences, end),
        };
        if first >= last {
            return Some(Plan { left: range.clone(), inner: 0, right: None });
        }
        let boundary = |at: usize| Bytes::copy_from_slice(&fences[at].start);
        let left = KeyRange { start: range.start.clone(), end: RangeEnd::Before(boundary(first)) };
        let right = match &range.end {
            RangeEnd::Before(_) => Some(KeyRange { start: boundary(last), end: range.end.clone() }),
            RangeEnd::Unbounded | RangeEnd::Single => None,
        };
        let middle = KeyRange {
            start: boundary(first),
            end: right.as_ref().map_or(RangeEnd::Unbounded, |right| RangeEnd::Before(right.start.clone())),
        };
        let live: i64 = fences[first..last].iter().map(|fence| i64::from(fence.live)).sum();
        let since: i64 = self
            .recent
            .iter()
            .rev()
            .take_while(|birth| birth.revision > revision)
            .filter(|birth| middle.contains(&birth.key))
            .map(|birth| if birth.alive { 1 } else { -1 })
            .sum();
        Some(Plan { left, inner: live - since, right })
    }
}

impl Store {
    /// Number of live keys in a range at a revision.
    ///
    /// Costs two short scans if [`Store::counts_quickly`], a scan of the range otherwise.
    pub fn count(&self, range: &KeyRange, revision: i64) -> Result<i64, StorageError> {
        if range.is_empty() {
            return Ok(0);
        }
        if let Some(key) = range.as_single() {
            return Ok(i64::from(self.get(key, revision)?.is_some()));
        }
        let plan = self.counts.lock().plan(range, revision);
        match plan {
            None => self.count_by_scan(range, revision),
            Some(plan) => {
                let right = match &plan.right {
                    Some(right) => self.count_by_scan(right, revision)?,
                    None => 0,
                };
                Ok(self.count_by_scan(&plan.left, revision)? + plan.inner + right)
            }
        }
    }

    /// True if a count at this revision needs no scan of the whole range.
    pub fn counts_quickly(&self, revision: i64) -> bool {
        self.counts.lock().reaches(revision)
    }

    /// Number of live keys, for metrics; `None` until the index is built.
    pub fn live_keys(&self) -> Option<i64> {
        let counts = self.counts.lock();
        counts.fences.as_ref().map(|fences| fences.iter().map(|fence| i64::from(fence.live)).sum())
    }

    fn count_by_scan(&self, range: &KeyRange, revision: i64) -> Result<i64, StorageError> {
        let mut scan = self.scan(range, revision);
        let mut count = 0;
        while scan.next()?.is_some() {
            count += 1;
        }
        Ok(count)
    }

    /// Builds the index by one scan of all keys; to be called once, on a blocking thread.
    pub fn build_counts(&self) -> Result<(), StorageError> {
        loop {
            let revision = self.revision();
            let mut fences = vec![Fence { start: Box::default(), live: 0 }];
            let mut scan = self.scan_past_cache(&everything(), revision);
            while let Some(record) = scan.next()? {
                let last = fences.len() - 1;
                if fences[last].live >= SPLIT_AT / 2 {
                    fences.push(Fence { start: record.key.into(), live: 1 });
                } else {
                    fences[last].live += 1;
                }
            }
            let mut counts = self.counts.lock();
            if counts.forgotten > revision || self.compacted() > revision {
                continue;
            }
            for birth in counts.recent.iter().filter(|birth| birth.revision > revision) {
                LiveCounts::apply(&mut fences, &birth.key, birth.alive);
            }
            counts.fences = Some(fences);
            counts.forgotten = counts.forgotten.max(revision);
            return Ok(());
        }
    }

    /// Takes the creates and deletes of a run that is visible up to `revision`.
    pub(super) fn record_births(
        &self,
        births: Vec<(i64, Bytes, bool)>,
        revision: i64,
    ) -> Result<(), StorageError> {
        if births.is_empty() {
            return Ok(());
        }
        let mut counts = self.counts.lock();
        let mut full = Vec::new();
        if let Some(fences) = &mut counts.fences {
            for (_, key, alive) in &births {
                if LiveCounts::apply(fences, key, *alive) {
                    full.push(key.clone());
                }
            }
        }
        counts.remember(births);
        for key in full {
            // Only now: later changes of the run may have emptied the bucket or moved its ends.
            let Some((bucket, live)) = counts.full_bucket(&key) else { continue };
            let cuts = self.cuts(&bucket, live, revision)?;
            if let Some(fences) = &mut counts.fences {
                split(fences, &bucket.start, cuts);
            }
        }
        Ok(())
    }

    /// The keys that cut a full bucket into pieces of half of [`SPLIT_AT`], and a last one of less than all of it. A run may
    /// have filled the bucket many times over. What is behind the last cut is not walked: mostly half of the bucket.
    fn cuts(&self, bucket: &KeyRange, live: u32, revision: i64) -> Result<Vec<Box<[u8]>>, StorageError> {
        let wanted = usize::try_from(live / (SPLIT_AT / 2)).expect("32 bits fit").saturating_sub(1);
        let mut cuts = Vec::with_capacity(wanted);
        let mut scan = self.scan(bucket, revision);
        let mut in_piece = 0;
        while cuts.len() < wanted
            && let Some(record) = scan.next()?
        {
            if in_piece == SPLIT_AT / 2 {
                cuts.push(record.key.into());
                in_piece = 0;
            }
            in_piece += 1;
        }
        Ok(cuts)
    }

    /// Live keys in the fullest bucket.
    #[cfg(test)]
    pub(super) fn fullest_bucket(&self) -> u32 {
        let counts = self.counts.lock();
        let fences = counts.fences.as_deref().unwrap_or_default();
        fences.iter().map(|fence| fence.live).max().unwrap_or(0)
    }
}

/// Cuts the bucket that starts at `start`: each piece but the last has half of [`SPLIT_AT`] keys.
fn split(fences: &mut Vec<Fence>, start: &[u8], cuts: Vec<Box<[u8]>>) {
    let at = LiveCounts::bucket(fences, start);
    let mut rest = fences[at].live;
    let mut pieces = Vec::with_capacity(cuts.len());
    for cut in cuts {
        rest = rest.saturating_sub(SPLIT_AT / 2);
        pieces.push(Fence { start: cut, live: SPLIT_AT / 2 });
    }
    if let Some(last) = pieces.last_mut() {
        last.live = rest;
        fences[at].live = SPLIT_AT / 2;
        fences.splice(at + 1..at + 1, pieces);
    }
}

fn everything() -> KeyRange {
    KeyRange { start: Bytes::new(), end: RangeEnd::Unbounded }
}
