//! Plain HTTP: health, version, metrics. The JSON gateway comes later.
//!
//! ```text
//! client port ──> access: host named? ─> CORS headers ─> OPTIONS? ─┐
//! metrics port ───────────────────────────────────────────────────> clean path? ─> route ─> health, metrics
//!                                                                                     └──> version, debug (client port only)
//! ```
//!
//! A gateway can answer before the member has joined its cluster, for the metrics port opens first: until then there is no
//! [`Context`] and every health check fails. It changes nothing, and proposes nothing. etcd: `server/embed/serve.go`,
//! `server/etcdserver/api/etcdhttp`

mod access;
mod answer;
mod clean_path;
mod debug;
mod health;
mod negotiate;
mod scrape;

use std::sync::{Arc, OnceLock};

use http::{Method, Request, Response, StatusCode};
use tonic::body::Body;

use crate::api::Context;
use crate::config::{Config, FeatureGates, LogLevel};
use crate::process;
use crate::telemetry::metrics::Metrics;
use access::Access;

/// Which port a request came by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Port {
    /// One for clients.
    Client,
    /// One for metrics and health checks alone.
    Metrics,
    /// One for other members.
    Peer,
}

/// The HTTP side of a member; clones share it.
#[derive(Clone)]
pub struct Gateway {
    shared: Arc<Shared>,
}

struct Shared {
    metrics: Arc<Metrics>,
    context: OnceLock<Arc<Context>>,
    access: Access,
    profiles_asked_for: bool,
    features: FeatureGates,
}

impl Gateway {
    /// Makes the gateway of a member that is still starting.
    pub fn new(config: &Config, metrics: Arc<Metrics>) -> Gateway {
        let member = &config.member;
        let shared = Shared {
            metrics,
            context: OnceLock::new(),
            access: Access::new(&member.host_whitelist, &member.cors),
            profiles_asked_for: member.enable_pprof || config.log.level == LogLevel::Debug,
            features: member.feature_gates.clone(),
        };
        Gateway { shared: Arc::new(shared) }
    }

    /// Gives it what to answer from, once.
    pub fn attach(&self, context: Arc<Context>) {
        // A second one would be a mistake of the caller's, and the first one is as good.
        let _ = self.shared.context.set(context);
    }

    /// Answers one request.
    pub async fn call<B>(&self, request: Request<B>, port: Port) -> Response<Body> {
        let (request, _) = request.into_parts();
        let request = Request::from_parts(request, ());
        if clean_path::is_malformed(request.uri().path()) {
            return clean_path::bad_request();
        }
        if port != Port::Client {
            return self.route(&request, port).await;
        }
        let allowed = match self.shared.access.check(&request) {
            Ok(allowed) => allowed,
            Err(refusal) => return *refusal,
        };
        let mut response = if request.method() == Method::OPTIONS {
            Response::new(Body::empty())
        } else {
            self.route(&request, port).await
        };
        allowed.put_on(response.headers_mut());
        response
    }

    async fn route(&self, request: &Request<()>, port: Port) -> Response<Body> {
        let shared = &*self.shared;
        let path = request.uri().path();
        if let Some(redirect) = clean_path::check(request) {
            return redirect;
        }
        if port == Port::Peer {
            return match path {
                "/version" => answer::get_only(request, || shared.version()),
                _ => answer::not_found(),
            };
        }
        match path {
            "/metrics" => return shared.metrics_text(request.headers()),
            "/health" => return shared.health(request).await,
            _ => {}
        }
        if let Some(checked) = shared.checks(request).await {
            return checked;
        }
        match path {
            _ if port == Port::Metrics => answer::not_found(),
            "/version" => answer::get_only(request, || shared.version()),
            "/debug/vars" => answer::get_only(request, || shared.variables()),
            "/debug/pprof" if shared.profiles_asked_for => clean_path::redirect(request, "/debug/pprof/"),
            _ if path.starts_with("/debug/pprof/") && shared.profiles_asked_for => debug::no_profiles(),
            _ => answer::not_found(),
        }
    }
}

impl Shared {
    fn version(&self) -> Response<Body> {
        let cluster =
            self.context.get().and_then(|context| context.state.cluster.read().version().map(str::to_owned));
        // Written out, for etcd's order is not the alphabet's.
        let body = format!(
            r#"{{"etcdserver":"{}","etcdcluster":"{}","storage":"{}"}}"#,
            process::ETCD_VERSION,
            cluster.as_deref().unwrap_or("not_decided"),
            cluster.as_deref().unwrap_or("unknown"),
        );
        answer::with_type(StatusCode::OK, "application/json", body)
    }
}

#[cfg(test)]
mod tests;
