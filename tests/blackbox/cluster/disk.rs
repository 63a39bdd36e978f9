//! Disks of members that stop answering.

use std::process::Command;
use std::time::Duration;

use skeg::clock::now;

use super::{Cluster, PATIENCE};
use crate::member::Member;
use crate::mount::Mount;

/// A file system whose writes wait until this is dropped.
struct Frozen<'m>(&'m Mount);

impl<'m> Frozen<'m> {
    fn new(mount: &'m Mount) -> Frozen<'m> {
        fsfreeze("--freeze", mount);
        Frozen(mount)
    }
}

impl Drop for Frozen<'_> {
    fn drop(&mut self) {
        fsfreeze("--unfreeze", self.0);
    }
}

fn fsfreeze(action: &str, mount: &Mount) {
    let done = Command::new("fsfreeze").arg(action).arg(mount.path()).status().expect("fsfreeze runs");
    assert!(done.success());
}

#[tokio::test]
async fn a_leader_whose_disk_stalls_makes_way() {
    let mounts: Vec<Mount> = (0..3).map(|_| Mount::ext4(300)).collect();
    let mut cluster = Cluster::prepare_in(mounts.iter().map(Mount::path));
    cluster.start_all();
    let leader = cluster.leader().await;
    let mut client = cluster.members[(leader + 1) % 3].client().await;
    client.put("before", "v", None).await.unwrap();
    let frozen = Frozen::new(&mounts[leader]);
    let started = now();
    // Writes go on meanwhile: the others commit.
    let mut written = 0;
    loop {
        if client.put(format!("during/{written}"), "v", None).await.is_ok() {
            written += 1;
        }
        let status = client.maintenance_client().status().await.unwrap();
        let old = status_of(&cluster.members[leader]).await;
        if status.leader() != 0 && status.leader() != old.0 {
            assert!(old.1.iter().any(|error| error.contains("waited")), "it says so: {:?}", old.1);
            break;
        }
        assert!(started.elapsed() < PATIENCE, "leadership stays where the disk does not answer");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    drop(frozen);
    client.put("after", "v", None).await.unwrap();
    cluster.leader().await;
    cluster.assert_equal().await;
}

/// A member's id and what it says is wrong with it.
async fn status_of(member: &Member) -> (u64, Vec<String>) {
    let status = member.client().await.maintenance_client().status().await.unwrap();
    (status.header().unwrap().member_id(), status.errors().to_vec())
}
