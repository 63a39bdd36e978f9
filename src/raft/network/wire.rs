//! Messages between members: openraft's types on one side, our protobuf on the other.

use std::io;

use openraft::raft::{
    AppendEntriesRequest, StreamAppendError, StreamAppendResult, TransferLeaderRequest, VoteRequest,
    VoteResponse,
};

use crate::proto::skegpb as pb;
use crate::raft::codec::{
    entry_from_proto, entry_to_proto, log_id_from_proto, log_id_to_proto, vote_from_proto, vote_to_proto,
};
use crate::raft::types::TypeConfig;

type AppendRequest = AppendEntriesRequest<TypeConfig>;

fn incomplete(what: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("a message from a peer lacks its {what}"))
}

pub(super) fn append_to_proto(request: AppendRequest) -> pb::AppendRequest {
    pb::AppendRequest {
        vote: Some(vote_to_proto(&request.vote)),
        previous: request.prev_log_id.as_ref().map(log_id_to_proto),
        committed: request.leader_commit.as_ref().map(log_id_to_proto),
        entries: request.entries.iter().map(entry_to_proto).collect(),
    }
}

pub(super) fn append_from_proto(request: pb::AppendRequest) -> io::Result<AppendRequest> {
    let entries: Vec<_> = request.entries.into_iter().map(entry_from_proto).collect::<io::Result<_>>()?;
    let previous = request.previous.map(log_id_from_proto);
    let first = previous.as_ref().map_or(0, |previous| previous.index() + 1);
    if (first..).zip(&entries).any(|(index, entry)| entry.log_id.index() != index) {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "entries from a peer leave a gap"));
    }
    Ok(AppendRequest {
        vote: vote_from_proto(request.vote.ok_or_else(|| incomplete("vote"))?),
        prev_log_id: previous,
        leader_commit: request.committed.map(log_id_from_proto),
        entries,
    })
}

pub(super) fn appended_to_proto(result: StreamAppendResult<TypeConfig>) -> pb::AppendResponse {
    use pb::append_response::Result::{Conflict, Higher, Matched};
    let result = match result {
        Ok(last) => Matched(pb::Matched { last: last.as_ref().map(log_id_to_proto) }),
        Err(StreamAppendError::Conflict(at)) => Conflict(log_id_to_proto(&at)),
        Err(StreamAppendError::HigherVote(vote)) => Higher(vote_to_proto(&vote)),
    };
    pb::AppendResponse { result: Some(result) }
}

pub(super) fn appended_from_proto(
    response: pb::AppendResponse,
) -> io::Result<StreamAppendResult<TypeConfig>> {
    use pb::append_response::Result::{Conflict, Higher, Matched};
    Ok(match response.result.ok_or_else(|| incomplete("result"))? {
        Matched(matched) => Ok(matched.last.map(log_id_from_proto)),
        Conflict(at) => Err(StreamAppendError::Conflict(log_id_from_proto(at))),
        Higher(vote) => Err(StreamAppendError::HigherVote(vote_from_proto(vote))),
    })
}

pub(super) fn vote_request_to_proto(request: &VoteRequest<TypeConfig>, pre_vote: bool) -> pb::VoteRequest {
    pb::VoteRequest {
        vote: Some(vote_to_proto(&request.vote)),
        last: request.last_log_id.as_ref().map(log_id_to_proto),
        transfer: request.leadership_transfer,
        pre_vote,
    }
}

pub(super) fn vote_request_from_proto(request: pb::VoteRequest) -> io::Result<VoteRequest<TypeConfig>> {
    let vote = vote_from_proto(request.vote.ok_or_else(|| incomplete("vote"))?);
    let mut asked = VoteRequest::new(vote, request.last.map(log_id_from_proto));
    asked.leadership_transfer = request.transfer;
    Ok(asked)
}

pub(super) fn vote_response_to_proto(response: &VoteResponse<TypeConfig>) -> pb::VoteResponse {
    pb::VoteResponse {
        vote: Some(vote_to_proto(&response.vote)),
        granted: response.vote_granted,
        last: response.last_log_id.as_ref().map(log_id_to_proto),
    }
}

pub(super) fn vote_response_from_proto(response: pb::VoteResponse) -> io::Result<VoteResponse<TypeConfig>> {
    let vote = vote_from_proto(response.vote.ok_or_else(|| incomplete("vote"))?);
    Ok(VoteResponse::new(vote, response.last.map(log_id_from_proto), response.granted))
}

pub(super) fn transfer_to_proto(request: &TransferLeaderRequest<TypeConfig>) -> pb::TransferLeaderRequest {
    pb::TransferLeaderRequest {
        from: Some(vote_to_proto(request.from_leader())),
        to: *request.to_node_id(),
        last: request.last_log_id().map(log_id_to_proto),
    }
}

pub(super) fn transfer_from_proto(
    request: pb::TransferLeaderRequest,
) -> io::Result<TransferLeaderRequest<TypeConfig>> {
    let from = vote_from_proto(request.from.ok_or_else(|| incomplete("vote"))?);
    Ok(TransferLeaderRequest::new(from, request.to, request.last.map(log_id_from_proto)))
}
