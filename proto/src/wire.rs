//! Messages that are bytes already.
//!
//! A list or a fan-out of events would build a tree of messages only to have it encoded and dropped.
//! The server writes such responses itself, once, from storage slices, and hands them to tonic as
//! [`Encoded`]. Nothing here checks that the bytes are the message that the RPC promises.

use bytes::{Buf, BufMut, Bytes};
use prost::encoding::{DecodeContext, WireType};
use prost::{DecodeError, Message};

/// A message already encoded, standing in for it where it is sent. It is never received.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Encoded(pub Bytes);

impl Encoded {
    /// Encodes a message now, for paths that are not worth writing bytes by hand.
    pub fn new(message: &impl Message) -> Self {
        Self(message.encode_to_vec().into())
    }
}

impl From<Bytes> for Encoded {
    fn from(bytes: Bytes) -> Self {
        Self(bytes)
    }
}

#[expect(deprecated, reason = "prost names no other way for a hand-written message to refuse a field")]
impl Message for Encoded {
    fn encode_raw(&self, buf: &mut impl BufMut) {
        buf.put_slice(&self.0);
    }

    fn encoded_len(&self) -> usize {
        self.0.len()
    }

    fn merge_field(
        &mut self,
        _tag: u32,
        _wire_type: WireType,
        _buf: &mut impl Buf,
        _ctx: DecodeContext,
    ) -> Result<(), DecodeError> {
        Err(DecodeError::new("an encoded message is only sent"))
    }

    fn clear(&mut self) {
        self.0.clear();
    }
}
