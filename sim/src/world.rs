//! The world: a cluster, its clients, and what happens to them, a millisecond at a time.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use skeg::sim::disk::Journal;
use skeg::storage::mvcc::read::{Change, Wish};
use skeg::storage::schema::Trail;

use crate::client::{self, Shared};
use crate::history::{self, History, Log};
use crate::member::{Ending, Machine, Member};
use crate::{c_library, net};

/// Until when things go wrong, in milliseconds.
const TROUBLE_UNTIL: u64 = 16_000;
/// Until when clients begin new work.
const WORK_UNTIL: u64 = 18_500;
/// How long everything may take to be level again.
const LEVEL_WITHIN: u64 = 45_000;
/// Time after which all leases that nobody renews are over.
const LEASES_OVER: u64 = 15_000;

/// What a run came to.
#[derive(Debug)]
pub(crate) struct Outcome {
    /// The same for the same seed, and for hardly any other.
    pub(crate) trace: u64,
    pub(crate) operations: usize,
    pub(crate) answered: usize,
    pub(crate) revisions: usize,
    pub(crate) events: usize,
    pub(crate) crashes: u32,
    pub(crate) leaders: u64,
    pub(crate) millis: u64,
    pub(crate) wrong: Vec<String>,
}

struct World {
    now: u64,
    chance: fastrand::Rng,
    members: Vec<Member>,
    clients: Machine,
    shared: Arc<Shared>,
    log: Log,
    /// The rolling hashes seen, by where they begin and end, and at whom.
    trails: BTreeMap<(u64, u64), (u64, usize)>,
    trace: u64,
    crashes: u32,
    wrong: Vec<String>,
    term: u64,
    verbose: bool,
    heal_at: u64,
}

/// Runs a whole cluster by a seed, in a directory that is empty.
pub(crate) fn run(seed: u64, dir: &Path, verbose: bool) -> Result<Outcome, String> {
    c_library::take_over(seed);
    net::start(seed);
    skeg::sim::connect_by(net::dial);
    let mut chance = fastrand::Rng::with_seed(seed);
    let count = if chance.u8(..6) == 0 { 5 } else { 3 };
    let options = vec![
        "--heartbeat-interval=100".to_owned(),
        "--election-timeout=1000".to_owned(),
        format!("--snapshot-count={}", [20, 100, 1000][chance.usize(..3)]),
        format!("--snapshot-catchup-entries={}", [5, 50, 5000][chance.usize(..3)]),
        format!("--pre-vote={}", chance.u8(..4) > 0),
    ];
    let members =
        (1..=count).map(|host| Member::new(host, dir.join(format!("m{host}")), count, options.clone()));
    let shared = Arc::new(Shared {
        history: Mutex::new(History::default()),
        members: count,
        stopping: AtomicBool::new(false),
        now: AtomicU64::new(0),
    });
    let mut world = World {
        now: 0,
        members: members.collect(),
        clients: Machine::new(0, 0).map_err(|error| error.to_string())?,
        chance,
        shared,
        log: Log::default(),
        trails: BTreeMap::new(),
        trace: 0xCBF2_9CE4_8422_2325,
        crashes: 0,
        wrong: Vec::new(),
        term: 0,
        verbose,
        heal_at: u64::MAX,
    };
    world.start(seed)?;
    world.play()?;
    let history = world.shared.history.lock().expect("a panic elsewhere ends the run");
    if world.wrong.is_empty() {
        world.wrong = history::check(&history, &world.log);
    }
    Ok(Outcome {
        trace: world.trace,
        operations: history.operations.len(),
        answered: history.operations.iter().filter(|operation| operation.answer.is_some()).count(),
        revisions: world.log.revisions.len(),
        events: history.watchers.values().map(|watched| watched.events.len()).sum(),
        crashes: world.crashes,
        leaders: world.term,
        millis: world.now,
        wrong: std::mem::take(&mut world.wrong),
    })
}

/// True if a member ended because its peers said that it has forgotten something.
fn is_forgetful(why: &str) -> bool {
    why.contains("has forgotten")
}

impl World {
    fn start(&mut self, seed: u64) -> Result<(), String> {
        for member in &mut self.members {
            member.start(0)?;
        }
        for id in 1..=5 {
            self.clients.spawn(client::work(id, seed, Arc::clone(&self.shared)));
        }
        for id in 6..=7 {
            self.clients.spawn(client::lease(id, seed, Arc::clone(&self.shared)));
        }
        for id in 8..=10 {
            self.clients.spawn(client::watch(id, seed, Arc::clone(&self.shared)));
        }
        if self.chance.bool() {
            self.clients.spawn(client::compact(11, seed, Arc::clone(&self.shared)));
        }
        Ok(())
    }

    fn play(&mut self) -> Result<(), String> {
        while self.now < WORK_UNTIL && self.wrong.is_empty() {
            if self.now < TROUBLE_UNTIL {
                self.trouble()?;
            } else if self.now == TROUBLE_UNTIL {
                self.end_trouble();
            }
            self.step()?;
        }
        self.shared.stopping.store(true, Ordering::Relaxed);
        let work_ended = self.now;
        while self.wrong.is_empty() && !self.is_level() {
            if self.now > work_ended + LEVEL_WITHIN {
                self.wrong.push(format!("not level again: {}", self.standing()));
            }
            self.step()?;
        }
        let level_at = self.now;
        while self.wrong.is_empty() && self.now < level_at + LEASES_OVER {
            self.step()?;
        }
        while self.wrong.is_empty() && !self.is_level() {
            if self.now > level_at + LEASES_OVER + LEVEL_WITHIN {
                self.wrong.push(format!("not level at the end: {}", self.standing()));
            }
            self.step()?;
        }
        if self.wrong.is_empty() {
            self.compare_members();
        }
        Ok(())
    }

    /// A millisecond.
    fn step(&mut self) -> Result<(), String> {
        c_library::set_now(Duration::from_millis(self.now));
        self.shared.now.store(self.now, Ordering::Relaxed);
        net::deliver(self.now);
        for member in &mut self.members {
            if member.running.is_none() && member.back_at <= self.now {
                member.start(self.now)?;
            }
            if member.paused_until <= self.now
                && let Some((machine, _)) = &mut member.running
            {
                machine.run_until(self.now + 1);
            }
        }
        self.clients.run_until(self.now + 1);
        net::enter(0);
        self.now += 1;
        for at in 0..self.members.len() {
            self.observe(at)?;
        }
        if let Some(panic) = crate::panicked() {
            self.wrong.push(panic);
        }
        Ok(())
    }

    fn note(&mut self, what: &str) {
        for byte in what.bytes().chain(self.now.to_le_bytes()) {
            self.trace = (self.trace ^ u64::from(byte)).wrapping_mul(0x0100_0000_01B3);
        }
        if self.verbose {
            eprintln!("{:>6} {what}", self.now);
        }
    }

    /// Looks at what a member shows.
    fn observe(&mut self, at: usize) -> Result<(), String> {
        let now = self.now;
        if let Some(ending) = self.members[at].ending() {
            self.ended(at, ending)?;
            return Ok(());
        }
        let Some(context) = self.members[at].context() else { return Ok(()) };
        let status = context.node.status();
        let member = &mut self.members[at];
        let seen = (status.term, status.leader, status.applied);
        let changed = member.seen != seen;
        member.seen = seen;
        self.term = self.term.max(status.term);
        let host = member.host;
        let trail = context.state.trails.read().last();
        let (known, whose) = *self.trails.entry((trail.origin, trail.next)).or_insert((trail.hash, host));
        if known != trail.hash {
            let Trail { origin, next, hash } = trail;
            self.wrong.push(format!(
                "members {whose} and {host} have applied entries {origin} to {next} with hashes {known:016x} and {hash:016x}"
            ));
        }
        let store = context.state.store();
        let revision = store.revision();
        if revision < member.revision {
            self.wrong
                .push(format!("member {host} went back from revision {} to {revision}", member.revision));
        } else if revision > member.compared {
            member.revision = revision;
            let from = (member.compared + 1).max(store.compacted());
            member.compared = revision;
            let mut events = Vec::new();
            let read = store.history(from, revision, |_, _, _| Wish::Read, |event| events.push(event));
            read.map_err(|error| error.to_string())?;
            let mut changes: Vec<(i64, Vec<history::Change>)> = Vec::new();
            for event in events {
                let key = String::from_utf8_lossy(&event.key).into_owned();
                let value = match &event.change {
                    Change::Put { value, .. } => Some(String::from_utf8_lossy(value).into_owned()),
                    Change::Delete => None,
                };
                match changes.last_mut() {
                    Some((at, changes)) if *at == event.revision.main => changes.push((key, value)),
                    _ => changes.push((event.revision.main, vec![(key, value)])),
                }
            }
            for (at, changes) in changes {
                // What compaction has thinned out tells nothing.
                if at > store.compacted()
                    && let Err(text) = self.log.take(host, at, changes, now)
                {
                    self.wrong.push(text);
                }
            }
        }
        if changed {
            self.note(&format!(
                "member {host}: term {} leader {:x} applied {} revision {revision}",
                seen.0, seen.1, seen.2
            ));
        }
        Ok(())
    }

    /// A member's life has ended by itself.
    fn ended(&mut self, at: usize, ending: Ending) -> Result<(), String> {
        let host = self.members[at].host;
        self.note(&format!("member {host}: {ending:?}"));
        let flip = self.members[at].flip.take();
        let forgetful = self.members[at].is_a_copy();
        let expected = match &ending {
            Ending::Stopped => self.members[at].stopping,
            Ending::Failed(why) => {
                self.members[at].may_fail || flip.is_some() || (forgetful && is_forgetful(why))
            }
            Ending::NotStarted(_) => flip.is_some(),
        };
        if !expected {
            self.wrong.push(format!("member {host} ended: {ending:?}"));
        }
        let back_in = self.chance.u64(10..2000);
        let member = &mut self.members[at];
        member.crash(false, false).map_err(|error| error.to_string())?;
        member.back_at = self.now + back_in;
        if matches!(&ending, Ending::Failed(why) if is_forgetful(why)) {
            // An operator finds what was there last.
            member.give_up_copy().map_err(|error| error.to_string())?;
        }
        if let Some(mut flip) = flip {
            // An operator puts back what was there; the directory is the next life's.
            flip.move_to(&member.disk());
            flip.undo().map_err(|error| error.to_string())?;
        }
        Ok(())
    }

    fn crash(&mut self, at: usize, power_cut: bool) -> Result<(), String> {
        let (silent, flips, back_in) =
            (power_cut && self.chance.bool(), self.chance.u8(..8) == 0, self.chance.u64(10..4000));
        let last: Arc<Journal> = self.members[at].disk();
        let member = &mut self.members[at];
        if member.running.is_none() {
            return Ok(());
        }
        member.crash(power_cut, silent).map_err(|error| error.to_string())?;
        member.back_at = self.now + back_in;
        member.flip = None;
        if flips && !member.is_a_copy() {
            member.flip_bit(&last).map_err(|error| error.to_string())?;
        }
        self.crashes += 1;
        let (host, flipped) = (self.members[at].host, self.members[at].flip.is_some());
        self.note(&format!("crash of {host}, power cut {power_cut}, silent {silent}, bit flipped {flipped}, back in {back_in}"));
        if flipped { Ok(()) } else { self.copy(at) }
    }

    /// Perhaps keeps a copy of what a member left that has just crashed, or has it come back from the one it left earlier.
    fn copy(&mut self, at: usize) -> Result<(), String> {
        let (keeps, takes) = (self.chance.bool(), self.chance.u8(..3) > 0);
        let member = &self.members[at];
        // Who has not met it since cannot know.
        let known = || self.members.iter().enumerate().all(|(other, one)| other == at || one.has_met(member));
        if takes && member.has_copy() && known() {
            self.members[at].take_copy().map_err(|error| error.to_string())?;
            self.note(&format!("member {} comes back from an old copy", at + 1));
        } else if keeps && !member.is_a_copy() {
            self.members[at].keep_copy().map_err(|error| error.to_string())?;
        }
        Ok(())
    }

    /// Perhaps lets something go wrong.
    fn trouble(&mut self) -> Result<(), String> {
        if self.heal_at == self.now {
            net::heal();
            self.note("links mended");
        }
        if self.chance.u16(..400) > 0 {
            return Ok(());
        }
        let at = self.chance.usize(..self.members.len());
        let host = self.members[at].host;
        let leads = |member: &Member| member.context().is_some_and(|context| context.node.is_leader());
        let at = if self.chance.bool() { self.members.iter().position(leads).unwrap_or(at) } else { at };
        match self.chance.u8(..24) {
            0..3 => self.crash(at, false)?,
            3..6 => self.crash(at, true)?,
            6 => {
                let (power_cut, all) = (self.chance.bool(), self.chance.bool());
                for at in 0..self.members.len() {
                    if all || self.chance.bool() {
                        self.crash(at, power_cut)?;
                    }
                }
            }
            7..11 => self.cut(at),
            11..13 => {
                for other in 0..=self.members.len() {
                    net::reset_between(host, other);
                }
                self.note(&format!("streams of {host} reset"));
            }
            13..15 => {
                let (other, by) = (self.chance.usize(..=self.members.len()), self.chance.u64(5..400));
                net::slow(host, other, by);
                self.note(&format!("link from {host} to {other} slower by {by}"));
                self.heal_later();
            }
            15..17 => {
                let time = self.chance.u64(50..4000);
                self.members[at].paused_until = self.now + time;
                self.note(&format!("member {} stands still for {time}", at + 1));
            }
            17..19 => {
                let by = if self.chance.bool() { self.chance.u64(1..50) } else { self.chance.u64(100..1500) };
                let by = if self.chance.u8(..3) == 0 { 0 } else { by };
                self.members[at].disk().slow_by(Duration::from_millis(by));
                self.note(&format!("disk of {} slower by {by}", at + 1));
            }
            19 => {
                if self.members[at].running.is_some() {
                    let syncs = self.chance.u64(..20);
                    self.members[at].may_fail = true;
                    self.members[at].disk().fail_after(syncs);
                    self.note(&format!("disk of {} fails after {syncs} syncs", at + 1));
                }
            }
            20..22 => {
                self.members[at].stop();
                self.note(&format!("member {} told to stop", at + 1));
            }
            _ => {
                if let Some((machine, context)) = self.members[at]
                    .running
                    .as_ref()
                    .map(|running| &running.0)
                    .zip(self.members[at].context())
                {
                    machine.spawn(async move { drop(context.node.checkpoint().await) });
                    self.note(&format!("member {} flushes", at + 1));
                }
            }
        }
        Ok(())
    }

    fn heal_later(&mut self) {
        self.heal_at = self.now + self.chance.u64(100..4000);
    }

    /// Cuts a member off, one or both ways, or the members in two, or one link.
    fn cut(&mut self, at: usize) {
        let host = at + 1;
        let kind = self.chance.u8(..5);
        let (outward, inward) = match self.chance.u8(..4) {
            0 => (true, false),
            1 => (false, true),
            _ => (true, true),
        };
        let clients_too = self.chance.u8(..3) == 0;
        let mut part: Vec<usize> = vec![host];
        let mut others: Vec<usize> =
            (usize::from(!clients_too)..=self.members.len()).filter(|other| *other != host).collect();
        if kind == 0 {
            let link = self.chance.usize(..others.len());
            others = vec![others[link]];
        } else if kind == 1 && self.members.len() > 3 {
            let companion = self.chance.usize(..others.len());
            part.push(others.remove(companion));
        }
        for one in &part {
            for other in &others {
                if outward {
                    net::cut(*one, *other);
                }
                if inward {
                    net::cut(*other, *one);
                }
            }
        }
        self.note(&format!("cut {part:?} from {others:?}, outward {outward}, inward {inward}"));
        self.heal_later();
    }

    fn end_trouble(&mut self) {
        net::heal();
        for member in &mut self.members {
            member.paused_until = member.paused_until.min(self.now);
            member.back_at = member.back_at.min(self.now);
            member.disk().slow_by(Duration::ZERO);
        }
        self.note("all is well from here on");
    }

    /// True if all members run, have applied the same, and watchers have been told.
    fn is_level(&self) -> bool {
        let Some(first) = self.members.first().map(|member| member.seen) else { return true };
        let members = self
            .members
            .iter()
            .all(|member| member.has_joined() && !member.is_a_copy() && member.seen == first && first.1 != 0);
        let history = self.shared.history.lock().expect("a panic elsewhere ends the run");
        let last = self
            .log
            .revisions
            .iter()
            .rev()
            .find(|(_, at)| at.changes.iter().any(|(key, _)| key.starts_with('k')));
        let last = last.map_or(0, |(revision, _)| *revision);
        members && history.watchers.values().all(|watched| watched.reached >= last)
    }

    fn standing(&self) -> String {
        let members: Vec<_> =
            self.members.iter().map(|member| (member.host, member.has_joined(), member.seen)).collect();
        let history = self.shared.history.lock().expect("a panic elsewhere ends the run");
        let watchers: Vec<_> = history.watchers.values().map(|watched| watched.reached).collect();
        format!("{members:?}, watchers {watchers:?} of {}", self.log.last())
    }

    /// Hashes of all members are equal at several revisions, and no lease is left.
    fn compare_members(&mut self) {
        let contexts: Vec<_> = self.members.iter().filter_map(Member::context).collect();
        let last = self.log.last();
        for back in [0, 1, 7, 50] {
            let mut hashes = Vec::new();
            for context in &contexts {
                match context.state.store().hash_kv((last - back).max(1)) {
                    Ok((hash, _)) => hashes.push(Some((hash.hash, hash.compact_revision))),
                    Err(_) => hashes.push(None),
                }
            }
            if hashes.windows(2).any(|pair| pair[0] != pair[1]) {
                self.wrong.push(format!("hashes differ at revision {}: {hashes:?}", last - back));
            }
        }
        for (context, member) in contexts.iter().zip(&self.members) {
            let left = context.state.leases.read().iter().count();
            if left > 0 {
                self.wrong.push(format!("member {} still has {left} leases", member.host));
            }
        }
    }
}
