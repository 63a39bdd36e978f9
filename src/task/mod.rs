//! What runs unasked. Each task is a loop over handles that it was given; it changes replicated state only by proposing.

pub mod alarms;
pub mod auto_compaction;
pub mod cluster_version;
pub mod compaction;
pub mod corruption_check;
pub mod counts;
pub mod disk_watch;
pub mod divergence;
pub mod flush;
pub mod lease_checkpoint;
pub mod lease_expiry;
pub mod level;
pub mod mend;
pub mod publish;
pub mod scrub;
pub mod token_keys;
