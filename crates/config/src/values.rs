//! Parsers for the values of directives: the `parse` column of a directive table.
//!
//! Every function parses the first argument unless stated otherwise, and words its errors as nginx does.
//! Invariant: [`Tables::find`](crate::Tables::find) has checked the number of arguments. If a row takes fewer arguments
//! than its parser reads, the parser returns an error and does not panic.
//! Source: <https://nginx.org/en/docs/syntax.html>

use crate::diagnostic::{Diagnostic, Reporter};
use crate::statement::{Statement, Word};
use bstr::BString;
use gale_base::units;
use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;
use std::time::Duration;

/// `on` or `off`, case-insensitive.
pub fn flag(statement: &Statement) -> Result<bool, Diagnostic> {
    let word = argument(statement, 0)?;
    if word.text.eq_ignore_ascii_case(b"on") {
        Ok(true)
    } else if word.text.eq_ignore_ascii_case(b"off") {
        Ok(false)
    } else {
        let message = format!(
            "invalid value \"{}\" in \"{}\" directive, it must be \"on\" or \"off\"",
            word.text, statement.name.text
        );
        Err(Diagnostic::emerg(message).at(word.span))
    }
}

/// An unsigned number.
pub fn number(statement: &Statement) -> Result<u64, Diagnostic> {
    parsed(statement, units::parse_number, "invalid number", "a number is written in decimal digits only")
}

/// A signed number.
pub fn signed_number(statement: &Statement) -> Result<i64, Diagnostic> {
    parsed(statement, units::parse_signed_number, "invalid number", "a number is written in decimal digits only")
}

/// An unsigned number between two bounds, both included. Pass [`u64::MAX`] for no upper bound.
pub fn number_between(statement: &Statement, least: u64, most: u64) -> Result<u64, Diagnostic> {
    let value = number(statement)?;
    if (least..=most).contains(&value) {
        return Ok(value);
    }
    let message = match most {
        u64::MAX => format!("value must be equal to or greater than {least}"),
        _ => format!("value must be between {least} and {most}"),
    };
    Err(Diagnostic::emerg(message).at(argument(statement, 0)?.span))
}

/// A size in bytes: `4096`, `4k`, `1m`.
pub fn size(statement: &Statement) -> Result<u64, Diagnostic> {
    parsed(statement, units::parse_size, "invalid value", "a size is a number, possibly with k or m: 8k")
}

/// A file size or offset in bytes: as [`size`], or with `g`: `1g`.
pub fn offset(statement: &Statement) -> Result<u64, Diagnostic> {
    parsed(statement, units::parse_offset, "invalid value", "a size is a number, possibly with k, m or g: 10m")
}

/// A time with millisecond resolution: `500ms`, `1m 30s`. A number without a unit is in seconds.
pub fn time_ms(statement: &Statement) -> Result<Duration, Diagnostic> {
    let hint = "a time is a number, possibly with ms, s, m, h, d or w: 500ms, 60s, 1h30m";
    parsed(statement, units::parse_time, "invalid value", hint)
}

/// A time with second resolution: `60`, `1d 12h`, `1y`.
pub fn time_s(statement: &Statement) -> Result<Duration, Diagnostic> {
    let hint = "a time is a number, possibly with s, m, h, d, w, M or y: 60s, 1h30m";
    parsed(statement, units::parse_time_seconds, "invalid value", hint)
}

/// A string, unchanged.
pub fn string(statement: &Statement) -> Result<BString, Diagnostic> {
    argument(statement, 0).map(|word| word.text.clone())
}

/// A path, unchanged; the caller resolves a relative one.
pub fn path(statement: &Statement) -> Result<PathBuf, Diagnostic> {
    let word = argument(statement, 0)?;
    Ok(PathBuf::from(OsString::from_vec(word.text.to_vec())))
}

/// A number and size of buffers, from two arguments: `8 4k`. Neither may be zero.
pub fn buffers(statement: &Statement) -> Result<(u64, u64), Diagnostic> {
    let (count, size) = (argument(statement, 0)?, argument(statement, 1)?);
    let invalid = |word: &Word| {
        let hint = "a number of buffers and the size of each: 8 4k";
        statement.directive_error("invalid value").at(word.span).hint(hint)
    };
    let positive = |value: Option<u64>, word| value.filter(|&value| value > 0).ok_or_else(|| invalid(word));
    Ok((positive(units::parse_number(count), count)?, positive(units::parse_size(size), size)?))
}

/// A key and a value, from two arguments.
pub fn key_value(statement: &Statement) -> Result<(BString, BString), Diagnostic> {
    Ok((argument(statement, 0)?.text.clone(), argument(statement, 1)?.text.clone()))
}

/// One of several words, case-insensitive.
pub fn enumeration<T: Clone>(statement: &Statement, choices: &[(&str, T)]) -> Result<T, Diagnostic> {
    choice(argument(statement, 0)?, choices)
}

/// A set of flags, one word for each, from all arguments. Returns the bits of these words and of `earlier` statements.
/// A repeated word causes only a warning.
pub fn bitmask(
    statement: &Statement,
    choices: &[(&str, u32)],
    earlier: Option<&u32>,
    reporter: &mut impl Reporter,
) -> Result<u32, Diagnostic> {
    let mut mask = earlier.copied().unwrap_or(0);
    for word in &statement.args {
        let bits = choice(word, choices)?;
        if mask & bits != 0 {
            reporter.report(Diagnostic::warn(format!("duplicate value \"{}\"", word.text)).at(word.span));
        }
        mask |= bits;
    }
    Ok(mask)
}

/// Returns the value of one of several words, case-insensitive.
///
/// # Errors
/// `invalid value "WORD"`, with a hint that lists the choices.
pub fn choice<T: Clone>(word: &Word, choices: &[(&str, T)]) -> Result<T, Diagnostic> {
    let found = choices.iter().find(|(name, _)| word.text.eq_ignore_ascii_case(name.as_bytes()));
    found.map(|(_, value)| value.clone()).ok_or_else(|| {
        let names: Vec<_> = choices.iter().map(|(name, _)| format!("\"{name}\"")).collect();
        let message = format!("invalid value \"{}\"", word.text);
        Diagnostic::emerg(message).at(word.span).hint(format!("it must be {}", alternatives(&names)))
    })
}

/// Returns the argument with that index, counted from 0.
///
/// # Errors
/// `invalid number of arguments` if there are fewer.
pub fn argument(statement: &Statement, index: usize) -> Result<&Word, Diagnostic> {
    statement
        .args
        .get(index)
        .ok_or_else(|| statement.error(format!("invalid number of arguments in \"{}\" directive", statement.name.text)))
}

fn parsed<T>(statement: &Statement, parse: fn(&[u8]) -> Option<T>, what: &str, hint: &str) -> Result<T, Diagnostic> {
    let word = argument(statement, 0)?;
    parse(&word.text).ok_or_else(|| statement.directive_error(what).at(word.span).hint(hint))
}

/// Formats `a`, `a or b`, `a, b or c`.
fn alternatives(names: &[String]) -> String {
    match names {
        [] => String::new(),
        [only] => only.clone(),
        [first @ .., last] => format!("{} or {last}", first.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::diagnostic::Diagnostics;
    use crate::lexer;

    fn statement(name: &str, args: &str) -> Statement {
        Statement::synthetic(name, lexer::words(args.as_bytes()).unwrap())
    }

    /// The value, or the message.
    fn value<T>(parse: impl Fn(&Statement) -> Result<T, Diagnostic>, args: &str) -> Result<T, String> {
        parse(&statement("it", args)).map_err(|error| error.message)
    }

    #[test]
    fn flags() {
        assert_eq!(value(flag, "on"), Ok(true));
        assert_eq!(value(flag, "OFF"), Ok(false));
        let message = "invalid value \"yes\" in \"it\" directive, it must be \"on\" or \"off\"";
        assert_eq!(value(flag, "yes"), Err(message.to_owned()));
    }

    #[test]
    fn numbers() {
        assert_eq!(value(number, "10"), Ok(10));
        assert_eq!(value(number, "-1"), Err("\"it\" directive invalid number".to_owned()));
        assert_eq!(value(number, "10s"), Err("\"it\" directive invalid number".to_owned()));
        assert_eq!(value(signed_number, "-5"), Ok(-5));
        assert_eq!(value(signed_number, "5-"), Err("\"it\" directive invalid number".to_owned()));
    }

    #[test]
    fn numbers_within_bounds() {
        assert_eq!(value(|s| number_between(s, 1, 9), "9"), Ok(9));
        assert_eq!(value(|s| number_between(s, 1, 9), "10"), Err("value must be between 1 and 9".to_owned()));
        let message = "value must be equal to or greater than 1";
        assert_eq!(value(|s| number_between(s, 1, u64::MAX), "0"), Err(message.to_owned()));
    }

    #[test]
    fn sizes_and_offsets() {
        assert_eq!(value(size, "8k"), Ok(8192));
        assert_eq!(value(size, "1g"), Err("\"it\" directive invalid value".to_owned()));
        assert_eq!(value(offset, "1g"), Ok(1 << 30));
        assert_eq!(value(offset, "-1"), Err("\"it\" directive invalid value".to_owned()));
    }

    #[test]
    fn times() {
        assert_eq!(value(time_ms, "'1h 30m'"), Ok(Duration::from_secs(5400)));
        assert_eq!(value(time_ms, "5x"), Err("\"it\" directive invalid value".to_owned()));
        assert_eq!(value(time_s, "1d"), Ok(Duration::from_secs(86_400)));
        assert_eq!(value(time_s, "1ms"), Err("\"it\" directive invalid value".to_owned()));
    }

    #[test]
    fn strings_and_paths_are_taken_as_they_are() {
        assert_eq!(value(string, "' a b'"), Ok(BString::from(" a b")));
        assert_eq!(value(path, "logs/x"), Ok(PathBuf::from("logs/x")));
        assert_eq!(value(key_value, "a b"), Ok(("a".into(), "b".into())));
    }

    #[test]
    fn buffers_are_a_number_and_a_size() {
        assert_eq!(value(buffers, "8 4k"), Ok((8, 4096)));
        for wrong in ["0 4k", "8 0", "x 4k", "8 4x"] {
            assert_eq!(value(buffers, wrong), Err("\"it\" directive invalid value".to_owned()), "{wrong}");
        }
    }

    #[test]
    fn one_of_several_words() {
        let choices = [("auto", 0), ("epoll", 1), ("io_uring", 2)];
        assert_eq!(value(|s| enumeration(s, &choices), "EPOLL"), Ok(1));
        let error = enumeration(&statement("use", "kqueue"), &choices).unwrap_err();
        assert_eq!(error.message, "invalid value \"kqueue\"");
        assert_eq!(error.hint.as_deref(), Some("it must be \"auto\", \"epoll\" or \"io_uring\""));
    }

    #[test]
    fn several_words_make_a_mask_and_repetition_is_warned_of() {
        let choices = [("error", 1), ("timeout", 2)];
        let mut reports = Diagnostics::new();
        assert_eq!(bitmask(&statement("it", "error timeout error"), &choices, None, &mut reports).unwrap(), 3);
        assert_eq!(reports.iter().map(|report| &report.message[..]).collect::<Vec<_>>(), ["duplicate value \"error\""]);
        assert!(!reports.has_errors());
        assert!(bitmask(&statement("it", "error x"), &choices, None, &mut reports).is_err());
        assert_eq!(bitmask(&statement("it", "error"), &choices, Some(&2), &mut reports).unwrap(), 3);
        assert_eq!(bitmask(&statement("it", "error"), &choices, Some(&1), &mut reports).unwrap(), 1);
        assert_eq!(reports.iter().filter(|report| report.message == "duplicate value \"error\"").count(), 2);
    }

    #[test]
    fn a_missing_argument_is_an_error_and_no_panic() {
        let message = Err("invalid number of arguments in \"it\" directive".to_owned());
        assert_eq!(value(number, ""), message);
        assert_eq!(value(flag, "").map(u64::from), message);
        assert_eq!(value(buffers, "1").map(|buffers| buffers.0), message);
    }
}
