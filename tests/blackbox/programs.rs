//! The two programs under comparison: `skeg` as built for this test, and a stock etcd 3.7.3 from the cache.

use std::ffi::OsString;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{OnceLock, mpsc};
use std::thread;
use std::time::Duration;

/// A refused start takes milliseconds; this only keeps a hang from stopping the tests.
const PATIENCE: Duration = Duration::from_secs(60);

/// What came of running a program to its end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Finished {
    /// Exit status; none when it had to be killed.
    pub(crate) code: Option<i32>,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

pub(crate) fn skeg() -> &'static Path {
    Path::new(env!("CARGO_BIN_EXE_skeg"))
}

pub(crate) fn skegutl() -> &'static Path {
    Path::new(env!("CARGO_BIN_EXE_skegutl"))
}

/// Returns etcd 3.7.3, building it into the cache if it is not there.
pub(crate) fn etcd() -> &'static Path {
    static ETCD: OnceLock<PathBuf> = OnceLock::new();
    ETCD.get_or_init(|| {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("scripts/etcd.sh");
        let output = Command::new(script).stderr(Stdio::inherit()).output().expect("scripts/etcd.sh runs");
        assert!(output.status.success(), "scripts/etcd.sh failed");
        let folder = String::from_utf8(output.stdout).expect("a path in UTF-8");
        Path::new(folder.trim()).join("etcd")
    })
}

/// Runs a program in `directory` until it ends, with no environment but the given.
pub(crate) fn run(
    program: &Path,
    directory: &Path,
    arguments: impl IntoIterator<Item = OsString>,
    environment: &[(&str, &str)],
) -> Finished {
    let mut child = Command::new(program)
        .args(arguments)
        .env_clear()
        .envs(environment.iter().copied())
        .current_dir(directory)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap_or_else(|error| panic!("{}: {error}", program.display()));
    let mut stdout = child.stdout.take().expect("stdout is a pipe");
    let mut stderr = child.stderr.take().expect("stderr is a pipe");
    let (done, ended) = mpsc::channel();
    let readers = [
        thread::spawn(move || read_all(&mut stdout)),
        thread::spawn(move || {
            let text = read_all(&mut stderr);
            // Whoever waits may have given up; the text is returned all the same.
            let _ = done.send(());
            text
        }),
    ];
    let in_time = ended.recv_timeout(PATIENCE).is_ok();
    if !in_time {
        child.kill().expect("a child that was not waited for can be killed");
    }
    let status = child.wait().expect("the child can be waited for");
    let [stdout, stderr] = readers.map(|reader| reader.join().expect("a reader does not panic"));
    Finished { code: status.code().filter(|_| in_time), stdout, stderr }
}

fn read_all(from: &mut impl Read) -> String {
    let mut bytes = Vec::new();
    from.read_to_end(&mut bytes).expect("a pipe can be read");
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Calls `each` for every item, on two threads: etcd's start costs more than the checks.
pub(crate) fn for_each<T: Sync>(items: &[T], each: impl Fn(&T) + Sync) {
    let half = items.len().div_ceil(2);
    thread::scope(|scope| {
        for items in items.chunks(half.max(1)) {
            scope.spawn(|| items.iter().for_each(&each));
        }
    });
}
