//! A connection to a peer: HTTP/2 over TCP, opened when first needed and again after it was lost.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use http::Uri;
use hyper::body::Incoming;
use hyper::client::conn::http2::{Builder, SendRequest};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use tonic::body::Body;
use tonic::metadata::{Ascii, MetadataValue};
use tonic::{Request, Status};
use tower_service::Service;

use super::counted::CountedBody;
use super::kin::Met;
use super::links::Link;
use crate::proto::client::peer_client::PeerClient;
#[cfg(feature = "sim")]
use crate::sim::dial as connect_tcp;
use crate::telemetry::metrics::PeerCounters;

/// HTTP/2 window of one stream, in bytes: a batch of entries must not wait for a round trip each 64 KiB.
const STREAM_WINDOW_BYTES: u32 = 2 << 20;
/// HTTP/2 window of one connection, in bytes.
const CONNECTION_WINDOW_BYTES: u32 = 4 << 20;
/// Largest message between members, in bytes: a command at its largest, and what is around it.
pub(super) const MESSAGE_BYTES_MAX: usize = 1 << 30;

/// Metadata: the cluster that sender and receiver must share.
pub(super) const CLUSTER: &str = "skeg-cluster";
/// Metadata: the member that sends.
pub(super) const FROM: &str = "skeg-from";
/// Metadata: the member that is meant.
pub(super) const TO: &str = "skeg-to";
/// Metadata: which of its lives the sender is in.
pub(super) const LIFE: &str = "skeg-life";
/// Metadata: the version of this protocol.
pub(super) const PROTOCOL: &str = "skeg-protocol";
/// The version spoken here.
pub(super) const PROTOCOL_VERSION: &str = "1";

/// One connection, or none yet.
#[derive(Default)]
pub(super) struct Channel {
    open: Option<(SendRequest<Body>, Client)>,
}

/// A client of a peer's service.
pub(super) type Client = PeerClient<Opened>;

impl Channel {
    /// A client on an open connection.
    ///
    /// # Errors
    /// When none of the peer's addresses can be connected to.
    pub(super) async fn open(&mut self, link: &Link) -> io::Result<Client> {
        if let Some((sender, client)) = &self.open
            && !sender.is_closed()
        {
            return Ok(client.clone());
        }
        self.open = None;
        let (sender, client, met) = connect(link).await?;
        if let Met::Copy(_) = met {
            return Err(io::Error::other("what answers there is not the member that it was"));
        }
        link.check_level().map_err(|refusal| io::Error::other(refusal.message().to_owned()))?;
        self.open = Some((sender, client.clone()));
        Ok(client)
    }

    /// Gives up the connection; the next call opens another.
    pub(super) fn close(&mut self) {
        self.open = None;
    }
}

/// Connects to the first address of a peer that answers, and looks who does.
pub(super) async fn connect(link: &Link) -> io::Result<(SendRequest<Body>, Client, Met)> {
    let urls = link.urls();
    let mut failure = io::Error::new(io::ErrorKind::NotFound, "no peer URL is known");
    for url in &urls {
        match tokio::time::timeout(link.timeouts().connect, connect_to(url, link)).await {
            Ok(Ok(connected)) => return Ok(connected),
            Ok(Err(error)) => failure = error,
            Err(_) => failure = io::Error::new(io::ErrorKind::TimedOut, "connecting took too long"),
        }
    }
    Err(failure)
}

async fn connect_to(url: &str, link: &Link) -> io::Result<(SendRequest<Body>, Client, Met)> {
    let (mut opened, origin) = open(url, link.timeouts()).await?;
    opened.1 = link.counters().cloned();
    let sender = opened.0.clone();
    let mut client = PeerClient::with_origin(opened, origin)
        .max_decoding_message_size(MESSAGE_BYTES_MAX)
        .max_encoding_message_size(MESSAGE_BYTES_MAX);
    let met = link.meet(&mut client).await?;
    Ok((sender, client, met))
}

/// Connects to a URL for any of the generated clients, with its origin.
///
/// # Errors
/// When it cannot be connected to in time.
pub async fn dial(url: &str, within: Duration) -> io::Result<(Opened, Uri)> {
    let timeouts = Timeouts { connect: within, ping_every: within, ping_answer: within };
    tokio::time::timeout(within, open(url, timeouts)).await.map_err(io::Error::other)?
}

#[cfg(not(feature = "sim"))]
async fn connect_tcp(host: &str, port: u16) -> io::Result<tokio::net::TcpStream> {
    let socket = tokio::net::TcpStream::connect((host, port)).await?;
    socket.set_nodelay(true)?;
    Ok(socket)
}

async fn open(url: &str, timeouts: Timeouts) -> io::Result<(Opened, Uri)> {
    let origin: Uri = url.parse().map_err(io::Error::other)?;
    let authority = origin.authority().ok_or_else(|| io::Error::other("the URL names no host"))?;
    let port = authority.port_u16().unwrap_or(80);
    let host = authority.host().trim_start_matches('[').trim_end_matches(']');
    let socket = connect_tcp(host, port).await?;
    let (sender, connection) = Builder::new(TokioExecutor::new())
        .timer(TokioTimer::new())
        .initial_stream_window_size(STREAM_WINDOW_BYTES)
        .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
        // A peer that hangs keeps its sockets open: only an unanswered ping tells.
        .keep_alive_interval(timeouts.ping_every)
        .keep_alive_timeout(timeouts.ping_answer)
        .keep_alive_while_idle(true)
        .handshake(TokioIo::new(socket))
        .await
        .map_err(io::Error::other)?;
    tokio::spawn(connection);
    Ok((Opened(sender, None), origin))
}

/// How long things between members may take.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Timeouts {
    /// Opening a connection.
    pub(crate) connect: Duration,
    /// Quiet time after which a peer is asked whether it is there.
    pub(crate) ping_every: Duration,
    /// Time to answer that.
    pub(crate) ping_answer: Duration,
}

/// An open connection as tonic's clients want it, counting for a peer if it is to one.
#[derive(Clone)]
pub struct Opened(SendRequest<Body>, Option<Arc<PeerCounters>>);

impl Service<http::Request<Body>> for Opened {
    type Response = http::Response<CountedBody<Incoming>>;
    type Error = hyper::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Self::Error>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.0.poll_ready(context)
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let (sent, received) = match &self.1 {
            Some(counters) => (Some(counters.sent_bytes.clone()), Some(counters.received_bytes.clone())),
            None => (None, None),
        };
        let request = request.map(|body| Body::new(CountedBody::new(body, sent)));
        let answered = self.0.send_request(request);
        Box::pin(async move { Ok(answered.await?.map(|body| CountedBody::new(body, received))) })
    }
}

/// Says from whom and to whom a call is.
pub(super) fn addressed<T>(link: &Link, message: T) -> Request<T> {
    let mut request = Request::new(message);
    let metadata = request.metadata_mut();
    let identity = link.near().identity;
    metadata.insert(CLUSTER, hex(identity.cluster_id));
    metadata.insert(FROM, hex(identity.member_id));
    metadata.insert(TO, hex(link.member_id()));
    if let Some(kin) = &link.near().kin {
        metadata.insert(LIFE, hex(kin.life()));
    }
    metadata.insert(PROTOCOL, MetadataValue::from_static(PROTOCOL_VERSION));
    request
}

fn hex(id: u64) -> MetadataValue<Ascii> {
    MetadataValue::try_from(format!("{id:x}")).expect("hexadecimal digits are ASCII")
}

/// True for a refusal that says who may talk to whom: trying again changes nothing.
pub(super) fn is_refusal(status: &Status) -> bool {
    matches!(status.code(), tonic::Code::FailedPrecondition | tonic::Code::PermissionDenied)
}
