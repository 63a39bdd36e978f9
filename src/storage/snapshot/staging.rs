//! The receiver's side: files as far as they have arrived.
//!
//! ```text
//! offer     what was offered, with its checksum
//! journal   a record per piece: file, offset, length, checksum of the data, checksum of the record
//! files/    each file from its start, without holes
//! ```

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use bytes::Bytes;
use prost::Message;

use super::generations::sync_dir;
use super::{FileEntry, Offer, PIECE_BYTES, SnapshotError};
use crate::proto::skegpb::{SnapshotFile, SnapshotOffer};

/// Files of one store: RocksDB's are tens of megabytes each.
const FILES_MAX: usize = 1_000_000;
/// Length of a file name: RocksDB's have at most a few tens of characters.
const NAME_MAX: usize = 64;
/// Bytes written to a file before they are synced: what is then left to sync at the end is little.
const SYNC_EVERY_BYTES: u64 = 16 << 20;
/// Bytes of a journal record.
const RECORD_BYTES: usize = 24;

/// A piece of a file.
#[derive(Clone, Debug)]
pub struct Piece {
    /// Position of the file in the offer.
    pub file: usize,
    /// Where it belongs.
    pub offset: u64,
    /// CRC-32C of `data`.
    pub crc: u32,
    /// At most [`PIECE_BYTES`].
    pub data: Bytes,
}

/// Files that are arriving. Whatever ends it, what has arrived stays on disk.
#[derive(Debug)]
pub struct Staging {
    dir: PathBuf,
    offer: Offer,
    held: Vec<u64>,
    journal: File,
    open: Option<OpenFile>,
}

/// The file that is being written.
#[derive(Debug)]
struct OpenFile {
    at: usize,
    file: File,
    unsynced_bytes: u64,
}

impl Staging {
    /// Begins to take what is offered, or goes on where an earlier attempt at the same offer ended.
    ///
    /// # Errors
    /// [`SnapshotError::BadName`] and [`SnapshotError::TooLarge`] for what cannot be a store; [`SnapshotError::Io`].
    pub fn open(dir: PathBuf, offer: Offer) -> Result<Staging, SnapshotError> {
        check(&offer)?;
        if fs::read(dir.join("offer")).is_ok_and(|stored| decode_offer(&stored).as_ref() == Some(&offer)) {
            return Ok(Staging::resume(dir, offer)?);
        }
        Ok(Staging::begin(dir, offer)?)
    }

    /// What was offered.
    pub fn offer(&self) -> &Offer {
        &self.offer
    }

    /// How many bytes of each file are held, in the order of the offer.
    pub fn held(&self) -> &[u64] {
        &self.held
    }

    /// Takes the next piece of a file. May be called again after a refusal.
    ///
    /// # Errors
    /// [`SnapshotError::OutOfPlace`] and [`SnapshotError::Checksum`] change nothing; after [`SnapshotError::Io`] the
    /// staging is to be opened anew.
    pub fn take(&mut self, piece: &Piece) -> Result<(), SnapshotError> {
        let Piece { file, offset, crc, data } = piece;
        let (file, offset) = (*file, *offset);
        let held = self.held.get(file).copied().unwrap_or(0);
        let size = self.offer.files.get(file).map_or(0, |entry| entry.size_bytes);
        let end = offset.saturating_add(data.len() as u64);
        if offset != held || end > size || data.is_empty() || data.len() > PIECE_BYTES {
            return Err(SnapshotError::OutOfPlace { file, offset, held });
        }
        if crc32c::crc32c(data) != *crc {
            return Err(SnapshotError::Checksum { file, offset });
        }
        let open = self.writable(file)?;
        open.file.write_all_at(data, offset)?;
        open.unsynced_bytes += data.len() as u64;
        if open.unsynced_bytes >= SYNC_EVERY_BYTES {
            open.file.sync_data()?;
            open.unsynced_bytes = 0;
        }
        self.journal.write_all(&encode_record(file, offset, data.len(), *crc))?;
        self.held[file] = end;
        Ok(())
    }

    /// Makes the files durable, all of which must be there, and moves their directory to `to`.
    pub(super) fn finish(mut self, to: &Path) -> Result<(), SnapshotError> {
        for (file, held) in self.offer.files.iter().zip(&self.held) {
            if *held != file.size_bytes {
                return Err(SnapshotError::Incomplete { name: file.name.clone() });
            }
        }
        self.open = None;
        let files = self.dir.join("files");
        for entry in &self.offer.files {
            let path = files.join(&entry.name);
            if entry.size_bytes == 0 {
                File::create(&path)?.sync_all()?;
            } else {
                File::open(&path)?.sync_all()?;
            }
        }
        sync_dir(&files)?;
        fs::rename(&files, to)?;
        fs::remove_dir_all(&self.dir)?;
        Ok(())
    }

    fn begin(dir: PathBuf, offer: Offer) -> io::Result<Staging> {
        match fs::remove_dir_all(&dir) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        fs::create_dir(&dir)?;
        fs::create_dir(dir.join("files"))?;
        let journal = File::create(dir.join("journal"))?;
        // Last: with an offer in it the directory can be resumed.
        fs::write(dir.join("offer"), encode_offer(&offer))?;
        let held = vec![0; offer.files.len()];
        Ok(Staging { dir, offer, held, journal, open: None })
    }

    /// Reads everything that is there against the journal; from the first byte that differs on it is as if it had not come.
    fn resume(dir: PathBuf, offer: Offer) -> io::Result<Staging> {
        let files = dir.join("files");
        fs::create_dir_all(&files)?;
        for entry in fs::read_dir(&files)? {
            let path = entry?.path();
            let known = offer.files.iter().any(|file| path.file_name() == Some(file.name.as_ref()));
            if !known {
                fs::remove_file(path)?;
            }
        }
        let recorded = fs::read(dir.join("journal")).unwrap_or_default();
        let mut held = vec![0; offer.files.len()];
        let mut good = 0;
        for record in recorded.chunks_exact(RECORD_BYTES) {
            if !holds(&files, &offer, &mut held, record)? {
                break;
            }
            good += RECORD_BYTES;
        }
        for (entry, held) in offer.files.iter().zip(&held) {
            match OpenOptions::new().write(true).open(files.join(&entry.name)) {
                Ok(file) => file.set_len(*held)?,
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(error),
            }
        }
        let mut journal = File::create(dir.join("journal"))?;
        journal.write_all(&recorded[..good])?;
        Ok(Staging { dir, offer, held, journal, open: None })
    }

    fn writable(&mut self, at: usize) -> io::Result<&mut OpenFile> {
        let open = match self.open.take() {
            Some(open) if open.at == at => open,
            _ => {
                let path = self.dir.join("files").join(&self.offer.files[at].name);
                let file = OpenOptions::new().create(true).truncate(false).write(true).open(path)?;
                OpenFile { at, file, unsynced_bytes: 0 }
            }
        };
        Ok(self.open.insert(open))
    }
}

/// True if a journal record is whole and the file has what it speaks of; it counts as held then.
fn holds(files: &Path, offer: &Offer, held: &mut [u64], record: &[u8]) -> io::Result<bool> {
    let Some((file, offset, length, crc)) = decode_record(record) else { return Ok(false) };
    let Some(held) = held.get_mut(file) else { return Ok(false) };
    let end = offset.saturating_add(length as u64);
    if *held != offset || end > offer.files[file].size_bytes || length > PIECE_BYTES {
        return Ok(false);
    }
    let mut data = vec![0; length];
    let read =
        File::open(files.join(&offer.files[file].name)).and_then(|f| f.read_exact_at(&mut data, offset));
    match read {
        Ok(()) if crc32c::crc32c(&data) == crc => {
            *held = end;
            Ok(true)
        }
        Ok(()) => Ok(false),
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::UnexpectedEof) => {
            Ok(false)
        }
        Err(error) => Err(error),
    }
}

fn check(offer: &Offer) -> Result<(), SnapshotError> {
    if offer.files.len() > FILES_MAX {
        return Err(SnapshotError::TooLarge);
    }
    let mut names = std::collections::BTreeSet::new();
    let mut total: u64 = 0;
    for FileEntry { name, size_bytes } in &offer.files {
        let plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'-' | b'_');
        let is_name =
            (1..=NAME_MAX).contains(&name.len()) && name.bytes().all(plain) && !name.starts_with('.');
        if !is_name || !names.insert(name) {
            return Err(SnapshotError::BadName { name: name.clone() });
        }
        total = total.checked_add(*size_bytes).ok_or(SnapshotError::TooLarge)?;
    }
    // What a file cannot be.
    if total > i64::MAX.cast_unsigned() { Err(SnapshotError::TooLarge) } else { Ok(()) }
}

fn encode_offer(offer: &Offer) -> Vec<u8> {
    let files = offer
        .files
        .iter()
        .map(|file| SnapshotFile { name: file.name.clone(), size_bytes: file.size_bytes })
        .collect();
    let body = SnapshotOffer { id: Bytes::copy_from_slice(&offer.id), files }.encode_to_vec();
    [&crc32c::crc32c(&body).to_le_bytes()[..], &body].concat()
}

fn decode_offer(stored: &[u8]) -> Option<Offer> {
    let (crc, body) = stored.split_first_chunk::<4>()?;
    if u32::from_le_bytes(*crc) != crc32c::crc32c(body) {
        return None;
    }
    let offer = SnapshotOffer::decode(body).ok()?;
    let files =
        offer.files.into_iter().map(|file| FileEntry { name: file.name, size_bytes: file.size_bytes });
    Some(Offer { id: offer.id.as_ref().try_into().ok()?, files: files.collect() })
}

fn encode_record(file: usize, offset: u64, length: usize, crc: u32) -> [u8; RECORD_BYTES] {
    let word = |value: usize| u32::try_from(value).unwrap_or(u32::MAX).to_le_bytes();
    let mut record = [0; RECORD_BYTES];
    record[..4].copy_from_slice(&word(file));
    record[4..12].copy_from_slice(&offset.to_le_bytes());
    record[12..16].copy_from_slice(&word(length));
    record[16..20].copy_from_slice(&crc.to_le_bytes());
    let own = crc32c::crc32c(&record[..20]);
    record[20..].copy_from_slice(&own.to_le_bytes());
    record
}

fn decode_record(record: &[u8]) -> Option<(usize, u64, usize, u32)> {
    let word = |at: usize| record.get(at..at + 4)?.try_into().ok().map(u32::from_le_bytes);
    if word(20)? != crc32c::crc32c(record.get(..20)?) {
        return None;
    }
    let offset = u64::from_le_bytes(record.get(4..12)?.try_into().ok()?);
    Some((usize::try_from(word(0)?).ok()?, offset, usize::try_from(word(12)?).ok()?, word(16)?))
}
