//! Builds statements from words and follows `include`.
//!
//! Knows only the directive `include`; all others are defined by the tables.
//! Continues after an error only where the following text is unambiguous: after a stray `;`, and in the including file
//! after an included file that is unreadable or broken.
//! Invariant: the depth of the tree and the number and total size of files and words are bounded (by the constants
//! below), so that no text can exhaust the stack or the memory.

use crate::diagnostic::{Diagnostic, Diagnostics, Reporter};
use crate::files::Files;
use crate::glob;
use crate::lexer::{LexError, Lexer, Token, WORD_BYTES_MAX};
use crate::source::{SOURCE_BYTES_MAX, Source, SourceId, Sources, Span};
use crate::statement::{Statement, Word};
use bstr::ByteSlice;
use gale_base::os_error::OsErrorText;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Arc;

/// Maximum nesting of blocks, counted over all files. Real configurations need about six levels.
pub const BLOCK_DEPTH_MAX: usize = 100;
/// Maximum nesting of included files.
pub const INCLUDE_DEPTH_MAX: usize = 32;
/// Maximum number of inclusions in total: files that include each other twice would be read exponentially often.
pub const INCLUDES_MAX: usize = 1 << 16;
/// Maximum size of all texts in bytes; a file counts as often as it is included.
pub const BYTES_MAX: usize = 1 << 30;
/// Maximum number of words in all statements: large `geo` tables have some millions.
pub const WORDS_MAX: usize = 1 << 24;

/// The result of parsing.
#[derive(Clone, Debug, Default)]
pub struct Parsed {
    /// The statements up to each error, and a [broken](Statement::broken) statement in the place of the error.
    pub statements: Vec<Statement>,
    /// The errors of the broken statements, in text order.
    pub errors: Diagnostics,
}

/// Parses a file and all files that it includes.
///
/// Relative names in `include` are resolved against `prefix`, the directory of the main file.
///
/// # Errors
/// If the file itself cannot be read. Every later error is in [`Parsed::errors`].
pub fn parse(sources: &mut Sources, files: &mut dyn Files, path: &Path, prefix: &Path) -> Result<Parsed, Diagnostic> {
    let mut parser = Parser::new(sources, files, prefix);
    let source = parser.read(path)?;
    Ok(parser.parse_all(source, Text::File))
}

/// Parses a configuration held in memory. `label` is its name in messages.
pub fn parse_text(sources: &mut Sources, files: &mut dyn Files, label: &str, text: Vec<u8>, prefix: &Path) -> Parsed {
    let source = sources.add_text(label, text);
    Parser::new(sources, files, prefix).parse_all(source, Text::File)
}

/// Parses the value of the `-g` option: simple directives without blocks.
pub fn parse_parameter(sources: &mut Sources, files: &mut dyn Files, text: Vec<u8>, prefix: &Path) -> Parsed {
    let source = sources.add_text("command line", text);
    Parser::new(sources, files, prefix).parse_all(source, Text::Parameter)
}

/// Kind of the text being parsed: it determines the allowed statements and the wording of errors.
#[derive(Clone, Copy, PartialEq)]
enum Text {
    File,
    Parameter,
}

/// A syntax error was recorded, and the rest of this text cannot be understood.
struct Stop;

struct Parser<'p> {
    sources: &'p mut Sources,
    files: &'p mut dyn Files,
    prefix: &'p Path,
    errors: Diagnostics,
    /// The files being parsed, from the main one to the innermost.
    open_files: Vec<SourceId>,
    block_depth: usize,
    includes: usize,
    bytes: usize,
    words: usize,
}

impl<'p> Parser<'p> {
    fn new(sources: &'p mut Sources, files: &'p mut dyn Files, prefix: &'p Path) -> Self {
        let errors = Diagnostics::new();
        let open_files = Vec::new();
        Parser { sources, files, prefix, errors, open_files, block_depth: 0, includes: 0, bytes: 0, words: 0 }
    }

    fn parse_all(mut self, source: SourceId, text: Text) -> Parsed {
        let mut statements = Vec::new();
        self.parse_source(source, text, &mut statements);
        Parsed { statements, errors: self.errors }
    }

    /// The text of a source of this parser.
    fn text(&self, source: SourceId) -> &Arc<[u8]> {
        self.sources.get(source).expect("sources are added and never removed").text()
    }

    /// Parses one text. Its blocks end at the end of the text, so an error in it does not affect the including text.
    fn parse_source(&mut self, source: SourceId, text: Text, out: &mut Vec<Statement>) {
        let bytes = self.text(source).clone();
        let word_bytes_max = if text == Text::File { WORD_BYTES_MAX } else { SOURCE_BYTES_MAX };
        let mut lexer = Lexer::new(source, &bytes, word_bytes_max);
        self.open_files.push(source);
        // Any error has been recorded in the tree already.
        let _: Result<Option<Span>, Stop> = self.parse_statements(&mut lexer, text, None, out);
        self.open_files.pop();
    }

    /// Parses to the end of the text, or to the end of the block that `opening` began. Returns the closing brace.
    fn parse_statements(
        &mut self,
        lexer: &mut Lexer<'_>,
        text: Text,
        opening: Option<&Head>,
        out: &mut Vec<Statement>,
    ) -> Result<Option<Span>, Stop> {
        let mut words: Vec<Word> = Vec::new();
        loop {
            let token = match lexer.next_token() {
                Ok(token) => token,
                Err(error) => {
                    return Err(self.stop(out, words, |words| lex_diagnostic(&error, text, words)));
                }
            };
            match token {
                Token::Word(word) => {
                    self.words += 1;
                    words.push(word);
                    if self.words > WORDS_MAX {
                        let error = format!("the configuration has more than {WORDS_MAX} words");
                        return Err(self.stop(out, words, |words| at_last(words, error)));
                    }
                }
                Token::Semicolon(span) if words.is_empty() => {
                    let error = unexpected(";", span).hint("no directive precedes it");
                    self.broken(out, words, error);
                    words = Vec::new();
                }
                Token::Semicolon(_) => {
                    let head = Head::new(&mut words);
                    self.simple_statement(head, out);
                }
                Token::BlockStart(span) if words.is_empty() => {
                    let hint = "no directive precedes it";
                    return Err(self.stop(out, words, |_| unexpected("{", span).hint(hint)));
                }
                Token::BlockStart(span) => {
                    self.block_statement(lexer, text, Head::new(&mut words), span, out)?;
                }
                Token::BlockEnd(span) if !words.is_empty() => {
                    return Err(self.stop(out, words, |words| {
                        let last = words.last().map_or_else(Default::default, |word| word.text.clone());
                        unexpected("}", span).hint(format!("a \";\" seems to be missing after \"{last}\""))
                    }));
                }
                Token::BlockEnd(span) if opening.is_some() => return Ok(Some(span)),
                Token::BlockEnd(span) => {
                    let hint = "no block is open here";
                    return Err(self.stop(out, words, |_| unexpected("}", span).hint(hint)));
                }
                Token::End(end) => match (words.first(), opening) {
                    (None, None) => return Ok(None),
                    (None, Some(head)) => {
                        let begins = format!("the block of \"{}\" begins", head.name.text);
                        let error = Diagnostic::emerg("unexpected end of file, expecting \"}\"").at(end);
                        return Err(self.stop(out, words, |_| error.related(begins, head.name.span)));
                    }
                    (Some(_), _) => {
                        return Err(self.stop(out, words, |words| unfinished(text, end, words)));
                    }
                },
            }
        }
    }

    fn simple_statement(&mut self, head: Head, out: &mut Vec<Statement>) {
        match &head.args[..] {
            [path] if head.name.text == "include" => {
                let path = path.clone();
                self.include(&path, head, out);
            }
            // An `include` of another form stays in the tree: `types { include a; }` is a list of words.
            _ => out.push(head.into_statement()),
        }
    }

    fn block_statement(
        &mut self,
        lexer: &mut Lexer<'_>,
        text: Text,
        head: Head,
        brace: Span,
        out: &mut Vec<Statement>,
    ) -> Result<(), Stop> {
        if text == Text::Parameter {
            let message = "block directives are not supported in -g option";
            return Err(self.stop(out, head.into_words(), |_| Diagnostic::emerg(message).at(brace)));
        }
        if self.block_depth >= BLOCK_DEPTH_MAX {
            let message = format!("blocks are nested deeper than {BLOCK_DEPTH_MAX} levels");
            return Err(self.stop(out, head.into_words(), |_| Diagnostic::emerg(message).at(brace)));
        }
        let mut block = Vec::new();
        self.block_depth += 1;
        let end = self.parse_statements(lexer, text, Some(&head), &mut block);
        self.block_depth -= 1;

        let mut statement = head.into_statement();
        statement.block = Some(block);
        statement.block_end = end.as_ref().ok().copied().flatten();
        out.push(statement);
        end.map(|_| ())
    }

    /// Replaces the `include` by the statements of the named files, or by a broken statement for each file that fails.
    fn include(&mut self, path: &Word, head: Head, out: &mut Vec<Statement>) {
        // As in nginx, a relative name is appended to the prefix, even if the result makes no sense.
        let full = self.prefix.join(OsStr::from_bytes(&path.text));
        let paths = if !glob::is_pattern(full.as_os_str().as_bytes()) {
            Ok(vec![full])
        } else {
            self.files.glob(&full).map_err(|error| {
                let message = format!("glob() \"{}\" failed {}", full.display(), OsErrorText(&error));
                Diagnostic::emerg(message).at(path.span)
            })
        };
        match paths {
            Err(error) => self.broken(out, head.into_words(), error),
            Ok(paths) => {
                for file in paths {
                    if let Err(error) = self.include_file(&file, path.span, out) {
                        self.broken(out, head.clone().into_words(), error);
                    }
                }
            }
        }
    }

    fn include_file(&mut self, path: &Path, span: Span, out: &mut Vec<Statement>) -> Result<(), Diagnostic> {
        if self.open_files.iter().any(|&open| self.sources.get(open).and_then(Source::path) == Some(path)) {
            let message = format!("\"{}\" includes itself", path.display());
            return Err(Diagnostic::emerg(message).at(span).hint("the file is being read already"));
        }
        if self.open_files.len() > INCLUDE_DEPTH_MAX {
            let message = format!("files are included deeper than {INCLUDE_DEPTH_MAX} levels");
            return Err(Diagnostic::emerg(message).at(span));
        }
        self.includes += 1;
        if self.includes > INCLUDES_MAX {
            let message = format!("files are included more than {INCLUDES_MAX} times");
            return Err(Diagnostic::emerg(message).at(span));
        }
        let source = self.read(path).map_err(|error| error.at(span))?;
        self.parse_source(source, Text::File, out);
        Ok(())
    }

    /// Returns the text of a file; it is read from disk only the first time.
    fn read(&mut self, path: &Path) -> Result<SourceId, Diagnostic> {
        let source = match self.sources.find(path) {
            Some(source) => source,
            None => {
                let text = self.files.read(path).map_err(|error| {
                    // open() succeeds on a directory; nginx fails at its first pread().
                    let is_directory = error.kind() == std::io::ErrorKind::IsADirectory;
                    let call = if is_directory { "pread()" } else { "open()" };
                    Diagnostic::emerg(format!("{call} \"{}\" failed {}", path.display(), OsErrorText(&error)))
                })?;
                if text.len() > BYTES_MAX {
                    return Err(too_many_bytes());
                }
                self.sources.add_file(path, text)
            }
        };
        self.bytes = self.bytes.saturating_add(self.text(source).len());
        if self.bytes > BYTES_MAX { Err(too_many_bytes()) } else { Ok(source) }
    }

    /// Records an error after which the rest of the text cannot be understood.
    fn stop(&mut self, out: &mut Vec<Statement>, words: Vec<Word>, error: impl FnOnce(&[Word]) -> Diagnostic) -> Stop {
        let error = error(&words);
        self.broken(out, words, error);
        Stop
    }

    /// Records an error, both in the tree and in the list.
    fn broken(&mut self, out: &mut Vec<Statement>, mut words: Vec<Word>, error: Diagnostic) {
        self.errors.report(error.clone());
        let mut statement = match words.is_empty() {
            true => Statement::synthetic("", Vec::new()),
            false => Head::new(&mut words).into_statement(),
        };
        if let Some(span) = error.span
            && statement.name.text.is_empty()
        {
            statement.name.span = span;
            statement.span = span;
        }
        statement.broken = Some(Box::new(error));
        out.push(statement);
    }
}

/// A statement up to its `;` or `{`.
#[derive(Clone)]
struct Head {
    name: Word,
    args: Vec<Word>,
}

impl Head {
    /// Takes the words, of which there must be at least one. The list keeps its capacity for the next statement.
    fn new(words: &mut Vec<Word>) -> Head {
        let mut words = words.drain(..);
        let name = words.next().expect("a statement has a name");
        Head { name, args: words.collect() }
    }

    fn into_words(self) -> Vec<Word> {
        let mut words = self.args;
        words.insert(0, self.name);
        words
    }

    fn into_statement(self) -> Statement {
        let span = self.args.last().map_or(self.name.span, |last| self.name.span.to(last.span));
        Statement { name: self.name, args: self.args, block: None, span, block_end: None, broken: None }
    }
}

fn unexpected(what: &str, span: Span) -> Diagnostic {
    Diagnostic::emerg(format!("unexpected \"{what}\"")).at(span)
}

fn at_last(words: &[Word], message: String) -> Diagnostic {
    Diagnostic::emerg(message).at_opt(words.last().map(|word| word.span))
}

fn too_many_bytes() -> Diagnostic {
    Diagnostic::emerg(format!("the configuration is longer than {BYTES_MAX} bytes"))
}

/// The text ended within a statement; `words` are its complete words.
fn unfinished(text: Text, end: Span, words: &[Word]) -> Diagnostic {
    let message = match text {
        Text::File => "unexpected end of file, expecting \";\" or \"}\"",
        Text::Parameter => "unexpected end of parameter, expecting \";\"",
    };
    let error = Diagnostic::emerg(message).at(end);
    match words.first() {
        Some(first) => error.related(format!("\"{}\" begins", first.text), first.span),
        None => error,
    }
}

fn lex_diagnostic(error: &LexError, text: Text, words: &[Word]) -> Diagnostic {
    match error {
        LexError::AfterQuote { byte, span } => unexpected(&[*byte].as_bstr().to_string(), *span)
            .hint("a closing quote must be followed by a blank, \";\" or \"{\""),
        LexError::UnfinishedWord { start, end, quoted: true } => {
            unfinished(text, *end, words).related("the open quote begins", *start)
        }
        LexError::UnfinishedWord { end, .. } => unfinished(text, *end, words),
        LexError::TooLong { start, quote: Some(quote), .. } => {
            let quote = char::from(*quote);
            Diagnostic::emerg(format!("too long parameter, probably missing terminating \"{quote}\" character"))
                .at(*start)
        }
        LexError::TooLong { start, beginning, quote: None } => {
            Diagnostic::emerg(format!("too long parameter \"{beginning}...\" started")).at(*start)
        }
    }
}
