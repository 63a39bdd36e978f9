//! Which processes a member has been, and which one each of its peers was last: what tells a directory from an old copy
//! of it.
//!
//! A *life* is one start of a member: its number, and a number drawn by chance. It is on disk before the member says or
//! does anything. So of two processes that go on from copies of one directory each has a life that the other lacks:
//!
//! ```text
//! directory   1:a5  2:f0  3:7c ──┬── 4:e1  5:09      a peer that has met 4:e1 takes 5:09 for the member
//!                                └── 4:b3            and 4:b3 for an old copy, now and after any restart of it
//! ```
//!
//! What the peers were is on disk before a new life of theirs counts for anything: a restart here forgets no one.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use parking_lot::Mutex;

/// Lives that are kept: a peer that met this member so many starts ago still tells it from an old copy.
const KEPT_MAX: usize = 32;
/// This member's lives.
const LIVES: &str = "lives";
/// The peers' last known lives.
const PEERS: &str = "peers";

/// Why lives cannot be read or written.
#[derive(Debug, thiserror::Error)]
pub enum LivesError {
    /// A file does not check.
    #[error("{path} is damaged: restore the whole directory, or remove the member and add it anew")]
    Damaged {
        /// The file.
        path: PathBuf,
    },
    /// A file operation failed.
    #[error("cannot keep {path}: {source}")]
    Io {
        /// The file.
        path: PathBuf,
        /// Why it failed.
        source: io::Error,
    },
}

/// One start of a member.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Life {
    /// Which one it was, from 1.
    pub number: u64,
    /// Drawn by chance.
    pub id: u64,
}

/// The newest lives of one member.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Lives {
    /// How often it has started.
    starts: u64,
    /// What was drawn, the newest last.
    ids: Vec<u64>,
}

impl Lives {
    /// Makes lives of what a member says of its own; `None` if it says nothing, or nothing that makes sense.
    pub fn new(starts: u64, mut ids: Vec<u64>) -> Option<Lives> {
        ids.drain(..ids.len().saturating_sub(KEPT_MAX));
        (!ids.is_empty() && ids.len() as u64 <= starts).then_some(Lives { starts, ids })
    }

    /// Begins another life of the member in `root`, durably.
    ///
    /// # Errors
    /// [`LivesError`]; the life has not begun then.
    pub fn begin(root: &Path, id: u64) -> Result<Lives, LivesError> {
        let path = root.join(LIVES);
        let before = read(&path, |words| {
            let starts = words.next()?;
            Lives::new(starts, words.collect())
        })?;
        let Lives { starts, mut ids } = before.unwrap_or_default();
        ids.push(id);
        let lives = Lives::new(starts + 1, ids).expect("there is one more start and one more life");
        let numbers = std::iter::once(&lives.starts).chain(&lives.ids);
        write(&path, numbers.copied())?;
        Ok(lives)
    }

    /// How often the member has started.
    pub fn starts(&self) -> u64 {
        self.starts
    }

    /// What was drawn, the newest last.
    pub fn ids(&self) -> &[u64] {
        &self.ids
    }

    /// The newest; `None` for one that has not begun.
    pub fn last(&self) -> Option<Life> {
        self.ids.last().map(|id| Life { number: self.starts, id: *id })
    }

    /// True unless the member was something else in that life. One that is too long ago is taken for its own.
    pub fn include(&self, life: Life) -> bool {
        let Some(ago) = self.starts.checked_sub(life.number) else { return false };
        let place = usize::try_from(ago).ok().and_then(|ago| self.ids.len().checked_sub(ago + 1));
        place.is_none_or(|place| self.ids[place] == life.id)
    }
}

/// The last known life of each peer; on disk.
#[derive(Debug)]
pub struct KnownLives {
    path: PathBuf,
    lives: Mutex<BTreeMap<u64, Life>>,
}

impl KnownLives {
    /// Reads what the member in `root` knows.
    ///
    /// # Errors
    /// [`LivesError`].
    pub fn open(root: &Path) -> Result<KnownLives, LivesError> {
        let path = root.join(PEERS);
        let lives = read(&path, |words| {
            let words: Vec<u64> = words.collect();
            let (entries, rest) = words.as_chunks();
            let lives =
                entries.iter().map(|[member, number, id]| (*member, Life { number: *number, id: *id }));
            rest.is_empty().then(|| lives.collect())
        })?;
        Ok(KnownLives { path, lives: Mutex::new(lives.unwrap_or_default()) })
    }

    /// A peer's last known life.
    pub fn get(&self, member_id: u64) -> Option<Life> {
        self.lives.lock().get(&member_id).copied()
    }

    /// Takes note of a peer's life; on disk before it counts. Blocks.
    ///
    /// # Errors
    /// [`LivesError`]; it is not known then.
    pub fn learn(&self, member_id: u64, life: Life) -> Result<(), LivesError> {
        let mut lives = self.lives.lock();
        let mut next = lives.clone();
        next.insert(member_id, life);
        write(&self.path, next.iter().flat_map(|(member, life)| [*member, life.number, life.id]))?;
        *lives = next;
        Ok(())
    }

    /// Forgets peers that will not come back.
    pub fn forget(&self, gone: impl Fn(u64) -> bool) {
        self.lives.lock().retain(|member, _| !gone(*member));
    }
}

/// The numbers in a file, taken apart; `None` if there is no file.
fn read<T>(
    path: &Path,
    parse: impl FnOnce(&mut dyn Iterator<Item = u64>) -> Option<T>,
) -> Result<Option<T>, LivesError> {
    let damaged = || LivesError::Damaged { path: path.to_owned() };
    let text = match fs::read_to_string(path) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) if error.kind() == io::ErrorKind::InvalidData => return Err(damaged()),
        Err(source) => return Err(LivesError::Io { path: path.to_owned(), source }),
    };
    let checked = || {
        let (body, crc) = text.split_at_checked(text.rfind("crc32 ")?)?;
        let crc = u32::from_str_radix(crc.strip_prefix("crc32 ")?.trim_end(), 16).ok()?;
        (crc == crc32fast::hash(body.as_bytes())).then_some(())?;
        let words = body.split_whitespace().map(|word| u64::from_str_radix(word, 16).ok());
        parse(&mut words.collect::<Option<Vec<u64>>>()?.into_iter())
    };
    checked().map(Some).ok_or_else(damaged)
}

/// Replaces a file, durably.
fn write(path: &Path, numbers: impl Iterator<Item = u64>) -> Result<(), LivesError> {
    let mut body = String::new();
    for number in numbers {
        writeln!(body, "{number:x}").expect("a string takes text");
    }
    let text = format!("{body}crc32 {:08x}\n", crc32fast::hash(body.as_bytes()));
    let staged = path.with_extension("tmp");
    let put = || {
        let mut file = File::create(&staged)?;
        file.write_all(text.as_bytes())?;
        file.sync_all()?;
        fs::rename(&staged, path)?;
        File::open(path.parent().unwrap_or(Path::new(".")))?.sync_all()
    };
    put().map_err(|source| LivesError::Io { path: path.to_owned(), source })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn begin(root: &Path, id: u64) -> Lives {
        Lives::begin(root, id).expect("a life begins")
    }

    #[test]
    fn a_copy_is_told_from_what_it_was_copied_from() {
        let [original, copy] = [(); 2].map(|()| tempfile::tempdir().expect("a temporary directory"));
        let first = begin(original.path(), 0xa).last().expect("it has begun");
        begin(original.path(), 0xb);
        fs::copy(original.path().join(LIVES), copy.path().join(LIVES)).expect("it is copied");
        let met = begin(original.path(), 0xc).last().expect("it has begun");
        assert_eq!(met, Life { number: 3, id: 0xc });
        for round in 0..3 {
            let (mine, others) = (begin(original.path(), 0x10 + round), begin(copy.path(), 0x20 + round));
            assert!(mine.include(met) && mine.include(first));
            assert!(others.include(first) && !others.include(met), "{others:?}");
        }
        assert!(!begin(tempfile::tempdir().expect("a directory").path(), 1).include(met), "it lost all");
    }

    #[test]
    fn lives_long_ago_are_not_held_against_anyone() {
        let root = tempfile::tempdir().expect("a temporary directory");
        let met = begin(root.path(), 0).last().expect("it has begun");
        for id in 1..40 {
            begin(root.path(), id);
        }
        let lives = begin(root.path(), 40);
        assert_eq!((lives.starts(), lives.ids().len()), (41, KEPT_MAX));
        assert!(lives.include(met));
        assert!(!lives.include(Life { number: 42, id: 40 }), "nobody meets a life before it begins");
        assert!(!lives.include(Life { number: 30, id: 40 }));
    }

    #[test]
    fn peers_are_known_again_and_damage_is_found() {
        let root = tempfile::tempdir().expect("a temporary directory");
        let known = KnownLives::open(root.path()).expect("there is nothing yet");
        let life = Life { number: 7, id: u64::MAX };
        known.learn(5, life).expect("it is written");
        known.learn(6, Life { number: 1, id: 2 }).expect("it is written");
        known.forget(|member| member == 6);
        known.learn(4, life).expect("it is written");
        let known = KnownLives::open(root.path()).expect("it reads");
        assert_eq!([4, 5, 6].map(|member| known.get(member)), [Some(life), Some(life), None]);
        for damaged in ["", "1\n", "1\ncrc32 00000000\n"] {
            fs::write(root.path().join(PEERS), damaged).expect("it is written");
            fs::write(root.path().join(LIVES), damaged).expect("it is written");
            assert!(matches!(KnownLives::open(root.path()), Err(LivesError::Damaged { .. })));
            assert!(matches!(Lives::begin(root.path(), 1), Err(LivesError::Damaged { .. })));
        }
        assert_eq!(Lives::new(1, vec![1, 2]), None);
        assert_eq!(Lives::new(0, Vec::new()), None);
    }
}
