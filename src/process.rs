//! How the process behaves towards its surroundings: what it prints, how it is told to stop, how it ends.
//!
//! ```text
//! load settings ─ refused → say why, exit 2 (syntax) or 1
//!    │           └ --help, --version → print, exit 0
//! open the log, repeat the notices about the settings
//!    │
//! serve(config) ─ error → fatal line, exit 1
//!    │            ├ stopped by itself → exit 0
//!    └ signal, drained → die of that signal; exit 0 as process 1, which the kernel does not kill
//! ```
//!
//! This is the order of etcd (etcd: `server/etcdmain/etcd.go`). [`main_with`] runs it; what is served is an argument.

use std::fmt;
use std::io::{self, Write};
use std::process::ExitCode;

use sd_notify::NotifyState;
use tokio::signal::unix::{self, SignalKind};
use tracing::{error, info, warn};

use crate::config::{self, Config, LogLevel, Refusal, Request};
use crate::telemetry::{self, FATAL};

/// The version of etcd that this program speaks, to clients that ask and tools that parse.
pub const ETCD_VERSION: &str = "3.7.3";
/// The version of this program.
pub const SKEG_VERSION: &str = env!("CARGO_PKG_VERSION");

/// Why the server returned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ending {
    /// It was told to.
    Signalled(Signal),
    /// It had nothing left to do, for instance because the member was removed.
    Stopped,
}

/// A signal that asks the process to stop.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Signal {
    /// From the keyboard.
    Interrupt,
    /// From a supervisor.
    Terminate,
}

/// The signals that ask the process to stop; none is lost between two waits.
#[derive(Debug)]
pub struct Signals {
    interrupt: unix::Signal,
    terminate: unix::Signal,
}

impl Signal {
    fn number(self) -> i32 {
        match self {
            Self::Interrupt => signal_hook::consts::SIGINT,
            Self::Terminate => signal_hook::consts::SIGTERM,
        }
    }
}

/// The name Go gives it, as etcd logs it.
impl fmt::Display for Signal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Interrupt => "interrupt",
            Self::Terminate => "terminated",
        })
    }
}

impl Signals {
    /// Starts to catch them; from here on they no longer kill the process. Call it inside a runtime, once the server is
    /// ready: until then a signal should end the process at once, as it does etcd.
    ///
    /// # Errors
    /// When the system refuses a handler.
    pub fn catch() -> io::Result<Self> {
        Ok(Self {
            interrupt: unix::signal(SignalKind::interrupt())?,
            terminate: unix::signal(SignalKind::terminate())?,
        })
    }

    /// Waits for the next one. May be cancelled: a signal that came is given to the next call.
    pub async fn next(&mut self) -> Signal {
        let signal = tokio::select! {
            _ = self.interrupt.recv() => Signal::Interrupt,
            _ = self.terminate.recv() => Signal::Terminate,
        };
        info!(%signal, "received signal; shutting down");
        signal
    }
}

/// Tells systemd that the service is ready; does nothing elsewhere.
pub fn notify_ready() {
    match sd_notify::notify(&[NotifyState::Ready]) {
        Ok(()) => info!("notified init daemon"),
        Err(error) => error!(%error, "failed to notify systemd for readiness"),
    }
}

/// Runs the whole program: settings, log, `serve`, exit status.
///
/// `serve` builds what it needs, a runtime included, and returns when all of it is closed.
pub fn main_with(serve: impl FnOnce(Config) -> anyhow::Result<Ending>) -> ExitCode {
    let config = match config::load(std::env::args_os().skip(1), std::env::vars_os()) {
        Ok(Request::Run(config)) => *config,
        Ok(Request::Help(text)) => {
            say(&mut io::stderr(), config::USAGE);
            say(&mut io::stdout(), &text);
            return ExitCode::SUCCESS;
        }
        Ok(Request::Version) => {
            say(&mut io::stdout(), &version_text());
            return ExitCode::SUCCESS;
        }
        Err(Refusal::Usage(error)) => {
            say(&mut io::stderr(), &format!("{error}\n{}", config::USAGE));
            return ExitCode::from(2);
        }
        Err(Refusal::Invalid(error)) => return refused(&error),
    };
    if let Err(error) = telemetry::init(&config.log) {
        return refused(&error);
    }
    // etcd logs its arguments here; they may hold a password, so we do not.
    info!("etcd-version" = ETCD_VERSION, "skeg-version" = SKEG_VERSION, "starting");
    repeat_notices(&config);
    match serve(config) {
        Ok(Ending::Stopped) => ExitCode::SUCCESS,
        Ok(Ending::Signalled(signal)) => die_of(signal),
        Err(error) => {
            error!(target: FATAL, error = with_causes(&error), "failed to serve");
            ExitCode::FAILURE
        }
    }
}

/// An error and what it comes from, without saying anything twice: many of ours name their cause themselves.
fn with_causes(error: &anyhow::Error) -> String {
    let mut text = error.to_string();
    for cause in error.chain().skip(1).map(ToString::to_string) {
        if !text.contains(&cause) {
            text = format!("{text}: {cause}");
        }
    }
    text
}

/// Ends the process by the signal it was told to stop with, so that its parent sees why; returns only where that is not
/// possible: process 1 exits with 0.
fn die_of(signal: Signal) -> ExitCode {
    if std::process::id() != 1
        && let Err(error) = signal_hook::low_level::emulate_default_handler(signal.number())
    {
        warn!(%error, %signal, "cannot die of the signal");
    }
    ExitCode::SUCCESS
}

fn refused(error: &dyn fmt::Display) -> ExitCode {
    let _log = telemetry::provisional();
    error!(%error, "failed to verify flags");
    ExitCode::FAILURE
}

fn repeat_notices(config: &Config) {
    for notice in &config.notices {
        let (text, flag) = (&notice.text, notice.flag);
        match (notice.level, flag.is_empty()) {
            (LogLevel::Debug | LogLevel::Info, true) => info!("{text}"),
            (LogLevel::Debug | LogLevel::Info, false) => info!(flag, "{text}"),
            (_, true) => warn!("{text}"),
            (_, false) => warn!(flag, "{text}"),
        }
    }
}

/// Returns what `--version` prints. Tools cut etcd's version out of the first line; the next three keep etcd's labels, and
/// say that there is no Go in here.
fn version_text() -> String {
    let (os, arch) = (std::env::consts::OS, go_arch());
    format!(
        "etcd Version: {ETCD_VERSION}\nGit SHA: none (skeg {SKEG_VERSION})\nGo Version: none (Rust)\nGo OS/Arch: {os}/{arch}\nskeg Version: {SKEG_VERSION}\n"
    )
}

fn go_arch() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    }
}

/// Prints; a reader that went away is no reason to fail.
fn say(to: &mut impl Write, text: &str) {
    let _ = to.write_all(text.as_bytes()).and_then(|()| to.flush());
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader};
    use std::os::unix::net::UnixDatagram;
    use std::os::unix::process::ExitStatusExt;
    use std::process::{Command, Stdio};
    use std::time::Duration;

    use rustix::process::{Pid, Signal as Sent, kill_process};

    use super::{Signals, die_of, notify_ready, version_text};

    /// Set in a copy of this test program that is to be told to stop.
    const CHILD: &str = "SKEG_TEST_CHILD";

    #[test]
    fn tools_find_etcds_version_in_the_first_line() {
        let text = version_text();
        let first = text.lines().next().unwrap();
        assert_eq!(first.split(' ').nth(2), Some("3.7.3"));
        let labels: Vec<_> =
            text.lines().filter_map(|line| line.split_once(": ")).map(|(label, _)| label).collect();
        assert_eq!(labels, ["etcd Version", "Git SHA", "Go Version", "Go OS/Arch", "skeg Version"]);
    }

    /// Runs itself as a child that reports ready, catches a signal, and then dies of it.
    #[test]
    fn a_process_told_to_stop_dies_of_the_signal() {
        if std::env::var_os(CHILD).is_some() {
            return be_the_child();
        }
        for (sent, number) in [(Sent::TERM, 15), (Sent::INT, 2)] {
            let directory = tempfile::tempdir().unwrap();
            let socket = UnixDatagram::bind(directory.path().join("notify")).unwrap();
            socket.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
            let mut child = Command::new(std::env::current_exe().unwrap())
                .args(["--exact", "process::tests::a_process_told_to_stop_dies_of_the_signal", "--nocapture"])
                .env(CHILD, "1")
                .env("NOTIFY_SOCKET", directory.path().join("notify"))
                .stdout(Stdio::piped())
                .spawn()
                .unwrap();
            let mut buffer = [0; 64];
            let length = socket.recv(&mut buffer).unwrap();
            assert_eq!(buffer[..length].trim_ascii(), b"READY=1");
            let pid = Pid::from_raw(i32::try_from(child.id()).unwrap()).unwrap();
            kill_process(pid, sent).unwrap();
            let status = child.wait().unwrap();
            assert_eq!(status.signal(), Some(number), "{status}");
            let drained =
                BufReader::new(child.stdout.take().unwrap()).lines().any(|line| line.unwrap() == "drained");
            assert!(drained, "the signal was caught first");
        }
    }

    fn be_the_child() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build().unwrap();
        runtime.block_on(async {
            let mut signals = Signals::catch().unwrap();
            notify_ready();
            let signal = signals.next().await;
            println!("\ndrained");
            die_of(signal);
        });
    }
}
