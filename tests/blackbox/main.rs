//! Tests from outside: real processes, and nothing but what a user sees of them.
//!
//! One binary, so that it links once; a file per subject.

#![expect(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a test that fails says where, and its output is shown"
)]

mod clients;
mod cluster;
mod compaction;
mod config;
mod crash;
mod disk;
mod http;
mod lease;
mod member;
mod mount;
mod ports;
mod process;
mod programs;
mod utl;
