//! A file for an older etcd: the same records, with the versions that it accepts.
//!
//! etcd 3.6 refuses a file that says it is of 3.7, and 3.5 a cluster that is further than itself. Nothing else differs: what
//! etcd stores has not changed since.

use std::collections::BTreeMap;
use std::io::{self, Write};

use super::file::{EtcdFile, FileError};
use super::{CLUSTER, META};
use crate::storage::bolt::{Plan, Value, WriteError, Writer};

/// An etcd that a file can be made for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// Has no storage version.
    V3_5,
    /// Has one, and the same records.
    V3_6,
    /// What a server of today writes.
    V3_7,
}

impl Target {
    /// Reads `3.5`, `3.6` or `3.7`.
    pub fn parse(text: &str) -> Option<Target> {
        match text {
            "3.5" => Some(Target::V3_5),
            "3.6" => Some(Target::V3_6),
            "3.7" => Some(Target::V3_7),
            _ => None,
        }
    }

    fn cluster_version(self) -> &'static [u8] {
        match self {
            Target::V3_5 => b"3.5.0",
            Target::V3_6 => b"3.6.0",
            Target::V3_7 => b"3.7.0",
        }
    }
}

/// Why there is no such file.
#[derive(Debug, thiserror::Error)]
pub enum ConvertError {
    /// The source is not taken.
    #[error(transparent)]
    File(#[from] FileError),
    /// The output failed.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// The source has changed meanwhile, or its buckets are out of order.
    #[error("write a snapshot: {0}")]
    Write(WriteError),
}

impl From<WriteError> for ConvertError {
    fn from(error: WriteError) -> ConvertError {
        match error {
            WriteError::Io(error) => ConvertError::Io(error),
            other => ConvertError::Write(other),
        }
    }
}

/// A measured conversion.
pub struct Conversion<'f> {
    file: &'f EtcdFile,
    target: Target,
    plan: Plan,
}

impl<'f> Conversion<'f> {
    /// Reads the file once.
    ///
    /// # Errors
    /// [`ConvertError`].
    pub fn measure(file: &'f EtcdFile, target: Target) -> Result<Conversion<'f>, ConvertError> {
        file.check_version()?;
        let mut measuring = Writer::measuring();
        feed(file, target, &mut measuring)?;
        Ok(Conversion { file, target, plan: measuring.measured()? })
    }

    /// Writes the other file from front to back, and gives the output back.
    ///
    /// # Errors
    /// [`ConvertError`].
    pub fn write<W: Write>(&self, out: W) -> Result<W, ConvertError> {
        let mut writer = Writer::new(out, self.plan)?;
        feed(self.file, self.target, &mut writer)?;
        Ok(writer.finish()?)
    }
}

fn feed<W: Write>(file: &EtcdFile, target: Target, writer: &mut Writer<W>) -> Result<(), ConvertError> {
    let mut buckets = file.bolt().buckets().map_err(FileError::from)?;
    while let Some(bucket) = buckets.next().map_err(FileError::from)? {
        writer.bucket(bucket.key)?;
        let mut entries = file.bolt().open_bucket(&bucket).map_err(FileError::from)?;
        if bucket.key == META || bucket.key == CLUSTER {
            let mut small = BTreeMap::new();
            while let Some(entry) = entries.next().map_err(FileError::from)? {
                small.insert(entry.key.to_vec(), entry.value.to_vec());
            }
            set_versions(bucket.key, &mut small, target);
            for (key, value) in &small {
                writer.put(key, Value::Bytes(value))?;
            }
            continue;
        }
        while let Some(entry) = entries.next().map_err(FileError::from)? {
            if entry.is_bucket {
                return Err(file.damaged(entry.offset, "a bucket inside of another").into());
            }
            writer.put(entry.key, Value::Bytes(entry.value))?;
        }
    }
    Ok(())
}

fn set_versions(bucket: &[u8], entries: &mut BTreeMap<Vec<u8>, Vec<u8>>, target: Target) {
    let version = target.cluster_version().to_vec();
    match (bucket, target) {
        (CLUSTER, _) => {
            entries.remove(&b"downgrade"[..]);
            entries.insert(b"clusterVersion".to_vec(), version);
        }
        (_, Target::V3_5) => {
            entries.remove(&b"storageVersion"[..]);
        }
        _ => {
            entries.insert(b"storageVersion".to_vec(), version);
        }
    }
}
