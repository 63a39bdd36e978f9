//! A file of etcd's: what its buckets say, its history as a hash, and what `snapshot status` shows of it.

use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};

use bytes::Bytes;
use prost::Message;

use super::{CLUSTER, KEY, META};
use crate::proto::mvccpb::KeyValue;
use crate::storage::bolt::{Bolt, BoltError, Cursor, Entry};
use crate::storage::mvcc::hash::RevisionHash;
use crate::storage::mvcc::{FIRST_REVISION, NEVER_COMPACTED};
use crate::storage::schema::SubRevision;

/// The newest minor version of etcd 3 whose files are known.
const NEWEST_MINOR: u32 = 7;

/// Why a file is not taken.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    /// It is no bbolt file, or not whole.
    #[error(transparent)]
    Bolt(#[from] BoltError),
    /// It is a bbolt file, but not of etcd.
    #[error("{path} holds no data of etcd: it has no bucket {bucket:?}")]
    NotEtcd {
        /// The file.
        path: PathBuf,
        /// What is missing.
        bucket: &'static str,
    },
    /// A record is not what etcd writes.
    #[error("{path} is damaged at byte {offset}: {what} does not decode")]
    Record {
        /// The file.
        path: PathBuf,
        /// Where the record is.
        offset: u64,
        /// What it should be.
        what: &'static str,
    },
    /// A later etcd has written it.
    #[error(
        "{path} is of etcd {found}, and this version knows files up to 3.7: use the version that wrote it"
    )]
    Newer {
        /// The file.
        path: PathBuf,
        /// Its version.
        found: String,
    },
    /// The revision has been compacted.
    #[error("mvcc: required revision has been compacted")]
    Compacted,
    /// There is no such revision yet.
    #[error("mvcc: required revision is a future revision")]
    FutureRevision,
}

/// What `etcdutl snapshot status` shows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileStatus {
    /// CRC-32C of all buckets.
    pub hash: u32,
    /// The greatest revision in it.
    pub revision: i64,
    /// Live keys.
    pub total_keys: u64,
    /// Bytes of its pages.
    pub size_bytes: u64,
    /// Storage version; empty before etcd 3.6.
    pub version: String,
}

/// One record of bucket `key`.
#[derive(Clone, Debug)]
pub(super) struct Record {
    pub(super) revision: SubRevision,
    pub(super) is_delete: bool,
    /// `None` for the mark that a restore with a bumped revision leaves.
    pub(super) stored: Option<KeyValue>,
}

/// A file that is only read.
#[derive(Debug)]
pub struct EtcdFile {
    path: PathBuf,
    bolt: Bolt,
}

impl EtcdFile {
    /// Opens a file.
    ///
    /// # Errors
    /// [`FileError::Bolt`].
    pub fn open(path: &Path) -> Result<EtcdFile, FileError> {
        Ok(EtcdFile { path: path.to_owned(), bolt: Bolt::open(path)? })
    }

    /// The pages below.
    pub fn bolt(&self) -> &Bolt {
        &self.bolt
    }

    /// Refuses what is not etcd's, or of an etcd that came later than 3.7.
    ///
    /// # Errors
    /// [`FileError::NotEtcd`], [`FileError::Newer`], [`FileError::Bolt`].
    pub fn check_version(&self) -> Result<(), FileError> {
        for (name, bucket) in [(META, "meta"), (KEY, "key")] {
            if self.bolt.bucket(name)?.is_none() {
                return Err(FileError::NotEtcd { path: self.path.clone(), bucket });
            }
        }
        for (bucket, key) in [(META, &b"storageVersion"[..]), (CLUSTER, b"clusterVersion")] {
            let Some(version) = self.get(bucket, key)? else { continue };
            let version = String::from_utf8_lossy(&version).into_owned();
            let minor = version.strip_prefix("3.").and_then(|rest| rest.split('.').next()?.parse().ok());
            if minor.is_none_or(|minor: u32| minor > NEWEST_MINOR) {
                return Err(FileError::Newer { path: self.path.clone(), found: version });
            }
        }
        Ok(())
    }

    /// The value of a small bucket's key.
    pub(super) fn get(&self, bucket: &[u8], key: &[u8]) -> Result<Option<Vec<u8>>, FileError> {
        let Some(mut entries) = self.bolt.bucket(bucket)? else { return Ok(None) };
        while let Some(entry) = entries.next()? {
            if entry.key == key {
                return Ok(Some(entry.value.to_vec()));
            }
        }
        Ok(None)
    }

    /// Goes through a bucket; does nothing if there is none.
    pub(super) fn for_each(
        &self,
        bucket: &[u8],
        mut visit: impl FnMut(&Entry<'_>) -> Result<(), FileError>,
    ) -> Result<(), FileError> {
        let Some(mut entries) = self.bolt.bucket(bucket)? else { return Ok(()) };
        while let Some(entry) = entries.next()? {
            visit(&entry)?;
        }
        Ok(())
    }

    pub(super) fn damaged(&self, offset: u64, what: &'static str) -> FileError {
        FileError::Record { path: self.path.clone(), offset, what }
    }

    /// The history in the order of revisions.
    pub(super) fn records(&self) -> Result<Records<'_>, FileError> {
        let entries = self.bolt.bucket(KEY)?;
        let missing = || FileError::NotEtcd { path: self.path.clone(), bucket: "key" };
        Ok(Records { file: self, entries: entries.ok_or_else(missing)? })
    }

    /// The compact revision: that of a compaction which etcd would go on with at its next start, too.
    pub(super) fn compacted(&self) -> Result<i64, FileError> {
        let mut compacted = NEVER_COMPACTED;
        for key in [&b"finishedCompactRev"[..], b"scheduledCompactRev"] {
            if let Some(value) = self.get(META, key)? {
                let (revision, _) =
                    decode_revision_key(&value).ok_or_else(|| self.damaged(0, "a compact revision"))?;
                compacted = compacted.max(revision.main);
            }
        }
        Ok(compacted)
    }

    /// Checks every page, and reads all of the file.
    ///
    /// # Errors
    /// [`FileError::Bolt`], [`FileError::Record`].
    pub fn status(&self) -> Result<FileStatus, FileError> {
        self.bolt.check()?;
        let version = self.get(META, b"storageVersion")?.unwrap_or_default();
        let mut status = FileStatus {
            hash: 0,
            revision: 0,
            total_keys: 0,
            size_bytes: self.bolt.size_bytes(),
            version: String::from_utf8_lossy(&version).into_owned(),
        };
        let mut live = HashSet::new();
        let mut buckets = self.bolt.buckets()?;
        while let Some(bucket) = buckets.next()? {
            status.hash = crc32c::crc32c_append(status.hash, bucket.key);
            let is_key = bucket.key == KEY;
            let mut entries = self.bolt.open_bucket(&bucket)?;
            while let Some(entry) = entries.next()? {
                if entry.is_bucket {
                    return Err(self.damaged(entry.offset, "a bucket inside of another"));
                }
                status.hash = crc32c::crc32c_append(status.hash, entry.key);
                status.hash = crc32c::crc32c_append(status.hash, entry.value);
                if is_key {
                    let record = self.decode(&entry)?;
                    status.revision = record.revision.main;
                    let key = record.stored.map(|stored| stored.key).unwrap_or_default();
                    if record.is_delete {
                        live.remove(&key[..]);
                    } else {
                        live.insert(key.to_vec());
                    }
                }
            }
        }
        status.total_keys = live.len() as u64;
        Ok(status)
    }

    /// The hash of the history up to a revision, 0 for the current one, as the server would answer it after a start.
    ///
    /// etcd: `server/storage/mvcc/hash.go`
    ///
    /// # Errors
    /// [`FileError`].
    pub fn hash_kv(&self, requested: i64) -> Result<RevisionHash, FileError> {
        let compacted = self.compacted()?;
        let mut current = FIRST_REVISION.max(compacted);
        // Of each key the newest record up to the revision hashed, and the one that a compaction leaves.
        let mut newest: HashMap<Bytes, Newest> = HashMap::new();
        let upto = if requested == 0 { i64::MAX } else { requested };
        let mut records = self.records()?;
        while let Some((record, _)) = records.next()? {
            let main = record.revision.main;
            current = current.max(main);
            if main <= upto {
                let key = record.stored.map(|stored| stored.key).unwrap_or_default();
                let known = newest.entry(Bytes::copy_from_slice(&key)).or_default();
                let is_put = !record.is_delete;
                known.last = is_put.then_some(record.revision);
                if main <= compacted {
                    known.last_compacted = is_put.then_some(record.revision);
                }
            }
        }
        if requested > current {
            return Err(FileError::FutureRevision);
        }
        if requested != 0 && requested < compacted {
            return Err(FileError::Compacted);
        }
        let any_kept = newest.values().any(|known| known.last.is_some());
        let counts: HashSet<SubRevision> = newest
            .into_values()
            .filter_map(|known| if any_kept { known.last } else { known.last_compacted })
            .collect();
        let mut hash = crc32c::crc32c(KEY);
        let mut records = self.records()?;
        while let Some((record, entry)) = records.next()? {
            let main = record.revision.main;
            let is_left = main > compacted || counts.contains(&record.revision);
            if main <= upto && is_left && !(record.is_delete && main == compacted) {
                hash = crc32c::crc32c_append(crc32c::crc32c_append(hash, entry.key), entry.value);
            }
        }
        let revision = if requested == 0 { current } else { requested };
        Ok(RevisionHash { hash, compact_revision: compacted, revision })
    }

    fn decode(&self, entry: &Entry<'_>) -> Result<Record, FileError> {
        let damaged = |what| self.damaged(entry.offset, what);
        let (revision, is_delete) = decode_revision_key(entry.key).ok_or_else(|| damaged("a revision"))?;
        if entry.value.is_empty() {
            return Ok(Record { revision, is_delete, stored: None });
        }
        let stored = KeyValue::decode(Bytes::copy_from_slice(entry.value));
        let stored = stored.map_err(|_| damaged("a key"))?;
        if stored.key.is_empty() || !is_delete && stored.mod_revision != revision.main {
            return Err(damaged("a key"));
        }
        Ok(Record { revision, is_delete, stored: Some(stored) })
    }
}

#[derive(Default)]
struct Newest {
    last: Option<SubRevision>,
    last_compacted: Option<SubRevision>,
}

/// Goes through bucket `key`.
pub(super) struct Records<'f> {
    file: &'f EtcdFile,
    entries: Cursor<'f>,
}

impl Records<'_> {
    /// The next record, decoded and as it is stored.
    pub(super) fn next(&mut self) -> Result<Option<(Record, Entry<'_>)>, FileError> {
        match self.entries.next()? {
            Some(entry) => Ok(Some((self.file.decode(&entry)?, entry))),
            None => Ok(None),
        }
    }
}

/// Reads a revision key; true for that of a delete.
fn decode_revision_key(key: &[u8]) -> Option<(SubRevision, bool)> {
    let (main, rest) = key.split_first_chunk()?;
    let (sub, mark) = rest.strip_prefix(b"_")?.split_first_chunk()?;
    let is_delete = match mark {
        [] => false,
        [b't'] => true,
        _ => return None,
    };
    let main = i64::from_be_bytes(*main);
    let sub = u32::try_from(i64::from_be_bytes(*sub)).ok()?;
    (main >= 0).then_some((SubRevision { main, sub }, is_delete))
}
