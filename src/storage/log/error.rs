//! Why the log cannot do what it was asked.

use std::io;
use std::path::PathBuf;

/// One variant per decision a caller makes.
#[derive(Debug, thiserror::Error)]
pub enum LogError {
    /// The file system refused. Opening may be tried again once the cause is gone; a running log is dead.
    #[error("{action} {}: {source}", path.display())]
    Io {
        /// What was tried, as a verb phrase.
        action: &'static str,
        /// On which file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// Synced bytes no longer read back. The member must not start: what it acknowledged may be in them.
    #[error(
        "{} is damaged at offset {offset}: {reason}; nothing was changed: restore this member's data from a copy of its \
         disk, or remove the member and its data directory and add it again",
        path.display()
    )]
    Damaged {
        /// The segment.
        path: PathBuf,
        /// Where the first bad frame or field starts, in bytes from the start of the file.
        offset: u64,
        /// What is wrong there.
        reason: String,
    },
    /// A file that is no segment of this log: another format version, another log, a strange name.
    #[error("{} does not belong to this log: {reason}; nothing was changed: move it away, or use the skeg that wrote it", path.display())]
    Foreign {
        /// The file.
        path: PathBuf,
        /// Why it was refused.
        reason: String,
    },
    /// Segments that held live entries are gone.
    #[error(
        "segments are missing from {}: {reason}; nothing was changed: put them back, or remove the member and its data \
         directory and add it again",
        dir.display()
    )]
    Missing {
        /// The log's directory.
        dir: PathBuf,
        /// Which part is missing.
        reason: String,
    },
    /// The entries do not follow the last one. A bug in the caller.
    #[error("entry {found} does not follow the log, which takes {expected} next")]
    NotNext {
        /// The index the log takes next.
        expected: u64,
        /// The index that was given.
        found: u64,
    },
    /// The index was purged: it can be had from a snapshot only.
    #[error("entry {index} was purged, the log starts at {first}")]
    Purged {
        /// The index asked for.
        index: u64,
        /// The first index still there.
        first: u64,
    },
    /// A record above what a frame can hold.
    #[error("a record of {bytes} bytes is above the log's limit of {limit}")]
    TooLarge {
        /// The record's size.
        bytes: usize,
        /// What a frame holds at most.
        limit: usize,
    },
}
