//! Members come and go while the cluster serves.

use std::time::Duration;

use etcd_client::{AlarmAction, AlarmOptions, AlarmType, Client, MemberAddOptions};
use skeg::clock::now;

use super::faults::ALONE;
use super::{Cluster, PATIENCE, name};

/// Adds another member, once the cluster is healthy for long enough, and starts it.
async fn add_and_start(cluster: &mut Cluster, client: &mut Client, learner: bool) -> u64 {
    let id = add(cluster, client, learner).await;
    cluster.start_all();
    id
}

/// Adds another member, once the cluster is healthy for long enough.
pub(super) async fn add(cluster: &mut Cluster, client: &mut Client, learner: bool) -> u64 {
    let url = cluster.prepare_another().peer_url();
    let started = now();
    loop {
        let options = if learner { Some(MemberAddOptions::new().with_is_learner()) } else { None };
        match client.member_add([url.clone()], options).await {
            Ok(added) => return added.member().unwrap().id(),
            Err(error) => {
                assert!(error.to_string().contains("unhealthy cluster"), "{error}");
                assert!(started.elapsed() < PATIENCE, "the cluster does not become healthy");
                tokio::time::sleep(Duration::from_millis(200)).await;
            }
        }
    }
}

#[tokio::test]
async fn a_cluster_grows_from_one_to_three_and_shrinks_again() {
    let mut cluster = Cluster::found(1);
    let mut client = cluster.members[0].client().await;
    client.put("first", "v", None).await.unwrap();
    for size in 2..=3 {
        add_and_start(&mut cluster, &mut client, false).await;
        client.put(format!("with/{size}"), "v", None).await.unwrap();
        cluster.leader().await;
        cluster.assert_equal().await;
    }
    let ids: Vec<u64> = {
        let mut ids = Vec::new();
        for member in &cluster.members {
            let status = member.client().await.maintenance_client().status().await.unwrap();
            ids.push(status.header().unwrap().member_id());
        }
        ids
    };
    // The leader goes first: the others must elect, and it must end by itself.
    let leader = cluster.leader().await;
    let mut other = cluster.members[(leader + 1) % 3].client().await;
    let started = now();
    while let Err(error) = other.member_remove(ids[leader]).await {
        assert!(error.to_string().contains("unhealthy cluster"), "{error}");
        assert!(started.elapsed() < PATIENCE);
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    assert!(cluster.members[leader].ends_within(PATIENCE).await, "a removed member ends by itself");
    let (status, _) = cluster.members[leader].wait();
    assert!(status.success(), "{status}");
    let refused = cluster.members[leader].start_refused();
    assert!(refused.stderr.contains("permanently removed"), "{}", refused.stderr);
    other.put("two are left", "v", None).await.unwrap();
    assert_eq!(other.member_list().await.unwrap().members().len(), 2);
    cluster.leader().await;
    cluster.assert_equal().await;
}

/// Removes the last member once the cluster is healthy for long enough; it must end by itself.
pub(super) async fn remove_last(cluster: &mut Cluster, client: &mut Client) {
    let mut last = cluster.members.pop().unwrap();
    let id = last.client().await.maintenance_client().status().await.unwrap().header().unwrap().member_id();
    let started = now();
    while let Err(error) = client.member_remove(id).await {
        assert!(started.elapsed() < PATIENCE, "{error}");
        tokio::time::sleep(Duration::from_millis(200)).await;
        // It was removed, but nobody could say so.
        if client.member_list().await.is_ok_and(|list| list.members().iter().all(|member| member.id() != id))
        {
            break;
        }
    }
    assert!(last.ends_within(PATIENCE).await, "a removed member ends by itself");
    assert!(last.wait().0.success());
    // For the next one to be added.
    std::fs::remove_dir_all(cluster.directory.path().join(name(cluster.members.len()))).unwrap();
}

#[tokio::test]
async fn a_cluster_goes_from_one_member_to_five_and_back_under_load() {
    let _alone = ALONE.lock().await;
    let mut cluster = Cluster::found(1);
    let mut client = cluster.members[0].client().await;
    let load = cluster.load();
    for size in 2..=5 {
        load.goes_on(60).await;
        add_and_start(&mut cluster, &mut client, false).await;
        cluster.leader().await;
        println!("{size} members");
    }
    load.goes_on(60).await;
    cluster.assert_equal().await;
    while cluster.members.len() > 1 {
        // Each of them leads before it goes.
        let leader = cluster.leader().await;
        let last = cluster.members.last().unwrap();
        let id =
            last.client().await.maintenance_client().status().await.unwrap().header().unwrap().member_id();
        if leader != cluster.members.len() - 1 {
            let mut leading = cluster.members[leader].client().await.maintenance_client();
            leading.move_leader(id).await.expect("leadership is handed over");
        }
        remove_last(&mut cluster, &mut client).await;
        load.goes_on(60).await;
    }
    cluster.check_served(load).await;
}

#[tokio::test]
async fn a_learner_learns_and_is_promoted() {
    let mut cluster = Cluster::found(1);
    let mut client = cluster.members[0].client().await;
    client.put("first", "v", None).await.unwrap();
    let id = add_and_start(&mut cluster, &mut client, true).await;
    let mut learner = cluster.members[1].client().await;
    let status = learner.maintenance_client().status().await.unwrap();
    assert!(status.is_learner());
    let refused = learner.put("key", "v", None).await.unwrap_err();
    assert!(refused.to_string().contains("rpc not supported for learner"), "{refused}");
    let started = now();
    while let Err(error) = client.member_promote(id).await {
        assert!(error.to_string().contains("in sync with leader"), "{error}");
        assert!(started.elapsed() < PATIENCE, "the learner does not catch up");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let started = now();
    while let Err(error) = learner.put("key", "v", None).await {
        assert!(started.elapsed() < PATIENCE, "{error}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert!(client.member_list().await.unwrap().members().iter().all(|member| !member.is_learner()));
    cluster.assert_equal().await;
}

#[tokio::test]
async fn a_member_that_was_not_added_is_refused() {
    let mut cluster = Cluster::found(1);
    cluster.prepare_another();
    let stranger = cluster.members.pop().unwrap();
    let refused = stranger.start_refused();
    assert_eq!(refused.code, Some(1));
    assert!(refused.stderr.contains("member count is unequal"), "{}", refused.stderr);
}

#[tokio::test]
async fn an_added_member_that_never_starts_costs_no_quorum() {
    let mut cluster = Cluster::found(1);
    let mut client = cluster.members[0].client().await;
    let url = cluster.prepare_another().peer_url();
    let added = client.member_add([url], None).await.unwrap();
    client.put("still", "served", None).await.unwrap();
    client.member_remove(added.member().unwrap().id()).await.unwrap();
    client.put("and", "again", None).await.unwrap();
    let absent = cluster.members.pop().unwrap();
    assert!(!absent.runs());
}

#[tokio::test]
async fn a_survivor_goes_on_alone_by_force() {
    let mut cluster = Cluster::found(3);
    cluster.leader().await;
    let mut client = cluster.members[0].client().await;
    client.put("kept", "v", None).await.unwrap();
    let survivor = 1;
    for member in &mut cluster.members {
        member.kill();
    }
    let mut alone = cluster.members.swap_remove(survivor);
    alone.set("force-new-cluster", "true");
    alone.start();
    let mut client = alone.client().await;
    assert_eq!(client.get("kept", None).await.unwrap().count(), 1);
    client.put("alone", "v", None).await.unwrap();
    assert_eq!(client.member_list().await.unwrap().members().len(), 1);
    // What it left behind is no part of it any more.
    let mut other = cluster.members.pop().unwrap();
    let _waits = other.spawn(std::process::Command::new(crate::programs::skeg()));
    assert!(other.ends_within(PATIENCE).await, "a removed member ends by itself");
    alone.stop();
    alone.set("force-new-cluster", "false");
    alone.start();
    assert_eq!(alone.client().await.get("alone", None).await.unwrap().count(), 1);
}

#[tokio::test]
async fn members_find_each_other_at_a_discovery_service() {
    let registry = Cluster::found(1);
    let mut service = registry.members[0].client().await;
    service.put("/_etcd/registry/a-token/_config/size", "2", None).await.unwrap();
    let mut cluster = Cluster::prepare_discovered(3, &registry.members[0].address(), "a-token");
    let late = cluster.members.pop().unwrap();
    cluster.start_all();
    cluster.leader().await;
    let mut client = cluster.members[0].client().await;
    assert_eq!(client.member_list().await.unwrap().members().len(), 2);
    let refused = late.start_refused();
    assert!(refused.stderr.contains("discovery: cluster is full"), "{}", refused.stderr);
}

/// Waits until all members vote: then each can lead.
async fn all_vote(cluster: &Cluster) {
    let started = now();
    for (at, member) in cluster.members.iter().enumerate() {
        let id =
            member.client().await.maintenance_client().status().await.unwrap().header().unwrap().member_id();
        loop {
            let leader = cluster.leader().await;
            if leader == at {
                break;
            }
            let mut leading = cluster.members[leader].client().await.maintenance_client();
            if let Err(error) = leading.move_leader(id).await {
                assert!(started.elapsed() < PATIENCE, "{error}");
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        }
    }
}

#[tokio::test]
async fn a_member_has_itself_added_and_another_takes_the_place_of_a_dead_one() {
    let mut cluster = Cluster::found(1);
    let mut client = cluster.members[0].client().await;
    client.put("first", "v", None).await.unwrap();
    let at = cluster.members[0].peer_url();
    for _ in 0..2 {
        let member = cluster.prepare_another();
        member.set("initial-cluster", "");
        member.set("skeg-join", &at);
        cluster.start_all();
    }
    assert_eq!(client.member_list().await.unwrap().members().len(), 3);
    // One that dies while it is being given a vote takes the quorum along.
    all_vote(&cluster).await;
    let dead = (cluster.leader().await + 1) % 3;
    let (alive, name) = ((dead + 1) % 3, super::name(dead));
    let at = cluster.members[alive].peer_url();
    let early = cluster.prepare_another();
    early.set("skeg-join", &at);
    early.set("skeg-replace", &name);
    let refused = early.start_refused();
    assert!(refused.stderr.contains("still answers"), "{}", refused.stderr);
    let (_, log) = cluster.members[dead].kill();
    assert!(log.contains(r#""msg":"caught up with the cluster","percent":100"#), "{log}");
    // Its silence is noticed by the next question.
    let started = now();
    let new = cluster.members.len() - 1;
    loop {
        let ready = cluster.members[new].spawn(std::process::Command::new(crate::programs::skeg()));
        if ready.recv_timeout(PATIENCE).is_ok() {
            break;
        }
        let (_, log) = cluster.members[new].wait();
        assert!(log.contains("still answers") && started.elapsed() < PATIENCE, "{log}");
    }
    let mut client = cluster.members[alive].client().await;
    let members = client.member_list().await.unwrap();
    let mut names: Vec<_> = members.members().iter().map(|member| member.name().to_owned()).collect();
    names.sort();
    assert!(names.len() == 3 && !names.contains(&name), "{names:?}");
    cluster.members.swap_remove(dead);
    client.put("after", "v", None).await.unwrap();
    cluster.leader().await;
    cluster.assert_equal().await;
}

#[tokio::test]
async fn a_removed_member_takes_its_alarm_with_it() {
    let cluster = Cluster::found(3);
    let leader = cluster.leader().await;
    let gone = (leader + 1) % 3;
    let status = cluster.members[gone].client().await.maintenance_client().status().await.unwrap();
    let id = status.header().unwrap().member_id();
    let mut client = cluster.members[leader].client().await;
    for member in [id, 77] {
        let mut of_member = AlarmOptions::new();
        of_member.with_member(member);
        client.alarm(AlarmAction::Activate, AlarmType::Nospace, Some(of_member)).await.unwrap();
    }
    let started = now();
    while let Err(error) = client.member_remove(id).await {
        assert!(error.to_string().contains("unhealthy cluster"), "{error}");
        assert!(started.elapsed() < PATIENCE);
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    loop {
        let alarms = client.alarm(AlarmAction::Get, AlarmType::None, None).await.unwrap();
        let members: Vec<u64> = alarms.alarms().iter().map(|alarm| alarm.member_id()).collect();
        assert!(members.contains(&77), "one that was raised for nobody stays: {members:?}");
        if members == [77] {
            break;
        }
        assert!(started.elapsed() < PATIENCE, "{members:?}");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}
