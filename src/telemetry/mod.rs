//! The log: what `tracing` events become, and where they go; and the [`metrics`].
//!
//! ```text
//! info!(%leader, term, "became leader")
//!   │ level filter
//!   ▼
//! {"level":"info","ts":"2026-11-30T16:33:38.123456Z","caller":"raft/node.rs:120","msg":"became leader","leader":"8e9e…","term":2}
//!   ▼
//! stderr, stdout, files: each line whole, in one write
//! ```
//!
//! The lines are those of etcd (`--log-format json`, or `console` with tabs), so that its dashboards and tests read them.
//! Spans are not logged. Times are UTC. What openraft says of its own workings at level info is noise to anyone but its
//! authors, so it is let through from `warn` on, and in full at level debug.
//!
//! An event with the target [`FATAL`] is logged as `fatal`: the process is about to end. Nothing here ends it.

mod format;
pub mod metrics;
mod output;

use std::io;
use std::path::PathBuf;

use tracing::Metadata;
use tracing::level_filters::LevelFilter;
use tracing::subscriber::DefaultGuard;
use tracing_subscriber::filter::FilterFn;
use tracing_subscriber::fmt::MakeWriter;
use tracing_subscriber::layer::{Layer, SubscriberExt};
use tracing_subscriber::registry::LookupSpan;

use self::format::Lines;
use self::output::Outputs;
use crate::config::{LogLevel, LogSettings};

/// The target of events after which the process ends.
pub const FATAL: &str = "fatal";

/// Targets that begin with this say too much at level info.
const CHATTY: &str = "openraft";

/// Why the log cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum LogError {
    /// A file of `--log-outputs` cannot be opened.
    #[error("cannot open --log-outputs {path}: {source}", path = path.display())]
    Open {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// `--log-outputs=systemd/journal` without a journal.
    #[error("--log-outputs=systemd/journal: can't find the journal: {0}")]
    NoJournal(io::Error),
    /// There is a log already.
    #[error("the log is already open")]
    Opened,
}

/// Opens the log for the whole process, once.
///
/// # Errors
/// When an output cannot be opened, or the log is already open.
pub fn init(settings: &LogSettings) -> Result<(), LogError> {
    let subscriber = tracing_subscriber::registry().with(layer(settings, Outputs::open(&settings.outputs)?));
    tracing::subscriber::set_global_default(subscriber).map_err(|_| LogError::Opened)
}

/// Opens a log on standard error for the current thread, for what must be said before [`init`]; dropping the guard closes it.
pub fn provisional() -> DefaultGuard {
    let settings = LogSettings::default();
    tracing::subscriber::set_default(tracing_subscriber::registry().with(layer(&settings, Outputs::stderr())))
}

fn layer<S, W>(settings: &LogSettings, writer: W) -> impl Layer<S> + Send + Sync + use<S, W>
where
    S: tracing::Subscriber + for<'a> LookupSpan<'a>,
    W: for<'a> MakeWriter<'a> + Send + Sync + 'static,
{
    let least = settings.level;
    let filter =
        FilterFn::new(move |metadata| passes(least, metadata)).with_max_level_hint(level_hint(least));
    tracing_subscriber::fmt::layer()
        .event_format(Lines::new(settings.format))
        .with_writer(writer)
        .with_filter(filter)
}

/// Says whether an event is grave enough. Above `error` only the last words of the process are.
fn passes(least: LogLevel, metadata: &Metadata<'_>) -> bool {
    let target = metadata.target();
    if target == FATAL {
        return true;
    }
    let chatty = target.starts_with(CHATTY) && least != LogLevel::Debug;
    let least = if chatty { least.max(LogLevel::Error) } else { least };
    least <= LogLevel::Error && *metadata.level() <= level_hint(least)
}

fn level_hint(least: LogLevel) -> LevelFilter {
    match least {
        LogLevel::Debug => LevelFilter::DEBUG,
        LogLevel::Info => LevelFilter::INFO,
        LogLevel::Warn => LevelFilter::WARN,
        LogLevel::Error | LogLevel::Panic | LogLevel::Fatal => LevelFilter::ERROR,
    }
}

#[cfg(test)]
mod tests {
    use std::io::{self, Write};
    use std::sync::Arc;

    use parking_lot::Mutex;
    use tracing::{debug, error, info, warn};
    use tracing_subscriber::layer::SubscriberExt;

    use super::{FATAL, layer};
    use crate::config::{LogFormat, LogLevel, LogSettings};

    #[derive(Clone, Default)]
    struct Sink(Arc<Mutex<Vec<u8>>>);

    impl Write for Sink {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn logged(level: LogLevel, format: LogFormat, speak: impl FnOnce()) -> Vec<String> {
        let sink = Sink::default();
        let settings = LogSettings { level, format, outputs: Vec::new() };
        let writer = sink.clone();
        let subscriber = tracing_subscriber::registry().with(layer(&settings, move || writer.clone()));
        tracing::subscriber::with_default(subscriber, speak);
        let bytes = sink.0.lock().clone();
        String::from_utf8(bytes).unwrap().lines().map(str::to_owned).collect()
    }

    fn speak() {
        debug!("d");
        info!("i");
        warn!("w");
        error!("e");
        error!(target: FATAL, "f");
    }

    #[test]
    fn a_json_line_has_etcds_keys_in_order() {
        let lines = logged(LogLevel::Info, LogFormat::Json, || {
            info!(leader = %"8e9e", term = 2_u64, ms = 1.5, ok = true, back = -1_i64, "became \"leader\"\n");
        });
        assert_eq!(lines.len(), 1, "a line break in a message must not break the line");
        let line = &lines[0];
        let order = [
            "{\"level\":\"info\"",
            ",\"ts\":",
            ",\"caller\":",
            ",\"msg\":",
            ",\"leader\":",
            ",\"term\":2",
            ",\"ms\":1.5",
        ];
        let places: Vec<_> = order.iter().map(|key| line.find(key)).collect();
        assert!(places[0] == Some(0) && places.is_sorted() && !places.contains(&None), "{line}");
        let value: serde_json::Value = serde_json::from_str(line).unwrap();
        assert_eq!(value["msg"], "became \"leader\"\n");
        assert_eq!((&value["ok"], &value["back"]), (&true.into(), &(-1).into()));
        let caller = value["caller"].as_str().unwrap();
        assert!(caller.starts_with("telemetry/mod.rs:"), "{caller}");
        let ts = value["ts"].as_str().unwrap();
        assert_eq!((ts.len(), &ts[10..11], &ts[26..]), (27, "T", "Z"), "{ts}");
    }

    #[test]
    fn a_console_line_has_tabs() {
        let lines = logged(LogLevel::Info, LogFormat::Console, || warn!(disk = "full", "cannot write"));
        let columns: Vec<_> = lines[0].split('\t').collect();
        assert_eq!(columns.len(), 5, "{}", lines[0]);
        assert_eq!((columns[1], columns[3], columns[4]), ("warn", "cannot write", r#"{"disk": "full"}"#));
    }

    #[test]
    fn openraft_is_quiet_unless_all_is_wanted() {
        let speak = || {
            info!(target: "openraft::core", "i");
            warn!(target: "openraft::core", "w");
            error!(target: "openraft::core", "e");
        };
        assert_eq!(logged(LogLevel::Info, LogFormat::Json, speak).len(), 1);
        assert_eq!(logged(LogLevel::Debug, LogFormat::Json, speak).len(), 3);
        assert_eq!(logged(LogLevel::Panic, LogFormat::Json, speak).len(), 0);
    }

    #[test]
    fn levels_cut_off_what_is_less_grave() {
        for (level, want) in [
            (LogLevel::Debug, &["debug", "info", "warn", "error", "fatal"][..]),
            (LogLevel::Info, &["info", "warn", "error", "fatal"]),
            (LogLevel::Warn, &["warn", "error", "fatal"]),
            (LogLevel::Error, &["error", "fatal"]),
            (LogLevel::Panic, &["fatal"]),
            (LogLevel::Fatal, &["fatal"]),
        ] {
            let levels: Vec<String> = logged(level, LogFormat::Json, speak)
                .iter()
                .map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap())
                .map(|line| line["level"].as_str().unwrap().to_owned())
                .collect();
            assert_eq!(levels, want);
        }
    }
}
