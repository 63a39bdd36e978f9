//! What waits to be sent on one watch stream, within bounds.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::task::{Context, Poll, Waker};

use bytes::Bytes;
use parking_lot::Mutex;

/// Bytes that may wait on one stream before its watchers fall back to history: a few large messages.
const STREAM_BYTES_MAX: usize = 4 << 20;
/// Messages that may wait on one stream. etcd: `chanBufLen`.
const STREAM_MESSAGES_MAX: usize = 1024;

/// One event, encoded as `mvccpb.Event`.
#[derive(Clone, Debug)]
pub struct EncodedEvent {
    /// Main revision.
    pub revision: i64,
    /// The encoded message.
    pub bytes: Bytes,
}

/// What a message says.
#[derive(Clone, Debug)]
pub enum Message {
    /// The watcher exists.
    Created,
    /// The watcher could not be created, with the reason.
    Refused(&'static str),
    /// Events, shared by all watchers that see them alike.
    Events(Arc<[EncodedEvent]>),
    /// Nothing is owed at or below the revision.
    Progress,
    /// Cancelled by request.
    Canceled,
    /// Ended here, with the reason.
    Ended(&'static str),
    /// Cancelled because history below this compact revision is gone.
    Compacted(i64),
}

/// A message to one watcher.
#[derive(Clone, Debug)]
pub struct Outgoing {
    /// Watch id, -1 for all watchers of the stream.
    pub watch_id: i64,
    /// Header revision.
    pub revision: i64,
    /// True if large messages may be split.
    pub fragment: bool,
    /// What it says.
    pub message: Message,
}

impl Outgoing {
    fn events(&self) -> usize {
        match &self.message {
            Message::Events(events) => events.len(),
            _ => 0,
        }
    }

    fn size_bytes(&self) -> usize {
        match &self.message {
            Message::Events(events) => {
                size_of::<Outgoing>() + events.iter().map(|event| event.bytes.len()).sum::<usize>()
            }
            _ => size_of::<Outgoing>(),
        }
    }
}

/// What waits on all streams together, and what has left them.
#[derive(Debug, Default)]
pub(super) struct Totals {
    pub(super) bytes: AtomicUsize,
    pub(super) events: AtomicUsize,
    pub(super) taken_events: AtomicU64,
}

#[derive(Default)]
struct Waiting {
    messages: VecDeque<(Outgoing, usize)>,
    bytes: usize,
    closed: bool,
    reader: Option<Waker>,
}

/// The queue between the hub and one stream; the hub holds the other end.
pub(super) struct Queue {
    waiting: Mutex<Waiting>,
    total: Arc<Totals>,
    total_max: usize,
}

impl Queue {
    pub(super) fn new(total: Arc<Totals>, total_max: usize) -> Queue {
        Queue { waiting: Mutex::default(), total, total_max }
    }

    /// Queues a control message: always taken, they are small and answer a request each.
    pub(super) fn push(&self, message: Outgoing) {
        let size = message.size_bytes();
        let mut waiting = self.waiting.lock();
        self.add(&mut waiting, message, size);
    }

    /// Queues events if there is room; one message is always taken by an empty queue.
    pub(super) fn try_push(&self, message: Outgoing) -> bool {
        let size = message.size_bytes();
        let mut waiting = self.waiting.lock();
        let full = waiting.bytes + size > STREAM_BYTES_MAX
            || waiting.messages.len() >= STREAM_MESSAGES_MAX
            || self.total.bytes.load(Ordering::Relaxed) + size > self.total_max;
        if full && !waiting.messages.is_empty() {
            return false;
        }
        self.add(&mut waiting, message, size);
        true
    }

    /// True if a watcher that catches up may be given a batch.
    pub(super) fn has_room(&self) -> bool {
        let waiting = self.waiting.lock();
        !waiting.closed
            && (waiting.messages.is_empty()
                || (waiting.bytes < STREAM_BYTES_MAX / 2
                    && waiting.messages.len() < STREAM_MESSAGES_MAX / 2
                    && self.total.bytes.load(Ordering::Relaxed) < self.total_max))
    }

    /// True if nothing waits: the next batch is taken, whatever its size.
    pub(super) fn is_drained(&self) -> bool {
        let waiting = self.waiting.lock();
        !waiting.closed && waiting.messages.is_empty()
    }

    fn add(&self, waiting: &mut Waiting, message: Outgoing, size: usize) {
        if waiting.closed {
            return;
        }
        waiting.bytes += size;
        self.total.bytes.fetch_add(size, Ordering::Relaxed);
        self.total.events.fetch_add(message.events(), Ordering::Relaxed);
        waiting.messages.push_back((message, size));
        if let Some(reader) = waiting.reader.take() {
            reader.wake();
        }
    }

    /// The next message; `None` once closed. The flag says that the queue has just become half empty.
    pub(super) fn poll(&self, context: &mut Context<'_>) -> Poll<Option<(Outgoing, bool)>> {
        let mut waiting = self.waiting.lock();
        if waiting.closed {
            return Poll::Ready(None);
        }
        let Some((message, size)) = waiting.messages.pop_front() else {
            waiting.reader = Some(context.waker().clone());
            return Poll::Pending;
        };
        let before = waiting.bytes;
        waiting.bytes -= size;
        self.total.bytes.fetch_sub(size, Ordering::Relaxed);
        let events = message.events();
        self.total.events.fetch_sub(events, Ordering::Relaxed);
        self.total.taken_events.fetch_add(events as u64, Ordering::Relaxed);
        let drained = waiting.messages.is_empty()
            || (before >= STREAM_BYTES_MAX / 2 && waiting.bytes < STREAM_BYTES_MAX / 2);
        Poll::Ready(Some((message, drained)))
    }

    /// Forgets the events that wait for a watcher.
    pub(super) fn forget(&self, watch_id: i64) {
        let mut waiting = self.waiting.lock();
        let (mut bytes, mut events) = (0, 0);
        waiting.messages.retain(|(message, size)| {
            let forgotten = message.watch_id == watch_id && message.events() > 0;
            if forgotten {
                bytes += size;
                events += message.events();
            }
            !forgotten
        });
        waiting.bytes -= bytes;
        self.total.bytes.fetch_sub(bytes, Ordering::Relaxed);
        self.total.events.fetch_sub(events, Ordering::Relaxed);
    }

    /// Has the stream look up, though nothing waits for it.
    pub(super) fn wake(&self) {
        if let Some(reader) = self.waiting.lock().reader.take() {
            reader.wake();
        }
    }

    /// Ends the queue and forgets what waits.
    pub(super) fn close(&self) {
        let mut waiting = self.waiting.lock();
        waiting.closed = true;
        self.total.bytes.fetch_sub(waiting.bytes, Ordering::Relaxed);
        let events = waiting.messages.iter().map(|(message, _)| message.events()).sum();
        self.total.events.fetch_sub(events, Ordering::Relaxed);
        waiting.bytes = 0;
        waiting.messages.clear();
        if let Some(reader) = waiting.reader.take() {
            reader.wake();
        }
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        self.close();
    }
}
