//! Writing: a run of committed entries becomes one batch.
//!
//! ```text
//! WriteRun::new
//!   Txn: put, delete, get, range ...      entry 1: sees the store and what the run wrote before it
//!   Txn: ...                              entry 2
//! commit                                  one RocksDB batch; heads, counts; then the new revision is visible
//! ```
//!
//! Changes of the run that are not in the engine yet live in an overlay, so reads inside it are exact. A reader outside
//! sees nothing of a run before its commit. A run that is dropped without a commit leaves no trace.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::sync::atomic::Ordering;

use bytes::Bytes;
use rocksdb::DBRawIterator;

use super::read::{self, Change, Event, KeyRecord};
use super::{KeyRange, Store};
use crate::storage::StorageError;
use crate::storage::engine::Batch;
use crate::storage::schema::{self, Family, KeyMeta, MetaKey, SubRevision};

/// The newest state of a key that the run changed; `None` after a delete.
type Pending = Option<(KeyMeta, Bytes)>;

/// One batch in the making; see the module.
pub struct WriteRun<'s> {
    store: &'s Store,
    batch: Batch<'s>,
    /// Looks up keys in the store; made when first needed, for making one costs more than a search of it.
    versions: RefCell<Option<DBRawIterator<'s>>>,
    overlay: BTreeMap<Bytes, Pending>,
    events: Vec<Event>,
    births: Vec<(i64, Bytes, bool)>,
    revision: i64,
    compacted: Option<i64>,
    scratch: Vec<u8>,
    value_scratch: Vec<u8>,
}

impl<'s> WriteRun<'s> {
    /// Starts a run on top of the store's current revision.
    pub fn new(store: &'s Store) -> WriteRun<'s> {
        WriteRun {
            store,
            batch: store.engine.batch(),
            versions: RefCell::default(),
            overlay: BTreeMap::new(),
            events: Vec::new(),
            births: Vec::new(),
            revision: store.revision(),
            compacted: None,
            scratch: Vec::new(),
            value_scratch: Vec::new(),
        }
    }

    /// The revision after the entries of the run so far.
    pub fn revision(&self) -> i64 {
        self.revision
    }

    /// The compact revision after the entries of the run so far.
    pub fn compacted(&self) -> i64 {
        self.compacted.unwrap_or_else(|| self.store.compacted())
    }

    /// The store below; it does not show the run's changes.
    pub fn store(&self) -> &'s Store {
        self.store
    }

    /// The batch, for records that other modules keep beside the keys.
    pub fn batch(&mut self) -> &mut Batch<'s> {
        &mut self.batch
    }

    /// True if the store below already shows everything, so that its iterators can be used.
    pub fn is_clean(&self) -> bool {
        self.batch.is_empty()
    }

    /// Starts a transaction: its changes share the next revision.
    pub fn begin(&mut self) -> Txn<'_, 's> {
        Txn { main: self.revision + 1, sub: 0, run: self }
    }

    /// Promises that nobody reads below `revision` any more.
    pub fn compact(&mut self, revision: i64) {
        self.batch.put(Family::Meta, &MetaKey::Compacted.encode(), &revision.to_be_bytes());
        let first = schema::rev_key(SubRevision { main: 0, sub: 0 });
        let end = schema::rev_key(SubRevision { main: revision, sub: 0 });
        self.batch.delete_range(Family::Rev, &first, &end);
        self.compacted = Some(revision);
    }

    /// Makes the run visible and returns its events in revision order.
    ///
    /// Readers see the new revision when this returns; a crash of the process may still take it back to the last flush,
    /// from which the log replays it.
    ///
    /// # Errors
    /// The engine's; the member must stop then, for the run is lost in memory but not in the log.
    pub fn commit(mut self) -> Result<Vec<Event>, StorageError> {
        if !self.events.is_empty() {
            self.batch.note(MetaKey::Revision, &self.revision.to_be_bytes());
        }
        if self.batch.is_empty() {
            return Ok(self.events);
        }
        self.store.size_estimate.fetch_add(self.batch.size_bytes(), Ordering::Relaxed);
        self.store.engine.write(self.batch)?;
        if !self.overlay.is_empty() {
            let mut heads = self.store.heads.lock();
            for (key, pending) in &self.overlay {
                heads.insert(key, pending.as_ref().map(|(meta, _)| *meta));
            }
        }
        self.store.record_births(self.births, self.revision)?;
        self.store.revision.store(self.revision, Ordering::Release);
        // After the revision: who sees the compaction also sees a revision that it leaves readable.
        if let Some(compacted) = self.compacted {
            self.store.compacted.store(compacted, Ordering::Release);
        }
        Ok(self.events)
    }

    fn head(&self, key: &[u8]) -> Result<Option<KeyMeta>, StorageError> {
        match self.overlay.get(key) {
            Some(pending) => Ok(pending.as_ref().map(|(meta, _)| *meta)),
            None => {
                let (head, is_known) = self.stored_head(key)?;
                if !is_known {
                    self.store.heads.lock().insert(key, head);
                }
                Ok(head)
            }
        }
    }

    /// As [`WriteRun::head`], for a key that is about to change: the commit remembers what it is then.
    fn head_to_replace(&self, key: &[u8]) -> Result<Option<KeyMeta>, StorageError> {
        match self.overlay.get(key) {
            Some(pending) => Ok(pending.as_ref().map(|(meta, _)| *meta)),
            None => Ok(self.stored_head(key)?.0),
        }
    }

    /// The newest version of a key in the store, and whether the metadata cache knew it.
    fn stored_head(&self, key: &[u8]) -> Result<(Option<KeyMeta>, bool), StorageError> {
        if let Some(known) = self.store.heads.lock().get(key) {
            return Ok((known, true));
        }
        let mut versions = self.versions.borrow_mut();
        let versions = versions.get_or_insert_with(|| self.store.engine.versions());
        let found = read::find_version(versions, key, i64::MAX)?;
        Ok((found.map(|(meta, _)| meta), false))
    }

    fn get(&self, key: &[u8]) -> Result<Option<(KeyMeta, Bytes)>, StorageError> {
        match self.overlay.get(key) {
            Some(pending) => Ok(pending.clone()),
            None => self.store.get(key, self.store.revision()),
        }
    }
}

/// True where the simulation has a member store something else than the others.
fn flips_bit() -> bool {
    #[cfg(feature = "sim")]
    let flips = crate::sim::planted(crate::sim::Bug::FlipAppliedBit) && crate::sim::below(4) == 0;
    #[cfg(not(feature = "sim"))]
    let flips = false;
    flips
}

/// One transaction of a run; see [`WriteRun::begin`].
pub struct Txn<'r, 's> {
    run: &'r mut WriteRun<'s>,
    main: i64,
    sub: u32,
}

impl<'s> Txn<'_, 's> {
    /// True once something changed.
    pub fn changed(&self) -> bool {
        self.sub > 0
    }

    /// The revision that a reader inside the transaction sees: the new one once something changed.
    pub fn revision(&self) -> i64 {
        if self.changed() { self.main } else { self.run.revision }
    }

    /// The compact revision at this point of the log.
    pub fn compacted(&self) -> i64 {
        self.run.compacted()
    }

    /// The run's store, without the run's changes.
    pub fn store(&self) -> &'s Store {
        self.run.store
    }

    /// Metadata of a key, the transaction's changes included.
    pub fn head(&self, key: &[u8]) -> Result<Option<KeyMeta>, StorageError> {
        self.run.head(key)
    }

    /// A key with its value, the transaction's changes included.
    pub fn get(&self, key: &[u8]) -> Result<Option<(KeyMeta, Bytes)>, StorageError> {
        self.run.get(key)
    }

    /// Visits the live keys of a range in order, the transaction's changes included, until `visit` returns false.
    pub fn range(
        &self,
        range: &KeyRange,
        mut visit: impl FnMut(&[u8], &KeyMeta, &[u8]) -> bool,
    ) -> Result<(), StorageError> {
        if range.is_empty() {
            return Ok(());
        }
        if let Some(key) = range.as_single() {
            if let Some((meta, value)) = self.get(key)? {
                visit(key, &meta, &value);
            }
            return Ok(());
        }
        let mut changed = self.run.overlay.range::<[u8], _>(range.bounds()).peekable();
        let mut scan = self.run.store.scan(range, self.run.store.revision());
        let mut stored = scan.next()?;
        loop {
            let overlay_first = match (&stored, changed.peek()) {
                (None, None) => return Ok(()),
                (Some(_), None) => false,
                (None, Some(_)) => true,
                (Some(record), Some((key, _))) => key[..] <= *record.key,
            };
            if overlay_first {
                let Some((key, pending)) = changed.next() else { return Ok(()) };
                let replaces = stored.as_ref().is_some_and(|record| record.key == &key[..]);
                if let Some((meta, value)) = pending
                    && !visit(key, meta, value)
                {
                    return Ok(());
                }
                if replaces {
                    stored = scan.next()?;
                }
            } else if let Some(record) = stored {
                if !visit(record.key, &record.meta, record.value) {
                    return Ok(());
                }
                stored = scan.next()?;
            }
        }
    }

    /// Puts a key; `lease` replaces any lease it had, 0 detaches. Returns the version before.
    pub fn put(&mut self, key: Bytes, value: Bytes, lease: i64) -> Result<Option<KeyMeta>, StorageError> {
        let previous = self.run.head_to_replace(&key)?;
        let modified = self.next();
        let meta = match &previous {
            Some(head) => {
                KeyMeta { create_revision: head.create_revision, modified, version: head.version + 1, lease }
            }
            None => KeyMeta { create_revision: self.main, modified, version: 1, lease },
        };
        let run = &mut *self.run;
        run.scratch.clear();
        schema::put_kv_key(&mut run.scratch, &key, modified);
        run.value_scratch.clear();
        schema::put_kv_value(&mut run.value_scratch, &meta, &value);
        run.batch.put(Family::Kv, &run.scratch, &run.value_scratch);
        self.record(&key, previous, Some((meta, value)));
        Ok(previous)
    }

    /// Deletes a key; false if it does not exist.
    pub fn delete(&mut self, key: &Bytes) -> Result<bool, StorageError> {
        let Some(previous) = self.run.head(key)? else { return Ok(false) };
        let modified = self.next();
        let run = &mut *self.run;
        run.scratch.clear();
        schema::put_kv_key(&mut run.scratch, key, modified);
        run.batch.put(Family::Kv, &run.scratch, &schema::TOMBSTONE_VALUE);
        self.record(key, Some(previous), None);
        Ok(true)
    }

    /// Ends the transaction: its changes belong to the run now.
    pub fn finish(self) -> i64 {
        let revision = self.revision();
        self.run.revision = revision;
        revision
    }

    fn next(&mut self) -> SubRevision {
        let revision = SubRevision { main: self.main, sub: self.sub };
        self.sub += 1;
        revision
    }

    /// Notes one change everywhere but in `kv`.
    fn record(&mut self, key: &Bytes, previous: Option<KeyMeta>, now: Pending) {
        let revision = SubRevision { main: self.main, sub: self.sub - 1 };
        let run = &mut *self.run;
        run.batch.put(Family::Rev, &schema::rev_key(revision), &schema::rev_value(key, now.is_none()));
        let old_lease = previous.map_or(0, |meta| meta.lease);
        let new_lease = now.as_ref().map_or(0, |(meta, _)| meta.lease);
        if old_lease != new_lease {
            if old_lease != 0 {
                run.batch.delete(Family::Lease, &schema::lease_attachment_key(old_lease, key));
            }
            if new_lease != 0 {
                let value: &[u8] = if flips_bit() { b"\x01" } else { b"" };
                run.batch.put(Family::Lease, &schema::lease_attachment_key(new_lease, key), value);
            }
        }
        if previous.is_none() != now.is_none() {
            run.births.push((self.main, key.clone(), now.is_some()));
        }
        let change = match &now {
            Some((meta, value)) => Change::Put { meta: *meta, value: value.clone() },
            None => Change::Delete,
        };
        let previous = previous.map(|meta| meta.modified);
        run.events.push(Event { revision, key: key.clone(), change, previous });
        run.overlay.insert(key.clone(), now);
    }

    /// Collects the live keys of a range, at most `limit` (0 for all).
    pub fn collect(&self, range: &KeyRange, limit: usize) -> Result<Vec<KeyRecord>, StorageError> {
        let mut out = Vec::new();
        self.range(range, |key, meta, value| {
            out.push(KeyRecord {
                key: Bytes::copy_from_slice(key),
                meta: *meta,
                value: Bytes::copy_from_slice(value),
            });
            limit == 0 || out.len() < limit
        })?;
        Ok(out)
    }
}
