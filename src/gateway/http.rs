//! Routing of plain HTTP requests.

use std::sync::Arc;

use ::http::{Method, Response, StatusCode, header};
use http_body_util::Full;
use tonic::body::Body;

use crate::api::Context;
use crate::process;

/// The HTTP side of the client port.
#[derive(Clone)]
pub struct Gateway {
    context: Arc<Context>,
}

impl Gateway {
    /// Makes the gateway.
    pub fn new(context: Arc<Context>) -> Gateway {
        Gateway { context }
    }

    /// Answers one request.
    pub async fn call<B>(&self, request: ::http::Request<B>) -> Response<Body> {
        match (request.method(), request.uri().path()) {
            (&Method::GET, "/version") => self.version(),
            (&Method::GET, "/health") => self.health().await,
            _ => text(StatusCode::NOT_FOUND, "404 page not found\n"),
        }
    }

    fn version(&self) -> Response<Body> {
        let cluster = self.context.state.cluster.read();
        let version = cluster.version().unwrap_or("not_decided");
        let body = serde_json::json!({
            "etcdserver": process::ETCD_VERSION,
            "etcdcluster": version,
            "storage": cluster.version().unwrap_or("unknown"),
        });
        let mut response = text(StatusCode::OK, body.to_string());
        let json = header::HeaderValue::from_static("application/json");
        response.headers_mut().insert(header::CONTENT_TYPE, json);
        response
    }

    async fn health(&self) -> Response<Body> {
        match self.context.node.read_barrier().await {
            Ok(()) => text(StatusCode::OK, r#"{"health":"true","reason":""}"#),
            Err(error) => {
                let body = serde_json::json!({"health": "false", "reason": format!("RANGE ERROR:{error}")});
                text(StatusCode::SERVICE_UNAVAILABLE, format!("{body}\n"))
            }
        }
    }
}

fn text(status: StatusCode, body: impl Into<bytes::Bytes>) -> Response<Body> {
    let mut response = Response::new(Body::new(Full::new(body.into())));
    *response.status_mut() = status;
    let plain = header::HeaderValue::from_static("text/plain; charset=utf-8");
    response.headers_mut().insert(header::CONTENT_TYPE, plain);
    response
}
