//! Members that have applied something else than the others, as a fault of theirs would have it.

use std::fs::read_to_string;
use std::sync::Arc;
use std::time::Duration;

use etcd_client::{AlarmAction, AlarmMember, AlarmType};
use prost::Message;
use skeg::apply::{Run, State};
use skeg::clock::now;
use skeg::proto::etcdserverpb::PutRequest;
use skeg::proto::skegpb::LogId;
use skeg::proto::skegpb::command::Kind;
use skeg::storage::EngineOptions;
use skeg::storage::mvcc::{Store, StoreOptions};
use skeg::storage::schema::{Family, MetaKey};

use super::{Cluster, PATIENCE};
use crate::member::Member;

/// The state that a stopped member has stored.
fn open(member: &Member) -> State {
    let engine = EngineOptions { memtable_bytes: 4 << 20, block_cache_bytes: 4 << 20 };
    let store = Store::open(&member.data().join("store"), StoreOptions { engine, heads_bytes: 1 << 16 });
    State::open(Arc::new(store.unwrap())).unwrap()
}

/// Has a stopped member apply something else than what stands next in its log, of which there must be an entry.
fn misapply(member: &Member, value: &'static str) {
    let state = open(member);
    let store = state.store();
    let applied = store.engine().get(Family::Meta, &MetaKey::Applied.encode()).unwrap().unwrap().to_vec();
    let applied = LogId::decode(&*applied).unwrap();
    let mut run = Run::new(&state, &store);
    let put = PutRequest { key: "key".into(), value: value.into(), ..PutRequest::default() };
    let next = LogId { index: applied.index + 1, ..applied };
    let _answer = run.apply(Kind::Put(put), None, next).unwrap().unwrap();
    run.commit().unwrap();
    store.engine().flush().unwrap();
}

/// Three members of which none is mended.
pub(super) fn found_unmended() -> Cluster {
    let mut cluster = Cluster::prepare(3);
    for member in &mut cluster.members {
        member.set("skeg-mend-divergence", "false");
    }
    cluster.start_all();
    cluster
}

/// Has one member apply something else than the others, and starts all again; gives which.
pub(super) async fn make_one_differ(cluster: &mut Cluster) -> usize {
    let wrong = with_unapplied(cluster, 1).await[0];
    misapply(&cluster.members[wrong], "something else");
    cluster.start_all();
    wrong
}

/// Removes what an older build would not have written.
fn forget_trail(member: &Member) {
    let store = open(member).store();
    let mut batch = store.engine().batch();
    batch.delete(Family::Meta, &MetaKey::Trail.encode());
    store.engine().write(batch).unwrap();
    store.engine().flush().unwrap();
}

/// Members of which some followers do not run, in whose logs stands an entry that they have not applied.
async fn with_unapplied(cluster: &mut Cluster, followers: usize) -> Vec<usize> {
    let leader = cluster.leader().await;
    let count = cluster.members.len();
    let followers: Vec<usize> = (1..=followers).map(|step| (leader + step) % count).collect();
    let mut client = cluster.members[leader].client().await;
    client.put("key", "value", None).await.unwrap();
    for at in &followers {
        // Settles the store once it has this: what comes then is in the log alone.
        let mut client = cluster.members[*at].client().await;
        client.get("key", None).await.unwrap();
        client.defragment().await.unwrap();
    }
    client.put("key", "another", None).await.unwrap();
    for at in &followers {
        cluster.members[*at].client().await.get("key", None).await.unwrap();
        cluster.members[*at].kill();
    }
    followers
}

pub(super) async fn alarms(cluster: &Cluster, at: usize) -> Vec<AlarmMember> {
    let mut client = cluster.members[at].client().await;
    client.alarm(AlarmAction::Get, AlarmType::None, None).await.unwrap().alarms().to_vec()
}

async fn expect_corrupt(cluster: &Cluster, at: usize, expected: &[u64]) {
    let mut expected = expected.to_vec();
    expected.sort_unstable();
    let started = now();
    loop {
        let found = alarms(cluster, at).await;
        let mut members: Vec<u64> = found.iter().map(AlarmMember::member_id).collect();
        members.sort_unstable();
        if members == expected {
            assert!(found.iter().all(|alarm| alarm.alarm() == AlarmType::Corrupt));
            return;
        }
        assert!(started.elapsed() < PATIENCE, "alarms of {members:?}, not of {expected:?}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

pub(super) async fn id_of(member: &Member) -> u64 {
    member.client().await.maintenance_client().status().await.unwrap().header().unwrap().member_id()
}

#[tokio::test]
async fn a_member_that_has_applied_something_else_is_named() {
    let mut cluster = found_unmended();
    let wrong = make_one_differ(&mut cluster).await;
    let id = id_of(&cluster.members[wrong]).await;
    expect_corrupt(&cluster, (wrong + 1) % 3, &[id]).await;
    let mut client = cluster.members[(wrong + 1) % 3].client().await;
    let refused = client.put("key", "w", None).await.unwrap_err();
    assert!(refused.to_string().contains("corrupt cluster"), "{refused}");
}

/// As after an update from a build that does not hash what it applies, member by member.
#[tokio::test]
async fn members_whose_hashes_begin_apart_are_compared_after_a_while() {
    let mut cluster = Cluster::prepare(3);
    for member in &mut cluster.members {
        let log = member.log_file();
        member.set("log-outputs", &format!("stderr,{}", log.display()));
        member.set("skeg-mend-divergence", "false");
    }
    cluster.start_all();
    let older = with_unapplied(&mut cluster, 1).await[0];
    forget_trail(&cluster.members[older]);
    cluster.start_all();
    let begins = "members are compared from here on";
    let started = now();
    while !cluster.members.iter().any(|member| read_to_string(member.log_file()).unwrap().contains(begins)) {
        assert!(started.elapsed() < PATIENCE, "they are never compared");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let wrong = make_one_differ(&mut cluster).await;
    let id = id_of(&cluster.members[wrong]).await;
    expect_corrupt(&cluster, wrong, &[id]).await;
}
