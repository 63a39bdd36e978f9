//! Who watches a key: watchers with the same range, filters and previous-value wish share a group.
//!
//! Single keys are found by hash. Ranges cut the key space at their ends into segments, each with the groups that cover
//! it; the groups of a key are those of its segment, found by one look into an ordered map:
//!
//! ```text
//! group 1   [----------------)
//! group 2          [---------------)
//! segments  | 1    | 1,2     | 2   |
//! ```

use std::collections::{BTreeMap, HashMap};
use std::ops::Bound;

use bytes::Bytes;

use crate::storage::mvcc::{KeyRange, RangeEnd};

/// Which events a watcher does not want.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Filters {
    /// No puts.
    pub no_put: bool,
    /// No deletes.
    pub no_delete: bool,
}

/// What makes watchers see the same bytes.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct View {
    pub(super) range: KeyRange,
    pub(super) filters: Filters,
    pub(super) prev_kv: bool,
}

/// The synced watchers of one view, by slot.
pub(super) struct Group {
    pub(super) view: View,
    pub(super) watchers: Vec<usize>,
}

/// All groups, found by key.
#[derive(Default)]
pub(super) struct Groups {
    groups: HashMap<u64, Group>,
    by_view: HashMap<View, u64>,
    next_id: u64,
    singles: HashMap<Bytes, Vec<u64>>,
    /// Segment start to the groups covering it, up to the next start.
    segments: BTreeMap<Bytes, Vec<u64>>,
}

impl Groups {
    /// Adds a watcher to its view's group.
    pub(super) fn join(&mut self, view: &View, slot: usize) {
        let id = match self.by_view.get(view) {
            Some(id) => *id,
            None => self.add_group(view),
        };
        if let Some(group) = self.groups.get_mut(&id) {
            group.watchers.push(slot);
        }
    }

    /// Removes a watcher from its view's group.
    pub(super) fn leave(&mut self, view: &View, slot: usize) {
        let Some(id) = self.by_view.get(view).copied() else { return };
        let Some(group) = self.groups.get_mut(&id) else { return };
        group.watchers.retain(|other| *other != slot);
        if group.watchers.is_empty() {
            self.remove_group(id);
        }
    }

    /// Calls `visit` with each group that watches the key.
    pub(super) fn watching(&self, key: &[u8], mut visit: impl FnMut(u64)) {
        if let Some(ids) = self.singles.get(key) {
            ids.iter().copied().for_each(&mut visit);
        }
        let segment = self.segments.range::<[u8], _>((Bound::Unbounded, Bound::Included(key))).next_back();
        if let Some((_, ids)) = segment {
            ids.iter().copied().for_each(&mut visit);
        }
    }

    pub(super) fn get(&self, id: u64) -> Option<&Group> {
        self.groups.get(&id)
    }

    /// True if nobody watches anything.
    pub(super) fn is_empty(&self) -> bool {
        self.groups.is_empty()
    }

    fn add_group(&mut self, view: &View) -> u64 {
        let id = self.next_id;
        self.next_id += 1;
        self.by_view.insert(view.clone(), id);
        self.groups.insert(id, Group { view: view.clone(), watchers: Vec::new() });
        match &view.range.end {
            RangeEnd::Single => self.singles.entry(view.range.start.clone()).or_default().push(id),
            RangeEnd::Before(end) => {
                self.cut(&view.range.start);
                self.cut(end);
                self.cover(&view.range, |ids| ids.push(id));
            }
            RangeEnd::Unbounded => {
                self.cut(&view.range.start);
                self.cover(&view.range, |ids| ids.push(id));
            }
        }
        id
    }

    fn remove_group(&mut self, id: u64) {
        let Some(group) = self.groups.remove(&id) else { return };
        self.by_view.remove(&group.view);
        let range = &group.view.range;
        if let Some(key) = range.as_single() {
            if let Some(ids) = self.singles.get_mut(key) {
                ids.retain(|other| *other != id);
                if ids.is_empty() {
                    self.singles.remove(key);
                }
            }
            return;
        }
        self.cover(range, |ids| ids.retain(|other| *other != id));
        self.merge_at(&range.start.clone());
        if let RangeEnd::Before(end) = &range.end {
            self.merge_at(&end.clone());
        }
    }

    /// Makes `at` a segment start.
    fn cut(&mut self, at: &Bytes) {
        if self.segments.contains_key(at) {
            return;
        }
        let below = self.segments.range::<Bytes, _>((Bound::Unbounded, Bound::Excluded(at))).next_back();
        let ids = below.map(|(_, ids)| ids.clone()).unwrap_or_default();
        self.segments.insert(at.clone(), ids);
    }

    /// Removes a cut that no longer separates anything.
    fn merge_at(&mut self, at: &Bytes) {
        let Some(ids) = self.segments.get(at) else { return };
        let below = self.segments.range::<Bytes, _>((Bound::Unbounded, Bound::Excluded(at))).next_back();
        if below.map_or(ids.is_empty(), |(_, below)| below == ids) {
            self.segments.remove(at);
        }
    }

    fn cover(&mut self, range: &KeyRange, mut change: impl FnMut(&mut Vec<u64>)) {
        let end = match &range.end {
            RangeEnd::Before(end) => Bound::Excluded(end.clone()),
            RangeEnd::Unbounded | RangeEnd::Single => Bound::Unbounded,
        };
        for (_, ids) in self.segments.range_mut::<Bytes, _>((Bound::Included(range.start.clone()), end)) {
            change(ids);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn view(key: &str, end: &str) -> View {
        let range = KeyRange::from_request(
            &Bytes::copy_from_slice(key.as_bytes()),
            &Bytes::copy_from_slice(end.as_bytes()),
        );
        View { range, filters: Filters::default(), prev_kv: false }
    }

    fn watching(groups: &Groups, key: &str) -> Vec<usize> {
        let mut slots = Vec::new();
        groups.watching(key.as_bytes(), |id| {
            slots.extend(groups.get(id).expect("the group exists").watchers.iter().copied());
        });
        slots.sort_unstable();
        slots
    }

    #[test]
    fn keys_find_exactly_the_ranges_that_hold_them() {
        let views = [("b", "d"), ("c", "f"), ("c", ""), ("a", "\0"), ("b", "d"), ("d", "e")];
        let mut groups = Groups::default();
        for (slot, (key, end)) in views.iter().enumerate() {
            groups.join(&view(key, end), slot);
        }
        let keys = ["", "a", "b", "c", "cc", "d", "dz", "e", "f", "zz"];
        for removed in 0..=views.len() {
            for key in keys {
                let expected: Vec<usize> = (removed..views.len())
                    .filter(|slot| view(views[*slot].0, views[*slot].1).range.contains(key.as_bytes()))
                    .collect();
                assert_eq!(watching(&groups, key), expected, "key {key:?} after removing {removed}");
            }
            if removed < views.len() {
                groups.leave(&view(views[removed].0, views[removed].1), removed);
            }
        }
        assert!(groups.is_empty() && groups.segments.is_empty() && groups.singles.is_empty());
    }
}
