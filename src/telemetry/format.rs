//! The form of a log line: etcd's JSON object, or its columns.
//!
//! etcd's logger is zap; `tracing-subscriber` has no format with its keys, so the two are written out here. etcd:
//! `client/pkg/logutil/zap.go`

use std::fmt;

use serde_json::{Number, Value};
use tracing::field::{Field, Visit};
use tracing::{Event, Level, Metadata, Subscriber};
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::time::{FormatTime, SystemTime};
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::registry::LookupSpan;

use super::FATAL;
use crate::config::LogFormat;

/// Writes events as lines.
pub(super) struct Lines {
    format: LogFormat,
    time: SystemTime,
}

impl Lines {
    pub(super) fn new(format: LogFormat) -> Self {
        Self { format, time: SystemTime }
    }
}

impl<S, N> FormatEvent<S, N> for Lines
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(
        &self,
        _: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        let metadata = event.metadata();
        let mut fields = Fields::default();
        event.record(&mut fields);
        let level = level(metadata);
        let mut ts = String::new();
        self.time.format_time(&mut Writer::new(&mut ts))?;
        match self.format {
            LogFormat::Json => {
                write!(writer, "{{\"level\":\"{level}\",\"ts\":\"{ts}\"")?;
                member(&mut writer, "caller", &Value::String(caller(metadata)))?;
                member(&mut writer, "msg", &Value::String(fields.message))?;
                for (name, value) in &fields.rest {
                    member(&mut writer, name, value)?;
                }
                writer.write_str("}\n")
            }
            LogFormat::Console => {
                // A line break in a message would look like another line.
                let message = fields.message.replace('\n', "\\n");
                write!(writer, "{ts}\t{level}\t{}\t{message}", caller(metadata))?;
                columns(&mut writer, &fields.rest)?;
                writer.write_char('\n')
            }
        }
    }
}

fn member(writer: &mut Writer<'_>, name: &str, value: &Value) -> fmt::Result {
    write!(writer, ",{}:{value}", Value::String(name.to_owned()))
}

fn columns(writer: &mut Writer<'_>, fields: &[(&str, Value)]) -> fmt::Result {
    for (at, (name, value)) in fields.iter().enumerate() {
        let before = if at == 0 { "\t{" } else { ", " };
        write!(writer, "{before}\"{name}\": {value}")?;
    }
    if fields.is_empty() { Ok(()) } else { writer.write_char('}') }
}

fn level(metadata: &Metadata<'_>) -> &'static str {
    if metadata.target() == FATAL {
        return "fatal";
    }
    match *metadata.level() {
        Level::ERROR => "error",
        Level::WARN => "warn",
        Level::INFO => "info",
        Level::DEBUG | Level::TRACE => "debug",
    }
}

/// Returns the source file with its folder, and the line.
fn caller(metadata: &Metadata<'_>) -> String {
    let file = metadata.file().unwrap_or("unknown");
    let start = file.rmatch_indices('/').nth(1).map_or(0, |(at, _)| at + 1);
    format!("{}:{}", &file[start..], metadata.line().unwrap_or(0))
}

/// The fields of an event, in the order they were written.
#[derive(Default)]
struct Fields {
    message: String,
    rest: Vec<(&'static str, Value)>,
}

impl Fields {
    fn put(&mut self, field: &Field, value: Value) {
        match (field.name(), value) {
            ("message", Value::String(text)) => self.message = text,
            (name, value) => self.rest.push((name, value)),
        }
    }
}

impl Visit for Fields {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.put(field, Value::String(format!("{value:?}")));
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.put(field, Value::String(value.to_owned()));
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.put(field, Value::Bool(value));
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.put(field, value.into());
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.put(field, value.into());
    }

    fn record_f64(&mut self, field: &Field, value: f64) {
        // JSON has no infinities.
        self.put(
            field,
            Number::from_f64(value).map_or_else(|| Value::String(value.to_string()), Value::Number),
        );
    }

    fn record_error(&mut self, field: &Field, value: &(dyn std::error::Error + 'static)) {
        self.put(field, Value::String(value.to_string()));
    }
}
