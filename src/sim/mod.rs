//! The seams by which `sim/` runs a member: sockets, the log's disk, delays, and bugs put back on purpose.
//!
//! Compiled with the feature `sim` only. A simulated cluster is one thread, so all that is set here is the thread's. Time
//! needs no seam: tokio's clock is paused, and `sim/` answers the C library's clock and random source itself.

pub mod disk;

use std::cell::{Cell, RefCell};
use std::io;
use std::time::Duration;

use futures::future::BoxFuture;
use tokio::io::{AsyncRead, AsyncWrite};

use crate::clock;

/// One end of a simulated connection.
pub trait Socket: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Socket for T {}

/// How a member connects to a host and port.
pub type Dial = fn(&str, u16) -> BoxFuture<'static, io::Result<Box<dyn Socket>>>;

/// A bug that was put back, to show that it is found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bug {
    /// The log says that it has synced, and has not.
    SkipLogSync,
    /// A linearizable read does not wait until its index is applied.
    ReadBeforeApplied,
    /// The leader answers a put when it has it in its own log.
    AckBeforeCommit,
    /// A watcher that catches up with history misses its first event.
    DropCaughtUpEvent,
    /// A member stores a bit that the others do not, where nobody reads it.
    FlipAppliedBit,
    /// A member is taken for the one that it was, whatever it has forgotten.
    TakeCopies,
}

impl Bug {
    /// All of them.
    pub const ALL: [Bug; 6] = [
        Bug::SkipLogSync,
        Bug::ReadBeforeApplied,
        Bug::AckBeforeCommit,
        Bug::DropCaughtUpEvent,
        Bug::FlipAppliedBit,
        Bug::TakeCopies,
    ];
}

thread_local! {
    static DIAL: RefCell<Option<Dial>> = const { RefCell::new(None) };
    static PLANTED: Cell<Option<Bug>> = const { Cell::new(None) };
}

/// Sets how this thread's members connect.
pub fn connect_by(dial: Dial) {
    DIAL.with(|slot| *slot.borrow_mut() = Some(dial));
}

/// Puts a bug into this thread's members, or takes it out.
pub fn plant(bug: Option<Bug>) {
    PLANTED.set(bug);
}

/// True if this bug was put back.
pub fn planted(bug: Bug) -> bool {
    PLANTED.get() == Some(bug)
}

/// A number below `limit`, by chance.
///
/// # Panics
/// If the limit is 0.
pub fn below(limit: u64) -> u64 {
    u64::from_le_bytes(clock::random()) % limit
}

/// Waits for a time between nothing and `at_most`.
pub async fn pause(at_most: Duration) {
    let limit = u64::try_from(at_most.as_micros()).unwrap_or(u64::MAX).max(1);
    tokio::time::sleep(Duration::from_micros(below(limit))).await;
}

/// Connects a member to another.
pub(crate) async fn dial(host: &str, port: u16) -> io::Result<Box<dyn Socket>> {
    let Some(dial) = DIAL.with(|slot| *slot.borrow()) else {
        return Err(io::Error::other("the simulation has no network"));
    };
    dial(host, port).await
}
