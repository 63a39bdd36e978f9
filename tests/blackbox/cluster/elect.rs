//! Leaders come and go; what was acknowledged stays.

use std::time::Duration;

use etcd_client::{Client, GetOptions};
use rustix::process::Signal;
use skeg::clock::now;

use super::{Cluster, ELECTION_TIMEOUT};
use crate::http;
use crate::member::send;

/// Writes until it is acknowledged; gives how long that took.
async fn put_until_done(client: &mut Client, key: &str) -> Duration {
    let started = now();
    while let Err(error) = client.put(key, "v", None).await {
        assert!(started.elapsed() < Duration::from_secs(30), "no write gets through: {error}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    started.elapsed()
}

#[tokio::test]
async fn three_members_elect_serve_and_agree() {
    let cluster = Cluster::found(3);
    cluster.leader().await;
    for (at, member) in cluster.members.iter().enumerate() {
        let mut client = member.client().await;
        client.put(format!("from/{at}"), "v", None).await.unwrap();
        let all = client.get("from/", Some(GetOptions::new().with_prefix())).await.unwrap();
        assert_eq!(all.count(), i64::try_from(at).unwrap() + 1, "a member reads what any acknowledged");
        assert_eq!(client.member_list().await.unwrap().members().len(), 3);
    }
    cluster.assert_equal().await;
}

#[tokio::test]
async fn a_killed_leader_is_replaced_and_comes_back_as_a_follower() {
    let mut cluster = Cluster::found(3);
    let mut acknowledged = Vec::new();
    for round in 0..3 {
        let leader = cluster.leader().await;
        cluster.members[leader].kill();
        let other = (leader + 1) % 3;
        let mut client = cluster.members[other].client().await;
        let key = format!("round/{round}");
        let took = put_until_done(&mut client, &key).await;
        println!("{took:?} without a leader");
        acknowledged.push(key);
        cluster.start_all();
        for member in &cluster.members {
            let mut client = member.client().await;
            let found = client.get("round/", Some(GetOptions::new().with_prefix())).await.unwrap();
            assert_eq!(found.count(), i64::try_from(acknowledged.len()).unwrap());
        }
    }
    cluster.assert_equal().await;
}

#[tokio::test]
async fn a_stopped_leader_hands_over() {
    let mut cluster = Cluster::found(3);
    let leader = cluster.leader().await;
    let other = (leader + 1) % 3;
    let mut client = cluster.members[other].client().await;
    client.put("before", "v", None).await.unwrap();
    cluster.members[leader].end_by(Signal::TERM);
    let took = put_until_done(&mut client, "after").await;
    assert!(took < ELECTION_TIMEOUT, "it took {took:?}: nobody was elected before the leader went");
}

#[tokio::test]
async fn without_a_quorum_nothing_is_acknowledged_and_serializable_reads_go_on() {
    let mut cluster = Cluster::found(3);
    let leader = cluster.leader().await;
    let mut client = cluster.members[leader].client().await;
    client.put("key", "v", None).await.unwrap();
    for at in (0..3).filter(|at| *at != leader) {
        cluster.members[at].kill();
    }
    let refused = client.put("key", "w", None).await.unwrap_err();
    let because = ["request timed out", "context deadline exceeded"];
    assert!(because.iter().any(|because| refused.to_string().contains(because)), "{refused}");
    let read = client.get("key", Some(GetOptions::new().with_serializable())).await.unwrap();
    assert_eq!(read.kvs()[0].value_str().unwrap(), "v");
    let status = client.maintenance_client().status().await.unwrap();
    assert_eq!(status.leader(), 0, "a leader without a quorum is none");
    let metrics = http::get(&cluster.members[leader].address(), "/metrics");
    for none in ["etcd_server_has_leader 0", "etcd_server_is_leader 0"] {
        assert!(metrics.lines().any(|line| line == none), "no {none:?} in {metrics}");
    }
    cluster.start_all();
    put_until_done(&mut client, "again").await;
    cluster.assert_equal().await;
}

#[tokio::test]
async fn a_paused_leader_is_replaced_and_follows_when_it_goes_on() {
    let cluster = Cluster::found(3);
    let leader = cluster.leader().await;
    let other = (leader + 1) % 3;
    let mut client = cluster.members[other].client().await;
    send(cluster.members[leader].pid(), Signal::STOP);
    let took = put_until_done(&mut client, "key").await;
    println!("{took:?} without a leader");
    send(cluster.members[leader].pid(), Signal::CONT);
    let mut paused = cluster.members[leader].client().await;
    let read = paused.get("key", None).await.unwrap();
    assert_eq!(read.count(), 1, "it does not serve what it knew before");
    cluster.leader().await;
    cluster.assert_equal().await;
}
