//! Known bytes: records that a live etcd wrote (etcd-api.md, test vectors), and the contract's corners.

use bytes::Bytes;
use prost::Message;
use prost_types::FileDescriptorSet;
use tonic::{Request, Response, Status, Streaming};

use crate::client::watch_client::WatchClient;
use crate::etcdserverpb::{
    Compare, LeaseGrantRequest, Member, RangeResponse, ResponseHeader, WatchRequest, WatchResponse, compare,
};
use crate::mvccpb::{Event, KeyValue};
use crate::server::watch_server::{Watch, WatchServer};
use crate::skegpb::{self, Command, LeaseExpire, LogEntry, command, log_entry};
use crate::wire::Encoded;

/// Checks that `message` has exactly the bytes `hex`, and that they decode to it.
fn check<M: Message + Default + PartialEq + std::fmt::Debug>(message: M, hex: &str) {
    let bytes = message.encode_to_vec();
    assert_eq!(to_hex(&bytes), hex);
    assert_eq!(M::decode(Bytes::from(bytes)).unwrap(), message);
}

fn to_hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn record(key: &'static str, create: i64, revision: i64, version: i64, value: &'static str) -> KeyValue {
    KeyValue {
        key: key.into(),
        create_revision: create,
        mod_revision: revision,
        version,
        value: value.into(),
        lease: 0,
    }
}

#[test]
fn key_value_records_of_etcd() {
    check(record("a", 2, 2, 1, "v1"), "0a01611002180220012a027631");
    check(record("b1", 3, 3, 1, "x1"), "0a0262311003180320012a027831");
    check(record("a", 2, 4, 2, "v2"), "0a01611002180420022a027632");
    check(record("a", 2, 6, 3, "v3"), "0a01611002180620032a027633");
    check(record("p2", 10, 10, 1, "2"), "0a027032100a180a20012a0132");
    let leased = KeyValue { lease: 2_324_035_718_736_983_308, ..record("c", 9, 9, 1, "lv") };
    check(leased, "0a01631009180920012a026c76308cea8ca5c4c5a8a020");
}

#[test]
fn a_tombstone_of_etcd_is_the_key_alone() {
    check(record("b1", 0, 0, 0, ""), "0a026231");
}

#[test]
fn fields_out_of_sequence_keep_their_numbers() {
    let response = WatchResponse { watch_id: 3, events: vec![Event::default()], ..Default::default() };
    check(response, "10035a00");
    let compare = Compare {
        key: "k".into(),
        range_end: "l".into(),
        target_union: Some(compare::TargetUnion::Version(0)),
        ..Default::default()
    };
    check(compare, "1a016b20008204016c");
}

#[test]
fn negative_numbers_take_ten_bytes() {
    check(LeaseGrantRequest { ttl: -1, id: 0 }, "08ffffffffffffffffff01");
}

#[test]
fn url_fields_have_words_in_their_names() {
    let member = Member { peer_urls: vec!["p".into()], client_urls: vec!["c".into()], ..Default::default() };
    check(member, "1a0170220163");
}

#[test]
fn our_records_keep_their_bytes() {
    let expire = Command {
        kind: Some(command::Kind::LeaseExpire(LeaseExpire { id: 7, term: 2 })),
        ..Default::default()
    };
    let bytes = Bytes::from(expire.encode_to_vec());
    check(expire, "5a0408071002");
    let payload = Some(log_entry::Payload::Command(bytes));
    check(LogEntry { term: 2, leader_node: 1, index: 9, payload }, "0802100118092a065a0408071002");
    let nodes =
        [9, 1].map(|id| (id, skegpb::Node { peer_urls: vec!["u".into()], ..Default::default() })).into();
    let membership = skegpb::Membership { configs: vec![skegpb::NodeSet { ids: vec![1, 9] }], nodes };
    check(membership, "0a040a0201091207080112030a01751207080912030a0175");
}

#[test]
fn encoded_is_the_message_it_stands_for() {
    let response = RangeResponse {
        header: Some(ResponseHeader { revision: 5, ..Default::default() }),
        kvs: vec![record("a", 2, 2, 1, "v1")],
        more: true,
        count: 4,
    };
    let encoded = Encoded::new(&response);
    assert_eq!(encoded.encoded_len(), response.encoded_len());
    assert_eq!(RangeResponse::decode(Bytes::from(encoded.encode_to_vec())).unwrap(), response);
    assert!(Encoded::decode(encoded.0).is_err());
    assert_eq!(Encoded::decode(Bytes::new()).unwrap(), Encoded::default());
}

/// Answers every stream with one response, encoded by hand in two parts.
struct OneEvent;

#[tonic::async_trait]
impl Watch for OneEvent {
    type WatchStream = tokio_stream::Once<Result<Encoded, Status>>;

    async fn watch(
        &self,
        _requests: Request<Streaming<WatchRequest>>,
    ) -> Result<Response<Self::WatchStream>, Status> {
        let events = vec![Event { kv: Some(record("a", 2, 2, 1, "v1")), ..Default::default() }];
        let mut bytes = WatchResponse { watch_id: 7, ..Default::default() }.encode_to_vec();
        bytes.extend(WatchResponse { events, ..Default::default() }.encode_to_vec());
        Ok(Response::new(tokio_stream::once(Ok(Encoded(bytes.into())))))
    }
}

#[test]
fn a_client_receives_what_a_server_encoded() {
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let received = runtime.block_on(async {
        let mut client = WatchClient::new(WatchServer::new(OneEvent));
        let mut responses = client.watch(tokio_stream::empty()).await.unwrap().into_inner();
        let first = responses.message().await.unwrap();
        (first, responses.message().await.unwrap())
    });
    let events = vec![Event { kv: Some(record("a", 2, 2, 1, "v1")), ..Default::default() }];
    assert_eq!(received, (Some(WatchResponse { watch_id: 7, events, ..Default::default() }), None));
}

#[test]
fn decoded_bytes_share_the_received_buffer() {
    let received = Bytes::from(record("a", 2, 2, 1, "v1").encode_to_vec());
    let decoded = KeyValue::decode(received.clone()).unwrap();
    assert!(received.as_ptr_range().contains(&decoded.value.as_ptr()));
}

#[test]
fn descriptors_hold_names_as_declared() {
    let set = FileDescriptorSet::decode(crate::FILE_DESCRIPTOR_SET).unwrap();
    let packages: std::collections::BTreeSet<_> = set.file.iter().map(|file| file.package()).collect();
    let expected =
        ["authpb", "etcdserverpb", "grpc.health.v1", "mvccpb", "skegpb", "v3electionpb", "v3lockpb"];
    assert!(packages.iter().eq(&expected), "{packages:?}");
    let mut messages = set.file.iter().flat_map(|file| &file.message_type);
    let member = messages.find(|message| message.name() == "MemberAddRequest").unwrap();
    assert_eq!(member.field[0].name(), "peerURLs");
}
