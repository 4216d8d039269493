//! The parser through its public interface: trees, includes, and every syntax error with its exact words.

use bstr::ByteSlice;
use gale_config::parser::{BLOCK_DEPTH_MAX, INCLUDE_DEPTH_MAX};
use gale_config::{MemoryFiles, Parsed, Sources, Statement, parse, parse_parameter, parse_text};
use proptest::prelude::*;
use std::path::Path;

const MAIN: &str = "/etc/gale/gale.conf";
const PREFIX: &str = "/etc/gale";

fn parsed(files: MemoryFiles) -> (Parsed, Sources) {
    let (mut files, mut sources) = (files, Sources::new());
    let parsed = parse(&mut sources, &mut files, Path::new(MAIN), Path::new(PREFIX)).unwrap();
    (parsed, sources)
}

/// The tree in one line: `a b;` and `c{d;}`, broken statements as `!`.
fn shown(statements: &[Statement]) -> String {
    statements
        .iter()
        .map(|statement| {
            if statement.broken.is_some() {
                return "!".to_owned();
            }
            let words = std::iter::once(&statement.name).chain(&statement.args).map(|word| word.text.to_string());
            let words = words.collect::<Vec<_>>().join(" ");
            match &statement.block {
                None => format!("{words};"),
                Some(block) => format!("{words}{{{}}}", shown(block)),
            }
        })
        .collect()
}

fn tree(files: MemoryFiles) -> String {
    shown(&parsed(files).0.statements)
}

fn main_file(text: impl Into<Vec<u8>>) -> MemoryFiles {
    MemoryFiles::new().with(MAIN, text)
}

/// The errors without source lines and hints.
fn first_lines(files: MemoryFiles) -> Vec<String> {
    let (parsed, sources) = parsed(files);
    parsed.errors.iter().map(|error| error.line(&sources)).collect()
}

#[test]
fn simple_and_block_directives() {
    let text = "user www;\nevents { }\nhttp {\n  server { listen 80; }\n  server { }\n}\n";
    assert_eq!(tree(main_file(text)), "user www;events{}http{server{listen 80;}server{}}");
}

#[test]
fn line_ends_of_windows_change_nothing() {
    assert_eq!(tree(main_file("a b;\r\nc {\r\n d;\r\n}\r\n")), "a b;c{d;}");
}

#[test]
fn an_empty_file_is_a_configuration() {
    for text in ["", "\n", "# nothing", "  \t\r\n"] {
        assert_eq!(tree(main_file(text)), "");
    }
}

#[test]
fn a_statement_knows_where_it_stands() {
    let (parsed, sources) = parsed(main_file("http {\n    listen 'a b'  80;\n}\n"));
    let http = &parsed.statements[0];
    let listen = &http.body()[0];
    assert_eq!(sources.text(listen.span).unwrap(), "listen 'a b'  80");
    assert_eq!(sources.text(listen.args[0].span).unwrap(), "'a b'");
    assert_eq!(sources.place(listen.span).unwrap(), "/etc/gale/gale.conf:2");
    assert_eq!(sources.place(http.block_end.unwrap()).unwrap(), "/etc/gale/gale.conf:3");
    let position = sources.position(listen.args[1].span).unwrap();
    assert_eq!((position.line, position.column), (2, 19));
}

#[test]
fn includes_stand_in_their_place_at_every_level() {
    let files = main_file("a; include one.conf; http { include sub/two.conf; b; }")
        .with("/etc/gale/one.conf", "c; d { }")
        .with("/etc/gale/sub/two.conf", "e; include three.conf;")
        .with("/etc/gale/three.conf", "f;");
    assert_eq!(tree(files), "a;c;d{}http{e;f;b;}");
}

#[test]
fn includes_of_absolute_names_and_patterns() {
    let files = main_file("include /srv/x.conf; include sites/*.conf; include none/*.conf; z;")
        .with("/srv/x.conf", "x;")
        .with("/etc/gale/sites/b.conf", "b;")
        .with("/etc/gale/sites/a.conf", "a;")
        .with("/etc/gale/sites/.hidden.conf", "hidden;")
        .with("/etc/gale/sites/a.txt", "text;");
    assert_eq!(tree(files), "x;a;b;z;");
}

#[test]
fn a_file_included_twice_is_kept_once() {
    let (parsed, sources) = parsed(main_file("include a.conf; b { include a.conf; }").with("/etc/gale/a.conf", "a;"));
    assert_eq!(shown(&parsed.statements), "a;b{a;}");
    assert_eq!(sources.len(), 2);
}

#[test]
fn an_include_of_another_shape_is_left_to_the_tables() {
    assert_eq!(
        tree(main_file("types { include a b; } include; include a { }")),
        "types{include a b;}include;include a{}"
    );
}

#[test]
fn a_missing_file_is_named_as_nginx_names_it() {
    let error = parse(&mut Sources::new(), &mut MemoryFiles::new(), Path::new(MAIN), Path::new(PREFIX)).unwrap_err();
    assert_eq!(error.message, "open() \"/etc/gale/gale.conf\" failed (2: No such file or directory)");
    assert_eq!(
        first_lines(main_file("a;\ninclude none.conf;\ninclude neither.conf;")),
        [
            "open() \"/etc/gale/none.conf\" failed (2: No such file or directory) in /etc/gale/gale.conf:2",
            "open() \"/etc/gale/neither.conf\" failed (2: No such file or directory) in /etc/gale/gale.conf:3",
        ]
    );
}

#[test]
fn every_syntax_error_has_nginxs_words() {
    let long = "x".repeat(5_000);
    for (text, line) in [
        ("a;\nb", "unexpected end of file, expecting \";\" or \"}\" in /etc/gale/gale.conf:2"),
        ("a;\nb c\n", "unexpected end of file, expecting \";\" or \"}\" in /etc/gale/gale.conf:3"),
        ("a 'b;\nc;\n", "unexpected end of file, expecting \";\" or \"}\" in /etc/gale/gale.conf:3"),
        ("a {\n b;\n", "unexpected end of file, expecting \"}\" in /etc/gale/gale.conf:3"),
        ("a;\n}\n", "unexpected \"}\" in /etc/gale/gale.conf:2"),
        ("a {\n b\n}\n", "unexpected \"}\" in /etc/gale/gale.conf:3"),
        ("a;\n;\n", "unexpected \";\" in /etc/gale/gale.conf:2"),
        ("\n{ }\n", "unexpected \"{\" in /etc/gale/gale.conf:2"),
        ("a 'b'c;\n", "unexpected \"c\" in /etc/gale/gale.conf:1"),
        ("a {\n b \"c\"}\n", "unexpected \"}\" in /etc/gale/gale.conf:2"),
        (&format!("a;\nb {long};\n"), "too long parameter \"xxxxxxxxxx...\" started in /etc/gale/gale.conf:2"),
        (
            &format!("a;\nb '{long}';\n"),
            "too long parameter, probably missing terminating \"'\" character in /etc/gale/gale.conf:2",
        ),
        (
            &format!("a;\nb \"{long}"),
            "too long parameter, probably missing terminating \"\"\" character in /etc/gale/gale.conf:2",
        ),
    ] {
        assert_eq!(first_lines(main_file(text)), [line], "{text:.20}");
    }
}

#[test]
fn statements_before_an_error_are_kept_and_the_error_keeps_its_place() {
    assert_eq!(tree(main_file("a; b { c; d 'e'f; g; }")), "a;b{c;!}");
    assert_eq!(tree(main_file("a; } b;")), "a;!");
    assert_eq!(tree(main_file("a;; b;")), "a;!b;");
}

#[test]
fn errors_in_several_files_are_all_found() {
    let files = main_file("include sites/*.conf; ; a;")
        .with("/etc/gale/sites/1.conf", "one; }")
        .with("/etc/gale/sites/2.conf", "two { ")
        .with("/etc/gale/sites/3.conf", "three;");
    assert_eq!(tree(files.clone()), "one;!two{!}three;!a;");
    assert_eq!(
        first_lines(files),
        [
            "unexpected \"}\" in /etc/gale/sites/1.conf:1",
            "unexpected end of file, expecting \"}\" in /etc/gale/sites/2.conf:1",
            "unexpected \";\" in /etc/gale/gale.conf:1",
        ]
    );
}

#[test]
fn an_open_block_is_shown_with_its_beginning() {
    let (parsed, sources) = parsed(main_file("http {\n  server {\n    listen 80;\n}\n"));
    assert_eq!(
        parsed.errors.render(&sources, "gale"),
        "gale: [emerg] unexpected end of file, expecting \"}\" in /etc/gale/gale.conf:5\n\
         note: the block of \"http\" begins in /etc/gale/gale.conf:1\n"
    );
}

#[test]
fn an_open_quote_is_shown_with_its_beginning() {
    let (parsed, sources) = parsed(main_file("a 'b;\nc;\n"));
    assert_eq!(
        parsed.errors.render(&sources, "gale"),
        "gale: [emerg] unexpected end of file, expecting \";\" or \"}\" in /etc/gale/gale.conf:3\n\
         note: the open quote begins in /etc/gale/gale.conf:1\n"
    );
}

#[test]
fn a_file_that_includes_itself_is_refused() {
    assert_eq!(
        first_lines(main_file("include gale.conf; a;")),
        ["\"/etc/gale/gale.conf\" includes itself in /etc/gale/gale.conf:1"]
    );
    let circle = main_file("include a.conf;").with("/etc/gale/a.conf", "\ninclude gale.conf; a;");
    assert_eq!(first_lines(circle), ["\"/etc/gale/gale.conf\" includes itself in /etc/gale/a.conf:2"]);
}

#[test]
fn includes_have_a_depth() {
    let chain = |length: usize| {
        (0..length)
            .fold(main_file("include 0;"), |files, number| {
                files.with(format!("/etc/gale/{number}"), format!("a; include {};", number + 1))
            })
            .with(format!("/etc/gale/{length}"), "end;")
    };
    assert_eq!(first_lines(chain(INCLUDE_DEPTH_MAX - 1)), [""; 0]);
    let errors = first_lines(chain(INCLUDE_DEPTH_MAX));
    assert_eq!(errors, [format!("files are included deeper than 32 levels in /etc/gale/{}:1", INCLUDE_DEPTH_MAX - 1)]);
}

#[test]
fn files_that_include_each_other_twice_over_come_to_an_end() {
    let files = (0..30).fold(main_file("include 0;"), |files, number| {
        let next = number + 1;
        files.with(format!("/etc/gale/{number}"), format!("include {next}; include {next};"))
    });
    let files = files.with("/etc/gale/30", "end;");
    let errors = first_lines(files);
    assert!(errors[0].starts_with("files are included more than 65536 times in /etc/gale/"), "{}", errors[0]);
}

#[test]
fn blocks_have_a_depth() {
    let nested = |depth: usize| format!("{}{}", "a{".repeat(depth), "}".repeat(depth));
    assert_eq!(first_lines(main_file(nested(BLOCK_DEPTH_MAX))), [""; 0]);
    assert_eq!(
        first_lines(main_file(nested(100_000))),
        ["blocks are nested deeper than 100 levels in /etc/gale/gale.conf:1"]
    );
}

#[test]
fn the_command_line_takes_simple_directives_only() {
    let lines = |text: &str| {
        let mut sources = Sources::new();
        let mut files = MemoryFiles::new().with("/etc/gale/a.conf", "a {}");
        let parsed = parse_parameter(&mut sources, &mut files, text.into(), Path::new(PREFIX));
        let errors = parsed.errors.iter().map(|error| error.line(&sources));
        std::iter::once(shown(&parsed.statements)).chain(errors).collect::<Vec<_>>()
    };
    assert_eq!(lines("daemon off; pid x;"), ["daemon off;pid x;"]);
    assert_eq!(lines("include a.conf;"), ["a{}"]);
    assert_eq!(lines("daemon off"), ["!", "unexpected end of parameter, expecting \";\" in command line"]);
    assert_eq!(lines("http {}"), ["!", "block directives are not supported in -g option in command line"]);
    assert_eq!(lines("}"), ["!", "unexpected \"}\" in command line"]);
    assert_eq!(lines(&format!("a {};", "x".repeat(5_000))).len(), 1);
}

#[test]
fn a_text_in_memory_may_have_blocks() {
    let mut sources = Sources::new();
    let parsed = parse_text(&mut sources, &mut MemoryFiles::new(), "built-in", b"a { b; }".to_vec(), Path::new("/"));
    assert_eq!(shown(&parsed.statements), "a{b;}");
}

#[test]
fn words_keep_their_bytes() {
    let (parsed, _) = parsed(main_file(b"a \xff\xfe\x00 'b';".to_vec()));
    let statement = &parsed.statements[0];
    assert_eq!(statement.args[0].as_bytes(), b"\xff\xfe\x00");
    assert!(!statement.args[0].quoted && statement.args[1].quoted);
}

proptest! {
    #[test]
    fn any_text_parses_and_its_errors_render(text in "(include |gale\\.conf|b\\.conf|[ab \"'\\\\{};#$\n)*]){0,60}") {
        let (parsed, sources) = parsed(main_file(text).with("/etc/gale/b.conf", "c { d; }"));
        prop_assert_eq!(shown(&parsed.statements).contains('!'), parsed.errors.has_errors());
        parsed.errors.render(&sources, "gale");
    }

    #[test]
    fn any_bytes_parse(text in proptest::collection::vec(any::<u8>(), 0..400)) {
        let (parsed, sources) = parsed(main_file(text));
        parsed.errors.render(&sources, "gale");
    }
}
