//! The texts of a configuration, and places in them.
//!
//! Keeps every text that was read, once per path and in the order of reading, for messages and for `-T`.
//! Invariant: a [`Span`] made by this crate lies within its source. A foreign span is clamped and never causes a panic.

use bstr::{BStr, ByteSlice};
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The largest text in bytes: a [`Span`] counts in 32 bits.
pub const SOURCE_BYTES_MAX: usize = u32::MAX as usize - 1;

/// Index of a source in its [`Sources`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SourceId(pub u32);

/// A piece of a source: bytes `start..end`. It may be empty, for example at the end of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Span {
    /// The source.
    pub source: SourceId,
    /// Offset of the first byte.
    pub start: u32,
    /// Offset of the byte after the last.
    pub end: u32,
}

impl Span {
    /// Returns the span from the start of this one to the end of `last` if both lie in the same source, otherwise this
    /// one.
    pub fn to(self, last: Span) -> Span {
        if self.source == last.source { Span { end: last.end.max(self.end), ..self } } else { self }
    }
}

/// Line and column of a byte. Both begin with 1; the column counts bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Position {
    /// Line.
    pub line: u32,
    /// Byte within the line.
    pub column: u32,
}

/// One text.
#[derive(Clone, Debug)]
pub struct Source {
    name: Name,
    text: Arc<[u8]>,
}

#[derive(Clone, Debug)]
enum Name {
    File(PathBuf),
    Label(String),
}

impl Source {
    /// The path of a file; `None` for other texts, such as the command line.
    pub fn path(&self) -> Option<&Path> {
        match &self.name {
            Name::File(path) => Some(path),
            Name::Label(_) => None,
        }
    }

    /// The name used in messages: the path, or for example `command line`.
    pub fn name(&self) -> String {
        match &self.name {
            Name::File(path) => path.to_string_lossy().into_owned(),
            Name::Label(label) => label.clone(),
        }
    }

    /// The bytes of the text.
    pub fn text(&self) -> &Arc<[u8]> {
        &self.text
    }

    /// Returns line and column of a byte. An offset beyond the end counts as the end.
    pub fn position(&self, offset: u32) -> Position {
        let before = &self.text[..(offset as usize).min(self.text.len())];
        let line_start = before.rfind_byte(b'\n').map_or(0, |newline| newline + 1);
        let newlines = memchr::memchr_iter(b'\n', before).count();
        Position { line: newlines as u32 + 1, column: (before.len() - line_start) as u32 + 1 }
    }

    /// Returns the line that contains the byte, without its end (LF or CR LF), and the offset at which the line starts.
    pub(crate) fn line_around(&self, offset: u32) -> (&[u8], usize) {
        let offset = (offset as usize).min(self.text.len());
        let start = self.text[..offset].rfind_byte(b'\n').map_or(0, |newline| newline + 1);
        let end = self.text[offset..].find_byte(b'\n').map_or(self.text.len(), |newline| offset + newline);
        let line = &self.text[start..end];
        (line.strip_suffix(b"\r").unwrap_or(line), start)
    }
}

/// All texts of a configuration.
#[derive(Clone, Debug, Default)]
pub struct Sources {
    sources: Vec<Source>,
    by_path: HashMap<PathBuf, SourceId>,
}

impl Sources {
    /// Creates an empty collection.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a file. If the path is known already, its first text is kept: one configuration sees one state of a file.
    ///
    /// # Panics
    /// If the text is longer than [`SOURCE_BYTES_MAX`]; the parser refuses such files earlier.
    pub fn add_file(&mut self, path: &Path, text: Vec<u8>) -> SourceId {
        if let Some(id) = self.find(path) {
            return id;
        }
        let id = self.add(Name::File(path.to_path_buf()), text);
        self.by_path.insert(path.to_path_buf(), id);
        id
    }

    /// Adds a text that is not a file. Messages say `in LABEL` without a line number.
    ///
    /// # Panics
    /// As [`add_file`](Self::add_file).
    pub fn add_text(&mut self, label: &str, text: Vec<u8>) -> SourceId {
        self.add(Name::Label(label.to_owned()), text)
    }

    /// Returns the source with that path, if it was read.
    pub fn find(&self, path: &Path) -> Option<SourceId> {
        self.by_path.get(path).copied()
    }

    /// Returns the source with that index; `None` if it does not exist here, as that of a default value.
    pub fn get(&self, id: SourceId) -> Option<&Source> {
        self.sources.get(id.0 as usize)
    }

    /// Iterates over all sources in the order of reading.
    pub fn iter(&self) -> impl Iterator<Item = (SourceId, &Source)> {
        self.sources.iter().enumerate().map(|(index, source)| (SourceId(index as u32), source))
    }

    /// The number of sources.
    pub fn len(&self) -> usize {
        self.sources.len()
    }

    /// Returns `true` if there are no sources.
    pub fn is_empty(&self) -> bool {
        self.sources.is_empty()
    }

    /// Line and column of the span's first byte; `None` if it lies in none of these sources, as for the next two.
    pub fn position(&self, span: Span) -> Option<Position> {
        Some(self.get(span.source)?.position(span.start))
    }

    /// The bytes of the span.
    pub fn text(&self, span: Span) -> Option<&BStr> {
        let text = &self.get(span.source)?.text;
        let end = (span.end as usize).min(text.len());
        Some(text[(span.start as usize).min(end)..end].as_bstr())
    }

    /// Returns `FILE:LINE`, or the label of a text that is not a file, as nginx writes it after `in`.
    pub fn place(&self, span: Span) -> Option<String> {
        let source = self.get(span.source)?;
        Some(match source.path() {
            Some(_) => format!("{}:{}", source.name(), source.position(span.start).line),
            None => source.name(),
        })
    }

    fn add(&mut self, name: Name, text: Vec<u8>) -> SourceId {
        assert!(text.len() <= SOURCE_BYTES_MAX, "a source is longer than a span can count");
        let id = SourceId(u32::try_from(self.sources.len()).expect("fewer sources than 2^32"));
        self.sources.push(Source { name, text: text.into() });
        id
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_and_columns_begin_with_one() {
        let mut sources = Sources::new();
        let source = sources.add_file(Path::new("a.conf"), b"one\ntwo three\r\n".to_vec());
        let at = |start| sources.position(Span { source, start, end: start }).unwrap();
        assert_eq!(at(0), Position { line: 1, column: 1 });
        assert_eq!(at(3), Position { line: 1, column: 4 });
        assert_eq!(at(4), Position { line: 2, column: 1 });
        assert_eq!(at(8), Position { line: 2, column: 5 });
        assert_eq!(at(15), Position { line: 3, column: 1 });
        assert_eq!(at(u32::MAX), Position { line: 3, column: 1 });
        assert_eq!(sources.text(Span { source, start: 8, end: 13 }).unwrap(), "three");
    }

    #[test]
    fn a_path_is_kept_once() {
        let mut sources = Sources::new();
        let first = sources.add_file(Path::new("a.conf"), b"one".to_vec());
        let second = sources.add_file(Path::new("a.conf"), b"two".to_vec());
        assert_eq!(first, second);
        assert_eq!(&sources.get(first).unwrap().text()[..], b"one");
        assert_eq!(sources.len(), 1);
    }

    #[test]
    fn a_text_that_is_no_file_has_no_line() {
        let mut sources = Sources::new();
        let source = sources.add_text("command line", b"\n\nx".to_vec());
        assert_eq!(sources.place(Span { source, start: 2, end: 3 }).as_deref(), Some("command line"));
    }

    #[test]
    fn a_span_of_other_sources_has_no_place() {
        let mut sources = Sources::new();
        sources.add_text("first", b"one".to_vec());
        let source = sources.add_text("second", b"two".to_vec());
        let span = Span { source, start: 0, end: 3 };
        let mut others = Sources::new();
        others.add_text("other", b"three".to_vec());
        assert!(others.get(source).is_none());
        assert_eq!((others.position(span), others.text(span), others.place(span)), (None, None, None));
    }
}
