//! Request heads: valid input, every offence, and the same result however the input is split.

#[path = "shared/requests.rs"]
mod requests;

use gale_protocol::Offence;
use gale_protocol::http1::{HeadParser, Limits, Status, wants_keep_alive};
use gale_protocol::request::{Framing, KnownHeader, Method, RequestHead, Version};
use gale_protocol::uri::Form;
use proptest::prelude::*;

fn parse_with(input: &[u8], limits: &Limits) -> (Result<Status, Offence>, RequestHead) {
    let mut head = RequestHead::default();
    let result = HeadParser::new().parse(input, limits, &mut head);
    (result, head)
}

/// Parses a head that must be complete and valid.
fn accept(input: &str) -> RequestHead {
    accept_with(input, &Limits::default())
}

fn accept_with(input: &str, limits: &Limits) -> RequestHead {
    let (result, head) = parse_with(input.as_bytes(), limits);
    assert_eq!(result, Ok(Status::Complete { consumed: input.len() }), "{input:?}");
    head
}

fn refuse(input: impl AsRef<[u8]>) -> Offence {
    refuse_with(input, &Limits::default())
}

fn refuse_with(input: impl AsRef<[u8]>, limits: &Limits) -> Offence {
    let input = input.as_ref();
    match parse_with(input, limits).0 {
        Err(offence) => offence,
        Ok(status) => panic!("{status:?} for {:?}", String::from_utf8_lossy(input)),
    }
}

/// A valid request with `Host` and these fields.
fn with_fields(fields: &str) -> String {
    format!("POST / HTTP/1.1\r\nHost: a\r\n{fields}\r\n")
}

#[test]
fn a_whole_head_is_taken_apart() {
    let input = "GET /a/b?x=1 HTTP/1.1\r\nHost: Example.com:81\r\nX-Own:  some \t text \r\n\
                 Accept:*/*\r\nX-Empty:\r\nAccept: text/html\r\n\r\n";
    let head = accept(input);
    let bytes = input.as_bytes();
    assert_eq!(head.line.of(bytes), b"GET /a/b?x=1 HTTP/1.1");
    assert_eq!(head.method, Method::Get);
    assert_eq!(head.method_name(bytes), b"GET");
    assert_eq!(head.target_range.of(bytes), b"/a/b?x=1");
    assert_eq!(head.target.form, Form::Origin);
    assert_eq!(head.target.raw_path(bytes), b"/a/b");
    assert_eq!(head.target.query.unwrap().of(bytes), b"x=1");
    assert!(head.target.plain);
    assert_eq!((head.version, head.version_text(bytes)), (Version::Http11, &b"HTTP/1.1"[..]));
    assert_eq!(head.headers.len(), 5);
    assert_eq!(head.value_by_name(bytes, b"x-OWN"), Some(&b"some \t text"[..]));
    assert_eq!(head.value_by_name(bytes, b"X-Empty"), Some(&b""[..]));
    assert_eq!(head.value_by_name(bytes, b"X-None"), None);
    assert_eq!(head.value_by_name(bytes, b"accept"), Some(&b"*/*"[..]));
    let all: Vec<_> = head.values(bytes, KnownHeader::Accept).collect();
    assert_eq!(all, [&b"*/*"[..], b"text/html"]);
    assert_eq!(head.values(bytes, KnownHeader::Via).count(), 0);
    let authority = head.authority.unwrap();
    assert_eq!((authority.name.of(bytes), authority.port), (&b"Example.com"[..], Some(81)));
    assert_eq!(head.framing, Framing::None);
}

#[test]
fn leniencies_of_nginx() {
    for input in [
        "\r\n\n\r\nGET / HTTP/1.1\r\nHost: a\r\n\r\n",
        "GET / HTTP/1.1\nHost: a\n\n",
        "GET / HTTP/1.1\r\nHost: a\n\r\n",
        "GET   /   HTTP/1.1  \r\nHost: a\r\n\r\n",
        "GET / HTTP/1.0\r\n\r\n",
        "GET / HTTP/1.7\r\nHost: a\r\n\r\n",
        "M-SEARCH / HTTP/1.1\r\nHost: a\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: a\r\nX: \u{e9}\u{7ff}\r\n\r\n",
        "GET /\u{e9} HTTP/1.1\r\nHost: a\r\n\r\n",
        "OPTIONS * HTTP/1.1\r\nHost: a\r\n\r\n",
    ] {
        accept(input);
    }
    let head = accept("MADE_UP / HTTP/1.0\r\n\r\n");
    assert_eq!(head.method, Method::Other);
}

#[test]
fn http_0_9() {
    for input in ["GET /\r\n", "GET /\n", "GET /  \r\n", "GET http://a/ \r\n"] {
        let head = accept(input);
        assert_eq!(head.version, Version::Http09);
        assert!(!wants_keep_alive(&head, input.as_bytes()));
    }
    assert_eq!(refuse("POST /\r\n"), Offence::InvalidHttp09Method);
    assert_eq!(refuse("CONNECT a:1\r\n"), Offence::InvalidHttp09Method);
}

#[test]
fn bytes_after_a_head_are_left() {
    let input = b"GET / HTTP/1.0\r\n\r\nGET /2 HTTP/1.0\r\n\r\n";
    let (mut parser, mut head) = (HeadParser::new(), RequestHead::default());
    let limits = Limits::default();
    assert_eq!(parser.parse(input, &limits, &mut head), Ok(Status::Complete { consumed: 18 }));
    assert!(parser.is_idle());
    assert_eq!(parser.parse(&input[18..], &limits, &mut head), Ok(Status::Complete { consumed: 19 }));
    assert_eq!(head.target.raw_path(&input[18..]), b"/2");
}

#[test]
fn methods() {
    for (name, method) in [
        ("GET", Method::Get),
        ("HEAD", Method::Head),
        ("POST", Method::Post),
        ("PUT", Method::Put),
        ("DELETE", Method::Delete),
        ("OPTIONS", Method::Options),
        ("TRACE", Method::Trace),
        ("PATCH", Method::Patch),
        ("MKCOL", Method::Mkcol),
        ("COPY", Method::Copy),
        ("MOVE", Method::Move),
        ("LOCK", Method::Lock),
        ("UNLOCK", Method::Unlock),
        ("PROPFIND", Method::Propfind),
        ("PROPPATCH", Method::Proppatch),
        ("GETS", Method::Other),
    ] {
        assert_eq!(accept(&format!("{name} / HTTP/1.0\r\n\r\n")).method, method);
    }
    for line in [
        "get / HTTP/1.0",
        "Get / HTTP/1.0",
        "G3T / HTTP/1.0",
        " GET / HTTP/1.0",
        "GET\t/ HTTP/1.0",
        "GET",
        "\"",
        "\rGET /",
    ] {
        assert_eq!(refuse(format!("{line}\r\n\r\n")), Offence::InvalidMethod, "{line}");
    }
}

#[test]
fn hopeless_beginnings_need_no_line_end() {
    let beginnings: &[&[u8]] =
        &[b"\x16", b"\x16\x03\x01\x02", b"\x80\x2e\x01", b"\0", b"get", b"SSH-2.", b"{", b"\xff\xff", b"\r\n\x16"];
    for beginning in beginnings {
        assert_eq!(refuse(beginning), Offence::InvalidMethod, "{beginning:?}");
    }
    assert_eq!(refuse(b"GET /\x01"), Offence::InvalidRequest);
    assert_eq!(refuse(b"GET /\rH"), Offence::InvalidRequest);
    assert!(matches!(refuse(b"GET / HTTP/1.0\r\nX: \0"), Offence::InvalidHeaderLine { byte: Some(0), .. }));
}

#[test]
fn empty_lines_do_not_go_on_for_ever() {
    assert_eq!(refuse("\r\n".repeat(33)), Offence::InvalidRequest);
    assert_eq!(refuse("\n".repeat(65)), Offence::InvalidRequest);
    assert_eq!(parse_with("\r\n".repeat(32).as_bytes(), &Limits::default()).0, Ok(Status::NeedMore));
}

#[test]
fn broken_request_lines() {
    for line in requests::BROKEN_LINES {
        assert_eq!(refuse(format!("{line}\r\nHost: a\r\n\r\n")), Offence::InvalidRequest, "{line}");
    }
    for line in requests::WRONG_VERSIONS {
        assert_eq!(refuse(format!("{line}\r\nHost: a\r\n\r\n")), Offence::InvalidVersion, "{line}");
    }
    for line in requests::WRONG_TARGET_HOSTS {
        assert_eq!(refuse(format!("{line}\r\nHost: a\r\n\r\n")), Offence::InvalidRequestLineHost, "{line}");
    }
}

#[test]
fn absolute_and_authority_targets_name_the_host() {
    let input = "GET http://Up.example:8080?q HTTP/1.1\r\nHost: other\r\n\r\n";
    let head = accept(input);
    let authority = head.authority.unwrap();
    assert_eq!((authority.name.of(input.as_bytes()), authority.port), (&b"Up.example"[..], Some(8080)));
    assert_eq!(head.target.raw_path(input.as_bytes()), b"/");
    assert_eq!(head.target.query.unwrap().of(input.as_bytes()), b"q");
    assert_eq!(refuse("GET http://a/ HTTP/1.1\r\nHost: b c\r\n\r\n"), Offence::InvalidHost);

    let input = "CONNECT [::1]:443 HTTP/1.1\r\nHost: x\r\n\r\n";
    let head = accept(input);
    assert_eq!((head.target.form, head.target.raw_path(input.as_bytes())), (Form::Authority, &b"/"[..]));
    assert_eq!(head.authority.unwrap().name.of(input.as_bytes()), b"[::1]");
}

#[test]
fn hosts() {
    assert_eq!(refuse("GET / HTTP/1.1\r\n\r\n"), Offence::MissingHost);
    assert_eq!(refuse("GET http://a/ HTTP/1.1\r\n\r\n"), Offence::MissingHost);
    for value in requests::WRONG_HOSTS {
        assert_eq!(refuse(format!("GET / HTTP/1.1\r\nHost: {value}\r\n\r\n")), Offence::InvalidHost, "{value}");
    }
    assert!(matches!(refuse("GET / HTTP/1.0\r\nHost: a\r\nhost: a\r\n\r\n"), Offence::DuplicateHost { .. }));
}

#[test]
fn header_lines_that_endanger_framing() {
    for line in requests::DANGEROUS_LINES {
        let offence = refuse(with_fields(&format!("{line}\r\n")));
        assert!(matches!(offence, Offence::InvalidHeaderLine { .. }), "{line:?}: {offence:?}");
        let limits = Limits { underscores_in_headers: true, ignore_invalid_headers: false, ..Limits::default() };
        let offence = refuse_with(with_fields(&format!("{line}\r\n")), &limits);
        assert!(matches!(offence, Offence::InvalidHeaderLine { .. }), "{line:?}: {offence:?}");
    }
    let folded = refuse(with_fields("X: a\r\n b\r\n"));
    assert!(matches!(folded, Offence::InvalidHeaderLine { byte: Some(b' '), .. }));
}

#[test]
fn odd_names_are_ignored_or_kept_as_configured() {
    let input = with_fields("x_foo: 1\r\n_foo: 2\r\nx.foo: 3\r\n</x>: 4\r\nX-Good: 5\r\n");
    let names = |limits: &Limits| {
        let head = accept_with(&input, limits);
        let names =
            head.headers.iter().map(|field| String::from_utf8_lossy(field.name.of(input.as_bytes())).into_owned());
        (names.skip(1).collect::<Vec<_>>(), head.ignored_count)
    };
    let mut limits = Limits::default();
    assert_eq!(names(&limits), (vec!["X-Good".into()], 4));
    limits.underscores_in_headers = true;
    assert_eq!(names(&limits), (vec!["x_foo".into(), "_foo".into(), "X-Good".into()], 2));
    limits.ignore_invalid_headers = false;
    assert!(matches!(refuse_with(&input, &limits), Offence::InvalidHeaderLine { byte: Some(b'<'), .. }));
    let head = accept_with(&with_fields("x.foo: 3\r\nx_foo: 1\r\n"), &limits);
    assert_eq!((head.headers.len(), head.ignored_count), (3, 0));

    let head = accept(&input);
    assert_eq!(head.ignored_first.unwrap().of(input.as_bytes()), b"x_foo: 1");
}

#[test]
fn fields_that_may_occur_once() {
    for &header in KnownHeader::ALL {
        let name = header.name();
        let value = if header == KnownHeader::ContentLength { "1" } else { "chunked" };
        let input = format!("GET / HTTP/1.1\r\nHost: a\r\n{name}: {value}\r\n{name}: {value}\r\n\r\n");
        let once =
            ["Authorization", "Content-Length", "Content-Range", "Expect", "Proxy-Authorization", "Transfer-Encoding"];
        if once.contains(&name) || name.starts_with("If-") {
            assert!(matches!(refuse(&input), Offence::DuplicateHeader { .. }), "{name}");
        } else if header != KnownHeader::Host {
            assert_eq!(accept(&input).headers.len(), 3, "{name}");
        }
    }
}

#[test]
fn content_length() {
    for (value, length) in [("0", 0), ("5", 5), ("007", 7), ("9223372036854775807", i64::MAX as u64)] {
        assert_eq!(accept(&with_fields(&format!("Content-Length: {value}\r\n"))).framing, Framing::Length(length));
    }
    for value in requests::WRONG_LENGTHS {
        assert_eq!(
            refuse(with_fields(&format!("Content-Length: {value}\r\n"))),
            Offence::InvalidContentLength,
            "{value}"
        );
    }
    let offence = refuse(with_fields("Content-Length: 5\r\nContent-Length: 6\r\n"));
    assert!(matches!(offence, Offence::DuplicateHeader { .. }));
}

#[test]
fn transfer_encoding() {
    for value in ["chunked", "Chunked", "CHUNKED", " \tchunked\t "] {
        assert_eq!(accept(&with_fields(&format!("transfer-encoding:{value}\r\n"))).framing, Framing::Chunked);
    }
    for value in requests::UNKNOWN_CODINGS {
        let offence = refuse(with_fields(&format!("Transfer-Encoding: {value}\r\n")));
        assert!(matches!(offence, Offence::UnknownTransferEncoding { .. }), "{value}: {offence:?}");
        assert_eq!(offence.status(), 501);
    }
    for value in requests::WRONG_CODINGS {
        let offence = refuse(with_fields(&format!("Transfer-Encoding: {value}\r\n")));
        let expected = if value.contains('\u{b}') {
            matches!(offence, Offence::InvalidHeaderLine { .. })
        } else {
            offence == Offence::InvalidTransferEncoding
        };
        assert!(expected && offence.status() == 400, "{value}: {offence:?}");
    }
    let both =
        ["Content-Length: 5\r\nTransfer-Encoding: chunked\r\n", "Transfer-Encoding: chunked\r\nContent-Length: x\r\n"];
    for fields in both {
        assert_eq!(refuse(with_fields(fields)), Offence::LengthAndTransferEncoding);
    }
    let old = "POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n";
    assert_eq!(refuse(old), Offence::TransferEncodingInHttp10);
}

#[test]
fn connect_has_no_body() {
    let with = |fields| format!("CONNECT a:1 HTTP/1.1\r\nHost: a\r\n{fields}\r\n");
    assert_eq!(refuse(with("Content-Length: 5\r\n")), Offence::ConnectWithBody);
    assert_eq!(refuse(with("Transfer-Encoding: chunked\r\n")), Offence::ConnectWithBody);
    assert_eq!(accept(&with("Content-Length: 0\r\n")).framing, Framing::Length(0));
}

#[test]
fn keep_alive() {
    for (version, field, wanted) in [
        ("1.1", "", true),
        ("1.1", "Connection: close\r\n", false),
        ("1.1", "Connection: foo\r\nConnection: bar, Close\r\n", false),
        ("1.1", "Connection: keep-alive, close\r\n", false),
        ("1.0", "", false),
        ("1.0", "Connection: Keep-Alive\r\n", true),
        ("1.0", "Connection: Upgrade, keep-alive\r\n", true),
    ] {
        let input = format!("GET / HTTP/{version}\r\nHost: a\r\n{field}\r\n");
        assert_eq!(wants_keep_alive(&accept(&input), input.as_bytes()), wanted, "{input:?}");
    }
}

#[test]
fn limits_are_exact() {
    let limits = Limits { line_max: 24, head_max: 60, headers_max: 3, ..Limits::default() };
    accept_with("GET /23456789 HTTP/1.0\r\n\r\n", &limits);
    assert_eq!(refuse_with("GET /234567890 HTTP/1.0\r\n\r\n", &limits), Offence::UriTooLong);
    assert_eq!(refuse_with("GET /2345678901234567890", &limits), Offence::UriTooLong);
    assert_eq!(refuse_with("A".repeat(24), &limits), Offence::UriTooLong);
    let head = "GET / HTTP/1.0\r\n"; // 16
    accept_with(&format!("{head}X: {}\r\n\r\n", "x".repeat(19)), &limits);
    let offence = refuse_with(format!("{head}X: {}\r\n\r\n", "x".repeat(20)), &limits);
    assert!(matches!(offence, Offence::HeaderLineTooLong { .. }));
    accept_with(&format!("{head}X: {}\r\nY: {}\r\n\r\n", "x".repeat(19), "y".repeat(13)), &limits);
    let offence = refuse_with(format!("{head}X: {}\r\nY: {}\r\n\r\n", "x".repeat(19), "y".repeat(14)), &limits);
    assert_eq!(offence, Offence::HeadTooLarge);
    accept_with(&format!("{head}{}\r\n", "X: y\r\n".repeat(3)), &limits);
    assert_eq!(refuse_with(format!("{head}{}\r\n", "X: y\r\n".repeat(4)), &limits), Offence::TooManyHeaders);
    for offence in [Offence::HeadTooLarge, Offence::TooManyHeaders] {
        assert_eq!(offence.status(), 494);
    }
    assert_eq!(Offence::UriTooLong.status(), 414);
}

#[test]
fn absurd_limits_are_no_trap() {
    for (line_max, head_max) in [(0, 0), (0, 100), (100, 0), (1, 1), (usize::MAX, usize::MAX)] {
        let limits = Limits { line_max, head_max, headers_max: 0, ..Limits::default() };
        let _ = parse_with(b"\r\n\r\nGET / HTTP/1.0\r\nA: b\r\n\r\n", &limits);
    }
}

#[test]
fn messages_are_those_of_nginx() {
    let message = |input: &str| refuse(input).describe(input.as_bytes()).to_string();
    let cases = [
        ("get /", "client sent invalid method"),
        ("GET / HTTP/2.0\r\n\r\n", "client sent invalid version"),
        ("GET / HTTP/1.12\r\n\r\n", "client sent invalid request"),
        ("POST /\r\n", "client sent invalid method in HTTP/0.9 request"),
        ("GET / HTTP/1.1\r\n\r\n", "client sent HTTP/1.1 request without \"Host\" header"),
        ("GET / HTTP/1.0\r\nfoo\x02: x\r\n\r\n", "client sent invalid header line: \"foo\\x02...\""),
        (
            "GET / HTTP/1.0\r\nHost: a\r\nhost:  b\r\n\r\n",
            "client sent duplicate host header: \"host:  b\", previous value: \"Host: a\"",
        ),
        (
            "GET / HTTP/1.0\r\nExpect: a\r\nExpect: b\r\n\r\n",
            "client sent duplicate header line: \"Expect: b\", previous value: \"Expect: a\"",
        ),
        (
            "GET / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: foo\r\n\r\n",
            "client sent unknown \"Transfer-Encoding\": \"foo\"",
        ),
    ];
    for (input, expected) in cases {
        assert_eq!(message(input), expected);
    }
}

/// Parses `input` in pieces that end at `cuts`.
fn parse_in_pieces(input: &[u8], cuts: &[usize], limits: &Limits) -> (Result<Status, Offence>, RequestHead) {
    let (mut parser, mut head) = (HeadParser::new(), RequestHead::default());
    for &cut in cuts {
        match parser.parse(&input[..cut.min(input.len())], limits, &mut head) {
            Ok(Status::NeedMore) => {}
            result => return (result, head),
        }
    }
    (parser.parse(input, limits, &mut head), head)
}

fn same_in_pieces(input: &[u8], cuts: &[usize], limits: &Limits) {
    let whole = parse_with(input, limits);
    let pieces = parse_in_pieces(input, cuts, limits);
    assert_eq!(whole.0, pieces.0, "{:?}", String::from_utf8_lossy(input));
    if whole.0.is_ok() {
        assert_eq!(format!("{:?}", whole.1), format!("{:?}", pieces.1));
    }
}

/// Heads that are valid, invalid, and nearly valid.
fn heads() -> impl Strategy<Value = Vec<u8>> {
    let token = prop::sample::select(vec![
        "GET ",
        "POST ",
        "get",
        "CONNECT ",
        "/",
        "/a",
        "//",
        "%2",
        "?",
        "#",
        " ",
        "  ",
        "\t",
        "http://",
        "a:1",
        "HTTP/1.1",
        "HTTP/1.0",
        "HTTP/2.0",
        "HTTP/1.12",
        "\r\n",
        "\r\n",
        "\r\n",
        "\n",
        "\r",
        "Host: a",
        "Host: ",
        "Host",
        ":",
        "X: y",
        "x_y: z",
        "Content-Length: 5",
        "Content-Length : 5",
        "Transfer-Encoding: chunked",
        "\0",
        "\u{7f}",
        "\u{e9}",
        "Connection: close",
        "012345678901234567890123456789",
    ]);
    let tokens = prop::collection::vec(token, 0..20).prop_map(|tokens| tokens.concat().into_bytes());
    let begun = tokens.prop_map(|tokens| [b"GET / HTTP/1.1\r\nHost: a\r\n", &tokens[..], b"\r\n\r\n"].concat());
    let free = prop::collection::vec(any::<u8>(), 0..200);
    prop_oneof![4 => begun.clone(), 4 => begun.prop_map(|text| text[25..].to_vec()), 1 => free]
}

proptest! {
    #[test]
    fn pieces_make_no_difference(
        input in heads(),
        cuts in prop::collection::vec(0usize..200, 0..6),
        line_max in 5usize..80,
        head_max in 5usize..200,
    ) {
        let mut cuts = cuts;
        cuts.sort();
        let every: Vec<usize> = (0..=input.len()).collect();
        for limits in [Limits::default(), Limits { line_max, head_max, headers_max: 2, ..Limits::default() }] {
            same_in_pieces(&input, &cuts, &limits);
            same_in_pieces(&input, &every, &limits);
        }
    }
}

#[test]
fn a_right_head_survives_every_split() {
    let input =
        b"\r\nPOST /a/../b?c HTTP/1.1\r\nHost: A:80\r\nX_y: z\r\nContent-Length: 12\r\nCookie: a=b; c=d\r\n\r\nrest";
    for cut in 0..input.len() {
        same_in_pieces(input, &[cut], &Limits::default());
    }
}

#[test]
fn a_slow_client_costs_linear_time() {
    // A quadratic parser would read half of 2^38 bytes here and not finish.
    let limits = Limits { line_max: 1 << 19, head_max: 1 << 20, ..Limits::default() };
    let mut input = b"GET / HTTP/1.0\r\nCookie: ".to_vec();
    input.resize(1 << 18, b'x');
    input.extend_from_slice(b"\r\n\r\n");
    let every: Vec<usize> = (0..input.len()).collect();
    let (result, _) = parse_in_pieces(&input, &every, &limits);
    assert_eq!(result, Ok(Status::Complete { consumed: input.len() }));
}

#[test]
fn parsers_are_small() {
    assert!(size_of::<HeadParser>() <= 96);
    assert!(size_of::<RequestHead>() <= 320);
}
