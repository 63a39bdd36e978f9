//! Physical compaction: giving back the space of versions that nobody can read.
//!
//! A compaction is in force as soon as its entry is applied. Its second half runs on a blocking thread: take the hash
//! over what it makes unreachable, put the compaction on disk, then let the compaction filter drop that. In this order,
//! for a crash takes the store back to its last flush: if files had lost versions before the compaction was in them, the
//! log would replay it over their remains, and its hash would be another.

use std::sync::atomic::Ordering;

use super::{MvccError, Store};
use crate::storage::StorageError;

/// Share of unreachable versions from which a rewrite pays: one in this many live keys.
const GARBAGE_FRACTION: u64 = 2;
/// Fewer stored versions than this are not worth a rewrite.
const MIN_VERSIONS: u64 = 10_000;

impl Store {
    /// Checks a requested compaction against a compact and a current revision.
    ///
    /// # Errors
    /// [`MvccError::Compacted`] at or below the compact revision, [`MvccError::FutureRevision`] above the current one.
    pub fn check_compaction(requested: i64, compacted: i64, current: i64) -> Result<(), MvccError> {
        if requested <= compacted {
            return Err(MvccError::Compacted);
        }
        if requested > current {
            return Err(MvccError::FutureRevision);
        }
        Ok(())
    }

    /// True if the second half of a compaction is done, here or on the member that the files are from.
    pub fn is_compaction_finished(&self, compacted: i64) -> bool {
        self.droppable.load(Ordering::Acquire) >= compacted
    }

    /// Does the second half of a compaction from `previous` to `compacted`; scans all keys and flushes.
    pub fn finish_compaction(&self, previous: i64, compacted: i64) -> Result<(), StorageError> {
        self.keep_compaction_hash(previous, compacted)?;
        self.engine.flush()?;
        self.droppable.store(compacted, Ordering::Release);
        Ok(())
    }

    /// True if so much of the store is unreachable that rewriting it is worth the I/O.
    pub fn wants_rewrite(&self) -> bool {
        let versions = self.sizes().versions;
        let live = self.live_keys().map_or(versions, i64::cast_unsigned);
        versions > MIN_VERSIONS && versions.saturating_sub(live) > versions / GARBAGE_FRACTION
    }

    /// Rewrites all files without unreachable versions; blocks the calling thread, not the store.
    pub fn rewrite(&self) -> Result<(), StorageError> {
        self.engine.flush()?;
        self.engine.compact();
        Ok(())
    }
}
