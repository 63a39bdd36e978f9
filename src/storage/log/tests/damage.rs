//! Damage to what was acknowledged: refused with file and offset, and nothing changed.

use std::collections::BTreeMap;
use std::path::Path;

use bytes::Bytes;

use super::{append, contents, file_names, open, options, settled_names, wait};
use crate::storage::log::{Log, LogError};

type Image = BTreeMap<String, Vec<u8>>;

fn capture(dir: &Path) -> Image {
    file_names(dir)
        .into_iter()
        .map(|name| (name.clone(), std::fs::read(dir.join(name)).expect("it reads")))
        .collect()
}

fn restore(image: &Image) -> tempfile::TempDir {
    let dir = tempfile::tempdir().expect("a directory");
    for (name, bytes) in image {
        std::fs::write(dir.path().join(name), bytes).expect("the file writes");
    }
    dir
}

/// Opens the log, which must refuse and leave every byte as it is.
fn refused(image: &Image) -> LogError {
    let dir = restore(image);
    let error = match Log::open(options(dir.path())) {
        Ok((_, recovered)) => panic!("not refused: {recovered:?}"),
        Err(error) => error,
    };
    assert_eq!(&capture(dir.path()), image, "a refused log is not touched");
    error
}

/// Two full segments, one current with batches in it, one ahead; and the current one's batch ends.
fn several_segments() -> (Image, Vec<usize>) {
    let dir = tempfile::tempdir().expect("a directory");
    let (log, _) = open(dir.path());
    while log.stats().segments < 3 {
        append(&log, &[&[5; 600]]);
        settled_names(dir.path(), &log);
    }
    let mut ends = Vec::new();
    for payload in [&b"first"[..], b"second", b"third"] {
        append(&log, &[payload]);
        let image = capture(dir.path());
        let current = &image[&image.keys().nth(2).expect("three and one ahead").clone()];
        ends.push(current.iter().rposition(|byte| *byte != 0).expect("it has frames") + 1);
    }
    settled_names(dir.path(), &log);
    (capture(dir.path()), ends)
}

#[test]
fn a_flipped_bit_in_a_closed_segment_is_refused() {
    let (image, _) = several_segments();
    let names: Vec<_> = image.keys().cloned().collect();
    for name in &names[..2] {
        let end = image[name].iter().rposition(|byte| *byte != 0).expect("it has frames") + 1;
        for at in (0..end).step_by(5) {
            let mut image = image.clone();
            image.get_mut(name).expect("it is there")[at] ^= 1;
            match refused(&image) {
                LogError::Damaged { path, offset, .. } => {
                    assert!(path.ends_with(name), "{} for {name}", path.display());
                    assert!(offset <= at as u64, "{offset} for {at}");
                }
                LogError::Foreign { path, .. } => assert!(path.ends_with(name) && at < 64, "at {at}"),
                other => panic!("at {at}: {other}"),
            }
        }
    }
}

#[test]
fn a_flipped_bit_before_the_last_batch_is_refused_and_in_it_cut() {
    let (image, ends) = several_segments();
    let name = image.keys().nth(2).expect("three and one ahead").clone();
    let [.., before_last, end] = ends[..] else { panic!("three batches") };
    for at in 0..end {
        let mut image = image.clone();
        image.get_mut(&name).expect("it is there")[at] ^= 0x10;
        if at < before_last {
            match refused(&image) {
                LogError::Damaged { path, offset, .. } => {
                    assert!(path.ends_with(&name) && offset <= at as u64)
                }
                LogError::Foreign { path, .. } => assert!(path.ends_with(&name) && at < 64, "at {at}"),
                other => panic!("at {at}: {other}"),
            }
        } else {
            let dir = restore(&image);
            let (log, recovered) = open(dir.path());
            assert!(recovered.cut_bytes > 0);
            assert_eq!(contents(&log).last().expect("entries are there").1, b"second");
        }
    }
}

#[test]
fn the_error_names_file_offset_and_advice() {
    let (mut image, ends) = several_segments();
    let name = image.keys().nth(2).expect("three and one ahead").clone();
    let at = ends[0];
    image.get_mut(&name).expect("it is there")[at + 21] ^= 1;
    let text = refused(&image).to_string();
    assert!(
        text.contains(&name) && text.contains(&format!("offset {at}:")) && text.contains("restore"),
        "{text}"
    );
}

#[test]
fn lost_blocks_are_refused() {
    let (image, ends) = several_segments();
    let name = image.keys().nth(2).expect("three and one ahead").clone();
    // The whole segment but its last batch reads as zeros.
    let mut zeroed = image.clone();
    zeroed.get_mut(&name).expect("it is there")[64..ends[1]].fill(0);
    assert!(matches!(refused(&zeroed), LogError::Damaged { offset: 64, .. }));
    // A closed segment lost its end.
    let first = image.keys().next().expect("there is one").clone();
    let mut short = image.clone();
    short.get_mut(&first).expect("it is there").truncate(500);
    assert!(matches!(refused(&short), LogError::Damaged { .. }));
    let mut empty = image;
    empty.insert(first, Vec::new());
    assert!(matches!(refused(&empty), LogError::Damaged { offset: 0, .. }));
}

#[test]
fn missing_segments_are_refused() {
    let (image, _) = several_segments();
    for missing in 0..2 {
        let mut image = image.clone();
        let name = image.keys().nth(missing).expect("three and one ahead").clone();
        image.remove(&name);
        assert!(matches!(refused(&image), LogError::Missing { .. }), "{name}");
    }
    // Without the current one, the one ahead stands alone behind a hole.
    let mut holed = image.clone();
    let current = image.keys().nth(2).expect("three and one ahead").clone();
    holed.remove(&current);
    assert!(matches!(refused(&holed), LogError::Missing { .. }));
    let spare = BTreeMap::from([("0000000000000007.spare".to_owned(), vec![0; 4096])]);
    assert!(matches!(refused(&spare), LogError::Missing { .. }));
}

#[test]
fn foreign_files_are_refused() {
    let (image, _) = several_segments();
    let names: Vec<_> = image.keys().cloned().collect();
    // A segment under another's name, of another log, of another version, and a strange name.
    let mut swapped = image.clone();
    swapped.insert(names[1].clone(), image[&names[0]].clone());
    assert!(matches!(refused(&swapped), LogError::Foreign { .. }));
    let (other, _) = several_segments();
    let mut mixed = image.clone();
    mixed.insert(names[1].clone(), other[&names[1]].clone());
    assert!(matches!(refused(&mixed), LogError::Foreign { .. }));
    let mut newer = image.clone();
    newer.get_mut(&names[0]).expect("it is there")[8] = 2;
    let text = refused(&newer).to_string();
    assert!(text.contains("version 2"), "{text}");
    let mut strange = image;
    strange.insert("1.log".to_owned(), Vec::new());
    assert!(matches!(refused(&strange), LogError::Foreign { .. }));
}

#[test]
fn purged_leftovers_behind_a_hole_are_removed() {
    let dir = tempfile::tempdir().expect("a directory");
    let (log, _) = open(dir.path());
    while log.stats().segments < 4 {
        append(&log, &[&[5; 600]]);
        settled_names(dir.path(), &log);
    }
    let old = capture(dir.path());
    let last = log.bounds().end - 1;
    wait(|done| log.purge_to(last - 1, Bytes::from_static(b"mark"), done).expect("small")).expect("purged");
    let expected = contents(&log);
    log.close().expect("a clean end");
    // The crash undid the removal of the first segment, and not that of the second.
    let mut image = capture(dir.path());
    let first = old.keys().next().expect("there is one").clone();
    assert!(!image.contains_key(&first));
    image.insert(first.clone(), old[&first].clone());
    let dir = restore(&image);
    let (log, recovered) = open(dir.path());
    assert_eq!(contents(&log), expected);
    assert_eq!(recovered.purged.as_deref(), Some(&b"mark"[..]));
    assert!(!file_names(dir.path()).contains(&first));
}
