//! The etcd API: one file per service, and what they share.
//!
//! A request is checked here ([`validate`]), turned into a command or a read, and its answer is stamped with who answered
//! ([`header`]). Every refusal on the way leaves through [`error`], in etcd's codes and texts.

mod auth;
mod caller;
mod cluster;
mod context;
mod counted;
mod downgrade;
mod election;
mod error;
#[cfg(any(test, fuzzing))]
pub mod fuzz;
mod grpc_go;
mod header;
mod health;
mod kv;
mod large_range;
mod lease;
mod lock;
mod maintenance;
mod methods;
mod passwords;
mod range_encoder;
mod recipe;
mod services;
mod snapshot;
mod unary;
mod until;
mod validate;
mod watch;

pub use caller::CommonName;
pub use context::{Context, Limits};
pub use counted::ResponseBody;
pub use error::Error;
pub use maintenance::stall_text;
pub use passwords::Passwords;
pub use services::{Answer, Services};
