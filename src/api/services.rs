//! All services behind one door: routing, the checks that hold for every call, and errors below the services in the
//! words that grpc-go uses, which clients and tests of etcd know.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::Poll;

use http::HeaderMap;
use tonic::body::Body;
use tonic::codec::CompressionEncoding;
use tonic::{Code, Status};
use tower_service::Service;

use super::cluster::ClusterService;
use super::error::Error;
use super::health::HealthService;
use super::kv::KvService;
use super::lease::LeaseService;
use super::maintenance::MaintenanceService;
use super::watch::WatchService;
use super::{Context, later, unary};
use crate::proto::server::cluster_server::ClusterServer;
use crate::proto::server::health_server::HealthServer;
use crate::proto::server::kv_server::{Kv, KvServer};
use crate::proto::server::lease_server::LeaseServer;
use crate::proto::server::maintenance_server::MaintenanceServer;
use crate::proto::server::watch_server::WatchServer;

/// Room for the frame around the largest request. etcd: `grpcOverheadBytes`.
const RECEIVE_OVERHEAD_BYTES: usize = 512 << 10;

/// A response on its way.
pub(super) type Answer = Pin<Box<dyn Future<Output = http::Response<Body>> + Send>>;

/// The gRPC side of the client port; cheap to clone.
#[derive(Clone)]
pub struct Services {
    context: Arc<Context>,
    receive_max: usize,
    kv: KvServer<KvService>,
    watch: WatchServer<WatchService>,
    lease: LeaseServer<LeaseService>,
    cluster: ClusterServer<ClusterService>,
    maintenance: MaintenanceServer<MaintenanceService>,
    health: HealthServer<HealthService>,
}

/// The methods of a service that is served.
const SERVED: &[(&str, &[&str])] = &[
    ("etcdserverpb.KV", &["Range", "RangeStream", "Put", "DeleteRange", "Txn", "Compact"]),
    ("etcdserverpb.Watch", &["Watch"]),
    (
        "etcdserverpb.Lease",
        &["LeaseGrant", "LeaseRevoke", "LeaseKeepAlive", "LeaseTimeToLive", "LeaseLeases"],
    ),
    ("etcdserverpb.Cluster", &["MemberAdd", "MemberRemove", "MemberUpdate", "MemberList", "MemberPromote"]),
    (
        "etcdserverpb.Maintenance",
        &["Alarm", "Status", "Defragment", "Hash", "HashKV", "Snapshot", "MoveLeader", "Downgrade"],
    ),
    ("grpc.health.v1.Health", &["Check", "List", "Watch"]),
];

/// The methods of services that come later.
const LATER: &[(&str, &[&str])] = &[
    (
        "etcdserverpb.Auth",
        &[
            "AuthEnable",
            "AuthDisable",
            "AuthStatus",
            "Authenticate",
            "UserAdd",
            "UserGet",
            "UserList",
            "UserDelete",
            "UserChangePassword",
            "UserGrantRole",
            "UserRevokeRole",
            "RoleAdd",
            "RoleGet",
            "RoleList",
            "RoleDelete",
            "RoleGrantPermission",
            "RoleRevokePermission",
        ],
    ),
    ("v3lockpb.Lock", &["Lock", "Unlock"]),
    ("v3electionpb.Election", &["Campaign", "Proclaim", "Leader", "Observe", "Resign"]),
];

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
        Services {
            kv: server!(KvServer, KvService(Arc::clone(&context))),
            watch: server!(WatchServer, WatchService(Arc::clone(&context))),
            lease: server!(LeaseServer, LeaseService::new(Arc::clone(&context))),
            cluster: server!(ClusterServer, ClusterService(Arc::clone(&context))),
            maintenance: server!(MaintenanceServer, MaintenanceService(Arc::clone(&context))),
            health: server!(HealthServer, HealthService),
            context,
            receive_max,
        }
    }

    /// Answers one call.
    pub fn call<B>(
        &self,
        request: http::Request<B>,
    ) -> Pin<Box<dyn Future<Output = http::Response<Body>> + Send>>
    where
        B: http_body::Body + Send + 'static,
        B::Error: Into<Box<dyn std::error::Error + Send + Sync>> + Send + 'static,
        B::Data: Send,
    {
        if let Err(status) = self.check(&request) {
            return Box::pin(std::future::ready(status.into_http()));
        }
        let service = request.uri().path().trim_start_matches('/').split('/').next().unwrap_or_default();
        match service {
            "etcdserverpb.KV" => self.call_kv(request),
            "etcdserverpb.Watch" => answer(self.watch.clone(), request),
            "etcdserverpb.Lease" => answer(self.lease.clone(), request),
            "etcdserverpb.Cluster" => answer(self.cluster.clone(), request),
            "etcdserverpb.Maintenance" => answer(self.maintenance.clone(), request),
            _ => answer(self.health.clone(), request),
        }
    }

    /// The KV service: all but the stream takes the short way.
    fn call_kv<B>(&self, request: http::Request<B>) -> Answer
    where
        B: http_body::Body + Send + 'static,
        B::Error: Into<Box<dyn std::error::Error + Send + Sync>> + Send + 'static,
        B::Data: Send,
    {
        let kv = KvService(Arc::clone(&self.context));
        let max = self.receive_max;
        let (parts, body) = request.into_parts();
        macro_rules! unary {
            ($method:ident) => {
                Box::pin(async move {
                    let result = match unary::read(&parts.headers, body, max).await {
                        Ok(message) => kv.$method(tonic::Request::new(message)).await,
                        Err(status) => Err(status),
                    };
                    unary::respond(result.map(tonic::Response::into_inner))
                })
            };
        }
        match parts.uri.path() {
            "/etcdserverpb.KV/Range" => Box::pin(async move {
                match unary::read(&parts.headers, body, max).await {
                    Ok(message) => kv.answer_range(message).await,
                    Err(status) => status.into_http(),
                }
            }),
            "/etcdserverpb.KV/Put" => unary!(put),
            "/etcdserverpb.KV/Txn" => unary!(txn),
            "/etcdserverpb.KV/DeleteRange" => unary!(delete_range),
            "/etcdserverpb.KV/Compact" => unary!(compact),
            _ => answer(self.kv.clone(), http::Request::from_parts(parts, body)),
        }
    }

    /// Checks that hold for every call: it exists, its metadata is sound, its wish for a leader can be met.
    fn check<B>(&self, request: &http::Request<B>) -> Result<(), Status> {
        check_path(request.uri().path())?;
        let headers = request.headers();
        if headers
            .get("client-api-version")
            .is_some_and(|version| std::str::from_utf8(version.as_bytes()).is_err())
        {
            return Err(Error::InvalidClientApiVersion.into());
        }
        let wants_leader = headers.get("hasleader").is_some_and(|value| value == "true");
        if wants_leader && self.context.node.status().leader == 0 {
            return Err(Error::NoLeader.into());
        }
        Ok(())
    }
}

fn check_path(path: &str) -> Result<(), Status> {
    let Some((service, method)) = path.strip_prefix('/').and_then(|path| path.rsplit_once('/')) else {
        return Err(Status::unimplemented(format!("malformed method name: {path:?}")));
    };
    let find = |table: &'static [(&str, &[&str])]| table.iter().find(|(name, _)| *name == service);
    match (find(SERVED), find(LATER)) {
        (Some((_, methods)), _) if methods.contains(&method) => Ok(()),
        (_, Some((_, methods))) if methods.contains(&method) => {
            Err(later::not_yet(&format!("{service}/{method}")))
        }
        (None, None) => Err(Status::unimplemented(format!("unknown service {service}"))),
        _ => Err(Status::unimplemented(format!("unknown method {method} for service {service}"))),
    }
}

fn answer<S, B>(mut server: S, request: http::Request<B>) -> Answer
where
    S: Service<http::Request<B>, Response = http::Response<Body>, Error = std::convert::Infallible>,
    S::Future: Send + 'static,
{
    // The generated servers are always ready.
    debug_assert!(matches!(
        server.poll_ready(&mut std::task::Context::from_waker(std::task::Waker::noop())),
        Poll::Ready(Ok(()))
    ));
    let response = server.call(request);
    Box::pin(async move {
        let Ok(response) = response.await;
        reword(response)
    })
}

/// Gives errors of the gRPC layer itself the code and text that grpc-go gives them.
fn reword(response: http::Response<Body>) -> http::Response<Body> {
    match grpc_go_status(response.headers()) {
        Some(status) => status.into_http(),
        None => response,
    }
}

fn grpc_go_status(headers: &HeaderMap) -> Option<Status> {
    let status = Status::from_header_map(headers)?;
    let text = status.message();
    match status.code() {
        Code::OutOfRange => {
            let rest = text.strip_prefix("Error, decoded message length too large: found ")?;
            let (found, rest) = rest.split_once(" bytes, the limit is: ")?;
            let limit = rest.strip_suffix(" bytes")?;
            let text = format!("grpc: received message larger than max ({found} vs. {limit})");
            Some(Status::resource_exhausted(text))
        }
        Code::Internal => {
            let rest = text.strip_prefix("failed to decode Protobuf message: ")?;
            Some(Status::internal(format!("grpc: error unmarshalling request: {rest}")))
        }
        Code::Unimplemented => {
            let (_, rest) = text.split_once("Content is compressed with `")?;
            let (encoding, _) = rest.split_once('`')?;
            let text = format!("grpc: Decompressor is not installed for grpc-encoding \"{encoding}\"");
            Some(Status::unimplemented(text))
        }
        _ => None,
    }
}
