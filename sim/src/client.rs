//! Clients over gRPC: they write, compare, delete, read, hold leases and watch, and note what they were told.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use hyper::body::Incoming;
use hyper::client::conn::http2::{Builder, SendRequest};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use skeg::proto::client::{kv_client::KvClient, lease_client::LeaseClient, watch_client::WatchClient};
use skeg::proto::etcdserverpb as pb;
use skeg::proto::etcdserverpb::compare::{CompareResult, CompareTarget, TargetUnion};
use skeg::proto::etcdserverpb::request_op::Request;
use skeg::proto::etcdserverpb::watch_request::RequestUnion;
use skeg::proto::mvccpb::event::EventType;
use skeg::proto::mvccpb::{Event, KeyValue};
use std::sync::Mutex;
use tokio::sync::mpsc;
use tokio::time::{sleep, timeout};
use tonic::Status;
use tonic::body::Body;

use crate::history::{Action, Answer, Change, History, Lease, Operation, Watched};
use crate::net::{self, Host, NETWORK};

/// Where members listen to clients.
pub(crate) const CLIENT_PORT: u16 = 2379;
const KEYS: usize = 8;

/// What clients share.
pub(crate) struct Shared {
    pub(crate) history: Mutex<History>,
    pub(crate) members: usize,
    /// Nothing new is begun.
    pub(crate) stopping: AtomicBool,
    /// Milliseconds since the start.
    pub(crate) now: std::sync::atomic::AtomicU64,
}

impl Shared {
    fn history(&self) -> std::sync::MutexGuard<'_, History> {
        self.history.lock().expect("a panic elsewhere ends the run")
    }

    fn stopping(&self) -> bool {
        self.stopping.load(Ordering::Relaxed)
    }

    fn now(&self) -> u64 {
        self.now.load(Ordering::Relaxed)
    }
}

/// An open connection as tonic's clients want it.
#[derive(Clone)]
struct Connection(SendRequest<Body>);

impl tower_service::Service<http::Request<Body>> for Connection {
    type Response = http::Response<Incoming>;
    type Error = hyper::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Self::Error>> + Send>>;

    fn poll_ready(&mut self, task: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.0.poll_ready(task)
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        Box::pin(self.0.send_request(request))
    }
}

/// A client and the member that it talks to.
struct Client {
    id: usize,
    chance: fastrand::Rng,
    shared: Arc<Shared>,
    member: Host,
    open: Option<Connection>,
    written: u64,
}

impl Client {
    fn new(id: usize, seed: u64, shared: &Arc<Shared>) -> Client {
        let mut chance = fastrand::Rng::with_seed(seed ^ (id as u64).wrapping_mul(0x9E37_79B9));
        let member = chance.usize(1..=shared.members);
        Client { id, chance, shared: Arc::clone(shared), member, open: None, written: 0 }
    }

    async fn connection(&mut self) -> Option<Connection> {
        if let Some(open) = &self.open
            && !open.0.is_closed()
        {
            return Some(open.clone());
        }
        let opened = timeout(Duration::from_secs(1), connect(self.member)).await;
        self.open = opened.ok().flatten();
        if self.open.is_none() {
            self.move_on().await;
        }
        self.open.clone()
    }

    /// Goes to another member, or tries the same again.
    async fn move_on(&mut self) {
        self.open = None;
        self.member = self.chance.usize(1..=self.shared.members);
        sleep(Duration::from_millis(self.chance.u64(10..200))).await;
    }

    fn key(&mut self) -> String {
        format!("k{}", self.chance.usize(..KEYS))
    }

    fn value(&mut self) -> String {
        self.written += 1;
        let padding = if self.chance.u8(..8) == 0 { self.chance.usize(..3000) } else { 0 };
        format!("{}-{}{}", self.id, self.written, ".".repeat(padding))
    }

    /// Does one thing, and notes it.
    async fn act(&mut self, known: &mut Vec<(String, i64)>) {
        let Some(connection) = self.connection().await else { return };
        let action = self.choose(known);
        let mut kv = KvClient::with_origin(connection, origin(self.member));
        let began = self.shared.history().next();
        let limit = Duration::from_millis(self.chance.u64(200..8000));
        let answered = timeout(limit, ask(&mut kv, &action)).await.ok();
        let failed = !matches!(answered, Some(Ok(_)));
        let answer = answered.and_then(Result::ok);
        if let Some(answer) = &answer {
            match &action {
                Action::Read { .. } => {
                    *known = answer.found.iter().map(|(key, _, at)| (key.clone(), *at)).collect();
                }
                Action::Write { changes, .. } if answer.met => {
                    known.retain(|(key, _)| changes.iter().all(|(changed, _)| changed != key));
                    known.extend(
                        changes.iter().filter(|c| c.1.is_some()).map(|c| (c.0.clone(), answer.revision)),
                    );
                }
                Action::Write { .. } => known.clear(),
            }
        }
        self.shared.history().end(Operation {
            client: self.id,
            member: self.member,
            began,
            ended: 0,
            action,
            answer,
        });
        if failed && self.chance.u8(..4) > 0 {
            self.move_on().await;
        }
    }

    fn choose(&mut self, known: &[(String, i64)]) -> Action {
        let key = self.key();
        match self.chance.u8(..20) {
            0..6 => Action::Write { compare: None, changes: vec![(key, Some(self.value()))] },
            6..9 => {
                let (key, at) = match known.get(self.chance.usize(..known.len().max(1))) {
                    Some(known) => known.clone(),
                    None => (key, 0),
                };
                Action::Write { compare: Some((key.clone(), at)), changes: vec![(key, Some(self.value()))] }
            }
            9..11 => Action::Write { compare: None, changes: vec![(key, None)] },
            11 => {
                let value = self.value();
                let other = format!("k{}", KEYS + self.chance.usize(..2));
                let changes = vec![(key, Some(value.clone())), (other, Some(value))];
                Action::Write { compare: None, changes }
            }
            12..17 => Action::Read { to: format!("{key}\0"), from: key, serializable: false },
            17 => Action::Read { from: "k".to_owned(), to: "l".to_owned(), serializable: false },
            _ => Action::Read { from: "k".to_owned(), to: "l".to_owned(), serializable: true },
        }
    }
}

fn origin(member: Host) -> http::Uri {
    format!("http://{NETWORK}{member}:{CLIENT_PORT}").parse().expect("an address is a URI")
}

async fn connect(member: Host) -> Option<Connection> {
    let socket = net::connect(0, member, CLIENT_PORT).await.ok()?;
    let (sender, connection) = Builder::new(TokioExecutor::new())
        .timer(TokioTimer::new())
        .keep_alive_interval(Duration::from_secs(1))
        .keep_alive_timeout(Duration::from_secs(2))
        .keep_alive_while_idle(true)
        .handshake(TokioIo::new(socket))
        .await
        .ok()?;
    tokio::spawn(connection);
    Some(Connection(sender))
}

async fn ask(kv: &mut KvClient<Connection>, action: &Action) -> Result<Answer, Status> {
    match action {
        Action::Read { from, to, serializable } => {
            let request = pb::RangeRequest {
                key: Bytes::from(from.clone()),
                range_end: Bytes::from(to.clone()),
                serializable: *serializable,
                ..pb::RangeRequest::default()
            };
            let response = kv.range(request).await?.into_inner();
            let found =
                response.kvs.iter().map(|kv| (text(&kv.key), text(&kv.value), kv.mod_revision)).collect();
            Ok(Answer { revision: revision(response.header), met: true, found })
        }
        Action::Write { compare: None, changes } if changes.len() == 1 => {
            let revision = match one(&changes[0]) {
                Request::RequestPut(put) => revision(kv.put(put).await?.into_inner().header),
                Request::RequestDeleteRange(delete) => {
                    revision(kv.delete_range(delete).await?.into_inner().header)
                }
                _ => 0,
            };
            Ok(Answer { revision, met: true, found: Vec::new() })
        }
        Action::Write { compare, changes } => {
            let compare = compare.iter().map(|(key, at)| pb::Compare {
                result: CompareResult::Equal as i32,
                target: CompareTarget::Mod as i32,
                key: Bytes::from(key.clone()),
                target_union: Some(TargetUnion::ModRevision(*at)),
                ..pb::Compare::default()
            });
            let request = pb::TxnRequest {
                compare: compare.collect(),
                success: changes.iter().map(|change| pb::RequestOp { request: Some(one(change)) }).collect(),
                failure: Vec::new(),
            };
            let response = kv.txn(request).await?.into_inner();
            Ok(Answer { revision: revision(response.header), met: response.succeeded, found: Vec::new() })
        }
    }
}

fn one((key, value): &Change) -> Request {
    let key = Bytes::from(key.clone());
    match value {
        Some(value) => {
            let value = Bytes::from(value.clone());
            Request::RequestPut(pb::PutRequest { key, value, ..pb::PutRequest::default() })
        }
        None => {
            Request::RequestDeleteRange(pb::DeleteRangeRequest { key, ..pb::DeleteRangeRequest::default() })
        }
    }
}

fn revision(header: Option<pb::ResponseHeader>) -> i64 {
    header.unwrap_or_default().revision
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Writes and reads until told to stop.
pub(crate) async fn work(id: usize, seed: u64, shared: Arc<Shared>) {
    let mut client = Client::new(id, seed, &shared);
    let mut known = Vec::new();
    while !shared.stopping() {
        client.act(&mut known).await;
        let pause = if client.chance.u8(..16) == 0 { 1000 } else { 60 };
        sleep(Duration::from_millis(client.chance.u64(..pause))).await;
    }
}

/// Compacts now and then what is well behind.
pub(crate) async fn compact(id: usize, seed: u64, shared: Arc<Shared>) {
    let mut client = Client::new(id, seed, &shared);
    while !shared.stopping() {
        sleep(Duration::from_millis(client.chance.u64(1000..6000))).await;
        let Some(connection) = client.connection().await else { continue };
        let mut kv = KvClient::with_origin(connection, origin(client.member));
        let read = Action::Read { from: "k".to_owned(), to: "l".to_owned(), serializable: false };
        let Ok(Ok(answer)) = timeout(Duration::from_secs(3), ask(&mut kv, &read)).await else { continue };
        let behind = client.chance.i64(1..60);
        let request =
            pb::CompactionRequest { revision: answer.revision - behind, physical: client.chance.bool() };
        let _ = timeout(Duration::from_secs(3), kv.compact(request)).await;
    }
}

/// Watches all keys, coming back where it was, until it is dropped.
pub(crate) async fn watch(id: usize, seed: u64, shared: Arc<Shared>) {
    let mut client = Client::new(id, seed, &shared);
    shared.history().watchers.insert(id, Watched { from: 1, ..Watched::default() });
    loop {
        let lasts = Duration::from_millis(client.chance.u64(300..5000));
        let lasts = if shared.stopping() { Duration::from_secs(3600) } else { lasts };
        let _ = timeout(lasts, watch_once(&mut client)).await;
        client.move_on().await;
    }
}

async fn watch_once(client: &mut Client) -> Option<()> {
    let shared = Arc::clone(&client.shared);
    let id = client.id;
    let connection = client.connection().await?;
    let mut service = WatchClient::with_origin(connection, origin(client.member));
    let next = with_watched(&shared, id, |watched| watched.reached.max(watched.from - 1) + 1);
    let create = pb::WatchCreateRequest {
        key: Bytes::from_static(b"k"),
        range_end: Bytes::from_static(b"l"),
        start_revision: next,
        ..pb::WatchCreateRequest::default()
    };
    let (requests, sent) = mpsc::channel(1);
    let request = pb::WatchRequest { request_union: Some(RequestUnion::CreateRequest(create)) };
    requests.send(request).await.ok()?;
    let sent = futures::stream::unfold(sent, async |mut sent| Some((sent.recv().await?, sent)));
    let mut responses = service.watch(sent).await.ok()?.into_inner();
    loop {
        let response = responses.message().await.ok()??;
        if response.compact_revision > 0 {
            with_watched(&shared, id, |watched| {
                watched.missed.push((next, response.compact_revision));
                watched.reached = response.compact_revision - 1;
            });
        }
        if response.canceled {
            return None;
        }
        let last =
            response.events.iter().filter_map(|event| event.kv.as_ref()).map(|kv| kv.mod_revision).max();
        with_watched(&shared, id, |watched| {
            watched.events.extend(response.events.into_iter().filter_map(taken));
            watched.reached = watched.reached.max(last.unwrap_or(0));
        });
    }
}

fn taken(event: Event) -> Option<(i64, Change)> {
    let deleted = event.r#type == EventType::Delete as i32;
    let KeyValue { key, value, mod_revision, .. } = event.kv?;
    Some((mod_revision, (text(&key), (!deleted).then(|| text(&value)))))
}

fn with_watched<T>(shared: &Shared, id: usize, body: impl FnOnce(&mut Watched) -> T) -> T {
    body(shared.history().watchers.entry(id).or_default())
}

/// Takes leases, keeps them for a while, and lets them go.
pub(crate) async fn lease(id: usize, seed: u64, shared: Arc<Shared>) {
    let mut client = Client::new(id, seed, &shared);
    let mut taken = 0;
    while !shared.stopping() {
        taken += 1;
        let lease = i64::try_from(id * 1000 + taken).unwrap_or(1);
        let _ = hold(&mut client, lease).await;
        client.move_on().await;
    }
}

async fn hold(client: &mut Client, id: i64) -> Option<()> {
    let shared = Arc::clone(&client.shared);
    let within = Duration::from_secs(4);
    let ttl = client.chance.i64(2..6);
    let mut service = LeaseClient::with_origin(client.connection().await?, origin(client.member));
    let promised = |sent: u64, ttl: i64| sent + u64::try_from(ttl).unwrap_or(0) * 1000;
    let sent = shared.now();
    let granted = timeout(within, service.lease_grant(pb::LeaseGrantRequest { ttl, id })).await.ok()?.ok()?;
    let key = format!("lease/{id}");
    let until = promised(sent, granted.into_inner().ttl);
    shared.history().leases.insert(id, Lease { key: key.clone(), until, revoked: false });
    let mut kv = KvClient::with_origin(client.connection().await?, origin(client.member));
    let put = pb::PutRequest {
        key: Bytes::from(key),
        value: Bytes::from_static(b"held"),
        lease: id,
        ..pb::PutRequest::default()
    };
    timeout(within, kv.put(put)).await.ok()?.ok()?;
    for _ in 0..client.chance.usize(..8) {
        if shared.stopping() {
            break;
        }
        sleep(Duration::from_millis(client.chance.u64(300..2500))).await;
        if client.chance.u8(..4) == 0 {
            client.move_on().await;
        }
        let connection = client.connection().await?;
        let mut service = LeaseClient::with_origin(connection, origin(client.member));
        let sent = shared.now();
        let request = futures::stream::iter([pb::LeaseKeepAliveRequest { id }]);
        let answered = async { service.lease_keep_alive(request).await?.into_inner().message().await };
        let Ok(Ok(Some(answer))) = timeout(within, answered).await else { continue };
        if answer.ttl <= 0 {
            return None;
        }
        if let Some(lease) = shared.history().leases.get_mut(&id) {
            lease.until = lease.until.max(promised(sent, answer.ttl));
        }
    }
    if client.chance.bool() {
        if let Some(lease) = shared.history().leases.get_mut(&id) {
            lease.revoked = true;
        }
        let mut service = LeaseClient::with_origin(client.connection().await?, origin(client.member));
        let _ = timeout(within, service.lease_revoke(pb::LeaseRevokeRequest { id })).await;
    }
    Some(())
}
