//! The three sources of settings, and which of them counts.
//!
//! ```text
//! flags (syntax always checked) ── --version, --help answer at once
//!   │
//!   ├─ --config-file or ETCD_CONFIG_FILE given: the file alone counts
//!   └─ otherwise: defaults, then ETCD_* variables, then flags; a setting given by both is refused
//! ```
//!
//! Flags follow Go's habits: `-x` and `--x` are one, a value follows `=` or as the next argument, a switch stands alone,
//! the last of several counts, and the first argument that is no flag ends them (and is refused: there are no positional
//! arguments). etcd: `server/etcdmain/config.go`, `pkg/flags/flag.go`.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::Read;
use std::path::Path;

use serde_json::Value;

use super::Refusal;
use super::setting::{SETTINGS, Setting, Values, find};

/// A config file larger than this is not one.
const FILE_MAX_BYTES: u64 = 1 << 20;

/// Settings as they were given.
pub(super) struct Given {
    /// Every value, defaults included.
    pub(super) values: Values,
    /// The flag names of those that were given.
    pub(super) set: BTreeSet<&'static str>,
    /// Where they came from, when it was a file.
    pub(super) from_file: bool,
    /// Variables that look like settings and are none.
    pub(super) unknown_variables: Vec<String>,
}

/// What the command line asks for.
pub(super) enum Wish {
    /// Run with these settings.
    Settings(Box<Given>),
    /// Print the help.
    Help,
    /// Print the version.
    Version,
}

impl Given {
    fn nothing() -> Self {
        Self {
            values: Values::defaults(),
            set: BTreeSet::new(),
            from_file: false,
            unknown_variables: Vec::new(),
        }
    }

    /// Says whether a setting was given, by flag name.
    pub(super) fn has(&self, name: &str) -> bool {
        self.set.contains(name)
    }
}

/// Reads the arguments (the program's name aside) and the environment.
pub(super) fn read(
    arguments: impl IntoIterator<Item = OsString>,
    environment: impl IntoIterator<Item = (OsString, OsString)>,
) -> Result<Wish, Refusal> {
    let mut given = Given::nothing();
    match read_flags(&mut given, arguments)? {
        FlagsEnd::Help => return Ok(Wish::Help),
        FlagsEnd::Positional(argument) => {
            return Err(Refusal::Invalid(format!("{argument:?} is not a valid flag")));
        }
        FlagsEnd::Exhausted => {}
    }
    if given.values.version {
        return Ok(Wish::Version);
    }
    let environment: BTreeMap<OsString, OsString> = environment.into_iter().collect();
    let file = if given.values.config_file.is_empty() {
        environment.get(OsStr::new("ETCD_CONFIG_FILE")).cloned().unwrap_or_default()
    } else {
        OsString::from(&given.values.config_file)
    };
    if file.is_empty() {
        read_environment(&mut given, &environment)?;
    } else {
        given = read_file(Path::new(&file))?;
    }
    Ok(Wish::Settings(Box::new(given)))
}

enum FlagsEnd {
    Exhausted,
    Help,
    Positional(OsString),
}

fn read_flags(given: &mut Given, arguments: impl IntoIterator<Item = OsString>) -> Result<FlagsEnd, Refusal> {
    let mut arguments = arguments.into_iter();
    while let Some(argument) = arguments.next() {
        let bytes = argument.as_encoded_bytes();
        if bytes.len() < 2 || bytes[0] != b'-' {
            return Ok(FlagsEnd::Positional(argument));
        }
        if bytes == b"--" {
            return Ok(arguments.next().map_or(FlagsEnd::Exhausted, FlagsEnd::Positional));
        }
        let text = argument.to_string_lossy();
        let body = text.strip_prefix("--").or_else(|| text.strip_prefix('-')).unwrap_or(&text);
        if body.is_empty() || body.starts_with(['-', '=']) {
            return Err(Refusal::Usage(format!("bad flag syntax: {text}")));
        }
        let (name, value) = match body.split_once('=') {
            Some((name, value)) => (name, Some(value)),
            None => (body, None),
        };
        let Some(setting) = find(name) else {
            if name == "help" || name == "h" {
                return Ok(FlagsEnd::Help);
            }
            return Err(Refusal::Usage(format!("flag provided but not defined: -{name}")));
        };
        let value = match value {
            Some(value) => {
                checked_utf8(setting, &argument)?;
                value.to_owned()
            }
            None if setting.switch => "true".to_owned(),
            None => {
                let next = arguments.next();
                let next = next.ok_or_else(|| Refusal::Usage(format!("flag needs an argument: -{name}")))?;
                checked_utf8(setting, &next)?.to_owned()
            }
        };
        (setting.set)(&mut given.values, &value)
            .map_err(|error| bad_flag_value(setting, &value, &error.0))?;
        given.set.insert(setting.name);
    }
    Ok(FlagsEnd::Exhausted)
}

fn bad_flag_value(setting: &Setting, value: &str, error: &str) -> Refusal {
    let what = if setting.switch { "boolean value" } else { "value" };
    let to = if setting.switch { "for" } else { "for flag" };
    Refusal::Usage(format!("invalid {what} {value:?} {to} -{}: {error}", setting.name))
}

fn checked_utf8<'a>(setting: &Setting, text: &'a OsStr) -> Result<&'a str, Refusal> {
    text.to_str().ok_or_else(|| {
        Refusal::Usage(format!("invalid value {text:?} for flag -{}: not UTF-8", setting.name))
    })
}

/// Returns the variable that stands for a flag.
pub(super) fn variable(flag: &str) -> String {
    format!("ETCD_{}", flag.to_uppercase().replace('-', "_"))
}

fn read_environment(given: &mut Given, environment: &BTreeMap<OsString, OsString>) -> Result<(), Refusal> {
    let mut known = BTreeSet::new();
    for setting in SETTINGS {
        let variable = variable(setting.name);
        // Image builders set ETCD_VERSION to tell themselves what is inside.
        let value = environment.get(OsStr::new(&variable)).filter(|_| setting.name != "version");
        if given.has(setting.name) {
            if value.is_some() {
                return Err(Refusal::Invalid(format!(
                    "conflicting environment variable {variable} is shadowed by the flag --{}; unset one of them",
                    setting.name
                )));
            }
        } else if let Some(value) = value.filter(|value| !value.is_empty()) {
            let invalid = |why: &str| {
                let name = setting.name;
                Refusal::Invalid(format!("invalid value {value:?} for {variable} (--{name}): {why}"))
            };
            let text = value.to_str().ok_or_else(|| invalid("not UTF-8"))?;
            (setting.set)(&mut given.values, text).map_err(|error| invalid(&error.0))?;
            given.set.insert(setting.name);
        }
        known.insert(variable);
    }
    given.unknown_variables = environment
        .keys()
        .map(|key| key.to_string_lossy())
        .filter(|key| key.starts_with("ETCD_") && !known.contains(key.as_ref()))
        .map(|key| key.into_owned())
        .collect();
    Ok(())
}

fn read_file(path: &Path) -> Result<Given, Refusal> {
    let shown = path.display();
    let failed = |why: String| Refusal::Invalid(format!("cannot load --config-file {shown}: {why}"));
    let file = File::open(path).map_err(|error| failed(error.to_string()))?;
    let mut text = String::new();
    let read =
        file.take(FILE_MAX_BYTES + 1).read_to_string(&mut text).map_err(|error| failed(error.to_string()))?;
    if u64::try_from(read).is_ok_and(|read| read > FILE_MAX_BYTES) {
        return Err(failed(format!("it has more than the {FILE_MAX_BYTES} bytes that are read")));
    }
    read_file_text(&text).map_err(failed)
}

/// Takes in the text of a config file; an error completes "cannot load --config-file …: ".
pub(super) fn read_file_text(text: &str) -> Result<Given, String> {
    // JSON is YAML; of a key given twice the last counts.
    let root: Value = if text.trim().is_empty() {
        Value::Null
    } else {
        yaml_serde::from_str(text).map_err(|error| error.to_string())?
    };
    let mut given = Given::nothing();
    given.from_file = true;
    if root.is_null() {
        return Ok(given);
    }
    if !root.is_object() {
        return Err("its outermost level is not a list of settings".to_owned());
    }
    for setting in SETTINGS.iter().filter(|setting| !setting.file_path.is_empty()) {
        let Some(value) = lookup(&root, setting.file_path)? else { continue };
        (setting.set_from_file)(&mut given.values, value).map_err(|error| {
            format!("{} (--{}): {error}", setting.file_path.replace('/', "."), setting.name)
        })?;
        given.set.insert(setting.name);
    }
    Ok(given)
}

/// Walks to a value; keys match in either case, as etcd's file reader lets them.
fn lookup<'a>(root: &'a Value, path: &str) -> Result<Option<&'a Value>, String> {
    let mut value = root;
    let mut walked = String::new();
    for key in path.split('/') {
        if value.is_null() {
            return Ok(None);
        }
        let section = value.as_object().ok_or_else(|| format!("{walked} is not a section"))?;
        let found = section.get(key).or_else(|| {
            section.iter().find(|(name, _)| name.eq_ignore_ascii_case(key)).map(|(_, value)| value)
        });
        let Some(found) = found else { return Ok(None) };
        value = found;
        if !walked.is_empty() {
            walked.push('.');
        }
        walked.push_str(key);
    }
    Ok(Some(value).filter(|value| !value.is_null()))
}
