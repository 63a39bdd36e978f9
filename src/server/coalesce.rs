//! One system call for all that a connection has to say: the socket write is the dearest part of a small request.
//!
//! HTTP/2 writes frame by frame, and what it may not copy it flushes at once, so an answer of a few hundred bytes costs
//! two or three writes and a watch stream one per message. Here the connection writes into a buffer, and the buffer goes
//! out once, after each time the connection has run:
//!
//! ```text
//! poll:  read requests, run streams ──> frames ──> buffer      (large slices go straight through)
//! after: buffer ──one write──> socket
//! ```
//!
//! grpc-go also measures its connections with a ping after each answer that it reads. Acknowledged at once, that alone
//! would double the writes; so a buffer that holds nothing but such acknowledgements waits a moment for the next answer.
//! Bytes are never reordered, and nothing else waits.
//!
//! The last words to a client that pings too often (`pings`) are put here, behind all that was written.

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::{Buf, BufMut, BytesMut};
use hyper::rt::{Read, ReadBufCursor, Write};
use parking_lot::Mutex;
use tokio::time::Sleep;

use super::pings::{Frames, Pings};
use crate::clock;

/// Bytes collected before they are written without waiting for the end of the poll.
const BUFFER_BYTES: usize = 64 << 10;
/// A slice from this size on is not worth copying when nothing is before it.
const STRAIGHT_BYTES: usize = 16 << 10;
/// How long an acknowledgement may wait: what a small request takes under load. Clients give a ping seconds; the time that
/// grpc-go takes from these ones only scales its window, which matters when answers are large and then go out at once.
const HELD_FOR: Duration = Duration::from_millis(20);
/// How long the client may read the last words, before what it sent and nobody read makes the kernel cut the connection.
const LINGER: Duration = Duration::from_secs(1);
/// The last words: type, flags and stream of a GOAWAY, its error (enhance your calm) and its reason.
const GOAWAY_HEADER: [u8; 6] = [7, 0, 0, 0, 0, 0];
const GOAWAY_ERROR: u32 = 0xb;
const GOAWAY_REASON: &[u8] = b"too_many_pings";
/// A ping acknowledgement: a header of nine bytes and eight of payload.
const ACK_BYTES: usize = 17;
/// Length, type and flags of a ping acknowledgement, and stream 0.
const ACK_HEADER: [u8; 9] = [0, 0, 8, 6, 1, 0, 0, 0, 0];

/// Both ends of a coalescing connection: the socket as the connection sees it, and the loop that runs the connection.
pub(super) fn coalesce<T>(socket: T, pings: Arc<Pings>) -> (Buffered<T>, Flusher<T>) {
    let shared = Shared {
        socket,
        buffer: BytesMut::new(),
        in_frame: false,
        frames: Frames::default(),
        pings: Arc::clone(&pings),
    };
    let shared = Arc::new(Mutex::new(shared));
    (Buffered(Arc::clone(&shared)), Flusher { shared, pings })
}

struct Shared<T> {
    socket: T,
    buffer: BytesMut,
    /// The socket took a part of what was given, so the next byte may belong to the same frame.
    in_frame: bool,
    /// What is given, as frames.
    frames: Frames,
    pings: Arc<Pings>,
}

impl<T: Write + Unpin> Shared<T> {
    /// Writes out what is buffered.
    fn poll_drain(&mut self, task: &mut Context<'_>) -> Poll<io::Result<()>> {
        while !self.buffer.is_empty() {
            let written = ready!(Pin::new(&mut self.socket).poll_write(task, &self.buffer))?;
            if written == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            self.buffer.advance(written);
        }
        Poll::Ready(Ok(()))
    }

    fn poll_put(&mut self, task: &mut Context<'_>, parts: &[io::IoSlice<'_>]) -> Poll<io::Result<usize>> {
        let total = parts.iter().map(|part| part.len()).sum::<usize>();
        if self.buffer.is_empty() && total >= STRAIGHT_BYTES {
            let written = ready!(Pin::new(&mut self.socket).poll_write_vectored(task, parts))?;
            self.note(parts, written);
            self.in_frame = written < total;
            return Poll::Ready(Ok(written));
        }
        if self.buffer.len() >= BUFFER_BYTES {
            ready!(self.poll_drain(task))?;
        }
        self.buffer.reserve(total);
        for part in parts {
            self.buffer.extend_from_slice(part);
        }
        self.note(parts, total);
        self.in_frame = false;
        Poll::Ready(Ok(total))
    }

    /// Notes what goes out: so many bytes of these parts.
    fn note(&mut self, parts: &[io::IoSlice<'_>], mut written: usize) {
        for part in parts {
            let taken = part.len().min(written);
            written -= taken;
            if self.frames.answer_begins_in(&part[..taken]) {
                self.pings.note_answer();
            }
        }
    }

    /// Puts the last words to a client that pings too often, whose last stream this is.
    fn put_goaway(&mut self, last_stream: u32) {
        if self.in_frame {
            return;
        }
        let length = 8 + GOAWAY_REASON.len();
        self.buffer.put_uint(length as u64, 3);
        self.buffer.put_slice(&GOAWAY_HEADER);
        self.buffer.put_u32(last_stream);
        self.buffer.put_u32(GOAWAY_ERROR);
        self.buffer.put_slice(GOAWAY_REASON);
    }

    fn holds_only_acks(&self) -> bool {
        is_only_acks(&self.buffer)
    }
}

fn is_only_acks(bytes: &[u8]) -> bool {
    bytes.len().is_multiple_of(ACK_BYTES)
        && bytes.chunks(ACK_BYTES).all(|frame| frame.starts_with(&ACK_HEADER))
}

/// The socket as the connection sees it.
pub(super) struct Buffered<T>(Arc<Mutex<Shared<T>>>);

impl<T: Read + Unpin> Read for Buffered<T> {
    fn poll_read(
        self: Pin<&mut Self>,
        task: &mut Context<'_>,
        into: ReadBufCursor<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0.lock().socket).poll_read(task, into)
    }
}

impl<T: Write + Unpin> Write for Buffered<T> {
    fn poll_write(self: Pin<&mut Self>, task: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.0.lock().poll_put(task, &[io::IoSlice::new(bytes)])
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        task: &mut Context<'_>,
        parts: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.0.lock().poll_put(task, parts)
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    /// Done at once: the flusher writes when the connection has run.
    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, task: &mut Context<'_>) -> Poll<io::Result<()>> {
        let mut shared = self.0.lock();
        ready!(shared.poll_drain(task))?;
        Pin::new(&mut shared.socket).poll_shutdown(task)
    }
}

/// Runs a connection and writes out its buffer; see the module.
pub(super) struct Flusher<T> {
    shared: Arc<Mutex<Shared<T>>>,
    pings: Arc<Pings>,
}

impl<T: Write + Unpin> Flusher<T> {
    /// Runs the connection to its end; `None` if it was cut off for its pings.
    pub(super) async fn run<F: Future>(self, connection: F) -> Option<F::Output> {
        let mut connection = std::pin::pin!(connection);
        let mut hold = Hold { deadline: Box::pin(tokio::time::sleep(Duration::ZERO)), waiting: false };
        let mut finished = None;
        let output = std::future::poll_fn(|task| {
            if finished.is_none()
                && let Poll::Ready(output) = connection.as_mut().poll(task)
            {
                finished = Some(Some(output));
            }
            let mut shared = self.shared.lock();
            if finished.is_none()
                && let Some(last_stream) = self.pings.too_many()
            {
                shared.put_goaway(last_stream);
                finished = Some(None);
            }
            if finished.is_none()
                && shared.holds_only_acks()
                && hold.poll_wait(task, shared.buffer.is_empty()).is_pending()
            {
                return Poll::Pending;
            }
            hold.waiting = false;
            let drained = shared.poll_drain(task);
            if let Poll::Ready(Err(_)) = drained {
                // The connection meets the same error at its next read or write, and reports it.
                shared.buffer.clear();
            }
            if drained.is_pending() {
                return Poll::Pending;
            }
            finished.take().map_or(Poll::Pending, Poll::Ready)
        })
        .await;
        if output.is_none() {
            let shut =
                std::future::poll_fn(|task| Pin::new(&mut self.shared.lock().socket).poll_shutdown(task));
            // It is cut off in any case.
            let _ = tokio::time::timeout(LINGER, shut).await;
            tokio::time::sleep(LINGER).await;
        }
        output
    }
}

/// The wait of acknowledgements that have nothing to travel with.
struct Hold {
    deadline: Pin<Box<Sleep>>,
    waiting: bool,
}

impl Hold {
    fn poll_wait(&mut self, task: &mut Context<'_>, nothing_held: bool) -> Poll<()> {
        if nothing_held {
            self.waiting = false;
            return Poll::Pending;
        }
        if !self.waiting {
            self.waiting = true;
            self.deadline.as_mut().reset((clock::now() + HELD_FOR).into());
        }
        self.deadline.as_mut().poll(task)
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;

    use hyper_util::rt::TokioIo;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::super::pings::Heard;
    use super::*;

    const ACK: [u8; ACK_BYTES] = [0, 0, 8, 6, 1, 0, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8];

    async fn write<T: Write + Unpin>(connection: &mut Buffered<T>, bytes: &[u8]) {
        let mut rest = bytes;
        while !rest.is_empty() {
            let written = poll_fn(|task| Pin::new(&mut *connection).poll_write(task, rest)).await;
            rest = &rest[written.expect("the other end reads")..];
        }
    }

    #[tokio::test(start_paused = true)]
    async fn an_ack_goes_out_with_the_next_bytes_or_alone_when_its_time_is_up() {
        let (ours, mut theirs) = tokio::io::duplex(1024);
        let (mut connection, flusher) = coalesce(TokioIo::new(ours), Pings::new(Some(Duration::ZERO)));
        let (next, mut turns) = tokio::sync::mpsc::channel::<&'static [u8]>(4);
        tokio::spawn(flusher.run(async move {
            while let Some(bytes) = turns.recv().await {
                write(&mut connection, bytes).await;
            }
        }));
        next.send(&ACK).await.expect("it runs");
        next.send(b"answer").await.expect("it runs");
        let mut read = [0; ACK_BYTES + 6];
        let started = clock::now();
        theirs.read_exact(&mut read).await.expect("both are there");
        assert_eq!(read[..ACK_BYTES], ACK);
        assert_eq!(&read[ACK_BYTES..], b"answer");
        assert!(started.elapsed() < Duration::from_secs(5));
        next.send(&ACK).await.expect("it runs");
        let mut read = [0; ACK_BYTES];
        theirs.read_exact(&mut read).await.expect("it comes alone");
        assert_eq!(read, ACK);
    }

    #[tokio::test]
    async fn order_holds_through_a_narrow_pipe_and_everything_is_out_at_the_end() {
        let (ours, mut theirs) = tokio::io::duplex(5);
        let (mut connection, flusher) = coalesce(TokioIo::new(ours), Pings::new(Some(Duration::ZERO)));
        let large = vec![7; STRAIGHT_BYTES + 1];
        let sent = large.clone();
        let running = tokio::spawn(flusher.run(async move {
            for _ in 0..20 {
                write(&mut connection, &ACK).await;
                write(&mut connection, b"some longer answer").await;
            }
            write(&mut connection, &sent).await;
            write(&mut connection, b"end").await;
        }));
        let mut all = Vec::new();
        theirs.read_to_end(&mut all).await.expect("it ends");
        running.await.expect("the connection ends");
        let expected =
            [[&ACK[..], b"some longer answer"].concat().repeat(20), large, b"end".to_vec()].concat();
        assert_eq!(all, expected);
    }

    #[tokio::test(start_paused = true)]
    async fn a_client_that_pings_too_often_reads_why_it_is_sent_away() {
        let (ours, mut theirs) = tokio::io::duplex(1024);
        let pings = Pings::new(Some(Duration::ZERO));
        let heard = Heard::new(ours, Arc::clone(&pings));
        let (mut connection, flusher) = coalesce(TokioIo::new(heard), pings);
        let running = tokio::spawn(flusher.run(async move {
            write(&mut connection, b"answer").await;
            loop {
                let mut bytes = [0; 64];
                let mut into = hyper::rt::ReadBuf::new(&mut bytes);
                let read = poll_fn(|task| Pin::new(&mut connection).poll_read(task, into.unfilled())).await;
                read.expect("it can be read");
            }
        }));
        let ping = [0, 0, 8, 6, 0, 0, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8];
        let headers = [0, 0, 0, 1, 4, 0, 0, 0, 5];
        let sent = [b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", &headers[..], &ping.repeat(4)].concat();
        theirs.write_all(&sent).await.expect("it is read");
        let mut all = Vec::new();
        theirs.read_to_end(&mut all).await.expect("it ends");
        assert!(running.await.expect("it does not panic").is_none());
        let goaway = [&[0, 0, 22, 7, 0, 0, 0, 0, 0, 0, 0, 0, 5, 0, 0, 0, 11][..], b"too_many_pings"].concat();
        assert_eq!(all, [b"answer", &goaway[..]].concat());
    }
}
