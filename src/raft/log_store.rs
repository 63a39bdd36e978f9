//! openraft's log on top of `storage/log`.

use std::fmt::Debug;
use std::io;
use std::ops::{Bound, RangeBounds};
use std::sync::Arc;

use openraft::OptionalSend;
use openraft::storage::{IOFlushed, LogState, RaftLogReader, RaftLogStorage};
use parking_lot::Mutex;
use tokio::sync::oneshot;

use super::codec;
use super::types::{Entry, LogId, TypeConfig, Vote};
use crate::storage::log::{Log, LogError, Recovered};

/// Bytes of entries in one AppendEntries, unless a single entry is larger.
const READ_BYTES_MAX: usize = 1 << 20;

/// The log as openraft uses it; clones share it.
#[derive(Clone)]
pub(crate) struct LogStore {
    log: Log,
    known: Arc<Mutex<Known>>,
}

/// What is asked for more often than it changes.
struct Known {
    vote: Option<Vote>,
    committed: Option<LogId>,
    purged: Option<LogId>,
}

impl LogStore {
    /// Takes over an opened log.
    pub(crate) fn new(log: Log, recovered: Recovered) -> io::Result<LogStore> {
        let known = Known {
            vote: recovered.vote.map(codec::decode_vote).transpose()?,
            committed: recovered.committed.map(|bytes| codec::decode_log_id(&bytes)).transpose()?,
            purged: recovered.purged.map(|bytes| codec::decode_log_id(&bytes)).transpose()?,
        };
        Ok(LogStore { log, known: Arc::new(Mutex::new(known)) })
    }

    fn entries(&self, from: u64, to: u64, max_bytes: usize) -> io::Result<Vec<Entry>> {
        let bounds = self.log.bounds();
        let (from, to) = (from.max(bounds.start), to.min(bounds.end));
        let mut entries = Vec::new();
        let mut next = from;
        while next < to {
            let read = self.log.read(next..to, max_bytes).map_err(failure)?;
            // Nothing: the rest was truncated since the bounds were asked for.
            let truncated = read.is_empty();
            for (index, payload) in read {
                entries.push(codec::decode_entry(payload)?);
                next = index + 1;
            }
            if truncated || max_bytes != usize::MAX {
                break;
            }
        }
        Ok(entries)
    }
}

fn failure(error: LogError) -> io::Error {
    io::Error::other(error)
}

fn bounds(range: &impl RangeBounds<u64>) -> (u64, u64) {
    let from = match range.start_bound() {
        Bound::Included(index) => *index,
        Bound::Excluded(index) => index + 1,
        Bound::Unbounded => 0,
    };
    let to = match range.end_bound() {
        Bound::Included(index) => index + 1,
        Bound::Excluded(index) => *index,
        Bound::Unbounded => u64::MAX,
    };
    (from, to)
}

impl RaftLogReader<TypeConfig> for LogStore {
    async fn try_get_log_entries<RB: RangeBounds<u64> + Clone + Debug + OptionalSend>(
        &mut self,
        range: RB,
    ) -> Result<Vec<Entry>, io::Error> {
        let (from, to) = bounds(&range);
        self.entries(from, to, usize::MAX)
    }

    async fn read_vote(&mut self) -> Result<Option<Vote>, io::Error> {
        Ok(self.known.lock().vote)
    }

    async fn limited_get_log_entries(&mut self, start: u64, end: u64) -> Result<Vec<Entry>, io::Error> {
        self.entries(start, end, READ_BYTES_MAX)
    }
}

impl RaftLogStorage<TypeConfig> for LogStore {
    type LogReader = LogStore;

    async fn get_log_state(&mut self) -> Result<LogState<TypeConfig>, io::Error> {
        let purged = self.known.lock().purged;
        let bounds = self.log.bounds();
        let last = match bounds.end.checked_sub(1).filter(|last| *last >= bounds.start) {
            Some(last) => self.entries(last, last + 1, usize::MAX)?.pop().map(|entry| entry.log_id),
            None => None,
        };
        Ok(LogState { last_purged_log_id: purged, last_log_id: last.or(purged) })
    }

    async fn get_log_reader(&mut self) -> LogStore {
        self.clone()
    }

    async fn save_vote(&mut self, vote: &Vote) -> Result<(), io::Error> {
        let (done, saved) = oneshot::channel();
        self.known.lock().vote = Some(*vote);
        self.log
            .save_vote(codec::encode_vote(vote), move |result| {
                let _ = done.send(result);
            })
            .map_err(failure)?;
        wait(saved).await
    }

    async fn save_committed(&mut self, committed: Option<LogId>) -> Result<(), io::Error> {
        if let Some(committed) = committed {
            self.known.lock().committed = Some(committed);
            self.log.save_committed(codec::encode_log_id(&committed)).map_err(failure)?;
        }
        Ok(())
    }

    async fn read_committed(&mut self) -> Result<Option<LogId>, io::Error> {
        Ok(self.known.lock().committed)
    }

    async fn append<I>(&mut self, entries: I, callback: IOFlushed<TypeConfig>) -> Result<(), io::Error>
    where
        I: IntoIterator<Item = Entry> + OptionalSend,
        I::IntoIter: OptionalSend,
    {
        let encoded =
            entries.into_iter().map(|entry| (entry.log_id.index(), codec::encode_entry(&entry))).collect();
        self.log.append(encoded, move |result| callback.io_completed(result)).map_err(failure)
    }

    async fn truncate_after(&mut self, last_log_id: Option<LogId>) -> Result<(), io::Error> {
        let (done, truncated) = oneshot::channel();
        let from = last_log_id.map_or_else(|| self.log.bounds().start, |log_id| log_id.index() + 1);
        self.log
            .truncate_from(from, move |result| {
                let _ = done.send(result);
            })
            .map_err(failure)?;
        wait(truncated).await
    }

    async fn purge(&mut self, log_id: LogId) -> Result<(), io::Error> {
        let (done, purged) = oneshot::channel();
        self.known.lock().purged = Some(log_id);
        self.log
            .purge_to(log_id.index(), codec::encode_log_id(&log_id), move |result| {
                let _ = done.send(result);
            })
            .map_err(failure)?;
        wait(purged).await
    }
}

async fn wait(done: oneshot::Receiver<io::Result<()>>) -> io::Result<()> {
    done.await.unwrap_or_else(|_| Err(io::Error::other("the raft log is closed")))
}
