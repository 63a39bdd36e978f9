//! The network between members: each is reached by the others through a port of ours, so that what passes from one to
//! another can be cut, delayed, slowed down and broken while they run, each way by itself.
//!
//! ```text
//! member 0 ──> port of member 1 ──> what is set for 0 -> 1 ──> member 1
//!          <── what is set for 1 -> 0 <──────────────────────
//! ```
//!
//! Whose connection it is, the kernel knows: the socket at the far end belongs to a process. A cut holds bytes and ends of
//! connections back, as a network does that loses packets which are sent again; it breaks nothing by itself.

use std::collections::BTreeMap;
use std::io;
use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4};
use std::sync::{Arc, Mutex, mpsc as sync_mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use skeg::clock::now;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::{sleep, sleep_until};

use super::PATIENCE;

const CHUNK_BYTES: usize = 16 << 10;
/// Chunks between the two ends of a way; a sender waits when there are more.
const CHUNKS_MAX: usize = 256;
/// How often a connection's process is looked for.
const SOURCE_LOOKS_MAX: usize = 50;

/// From one member to another.
pub(crate) type Pair = (usize, usize);

/// How bytes travel one way.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Way {
    /// Nothing gets through.
    pub(crate) cut: bool,
    /// How much later everything arrives.
    pub(crate) delay: Duration,
    /// As many bytes a second and no more.
    pub(crate) bytes_per_second: Option<u32>,
    /// One in so many chunks is lost, and its connection with it.
    pub(crate) loses_one_in: Option<u32>,
}

/// What went one way.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Traffic {
    /// Bytes.
    pub(crate) passed: u64,
    /// Chunks and ends of connections that had to wait at a cut.
    pub(crate) held: u64,
    /// Chunks that were delayed or slowed down.
    pub(crate) hindered: u64,
    /// Connections that were broken.
    pub(crate) broken: u64,
}

#[derive(Default)]
struct Line {
    way: Way,
    traffic: Traffic,
    /// What the connections that began since then have carried, if that is to be kept.
    recorded: Option<Vec<Vec<u8>>>,
}

struct Lines {
    lines: Mutex<BTreeMap<Pair, Line>>,
    /// Wakes whoever waits at a cut.
    changed: watch::Sender<()>,
    /// The process of each member that runs.
    processes: Mutex<BTreeMap<usize, u32>>,
}

/// The network; it goes down with the value.
pub(crate) struct Network {
    lines: Arc<Lines>,
    ports: Vec<u16>,
    end: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

/// A cut, and what had passed when it was made.
pub(crate) struct Cut {
    before: BTreeMap<Pair, Traffic>,
}

impl Network {
    /// A network in front of members that listen at these ports.
    pub(crate) fn new(targets: Vec<u16>) -> Network {
        let lines = Arc::new(Lines {
            lines: Mutex::default(),
            changed: watch::Sender::new(()),
            processes: Mutex::default(),
        });
        let (end, ended) = oneshot::channel();
        let (bound, ports) = sync_mpsc::channel();
        let serving = Arc::clone(&lines);
        // A thread of its own: the tests block theirs while they wait for processes.
        let thread = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async move {
                let mut ports = Vec::new();
                for (to, port) in targets.into_iter().enumerate() {
                    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
                    ports.push(listener.local_addr().unwrap().port());
                    tokio::spawn(serve(Arc::clone(&serving), listener, to, port));
                }
                bound.send(ports).unwrap();
                let _ = ended.await;
            });
        });
        let ports = ports.recv().expect("ports are free");
        Network { lines, ports, end: Some(end), thread: Some(thread) }
    }

    /// The URL at which the others reach a member.
    pub(crate) fn url(&self, of: usize) -> String {
        format!("http://127.0.0.1:{}", self.ports[of])
    }

    /// Says which process a member is.
    pub(crate) fn set_process(&self, of: usize, pid: u32) {
        self.lines.processes.lock().unwrap().insert(of, pid);
    }

    /// Sets how bytes travel one way.
    pub(crate) fn set(&self, pair: Pair, way: Way) {
        self.lines.lines.lock().unwrap().entry(pair).or_default().way = way;
        self.lines.changed.send_replace(());
    }

    /// What went one way so far.
    pub(crate) fn traffic(&self, pair: Pair) -> Traffic {
        self.lines.lines.lock().unwrap().get(&pair).map_or_else(Traffic::default, |line| line.traffic)
    }

    /// Lets nothing through on these ways.
    pub(crate) fn cut(&self, pairs: impl IntoIterator<Item = Pair>) -> Cut {
        let mut lines = self.lines.lines.lock().unwrap();
        let mut before = BTreeMap::new();
        for pair in pairs {
            let line = lines.entry(pair).or_default();
            line.way.cut = true;
            before.insert(pair, line.traffic);
        }
        Cut { before }
    }

    /// Keeps what connections carry that a member opens to another from now on.
    pub(crate) fn record(&self, pair: Pair) {
        self.lines.lines.lock().unwrap().entry(pair).or_default().recorded = Some(Vec::new());
    }

    /// What each of these connections has carried.
    pub(crate) fn recorded(&self, pair: Pair) -> Vec<Vec<u8>> {
        self.lines.lines.lock().unwrap().get(&pair).and_then(|line| line.recorded.clone()).unwrap_or_default()
    }

    /// Ends a cut.
    ///
    /// # Panics
    /// If something got through, or nothing tried to: then the cut was none.
    pub(crate) fn heal(&self, cut: Cut) {
        let mut lines = self.lines.lines.lock().unwrap();
        for (pair, before) in cut.before {
            let line = lines.entry(pair).or_default();
            let (passed, held) = (line.traffic.passed - before.passed, line.traffic.held - before.held);
            assert!(
                passed == 0 && held > 0,
                "{pair:?} was cut, {passed} bytes passed and {held} chunks waited"
            );
            line.way.cut = false;
        }
        drop(lines);
        self.lines.changed.send_replace(());
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        drop(self.end.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Both ways between a member and others.
pub(crate) fn around(member: usize, others: impl IntoIterator<Item = usize>) -> Vec<Pair> {
    others.into_iter().flat_map(|other| [(member, other), (other, member)]).collect()
}

impl Lines {
    fn way(&self, pair: Pair) -> Way {
        self.lines.lock().unwrap().entry(pair).or_default().way
    }

    /// Waits until a chunk may pass, and counts it.
    async fn pass(&self, pair: Pair, bytes: usize) -> io::Result<()> {
        let mut changed = self.changed.subscribe();
        let mut waited = false;
        loop {
            {
                let mut lines = self.lines.lock().unwrap();
                let Line { way, traffic, .. } = lines.entry(pair).or_default();
                if !way.cut {
                    if way.loses_one_in.is_some_and(|chunks| fastrand::u32(..chunks) == 0) {
                        traffic.broken += 1;
                        return Err(io::ErrorKind::ConnectionReset.into());
                    }
                    traffic.passed += bytes as u64;
                    traffic.hindered += u64::from(!way.delay.is_zero() || way.bytes_per_second.is_some());
                    return Ok(());
                }
                traffic.held += u64::from(!std::mem::replace(&mut waited, true));
            }
            changed.changed().await.map_err(io::Error::other)?;
        }
    }

    /// Begins the record of a connection, if there is to be one.
    fn begin_record(&self, pair: Pair) -> Option<usize> {
        let mut lines = self.lines.lock().unwrap();
        let recorded = lines.entry(pair).or_default().recorded.as_mut()?;
        recorded.push(Vec::new());
        Some(recorded.len() - 1)
    }

    fn record(&self, pair: Pair, connection: usize, bytes: &[u8]) {
        let mut lines = self.lines.lock().unwrap();
        if let Some(recorded) = &mut lines.entry(pair).or_default().recorded {
            recorded[connection].extend_from_slice(bytes);
        }
    }

    /// Which member has the far end of a connection; `None` if it has been closed there.
    async fn source(&self, far: SocketAddrV4, near: SocketAddrV4) -> Option<usize> {
        // A process that has just been started may not be known yet.
        for _ in 0..SOURCE_LOOKS_MAX {
            let inode = socket_inode(far, near)?;
            let processes = self.processes.lock().unwrap().clone();
            if let Some((member, _)) = processes.iter().find(|(_, pid)| has_open(**pid, inode)) {
                return Some(*member);
            }
            sleep(Duration::from_millis(20)).await;
        }
        None
    }
}

/// The inode of the open socket with this local and remote address.
fn socket_inode(local: SocketAddrV4, remote: SocketAddrV4) -> Option<u64> {
    let text = |address: SocketAddrV4| {
        format!("{:08X}:{:04X}", u32::from_ne_bytes(address.ip().octets()), address.port())
    };
    let (local, remote) = (text(local), text(remote));
    let table = std::fs::read_to_string("/proc/net/tcp").ok()?;
    table.lines().find_map(|line| {
        let mut fields = line.split_whitespace().skip(1);
        let is_it = fields.next() == Some(&local) && fields.next() == Some(&remote);
        if is_it { fields.nth(6)?.parse().ok().filter(|inode| *inode != 0) } else { None }
    })
}

fn has_open(pid: u32, inode: u64) -> bool {
    let socket = format!("socket:[{inode}]");
    let Ok(files) = std::fs::read_dir(format!("/proc/{pid}/fd")) else { return false };
    files
        .flatten()
        .any(|file| std::fs::read_link(file.path()).is_ok_and(|target| target.as_os_str() == &*socket))
}

async fn serve(lines: Arc<Lines>, listener: TcpListener, to: usize, port: u16) {
    while let Ok((near, _)) = listener.accept().await {
        let lines = Arc::clone(&lines);
        tokio::spawn(async move {
            // Whoever connects sees the connection end; that is all there is to tell.
            let _ = connect(&lines, near, to, port).await;
        });
    }
}

async fn connect(lines: &Lines, near: TcpStream, to: usize, port: u16) -> io::Result<()> {
    let (SocketAddr::V4(far_end), SocketAddr::V4(near_end)) = (near.peer_addr()?, near.local_addr()?) else {
        return Err(io::ErrorKind::Unsupported.into());
    };
    let Some(from) = lines.source(far_end, near_end).await else {
        return Err(io::ErrorKind::NotConnected.into());
    };
    lines.pass((from, to), 0).await?;
    let far = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).await?;
    near.set_nodelay(true)?;
    far.set_nodelay(true)?;
    let (near_reader, near_writer) = near.into_split();
    let (far_reader, far_writer) = far.into_split();
    let record = lines.begin_record((from, to));
    tokio::try_join!(
        carry(lines, (from, to), near_reader, far_writer, record),
        carry(lines, (to, from), far_reader, near_writer, None),
    )?;
    Ok(())
}

/// Carries one way of a connection until it ends.
async fn carry(
    lines: &Lines,
    pair: Pair,
    mut reader: OwnedReadHalf,
    mut writer: OwnedWriteHalf,
    record: Option<usize>,
) -> io::Result<()> {
    let (chunks, mut waiting) = mpsc::channel::<(Instant, Vec<u8>)>(CHUNKS_MAX);
    let taking = async move {
        loop {
            let mut chunk = vec![0; CHUNK_BYTES];
            let read = reader.read(&mut chunk).await?;
            chunk.truncate(read);
            if chunks.send((now(), chunk)).await.is_err() || read == 0 {
                return Ok(());
            }
        }
    };
    let giving = async {
        while let Some((arrived, chunk)) = waiting.recv().await {
            let way = lines.way(pair);
            sleep_until((arrived + way.delay).into()).await;
            if let Some(rate) = way.bytes_per_second {
                let bytes = u32::try_from(chunk.len()).unwrap_or(u32::MAX);
                sleep(Duration::from_secs_f64(f64::from(bytes) / f64::from(rate))).await;
            }
            lines.pass(pair, chunk.len()).await?;
            if chunk.is_empty() {
                writer.shutdown().await?;
            } else {
                if let Some(connection) = record {
                    lines.record(pair, connection, &chunk);
                }
                writer.write_all(&chunk).await?;
            }
        }
        Ok::<(), io::Error>(())
    };
    tokio::try_join!(taking, giving)?;
    Ok(())
}

/// A network with this process as its only member, and an echo behind it.
async fn echo() -> (Network, TcpStream) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let network = Network::new(vec![listener.local_addr().unwrap().port()]);
    network.set_process(1, std::process::id());
    tokio::spawn(async move {
        while let Ok((socket, _)) = listener.accept().await {
            let (mut reader, mut writer) = socket.into_split();
            tokio::spawn(async move { tokio::io::copy(&mut reader, &mut writer).await });
        }
    });
    let client = TcpStream::connect((Ipv4Addr::LOCALHOST, network.ports[0])).await.unwrap();
    (network, client)
}

async fn answered(client: &mut TcpStream, within: Duration) -> bool {
    let mut answer = [0; 5];
    let read = tokio::time::timeout(within, client.read_exact(&mut answer)).await;
    read.is_ok_and(|read| read.is_ok() && &answer == b"hello")
}

#[tokio::test]
async fn the_network_cuts_each_way_delays_and_breaks() {
    let short = Duration::from_millis(100);
    let (network, mut client) = echo().await;
    client.write_all(b"hello").await.unwrap();
    assert!(answered(&mut client, PATIENCE).await);
    assert_eq!((network.traffic((1, 0)).passed, network.traffic((0, 1)).passed), (5, 5));
    for pair in [(1, 0), (0, 1)] {
        let cut = network.cut([pair]);
        client.write_all(b"hello").await.unwrap();
        assert!(!answered(&mut client, short).await, "{pair:?} is cut");
        network.heal(cut);
        assert!(answered(&mut client, PATIENCE).await, "what was held comes after all");
    }
    network.set((1, 0), Way { delay: short, ..Way::default() });
    let started = now();
    client.write_all(b"hello").await.unwrap();
    assert!(answered(&mut client, PATIENCE).await);
    assert!(started.elapsed() >= short);
    network.set((1, 0), Way { bytes_per_second: Some(50), ..Way::default() });
    let started = now();
    client.write_all(b"hello").await.unwrap();
    assert!(answered(&mut client, PATIENCE).await);
    assert!(started.elapsed() >= short);
    network.set((1, 0), Way { loses_one_in: Some(1), ..Way::default() });
    client.write_all(b"hello").await.unwrap();
    assert!(!answered(&mut client, PATIENCE).await, "the connection is broken");
    let there = network.traffic((1, 0));
    assert_eq!((there.broken, there.held, there.hindered), (1, 1, 2));
}

#[tokio::test]
#[should_panic(expected = "0 chunks waited")]
async fn a_cut_that_nobody_runs_into_is_none() {
    let (network, _client) = echo().await;
    network.heal(network.cut([(1, 0)]));
}
