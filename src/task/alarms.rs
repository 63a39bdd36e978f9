//! Alarms that end by themselves: a removed member's, and, where a flag asks for it, NOSPACE once the quota has room again.
//! (NOSPACE of a full disk is `disk_watch`'s.)

use std::num::NonZeroU64;
use std::sync::Arc;
use std::time::Duration;

use tracing::{info, warn};

use crate::apply::{self, State};
use crate::cluster::id::MemberId;
use crate::proto::etcdserverpb::{AlarmMember, AlarmType, alarm_request::AlarmAction};
use crate::raft::Node;
use crate::storage::Space;

/// Time between looks.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// Database size below which this member's NOSPACE alarm ends.
///
/// A share of the quota: then a write that raised it again would have to be that much larger than all that was freed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LowWater {
    bytes: u64,
}

impl LowWater {
    /// A percentage of a quota; `None` if the alarm is to stay until somebody clears it, as etcd's.
    pub fn new(quota_bytes: Option<NonZeroU64>, percent: u64) -> Option<LowWater> {
        let quota = quota_bytes.filter(|_| percent > 0)?;
        Some(LowWater { bytes: quota.get() / 100 * percent })
    }
}

/// Clears what is over for as long as the member runs.
pub async fn run(node: Node, state: State, space: Arc<Space>, low_water: Option<LowWater>) {
    let mut ticks = tokio::time::interval(LOOK_EVERY);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        if node.is_leader() {
            for alarm in of_removed_members(&state) {
                info!(member = %MemberId::new(alarm.member_id), "the alarm of a removed member ends");
                clear(&node, &alarm).await;
            }
        }
        let here = node.identity().member_id;
        if let Some(low_water) = low_water
            && state.cluster.read().has_raised(here, AlarmType::Nospace)
            && !space.is_low()
            && !space.is_marked_full()
            && state.store().sizes().total_bytes < low_water.bytes
        {
            info!(below_bytes = low_water.bytes, "the database has room again");
            clear(&node, &AlarmMember { member_id: here, alarm: AlarmType::Nospace as i32 }).await;
        }
    }
}

fn of_removed_members(state: &State) -> Vec<AlarmMember> {
    let cluster = state.cluster.read();
    let mut alarms = cluster.alarms_of_type(AlarmType::None as i32);
    alarms.retain(|alarm| cluster.is_removed(alarm.member_id));
    alarms
}

async fn clear(node: &Node, alarm: &AlarmMember) {
    let Ok(kind) = AlarmType::try_from(alarm.alarm) else { return };
    let command = apply::alarm(AlarmAction::Deactivate, alarm.member_id, kind);
    if let Err(error) = node.propose(command).await {
        warn!(%error, "alarm not cleared, trying again");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_low_water_mark_is_a_share_of_the_quota() {
        let quota = NonZeroU64::new(1_000);
        assert_eq!(LowWater::new(quota, 80), Some(LowWater { bytes: 800 }));
        assert_eq!(LowWater::new(quota, 0), None);
        assert_eq!(LowWater::new(None, 80), None, "without a quota there is nothing to fall below");
        let most = NonZeroU64::new(u64::MAX);
        assert!(LowWater::new(most, 99).is_some_and(|mark| mark.bytes < u64::MAX));
    }
}
