//! `skegutl` and disks: a restore is there whole or not at all, on full disks and when the power is cut.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use etcd_client::{GetOptions, PutOptions};

use skeg::clock::now;

use crate::member::Member;
use crate::mount::Mount;
use crate::programs::{Finished, run, skegutl};

/// Keys in the snapshot, each with a value of [`VALUE_BYTES`].
const KEYS: usize = 300;
const VALUE_BYTES: usize = 40_000;

/// Takes a snapshot of a member with some megabytes of keys and a lease.
async fn take_snapshot(directory: &Path) -> PathBuf {
    let mut member = Member::new(directory);
    member.start();
    let mut client = member.client().await;
    let lease = client.lease_grant(1000, None).await.unwrap().id();
    for n in 0..KEYS {
        // Nothing that compresses well.
        let value: Vec<u8> = (0..VALUE_BYTES).map(|_| fastrand::u8(..)).collect();
        let options = PutOptions::new().with_lease(lease);
        client.put(format!("key/{n:04}"), value, Some(options)).await.unwrap();
    }
    let mut stream = client.snapshot().await.unwrap();
    let mut file = Vec::new();
    while let Some(message) = stream.message().await.unwrap() {
        file.extend_from_slice(message.blob());
    }
    member.kill();
    let path = directory.join("snapshot.db");
    fs::write(&path, file).unwrap();
    path
}

fn arguments(snapshot: &Path, data_dir: &Path) -> Vec<OsString> {
    let words: [OsString; 5] =
        ["snapshot".into(), "restore".into(), snapshot.into(), "--data-dir".into(), data_dir.into()];
    words.into()
}

fn restore(snapshot: &Path, data_dir: &Path) -> Finished {
    run(skegutl(), Path::new("/"), arguments(snapshot, data_dir), &[])
}

/// Starts a member on what is there, and finds everything.
async fn expect_whole(directory: &Path) {
    let mut member = Member::new(directory);
    member.start();
    let mut client = member.client().await;
    let mut lease = 0;
    for n in 0..KEYS {
        let found = client.get(format!("key/{n:04}"), None).await.unwrap();
        assert_eq!(found.kvs().first().map(|kv| kv.value().len()), Some(VALUE_BYTES), "key {n}");
        lease = found.kvs()[0].lease();
    }
    client.lease_revoke(lease).await.unwrap();
    let left = client.get("key/", Some(GetOptions::new().with_prefix().with_count_only())).await.unwrap();
    assert_eq!(left.count(), 0, "the keys hang on their lease");
    member.kill();
}

#[tokio::test]
async fn a_restore_onto_a_full_disk_leaves_nothing() {
    let source = tempfile::tempdir().unwrap();
    let snapshot = take_snapshot(source.path()).await;
    let before = fs::read(&snapshot).unwrap();
    let mount = Mount::tmpfs(6);
    for data_dir in [mount.path().join("data"), mount.path().to_owned()] {
        let refused = restore(&snapshot, &data_dir);
        assert_eq!(refused.code, Some(1), "{refused:?}");
        assert!(refused.stderr.contains("No space left on device"), "{refused:?}");
        assert_eq!(fs::read_dir(mount.path()).unwrap().count(), 0, "nothing is left behind");
    }
    assert!(fs::read(&snapshot).unwrap() == before, "the snapshot is as it was");
    mount.resize(200);
    let restored = restore(&snapshot, &mount.path().join("data"));
    assert_eq!(restored.code, Some(0), "{restored:?}");
    expect_whole(mount.path()).await;
}

#[tokio::test]
async fn a_restore_is_whole_after_a_power_cut_or_does_not_start() {
    let source = tempfile::tempdir().unwrap();
    let snapshot = take_snapshot(source.path()).await;
    let started = now();
    let scratch = tempfile::tempdir().unwrap();
    assert_eq!(restore(&snapshot, &scratch.path().join("data")).code, Some(0));
    let whole = now().duration_since(started);
    for part in [1, 2, 4, 7, 10] {
        let mount = Mount::ext4(300);
        let data_dir = mount.path().join("data");
        let mut process = Command::new(skegutl())
            .args(arguments(&snapshot, &data_dir))
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let is_done = if part == 10 {
            assert!(process.wait().unwrap().success());
            true
        } else {
            tokio::time::sleep((whole * part / 10).max(Duration::from_millis(1))).await;
            false
        };
        mount.power_off();
        let _ = process.kill();
        process.wait().unwrap();
        mount.power_on();
        if data_dir.join("member").exists() {
            expect_whole(mount.path()).await;
        } else {
            assert!(!is_done, "what was said to be done is there");
            let _ = restore(&snapshot, &data_dir);
            expect_whole(mount.path()).await;
        }
    }
}
