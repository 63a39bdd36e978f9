//! Calls, under the names of the usual gRPC middleware.

use std::time::Duration;

use parking_lot::RwLock;
use prometheus::{Histogram, HistogramVec, IntCounter, IntCounterVec};

use super::Registrar;

/// Names of the gRPC codes, by number.
const CODES: [&str; 17] = [
    "OK",
    "Canceled",
    "Unknown",
    "InvalidArgument",
    "DeadlineExceeded",
    "NotFound",
    "AlreadyExists",
    "PermissionDenied",
    "ResourceExhausted",
    "FailedPrecondition",
    "Aborted",
    "OutOfRange",
    "Unimplemented",
    "Internal",
    "Unavailable",
    "DataLoss",
    "Unauthenticated",
];
/// Number of the code that stands for every number outside the table.
const UNKNOWN: usize = 2;
/// Client versions told apart; a client chooses what it says, so the rest share a label.
const VERSIONS_MAX: usize = 16;
/// Longer versions share a label, too.
const VERSION_BYTES_MAX: usize = 16;

/// Who streams.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MethodKind {
    /// One message each way.
    Unary,
    /// The server.
    ServerStream,
    /// Both.
    BidiStream,
}

impl MethodKind {
    fn label(self) -> &'static str {
        match self {
            MethodKind::Unary => "unary",
            MethodKind::ServerStream => "server_stream",
            MethodKind::BidiStream => "bidi_stream",
        }
    }
}

/// All calls.
pub struct Grpc {
    started: IntCounterVec,
    handled: IntCounterVec,
    received: IntCounterVec,
    sent: IntCounterVec,
    handling: Option<HistogramVec>,
    received_bytes: IntCounter,
    sent_bytes: IntCounter,
    requests: IntCounterVec,
    versions: RwLock<Vec<Version>>,
}

/// The calls that clients of one version made.
struct Version {
    name: String,
    unary: IntCounter,
    stream: IntCounter,
}

/// The counters of one method.
pub struct MethodCounters {
    /// Calls begun.
    pub started: IntCounter,
    /// Messages received.
    pub received: IntCounter,
    /// Messages sent.
    pub sent: IntCounter,
    /// Bytes of messages received, of all methods together.
    pub received_bytes: IntCounter,
    /// Bytes of messages sent, of all methods together.
    pub sent_bytes: IntCounter,
    handled: [IntCounter; CODES.len()],
    handling: Option<Histogram>,
}

impl Grpc {
    pub(super) fn new(on: &Registrar<'_>, extensive: bool) -> Grpc {
        let method = ["grpc_type", "grpc_service", "grpc_method"];
        let with_code = ["grpc_type", "grpc_service", "grpc_method", "grpc_code"];
        let name = "grpc_server_handling_seconds";
        let buckets = prometheus::DEFAULT_BUCKETS.to_vec();
        Grpc {
            started: on.counters("grpc_server_started_total", "Calls begun.", &method),
            handled: on.counters("grpc_server_handled_total", "Calls ended, by code.", &with_code),
            received: on.counters("grpc_server_msg_received_total", "Messages received.", &method),
            sent: on.counters("grpc_server_msg_sent_total", "Messages sent.", &method),
            handling: extensive
                .then(|| on.histograms(name, "Time from the begin of a call to its end.", &method, buckets)),
            received_bytes: on.counter(
                "etcd_network_client_grpc_received_bytes_total",
                "Bytes of messages received from clients.",
            ),
            sent_bytes: on
                .counter("etcd_network_client_grpc_sent_bytes_total", "Bytes of messages sent to clients."),
            requests: on.counters(
                "etcd_server_client_requests_total",
                "Calls by the API version that the client names.",
                &["type", "client_api_version"],
            ),
            versions: RwLock::default(),
        }
    }

    /// Makes or finds the counters of a method; from then on it is exported.
    pub fn method(&self, kind: MethodKind, service: &str, method: &str) -> MethodCounters {
        let labels = [kind.label(), service, method];
        MethodCounters {
            started: self.started.with_label_values(&labels),
            received: self.received.with_label_values(&labels),
            sent: self.sent.with_label_values(&labels),
            received_bytes: self.received_bytes.clone(),
            sent_bytes: self.sent_bytes.clone(),
            handled: CODES.map(|code| self.handled.with_label_values(&[kind.label(), service, method, code])),
            handling: self.handling.as_ref().map(|handling| handling.with_label_values(&labels)),
        }
    }

    /// Counts a call by the API version that its client names.
    pub fn count_client(&self, kind: MethodKind, version: &str) {
        let count = |known: &Version| match kind {
            MethodKind::Unary => known.unary.inc(),
            MethodKind::ServerStream | MethodKind::BidiStream => known.stream.inc(),
        };
        if let Some(known) = self.versions.read().iter().find(|known| known.name == version) {
            return count(known);
        }
        let mut versions = self.versions.write();
        let distinct = version.len() <= VERSION_BYTES_MAX && versions.len() < VERSIONS_MAX;
        let label = if distinct { version } else { "other" };
        let known = Version {
            name: version.to_owned(),
            unary: self.requests.with_label_values(&["unary", label]),
            stream: self.requests.with_label_values(&["stream", label]),
        };
        count(&known);
        if distinct && versions.iter().all(|other| other.name != version) {
            versions.push(known);
        }
    }
}

impl MethodCounters {
    /// Notes the end of a call.
    pub fn ended(&self, code: usize, took: Duration) {
        self.handled[if code < CODES.len() { code } else { UNKNOWN }].inc();
        if let Some(handling) = &self.handling {
            handling.observe(took.as_secs_f64());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::{MethodKind, VERSIONS_MAX};
    use crate::telemetry::metrics::Metrics;

    #[test]
    fn a_method_is_exported_with_every_code_from_the_start() {
        let metrics = Metrics::new(true);
        let put = metrics.grpc.method(MethodKind::Unary, "etcdserverpb.KV", "Put");
        let series = |code: &str| {
            format!(
                "grpc_server_handled_total{{grpc_code=\"{code}\",grpc_method=\"Put\",grpc_service=\"etcdserverpb.KV\",grpc_type=\"unary\"}} "
            )
        };
        let text = metrics.text();
        assert_eq!(text.lines().filter(|line| line.starts_with("grpc_server_handled_total")).count(), 17);
        assert!(text.contains(&(series("DataLoss") + "0")), "{text}");
        put.ended(15, Duration::from_millis(1));
        put.ended(99, Duration::from_millis(1));
        let text = metrics.text();
        assert!(
            text.contains(&(series("DataLoss") + "1")) && text.contains(&(series("Unknown") + "1")),
            "{text}"
        );
        assert!(text.contains("grpc_server_handling_seconds_count{"), "{text}");
    }

    #[test]
    fn clients_cannot_make_labels_without_end() {
        let metrics = Metrics::new(false);
        for version in 0..1000 {
            metrics.grpc.count_client(MethodKind::Unary, &format!("3.{version}"));
        }
        metrics.grpc.count_client(MethodKind::BidiStream, "3.7 and a long tail of words");
        let text = metrics.text();
        let lines = text.lines().filter(|line| line.starts_with("etcd_server_client_requests_total")).count();
        assert!(lines <= 2 * (VERSIONS_MAX + 1), "{lines}");
        assert!(text.contains("client_api_version=\"3.0\",type=\"unary\"} 1"), "{text}");
        assert!(text.contains("client_api_version=\"other\",type=\"stream\"} 1"), "{text}");
    }
}
