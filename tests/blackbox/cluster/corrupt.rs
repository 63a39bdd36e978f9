//! Members whose stored data differs from the others'.

use std::time::Duration;

use etcd_client::{AlarmAction, AlarmType, CompactionOptions};
use skeg::clock::now;
use skeg::storage::EngineOptions;
use skeg::storage::mvcc::{Store, StoreOptions};
use skeg::storage::schema::Family;

use super::{Cluster, PATIENCE};
use crate::member::Member;

/// Leaves a member's data as it is.
const KEPT: (&str, &str) = ("skeg-mend-divergence", "false");

/// Changes a value that a stopped member has stored, behind everybody's back.
fn corrupt(member: &Member) {
    let engine = EngineOptions { memtable_bytes: 4 << 20, block_cache_bytes: 4 << 20 };
    let store =
        Store::open(&member.data().join("store"), StoreOptions { engine, heads_bytes: 1 << 16 }).unwrap();
    let engine = store.engine();
    let (key, mut value) = {
        let versions = engine.iterate(Family::Kv, b"key", None);
        let (key, value) = versions.item().expect("a version is stored");
        (key.to_vec(), value.to_vec())
    };
    *value.last_mut().expect("it has a value") ^= 1;
    let mut batch = engine.batch();
    batch.put(Family::Kv, &key, &value);
    engine.write(batch).unwrap();
    engine.flush().unwrap();
    engine.stop();
}

/// A cluster with a key, one of whose followers holds something else; that one is not started again.
pub(super) async fn with_a_corrupt_follower(flags: &[(&str, &str)]) -> (Cluster, usize) {
    let mut cluster = Cluster::prepare(3);
    for member in &mut cluster.members {
        for (flag, value) in flags {
            member.set(flag, value);
        }
    }
    cluster.start_all();
    let corrupted = (cluster.leader().await + 1) % 3;
    let mut client = cluster.members[corrupted].client().await;
    client.put("key", "value", None).await.unwrap();
    // Settles the store, so that the log does not repair it.
    client.defragment().await.unwrap();
    cluster.members[corrupted].stop();
    corrupt(&cluster.members[corrupted]);
    (cluster, corrupted)
}

async fn expect_alarm_of(cluster: &Cluster, member_id: u64) {
    let started = now();
    let mut client = cluster.members[0].client().await;
    loop {
        let alarms = client.alarm(AlarmAction::Get, AlarmType::None, None).await.unwrap();
        if let [alarm] = alarms.alarms() {
            assert_eq!((alarm.alarm(), alarm.member_id()), (AlarmType::Corrupt, member_id));
            return;
        }
        assert!(started.elapsed() < PATIENCE, "nobody notices");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

async fn id_of(member: &Member) -> u64 {
    member.client().await.maintenance_client().status().await.unwrap().header().unwrap().member_id()
}

#[tokio::test]
async fn the_periodic_check_names_the_member_that_differs() {
    let (mut cluster, corrupted) = with_a_corrupt_follower(&[("corrupt-check-time", "300ms"), KEPT]).await;
    cluster.start_all();
    let id = id_of(&cluster.members[corrupted]).await;
    expect_alarm_of(&cluster, id).await;
    let mut client = cluster.members[(corrupted + 1) % 3].client().await;
    let refused = client.put("key", "w", None).await.unwrap_err();
    assert!(refused.to_string().contains("corrupt cluster"), "{refused}");
}

#[tokio::test]
async fn the_compaction_check_names_the_member_that_differs() {
    let flags = [("feature-gates", "CompactHashCheck=true"), ("compact-hash-check-time", "300ms"), KEPT];
    let (mut cluster, corrupted) = with_a_corrupt_follower(&flags).await;
    cluster.start_all();
    let id = id_of(&cluster.members[corrupted]).await;
    let mut client = cluster.members[corrupted].client().await;
    let revision = client.put("other", "v", None).await.unwrap().header().unwrap().revision();
    client.compact(revision, Some(CompactionOptions::new().with_physical())).await.unwrap();
    expect_alarm_of(&cluster, id).await;
}

#[tokio::test]
async fn the_initial_check_refuses_to_serve() {
    let flags = [("feature-gates", "InitialCorruptCheck=true")];
    let (cluster, corrupted) = with_a_corrupt_follower(&flags).await;
    let refused = cluster.members[corrupted].start_refused();
    assert_eq!(refused.code, Some(1), "{}", refused.stderr);
    assert!(refused.stderr.contains("found data inconsistency with peers"), "{}", refused.stderr);
}
