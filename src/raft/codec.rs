//! Raft's records as stored bytes: our protobuf on one side, openraft's types on the other.

use std::collections::{BTreeMap, BTreeSet};
use std::io;

use bytes::Bytes;
use openraft::EntryPayload;
use prost::Message;

use super::types::{Entry, LogId, Membership, Peer, Proposal, StoredMembership, Vote};
use crate::proto::skegpb;

fn damaged(what: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("{what} in the raft log does not decode"))
}

pub(super) fn entry_to_proto(entry: &Entry) -> skegpb::LogEntry {
    use skegpb::log_entry::Payload;
    let payload = match &entry.payload {
        EntryPayload::Blank => Payload::Blank(skegpb::Blank {}),
        EntryPayload::Normal(proposal) => Payload::Command(proposal.0.clone()),
        EntryPayload::Membership(membership) => Payload::Membership(membership_to_proto(membership)),
    };
    let position = log_id_to_proto(&entry.log_id);
    let (term, leader_node, index) = (position.term, position.node_id, position.index);
    skegpb::LogEntry { term, leader_node, index, payload: Some(payload) }
}

pub(super) fn entry_from_proto(entry: skegpb::LogEntry) -> io::Result<Entry> {
    use skegpb::log_entry::Payload;
    let payload = match entry.payload {
        Some(Payload::Blank(_)) => EntryPayload::Blank,
        Some(Payload::Command(command)) => EntryPayload::Normal(Proposal(command)),
        Some(Payload::Membership(membership)) => {
            EntryPayload::Membership(membership_from_proto(&membership)?)
        }
        None => return Err(damaged("an entry of another version")),
    };
    Ok(Entry { log_id: LogId::new_term_index(entry.term, entry.index), payload })
}

pub(super) fn encode_entry(entry: &Entry) -> Bytes {
    entry_to_proto(entry).encode_to_vec().into()
}

pub(super) fn decode_entry(encoded: Bytes) -> io::Result<Entry> {
    entry_from_proto(skegpb::LogEntry::decode(encoded).map_err(|_| damaged("an entry"))?)
}

pub(super) fn vote_to_proto(vote: &Vote) -> skegpb::Vote {
    let leader = vote.leader_id();
    skegpb::Vote { term: leader.term, node_id: leader.voted_for, committed: vote.is_committed() }
}

pub(super) fn vote_from_proto(vote: skegpb::Vote) -> Vote {
    if vote.committed {
        Vote::new_committed(vote.term, vote.node_id)
    } else {
        Vote::new(vote.term, vote.node_id)
    }
}

pub(super) fn encode_vote(vote: &Vote) -> Bytes {
    vote_to_proto(vote).encode_to_vec().into()
}

pub(super) fn decode_vote(encoded: Bytes) -> io::Result<Vote> {
    skegpb::Vote::decode(encoded).map(vote_from_proto).map_err(|_| damaged("the vote"))
}

pub(super) fn log_id_to_proto(log_id: &LogId) -> skegpb::LogId {
    skegpb::LogId { term: **log_id.committed_leader_id(), node_id: 0, index: log_id.index() }
}

pub(super) fn log_id_from_proto(log_id: skegpb::LogId) -> LogId {
    LogId::new_term_index(log_id.term, log_id.index)
}

pub(super) fn encode_log_id(log_id: &LogId) -> Bytes {
    log_id_to_proto(log_id).encode_to_vec().into()
}

pub(super) fn decode_log_id(encoded: &[u8]) -> io::Result<LogId> {
    skegpb::LogId::decode(encoded).map(log_id_from_proto).map_err(|_| damaged("a position"))
}

fn membership_to_proto(membership: &Membership) -> skegpb::Membership {
    let configs = membership
        .get_joint_config()
        .iter()
        .map(|ids| skegpb::NodeSet { ids: ids.iter().copied().collect() })
        .collect();
    let nodes = membership
        .nodes()
        .map(|(id, node)| (*id, skegpb::Node { peer_urls: node.peer_urls.clone(), name: node.name.clone() }))
        .collect();
    skegpb::Membership { configs, nodes }
}

fn membership_from_proto(membership: &skegpb::Membership) -> io::Result<Membership> {
    let configs: Vec<BTreeSet<u64>> =
        membership.configs.iter().map(|set| set.ids.iter().copied().collect()).collect();
    let nodes: BTreeMap<u64, Peer> = membership
        .nodes
        .iter()
        .map(|(id, node)| (*id, Peer { peer_urls: node.peer_urls.clone(), name: node.name.clone() }))
        .collect();
    Membership::new(configs, nodes).map_err(|_| damaged("a membership"))
}

pub(super) fn encode_membership(membership: &StoredMembership) -> Vec<u8> {
    skegpb::StoredMembership {
        log_id: membership.log_id().as_ref().map(log_id_to_proto),
        membership: Some(membership_to_proto(membership.membership())),
    }
    .encode_to_vec()
}

pub(super) fn decode_membership(encoded: &[u8]) -> io::Result<StoredMembership> {
    let stored = skegpb::StoredMembership::decode(encoded).map_err(|_| damaged("the membership"))?;
    let membership = stored.membership.ok_or_else(|| damaged("the membership"))?;
    Ok(StoredMembership::new(stored.log_id.map(log_id_from_proto), membership_from_proto(&membership)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_votes_and_memberships_round_trip() {
        let nodes = BTreeMap::from([(7, Peer { peer_urls: vec!["http://a:1".into()], name: "a".into() })]);
        let membership = Membership::new(vec![BTreeSet::from([7])], nodes).expect("one voter");
        let log_id = LogId::new_term_index(3, 9);
        for payload in [
            EntryPayload::Blank,
            EntryPayload::Normal(Proposal(Bytes::from_static(b"command"))),
            EntryPayload::Membership(membership.clone()),
        ] {
            let entry = Entry { log_id, payload };
            assert_eq!(decode_entry(encode_entry(&entry)).expect("it decodes").payload, entry.payload);
        }
        for vote in [Vote::new(4, 7), Vote::new_committed(5, 8)] {
            assert_eq!(decode_vote(encode_vote(&vote)).expect("it decodes"), vote);
        }
        let stored = StoredMembership::new(Some(log_id), membership);
        assert_eq!(decode_membership(&encode_membership(&stored)).expect("it decodes"), stored);
        assert!(decode_entry(Bytes::from_static(b"\xff")).is_err());
    }
}
