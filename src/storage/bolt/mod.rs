//! bbolt files, the backend of etcd: read, checked, and written from front to back.
//!
//! A file is an array of pages. Each is a leaf or branch of a tree that is a *bucket*, or a meta page, or the list of free
//! pages; a page that does not hold its content is continued by the pages after it. The root bucket holds the
//! others under their names; a small one lies whole in that entry.
//!
//! ```text
//! page 0 meta ─┐ (0 and 1: the newer valid one counts)
//! page 1 meta  ├─> root bucket: "key" ──> branch ──> leaf: key, value, key, value …
//! page 2 …     │                "meta" = the leaf itself, inline
//! ```
//!
//! [`Bolt`] reads: a page at a time with `pread`, never the file as a map, for a file that shrinks under a map kills the
//! process. Nothing in the file is believed: every length is checked, every page is counted, keys must ascend; so a reader
//! ends, and ends with an error that names the file and the byte. The file is never changed.
//!
//! [`Writer`] writes a tree from its leaves up while the entries come, in order. Page numbers are given out in the order of
//! writing, so it holds one page for each level of a tree, and its output may be a socket. The meta pages come first and
//! say how many pages there are and where the root is: the same entries are fed to a measuring writer before.
//!
//! Left out: changing a file in place, and more than one level of buckets when writing, which etcd has no use for.

mod check;
mod page;
mod reader;
#[cfg(test)]
mod tests;
mod writer;

use std::io;
use std::path::PathBuf;

#[cfg(any(test, fuzzing))]
pub(super) use page::set_meta_sums;
pub use reader::{Bolt, Cursor, Entry};
pub use writer::{Plan, Value, WriteError, Writer};

/// Size of the pages that are written, in bytes. Other sizes are read.
pub const PAGE_BYTES: usize = 4096;

/// Why a file cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum BoltError {
    /// It is something else.
    #[error("{path} is not a bbolt file: it has no valid meta page")]
    Foreign {
        /// The file.
        path: PathBuf,
    },
    /// It ends too early.
    #[error("{path} is cut off: it has {found} bytes, and its pages take {expected}")]
    Truncated {
        /// The file.
        path: PathBuf,
        /// Bytes that there are.
        found: u64,
        /// Bytes that there should be.
        expected: u64,
    },
    /// A page is not what it should be.
    #[error("{path} is damaged at byte {offset}: {what}")]
    Damaged {
        /// The file.
        path: PathBuf,
        /// Where the page begins.
        offset: u64,
        /// What is wrong with it.
        what: &'static str,
    },
    /// A file operation failed.
    #[error("cannot {action} {path}: {source}")]
    Io {
        /// What was tried.
        action: &'static str,
        /// On what.
        path: PathBuf,
        /// Why it failed.
        source: io::Error,
    },
}
