//! Tests from outside: real processes, and nothing but what a user sees of them.
//!
//! One binary, so that it links once; a file per subject.

mod config;
mod http;
mod programs;
