//! The `skeg` binary: settings, telemetry, build, run, exit code.

use std::process::ExitCode;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    skeg::process::main_with(skeg::server::run)
}
