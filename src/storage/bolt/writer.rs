//! Writing a file from front to back.

use std::io::{self, Write};

use super::PAGE_BYTES;
use super::page::{BRANCH_FLAG, BUCKET_FLAG, HEADER, Header, KEY_MAX, LEAF_FLAG, Meta, NO_FREELIST};

/// A bucket up to this size lies in its entry of the root bucket. bbolt: `maxInlineBucketSize`.
const INLINE_MAX: usize = PAGE_BYTES / 4;
/// The transaction that the file is of. Even, for then the next one takes the place of the older meta page.
const TXID: u64 = 2;
/// Pages before the first one of a tree.
const META_PAGES: u64 = 2;
/// Children of a branch page, however long their keys are: with fewer, a level would not be smaller than the one below.
const BRANCH_COUNT_MIN: usize = 2;

/// Why a file cannot be written.
#[derive(Debug, thiserror::Error)]
pub enum WriteError {
    /// The output failed.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// Keys or buckets do not ascend, or a key is empty or too long.
    #[error("entries of a bbolt file are out of order")]
    OutOfOrder,
    /// What is written is not what was measured.
    #[error("entries of a bbolt file are not the ones that were measured")]
    NotAsMeasured,
}

/// The shape of a file; see [`Writer::measured`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    pages: u64,
    root: u64,
}

impl Plan {
    /// Size of the file.
    pub fn size_bytes(self) -> u64 {
        self.pages * PAGE_BYTES as u64
    }
}

/// The value of an entry. A measuring writer needs its length alone.
#[derive(Clone, Copy, Debug)]
pub enum Value<'v> {
    /// For either writer.
    Bytes(&'v [u8]),
    /// For a measuring writer.
    Length(usize),
}

/// Takes buckets in the order of their names, and their entries in the order of their keys.
#[derive(Debug)]
pub struct Writer<W> {
    pages: Pages<W>,
    plan: Option<Plan>,
    root: Tree,
    bucket: Tree,
    /// Name of the bucket that is being written.
    name: Option<Vec<u8>>,
}

impl Writer<io::Sink> {
    /// Starts to measure.
    pub fn measuring() -> Writer<io::Sink> {
        let pages = Pages { out: None, next: META_PAGES, scratch: Vec::new() };
        Writer { pages, plan: None, root: Tree::default(), bucket: Tree::default(), name: None }
    }

    /// Ends measuring.
    ///
    /// # Errors
    /// [`WriteError::OutOfOrder`].
    pub fn measured(mut self) -> Result<Plan, WriteError> {
        self.end()
    }
}

impl<W: Write> Writer<W> {
    /// Starts to write what has been measured.
    ///
    /// # Errors
    /// [`WriteError::Io`].
    pub fn new(mut out: W, plan: Plan) -> Result<Writer<W>, WriteError> {
        let page_size = u32::try_from(PAGE_BYTES).expect("4096 fits");
        for id in 0..META_PAGES {
            let meta = Meta {
                page_size,
                root: plan.root,
                freelist: NO_FREELIST,
                pages: plan.pages,
                txid: TXID - id,
            };
            let mut page = [0; PAGE_BYTES];
            let meta = meta.encode(id);
            page[..meta.len()].copy_from_slice(&meta);
            out.write_all(&page)?;
        }
        let pages = Pages { out: Some(out), next: META_PAGES, scratch: Vec::new() };
        Ok(Writer { pages, plan: Some(plan), root: Tree::default(), bucket: Tree::default(), name: None })
    }

    /// Begins a bucket.
    ///
    /// # Errors
    /// As [`Writer::put`].
    pub fn bucket(&mut self, name: &[u8]) -> Result<(), WriteError> {
        self.end_bucket()?;
        self.name = Some(name.to_vec());
        Ok(())
    }

    /// Adds an entry to the bucket last begun.
    ///
    /// # Errors
    /// [`WriteError::OutOfOrder`], [`WriteError::NotAsMeasured`] for a length in the place of a value, [`WriteError::Io`].
    pub fn put(&mut self, key: &[u8], value: Value<'_>) -> Result<(), WriteError> {
        self.bucket.put(&mut self.pages, key, value, 0)
    }

    /// Ends the file, and gives back the output with all of it.
    ///
    /// # Errors
    /// [`WriteError::NotAsMeasured`] when the file is not what its meta pages say; [`WriteError::Io`].
    pub fn finish(mut self) -> Result<W, WriteError> {
        let written = self.end()?;
        if self.plan != Some(written) {
            return Err(WriteError::NotAsMeasured);
        }
        self.pages.out.ok_or(WriteError::NotAsMeasured)
    }

    fn end(&mut self) -> Result<Plan, WriteError> {
        self.end_bucket()?;
        let root = self.root.end(&mut self.pages)?;
        Ok(Plan { pages: self.pages.next, root })
    }

    fn end_bucket(&mut self) -> Result<(), WriteError> {
        let Some(name) = self.name.take() else { return Ok(()) };
        // Root page and sequence; an inline bucket has no root page, and follows.
        let mut entry = vec![0; 16];
        if self.bucket.fits_inline() {
            let page = std::mem::take(&mut self.bucket).leaf;
            if self.pages.out.is_some() {
                page.encode(LEAF_FLAG, 0, 0, &mut entry);
            } else {
                entry.resize(16 + page.size_bytes(), 0);
            }
        } else {
            let root = std::mem::take(&mut self.bucket).end(&mut self.pages)?;
            entry[..8].copy_from_slice(&root.to_le_bytes());
        }
        self.root.put(&mut self.pages, &name, Value::Bytes(&entry), BUCKET_FLAG)
    }
}

/// Pages as they are written, or only counted.
#[derive(Debug)]
struct Pages<W> {
    out: Option<W>,
    next: u64,
    scratch: Vec<u8>,
}

impl<W: Write> Pages<W> {
    /// Writes a page and empties it; gives its number.
    fn write(&mut self, page: &mut Page, flags: u16) -> Result<u64, WriteError> {
        let id = self.next;
        let pages = page.size_bytes().div_ceil(PAGE_BYTES);
        self.next += pages as u64;
        if let Some(out) = &mut self.out {
            let overflow = u32::try_from(pages - 1).map_err(|_| WriteError::OutOfOrder)?;
            self.scratch.clear();
            page.encode(flags, id, overflow, &mut self.scratch);
            self.scratch.resize(pages * PAGE_BYTES, 0);
            out.write_all(&self.scratch)?;
            // A large value must not be paid for to the end.
            self.scratch.shrink_to(PAGE_BYTES);
        }
        *page = Page::default();
        Ok(id)
    }
}

/// A tree as far as it is not written: the last page of each level.
#[derive(Debug, Default)]
struct Tree {
    leaf: Page,
    branches: Vec<Page>,
    last_key: Vec<u8>,
}

impl Tree {
    fn fits_inline(&self) -> bool {
        self.branches.is_empty() && self.leaf.size_bytes() <= INLINE_MAX
    }

    fn put<W: Write>(
        &mut self,
        pages: &mut Pages<W>,
        key: &[u8],
        value: Value<'_>,
        flags: u32,
    ) -> Result<(), WriteError> {
        if key <= &self.last_key[..] || key.len() > KEY_MAX {
            return Err(WriteError::OutOfOrder);
        }
        self.last_key.clear();
        self.last_key.extend_from_slice(key);
        let value_len = match value {
            Value::Bytes(bytes) => bytes.len(),
            Value::Length(_) if pages.out.is_some() => return Err(WriteError::NotAsMeasured),
            Value::Length(length) => length,
        };
        if self.leaf.count > 0 && self.leaf.size_bytes() + HEADER + key.len() + value_len > PAGE_BYTES {
            let first = std::mem::take(&mut self.leaf.first_key);
            let id = pages.write(&mut self.leaf, LEAF_FLAG)?;
            self.link(pages, 0, &first, id)?;
        }
        let element = |flags: u32, key: u32, value: u32| {
            let mut out = [0; HEADER];
            out[..4].copy_from_slice(&flags.to_le_bytes());
            out[8..12].copy_from_slice(&key.to_le_bytes());
            out[12..].copy_from_slice(&value.to_le_bytes());
            out
        };
        let length = |length: usize| u32::try_from(length).map_err(|_| WriteError::OutOfOrder);
        let element = element(flags, length(key.len())?, length(value_len)?);
        let value = if let (Value::Bytes(bytes), true) = (value, pages.out.is_some()) { bytes } else { &[] };
        self.leaf.add(element, key, value, value_len, pages.out.is_some());
        Ok(())
    }

    /// Notes a written page in the branch above it.
    fn link<W: Write>(
        &mut self,
        pages: &mut Pages<W>,
        level: usize,
        first: &[u8],
        id: u64,
    ) -> Result<(), WriteError> {
        if level == self.branches.len() {
            self.branches.push(Page::default());
        }
        let branch = &mut self.branches[level];
        if branch.count >= BRANCH_COUNT_MIN && branch.size_bytes() + HEADER + first.len() > PAGE_BYTES {
            let first = std::mem::take(&mut branch.first_key);
            let id = pages.write(branch, BRANCH_FLAG)?;
            self.link(pages, level + 1, &first, id)?;
        }
        let mut element = [0; HEADER];
        let key_len = u32::try_from(first.len()).map_err(|_| WriteError::OutOfOrder)?;
        element[4..8].copy_from_slice(&key_len.to_le_bytes());
        element[8..].copy_from_slice(&id.to_le_bytes());
        self.branches[level].add(element, first, &[], 0, pages.out.is_some());
        Ok(())
    }

    /// Writes what is left, and gives the number of the root page.
    fn end<W: Write>(&mut self, pages: &mut Pages<W>) -> Result<u64, WriteError> {
        let mut first = std::mem::take(&mut self.leaf.first_key);
        let mut id = pages.write(&mut self.leaf, LEAF_FLAG)?;
        let mut level = 0;
        while level < self.branches.len() {
            self.link(pages, level, &first, id)?;
            first = std::mem::take(&mut self.branches[level].first_key);
            id = pages.write(&mut self.branches[level], BRANCH_FLAG)?;
            level += 1;
        }
        Ok(id)
    }
}

/// A page in the making.
#[derive(Debug, Default)]
struct Page {
    count: usize,
    /// Bytes of the keys and values.
    data_len: usize,
    first_key: Vec<u8>,
    /// What is written: elements whose positions are still to be set, each with the length of its data; and the data.
    elements: Vec<([u8; HEADER], usize)>,
    data: Vec<u8>,
}

impl Page {
    fn size_bytes(&self) -> usize {
        HEADER + self.count * HEADER + self.data_len
    }

    fn add(&mut self, element: [u8; HEADER], key: &[u8], value: &[u8], value_len: usize, keep: bool) {
        if self.count == 0 {
            self.first_key.extend_from_slice(key);
        }
        self.count += 1;
        self.data_len += key.len() + value_len;
        if keep {
            self.elements.push((element, key.len() + value_len));
            self.data.extend_from_slice(key);
            self.data.extend_from_slice(value);
        }
    }

    /// Appends the page, without the zeros after it.
    fn encode(&self, flags: u16, id: u64, overflow: u32, out: &mut Vec<u8>) {
        let count = u16::try_from(self.count).expect("elements of 16 bytes in a page of 4096, or two");
        out.extend_from_slice(&Header { id, flags, count, overflow }.encode());
        // A leaf's element has its flags where a branch's has the position.
        let position_at = if flags == LEAF_FLAG { 4 } else { 0 };
        let mut data_at = 0;
        for (at, (element, length)) in self.elements.iter().enumerate() {
            let position = HEADER * (self.count - at) + data_at;
            let position = u32::try_from(position).expect("only the last element of a page begins past it");
            let mut element = *element;
            element[position_at..position_at + 4].copy_from_slice(&position.to_le_bytes());
            out.extend_from_slice(&element);
            data_at += length;
        }
        out.extend_from_slice(&self.data);
    }
}
