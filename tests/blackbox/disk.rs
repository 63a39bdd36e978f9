//! Disks that lose, damage or run out: what is acknowledged stays, and no start succeeds on lost data.

use std::collections::BTreeMap;
use std::fs::{self, OpenOptions};
use std::io::{Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use etcd_client::{
    AlarmAction, AlarmOptions, AlarmType, Client, CompactionOptions, DeleteOptions, GetOptions,
};

use skeg::clock::now;

use crate::member::Member;
use crate::mount::Mount;

async fn put_numbers(client: &mut Client, numbers: std::ops::Range<u32>) {
    for n in numbers {
        client.put(format!("key/{n}"), format!("a value to find: {n:06}"), None).await.unwrap();
    }
}

async fn expect_numbers(member: &Member, count: u32) {
    let answer = member.client().await.get("key/", Some(GetOptions::new().with_prefix())).await.unwrap();
    let found: BTreeMap<_, _> =
        answer.kvs().iter().map(|kv| (kv.key().to_vec(), kv.value().to_vec())).collect();
    let expected: BTreeMap<_, _> = (0..count)
        .map(|n| (format!("key/{n}").into_bytes(), format!("a value to find: {n:06}").into_bytes()))
        .collect();
    assert_eq!(found, expected);
}

/// A killed member with `count` keys in one log segment, and that segment.
async fn killed_member(directory: &Path, count: u32) -> (Member, PathBuf) {
    let mut member = Member::new(directory);
    member.start();
    put_numbers(&mut member.client().await, 0..count).await;
    member.kill();
    let segment = member.data().join("log/0000000000000001.log");
    (member, segment)
}

/// Every file below a folder with its bytes.
fn snapshot(folder: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut files = BTreeMap::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            files.extend(snapshot(&path));
        } else {
            files.insert(path.clone(), fs::read(&path).unwrap());
        }
    }
    files
}

fn overwrite(file: &Path, offset: usize, bytes: &[u8]) {
    let mut file = OpenOptions::new().write(true).open(file).unwrap();
    file.seek(SeekFrom::Start(offset as u64)).unwrap();
    file.write_all(bytes).unwrap();
}

#[tokio::test]
async fn a_torn_end_of_the_log_is_cut() {
    let directory = tempfile::tempdir().unwrap();
    let (mut member, segment) = killed_member(directory.path(), 20).await;
    let bytes = fs::read(&segment).unwrap();
    let end = bytes.iter().rposition(|byte| *byte != 0).unwrap() + 1;
    overwrite(&segment, end, &[0xA5; 700]);
    member.start();
    expect_numbers(&member, 20).await;
    put_numbers(&mut member.client().await, 20..25).await;
    let log = member.stop();
    // By the start's first look into the log: the store held nothing yet, and what decides how to begin is read there.
    let cut = log.lines().find(|line| line.contains("cut off the log's torn tail")).unwrap();
    assert!(cut.contains(&format!("\"offset\":{end},\"bytes\":700")), "{cut}");
    member.start();
    expect_numbers(&member, 25).await;
}

#[tokio::test]
async fn a_damaged_middle_of_the_log_is_refused_with_the_place() {
    let directory = tempfile::tempdir().unwrap();
    let (mut member, segment) = killed_member(directory.path(), 20).await;
    let bytes = fs::read(&segment).unwrap();
    let wanted = b"a value to find: 000007";
    let offset = bytes.windows(wanted.len()).position(|window| window == wanted).unwrap();
    overwrite(&segment, offset + 3, b"!");
    let before = snapshot(&member.data().join("log"));
    let refused = member.start_refused();
    assert_eq!(refused.code, Some(1), "{}", refused.stderr);
    let place = format!("{} is damaged at offset ", segment.display());
    let said = refused.stderr.split(&place).nth(1).unwrap_or_else(|| panic!("{}", refused.stderr));
    let at: usize = said.split(|c: char| !c.is_ascii_digit()).next().unwrap().parse().unwrap();
    assert!((offset - 100..=offset).contains(&at), "frame at {at}, damage at {offset}");
    assert!(said.contains("nothing was changed: restore"), "{said}");
    assert!(snapshot(&member.data().join("log")) == before, "nothing is changed by a refusal");
    overwrite(&segment, offset + 3, &bytes[offset + 3..offset + 4]);
    member.start();
    expect_numbers(&member, 20).await;
}

#[tokio::test]
async fn data_that_is_incomplete_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let (mut member, _) = killed_member(directory.path(), 20).await;
    // A clean stop settles the store, so that the log is no longer all there is.
    member.start();
    member.stop();
    for part in ["log", "identity"] {
        let (at, aside) = (member.data().join(part), directory.path().join("aside"));
        fs::rename(&at, &aside).unwrap();
        let refused = member.start_refused();
        assert_eq!(refused.code, Some(1), "without {part}: {}", refused.stderr);
        assert!(
            refused.stderr.contains("missing") || refused.stderr.contains("incomplete"),
            "without {part}: {}",
            refused.stderr
        );
        if at.is_dir() {
            fs::remove_dir_all(&at).unwrap();
        }
        fs::rename(&aside, &at).unwrap();
    }
    member.start();
    expect_numbers(&member, 20).await;
}

#[tokio::test]
async fn a_lost_store_is_rebuilt_from_a_whole_log() {
    let directory = tempfile::tempdir().unwrap();
    let (mut member, _) = killed_member(directory.path(), 20).await;
    member.start();
    let hash = member.client().await.hash_kv(0).await.unwrap().hash();
    member.stop();
    fs::remove_dir_all(member.data().join("store")).unwrap();
    member.start();
    expect_numbers(&member, 20).await;
    assert_eq!(member.client().await.hash_kv(0).await.unwrap().hash(), hash);
}

#[tokio::test]
async fn a_store_and_a_log_that_do_not_fit_are_refused() {
    let directory = tempfile::tempdir().unwrap();
    let mut member = Member::new(directory.path());
    member.set("wal-dir", directory.path().join("one").to_str().unwrap());
    member.start();
    put_numbers(&mut member.client().await, 0..20).await;
    member.stop();
    member.set("wal-dir", directory.path().join("other").to_str().unwrap());
    let refused = member.start_refused();
    assert_eq!(refused.code, Some(1), "{}", refused.stderr);
    assert!(refused.stderr.contains("part of the data is missing"), "{}", refused.stderr);
    member.set("wal-dir", directory.path().join("one").to_str().unwrap());
    member.start();
    expect_numbers(&member, 20).await;
}

#[tokio::test]
async fn a_quota_stops_writes_and_nothing_else() {
    let directory = tempfile::tempdir().unwrap();
    let mut member = Member::new(directory.path());
    member.set("quota-backend-bytes", "16777216");
    member.start();
    let mut client = member.client().await;
    let mut kept = 0;
    let refused = loop {
        match client.put(format!("big/{kept}"), noise(500_000), None).await {
            Ok(_) => kept += 1,
            Err(error) => break error.to_string(),
        }
        assert!(kept < 100, "the quota is enforced");
    };
    assert!(refused.contains("etcdserver: mvcc: database space exceeded"), "{refused}");
    member.kill();
    member.start();
    let mut client = member.client().await;
    let alarms = client.alarm(AlarmAction::Get, AlarmType::None, None).await.unwrap();
    assert_eq!(alarms.alarms().len(), 1, "it stays raised over a restart");
    let member_id = alarms.alarms()[0].member_id();
    assert!(client.put("small", "1", None).await.is_err());
    let count = client.get("big/", Some(GetOptions::new().with_prefix().with_count_only())).await.unwrap();
    assert_eq!(count.count(), kept, "reads go on, and nothing acknowledged is lost");

    let deleted = client.delete("big/", Some(DeleteOptions::new().with_prefix())).await.unwrap();
    let revision = deleted.header().unwrap().revision();
    client.compact(revision, Some(CompactionOptions::new().with_physical())).await.unwrap();
    client.defragment().await.unwrap();
    let mut options = AlarmOptions::new();
    options.with_member(member_id);
    client.alarm(AlarmAction::Deactivate, AlarmType::Nospace, Some(options)).await.unwrap();
    let status = client.status().await.unwrap();
    let sizes = format!("{} bytes, {} of them live", status.db_size(), status.raft_used_db_size());
    client
        .put("small", "1", None)
        .await
        .unwrap_or_else(|error| panic!("there is space again: {sizes}: {error}"));
}

#[tokio::test]
async fn the_alarm_of_a_quota_ends_below_the_low_water_mark_if_asked_to() {
    let directory = tempfile::tempdir().unwrap();
    let mut member = Member::new(directory.path());
    member.set("quota-backend-bytes", "16777216");
    member.set("skeg-nospace-low-water", "80");
    member.start();
    let mut client = member.client().await;
    let mut kept = 0;
    while client.put(format!("big/{kept}"), noise(500_000), None).await.is_ok() {
        kept += 1;
        assert!(kept < 100, "the quota is enforced");
    }
    tokio::time::sleep(Duration::from_secs(3)).await;
    assert!(client.put("small", "1", None).await.is_err(), "there is no room yet");
    let deleted = client.delete("big/", Some(DeleteOptions::new().with_prefix())).await.unwrap();
    let revision = deleted.header().unwrap().revision();
    client.compact(revision, Some(CompactionOptions::new().with_physical())).await.unwrap();
    client.defragment().await.unwrap();
    let started = now();
    while let Err(error) = client.put("small", "1", None).await {
        assert!(started.elapsed() < Duration::from_secs(60), "nobody clears it: {error}");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    let alarms = client.alarm(AlarmAction::Get, AlarmType::None, None).await.unwrap();
    assert!(alarms.alarms().is_empty());
}

#[tokio::test]
async fn a_full_disk_stops_writes_until_there_is_room() {
    let mount = Mount::tmpfs(60);
    let mut member = Member::new(mount.path());
    member.set("skeg-memtable-bytes", "4194304");
    member.start();
    let mut client = member.client().await;
    let mut kept = 0;
    let refused = loop {
        match client.put(format!("big/{kept:04}"), noise(200_000), None).await {
            Ok(_) => kept += 1,
            Err(error) => break error.to_string(),
        }
        assert!(kept < 1_000, "the disk is full some time");
    };
    assert!(kept > 10, "{kept}: {refused}");
    assert!(refused.contains("database space exceeded"), "{refused}");
    // Somebody else takes the rest.
    let hog = mount.path().join("hog");
    let mut file = fs::File::create(&hog).unwrap();
    while file.write_all(&noise(1 << 20)).is_ok() {}
    drop(file);
    let count = client.get("big/", Some(GetOptions::new().with_prefix().with_count_only())).await.unwrap();
    assert_eq!(count.count(), kept, "reads go on");
    eventually("the alarm is raised", async || !alarms(&member).await.is_empty()).await;

    // It starts again on the full disk, too: the reserve makes room.
    member.kill();
    member.start();
    let mut client = member.client().await;
    let count = client.get("big/", Some(GetOptions::new().with_prefix().with_count_only())).await.unwrap();
    assert_eq!(count.count(), kept, "nothing acknowledged is lost");
    assert!(client.put("small", "1", None).await.is_err());

    fs::remove_file(&hog).unwrap();
    mount.resize(400);
    eventually("the alarm is cleared", async || alarms(&member).await.is_empty()).await;
    client.put("after", "1", None).await.expect("writes go on once there is room");
}

async fn alarms(member: &Member) -> Vec<etcd_client::AlarmMember> {
    let mut client = member.client().await;
    match client.alarm(AlarmAction::Get, AlarmType::None, None).await {
        Ok(answer) => answer.alarms().to_vec(),
        Err(_) => Vec::new(),
    }
}

async fn eventually(what: &str, holds: impl AsyncFn() -> bool) {
    let started = now();
    while !holds().await {
        assert!(started.elapsed() < Duration::from_secs(30), "in vain: {what}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// Bytes that do not compress.
fn noise(length: usize) -> Vec<u8> {
    std::iter::repeat_with(|| fastrand::u8(..)).take(length).collect()
}
