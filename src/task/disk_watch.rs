//! Watching the disk: a full one stops writes before it stops the member, and a leader whose log does not get its syncs
//! done makes way for another.

use std::sync::Arc;
use std::time::Duration;

use tracing::{error, info, warn};

use crate::apply::{self, State};
use crate::proto::etcdserverpb::{AlarmType, alarm_request::AlarmAction};
use crate::raft::Node;
use crate::storage::Space;

/// Time between looks.
const LOOK_EVERY: Duration = Duration::from_millis(200);
/// Pause after leadership was offered to somebody in vain.
const OFFER_AGAIN: Duration = Duration::from_secs(1);

/// Raises and clears the NOSPACE alarm of a full disk for as long as the member runs.
pub async fn watch_space(node: Node, state: State, space: Arc<Space>) {
    let mut ticks = tokio::time::interval(LOOK_EVERY);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        let was_low = space.is_low();
        if let Err(error) = space.look() {
            warn!(%error, "free disk space not known");
            continue;
        }
        let here = node.identity().member_id;
        let raised = state.cluster.read().has_raised(here, AlarmType::Nospace);
        if (space.is_low() || was_low) && !raised {
            if let Err(error) = space.mark_full() {
                warn!(%error, "full disk not noted");
            }
            error!("the disk is nearly full: writes are refused until there is room");
            set_alarm(&node, AlarmAction::Activate).await;
        } else if space.is_ample() {
            space.restore_reserve();
            if space.is_marked_full() {
                if raised {
                    info!("there is room on the disk again");
                    set_alarm(&node, AlarmAction::Deactivate).await;
                }
                space.unmark_full();
            }
        }
    }
}

async fn set_alarm(node: &Node, action: AlarmAction) {
    let command = apply::alarm(action, node.identity().member_id, AlarmType::Nospace);
    if let Err(error) = node.propose(command).await {
        warn!(%error, "alarm of a full disk not changed, trying again");
    }
}

/// Hands leadership over when this member's log has not got a sync done for too long: others commit without it, but what it
/// alone has promised would wait for its disk.
pub async fn watch_stalls(node: Node) {
    let mut ticks = tokio::time::interval(LOOK_EVERY);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        let Some(stalled) = node.log_stall() else { continue };
        if !node.is_leader() {
            continue;
        }
        let Some(successor) = node.best_successor() else { continue };
        warn!(?stalled, "the log's disk does not answer: handing leadership over");
        let transfer = node.transfer_leadership(successor);
        let within = node.options().election_timeout;
        match tokio::time::timeout(within, transfer).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => warn!(%error, "leadership not handed over"),
            Err(_) => warn!("leadership not handed over in time"),
        }
        tokio::time::sleep(OFFER_AGAIN).await;
    }
}
