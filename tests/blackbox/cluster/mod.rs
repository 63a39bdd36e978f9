//! Several members: founding, electing, changing the membership, and what each end of a process leaves.

mod catch_up;
mod change;
mod corrupt;
mod disk;
mod elect;

use std::path::Path;
use std::process::Command;
use std::sync::mpsc;
use std::time::Duration;

use etcd_client::MaintenanceClient;
use skeg::clock::now;

use crate::member::Member;
use crate::programs::skeg;

/// How long a cluster may take to get somewhere before the test calls it a hang.
const PATIENCE: Duration = Duration::from_secs(60);
/// The election time-out that the tests' members have.
const ELECTION_TIMEOUT: Duration = Duration::from_millis(1000);

/// Members that know each other.
pub(crate) struct Cluster {
    directory: tempfile::TempDir,
    pub(crate) members: Vec<Member>,
}

impl Cluster {
    /// Members that found a cluster, started.
    pub(crate) fn found(size: usize) -> Cluster {
        let mut cluster = Cluster::prepare(size);
        cluster.start_all();
        cluster
    }

    /// The same, not started.
    pub(crate) fn prepare(size: usize) -> Cluster {
        let directory = tempfile::tempdir().unwrap();
        let members = (0..size).map(|at| Member::new(&subdirectory(directory.path(), at))).collect();
        Cluster::of(directory, members)
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
        Cluster::of(tempfile::tempdir().unwrap(), directories.map(Member::new).collect())
    }

    fn of(directory: tempfile::TempDir, mut members: Vec<Member>) -> Cluster {
        let initial = initial_cluster(&members);
        for (at, member) in members.iter_mut().enumerate() {
            member.set("name", &name(at));
            member.set("initial-cluster", &initial);
        }
        Cluster { directory, members }
    }

    /// Starts all members that do not run, and waits until they serve.
    pub(crate) fn start_all(&mut self) {
        let ready: Vec<mpsc::Receiver<()>> = self
            .members
            .iter_mut()
            .filter(|member| !member.runs())
            .map(|member| member.spawn(Command::new(skeg())))
            .collect();
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

    /// Checks that all members that run hold the same, at the revision that the first of them has.
    pub(crate) async fn assert_equal(&self) {
        let mut revision = 0;
        let mut hashes = Vec::new();
        for member in self.members.iter().filter(|member| member.runs()) {
            let mut client = member.client().await;
            if revision == 0 {
                revision = client.get("x", None).await.unwrap().header().unwrap().revision();
            }
            let mut maintenance: MaintenanceClient = client.maintenance_client();
            let started = now();
            let hash = loop {
                match maintenance.hash_kv(revision).await {
                    Ok(found) => break found.hash(),
                    Err(error) => assert!(started.elapsed() < PATIENCE, "no hash: {error}"),
                }
                tokio::time::sleep(Duration::from_millis(20)).await;
            };
            hashes.push(hash);
        }
        assert!(hashes.iter().all(|hash| *hash == hashes[0]), "hashes at {revision} differ: {hashes:?}");
    }
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
