//! Maintenance.Snapshot: the store as of now as etcd's backend file, in pieces, and the SHA-256 of them all.
//!
//! ```text
//! thread   sort, measure ──> size known ──> pages ──> pieces of 32 KiB ──> checksum
//!                                                        │ a few wait
//! stream                                                 └──> as fast as the client takes them
//! ```
//!
//! Sizes and order of the messages are etcd's. etcd: `server/etcdserver/api/v3rpc/maintenance.go`.

use std::io::{self, Write};
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use bytes::Bytes;
use futures::StreamExt;
use futures::stream::BoxStream;
use sha2::{Digest, Sha256};
use tokio::runtime::Handle;
use tokio::sync::{Semaphore, mpsc};
use tokio_stream::wrappers::ReceiverStream;
use tonic::Status;
use tracing::{info, warn};

use super::Context;
use super::error::Error;
use crate::clock;
use crate::proto::etcdserverpb::SnapshotResponse;
use crate::storage::etcd::{Export, ExportError, ExportOptions};

/// Bytes of a piece. etcd: `snapshotSendBufferSize`.
const PIECE_BYTES: usize = 32 << 10;
/// Pieces that wait for the client.
const PIECES_WAITING: usize = 16;
/// Snapshots under way at once: each holds a thread and some tens of megabytes, and keeps replaced files from being removed.
const SNAPSHOTS_MAX: usize = 2;
/// How long a client may take no piece at all before its snapshot is given up.
const STALLED: Duration = Duration::from_secs(120);

static SNAPSHOTS: LazyLock<Arc<Semaphore>> = LazyLock::new(|| Arc::new(Semaphore::new(SNAPSHOTS_MAX)));

/// Starts a snapshot and gives its messages; a failure is the last of them.
pub(super) async fn stream(
    context: Arc<Context>,
) -> Result<BoxStream<'static, Result<SnapshotResponse, Status>>, Status> {
    let permit = Arc::clone(&SNAPSHOTS).acquire_owned().await.map_err(|_| Error::Stopped)?;
    let (sender, pieces) = mpsc::channel(PIECES_WAITING);
    let runtime = Handle::current();
    #[expect(
        clippy::disallowed_methods,
        reason = "it waits for its reader, which a simulation of one thread cannot do"
    )]
    tokio::task::spawn_blocking(move || {
        let _permit = permit;
        if let Err(error) = send(&context, &sender, &runtime) {
            warn!(%error, "snapshot not sent");
            // Without it, a client would take what it has for all there is.
            let told = sender.send(Err(status(&error)));
            let _ = runtime.block_on(tokio::time::timeout(STALLED, told));
        }
    });
    Ok(ReceiverStream::new(pieces).boxed())
}

fn status(error: &ExportError) -> Status {
    match error {
        ExportError::NoRoom { .. } => Status::resource_exhausted(error.to_string()),
        _ => Error::Storage(error.to_string()).into(),
    }
}

fn send(
    context: &Context,
    pieces: &mpsc::Sender<Result<SnapshotResponse, Status>>,
    runtime: &Handle,
) -> Result<(), ExportError> {
    let started = clock::now();
    let (dir, dir_bytes_max) = context.space.scratch()?;
    let store = context.state.store();
    let mut export = Export::measure(&store, &ExportOptions { dir, dir_bytes_max })?;
    let (total_bytes, version) = (export.size_bytes(), export.storage_version().to_owned());
    info!("total-bytes" = total_bytes, "storage-version" = version, "sending database snapshot to client");
    let out = Pieces {
        pieces,
        runtime,
        version,
        remaining_bytes: total_bytes,
        piece: Vec::with_capacity(PIECE_BYTES),
        sum: Sha256::new(),
    };
    export.write(out)?.finish()?;
    let took = clock::now().duration_since(started);
    context.metrics.peers.snapshot_read.observe(took.as_secs_f64());
    info!("total-bytes" = total_bytes, took = ?took, "sent database snapshot to client");
    Ok(())
}

/// Cuts what is written into messages.
struct Pieces<'p> {
    pieces: &'p mpsc::Sender<Result<SnapshotResponse, Status>>,
    runtime: &'p Handle,
    version: String,
    remaining_bytes: u64,
    piece: Vec<u8>,
    sum: Sha256,
}

impl Pieces<'_> {
    /// Sends what is left, and the checksum.
    fn finish(mut self) -> io::Result<()> {
        if !self.piece.is_empty() {
            self.send_piece()?;
        }
        let sum = std::mem::take(&mut self.sum).finalize();
        self.send(Bytes::copy_from_slice(&sum))
    }

    fn send_piece(&mut self) -> io::Result<()> {
        let piece = std::mem::replace(&mut self.piece, Vec::with_capacity(PIECE_BYTES));
        self.sum.update(&piece);
        self.remaining_bytes = self.remaining_bytes.saturating_sub(piece.len() as u64);
        self.send(piece.into())
    }

    fn send(&self, blob: Bytes) -> io::Result<()> {
        let (remaining_bytes, version) = (self.remaining_bytes, self.version.clone());
        let message = SnapshotResponse { header: None, remaining_bytes, blob, version };
        match self.runtime.block_on(tokio::time::timeout(STALLED, self.pieces.send(Ok(message)))) {
            Ok(Ok(())) => Ok(()),
            Ok(Err(_)) => Err(io::Error::new(io::ErrorKind::BrokenPipe, "the client went away")),
            Err(_) => Err(io::Error::new(io::ErrorKind::TimedOut, "the client takes nothing")),
        }
    }
}

impl Write for Pieces<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let taken = bytes.len().min(PIECE_BYTES - self.piece.len());
        self.piece.extend_from_slice(&bytes[..taken]);
        if self.piece.len() == PIECE_BYTES {
            self.send_piece()?;
        }
        Ok(taken)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
