//! The kinds of value a setting may hold: how each is read from a flag or variable, and from a config file.
//!
//! The two differ on purpose: a flag says `5s` and `a,b`, a file says `5000000000` and `[a, b]`.

use serde_json::Value;

use super::feature_gate::FeatureGates;
use super::syntax::{self, ValueError};
use super::url::Url;

/// A kind of value.
pub(super) trait Kind {
    /// What is kept.
    type Stored: Clone + Default + PartialEq;
    /// Whether the flag may stand alone, meaning true.
    const SWITCH: bool = false;

    /// Takes in the text of a flag or variable.
    fn set(stored: &mut Self::Stored, text: &str) -> Result<(), ValueError>;

    /// Takes in the value of a config file; null leaves things as they are.
    fn set_from_file(stored: &mut Self::Stored, value: &Value) -> Result<(), ValueError> {
        Self::set(stored, &text_of(value)?)
    }
}

/// Any text.
pub(super) enum Text {}

impl Kind for Text {
    type Stored = String;

    fn set(stored: &mut String, text: &str) -> Result<(), ValueError> {
        text.clone_into(stored);
        Ok(())
    }
}

/// True or false.
pub(super) enum Switch {}

impl Kind for Switch {
    type Stored = bool;
    const SWITCH: bool = true;

    fn set(stored: &mut bool, text: &str) -> Result<(), ValueError> {
        *stored = syntax::boolean(text)?;
        Ok(())
    }

    fn set_from_file(stored: &mut bool, value: &Value) -> Result<(), ValueError> {
        *stored = value.as_bool().ok_or_else(|| expected("true or false", value))?;
        Ok(())
    }
}

/// An unsigned 64-bit number.
pub(super) enum Unsigned {}

impl Kind for Unsigned {
    type Stored = u64;

    fn set(stored: &mut u64, text: &str) -> Result<(), ValueError> {
        *stored = syntax::unsigned(text, 64)?;
        Ok(())
    }

    fn set_from_file(stored: &mut u64, value: &Value) -> Result<(), ValueError> {
        *stored = value.as_u64().ok_or_else(|| expected("an unsigned integer", value))?;
        Ok(())
    }
}

/// An unsigned 32-bit number.
pub(super) enum Unsigned32 {}

impl Kind for Unsigned32 {
    type Stored = u32;

    fn set(stored: &mut u32, text: &str) -> Result<(), ValueError> {
        *stored =
            u32::try_from(syntax::unsigned(text, 32)?).map_err(|_| ValueError::new("value out of range"))?;
        Ok(())
    }

    fn set_from_file(stored: &mut u32, value: &Value) -> Result<(), ValueError> {
        let number = value.as_u64().and_then(|number| u32::try_from(number).ok());
        *stored = number.ok_or_else(|| expected("an unsigned 32-bit integer", value))?;
        Ok(())
    }
}

/// A signed 64-bit number.
pub(super) enum Signed {}

impl Kind for Signed {
    type Stored = i64;

    fn set(stored: &mut i64, text: &str) -> Result<(), ValueError> {
        *stored = syntax::signed(text)?;
        Ok(())
    }

    fn set_from_file(stored: &mut i64, value: &Value) -> Result<(), ValueError> {
        *stored = value.as_i64().ok_or_else(|| expected("an integer", value))?;
        Ok(())
    }
}

/// A signed time span in nanoseconds.
pub(super) enum Span {}

impl Kind for Span {
    type Stored = i64;

    fn set(stored: &mut i64, text: &str) -> Result<(), ValueError> {
        *stored = syntax::duration(text)?;
        Ok(())
    }

    fn set_from_file(stored: &mut i64, value: &Value) -> Result<(), ValueError> {
        *stored = value.as_i64().ok_or_else(|| expected("an integer number of nanoseconds", value))?;
        Ok(())
    }
}

/// A sorted list of distinct URLs; an empty text leaves the list as it is.
pub(super) enum Urls {}

impl Kind for Urls {
    type Stored = Vec<Url>;

    fn set(stored: &mut Vec<Url>, text: &str) -> Result<(), ValueError> {
        if !text.is_empty() {
            *stored = Url::parse_list(text)?;
        }
        Ok(())
    }
}

/// A sorted list of distinct texts; comma-separated in flags, a list in files.
pub(super) enum TextSet {}

impl Kind for TextSet {
    type Stored = Vec<String>;

    fn set(stored: &mut Vec<String>, text: &str) -> Result<(), ValueError> {
        *stored = text.split(',').map(str::to_owned).collect();
        stored.sort();
        stored.dedup();
        Ok(())
    }

    fn set_from_file(stored: &mut Vec<String>, value: &Value) -> Result<(), ValueError> {
        TextList::set_from_file(stored, value)?;
        stored.sort();
        stored.dedup();
        Ok(())
    }
}

/// As [`TextSet`], but comma-separated in files too, where an empty text leaves it as it is.
pub(super) enum HostSet {}

impl Kind for HostSet {
    type Stored = Vec<String>;

    fn set(stored: &mut Vec<String>, text: &str) -> Result<(), ValueError> {
        TextSet::set(stored, text)
    }

    fn set_from_file(stored: &mut Vec<String>, value: &Value) -> Result<(), ValueError> {
        match text_of(value)?.as_str() {
            "" => Ok(()),
            text => TextSet::set(stored, text),
        }
    }
}

/// Origins of web pages: URLs, or `*` for all.
pub(super) enum Origins {}

impl Kind for Origins {
    type Stored = Vec<String>;

    fn set(stored: &mut Vec<String>, text: &str) -> Result<(), ValueError> {
        *stored = match text {
            "*" => vec![text.to_owned()],
            _ => Url::parse_list(text)?.iter().map(Url::to_string).collect(),
        };
        Ok(())
    }

    fn set_from_file(stored: &mut Vec<String>, value: &Value) -> Result<(), ValueError> {
        match text_of(value)?.as_str() {
            "" => Ok(()),
            text => Self::set(stored, text),
        }
    }
}

/// A list of texts in the order given; comma-separated in flags, a list in files.
pub(super) enum TextList {}

impl Kind for TextList {
    type Stored = Vec<String>;

    fn set(stored: &mut Vec<String>, text: &str) -> Result<(), ValueError> {
        *stored = if text.is_empty() { Vec::new() } else { text.split(',').map(str::to_owned).collect() };
        Ok(())
    }

    fn set_from_file(stored: &mut Vec<String>, value: &Value) -> Result<(), ValueError> {
        let list = value.as_array().ok_or_else(|| expected("a list", value))?;
        *stored = list.iter().map(text_of).collect::<Result<_, _>>()?;
        Ok(())
    }
}

/// `new` or `existing`; a file may also leave it empty.
pub(super) enum StateText {}

impl Kind for StateText {
    type Stored = String;

    fn set(stored: &mut String, text: &str) -> Result<(), ValueError> {
        choose(stored, text, &["new", "existing"])
    }

    fn set_from_file(stored: &mut String, value: &Value) -> Result<(), ValueError> {
        // Any text passes here and is refused with the other checks.
        Text::set_from_file(stored, value)
    }
}

/// What to do when discovery fails.
pub(super) enum FallbackText {}

impl Kind for FallbackText {
    type Stored = String;

    fn set(stored: &mut String, text: &str) -> Result<(), ValueError> {
        choose(stored, text, &["exit", "proxy"])
    }
}

/// Stages of etcd's farewell to its version 2.
pub(super) enum DeprecationText {}

impl Kind for DeprecationText {
    type Stored = String;

    fn set(stored: &mut String, text: &str) -> Result<(), ValueError> {
        const STAGES: &[&str] = &["write-only", "write-only-skip-check", "write-only-drop-data", "gone"];
        text.split(',').try_for_each(|part| choose(&mut String::new(), part, STAGES))?;
        Text::set(stored, text)
    }

    fn set_from_file(stored: &mut String, value: &Value) -> Result<(), ValueError> {
        Text::set_from_file(stored, value)
    }
}

/// Feature gates.
pub(super) enum Gates {}

impl Kind for Gates {
    type Stored = FeatureGates;

    fn set(stored: &mut FeatureGates, text: &str) -> Result<(), ValueError> {
        stored.set(text)
    }
}

/// A flag of old that may carry anything.
pub(super) enum Anything {}

impl Kind for Anything {
    type Stored = ();
    const SWITCH: bool = true;

    fn set(_: &mut (), _: &str) -> Result<(), ValueError> {
        Ok(())
    }
}

fn choose(stored: &mut String, text: &str, valid: &[&str]) -> Result<(), ValueError> {
    if !valid.contains(&text) {
        return Err(ValueError::new(format!("invalid value {text:?}, expected one of {}", valid.join(", "))));
    }
    text.clone_into(stored);
    Ok(())
}

/// Reads a text; a number or a truth value must be quoted to be one.
fn text_of(value: &Value) -> Result<String, ValueError> {
    value.as_str().map(str::to_owned).ok_or_else(|| expected("a text", value))
}

fn expected(what: &str, found: &Value) -> ValueError {
    let found = match found {
        Value::Null => "nothing".to_owned(),
        Value::Array(_) => "a list".to_owned(),
        Value::Object(_) => "a section".to_owned(),
        scalar => scalar.to_string(),
    };
    ValueError::new(format!("expected {what}, found {found}"))
}
