//! A member without sockets: the simulation opens its doors, and ends it as a crash or a signal would.

use std::sync::Arc;

use hyper_util::server::graceful::GracefulShutdown;

use super::listen::{Door, Serves};
use super::{DRAIN, Member};
use crate::api::{Context, Services};
use crate::config::Config;
use crate::gateway::Gateway;
use crate::sim::Socket;
use crate::telemetry::metrics::Metrics;

/// A running member.
pub struct Simulated {
    member: Member,
    peers: Door,
    clients: Door,
    connections: GracefulShutdown,
}

impl Simulated {
    /// Starts a member as `server::run` does, up to where it would listen to its peers.
    ///
    /// # Errors
    /// When it cannot start.
    pub async fn start(config: &Config) -> anyhow::Result<Simulated> {
        let metrics = Arc::new(Metrics::new(config.member.extensive_metrics));
        let gateway = Gateway::new(config, Arc::clone(&metrics));
        let member = Member::start(config, metrics, &gateway).await?;
        let door = |serves| Door {
            serves,
            max_streams: config.member.max_concurrent_streams,
            keepalive: config.member.keepalive,
        };
        let services = Services::new(Arc::clone(&member.context));
        Ok(Simulated {
            peers: door(Serves::Peers(member.peer_service(), gateway.clone())),
            clients: door(Serves::Everything(services, gateway)),
            connections: GracefulShutdown::new(),
            member,
        })
    }

    /// What the member works on, to look at.
    pub fn context(&self) -> &Arc<Context> {
        &self.member.context
    }

    /// Waits until the member is level with its cluster; then it may listen to clients.
    ///
    /// # Errors
    /// When consensus has stopped.
    pub async fn join(&self, config: &Config) -> anyhow::Result<()> {
        self.member.join(config).await
    }

    /// Takes a peer's connection.
    pub fn serve_peer(&self, socket: Box<dyn Socket>) {
        self.peers.open(socket, None, &self.connections);
    }

    /// Takes a client's connection.
    pub fn serve_client(&self, socket: Box<dyn Socket>) {
        self.clients.open(socket, None, &self.connections);
    }

    /// Waits for a failure that the member cannot go on after.
    pub async fn failed(&self) -> anyhow::Error {
        self.member.failed().await
    }

    /// Stops as after a signal.
    pub async fn stop(self, config: &Config) {
        self.member.hand_over(config.cluster.election_timeout).await;
        self.member.context.hub.close();
        let _ = tokio::time::timeout(DRAIN, self.connections.shutdown()).await;
        self.member.stop(true).await;
    }
}
