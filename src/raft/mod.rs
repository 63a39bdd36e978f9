//! Consensus: everything that names openraft.
//!
//! ```text
//! propose ──> RaftCore ──> log_store ──> storage/log        one sync per drain
//!                │ committed
//!                ▼
//!          state_machine ──> apply ──> watch hub, lease clock, compactions, waiters
//! ```
//!
//! The log is the only durable record of what was acknowledged; the state machine follows it and is flushed behind it.
//! What openraft calls a snapshot is here "the state machine's files hold everything up to this entry", so that the log
//! can never be purged past what a restart finds on disk. A member that needs what is purged is sent the files ([`snapshot`]); so
//! is one whose own are damaged ([`mend`]).

mod ask;
mod codec;
mod compare;
mod force;
mod leadership;
mod log_store;
mod membership;
mod mend;
mod network;
mod node;
mod outcomes;
mod propose;
mod read_index;
mod restore;
mod snapshot;
mod state_machine;
mod trails;
mod types;

pub use ask::AskError;
pub use compare::Comparison;
pub use membership::TransferError;
pub use mend::{Examined, MendError};
pub use network::{Membership, Opened, Served, ask_to_join, describe, dial};
pub use node::{AppliedChanges, Beginning, Node, NodeCounts, NodeOptions, RaftStatus, StartError};
pub use propose::ProposeError;
pub use read_index::ReadError;
pub use restore::{FirstPosition, begin_log, first_position, has_begun};
pub use trails::TrailComparison;

#[cfg(test)]
mod tests;
