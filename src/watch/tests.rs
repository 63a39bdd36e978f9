//! Many watchers against a list of everything that was ever written.
//!
//! A writer commits and publishes runs while watchers come, at any start revision, read slowly or not at all, and go.
//! Each must be told every event that it asked for, once, in order, in whole revisions; whatever a progress message
//! says has been delivered, must have been; only who fell below a compaction may be ended by one.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use bytes::Bytes;
use prost::Message as _;

use super::group::Filters;
use super::hub::{Hub, HubOptions, NewWatch, WatchStream};
use super::queue::{Message, Outgoing};
use crate::proto::mvccpb;
use crate::storage::EngineOptions;
use crate::storage::mvcc::read::Event;
use crate::storage::mvcc::write::WriteRun;
use crate::storage::mvcc::{KeyRange, RangeEnd, Store, StoreOptions};

/// Bytes that may wait on all streams: little, so that watchers keep falling behind.
const QUEUED_BYTES: usize = 200_000;

/// A writer that remembers everything.
struct Writer {
    store: Arc<Store>,
    hub: Arc<Hub>,
    written: Vec<mvccpb::Event>,
    live: BTreeMap<Bytes, mvccpb::KeyValue>,
    /// The store is a peer's, which writes unseen.
    unseen: bool,
}

impl Writer {
    fn new(dir: &Path) -> Writer {
        let engine = EngineOptions { memtable_bytes: 4 << 20, block_cache_bytes: 4 << 20 };
        let options = StoreOptions { engine, heads_bytes: 1 << 16 };
        let store = Arc::new(Store::open(dir, options).expect("the store opens"));
        let hub = Arc::new(Hub::new(Arc::clone(&store), HubOptions { queued_bytes_max: QUEUED_BYTES }));
        Writer { store, hub, written: Vec::new(), live: BTreeMap::new(), unseen: false }
    }

    /// Commits and publishes one run of transactions; a change without a value is a delete.
    fn write(&mut self, txns: &[Vec<(Bytes, Option<Bytes>)>]) {
        let mut run = WriteRun::new(&self.store);
        for changes in txns {
            let before = self.live.clone();
            let mut txn = run.begin();
            for (key, value) in changes {
                let main = self.store.revision().max(txn.revision()) + i64::from(!txn.changed());
                let written = match value {
                    Some(value) => {
                        txn.put(key.clone(), value.clone(), 0).expect("the put is written");
                        let old = self.live.get(key);
                        let kv = mvccpb::KeyValue {
                            key: key.clone(),
                            create_revision: old.map_or(main, |old| old.create_revision),
                            mod_revision: main,
                            version: old.map_or(1, |old| old.version + 1),
                            value: value.clone(),
                            lease: 0,
                        };
                        self.live.insert(key.clone(), kv.clone());
                        Some((0, kv))
                    }
                    None if txn.delete(key).expect("the delete is written") => {
                        self.live.remove(key);
                        let kv =
                            mvccpb::KeyValue { key: key.clone(), mod_revision: main, ..Default::default() };
                        Some((1, kv))
                    }
                    None => None,
                };
                if let Some((kind, kv)) = written {
                    let prev_kv = before.get(key).filter(|_| kv.create_revision != main).cloned();
                    self.written.push(mvccpb::Event { r#type: kind, kv: Some(kv), prev_kv });
                }
            }
            txn.finish();
        }
        let events = run.commit().expect("the run commits");
        self.publish(&events);
    }

    fn publish(&self, events: &[Event]) {
        if !self.unseen {
            self.hub.publish(events, self.store.revision()).expect("it is published");
        }
    }

    /// Goes on with a copy of the store in `dir`, as of later: what `meanwhile` writes is seen only as history.
    fn move_on(&mut self, dir: &Path, meanwhile: impl FnOnce(&mut Writer)) {
        self.store.engine().link_files(dir).expect("the files are linked");
        let successor = Arc::new(self.store.open_successor(dir).expect("the copy opens"));
        let old = std::mem::replace(&mut self.store, successor);
        self.unseen = true;
        meanwhile(self);
        self.unseen = false;
        old.engine().discard();
        self.hub.reset(Arc::clone(&self.store));
    }

    fn put(&mut self, key: &'static str, bytes: usize) {
        self.write(&[vec![(Bytes::from_static(key.as_bytes()), Some(vec![b'v'; bytes].into()))]]);
    }

    fn compact(&mut self, revision: i64) {
        let mut run = WriteRun::new(&self.store);
        let previous = run.compacted();
        run.compact(revision);
        run.commit().expect("the compaction commits");
        self.publish(&[]);
        self.store.finish_compaction(previous, revision).expect("the compaction finishes");
    }
}

fn revision_of(event: &mvccpb::Event) -> i64 {
    event.kv.as_ref().map_or(0, |kv| kv.mod_revision)
}

fn watch(key: &'static str, start_revision: i64) -> NewWatch {
    NewWatch {
        range: KeyRange::single(Bytes::from_static(key.as_bytes())),
        start_revision,
        filters: Filters::default(),
        prev_kv: false,
        watch_id: 0,
        progress_notify: false,
        fragment: false,
    }
}

/// What waits on a stream now.
async fn take(stream: &WatchStream) -> Option<Outgoing> {
    std::future::poll_fn(|context| {
        Poll::Ready(match stream.poll_next(context) {
            Poll::Ready(message) => message,
            Poll::Pending => None,
        })
    })
    .await
}

async fn next(stream: &WatchStream) -> Outgoing {
    let message = std::future::poll_fn(|context| stream.poll_next(context));
    let message = tokio::time::timeout(Duration::from_secs(20), message).await;
    message.expect("a message comes").expect("the stream is open")
}

/// What one watcher has been told so far, and must still be.
struct Watched {
    request: NewWatch,
    created: bool,
    /// Events below it have been told.
    from: i64,
    /// Compaction may end the watcher.
    was_compacted: bool,
}

impl Watched {
    fn owed<'w>(&self, written: &'w [mvccpb::Event], to: i64) -> Vec<&'w mvccpb::Event> {
        let wants = |event: &&mvccpb::Event| {
            let unwanted =
                if event.r#type == 0 { self.request.filters.no_put } else { self.request.filters.no_delete };
            let key = &event.kv.as_ref().expect("an event has a key").key;
            (self.from..=to).contains(&revision_of(event)) && !unwanted && self.request.range.contains(key)
        };
        written.iter().filter(wants).collect()
    }

    fn take_events(&mut self, writer: &Writer, outgoing: &Outgoing, told: &[mvccpb::Event]) {
        assert!(self.created, "events come after the answer to the create");
        let last = told.last().map_or(0, revision_of);
        assert!((last..=writer.store.revision()).contains(&outgoing.revision));
        // At the compact revision, and below it while it moves, a version that was replaced at once may be gone; the
        // keys of these tests change once in a revision.
        let owed = self.owed(&writer.written, last);
        assert_eq!(told.len(), owed.len(), "from {} to {last}: whole revisions, once each", self.from);
        for (told, owed) in told.iter().zip(owed) {
            assert_eq!((told.r#type, &told.kv), (owed.r#type, &owed.kv));
            match &told.prev_kv {
                Some(previous) => assert_eq!(Some(previous), owed.prev_kv.as_ref()),
                None if !self.request.prev_kv => {}
                None => {
                    let gone = revision_of(owed) - 1 < writer.store.compacted();
                    assert!(owed.prev_kv.is_none() || gone, "a previous version is missing");
                }
            }
        }
        self.from = last + 1;
    }
}

/// A client's stream and what it has asked for.
struct Client {
    stream: WatchStream,
    watched: HashMap<i64, Watched>,
    /// Created but not answered yet, in order.
    asked: Vec<NewWatch>,
    cancelled: Vec<i64>,
    patient: bool,
}

impl Client {
    fn take(&mut self, writer: &Writer, outgoing: Outgoing) {
        let id = outgoing.watch_id;
        match &outgoing.message {
            Message::Created => {
                let request = self.asked.remove(0);
                assert!(request.watch_id == 0 || request.watch_id == id);
                let from =
                    if request.start_revision == 0 { outgoing.revision + 1 } else { request.start_revision };
                let watched = Watched { request, created: true, from, was_compacted: false };
                assert!(self.watched.insert(id, watched).is_none(), "id {id} is free");
            }
            Message::Refused(reason) => {
                let request = self.asked.remove(0);
                let taken = self.watched.contains_key(&request.watch_id);
                let expected = if request.range.is_empty() {
                    "mvcc: watcher range is empty"
                } else {
                    assert!(taken, "only a taken id is refused");
                    "mvcc: duplicate watch ID provided on the WatchStream"
                };
                assert_eq!((id, *reason), (-1, expected));
            }
            Message::Events(events) => {
                let told: Vec<mvccpb::Event> = events
                    .iter()
                    .map(|event| {
                        let decoded = mvccpb::Event::decode(event.bytes.clone()).expect("an event decodes");
                        assert_eq!(revision_of(&decoded), event.revision);
                        decoded
                    })
                    .collect();
                let watched = self.watched.get_mut(&id).expect("events belong to a watcher");
                assert!(!watched.was_compacted);
                watched.take_events(writer, &outgoing, &told);
            }
            Message::Progress => {
                for (watch_id, watched) in &self.watched {
                    if (id == -1 || id == *watch_id) && !watched.was_compacted {
                        assert!(
                            watched.owed(&writer.written, outgoing.revision).is_empty(),
                            "progress runs ahead"
                        );
                        assert!(watched.request.start_revision <= outgoing.revision + 1);
                    }
                }
            }
            Message::Canceled => {
                assert_eq!(self.cancelled.remove(0), id);
                assert!(self.watched.remove(&id).is_some());
            }
            Message::Ended(reason) => panic!("nobody ends a watcher here: {reason}"),
            Message::Compacted(compacted) => {
                let watched = self.watched.get_mut(&id).expect("a watcher is ended");
                assert_eq!(outgoing.revision, 0);
                assert!(watched.from < *compacted, "at {} it was not compacted at {compacted}", watched.from);
                watched.was_compacted = true;
            }
        }
    }

    fn is_served(&self, writer: &Writer) -> bool {
        let owes =
            |watched: &Watched| !watched.was_compacted && !watched.owed(&writer.written, i64::MAX).is_empty();
        self.asked.is_empty() && self.cancelled.is_empty() && !self.watched.values().any(owes)
    }
}

fn key(random: &mut fastrand::Rng) -> Bytes {
    vec![b'a' + random.u8(..3), b'a' + random.u8(..4)].into()
}

fn request(random: &mut fastrand::Rng, writer: &Writer) -> NewWatch {
    let end = match random.u8(..5) {
        0..2 => RangeEnd::Single,
        2 => RangeEnd::Unbounded,
        _ => RangeEnd::Before(key(random)),
    };
    let revision = writer.store.revision();
    NewWatch {
        range: KeyRange { start: key(random), end },
        start_revision: if random.bool() { 0 } else { random.i64(1..=revision + 10) },
        filters: Filters { no_put: random.u8(..8) == 0, no_delete: random.u8(..8) == 0 },
        prev_kv: random.bool(),
        watch_id: if random.u8(..4) == 0 { random.i64(-3..6) } else { 0 },
        progress_notify: random.bool(),
        fragment: false,
    }
}

fn write(random: &mut fastrand::Rng, writer: &mut Writer) {
    let txns: Vec<Vec<(Bytes, Option<Bytes>)>> = (0..random.usize(1..5))
        .map(|_| {
            let changes: BTreeMap<Bytes, Option<Bytes>> = (0..random.usize(1..4))
                .map(|_| {
                    let bytes = if random.u8(..20) == 0 { 60_000 } else { random.usize(..500) };
                    (key(random), (random.u8(..4) > 0).then(|| vec![b'v'; bytes].into()))
                })
                .collect();
            changes.into_iter().collect()
        })
        .collect();
    writer.write(&txns);
}

async fn history(seed: u64) {
    let mut random = fastrand::Rng::with_seed(seed);
    let dir = tempfile::tempdir().expect("a directory");
    let mut writer = Writer::new(&dir.path().join("store"));
    let catching_up = tokio::spawn(super::catch_up(Arc::clone(&writer.hub)));
    let mut clients: Vec<Client> = Vec::new();
    for step in 0..1500 {
        match random.u8(..40) {
            0..14 => write(&mut random, &mut writer),
            14 if clients.len() < 12 => clients.push(Client {
                stream: writer.hub.open_stream(),
                watched: HashMap::new(),
                asked: Vec::new(),
                cancelled: Vec::new(),
                patient: random.u8(..4) == 0,
            }),
            15 if random.u8(..4) == 0 && !clients.is_empty() => {
                clients.swap_remove(random.usize(..clients.len()));
            }
            16 if random.u8(..8) == 0 && writer.store.revision() > writer.store.compacted().max(1) => {
                let (from, to) = (writer.store.compacted().max(1) + 1, writer.store.revision());
                if from <= to {
                    writer.compact(random.i64(from..=to));
                }
            }
            17 if random.u8(..6) == 0 => {
                let copy = dir.path().join(format!("copy-{step}"));
                writer.move_on(&copy, |writer| {
                    for _ in 0..random.usize(..5) {
                        write(&mut random, writer);
                    }
                    let (from, to) = (writer.store.compacted().max(1) + 1, writer.store.revision());
                    if random.u8(..3) == 0 && from <= to {
                        writer.compact(random.i64(from..=to));
                    }
                });
            }
            18..20 => tokio::time::sleep(Duration::from_millis(1)).await,
            _ if clients.is_empty() => {}
            choice => {
                let at = random.usize(..clients.len());
                let client = &mut clients[at];
                match choice {
                    20..23 => {
                        let request = request(&mut random, &writer);
                        client.asked.push(request.clone());
                        client.stream.create(request);
                    }
                    23 => {
                        let ids: Vec<i64> = client.watched.keys().copied().collect();
                        let id = if ids.is_empty() { 77 } else { ids[random.usize(..ids.len())] };
                        if !ids.is_empty() && !client.cancelled.contains(&id) {
                            client.cancelled.push(id);
                        }
                        client.stream.cancel(id);
                    }
                    24 => client.stream.request_progress(),
                    25 => client.stream.tick_progress(),
                    _ if client.patient && random.u8(..50) > 0 => {}
                    _ => {
                        for _ in 0..random.usize(..20) {
                            let Some(message) = take(&client.stream).await else { break };
                            client.take(&writer, message);
                        }
                    }
                }
            }
        }
    }
    for client in &mut clients {
        while !client.is_served(&writer) {
            let message = next(&client.stream).await;
            client.take(&writer, message);
        }
    }
    drop(clients);
    let sizes = writer.hub.sizes();
    assert_eq!((sizes.watchers, sizes.behind, sizes.streams), (0, 0, 0));
    assert_eq!((sizes.queued_bytes, sizes.queued_events), (0, 0));
    assert!(!catching_up.is_finished(), "catching up goes on");
    catching_up.abort();
}

#[tokio::test]
async fn everyone_is_told_everything_once() {
    for seed in 0..8 {
        println!("seed {seed}");
        history(seed).await;
    }
}

#[tokio::test]
async fn a_batch_that_finds_no_room_is_not_made_again_before_the_queue_is_empty() {
    let dir = tempfile::tempdir().expect("a directory");
    let mut writer = Writer::new(dir.path());
    for _ in 0..3 {
        writer.put("a", 100_000);
    }
    let stream = writer.hub.open_stream();
    stream.create(watch("b", 0));
    stream.create(watch("a", 2));
    // Less than half of the room is taken, but the batch is larger than the rest.
    let walks = writer.hub.walks();
    assert_eq!(walks.len(), 1);
    writer.hub.serve(&walks[0]).expect("history reads");
    assert!(writer.hub.walks().is_empty(), "nothing to do until the client reads");
    assert!(matches!(next(&stream).await.message, Message::Created));
    assert!(writer.hub.walks().is_empty());
    assert!(matches!(next(&stream).await.message, Message::Created));
    let walks = writer.hub.walks();
    writer.hub.serve(&walks[0]).expect("history reads");
    assert!(matches!(next(&stream).await.message, Message::Events(events) if events.len() == 3));
    assert!(writer.hub.walks().is_empty());
}

#[tokio::test]
async fn nobody_waits_for_the_long_way_of_another() {
    let dir = tempfile::tempdir().expect("a directory");
    let mut writer = Writer::new(dir.path());
    for _ in 0..3000 {
        writer.put("a", 1);
    }
    let stream = writer.hub.open_stream();
    for start in [2, 2990, 10, 2980] {
        stream.create(watch("a", start));
        assert!(matches!(next(&stream).await.message, Message::Created));
    }
    let walks = writer.hub.walks();
    assert_eq!(walks.iter().map(Vec::len).collect::<Vec<_>>(), [2, 2]);
    for walk in &walks {
        writer.hub.serve(walk).expect("history reads");
    }
    assert_eq!(writer.hub.sizes().behind, 2, "the near ones are level after one round");
}

#[tokio::test]
async fn a_level_watcher_is_still_level_after_a_reset() {
    let dir = tempfile::tempdir().expect("a directory");
    let mut writer = Writer::new(dir.path());
    let stream = writer.hub.open_stream();
    stream.create(watch("quiet", 0));
    assert!(matches!(next(&stream).await.message, Message::Created));
    for _ in 0..10 {
        writer.put("a", 1);
    }
    writer.compact(writer.store.revision());
    writer.hub.reset(Arc::clone(&writer.store));
    for walk in writer.hub.walks() {
        writer.hub.serve(&walk).expect("history reads");
    }
    writer.put("quiet", 1);
    assert!(matches!(next(&stream).await.message, Message::Events(events) if events.len() == 1));
}
