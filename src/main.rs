//! The `skeg` binary: settings, telemetry, build, run, exit code.

fn main() {}
