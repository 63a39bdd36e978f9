//! Reading back all that a store's files hold, to see that it can still be read.
//!
//! The files are linked to a directory, so that none is removed before it was read, and opened there a second time: past the block
//! cache and, where the file system lets it, past the page cache, so that it is the disk that is read. Every block and every
//! large value is checked by the checksum that it was written with. What the store reads by itself is checked in the same
//! way; what nobody reads for a year is not.

use std::path::{Path, PathBuf};

use rocksdb::{BlockBasedOptions, Cache, ColumnFamilyDescriptor, DB, DBRawIterator, Options, ReadOptions};

use super::schema::Family;
use super::snapshot::Checkpoint;
use super::{Engine, StorageError};

/// Memory for blocks; each is read once.
const CACHE_BYTES: usize = 1 << 20;
/// Read at a time.
const READAHEAD_BYTES: usize = 1 << 20;

/// A reading under way.
pub struct Scrub {
    db: DB,
    /// Where the next piece begins; `None` at the end.
    next: Option<(usize, Vec<u8>)>,
    /// After `db`, for fields are dropped in order: its directory goes last.
    _files: Checkpoint,
}

impl Scrub {
    /// Begins to read what a store's files hold now, by way of `dir`, which must not exist. Takes as long as a flush.
    ///
    /// # Errors
    /// The storage's; see [`StorageError::is_damage`].
    pub fn begin(engine: &Engine, dir: PathBuf) -> Result<Scrub, StorageError> {
        let files = Checkpoint::make(engine, dir.clone())?;
        // Not on every file system.
        let db = open(&dir, true).or_else(|_| open(&dir, false))?;
        Ok(Scrub { db, next: Some((0, Vec::new())), _files: files })
    }

    /// Reads keys and values of about `bytes`; gives how many there were, `None` once all have been read.
    ///
    /// # Errors
    /// What stood in the way; [`StorageError::is_damage`] says whether it is what was looked for.
    pub fn read_some(&mut self, bytes: u64) -> Result<Option<u64>, StorageError> {
        let Some((family, from)) = self.next.take() else { return Ok(None) };
        let mut iterator = iterate(&self.db, Family::ALL[family], &from);
        let mut read = 0;
        while let Some((key, value)) = iterator.item() {
            if read >= bytes {
                self.next = Some((family, key.to_vec()));
                return Ok(Some(read));
            }
            read += (key.len() + value.len()) as u64;
            iterator.next();
        }
        iterator.status()?;
        self.next = (family + 1 < Family::ALL.len()).then(|| (family + 1, Vec::new()));
        Ok(Some(read))
    }
}

fn iterate<'d>(db: &'d DB, family: Family, from: &[u8]) -> DBRawIterator<'d> {
    let mut options = ReadOptions::default();
    options.set_total_order_seek(true);
    options.set_verify_checksums(true);
    options.fill_cache(false);
    options.set_readahead_size(READAHEAD_BYTES);
    let family = db.cf_handle(family.name()).expect("every family was opened");
    let mut iterator = db.raw_iterator_cf_opt(family, options);
    iterator.seek(from);
    iterator
}

fn open(dir: &Path, past_page_cache: bool) -> Result<DB, rocksdb::Error> {
    let mut options = Options::default();
    options.set_max_open_files(64);
    options.set_keep_log_file_num(1);
    options.set_skip_stats_update_on_db_open(true);
    options.set_use_direct_reads(past_page_cache);
    let cache = Cache::new_lru_cache(CACHE_BYTES);
    let names = Family::ALL.map(|family| family.name());
    let families = names.into_iter().chain([rocksdb::DEFAULT_COLUMN_FAMILY_NAME]).map(|name| {
        let mut table = BlockBasedOptions::default();
        table.set_block_cache(&cache);
        let mut options = Options::default();
        options.set_block_based_table_factory(&table);
        ColumnFamilyDescriptor::new(name, options)
    });
    DB::open_cf_descriptors_read_only(&options, dir, families, false)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::FileExt;
    use std::sync::Arc;

    use super::*;
    use crate::storage::EngineOptions;

    fn engine(dir: &Path) -> Engine {
        let options = EngineOptions { memtable_bytes: 4 << 20, block_cache_bytes: 4 << 20 };
        Engine::open(dir, options, Arc::default()).expect("it opens")
    }

    fn put(engine: &Engine, family: Family, keys: std::ops::Range<u32>, value_bytes: usize) {
        let mut random = fastrand::Rng::with_seed(7);
        let mut batch = engine.batch();
        for key in keys {
            let value: Vec<u8> = std::iter::repeat_with(|| random.u8(..)).take(value_bytes).collect();
            batch.put(family, &[b"key\0\0\0".as_slice(), &key.to_be_bytes(), &[0; 17]].concat(), &value);
        }
        engine.write(batch).expect("it is written");
    }

    /// Reads all in small pieces; gives how much there was.
    fn read_all(engine: &Engine, root: &Path) -> Result<u64, StorageError> {
        let mut scrub = Scrub::begin(engine, root.join(format!("checkpoint-{}", fastrand::u64(..))))?;
        let mut total = 0;
        while let Some(read) = scrub.read_some(10_000)? {
            assert!(read < 20_000, "a piece of {read}");
            total += read;
        }
        assert_eq!(scrub.read_some(1)?, None);
        Ok(total)
    }

    #[test]
    fn everything_is_read_and_nothing_is_left_behind() {
        let root = tempfile::tempdir().expect("a directory");
        let engine = engine(&root.path().join("store"));
        put(&engine, Family::Kv, 0..1000, 100);
        put(&engine, Family::Kv, 1000..1020, 5000);
        put(&engine, Family::Lease, 0..10, 10);
        let total = read_all(&engine, root.path()).expect("all can be read");
        assert!(total > 1000 * 100 + 20 * 5000 + 10 * 10, "{total}");
        assert_eq!(fs::read_dir(root.path()).expect("it lists").count(), 1, "the store alone");
    }

    /// Flips a bit in the middle of the largest file of a kind.
    fn flip(dir: &Path, extension: &str) {
        let files = fs::read_dir(dir).expect("it lists").map(|entry| entry.expect("it lists").path());
        let files = files.filter(|path| path.extension().is_some_and(|found| found == extension));
        let largest = files.max_by_key(|path| path.metadata().expect("it has a size").len());
        let path = largest.expect("there is one");
        let file = fs::OpenOptions::new().read(true).write(true).open(&path).expect("it opens");
        let middle = path.metadata().expect("it has a size").len() / 2;
        let mut byte = [0];
        file.read_exact_at(&mut byte, middle).expect("it reads");
        file.write_all_at(&[byte[0] ^ 1], middle).expect("it writes");
    }

    #[test]
    fn a_flipped_bit_is_found_in_small_values_and_in_large_ones() {
        for (value_bytes, extension) in [(100, "sst"), (5000, "blob")] {
            let root = tempfile::tempdir().expect("a directory");
            let engine = engine(&root.path().join("store"));
            put(&engine, Family::Kv, 0..1000, value_bytes);
            engine.flush().expect("it flushes");
            read_all(&engine, root.path()).expect("all can be read");
            flip(&root.path().join("store"), extension);
            let found = read_all(&engine, root.path()).expect_err("it is found");
            assert!(found.is_damage(), "{found}");
            assert_eq!(fs::read_dir(root.path()).expect("it lists").count(), 1, "the store alone");
        }
    }
}
