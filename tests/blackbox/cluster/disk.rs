//! Disks of members that stop answering, lose power, or are full.

use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use etcd_client::{AlarmAction, AlarmType, Client, GetOptions};
use skeg::clock::now;
use tokio::time::sleep;

use super::faults::ALONE;
use super::load::Load;
use super::{Cluster, PATIENCE};
use crate::http;
use crate::member::Member;
use crate::mount::Mount;

/// A file system whose writes wait until this is dropped.
struct Frozen<'m>(&'m Mount);

impl<'m> Frozen<'m> {
    fn new(mount: &'m Mount) -> Frozen<'m> {
        fsfreeze("--freeze", mount);
        Frozen(mount)
    }
}

impl Drop for Frozen<'_> {
    fn drop(&mut self) {
        fsfreeze("--unfreeze", self.0);
    }
}

fn fsfreeze(action: &str, mount: &Mount) {
    let done = Command::new("fsfreeze").arg(action).arg(mount.path()).status().expect("fsfreeze runs");
    assert!(done.success());
}

#[tokio::test]
async fn a_leader_whose_disk_stalls_makes_way() {
    let mounts: Vec<Mount> = (0..3).map(|_| Mount::ext4(300)).collect();
    let mut cluster = Cluster::prepare_in(mounts.iter().map(Mount::path));
    cluster.start_all();
    let leader = cluster.leader().await;
    let mut client = cluster.members[(leader + 1) % 3].client().await;
    client.put("before", "v", None).await.unwrap();
    let frozen = Frozen::new(&mounts[leader]);
    let started = now();
    // Writes go on meanwhile: the others commit.
    let mut written = 0;
    loop {
        if client.put(format!("during/{written}"), "v", None).await.is_ok() {
            written += 1;
        }
        let status = client.maintenance_client().status().await.unwrap();
        let old = status_of(&cluster.members[leader]).await;
        if status.leader() != 0 && status.leader() != old.0 {
            assert!(old.1.iter().any(|error| error.contains("waited")), "it says so: {:?}", old.1);
            break;
        }
        assert!(started.elapsed() < PATIENCE, "leadership stays where the disk does not answer");
        sleep(Duration::from_millis(50)).await;
    }
    drop(frozen);
    client.put("after", "v", None).await.unwrap();
    cluster.leader().await;
    cluster.assert_equal().await;
}

/// A member's id and what it says is wrong with it.
async fn status_of(member: &Member) -> (u64, Vec<String>) {
    let status = member.client().await.maintenance_client().status().await.unwrap();
    (status.header().unwrap().member_id(), status.errors().to_vec())
}

async fn eventually(what: &str, holds: impl AsyncFn() -> bool) {
    let started = now();
    while !holds().await {
        assert!(started.elapsed() < PATIENCE, "in vain: {what}");
        sleep(Duration::from_millis(50)).await;
    }
}

#[tokio::test]
async fn a_follower_whose_disk_stalls_says_so_and_nobody_waits_for_it() {
    let mounts: Vec<Mount> = (0..3).map(|_| Mount::ext4(300)).collect();
    let mut cluster = Cluster::prepare_in(mounts.iter().map(Mount::path));
    cluster.start_all();
    let leader = cluster.leader().await;
    let follower = (leader + 1) % 3;
    let stalled = &cluster.members[follower];
    let mut client = cluster.members[leader].client().await;
    client.put("key", "before", None).await.unwrap();
    stalled.client().await.get("key", None).await.unwrap();
    let frozen = Frozen::new(&mounts[follower]);
    for number in 0..20 {
        client.put(format!("during/{number}"), "v", None).await.unwrap();
    }
    eventually("it says that it waits for its disk", async || {
        status_of(stalled).await.1.iter().any(|error| error.contains("waited"))
    })
    .await;
    let old = stalled.client().await.get("key", Some(GetOptions::new().with_serializable())).await.unwrap();
    assert_eq!(old.kvs()[0].value(), b"before");
    assert_eq!(cluster.leader().await, leader);
    let ready = http::get(&stalled.address(), "/readyz?verbose");
    assert!(ready.contains("[-]log_sync"), "{ready}");
    drop(frozen);
    eventually("it waits no more", async || status_of(stalled).await.1.is_empty()).await;
    cluster.assert_equal().await;
}

/// Cuts the power of some members, and has it back once the others have gone on, if there are enough of them.
async fn cut_power(cluster: &mut Cluster, mounts: &[Mount], members: &[usize], load: &Load) {
    for at in members {
        mounts[*at].power_off();
    }
    for at in members {
        cluster.members[*at].kill();
    }
    if 2 * members.len() < cluster.members.len() {
        load.goes_on(60).await;
    }
    for at in members {
        mounts[*at].power_on();
    }
    cluster.start_all();
    cluster.leader().await;
    load.goes_on(60).await;
}

#[tokio::test]
async fn power_cuts_under_load() {
    let _alone = ALONE.lock().await;
    let mounts: Vec<Mount> = (0..3).map(|_| Mount::ext4(300)).collect();
    let mut cluster = Cluster::prepare_in(mounts.iter().map(Mount::path));
    cluster.start_all();
    let load = cluster.load();
    load.goes_on(60).await;
    let leader = cluster.leader().await;
    cut_power(&mut cluster, &mounts, &[leader], &load).await;
    let follower = (cluster.leader().await + 1) % 3;
    cut_power(&mut cluster, &mounts, &[follower], &load).await;
    let leader = cluster.leader().await;
    cut_power(&mut cluster, &mounts, &[leader, (leader + 1) % 3], &load).await;
    cut_power(&mut cluster, &mounts, &[0, 1, 2], &load).await;
    cluster.check(load).await;
}

/// Who has raised which alarm.
async fn alarms(client: &mut Client) -> Vec<u64> {
    let alarms = client.alarm(AlarmAction::Get, AlarmType::None, None).await;
    alarms
        .map(|alarms| alarms.alarms().iter().map(etcd_client::AlarmMember::member_id).collect())
        .unwrap_or_default()
}

#[tokio::test]
async fn a_full_disk_of_one_member_stops_writes_and_nothing_else_until_there_is_room() {
    let small = Mount::tmpfs(60);
    let large = tempfile::tempdir().unwrap();
    let others = ["one", "other"].map(|name| large.path().join(name));
    others.iter().for_each(|directory| std::fs::create_dir(directory).unwrap());
    let mut cluster = Cluster::prepare_in(others.iter().map(PathBuf::as_path).chain([small.path()]));
    cluster.members[2].set("skeg-memtable-bytes", "4194304");
    cluster.start_all();
    let full = status_of(&cluster.members[2]).await.0;
    let mut client = cluster.members[0].client().await;
    let mut kept = 0;
    let refused = loop {
        let value: Vec<u8> = std::iter::repeat_with(|| fastrand::u8(..)).take(200_000).collect();
        match client.put(format!("big/{kept}"), value, None).await {
            Ok(_) => kept += 1,
            Err(error) => break error.to_string(),
        }
        assert!(kept < 1_000, "the disk is full some time");
    };
    assert!(refused.contains("database space exceeded"), "{refused}");
    assert_eq!(alarms(&mut client).await, [full], "the one with the full disk says so");
    for member in &cluster.members {
        let all = GetOptions::new().with_prefix().with_count_only();
        let found = member.client().await.get("big/", Some(all)).await.unwrap();
        assert_eq!(found.count(), kept, "reads go on");
    }
    client.delete("big/0", None).await.expect("what makes room goes on");
    small.resize(400);
    let started = now();
    while let Err(error) = client.put("after", "v", None).await {
        assert!(started.elapsed() < PATIENCE, "writes do not go on: {error}");
        sleep(Duration::from_millis(50)).await;
    }
    cluster.assert_equal().await;
}
