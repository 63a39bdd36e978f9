//! `skegutl`: what is done to files while no server runs. Commands, flags, outputs and exit statuses are those of `etcdutl`.
//!
//! ```text
//! arguments ─> command ─> snapshot status, hashkv   read a file of etcd's, ours or theirs; never change it
//!                      ├> snapshot export           a file becomes one for an older etcd
//!                      ├> snapshot restore          a file becomes a data directory of ours
//!                      ├> defrag, migrate           a data directory of ours
//!                      └> version, help
//! ```
//!
//! Output goes to standard output, all else to standard error. Exit statuses: 0, 1 for what failed, 4 for an output format
//! that is not there, 128 for bad arguments of a command; etcd: `pkg/cobrautl/error.go`.

mod arguments;
mod export;
mod print;
mod restore;
#[cfg(test)]
mod tests;

use std::ffi::OsString;
use std::fmt::Display;
use std::io::{self, Write};
use std::path::Path;
use std::process::ExitCode;

use arguments::{Invocation, Parsed};
use print::Format;

use crate::cluster::level;
use crate::process::{ETCD_VERSION, SKEG_VERSION};
use crate::storage::data_dir::DataDir;
use crate::storage::etcd::EtcdFile;
use crate::storage::mvcc::{Store, StoreOptions};
use crate::storage::{EngineOptions, StorageError};

/// Memory of a store that is only rewritten.
const ENGINE: EngineOptions = EngineOptions { memtable_bytes: 16 << 20, block_cache_bytes: 16 << 20 };

/// Why a command ends without having done its work.
#[derive(Debug)]
struct Failure {
    status: u8,
    text: String,
}

impl Failure {
    const ERROR: u8 = 1;
    const BAD_FEATURE: u8 = 4;
    const BAD_ARGUMENTS: u8 = 128;

    fn new(error: impl Display) -> Failure {
        Failure { status: Failure::ERROR, text: error.to_string() }
    }

    fn bad_arguments(error: impl Display) -> Failure {
        Failure { status: Failure::BAD_ARGUMENTS, text: error.to_string() }
    }
}

/// Runs what the command line asks for.
pub fn main() -> ExitCode {
    let out = &mut io::stdout().lock();
    let problems = &mut io::stderr().lock();
    let (status, text) = run(std::env::args_os().skip(1));
    // A reader that went away is no reason to fail.
    let to: &mut dyn Write = if status == 0 { out } else { problems };
    let _ = to.write_all(text.as_bytes()).and_then(|()| to.flush());
    ExitCode::from(status)
}

/// Gives the exit status and what is said: on standard output for 0, else on standard error.
fn run(arguments: impl Iterator<Item = OsString>) -> (u8, String) {
    let invocation = match arguments::parse(arguments) {
        Ok(Parsed::Help(text)) => return (0, text),
        Ok(Parsed::Run(invocation)) => invocation,
        Err(text) => return (Failure::ERROR, text),
    };
    match invoke(&invocation) {
        Ok(text) => (0, text),
        Err(failure) => (failure.status, format!("Error: {}\n", failure.text)),
    }
}

fn invoke(invocation: &Invocation) -> Result<String, Failure> {
    match invocation.command {
        "snapshot status" => status(invocation),
        "snapshot export" => export::export(invocation),
        "snapshot restore" => restore::restore(invocation),
        "hashkv" => hash_kv(invocation),
        "defrag" => defrag(invocation),
        "migrate" => migrate(invocation),
        _ => Ok(version()),
    }
}

fn version() -> String {
    let api = ETCD_VERSION.rsplit_once('.').map_or(ETCD_VERSION, |(api, _)| api);
    format!("etcdutl version: {ETCD_VERSION}\nAPI version: {api}\nskeg version: {SKEG_VERSION}\n")
}

fn status(invocation: &Invocation) -> Result<String, Failure> {
    let [path] = &invocation.positional[..] else {
        return Err(Failure::bad_arguments("snapshot status requires exactly one argument"));
    };
    check_exists(path)?;
    let format = Format::parse(invocation.text("write-out"))?;
    let file = EtcdFile::open(Path::new(path)).map_err(Failure::new)?;
    print::status(format, &file.status().map_err(Failure::new)?)
}

fn hash_kv(invocation: &Invocation) -> Result<String, Failure> {
    let format = Format::parse(invocation.text("write-out"))?;
    let path = &invocation.positional[0];
    check_exists(path)?;
    let revision = invocation.number("rev");
    let file = EtcdFile::open(Path::new(path)).map_err(Failure::new)?;
    let revision = i64::try_from(revision).map_err(Failure::new)?;
    print::hash_kv(format, &file.hash_kv(revision).map_err(Failure::new)?)
}

fn check_exists(path: &OsString) -> Result<(), Failure> {
    match std::fs::metadata(path) {
        Ok(_) => Ok(()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            Err(Failure::new(format!("stat {}: no such file or directory", path.display())))
        }
        Err(error) => Err(Failure::new(format!("stat {}: {error}", path.display()))),
    }
}

/// Rewrites the store of a data directory that no server uses.
fn defrag(invocation: &Invocation) -> Result<String, Failure> {
    let dir = invocation.path("data-dir");
    let name = dir.display();
    let failed =
        |error: &dyn Display| Failure::new(format!("Failed to defragment etcd data[{name}] ({error})"));
    let data_dir = open_claimed(&dir).map_err(|error| failed(&error.text))?;
    let generations = data_dir.generations().map_err(|error| failed(&error))?;
    let rewritten = Store::open(&generations.current_dir(), StoreOptions { engine: ENGINE, heads_bytes: 0 })
        .and_then(|store| level::load(store.engine()).and_then(|_| store.rewrite()));
    rewritten.map_err(|error: StorageError| failed(&error))?;
    Ok(String::new())
}

/// Checks that a data directory has the asked version; there is only one that it can have.
fn migrate(invocation: &Invocation) -> Result<String, Failure> {
    let target = invocation.text("target-version");
    let numbers: Option<(u32, u32)> =
        target.split_once('.').and_then(|(major, minor)| Some((major.parse().ok()?, minor.parse().ok()?)));
    let Some(version) = numbers else {
        let text = format!("wrong target version format, expected \"X.Y\", got {target:?}");
        return Err(Failure::bad_arguments(text));
    };
    if version < (3, 5) {
        let text = format!("target version {target:?} not supported. Minimal \"3.5\"");
        return Err(Failure::bad_arguments(text));
    }
    open_claimed(&invocation.path("data-dir"))?;
    if version == (3, 7) {
        return Ok(String::new());
    }
    Err(Failure::new(format!(
        "a data directory of skeg has storage version 3.7 and no other; it cannot become {target}"
    )))
}

/// Takes a data directory of ours.
fn open_claimed(dir: &Path) -> Result<DataDir, Failure> {
    if !DataDir::is_claimed(dir) {
        let path = dir.join("member/skeg/identity");
        return Err(Failure::new(format!("stat {}: no such file or directory", path.display())));
    }
    DataDir::open(dir, None).map_err(Failure::new)
}
