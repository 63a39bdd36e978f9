//! The command line, by the rules of etcdutl's: flags before or after what they belong to, commands by any beginning of
//! their name that is theirs alone.
//!
//! A library would bring more than the dozen packages and still not say these things in these words: scripts look for them.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fmt::Write;
use std::path::PathBuf;

const PROGRAM: &str = "skegutl";

/// What a flag takes.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Text,
    Unsigned,
    Signed,
    Duration,
    /// Nothing, or a boolean behind `=`.
    Switch,
}

struct Flag {
    name: &'static str,
    short: Option<char>,
    kind: Kind,
    default: &'static str,
    help: &'static str,
}

const fn flag(name: &'static str, kind: Kind, default: &'static str, help: &'static str) -> Flag {
    Flag { name, short: None, kind, default, help }
}

struct Command {
    /// Names from the root on.
    path: &'static str,
    /// What is behind the name in the usage.
    usage: &'static str,
    help: &'static str,
    flags: &'static [Flag],
    required: &'static [&'static str],
    /// How many arguments there must be, if the command does not say so itself.
    arguments: Option<usize>,
}

const GLOBAL: &[Flag] = &[
    flag(
        "timeout",
        Kind::Duration,
        "10s",
        "time to wait for a lock; accepted, for nothing here waits for one",
    ),
    Flag {
        name: "write-out",
        short: Some('w'),
        kind: Kind::Text,
        default: "simple",
        help: "output format: fields, json, protobuf, simple or table",
    },
];

const COMMANDS: &[Command] = &[
    Command {
        path: "defrag",
        usage: "",
        help: "Rewrites the store of a data directory, for no more space than it needs",
        flags: &[flag("data-dir", Kind::Text, "", "data directory that no server uses (required)")],
        required: &["data-dir"],
        arguments: None,
    },
    Command {
        path: "hashkv",
        usage: " <filename>",
        help: "Hashes the history of keys in a file",
        flags: &[flag("rev", Kind::Signed, "0", "revision to hash up to; the current one by default")],
        required: &[],
        arguments: Some(1),
    },
    Command {
        path: "migrate",
        usage: "",
        help: "Brings a data directory to another storage version",
        flags: &[
            flag("data-dir", Kind::Text, "", "data directory that no server uses (required)"),
            flag("force", Kind::Switch, "false", "accepted; there is nothing to force"),
            flag("target-version", Kind::Text, "", "storage version as X.Y, from 3.5 on (required)"),
        ],
        required: &["data-dir", "target-version"],
        arguments: None,
    },
    Command {
        path: "snapshot export",
        usage: " <filename> --target-version X.Y --output {file}",
        help: "Makes a snapshot for an older etcd of one",
        flags: &[
            flag("output", Kind::Text, "", "file to make (required)"),
            flag(
                "skip-hash-check",
                Kind::Switch,
                "false",
                "take a file without a checksum, or with a wrong one",
            ),
            flag("target-version", Kind::Text, "", "etcd version as X.Y: 3.5, 3.6 or 3.7 (required)"),
        ],
        required: &["output", "target-version"],
        arguments: None,
    },
    Command {
        path: "snapshot restore",
        usage: " <filename> --data-dir {output dir} [options]",
        help: "Makes a data directory of a snapshot",
        flags: &[
            flag("bump-revision", Kind::Unsigned, "0", "raise the revision by so much"),
            flag("data-dir", Kind::Text, "", "directory to make; <name>.etcd by default"),
            flag(
                "initial-advertise-peer-urls",
                Kind::Text,
                "http://localhost:2380",
                "peer URLs of this member",
            ),
            flag(
                "initial-cluster",
                Kind::Text,
                "default=http://localhost:2380",
                "members of the new cluster",
            ),
            flag("initial-cluster-token", Kind::Text, "etcd-cluster", "token of the new cluster"),
            flag("initial-memory-map-size", Kind::Unsigned, "10737418240", "accepted; no file is mapped"),
            flag(
                "mark-compacted",
                Kind::Switch,
                "false",
                "compact all before the raised revision; goes with it",
            ),
            flag("name", Kind::Text, "default", "name of this member"),
            flag(
                "skip-hash-check",
                Kind::Switch,
                "false",
                "take a file without a checksum, or with a wrong one",
            ),
            flag("wal-dir", Kind::Text, "", "directory of the log, outside of the data directory"),
        ],
        required: &[],
        arguments: None,
    },
    Command {
        path: "snapshot status",
        usage: " <filename>",
        help: "Checks a snapshot and shows what is in it",
        flags: &[],
        required: &[],
        arguments: None,
    },
    Command {
        path: "version",
        usage: "",
        help: "Shows the version",
        flags: &[],
        required: &[],
        arguments: None,
    },
];

/// What is shown for the commands that only have commands below them.
const GROUPS: &[(&str, &str)] = &[("", ""), ("snapshot", "Works on snapshots")];

/// What the command line asks for.
pub(super) enum Parsed {
    Run(Invocation),
    /// Show this.
    Help(String),
}

/// A command with its flags, all of which have a value that can be read.
pub(super) struct Invocation {
    pub(super) command: &'static str,
    pub(super) positional: Vec<OsString>,
    flags: BTreeMap<&'static str, OsString>,
}

impl Invocation {
    pub(super) fn text(&self, flag: &str) -> &str {
        self.flags[flag].to_str().unwrap_or_default()
    }

    pub(super) fn path(&self, flag: &str) -> PathBuf {
        PathBuf::from(&self.flags[flag])
    }

    pub(super) fn number(&self, flag: &str) -> i128 {
        self.text(flag).parse().unwrap_or_default()
    }

    pub(super) fn is_on(&self, flag: &str) -> bool {
        boolean(self.text(flag)) == Some(true)
    }
}

/// As Go reads it.
fn boolean(text: &str) -> Option<bool> {
    match text {
        "1" | "t" | "T" | "true" | "TRUE" | "True" => Some(true),
        "0" | "f" | "F" | "false" | "FALSE" | "False" => Some(false),
        _ => None,
    }
}

/// Reads the command line.
///
/// # Errors
/// What is said of it, and the usage where etcdutl shows it.
pub(super) fn parse(arguments: impl Iterator<Item = OsString>) -> Result<Parsed, String> {
    let mut words = arguments;
    let mut at = String::new();
    let mut positional = Vec::new();
    let mut given: BTreeMap<&'static str, OsString> = BTreeMap::new();
    let mut only_words = false;
    let mut wants_help = false;
    while let Some(word) = words.next() {
        let text = word.to_string_lossy().into_owned();
        if only_words || !text.starts_with('-') || text == "-" {
            if command(&at).is_some() {
                positional.push(word);
            } else if at.is_empty() && text == "help" {
                wants_help = true;
            } else {
                match below(&at, &text) {
                    Some(path) => at = path,
                    // A group shows its usage whatever is behind it.
                    None if !at.is_empty() => return Ok(Parsed::Help(usage(&at))),
                    None => {
                        return Err(format!(
                            "Error: unknown command {text:?} for \"{PROGRAM}\"\nRun '{PROGRAM} --help' for usage.\n"
                        ));
                    }
                }
            }
        } else if text == "--" {
            only_words = true;
        } else if text == "-h" || text == "--help" {
            wants_help = true;
        } else {
            let said = flag_value(&at, &text, &mut words);
            let (name, value) = said.map_err(|problem| with_usage(&problem, &at))?;
            given.insert(name, value);
        }
    }
    let command = match command(&at) {
        Some(command) if !wants_help => command,
        _ => return Ok(Parsed::Help(usage(&at))),
    };
    if let Some(count) = command.arguments.filter(|count| *count != positional.len()) {
        let problem = format!("accepts {count} arg(s), received {}", positional.len());
        return Err(with_usage(&problem, &at));
    }
    let missing: Vec<String> = command
        .required
        .iter()
        .filter(|name| !given.contains_key(*name))
        .map(|name| format!("{name:?}"))
        .collect();
    if !missing.is_empty() {
        return Err(with_usage(&format!("required flag(s) {} not set", missing.join(", ")), &at));
    }
    let mut flags: BTreeMap<&'static str, OsString> =
        command.flags.iter().chain(GLOBAL).map(|flag| (flag.name, flag.default.into())).collect();
    flags.extend(given);
    Ok(Parsed::Run(Invocation { command: command.path, positional, flags }))
}

fn command(path: &str) -> Option<&'static Command> {
    COMMANDS.iter().find(|command| command.path == path)
}

/// The command or group below `at` that `word` names or begins, if there is only one.
fn below(at: &str, word: &str) -> Option<String> {
    let mut names: Vec<&str> = COMMANDS
        .iter()
        .filter_map(|command| match at {
            "" => command.path.split(' ').next(),
            _ => command.path.strip_prefix(at)?.strip_prefix(' '),
        })
        .collect();
    names.dedup();
    let exact = names.iter().copied().find(|name| *name == word);
    let mut begun = names.iter().copied().filter(|name| name.starts_with(word));
    let name = exact.or_else(|| begun.next().filter(|_| begun.next().is_none()))?;
    Some(if at.is_empty() { name.to_owned() } else { format!("{at} {name}") })
}

/// Reads one flag and its value.
fn flag_value(
    at: &str,
    text: &str,
    words: &mut impl Iterator<Item = OsString>,
) -> Result<(&'static str, OsString), String> {
    let known = command(at).map_or(&[][..], |command| command.flags);
    let mut flags = known.iter().chain(GLOBAL);
    let (flag, shown, inline) = if let Some(long) = text.strip_prefix("--") {
        let (name, value) = long.split_once('=').map_or((long, None), |(name, value)| (name, Some(value)));
        let flag = flags.find(|flag| flag.name == name);
        let flag = flag.ok_or_else(|| format!("unknown flag: --{name}"))?;
        (flag, format!("--{name}"), value)
    } else {
        let letters = &text[1..];
        let letter = letters.chars().next().unwrap_or('-');
        let flag = flags.find(|flag| flag.short == Some(letter));
        let flag = flag.ok_or_else(|| format!("unknown shorthand flag: '{letter}' in -{letters}"))?;
        let rest = &letters[letter.len_utf8()..];
        let value = (!rest.is_empty()).then(|| rest.strip_prefix('=').unwrap_or(rest));
        (flag, format!("-{letter}, --{}", flag.name), value)
    };
    let value = match inline {
        Some(value) => value.into(),
        None if flag.kind == Kind::Switch => "true".into(),
        None => words.next().ok_or_else(|| match text.strip_prefix("--") {
            Some(_) => format!("flag needs an argument: {text}"),
            None => format!("flag needs an argument: '{}' in {text}", &text[1..]),
        })?,
    };
    check(flag.kind, &value)
        .map_err(|why| format!("invalid argument {:?} for {shown:?} flag: {why}", value.to_string_lossy()))?;
    Ok((flag.name, value))
}

fn check(kind: Kind, value: &OsString) -> Result<(), String> {
    // Only paths may be other than text.
    let Some(text) = value.to_str() else {
        return if kind == Kind::Text { Ok(()) } else { Err("not text".to_owned()) };
    };
    let (is_good, function) = match kind {
        Kind::Text => (true, ""),
        Kind::Unsigned => (text.parse::<u64>().is_ok(), "ParseUint"),
        Kind::Signed => (text.parse::<i64>().is_ok(), "ParseInt"),
        Kind::Switch => (boolean(text).is_some(), "ParseBool"),
        Kind::Duration
            if text == "0"
                || text.ends_with(['s', 'm', 'h']) && text.starts_with(|c: char| c.is_ascii_digit()) =>
        {
            (true, "")
        }
        Kind::Duration => return Err(format!("time: invalid duration {text:?}")),
    };
    if is_good { Ok(()) } else { Err(format!("strconv.{function}: parsing {text:?}: invalid syntax")) }
}

fn with_usage(problem: &str, at: &str) -> String {
    format!("Error: {problem}\n{}\n", usage(at))
}

/// The help of a command or group.
fn usage(at: &str) -> String {
    let mut out = String::from("Usage:\n");
    let full = if at.is_empty() { PROGRAM.to_owned() } else { format!("{PROGRAM} {at}") };
    let mut own = String::new();
    match command(at) {
        Some(command) => {
            let _ = writeln!(out, "  {full}{} [flags]\n\n{}", command.usage, command.help);
            own = flag_lines(command.flags, true);
        }
        None => {
            let _ = writeln!(out, "  {full} [command]\n\nCommands:");
            for (name, help) in listed(at) {
                let _ = writeln!(out, "  {name:<11} {help}");
            }
        }
    }
    let _ = write!(out, "\nFlags:\n{}", if own.is_empty() { flag_lines(&[], true) } else { own });
    let _ = write!(out, "\nGlobal Flags:\n{}", flag_lines(GLOBAL, false));
    if command(at).is_none() {
        let _ = writeln!(out, "\nUse \"{full} [command] --help\" for more about a command.");
    }
    out
}

/// Names below a group, with what they are.
fn listed(at: &str) -> Vec<(&'static str, &'static str)> {
    let mut out: Vec<(&'static str, &'static str)> = Vec::new();
    for command in COMMANDS {
        let inside = if at.is_empty() {
            Some(command.path)
        } else {
            command.path.strip_prefix(at).and_then(|rest| rest.strip_prefix(' '))
        };
        let Some(inside) = inside else { continue };
        let entry = match inside.split_once(' ') {
            None => (inside, command.help),
            Some((group, _)) => {
                let help = GROUPS.iter().find(|(name, _)| *name == group).map_or("", |(_, help)| help);
                (group, help)
            }
        };
        if !out.contains(&entry) {
            out.push(entry);
        }
    }
    out
}

fn flag_lines(flags: &[Flag], with_help: bool) -> String {
    let mut lines: Vec<(String, String)> = flags
        .iter()
        .map(|flag| {
            let short = flag.short.map_or("    ".to_owned(), |letter| format!("-{letter}, "));
            let takes = match flag.kind {
                Kind::Text => " string",
                Kind::Unsigned => " uint",
                Kind::Signed => " int",
                Kind::Duration => " duration",
                Kind::Switch => "",
            };
            let default = match (flag.kind, flag.default) {
                (_, "" | "0" | "false") => String::new(),
                (Kind::Text, default) => format!(" (default {default:?})"),
                (_, default) => format!(" (default {default})"),
            };
            (format!("  {short}--{}{takes}", flag.name), format!("{}{default}", flag.help))
        })
        .collect();
    if with_help {
        lines.push(("  -h, --help".to_owned(), "show this".to_owned()));
        lines.sort_by(|one, other| one.0[6..].cmp(&other.0[6..]));
    }
    let width = lines.iter().map(|(flag, _)| flag.len()).max().unwrap_or(0);
    lines.iter().map(|(flag, help)| format!("{flag:<width$}   {help}\n")).collect()
}
