//! Words and statements, the output of the parser.
//!
//! Invariant: quotes and escapes are resolved. A [`Word`]'s text is the value; its span covers the original spelling.

use crate::diagnostic::Diagnostic;
use crate::source::{SourceId, Span};
use bstr::{BStr, BString, ByteSlice};
use std::ops::Deref;

/// A name or an argument. It dereferences to its text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Word {
    /// The value, with quotes and escapes resolved.
    pub text: BString,
    /// Its place, quotes included.
    pub span: Span,
    /// `true` if it was written in quotes.
    pub quoted: bool,
    /// `true` if it is the first word of its line. An argument that starts a line may be the next directive after a
    /// forgotten `;`.
    pub starts_line: bool,
}

impl Deref for Word {
    type Target = BStr;

    fn deref(&self) -> &BStr {
        self.text.as_bstr()
    }
}

impl AsRef<[u8]> for Word {
    fn as_ref(&self) -> &[u8] {
        &self.text
    }
}

/// A directive as written in a text: `name args… ;` or `name args… { block }`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Statement {
    /// The first word.
    pub name: Word,
    /// The other words.
    pub args: Vec<Word>,
    /// The statements between the braces; `None` if the statement ends with `;`. Includes are expanded.
    pub block: Option<Vec<Statement>>,
    /// The span from the first to the last word.
    pub span: Span,
    /// The closing brace; `None` if there is no block or the text ended within it.
    pub block_end: Option<Span>,
    /// The error, if parsing failed here: a syntax error or a failed `include`. A broken statement has no meaning, but
    /// keeps its place, so that the errors of a configuration are reported in text order.
    pub broken: Option<Box<Diagnostic>>,
}

impl Statement {
    /// Creates a statement that is not written in any text, such as the default of a directive. Its spans lie in no
    /// source, so a message about it has no place.
    pub fn synthetic(name: &str, args: Vec<Word>) -> Statement {
        let span = Span { source: SourceId(u32::MAX), start: 0, end: 0 };
        let name = Word { text: name.into(), span, quoted: false, starts_line: true };
        Statement { name, args, block: None, span, block_end: None, broken: None }
    }

    /// Creates an error at the directive's name. The message is in nginx's words, without ` in FILE:LINE`.
    pub fn error(&self, message: impl Into<String>) -> Diagnostic {
        Diagnostic::emerg(message).at(self.name.span)
    }

    /// Creates the error `"NAME" directive WHAT`, as nginx does from the return value of a directive's handler (`is
    /// duplicate`, `invalid value`).
    pub fn directive_error(&self, what: &str) -> Diagnostic {
        self.error(format!("\"{}\" directive {what}", self.name.text))
    }

    /// Returns the statements of the block, or none if there is no block.
    pub fn body(&self) -> &[Statement] {
        self.block.as_deref().unwrap_or(&[])
    }
}
