//! Plain English (STYLE.md): four patterns that make a sentence hard to read, in comments and in strings.
//!
//! Strings have none of them, and the description of a directive begins with a verb. Comments have a limit for each
//! crate, in thousandths of their lines, which may only be lowered: [`LIMITS`].
//! `GALE_PROSE=crates/http cargo test -p gale --test server prose:: -- --nocapture` lists the places of a crate.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// Lines of comments with a pattern, in thousandths of all lines of comments, in the order of [`Pattern::ALL`].
const LIMITS: &[(&str, [usize; 4])] = &[
    ("bench", [1, 1, 1, 1]),
    ("crates/base", [1, 1, 1, 1]),
    ("crates/check", [1, 1, 1, 1]),
    ("crates/config", [1, 1, 1, 1]),
    ("crates/engine", [1, 1, 1, 1]),
    ("crates/files", [1, 1, 1, 1]),
    ("crates/http", [1, 1, 1, 1]),
    ("crates/http-cache", [1, 1, 1, 1]),
    ("crates/http-upstream", [1, 1, 1, 1]),
    ("crates/log", [1, 1, 1, 1]),
    ("crates/modules", [1, 1, 1, 1]),
    ("crates/process", [1, 1, 1, 1]),
    ("crates/protocol", [1, 1, 1, 1]),
    ("crates/resolver", [1, 1, 1, 1]),
    ("crates/runtime", [1, 1, 1, 1]),
    ("crates/server", [1, 1, 1, 1]),
    ("crates/spool", [1, 1, 1, 1]),
    ("crates/stream", [1, 1, 1, 1]),
    ("crates/tls", [1, 1, 1, 1]),
    ("crates/top", [1, 1, 1, 1]),
    ("crates/upstream", [1, 1, 1, 1]),
    ("crates/worker", [1, 1, 1, 1]),
    ("fuzz", [1, 1, 1, 1]),
    ("tests", [1, 1, 1, 1]),
    ("xtask", [1, 1, 1, 1]),
];

/// A limit that is this much above the figure has to be lowered.
const SLACK_MAX: usize = 10;

/// Shorter strings are names and values, not sentences.
const SENTENCE_WORDS_MIN: usize = 3;

const COLUMNS_MAX: usize = 120;

/// Lines that rustfmt does not break.
const LONG_LINES_MAX: usize = 5;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Pattern {
    /// A clause in place of a noun at the beginning: "What is read".
    Beginning,
    /// A clause as the subject of a sentence: "Whether it is on is checked".
    Subject,
    /// An indefinite person in the place of a thing with a name.
    Nobody,
    /// A preposition before a clause: "of what is read".
    Preposition,
}

impl Pattern {
    const ALL: [Pattern; 4] = [Pattern::Beginning, Pattern::Subject, Pattern::Nobody, Pattern::Preposition];

    fn is_in(self, text: &str) -> bool {
        match self {
            Pattern::Beginning => is_one_of(first_word(text), &BEGINNINGS) && !text.contains('?'),
            Pattern::Subject => sentences(text).any(has_clause_as_subject),
            Pattern::Nobody => words(text).any(|word| is_one_of(&word.to_lowercase(), &PERSONS)),
            Pattern::Preposition => has_preposition_before_clause(text),
        }
    }
}

const BEGINNINGS: [&str; 5] = ["What", "Who", "Whoever", "Whatever", "Whose"];
const CLAUSES: [&str; 8] = ["What", "Who", "Whoever", "Whatever", "That", "Where", "How", "Whether"];
const VERBS: [&str; 13] =
    ["is", "are", "was", "has", "have", "gets", "goes", "comes", "costs", "holds", "waits", "counts", "says"];
const PERSONS: [&str; 3] = ["nobody", "somebody", "anybody"];
const PREPOSITIONS: [&str; 9] = ["to", "of", "for", "by", "with", "from", "than", "and", "or"];

fn is_one_of(word: &str, words: &[&str]) -> bool {
    words.contains(&word)
}

fn is_word_character(character: char) -> bool {
    character.is_alphanumeric() || character == '_'
}

fn words(text: &str) -> impl Iterator<Item = &str> {
    text.split(|character| !is_word_character(character)).filter(|word| !word.is_empty())
}

fn first_word(text: &str) -> &str {
    text.split(|character| !is_word_character(character)).next().unwrap_or_default()
}

/// The parts of a text that may begin with a subject, each with the rest of the text behind it.
fn sentences(text: &str) -> impl Iterator<Item = &str> {
    let ends = text.match_indices([' ']).filter(|&(at, _)| text[..at].ends_with(['.', ';', ':']));
    std::iter::once(text).chain(ends.map(|(at, _)| &text[at + 1..]))
}

fn has_clause_as_subject(sentence: &str) -> bool {
    let end = sentence.find(['.', '?']).unwrap_or(sentence.len());
    is_one_of(first_word(sentence), &CLAUSES)
        && words(&sentence[..end]).skip(1).any(|word| is_one_of(word, &VERBS))
        && !sentence.contains('?')
}

/// "what to do" is a noun.
fn has_preposition_before_clause(text: &str) -> bool {
    let lower = text.to_lowercase();
    let words: Vec<&str> = lower.split(' ').collect();
    words.windows(3).any(|window| {
        let preposition = window[0].rsplit(|character| !is_word_character(character)).next().unwrap_or_default();
        is_one_of(preposition, &PREPOSITIONS)
            && is_one_of(window[1], &["who", "whoever", "what"])
            && first_word(window[2]) != "to"
    })
}

#[test]
fn comments_keep_the_limits_of_their_crate() {
    let listed = std::env::var("GALE_PROSE").unwrap_or_default();
    let mut lines: BTreeMap<String, usize> = BTreeMap::new();
    let mut found: BTreeMap<String, [usize; 4]> = BTreeMap::new();
    for (path, text) in rust_files(&["bench", "crates", "fuzz", "tests", "xtask"]) {
        let group = group_of(&path);
        for (number, comment) in comments(&text) {
            *lines.entry(group.clone()).or_default() += 1;
            for (pattern, count) in Pattern::ALL.iter().zip(found.entry(group.clone()).or_default()) {
                if pattern.is_in(comment) {
                    *count += 1;
                    if group == listed {
                        println!("{path}:{number}: {pattern:?}: {comment}");
                    }
                }
            }
        }
    }
    let thousandths = |group: &str| found[group].map(|count| (1000 * count).div_ceil(lines[group]));
    let rows: BTreeMap<&str, [usize; 4]> = LIMITS.iter().copied().collect();
    let wrong: Vec<String> = lines.keys().filter_map(|group| complaint(group, thousandths(group), &rows)).collect();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

fn complaint(group: &str, figures: [usize; 4], rows: &BTreeMap<&str, [usize; 4]>) -> Option<String> {
    let row = format!("(\"{group}\", {figures:?}),");
    let Some(limits) = rows.get(group) else { return Some(format!("a row is missing: {row}")) };
    let mut pairs = figures.iter().zip(limits);
    if pairs.clone().any(|(figure, limit)| figure > limit) {
        let hint = format!("GALE_PROSE={group} lists the places");
        return Some(format!("{group} has {figures:?}, the limits are {limits:?}; {hint}"));
    }
    let is_lax = pairs.any(|(figure, limit)| figure + SLACK_MAX < *limit);
    is_lax.then(|| format!("the limits of {group} can be lowered: {row}"))
}

#[test]
fn strings_have_none_of_the_patterns() {
    let mut wrong = Vec::new();
    for (path, text) in rust_files(&["bench", "crates", "xtask"]) {
        if path.contains("/tests/") {
            continue;
        }
        for (number, literal) in strings(&text) {
            // The name of a user is no person.
            let literal = literal.replace("the user nobody", "the user");
            if words(&literal).count() >= SENTENCE_WORDS_MIN {
                let patterns = Pattern::ALL.into_iter().filter(|pattern| pattern.is_in(&literal));
                wrong.extend(patterns.map(|pattern| format!("{path}:{number}: {pattern:?}: {literal}")));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn rust_files_hold_120_columns() {
    let mut long = Vec::new();
    for (path, text) in rust_files(&["bench", "crates", "fuzz", "tests", "xtask"]) {
        let is_long = |line: &str| line.chars().count() > COLUMNS_MAX;
        long.extend((1..).zip(text.lines()).filter(|&(_, line)| is_long(line)).map(|(at, _)| format!("{path}:{at}")));
    }
    assert!(long.len() <= LONG_LINES_MAX, "longer than {COLUMNS_MAX} columns:\n{}", long.join("\n"));
}

/// Rows of tables, code and addresses of links may be longer: they cannot be wrapped.
#[test]
fn prose_of_documents_holds_120_columns() {
    let mut long = Vec::new();
    for (path, text) in markdown_files() {
        let mut is_code = false;
        for (number, line) in (1..).zip(text.lines()) {
            is_code ^= line.trim_start().starts_with("```");
            let is_row = line.starts_with('|') || line.contains("](");
            if line.chars().count() > COLUMNS_MAX && !is_code && !is_row {
                long.push(format!("{path}:{number}"));
            }
        }
    }
    assert!(long.is_empty(), "longer than {COLUMNS_MAX} columns:\n{}", long.join("\n"));
}

/// As on nginx.org: "Sets …", "Enables or disables …".
#[test]
fn directives_begin_with_a_verb() {
    let mut wrong = Vec::new();
    for entry in fs::read_dir(workspace().join("docs/reference")).unwrap() {
        let page = fs::read_to_string(entry.unwrap().path()).unwrap();
        for section in page.split("\n## ").skip(1) {
            let description = section.split("\n\n").nth(1).unwrap_or_default();
            let has_no_effect = ["No effect", "Not supported"].iter().any(|start| description.starts_with(start));
            if !first_word(description).ends_with('s') && !has_no_effect {
                wrong.push(description.to_owned());
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn patterns_are_found_in_the_sentences_that_have_them() {
    let of = |text: &str| Pattern::ALL.into_iter().filter(|pattern| pattern.is_in(text)).collect::<Vec<_>>();
    assert_eq!(of("What the disk could not do."), [Pattern::Beginning]);
    assert_eq!(of("What is read, and where."), [Pattern::Beginning, Pattern::Subject]);
    assert_eq!(of("Idle: Whether it waits for who comes first."), [Pattern::Subject, Pattern::Preposition]);
    assert_eq!(of("Nobody reads it; How long that was."), [Pattern::Subject, Pattern::Nobody]);
    assert_eq!(of("says how much (and what of it) is left"), [Pattern::Preposition]);
    for plain in [
        "Disk operations that failed.",
        "What is read here?",
        "What? It is read.",
        "Whatsoever",
        "The list of what to do.",
        "Stops. That ends it. It is over.",
        "It somehow knows: 1 of 2 what",
    ] {
        assert_eq!(of(plain), [], "{plain}");
    }
}

#[test]
fn strings_are_found_where_they_are() {
    let source = r##"//! "no"
        fn f<'a>(c: char) -> &'a str { /* "no /* "no" */ " */ if c == '"' || c == '\'' { "one \"x\" \
        two" } else { r#"three "x" four"# } } // "no"
        const A: &[u8] = b"five";"##;
    let found: Vec<(usize, String)> = strings(source);
    let expected = [(2, "one \\\"x\\\" two"), (3, "three \"x\" four"), (4, "five")];
    assert_eq!(found, expected.map(|(line, text)| (line, text.to_owned())));
}

/// The texts of the lines that are comments, with their numbers.
fn comments(source: &str) -> impl Iterator<Item = (usize, &str)> {
    source.lines().enumerate().filter_map(|(number, line)| {
        let text = line.trim_start().strip_prefix("//")?;
        let text = text.strip_prefix(['/', '!']).unwrap_or(text);
        Some((number + 1, text.strip_prefix(' ').unwrap_or(text)))
    })
}

/// The string literals, as they are written but for line ends behind a backslash, with the line that each begins in.
fn strings(source: &str) -> Vec<(usize, String)> {
    let (mut found, mut rest) = (Vec::new(), source);
    while let Some(first) = rest.chars().next() {
        let (length, content) = token(rest, first);
        if let Some(content) = content {
            let line = source[..source.len() - rest.len()].matches('\n').count() + 1;
            found.push((line, joined(content)));
        }
        rest = &rest[length..];
    }
    found
}

/// The length of the comment, literal, word or character that a text begins with, and the content of a string.
fn token(text: &str, first: char) -> (usize, Option<&str>) {
    let until = |end: Option<usize>| end.unwrap_or(text.len());
    if text.starts_with("//") {
        return (until(text.find('\n')), None);
    }
    if text.starts_with("/*") {
        return (block_comment_length(text), None);
    }
    if first == '"' {
        let end = closing_quote(text, '"');
        return (until(end.map(|end| end + 1)), Some(&text[1..until(end)]));
    }
    if first == '\'' {
        // A lifetime has no closing quote behind one character.
        let is_character = text[1..].starts_with('\\') || text.chars().nth(2) == Some('\'');
        let length = if is_character { closing_quote(text, '\'').map(|end| end + 1) } else { Some(1) };
        return (until(length), None);
    }
    if let Some((length, content)) = raw_string(text) {
        return (length, Some(content));
    }
    let word = text.find(|character| !is_word_character(character)).unwrap_or(text.len());
    // The prefix of a literal is no part of it.
    (if word == 0 || text[word..].starts_with(['"', '\'']) { first.len_utf8() } else { word }, None)
}

fn block_comment_length(text: &str) -> usize {
    let (mut depth, mut at) = (0, 0);
    while at < text.len() {
        match &text.as_bytes()[at..] {
            [b'/', b'*', ..] => (depth, at) = (depth + 1, at + 2),
            [b'*', b'/', ..] => (depth, at) = (depth - 1, at + 2),
            _ => at += 1,
        }
        if depth == 0 {
            return at;
        }
    }
    at
}

/// Where the quote is that ends a literal.
fn closing_quote(text: &str, quote: char) -> Option<usize> {
    let mut characters = text.char_indices().skip(1);
    while let Some((at, character)) = characters.next() {
        match character {
            '\\' => _ = characters.next(),
            _ if character == quote => return Some(at),
            _ => {}
        }
    }
    None
}

/// The length and the content of a raw string that a text begins with.
fn raw_string(text: &str) -> Option<(usize, &str)> {
    let behind_r = text.strip_prefix('r').or_else(|| text.strip_prefix("br"))?;
    let hashes = behind_r.find(|character| character != '#')?;
    let content = behind_r[hashes..].strip_prefix('"')?;
    let end = format!("\"{}", "#".repeat(hashes));
    let length = content.find(&end)?;
    Some((text.len() - content.len() + length + end.len(), &content[..length]))
}

/// A literal without the line ends that a backslash takes away.
fn joined(literal: &str) -> String {
    let mut parts = literal.split("\\\n");
    let first = parts.next().unwrap_or_default().to_owned();
    parts.fold(first, |text, part| text + part.trim_start())
}

/// `crates/NAME`, or the top folder.
fn group_of(path: &str) -> String {
    let mut parts = path.split('/');
    match (parts.next(), parts.next()) {
        (Some("crates"), Some(name)) => format!("crates/{name}"),
        (top, _) => top.unwrap_or_default().to_owned(),
    }
}

fn workspace() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// The Rust files of these folders: paths from the workspace on, and texts.
fn rust_files(folders: &[&str]) -> Vec<(String, String)> {
    files_below(folders, "rs")
}

/// The Markdown files of the project, but for the pages that are made from the directives and the results of
/// measurements.
fn markdown_files() -> Vec<(String, String)> {
    let mut files = files_below(&["bench", "crates", "docs", "fuzz", "packaging", "tests", "xtask"], "md");
    files.retain(|(path, _)| !path.starts_with("docs/reference/") && !path.starts_with("bench/results/"));
    for name in ["ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md", "README.md", "SECURITY.md", "STYLE.md"] {
        files.push((name.to_owned(), fs::read_to_string(workspace().join(name)).unwrap()));
    }
    files
}

/// The files below these folders whose names have this extension, sorted by path.
fn files_below(folders: &[&str], wanted: &str) -> Vec<(String, String)> {
    let root = workspace();
    let (mut files, mut waiting) = (Vec::new(), folders.iter().map(PathBuf::from).collect::<Vec<_>>());
    while let Some(folder) = waiting.pop() {
        for entry in fs::read_dir(root.join(&folder)).unwrap() {
            let entry = entry.unwrap();
            let path = folder.join(entry.file_name());
            if entry.file_type().unwrap().is_dir() {
                // Build output is not part of the project.
                if entry.file_name() != "target" {
                    waiting.push(path);
                }
            } else if path.extension().is_some_and(|extension| extension == wanted) {
                files.push((path.to_str().unwrap().to_owned(), fs::read_to_string(root.join(&path)).unwrap()));
            }
        }
    }
    files.sort();
    files
}
