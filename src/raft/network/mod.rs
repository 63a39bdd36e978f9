//! Talking to peers. A cluster of one has none: every call here answers that the peer cannot be reached.

use std::future::Future;
use std::io;

use openraft::OptionalSend;
use openraft::alias::{SnapshotOf, VoteOf};
use openraft::errors::{RPCError, ReplicationClosed, StreamingError, Unreachable};
use openraft::network::{RPCOption, RaftNetworkFactory, RaftNetworkV2};
use openraft::raft::{
    AppendEntriesRequest, AppendEntriesResponse, SnapshotResponse, VoteRequest, VoteResponse,
};

use super::types::{Peer, TypeConfig};

/// Makes connections to peers.
pub(crate) struct Network;

/// A connection to one peer.
pub(crate) struct Connection {
    peer: u64,
}

impl RaftNetworkFactory<TypeConfig> for Network {
    type Network = Connection;

    async fn new_client(&mut self, target: u64, _: &Peer) -> Connection {
        Connection { peer: target }
    }
}

impl Connection {
    fn unreachable(&self) -> Unreachable<TypeConfig> {
        let text = format!("member {:x} is not part of this one-member cluster", self.peer);
        Unreachable::new(&io::Error::new(io::ErrorKind::NotConnected, text))
    }
}

impl RaftNetworkV2<TypeConfig> for Connection {
    type SnapshotData = ();

    async fn append_entries(
        &mut self,
        _: AppendEntriesRequest<TypeConfig>,
        _: RPCOption,
    ) -> Result<AppendEntriesResponse<TypeConfig>, RPCError<TypeConfig>> {
        Err(RPCError::Unreachable(self.unreachable()))
    }

    async fn vote(
        &mut self,
        _: VoteRequest<TypeConfig>,
        _: RPCOption,
    ) -> Result<VoteResponse<TypeConfig>, RPCError<TypeConfig>> {
        Err(RPCError::Unreachable(self.unreachable()))
    }

    async fn full_snapshot(
        &mut self,
        _: VoteOf<TypeConfig>,
        _: SnapshotOf<TypeConfig, ()>,
        _: impl Future<Output = ReplicationClosed> + OptionalSend + 'static,
        _: RPCOption,
    ) -> Result<SnapshotResponse<TypeConfig>, StreamingError<TypeConfig>> {
        Err(StreamingError::Unreachable(self.unreachable()))
    }
}
