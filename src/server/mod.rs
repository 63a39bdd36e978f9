//! Putting a member together: the only file that knows every module.
//!
//! ```text
//! Config -> metrics port -> data directory, store, state -> consensus -> joined, published -> listening -> serving
//! signal -> watches ended, connections drained -> leases recorded -> consensus, log, store closed
//! ```

mod coalesce;
mod discovery;
mod identity;
mod listen;
mod observer;
mod pings;
#[cfg(feature = "sim")]
pub mod simulated;
mod srv;

use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use tokio::sync::{mpsc, watch};
use tracing::{error, info, warn};

use crate::api::{Context, Limits, Passwords, Services};
use crate::apply::{Compaction, State};
use crate::auth::token::Tokens;
use crate::cluster::id::{ClusterId, MemberId};
use crate::config::{Config, FeatureGate, ListenUrl, MemberSettings};
use crate::gateway::{Gateway, Port};
use crate::process::{self, Ending, Signals};
use crate::proto::skegpb::MemberAttributes;
use crate::raft::{self, Beginning, Membership, Node, NodeOptions, Served};
use crate::storage::data_dir::DataDir;
use crate::storage::mvcc::{Store, StoreOptions};
use crate::storage::snapshot::Generations;
use crate::storage::{EngineOptions, Space};
use crate::telemetry::metrics::Metrics;
use crate::watch::{Hub, HubOptions};
use crate::{task, telemetry};
use listen::{Door, Listener, Serves};
use observer::CountLog;

/// How long connections may finish what they are doing when the member stops.
const DRAIN: Duration = Duration::from_secs(2);
/// Threads for work that blocks: scans, hashes, flushes. Each holds one request's buffers.
const BLOCKING_THREADS_MAX: usize = 16;

/// Runs a member until it is told to stop or fails.
///
/// # Errors
/// When it cannot start, or had to stop because its storage or its consensus failed.
pub fn run(config: Config) -> anyhow::Result<Ending> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .max_blocking_threads(BLOCKING_THREADS_MAX)
        .build()
        .context("start the runtime")?;
    runtime.block_on(serve(config))
}

async fn serve(config: Config) -> anyhow::Result<Ending> {
    let listeners = Listeners::bind(&config.member)?;
    let metrics = Arc::new(Metrics::new(config.member.extensive_metrics));
    let gateway = Gateway::new(&config, Arc::clone(&metrics));
    let (stop, stopping) = watch::channel(false);
    let mut doors = Vec::new();
    let mut open = |listener: Listener, serves: Serves| {
        let door = Door {
            serves,
            max_streams: config.member.max_concurrent_streams,
            keepalive: config.member.keepalive,
        };
        doors.push(tokio::spawn(listener.serve(door, stopping.clone(), DRAIN)));
    };
    // Open before the member has joined: who watches its health must be able to see that it is not there yet.
    for listener in listeners.metrics {
        info!(address = %listener.url(), "serving metrics");
        open(listener, Serves::Http(gateway.clone(), Port::Metrics));
    }
    let member = Member::start(&config, metrics, &gateway).await?;
    let services = Services::new(Arc::clone(&member.context));
    for listener in listeners.peer {
        info!(address = %listener.url(), "serving peer traffic");
        open(listener, Serves::Peers(member.peer_service(), gateway.clone()));
    }
    tokio::select! {
        joined = member.join(&config) => joined?,
        failure = member.failed() => return Err(failure),
        () = member.context.node.removed() => return Ok(removed()),
    }
    let shared_port = listeners.http.is_empty();
    for listener in listeners.client {
        info!(address = %listener.url(), "serving client traffic insecurely; this is strongly discouraged!");
        let services = services.clone();
        open(
            listener,
            if shared_port { Serves::Everything(services, gateway.clone()) } else { Serves::Grpc(services) },
        );
    }
    for listener in listeners.http {
        info!(address = %listener.url(), "serving plain HTTP insecurely; this is strongly discouraged!");
        open(listener, Serves::Http(gateway.clone(), Port::Client));
    }
    // Before anybody is told: the kernel drops a signal to process 1 that nothing catches.
    let mut signals = Signals::catch().context("catch signals")?;
    info!("ready to serve client requests");
    process::notify_ready();
    let ending = tokio::select! {
        signal = signals.next() => Ok(Ending::Signalled(signal)),
        failure = member.failed() => Err(failure),
        () = member.context.node.removed() => Ok(removed()),
    };
    if ending.is_ok() {
        member.hand_over(config.cluster.election_timeout).await;
    }
    member.context.hub.close();
    stop.send_replace(true);
    for door in doors {
        if let Err(error) = door.await {
            warn!(%error, "a listener ended early");
        }
    }
    member.stop(ending.is_ok()).await;
    ending
}

/// How a member ends that is no member any more.
fn removed() -> Ending {
    error!("the member has been permanently removed from the cluster; its data directory can be deleted");
    Ending::Stopped
}

/// All addresses, bound before anything else is touched: a taken port must not cost a recovery.
struct Listeners {
    peer: Vec<Listener>,
    client: Vec<Listener>,
    http: Vec<Listener>,
    metrics: Vec<Listener>,
}

impl Listeners {
    fn bind(member: &MemberSettings) -> anyhow::Result<Listeners> {
        let bind = |urls: &[ListenUrl]| -> anyhow::Result<Vec<Listener>> {
            urls.iter().map(|url| Listener::bind(url, member)).collect()
        };
        Ok(Listeners {
            peer: bind(&member.listen_peer_urls)?,
            client: bind(&member.listen_client_urls)?,
            http: bind(&member.listen_client_http_urls)?,
            metrics: bind(&member.listen_metrics_urls)?,
        })
    }
}

/// A running member without its doors.
struct Member {
    context: Arc<Context>,
    _data_dir: DataDir,
    failures: tokio::sync::Mutex<mpsc::Receiver<anyhow::Error>>,
    tasks: Vec<tokio::task::JoinHandle<()>>,
}

impl Member {
    async fn start(config: &Config, metrics: Arc<Metrics>, gateway: &Gateway) -> anyhow::Result<Member> {
        if !DataDir::is_claimed(&config.member.data_dir)
            && config.cluster.discovery.is_none()
            && config.cluster.srv.is_none()
            && config.cluster.join.is_none()
        {
            // A contradiction in the settings is refused before anything is made on disk.
            config.bootstrap()?;
        }
        let data_dir = DataDir::open(&config.member.data_dir, config.member.wal_dir.as_deref())?;
        let (identity, beginning) = identity::identify(config, &data_dir).await?;
        let member_id = MemberId::new(identity.member_id);
        let cluster_id = ClusterId::new(identity.cluster_id);
        info!(name = config.member.name, local_member_id = %member_id, cluster_id = %cluster_id, "starting member");

        let space =
            Space::open(data_dir.root(), data_dir.log_dir()).context("see how much room the disk has")?;
        let space = Arc::new(space);
        let generations = data_dir.generations()?;
        let state = open_state(config, &generations)?;
        if state.cluster.read().is_removed(identity.member_id) {
            anyhow::bail!(
                "the member has been permanently removed from the cluster: remove {} and add it anew",
                config.member.data_dir.display()
            );
        }
        let beginning = match beginning {
            Beginning::Restarting
                if !config.member.force_new_cluster
                    && state.cluster.read().members().next().is_none()
                    && !raft::has_begun(data_dir.log_dir()).context("look into the raft log")? =>
            {
                identity::begin_again(config, identity).await
            }
            beginning => beginning,
        };
        let queued_bytes_max = config.member.memory.watch_ring_bytes;
        let hub = Arc::new(Hub::new(state.store(), HubOptions { queued_bytes_max }));
        let request_timeout = config.member.request_timeout(&config.cluster);
        let tokens = Tokens::from_setting(&config.member.auth_token, config.member.auth_token_ttl);
        let tokens = Arc::new(tokens.map_err(|error| anyhow::anyhow!("{error}"))?);
        let passwords =
            Passwords::start(config.member.bcrypt_cost).context("start a thread for passwords")?;
        let options = NodeOptions {
            identity,
            beginning,
            log_dir: data_dir.log_dir().to_owned(),
            log_tail_bytes: config.member.memory.log_tail_bytes,
            no_fsync: config.member.unsafe_no_fsync,
            observer: Some(Arc::new(CountLog { metrics: Arc::clone(&metrics), space: Arc::clone(&space) })),
            metrics: Arc::clone(&metrics),
            slow_apply: config.member.warning_apply_duration,
            heartbeat_interval: config.cluster.heartbeat_interval,
            election_timeout: config.cluster.election_timeout,
            pre_vote: config.member.pre_vote,
            force_new_cluster: config.member.force_new_cluster,
            request_timeout,
            max_request_bytes: size(config.member.max_request_bytes),
            keep_entries: config.member.snapshot_catchup_entries,
            generations: Arc::new(generations),
            tokens: Arc::clone(&tokens),
            lives_dir: data_dir.root().to_owned(),
        };
        let (node, compactions) = Node::start(options, state.clone(), Arc::clone(&hub)).await?;
        let limits = limits(config);
        let (compaction_finished, finished_compaction) = watch::channel(state.store().compacted());
        let context = Arc::new(Context {
            member_id,
            cluster_id,
            node,
            state,
            hub,
            limits,
            metrics,
            tokens,
            passwords,
            space,
            finished_compaction,
        });
        gateway.attach(Arc::clone(&context));
        let (tasks, failures) = spawn_tasks(&context, compactions, compaction_finished, &config.member);
        Ok(Member { context, _data_dir: data_dir, failures: tokio::sync::Mutex::new(failures), tasks })
    }

    /// What peers are served.
    fn peer_service(&self) -> Served {
        let context = Arc::clone(&self.context);
        Served::new(self.context.node.clone(), move || Membership {
            members: context.members(),
            version: context.state.cluster.read().version().unwrap_or_default().to_owned(),
        })
    }

    /// Waits until the member is level with its cluster, and tells the cluster of itself.
    async fn join(&self, config: &Config) -> anyhow::Result<()> {
        let context = &self.context;
        let attributes = MemberAttributes {
            member_id: context.member_id.get(),
            name: config.member.name.clone(),
            client_urls: config
                .member
                .advertise_client_urls
                .iter()
                .map(|url| url.as_str().to_owned())
                .collect(),
        };
        task::publish::join(&context.node, &context.state, attributes).await.context("join the cluster")?;
        let check = config.member.feature_gates.enabled(FeatureGate::InitialCorruptCheck);
        if check && !task::corruption_check::agrees(&context.node).await {
            anyhow::bail!(
                "found data inconsistency with peers: this member holds something else than the others"
            );
        }
        Ok(())
    }

    /// Waits for a failure that the member cannot go on after.
    async fn failed(&self) -> anyhow::Error {
        let mut failures = self.failures.lock().await;
        tokio::select! {
            Some(failure) = failures.recv() => failure,
            reason = self.context.node.failed() => anyhow::anyhow!("consensus has stopped: {reason}"),
            reason = self.context.node.forgot() => anyhow::anyhow!(reason),
            outgrown = self.context.node.outgrown() => outgrown.into(),
        }
    }

    /// Gives leadership to another member, so that clients need not wait for an election.
    async fn hand_over(&self, within: Duration) {
        let node = &self.context.node;
        let Some(successor) = node.best_successor() else { return };
        match tokio::time::timeout(within, node.transfer_leadership(successor)).await {
            Ok(Ok(())) => info!(successor = %MemberId::new(successor), "leadership handed over"),
            Ok(Err(error)) => warn!(%error, "leadership not handed over"),
            Err(_) => warn!("leadership not handed over in time"),
        }
    }

    async fn stop(self, healthy: bool) {
        for task in &self.tasks {
            task.abort();
        }
        if healthy {
            task::lease_checkpoint::record_all(&self.context.node).await;
        }
        if let Err(error) = self.context.node.clone().stop().await {
            error!(%error, "raft log not closed cleanly");
        }
    }
}

fn open_state(config: &Config, generations: &Generations) -> anyhow::Result<State> {
    let memory = &config.member.memory;
    let engine =
        EngineOptions { memtable_bytes: memory.memtable_bytes, block_cache_bytes: memory.block_cache_bytes };
    let options = StoreOptions { engine, heads_bytes: memory.metadata_cache_bytes };
    let store = Arc::new(Store::open(&generations.current_dir(), options).context("open the store")?);
    State::open(store).context("read the leases and members")
}

fn limits(config: &Config) -> Limits {
    let heartbeat = config.cluster.heartbeat_interval.as_millis().max(1);
    let ticks = config.cluster.election_timeout.as_millis() / heartbeat;
    let min_lease_millis = heartbeat * (3 * ticks / 2);
    Limits {
        max_txn_ops: size(config.member.max_txn_ops),
        max_request_bytes: size(config.member.max_request_bytes),
        quota_bytes: config.member.quota_backend_bytes.map(std::num::NonZeroU64::get),
        slow_request: config.member.warning_unary_request_duration,
        slow_read: config.member.warning_apply_duration,
        request_timeout: config.member.request_timeout(&config.cluster),
        progress_interval: config.member.watch_progress_notify_interval,
        min_lease_ttl: i64::try_from(min_lease_millis.div_ceil(1000)).unwrap_or(i64::MAX),
        strict_reconfig_check: config.member.strict_reconfig_check,
        max_learners: config.member.max_learners,
    }
}

fn size(value: u64) -> usize {
    usize::try_from(value).unwrap_or(usize::MAX)
}

fn spawn_tasks(
    context: &Arc<Context>,
    compactions: mpsc::UnboundedReceiver<Compaction>,
    compaction_finished: watch::Sender<i64>,
    settings: &MemberSettings,
) -> (Vec<tokio::task::JoinHandle<()>>, mpsc::Receiver<anyhow::Error>) {
    let (failed, failures) = mpsc::channel(1);
    let state = || context.state.clone();
    let node = || context.node.clone();
    let metrics = || Arc::clone(&context.metrics);
    let hub = Arc::clone(&context.hub);
    let mut tasks = vec![
        supervised("catch-up", failed.clone(), async { Ok(crate::watch::catch_up(hub).await?) }),
        supervised("compaction", failed.clone(), {
            let run = task::compaction::run(state(), compactions, metrics(), compaction_finished);
            async { Ok(run.await?) }
        }),
        supervised("count index", failed.clone(), {
            let run = task::counts::run(node(), state());
            async { Ok(run.await?) }
        }),
        supervised("mending", failed, {
            let run = task::mend::run(node(), state(), settings.mend_divergence);
            async { Ok(run.await?) }
        }),
        tokio::spawn(task::disk_watch::watch_space(
            node(),
            context.state.clone(),
            Arc::clone(&context.space),
        )),
        tokio::spawn(task::disk_watch::watch_stalls(node())),
        tokio::spawn(task::divergence::run(node(), state())),
        tokio::spawn(task::lease_expiry::run(node(), metrics())),
        tokio::spawn(task::lease_checkpoint::run(node())),
        tokio::spawn(task::token_keys::run(Arc::clone(&context.tokens))),
        tokio::spawn(task::level::run(node(), state())),
        tokio::spawn(task::cluster_version::run(node(), state())),
        tokio::spawn(task::alarms::run(
            node(),
            state(),
            Arc::clone(&context.space),
            task::alarms::LowWater::new(settings.quota_backend_bytes, settings.nospace_low_water_percent),
        )),
        tokio::spawn(task::auto_compaction::run(node(), state(), settings.auto_compaction)),
        tokio::spawn(task::flush::run(node(), state(), settings.snapshot_count)),
    ];
    if !settings.corrupt_check_time.is_zero() {
        let check = task::corruption_check::watch_history(node(), state(), settings.corrupt_check_time);
        tasks.push(tokio::spawn(check));
    }
    if !settings.scrub_interval.is_zero() {
        tasks.push(tokio::spawn(task::scrub::run(node(), state(), settings.scrub_interval)));
    }
    if settings.feature_gates.enabled(FeatureGate::CompactHashCheck) {
        let every = settings.compact_hash_check_time;
        tasks.push(tokio::spawn(task::corruption_check::watch_compactions(node(), state(), every)));
    }
    (tasks, failures)
}

/// Runs a task whose failure ends the member.
fn supervised(
    name: &'static str,
    failed: mpsc::Sender<anyhow::Error>,
    work: impl Future<Output = anyhow::Result<()>> + Send + 'static,
) -> tokio::task::JoinHandle<()> {
    tokio::spawn(async move {
        if let Err(error) = work.await {
            error!(target: telemetry::FATAL, task = name, %error, "a task has failed");
            let _ = failed.send(error.context(name)).await;
        }
    })
}
