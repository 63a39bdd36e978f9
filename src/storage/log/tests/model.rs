//! Random operations against a model, across reopening and crashes. A failure prints its seed.

use std::path::Path;

use bytes::Bytes;

use super::{as_one_batch, contents, file_names, flush, options, settled_names};
use crate::storage::log::{Log, LogOptions, Recovered};

/// Seeds of the test command; `SKEG_LOG_SEED` runs one of them or another.
const SEEDS: u64 = 30;
const STEPS: usize = 60;

#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Model {
    first: u64,
    entries: Vec<Vec<u8>>,
    purged: Option<Vec<u8>>,
    vote: Option<Vec<u8>>,
}

impl Model {
    fn next(&self) -> u64 {
        self.first + self.entries.len() as u64
    }

    fn entries(&self) -> Vec<(u64, Vec<u8>)> {
        (self.first..).zip(self.entries.iter().cloned()).collect()
    }

    fn matches(&self, recovered: &Recovered, log: &Log) -> bool {
        recovered.first_index == self.first
            && recovered.next_index == self.next()
            && recovered.purged.as_deref() == self.purged.as_deref()
            && recovered.vote.as_deref() == self.vote.as_deref()
            && contents(log) == self.entries()
    }

    /// Does something at random to the log and itself, without waiting.
    fn step(&mut self, log: &Log, random: &mut fastrand::Rng) {
        match random.u32(..100) {
            0..70 => {
                let payload_bytes = *random.choice([0, 1, 30, 300, 1500]).as_ref().expect("five");
                let count = random.usize(1..6);
                let payloads: Vec<Vec<u8>> = (0..count)
                    .map(|_| std::iter::repeat_with(|| random.u8(..)).take(payload_bytes).collect())
                    .collect();
                let entries = (self.next()..).zip(payloads.iter().cloned().map(Bytes::from)).collect();
                log.append(entries, |result| result.expect("durable")).expect("they follow");
                self.entries.extend(payloads);
            }
            70..80 => {
                let from = random.u64(self.first..=self.next());
                log.truncate_from(from, |result| result.expect("durable")).expect("within");
                self.entries.truncate(usize::try_from(from - self.first).expect("a small model"));
            }
            80..92 => {
                let above = if random.u32(..10) == 0 { 7 } else { 0 };
                let index = random.u64(self.first..=self.next()) + above;
                let mark = index.to_le_bytes().to_vec();
                log.purge_to(index, Bytes::from(mark.clone()), |result| result.expect("durable"))
                    .expect("small");
                let dropped =
                    usize::try_from(index + 1 - self.first).expect("a small model").min(self.entries.len());
                self.entries.drain(..dropped);
                self.first = index + 1;
                self.purged = Some(mark);
            }
            _ => {
                let vote = vec![random.u8(..); 9];
                log.save_vote(Bytes::from(vote.clone()), |result| result.expect("durable")).expect("small");
                self.vote = Some(vote);
            }
        }
    }
}

fn open(dir: &Path) -> (Log, Recovered) {
    let options = LogOptions { tail_bytes: 3000, ..options(dir) };
    Log::open(options).unwrap_or_else(|error| panic!("the log opens: {error}"))
}

fn run(seed: u64) {
    let mut random = fastrand::Rng::with_seed(seed);
    let mut dir = tempfile::tempdir().expect("a directory");
    let mut model = Model::default();
    let (mut log, _) = open(dir.path());
    for _ in 0..STEPS {
        match random.u32(..20) {
            0 => {
                log.close().expect("a clean end");
                let recovered;
                (log, recovered) = open(dir.path());
                assert!(model.matches(&recovered, &log), "{recovered:?} for {model:?}");
                assert_eq!(recovered.cut_bytes, 0);
            }
            1 => {
                let (crashed, recovered, survivor);
                (crashed, log, recovered, survivor) = crash(dir.path(), log, &model, &mut random);
                assert!(survivor.matches(&recovered, &log), "{recovered:?} for {survivor:?}");
                dir = crashed;
                model = survivor;
            }
            2..6 => {
                as_one_batch(&log, || (0..random.usize(1..5)).for_each(|_| model.step(&log, &mut random)))
            }
            _ => {
                model.step(&log, &mut random);
                assert_eq!(log.bounds(), model.first..model.next());
                assert_eq!(contents(&log), model.entries());
            }
        }
    }
}

/// Writes one more batch, of which any sectors may survive; returns the log opened from them, and the model it must match.
fn crash(
    dir: &Path,
    log: Log,
    model: &Model,
    random: &mut fastrand::Rng,
) -> (tempfile::TempDir, Log, Recovered, Model) {
    let names = settled_names(dir, &log);
    let read = |names: &[String]| -> Vec<Vec<u8>> {
        names.iter().map(|name| std::fs::read(dir.join(name)).expect("the file reads")).collect()
    };
    let before = read(&names);
    let mut after_model = model.clone();
    let batches = log.stats().batches;
    as_one_batch(&log, || (0..random.usize(1..4)).for_each(|_| after_model.step(&log, random)));
    flush(&log);
    let one_batch = log.stats().batches - batches <= 4;
    log.close().expect("a clean end");
    let crashed = tempfile::tempdir().expect("a directory");
    // A batch that went on in another segment was two: the crash then came before both.
    let written: Vec<usize> =
        if file_names(dir) == names { changed(&before, &read(&names)) } else { Vec::new() };
    let mut whole = one_batch && written.len() == 1;
    let mut files = before.clone();
    if let [only] = written[..] {
        let after = read(&names).swap_remove(only);
        let file = &mut files[only];
        file.resize(after.len(), 0);
        for start in (0..after.len()).step_by(512) {
            let sector = start..(start + 512).min(after.len());
            if random.u32(..4) > 0 {
                file[sector.clone()].copy_from_slice(&after[sector]);
            }
        }
        whole &= file.starts_with(&after);
    }
    for (name, bytes) in names.iter().zip(files) {
        std::fs::write(crashed.path().join(name), bytes).expect("the file writes");
    }
    let (log, recovered) = open(crashed.path());
    (crashed, log, recovered, if whole { after_model } else { model.clone() })
}

fn changed(before: &[Vec<u8>], after: &[Vec<u8>]) -> Vec<usize> {
    (0..before.len()).filter(|file| before[*file] != after[*file]).collect()
}

#[test]
fn the_log_does_what_the_model_does() {
    let only = std::env::var("SKEG_LOG_SEED").ok().map(|seed| seed.parse().expect("a number"));
    let seeds = only.map_or(0..SEEDS, |seed| seed..seed + 1);
    for seed in seeds {
        let outcome = std::panic::catch_unwind(|| run(seed));
        assert!(outcome.is_ok(), "failed; replay with SKEG_LOG_SEED={seed}");
    }
}
