//! Range responses encoded straight from the store's iterators, without a message in between.

use bytes::{BufMut, Bytes, BytesMut};
use prost::Message;
use prost::encoding::{WireType, encode_key, encode_varint};

use crate::proto::etcdserverpb::{RangeRequest, ResponseHeader};
use crate::storage::StorageError;
use crate::storage::mvcc::read::Record;
use crate::storage::mvcc::{KeyRange, Store};
use crate::storage::schema::{self, KeyMeta};

/// Keys that a request may read on the core thread.
pub(super) const INLINE_KEYS: usize = 500;
/// Bytes that a request may read on the core thread.
pub(super) const INLINE_BYTES: usize = 256 << 10;

/// A `RangeResponse` in the making.
pub(super) struct RangeEncoder {
    buffer: BytesMut,
    /// Keys taken so far.
    pub(super) taken: usize,
    last_key: Vec<u8>,
    keys_only: bool,
}

/// How far a piece of a range was read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Progress {
    /// Nothing is left in the range.
    Exhausted,
    /// The request's limit is reached and more keys follow.
    Limited,
    /// The piece is full; there may be more.
    Paused,
}

impl RangeEncoder {
    pub(super) fn new(request: &RangeRequest) -> RangeEncoder {
        RangeEncoder { buffer: BytesMut::new(), taken: 0, last_key: Vec::new(), keys_only: request.keys_only }
    }

    /// Starts the message with its header.
    pub(super) fn put_header(&mut self, header: &ResponseHeader) {
        encode_key(1, WireType::LengthDelimited, &mut self.buffer);
        encode_varint(header.encoded_len() as u64, &mut self.buffer);
        header.encode_raw(&mut self.buffer);
    }

    /// What is shown of a record. Listings of keys come from etcd's index, which knows no lease.
    fn shown<'v>(&self, meta: &KeyMeta, value: &'v [u8]) -> (KeyMeta, &'v [u8]) {
        if self.keys_only { (KeyMeta { lease: 0, ..*meta }, b"") } else { (*meta, value) }
    }

    /// Encoded size of one key, without its field's tag and length.
    pub(super) fn record_len(&self, record: &Record<'_>) -> usize {
        let (meta, value) = self.shown(&record.meta, record.value);
        schema::key_value_len(record.key, &meta, value)
    }

    /// An encoder for the same request with nothing in it.
    pub(super) fn empty(&self) -> RangeEncoder {
        RangeEncoder { buffer: BytesMut::new(), taken: 0, last_key: Vec::new(), keys_only: self.keys_only }
    }

    /// The part of a range that was not read yet.
    pub(super) fn rest(&self, range: &KeyRange) -> KeyRange {
        if self.taken == 0 { range.clone() } else { range.after(&self.last_key) }
    }

    /// Adds one key.
    pub(super) fn put_record(&mut self, key: &[u8], meta: &KeyMeta, value: &[u8]) {
        let (meta, value) = self.shown(meta, value);
        let length = schema::key_value_len(key, &meta, value);
        self.buffer.reserve(length + 12);
        self.buffer.put_u8(0x12);
        encode_varint(length as u64, &mut self.buffer);
        schema::put_key_value(&mut self.buffer, key, &meta, value);
        self.taken += 1;
    }

    /// Reads on through a range until its end, the request's limit, or a piece of so many keys and bytes.
    pub(super) fn read(
        &mut self,
        store: &Store,
        range: &KeyRange,
        revision: i64,
        limit: usize,
        keys: usize,
        bytes: usize,
    ) -> Result<Progress, StorageError> {
        let rest = self.rest(range);
        if rest.is_empty() {
            return Ok(Progress::Exhausted);
        }
        let (stop_keys, stop_bytes) =
            (self.taken.saturating_add(keys), self.buffer.len().saturating_add(bytes));
        let mut scan = store.scan(&rest, revision);
        while let Some(record) = scan.next()? {
            if limit > 0 && self.taken == limit {
                return Ok(Progress::Limited);
            }
            if self.taken >= stop_keys || self.buffer.len() >= stop_bytes {
                return Ok(Progress::Paused);
            }
            self.put_record(record.key, &record.meta, record.value);
            self.last_key.clear();
            self.last_key.extend_from_slice(record.key);
        }
        Ok(Progress::Exhausted)
    }

    /// Number of live keys in the whole range, given that reading has ended.
    pub(super) fn count(
        &self,
        store: &Store,
        range: &KeyRange,
        revision: i64,
        progress: Progress,
    ) -> Result<i64, StorageError> {
        let taken = i64::try_from(self.taken).unwrap_or(i64::MAX);
        if progress == Progress::Exhausted {
            return Ok(taken);
        }
        Ok(taken + store.count(&self.rest(range), revision)?)
    }

    /// Encoded size so far, in bytes.
    pub(super) fn len(&self) -> usize {
        self.buffer.len()
    }

    /// Takes what is encoded so far, as a message of its own.
    pub(super) fn take(&mut self) -> Bytes {
        self.buffer.split().freeze()
    }

    /// Ends the message.
    pub(super) fn finish(mut self, more: bool, count: i64) -> Bytes {
        self.put_trailer(more, count);
        self.buffer.freeze()
    }

    /// Adds `more` and `count`.
    pub(super) fn put_trailer(&mut self, more: bool, count: i64) {
        if more {
            encode_key(3, WireType::Varint, &mut self.buffer);
            encode_varint(1, &mut self.buffer);
        }
        if count != 0 {
            encode_key(4, WireType::Varint, &mut self.buffer);
            encode_varint(count.cast_unsigned(), &mut self.buffer);
        }
    }
}
