//! Requests to a gateway whose member has not come up, and to the ports it tells apart.

use std::sync::Arc;

use http::header::{ACCESS_CONTROL_ALLOW_ORIGIN, ALLOW, CONTENT_TYPE};
use http::{Request, Response, StatusCode};
use http_body_util::BodyExt as _;
use tonic::body::Body;

use super::{Gateway, Port};
use crate::config::{self, Config};
use crate::telemetry::metrics::Metrics;

fn gateway(flags: &[&str]) -> Gateway {
    Gateway::new(&settings(flags), Arc::new(Metrics::new(false)))
}

fn settings(flags: &[&str]) -> Config {
    match config::load(flags.iter().map(Into::into), []) {
        Ok(config::Request::Run(config)) => *config,
        other => panic!("{other:?}"),
    }
}

async fn ask(gateway: &Gateway, port: Port, method: &str, path: &str) -> (Response<()>, String) {
    let request = Request::builder().method(method).uri(path).header("host", "h.test:1").body(()).unwrap();
    let (parts, body) = gateway.call(request, port).await.into_parts();
    let body: Body = body;
    let text = String::from_utf8(body.collect().await.unwrap().to_bytes().to_vec()).unwrap();
    (Response::from_parts(parts, ()), text)
}

/// Status and body.
async fn get(gateway: &Gateway, port: Port, path: &str) -> (u16, String) {
    let (response, text) = ask(gateway, port, "GET", path).await;
    (response.status().as_u16(), text)
}

#[tokio::test]
async fn a_member_that_starts_is_not_healthy_and_has_metrics() {
    let gateway = gateway(&[]);
    let expect = |status: u16, text: &str| (status, text.to_owned());
    for port in [Port::Metrics, Port::Client] {
        assert_eq!(
            get(&gateway, port, "/health").await,
            expect(503, "{\"health\":\"false\",\"reason\":\"RAFT NO LEADER\"}\n")
        );
        assert_eq!(
            get(&gateway, port, "/livez").await,
            expect(503, "[-]serializable_read failed: etcdserver: not started yet\n\n")
        );
        let (status, text) = get(&gateway, port, "/metrics").await;
        assert_eq!(status, 200);
        assert!(text.contains("\netcd_server_has_leader 0\n"), "{text}");
    }
    let (_, text) = get(&gateway, Port::Metrics, "/metrics").await;
    for line in [
        "etcd_server_health_failures 2",
        "etcd_server_healthcheck{name=\"serializable_read\",type=\"livez\"} 0",
        "etcd_server_healthchecks_total{name=\"serializable_read\",status=\"error\",type=\"livez\"} 2",
        "etcd_server_feature_enabled{name=\"FastLeaseKeepAlive\",stage=\"BETA\"} 1",
        "etcd_server_feature_enabled{name=\"AllAlpha\",stage=\"ALPHA\"} 0",
        "promhttp_metric_handler_requests_total{code=\"200\"} 2",
        "promhttp_metric_handler_requests_in_flight 1",
        "etcd_server_version{server_version=\"3.7.3\"} 1",
    ] {
        assert!(text.contains(&format!("\n{line}\n")), "{line} in {text}");
    }
}

#[tokio::test]
async fn the_metrics_port_serves_nothing_else() {
    let gateway = gateway(&["--host-whitelist=elsewhere.test"]);
    for path in ["/version", "/debug/vars", "/v3/kv/range", "/"] {
        assert_eq!(
            get(&gateway, Port::Metrics, path).await,
            (404, "404 page not found\n".to_owned()),
            "{path}"
        );
    }
    let (response, _) = ask(&gateway, Port::Metrics, "OPTIONS", "/health").await;
    assert_eq!(response.status(), StatusCode::METHOD_NOT_ALLOWED, "no access control");
    assert_eq!(get(&gateway, Port::Client, "/version").await.0, 421, "but on the client port there is");
}

#[tokio::test]
async fn other_methods_than_get_are_told_so() {
    let gateway = gateway(&[]);
    for path in
        ["/health", "/version", "/livez", "/livez/serializable_read", "/readyz/non_learner", "/debug/vars"]
    {
        for method in ["POST", "PUT", "DELETE", "HEAD"] {
            let (response, text) = ask(&gateway, Port::Client, method, path).await;
            assert_eq!(response.status(), StatusCode::METHOD_NOT_ALLOWED, "{method} {path}");
            assert_eq!(
                (&response.headers()[ALLOW], &text[..]),
                (&"GET".parse().unwrap(), "Method Not Allowed\n")
            );
        }
    }
    assert_eq!(ask(&gateway, Port::Client, "POST", "/metrics").await.0.status(), StatusCode::OK);
    assert_eq!(ask(&gateway, Port::Client, "POST", "/nothing").await.0.status(), StatusCode::NOT_FOUND);
}

#[tokio::test]
async fn what_is_not_there_is_not_found() {
    let gateway = gateway(&[]);
    for path in [
        "/",
        "/livez/",
        "/livez/data_corruption",
        "/livezx",
        "/readyz/nothing",
        "/health/",
        "/version/",
        "/v3/kv/range",
        "/v3beta/kv/range",
        "/v2/keys",
        "/debug/pprof/",
        "/debug/requests",
    ] {
        assert_eq!(
            get(&gateway, Port::Client, path).await,
            (404, "404 page not found\n".to_owned()),
            "{path}"
        );
    }
}

#[tokio::test]
async fn options_are_answered_before_any_path_with_the_origin() {
    let (response, text) = ask(&gateway(&[]), Port::Client, "OPTIONS", "/nothing").await;
    assert_eq!((response.status(), &text[..]), (StatusCode::OK, ""));
    assert_eq!(response.headers()[ACCESS_CONTROL_ALLOW_ORIGIN], "*");
    assert!(!response.headers().contains_key(CONTENT_TYPE));
    let strict = gateway(&["--host-whitelist=elsewhere.test"]);
    let (response, text) = ask(&strict, Port::Client, "OPTIONS", "/nothing").await;
    assert_eq!(response.status(), StatusCode::MISDIRECTED_REQUEST);
    assert!(text.contains("\"h.test\"") && text.contains("--host-whitelist"), "{text}");
    assert!(!response.headers().contains_key(ACCESS_CONTROL_ALLOW_ORIGIN));
}

#[tokio::test]
async fn profiles_are_answered_honestly_when_asked_for() {
    for flag in ["--enable-pprof", "--log-level=debug"] {
        let (status, text) = get(&gateway(&[flag]), Port::Client, "/debug/pprof/heap").await;
        assert_eq!(status, 501, "{flag}");
        assert!(text.contains("no Go profiles"), "{text}");
    }
}

#[tokio::test]
async fn variables_are_json() {
    let (status, text) = get(&gateway(&[]), Port::Client, "/debug/vars").await;
    let variables: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!(status, 200);
    assert!(variables["cmdline"][0].is_string() && variables["memstats"]["memtable_bytes"] == 0, "{text}");
}

#[tokio::test]
async fn the_version_is_etcds_and_undecided_at_first() {
    let (response, text) = ask(&gateway(&[]), Port::Client, "GET", "/version?x=y").await;
    assert_eq!(response.headers()[CONTENT_TYPE], "application/json");
    assert_eq!(text, r#"{"etcdserver":"3.7.3","etcdcluster":"not_decided","storage":"unknown"}"#);
}
