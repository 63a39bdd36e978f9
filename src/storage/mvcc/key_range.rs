//! Key ranges as etcd's API states them.

use std::collections::BTreeMap;
use std::ops::Bound;

use bytes::Bytes;

/// Where a range ends. etcd: `range_end`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum RangeEnd {
    /// Only the key itself.
    Single,
    /// All keys below this one.
    Before(Bytes),
    /// All keys from the start on.
    Unbounded,
}

/// A start key and an end: what Range, DeleteRange, Compare, Watch and permissions cover.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct KeyRange {
    /// First key, included.
    pub start: Bytes,
    /// End of the range.
    pub end: RangeEnd,
}

impl KeyRange {
    /// Reads a request's `key` and `range_end`: empty end = one key, the single byte 0x00 = no end.
    pub fn from_request(key: &Bytes, range_end: &Bytes) -> KeyRange {
        let end = match range_end.as_ref() {
            [] => RangeEnd::Single,
            [0] => RangeEnd::Unbounded,
            _ => RangeEnd::Before(range_end.clone()),
        };
        KeyRange { start: key.clone(), end }
    }

    /// The range of one key.
    pub fn single(key: Bytes) -> KeyRange {
        KeyRange { start: key, end: RangeEnd::Single }
    }

    /// The single key, if the range is one.
    pub fn as_single(&self) -> Option<&Bytes> {
        (self.end == RangeEnd::Single).then_some(&self.start)
    }

    /// True if no key can be inside.
    pub fn is_empty(&self) -> bool {
        matches!(&self.end, RangeEnd::Before(end) if *end <= self.start)
    }

    /// True if `key` is inside.
    pub fn contains(&self, key: &[u8]) -> bool {
        match &self.end {
            RangeEnd::Single => self.start == key,
            RangeEnd::Before(end) => *self.start <= *key && *key < **end,
            RangeEnd::Unbounded => *self.start <= *key,
        }
    }

    /// The range as bounds for ordered maps, which panic if it is empty.
    pub fn bounds(&self) -> (Bound<&[u8]>, Bound<&[u8]>) {
        let end = match &self.end {
            RangeEnd::Unbounded => Bound::Unbounded,
            RangeEnd::Before(end) => Bound::Excluded(&end[..]),
            RangeEnd::Single => Bound::Included(&self.start[..]),
        };
        (Bound::Included(&self.start[..]), end)
    }

    /// The rest of the range after `key`.
    pub fn after(&self, key: &[u8]) -> KeyRange {
        let start = [key, b"\0"].concat();
        let end = match &self.end {
            RangeEnd::Single => RangeEnd::Before(Bytes::from(start.clone())),
            other => other.clone(),
        };
        KeyRange { start: start.into(), end }
    }

    /// An owned copy that pins no request buffer.
    pub fn detached(&self) -> KeyRange {
        let end = match &self.end {
            RangeEnd::Before(end) => RangeEnd::Before(Bytes::copy_from_slice(end)),
            other => other.clone(),
        };
        KeyRange { start: Bytes::copy_from_slice(&self.start), end }
    }
}

/// A set of keys as ranges that neither overlap nor touch: asking and adding cost a look into an ordered map.
#[derive(Clone, Debug, Default)]
pub struct KeyRanges {
    /// Start to end; no end for the last keys.
    ranges: BTreeMap<Bytes, Option<Bytes>>,
}

impl KeyRanges {
    /// Adds the keys of a range.
    pub fn insert(&mut self, range: &KeyRange) {
        if range.is_empty() {
            return;
        }
        let end = match &range.end {
            RangeEnd::Single => Some(Bytes::from([&range.start[..], b"\0"].concat())),
            RangeEnd::Before(end) => Some(end.clone()),
            RangeEnd::Unbounded => None,
        };
        self.insert_between(range.start.clone(), end);
    }

    /// Adds the keys of another set.
    pub fn extend(&mut self, mut other: KeyRanges) {
        if self.ranges.len() < other.ranges.len() {
            std::mem::swap(self, &mut other);
        }
        for (start, end) in other.ranges {
            self.insert_between(start, end);
        }
    }

    /// True if `key` is in the set.
    pub fn contains(&self, key: &[u8]) -> bool {
        let below = self.ranges.range::<[u8], _>((Bound::Unbounded, Bound::Included(key))).next_back();
        below.is_some_and(|(_, end)| end.as_ref().is_none_or(|end| *key < **end))
    }

    /// True if every key of the range is in the set. A range that ends before it starts counts as what lies between.
    pub fn covers(&self, range: &KeyRange) -> bool {
        let (from, to) = match &range.end {
            RangeEnd::Single => return self.contains(&range.start),
            RangeEnd::Before(end) if range.is_empty() => {
                let below =
                    self.ranges.range::<Bytes, _>((Bound::Unbounded, Bound::Excluded(end))).next_back();
                return below.is_some_and(|(_, end)| end.as_ref().is_none_or(|end| range.start < *end));
            }
            RangeEnd::Before(end) => (&range.start, Some(end)),
            RangeEnd::Unbounded => (&range.start, None),
        };
        let below = self.ranges.range::<Bytes, _>((Bound::Unbounded, Bound::Included(from))).next_back();
        below.is_some_and(|(_, end)| match (end, to) {
            (None, _) => true,
            (Some(_), None) => false,
            (Some(end), Some(to)) => to <= end,
        })
    }

    fn insert_between(&mut self, mut start: Bytes, mut end: Option<Bytes>) {
        // Whatever begins at or before the end, from the last one on, until one ends before the start.
        loop {
            let reach = end.clone().map_or(Bound::Unbounded, Bound::Included);
            let last = self.ranges.range::<Bytes, _>((Bound::Unbounded, reach)).next_back();
            let Some((other_start, other_end)) = last else { break };
            if other_end.as_ref().is_some_and(|other_end| *other_end < start) {
                break;
            }
            let (other_start, other_end) = (other_start.clone(), other_end.clone());
            self.ranges.remove(&other_start);
            start = start.min(other_start);
            end = end.zip(other_end).map(|(end, other_end)| end.max(other_end));
        }
        self.ranges.insert(start, end);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(key: &'static [u8], end: &'static [u8]) -> KeyRange {
        KeyRange::from_request(&Bytes::from_static(key), &Bytes::from_static(end))
    }

    #[test]
    fn ends_follow_the_request() {
        assert!(range(b"a", b"").contains(b"a") && !range(b"a", b"").contains(b"ab"));
        assert!(range(b"a", b"\0").contains(b"\xff\xff"));
        assert!(range(b"a", b"c").contains(b"b") && !range(b"a", b"c").contains(b"c"));
        assert!(range(b"b", b"b").is_empty() && range(b"b", b"a").is_empty());
        assert!(!range(b"b", b"").is_empty());
    }

    #[test]
    fn the_rest_starts_just_after_the_key() {
        let rest = range(b"a", b"c").after(b"ab");
        assert!(!rest.contains(b"ab") && rest.contains(b"ab\0"));
        assert!(range(b"a", b"").after(b"a").is_empty());
    }

    #[test]
    fn sets_cover_ranges_that_lie_in_one_of_theirs() {
        let mut set = KeyRanges::default();
        for (key, end) in [(&b"a"[..], &b"c"[..]), (b"c", b"e"), (b"g", b""), (b"x", b"\0")] {
            set.insert(&KeyRange::from_request(&Bytes::from_static(key), &Bytes::from_static(end)));
        }
        for (key, end, covered) in [
            (&b"a"[..], &b"e"[..], true),
            (b"b", b"d", true),
            (b"a", b"e\0", false),
            (b"e", b"", false),
            (b"g", b"", true),
            (b"g", b"g\0", true),
            (b"g", b"h", false),
            (b"y", b"\0", true),
            (b"y", b"z", true),
            (b"a", b"\0", false),
            (b"0", b"b", false),
            // No keys, between two that are there, and not.
            (b"d", b"b", true),
            (b"d", b"a", false),
            (b"e", b"b", false),
            (b"z", b"y", true),
        ] {
            let range = KeyRange::from_request(&Bytes::from_static(key), &Bytes::from_static(end));
            assert_eq!(set.covers(&range), covered, "{range:?}");
        }
    }

    #[test]
    fn sets_hold_the_keys_of_their_ranges() {
        let mut random = fastrand::Rng::with_seed(3);
        let key = |random: &mut fastrand::Rng| -> Bytes {
            (0..random.usize(1..3)).map(|_| [0, b'a', b'b', 0xFF][random.usize(..4)]).collect()
        };
        for _ in 0..500 {
            let mut ranges = Vec::new();
            let (mut set, mut other) = (KeyRanges::default(), KeyRanges::default());
            for _ in 0..random.usize(..8) {
                let end = match random.u8(..6) {
                    0 => RangeEnd::Unbounded,
                    1..3 => RangeEnd::Single,
                    _ => RangeEnd::Before(key(&mut random)),
                };
                let range = KeyRange { start: key(&mut random), end };
                if random.bool() { &mut set } else { &mut other }.insert(&range);
                ranges.push(range);
            }
            set.extend(other);
            for _ in 0..20 {
                let key = key(&mut random);
                let expected = ranges.iter().any(|range| range.contains(&key));
                assert_eq!(set.contains(&key), expected, "{key:?} in {ranges:?}: {set:?}");
            }
            let ends = set.ranges.values().zip(set.ranges.keys().skip(1));
            assert!(
                ends.into_iter().all(|(end, next)| end.as_ref().is_some_and(|end| end < next)),
                "{set:?}"
            );
        }
    }
}
