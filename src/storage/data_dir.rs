//! The data directory: who may use it, and whose it is.
//!
//! ```text
//! DATA-DIR/member/skeg/lock       held while a process uses the directory
//!                      identity   member and cluster id, written once
//!                      lives      which processes the member has been, `lives`
//!                      peers      which ones its peers were, `lives`
//!                      store/     RocksDB, or a later generation of it: `snapshot/generations`
//!                      log/       the Raft log, or WAL-DIR if one is given
//!          restoring/             one that a restore is making: `restoring`
//! ```

use std::fs::{self, DirBuilder, File, OpenOptions, TryLockError};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use super::snapshot::Generations;

/// Where a restore works, inside of the directory that it makes.
pub(super) const RESTORING: &str = "restoring";

/// Why a data directory cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum DataDirError {
    /// Another process has it.
    #[error("{path} is in use by another process: stop it first, or give this one another --data-dir")]
    InUse {
        /// The directory.
        path: PathBuf,
    },
    /// It belongs to etcd.
    #[error(
        "{path} holds the data of an etcd member, which this version cannot take over yet; nothing was changed"
    )]
    Foreign {
        /// The directory.
        path: PathBuf,
    },
    /// A restore into it was broken off.
    #[error("{path} holds a restore that was not finished: run it again, or remove {path}/restoring")]
    Unfinished {
        /// The directory.
        path: PathBuf,
    },
    /// A restore would be into a directory that holds something. The words are etcd's.
    #[error("data-dir {path:?} not empty or could not be read")]
    NotEmpty {
        /// The directory.
        path: PathBuf,
    },
    /// A restore would be into a log directory that exists. The words are etcd's.
    #[error("wal-dir {path:?} exists")]
    Exists {
        /// The directory.
        path: PathBuf,
    },
    /// The identity file does not decode.
    #[error(
        "{path} is damaged: it must name the member and cluster id with their checksum; restore it from a backup"
    )]
    Damaged {
        /// The file.
        path: PathBuf,
    },
    /// Data without an identity.
    #[error("{path} has data but no identity file: the directory is incomplete, restore it as a whole")]
    Incomplete {
        /// The directory.
        path: PathBuf,
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

/// Who a directory belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Identity {
    /// The member.
    pub member_id: u64,
    /// Its cluster.
    pub cluster_id: u64,
}

/// A data directory that this process holds until it is dropped.
#[derive(Debug)]
pub struct DataDir {
    root: PathBuf,
    log_dir: PathBuf,
    _lock: File,
}

impl DataDir {
    /// True if a member has claimed the directory; its identity then overrides what the settings say.
    pub fn is_claimed(data_dir: &Path) -> bool {
        data_dir.join("member/skeg/identity").exists()
    }

    /// Takes the directory, making it if there is none.
    ///
    /// # Errors
    /// [`DataDirError::InUse`] and [`DataDirError::Foreign`] change nothing.
    pub fn open(data_dir: &Path, wal_dir: Option<&Path>) -> Result<DataDir, DataDirError> {
        let member = data_dir.join("member");
        let root = member.join("skeg");
        let restoring = data_dir.join(RESTORING);
        // An empty one is what is left of a restore that was done.
        if restoring.exists() && fs::remove_dir(&restoring).is_err() {
            return Err(DataDirError::Unfinished { path: data_dir.to_owned() });
        }
        if !root.exists() && (member.join("snap").exists() || member.join("wal").exists()) {
            return Err(DataDirError::Foreign { path: data_dir.to_owned() });
        }
        make_dir(&root)?;
        let lock_path = root.join("lock");
        let lock = OpenOptions::new()
            .create(true)
            .truncate(false)
            .write(true)
            .mode(0o600)
            .open(&lock_path)
            .map_err(|source| DataDirError::Io { action: "open", path: lock_path.clone(), source })?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Err(DataDirError::InUse { path: data_dir.to_owned() }),
            Err(TryLockError::Error(source)) => {
                return Err(DataDirError::Io { action: "lock", path: lock_path, source });
            }
        }
        let log_dir = wal_dir.map_or_else(|| root.join("log"), Path::to_owned);
        if wal_dir.is_some() {
            make_dir(&log_dir)?;
        }
        Ok(DataDir { root, log_dir, _lock: lock })
    }

    /// Where everything of this member lives.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// The directories of the store, in which everything that is not the current one is removed.
    ///
    /// # Errors
    /// [`DataDirError::Io`], also when it is not certain which one is the current one; nothing is removed then.
    pub fn generations(&self) -> Result<Generations, DataDirError> {
        let opened = Generations::open(&self.root);
        opened.map_err(|source| DataDirError::Io {
            action: "find the store in",
            path: self.root.clone(),
            source,
        })
    }

    /// True if there is, or was, a store.
    fn has_store(&self) -> bool {
        self.root.join("store").exists() || self.root.join("generation").exists()
    }

    /// Where the Raft log lives.
    pub fn log_dir(&self) -> &Path {
        &self.log_dir
    }

    /// Reads whose directory it is; `None` for a new one.
    ///
    /// # Errors
    /// [`DataDirError::Damaged`]; [`DataDirError::Incomplete`] when there is data that nobody claims.
    pub fn identity(&self) -> Result<Option<Identity>, DataDirError> {
        let path = self.root.join("identity");
        let text = match fs::read_to_string(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                if self.has_store() {
                    return Err(DataDirError::Incomplete { path: self.root.clone() });
                }
                return Ok(None);
            }
            Err(error) if error.kind() == io::ErrorKind::InvalidData => {
                return Err(DataDirError::Damaged { path });
            }
            Err(source) => return Err(DataDirError::Io { action: "read", path, source }),
        };
        parse_identity(&text).map(Some).ok_or(DataDirError::Damaged { path })
    }

    /// Claims a new directory, durably.
    pub fn claim(&self, identity: Identity) -> Result<(), DataDirError> {
        let path = self.root.join("identity");
        let io_error = |action| {
            let path = path.clone();
            move |source| DataDirError::Io { action, path, source }
        };
        let staged = self.root.join("identity.tmp");
        let mut file = File::create(&staged).map_err(io_error("create"))?;
        file.write_all(format_identity(identity).as_bytes()).map_err(io_error("write"))?;
        file.sync_all().map_err(io_error("sync"))?;
        fs::rename(&staged, &path).map_err(io_error("rename"))?;
        File::open(&self.root).and_then(|dir| dir.sync_all()).map_err(io_error("sync"))
    }
}

fn make_dir(path: &Path) -> Result<(), DataDirError> {
    let made = DirBuilder::new().recursive(true).mode(0o700).create(path);
    made.map_err(|source| DataDirError::Io { action: "make", path: path.to_owned(), source })
}

fn format_identity(identity: Identity) -> String {
    let body = format!("member-id {:x}\ncluster-id {:x}\n", identity.member_id, identity.cluster_id);
    format!("{body}crc32 {:08x}\n", crc32fast::hash(body.as_bytes()))
}

fn parse_identity(text: &str) -> Option<Identity> {
    let (body, crc) = text.split_at_checked(text.rfind("crc32 ")?)?;
    let crc = u32::from_str_radix(crc.strip_prefix("crc32 ")?.trim_end(), 16).ok()?;
    if crc != crc32fast::hash(body.as_bytes()) {
        return None;
    }
    let mut lines = body.lines();
    let mut field = |name: &str| u64::from_str_radix(lines.next()?.strip_prefix(name)?, 16).ok();
    Some(Identity { member_id: field("member-id ")?, cluster_id: field("cluster-id ")? })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_keeps_its_identity_and_has_one_user() {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let data_dir = DataDir::open(dir.path(), None).expect("it opens");
        assert_eq!(data_dir.identity().expect("it reads"), None);
        let identity = Identity { member_id: 0xabc, cluster_id: u64::MAX };
        data_dir.claim(identity).expect("it is claimed");
        assert_eq!(data_dir.identity().expect("it reads"), Some(identity));
        assert!(matches!(DataDir::open(dir.path(), None), Err(DataDirError::InUse { .. })));
        drop(data_dir);
        DataDir::open(dir.path(), None).expect("it opens again");
    }

    #[test]
    fn damage_and_foreign_data_are_refused() {
        assert_eq!(parse_identity("member-id 1\ncluster-id 2\ncrc32 00000000\n"), None);
        let dir = tempfile::tempdir().expect("a temporary directory");
        fs::create_dir_all(dir.path().join("member/wal")).expect("a directory");
        assert!(matches!(DataDir::open(dir.path(), None), Err(DataDirError::Foreign { .. })));
    }
}
