//! Peers: what is exchanged with each, and how that goes.
//!
//! A peer's series are there from the moment that it is known, at zero: a rate over them is then 0 and not absent. They stay
//! when the peer is gone, as etcd's do.

use std::sync::Arc;
use std::time::Instant;

use prometheus::{Histogram, HistogramVec, IntCounter, IntCounterVec, IntGauge, IntGaugeVec};

use super::{Registrar, doubling};
use crate::clock;

/// Label of snapshots from a sender that did not say who it is, or is no peer.
const UNKNOWN: &str = "unknown_snapshot_sender";

/// All peers.
pub struct Peers {
    sent_bytes: IntCounterVec,
    received_bytes: IntCounterVec,
    sent_failures: IntCounterVec,
    received_failures: IntCounterVec,
    round_trip: HistogramVec,
    active: IntGaugeVec,
    disconnected: IntCounterVec,
    sent_snapshots: TransferFamilies,
    received_snapshots: TransferFamilies,
    /// Heartbeats sent later than twice the time that they are due after.
    pub late_heartbeats: IntCounter,
    /// Time to sync a peer's files.
    pub snapshot_sync: Histogram,
    /// Time from a peer's first piece until its files are synced.
    pub snapshot_save: Histogram,
    /// Time to read this member's files and send them to a peer.
    pub snapshot_read: Histogram,
}

/// One peer.
#[derive(Debug)]
pub struct PeerCounters {
    /// Bytes sent to it.
    pub sent_bytes: IntCounter,
    /// Bytes received from it.
    pub received_bytes: IntCounter,
    /// Calls to it that failed.
    pub sent_failures: IntCounter,
    /// Streams of entries from it that broke off or made no sense.
    pub received_failures: IntCounter,
    /// Time in which it answers a question, in seconds.
    pub round_trip: Histogram,
    /// 1 while it answers.
    pub active: IntGauge,
    /// Times that it ceased to answer.
    pub disconnected: IntCounter,
    /// Files sent to it.
    pub sent_snapshots: Transfers,
    /// Files received from it.
    pub received_snapshots: Transfers,
}

/// Snapshots that go one way between this member and a peer.
#[derive(Debug)]
pub struct Transfers {
    succeeded: IntCounter,
    failed: IntCounter,
    under_way: IntGauge,
    duration: Histogram,
}

/// A snapshot under way; it has failed unless it is said to have [`succeeded`](Transfer::succeeded).
#[derive(Debug)]
pub struct Transfer<'c> {
    of: &'c Transfers,
    started: Instant,
    succeeded: bool,
}

/// The families of [`Transfers`], by the label that names the peer.
struct TransferFamilies {
    succeeded: IntCounterVec,
    failed: IntCounterVec,
    under_way: IntGaugeVec,
    duration: HistogramVec,
}

impl Peers {
    pub(super) fn new(on: &Registrar<'_>) -> Peers {
        let both: &[&str] = &["Local", "Remote"];
        Peers {
            sent_bytes: on.counters("etcd_network_peer_sent_bytes_total", "Bytes sent to a peer.", &["To"]),
            received_bytes: on.counters(
                "etcd_network_peer_received_bytes_total",
                "Bytes received from a peer.",
                &["From"],
            ),
            sent_failures: on.counters(
                "etcd_network_peer_sent_failures_total",
                "Calls to a peer that failed.",
                &["To"],
            ),
            received_failures: on.counters(
                "etcd_network_peer_received_failures_total",
                "Streams from a peer that broke off.",
                &["From"],
            ),
            round_trip: on.histograms(
                "etcd_network_peer_round_trip_time_seconds",
                "Time in which a peer answers.",
                &["To"],
                doubling(0.0001, 16),
            ),
            active: on.gauges("etcd_network_active_peers", "1 for each peer that answers.", both),
            disconnected: on.counters(
                "etcd_network_disconnected_peers_total",
                "Times that a peer ceased to answer.",
                both,
            ),
            sent_snapshots: TransferFamilies::new(on, "send", "To"),
            received_snapshots: TransferFamilies::new(on, "receive", "From"),
            late_heartbeats: on
                .counter("etcd_server_heartbeat_send_failures_total", "Heartbeats sent too late."),
            snapshot_sync: on.histogram(
                "etcd_snap_db_fsync_duration_seconds",
                "Time to sync a peer's files.",
                doubling(0.001, 14),
            ),
            snapshot_save: on.histogram(
                "etcd_snap_db_save_total_duration_seconds",
                "Time to receive and sync a peer's files.",
                doubling(0.1, 10),
            ),
            snapshot_read: on.histogram(
                "etcd_disk_backend_snapshot_duration_seconds",
                "Time to read the store and send it to a peer or a client.",
                doubling(0.01, 17),
            ),
        }
    }

    /// Makes or finds the counters of a peer.
    pub fn peer(&self, local: &str, remote: &str) -> Arc<PeerCounters> {
        Arc::new(PeerCounters {
            sent_bytes: self.sent_bytes.with_label_values(&[remote]),
            received_bytes: self.received_bytes.with_label_values(&[remote]),
            sent_failures: self.sent_failures.with_label_values(&[remote]),
            received_failures: self.received_failures.with_label_values(&[remote]),
            round_trip: self.round_trip.with_label_values(&[remote]),
            active: self.active.with_label_values(&[local, remote]),
            disconnected: self.disconnected.with_label_values(&[local, remote]),
            sent_snapshots: self.sent_snapshots.of(remote),
            received_snapshots: self.received_snapshots.of(remote),
        })
    }

    /// Counts a snapshot that was refused before its sender was known.
    pub fn refused_snapshot(&self) {
        self.received_snapshots.failed.with_label_values(&[UNKNOWN]).inc();
    }
}

impl TransferFamilies {
    fn new(on: &Registrar<'_>, way: &str, label: &str) -> TransferFamilies {
        let name = |what: &str| format!("etcd_network_snapshot_{way}_{what}");
        TransferFamilies {
            succeeded: on.counters(&name("success"), "Snapshots that arrived.", &[label]),
            failed: on.counters(&name("failures"), "Snapshots that did not arrive.", &[label]),
            under_way: on.gauges(&name("inflights_total"), "Snapshots on their way.", &[label]),
            duration: on.histograms(
                &name("total_duration_seconds"),
                "Time from the start of a snapshot that arrived until it was in place.",
                &[label],
                doubling(0.1, 10),
            ),
        }
    }

    fn of(&self, peer: &str) -> Transfers {
        Transfers {
            succeeded: self.succeeded.with_label_values(&[peer]),
            failed: self.failed.with_label_values(&[peer]),
            under_way: self.under_way.with_label_values(&[peer]),
            duration: self.duration.with_label_values(&[peer]),
        }
    }
}

impl Transfers {
    /// Notes that one begins.
    pub fn begin(&self) -> Transfer<'_> {
        self.under_way.inc();
        Transfer { of: self, started: clock::now(), succeeded: false }
    }
}

impl Transfer<'_> {
    /// Notes that it is in place.
    pub fn succeeded(mut self) {
        self.succeeded = true;
    }
}

impl Drop for Transfer<'_> {
    fn drop(&mut self) {
        self.of.under_way.dec();
        if self.succeeded {
            self.of.succeeded.inc();
            self.of.duration.observe(clock::now().duration_since(self.started).as_secs_f64());
        } else {
            self.of.failed.inc();
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::telemetry::metrics::Metrics;

    #[test]
    fn a_peer_is_there_from_the_start_and_a_snapshot_ends_in_one_way() {
        let metrics = Metrics::new(false);
        assert!(!metrics.text().contains("etcd_network_peer"));
        let peer = metrics.peers.peer("a", "b");
        let text = metrics.text();
        for series in [
            "etcd_network_active_peers{Local=\"a\",Remote=\"b\"} 0",
            "etcd_network_peer_sent_failures_total{To=\"b\"} 0",
            "etcd_network_peer_received_bytes_total{From=\"b\"} 0",
            "etcd_network_peer_round_trip_time_seconds_bucket{To=\"b\",le=\"3.2768\"} 0",
            "etcd_network_snapshot_receive_total_duration_seconds_bucket{From=\"b\",le=\"51.2\"} 0",
        ] {
            assert!(text.contains(series), "{series}\n{text}");
        }
        drop(peer.sent_snapshots.begin());
        let under_way = peer.sent_snapshots.begin();
        assert!(metrics.text().contains("etcd_network_snapshot_send_inflights_total{To=\"b\"} 1"));
        under_way.succeeded();
        let text = metrics.text();
        for series in ["failures{To=\"b\"} 1", "success{To=\"b\"} 1", "inflights_total{To=\"b\"} 0"] {
            assert!(text.contains(&format!("etcd_network_snapshot_send_{series}")), "{series}\n{text}");
        }
    }
}
