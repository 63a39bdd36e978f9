//! Which directory is the store.
//!
//! ```text
//! <root>/store                 generation 1: the one that a member begins with
//!        store-0000000002 ...  later ones, each installed from a peer
//!        generation            the pointer; without one it is generation 1
//!        staging/              files that are arriving
//!        checkpoint-<n>/       files that are being sent
//!        damaged               a word; the store is not what it should be
//! ```

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use super::{SnapshotError, Staging};

const FIRST: u64 = 1;
const POINTER: &str = "generation";
const POINTER_STAGED: &str = "generation.tmp";
const STAGING: &str = "staging";
const STORE: &str = "store";
const DAMAGED: &str = "damaged";
const CHECKPOINT_PREFIX: &str = "checkpoint-";

/// The directories of a member's stores. One per data directory.
#[derive(Debug)]
pub struct Generations {
    root: PathBuf,
    current: AtomicU64,
    installed: AtomicU64,
    next: AtomicU64,
    checkpoints: AtomicU64,
}

/// What is wrong with a store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Damage {
    /// It holds something else than what a majority of the voters agrees on.
    Differs,
    /// What was written cannot be read back.
    Unreadable,
}

impl Damage {
    fn word(self) -> &'static str {
        match self {
            Damage::Differs => "differs",
            Damage::Unreadable => "unreadable",
        }
    }
}

/// A directory that may become the store; see [`Generations::admit`].
#[derive(Debug, PartialEq, Eq)]
pub struct Generation {
    number: u64,
    /// Where its files are.
    pub dir: PathBuf,
}

impl Generations {
    /// Finds the current generation in `root`, and removes the others and everything half made, except a staging directory:
    /// its sender may come back.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidData`] if the pointer does not check; nothing is removed then.
    pub fn open(root: &Path) -> io::Result<Generations> {
        let (current, installed) = read_pointer(&root.join(POINTER))?.unwrap_or((FIRST, 0));
        let generations = Generations {
            root: root.to_owned(),
            current: AtomicU64::new(current),
            installed: AtomicU64::new(installed),
            next: AtomicU64::new(current + 1),
            checkpoints: AtomicU64::new(0),
        };
        let kept = generations.dir(current);
        for entry in fs::read_dir(root)? {
            let path = entry?.path();
            let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
            let is_store = name == STORE
                || name.strip_prefix("store-").is_some_and(|n| n.bytes().all(|byte| byte.is_ascii_digit()));
            if (is_store && path != kept) || name.starts_with(CHECKPOINT_PREFIX) {
                fs::remove_dir_all(&path)?;
            } else if name == POINTER_STAGED {
                fs::remove_file(&path)?;
            }
        }
        Ok(generations)
    }

    /// Where the current store is.
    pub fn current_dir(&self) -> PathBuf {
        self.dir(self.current.load(Ordering::Acquire))
    }

    /// The last log index in the current generation when it was installed; `None` for the one that the member began with.
    pub fn installed_index(&self) -> Option<u64> {
        (self.current.load(Ordering::Acquire) > FIRST).then(|| self.installed.load(Ordering::Acquire))
    }

    /// Where files arrive.
    pub fn staging_dir(&self) -> PathBuf {
        self.root.join(STAGING)
    }

    /// A directory for a checkpoint, not made yet.
    pub fn checkpoint_dir(&self) -> PathBuf {
        let number = self.checkpoints.fetch_add(1, Ordering::Relaxed);
        self.root.join(format!("{CHECKPOINT_PREFIX}{number}"))
    }

    /// Makes a directory of its own of files that have all arrived. It is not the store yet.
    ///
    /// # Errors
    /// [`SnapshotError::Incomplete`]; [`SnapshotError::Io`].
    pub fn admit(&self, staging: Staging) -> Result<Generation, SnapshotError> {
        // Never a number twice: whoever was turned away may still have its files open.
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let dir = self.dir(number);
        staging.finish(&dir)?;
        sync_dir(&self.root)?;
        Ok(Generation { number, dir })
    }

    /// A directory that does not exist yet, for a store that is made from something else than a peer's files.
    pub fn reserve(&self) -> Generation {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        Generation { number, dir: self.dir(number) }
    }

    /// Makes a generation the store, durably: it is the one that the next start opens. `index` is its last log index.
    ///
    /// # Errors
    /// When a file operation fails; which one is the store is then unknown until the next start.
    pub fn make_current(&self, generation: &Generation, index: u64) -> io::Result<()> {
        let staged = self.root.join(POINTER_STAGED);
        let mut file = File::create(&staged)?;
        file.write_all(format_pointer(generation.number, index).as_bytes())?;
        file.sync_all()?;
        fs::rename(&staged, self.root.join(POINTER))?;
        sync_dir(&self.root)?;
        self.installed.store(index, Ordering::Release);
        self.current.store(generation.number, Ordering::Release);
        Ok(())
    }

    /// Notes durably what is wrong with the store, so that the next start does not serve it.
    ///
    /// # Errors
    /// The file system's.
    pub fn mark_damaged(&self, damage: Damage) -> io::Result<()> {
        let mut file = File::create(self.root.join(DAMAGED))?;
        file.write_all(damage.word().as_bytes())?;
        file.sync_all()?;
        sync_dir(&self.root)
    }

    /// What was noted, if anything was.
    pub fn marked_damage(&self) -> Option<Damage> {
        match fs::read(self.root.join(DAMAGED)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Ok(word) if word == Damage::Unreadable.word().as_bytes() => Some(Damage::Unreadable),
            // Whatever it says: somebody began to write it.
            _ => Some(Damage::Differs),
        }
    }

    /// Takes the note away.
    ///
    /// # Errors
    /// The file system's.
    pub fn unmark_damaged(&self) -> io::Result<()> {
        match fs::remove_file(self.root.join(DAMAGED)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => sync_dir(&self.root),
        }
    }

    fn dir(&self, number: u64) -> PathBuf {
        if number == FIRST { self.root.join(STORE) } else { self.root.join(format!("store-{number:010}")) }
    }
}

pub(super) fn sync_dir(dir: &Path) -> io::Result<()> {
    File::open(dir)?.sync_all()
}

fn format_pointer(number: u64, index: u64) -> String {
    let body = format!("generation {number}\ninstalled-index {index}\n");
    format!("{body}crc32 {:08x}\n", crc32fast::hash(body.as_bytes()))
}

fn read_pointer(path: &Path) -> io::Result<Option<(u64, u64)>> {
    match fs::read_to_string(path) {
        Ok(text) => match parse_pointer(&text) {
            Some(pointer) => Ok(Some(pointer)),
            None => {
                let path = path.display();
                let advice =
                    format!("{path} is damaged: it must name the store's generation with its checksum");
                Err(io::Error::new(io::ErrorKind::InvalidData, advice))
            }
        },
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

fn parse_pointer(text: &str) -> Option<(u64, u64)> {
    let mut lines = text.lines();
    let mut field = |name: &str| lines.next()?.strip_prefix(name)?.parse().ok();
    let (number, index) = (field("generation ")?, field("installed-index ")?);
    (number >= FIRST && format_pointer(number, index) == text).then_some((number, index))
}
