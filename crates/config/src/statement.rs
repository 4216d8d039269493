//! What the parser makes of a text: words and statements.
//!
//! Invariant: quotes and escapes are processed already; a [`Word`]'s text is the value, its span the spelling.

use crate::diagnostic::Diagnostic;
use crate::source::{SourceId, Span};
use bstr::{BStr, BString, ByteSlice};
use std::ops::Deref;

/// One word of a statement: a name or an argument. It dereferences to its text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Word {
    /// The value, after quotes and escapes.
    pub text: BString,
    /// Where it is written, quotes included.
    pub span: Span,
    /// Whether it was written in quotes.
    pub quoted: bool,
    /// Whether only blanks stand before it in its line. An argument that starts a line may be the next directive
    /// after a forgotten `;`.
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

/// One directive as it stands in a text: `name args… ;` or `name args… { block }`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Statement {
    /// The first word.
    pub name: Word,
    /// The other words.
    pub args: Vec<Word>,
    /// The statements between the braces; `None` if it ends with `;`. Includes are expanded.
    pub block: Option<Vec<Statement>>,
    /// From the first to the last word.
    pub span: Span,
    /// The closing brace; `None` without a block, and if the text ended before it.
    pub block_end: Option<Span>,
    /// Set if reading failed here: a syntax error, or an `include` that could not be followed. Such a statement means
    /// nothing, but keeps its place, so that the errors of a configuration come in the order of the text.
    pub broken: Option<Box<Diagnostic>>,
}

impl Statement {
    /// A statement that stands in no text, such as the default of a directive. Its spans lie in no
    /// source, so a message about it has no place.
    pub fn synthetic(name: &str, args: Vec<Word>) -> Statement {
        let span = Span { source: SourceId(u32::MAX), start: 0, end: 0 };
        let name = Word { text: name.into(), span, quoted: false, starts_line: true };
        Statement { name, args, block: None, span, block_end: None, broken: None }
    }

    /// An error at the directive's name; the message in nginx's words without ` in FILE:LINE`.
    pub fn error(&self, message: impl Into<String>) -> Diagnostic {
        Diagnostic::emerg(message).at(self.name.span)
    }

    /// The error `"NAME" directive WHAT`, as nginx builds it from the answer of a directive's handler
    /// (`is duplicate`, `invalid value`).
    pub fn directive_error(&self, what: &str) -> Diagnostic {
        self.error(format!("\"{}\" directive {what}", self.name.text))
    }

    /// The statements of the block, in order; none if there is no block.
    pub fn body(&self) -> &[Statement] {
        self.block.as_deref().unwrap_or(&[])
    }
}
