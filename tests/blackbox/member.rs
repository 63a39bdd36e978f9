//! A member under test: a `skeg` process on free ports that is started, stopped and killed at will.

use std::ffi::OsString;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Mutex, mpsc};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use etcd_client::Client;
use rustix::process::{Pid, Signal, kill_process};

use crate::ports::free_port;
use crate::programs::{Finished, run, skeg};

/// How long a start may take before the test calls it a hang.
const PATIENCE: Duration = Duration::from_secs(120);
/// Bytes of a failed test's members' logs that are shown, of each member the last.
const LOG_SHOWN_BYTES: usize = 100_000;

/// Settings of a member, and its process while it runs.
pub(crate) struct Member {
    directory: PathBuf,
    flags: Vec<OsString>,
    environment: Vec<(String, String)>,
    /// The network namespace in which it runs, if that is not the test's.
    namespace: Option<String>,
    client_port: u16,
    peer_port: u16,
    peer_url: String,
    running: Option<Running>,
    /// The end of what its processes so far have logged, and how they ended.
    logged: String,
}

struct Running {
    child: Child,
    /// Reads the log to its end, so that the process never waits for a reader.
    log: JoinHandle<String>,
    /// Hangs up when the log has ended. Locked only so that a member can be shared.
    log_ended: Mutex<mpsc::Receiver<()>>,
}

impl Member {
    /// A member with its data in `directory`, not yet started.
    pub(crate) fn new(directory: &Path) -> Member {
        let (client_port, peer_port) = (free_port(), free_port());
        let client = format!("http://127.0.0.1:{client_port}");
        let peer = format!("http://127.0.0.1:{peer_port}");
        let mut member = Member {
            directory: directory.to_owned(),
            flags: Vec::new(),
            environment: Vec::new(),
            namespace: None,
            client_port,
            peer_port,
            peer_url: peer.clone(),
            running: None,
            logged: String::new(),
        };
        member.set("data-dir", directory.join("data").to_str().expect("a path in UTF-8"));
        member.set("listen-client-urls", &format!("{client},unix://{}", member.socket().display()));
        member.set("advertise-client-urls", &client);
        member.set("listen-peer-urls", &peer);
        member.set("initial-advertise-peer-urls", &peer);
        member.set("initial-cluster", &format!("default={peer}"));
        member
    }

    /// Adds a flag; of two the last counts.
    pub(crate) fn set(&mut self, flag: &str, value: &str) {
        self.flags.push(format!("--{flag}={value}").into());
    }

    /// Adds a variable to the otherwise empty environment.
    pub(crate) fn set_environment(&mut self, name: &str, value: &str) {
        self.environment.push((name.to_owned(), value.to_owned()));
    }

    /// Its command line.
    pub(crate) fn flags(&self) -> impl Iterator<Item = OsString> {
        self.flags.iter().cloned()
    }

    /// Has it run in a network namespace, where its peers reach it at an address of its own. Clients reach it in the test's
    /// by its unix socket only.
    pub(crate) fn set_namespace(&mut self, name: &str, peer_url: &str) {
        self.namespace = Some(name.to_owned());
        self.set("listen-peer-urls", peer_url);
        self.advertise_peer_url(peer_url);
    }

    /// Where it keeps its data.
    pub(crate) fn data(&self) -> PathBuf {
        self.directory.join("data/member/skeg")
    }

    /// Its data directory.
    pub(crate) fn data_dir(&self) -> PathBuf {
        self.directory.join("data")
    }

    /// Where it logs if it is told to log to a file.
    pub(crate) fn log_file(&self) -> PathBuf {
        self.directory.join("log")
    }

    /// The unix socket on which it listens as well.
    pub(crate) fn socket(&self) -> PathBuf {
        self.directory.join("socket")
    }

    /// Its address for clients.
    pub(crate) fn address(&self) -> String {
        format!("127.0.0.1:{}", self.client_port)
    }

    /// The port on which it listens for clients.
    pub(crate) fn client_port(&self) -> u16 {
        self.client_port
    }

    /// The port on which it listens for other members.
    pub(crate) fn peer_port(&self) -> u16 {
        self.peer_port
    }

    /// Its URL for other members.
    pub(crate) fn peer_url(&self) -> String {
        self.peer_url.clone()
    }

    /// Has the other members reach it elsewhere than where it listens.
    pub(crate) fn advertise_peer_url(&mut self, url: &str) {
        url.clone_into(&mut self.peer_url);
        self.set("initial-advertise-peer-urls", url);
    }

    /// True while its process has not been waited for.
    pub(crate) fn runs(&self) -> bool {
        self.running.is_some()
    }

    /// Starts it and waits until it serves.
    #[track_caller]
    pub(crate) fn start(&mut self) {
        let ready = self.spawn(Command::new(skeg()));
        if ready.recv_timeout(PATIENCE).is_err() {
            let (status, _) = self.kill();
            panic!("the member did not get ready, and ended with {status}: its log is shown");
        }
    }

    /// Starts it without waiting; the receiver hears when it serves, and hangs up when it ends first.
    pub(crate) fn spawn(&mut self, mut command: Command) -> mpsc::Receiver<()> {
        assert!(self.running.is_none(), "it runs already");
        if let Some(namespace) = &self.namespace {
            // It does not fork: the process is the member.
            let mut inside = Command::new("ip");
            inside.args(["netns", "exec", namespace]).arg(command.get_program()).args(command.get_args());
            command = inside;
        }
        let mut child = command
            .args(&self.flags)
            .env_clear()
            .env("PATH", std::env::var_os("PATH").unwrap_or_default())
            .envs(self.environment.iter().map(|(name, value)| (name, value)))
            .current_dir(&self.directory)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap_or_else(|error| panic!("{command:?}: {error}"));
        let stderr = BufReader::new(child.stderr.take().expect("stderr is a pipe"));
        let (ready, is_ready) = mpsc::channel();
        let (ended, log_ended) = mpsc::channel();
        let log = thread::spawn(move || {
            let _until_the_end: mpsc::Sender<()> = ended;
            let mut ready = Some(ready);
            let mut text = String::new();
            for line in stderr.lines() {
                let line = line.expect("the log is text");
                if line.contains("ready to serve client requests")
                    && let Some(ready) = ready.take()
                {
                    // Whoever waited may have given up.
                    let _ = ready.send(());
                }
                text.push_str(&line);
                text.push('\n');
            }
            text
        });
        self.running = Some(Running { child, log, log_ended: Mutex::new(log_ended) });
        is_ready
    }

    /// Starts it when it must not start, and returns what came of that.
    pub(crate) fn start_refused(&self) -> Finished {
        let environment: Vec<_> =
            self.environment.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
        run(skeg(), &self.directory, self.flags.iter().cloned(), &environment)
    }

    /// Its process.
    pub(crate) fn pid(&self) -> u32 {
        self.running.as_ref().expect("it runs").child.id()
    }

    /// Ends it at once, as a crash of the process does; returns its log too.
    pub(crate) fn kill(&mut self) -> (ExitStatus, String) {
        self.running.as_mut().expect("it runs").child.kill().expect("a child can be killed");
        self.wait()
    }

    /// Sends a signal, and waits for the end.
    pub(crate) fn end_by(&mut self, signal: Signal) -> (ExitStatus, String) {
        send(self.pid(), signal);
        self.wait()
    }

    /// Stops it as an operator does.
    pub(crate) fn stop(&mut self) -> String {
        self.end_by(Signal::TERM).1
    }

    /// True if it ends by itself within so long.
    pub(crate) async fn ends_within(&mut self, time: Duration) -> bool {
        let child = &mut self.running.as_mut().expect("it runs").child;
        let ended = async {
            while child.try_wait().expect("a child can be waited for").is_none() {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        tokio::time::timeout(time, ended).await.is_ok()
    }

    /// Waits for its end.
    pub(crate) fn wait(&mut self) -> (ExitStatus, String) {
        let mut running = self.running.take().expect("it runs");
        // The log ends with the process, and whatever it has started.
        let log_ended = running.log_ended.into_inner().expect("nobody panics with it");
        if log_ended.recv_timeout(PATIENCE) == Err(mpsc::RecvTimeoutError::Timeout) {
            running.child.kill().expect("a child can be killed");
            panic!("the member did not end");
        }
        let status = running.child.wait().expect("a child can be waited for");
        let log = running.log.join().expect("the log is read to its end");
        self.logged.push_str(&log);
        self.logged.push_str(&format!("--- ended: {status}\n"));
        let too_much = self.logged.len().saturating_sub(LOG_SHOWN_BYTES);
        self.logged.drain(..self.logged.ceil_char_boundary(too_much));
        (status, log)
    }

    /// A client of its own connection.
    pub(crate) async fn client(&self) -> Client {
        Client::connect([self.address()], None).await.expect("a client for a member that serves")
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        if self.running.is_some() {
            self.kill();
        }
        if thread::panicking() && !self.logged.is_empty() {
            println!("log of {}:\n{}", self.directory.display(), self.logged);
        }
    }
}

/// Sends a signal to a process.
pub(crate) fn send(pid: u32, signal: Signal) {
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw).expect("a process id");
    kill_process(pid, signal).expect("the process takes a signal");
}
