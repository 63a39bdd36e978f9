//! Files that another member sends, whole, broken and hostile; and which directory is the store after any end.

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

use bytes::Bytes;

use super::*;
use crate::storage::EngineOptions;
use crate::storage::mvcc::write::WriteRun;
use crate::storage::mvcc::{Store, StoreOptions};

fn open(dir: &Path) -> Store {
    let engine = EngineOptions { memtable_bytes: 4 << 20, block_cache_bytes: 4 << 20 };
    Store::open(dir, StoreOptions { engine, heads_bytes: 1 << 14 }).expect("the store opens")
}

fn put(store: &Store, key: &str, value: &[u8]) {
    let mut run = WriteRun::new(store);
    let mut txn = run.begin();
    let (key, value) = (Bytes::copy_from_slice(key.as_bytes()), Bytes::copy_from_slice(value));
    txn.put(key, value, 0).expect("it is put");
    txn.finish();
    run.commit().expect("it commits");
}

/// A store with files of several pieces.
fn filled(dir: &Path) -> Store {
    let store = open(dir);
    let mut random = fastrand::Rng::with_seed(3);
    for at in 0..300 {
        let value: Vec<u8> = (0..4000).map(|_| random.u8(..)).collect();
        put(&store, &format!("key{at}"), &value);
    }
    store
}

fn hash(store: &Store) -> (u32, i64) {
    let (hash, revision) = store.hash_kv(0).expect("it hashes");
    (hash.hash, revision)
}

fn checkpoint(store: &Store, root: &Path) -> Checkpoint {
    Checkpoint::make(store.engine(), root.join(format!("sent-{}", fastrand::u64(..)))).expect("it is made")
}

/// All pieces that a receiver does not hold.
fn pieces<'c>(checkpoint: &'c Checkpoint, held: &[u64]) -> impl Iterator<Item = Piece> + use<'c> {
    let held = held.to_vec();
    (0..held.len()).flat_map(move |file| {
        let mut offset = held[file];
        std::iter::from_fn(move || {
            let piece = checkpoint.read_piece(file, offset).expect("it reads")?;
            offset += piece.data.len() as u64;
            Some(piece)
        })
    })
}

fn receive(generations: &Generations, checkpoint: &Checkpoint) -> Generation {
    let mut staging =
        Staging::open(generations.staging_dir(), checkpoint.offer().clone()).expect("it is taken");
    for piece in pieces(checkpoint, staging.held()) {
        staging.take(&piece).expect("the piece is taken");
    }
    generations.admit(staging).expect("all is there")
}

fn names(root: &Path) -> Vec<String> {
    let entries = fs::read_dir(root).expect("the directory lists");
    let mut names: Vec<String> =
        entries.map(|entry| entry.expect("it lists").file_name().into_string().expect("a name")).collect();
    names.sort();
    names
}

#[test]
fn a_checkpoint_stands_still_and_goes_with_its_owner() {
    let (sender, root) =
        (tempfile::tempdir().expect("a directory"), tempfile::tempdir().expect("a directory"));
    let store = filled(&sender.path().join("store"));
    let checkpoint = checkpoint(&store, sender.path());
    let before = hash(&store);
    put(&store, "later", b"v");
    store.rewrite().expect("it rewrites");
    let generations = Generations::open(root.path()).expect("it opens");
    let generation = receive(&generations, &checkpoint);
    let successor = open(&generation.dir);
    assert_eq!(hash(&successor), before);
    let dir = names(sender.path());
    drop(checkpoint);
    assert_eq!(names(sender.path()).len(), dir.len() - 1, "the links are gone");
}

#[test]
fn two_installs_in_a_row_leave_one_store() {
    let (sender, root) =
        (tempfile::tempdir().expect("a directory"), tempfile::tempdir().expect("a directory"));
    let store = filled(&sender.path().join("store"));
    let mut current = Arc::new(open(&root.path().join("store")));
    let generations = Generations::open(root.path()).expect("it opens");
    assert_eq!(generations.installed_index(), None);
    for round in 0..2 {
        put(&store, "round", &[round]);
        let generation = receive(&generations, &checkpoint(&store, sender.path()));
        let successor = Arc::new(current.open_successor(&generation.dir).expect("it opens"));
        generations.make_current(&generation, 7 + u64::from(round)).expect("it is put in place");
        let old = std::mem::replace(&mut current, successor);
        assert_eq!(hash(&current), hash(&store));
        old.engine().discard();
        drop(old);
        assert_eq!(names(root.path()), ["generation".to_owned(), format!("store-{:010}", round + 2)]);
        assert_eq!(generations.current_dir(), generation.dir);
    }
    drop(current);
    let again = Generations::open(root.path()).expect("it opens");
    assert_eq!(again.installed_index(), Some(8));
    assert_eq!(hash(&open(&again.current_dir())), hash(&store));
}

#[test]
fn a_kill_before_or_after_the_rename_leaves_one_whole_store() {
    let (sender, root) =
        (tempfile::tempdir().expect("a directory"), tempfile::tempdir().expect("a directory"));
    let theirs = filled(&sender.path().join("store"));
    let ours = open(&root.path().join("store"));
    put(&ours, "ours", b"v");
    let before = hash(&ours);
    drop(ours);
    let generations = Generations::open(root.path()).expect("it opens");
    let generation = receive(&generations, &checkpoint(&theirs, sender.path()));
    drop(open(&generation.dir));
    fs::write(root.path().join("generation.tmp"), "generation 2\n").expect("it writes");
    fs::create_dir(root.path().join("checkpoint-3")).expect("it is made");
    // Killed before the rename.
    let again = Generations::open(root.path()).expect("it opens");
    assert_eq!(names(root.path()), ["store"]);
    assert_eq!(hash(&open(&again.current_dir())), before);
    // Killed after it, with the old store still there.
    let generation = receive(&again, &checkpoint(&theirs, sender.path()));
    again.make_current(&generation, 5).expect("it is put in place");
    assert_eq!(names(root.path()), ["generation", "store", "store-0000000002"]);
    let last = Generations::open(root.path()).expect("it opens");
    assert_eq!(names(root.path()), ["generation", "store-0000000002"]);
    assert_eq!(hash(&open(&last.current_dir())), hash(&theirs));
    // A pointer that cannot be read is no reason to remove anything.
    fs::write(root.path().join("generation"), "generation 3\ninstalled-index 5\ncrc32 00000000\n")
        .expect("it writes");
    let refused = Generations::open(root.path()).expect_err("the pointer is damaged");
    assert!(refused.to_string().contains("is damaged"), "{refused}");
    assert_eq!(names(root.path()), ["generation", "store-0000000002"]);
}

#[test]
fn what_is_wrong_with_a_store_is_known_to_the_next_start() {
    let root = tempfile::tempdir().expect("a directory");
    let known = || Generations::open(root.path()).expect("it opens").marked_damage();
    assert_eq!(known(), None);
    let generations = Generations::open(root.path()).expect("it opens");
    for damage in [Damage::Differs, Damage::Unreadable, Damage::Differs] {
        generations.mark_damaged(damage).expect("it is noted");
        assert_eq!(known(), Some(damage));
    }
    // Killed while it was noted.
    fs::write(root.path().join("damaged"), "").expect("it writes");
    assert_eq!(known(), Some(Damage::Differs));
    generations.unmark_damaged().expect("it is removed");
    generations.unmark_damaged().expect("once is enough");
    assert_eq!(known(), None);
}

/// Files of a few bytes, as if of a checkpoint.
struct Sent {
    offer: Offer,
    contents: Vec<Vec<u8>>,
}

impl Sent {
    fn new(random: &mut fastrand::Rng, sizes: &[usize]) -> Sent {
        let contents: Vec<Vec<u8>> =
            sizes.iter().map(|size| (0..*size).map(|_| random.u8(..)).collect()).collect();
        let files = contents.iter().enumerate().map(|(at, content)| FileEntry {
            name: format!("{at:06}.sst"),
            size_bytes: content.len() as u64,
        });
        Sent { offer: Offer { id: [random.u8(..); 16], files: files.collect() }, contents }
    }

    fn piece(&self, file: usize, offset: u64, length: usize) -> Piece {
        let start = usize::try_from(offset).expect("it is small");
        let data = Bytes::copy_from_slice(&self.contents[file][start..start + length]);
        Piece { file, offset, crc: crc32c::crc32c(&data), data }
    }

    /// Sends what is missing in pieces of random sizes, at most `limit` of them; true if nothing is missing then.
    fn send(&self, random: &mut fastrand::Rng, staging: &mut Staging, limit: usize) -> bool {
        let mut sent = 0;
        for (file, content) in self.contents.iter().enumerate() {
            while staging.held()[file] < content.len() as u64 {
                if sent == limit {
                    return false;
                }
                let held = staging.held()[file];
                let left = content.len() - usize::try_from(held).expect("it is small");
                let length = random.usize(1..=left.min(50));
                staging.take(&self.piece(file, held, length)).expect("the piece is taken");
                sent += 1;
            }
        }
        true
    }

    fn assert_arrived(&self, dir: &Path) {
        for (entry, content) in self.offer.files.iter().zip(&self.contents) {
            assert_eq!(&fs::read(dir.join(&entry.name)).expect("it is there"), content);
        }
        assert_eq!(names(dir).len(), self.contents.len());
    }
}

/// Whatever is killed, lost or damaged between two attempts, what arrives in the end is what was sent.
#[test]
fn an_attempt_goes_on_after_any_end_and_any_damage() {
    for seed in 0..60 {
        let mut random = fastrand::Rng::with_seed(seed);
        let root = tempfile::tempdir().expect("a directory");
        let sizes = [random.usize(..400), 0, random.usize(1..300), 77];
        let sent = Sent::new(&mut random, &sizes);
        let generations = Generations::open(root.path()).expect("it opens");
        let dir = generations.staging_dir();
        let mut kept = 0;
        loop {
            let mut staging = Staging::open(dir.clone(), sent.offer.clone()).expect("it is taken");
            kept += staging.held().iter().sum::<u64>();
            let limit = random.usize(1..10);
            if sent.send(&mut random, &mut staging, limit) {
                let generation = generations.admit(staging).expect("all is there");
                sent.assert_arrived(&generation.dir);
                assert!(!dir.exists());
                break;
            }
            drop(staging);
            Generations::open(root.path()).expect("it opens");
            if random.u8(..3) == 0 {
                harm(&mut random, &dir);
            }
        }
        assert!(kept > 0 || seed > 0, "what had arrived was used");
    }
}

/// Flips a byte, cuts a file short, lengthens it, or removes it.
fn harm(random: &mut fastrand::Rng, dir: &Path) {
    let mut paths: Vec<_> = ["files", "."]
        .iter()
        .flat_map(|folder| fs::read_dir(dir.join(folder)).expect("it lists"))
        .map(|entry| entry.expect("it lists").path())
        .filter(|path| path.is_file())
        .collect();
    paths.sort();
    let path = &paths[random.usize(..paths.len())];
    let file = fs::OpenOptions::new().read(true).write(true).open(path).expect("it opens");
    let length = file.metadata().expect("it has a length").len();
    match random.u8(..4) {
        0 if length > 0 => {
            let at = random.u64(..length);
            let mut byte = [0];
            file.read_exact_at(&mut byte, at).expect("it reads");
            file.write_all_at(&[byte[0] ^ (1 << random.u8(..8))], at).expect("it writes");
        }
        1 => file.set_len(random.u64(..=length)).expect("it is cut"),
        2 => file.set_len(length + random.u64(..100)).expect("it is lengthened"),
        _ => fs::remove_file(path).expect("it is removed"),
    }
}

#[test]
fn every_byte_of_what_has_arrived_is_checked() {
    let mut random = fastrand::Rng::with_seed(1);
    let root = tempfile::tempdir().expect("a directory");
    let sent = Sent::new(&mut random, &[40]);
    let dir = root.path().join("staging");
    for at in 0..40_u64 {
        let mut staging = Staging::open(dir.clone(), sent.offer.clone()).expect("it is taken");
        for offset in staging.held()[0] / 10..4 {
            staging.take(&sent.piece(0, offset * 10, 10)).expect("the piece is taken");
        }
        drop(staging);
        let file = fs::OpenOptions::new().write(true).open(dir.join("files/000000.sst")).expect("it opens");
        let right = sent.contents[0][usize::try_from(at).expect("it is small")];
        file.write_all_at(&[right ^ 0x10], at).expect("it writes");
        let staging = Staging::open(dir.clone(), sent.offer.clone()).expect("it is taken");
        assert_eq!(staging.held(), [at / 10 * 10], "what is before the damage is kept");
    }
}

#[test]
fn pieces_that_do_not_fit_are_refused_and_change_nothing() {
    let mut random = fastrand::Rng::with_seed(1);
    let root = tempfile::tempdir().expect("a directory");
    let sent = Sent::new(&mut random, &[100, 50]);
    let generations = Generations::open(root.path()).expect("it opens");
    let mut staging = Staging::open(generations.staging_dir(), sent.offer.clone()).expect("it is taken");
    staging.take(&sent.piece(0, 0, 60)).expect("the piece is taken");
    let whole = sent.piece(0, 60, 40);
    let longer = Bytes::from([&whole.data[..], b"!"].concat());
    let refused = [
        Piece { offset: 61, data: whole.data.slice(1..), ..whole.clone() },
        Piece { offset: 0, ..sent.piece(0, 0, 60) },
        Piece { offset: u64::MAX, ..whole.clone() },
        Piece { file: 2, offset: 0, ..whole.clone() },
        Piece { file: usize::MAX, ..whole.clone() },
        Piece { crc: crc32c::crc32c(&longer), data: longer, ..whole.clone() },
        Piece { data: Bytes::new(), crc: 0, ..whole.clone() },
    ];
    for piece in refused {
        let error = staging.take(&piece).expect_err("it does not fit");
        assert!(matches!(error, SnapshotError::OutOfPlace { .. }), "{error}");
    }
    for at in 0..whole.data.len() {
        let mut data = whole.data.to_vec();
        data[at] ^= 1;
        let error = staging.take(&Piece { data: data.into(), ..whole.clone() }).expect_err("it is damaged");
        assert!(matches!(error, SnapshotError::Checksum { file: 0, offset: 60 }), "{error}");
    }
    staging.take(&whole).expect("the right one is taken");
    let error = generations.admit(staging).expect_err("a file is missing");
    assert!(matches!(error, SnapshotError::Incomplete { .. }), "{error}");
    let staging = Staging::open(generations.staging_dir(), sent.offer.clone()).expect("it is taken");
    assert_eq!(staging.held(), [100, 0], "it can go on");
}

#[test]
fn offers_that_are_no_store_are_refused_before_anything_is_made() {
    let root = tempfile::tempdir().expect("a directory");
    let dir = root.path().join("staging");
    let long = "a".repeat(65);
    for name in ["", ".", "..", "../x", "/etc/passwd", "a/b", ".hidden", "a\0b", "a b", "ä", long.as_str()] {
        let files = vec![FileEntry { name: name.to_owned(), size_bytes: 1 }];
        let refused =
            Staging::open(dir.clone(), Offer { id: [1; 16], files }).expect_err("the name is refused");
        assert!(matches!(refused, SnapshotError::BadName { .. }), "{name:?}: {refused}");
    }
    let file = |name: &str, size_bytes| FileEntry { name: name.to_owned(), size_bytes };
    let twice = Offer { id: [1; 16], files: vec![file("a", 1), file("a", 1)] };
    assert!(matches!(Staging::open(dir.clone(), twice), Err(SnapshotError::BadName { .. })));
    for sizes in [[u64::MAX, 1], [u64::MAX / 2, 1]] {
        let offer = Offer { id: [1; 16], files: vec![file("a", sizes[0]), file("b", sizes[1])] };
        assert!(matches!(Staging::open(dir.clone(), offer), Err(SnapshotError::TooLarge)));
    }
    assert!(!dir.exists());
}

#[test]
fn another_offer_begins_anew() {
    let mut random = fastrand::Rng::with_seed(1);
    let root = tempfile::tempdir().expect("a directory");
    let dir = root.path().join("staging");
    let (first, second) = (Sent::new(&mut random, &[90, 90]), Sent::new(&mut random, &[90]));
    let mut staging = Staging::open(dir.clone(), first.offer.clone()).expect("it is taken");
    assert!(!first.send(&mut random, &mut staging, 3));
    drop(staging);
    let staging = Staging::open(dir.clone(), second.offer.clone()).expect("it is taken");
    assert_eq!(staging.held(), [0]);
    assert_eq!(names(&dir.join("files")), [""; 0]);
}
