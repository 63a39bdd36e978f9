//! Who the peers are and where they are reached: one [`Link`] per member, shared by all that talks to it.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::{Mutex, RwLock};
use tonic::{Request, Response, Status};
use tracing::{info, warn};

use super::channel::{Channel, Client, Timeouts, addressed, is_refusal};
use super::{FORGOT, REMOVED};
use crate::clock;
use crate::cluster::Cluster;
use crate::cluster::id::MemberId;
use crate::proto::skegpb::DescribeRequest;
use crate::storage::data_dir::Identity;
use crate::storage::schema::Trail;
use crate::telemetry::metrics::{Metrics, PeerCounters};

/// All peers.
pub(crate) struct Links {
    identity: Identity,
    timeouts: Timeouts,
    links: RwLock<BTreeMap<u64, Arc<Link>>>,
    verdict: Arc<Verdict>,
    /// The highest index that a leader has said is committed.
    committed: AtomicU64,
    metrics: Arc<Metrics>,
}

/// What a peer said of this member.
#[derive(Debug, Default)]
pub(super) struct Verdict {
    removed: AtomicBool,
    forgot: AtomicBool,
}

/// What a peer has acknowledged to this member as the leader of a term.
#[derive(Clone, Copy, Debug, Default)]
struct Acknowledged {
    term: u64,
    index: u64,
    /// It no longer has it.
    forgot: bool,
}

/// One peer.
pub(crate) struct Link {
    identity: Identity,
    member_id: u64,
    timeouts: Timeouts,
    urls: RwLock<Vec<String>>,
    /// For short questions: votes, indexes, leases. Replication has connections of its own.
    control: tokio::sync::Mutex<Channel>,
    contact: Mutex<Contact>,
    acknowledged: Mutex<Acknowledged>,
    verdict: Arc<Verdict>,
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
}

impl Links {
    pub(crate) fn new(identity: Identity, timeouts: Timeouts, metrics: Arc<Metrics>) -> Links {
        Links {
            identity,
            timeouts,
            links: RwLock::default(),
            verdict: Arc::default(),
            committed: AtomicU64::new(0),
            metrics,
        }
    }

    /// True once a peer has said that this member was removed.
    pub(crate) fn is_expelled(&self) -> bool {
        self.verdict.removed.load(Ordering::Relaxed)
    }

    /// True once a peer has said that this member has forgotten what it acknowledged.
    pub(crate) fn has_forgotten(&self) -> bool {
        self.verdict.forgot.load(Ordering::Relaxed)
    }

    /// Takes note of what a leader says is committed.
    pub(crate) fn heard_committed(&self, index: u64) {
        self.committed.fetch_max(index, Ordering::Relaxed);
    }

    /// True if a log that ends there lacks something that was committed: its member can lead nobody.
    pub(crate) fn lacks_committed(&self, last: u64) -> bool {
        last < self.committed.load(Ordering::Relaxed)
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
        let [local, remote] = [self.identity.member_id, member_id].map(|id| MemberId::new(id).to_string());
        let counters = Some(self.metrics.peers.peer(&local, &remote));
        let verdict = Arc::clone(&self.verdict);
        Link::new(self.identity, member_id, self.timeouts, urls.to_vec(), verdict, counters)
    }

    /// Where all is counted.
    pub(super) fn metrics(&self) -> &Metrics {
        &self.metrics
    }

    /// Takes what the applied log says of the members: their addresses, and who is gone.
    pub(crate) fn follow_cluster(&self, cluster: &Cluster) {
        let mut members = cluster.members().map(|member| (member.id, member.peer_urls.as_slice())).peekable();
        if members.peek().is_some() {
            self.follow(members);
        }
    }

    /// Takes the peers and their addresses; others are forgotten.
    pub(crate) fn follow<'m>(&self, members: impl Iterator<Item = (u64, &'m [String])>) {
        let mut named: BTreeMap<u64, &[String]> = members.collect();
        named.remove(&self.identity.member_id);
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
        identity: Identity,
        member_id: u64,
        timeouts: Timeouts,
        urls: Vec<String>,
        verdict: Arc<Verdict>,
        counters: Option<Arc<PeerCounters>>,
    ) -> Arc<Link> {
        Arc::new(Link {
            identity,
            member_id,
            timeouts,
            urls: RwLock::new(urls),
            control: tokio::sync::Mutex::default(),
            contact: Mutex::default(),
            acknowledged: Mutex::default(),
            verdict,
            counters,
        })
    }

    /// This member, the one at the near end.
    pub(super) fn identity(&self) -> Identity {
        self.identity
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
        self.timeouts
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

    /// Takes note that the peer holds the log up to `index` as the leader of `term` has it.
    pub(super) fn acknowledges(&self, term: u64, index: u64) {
        let mut acknowledged = self.acknowledged.lock();
        if acknowledged.term != term || index >= acknowledged.index {
            *acknowledged = Acknowledged { term, index, forgot: false };
        }
    }

    /// Takes note that the peer does not hold `index` as the leader of `term` has it; true if it has acknowledged that it
    /// does. A log only ever loses what another leader's replaces, and that leader's term is another.
    pub(super) fn lacks(&self, term: u64, index: u64) -> bool {
        let mut acknowledged = self.acknowledged.lock();
        acknowledged.forgot |= acknowledged.term == term && index <= acknowledged.index;
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
        self.note(answered.as_ref().err());
        answered.map(Response::into_inner)
    }

    /// Asks whether the peer is there, and for its trail before an entry; `None` also if it does not compute one as it is done
    /// here.
    pub(crate) async fn probe(&self, trail_before: u64) -> Option<Trail> {
        let within = self.timeouts.connect + self.timeouts.ping_answer;
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
                    self.verdict.removed.store(true, Ordering::Relaxed);
                }
                if is_refusal(status) && reason == FORGOT {
                    self.verdict.forgot.store(true, Ordering::Relaxed);
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
