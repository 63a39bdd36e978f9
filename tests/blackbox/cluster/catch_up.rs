//! A member that lacks what the others have purged is sent their files.

use std::collections::BTreeMap;
use std::time::Duration;

use etcd_client::{
    Client, EventType, GetOptions, LeaseTimeToLiveOptions, PutOptions, WatchOptions, WatchStream,
};
use rustix::process::Signal;
use skeg::clock::now;

use super::copies::copy;
use super::{Cluster, PATIENCE};
use crate::member::{Member, send};

/// Keys that are written again and again.
const KEYS: usize = 300;

/// Pieces that a new member takes before it is killed again.
const PIECES_A_LIFE: u64 = 30;
/// Bytes of the note that it makes of each.
const JOURNAL_RECORD_BYTES: u64 = 24;

/// A cluster that flushes and purges soon.
fn prepare(size: usize) -> Cluster {
    let mut cluster = Cluster::prepare(size);
    for member in &mut cluster.members {
        purge_soon(member);
    }
    cluster.start_all();
    cluster
}

fn purge_soon(member: &mut Member) {
    member.set("snapshot-count", "10");
    member.set("snapshot-catchup-entries", "10");
}

/// Writes `count` values of a kilobyte, many at once.
async fn write(client: &Client, from: usize, count: usize) {
    let mut writers = tokio::task::JoinSet::new();
    for writer in 0..20 {
        let mut client = client.clone();
        writers.spawn(async move {
            for at in (from + writer..from + count).step_by(20) {
                let value = vec![u8::try_from(at % 251).unwrap(); 1000];
                client.put(format!("w/{}", at % KEYS), value, None).await.unwrap();
            }
        });
    }
    while let Some(done) = writers.join_next().await {
        done.unwrap();
    }
}

/// What a watcher was told: every change of a key once, in order, for its versions count up.
#[derive(Default)]
struct Told {
    versions: BTreeMap<Vec<u8>, i64>,
    events: usize,
    revision: i64,
}

impl Told {
    /// Takes the next message; gives the compact revision if it ends the watch.
    async fn next(&mut self, watcher: &mut WatchStream) -> Option<i64> {
        let message = tokio::time::timeout(PATIENCE, watcher.message()).await.expect("a message comes");
        let message = message.unwrap().expect("the stream goes on");
        for event in message.events() {
            assert_eq!(event.event_type(), EventType::Put);
            let kv = event.kv().unwrap();
            assert!(kv.mod_revision() > self.revision, "events come in order");
            self.revision = kv.mod_revision();
            let version = self.versions.entry(kv.key().to_vec()).or_default();
            *version += 1;
            assert_eq!(kv.version(), *version, "no event is lost or doubled");
            self.events += 1;
        }
        message.canceled().then(|| message.compact_revision())
    }
}

/// Waits until the store of a member is a peer's.
async fn await_installed(member: &Member) {
    let started = now();
    while !member.data().join("generation").exists() {
        assert!(started.elapsed() < PATIENCE, "the member is not sent any files");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Waits until a member has given up the first segment of its log. That follows a flush, which waits for a pause in the
/// writes, and waits for those who are being sent what is in it.
async fn await_purged(member: &Member) {
    let started = now();
    while member.data().join("log/0000000000000001.log").exists() {
        assert!(started.elapsed() < PATIENCE, "the log is not purged");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test]
async fn a_paused_member_takes_the_files_and_its_watchers_miss_nothing() {
    let cluster = prepare(3);
    let leader = cluster.leader().await;
    let behind = (leader + 1) % 3;
    let mut client = cluster.members[leader].client().await;
    let mut slow = cluster.members[behind].client().await;
    let ended = client.lease_grant(3600, None).await.unwrap().id();
    let mut watcher = slow.watch("w/", Some(WatchOptions::new().with_prefix())).await.unwrap();
    write(&client, 0, 200).await;
    slow.get("w/0", None).await.unwrap();
    send(cluster.members[behind].pid(), Signal::STOP);
    client.lease_revoke(ended).await.unwrap();
    let lease = client.lease_grant(3600, None).await.unwrap().id();
    client.put("leased", "v", Some(PutOptions::new().with_lease(lease))).await.unwrap();
    write(&client, 200, 5000).await;
    await_purged(&cluster.members[leader]).await;
    let last = client.put("w/last", "v", None).await.unwrap().header().unwrap().revision();
    send(cluster.members[behind].pid(), Signal::CONT);
    await_installed(&cluster.members[behind]).await;
    write(&client, 5200, 200).await;

    let mut told = Told::default();
    while told.events < 5401 {
        assert_eq!(told.next(&mut watcher).await, None);
    }
    assert!(told.revision > last);

    let mut slow = cluster.members[behind].client().await;
    let options = Some(LeaseTimeToLiveOptions::new().with_keys());
    let found = slow.lease_time_to_live(lease, options).await.unwrap();
    assert_eq!((found.granted_ttl(), found.keys()), (3600, &[b"leased".to_vec()][..]));
    let ids: Vec<i64> =
        slow.leases().await.unwrap().leases().iter().map(etcd_client::LeaseStatus::id).collect();
    assert_eq!(ids, [lease]);
    slow.lease_revoke(lease).await.unwrap();
    assert_eq!(slow.get("leased", None).await.unwrap().count(), 0);
    assert_eq!(slow.member_list().await.unwrap().members().len(), 3);
    cluster.assert_equal().await;
}

#[tokio::test]
async fn a_watcher_behind_a_compaction_is_told() {
    let cluster = prepare(3);
    let leader = cluster.leader().await;
    let behind = (leader + 1) % 3;
    let mut client = cluster.members[leader].client().await;
    let mut slow = cluster.members[behind].client().await;
    let mut watcher = slow.watch("w/", Some(WatchOptions::new().with_prefix())).await.unwrap();
    write(&client, 0, 100).await;
    let mut told = Told::default();
    while told.events < 100 {
        assert_eq!(told.next(&mut watcher).await, None);
    }
    send(cluster.members[behind].pid(), Signal::STOP);
    write(&client, 100, 5000).await;
    let revision = client.get("w/0", None).await.unwrap().header().unwrap().revision();
    client.compact(revision, None).await.unwrap();
    let last = client.put("w/last", "v", None).await.unwrap().header().unwrap().revision();
    await_purged(&cluster.members[leader]).await;
    send(cluster.members[behind].pid(), Signal::CONT);
    // It may have been told everything before the compaction came, or be ended by it; but not told with a gap.
    while told.revision < last {
        if let Some(compacted) = told.next(&mut watcher).await {
            assert_eq!(compacted, revision);
            break;
        }
    }
    await_installed(&cluster.members[behind]).await;
    let mut slow = cluster.members[behind].client().await;
    let next = client.get("w/0", None).await.unwrap().header().unwrap().revision();
    let physical = Some(etcd_client::CompactionOptions::new().with_physical());
    slow.compact(next - 1, physical.clone()).await.unwrap_err();
    client.put("w/0", "v", None).await.unwrap();
    slow.compact(next + 1, physical).await.unwrap();
    cluster.assert_equal().await;
}

/// A new member is killed again and again while files come, under writes; in the end it has what the others have.
#[tokio::test]
async fn a_new_member_is_sent_the_files_whatever_ends_it_meanwhile() {
    let mut cluster = prepare(1);
    let mut client = cluster.members[0].client().await;
    for part in 0..10 {
        // Apart from each other in the files, and of a size that compresses badly.
        let mut writers = tokio::task::JoinSet::new();
        for writer in 0..10 {
            let mut client = client.clone();
            writers.spawn(async move {
                let mut random = fastrand::Rng::with_seed(part * 10 + writer);
                for at in 0..20 {
                    let value: Vec<u8> = (0..40_000).map(|_| random.u8(..)).collect();
                    client.put(format!("large/{part}/{writer}/{at}"), value, None).await.unwrap();
                }
            });
        }
        while let Some(done) = writers.join_next().await {
            done.unwrap();
        }
    }
    write(&client, 0, 1500).await;
    await_purged(&cluster.members[0]).await;
    purge_soon(cluster.prepare_another());
    let url = cluster.members[1].peer_url();
    let started = now();
    while let Err(error) = client.member_add([url.clone()], None).await {
        assert!(started.elapsed() < PATIENCE, "{error}");
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    let writing = tokio::spawn({
        let client = client.clone();
        async move {
            for round in 0..20 {
                write(&client, round * 100, 100).await;
            }
        }
    });
    let mut arrived = 0;
    for _ in 0..5 {
        let ready = cluster.members[1].spawn(std::process::Command::new(crate::programs::skeg()));
        let journal = cluster.members[1].data().join("staging/journal");
        let started = now();
        let length = || std::fs::metadata(&journal).map_or(0, |journal| journal.len());
        while length() < arrived + PIECES_A_LIFE * JOURNAL_RECORD_BYTES {
            assert!(started.elapsed() < PATIENCE, "nothing more arrives after {arrived} bytes of journal");
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        cluster.members[1].kill();
        drop(ready);
        assert!(length() > arrived, "what had arrived is used");
        arrived = length();
    }
    cluster.start_all();
    writing.await.unwrap();
    cluster.leader().await;
    assert!(cluster.members[1].data().join("generation").exists());
    cluster.assert_equal().await;
    let mut new = cluster.members[1].client().await;
    new.put("from the new one", "v", None).await.unwrap();
    cluster.members[1].kill();
    cluster.start_all();
    cluster.leader().await;
    cluster.assert_equal().await;
}

/// The directory is that of a crash after a peer's files were put in place, and before the log was purged up to them.
#[tokio::test]
async fn a_member_that_has_just_taken_files_can_be_forced_to_go_on_alone() {
    let mut cluster = Cluster::prepare(3);
    let last = cluster.members.len() - 1;
    // The last one flushes nothing by itself: its files stay as they came.
    for member in &mut cluster.members[..last] {
        purge_soon(member);
    }
    cluster.start_all();
    cluster.leader().await;
    cluster.members[last].kill();
    let (log, old_log) =
        (cluster.members[last].data().join("log"), cluster.members[last].data().join("old-log"));
    copy(&log, &old_log);
    let client = cluster.members[0].client().await;
    write(&client, 0, 2000).await;
    await_purged(&cluster.members[0]).await;
    await_purged(&cluster.members[1]).await;
    cluster.start_all();
    await_installed(&cluster.members[last]).await;
    for member in &mut cluster.members {
        member.kill();
    }
    std::fs::remove_dir_all(&log).unwrap();
    std::fs::rename(&old_log, &log).unwrap();
    let mut alone = cluster.members.pop().unwrap();
    alone.set("force-new-cluster", "true");
    alone.start();
    let mut client = alone.client().await;
    client.put("alone", "v", None).await.unwrap();
    assert_eq!(client.member_list().await.unwrap().members().len(), 1);
    alone.kill();
    alone.set("force-new-cluster", "false");
    alone.start();
    let all = GetOptions::new().with_prefix().with_count_only();
    let mut client = alone.client().await;
    assert_eq!(client.get("w/", Some(all)).await.unwrap().count(), i64::try_from(KEYS).unwrap());
    assert_eq!(client.get("alone", None).await.unwrap().count(), 1);
}
