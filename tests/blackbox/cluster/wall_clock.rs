//! Wall clocks that jump by an hour change nothing: only monotonic clocks decide.
//!
//! The machine's clock is left alone: each member has a library preloaded (`wall_clock.c`) that shifts what it reads of the
//! wall clock. That the shift is there, the times in its log show.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use etcd_client::{Client, LeaseGrantOptions, WatchOptions, WatchStream};
use skeg::clock::now;
use tokio::time::{sleep, timeout};

use super::load::Load;
use super::{Cluster, PATIENCE};

/// Nobody stands for election because the machine is busy.
const ELECTION_TIMEOUT: Duration = Duration::from_secs(3);
/// All of it takes a quarter.
const WHOLE: Duration = Duration::from_secs(240);

const HOUR_SECONDS: i64 = 3600;
/// A lease that must not end; neither an hour nor two hours must count.
const LONG_SECONDS: i64 = 5000;
/// One that must, in time.
const SHORT_SECONDS: i64 = 5;
/// What a busy machine may add.
const SLACK: Duration = Duration::from_secs(20);

/// Members with wall clocks of their own.
struct Clocks {
    files: Vec<PathBuf>,
}

impl Clocks {
    /// Gives the members of a cluster that has not been started their clocks, which are right.
    fn give(cluster: &mut Cluster, directory: &Path) -> Clocks {
        let library = directory.join("wall_clock.so");
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/blackbox/cluster/wall_clock.c");
        let compiled = Command::new("cc")
            .args(["-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-o"])
            .args([&library, &source])
            .status()
            .expect("a C compiler is there, for RocksDB");
        assert!(compiled.success());
        let mut files = Vec::new();
        for (at, member) in cluster.members.iter_mut().enumerate() {
            let file = directory.join(format!("off-by-{at}"));
            File::create(&file).unwrap().write_all(&0_i64.to_ne_bytes()).unwrap();
            member.set_environment("LD_PRELOAD", library.to_str().unwrap());
            member.set_environment("SKEG_TEST_WALL_CLOCK", file.to_str().unwrap());
            files.push(file);
        }
        Clocks { files }
    }

    /// Has a member's clock be off by so much from now on.
    fn set(&self, at: usize, seconds: i64) {
        // In place: the members have the file mapped.
        let mut file = OpenOptions::new().write(true).open(&self.files[at]).unwrap();
        file.write_all(&seconds.to_ne_bytes()).unwrap();
    }
}

async fn term(cluster: &Cluster, at: usize) -> u64 {
    cluster.members[at].client().await.maintenance_client().status().await.unwrap().raft_term()
}

/// Grants a lease without keys: what the clients at work have written takes all revisions.
async fn grant(client: &mut Client, id: i64, seconds: i64) -> Instant {
    let asked = now();
    client.lease_grant(seconds, Some(LeaseGrantOptions::new().with_id(id))).await.unwrap();
    asked
}

/// Checks what is left of the long lease, which was granted or renewed then. A new leader adds an election time-out.
async fn assert_left(client: &mut Client, since: Instant) {
    let left = client.lease_time_to_live(1, None).await.unwrap().ttl();
    let passed = i64::try_from(since.elapsed().as_secs()).unwrap();
    let most = LONG_SECONDS + i64::try_from(ELECTION_TIMEOUT.as_secs()).unwrap();
    assert!((LONG_SECONDS - passed - 1..=most).contains(&left), "{left} s left after {passed}");
}

/// Waits for the next news of a watcher that nothing happened.
async fn progress(watcher: &mut WatchStream) {
    let message = timeout(PATIENCE, watcher.message()).await.expect("there is progress");
    let message = message.unwrap().expect("the watch goes on");
    assert!(message.events().is_empty() && !message.canceled(), "{message:?}");
}

/// What must go on however the clocks jump.
struct Going {
    load: Load,
    client: Client,
    watchers: Vec<WatchStream>,
    granted: Instant,
}

impl Going {
    async fn begin(cluster: &Cluster) -> Going {
        let mut client = cluster.members[0].client().await;
        let granted = grant(&mut client, 1, LONG_SECONDS).await;
        let mut watchers = Vec::new();
        for member in &cluster.members {
            let options = WatchOptions::new().with_progress_notify();
            watchers.push(member.client().await.watch("quiet", Some(options)).await.unwrap());
        }
        let mut going = Going { load: cluster.load(), client, watchers, granted };
        for watcher in &mut going.watchers {
            assert!(watcher.message().await.unwrap().unwrap().created());
        }
        going
    }

    async fn goes_on(&mut self) {
        self.load.goes_on(60).await;
        assert_left(&mut self.client, self.granted).await;
        for watcher in &mut self.watchers {
            // The first may have been on its way already.
            progress(watcher).await;
            progress(watcher).await;
        }
        let (mut keeper, mut answers) = self.client.lease_keep_alive(1).await.unwrap();
        let asked = now();
        keeper.keep_alive().await.unwrap();
        assert_eq!(answers.message().await.unwrap().unwrap().ttl(), LONG_SECONDS);
        self.granted = asked;
    }
}

#[tokio::test]
async fn wall_clocks_that_jump_by_an_hour_change_nothing() {
    let mut cluster = Cluster::prepare(3);
    let directory = tempfile::tempdir().unwrap();
    let clocks = Clocks::give(&mut cluster, directory.path());
    for member in &mut cluster.members {
        member.set("election-timeout", &ELECTION_TIMEOUT.as_millis().to_string());
        member.set("watch-progress-notify-interval", "500ms");
    }
    cluster.start_all();
    timeout(WHOLE, go_through_jumps(cluster, &clocks)).await.expect("nothing hangs");
}

async fn go_through_jumps(mut cluster: Cluster, clocks: &Clocks) {
    let leader = cluster.leader().await;
    let (follower, first_term) = ((leader + 1) % 3, term(&cluster, leader).await);
    let mut going = Going::begin(&cluster).await;
    let jumps: [(&[usize], i64); 6] = [
        (&[0, 1, 2], HOUR_SECONDS),
        (&[0, 1, 2], -HOUR_SECONDS),
        (&[leader], HOUR_SECONDS),
        (&[leader], -HOUR_SECONDS),
        (&[follower], HOUR_SECONDS),
        (&[0, 1, 2], 0),
    ];
    for (number, (members, seconds)) in (2..).zip(jumps) {
        println!("{members:?} are off by {seconds} s");
        let asked = grant(&mut going.client, number, SHORT_SECONDS).await;
        for at in members {
            clocks.set(*at, seconds);
        }
        going.goes_on().await;
        let ended = gone(&mut going.client, number).await.duration_since(asked);
        let ttl = Duration::from_secs(SHORT_SECONDS.unsigned_abs());
        assert!((ttl..ttl + SLACK).contains(&ended), "a lease of {ttl:?} ended after {ended:?}");
    }
    assert_eq!((cluster.leader().await, term(&cluster, leader).await), (leader, first_term), "nobody stood");

    // Nor does what is begun with a wrong clock: an election, a start, a lease that goes on after it.
    clocks.set(leader, -HOUR_SECONDS);
    clocks.set(follower, HOUR_SECONDS);
    cluster.members[leader].kill();
    cluster.start_all();
    cluster.leader().await;
    going.client = cluster.members[0].client().await;
    going.watchers.remove(leader);
    going.goes_on().await;
    cluster.check(going.load).await;
    let now = time_of(&cluster.members[3 - leader - follower].stop());
    let [late, fast] = [leader, follower].map(|at| time_of(&cluster.members[at].stop()));
    assert!(late < now && now < fast, "their logs have the times that they believe: {late}, {now}, {fast}");
}

/// Waits until a lease has ended; gives when.
async fn gone(client: &mut Client, id: i64) -> Instant {
    let started = now();
    while client.lease_time_to_live(id, None).await.unwrap().ttl() >= 0 {
        assert!(started.elapsed() < PATIENCE, "the lease {id} does not end");
        sleep(Duration::from_millis(20)).await;
    }
    now()
}

/// The time of a log's last line.
fn time_of(log: &str) -> String {
    let (_, time) = log.trim_end().rsplit_once("\"ts\":\"").expect("a line has its time");
    time[..19].to_owned()
}
