//! Compaction that nobody asks for: by age or by count of revisions, as `--auto-compaction-*` says. The leader proposes it; every
//! member keeps track, so that a new leader goes on where the old one was. etcd: `server/etcdserver/api/v3compactor`

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use tracing::{info, warn};

use crate::apply::{Refusal, State};
use crate::clock;
use crate::config::AutoCompaction;
use crate::proto::etcdserverpb::CompactionRequest;
use crate::proto::skegpb::command::Kind;
use crate::raft::Node;

/// Longest time between two compactions by age.
const INTERVAL_MAX: Duration = Duration::from_secs(3600);
/// Looks per interval: how exactly an age is met, and how soon a failure is tried again.
const LOOKS: u32 = 10;
/// Shortest time between two looks; less than it takes to compact would be in vain.
const LOOK_MIN: Duration = Duration::from_millis(1);
/// Time between compactions by count.
const COUNT_EVERY: Duration = Duration::from_secs(300);

/// Compacts for as long as the member runs.
pub async fn run(node: Node, state: State, what: AutoCompaction) {
    let mut rule = match what {
        AutoCompaction::Off => return,
        AutoCompaction::Periodic(age) => Rule::Age(History::new(age, clock::now())),
        AutoCompaction::Revision(kept) => {
            Rule::Count { kept: i64::try_from(kept.get()).unwrap_or(i64::MAX), done: 0 }
        }
    };
    loop {
        if let Rule::Age(history) = &mut rule {
            history.record(state.store().revision());
        }
        tokio::time::sleep(rule.look_every()).await;
        if !node.is_leader() {
            continue;
        }
        let Some(revision) = rule.due(state.store().revision(), clock::now()) else { continue };
        info!(revision, "starting auto compaction");
        let request = CompactionRequest { revision, physical: false };
        match node.propose(Kind::Compaction(request)).await {
            Ok(Ok(_) | Err(Refusal::Compacted)) => {
                info!(revision, "completed auto compaction");
                rule.done(revision, clock::now());
            }
            Ok(Err(refusal)) => warn!(revision, %refusal, "failed auto compaction"),
            Err(error) => warn!(revision, %error, "failed auto compaction"),
        }
    }
}

/// What is due when.
enum Rule {
    Age(History),
    /// Keeps so many revisions before the current one; `done` is the last compaction.
    Count {
        kept: i64,
        done: i64,
    },
}

impl Rule {
    fn look_every(&self) -> Duration {
        match self {
            Rule::Age(history) => history.look_every(),
            Rule::Count { .. } => COUNT_EVERY,
        }
    }

    /// The revision to compact now.
    fn due(&mut self, current: i64, now: Instant) -> Option<i64> {
        match self {
            Rule::Age(history) => history.due(now),
            Rule::Count { kept, done } => {
                let revision = current.saturating_sub(*kept);
                (revision > 0 && revision != *done).then_some(revision)
            }
        }
    }

    fn done(&mut self, revision: i64, now: Instant) {
        match self {
            Rule::Age(history) => history.done(revision, now),
            Rule::Count { done, .. } => *done = revision,
        }
    }
}

/// The revisions at past looks, back to the age that is kept.
struct History {
    age: Duration,
    /// Oldest first.
    revisions: VecDeque<i64>,
    /// When the last compaction was done, or the member started.
    last: Instant,
    /// What must have gone by since then: at first the whole age.
    wait: Duration,
    done: i64,
}

impl History {
    fn new(age: Duration, now: Instant) -> History {
        History { age, revisions: VecDeque::new(), last: now, wait: age, done: 0 }
    }

    fn interval(&self) -> Duration {
        self.age.min(INTERVAL_MAX)
    }

    fn look_every(&self) -> Duration {
        (self.interval() / LOOKS).max(LOOK_MIN)
    }

    fn record(&mut self, revision: i64) {
        let looks = self.age.as_nanos() / self.look_every().as_nanos();
        let kept = usize::try_from(looks).unwrap_or(usize::MAX).saturating_add(1);
        self.revisions.push_back(revision);
        while self.revisions.len() > kept {
            self.revisions.pop_front();
        }
    }

    fn due(&mut self, now: Instant) -> Option<i64> {
        if now.duration_since(self.last) < self.wait {
            return None;
        }
        self.wait = self.interval();
        self.revisions.front().copied().filter(|&revision| revision > 0 && revision != self.done)
    }

    fn done(&mut self, revision: i64, now: Instant) {
        self.done = revision;
        self.last = now;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Looks for `hours`, one revision a second; gives when (in minutes) and what (in seconds) was compacted.
    fn compactions(age: Duration, hours: u64) -> Vec<(u64, i64)> {
        let start = clock::now();
        let mut history = History::new(age, start);
        let (mut now, mut found) = (start, Vec::new());
        while now.duration_since(start) < Duration::from_secs(hours * 3600) {
            history.record(i64::try_from(now.duration_since(start).as_secs()).unwrap() + 1);
            now += history.look_every();
            if let Some(revision) = history.due(now) {
                found.push((now.duration_since(start).as_secs() / 60, revision - 1));
                history.done(revision, now);
            }
        }
        found
    }

    #[test]
    fn an_age_below_an_hour_is_its_own_interval() {
        let ten_minutes = Duration::from_secs(600);
        assert_eq!(
            compactions(ten_minutes, 1),
            [(10, 0), (20, 540), (30, 1140), (40, 1740), (50, 2340), (60, 2940)]
        );
    }

    #[test]
    fn a_longer_age_is_waited_for_once_and_then_kept_up_with_hourly() {
        let three_hours = Duration::from_secs(3 * 3600);
        let minute = 60;
        assert_eq!(
            compactions(three_hours, 6),
            [(180, 0), (240, 54 * minute), (300, 114 * minute), (360, 174 * minute)]
        );
    }

    #[test]
    fn a_failure_is_tried_again_at_the_next_look_and_nothing_new_is_not_compacted_again() {
        let start = clock::now();
        let mut history = History::new(Duration::from_secs(10), start);
        history.record(5);
        assert_eq!(history.due(start + Duration::from_secs(9)), None, "not old enough");
        assert_eq!(history.due(start + Duration::from_secs(10)), Some(5));
        history.record(7);
        assert_eq!(history.due(start + Duration::from_secs(11)), Some(5), "it was not done");
        history.done(5, start + Duration::from_secs(11));
        assert_eq!(history.due(start + Duration::from_secs(30)), None, "nothing has come since");
    }

    #[test]
    fn a_count_is_kept_behind_the_current_revision() {
        let mut rule = Rule::Count { kept: 100, done: 0 };
        let now = clock::now();
        assert_eq!(rule.due(100, now), None);
        assert_eq!(rule.due(101, now), Some(1));
        rule.done(1, now);
        assert_eq!(rule.due(101, now), None, "nothing has come since");
        assert_eq!(rule.due(400, now), Some(300));
    }

    #[test]
    fn an_age_of_nothing_does_not_spin() {
        let history = History::new(Duration::from_nanos(1), clock::now());
        assert_eq!(history.look_every(), LOOK_MIN);
    }
}
