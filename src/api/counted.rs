//! Counting calls: bodies that count the messages that go through them, and a call that counts its own end.
//!
//! ```text
//! request ─> RequestBody: messages, bytes ─> service ─> ResponseBody: messages, bytes, code of the trailers
//!            Call: started ─────────────────────────────> ended, or dropped: cancelled
//! ```
//!
//! The wrappers add fields, not allocations: tonic and hyper box what they get anyway.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::HeaderMap;
use http_body::{Frame, SizeHint};
use tonic::Status;
use tonic::body::Body;

use crate::clock;
use crate::telemetry::metrics::MethodCounters;

/// Code of a call whose client went away.
const CANCELED: usize = 1;
/// Code of an answer without a code.
const UNKNOWN: usize = 2;
/// A flag for compression, then the length.
const PREFIX_BYTES: usize = 5;

/// One call from its start to its end, which is counted once.
pub(super) struct Call {
    counters: Arc<MethodCounters>,
    started: Instant,
    ended: bool,
}

impl Call {
    /// Counts a call as started.
    pub(super) fn start(counters: Arc<MethodCounters>) -> Call {
        counters.started.inc();
        Call { counters, started: clock::now(), ended: false }
    }

    /// Time since the start.
    pub(super) fn age(&self) -> Duration {
        clock::now().duration_since(self.started)
    }

    /// The request's body, counting.
    pub(super) fn request_body<B>(&self, body: B) -> RequestBody<B> {
        RequestBody { inner: body, frames: Frames::default(), counters: Arc::clone(&self.counters) }
    }

    /// The response, counting.
    pub(super) fn response(mut self, response: http::Response<Body>) -> http::Response<ResponseBody> {
        // An error without a message has its code in the headers and no trailers.
        if let Some(code) = code(response.headers()) {
            self.end(code);
        }
        response.map(|inner| ResponseBody { inner, call: Some((self, Frames::default())) })
    }

    fn end(&mut self, code: usize) {
        if !std::mem::replace(&mut self.ended, true) {
            self.counters.ended(code, self.age());
        }
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        self.end(CANCELED);
    }
}

fn code(headers: &HeaderMap) -> Option<usize> {
    let code = headers.get("grpc-status")?.to_str().ok().and_then(|code| code.parse().ok());
    Some(code.unwrap_or(UNKNOWN))
}

/// Finds messages in a body of length-prefixed ones.
#[derive(Default)]
struct Frames {
    /// Bytes seen of the next prefix, and the length as far as it is known.
    prefix_seen: usize,
    length: u32,
    /// Bytes missing of the message.
    left: usize,
}

impl Frames {
    /// Takes in more of the body; gives the messages that began in it and the bytes of messages.
    fn feed(&mut self, mut data: &[u8]) -> (u64, u64) {
        let (mut messages, mut bytes) = (0, 0);
        while !data.is_empty() {
            if self.left > 0 {
                let part = self.left.min(data.len());
                self.left -= part;
                bytes += part as u64;
                data = &data[part..];
                continue;
            }
            let byte = u32::from(data[0]);
            data = &data[1..];
            // The first byte is the flag; it is shifted out by the four after it.
            self.length = self.length << 8 | byte;
            self.prefix_seen += 1;
            if self.prefix_seen == PREFIX_BYTES {
                self.prefix_seen = 0;
                self.left = usize::try_from(self.length).unwrap_or(usize::MAX);
                messages += 1;
            }
        }
        (messages, bytes)
    }
}

/// A request's body.
pub(super) struct RequestBody<B> {
    inner: B,
    frames: Frames,
    counters: Arc<MethodCounters>,
}

impl<B: http_body::Body<Data = Bytes> + Unpin> http_body::Body for RequestBody<B> {
    type Data = Bytes;
    type Error = B::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, B::Error>>> {
        let this = self.get_mut();
        let polled = Pin::new(&mut this.inner).poll_frame(context);
        if let Poll::Ready(Some(Ok(frame))) = &polled
            && let Some(data) = frame.data_ref()
        {
            let (messages, bytes) = this.frames.feed(data);
            this.counters.received.inc_by(messages);
            this.counters.received_bytes.inc_by(bytes);
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

/// A response's body.
pub struct ResponseBody {
    inner: Body,
    call: Option<(Call, Frames)>,
}

impl From<Body> for ResponseBody {
    /// A body that nobody counts.
    fn from(inner: Body) -> ResponseBody {
        ResponseBody { inner, call: None }
    }
}

impl http_body::Body for ResponseBody {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let this = self.get_mut();
        let polled = Pin::new(&mut this.inner).poll_frame(context);
        let (Some((call, frames)), Poll::Ready(ready)) = (&mut this.call, &polled) else { return polled };
        match ready {
            Some(Ok(frame)) => {
                if let Some(data) = frame.data_ref() {
                    let (messages, bytes) = frames.feed(data);
                    call.counters.sent.inc_by(messages);
                    call.counters.sent_bytes.inc_by(bytes);
                } else if let Some(trailers) = frame.trailers_ref() {
                    call.end(code(trailers).unwrap_or(UNKNOWN));
                }
            }
            Some(Err(status)) => call.end(usize::try_from(i32::from(status.code())).unwrap_or(UNKNOWN)),
            None => call.end(UNKNOWN),
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

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use http_body_util::{BodyExt, Full};

    use super::*;
    use crate::telemetry::metrics::{MethodKind, Metrics};

    /// Two messages of 3 and 0 bytes.
    const TWO: [u8; 13] = [0, 0, 0, 0, 3, b'a', b'b', b'c', 1, 0, 0, 0, 0];

    fn counters(metrics: &Metrics) -> Arc<MethodCounters> {
        Arc::new(metrics.grpc.method(MethodKind::Unary, "s.S", "M"))
    }

    fn handled(metrics: &Metrics, code: &str) -> String {
        let wanted = format!("grpc_code=\"{code}\"");
        let text = metrics.text();
        let line =
            text.lines().find(|line| line.starts_with("grpc_server_handled_total") && line.contains(&wanted));
        line.and_then(|line| line.rsplit(' ').next()).unwrap().to_owned()
    }

    #[test]
    fn messages_are_found_however_the_body_is_cut() {
        for cut in 0..=TWO.len() {
            let mut frames = Frames::default();
            let (first, second) = TWO.split_at(cut);
            let (a, b) = (frames.feed(first), frames.feed(second));
            assert_eq!((a.0 + b.0, a.1 + b.1), (2, 3), "cut at {cut}");
        }
    }

    #[tokio::test]
    async fn a_call_counts_what_went_through_it_and_its_code() {
        let metrics = Metrics::new(false);
        let counters = counters(&metrics);
        let call = Call::start(Arc::clone(&counters));
        let received = call.request_body(Full::new(Bytes::from_static(&TWO))).collect().await.unwrap();
        assert_eq!(received.to_bytes(), &TWO[..]);
        let mut trailers = HeaderMap::new();
        trailers.insert("grpc-status", http::HeaderValue::from_static("11"));
        let body = Full::new(Bytes::from_static(&TWO)).with_trailers(async move { Some(Ok(trailers)) });
        let response = call.response(http::Response::new(Body::new(body)));
        response.into_body().collect().await.unwrap();
        assert_eq!((counters.started.get(), counters.received.get(), counters.sent.get()), (1, 2, 2));
        assert_eq!((counters.received_bytes.get(), counters.sent_bytes.get()), (3, 3));
        assert_eq!(
            (handled(&metrics, "OutOfRange"), handled(&metrics, "Canceled")),
            ("1".into(), "0".into())
        );
    }

    #[test]
    fn a_refusal_and_a_client_that_went_away_are_counted_once() {
        let metrics = Metrics::new(false);
        let counters = counters(&metrics);
        drop(Call::start(Arc::clone(&counters)).response(Status::unavailable("no").into_http()));
        assert_eq!(
            (handled(&metrics, "Unavailable"), handled(&metrics, "Canceled")),
            ("1".into(), "0".into())
        );
        drop(Call::start(Arc::clone(&counters)));
        drop(Call::start(counters).response(http::Response::new(Body::empty())));
        assert_eq!(handled(&metrics, "Canceled"), "2");
    }
}
