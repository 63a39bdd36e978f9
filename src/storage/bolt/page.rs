//! The bytes of a page. Numbers are little-endian; a position in an element counts from that element.

use std::ops::Range;

/// Bytes of a page's header, and of the header of each element in it.
pub(super) const HEADER: usize = 16;
/// Bytes of a meta page that mean something.
pub(super) const META: usize = 80;
/// The free pages are not listed.
pub(super) const NO_FREELIST: u64 = u64::MAX;
/// The count of a freelist whose real count is its first number.
pub(super) const FREELIST_COUNT_INSIDE: u16 = 0xFFFF;

pub(super) const BRANCH_FLAG: u16 = 0x01;
pub(super) const LEAF_FLAG: u16 = 0x02;
pub(super) const META_FLAG: u16 = 0x04;
pub(super) const FREELIST_FLAG: u16 = 0x10;
/// The value of an element is a bucket.
pub(super) const BUCKET_FLAG: u32 = 0x01;
/// Longest key. bbolt: `MaxKeySize`.
pub(super) const KEY_MAX: usize = 32_768;

const MAGIC: u32 = 0xED0C_DAED;
const VERSION: u32 = 2;
/// Sizes of pages that operating systems have, and some more.
const PAGE_SIZES: std::ops::RangeInclusive<u32> = 1 << 10..=1 << 20;

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_le_bytes(bytes.get(at..at + 2)?.try_into().ok()?))
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

pub(super) fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_le_bytes(bytes.get(at..at + 8)?.try_into().ok()?))
}

/// The start of every page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Header {
    pub(super) id: u64,
    pub(super) flags: u16,
    pub(super) count: u16,
    /// Pages after this one that belong to it.
    pub(super) overflow: u32,
}

impl Header {
    pub(super) fn encode(self) -> [u8; HEADER] {
        let mut out = [0; HEADER];
        out[..8].copy_from_slice(&self.id.to_le_bytes());
        out[8..10].copy_from_slice(&self.flags.to_le_bytes());
        out[10..12].copy_from_slice(&self.count.to_le_bytes());
        out[12..].copy_from_slice(&self.overflow.to_le_bytes());
        out
    }

    pub(super) fn decode(bytes: &[u8]) -> Option<Header> {
        let (id, flags) = (u64_at(bytes, 0)?, u16_at(bytes, 8)?);
        Some(Header { id, flags, count: u16_at(bytes, 10)?, overflow: u32_at(bytes, 12)? })
    }
}

/// What a meta page says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Meta {
    pub(super) page_size: u32,
    pub(super) root: u64,
    pub(super) freelist: u64,
    /// The first page that was never used.
    pub(super) pages: u64,
    pub(super) txid: u64,
}

impl Meta {
    /// The page with this number.
    pub(super) fn encode(self, id: u64) -> [u8; META] {
        let mut out = [0; META];
        let header = Header { id, flags: META_FLAG, count: 0, overflow: 0 };
        out[..HEADER].copy_from_slice(&header.encode());
        out[16..20].copy_from_slice(&MAGIC.to_le_bytes());
        out[20..24].copy_from_slice(&VERSION.to_le_bytes());
        out[24..28].copy_from_slice(&self.page_size.to_le_bytes());
        out[32..40].copy_from_slice(&self.root.to_le_bytes());
        out[48..56].copy_from_slice(&self.freelist.to_le_bytes());
        out[56..64].copy_from_slice(&self.pages.to_le_bytes());
        out[64..72].copy_from_slice(&self.txid.to_le_bytes());
        let sum = fnv1a(&out[16..72]);
        out[72..].copy_from_slice(&sum.to_le_bytes());
        out
    }

    /// `None` unless magic, version, checksum and page size are right.
    pub(super) fn decode(page: &[u8]) -> Option<Meta> {
        let is_meta = u32_at(page, 16)? == MAGIC && u32_at(page, 20)? == VERSION;
        let page_size = u32_at(page, 24)?;
        let sums = u64_at(page, 72)? == fnv1a(page.get(16..72)?);
        if !is_meta || !sums || !page_size.is_power_of_two() || !PAGE_SIZES.contains(&page_size) {
            return None;
        }
        let (root, freelist) = (u64_at(page, 32)?, u64_at(page, 48)?);
        Some(Meta { page_size, root, freelist, pages: u64_at(page, 56)?, txid: u64_at(page, 64)? })
    }
}

/// Makes the sums of both meta pages right, whatever is in them.
#[cfg(any(test, fuzzing))]
pub(in crate::storage) fn set_meta_sums(file: &mut [u8]) {
    for page in file.chunks_mut(super::PAGE_BYTES).take(2).filter(|page| page.len() >= META) {
        let sum = fnv1a(&page[16..72]);
        page[72..META].copy_from_slice(&sum.to_le_bytes());
    }
}

/// FNV-1a, 64 bits.
fn fnv1a(bytes: &[u8]) -> u64 {
    bytes
        .iter()
        .fold(0xcbf2_9ce4_8422_2325, |sum, byte| (sum ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3))
}

/// A leaf or branch with the pages that continue it, all of whose elements lie inside.
#[derive(Debug, Default)]
pub(super) struct Node {
    pub(super) bytes: Vec<u8>,
    pub(super) is_branch: bool,
    elements: Vec<Element>,
    /// Where its first byte is in the file.
    pub(super) offset: u64,
}

#[derive(Debug)]
struct Element {
    key: Range<usize>,
    value: Range<usize>,
    /// The child of a branch; the flags of a leaf's element.
    link: u64,
}

impl Node {
    /// Reads the elements of `bytes`, which begin with a header.
    ///
    /// # Errors
    /// What is wrong.
    pub(super) fn parse(bytes: Vec<u8>, offset: u64) -> Result<Node, &'static str> {
        let header = Header::decode(&bytes).ok_or("a page is shorter than its header")?;
        let is_branch = match header.flags {
            BRANCH_FLAG => true,
            LEAF_FLAG => false,
            _ => return Err("a page that should be a leaf or a branch is neither"),
        };
        let mut elements = Vec::with_capacity(usize::from(header.count));
        let mut previous: &[u8] = &[];
        for at in 0..usize::from(header.count) {
            let start = HEADER + at * HEADER;
            let element =
                Element::decode(&bytes, start, is_branch).ok_or("an element reaches out of its page")?;
            let key = &bytes[element.key.clone()];
            if key.len() > KEY_MAX || key <= previous {
                return Err("keys of a page do not ascend, or one is empty or too long");
            }
            previous = key;
            elements.push(element);
        }
        if is_branch && elements.is_empty() {
            return Err("a branch has no children");
        }
        Ok(Node { bytes, is_branch, elements, offset })
    }

    pub(super) fn len(&self) -> usize {
        self.elements.len()
    }

    pub(super) fn key(&self, at: usize) -> &[u8] {
        &self.bytes[self.elements[at].key.clone()]
    }

    pub(super) fn value(&self, at: usize) -> &[u8] {
        &self.bytes[self.elements[at].value.clone()]
    }

    pub(super) fn child(&self, at: usize) -> u64 {
        self.elements[at].link
    }

    pub(super) fn is_bucket(&self, at: usize) -> bool {
        !self.is_branch && self.elements[at].link & u64::from(BUCKET_FLAG) != 0
    }

    /// Where the value of an element is in the file.
    pub(super) fn value_offset(&self, at: usize) -> u64 {
        self.offset + self.elements[at].value.start as u64
    }
}

impl Element {
    fn decode(bytes: &[u8], start: usize, is_branch: bool) -> Option<Element> {
        let number = |at: usize| usize::try_from(u32_at(bytes, start + at)?).ok();
        let (position, key_len, value_len, link) = if is_branch {
            (number(0)?, number(4)?, 0, u64_at(bytes, start + 8)?)
        } else {
            (number(4)?, number(8)?, number(12)?, u64::from(u32_at(bytes, start)?))
        };
        let key = start.checked_add(position)?;
        let value = key.checked_add(key_len)?;
        let end = value.checked_add(value_len)?;
        (end <= bytes.len()).then_some(Element { key: key..value, value: value..end, link })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sum_is_fnv1a() {
        assert_eq!(fnv1a(b""), 0xcbf2_9ce4_8422_2325);
        assert_eq!(fnv1a(b"a"), 0xaf63_dc4c_8601_ec8c);
    }

    #[test]
    fn a_meta_page_round_trips_and_a_changed_one_does_not_count() {
        let meta = Meta { page_size: 4096, root: 7, freelist: NO_FREELIST, pages: 9, txid: 2 };
        let page = meta.encode(1);
        assert_eq!(Meta::decode(&page), Some(meta));
        for at in 16..META {
            let mut page = page;
            page[at] ^= 1;
            assert_eq!(Meta::decode(&page), None, "byte {at}");
        }
    }
}
