//! Commands as the log carries them.

use bytes::Bytes;
use prost::Message;

use crate::proto::etcdserverpb::{AlarmRequest, AlarmType, alarm_request::AlarmAction};
use crate::proto::skegpb::command::Kind;
use crate::proto::skegpb::{Command, Identity};
use crate::telemetry::metrics::Operation;

/// Why a log entry cannot be applied by this build. The member must stop rather than skip what others apply.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum CommandError {
    /// Its bytes are no command.
    #[error("the log holds an entry that does not decode: {0}")]
    Damaged(#[from] prost::DecodeError),
    /// It is of a kind that this build does not know.
    #[error("the log holds a command that this build does not know: use a newer one")]
    Unknown,
}

/// Decodes a command from its log entry; with it come who asked, and the number by which somebody waits for its outcome, 0 for
/// nobody.
///
/// # Errors
/// See [`CommandError`].
pub fn decode(encoded: Bytes) -> Result<(Kind, Option<Identity>, u64), CommandError> {
    let command = Command::decode(encoded)?;
    Ok((command.kind.ok_or(CommandError::Unknown)?, command.identity, command.request_id))
}

/// The level that the cluster must have before such a command is written; see [`crate::cluster::level`].
pub fn level_needed(command: &Kind) -> u32 {
    match command {
        Kind::Put(_)
        | Kind::DeleteRange(_)
        | Kind::Txn(_)
        | Kind::Compaction(_)
        | Kind::LeaseGrant(_)
        | Kind::LeaseRevoke(_)
        | Kind::LeaseCheckpoint(_)
        | Kind::Alarm(_)
        | Kind::ClusterVersionSet(_)
        | Kind::MemberAttributes(_)
        | Kind::LeaseExpire(_)
        | Kind::MemberAdd(_)
        | Kind::MemberRemove(_)
        | Kind::MemberUpdate(_)
        | Kind::MemberPromote(_)
        | Kind::MemberKeepOnly(_) => 0,
        // Of level 1, and what makes it: written when every member has said that it knows it.
        Kind::ClusterLevelSet(_) => 0,
        Kind::DowngradeSet(_)
        | Kind::AuthEnable(_)
        | Kind::AuthDisable(_)
        | Kind::AuthIssue(_)
        | Kind::UserAdd(_)
        | Kind::UserDelete(_)
        | Kind::UserChangePassword(_)
        | Kind::UserGrantRole(_)
        | Kind::UserRevokeRole(_)
        | Kind::RoleAdd(_)
        | Kind::RoleDelete(_)
        | Kind::RoleGrantPermission(_)
        | Kind::RoleRevokePermission(_) => 1,
    }
}

/// The command that raises or clears a member's alarm.
pub fn alarm(action: AlarmAction, member_id: u64, alarm: AlarmType) -> Kind {
    Kind::Alarm(AlarmRequest { action: action as i32, member_id, alarm: alarm as i32 })
}

/// The name under which a command is timed.
pub fn operation(command: &Kind) -> Operation {
    match command {
        Kind::Put(_) => Operation::Put,
        Kind::DeleteRange(_) => Operation::DeleteRange,
        Kind::Txn(_) => Operation::Txn,
        Kind::Compaction(_) => Operation::Compaction,
        Kind::LeaseGrant(_) => Operation::LeaseGrant,
        Kind::LeaseRevoke(_) | Kind::LeaseExpire(_) => Operation::LeaseRevoke,
        Kind::LeaseCheckpoint(_) => Operation::LeaseCheckpoint,
        Kind::Alarm(_) => Operation::Alarm,
        Kind::ClusterVersionSet(_) => Operation::ClusterVersionSet,
        Kind::ClusterLevelSet(_) => Operation::ClusterLevelSet,
        Kind::DowngradeSet(_) => Operation::DowngradeInfoSet,
        Kind::MemberAttributes(_) => Operation::ClusterMemberAttrSet,
        Kind::MemberAdd(_)
        | Kind::MemberRemove(_)
        | Kind::MemberUpdate(_)
        | Kind::MemberPromote(_)
        | Kind::MemberKeepOnly(_) => Operation::ConfChange,
        Kind::AuthEnable(_) => Operation::AuthEnable,
        Kind::AuthDisable(_) => Operation::AuthDisable,
        Kind::AuthIssue(_) => Operation::Authenticate,
        Kind::UserAdd(_) => Operation::AuthUserAdd,
        Kind::UserDelete(_) => Operation::AuthUserDelete,
        Kind::UserChangePassword(_) => Operation::AuthUserChangePassword,
        Kind::UserGrantRole(_) => Operation::AuthUserGrantRole,
        Kind::UserRevokeRole(_) => Operation::AuthUserRevokeRole,
        Kind::RoleAdd(_) => Operation::AuthRoleAdd,
        Kind::RoleDelete(_) => Operation::AuthRoleDelete,
        Kind::RoleGrantPermission(_) => Operation::AuthRoleGrantPermission,
        Kind::RoleRevokePermission(_) => Operation::AuthRoleRevokePermission,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_this_build_does_not_know_is_not_applied() {
        // Field 2000, as a later build's kind would be.
        assert_eq!(decode(Bytes::from_static(&[0x82, 0x7d, 0])), Err(CommandError::Unknown));
        assert!(matches!(decode(Bytes::from_static(b"\xff")), Err(CommandError::Damaged(_))));
    }
}
