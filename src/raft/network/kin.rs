//! Whether a peer is the one it was; `storage/lives` says how that can be told.
//!
//! ```text
//! this member ── connects to the peer's addresses, asks which lives it has had ──> the last one met is among them: it is met
//!             <── is called ── by the life that was met: served
//!                           ── by another: this member looks who answers at the addresses now
//! ```
//!
//! So a peer is who answers at its addresses and goes on from its last known life. What does neither is told so and ends:
//! an old copy of a directory, and a second process with a copy. Nothing that it says counts, no vote above all.

use std::io;
use std::path::Path;
use std::sync::Arc;

use tonic::Status;

use super::COPIED;
use super::channel::{self, Client};
use super::links::Link;
use crate::blocking;
use crate::clock;
use crate::proto::skegpb::{DescribeRequest, DescribeResponse};
#[cfg(feature = "sim")]
use crate::sim;
use crate::storage::lives::{KnownLives, Life, Lives, LivesError};

/// The lives of this member and its peers; clones share the latter.
#[derive(Clone)]
pub(crate) struct Kin {
    pub(super) own: Lives,
    pub(super) known: Arc<KnownLives>,
}

impl Kin {
    /// Begins another life of the member in `root`.
    ///
    /// # Errors
    /// [`LivesError`]; the life has not begun then.
    pub(crate) fn begin(root: &Path) -> Result<Kin, LivesError> {
        let own = Lives::begin(root, u64::from_le_bytes(clock::random()))?;
        Ok(Kin { own, known: Arc::new(KnownLives::open(root)?) })
    }

    /// Which life this is.
    pub(super) fn life(&self) -> u64 {
        self.own.last().map_or(0, |life| life.id)
    }
}

/// Who answers at a peer's addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Met {
    /// Another member, or one that does not say.
    Somebody,
    /// The peer, in this life, which is now the known one.
    Peer(u64),
    /// In this life something that does not go on from the peer's last known one.
    Copy(u64),
}

impl Link {
    /// Asks who answers on a new connection.
    ///
    /// # Errors
    /// When nobody does, or the answer cannot be kept.
    pub(super) async fn meet(&self, client: &mut Client) -> io::Result<Met> {
        let Some(kin) = &self.near().kin else { return Ok(Met::Somebody) };
        let described =
            client.describe(DescribeRequest::default()).await.map_err(io::Error::other)?.into_inner();
        let is_peer = described.member_id == self.member_id()
            && described.cluster_id == self.near().identity.cluster_id;
        if !is_peer {
            return Ok(Met::Somebody);
        }
        let _one_at_a_time = self.meeting.lock().await;
        let met = self.recognise(kin, &described).await?;
        if !matches!(met, Met::Copy(_)) {
            self.note_levels(&described);
        }
        Ok(met)
    }

    /// Compares the lives of one that says it is the peer with the last known one.
    async fn recognise(&self, kin: &Kin, described: &DescribeResponse) -> io::Result<Met> {
        let lives = Lives::new(described.starts, described.lives.clone());
        let Some((lives, life)) = lives.and_then(|lives| lives.last().map(|life| (lives, life))) else {
            return Ok(Met::Somebody);
        };
        match kin.known.get(self.member_id()) {
            Some(before) if before == life => {}
            Some(before) if !go_on_from(&lives, before) => return Ok(Met::Copy(life.id)),
            _ => {
                let (known, member_id) = (Arc::clone(&kin.known), self.member_id());
                let learned = blocking::spawn(move || known.learn(member_id, life)).await;
                learned.map_err(io::Error::other)?.map_err(io::Error::other)?;
            }
        }
        Ok(Met::Peer(life.id))
    }

    /// Checks that the process that calls is the one that the peer is.
    ///
    /// # Errors
    /// The refusal; unavailable while nobody answers as the peer.
    pub(super) async fn admit(&self, life: u64) -> Result<(), Status> {
        let Some(kin) = &self.near().kin else { return Ok(()) };
        if kin.known.get(self.member_id()).is_some_and(|known| known.id == life) {
            return Ok(());
        }
        match channel::connect(self).await {
            Ok((_, _, Met::Peer(met))) if met == life => Ok(()),
            Ok((_, _, Met::Peer(_))) => Err(Status::failed_precondition(COPIED)),
            Ok((_, _, Met::Copy(copy))) if copy == life => Err(Status::failed_precondition(COPIED)),
            Ok(_) => Err(Status::unavailable("somebody else answers at the member's addresses")),
            Err(error) => Err(Status::unavailable(format!("the member does not answer: {error}"))),
        }
    }
}

/// True if lives are those of a member that was met in this one.
fn go_on_from(lives: &Lives, before: Life) -> bool {
    #[cfg(feature = "sim")]
    if sim::planted(sim::Bug::TakeCopies) {
        return true;
    }
    lives.include(before)
}
