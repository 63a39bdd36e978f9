//! etcd's backend file as a store.
//!
//! Taken are keys with their history, leases, alarms, users and roles. Members, the position in the log and the cluster
//! version are those of a new cluster, which the caller decides; etcd's restore does the same.

use std::collections::BTreeSet;
use std::path::Path;

use bytes::Bytes;
use prost::Message;

use super::file::{EtcdFile, FileError};
use super::{ALARM, AUTH, AUTH_ROLES, AUTH_USERS, LEASE};
use crate::proto::etcdserverpb::AlarmMember;
use crate::proto::mvccpb::KeyValue;
use crate::proto::skegpb::{LeaseRecord, Member};
use crate::storage::load::{Chunk, Loader};
use crate::storage::mvcc::{FIRST_REVISION, KeyRange, NEVER_COMPACTED, RangeEnd, Store, StoreOptions};
use crate::storage::schema::{self, Family, KeyMeta, MetaKey, SubRevision};
use crate::storage::{EngineOptions, StorageError};

/// Memory of the store while it is filled; what fills it goes past both.
const ENGINE: EngineOptions = EngineOptions { memtable_bytes: 64 << 20, block_cache_bytes: 16 << 20 };
/// Size of a batch, in bytes.
const BATCH_BYTES: u64 = 4 << 20;

/// Why a file does not become a store.
#[derive(Debug, thiserror::Error)]
pub enum ImportError {
    /// The file is not taken.
    #[error(transparent)]
    File(#[from] FileError),
    /// The store cannot be written.
    #[error(transparent)]
    Storage(#[from] StorageError),
    /// The revision would leave its range.
    #[error("the revision cannot be raised by {by}: it would be greater than any")]
    Bump {
        /// By how much it should be.
        by: u64,
    },
}

/// The cluster that a store begins in.
#[derive(Clone, Debug, Default)]
pub struct Beginning {
    /// Its members.
    pub members: Vec<Member>,
    /// `LogId` of the entry that the store stands at, encoded.
    pub applied: Vec<u8>,
    /// `StoredMembership`, encoded.
    pub membership: Vec<u8>,
    /// By how much the revision is raised; if it is, everything before is compacted.
    pub bump_revision: u64,
}

/// What a file came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Imported {
    /// Current revision.
    pub revision: i64,
    /// Compact revision; [`NEVER_COMPACTED`] for none.
    pub compacted: i64,
    /// Records of keys.
    pub records: u64,
    /// Authentication is on.
    pub auth_enabled: bool,
}

/// Makes a store of a file in `dir`, which must not exist; durable on return. After an error `dir` is of no use.
///
/// # Errors
/// [`ImportError`]; the file is never changed.
pub fn import(file: &EtcdFile, dir: &Path, beginning: &Beginning) -> Result<Imported, ImportError> {
    file.check_version()?;
    let store = Store::open(dir, StoreOptions { engine: ENGINE, heads_bytes: 1 << 20 })?;
    let stands = load_keys(&store, file, dir)?;
    let mut imported = bump(stands, beginning.bump_revision)?;
    let leases = write_leases(&store, file)?;
    imported.auth_enabled = write_records(&store, file)?;
    write_beginning(&store, beginning, imported)?;
    drop(store);
    // The lease of a key is that of its newest version: that takes a look at all keys in their order.
    let store = Store::open(dir, StoreOptions { engine: ENGINE, heads_bytes: 1 << 20 })?;
    attach_keys(&store, &leases)?;
    store.engine().flush()?;
    Ok(imported)
}

fn load_keys(store: &Store, file: &EtcdFile, dir: &Path) -> Result<Imported, ImportError> {
    let compacted = file.compacted()?;
    let mut imported =
        Imported { revision: FIRST_REVISION.max(compacted), compacted, records: 0, auth_enabled: false };
    let mut loader = Loader::start(store.engine(), dir)?;
    let (mut versions, mut order) = (Chunk::new(Family::Kv), Chunk::new(Family::Rev));
    let mut records = file.records()?;
    while let Some((record, _)) = records.next()? {
        imported.revision = imported.revision.max(record.revision.main);
        let Some(stored) = record.stored else { continue };
        imported.records += 1;
        versions.add(
            |out| schema::put_kv_key(out, &stored.key, record.revision),
            |out| put_version(out, &stored, record.revision, record.is_delete),
        );
        // Nobody asks for the order of what is compacted.
        if record.revision.main >= compacted {
            order.add(
                |out| out.extend_from_slice(&schema::rev_key(record.revision)),
                |out| out.extend_from_slice(&schema::rev_value(&stored.key, record.is_delete)),
            );
        }
        for (chunk, family) in [(&mut versions, Family::Kv), (&mut order, Family::Rev)] {
            if chunk.is_full() {
                loader.add(std::mem::replace(chunk, Chunk::new(family)))?;
            }
        }
    }
    for chunk in [versions, order] {
        if !chunk.is_empty() {
            loader.add(chunk)?;
        }
    }
    loader.finish()?;
    Ok(imported)
}

fn put_version(out: &mut Vec<u8>, stored: &KeyValue, modified: SubRevision, is_delete: bool) {
    if is_delete {
        out.extend_from_slice(&schema::TOMBSTONE_VALUE);
    } else {
        let KeyValue { create_revision, version, lease, .. } = *stored;
        let meta = KeyMeta { create_revision, modified, version, lease };
        schema::put_kv_value(out, &meta, &stored.value);
    }
}

fn bump(mut imported: Imported, by: u64) -> Result<Imported, ImportError> {
    if by > 0 {
        let raised = imported.revision.checked_add_unsigned(by).ok_or(ImportError::Bump { by })?;
        imported.revision = raised;
        imported.compacted = raised;
    }
    Ok(imported)
}

/// Writes the leases, and gives their ids.
fn write_leases(store: &Store, file: &EtcdFile) -> Result<BTreeSet<i64>, ImportError> {
    let mut ids = BTreeSet::new();
    let mut batch = store.engine().batch();
    file.for_each(LEASE, |entry| {
        // The fields of etcd's `Lease`, which are ours.
        let record = LeaseRecord::decode(entry.value).ok();
        let record = record.filter(|record| record.id.to_be_bytes() == entry.key);
        let record = record.ok_or_else(|| file.damaged(entry.offset, "a lease"))?;
        ids.insert(record.id);
        batch.put(Family::Lease, &schema::lease_key(record.id), &record.encode_to_vec());
        Ok(())
    })?;
    store.engine().write(batch)?;
    Ok(ids)
}

/// Writes alarms, users and roles; true if authentication is on.
fn write_records(store: &Store, file: &EtcdFile) -> Result<bool, ImportError> {
    let mut batch = store.engine().batch();
    file.for_each(ALARM, |entry| {
        let alarm = AlarmMember::decode(entry.key).map_err(|_| file.damaged(entry.offset, "an alarm"))?;
        batch.put(Family::Meta, &MetaKey::Alarm(alarm.member_id, alarm.alarm).encode(), b"");
        Ok(())
    })?;
    let mut auth_enabled = false;
    file.for_each(AUTH, |entry| {
        let key = match entry.key {
            b"authEnabled" => {
                auth_enabled = entry.value == [1];
                MetaKey::AuthEnabled
            }
            b"authRevision" if entry.value.len() == 8 => MetaKey::AuthRevision,
            _ => return Err(file.damaged(entry.offset, "a setting of authentication")),
        };
        batch.put(Family::Meta, &key.encode(), entry.value);
        Ok(())
    })?;
    for (bucket, prefix) in [(AUTH_USERS, MetaKey::AUTH_USER_PREFIX), (AUTH_ROLES, MetaKey::AUTH_ROLE_PREFIX)]
    {
        file.for_each(bucket, |entry| {
            batch.put(Family::Meta, &[prefix, entry.key].concat(), entry.value);
            Ok(())
        })?;
    }
    store.engine().write(batch)?;
    Ok(auth_enabled)
}

fn write_beginning(store: &Store, beginning: &Beginning, imported: Imported) -> Result<(), StorageError> {
    let mut batch = store.engine().batch();
    for member in &beginning.members {
        batch.put(Family::Meta, &MetaKey::Member(member.id).encode(), &member.encode_to_vec());
    }
    batch.put(Family::Meta, &MetaKey::Applied.encode(), &beginning.applied);
    batch.put(Family::Meta, &MetaKey::Membership.encode(), &beginning.membership);
    if imported.revision > FIRST_REVISION {
        batch.put(Family::Meta, &MetaKey::Revision.encode(), &imported.revision.to_be_bytes());
    }
    if imported.compacted > NEVER_COMPACTED {
        batch.put(Family::Meta, &MetaKey::Compacted.encode(), &imported.compacted.to_be_bytes());
    }
    store.engine().write(batch)
}

/// Links leases to the keys that hang on them; one to a lease that does not exist counts for nothing.
fn attach_keys(store: &Store, leases: &BTreeSet<i64>) -> Result<(), StorageError> {
    if leases.is_empty() {
        return Ok(());
    }
    let everything = KeyRange { start: Bytes::new(), end: RangeEnd::Unbounded };
    let mut keys = store.scan_past_cache(&everything, store.revision());
    let mut batch = store.engine().batch();
    while let Some(record) = keys.next()? {
        if leases.contains(&record.meta.lease) {
            let link = schema::lease_attachment_key(record.meta.lease, record.key);
            batch.put(Family::Lease, &link, b"");
            if batch.size_bytes() > BATCH_BYTES {
                store.engine().write(std::mem::replace(&mut batch, store.engine().batch()))?;
            }
        }
    }
    store.engine().write(batch)
}
