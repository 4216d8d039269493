//! Request targets and paths.

use gale_protocol::Offence;
use gale_protocol::uri::escape::{Class, Unescape, count_escapes, escape, escape_html, unescape};
use gale_protocol::uri::{Form, normalize, split, split_unsafe};
use proptest::prelude::*;

fn normalized(path: &[u8], merge_slashes: bool) -> Result<Vec<u8>, Offence> {
    let mut out = b"kept".to_vec();
    normalize(path, merge_slashes, &mut out)?;
    assert_eq!(&out[..4], b"kept");
    Ok(out.split_off(4))
}

#[test]
fn paths_are_normalised_as_nginx_does() {
    let cases: &[(&str, &str)] = &[
        ("/", "/"),
        ("/a/b", "/a/b"),
        ("/a/b/", "/a/b/"),
        ("/foo/bar/.", "/foo/bar/"),
        ("/foo/bar/./", "/foo/bar/"),
        ("/foo/bar/..", "/foo/"),
        ("/foo/bar/../", "/foo/"),
        ("/foo/bar/../..", "/"),
        ("/foo/../bar", "/bar"),
        ("/./././a", "/a"),
        ("/a//b", "/a/b"),
        ("///", "/"),
        ("/a//", "/a/"),
        ("/foo//../bar", "/bar"),
        ("/.a", "/.a"),
        ("/..a", "/..a"),
        ("/...", "/..."),
        ("/a.", "/a."),
        ("/a..", "/a.."),
        ("/a../b", "/a../b"),
        ("/%61%62", "/ab"),
        ("/%2e/a", "/a"),
        ("/a/%2E%2e/b", "/b"),
        ("/a/.%2e", "/"),
        ("/a%2f..%2fb", "/b"),
        ("/a%2F/b", "/a/b"),
        ("/%2f%2f", "/"),
        ("/a%3Fb", "/a?b"),
        ("/a%23b", "/a#b"),
        ("/a%25b", "/a%b"),
        ("/%2541", "/%41"),
        ("/..%3f", "/..?"),
        ("/.%23/b", "/.#/b"),
        ("/a%20b", "/a b"),
        ("/%02", "/\u{2}"),
        ("/a+b%2b", "/a+b+"),
        ("/a?b", "/a"),
        ("/a#b", "/a"),
        ("/a/..#b", "/"),
        ("/a/.?b", "/a/"),
    ];
    for (path, expected) in cases {
        let result = normalized(path.as_bytes(), true);
        assert_eq!(result.as_deref(), Ok(expected.as_bytes()), "{path}");
    }
}

#[test]
fn slashes_are_kept_where_configured() {
    let cases: &[(&str, &str)] = &[
        ("/a//b", "/a//b"),
        ("//", "//"),
        ("///a", "///a"),
        ("/foo//../bar", "/foo/bar"),
        ("/foo///../bar", "/foo//bar"),
        ("/a//./b", "/a//b"),
        ("/a%2f%2fb", "/a//b"),
        ("//..", "/"),
        ("/./", "/"),
    ];
    for (path, expected) in cases {
        let result = normalized(path.as_bytes(), false);
        assert_eq!(result.as_deref(), Ok(expected.as_bytes()), "{path}");
    }
}

#[test]
fn paths_that_are_refused() {
    for path in [
        "",
        "a",
        "?",
        "*",
        "/..",
        "/../",
        "/a/../..",
        "/%2e%2e",
        "/a/../../b",
        "//..",
        "/./..",
        "/%",
        "/%1",
        "/%1g",
        "/%g1",
        "/%%20",
        "/%00",
        "/a%00b",
        "/a/%",
        "/foo/bar%",
    ] {
        assert_eq!(normalized(path.as_bytes(), true), Err(Offence::InvalidRequest), "{path}");
    }
}

#[test]
fn targets_are_split() {
    type Parts<'p> = (Form, Option<&'p str>, Option<&'p str>, &'p str, Option<&'p str>, bool);
    let cases: &[(&str, Parts)] = &[
        ("/", (Form::Origin, None, None, "/", None, true)),
        ("/a.b/c?d?e", (Form::Origin, None, None, "/a.b/c", Some("d?e"), true)),
        ("/a?", (Form::Origin, None, None, "/a", Some(""), true)),
        ("/a?q/../%", (Form::Origin, None, None, "/a", Some("q/../%"), true)),
        ("/a/./b", (Form::Origin, None, None, "/a/./b", None, false)),
        ("/.well-known", (Form::Origin, None, None, "/.well-known", None, false)),
        ("//", (Form::Origin, None, None, "//", None, false)),
        ("/a%20b", (Form::Origin, None, None, "/a%20b", None, false)),
        ("/a%20b?c", (Form::Origin, None, None, "/a%20b", Some("c"), false)),
        ("/+a+", (Form::Origin, None, None, "/+a+", None, true)),
        ("http://h", (Form::Absolute, Some("http"), Some("h"), "/", None, true)),
        ("http://h:8080/a?b", (Form::Absolute, Some("http"), Some("h:8080"), "/a", Some("b"), true)),
        ("HTTPS://h?b", (Form::Absolute, Some("HTTPS"), Some("h"), "/", Some("b"), true)),
        ("ftp+x://[::1]:/a//b", (Form::Absolute, Some("ftp+x"), Some("[::1]:"), "/a//b", None, false)),
        ("*", (Form::Asterisk, None, None, "*", None, false)),
    ];
    for &(text, expected) in cases {
        let bytes = text.as_bytes();
        let target = split(bytes).unwrap_or_else(|_| panic!("{text}"));
        let part = |range: gale_protocol::Range32| std::str::from_utf8(range.of(bytes)).unwrap();
        let raw_path = std::str::from_utf8(target.raw_path(bytes)).unwrap();
        let found = (
            target.form,
            target.scheme.map(part),
            target.host.map(part),
            raw_path,
            target.query.map(part),
            target.plain,
        );
        assert_eq!(found, expected, "{text}");
    }
    for text in [
        "",
        "a",
        "?",
        "http:",
        "http:/",
        "http:/a",
        "ht_tp://a",
        "1ttp://a",
        "http://a b",
        "/a b",
        "/\u{7f}",
        "/a?\u{1}",
        "/a#",
        "/a#f?x",
        "/a?q#f",
        "http://h/a#",
        "http://h?b#c",
        "**",
    ] {
        assert_eq!(split(text.as_bytes()), Err(Offence::InvalidRequest), "{text:?}");
    }
}

#[test]
fn every_class_escapes_its_bytes() {
    let all: Vec<u8> = (0x20..0x80).collect();
    let escaped = |class: Class| -> String {
        let bytes = all.iter().filter(|&&byte| count_escapes(class, &[byte]) == 1);
        bytes.map(|&byte| byte as char).collect()
    };
    assert_eq!(escaped(Class::Uri), " \"#%<>?\\^`{|}\u{7f}");
    assert_eq!(escaped(Class::Args), " \"#%&+;<>?\\^`{|}\u{7f}");
    assert_eq!(escaped(Class::Component), " !\"#$%&'()*+,/:;<=>?@[\\]^`{|}\u{7f}");
    assert_eq!(escaped(Class::Html), " \"#%'<>\\^`{|}\u{7f}");
    assert_eq!(escaped(Class::Refresh), " \"'<>\\^`{|~\u{7f}");
    assert_eq!(escaped(Class::Memcached), " %");
    assert_eq!((count_escapes(Class::Memcached, b"\xff\x1f"), count_escapes(Class::Uri, b"\xff\x1f")), (1, 2));
    let mut out = Vec::new();
    escape(Class::Uri, b"/a b\xff", &mut out);
    assert_eq!(out, b"/a%20b%FF");
}

#[test]
fn unescaping() {
    let cases: &[(Unescape, &str, &str, usize)] = &[
        (Unescape::All, "a%20b%3fc?d", "a b?c?d", 11),
        (Unescape::All, "%", "", 1),
        (Unescape::All, "%4", "", 2),
        (Unescape::All, "%4x1", "1", 4),
        (Unescape::All, "%x41", "x41", 4),
        (Unescape::All, "%%41", "%41", 4),
        (Unescape::Uri, "a%41?b%42", "aA?", 5),
        (Unescape::Uri, "a%3Fb", "a?", 4),
        (Unescape::Redirect, "a%20%41%25%7f?b", "a%20A%25%7f?", 14),
        (Unescape::Redirect, "%3fb", "?", 3),
    ];
    for &(kind, text, expected, used) in cases {
        let mut out = Vec::new();
        assert_eq!(unescape(kind, text.as_bytes(), &mut out), used, "{text}");
        assert_eq!(String::from_utf8(out).unwrap(), expected, "{text}");
    }
}

#[test]
fn html() {
    let mut out = Vec::new();
    escape_html(b"<a href=\"x\">&'", &mut out);
    assert_eq!(out, b"&lt;a href=&quot;x&quot;&gt;&amp;'");
}

fn paths() -> impl Strategy<Value = Vec<u8>> {
    let part = prop::sample::select(vec![
        "/", "/", "/", ".", "..", "a", "bc", "%2e", "%2F", "%3f", "%23", "%25", "%", "%0", "?", "#", "+", "\u{e9}", " ",
    ]);
    let parts = prop::collection::vec(part, 0..16).prop_map(|parts| format!("/{}", parts.concat()).into_bytes());
    prop_oneof![4 => parts, 1 => prop::collection::vec(any::<u8>(), 0..40)]
}

proptest! {
    #[test]
    fn normal_paths_stay_as_they_are(path in paths(), merge in any::<bool>()) {
        if let Ok(once) = normalized(&path, merge) {
            prop_assert_eq!(once[0], b'/');
            prop_assert!(!once.contains(&0));
            prop_assert!(once.split(|&byte| byte == b'/').all(|segment| segment != b"." && segment != b".."));
            prop_assert!(!merge || !once.windows(2).any(|pair| pair == b"//"));
            let mut escaped = Vec::new();
            escape(Class::Uri, &once, &mut escaped);
            prop_assert_eq!(normalized(&escaped, merge), Ok(once));
        }
    }

    #[test]
    fn plain_paths_need_no_normalising(path in paths(), merge in any::<bool>()) {
        if let Ok(target) = split(&path) && target.plain {
            let normal = normalized(target.raw_path(&path), merge);
            prop_assert_eq!(normal.as_deref(), Ok(target.raw_path(&path)));
        }
    }

    #[test]
    fn unescaping_undoes_escaping(text in prop::collection::vec(any::<u8>(), 0..60)) {
        for class in [Class::Uri, Class::Args, Class::Component, Class::Html, Class::Memcached] {
            let (mut escaped, mut back) = (Vec::new(), Vec::new());
            escape(class, &text, &mut escaped);
            prop_assert_eq!(escaped.len(), text.len() + 2 * count_escapes(class, &text));
            prop_assert_eq!(unescape(Unescape::All, &escaped, &mut back), escaped.len());
            prop_assert_eq!(&back, &text);
        }
    }

    #[test]
    fn nothing_panics(text in prop::collection::vec(any::<u8>(), 0..60)) {
        let _ = split(&text);
        let _ = gale_protocol::host::validate(&text);
        for kind in [Unescape::All, Unescape::Uri, Unescape::Redirect] {
            let mut out = Vec::new();
            prop_assert!(unescape(kind, &text, &mut out) <= text.len());
        }
    }
}

#[test]
fn a_reference_in_a_document_does_not_lead_upwards() {
    let split = |text: &'static str| split_unsafe(text.as_bytes()).map(|(path, args)| (path, args.to_vec()));
    assert_eq!(split("/a%20b?c%20d"), Some((b"/a b".to_vec(), b"c%20d".to_vec())));
    assert_eq!(split("/a%3fb"), Some((b"/a?b".to_vec(), Vec::new())));
    assert_eq!(split("a..b/..c/d.."), Some((b"a..b/..c/d..".to_vec(), Vec::new())));
    assert_eq!(split("/a?../b"), Some((b"/a".to_vec(), b"../b".to_vec())));
    for refused in ["", "?a", "..", "../a", "/a/..", "/a/../b", "/%2e%2e/a", "/a/%2e.", "/a%00b", "/a\0b"] {
        assert_eq!(split(refused), None, "{refused:?}");
    }
}
