//! Flushing the state machine's files behind the log, so that the log can drop what they hold.

use std::time::Duration;

use tracing::warn;

use crate::apply::State;
use crate::raft::Node;

/// Time between looks.
const LOOK_EVERY: Duration = Duration::from_millis(250);
/// Unflushed bytes from which a flush is due at once: they are what a crash has to replay, and what keeps log segments from
/// being recycled, so that a new member zero-fills more of them.
const FLUSH_BYTES: u64 = 8 << 20;

/// Flushes for as long as the member runs: when much is unflushed, or some is and nothing more comes.
///
/// `idle_entries` is how many entries make it worth to flush while idle. etcd: `--snapshot-count`.
pub async fn run(node: Node, state: State, idle_entries: u64) {
    let mut ticks = tokio::time::interval(LOOK_EVERY);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut flushed_at = node.status().applied;
    let mut before = flushed_at;
    loop {
        ticks.tick().await;
        let applied = node.status().applied;
        let idle = applied == before;
        before = applied;
        let waiting = applied - flushed_at;
        let much = state.store().sizes().memtable_bytes >= FLUSH_BYTES && waiting > 0;
        if much || (idle && waiting >= idle_entries) {
            if let Err(error) = node.checkpoint().await {
                warn!(%error, "state machine not flushed");
                return;
            }
            flushed_at = applied;
        }
    }
}
