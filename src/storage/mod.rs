//! Bytes on disk. Nothing above knows a file or a stored key; nothing here knows Raft, a request or a lease.
//!
//! [`log`] holds what was proposed, in order, and its sync is the only one a write waits for.

pub mod log;
