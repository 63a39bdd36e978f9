//! Response headers: who answered, at which revision and term.

use super::Context;
use crate::proto::etcdserverpb::ResponseHeader;

impl Context {
    /// A header at the store's current revision.
    pub(super) fn header(&self) -> ResponseHeader {
        self.header_at(self.state.store().revision())
    }

    /// A header at a revision.
    pub(super) fn header_at(&self, revision: i64) -> ResponseHeader {
        ResponseHeader {
            cluster_id: self.cluster_id.get(),
            member_id: self.member_id.get(),
            revision,
            raft_term: self.node.term(),
        }
    }

    /// Completes a header that apply left with only its revision.
    pub(super) fn stamp(&self, header: &mut Option<ResponseHeader>) {
        let revision = header.as_ref().map_or(0, |header| header.revision);
        *header = Some(self.header_at(revision));
    }
}
