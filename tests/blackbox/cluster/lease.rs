//! Leases while leaders come and go: none ends early, and one that nobody renews ends.

use std::time::{Duration, Instant};

use etcd_client::{Client, PutOptions};
use rustix::process::Signal;
use skeg::clock::now;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};

use super::{Cluster, PATIENCE};
use crate::member::send;

const TTL_SECONDS: i64 = 4;
const TTL: Duration = Duration::from_secs(TTL_SECONDS.unsigned_abs());

/// Grants a lease through a member and puts a key under it; gives when the grant was asked for.
async fn grant(client: &mut Client, id: i64, key: &str) -> Instant {
    let asked = now();
    let options = etcd_client::LeaseGrantOptions::new().with_id(id);
    client.lease_grant(TTL_SECONDS, Some(options)).await.unwrap();
    client.put(key, "v", Some(PutOptions::new().with_lease(id))).await.unwrap();
    asked
}

/// Renews a lease through a member until told to stop. A failure is tried again.
fn renew(address: String, id: i64, stop: watch::Receiver<bool>) -> JoinHandle<()> {
    tokio::spawn(async move {
        let mut client = Client::connect([address], None).await.unwrap();
        while !*stop.borrow() {
            if let Ok(Ok((mut keeper, mut answers))) = timeout(TTL / 4, client.lease_keep_alive(id)).await {
                while !*stop.borrow() && keeper.keep_alive().await.is_ok() {
                    let Ok(Ok(Some(answer))) = timeout(TTL / 4, answers.message()).await else { break };
                    assert_ne!(answer.ttl(), 0, "the lease has ended although it is renewed");
                    sleep(TTL / 8).await;
                }
            }
            sleep(Duration::from_millis(50)).await;
        }
    })
}

async fn is_there(client: &mut Client, key: &str) -> bool {
    let started = now();
    loop {
        match client.get(key, None).await {
            Ok(found) => return found.count() == 1,
            Err(error) => assert!(started.elapsed() < PATIENCE, "{error}"),
        }
        sleep(Duration::from_millis(20)).await;
    }
}

/// Waits until a key is gone; gives when.
async fn gone(client: &mut Client, key: &str) -> Instant {
    let started = now();
    while is_there(client, key).await {
        assert!(started.elapsed() < PATIENCE, "the lease of {key} does not end");
        sleep(Duration::from_millis(20)).await;
    }
    now()
}

#[tokio::test]
async fn a_lease_outlives_its_leader_if_it_is_renewed_and_ends_if_not() {
    let mut cluster = Cluster::found(3);
    let leader = cluster.leader().await;
    let (one, other) = ((leader + 1) % 3, (leader + 2) % 3);
    let mut client = cluster.members[one].client().await;
    grant(&mut client, 1, "renewed").await;
    let (stop, stopping) = watch::channel(false);
    let renewing = renew(cluster.members[other].address(), 1, stopping);
    let asked = grant(&mut client, 2, "not renewed").await;
    cluster.members[leader].kill();
    let ended = gone(&mut client, "not renewed").await;
    assert!(ended.duration_since(asked) >= TTL, "it ended after {:?}", ended.duration_since(asked));
    assert!(is_there(&mut client, "renewed").await);
    cluster.start_all();
    cluster.leader().await;
    assert!(is_there(&mut client, "renewed").await);
    stop.send_replace(true);
    renewing.await.unwrap();
    gone(&mut client, "renewed").await;
    cluster.assert_equal().await;
}

#[tokio::test]
async fn a_leader_that_was_paused_ends_no_lease_that_the_next_one_renewed() {
    let cluster = Cluster::found(3);
    let leader = cluster.leader().await;
    let (one, other) = ((leader + 1) % 3, (leader + 2) % 3);
    let mut client = cluster.members[one].client().await;
    grant(&mut client, 1, "renewed").await;
    send(cluster.members[leader].pid(), Signal::STOP);
    let (stop, stopping) = watch::channel(false);
    let renewing = renew(cluster.members[other].address(), 1, stopping);
    sleep(TTL + TTL / 2).await;
    assert!(is_there(&mut client, "renewed").await);
    send(cluster.members[leader].pid(), Signal::CONT);
    // It has seen by its clock that the lease is over, and must not act on that.
    let continued = now();
    while continued.elapsed() < TTL / 2 {
        assert!(is_there(&mut client, "renewed").await);
        sleep(Duration::from_millis(50)).await;
    }
    let mut paused = cluster.members[leader].client().await;
    assert!(is_there(&mut paused, "renewed").await);
    stop.send_replace(true);
    renewing.await.unwrap();
    gone(&mut paused, "renewed").await;
    cluster.assert_equal().await;
}
