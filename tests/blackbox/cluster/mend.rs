//! Members whose data is damaged: they serve no keys until they have what the others have.

use std::fs::{OpenOptions, read_dir, read_to_string};
use std::os::unix::fs::FileExt;
use std::time::Duration;

use etcd_client::{
    Client, EventType, GetOptions, LeaseGrantOptions, LeaseTimeToLiveOptions, PutOptions, WatchOptions,
};
use skeg::clock::now;

use super::corrupt::with_a_corrupt_follower;
use super::diverge::{alarms, found_unmended, id_of, make_one_differ};
use super::{Cluster, PATIENCE};
use crate::http::ask;
use crate::member::Member;

const REFUSED: &str = "etcdserver: corrupt cluster";
const LEASE: i64 = 77;

/// Waits until what is asked for is so.
async fn until(what: &str, mut is_so: impl AsyncFnMut() -> bool) {
    let started = now();
    while !is_so().await {
        assert!(started.elapsed() < PATIENCE, "{what} is still to come");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

async fn read(member: &Member) -> Result<String, String> {
    let mut client = member.client().await;
    let answer = client.get("key", Some(GetOptions::new().with_serializable())).await;
    let answer = answer.map_err(|error| error.to_string())?;
    Ok(answer.kvs().first().map(|kv| kv.value_str().unwrap().to_owned()).unwrap_or_default())
}

/// How often a member's store has been replaced.
fn replacements(member: &Member) -> u64 {
    let pointer = read_to_string(member.data().join("generation")).unwrap_or_default();
    let number = pointer.lines().next().and_then(|line| line.strip_prefix("generation "));
    number.map_or(0, |number| number.parse::<u64>().unwrap() - 1)
}

/// Waits until a member has been mended and no alarm is left, and checks that it has what it should.
async fn expect_mended(cluster: &Cluster, at: usize) {
    let member = &cluster.members[at];
    until("another store", async || replacements(member) > 0).await;
    until("the end of the alarm", async || alarms(cluster, at).await.is_empty()).await;
    until("service", async || read(member).await.is_ok()).await;
    assert_eq!(read(member).await.unwrap(), "another");
    assert!(!member.data().join("damaged").exists());
    let mut client = member.client().await;
    let status = client.status().await.unwrap();
    assert!(status.errors().is_empty(), "{:?}", status.errors());
    assert!(ask(member.client_port(), "/readyz").unwrap().head.starts_with("http/1.1 200"));
    client.put("after", "v", None).await.unwrap();
    cluster.assert_equal().await;
    expect_whole_history(member).await;
}

/// Puts for as long as it is let; refusals are expected while the alarm stands.
async fn write_on(mut client: Client) {
    for number in 0.. {
        let _ = client.put(format!("busy/{}", number % 100), number.to_string(), None).await;
    }
}

/// Checks a watch and a lease through a member.
async fn expect_whole_history(member: &Member) {
    let mut client = member.client().await;
    let mut watcher = client.watch("key", Some(WatchOptions::new().with_start_revision(1))).await.unwrap();
    let mut values = Vec::new();
    while values.len() < 2 {
        let message = tokio::time::timeout(PATIENCE, watcher.message()).await.expect("events come");
        for event in message.unwrap().expect("the stream goes on").events() {
            assert_eq!(event.event_type(), EventType::Put);
            values.push(event.kv().unwrap().value_str().unwrap().to_owned());
        }
    }
    assert_eq!(values, ["value", "another"]);
    client.lease_grant(60, Some(LeaseGrantOptions::new().with_id(LEASE))).await.unwrap();
    client.put("held", "v", Some(PutOptions::new().with_lease(LEASE))).await.unwrap();
    let options = LeaseTimeToLiveOptions::new().with_keys();
    let left = client.lease_time_to_live(LEASE, Some(options)).await.unwrap();
    assert_eq!((left.granted_ttl(), left.keys()), (60, &[b"held".to_vec()][..]));
    client.lease_revoke(LEASE).await.unwrap();
    until("the end of what the lease held", async || {
        client.get("held", None).await.unwrap().kvs().is_empty()
    })
    .await;
}

#[tokio::test]
async fn a_follower_is_mended() {
    let mut cluster = Cluster::found(3);
    let wrong = make_one_differ(&mut cluster).await;
    // Entries come all the while, which the other store has to be given too; some change keys.
    let writing = tokio::spawn(write_on(cluster.members[(wrong + 1) % 3].client().await));
    expect_mended(&cluster, wrong).await;
    writing.abort();
    assert!(writing.await.is_err_and(|ended| ended.is_cancelled()), "it writes to the end");
    cluster.assert_equal().await;
    // What it has now is there after a restart.
    cluster.members[wrong].kill();
    cluster.start_all();
    assert_eq!(read(&cluster.members[wrong]).await.unwrap(), "another");
    assert_eq!(replacements(&cluster.members[wrong]), 1);
    cluster.assert_equal().await;
}

/// Waits until a member whose stored bytes were changed has been mended.
async fn expect_value(cluster: &Cluster, at: usize) {
    let member = &cluster.members[at];
    until("another store", async || replacements(member) > 0).await;
    until("the end of the alarm", async || alarms(cluster, at).await.is_empty()).await;
    until("service", async || read(member).await.is_ok()).await;
    assert_eq!(read(member).await.unwrap(), "value");
    cluster.assert_equal().await;
}

/// As bytes would that were changed on the disk together with their checksum.
#[tokio::test]
async fn a_member_that_a_check_names_is_mended() {
    let (mut cluster, corrupted) = with_a_corrupt_follower(&[("corrupt-check-time", "500ms")]).await;
    cluster.start_all();
    expect_value(&cluster, corrupted).await;
}

#[tokio::test]
async fn a_leader_makes_way_and_is_mended() {
    // Time to make it lead before a check names it.
    let (mut cluster, corrupted) = with_a_corrupt_follower(&[("corrupt-check-time", "10s")]).await;
    for member in &mut cluster.members {
        if member.runs() {
            member.stop();
        }
        let log = member.log_file();
        member.set("log-outputs", &format!("stderr,{}", log.display()));
    }
    cluster.start_all();
    let leader = cluster.leader().await;
    if leader != corrupted {
        let id = id_of(&cluster.members[corrupted]).await;
        cluster.members[leader].client().await.move_leader(id).await.unwrap();
    }
    expect_value(&cluster, corrupted).await;
    let log = read_to_string(cluster.members[corrupted].log_file()).unwrap();
    assert!(log.contains("handing leadership over, for the data here is damaged"));
}

/// Everything that a member answers from its keys, refused.
async fn expect_withheld(member: &Member) {
    let mut client = member.client().await;
    let mut refusals = vec![
        client.get("key", None).await.map(drop),
        client.get("key", Some(GetOptions::new().with_serializable())).await.map(drop),
        client.put("key", "v", None).await.map(drop),
        client.delete("key", None).await.map(drop),
        client.compact(1, None).await.map(drop),
        client.watch("key", None).await.map(drop),
        client.lease_grant(60, None).await.map(drop),
        client.lease_revoke(LEASE).await.map(drop),
        client.lease_time_to_live(LEASE, None).await.map(drop),
        client.leases().await.map(drop),
    ];
    refusals.push(match client.snapshot().await {
        Ok(mut stream) => stream.message().await.map(drop),
        Err(error) => Err(error),
    });
    for (at, refused) in refusals.into_iter().enumerate() {
        let refused = refused.expect_err(&format!("call {at} is served")).to_string();
        assert!(refused.contains(REFUSED), "call {at}: {refused}");
    }
    // What helps to see and end it is served.
    let status = client.status().await.unwrap();
    let said = "the data of this member differs from the quorum's: it does not serve keys";
    assert!(status.errors().iter().any(|error| error == said), "{:?}", status.errors());
    client.hash_kv(0).await.unwrap();
    client.member_list().await.unwrap();
    let ready = ask(member.client_port(), "/readyz").unwrap();
    assert!(ready.head.starts_with("http/1.1 503"), "{}", ready.head);
    assert!(ready.body.contains("[-]data_corruption failed: alarm activated: CORRUPT"), "{}", ready.body);
    let health = ask(member.client_port(), "/health").unwrap();
    assert!(health.body.contains("ALARM CORRUPT"), "{}", health.body);
    assert!(ask(member.client_port(), "/livez").unwrap().head.starts_with("http/1.1 200"));
}

#[tokio::test]
async fn a_member_that_must_not_be_mended_stays_out_of_service() {
    let mut cluster = found_unmended();
    let wrong = make_one_differ(&mut cluster).await;
    let watching = cluster.members[wrong].client().await.watch("key", None).await;
    let member = &cluster.members[wrong];
    until("the end of its service", async || read(member).await.is_err()).await;
    // It may have been too late to begin one.
    let refused = match watching {
        Ok(mut watcher) => loop {
            match tokio::time::timeout(PATIENCE, watcher.message()).await.expect("it ends") {
                Ok(message) => assert!(message.expect("it does not end well").created(), "an event"),
                Err(error) => break error,
            }
        },
        Err(error) => error,
    };
    assert!(refused.to_string().contains(REFUSED), "{refused}");
    until("the alarm", async || alarms(&cluster, wrong).await.len() == 1).await;
    assert_eq!(alarms(&cluster, wrong).await[0].member_id(), id_of(&cluster.members[wrong]).await);
    expect_withheld(&cluster.members[wrong]).await;
    let other = (wrong + 1) % 3;
    assert_eq!(read(&cluster.members[other]).await.unwrap(), "another", "the others go on");
    // It is known to the next start, before anything is compared.
    cluster.members[wrong].kill();
    cluster.start_all();
    assert!(read(&cluster.members[wrong]).await.unwrap_err().contains(REFUSED));
    expect_withheld(&cluster.members[wrong]).await;
    assert_eq!(replacements(&cluster.members[wrong]), 0);
    cluster.members[wrong].kill();
    cluster.members[wrong].set("skeg-mend-divergence", "true");
    cluster.start_all();
    expect_mended(&cluster, wrong).await;
}

/// Flips a bit in the middle of the largest table file of a member that runs.
fn flip(member: &Member) {
    let files = read_dir(member.data().join("store")).unwrap().map(|entry| entry.unwrap().path());
    let tables = files.filter(|path| path.extension().is_some_and(|extension| extension == "sst"));
    let path = tables.max_by_key(|path| path.metadata().unwrap().len()).unwrap();
    let file = OpenOptions::new().read(true).write(true).open(&path).unwrap();
    let middle = path.metadata().unwrap().len() / 2;
    let mut byte = [0];
    file.read_exact_at(&mut byte, middle).unwrap();
    file.write_all_at(&[byte[0] ^ 1], middle).unwrap();
}

/// A member that reads what it has every few seconds, with some megabytes in a file of which a bit has been flipped.
async fn with_a_flipped_bit(size: usize) -> (Cluster, usize) {
    let mut cluster = Cluster::prepare(size);
    for member in &mut cluster.members {
        member.set("skeg-scrub-interval", "1s");
    }
    cluster.start_all();
    let flipped = (cluster.leader().await + 1) % size;
    let mut client = cluster.members[flipped].client().await;
    let value: String = (0..900).map(|at| char::from(b'a' + u8::try_from(at * 7 % 26).unwrap())).collect();
    for number in 0..300 {
        client.put(format!("fill/{number}"), format!("{number}{value}"), None).await.unwrap();
    }
    client.put("key", "value", None).await.unwrap();
    client.put("key", "another", None).await.unwrap();
    // Settles the store: all is in one file.
    client.defragment().await.unwrap();
    flip(&cluster.members[flipped]);
    (cluster, flipped)
}

#[tokio::test]
async fn what_can_no_longer_be_read_is_found_and_mended() {
    let (cluster, flipped) = with_a_flipped_bit(3).await;
    expect_mended(&cluster, flipped).await;
}

#[tokio::test]
async fn a_flipped_bit_does_not_keep_a_member_from_starting_and_being_mended() {
    let (mut cluster, flipped) = with_a_flipped_bit(3).await;
    cluster.members[flipped].kill();
    cluster.start_all();
    expect_mended(&cluster, flipped).await;
}

#[tokio::test]
async fn a_lone_member_says_that_it_cannot_read_and_serves_what_it_can() {
    let (mut cluster, lone) = with_a_flipped_bit(1).await;
    until("the alarm", async || !alarms(&cluster, lone).await.is_empty()).await;
    for _ in 0..2 {
        let member = &cluster.members[lone];
        let mut client = member.client().await;
        let status = client.status().await.unwrap();
        let said = "stored data of this member cannot be read back";
        assert!(status.errors().iter().any(|error| error == said), "{:?}", status.errors());
        assert_eq!(read(member).await.unwrap(), "another");
        let refused = client.put("key", "v", None).await.unwrap_err().to_string();
        assert!(refused.contains(REFUSED), "{refused}");
        let everything = GetOptions::new().with_prefix();
        client.get("fill/", Some(everything)).await.expect_err("some of it is damaged");
        assert_eq!(replacements(member), 0);
        cluster.members[lone].stop();
        cluster.start_all();
    }
}
