//! The second half of compactions: their hash, and giving back space when there is enough of it.

use std::sync::Arc;

use tokio::sync::{mpsc, watch};
use tracing::info;

use crate::apply::{Compaction, State};
use crate::blocking;
use crate::clock;
use crate::storage::StorageError;
use crate::telemetry::metrics::Metrics;

/// Finishes compactions one after the other, in order, and tells of each.
///
/// # Errors
/// The storage's: the member must stop then.
pub async fn run(
    state: State,
    mut compactions: mpsc::UnboundedReceiver<Compaction>,
    metrics: Arc<Metrics>,
    finished: watch::Sender<i64>,
) -> Result<(), StorageError> {
    while let Some(compaction) = compactions.recv().await {
        let store = state.store();
        if store.is_compaction_finished(compaction.revision) {
            tell(&finished, compaction.revision);
            continue;
        }
        let started = clock::now();
        let work = blocking::spawn(move || {
            store.finish_compaction(compaction.previous, compaction.revision)?;
            if store.wants_rewrite() {
                store.rewrite()?;
            }
            Ok::<(), StorageError>(())
        });
        match work.await {
            Ok(result) => result?,
            Err(error) if error.is_cancelled() => return Ok(()),
            Err(error) => std::panic::resume_unwind(error.into_panic()),
        }
        metrics.mvcc.compaction_millis.observe(clock::now().duration_since(started).as_secs_f64() * 1000.0);
        metrics.mvcc.compaction_last.set(i64::try_from(clock::unix_millis() / 1000).unwrap_or(i64::MAX));
        tell(&finished, compaction.revision);
        info!(revision = compaction.revision, "finished compaction");
    }
    Ok(())
}

fn tell(finished: &watch::Sender<i64>, revision: i64) {
    finished.send_if_modified(|known| {
        let newer = revision > *known;
        *known = revision.max(*known);
        newer
    });
}
