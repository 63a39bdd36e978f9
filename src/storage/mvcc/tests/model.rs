//! A store that keeps every version in one list and computes everything from it, the slow and obvious way.

use std::collections::{BTreeMap, VecDeque};

use prost::Message;

use super::*;
use crate::proto::mvccpb;
use crate::storage::mvcc::hash::RevisionHash;
use crate::storage::mvcc::read::{Change, Event};
use crate::storage::schema::{KeyMeta, SubRevision};

/// Live keys with their versions.
pub(super) type View = BTreeMap<Bytes, (KeyMeta, Bytes)>;

/// One stored version; a tombstone has none.
#[derive(Clone, Debug)]
pub(super) struct Record {
    pub(super) revision: SubRevision,
    pub(super) key: Bytes,
    pub(super) version: Option<(KeyMeta, Bytes)>,
}

/// One change of a transaction.
#[derive(Clone, Debug)]
pub(super) enum Op {
    Put(Bytes, Bytes, i64),
    Delete(Bytes),
    DeleteRange(KeyRange),
}

#[derive(Clone)]
pub(super) struct Model {
    pub(super) revision: i64,
    pub(super) compacted: i64,
    pub(super) records: Vec<Record>,
    pub(super) live: View,
    kept_hashes: VecDeque<RevisionHash>,
}

impl Model {
    pub(super) fn new() -> Model {
        Model {
            revision: FIRST_REVISION,
            compacted: NEVER_COMPACTED,
            records: Vec::new(),
            live: View::new(),
            kept_hashes: VecDeque::new(),
        }
    }

    pub(super) fn apply(&mut self, txn: &[Op]) {
        let mut sub = 0;
        let main = self.revision + 1;
        for op in txn {
            match op {
                Op::Put(key, value, lease) => self.put(SubRevision { main, sub }, key, value, *lease),
                Op::Delete(key) if !self.live.contains_key(key) => continue,
                Op::Delete(key) => self.delete(SubRevision { main, sub }, key),
                Op::DeleteRange(range) => {
                    for key in self.keys_in(range) {
                        self.delete(SubRevision { main, sub }, &key);
                        sub += 1;
                    }
                    continue;
                }
            }
            sub += 1;
        }
        if sub > 0 {
            self.revision = main;
        }
    }

    fn keys_in(&self, range: &KeyRange) -> Vec<Bytes> {
        self.live.keys().filter(|key| range.contains(key)).cloned().collect()
    }

    fn put(&mut self, modified: SubRevision, key: &Bytes, value: &Bytes, lease: i64) {
        let before = self.live.get(key).map(|(meta, _)| *meta);
        let meta = KeyMeta {
            create_revision: before.map_or(modified.main, |meta| meta.create_revision),
            modified,
            version: before.map_or(1, |meta| meta.version + 1),
            lease,
        };
        let version = (meta, value.clone());
        self.live.insert(key.clone(), version.clone());
        self.records.push(Record { revision: modified, key: key.clone(), version: Some(version) });
    }

    fn delete(&mut self, revision: SubRevision, key: &Bytes) {
        self.live.remove(key);
        self.records.push(Record { revision, key: key.clone(), version: None });
    }

    /// The live keys at a revision.
    pub(super) fn at(&self, revision: i64) -> View {
        if revision >= self.revision {
            return self.live.clone();
        }
        let newest = self.newest_at(revision);
        newest.into_iter().filter_map(|(key, record)| Some((key, record.version.clone()?))).collect()
    }

    /// Each key's newest record at a revision.
    fn newest_at(&self, revision: i64) -> BTreeMap<Bytes, &Record> {
        let until = self.records.iter().take_while(|record| record.revision.main <= revision);
        until.map(|record| (record.key.clone(), record)).collect()
    }

    /// What a watcher from `from` is told.
    ///
    /// At the compact revision itself a version may be missing or not if the same revision replaced it: left out.
    pub(super) fn events(&self, from: i64, to: i64) -> Vec<Event> {
        let newest = self.newest_at(self.compacted);
        self.records
            .iter()
            .filter(|record| (from..=to).contains(&record.revision.main))
            .filter(|record| {
                record.revision.main != self.compacted
                    || record.version.is_none()
                    || newest.get(&record.key).is_some_and(|newest| newest.revision == record.revision)
            })
            .map(|record| {
                let change = match record.version.clone() {
                    Some((meta, value)) => Change::Put { meta, value },
                    None => Change::Delete,
                };
                Event { revision: record.revision, key: record.key.clone(), change, previous: None }
            })
            .collect()
    }

    /// True if the event is one that [`Model::events`] leaves out.
    pub(super) fn is_ambiguous(&self, event: &Event) -> bool {
        event.revision.main == self.compacted
            && event.change != Change::Delete
            && self
                .newest_at(self.compacted)
                .get(&event.key)
                .is_none_or(|newest| newest.revision != event.revision)
    }

    /// Finishes a compaction: etcd stores its hash.
    pub(super) fn finish_compaction(&mut self, previous: i64, compacted: i64) {
        let hash = self.hash(previous, compacted, true);
        self.kept_hashes.push_back(RevisionHash { hash, compact_revision: previous, revision: compacted });
        if self.kept_hashes.len() > 10 {
            self.kept_hashes.pop_front();
        }
    }

    pub(super) fn restart(&mut self) {
        self.kept_hashes.clear();
    }

    pub(super) fn hash_kv(&self, revision: i64) -> RevisionHash {
        if let Some(kept) = self.kept_hashes.iter().find(|kept| kept.revision == revision) {
            return *kept;
        }
        let hash = self.hash(self.compacted, revision, false);
        RevisionHash { hash, compact_revision: self.compacted, revision }
    }

    /// etcd's hash over what a finished compaction at `compacted` leaves stored.
    fn hash(&self, compacted: i64, revision: i64, tombstone_keeps: bool) -> u32 {
        let survivors = self.newest_at(compacted);
        let stored = self.records.iter().filter(|record| {
            record.revision.main > compacted
                || survivors.get(&record.key).is_some_and(|newest| {
                    newest.revision == record.revision
                        && (record.version.is_some() || record.revision.main == compacted)
                })
        });
        let newest = self.newest_at(revision);
        let keep: BTreeMap<SubRevision, &Record> = newest
            .values()
            .filter(|record| {
                record.version.is_some() || (tombstone_keeps && record.revision.main == revision)
            })
            .map(|record| (record.revision, *record))
            .collect();
        let mut bytes = b"key".to_vec();
        for record in stored {
            let main = record.revision.main;
            if main > revision
                || (main <= compacted && !keep.is_empty() && !keep.contains_key(&record.revision))
                || (main == compacted && record.version.is_none())
            {
                continue;
            }
            bytes.extend_from_slice(&main.to_be_bytes());
            bytes.push(b'_');
            bytes.extend_from_slice(&u64::from(record.revision.sub).to_be_bytes());
            let mut kv = mvccpb::KeyValue { key: record.key.clone(), ..Default::default() };
            match &record.version {
                None => bytes.push(b't'),
                Some((meta, value)) => {
                    kv.create_revision = meta.create_revision;
                    kv.mod_revision = meta.modified.main;
                    kv.version = meta.version;
                    kv.lease = meta.lease;
                    kv.value = value.clone();
                }
            }
            bytes.extend_from_slice(&kv.encode_to_vec());
        }
        crc32c::crc32c(&bytes)
    }
}
