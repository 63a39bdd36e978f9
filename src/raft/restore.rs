//! What a member has beside its state when the state is not the log's, but a snapshot's: a position and a vote; and
//! whether a log has either.
//!
//! It begins as one that has just been sent another member's files: its log begins behind them.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::Path;
use std::sync::mpsc;

use super::codec;
use super::types::{LogId, Membership, Peer, StoredMembership, Vote};
use crate::proto::skegpb::Member;
use crate::storage::log::{Log, LogOptions};

/// The term before the first election. etcd's restore begins there, too.
const TERM: u64 = 1;

/// Where the state of a restored member stands, encoded as its store has it.
#[derive(Clone, Debug)]
pub struct FirstPosition {
    /// The index.
    pub index: u64,
    /// The entry that would have been applied last.
    pub applied: Vec<u8>,
    /// Who votes.
    pub membership: Vec<u8>,
}

/// The position in which all members of a restored cluster begin. etcd counts an entry for each of them.
///
/// # Errors
/// When there are no members.
pub fn first_position(members: &[Member]) -> io::Result<FirstPosition> {
    let index = members.len() as u64;
    let log_id = LogId::new_term_index(TERM, index);
    let voters: BTreeSet<u64> = members.iter().map(|member| member.id).collect();
    let nodes: BTreeMap<u64, Peer> = members
        .iter()
        .map(|member| (member.id, Peer { peer_urls: member.peer_urls.clone(), name: member.name.clone() }))
        .collect();
    let membership = Membership::new(vec![voters], nodes).map_err(io::Error::other)?;
    let membership = codec::encode_membership(&StoredMembership::new(Some(log_id), membership));
    Ok(FirstPosition { index, applied: codec::encode_log_id(&log_id).to_vec(), membership })
}

/// Makes a log without entries, for a member whose state stands at such a position; durable on return.
///
/// # Errors
/// The log's.
pub fn begin_log(dir: &Path, member_id: u64) -> io::Result<()> {
    let (log, _) = Log::open(LogOptions::new(dir)).map_err(io::Error::other)?;
    let (done, saved) = mpsc::channel();
    let vote = codec::encode_vote(&Vote::new(TERM, member_id));
    log.save_vote(vote, move |result| drop(done.send(result))).map_err(io::Error::other)?;
    saved.recv().map_err(io::Error::other)??;
    log.close()
}

/// True if the log in `dir` holds an entry or a vote: its member was given something, or has promised something.
///
/// # Errors
/// The log's, as at a start.
pub fn has_begun(dir: &Path) -> io::Result<bool> {
    let (log, recovered) = Log::open(LogOptions::new(dir)).map_err(io::Error::other)?;
    log.close()?;
    Ok(recovered.next_index > 0 || recovered.vote.is_some())
}
