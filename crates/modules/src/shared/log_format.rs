//! `log_format`: the format of an access log's lines.
//!   log_format NAME [escape=default|json|none] STRING ...;                         http, stream
//! (<https://nginx.org/en/docs/http/ngx_http_log_module.html#log_format>)
//!
//! As in nginx, a format must be defined before the logs that use it.

use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;

use bstr::{BStr, BString, ByteSlice};
use gale_config::{Diagnostic, Span, Statement, Word};
use gale_engine::configuration::Builder;
use gale_engine::variables::subject::Subject;
use gale_engine::variables::{VariableId, is_name_byte};
use gale_protocol::uri::escape::escape_json;

/// The formats of a block, by name.
pub struct Formats<S>(Vec<(BString, Arc<Format<S>>)>);

impl<S> Default for Formats<S> {
    fn default() -> Formats<S> {
        Formats(Vec::new())
    }
}

impl<S: Subject> Formats<S> {
    /// Adds a `log_format`.
    ///
    /// # Errors
    /// In nginx's words: the name is taken, or a text is invalid.
    pub fn add(&mut self, builder: &mut Builder, statement: &Statement) -> Result<(), Diagnostic> {
        let name = &statement.args[0];
        if self.0.iter().any(|(other, _)| *other == name.text) {
            return Err(duplicate_name(name));
        }
        let (escaping, texts) = match escaping(&statement.args[1])? {
            Some(escaping) => (escaping, &statement.args[2..]),
            None => (Escaping::Default, &statement.args[1..]),
        };
        let variables = builder.variables::<S>();
        let format = Format::compile(escaping, texts, |name, span| variables.variable(name, Some(span)))?;
        self.0.push((name.text.clone(), Arc::new(format)));
        Ok(())
    }

    /// Returns the format with this name; names ignore case.
    ///
    /// # Errors
    /// No such format is defined so far.
    pub fn find(&self, name: &Word) -> Result<Arc<Format<S>>, Diagnostic> {
        let found = self.0.iter().find(|(known, _)| known.eq_ignore_ascii_case(&name.text));
        found.map(|(_, format)| Arc::clone(format)).ok_or_else(|| {
            let message = format!("unknown log format \"{}\"", name.text);
            Diagnostic::emerg(message).at(name.span).hint("its log_format must precede it")
        })
    }
}

/// Error: another format has this name.
pub fn duplicate_name(name: &Word) -> Diagnostic {
    Diagnostic::emerg(format!("duplicate \"log_format\" name \"{}\"", name.text)).at(name.span)
}

/// Parses `escape=…`, or returns `None` if the word is something else.
fn escaping(word: &Word) -> Result<Option<Escaping>, Diagnostic> {
    let Some(value) = word.text.strip_prefix(b"escape=") else { return Ok(None) };
    match value {
        b"default" => Ok(Some(Escaping::Default)),
        b"json" => Ok(Some(Escaping::Json)),
        b"none" => Ok(Some(Escaping::None)),
        _ => {
            let message = format!("unknown log format escaping \"{}\"", BStr::new(value));
            Err(Diagnostic::emerg(message).at(word.span).hint("it must be \"default\", \"json\" or \"none\""))
        }
    }
}

/// A compiled `log_format`.
pub struct Format<S> {
    escaping: Escaping,
    segments: Box<[Segment]>,
    of: PhantomData<fn(&S)>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Segment {
    Literal(Box<[u8]>),
    Variable(VariableId),
}

impl<S> Format<S> {
    /// Compiles the texts, which are concatenated; `variable` returns the index for a name.
    ///
    /// # Errors
    /// In nginx's words: a name is missing or not closed.
    pub fn compile(
        escaping: Escaping,
        texts: &[Word],
        mut variable: impl FnMut(&[u8], Span) -> VariableId,
    ) -> Result<Format<S>, Diagnostic> {
        let mut segments = Vec::new();
        for text in texts {
            let mut rest: &[u8] = &text.text;
            while !rest.is_empty() {
                let (piece, after) = next_piece(rest).map_err(|message| Diagnostic::emerg(message).at(text.span))?;
                segments.push(match piece {
                    Piece::Literal(literal) => Segment::Literal(literal.into()),
                    Piece::Variable(name) => Segment::Variable(variable(name, text.span)),
                });
                rest = after;
            }
        }
        Ok(Format { escaping, segments: segments.into(), of: PhantomData })
    }

    /// Appends a line, without the line end.
    pub fn append(&self, subject: &S, out: &mut Vec<u8>)
    where
        S: Subject,
    {
        for segment in &self.segments {
            match segment {
                Segment::Literal(text) => out.extend_from_slice(text),
                Segment::Variable(id) => self.escaping.append(out, |out| subject.append_variable(*id, out)),
            }
        }
    }
}

impl<S> PartialEq for Format<S> {
    fn eq(&self, other: &Format<S>) -> bool {
        self.escaping == other.escaping && self.segments == other.segments
    }
}

impl<S> fmt::Debug for Format<S> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Format").field("escaping", &self.escaping).field("segments", &self.segments).finish()
    }
}

#[derive(Debug, PartialEq, Eq)]
enum Piece<'t> {
    Literal(&'t [u8]),
    Variable(&'t [u8]),
}

/// Returns the first piece of a non-empty text, and the rest. Unlike in other texts `$1` is not a capture of a regular
/// expression; nginx's messages differ, too.
fn next_piece(text: &[u8]) -> Result<(Piece<'_>, &[u8]), String> {
    let Some(after_dollar) = text.strip_prefix(b"$") else {
        let (literal, after) = text.split_at(text.find_byte(b'$').unwrap_or(text.len()));
        return Ok((Piece::Literal(literal), after));
    };
    let invalid = || format!("invalid parameter \"{}\"", BStr::new(text));
    let inner = after_dollar.strip_prefix(b"{");
    let start = inner.unwrap_or(after_dollar);
    if start.is_empty() {
        return Err(invalid());
    }
    let length = start.iter().take_while(|&&byte| is_name_byte(byte)).count();
    let (name, mut after) = start.split_at(length);
    if inner.is_some() {
        let message = || format!("the closing bracket in \"{}\" variable is missing", BStr::new(name));
        after = after.strip_prefix(b"}").ok_or_else(message)?;
    }
    if name.is_empty() {
        return Err(invalid());
    }
    Ok((Piece::Variable(name), after))
}

/// `escape=`: escaping of values, and the text of missing ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Escaping {
    /// `"`, `\` and everything that is not printable ASCII as `\xHH`; `-` for a missing value.
    Default,
    /// Escaped for a JSON string.
    Json,
    /// Not escaped.
    None,
}

impl Escaping {
    /// Appends the value that `value` appends, escaped. Usually there is nothing to escape, and the value is written
    /// once, in place.
    pub fn append(self, out: &mut Vec<u8>, value: impl FnOnce(&mut Vec<u8>) -> bool) {
        let start = out.len();
        if !value(out) {
            out.truncate(start);
            if self == Escaping::Default {
                out.push(b'-');
            }
            return;
        }
        let must_escape = match self {
            Escaping::Default => has(&out[start..], is_special),
            Escaping::Json => has(&out[start..], is_special_in_json),
            Escaping::None => false,
        };
        if !must_escape {
            return;
        }
        let raw = out.split_off(start);
        if self == Escaping::Json {
            return escape_json(&raw, out);
        }
        for byte in raw {
            if is_special(byte) { push_hex(out, byte) } else { out.push(byte) }
        }
    }
}

/// Returns `true` if a byte matches. The loop has no early exit and is compiled for each condition, so that it is
/// vectorised.
fn has(text: &[u8], is_wanted: impl Fn(u8) -> bool) -> bool {
    text.iter().fold(false, |found, &byte| found | is_wanted(byte))
}

#[inline]
fn is_special(byte: u8) -> bool {
    !(32..=126).contains(&byte) | (byte == b'"') | (byte == b'\\')
}

#[inline]
fn is_special_in_json(byte: u8) -> bool {
    (byte < 32) | (byte == b'"') | (byte == b'\\')
}

fn push_hex(out: &mut Vec<u8>, byte: u8) {
    const DIGITS: &[u8; 16] = b"0123456789ABCDEF";
    out.extend_from_slice(&[b'\\', b'x', DIGITS[usize::from(byte >> 4)], DIGITS[usize::from(byte & 15)]]);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn escaped(escaping: Escaping, value: Option<&[u8]>) -> Vec<u8> {
        let mut out = b"<".to_vec();
        escaping.append(&mut out, |out| {
            value.is_some_and(|value| {
                out.extend_from_slice(value);
                true
            })
        });
        assert_eq!(out.remove(0), b'<');
        out
    }

    #[test]
    fn default_escaping_escapes_ambiguous_characters() {
        let default = |value: &[u8]| escaped(Escaping::Default, Some(value));
        assert_eq!(default(b"plain ~"), b"plain ~");
        assert_eq!(default(b"a\"b\\c"), br"a\x22b\x5Cc");
        assert_eq!(default(b"\x00\n\x1f\x7f\xff"), br"\x00\x0A\x1F\x7F\xFF");
        assert_eq!(default(b""), b"");
        assert_eq!(escaped(Escaping::Default, None), b"-");
    }

    #[test]
    fn json_escaping_makes_the_inside_of_a_string() {
        let json = |value: &[u8]| escaped(Escaping::Json, Some(value));
        assert_eq!(json(b"a\"b\\c/"), br#"a\"b\\c/"#);
        assert_eq!(json(b"\n\r\t\x08\x0c\x00\x1f"), br"\n\r\t\b\f\u0000\u001F");
        assert_eq!(json("\u{e4}\u{7f}".as_bytes()), "\u{e4}\u{7f}".as_bytes());
        assert_eq!(escaped(Escaping::Json, None), b"");
    }

    #[test]
    fn without_escaping_values_stay_as_they_are() {
        assert_eq!(escaped(Escaping::None, Some(b"\"\x00\\")), b"\"\x00\\");
        assert_eq!(escaped(Escaping::None, None), b"");
    }

    #[test]
    fn a_format_is_cut_where_nginx_cuts_it() {
        let mut names = Vec::new();
        let texts: Vec<Word> = ["$a-${b}c", "$1x$$"].map(|text| Statement::synthetic(text, Vec::new()).name).into();
        let mut variable = |name: &[u8], _| {
            names.push(BString::from(name));
            VariableId(0)
        };
        let error = Format::<()>::compile(Escaping::Default, &texts, &mut variable).err().unwrap();
        assert_eq!(error.message, "invalid parameter \"$$\"");
        let format = Format::<()>::compile(Escaping::Default, &texts[..1], &mut variable).unwrap();
        let literal = |text: &[u8]| Segment::Literal(text.into());
        let id = Segment::Variable(VariableId(0));
        assert_eq!(*format.segments, [id.clone(), literal(b"-"), id, literal(b"c")]);
        assert_eq!(names, ["a", "b", "1x", "a", "b"]);
    }

    #[test]
    fn wrong_texts_are_refused_in_nginx_s_words() {
        let message = |text: &'static str| next_piece(text.as_bytes()).unwrap_err();
        assert_eq!(message("$"), "invalid parameter \"$\"");
        assert_eq!(message("$-x"), "invalid parameter \"$-x\"");
        assert_eq!(message("${"), "invalid parameter \"${\"");
        assert_eq!(message("${}"), "invalid parameter \"${}\"");
        assert_eq!(message("${a x"), "the closing bracket in \"a\" variable is missing");
    }
}
