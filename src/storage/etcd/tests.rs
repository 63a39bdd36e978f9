use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use bytes::Bytes;
use prost::Message;

use super::{
    Beginning, EtcdFile, Export, ExportError, ExportOptions, FileError, ImportError, REVISION_KEY_MAX, import,
};
use crate::proto::mvccpb::KeyValue;
use crate::proto::skegpb::{LeaseRecord, LogId, Member};
use crate::storage::EngineOptions;
use crate::storage::bolt::{Bolt, PAGE_BYTES};
use crate::storage::mvcc::read::{Change, Event};
use crate::storage::mvcc::write::WriteRun;
use crate::storage::mvcc::{NEVER_COMPACTED, Store, StoreOptions};
use crate::storage::schema::{self, Family, MetaKey};

/// What `key` holds: by revision key, the value.
type Records = BTreeMap<Vec<u8>, Vec<u8>>;

fn open(dir: &Path) -> Store {
    let engine = EngineOptions { memtable_bytes: 4 << 20, block_cache_bytes: 4 << 20 };
    Store::open(dir, StoreOptions { engine, heads_bytes: 1 << 13 }).expect("the store opens")
}

/// Transactions at random: puts of all sizes, deletes, several changes in one.
fn write(store: &Store, random: &mut fastrand::Rng, transactions: usize) -> Vec<Event> {
    let mut events = Vec::new();
    for _ in 0..transactions {
        let mut run = WriteRun::new(store);
        let mut txn = run.begin();
        let mut keys = BTreeSet::new();
        for _ in 0..random.usize(1..4) {
            let key = Bytes::from(vec![random.u8(0..3); random.usize(1..9)]);
            if !keys.insert(key.clone()) {
                continue;
            }
            if random.u8(0..4) == 0 {
                txn.delete(&key).expect("it is written");
            } else {
                let length = match random.u8(0..20) {
                    0 => random.usize(0..70_000),
                    1..8 => random.usize(900..1200),
                    _ => random.usize(0..50),
                };
                txn.put(key, vec![random.u8(..); length].into(), random.i64(-1..2)).expect("it is written");
            }
        }
        txn.finish();
        events.extend(run.commit().expect("it commits"));
    }
    events
}

/// What etcd holds after all of it, and a compaction: of each key nothing that the newest version at or below it hides.
fn expected(events: &[Event], compacted: i64) -> Records {
    let mut records = Records::new();
    for (at, event) in events.iter().enumerate() {
        let is_covered = event.revision.main <= compacted;
        let later = &events[at + 1..];
        let is_hidden =
            is_covered && later.iter().any(|e| e.key == event.key && e.revision.main <= compacted);
        let (key, is_delete) = (event.key.clone(), matches!(event.change, Change::Delete));
        if is_hidden || is_covered && is_delete && event.revision.main < compacted {
            continue;
        }
        let stored = match &event.change {
            Change::Delete => KeyValue { key, ..KeyValue::default() },
            Change::Put { meta, value } => KeyValue {
                key,
                create_revision: meta.create_revision,
                mod_revision: event.revision.main,
                version: meta.version,
                value: value.clone(),
                lease: meta.lease,
            },
        };
        let mut revision = event.revision.main.to_be_bytes().to_vec();
        revision.push(b'_');
        revision.extend_from_slice(&i64::from(event.revision.sub).to_be_bytes());
        revision.extend(is_delete.then_some(b't'));
        assert!(revision.len() <= REVISION_KEY_MAX);
        records.insert(revision, stored.encode_to_vec());
    }
    records
}

/// Exports into a file, checks every page of it, and reads one bucket.
struct Exported(tempfile::TempDir);

impl Exported {
    fn of(export: &mut Export<'_>) -> Exported {
        let dir = tempfile::tempdir().expect("a directory");
        let file = export.write(Vec::new()).expect("it is written");
        assert_eq!(file.len() as u64, export.size_bytes());
        assert_eq!(file.len() % PAGE_BYTES, 0);
        std::fs::write(dir.path().join("db"), file).expect("it is written");
        let exported = Exported(dir);
        exported.bolt().check().expect("every page is as it should be");
        exported
    }

    fn file(&self) -> EtcdFile {
        EtcdFile::open(&self.0.path().join("db")).expect("it opens")
    }

    fn bolt(&self) -> Bolt {
        Bolt::open(&self.0.path().join("db")).expect("it opens")
    }

    fn bucket(&self, name: &str) -> Records {
        let bolt = self.bolt();
        let mut cursor = bolt.bucket(name.as_bytes()).expect("it reads").expect("there is such a bucket");
        let mut entries = Records::new();
        while let Some(entry) = cursor.next().expect("it reads") {
            entries.insert(entry.key.to_vec(), entry.value.to_vec());
        }
        entries
    }

    fn text(&self, bucket: &str, key: &str) -> String {
        String::from_utf8(self.bucket(bucket)[key.as_bytes()].clone()).expect("text")
    }
}

fn options(dir: &Path) -> ExportOptions {
    ExportOptions { dir: dir.to_owned(), dir_bytes_max: u64::MAX }
}

#[test]
fn an_export_is_the_history_of_its_moment_in_etcds_records() {
    for seed in 0..4 {
        let mut random = fastrand::Rng::with_seed(seed);
        let (dir, scratch) = (tempfile::tempdir().expect("one"), tempfile::tempdir().expect("another"));
        let store = open(dir.path());
        let mut events = write(&store, &mut random, 250);
        let mut export = Export::measure(&store, &options(scratch.path())).expect("it is measured");
        let before = expected(&events, NEVER_COMPACTED);

        // Whatever is written, compacted and dropped meanwhile is none of its business.
        events.extend(write(&store, &mut random, 150));
        let compacted = events[random.usize(events.len() / 2..events.len())].revision.main;
        let mut run = WriteRun::new(&store);
        run.compact(compacted);
        run.commit().expect("it commits");
        store.finish_compaction(NEVER_COMPACTED, compacted).expect("it finishes");
        store.rewrite().expect("the files are rewritten");
        assert!(Exported::of(&mut export).bucket("key") == before, "seed {seed}");

        events.extend(write(&store, &mut random, 50));
        let mut export = Export::measure(&store, &options(scratch.path())).expect("it is measured");
        let exported = Exported::of(&mut export);
        assert!(exported.bucket("key") == expected(&events, compacted), "seed {seed}, compacted");
        let finished = exported.bucket("meta")[&b"finishedCompactRev"[..]].clone();
        assert_eq!(finished, [&compacted.to_be_bytes()[..], b"_", &[0; 8]].concat());
        assert_eq!(finished, exported.bucket("meta")[&b"scheduledCompactRev"[..]]);
    }
}

#[test]
fn a_compaction_counts_before_its_second_half() {
    let (dir, scratch) = (tempfile::tempdir().expect("one"), tempfile::tempdir().expect("another"));
    let store = open(dir.path());
    let events = write(&store, &mut fastrand::Rng::with_seed(9), 200);
    let mut run = WriteRun::new(&store);
    run.compact(150);
    run.commit().expect("it commits");
    let mut export = Export::measure(&store, &options(scratch.path())).expect("it is measured");
    assert!(Exported::of(&mut export).bucket("key") == expected(&events, 150));
}

#[test]
fn too_little_room_to_sort_in_is_said() {
    let (dir, scratch) = (tempfile::tempdir().expect("one"), tempfile::tempdir().expect("another"));
    let store = open(dir.path());
    let events = write(&store, &mut fastrand::Rng::with_seed(5), 2000);
    // Enough for the keys, not for the values.
    let tight = ExportOptions { dir_bytes_max: 200 << 10, ..options(scratch.path()) };
    let mut export = Export::measure(&store, &tight).expect("it is measured");
    assert!(Exported::of(&mut export).bucket("key") == expected(&events, NEVER_COMPACTED));
    let none = ExportOptions { dir_bytes_max: 1000, ..options(scratch.path()) };
    assert!(matches!(Export::measure(&store, &none), Err(ExportError::NoRoom { .. })));
}

#[test]
fn everything_but_keys_is_there_too() {
    let (dir, scratch) = (tempfile::tempdir().expect("one"), tempfile::tempdir().expect("another"));
    let store = open(dir.path());
    let mut batch = store.engine().batch();
    for id in [-3, 7, i64::MAX] {
        let record = LeaseRecord { id, ttl_seconds: 60, remaining_seconds: i64::from(id == 7) };
        batch.put(Family::Lease, &schema::lease_key(id), &record.encode_to_vec());
        batch.put(Family::Lease, &schema::lease_attachment_key(id, b"key"), b"");
    }
    let voter = Member {
        id: 0xabc,
        name: "m1".to_owned(),
        peer_urls: vec!["http://a:1".to_owned()],
        client_urls: vec!["http://b:2".to_owned()],
        is_learner: false,
    };
    let learner =
        Member { id: u64::MAX, is_learner: true, client_urls: vec![], name: String::new(), ..voter.clone() };
    for member in [&voter, &learner] {
        batch.put(Family::Meta, &MetaKey::Member(member.id).encode(), &member.encode_to_vec());
    }
    batch.put(Family::Meta, &MetaKey::Removed(5).encode(), b"");
    batch.put(Family::Meta, &MetaKey::Alarm(0xabc, 1).encode(), b"");
    batch.put(Family::Meta, &MetaKey::ClusterVersion.encode(), b"3.7.0");
    let applied = LogId { term: 3, node_id: 0, index: 77 };
    batch.put(Family::Meta, &MetaKey::Applied.encode(), &applied.encode_to_vec());
    store.engine().write(batch).expect("it is written");

    let mut export = Export::measure(&store, &options(scratch.path())).expect("it is measured");
    assert_eq!(export.storage_version(), "3.7.0");
    let exported = Exported::of(&mut export);
    let names = [
        "alarm",
        "auth",
        "authRoles",
        "authUsers",
        "cluster",
        "key",
        "lease",
        "members",
        "members_removed",
        "meta",
    ];
    let bolt = exported.bolt();
    let mut buckets = bolt.buckets().expect("they are read");
    for name in names {
        assert_eq!(buckets.next().expect("it reads").expect("one more").key, name.as_bytes());
    }
    assert!(buckets.next().expect("it reads").is_none());
    let member = r#"{"id":2748,"peerURLs":["http://a:1"],"name":"m1","clientURLs":["http://b:2"]}"#;
    assert_eq!(exported.text("members", "abc"), member);
    let member = r#"{"id":18446744073709551615,"peerURLs":["http://a:1"],"isLearner":true}"#;
    assert_eq!(exported.text("members", "ffffffffffffffff"), member);
    assert_eq!(exported.text("members_removed", "5"), "removed");
    assert_eq!(exported.text("cluster", "clusterVersion"), "3.7.0");
    assert_eq!(exported.text("meta", "storageVersion"), "3.7.0");
    assert_eq!(
        exported.text("meta", "confState"),
        r#"{"voters":[2748],"learners":[18446744073709551615],"auto_leave":false}"#
    );
    let meta = exported.bucket("meta");
    assert_eq!(meta[&b"consistent_index"[..]], 77_u64.to_be_bytes());
    assert_eq!(meta[&b"term"[..]], 3_u64.to_be_bytes());
    assert!(!meta.contains_key(&b"finishedCompactRev"[..]));
    assert_eq!(exported.bucket("auth")[&b"authRevision"[..]], 1_u64.to_be_bytes());
    assert_eq!(exported.bucket("alarm"), Records::from([(vec![0x08, 0xbc, 0x15, 0x10, 0x01], vec![])]));
    let leases = exported.bucket("lease");
    assert_eq!(leases.len(), 3);
    assert_eq!(leases[&7_i64.to_be_bytes()[..]], [0x08, 7, 0x10, 60, 0x18, 1]);
}

#[test]
fn a_store_that_is_made_of_an_export_holds_the_same() {
    for seed in 0..4 {
        let mut random = fastrand::Rng::with_seed(seed);
        let (dir, scratch) = (tempfile::tempdir().expect("one"), tempfile::tempdir().expect("another"));
        let store = open(dir.path());
        let events = write(&store, &mut random, 300);
        let mut batch = store.engine().batch();
        let lease = LeaseRecord { id: 1, ttl_seconds: 60, remaining_seconds: 7 };
        batch.put(Family::Lease, &schema::lease_key(1), &lease.encode_to_vec());
        batch.put(Family::Meta, &MetaKey::Alarm(9, 1).encode(), b"");
        batch.put(Family::Meta, &MetaKey::AuthEnabled.encode(), &[1]);
        batch.put(Family::Meta, &MetaKey::AuthRevision.encode(), &5_u64.to_be_bytes());
        batch.put(Family::Meta, &[MetaKey::AUTH_USER_PREFIX, b"u"].concat(), b"user");
        batch.put(Family::Meta, &[MetaKey::AUTH_ROLE_PREFIX, b"r"].concat(), b"role");
        store.engine().write(batch).expect("it is written");
        let compacted = if seed == 0 { NEVER_COMPACTED } else { random.i64(2..store.revision() + 1) };
        if compacted > 0 {
            let mut run = WriteRun::new(&store);
            run.compact(compacted);
            run.commit().expect("it commits");
        }
        let mut export = Export::measure(&store, &options(scratch.path())).expect("it is measured");
        let exported = Exported::of(&mut export);

        let target = scratch.path().join("store");
        let imported = import(&exported.file(), &target, &Beginning::default()).expect("it is taken");
        assert_eq!((imported.revision, imported.compacted), (store.revision(), compacted));
        assert!(imported.auth_enabled);
        let restored = open(&target);
        assert_eq!((restored.revision(), restored.compacted()), (store.revision(), compacted));
        for revision in compacted.max(1)..=store.revision() {
            let (hash, _) = store.hash_kv(revision).expect("it can be hashed");
            assert_eq!(restored.hash_kv(revision).expect("it can be hashed").0, hash, "seed {seed}");
            assert_eq!(exported.file().hash_kv(revision).expect("it can be hashed"), hash, "seed {seed}");
        }
        let future = exported.file().hash_kv(store.revision() + 1);
        assert!(matches!(future, Err(FileError::FutureRevision)));
        if compacted > 1 {
            assert!(matches!(exported.file().hash_kv(compacted - 1), Err(FileError::Compacted)));
        }
        let links = |store: &Store| {
            let mut found = Vec::new();
            let mut links = store.engine().iterate(Family::Lease, &schema::lease_attachment_prefix(1), None);
            while let Some(key) = links.key() {
                found.extend(key.starts_with(&schema::lease_attachment_prefix(1)).then(|| key.to_vec()));
                links.next();
            }
            found
        };
        assert_eq!(links(&restored), links(&store));

        let mut again = Export::measure(&restored, &options(scratch.path())).expect("it is measured");
        let again = Exported::of(&mut again);
        for bucket in ["key", "lease", "alarm", "auth", "authUsers", "authRoles"] {
            assert!(again.bucket(bucket) == exported.bucket(bucket), "seed {seed}: {bucket}");
        }
        assert!(again.bucket("key") == expected(&events, compacted), "seed {seed}");
    }
}

#[test]
fn a_raised_revision_compacts_all_before_it() {
    let (dir, scratch) = (tempfile::tempdir().expect("one"), tempfile::tempdir().expect("another"));
    let store = open(dir.path());
    write(&store, &mut fastrand::Rng::with_seed(2), 50);
    let mut export = Export::measure(&store, &options(scratch.path())).expect("it is measured");
    let exported = Exported::of(&mut export);
    let beginning = Beginning { bump_revision: 1000, ..Beginning::default() };
    let imported = import(&exported.file(), &scratch.path().join("store"), &beginning).expect("it is taken");
    assert_eq!((imported.revision, imported.compacted), (store.revision() + 1000, store.revision() + 1000));
    let restored = open(&scratch.path().join("store"));
    assert_eq!((restored.revision(), restored.compacted()), (imported.revision, imported.revision));
    let beginning = Beginning { bump_revision: u64::MAX, ..Beginning::default() };
    let refused = import(&exported.file(), &scratch.path().join("other"), &beginning);
    assert!(matches!(refused, Err(ImportError::Bump { .. })));
}

#[test]
fn a_file_of_a_later_etcd_or_of_something_else_is_refused() {
    let (dir, scratch) = (tempfile::tempdir().expect("one"), tempfile::tempdir().expect("another"));
    let store = open(dir.path());
    for (version, is_taken) in
        [("3.4.0", true), ("3.7.0", true), ("3.8.0", false), ("4.0.0", false), ("x", false)]
    {
        let mut batch = store.engine().batch();
        batch.put(Family::Meta, &MetaKey::ClusterVersion.encode(), version.as_bytes());
        store.engine().write(batch).expect("it is written");
        let mut export = Export::measure(&store, &options(scratch.path())).expect("it is measured");
        let exported = Exported::of(&mut export);
        let checked = exported.file().check_version();
        assert_eq!(checked.is_ok(), is_taken, "{version}");
        assert!(is_taken || matches!(checked, Err(FileError::Newer { .. })), "{version}");
    }
    let plan = crate::storage::bolt::Writer::measuring().measured().expect("it is measured");
    let empty = crate::storage::bolt::Writer::new(Vec::new(), plan).and_then(|writer| writer.finish());
    let path = scratch.path().join("empty");
    std::fs::write(&path, empty.expect("it is written")).expect("it is written");
    let checked = EtcdFile::open(&path).expect("it opens").check_version();
    assert!(matches!(checked, Err(FileError::NotEtcd { bucket: "meta", .. })));
}
