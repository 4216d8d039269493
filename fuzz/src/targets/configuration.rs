//! Configurations: tokens never overlap, every diagnostic can be displayed, and parsed statements survive a round trip.

use std::path::Path;

use gale_config::lexer::{Token, WORD_BYTES_MAX};
use gale_config::{MemoryFiles, Parsed, Sources, Span, Statement, lex, parse_parameter, parse_text, quote};

/// Runs the target on one input.
pub fn run(data: &[u8]) {
    check_tokens(data);
    let (sources, parsed) = parse(data);
    for diagnostic in parsed.errors.iter() {
        let rendered = diagnostic.render(&sources, "gale");
        assert!(rendered.ends_with('\n'));
        assert!(rendered.contains(&diagnostic.line(&sources)));
    }
    if !parsed.errors.has_errors() {
        check_written(&parsed.statements);
    }
    // The value of `-g`: the same language without blocks, and with other error messages.
    let _ = parse_parameter(&mut Sources::new(), &mut files(data), data.to_vec(), Path::new("/conf"));
}

/// Returns files that the text may include, among them the text itself.
fn files(data: &[u8]) -> MemoryFiles {
    MemoryFiles::new()
        .with("/conf/a", b"listen 80;".to_vec())
        .with("/conf/b", b"server { include a; }".to_vec())
        .with("/conf/broken", b"server { listen \"80;".to_vec())
        .with("/conf/self", data.to_vec())
}

fn parse(text: &[u8]) -> (Sources, Parsed) {
    let mut sources = Sources::new();
    let parsed = parse_text(&mut sources, &mut files(text), "input", text.to_vec(), Path::new("/conf"));
    (sources, parsed)
}

/// Checks that tokens are in order, do not overlap and lie within the text.
fn check_tokens(text: &[u8]) {
    let (tokens, error) = lex(text);
    let mut end = 0;
    for token in &tokens {
        let span = span_of(token);
        assert!(end <= span.start && span.start <= span.end && span.end as usize <= text.len());
        end = span.end;
    }
    assert_ne!(error.is_none(), !matches!(tokens.last(), Some(Token::End(_))));
}

fn span_of(token: &Token) -> Span {
    match token {
        Token::Word(word) => word.span,
        Token::Semicolon(span) | Token::BlockStart(span) | Token::BlockEnd(span) | Token::End(span) => *span,
    }
}

/// Checks that statements, written with the quotes they need, parse to the same statements.
fn check_written(statements: &[Statement]) {
    let mut written = Vec::new();
    if !write(statements, &mut written) {
        return;
    }
    let (sources, again) = parse(&written);
    let errors: Vec<String> = again.errors.iter().map(|error| error.line(&sources)).collect();
    assert_eq!(errors, Vec::<String>::new());
    assert!(is_same(statements, &again.statements));
}

/// Writes statements. Returns false if quotes and backslashes make a word too long.
fn write(statements: &[Statement], out: &mut Vec<u8>) -> bool {
    for statement in statements {
        for word in std::iter::once(&statement.name).chain(&statement.args) {
            let quoted = quote(&word.text);
            if quoted.len() > WORD_BYTES_MAX {
                return false;
            }
            out.extend_from_slice(&quoted);
            out.push(b' ');
        }
        match &statement.block {
            None => out.extend_from_slice(b";\n"),
            Some(block) => {
                out.extend_from_slice(b"{\n");
                if !write(block, out) {
                    return false;
                }
                out.extend_from_slice(b"}\n");
            }
        }
    }
    true
}

fn is_same(one: &[Statement], other: &[Statement]) -> bool {
    one.len() == other.len()
        && one.iter().zip(other).all(|(one, other)| {
            one.name.text == other.name.text
                && one.args.iter().map(|word| &word.text).eq(other.args.iter().map(|word| &word.text))
                && one.block.is_some() == other.block.is_some()
                && is_same(one.body(), other.body())
        })
}
