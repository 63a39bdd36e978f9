//! Members with network stacks of their own, on one switch. What is cut here is lost without a trace: nobody sees a
//! connection end, and the kernels send again at ever longer intervals. The proxy (`proxy.rs`) cannot do that.
//!
//! ```text
//! namespace of member 0   namespace of the switch   namespace of member 1
//!   10.0.0.1  eth0 ────────── port 0 ─ bridge ─ port 1 ────────── eth0  10.0.0.2
//! ```
//!
//! A way is cut by a wrong entry in the sender's table of neighbours: its frames go to an address that nobody has. Needs to
//! be root.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::Command;
use std::thread::JoinHandle;
use std::time::Duration;

use skeg::clock::now;
use tokio::net::{TcpListener, UnixStream};
use tokio::sync::oneshot;
use tokio::time::sleep;

use super::faults::ALONE;
use super::load::Load;
use super::proxy::{Pair, around};
use super::{Cluster, ELECTION_TIMEOUT, PATIENCE, subdirectory};
use crate::member::Member;

/// Calls answered between two faults.
const CALLS: usize = 60;
/// An address that nobody has.
const NOWHERE: usize = 0x99;

/// The switch and the members' namespaces; they go with the value.
struct Switch {
    name: String,
    members: Vec<String>,
}

#[track_caller]
fn ip(arguments: &str) {
    let output = Command::new("ip").args(arguments.split_whitespace()).output().expect("ip runs");
    assert!(output.status.success(), "ip {arguments}: {}", String::from_utf8_lossy(&output.stderr));
}

fn address(at: usize) -> String {
    format!("10.0.0.{}", at + 1)
}

fn hardware(at: usize) -> String {
    format!("02:00:00:00:00:{:02x}", at + 1)
}

impl Switch {
    fn new(size: usize) -> Switch {
        let name = format!("skeg-{}-{}", std::process::id(), fastrand::u32(..));
        let members: Vec<String> = (0..size).map(|at| format!("{name}-{at}")).collect();
        let switch = Switch { name, members };
        let name = &switch.name;
        ip(&format!("netns add {name}"));
        ip(&format!("-n {name} link add bridge type bridge"));
        ip(&format!("-n {name} link set bridge up"));
        for (at, member) in switch.members.iter().enumerate() {
            let (address, hardware) = (address(at), hardware(at));
            ip(&format!("netns add {member}"));
            ip(&format!("-n {member} link set lo up"));
            ip(&format!("-n {name} link add port{at} type veth peer name eth0 netns {member}"));
            ip(&format!("-n {name} link set port{at} master bridge up"));
            ip(&format!("-n {member} addr add {address}/24 dev eth0"));
            ip(&format!("-n {member} link set eth0 address {hardware} up"));
        }
        for (from, to) in (0..size).flat_map(|from| (0..size).map(move |to| (from, to))) {
            switch.lead((from, to), to);
        }
        switch
    }

    /// Has what one member sends to another go there, or to where nobody is.
    fn lead(&self, (from, to): Pair, really: usize) {
        let (member, address, hardware) = (&self.members[from], address(to), hardware(really));
        if from != to {
            ip(&format!("-n {member} neigh replace {address} lladdr {hardware} dev eth0 nud permanent"));
        }
    }

    fn cut(&self, pairs: &[Pair]) {
        println!("cut {pairs:?}");
        pairs.iter().for_each(|pair| self.lead(*pair, NOWHERE));
    }

    fn heal(&self, pairs: &[Pair]) {
        pairs.iter().for_each(|pair| self.lead(*pair, pair.1));
    }
}

impl Drop for Switch {
    fn drop(&mut self) {
        for name in self.members.iter().chain([&self.name]) {
            // A member that still runs keeps its own until it ends.
            let _ = Command::new("ip").args(["netns", "del", name]).status();
        }
    }
}

/// What clients in the test's namespace connect to: the members' addresses, led to their unix sockets.
struct Doors {
    end: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Doors {
    fn open(members: &[Member]) -> Doors {
        let (end, ended) = oneshot::channel();
        let ways: Vec<(SocketAddr, PathBuf)> =
            members.iter().map(|member| (member.address().parse().unwrap(), member.socket())).collect();
        // A thread of its own: the tests block theirs while they wait for processes.
        let thread = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async move {
                for (address, socket) in ways {
                    let listener = TcpListener::bind(address).await.unwrap();
                    tokio::spawn(lead_in(listener, socket));
                }
                let _ = ended.await;
            });
        });
        Doors { end: Some(end), thread: Some(thread) }
    }
}

async fn lead_in(listener: TcpListener, socket: PathBuf) {
    while let Ok((mut near, _)) = listener.accept().await {
        let socket = socket.clone();
        tokio::spawn(async move {
            // Whoever connects to a member that is not there sees the connection end.
            let mut far = UnixStream::connect(socket).await?;
            near.set_nodelay(true)?;
            tokio::io::copy_bidirectional(&mut near, &mut far).await
        });
    }
}

impl Drop for Doors {
    fn drop(&mut self) {
        drop(self.end.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Three members on a switch, started.
fn found() -> (Cluster, Switch, Doors) {
    let switch = Switch::new(3);
    let directory = tempfile::tempdir().unwrap();
    let mut members = Vec::new();
    for (at, namespace) in switch.members.iter().enumerate() {
        let mut member = Member::new(&subdirectory(directory.path(), at));
        member.set_namespace(namespace, &format!("http://{}:2380", address(at)));
        members.push(member);
    }
    let doors = Doors::open(&members);
    let mut cluster = Cluster::of(directory, members, false);
    cluster.start_all();
    (cluster, switch, doors)
}

/// Waits until these members follow another leader than that.
async fn replaced(cluster: &Cluster, members: &[usize], leader: u64) {
    let started = now();
    'looking: loop {
        assert!(started.elapsed() < PATIENCE, "nobody takes the place of a leader that is cut off");
        sleep(Duration::from_millis(50)).await;
        for at in members {
            let status = cluster.members[*at].client().await.maintenance_client().status().await.unwrap();
            if [0, leader].contains(&status.leader()) {
                continue 'looking;
            }
        }
        return;
    }
}

/// Cuts the leader off, one way or both; the others must find another, and serve.
async fn cut_leader(
    cluster: &Cluster,
    switch: &Switch,
    load: &Load,
    ways: impl Fn(usize, &[usize]) -> Vec<Pair>,
) {
    let leader = cluster.leader().await;
    let others: Vec<usize> = (0..3).filter(|at| *at != leader).collect();
    let status = cluster.members[leader].client().await.maintenance_client().status().await.unwrap();
    let pairs = ways(leader, &others);
    switch.cut(&pairs);
    replaced(cluster, &others, status.leader()).await;
    load.goes_on(CALLS).await;
    switch.heal(&pairs);
    cluster.leader().await;
    load.goes_on(CALLS).await;
}

/// Cuts ways without which there is still a quorum around the leader; everything goes on.
async fn cut_one(
    cluster: &Cluster,
    switch: &Switch,
    load: &Load,
    ways: impl Fn(usize, &[usize]) -> Vec<Pair>,
) {
    let leader = cluster.leader().await;
    let others: Vec<usize> = (0..3).filter(|at| *at != leader).collect();
    let pairs = ways(leader, &others);
    switch.cut(&pairs);
    sleep(4 * ELECTION_TIMEOUT).await;
    load.goes_on(CALLS).await;
    switch.heal(&pairs);
    cluster.leader().await;
    load.goes_on(CALLS).await;
}

#[tokio::test]
async fn packets_lost_without_a_trace_under_load() {
    let _alone = ALONE.lock().await;
    let (cluster, switch, _doors) = found();
    let load = cluster.load();
    load.goes_on(CALLS).await;
    cut_leader(&cluster, &switch, &load, |leader, others| around(leader, others.iter().copied())).await;
    cut_leader(&cluster, &switch, &load, |leader, others| others.iter().map(|at| (leader, *at)).collect())
        .await;
    cut_leader(&cluster, &switch, &load, |leader, others| others.iter().map(|at| (*at, leader)).collect())
        .await;
    cut_one(&cluster, &switch, &load, |leader, others| vec![(leader, others[0])]).await;
    cut_one(&cluster, &switch, &load, |leader, others| vec![(others[0], leader)]).await;
    cut_one(&cluster, &switch, &load, |_, others| around(others[0], [others[1]])).await;
    cluster.check(load).await;
}
