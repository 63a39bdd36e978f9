//! One member: its runtime, its directory, its lives.
//!
//! A life is a runtime with a clock of its own; a crash drops the runtime with all its tasks, wherever they wait. The next life
//! has a new directory with what was left, so nothing of the old one can reach it.

use std::ffi::OsString;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use skeg::api::Context;
use skeg::clock;
use skeg::config::{self, Config, Request};
use skeg::server::simulated::Simulated;
use skeg::sim::disk::{self, Flip};
use tokio::runtime::Runtime;
use tokio::sync::Notify;
use tokio::task::LocalSet;

use crate::client::CLIENT_PORT;
use crate::net::{self, Host, NETWORK};

const PEER_PORT: u16 = 2380;

/// A host's runtime; its time passes only when it is told so.
pub(crate) struct Machine {
    /// A member's main task; `None` only while it is dropped.
    main: Option<LocalSet>,
    runtime: Runtime,
    host: Host,
    start: tokio::time::Instant,
    /// When it was made, in milliseconds since the start.
    made: u64,
    /// Until when it has run.
    ran: u64,
}

impl Machine {
    pub(crate) fn new(host: Host, now: u64) -> io::Result<Machine> {
        net::enter(host);
        let runtime =
            tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build()?;
        // The paused clock of a runtime stands at the time at which it was made.
        let start = tokio::time::Instant::from_std(clock::now());
        Ok(Machine { main: Some(LocalSet::new()), runtime, host, start, made: now, ran: now })
    }

    pub(crate) fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        net::enter(self.host);
        self.runtime.spawn(task);
    }

    /// Starts the one task that may stay on its thread.
    fn spawn_main(&self, task: impl Future<Output = ()> + 'static) {
        net::enter(self.host);
        if let Some(main) = &self.main {
            main.spawn_local(task);
        }
    }

    /// Runs until a time. If it stood still before, that time is over at once.
    pub(crate) fn run_until(&mut self, now: u64) {
        net::enter(self.host);
        let stood = now.saturating_sub(self.ran + 1);
        let until = self.start + Duration::from_millis(now - self.made);
        let Some(main) = &self.main else { return };
        main.block_on(&self.runtime, async {
            if stood > 0 {
                tokio::time::advance(Duration::from_millis(stood)).await;
            }
            tokio::time::sleep_until(until).await;
        });
        self.ran = now;
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        net::enter(self.host);
        let _context = self.runtime.enter();
        self.main = None;
    }
}

/// What a life tells the world.
#[derive(Default)]
pub(crate) struct Life {
    pub(crate) context: Mutex<Option<Arc<Context>>>,
    pub(crate) joined: Mutex<bool>,
    /// Why it ended.
    pub(crate) ended: Mutex<Option<Ending>>,
    stop: Notify,
}

#[derive(Clone, Debug)]
pub(crate) enum Ending {
    Stopped,
    NotStarted(#[expect(dead_code, reason = "shown")] String),
    Failed(String),
}

/// A member of the simulated cluster.
pub(crate) struct Member {
    pub(crate) host: Host,
    dir: PathBuf,
    lives: u32,
    members: usize,
    options: Vec<String>,
    pub(crate) running: Option<(Machine, Arc<Life>)>,
    pub(crate) flip: Option<Flip>,
    /// A copy of what an earlier life left.
    old: Option<PathBuf>,
    /// What the last life left, while the member runs from the old copy.
    current: Option<PathBuf>,
    /// It is stopping as after a signal.
    pub(crate) stopping: bool,
    /// A failure is expected of this life.
    pub(crate) may_fail: bool,
    /// It stands still until then.
    pub(crate) paused_until: u64,
    /// When it comes back.
    pub(crate) back_at: u64,
    /// Its own history is compared up to here.
    pub(crate) compared: i64,
    pub(crate) revision: i64,
    pub(crate) seen: (u64, u64, u64),
}

impl Member {
    pub(crate) fn new(host: Host, dir: PathBuf, members: usize, options: Vec<String>) -> Member {
        Member {
            host,
            dir,
            lives: 0,
            members,
            options,
            running: None,
            flip: None,
            old: None,
            current: None,
            stopping: false,
            may_fail: false,
            paused_until: 0,
            back_at: 0,
            compared: 0,
            revision: 0,
            seen: (0, 0, 0),
        }
    }

    fn data_dir(&self) -> PathBuf {
        self.dir.join(format!("life-{}", self.lives))
    }

    fn log_dir(&self) -> PathBuf {
        self.data_dir().join("member/skeg/log")
    }

    /// The disk under its log.
    pub(crate) fn disk(&self) -> Arc<disk::Journal> {
        disk::journal(&self.log_dir())
    }

    pub(crate) fn context(&self) -> Option<Arc<Context>> {
        let (_, life) = self.running.as_ref()?;
        life.context.lock().expect("a panic elsewhere ends the run").clone()
    }

    pub(crate) fn has_joined(&self) -> bool {
        self.running
            .as_ref()
            .is_some_and(|(_, life)| *life.joined.lock().expect("a panic elsewhere ends the run"))
    }

    pub(crate) fn ending(&self) -> Option<Ending> {
        let (_, life) = self.running.as_ref()?;
        life.ended.lock().expect("a panic elsewhere ends the run").clone()
    }

    fn config(&self) -> Result<Config, String> {
        let url = |host: Host, port: u16| format!("http://{NETWORK}{host}:{port}");
        let cluster: Vec<String> =
            (1..=self.members).map(|host| format!("m{host}={}", url(host, PEER_PORT))).collect();
        let mut arguments = vec![
            format!("--name=m{}", self.host),
            format!("--data-dir={}", self.data_dir().display()),
            format!("--listen-peer-urls={}", url(self.host, PEER_PORT)),
            format!("--initial-advertise-peer-urls={}", url(self.host, PEER_PORT)),
            format!("--listen-client-urls={}", url(self.host, CLIENT_PORT)),
            format!("--advertise-client-urls={}", url(self.host, CLIENT_PORT)),
            format!("--initial-cluster={}", cluster.join(",")),
        ];
        arguments.extend(self.options.iter().cloned());
        match config::load(arguments.into_iter().map(OsString::from), []) {
            Ok(Request::Run(config)) => Ok(*config),
            Ok(_) => Err("the settings ask for help".to_owned()),
            Err(refusal) => Err(refusal.to_string()),
        }
    }

    /// Begins a life.
    pub(crate) fn start(&mut self, now: u64) -> Result<(), String> {
        assert!(self.running.is_none(), "a member runs once");
        let config = self.config()?;
        let machine = Machine::new(self.host, now).map_err(|error| error.to_string())?;
        net::host_up(self.host);
        let life = Arc::new(Life::default());
        machine.spawn_main(live(config, Arc::clone(&life)));
        self.running = Some((machine, life));
        self.stopping = false;
        self.may_fail = false;
        self.paused_until = 0;
        self.compared = 0;
        self.revision = 0;
        Ok(())
    }

    /// Asks it to stop as a signal would.
    pub(crate) fn stop(&mut self) {
        if let Some((_, life)) = &self.running {
            self.stopping = true;
            life.stop.notify_one();
        }
    }

    /// Ends the life, and leaves to the next what it has on disk.
    pub(crate) fn crash(&mut self, power_cut: bool, silent: bool) -> io::Result<()> {
        let Some(running) = self.running.take() else { return Ok(()) };
        let (old, old_log, journal) = (self.data_dir(), self.log_dir(), self.disk());
        self.lives += 1;
        if old.exists() {
            copy_but(&old, &self.data_dir(), &old_log)?;
        }
        if old_log.exists() {
            journal.survive(&self.log_dir(), power_cut)?;
        }
        net::host_down(self.host, silent);
        drop(running);
        fs::remove_dir_all(&old)
            .or_else(|error| if error.kind() == io::ErrorKind::NotFound { Ok(()) } else { Err(error) })
    }

    /// Keeps a copy of what the last life left, if there is none yet.
    pub(crate) fn keep_copy(&mut self) -> io::Result<()> {
        let old = self.dir.join("old");
        if self.old.is_some() || !self.data_dir().exists() {
            return Ok(());
        }
        copy_but(&self.data_dir(), &old, Path::new(""))?;
        self.old = Some(old);
        Ok(())
    }

    /// True if there is an old copy that is not in use.
    pub(crate) fn has_copy(&self) -> bool {
        self.old.is_some() && self.current.is_none()
    }

    /// True while it runs, or will, from the old copy.
    pub(crate) fn is_a_copy(&self) -> bool {
        self.current.is_some()
    }

    /// True if it has met another in its last life, and has that on disk.
    pub(crate) fn has_met(&self, other: &Member) -> bool {
        let file =
            |member: &Member, name| fs::read_to_string(member.data_dir().join("member/skeg").join(name));
        let (Ok(lives), Ok(peers)) = (file(other, "lives"), file(self, "peers")) else { return false };
        lives.lines().rev().nth(1).is_some_and(|life| peers.lines().any(|line| line == life))
    }

    /// Puts the old copy in the place of what the last life left.
    pub(crate) fn take_copy(&mut self) -> io::Result<()> {
        let Some(old) = self.old.take() else { return Ok(()) };
        self.current = Some(self.data_dir());
        self.lives += 1;
        fs::rename(old, self.data_dir())
    }

    /// Puts back what there was before the old copy.
    pub(crate) fn give_up_copy(&mut self) -> io::Result<()> {
        let Some(current) = self.current.take() else { return Ok(()) };
        fs::remove_dir_all(self.data_dir())?;
        self.lives += 1;
        fs::rename(current, self.data_dir())
    }

    /// Flips a bit of the log that the last life left.
    pub(crate) fn flip_bit(&mut self, last: &disk::Journal) -> io::Result<()> {
        self.flip = last.flip(&self.log_dir())?;
        Ok(())
    }
}

/// A member's life, from its start to a stop or failure.
async fn live(config: Config, life: Arc<Life>) {
    let end = |ending| *life.ended.lock().expect("a panic elsewhere ends the run") = Some(ending);
    let member = match Simulated::start(&config).await {
        Ok(member) => member,
        Err(error) => return end(Ending::NotStarted(format!("{error:#}"))),
    };
    *life.context.lock().expect("a panic elsewhere ends the run") = Some(Arc::clone(member.context()));
    let ending = {
        let mut failed = pin!(member.failed());
        let mut join = pin!(member.join(&config));
        let mut joined = false;
        loop {
            tokio::select! {
                socket = net::accept(PEER_PORT) => member.serve_peer(Box::new(socket)),
                result = &mut join, if !joined => match result {
                    Ok(()) => {
                        joined = true;
                        *life.joined.lock().expect("a panic elsewhere ends the run") = true;
                    }
                    Err(error) => break Ending::Failed(format!("{error:#}")),
                },
                socket = net::accept(CLIENT_PORT), if joined => member.serve_client(Box::new(socket)),
                error = &mut failed => break Ending::Failed(format!("{error:#}")),
                () = life.stop.notified() => break Ending::Stopped,
            }
        }
    };
    *life.context.lock().expect("a panic elsewhere ends the run") = None;
    if matches!(ending, Ending::Stopped) {
        member.stop(&config).await;
    }
    end(ending);
}

/// Copies a directory without one of those in it.
fn copy_but(from: &Path, to: &Path, without: &Path) -> io::Result<()> {
    fs::create_dir_all(to)?;
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let (path, target) = (entry.path(), to.join(entry.file_name()));
        // The reserve holds nothing.
        if path == without || entry.file_name() == "reserve" {
            continue;
        }
        if entry.file_type()?.is_dir() {
            copy_but(&path, &target, without)?;
        } else {
            fs::copy(&path, &target)?;
        }
    }
    Ok(())
}
