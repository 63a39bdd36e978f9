//! Reading everything stored now and then, slowly: what can no longer be read is noticed while other members can.
//!
//! The first reading begins at a moment by chance within the interval, so members do not read at the same time, and one that is
//! restarted often still reads. What is found makes this member's store damaged; `task/mend` has the rest.

use std::time::{Duration, Instant};

use tracing::{error, info, warn};

use crate::apply::State;
use crate::blocking;
use crate::clock;
use crate::raft::Node;
use crate::storage::snapshot::Damage;
use crate::storage::{Scrub, StorageError};

/// Bytes of keys and values read in a second: a gigabyte a minute, and little of what a disk does.
const BYTES_PER_SECOND: u64 = 16 << 20;
/// Bytes read without a pause.
const PIECE_BYTES: u64 = 1 << 20;

/// Reads everything every so often, for as long as the member runs.
pub async fn run(node: Node, state: State, every: Duration) {
    let chance = f64::from(u32::from_le_bytes(clock::random())) / f64::from(u32::MAX);
    tokio::time::sleep(every.mul_f64(chance)).await;
    loop {
        // What is known to be damaged is about to be replaced.
        if !node.withholds() {
            read_all(&node, &state).await;
        }
        tokio::time::sleep(every).await;
    }
}

async fn read_all(node: &Node, state: &State) {
    let started = clock::now();
    let (store, dir) = (state.store(), node.checkpoint_dir());
    let reading = async move {
        let begun = blocking::spawn(move || Scrub::begin(store.engine(), dir)).await;
        read_on(begun.map_err(std::io::Error::other)??, started).await
    };
    match node.background().run(reading).await {
        None => {}
        Some(Ok(bytes)) => {
            let took = clock::now().duration_since(started);
            info!(bytes, took = ?took, "all that is stored can be read");
        }
        Some(Err(error)) if error.is_damage() => {
            if node.damage() != Some(Damage::Unreadable) {
                error!(%error, "found stored data that cannot be read");
            }
            node.distrust(Damage::Unreadable);
        }
        Some(Err(error)) => warn!(%error, "what is stored was not read to its end"),
    }
}

/// Reads to the end, at its pace; gives how much there was.
async fn read_on(mut scrub: Scrub, started: Instant) -> Result<u64, StorageError> {
    let mut total = 0;
    loop {
        let step = blocking::spawn(move || {
            let read = scrub.read_some(PIECE_BYTES);
            (scrub, read)
        });
        let (rest, read) = step.await.map_err(std::io::Error::other)?;
        scrub = rest;
        let Some(read) = read? else { break };
        total += read;
        let due = Duration::from_millis(total.saturating_mul(1000) / BYTES_PER_SECOND);
        tokio::time::sleep_until((started + due).into()).await;
    }
    // Closes and removes what it has read.
    let _ = blocking::spawn(move || drop(scrub)).await;
    Ok(total)
}
