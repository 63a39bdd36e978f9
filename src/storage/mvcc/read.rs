//! Reading at a revision: one key, a range, and the history that watchers replay.

use bytes::Bytes;
use rocksdb::{DBPinnableSlice, DBRawIterator};

use super::{KeyRange, RangeEnd, Store};
use crate::storage::schema::{self, Family, KeyMeta, SubRevision};
use crate::storage::{Engine, StorageError};

/// Versions stepped over one by one before a seek to the next key is cheaper.
const STEPS_BEFORE_SEEK: u32 = 8;

/// One live key as a scan sees it; borrowed from the iterator.
#[derive(Clone, Copy, Debug)]
pub struct Record<'a> {
    /// User key.
    pub key: &'a [u8],
    /// Metadata of the version read.
    pub meta: KeyMeta,
    /// Value of the version read.
    pub value: &'a [u8],
}

/// One live key, owned.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeyRecord {
    /// User key.
    pub key: Bytes,
    /// Metadata of the version read.
    pub meta: KeyMeta,
    /// Value of the version read.
    pub value: Bytes,
}

/// What a change was.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// A put with the version it made.
    Put {
        /// Metadata of the new version.
        meta: KeyMeta,
        /// The new value.
        value: Bytes,
    },
    /// A delete.
    Delete,
}

/// One change in revision order: what a watcher is told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    /// When.
    pub revision: SubRevision,
    /// User key.
    pub key: Bytes,
    /// What.
    pub change: Change,
    /// The version that the change replaced, if the writer still knew it.
    pub previous: Option<SubRevision>,
}

impl Event {
    /// True for a put that began the key's life: it has no previous version.
    pub fn is_create(&self) -> bool {
        matches!(&self.change, Change::Put { meta, .. } if meta.create_revision == self.revision.main)
    }

    /// Memory held by the event, in bytes.
    pub fn size_bytes(&self) -> usize {
        let value = match &self.change {
            Change::Put { value, .. } => value.len(),
            Change::Delete => 0,
        };
        size_of::<Event>() + self.key.len() + value
    }
}

/// What a reader of history wants with a change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wish {
    /// The change, with its version.
    Read,
    /// The next change.
    Skip,
    /// No more changes, this one included.
    Stop,
}

/// How a scan walks the files: with or without filling the block cache.
type Iterate<'s> = fn(&'s Engine, Family, &[u8], Option<Vec<u8>>) -> DBRawIterator<'s>;

impl Store {
    /// The version of one key at a revision, with its value.
    pub fn get(&self, key: &[u8], revision: i64) -> Result<Option<(KeyMeta, Bytes)>, StorageError> {
        let known = self.heads.lock().get(key);
        if let Some(head) = known {
            // A head may be newer than the revision, and a missing one may have lived at it.
            if let Some(meta) = head
                && meta.modified.main <= revision
                && let Some(value) = self.value_of(key, meta.modified)?
            {
                return Ok(Some((meta, value)));
            }
        }
        self.version_at(key, revision)
    }

    /// The value written to `key` at exactly this revision.
    fn value_of(&self, key: &[u8], revision: SubRevision) -> Result<Option<Bytes>, StorageError> {
        let Some(stored) = self.stored_version(key, revision)? else { return Ok(None) };
        if schema::is_tombstone(&stored) {
            return Ok(None);
        }
        let (_, value) = decode(&stored, revision)?;
        Ok(Some(Bytes::copy_from_slice(value)))
    }

    fn version_at(&self, key: &[u8], revision: i64) -> Result<Option<(KeyMeta, Bytes)>, StorageError> {
        let mut versions = self.engine.versions();
        let found = find_version(&mut versions, key, revision)?;
        Ok(found.map(|(meta, value)| (meta, Bytes::copy_from_slice(value))))
    }

    /// Walks the live keys of a range in key order as of a revision.
    pub fn scan(&self, range: &KeyRange, revision: i64) -> Scan<'_> {
        self.scan_with(Engine::iterate, range, revision)
    }

    /// As [`Store::scan`], leaving the block cache to others: for walks over much of the store.
    pub fn scan_past_cache(&self, range: &KeyRange, revision: i64) -> Scan<'_> {
        self.scan_with(Engine::iterate_past_cache, range, revision)
    }

    fn scan_with<'s>(&'s self, iterate: Iterate<'s>, range: &KeyRange, revision: i64) -> Scan<'s> {
        let mut from = Vec::with_capacity(range.start.len() + 2);
        schema::put_key_bound(&mut from, &range.start);
        let to = match &range.end {
            RangeEnd::Unbounded => None,
            RangeEnd::Before(end) => Some(bound(end)),
            RangeEnd::Single => Some(bound(&[&range.start[..], b"\0"].concat())),
        };
        Scan {
            iterator: iterate(&self.engine, Family::Kv, &from, to),
            from,
            revision,
            key: Vec::new(),
            prefix: Vec::new(),
            positioned: false,
        }
    }

    /// Calls `visit` for every wanted change with revision in `[from, to]`, in order.
    ///
    /// `wants` is asked for every change, in order, with its revision, key and whether it is a delete; only for the wanted
    /// ones is the version read. A change whose version compaction has already dropped is left out.
    pub fn history(
        &self,
        from: i64,
        to: i64,
        mut wants: impl FnMut(SubRevision, &[u8], bool) -> Wish,
        mut visit: impl FnMut(Event),
    ) -> Result<(), StorageError> {
        let first = schema::rev_key(SubRevision { main: from, sub: 0 });
        let end = schema::rev_key(SubRevision { main: to.saturating_add(1), sub: 0 });
        let mut iterator = self.engine.iterate(Family::Rev, &first, Some(end.to_vec()));
        while let Some((key, value)) = iterator.item() {
            let damaged = StorageError::Damaged { what: "revision index" };
            let Some(revision) = schema::decode_rev_key(key) else { return Err(damaged) };
            let Some((tombstone, user_key)) = schema::decode_rev_value(value) else { return Err(damaged) };
            match wants(revision, user_key, tombstone) {
                Wish::Stop => return Ok(()),
                Wish::Skip => {}
                Wish::Read => {
                    if let Some(change) = self.change_at(user_key, revision, tombstone)? {
                        let key = Bytes::copy_from_slice(user_key);
                        visit(Event { revision, key, change, previous: None });
                    }
                }
            }
            iterator.next();
        }
        Ok(iterator.status()?)
    }

    /// The version that an event replaced, as etcd shows it: the key just before the event's revision.
    ///
    /// `None` for a create, and when that revision is compacted.
    pub fn version_before(&self, event: &Event) -> Result<Option<(KeyMeta, Bytes)>, StorageError> {
        let before = event.revision.main - 1;
        if event.is_create() || before < self.compacted() {
            return Ok(None);
        }
        let found = self.version_replaced(event, before)?;
        // Compacted meanwhile: what was found may be older than what was there.
        Ok(found.filter(|_| before >= self.compacted()))
    }

    fn version_replaced(&self, event: &Event, before: i64) -> Result<Option<(KeyMeta, Bytes)>, StorageError> {
        if let Some(previous) = event.previous.filter(|previous| previous.main <= before)
            && let Some(stored) = self.stored_version(&event.key, previous)?
            && !schema::is_tombstone(&stored)
        {
            let (meta, value) = decode(&stored, previous)?;
            return Ok(Some((meta, Bytes::copy_from_slice(value))));
        }
        self.version_at(&event.key, before)
    }

    fn stored_version(
        &self,
        key: &[u8],
        revision: SubRevision,
    ) -> Result<Option<DBPinnableSlice<'_>>, StorageError> {
        let mut encoded = Vec::with_capacity(key.len() + 16);
        schema::put_kv_key(&mut encoded, key, revision);
        self.engine.get(Family::Kv, &encoded)
    }

    fn change_at(
        &self,
        key: &[u8],
        revision: SubRevision,
        tombstone: bool,
    ) -> Result<Option<Change>, StorageError> {
        if tombstone {
            return Ok(Some(Change::Delete));
        }
        let Some(stored) = self.stored_version(key, revision)? else { return Ok(None) };
        let (meta, value) = decode(&stored, revision)?;
        Ok(Some(Change::Put { meta, value: Bytes::copy_from_slice(value) }))
    }
}

/// The version of one key at a revision, by an iterator from [`Engine::versions`].
pub(super) fn find_version<'i>(
    versions: &'i mut DBRawIterator<'_>,
    key: &[u8],
    revision: i64,
) -> Result<Option<(KeyMeta, &'i [u8])>, StorageError> {
    let mut from = Vec::with_capacity(key.len() + 16);
    schema::put_kv_prefix(&mut from, key);
    let prefix_len = from.len();
    schema::put_inverted(&mut from, SubRevision { main: revision, sub: u32::MAX });
    versions.seek(&from);
    if !versions.valid() {
        versions.status()?;
        return Ok(None);
    }
    let Some((found, stored)) = versions.item() else { return Ok(None) };
    if found.len() != from.len() || found[..prefix_len] != from[..prefix_len] || schema::is_tombstone(stored)
    {
        return Ok(None);
    }
    let modified = schema::kv_revision(found).ok_or(StorageError::Damaged { what: "key" })?;
    Ok(Some(decode(stored, modified)?))
}

fn bound(key: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(key.len() + 2);
    schema::put_key_bound(&mut out, key);
    out
}

fn decode(stored: &[u8], modified: SubRevision) -> Result<(KeyMeta, &[u8]), StorageError> {
    schema::decode_kv_value(stored, modified).ok_or(StorageError::Damaged { what: "key version" })
}

/// A walk over live keys; see [`Store::scan`].
pub struct Scan<'s> {
    iterator: DBRawIterator<'s>,
    /// Where it began.
    from: Vec<u8>,
    revision: i64,
    /// The user key at the iterator.
    key: Vec<u8>,
    /// The encoded prefix at the iterator.
    prefix: Vec<u8>,
    /// True if the iterator stands on a record already returned.
    positioned: bool,
}

impl Scan<'_> {
    /// Starts again from the beginning, over exactly the same records: the iterator holds on to what it first saw.
    pub fn restart(&mut self) {
        self.iterator.seek(&self.from);
        self.positioned = false;
    }

    /// The next live key, borrowed until the next call.
    ///
    /// # Errors
    /// [`StorageError`] if the engine fails or a stored record does not decode.
    #[expect(clippy::should_implement_trait, reason = "it lends from itself, which an Iterator cannot")]
    pub fn next(&mut self) -> Result<Option<Record<'_>>, StorageError> {
        if self.positioned {
            self.skip_versions();
        }
        self.positioned = loop {
            match self.visible_version()? {
                Step::Found => break true,
                Step::Hidden => self.skip_versions(),
                Step::End => break false,
            }
        };
        if !self.positioned {
            return Ok(None);
        }
        let damaged = StorageError::Damaged { what: "key" };
        let Some((encoded, stored)) = self.iterator.item() else { return Err(damaged) };
        let Some(modified) = schema::kv_revision(encoded) else { return Err(damaged) };
        if !schema::kv_user_key(encoded, &mut self.key) {
            return Err(damaged);
        }
        let (meta, value) = decode(stored, modified)?;
        Ok(Some(Record { key: &self.key, meta, value }))
    }

    /// Moves to the version of the current key that the revision sees.
    fn visible_version(&mut self) -> Result<Step, StorageError> {
        self.prefix.clear();
        let mut steps = 0;
        loop {
            let Some((encoded, stored)) = self.iterator.item() else {
                self.iterator.status()?;
                return Ok(Step::End);
            };
            let prefix = &encoded[..schema::kv_prefix_len(encoded)];
            if self.prefix.is_empty() {
                self.prefix.extend_from_slice(prefix);
            } else if self.prefix != prefix {
                // Every version of the key is newer: start again with the next key.
                self.prefix.clear();
                self.prefix.extend_from_slice(prefix);
                steps = 0;
            }
            let revision = schema::kv_revision(encoded).ok_or(StorageError::Damaged { what: "key" })?;
            if revision.main <= self.revision {
                return Ok(if schema::is_tombstone(stored) { Step::Hidden } else { Step::Found });
            }
            steps += 1;
            if steps < STEPS_BEFORE_SEEK {
                self.iterator.next();
            } else {
                let mut target = self.prefix.clone();
                schema::put_inverted(&mut target, SubRevision { main: self.revision, sub: u32::MAX });
                self.iterator.seek(&target);
                steps = 0;
            }
        }
    }

    /// Moves past all versions of the current key.
    fn skip_versions(&mut self) {
        for _ in 0..STEPS_BEFORE_SEEK {
            self.iterator.next();
            let Some(encoded) = self.iterator.key() else { return };
            if encoded[..schema::kv_prefix_len(encoded)] != *self.prefix {
                return;
            }
        }
        // Versions are inverted revisions, so nothing sorts after twelve 0xFF bytes under this prefix.
        let mut target = self.prefix.clone();
        target.extend_from_slice(&[0xFF; schema::REVISION_BYTES]);
        self.iterator.seek(&target);
        if self.iterator.key() == Some(&target) {
            self.iterator.next();
        }
    }
}

enum Step {
    /// The iterator stands on a live version.
    Found,
    /// The key does not live at the revision.
    Hidden,
    /// No more keys.
    End,
}
