//! Room on the disk: how much there is, and some set aside for when there is none.
//!
//! ```text
//! |------------ free ------------|-- low --|= reserve =|
//!        writes go on             refused   given up when even the log finds no room
//! ```
//!
//! Refusing writes early keeps room for what must still be written then: deletions, compactions, flushes. The reserve is a
//! file; removing it is what makes the last room, and a start on a full disk possible.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use rustix::fs::{FallocateFlags, fallocate, statvfs};
use tracing::{info, warn};

/// The reserve at its largest, in bytes.
const RESERVE_BYTES_MAX: u64 = if cfg!(feature = "sim") { 64 << 10 } else { 64 << 20 };
/// Its share of a small disk.
const RESERVE_SHARE: u64 = 16;
/// Free bytes below which writes are refused, at most.
const LOW_BYTES_MAX: u64 = 256 << 20;
/// Their share of a small disk.
const LOW_SHARE: u64 = 4;
/// What a written byte takes of the disk before the next look: in the log, in a flush, in a compaction.
const BYTES_PER_BYTE: u64 = 3;

/// The disks under the data directory and the log; shared.
#[derive(Debug)]
pub struct Space {
    dirs: Vec<PathBuf>,
    reserve: PathBuf,
    /// Exists while the alarm is one of a full disk.
    mark: PathBuf,
    /// Free bytes at the last look, less what was written since.
    free: AtomicU64,
    low_bytes: u64,
    reserve_bytes: u64,
    /// There is no reserve: it was given up, or could not be made.
    given_up: AtomicBool,
}

impl Space {
    /// Looks at the disks of `root` and of the log, and gives up the reserve if there is no room to start in.
    ///
    /// # Errors
    /// When the system does not tell how much room there is.
    pub fn open(root: &Path, log_dir: &Path) -> io::Result<Space> {
        let dirs = vec![root.to_owned(), log_dir.to_owned()];
        let disk = statvfs(root)?;
        let total = disk.f_blocks * disk.f_frsize;
        let space = Space {
            dirs,
            reserve: root.join("reserve"),
            mark: root.join("disk-full"),
            free: AtomicU64::new(0),
            low_bytes: (total / LOW_SHARE).min(LOW_BYTES_MAX),
            reserve_bytes: (total / RESERVE_SHARE).min(RESERVE_BYTES_MAX),
            given_up: AtomicBool::new(false),
        };
        if space.look()? < space.reserve_bytes / 2 {
            space.give_up_reserve();
        } else {
            space.restore_reserve();
        }
        space.look()?;
        Ok(space)
    }

    /// Asks the system for the free bytes of the fuller disk.
    ///
    /// # Errors
    /// When it does not tell.
    pub fn look(&self) -> io::Result<u64> {
        let mut free = u64::MAX;
        for dir in self.dirs.iter().filter(|dir| dir.exists()) {
            let disk = statvfs(dir)?;
            free = free.min(disk.f_bavail * disk.f_frsize);
        }
        self.free.store(free, Ordering::Relaxed);
        Ok(free)
    }

    /// Notes that so many bytes are about to be written; false if there is too little room for them.
    pub fn has_room(&self, bytes: u64) -> bool {
        let cost = bytes.saturating_mul(BYTES_PER_BYTE);
        let before = self.free.fetch_sub(cost.min(self.free.load(Ordering::Relaxed)), Ordering::Relaxed);
        before.saturating_sub(cost) >= self.low_bytes
    }

    /// Free bytes at the last look, less what was written since.
    pub fn free_bytes(&self) -> u64 {
        self.free.load(Ordering::Relaxed)
    }

    /// Where files that are needed for a while may be, and how many bytes all of them may have: half of the room that nobody
    /// would miss.
    ///
    /// # Errors
    /// When the system does not tell how much room there is.
    pub fn scratch(&self) -> io::Result<(PathBuf, u64)> {
        let root = &self.dirs[0];
        let disk = statvfs(root)?;
        let spare = (disk.f_bavail * disk.f_frsize).saturating_sub(self.low_bytes * 2);
        Ok((root.clone(), spare / 2))
    }

    /// True if the last look found little room.
    pub fn is_low(&self) -> bool {
        self.free.load(Ordering::Relaxed) < self.low_bytes
    }

    /// True if there is room again: clearly more than little.
    pub fn is_ample(&self) -> bool {
        self.free.load(Ordering::Relaxed) >= self.low_bytes + self.low_bytes / 2 + self.reserve_bytes
    }

    /// Removes the reserve, for the last room there is.
    pub fn give_up_reserve(&self) {
        if !self.given_up.swap(true, Ordering::Relaxed) && self.reserve.exists() {
            match std::fs::remove_file(&self.reserve) {
                Ok(()) => warn!(bytes = self.reserve_bytes, "disk full: the reserve was given up"),
                Err(error) => warn!(%error, "disk full, and the reserve cannot be removed"),
            }
        }
    }

    /// Makes the reserve, if there is none.
    pub fn restore_reserve(&self) {
        if self.reserve.metadata().is_ok_and(|file| file.len() >= self.reserve_bytes) {
            self.given_up.store(false, Ordering::Relaxed);
            return;
        }
        match self.make_reserve() {
            Ok(()) => self.given_up.store(false, Ordering::Relaxed),
            Err(error) => {
                let _ = std::fs::remove_file(&self.reserve);
                // It is tried at every look: a file system that cannot set room aside is not news each time.
                if !self.given_up.swap(true, Ordering::Relaxed) {
                    info!(%error, "no reserve of disk space");
                }
            }
        }
    }

    fn make_reserve(&self) -> io::Result<()> {
        let file: File =
            OpenOptions::new().create(true).truncate(true).write(true).mode(0o600).open(&self.reserve)?;
        fallocate(&file, FallocateFlags::empty(), 0, self.reserve_bytes)?;
        Ok(())
    }

    /// Notes on disk that the alarm of this member is one of a full disk, which ends with it.
    ///
    /// # Errors
    /// The file system's.
    pub fn mark_full(&self) -> io::Result<()> {
        File::create(&self.mark).map(drop)
    }

    /// True if it was noted.
    pub fn is_marked_full(&self) -> bool {
        self.mark.exists()
    }

    /// Takes the note away.
    pub fn unmark_full(&self) {
        let _ = std::fs::remove_file(&self.mark);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_reserve_comes_and_goes_and_writes_count_between_looks() {
        let directory = tempfile::tempdir().expect("a directory");
        let space = Space::open(directory.path(), directory.path()).expect("the disk tells");
        assert!(directory.path().join("reserve").metadata().expect("there is one").len() > 0);
        space.give_up_reserve();
        assert!(!directory.path().join("reserve").exists());
        space.restore_reserve();
        assert!(directory.path().join("reserve").exists());
        assert!(space.has_room(1) && !space.is_low());
        assert!(!space.has_room(u64::MAX / 8), "more than any disk has");
        assert!(space.is_low(), "it counts until the next look");
        space.look().expect("the disk tells");
        assert!(!space.is_low());
        space.mark_full().expect("it is noted");
        assert!(space.is_marked_full());
        space.unmark_full();
        assert!(!space.is_marked_full());
    }
}
