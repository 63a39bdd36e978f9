//! HashKV. The numbers were returned by etcd for the same history, or follow from its algorithm.

use super::*;

fn hash(store: &Store, revision: i64) -> (u32, i64) {
    let (found, current) = store.hash_kv(revision).expect("the revision can be hashed");
    assert_eq!(current, store.revision());
    assert_eq!(found.revision, if revision == 0 { current } else { revision });
    (found.hash, found.compact_revision)
}

/// Revisions 2 to 10 of etcd's test vectors.
fn vectors(store: &Store) {
    for (key, value) in [("a", "v1"), ("b1", "x1"), ("a", "v2"), ("b2", "x2"), ("a", "v3"), ("b3", "x3")] {
        put(store, key, value, 0);
    }
    delete(store, "b1");
    put(store, "c", "lv", 2_324_035_718_736_983_308);
    let revision = commit(store, |txn| {
        txn.put("p1".into(), "1".into(), 0).expect("the put is written");
        txn.put("p2".into(), "2".into(), 0).expect("the put is written");
        assert!(txn.delete(&"b2".into()).expect("the delete is written"));
    });
    assert_eq!(revision, 10);
}

#[test]
fn hashes_are_etcds() {
    let dir = tempfile::tempdir().expect("a directory");
    assert_eq!(crc32c::crc32c(b"123456789"), 3_808_858_755);
    let store = open(dir.path());
    assert_eq!(hash(&store, 0), (1_084_519_789, NEVER_COMPACTED));
    vectors(&store);
    assert_eq!(hash(&store, -1), (1_084_519_789, NEVER_COMPACTED));
    assert_eq!(hash(&store, 10), (65_650_297, NEVER_COMPACTED));
    assert_eq!(hash(&store, 0), (65_650_297, NEVER_COMPACTED));
    assert_eq!(hash(&store, 8), (1_544_106_079, NEVER_COMPACTED));
    assert_eq!(hash(&store, 5), (3_711_152_918, NEVER_COMPACTED));

    compact(&store, 8);
    assert_eq!(hash(&store, 8), (1_163_879_257, 8), "no hash is kept before the compaction has finished");
    finish(&store, NEVER_COMPACTED, 8);
    for _ in 0..2 {
        assert_eq!(hash(&store, 10), (2_032_974_217, 8));
        assert_eq!(hash(&store, 9), (3_111_960_879, 8));
        assert_eq!(hash(&store, 8), (1_544_106_079, NEVER_COMPACTED));
        assert!(matches!(store.hash_kv(7), Err(MvccError::Compacted)));
        assert!(matches!(store.hash_kv(11), Err(MvccError::FutureRevision)));
        store.rewrite().expect("the files are rewritten");
    }
    drop(store);
    let store = open(dir.path());
    assert_eq!(hash(&store, 8), (1_163_879_257, 8));
    assert_eq!(hash(&store, 10), (2_032_974_217, 8));
}

#[test]
fn a_hash_without_live_keys_does_not_depend_on_what_is_still_stored() {
    let dir = tempfile::tempdir().expect("a directory");
    let store = open(dir.path());
    for value in ["1", "2", "3"] {
        put(&store, "a", value, 0);
    }
    put(&store, "b", "1", 0);
    compact(&store, 5);
    delete(&store, "a");
    delete(&store, "b");
    // etcd, once its compaction is through, has 4_0, 5_0, 6_0t and 7_0t left, and no keep set.
    let mut left = b"key".to_vec();
    for (main, tombstone, value) in [
        (4_u8, &b""[..], &b"\x0a\x01a\x10\x02\x18\x04\x20\x03\x2a\x013"[..]),
        (5, b"", b"\x0a\x01b\x10\x05\x18\x05\x20\x01\x2a\x011"),
        (6, b"t", b"\x0a\x01a"),
        (7, b"t", b"\x0a\x01b"),
    ] {
        left.extend_from_slice(&[&[0, 0, 0, 0, 0, 0, 0, main, b'_'][..], &[0; 8], tombstone, value].concat());
    }
    let expected = (crc32c::crc32c(&left), 5);
    assert_eq!(hash(&store, 7), expected);
    finish(&store, NEVER_COMPACTED, 5);
    store.rewrite().expect("the files are rewritten");
    assert_eq!(hash(&store, 7), expected);
}

/// Versions that only a compaction lets go must not go before the compaction itself is on disk: the log would replay it
/// over what is left and take another hash.
#[test]
fn a_finished_compaction_survives_a_crash() {
    let dir = tempfile::tempdir().expect("a directory");
    let store = open(dir.path());
    vectors(&store);
    compact(&store, 8);
    assert_eq!(open(random::copy(dir.path()).path()).compacted(), NEVER_COMPACTED);
    finish(&store, NEVER_COMPACTED, 8);
    let copy = random::copy(dir.path());
    let crashed = open(copy.path());
    assert_eq!(crashed.compacted(), 8);
    assert_eq!(hash(&crashed, 8), (1_163_879_257, 8));
    assert_eq!(hash(&crashed, 10), (2_032_974_217, 8));
}
