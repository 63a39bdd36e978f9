//! `skeg-sim`: a whole skeg cluster in one process under one seed. `README.md` says what is real and what is not.

#[expect(unsafe_code, reason = "it takes the place of two functions of the C library")]
mod c_library;
mod client;
mod history;
mod member;
mod net;
mod world;

use std::collections::{BTreeMap, VecDeque};
use std::fs;
use std::path::PathBuf;
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use skeg::clock;
use skeg::sim::Bug;

static PANIC: Mutex<Option<String>> = Mutex::new(None);

/// What has panicked, if anything has.
pub(crate) fn panicked() -> Option<String> {
    PANIC.lock().ok().and_then(|mut panic| panic.take())
}

/// Seeds within which each bug that was put back must be found.
const BUG_SEEDS: std::ops::Range<u64> = 0..60;
/// Time that a seed may take: one that spins in no virtual time would never end.
const SEED_TIME_MAX: Duration = Duration::from_secs(30);

#[derive(Clone, Copy, PartialEq, Eq)]
enum Mode {
    /// One seed, in this process.
    Here,
    /// Many, each in a process of its own.
    Many,
    /// Each bug, until it is found.
    Bugs,
    /// Each seed twice.
    Same,
}

struct Arguments {
    mode: Mode,
    seeds: Vec<u64>,
    bug: Option<Bug>,
    jobs: usize,
    verbose: bool,
}

const USAGE: &str = "\
skeg-sim --seed N | --seeds FROM..TO | --fresh COUNT | --bugs | --same FROM..TO  [--bug NAME] [--jobs N] [--verbose]";

fn main() -> ExitCode {
    let arguments = match parse(std::env::args().skip(1)) {
        Ok(arguments) => arguments,
        Err(text) => {
            eprintln!("{text}\n\n{USAGE}");
            return ExitCode::from(2);
        }
    };
    let passed = match arguments.mode {
        Mode::Here => run_here(&arguments),
        Mode::Many => run_many(&arguments),
        Mode::Bugs => find_bugs(&arguments),
        Mode::Same => run_twice(&arguments),
    };
    if passed { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn parse(mut given: impl Iterator<Item = String>) -> Result<Arguments, String> {
    let mut arguments = Arguments { mode: Mode::Many, seeds: Vec::new(), bug: None, jobs: 2, verbose: false };
    while let Some(flag) = given.next() {
        let mut value = || given.next().ok_or(format!("{flag} needs a value"));
        let number = |text: &str| text.parse::<u64>().map_err(|error| format!("{text}: {error}"));
        match flag.as_str() {
            "--seed" => {
                arguments.seeds = vec![number(&value()?)?];
                arguments.mode = Mode::Here;
            }
            "--seeds" | "--same" => {
                let text = value()?;
                let (from, to) = text.split_once("..").ok_or(format!("{flag} takes FROM..TO"))?;
                arguments.seeds.extend(number(from)?..number(to)?);
                if flag == "--same" {
                    arguments.mode = Mode::Same;
                }
            }
            "--fresh" => {
                let count = number(&value()?)?;
                arguments.seeds.extend((0..count).map(|_| fastrand::u64(1 << 20..1 << 48)));
            }
            "--bugs" => arguments.mode = Mode::Bugs,
            "--jobs" => arguments.jobs = usize::try_from(number(&value()?)?).unwrap_or(1).max(1),
            "--bug" => {
                let name = value()?;
                let found = Bug::ALL.into_iter().find(|bug| format!("{bug:?}") == name);
                arguments.bug = Some(found.ok_or(format!("bugs are {:?}", Bug::ALL))?);
            }
            "--verbose" => arguments.verbose = true,
            _ => return Err(format!("unknown flag {flag}")),
        }
    }
    Ok(arguments)
}

/// Where directories are made: in memory if there is such a place, since real syncs would only cost time.
fn scratch() -> PathBuf {
    let memory = PathBuf::from("/dev/shm");
    if memory.is_dir() { memory } else { std::env::temp_dir() }
}

fn run_here(arguments: &Arguments) -> bool {
    if arguments.verbose {
        tracing_subscriber::fmt().with_writer(std::io::stderr).without_time().with_ansi(false).init();
    }
    std::panic::set_hook(Box::new(|panic| {
        eprintln!("{panic}");
        if let Ok(mut slot) = PANIC.lock() {
            slot.get_or_insert(panic.to_string());
        }
    }));
    skeg::sim::plant(arguments.bug);
    let seed = arguments.seeds.first().copied().unwrap_or(0);
    let dir = scratch().join(format!("skeg-sim-{}-{seed}", std::process::id()));
    let result = fs::create_dir_all(&dir)
        .map_err(|error| error.to_string())
        .and_then(|()| world::run(seed, &dir, arguments.verbose));
    let _ = fs::remove_dir_all(&dir);
    let status = match result {
        Ok(outcome) => {
            println!(
                "seed {seed} trace {:016x}: {} operations, {} answered, {} revisions, {} events, {} crashes, term {}, {} ms",
                outcome.trace,
                outcome.operations,
                outcome.answered,
                outcome.revisions,
                outcome.events,
                outcome.crashes,
                outcome.leaders,
                outcome.millis
            );
            for wrong in outcome.wrong.iter().take(5) {
                println!("  WRONG {wrong}");
            }
            i32::from(!outcome.wrong.is_empty())
        }
        Err(error) => {
            println!("seed {seed}: {error}");
            1
        }
    };
    // Without destructors: what is left of members is not worth closing.
    std::process::exit(status)
}

/// What came of a seed in a process of its own.
struct Ran {
    seed: u64,
    passed: bool,
    text: String,
}

/// Runs each seed in a process of its own: counters of libraries begin anew, and one that hangs can be ended. Goes on for as
/// long as `go_on` says, with what has come of the last one.
#[expect(clippy::disallowed_methods, reason = "there is nothing else to do than to wait")]
fn run(arguments: &Arguments, bug: Option<Bug>, seeds: &[u64], mut go_on: impl FnMut(Ran) -> bool) {
    let program = std::env::current_exe().expect("a program knows where it is");
    let mut waiting: VecDeque<u64> = seeds.iter().copied().collect();
    let mut running: Vec<(u64, Instant, Child)> = Vec::new();
    while !waiting.is_empty() || !running.is_empty() {
        while running.len() < arguments.jobs
            && let Some(seed) = waiting.pop_front()
        {
            let mut command = Command::new(&program);
            command.arg("--seed").arg(seed.to_string()).stdout(Stdio::piped()).stderr(Stdio::null());
            if let Some(bug) = bug {
                command.arg("--bug").arg(format!("{bug:?}"));
            }
            running.push((seed, clock::now(), command.spawn().expect("this program starts")));
        }
        std::thread::sleep(Duration::from_millis(5));
        for at in (0..running.len()).rev() {
            let (_, since, child) = &mut running[at];
            let hangs = since.elapsed() > SEED_TIME_MAX;
            if hangs {
                let _ = child.kill();
            }
            let Ok(Some(status)) = child.try_wait() else { continue };
            let (seed, _, child) = running.remove(at);
            let output = child.wait_with_output().map(|output| output.stdout).unwrap_or_default();
            let mut text = String::from_utf8_lossy(&output).into_owned();
            if hangs {
                text = format!("seed {seed}: took more than {} s\n", SEED_TIME_MAX.as_secs());
            } else if text.is_empty() {
                text = format!("seed {seed}: {status}\n");
            }
            if !go_on(Ran { seed, passed: status.success(), text }) {
                waiting.clear();
                for (_, _, mut child) in running.drain(..) {
                    let _ = child.kill();
                    let _ = child.wait();
                }
                return;
            }
        }
    }
}

fn run_many(arguments: &Arguments) -> bool {
    let started = clock::now();
    let (mut passed, mut failed) = (0, 0);
    run(arguments, arguments.bug, &arguments.seeds, |ran| {
        if ran.passed {
            passed += 1;
        } else {
            failed += 1;
        }
        if !ran.passed || arguments.verbose {
            print!("{}", ran.text);
        }
        if !ran.passed {
            let bug = arguments.bug.map(|bug| format!(" --bug {bug:?}")).unwrap_or_default();
            println!("  replay: sim/run --seed {}{bug}", ran.seed);
        }
        true
    });
    println!("{passed} seeds passed, {failed} failed, {} s", started.elapsed().as_secs());
    failed == 0
}

fn find_bugs(arguments: &Arguments) -> bool {
    let seeds: Vec<u64> = BUG_SEEDS.collect();
    let mut all = true;
    for bug in Bug::ALL {
        let mut tried = 0;
        let mut found = None;
        run(arguments, Some(bug), &seeds, |ran| {
            tried += 1;
            if ran.passed {
                return true;
            }
            found = Some(ran);
            false
        });
        match found {
            Some(ran) => {
                let wrong = ran.text.lines().nth(1).unwrap_or(&ran.text).trim();
                let short: String = wrong.chars().take(200).collect();
                println!("{bug:?}: found after {tried} seeds, by seed {}: {short}", ran.seed);
            }
            None => {
                println!("{bug:?}: not found in {tried} seeds");
                all = false;
            }
        }
    }
    all
}

fn run_twice(arguments: &Arguments) -> bool {
    let mut first = BTreeMap::new();
    run(arguments, arguments.bug, &arguments.seeds, |ran| {
        first.insert(ran.seed, ran.text);
        true
    });
    let mut differ = 0;
    run(arguments, arguments.bug, &arguments.seeds, |ran| {
        if first.get(&ran.seed) != Some(&ran.text) {
            differ += 1;
            println!("seed {} is not the same twice:\n{:?}\n{}", ran.seed, first.get(&ran.seed), ran.text);
        }
        true
    });
    println!("{} seeds twice, {differ} differ", arguments.seeds.len());
    differ == 0
}
