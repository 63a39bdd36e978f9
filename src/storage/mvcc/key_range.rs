//! Key ranges as etcd's API states them.

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
}
