//! etcd's backend: the same state as ours, as buckets of a [bbolt file](super::bolt).
//!
//! | bucket | key | value |
//! |---|---|---|
//! | `alarm` | `AlarmMember` | empty |
//! | `auth`, `authUsers`, `authRoles` | `authEnabled`, `authRevision`; a name | what it says; `User`, `Role` |
//! | `cluster` | `clusterVersion`, `downgrade` | text; JSON |
//! | `key` | main, `_`, sub, and `t` for a delete | `KeyValue` |
//! | `lease` | id | `Lease` |
//! | `members`, `members_removed` | id in hexadecimal | JSON; `removed` |
//! | `meta` | `consistent_index`, `term`, `confState`, `storageVersion`, `scheduledCompactRev`, `finishedCompactRev` | |
//!
//! `key` is in the order of revisions, ours is in the order of keys. [`Export`] turns one into the other in bounded memory
//! (`sorter`) and at one moment of the store, while the store goes on.
//!
//! etcd: `server/storage/schema`, `server/storage/mvcc/revision.go`.

mod convert;
mod export;
mod file;
#[cfg(any(test, fuzzing))]
pub mod fuzz;
mod import;
mod sorter;
#[cfg(test)]
mod tests;

pub use convert::{Conversion, ConvertError, Target};
pub use export::{Export, ExportError, ExportOptions};
pub use file::{EtcdFile, FileError, FileStatus};
pub use import::{Beginning, ImportError, Imported, import};

use crate::storage::schema::SubRevision;

/// Longest revision key: that of a delete.
const REVISION_KEY_MAX: usize = 18;

const ALARM: &[u8] = b"alarm";
const AUTH: &[u8] = b"auth";
const AUTH_ROLES: &[u8] = b"authRoles";
const AUTH_USERS: &[u8] = b"authUsers";
const CLUSTER: &[u8] = b"cluster";
const KEY: &[u8] = b"key";
const LEASE: &[u8] = b"lease";
const MEMBERS: &[u8] = b"members";
const MEMBERS_REMOVED: &[u8] = b"members_removed";
const META: &[u8] = b"meta";

/// A revision as etcd writes it: big-endian, so that byte order is the order of revisions.
fn put_revision_key(out: &mut Vec<u8>, revision: SubRevision, is_delete: bool) {
    out.extend_from_slice(&revision.main.to_be_bytes());
    out.push(b'_');
    out.extend_from_slice(&u64::from(revision.sub).to_be_bytes());
    if is_delete {
        out.push(b't');
    }
}

/// A member as etcd stores it.
#[derive(serde::Serialize)]
struct MemberJson<'m> {
    id: u64,
    #[serde(rename = "peerURLs")]
    peer_urls: &'m [String],
    #[serde(rename = "isLearner", skip_serializing_if = "std::ops::Not::not")]
    is_learner: bool,
    #[serde(skip_serializing_if = "str::is_empty")]
    name: &'m str,
    #[serde(rename = "clientURLs", skip_serializing_if = "<[String]>::is_empty")]
    client_urls: &'m [String],
}

/// A downgrade, as etcd stores it.
#[derive(serde::Serialize)]
struct DowngradeJson<'t> {
    #[serde(rename = "target-version")]
    target: &'t str,
    enabled: bool,
}

/// Who votes, as etcd stores it.
#[derive(serde::Serialize)]
struct ConfStateJson {
    #[serde(skip_serializing_if = "Vec::is_empty")]
    voters: Vec<u64>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    learners: Vec<u64>,
    auto_leave: bool,
}
