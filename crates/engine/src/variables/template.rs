//! Text with variables, compiled when the configuration is read.
//!
//! `/data/$host${uri}` becomes segments, so nothing is parsed at run time.

use std::borrow::Cow;
use std::fmt;
use std::marker::PhantomData;
use std::ops::Range;

use gale_base::units;

use super::subject::Subject;
use super::{VariableId, is_name_byte};
use crate::configuration::KnownPath;
use gale_base::log_level::Level;

/// A compiled text for one type of subject; it uses the variables of their block.
pub struct Template<S> {
    segments: Box<[Segment]>,
    of: PhantomData<fn(&S)>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Segment {
    Literal(Box<[u8]>),
    Variable(VariableId),
    /// `$1` to `$9`: a group of the last match.
    Capture(usize),
}

impl<S> Template<S> {
    /// Compiles `text`; `variable` returns the index for a name. The error is nginx's message.
    pub fn compile(text: &[u8], mut variable: impl FnMut(&[u8]) -> VariableId) -> Result<Template<S>, String> {
        if memchr::memchr(b'$', text).is_none() {
            return Ok(Template::constant(text));
        }
        let mut segments = Vec::new();
        let mut rest = text;
        while !rest.is_empty() {
            let Some(dollar) = memchr::memchr(b'$', rest) else {
                segments.push(Segment::Literal(rest.into()));
                break;
            };
            if dollar > 0 {
                segments.push(Segment::Literal(rest[..dollar].into()));
            }
            let (name, after) = name_after_dollar(&rest[dollar + 1..])?;
            segments.push(match name {
                [digit @ b'1'..=b'9'] => Segment::Capture(usize::from(digit - b'0')),
                name => Segment::Variable(variable(name)),
            });
            rest = after;
        }
        Ok(Template::of(segments))
    }

    /// A text without variables.
    pub fn constant(text: &[u8]) -> Template<S> {
        Template::of(if text.is_empty() { Vec::new() } else { vec![Segment::Literal(text.into())] })
    }

    fn of(segments: impl Into<Box<[Segment]>>) -> Template<S> {
        Template { segments: segments.into(), of: PhantomData }
    }

    /// The text, if it is constant.
    pub fn as_constant(&self) -> Option<&[u8]> {
        match &*self.segments {
            [] => Some(b""),
            [Segment::Literal(text)] => Some(text),
            _ => None,
        }
    }

    /// The part of a path that is known without a subject.
    pub fn known_path(&self) -> KnownPath<'_> {
        match (self.as_constant(), self.segments.first()) {
            (Some(path), _) => KnownPath::Whole(path),
            (None, Some(Segment::Literal(beginning))) => KnownPath::Beginning(beginning),
            (None, _) => KnownPath::Beginning(b""),
        }
    }

    /// `true` if the text is always empty.
    pub fn is_empty(&self) -> bool {
        self.segments.is_empty()
    }

    /// `true` if it contains groups of a regular expression.
    pub fn has_captures(&self) -> bool {
        self.segments.iter().any(|segment| matches!(segment, Segment::Capture(_)))
    }
}

impl<S: Subject> Template<S> {
    /// Appends the text for this subject to `out`; a variable without a value adds nothing.
    pub fn append(&self, subject: &S, out: &mut Vec<u8>) {
        self.append_with(subject, out, |text, out| out.extend_from_slice(text));
    }

    /// Like [`Template::append`], but `append_capture` appends the groups of a regular expression.
    pub fn append_with(&self, subject: &S, out: &mut Vec<u8>, append_capture: fn(&[u8], &mut Vec<u8>)) {
        for segment in &self.segments {
            match segment {
                Segment::Literal(text) => out.extend_from_slice(text),
                Segment::Variable(id) => {
                    subject.append_variable(*id, out);
                }
                Segment::Capture(number) => subject.with_capture(*number, |text| append_capture(text, out)),
            }
        }
    }

    /// Appends the text as a path. Returns `false`, appends nothing and logs an error if a path segment is `..` and not
    /// the configuration's own, so that client data cannot leave a directory.
    #[must_use]
    pub fn append_path(&self, subject: &S, out: &mut Vec<u8>) -> bool {
        let start = out.len();
        self.append(subject, out);
        if self.as_constant().is_some() || !has_two_dots(&out[start..]) {
            return true;
        }
        // Evaluated again, because the checked text must be the one used, and a variable may have another value the
        // second time.
        out.truncate(start);
        let foreign = self.append_marked(subject, out);
        if leads_upwards(&out[start..], |place| foreign.iter().any(|range| range.contains(&(start + place)))) {
            refuse_path(subject, &out[start..]);
            out.truncate(start);
            return false;
        }
        true
    }

    /// Appends the text and returns its parts that are not the configuration's own.
    fn append_marked(&self, subject: &S, out: &mut Vec<u8>) -> Vec<Range<usize>> {
        let mut foreign = Vec::new();
        for segment in &self.segments {
            let start = out.len();
            let is_own = match segment {
                Segment::Literal(text) => {
                    out.extend_from_slice(text);
                    true
                }
                Segment::Variable(id) => {
                    subject.append_variable(*id, out);
                    // A dot at its end may become `..` with the following text.
                    subject.variables().is_own(*id) && !out.ends_with(b".")
                }
                Segment::Capture(number) => {
                    subject.with_capture(*number, |text| out.extend_from_slice(text));
                    false
                }
            };
            if !is_own {
                foreign.push(start..out.len());
            }
        }
        foreign
    }

    /// The text for this subject, borrowed if it is constant.
    pub fn text(&self, subject: &S) -> Cow<'_, [u8]> {
        self.as_constant().map_or_else(|| Cow::Owned(self.evaluate(subject)), Cow::Borrowed)
    }

    /// Calls `look` with the text for this subject, using a shared buffer.
    pub fn with_text<T>(&self, subject: &S, look: impl FnOnce(&[u8]) -> T) -> T {
        match self.as_constant() {
            Some(text) => look(text),
            None => subject.evaluation().with_buffer(|out| {
                self.append(subject, out);
                look(out)
            }),
        }
    }

    /// The text for this subject.
    pub fn evaluate(&self, subject: &S) -> Vec<u8> {
        let mut out = Vec::with_capacity(64);
        self.append(subject, &mut out);
        out
    }
}

// Derived implementations would require the same traits of the subject.

impl<S> Clone for Template<S> {
    fn clone(&self) -> Template<S> {
        Template::of(self.segments.clone())
    }
}

impl<S> Default for Template<S> {
    fn default() -> Template<S> {
        Template::of([])
    }
}

impl<S> PartialEq for Template<S> {
    fn eq(&self, other: &Template<S>) -> bool {
        self.segments == other.segments
    }
}

impl<S> Eq for Template<S> {}

impl<S> fmt::Debug for Template<S> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_tuple("Template").field(&self.segments).finish()
    }
}

/// Quick check; hardly any path has two consecutive dots.
fn has_two_dots(path: &[u8]) -> bool {
    memchr::memmem::find(path, b"..").is_some()
}

/// `true` if a path segment is `..`, and one of its dots or the slash before them is at a place selected by `counts`.
pub fn leads_upwards(path: &[u8], counts: impl Fn(usize) -> bool) -> bool {
    let mut start = 0;
    has_two_dots(path)
        && path.split(|&byte| byte == b'/').any(|segment| {
            let place = start;
            start += segment.len() + 1;
            segment == b".." && (place.saturating_sub(1)..place + 2).any(&counts)
        })
}

/// Logs that a path leads out of its directory.
pub fn refuse_path<S: Subject>(subject: &S, path: &[u8]) {
    subject.log(Level::Error, format_args!("unsafe path \"{}\" was detected", bstr::BStr::new(path)));
}

/// `true` if any of these texts is neither empty nor `0`, as in nginx's predicates.
pub fn any_is_true<S: Subject>(texts: &[Template<S>], subject: &S) -> bool {
    texts.iter().any(|text| !matches!(&*text.text(subject), b"" | b"0"))
}

/// A size in bytes that may depend on the subject: `4k`, `$arg_rate`.
pub enum SizeTemplate<S> {
    /// A constant size.
    Constant(u64),
    /// A text that evaluates to a size.
    Text(Template<S>),
}

impl<S> SizeTemplate<S> {
    /// Size from a compiled text; `None` for a constant that is not a size.
    pub fn new(text: Template<S>) -> Option<SizeTemplate<S>> {
        match text.as_constant() {
            Some(constant) => units::parse_size(constant).map(SizeTemplate::Constant),
            None => Some(SizeTemplate::Text(text)),
        }
    }
}

impl<S: Subject> SizeTemplate<S> {
    /// The size for this subject. Zero for an empty text, and for an invalid one, which is logged.
    pub fn evaluate(&self, subject: &S) -> u64 {
        let text = match self {
            SizeTemplate::Constant(size) => return *size,
            SizeTemplate::Text(text) => text.evaluate(subject),
        };
        if text.is_empty() {
            return 0;
        }
        units::parse_size(&text).unwrap_or_else(|| {
            subject.log(Level::Error, format_args!("invalid size \"{}\"", bstr::BStr::new(&text)));
            0
        })
    }
}

impl<S> Clone for SizeTemplate<S> {
    fn clone(&self) -> SizeTemplate<S> {
        match self {
            SizeTemplate::Constant(size) => SizeTemplate::Constant(*size),
            SizeTemplate::Text(text) => SizeTemplate::Text(text.clone()),
        }
    }
}

impl<S> fmt::Debug for SizeTemplate<S> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SizeTemplate::Constant(size) => formatter.debug_tuple("Constant").field(size).finish(),
            SizeTemplate::Text(text) => formatter.debug_tuple("Text").field(text).finish(),
        }
    }
}

/// The name after a dollar sign, and the rest.
fn name_after_dollar(text: &[u8]) -> Result<(&[u8], &[u8]), String> {
    const INVALID: &str = "invalid variable name";
    match text.first() {
        Some(b'{') => {
            let inner = &text[1..];
            let length = inner.iter().take_while(|&&byte| is_name_byte(byte)).count();
            match inner.get(length) {
                Some(b'}') if length > 0 => Ok((&inner[..length], &inner[length + 1..])),
                Some(b'}') => Err(INVALID.to_owned()),
                _ => {
                    Err(format!("the closing bracket in \"{}\" variable is missing", bstr::BStr::new(&inner[..length])))
                }
            }
        }
        Some(b'1'..=b'9') => Ok(text.split_at(1)),
        _ => {
            let length = text.iter().take_while(|&&byte| is_name_byte(byte)).count();
            if length == 0 { Err(INVALID.to_owned()) } else { Ok(text.split_at(length)) }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    type Template = super::Template<()>;

    fn names(text: &str) -> Result<Vec<String>, String> {
        let mut names = Vec::new();
        Template::compile(text.as_bytes(), |name| {
            names.push(String::from_utf8(name.to_vec()).unwrap());
            VariableId(0)
        })?;
        Ok(names)
    }

    #[test]
    fn names_end_where_nginx_ends_them() {
        assert_eq!(names("$a$b_c-$d.e").unwrap(), ["a", "b_c", "d"]);
        assert_eq!(names("${a}b$1$22").unwrap(), ["a"]);
        assert_eq!(names("plain").unwrap(), [""; 0]);
    }

    #[test]
    fn wrong_references_are_refused_in_nginx_s_words() {
        assert_eq!(names("a$").unwrap_err(), "invalid variable name");
        assert_eq!(names("$-").unwrap_err(), "invalid variable name");
        assert_eq!(names("${}").unwrap_err(), "invalid variable name");
        assert_eq!(names("${a").unwrap_err(), "the closing bracket in \"a\" variable is missing");
        assert_eq!(names("${a-b}").unwrap_err(), "the closing bracket in \"a\" variable is missing");
    }

    #[test]
    fn two_dots_lead_upwards_only_as_a_segment() {
        for path in ["..", "../a", "/..", "/a/../b", "a/.."] {
            assert!(leads_upwards(path.as_bytes(), |_| true), "{path}");
            assert!(!leads_upwards(path.as_bytes(), |_| false), "{path}");
        }
        for path in ["", "/", "/a..", "..a", "/a..b/c", "/.../x", "/./."] {
            assert!(!leads_upwards(path.as_bytes(), |_| true), "{path}");
        }
        // The slash before the dots counts, the text after them does not.
        let counts = [false, false, true, true, true, false, false];
        let found: Vec<bool> = (0..7).map(|place| leads_upwards(b"/a/../b", |other| other == place)).collect();
        assert_eq!(found, counts);
    }

    #[test]
    fn a_text_without_variables_is_known_to_be_constant() {
        assert_eq!(Template::constant(b"x").as_constant(), Some(&b"x"[..]));
        assert_eq!(Template::constant(b"").as_constant(), Some(&b""[..]));
        let template = Template::compile(b"x$y", |_| VariableId(0)).unwrap();
        assert_eq!(template.as_constant(), None);
    }
}
