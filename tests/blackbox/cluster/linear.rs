//! Linearizability of what clients did to one register, by search: Wing and Gong's algorithm with Lowe's memory of what
//! was tried.
//!
//! Calls are taken in an order that agrees with real time: a call that ended before another began comes first. If there
//! is such an order in which each answer is right, the register behaved as one that does one call at a time. A call
//! without an answer may come at any time after it began, or never.

use std::collections::HashSet;

/// Steps after which the search gives up; a test's history needs a few per call.
const STEPS_MAX: usize = 20_000_000;

/// What was asked, with what was answered. The value 0 stands for "no value", at first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Call {
    /// It had this value.
    Read(u64),
    /// It has this value from then on.
    Write(u64),
    /// It had the value `from` and has `to` from then on; or it had another, `found`. Without an answer either may be.
    Swap { from: u64, to: u64, found: Option<Result<(), u64>> },
}

/// A call between its begin and its end; `end` is `None` without an answer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Span<T> {
    pub(crate) begin: T,
    pub(crate) end: Option<T>,
    pub(crate) call: Call,
}

/// Why a history is refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Violation {
    /// There is no order in which all answers are right. The call at which the longest attempt ended.
    NoOrder(Call),
    /// The search took too long to tell.
    Unknown,
}

impl Call {
    /// The value after the call; `None` if its answer is wrong for this value before.
    fn step(self, value: u64) -> Option<u64> {
        match self {
            Call::Read(read) => (read == value).then_some(value),
            Call::Write(written) => Some(written),
            Call::Swap { from, to, found: Some(Ok(())) } => (from == value).then_some(to),
            Call::Swap { from, found: Some(Err(found)), .. } => {
                (found == value && from != value).then_some(value)
            }
            Call::Swap { from, to, found: None } => Some(if from == value { to } else { value }),
        }
    }
}

/// A begin or an end in a list that calls are taken out of and put back into.
struct Event {
    call: usize,
    is_end: bool,
    previous: usize,
    next: usize,
}

/// The head of the list; also its end.
const HEAD: usize = 0;

struct List {
    events: Vec<Event>,
    /// The two events of each call; the second may be missing.
    of: Vec<(usize, Option<usize>)>,
}

impl List {
    fn new<T: Ord + Copy>(spans: &[Span<T>]) -> List {
        let mut times: Vec<(T, bool, usize)> = Vec::new();
        for (call, span) in spans.iter().enumerate() {
            times.push((span.begin, false, call));
            times.extend(span.end.map(|end| (end, true, call)));
        }
        // At the same time begins come first: then the two calls may be in either order.
        times.sort_unstable();
        let mut events = vec![Event { call: usize::MAX, is_end: false, previous: HEAD, next: HEAD }];
        let mut of = vec![(HEAD, None); spans.len()];
        for (_, is_end, call) in times {
            let (at, last) = (events.len(), events.len() - 1);
            events[last].next = at;
            events.push(Event { call, is_end, previous: last, next: HEAD });
            events[HEAD].previous = at;
            if is_end { of[call].1 = Some(at) } else { of[call].0 = at }
        }
        List { events, of }
    }

    fn first(&self) -> usize {
        self.events[HEAD].next
    }

    fn take_out(&mut self, call: usize) {
        let (begin, end) = self.of[call];
        for at in [Some(begin), end].into_iter().flatten() {
            let (previous, next) = (self.events[at].previous, self.events[at].next);
            self.events[previous].next = next;
            self.events[next].previous = previous;
        }
    }

    fn put_back(&mut self, call: usize) {
        let (begin, end) = self.of[call];
        for at in [end, Some(begin)].into_iter().flatten() {
            let (previous, next) = (self.events[at].previous, self.events[at].next);
            self.events[previous].next = at;
            self.events[next].previous = at;
        }
    }
}

/// Looks for an order in which every answer is right.
///
/// # Errors
/// [`Violation`] if there is none, or none was found in time.
pub(crate) fn check<T: Ord + Copy>(spans: &[Span<T>]) -> Result<(), Violation> {
    let mut list = List::new(spans);
    let mut answered_left = spans.iter().filter(|span| span.end.is_some()).count();
    let mut done = vec![0_u64; spans.len().div_ceil(64)];
    let mut tried: HashSet<(Vec<u64>, u64)> = HashSet::new();
    let mut taken: Vec<(usize, u64)> = Vec::new();
    let mut value = 0;
    let mut at = list.first();
    let mut furthest = (0, spans.first().map_or(Call::Read(0), |span| span.call));
    for _ in 0..STEPS_MAX {
        if answered_left == 0 {
            return Ok(());
        }
        let Event { call, is_end, next, .. } = list.events[at];
        if at != HEAD && !is_end {
            let after = spans[call].call.step(value);
            done[call / 64] |= 1 << (call % 64);
            if let Some(after) = after
                && tried.insert((done.clone(), after))
            {
                taken.push((call, value));
                value = after;
                list.take_out(call);
                answered_left -= usize::from(spans[call].end.is_some());
                at = list.first();
            } else {
                done[call / 64] &= !(1 << (call % 64));
                at = next;
            }
            continue;
        }
        // A call that has ended must come before anything that is left: what was taken last was wrong.
        if at != HEAD && taken.len() >= furthest.0 {
            furthest = (taken.len(), spans[call].call);
        }
        let Some((undone, before)) = taken.pop() else { return Err(Violation::NoOrder(furthest.1)) };
        done[undone / 64] &= !(1 << (undone % 64));
        value = before;
        list.put_back(undone);
        answered_left += usize::from(spans[undone].end.is_some());
        at = list.events[list.of[undone].0].next;
    }
    Err(Violation::Unknown)
}

mod tests {
    use super::*;

    fn span(begin: u32, end: u32, call: Call) -> Span<u32> {
        Span { begin, end: (end > 0).then_some(end), call }
    }

    const fn swapped(from: u64, to: u64) -> Call {
        Call::Swap { from, to, found: Some(Ok(())) }
    }

    #[test]
    fn what_a_register_can_do_is_accepted() {
        assert_eq!(check::<u32>(&[]), Ok(()));
        // Calls at the same time may be in any order; one without an answer has happened or not.
        let good: [&[Span<u32>]; 5] = [
            &[span(1, 2, Call::Read(0)), span(3, 4, Call::Write(1)), span(5, 6, Call::Read(1))],
            &[span(1, 9, Call::Write(1)), span(2, 3, Call::Read(1)), span(4, 5, Call::Read(1))],
            &[span(1, 0, Call::Write(1)), span(2, 3, Call::Read(0)), span(4, 5, Call::Read(1))],
            &[span(1, 0, Call::Write(1)), span(2, 3, Call::Read(0)), span(4, 5, Call::Read(0))],
            &[span(1, 9, swapped(2, 1)), span(2, 8, Call::Write(2)), span(3, 7, swapped(1, 3))],
        ];
        for history in good {
            assert_eq!(check(history), Ok(()), "{history:?}");
        }
    }

    #[test]
    fn a_stale_read_is_found() {
        let history = [span(1, 2, Call::Write(1)), span(3, 4, Call::Write(2)), span(5, 6, Call::Read(1))];
        assert_eq!(check(&history), Err(Violation::NoOrder(Call::Read(1))));
        // One saw the new value while it was written, a later one the old.
        let history = [
            span(1, 2, Call::Write(1)),
            span(3, 9, Call::Write(2)),
            span(4, 5, Call::Read(2)),
            span(6, 7, Call::Read(1)),
        ];
        assert_eq!(check(&history), Err(Violation::NoOrder(Call::Read(1))));
    }

    #[test]
    fn a_lost_write_is_found() {
        let history = [span(1, 2, Call::Write(1)), span(3, 4, Call::Write(2)), span(5, 6, swapped(1, 3))];
        assert!(check(&history).is_err());
        let history = [span(1, 2, Call::Write(1)), span(3, 4, Call::Read(0))];
        assert!(check(&history).is_err());
    }

    #[test]
    fn a_doubled_write_is_found() {
        let history = [
            span(1, 2, Call::Write(1)),
            span(3, 4, Call::Write(2)),
            span(5, 6, Call::Read(2)),
            span(7, 8, Call::Read(1)),
        ];
        assert!(check(&history).is_err());
        // Two have swapped the same value.
        let history = [span(1, 2, Call::Write(1)), span(3, 8, swapped(1, 2)), span(4, 9, swapped(1, 3))];
        assert!(check(&history).is_err());
        // A call in doubt happens once.
        let history = [
            span(1, 0, Call::Write(1)),
            span(2, 3, Call::Read(1)),
            span(4, 5, Call::Write(2)),
            span(6, 7, Call::Read(1)),
        ];
        assert!(check(&history).is_err());
    }

    #[test]
    fn a_refused_swap_says_what_it_found() {
        let refused = |found| Call::Swap { from: 1, to: 2, found: Some(Err(found)) };
        assert_eq!(check(&[span(1, 2, Call::Write(3)), span(3, 4, refused(3))]), Ok(()));
        assert!(check(&[span(1, 2, Call::Write(3)), span(3, 4, refused(4))]).is_err());
        assert!(check(&[span(1, 2, Call::Write(1)), span(3, 4, refused(1))]).is_err());
    }

    /// A register that does one call at a time, at a moment between begin and end.
    #[test]
    fn random_histories_of_a_real_register_are_accepted_and_wrong_ones_are_not() {
        let mut rng = fastrand::Rng::with_seed(1);
        let mut found = 0;
        for round in 0..20 {
            let mut value = 0;
            let mut spans = Vec::new();
            for moment in (0..300_u32).map(|call| 100 * call + 1_000) {
                let call = match rng.u32(..3) {
                    0 => Call::Read(value),
                    1 => Call::Write(u64::from(moment)),
                    _ => {
                        let from = if rng.bool() { value } else { u64::from(moment - 100) };
                        let found = if from == value { Ok(()) } else { Err(value) };
                        Call::Swap { from, to: u64::from(moment), found: Some(found) }
                    }
                };
                value = call.step(value).expect("a register answers rightly");
                let (begin, end) = (moment - rng.u32(1..300), moment + rng.u32(1..300));
                let answered = rng.u32(..20) > 0;
                let call = match call {
                    Call::Swap { from, to, .. } if !answered => Call::Swap { from, to, found: None },
                    other => other,
                };
                if answered || !matches!(call, Call::Read(_)) {
                    spans.push(span(begin, if answered { end } else { 0 }, call));
                }
            }
            assert_eq!(check(&spans), Ok(()), "round {round}");
            // A read of what was overwritten long ago.
            let wrong = Span { begin: 40_000, end: Some(40_001), call: Call::Read(1) };
            spans.push(wrong);
            found += usize::from(check(&spans) == Err(Violation::NoOrder(Call::Read(1))));
        }
        assert_eq!(found, 20);
    }
}
