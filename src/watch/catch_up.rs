//! Replaying history to watchers that are not level, many at once, never in the way of apply.

use std::sync::Arc;

use super::group::View;
use super::hub::{Encoder, Hub};
use super::queue::Message;
use crate::storage::StorageError;
use crate::storage::mvcc::MvccError;
use crate::storage::mvcc::read::Event;

/// Watchers served by one walk over history. etcd: `maxWatchersPerSync`.
const WATCHERS_PER_WALK: usize = 512;
/// Distinct revisions in one walk. etcd: `watchBatchMaxRevs`.
const REVISIONS_PER_WALK: usize = 1000;
/// Bytes of events held by one walk.
const BYTES_PER_WALK: usize = 8 << 20;

/// One watcher of a walk.
struct Candidate {
    slot: usize,
    view: View,
    next_revision: i64,
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
        let candidates = hub.candidates();
        if candidates.is_empty() {
            hub.work.notified().await;
            continue;
        }
        let worker = Arc::clone(&hub);
        let served = tokio::task::spawn_blocking(move || worker.serve(&candidates)).await;
        match served {
            Ok(result) => result?,
            Err(error) if error.is_cancelled() => return Ok(()),
            Err(error) => std::panic::resume_unwind(error.into_panic()),
        }
    }
}

impl Hub {
    /// Watchers that are behind and have room, at most one walk's worth; those whose history is gone are ended.
    fn candidates(&self) -> Vec<Candidate> {
        let compacted = self.store.compacted();
        let mut inner = self.inner.lock();
        let gone: Vec<usize> = inner
            .behind
            .iter()
            .filter(|slot| inner.watchers.get(slot).is_some_and(|w| w.next_revision < compacted))
            .copied()
            .collect();
        for slot in gone {
            inner.compacted(slot, compacted);
        }
        inner
            .behind
            .iter()
            .filter_map(|slot| {
                let watcher = inner.watchers.get(slot)?;
                watcher.queue.has_room().then(|| Candidate {
                    slot: *slot,
                    view: watcher.view.clone(),
                    next_revision: watcher.next_revision,
                })
            })
            .take(WATCHERS_PER_WALK)
            .collect()
    }

    /// One walk over history for some watchers.
    fn serve(&self, candidates: &[Candidate]) -> Result<(), StorageError> {
        let from = candidates.iter().map(|candidate| candidate.next_revision).min().unwrap_or(0);
        let until = self.inner.lock().revision;
        let walk = self.walk(candidates, from, until)?;
        match self.store.check_readable(from) {
            Ok(()) => {}
            // Compacted meanwhile: the walk may have gaps. The next round tells whom it concerns.
            Err(MvccError::Compacted | MvccError::FutureRevision) => return Ok(()),
            Err(MvccError::Storage(error)) => return Err(error),
        }
        let mut encoder = Encoder::new(&self.store, &walk.events);
        for candidate in candidates {
            let positions: Vec<usize> = walk
                .events
                .iter()
                .enumerate()
                .filter(|(_, event)| {
                    event.revision.main >= candidate.next_revision
                        && candidate.view.range.contains(&event.key)
                })
                .map(|(at, _)| at)
                .collect();
            let events = encoder.encode(&candidate.view, &positions)?;
            let mut inner = self.inner.lock();
            let level = walk.reached >= inner.revision;
            let revision = inner.revision;
            let Some(watcher) = inner.watchers.get_mut(&candidate.slot) else { continue };
            if !events.is_empty() {
                watcher.mark_active();
                if !watcher.queue.try_push(watcher.outgoing(revision, Message::Events(events))) {
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

    fn walk(&self, candidates: &[Candidate], from: i64, until: i64) -> Result<Walk, StorageError> {
        let mut events: Vec<Event> = Vec::new();
        let mut bytes = 0;
        let mut revisions = 0;
        let mut last = 0;
        let mut reached = until;
        self.store.history(from, until, |event| {
            if event.revision.main != last {
                if revisions >= REVISIONS_PER_WALK || bytes >= BYTES_PER_WALK {
                    reached = last;
                    return false;
                }
                last = event.revision.main;
            }
            let wanted = candidates.iter().any(|candidate| {
                event.revision.main >= candidate.next_revision && candidate.view.range.contains(&event.key)
            });
            if wanted {
                bytes += event.size_bytes();
                if events.last().is_none_or(|previous| previous.revision.main != event.revision.main) {
                    revisions += 1;
                }
                events.push(event);
            }
            true
        })?;
        Ok(Walk { events, reached })
    }
}
