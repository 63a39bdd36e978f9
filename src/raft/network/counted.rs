//! Counting the bytes exchanged with each peer: bodies that count what goes through them, on the calling side ([`channel`])
//! and on the answering one.
//!
//! [`channel`]: super::channel

use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use http_body::{Frame, SizeHint};
use tonic::body::Body;
use tower_service::Service;

use super::channel::FROM;
use super::service::{Membership, PeerService};
use crate::proto::server::peer_server::PeerServer;
use crate::raft::Node;
use crate::telemetry::metrics::IntCounter;

/// A body that adds its bytes to a counter, if there is one.
pub struct CountedBody<B> {
    inner: B,
    counter: Option<IntCounter>,
}

impl<B> CountedBody<B> {
    pub(super) fn new(inner: B, counter: Option<IntCounter>) -> CountedBody<B> {
        CountedBody { inner, counter }
    }
}

impl<B: http_body::Body<Data = Bytes> + Unpin> http_body::Body for CountedBody<B> {
    type Data = Bytes;
    type Error = B::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, B::Error>>> {
        let this = self.get_mut();
        let polled = Pin::new(&mut this.inner).poll_frame(context);
        if let (Some(counter), Poll::Ready(Some(Ok(frame)))) = (&this.counter, &polled)
            && let Some(data) = frame.data_ref()
        {
            counter.inc_by(data.len() as u64);
        }
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}

/// What peers are served, counted for the peer that each call says it is from.
#[derive(Clone)]
pub struct Served {
    node: Node,
    inner: PeerServer<PeerService>,
}

impl Served {
    /// Makes the service; `members` says who is in the cluster.
    pub fn new(node: Node, members: impl Fn() -> Membership + Send + Sync + 'static) -> Served {
        Served { inner: PeerService::server(node.clone(), members), node }
    }

    /// Answers a call.
    pub async fn call<B>(mut self, request: http::Request<B>) -> http::Response<Body>
    where
        B: http_body::Body<Data = Bytes> + Send + Unpin + 'static,
        B::Error: Into<Box<dyn std::error::Error + Send + Sync>> + Send,
    {
        let from =
            request.headers().get(FROM).and_then(|from| u64::from_str_radix(from.to_str().ok()?, 16).ok());
        let link = from.and_then(|from| self.node.links.get(from));
        let Some(counters) = link.as_ref().and_then(|link| link.counters()) else {
            let Ok(response) = self.inner.call(request).await;
            return response;
        };
        let received = Some(counters.received_bytes.clone());
        let sent = Some(counters.sent_bytes.clone());
        let Ok(response) = self.inner.call(request.map(|body| CountedBody::new(body, received))).await;
        response.map(|body| Body::new(CountedBody::new(body, sent)))
    }
}

#[cfg(test)]
mod tests {
    use http_body_util::{BodyExt, Full};

    use super::*;

    #[tokio::test]
    async fn a_body_counts_what_goes_through_it() {
        let counter = IntCounter::new("bytes", "bytes").unwrap();
        for counter in [Some(counter.clone()), Some(counter.clone()), None] {
            let body = CountedBody::new(Full::new(Bytes::from_static(b"seven b")), counter);
            assert_eq!(body.collect().await.unwrap().to_bytes(), "seven b");
        }
        assert_eq!(counter.get(), 14);
    }
}
