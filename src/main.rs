//! The `skeg` binary: settings, telemetry, build, run, exit code.

use std::process::ExitCode;

use anyhow::bail;
use skeg::config::Config;
use skeg::process::{self, Ending};

fn main() -> ExitCode {
    process::main_with(serve)
}

fn serve(config: Config) -> anyhow::Result<Ending> {
    config.bootstrap()?;
    bail!("server not built yet")
}
