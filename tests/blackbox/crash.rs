//! Crashes under load: `kill -9` and power cuts at random moments, and what must be true afterwards.
//!
//! Each client writes below a prefix of its own, one request at a time, and keeps a model of what was acknowledged. The
//! request that was under way when the member went down may have happened or not, as a whole. After each restart:
//!
//! * every client's keys are as its model says, with or without the request under way: values, versions, revisions, leases;
//! * the history since the compaction has every revision up to the current one, and at the revision of each acknowledged
//!   request just its changes;
//! * the revision and the compaction have not gone back;
//! * hashes of revisions that were asked for before the crash are the same.
//!
//! `SKEG_CRASH_SECONDS` is how long each kind of crash goes on, `SKEG_SEED` chooses what the clients do; when the member
//! goes down is not the seed's to say.

use std::collections::BTreeMap;
use std::time::Duration;

use etcd_client::{
    Client, Compare, CompareOp, DeleteOptions, Error, EventType, GetOptions, LeaseGrantOptions, PutOptions,
    Txn, TxnOp, WatchOptions,
};
use fastrand::Rng;
use tokio::time::{sleep, timeout};

use crate::member::Member;
use crate::mount::Mount;

const CLIENTS: u8 = 6;
const KEYS: u32 = 40;
const LEASE_TTL: i64 = 3_600;
/// A request that takes longer has found a member that hangs.
const PATIENCE: Duration = Duration::from_secs(60);
const DEFAULT_SECONDS: u64 = 15;

#[derive(Clone, Debug, PartialEq, Eq)]
struct Value {
    bytes: Vec<u8>,
    version: i64,
    /// 0 for "not known": the request under way.
    revision: i64,
    lease: i64,
}

/// What a client asks for. Only its own keys and leases are in it.
#[derive(Clone, Debug)]
enum Request {
    Put {
        key: String,
        value: Vec<u8>,
        lease: i64,
    },
    Delete {
        from: String,
        to: String,
    },
    /// Puts `put` and deletes `delete`, if `put` has the version of the model.
    Swap {
        put: String,
        value: Vec<u8>,
        delete: String,
    },
    Grant {
        lease: i64,
    },
    Revoke {
        lease: i64,
    },
}

/// A key with its value, or without one for a delete.
type Changes = BTreeMap<String, Option<Vec<u8>>>;

#[derive(Clone, Debug, Default)]
struct Model {
    keys: BTreeMap<String, Value>,
    leases: Vec<i64>,
}

impl Model {
    /// Applies a request at a revision and returns what it changed.
    fn apply(&mut self, request: &Request, revision: i64) -> Changes {
        match request {
            Request::Put { key, value, lease } => {
                self.put(key, value, *lease, revision);
                Changes::from([(key.clone(), Some(value.clone()))])
            }
            Request::Delete { from, to } => {
                let gone: Vec<String> =
                    self.keys.range(from.clone()..to.clone()).map(|(key, _)| key.clone()).collect();
                self.remove(gone)
            }
            Request::Swap { put, value, delete } => {
                let mut changes = self.remove(self.keys.contains_key(delete).then(|| delete.clone()));
                self.put(put, value, 0, revision);
                changes.insert(put.clone(), Some(value.clone()));
                changes
            }
            Request::Grant { lease } => {
                self.leases.push(*lease);
                Changes::new()
            }
            Request::Revoke { lease } => {
                self.leases.retain(|other| other != lease);
                let held = self.keys.iter().filter(|(_, value)| value.lease == *lease);
                let gone: Vec<String> = held.map(|(key, _)| key.clone()).collect();
                self.remove(gone)
            }
        }
    }

    fn put(&mut self, key: &str, bytes: &[u8], lease: i64, revision: i64) {
        let version = self.keys.get(key).map_or(0, |value| value.version) + 1;
        self.keys.insert(key.to_owned(), Value { bytes: bytes.to_vec(), version, revision, lease });
    }

    fn remove(&mut self, keys: impl IntoIterator<Item = String>) -> Changes {
        keys.into_iter().inspect(|key| drop(self.keys.remove(key))).map(|key| (key, None)).collect()
    }

    /// True if the member's keys are these; revisions that the model does not know aside.
    fn matches(&self, found: &BTreeMap<String, Value>) -> bool {
        self.keys.len() == found.len()
            && self.keys.iter().zip(found).all(|((key, value), (other_key, other))| {
                let revision = if value.revision == 0 { 0 } else { other.revision };
                key == other_key && *value == Value { revision, ..other.clone() }
            })
    }
}

/// One writer and what it knows.
struct Writer {
    number: u8,
    rng: Rng,
    model: Model,
    /// Sent and not answered.
    under_way: Option<Request>,
    /// By revision.
    acknowledged: BTreeMap<i64, Changes>,
    next_lease: i64,
}

impl Writer {
    fn new(number: u8, seed: u64) -> Writer {
        let rng = Rng::with_seed(seed.wrapping_mul(31).wrapping_add(u64::from(number)));
        Writer {
            number,
            rng,
            model: Model::default(),
            under_way: None,
            acknowledged: BTreeMap::new(),
            next_lease: i64::from(number) * 1_000_000 + 1,
        }
    }

    /// Writes until the member goes down.
    async fn write(mut self, mut client: Client) -> Writer {
        loop {
            let request = self.choose();
            self.under_way = Some(request.clone());
            let answer = timeout(PATIENCE, send(&mut client, &self.model, &request)).await;
            match answer.expect("an answer or a failure in time") {
                Ok(revision) => {
                    let changes = self.model.apply(&request, revision);
                    if !changes.is_empty() {
                        self.acknowledged.insert(revision, changes);
                    }
                    self.under_way = None;
                }
                Err(error) if went_down(&error) => return self,
                Err(error) => panic!("{request:?}: {error}"),
            }
        }
    }

    fn choose(&mut self) -> Request {
        let held = self.model.leases.clone();
        match self.rng.u32(..100) {
            0..60 => {
                let lease =
                    if self.rng.u32(..4) == 0 { self.rng.choice(&held).copied().unwrap_or(0) } else { 0 };
                Request::Put { key: self.key(), value: self.value(), lease }
            }
            60..75 => {
                let (one, other) = (self.key(), self.key());
                let delete = if one == other { format!("{one}+") } else { other };
                Request::Swap { put: one, value: self.value(), delete }
            }
            75..85 => {
                let (one, other) = (self.key(), self.key());
                let (from, to) = if one < other { (one, other) } else { (other, one) };
                Request::Delete { to: format!("{to}+"), from }
            }
            85..95 if held.len() < 5 => {
                self.next_lease += 1;
                Request::Grant { lease: self.next_lease }
            }
            _ => match self.rng.choice(&held) {
                Some(lease) => Request::Revoke { lease: *lease },
                None => Request::Put { key: self.key(), value: self.value(), lease: 0 },
            },
        }
    }

    fn prefix(&self) -> String {
        format!("{}/", self.number)
    }

    fn key(&mut self) -> String {
        format!("{}{:03}", self.prefix(), self.rng.u32(..KEYS))
    }

    /// Some are large enough to be stored apart.
    fn value(&mut self) -> Vec<u8> {
        let length = if self.rng.u32(..20) == 0 { 20_000 } else { self.rng.usize(1..300) };
        std::iter::repeat_with(|| self.rng.u8(..)).take(length).collect()
    }

    /// Compares with the member, and takes over what became of the request under way.
    async fn settle(&mut self, client: &mut Client) {
        let options = GetOptions::new().with_prefix();
        let answer = client.get(self.prefix(), Some(options)).await.expect("a member that serves");
        let found: BTreeMap<String, Value> = answer
            .kvs()
            .iter()
            .map(|kv| {
                let key = kv.key_str().expect("the test's keys are text").to_owned();
                let (version, revision, lease) = (kv.version(), kv.mod_revision(), kv.lease());
                (key, Value { bytes: kv.value().to_vec(), version, revision, lease })
            })
            .collect();
        let leases = client.leases().await.expect("a member that serves");
        let mine = |lease: &i64| lease / 1_000_000 == i64::from(self.number);
        let mut leases: Vec<i64> = leases.leases().iter().map(|lease| lease.id()).filter(mine).collect();
        leases.sort_unstable();
        let mut with = self.model.clone();
        if let Some(request) = &self.under_way {
            with.apply(request, 0);
        }
        let agrees = |model: &Model| {
            let mut expected = model.leases.clone();
            expected.sort_unstable();
            model.matches(&found) && expected == leases
        };
        if !agrees(&self.model) {
            assert!(
                agrees(&with),
                "writer {} after {:?}:\n expected {:?}\n found {found:?}\n leases {leases:?}",
                self.number,
                self.under_way,
                self.model,
            );
        }
        self.under_way = None;
        self.model = Model { keys: found, leases };
    }
}

async fn send(client: &mut Client, model: &Model, request: &Request) -> Result<i64, Error> {
    let revision = |header: Option<&etcd_client::ResponseHeader>| header.expect("a header").revision();
    match request.clone() {
        Request::Put { key, value, lease } => {
            let options = PutOptions::new().with_lease(lease);
            Ok(revision(client.put(key, value, Some(options)).await?.header()))
        }
        Request::Delete { from, to } => {
            let options = DeleteOptions::new().with_range(to);
            Ok(revision(client.delete(from, Some(options)).await?.header()))
        }
        Request::Swap { put, value, delete } => {
            let version = model.keys.get(&put).map_or(0, |value| value.version);
            let txn = Txn::new()
                .when([Compare::version(put.as_str(), CompareOp::Equal, version)])
                .and_then([TxnOp::put(put, value, None), TxnOp::delete(delete, None)]);
            let answer = client.txn(txn).await?;
            assert!(answer.succeeded(), "nobody else writes this key: {request:?}");
            Ok(revision(answer.header()))
        }
        Request::Grant { lease } => {
            let options = LeaseGrantOptions::new().with_id(lease);
            Ok(revision(client.lease_grant(LEASE_TTL, Some(options)).await?.header()))
        }
        Request::Revoke { lease } => Ok(revision(client.lease_revoke(lease).await?.header())),
    }
}

/// True for the failures of a member that is gone; a refusal is none of them.
fn went_down(error: &Error) -> bool {
    match error {
        Error::GRpcStatus(status) => {
            use tonic::Code;
            matches!(status.code(), Code::Unavailable | Code::Unknown | Code::Cancelled | Code::Internal)
        }
        Error::TransportError(_) | Error::IoError(_) => true,
        _ => false,
    }
}

/// Who compacts and asks for hashes, and what it was told.
struct Auditor {
    revision: i64,
    /// -1 before the first.
    compacted: i64,
    /// Revision and compaction with their hash.
    hashes: BTreeMap<(i64, i64), u32>,
    /// Hashes found equal after a crash.
    compared: usize,
}

impl Auditor {
    async fn audit(mut self, mut client: Client, mut rng: Rng) -> Auditor {
        loop {
            if self.ask(&mut client, &mut rng).await.is_err() {
                return self;
            }
            sleep(Duration::from_millis(rng.u64(5..60))).await;
        }
    }

    async fn ask(&mut self, client: &mut Client, rng: &mut Rng) -> Result<(), Error> {
        let answer = client.hash_kv(0).await?;
        self.revision = answer.hash_revision();
        self.hashes.insert((answer.hash_revision(), answer.compact_version()), answer.hash());
        let to = self.revision - 300;
        if to > self.compacted && rng.u32(..4) == 0 {
            client.compact(to, None).await?;
            self.compacted = to;
        }
        Ok(())
    }

    /// Compares revision, compaction and hashes with those before; returns the current revision and the compaction.
    async fn settle(&mut self, client: &mut Client) -> (i64, i64) {
        let now = client.hash_kv(0).await.expect("a member that serves");
        assert!(now.hash_revision() >= self.revision, "{} after {}", now.hash_revision(), self.revision);
        assert!(
            now.compact_version() >= self.compacted,
            "{} after {}",
            now.compact_version(),
            self.compacted
        );
        let mut compared = 0;
        for ((revision, compacted), hash) in &self.hashes {
            if *compacted == now.compact_version() {
                let again = client.hash_kv(*revision).await.expect("a revision above the compaction");
                assert_eq!(again.hash(), *hash, "the hash of revision {revision}, compacted {compacted}");
                compared += 1;
            }
        }
        self.compared += compared;
        self.hashes.clear();
        (self.revision, self.compacted) = (now.hash_revision(), now.compact_version());
        (self.revision, self.compacted)
    }
}

/// Reads the whole history and compares it with what was acknowledged.
async fn check_history(client: &mut Client, writers: &[Writer], revision: i64, compacted: i64) {
    let start = compacted.max(1) + 1;
    if start > revision {
        return;
    }
    let options = WatchOptions::new().with_all_keys().with_start_revision(start);
    let mut watch = client.watch("", Some(options)).await.expect("a member that serves");
    let mut history: BTreeMap<i64, Changes> = BTreeMap::new();
    while history.last_key_value().is_none_or(|(last, _)| *last < revision) {
        let message = timeout(PATIENCE, watch.message()).await.expect("the history in time");
        let message = message.expect("a watch").expect("a watch without end");
        assert!(!message.canceled(), "{}", message.cancel_reason());
        for event in message.events() {
            let kv = event.kv().expect("an event has a key");
            let value = (event.event_type() == EventType::Put).then(|| kv.value().to_vec());
            let key = kv.key_str().expect("the test's keys are text").to_owned();
            let doubled = history.entry(kv.mod_revision()).or_default().insert(key, value);
            assert!(doubled.is_none(), "two events of one key at {}", kv.mod_revision());
        }
    }
    let holes: Vec<i64> = (start..=revision).filter(|revision| !history.contains_key(revision)).collect();
    assert!(holes.is_empty(), "no events at revisions {holes:?} of {start} to {revision}");
    for writer in writers {
        for (at, changes) in writer.acknowledged.range(start..) {
            assert_eq!(history.get(at), Some(changes), "revision {at}, of writer {}", writer.number);
        }
    }
}

fn seconds() -> u64 {
    std::env::var("SKEG_CRASH_SECONDS")
        .map_or(DEFAULT_SECONDS, |text| text.parse().expect("a number of seconds"))
}

/// Loads a member, takes it down with `crash`, starts it again and compares, until the time is up.
async fn crash_again_and_again(mut member: Member, seconds: u64, crash: impl Fn(&mut Member)) {
    let seed =
        std::env::var("SKEG_SEED").map_or_else(|_| fastrand::u64(..), |text| text.parse().expect("a seed"));
    println!("SKEG_SEED={seed}");
    // Settle and purge often, so that crashes fall into that too.
    member.set("snapshot-count", "100");
    member.set("snapshot-catchup-entries", "50");
    member.set("skeg-memtable-bytes", "1048576");
    let mut rng = Rng::with_seed(seed);
    let mut writers: Vec<Writer> = (0..CLIENTS).map(|number| Writer::new(number, seed)).collect();
    let mut auditor = Auditor { revision: 0, compacted: -1, hashes: BTreeMap::new(), compared: 0 };
    let mut rounds = 0;
    let deadline = sleep(Duration::from_secs(seconds));
    tokio::pin!(deadline);
    while !deadline.is_elapsed() || rounds == 0 {
        // Now and then it goes down while it recovers.
        if rounds > 0 && rng.u32(..3) == 0 {
            drop(member.spawn(std::process::Command::new(crate::programs::skeg())));
            sleep(Duration::from_millis(rng.u64(1..250))).await;
            crash(&mut member);
        }
        member.start();
        let mut client = member.client().await;
        let (revision, compacted) = auditor.settle(&mut client).await;
        for writer in &mut writers {
            writer.settle(&mut client).await;
        }
        check_history(&mut client, &writers, revision, compacted).await;
        let before: usize = writers.iter().map(|writer| writer.acknowledged.len()).sum();

        let mut writing = Vec::new();
        for writer in writers.drain(..) {
            writing.push(tokio::spawn(writer.write(member.client().await)));
        }
        let auditing = tokio::spawn(auditor.audit(member.client().await, rng.fork()));
        tokio::select! {
            () = &mut deadline => {}
            () = sleep(Duration::from_millis(rng.u64(20..1_500))) => {}
        }
        crash(&mut member);
        for writer in writing {
            writers.push(writer.await.expect("a writer does not fail"));
        }
        auditor = auditing.await.expect("the auditor does not fail");
        let after: usize = writers.iter().map(|writer| writer.acknowledged.len()).sum();
        rounds += 1;
        println!("round {rounds}: {} requests acknowledged", after - before);
    }
    member.start();
    let mut client = member.client().await;
    let (revision, compacted) = auditor.settle(&mut client).await;
    for writer in &mut writers {
        writer.settle(&mut client).await;
    }
    check_history(&mut client, &writers, revision, compacted).await;
    let acknowledged: usize = writers.iter().map(|writer| writer.acknowledged.len()).sum();
    assert!(acknowledged > 20, "there was a load: {acknowledged} requests in {rounds} rounds");
    assert!(auditor.compared > 0, "there were hashes to compare");
    println!("{rounds} rounds, {acknowledged} requests acknowledged, revision {revision}");
}

fn cut_power(mount: &Mount, member: &mut Member) {
    mount.power_off();
    member.kill();
    mount.power_on();
}

#[tokio::test]
async fn killed_under_load() {
    let directory = tempfile::tempdir().unwrap();
    crash_again_and_again(Member::new(directory.path()), seconds(), |member| drop(member.kill())).await;
}

#[tokio::test]
async fn power_cut_under_load() {
    let mount = Mount::ext4(700);
    let member = Member::new(mount.path());
    crash_again_and_again(member, seconds(), |member| cut_power(&mount, member)).await;
}

/// The test's own test: a member that does not sync is caught.
#[tokio::test]
async fn a_power_cut_without_syncing_is_found_out() {
    let caught = tokio::spawn(async {
        let mount = Mount::ext4(700);
        let mut member = Member::new(mount.path());
        member.set("unsafe-no-fsync", "true");
        crash_again_and_again(member, 60, |member| cut_power(&mount, member)).await;
    });
    let caught = caught.await.expect_err("a loss that goes unnoticed");
    assert!(caught.is_panic(), "{caught}");
}
