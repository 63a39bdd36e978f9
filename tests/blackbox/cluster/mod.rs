//! Several members: founding, electing, changing the membership, and what each end of a process leaves.

mod catch_up;
mod change;
mod copies;
mod corrupt;
mod disk;
mod diverge;
mod elect;
mod faults;
mod history;
mod lease;
mod linear;
mod load;
mod mend;
mod namespaces;
mod proxy;
mod roll;
mod srv;
mod strangers;
mod wall_clock;

use std::path::Path;
use std::process::Command;
use std::sync::mpsc;
use std::time::Duration;

use etcd_client::MaintenanceClient;
use skeg::clock::now;

use crate::member::Member;
use crate::programs::skeg;
use history::History;
use load::Load;
use proxy::Network;

/// How long a cluster may take to get somewhere before the test calls it a hang.
const PATIENCE: Duration = Duration::from_secs(60);
/// The election time-out that the tests' members have.
const ELECTION_TIMEOUT: Duration = Duration::from_millis(1000);

/// Members that know each other.
pub(crate) struct Cluster {
    directory: tempfile::TempDir,
    pub(crate) members: Vec<Member>,
    /// Between them, if there is one.
    network: Option<Network>,
}

impl Cluster {
    /// Members that found a cluster, started.
    pub(crate) fn found(size: usize) -> Cluster {
        let mut cluster = Cluster::prepare(size);
        cluster.start_all();
        cluster
    }

    /// The same with a network between them.
    pub(crate) fn found_with_network(size: usize) -> Cluster {
        let mut cluster = Cluster::prepare_with_network(size);
        cluster.start_all();
        cluster
    }

    /// Members that would found a cluster, not started.
    pub(crate) fn prepare(size: usize) -> Cluster {
        let directory = tempfile::tempdir().unwrap();
        let members = (0..size).map(|at| Member::new(&subdirectory(directory.path(), at))).collect();
        Cluster::of(directory, members, false)
    }

    /// The same with a network between them.
    pub(crate) fn prepare_with_network(size: usize) -> Cluster {
        let directory = tempfile::tempdir().unwrap();
        let members = (0..size).map(|at| Member::new(&subdirectory(directory.path(), at))).collect();
        Cluster::of(directory, members, true)
    }

    /// Members that find each other at a discovery service, not started.
    pub(crate) fn prepare_discovered(size: usize, endpoint: &str, token: &str) -> Cluster {
        let mut cluster = Cluster::prepare(size);
        for member in &mut cluster.members {
            member.set("initial-cluster", "");
            member.set("discovery-endpoints", endpoint);
            member.set("discovery-token", token);
        }
        cluster
    }

    /// Members with their data in these directories, not started.
    pub(crate) fn prepare_in<'d>(directories: impl Iterator<Item = &'d Path>) -> Cluster {
        Cluster::of(tempfile::tempdir().unwrap(), directories.map(Member::new).collect(), false)
    }

    fn of(directory: tempfile::TempDir, mut members: Vec<Member>, with_network: bool) -> Cluster {
        let network = with_network.then(|| Network::new(members.iter().map(Member::peer_port).collect()));
        if let Some(network) = &network {
            for (at, member) in members.iter_mut().enumerate() {
                member.advertise_peer_url(&network.url(at));
                // Every byte goes through one thread more, which may have to wait for a processor.
                member.set("heartbeat-interval", "200");
                member.set("election-timeout", "2000");
            }
        }
        let initial = initial_cluster(&members);
        for (at, member) in members.iter_mut().enumerate() {
            member.set("name", &name(at));
            member.set("initial-cluster", &initial);
        }
        Cluster { directory, members, network }
    }

    /// Starts all members that do not run, and waits until they serve.
    pub(crate) fn start_all(&mut self) {
        let mut ready: Vec<mpsc::Receiver<()>> = Vec::new();
        for (at, member) in self.members.iter_mut().enumerate().filter(|(_, member)| !member.runs()) {
            ready.push(member.spawn(Command::new(skeg())));
            if let Some(network) = &self.network {
                network.set_process(at, member.pid());
            }
        }
        for ready in ready {
            ready.recv_timeout(PATIENCE).expect("the member gets ready");
        }
    }

    /// A new member that would join the others, not added and not started.
    pub(crate) fn prepare_another(&mut self) -> &mut Member {
        let at = self.members.len();
        self.members.push(Member::new(&subdirectory(self.directory.path(), at)));
        let initial = initial_cluster(&self.members);
        let member = &mut self.members[at];
        member.set("name", &name(at));
        member.set("initial-cluster", &initial);
        member.set("initial-cluster-state", "existing");
        member
    }

    /// Where the leader is among the members that run; waits until they agree on one.
    pub(crate) async fn leader(&self) -> usize {
        let started = now();
        while started.elapsed() < PATIENCE {
            if let Some(leader) = self.agreed_leader().await {
                return leader;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        panic!("the members do not agree on a leader");
    }

    async fn agreed_leader(&self) -> Option<usize> {
        let mut leader = None;
        let mut seen = Vec::new();
        for (at, member) in self.members.iter().enumerate().filter(|(_, member)| member.runs()) {
            let status = member.client().await.maintenance_client().status().await.ok()?;
            if status.leader() == status.header()?.member_id() {
                leader = Some(at);
            }
            seen.push(status.leader());
        }
        let agreed = seen.iter().all(|id| *id != 0 && *id == seen[0]);
        leader.filter(|_| agreed)
    }

    /// The network between the members.
    pub(crate) fn network(&self) -> &Network {
        self.network.as_ref().expect("the cluster was made with a network")
    }

    /// Sets clients to work on all members.
    pub(crate) fn load(&self) -> Load {
        Load::start(self.members.iter().map(Member::address).collect())
    }

    /// Ends the work, and checks all that was recorded, and that the members hold the same.
    pub(crate) async fn check(&self, load: Load) -> History {
        let history = load.finish().await;
        println!("{}", history.summary());
        let violations = history.violations();
        assert!(violations.is_empty(), "{violations:#?}");
        self.assert_equal().await;
        history
    }

    /// The same, and that no client met an error that it would not try again after.
    pub(crate) async fn check_served(&self, load: Load) {
        let errors = self.check(load).await.errors;
        assert!(errors.is_empty(), "{errors:#?}");
    }

    /// Checks that all members that run hold the same, at several revisions up to the current one.
    pub(crate) async fn assert_equal(&self) {
        let mut running = self.members.iter().filter(|member| member.runs());
        let mut first = running.next().expect("a member runs").client().await;
        let current = first.get("x", None).await.unwrap().header().unwrap().revision();
        let revisions = [1, current / 3, current / 2, current - 1, current].map(|revision| revision.max(1));
        let expected = hashes(first.maintenance_client(), &revisions).await;
        for member in running {
            let found = hashes(member.client().await.maintenance_client(), &revisions).await;
            assert_eq!(found, expected, "hashes at {revisions:?} differ");
        }
    }
}

/// A member's hashes at these revisions, once it has them.
async fn hashes(mut client: MaintenanceClient, revisions: &[i64]) -> Vec<u32> {
    let mut hashes = Vec::new();
    for revision in revisions {
        let started = now();
        hashes.push(loop {
            match client.hash_kv(*revision).await {
                Ok(found) => break found.hash(),
                // None of them has it then.
                Err(error) if error.to_string().contains("has been compacted") => break 0,
                Err(error) => assert!(started.elapsed() < PATIENCE, "no hash: {error}"),
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        });
    }
    hashes
}

pub(crate) fn name(at: usize) -> String {
    format!("m{at}")
}

fn subdirectory(directory: &Path, at: usize) -> std::path::PathBuf {
    let path = directory.join(name(at));
    std::fs::create_dir(&path).unwrap();
    path
}

fn initial_cluster(members: &[Member]) -> String {
    let parts: Vec<String> = members
        .iter()
        .enumerate()
        .map(|(at, member)| format!("{}={}", name(at), member.peer_url()))
        .collect();
    parts.join(",")
}
