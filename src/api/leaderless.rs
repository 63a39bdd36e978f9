//! Streams whose clients want a leader: they end with an error when there has been none for long, so that the client goes to
//! another member. etcd: `monitorLeader` in `server/etcdserver/api/v3rpc/interceptor.go`.

use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use http::HeaderMap;
use http_body::{Frame, SizeHint};
use tonic::Status;
use tonic::body::Body;

use super::error::Error;

/// A response's body that ends early when the leader is lost.
struct WhileLed {
    inner: Body,
    lost: Pin<Box<dyn Future<Output = ()> + Send>>,
    ended: bool,
}

/// Ends the response's stream with "no leader" when `lost` is ready.
pub(super) fn while_led(
    response: http::Response<Body>,
    lost: impl Future<Output = ()> + Send + 'static,
) -> http::Response<Body> {
    response.map(|inner| Body::new(WhileLed { inner, lost: Box::pin(lost), ended: false }))
}

impl http_body::Body for WhileLed {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let this = self.get_mut();
        if this.ended {
            return Poll::Ready(None);
        }
        if this.lost.as_mut().poll(context).is_ready() {
            this.ended = true;
            let mut trailers = HeaderMap::new();
            Status::from(Error::NoLeader).add_header(&mut trailers)?;
            return Poll::Ready(Some(Ok(Frame::trailers(trailers))));
        }
        Pin::new(&mut this.inner).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.ended || self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use http_body_util::{BodyExt, StreamBody};
    use tokio::sync::oneshot;

    use super::*;

    #[tokio::test]
    async fn a_stream_goes_on_until_the_leader_is_lost() {
        let (lose, lost) = oneshot::channel::<()>();
        let (frames, stream) = tokio::sync::mpsc::channel::<Result<Frame<Bytes>, Status>>(4);
        let body = StreamBody::new(tokio_stream::wrappers::ReceiverStream::new(stream));
        let response = while_led(http::Response::new(Body::new(body)), async move {
            let _ = lost.await;
        });
        let mut body = response.into_body();
        frames.send(Ok(Frame::data(Bytes::from_static(b"event")))).await.expect("it is read");
        let first = body.frame().await.expect("a frame").expect("no error");
        assert_eq!(first.into_data().expect("data"), "event");
        lose.send(()).expect("it waits");
        let last = body.frame().await.expect("a frame").expect("no error");
        let trailers = last.into_trailers().expect("trailers");
        assert_eq!(trailers["grpc-status"], "14");
        assert!(body.frame().await.is_none());
    }
}
