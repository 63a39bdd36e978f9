//! Proposing through the leader: what a follower's clients write, in few messages.
//!
//! ```text
//! proposal ─┐ batch                    ┌─ answer by id
//! proposal ─┼──────> Propose stream ───┼─> ...
//! proposal ─┘        to the leader     └─
//! ```
//!
//! One stream at a time, to whoever leads. When it breaks, what was sent and not answered is in doubt: it may stand in the
//! log or not. What was never sent is not.

use std::collections::HashMap;
use std::sync::Arc;

use bytes::Bytes;
use parking_lot::Mutex;
use tokio::sync::{mpsc, oneshot};
use tokio_stream::wrappers::ReceiverStream;
use tonic::Streaming;

use super::channel::{Channel, addressed};
use super::links::{Link, Links};
use crate::proto::skegpb::proposed_result::Status;
use crate::proto::skegpb::{ProposeRequest, ProposeResponse, ProposedCommand};

/// Proposals that may wait to be sent; their bytes are bounded where they are admitted.
const WAITING_MAX: usize = 65_536;
/// Proposals in one message.
const BATCH_MAX: usize = 1024;
/// Bytes of commands after which a message is closed.
const BATCH_BYTES: usize = 1 << 20;
/// Messages on their way to the socket.
const MESSAGES_MAX: usize = 4;

/// What the leader says of a proposal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Answer {
    /// Committed at this index.
    Committed(u64),
    /// Not in the log, and it never will be.
    NotLeader,
    /// Too much is under way at the leader.
    Overloaded,
    /// In doubt.
    Unknown,
}

struct Proposal {
    leader: u64,
    id: u64,
    command: Bytes,
    answer: oneshot::Sender<Answer>,
}

/// The handle; the loop runs until every handle is gone.
#[derive(Clone)]
pub(crate) struct Forwarder {
    proposals: mpsc::Sender<Proposal>,
}

impl Forwarder {
    /// Makes the handle and the loop, which is to be spawned.
    pub(crate) fn new(links: Arc<Links>) -> (Forwarder, impl Future<Output = ()> + Send + 'static) {
        let (proposals, queue) = mpsc::channel(WAITING_MAX);
        (Forwarder { proposals }, run(links, queue))
    }

    /// Proposes an encoded command through `leader`. May be cancelled; the command may still be committed.
    pub(crate) async fn propose(&self, leader: u64, id: u64, command: Bytes) -> Answer {
        let (answer, answered) = oneshot::channel();
        match self.proposals.try_send(Proposal { leader, id, command, answer }) {
            Ok(()) => answered.await.unwrap_or(Answer::Unknown),
            Err(mpsc::error::TrySendError::Full(_)) => Answer::Overloaded,
            Err(mpsc::error::TrySendError::Closed(_)) => Answer::NotLeader,
        }
    }
}

/// A proposal's id and who waits for what became of it.
type Waiting = (u64, oneshot::Sender<Answer>);

/// Proposals that were sent on a stream and wait for their answers; `None` once the stream has ended.
type Sent = Arc<Mutex<Option<HashMap<u64, oneshot::Sender<Answer>>>>>;

/// An open stream to a leader.
struct Route {
    leader: u64,
    nonce: u64,
    requests: mpsc::Sender<ProposeRequest>,
    sent: Sent,
}

async fn run(links: Arc<Links>, mut queue: mpsc::Receiver<Proposal>) {
    let mut channel = Channel::default();
    let mut route: Option<Route> = None;
    let mut batch = Vec::new();
    while queue.recv_many(&mut batch, BATCH_MAX).await > 0 {
        let mut rest = batch.drain(..).peekable();
        while let Some(first) = rest.peek() {
            let leader = first.leader;
            if route.as_ref().is_none_or(|route| route.leader != leader || route.requests.is_closed()) {
                route = match links.get(leader) {
                    Some(link) => open(&mut channel, &link).await,
                    None => None,
                };
            }
            let mut bytes = 0;
            let mut commands = Vec::new();
            let mut answers = Vec::new();
            while let Some(next) = rest.next_if(|next| next.leader == leader && bytes < BATCH_BYTES) {
                bytes += next.command.len();
                commands.push(ProposedCommand { id: next.id, command: next.command });
                answers.push((next.id, next.answer));
            }
            let waits = match &route {
                Some(route) => route.expect_answers(answers),
                None => Err(answers),
            };
            match (waits, &route) {
                (Ok(()), Some(route)) => {
                    route.send(ProposeRequest { commands, nonce: route.nonce }).await;
                }
                (Err(unsent), _) => {
                    for (_, answer) in unsent {
                        let _ = answer.send(Answer::NotLeader);
                    }
                    route = None;
                }
                (Ok(()), None) => {}
            }
        }
    }
}

impl Route {
    /// Notes who waits for an answer; gives them back if the stream has ended.
    fn expect_answers(&self, waiting: Vec<Waiting>) -> Result<(), Vec<Waiting>> {
        match &mut *self.sent.lock() {
            Some(sent) => {
                sent.extend(waiting);
                Ok(())
            }
            None => Err(waiting),
        }
    }

    async fn send(&self, message: ProposeRequest) {
        let Err(unsent) = self.requests.send(message).await else { return };
        let mut sent = self.sent.lock();
        let Some(sent) = &mut *sent else { return };
        for answer in unsent.0.commands.iter().filter_map(|command| sent.remove(&command.id)) {
            let _ = answer.send(Answer::NotLeader);
        }
    }
}

async fn open(channel: &mut Channel, link: &Arc<Link>) -> Option<Route> {
    // The connection is to the leader before.
    channel.close();
    let mut client = channel.open(link).await.ok()?;
    let (requests, outgoing) = mpsc::channel(MESSAGES_MAX);
    let answered = client.propose(addressed(link, ReceiverStream::new(outgoing))).await;
    link.note(answered.as_ref().err());
    let mut answers = answered.ok()?.into_inner();
    let nonce = answers.message().await.ok()??.nonce;
    let sent = Sent::new(Mutex::new(Some(HashMap::new())));
    tokio::spawn(take_answers(answers, Arc::clone(&sent)));
    Some(Route { leader: link.member_id(), nonce, requests, sent })
}

/// Hands out answers until the stream ends; what is left then is in doubt.
async fn take_answers(mut answers: Streaming<ProposeResponse>, sent: Sent) {
    while let Ok(Some(message)) = answers.message().await {
        let mut sent = sent.lock();
        let Some(sent) = &mut *sent else { return };
        for result in message.results {
            let Some(answer) = sent.remove(&result.id) else { continue };
            let _ = answer.send(match result.status() {
                Status::Committed => Answer::Committed(result.index),
                Status::NotLeader => Answer::NotLeader,
                Status::Overloaded => Answer::Overloaded,
                Status::Unknown => Answer::Unknown,
            });
        }
    }
    for (_, answer) in sent.lock().take().into_iter().flatten() {
        let _ = answer.send(Answer::Unknown);
    }
}
