//! `Maintenance.Downgrade`: the way to the minor version before. etcd: `server/etcdserver/version`
//!
//! Enabling it is one entry in the log; the leader then lowers the cluster version ([`crate::task::cluster_version`]), and with it goes the storage
//! version that snapshots have, so that an etcd of the version before takes them. Members themselves stay what they are.

use tonic::Status;

use super::Context;
use super::caller::Caller;
use super::error::Error;
use crate::proto::etcdserverpb as pb;
use crate::proto::etcdserverpb::downgrade_request::DowngradeAction;
use crate::proto::skegpb::DowngradeSet;
use crate::proto::skegpb::command::Kind;

/// A version without its patch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Minor {
    major: i64,
    minor: i64,
}

impl Minor {
    /// Reads `major.minor` or a whole version, as etcd does.
    fn parse(text: &str) -> Option<Minor> {
        Minor::of_version(text).or_else(|| Minor::of_version(&format!("{text}.0")))
    }

    /// Reads `major.minor.patch-pre.release+meta.data`.
    fn of_version(text: &str) -> Option<Minor> {
        let (text, metadata) = text.split_once('+').unwrap_or((text, ""));
        let (text, release) = text.split_once('-').unwrap_or((text, ""));
        let in_identifier = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '.');
        let mut numbers = text.splitn(3, '.').map(|number| number.parse::<i64>().ok());
        let (major, minor, _patch) = (numbers.next()??, numbers.next()??, numbers.next()??);
        (release.chars().all(in_identifier) && metadata.chars().all(in_identifier))
            .then_some(Minor { major, minor })
    }

    /// The one that a downgrade can go to.
    fn before(self) -> Minor {
        Minor { minor: self.minor - 1, ..self }
    }
}

/// Serves the call.
///
/// # Errors
/// What the version is refused for, or the proposal's.
pub(super) async fn answer(
    context: &Context,
    caller: &Caller,
    request: pb::DowngradeRequest,
) -> Result<pb::DowngradeResponse, Status> {
    // The version before the change, for the leader lowers it a moment later.
    let version = match DowngradeAction::try_from(request.action) {
        Ok(DowngradeAction::Validate) => validate(context, &request.version).await?.0,
        Ok(DowngradeAction::Enable) => {
            let (version, target) = validate(context, &request.version).await?;
            let target_version = format!("{}.{}.0", target.major, target.minor);
            set(context, caller, target_version).await?;
            version
        }
        Ok(DowngradeAction::Cancel) => cancel(context, caller).await?,
        Err(_) => return Err(Error::UnknownMethod.into()),
    };
    let version = format!("{}.{}", version.major, version.minor);
    Ok(pb::DowngradeResponse { header: Some(context.header()), version })
}

/// Checks that the cluster can go down to a version, and gives its own and that one.
async fn validate(context: &Context, target: &str) -> Result<(Minor, Minor), Error> {
    let target = Minor::parse(target).ok_or(Error::WrongDowngradeVersion)?;
    context.node.read_barrier().await?;
    let cluster = context.state.cluster.read();
    let version = cluster.version().and_then(Minor::parse).ok_or(Error::NoClusterVersion)?;
    if target != version.before() {
        return Err(Error::InvalidDowngradeTarget);
    }
    if cluster.downgrade_target().is_some() {
        return Err(Error::DowngradeInProcess);
    }
    Ok((version, target))
}

/// Ends a downgrade; without one nothing is done, and as in etcd nothing is said.
async fn cancel(context: &Context, caller: &Caller) -> Result<Minor, Status> {
    context.node.read_barrier().await.map_err(Error::from)?;
    let (version, is_under_way) = {
        let cluster = context.state.cluster.read();
        (cluster.version().and_then(Minor::parse), cluster.downgrade_target().is_some())
    };
    if is_under_way {
        set(context, caller, String::new()).await?;
    }
    Ok(version.ok_or(Error::NoClusterVersion)?)
}

/// Begins a downgrade to a version, or ends it when that is empty, for a caller who may when that is applied.
async fn set(context: &Context, caller: &Caller, target_version: String) -> Result<(), Status> {
    context.apply_for(caller, Kind::DowngradeSet(DowngradeSet { target_version })).await.map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_read_as_etcd_reads_them() {
        let read = |text: &str| Minor::parse(text).map(|version| (version.major, version.minor));
        for text in ["3.6", "3.6.0", "3.6.9", "3.6.0-rc.1", "3.6.0+build", "03.06.0", "3.6.0-"] {
            assert_eq!(read(text), Some((3, 6)), "{text}");
        }
        for text in [
            "",
            "3",
            "3.",
            "v3.6",
            "3.6.",
            "3.6.x",
            "3.6.0.0",
            " 3.6",
            "3.6+build",
            "3.6.0-ä",
            "3.6.99999999999999999999",
        ] {
            assert_eq!(read(text), None, "{text}");
        }
        assert_eq!(Minor { major: 3, minor: 7 }.before(), Minor { major: 3, minor: 6 });
    }
}
