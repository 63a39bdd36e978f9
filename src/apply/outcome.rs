//! What applying a command can answer, equal on every member.

use crate::auth::AuthError;
use crate::proto::etcdserverpb as pb;
use crate::proto::skegpb::Member;

/// The answer to a command: a reply, or why it was refused. Both are deterministic.
pub type Outcome = Result<Reply, Refusal>;

/// A reply; headers carry the revision only, the rest is the answering member's.
#[derive(Clone, Debug, PartialEq)]
pub enum Reply {
    /// Nothing to say.
    None,
    /// Of a put.
    Put(pb::PutResponse),
    /// Of a range delete.
    DeleteRange(pb::DeleteRangeResponse),
    /// Of a transaction.
    Txn(pb::TxnResponse),
    /// Of a compaction.
    Compaction(pb::CompactionResponse),
    /// Of a lease grant.
    LeaseGrant(pb::LeaseGrantResponse),
    /// Of a lease revocation.
    LeaseRevoke(pb::LeaseRevokeResponse),
    /// Of an alarm request.
    Alarm(pb::AlarmResponse),
    /// Of what users and roles are changed by, or a token is issued.
    Auth {
        /// Current revision of the keys.
        revision: i64,
        /// The entry's index.
        index: u64,
    },
    /// Of a change of the members: all that there are now.
    Members(Vec<Member>),
}

/// Why a command was refused; nothing of it was applied.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// `ignore_value` or `ignore_lease` on a key that does not exist.
    #[error("key not found")]
    KeyNotFound,
    /// The lease does not exist.
    #[error("requested lease not found")]
    LeaseNotFound,
    /// The lease id is in use.
    #[error("lease already exists")]
    LeaseExists,
    /// The lease's time to live is above the longest.
    #[error("too large lease TTL")]
    LeaseTtlTooLarge,
    /// The revision is compacted.
    #[error("required revision has been compacted")]
    Compacted,
    /// The revision is in the future.
    #[error("required revision is a future revision")]
    FutureRevision,
    /// The NOSPACE alarm is raised.
    #[error("database space exceeded")]
    NoSpace,
    /// The CORRUPT alarm is raised.
    #[error("corrupt cluster")]
    Corrupt,
    /// A lease's expiry was judged by a leader of an earlier term.
    #[error("lease expiry judged in an earlier term")]
    StaleJudgement,
    /// No such member, or it was removed.
    #[error("member not found")]
    MemberNotFound,
    /// The member's id is in use.
    #[error("member ID already exist")]
    MemberExists,
    /// Another member has one of the peer URLs.
    #[error("peer URL exists")]
    PeerUrlExists,
    /// As many learners as there may be.
    #[error("too many learner members in cluster")]
    TooManyLearners,
    /// The member votes already.
    #[error("can only promote a learner member")]
    MemberNotLearner,
    /// Who asked may not, or users and roles do not allow the change.
    #[error(transparent)]
    Auth(AuthError),
    /// An alarm action outside the enum.
    #[error("unknown alarm action")]
    UnknownAlarmAction,
}
