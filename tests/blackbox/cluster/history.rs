//! What clients were told, and whether it can be true.
//!
//! The watchers' events are the truth, if all members tell the same without a gap. Against it each call is held that was
//! answered: a write stands at its revision, a read saw what was there at its revision, and revisions follow real time.
//! That rests on what the server says of revisions; the search in [`super::linear`] does without them.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

use super::linear::{self, Span};

/// Keys that the clients share. Few, so that they get in each other's way.
pub(crate) const KEYS: usize = 3;
/// What all keys begin with.
pub(crate) const PREFIX: &str = "load/";

/// The name of a key.
pub(crate) fn key_name(key: usize) -> String {
    format!("{PREFIX}{key}")
}

/// What a client asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Asked {
    Read,
    Write(u64),
    /// Writes `to` if it is `from`, and reads otherwise.
    Swap {
        from: u64,
        to: u64,
    },
}

/// What it was told.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Answer {
    /// The key's value after the call; 0 for none.
    pub(crate) value: u64,
    /// The revision at which the key was written; 0 for never.
    pub(crate) modified: i64,
    /// A swap took place.
    pub(crate) swapped: bool,
    /// The revision in the header.
    pub(crate) revision: i64,
}

/// One call; without an answer it may have happened or not.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Call {
    pub(crate) key: usize,
    pub(crate) asked: Asked,
    pub(crate) begin: Instant,
    pub(crate) answer: Option<(Instant, Answer)>,
}

/// A serializable read of all keys: values and the revisions at which they were written.
#[derive(Clone, Debug)]
pub(crate) struct Glimpse {
    pub(crate) revision: i64,
    pub(crate) keys: BTreeMap<String, (u64, i64)>,
}

/// A change that a watcher saw.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Event {
    pub(crate) revision: i64,
    pub(crate) key: String,
    pub(crate) value: u64,
}

/// All that was recorded.
#[derive(Clone, Debug, Default)]
pub(crate) struct History {
    pub(crate) calls: Vec<Call>,
    pub(crate) glimpses: Vec<Glimpse>,
    /// By member.
    pub(crate) watched: Vec<Vec<Event>>,
    /// Errors that a client does not try again after.
    pub(crate) errors: Vec<String>,
}

impl Call {
    pub(crate) fn revision(&self) -> Option<i64> {
        self.answer.map(|(_, answer)| answer.revision)
    }

    /// The value that it writes, if it does.
    fn writes(&self) -> Option<u64> {
        match self.asked {
            Asked::Read => None,
            Asked::Write(value) => Some(value),
            Asked::Swap { to, .. } => Some(to),
        }
    }

    /// True if it was told that it wrote.
    fn wrote(&self) -> bool {
        match self.asked {
            Asked::Read => false,
            Asked::Write(_) => self.answer.is_some(),
            Asked::Swap { .. } => self.answer.is_some_and(|(_, answer)| answer.swapped),
        }
    }

    fn span(&self) -> Span<Instant> {
        let answer = self.answer.map(|(_, answer)| answer);
        let call = match (self.asked, answer) {
            (Asked::Read, answer) => linear::Call::Read(answer.map_or(0, |answer| answer.value)),
            (Asked::Write(value), _) => linear::Call::Write(value),
            (Asked::Swap { from, to }, answer) => {
                let found = answer.map(|answer| if answer.swapped { Ok(()) } else { Err(answer.value) });
                linear::Call::Swap { from, to, found }
            }
        };
        Span { begin: self.begin, end: self.answer.map(|(end, _)| end), call }
    }
}

impl History {
    /// What is wrong with it; nothing if all can be true.
    pub(crate) fn violations(&self) -> Vec<String> {
        let mut violations = self.watchers_agree();
        if violations.is_empty() {
            let truth = self.watched[0].as_slice();
            violations.extend(self.writes_stand(truth));
            violations.extend(self.reads_saw(truth));
            violations.extend(self.revisions_follow_time());
        }
        for key in 0..KEYS {
            if let Err(violation) = linear::check(&self.spans(key)) {
                violations.push(format!("{}: not linearizable: {violation:?}", key_name(key)));
            }
        }
        violations
    }

    /// One line about what was recorded.
    pub(crate) fn summary(&self) -> String {
        let answered = self.calls.iter().filter(|call| call.answer.is_some()).count();
        let wrote = self.calls.iter().filter(|call| call.wrote()).count();
        format!(
            "{answered} calls answered, {wrote} of them wrote, {} in doubt, {} serializable reads",
            self.calls.len() - answered,
            self.glimpses.len()
        )
    }

    /// Each watcher saw every revision once, in order, and all the same.
    fn watchers_agree(&self) -> Vec<String> {
        let mut violations = Vec::new();
        let first = self.watched.first().map_or(&[][..], Vec::as_slice);
        let start = first.first().map_or(0, |event| event.revision);
        for (member, events) in self.watched.iter().enumerate() {
            for (event, expected) in events.iter().zip(start..) {
                if event.revision != expected {
                    violations
                        .push(format!("the watcher of member {member} saw {event:?}, {expected} was due"));
                    break;
                }
            }
            if let Some((here, there)) = events.iter().zip(first).find(|(here, there)| here != there) {
                violations.push(format!("member {member} tells {here:?}, member 0 {there:?}"));
            }
        }
        if first.is_empty() || self.watched.iter().any(|events| events.len() != first.len()) {
            let lengths: Vec<usize> = self.watched.iter().map(Vec::len).collect();
            violations.push(format!("the watchers saw different numbers of events: {lengths:?}"));
        }
        violations
    }

    /// What was acknowledged stands where that was said, and no value twice or from nowhere.
    fn writes_stand(&self, truth: &[Event]) -> Vec<String> {
        let mut violations = Vec::new();
        let by_revision: BTreeMap<i64, &Event> = truth.iter().map(|event| (event.revision, event)).collect();
        for call in self.calls.iter().filter(|call| call.wrote()) {
            let stands = call.revision().and_then(|revision| by_revision.get(&revision));
            if !stands
                .is_some_and(|event| Some(event.value) == call.writes() && event.key == key_name(call.key))
            {
                violations.push(format!("{call:?} was acknowledged, but there stands {stands:?}"));
            }
        }
        // A swap that was refused, and a call that was never sent, wrote nothing.
        let possible: BTreeSet<u64> = self
            .calls
            .iter()
            .filter(|call| call.wrote() || call.answer.is_none())
            .filter_map(Call::writes)
            .collect();
        let mut seen = BTreeSet::new();
        for event in truth {
            if !possible.contains(&event.value) {
                violations.push(format!("nobody wrote {event:?}"));
            }
            if !seen.insert(event.value) {
                violations.push(format!("{event:?} was written twice"));
            }
        }
        violations
    }

    /// Each read saw what there was at its revision.
    fn reads_saw(&self, truth: &[Event]) -> Vec<String> {
        let mut violations = Vec::new();
        let mut by_key: BTreeMap<&str, BTreeMap<i64, u64>> = BTreeMap::new();
        for event in truth {
            by_key.entry(&event.key).or_default().insert(event.revision, event.value);
        }
        let at = |key: &str, revision: i64| {
            let before = by_key.get(key).and_then(|events| events.range(..=revision).next_back());
            before.map_or((0, 0), |(modified, value)| (*value, *modified))
        };
        for call in &self.calls {
            let Some((_, answer)) = call.answer else { continue };
            let there = at(&key_name(call.key), answer.revision);
            if there != (answer.value, answer.modified) {
                violations.push(format!("{call:?}: there was {there:?}"));
            }
        }
        for glimpse in &self.glimpses {
            for key in (0..KEYS).map(key_name) {
                let seen = glimpse.keys.get(&key).copied().unwrap_or_default();
                let there = at(&key, glimpse.revision);
                if seen != there {
                    violations.push(format!("{glimpse:?}: {key} was {there:?}"));
                }
            }
        }
        violations
    }

    /// A call that began after another was answered has no lower revision; a higher one if it wrote.
    fn revisions_follow_time(&self) -> Vec<String> {
        let mut answered: Vec<(Instant, i64)> =
            self.calls.iter().filter_map(|call| Some((call.answer?.0, call.revision()?))).collect();
        answered.sort_unstable();
        let mut highest = 0;
        for (_, revision) in &mut answered {
            highest = highest.max(*revision);
            *revision = highest;
        }
        let mut violations = Vec::new();
        for call in &self.calls {
            let Some(revision) = call.revision() else { continue };
            let before = answered.partition_point(|(end, _)| *end < call.begin);
            let Some((_, known)) = before.checked_sub(1).map(|last| answered[last]) else { continue };
            if revision < known || (revision == known && call.wrote()) {
                violations.push(format!("{call:?}: revision {known} was acknowledged before it began"));
            }
        }
        violations
    }

    /// The calls of one key. One in doubt whose value nobody has seen is left out: it has changed nothing that shows.
    fn spans(&self, key: usize) -> Vec<Span<Instant>> {
        let calls = || self.calls.iter().filter(|call| call.key == key);
        let mut seen = BTreeSet::new();
        for call in calls() {
            seen.extend(call.answer.map(|(_, answer)| answer.value));
            if let (Asked::Swap { from, .. }, true) = (call.asked, call.wrote()) {
                seen.insert(from);
            }
        }
        let shows =
            |call: &&Call| call.answer.is_some() || call.writes().is_some_and(|value| seen.contains(&value));
        calls().filter(shows).map(Call::span).collect()
    }
}

mod tests {
    use std::time::Duration;

    use skeg::clock::now;

    use super::*;

    /// What three members tell of two writes, a swap, and reads of them.
    fn good() -> History {
        let start = now();
        let call = |at: u64, asked, value, modified, swapped, revision| {
            let begin = start + Duration::from_millis(10 * at);
            let answer = Answer { value, modified, swapped, revision };
            Call { key: 0, asked, begin, answer: Some((begin + Duration::from_millis(5), answer)) }
        };
        let mut calls = vec![
            call(1, Asked::Write(1), 1, 2, false, 2),
            call(2, Asked::Read, 1, 2, false, 2),
            call(3, Asked::Write(2), 2, 3, false, 3),
            call(4, Asked::Swap { from: 1, to: 3 }, 2, 3, false, 3),
            call(5, Asked::Swap { from: 2, to: 4 }, 4, 4, true, 4),
            call(6, Asked::Read, 4, 4, false, 4),
        ];
        calls.push(Call { asked: Asked::Write(5), answer: None, ..calls[0] });
        let event = |revision, value| Event { revision, key: key_name(0), value };
        let events = vec![event(2, 1), event(3, 2), event(4, 4)];
        let keys = BTreeMap::from([(key_name(0), (2, 3))]);
        let glimpses = vec![Glimpse { revision: 3, keys }];
        History { calls, glimpses, watched: vec![events; 3], errors: Vec::new() }
    }

    fn answer(history: &mut History, call: usize) -> &mut Answer {
        &mut history.calls[call].answer.as_mut().unwrap().1
    }

    /// The history with something planted must be refused for that.
    #[track_caller]
    fn refused(because: &str, plant: impl FnOnce(&mut History)) {
        let mut history = good();
        plant(&mut history);
        let violations = history.violations();
        assert!(violations.iter().any(|violation| violation.contains(because)), "{violations:#?}");
    }

    #[test]
    fn a_good_history_is_accepted() {
        assert_eq!(good().violations(), [""; 0]);
    }

    #[test]
    fn a_stale_read_is_found_with_and_without_revisions() {
        let stale = |history: &mut History| {
            *answer(history, 5) = Answer { value: 2, modified: 3, swapped: false, revision: 3 };
        };
        refused("was acknowledged before it began", stale);
        refused("not linearizable", stale);
        refused("there was (4, 4)", |history| answer(history, 5).value = 2);
    }

    #[test]
    fn a_lost_write_is_found() {
        refused("was acknowledged, but there stands", |history| {
            for events in &mut history.watched {
                events.pop();
            }
        });
        refused("not linearizable", |history| answer(history, 4).swapped = false);
    }

    #[test]
    fn a_doubled_write_is_found() {
        let twice = Event { revision: 5, key: key_name(0), value: 2 };
        refused("was written twice", |history| {
            for events in &mut history.watched {
                events.push(twice.clone());
            }
        });
    }

    #[test]
    fn a_refused_swap_that_wrote_is_found() {
        let wrong = Event { revision: 5, key: key_name(0), value: 3 };
        refused("nobody wrote", |history| {
            for events in &mut history.watched {
                events.push(wrong.clone());
            }
        });
    }

    #[test]
    fn what_a_watcher_missed_or_saw_twice_is_found() {
        refused("3 was due", |history| drop(history.watched[1].remove(1)));
        refused("3 was due", |history| {
            let again = history.watched[2][0].clone();
            history.watched[2].insert(1, again);
        });
        refused("different numbers", |history| drop(history.watched[2].pop()));
        refused("member 0", |history| history.watched[1][2].value = 9);
    }

    #[test]
    fn a_serializable_read_of_what_never_was_is_found() {
        refused("load/0 was", |history| history.glimpses[0].revision = 4);
    }

    #[test]
    fn a_call_in_doubt_may_have_happened() {
        let mut history = good();
        for events in &mut history.watched {
            events.push(Event { revision: 5, key: key_name(0), value: 5 });
        }
        assert_eq!(history.violations(), [""; 0]);
    }
}
