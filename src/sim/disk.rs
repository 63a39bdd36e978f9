//! The log's disk: real files, and beside them what would be left of them if the power went now.
//!
//! ```text
//! write      the sector's bytes before it are kept, once
//! sync       of a file: they are forgotten
//! rename...  the undoing is kept
//! sync_dir   it is forgotten
//! power cut  of each unsynced sector the old or the new bytes, of the unsynced renames the first few
//! ```
//! As `storage/log` assumes of a disk. What is left is written to another directory, in which the member lives on: whatever
//! still runs of its life before cannot touch that.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;

use super::{Bug, below, planted};

const SECTOR_BYTES: u64 = 512;
/// Names of files that were removed or replaced, and may come back.
const KEPT_PREFIX: &str = "kept-by-sim.";

/// The disk under one log directory.
#[derive(Debug)]
pub struct Journal {
    dir: PathBuf,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Its member is gone: nothing is taken any more.
    dead: bool,
    /// Syncs until one fails; `None` for no failure.
    fails_after: Option<u64>,
    failed: bool,
    /// What a batch takes longer than usual.
    slow_by: Duration,
    /// By inode.
    unsynced: BTreeMap<u64, Before>,
    names: Vec<Renaming>,
    kept: u64,
    /// Where the last synced frames of a file begin, by inode.
    last_batch: BTreeMap<u64, u64>,
    /// The newest segment that was left, and where its last synced frames begin.
    newest: Option<(String, u64)>,
}

/// A file as it was at its last sync, where it was written to since.
#[derive(Debug)]
struct Before {
    len: u64,
    sectors: BTreeMap<u64, Vec<u8>>,
    /// First byte written since.
    first: u64,
}

/// A change of the directory that was not synced.
#[derive(Debug)]
enum Renaming {
    Created(String),
    Removed { name: String, kept_as: String },
    Renamed { from: String, to: String },
}

/// A bit that was flipped in what was left.
#[derive(Clone, Debug)]
pub struct Flip {
    /// The file.
    pub path: PathBuf,
    offset: u64,
    mask: u8,
}

impl Flip {
    /// Follows the file to the directory of another disk.
    pub fn move_to(&mut self, other: &Journal) {
        if let Some(name) = self.path.file_name() {
            self.path = other.dir.join(name);
        }
    }

    /// Flips it back.
    ///
    /// # Errors
    /// Those of the file.
    pub fn undo(&self) -> io::Result<()> {
        let file = File::options().read(true).write(true).open(&self.path)?;
        let mut byte = [0];
        file.read_exact_at(&mut byte, self.offset)?;
        file.write_all_at(&[byte[0] ^ self.mask], self.offset)
    }
}

thread_local! {
    static JOURNALS: RefCell<BTreeMap<PathBuf, Arc<Journal>>> = const { RefCell::new(BTreeMap::new()) };
}

/// The disk under a directory; all that is in it when it is first asked for is durable.
pub fn journal(dir: &Path) -> Arc<Journal> {
    JOURNALS.with(|journals| {
        let mut journals = journals.borrow_mut();
        let journal = journals
            .entry(dir.to_owned())
            .or_insert_with(|| Arc::new(Journal { dir: dir.to_owned(), state: Mutex::default() }));
        Arc::clone(journal)
    })
}

impl Journal {
    /// Lets the sync fail that comes after so many others.
    pub fn fail_after(&self, syncs: u64) {
        self.state.lock().fails_after = Some(syncs);
    }

    /// True once a sync has failed on demand.
    pub fn has_failed(&self) -> bool {
        self.state.lock().failed
    }

    /// Makes each batch take this much longer.
    pub fn slow_by(&self, time: Duration) {
        self.state.lock().slow_by = time;
    }

    /// Waits as long as the disk takes for a batch.
    pub(crate) async fn wait(&self) {
        let slow_by = self.state.lock().slow_by;
        let usual = if below(64) == 0 { Duration::from_millis(60) } else { Duration::from_millis(3) };
        super::pause(usual).await;
        if !slow_by.is_zero() {
            tokio::time::sleep(slow_by).await;
        }
    }

    pub(crate) fn write(&self, file: &File, bytes: &[u8], offset: u64) -> io::Result<()> {
        let mut state = self.state.lock();
        state.check()?;
        let metadata = file.metadata()?;
        let before = state.unsynced.entry(metadata.ino()).or_insert_with(|| Before {
            len: metadata.len(),
            sectors: BTreeMap::new(),
            first: offset,
        });
        before.first = before.first.min(offset);
        let end = offset + bytes.len() as u64;
        for sector in offset / SECTOR_BYTES..end.div_ceil(SECTOR_BYTES) {
            if let std::collections::btree_map::Entry::Vacant(slot) = before.sectors.entry(sector) {
                slot.insert(read_sector(file, sector)?);
            }
        }
        file.write_all_at(bytes, offset)
    }

    pub(crate) fn sync(&self, file: &File, frames: bool) -> io::Result<()> {
        let mut state = self.state.lock();
        state.check()?;
        if let Some(left) = &mut state.fails_after {
            if *left == 0 {
                state.failed = true;
                return Err(io::Error::other("the disk failed a sync"));
            }
            *left -= 1;
        }
        if frames && planted(Bug::SkipLogSync) {
            return Ok(());
        }
        let inode = file.metadata()?.ino();
        if let Some(before) = state.unsynced.remove(&inode) {
            state.last_batch.insert(inode, before.first);
        }
        Ok(())
    }

    /// A file was made under this name.
    pub(crate) fn created(&self, name: &str) {
        self.state.lock().names.push(Renaming::Created(name.to_owned()));
    }

    /// Removes a name in such a way that it can come back.
    pub(crate) fn remove(&self, name: &str) -> io::Result<()> {
        let mut state = self.state.lock();
        state.check()?;
        let kept_as = format!("{KEPT_PREFIX}{}", state.kept);
        state.kept += 1;
        fs::rename(self.dir.join(name), self.dir.join(&kept_as))?;
        state.names.push(Renaming::Removed { name: name.to_owned(), kept_as });
        Ok(())
    }

    pub(crate) fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        if self.dir.join(to).exists() {
            self.remove(to)?;
        }
        let mut state = self.state.lock();
        state.check()?;
        fs::rename(self.dir.join(from), self.dir.join(to))?;
        state.names.push(Renaming::Renamed { from: from.to_owned(), to: to.to_owned() });
        Ok(())
    }

    pub(crate) fn sync_dir(&self) -> io::Result<()> {
        let mut state = self.state.lock();
        state.check()?;
        for renaming in std::mem::take(&mut state.names) {
            if let Renaming::Removed { kept_as, .. } = renaming {
                fs::remove_file(self.dir.join(kept_as))?;
            }
        }
        Ok(())
    }

    /// Writes what is left of the log to `to`, and takes nothing any more: all that was written after a kill, after a power
    /// cut what was synced and some of the rest.
    ///
    /// # Errors
    /// Those of the files.
    pub fn survive(&self, to: &Path, power_cut: bool) -> io::Result<()> {
        let mut state = self.state.lock();
        state.dead = true;
        let mut names: BTreeMap<String, PathBuf> = BTreeMap::new();
        for name in file_names(&self.dir)? {
            if !name.starts_with(KEPT_PREFIX) {
                names.insert(name.clone(), self.dir.join(name));
            }
        }
        if power_cut {
            let durable = usize::try_from(below(state.names.len() as u64 + 1)).unwrap_or(0);
            for renaming in state.names[durable..].iter().rev() {
                match renaming {
                    Renaming::Created(name) => drop(names.remove(name)),
                    Renaming::Removed { name, kept_as } => {
                        names.insert(name.clone(), self.dir.join(kept_as));
                    }
                    Renaming::Renamed { from, to } => {
                        if let Some(path) = names.remove(to) {
                            names.insert(from.clone(), path);
                        }
                    }
                }
            }
        }
        fs::create_dir_all(to)?;
        for (name, path) in names {
            if name.ends_with(".log") {
                let end = state.last_batch.get(&fs::metadata(&path)?.ino()).copied();
                state.newest = end.map(|end| (name.clone(), end));
            }
            let mut bytes = fs::read(&path)?;
            let before = state.unsynced.get(&fs::metadata(&path)?.ino());
            if let Some(before) = before.filter(|_| power_cut) {
                before.tear(&mut bytes);
            }
            fs::write(to.join(name), bytes)?;
        }
        Ok(())
    }

    /// Flips a bit of what the last life of this disk left in `dir`: in the newest segment, before its last batch, which
    /// cannot be told from one that was torn.
    ///
    /// # Errors
    /// Those of the file.
    pub fn flip(&self, dir: &Path) -> io::Result<Option<Flip>> {
        let Some((name, end)) = self.state.lock().newest.clone().filter(|(_, end)| *end > 0) else {
            return Ok(None);
        };
        let path = dir.join(name);
        let flip = Flip { path, offset: below(end), mask: 1 << below(8) };
        flip.undo()?;
        Ok(Some(flip))
    }
}

impl State {
    fn check(&self) -> io::Result<()> {
        if self.dead { Err(io::Error::other("the member is gone")) } else { Ok(()) }
    }
}

impl Before {
    /// Puts back the old bytes of some sectors, and perhaps the old length.
    fn tear(&self, bytes: &mut Vec<u8>) {
        let len = bytes.len() as u64;
        // Often all or nothing: of many sectors drawn one by one a few always stay.
        let kept_of_four = [0, 4, 1, 2, 3][usize::try_from(below(5)).unwrap_or(0)];
        for (sector, old) in &self.sectors {
            if below(4) < kept_of_four {
                continue;
            }
            let start = usize::try_from(sector * SECTOR_BYTES).unwrap_or(usize::MAX);
            let end = bytes.len().min(start + old.len());
            if start < end {
                bytes[start..end].copy_from_slice(&old[..end - start]);
            }
        }
        if self.len < len && below(2) == 0 {
            bytes.truncate(usize::try_from(self.len).unwrap_or(usize::MAX));
        }
    }
}

/// A sector's bytes; zeros behind the file's end.
fn read_sector(file: &File, sector: u64) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; usize::try_from(SECTOR_BYTES).unwrap_or(0)];
    let mut filled = 0;
    while filled < bytes.len() {
        match file.read_at(&mut bytes[filled..], sector * SECTOR_BYTES + filled as u64)? {
            0 => break,
            count => filled += count,
        }
    }
    Ok(bytes)
}

fn file_names(dir: &Path) -> io::Result<Vec<String>> {
    let mut names = Vec::new();
    for file in fs::read_dir(dir)? {
        names.push(file?.file_name().to_string_lossy().into_owned());
    }
    names.sort_unstable();
    Ok(names)
}
