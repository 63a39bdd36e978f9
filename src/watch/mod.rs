//! Watching: every change, once, in order, to everyone who asked for it.
//!
//! ```text
//!                    publish(run)                    poll
//! apply ──────────────> hub ──────> stream queue ──────────> api/watch
//!                        │ full            ▲
//!                        ▼                 │
//!                   catching up ──history──┘
//! ```
//!
//! A watcher is *synced*, and gets each run of changes as it is published, or *catching up*, and gets history from the
//! store until it is level. It joins the synced ones under the same lock that publishes, so there is no gap and no
//! repeat. Publishing never waits: a watcher whose queue has no room simply becomes one that catches up, from the first
//! change that it was not given; nothing is ever skipped. An event is encoded once for all watchers that see it alike.
//!
//! What is left out: who may watch what, and how responses look on the wire; that is `api/watch`.

mod catch_up;
mod group;
mod hub;
mod queue;

pub use catch_up::catch_up;
pub use group::Filters;
pub use hub::{Hub, HubOptions, HubSizes, NewWatch, WatchStream};
pub use queue::{EncodedEvent, Message, Outgoing};

#[cfg(test)]
mod tests;
