//! Filling a new store: files are sorted and written beside the engine, by several threads, and handed over whole.
//!
//! ```text
//! caller ──chunk──> worker: sort, write a file ──┐
//!        ──chunk──> worker: sort, write a file ──┴──> taken over at once ──> merged, if there are many
//! ```
//!
//! Nothing goes through a memtable, and each byte is written once, or twice if there are more files than a store may have side
//! by side.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::{self, JoinHandle};

use parking_lot::Mutex;
use rocksdb::{Options, SstFileWriter};

use super::schema::Family;
use super::{Engine, StorageError};

/// Entries of a chunk, in bytes: what a worker sorts and writes.
pub(super) const CHUNK_BYTES: usize = 32 << 20;
/// Workers at most, each with a chunk.
const WORKERS_MAX: usize = 4;
/// Files that may lie side by side: a read looks into each.
const FILES_SIDE_BY_SIDE: usize = 8;

/// Entries of one family, in any order, no key twice.
pub(super) struct Chunk {
    family: Family,
    bytes: Vec<u8>,
    /// Where each entry begins, and how long key and value are.
    entries: Vec<(usize, usize, usize)>,
}

impl Chunk {
    /// Starts one.
    pub(super) fn new(family: Family) -> Chunk {
        Chunk { family, bytes: Vec::new(), entries: Vec::new() }
    }

    /// Adds an entry, whose key and value are what the closures append.
    pub(super) fn add(&mut self, key: impl FnOnce(&mut Vec<u8>), value: impl FnOnce(&mut Vec<u8>)) {
        let start = self.bytes.len();
        key(&mut self.bytes);
        let middle = self.bytes.len();
        value(&mut self.bytes);
        self.entries.push((start, middle - start, self.bytes.len() - middle));
    }

    /// True before the first entry.
    pub(super) fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// True once it should go to a worker.
    pub(super) fn is_full(&self) -> bool {
        self.bytes.len() >= CHUNK_BYTES
    }

    fn write(mut self, path: &Path, options: &Options) -> Result<(), StorageError> {
        let bytes = &self.bytes;
        let key = |entry: &(usize, usize, usize)| &bytes[entry.0..entry.0 + entry.1];
        self.entries.sort_unstable_by(|one, other| key(one).cmp(key(other)));
        let mut file = SstFileWriter::create(options);
        file.open(path)?;
        for entry in &self.entries {
            let value = entry.0 + entry.1;
            file.put(key(entry), &bytes[value..value + entry.2])?;
        }
        file.finish()?;
        Ok(())
    }
}

/// Files as far as they are written.
type Written = Arc<Mutex<Result<Vec<(Family, PathBuf)>, StorageError>>>;

/// Takes chunks for a store that nobody uses yet.
pub(super) struct Loader<'e> {
    engine: &'e Engine,
    chunks: Option<SyncSender<Chunk>>,
    workers: Vec<JoinHandle<()>>,
    written: Written,
}

impl<'e> Loader<'e> {
    /// Starts the workers; `dir` is where their files are until they are taken over, on the file system of the store.
    ///
    /// # Errors
    /// When there are no threads.
    pub(super) fn start(engine: &'e Engine, dir: &Path) -> Result<Loader<'e>, StorageError> {
        let (chunks, queue) = sync_channel(1);
        let queue = Arc::new(Mutex::new(queue));
        let written: Written = Arc::new(Mutex::new(Ok(Vec::new())));
        let count = thread::available_parallelism().map_or(1, usize::from).min(WORKERS_MAX);
        let mut workers = Vec::new();
        for worker in 0..count {
            let (queue, written, dir) = (Arc::clone(&queue), Arc::clone(&written), dir.to_owned());
            let options = Family::ALL.map(|family| (family, engine.file_options(family)));
            let work = move || work(&queue, &written, &dir.join(format!("load-{worker}")), &options);
            workers.push(thread::Builder::new().name("skeg-load".to_owned()).spawn(work)?);
        }
        Ok(Loader { engine, chunks: Some(chunks), workers, written })
    }

    /// Gives a chunk to a worker; waits for one to be free.
    ///
    /// # Errors
    /// What a worker failed of.
    pub(super) fn add(&mut self, chunk: Chunk) -> Result<(), StorageError> {
        let sent = self.chunks.as_ref().is_some_and(|chunks| chunks.send(chunk).is_ok());
        if sent { Ok(()) } else { self.join().map(drop) }
    }

    /// Waits for the workers, and has the store take their files over, durably.
    ///
    /// # Errors
    /// What a worker failed of, or the engine.
    pub(super) fn finish(mut self) -> Result<(), StorageError> {
        let written = self.join()?;
        for family in Family::ALL {
            let files: Vec<&PathBuf> =
                written.iter().filter(|(of, _)| *of == family).map(|(_, path)| path).collect();
            if !files.is_empty() {
                self.engine.take_over(family, &files)?;
            }
            if files.len() > FILES_SIDE_BY_SIDE {
                self.engine.merge(family);
            }
        }
        Ok(())
    }

    fn join(&mut self) -> Result<Vec<(Family, PathBuf)>, StorageError> {
        self.chunks = None;
        let mut panicked = false;
        for worker in self.workers.drain(..) {
            panicked |= worker.join().is_err();
        }
        if panicked {
            return Err(std::io::Error::other("a thread that writes files has panicked").into());
        }
        std::mem::replace(&mut *self.written.lock(), Ok(Vec::new()))
    }
}

impl Drop for Loader<'_> {
    fn drop(&mut self) {
        let _ = self.join();
    }
}

/// Writes chunks until there are no more, or one fails.
fn work(
    queue: &Mutex<Receiver<Chunk>>,
    written: &Mutex<Result<Vec<(Family, PathBuf)>, StorageError>>,
    path: &Path,
    options: &[(Family, Options)],
) {
    for number in 0_u64.. {
        let next = queue.lock().recv();
        let Ok(chunk) = next else { return };
        let family = chunk.family;
        let path = path.with_extension(format!("{number}.sst"));
        let options = options.iter().find(|(of, _)| *of == family).map(|(_, options)| options);
        let result = options.map_or(Ok(()), |options| chunk.write(&path, options));
        let mut written = written.lock();
        match (&mut *written, result) {
            (Ok(files), Ok(())) => files.push((family, path)),
            (Ok(_), Err(error)) => *written = Err(error),
            (Err(_), _) => {}
        }
        if written.is_err() {
            return;
        }
    }
}
