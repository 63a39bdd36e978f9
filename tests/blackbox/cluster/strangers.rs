//! What does not belong on the peer port, and members that are not what they were: refused, said once, nothing lost.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use etcd_client::GetOptions;
use rustix::process::Signal;
use skeg::clock::now;
use skeg::proto::client::peer_client::PeerClient;
use skeg::proto::skegpb::log_entry::Payload;
use skeg::proto::skegpb::{AppendRequest, Blank, LogEntry, ReadIndexRequest, Vote, VoteRequest};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::{sleep, timeout};
use tonic::transport::Channel;
use tonic::{Code, Request, Status};

use super::proxy::{Pair, around};
use super::{Cluster, ELECTION_TIMEOUT, PATIENCE};
use crate::member::{Member, send};
use crate::programs::skeg;

/// A message under some metadata.
fn request<T>(message: T, metadata: &[(&'static str, &str)]) -> Request<T> {
    let mut request = Request::new(message);
    for (name, value) in metadata {
        request.metadata_mut().insert(*name, value.parse().unwrap());
    }
    request
}

async fn peer(member: &Member) -> PeerClient<Channel> {
    let url = format!("http://127.0.0.1:{}", member.peer_port());
    PeerClient::new(Channel::from_shared(url).unwrap().connect().await.unwrap())
}

/// Sends bytes and takes what comes back until the other side has nothing more to say.
async fn throw(member: &Member, bytes: &[u8]) -> Vec<u8> {
    let mut socket = TcpStream::connect(("127.0.0.1", member.peer_port())).await.unwrap();
    // It may hang up in the middle.
    let _ = socket.write_all(bytes).await;
    let mut answer = Vec::new();
    let _ = timeout(Duration::from_millis(300), socket.read_to_end(&mut answer)).await;
    answer
}

#[tokio::test]
async fn nonsense_on_the_peer_port_is_refused_and_said_once() {
    let mut cluster = Cluster::found(3);
    let leader = cluster.leader().await;
    let victim = &cluster.members[leader];
    let mut client = victim.client().await;
    let status = client.maintenance_client().status().await.unwrap();
    let header = status.header().unwrap();
    let (cluster_id, member_id) = (format!("{:x}", header.cluster_id()), format!("{:x}", header.member_id()));
    for _ in 0..3 {
        throw(victim, &[0; 4096]).await;
        throw(victim, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\nnot a frame at all, and then some").await;
        let answer = throw(victim, b"GET /raft HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").await;
        assert!(!answer.starts_with(b"HTTP/1.1 200"), "{:?}", String::from_utf8_lossy(&answer));
    }
    let good = [
        ("skeg-cluster", &*cluster_id),
        ("skeg-from", "77"),
        ("skeg-to", &member_id),
        ("skeg-protocol", "1"),
    ];
    let bad: [(&str, &str, &str); 5] = [
        ("skeg-cluster", "5", "cluster ID mismatch"),
        ("skeg-to", "5", "the member here is"),
        ("skeg-protocol", "99", "peer protocol 99 is not spoken here"),
        ("skeg-from", "xyz", "skeg-from is no id"),
        ("skeg-from", "", "skeg-from is no id"),
    ];
    let mut peer = peer(victim).await;
    for (number, (name, value, expected)) in bad.into_iter().enumerate() {
        let from = format!("10{number}");
        let mut metadata = good.to_vec();
        metadata[1].1 = &from;
        metadata.iter_mut().filter(|(field, _)| *field == name).for_each(|(_, field)| *field = value);
        for _ in 0..3 {
            let refused = peer.read_index(request(ReadIndexRequest {}, &metadata)).await.unwrap_err();
            assert!(refused.message().contains(expected), "{refused:?}");
            assert!(matches!(refused.code(), Code::FailedPrecondition | Code::PermissionDenied));
        }
    }
    let refused = peer.read_index(request(ReadIndexRequest {}, &[])).await.unwrap_err();
    assert!(refused.message().contains("not a peer"), "{refused:?}");
    malformed_messages(&mut peer, &good).await;
    client.put("key", "v", None).await.unwrap();
    cluster.leader().await;
    cluster.assert_equal().await;
    let log = cluster.members[leader].stop();
    assert!(!log.contains("panicked"), "{log}");
    let said: Vec<&str> = log.lines().filter(|line| line.contains("refused a peer")).collect();
    for (_, _, expected) in &bad {
        assert!(said.iter().any(|line| line.contains(expected)), "{expected} is not in {said:#?}");
    }
    assert!(said.len() <= bad.len() + 1, "each is said once: {said:#?}");
}

/// Messages that are read and make no sense.
async fn malformed_messages(peer: &mut PeerClient<Channel>, metadata: &[(&'static str, &str)]) {
    let vote = Some(Vote { term: 1, node_id: 77, committed: true });
    let entry = |index| LogEntry { term: 1, leader_node: 77, index, payload: Some(Payload::Blank(Blank {})) };
    let appends = [
        AppendRequest::default(),
        AppendRequest { vote, entries: vec![entry(5), entry(9)], ..AppendRequest::default() },
        AppendRequest { vote, entries: vec![LogEntry::default()], ..AppendRequest::default() },
    ];
    for append in appends {
        let answers = peer.append(request(futures::stream::iter([append.clone()]), metadata)).await;
        let answer = match answers {
            Ok(mut answers) => timeout(PATIENCE, answers.get_mut().message()).await.unwrap(),
            Err(status) => Err(status),
        };
        assert!(matches!(answer, Ok(None) | Err(_)), "{append:?} was answered: {answer:?}");
    }
    let refused: Status = peer.ask_vote(request(VoteRequest::default(), metadata)).await.unwrap_err();
    assert_eq!(refused.code(), Code::InvalidArgument);
}

/// All that members have sent to each other, sent once more.
#[tokio::test]
async fn replayed_bytes_change_nothing() {
    let mut cluster = Cluster::prepare_with_network(3);
    let pairs: Vec<Pair> = [around(0, [1, 2]), around(1, [2])].concat();
    for pair in &pairs {
        cluster.network().record(*pair);
    }
    cluster.start_all();
    let follower = (cluster.leader().await + 1) % 3;
    let mut client = cluster.members[follower].client().await;
    put_some(&mut client, "replayed").await;
    let current = client.get("x", None).await.unwrap().header().unwrap().revision();
    let mut replayed = 0;
    for pair in pairs {
        for bytes in cluster.network().recorded(pair) {
            replayed += bytes.len();
            throw(&cluster.members[pair.1], &bytes).await;
        }
    }
    assert!(replayed > 5_000, "there was something to replay: {replayed}");
    let after = client.get("replayed/", Some(GetOptions::new().with_prefix())).await.unwrap();
    let versions: Vec<i64> = after.kvs().iter().map(etcd_client::KeyValue::version).collect();
    assert_eq!(versions, [1; 20], "something was done twice");
    assert_eq!(after.header().unwrap().revision(), current);
    client.put("last", "v", None).await.unwrap();
    cluster.assert_equal().await;
}

fn copy(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let target = to.join(entry.file_name());
        if entry.file_type().unwrap().is_dir() {
            copy(&entry.path(), &target);
        } else {
            std::fs::copy(entry.path(), target).unwrap();
        }
    }
}

async fn put_some(client: &mut etcd_client::Client, prefix: &str) {
    for key in 0..20 {
        client.put(format!("{prefix}/{key}"), "v", None).await.unwrap();
    }
}

/// Gives a member the directory back that it had earlier, and what it acknowledged since to nobody.
struct OldCopy {
    member: usize,
    data: std::path::PathBuf,
    old: std::path::PathBuf,
}

impl OldCopy {
    /// Takes the copy; the member runs again afterwards.
    fn take(cluster: &mut Cluster, member: usize) -> OldCopy {
        let data = cluster.members[member].data_dir();
        let old = data.with_extension("old");
        cluster.members[member].stop();
        copy(&data, &old);
        cluster.start_all();
        OldCopy { member, data, old }
    }

    /// Starts the member with it, without waiting.
    fn restore(&self, cluster: &mut Cluster) {
        cluster.members[self.member].stop();
        std::fs::remove_dir_all(&self.data).unwrap();
        copy(&self.old, &self.data);
        drop(cluster.members[self.member].spawn(Command::new(skeg())));
    }
}

/// Three members whose leader stays, however busy the machine is.
fn steady() -> Cluster {
    let mut cluster = Cluster::prepare(3);
    for member in &mut cluster.members {
        member.set("election-timeout", "5000");
    }
    cluster.start_all();
    cluster
}

/// It must end by itself, for the reason that it has forgotten something.
async fn ends_forgetful(member: &mut Member) {
    assert!(member.ends_within(PATIENCE).await, "it goes on with what it has forgotten");
    let (status, log) = member.wait();
    assert_eq!(status.code(), Some(1), "{log}");
    assert!(log.contains("has forgotten") && !log.contains("panicked"), "{log}");
}

#[tokio::test]
async fn a_member_with_an_old_copy_of_its_directory_is_refused() {
    let mut cluster = steady();
    let leader = cluster.leader().await;
    let forgetful = (leader + 1) % 3;
    let mut client = cluster.members[leader].client().await;
    put_some(&mut client, "old").await;
    let old = OldCopy::take(&mut cluster, forgetful);
    put_some(&mut client, "new").await;
    old.restore(&mut cluster);
    ends_forgetful(&mut cluster.members[forgetful]).await;
    // It may be started again and again; others are not disturbed.
    drop(cluster.members[forgetful].spawn(Command::new(skeg())));
    ends_forgetful(&mut cluster.members[forgetful]).await;
    put_some(&mut client, "after").await;
    cluster.assert_equal().await;
    replace(&mut cluster, &mut client, forgetful).await;
    let log = cluster.members[leader].stop();
    assert!(!log.contains("panicked"), "{log}");
    assert_eq!(log.matches("has forgotten").count(), 1, "said once: {log}");
}

/// The leader and the member that forgets it are the only ones with an entry. While the leader is there, the other gets it
/// back or is refused; it does not make a leader of one that never had it.
#[tokio::test]
async fn what_a_member_has_forgotten_is_not_voted_away() {
    let mut cluster = Cluster::found(3);
    let leader = cluster.leader().await;
    let (forgetful, lagging) = ((leader + 1) % 3, (leader + 2) % 3);
    let mut client = cluster.members[leader].client().await;
    put_some(&mut client, "old").await;
    let old = OldCopy::take(&mut cluster, forgetful);
    send(cluster.members[lagging].pid(), Signal::STOP);
    put_some(&mut client, "new").await;
    old.restore(&mut cluster);
    let started = now();
    while !cluster.members[forgetful].ends_within(Duration::from_millis(100)).await
        && client.put("after", "v", None).await.is_err()
    {
        assert!(started.elapsed() < PATIENCE, "it is neither refused nor brought up to date");
    }
    send(cluster.members[lagging].pid(), Signal::CONT);
    let started = now();
    let mut other = cluster.members[lagging].client().await;
    while let Err(error) = other.put("after", "v", None).await {
        assert!(started.elapsed() < PATIENCE, "{error}");
    }
    let found = other.get("new/", Some(GetOptions::new().with_prefix())).await.unwrap();
    assert_eq!(found.count(), 20, "what was acknowledged is there");
    let log = cluster.members[leader].stop();
    assert!(!log.contains("panicked"), "{log}");
}

/// Removes a member whose directory is lost or wrong, and adds a new one in its place.
async fn replace(cluster: &mut Cluster, client: &mut etcd_client::Client, at: usize) {
    let id = member_id(cluster, client, at).await;
    let started = now();
    while let Err(error) = client.member_remove(id).await {
        assert!(started.elapsed() < PATIENCE, "{error}");
        sleep(Duration::from_millis(100)).await;
    }
    let url = cluster.members[at].peer_url();
    while let Err(error) = client.member_add([url.clone()], None).await {
        assert!(started.elapsed() < PATIENCE, "{error}");
        sleep(Duration::from_millis(100)).await;
    }
    let _ = std::fs::remove_dir_all(cluster.members[at].data_dir());
    cluster.members[at].set("initial-cluster-state", "existing");
    cluster.start_all();
    cluster.leader().await;
    cluster.assert_equal().await;
}

async fn member_id(cluster: &Cluster, client: &mut etcd_client::Client, at: usize) -> u64 {
    let url = cluster.members[at].peer_url();
    let list = client.member_list().await.unwrap();
    let member = list.members().iter().find(|member| member.peer_urls().contains(&url));
    member.expect("it is a member").id()
}

/// The same with an empty directory, as after the loss of a disk.
#[tokio::test]
async fn a_member_that_lost_its_directory_is_refused_until_it_is_replaced() {
    let mut cluster = steady();
    let leader = cluster.leader().await;
    let lost = (leader + 1) % 3;
    let mut client = cluster.members[leader].client().await;
    put_some(&mut client, "key").await;
    cluster.members[lost].stop();
    std::fs::remove_dir_all(cluster.members[lost].data_dir()).unwrap();
    let refused = cluster.members[lost].start_refused();
    // By the others when it asks them, or by the leader if they were too busy to answer.
    let because = ["has already been bootstrapped", "has forgotten"];
    assert!(because.iter().any(|because| refused.stderr.contains(because)), "{}", refused.stderr);
    let _ = std::fs::remove_dir_all(cluster.members[lost].data_dir());
    cluster.members[lost].set("initial-cluster-state", "existing");
    drop(cluster.members[lost].spawn(Command::new(skeg())));
    ends_forgetful(&mut cluster.members[lost]).await;
    replace(&mut cluster, &mut client, lost).await;
}

/// A second process with a copy of a member's directory, at addresses that nobody knows.
#[tokio::test]
async fn a_second_member_with_a_copied_directory_changes_nothing() {
    let mut cluster = Cluster::found(3);
    let leader = cluster.leader().await;
    let copied = (leader + 1) % 3;
    let mut client = cluster.members[leader].client().await;
    put_some(&mut client, "before").await;
    cluster.members[copied].stop();
    let elsewhere = tempfile::tempdir().unwrap();
    copy(&cluster.members[copied].data_dir(), &elsewhere.path().join("data"));
    cluster.start_all();
    let load = cluster.load();
    load.goes_on(30).await;
    let mut second = Member::new(elsewhere.path());
    second.set("name", &super::name(copied));
    let _ready = second.spawn(Command::new(skeg()));
    sleep(3 * ELECTION_TIMEOUT).await;
    load.goes_on(60).await;
    // Nobody is led astray by it when the leader goes either.
    cluster.members[leader].kill();
    load.goes_on(60).await;
    cluster.start_all();
    cluster.leader().await;
    let (_, log) = second.kill();
    assert!(!log.contains("panicked"), "{log}");
    cluster.check(load).await;
}
