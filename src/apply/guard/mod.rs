//! Checks in front of every command, in etcd's order: corrupt, space. etcd: `server/etcdserver/apply/uber_applier.go`.

mod space;

pub use space::cost;

use super::Refusal;
use crate::cluster::Cluster;
use crate::proto::etcdserverpb::AlarmType;
use crate::proto::skegpb::command::Kind;

/// Refuses what the raised alarms forbid.
pub fn check(cluster: &Cluster, command: &Kind) -> Result<(), Refusal> {
    if cluster.is_raised(AlarmType::Corrupt) && changes_keys(command) {
        return Err(Refusal::Corrupt);
    }
    if cluster.is_raised(AlarmType::Nospace) && cost(command) > 0 {
        return Err(Refusal::NoSpace);
    }
    Ok(())
}

fn changes_keys(command: &Kind) -> bool {
    matches!(
        command,
        Kind::Put(_)
            | Kind::DeleteRange(_)
            | Kind::Txn(_)
            | Kind::Compaction(_)
            | Kind::LeaseGrant(_)
            | Kind::LeaseRevoke(_)
            | Kind::LeaseExpire(_)
    )
}
