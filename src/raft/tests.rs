//! One member through real openraft on real files: what was acknowledged is there after any end.
//!
//! A crash is a copy of the directories taken while the member runs and nothing is under way: the store's files then
//! stand at their last flush, and the log has the rest.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use futures::future::join_all;
use tokio::sync::mpsc::UnboundedReceiver;

use super::node::{Beginning, Node, NodeOptions, StartError};
use super::propose::ProposeError;
use crate::apply::{Compaction, Reply, State};
use crate::auth::token::Tokens;
use crate::proto::etcdserverpb as pb;
use crate::proto::skegpb::ClusterLevelSet;
use crate::proto::skegpb::command::Kind;
use crate::storage::EngineOptions;
use crate::storage::data_dir::Identity;
use crate::storage::mvcc::hash::RevisionHash;
use crate::storage::mvcc::{Store, StoreOptions};
use crate::storage::snapshot::Generations;
use crate::telemetry::metrics::Metrics;
use crate::watch::{Hub, HubOptions};

const MEMBER: u64 = 0x2e12_59d4_15f2_a040;

struct Member {
    node: Node,
    state: State,
    compactions: UnboundedReceiver<Compaction>,
}

impl Member {
    async fn start(dir: &Path) -> Result<Member, StartError> {
        let engine = EngineOptions { memtable_bytes: 4 << 20, block_cache_bytes: 4 << 20 };
        let options = StoreOptions { engine, heads_bytes: 1 << 16 };
        let store = Arc::new(Store::open(&dir.join("store"), options).expect("the store opens"));
        let state = State::open(Arc::clone(&store)).expect("the leases and members load");
        let hub = Arc::new(Hub::new(store, HubOptions { queued_bytes_max: 1 << 20 }));
        let options = NodeOptions {
            identity: Identity { member_id: MEMBER, cluster_id: 1 },
            beginning: Beginning::Founding(BTreeMap::from([(MEMBER, ("m".to_owned(), Vec::new()))])),
            log_dir: dir.join("log"),
            log_tail_bytes: 1 << 16,
            no_fsync: true,
            observer: None,
            heartbeat_interval: Duration::from_millis(20),
            election_timeout: Duration::from_millis(200),
            pre_vote: true,
            force_new_cluster: false,
            request_timeout: Duration::from_secs(20),
            max_request_bytes: 1 << 20,
            keep_entries: 50,
            generations: Arc::new(Generations::open(dir).expect("the directory opens")),
            lives_dir: dir.to_owned(),
            tokens: Arc::new(Tokens::None),
            metrics: Arc::new(Metrics::new(false)),
            slow_apply: Duration::from_secs(1),
        };
        let (node, compactions) = Node::start(options, state.clone(), hub).await?;
        node.read_barrier().await.expect("the member leads");
        Ok(Member { node, state, compactions })
    }

    async fn propose(&mut self, commands: Vec<Kind>) {
        let outcomes = join_all(commands.into_iter().map(|command| self.node.propose(command))).await;
        assert!(outcomes.iter().all(Result::is_ok), "every proposal is answered");
        while let Ok(compaction) = self.compactions.try_recv() {
            let finished = self.state.store().finish_compaction(compaction.previous, compaction.revision);
            finished.expect("the compaction finishes");
        }
    }

    fn standing(&self) -> Standing {
        let store = self.state.store();
        let applied = self.node.status().applied;
        let (hash, revision) = store.hash_kv(0).expect("it hashes");
        let leases =
            self.state.leases.read().iter().map(|lease| (lease.id, lease.remaining_seconds)).collect();
        Standing { applied, revision, compacted: store.compacted(), hash, leases }
    }

    /// Stops, and waits until the last task has let go of the store.
    async fn stop(self) {
        let store = Arc::downgrade(&self.state.store());
        drop(self.state);
        self.node.stop().await.expect("the member stops");
        let released = async {
            while store.strong_count() > 0 {
                tokio::task::yield_now().await;
            }
        };
        tokio::time::timeout(Duration::from_secs(20), released).await.expect("the store is released");
    }
}

/// What must not be lost.
#[derive(Debug, PartialEq)]
struct Standing {
    applied: u64,
    revision: i64,
    compacted: i64,
    hash: RevisionHash,
    leases: Vec<(i64, i64)>,
}

impl Standing {
    /// Checks what a restart, which adds an entry of its own to the log, has brought back.
    fn check(&self, member: &Member, what: &str) {
        let found = member.standing();
        assert!(found.applied > self.applied, "{what}: {} after {}", found.applied, self.applied);
        let hash_is_kept = self.hash.compact_revision == self.compacted;
        let found = Standing { applied: self.applied, ..found };
        if hash_is_kept {
            assert_eq!(&found, self, "{what}");
        } else {
            assert_eq!((found.revision, found.compacted), (self.revision, self.compacted), "{what}");
            assert_eq!(found.leases, self.leases, "{what}");
        }
    }
}

fn put(key: String, value: String, lease: i64) -> Kind {
    Kind::Put(pb::PutRequest { key: key.into(), value: value.into(), lease, ..Default::default() })
}

fn command(random: &mut fastrand::Rng, revision: i64) -> Kind {
    let key = format!("key{}", random.u8(..30));
    let lease = random.i64(1..6);
    match random.u8(..20) {
        0 => Kind::LeaseGrant(pb::LeaseGrantRequest { ttl: 100, id: lease }),
        1 => Kind::LeaseRevoke(pb::LeaseRevokeRequest { id: lease }),
        2 => {
            let checkpoint = pb::LeaseCheckpoint { id: lease, remaining_ttl: random.i64(0..100) };
            Kind::LeaseCheckpoint(pb::LeaseCheckpointRequest { checkpoints: vec![checkpoint] })
        }
        3 => {
            Kind::Compaction(pb::CompactionRequest { revision: revision - random.i64(..50), physical: false })
        }
        4 | 5 => Kind::DeleteRange(pb::DeleteRangeRequest {
            key: key.into(),
            range_end: if random.bool() { "key4".into() } else { "".into() },
            prev_kv: false,
        }),
        6 => put(key, "leased".into(), lease),
        _ => put(key, "v".repeat(random.usize(..300)), 0),
    }
}

/// Copies a member's directories; files that RocksDB moves meanwhile make it copy again.
fn copy(from: &Path) -> tempfile::TempDir {
    loop {
        let before = files(from);
        let to = tempfile::tempdir().expect("a directory");
        let copied = before.keys().all(|(folder, name)| {
            std::fs::create_dir_all(to.path().join(folder)).is_ok()
                && std::fs::copy(from.join(folder).join(name), to.path().join(folder).join(name)).is_ok()
        });
        if copied && files(from) == before {
            return to;
        }
    }
}

fn files(dir: &Path) -> BTreeMap<(&'static str, OsString), u64> {
    let list = |folder| {
        let entries = std::fs::read_dir(dir.join(folder)).expect("the directory lists");
        entries.filter_map(move |entry| {
            let entry = entry.expect("the directory lists");
            Some(((folder, entry.file_name()), entry.metadata().ok()?.len()))
        })
    };
    list("store").chain(list("log")).collect()
}

#[tokio::test]
async fn what_was_acknowledged_survives_every_end() {
    let mut random = fastrand::Rng::with_seed(11);
    let dir = tempfile::tempdir().expect("a directory");
    let mut crashes = Vec::new();
    for life in 0..3 {
        let mut member = Member::start(dir.path()).await.expect("the member starts");
        for batch in 0..8 {
            let revision = member.state.store().revision();
            let commands = (0..random.usize(1..300)).map(|_| command(&mut random, revision)).collect();
            member.propose(commands).await;
            if random.u8(..3) == 0 {
                member.node.checkpoint().await.expect("the store is flushed");
            }
            if random.u8(..3) == 0 {
                crashes.push((
                    format!("crash in batch {batch} of life {life}"),
                    copy(dir.path()),
                    member.standing(),
                ));
            }
        }
        let standing = member.standing();
        member.stop().await;
        let again = Member::start(dir.path()).await.expect("the member starts again");
        standing.check(&again, "a clean stop");
        again.stop().await;
    }
    assert!(crashes.len() > 3);
    for (what, dir, standing) in crashes {
        let mut member = Member::start(dir.path()).await.expect("the member starts after a crash");
        standing.check(&member, &what);
        let written =
            member.node.propose(put("after".into(), what.clone(), 0)).await.expect("it is answered");
        let Ok(Reply::Put(response)) = written else { panic!("a put is answered with {written:?}") };
        assert_eq!(response.header.map(|header| header.revision), Some(standing.revision + 1));
        member.propose(vec![command(&mut random, standing.revision)]).await;
        member.stop().await;
    }
}

#[tokio::test]
async fn the_log_is_purged_only_behind_the_files() {
    let dir = tempfile::tempdir().expect("a directory");
    let mut member = Member::start(dir.path()).await.expect("the member starts");
    for round in 0..3 {
        let commands = (0..1000).map(|at| put(format!("{round}-{at}"), String::new(), 0)).collect();
        member.propose(commands).await;
        assert_eq!(member.node.status().log_first, 0, "nothing is on disk yet");
    }
    member.node.checkpoint().await.expect("the store is flushed");
    let purged = async {
        while member.node.status().log_first == 0 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20), purged).await.expect("the log is purged");
    let status = member.node.status();
    assert!(status.log_first + 50 <= status.applied + 1, "entries are kept for slow followers: {status:?}");
    let standing = member.standing();
    let crashed = copy(dir.path());
    member.stop().await;
    let member = Member::start(crashed.path()).await.expect("the member starts after a crash");
    standing.check(&member, "a crash after a purge");
    member.stop().await;

    // Half a member is none.
    let without_store = copy(dir.path());
    std::fs::remove_dir_all(without_store.path().join("store")).expect("the store goes");
    let refused = Member::start(without_store.path()).await.err();
    assert!(matches!(refused, Some(StartError::Mismatch { applied: -1, .. })), "{refused:?}");
    let without_log = copy(dir.path());
    std::fs::remove_dir_all(without_log.path().join("log")).expect("the log goes");
    let refused = Member::start(without_log.path()).await.err();
    assert!(matches!(refused, Some(StartError::Mismatch { last: -1, .. })), "{refused:?}");
}

/// The log alone holds everything until it is purged.
#[tokio::test]
async fn an_unpurged_log_makes_the_store_again() {
    let mut random = fastrand::Rng::with_seed(5);
    let dir = tempfile::tempdir().expect("a directory");
    let mut member = Member::start(dir.path()).await.expect("the member starts");
    let commands = (0..500).map(|at| command(&mut random, at / 2)).collect();
    member.propose(commands).await;
    let standing = member.standing();
    member.stop().await;
    std::fs::remove_dir_all(dir.path().join("store")).expect("the store goes");
    let member = Member::start(dir.path()).await.expect("the member starts");
    standing.check(&member, "a lost store");
    member.stop().await;
}

#[tokio::test]
async fn what_needs_a_level_is_not_written_before_the_cluster_is_there() {
    let dir = tempfile::tempdir().expect("a directory");
    let mut member = Member::start(dir.path()).await.expect("the member starts");
    let node = member.node.clone();
    let mut waiting = Box::pin(node.await_level(1));
    let waited = tokio::time::timeout(Duration::from_millis(100), &mut waiting).await;
    assert!(waited.is_err(), "it waits for the level");
    member.propose(vec![Kind::ClusterLevelSet(ClusterLevelSet { level: 1, member_ids: vec![MEMBER] })]).await;
    assert_eq!(waiting.await, Ok(()));
    assert_eq!(node.await_level(2).await, Err(ProposeError::Level), "there is no such level");
}
