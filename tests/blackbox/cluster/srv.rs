//! Founding by DNS records, in a network of the test's own: etcd is told the same by the same server.

use std::collections::BTreeMap;
use std::fs::File;
use std::net::UdpSocket;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::time::Duration;

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use super::{Cluster, PATIENCE, name};
use crate::member::Member;
use crate::programs::{Finished, etcd, run, skeg};

/// The domain that the records are of.
const DOMAIN: &str = "skeg.test";
/// Types of records.
const A: u16 = 1;
const SRV: u16 = 33;

/// Records by name and type.
type Zone = BTreeMap<(String, u16), Vec<Vec<u8>>>;

/// Runs a test in a network that has nothing but its own loopback.
fn in_own_network(test: impl AsyncFnOnce() + Send + 'static) {
    let ran = std::thread::spawn(|| {
        let mut holder = Holder::start();
        holder.enter();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(test());
        holder.0.kill().unwrap();
        holder.0.wait().unwrap();
    });
    ran.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
}

/// A process in a new network namespace.
struct Holder(Child);

impl Holder {
    fn start() -> Holder {
        let script = "ip link set lo up && echo up && exec sleep 600";
        let mut command = Command::new("unshare");
        command.args(["--net", "--kill-child", "sh", "-c", script]).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let mut up = [0; 3];
        std::io::Read::read_exact(child.stdout.as_mut().unwrap(), &mut up).expect("a network of its own");
        Holder(child)
    }

    /// Moves this thread, and what it starts, into the namespace.
    fn enter(&self) {
        let namespace = File::open(format!("/proc/{}/ns/net", self.0.id())).unwrap();
        move_into_link_name_space(std::os::fd::AsFd::as_fd(&namespace), Some(LinkNameSpaceType::Network))
            .unwrap();
    }
}

/// A name as messages have it.
fn encoded_name(name: &str) -> Vec<u8> {
    let mut bytes = Vec::new();
    for label in name.split('.') {
        bytes.push(u8::try_from(label.len()).unwrap());
        bytes.extend(label.as_bytes());
    }
    bytes.push(0);
    bytes
}

/// Answers questions on port 53 for as long as the process runs.
fn serve_dns(zone: Zone) {
    let socket = UdpSocket::bind("127.0.0.1:53").unwrap();
    std::thread::spawn(move || {
        let mut buffer = [0; 4096];
        while let Ok((length, from)) = socket.recv_from(&mut buffer) {
            let _ = socket.send_to(&answer(&zone, &buffer[..length]), from);
        }
    });
}

fn answer(zone: &Zone, query: &[u8]) -> Vec<u8> {
    let mut labels = Vec::new();
    let mut at = 12;
    while query[at] != 0 {
        let end = at + 1 + usize::from(query[at]);
        labels.push(String::from_utf8_lossy(&query[at + 1..end]).to_ascii_lowercase());
        at = end;
    }
    let question = &query[12..at + 5];
    let kind = u16::from_be_bytes([query[at + 1], query[at + 2]]);
    let records = zone.get(&(labels.join("."), kind)).map_or(&[][..], Vec::as_slice);
    let known = zone.keys().any(|(name, _)| *name == labels.join("."));
    let mut message = query[..2].to_vec();
    // An authoritative answer; 3 is that there is no such name.
    message.extend([0x85, if known { 0x80 } else { 0x83 }, 0, 1, 0, u8::try_from(records.len()).unwrap()]);
    message.extend([0; 4]);
    message.extend(question);
    for data in records {
        message.extend([0xc0, 12]);
        message.extend(kind.to_be_bytes());
        message.extend([0, 1, 0, 0, 0, 60]);
        message.extend(u16::try_from(data.len()).unwrap().to_be_bytes());
        message.extend(data);
    }
    message
}

/// The records that name these members, under a service.
fn records<'m>(zone: &mut Zone, service: &str, members: impl Iterator<Item = (usize, &'m Member)>) {
    for (at, member) in members {
        let target = format!("{}.{DOMAIN}", name(at));
        let mut data = [10_u16, 100, member.peer_port()].map(u16::to_be_bytes).concat();
        data.extend(encoded_name(&target));
        zone.entry((format!("_{service}._tcp.{DOMAIN}"), SRV)).or_default().push(data);
        zone.insert((target, A), vec![vec![127, 0, 0, 1]]);
    }
}

/// A command that asks the test's server for names.
fn asking_here(directory: &Path, program: &Path) -> Command {
    let resolver = directory.join("resolv.conf");
    std::fs::write(&resolver, "nameserver 127.0.0.1\noptions timeout:1 attempts:1\n").unwrap();
    let script = format!("mount --bind {} /etc/resolv.conf && exec \"$0\" \"$@\"", resolver.display());
    let mut command = Command::new("unshare");
    command.args(["--mount", "sh", "-c", &script]).arg(program);
    command
}

/// Members that are to be found in DNS. etcd takes no path for a unix socket.
fn prepare(size: usize, flags: &[(&str, &str)]) -> Cluster {
    let mut cluster = Cluster::prepare(size);
    for member in &mut cluster.members {
        let url = format!("http://{}", member.address());
        for (flag, value) in [("listen-client-urls", url.as_str()), ("initial-cluster", "")] {
            member.set(flag, value);
        }
        for (flag, value) in [("discovery-srv", DOMAIN)].iter().chain(flags) {
            member.set(flag, value);
        }
    }
    cluster
}

/// What a cluster of this program comes to: its id, and the members by name.
async fn founded(cluster: &mut Cluster, program: &Path) -> (u64, Vec<(String, u64, Vec<String>)>) {
    let directory = cluster.directory.path().to_owned();
    let ready: Vec<mpsc::Receiver<()>> =
        cluster.members.iter_mut().map(|member| member.spawn(asking_here(&directory, program))).collect();
    for ready in ready {
        ready.recv_timeout(PATIENCE).expect("the member gets ready");
    }
    let mut client = cluster.members[0].client().await;
    client.put("a", "1", None).await.unwrap();
    // A member's name is known once it has published it.
    let published = async {
        loop {
            let listed = client.cluster_client().member_list().await.unwrap();
            if listed.members().iter().all(|member| !member.client_urls().is_empty()) {
                return listed;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    let listed = tokio::time::timeout(PATIENCE, published).await.expect("all publish their names");
    let mut members: Vec<_> = listed
        .members()
        .iter()
        .map(|member| (member.name().to_owned(), member.id(), member.peer_urls().to_vec()))
        .collect();
    members.sort();
    let id = listed.header().unwrap().cluster_id();
    for member in &mut cluster.members {
        member.kill();
    }
    (id, members)
}

#[test]
fn members_find_each_other_in_dns_and_get_etcds_ids() {
    etcd();
    in_own_network(async || {
        let mut cluster = prepare(3, &[("discovery-srv-name", "blue"), ("initial-cluster-token", "t")]);
        let mut zone = Zone::new();
        records(&mut zone, "etcd-server-blue", cluster.members.iter().enumerate());
        serve_dns(zone);
        let ours = founded(&mut cluster, skeg()).await;
        let urls = |at: usize| {
            let target = format!("{}.{DOMAIN}:{}", name(at), cluster.members[at].peer_port());
            vec![format!("http://{target}")]
        };
        let found: Vec<_> = ours.1.iter().map(|(name, _, urls)| (name.clone(), urls.clone())).collect();
        assert_eq!(found, [0, 1, 2].map(|at| (name(at), urls(at))));
        for member in &cluster.members {
            std::fs::remove_dir_all(member.data_dir()).unwrap();
        }
        let theirs = founded(&mut cluster, etcd()).await;
        assert_eq!(ours, theirs);
    });
}

#[test]
fn what_dns_says_of_another_cluster_is_refused_as_etcd_refuses_it() {
    etcd();
    in_own_network(async || {
        let cases = [
            // There are no records; they are of others; the one that leads here is of the other scheme, with and without others.
            ("none", "", 0..0, "error querying DNS SRV records for _etcd-server-none "),
            ("others", "etcd-server-others", 1..2, "cannot find local etcd member \\\"m0\\\" in SRV records"),
            (
                "secure",
                "etcd-server-ssl-secure",
                0..2,
                "cannot find local etcd member \\\"m0\\\" in SRV records",
            ),
            (
                "alone",
                "etcd-server-ssl-alone",
                0..1,
                "has scheme mismatch with expected peer http://127.0.0.1:",
            ),
        ];
        let mut zone = Zone::new();
        let prepared = cases.map(|(suffix, service, listed, said)| {
            let cluster = prepare(2, &[("discovery-srv-name", suffix)]);
            records(&mut zone, service, listed.map(|at| (at, &cluster.members[at])));
            (cluster, said)
        });
        serve_dns(zone);
        for (cluster, said) in &prepared {
            let directory = cluster.directory.path();
            for program in [skeg(), etcd()] {
                let Finished { code, stderr, .. } = refused(&cluster.members[0], directory, program);
                assert_eq!(code, Some(1), "{stderr}");
                assert!(stderr.contains(*said), "{} does not say {said}:\n{stderr}", program.display());
            }
        }
    });
}

fn refused(member: &Member, directory: &Path, program: &Path) -> Finished {
    let command = asking_here(directory, program);
    let arguments = command.get_args().map(std::ffi::OsStr::to_owned).chain(member.flags());
    let path = std::env::var("PATH").unwrap_or_default();
    run(Path::new("unshare"), directory, arguments.collect::<Vec<_>>(), &[("PATH", &path)])
}
