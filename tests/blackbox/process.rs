//! How the process ends, and what it tells its supervisor.

use std::os::unix::net::UnixDatagram;
use std::os::unix::process::ExitStatusExt;
use std::process::Command;
use std::time::Duration;

use rustix::process::Signal;

use crate::member::{Member, send};
use crate::programs::skeg;

#[tokio::test]
async fn a_signal_drains_it_and_then_kills_it() {
    for (signal, name) in [(Signal::TERM, "terminated"), (Signal::INT, "interrupt")] {
        let directory = tempfile::tempdir().unwrap();
        let mut member = Member::new(directory.path());
        member.start();
        member.client().await.put("kept", "1", None).await.unwrap();
        let (status, log) = member.end_by(signal);
        assert_eq!(status.signal(), Some(signal.as_raw()), "{log}");
        assert!(log.contains("received signal; shutting down") && log.contains(name), "{log}");
        assert!(log.contains("storage flushed"), "{log}");
        member.start();
        let kept = member.client().await.get("kept", None).await.unwrap();
        assert_eq!(kept.kvs()[0].value(), b"1");
    }
}

#[tokio::test]
async fn as_process_1_it_exits_with_0() {
    let directory = tempfile::tempdir().unwrap();
    let mut member = Member::new(directory.path());
    let mut unshare = Command::new("unshare");
    unshare.args(["--pid", "--fork", "--kill-child"]).arg(skeg());
    let ready = member.spawn(unshare);
    ready.recv_timeout(Duration::from_secs(120)).expect("it serves");
    let children = format!("/proc/{0}/task/{0}/children", member.pid());
    let children = std::fs::read_to_string(children).expect("unshare has a child");
    send(children.trim().parse().expect("one child"), Signal::TERM);
    let (status, log) = member.wait();
    assert_eq!(status.code(), Some(0), "{log}");
    assert!(log.contains("storage flushed"), "{log}");
}

#[tokio::test]
async fn systemd_hears_when_it_is_ready() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("notify");
    let socket = UnixDatagram::bind(&path).unwrap();
    socket.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    let mut member = Member::new(directory.path());
    member.set_environment("NOTIFY_SOCKET", path.to_str().unwrap());
    member.start();
    let mut buffer = [0; 64];
    let length = socket.recv(&mut buffer).unwrap();
    assert_eq!(buffer[..length].trim_ascii(), b"READY=1");
}

#[tokio::test]
async fn a_second_process_on_the_same_data_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let mut member = Member::new(directory.path());
    member.start();
    let mut client = member.client().await;
    client.put("a", "1", None).await.unwrap();
    let mut second = Member::new(&directory.path().join("second"));
    std::fs::create_dir(directory.path().join("second")).unwrap();
    second.set("data-dir", directory.path().join("data").to_str().unwrap());
    let refused = second.start_refused();
    assert_eq!(refused.code, Some(1), "{}", refused.stderr);
    assert!(refused.stderr.contains("is in use by another process"), "{}", refused.stderr);
    client.put("a", "2", None).await.expect("the first goes on");
}

/// What a first start leaves that is killed after it has claimed its directory and before its log holds anything.
#[tokio::test]
async fn a_first_start_that_was_cut_off_is_made_again() {
    let directory = tempfile::tempdir().unwrap();
    let mut member = Member::new(directory.path());
    member.start();
    member.stop();
    std::fs::remove_dir_all(member.data().join("log")).unwrap();
    std::fs::remove_dir_all(member.data().join("store")).unwrap();
    member.start();
    member.client().await.put("a", "1", None).await.expect("it leads");
    let log = member.stop();
    assert!(log.contains("the first start was cut off: it is made again"), "{log}");
}

#[tokio::test]
async fn a_refusal_says_what_it_comes_from() {
    let directory = tempfile::tempdir().unwrap();
    let mut member = Member::new(directory.path());
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", taken.local_addr().unwrap());
    member.set("listen-metrics-urls", &url);
    let refused = member.start_refused();
    assert_eq!(refused.code, Some(1), "{}", refused.stderr);
    assert!(
        refused.stderr.contains(&format!("listen on {url}: Address already in use")),
        "{}",
        refused.stderr
    );
}
