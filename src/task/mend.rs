//! A member whose data is damaged: taken out of service, replaced by a peer's, put back.
//!
//! ```text
//! raft/trails: a majority has applied something else ─┐
//! task/scrub: stored bytes cannot be read back ───────┼─> withheld ─> alarm ─> leads? hands over ─> a majority that agrees is asked
//! an alarm names this member, and an examination ─────┘                                             │        which of them sends
//! of all keys confirms it                                serves <─ alarm cleared <─ store replaced <┘
//! ```
//!
//! Whatever has found the damage, a store is replaced only by one of a majority of the voters that hold the same keys, all read
//! again for this purpose; or, if what is stored here cannot be read, of those that have applied the same as this member. Where
//! there is nobody like that, and where a flag forbids it, the member stays as it is, and the alarm says that somebody has
//! to look. A failed attempt is repeated after a pause that doubles.

use std::time::{Duration, Instant};

use tracing::{info, warn};

use super::corruption_check::raise;
use crate::apply::{self, State};
use crate::clock;
use crate::cluster::id::MemberId;
use crate::proto::etcdserverpb::{AlarmType, alarm_request::AlarmAction};
use crate::raft::{Examined, MendError, Node, TrailComparison};
use crate::storage::snapshot::Damage;

/// Time between looks.
const LOOK_EVERY: Duration = Duration::from_millis(500);
/// Pause after leadership was offered to somebody in vain.
const OFFER_AGAIN: Duration = Duration::from_secs(1);
/// Pause after the first attempt that came to nothing.
const PAUSE_MIN: Duration = Duration::from_secs(2);
/// The longest pause: an attempt may cost every voter a reading of all that it has.
const PAUSE_MAX: Duration = Duration::from_secs(600);
/// How long after its end the alarm is cleared again if it comes back: the leader may have compared with the old store.
const AFTERMATH: Duration = Duration::from_secs(60);

/// Looks after this member's data for as long as it runs; replaces it only if `replaces`.
///
/// # Errors
/// [`MendError::HalfDone`]: the member must end then.
pub async fn run(node: Node, state: State, replaces: bool) -> Result<(), MendError> {
    let here = node.identity().member_id;
    let mut ticks = tokio::time::interval(LOOK_EVERY);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut installed = node.store_replacements();
    let mut naming = Naming::default();
    let mut attempts = Attempts::default();
    let mut is_told = false;
    loop {
        ticks.tick().await;
        let is_named = state.cluster.read().has_raised(here, AlarmType::Corrupt);
        let Some(damage) = node.damage() else {
            installed.mark_unchanged();
            attempts = Attempts::default();
            naming.look(&node, is_named).await;
            continue;
        };
        node.stand_for_election();
        if !node.withholds() {
            match damage {
                Damage::Differs => {
                    warn!("no other member is left to differ from: what is here counts");
                    node.trust();
                }
                // Once: who clears it then wants to write what else there is elsewhere, or here.
                Damage::Unreadable if !is_told => {
                    raise(&node, &state, here).await;
                    is_told = true;
                }
                Damage::Unreadable => {}
            }
            continue;
        }
        if !is_named {
            raise(&node, &state, here).await;
        }
        if node.is_leader() {
            step_down(&node).await;
            continue;
        }
        let comparison = node.trail_comparisons().borrow().clone();
        let is_installed = installed.has_changed().unwrap_or(false) && !comparison.with_here.is_empty();
        if !(replaces || is_installed) || !attempts.is_due() {
            continue;
        }
        installed.mark_unchanged();
        // What the leader has put in place of the damaged store may be right.
        let suspected = if is_installed { Damage::Differs } else { damage };
        match attempt(&node, suspected, &comparison, replaces).await {
            Ok(true) => {
                clear_alarm(&node).await;
                node.trust();
                naming = Naming { mended: Some(clock::now()), ..Naming::default() };
            }
            Ok(false) => attempts.failed(),
            Err(fatal @ MendError::HalfDone(_)) => return Err(fatal),
            Err(error) => {
                warn!(%error, "this member's store is not replaced yet");
                attempts.failed();
            }
        }
    }
}

/// What is done about an alarm that names this member, of whose damage nothing is known here.
#[derive(Debug, Default)]
struct Naming {
    /// When the damage was last mended.
    mended: Option<Instant>,
    /// The alarm was looked into.
    is_explained: bool,
    looks: Attempts,
}

impl Naming {
    async fn look(&mut self, node: &Node, is_named: bool) {
        if !is_named {
            *self = Naming { mended: self.mended, ..Naming::default() };
        } else if self.mended.is_some_and(|at| clock::now().duration_since(at) < AFTERMATH) {
            clear_alarm(node).await;
        } else if !self.is_explained && !node.is_only_voter() && self.looks.is_due() {
            let found = node.examine().await;
            self.is_explained = !found.agreeing.is_empty();
            self.looks.failed();
            if found.differs {
                node.distrust(Damage::Differs);
            }
        }
    }
}

/// When the next attempt is due.
#[derive(Debug, Default)]
struct Attempts {
    last: Option<Instant>,
    pause: Duration,
}

impl Attempts {
    fn is_due(&self) -> bool {
        self.last.is_none_or(|at| clock::now().duration_since(at) >= self.pause)
    }

    fn failed(&mut self) {
        self.last = Some(clock::now());
        self.pause = (self.pause * 2).clamp(PAUSE_MIN, PAUSE_MAX);
    }
}

/// Has this member hold what it should; true once it does.
async fn attempt(
    node: &Node,
    damage: Damage,
    comparison: &TrailComparison,
    replaces: bool,
) -> Result<bool, MendError> {
    let found = node.examine().await;
    if is_right_again(damage, &found, comparison) {
        info!("this member holds what the others hold");
        return Ok(true);
    }
    if !replaces {
        return Ok(false);
    }
    let sources = sources(damage, &found, comparison);
    let mut failed = None;
    for peer in &sources {
        info!(peer = %MemberId::new(*peer), ?damage, "asking a peer for its data");
        match node.mend_from(*peer).await {
            Ok(()) => return Ok(true),
            Err(fatal @ MendError::HalfDone(_)) => return Err(fatal),
            Err(error) => failed = Some(error),
        }
    }
    match failed {
        Some(error) => Err(error),
        None => {
            warn!("there is no majority that agrees on what this member should hold");
            Ok(false)
        }
    }
}

/// True if a comparison of everything says that the damage is gone: the leader may have replaced the store.
fn is_right_again(damage: Damage, found: &Examined, comparison: &TrailComparison) -> bool {
    damage == Damage::Differs
        && !comparison.with_here.is_empty()
        && !found.agreeing.is_empty()
        && !found.differs
}

/// Who has what this member should hold.
fn sources(damage: Damage, found: &Examined, comparison: &TrailComparison) -> Vec<u64> {
    if damage == Damage::Unreadable && found.agreeing.is_empty() {
        // What was applied here is right; only here it cannot be read.
        let is_like_here = |member: &u64| comparison.with_here.contains(member);
        return found.unanimous.iter().copied().filter(is_like_here).collect();
    }
    let mut sources = found.agreeing.clone();
    if !comparison.against_here.is_empty() {
        sources.retain(|member| comparison.against_here.contains(member));
    }
    sources
}

/// Gives leadership to somebody else.
async fn step_down(node: &Node) {
    match node.best_successor() {
        None => warn!("nobody can take over from this member, whose data is damaged"),
        Some(successor) => {
            warn!(successor = %MemberId::new(successor), "handing leadership over, for the data here is damaged");
            let transfer = node.transfer_leadership(successor);
            match tokio::time::timeout(node.options().election_timeout, transfer).await {
                Ok(Ok(())) => return,
                Ok(Err(error)) => warn!(%error, "leadership not handed over"),
                Err(_) => warn!("leadership not handed over in time"),
            }
        }
    }
    tokio::time::sleep(OFFER_AGAIN).await;
}

/// Clears this member's alarm; returns when that is done.
async fn clear_alarm(node: &Node) {
    let command = apply::alarm(AlarmAction::Deactivate, node.identity().member_id, AlarmType::Corrupt);
    while let Err(error) = node.propose(command.clone()).await {
        warn!(%error, "alarm of a mended member not cleared, trying again");
        tokio::time::sleep(LOOK_EVERY).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(agreeing: &[u64], differs: bool, unanimous: &[u64]) -> Examined {
        Examined { agreeing: agreeing.to_vec(), differs, unanimous: unanimous.to_vec() }
    }

    fn compared(against_here: &[u64], with_here: &[u64]) -> TrailComparison {
        let (against_here, with_here) = (against_here.to_vec(), with_here.to_vec());
        TrailComparison { against_here, with_here, ..TrailComparison::default() }
    }

    #[test]
    fn a_source_is_of_a_majority_in_what_it_holds_and_in_what_it_applied() {
        let by_trail = compared(&[2, 3], &[]);
        assert_eq!(sources(Damage::Differs, &found(&[2, 3], true, &[2, 3]), &by_trail), [2, 3]);
        assert_eq!(sources(Damage::Differs, &found(&[3, 4], true, &[]), &by_trail), [3]);
        assert_eq!(sources(Damage::Differs, &found(&[], false, &[2]), &by_trail), [0; 0]);
        let bytes_alone = compared(&[], &[2, 3]);
        assert_eq!(sources(Damage::Differs, &found(&[2, 3], true, &[2, 3]), &bytes_alone), [2, 3]);
    }

    #[test]
    fn what_cannot_be_read_is_had_from_who_applied_the_same() {
        let alike = compared(&[], &[2]);
        assert_eq!(sources(Damage::Unreadable, &found(&[], false, &[2]), &alike), [2], "one of two");
        assert_eq!(sources(Damage::Unreadable, &found(&[], false, &[3]), &alike), [0; 0], "it learns");
        assert_eq!(sources(Damage::Unreadable, &found(&[2, 3], true, &[2, 3]), &alike), [2, 3]);
        assert_eq!(sources(Damage::Differs, &found(&[], false, &[2]), &alike), [0; 0]);
    }

    #[test]
    fn only_a_difference_can_go_away_and_both_comparisons_must_say_so() {
        let (alike, apart) = (compared(&[], &[2, 3]), compared(&[2, 3], &[]));
        let (same, other) = (found(&[2, 3], false, &[2, 3]), found(&[2, 3], true, &[2, 3]));
        assert!(is_right_again(Damage::Differs, &same, &alike));
        assert!(!is_right_again(Damage::Differs, &other, &alike));
        assert!(!is_right_again(Damage::Differs, &same, &apart));
        assert!(!is_right_again(Damage::Differs, &same, &TrailComparison::default()), "not compared yet");
        assert!(!is_right_again(Damage::Unreadable, &same, &alike));
    }

    #[test]
    fn pauses_grow_to_a_bound() {
        let mut attempts = Attempts::default();
        assert!(attempts.is_due());
        let pauses: Vec<u64> = std::iter::repeat_with(|| {
            attempts.failed();
            attempts.pause.as_secs()
        })
        .take(11)
        .collect();
        assert_eq!(pauses, [2, 4, 8, 16, 32, 64, 128, 256, 512, 600, 600]);
        assert!(!attempts.is_due());
    }
}
