//! Commands as the log carries them.

use bytes::Bytes;
use prost::Message;

use crate::proto::etcdserverpb::{AlarmRequest, AlarmType, alarm_request::AlarmAction};
use crate::proto::skegpb::command::Kind;
use crate::proto::skegpb::{Command, Identity};
use crate::telemetry::metrics::Operation;

/// Decodes a command from its log entry; with it come who asked, and the number by which somebody waits for its outcome, 0 for
/// nobody.
///
/// # Errors
/// When the bytes are no command of this version; the member must stop rather than skip what others apply.
pub fn decode(encoded: Bytes) -> Result<(Kind, Option<Identity>, u64), prost::DecodeError> {
    let command = Command::decode(encoded)?;
    Ok((command.kind.ok_or_else(unknown)?, command.identity, command.request_id))
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

fn unknown() -> prost::DecodeError {
    #[expect(deprecated, reason = "prost offers no other way to make the error")]
    prost::DecodeError::new("the log holds a command that this version does not know")
}
