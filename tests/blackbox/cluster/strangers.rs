//! What does not belong on the peer port: refused, said once, nothing lost.

use std::time::Duration;

use etcd_client::GetOptions;
use skeg::proto::client::peer_client::PeerClient;
use skeg::proto::skegpb::log_entry::Payload;
use skeg::proto::skegpb::{AppendRequest, Blank, LogEntry, ReadIndexRequest, Vote, VoteRequest};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tonic::transport::Channel;
use tonic::{Code, Request, Status};

use super::copies::put_some;
use super::proxy::{Pair, around};
use super::{Cluster, PATIENCE};
use crate::member::Member;

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
