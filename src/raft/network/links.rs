//! Who the peers are and where they are reached: one [`Link`] per member, shared by all that talks to it.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use parking_lot::{Mutex, RwLock};
use tonic::{Code, Request, Response, Status};
use tracing::{info, warn};

use super::channel::{Channel, Client, Timeouts, addressed, is_refusal};
use super::kin::Kin;
use super::{COPIED, FORGOT, REMOVED};
use crate::clock;
use crate::cluster::id::MemberId;
use crate::cluster::{Cluster, level};
use crate::proto::skegpb::{DescribeRequest, DescribeResponse};
use crate::storage::StorageError;
use crate::storage::data_dir::Identity;
use crate::storage::schema::Trail;
use crate::telemetry::metrics::{Metrics, PeerCounters};

/// All peers.
pub(crate) struct Links {
    near: Arc<Near>,
    links: RwLock<BTreeMap<u64, Arc<Link>>>,
    /// The highest index that a leader has said is committed, this member included.
    committed: AtomicU64,
    metrics: Arc<Metrics>,
}

/// This member, the near end of all links.
pub(super) struct Near {
    pub(super) identity: Identity,
    pub(super) timeouts: Timeouts,
    /// `None` for one that does not belong to the cluster yet.
    pub(super) kin: Option<Kin>,
    /// The level of the cluster, as applied here.
    pub(super) level: AtomicU32,
    pub(super) verdict: Verdict,
}

/// What a peer said of this member.
#[derive(Debug, Default)]
pub(super) struct Verdict {
    removed: AtomicBool,
    /// That it is not what it was, in the peer's words.
    forgot: OnceLock<&'static str>,
    /// The highest level that the cluster is at.
    level: AtomicU32,
}

/// What a peer has acknowledged to this member as the leader of a term.
#[derive(Clone, Copy, Debug, Default)]
struct Acknowledged {
    term: u64,
    index: u64,
    /// The last of it that is known to be committed: no leader of any term replaces that.
    committed: u64,
    /// It no longer has it.
    forgot: bool,
}

/// One peer.
pub(crate) struct Link {
    near: Arc<Near>,
    member_id: u64,
    urls: RwLock<Vec<String>>,
    /// For short questions: votes, indexes, leases. Replication has connections of its own.
    control: tokio::sync::Mutex<Channel>,
    contact: Mutex<Contact>,
    acknowledged: Mutex<Acknowledged>,
    /// Held while the peer's life is looked at.
    pub(super) meeting: tokio::sync::Mutex<()>,
    /// `None` for one that is asked before this member belongs to its cluster.
    counters: Option<Arc<PeerCounters>>,
}

/// What is known of a peer's health.
#[derive(Clone, Copy, Debug, Default)]
struct Contact {
    /// Since when it has answered every question.
    answers_since: Option<Instant>,
    /// A refusal was logged, and nothing has been answered since.
    refused: bool,
    /// The level that its build knows, as it said on the last connection.
    level: Option<u32>,
}

impl Links {
    pub(crate) fn new(identity: Identity, kin: Kin, timeouts: Timeouts, metrics: Arc<Metrics>) -> Links {
        let near = Near {
            identity,
            timeouts,
            kin: Some(kin),
            level: AtomicU32::new(0),
            verdict: Verdict::default(),
        };
        Links { near: Arc::new(near), links: RwLock::default(), committed: AtomicU64::new(0), metrics }
    }

    /// True once a peer has said that this member was removed.
    pub(crate) fn is_expelled(&self) -> bool {
        self.near.verdict.removed.load(Ordering::Relaxed)
    }

    /// What a peer has said if this member has forgotten what it was, or what it acknowledged.
    pub(crate) fn forgot(&self) -> Option<&'static str> {
        self.near.verdict.forgot.get().copied()
    }

    /// Checks that this build knows the level that peers say the cluster is at.
    ///
    /// # Errors
    /// [`StorageError::Level`].
    pub(crate) fn check_level(&self) -> Result<(), StorageError> {
        level::check(self.near.verdict.level.load(Ordering::Relaxed))
    }

    /// The lives of this member and its peers.
    pub(super) fn kin(&self) -> Option<&Kin> {
        self.near.kin.as_ref()
    }

    /// Takes note of what a leader says is committed.
    pub(crate) fn heard_committed(&self, index: u64) {
        self.committed.fetch_max(index, Ordering::Relaxed);
    }

    /// The highest index that is known to be committed.
    pub(super) fn committed(&self) -> u64 {
        self.committed.load(Ordering::Relaxed)
    }

    /// True if a log that ends there lacks something that was committed: its member can lead nobody.
    pub(crate) fn lacks_committed(&self, last: u64) -> bool {
        last < self.committed()
    }

    /// The link to a member, if it is known.
    pub(crate) fn get(&self, member_id: u64) -> Option<Arc<Link>> {
        self.links.read().get(&member_id).cloned()
    }

    /// All links.
    pub(crate) fn all(&self) -> Vec<Arc<Link>> {
        self.links.read().values().cloned().collect()
    }

    /// The link to a member, which is made if there is none; `urls` say where it is unless something newer did.
    pub(crate) fn ensure(&self, member_id: u64, urls: &[String]) -> Arc<Link> {
        if let Some(link) = self.get(member_id) {
            return link;
        }
        Arc::clone(self.links.write().entry(member_id).or_insert_with(|| self.link_to(member_id, urls)))
    }

    fn link_to(&self, member_id: u64, urls: &[String]) -> Arc<Link> {
        let [local, remote] =
            [self.near.identity.member_id, member_id].map(|id| MemberId::new(id).to_string());
        let counters = Some(self.metrics.peers.peer(&local, &remote));
        Link::new(Arc::clone(&self.near), member_id, urls.to_vec(), counters)
    }

    /// Where all is counted.
    pub(super) fn metrics(&self) -> &Metrics {
        &self.metrics
    }

    /// Takes what the applied log says of the members: their addresses, who is gone, and what all of them know.
    pub(crate) fn follow_cluster(&self, cluster: &Cluster) {
        self.near.level.store(cluster.level(), Ordering::Relaxed);
        if let Some(kin) = self.kin() {
            kin.known.forget(|member| cluster.is_removed(member));
        }
        let mut members = cluster.members().map(|member| (member.id, member.peer_urls.as_slice())).peekable();
        if members.peek().is_some() {
            self.follow(members);
        }
    }

    /// Takes the peers and their addresses; others are forgotten.
    pub(crate) fn follow<'m>(&self, members: impl Iterator<Item = (u64, &'m [String])>) {
        let mut named: BTreeMap<u64, &[String]> = members.collect();
        named.remove(&self.near.identity.member_id);
        let mut links = self.links.write();
        links.retain(|id, link| {
            let stays = named.contains_key(id);
            if !stays {
                link.counters().inspect(|counters| counters.active.set(0));
            }
            stays
        });
        for (id, urls) in named {
            links.entry(id).or_insert_with(|| self.link_to(id, urls)).move_to(urls);
        }
    }
}

impl Link {
    pub(super) fn new(
        near: Arc<Near>,
        member_id: u64,
        urls: Vec<String>,
        counters: Option<Arc<PeerCounters>>,
    ) -> Arc<Link> {
        Arc::new(Link {
            near,
            member_id,
            urls: RwLock::new(urls),
            control: tokio::sync::Mutex::default(),
            contact: Mutex::default(),
            acknowledged: Mutex::default(),
            meeting: tokio::sync::Mutex::default(),
            counters,
        })
    }

    /// This member, the one at the near end.
    pub(super) fn near(&self) -> &Near {
        &self.near
    }

    /// The member at the far end.
    pub(crate) fn member_id(&self) -> u64 {
        self.member_id
    }

    /// Where it is reached.
    pub(super) fn urls(&self) -> Vec<String> {
        self.urls.read().clone()
    }

    pub(super) fn timeouts(&self) -> Timeouts {
        self.near.timeouts
    }

    /// What is counted of the peer.
    pub(super) fn counters(&self) -> Option<&Arc<PeerCounters>> {
        self.counters.as_ref()
    }

    /// Counts something that was sent and did not arrive, or was not answered.
    pub(super) fn count_failure(&self) {
        self.counters().inspect(|counters| counters.sent_failures.inc());
    }

    fn move_to(&self, urls: &[String]) {
        if *self.urls.read() != urls {
            *self.urls.write() = urls.to_vec();
        }
    }

    /// How long the peer has answered without a break; `None` if it does not.
    pub(crate) fn answers_for(&self) -> Option<Duration> {
        let since = self.contact.lock().answers_since?;
        Some(clock::now().duration_since(since))
    }

    /// The level that the peer's build knows; `None` while it does not answer.
    pub(crate) fn level(&self) -> Option<u32> {
        let contact = self.contact.lock();
        contact.answers_since.and(contact.level)
    }

    /// Takes note of the levels that the peer has spoken of.
    pub(super) fn note_levels(&self, described: &DescribeResponse) {
        self.contact.lock().level = Some(described.level);
        self.near.verdict.level.fetch_max(described.cluster_level, Ordering::Relaxed);
    }

    /// Checks that the peer can read what the cluster writes, as far as is known.
    ///
    /// # Errors
    /// The refusal.
    pub(super) fn check_level(&self) -> Result<(), Status> {
        let here = self.near.level.load(Ordering::Relaxed);
        match self.contact.lock().level {
            Some(known) if known < here => Err(Status::failed_precondition(format!(
                "the cluster is at level {here}, the member's build knows levels up to {known}: use a newer build"
            ))),
            _ => Ok(()),
        }
    }

    /// Takes note that the peer holds the log up to `index` as the leader of `term` has it.
    ///
    /// `committed` is an index up to which this member knows its own log to be committed.
    pub(super) fn acknowledges(&self, term: u64, index: u64, committed: u64) {
        let mut acknowledged = self.acknowledged.lock();
        if acknowledged.term != term || index >= acknowledged.index {
            let committed = acknowledged.committed.max(committed.min(index));
            let forgot = index < committed && acknowledged.forgot;
            *acknowledged = Acknowledged { term, index, committed, forgot };
        }
    }

    /// Takes note that the peer does not hold `index` as the leader of `term` has it; true if it has acknowledged that it
    /// does. A log only ever loses what another leader's replaces: that leader's term is another, and the entry is not
    /// committed.
    pub(super) fn lacks(&self, term: u64, index: u64) -> bool {
        #[cfg(feature = "sim")]
        if crate::sim::planted(crate::sim::Bug::TakeCopies) {
            return false;
        }
        let mut acknowledged = self.acknowledged.lock();
        acknowledged.forgot |=
            index <= acknowledged.committed || acknowledged.term == term && index <= acknowledged.index;
        acknowledged.forgot
    }

    /// True if the peer has forgotten what it acknowledged.
    pub(super) fn has_forgotten(&self) -> bool {
        self.acknowledged.lock().forgot
    }

    /// Asks on the shared connection.
    ///
    /// # Errors
    /// Unavailable when the peer cannot be reached; the peer's refusal otherwise.
    pub(super) async fn ask<M, R>(
        &self,
        message: M,
        call: impl AsyncFnOnce(&mut Client, Request<M>) -> Result<Response<R>, Status>,
    ) -> Result<R, Status> {
        let opened = self.control.lock().await.open(self).await;
        let answered = match opened {
            Ok(mut client) => call(&mut client, addressed(self, message)).await,
            Err(error) => Err(Status::unavailable(error.to_string())),
        };
        // One of an earlier version that does not know the call is there all the same.
        self.note(answered.as_ref().err().filter(|status| status.code() != Code::Unimplemented));
        answered.map(Response::into_inner)
    }

    /// Asks whether the peer is there, and for its trail before an entry; `None` also if it does not compute one as it is done
    /// here.
    pub(crate) async fn probe(&self, trail_before: u64) -> Option<Trail> {
        let within = self.timeouts().connect + self.timeouts().ping_answer;
        let request = DescribeRequest { trail_before: Some(trail_before) };
        let started = clock::now();
        let asked = self.ask(request, async |client, request| client.describe(request).await);
        let Ok(answer) = tokio::time::timeout(within, asked).await else {
            self.note(Some(&Status::unavailable("no answer in time")));
            return None;
        };
        let answer = answer.ok()?;
        let took = clock::now().duration_since(started);
        self.counters().inspect(|counters| counters.round_trip.observe(took.as_secs_f64()));
        let trail = answer.trail?;
        let is_ours = trail.recipe == Trail::RECIPE && trail.next == trail_before;
        is_ours.then_some(Trail { origin: trail.origin, next: trail.next, hash: trail.hash })
    }

    /// Takes note of how a call ended.
    pub(super) fn note(&self, failure: Option<&Status>) {
        let peer = MemberId::new(self.member_id);
        let mut contact = self.contact.lock();
        match failure {
            None => {
                contact.refused = false;
                if contact.answers_since.is_none() {
                    contact.answers_since = Some(clock::now());
                    self.counters().inspect(|counters| counters.active.set(1));
                    info!(%peer, "peer became active");
                }
            }
            Some(status) => {
                let reason = status.message();
                self.count_failure();
                if is_refusal(status) && reason == REMOVED {
                    self.near.verdict.removed.store(true, Ordering::Relaxed);
                }
                let forgot =
                    [FORGOT, COPIED].into_iter().find(|forgot| is_refusal(status) && reason == *forgot);
                if let Some(forgot) = forgot {
                    // The first will do.
                    let _ = self.near.verdict.forgot.set(forgot);
                }
                if contact.answers_since.take().is_some() {
                    self.counters().inspect(|counters| {
                        counters.active.set(0);
                        counters.disconnected.inc();
                    });
                    warn!(%peer, reason, "peer became inactive");
                } else if is_refusal(status) && !std::mem::replace(&mut contact.refused, true) {
                    warn!(%peer, reason, "refused by a peer");
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::level::LEVEL;

    fn link() -> Arc<Link> {
        let within = Duration::from_secs(1);
        let timeouts = Timeouts { connect: within, ping_every: within, ping_answer: within };
        let identity = Identity { member_id: 1, cluster_id: 1 };
        let (level, verdict) = (AtomicU32::new(0), Verdict::default());
        let near = Near { identity, timeouts, kin: None, level, verdict };
        Link::new(Arc::new(near), 2, Vec::new(), None)
    }

    #[test]
    fn what_was_acknowledged_and_could_not_be_replaced_is_missed() {
        let peer = link();
        peer.acknowledges(3, 10, 6);
        assert!(!peer.lacks(3, 11), "it never said so");
        assert!(!peer.lacks(4, 7), "another leader may have replaced what was not committed");
        assert!(peer.lacks(4, 6), "nobody replaces what is committed");
        peer.acknowledges(5, 2, 6);
        assert!(peer.has_forgotten(), "it has not got all back");
        peer.acknowledges(5, 6, 6);
        assert!(!peer.has_forgotten());
        assert!(!peer.lacks(5, 7) && peer.lacks(5, 6));
    }

    #[test]
    fn a_peer_of_an_older_build_is_refused_once_the_cluster_has_risen() {
        let peer = link();
        let says = |level, cluster_level| {
            peer.note_levels(&DescribeResponse { level, cluster_level, ..DescribeResponse::default() });
            peer.check_level().map_err(|refusal| refusal.message().to_owned())
        };
        assert!(peer.check_level().is_ok(), "nothing is known of it");
        assert_eq!(says(0, 0), Ok(()));
        assert_eq!(peer.level(), None, "it does not answer");
        peer.note(None);
        assert_eq!(peer.level(), Some(0));
        peer.near.level.store(1, Ordering::Relaxed);
        let refusal = "the cluster is at level 1, the member's build knows levels up to 0: use a newer build";
        assert_eq!(says(0, 0), Err(refusal.to_owned()));
        assert_eq!(says(1, 0), Ok(()), "the newer build has taken its place");
    }

    #[test]
    fn what_peers_say_of_the_clusters_level_is_kept() {
        let peer = link();
        let heard = || peer.near.verdict.level.load(Ordering::Relaxed);
        for (said, highest) in [(0, 0), (LEVEL + 1, LEVEL + 1), (LEVEL, LEVEL + 1)] {
            peer.note_levels(&DescribeResponse { cluster_level: said, ..DescribeResponse::default() });
            assert_eq!(heard(), highest);
        }
    }
}
