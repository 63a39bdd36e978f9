//! Saving a system call per request: HTTP/2 ping acknowledgements travel with the next answer.
//!
//! grpc-go measures its connections with a ping after each answer that it reads. Acknowledged at once, every request
//! costs two writes, and a write on a socket is the most expensive thing that a small request does. So an acknowledgement
//! that would be written alone is held for a moment:
//!
//! ```text
//! client   request, ping ──>            ping ──>
//! server              (ack held) <── ack + answer     or, with nothing to say, ack after HELD_FOR
//! ```
//!
//! Nothing else is held, and bytes are never reordered.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use hyper::rt::{Read, ReadBufCursor, Write};
use tokio::time::Sleep;

use crate::clock;

/// How long an acknowledgement may wait: about what a small request takes.
const HELD_FOR: Duration = Duration::from_millis(1);
/// Size of a ping frame: a header of nine bytes and eight of payload.
const PING_BYTES: usize = 17;
/// Length, type and flags of a ping acknowledgement, and stream 0.
const ACK_HEADER: [u8; 9] = [0, 0, 8, 6, 1, 0, 0, 0, 0];

/// A connection whose lone ping acknowledgements are held.
pub(super) struct HoldAcks<T> {
    inner: T,
    held: Vec<u8>,
    deadline: Pin<Box<Sleep>>,
    waiting: bool,
}

impl<T> HoldAcks<T> {
    pub(super) fn new(inner: T) -> HoldAcks<T> {
        let deadline = Box::pin(tokio::time::sleep(Duration::ZERO));
        HoldAcks { inner, held: Vec::new(), deadline, waiting: false }
    }
}

impl<T: Write + Unpin> HoldAcks<T> {
    /// Writes what is held, on its own.
    fn poll_release(&mut self, task: &mut Context<'_>) -> Poll<io::Result<()>> {
        while !self.held.is_empty() {
            let written = ready!(Pin::new(&mut self.inner).poll_write(task, &self.held))?;
            if written == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            self.held.drain(..written);
        }
        self.waiting = false;
        Poll::Ready(Ok(()))
    }

    /// Writes what is held together with more; the result counts only the latter.
    fn poll_write_behind_held(
        &mut self,
        task: &mut Context<'_>,
        parts: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let mut all = Vec::with_capacity(parts.len() + 1);
        all.push(io::IoSlice::new(&self.held));
        all.extend(parts.iter().map(|part| io::IoSlice::new(part)));
        let written = ready!(Pin::new(&mut self.inner).poll_write_vectored(task, &all))?;
        let of_held = written.min(self.held.len());
        self.held.drain(..of_held);
        if self.held.is_empty() {
            self.waiting = false;
        }
        if written == of_held && written > 0 {
            // Only held bytes went out: the caller's have to wait for their turn.
            task.waker().wake_by_ref();
            return Poll::Pending;
        }
        Poll::Ready(Ok(written - of_held))
    }

    fn poll_write_parts(
        &mut self,
        task: &mut Context<'_>,
        parts: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let is_lone_ack = self.held.is_empty() && {
            let mut parts = parts.iter().filter(|part| !part.is_empty());
            matches!((parts.next(), parts.next()), (Some(part), None)
                if part.len() == PING_BYTES && part.starts_with(&ACK_HEADER))
        };
        if is_lone_ack {
            self.held.extend(parts.iter().flat_map(|part| part.iter()));
            return Poll::Ready(Ok(PING_BYTES));
        }
        if self.held.is_empty() {
            return Pin::new(&mut self.inner).poll_write_vectored(task, parts);
        }
        self.poll_write_behind_held(task, parts)
    }
}

impl<T: Read + Unpin> Read for HoldAcks<T> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        task: &mut Context<'_>,
        buffer: ReadBufCursor<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_read(task, buffer)
    }
}

impl<T: Write + Unpin> Write for HoldAcks<T> {
    fn poll_write(mut self: Pin<&mut Self>, task: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.poll_write_parts(task, &[io::IoSlice::new(bytes)])
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        task: &mut Context<'_>,
        parts: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.poll_write_parts(task, parts)
    }

    fn is_write_vectored(&self) -> bool {
        self.inner.is_write_vectored()
    }

    /// What is held counts as flushed; its deadline wakes the connection, which then flushes again.
    fn poll_flush(mut self: Pin<&mut Self>, task: &mut Context<'_>) -> Poll<io::Result<()>> {
        if !self.held.is_empty() {
            if !self.waiting {
                self.waiting = true;
                let deadline = clock::now() + HELD_FOR;
                self.deadline.as_mut().reset(deadline.into());
            }
            if self.deadline.as_mut().poll(task).is_ready() {
                ready!(self.poll_release(task))?;
            }
        }
        Pin::new(&mut self.inner).poll_flush(task)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, task: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.poll_release(task))?;
        Pin::new(&mut self.inner).poll_shutdown(task)
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;

    use hyper_util::rt::TokioIo;
    use tokio::io::AsyncReadExt;

    use super::*;

    const ACK: [u8; PING_BYTES] = [0, 0, 8, 6, 1, 0, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8];

    async fn write(connection: &mut (impl Write + Unpin), bytes: &[u8]) {
        let mut rest = bytes;
        while !rest.is_empty() {
            let written = poll_fn(|task| Pin::new(&mut *connection).poll_write(task, rest)).await;
            rest = &rest[written.expect("the other end reads")..];
        }
        let flushed = poll_fn(|task| Pin::new(&mut *connection).poll_flush(task)).await;
        flushed.expect("it flushes");
    }

    #[tokio::test(start_paused = true)]
    async fn an_ack_goes_out_with_the_next_bytes_or_alone_when_its_time_is_up() {
        let (ours, mut theirs) = tokio::io::duplex(1024);
        let mut connection = HoldAcks::new(TokioIo::new(ours));
        write(&mut connection, &ACK).await;
        write(&mut connection, b"answer").await;
        let mut read = [0; PING_BYTES + 6];
        theirs.read_exact(&mut read).await.expect("both are there");
        assert_eq!(read[..PING_BYTES], ACK);
        assert_eq!(&read[PING_BYTES..], b"answer");

        write(&mut connection, &ACK).await;
        tokio::time::advance(HELD_FOR * 2).await;
        let flushed = poll_fn(|task| Pin::new(&mut connection).poll_flush(task)).await;
        flushed.expect("it flushes");
        let mut read = [0; PING_BYTES];
        theirs.read_exact(&mut read).await.expect("it is there");
        assert_eq!(read, ACK);
    }

    #[tokio::test]
    async fn order_holds_through_a_narrow_pipe() {
        let (ours, mut theirs) = tokio::io::duplex(5);
        let mut connection = HoldAcks::new(TokioIo::new(ours));
        let writing = tokio::spawn(async move {
            for _ in 0..20 {
                write(&mut connection, &ACK).await;
                write(&mut connection, b"some longer answer").await;
            }
            let ended = poll_fn(|task| Pin::new(&mut connection).poll_shutdown(task)).await;
            ended.expect("it ends");
        });
        let mut all = Vec::new();
        theirs.read_to_end(&mut all).await.expect("it ends");
        writing.await.expect("the writer ends");
        let expected: Vec<u8> = [&ACK[..], b"some longer answer"].concat().repeat(20);
        assert_eq!(all, expected);
    }
}
