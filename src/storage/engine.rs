//! RocksDB as skeg uses it: four families, no write-ahead log, atomic flushes, a memory budget.
//!
//! The Raft log is the only durable log. A batch is visible as soon as [`Engine::write`] returns and survives a crash
//! once [`Engine::flush`] has returned after it; since all families are flushed together, what a crash leaves is
//! always the state after some whole batch, and the batch itself says after which log entry.

use std::ffi::{CStr, CString};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering};

use rocksdb::checkpoint::Checkpoint;
use rocksdb::compaction_filter::{CompactionFilter, Decision};
use rocksdb::compaction_filter_factory::{CompactionFilterContext, CompactionFilterFactory};
use rocksdb::{
    BlockBasedOptions, BottommostLevelCompaction, Cache, ColumnFamily, ColumnFamilyDescriptor,
    CompactOptions, DB, DBCompressionType, DBPinnableSlice, DBRawIterator, Env, ErrorKind, FlushOptions,
    IngestExternalFileOptions, Options, ReadOptions, SliceTransform, WriteBatch,
};
use tracing::{info, warn};

use super::schema::{self, Family, MetaKey};

/// The format of a new store; raised when stored bytes change their meaning.
const FORMAT_FIRST: u32 = 1;
/// The format of a store that holds the cluster's level, which says what else may be in it. A build from before levels
/// refuses it.
pub const FORMAT_LEVELLED: u32 = 2;

/// Values from this size on live in blob files, out of the way of compactions and key scans.
const BLOB_MIN_BYTES: u64 = 1024;

/// The compact revision of which a filter drops nothing.
const NOTHING_COMPACTED: i64 = -1;

/// What goes wrong in storage. None of these is a client's fault: the member stops.
#[derive(Debug, thiserror::Error)]
pub enum StorageError {
    /// RocksDB refused or failed.
    #[error("storage engine: {0}")]
    Engine(#[from] rocksdb::Error),
    /// Stored bytes do not decode.
    #[error("stored {what} is damaged: restore this member from a snapshot or from its peers")]
    Damaged {
        /// Which record.
        what: &'static str,
    },
    /// The directory was written by another version.
    #[error(
        "data directory has format {found}, this build reads formats up to {expected}: use the version that wrote it"
    )]
    Format {
        /// Format in the directory.
        found: u32,
        /// Highest format of this build.
        expected: u32,
    },
    /// The cluster has agreed on something that this build does not know.
    #[error("the cluster is at level {found}, this build knows levels up to {known}: use a newer build")]
    Level {
        /// Level of the cluster.
        found: u32,
        /// Highest level of this build.
        known: u32,
    },
    /// A file operation failed.
    #[error("storage files: {0}")]
    Io(#[from] std::io::Error),
}

impl StorageError {
    /// True if what was written can no longer be read as it was.
    pub fn is_damage(&self) -> bool {
        match self {
            // A disk that has lost a sector says that it cannot read.
            StorageError::Engine(error) => matches!(error.kind(), ErrorKind::Corruption | ErrorKind::IOError),
            StorageError::Damaged { .. } => true,
            StorageError::Format { .. } | StorageError::Level { .. } | StorageError::Io(_) => false,
        }
    }
}

/// The engine's share of the memory budget.
#[derive(Clone, Copy, Debug)]
pub struct EngineOptions {
    /// All memtables together, in bytes.
    pub memtable_bytes: usize,
    /// Block cache, with filters and indexes, in bytes.
    pub block_cache_bytes: usize,
}

/// Sizes for Status and metrics, in bytes unless said.
#[derive(Clone, Copy, Debug, Default)]
pub struct EngineSizes {
    /// Files and unflushed memtables.
    pub total_bytes: u64,
    /// What a full compaction would leave, estimated.
    pub live_bytes: u64,
    /// Versions stored in `kv`, estimated.
    pub versions: u64,
    /// Unflushed memtable bytes.
    pub memtable_bytes: u64,
}

/// A write that becomes visible as one.
pub struct Batch<'e> {
    engine: &'e Engine,
    inner: WriteBatch,
    /// CRC-32C of what was written since it was last taken; notes do not count.
    digest: u32,
}

/// What a digest says was done with a key.
#[derive(Clone, Copy)]
enum Act {
    Put = 1,
    Delete = 2,
    DeleteRange = 3,
}

impl Batch<'_> {
    /// Sets a key.
    pub fn put(&mut self, family: Family, key: &[u8], value: &[u8]) {
        self.add_to_digest(Act::Put, family, key, value);
        self.inner.put_cf(self.engine.family(family), key, value);
    }

    /// Sets a record of the family `meta` that says where the store stands: how often and with which value it is written
    /// depends on how entries were put together into batches, so it is left out of the digest.
    pub fn note(&mut self, key: MetaKey, value: &[u8]) {
        self.inner.put_cf(self.engine.family(Family::Meta), key.encode(), value);
    }

    /// Removes a key.
    pub fn delete(&mut self, family: Family, key: &[u8]) {
        self.add_to_digest(Act::Delete, family, key, b"");
        self.inner.delete_cf(self.engine.family(family), key);
    }

    /// Removes the keys in `[from, to)`.
    pub fn delete_range(&mut self, family: Family, from: &[u8], to: &[u8]) {
        self.add_to_digest(Act::DeleteRange, family, from, to);
        self.inner.delete_range_cf(self.engine.family(family), from, to);
    }

    /// CRC-32C of all that was put and removed since this was last called, in order: a matter of nanoseconds.
    pub fn take_digest(&mut self) -> u32 {
        std::mem::take(&mut self.digest)
    }

    fn add_to_digest(&mut self, act: Act, family: Family, key: &[u8], value: &[u8]) {
        // Lengths in front, so that no byte can move from a key to its value unseen.
        let mut head = [0; 10];
        head[0] = act as u8;
        head[1] = family as u8;
        let length = |bytes: &[u8]| u32::try_from(bytes.len()).unwrap_or(u32::MAX).to_be_bytes();
        head[2..6].copy_from_slice(&length(key));
        head[6..].copy_from_slice(&length(value));
        for part in [&head, key, value] {
            self.digest = crc32c::crc32c_append(self.digest, part);
        }
    }

    /// Encoded size of the batch.
    pub fn size_bytes(&self) -> u64 {
        self.inner.size_in_bytes() as u64
    }

    /// True if nothing would be written.
    pub fn is_empty(&self) -> bool {
        self.inner.is_empty()
    }
}

/// One open store. Shared by the core thread and blocking threads.
pub struct Engine {
    db: DB,
    block_cache: Cache,
    dropped: Arc<AtomicU64>,
    /// After `db`, for fields are dropped in order: the files go when nothing has them open any more.
    files: Files,
}

/// The engine's directory, removed with the engine if that was asked for.
struct Files {
    dir: PathBuf,
    discarded: AtomicBool,
}

impl Drop for Files {
    fn drop(&mut self) {
        if self.discarded.load(Ordering::Acquire)
            && let Err(error) = std::fs::remove_dir_all(&self.dir)
        {
            warn!(dir = %self.dir.display(), %error, "a replaced store is not removed before the next start");
        }
    }
}

impl Engine {
    /// Opens or creates the store in `dir`.
    ///
    /// `compacted` is shared with the compaction filter: versions that no read at or above it can see are dropped.
    ///
    /// # Errors
    /// [`StorageError::Format`] for a directory of another version; [`StorageError::Engine`] when RocksDB cannot open it.
    pub fn open(
        dir: &Path,
        options: EngineOptions,
        compacted: Arc<AtomicI64>,
    ) -> Result<Engine, StorageError> {
        let block_cache = Cache::new_lru_cache(options.block_cache_bytes);
        Engine::open_with(dir, options, compacted, block_cache, Arc::default())
    }

    /// Opens the store in `dir` beside this one, whose cache and counters it shares.
    ///
    /// # Errors
    /// As [`Engine::open`].
    pub fn open_beside(
        &self,
        dir: &Path,
        options: EngineOptions,
        compacted: Arc<AtomicI64>,
    ) -> Result<Engine, StorageError> {
        let (block_cache, dropped) = (self.block_cache.clone(), Arc::clone(&self.dropped));
        Engine::open_with(dir, options, compacted, block_cache, dropped)
    }

    fn open_with(
        dir: &Path,
        options: EngineOptions,
        compacted: Arc<AtomicI64>,
        block_cache: Cache,
        dropped: Arc<AtomicU64>,
    ) -> Result<Engine, StorageError> {
        let filters =
            DropUnreachable { compacted, dropped: Arc::clone(&dropped), name: c"drop-unreachable".into() };
        let families = Family::ALL.map(|family| {
            ColumnFamilyDescriptor::new(
                family.name(),
                family_options(family, options, &block_cache, &filters),
            )
        });
        let db = DB::open_cf_descriptors(&database_options(options)?, dir, families)?;
        let files = Files { dir: dir.to_owned(), discarded: AtomicBool::new(false) };
        let engine = Engine { db, block_cache, dropped, files };
        engine.check_format()?;
        Ok(engine)
    }

    fn check_format(&self) -> Result<(), StorageError> {
        match self.get(Family::Meta, &MetaKey::Format.encode())? {
            None => {
                let mut batch = self.batch();
                batch.put(Family::Meta, &MetaKey::Format.encode(), &FORMAT_FIRST.to_be_bytes());
                self.write(batch)
            }
            Some(found) => {
                let found = found
                    .as_ref()
                    .try_into()
                    .map_err(|_| StorageError::Damaged { what: "format version" })?;
                let found = u32::from_be_bytes(found);
                let known = FORMAT_FIRST..=FORMAT_LEVELLED;
                if known.contains(&found) {
                    Ok(())
                } else {
                    Err(StorageError::Format { found, expected: FORMAT_LEVELLED })
                }
            }
        }
    }

    fn family(&self, family: Family) -> &ColumnFamily {
        self.db.cf_handle(family.name()).expect("every family is opened with the store")
    }

    /// Starts a batch.
    pub fn batch(&self) -> Batch<'_> {
        Batch { engine: self, inner: WriteBatch::default(), digest: 0 }
    }

    /// Makes a batch visible; it survives a crash of the process only after the next [`Engine::flush`].
    pub fn write(&self, batch: Batch<'_>) -> Result<(), StorageError> {
        Ok(self.db.write_without_wal(batch.inner)?)
    }

    /// Reads one key.
    pub fn get(&self, family: Family, key: &[u8]) -> Result<Option<DBPinnableSlice<'_>>, StorageError> {
        Ok(self.db.get_pinned_cf(self.family(family), key)?)
    }

    /// Iterates a family between two encoded bounds, `to` excluded and absent for the family's end.
    pub fn iterate(&self, family: Family, from: &[u8], to: Option<Vec<u8>>) -> DBRawIterator<'_> {
        self.iterate_with(ReadOptions::default(), family, from, to)
    }

    /// As [`Engine::iterate`], leaving the block cache to others: for reads of most of a family.
    pub fn iterate_past_cache(&self, family: Family, from: &[u8], to: Option<Vec<u8>>) -> DBRawIterator<'_> {
        let mut options = ReadOptions::default();
        options.fill_cache(false);
        self.iterate_with(options, family, from, to)
    }

    fn iterate_with(
        &self,
        mut options: ReadOptions,
        family: Family,
        from: &[u8],
        to: Option<Vec<u8>>,
    ) -> DBRawIterator<'_> {
        options.set_total_order_seek(true);
        options.set_auto_readahead_size(true);
        if let Some(to) = to {
            options.set_iterate_upper_bound(to);
        }
        let mut iterator = self.db.raw_iterator_cf_opt(self.family(family), options);
        iterator.seek(from);
        iterator
    }

    /// What the store holds now, for as long as the view lives.
    pub fn view(&self) -> View<'_> {
        View { engine: self, snapshot: self.db.snapshot() }
    }

    /// Looks for versions of single keys, newest first, helped by the prefix filter: valid after a seek as long as there are
    /// more of that key. It shows the store as it is now.
    pub fn versions(&self) -> DBRawIterator<'_> {
        let mut options = ReadOptions::default();
        options.set_prefix_same_as_start(true);
        self.db.raw_iterator_cf_opt(self.family(Family::Kv), options)
    }

    /// Writes all memtables to files and waits; everything written before survives a crash when this returns.
    pub fn flush(&self) -> Result<(), StorageError> {
        let mut options = FlushOptions::default();
        options.set_wait(true);
        let families = Family::ALL.map(|family| self.family(family));
        Ok(self.db.flush_cfs_opt(&families, &options)?)
    }

    /// Makes `dir`, with hard links to files that hold everything written so far and are never changed again.
    ///
    /// # Errors
    /// [`StorageError::Engine`], also if `dir` exists or is on another file system.
    pub fn link_files(&self, dir: &Path) -> Result<(), StorageError> {
        self.flush()?;
        Ok(Checkpoint::new(&self.db)?.create_checkpoint(dir)?)
    }

    /// How a file is written that is to be [taken over](Engine::take_over).
    pub(super) fn file_options(&self, family: Family) -> Options {
        let options = EngineOptions { memtable_bytes: 0, block_cache_bytes: 0 };
        let compacted = Arc::new(AtomicI64::new(NOTHING_COMPACTED));
        let filters = DropUnreachable {
            compacted,
            dropped: Arc::clone(&self.dropped),
            name: c"drop-unreachable".into(),
        };
        family_options(family, options, &self.block_cache, &filters)
    }

    /// Makes files of sorted entries part of a family, durably; they are moved. None of their keys may be there already.
    ///
    /// # Errors
    /// [`StorageError::Engine`].
    pub(super) fn take_over(&self, family: Family, files: &[&PathBuf]) -> Result<(), StorageError> {
        let mut options = IngestExternalFileOptions::default();
        options.set_move_files(true);
        Ok(self.db.ingest_external_file_cf_opts(self.family(family), &options, files.to_vec())?)
    }

    /// Merges the files of a family.
    pub(super) fn merge(&self, family: Family) {
        self.db.compact_range_cf(self.family(family), None::<&[u8]>, None::<&[u8]>);
    }

    /// Has the files removed when the engine is dropped.
    pub fn discard(&self) {
        self.files.discarded.store(true, Ordering::Release);
    }

    /// Rewrites all files without what no read can see any more. Reads and writes go on meanwhile.
    pub fn compact(&self) {
        let mut options = CompactOptions::default();
        options.set_bottommost_level_compaction(BottommostLevelCompaction::ForceOptimized);
        options.set_exclusive_manual_compaction(false);
        for family in Family::ALL {
            self.db.compact_range_cf_opt(self.family(family), None::<&[u8]>, None::<&[u8]>, &options);
        }
    }

    /// Current sizes; cheap enough for every request.
    pub fn sizes(&self) -> EngineSizes {
        let sum = |property: &CStr| -> u64 {
            Family::ALL
                .iter()
                .filter_map(|family| {
                    self.db.property_int_value_cf(self.family(*family), property).ok().flatten()
                })
                .sum()
        };
        let memtable_bytes = sum(c"rocksdb.cur-size-all-mem-tables");
        let files = sum(c"rocksdb.total-sst-files-size") + sum(c"rocksdb.total-blob-file-size");
        let live = sum(c"rocksdb.estimate-live-data-size");
        EngineSizes {
            total_bytes: files + memtable_bytes,
            live_bytes: (live + memtable_bytes).min(files + memtable_bytes),
            versions: self
                .db
                .property_int_value_cf(self.family(Family::Kv), c"rocksdb.estimate-num-keys")
                .ok()
                .flatten()
                .unwrap_or(0),
            memtable_bytes,
        }
    }

    /// Bytes held by the block cache.
    pub fn block_cache_bytes(&self) -> usize {
        self.block_cache.get_usage()
    }

    /// Versions that the compaction filter has dropped since the store was opened.
    pub fn dropped_versions(&self) -> u64 {
        self.dropped.load(Ordering::Relaxed)
    }

    /// Stops background work; called once before the store is dropped.
    pub fn stop(&self) {
        self.db.cancel_all_background_work(true);
    }
}

/// The store as of one moment. Compaction filters do not know of it: see [`View::iterate`].
pub struct View<'e> {
    engine: &'e Engine,
    snapshot: rocksdb::Snapshot<'e>,
}

impl<'e> View<'e> {
    /// Iterates a family from an encoded key on, past the block cache. What a compaction filter drops is missing if the
    /// iterator was made after that; an iterator once made keeps what it sees.
    pub fn iterate(&self, family: Family, from: &[u8], to: Option<Vec<u8>>) -> DBRawIterator<'e> {
        let mut options = ReadOptions::default();
        options.set_snapshot(&self.snapshot);
        options.fill_cache(false);
        self.engine.iterate_with(options, family, from, to)
    }

    /// Reads one key.
    pub fn get(&self, family: Family, key: &[u8]) -> Result<Option<Vec<u8>>, StorageError> {
        Ok(self.snapshot.get_cf(self.engine.family(family), key)?)
    }
}

fn database_options(options: EngineOptions) -> Result<Options, StorageError> {
    let mut out = Options::default();
    out.create_if_missing(true);
    out.create_missing_column_families(true);
    out.set_atomic_flush(true);
    out.set_max_background_jobs(2);
    out.set_max_open_files(512);
    out.set_keep_log_file_num(2);
    out.set_max_log_file_size(4 << 20);
    out.set_bytes_per_sync(1 << 20);
    out.set_skip_stats_update_on_db_open(true);
    out.set_stats_dump_period_sec(0);
    out.set_stats_persist_period_sec(0);
    out.set_db_write_buffer_size(options.memtable_bytes);
    let mut env = Env::new()?;
    env.lower_thread_pool_cpu_priority();
    env.lower_high_priority_thread_pool_cpu_priority();
    out.set_env(&env);
    Ok(out)
}

fn family_options(
    family: Family,
    options: EngineOptions,
    cache: &Cache,
    filters: &DropUnreachable,
) -> Options {
    let mut table = BlockBasedOptions::default();
    table.set_block_cache(cache);
    table.set_block_size(8 << 10);
    table.set_format_version(6);
    table.set_cache_index_and_filter_blocks(true);
    table.set_cache_index_and_filter_blocks_with_high_priority(true);
    table.set_pin_l0_filter_and_index_blocks_in_cache(true);

    let mut out = Options::default();
    out.set_compression_type(DBCompressionType::Lz4);
    out.set_write_buffer_size(options.memtable_bytes / 4);
    out.set_max_write_buffer_number(4);
    out.set_level_compaction_dynamic_level_bytes(true);
    out.set_target_file_size_base(32 << 20);
    out.set_max_bytes_for_level_base(128 << 20);
    // Flushes are small, for the log's sake, so it takes more of them to be worth a compaction; each also rewrites what it
    // overlaps, up to all of the level below.
    out.set_level_zero_file_num_compaction_trigger(16);
    out.set_level_zero_slowdown_writes_trigger(32);
    out.set_level_zero_stop_writes_trigger(48);
    // In the background they would run in an order of their own.
    #[cfg(feature = "sim")]
    out.set_disable_auto_compactions(true);
    if family == Family::Kv {
        table.set_bloom_filter(10.0, false);
        table.set_whole_key_filtering(false);
        out.set_prefix_extractor(SliceTransform::create("kv-user-key", kv_prefix, Some(is_kv_key)));
        out.set_memtable_prefix_bloom_ratio(0.05);
        out.set_enable_blob_files(true);
        out.set_min_blob_size(BLOB_MIN_BYTES);
        out.set_blob_compression_type(DBCompressionType::Lz4);
        out.set_enable_blob_gc(true);
        out.set_blob_gc_age_cutoff(0.25);
        out.set_compaction_filter_factory(filters.clone());
    }
    out.set_block_based_table_factory(&table);
    out
}

fn kv_prefix(key: &[u8]) -> &[u8] {
    &key[..schema::kv_prefix_len(key)]
}

fn is_kv_key(key: &[u8]) -> bool {
    key.len() > schema::REVISION_BYTES
}

/// Reads some records of family `meta` from files that nobody has open, changing none of them.
///
/// # Errors
/// [`StorageError::Engine`] when the files are not a store.
pub(super) fn read_meta<const N: usize>(
    dir: &Path,
    keys: [MetaKey; N],
) -> Result<[Option<Vec<u8>>; N], StorageError> {
    let mut options = Options::default();
    options.set_max_open_files(16);
    options.set_keep_log_file_num(1);
    options.set_skip_stats_update_on_db_open(true);
    let families = [rocksdb::DEFAULT_COLUMN_FAMILY_NAME, Family::Meta.name()];
    let db = DB::open_cf_for_read_only(&options, dir, families, false)?;
    let family = db.cf_handle(Family::Meta.name()).expect("it was opened by this name");
    let mut found = [const { None }; N];
    for (value, key) in found.iter_mut().zip(keys) {
        *value = db.get_cf(family, key.encode())?;
    }
    Ok(found)
}

/// Makes a filter for each compaction of `kv`.
#[derive(Clone)]
struct DropUnreachable {
    compacted: Arc<AtomicI64>,
    dropped: Arc<AtomicU64>,
    name: CString,
}

impl CompactionFilterFactory for DropUnreachable {
    type Filter = UnreachableFilter;

    fn create(&mut self, context: CompactionFilterContext) -> UnreachableFilter {
        UnreachableFilter {
            compacted: self.compacted.load(Ordering::Acquire),
            whole_store: context.is_full_compaction,
            prefix: Vec::new(),
            newest_seen: false,
            dropped: 0,
            total_dropped: Arc::clone(&self.dropped),
            name: self.name.clone(),
        }
    }

    fn name(&self) -> &CStr {
        &self.name
    }
}

/// Drops versions of `kv` that are at or below the compact revision and hidden by a newer such version.
///
/// A tombstone hides what is below it, so it goes only when the compaction holds every file: nothing older can then
/// come back from a deeper level. One at the compact revision itself stays: etcd keeps it for watchers that start there.
struct UnreachableFilter {
    compacted: i64,
    whole_store: bool,
    prefix: Vec<u8>,
    newest_seen: bool,
    dropped: u64,
    total_dropped: Arc<AtomicU64>,
    name: CString,
}

impl CompactionFilter for UnreachableFilter {
    fn filter(&mut self, _level: u32, key: &[u8], value: &[u8]) -> Decision {
        let Some(revision) = schema::kv_revision(key) else { return Decision::Keep };
        let prefix = kv_prefix(key);
        if self.prefix != prefix {
            self.prefix.clear();
            self.prefix.extend_from_slice(prefix);
            self.newest_seen = false;
        }
        if revision.main > self.compacted {
            return Decision::Keep;
        }
        if self.newest_seen {
            self.dropped += 1;
            return Decision::Remove;
        }
        self.newest_seen = true;
        if schema::is_tombstone(value) && self.whole_store && revision.main < self.compacted {
            self.dropped += 1;
            return Decision::Remove;
        }
        Decision::Keep
    }

    fn name(&self) -> &CStr {
        &self.name
    }
}

impl Drop for UnreachableFilter {
    fn drop(&mut self) {
        self.total_dropped.fetch_add(self.dropped, Ordering::Relaxed);
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        if self.files.discarded.load(Ordering::Acquire) {
            self.stop();
            return;
        }
        match self.flush() {
            Ok(()) => info!("storage flushed"),
            Err(error) => warn!(%error, "storage not flushed; the log has the rest"),
        }
    }
}
