//! What may happen to members and to the network between them, while clients are at work.
//!
//! Each test goes through several faults with one set of clients; at the end all that they were told must be true.

use std::time::Duration;

use rustix::process::Signal;
use tokio::sync::Mutex;
use tokio::time::sleep;

use super::load::Load;
use super::proxy::{Pair, Way, around};
use super::{Cluster, ELECTION_TIMEOUT};
use crate::member::send;

/// Calls answered between two faults.
const CALLS: usize = 60;
/// Longer than an election takes.
const LONG: Duration = ELECTION_TIMEOUT.saturating_mul(4);
/// One such test at a time: several would only wait for each other's processors.
pub(super) static ALONE: Mutex<()> = Mutex::const_new(());

/// The leader and the others.
async fn roles(cluster: &Cluster) -> (usize, Vec<usize>) {
    let leader = cluster.leader().await;
    (leader, (0..cluster.members.len()).filter(|at| *at != leader).collect())
}

/// Kills some members under load, and starts them again after others have gone on, if there are enough of them.
async fn kill(cluster: &mut Cluster, load: &Load, members: &[usize]) {
    for at in members {
        cluster.members[*at].kill();
    }
    if 2 * members.len() < cluster.members.len() {
        load.goes_on(CALLS).await;
    }
    cluster.start_all();
    cluster.leader().await;
    load.goes_on(CALLS).await;
}

#[tokio::test]
async fn killed_members_under_load() {
    let _alone = ALONE.lock().await;
    let mut cluster = Cluster::found(3);
    let load = cluster.load();
    load.goes_on(CALLS).await;
    let (leader, others) = roles(&cluster).await;
    kill(&mut cluster, &load, &[leader]).await;
    let (_, others_then) = roles(&cluster).await;
    kill(&mut cluster, &load, &others_then[..1]).await;
    let (leader, others_then) = roles(&cluster).await;
    kill(&mut cluster, &load, &[leader, others_then[0]]).await;
    kill(&mut cluster, &load, &others).await;
    kill(&mut cluster, &load, &[0, 1, 2]).await;
    cluster.check(load).await;
}

/// Stops some members' processes for longer than an election takes.
async fn pause(cluster: &Cluster, load: &Load, members: &[usize]) {
    for at in members {
        send(cluster.members[*at].pid(), Signal::STOP);
    }
    if 2 * members.len() < cluster.members.len() {
        load.goes_on(CALLS).await;
    }
    sleep(LONG).await;
    for at in members {
        send(cluster.members[*at].pid(), Signal::CONT);
    }
    cluster.leader().await;
    load.goes_on(CALLS).await;
}

#[tokio::test]
async fn paused_members_under_load() {
    let _alone = ALONE.lock().await;
    let cluster = Cluster::found(3);
    let load = cluster.load();
    load.goes_on(CALLS).await;
    let (leader, _) = roles(&cluster).await;
    pause(&cluster, &load, &[leader]).await;
    let (_, others) = roles(&cluster).await;
    pause(&cluster, &load, &others[..1]).await;
    let (leader, others) = roles(&cluster).await;
    pause(&cluster, &load, &[leader, others[0]]).await;
    pause(&cluster, &load, &[0, 1, 2]).await;
    cluster.check(load).await;
}

/// Cuts some ways for longer than an election takes; the cluster must go on meanwhile.
async fn cut(cluster: &Cluster, load: &Load, pairs: Vec<Pair>) {
    println!("cut {pairs:?}");
    let cut = cluster.network().cut(pairs);
    sleep(LONG).await;
    load.goes_on(CALLS).await;
    cluster.network().heal(cut);
    cluster.leader().await;
    load.goes_on(CALLS).await;
}

#[tokio::test]
async fn cut_networks_under_load() {
    let _alone = ALONE.lock().await;
    let cluster = Cluster::found_with_network(3);
    let load = cluster.load();
    load.goes_on(CALLS).await;
    let (leader, others) = roles(&cluster).await;
    cut(&cluster, &load, around(leader, others)).await;
    let (leader, others) = roles(&cluster).await;
    cut(&cluster, &load, around(others[0], [leader, others[1]])).await;
    // One sees both, who do not see each other.
    let (leader, others) = roles(&cluster).await;
    cut(&cluster, &load, around(leader, [others[0]])).await;
    let (leader, others) = roles(&cluster).await;
    cut(&cluster, &load, around(others[0], [others[1]])).await;
    let nobody = cluster
        .network()
        .cut(around(leader, others.iter().copied()).into_iter().chain(around(others[0], [others[1]])));
    sleep(LONG).await;
    cluster.network().heal(nobody);
    load.goes_on(CALLS).await;
    cluster.check(load).await;
}

#[tokio::test]
async fn networks_cut_one_way_under_load() {
    let _alone = ALONE.lock().await;
    let cluster = Cluster::found_with_network(3);
    let load = cluster.load();
    load.goes_on(CALLS).await;
    let (leader, others) = roles(&cluster).await;
    cut(&cluster, &load, others.iter().map(|other| (leader, *other)).collect()).await;
    let (leader, others) = roles(&cluster).await;
    cut(&cluster, &load, others.iter().map(|other| (*other, leader)).collect()).await;
    let (leader, others) = roles(&cluster).await;
    cut(&cluster, &load, vec![(leader, others[0])]).await;
    let (leader, others) = roles(&cluster).await;
    cut(&cluster, &load, vec![(others[0], leader)]).await;
    cluster.check(load).await;
}

#[tokio::test]
async fn slow_and_lossy_networks_under_load() {
    let _alone = ALONE.lock().await;
    let cluster = Cluster::found_with_network(3);
    let load = cluster.load();
    load.goes_on(CALLS).await;
    let all: Vec<Pair> = [around(0, [1, 2]), around(1, [2])].concat();
    let ways = [
        Way { delay: Duration::from_millis(50), ..Way::default() },
        Way { bytes_per_second: Some(1_000_000), ..Way::default() },
        Way { loses_one_in: Some(30), ..Way::default() },
    ];
    let network = cluster.network();
    for way in ways {
        for pair in &all {
            network.set(*pair, way);
        }
        load.goes_on(CALLS).await;
        let (hindered, broken) = all.iter().fold((0, 0), |(hindered, broken), pair| {
            let traffic = network.traffic(*pair);
            (hindered + traffic.hindered, broken + traffic.broken)
        });
        assert!(hindered > 0 && (broken > 0 || way.loses_one_in.is_none()), "{way:?} was in the way");
    }
    for pair in &all {
        network.set(*pair, Way::default());
    }
    cluster.leader().await;
    load.goes_on(CALLS).await;
    cluster.check(load).await;
}

#[tokio::test]
async fn each_member_restarted_in_turn_under_load() {
    let _alone = ALONE.lock().await;
    let mut cluster = Cluster::found(3);
    let load = cluster.load();
    for at in 0..3 {
        load.goes_on(CALLS).await;
        cluster.members[at].stop();
        load.goes_on(CALLS).await;
        cluster.start_all();
        cluster.leader().await;
    }
    cluster.check(load).await;
}
