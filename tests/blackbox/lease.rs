//! Leases across a restart: what was left goes on running out, and no lease ends before its time.

use std::time::Duration;

use etcd_client::{Client, LeaseGrantOptions, LeaseTimeToLiveOptions, PutOptions};
use tokio::time::sleep;

use crate::member::Member;

const TTL: i64 = 60;
const ID: i64 = 77;
/// What a new leader adds, since it does not know when the old one last looked: an election time-out, and rounding.
const GRACE: i64 = 2;

async fn granted(member: &Member) -> Client {
    let mut client = member.client().await;
    client.lease_grant(TTL, Some(LeaseGrantOptions::new().with_id(ID))).await.unwrap();
    client.put("held", "1", Some(PutOptions::new().with_lease(ID))).await.unwrap();
    client
}

async fn left(client: &mut Client) -> i64 {
    let options = LeaseTimeToLiveOptions::new().with_keys();
    let answer = client.lease_time_to_live(ID, Some(options)).await.unwrap();
    assert_eq!((answer.granted_ttl(), answer.keys()), (TTL, &[b"held".to_vec()][..]));
    answer.ttl()
}

#[tokio::test]
async fn a_clean_stop_keeps_what_is_left() {
    let directory = tempfile::tempdir().unwrap();
    let mut member = Member::new(directory.path());
    member.start();
    let mut client = granted(&member).await;
    sleep(Duration::from_secs(8)).await;
    let before = left(&mut client).await;
    assert!((50..=TTL - 8).contains(&before), "{before}");
    member.stop();
    member.start();
    let after = left(&mut member.client().await).await;
    // Draining and starting take a moment; the lease may have lost that much, and no more.
    assert!((before - 1..=before + GRACE).contains(&after), "{before} before, {after} after");
}

#[tokio::test]
async fn a_crash_loses_little_of_what_went_by() {
    let directory = tempfile::tempdir().unwrap();
    let mut member = Member::new(directory.path());
    member.start();
    let mut client = granted(&member).await;
    sleep(Duration::from_secs(10)).await;
    let before = left(&mut client).await;
    member.kill();
    member.start();
    let after = left(&mut member.client().await).await;
    // Recorded every twentieth of its time, looked at once a second.
    assert!(after >= before - 1, "never shorter than promised: {before} before, {after} after");
    assert!(after <= before + TTL / 20 + 1 + GRACE, "not simply restarted: {before} before, {after} after");
}

#[tokio::test]
async fn a_lease_runs_out_after_a_restart() {
    let directory = tempfile::tempdir().unwrap();
    let mut member = Member::new(directory.path());
    member.start();
    let mut client = member.client().await;
    client.lease_grant(3, Some(LeaseGrantOptions::new().with_id(ID))).await.unwrap();
    client.put("held", "1", Some(PutOptions::new().with_lease(ID))).await.unwrap();
    member.kill();
    member.start();
    let mut client = member.client().await;
    assert_eq!(client.get("held", None).await.unwrap().count(), 1, "it has time left");
    for _ in 0..100 {
        if client.get("held", None).await.unwrap().count() == 0 {
            return assert!(client.leases().await.unwrap().leases().is_empty());
        }
        sleep(Duration::from_millis(100)).await;
    }
    panic!("the lease did not run out");
}
