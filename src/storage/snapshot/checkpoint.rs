//! The sender's side: files that stand still.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use tracing::warn;

use super::{FileEntry, Offer, PIECE_BYTES, Piece};
use crate::clock;
use crate::storage::engine::read_meta;
use crate::storage::schema::MetaKey;
use crate::storage::{Engine, StorageError};

/// A store's files as of one moment, for as long as this lives.
#[derive(Debug)]
pub struct Checkpoint {
    dir: PathBuf,
    offer: Offer,
    applied: Option<Vec<u8>>,
    membership: Option<Vec<u8>>,
}

impl Checkpoint {
    /// Flushes a store and links its files into `dir`, which must not exist. Takes as long as a flush.
    ///
    /// # Errors
    /// The storage's.
    pub fn make(engine: &Engine, dir: PathBuf) -> Result<Checkpoint, StorageError> {
        engine.link_files(&dir)?;
        // From here on dropping it removes the directory.
        let offer = Offer { id: clock::random(), files: Vec::new() };
        let mut checkpoint = Checkpoint { dir, offer, applied: None, membership: None };
        // Before anything opens the files, for that leaves files of its own.
        checkpoint.offer.files = list(&checkpoint.dir)?;
        [checkpoint.applied, checkpoint.membership] =
            read_meta(&checkpoint.dir, [MetaKey::Applied, MetaKey::Membership])?;
        Ok(checkpoint)
    }

    /// What there is to send.
    pub fn offer(&self) -> &Offer {
        &self.offer
    }

    /// The last entry that the files hold, encoded as they have it.
    pub fn applied(&self) -> Option<&[u8]> {
        self.applied.as_deref()
    }

    /// The membership that the files hold, encoded as they have it.
    pub fn membership(&self) -> Option<&[u8]> {
        self.membership.as_deref()
    }

    /// Reads the piece of a file that begins at `offset`; `None` at its end.
    ///
    /// # Errors
    /// When the file cannot be read, or has become shorter.
    pub fn read_piece(&self, file: usize, offset: u64) -> io::Result<Option<Piece>> {
        let entry = self.offer.files.get(file).ok_or(io::ErrorKind::NotFound)?;
        let left = entry.size_bytes.saturating_sub(offset);
        if left == 0 {
            return Ok(None);
        }
        let length = usize::try_from(left).unwrap_or(usize::MAX).min(PIECE_BYTES);
        let mut data = vec![0; length];
        File::open(self.dir.join(&entry.name))?.read_exact_at(&mut data, offset)?;
        Ok(Some(Piece { file, offset, crc: crc32c::crc32c(&data), data: data.into() }))
    }
}

impl Drop for Checkpoint {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_dir_all(&self.dir) {
            warn!(dir = %self.dir.display(), %error, "a checkpoint is not removed before the next start");
        }
    }
}

/// All files, by name.
fn list(dir: &Path) -> io::Result<Vec<FileEntry>> {
    let mut files = Vec::new();
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        let name = entry.file_name().into_string().map_err(|_| io::ErrorKind::InvalidData)?;
        files.push(FileEntry { name, size_bytes: entry.metadata()?.len() });
    }
    files.sort_by(|one, other| one.name.cmp(&other.name));
    Ok(files)
}
