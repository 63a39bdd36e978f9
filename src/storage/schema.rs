//! Every stored key and record of the state machine; `docs/data_model.md` draws the same bytes.
//!
//! | family | key | value |
//! |---|---|---|
//! | `kv` | escaped user key, `00 01`, inverted main (8 bytes), inverted sub (4 bytes) | flags, create revision, version, lease, value |
//! | `rev` | main (8 bytes), sub (4 bytes) | flags, user key |
//! | `lease` | `l`, lease id (8 bytes); `k`, lease id (8 bytes), user key | `LeaseRecord`; empty |
//! | `meta` | [`MetaKey`] | small records |
//!
//! Integers in keys are big-endian so that byte order is numeric order. In `kv` they are inverted, so the newest
//! version of a key comes first and "the newest at or below revision R" is one seek.

use bytes::BufMut;
use prost::encoding::{WireType, encode_key, encode_varint, encoded_len_varint};

/// A revision with the position of the change inside it: etcd's (main, sub).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SubRevision {
    /// The store revision of the transaction, from 2 up.
    pub main: i64,
    /// The position of the change in its transaction, from 0.
    pub sub: u32,
}

/// What is known of one version of a key besides its value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeyMeta {
    /// Revision that created this incarnation of the key.
    pub create_revision: i64,
    /// Revision of this version.
    pub modified: SubRevision,
    /// Writes since creation; 1 on create.
    pub version: i64,
    /// The attached lease, 0 for none.
    pub lease: i64,
}

/// The column families.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    /// Versions by user key.
    Kv,
    /// User keys by revision: watch order.
    Rev,
    /// Small records of the state machine.
    Meta,
    /// Lease records and the keys attached to them.
    Lease,
}

impl Family {
    /// All families, in the order in which they are opened.
    pub const ALL: [Family; 4] = [Family::Kv, Family::Rev, Family::Meta, Family::Lease];

    /// The family's name in RocksDB.
    pub const fn name(self) -> &'static str {
        match self {
            Family::Kv => "kv",
            Family::Rev => "rev",
            Family::Meta => "meta",
            Family::Lease => "lease",
        }
    }
}

/// Keys of the `meta` family.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MetaKey {
    /// Format version of the whole store: 4 bytes.
    Format,
    /// `LogId` of the last applied entry.
    Applied,
    /// `StoredMembership`: the last applied Raft membership.
    Membership,
    /// Current revision: 8 bytes.
    Revision,
    /// Compact revision: 8 bytes, signed; absent if never compacted.
    Compacted,
    /// Cluster version: text `3.7.0`.
    ClusterVersion,
    /// The version that a downgrade goes to: text `3.6.0`, or nothing once it is over; absent if there never was one.
    Downgrade,
    /// Cluster level: 4 bytes; absent at level 0.
    ClusterLevel,
    /// `Member` by id.
    Member(u64),
    /// A member that there once was; empty value. Its id does not come back.
    Removed(u64),
    /// A raised alarm: member id and alarm type; empty value.
    Alarm(u64, i32),
    /// [`Trail`]: the rolling hash of what was applied. A note of the member's own, left out of what it hashes.
    Trail,
    /// Whether authentication is on: 1 byte; absent if it never was.
    AuthEnabled,
    /// How often users and roles were changed: 8 bytes; absent for never.
    AuthRevision,
}

impl MetaKey {
    /// Prefix of all [`MetaKey::Member`] keys.
    pub const MEMBER_PREFIX: &'static [u8] = b"member/";
    /// Prefix of all [`MetaKey::Removed`] keys.
    pub const REMOVED_PREFIX: &'static [u8] = b"removed/";
    /// Prefix of all [`MetaKey::Alarm`] keys.
    pub const ALARM_PREFIX: &'static [u8] = b"alarm/";
    /// Comes before a user's name; the value is etcd's `authpb.User`.
    pub const AUTH_USER_PREFIX: &'static [u8] = b"auth-user/";
    /// Comes before a role's name; the value is etcd's `authpb.Role`.
    pub const AUTH_ROLE_PREFIX: &'static [u8] = b"auth-role/";

    /// Encodes the key.
    pub fn encode(self) -> Vec<u8> {
        match self {
            MetaKey::Format => b"format".to_vec(),
            MetaKey::Applied => b"applied".to_vec(),
            MetaKey::Membership => b"membership".to_vec(),
            MetaKey::Revision => b"revision".to_vec(),
            MetaKey::Compacted => b"compacted".to_vec(),
            MetaKey::ClusterVersion => b"cluster-version".to_vec(),
            MetaKey::Downgrade => b"downgrade".to_vec(),
            MetaKey::ClusterLevel => b"cluster-level".to_vec(),
            MetaKey::Member(id) => [Self::MEMBER_PREFIX, &id.to_be_bytes()].concat(),
            MetaKey::Removed(id) => [Self::REMOVED_PREFIX, &id.to_be_bytes()].concat(),
            MetaKey::Alarm(id, alarm) => {
                [Self::ALARM_PREFIX, &id.to_be_bytes()[..], &alarm.to_be_bytes()[..]].concat()
            }
            MetaKey::AuthEnabled => b"auth-enabled".to_vec(),
            MetaKey::AuthRevision => b"auth-revision".to_vec(),
            MetaKey::Trail => b"trail".to_vec(),
        }
    }

    /// Decodes the key of a removed member into its id; `None` if it is not one.
    pub fn decode_removed(key: &[u8]) -> Option<u64> {
        Some(u64::from_be_bytes(key.strip_prefix(Self::REMOVED_PREFIX)?.try_into().ok()?))
    }

    /// Decodes an alarm key into member id and alarm type; `None` if it is not one.
    pub fn decode_alarm(key: &[u8]) -> Option<(u64, i32)> {
        let rest = key.strip_prefix(Self::ALARM_PREFIX)?;
        let (id, alarm) = rest.split_at_checked(8)?;
        Some((u64::from_be_bytes(id.try_into().ok()?), i32::from_be_bytes(alarm.try_into().ok()?)))
    }
}

/// The rolling hash of what a run of log entries has written, one mixed into the other.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Trail {
    /// The entry with which the run begins. Two hashes can be compared only if this is the same.
    pub origin: u64,
    /// The entry behind the last one of the run.
    pub next: u64,
    /// The hash; 0 for an empty run.
    pub hash: u64,
}

impl Trail {
    /// How entries are hashed. Raised whenever the same log gives another hash: what is put into a digest, how a record is
    /// encoded, how entries are mixed. Members that do it differently do not compare.
    pub const RECIPE: u32 = 1;

    /// Encodes the stored record.
    pub fn encode(self) -> [u8; 28] {
        let mut out = [0; 28];
        out[..4].copy_from_slice(&Self::RECIPE.to_be_bytes());
        for (at, value) in (4..).step_by(8).zip([self.origin, self.next, self.hash]) {
            out[at..at + 8].copy_from_slice(&value.to_be_bytes());
        }
        out
    }

    /// Decodes the stored record; `None` for one of another recipe.
    pub fn decode(stored: &[u8]) -> Option<Trail> {
        let (recipe, rest) = stored.split_first_chunk::<4>()?;
        let rest: &[u8; 24] = rest.try_into().ok()?;
        let number = |at: usize| rest[at..at + 8].try_into().ok().map(u64::from_be_bytes);
        (u32::from_be_bytes(*recipe) == Self::RECIPE).then_some(Trail {
            origin: number(0)?,
            next: number(8)?,
            hash: number(16)?,
        })
    }
}

/// Bytes after the user key in a `kv` key: terminator, main, sub.
const KV_SUFFIX: usize = 2 + REVISION_BYTES;
/// Encoded size of a [`SubRevision`].
pub const REVISION_BYTES: usize = 12;
/// Ends an escaped user key. 0x00 inside a key becomes `00 FF`, so no key's end sorts after its continuation.
const TERMINATOR: [u8; 2] = [0x00, 0x01];

/// Appends the escaped user key without a terminator: a lower or upper bound for scans.
pub fn put_key_bound(out: &mut Vec<u8>, key: &[u8]) {
    let mut rest = key;
    while let Some(zero) = rest.iter().position(|b| *b == 0) {
        out.extend_from_slice(&rest[..=zero]);
        out.push(0xFF);
        rest = &rest[zero + 1..];
    }
    out.extend_from_slice(rest);
}

/// Appends the part of a `kv` key that all versions of `key` share.
pub fn put_kv_prefix(out: &mut Vec<u8>, key: &[u8]) {
    put_key_bound(out, key);
    out.extend_from_slice(&TERMINATOR);
}

/// Appends a whole `kv` key.
pub fn put_kv_key(out: &mut Vec<u8>, key: &[u8], revision: SubRevision) {
    put_kv_prefix(out, key);
    put_inverted(out, revision);
}

/// Appends the inverted revision that ends a `kv` key.
pub fn put_inverted(out: &mut Vec<u8>, revision: SubRevision) {
    out.extend_from_slice(&(!revision.main.cast_unsigned()).to_be_bytes());
    out.extend_from_slice(&(!revision.sub).to_be_bytes());
}

/// Length of the part of a `kv` key that all versions of its user key share; the RocksDB prefix.
pub fn kv_prefix_len(encoded: &[u8]) -> usize {
    encoded.len().saturating_sub(REVISION_BYTES)
}

/// Reads the revision at the end of a `kv` key; `None` if it is too short.
pub fn kv_revision(encoded: &[u8]) -> Option<SubRevision> {
    let tail = encoded.get(encoded.len().checked_sub(REVISION_BYTES)?..)?;
    let (main, sub) = tail.split_at(8);
    Some(SubRevision {
        main: (!u64::from_be_bytes(main.try_into().ok()?)).cast_signed(),
        sub: !u32::from_be_bytes(sub.try_into().ok()?),
    })
}

/// Writes the user key of a `kv` key into `out`; false if the bytes are not a `kv` key.
pub fn kv_user_key(encoded: &[u8], out: &mut Vec<u8>) -> bool {
    out.clear();
    let Some(end) = encoded.len().checked_sub(KV_SUFFIX) else { return false };
    let mut rest = &encoded[..end];
    while let Some(zero) = rest.iter().position(|b| *b == 0) {
        if rest.get(zero + 1) != Some(&0xFF) {
            return false;
        }
        out.extend_from_slice(&rest[..=zero]);
        rest = &rest[zero + 2..];
    }
    out.extend_from_slice(rest);
    encoded[end..end + 2] == TERMINATOR
}

/// Encodes a `rev` key.
pub fn rev_key(revision: SubRevision) -> [u8; REVISION_BYTES] {
    let mut out = [0; REVISION_BYTES];
    out[..8].copy_from_slice(&revision.main.cast_unsigned().to_be_bytes());
    out[8..].copy_from_slice(&revision.sub.to_be_bytes());
    out
}

/// Decodes a `rev` key.
pub fn decode_rev_key(key: &[u8]) -> Option<SubRevision> {
    let (main, sub) = key.split_at_checked(8)?;
    Some(SubRevision {
        main: u64::from_be_bytes(main.try_into().ok()?).cast_signed(),
        sub: u32::from_be_bytes(sub.try_into().ok()?),
    })
}

const FLAG_TOMBSTONE: u8 = 1;
const FLAG_LEASE: u8 = 2;

/// Encodes a `rev` value.
pub fn rev_value(key: &[u8], tombstone: bool) -> Vec<u8> {
    let mut out = Vec::with_capacity(key.len() + 1);
    out.push(if tombstone { FLAG_TOMBSTONE } else { 0 });
    out.extend_from_slice(key);
    out
}

/// Splits a `rev` value into (is a tombstone, user key).
pub fn decode_rev_value(value: &[u8]) -> Option<(bool, &[u8])> {
    let (flags, key) = value.split_first()?;
    Some((flags & FLAG_TOMBSTONE != 0, key))
}

/// The value of a tombstone in `kv`.
pub const TOMBSTONE_VALUE: [u8; 1] = [FLAG_TOMBSTONE];

/// True if a `kv` value is a tombstone.
pub fn is_tombstone(value: &[u8]) -> bool {
    value.first().is_some_and(|flags| flags & FLAG_TOMBSTONE != 0)
}

/// Appends the value of a put in `kv`; the revision is in the key.
pub fn put_kv_value(out: &mut Vec<u8>, meta: &KeyMeta, value: &[u8]) {
    out.push(if meta.lease == 0 { 0 } else { FLAG_LEASE });
    put_varint(out, meta.create_revision.cast_unsigned());
    put_varint(out, meta.version.cast_unsigned());
    if meta.lease != 0 {
        put_varint(out, meta.lease.cast_unsigned());
    }
    out.extend_from_slice(value);
}

/// Decodes a `kv` value that is not a tombstone into its metadata and the user's value.
pub fn decode_kv_value(encoded: &[u8], modified: SubRevision) -> Option<(KeyMeta, &[u8])> {
    let (flags, mut rest) = encoded.split_first()?;
    let create_revision = take_varint(&mut rest)?.cast_signed();
    let version = take_varint(&mut rest)?.cast_signed();
    let lease = if flags & FLAG_LEASE != 0 { take_varint(&mut rest)?.cast_signed() } else { 0 };
    Some((KeyMeta { create_revision, modified, version, lease }, rest))
}

fn put_varint(out: &mut Vec<u8>, value: u64) {
    encode_varint(value, out);
}

fn take_varint(rest: &mut &[u8]) -> Option<u64> {
    prost::encoding::decode_varint(rest).ok()
}

/// Encodes the key of a lease record.
pub fn lease_key(id: i64) -> [u8; 9] {
    tagged_lease(b'l', id)
}

/// Prefix of the keys attached to a lease.
pub fn lease_attachment_prefix(id: i64) -> [u8; 9] {
    tagged_lease(b'k', id)
}

/// Encodes the link from a lease to one of its keys.
pub fn lease_attachment_key(id: i64, key: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(9 + key.len());
    out.extend_from_slice(&lease_attachment_prefix(id));
    out.extend_from_slice(key);
    out
}

/// First byte of all lease records, and of nothing else, in the `lease` family.
pub const LEASE_RECORD_PREFIX: &[u8] = b"l";

fn tagged_lease(tag: u8, id: i64) -> [u8; 9] {
    let mut out = [tag; 9];
    out[1..].copy_from_slice(&id.cast_unsigned().to_be_bytes());
    out
}

/// Appends `mvccpb.KeyValue` as etcd encodes it: fields in number order, defaults left out.
pub fn put_key_value(out: &mut impl BufMut, key: &[u8], meta: &KeyMeta, value: &[u8]) {
    put_bytes_field(out, 1, key);
    put_int_field(out, 2, meta.create_revision);
    put_int_field(out, 3, meta.modified.main);
    put_int_field(out, 4, meta.version);
    put_bytes_field(out, 5, value);
    put_int_field(out, 6, meta.lease);
}

/// Appends the `mvccpb.KeyValue` that etcd stores for a delete: only the key.
pub fn put_deleted_key_value(out: &mut impl BufMut, key: &[u8]) {
    put_bytes_field(out, 1, key);
}

fn put_bytes_field(out: &mut impl BufMut, tag: u32, bytes: &[u8]) {
    if !bytes.is_empty() {
        encode_key(tag, WireType::LengthDelimited, out);
        encode_varint(bytes.len() as u64, out);
        out.put_slice(bytes);
    }
}

fn put_int_field(out: &mut impl BufMut, tag: u32, value: i64) {
    if value != 0 {
        encode_key(tag, WireType::Varint, out);
        encode_varint(value.cast_unsigned(), out);
    }
}

/// Encoded size of [`put_key_value`].
pub fn key_value_len(key: &[u8], meta: &KeyMeta, value: &[u8]) -> usize {
    let bytes_len =
        |b: &[u8]| if b.is_empty() { 0 } else { 1 + encoded_len_varint(b.len() as u64) + b.len() };
    let int_len = |v: i64| if v == 0 { 0 } else { 1 + encoded_len_varint(v.cast_unsigned()) };
    bytes_len(key)
        + int_len(meta.create_revision)
        + int_len(meta.modified.main)
        + int_len(meta.version)
        + bytes_len(value)
        + int_len(meta.lease)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn encoded(key: &[u8], main: i64, sub: u32) -> Vec<u8> {
        let mut out = Vec::new();
        put_kv_key(&mut out, key, SubRevision { main, sub });
        out
    }

    #[test]
    fn kv_keys_sort_by_key_then_newest_first() {
        let ordered = [
            encoded(b"", 5, 0),
            encoded(b"\0", 5, 0),
            encoded(b"\0\0", 5, 0),
            encoded(b"\0\x01", 5, 0),
            encoded(b"a", 9, 1),
            encoded(b"a", 9, 0),
            encoded(b"a", 2, 0),
            encoded(b"a\0", 7, 0),
            encoded(b"a\0b", 7, 0),
            encoded(b"a\x01", 7, 0),
            encoded(b"ab", 3, 0),
            encoded(b"\xFF", 3, 0),
        ];
        for pair in ordered.windows(2) {
            assert!(pair[0] < pair[1], "{:?} < {:?}", pair[0], pair[1]);
        }
    }

    #[test]
    fn kv_keys_round_trip() {
        let mut key = Vec::new();
        for user_key in [&b""[..], b"a", b"\0", b"a\0\0b", b"\0\xFF\x01", b"\xFF\xFF"] {
            let bytes = encoded(user_key, 77, 3);
            assert!(kv_user_key(&bytes, &mut key));
            assert_eq!(key, user_key);
            assert_eq!(kv_revision(&bytes), Some(SubRevision { main: 77, sub: 3 }));
        }
        assert!(!kv_user_key(b"short", &mut key));
    }

    #[test]
    fn trails_round_trip_and_those_of_another_recipe_are_not_read() {
        let trail = Trail { origin: 3, next: u64::MAX, hash: 1 << 63 };
        let mut stored = trail.encode();
        assert_eq!(Trail::decode(&stored), Some(trail));
        assert_eq!(Trail::decode(&stored[1..]), None);
        stored[3] += 1;
        assert_eq!(Trail::decode(&stored), None);
    }

    #[test]
    fn scan_bounds_fall_between_keys() {
        let mut bound = Vec::new();
        put_key_bound(&mut bound, b"a\0");
        assert!(encoded(b"a", 1, 0) < bound);
        assert!(bound < encoded(b"a\0", 1, 0));
    }

    #[test]
    fn values_round_trip() {
        let modified = SubRevision { main: 9, sub: 2 };
        for lease in [0, 7, i64::MIN] {
            let meta = KeyMeta { create_revision: 4, modified, version: 3, lease };
            let mut out = Vec::new();
            put_kv_value(&mut out, &meta, b"value");
            assert_eq!(decode_kv_value(&out, modified), Some((meta, &b"value"[..])));
        }
    }

    #[test]
    fn key_value_is_etcds_encoding() {
        // etcd-api test vector: put c=lv with lease 2324035718736983308 at revision 9.
        let meta = KeyMeta {
            create_revision: 9,
            modified: SubRevision { main: 9, sub: 0 },
            version: 1,
            lease: 2_324_035_718_736_983_308,
        };
        let mut out = Vec::new();
        put_key_value(&mut out, b"c", &meta, b"lv");
        let hex: String = out.iter().map(|b| format!("{b:02x}")).collect();
        assert_eq!(hex, "0a01631009180920012a026c76308cea8ca5c4c5a8a020");
        assert_eq!(out.len(), key_value_len(b"c", &meta, b"lv"));
    }
}
