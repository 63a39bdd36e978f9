//! The types openraft works on.

use std::fmt;

use bytes::Bytes;
use openraft::impls::leader_id_std;

use crate::apply::Outcome;

/// An encoded `skegpb.Command`: the same bytes go into the log, to the peers and to apply.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Proposal(pub(crate) Bytes);

impl fmt::Display for Proposal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "command of {} bytes", self.0.len())
    }
}

/// What applying an entry answered; `None` for entries without a command.
pub(crate) struct Applied(pub(crate) Option<Outcome>);

/// Where a member can be reached by its peers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Peer {
    /// Its peer URLs when it became a member; the applied members know newer ones.
    pub(crate) peer_urls: Vec<String>,
    /// Its name, if it was a member from the start.
    pub(crate) name: String,
}

openraft::declare_raft_types!(
    /// openraft's view of skeg.
    pub(crate) TypeConfig:
        D = Proposal,
        R = Applied,
        NodeId = u64,
        Node = Peer,
        Term = u64,
        LeaderId = leader_id_std::LeaderId<u64, u64>,
        AsyncRuntime = openraft_rt_tokio::TokioRuntime,
);

pub(crate) type Vote = openraft::alias::VoteOf<TypeConfig>;
pub(crate) type LogId = openraft::alias::LogIdOf<TypeConfig>;
pub(crate) type Entry = openraft::alias::EntryOf<TypeConfig>;
pub(crate) type Membership = openraft::Membership<u64, Peer>;
pub(crate) type StoredMembership = openraft::alias::StoredMembershipOf<TypeConfig>;
pub(crate) type SnapshotMeta = openraft::alias::SnapshotMetaOf<TypeConfig>;
pub(crate) type Raft = openraft::Raft<TypeConfig, super::state_machine::Machine>;
