//! How things stand: gauges, and counters kept elsewhere, that are set when someone asks for metrics.

use prometheus::{IntCounter, IntGauge, IntGaugeVec};

use super::Registrar;

macro_rules! standing {
    (gauges { $($gauge:ident $gauge_name:literal $gauge_help:literal;)* } counters { $($counter:ident $counter_name:literal $counter_help:literal;)* }) => {
        /// Metrics that are set at each scrape; the gateway knows from what.
        pub struct Standing {
            $(#[doc = $gauge_help] pub $gauge: IntGauge,)*
            $(#[doc = $counter_help] pub $counter: IntCounter,)*
            /// 1 for this member's id.
            pub id: IntGaugeVec,
            /// 1 for this build's version.
            pub version: IntGaugeVec,
            /// 1 for the cluster's version.
            pub cluster_version: IntGaugeVec,
            /// 1 for each gate that is on, 0 for the others.
            pub features: IntGaugeVec,
            /// 1 for each raised alarm.
            pub alarms: IntGaugeVec,
            /// 1 for each member known.
            pub known_peers: IntGaugeVec,
        }

        impl Standing {
            pub(super) fn new(on: &Registrar<'_>) -> Standing {
                Standing {
                    $($gauge: on.gauge($gauge_name, $gauge_help),)*
                    $($counter: on.counter($counter_name, $counter_help),)*
                    id: on.gauges("etcd_server_id", "1 for this member's id.", &["server_id"]),
                    version: on.gauges("etcd_server_version", "1 for the version.", &["server_version"]),
                    cluster_version: on.gauges("etcd_cluster_version", "1 for the cluster's version.", &["cluster_version"]),
                    features: on.gauges("etcd_server_feature_enabled", "1 for gates that are on.", &["name", "stage"]),
                    alarms: on.gauges("etcd_debugging_server_alarms", "1 for raised alarms.", &["server_id", "alarm_type"]),
                    known_peers: on.gauges("etcd_network_known_peers", "1 for each member known.", &["Local", "Remote"]),
                }
            }
        }
    };
}

standing! {
    gauges {
        has_leader "etcd_server_has_leader" "1 while a leader is known.";
        is_leader "etcd_server_is_leader" "1 while this member leads.";
        is_learner "etcd_server_is_learner" "1 while this member has no vote.";
        proposals_committed "etcd_server_proposals_committed_total" "Index of the last committed entry.";
        proposals_applied "etcd_server_proposals_applied_total" "Index of the last applied entry.";
        proposals_pending "etcd_server_proposals_pending" "Proposals under way.";
        quota_bytes "etcd_server_quota_backend_bytes" "Database size from which writes are refused.";
        auth_revision "etcd_debugging_auth_revision" "Revision of the users and roles.";
        db_size_bytes "etcd_mvcc_db_total_size_in_bytes" "Bytes of files and of what is not in them yet.";
        db_size_in_use_bytes "etcd_mvcc_db_total_size_in_use_in_bytes" "Bytes that a rewrite would leave, estimated.";
        keys "etcd_debugging_mvcc_keys_total" "Live keys.";
        revision "etcd_debugging_mvcc_current_revision" "Current revision.";
        compact_revision "etcd_debugging_mvcc_compact_revision" "Compact revision.";
        put_bytes "etcd_debugging_mvcc_total_put_size_in_bytes" "Bytes of keys and values put.";
        watch_streams "etcd_debugging_mvcc_watch_stream_total" "Watch streams.";
        watchers "etcd_debugging_mvcc_watcher_total" "Watchers.";
        slow_watchers "etcd_debugging_mvcc_slow_watcher_total" "Watchers that read history.";
        pending_events "etcd_debugging_mvcc_pending_events_total" "Events that wait to be sent.";
        cluster_level "skeg_cluster_level" "Level that the cluster has reached: what all members can read.";
        disk_free_bytes "skeg_disk_free_bytes" "Room on the fuller disk of data and log, in bytes, the reserve not counted.";
        log_stall_millis "skeg_log_stall_milliseconds" "How long the log has waited for its disk, when that is longer than two election time-outs; else 0.";
        block_cache_bytes "skeg_block_cache_bytes" "Bytes held by the block cache.";
        memtable_bytes "skeg_memtable_bytes" "Bytes not in a table file yet.";
        metadata_cache_bytes "skeg_metadata_cache_bytes" "Bytes held by the metadata cache.";
        watch_queued_bytes "skeg_watch_queued_bytes" "Bytes that wait to be sent to watchers.";
        proposed_bytes "skeg_proposed_bytes" "Bytes of proposals under way.";
        log_segments "skeg_log_segments" "Segments of the Raft log.";
        log_tail_bytes "skeg_log_tail_bytes" "Bytes held of the newest log entries.";
        log_backlog_bytes "skeg_log_backlog_bytes" "Bytes that wait for the log's disk.";
        stored_versions "skeg_stored_versions" "Versions of keys stored, estimated.";
    }
    counters {
        leader_changes "etcd_server_leader_changes_seen_total" "Changes of the leader.";
        proposals_failed "etcd_server_proposals_failed_total" "Proposals that failed.";
        slow_read_indexes "etcd_server_slow_read_indexes_total" "Questions to the leadership that had to be asked again.";
        failed_read_indexes "etcd_server_read_indexes_failed_total" "Reads that got no answer from the leadership.";
        ranges "etcd_mvcc_range_total" "Ranges.";
        puts "etcd_mvcc_put_total" "Puts.";
        deletes "etcd_mvcc_delete_total" "Range deletes.";
        txns "etcd_mvcc_txn_total" "Transactions of more than one operation.";
        events "etcd_debugging_mvcc_events_total" "Events given to watch streams.";
        dropped_versions "etcd_debugging_mvcc_db_compaction_keys_total" "Versions dropped by compaction.";
    }
}

/// Lifts a counter to a total that is kept elsewhere.
pub fn raise(counter: &IntCounter, total: u64) {
    counter.inc_by(total.saturating_sub(counter.get()));
}
