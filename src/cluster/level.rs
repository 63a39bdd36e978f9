//! The cluster's level: what all of its members can read.
//!
//! A build that meets a log entry or a stored format that it does not know has to stop, for it cannot do what the others do.
//! So nothing new is written before every member can read it:
//!
//! ```text
//! build      knows everything up to LEVEL, and says so to whoever asks (Describe)
//! leader     every member answers, voters and learners, and knows more ──> ClusterLevelSet   (task/level)
//! apply      the level rises if no member has come meanwhile that is not named in it
//! proposer   writes no kind of entry that is above the cluster's level     (apply::level_needed, raft/propose)
//! member     that knows less than the cluster's level does not join, start, or go on; its peers refuse it
//! ```
//!
//! The level never falls. Until it has risen any member may go back to its build from before; afterwards none can.
//!
//! | level | brings |
//! |---|---|
//! | 0 | what there was before levels |
//! | 1 | `ClusterLevelSet`, and format 2 of the store, which holds the level; `DowngradeSet`; the commands of `auth`, and who asked for a command |
//!
//! What a new kind of entry or a new stored format needs: `docs/data_model.md`.

use super::Cluster;
use crate::proto::skegpb::ClusterLevelSet;
use crate::storage::schema::{Family, MetaKey};
use crate::storage::{Engine, StorageError};

/// The highest level that this build knows.
pub const LEVEL: u32 = 1;

/// Reads the stored level.
///
/// # Errors
/// [`StorageError::Level`] if this build does not know it.
pub fn load(engine: &Engine) -> Result<u32, StorageError> {
    let Some(stored) = engine.get(Family::Meta, &MetaKey::ClusterLevel.encode())? else { return Ok(0) };
    let bytes = stored.as_ref().try_into().map_err(|_| StorageError::Damaged { what: "cluster level" })?;
    let found = u32::from_be_bytes(bytes);
    check(found).map(|()| found)
}

/// Checks that this build knows the level of a cluster.
///
/// # Errors
/// [`StorageError::Level`].
pub fn check(found: u32) -> Result<(), StorageError> {
    if found > LEVEL { Err(StorageError::Level { found, known: LEVEL }) } else { Ok(()) }
}

impl Cluster {
    /// The level that the cluster has reached.
    pub fn level(&self) -> u32 {
        self.level
    }

    /// What raises the level, if it can rise; `known` says which one a member knows, `None` if that is unknown now.
    pub fn next_level(&self, known: impl Fn(u64) -> Option<u32>) -> Option<ClusterLevelSet> {
        let levels: Option<Vec<u32>> = self.members().map(|member| known(member.id)).collect();
        let level = levels?.into_iter().min()?.min(LEVEL);
        let member_ids = || self.members().map(|member| member.id).collect();
        (level > self.level).then(|| ClusterLevelSet { level, member_ids: member_ids() })
    }

    /// True if that raises the level.
    pub fn rises_by(&self, set: &ClusterLevelSet) -> bool {
        set.level > self.level && self.members().all(|member| set.member_ids.contains(&member.id))
    }

    /// Sets the level, which must not fall.
    pub fn set_level(&mut self, level: u32) {
        assert!(level >= self.level, "the level of a cluster never falls");
        self.level = level;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::proto::skegpb::Member;

    fn cluster(level: u32) -> Cluster {
        let mut cluster = Cluster::default();
        for id in 1..=3 {
            cluster.put(Member { id, is_learner: id == 3, ..Member::default() });
        }
        cluster.set_level(level);
        cluster
    }

    fn next(from: u32, levels: [Option<u32>; 3]) -> Option<u32> {
        let known = |id: u64| levels[usize::try_from(id - 1).unwrap()];
        cluster(from).next_level(known).map(|set| set.level)
    }

    #[test]
    fn the_level_rises_to_what_every_member_knows() {
        assert_eq!(next(0, [Some(1), Some(1), Some(1)]), Some(1));
        assert_eq!(next(0, [Some(1), Some(0), Some(1)]), None, "one is of an older build");
        assert_eq!(next(0, [Some(1), Some(1), Some(0)]), None, "a learner counts as well");
        assert_eq!(next(0, [Some(1), None, Some(1)]), None, "one does not answer");
        assert_eq!(next(1, [Some(1), Some(1), Some(1)]), None, "it is there");
        assert_eq!(next(0, [Some(9), Some(9), Some(9)]), Some(LEVEL), "no higher than this build");
        assert_eq!(Cluster::default().next_level(|_| Some(1)), None, "nobody is known yet");
    }

    #[test]
    fn a_member_that_came_meanwhile_keeps_the_level_down() {
        let mut cluster = cluster(0);
        let set = cluster.next_level(|_| Some(1)).expect("all know it");
        assert!(cluster.rises_by(&set));
        cluster.put(Member { id: 4, ..Member::default() });
        assert!(!cluster.rises_by(&set));
        cluster.remove(4);
        cluster.remove(3);
        assert!(cluster.rises_by(&set), "one that went does not");
        cluster.set_level(1);
        assert!(!cluster.rises_by(&set));
    }
}
