//! The two threads that run a log.

use std::path::Path;
use std::thread::{self, JoinHandle};

use parking_lot::Mutex;

use super::error::LogError;
use super::queue::Shared;
use super::supply::{Supplier, Supply};
use super::writer::Writer;

/// The log thread and the supply thread, until they are joined.
pub(super) struct Workers(Mutex<Option<[JoinHandle<()>; 2]>>);

impl Workers {
    pub(super) fn start(dir: &Path, writer: Writer, supplier: Supplier) -> Result<Workers, LogError> {
        let spawn = |name: &str, body: Box<dyn FnOnce() + Send>| {
            let thread = thread::Builder::new().name(name.to_owned()).spawn(body);
            thread.map_err(|source| LogError::Io {
                action: "start a thread for",
                path: dir.to_owned(),
                source,
            })
        };
        let supply = std::sync::Arc::clone(&supplier.supply);
        let supply_thread = spawn("skeg-log-supply", Box::new(|| supplier.run()))?;
        let log_thread = match spawn("skeg-log", Box::new(|| writer.run())) {
            Ok(thread) => thread,
            Err(error) => {
                supply.stop();
                return Err(error);
            }
        };
        Ok(Workers(Mutex::new(Some([log_thread, supply_thread]))))
    }

    /// Has what is queued written, and joins the threads.
    pub(super) fn stop(&self, shared: &Shared, supply: &Supply) {
        let Some([log_thread, supply_thread]) = self.0.lock().take() else { return };
        shared.stop();
        // The log thread itself may drop the last handle, with a callback that held it. It ends by itself then.
        if log_thread.thread().id() != thread::current().id() {
            // A panic is known already: it failed the log.
            let _ = log_thread.join();
        }
        supply.stop();
        let _ = supply_thread.join();
    }
}
