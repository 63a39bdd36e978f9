//! The rolling hash of what was applied: equal on all members that applied the same log with the same result.
//!
//! ```text
//! entry            17        18        19
//! written       put kv,rev  nothing  put, delete
//! digest           d17        0        d19            CRC-32C of the encoded records, in order
//! hash     h17 = mix(h16, 17, d17)   h18 = mix(h17, 18, 0)   ...
//! ```
//!
//! It depends on the entries alone, not on how they were put together into batches, and is stored with the position it speaks
//! of, in the same batch; so it is the same after a restart, after a replay, and in a checkpoint. Once two members differ they
//! stay different: a mix with equal digests is a bijection.
//!
//! A member says what its hash was at any of its last [`RECENT`] entries, so members that do not stand at the same entry can
//! still be compared at one. Two hashes can be compared only if they begin at the same entry. A store in which there is none,
//! or none that goes with its position (an older build, which does not know it, wrote the last entries), begins where it
//! stands. **The setting of a cluster version begins all of them anew**: it is an entry that all builds know and that changes
//! nothing if it sets what is set, so a leader that sees members begin at different entries makes one.
//!
//! What it cannot see is damage to what was stored right: see `task/corruption_check`.

use std::collections::VecDeque;

use prost::Message;

use crate::proto::skegpb::LogId;
use crate::storage::schema::{Family, MetaKey, Trail};
use crate::storage::{Engine, StorageError};

/// Entries whose hashes are kept, 8 bytes each: a peer asks about the entry that it applied two heartbeats ago, and this many
/// are applied since at 80,000 a second.
const RECENT: usize = 16_384;

/// The hash after the last entry, and after some before it.
#[derive(Debug)]
pub struct Trails {
    last: Trail,
    /// The hashes after the last entries; the newest is that of `last`. All begin where `last` does.
    recent: VecDeque<u64>,
}

impl Trails {
    fn new(last: Trail) -> Trails {
        Trails { last, recent: VecDeque::from([last.hash]) }
    }

    /// The hash after the last applied entry.
    pub fn last(&self) -> Trail {
        self.last
    }

    /// The hash before entry `next`; `None` if that is not applied yet, or too long ago.
    pub fn before(&self, next: u64) -> Option<Trail> {
        let back = usize::try_from(self.last.next.checked_sub(next)?).ok()?;
        let at = self.recent.len().checked_sub(back.checked_add(1)?)?;
        Some(Trail { origin: self.last.origin, next, hash: *self.recent.get(at)? })
    }

    /// Takes in what a run has added, once it is visible.
    pub(super) fn follow(&mut self, run: TrailRun) {
        if run.broken {
            self.recent.clear();
        }
        self.recent.extend(run.added);
        let excess = self.recent.len().saturating_sub(RECENT);
        self.recent.drain(..excess);
        self.last = run.last;
    }
}

/// What a run adds.
#[derive(Debug)]
pub(super) struct TrailRun {
    last: Trail,
    added: Vec<u64>,
    /// What was added does not follow what was there.
    broken: bool,
}

impl TrailRun {
    pub(super) fn new(last: Trail) -> TrailRun {
        TrailRun { last, added: Vec::new(), broken: false }
    }

    pub(super) fn last(&self) -> Trail {
        self.last
    }

    /// Takes in an entry.
    pub(super) fn step(&mut self, index: u64, digest: u32) {
        if index != self.last.next {
            self.added.clear();
            self.broken = true;
        }
        self.last.hash = mix(self.last.hash, index, digest);
        self.last.next = index + 1;
        self.added.push(self.last.hash);
    }

    /// Forgets what came before.
    pub(super) fn begin_anew(&mut self) {
        self.last = Trail { origin: self.last.next, next: self.last.next, hash: 0 };
        self.added = vec![0];
        self.broken = true;
    }
}

/// Mixes an entry into a hash: rounds of multiplications and shifts, each of them a bijection.
fn mix(hash: u64, index: u64, digest: u32) -> u64 {
    let mut mixed = hash;
    for part in [index, u64::from(digest)] {
        mixed = (mixed ^ part).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        mixed = (mixed ^ (mixed >> 32)).wrapping_mul(0xD6E8_FEB8_6659_FD93);
        mixed ^= mixed >> 32;
    }
    mixed
}

/// Reads a store's trail, or begins one where the store stands.
pub(super) fn load(engine: &Engine) -> Result<Trails, StorageError> {
    let applied = engine.get(Family::Meta, &MetaKey::Applied.encode())?;
    let applied = applied.map(|stored| LogId::decode(stored.as_ref())).transpose();
    let applied = applied.map_err(|_| StorageError::Damaged { what: "position" })?;
    let next = applied.map_or(0, |position| position.index + 1);
    let stored = engine.get(Family::Meta, &MetaKey::Trail.encode())?;
    let stored = stored.and_then(|stored| Trail::decode(&stored)).filter(|trail| trail.next == next);
    Ok(Trails::new(stored.unwrap_or(Trail { origin: next, next, hash: 0 })))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn followed(mut trails: Trails, entries: std::ops::Range<u64>, batch: usize) -> Trails {
        let entries: Vec<u64> = entries.collect();
        for entries in entries.chunks(batch) {
            let mut run = TrailRun::new(trails.last());
            for index in entries {
                run.step(*index, u32::try_from(index * 7).expect("small"));
            }
            trails.follow(run);
        }
        trails
    }

    #[test]
    fn batches_do_not_matter_and_recent_entries_can_be_asked_for() {
        let whole = followed(Trails::new(Trail::default()), 0..40_000, 256);
        let single = followed(Trails::new(Trail::default()), 0..40_000, 1);
        assert_eq!(whole.last(), single.last());
        assert_eq!(whole.last(), whole.before(40_000).expect("it stands there"));
        assert_eq!(whole.before(40_001), None, "not there yet");
        assert_eq!(whole.before(40_000 - RECENT as u64), None, "too long ago");
        let before = whole.before(40_001 - RECENT as u64).expect("just kept");
        assert_eq!(before, followed(Trails::new(Trail::default()), 0..before.next, 100).last());
        assert_eq!(whole.recent.len(), RECENT);
    }

    #[test]
    fn a_difference_stays() {
        let mut other = Trails::new(Trail::default());
        let mut run = TrailRun::new(other.last());
        run.step(0, 1);
        other.follow(run);
        let (one, other) = (followed(Trails::new(Trail::default()), 0..1000, 9), followed(other, 1..1000, 7));
        assert_ne!(one.before(1), other.before(1));
        assert_ne!(one.last().hash, other.last().hash);
    }

    #[test]
    fn what_begins_anew_forgets() {
        let mut trails = followed(Trails::new(Trail::default()), 0..10, 3);
        let mut run = TrailRun::new(trails.last());
        run.step(10, 5);
        run.begin_anew();
        run.step(11, 6);
        trails.follow(run);
        let fresh = followed(Trails::new(Trail { origin: 11, next: 11, hash: 0 }), 11..11, 1);
        assert_eq!(trails.before(11), Some(fresh.last()));
        assert_eq!(trails.before(10), None);
        assert_eq!(trails.last(), Trail { origin: 11, next: 12, hash: mix(0, 11, 6) });
    }

    #[test]
    fn a_gap_is_not_filled() {
        let mut trails = followed(Trails::new(Trail::default()), 0..10, 3);
        let mut run = TrailRun::new(trails.last());
        run.step(12, 5);
        trails.follow(run);
        assert_eq!(trails.before(10), None);
        assert!(trails.before(13).is_some());
    }
}
