//! The newest entries, kept in memory: what followers and apply nearly always ask for.

use std::collections::VecDeque;
use std::ops::Range;

use bytes::Bytes;

/// What an entry costs beside its payload, so that a budget of bytes also bounds the number of empty entries.
const ENTRY_OVERHEAD_BYTES: usize = 64;

/// The entries from `first` to the log's end, without holes.
#[derive(Debug, Default)]
pub(super) struct Tail {
    first: u64,
    entries: VecDeque<Bytes>,
    bytes: usize,
}

impl Tail {
    pub(super) fn starting_at(first: u64) -> Self {
        Self { first, ..Self::default() }
    }

    pub(super) fn first(&self) -> u64 {
        self.first
    }

    /// The index after the last.
    pub(super) fn end(&self) -> u64 {
        self.first + self.entries.len() as u64
    }

    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    pub(super) fn push(&mut self, payload: Bytes) {
        self.bytes += cost_bytes(&payload);
        self.entries.push_back(payload);
    }

    pub(super) fn pop_first(&mut self) {
        if let Some(payload) = self.entries.pop_front() {
            self.bytes -= cost_bytes(&payload);
            self.first += 1;
        }
    }

    /// Drops the entries from `from` on. The end is then `from`, if it was not below.
    pub(super) fn truncate_from(&mut self, from: u64) {
        while self.end() > from {
            match self.entries.pop_back() {
                Some(payload) => self.bytes -= cost_bytes(&payload),
                None => self.first = from,
            }
        }
    }

    /// Drops the entries below `first`. The end is then at least `first`.
    pub(super) fn drop_below(&mut self, first: u64) {
        while self.first < first && !self.entries.is_empty() {
            self.pop_first();
        }
        self.first = self.first.max(first);
    }

    /// Returns those of the range that are here.
    pub(super) fn range(&self, range: Range<u64>) -> impl Iterator<Item = (u64, &Bytes)> {
        let from = range.start.clamp(self.first, self.end());
        let until = range.end.clamp(from, self.end());
        let slot = |index: u64| usize::try_from(index - self.first).expect("a slot of the queue");
        (from..until).zip(self.entries.range(slot(from)..slot(until)))
    }
}

/// What keeping the entry costs.
pub(super) fn cost_bytes(payload: &Bytes) -> usize {
    payload.len() + ENTRY_OVERHEAD_BYTES
}
