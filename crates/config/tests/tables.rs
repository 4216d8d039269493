//! Directive tables through their public interface, with a toy module: from a text to finished settings, and every
//! error.

use bstr::BString;
use gale_config::values::{bitmask, flag, size, string, time_ms};
use gale_config::{
    Body, Contexts, Custom, Diagnostic, Diagnostics, Directive, Inert, Many, ManyWith, MemoryFiles, One, OneWith,
    Reporter, Setting, Sources, Statement, Tables, Takes, Updated, parse_text, slot,
};
use std::any::Any;
use std::path::Path;
use std::time::Duration;

/// The toy's builder: counts the values parsed with it and collects diagnostics.
#[derive(Default)]
struct Builder {
    parsed: usize,
    reports: Diagnostics,
}

impl Reporter for Builder {
    fn report(&mut self, diagnostic: Diagnostic) {
        self.reports.report(diagnostic);
    }
}

#[derive(Default)]
struct Conf {
    sendfile: Setting<bool>,
    buffer: Setting<u64>,
    timeout: Setting<Duration>,
    headers: Setting<Vec<BString>>,
    counted: Setting<usize>,
    counts: Setting<Vec<usize>>,
    root: Setting<BString>,
    flags: Setting<u32>,
    blocks: usize,
}

fn count(cx: &mut Builder, _: &Statement) -> Result<usize, Diagnostic> {
    cx.parsed += 1;
    Ok(cx.parsed)
}

fn flags(cx: &mut Builder, statement: &Statement, earlier: Option<&u32>) -> Result<u32, Diagnostic> {
    bitmask(statement, &[("a", 1), ("b", 2), ("c", 4)], earlier, cx)
}

fn enter_block(conf: &mut Conf, _: &mut Builder, statement: &Statement) -> Result<(), Diagnostic> {
    conf.blocks += statement.body().len();
    Ok(())
}

/// A row with a placeholder for its description.
const fn row(
    name: &'static str,
    takes: Takes,
    default: &'static str,
    store: &'static dyn gale_config::Store<Builder>,
) -> Directive<Builder> {
    Directive { name, contexts: Contexts::ANYWHERE, takes, body: Body::None, default, about: "Something.", store }
}

const TOY: &[Directive<Builder>] = &[
    row("sendfile", Takes::Flag, "off", &One { parse: flag, slot: slot!(Conf, sendfile) }),
    row("buffer", Takes::Exactly(1), "8k", &One { parse: size, slot: slot!(Conf, buffer) }),
    row("timeout", Takes::Exactly(1), "60s", &One { parse: time_ms, slot: slot!(Conf, timeout) }),
    row("header", Takes::Exactly(1), "", &Many { parse: string, slot: slot!(Conf, headers) }),
    row("counted", Takes::Exactly(1), "x", &OneWith { parse: count, slot: slot!(Conf, counted) }),
    row("counts", Takes::Exactly(1), "x", &ManyWith { parse: count, slot: slot!(Conf, counts) }),
    row("root", Takes::Exactly(1), "", &One { parse: string, slot: slot!(Conf, root) }),
    row("flags", Takes::AtLeast(1), "c", &Updated { parse: flags, slot: slot!(Conf, flags) }),
    row("hash_size", Takes::Between(1, 2), "", &Inert),
    Directive {
        name: "server",
        contexts: Contexts::HTTP,
        takes: Takes::Exactly(0),
        body: Body::Block,
        default: "",
        about: "A server.",
        store: &Custom(enter_block),
    },
    Directive {
        name: "server",
        contexts: Contexts::UPSTREAM,
        takes: Takes::AtLeast(1),
        body: Body::None,
        default: "",
        about: "A peer.",
        store: &Custom(enter_block),
    },
];

const NGINX: &[&str] = &["sendfile", "server", "proxy_pass", "include"];

fn tables() -> Tables<Builder> {
    Tables::new([(7, TOY)], NGINX)
}

fn statements(text: &str) -> (Vec<Statement>, Sources) {
    let mut sources = Sources::new();
    let parsed = parse_text(&mut sources, &mut MemoryFiles::new(), "t.conf", text.into(), Path::new("/"));
    (parsed.statements, sources)
}

fn apply(conf: &mut Conf, cx: &mut Builder, text: &str) -> Result<(), Diagnostic> {
    for statement in statements(text).0 {
        let found = tables().find(&statement, Contexts::HTTP)?;
        found.directive.store.apply(conf, cx, &statement)?;
    }
    Ok(())
}

fn inherit(child: &mut Conf, parent: &Conf) {
    TOY.iter().for_each(|row| row.store.inherit(child, parent));
}

fn finish(conf: &mut Conf) {
    let cx = &mut Builder::default();
    TOY.iter().for_each(|row| row.store.finish(conf, cx, row.name, row.default));
}

/// The message and the hint of the error of a text's first statement.
fn refusal(text: &str, contexts: Contexts) -> (String, String) {
    let error = tables().find(&statements(text).0[0], contexts).unwrap_err();
    (error.message, error.hint.unwrap_or_default())
}

#[test]
fn written_values_are_stored_with_their_place() {
    let mut conf = Conf::default();
    apply(&mut conf, &mut Builder::default(), "sendfile on; buffer 1m;").unwrap();
    assert_eq!((*conf.sendfile.get(), *conf.buffer.get()), (true, 1 << 20));
    assert_eq!(conf.buffer.span().map(|span| (span.start, span.end)), Some((13, 22)));
}

#[test]
fn flags_of_several_statements_of_a_block_add_up() {
    let (mut parent, mut child, mut unset) = (Conf::default(), Conf::default(), Conf::default());
    let cx = &mut Builder::default();
    apply(&mut parent, cx, "flags a; flags b;").unwrap();
    assert_eq!((*parent.flags.get(), parent.flags.span().map(|span| span.start)), (3, Some(0)));
    apply(&mut child, cx, "flags c;").unwrap();
    inherit(&mut child, &parent);
    finish(&mut unset);
    assert_eq!((*child.flags.get(), *unset.flags.get()), (4, 4));
}

#[test]
fn unset_values_are_inherited_then_take_the_default() {
    let (mut parent, mut child) = (Conf::default(), Conf::default());
    apply(&mut parent, &mut Builder::default(), "sendfile on; buffer 4k; header a; header b;").unwrap();
    apply(&mut child, &mut Builder::default(), "buffer 2k;").unwrap();
    inherit(&mut child, &parent);
    finish(&mut child);
    assert_eq!((*child.sendfile.get(), *child.buffer.get()), (true, 2048));
    assert_eq!(*child.timeout.get(), Duration::from_secs(60));
    assert_eq!(*child.headers.get(), ["a", "b"]);
    assert_eq!(child.root.get_opt(), None);
}

#[test]
fn a_list_is_inherited_only_by_a_block_that_has_none() {
    let (mut parent, mut child) = (Conf::default(), Conf::default());
    apply(&mut parent, &mut Builder::default(), "header a; header b;").unwrap();
    apply(&mut child, &mut Builder::default(), "header c;").unwrap();
    inherit(&mut child, &parent);
    assert_eq!(*child.headers.get(), ["c"]);
    let mut empty = Conf::default();
    finish(&mut empty);
    assert!(empty.headers.get().is_empty());
    assert_eq!(*empty.counts.get(), [2]);
}

#[test]
fn parsers_may_use_the_builder() {
    let (mut conf, mut cx) = (Conf::default(), Builder::default());
    apply(&mut conf, &mut cx, "counted a; counts b; counts c;").unwrap();
    assert_eq!((*conf.counted.get(), conf.counts.get().clone(), cx.parsed), (1, vec![2, 3], 3));
}

#[test]
fn a_custom_store_sees_the_block() {
    let mut conf = Conf::default();
    apply(&mut conf, &mut Builder::default(), "server { a; b; } server { c; }").unwrap();
    assert_eq!(conf.blocks, 3);
}

#[test]
fn a_duplicate_is_refused_with_the_first_place() {
    for text in ["sendfile on;\nsendfile x;", "counted a;\ncounted b;"] {
        let error = apply(&mut Conf::default(), &mut Builder::default(), text).unwrap_err();
        assert!(error.message.ends_with("\" directive is duplicate"), "{}", error.message);
        let first = error.related.unwrap();
        assert_eq!((&first.text[..], first.span.start), ("first set", 0));
    }
}

#[test]
fn an_inert_directive_is_accepted_with_a_warning() {
    let mut cx = Builder::default();
    apply(&mut Conf::default(), &mut cx, "hash_size 64;").unwrap();
    let reports: Vec<_> = cx.reports.iter().map(|report| &report.message[..]).collect();
    assert_eq!(reports, ["\"hash_size\" directive is accepted but has no effect"]);
    assert!(!cx.reports.has_errors());
}

#[test]
fn confs_of_another_type_are_left_alone() {
    let mut other = 5u8;
    for row in TOY {
        row.store.inherit(&mut other, &Conf::default());
        row.store.finish(&mut other, &mut Builder::default(), row.name, row.default);
    }
    assert_eq!(other, 5);
    assert_eq!(TOY[0].store.conf_type(), Conf::default().type_id());
}

#[test]
fn unknown_directives_come_with_the_nearest_name() {
    let unknown = |name: &str| format!("unknown directive \"{name}\"");
    assert_eq!(refusal("sendfle on;", Contexts::HTTP), (unknown("sendfle"), "did you mean \"sendfile\"?".into()));
    assert_eq!(refusal("Server {}", Contexts::HTTP), (unknown("Server"), "did you mean \"server\"?".into()));
    assert_eq!(refusal("qwertz x;", Contexts::HTTP), (unknown("qwertz"), String::new()));
}

#[test]
fn the_removed_directive_of_many_old_files_is_explained() {
    let hint = "nginx has removed it; use the parameter \"ssl\" of \"listen\" instead";
    assert_eq!(refusal("ssl on;", Contexts::HTTP), ("unknown directive \"ssl\"".into(), hint.into()));
}

#[test]
fn directive_that_only_nginx_has_is_refused_with_a_hint() {
    let hint = "nginx supports this directive, Gale does not yet";
    assert_eq!(refusal("proxy_pass x;", Contexts::HTTP), ("unknown directive \"proxy_pass\"".into(), hint.into()));
    assert_eq!(tables().missing().collect::<Vec<_>>(), ["proxy_pass"]);
}

#[test]
fn a_byte_order_mark_is_explained() {
    let (message, hint) = refusal("\u{feff}sendfile on;", Contexts::HTTP);
    assert_eq!(message, "unknown directive \"\u{feff}sendfile\"");
    assert!(hint.contains("byte order mark"));
}

#[test]
fn a_directive_in_the_wrong_place_is_told_where_it_may_stand() {
    assert_eq!(
        refusal("sendfile on;", Contexts::MAIN),
        (
            "\"sendfile\" directive is not allowed here".into(),
            "\"sendfile\" is allowed in: http, server, location".into()
        )
    );
    assert_eq!(refusal("server {}", Contexts::LOCATION).1, "\"server\" is allowed in: http, upstream");
}

#[test]
fn the_place_chooses_between_rows_of_one_name() {
    let about = |text, place| tables().find(&statements(text).0[0], place).map(|found| found.directive.about).ok();
    assert_eq!(about("server {}", Contexts::HTTP), Some("A server."));
    assert_eq!(about("server a;", Contexts::UPSTREAM), Some("A peer."));
    assert_eq!(tables().find(&statements("server {}").0[0], Contexts::HTTP).unwrap().owner, 7);
}

#[test]
fn blocks_and_arguments_are_checked_in_nginxs_order() {
    for (text, message) in [
        ("server;", "directive \"server\" has no opening \"{\""),
        ("server a;", "directive \"server\" has no opening \"{\""),
        ("server a {}", "invalid number of arguments in \"server\" directive"),
        ("sendfile {}", "directive \"sendfile\" is not terminated by \";\""),
        ("sendfile;", "invalid number of arguments in \"sendfile\" directive"),
        ("sendfile on off;", "invalid number of arguments in \"sendfile\" directive"),
        ("include;", "invalid number of arguments in \"include\" directive"),
        ("include a b;", "invalid number of arguments in \"include\" directive"),
        ("include a {}", "directive \"include\" is not terminated by \";\""),
    ] {
        assert_eq!(refusal(text, Contexts::HTTP).0, message, "{text}");
    }
    assert_eq!(refusal("sendfile;", Contexts::HTTP).1, "\"sendfile\" takes \"on\" or \"off\"");
    assert_eq!(refusal("hash_size;", Contexts::HTTP).1, "\"hash_size\" takes 1 to 2 arguments");
}

#[test]
fn a_forgotten_semicolon_is_suspected() {
    let hint = "a \";\" seems to be missing before \"buffer\"";
    assert_eq!(refusal("sendfile on\nbuffer 4k;", Contexts::HTTP).1, hint);
    assert_eq!(refusal("root /a\nserver {}", Contexts::HTTP).1, "a \";\" seems to be missing before \"server\"");
    assert_eq!(refusal("sendfile on buffer 4k;", Contexts::HTTP).1, "\"sendfile\" takes \"on\" or \"off\"");
}

#[test]
fn a_broken_statement_answers_with_its_own_error() {
    assert_eq!(refusal("a 'b'c;", Contexts::HTTP).0, "unexpected \"c\"");
}

#[test]
fn an_error_is_shown_with_line_caret_and_hint() {
    let text = "sendfile\tyes;";
    let (statements, _) = statements(text);
    let mut sources = Sources::new();
    sources.add_file(Path::new("/etc/gale/gale.conf"), text.into());
    let row = tables().find(&statements[0], Contexts::HTTP).unwrap();
    let error = row.directive.store.apply(&mut Conf::default(), &mut Builder::default(), &statements[0]).unwrap_err();
    assert_eq!(
        error.render(&sources, "gale"),
        "gale: [emerg] invalid value \"yes\" in \"sendfile\" directive, it must be \"on\" or \"off\" \
         in /etc/gale/gale.conf:1\n    sendfile\tyes;\n            \t^^^\n"
    );
}

#[test]
fn the_tables_are_sound_and_every_default_parses() {
    assert_eq!(tables().problems(&mut Builder::default()), [""; 0]);
}

#[test]
fn unsound_tables_are_found_out() {
    const UNSOUND: &[Directive<Builder>] = &[
        row("buffer", Takes::Exactly(1), "8x", &One { parse: size, slot: slot!(Conf, buffer) }),
        row("timeout", Takes::Exactly(1), "1m 1s", &One { parse: time_ms, slot: slot!(Conf, timeout) }),
        row("root", Takes::Exactly(1), "'open", &One { parse: string, slot: slot!(Conf, root) }),
        row("twice", Takes::Flag, "", &Inert),
        row("twice", Takes::Flag, "", &Inert),
    ];
    let problems = Tables::new([(0, UNSOUND)], &[]).problems(&mut Builder::default());
    assert_eq!(
        problems,
        [
            "buffer: the default does not parse: \"buffer\" directive invalid value",
            "root: the default does not parse: \"'open\" is not a list of words",
            "timeout: the default has a wrong number of arguments",
            "twice: two rows share a context",
        ]
    );
}

#[test]
#[should_panic(expected = "was given another conf")]
fn applying_to_another_conf_is_a_bug() {
    let (statements, _) = statements("sendfile on;");
    let _ = TOY[0].store.apply(&mut 5u8, &mut Builder::default(), &statements[0]);
}
