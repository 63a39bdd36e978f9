//! Publishing and subscribing; see the module above for the order that it keeps.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll};

use bytes::{Bytes, BytesMut};
use parking_lot::Mutex;
use tokio::sync::Notify;

use super::group::{Filters, Groups, View};
use super::queue::{EncodedEvent, Message, Outgoing, Queue, Totals};
use crate::storage::StorageError;
use crate::storage::mvcc::read::{Change, Event};
use crate::storage::mvcc::{KeyRange, Store};
use crate::storage::schema::{self, KeyMeta};

/// Bounds of the hub.
#[derive(Clone, Copy, Debug)]
pub struct HubOptions {
    /// Bytes that may wait on all streams together before slow watchers fall back to history.
    pub queued_bytes_max: usize,
}

/// Sizes of a hub.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HubSizes {
    /// Watchers.
    pub watchers: usize,
    /// Watchers that read history.
    pub behind: usize,
    /// Streams.
    pub streams: usize,
    /// Bytes that wait to be sent.
    pub queued_bytes: usize,
    /// Events that wait to be sent.
    pub queued_events: usize,
    /// Events that streams have taken since the hub was made.
    pub sent_events: u64,
}

/// A request for a watcher.
#[derive(Clone, Debug)]
pub struct NewWatch {
    /// What to watch.
    pub range: KeyRange,
    /// First revision wanted; 0 for whatever comes next.
    pub start_revision: i64,
    /// Unwanted events.
    pub filters: Filters,
    /// Events carry the version that they replaced.
    pub prev_kv: bool,
    /// The id to use; 0 lets the stream choose.
    pub watch_id: i64,
    /// Periodic progress is wanted.
    pub progress_notify: bool,
    /// Large messages may be split.
    pub fragment: bool,
}

/// Why a watcher was not created.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum CreateError {
    /// The range holds no key.
    EmptyRange,
    /// The id is in use on the stream.
    DuplicateId,
}

impl CreateError {
    /// etcd's text: clients see it.
    const fn text(self) -> &'static str {
        match self {
            CreateError::EmptyRange => "mvcc: watcher range is empty",
            CreateError::DuplicateId => "mvcc: duplicate watch ID provided on the WatchStream",
        }
    }
}

pub(super) struct Watcher {
    pub(super) stream: u64,
    pub(super) watch_id: i64,
    pub(super) queue: Arc<Queue>,
    pub(super) view: View,
    /// The first revision that the client asked for; 0 for whatever comes next.
    start_revision: i64,
    /// The first revision not yet queued for the watcher.
    pub(super) next_revision: i64,
    pub(super) synced: bool,
    /// Its last batch found no room; the next one is made only when its queue is empty and must take it.
    pub(super) waits_for_drain: bool,
    progress_notify: bool,
    fragment: bool,
    /// True if it got events since the last progress tick.
    active: bool,
}

impl Watcher {
    pub(super) fn outgoing(&self, revision: i64, message: Message) -> Outgoing {
        Outgoing { watch_id: self.watch_id, revision, fragment: self.fragment, message }
    }

    /// True if a batch made for the watcher will not be in vain.
    pub(super) fn has_room(&self) -> bool {
        if self.waits_for_drain { self.queue.is_drained() } else { self.queue.has_room() }
    }

    /// True if everything up to the revision has been queued for the watcher, and it has begun.
    fn is_level(&self, revision: i64) -> bool {
        self.synced && self.start_revision <= revision
    }

    pub(super) fn mark_active(&mut self) {
        self.active = true;
    }
}

#[derive(Default)]
struct StreamState {
    /// Watch id to slot; `None` for a watcher cancelled by compaction, whose id stays taken.
    ids: BTreeMap<i64, Option<usize>>,
    next_id: i64,
}

pub(super) struct Inner {
    /// Where history is read.
    pub(super) store: Arc<Store>,
    /// Everything at or below it has been published.
    pub(super) revision: i64,
    pub(super) groups: Groups,
    pub(super) watchers: HashMap<usize, Watcher>,
    pub(super) behind: HashSet<usize>,
    next_slot: usize,
    streams: HashMap<u64, StreamState>,
    next_stream: u64,
}

/// The meeting point of writers and watchers. Shared; nothing in it waits.
pub struct Hub {
    pub(super) inner: Mutex<Inner>,
    /// Wakes the catch-up task.
    pub(super) work: Notify,
    queued: Arc<Totals>,
    options: HubOptions,
}

impl Hub {
    /// Makes a hub for a store, level with its current revision.
    pub fn new(store: Arc<Store>, options: HubOptions) -> Hub {
        let inner = Inner {
            revision: store.revision(),
            store,
            groups: Groups::default(),
            watchers: HashMap::new(),
            behind: HashSet::new(),
            next_slot: 0,
            streams: HashMap::new(),
            next_stream: 0,
        };
        Hub { inner: Mutex::new(inner), work: Notify::new(), queued: Arc::default(), options }
    }

    /// Has every stream look up: what its client may watch has changed.
    pub fn wake(&self) {
        for watcher in self.inner.lock().watchers.values() {
            watcher.queue.wake();
        }
    }

    /// Gives a committed run to its watchers. Runs come in order; every event's revision is at most `revision`.
    ///
    /// # Errors
    /// The storage's, when a previous version cannot be read.
    pub fn publish(&self, events: &[Event], revision: i64) -> Result<(), StorageError> {
        let mut inner = self.inner.lock();
        let inner = &mut *inner;
        inner.revision = revision;
        if inner.groups.is_empty() || events.is_empty() {
            return Ok(());
        }
        let mut touched: BTreeMap<u64, Vec<usize>> = BTreeMap::new();
        for (at, event) in events.iter().enumerate() {
            inner.groups.watching(&event.key, |id| touched.entry(id).or_default().push(at));
        }
        let mut encoder = Encoder::new(&inner.store, events);
        for (id, positions) in touched {
            let Some(group) = inner.groups.get(id) else { continue };
            let encoded = encoder.encode(&group.view, &positions)?;
            if encoded.is_empty() {
                continue;
            }
            let mut fallen = Vec::new();
            for slot in &group.watchers {
                let Some(watcher) = inner.watchers.get_mut(slot) else { continue };
                let Some(events) = from_revision(&encoded, watcher.next_revision) else { continue };
                let first = events[0].revision;
                let last = events[events.len() - 1].revision;
                watcher.active = true;
                if watcher.queue.try_push(watcher.outgoing(last, Message::Events(events))) {
                    watcher.next_revision = watcher.next_revision.max(revision + 1);
                } else {
                    watcher.next_revision = first;
                    watcher.synced = false;
                    fallen.push(*slot);
                }
            }
            let view = group.view.clone();
            for slot in fallen {
                inner.groups.leave(&view, slot);
                inner.behind.insert(slot);
            }
        }
        Ok(())
    }

    /// Takes a newer store in the place of the one so far, and moves every watcher back to history, which the new store
    /// has from where each of them was, or has compacted. What is being read from the old one is still given out: it is the
    /// same history.
    pub fn reset(&self, store: Arc<Store>) {
        let mut inner = self.inner.lock();
        let inner = &mut *inner;
        for (slot, watcher) in &mut inner.watchers {
            if watcher.synced {
                // It was level with the old revision, however long ago its last event was.
                watcher.next_revision = watcher.next_revision.max(inner.revision + 1);
                watcher.synced = false;
                inner.groups.leave(&watcher.view, *slot);
                inner.behind.insert(*slot);
            }
        }
        inner.revision = store.revision();
        inner.store = store;
        self.work.notify_one();
    }

    /// Opens a stream of watchers.
    pub fn open_stream(self: &Arc<Self>) -> WatchStream {
        let mut inner = self.inner.lock();
        let id = inner.next_stream;
        inner.next_stream += 1;
        inner.streams.insert(id, StreamState::default());
        let queue = Arc::new(Queue::new(Arc::clone(&self.queued), self.options.queued_bytes_max));
        WatchStream { hub: Arc::clone(self), id, queue }
    }

    /// Ends all streams: the member is stopping.
    pub fn close(&self) {
        let inner = self.inner.lock();
        for watcher in inner.watchers.values() {
            watcher.queue.close();
        }
    }

    /// How much there is of everything, for metrics.
    pub fn sizes(&self) -> HubSizes {
        let inner = self.inner.lock();
        HubSizes {
            watchers: inner.watchers.len(),
            behind: inner.behind.len(),
            streams: inner.streams.len(),
            queued_bytes: self.queued.bytes.load(Ordering::Relaxed),
            queued_events: self.queued.events.load(Ordering::Relaxed),
            sent_events: self.queued.taken_events.load(Ordering::Relaxed),
        }
    }
}

impl Inner {
    /// Moves a watcher that is level to the synced ones.
    pub(super) fn sync(&mut self, slot: usize) {
        self.behind.remove(&slot);
        if let Some(watcher) = self.watchers.get_mut(&slot) {
            watcher.synced = true;
            self.groups.join(&watcher.view, slot);
        }
    }

    /// Ends a watcher whose history is gone; its id stays taken until the client cancels it.
    pub(super) fn compacted(&mut self, slot: usize, compact_revision: i64) {
        let Some(watcher) = self.remove(slot) else { return };
        if let Some(taken) =
            self.streams.get_mut(&watcher.stream).and_then(|s| s.ids.get_mut(&watcher.watch_id))
        {
            *taken = None;
        }
        watcher.queue.push(watcher.outgoing(0, Message::Compacted(compact_revision)));
    }

    fn remove(&mut self, slot: usize) -> Option<Watcher> {
        let watcher = self.watchers.remove(&slot)?;
        self.behind.remove(&slot);
        if watcher.synced {
            self.groups.leave(&watcher.view, slot);
        }
        Some(watcher)
    }
}

/// One client's stream: the handle that creates and cancels, and the queue it reads. Dropping it ends its watchers.
pub struct WatchStream {
    hub: Arc<Hub>,
    id: u64,
    queue: Arc<Queue>,
}

impl WatchStream {
    /// Creates a watcher and queues the answer, before any of its events; a refusal is queued as well.
    pub fn create(&self, request: NewWatch) {
        let mut inner = self.hub.inner.lock();
        let inner = &mut *inner;
        let revision = inner.revision;
        if let Err(reason) = self.try_create(inner, request) {
            self.refuse(revision, reason.text());
        }
    }

    /// Queues a refusal.
    pub fn refuse_now(&self, reason: &'static str) {
        let revision = self.hub.inner.lock().revision;
        self.refuse(revision, reason);
    }

    fn refuse(&self, revision: i64, reason: &'static str) {
        let message = Message::Refused(reason);
        self.queue.push(Outgoing { watch_id: -1, revision, fragment: false, message });
    }

    fn try_create(&self, inner: &mut Inner, request: NewWatch) -> Result<(), CreateError> {
        if request.range.is_empty() {
            return Err(CreateError::EmptyRange);
        }
        let Some(stream) = inner.streams.get_mut(&self.id) else { return Ok(()) };
        let watch_id = if request.watch_id == 0 {
            while stream.ids.contains_key(&stream.next_id) {
                stream.next_id += 1;
            }
            stream.next_id += 1;
            stream.next_id - 1
        } else if stream.ids.contains_key(&request.watch_id) {
            return Err(CreateError::DuplicateId);
        } else {
            request.watch_id
        };
        let slot = inner.next_slot;
        inner.next_slot += 1;
        stream.ids.insert(watch_id, Some(slot));
        let synced = request.start_revision == 0 || request.start_revision > inner.revision;
        let next_revision =
            if request.start_revision == 0 { inner.revision + 1 } else { request.start_revision };
        let view =
            View { range: request.range.detached(), filters: request.filters, prev_kv: request.prev_kv };
        let watcher = Watcher {
            stream: self.id,
            watch_id,
            queue: Arc::clone(&self.queue),
            view,
            start_revision: request.start_revision,
            next_revision,
            synced: false,
            waits_for_drain: false,
            progress_notify: request.progress_notify,
            fragment: request.fragment,
            active: false,
        };
        self.queue.push(watcher.outgoing(inner.revision, Message::Created));
        inner.watchers.insert(slot, watcher);
        if synced {
            inner.sync(slot);
        } else {
            inner.behind.insert(slot);
            self.hub.work.notify_one();
        }
        Ok(())
    }

    /// Cancels a watcher and queues the answer; an unknown id gets none.
    pub fn cancel(&self, watch_id: i64) {
        let mut inner = self.hub.inner.lock();
        let revision = inner.revision;
        let Some(stream) = inner.streams.get_mut(&self.id) else { return };
        let Some(slot) = stream.ids.remove(&watch_id) else { return };
        if let Some(slot) = slot {
            inner.remove(slot);
        }
        self.queue.push(Outgoing { watch_id, revision, fragment: false, message: Message::Canceled });
    }

    /// The stream's watchers and what they watch.
    pub fn ranges(&self) -> Vec<(i64, KeyRange)> {
        let inner = self.hub.inner.lock();
        let Some(stream) = inner.streams.get(&self.id) else { return Vec::new() };
        let watcher = |(id, slot): (&i64, &Option<usize>)| {
            let watcher = inner.watchers.get(slot.as_ref()?)?;
            Some((*id, watcher.view.range.clone()))
        };
        stream.ids.iter().filter_map(watcher).collect()
    }

    /// Ends a watcher and says why; events that wait for it are not sent. Its id stays taken until the client cancels it.
    pub fn end(&self, watch_id: i64, reason: &'static str) {
        let mut inner = self.hub.inner.lock();
        let revision = inner.revision;
        let Some(stream) = inner.streams.get_mut(&self.id) else { return };
        let Some(slot) = stream.ids.get_mut(&watch_id).and_then(Option::take) else { return };
        inner.remove(slot);
        self.queue.forget(watch_id);
        self.queue.push(Outgoing { watch_id, revision, fragment: false, message: Message::Ended(reason) });
    }

    /// Queues one progress message for all watchers, if each is level and past its start; otherwise nothing. A watcher
    /// ended by compaction is not level until the client cancels it.
    pub fn request_progress(&self) {
        let inner = self.hub.inner.lock();
        let Some(stream) = inner.streams.get(&self.id) else { return };
        let mut any = false;
        for slot in stream.ids.values() {
            let watcher = slot.and_then(|slot| inner.watchers.get(&slot));
            if !watcher.is_some_and(|watcher| watcher.is_level(inner.revision)) {
                return;
            }
            any = true;
        }
        if any {
            let message = Message::Progress;
            self.queue.push(Outgoing { watch_id: -1, revision: inner.revision, fragment: false, message });
        }
    }

    /// Queues progress for each level watcher that asked for it and had no events since the last tick.
    pub fn tick_progress(&self) {
        let mut inner = self.hub.inner.lock();
        let inner = &mut *inner;
        let revision = inner.revision;
        let Some(stream) = inner.streams.get(&self.id) else { return };
        for slot in stream.ids.values().flatten() {
            let Some(watcher) = inner.watchers.get_mut(slot) else { continue };
            let quiet = !std::mem::take(&mut watcher.active);
            if watcher.progress_notify && quiet && watcher.is_level(revision) {
                watcher.queue.push(watcher.outgoing(revision, Message::Progress));
            }
        }
    }

    /// The next message to send.
    pub fn poll_next(&self, context: &mut Context<'_>) -> Poll<Option<Outgoing>> {
        self.queue.poll(context).map(|next| {
            next.map(|(message, drained)| {
                if drained {
                    self.hub.work.notify_one();
                }
                message
            })
        })
    }
}

impl Drop for WatchStream {
    fn drop(&mut self) {
        let mut inner = self.hub.inner.lock();
        if let Some(stream) = inner.streams.remove(&self.id) {
            for slot in stream.ids.into_values().flatten() {
                inner.remove(slot);
            }
        }
        self.queue.close();
    }
}

/// The part of a view's events that a watcher still wants; `None` if nothing.
fn from_revision(events: &Arc<[EncodedEvent]>, next_revision: i64) -> Option<Arc<[EncodedEvent]>> {
    if events[0].revision >= next_revision {
        return Some(Arc::clone(events));
    }
    let wanted: Arc<[EncodedEvent]> =
        events.iter().filter(|event| event.revision >= next_revision).cloned().collect();
    (!wanted.is_empty()).then_some(wanted)
}

/// Encodes each event of a run at most twice: with and without its previous version.
pub(super) struct Encoder<'e> {
    store: &'e Store,
    events: &'e [Event],
    plain: Vec<Option<Bytes>>,
    with_previous: Vec<Option<Bytes>>,
}

impl<'e> Encoder<'e> {
    pub(super) fn new(store: &'e Store, events: &'e [Event]) -> Encoder<'e> {
        let none = vec![None; events.len()];
        Encoder { store, events, plain: none.clone(), with_previous: none }
    }

    /// The events at `positions` as a view sees them.
    pub(super) fn encode(
        &mut self,
        view: &View,
        positions: &[usize],
    ) -> Result<Arc<[EncodedEvent]>, StorageError> {
        let mut out = Vec::with_capacity(positions.len());
        for at in positions {
            let event = &self.events[*at];
            let unwanted = match event.change {
                Change::Put { .. } => view.filters.no_put,
                Change::Delete => view.filters.no_delete,
            };
            if !unwanted {
                let bytes = self.bytes(*at, view.prev_kv)?;
                out.push(EncodedEvent { revision: event.revision.main, bytes });
            }
        }
        Ok(out.into())
    }

    fn bytes(&mut self, at: usize, prev_kv: bool) -> Result<Bytes, StorageError> {
        let cache = if prev_kv { &mut self.with_previous[at] } else { &mut self.plain[at] };
        if let Some(bytes) = cache {
            return Ok(bytes.clone());
        }
        let event = &self.events[at];
        let previous = if prev_kv { self.store.version_before(event)? } else { None };
        let bytes = encode_event(event, previous.as_ref());
        *cache = Some(bytes.clone());
        Ok(bytes)
    }
}

/// Encodes `mvccpb.Event`: type, kv, previous kv.
fn encode_event(event: &Event, previous: Option<&(KeyMeta, Bytes)>) -> Bytes {
    use prost::encoding::{WireType, encode_key, encode_varint};
    let mut out = BytesMut::with_capacity(event.size_bytes() + 32);
    let nested = |out: &mut BytesMut, tag: u32, meta: &KeyMeta, value: &[u8]| {
        encode_key(tag, WireType::LengthDelimited, out);
        encode_varint(schema::key_value_len(&event.key, meta, value) as u64, out);
        schema::put_key_value(out, &event.key, meta, value);
    };
    match &event.change {
        Change::Put { meta, value } => nested(&mut out, 2, meta, value),
        Change::Delete => {
            encode_key(1, WireType::Varint, &mut out);
            encode_varint(1, &mut out);
            let deleted = KeyMeta { create_revision: 0, modified: event.revision, version: 0, lease: 0 };
            nested(&mut out, 2, &deleted, b"");
        }
    }
    if let Some((meta, value)) = previous {
        nested(&mut out, 3, meta, value);
    }
    out.freeze()
}
