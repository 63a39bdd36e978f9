//! How much was read and written, for metrics. Nothing here outlives the process.

use std::sync::atomic::{AtomicU64, Ordering};

/// What one transaction did, or a single operation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// Ranges, those of compares included.
    pub ranges: u64,
    /// Puts.
    pub puts: u64,
    /// Range deletes.
    pub deletes: u64,
    /// Bytes of keys and values put.
    pub put_bytes: u64,
}

/// Sums since the store was opened.
#[derive(Debug, Default)]
pub struct Activity {
    ranges: AtomicU64,
    puts: AtomicU64,
    deletes: AtomicU64,
    put_bytes: AtomicU64,
    txns: AtomicU64,
}

impl Activity {
    /// Adds one transaction. etcd: `server/storage/mvcc/metrics_txn.go`
    pub fn add(&self, tally: Tally) {
        let sums = [
            (&self.ranges, tally.ranges),
            (&self.puts, tally.puts),
            (&self.deletes, tally.deletes),
            (&self.put_bytes, tally.put_bytes),
            (&self.txns, u64::from(tally.ranges + tally.puts + tally.deletes > 1)),
        ];
        for (sum, more) in sums {
            if more > 0 {
                sum.fetch_add(more, Ordering::Relaxed);
            }
        }
    }

    /// The sums so far, and the number of transactions with more than one operation.
    pub fn sums(&self) -> (Tally, u64) {
        let read = |sum: &AtomicU64| sum.load(Ordering::Relaxed);
        let tally = Tally {
            ranges: read(&self.ranges),
            puts: read(&self.puts),
            deletes: read(&self.deletes),
            put_bytes: read(&self.put_bytes),
        };
        (tally, read(&self.txns))
    }
}

#[cfg(test)]
mod tests {
    use super::{Activity, Tally};

    #[test]
    fn a_transaction_has_more_than_one_operation() {
        let activity = Activity::default();
        activity.add(Tally { puts: 1, put_bytes: 7, ..Tally::default() });
        activity.add(Tally { ranges: 1, puts: 1, deletes: 1, ..Tally::default() });
        let (sums, txns) = activity.sums();
        assert_eq!((sums, txns), (Tally { ranges: 1, puts: 2, deletes: 1, put_bytes: 7 }, 1));
    }
}
