//! The store as of one moment, as etcd's backend file.
//!
//! ```text
//! view: RocksDB snapshot, iterators that pin its files
//!   │ versions by key ──> sorter: by revision; small values are carried along, of large ones the key
//!   │ measure: lengths in order ──> how many pages, where the root is
//!   └ write: pages from first to last; large values are looked up in the view
//! ```
//!
//! What is written is what etcd would hold after its compaction has run to the end: which versions those are is decided by
//! revisions, and not by what RocksDB has dropped so far. So no two exports at a revision differ in `key`.

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::path::PathBuf;

use prost::Message;
use rocksdb::DBRawIterator;

use super::sorter::{Sorted, Sorter};
use super::{
    ALARM, AUTH, AUTH_ROLES, AUTH_USERS, CLUSTER, ConfStateJson, DowngradeJson, KEY, LEASE, MEMBERS,
    MEMBERS_REMOVED, META, MemberJson, REVISION_KEY_MAX, put_revision_key,
};
use crate::proto::etcdserverpb::AlarmMember;
use crate::proto::skegpb::{LeaseRecord, LogId, Member};
use crate::storage::StorageError;
use crate::storage::bolt::{Plan, Value, WriteError, Writer};
use crate::storage::engine::View;
use crate::storage::mvcc::{NEVER_COMPACTED, Store};
use crate::storage::schema::{self, Family, MetaKey, SubRevision};

/// Memory for sorting.
const SORT_BYTES: usize = if cfg!(test) { 20 << 10 } else { 24 << 20 };
/// Values up to this size are carried along while sorting: that costs less than finding each a second time.
const CARRIED_MAX: usize = 1024;
/// The revision of etcd's auth store before anything was done to it.
const FIRST_AUTH_REVISION: u64 = 1;

const CARRIED_PUT: u8 = 0;
const CARRIED_DELETE: u8 = 1;
const LOOKED_UP: u8 = 2;

/// Why there is no export.
#[derive(Debug, thiserror::Error)]
pub enum ExportError {
    /// The store failed.
    #[error(transparent)]
    Storage(#[from] StorageError),
    /// Sorting needs more of the disk than it may have.
    #[error("a snapshot needs {needed_bytes} bytes of free disk space or more to sort the keys in")]
    NoRoom {
        /// What it needs, as far as it is known.
        needed_bytes: u64,
    },
    /// The output failed, or the file for sorting.
    #[error("write a snapshot: {0}")]
    Io(#[from] io::Error),
    /// The file cannot be put together.
    #[error("write a snapshot: {0}")]
    Write(WriteError),
}

impl From<WriteError> for ExportError {
    fn from(error: WriteError) -> ExportError {
        match error {
            WriteError::Io(error) => ExportError::Io(error),
            other => ExportError::Write(other),
        }
    }
}

/// Where an export may work.
#[derive(Clone, Debug)]
pub struct ExportOptions {
    /// Directory for a file to sort in.
    pub dir: PathBuf,
    /// Most bytes of that file.
    pub dir_bytes_max: u64,
}

/// Entries of a bucket.
type Entries = BTreeMap<Vec<u8>, Vec<u8>>;

/// A measured file, and the moment that it is of.
pub struct Export<'s> {
    view: View<'s>,
    versions: DBRawIterator<'s>,
    records: Sorted,
    /// All buckets but `key` and `lease`.
    small: BTreeMap<&'static [u8], Entries>,
    version: String,
    plan: Plan,
}

impl<'s> Export<'s> {
    /// Sorts and measures; reads all keys: for blocking threads.
    ///
    /// # Errors
    /// [`ExportError`].
    pub fn measure(store: &'s Store, options: &ExportOptions) -> Result<Export<'s>, ExportError> {
        // What is in memory would be held there by the view for as long as it lasts.
        store.engine().flush()?;
        let (view, mut versions, compacted) = store.view()?;
        let records = sort(&mut versions, compacted, options)?;
        let (small, version) = small_buckets(&view, compacted)?;
        let plan = Plan::default();
        let mut export = Export { view, versions, records, small, version, plan };
        let mut measuring = Writer::measuring();
        export.feed(&mut measuring, true)?;
        export.plan = measuring.measured()?;
        Ok(export)
    }

    /// Size of the file.
    pub fn size_bytes(&self) -> u64 {
        self.plan.size_bytes()
    }

    /// The storage version in the file, such as `3.7.0`; empty before the cluster has one.
    pub fn storage_version(&self) -> &str {
        &self.version
    }

    /// Writes the file from front to back, and gives the output back.
    ///
    /// # Errors
    /// [`ExportError`].
    pub fn write<W: Write>(&mut self, out: W) -> Result<W, ExportError> {
        let mut writer = Writer::new(out, self.plan)?;
        self.feed(&mut writer, false)?;
        Ok(writer.finish()?)
    }

    fn feed<W: Write>(&mut self, writer: &mut Writer<W>, measure: bool) -> Result<(), ExportError> {
        for (name, entries) in &self.small {
            writer.bucket(name)?;
            match *name {
                KEY => feed_keys(writer, &self.records, &mut self.versions, measure)?,
                LEASE => feed_leases(writer, &self.view)?,
                _ => {}
            }
            for (key, value) in entries {
                writer.put(key, Value::Bytes(value))?;
            }
        }
        Ok(())
    }
}

/// Feeds the sorted records; values that were not carried are looked up, but for measuring.
fn feed_keys<W: Write>(
    writer: &mut Writer<W>,
    records: &Sorted,
    versions: &mut DBRawIterator<'_>,
    measure: bool,
) -> Result<(), ExportError> {
    let damaged = || StorageError::Damaged { what: "key version" };
    let mut sorted = records.read()?;
    let mut revision_key = Vec::with_capacity(REVISION_KEY_MAX);
    let (mut stored_key, mut user_key, mut encoded) = (Vec::new(), Vec::new(), Vec::new());
    while let Some((revision, payload)) = sorted.next()? {
        let (kind, rest) = payload.split_first().ok_or_else(damaged)?;
        revision_key.clear();
        put_revision_key(&mut revision_key, revision, *kind == CARRIED_DELETE);
        if *kind != LOOKED_UP {
            writer.put(&revision_key, Value::Bytes(rest))?;
            continue;
        }
        let (length, prefix) = rest.split_first_chunk().ok_or_else(damaged)?;
        if measure {
            let length = usize::try_from(u32::from_le_bytes(*length)).map_err(|_| damaged())?;
            writer.put(&revision_key, Value::Length(length))?;
            continue;
        }
        stored_key.clear();
        stored_key.extend_from_slice(prefix);
        schema::put_inverted(&mut stored_key, revision);
        versions.seek(&stored_key);
        match versions.item() {
            Some((key, stored)) if key == stored_key && schema::kv_user_key(key, &mut user_key) => {
                encode_put(&mut encoded, &user_key, revision, stored)?;
                writer.put(&revision_key, Value::Bytes(&encoded))?;
            }
            _ => {
                versions.status().map_err(StorageError::from)?;
                return Err(damaged().into());
            }
        }
        // A large value must not be paid for to the end.
        encoded.clear();
        encoded.shrink_to(CARRIED_MAX);
    }
    Ok(())
}

fn encode_put(
    out: &mut Vec<u8>,
    user_key: &[u8],
    revision: SubRevision,
    stored: &[u8],
) -> Result<(), StorageError> {
    let decoded = schema::decode_kv_value(stored, revision);
    let (meta, value) = decoded.ok_or(StorageError::Damaged { what: "key version" })?;
    out.clear();
    schema::put_key_value(out, user_key, &meta, value);
    Ok(())
}

fn feed_leases<W: Write>(writer: &mut Writer<W>, view: &View<'_>) -> Result<(), ExportError> {
    let mut leases = view.iterate(Family::Lease, schema::LEASE_RECORD_PREFIX, None);
    while let Some((key, value)) = leases.item() {
        let Some(id) = key.strip_prefix(schema::LEASE_RECORD_PREFIX) else { break };
        let record = LeaseRecord::decode(value).map_err(|_| StorageError::Damaged { what: "lease" })?;
        // The fields of etcd's `Lease`, which are ours.
        writer.put(id, Value::Bytes(&record.encode_to_vec()))?;
        leases.next();
    }
    leases.status().map_err(StorageError::from)?;
    Ok(())
}

/// Puts the versions that a compaction at `compacted` leaves in the order of their revisions.
fn sort(
    versions: &mut DBRawIterator<'_>,
    compacted: i64,
    options: &ExportOptions,
) -> Result<Sorted, ExportError> {
    let damaged = || StorageError::Damaged { what: "key version" };
    let mut sorter = Sorter::new(&options.dir, SORT_BYTES, options.dir_bytes_max);
    let (mut prefix, mut user_key, mut encoded) = (Vec::new(), Vec::new(), Vec::new());
    let mut is_known_key = false;
    let mut newest_compacted_seen = false;
    while let Some((key, stored)) = versions.item() {
        let this = &key[..schema::kv_prefix_len(key)];
        if !is_known_key || this != prefix {
            prefix.clear();
            prefix.extend_from_slice(this);
            is_known_key = true;
            newest_compacted_seen = false;
            if !schema::kv_user_key(key, &mut user_key) {
                return Err(StorageError::Damaged { what: "key" }.into());
            }
        }
        let revision = schema::kv_revision(key).ok_or_else(damaged)?;
        let is_delete = schema::is_tombstone(stored);
        let is_covered = revision.main <= compacted;
        let is_hidden = is_covered && std::mem::replace(&mut newest_compacted_seen, true);
        // etcd keeps a tombstone at the compact revision itself, for watchers that start there.
        let is_gone = is_hidden || is_covered && is_delete && revision.main < compacted;
        if is_delete && !is_gone {
            encoded.clear();
            schema::put_deleted_key_value(&mut encoded, &user_key);
            sorter.push(revision, &[&[CARRIED_DELETE], &encoded])?;
        } else if !is_gone {
            let (meta, value) = schema::decode_kv_value(stored, revision).ok_or_else(damaged)?;
            // With half of the room on the disk used, the rest is for what cannot be left out.
            let has_room = sorter.file_bytes_left() > options.dir_bytes_max / 2;
            if value.len() <= CARRIED_MAX && has_room {
                encoded.clear();
                schema::put_key_value(&mut encoded, &user_key, &meta, value);
                sorter.push(revision, &[&[CARRIED_PUT], &encoded])?;
            } else {
                let length = schema::key_value_len(&user_key, &meta, value);
                let length = u32::try_from(length).map_err(|_| damaged())?;
                sorter.push(revision, &[&[LOOKED_UP], &length.to_le_bytes(), &prefix])?;
            }
        }
        versions.next();
    }
    versions.status().map_err(StorageError::from)?;
    Ok(sorter.finish())
}

/// Reads everything else, for it is little; `key` and `lease` are there, and empty. Also gives the storage version.
fn small_buckets(
    view: &View<'_>,
    compacted: i64,
) -> Result<(BTreeMap<&'static [u8], Entries>, String), StorageError> {
    let names = [ALARM, AUTH, AUTH_ROLES, AUTH_USERS, CLUSTER, KEY, LEASE, MEMBERS, MEMBERS_REMOVED, META];
    let mut buckets: BTreeMap<&'static [u8], Entries> = names.map(|name| (name, Entries::new())).into();
    let mut put = |bucket: &'static [u8], key: &[u8], value: &[u8]| {
        buckets.entry(bucket).or_default().insert(key.to_vec(), value.to_vec());
    };
    let (mut voters, mut learners) = (Vec::new(), Vec::new());
    let mut version = String::new();
    let mut records = view.iterate(Family::Meta, b"", None);
    while let Some((key, value)) = records.item() {
        if key.starts_with(MetaKey::MEMBER_PREFIX) {
            let member = Member::decode(value).map_err(|_| StorageError::Damaged { what: "member" })?;
            if member.is_learner { &mut learners } else { &mut voters }.push(member.id);
            put(MEMBERS, format!("{:x}", member.id).as_bytes(), &member_json(&member));
        } else if let Some(id) = MetaKey::decode_removed(key) {
            put(MEMBERS_REMOVED, format!("{id:x}").as_bytes(), b"removed");
        } else if let Some((member_id, alarm)) = MetaKey::decode_alarm(key) {
            put(ALARM, &AlarmMember { member_id, alarm }.encode_to_vec(), b"");
        } else if key == MetaKey::ClusterVersion.encode() {
            let text = std::str::from_utf8(value);
            version = text.map_err(|_| StorageError::Damaged { what: "cluster version" })?.to_owned();
            put(CLUSTER, b"clusterVersion", value);
            // Storage and cluster always have the same version: a store of skeg is the same in both.
            put(META, b"storageVersion", value);
        } else if key == MetaKey::Downgrade.encode() {
            let target = std::str::from_utf8(value);
            let target = target.map_err(|_| StorageError::Damaged { what: "downgrade" })?;
            put(CLUSTER, b"downgrade", &json(&DowngradeJson { target, enabled: !target.is_empty() }));
        } else if let Some(name) = key.strip_prefix(MetaKey::AUTH_USER_PREFIX) {
            put(AUTH_USERS, name, value);
        } else if let Some(name) = key.strip_prefix(MetaKey::AUTH_ROLE_PREFIX) {
            put(AUTH_ROLES, name, value);
        } else if key == MetaKey::AuthEnabled.encode() {
            put(AUTH, b"authEnabled", value);
        } else if key == MetaKey::AuthRevision.encode() {
            put(AUTH, b"authRevision", value);
        } else if key == MetaKey::Applied.encode() {
            let applied =
                LogId::decode(value).map_err(|_| StorageError::Damaged { what: "applied entry" })?;
            put(META, b"consistent_index", &applied.index.to_be_bytes());
            put(META, b"term", &applied.term.to_be_bytes());
        }
        records.next();
    }
    records.status()?;
    put(META, b"confState", &json(&ConfStateJson { voters, learners, auto_leave: false }));
    if compacted > NEVER_COMPACTED {
        let mut revision = Vec::new();
        put_revision_key(&mut revision, SubRevision { main: compacted, sub: 0 }, false);
        put(META, b"scheduledCompactRev", &revision);
        put(META, b"finishedCompactRev", &revision);
    }
    let auth = buckets.entry(AUTH).or_default();
    auth.entry(b"authRevision".to_vec()).or_insert_with(|| FIRST_AUTH_REVISION.to_be_bytes().to_vec());
    Ok((buckets, version))
}

fn member_json(member: &Member) -> Vec<u8> {
    json(&MemberJson {
        id: member.id,
        peer_urls: &member.peer_urls,
        is_learner: member.is_learner,
        name: &member.name,
        client_urls: &member.client_urls,
    })
}

fn json(value: &impl serde::Serialize) -> Vec<u8> {
    serde_json::to_vec(value).expect("numbers, texts and lists are JSON")
}
