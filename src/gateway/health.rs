//! `/health`, `/livez` and `/readyz`. etcd: `server/etcdserver/api/etcdhttp/health.go`

use std::fmt::Write as _;

use http::{Method, Request, Response, StatusCode};
use tonic::body::Body;
use tracing::{debug, error, warn};

use super::{Shared, answer};
use crate::api::stall_text;
use crate::proto::etcdserverpb::AlarmType;

/// What is said of a member that has not come so far.
const STARTING: &str = "etcdserver: not started yet";

/// The name of an alarm's type; its number if it has none, for etcd takes any.
pub(super) fn alarm_name(alarm: i32) -> String {
    AlarmType::try_from(alarm).map_or_else(|_| alarm.to_string(), |alarm| alarm.as_str_name().to_owned())
}

/// A check by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Check {
    SerializableRead,
    LinearizableRead,
    DataCorruption,
    NonLearner,
    /// Ours: shown while it fails.
    LogSync,
}

const LIVEZ: &[Check] = &[Check::SerializableRead];
const READYZ: &[Check] =
    &[Check::DataCorruption, Check::SerializableRead, Check::LinearizableRead, Check::NonLearner];

impl Check {
    fn name(self) -> &'static str {
        match self {
            Check::SerializableRead => "serializable_read",
            Check::LinearizableRead => "linearizable_read",
            Check::DataCorruption => "data_corruption",
            Check::NonLearner => "non_learner",
            Check::LogSync => "log_sync",
        }
    }
}

impl Shared {
    /// `/health`: alarms, then the leader, then a read.
    pub(super) async fn health(&self, request: &Request<()>) -> Response<Body> {
        if request.method() != Method::GET {
            return answer::method_not_allowed();
        }
        let excluded = answer::query_values(request, "exclude");
        let serializable =
            answer::query_values(request, "serializable").first().is_some_and(|value| value == "true");
        match self.unhealthy(&excluded, serializable).await {
            None => {
                self.metrics.http.health_success.inc();
                answer::guessed_text(StatusCode::OK, r#"{"health":"true","reason":""}"#)
            }
            Some(reason) => {
                self.metrics.http.health_failures.inc();
                warn!(reason, "/health error");
                let reason = serde_json::Value::String(reason);
                answer::text(
                    StatusCode::SERVICE_UNAVAILABLE,
                    format!("{{\"health\":\"false\",\"reason\":{reason}}}\n"),
                )
            }
        }
    }

    async fn unhealthy(&self, excluded: &[String], serializable: bool) -> Option<String> {
        let Some(context) = self.context.get() else {
            return Some(if serializable {
                format!("RANGE ERROR:{STARTING}")
            } else {
                "RAFT NO LEADER".to_owned()
            });
        };
        let alarms = context.state.cluster.read().alarms_of_type(AlarmType::None as i32);
        for alarm in alarms {
            let name = alarm_name(alarm.alarm);
            if !excluded.contains(&name) {
                let known = AlarmType::try_from(alarm.alarm).is_ok();
                return Some(format!("ALARM {}", if known { &name } else { "UNKNOWN" }));
            }
        }
        if context.node.withholds() && !excluded.iter().any(|name| name == "CORRUPT") {
            // The alarm is on its way.
            return Some("ALARM CORRUPT".to_owned());
        }
        if !serializable && context.node.status().leader == 0 {
            return Some("RAFT NO LEADER".to_owned());
        }
        let read = context.check_readable(serializable).await;
        read.err().map(|error| format!("RANGE ERROR:{error}"))
    }

    /// `/livez`, `/readyz` and what is below them; `None` for other paths.
    pub(super) async fn checks(&self, request: &Request<()>) -> Option<Response<Body>> {
        let path = request.uri().path();
        let (kind, checks, rest) = match (path.strip_prefix("/livez"), path.strip_prefix("/readyz")) {
            (Some(rest), _) => ("livez", LIVEZ, rest),
            (_, Some(rest)) => ("readyz", READYZ, rest),
            _ => return None,
        };
        let mut chosen: Vec<Check> = match rest.strip_prefix('/') {
            Some(name) => checks.iter().copied().filter(|check| check.name() == name).collect(),
            None if rest.is_empty() => {
                let excluded = answer::query_values(request, "exclude");
                checks
                    .iter()
                    .copied()
                    .filter(|check| !excluded.iter().any(|name| name == check.name()))
                    .collect()
            }
            None => return None,
        };
        let stalled = self.context.get().is_some_and(|context| context.node.log_stall().is_some());
        if kind == "readyz" && rest.is_empty() && stalled {
            chosen.push(Check::LogSync);
        }
        if !rest.is_empty() && chosen.is_empty() {
            return None;
        }
        if request.method() != Method::GET {
            return Some(answer::method_not_allowed());
        }
        Some(self.run_checks(kind, &chosen, !answer::query_values(request, "verbose").is_empty()).await)
    }

    async fn run_checks(&self, kind: &str, checks: &[Check], verbose: bool) -> Response<Body> {
        let mut lines = String::new();
        let mut passed = true;
        for check in checks {
            let name = check.name();
            let result = self.run_check(*check).await;
            self.metrics.http.check.with_label_values(&[kind, name]).set(i64::from(result.is_ok()));
            let status = if result.is_ok() { "success" } else { "error" };
            self.metrics.http.checks.with_label_values(&[kind, name, status]).inc();
            // Writing to a string does not fail.
            let _ = match &result {
                Ok(()) => writeln!(lines, "[+]{name} ok"),
                Err(reason) => writeln!(lines, "[-]{name} failed: {reason}"),
            };
            passed &= result.is_ok();
        }
        if !passed {
            error!(kind, reason = lines, "Health check error");
            return answer::text(StatusCode::SERVICE_UNAVAILABLE, lines + "\n");
        }
        debug!(kind, "Health check OK");
        let shown = if verbose { lines + "ok\n" } else { "ok\n".to_owned() };
        answer::text(StatusCode::OK, shown)
    }

    async fn run_check(&self, check: Check) -> Result<(), String> {
        let context = self.context.get().ok_or(STARTING)?;
        let cluster = || context.state.cluster.read();
        match check {
            Check::SerializableRead => context.check_readable(true).await.map_err(|error| error.to_string()),
            Check::LinearizableRead => context.check_readable(false).await.map_err(|error| error.to_string()),
            Check::DataCorruption if cluster().is_raised(AlarmType::Corrupt) || context.node.withholds() => {
                Err("alarm activated: CORRUPT".to_owned())
            }
            Check::NonLearner if cluster().is_learner(context.member_id.get()) => {
                Err("not supported for learner".to_owned())
            }
            Check::LogSync => context.node.log_stall().map_or(Ok(()), |stalled| Err(stall_text(stalled))),
            Check::DataCorruption | Check::NonLearner => Ok(()),
        }
    }
}
