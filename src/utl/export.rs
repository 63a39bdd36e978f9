//! `skegutl snapshot export`: a snapshot for an etcd that is older than the one it says it is of. etcdutl has nothing like it.

use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use super::arguments::Invocation;
use super::restore::check_sum;
use super::{Failure, check_exists};
use crate::storage::etcd::{Conversion, EtcdFile, Target};

/// Runs the command.
pub(super) fn export(invocation: &Invocation) -> Result<String, Failure> {
    let [path] = &invocation.positional[..] else {
        return Err(Failure::bad_arguments("snapshot export requires exactly one argument"));
    };
    let asked = invocation.text("target-version");
    let target = Target::parse(asked).ok_or_else(|| {
        Failure::bad_arguments(format!("target version {asked:?} not supported: it is 3.5, 3.6 or 3.7"))
    })?;
    check_exists(path)?;
    let output = invocation.path("output");
    if output.exists() {
        return Err(Failure::new(format!("{} exists", output.display())));
    }
    let file = EtcdFile::open(Path::new(path)).map_err(Failure::new)?;
    if invocation.is_on("skip-hash-check") {
        file.bolt().check().map_err(Failure::new)?;
    } else {
        check_sum(Path::new(path))?;
    }
    let conversion = Conversion::measure(&file, target).map_err(Failure::new)?;
    let part = Part::create(&output).map_err(|error| failed(&output, &error))?;
    let summed = Summed { out: BufWriter::new(&part.file), sum: Sha256::new() };
    let summed = conversion.write(summed).map_err(Failure::new)?;
    summed.finish().and_then(|()| part.finish(&output)).map_err(|error| failed(&output, &error))?;
    Ok(format!("exported {} for etcd {asked}\n", output.display()))
}

fn failed(output: &Path, error: &io::Error) -> Failure {
    Failure::new(format!("write {}: {error}", output.display()))
}

/// A file that is not there until it is whole.
struct Part {
    file: File,
    path: PathBuf,
}

impl Part {
    fn create(output: &Path) -> io::Result<Part> {
        let mut path = output.as_os_str().to_owned();
        path.push(".part");
        let path = PathBuf::from(path);
        Ok(Part { file: File::create(&path)?, path })
    }

    fn finish(self, output: &Path) -> io::Result<()> {
        self.file.sync_all()?;
        fs::rename(&self.path, output)?;
        let parent = output.parent().filter(|parent| !parent.as_os_str().is_empty());
        File::open(parent.unwrap_or(Path::new(".")))?.sync_all()
    }
}

impl Drop for Part {
    fn drop(&mut self) {
        // It is gone by now if it is whole.
        let _ = fs::remove_file(&self.path);
    }
}

/// Sums up what is written, to write the sum behind it.
struct Summed<W> {
    out: W,
    sum: Sha256,
}

impl<W: Write> Summed<W> {
    fn finish(mut self) -> io::Result<()> {
        let sum = std::mem::take(&mut self.sum).finalize();
        self.out.write_all(&sum)?;
        self.out.flush()
    }
}

impl<W: Write> Write for Summed<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.out.write(bytes)?;
        self.sum.update(&bytes[..written]);
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}
