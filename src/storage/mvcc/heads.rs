//! The newest version of recently used keys, within a budget.
//!
//! Without it an overwrite has to seek for the version before it, which costs several times the write itself. An entry
//! says what the newest version is, also that there is none; a key that is not here must be looked up in the engine.

use bytes::Bytes;
use quick_cache::Weighter;
use quick_cache::unsync::Cache;

use crate::storage::schema::KeyMeta;

/// Bytes an entry costs besides its key: the value, the cache's links and hash slot, the allocation.
const ENTRY_OVERHEAD: u64 = 128;
/// Entries that the table has room for at first; it grows. An idle member should not pay for a full cache.
const FIRST_ENTRIES: usize = 4096;

#[derive(Clone)]
struct ByBytes;

impl Weighter<Bytes, Option<KeyMeta>> for ByBytes {
    fn weight(&self, key: &Bytes, _: &Option<KeyMeta>) -> u64 {
        ENTRY_OVERHEAD + key.len() as u64
    }
}

/// Key to newest version; `None` inside an entry means that the key does not exist.
pub(super) struct Heads {
    cache: Cache<Bytes, Option<KeyMeta>, ByBytes>,
}

impl Heads {
    pub(super) fn new(budget_bytes: usize) -> Heads {
        Heads { cache: Cache::with_weighter(FIRST_ENTRIES, budget_bytes as u64, ByBytes) }
    }

    /// The newest version of a key; the outer `None` means "not known here".
    pub(super) fn get(&self, key: &[u8]) -> Option<Option<KeyMeta>> {
        self.cache.get(key).copied()
    }

    /// Bytes held.
    pub(super) fn size_bytes(&self) -> u64 {
        self.cache.weight()
    }

    /// Remembers the newest version. The key is copied: a slice would pin the request's whole buffer.
    pub(super) fn insert(&mut self, key: &[u8], head: Option<KeyMeta>) {
        if let Some(mut known) = self.cache.get_mut(key) {
            *known = head;
            return;
        }
        self.cache.insert(Bytes::copy_from_slice(key), head);
    }
}
