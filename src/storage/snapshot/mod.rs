//! A store's files on their way from one member to another.
//!
//! A *checkpoint* is a directory of hard links to what a store's files hold now; it stands still while the store goes on.
//! A *staging* directory is a checkpoint as far as it has arrived. A *generation* is a directory that is, was or may
//! become the store of a member; a pointer says which one is:
//!
//! ```text
//! sender    store/ ──link──> checkpoint-1/ ──pieces with checksums──┐
//! receiver  staging/  offer, journal, files/ <──────────────────────┘
//!           staging/files ──rename──> store-0000000002 ──opened, checked──> pointer renamed: it is the store
//! ```
//!
//! What holds: a piece whose checksum is wrong is never written; what is written is in the journal with its checksum, and
//! what is found later and does not match is asked for again. Until the pointer is renamed the old store is whole; from
//! then on the new one is. Names and sizes come from another member and are not believed: a name is one of few
//! characters and never leads out of its directory, and no file grows past what was offered.

mod checkpoint;
mod generations;
mod staging;

pub use checkpoint::Checkpoint;
pub use generations::{Damage, Generation, Generations};
pub use staging::{Piece, Staging};

/// Bytes of a piece; the last one of a file may be shorter. It is what sender and receiver hold in memory, and what a broken
/// connection costs.
pub const PIECE_BYTES: usize = 256 << 10;

/// Why files from another member are not taken.
#[derive(Debug, thiserror::Error)]
pub enum SnapshotError {
    /// The offer names files that no checkpoint has.
    #[error("the offered file {name:?} cannot be part of a store")]
    BadName {
        /// What it was called.
        name: String,
    },
    /// The offer is too large to be one.
    #[error("the offered files are too many or too large")]
    TooLarge,
    /// A piece does not follow what is there.
    #[error("a piece of file {file} at {offset} does not follow the {held} bytes held of it")]
    OutOfPlace {
        /// Position of the file in the offer.
        file: usize,
        /// Where the piece says that it belongs.
        offset: u64,
        /// What is there.
        held: u64,
    },
    /// A piece does not match its checksum.
    #[error("a piece of file {file} at {offset} does not match its checksum")]
    Checksum {
        /// Position of the file in the offer.
        file: usize,
        /// Where the piece belongs.
        offset: u64,
    },
    /// The sender says that it is done, and it is not.
    #[error("file {name} is not complete")]
    Incomplete {
        /// The file.
        name: String,
    },
    /// A file operation failed.
    #[error("files of a snapshot: {0}")]
    Io(#[from] std::io::Error),
}

/// One file of a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileEntry {
    /// A plain file name.
    pub name: String,
    /// Its size.
    pub size_bytes: u64,
}

/// What a sender has: all files of a checkpoint, in the order in which they are sent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Offer {
    /// Names the checkpoint: the same files for as long as it is the same.
    pub id: [u8; 16],
    /// The files.
    pub files: Vec<FileEntry>,
}

impl Offer {
    /// Bytes of all files.
    pub fn size_bytes(&self) -> u64 {
        self.files.iter().map(|file| file.size_bytes).sum()
    }
}

#[cfg(test)]
mod tests;
