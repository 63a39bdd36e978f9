//! Snapshots: the store's files, at home and on their way between members.
//!
//! What openraft calls a snapshot costs nothing here: it says up to which entry this member's files hold everything, and so
//! how far the log may be purged. Only when a peer needs entries that are purged are files sent:
//!
//! ```text
//! leader    Source: checkpoint ──pieces──>  (network/snapshot)
//! follower  (network/snapshot) ──> Arrival: opened and checked ──> state_machine: it is the store
//! ```
//!
//! While a checkpoint is sent, and for a while after, the leader keeps the entries that follow it: otherwise the log would
//! have moved on when the files are in place, and they would have to be sent again.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tracing::{info, warn};

use super::codec;
use super::types::{LogId, SnapshotMeta, StoredMembership};
use crate::apply::State;
use crate::blocking::{self, Background};
use crate::clock;
use crate::cluster::level;
use crate::storage::StorageError;
use crate::storage::log::{Log, SEGMENT_BYTES};
use crate::storage::mvcc::Store;
use crate::storage::schema::{Family, MetaKey};
use crate::storage::snapshot::{Checkpoint, Generation, Generations, SnapshotError};

/// Bytes of files sent in a second, to all peers together: a gigabyte takes four seconds. Those who are served meanwhile go
/// first anyway: it is read and sent in the background.
const SEND_BYTES_PER_SECOND: u64 = 256 << 20;
/// How far the pace may lag behind the clock before what was missed is not made up for.
const PACE_SLACK: Duration = Duration::from_millis(50);
/// How long a checkpoint and the log behind it are kept after the last use: for a peer whose connection broke, and for one
/// that has the files and now follows the log.
const KEPT_AFTER: Duration = Duration::from_secs(120);
/// Size up to which the log is kept for that. If the files are larger, then up to theirs: past it the files are the
/// smaller thing to send again.
const KEPT_LOG_BYTES_MIN: u64 = 1 << 30;

/// The data of a snapshot as openraft passes it around.
pub(crate) enum Files {
    /// This member's own, which need not be touched unless a peer wants them.
    Here(Arc<Source>),
    /// A peer's, arrived and opened.
    Arrived(Box<Arrival>),
}

/// The position and membership that a store's records speak of.
pub(super) fn stored_position(store: &Store) -> io::Result<(Option<LogId>, StoredMembership)> {
    let engine = store.engine();
    let read = |key: MetaKey| engine.get(Family::Meta, &key.encode()).map_err(io::Error::other);
    let applied = read(MetaKey::Applied)?.map(|bytes| codec::decode_log_id(&bytes)).transpose()?;
    let membership = read(MetaKey::Membership)?.map(|bytes| codec::decode_membership(&bytes)).transpose()?;
    Ok((applied, membership.unwrap_or_default()))
}

/// Where this member's files are sent from.
pub(crate) struct Source {
    state: State,
    generations: Arc<Generations>,
    log: Log,
    background: Arc<Background>,
    kept: Mutex<Kept>,
    /// Held while a checkpoint is made: one flush does for all who want one.
    making: tokio::sync::Mutex<()>,
    pace: Mutex<Instant>,
}

#[derive(Default)]
struct Kept {
    /// What the log may be purged to, and no further.
    upto: Option<SnapshotMeta>,
    checkpoint: Option<Arc<Checkpoint>>,
    /// Peers that are being sent something.
    sending: usize,
    last_use: Option<Instant>,
}

impl Kept {
    fn release(&mut self) -> Option<Arc<Checkpoint>> {
        self.upto = None;
        self.checkpoint.take()
    }
}

impl Source {
    pub(super) fn new(
        state: State,
        generations: Arc<Generations>,
        log: Log,
        background: Arc<Background>,
    ) -> Arc<Source> {
        let pace = Mutex::new(clock::now());
        Arc::new(Source {
            state,
            generations,
            log,
            background,
            kept: Mutex::default(),
            making: tokio::sync::Mutex::default(),
            pace,
        })
    }

    /// Where what is sent is read and passed on.
    pub(super) fn background(&self) -> &Arc<Background> {
        &self.background
    }

    /// Takes back how far the log may be purged, if a peer is to be given the entries behind that.
    pub(super) fn limit(&self, flushed: SnapshotMeta) -> SnapshotMeta {
        let mut kept = self.kept.lock();
        let Some(upto) = kept.upto.clone().filter(|upto| upto.last_log_id < flushed.last_log_id) else {
            return flushed;
        };
        let files = kept.checkpoint.as_ref().map_or(0, |checkpoint| checkpoint.offer().size_bytes());
        if self.log.stats().segments as u64 * SEGMENT_BYTES <= files.max(KEPT_LOG_BYTES_MIN) {
            return upto;
        }
        warn!("the log is no longer kept for a peer: it has become larger than the files");
        kept.upto = None;
        flushed
    }

    /// Begins to send files that hold everything up to `from`: the log behind it is kept until a while after the end.
    pub(super) fn begin(self: &Arc<Self>, from: &SnapshotMeta) -> Sending {
        let mut kept = self.kept.lock();
        kept.sending += 1;
        if kept.upto.as_ref().is_none_or(|upto| from.last_log_id < upto.last_log_id) {
            kept.upto = Some(from.clone());
        }
        Sending { source: Arc::clone(self) }
    }

    /// The checkpoint at hand, if it holds everything up to `from`, or a new one.
    async fn checkpoint(&self, from: Option<LogId>) -> io::Result<(Arc<Checkpoint>, LogId)> {
        let _making = self.making.lock().await;
        let at_hand = self.kept.lock().checkpoint.clone();
        if let Some(checkpoint) = at_hand {
            let last = position(&checkpoint)?;
            if Some(last) >= from {
                return Ok((checkpoint, last));
            }
        }
        let (store, dir) = (self.state.store(), self.generations.checkpoint_dir());
        let made = blocking::spawn(move || Checkpoint::make(store.engine(), dir)).await;
        let checkpoint = Arc::new(made.map_err(io::Error::other)?.map_err(io::Error::other)?);
        let last = position(&checkpoint)?;
        info!(last = last.index(), bytes = checkpoint.offer().size_bytes(), "made a checkpoint for a peer");
        self.kept.lock().checkpoint = Some(Arc::clone(&checkpoint));
        Ok((checkpoint, last))
    }

    /// Waits until `bytes` more may be sent.
    pub(super) async fn pace(&self, bytes: usize) {
        let share = Duration::from_nanos(bytes as u64 * 1_000_000_000 / SEND_BYTES_PER_SECOND);
        let at = {
            let mut pace = self.pace.lock();
            let now = clock::now();
            *pace = (*pace).max(now.checked_sub(PACE_SLACK).unwrap_or(now)) + share;
            *pace
        };
        tokio::time::sleep_until(at.into()).await;
    }

    async fn release_when_unused(self: Arc<Self>) {
        tokio::time::sleep(KEPT_AFTER).await;
        let released = {
            let mut kept = self.kept.lock();
            let since = kept.last_use.map(|at| clock::now().duration_since(at));
            if kept.sending > 0 || since.is_none_or(|since| since < KEPT_AFTER) {
                return;
            }
            kept.release()
        };
        // Removes its files.
        let _ = blocking::spawn(move || drop(released)).await;
    }
}

fn position(checkpoint: &Checkpoint) -> io::Result<LogId> {
    let applied = checkpoint.applied().map(codec::decode_log_id).transpose()?;
    applied.ok_or_else(|| io::Error::other("a checkpoint of an empty store is of no use"))
}

/// Files on their way to a peer.
pub(crate) struct Sending {
    source: Arc<Source>,
}

impl Sending {
    /// What is sent: files that hold everything up to `from`, and the last entry in them.
    pub(super) async fn checkpoint(&self, from: Option<LogId>) -> io::Result<(Arc<Checkpoint>, LogId)> {
        self.source.checkpoint(from).await
    }

    /// Waits until `bytes` more may be sent.
    pub(super) async fn pace(&self, bytes: usize) {
        self.source.pace(bytes).await;
    }
}

impl Drop for Sending {
    fn drop(&mut self) {
        let mut kept = self.source.kept.lock();
        kept.sending -= 1;
        kept.last_use = Some(clock::now());
        if kept.sending == 0
            && let Ok(runtime) = tokio::runtime::Handle::try_current()
        {
            runtime.spawn(Arc::clone(&self.source).release_when_unused());
        }
    }
}

/// A peer's files, opened, that may take the place of this member's store. Dropping it removes them, unless they have.
pub(crate) struct Arrival {
    generations: Arc<Generations>,
    generation: Generation,
    store: Option<Arc<Store>>,
    meta: SnapshotMeta,
}

impl Arrival {
    /// Opens files that have all arrived, as a successor of `current`, and checks that they end where they are said to.
    ///
    /// # Errors
    /// When they are not what they are said to be; they are removed then.
    pub(super) fn open(
        generations: &Arc<Generations>,
        generation: Generation,
        current: &Store,
        last: LogId,
    ) -> Result<Arrival, ArrivalError> {
        let store = match current.open_successor(&generation.dir) {
            Ok(store) => Arc::new(store),
            Err(error) => {
                let _ = std::fs::remove_dir_all(&generation.dir);
                return Err(error.into());
            }
        };
        let read = level::load(store.engine()).map_err(ArrivalError::from);
        let read = read.and_then(|_| Ok(stored_position(&store)?));
        let (last_log_id, last_membership) = read.inspect_err(|_| store.engine().discard())?;
        let meta = SnapshotMeta { last_log_id, last_membership };
        let arrival = Arrival { generations: Arc::clone(generations), generation, store: Some(store), meta };
        if last_log_id == Some(last) {
            Ok(arrival)
        } else {
            Err(ArrivalError::Elsewhere { last_log_id, last })
        }
    }

    /// Up to where the files hold everything.
    pub(super) fn meta(&self) -> &SnapshotMeta {
        &self.meta
    }

    /// The store in the files; `None` once they are in place.
    pub(super) fn store(&self) -> Option<&Arc<Store>> {
        self.store.as_ref()
    }

    /// Makes the files the ones that the next start opens, and gives their store.
    pub(super) fn settle(mut self) -> io::Result<Arc<Store>> {
        let index = self.meta.last_log_id.map_or(0, |last| last.index());
        self.generations.make_current(&self.generation, index)?;
        self.store.take().ok_or_else(|| io::Error::other("the files have been put in place before"))
    }
}

impl Drop for Arrival {
    fn drop(&mut self) {
        if let Some(store) = &self.store {
            store.engine().discard();
        }
    }
}

/// Why a peer's files are not taken.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ArrivalError {
    /// They are not whole.
    #[error(transparent)]
    Snapshot(#[from] SnapshotError),
    /// They are no store.
    #[error(transparent)]
    Storage(#[from] StorageError),
    /// A record in them does not decode.
    #[error(transparent)]
    Records(#[from] io::Error),
    /// They end at another entry.
    #[error("the files end at {last_log_id:?}, not at {last}")]
    Elsewhere {
        /// Where they end.
        last_log_id: Option<LogId>,
        /// Where they were said to.
        last: LogId,
    },
}

/// Keeps a replaced store until its last reader is done, then closes it and removes its files.
pub(super) async fn retire(store: Arc<Store>) {
    const LOOK_EVERY: Duration = Duration::from_millis(100);
    store.engine().discard();
    while Arc::strong_count(&store) > 1 {
        tokio::time::sleep(LOOK_EVERY).await;
    }
    let _ = blocking::spawn(move || drop(store)).await;
}
