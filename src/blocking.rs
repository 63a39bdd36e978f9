//! Work that blocks or takes long, on a thread of its own: scans, hashes, flushes; and async work of low priority.

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

/// A thread of low priority for async work that must not get in the way of requests: the pieces of a snapshot, on their way.
///
/// What runs there takes the processor only from what nobody waits for; so do the threads that it starts with [`spawn`].
/// Ends, with all that runs on it, when dropped.
#[derive(Debug)]
pub struct Background {
    #[cfg(not(feature = "sim"))]
    runtime: tokio::runtime::Handle,
    #[cfg(not(feature = "sim"))]
    _until_dropped: tokio::sync::oneshot::Sender<()>,
}

/// Added to the niceness of the thread: its weight is a tenth of the others', when they want the processor too.
#[cfg(not(feature = "sim"))]
const NICER_BY: i32 = 10;
/// Threads for what blocks meanwhile.
#[cfg(not(feature = "sim"))]
const BACKGROUND_THREADS_MAX: usize = 4;

impl Background {
    /// Starts the thread.
    ///
    /// # Errors
    /// When the system gives none.
    #[cfg(not(feature = "sim"))]
    pub fn start(name: &str) -> std::io::Result<Background> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .max_blocking_threads(BACKGROUND_THREADS_MAX)
            .build()?;
        let handle = runtime.handle().clone();
        let (until_dropped, dropped) = tokio::sync::oneshot::channel();
        std::thread::Builder::new().name(name.to_owned()).spawn(move || {
            yield_to_others();
            let _ = runtime.block_on(dropped);
            runtime.shutdown_background();
        })?;
        Ok(Background { runtime: handle, _until_dropped: until_dropped })
    }

    /// On the one thread of the simulation.
    ///
    /// # Errors
    /// None.
    #[cfg(feature = "sim")]
    pub fn start(_: &str) -> std::io::Result<Background> {
        Ok(Background {})
    }

    /// Runs the work there; ends it when the caller is cancelled. `None` if it panicked, or the thread has ended.
    pub async fn run<T: Send + 'static>(&self, work: impl Future<Output = T> + Send + 'static) -> Option<T> {
        let mut tasks = tokio::task::JoinSet::new();
        #[cfg(not(feature = "sim"))]
        tasks.spawn_on(work, &self.runtime);
        #[cfg(feature = "sim")]
        tasks.spawn(work);
        tasks.join_next().await?.ok()
    }
}

/// Lowers the priority of this thread, where the system has one for threads.
#[cfg(not(feature = "sim"))]
fn yield_to_others() {
    let thread = rustix::thread::gettid();
    let lowered = rustix::process::getpriority_process(Some(thread))
        .and_then(|now| rustix::process::setpriority_process(Some(thread), now + NICER_BY));
    if let Err(error) = lowered {
        tracing::warn!(%error, "the priority of a thread is not lowered");
    }
}
