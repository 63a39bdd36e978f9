//! Answers for calls of etcd's contract that this version does not serve.

use tonic::Status;

/// The refusal of a known call, by its name.
pub(super) fn not_yet(call: &str) -> Status {
    Status::unimplemented(format!("skeg does not serve {call} yet"))
}
