//! Splits the bytes of a configuration into words and punctuation, as nginx does.
//!
//! Knows no statements: the parser decides which token may follow which. Exception: a closing quote must be followed by
//! a blank, `;`, `{` or `)`.
//! Invariant: tokens are in order and never overlap, so lexing ends after at most as many tokens as there are bytes.
//!
//! Rules that may surprise:
//!
//! - A word ends with a blank (space, tab, CR, LF), `;` or `{`. Elsewhere in a word `}`, `#` and quotes are ordinary.
//! - `{` after `$` belongs to the word: `${name}`.
//! - A backslash takes the next byte into the word, whatever it is. `\"`, `\'` and `\\` lose the backslash, `\t`, `\r`
//!   and `\n` become the control character, any other pair stays as it is. This holds inside and outside of quotes.
//! - `#` begins a comment only where a word could begin.
//! - The text need not be UTF-8.
//!
//! Source: <https://nginx.org/en/docs/beginners_guide.html#conf_structure>, and nginx's behaviour.

use crate::diagnostic::Diagnostic;
use crate::source::{SourceId, Span};
use crate::statement::Word;
use bstr::{BString, ByteSlice};

/// Maximum length of a word as spelled in a file, without quotes. nginx reads files through a buffer of 4096 bytes that
/// must hold the word and its terminator (and in some positions one byte more, which is not imitated). Comments are
/// unlimited here; in nginx the same limit applies to them.
pub const WORD_BYTES_MAX: usize = 4095;

/// A token of a configuration text.
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

/// Reasons why lexing cannot continue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LexError {
    /// A closing quote is followed by a byte that is not allowed there.
    AfterQuote {
        /// The offending byte.
        byte: u8,
        /// Its place.
        span: Span,
    },
    /// The text ends within a word.
    UnfinishedWord {
        /// The first byte of the word, or its opening quote.
        start: Span,
        /// The end of the text.
        end: Span,
        /// `true` if a quote is open.
        quoted: bool,
    },
    /// A word is longer than [`WORD_BYTES_MAX`].
    TooLong {
        /// The first ten bytes of the word, without its quote.
        beginning: BString,
        /// The place of these bytes, including the quote.
        start: Span,
        /// The opening quote, if there is one.
        quote: Option<u8>,
    },
}

/// Reads the tokens of one text.
#[derive(Clone, Debug)]
pub struct Lexer<'t> {
    source: SourceId,
    text: &'t [u8],
    at: usize,
    word_bytes_max: usize,
    /// `true` if only blanks precede the current position in its line.
    starts_line: bool,
}

impl<'t> Lexer<'t> {
    /// Creates a lexer at the beginning of a text. `word_bytes_max` is [`WORD_BYTES_MAX`] for a file; a text from the
    /// command line is not limited.
    ///
    /// Reads only the first 4 GiB of a text; [`Sources`](crate::Sources) holds no longer texts.
    pub fn new(source: SourceId, text: &'t [u8], word_bytes_max: usize) -> Self {
        let text = &text[..text.len().min(crate::source::SOURCE_BYTES_MAX)];
        Lexer { source, text, at: 0, word_bytes_max, starts_line: true }
    }

    /// Returns the next token; at the end of the text, [`Token::End`] on every call.
    ///
    /// # Errors
    /// The reason why there is no token. The caller must stop then: any further token would be a guess.
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
                    // The newline is a blank, skipped in the next iteration.
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
            Some(&byte) => Err(LexError::AfterQuote { byte, span: self.span(at + 1, at + 2) }),
        }
    }

    fn plain_word(&mut self) -> Result<Token, LexError> {
        let start = self.at;
        let rest = &self.text[start..self.text.len().min(start + self.word_bytes_max)];
        // Skips to the first byte that ends the word or needs special treatment.
        let is_special = |byte: &u8| matches!(byte, b' ' | b'\t' | b'\r' | b'\n' | b';' | b'{' | b'\\' | b'$');
        let mut at = start + rest.iter().position(is_special).unwrap_or(rest.len());
        let mut after_dollar = false;
        loop {
            // The end of the text does not end a word: a word needs a terminator, so this is an error.
            let byte = self.byte_of_word(start, start, at, None)?;
            match byte {
                b'{' if after_dollar => {}
                b' ' | b'\t' | b'\r' | b'\n' | b';' | b'{' => break,
                _ => after_dollar = byte == b'$',
            }
            at += if byte == b'\\' { 2 } else { 1 };
        }
        Ok(Token::Word(self.word(start..at, self.span(start, at), false)))
    }

    /// Returns the byte at `at` of a word whose spelling begins at `start`. `opening` is the position of its quote, or
    /// `start` if it has none.
    fn byte_of_word(&self, opening: usize, start: usize, at: usize, quote: Option<u8>) -> Result<u8, LexError> {
        if at - start > self.word_bytes_max && start + self.word_bytes_max + 1 < self.text.len() {
            let beginning = self.text[start..start + 10].into();
            return Err(LexError::TooLong { beginning, start: self.span(opening, start + 10), quote });
        }
        self.text.get(at).copied().ok_or_else(|| LexError::UnfinishedWord {
            start: self.span(opening, opening + 1),
            end: self.span(self.text.len(), self.text.len()),
            quoted: quote.is_some(),
        })
    }

    fn word(&mut self, spelling: std::ops::Range<usize>, span: Span, quoted: bool) -> Word {
        self.at = span.end as usize;
        let starts_line = std::mem::replace(&mut self.starts_line, false);
        Word { text: unescape(&self.text[spelling]), span, quoted, starts_line }
    }

    fn span(&self, start: usize, end: usize) -> Span {
        // Cannot overflow: `new` cuts the text to a length that fits 32 bits.
        Span { source: self.source, start: start as u32, end: end as u32 }
    }
}

/// Lexes a text to its end or to the first error, and returns the tokens so far: for tools and fuzzing.
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

/// Returns a spelling of `text` as one word: unchanged if possible, otherwise in double quotes.
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

/// Splits a text without punctuation, such as the default of a directive, into words. The end of the text ends a word.
pub(crate) fn words(text: &[u8]) -> Result<Vec<Word>, Diagnostic> {
    let mut text = text.to_vec();
    text.push(b' ');
    let (tokens, error) = lex(&text);
    let words: Option<Vec<Word>> = tokens
        .into_iter()
        .filter(|token| !matches!(token, Token::End(_)))
        .map(|token| if let Token::Word(word) = token { Some(word) } else { None })
        .collect();
    words
        .filter(|_| error.is_none())
        .ok_or_else(|| Diagnostic::emerg(format!("\"{}\" is not a list of words", text.trim().as_bstr())))
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
            [b'\\', escaped @ (b'"' | b'\'' | b'\\' | b't' | b'r' | b'n'), tail @ ..] => {
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

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The tokens in short form: the text of each word, and punctuation as itself.
    fn tokens(text: &[u8]) -> Vec<String> {
        let (tokens, error) = lex(text);
        let shown = tokens.iter().filter_map(|token| match token {
            Token::Word(word) => Some(word.text.to_string()),
            Token::Semicolon(_) => Some(";".into()),
            Token::BlockStart(_) => Some("{".into()),
            Token::BlockEnd(_) => Some("}".into()),
            Token::End(_) => None,
        });
        let error = error.map(|error| format!("{error:?}").split(' ').next().unwrap_or_default().to_owned());
        shown.chain(error).collect()
    }

    fn word(text: &[u8]) -> Word {
        match Lexer::new(SourceId(0), text, WORD_BYTES_MAX).next_token() {
            Ok(Token::Word(word)) => word,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn words_end_with_blanks_semicolons_and_opening_braces() {
        assert_eq!(tokens(b"listen 80;"), ["listen", "80", ";"]);
        assert_eq!(tokens(b"a\tb\rc\nd;"), ["a", "b", "c", "d", ";"]);
        assert_eq!(tokens(b"http{server{}}"), ["http", "{", "server", "{", "}", "}"]);
    }

    #[test]
    fn a_closing_brace_within_a_word_belongs_to_it() {
        assert_eq!(tokens(b"listen 80}"), ["listen", "UnfinishedWord"]);
        assert_eq!(tokens(b"a b}c;"), ["a", "b}c", ";"]);
    }

    #[test]
    fn comments_begin_only_where_a_word_could() {
        assert_eq!(tokens(b"# a;\nb; # c\r\nd#e;#"), ["b", ";", "d#e", ";"]);
        assert_eq!(tokens(b"a #b;\n c;"), ["a", "c", ";"]);
        assert_eq!(tokens("# длинный".as_bytes()), [""; 0]);
    }

    #[test]
    fn quotes_hold_blanks_and_punctuation() {
        assert_eq!(tokens(b"a 'b c;{}#' \"d\n e\";"), ["a", "b c;{}#", "d\n e", ";"]);
        assert_eq!(tokens(b"a '' \"\";"), ["a", "", "", ";"]);
        assert_eq!(tokens(b"a '\"' \"'\";"), ["a", "\"", "'", ";"]);
    }

    #[test]
    fn quotes_within_a_word_are_ordinary() {
        assert_eq!(tokens(b"a\"b c'd;"), ["a\"b", "c'd", ";"]);
    }

    #[test]
    fn after_a_closing_quote_only_some_bytes_may_follow() {
        for text in ["'a';", "'a'{", "'a' b", "'a'\t", "'a'\r", "'a'\n"] {
            assert_eq!(tokens(text.as_bytes())[0], "a", "{text}");
        }
        assert_eq!(tokens(b"'a')b;"), ["a", ")b", ";"]);
        for text in ["'a'b;", "'a''b';", "\"a\"}", "'a'#", "'a'$b;", "'a'\\;"] {
            assert_eq!(tokens(text.as_bytes()), ["AfterQuote"], "{text}");
        }
    }

    #[test]
    fn escapes_are_the_same_in_quotes_and_outside() {
        assert_eq!(tokens(br#"a\"b a\'b a\\b a\tb a\rb a\nb;"#), ["a\"b", "a'b", "a\\b", "a\tb", "a\rb", "a\nb", ";"]);
        assert_eq!(tokens(br#""a\"b" 'a\'b' "a\\" "a\nb";"#), ["a\"b", "a'b", "a\\", "a\nb", ";"]);
    }

    #[test]
    fn other_escapes_stay_as_they_are_but_take_their_byte() {
        assert_eq!(
            tokens(br"a\;b a\ b a\{b a\.b \#c \d+$;"),
            [r"a\;b", r"a\ b", r"a\{b", r"a\.b", r"\#c", r"\d+$", ";"]
        );
        assert_eq!(tokens(br"\\;"), [r"\", ";"]);
        assert_eq!(tokens(br"\\\;;"), [r"\\;", ";"]);
    }

    #[test]
    fn a_brace_after_a_dollar_belongs_to_the_word() {
        assert_eq!(tokens(b"return ${uri}x;"), ["return", "${uri}x", ";"]);
        assert_eq!(tokens(b"a b${c}{"), ["a", "b${c}", "{"]);
        assert_eq!(tokens(b"a ${{b;"), ["a", "${{b", ";"]);
        assert_eq!(tokens(b"a $${b;"), ["a", "$${b", ";"]);
        assert_eq!(tokens(b"a $b{"), ["a", "$b", "{"]);
        assert_eq!(tokens(br"a \${"), ["a", r"\$", "{"]);
        assert_eq!(tokens(b"if ($a){"), ["if", "($a)", "{"]);
    }

    #[test]
    fn bytes_need_not_be_utf_8() {
        assert_eq!(word(b"\xff\xfe\x00;").text, b"\xff\xfe\x00");
        assert_eq!(word(b"\xef\xbb\xbfuser x;").text, b"\xef\xbb\xbfuser");
    }

    #[test]
    fn a_text_that_ends_within_a_word_is_unfinished() {
        for (text, quoted) in [("a", false), ("'a", true), ("a\\", false), ("\"a\\\"", true), ("$", false)] {
            let (_, error) = lex(text.as_bytes());
            let at_end = matches!(&error, Some(LexError::UnfinishedWord { end, quoted: q, .. })
                if *q == quoted && end.start as usize == text.len());
            assert!(at_end, "{text} {error:?}");
        }
        assert_eq!(tokens(b"'a'"), ["a"]);
    }

    #[test]
    fn a_word_has_room_for_4095_bytes() {
        let spell = |before: &str, length: usize, after: &str| format!("{before}{}{after}", "x".repeat(length));
        assert_eq!(word(spell("", WORD_BYTES_MAX, ";;").as_bytes()).text.len(), WORD_BYTES_MAX);
        assert_eq!(word(spell("'", WORD_BYTES_MAX, "';").as_bytes()).text.len(), WORD_BYTES_MAX);
        for (text, quote) in [
            (spell("", WORD_BYTES_MAX + 1, ";"), None),
            (spell("'", WORD_BYTES_MAX + 1, "';"), Some(b'\'')),
            (spell("\"", 10_000, ""), Some(b'"')),
        ] {
            match lex(text.as_bytes()).1 {
                Some(LexError::TooLong { beginning, start, quote: found }) => {
                    assert_eq!((beginning.len(), start.start, found), (10, 0, quote));
                }
                other => panic!("{other:?}"),
            }
        }
        let comment = spell("#", 10_000, "\na;");
        assert_eq!(tokens(comment.as_bytes()), ["a", ";"]);
    }

    #[test]
    fn a_word_knows_its_spelling_and_whether_it_starts_a_line() {
        let (tokens, _) = lex(b"a 'b'\n  c d;");
        let words: Vec<_> = tokens.iter().filter_map(|t| if let Token::Word(w) = t { Some(w) } else { None }).collect();
        let shape: Vec<_> = words.iter().map(|w| (w.span.start, w.span.end, w.quoted, w.starts_line)).collect();
        assert_eq!(shape, [(0, 1, false, true), (2, 5, true, false), (8, 9, false, true), (10, 11, false, false)]);
    }

    fn span(token: &Token) -> Span {
        match token {
            Token::Word(word) => word.span,
            Token::Semicolon(span) | Token::BlockStart(span) | Token::BlockEnd(span) | Token::End(span) => *span,
        }
    }

    proptest! {
        #[test]
        fn any_bytes_lex_into_tokens_in_order(text in proptest::collection::vec(any::<u8>(), 0..300)) {
            check_order(&text)?;
        }

        #[test]
        fn texts_full_of_syntax_lex_into_tokens_in_order(text in "[a \"'\\\\{};#$\n\r\t)]{0,60}") {
            check_order(text.as_bytes())?;
        }

        #[test]
        fn a_quoted_word_reads_back(text in proptest::collection::vec(any::<u8>(), 0..200)) {
            let mut spelling = quote(&text).to_vec();
            spelling.push(b';');
            let (tokens, error) = lex(&spelling);
            prop_assert_eq!(error, None);
            prop_assert_eq!(tokens.len(), 3);
            match &tokens[0] {
                Token::Word(word) => prop_assert_eq!(&word.text[..], &text[..]),
                other => prop_assert!(false, "{:?}", other),
            }
        }

        #[test]
        fn a_word_of_syntax_reads_back(text in "[a \"'\\\\{};#$\n\r\tnrt]{0,20}") {
            let mut spelling = quote(text.as_bytes()).to_vec();
            spelling.push(b' ');
            prop_assert_eq!(&word(&spelling).text[..], text.as_bytes());
        }
    }

    fn check_order(text: &[u8]) -> Result<(), TestCaseError> {
        let (tokens, error) = lex(text);
        let mut at = 0;
        for token in &tokens {
            let span = span(token);
            prop_assert!(at <= span.start && span.start <= span.end && span.end as usize <= text.len());
            at = span.end;
        }
        prop_assert_eq!(error.is_none(), matches!(tokens.last(), Some(Token::End(_))));
        Ok(())
    }
}
