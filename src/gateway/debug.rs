//! `/debug`: variables of the process, and why there are no profiles.

use http::{Response, StatusCode};
use rustix::process::{Resource, getrlimit};
use serde_json::json;
use tonic::body::Body;

use super::{Shared, answer};

const NO_PROFILES: &str = "skeg is not written in Go: it has no Go profiles. Profile it with perf; release builds keep line tables.\n";

/// The answer under `/debug/pprof/`.
pub(super) fn no_profiles() -> Response<Body> {
    answer::text(StatusCode::NOT_IMPLEMENTED, NO_PROFILES)
}

impl Shared {
    /// `/debug/vars`: what of Go's variables there is here, and in `memstats` sizes under our own names.
    pub(super) fn variables(&self) -> Response<Body> {
        self.refresh();
        let standing = &self.metrics.standing;
        let variables = json!({
            "cmdline": without_secrets(std::env::args()),
            "file_descriptor_limit": getrlimit(Resource::Nofile).current,
            "memstats": {
                "block_cache_bytes": standing.block_cache_bytes.get(),
                "log_tail_bytes": standing.log_tail_bytes.get(),
                "memtable_bytes": standing.memtable_bytes.get(),
                "metadata_cache_bytes": standing.metadata_cache_bytes.get(),
                "proposed_bytes": standing.proposed_bytes.get(),
                "watch_queued_bytes": standing.watch_queued_bytes.get(),
            },
        });
        answer::with_type(StatusCode::OK, "application/json; charset=utf-8", format!("{variables:#}\n"))
    }
}

/// Takes the values of flags out that may be secret.
fn without_secrets(arguments: impl IntoIterator<Item = String>) -> Vec<String> {
    let mut follows = false;
    let hide = |argument: String| {
        let secret = argument.trim_start_matches('-').starts_with("discovery-password");
        match argument.split_once('=') {
            _ if std::mem::replace(&mut follows, false) => "***".to_owned(),
            Some((flag, _)) if secret => format!("{flag}=***"),
            None if secret => {
                follows = true;
                argument
            }
            _ => argument,
        }
    };
    arguments.into_iter().map(hide).collect()
}

#[cfg(test)]
mod tests {
    use super::without_secrets;

    #[test]
    fn passwords_are_not_shown() {
        let shown = |line: &str| without_secrets(line.split(' ').map(str::to_owned)).join(" ");
        assert_eq!(
            shown("skeg --name a --discovery-password x --cors=*"),
            "skeg --name a --discovery-password *** --cors=*"
        );
        assert_eq!(shown("skeg -discovery-password=x --name a"), "skeg -discovery-password=*** --name a");
    }
}
