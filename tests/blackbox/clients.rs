//! Clients that others wrote, over real transports.

use std::path::Path;
use std::process::Command;

use etcd_client::{
    Channel, Client, Compare, CompareOp, DeleteOptions, EventType, GetOptions, PutOptions, SortOrder,
    SortTarget, Txn, TxnOp, TxnOpResponse, WatchOptions,
};
use tonic::transport::Endpoint;

use crate::member::Member;

#[tokio::test]
async fn the_rust_client_over_tcp() {
    let directory = tempfile::tempdir().unwrap();
    let mut member = Member::new(directory.path());
    member.start();
    use_all(member.client().await).await;
}

#[tokio::test]
async fn the_rust_client_over_a_unix_socket() {
    let directory = tempfile::tempdir().unwrap();
    let mut member = Member::new(directory.path());
    member.start();
    let endpoint = Endpoint::from_shared(format!("unix://{}", member.socket().display())).unwrap();
    let channel = Channel::Tonic(endpoint.connect().await.unwrap());
    use_all(Client::from_channel(channel, None).await.unwrap()).await;
}

async fn use_all(mut client: Client) {
    let mut watch =
        client.watch("key/", Some(WatchOptions::new().with_prefix().with_prev_key())).await.unwrap();
    assert!(watch.message().await.unwrap().unwrap().created());

    let lease = client.lease_grant(60, None).await.unwrap().id();
    for n in 0..5 {
        let options = PutOptions::new().with_lease(lease);
        client.put(format!("key/{n}"), format!("value {n}"), Some(options)).await.unwrap();
    }
    let (mut keeper, mut kept) = client.lease_keep_alive(lease).await.unwrap();
    keeper.keep_alive().await.unwrap();
    assert_eq!(kept.message().await.unwrap().unwrap().ttl(), 60);

    let options =
        GetOptions::new().with_prefix().with_sort(SortTarget::Key, SortOrder::Descend).with_limit(2);
    let page = client.get("key/", Some(options)).await.unwrap();
    let keys: Vec<_> = page.kvs().iter().map(|kv| kv.key_str().unwrap()).collect();
    assert_eq!((keys, page.count(), page.more()), (vec!["key/4", "key/3"], 5, true));

    let txn = Txn::new()
        .when([
            Compare::version("key/0", CompareOp::Equal, 1),
            Compare::lease("key/0", CompareOp::Equal, lease),
        ])
        .and_then([TxnOp::put("key/0", "again", None), TxnOp::get("key/0", None)])
        .or_else([TxnOp::delete("key/0", None)]);
    let done = client.txn(txn).await.unwrap();
    assert!(done.succeeded());
    let responses = done.op_responses();
    let TxnOpResponse::Get(read) = &responses[1] else { panic!("{responses:?}") };
    assert_eq!((read.kvs()[0].value(), read.kvs()[0].version()), (&b"again"[..], 2));
    let revision = done.header().unwrap().revision();

    client.lease_revoke(lease).await.unwrap();
    let gone = client.delete("key/", Some(DeleteOptions::new().with_prefix())).await.unwrap();
    assert_eq!(gone.deleted(), 1, "the one that the transaction took off the lease");
    client.compact(revision, None).await.unwrap();
    let old = client.get("key/0", Some(GetOptions::new().with_revision(revision - 1))).await.unwrap_err();
    assert!(old.to_string().contains("required revision has been compacted"), "{old}");

    let mut events = Vec::new();
    while events.len() < 11 {
        for event in watch.message().await.unwrap().unwrap().events() {
            let kv = event.kv().unwrap();
            let before = event.prev_kv().map(|kv| kv.value_str().unwrap().to_owned());
            events.push((event.event_type(), kv.key_str().unwrap().to_owned(), before));
        }
    }
    assert_eq!(events[5], (EventType::Put, "key/0".to_owned(), Some("value 0".to_owned())));
    assert_eq!(events[6..10].iter().filter(|event| event.0 == EventType::Delete).count(), 4, "by the lease");
    assert_eq!(events[10], (EventType::Delete, "key/0".to_owned(), Some("again".to_owned())));

    let status = client.status().await.unwrap();
    assert!(status.version().starts_with("3.7.") && status.leader() != 0);
}

#[tokio::test]
async fn the_python_client() {
    let directory = tempfile::tempdir().unwrap();
    let mut member = Member::new(directory.path());
    member.start();
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let output = Command::new(root.join("scripts/python.sh"))
        .arg(root.join("tests/blackbox/clients.py"))
        .arg(member.address())
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{said}{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(said, "put get range txn watch lease compact: as expected\n");
}
