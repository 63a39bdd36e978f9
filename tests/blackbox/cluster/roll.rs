//! A cluster that is rolled from the build before this one to this one, under load, and half-way back.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use skeg::clock::now;

use super::change::{add, remove_last};
use super::faults::ALONE;
use super::{Cluster, PATIENCE};
use crate::member::Member;
use crate::programs::skeg;

/// Calls that are answered between two steps.
const CALLS: usize = 60;
/// Longer than members take to tell each other what they know.
const LONG: Duration = Duration::from_secs(3);

/// The build before, from the cache or made now.
fn previous() -> PathBuf {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("scripts/previous.sh");
    let output = Command::new(script).stderr(Stdio::inherit()).output().expect("scripts/previous.sh runs");
    assert!(output.status.success(), "scripts/previous.sh failed: what it says is above");
    PathBuf::from(String::from_utf8(output.stdout).expect("a path in UTF-8").trim())
}

/// The level that a member says the cluster has reached; `None` from a build that has none.
fn level(member: &Member) -> Option<u32> {
    let mut connection = TcpStream::connect(member.address()).unwrap();
    connection.write_all(b"GET /metrics HTTP/1.1\r\nHost: m\r\nConnection: close\r\n\r\n").unwrap();
    let mut text = String::new();
    connection.read_to_string(&mut text).unwrap();
    let line = text.lines().find(|line| line.starts_with("skeg_cluster_level "))?;
    line.rsplit(' ').next()?.parse().ok()
}

/// Waits until all members say that the cluster has reached level 1.
async fn level_rises(members: &[Member]) {
    let started = now();
    for member in members {
        while level(member) != Some(1) {
            assert!(started.elapsed() < PATIENCE, "the level does not rise");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
}

/// Starts a build on a member's data.
fn start(member: &mut Member, build: &Path) {
    let ready = member.spawn(Command::new(build));
    ready.recv_timeout(PATIENCE).expect("the member gets ready");
}

/// Stops a member as an operator does, and starts another build on its data.
fn replace(cluster: &mut Cluster, at: usize, build: &Path) {
    cluster.members[at].stop();
    start(&mut cluster.members[at], build);
}

#[tokio::test]
async fn a_cluster_is_rolled_from_the_build_before_under_load() {
    let previous = previous();
    let _alone = ALONE.lock().await;
    let mut cluster = Cluster::prepare(3);
    let ready: Vec<_> =
        cluster.members.iter_mut().map(|member| member.spawn(Command::new(&previous))).collect();
    for ready in ready {
        ready.recv_timeout(PATIENCE).expect("the member gets ready");
    }
    let first = cluster.leader().await;
    let load = cluster.load();
    load.goes_on(CALLS).await;
    let mut client = cluster.members[(first + 1) % 3].client().await;
    add(&mut cluster, &mut client, true).await;
    start(&mut cluster.members[3], &previous);

    // One goes to this build and back, and then all that vote; the leader first, for the others must elect.
    replace(&mut cluster, first, skeg());
    load.goes_on(CALLS).await;
    assert_eq!(level(&cluster.members[first]), Some(0));
    replace(&mut cluster, first, &previous);
    load.goes_on(CALLS).await;
    for at in [first, (first + 1) % 3, (first + 2) % 3] {
        replace(&mut cluster, at, skeg());
        load.goes_on(CALLS).await;
    }
    tokio::time::sleep(LONG).await;
    assert_eq!(level(&cluster.members[first]), Some(0), "the learner is of the build before");
    let mut client = cluster.members[first].client().await;
    remove_last(&mut cluster, &mut client).await;
    level_rises(&cluster.members).await;
    load.goes_on(CALLS).await;

    // One restart more, on data that say so.
    replace(&mut cluster, first, skeg());
    assert_eq!(level(&cluster.members[first]), Some(1));
    load.goes_on(CALLS).await;
    cluster.check_served(load).await;
    no_way_back(&mut cluster, first, &previous).await;
    no_way_in(&mut cluster, &previous).await;
}

/// A member of a cluster of level 1 does not start with the build before, and starts with this one afterwards.
async fn no_way_back(cluster: &mut Cluster, at: usize, previous: &Path) {
    let member = &mut cluster.members[at];
    member.stop();
    let ready = member.spawn(Command::new(previous));
    assert!(member.ends_within(PATIENCE).await, "the build before does not go on");
    assert!(ready.try_recv().is_err(), "it never serves");
    let (status, log) = member.wait();
    // That build does not say why: the format.
    assert!(!status.success() && log.contains("open the store"), "{status}: {log}");
    start(member, skeg());
}

/// A new member of the build before is told why it is not let in, costs the others nothing, and joins with this one.
async fn no_way_in(cluster: &mut Cluster, previous: &Path) {
    let mut client = cluster.members[0].client().await;
    add(cluster, &mut client, false).await;
    // The build before joins only if the first that it asks knows of it already.
    for member in &cluster.members[..3] {
        assert_eq!(member.client().await.member_list().await.unwrap().members().len(), 4);
    }
    let member = &mut cluster.members[3];
    let log = member.log_file();
    member.set("log-outputs", &format!("stderr,{}", log.display()));
    let _ready = member.spawn(Command::new(previous));
    let refusal = "the cluster is at level 1, the member's build knows levels up to 0: use a newer build";
    let started = now();
    while !std::fs::read_to_string(&log).is_ok_and(|text| text.contains(refusal)) {
        assert!(started.elapsed() < PATIENCE, "it is not told");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    client.put("served", "all the time", None).await.unwrap();
    replace(cluster, 3, skeg());
    level_rises(&cluster.members).await;
    cluster.assert_equal().await;
}
