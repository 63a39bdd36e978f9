//! Arbitrary bytes as a backend file: whatever they are, reading ends, without a panic; and what passes the check can be
//! written anew, with the same history.
//!
//! Plain bytes would never pass a checksum, so the input is a script: it fills a good file, then changes bytes of it, of its
//! meta pages with their sums set right again. Run with coverage by `fuzz/` and on seeds by the unit tests.

use std::path::Path;

use prost::Message;

use super::convert::{Conversion, Target};
use super::file::EtcdFile;
use super::{KEY, LEASE, META, put_revision_key};
use crate::proto::mvccpb::KeyValue;
use crate::storage::bolt::{PAGE_BYTES, Value, WriteError, Writer, set_meta_sums};
use crate::storage::schema::SubRevision;

/// Largest value that a byte of the script stands for.
const VALUE_MAX: usize = 7000;

/// Reads the file that the script describes, at `path`, and checks what must hold.
pub fn check(path: &Path, script: &[u8]) {
    let (filling, changes) = script.split_at(script.len() / 2);
    let mut file = fill(filling);
    for change in changes.chunks_exact(4) {
        let place =
            usize::from(u16::from_le_bytes([change[0], change[1]])) | usize::from(change[2] & 7) << 16;
        let at = place % file.len();
        // The start of a page, where its structure is, more often than the middle of a value.
        let at = if change[2] & 8 == 0 { at } else { at / PAGE_BYTES * PAGE_BYTES + at % 64 };
        file[at] = change[3];
    }
    if changes.last().is_some_and(|last| last % 4 != 0) {
        set_meta_sums(&mut file);
    }
    std::fs::write(path, &file).expect("the test's file writes");
    read(path);
}

fn read(path: &Path) {
    let Ok(file) = EtcdFile::open(path) else { return };
    let status = file.status();
    let hash = file.hash_kv(0);
    let _ = file.check_version();
    let Ok(conversion) = Conversion::measure(&file, Target::V3_7) else { return };
    let written = conversion.write(Vec::new()).expect("what was measured is written");
    if status.is_err() {
        return;
    }
    let other = path.with_extension("converted");
    std::fs::write(&other, written).expect("the test's file writes");
    let converted = EtcdFile::open(&other).expect("what was written opens");
    let again = converted.status().expect("what was written passes the check");
    let status = status.expect("it was not an error");
    assert_eq!((again.revision, again.total_keys), (status.revision, status.total_keys));
    match (hash, converted.hash_kv(0)) {
        (Ok(hash), Ok(again)) => assert_eq!(again, hash),
        (Err(_), Err(_)) => {}
        (before, after) => panic!("hashed {before:?}, then {after:?}"),
    }
}

/// A good file: a key for each byte, whose value is as long as the byte says.
fn fill(script: &[u8]) -> Vec<u8> {
    let mut measuring = Writer::measuring();
    feed(&mut measuring, script).expect("it is measured");
    let plan = measuring.measured().expect("it is measured");
    let mut writer = Writer::new(Vec::new(), plan).expect("it is written");
    feed(&mut writer, script).expect("it is written");
    writer.finish().expect("it is as measured")
}

fn feed<W: std::io::Write>(writer: &mut Writer<W>, script: &[u8]) -> Result<(), WriteError> {
    writer.bucket(KEY)?;
    for (at, byte) in (1_i64..).zip(script) {
        let is_delete = byte % 8 == 0;
        let mut revision = Vec::new();
        put_revision_key(&mut revision, SubRevision { main: 1 + at, sub: 0 }, is_delete);
        let key = bytes::Bytes::copy_from_slice(&[byte % 16 + 1]);
        let stored = if is_delete {
            KeyValue { key, ..KeyValue::default() }
        } else {
            let value = vec![*byte; usize::from(*byte) * VALUE_MAX / 255 * usize::from(byte % 5 == 0)];
            KeyValue { key, mod_revision: 1 + at, value: value.into(), ..KeyValue::default() }
        };
        writer.put(&revision, Value::Bytes(&stored.encode_to_vec()))?;
    }
    writer.bucket(LEASE)?;
    writer.bucket(META)?;
    if let Some(last) = script.last() {
        let mut revision = Vec::new();
        put_revision_key(&mut revision, SubRevision { main: i64::from(*last), sub: 0 }, false);
        writer.put(b"finishedCompactRev", Value::Bytes(&revision))?;
    }
    writer.put(b"storageVersion", Value::Bytes(b"3.7.0"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reading_ends_whatever_the_bytes_are() {
        let dir = tempfile::tempdir().expect("a directory");
        for seed in 0..400 {
            let mut random = fastrand::Rng::with_seed(seed);
            let length = random.usize(0..400);
            let mut script: Vec<u8> = (0..length).map(|_| random.u8(..)).collect();
            if seed % 3 == 0 {
                script.extend(vec![0; script.len()]);
            }
            check(&dir.path().join("db"), &script);
        }
    }
}
