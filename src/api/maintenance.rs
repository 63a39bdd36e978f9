//! The Maintenance service.

use std::sync::Arc;
use std::time::Duration;

use futures::stream::BoxStream;
use tonic::{Request, Response, Status};

use super::caller::Caller;
use super::error::Error;
use super::kv::{on_thread, unexpected};
use super::{Context, downgrade, snapshot};
use crate::apply::{Reply, guard};
use crate::clock;
use crate::process;
use crate::proto::etcdserverpb as pb;
use crate::proto::server::maintenance_server::Maintenance;
use crate::proto::skegpb::command::Kind;
use crate::storage::snapshot::Damage;

/// What is reported as quota when it is off.
const NO_QUOTA: i64 = -1;

/// The Maintenance service.
#[derive(Clone)]
pub(super) struct MaintenanceService(pub(super) Arc<Context>);

#[tonic::async_trait]
impl Maintenance for MaintenanceService {
    type SnapshotStream = BoxStream<'static, Result<pb::SnapshotResponse, Status>>;

    async fn alarm(&self, request: Request<pb::AlarmRequest>) -> Result<Response<pb::AlarmResponse>, Status> {
        let caller = Caller::of(&request);
        let command = Kind::Alarm(request.into_inner());
        self.0.judge(&caller, &guard::demand(&command, true)).await?;
        match self.0.apply_for(&caller, command).await? {
            Reply::Alarm(mut response) => {
                self.0.stamp(&mut response.header);
                Ok(Response::new(response))
            }
            other => Err(unexpected(&other)),
        }
    }

    async fn status(&self, _: Request<pb::StatusRequest>) -> Result<Response<pb::StatusResponse>, Status> {
        let context = &self.0;
        let raft = context.node.status();
        let sizes = context.state.store().sizes();
        let mut errors = Vec::new();
        if raft.leader == 0 {
            errors.push("etcdserver: no leader".to_owned());
        }
        let cluster = context.state.cluster.read();
        for alarm in cluster.alarms_of_type(pb::AlarmType::None as i32) {
            errors.push(alarm_text(alarm));
        }
        if let Some(stalled) = context.node.log_stall() {
            errors.push(stall_text(stalled));
        }
        if let Some(damage) = context.node.damage() {
            errors.push(damage_text(damage, context.node.withholds()));
        }
        let storage_version = cluster.version().unwrap_or_default().to_owned();
        let target = cluster.downgrade_target().map(str::to_owned);
        let downgrade_info =
            pb::DowngradeInfo { enabled: target.is_some(), target_version: target.unwrap_or_default() };
        drop(cluster);
        let quota =
            context.limits.quota_bytes.map_or(NO_QUOTA, |quota| i64::try_from(quota).unwrap_or(i64::MAX));
        let size = |bytes: u64| i64::try_from(bytes.max(1)).unwrap_or(i64::MAX);
        Ok(Response::new(pb::StatusResponse {
            header: Some(context.header()),
            version: process::ETCD_VERSION.to_owned(),
            db_size: size(sizes.total_bytes),
            leader: raft.leader,
            raft_index: raft.committed,
            raft_term: raft.term,
            raft_applied_index: raft.applied,
            errors,
            db_size_in_use: size(sizes.live_bytes),
            is_learner: context.state.cluster.read().is_learner(context.member_id.get()),
            storage_version,
            db_size_quota: quota,
            downgrade_info: Some(downgrade_info),
        }))
    }

    async fn defragment(
        &self,
        _: Request<pb::DefragmentRequest>,
    ) -> Result<Response<pb::DefragmentResponse>, Status> {
        let started = clock::now();
        let inflight = &self.0.metrics.disk.defrag_inflight;
        inflight.inc();
        let rewritten = self.0.rewrite().await;
        inflight.dec();
        rewritten?;
        self.0.metrics.disk.defrag.observe(clock::now().duration_since(started).as_secs_f64());
        Ok(Response::new(pb::DefragmentResponse { header: None }))
    }

    async fn hash(&self, _: Request<pb::HashRequest>) -> Result<Response<pb::HashResponse>, Status> {
        let store = self.0.state.store();
        let started = clock::now();
        let hash = on_thread(move || Ok(store.hash_all()?)).await?;
        self.0.metrics.mvcc.hash.observe(clock::now().duration_since(started).as_secs_f64());
        Ok(Response::new(pb::HashResponse { header: Some(self.0.header()), hash }))
    }

    async fn hash_kv(
        &self,
        request: Request<pb::HashKvRequest>,
    ) -> Result<Response<pb::HashKvResponse>, Status> {
        let requested = request.into_inner().revision;
        let store = self.0.state.store();
        let started = clock::now();
        let (found, current) = on_thread(move || Ok(store.hash_kv(requested)?)).await?;
        self.0.metrics.mvcc.hash_rev.observe(clock::now().duration_since(started).as_secs_f64());
        Ok(Response::new(pb::HashKvResponse {
            header: Some(self.0.header_at(current)),
            hash: found.hash,
            compact_revision: found.compact_revision,
            hash_revision: found.revision,
        }))
    }

    async fn snapshot(
        &self,
        _: Request<pb::SnapshotRequest>,
    ) -> Result<Response<Self::SnapshotStream>, Status> {
        Ok(Response::new(snapshot::stream(Arc::clone(&self.0)).await?))
    }

    async fn move_leader(
        &self,
        request: Request<pb::MoveLeaderRequest>,
    ) -> Result<Response<pb::MoveLeaderResponse>, Status> {
        let target = request.into_inner().target_id;
        self.0.node.transfer_leadership(target).await.map_err(Error::from)?;
        // etcd leaves the header out.
        Ok(Response::new(pb::MoveLeaderResponse { header: None }))
    }

    async fn downgrade(
        &self,
        request: Request<pb::DowngradeRequest>,
    ) -> Result<Response<pb::DowngradeResponse>, Status> {
        let caller = Caller::of(&request);
        downgrade::answer(&self.0, &caller, request.into_inner()).await.map(Response::new)
    }
}

/// What is said of a log whose disk does not answer.
pub fn stall_text(stalled: Duration) -> String {
    format!("the raft log has waited {:.1} s for its disk", stalled.as_secs_f64())
}

/// What is said of a store that is not what it should be.
fn damage_text(damage: Damage, withheld: bool) -> String {
    let damage = match damage {
        Damage::Differs => "the data of this member differs from the quorum's",
        Damage::Unreadable => "stored data of this member cannot be read back",
    };
    if withheld { format!("{damage}: it does not serve keys") } else { damage.to_owned() }
}

/// The text form of an alarm in protobuf: a field at its default is left out, an enum without a name is its number.
fn alarm_text(alarm: pb::AlarmMember) -> String {
    let kind = pb::AlarmType::try_from(alarm.alarm)
        .map_or_else(|_| alarm.alarm.to_string(), |kind| kind.as_str_name().to_owned());
    match alarm.member_id {
        0 => format!("alarm:{kind}"),
        id => format!("memberID:{id} alarm:{kind}"),
    }
}
