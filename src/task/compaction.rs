//! The second half of compactions: their hash, and giving back space when there is enough of it.

use std::sync::Arc;

use tokio::sync::mpsc;
use tracing::info;

use crate::apply::Compaction;
use crate::storage::StorageError;
use crate::storage::mvcc::Store;

/// Finishes compactions one after the other, in order.
///
/// # Errors
/// The storage's: the member must stop then.
pub async fn run(
    store: Arc<Store>,
    mut compactions: mpsc::UnboundedReceiver<Compaction>,
) -> Result<(), StorageError> {
    while let Some(compaction) = compactions.recv().await {
        let store = Arc::clone(&store);
        let finished = tokio::task::spawn_blocking(move || {
            store.finish_compaction(compaction.previous, compaction.revision)?;
            if store.wants_rewrite() {
                store.rewrite()?;
            }
            Ok::<(), StorageError>(())
        });
        match finished.await {
            Ok(result) => result?,
            Err(error) if error.is_cancelled() => return Ok(()),
            Err(error) => std::panic::resume_unwind(error.into_panic()),
        }
        info!(revision = compaction.revision, "finished compaction");
    }
    Ok(())
}
