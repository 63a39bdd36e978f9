//! Comparing what members have applied: at the same entry the rolling hash must be the same everywhere.
//!
//! Every member asks every other one once a second whether it is there, and with it for its trail up to where the asking member
//! stood a moment ago, so that the other one has come so far too. So each knows of itself, within a second and for the price
//! of a few bytes, whether a majority of the voters agree on something else. `task/divergence` acts on it.

use std::collections::BTreeMap;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::MissedTickBehavior;

use super::node::Node;
use crate::storage::schema::Trail;

/// Time between questions.
const ASK_EVERY: Duration = Duration::from_secs(1);
/// Heartbeats within which a member hears that an entry is committed which another has applied, and applies it too.
const HEARTBEATS_BEHIND: u32 = 2;

/// What members have at one entry.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TrailComparison {
    /// Voters that agree with each other, are a majority of all, and differ from this member.
    pub against_here: Vec<u64>,
    /// Other voters that agree with this member, if with it they are a majority of all.
    pub with_here: Vec<u64>,
    /// Other members that differ: from the majority, or from this member if there is no majority.
    pub others: Vec<u64>,
    /// All voters have a trail, and not all trails begin at the same entry.
    pub begin_apart: bool,
}

/// Compares the trail here with those of others, as far as they are known.
fn compare(here: u64, own: Trail, others: &BTreeMap<u64, Trail>, voters: &[u64]) -> TrailComparison {
    let mut by_hash: BTreeMap<u64, Vec<u64>> = BTreeMap::from([(own.hash, vec![here])]);
    for (member, trail) in others.iter().filter(|(_, trail)| trail.origin == own.origin) {
        by_hash.entry(trail.hash).or_default().push(*member);
    }
    let voting = |members: &[u64]| members.iter().filter(|id| voters.contains(id)).count();
    let majority = by_hash.iter().find(|(_, members)| voting(members) > voters.len() / 2);
    let right = majority.map_or(own.hash, |(hash, _)| *hash);
    let differing = by_hash.iter().filter(|(hash, _)| **hash != right).flat_map(|(_, members)| members);
    let (mut against_here, mut with_here) = (Vec::new(), Vec::new());
    if let Some((hash, members)) = majority {
        let side = if *hash == own.hash { &mut with_here } else { &mut against_here };
        side.extend(members.iter().copied().filter(|id| *id != here && voters.contains(id)));
    }
    let all_known = voters.iter().all(|id| *id == here || others.contains_key(id));
    TrailComparison {
        against_here,
        with_here,
        others: differing.copied().filter(|id| *id != here).collect(),
        begin_apart: all_known && others.values().any(|trail| trail.origin != own.origin),
    }
}

impl Node {
    /// The trail here before an entry; `None` if it has not come so far, or that is no longer known.
    pub(super) fn trail_before(&self, next: u64) -> Option<Trail> {
        self.state.trails.read().before(next)
    }

    /// What came of the comparisons with the peers, as it comes.
    pub fn trail_comparisons(&self) -> watch::Receiver<TrailComparison> {
        self.compared.subscribe()
    }
}

/// Asks and compares for as long as the member runs.
pub(super) async fn compare_often(node: Node) {
    let mut ticks = tokio::time::interval(ASK_EVERY);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let here = node.identity().member_id;
    let behind = node.options.heartbeat_interval * HEARTBEATS_BEHIND;
    loop {
        ticks.tick().await;
        let mut replaced = node.store_replacements();
        replaced.mark_unchanged();
        let own = node.state.trails.read().last();
        tokio::time::sleep(behind).await;
        let links = node.links.all();
        let asked = links.iter().map(|link| async { Some((link.member_id(), link.probe(own.next).await?)) });
        let answers = futures::future::join_all(asked).await.into_iter().flatten().collect();
        if replaced.has_changed().unwrap_or(true) {
            // The trail was another store's.
            continue;
        }
        node.compared.send_replace(compare(here, own, &answers, &node.voters()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(own: u64, others: &[(u64, u64)], voters: &[u64]) -> TrailComparison {
        let trail = |hash: u64| Trail { origin: hash / 100, next: 9, hash };
        let others = others.iter().map(|(member, hash)| (*member, trail(*hash))).collect();
        compare(1, trail(own), &others, voters)
    }

    #[test]
    fn a_majority_of_the_voters_is_right() {
        let alike = |with_here| TrailComparison { with_here, ..TrailComparison::default() };
        assert_eq!(of(7, &[(2, 7), (3, 7)], &[1, 2, 3]), alike(vec![2, 3]));
        assert_eq!(of(7, &[(2, 7), (3, 7)], &[1, 2]), alike(vec![2]), "one learns");
        assert_eq!(of(7, &[], &[1]), alike(vec![]));
        let wrong_here = TrailComparison { against_here: vec![2, 3], ..TrailComparison::default() };
        assert_eq!(of(8, &[(2, 7), (3, 7)], &[1, 2, 3]), TrailComparison { others: vec![], ..wrong_here });
        let wrong_there =
            TrailComparison { others: vec![3], with_here: vec![2], ..TrailComparison::default() };
        assert_eq!(of(7, &[(2, 7), (3, 8)], &[1, 2, 3]), wrong_there);
        let both = of(8, &[(2, 7), (3, 7), (4, 7), (5, 9)], &[1, 2, 3, 4, 5]);
        assert_eq!(both.against_here, [2, 3, 4]);
        assert_eq!(both.others, [5]);
    }

    #[test]
    fn without_a_majority_nobody_is_wrong_here() {
        let split = of(7, &[(2, 8)], &[1, 2]);
        assert_eq!(split, TrailComparison { others: vec![2], ..TrailComparison::default() });
        let three_ways = of(7, &[(2, 8), (3, 9)], &[1, 2, 3]);
        assert_eq!(three_ways, TrailComparison { others: vec![2, 3], ..TrailComparison::default() });
        let learners = of(7, &[(2, 8), (3, 8)], &[1]);
        assert_eq!(learners.against_here, Vec::<u64>::new(), "learners are no majority");
        let one_of_three = of(7, &[(3, 8)], &[1, 2, 3]);
        assert_eq!(one_of_three.against_here, Vec::<u64>::new());
    }

    #[test]
    fn trails_that_begin_apart_are_not_compared() {
        let apart = of(7, &[(2, 107), (3, 107)], &[1, 2, 3]);
        assert_eq!(apart, TrailComparison { begin_apart: true, ..TrailComparison::default() });
        assert!(!of(7, &[(3, 107)], &[1, 2, 3]).begin_apart, "one of them may know none");
        assert_eq!(
            of(7, &[], &[1, 2, 3]),
            TrailComparison::default(),
            "members of another build say nothing"
        );
    }
}
