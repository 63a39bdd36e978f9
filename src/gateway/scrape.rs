//! `/metrics`: reading how things stand, then everything that is counted.

use std::io::Write as _;
use std::sync::atomic::Ordering;

use flate2::Compression;
use flate2::write::GzEncoder;
use http::header::{CONTENT_ENCODING, HeaderMap, HeaderValue};
use http::{Response, StatusCode};
use tonic::body::Body;

use super::{Shared, answer, health, negotiate};
use crate::api::Context;
use crate::config::{FeatureGate, FeatureGates, Stage};
use crate::process;
use crate::proto::etcdserverpb::AlarmType;
use crate::telemetry::metrics::{Standing, raise};

impl Shared {
    pub(super) fn metrics_text(&self, headers: &HeaderMap) -> Response<Body> {
        let http = &self.metrics.http;
        http.scrapes_in_flight.inc();
        self.refresh();
        let text = self.metrics.text();
        http.scrapes_in_flight.dec();
        http.scrapes.inc();
        let content_type = negotiate::content_type(headers);
        if !negotiate::wants_gzip(headers) {
            return answer::with_type(StatusCode::OK, content_type, text);
        }
        let mut response = answer::with_type(StatusCode::OK, content_type, compressed(&text));
        response.headers_mut().insert(CONTENT_ENCODING, HeaderValue::from_static("gzip"));
        response
    }

    /// Sets what is read when someone asks.
    pub(super) fn refresh(&self) {
        let standing = &self.metrics.standing;
        standing.version.with_label_values(&[process::ETCD_VERSION]).set(1);
        read_features(standing, &self.features);
        if let Some(context) = self.context.get() {
            read_consensus(standing, context);
            read_cluster(standing, context);
            read_store(standing, context);
            read_watchers(standing, context);
        }
    }
}

/// Compresses quickly rather than well: it is done on the core thread.
fn compressed(text: &str) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::with_capacity(text.len() / 8), Compression::fast());
    let written = encoder.write_all(text.as_bytes()).and_then(|()| encoder.finish());
    written.expect("writing to memory does not fail")
}

fn read_features(standing: &Standing, gates: &FeatureGates) {
    let stage = |stage| if stage == Stage::Alpha { "ALPHA" } else { "BETA" };
    for gate in FeatureGate::ALL {
        let on = i64::from(gates.enabled(gate));
        standing.features.with_label_values(&[gate.name(), stage(gate.stage())]).set(on);
    }
    for group in [Stage::Alpha, Stage::Beta] {
        let name = if group == Stage::Alpha { "AllAlpha" } else { "AllBeta" };
        let on = i64::from(gates.group_enabled(group));
        standing.features.with_label_values(&[name, stage(group)]).set(on);
    }
}

fn read_consensus(standing: &Standing, context: &Context) {
    let node = &context.node;
    let status = node.status();
    standing.has_leader.set(i64::from(status.leader != 0));
    standing.is_leader.set(i64::from(status.leader == context.member_id.get()));
    standing.proposals_committed.set(signed(status.committed));
    standing.proposals_applied.set(signed(status.applied));
    standing.proposed_bytes.set(signed(node.proposed_bytes() as u64));
    let counts = node.counts();
    standing.proposals_pending.set(signed(counts.pending.load(Ordering::Relaxed) as u64));
    raise(&standing.proposals_failed, counts.failed.load(Ordering::Relaxed));
    raise(&standing.leader_changes, counts.leader_changes.load(Ordering::Relaxed));
    raise(&standing.slow_read_indexes, counts.slow_reads.load(Ordering::Relaxed));
    raise(&standing.failed_read_indexes, counts.failed_reads.load(Ordering::Relaxed));
    let log = node.log_stats();
    standing.log_segments.set(signed(log.segments as u64));
    standing.log_tail_bytes.set(signed(log.tail_bytes as u64));
    standing.log_backlog_bytes.set(signed(log.backlog_bytes as u64));
    let stall = context.node.log_stall().map_or(0, |stall| stall.as_millis());
    standing.log_stall_millis.set(i64::try_from(stall).unwrap_or(i64::MAX));
    standing.disk_free_bytes.set(signed(context.space.free_bytes()));
}

fn read_cluster(standing: &Standing, context: &Context) {
    let cluster = context.state.cluster.read();
    let own = context.member_id.to_string();
    standing.cluster_level.set(i64::from(cluster.level()));
    standing.is_learner.set(i64::from(cluster.is_learner(context.member_id.get())));
    standing.id.with_label_values(&[&own]).set(1);
    standing.cluster_version.reset();
    if let Some(version) = cluster.version() {
        let short = version.rsplit_once('.').map_or(version, |(short, _)| short);
        standing.cluster_version.with_label_values(&[short]).set(1);
    }
    standing.alarms.reset();
    for alarm in cluster.alarms_of_type(AlarmType::None as i32) {
        let member = format!("{:x}", alarm.member_id);
        standing.alarms.with_label_values(&[&member, &health::alarm_name(alarm.alarm)]).set(1);
    }
    standing.auth_revision.set(context.state.auth.read().revision().cast_signed());
    standing.known_peers.reset();
    for member in cluster.members() {
        standing.known_peers.with_label_values(&[&own, &format!("{:x}", member.id)]).set(1);
    }
}

fn read_store(standing: &Standing, context: &Context) {
    let store = context.state.store();
    let sizes = store.sizes();
    standing.db_size_bytes.set(signed(sizes.total_bytes));
    standing.db_size_in_use_bytes.set(signed(sizes.live_bytes));
    standing.memtable_bytes.set(signed(sizes.memtable_bytes));
    standing.stored_versions.set(signed(sizes.versions));
    standing.quota_bytes.set(signed(context.limits.quota_bytes.unwrap_or(0)));
    standing.revision.set(store.revision());
    standing.compact_revision.set(store.compacted());
    if let Some(live) = store.live_keys() {
        standing.keys.set(live);
    }
    standing.block_cache_bytes.set(signed(store.engine().block_cache_bytes() as u64));
    standing.metadata_cache_bytes.set(signed(store.heads_bytes()));
    let (sums, txns) = store.activity().sums();
    raise(&standing.ranges, sums.ranges);
    raise(&standing.puts, sums.puts);
    raise(&standing.deletes, sums.deletes);
    raise(&standing.txns, txns);
    standing.put_bytes.set(signed(sums.put_bytes));
    raise(&standing.dropped_versions, store.engine().dropped_versions());
}

fn read_watchers(standing: &Standing, context: &Context) {
    let sizes = context.hub.sizes();
    standing.watch_streams.set(signed(sizes.streams as u64));
    standing.watchers.set(signed(sizes.watchers as u64));
    standing.slow_watchers.set(signed(sizes.behind as u64));
    standing.pending_events.set(signed(sizes.queued_events as u64));
    standing.watch_queued_bytes.set(signed(sizes.queued_bytes as u64));
    raise(&standing.events, sizes.sent_events);
}

fn signed(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}
