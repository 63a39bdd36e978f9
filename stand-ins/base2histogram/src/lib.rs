//! Stands in for `base2histogram`, which openraft records its own statistics with.
//!
//! The real crate builds lookup tables of 26 MB at its first use, as much as an idle etcd takes in all, for a precision
//! that nobody reads here: skeg builds openraft without `runtime-stats`. This one has a bucket for each power of two, half
//! a kilobyte a histogram, and the part of the interface that openraft uses; should it come to use more, this fails to
//! compile and the decision can be taken anew.

use std::fmt;
use std::marker::PhantomData;

const BUCKETS: usize = u64::BITS as usize + 1;

/// Counts of values by their highest bit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Histogram<T = ()> {
    counts: [u64; BUCKETS],
    slots: PhantomData<T>,
}

impl<T> Histogram<T> {
    /// Makes an empty one.
    pub fn new() -> Self {
        Self { counts: [0; BUCKETS], slots: PhantomData }
    }

    /// Takes a value.
    pub fn record(&mut self, value: u64) {
        self.record_n(value, 1);
    }

    /// Takes a value several times.
    pub fn record_n(&mut self, value: u64, count: u64) {
        self.counts[(u64::BITS - value.leading_zeros()) as usize] += count;
    }

    /// Number of values taken.
    pub fn total(&self) -> u64 {
        self.counts.iter().sum()
    }

    /// The least value of the bucket that holds the given share, in thousandths, of all values; 0 if there is none.
    fn per_mille(&self, share: u64) -> u64 {
        let wanted = (self.total() * share).div_ceil(1000).max(1);
        let mut seen = 0;
        for (bits, count) in self.counts.iter().enumerate() {
            seen += count;
            if seen >= wanted {
                return if bits == 0 { 0 } else { 1 << (bits - 1) };
            }
        }
        0
    }

    /// The usual percentiles.
    pub fn percentile_stats(&self) -> PercentileStats {
        PercentileStats {
            samples: self.total(),
            p0_1: self.per_mille(1),
            p1: self.per_mille(10),
            p5: self.per_mille(50),
            p10: self.per_mille(100),
            p50: self.per_mille(500),
            p90: self.per_mille(900),
            p99: self.per_mille(990),
            p99_9: self.per_mille(999),
        }
    }
}

impl<T> Default for Histogram<T> {
    fn default() -> Self {
        Self::new()
    }
}

/// Percentiles of a histogram.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PercentileStats {
    /// Number of values.
    pub samples: u64,
    /// 0.1th percentile.
    pub p0_1: u64,
    /// 1st percentile.
    pub p1: u64,
    /// 5th percentile.
    pub p5: u64,
    /// 10th percentile.
    pub p10: u64,
    /// Median.
    pub p50: u64,
    /// 90th percentile.
    pub p90: u64,
    /// 99th percentile.
    pub p99: u64,
    /// 99.9th percentile.
    pub p99_9: u64,
}

impl fmt::Display for PercentileStats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { samples, p10, p50, p90, p99, .. } = self;
        write!(f, "[samples: {samples}, P10: {p10}, P50: {p50}, P90: {p90}, P99: {p99}]")
    }
}

/// Several histograms shown under each other, a line each.
#[derive(Clone, Debug, Default)]
pub struct AsciiChart {
    lines: Vec<(String, PercentileStats)>,
}

impl AsciiChart {
    /// Makes an empty chart.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a line.
    #[must_use]
    pub fn add<T>(mut self, name: impl Into<String>, histogram: Histogram<T>) -> Self {
        self.lines.push((name.into(), histogram.percentile_stats()));
        self
    }
}

impl fmt::Display for AsciiChart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.lines.iter().try_for_each(|(name, stats)| writeln!(f, "{name}: {stats}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_the_least_value_of_their_power_of_two() {
        let mut histogram = Histogram::<()>::new();
        assert_eq!(histogram.percentile_stats().p99, 0);
        (0..90).for_each(|_| histogram.record(5));
        (0..10).for_each(|_| histogram.record(u64::MAX));
        let stats = histogram.percentile_stats();
        assert_eq!((stats.samples, stats.p50, stats.p90, stats.p99), (100, 4, 4, 1 << 63));
    }
}
