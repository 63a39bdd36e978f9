//! Unary calls without the general machinery: the hot path of puts, reads and transactions.
//!
//! A unary call is one length-prefixed message each way and a trailer. Reading and writing that by hand costs a third of
//! what a general codec costs, and lets a large answer be sent while it is still being read from the store:
//!
//! ```text
//! 0 | length (4 bytes, big-endian) | message ...     then the trailers: grpc-status, grpc-message
//! ```
//!
//! Requests compressed with gzip are read as well, as etcd does; answers are never compressed.

use std::io::Read;
use std::pin::Pin;
use std::task::{Context as TaskContext, Poll};

use bytes::{Buf, BufMut, Bytes, BytesMut};
use http::{HeaderMap, HeaderValue, Response, header};
use http_body::{Body as HttpBody, Frame};
use http_body_util::BodyExt;
use prost::Message;
use tokio::sync::mpsc;
use tonic::Status;
use tonic::body::Body;

use super::grpc_go;

/// Flag and length in front of a message.
const PREFIX_BYTES: usize = 5;

/// Reads and decodes the one message of a request.
///
/// # Errors
/// In the code and words of grpc-go: too large, cut short, compressed, not decodable.
pub(super) async fn read<T, B>(headers: &HeaderMap, body: B, max_bytes: usize) -> Result<T, Status>
where
    T: Message + Default,
    B: HttpBody + Send,
    B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    let gzip = accepts_gzip(headers)?;
    let mut body = std::pin::pin!(body);
    let mut whole = Bytes::new();
    let mut parts = BytesMut::new();
    while let Some(frame) = body.as_mut().frame().await {
        let frame = frame.map_err(|error| Status::cancelled(error.into().to_string()))?;
        let Ok(mut data) = frame.into_data() else { continue };
        let data = data.copy_to_bytes(data.remaining());
        if whole.is_empty() && parts.is_empty() {
            whole = data;
        } else {
            parts.extend_from_slice(&std::mem::take(&mut whole));
            parts.extend_from_slice(&data);
        }
        let so_far: &[u8] = if parts.is_empty() { &whole } else { &parts };
        if let Some(length) = check_length(so_far, max_bytes)? {
            let wanted = PREFIX_BYTES + length;
            if so_far.len() >= wanted {
                // What follows the one message is not looked at, as in grpc-go.
                break;
            }
            parts.reserve(if parts.is_empty() { 0 } else { wanted - parts.len() });
        }
    }
    let mut whole = if parts.is_empty() { whole } else { parts.freeze() };
    if whole.len() < PREFIX_BYTES {
        return Err(grpc_go::no_message());
    }
    let length = check_length(&whole, max_bytes)?.unwrap_or_default();
    if whole.len() < PREFIX_BYTES + length {
        return Err(grpc_go::cut_short());
    }
    whole.truncate(PREFIX_BYTES + length);
    let compressed = whole.first() == Some(&1);
    whole.advance(PREFIX_BYTES);
    if compressed {
        if !gzip {
            return Err(grpc_go::packed_without_encoding());
        }
        whole = decompress(&whole, max_bytes)?;
    }
    T::decode(whole).map_err(grpc_go::undecodable)
}

/// True if compressed messages may come; an encoding that is not known is refused.
fn accepts_gzip(headers: &HeaderMap) -> Result<bool, Status> {
    let Some(encoding) = headers.get("grpc-encoding") else { return Ok(false) };
    match encoding.to_str().unwrap_or_default() {
        "" | "identity" => Ok(false),
        "gzip" => Ok(true),
        other => Err(grpc_go::unknown_encoding(other)),
    }
}

fn decompress(compressed: &[u8], max_bytes: usize) -> Result<Bytes, Status> {
    let mut plain = Vec::new();
    let mut reader = flate2::read::GzDecoder::new(compressed).take(max_bytes as u64 + 1);
    reader.read_to_end(&mut plain).map_err(grpc_go::not_unpacked)?;
    if plain.len() > max_bytes {
        return Err(grpc_go::too_large_unpacked(max_bytes));
    }
    Ok(plain.into())
}

/// Reads the message length, once its prefix is there.
fn check_length(start: &[u8], max_bytes: usize) -> Result<Option<usize>, Status> {
    let Some((prefix, _)) = start.split_at_checked(PREFIX_BYTES) else { return Ok(None) };
    let &[flag, a, b, c, d] = prefix else { return Ok(None) };
    if flag > 1 {
        return Err(grpc_go::unknown_format(flag));
    }
    let length = u32::from_be_bytes([a, b, c, d]) as usize;
    if length > max_bytes {
        return Err(grpc_go::too_large(length, max_bytes));
    }
    Ok(Some(length))
}

/// An answer that is sent piece by piece.
pub(super) struct Pieces {
    /// Length of the whole message, in bytes.
    pub(super) length: usize,
    /// What is there already.
    pub(super) first: Bytes,
    /// The rest, in order; an error ends the call.
    pub(super) rest: mpsc::Receiver<Result<Bytes, Status>>,
}

/// Makes the response of one message.
pub(super) fn respond(result: Result<impl Message, Status>) -> Response<Body> {
    match result {
        Err(status) => status.into_http(),
        Ok(message) => {
            let length = message.encoded_len();
            let mut framed = BytesMut::with_capacity(PREFIX_BYTES + length);
            let Ok(prefix) = u32::try_from(length) else {
                return grpc_go::answer_too_large().into_http();
            };
            framed.put_u8(0);
            framed.put_u32(prefix);
            message.encode_raw(&mut framed);
            success(Answer { ready: Some(framed.freeze()), rest: None, left: 0, ended: false })
        }
    }
}

/// Makes the response of a message that is sent piece by piece.
pub(super) fn respond_in_pieces(pieces: Pieces) -> Response<Body> {
    let Ok(prefix) = u32::try_from(pieces.length) else {
        return grpc_go::answer_too_large().into_http();
    };
    let mut framed = BytesMut::with_capacity(PREFIX_BYTES + pieces.first.len());
    framed.put_u8(0);
    framed.put_u32(prefix);
    framed.put_slice(&pieces.first);
    let left = pieces.length - pieces.first.len();
    success(Answer { ready: Some(framed.freeze()), rest: Some(pieces.rest), left, ended: false })
}

fn success(answer: Answer) -> Response<Body> {
    let mut response = Response::new(Body::new(answer));
    let grpc = HeaderValue::from_static("application/grpc");
    response.headers_mut().insert(header::CONTENT_TYPE, grpc);
    response
}

/// The body of a response: one framed message, then the trailers.
struct Answer {
    ready: Option<Bytes>,
    rest: Option<mpsc::Receiver<Result<Bytes, Status>>>,
    /// Bytes of the message still to come from `rest`.
    left: usize,
    ended: bool,
}

impl HttpBody for Answer {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        task: &mut TaskContext<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        if let Some(ready) = self.ready.take() {
            return Poll::Ready(Some(Ok(Frame::data(ready))));
        }
        if let Some(rest) = &mut self.rest {
            match rest.poll_recv(task) {
                Poll::Pending => return Poll::Pending,
                Poll::Ready(Some(Ok(piece))) => {
                    self.left = self.left.saturating_sub(piece.len());
                    return Poll::Ready(Some(Ok(Frame::data(piece))));
                }
                Poll::Ready(Some(Err(status))) => {
                    self.rest = None;
                    self.ended = true;
                    return Poll::Ready(Some(Err(status)));
                }
                Poll::Ready(None) => self.rest = None,
            }
            if self.left > 0 {
                self.ended = true;
                return Poll::Ready(Some(Err(Status::unavailable("etcdserver: server stopped"))));
            }
        }
        if std::mem::replace(&mut self.ended, true) {
            return Poll::Ready(None);
        }
        let mut trailers = HeaderMap::with_capacity(1);
        trailers.insert("grpc-status", HeaderValue::from_static("0"));
        Poll::Ready(Some(Ok(Frame::trailers(trailers))))
    }

    fn is_end_stream(&self) -> bool {
        self.ended
    }
}

#[cfg(test)]
mod tests {
    use http_body_util::StreamBody;

    use super::*;
    use crate::proto::etcdserverpb::{PutRequest, PutResponse};

    fn framed(message: &[u8], length: u32) -> Vec<u8> {
        [&[0][..], &length.to_be_bytes(), message].concat()
    }

    async fn read_put(parts: Vec<Vec<u8>>, max: usize) -> Result<PutRequest, Status> {
        let frames = parts.into_iter().map(|part| Ok::<_, Status>(Frame::data(Bytes::from(part))));
        read(&HeaderMap::new(), StreamBody::new(futures::stream::iter(frames)), max).await
    }

    #[tokio::test]
    async fn a_message_is_read_however_it_is_cut() {
        let request = PutRequest { key: Bytes::from_static(b"key"), ..Default::default() };
        let bytes = framed(&request.encode_to_vec(), u32::try_from(request.encoded_len()).expect("short"));
        for first in 0..=bytes.len() {
            for second in first..=bytes.len() {
                let cuts = [&bytes[..first], &bytes[first..second], &bytes[second..]];
                let parts = cuts.map(<[u8]>::to_vec).to_vec();
                assert_eq!(read_put(parts, 100).await.expect("it is whole"), request);
            }
        }
        for cut in 0..bytes.len() {
            assert!(read_put(vec![bytes[..cut].to_vec()], 100).await.is_err(), "cut at {cut}");
        }
    }

    #[tokio::test]
    async fn bad_messages_get_grpc_gos_errors() {
        let too_large = read_put(vec![framed(b"", 101)], 100).await.expect_err("over the limit");
        assert_eq!(too_large.code(), tonic::Code::ResourceExhausted);
        assert_eq!(too_large.message(), "grpc: received message larger than max (101 vs. 100)");
        let garbage = read_put(vec![framed(b"\xff\xff\xff", 3)], 100).await.expect_err("not protobuf");
        assert_eq!(garbage.code(), tonic::Code::Internal);
        assert!(garbage.message().starts_with("grpc: error unmarshalling request: "));
    }

    #[tokio::test]
    async fn an_answer_is_its_message_and_a_trailer() {
        let response = respond(Ok(PutResponse::default()));
        let collected = response.into_body().collect().await.expect("it ends");
        let status = collected.trailers().and_then(|trailers| trailers.get("grpc-status")).cloned();
        assert_eq!(status, Some(HeaderValue::from_static("0")));
        assert_eq!(collected.to_bytes(), framed(b"", 0));
        let (sender, rest) = mpsc::channel(2);
        sender.send(Ok(Bytes::from_static(b"cd"))).await.expect("there is room");
        drop(sender);
        let pieces = Pieces { length: 4, first: Bytes::from_static(b"ab"), rest };
        let collected = respond_in_pieces(pieces).into_body().collect().await.expect("it ends");
        assert_eq!(collected.to_bytes(), framed(b"abcd", 4));
    }
}
