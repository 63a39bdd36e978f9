//! Changes of the members. etcd: `ValidateConfigurationChange` in `server/etcdserver/api/membership/cluster.go`.
//!
//! What is decided here is who the members are and what they are to be; that Raft's membership follows is the leader's
//! work (`raft/membership`).

use prost::Message;

use super::{Outcome, Refusal, Reply, Run};
use crate::proto::skegpb::{
    Member, MemberAdd, MemberAttributes, MemberKeepOnly, MemberPromote, MemberRemove, MemberUpdate,
};
use crate::storage::schema::{Family, MetaKey};

impl Run<'_> {
    pub(super) fn add_member(&mut self, request: MemberAdd) -> Outcome {
        {
            let cluster = self.state.cluster.read();
            if cluster.is_removed(request.id) {
                return Err(Refusal::MemberNotFound);
            }
            if cluster.member(request.id).is_some() {
                return Err(Refusal::MemberExists);
            }
            if cluster.uses_any(&request.peer_urls, None) {
                return Err(Refusal::PeerUrlExists);
            }
            let learners = cluster.members().filter(|member| member.is_learner).count();
            if request.is_learner
                && request.max_learners > 0
                && learners >= usize::try_from(request.max_learners).unwrap_or(usize::MAX)
            {
                return Err(Refusal::TooManyLearners);
            }
        }
        let MemberAdd { id, peer_urls, is_learner, .. } = request;
        self.put_member(Member { id, peer_urls, is_learner, ..Member::default() })
    }

    pub(super) fn remove_member(&mut self, request: MemberRemove) -> Outcome {
        if self.end_membership(request.id) { Ok(self.members()) } else { Err(Refusal::MemberNotFound) }
    }

    pub(super) fn keep_only(&mut self, request: MemberKeepOnly) -> Outcome {
        let others: Vec<u64> = {
            let cluster = self.state.cluster.read();
            cluster.members().map(|member| member.id).filter(|id| *id != request.id).collect()
        };
        for id in others {
            self.end_membership(id);
        }
        Ok(self.members())
    }

    /// Ends a membership; false if there is none.
    fn end_membership(&mut self, id: u64) -> bool {
        if self.state.cluster.write().remove(id).is_none() {
            return false;
        }
        self.write.batch().delete(Family::Meta, &MetaKey::Member(id).encode());
        self.write.batch().put(Family::Meta, &MetaKey::Removed(id).encode(), b"");
        true
    }

    pub(super) fn update_member(&mut self, request: MemberUpdate) -> Outcome {
        let member = {
            let cluster = self.state.cluster.read();
            let known = cluster.member(request.id).ok_or(Refusal::MemberNotFound)?;
            if cluster.uses_any(&request.peer_urls, Some(request.id)) {
                return Err(Refusal::PeerUrlExists);
            }
            Member { peer_urls: request.peer_urls, ..known.clone() }
        };
        self.put_member(member)
    }

    pub(super) fn promote_member(&mut self, request: MemberPromote) -> Outcome {
        let member = {
            let cluster = self.state.cluster.read();
            let known = cluster.member(request.id).ok_or(Refusal::MemberNotFound)?;
            if !known.is_learner {
                return Err(Refusal::MemberNotLearner);
            }
            Member { is_learner: false, ..known.clone() }
        };
        self.put_member(member)
    }

    pub(super) fn set_attributes(&mut self, request: &MemberAttributes) -> Outcome {
        let member = self.state.cluster.write().set_attributes(request);
        if let Some(member) = member {
            let key = MetaKey::Member(member.id).encode();
            self.write.batch().put(Family::Meta, &key, &member.encode_to_vec());
        }
        Ok(Reply::None)
    }

    fn put_member(&mut self, member: Member) -> Outcome {
        self.write.batch().put(Family::Meta, &MetaKey::Member(member.id).encode(), &member.encode_to_vec());
        self.state.cluster.write().put(member);
        Ok(self.members())
    }

    fn members(&self) -> Reply {
        Reply::Members(self.state.cluster.read().members().cloned().collect())
    }
}
