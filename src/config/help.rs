//! What `--help` prints, and the usage lines behind a refused flag.
//!
//! The layout is etcd's, a flag and its default in one line and a sentence below, because tools search it for flag names
//! before they use them.

use std::fmt::Write;

use super::feature_gate::{FeatureGate, Stage};
use super::setting::{SETTINGS, Section, Setting, Status};

/// How to call the program; printed with every refused flag and with the help.
pub const USAGE: &str = "\
Usage:

  skeg [flags]
    Start a server.

  skeg --version
    Show the version.

  skeg -h | --help
    Show this help.

  skeg --config-file PATH
    Take the settings from a YAML or JSON file; other flags and ETCD_* variables are then ignored.
    Times that a flag writes with a unit (10m) are integer nanoseconds there (600000000000).
";

/// Returns every setting with its default, by section.
pub(super) fn flags() -> String {
    let mut text = String::new();
    for section in Section::LISTED {
        writeln!(text, "\n{}:", section.title()).expect("writing to a string cannot fail");
        for setting in SETTINGS.iter().filter(|setting| setting.section == section) {
            flag(&mut text, setting).expect("writing to a string cannot fail");
        }
    }
    text.push_str("\nAcknowledged writes may be lost, or a cluster torn, with what is listed as unsafe.\n");
    text
}

fn flag(text: &mut String, setting: &Setting) -> std::fmt::Result {
    writeln!(text, "  --{} '{}'", setting.name, setting.shown_default)?;
    write!(text, "    {}", setting.help)?;
    match setting.status {
        Status::Effective => writeln!(text)?,
        Status::Ignored(why) => writeln!(text, " Accepted and ignored: {why}.")?,
        Status::NotYet(why) => writeln!(text, " No effect yet: {why}.")?,
    }
    if setting.name == "feature-gates" {
        for (name, stage, default) in gates() {
            writeln!(text, "    {name}=true|false ({stage} - default={default})")?;
        }
    }
    Ok(())
}

fn gates() -> Vec<(&'static str, &'static str, bool)> {
    let stage = |stage| if stage == Stage::Alpha { "ALPHA" } else { "BETA" };
    let mut gates: Vec<_> = FeatureGate::ALL
        .into_iter()
        .map(|gate| (gate.name(), stage(gate.stage()), gate.default_value()))
        .chain([("AllAlpha", "ALPHA", false), ("AllBeta", "BETA", false)])
        .collect();
    gates.sort_unstable();
    gates
}

#[cfg(test)]
mod tests {
    use std::fmt::Write;

    use super::{SETTINGS, Section, Status, flags};

    const DOCUMENT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/compatibility.md");

    fn document_table() -> String {
        let mut text = String::new();
        for section in Section::LISTED.into_iter().chain([Section::Hidden]) {
            let title = section.title();
            writeln!(text, "\n| {title} | default | here |\n|---|---|---|")
                .expect("writing to a string cannot fail");
            for setting in SETTINGS.iter().filter(|setting| setting.section == section) {
                let default = match setting.shown_default {
                    "" => String::new(),
                    default => format!("`{default}`"),
                };
                let here = match setting.status {
                    Status::Effective => "effective".to_owned(),
                    Status::Ignored(why) => format!("ignored: {why}"),
                    Status::NotYet(why) => format!("not yet: {why}"),
                };
                writeln!(text, "| `--{}` | {default} | {here} |", setting.name)
                    .expect("writing to a string cannot fail");
            }
        }
        text
    }

    #[test]
    fn the_document_lists_every_flag() {
        let document = std::fs::read_to_string(DOCUMENT).unwrap();
        let (before, rest) = document.split_once("UPDATE_DOCS=1 -->\n").unwrap();
        let (table, after) = rest.split_once("\n<!-- end of flags -->").unwrap_or(("", rest));
        let want = document_table();
        if std::env::var_os("UPDATE_DOCS").is_some() {
            let after = after.trim_start_matches("<!-- end of flags -->");
            let text = format!("{before}UPDATE_DOCS=1 -->\n{want}\n<!-- end of flags -->{after}");
            std::fs::write(DOCUMENT, text).unwrap();
        } else {
            assert_eq!(table, want, "run this test with UPDATE_DOCS=1");
        }
    }

    #[test]
    fn every_setting_has_a_line_and_a_sentence() {
        let help = flags();
        for setting in
            SETTINGS.iter().filter(|setting| !matches!(setting.section, Section::Hidden | Section::Other))
        {
            let line = format!("\n  --{} '", setting.name);
            assert!(help.contains(&line), "--{}", setting.name);
            assert!(help.contains(setting.help), "--{}", setting.name);
        }
    }

    #[test]
    fn gates_are_listed() {
        assert!(flags().contains("\n    AllAlpha=true|false (ALPHA - default=false)\n"));
        assert!(flags().contains("\n    FastLeaseKeepAlive=true|false (BETA - default=true)\n"));
    }
}
