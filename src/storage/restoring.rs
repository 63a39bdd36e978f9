//! A data directory in the making: it is there whole, or it does not start.
//!
//! ```text
//! DATA-DIR/restoring/member/…   being written; a server refuses a directory that holds this
//! DATA-DIR/member/…             one rename later
//! ```

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use super::data_dir::{DataDir, DataDirError, RESTORING};

/// A data directory that is filled; dropped before it is done, it leaves nothing behind.
#[derive(Debug)]
pub struct Restoring {
    data_dir: PathBuf,
    /// Made here, and not only filled.
    made: Vec<PathBuf>,
    inner: Option<DataDir>,
}

impl Restoring {
    /// Begins in a directory that is empty or does not exist; with a log directory, which must not exist.
    ///
    /// # Errors
    /// [`DataDirError::NotEmpty`], [`DataDirError::Exists`], [`DataDirError::InUse`] when another restore is at it,
    /// [`DataDirError::Io`].
    pub fn begin(data_dir: &Path, wal_dir: Option<&Path>) -> Result<Restoring, DataDirError> {
        let inside = data_dir.join(RESTORING);
        if !has_nothing_but_restoring(data_dir) {
            return Err(DataDirError::NotEmpty { path: data_dir.to_owned() });
        }
        if let Some(wal_dir) = wal_dir.filter(|dir| dir.exists()) {
            return Err(DataDirError::Exists { path: wal_dir.to_owned() });
        }
        if inside.exists() {
            // What an earlier attempt left, unless it is still at work.
            let left = DataDir::open(&inside, None)?;
            fs::remove_dir_all(&inside).map_err(|source| io_error("remove", &inside, source))?;
            drop(left);
        }
        let mut made = vec![inside.clone()];
        made.extend(wal_dir.map(Path::to_owned));
        if !data_dir.exists() {
            made.push(data_dir.to_owned());
        }
        let mut restoring = Restoring { data_dir: data_dir.to_owned(), made, inner: None };
        restoring.inner = Some(DataDir::open(&inside, wal_dir)?);
        Ok(restoring)
    }

    /// What is to be filled.
    pub fn inner(&self) -> &DataDir {
        self.inner.as_ref().expect("it is there until it is done")
    }

    /// Makes it the data directory, durably.
    ///
    /// # Errors
    /// [`DataDirError::Io`]; it is not the data directory then.
    pub fn finish(mut self) -> Result<(), DataDirError> {
        let inside = self.data_dir.join(RESTORING);
        let (from, to) = (inside.join("member"), self.data_dir.join("member"));
        sync_dirs(&inside).map_err(|source| io_error("sync", &inside, source))?;
        fs::rename(&from, &to).map_err(|source| io_error("rename", &from, source))?;
        self.made.clear();
        let synced = fs::remove_dir(&inside).and_then(|()| sync_dirs(&self.data_dir));
        synced.map_err(|source| io_error("sync", &self.data_dir, source))?;
        if let Some(parent) = self.data_dir.parent().filter(|parent| !parent.as_os_str().is_empty()) {
            File::open(parent)
                .and_then(|dir| dir.sync_all())
                .map_err(|source| io_error("sync", parent, source))?;
        }
        self.inner = None;
        Ok(())
    }
}

impl Drop for Restoring {
    fn drop(&mut self) {
        for dir in &self.made {
            // Whatever cannot be removed is refused by a server, and named by the next restore.
            let _ = fs::remove_dir_all(dir);
        }
    }
}

fn has_nothing_but_restoring(data_dir: &Path) -> bool {
    match fs::read_dir(data_dir) {
        Ok(mut entries) => entries.all(|entry| entry.is_ok_and(|entry| entry.file_name() == RESTORING)),
        Err(error) => error.kind() == io::ErrorKind::NotFound,
    }
}

/// Syncs a directory and all below it; the files in them are synced by who writes them.
fn sync_dirs(dir: &Path) -> io::Result<()> {
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            sync_dirs(&entry.path())?;
        }
    }
    File::open(dir)?.sync_all()
}

fn io_error(action: &'static str, path: &Path, source: io::Error) -> DataDirError {
    DataDirError::Io { action, path: path.to_owned(), source }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_is_there_whole_or_is_refused() {
        let dir = tempfile::tempdir().expect("a directory");
        let (data, wal) = (dir.path().join("data"), dir.path().join("wal"));
        let restoring = Restoring::begin(&data, Some(&wal)).expect("it begins");
        assert!(matches!(DataDir::open(&data, None), Err(DataDirError::Unfinished { .. })));
        assert!(matches!(Restoring::begin(&data, None), Err(DataDirError::InUse { .. })));
        fs::write(restoring.inner().root().join("file"), "x").expect("it is written");
        drop(restoring);
        assert!(!data.exists() && !wal.exists(), "nothing is left");

        // As a killed one leaves it.
        fs::create_dir_all(data.join("restoring/member/skeg")).expect("a directory");
        assert!(matches!(DataDir::open(&data, None), Err(DataDirError::Unfinished { .. })));
        let restoring = Restoring::begin(&data, Some(&wal)).expect("it begins anew");
        fs::write(restoring.inner().root().join("file"), "x").expect("it is written");
        restoring.finish().expect("it ends");
        assert!(data.join("member/skeg/file").exists() && !data.join("restoring").exists());
        DataDir::open(&data, Some(&wal)).expect("it can be used");
        assert!(matches!(Restoring::begin(&data, None), Err(DataDirError::NotEmpty { .. })));
        let other = dir.path().join("other");
        assert!(matches!(Restoring::begin(&other, Some(&wal)), Err(DataDirError::Exists { .. })));
        assert!(!other.exists());
    }
}
