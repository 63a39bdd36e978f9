//! Who waits here for the outcome of a command that another member wrote to the log.
//!
//! A follower proposes through the leader, and takes the outcome from its own apply: what its client is told is then
//! visible to its client's next read. The command carries a number that only this member knows the meaning of.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use parking_lot::Mutex;
use tokio::sync::oneshot;

use crate::apply::Outcome;
use crate::clock;

/// Waiters by request id.
pub(crate) struct Outcomes {
    next_id: AtomicU64,
    waiting: Mutex<HashMap<u64, oneshot::Sender<Outcome>>>,
    /// How many wait, to be asked without the lock by an apply that nobody waits for.
    count: AtomicUsize,
}

impl Default for Outcomes {
    /// Begins at a random number: two members, or two lives of one, must not share any.
    fn default() -> Outcomes {
        let next_id = AtomicU64::new(u64::from_le_bytes(clock::random()));
        Outcomes { next_id, waiting: Mutex::default(), count: AtomicUsize::new(0) }
    }
}

/// A wait for one outcome; dropping it ends the wait.
pub(crate) struct Waiting {
    outcomes: Arc<Outcomes>,
    id: u64,
    outcome: oneshot::Receiver<Outcome>,
}

impl Outcomes {
    /// Begins a wait, before the command is sent.
    pub(crate) fn expect(self: &Arc<Self>) -> Waiting {
        let id = loop {
            let id = self.next_id.fetch_add(1, Ordering::Relaxed);
            if id != 0 {
                break id;
            }
        };
        let (sender, outcome) = oneshot::channel();
        self.waiting.lock().insert(id, sender);
        self.count.fetch_add(1, Ordering::Relaxed);
        Waiting { outcomes: Arc::clone(self), id, outcome }
    }

    /// Gives an outcome to whoever waits for it here.
    pub(crate) fn tell(&self, id: u64, outcome: &Outcome) {
        if id == 0 || self.count.load(Ordering::Relaxed) == 0 {
            return;
        }
        if let Some(waiting) = self.waiting.lock().remove(&id) {
            let _ = waiting.send(outcome.clone());
        }
    }
}

impl Waiting {
    /// The number to put into the command.
    pub(crate) fn id(&self) -> u64 {
        self.id
    }

    /// Waits until the command is applied here; for ever if it never is.
    pub(crate) async fn outcome(&mut self) -> Outcome {
        match (&mut self.outcome).await {
            Ok(outcome) => outcome,
            Err(_) => std::future::pending().await,
        }
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        self.outcomes.waiting.lock().remove(&self.id);
        self.outcomes.count.fetch_sub(1, Ordering::Relaxed);
    }
}
