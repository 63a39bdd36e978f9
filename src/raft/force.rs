//! Leaving a cluster that has lost its quorum for good: the member goes on alone, with what it holds. etcd:
//! `--force-new-cluster`.
//!
//! The log says so itself: entries are appended that make this member the only voter and remove the others. They are
//! committed like any others once it has elected itself, and with them all that was never known to be committed.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::mpsc;

use bytes::Bytes;
use openraft::EntryPayload;
use prost::Message;
use tracing::warn;

use super::codec;
use super::snapshot::stored_position;
use super::types::{Entry, LogId, Membership, Peer, Proposal};
use crate::apply::State;
use crate::proto::skegpb::command::Kind;
use crate::proto::skegpb::{Command, MemberKeepOnly};
use crate::storage::log::{Log, Recovered};

/// Appends what makes this member the only one; durable on return.
///
/// # Errors
/// The log's.
pub(super) fn stand_alone(
    log: &Log,
    recovered: &mut Recovered,
    state: &State,
    member_id: u64,
) -> io::Result<()> {
    purge_installed(log, recovered, state)?;
    let Some(last) = last_log_id(log, recovered)? else { return Ok(()) };
    let cluster = state.cluster.read();
    let own = cluster.member(member_id);
    let peer = Peer {
        peer_urls: own.map(|member| member.peer_urls.clone()).unwrap_or_default(),
        name: own.map(|member| member.name.clone()).unwrap_or_default(),
    };
    let alone = Membership::new(vec![BTreeSet::from([member_id])], BTreeMap::from([(member_id, peer)]))
        .map_err(io::Error::other)?;
    drop(cluster);
    warn!("forcing a new cluster: all other members are removed");
    // Who the others are may only be known once the log is applied.
    let kind = Some(Kind::MemberKeepOnly(MemberKeepOnly { id: member_id }));
    let command = Bytes::from(Command { kind, ..Command::default() }.encode_to_vec());
    let payloads = [EntryPayload::Membership(alone), EntryPayload::Normal(Proposal(command))];
    let term = last.committed_leader_id().term;
    let entries: Vec<(u64, Bytes)> = (last.index() + 1..)
        .zip(payloads)
        .map(|(index, payload)| {
            let entry = Entry { log_id: LogId::new_term_index(term, index), payload };
            (index, codec::encode_entry(&entry))
        })
        .collect();
    recovered.next_index += entries.len() as u64;
    let (done, durable) = mpsc::channel();
    log.append(entries, move |result| drop(done.send(result))).map_err(io::Error::other)?;
    durable.recv().map_err(io::Error::other)?
}

/// Has the log begin behind the state machine's files, if it ends before them: a crash came between a peer's files and the
/// purge that follows them. What is appended before that would go with it.
fn purge_installed(log: &Log, recovered: &mut Recovered, state: &State) -> io::Result<()> {
    let (Some(applied), _) = stored_position(&state.store())? else { return Ok(()) };
    if applied.index() < recovered.next_index {
        return Ok(());
    }
    let purged = codec::encode_log_id(&applied);
    let (done, durable) = mpsc::channel();
    log.purge_to(applied.index(), purged.clone(), move |result| drop(done.send(result)))
        .map_err(io::Error::other)?;
    durable.recv().map_err(io::Error::other)??;
    recovered.first_index = applied.index() + 1;
    recovered.next_index = recovered.first_index;
    recovered.purged = Some(purged);
    Ok(())
}

fn last_log_id(log: &Log, recovered: &Recovered) -> io::Result<Option<LogId>> {
    if recovered.next_index > recovered.first_index {
        let last = recovered.next_index - 1;
        let mut entries = log.read(last..last + 1, usize::MAX).map_err(io::Error::other)?;
        return entries.pop().map(|(_, bytes)| Ok(codec::decode_entry(bytes)?.log_id)).transpose();
    }
    recovered.purged.as_ref().map(|bytes| codec::decode_log_id(bytes)).transpose()
}
