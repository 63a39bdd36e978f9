//! Short questions to the leader, over the link's shared connection. No answer is `None`: the peer could not be reached, or
//! does not lead.

use super::links::Link;
use crate::proto::skegpb::{
    HashHistoryRequest, HistoryHash, LeaseTimeRequest, MemberProgressRequest, ReadIndexRequest,
    RenewLeaseRequest, SendFilesRequest,
};
use crate::raft::codec::log_id_to_proto;
use crate::raft::types::LogId;
use crate::storage::mvcc::hash::RevisionHash;

impl Link {
    /// An index that covers everything acknowledged before the question.
    pub(crate) async fn read_index(&self) -> Option<u64> {
        let asked = self.ask(ReadIndexRequest {}, async |client, request| client.read_index(request).await);
        asked.await.ok()?.index
    }

    /// Renews a lease; gives its time to live in seconds, 0 if there is none.
    pub(crate) async fn renew_lease(&self, id: i64) -> Option<i64> {
        let request = RenewLeaseRequest { id };
        let asked = self.ask(request, async |client, request| client.renew_lease(request).await);
        asked.await.ok().filter(|answer| answer.leads).map(|answer| answer.ttl)
    }

    /// The whole seconds left of a lease, `None` inside if there is none.
    pub(crate) async fn lease_time(&self, id: i64) -> Option<Option<i64>> {
        let request = LeaseTimeRequest { id };
        let asked = self.ask(request, async |client, request| client.lease_time(request).await);
        let answer = asked.await.ok().filter(|answer| answer.leads)?;
        Some(answer.exists.then_some(answer.remaining))
    }

    /// The member's hash of its history up to a revision.
    pub(crate) async fn hash_history(&self, revision: i64) -> Option<RevisionHash> {
        let request = HashHistoryRequest { revision };
        let asked = self.ask(request, async |client, request| client.hash_history(request).await);
        let HistoryHash { hash, compact_revision, revision } = asked.await.ok()?.hash?;
        Some(RevisionHash { hash, compact_revision, revision })
    }

    /// Has the member send its files, which must hold everything up to `from`; returns when they have arrived.
    ///
    /// # Errors
    /// Why they will not.
    pub(crate) async fn send_files(&self, from: LogId) -> Result<(), String> {
        let request = SendFilesRequest { from: Some(log_id_to_proto(&from)) };
        let asked = self.ask(request, async |client, request| client.send_files(request).await);
        let refusal = asked.await.map_err(|status| status.message().to_owned())?.refusal;
        if refusal.is_empty() { Ok(()) } else { Err(refusal) }
    }

    /// The index that a member is known to hold, and the leader's last.
    pub(crate) async fn member_progress(&self, member_id: u64) -> Option<(u64, u64)> {
        let request = MemberProgressRequest { member_id };
        let asked = self.ask(request, async |client, request| client.member_progress(request).await);
        asked.await.ok().filter(|answer| answer.leads).map(|answer| (answer.matched, answer.last))
    }
}
