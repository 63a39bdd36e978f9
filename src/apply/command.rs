//! Commands as the log carries them.

use bytes::Bytes;
use prost::Message;

use crate::proto::skegpb::Command;
use crate::proto::skegpb::command::Kind;

/// Decodes a command from its log entry.
///
/// # Errors
/// When the bytes are no command of this version; the member must stop rather than skip what others apply.
pub fn decode(encoded: Bytes) -> Result<Kind, prost::DecodeError> {
    Command::decode(encoded)?.kind.ok_or_else(unknown)
}

fn unknown() -> prost::DecodeError {
    #[expect(deprecated, reason = "prost offers no other way to make the error")]
    prost::DecodeError::new("the log holds a command that this version does not know")
}
