//! Output formats. etcd: `etcdutl/etcdutl/printer.go`.

use std::fmt::Write;

use super::Failure;
use crate::storage::etcd::FileStatus;
use crate::storage::mvcc::hash::RevisionHash;

/// How results are shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Format {
    Simple,
    Json,
    Fields,
    Table,
    /// Known, and always refused.
    Protobuf,
}

impl Format {
    /// Reads `--write-out`.
    pub(super) fn parse(text: &str) -> Result<Format, Failure> {
        Ok(match text {
            "simple" => Format::Simple,
            "json" => Format::Json,
            "fields" => Format::Fields,
            "table" => Format::Table,
            "protobuf" => Format::Protobuf,
            _ => return Err(bad_format("unsupported output format")),
        })
    }
}

fn bad_format(text: &str) -> Failure {
    Failure { status: Failure::BAD_FEATURE, text: text.to_owned() }
}

pub(super) fn status(format: Format, status: &FileStatus) -> Result<String, Failure> {
    let FileStatus { hash, revision, total_keys, size_bytes, version } = status;
    let json = || {
        let version = serde_json::Value::from(version.as_str());
        format!(
            "{{\"hash\":{hash},\"revision\":{revision},\"totalKey\":{total_keys},\"totalSize\":{size_bytes},\"version\":{version}}}\n"
        )
    };
    let fields = [
        ("Hash", hash.to_string()),
        ("Revision", revision.to_string()),
        ("Keys", total_keys.to_string()),
        ("Size", size_bytes.to_string()),
        ("Version", version.clone()),
    ];
    let row = [
        ("hash", format!("{hash:x}")),
        ("revision", revision.to_string()),
        ("total keys", total_keys.to_string()),
        ("total size", human_bytes(*size_bytes)),
        ("version", version.clone()),
    ];
    show(format, json, &fields, &row)
}

pub(super) fn hash_kv(format: Format, found: &RevisionHash) -> Result<String, Failure> {
    let RevisionHash { hash, compact_revision, revision } = found;
    let json = || {
        format!("{{\"hash\":{hash},\"hashRevision\":{revision},\"compactRevision\":{compact_revision}}}\n")
    };
    let [hash, revision, compacted] = [i64::from(*hash), *revision, *compact_revision].map(|n| n.to_string());
    let fields = [
        ("Hash", hash.clone()),
        ("Hash revision", revision.clone()),
        ("Compact revision", compacted.clone()),
    ];
    let row = [("hash", hash), ("hash revision", revision), ("compact revision", compacted)];
    show(format, json, &fields, &row)
}

fn show(
    format: Format,
    json: impl Fn() -> String,
    fields: &[(&str, String)],
    row: &[(&str, String)],
) -> Result<String, Failure> {
    Ok(match format {
        Format::Simple => {
            let values: Vec<&str> = row.iter().map(|(_, value)| value.as_str()).collect();
            format!("{}\n", values.join(", "))
        }
        Format::Json => json(),
        Format::Fields => fields.iter().map(|(name, value)| format!("\"{name}\" : {value}\n")).collect(),
        Format::Table => table(row),
        Format::Protobuf => return Err(bad_format("protobuf not supported as output format")),
    })
}

/// One row under its heads, in a frame.
fn table(row: &[(&str, String)]) -> String {
    let widths: Vec<usize> = row.iter().map(|(head, value)| head.len().max(value.len()) + 2).collect();
    let rule = |left: &str, between: &str, right: &str| {
        let lines: Vec<String> = widths.iter().map(|width| "─".repeat(*width)).collect();
        format!("{left}{}{right}\n", lines.join(between))
    };
    let mut out = rule("┌", "┬", "┐");
    for ((head, _), width) in row.iter().zip(&widths) {
        let _ = write!(out, "│{:^width$}", head.to_uppercase());
    }
    let _ = write!(out, "│\n{}", rule("├", "┼", "┤"));
    for ((_, value), width) in row.iter().zip(&widths) {
        let inside = width - 1;
        let _ = write!(out, "│{value:>inside$} ");
    }
    let _ = write!(out, "│\n{}", rule("└", "┴", "┘"));
    out
}

/// A size in powers of a thousand, with one digit behind the point below ten.
fn human_bytes(bytes: u64) -> String {
    const UNITS: [&str; 7] = ["B", "kB", "MB", "GB", "TB", "PB", "EB"];
    if bytes < 10 {
        return format!("{bytes} B");
    }
    let (mut unit, mut size) = (0, 1_u64);
    while bytes / size >= 1000 && unit + 1 < UNITS.len() {
        size *= 1000;
        unit += 1;
    }
    // Tenths, rounded; what has more than one digit before the point has none behind it.
    let tenths = (u128::from(bytes) * 10 + u128::from(size) / 2) / u128::from(size);
    let unit = UNITS[unit];
    if tenths < 100 {
        format!("{}.{} {unit}", tenths / 10, tenths % 10)
    } else {
        let whole = tenths / 10;
        // The rest is rounded a second time, half to even.
        let up = tenths % 10 > 5 || tenths % 10 == 5 && whole % 2 == 1;
        format!("{} {unit}", whole + u128::from(up))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_shown_as_etcdutl_shows_them() {
        let shown = [
            (0, "0 B"),
            (9, "9 B"),
            (10, "10 B"),
            (999, "999 B"),
            (1000, "1.0 kB"),
            (1049, "1.0 kB"),
            (1050, "1.1 kB"),
            (9_949, "9.9 kB"),
            (20_480, "20 kB"),
            (999_999, "1000 kB"),
            (2_147_483_648, "2.1 GB"),
            (u64::MAX, "18 EB"),
        ];
        for (bytes, text) in shown {
            assert_eq!(human_bytes(bytes), text);
        }
    }
}
