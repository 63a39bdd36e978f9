//! Compaction that nobody asks for.

use std::time::Duration;

use etcd_client::{Client, GetOptions};
use skeg::clock::now;
use tokio::time::sleep;

use crate::cluster::Cluster;
use crate::member::Member;

const PATIENCE: Duration = Duration::from_secs(30);
const COMPACTED: &str = "etcdserver: mvcc: required revision has been compacted";

/// Puts until a revision can no longer be read.
async fn put_until_compacted(client: &mut Client, revision: i64) {
    let started = now();
    while started.elapsed() < PATIENCE {
        client.put("key", "new", None).await.unwrap();
        match client.get("key", Some(GetOptions::new().with_revision(revision))).await {
            Ok(_) => {}
            Err(etcd_client::Error::GRpcStatus(status)) => return assert_eq!(status.message(), COMPACTED),
            Err(error) => panic!("{error}"),
        }
        sleep(Duration::from_millis(50)).await;
    }
    panic!("revision {revision} is not compacted");
}

async fn put(client: &mut Client) -> i64 {
    client.put("key", "old", None).await.unwrap().header().unwrap().revision()
}

#[tokio::test]
async fn what_is_old_is_compacted_unasked() {
    let directory = tempfile::tempdir().unwrap();
    let mut member = Member::new(directory.path());
    member.set("auto-compaction-retention", "1s");
    member.start();
    let mut client = member.client().await;
    let old = put(&mut client).await;
    put_until_compacted(&mut client, old).await;
    let newest = client.get("key", None).await.unwrap();
    assert_eq!(newest.kvs()[0].value(), b"new");
}

#[tokio::test]
async fn a_new_leader_goes_on_compacting() {
    let mut cluster = Cluster::prepare(3);
    for member in &mut cluster.members {
        member.set("auto-compaction-retention", "1s");
    }
    cluster.start_all();
    let leader = cluster.leader().await;
    let other = (leader + 1) % 3;
    let mut client = cluster.members[other].client().await;
    let old = put(&mut client).await;
    put_until_compacted(&mut client, old).await;
    cluster.members[leader].kill();
    cluster.leader().await;
    let mut client = cluster.members[other].client().await;
    let old = put(&mut client).await;
    put_until_compacted(&mut client, old).await;
    cluster.start_all();
    for member in &cluster.members {
        let mut client = member.client().await;
        assert_eq!(client.get("key", None).await.unwrap().kvs()[0].value(), b"new");
        let gone = client.get("key", Some(GetOptions::new().with_revision(old))).await.unwrap_err();
        assert!(gone.to_string().contains(COMPACTED), "{gone}");
    }
}

#[tokio::test]
async fn nothing_is_compacted_unless_asked_for() {
    let directory = tempfile::tempdir().unwrap();
    let mut member = Member::new(directory.path());
    member.start();
    let mut client = member.client().await;
    let old = put(&mut client).await;
    put(&mut client).await;
    sleep(Duration::from_secs(2)).await;
    let kept = client.get("key", Some(GetOptions::new().with_revision(old))).await.unwrap();
    assert_eq!(kept.kvs()[0].mod_revision(), old);
}
