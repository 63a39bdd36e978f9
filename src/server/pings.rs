//! Clients that ping too often are sent away, as grpc-go's server does: a ping costs a wake-up, and a fleet of clients with
//! a wrong setting costs a core.
//!
//! ```text
//! socket ──> Heard: frames ──> ping? ─┬─ something was answered since the last: forgiven
//!                                     └─ else too soon: a strike; at the third GOAWAY "too_many_pings" (coalesce)
//! calls ──> Answering: one is open             writes (coalesce): something was answered
//! ```
//!
//! The HTTP/2 library answers pings and shows them to nobody, so frames are found in what is read; only their headers are
//! looked at. Without an open call a client has to wait two hours. etcd: `--grpc-keepalive-min-time`

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tonic::Status;

use crate::api::ResponseBody;
use crate::clock;

/// What every HTTP/2 connection starts with.
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
/// Length, type, flags and stream.
const HEADER_BYTES: usize = 9;
/// Type of a frame with a part of a body.
const DATA: u8 = 0;
/// Type of a frame that opens a stream, or its answer.
const HEADERS: u8 = 1;
/// Type of a ping.
const PING: u8 = 6;
/// The flag of a ping that answers one of ours.
const ACK: u8 = 1;
/// Pings that came too soon and are let pass.
const STRIKES_MAX: u32 = 2;
/// Time between pings of a connection without calls.
const IDLE_MIN_TIME: Duration = Duration::from_secs(2 * 60 * 60);
/// Time between pings if the setting is 0: grpc-go's default.
const DEFAULT_MIN_TIME: Duration = Duration::from_secs(5 * 60);

/// What the ends of one connection know of its pings. Relaxed throughout: all are on one thread.
pub(super) struct Pings {
    /// Time between pings of a connection with calls; `None` lets all pass.
    min_time: Option<Duration>,
    open_calls: AtomicUsize,
    answered: AtomicBool,
    last_stream: AtomicU32,
    too_many: AtomicBool,
}

impl Pings {
    /// `min_time` is the setting; without it all pings pass.
    pub(super) fn new(min_time: Option<Duration>) -> Arc<Pings> {
        Arc::new(Pings {
            min_time: min_time.map(|time| if time.is_zero() { DEFAULT_MIN_TIME } else { time }),
            open_calls: AtomicUsize::new(0),
            answered: AtomicBool::new(false),
            last_stream: AtomicU32::new(0),
            too_many: AtomicBool::new(false),
        })
    }

    /// Notes a call, until it is dropped.
    pub(super) fn open_call(self: &Arc<Pings>) -> OpenCall {
        self.open_calls.fetch_add(1, Ordering::Relaxed);
        OpenCall(Arc::clone(self))
    }

    /// Notes that a part of an answer was written. A client that measures a connection pings as often as it hears of it, so
    /// each part forgives one; what a call has answered says nothing of when it goes out.
    pub(super) fn note_answer(&self) {
        self.answered.store(true, Ordering::Relaxed);
    }

    /// The client's last stream, once it has pinged too often.
    pub(super) fn too_many(&self) -> Option<u32> {
        self.too_many.load(Ordering::Relaxed).then(|| self.last_stream.load(Ordering::Relaxed))
    }
}

/// A call under way.
pub(super) struct OpenCall(Arc<Pings>);

impl OpenCall {
    /// The response, with which the call lasts.
    pub(super) fn lasts_with(self, response: http::Response<ResponseBody>) -> http::Response<Answering> {
        response.map(|inner| Answering { inner, _call: self })
    }
}

impl Drop for OpenCall {
    fn drop(&mut self) {
        self.0.open_calls.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The body of a response.
pub(super) struct Answering {
    inner: ResponseBody,
    _call: OpenCall,
}

impl Body for Answering {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        self: Pin<&mut Self>,
        task: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        Pin::new(&mut self.get_mut().inner).poll_frame(task)
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}

/// A socket whose reader is listened to.
pub(super) struct Heard<T> {
    socket: T,
    listener: Listener,
}

impl<T> Heard<T> {
    pub(super) fn new(socket: T, pings: Arc<Pings>) -> Heard<T> {
        Heard { socket, listener: Listener::new(pings) }
    }
}

impl<T: AsyncRead + Unpin> AsyncRead for Heard<T> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        task: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = into.filled().len();
        ready!(Pin::new(&mut self.socket).poll_read(task, into))?;
        self.listener.hear(&into.filled()[before..], clock::now);
        Poll::Ready(Ok(()))
    }
}

impl<T: AsyncWrite + Unpin> AsyncWrite for Heard<T> {
    fn poll_write(mut self: Pin<&mut Self>, task: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.socket).poll_write(task, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        task: &mut Context<'_>,
        parts: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.socket).poll_write_vectored(task, parts)
    }

    fn is_write_vectored(&self) -> bool {
        self.socket.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, task: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.socket).poll_flush(task)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, task: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.socket).poll_shutdown(task)
    }
}

/// Finds frames in the bytes of a connection, however they are cut, and judges its pings.
struct Listener {
    pings: Arc<Pings>,
    place: Place,
    judge: Judge,
}

/// What counts against a connection.
#[derive(Default)]
struct Judge {
    last_ping: Option<Instant>,
    strikes: u32,
}

/// Where in the connection's bytes.
enum Place {
    /// In the preface, after that many bytes of it.
    Preface(usize),
    /// In the frames behind it.
    Frames(Frames),
    /// This is not HTTP/2.
    Elsewhere,
}

/// Finds frames in bytes, however they are cut.
#[derive(Default)]
pub(super) struct Frames {
    header: [u8; HEADER_BYTES],
    /// Bytes of the header so far.
    seen: usize,
    /// Bytes of the payload to come.
    left: usize,
}

/// The header of a frame, without its length.
struct FrameHead {
    kind: u8,
    flags: u8,
    stream: u32,
}

impl Frames {
    /// Takes in bytes; true if a frame of an answer began in them: headers or data.
    pub(super) fn answer_begins_in(&mut self, bytes: &[u8]) -> bool {
        let mut found = false;
        self.feed(bytes, |head| found |= matches!(head.kind, DATA | HEADERS));
        found
    }

    /// Takes in bytes, and calls with each header that is complete.
    fn feed(&mut self, mut bytes: &[u8], mut visit: impl FnMut(FrameHead)) {
        while !bytes.is_empty() {
            let payload = bytes.len().min(self.left);
            self.left -= payload;
            bytes = &bytes[payload..];
            let taken = bytes.len().min(HEADER_BYTES - self.seen);
            self.header[self.seen..self.seen + taken].copy_from_slice(&bytes[..taken]);
            self.seen += taken;
            bytes = &bytes[taken..];
            if self.seen == HEADER_BYTES {
                let [a, b, c, kind, flags, stream @ ..] = self.header;
                self.seen = 0;
                self.left = u32::from_be_bytes([0, a, b, c]) as usize;
                visit(FrameHead { kind, flags, stream: u32::from_be_bytes(stream) });
            }
        }
    }
}

impl Listener {
    fn new(pings: Arc<Pings>) -> Listener {
        Listener { pings, place: Place::Preface(0), judge: Judge::default() }
    }

    fn hear(&mut self, mut bytes: &[u8], now: impl Fn() -> Instant) {
        while !bytes.is_empty() {
            let taken = match &mut self.place {
                Place::Preface(seen) => {
                    let taken = bytes.len().min(PREFACE.len() - *seen);
                    let right = PREFACE[*seen..].starts_with(&bytes[..taken]);
                    *seen += taken;
                    if !right {
                        self.place = Place::Elsewhere;
                    } else if *seen == PREFACE.len() {
                        self.place = Place::Frames(Frames::default());
                    }
                    taken
                }
                Place::Frames(frames) => {
                    let (pings, judge) = (&self.pings, &mut self.judge);
                    frames.feed(bytes, |head| match head.kind {
                        HEADERS => {
                            pings.last_stream.fetch_max(head.stream, Ordering::Relaxed);
                        }
                        PING if head.flags & ACK == 0 => judge.ping(pings, now()),
                        _ => {}
                    });
                    return;
                }
                Place::Elsewhere => return,
            };
            bytes = &bytes[taken..];
        }
    }
}

impl Judge {
    fn ping(&mut self, pings: &Pings, now: Instant) {
        let Some(min_time) = pings.min_time else { return };
        let last = self.last_ping.replace(now);
        if pings.answered.swap(false, Ordering::Relaxed) {
            self.strikes = 0;
            return;
        }
        let idle = pings.open_calls.load(Ordering::Relaxed) == 0;
        let min_time = if idle { IDLE_MIN_TIME } else { min_time };
        if last.is_some_and(|last| now < last + min_time) {
            self.strikes += 1;
        }
        if self.strikes > STRIKES_MAX {
            pings.too_many.store(true, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIN_TIME: Duration = Duration::from_secs(5);
    const PING_FRAME: [u8; 17] = [0, 0, 8, 6, 0, 0, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8];
    const HEADERS_FRAME: [u8; 11] = [0, 0, 2, 1, 4, 0, 0, 0, 7, 6, 6];

    fn connection() -> (Arc<Pings>, Listener) {
        let pings = Pings::new(Some(MIN_TIME));
        let mut listener = Listener::new(Arc::clone(&pings));
        listener.hear(PREFACE, || panic!("no ping yet"));
        (pings, listener)
    }

    /// Pings with pauses between them; gives after how many there were too many.
    fn ping(connection: &mut (Arc<Pings>, Listener), pauses: &[Duration]) -> Option<usize> {
        let mut now = clock::now();
        pauses.iter().position(|pause| {
            now += *pause;
            connection.1.hear(&PING_FRAME, || now);
            connection.0.too_many().is_some()
        })
    }

    #[test]
    fn frames_are_found_however_they_are_cut() {
        let bytes = [PREFACE, &HEADERS_FRAME, &PING_FRAME.repeat(4)].concat();
        // A ping is one once its header is there.
        let decided = bytes.len() - 8;
        for cut in 0..decided {
            let pings = Pings::new(Some(MIN_TIME));
            let mut listener = Listener::new(Arc::clone(&pings));
            listener.hear(&bytes[..cut], clock::now);
            assert_eq!(pings.too_many(), None, "cut at {cut}");
            listener.hear(&bytes[cut..], clock::now);
            assert_eq!(pings.too_many(), Some(7), "cut at {cut}");
        }
    }

    #[test]
    fn what_is_not_a_ping_is_none() {
        let (pings, mut listener) = connection();
        let mut acknowledged = PING_FRAME;
        acknowledged[4] = ACK;
        let mut data = PING_FRAME.repeat(3);
        data.splice(0..0, [0, 0, 51, 0, 0, 0, 0, 0, 1]);
        listener.hear(&[acknowledged.repeat(9), data].concat(), || panic!("not a ping"));
        let mut other = Listener::new(Arc::clone(&pings));
        other.hear(b"GET / HTTP/1.1\r\n\r\n", || panic!("not a ping"));
        other.hear(&[PREFACE, &PING_FRAME.repeat(9)].concat(), || panic!("not a ping"));
        assert_eq!(pings.too_many(), None);
    }

    #[test]
    fn the_third_ping_too_soon_is_too_many() {
        let soon = MIN_TIME - Duration::from_millis(1);
        assert_eq!(ping(&mut connection(), &[soon; 9]), Some(3), "without a call");
        assert_eq!(ping(&mut connection(), &[IDLE_MIN_TIME; 9]), None, "without a call");
        for (pause, expected) in [(MIN_TIME, None), (soon, Some(3))] {
            let mut with_call = connection();
            let _call = with_call.0.open_call();
            assert_eq!(ping(&mut with_call, &[pause; 9]), expected, "with a call, each {pause:?}");
        }
        let mut after_call = connection();
        drop(after_call.0.open_call());
        assert_eq!(ping(&mut after_call, &[MIN_TIME; 9]), Some(3), "after a call");
    }

    #[test]
    fn an_answer_forgives_strikes() {
        let mut connection = connection();
        for _ in 0..3 {
            assert_eq!(ping(&mut connection, &[Duration::ZERO; 2]), None);
            connection.0.note_answer();
            assert_eq!(ping(&mut connection, &[Duration::ZERO]), None);
        }
        assert_eq!(ping(&mut connection, &[Duration::ZERO; 4]), Some(2));
    }

    #[test]
    fn no_time_is_grpc_gos_default() {
        assert_eq!(Pings::new(Some(Duration::ZERO)).min_time, Some(DEFAULT_MIN_TIME));
    }
}
