//! Clients that write, read and watch through every member while a test does what it does to them.
//!
//! They run on a thread of their own, for the tests block theirs. Each call is recorded with when it began and ended; a
//! call of which nobody can tell whether it happened is recorded without an end.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use etcd_client::{
    Client, Compare, CompareOp, Error, EventType, GetOptions, KeyValue, ResponseHeader, Txn, TxnOp,
    TxnOpResponse, WatchOptions,
};
use fastrand::Rng;
use skeg::clock::now;
use tokio::sync::{oneshot, watch};
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};
use tonic::Code;

use super::PATIENCE;
use super::history::{Answer, Asked, Call, Event, Glimpse, History, KEYS, PREFIX, key_name};

/// Clients of each member.
const CLIENTS_EACH: usize = 2;
/// After that long an answer is not waited for.
const ANSWER_WITHIN: Duration = Duration::from_millis(1_500);
/// Pause of a client after a failure, so that calls in doubt do not pile up.
const AFTER_FAILURE: Duration = Duration::from_millis(100);
/// Longest pause of a client between two calls, in milliseconds.
const PAUSE_MILLIS: u64 = 20;

/// Clients at work.
pub(crate) struct Load {
    addresses: Vec<String>,
    answered: Arc<AtomicUsize>,
    stop: watch::Sender<bool>,
    /// The revision up to which the watchers go on.
    until: watch::Sender<i64>,
    stopped: oneshot::Receiver<()>,
    thread: JoinHandle<History>,
}

impl Load {
    /// Sets clients to work on members at these addresses.
    pub(crate) fn start(addresses: Vec<String>) -> Load {
        let answered: Arc<AtomicUsize> = Arc::default();
        let (stop, stopping) = watch::channel(false);
        let (until, watch_until) = watch::channel(i64::MAX);
        let (clients_stopped, stopped) = oneshot::channel();
        let (members, count) = (addresses.clone(), Arc::clone(&answered));
        let thread = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async move {
                let mut watchers = Vec::new();
                let mut clients = JoinSet::new();
                let mut glimpses = JoinSet::new();
                for (member, address) in members.iter().enumerate() {
                    watchers.push(tokio::spawn(follow(address.clone(), watch_until.clone())));
                    glimpses.spawn(glimpse(address.clone(), stopping.clone()));
                    for number in 0..CLIENTS_EACH {
                        let writer = Writer {
                            number: number * members.len() + member + 1,
                            next: 0,
                            known: [0; KEYS],
                            rng: Rng::new(),
                            calls: Vec::new(),
                            errors: Vec::new(),
                            answered: Arc::clone(&count),
                        };
                        clients.spawn(writer.work(address.clone(), stopping.clone()));
                    }
                }
                let mut history = History::default();
                for (calls, errors) in clients.join_all().await {
                    history.calls.extend(calls);
                    history.errors.extend(errors);
                }
                history.glimpses.extend(glimpses.join_all().await.into_iter().flatten());
                let _ = clients_stopped.send(());
                for watcher in watchers {
                    history.watched.push(watcher.await.expect("a watcher does not fail"));
                }
                history
            })
        });
        Load { addresses, answered, stop, until, stopped, thread }
    }

    /// Waits until so many more calls were answered.
    pub(crate) async fn goes_on(&self, calls: usize) {
        let (started, before) = (now(), self.answered.load(Ordering::Relaxed));
        while self.answered.load(Ordering::Relaxed) < before + calls {
            assert!(started.elapsed() < PATIENCE, "the clients get no answers");
            sleep(Duration::from_millis(10)).await;
        }
    }

    /// Ends the work once every member has acknowledged a last write of each key, and gives what was recorded.
    ///
    /// # Panics
    /// If a member, or a watcher, does not get that far.
    pub(crate) async fn finish(self) -> History {
        self.stop.send_replace(true);
        self.stopped.await.expect("the clients end");
        let mut last = Vec::new();
        for (member, address) in self.addresses.iter().enumerate() {
            let mut client = Client::connect([address], None).await.unwrap();
            for key in 0..KEYS {
                last.extend(write_at_last(&mut client, member, key).await);
            }
        }
        let until = last.iter().filter_map(|call| call.revision()).max().expect("there are members");
        self.until.send_replace(until);
        #[expect(clippy::disallowed_methods, reason = "a test has no simulation to order its threads")]
        let mut history = tokio::task::spawn_blocking(|| self.thread.join())
            .await
            .unwrap()
            .expect("no client and no watcher fails");
        history.calls.extend(last);
        history
    }
}

/// Writes until it is acknowledged, each time another value.
async fn write_at_last(client: &mut Client, member: usize, key: usize) -> Vec<Call> {
    let started = now();
    let mut calls = Vec::new();
    for attempt in 0_u64.. {
        let value = u64::MAX - (member * KEYS + key) as u64 - 1_000 * attempt;
        let begin = now();
        let answer = timeout(ANSWER_WITHIN, ask(client, key, Asked::Write(value))).await;
        let end = now();
        let answer = answer.ok().and_then(Result::ok).map(|answer| (end, answer));
        calls.push(Call { key, asked: Asked::Write(value), begin, answer });
        if answer.is_some() {
            return calls;
        }
        assert!(started.elapsed() < PATIENCE, "member {member} does not write again");
        sleep(AFTER_FAILURE).await;
    }
    unreachable!("it has run out of patience before")
}

/// One client of one member.
struct Writer {
    number: usize,
    next: u64,
    /// The last value seen of each key.
    known: [u64; KEYS],
    rng: Rng,
    calls: Vec<Call>,
    errors: Vec<String>,
    answered: Arc<AtomicUsize>,
}

impl Writer {
    async fn work(mut self, address: String, stopping: watch::Receiver<bool>) -> (Vec<Call>, Vec<String>) {
        let mut client = Client::connect([address], None).await.unwrap();
        while !*stopping.borrow() {
            let key = self.rng.usize(..KEYS);
            let asked = self.choose(key);
            let begin = now();
            match timeout(ANSWER_WITHIN, ask(&mut client, key, asked)).await {
                Ok(Ok(answer)) => {
                    self.known[key] = answer.value;
                    self.calls.push(Call { key, asked, begin, answer: Some((now(), answer)) });
                    self.answered.fetch_add(1, Ordering::Relaxed);
                }
                failed => {
                    if let Ok(Err(error)) = &failed
                        && !is_tried_again(error)
                    {
                        self.errors.push(error.to_string());
                    }
                    let refused = matches!(&failed, Ok(Err(error)) if was_not_sent(error));
                    if !refused && !matches!(asked, Asked::Read) {
                        self.calls.push(Call { key, asked, begin, answer: None });
                    }
                    sleep(AFTER_FAILURE).await;
                }
            }
            sleep(Duration::from_millis(self.rng.u64(1..PAUSE_MILLIS))).await;
        }
        (self.calls, self.errors)
    }

    fn choose(&mut self, key: usize) -> Asked {
        match self.rng.u32(..10) {
            0..4 => Asked::Read,
            4..7 => Asked::Write(self.value()),
            _ => Asked::Swap { from: self.known[key], to: self.value() },
        }
    }

    /// A value that nobody else writes.
    fn value(&mut self) -> u64 {
        self.next += 1;
        self.number as u64 * 1_000_000 + self.next
    }
}

/// True for what a client tries again: no member said it, or one said that it cannot be just now.
fn is_tried_again(error: &Error) -> bool {
    match error {
        Error::TransportError(_) => true,
        Error::GRpcStatus(status) => match status.code() {
            Code::Unavailable => true,
            // A broken connection.
            Code::Unknown | Code::Cancelled => !status.message().starts_with("etcdserver"),
            _ => false,
        },
        _ => false,
    }
}

/// True for an error before anything was sent.
fn was_not_sent(error: &Error) -> bool {
    let text = format!("{error:?}");
    text.contains("ConnectionRefused") || text.contains("too many requests")
}

async fn ask(client: &mut Client, key: usize, asked: Asked) -> Result<Answer, Error> {
    let name = key_name(key);
    let of = |header: Option<&ResponseHeader>, value: u64, modified: i64| Answer {
        value,
        modified,
        swapped: false,
        revision: header.expect("a header").revision(),
    };
    Ok(match asked {
        Asked::Read => {
            let read = client.get(name, None).await?;
            let (value, modified) = read.kvs().first().map_or((0, 0), held);
            of(read.header(), value, modified)
        }
        Asked::Write(value) => {
            let put = client.put(name, value.to_string(), None).await?;
            let revision = put.header().expect("a header").revision();
            of(put.header(), value, revision)
        }
        Asked::Swap { from, to } => {
            let compare = match from {
                0 => Compare::version(name.clone(), CompareOp::Equal, 0),
                _ => Compare::value(name.clone(), CompareOp::Equal, from.to_string()),
            };
            let txn = Txn::new()
                .when([compare])
                .and_then([TxnOp::put(name.clone(), to.to_string(), None)])
                .or_else([TxnOp::get(name, None)]);
            let done = client.txn(txn).await?;
            let revision = done.header().expect("a header").revision();
            match done.op_responses().first() {
                Some(TxnOpResponse::Get(read)) => {
                    let (value, modified) = read.kvs().first().map_or((0, 0), held);
                    of(done.header(), value, modified)
                }
                _ => Answer { swapped: true, ..of(done.header(), to, revision) },
            }
        }
    })
}

fn held(kv: &KeyValue) -> (u64, i64) {
    (kv.value_str().unwrap().parse().unwrap(), kv.mod_revision())
}

/// Reads all keys from one member without asking the leader.
async fn glimpse(address: String, stopping: watch::Receiver<bool>) -> Vec<Glimpse> {
    let mut client = Client::connect([address], None).await.unwrap();
    let mut glimpses = Vec::new();
    while !*stopping.borrow() {
        let options = GetOptions::new().with_prefix().with_serializable();
        if let Ok(Ok(read)) = timeout(ANSWER_WITHIN, client.get(PREFIX, Some(options))).await {
            let revision = read.header().expect("a header").revision();
            let held = |kv| (KeyValue::key_str(kv).unwrap().to_owned(), held(kv));
            glimpses.push(Glimpse { revision, keys: read.kvs().iter().map(held).collect() });
        }
        sleep(Duration::from_millis(50)).await;
    }
    glimpses
}

/// Watches all keys through one member from the first revision on, and goes on where it was after a failure.
async fn follow(address: String, mut until: watch::Receiver<i64>) -> Vec<Event> {
    let mut events: Vec<Event> = Vec::new();
    let reached = |events: &[Event], until: i64| events.last().is_some_and(|event| event.revision >= until);
    loop {
        let next = events.last().map_or(2, |event| event.revision + 1);
        let mut watching = Box::pin(watch_from(&address, next, &mut events));
        let ended = tokio::select! {
            ended = &mut watching => ended,
            _ = until.changed() => Ok(()),
        };
        drop(watching);
        let until_now = *until.borrow();
        if until_now < i64::MAX {
            // From here on the end is near: nothing but it is waited for.
            return finish_following(&address, events, until_now, reached).await;
        }
        if ended.is_err() {
            sleep(AFTER_FAILURE).await;
        }
    }
}

async fn finish_following(
    address: &str,
    mut events: Vec<Event>,
    until: i64,
    reached: impl Fn(&[Event], i64) -> bool,
) -> Vec<Event> {
    let started = now();
    while !reached(&events, until) {
        let left = PATIENCE.saturating_sub(started.elapsed());
        assert!(!left.is_zero(), "the watcher of {address} stays at {:?}, {until} is due", events.last());
        let next = events.last().map_or(2, |event| event.revision + 1);
        let mut client = Client::connect([address], None).await.unwrap();
        let options = WatchOptions::new().with_prefix().with_start_revision(next);
        let Ok(Ok(mut stream)) = timeout(left, client.watch(PREFIX, Some(options))).await else { continue };
        while !reached(&events, until)
            && let Ok(Ok(Some(message))) = timeout(left, stream.message()).await
        {
            take(&message, &mut events);
        }
    }
    events
}

async fn watch_from(address: &str, revision: i64, events: &mut Vec<Event>) -> Result<(), Error> {
    let mut client = Client::connect([address], None).await?;
    let options = WatchOptions::new().with_prefix().with_start_revision(revision);
    let mut stream = client.watch(PREFIX, Some(options)).await?;
    while let Some(message) = stream.message().await? {
        take(&message, events);
    }
    Ok(())
}

fn take(message: &etcd_client::WatchResponse, events: &mut Vec<Event>) {
    for event in message.events() {
        assert_eq!(event.event_type(), EventType::Put, "nobody deletes");
        let kv = event.kv().expect("an event has a key");
        let (value, revision) = held(kv);
        events.push(Event { revision, key: kv.key_str().unwrap().to_owned(), value });
    }
}
