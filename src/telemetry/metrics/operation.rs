//! Times by kind of request.

use std::sync::OnceLock;
use std::time::Duration;

use prometheus::{Histogram, HistogramVec};

/// A kind of request, by the name it has in etcd's metrics.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// A range.
    Range,
    /// A transaction that only reads.
    ReadonlyTxn,
    /// A put.
    Put,
    /// A range delete.
    DeleteRange,
    /// A transaction.
    Txn,
    /// A compaction.
    Compaction,
    /// A lease grant.
    LeaseGrant,
    /// A lease revocation or expiry.
    LeaseRevoke,
    /// Recorded lease times.
    LeaseCheckpoint,
    /// An alarm request.
    Alarm,
    /// A new cluster version.
    ClusterVersionSet,
    /// The begin or end of a downgrade.
    DowngradeInfoSet,
    /// A new cluster level.
    ClusterLevelSet,
    /// What a member says of itself.
    ClusterMemberAttrSet,
    /// A change of the members.
    ConfChange,
    /// Authentication turned on.
    AuthEnable,
    /// Authentication turned off.
    AuthDisable,
    /// Asked whether authentication is on.
    AuthStatus,
    /// A token issued.
    Authenticate,
    /// A user added.
    AuthUserAdd,
    /// A user removed.
    AuthUserDelete,
    /// A password changed.
    AuthUserChangePassword,
    /// A role granted.
    AuthUserGrantRole,
    /// A role taken back.
    AuthUserRevokeRole,
    /// A user asked for.
    AuthUserGet,
    /// All users asked for.
    AuthUserList,
    /// A role added.
    AuthRoleAdd,
    /// A role removed.
    AuthRoleDelete,
    /// A role asked for.
    AuthRoleGet,
    /// All roles asked for.
    AuthRoleList,
    /// A permission granted.
    AuthRoleGrantPermission,
    /// A permission taken back.
    AuthRoleRevokePermission,
}

impl Operation {
    const COUNT: usize = Operation::AuthRoleRevokePermission as usize + 1;

    /// The name in etcd's metrics.
    pub fn name(self) -> &'static str {
        match self {
            Operation::Range => "Range",
            Operation::ReadonlyTxn => "ReadonlyTxn",
            Operation::Put => "Put",
            Operation::DeleteRange => "DeleteRange",
            Operation::Txn => "Txn",
            Operation::Compaction => "Compaction",
            Operation::LeaseGrant => "LeaseGrant",
            Operation::LeaseRevoke => "LeaseRevoke",
            Operation::LeaseCheckpoint => "LeaseCheckpoint",
            Operation::Alarm => "Alarm",
            Operation::ClusterVersionSet => "ClusterVersionSet",
            Operation::DowngradeInfoSet => "DowngradeInfoSet",
            Operation::ClusterLevelSet => "ClusterLevelSet",
            Operation::ClusterMemberAttrSet => "ClusterMemberAttrSet",
            Operation::ConfChange => "ConfChange",
            Operation::AuthEnable => "AuthEnable",
            Operation::AuthDisable => "AuthDisable",
            Operation::AuthStatus => "AuthStatus",
            Operation::Authenticate => "Authenticate",
            Operation::AuthUserAdd => "AuthUserAdd",
            Operation::AuthUserDelete => "AuthUserDelete",
            Operation::AuthUserChangePassword => "AuthUserChangePassword",
            Operation::AuthUserGrantRole => "AuthUserGrantRole",
            Operation::AuthUserRevokeRole => "AuthUserRevokeRole",
            Operation::AuthUserGet => "AuthUserGet",
            Operation::AuthUserList => "AuthUserList",
            Operation::AuthRoleAdd => "AuthRoleAdd",
            Operation::AuthRoleDelete => "AuthRoleDelete",
            Operation::AuthRoleGet => "AuthRoleGet",
            Operation::AuthRoleList => "AuthRoleList",
            Operation::AuthRoleGrantPermission => "AuthRoleGrantPermission",
            Operation::AuthRoleRevokePermission => "AuthRoleRevokePermission",
        }
    }
}

/// Histograms by operation and success, each made on first use.
pub struct ByOperation {
    family: HistogramVec,
    leading: &'static [&'static str],
    histograms: [[OnceLock<Histogram>; 2]; Operation::COUNT],
}

impl ByOperation {
    /// `leading` are the label values in front of operation and success.
    pub(super) fn new(family: HistogramVec, leading: &'static [&'static str]) -> ByOperation {
        ByOperation { family, leading, histograms: Default::default() }
    }

    /// Notes one.
    pub fn observe(&self, operation: Operation, success: bool, took: Duration) {
        let slot = &self.histograms[operation as usize][usize::from(success)];
        let histogram = slot.get_or_init(|| {
            let mut labels = self.leading.to_vec();
            labels.extend([operation.name(), if success { "true" } else { "false" }]);
            self.family.with_label_values(&labels)
        });
        histogram.observe(took.as_secs_f64());
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::Operation;
    use crate::telemetry::metrics::Metrics;

    #[test]
    fn a_kind_appears_on_first_use() {
        let metrics = Metrics::new(false);
        assert!(!metrics.text().contains("etcd_server_apply_duration_seconds"));
        metrics.server.apply_duration.observe(Operation::Put, true, Duration::from_micros(150));
        metrics.server.request_duration.observe(Operation::Txn, false, Duration::from_secs(1));
        let text = metrics.text();
        let expected = "etcd_server_apply_duration_seconds_bucket{op=\"Put\",success=\"true\",version=\"v3\",le=\"0.0002\"} 1";
        assert!(text.contains(expected), "{text}");
        assert!(
            text.contains("etcd_server_request_duration_seconds_count{success=\"false\",type=\"Txn\"} 1"),
            "{text}"
        );
    }
}
