//! Every byte the log stores: segment headers and frames. `docs/data_model.md` shows the same as tables.
//!
//! A frame proves by itself that it belongs here and now. Its CRC is seeded with the log's identity and the segment's
//! sequence number, so the same bytes left over from the file's earlier life never check: a CRC from another seed
//! always differs. Its index is masked with the segment's random salt, so bytes a client sent can only be
//! mistaken for a frame by guessing 64 bits, and recovery can look for frames at every offset without reading on at
//! each of them.

use crate::clock;

/// Size of the header at the start of each segment.
pub(super) const SEGMENT_HEADER_BYTES: usize = 64;
/// What a frame adds to its payload.
pub(super) const FRAME_HEADER_BYTES: usize = 20;
/// The length field has 28 bits.
pub(super) const PAYLOAD_LIMIT_BYTES: usize = (1 << 28) - 1;
/// Indexes stay below this (89 years at 100,000 entries a second), so most salted garbage is no index at all.
pub(super) const INDEX_LIMIT: u64 = 1 << 48;

const MAGIC: [u8; 8] = *b"SKEGLOG\n";
const FORMAT_VERSION: u32 = 1;
const RECYCLED: u32 = 1;
const LAST_IN_BATCH: u32 = 1 << 31;
const KIND_SHIFT: u32 = 28;

/// Identifies one log: the same in all its segments, drawn when the first is made.
pub(super) type LogId = [u8; 16];

/// The fixed start of a segment file, written before the file gets its name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct SegmentHeader {
    pub(super) log_id: LogId,
    /// Position among the segments, from 1, without holes.
    pub(super) sequence: u64,
    /// Random, top bit set: a zeroed frame header then never shows a plausible index.
    pub(super) salt: u64,
    /// The file held another segment before: what follows the last frame is old bytes rather than zeros.
    pub(super) recycled: bool,
}

/// Why 64 bytes are no segment header.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum HeaderFault {
    Magic,
    Version(u32),
    Checksum,
}

impl SegmentHeader {
    pub(super) fn new(log_id: LogId, sequence: u64, recycled: bool) -> Self {
        let salt = u64::from_le_bytes(clock::random()) | 1 << 63;
        Self { log_id, sequence, salt, recycled }
    }

    pub(super) fn encode(&self) -> [u8; SEGMENT_HEADER_BYTES] {
        let mut bytes = [0; SEGMENT_HEADER_BYTES];
        bytes[0..8].copy_from_slice(&MAGIC);
        bytes[8..12].copy_from_slice(&FORMAT_VERSION.to_le_bytes());
        bytes[16..32].copy_from_slice(&self.log_id);
        bytes[32..40].copy_from_slice(&self.sequence.to_le_bytes());
        bytes[40..48].copy_from_slice(&self.salt.to_le_bytes());
        bytes[48..52].copy_from_slice(&if self.recycled { RECYCLED } else { 0 }.to_le_bytes());
        let checksum = crc32fast::hash(&bytes[16..]);
        bytes[12..16].copy_from_slice(&checksum.to_le_bytes());
        bytes
    }

    pub(super) fn decode(bytes: &[u8; SEGMENT_HEADER_BYTES]) -> Result<Self, HeaderFault> {
        if bytes[0..8] != MAGIC {
            return Err(HeaderFault::Magic);
        }
        let version = u32_at(bytes, 8);
        if version != FORMAT_VERSION {
            return Err(HeaderFault::Version(version));
        }
        let mut log_id = [0; 16];
        log_id.copy_from_slice(&bytes[16..32]);
        let header = Self {
            log_id,
            sequence: u64_at(bytes, 32),
            salt: u64_at(bytes, 40),
            recycled: u32_at(bytes, 48) & RECYCLED != 0,
        };
        // Encoding again also checks the checksum and that the reserved bytes are zero.
        if header.encode() == *bytes { Ok(header) } else { Err(HeaderFault::Checksum) }
    }

    pub(super) fn stamp(&self) -> Stamp {
        let sequence = self.sequence.to_le_bytes();
        Stamp { salt: self.salt, seed: crc32fast::hash(&self.log_id).wrapping_add(u32_at(&sequence, 0)) }
    }
}

/// What marks a frame as one of a certain segment.
#[derive(Debug, Clone, Copy)]
pub(super) struct Stamp {
    salt: u64,
    seed: u32,
}

impl Stamp {
    fn checksum(self, bytes: &[u8]) -> u32 {
        let mut hasher = crc32fast::Hasher::new_with_initial(self.seed);
        hasher.update(bytes);
        hasher.finalize()
    }
}

/// What a frame holds. Zero is no kind, so zeros are no frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// index: the entry's; payload: the entry.
    Entry,
    /// payload: the vote; it replaces every earlier one.
    Vote,
    /// payload: how far entries were known to be committed.
    Committed,
    /// index: the first entry that is dropped, with all after it.
    Truncate,
    /// index: the last entry that is dropped, with all before it; payload: what the caller wants back with it.
    Purge,
    /// First in its segment; index: the next entry's; payload: where the segment before this one ends.
    Start,
}

impl Kind {
    fn to_bits(self) -> u32 {
        match self {
            Kind::Entry => 1,
            Kind::Vote => 2,
            Kind::Committed => 3,
            Kind::Truncate => 4,
            Kind::Purge => 5,
            Kind::Start => 6,
        }
    }

    fn from_bits(bits: u32) -> Option<Self> {
        Some(match bits {
            1 => Kind::Entry,
            2 => Kind::Vote,
            3 => Kind::Committed,
            4 => Kind::Truncate,
            5 => Kind::Purge,
            6 => Kind::Start,
            _ => return None,
        })
    }
}

/// A frame's first 20 bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct FrameHead {
    pub(super) kind: Kind,
    /// The batch ends with this frame: what follows was written after a sync.
    pub(super) last_in_batch: bool,
    pub(super) index: u64,
    /// Counts the syncs of this segment from 1.
    pub(super) batch: u32,
    pub(super) payload_bytes: usize,
    checksum: u32,
}

impl FrameHead {
    /// Returns the head if these bytes, at least 20, could start a frame of the segment.
    pub(super) fn decode(bytes: &[u8], stamp: Stamp) -> Option<Self> {
        let index = u64_at(bytes, 8) ^ stamp.salt;
        if index >= INDEX_LIMIT {
            return None;
        }
        let tag = u32_at(bytes, 4);
        Some(Self {
            kind: Kind::from_bits((tag >> KIND_SHIFT) & 7)?,
            last_in_batch: tag & LAST_IN_BATCH != 0,
            index,
            batch: u32_at(bytes, 16),
            payload_bytes: usize::try_from(tag & ((1 << KIND_SHIFT) - 1)).expect("28 bits fit"),
            checksum: u32_at(bytes, 0),
        })
    }

    pub(super) fn frame_bytes(&self) -> usize {
        FRAME_HEADER_BYTES + self.payload_bytes
    }

    /// Says if the whole frame's bytes are what was written.
    pub(super) fn checks(&self, frame: &[u8], stamp: Stamp) -> bool {
        stamp.checksum(&frame[4..]) == self.checksum
    }
}

/// Builds the frames of one batch. The newest stays open, for only what comes next tells whether it was the last.
#[derive(Debug)]
pub(super) struct BatchBuilder {
    bytes: Vec<u8>,
    open: Option<usize>,
    number: u32,
    stamp: Stamp,
}

impl BatchBuilder {
    pub(super) fn new(number: u32, stamp: Stamp) -> Self {
        Self { bytes: Vec::new(), open: None, number, stamp }
    }

    pub(super) fn push(&mut self, kind: Kind, index: u64, payload: &[u8]) {
        assert!(
            index < INDEX_LIMIT && payload.len() <= PAYLOAD_LIMIT_BYTES,
            "the log's entrance checks both"
        );
        self.seal();
        let length = u32::try_from(payload.len()).expect("checked above");
        self.open = Some(self.bytes.len());
        self.bytes.extend_from_slice(&[0; 4]);
        self.bytes.extend_from_slice(&(length | kind.to_bits() << KIND_SHIFT).to_le_bytes());
        self.bytes.extend_from_slice(&(index ^ self.stamp.salt).to_le_bytes());
        self.bytes.extend_from_slice(&self.number.to_le_bytes());
        self.bytes.extend_from_slice(payload);
    }

    /// Bytes not taken yet.
    pub(super) fn len(&self) -> usize {
        self.bytes.len()
    }

    /// Marks the open frame as the batch's last.
    pub(super) fn finish(&mut self) {
        if let Some(at) = self.open {
            self.bytes[at + 7] |= LAST_IN_BATCH.to_le_bytes()[3];
        }
        self.seal();
    }

    /// The bytes of the sealed frames. Only to be called when none is open or the open one is sealed next.
    pub(super) fn bytes(&self) -> &[u8] {
        assert!(self.open.is_none(), "a frame is written when it is sealed");
        &self.bytes
    }

    /// Closes the open frame as one that others of its batch follow.
    pub(super) fn seal(&mut self) {
        if let Some(at) = self.open.take() {
            let checksum = self.stamp.checksum(&self.bytes[at + 4..]);
            self.bytes[at..at + 4].copy_from_slice(&checksum.to_le_bytes());
        }
    }

    /// Forgets the bytes, which were written.
    pub(super) fn clear(&mut self) {
        self.bytes.clear();
    }

    /// Starts the next batch, of the given number and segment.
    pub(super) fn restart(&mut self, number: u32, stamp: Stamp) {
        assert!(self.bytes.is_empty() && self.open.is_none(), "the batch before was written");
        self.number = number;
        self.stamp = stamp;
    }
}

pub(super) fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"))
}
