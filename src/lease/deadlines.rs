//! What the leader's clock says of the leases; never replicated, never read by `apply`.
//!
//! ```text
//! granted/renewed            checkpoint             expires
//!    |------- ttl ----------------|--- remaining -------|
//! ```
//!
//! A restart knows only the log. So that it does not start every lease anew, what is left of a lease is recorded now and
//! then, as a *checkpoint*; so that it never takes time away, a renewal of a lease with a checkpoint first removes it.
//! Leases that are renewed in time are never checkpointed: only one that has let more of its time go by than renewing
//! clients do, or that was never renewed at all, is.

use std::collections::{BTreeSet, HashMap};
use std::time::{Duration, Instant};

use super::Leases;

/// A lease is recorded again when this share of its time has gone by since the last record.
const CHECKPOINT_SHARE: u32 = 20;
/// A lease that was renewed once is recorded only after this share of its time: clients renew at a third.
const RENEWED_GRACE: f64 = 0.5;
/// No checkpoint is worth less than this.
const CHECKPOINT_MIN: Duration = Duration::from_secs(1);

#[derive(Clone, Copy, Debug)]
struct Deadline {
    expires: Instant,
    ttl: Duration,
    /// Remaining time as of the last record; the time to live if there is none.
    recorded: Duration,
    has_checkpoint: bool,
    /// The log is being asked to remove the record; a new one must not slip in behind that.
    clearing: bool,
    renewed: bool,
}

impl Deadline {
    fn full(now: Instant, ttl: Duration, renewed: bool) -> Deadline {
        let expires = after(now, ttl);
        Deadline { expires, ttl, recorded: ttl, has_checkpoint: false, clearing: false, renewed }
    }
}

/// The outcome of a renewal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Renewal {
    /// Renewed, with the time to live in seconds.
    Renewed(i64),
    /// A recorded remainder must be removed by the log first, then renew again.
    ClearFirst,
    /// Past its time; the revocation is on its way.
    Expired,
    /// No such lease.
    Unknown,
}

/// Deadlines of all leases; see the module.
#[derive(Debug, Default)]
pub struct Deadlines {
    by_id: HashMap<i64, Deadline>,
    order: BTreeSet<(Instant, i64)>,
}

impl Deadlines {
    /// Takes over the clock for all leases: each gets what its record says is left, plus `extra`.
    pub fn take_over(&mut self, leases: &Leases, now: Instant, extra: Duration) {
        self.by_id.clear();
        self.order.clear();
        for record in leases.iter() {
            let ttl = seconds(record.ttl_seconds);
            let has_checkpoint = record.remaining_seconds > 0;
            let left = if has_checkpoint { seconds(record.remaining_seconds).min(ttl) } else { ttl };
            let expires = after(now, left + extra);
            let deadline =
                Deadline { expires, ttl, recorded: left, has_checkpoint, clearing: false, renewed: false };
            self.set(record.id, deadline);
        }
    }

    /// Starts the clock of a granted lease.
    pub fn grant(&mut self, id: i64, ttl_seconds: i64, now: Instant) {
        self.set(id, Deadline::full(now, seconds(ttl_seconds), false));
    }

    /// Forgets a lease.
    pub fn revoke(&mut self, id: i64) {
        if let Some(old) = self.by_id.remove(&id) {
            self.order.remove(&(old.expires, id));
        }
    }

    /// Gives a lease its full time again.
    pub fn renew(&mut self, id: i64, now: Instant) -> Renewal {
        let Some(deadline) = self.by_id.get_mut(&id) else { return Renewal::Unknown };
        if deadline.expires <= now {
            return Renewal::Expired;
        }
        if deadline.has_checkpoint {
            deadline.clearing = true;
            return Renewal::ClearFirst;
        }
        let ttl = deadline.ttl;
        self.set(id, Deadline::full(now, ttl, true));
        Renewal::Renewed(i64::try_from(ttl.as_secs()).unwrap_or(i64::MAX))
    }

    /// Notes that the log has removed a lease's recorded remainder.
    pub fn cleared(&mut self, id: i64) {
        if let Some(deadline) = self.by_id.get_mut(&id) {
            deadline.has_checkpoint = false;
            deadline.clearing = false;
            deadline.recorded = deadline.ttl;
        }
    }

    /// Whole seconds left of a lease; 0 or less just before its revocation.
    pub fn remaining_seconds(&self, id: i64, now: Instant) -> Option<i64> {
        let deadline = self.by_id.get(&id)?;
        let left = deadline.expires.saturating_duration_since(now);
        Some(i64::try_from(left.as_secs()).unwrap_or(i64::MAX))
    }

    /// Ids of all leases, by expiry.
    pub fn ids_by_expiry(&self) -> impl Iterator<Item = i64> {
        self.order.iter().map(|(_, id)| *id)
    }

    /// Up to `limit` leases that are past their time.
    pub fn expired(&self, now: Instant, limit: usize) -> Vec<i64> {
        self.order.iter().take_while(|(expires, _)| *expires <= now).map(|(_, id)| *id).take(limit).collect()
    }

    /// Up to `limit` leases whose remainder should be recorded, with the seconds left, rounded up.
    ///
    /// They count as recorded from now on.
    pub fn take_checkpoints(&mut self, now: Instant, limit: usize, all: bool) -> Vec<(i64, i64)> {
        let due: Vec<(i64, Duration)> = self
            .by_id
            .iter()
            .filter_map(|(id, deadline)| {
                let left = deadline.expires.saturating_duration_since(now);
                let due = !deadline.clearing
                    && !left.is_zero()
                    && (all && left < deadline.recorded || deadline.is_due(left));
                due.then_some((*id, left))
            })
            .take(limit)
            .collect();
        due.into_iter()
            .map(|(id, left)| {
                if let Some(deadline) = self.by_id.get_mut(&id) {
                    deadline.recorded = left;
                    deadline.has_checkpoint = true;
                }
                (id, i64::try_from(left.as_secs() + u64::from(left.subsec_nanos() > 0)).unwrap_or(i64::MAX))
            })
            .collect()
    }

    fn set(&mut self, id: i64, deadline: Deadline) {
        if let Some(old) = self.by_id.insert(id, deadline) {
            self.order.remove(&(old.expires, id));
        }
        self.order.insert((deadline.expires, id));
    }
}

impl Deadline {
    fn is_due(&self, left: Duration) -> bool {
        let step = (self.ttl / CHECKPOINT_SHARE).max(CHECKPOINT_MIN);
        let quiet = self.renewed && left > self.ttl.mul_f64(RENEWED_GRACE);
        !quiet && left + step <= self.recorded
    }
}

fn seconds(count: i64) -> Duration {
    Duration::from_secs(u64::try_from(count).unwrap_or(0))
}

/// Adds without overflow: leases may be granted for centuries.
fn after(now: Instant, duration: Duration) -> Instant {
    const CENTURY: Duration = Duration::from_secs(100 * 366 * 86_400);
    now.checked_add(duration).unwrap_or(now + CENTURY)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn granted(ttl: i64) -> (Deadlines, Instant) {
        let now = crate::clock::now();
        let mut deadlines = Deadlines::default();
        deadlines.grant(1, ttl, now);
        (deadlines, now)
    }

    #[test]
    fn a_lease_lives_its_time_and_a_renewal_starts_it_again() {
        let (mut deadlines, now) = granted(10);
        assert!(deadlines.expired(now + 9 * SECOND, 10).is_empty());
        assert_eq!(deadlines.renew(1, now + 9 * SECOND), Renewal::Renewed(10));
        assert!(deadlines.expired(now + 18 * SECOND, 10).is_empty());
        assert_eq!(deadlines.expired(now + 19 * SECOND, 10), [1]);
        assert_eq!(deadlines.renew(1, now + 20 * SECOND), Renewal::Expired);
        deadlines.revoke(1);
        assert_eq!(deadlines.renew(1, now), Renewal::Unknown);
    }

    #[test]
    fn a_restart_goes_on_with_the_recorded_remainder() {
        let (mut deadlines, now) = granted(100);
        assert!(deadlines.take_checkpoints(now + 4 * SECOND, 10, false).is_empty());
        assert_eq!(deadlines.take_checkpoints(now + 40 * SECOND, 10, false), [(1, 60)]);
        let mut leases = Leases::default();
        leases.grant(1, 100);
        leases.checkpoint(1, 60);
        let mut restarted = Deadlines::default();
        restarted.take_over(&leases, now, SECOND);
        assert_eq!(restarted.remaining_seconds(1, now), Some(61));
        assert_eq!(restarted.renew(1, now), Renewal::ClearFirst);
        restarted.cleared(1);
        assert_eq!(restarted.renew(1, now), Renewal::Renewed(100));
    }

    #[test]
    fn a_lease_renewed_in_time_is_never_recorded() {
        let (mut deadlines, mut now) = granted(30);
        for _ in 0..10 {
            assert_eq!(deadlines.renew(1, now), Renewal::Renewed(30));
            now += 10 * SECOND;
            assert!(deadlines.take_checkpoints(now, 10, false).is_empty());
        }
        assert_eq!(deadlines.take_checkpoints(now + 6 * SECOND, 10, false), [(1, 14)]);
    }

    #[test]
    fn centuries_do_not_overflow() {
        let (deadlines, now) = granted(9_000_000_000);
        assert!(deadlines.remaining_seconds(1, now).is_some_and(|left| left > 1_000_000_000));
    }

    /// One lease as its holder sees it, and as the log has it.
    struct Holder {
        expires: Instant,
        ttl: Duration,
    }

    /// Whatever is granted, renewed, recorded and revoked, and however a renewal and a record cross each other: a lease
    /// expires when it was promised to, and a restart gives it no less than was promised, nor much more.
    #[test]
    fn no_lease_is_cut_short() {
        const TTLS: [i64; 9] = [i64::MIN, -1, 0, 1, 2, 61, 3600, 9_000_000_000, i64::MAX];
        for seed in 0..200 {
            let mut random = fastrand::Rng::with_seed(seed);
            let mut now = crate::clock::now();
            let (mut deadlines, mut leases) = (Deadlines::default(), Leases::default());
            let mut holders: HashMap<i64, Holder> = HashMap::new();
            for _ in 0..200 {
                let id = random.i64(1..8);
                match random.u8(..12) {
                    0..3 => {
                        let ttl = TTLS[random.usize(..TTLS.len())];
                        if leases.grant(id, ttl).is_some() {
                            deadlines.grant(id, ttl, now);
                            let ttl = seconds(ttl);
                            holders.insert(id, Holder { expires: after(now, ttl), ttl });
                        }
                    }
                    3 => {
                        leases.remove(id);
                        deadlines.revoke(id);
                        holders.remove(&id);
                    }
                    4..7 => {
                        let mut renewal = deadlines.renew(id, now);
                        if renewal == Renewal::ClearFirst {
                            leases.checkpoint(id, 0);
                            now += SECOND * random.u32(..3);
                            record(&mut random, &mut deadlines, &mut leases, now);
                            deadlines.cleared(id);
                            renewal = deadlines.renew(id, now);
                        }
                        match holders.get_mut(&id) {
                            None => assert_eq!(renewal, Renewal::Unknown),
                            Some(holder) if holder.expires <= now => assert_eq!(renewal, Renewal::Expired),
                            Some(holder) => {
                                let ttl = i64::try_from(holder.ttl.as_secs()).expect("it was an i64");
                                assert_eq!(renewal, Renewal::Renewed(ttl));
                                holder.expires = after(now, holder.ttl);
                            }
                        }
                    }
                    7..9 => record(&mut random, &mut deadlines, &mut leases, now),
                    _ => now += Duration::from_millis(random.u64(..30_000)),
                }
                let mut expired = deadlines.expired(now, usize::MAX);
                expired.sort_unstable();
                let mut expected: Vec<i64> =
                    holders.iter().filter(|(_, holder)| holder.expires <= now).map(|(id, _)| *id).collect();
                expected.sort_unstable();
                assert_eq!(expired, expected);
                assert_eq!(deadlines.ids_by_expiry().count(), holders.len());
                let mut restarted = Deadlines::default();
                restarted.take_over(&leases, now, Duration::ZERO);
                for (id, holder) in &holders {
                    let left = holder.expires.saturating_duration_since(now).as_secs();
                    let left = i64::try_from(left).unwrap_or(i64::MAX);
                    assert!(
                        restarted.remaining_seconds(*id, now) >= Some(left),
                        "seed {seed}: lease {id} is cut short"
                    );
                }
            }
            loop {
                let due = deadlines.take_checkpoints(now, 2, true);
                if due.is_empty() {
                    break;
                }
                for (id, left) in due {
                    leases.checkpoint(id, left);
                }
            }
            let mut restarted = Deadlines::default();
            restarted.take_over(&leases, now, Duration::ZERO);
            for (id, holder) in holders.iter().filter(|(_, holder)| holder.expires > now) {
                let left = i64::try_from((holder.expires - now).as_secs()).unwrap_or(i64::MAX);
                let again = restarted.remaining_seconds(*id, now).expect("the lease is there");
                assert!(
                    (left..=left + 1).contains(&again),
                    "seed {seed}: {left} s left, {again} s after a restart"
                );
            }
        }
    }

    fn record(random: &mut fastrand::Rng, deadlines: &mut Deadlines, leases: &mut Leases, now: Instant) {
        for (id, left) in deadlines.take_checkpoints(now, random.usize(1..5), random.u8(..4) == 0) {
            assert!(left > 0, "nothing is recorded of a lease that is over");
            leases.checkpoint(id, left);
        }
    }
}
