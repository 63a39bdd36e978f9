//! The whole file: every page has one use, every key is where a search looks for it. bbolt: `tx_check.go`.

use super::page::Node;
use super::page::{FREELIST_COUNT_INSIDE, FREELIST_FLAG, HEADER, NO_FREELIST, u64_at};
use super::reader::{BucketRoot, LEVELS_MAX};
use super::{Bolt, BoltError};

/// Bytes of a freelist that are read at a time.
const FREELIST_PIECE: usize = 64 << 10;

/// Which pages have been accounted for: a bit each.
struct Seen(Vec<u64>);

impl Seen {
    fn new(pages: u64) -> Option<Seen> {
        Some(Seen(vec![0; usize::try_from(pages.div_ceil(64)).ok()?]))
    }

    /// False if the page was seen before, or there is none.
    fn add(&mut self, id: u64) -> bool {
        let Some(word) = usize::try_from(id / 64).ok().and_then(|at| self.0.get_mut(at)) else {
            return false;
        };
        let bit = 1 << (id % 64);
        let is_new = *word & bit == 0;
        *word |= bit;
        is_new
    }

    fn contains(&self, id: u64) -> bool {
        usize::try_from(id / 64)
            .ok()
            .and_then(|at| self.0.get(at))
            .is_some_and(|word| word & (1 << (id % 64)) != 0)
    }
}

impl Bolt {
    /// Reads everything and checks it; memory is a bit a page and a few pages.
    ///
    /// # Errors
    /// [`BoltError::Damaged`] with the first thing that is wrong; [`BoltError::Io`].
    pub fn check(&self) -> Result<(), BoltError> {
        let pages = self.meta.pages;
        let mut seen = Seen::new(pages).ok_or_else(|| self.damaged(0, "there are too many pages"))?;
        seen.add(0);
        seen.add(1);
        let lists_free = self.meta.freelist != NO_FREELIST;
        if lists_free {
            self.check_freelist(&mut seen)?;
        }
        self.check_tree(self.meta.root, Bounds { first: &[], end: None }, 0, &mut seen)?;
        let lost = if lists_free { (2..pages).find(|id| !seen.contains(*id)) } else { None };
        match lost {
            Some(id) => Err(self.damaged(self.offset(id)?, "a page is neither used nor free")),
            None => Ok(()),
        }
    }

    fn check_freelist(&self, seen: &mut Seen) -> Result<(), BoltError> {
        let id = self.meta.freelist;
        let (header, offset) = (self.header(id)?, self.offset(id)?);
        if header.flags != FREELIST_FLAG {
            return Err(self.damaged(offset, "the list of free pages is something else"));
        }
        self.account(id, header.overflow, seen)?;
        let end = offset + (u64::from(header.overflow) + 1) * u64::from(self.meta.page_size);
        let mut at = offset + HEADER as u64;
        let mut count = u64::from(header.count);
        if header.count == FREELIST_COUNT_INSIDE {
            let mut inside = [0; 8];
            self.read(&mut inside, at)?;
            count = u64::from_le_bytes(inside);
            at += 8;
        }
        if count > (end - at) / 8 {
            return Err(self.damaged(offset, "the list of free pages is longer than its page"));
        }
        let mut piece = vec![0; FREELIST_PIECE];
        while count > 0 {
            let numbers = usize::try_from(count).unwrap_or(usize::MAX).min(FREELIST_PIECE / 8);
            let bytes = &mut piece[..numbers * 8];
            self.read(bytes, at)?;
            for number in (0..numbers).filter_map(|number| u64_at(bytes, number * 8)) {
                if number < 2 || !seen.add(number) {
                    return Err(self.damaged(offset, "a page is listed as free and used, or listed twice"));
                }
            }
            at += bytes.len() as u64;
            count -= numbers as u64;
        }
        Ok(())
    }

    fn account(&self, id: u64, overflow: u32, seen: &mut Seen) -> Result<(), BoltError> {
        for id in id..=id + u64::from(overflow) {
            if !seen.add(id) {
                return Err(self.damaged(self.offset(id)?, "a page is used twice, or used and free"));
            }
        }
        Ok(())
    }

    fn check_tree(
        &self,
        id: u64,
        bounds: Bounds<'_>,
        level: usize,
        seen: &mut Seen,
    ) -> Result<(), BoltError> {
        let header = self.header(id)?;
        self.account(id, header.overflow, seen)?;
        let node = self.node(id)?;
        if level == LEVELS_MAX {
            return Err(self.damaged(node.offset, "a tree has too many levels"));
        }
        let Some(last) = node.len().checked_sub(1) else { return Ok(()) };
        if node.key(0) < bounds.first || bounds.end.is_some_and(|end| node.key(last) >= end) {
            return Err(self.damaged(node.offset, "a key is not where its branch leads"));
        }
        for at in 0..=last {
            if node.is_branch {
                let end = if at < last { Some(node.key(at + 1)) } else { bounds.end };
                self.check_tree(node.child(at), Bounds { first: node.key(at), end }, level + 1, seen)?;
            } else if node.is_bucket(at) {
                self.check_bucket(&node, at, level + 1, seen)?;
            }
        }
        Ok(())
    }

    fn check_bucket(&self, node: &Node, at: usize, level: usize, seen: &mut Seen) -> Result<(), BoltError> {
        match self.bucket_root(node.value(at), node.value_offset(at))? {
            BucketRoot::Page(id) => self.check_tree(id, Bounds { first: &[], end: None }, level, seen),
            BucketRoot::Inline(node) => {
                if (0..node.len()).any(|at| node.is_bucket(at)) {
                    return Err(self.damaged(node.offset, "a bucket inside an entry holds a bucket"));
                }
                Ok(())
            }
        }
    }
}

/// What a branch says of the keys below one of its children.
#[derive(Clone, Copy)]
struct Bounds<'k> {
    first: &'k [u8],
    /// Not included.
    end: Option<&'k [u8]>,
}
