//! Leases: the replicated records here and in [`records`], the leader's clock over them in [`deadlines`].
//!
//! Which leases exist, their time to live and their keys are decided by the log. When one has run out is decided by the
//! leader's monotonic clock alone, and becomes a fact only as a proposed command.

pub mod deadlines;
mod records;

pub use records::{Leases, attached_keys, load};
