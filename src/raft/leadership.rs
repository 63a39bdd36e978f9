//! Who leads, as this member can tell, and since when.
//!
//! openraft remembers the last leader until there is another. Clients must not be told of a leader that is gone, so a
//! follower also needs to have heard from it within an election time-out, and a leader to have been answered by a quorum.
//!
//! ```text
//! elected ──> barrier: everything of earlier terms is applied ──> the clock over the leases is taken over ──> in force
//! ```

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use openraft::Instant as _;
use openraft::async_runtime::WatchReceiver;
use parking_lot::Mutex;
use tokio::sync::watch;
use tracing::info;

use super::node::Node;
use super::read_index::ReadError;
use crate::clock;
use crate::cluster::id::MemberId;

/// Looks without a leader after which streams end whose clients want one. etcd: `maxNoLeaderCnt`.
const LOOKS_WITHOUT_LEADER: u32 = 3;

/// Pause before taking over the clock over the leases is tried again.
const TRY_AGAIN: Duration = Duration::from_millis(10);

/// What this member knows of the leader; shared.
pub(crate) struct Leadership {
    election_timeout: Duration,
    term: AtomicU64,
    seen: Mutex<Seen>,
    /// The term in which this member's clock over the leases is in force; 0 for none.
    clock_term: watch::Sender<u64>,
    /// How often this member was without a leader for long.
    losses: watch::Sender<u64>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Seen {
    /// The last known leader; 0 for none yet.
    leader: u64,
    /// Its term.
    term: u64,
    /// When it became known.
    since: Option<Instant>,
    /// Who last appended to this member's log, and when.
    heard: Option<(u64, Instant)>,
}

impl Leadership {
    pub(crate) fn new(election_timeout: Duration) -> Leadership {
        Leadership {
            election_timeout,
            term: AtomicU64::new(0),
            seen: Mutex::default(),
            clock_term: watch::Sender::new(0),
            losses: watch::Sender::new(0),
        }
    }

    /// The current term.
    pub(crate) fn term(&self) -> u64 {
        self.term.load(Ordering::Relaxed)
    }

    /// Takes note of an append from a leader.
    pub(crate) fn heard(&self, leader: u64) {
        self.seen.lock().heard = Some((leader, clock::now()));
    }

    /// The last known leader, and when it became known.
    pub(crate) fn leader_since(&self) -> (u64, Option<Instant>) {
        let seen = self.seen.lock();
        (seen.leader, seen.since)
    }

    /// Who has appended to this member's log within an election time-out; 0 for nobody.
    fn appending(&self) -> u64 {
        let heard = self.seen.lock().heard;
        match heard {
            Some((leader, at)) if clock::now().duration_since(at) < self.election_timeout => leader,
            _ => 0,
        }
    }

    /// Takes note of a term and its leader, 0 for none; true if it was elected since the last one was seen.
    fn see(&self, term: u64, leader: u64) -> bool {
        self.term.store(term, Ordering::Relaxed);
        let mut seen = self.seen.lock();
        if leader == 0 || (seen.leader, seen.term) == (leader, term) {
            return false;
        }
        seen.leader = leader;
        seen.term = term;
        seen.since = Some(clock::now());
        true
    }
}

impl Node {
    /// The leader's id; 0 while none is known, or the known one does not show that it leads.
    pub fn leader(&self) -> u64 {
        let metrics = self.raft.metrics();
        let metrics = metrics.borrow_watched();
        if !metrics.state.is_leader() {
            return self.leadership.appending();
        }
        let here = self.options.identity.member_id;
        let alone = metrics.membership_config.membership().voter_ids().count() <= 1;
        let elected = self.leadership.leader_since().1.map(|since| clock::now().duration_since(since));
        let acked = metrics.last_quorum_acked.as_ref().map(|acked| acked.elapsed());
        let recent = [elected, acked].into_iter().flatten().any(|ago| ago < self.options.election_timeout);
        if alone || recent { here } else { 0 }
    }

    /// True once consensus has stopped.
    pub(super) fn has_stopped(&self) -> bool {
        self.raft.metrics().borrow_watched().running_state.is_err()
    }

    /// Waits until this member has been without a leader for long.
    pub async fn leader_lost(&self) {
        let _ = self.leadership.losses.subscribe().changed().await;
    }

    /// True while this member's clock over the leases is the one that counts.
    pub fn keeps_lease_clock(&self) -> bool {
        self.raft.is_leader() && *self.leadership.clock_term.borrow() == self.term()
    }

    /// Waits until this member's clock over the leases is in force; false when it does not lead.
    pub(super) async fn await_lease_clock(&self) -> bool {
        let mut in_force = self.leadership.clock_term.subscribe();
        loop {
            if self.keeps_lease_clock() {
                return true;
            }
            if !self.raft.is_leader() || in_force.changed().await.is_err() {
                return false;
            }
        }
    }
}

/// Looks for a leader once an election time-out, and tells when there was none so often.
pub(super) async fn notice_loss(node: Node) {
    let mut ticks = tokio::time::interval(node.options.election_timeout);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut without = 0;
    loop {
        ticks.tick().await;
        without = if node.leader() == 0 { without + 1 } else { 0 };
        if without == LOOKS_WITHOUT_LEADER {
            node.leadership.losses.send_modify(|losses| *losses += 1);
        }
    }
}

/// Follows terms and leaders for as long as the member runs, and takes over the lease clock when this member is elected.
pub(super) async fn follow(node: Node) {
    let mut metrics = node.raft.server_metrics();
    let here = node.options.identity.member_id;
    loop {
        let (term, leader, leads) = {
            let seen = metrics.borrow_watched();
            (seen.vote.leader_id().term, seen.current_leader.unwrap_or(0), seen.state.is_leader())
        };
        if node.leadership.see(term, leader) {
            node.counts.leader_changes.fetch_add(1, Ordering::Relaxed);
            info!(leader = %MemberId::new(leader), term, here = leader == here, "leader elected");
        }
        if !leads {
            node.leadership.clock_term.send_replace(0);
        } else if *node.leadership.clock_term.borrow() != term {
            // May fail for want of a quorum: then it is tried again until this member no longer leads.
            match node.read_barrier().await {
                Ok(()) if node.term() == term && node.is_leader() => {
                    let extra = node.options.election_timeout;
                    node.deadlines.lock().take_over(&node.state.leases.read(), clock::now(), extra);
                    node.leadership.clock_term.send_replace(term);
                }
                // Whoever stopped as a leader is shown as one for ever.
                Err(ReadError::Stopped) => return,
                _ => tokio::time::sleep(TRY_AGAIN).await,
            }
            continue;
        }
        if metrics.changed().await.is_err() {
            return;
        }
    }
}
