//! The log's directory: the only file of this module that calls the file system.
//!
//! Assumed of the disk: a write that was synced stays; a write that was not may survive in any subset of its 512-byte
//! sectors, but rewriting a sector never harms the bytes in it that stay the same; renames and removals since the last
//! sync of the directory may survive in any subset.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, OFlags, StatxFlags};

use super::error::LogError;

/// Why a write is made: tests make one kind fail.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Purpose {
    /// Frames: a failure ends the log.
    Append,
    /// A segment made ahead: a failure is tried again later.
    Prepare,
}

/// The largest block of direct writes that is worth it.
pub(super) const DIRECT_ALIGN_MAX: usize = 4096;

/// A file that is written past the page cache.
#[derive(Debug)]
pub(super) struct Direct {
    pub(super) file: File,
    /// What offsets, lengths and addresses must be multiples of.
    pub(super) align: usize,
}

#[derive(Debug, Clone)]
pub(super) struct Disk {
    dir: PathBuf,
    no_fsync: bool,
    #[cfg(test)]
    pub(super) faults: std::sync::Arc<faults::Faults>,
    #[cfg(feature = "sim")]
    pub(super) journal: std::sync::Arc<crate::sim::disk::Journal>,
}

impl Disk {
    pub(super) fn new(dir: PathBuf, no_fsync: bool) -> Self {
        Self {
            #[cfg(feature = "sim")]
            journal: crate::sim::disk::journal(&dir),
            dir,
            no_fsync,
            #[cfg(test)]
            faults: std::sync::Arc::default(),
        }
    }

    pub(super) fn dir(&self) -> &Path {
        &self.dir
    }

    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    /// Makes the directory if there is none, durably.
    pub(super) fn create_dir(&self) -> Result<(), LogError> {
        if self.dir.is_dir() {
            return Ok(());
        }
        let failed = |source| LogError::Io { action: "create directory", path: self.dir.clone(), source };
        std::fs::DirBuilder::new().recursive(true).mode(0o700).create(&self.dir).map_err(failed)?;
        let parent = match self.dir.parent() {
            Some(parent) if !parent.as_os_str().is_empty() => parent,
            _ => Path::new("."),
        };
        if self.no_fsync { Ok(()) } else { File::open(parent).and_then(|dir| dir.sync_all()).map_err(failed) }
    }

    /// Returns the names of the files in the directory.
    pub(super) fn list(&self) -> Result<Vec<String>, LogError> {
        let failed = |source| LogError::Io { action: "list", path: self.dir.clone(), source };
        let mut names = Vec::new();
        for file in std::fs::read_dir(&self.dir).map_err(failed)? {
            names.push(file.map_err(failed)?.file_name().to_string_lossy().into_owned());
        }
        names.sort_unstable();
        Ok(names)
    }

    pub(super) fn create(&self, name: &str) -> io::Result<File> {
        #[cfg(feature = "sim")]
        {
            if self.path(name).exists() {
                self.journal.remove(name)?;
            }
            self.journal.created(name);
        }
        OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(true)
            .mode(0o600)
            .open(self.path(name))
    }

    pub(super) fn open(&self, name: &str) -> io::Result<File> {
        OpenOptions::new().read(true).write(true).open(self.path(name))
    }

    /// Opens a file for direct writes, if the file system says that it takes them and in which blocks (Linux 6.1).
    /// Without syncs there is no use for it: the page cache is faster.
    pub(super) fn open_direct(&self, name: &str) -> Option<Direct> {
        if self.no_fsync || cfg!(feature = "sim") {
            return None;
        }
        let flags = i32::try_from(OFlags::DIRECT.bits()).ok()?;
        let file = OpenOptions::new().write(true).custom_flags(flags).open(self.path(name)).ok()?;
        let found = rustix::fs::statx(&file, "", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN).ok()?;
        if found.stx_mask & StatxFlags::DIOALIGN.bits() == 0 {
            return None;
        }
        let align = usize::try_from(found.stx_dio_offset_align.max(found.stx_dio_mem_align)).ok()?;
        let usable = found.stx_dio_offset_align > 0 && align.is_power_of_two() && align <= DIRECT_ALIGN_MAX;
        usable.then_some(Direct { file, align })
    }

    pub(super) fn write(&self, purpose: Purpose, file: &File, bytes: &[u8], offset: u64) -> io::Result<()> {
        #[cfg(test)]
        self.faults.check_write(purpose)?;
        #[cfg(not(test))]
        let _ = purpose;
        #[cfg(feature = "sim")]
        return self.journal.write(file, bytes, offset);
        #[cfg(not(feature = "sim"))]
        file.write_all_at(bytes, offset)
    }

    /// Syncs the file's bytes and length. Never to be tried again after an error: the kernel may have dropped the pages.
    pub(super) fn sync(&self, purpose: Purpose, file: &File) -> io::Result<()> {
        #[cfg(test)]
        self.faults.check_sync(purpose)?;
        #[cfg(not(test))]
        let _ = purpose;
        #[cfg(feature = "sim")]
        return self.journal.sync(file, purpose == Purpose::Append);
        #[cfg(not(feature = "sim"))]
        if self.no_fsync { Ok(()) } else { file.sync_data() }
    }

    pub(super) fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        #[cfg(feature = "sim")]
        return self.journal.rename(from, to);
        #[cfg(not(feature = "sim"))]
        std::fs::rename(self.path(from), self.path(to))
    }

    pub(super) fn remove(&self, name: &str) -> io::Result<()> {
        #[cfg(feature = "sim")]
        return self.journal.remove(name);
        #[cfg(not(feature = "sim"))]
        std::fs::remove_file(self.path(name))
    }

    /// Makes earlier renames and removals durable.
    pub(super) fn sync_dir(&self) -> io::Result<()> {
        #[cfg(feature = "sim")]
        return self.journal.sync_dir();
        #[cfg(not(feature = "sim"))]
        if self.no_fsync { Ok(()) } else { File::open(&self.dir)?.sync_all() }
    }
}

/// Reads until the buffer is full or the file ends, and returns how many bytes that were.
pub(super) fn read_full(file: &File, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
    let mut filled = 0;
    while filled < buffer.len() {
        match file.read_at(&mut buffer[filled..], offset + filled as u64) {
            Ok(0) => break,
            Ok(count) => filled += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(filled)
}

/// Failures that tests order.
#[cfg(test)]
pub(super) mod faults {
    use std::io;
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::Purpose;

    #[derive(Debug, Default)]
    pub(in super::super) struct Faults {
        pub(in super::super) append_full: AtomicBool,
        pub(in super::super) sync_fails: AtomicBool,
        pub(in super::super) prepare_full: AtomicBool,
    }

    impl Faults {
        pub(super) fn check_write(&self, purpose: Purpose) -> io::Result<()> {
            let full = match purpose {
                Purpose::Append => &self.append_full,
                Purpose::Prepare => &self.prepare_full,
            };
            if full.load(Ordering::SeqCst) { Err(io::ErrorKind::StorageFull.into()) } else { Ok(()) }
        }

        pub(super) fn check_sync(&self, purpose: Purpose) -> io::Result<()> {
            if purpose == Purpose::Append && self.sync_fails.load(Ordering::SeqCst) {
                return Err(io::Error::other("sync fault"));
            }
            Ok(())
        }
    }
}
