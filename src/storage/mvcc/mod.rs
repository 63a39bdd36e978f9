//! The multi-version store: every version of every key, by revision.
//!
//! A transaction that changes something gets the next *main* revision; each change in it gets a *sub* revision. A key's
//! life is a run of versions from a create to a tombstone; `create_revision` and `version` start anew after it:
//!
//! ```text
//! revision   2      3      4      5      6
//! key a    put----put----------delete--put
//! create     2      2             -      6
//! version    1      2             -      1
//! ```
//!
//! Reading at revision R means, for each key, its newest version with main <= R, if that is a put. Compaction at C
//! promises that nobody reads below C; versions that only such reads could see are dropped when RocksDB next rewrites
//! their file, and until then are simply not reachable.
//!
//! What holds: [`Store::revision`] is raised only after the batch with its changes is visible; a reader that first takes
//! the revision and then reads sees that revision whole. Writes come from one place, [`write::WriteRun`], on one thread;
//! reads may come from any. Nothing here knows leases' time, requests or Raft.

pub mod activity;
pub mod compaction;
pub mod counts;
pub mod hash;
mod heads;
pub mod key_range;
pub mod read;
pub mod write;

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};

use parking_lot::Mutex;
use rocksdb::DBRawIterator;

use super::engine::View;
use super::schema::{Family, MetaKey};
use super::{Engine, EngineOptions, EngineSizes, StorageError};
use activity::Activity;
use counts::LiveCounts;
use hash::CompactionHashes;
use heads::Heads;

pub use key_range::{KeyRange, KeyRanges, RangeEnd};

/// The revision of a store that was never written.
pub const FIRST_REVISION: i64 = 1;
/// The compact revision of a store that was never compacted.
pub const NEVER_COMPACTED: i64 = -1;

/// Why a read or a compaction cannot be served. etcd: `server/storage/mvcc/kv.go`.
#[derive(Debug, thiserror::Error)]
pub enum MvccError {
    /// The revision is below the compact revision.
    #[error("required revision has been compacted")]
    Compacted,
    /// The revision is above the current one.
    #[error("required revision is a future revision")]
    FutureRevision,
    /// The storage below failed.
    #[error(transparent)]
    Storage(#[from] StorageError),
}

/// The store's share of the memory budget.
#[derive(Clone, Copy, Debug)]
pub struct StoreOptions {
    /// RocksDB's share.
    pub engine: EngineOptions,
    /// Metadata cache, in bytes.
    pub heads_bytes: usize,
}

/// An open store. Shared; see the module for who writes.
pub struct Store {
    engine: Engine,
    revision: AtomicI64,
    compacted: AtomicI64,
    /// What the compaction filter may drop: trails `compacted` until its hash is taken.
    droppable: Arc<AtomicI64>,
    heads: Mutex<Heads>,
    counts: Mutex<LiveCounts>,
    compaction_hashes: Mutex<CompactionHashes>,
    size_estimate: AtomicU64,
    activity: Arc<Activity>,
    options: StoreOptions,
}

impl Store {
    /// Opens or creates the store in `dir`. Its cost does not depend on how much is stored.
    ///
    /// # Errors
    /// As [`Engine::open`]; [`StorageError::Damaged`] if the revision records do not decode.
    pub fn open(dir: &Path, options: StoreOptions) -> Result<Store, StorageError> {
        let droppable = Arc::new(AtomicI64::new(NEVER_COMPACTED));
        let engine = Engine::open(dir, options.engine, Arc::clone(&droppable))?;
        Store::on(engine, droppable, options, Arc::default())
    }

    /// Opens the store in `dir` to take this one's place: with its settings, and counting on where it counts.
    ///
    /// # Errors
    /// As [`Store::open`].
    pub fn open_successor(&self, dir: &Path) -> Result<Store, StorageError> {
        let droppable = Arc::new(AtomicI64::new(NEVER_COMPACTED));
        let engine = self.engine.open_beside(dir, self.options.engine, Arc::clone(&droppable))?;
        Store::on(engine, droppable, self.options, Arc::clone(&self.activity))
    }

    fn on(
        engine: Engine,
        droppable: Arc<AtomicI64>,
        options: StoreOptions,
        activity: Arc<Activity>,
    ) -> Result<Store, StorageError> {
        let revision = read_revision(&engine, MetaKey::Revision)?.unwrap_or(FIRST_REVISION);
        let compacted = read_revision(&engine, MetaKey::Compacted)?.unwrap_or(NEVER_COMPACTED);
        droppable.store(compacted, Ordering::Release);
        let size = engine.sizes().total_bytes;
        Ok(Store {
            engine,
            revision: AtomicI64::new(revision),
            compacted: AtomicI64::new(compacted),
            droppable,
            heads: Mutex::new(Heads::new(options.heads_bytes)),
            counts: Mutex::new(LiveCounts::unbuilt()),
            compaction_hashes: Mutex::default(),
            size_estimate: AtomicU64::new(size),
            activity,
            options,
        })
    }

    /// The current revision: all its changes are visible.
    pub fn revision(&self) -> i64 {
        self.revision.load(Ordering::Acquire)
    }

    /// The compact revision; [`NEVER_COMPACTED`] if there was none.
    pub fn compacted(&self) -> i64 {
        self.compacted.load(Ordering::Acquire)
    }

    /// The engine below, for the records that other modules keep in it.
    pub fn engine(&self) -> &Engine {
        &self.engine
    }

    /// The store as of now: a view, an iterator over all versions that were reachable then, and the compact revision.
    ///
    /// # Errors
    /// The engine's; [`StorageError::Damaged`] if the compact revision does not decode.
    pub(in crate::storage) fn view(&self) -> Result<(View<'_>, DBRawIterator<'_>, i64), StorageError> {
        loop {
            let view = self.engine.view();
            let versions = view.iterate(Family::Kv, b"", None);
            let compacted = view.get(Family::Meta, &MetaKey::Compacted.encode())?;
            let compacted = compacted.map(|bytes| decode_revision(&bytes)).transpose()?;
            let compacted = compacted.unwrap_or(NEVER_COMPACTED);
            // A compaction of after the view may have let go of versions before the iterator held them.
            if self.droppable.load(Ordering::Acquire) <= compacted {
                return Ok((view, versions, compacted));
            }
        }
    }

    /// True if the data, which a snapshot may have brought, is to be had by those only who say who they are.
    ///
    /// # Errors
    /// The engine's.
    pub fn auth_enabled(&self) -> Result<bool, StorageError> {
        Ok(self.engine.get(Family::Meta, &MetaKey::AuthEnabled.encode())?.is_some_and(|value| *value == [1]))
    }

    /// How much was read and written.
    pub fn activity(&self) -> &Activity {
        &self.activity
    }

    /// Bytes held by the metadata cache.
    pub fn heads_bytes(&self) -> u64 {
        self.heads.lock().size_bytes()
    }

    /// Current sizes. Asks the engine, which takes it some microseconds: not for every request.
    pub fn sizes(&self) -> EngineSizes {
        let sizes = self.engine.sizes();
        self.size_estimate.store(sizes.total_bytes, Ordering::Relaxed);
        sizes
    }

    /// The total size as last asked for, plus what was written since: for the quota of every request.
    pub fn size_estimate(&self) -> u64 {
        self.size_estimate.load(Ordering::Relaxed)
    }

    /// Turns a request's revision into the one to read at.
    ///
    /// # Errors
    /// [`MvccError::FutureRevision`] above the current revision, [`MvccError::Compacted`] below the compact one.
    pub fn resolve(&self, requested: i64) -> Result<i64, MvccError> {
        let (current, compacted) = self.consistent_revisions();
        if requested > current {
            return Err(MvccError::FutureRevision);
        }
        let revision = if requested <= 0 { current } else { requested };
        if revision < compacted { Err(MvccError::Compacted) } else { Ok(revision) }
    }

    /// The current and the compact revision, the latter not above the former even if a commit moves both meanwhile.
    fn consistent_revisions(&self) -> (i64, i64) {
        loop {
            let (current, compacted) = (self.revision(), self.compacted());
            if compacted <= current {
                return (current, compacted);
            }
        }
    }

    /// Checks that a revision can still be read; to be repeated after a read that took time.
    pub fn check_readable(&self, revision: i64) -> Result<(), MvccError> {
        if revision < self.compacted() { Err(MvccError::Compacted) } else { Ok(()) }
    }
}

fn read_revision(engine: &Engine, key: MetaKey) -> Result<Option<i64>, StorageError> {
    engine.get(Family::Meta, &key.encode())?.map(|bytes| decode_revision(&bytes)).transpose()
}

fn decode_revision(bytes: &[u8]) -> Result<i64, StorageError> {
    let bytes = bytes.try_into().map_err(|_| StorageError::Damaged { what: "revision" })?;
    Ok(i64::from_be_bytes(bytes))
}

#[cfg(test)]
mod tests;
