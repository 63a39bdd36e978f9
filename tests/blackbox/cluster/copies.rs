//! Members that are not what they were: old copies of a directory, two processes with copies of one, a directory that is
//! lost. Refused, said once, nothing lost.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use etcd_client::GetOptions;
use rustix::process::Signal;
use skeg::clock::now;
use tokio::time::sleep;

use super::{Cluster, PATIENCE, name};
use crate::member::{Member, send};
use crate::programs::skeg;

pub(super) fn copy(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let target = to.join(entry.file_name());
        if entry.file_type().unwrap().is_dir() {
            copy(&entry.path(), &target);
        } else {
            std::fs::copy(entry.path(), target).unwrap();
        }
    }
}

pub(super) async fn put_some(client: &mut etcd_client::Client, prefix: &str) {
    for key in 0..20 {
        client.put(format!("{prefix}/{key}"), "v", None).await.unwrap();
    }
}

/// Gives a member the directory back that it had earlier, and what it acknowledged since to nobody.
struct OldCopy {
    member: usize,
    data: std::path::PathBuf,
    old: std::path::PathBuf,
}

impl OldCopy {
    /// Takes the copy; the member runs again afterwards.
    fn take(cluster: &mut Cluster, member: usize) -> OldCopy {
        let data = cluster.members[member].data_dir();
        let old = data.with_extension("old");
        cluster.members[member].stop();
        copy(&data, &old);
        cluster.start_all();
        OldCopy { member, data, old }
    }

    /// Starts the member with it, without waiting.
    fn restore(&self, cluster: &mut Cluster) {
        cluster.members[self.member].stop();
        std::fs::remove_dir_all(&self.data).unwrap();
        copy(&self.old, &self.data);
        drop(cluster.members[self.member].spawn(Command::new(skeg())));
    }
}

/// Three members whose leader stays, however busy the machine is.
fn steady() -> Cluster {
    let mut cluster = Cluster::prepare(3);
    for member in &mut cluster.members {
        member.set("election-timeout", "5000");
    }
    cluster.start_all();
    cluster
}

/// It must end by itself, for the reason that it has forgotten something.
async fn ends_forgetful(member: &mut Member) {
    assert!(member.ends_within(PATIENCE).await, "it goes on with what it has forgotten");
    let (status, log) = member.wait();
    assert_eq!(status.code(), Some(1), "{log}");
    assert!(log.contains("has forgotten") && !log.contains("panicked"), "{log}");
}

#[tokio::test]
async fn a_member_with_an_old_copy_of_its_directory_is_refused() {
    let mut cluster = steady();
    let leader = cluster.leader().await;
    let forgetful = (leader + 1) % 3;
    let mut client = cluster.members[leader].client().await;
    put_some(&mut client, "old").await;
    let old = OldCopy::take(&mut cluster, forgetful);
    put_some(&mut client, "new").await;
    old.restore(&mut cluster);
    ends_forgetful(&mut cluster.members[forgetful]).await;
    // It may be started again and again; others are not disturbed.
    drop(cluster.members[forgetful].spawn(Command::new(skeg())));
    ends_forgetful(&mut cluster.members[forgetful]).await;
    put_some(&mut client, "after").await;
    cluster.assert_equal().await;
    replace(&mut cluster, &mut client, forgetful).await;
    let log = cluster.members[leader].stop();
    assert!(!log.contains("panicked"), "{log}");
    assert_eq!(log.matches("has forgotten").count(), 1, "said once: {log}");
}

/// The leader and the member that forgets it are the only ones with an entry. While the leader is there, the other gets it
/// back or is refused; it does not make a leader of one that never had it.
#[tokio::test]
async fn what_a_member_has_forgotten_is_not_voted_away() {
    let mut cluster = Cluster::found(3);
    let leader = cluster.leader().await;
    let (forgetful, lagging) = ((leader + 1) % 3, (leader + 2) % 3);
    let mut client = cluster.members[leader].client().await;
    put_some(&mut client, "old").await;
    let old = OldCopy::take(&mut cluster, forgetful);
    send(cluster.members[lagging].pid(), Signal::STOP);
    put_some(&mut client, "new").await;
    old.restore(&mut cluster);
    let started = now();
    while !cluster.members[forgetful].ends_within(Duration::from_millis(100)).await
        && client.put("after", "v", None).await.is_err()
    {
        assert!(started.elapsed() < PATIENCE, "it is neither refused nor brought up to date");
    }
    send(cluster.members[lagging].pid(), Signal::CONT);
    let started = now();
    let mut other = cluster.members[lagging].client().await;
    while let Err(error) = other.put("after", "v", None).await {
        assert!(started.elapsed() < PATIENCE, "{error}");
    }
    let found = other.get("new/", Some(GetOptions::new().with_prefix())).await.unwrap();
    assert_eq!(found.count(), 20, "what was acknowledged is there");
    let log = cluster.members[leader].stop();
    assert!(!log.contains("panicked"), "{log}");
}

/// Removes a member whose directory is lost or wrong, and adds a new one in its place.
async fn replace(cluster: &mut Cluster, client: &mut etcd_client::Client, at: usize) {
    let id = member_id(cluster, client, at).await;
    let started = now();
    while let Err(error) = client.member_remove(id).await {
        assert!(started.elapsed() < PATIENCE, "{error}");
        sleep(Duration::from_millis(100)).await;
    }
    let url = cluster.members[at].peer_url();
    while let Err(error) = client.member_add([url.clone()], None).await {
        assert!(started.elapsed() < PATIENCE, "{error}");
        sleep(Duration::from_millis(100)).await;
    }
    let _ = std::fs::remove_dir_all(cluster.members[at].data_dir());
    cluster.members[at].set("initial-cluster-state", "existing");
    cluster.start_all();
    cluster.leader().await;
    cluster.assert_equal().await;
}

async fn member_id(cluster: &Cluster, client: &mut etcd_client::Client, at: usize) -> u64 {
    let url = cluster.members[at].peer_url();
    let list = client.member_list().await.unwrap();
    let member = list.members().iter().find(|member| member.peer_urls().contains(&url));
    member.expect("it is a member").id()
}

/// The same with an empty directory, as after the loss of a disk.
#[tokio::test]
async fn a_member_that_lost_its_directory_is_refused_until_it_is_replaced() {
    let mut cluster = steady();
    let leader = cluster.leader().await;
    let lost = (leader + 1) % 3;
    let mut client = cluster.members[leader].client().await;
    put_some(&mut client, "key").await;
    cluster.members[lost].stop();
    std::fs::remove_dir_all(cluster.members[lost].data_dir()).unwrap();
    let refused = cluster.members[lost].start_refused();
    // By the others when it asks them, or by the leader if they were too busy to answer.
    let because = ["has already been bootstrapped", "has forgotten"];
    assert!(because.iter().any(|because| refused.stderr.contains(because)), "{}", refused.stderr);
    let _ = std::fs::remove_dir_all(cluster.members[lost].data_dir());
    cluster.members[lost].set("initial-cluster-state", "existing");
    drop(cluster.members[lost].spawn(Command::new(skeg())));
    ends_forgetful(&mut cluster.members[lost]).await;
    // As often as it is started: it holds nothing by which it could tell that it was refused.
    drop(cluster.members[lost].spawn(Command::new(skeg())));
    ends_forgetful(&mut cluster.members[lost]).await;
    replace(&mut cluster, &mut client, lost).await;
}

/// Waits until a member has met another in its present life, and has that on disk.
async fn has_met(member: &Member, other: &Member) {
    let lives = std::fs::read_to_string(other.data().join("lives")).unwrap();
    let life = lives.lines().rev().nth(1).expect("it has begun a life");
    let started = now();
    while !std::fs::read_to_string(member.data().join("peers")).is_ok_and(|peers| peers.contains(life)) {
        assert!(started.elapsed() < PATIENCE, "they do not meet");
        sleep(Duration::from_millis(20)).await;
    }
}

/// What only the leader and another member have: the leader dies, the other forgets it, and the third never had it. The
/// third has only met the other since, and was itself restarted.
#[tokio::test]
async fn what_only_a_dead_leader_and_a_forgetful_member_had_is_not_voted_away() {
    let mut cluster = steady();
    let leader = cluster.leader().await;
    let (forgetful, lagging) = ((leader + 1) % 3, (leader + 2) % 3);
    let mut client = cluster.members[leader].client().await;
    put_some(&mut client, "old").await;
    let old = OldCopy::take(&mut cluster, forgetful);
    has_met(&cluster.members[lagging], &cluster.members[forgetful]).await;
    cluster.members[lagging].kill();
    put_some(&mut client, "new").await;
    cluster.members[leader].kill();
    old.restore(&mut cluster);
    let ready = cluster.members[lagging].spawn(Command::new(skeg()));
    ends_forgetful(&mut cluster.members[forgetful]).await;
    assert!(ready.try_recv().is_err(), "one of three members serves");
    drop(cluster.members[leader].spawn(Command::new(skeg())));
    ready.recv_timeout(PATIENCE).expect("two of three members serve");
    let mut client = cluster.members[lagging].client().await;
    let found = client.get("new/", Some(GetOptions::new().with_prefix())).await.unwrap();
    assert_eq!(found.count(), 20, "what was acknowledged is there");
    replace(&mut cluster, &mut client, forgetful).await;
    let log = cluster.members[lagging].stop();
    assert_eq!(log.matches("refused a peer").count(), 1, "said once: {log}");
}

/// A second process with a copy of a member's directory, at addresses that nobody knows.
#[tokio::test]
async fn of_two_members_with_one_directory_the_second_is_refused() {
    let mut cluster = Cluster::found(3);
    let leader = cluster.leader().await;
    let copied = (leader + 1) % 3;
    let mut client = cluster.members[leader].client().await;
    put_some(&mut client, "before").await;
    cluster.members[copied].stop();
    let elsewhere = tempfile::tempdir().unwrap();
    copy(&cluster.members[copied].data_dir(), &elsewhere.path().join("data"));
    let mut second = Member::new(elsewhere.path());
    second.set("name", &name(copied));
    // Nobody knows whether the first will come back, or where; the second is not at the addresses that the member has.
    drop(second.spawn(Command::new(skeg())));
    sleep(Duration::from_secs(2)).await;
    cluster.start_all();
    let load = cluster.load();
    load.goes_on(30).await;
    is_a_copy(&mut second).await;
    // Starting it again does not help, whoever leads, with the first there or without it.
    cluster.members[leader].kill();
    load.goes_on(60).await;
    drop(second.spawn(Command::new(skeg())));
    is_a_copy(&mut second).await;
    cluster.start_all();
    cluster.leader().await;
    cluster.members[copied].stop();
    drop(second.spawn(Command::new(skeg())));
    load.goes_on(60).await;
    cluster.start_all();
    is_a_copy(&mut second).await;
    load.goes_on(60).await;
    cluster.check(load).await;
}

/// It must end by itself, for the reason that it is a copy.
async fn is_a_copy(member: &mut Member) {
    assert!(member.ends_within(PATIENCE).await, "it goes on beside the member that it is a copy of");
    let (status, log) = member.wait();
    assert_eq!(status.code(), Some(1), "{log}");
    assert!(log.contains("another process has run as this member") && !log.contains("panicked"), "{log}");
}
