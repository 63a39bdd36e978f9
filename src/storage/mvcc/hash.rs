//! HashKV: etcd's checksum over the history, equal on every member and in etcd for the same history.
//!
//! etcd hashes its records in revision order. Ours lie in key order, and fetching a million of them in the other order
//! would be a million random reads; but a CRC of a concatenation can be computed from the CRCs of its parts. So one scan
//! takes the CRC of each record, the parts are sorted by revision, and then combined.
//!
//! etcd: `server/storage/mvcc/hash.go`. Which records count is independent of what compaction has already dropped.

use std::collections::VecDeque;

use rocksdb::DBRawIterator;

use super::{MvccError, Store};
use crate::storage::StorageError;
use crate::storage::schema::{self, Family, MetaKey, SubRevision};

/// Compaction hashes kept. etcd: `hashStorageMaxSize`.
const KEPT_COMPACTION_HASHES: usize = 10;

/// The answer to HashKV.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RevisionHash {
    /// CRC-32C of the records.
    pub hash: u32,
    /// Compact revision that decided which records count.
    pub compact_revision: i64,
    /// Revision hashed up to.
    pub revision: i64,
}

/// Hashes of finished compactions, newest revisions last; in memory only, as etcd's.
#[derive(Default)]
pub(super) struct CompactionHashes {
    kept: VecDeque<RevisionHash>,
}

/// The CRC of one record, to be put in order, and what decides if it counts.
struct Part {
    revision: SubRevision,
    crc: u32,
    len: u32,
    /// The newest version of its key at the revision hashed, and a put: in etcd's keep set.
    kept: bool,
    /// What a finished compaction leaves of its key: the newest version at or below the compact revision, if a put.
    survives: bool,
}

impl Store {
    /// Hashes the history up to a revision, 0 for the current one. Scans all keys: for blocking threads.
    ///
    /// # Errors
    /// [`MvccError::FutureRevision`], and [`MvccError::Compacted`] below the compact revision (equal is allowed).
    pub fn hash_kv(&self, requested: i64) -> Result<(RevisionHash, i64), MvccError> {
        loop {
            let (current, compacted) = self.consistent_revisions();
            if requested > 0 {
                if let Some(kept) = self.kept_compaction_hash(requested) {
                    return Ok((kept, current));
                }
                if requested < compacted {
                    return Err(MvccError::Compacted);
                }
                if requested > current {
                    return Err(MvccError::FutureRevision);
                }
            }
            // A negative revision is taken as it is: nothing was written below it.
            let revision = if requested == 0 { current } else { requested };
            let hash = self.hash_records(compacted, revision, KeepTombstones::Never)?;
            if self.compacted() == compacted {
                return Ok((RevisionHash { hash, compact_revision: compacted, revision }, current));
            }
        }
    }

    /// Hashes everything stored, except for where the log stands. A testing aid: it says nothing across versions.
    pub fn hash_all(&self) -> Result<u32, StorageError> {
        let positions = [MetaKey::Applied.encode(), MetaKey::Trail.encode()];
        let mut crc = 0;
        for family in Family::ALL {
            crc = crc32c::crc32c_append(crc, family.name().as_bytes());
            let mut iterator = self.engine.iterate_past_cache(family, b"", None);
            while let Some((key, value)) = iterator.item() {
                if family != Family::Meta || !positions.iter().any(|position| key == position) {
                    crc = crc32c::crc32c_append(crc32c::crc32c_append(crc, key), value);
                }
                iterator.next();
            }
            iterator.status()?;
        }
        Ok(crc)
    }

    /// Computes and keeps the hash of a compaction; runs before anything that it makes unreachable is dropped.
    pub(super) fn keep_compaction_hash(&self, previous: i64, compacted: i64) -> Result<(), StorageError> {
        let hash = self.hash_records(previous, compacted, KeepTombstones::AtRevision)?;
        let mut hashes = self.compaction_hashes.lock();
        hashes.kept.push_back(RevisionHash { hash, compact_revision: previous, revision: compacted });
        if hashes.kept.len() > KEPT_COMPACTION_HASHES {
            hashes.kept.pop_front();
        }
        Ok(())
    }

    /// The revisions of the compactions whose hashes are kept, newest first.
    pub fn hashed_compactions(&self) -> Vec<i64> {
        self.compaction_hashes.lock().kept.iter().rev().map(|kept| kept.revision).collect()
    }

    fn kept_compaction_hash(&self, revision: i64) -> Option<RevisionHash> {
        self.compaction_hashes.lock().kept.iter().find(|kept| kept.revision == revision).copied()
    }

    /// Hashes the records up to `revision` that count after a compaction at `compacted`.
    ///
    /// Of what that compaction covers, the keep set counts; without a keep set, what the compaction leaves. Either way
    /// it does not matter how much of the rest is still stored.
    fn hash_records(&self, compacted: i64, revision: i64, keep: KeepTombstones) -> Result<u32, StorageError> {
        let mut parts = Vec::new();
        let mut versions = Versions::new(self, compacted, revision, keep);
        versions.collect(&mut parts)?;
        let has_keep_set = versions.any_kept;
        parts.retain(|part: &Part| {
            part.revision.main > compacted || if has_keep_set { part.kept } else { part.survives }
        });
        parts.sort_unstable_by_key(|part| part.revision);
        let seed = crc32c::crc32c(b"key");
        Ok(parts.iter().fold(seed, |crc, part| crc32c::crc32c_combine(crc, part.crc, part.len as usize)))
    }
}

/// If a tombstone at the very revision hashed makes a keep set. It does for the hash that a compaction takes.
#[derive(Clone, Copy, PartialEq, Eq)]
enum KeepTombstones {
    Never,
    AtRevision,
}

/// One scan over all versions.
struct Versions<'s> {
    iterator: DBRawIterator<'s>,
    compacted: i64,
    revision: i64,
    keep: KeepTombstones,
    any_kept: bool,
    buffer: Vec<u8>,
}

impl<'s> Versions<'s> {
    fn new(store: &'s Store, compacted: i64, revision: i64, keep: KeepTombstones) -> Versions<'s> {
        let iterator = store.engine.iterate_past_cache(Family::Kv, b"", None);
        Versions { iterator, compacted, revision, keep, any_kept: false, buffer: Vec::new() }
    }

    /// Collects the parts at or below the revision.
    fn collect(&mut self, parts: &mut Vec<Part>) -> Result<(), StorageError> {
        let damaged = || StorageError::Damaged { what: "key" };
        let mut prefix: Vec<u8> = Vec::new();
        let mut key = Vec::new();
        let mut newest_seen = false;
        let mut newest_compacted_seen = false;
        while let Some((encoded, stored)) = self.iterator.item() {
            let this = &encoded[..schema::kv_prefix_len(encoded)];
            if this != prefix {
                prefix.clear();
                prefix.extend_from_slice(this);
                newest_seen = false;
                newest_compacted_seen = false;
                if !schema::kv_user_key(encoded, &mut key) {
                    return Err(damaged());
                }
            }
            let revision = schema::kv_revision(encoded).ok_or_else(damaged)?;
            if revision.main <= self.revision {
                let tombstone = schema::is_tombstone(stored);
                let newest = !std::mem::replace(&mut newest_seen, true);
                let kept = newest && !tombstone;
                self.any_kept |= kept
                    || newest && self.keep == KeepTombstones::AtRevision && revision.main == self.revision;
                let covered = revision.main <= self.compacted;
                let survives = covered && !std::mem::replace(&mut newest_compacted_seen, true) && !tombstone;
                if !(tombstone && revision.main == self.compacted) {
                    encode_record(&mut self.buffer, &key, revision, stored)?;
                    let len = u32::try_from(self.buffer.len()).map_err(|_| damaged())?;
                    let crc = crc32c::crc32c(&self.buffer);
                    parts.push(Part { revision, crc, len, kept, survives });
                }
            }
            self.iterator.next();
        }
        Ok(self.iterator.status()?)
    }
}

/// Encodes a record as etcd stores it: revision key, then the key-value.
fn encode_record(
    out: &mut Vec<u8>,
    key: &[u8],
    revision: SubRevision,
    stored: &[u8],
) -> Result<(), StorageError> {
    out.clear();
    out.extend_from_slice(&revision.main.to_be_bytes());
    out.push(b'_');
    out.extend_from_slice(&u64::from(revision.sub).to_be_bytes());
    if schema::is_tombstone(stored) {
        out.push(b't');
        schema::put_deleted_key_value(out, key);
        return Ok(());
    }
    let (meta, value) =
        schema::decode_kv_value(stored, revision).ok_or(StorageError::Damaged { what: "key version" })?;
    schema::put_key_value(out, key, &meta, value);
    Ok(())
}
