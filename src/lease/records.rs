//! Lease records and the keys attached to them.

use std::collections::BTreeMap;

use bytes::Bytes;
use prost::Message;

use crate::proto::skegpb::LeaseRecord;
use crate::storage::schema::{self, Family};
use crate::storage::{Engine, StorageError};

/// All leases, by id. The same records are stored; which keys are attached is stored only.
#[derive(Debug, Default)]
pub struct Leases {
    records: BTreeMap<i64, LeaseRecord>,
}

impl Leases {
    /// Adds a lease; `None` if the id is in use.
    pub fn grant(&mut self, id: i64, ttl_seconds: i64) -> Option<LeaseRecord> {
        if self.records.contains_key(&id) {
            return None;
        }
        let record = LeaseRecord { id, ttl_seconds, remaining_seconds: 0 };
        self.records.insert(id, record);
        Some(record)
    }

    /// Notes what is left of a lease, 0 for "all of it"; `None` if it does not exist.
    pub fn checkpoint(&mut self, id: i64, remaining_seconds: i64) -> Option<LeaseRecord> {
        let record = self.records.get_mut(&id)?;
        record.remaining_seconds = remaining_seconds;
        Some(*record)
    }

    /// Removes a lease.
    pub fn remove(&mut self, id: i64) {
        self.records.remove(&id);
    }

    /// True if the lease exists.
    pub fn contains(&self, id: i64) -> bool {
        self.records.contains_key(&id)
    }

    /// A lease's record.
    pub fn get(&self, id: i64) -> Option<LeaseRecord> {
        self.records.get(&id).copied()
    }

    /// All records, by id.
    pub fn iter(&self) -> impl Iterator<Item = &LeaseRecord> {
        self.records.values()
    }

    /// Number of leases.
    pub fn len(&self) -> usize {
        self.records.len()
    }

    /// True if there is none.
    pub fn is_empty(&self) -> bool {
        self.records.is_empty()
    }
}

/// Reads all lease records; its cost is the number of leases.
pub fn load(engine: &Engine) -> Result<Leases, StorageError> {
    let mut leases = Leases::default();
    let mut iterator = engine.iterate(Family::Lease, schema::LEASE_RECORD_PREFIX, None);
    while let Some((key, value)) = iterator.item() {
        if !key.starts_with(schema::LEASE_RECORD_PREFIX) {
            break;
        }
        let record = LeaseRecord::decode(value).map_err(|_| StorageError::Damaged { what: "lease" })?;
        leases.records.insert(record.id, record);
        iterator.next();
    }
    iterator.status()?;
    Ok(leases)
}

/// The keys attached to a lease, ascending.
pub fn attached_keys(engine: &Engine, id: i64) -> Result<Vec<Bytes>, StorageError> {
    let prefix = schema::lease_attachment_prefix(id);
    let mut keys = Vec::new();
    let mut iterator = engine.iterate(Family::Lease, &prefix, None);
    while let Some(key) = iterator.key() {
        let Some(user_key) = key.strip_prefix(&prefix) else { break };
        keys.push(Bytes::copy_from_slice(user_key));
        iterator.next();
    }
    iterator.status()?;
    Ok(keys)
}
