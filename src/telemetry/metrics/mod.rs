//! Metrics: what this process counts, under etcd's names where etcd has one.
//!
//! ```text
//! hot paths ── add to a counter they hold ──┐
//! scrape ── sets gauges from handles ───────┼─> registry ─> text
//! the kernel's view of the process ─────────┘
//! ```
//!
//! There is one [`Metrics`] per process, handed down; nothing here is global, so tests have their own. A hot path resolves
//! its counters once and then only adds: no look-up, no allocation. Sizes and positions are not pushed but read when
//! someone asks ([`Standing`]). Labels hold names of methods, codes and members; never a key, a value or a user.

mod grpc;
mod operation;
mod peers;
mod process;
mod standing;

use std::time::Duration;

use prometheus::core::Collector;
use prometheus::process_collector::ProcessCollector;
pub use prometheus::{Histogram, IntCounter};
use prometheus::{
    HistogramOpts, HistogramVec, IntCounterVec, IntGauge, IntGaugeVec, Opts, Registry, TextEncoder,
};

pub use grpc::{Grpc, MethodCounters, MethodKind};
pub use operation::{ByOperation, Operation};
pub use peers::{PeerCounters, Peers, Transfer, Transfers};
pub use standing::{Standing, raise};

/// Everything that is counted as it happens. See the module.
pub struct Metrics {
    registry: Registry,
    /// Calls.
    pub grpc: Grpc,
    /// Proposals and reads.
    pub server: Server,
    /// The log and the store below.
    pub disk: Disk,
    /// Hashes and compactions.
    pub mvcc: Mvcc,
    /// Leases.
    pub lease: Lease,
    /// Plain HTTP requests.
    pub http: Http,
    /// What is exchanged with each peer.
    pub peers: Peers,
    /// What is read when someone asks.
    pub standing: Standing,
}

/// Proposals and reads.
pub struct Server {
    /// Time to apply a command, without the write of the run's batch.
    pub apply_duration: ByOperation,
    /// Time from a checked request to its answer.
    pub request_duration: ByOperation,
    /// Time to serve ranges that worked, from local state.
    pub range_ok: Histogram,
    /// Time to serve ranges that failed, from local state.
    pub range_failed: Histogram,
    /// Commands and reads slower than the warning limit.
    pub slow_apply: IntCounter,
    /// Leases that ran out.
    pub lease_expired: IntCounter,
    /// Learners promoted through this member.
    pub promotions: IntCounter,
    /// Promotions asked of this member and refused, by the refusal.
    pub failed_promotions: IntCounterVec,
    /// 1 while a peer's snapshot is put in place.
    pub snapshot_installs: IntGauge,
}

/// The log and the store below.
pub struct Disk {
    /// Syncs of the log.
    pub wal_fsync: Histogram,
    /// Writes to the log.
    pub wal_write: Histogram,
    /// Bytes written to the log.
    pub wal_write_bytes: IntGauge,
    /// Writes of a run's batch to the store.
    pub backend_commit: Histogram,
    /// Rewrites of the store.
    pub defrag: Histogram,
    /// 1 while a rewrite runs.
    pub defrag_inflight: IntGauge,
}

/// Hashes and compactions.
pub struct Mvcc {
    /// Hashes of everything.
    pub hash: Histogram,
    /// Hashes up to a revision.
    pub hash_rev: Histogram,
    /// Second halves of compactions, in milliseconds.
    pub compaction_millis: Histogram,
    /// When the last compaction ended, in seconds since 1970.
    pub compaction_last: IntGauge,
}

/// Leases.
pub struct Lease {
    /// Granted.
    pub granted: IntCounter,
    /// Revoked, expiries included.
    pub revoked: IntCounter,
    /// Renewed.
    pub renewed: IntCounter,
    /// Times to live as granted, in seconds.
    pub ttl: Histogram,
}

/// Plain HTTP requests.
pub struct Http {
    /// `/health` that said yes.
    pub health_success: IntCounter,
    /// `/health` that said no.
    pub health_failures: IntCounter,
    /// Last result of each check, by type and name.
    pub check: IntGaugeVec,
    /// Results of each check, by type, name and status.
    pub checks: IntCounterVec,
    /// Scrapes answered.
    pub scrapes: IntCounter,
    /// Scrapes under way.
    pub scrapes_in_flight: IntGauge,
}

impl Metrics {
    /// Makes all metrics; `extensive` adds a latency histogram per method.
    pub fn new(extensive: bool) -> Metrics {
        let registry = Registry::new();
        let on = Registrar(&registry);
        on.register(ProcessCollector::for_self());
        on.register(process::ProcessFiles::new());
        Metrics {
            grpc: Grpc::new(&on, extensive),
            server: Server::new(&on),
            disk: Disk::new(&on),
            mvcc: Mvcc::new(&on),
            lease: Lease::new(&on),
            http: Http::new(&on),
            peers: Peers::new(&on),
            standing: Standing::new(&on),
            registry,
        }
    }

    /// Everything in Prometheus' text format.
    pub fn text(&self) -> String {
        let mut text = String::new();
        // Only a metric without a name or of a kind that is not made here fails.
        if let Err(error) = TextEncoder::new().encode_utf8(&self.registry.gather(), &mut text) {
            tracing::warn!(%error, "metrics not encoded");
        }
        text
    }
}

impl Server {
    fn new(on: &Registrar<'_>) -> Server {
        let range = on.histograms(
            "etcd_server_range_duration_seconds",
            "Time to serve a range from local state.",
            &["success"],
            doubling(0.0001, 20),
        );
        let apply = on.histograms(
            "etcd_server_apply_duration_seconds",
            "Time to apply a committed command.",
            &["version", "op", "success"],
            doubling(0.0001, 20),
        );
        let request = on.histograms(
            "etcd_server_request_duration_seconds",
            "Time from a checked request to its answer.",
            &["type", "success"],
            doubling(0.001, 14),
        );
        Server {
            apply_duration: ByOperation::new(apply, &["v3"]),
            request_duration: ByOperation::new(request, &[]),
            range_ok: range.with_label_values(&["true"]),
            range_failed: range.with_label_values(&["false"]),
            slow_apply: on.counter(
                "etcd_server_slow_apply_total",
                "Commands and reads slower than --warning-apply-duration.",
            ),
            lease_expired: on.counter("etcd_debugging_server_lease_expired_total", "Leases that ran out."),
            promotions: on.counter("etcd_server_learner_promote_successes", "Learners promoted."),
            failed_promotions: on.counters(
                "etcd_server_learner_promote_failures",
                "Promotions of learners that were refused.",
                &["Reason"],
            ),
            snapshot_installs: on.gauge(
                "etcd_server_snapshot_apply_in_progress_total",
                "1 while a peer's snapshot is put in place.",
            ),
        }
    }

    /// Notes a range served from local state.
    pub fn range_served(&self, took: Duration, success: bool) {
        let histogram = if success { &self.range_ok } else { &self.range_failed };
        histogram.observe(took.as_secs_f64());
    }
}

impl Disk {
    fn new(on: &Registrar<'_>) -> Disk {
        Disk {
            wal_fsync: on.histogram(
                "etcd_disk_wal_fsync_duration_seconds",
                "Time of a sync of the log.",
                doubling(0.001, 14),
            ),
            wal_write: on.histogram(
                "etcd_disk_wal_write_duration_seconds",
                "Time of a write to the log.",
                doubling(0.001, 14),
            ),
            wal_write_bytes: on.gauge("etcd_disk_wal_write_bytes_total", "Bytes written to the log."),
            backend_commit: on.histogram(
                "etcd_disk_backend_commit_duration_seconds",
                "Time to write the batch of a run of commands to the store.",
                doubling(0.001, 14),
            ),
            defrag: on.histogram(
                "etcd_disk_backend_defrag_duration_seconds",
                "Time to rewrite the store.",
                doubling(0.1, 13),
            ),
            defrag_inflight: on.gauge("etcd_disk_defrag_inflight", "1 while the store is rewritten."),
        }
    }
}

impl Mvcc {
    fn new(on: &Registrar<'_>) -> Mvcc {
        Mvcc {
            hash: on.histogram(
                "etcd_mvcc_hash_duration_seconds",
                "Time to hash everything.",
                doubling(0.01, 15),
            ),
            hash_rev: on.histogram(
                "etcd_mvcc_hash_rev_duration_seconds",
                "Time to hash up to a revision.",
                doubling(0.01, 15),
            ),
            compaction_millis: on.histogram(
                "etcd_debugging_mvcc_db_compaction_total_duration_milliseconds",
                "Time of the second half of a compaction.",
                doubling(100.0, 14),
            ),
            compaction_last: on.gauge(
                "etcd_debugging_mvcc_db_compaction_last",
                "When the last compaction ended, in seconds since 1970.",
            ),
        }
    }
}

impl Lease {
    fn new(on: &Registrar<'_>) -> Lease {
        Lease {
            granted: on.counter("etcd_debugging_lease_granted_total", "Leases granted."),
            revoked: on.counter("etcd_debugging_lease_revoked_total", "Leases revoked."),
            renewed: on.counter("etcd_debugging_lease_renewed_total", "Leases renewed."),
            ttl: on.histogram(
                "etcd_debugging_lease_ttl_total",
                "Times to live of granted leases, in seconds.",
                doubling(1.0, 24),
            ),
        }
    }
}

impl Http {
    fn new(on: &Registrar<'_>) -> Http {
        let scrapes =
            on.counters("promhttp_metric_handler_requests_total", "Scrapes by HTTP status.", &["code"]);
        // The other two never happen here; they exist so that a rate over them is 0 and not absent.
        for code in ["500", "503"] {
            scrapes.with_label_values(&[code]);
        }
        Http {
            health_success: on.counter("etcd_server_health_success", "Health checks that succeeded."),
            health_failures: on.counter("etcd_server_health_failures", "Health checks that failed."),
            check: on.gauges("etcd_server_healthcheck", "Last result of each check.", &["type", "name"]),
            checks: on.counters(
                "etcd_server_healthchecks_total",
                "Results of each check.",
                &["type", "name", "status"],
            ),
            scrapes: scrapes.with_label_values(&["200"]),
            scrapes_in_flight: on.gauge("promhttp_metric_handler_requests_in_flight", "Scrapes under way."),
        }
    }
}

/// Bucket bounds that double, as all of etcd's do.
fn doubling(first: f64, count: usize) -> Vec<f64> {
    std::iter::successors(Some(first), |bound| Some(bound * 2.0)).take(count).collect()
}

/// Makes metrics and registers them.
struct Registrar<'r>(&'r Registry);

impl Registrar<'_> {
    fn register(&self, metric: impl Collector + 'static) {
        self.0.register(Box::new(metric)).expect("each metric has a name of its own");
    }

    fn made<C: Collector + Clone + 'static>(&self, metric: prometheus::Result<C>) -> C {
        let metric = metric.expect("names, labels and buckets are constants that Prometheus allows");
        self.register(metric.clone());
        metric
    }

    fn counter(&self, name: &str, help: &str) -> IntCounter {
        self.made(IntCounter::new(name, help))
    }

    fn gauge(&self, name: &str, help: &str) -> IntGauge {
        self.made(IntGauge::new(name, help))
    }

    fn counters(&self, name: &str, help: &str, labels: &[&str]) -> IntCounterVec {
        self.made(IntCounterVec::new(Opts::new(name, help), labels))
    }

    fn gauges(&self, name: &str, help: &str, labels: &[&str]) -> IntGaugeVec {
        self.made(IntGaugeVec::new(Opts::new(name, help), labels))
    }

    fn histogram(&self, name: &str, help: &str, buckets: Vec<f64>) -> Histogram {
        self.made(Histogram::with_opts(HistogramOpts::new(name, help).buckets(buckets)))
    }

    fn histograms(&self, name: &str, help: &str, labels: &[&str], buckets: Vec<f64>) -> HistogramVec {
        self.made(HistogramVec::new(HistogramOpts::new(name, help).buckets(buckets), labels))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_members_of_one_process_do_not_share_counters() {
        let (one, other) = (Metrics::new(false), Metrics::new(false));
        one.lease.granted.inc();
        assert!(one.text().contains("\netcd_debugging_lease_granted_total 1\n"));
        assert!(other.text().contains("\netcd_debugging_lease_granted_total 0\n"));
    }

    #[test]
    fn the_process_is_seen() {
        let text = Metrics::new(false).text();
        for name in [
            "process_resident_memory_bytes",
            "process_open_fds",
            "process_max_fds",
            "process_virtual_memory_max_bytes",
            "process_network_receive_bytes_total",
            "os_fd_used",
            "os_fd_limit",
        ] {
            let line = text.lines().find(|line| line.starts_with(&format!("{name} ")));
            let value: f64 = line.and_then(|line| line.split(' ').nth(1)).expect(name).parse().unwrap();
            assert!(value > 0.0, "{name} {value}");
        }
    }

    #[test]
    fn buckets_are_etcds() {
        assert_eq!(doubling(0.001, 4), [0.001, 0.002, 0.004, 0.008]);
        let text = Metrics::new(false).text();
        assert!(text.contains("etcd_disk_wal_fsync_duration_seconds_bucket{le=\"8.192\"} 0"), "{text}");
    }
}
