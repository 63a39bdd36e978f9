use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;

use super::page::{Header, Meta, NO_FREELIST};
use super::{Bolt, BoltError, PAGE_BYTES, Value, WriteError, Writer};

type Buckets = BTreeMap<Vec<u8>, BTreeMap<Vec<u8>, Vec<u8>>>;

fn feed<W: std::io::Write>(
    writer: &mut Writer<W>,
    buckets: &Buckets,
    measure: bool,
) -> Result<(), WriteError> {
    for (name, entries) in buckets {
        writer.bucket(name)?;
        for (key, value) in entries {
            writer.put(key, if measure { Value::Length(value.len()) } else { Value::Bytes(value) })?;
        }
    }
    Ok(())
}

fn encode(buckets: &Buckets) -> Vec<u8> {
    let mut measuring = Writer::measuring();
    feed(&mut measuring, buckets, true).expect("it is measured");
    let plan = measuring.measured().expect("it is measured");
    let mut writer = Writer::new(Vec::new(), plan).expect("it is written");
    feed(&mut writer, buckets, false).expect("it is written");
    let file = writer.finish().expect("it is as measured");
    assert_eq!(file.len() as u64, plan.size_bytes());
    file
}

fn read_all(bolt: &Bolt) -> Result<Buckets, BoltError> {
    let mut out = Buckets::new();
    let mut buckets = bolt.buckets()?;
    while let Some(bucket) = buckets.next()? {
        assert!(bucket.is_bucket);
        let mut cursor = bolt.open_bucket(&bucket)?;
        let entries = out.entry(bucket.key.to_vec()).or_default();
        while let Some(entry) = cursor.next()? {
            entries.insert(entry.key.to_vec(), entry.value.to_vec());
        }
    }
    Ok(out)
}

struct OnDisk {
    _dir: tempfile::TempDir,
    path: PathBuf,
}

fn on_disk(bytes: &[u8]) -> OnDisk {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let path = dir.path().join("db");
    fs::write(&path, bytes).expect("it is written");
    OnDisk { _dir: dir, path }
}

fn random_buckets(random: &mut fastrand::Rng) -> Buckets {
    let mut buckets = Buckets::new();
    for _ in 0..random.usize(0..12) {
        let name = (0..random.usize(1..12)).map(|_| random.u8(b'a'..=b'z')).collect();
        let mut entries = BTreeMap::new();
        let count = [0, 1, 3, 40, 3000][random.usize(0..5)];
        for _ in 0..count {
            let key_len = if random.u8(0..200) == 0 { random.usize(1..20_000) } else { random.usize(1..40) };
            let value_len = match random.u16(0..500) {
                0 => random.usize(0..1_500_000),
                1..30 => random.usize(0..9000),
                _ => random.usize(0..60),
            };
            let key = (0..key_len).map(|_| random.u8(..)).collect();
            entries.insert(key, vec![random.u8(..); value_len]);
        }
        buckets.insert(name, entries);
    }
    buckets
}

#[test]
fn what_is_written_is_read_and_passes_the_check() {
    for seed in 0..30 {
        let buckets = random_buckets(&mut fastrand::Rng::with_seed(seed));
        let file = on_disk(&encode(&buckets));
        let bolt = Bolt::open(&file.path).expect("it opens");
        bolt.check().unwrap_or_else(|error| panic!("seed {seed}: {error}"));
        assert!(read_all(&bolt).expect("it reads") == buckets, "seed {seed}");
    }
}

#[test]
fn entries_out_of_order_or_not_as_measured_are_refused() {
    let mut writer = Writer::measuring();
    writer.bucket(b"a").expect("a name");
    writer.put(b"k", Value::Length(1)).expect("a key");
    assert!(matches!(writer.put(b"k", Value::Length(1)), Err(WriteError::OutOfOrder)));
    assert!(matches!(writer.put(b"", Value::Length(1)), Err(WriteError::OutOfOrder)));
    let plan = writer.measured().expect("it is measured");
    let mut writer = Writer::new(Vec::new(), plan).expect("it is written");
    writer.bucket(b"a").expect("a name");
    assert!(matches!(writer.put(b"k", Value::Length(1)), Err(WriteError::NotAsMeasured)));
    writer.put(b"kk", Value::Bytes(&[0; 5000])).expect("it is written");
    assert!(matches!(writer.finish(), Err(WriteError::NotAsMeasured)));
}

#[test]
fn a_cut_file_says_so() {
    let buckets = random_buckets(&mut fastrand::Rng::with_seed(3));
    let whole = encode(&buckets);
    for length in [0, 1, 79, 80, PAGE_BYTES, whole.len() / 2, whole.len() - 1] {
        let file = on_disk(&whole[..length]);
        let error = Bolt::open(&file.path).expect_err("it is cut");
        assert!(
            matches!(error, BoltError::Foreign { .. } | BoltError::Truncated { .. }),
            "{length}: {error}"
        );
        assert!(error.to_string().contains(file.path.to_str().expect("a path")), "{error}");
    }
}

#[test]
fn no_flipped_bit_makes_a_reader_panic_or_go_on_for_ever() {
    for seed in 0..60 {
        let mut random = fastrand::Rng::with_seed(seed);
        let buckets = random_buckets(&mut random);
        let mut bytes = encode(&buckets);
        for _ in 0..random.usize(1..8) {
            // Headers and elements more often than values.
            let page = random.usize(0..bytes.len() / PAGE_BYTES) * PAGE_BYTES;
            let at = page + if random.bool() { random.usize(0..64) } else { random.usize(0..PAGE_BYTES) };
            bytes[at] ^= 1 << random.u8(0..8);
        }
        let file = on_disk(&bytes);
        if let Ok(bolt) = Bolt::open(&file.path) {
            let _ = bolt.check();
            let _ = read_all(&bolt);
        }
    }
}

#[test]
fn pages_that_lead_back_are_found() {
    let entries = (0..40_000u32).map(|key| (key.to_be_bytes().to_vec(), vec![0; 50])).collect();
    let bytes = encode(&Buckets::from([(b"key".to_vec(), entries)]));
    let file = on_disk(&bytes);
    let bolt = Bolt::open(&file.path).expect("it opens");
    let mut buckets = bolt.buckets().expect("a root");
    let root = buckets.next().expect("it reads").expect("a bucket").value;
    let root =
        usize::try_from(u64::from_le_bytes(root[..8].try_into().expect("eight bytes"))).expect("a page");
    // The second child of the bucket's root is the root.
    let mut looped = bytes.clone();
    let child = root * PAGE_BYTES + 16 + 16 + 8;
    looped[child..child + 8].copy_from_slice(&(root as u64).to_le_bytes());
    let file = on_disk(&looped);
    let bolt = Bolt::open(&file.path).expect("it opens");
    assert!(matches!(bolt.check(), Err(BoltError::Damaged { .. })));
    assert!(matches!(read_all(&bolt), Err(BoltError::Damaged { .. })));
}

#[test]
fn pages_with_two_uses_or_none_are_found() {
    let buckets = Buckets::from([(b"b".to_vec(), BTreeMap::from([(b"k".to_vec(), vec![1; 5000])]))]);
    let mut bytes = encode(&buckets);
    let page_size = 4096;
    let pages = (bytes.len() / PAGE_BYTES) as u64;
    let meta = Meta::decode(&bytes).expect("a meta page");
    assert_eq!((meta.pages, meta.freelist), (pages, NO_FREELIST));
    // A list of free pages, of which `listed` are.
    let mut with_freelist = |listed: &[u64], extra: u64| {
        bytes.truncate(usize::try_from(pages).expect("few") * PAGE_BYTES);
        let count = u16::try_from(listed.len()).expect("few");
        let mut page = Header { id: pages, flags: 0x10, count, overflow: 0 }.encode().to_vec();
        listed.iter().for_each(|id| page.extend_from_slice(&id.to_le_bytes()));
        page.resize(PAGE_BYTES * (1 + usize::try_from(extra).expect("few")), 0);
        bytes.extend_from_slice(&page);
        let meta = Meta { page_size, freelist: pages, pages: pages + 1 + extra, txid: 4, ..meta }.encode(0);
        bytes[..meta.len()].copy_from_slice(&meta);
        let file = on_disk(&bytes);
        Bolt::open(&file.path).expect("it opens").check().map_err(|error| error.to_string())
    };
    assert_eq!(with_freelist(&[], 0), Ok(()));
    assert_eq!(with_freelist(&[pages + 1, pages + 2], 2), Ok(()));
    assert!(with_freelist(&[pages + 1], 2).expect_err("one is lost").contains("neither used nor free"));
    assert!(with_freelist(&[2], 0).expect_err("one is used").contains("used twice, or used and free"));
    assert!(
        with_freelist(&[pages + 1, pages + 1], 1).expect_err("one is listed twice").contains("listed twice")
    );
}
