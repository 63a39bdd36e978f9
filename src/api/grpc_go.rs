//! Errors of the gRPC layer, below the services, in the codes and words of grpc-go, which clients and tests of etcd know.
//!
//! What is read by hand ([`super::unary`]) makes them here. What goes through tonic has tonic's words, which differ between
//! a call of one message and a stream as grpc-go's do; they are recognised here and replaced.

use std::fmt::Display;

use http::HeaderMap;
use tonic::{Code, Status};

/// What tonic says when a message ends early.
const CUT_SHORT: &str = "Unexpected EOF decoding stream.";
/// What tonic says before the reason why a message does not decode.
const UNDECODABLE: &str = "failed to decode Protobuf message: ";
/// What tonic says when the one message of a call does not come.
const MISSING: &str = "Missing request message.";

/// A request without its message.
pub(super) fn no_message() -> Status {
    Status::unknown("EOF")
}

/// A request that ends within its message.
pub(super) fn cut_short() -> Status {
    Status::unknown("unexpected EOF")
}

/// A message over the limit.
pub(super) fn too_large(length: impl Display, limit: impl Display) -> Status {
    Status::resource_exhausted(format!("grpc: received message larger than max ({length} vs. {limit})"))
}

/// A message that is over the limit once it is unpacked.
pub(super) fn too_large_unpacked(limit: usize) -> Status {
    Status::resource_exhausted(format!("grpc: received message after decompression larger than max {limit}"))
}

/// An answer that no prefix can give the length of.
pub(super) fn answer_too_large() -> Status {
    Status::resource_exhausted("grpc: the answer is larger than a message can be")
}

/// The message of a call that is not what its type says.
pub(super) fn undecodable(reason: impl Display) -> Status {
    Status::internal(format!("grpc: error unmarshalling request: {reason}"))
}

/// A flag before a message that is neither 0 nor 1.
pub(super) fn unknown_format(flag: u8) -> Status {
    Status::internal(format!("grpc: received unexpected payload format {flag}"))
}

/// A packed message in a call that did not say how it packs.
pub(super) fn packed_without_encoding() -> Status {
    Status::internal("grpc: compressed flag set with identity or empty encoding")
}

/// A packed message that cannot be unpacked.
pub(super) fn not_unpacked(reason: impl Display) -> Status {
    Status::internal(format!("grpc: failed to decompress the message: {reason}"))
}

/// A way of packing that is not known.
pub(super) fn unknown_encoding(encoding: &str) -> Status {
    Status::unimplemented(format!("grpc: Decompressor is not installed for grpc-encoding \"{encoding}\""))
}

/// Rewords why a message of a stream could not be read.
pub(super) fn unreadable(status: Status) -> Status {
    if status.code() != Code::Internal {
        return status;
    }
    match (status.message(), status.message().strip_prefix(UNDECODABLE)) {
        (CUT_SHORT, _) => Status::internal("unexpected EOF"),
        (_, Some(reason)) => {
            Status::internal(format!("grpc: failed to unmarshal the received message: {reason}"))
        }
        _ => status,
    }
}

/// Rewords the error of a call that tonic has answered; `None` if the error is not one of tonic's own. `streams` says
/// whether more than one message may go one way or the other.
pub(super) fn reword(headers: &HeaderMap, streams: bool) -> Option<Status> {
    let status = Status::from_header_map(headers)?;
    let text = status.message();
    match status.code() {
        Code::OutOfRange => {
            let rest = text.strip_prefix("Error, decoded message length too large: found ")?;
            let (length, rest) = rest.split_once(" bytes, the limit is: ")?;
            Some(too_large(length, rest.strip_suffix(" bytes")?))
        }
        Code::Internal if streams && text == MISSING => Some(Status::internal(
            "cardinality violation: received no request message from non-client-streaming RPC",
        )),
        Code::Internal if streams => Some(unreadable(status)),
        Code::Internal => match text {
            MISSING => Some(no_message()),
            CUT_SHORT => Some(cut_short()),
            _ => text.strip_prefix(UNDECODABLE).map(undecodable),
        },
        Code::Unimplemented => {
            let (_, rest) = text.split_once("Content is compressed with `")?;
            let (encoding, _) = rest.split_once('`')?;
            Some(unknown_encoding(encoding))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reworded(status: Status, streams: bool) -> Option<(Code, String)> {
        let response = status.into_http::<tonic::body::Body>();
        reword(response.headers(), streams).map(|status| (status.code(), status.message().to_owned()))
    }

    #[test]
    fn tonics_words_are_replaced() {
        let undecodable = format!("{UNDECODABLE}invalid varint");
        for (status, unary, stream) in [
            (
                Status::out_of_range(
                    "Error, decoded message length too large: found 5 bytes, the limit is: 4 bytes",
                ),
                Some((Code::ResourceExhausted, "grpc: received message larger than max (5 vs. 4)")),
                Some((Code::ResourceExhausted, "grpc: received message larger than max (5 vs. 4)")),
            ),
            (
                Status::internal(MISSING),
                Some((Code::Unknown, "EOF")),
                Some((
                    Code::Internal,
                    "cardinality violation: received no request message from non-client-streaming RPC",
                )),
            ),
            (
                Status::internal(CUT_SHORT),
                Some((Code::Unknown, "unexpected EOF")),
                Some((Code::Internal, "unexpected EOF")),
            ),
            (
                Status::internal(undecodable),
                Some((Code::Internal, "grpc: error unmarshalling request: invalid varint")),
                Some((Code::Internal, "grpc: failed to unmarshal the received message: invalid varint")),
            ),
            (
                Status::unimplemented("Content is compressed with `zstd` which isn't supported"),
                Some((Code::Unimplemented, "grpc: Decompressor is not installed for grpc-encoding \"zstd\"")),
                Some((Code::Unimplemented, "grpc: Decompressor is not installed for grpc-encoding \"zstd\"")),
            ),
            (Status::out_of_range("etcdserver: mvcc: required revision has been compacted"), None, None),
            (Status::unavailable("etcdserver: no leader"), None, None),
        ] {
            let owned = |(code, text): (Code, &str)| (code, text.to_owned());
            assert_eq!(reworded(status.clone(), false), unary.map(owned), "{status:?}");
            assert_eq!(reworded(status.clone(), true), stream.map(owned), "{status:?}");
        }
    }
}
