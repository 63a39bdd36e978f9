//! Stored keys: what is encoded decodes to the same and sorts as the user keys do; arbitrary bytes do not panic.
//!
//! The encoding is compiled in by path: it stands alone.

#![no_main]
#![allow(dead_code, reason = "the server uses the rest")]

#[path = "../../src/storage/schema.rs"]
mod schema;

use schema::{KeyMeta, SubRevision};

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    decode_anything(input);
    let Some((numbers, rest)) = input.split_first_chunk::<25>() else { return };
    let main = |at: usize| i64::from_be_bytes(numbers[at..at + 8].try_into().expect("eight bytes"));
    let sub = |at: usize| u32::from_be_bytes(numbers[at..at + 4].try_into().expect("four bytes"));
    // Revisions are never negative: inverted, they would sort before all others.
    let revisions = [
        SubRevision { main: main(0) & i64::MAX, sub: sub(8) },
        SubRevision { main: main(12) & i64::MAX, sub: sub(20) },
    ];
    let keys = rest.split_at(rest.len().min(usize::from(numbers[24])));
    check_pair([(keys.0, revisions[0]), (keys.1, revisions[1])]);
    check_pair([(keys.0, revisions[0]), (keys.0, revisions[1])]);
    let meta =
        KeyMeta { create_revision: main(0), modified: revisions[0], version: main(12), lease: main(8) };
    let mut value = Vec::new();
    schema::put_kv_value(&mut value, &meta, rest);
    assert!(!schema::is_tombstone(&value));
    assert_eq!(schema::decode_kv_value(&value, revisions[0]), Some((meta, rest)));
    let mut message = Vec::new();
    schema::put_key_value(&mut message, keys.0, &meta, rest);
    assert_eq!(message.len(), schema::key_value_len(keys.0, &meta, rest));
});

fn decode_anything(input: &[u8]) {
    let mut key = Vec::new();
    let prefix = schema::kv_prefix_len(input);
    assert!(prefix <= input.len());
    if schema::kv_user_key(input, &mut key) {
        let revision = schema::kv_revision(input).expect("a whole key has a revision");
        let mut again = Vec::new();
        schema::put_kv_key(&mut again, &key, revision);
        assert_eq!(again, input, "one encoding for each key");
    }
    if let Some(revision) = schema::decode_rev_key(input) {
        assert_eq!(schema::rev_key(revision), input);
    }
    if let Some((tombstone, user_key)) = schema::decode_rev_value(input) {
        assert_eq!(
            schema::decode_rev_value(&schema::rev_value(user_key, tombstone)),
            Some((tombstone, user_key))
        );
    }
    let _ = schema::decode_kv_value(input, SubRevision { main: 2, sub: 0 });
    let _ = schema::MetaKey::decode_alarm(input);
}

/// Keys sort as user keys, then newest first; bounds lie between.
fn check_pair(pair: [(&[u8], SubRevision); 2]) {
    let encoded = pair.map(|(key, revision)| {
        let mut out = Vec::new();
        schema::put_kv_key(&mut out, key, revision);
        let mut decoded = Vec::new();
        assert!(schema::kv_user_key(&out, &mut decoded));
        assert_eq!((decoded.as_slice(), schema::kv_revision(&out)), (key, Some(revision)));
        out
    });
    let expected = pair[0].0.cmp(pair[1].0).then(pair[1].1.cmp(&pair[0].1));
    assert_eq!(encoded[0].cmp(&encoded[1]), expected);
    for (key, _) in pair {
        let mut bound = Vec::new();
        schema::put_key_bound(&mut bound, key);
        for (encoded, (other, _)) in encoded.iter().zip(pair) {
            assert_eq!(*encoded < bound, other < key, "a bound lies just before its key");
        }
    }
    let rev = pair.map(|(_, revision)| schema::rev_key(revision));
    assert_eq!(rev[0].cmp(&rev[1]), pair[0].1.cmp(&pair[1].1));
}
