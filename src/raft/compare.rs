//! Comparing what members hold: the same revision must hash the same everywhere.

use std::collections::BTreeMap;
use std::time::Duration;

use super::node::Node;
use crate::blocking;
use crate::storage::mvcc::MvccError;
use crate::storage::mvcc::hash::RevisionHash;

/// Tries to get a member's hash of a revision that it may not have applied yet.
const TRIES: u32 = 10;
/// Pause between them.
const TRY_AGAIN: Duration = Duration::from_millis(100);

/// What members have at one revision.
#[derive(Debug, Default)]
pub struct Comparison {
    hashes: BTreeMap<u64, RevisionHash>,
    voters: usize,
}

impl Comparison {
    /// The members that differ from a majority of all voters; without such a majority, those that differ from `trusted`.
    ///
    /// Only hashes with the same compact revision can be compared: the others say nothing.
    pub fn differing(&self, trusted: u64) -> Vec<u64> {
        let mut by_hash: BTreeMap<(i64, u32), Vec<u64>> = BTreeMap::new();
        for (member, found) in &self.hashes {
            by_hash.entry((found.compact_revision, found.hash)).or_default().push(*member);
        }
        let majority = by_hash.iter().find(|(_, members)| members.len() > self.voters / 2);
        let right = match (majority, self.hashes.get(&trusted)) {
            (Some((right, _)), _) => *right,
            (None, Some(trusted)) => (trusted.compact_revision, trusted.hash),
            (None, None) => return Vec::new(),
        };
        let wrong = by_hash.iter().filter(|((compacted, hash), _)| *compacted == right.0 && *hash != right.1);
        wrong.flat_map(|(_, members)| members.iter().copied()).collect()
    }

    /// How many members answered.
    pub fn answers(&self) -> usize {
        self.hashes.len()
    }
}

impl Node {
    /// Hashes the history here up to a revision; `None` if it cannot be had.
    pub(super) async fn hash_here(&self, revision: i64) -> Option<RevisionHash> {
        for _ in 0..TRIES {
            let store = self.state.store();
            match blocking::spawn(move || store.hash_kv(revision)).await.ok()? {
                Ok((found, _)) => return Some(found),
                Err(MvccError::FutureRevision) => tokio::time::sleep(TRY_AGAIN).await,
                Err(_) => return None,
            }
        }
        None
    }

    /// Hashes the history up to a revision (0 for the current one) here and at all members that answer.
    pub async fn compare_history(&self, revision: i64) -> Comparison {
        let Some(own) = self.hash_here(revision).await else { return Comparison::default() };
        let asked = self
            .links
            .all()
            .into_iter()
            .map(|link| async move { Some((link.member_id(), link.hash_history(own.revision).await?)) });
        let others = futures::future::join_all(asked).await;
        let mut hashes: BTreeMap<u64, RevisionHash> = others.into_iter().flatten().collect();
        hashes.insert(self.identity().member_id, own);
        Comparison { hashes, voters: self.voters().len() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn comparison(hashes: &[(u64, u32, i64)]) -> Comparison {
        let hashes = hashes.iter().map(|(member, hash, compact_revision)| {
            (*member, RevisionHash { hash: *hash, compact_revision: *compact_revision, revision: 9 })
        });
        Comparison { hashes: hashes.collect(), voters: 3 }
    }

    #[test]
    fn who_differs_from_the_majority_is_named_even_if_it_is_trusted() {
        assert_eq!(comparison(&[(1, 7, 0), (2, 7, 0), (3, 7, 0)]).differing(1), Vec::<u64>::new());
        assert_eq!(comparison(&[(1, 8, 0), (2, 7, 0), (3, 7, 0)]).differing(1), [1]);
        assert_eq!(comparison(&[(1, 7, 0), (2, 7, 0), (3, 8, 0)]).differing(1), [3]);
        assert_eq!(comparison(&[(1, 7, 0), (3, 8, 0)]).differing(1), [3], "two of three that differ");
        assert_eq!(
            comparison(&[(1, 7, 0), (2, 7, 0), (3, 8, 5)]).differing(1),
            Vec::<u64>::new(),
            "compacted otherwise"
        );
        assert_eq!(Comparison::default().differing(1), Vec::<u64>::new());
    }
}
