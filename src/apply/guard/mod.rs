//! Checks in front of every command: may who asks, corrupt, space. etcd: `server/etcdserver/apply/uber_applier.go`; it asks for
//! permissions last, so that who may nothing learns of the alarms.

mod demand;
mod space;

pub use demand::{demand, leases, txn_demand};
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
