//! Building the index that counts keys, after a start and after the store was replaced.

use tracing::error;

use crate::apply::State;
use crate::blocking;
use crate::raft::Node;
use crate::storage::StorageError;
use crate::storage::snapshot::Damage;

/// Builds the index of the store, and again of each that takes its place. Of one that cannot be read there is none: what is
/// counted there is read.
///
/// # Errors
/// The storage's: the member must stop then.
pub async fn run(node: Node, state: State) -> Result<(), StorageError> {
    let mut replaced = node.store_replacements();
    loop {
        // Before the store is taken: a replacement after it is then seen below.
        replaced.mark_unchanged();
        let store = state.store();
        match blocking::spawn(move || store.build_counts()).await {
            Ok(Err(error)) if error.is_damage() => {
                error!(%error, "found stored data that cannot be read");
                node.distrust(Damage::Unreadable);
            }
            Ok(result) => result?,
            Err(error) if error.is_cancelled() => return Ok(()),
            Err(error) => std::panic::resume_unwind(error.into_panic()),
        }
        if replaced.changed().await.is_err() {
            return Ok(());
        }
    }
}
