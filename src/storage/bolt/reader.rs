//! Reading a file.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use super::BoltError;
use super::page::{HEADER, Header, META, Meta, Node, u64_at};

/// Bytes of a page with those that continue it, and so of what a reader holds at once. etcd's largest request is far below.
const NODE_BYTES_MAX: u64 = 512 << 20;
/// Levels of a tree. Each halves what is below it, so a real one has far fewer.
pub(super) const LEVELS_MAX: usize = 48;
/// Where the second meta page may be: at the end of the first page, whose size only the first page says.
const META_OFFSETS: u32 = 15;

/// A file that is only read.
#[derive(Debug)]
pub struct Bolt {
    file: File,
    path: PathBuf,
    pub(super) meta: Meta,
}

impl Bolt {
    /// Opens a file.
    ///
    /// # Errors
    /// [`BoltError::Foreign`], [`BoltError::Truncated`], [`BoltError::Io`].
    pub fn open(path: &Path) -> Result<Bolt, BoltError> {
        let io_error = |action| move |source| BoltError::Io { action, path: path.to_owned(), source };
        let file = File::open(path).map_err(io_error("open"))?;
        let found = file.metadata().map_err(io_error("look at"))?.len();
        let read_meta = |offset: u64| -> Result<Option<Meta>, BoltError> {
            let mut page = [0; META];
            match file.read_exact_at(&mut page, offset) {
                Ok(()) => Ok(Meta::decode(&page)),
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(None),
                Err(source) => Err(BoltError::Io { action: "read", path: path.to_owned(), source }),
            }
        };
        let first = read_meta(0)?;
        let second = match first {
            Some(first) => read_meta(u64::from(first.page_size))?,
            None => {
                let mut second = None;
                for shift in 0..META_OFFSETS {
                    let offset = 1024 << shift;
                    second = second.or(read_meta(offset)?.filter(|meta| u64::from(meta.page_size) == offset));
                }
                second
            }
        };
        let newest = first.into_iter().chain(second).max_by_key(|meta| meta.txid);
        let Some(meta) = newest else { return Err(BoltError::Foreign { path: path.to_owned() }) };
        let expected = meta.pages.saturating_mul(u64::from(meta.page_size));
        if found < expected {
            return Err(BoltError::Truncated { path: path.to_owned(), found, expected });
        }
        Ok(Bolt { file, path: path.to_owned(), meta })
    }

    /// Bytes of all pages; the file may be longer.
    pub fn size_bytes(&self) -> u64 {
        self.meta.pages * u64::from(self.meta.page_size)
    }

    /// The buckets, by name.
    ///
    /// # Errors
    /// [`BoltError::Damaged`], [`BoltError::Io`].
    pub fn buckets(&self) -> Result<Cursor<'_>, BoltError> {
        Cursor::new(self, self.node(self.meta.root)?)
    }

    /// The entries of a bucket, by key; `None` if there is no such bucket.
    ///
    /// # Errors
    /// As [`Bolt::buckets`].
    pub fn bucket(&self, name: &[u8]) -> Result<Option<Cursor<'_>>, BoltError> {
        let mut buckets = self.buckets()?;
        while let Some(entry) = buckets.next()? {
            if entry.key == name && entry.is_bucket {
                return self.open_bucket(&entry).map(Some);
            }
        }
        Ok(None)
    }

    /// The entries of the bucket that an entry is.
    ///
    /// # Errors
    /// As [`Bolt::buckets`], also if it is none.
    pub fn open_bucket(&self, entry: &Entry<'_>) -> Result<Cursor<'_>, BoltError> {
        if !entry.is_bucket {
            return Err(self.damaged(entry.offset, "there is something else in the place of a bucket"));
        }
        match self.bucket_root(entry.value, entry.offset)? {
            BucketRoot::Page(id) => Cursor::new(self, self.node(id)?),
            BucketRoot::Inline(node) => Cursor::new(self, node),
        }
    }

    /// What the value of a bucket's entry leads to.
    pub(super) fn bucket_root(&self, value: &[u8], offset: u64) -> Result<BucketRoot, BoltError> {
        let damaged = |what| self.damaged(offset, what);
        let root = u64_at(value, 0).filter(|_| value.len() >= HEADER);
        match root.ok_or_else(|| damaged("the entry of a bucket is too short"))? {
            0 => {
                let inline =
                    Node::parse(value[HEADER..].to_vec(), offset + HEADER as u64).map_err(damaged)?;
                if inline.is_branch {
                    return Err(damaged("a bucket inside an entry is not a leaf"));
                }
                Ok(BucketRoot::Inline(inline))
            }
            id => Ok(BucketRoot::Page(id)),
        }
    }

    /// The header of a page.
    pub(super) fn header(&self, id: u64) -> Result<Header, BoltError> {
        let offset = self.offset(id)?;
        let mut bytes = [0; HEADER];
        self.read(&mut bytes, offset)?;
        let header = Header::decode(&bytes).filter(|header| header.id == id);
        let header = header.ok_or_else(|| self.damaged(offset, "a page says that it is another one"))?;
        if header.overflow as u64 >= self.meta.pages - id {
            return Err(self.damaged(offset, "a page reaches past the last one"));
        }
        Ok(header)
    }

    /// A whole page of a tree.
    pub(super) fn node(&self, id: u64) -> Result<Node, BoltError> {
        let header = self.header(id)?;
        let offset = self.offset(id)?;
        let length = (u64::from(header.overflow) + 1) * u64::from(self.meta.page_size);
        let bytes = usize::try_from(length).ok().filter(|_| length <= NODE_BYTES_MAX);
        let mut bytes =
            vec![0; bytes.ok_or_else(|| self.damaged(offset, "a page is too large to be one of etcd's"))?];
        self.read(&mut bytes, offset)?;
        Node::parse(bytes, offset).map_err(|what| self.damaged(offset, what))
    }

    /// Where a page is.
    pub(super) fn offset(&self, id: u64) -> Result<u64, BoltError> {
        let page_size = u64::from(self.meta.page_size);
        if (2..self.meta.pages).contains(&id) {
            Ok(id * page_size)
        } else {
            Err(self.damaged(0, "a page is named that is none of a tree"))
        }
    }

    pub(super) fn read(&self, bytes: &mut [u8], offset: u64) -> Result<(), BoltError> {
        let io_error = |source| BoltError::Io { action: "read", path: self.path.clone(), source };
        self.file.read_exact_at(bytes, offset).map_err(io_error)
    }

    pub(super) fn damaged(&self, offset: u64, what: &'static str) -> BoltError {
        BoltError::Damaged { path: self.path.clone(), offset, what }
    }
}

/// Where a bucket is.
pub(super) enum BucketRoot {
    /// On pages of its own.
    Page(u64),
    /// Whole in its entry.
    Inline(Node),
}

/// One entry of a bucket.
#[derive(Clone, Copy, Debug)]
pub struct Entry<'c> {
    /// Its key.
    pub key: &'c [u8],
    /// Its value.
    pub value: &'c [u8],
    /// The value is a bucket; see [`Bolt::open_bucket`].
    pub is_bucket: bool,
    /// Where its value is in the file.
    pub offset: u64,
}

/// Goes through a bucket in the order of its keys, holding one page for each level.
#[derive(Debug)]
pub struct Cursor<'b> {
    bolt: &'b Bolt,
    /// Branches above the leaf, each with its next child.
    branches: Vec<(Node, usize)>,
    leaf: Node,
    next: usize,
    last_key: Vec<u8>,
    /// Pages that may still be visited: a tree visits none twice.
    pages_left: u64,
}

impl<'b> Cursor<'b> {
    fn new(bolt: &'b Bolt, root: Node) -> Result<Cursor<'b>, BoltError> {
        let mut cursor = Cursor {
            bolt,
            branches: Vec::new(),
            leaf: Node::default(),
            next: 0,
            last_key: Vec::new(),
            pages_left: bolt.meta.pages,
        };
        cursor.descend(root)?;
        Ok(cursor)
    }

    /// Goes down to the first leaf of a subtree.
    fn descend(&mut self, mut node: Node) -> Result<(), BoltError> {
        while node.is_branch {
            let offset = node.offset;
            self.pages_left = self.pages_left.saturating_sub(1);
            if self.branches.len() == LEVELS_MAX || self.pages_left == 0 {
                return Err(self.bolt.damaged(offset, "pages of a tree lead back to themselves"));
            }
            let child = self.bolt.node(node.child(0))?;
            self.branches.push((node, 1));
            node = child;
        }
        self.leaf = node;
        self.next = 0;
        Ok(())
    }

    /// The next entry; `None` at the end.
    ///
    /// # Errors
    /// [`BoltError::Damaged`], [`BoltError::Io`]; the cursor is of no more use then.
    #[expect(clippy::should_implement_trait, reason = "what it gives is borrowed from it")]
    pub fn next(&mut self) -> Result<Option<Entry<'_>>, BoltError> {
        while self.next == self.leaf.len() {
            let Some((branch, next)) = self.branches.last_mut() else { return Ok(None) };
            if *next == branch.len() {
                self.branches.pop();
                continue;
            }
            let child = branch.child(*next);
            *next += 1;
            self.pages_left = self.pages_left.saturating_sub(1);
            let node = self.bolt.node(child)?;
            if self.pages_left == 0 {
                return Err(self.bolt.damaged(node.offset, "pages of a tree lead back to themselves"));
            }
            self.descend(node)?;
        }
        let at = self.next;
        self.next += 1;
        let key = self.leaf.key(at);
        if key <= &self.last_key[..] {
            return Err(self.bolt.damaged(self.leaf.offset, "keys of a bucket do not ascend"));
        }
        self.last_key.clear();
        self.last_key.extend_from_slice(key);
        let (value, is_bucket) = (self.leaf.value(at), self.leaf.is_bucket(at));
        Ok(Some(Entry { key: self.leaf.key(at), value, is_bucket, offset: self.leaf.value_offset(at) }))
    }
}
