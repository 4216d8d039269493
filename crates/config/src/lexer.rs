//! Turns the bytes of a configuration into words and punctuation, as nginx does.
//!
//! Knows no statements: which token may follow which is the parser's, except that a closing quote must be followed by
//! a blank, `;`, `{` or `)`.
//! Invariant: tokens never overlap and never go back, so lexing ends after at most as many tokens as there are bytes.
//!
//! The rules, where they may surprise:
//!
//! - A word ends with a blank (space, tab, CR, LF), `;` or `{`. Elsewhere in a word `}`, `#` and quotes are ordinary.
//! - `{` after `$` belongs to the word: `${name}`.
//! - A backslash takes the next byte into the word, whatever it is. `\"`, `\'` and `\\` lose the backslash, `\t`, `\r`
//!   and `\n` become the control character, any other pair stays as it is; in quotes and outside alike.
//! - `#` begins a comment only where a word could begin.
//! - Bytes are bytes: nothing has to be UTF-8.
//!
//! Source: <https://nginx.org/en/docs/beginners_guide.html#conf_structure>, and nginx's behaviour.

use crate::diagnostic::Diagnostic;
use crate::source::{SourceId, Span};
use crate::statement::Word;
use bstr::{BString, ByteSlice};

/// The longest word as it is spelled in a file, without quotes: nginx reads files through a buffer of 4096 bytes that
/// has to hold the word and its end. Comments may be longer here.
pub const WORD_BYTES_MAX: usize = 4095;

/// A piece of a text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Token {
    /// A name or an argument.
    Word(Word),
    /// `;`
    Semicolon(Span),
    /// `{`
    BlockStart(Span),
    /// `}`
    BlockEnd(Span),
    /// The end of the text.
    End(Span),
}

/// Why lexing cannot go on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LexError {
    /// A closing quote is followed by something that cannot be there.
    AfterQuote {
        /// The byte that is there.
        byte: u8,
        /// Where it is.
        span: Span,
    },
    /// The text ends within a word; the span is where that word, or its quote, begins.
    UnfinishedWord {
        /// The first byte of the word.
        start: Span,
        /// The end of the text.
        end: Span,
        /// Whether a quote is open.
        quoted: bool,
    },
    /// A word is longer than [`WORD_BYTES_MAX`].
    TooLong {
        /// The first ten bytes of the word, without its quote.
        beginning: BString,
        /// Where they are, with the quote.
        start: Span,
        /// The open quote, if there is one.
        quote: Option<u8>,
    },
}

/// Reads one text from its beginning to its end.
#[derive(Clone, Debug)]
pub struct Lexer<'t> {
    source: SourceId,
    text: &'t [u8],
    at: usize,
    word_bytes_max: usize,
    /// Whether only blanks were seen since the line began.
    starts_line: bool,
}

impl<'t> Lexer<'t> {
    /// A lexer at the beginning of a text. `word_bytes_max` is [`WORD_BYTES_MAX`] for a file; a text from the command
    /// line has no limit of its own.
    ///
    /// Only the first 4 GiB of a text are read; [`Sources`](crate::Sources) hold no longer ones.
    pub fn new(source: SourceId, text: &'t [u8], word_bytes_max: usize) -> Self {
        let text = &text[..text.len().min(crate::source::SOURCE_BYTES_MAX)];
        Lexer {
            source,
            text,
            at: 0,
            word_bytes_max,
            starts_line: true,
        }
    }

    /// The next token; [`Token::End`] again and again at the end.
    ///
    /// # Errors
    /// Why there is none. Lexing ends then: what would follow is guesswork.
    pub fn next_token(&mut self) -> Result<Token, LexError> {
        self.skip_blanks_and_comments();
        let start = self.at;
        let Some(&byte) = self.text.get(start) else {
            return Ok(Token::End(self.span(start, start)));
        };
        let punctuation = self.span(start, start + 1);
        let token = match byte {
            b';' => Token::Semicolon(punctuation),
            b'{' => Token::BlockStart(punctuation),
            b'}' => Token::BlockEnd(punctuation),
            b'"' | b'\'' => return self.quoted_word(byte),
            _ => return self.plain_word(),
        };
        self.at += 1;
        self.starts_line = false;
        Ok(token)
    }

    fn skip_blanks_and_comments(&mut self) {
        while let Some(&byte) = self.text.get(self.at) {
            match byte {
                b'\n' => self.starts_line = true,
                b' ' | b'\t' | b'\r' => {}
                b'#' => {
                    let rest = &self.text[self.at..];
                    // The newline itself is a blank for the next round.
                    self.at += memchr::memchr(b'\n', rest).unwrap_or(rest.len());
                    continue;
                }
                _ => return,
            }
            self.at += 1;
        }
    }

    fn quoted_word(&mut self, quote: u8) -> Result<Token, LexError> {
        let opening = self.at;
        let start = opening + 1;
        let mut at = start;
        loop {
            match self.byte_of_word(opening, start, at, Some(quote))? {
                b'\\' => at += 2,
                byte if byte == quote => break,
                _ => at += 1,
            }
        }
        let word = self.word(start..at, self.span(opening, at + 1), true);
        match self.text.get(at + 1) {
            None | Some(b' ' | b'\t' | b'\r' | b'\n' | b';' | b'{' | b')') => Ok(Token::Word(word)),
            Some(&byte) => Err(LexError::AfterQuote {
                byte,
                span: self.span(at + 1, at + 2),
            }),
        }
    }

    fn plain_word(&mut self) -> Result<Token, LexError> {
        let start = self.at;
        let mut at = start;
        let mut after_dollar = false;
        loop {
            // At the very end of a text nothing ends the word, and nothing could follow that makes it complete.
            let byte = self.byte_of_word(start, start, at, None)?;
            match byte {
                b'{' if after_dollar => {}
                b' ' | b'\t' | b'\r' | b'\n' | b';' | b'{' => break,
                _ => after_dollar = byte == b'$',
            }
            at += if byte == b'\\' { 2 } else { 1 };
        }
        Ok(Token::Word(self.word(
            start..at,
            self.span(start, at),
            false,
        )))
    }

    /// The byte at `at` of a word that is spelled from `start` on; `opening` is its quote, or `start` again.
    fn byte_of_word(
        &self,
        opening: usize,
        start: usize,
        at: usize,
        quote: Option<u8>,
    ) -> Result<u8, LexError> {
        if at - start > self.word_bytes_max && start + self.word_bytes_max + 1 < self.text.len() {
            let beginning = self.text[start..start + 10].into();
            return Err(LexError::TooLong {
                beginning,
                start: self.span(opening, start + 10),
                quote,
            });
        }
        self.text
            .get(at)
            .copied()
            .ok_or_else(|| LexError::UnfinishedWord {
                start: self.span(opening, opening + 1),
                end: self.span(self.text.len(), self.text.len()),
                quoted: quote.is_some(),
            })
    }

    fn word(&mut self, spelling: std::ops::Range<usize>, span: Span, quoted: bool) -> Word {
        self.at = span.end as usize;
        let starts_line = std::mem::replace(&mut self.starts_line, false);
        Word {
            text: unescape(&self.text[spelling]),
            span,
            quoted,
            starts_line,
        }
    }

    fn span(&self, start: usize, end: usize) -> Span {
        // The text was cut to what 32 bits can count.
        Span {
            source: self.source,
            start: start as u32,
            end: end as u32,
        }
    }
}

/// Lexes any bytes to the end or to the first error and returns the tokens up to there: for tools and fuzzing.
///
/// ```
/// use gale_config::lexer::{Token, lex};
/// let (tokens, error) = lex(b"listen 80; # the usual port");
/// assert_eq!((tokens.len(), error), (4, None));
/// assert!(matches!(tokens[2], Token::Semicolon(_)));
/// ```
pub fn lex(text: &[u8]) -> (Vec<Token>, Option<LexError>) {
    let mut lexer = Lexer::new(SourceId(0), text, WORD_BYTES_MAX);
    let mut tokens = Vec::new();
    loop {
        match lexer.next_token() {
            Err(error) => return (tokens, Some(error)),
            Ok(token) => {
                let is_end = matches!(token, Token::End(_));
                tokens.push(token);
                if is_end {
                    return (tokens, None);
                }
            }
        }
    }
}

/// Spells a word so that lexing it gives `text` again: as it is if that is possible, otherwise in double quotes.
///
/// ```
/// use gale_config::quote;
/// assert_eq!(quote(b"/var/www"), "/var/www");
/// assert_eq!(quote(b"a \"b\""), r#""a \"b\"""#);
/// ```
pub fn quote(text: &[u8]) -> BString {
    let is_special = |byte: &u8| b" \t\r\n;{}\\\"'#$".contains(byte);
    if !text.is_empty() && !text.iter().any(is_special) {
        return text.into();
    }
    let mut out = vec![b'"'];
    for &byte in text {
        match byte {
            b'"' | b'\\' => out.extend([b'\\', byte]),
            b'\t' => out.extend(b"\\t"),
            b'\r' => out.extend(b"\\r"),
            b'\n' => out.extend(b"\\n"),
            byte => out.push(byte),
        }
    }
    out.push(b'"');
    out.into()
}

/// The words of a text without punctuation, such as the default of a directive. The end of the text ends a word.
pub(crate) fn words(text: &[u8]) -> Result<Vec<Word>, Diagnostic> {
    let mut text = text.to_vec();
    text.push(b' ');
    let (tokens, error) = lex(&text);
    let words: Option<Vec<Word>> = tokens
        .into_iter()
        .filter(|token| !matches!(token, Token::End(_)))
        .map(|token| {
            if let Token::Word(word) = token {
                Some(word)
            } else {
                None
            }
        })
        .collect();
    words.filter(|_| error.is_none()).ok_or_else(|| {
        Diagnostic::emerg(format!(
            "\"{}\" is not a list of words",
            text.trim().as_bstr()
        ))
    })
}

fn unescape(spelling: &[u8]) -> BString {
    if !spelling.contains(&b'\\') {
        return spelling.into();
    }
    let mut out = Vec::with_capacity(spelling.len());
    let mut rest = spelling;
    loop {
        rest = match rest {
            [] => return out.into(),
            [
                b'\\',
                escaped @ (b'"' | b'\'' | b'\\' | b't' | b'r' | b'n'),
                tail @ ..,
            ] => {
                out.push(match escaped {
                    b't' => b'\t',
                    b'r' => b'\r',
                    b'n' => b'\n',
                    literal => *literal,
                });
                tail
            }
            [byte, tail @ ..] => {
                out.push(*byte);
                tail
            }
        }
    }
}
