//! The client port: gRPC over HTTP/2 and plain HTTP/1.1 on the same address.

use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use http::{HeaderValue, Response, StatusCode, Version, header};
use hyper::body::Incoming;
use hyper::service::Service;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto::Builder;
use hyper_util::server::graceful::GracefulShutdown;
use rustix::net::{AddressFamily, SocketType, sockopt};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, UnixListener};
use tokio::sync::watch;
use tonic::Status;
use tonic::body::Body;
use tracing::{debug, warn};

use super::coalesce::coalesce;
use super::pings::{Answering, Heard, Pings};
use crate::api::{Answer, ResponseBody, Services};
use crate::config::{KeepAlive, ListenAddress, ListenUrl, MemberSettings};
use crate::gateway::{Gateway, Port};
use crate::raft::Served;

/// Connections waiting to be accepted. Go's default is the system's limit, which is this on most systems.
const BACKLOG: i32 = 4096;
/// HTTP/2 window of one stream, in bytes: large watch batches must not wait for a round trip each 64 KiB.
const STREAM_WINDOW_BYTES: u32 = 1 << 20;
/// HTTP/2 window of one connection, in bytes.
const CONNECTION_WINDOW_BYTES: u32 = 4 << 20;
/// Bytes a stream may hold in HTTP/2 buffers before its sender waits.
const SEND_BUFFER_BYTES: usize = 1 << 20;
/// Time for the headers of an HTTP/1.1 request. etcd: 5 minutes.
const HEADER_TIMEOUT: Duration = Duration::from_secs(300);
/// Pause after a failed accept: out of file descriptors, for one, does not pass at once.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// A bound client address.
pub(super) struct Listener {
    url: String,
    socket: Socket,
}

enum Socket {
    Tcp(TcpListener),
    Unix(UnixListener, PathBuf),
}

/// What is behind a listener.
#[derive(Clone)]
pub(super) struct Door {
    pub(super) serves: Serves,
    pub(super) max_streams: u32,
    pub(super) keepalive: KeepAlive,
}

/// What is served.
#[derive(Clone)]
pub(super) enum Serves {
    /// gRPC and HTTP/1.1 on one port.
    Everything(Services, Gateway),
    /// gRPC alone.
    Grpc(Services),
    /// HTTP/1.1 alone.
    Http(Gateway, Port),
    /// What peers are served, and some HTTP/1.1.
    Peers(Served, Gateway),
}

/// One connection's way in.
#[derive(Clone)]
struct Guest {
    serves: Serves,
    remote: Option<SocketAddr>,
    pings: Arc<Pings>,
}

impl Listener {
    /// Binds an address.
    pub(super) fn bind(url: &ListenUrl, settings: &MemberSettings) -> anyhow::Result<Listener> {
        let text = url.url.as_str().to_owned();
        let socket = match &url.address {
            ListenAddress::Tcp(address) => {
                bind_tcp(*address, settings).map(Socket::Tcp).with_context(|| format!("listen on {text}"))?
            }
            ListenAddress::Unix(path) => {
                // A socket file left by a process that was killed would refuse the address for ever.
                let _ = std::fs::remove_file(path);
                let listener = UnixListener::bind(path).with_context(|| format!("listen on {text}"))?;
                Socket::Unix(listener, path.clone())
            }
        };
        Ok(Listener { url: text, socket })
    }

    /// The URL it was bound by.
    pub(super) fn url(&self) -> &str {
        &self.url
    }

    /// Accepts connections until told to stop, then lets them finish for a while.
    pub(super) async fn serve(self, door: Door, mut stopping: watch::Receiver<bool>, drain: Duration) {
        let graceful = GracefulShutdown::new();
        loop {
            let accepted = tokio::select! {
                accepted = self.accept(&door, &graceful) => accepted,
                _ = stopping.wait_for(|stopping| *stopping) => break,
            };
            if let Err(error) = accepted {
                warn!(%error, url = self.url, "connection not accepted");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
        if let Socket::Unix(_, path) = &self.socket {
            let _ = std::fs::remove_file(path);
        }
        if tokio::time::timeout(drain, graceful.shutdown()).await.is_err() {
            debug!(url = self.url, "connections cut off");
        }
    }

    async fn accept(&self, door: &Door, graceful: &GracefulShutdown) -> io::Result<()> {
        match &self.socket {
            Socket::Tcp(listener) => {
                let (stream, remote) = listener.accept().await?;
                stream.set_nodelay(true)?;
                door.open(stream, Some(remote), graceful);
            }
            Socket::Unix(listener, _) => {
                let (stream, _) = listener.accept().await?;
                door.open(stream, None, graceful);
            }
        }
        Ok(())
    }
}

fn bind_tcp(address: SocketAddr, settings: &MemberSettings) -> io::Result<TcpListener> {
    let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let socket = rustix::net::socket_with(
        family,
        SocketType::STREAM,
        rustix::net::SocketFlags::NONBLOCK | rustix::net::SocketFlags::CLOEXEC,
        None,
    )?;
    // What Go sets on every listener: a restart must not wait for old connections to time out.
    sockopt::set_socket_reuseaddr(&socket, true)?;
    if settings.socket_reuse_port {
        sockopt::set_socket_reuseport(&socket, true)?;
    }
    rustix::net::bind(&socket, &address)?;
    rustix::net::listen(&socket, BACKLOG)?;
    TcpListener::from_std(socket.into())
}

impl Door {
    pub(super) fn open<I>(&self, stream: I, remote: Option<SocketAddr>, graceful: &GracefulShutdown)
    where
        I: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let min_time = match self.serves {
            Serves::Peers(..) => None,
            _ => Some(self.keepalive.min_time),
        };
        let pings = Pings::new(min_time);
        let io = TokioIo::new(Heard::new(stream, Arc::clone(&pings)));
        let (io, flusher) = coalesce(io, Arc::clone(&pings));
        let builder = Builder::new(TokioExecutor::new());
        let mut builder = match self.serves {
            Serves::Everything(..) | Serves::Peers(..) => builder,
            Serves::Grpc(_) => builder.http2_only(),
            Serves::Http(..) => builder.http1_only(),
        };
        builder
            .http2()
            .timer(TokioTimer::new())
            // No gRPC server sends one, and both ends would pay for it.
            .auto_date_header(false)
            .max_concurrent_streams(self.max_streams)
            .initial_stream_window_size(STREAM_WINDOW_BYTES)
            .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
            .max_send_buf_size(SEND_BUFFER_BYTES)
            .keep_alive_interval(self.keepalive.interval)
            .keep_alive_timeout(self.keepalive.timeout.unwrap_or(Duration::from_secs(20)));
        builder.http1().timer(TokioTimer::new()).header_read_timeout(HEADER_TIMEOUT);
        let guest = Guest { serves: self.serves.clone(), remote, pings };
        let connection = builder.serve_connection(io, guest).into_owned();
        let connection = graceful.watch(connection);
        tokio::spawn(async move {
            match flusher.run(connection).await {
                Some(Ok(())) => {}
                Some(Err(error)) => debug!(%error, "connection ended"),
                None => debug!(remote = ?remote, "connection ended: too many pings"),
            }
        });
    }
}

impl Service<http::Request<Incoming>> for Guest {
    type Response = Response<Answering>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Answering>, Infallible>> + Send>>;

    fn call(&self, request: http::Request<Incoming>) -> Self::Future {
        let call = self.pings.open_call();
        let answer = self.answer(request);
        Box::pin(async move { Ok(call.lasts_with(answer.await)) })
    }
}

impl Guest {
    fn answer(&self, request: http::Request<Incoming>) -> Answer {
        let services = match &self.serves {
            Serves::Http(gateway, port) => return plain(gateway, request, *port),
            Serves::Everything(_, gateway) if request.version() != Version::HTTP_2 => {
                return plain(gateway, request, Port::Client);
            }
            Serves::Everything(services, _) | Serves::Grpc(services) => services,
            Serves::Peers(_, gateway) if request.version() != Version::HTTP_2 => {
                return plain(gateway, request, Port::Peer);
            }
            Serves::Peers(peers, _) => {
                let answer = peers.clone().call(request);
                return Box::pin(async move { answer.await.map(ResponseBody::from) });
            }
        };
        let content_type =
            request.headers().get(header::CONTENT_TYPE).map_or(b"".as_slice(), HeaderValue::as_bytes);
        let own = match grpc_content_type(content_type) {
            Ok(own) => own,
            Err(status) => {
                let response = unsupported_media_type(&status).map(ResponseBody::from);
                return Box::pin(std::future::ready(response));
            }
        };
        let answer = services.call(request, self.remote);
        match own {
            None => answer,
            Some(own) => Box::pin(async move {
                let mut answer = answer.await;
                answer.headers_mut().insert(header::CONTENT_TYPE, own);
                answer
            }),
        }
    }
}

fn plain(gateway: &Gateway, request: http::Request<Incoming>, port: Port) -> Answer {
    let gateway = gateway.clone();
    Box::pin(async move { gateway.call(request, port).await.map(ResponseBody::from) })
}

/// The content type of the answer, if it is not plain gRPC: whatever subtype is asked for, the messages are protobuf, as in etcd.
///
/// # Errors
/// The status for a request that is not gRPC.
fn grpc_content_type(asked: &[u8]) -> Result<Option<HeaderValue>, Status> {
    const GRPC: &[u8] = b"application/grpc";
    if asked == GRPC {
        return Ok(None);
    }
    let asked = asked.to_ascii_lowercase();
    match asked.strip_prefix(GRPC) {
        Some([]) => Ok(None),
        Some([b'+' | b';', subtype @ ..]) => {
            Ok(HeaderValue::from_bytes(&[GRPC, b"+", subtype].concat()).ok())
        }
        _ => {
            let asked = String::from_utf8_lossy(&asked);
            Err(Status::invalid_argument(format!("invalid gRPC request content-type \"{asked}\"")))
        }
    }
}

/// What grpc-go answers to HTTP/2 requests of another kind.
fn unsupported_media_type(status: &Status) -> Response<Body> {
    let mut response = status.clone().into_http();
    *response.status_mut() = StatusCode::UNSUPPORTED_MEDIA_TYPE;
    response
}
