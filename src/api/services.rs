//! All services behind one door: routing, and the checks that hold for every call.

use std::future::Future;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use bytes::Bytes;
use http::HeaderMap;
use tonic::Status;
use tonic::body::Body;
use tonic::codec::CompressionEncoding;
use tower_service::Service;
use tracing::warn;

use super::auth::AuthService;
use super::caller::{Caller, CommonName};
use super::cluster::ClusterService;
use super::counted::{Call, RequestBody, ResponseBody};
use super::election::ElectionService;
use super::error::Error;
use super::health::HealthService;
use super::kv::KvService;
use super::lease::LeaseService;
use super::lock::LockService;
use super::maintenance::MaintenanceService;
use super::methods::{Method, Methods, Rule};
use super::recipe::Recipe;
use super::until::until;
use super::watch::WatchService;
use super::{Context, grpc_go, unary};
use crate::auth::Demand;
use crate::proto::server::auth_server::AuthServer;
use crate::proto::server::cluster_server::ClusterServer;
use crate::proto::server::election_server::ElectionServer;
use crate::proto::server::health_server::HealthServer;
use crate::proto::server::kv_server::KvServer;
use crate::proto::server::lease_server::LeaseServer;
use crate::proto::server::lock_server::LockServer;
use crate::proto::server::maintenance_server::MaintenanceServer;
use crate::proto::server::watch_server::WatchServer;
use crate::raft::Node;
use crate::telemetry::metrics::MethodKind;

/// Room for the frame around the largest request. etcd: `grpcOverheadBytes`.
const RECEIVE_OVERHEAD_BYTES: usize = 512 << 10;

/// A response on its way.
pub type Answer = Pin<Box<dyn Future<Output = http::Response<ResponseBody>> + Send>>;

/// The gRPC side of the client port; cheap to clone.
#[derive(Clone)]
pub struct Services {
    context: Arc<Context>,
    methods: Arc<Methods>,
    receive_max: usize,
    kv: KvServer<KvService>,
    watch: WatchServer<WatchService>,
    lease: LeaseServer<LeaseService>,
    cluster: ClusterServer<ClusterService>,
    maintenance: MaintenanceServer<MaintenanceService>,
    auth: AuthServer<AuthService>,
    health: HealthServer<HealthService>,
    lock: LockServer<LockService>,
    election: ElectionServer<ElectionService>,
}

impl Services {
    /// Makes the services.
    pub fn new(context: Arc<Context>) -> Services {
        let receive_max = context.limits.max_request_bytes + RECEIVE_OVERHEAD_BYTES;
        macro_rules! server {
            ($server:ident, $service:expr) => {
                $server::new($service)
                    .accept_compressed(CompressionEncoding::Gzip)
                    .max_decoding_message_size(receive_max)
                    .max_encoding_message_size(i32::MAX as usize)
            };
        }
        // One: two would give out the same ids.
        let lease = LeaseService::new(Arc::clone(&context));
        let recipe = Recipe::new(KvService(Arc::clone(&context)), lease.clone());
        Services {
            kv: server!(KvServer, KvService(Arc::clone(&context))),
            watch: server!(WatchServer, WatchService(Arc::clone(&context))),
            lease: server!(LeaseServer, lease),
            cluster: server!(ClusterServer, ClusterService(Arc::clone(&context))),
            maintenance: server!(MaintenanceServer, MaintenanceService(Arc::clone(&context))),
            auth: server!(AuthServer, AuthService(Arc::clone(&context))),
            health: server!(HealthServer, HealthService),
            lock: server!(LockServer, LockService(recipe.clone())),
            election: server!(ElectionServer, ElectionService(recipe)),
            methods: Arc::new(Methods::new(&context.metrics.grpc)),
            context,
            receive_max,
        }
    }

    /// Answers one call; `remote` is shown when the call takes long.
    pub fn call<B>(&self, mut request: http::Request<B>, remote: Option<SocketAddr>) -> Answer
    where
        B: http_body::Body<Data = Bytes> + Send + Unpin + 'static,
        B::Error: Into<Box<dyn std::error::Error + Send + Sync>> + Send + 'static,
    {
        let checked = Method::find(request.uri().path()).and_then(|method| {
            self.check(method, request.headers())?;
            Ok(method)
        });
        let method = match checked {
            Ok(method) => method,
            Err(status) => return refused(status.into_http::<Body>().map(ResponseBody::from)),
        };
        let call = Call::start(self.methods.counters(&self.context.metrics.grpc, method));
        let slow = (method.kind() == MethodKind::Unary).then_some(self.context.limits.slow_request);
        let streams = method.kind() != MethodKind::Unary;
        let node = || self.context.node.clone();
        let led = (streams && wants_leader(request.headers())).then(node);
        let served = (method.needs_keys() && (streams || method.waits())).then(node);
        let watched = Watched { call, streams, led, served, slow, remote };
        let caller = Caller::read(request.headers(), request.extensions().get::<CommonName>());
        let judged = self.judged(method.rule(), &caller);
        if method.service() != "etcdserverpb.KV" || method.kind() != MethodKind::Unary {
            request.extensions_mut().insert(caller.clone());
        }
        match method.service() {
            "etcdserverpb.KV" => self.call_kv(request, caller, judged, watched),
            "etcdserverpb.Watch" => answer(self.watch.clone(), request, judged, watched),
            "etcdserverpb.Lease" => answer(self.lease.clone(), request, judged, watched),
            "etcdserverpb.Cluster" => answer(self.cluster.clone(), request, judged, watched),
            "etcdserverpb.Maintenance" => answer(self.maintenance.clone(), request, judged, watched),
            "etcdserverpb.Auth" => answer(self.auth.clone(), request, judged, watched),
            "v3lockpb.Lock" => answer(self.lock.clone(), request, judged, watched),
            "v3electionpb.Election" => answer(self.election.clone(), request, judged, watched),
            _ => answer(self.health.clone(), request, judged, watched),
        }
    }

    /// The KV service: all but the stream takes the short way.
    fn call_kv<B>(
        &self,
        request: http::Request<B>,
        caller: Caller,
        judged: Option<Judged>,
        watched: Watched,
    ) -> Answer
    where
        B: http_body::Body<Data = Bytes> + Send + Unpin + 'static,
        B::Error: Into<Box<dyn std::error::Error + Send + Sync>> + Send + 'static,
    {
        let kv = KvService(Arc::clone(&self.context));
        let max = self.receive_max;
        let (parts, body) = request.into_parts();
        macro_rules! unary {
            ($method:ident) => {
                Box::pin(async move {
                    let body = watched.call.request_body(body);
                    let result = match read_judged(judged, &parts.headers, body, max).await {
                        Ok(message) => kv.$method(message, &caller).await,
                        Err(status) => Err(status),
                    };
                    watched.answered(parts.uri.path(), unary::respond(result))
                })
            };
        }
        match parts.uri.path() {
            "/etcdserverpb.KV/Range" => Box::pin(async move {
                let body = watched.call.request_body(body);
                let response = match unary::read(&parts.headers, body, max).await {
                    Ok(message) => kv.range(message, &caller).await,
                    Err(status) => status.into_http(),
                };
                watched.answered(parts.uri.path(), response)
            }),
            "/etcdserverpb.KV/Put" => unary!(put),
            "/etcdserverpb.KV/Txn" => unary!(txn),
            "/etcdserverpb.KV/DeleteRange" => unary!(delete_range),
            "/etcdserverpb.KV/Compact" => unary!(compact),
            _ => answer(self.kv.clone(), http::Request::from_parts(parts, body), judged, watched),
        }
    }

    /// What is to be asked of a caller before its call is looked at; nothing while authentication is off.
    fn judged(&self, rule: Rule, caller: &Caller) -> Option<Judged> {
        let demand = match rule {
            Rule::Open | Rule::ByRequest => return None,
            Rule::Known => Demand::Known,
            Rule::Root => Demand::Root,
        };
        let enabled = self.context.state.auth.read().is_enabled();
        enabled.then(|| Judged { context: Arc::clone(&self.context), caller: caller.clone(), demand })
    }

    /// Checks that hold for every call: its metadata is sound, its wish for a leader can be met.
    fn check(&self, method: Method, headers: &HeaderMap) -> Result<(), Status> {
        let version = headers.get("client-api-version").map_or(Ok("unknown"), |version| {
            std::str::from_utf8(version.as_bytes()).map_err(|_| Error::InvalidClientApiVersion)
        })?;
        self.context.metrics.grpc.count_client(method.kind(), version);
        if wants_leader(headers) && self.context.node.status().leader == 0 {
            return Err(Error::NoLeader.into());
        }
        let learns = self.context.state.cluster.read().is_learner(self.context.member_id.get());
        if learns && !method.is_served_by_learners() {
            return Err(Error::NotSupportedForLearner.into());
        }
        if method.needs_keys() && self.context.node.withholds() {
            return Err(Error::Corrupt.into());
        }
        Ok(())
    }
}

/// True if the client would rather have an error than a member without a leader.
fn wants_leader(headers: &HeaderMap) -> bool {
    headers.get("hasleader").is_some_and(|value| value == "true")
}

/// A caller that has to be asked who it is.
struct Judged {
    context: Arc<Context>,
    caller: Caller,
    demand: Demand,
}

/// Refuses a caller that may not make a call.
async fn check_judged(judged: Option<Judged>) -> Result<(), Status> {
    let Some(Judged { context, caller, demand }) = judged else { return Ok(()) };
    context.judge(&caller, &demand).await?;
    Ok(())
}

/// Reads the message of a call that may be made.
async fn read_judged<T, B>(
    judged: Option<Judged>,
    headers: &HeaderMap,
    body: B,
    max_bytes: usize,
) -> Result<T, Status>
where
    T: prost::Message + Default,
    B: http_body::Body + Send,
    B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    check_judged(judged).await?;
    unary::read(headers, body, max_bytes).await
}

/// A call under way, and when it counts as slow.
struct Watched {
    call: Call,
    /// More than one message may go one way or the other.
    streams: bool,
    /// It ends when there is no leader.
    led: Option<Node>,
    /// It ends when this member no longer serves keys.
    served: Option<Node>,
    slow: Option<Duration>,
    remote: Option<SocketAddr>,
}

impl Watched {
    /// Sends a response on its way.
    fn answered(self, path: &str, response: http::Response<Body>) -> http::Response<ResponseBody> {
        self.warn_if_slow(path);
        let response = match (self.led, self.served) {
            (None, None) => response,
            (led, served) => until(response, why_ended(led, served)),
        };
        self.call.response(response)
    }

    /// Says that a call took long, and nothing of what was asked.
    fn warn_if_slow(&self, path: &str) {
        let Some(limit) = self.slow else { return };
        let took = self.call.age();
        if took > limit {
            let remote = self.remote.map(|remote| remote.to_string()).unwrap_or_default();
            warn!("time spent" = ?took, remote, "response type" = path, "expected-duration" = ?limit, "request stats");
        }
    }
}

/// Waits until a call has to end: one that is only made while there is a leader, or while keys are served here.
async fn why_ended(led: Option<Node>, served: Option<Node>) -> Error {
    let lost = async {
        match &led {
            Some(node) => node.leader_lost().await,
            None => std::future::pending().await,
        }
    };
    let withheld = async {
        match &served {
            Some(node) => node.withheld().await,
            None => std::future::pending().await,
        }
    };
    tokio::select! {
        biased;
        () = withheld => Error::Corrupt,
        () = lost => Error::NoLeader,
    }
}

fn refused(response: http::Response<ResponseBody>) -> Answer {
    Box::pin(std::future::ready(response))
}

fn answer<S, B>(mut server: S, request: http::Request<B>, judged: Option<Judged>, watched: Watched) -> Answer
where
    S: Service<
            http::Request<RequestBody<B>>,
            Response = http::Response<Body>,
            Error = std::convert::Infallible,
        >,
    S::Future: Send + 'static,
{
    // The generated servers are always ready.
    debug_assert!(matches!(
        server.poll_ready(&mut std::task::Context::from_waker(std::task::Waker::noop())),
        Poll::Ready(Ok(()))
    ));
    let uri = request.uri().clone();
    let response = server.call(request.map(|body| watched.call.request_body(body)));
    Box::pin(async move {
        if let Err(status) = check_judged(judged).await {
            return watched.answered(uri.path(), status.into_http());
        }
        let response = match &watched.served {
            None => response.await,
            Some(node) => tokio::select! {
                response = response => response,
                error = why_ended(None, Some(node.clone())) => Ok(Status::from(error).into_http()),
            },
        };
        let Ok(response) = response;
        let reworded = grpc_go::reword(response.headers(), watched.streams);
        let response = reworded.map_or(response, |status| status.into_http());
        watched.answered(uri.path(), response)
    })
}
