//! Replaying history to watchers that are not level, many at once, never in the way of apply.

use std::cell::Cell;
use std::sync::Arc;

use super::group::View;
use super::hub::{Encoder, Hub};
use super::queue::Message;
use crate::blocking;
use crate::storage::StorageError;
use crate::storage::mvcc::read::{Change, Event, Wish};
use crate::storage::mvcc::{MvccError, Store};
use crate::storage::schema::SubRevision;

/// Watchers served by one walk over history. etcd: `maxWatchersPerSync`.
const WATCHERS_PER_WALK: usize = 512;
/// Watchers share a walk if their next revisions are no further apart: nobody waits for another's long way.
const REVISIONS_SHARED: i64 = 1000;
/// Distinct revisions in one walk. etcd: `watchBatchMaxRevs`.
const REVISIONS_PER_WALK: usize = 1000;
/// Bytes of events held by one walk.
const BYTES_PER_WALK: usize = 8 << 20;
/// Changes looked at by one walk, wanted or not: a few tens of milliseconds.
const CHANGES_PER_WALK: usize = 100_000;

/// One watcher of a walk.
pub(super) struct Candidate {
    slot: usize,
    view: View,
    next_revision: i64,
}

impl Candidate {
    fn wants(&self, revision: i64, key: &[u8], delete: bool) -> bool {
        let unwanted = if delete { self.view.filters.no_delete } else { self.view.filters.no_put };
        !unwanted && revision >= self.next_revision && self.view.range.contains(key)
    }
}

/// What a walk found.
struct Walk {
    events: Vec<Event>,
    /// All events up to it were read.
    reached: i64,
}

/// Serves watchers that are behind until the hub is dropped; one such task per hub.
///
/// # Errors
/// The storage's: the member must stop then.
pub async fn catch_up(hub: Arc<Hub>) -> Result<(), StorageError> {
    loop {
        let walks = hub.walks();
        if walks.is_empty() {
            hub.work.notified().await;
            continue;
        }
        for candidates in walks {
            let worker = Arc::clone(&hub);
            let served = blocking::spawn(move || worker.serve(&candidates)).await;
            match served {
                Ok(result) => result?,
                Err(error) if error.is_cancelled() => return Ok(()),
                Err(error) => std::panic::resume_unwind(error.into_panic()),
            }
        }
    }
}

impl Hub {
    /// One round: every watcher that is behind and has room, in walks of those that are near each other.
    ///
    /// Watchers whose history is gone are ended.
    pub(super) fn walks(&self) -> Vec<Vec<Candidate>> {
        let mut inner = self.inner.lock();
        let compacted = inner.store.compacted();
        let gone: Vec<usize> = inner
            .behind
            .iter()
            .filter(|slot| inner.watchers.get(slot).is_some_and(|w| w.next_revision < compacted))
            .copied()
            .collect();
        for slot in gone {
            inner.compacted(slot, compacted);
        }
        let mut ready: Vec<Candidate> = inner
            .behind
            .iter()
            .filter_map(|slot| {
                let watcher = inner.watchers.get(slot).filter(|watcher| watcher.has_room())?;
                let (view, next_revision) = (watcher.view.clone(), watcher.next_revision);
                Some(Candidate { slot: *slot, view, next_revision })
            })
            .collect();
        drop(inner);
        ready.sort_unstable_by_key(|candidate| candidate.next_revision);
        let mut walks: Vec<Vec<Candidate>> = Vec::new();
        for candidate in ready {
            match walks.last_mut() {
                Some(walk)
                    if walk.len() < WATCHERS_PER_WALK
                        && candidate.next_revision - walk[0].next_revision <= REVISIONS_SHARED =>
                {
                    walk.push(candidate);
                }
                _ => walks.push(vec![candidate]),
            }
        }
        walks
    }

    /// One walk over history for some watchers.
    pub(super) fn serve(&self, candidates: &[Candidate]) -> Result<(), StorageError> {
        let from = candidates.iter().map(|candidate| candidate.next_revision).min().unwrap_or(0);
        let (until, store) = {
            let inner = self.inner.lock();
            (inner.revision, Arc::clone(&inner.store))
        };
        let walk = walk(&store, candidates, from, until)?;
        match store.check_readable(from) {
            Ok(()) => {}
            // Compacted meanwhile: the walk may have gaps. The next round tells whom it concerns.
            Err(MvccError::Compacted | MvccError::FutureRevision) => return Ok(()),
            Err(MvccError::Storage(error)) => return Err(error),
        }
        let mut encoder = Encoder::new(&store, &walk.events);
        for candidate in candidates {
            let positions: Vec<usize> = walk
                .events
                .iter()
                .enumerate()
                .filter(|(_, event)| {
                    candidate.wants(event.revision.main, &event.key, event.change == Change::Delete)
                })
                .map(|(at, _)| at)
                .collect();
            #[cfg(feature = "sim")]
            let positions = if crate::sim::planted(crate::sim::Bug::DropCaughtUpEvent) {
                positions.into_iter().skip(1).collect()
            } else {
                positions
            };
            let events = encoder.encode(&candidate.view, &positions)?;
            let mut inner = self.inner.lock();
            let level = walk.reached >= inner.revision;
            let revision = inner.revision;
            let Some(watcher) = inner.watchers.get_mut(&candidate.slot) else { continue };
            if !events.is_empty() {
                watcher.mark_active();
                let taken = watcher.queue.try_push(watcher.outgoing(revision, Message::Events(events)));
                watcher.waits_for_drain = !taken;
                if !taken {
                    continue;
                }
            }
            watcher.next_revision = watcher.next_revision.max(walk.reached + 1);
            if level {
                inner.sync(candidate.slot);
            }
        }
        Ok(())
    }
}

fn walk(store: &Store, candidates: &[Candidate], from: i64, until: i64) -> Result<Walk, StorageError> {
    let mut events: Vec<Event> = Vec::new();
    let bytes = Cell::new(0);
    let (mut changes, mut revisions) = (0, 0);
    let (mut last, mut last_wanted) = (0, 0);
    let mut reached = until;
    let wants = |revision: SubRevision, key: &[u8], delete: bool| {
        // A walk ends only between revisions: they are never torn.
        if revision.main != last {
            let full = revisions >= REVISIONS_PER_WALK || changes >= CHANGES_PER_WALK;
            if full || bytes.get() >= BYTES_PER_WALK {
                reached = last;
                return Wish::Stop;
            }
            last = revision.main;
        }
        changes += 1;
        if !candidates.iter().any(|candidate| candidate.wants(revision.main, key, delete)) {
            return Wish::Skip;
        }
        if last_wanted != revision.main {
            last_wanted = revision.main;
            revisions += 1;
        }
        Wish::Read
    };
    store.history(from, until, wants, |event| {
        bytes.set(bytes.get() + event.size_bytes());
        events.push(event);
    })?;
    Ok(Walk { events, reached })
}
