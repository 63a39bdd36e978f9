//! The log in the simulation: tasks of its one thread in the place of threads, and a disk that takes virtual time.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;

use super::error::LogError;
use super::queue::Shared;
use super::supply::{Supplier, Supply};
use super::writer::Writer;
use crate::clock;
use crate::sim;

/// Longest time between two looks at what is to be prepared.
const SUPPLY_EVERY: Duration = Duration::from_millis(20);

/// Both workers, until they are stopped or their runtime ends.
pub(super) struct Workers {
    writer: Arc<Mutex<Option<Writer>>>,
    supplier: Arc<Mutex<Option<Supplier>>>,
}

impl Workers {
    pub(super) fn start(_: &Path, writer: Writer, supplier: Supplier) -> Result<Workers, LogError> {
        let journal = Arc::clone(&supplier.disk.journal);
        let shared = writer.shared();
        let writer = Arc::new(Mutex::new(Some(writer)));
        let supplier = Arc::new(Mutex::new(Some(supplier)));
        let writing = Arc::clone(&writer);
        tokio::spawn(async move {
            loop {
                if shared.backlog_bytes() > 0 {
                    shared.set_busy(Some(clock::now()));
                }
                journal.wait().await;
                let mut writer = writing.lock();
                let Some(running) = &mut *writer else { return };
                if let Some(ops) = shared.take_queued()
                    && !running.take_batch(ops)
                {
                    *writer = None;
                }
            }
        });
        let supplying = Arc::clone(&supplier);
        tokio::spawn(async move {
            loop {
                sim::pause(SUPPLY_EVERY).await;
                let mut supplier = supplying.lock();
                let Some(running) = &mut *supplier else { return };
                running.step();
            }
        });
        Ok(Workers { writer, supplier })
    }

    /// Writes what is queued, and ends both.
    pub(super) fn stop(&self, shared: &Shared, supply: &Supply) {
        shared.stop();
        // Held when a callback of the writer drops the last handle: it ends by itself then.
        if let Some(mut writer) = self.writer.try_lock() {
            while let Some(running) = &mut *writer {
                let goes_on = shared.take_queued().is_some_and(|ops| running.take_batch(ops));
                if !goes_on {
                    *writer = None;
                }
            }
        }
        supply.stop();
        if let Some(mut supplier) = self.supplier.lock().take() {
            supplier.step();
        }
    }
}
