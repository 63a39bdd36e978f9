//! Building the index that counts keys, after a start and after the store was replaced.

use tokio::sync::watch;

use crate::apply::State;
use crate::blocking;
use crate::storage::StorageError;

/// Builds the index of the store, and again of each that takes its place.
///
/// # Errors
/// The storage's: the member must stop then.
pub async fn run(state: State, mut replaced: watch::Receiver<()>) -> Result<(), StorageError> {
    loop {
        // Before the store is taken: a replacement after it is then seen below.
        replaced.mark_unchanged();
        let store = state.store();
        match blocking::spawn(move || store.build_counts()).await {
            Ok(result) => result?,
            Err(error) if error.is_cancelled() => return Ok(()),
            Err(error) => std::panic::resume_unwind(error.into_panic()),
        }
        if replaced.changed().await.is_err() {
            return Ok(());
        }
    }
}
