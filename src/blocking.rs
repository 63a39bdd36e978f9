//! Work that blocks or takes long, on a thread of its own: scans, hashes, flushes.

use tokio::task::JoinHandle;

/// Starts the work. Cancelling what it returns does not stop work that has begun.
#[cfg(not(feature = "sim"))]
#[expect(clippy::disallowed_methods, reason = "this is the seam")]
pub fn spawn<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> JoinHandle<T> {
    tokio::task::spawn_blocking(work)
}

/// Does the work a moment later, at once and on the thread of the simulation: in which order is then the seed's.
#[cfg(feature = "sim")]
pub fn spawn<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> JoinHandle<T> {
    tokio::spawn(async move {
        crate::sim::pause(std::time::Duration::from_millis(5)).await;
        work()
    })
}
