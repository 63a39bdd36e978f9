//! Every error a client can see, with etcd's code and text. etcd: `api/v3rpc/rpctypes/error.go`.
//!
//! Clients recognise errors by their text, so it is part of the contract.

use tonic::{Code, Status};

use crate::apply::Refusal;
use crate::auth::AuthError;
use crate::auth::token::SignError;
use crate::raft::{AskError, ProposeError, ReadError, TransferError};
use crate::storage::StorageError;
use crate::storage::mvcc::MvccError;

/// A refusal as a client sees it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}", self.parts().1)]
pub enum Error {
    /// A request without a key.
    EmptyKey,
    /// A key that must exist does not.
    KeyNotFound,
    /// `ignore_value` with a value.
    ValueProvided,
    /// `ignore_lease` with a lease.
    LeaseProvided,
    /// A transaction over the limit.
    TooManyOps,
    /// Two changes of one key in a transaction.
    DuplicateKey,
    /// A sort order or target outside the enum.
    InvalidSortOption,
    /// A revision below the compact one.
    Compacted,
    /// A revision above the current one.
    FutureRevision,
    /// The quota is used up.
    NoSpace,
    /// An encoded request over the limit.
    RequestTooLarge,
    /// Too much is under way.
    TooManyRequests,
    /// A lease that does not exist.
    LeaseNotFound,
    /// A lease id in use.
    LeaseExists,
    /// A time to live over the limit.
    LeaseTtlTooLarge,
    /// Not all members could read it.
    NewerMembersNeeded,
    /// No leader is known.
    NoLeader,
    /// No leader took it in time; it never will be done.
    NoLeaderInTime,
    /// Not done in time.
    TimedOut,
    /// The member is stopping.
    Stopped,
    /// The CORRUPT alarm is raised.
    Corrupt,
    /// Client API version metadata is not UTF-8.
    InvalidClientApiVersion,
    /// An alarm action outside the enum.
    UnknownAlarmAction,
    /// RangeStream with a sort order.
    StreamSorted,
    /// RangeStream with revision filters.
    StreamFiltered,
    /// The request was not proposed because the leader is handing over, or another leads.
    NotLeader,
    /// A leadership transfer to no voter.
    BadLeaderTransferee,
    /// A leadership transfer not done in time.
    TransferTimedOut,
    /// Not done in time, and the leader changed meanwhile.
    TimedOutLeaderFailed,
    /// Not done in time, and the leader or a quorum was out of reach.
    TimedOutConnectionLost,
    /// A member that does not exist.
    MemberNotFound,
    /// A member id in use.
    MemberExists,
    /// A peer URL in use.
    PeerUrlExists,
    /// Too few members have started for the change.
    MemberNotEnoughStarted,
    /// Peer URLs that are none.
    MemberBadUrls,
    /// A promotion of a voter.
    MemberNotLearner,
    /// A promotion of a learner that lacks too much of the log.
    LearnerNotReady,
    /// More learners than allowed.
    TooManyLearners,
    /// No quorum has answered for long enough.
    Unhealthy,
    /// A version to go down to that is none.
    WrongDowngradeVersion,
    /// A version that the cluster cannot go down to.
    InvalidDowngradeTarget,
    /// No cluster version has been agreed on.
    NoClusterVersion,
    /// A downgrade is under way.
    DowngradeInProcess,
    /// A downgrade action outside the enum.
    UnknownMethod,
    /// What a learner does not serve.
    NotSupportedForLearner,
    /// A password over the limit.
    PasswordTooLong,
    /// A token cannot be signed.
    Sign(SignError),
    /// Who asks is not known, or may not, or users and roles do not allow the change.
    Auth(AuthError),
    /// The storage failed; the member is about to stop.
    Storage(String),
}

impl Error {
    /// The gRPC code and the text.
    fn parts(&self) -> (Code, &str) {
        match self {
            Error::EmptyKey => (Code::InvalidArgument, "etcdserver: key is not provided"),
            Error::KeyNotFound => (Code::InvalidArgument, "etcdserver: key not found"),
            Error::ValueProvided => (Code::InvalidArgument, "etcdserver: value is provided"),
            Error::LeaseProvided => (Code::InvalidArgument, "etcdserver: lease is provided"),
            Error::TooManyOps => (Code::InvalidArgument, "etcdserver: too many operations in txn request"),
            Error::DuplicateKey => (Code::InvalidArgument, "etcdserver: duplicate key given in txn request"),
            Error::InvalidSortOption => (Code::InvalidArgument, "etcdserver: invalid sort option"),
            Error::Compacted => (Code::OutOfRange, "etcdserver: mvcc: required revision has been compacted"),
            Error::FutureRevision => {
                (Code::OutOfRange, "etcdserver: mvcc: required revision is a future revision")
            }
            Error::NoSpace => (Code::ResourceExhausted, "etcdserver: mvcc: database space exceeded"),
            Error::RequestTooLarge => (Code::InvalidArgument, "etcdserver: request is too large"),
            // etcd's table says ResourceExhausted, but its server maps this one to Unknown.
            Error::TooManyRequests => (Code::Unknown, "etcdserver: too many requests"),
            Error::LeaseNotFound => (Code::NotFound, "etcdserver: requested lease not found"),
            Error::LeaseExists => (Code::FailedPrecondition, "etcdserver: lease already exists"),
            Error::LeaseTtlTooLarge => (Code::OutOfRange, "etcdserver: too large lease TTL"),
            Error::NewerMembersNeeded => {
                (Code::Unavailable, "etcdserver: not before all members run a newer version")
            }
            Error::NoLeader => (Code::Unavailable, "etcdserver: no leader"),
            // The words of Go's contexts: etcd waits for a leader with one, and hands its error on.
            Error::NoLeaderInTime => (Code::DeadlineExceeded, "context deadline exceeded"),
            Error::TimedOut => (Code::Unavailable, "etcdserver: request timed out"),
            Error::Stopped => (Code::Unavailable, "etcdserver: server stopped"),
            Error::Corrupt => (Code::DataLoss, "etcdserver: corrupt cluster"),
            Error::InvalidClientApiVersion => {
                (Code::InvalidArgument, "etcdserver: invalid client api version")
            }
            Error::UnknownAlarmAction => (Code::InvalidArgument, "etcdserver: unknown alarm action"),
            Error::StreamSorted => (Code::Unimplemented, "RangeStream does not support custom sort orders"),
            Error::StreamFiltered => (Code::Unimplemented, "RangeStream does not support revision filters"),
            Error::NotLeader => (Code::FailedPrecondition, "etcdserver: not leader"),
            Error::BadLeaderTransferee => (Code::FailedPrecondition, "etcdserver: bad leader transferee"),
            Error::TransferTimedOut => {
                (Code::Unknown, "etcdserver: request timed out, leader transfer took too long")
            }
            Error::TimedOutLeaderFailed => {
                (Code::Unavailable, "etcdserver: request timed out, possibly due to previous leader failure")
            }
            Error::TimedOutConnectionLost => {
                (Code::Unavailable, "etcdserver: request timed out, possibly due to connection lost")
            }
            Error::MemberNotFound => (Code::NotFound, "etcdserver: member not found"),
            Error::MemberExists => (Code::FailedPrecondition, "etcdserver: member ID already exist"),
            Error::PeerUrlExists => (Code::FailedPrecondition, "etcdserver: Peer URLs already exists"),
            // etcd's table says FailedPrecondition, but its server maps this one to Unknown.
            Error::MemberNotEnoughStarted => {
                (Code::Unknown, "etcdserver: re-configuration failed due to not enough started members")
            }
            Error::MemberBadUrls => (Code::InvalidArgument, "etcdserver: given member URLs are invalid"),
            Error::MemberNotLearner => {
                (Code::FailedPrecondition, "etcdserver: can only promote a learner member")
            }
            Error::LearnerNotReady => (
                Code::FailedPrecondition,
                "etcdserver: can only promote a learner member which is in sync with leader",
            ),
            Error::TooManyLearners => {
                (Code::FailedPrecondition, "etcdserver: too many learner members in cluster")
            }
            Error::Unhealthy => (Code::Unavailable, "etcdserver: unhealthy cluster"),
            Error::NotSupportedForLearner => {
                (Code::FailedPrecondition, "etcdserver: rpc not supported for learner")
            }
            // The words of Go's bcrypt.
            Error::PasswordTooLong => (Code::Unknown, "bcrypt: password length exceeds 72 bytes"),
            Error::Sign(SignError::VerifyOnly) => {
                (Code::Unknown, "auth: token signing attempted with verify-only key")
            }
            Error::Sign(SignError::Failed) => (Code::Unknown, "auth: a token could not be signed"),
            Error::Auth(error) => auth_parts(*error),
            Error::WrongDowngradeVersion => {
                (Code::InvalidArgument, "etcdserver: wrong downgrade target version format")
            }
            Error::InvalidDowngradeTarget => {
                (Code::InvalidArgument, "etcdserver: invalid downgrade target version")
            }
            Error::NoClusterVersion => {
                (Code::FailedPrecondition, "etcdserver: cluster version not found during downgrade")
            }
            Error::DowngradeInProcess => {
                (Code::FailedPrecondition, "etcdserver: cluster has a downgrade job in progress")
            }
            Error::UnknownMethod => (Code::Unknown, "etcdserver: unknown method"),
            Error::Storage(text) => (Code::Internal, text),
        }
    }
}

fn auth_parts(error: AuthError) -> (Code, &'static str) {
    match error {
        AuthError::RootUserNotExist => (Code::FailedPrecondition, "etcdserver: root user does not exist"),
        AuthError::RootRoleNotExist => {
            (Code::FailedPrecondition, "etcdserver: root user does not have root role")
        }
        AuthError::UserAlreadyExist => (Code::FailedPrecondition, "etcdserver: user name already exists"),
        AuthError::UserEmpty => (Code::InvalidArgument, "etcdserver: user name is empty"),
        AuthError::UserNotFound => (Code::FailedPrecondition, "etcdserver: user name not found"),
        AuthError::RoleAlreadyExist => (Code::FailedPrecondition, "etcdserver: role name already exists"),
        AuthError::RoleNotFound => (Code::FailedPrecondition, "etcdserver: role name not found"),
        AuthError::RoleEmpty => (Code::InvalidArgument, "etcdserver: role name is empty"),
        AuthError::AuthFailed => {
            (Code::InvalidArgument, "etcdserver: authentication failed, invalid user ID or password")
        }
        // Not in etcd's table of errors, so its server maps it to Unknown and keeps its own words.
        AuthError::NoPasswordUser => {
            (Code::Unknown, "auth: authentication failed, password was given for no password user")
        }
        AuthError::PermissionNotGiven => (Code::InvalidArgument, "etcdserver: permission not given"),
        AuthError::PermissionDenied => (Code::PermissionDenied, "etcdserver: permission denied"),
        AuthError::RoleNotGranted => {
            (Code::FailedPrecondition, "etcdserver: role is not granted to the user")
        }
        AuthError::PermissionNotGranted => {
            (Code::FailedPrecondition, "etcdserver: permission is not granted to the role")
        }
        AuthError::AuthNotEnabled => (Code::FailedPrecondition, "etcdserver: authentication is not enabled"),
        AuthError::InvalidAuthToken => (Code::Unauthenticated, "etcdserver: invalid auth token"),
        AuthError::InvalidAuthMgmt => (Code::InvalidArgument, "etcdserver: invalid auth management"),
        AuthError::AuthOldRevision => (Code::InvalidArgument, "etcdserver: revision of auth store is old"),
    }
}

impl From<AuthError> for Error {
    fn from(error: AuthError) -> Error {
        Error::Auth(error)
    }
}

impl From<Error> for Status {
    fn from(error: Error) -> Status {
        let (code, text) = error.parts();
        Status::new(code, text)
    }
}

impl From<MvccError> for Error {
    fn from(error: MvccError) -> Error {
        match error {
            MvccError::Compacted => Error::Compacted,
            MvccError::FutureRevision => Error::FutureRevision,
            MvccError::Storage(error) => error.into(),
        }
    }
}

impl From<StorageError> for Error {
    fn from(error: StorageError) -> Error {
        Error::Storage(error.to_string())
    }
}

impl From<Refusal> for Error {
    fn from(refusal: Refusal) -> Error {
        match refusal {
            Refusal::KeyNotFound => Error::KeyNotFound,
            Refusal::LeaseNotFound | Refusal::StaleJudgement => Error::LeaseNotFound,
            Refusal::LeaseExists => Error::LeaseExists,
            Refusal::LeaseTtlTooLarge => Error::LeaseTtlTooLarge,
            Refusal::Compacted => Error::Compacted,
            Refusal::FutureRevision => Error::FutureRevision,
            Refusal::NoSpace => Error::NoSpace,
            Refusal::Corrupt => Error::Corrupt,
            Refusal::UnknownAlarmAction => Error::UnknownAlarmAction,
            Refusal::MemberNotFound => Error::MemberNotFound,
            Refusal::MemberExists => Error::MemberExists,
            Refusal::PeerUrlExists => Error::PeerUrlExists,
            Refusal::TooManyLearners => Error::TooManyLearners,
            Refusal::MemberNotLearner => Error::MemberNotLearner,
            Refusal::Auth(error) => Error::Auth(error),
        }
    }
}

impl From<ProposeError> for Error {
    fn from(error: ProposeError) -> Error {
        match error {
            ProposeError::TooLarge => Error::RequestTooLarge,
            ProposeError::TooManyRequests => Error::TooManyRequests,
            ProposeError::Level => Error::NewerMembersNeeded,
            ProposeError::NoLeader => Error::NoLeaderInTime,
            ProposeError::TimedOut => Error::TimedOut,
            ProposeError::TimedOutLeaderFailed => Error::TimedOutLeaderFailed,
            ProposeError::TimedOutConnectionLost => Error::TimedOutConnectionLost,
            ProposeError::Stopped => Error::Stopped,
        }
    }
}

impl From<AskError> for Error {
    fn from(error: AskError) -> Error {
        match error {
            AskError::NoLeader => Error::NoLeader,
            AskError::TimedOut => Error::TimedOut,
            AskError::Stopped => Error::Stopped,
        }
    }
}

impl From<TransferError> for Error {
    fn from(error: TransferError) -> Error {
        match error {
            TransferError::NotLeader => Error::NotLeader,
            TransferError::BadTarget => Error::BadLeaderTransferee,
            TransferError::TimedOut => Error::TransferTimedOut,
            TransferError::Stopped => Error::Stopped,
        }
    }
}

impl From<ReadError> for Error {
    fn from(error: ReadError) -> Error {
        match error {
            ReadError::TimedOut => Error::TimedOut,
            ReadError::TooManyRequests => Error::TooManyRequests,
            ReadError::Stopped => Error::Stopped,
        }
    }
}
