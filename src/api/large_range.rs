//! Large range answers, in bounded memory.
//!
//! A unary answer is one message whose length comes first. So a list that is too large to hold is read twice through the
//! same iterator, once to measure and once to send; the iterator pins what it saw, so both passes see the same:
//!
//! ```text
//! read up to LARGE_BYTES ── ended ──> one message
//!          │ more
//! measure the rest ──> length known: header and first part go out
//!          │
//! read again, piece by piece ──> as fast as the client takes them
//! ```

use std::sync::{Arc, LazyLock};
use std::time::Duration;

use bytes::Bytes;
use prost::encoding::encoded_len_varint;
use tokio::runtime::Handle;
use tokio::sync::{Semaphore, mpsc, oneshot};
use tonic::Status;

use super::error::Error;
use super::kv::{Ranged, on_thread};
use super::range_encoder::{Progress, RangeEncoder};
use super::unary::Pieces;
use crate::proto::wire::Encoded;
use crate::storage::mvcc::read::{Record, Scan};
use crate::storage::mvcc::{KeyRange, Store};

/// Size from which an answer is sent in pieces, in bytes.
const LARGE_BYTES: usize = 4 << 20;
/// Size of a piece, in bytes.
const PIECE_BYTES: usize = 256 << 10;
/// Pieces that wait for the client.
const PIECES_WAITING: usize = 2;
/// Large answers under way at once; each holds a thread, and more would only share the same disk and core.
const LARGE_MAX: usize = 4;
/// How long a client may take no piece at all before its answer is given up.
const STALLED: Duration = Duration::from_secs(30);

static LARGE: LazyLock<Semaphore> = LazyLock::new(|| Semaphore::new(LARGE_MAX));

/// A range that is not finished yet.
pub(super) struct Rest {
    pub(super) store: Arc<Store>,
    pub(super) encoder: RangeEncoder,
    pub(super) progress: Progress,
    pub(super) range: KeyRange,
    pub(super) revision: i64,
    pub(super) limit: usize,
}

impl Rest {
    /// Reads on, on a blocking thread.
    pub(super) async fn read_on_thread(mut self) -> Result<Ranged, Error> {
        let mut this = on_thread(move || {
            if self.progress == Progress::Paused {
                let (range, limit) = (&self.range, self.limit);
                self.progress =
                    self.encoder.read(&self.store, range, self.revision, limit, usize::MAX, LARGE_BYTES)?;
            }
            Ok(self)
        })
        .await?;
        if this.progress != Progress::Paused {
            return on_thread(move || {
                let store = &this.store;
                let count = this.encoder.count(store, &this.range, this.revision, this.progress)?;
                store.check_readable(this.revision)?;
                let more = this.progress == Progress::Limited;
                Ok(Ranged::Whole(Encoded(this.encoder.finish(more, count))))
            })
            .await;
        }
        let permit = LARGE.acquire().await.map_err(|_| Error::Stopped)?;
        let (measured, length) = oneshot::channel();
        let (pieces, rest) = mpsc::channel(PIECES_WAITING);
        let first = this.encoder.take();
        let sent = first.len();
        let runtime = Handle::current();
        #[expect(
            clippy::disallowed_methods,
            reason = "it waits for its reader, which a simulation of one thread cannot do"
        )]
        tokio::task::spawn_blocking(move || {
            let _permit = permit;
            this.send(sent, measured, &pieces, &runtime);
        });
        match length.await {
            Ok(Ok(length)) => Ok(Ranged::InPieces(Pieces { length, first, rest })),
            Ok(Err(error)) => Err(error),
            Err(_) => Err(Error::Stopped),
        }
    }

    fn send(
        &mut self,
        sent: usize,
        measured: oneshot::Sender<Result<usize, Error>>,
        pieces: &mpsc::Sender<Result<Bytes, Status>>,
        runtime: &Handle,
    ) {
        let store = Arc::clone(&self.store);
        let rest = self.encoder.rest(&self.range);
        let mut scan = store.scan_past_cache(&rest, self.revision);
        let trailer = match self.measure(&mut scan) {
            Err(error) => {
                let _ = measured.send(Err(error));
                return;
            }
            Ok((length, trailer)) => {
                if measured.send(Ok(sent + length + trailer.len())).is_err() {
                    return;
                }
                trailer
            }
        };
        scan.restart();
        if let Err(error) = self.send_records(&mut scan, trailer, pieces, runtime) {
            let _ = pieces.try_send(Err(error.into()));
        }
    }

    /// Length of the records still to come, and the bytes that end the message.
    fn measure(&mut self, scan: &mut Scan<'_>) -> Result<(usize, Bytes), Error> {
        let mut length = 0;
        let mut records = 0;
        let mut progress = Progress::Exhausted;
        let taken = self.encoder.taken;
        while let Some(record) = scan.next()? {
            if self.limit > 0 && taken + records == self.limit {
                progress = Progress::Limited;
                break;
            }
            let size = self.encoder.record_len(&record);
            length += 1 + encoded_len_varint(size as u64) + size;
            records += 1;
        }
        let store = &self.store;
        store.check_readable(self.revision)?;
        let count = if progress == Progress::Limited {
            store.count(&self.range, self.revision)?
        } else {
            i64::try_from(taken + records).unwrap_or(i64::MAX)
        };
        self.limit = taken + records;
        let mut trailer = self.encoder.empty();
        trailer.put_trailer(progress == Progress::Limited, count);
        Ok((length, trailer.take()))
    }

    fn send_records(
        &mut self,
        scan: &mut Scan<'_>,
        trailer: Bytes,
        pieces: &mpsc::Sender<Result<Bytes, Status>>,
        runtime: &Handle,
    ) -> Result<(), Error> {
        let send = |piece: Bytes| {
            let sent = runtime.block_on(tokio::time::timeout(STALLED, pieces.send(Ok(piece))));
            matches!(sent, Ok(Ok(())))
        };
        while self.encoder.taken < self.limit {
            let Some(Record { key, meta, value }) = scan.next()? else { break };
            self.encoder.put_record(key, &meta, value);
            if self.encoder.len() >= PIECE_BYTES && !send(self.encoder.take()) {
                return Ok(());
            }
        }
        if send(self.encoder.take()) {
            send(trailer);
        }
        Ok(())
    }
}
