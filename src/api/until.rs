//! Streams that end before their service ends them: when there has been no leader for long and the client wants one, or when
//! this member no longer serves keys. The client goes to another member then. etcd: `monitorLeader` in
//! `server/etcdserver/api/v3rpc/interceptor.go`.

use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use http::HeaderMap;
use http_body::{Frame, SizeHint};
use tonic::Status;
use tonic::body::Body;

use super::error::Error;

/// A response's body that may end early.
struct Until {
    inner: Body,
    end: Pin<Box<dyn Future<Output = Error> + Send>>,
    ended: bool,
}

/// Ends the response's stream with the error that `end` gives, as soon as it does.
pub(super) fn until(
    response: http::Response<Body>,
    end: impl Future<Output = Error> + Send + 'static,
) -> http::Response<Body> {
    response.map(|inner| Body::new(Until { inner, end: Box::pin(end), ended: false }))
}

impl http_body::Body for Until {
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
        if let Poll::Ready(error) = this.end.as_mut().poll(context) {
            this.ended = true;
            let mut trailers = HeaderMap::new();
            Status::from(error).add_header(&mut trailers)?;
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
    async fn a_stream_goes_on_until_it_has_to_end() {
        let (lose, lost) = oneshot::channel::<()>();
        let (frames, stream) = tokio::sync::mpsc::channel::<Result<Frame<Bytes>, Status>>(4);
        let body = StreamBody::new(tokio_stream::wrappers::ReceiverStream::new(stream));
        let response = until(http::Response::new(Body::new(body)), async move {
            let _ = lost.await;
            Error::NoLeader
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
