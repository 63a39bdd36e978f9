//! What clients did and were told, and what must be true of it.
//!
//! The log of changes is seen from outside: each member's own history is read as it grows, and all must tell the same. Every write
//! carries a value of its own and every answer a revision, so the order in which operations took effect need not be searched for:
//! it is claimed, and checked against the log, against what each answer says, and against who was done before whom began.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;

use crate::net::Host;

/// Whose value a key got; `None` for a delete.
pub(crate) type Change = (String, Option<String>);

/// What a client asked for.
#[derive(Clone, Debug)]
pub(crate) enum Action {
    /// All of it at one revision, if the key was last changed at that revision.
    Write { compare: Option<(String, i64)>, changes: Vec<Change> },
    /// The keys from one to before the other.
    Read { from: String, to: String, serializable: bool },
}

/// What it was told.
#[derive(Clone, Debug)]
pub(crate) struct Answer {
    pub(crate) revision: i64,
    /// False if the comparison was not met.
    pub(crate) met: bool,
    /// Key, value, revision of the last change.
    pub(crate) found: Vec<(String, String, i64)>,
}

/// One operation; its times are places in the order of all that happens.
#[derive(Clone, Debug)]
pub(crate) struct Operation {
    #[expect(dead_code, reason = "shown when it is wrong")]
    pub(crate) client: usize,
    #[expect(dead_code, reason = "shown when it is wrong")]
    pub(crate) member: Host,
    pub(crate) began: u64,
    pub(crate) ended: u64,
    pub(crate) action: Action,
    /// `None` when it is not known.
    pub(crate) answer: Option<Answer>,
}

/// What a watcher was sent.
#[derive(Debug, Default)]
pub(crate) struct Watched {
    pub(crate) from: i64,
    pub(crate) events: Vec<(i64, Change)>,
    /// Revisions that were compacted before it came to them.
    pub(crate) missed: Vec<(i64, i64)>,
    /// All up to here has been seen.
    pub(crate) reached: i64,
}

/// What a lease's holder was promised.
#[derive(Debug)]
pub(crate) struct Lease {
    pub(crate) key: String,
    /// Milliseconds since the start until which it must live.
    pub(crate) until: u64,
    pub(crate) revoked: bool,
}

#[derive(Debug, Default)]
pub(crate) struct History {
    order: u64,
    pub(crate) operations: Vec<Operation>,
    pub(crate) watchers: BTreeMap<usize, Watched>,
    pub(crate) leases: BTreeMap<i64, Lease>,
}

impl History {
    pub(crate) fn next(&mut self) -> u64 {
        self.order += 1;
        self.order
    }

    /// Takes an operation that ends now.
    pub(crate) fn end(&mut self, operation: Operation) {
        let ended = self.next();
        self.operations.push(Operation { ended, ..operation });
    }
}

/// Changes at one revision.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Revision {
    pub(crate) changes: Vec<Change>,
    /// When a member had first applied it.
    pub(crate) seen: u64,
}

/// The changes that members have applied.
#[derive(Debug, Default)]
pub(crate) struct Log {
    pub(crate) revisions: BTreeMap<i64, Revision>,
}

impl Log {
    /// Takes what a member applied at a revision.
    pub(crate) fn take(
        &mut self,
        member: Host,
        at: i64,
        changes: Vec<Change>,
        now: u64,
    ) -> Result<(), String> {
        let known =
            self.revisions.entry(at).or_insert_with(|| Revision { changes: changes.clone(), seen: now });
        if known.changes == changes {
            return Ok(());
        }
        Err(format!("member {member} has {changes:?} at revision {at}, where others had {:?}", known.changes))
    }

    pub(crate) fn last(&self) -> i64 {
        self.revisions.last_key_value().map_or(1, |(revision, _)| *revision)
    }

    /// By key, each change with its revision.
    fn by_key(&self) -> BTreeMap<&str, Vec<(i64, Option<&str>)>> {
        let mut keys: BTreeMap<&str, Vec<_>> = BTreeMap::new();
        for (at, revision) in &self.revisions {
            for (key, value) in &revision.changes {
                keys.entry(key).or_default().push((*at, value.as_deref()));
            }
        }
        keys
    }
}

/// Everything that is wrong with what was recorded.
pub(crate) fn check(history: &History, log: &Log) -> Vec<String> {
    let mut wrong = Vec::new();
    let keys = log.by_key();
    check_values(log, &mut wrong);
    for operation in &history.operations {
        if let Some(answer) = &operation.answer
            && let Err(text) = check_answer(operation, answer, log, &keys)
        {
            wrong.push(format!("{text}: {operation:?}"));
        }
    }
    check_order(history, log, &mut wrong);
    for (watcher, watched) in &history.watchers {
        if let Err(text) = check_watched(watched, log) {
            wrong.push(format!("watcher {watcher}: {text}"));
        }
    }
    check_leases(history, log, &mut wrong);
    wrong
}

/// No value was written twice.
fn check_values(log: &Log, wrong: &mut Vec<String>) {
    let mut seen = BTreeSet::new();
    for (at, revision) in &log.revisions {
        for (key, value) in &revision.changes {
            if let Some(value) = value
                && !seen.insert((key, value))
            {
                wrong.push(format!("{value} was written to {key} again at revision {at}"));
            }
        }
    }
}

type ByKey<'l> = BTreeMap<&'l str, Vec<(i64, Option<&'l str>)>>;

fn value_at<'l>(keys: &ByKey<'l>, key: &str, revision: i64) -> Option<(i64, &'l str)> {
    let versions = keys.get(key)?;
    let after = versions.partition_point(|(at, _)| *at <= revision);
    let (at, value) = versions[..after].last()?;
    value.map(|value| (*at, value))
}

/// An answer says what the log says.
fn check_answer(operation: &Operation, answer: &Answer, log: &Log, keys: &ByKey<'_>) -> Result<(), String> {
    match &operation.action {
        Action::Read { from, to, .. } => {
            let expected: Vec<(String, String, i64)> = keys
                .range::<str, _>((Bound::Included(from.as_str()), Bound::Excluded(to.as_str())))
                .filter_map(|(key, _)| {
                    let (at, value) = value_at(keys, key, answer.revision)?;
                    Some(((*key).to_owned(), value.to_owned(), at))
                })
                .collect();
            if answer.found == expected {
                Ok(())
            } else {
                Err(format!("a read should have found {expected:?}"))
            }
        }
        Action::Write { compare, changes } => {
            if let Some((key, expected)) = compare {
                // What it compared with stood before it.
                let before = if answer.met { answer.revision - 1 } else { answer.revision };
                let stood = value_at(keys, key, before).map_or(0, |(at, _)| at);
                if answer.met != (stood == *expected) {
                    return Err(format!("{key} was changed at {stood}"));
                }
                if !answer.met {
                    return Ok(());
                }
            }
            let effective: Vec<Change> = changes
                .iter()
                .filter(|(key, value)| value.is_some() || value_at(keys, key, answer.revision - 1).is_some())
                .cloned()
                .collect();
            let deletes_nothing = effective.is_empty()
                && changes.iter().all(|(key, _)| value_at(keys, key, answer.revision).is_none());
            if deletes_nothing {
                return Ok(());
            }
            let applied = log.revisions.get(&answer.revision).map(|revision| &revision.changes);
            if applied == Some(&effective) { Ok(()) } else { Err(format!("the log has {applied:?}")) }
        }
    }
}

/// What was done before something began is before it.
fn check_order(history: &History, log: &Log, wrong: &mut Vec<String>) {
    let mut ends: Vec<(u64, i64)> = history
        .operations
        .iter()
        .filter_map(|operation| Some((operation.ended, operation.answer.as_ref()?.revision)))
        .collect();
    ends.sort_unstable();
    let mut newest = 0;
    for end in &mut ends {
        newest = newest.max(end.1);
        end.1 = newest;
    }
    for operation in &history.operations {
        let Some(answer) = &operation.answer else { continue };
        let before = ends.partition_point(|(ended, _)| *ended < operation.began);
        let Some((_, newest)) = before.checked_sub(1).map(|at| ends[at]) else { continue };
        let (stale, effective) = match &operation.action {
            Action::Read { serializable, .. } => (!serializable && answer.revision < newest, false),
            Action::Write { changes, .. } => {
                let own = log
                    .revisions
                    .get(&answer.revision)
                    .is_some_and(|at| at.changes.iter().any(|c| changes.contains(c) && c.1.is_some()));
                (answer.revision < newest, own)
            }
        };
        if stale || (effective && answer.revision == newest) {
            wrong.push(format!("revision {newest} was known before this began: {operation:?}"));
        }
    }
}

/// Every event once, in order.
fn check_watched(watched: &Watched, log: &Log) -> Result<(), String> {
    let missed = |revision: i64| watched.missed.iter().any(|(from, to)| (*from..*to).contains(&revision));
    let expected = log
        .revisions
        .range(watched.from..)
        .filter(|(at, _)| !missed(**at))
        .flat_map(|(at, revision)| revision.changes.iter().map(|change| (*at, change)))
        .filter(|(_, (key, _))| key.starts_with('k'));
    let mut given = watched.events.iter();
    for (at, change) in expected {
        match given.next() {
            Some((revision, event)) if *revision == at && event == change => {}
            other => return Err(format!("should have been sent {change:?} at {at}, was sent {other:?}")),
        }
    }
    given.next().map_or(Ok(()), |extra| Err(format!("was sent {extra:?}, which is not in the log")))
}

/// No lease ended before what its holder was promised.
fn check_leases(history: &History, log: &Log, wrong: &mut Vec<String>) {
    let keys = log.by_key();
    for (id, lease) in &history.leases {
        let deleted =
            keys.get(lease.key.as_str()).and_then(|changes| changes.iter().find(|change| change.1.is_none()));
        let Some((at, _)) = deleted else { continue };
        let seen = log.revisions.get(at).map_or(0, |revision| revision.seen);
        if !lease.revoked && seen < lease.until {
            wrong.push(format!("lease {id} ended at {seen} ms, promised until {}", lease.until));
        }
    }
}
