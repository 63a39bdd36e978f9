//! The network: byte streams between hosts that delay, stall, and break.
//!
//! ```text
//! write -> [in flight, each piece with the time it arrives] -> ready -> read
//!              held while the link is cut, all of it late when it is mended
//! ```
//! Links are one-way. A stream keeps its order, as TCP does; what is reordered and repeated are connections: an old one may
//! deliver after its successor was opened, and what was sent on a broken one is sent again. A host that is gone answers
//! with resets, or, after a power cut, not at all until it is back.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use bytes::{Buf, Bytes};
use futures::FutureExt;
use futures::future::BoxFuture;
use skeg::sim::Socket;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// Bytes that a stream holds before its writer waits.
const WINDOW_BYTES: usize = 256 << 10;

/// Where a process runs: clients at 0, members from 1.
pub(crate) type Host = usize;

/// Addresses begin with this and end with the host.
pub(crate) const NETWORK: &str = "10.0.0.";

thread_local! {
    static NET: RefCell<Net> = RefCell::new(Net::default());
}

#[derive(Default)]
struct Net {
    now: u64,
    chance: fastrand::Rng,
    /// Whose code runs.
    here: Host,
    up: BTreeSet<Host>,
    /// Hosts that answer nothing, not even with a reset.
    silent: BTreeSet<Host>,
    /// Links that carry nothing.
    cut: BTreeSet<(Host, Host)>,
    /// Milliseconds more on a link.
    slow: BTreeMap<(Host, Host), u64>,
    doors: BTreeMap<(Host, u16), Door>,
    streams: BTreeMap<u64, Stream>,
    opened: u64,
}

#[derive(Default)]
struct Door {
    waiting: VecDeque<End>,
    waker: Option<Waker>,
}

struct Stream {
    hosts: [Host; 2],
    /// What each side receives.
    halves: [Half; 2],
}

/// One direction, from the other side to this one.
#[derive(Default)]
struct Half {
    in_flight: VecDeque<(u64, Piece)>,
    ready: VecDeque<Bytes>,
    held_bytes: usize,
    /// Nothing comes after what is ready.
    ended: bool,
    broken: bool,
    /// Nobody reads here any more.
    gone: bool,
    reader: Option<Waker>,
    /// Waits for room.
    writer: Option<Waker>,
    last_due: u64,
}

enum Piece {
    Bytes(Bytes),
    End,
    Reset,
}

/// One end of a stream.
pub(crate) struct End {
    stream: u64,
    side: usize,
}

fn with<T>(body: impl FnOnce(&mut Net) -> T) -> T {
    NET.with(|net| body(&mut net.borrow_mut()))
}

pub(crate) fn start(seed: u64) {
    with(|net| *net = Net { chance: fastrand::Rng::with_seed(seed), ..Net::default() });
}

/// Says whose code runs from here on.
pub(crate) fn enter(host: Host) {
    with(|net| net.here = host);
}

/// The host is there, and what is left of its streams of before is reset.
pub(crate) fn host_up(host: Host) {
    with(|net| {
        net.up.insert(host);
        net.silent.remove(&host);
        net.reset(|stream| stream.hosts.contains(&host));
    });
}

/// The host is gone, with all that it had open.
pub(crate) fn host_down(host: Host, silent: bool) {
    with(|net| {
        net.up.remove(&host);
        net.doors.retain(|(at, _), _| *at != host);
        if silent {
            net.silent.insert(host);
        }
        for stream in net.streams.values_mut() {
            for side in 0..2 {
                if stream.hosts[side] == host {
                    stream.halves[side].gone = true;
                    stream.halves[side].broken = true;
                }
            }
        }
        if !silent {
            net.reset(|stream| stream.hosts.contains(&host));
        }
    });
}

/// Breaks all streams between two hosts.
pub(crate) fn reset_between(one: Host, other: Host) {
    with(|net| net.reset(|stream| stream.hosts == [one, other] || stream.hosts == [other, one]));
}

pub(crate) fn cut(from: Host, to: Host) {
    with(|net| net.cut.insert((from, to)));
}

/// Mends every link.
pub(crate) fn heal() {
    with(|net| {
        net.cut.clear();
        net.slow.clear();
    });
}

pub(crate) fn slow(from: Host, to: Host, by_millis: u64) {
    with(|net| net.slow.insert((from, to), by_millis));
}

/// Delivers what has arrived by now, in milliseconds.
pub(crate) fn deliver(now: u64) {
    let wakers = with(|net| {
        net.now = now;
        let mut wakers = Vec::new();
        let mut resets = Vec::new();
        let (cut, silent) = (&net.cut, &net.silent);
        for (id, stream) in &mut net.streams {
            for side in 0..2 {
                let (from, to) = (stream.hosts[1 - side], stream.hosts[side]);
                if cut.contains(&(from, to)) {
                    continue;
                }
                let half = &mut stream.halves[side];
                let mut arrived = false;
                while half.in_flight.front().is_some_and(|(due, _)| *due <= now) {
                    arrived = true;
                    match half.in_flight.pop_front() {
                        Some((_, Piece::Bytes(bytes))) if half.gone => {
                            half.held_bytes -= bytes.len();
                            if !silent.contains(&to) {
                                resets.push((*id, 1 - side));
                            }
                        }
                        Some((_, Piece::Bytes(bytes))) => half.ready.push_back(bytes),
                        Some((_, Piece::End)) => half.ended = true,
                        Some((_, Piece::Reset)) => half.broken = true,
                        None => {}
                    }
                }
                if arrived {
                    wakers.extend(half.reader.take());
                    wakers.extend(half.writer.take());
                }
            }
        }
        for (id, side) in resets {
            net.send(id, side, Piece::Reset);
        }
        net.streams.retain(|_, stream| !stream.halves.iter().all(|half| half.gone));
        wakers
    });
    wakers.into_iter().for_each(Waker::wake);
}

/// Accepts the next connection to a port of this host, which is open from the first call on.
pub(crate) fn accept(port: u16) -> impl Future<Output = End> + Send {
    std::future::poll_fn(move |task| {
        with(|net| {
            let door = net.doors.entry((net.here, port)).or_default();
            match door.waiting.pop_front() {
                Some(end) => Poll::Ready(end),
                None => {
                    door.waker = Some(task.waker().clone());
                    Poll::Pending
                }
            }
        })
    })
}

/// Connects as the member or client whose code runs.
pub(crate) fn dial(host: &str, port: u16) -> BoxFuture<'static, io::Result<Box<dyn Socket>>> {
    let here = with(|net| net.here);
    let Some(there) = host.strip_prefix(NETWORK).and_then(|last| last.parse().ok()) else {
        return std::future::ready(Err(io::Error::other("no such host"))).boxed();
    };
    connect(here, there, port).map(|end| end.map(|end| Box::new(end) as Box<dyn Socket>)).boxed()
}

pub(crate) async fn connect(here: Host, there: Host, port: u16) -> io::Result<End> {
    loop {
        let round_trip = with(|net| net.delay(here, there) + net.delay(there, here));
        tokio::time::sleep(Duration::from_millis(round_trip)).await;
        let opened = with(|net| net.open(here, there, port));
        match opened {
            Some(Ok((end, waker))) => {
                waker.into_iter().for_each(Waker::wake);
                return Ok(end);
            }
            Some(Err(error)) => return Err(error),
            // Asked again and again, until the caller gives up.
            None => tokio::time::sleep(Duration::from_millis(50)).await,
        }
    }
}

impl Net {
    fn delay(&mut self, from: Host, to: Host) -> u64 {
        let usual = if self.chance.u8(..) == 0 { self.chance.u64(5..80) } else { self.chance.u64(0..3) };
        usual + self.slow.get(&(from, to)).copied().unwrap_or(0)
    }

    fn open(&mut self, here: Host, there: Host, port: u16) -> Option<io::Result<(End, Option<Waker>)>> {
        if self.cut.contains(&(here, there))
            || self.cut.contains(&(there, here))
            || self.silent.contains(&there)
        {
            return None;
        }
        let Some(door) = self.doors.get_mut(&(there, port)) else {
            return Some(Err(io::ErrorKind::ConnectionRefused.into()));
        };
        self.opened += 1;
        let id = self.opened;
        self.streams.insert(id, Stream { hosts: [here, there], halves: Default::default() });
        door.waiting.push_back(End { stream: id, side: 1 });
        Some(Ok((End { stream: id, side: 0 }, door.waker.take())))
    }

    /// Sends to a side of a stream.
    fn send(&mut self, stream: u64, side: usize, piece: Piece) {
        let Some(hosts) = self.streams.get(&stream).map(|stream| stream.hosts) else { return };
        let delay = self.delay(hosts[1 - side], hosts[side]);
        let now = self.now;
        let Some(stream) = self.streams.get_mut(&stream) else { return };
        let half = &mut stream.halves[side];
        let due = (now + 1 + delay).max(half.last_due);
        half.last_due = due;
        if let Piece::Bytes(bytes) = &piece {
            half.held_bytes += bytes.len();
        }
        half.in_flight.push_back((due, piece));
    }

    fn reset(&mut self, which: impl Fn(&Stream) -> bool) {
        let ids: Vec<u64> =
            self.streams.iter().filter(|(_, stream)| which(stream)).map(|(id, _)| *id).collect();
        for id in ids {
            self.send(id, 0, Piece::Reset);
            self.send(id, 1, Piece::Reset);
        }
    }
}

impl AsyncRead for End {
    fn poll_read(
        self: Pin<&mut Self>,
        task: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let (result, writer) = with(|net| {
            let Some(half) = net.streams.get_mut(&self.stream).map(|stream| &mut stream.halves[self.side])
            else {
                return (Poll::Ready(Err(io::ErrorKind::ConnectionReset.into())), None);
            };
            if half.broken {
                return (Poll::Ready(Err(io::ErrorKind::ConnectionReset.into())), None);
            }
            let Some(piece) = half.ready.front_mut() else {
                if half.ended {
                    return (Poll::Ready(Ok(())), None);
                }
                half.reader = Some(task.waker().clone());
                return (Poll::Pending, None);
            };
            let count = piece.len().min(into.remaining());
            into.put_slice(&piece[..count]);
            piece.advance(count);
            if piece.is_empty() {
                half.ready.pop_front();
            }
            half.held_bytes -= count;
            (Poll::Ready(Ok(())), half.writer.take())
        });
        writer.into_iter().for_each(Waker::wake);
        result
    }
}

impl AsyncWrite for End {
    fn poll_write(self: Pin<&mut Self>, task: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        with(|net| {
            let Some(stream) = net.streams.get_mut(&self.stream) else {
                return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into()));
            };
            if stream.halves[self.side].broken {
                return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into()));
            }
            let half = &mut stream.halves[1 - self.side];
            let room = WINDOW_BYTES.saturating_sub(half.held_bytes).min(bytes.len());
            if room == 0 && !bytes.is_empty() {
                half.writer = Some(task.waker().clone());
                return Poll::Pending;
            }
            net.send(self.stream, 1 - self.side, Piece::Bytes(Bytes::copy_from_slice(&bytes[..room])));
            Poll::Ready(Ok(room))
        })
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        with(|net| net.send(self.stream, 1 - self.side, Piece::End));
        Poll::Ready(Ok(()))
    }
}

impl Drop for End {
    fn drop(&mut self) {
        // Ends that wait at a door are dropped with it, from within.
        // At the end of the process, with all of it.
        let _ = NET.try_with(|net| {
            let Ok(mut net) = net.try_borrow_mut() else { return };
            let Some(stream) = net.streams.get_mut(&self.stream) else { return };
            let half = &mut stream.halves[self.side];
            if half.gone {
                return;
            }
            half.gone = true;
            half.ready.clear();
            net.send(self.stream, 1 - self.side, Piece::End);
        });
    }
}
