//! What the log tells of its writes, as metrics.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use tracing::error;

use crate::storage::Space;
use crate::storage::log::LogObserver;
use crate::telemetry::{FATAL, metrics::Metrics};

/// Counts what the log does, and gives it the reserve when its disk is full.
pub(super) struct CountLog {
    pub(super) metrics: Arc<Metrics>,
    pub(super) space: Arc<Space>,
}

impl LogObserver for CountLog {
    fn wrote(&self, bytes: usize, took: Duration) {
        let disk = &self.metrics.disk;
        disk.wal_write.observe(took.as_secs_f64());
        disk.wal_write_bytes.add(i64::try_from(bytes).unwrap_or(i64::MAX));
    }

    fn synced(&self, took: Duration) {
        self.metrics.disk.wal_fsync.observe(took.as_secs_f64());
    }

    fn disk_full(&self) {
        self.space.give_up_reserve();
    }

    fn failed(&self, error: &io::Error) {
        error!(target: FATAL, %error, "the raft log has failed");
    }
}
