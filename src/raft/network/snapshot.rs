//! A store's files between members; `raft/snapshot` has the two ends.
//!
//! ```text
//! sender                                   receiver
//! start: vote, last entry, offer ────────>
//!        <──────────────────────────────── held: bytes of each file, from an earlier attempt
//! piece, piece, piece ... (paced) ───────> checked, written, noted
//! end ───────────────────────────────────> synced, opened, put in place
//!        <──────────────────────────────── vote
//! ```
//!
//! Both ends hold a few pieces at most. Either may end it at any time; what has arrived is kept for the next attempt.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use openraft::async_runtime::WatchReceiver;
use tokio::sync::{OwnedMutexGuard, mpsc, watch};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Status, Streaming};
use tracing::{info, warn};

use super::channel::{Channel, addressed};
use super::links::{Link, Links};
use crate::blocking;
use crate::clock;
use crate::cluster::id::MemberId;
use crate::proto::skegpb as pb;
use crate::proto::skegpb::snapshot_chunk::Part;
use crate::proto::skegpb::snapshot_response::Result as Answer;
use crate::raft::Node;
use crate::raft::codec::{log_id_from_proto, log_id_to_proto, vote_from_proto, vote_to_proto};
use crate::raft::snapshot::{Arrival, ArrivalError, Files, Sending, Source};
use crate::raft::types::{LogId, SnapshotMeta, Vote};
use crate::storage::snapshot::{Checkpoint, FileEntry, Offer, Piece, SnapshotError, Staging};

/// Chunks between the files and the socket.
const CHUNKS_WAITING: usize = 2;
/// How long nothing may move before an attempt is given up.
const STALLED: Duration = Duration::from_secs(30);
/// How long the receiver may take to put the files in place: it syncs them first.
const SETTLING: Duration = Duration::from_secs(300);

/// Sends a checkpoint, on a connection of its own; gives the receiver's vote. `from` is what it must hold, and behind which the
/// log is kept. If it is not for Raft, `asked_for` is what it must hold instead.
pub(super) async fn send(
    link: Arc<Link>,
    vote: Vote,
    from: SnapshotMeta,
    asked_for: Option<LogId>,
    source: Arc<Source>,
    links: Arc<Links>,
) -> io::Result<Vote> {
    let under_way = link.counters().map(|counters| counters.sent_snapshots.begin());
    let mut channel = Channel::default();
    let mut client = channel.open(&link).await?;
    // Not before it can be reached: for a member that is gone nothing is kept.
    let sending = source.begin(&from);
    let (checkpoint, last) = sending.checkpoint(asked_for.or(from.last_log_id)).await?;
    let (chunks, outgoing) = mpsc::channel(CHUNKS_WAITING);
    let files = checkpoint.offer().files.iter();
    let files =
        files.map(|file| pb::SnapshotFile { name: file.name.clone(), size_bytes: file.size_bytes }).collect();
    let offer = pb::SnapshotOffer { id: Bytes::copy_from_slice(&checkpoint.offer().id), files };
    let (vote, last) = (Some(vote_to_proto(&vote)), Some(log_id_to_proto(&last)));
    let asked_for = asked_for.is_some();
    put(&chunks, Part::Start(pb::SnapshotStart { vote, last, offer: Some(offer), asked_for })).await?;
    let answered = client.install_snapshot(addressed(&link, ReceiverStream::new(outgoing))).await;
    link.note(answered.as_ref().err());
    let mut answers = answered.map_err(io::Error::other)?.into_inner();
    let held = match next_answer(&mut answers, STALLED).await? {
        Answer::Vote(vote) => return Ok(vote_from_proto(vote)),
        Answer::Held(held) => held.bytes,
    };
    let peer = MemberId::new(link.member_id());
    let (size, already) = (checkpoint.offer().size_bytes(), held.iter().sum::<u64>());
    info!(%peer, bytes = size, already, "sending a snapshot");
    let started = clock::now();
    let answer = tokio::select! {
        fed = feed(&checkpoint, &held, &sending, &chunks) => {
            fed?;
            let took = clock::now().duration_since(started);
            links.metrics().peers.snapshot_read.observe(took.as_secs_f64());
            put(&chunks, Part::End(pb::SnapshotEnd {})).await?;
            next_answer(&mut answers, SETTLING).await?
        }
        early = answers.message() => read_answer(early)?,
    };
    match answer {
        Answer::Vote(vote) => {
            info!(%peer, "a snapshot is in place");
            if let Some(under_way) = under_way {
                under_way.succeeded();
            }
            Ok(vote_from_proto(vote))
        }
        Answer::Held(_) => Err(io::Error::other("the peer says again what it holds")),
    }
}

/// Sends the files here to a member that has asked for them, which must hold everything up to `from`.
pub(super) async fn send_asked_for(node: &Node, to: u64, from: Option<LogId>) -> io::Result<()> {
    let link = node.links.get(to).ok_or_else(|| io::Error::other("no such member"))?;
    if node.damage().is_some() {
        return Err(io::Error::other("the files here are not to be trusted either"));
    }
    let here = node.position()?;
    if from.is_none() || here.last_log_id < from {
        return Err(io::Error::other("this member has not come so far"));
    }
    let vote = node.raft().metrics().borrow_watched().vote;
    let source = Arc::clone(node.source());
    let sending = send(link, vote, here, from, source, Arc::clone(&node.links));
    let sent = node.background().run(sending).await;
    sent.unwrap_or_else(|| Err(io::Error::other("the member is stopping"))).map(drop)
}

/// Sends what the receiver does not hold.
async fn feed(
    checkpoint: &Arc<Checkpoint>,
    held: &[u64],
    sending: &Sending,
    chunks: &mpsc::Sender<pb::SnapshotChunk>,
) -> io::Result<()> {
    for file in 0..checkpoint.offer().files.len() {
        let mut offset = held.get(file).copied().unwrap_or(0);
        loop {
            let source = Arc::clone(checkpoint);
            let read = blocking::spawn(move || source.read_piece(file, offset)).await;
            let Some(piece) = read.map_err(io::Error::other)?? else { break };
            offset += piece.data.len() as u64;
            sending.pace(piece.data.len()).await;
            let file = u32::try_from(piece.file).map_err(io::Error::other)?;
            let Piece { offset, crc, data, .. } = piece;
            put(chunks, Part::Piece(pb::SnapshotPiece { file, offset, data, crc })).await?;
        }
    }
    Ok(())
}

async fn put(chunks: &mpsc::Sender<pb::SnapshotChunk>, part: Part) -> io::Result<()> {
    let sent = tokio::time::timeout(STALLED, chunks.send(pb::SnapshotChunk { part: Some(part) })).await;
    match sent {
        Ok(Ok(())) => Ok(()),
        Ok(Err(_)) => Err(io::ErrorKind::BrokenPipe.into()),
        Err(_) => Err(io::Error::new(io::ErrorKind::TimedOut, "the peer does not take the snapshot")),
    }
}

async fn next_answer(answers: &mut Streaming<pb::SnapshotResponse>, within: Duration) -> io::Result<Answer> {
    let answer = tokio::time::timeout(within, answers.message()).await;
    read_answer(answer.map_err(|_| io::Error::new(io::ErrorKind::TimedOut, "the peer does not answer"))?)
}

fn read_answer(answer: Result<Option<pb::SnapshotResponse>, Status>) -> io::Result<Answer> {
    let answer = answer.map_err(io::Error::other)?.and_then(|answer| answer.result);
    answer.ok_or_else(|| io::ErrorKind::UnexpectedEof.into())
}

/// What a member keeps between attempts to send it files; the newest attempt has it.
pub(super) struct Receiving {
    attempt: watch::Sender<u64>,
    staging: Arc<tokio::sync::Mutex<Option<Staging>>>,
}

impl Default for Receiving {
    fn default() -> Receiving {
        Receiving { attempt: watch::Sender::new(0), staging: Arc::default() }
    }
}

/// An attempt's exclusive hold on what has arrived.
type Held = OwnedMutexGuard<Option<Staging>>;

/// Takes one attempt's files, in the background; answers through `answers`.
pub(super) async fn receive(
    node: Node,
    receiving: Arc<Receiving>,
    from: u64,
    chunks: Streaming<pb::SnapshotChunk>,
    answers: mpsc::Sender<Result<pb::SnapshotResponse, Status>>,
) {
    let background = Arc::clone(node.background());
    let _ = background.run(receive_there(node, receiving, from, chunks, answers)).await;
}

async fn receive_there(
    node: Node,
    receiving: Arc<Receiving>,
    from: u64,
    mut chunks: Streaming<pb::SnapshotChunk>,
    answers: mpsc::Sender<Result<pb::SnapshotResponse, Status>>,
) {
    let link = node.links.get(from);
    let counters = link.as_ref().and_then(|link| link.counters());
    let under_way = counters.map(|counters| counters.received_snapshots.begin());
    let from = MemberId::new(from);
    let outcome = attempt(&node, &receiving, from, &mut chunks, &answers).await;
    match (&outcome, under_way) {
        (Ok(_), Some(under_way)) => under_way.succeeded(),
        (Ok(_), None) => {}
        (Err(status), _) => warn!(peer = %from, reason = status.message(), "a snapshot is not taken"),
    }
    let last = outcome.map(|vote| response(Answer::Vote(vote_to_proto(&vote))));
    let _ = answers.send(last).await;
}

fn response(answer: Answer) -> pb::SnapshotResponse {
    pb::SnapshotResponse { result: Some(answer) }
}

async fn attempt(
    node: &Node,
    receiving: &Receiving,
    from: MemberId,
    chunks: &mut Streaming<pb::SnapshotChunk>,
    answers: &mpsc::Sender<Result<pb::SnapshotResponse, Status>>,
) -> Result<Vote, Status> {
    let Part::Start(start) = next_part(chunks).await? else { return Err(malformed("it does not start")) };
    let asked_for = start.asked_for;
    let (vote, last, offer) = read_start(start)?;
    let known = node.raft().metrics().borrow_watched().vote;
    if vote < known {
        return Ok(known);
    }
    let waiting = if asked_for { node.take_waiting() } else { None };
    if asked_for && waiting.is_none() {
        return Err(malformed("nobody has asked for it"));
    }
    // From here on it is the only attempt: an older one ends, whatever it waits for.
    let mut attempt = receiving.attempt.subscribe();
    receiving.attempt.send_modify(|number| *number += 1);
    attempt.mark_unchanged();
    let taken = take(node, receiving, from, last, offer, chunks, answers);
    let arrival = tokio::select! {
        arrival = taken => arrival?,
        _ = attempt.changed() => return Err(Status::aborted("another attempt has begun")),
    };
    if let Some(waiting) = waiting {
        waiting.send(arrival).map_err(|_| Status::aborted("nobody waits for it any more"))?;
        return Ok(known);
    }
    let meta = arrival.meta().clone();
    node.check_snapshot(&meta).map_err(malformed)?;
    let snapshot = openraft::storage::Snapshot { meta, snapshot: Files::Arrived(Box::new(arrival)) };
    let installed = node.raft().install_full_snapshot(vote, snapshot).await;
    Ok(installed.map_err(|fatal| Status::unavailable(fatal.to_string()))?.vote)
}

/// Takes pieces until all files are there, and opens them.
async fn take(
    node: &Node,
    receiving: &Receiving,
    from: MemberId,
    last: LogId,
    offer: Offer,
    chunks: &mut Streaming<pb::SnapshotChunk>,
    answers: &mpsc::Sender<Result<pb::SnapshotResponse, Status>>,
) -> Result<Arrival, Status> {
    let generations = Arc::clone(node.generations());
    let started = clock::now();
    let mut held: Held = Arc::clone(&receiving.staging).lock_owned().await;
    let (dir, size) = (generations.staging_dir(), offer.size_bytes());
    held = on_thread(move || {
        if held.as_ref().is_none_or(|staging| *staging.offer() != offer) {
            *held = None;
            *held = Some(Staging::open(dir, offer).map_err(refused)?);
        }
        Ok(held)
    })
    .await?;
    let bytes = held.as_ref().map(|staging| staging.held().to_vec()).unwrap_or_default();
    info!(peer = %from, bytes = size, already = bytes.iter().sum::<u64>(), "receiving a snapshot");
    let _ = answers.send(Ok(response(Answer::Held(pb::SnapshotHeld { bytes })))).await;
    loop {
        match next_part(chunks).await? {
            Part::Start(_) => return Err(malformed("it starts twice")),
            Part::Piece(piece) => {
                let file = usize::try_from(piece.file).map_err(malformed)?;
                let piece = Piece { file, offset: piece.offset, crc: piece.crc, data: piece.data };
                held = on_thread(move || match held.as_mut().map(|staging| staging.take(&piece)) {
                    Some(Ok(())) => Ok(held),
                    Some(Err(error)) => {
                        if matches!(error, SnapshotError::Io(_)) {
                            *held = None;
                        }
                        Err(refused(error))
                    }
                    None => Err(Status::aborted("nothing is being received")),
                })
                .await?;
            }
            Part::End(_) => break,
        }
    }
    let (store, metrics) = (node.state.store(), Arc::clone(&node.options.metrics));
    on_thread(move || {
        let staging = held.take().ok_or_else(|| Status::aborted("nothing is being received"))?;
        let refused = |error: ArrivalError| Status::data_loss(error.to_string());
        let all_there = clock::now();
        let generation = generations.admit(staging).map_err(|error| refused(error.into()))?;
        let saved = clock::now();
        metrics.peers.snapshot_sync.observe(saved.duration_since(all_there).as_secs_f64());
        metrics.peers.snapshot_save.observe(saved.duration_since(started).as_secs_f64());
        Arrival::open(&generations, generation, &store, last).map_err(refused)
    })
    .await
}

async fn on_thread<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, Status> + Send + 'static,
) -> Result<T, Status> {
    let done = blocking::spawn(work).await;
    done.map_err(|error| Status::aborted(error.to_string()))?
}

async fn next_part(chunks: &mut Streaming<pb::SnapshotChunk>) -> Result<Part, Status> {
    let chunk = tokio::time::timeout(STALLED, chunks.message()).await;
    let chunk = chunk.map_err(|_| Status::deadline_exceeded("nothing more comes"))??;
    chunk.and_then(|chunk| chunk.part).ok_or_else(|| Status::aborted("it ends early"))
}

fn read_start(start: pb::SnapshotStart) -> Result<(Vote, LogId, Offer), Status> {
    let (Some(vote), Some(last), Some(offer)) = (start.vote, start.last, start.offer) else {
        return Err(malformed("its start lacks a field"));
    };
    let files =
        offer.files.into_iter().map(|file| FileEntry { name: file.name, size_bytes: file.size_bytes });
    let id = offer.id.as_ref().try_into().map_err(|_| malformed("its id is not 16 bytes"))?;
    let (vote, last) = (vote_from_proto(vote), log_id_from_proto(last));
    if **last.committed_leader_id() > vote.leader_id().term {
        return Err(malformed("its last entry is of a later term than its sender"));
    }
    Ok((vote, last, Offer { id, files: files.collect() }))
}

fn malformed(why: impl std::fmt::Display) -> Status {
    Status::invalid_argument(format!("a snapshot is malformed: {why}"))
}

fn refused(error: SnapshotError) -> Status {
    match error {
        SnapshotError::Io(error) => Status::internal(error.to_string()),
        other => Status::data_loss(other.to_string()),
    }
}
