//! How a value is written: Go's notation for booleans, numbers and durations, which etcd's flags inherit.
//!
//! Numbers may carry a base (`0x10`, `0o17`, `0b1`, a leading `0` for octal) and underscores between digits. Durations are
//! signed sums of decimal numbers with units (`1h30m`, `1.5s`); they are kept in nanoseconds, as etcd keeps them, since a
//! config file states them that way.

use std::fmt::Write;

/// Why a text is not a value; completes "invalid value "x" for flag -y: …".
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct ValueError(pub String);

impl ValueError {
    pub(super) fn new(text: impl Into<String>) -> Self {
        Self(text.into())
    }
}

/// Reads a boolean.
pub(super) fn boolean(text: &str) -> Result<bool, ValueError> {
    match text {
        "1" | "t" | "T" | "TRUE" | "true" | "True" => Ok(true),
        "0" | "f" | "F" | "FALSE" | "false" | "False" => Ok(false),
        _ => Err(parse_error()),
    }
}

/// Reads an unsigned number of at most `bits` bits.
pub(super) fn unsigned(text: &str, bits: u32) -> Result<u64, ValueError> {
    let number = magnitude(text)?;
    if bits < 64 && number >> bits != 0 {
        return Err(out_of_range());
    }
    Ok(number)
}

/// Reads a signed 64-bit number.
pub(super) fn signed(text: &str) -> Result<i64, ValueError> {
    let (negative, digits) = match text.as_bytes().first() {
        Some(b'-') => (true, &text[1..]),
        Some(b'+') => (false, &text[1..]),
        _ => (false, text),
    };
    let number = magnitude(digits)?;
    if negative {
        0_i64.checked_sub_unsigned(number).ok_or_else(out_of_range)
    } else {
        i64::try_from(number).map_err(|_| out_of_range())
    }
}

fn magnitude(text: &str) -> Result<u64, ValueError> {
    let (radix, digits, prefixed) = match text.as_bytes() {
        [b'0', b'x' | b'X', ..] => (16, &text[2..], true),
        [b'0', b'o' | b'O', ..] => (8, &text[2..], true),
        [b'0', b'b' | b'B', ..] => (2, &text[2..], true),
        [b'0', _, ..] => (8, &text[1..], true),
        _ => (10, text, false),
    };
    let mut number: u64 = 0;
    let mut after_digit = prefixed;
    for byte in digits.bytes() {
        if byte == b'_' {
            if !after_digit {
                return Err(parse_error());
            }
            after_digit = false;
            continue;
        }
        let digit = char::from(byte).to_digit(radix).ok_or_else(parse_error)?;
        number = number
            .checked_mul(u64::from(radix))
            .and_then(|number| number.checked_add(u64::from(digit)))
            .ok_or_else(out_of_range)?;
        after_digit = true;
    }
    if digits.is_empty() || !after_digit {
        return Err(parse_error());
    }
    Ok(number)
}

/// Reads a duration, in nanoseconds.
pub(super) fn duration(text: &str) -> Result<i64, ValueError> {
    let (negative, mut rest) = match text.as_bytes().first() {
        Some(b'-') => (true, &text[1..]),
        Some(b'+') => (false, &text[1..]),
        _ => (false, text),
    };
    if rest == "0" {
        return Ok(0);
    }
    if rest.is_empty() {
        return Err(parse_error());
    }
    let mut total: i128 = 0;
    while !rest.is_empty() {
        let (whole, after) = split_digits(rest);
        let (fraction, after) = match after.strip_prefix('.') {
            Some(after) => split_digits(after),
            None => ("", after),
        };
        if whole.is_empty() && fraction.is_empty() {
            return Err(parse_error());
        }
        let unit_end = after.find(|c: char| c == '.' || c.is_ascii_digit()).unwrap_or(after.len());
        let nanos = unit(&after[..unit_end])?;
        rest = &after[unit_end..];
        total += scaled(whole, fraction, nanos)?;
        if total > i128::from(i64::MAX) + i128::from(u8::from(negative)) {
            return Err(parse_error());
        }
    }
    i64::try_from(if negative { -total } else { total }).map_err(|_| parse_error())
}

fn split_digits(text: &str) -> (&str, &str) {
    text.split_at(text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len()))
}

fn unit(name: &str) -> Result<i128, ValueError> {
    Ok(match name {
        "ns" => 1,
        "us" | "µs" | "μs" => 1_000,
        "ms" => 1_000_000,
        "s" => 1_000_000_000,
        "m" => 60_000_000_000,
        "h" => 3_600_000_000_000,
        _ => return Err(parse_error()),
    })
}

/// Multiplies the decimal number `whole.fraction` by a unit, dropping what is below a nanosecond.
fn scaled(whole: &str, fraction: &str, nanos: i128) -> Result<i128, ValueError> {
    let whole: i128 = if whole.is_empty() { 0 } else { whole.parse().map_err(|_| parse_error())? };
    let whole = whole.checked_mul(nanos).ok_or_else(parse_error)?;
    // A unit is below 10^13 nanoseconds, so digits past the 18th cannot reach a whole one.
    let fraction = &fraction[..fraction.len().min(18)];
    let mut part = 0;
    let mut scale = 1;
    for digit in fraction.bytes() {
        part = part * 10 + i128::from(digit - b'0');
        scale *= 10;
    }
    Ok(whole + part * nanos / scale)
}

/// Writes a duration the way Go prints it: `1h0m0s`, `1.5s`, `100ms`.
pub(super) fn show_duration(nanos: i64) -> String {
    let size = nanos.unsigned_abs();
    let mut text = String::from(if nanos < 0 { "-" } else { "" });
    let written = match size {
        0 => write!(text, "0s"),
        1..1_000 => write!(text, "{size}ns"),
        1_000..1_000_000 => write!(text, "{}µs", decimal(size, 1_000)),
        1_000_000..1_000_000_000 => write!(text, "{}ms", decimal(size, 1_000_000)),
        _ => {
            let (minutes, seconds) = (size / 60_000_000_000, size % 60_000_000_000);
            let seconds = decimal(seconds, 1_000_000_000);
            match (minutes / 60, minutes % 60) {
                (0, 0) => write!(text, "{seconds}s"),
                (0, minutes) => write!(text, "{minutes}m{seconds}s"),
                (hours, minutes) => write!(text, "{hours}h{minutes}m{seconds}s"),
            }
        }
    };
    written.expect("writing to a string cannot fail");
    text
}

fn decimal(size: u64, unit: u64) -> String {
    let places = unit.ilog10();
    let fraction = format!("{:0width$}", size % unit, width = places as usize);
    let fraction = fraction.trim_end_matches('0');
    if fraction.is_empty() { format!("{}", size / unit) } else { format!("{}.{fraction}", size / unit) }
}

fn parse_error() -> ValueError {
    ValueError::new("parse error")
}

fn out_of_range() -> ValueError {
    ValueError::new("value out of range")
}

#[cfg(test)]
mod tests {
    use super::{boolean, duration, show_duration, signed, unsigned};

    #[test]
    fn booleans_are_gos() {
        for text in ["1", "t", "T", "true", "TRUE", "True"] {
            assert_eq!(boolean(text), Ok(true), "{text}");
        }
        for text in ["0", "f", "F", "false", "FALSE", "False"] {
            assert_eq!(boolean(text), Ok(false), "{text}");
        }
        for text in ["", "yes", "tRUE", "2", " true", "on"] {
            assert!(boolean(text).is_err(), "{text}");
        }
    }

    #[test]
    fn numbers_carry_bases_and_underscores() {
        for (text, want) in [
            ("0", 0),
            ("100", 100),
            ("0x1F", 31),
            ("0o17", 15),
            ("017", 15),
            ("0b101", 5),
            ("1_000", 1000),
            ("0x_1", 1),
            ("0_7", 7),
        ] {
            assert_eq!(unsigned(text, 64), Ok(want), "{text}");
        }
        for text in ["", "-1", "+1", "1.5", "0x", "08", "1__0", "_1", "1_", "ten", "1 ", "\u{ff11}"] {
            assert_eq!(unsigned(text, 64).unwrap_err().0, "parse error", "{text}");
        }
    }

    #[test]
    fn numbers_keep_to_their_width() {
        assert_eq!(unsigned("18446744073709551615", 64), Ok(u64::MAX));
        assert_eq!(unsigned("18446744073709551616", 64).unwrap_err().0, "value out of range");
        assert_eq!(unsigned("4294967295", 32), Ok(4_294_967_295));
        assert_eq!(unsigned("4294967296", 32).unwrap_err().0, "value out of range");
        assert_eq!(signed("-9223372036854775808"), Ok(i64::MIN));
        assert_eq!(signed("9223372036854775807"), Ok(i64::MAX));
        assert_eq!(signed("9223372036854775808").unwrap_err().0, "value out of range");
        assert_eq!(signed("-9223372036854775809").unwrap_err().0, "value out of range");
        assert_eq!(signed("+5"), Ok(5));
        assert_eq!(signed("--5").unwrap_err().0, "parse error");
    }

    #[test]
    fn durations_are_gos() {
        for (text, want) in [
            ("0", 0),
            ("-0", 0),
            ("0s", 0),
            ("5s", 5_000_000_000),
            ("100ms", 100_000_000),
            ("1h30m", 5_400_000_000_000),
            ("1.5h", 5_400_000_000_000),
            (".5s", 500_000_000),
            ("5.s", 5_000_000_000),
            ("-1m", -60_000_000_000),
            ("+1us", 1_000),
            ("1µs", 1_000),
            ("0.3333333333333333333h", 1_199_999_999_999),
            ("2562047h47m16.854775807s", i64::MAX),
            ("-2562047h47m16.854775808s", i64::MIN),
        ] {
            assert_eq!(duration(text), Ok(want), "{text}");
        }
        for text in
            ["", "-", "5", ".", "1x", "s", "1h 5m", "1e3s", "2562048h", "9999999999999999999999s", ".s"]
        {
            assert!(duration(text).is_err(), "{text}");
        }
    }

    #[test]
    fn durations_print_as_gos() {
        for (nanos, want) in [
            (0, "0s"),
            (1, "1ns"),
            (1_500, "1.5µs"),
            (100_000_000, "100ms"),
            (5_000_000_000, "5s"),
            (1_100_000_000, "1.1s"),
            (600_000_000_000, "10m0s"),
            (7_200_000_000_000, "2h0m0s"),
            (-60_000_000_000, "-1m0s"),
        ] {
            assert_eq!(show_duration(nanos), want);
        }
    }
}
