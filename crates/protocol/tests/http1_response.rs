//! Response heads: valid input, every fault, the framing of the body, and the same result however the input is split.

use gale_protocol::ResponseFault;
use gale_protocol::http1::{
    ChunkLimits, ChunkedDecoder, KeepAlive, ResponseFraming, ResponseHeadParser, ResponseParts, Status,
};
use gale_protocol::request::{Method, Version};
use gale_protocol::response::ResponseField;
use proptest::prelude::*;

const HEAD_MAX: usize = 4096;

fn parse_with(mut parser: ResponseHeadParser, input: &[u8]) -> (Result<Status, ResponseFault>, ResponseParts) {
    let mut parts = ResponseParts::default();
    let result = parser.parse(input, &mut parts);
    (result, parts)
}

/// Parses a head that must be complete and valid, at once and byte by byte.
fn accept_with(parser: ResponseHeadParser, input: &str) -> ResponseParts {
    let (result, parts) = parse_with(parser.clone(), input.as_bytes());
    assert_eq!(result, Ok(Status::Complete { consumed: input.len() }), "{input:?}");
    let (mut parser, mut other) = (parser, ResponseParts::default());
    for end in 0..input.len() {
        assert_eq!(parser.parse(&input.as_bytes()[..end], &mut other), Ok(Status::NeedMore), "{input:?} {end}");
    }
    assert_eq!(parser.parse(input.as_bytes(), &mut other), result);
    assert_eq!(format!("{parts:?}"), format!("{other:?}"));
    parts
}

fn accept(input: &str) -> ResponseParts {
    accept_with(ResponseHeadParser::new(HEAD_MAX), input)
}

fn cgi(input: &str) -> ResponseParts {
    accept_with(ResponseHeadParser::cgi(HEAD_MAX), input)
}

/// The message about a head that must be refused.
fn refuse_with(parser: ResponseHeadParser, input: &str) -> String {
    match parse_with(parser, input.as_bytes()).0 {
        Ok(status) => panic!("{status:?} for {input:?}"),
        Err(fault) => {
            let mut message = Vec::new();
            fault.write_to(input.as_bytes(), &mut message);
            let message = String::from_utf8(message).unwrap();
            assert!(message.starts_with(&fault.to_string()));
            message
        }
    }
}

fn refuse(input: &str) -> String {
    refuse_with(ResponseHeadParser::new(HEAD_MAX), input)
}

fn refuse_fields(fields: &str) -> String {
    refuse(&format!("HTTP/1.1 200 OK\r\n{fields}\r\n"))
}

fn fields(fields: &str) -> ResponseParts {
    accept(&format!("HTTP/1.1 200 OK\r\n{fields}\r\n"))
}

#[test]
fn a_whole_head_is_taken_apart() {
    let input = "HTTP/1.1 404 Not Found at all\r\nServer: a  b\r\nX-Own:\t text \t\r\nSet-Cookie: a=1\r\n\
                 Content-Length: 5\r\nset-cookie: b=2\r\nEmpty:\r\n\r\n";
    let parts = accept(input);
    let bytes = input.as_bytes();
    assert_eq!((parts.version, parts.status), (Version::Http11, 404));
    assert_eq!(parts.reason.of(bytes), b"Not Found at all");
    let read: Vec<_> = parts.fields.iter().map(|field| (field.name.of(bytes), field.value.of(bytes))).collect();
    let expected: [(&[u8], &[u8]); 6] = [
        (b"Server", b"a  b"),
        (b"X-Own", b"text"),
        (b"Set-Cookie", b"a=1"),
        (b"Content-Length", b"5"),
        (b"set-cookie", b"b=2"),
        (b"Empty", b""),
    ];
    assert_eq!(read, expected);
    assert_eq!(parts.value(bytes, ResponseField::Server), Some(&b"a  b"[..]));
    assert_eq!(parts.values(bytes, ResponseField::SetCookie).collect::<Vec<_>>(), [b"a=1", b"b=2"]);
    assert_eq!((parts.has(ResponseField::Date), parts.value(bytes, ResponseField::Date)), (false, None));
    assert_eq!((parts.content_length, parts.is_chunked, parts.ignored_count), (Some(5), false, 0));
}

#[test]
fn status_lines_as_lenient_as_nginx() {
    for (line, version, status, reason) in [
        ("HTTP/1.1 200 OK", Version::Http11, 200, "OK"),
        ("HTTP/1.0 200 OK", Version::Http10, 200, "OK"),
        ("HTTP/1.1 200", Version::Http11, 200, ""),
        ("HTTP/1.1 200 ", Version::Http11, 200, ""),
        ("HTTP/1.1   999  Odd\t", Version::Http11, 999, "Odd"),
        ("HTTP/1.1 403.1 Forbidden", Version::Http11, 403, "Forbidden"),
        ("HTTP/1.1 403.1", Version::Http11, 403, ""),
        ("HTTP/1.00 201 \u{e9}", Version::Http10, 201, "\u{e9}"),
        ("HTTP/2.0 200 OK", Version::Http11, 200, "OK"),
    ] {
        for end in ["\r\n\r\n", "\n\n", "\r\n\n"] {
            let input = format!("{line}{end}");
            let parts = accept(&input);
            let read = (parts.version, parts.status, parts.reason.of(input.as_bytes()));
            assert_eq!(read, (version, status, reason.as_bytes()), "{input:?}");
        }
    }
}

#[test]
fn malformed_status_line_is_refused_at_once() {
    for input in [
        "\r\nHTTP/1.1 200 OK",
        "SSH-2.0-OpenSSH",
        "\x15\x03\x01",
        "http/1.1 200 OK",
        "HTTP1",
        "HTTP/1.1\r\n",
        "HTTP/1.1 \r\n",
        "HTTP/1 200 OK\r\n",
        "HTTP/0.9 200 OK\r\n",
        "HTTP/1.x 200 OK\r\n",
        "HTTP/1.1111 200 OK\r\n",
        "HTTP/.1 200 OK\r\n",
        "HTTP/1.1\t200 OK\r\n",
        "HTTP/1.1 20 OK\r\n",
        "HTTP/1.1 2000 OK\r\n",
        "HTTP/1.1 099 OK\r\n",
        "HTTP/1.1 200OK\r\n",
        "HTTP/1.1 200\tOK\r\n",
        "HTTP/1.1 -20 OK\r\n",
        "HTTP/1.1 200 O\0K\r\n",
        "HTTP/1.1 200 OK\rX: y\r\n",
    ] {
        assert_eq!(refuse(input), "upstream sent no valid HTTP/1.0 header", "{input:?}");
    }
}

#[test]
fn wrong_field_lines_are_refused_with_nginx_words() {
    for (line, message) in [
        ("X : y\r\n", r#""X\x20...""#),
        ("X\t: y\r\n", r#""X\x09...""#),
        (" folded\r\n", r#""\x20...""#),
        ("\tfolded\r\n", r#""\x09...""#),
        (": y\r\n", r#""\x3a...""#),
        ("two words\r\n", r#""two\x20...""#),
        ("X: a\0b\r\n", r#""X: a\x00...""#),
        ("X: a\x1bb\r\n", r#""X: a\x1b...""#),
        ("X: a\x7fb\r\n", r#""X: a\x7f...""#),
        ("X: a\rb\r\n", r#""X: a\x0d...""#),
        ("X: a\r\r\n", r#""X: a\x0d...""#),
        ("Content_Length: 5\r\n", r#""Content_Length: 5""#),
        ("Transfer\u{e9}-Encoding: chunked\r\n", "\"Transfer\u{e9}-Encoding: chunked\""),
        ("Content-Length\r\n", r#""Content-Length""#),
    ] {
        assert_eq!(refuse_fields(line), format!("upstream sent invalid header: {message}"), "{line:?}");
    }
    assert!(refuse_fields("X: y\r\n z\r\n").starts_with("upstream sent invalid header"));
}

#[test]
fn framing_fields_that_contradict_are_refused_with_nginx_words() {
    let both = "upstream sent \"Content-Length\" and \"Transfer-Encoding\" headers at the same time";
    for (lines, message) in [
        (
            "Content-Length: 0\r\ncontent-length:0\r\n",
            "upstream sent duplicate header line: \"content-length: 0\", previous value: \"Content-Length: 0\"",
        ),
        (
            "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n",
            "upstream sent duplicate header line: \"Transfer-Encoding: chunked\", \
             previous value: \"Transfer-Encoding: chunked\"",
        ),
        ("Content-Length: 0\r\nTransfer-Encoding: chunked\r\n", both),
        ("Transfer-Encoding: chunked\r\nContent-Length: 0\r\n", both),
        ("Transfer-Encoding: foo\r\n", "upstream sent unknown \"Transfer-Encoding\": \"foo\""),
        ("Transfer-Encoding: gzip, chunked\r\n", "upstream sent unknown \"Transfer-Encoding\": \"gzip, chunked\""),
        ("Transfer-Encoding:\r\n", "upstream sent unknown \"Transfer-Encoding\": \"\""),
        ("Content-Length: foo\r\n", "upstream sent invalid \"Content-Length\" header: \"Content-Length: foo\""),
    ] {
        assert_eq!(refuse_fields(lines), message, "{lines:?}");
    }
    for length in ["", "-1", "+1", "1,1", "1 1", "0x1", "9223372036854775808"] {
        let message = refuse_fields(&format!("Content-Length: {length}\r\n"));
        assert!(message.starts_with("upstream sent invalid \"Content-Length\" header"), "{length}");
    }
    assert_eq!(fields("Content-Length: 9223372036854775807\r\n").content_length, Some(i64::MAX as u64));
    assert!(fields("Transfer-Encoding: Chunked \r\n").is_chunked);
}

#[test]
fn lines_that_nginx_ignores_are_ignored() {
    let lines = "Expires: foo\r\nExpires: bar\r\nbad(name): x\r\nnameless\r\nHTTP/1.1 200 OK\r\nX: y\r\n";
    let input = format!("HTTP/1.1 200 OK\r\n{lines}\r\n");
    let parts = accept(&input);
    let names: Vec<_> = parts.fields.iter().map(|field| field.name.of(input.as_bytes())).collect();
    assert_eq!(names, [&b"Expires"[..], b"X"]);
    assert_eq!(parts.value(input.as_bytes(), ResponseField::Expires), Some(&b"foo"[..]));
    assert_eq!(parts.ignored_count, 4);
    let message = |parts: &ResponseParts, input: &str| {
        let mut message = Vec::new();
        parts.ignored_first.unwrap().write_to(input.as_bytes(), &mut message);
        String::from_utf8(message).unwrap()
    };
    assert_eq!(
        message(&parts, &input),
        "upstream sent duplicate header line: \"Expires: bar\", previous value: \"Expires: foo\", ignored"
    );
    let input = "HTTP/1.1 200 OK\r\nbad(name): x\r\n\r\n";
    assert_eq!(message(&accept(input), input), "upstream sent invalid header line: \"bad(name): x\", ignored");
}

#[test]
fn a_head_larger_than_allowed_is_refused() {
    let input = "HTTP/1.1 200 OK\r\nX: y\r\n\r\n";
    accept_with(ResponseHeadParser::new(input.len()), input);
    for head_max in 0..input.len() {
        let message = refuse_with(ResponseHeadParser::new(head_max), input);
        assert_eq!(message, "upstream sent too big header", "{head_max}");
        let (mut parser, mut parts) = (ResponseHeadParser::new(head_max), ResponseParts::default());
        for end in 0..head_max {
            assert_eq!(parser.parse(&input.as_bytes()[..end], &mut parts), Ok(Status::NeedMore));
        }
        assert_eq!(parser.parse(&input.as_bytes()[..head_max], &mut parts), Err(ResponseFault::TooBigHeader));
    }
}

#[test]
fn interim_responses_are_told_from_final_ones() {
    let input = b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\nContent-Length: x\r\nConnection: close\r\n\r\n\
                  HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi";
    let (mut parser, mut parts) = (ResponseHeadParser::new(HEAD_MAX), ResponseParts::default());
    let Ok(Status::Complete { consumed }) = parser.parse(input, &mut parts) else { panic!() };
    assert!(parts.is_interim() && parts.has(ResponseField::Link) && parts.content_length.is_none());
    let Ok(Status::Complete { .. }) = parser.parse(&input[consumed..], &mut parts) else { panic!() };
    assert_eq!((parts.is_interim(), parts.status, parts.content_length), (false, 200, Some(2)));
    assert!(!parts.has(ResponseField::Link) && !parts.connection.close);
    for (status, is_interim) in [(100, true), (101, false), (102, true), (199, true), (200, false)] {
        assert_eq!(accept(&format!("HTTP/1.1 {status}\r\n\r\n")).is_interim(), is_interim, "{status}");
    }
    assert_eq!(refuse("HTTP/1.0 103 \r\n\r\n"), "upstream sent HTTP/1.0 response with early hints");
}

#[test]
fn bodies_are_delimited_as_the_rfc_says() {
    use ResponseFraming::{Chunked, Length, None, Tunnel, UntilClose};
    for (method, head, framing, is_kept) in [
        (Method::Get, "1.1 200\r\nContent-Length: 5", Length(5), true),
        (Method::Get, "1.1 200\r\nContent-Length: 0", Length(0), true),
        (Method::Get, "1.1 200\r\nTransfer-Encoding: chunked", Chunked, true),
        (Method::Get, "1.1 200\r\nX: y", UntilClose, false),
        (Method::Get, "1.1 200\r\nContent-Length: 5\r\nConnection: x, Close", Length(5), false),
        (Method::Get, "1.0 200\r\nContent-Length: 5", Length(5), false),
        (Method::Get, "1.0 200\r\nContent-Length: 5\r\nConnection: keep-alive", Length(5), true),
        (Method::Get, "1.0 200\r\nTransfer-Encoding: chunked\r\nConnection: keep-alive", Chunked, false),
        (Method::Head, "1.1 200\r\nContent-Length: 5", None, true),
        (Method::Head, "1.1 200\r\nTransfer-Encoding: chunked", None, true),
        (Method::Head, "1.1 200\r\nX: y", None, true),
        (Method::Get, "1.1 304\r\nContent-Length: 5", None, true),
        (Method::Get, "1.1 204\r\nX: y", None, true),
        (Method::Get, "1.1 204\r\nContent-Length: 0", None, true),
        (Method::Get, "1.1 204\r\nContent-Length: 5", None, false),
        (Method::Get, "1.1 204\r\nTransfer-Encoding: chunked", None, false),
        (Method::Get, "1.1 101\r\nUpgrade: websocket\r\nContent-Length: 5", Tunnel, false),
        (Method::Connect, "1.1 200\r\nContent-Length: 5", Tunnel, false),
        (Method::Connect, "1.1 403\r\nContent-Length: 5", Length(5), true),
    ] {
        let parts = accept(&format!("HTTP/{head}\r\n\r\n"));
        let decided = ResponseFraming::decide(method, &parts);
        assert_eq!((decided, parts.keeps_alive(decided)), (framing, is_kept), "{method:?} {head:?}");
    }
}

#[test]
fn keep_alive_is_read() {
    for (value, timeout_s, requests_max) in [
        ("timeout=5, max=100", Some(5), Some(100)),
        ("max=0,Timeout = 15", Some(15), Some(0)),
        ("timeout=5\r\nKeep-Alive: timeout=3", Some(3), None),
        ("timeout=99999999999", Some(u32::MAX), None),
        ("timeout, =5, timeout=, timeout=x, timeouts=1", None, None),
    ] {
        let parts = fields(&format!("Keep-Alive: {value}\r\n"));
        assert_eq!(parts.keep_alive, KeepAlive { timeout_s, requests_max }, "{value}");
    }
}

#[test]
fn fields_of_the_connection_are_marked() {
    let input = "HTTP/1.1 200 OK\r\nX-Listed: 1\r\nConnection: close, x-listed,, Te\r\nKeep-Alive: timeout=5\r\n\
                 Connection: x-b\r\nX-Listed-Not: 1\r\nTE: x\r\nX-B: 2\r\nUpgrade: h2c\r\nTrailer: x\r\n\
                 Proxy-Connection: close\r\nTransfer-Encoding: chunked\r\nX-Listed: 3\r\n\r\n";
    let parts = accept(input);
    let names: Vec<_> =
        parts.connection_names.iter().map(|name| std::str::from_utf8(name.of(input.as_bytes())).unwrap()).collect();
    assert_eq!(names, ["x-listed", "x-b"]);
    let forwarded = parts.fields.iter().filter(|field| !field.is_hop_by_hop);
    let forwarded: Vec<_> = forwarded.map(|field| field.name.of(input.as_bytes())).collect();
    assert_eq!(forwarded, [&b"X-Listed-Not"[..], b"Trailer"]);
    assert!(parts.connection.close && parts.connection.te);

    let many = |count: usize| format!("Connection: {}\r\n", vec!["x"; count].join(","));
    assert_eq!(fields(&many(64)).connection_names.len(), 64);
    assert_eq!(refuse_fields(&many(65)), "upstream sent too many connection options");
}

#[test]
fn cgi_responses_have_their_status_in_a_field() {
    for (input, status, reason) in [
        ("Status: 404 Not Found\r\n\r\n", 404, "Not Found"),
        ("X: y\nstatus:201\n\n", 201, ""),
        ("Status: 500\r\nStatus: 200\r\n\r\n", 500, ""),
        ("Location: /a\r\n\r\n", 302, ""),
        ("Location: /a\r\nStatus: 201 Created\r\n\r\n", 201, "Created"),
        ("Content-Type: text/html\r\n\r\n", 200, ""),
        ("\r\n", 200, ""),
        ("\n", 200, ""),
    ] {
        let parts = cgi(input);
        assert_eq!((parts.status, parts.reason.of(input.as_bytes())), (status, reason.as_bytes()), "{input:?}");
    }
    for value in ["", "2", "20", "2000", "abc", "099", "-10"] {
        let message = refuse_with(ResponseHeadParser::cgi(HEAD_MAX), &format!("Status: {value}\r\n\r\n"));
        assert_eq!(message, format!("upstream sent invalid status \"{value}\""));
    }
    let parts = cgi("Content-Length: 5\r\nX: y\r\n\r\n");
    let framing = ResponseFraming::decide(Method::Get, &parts);
    assert_eq!((framing, parts.keeps_alive(framing)), (ResponseFraming::Length(5), false));
    let parts = cgi("Transfer-Encoding: chunked\r\n\r\n");
    assert_eq!(ResponseFraming::decide(Method::Get, &parts), ResponseFraming::UntilClose);
}

#[test]
fn cgi_responses_may_begin_with_a_status_line_where_the_protocol_has_it() {
    let parser = || ResponseHeadParser::cgi_or_http(HEAD_MAX);
    for (input, status, reason) in [
        ("HTTP/1.1 404 Gone\r\nX: y\r\n\r\n", 404, "Gone"),
        ("HTTP/1.1 404 Gone\r\nStatus: 200 OK\r\n\r\n", 404, "Gone"),
        ("Status: 201 Made\r\n\r\n", 201, "Made"),
        ("HTTP: x\r\nHT: y\r\n\r\n", 200, ""),
        ("HTTP/x\r\nStatus: 202\r\n\r\n", 202, ""),
    ] {
        let parts = accept_with(parser(), input);
        assert_eq!((parts.status, parts.reason.of(input.as_bytes())), (status, reason.as_bytes()), "{input:?}");
        assert!(parts.is_cgi && !parts.is_interim());
    }
    assert!(refuse_with(parser(), "HTTP/1.1 200 \0OK\r\n\r\n").starts_with("upstream sent invalid header"));
}

#[test]
fn faults_of_chunks_are_the_upstreams() {
    let fault = |body: &[u8]| {
        let mut decoder = ChunkedDecoder::new(ChunkLimits { extensions_max: 8, trailers_max: 16 });
        let mut rest = body;
        loop {
            match decoder.decode(rest) {
                Ok(decoded) => rest = &rest[decoded.consumed..],
                Err(offence) => return ResponseFault::from(offence).to_string(),
            }
        }
    };
    assert_eq!(fault(b"4\r\nSEE-THIS\r\n"), "upstream sent invalid chunked response");
    assert_eq!(fault(b"4;123456789\r\n"), "upstream sent invalid chunked response");
    assert_eq!(fault(b"0\r\nX : y\r\n"), "upstream sent invalid trailer");
    assert_eq!(fault(b"0\r\nX: 1234567890abcdef\r\n"), "upstream sent too big trailers");
}

/// Random heads: valid pieces with invalid bytes between them.
fn any_head() -> impl Strategy<Value = Vec<u8>> {
    let piece = prop_oneof![
        4 => prop::sample::select(vec![
            "HTTP/1.1 200 OK\r\n", "HTTP/1.0 404\n", "HTTP/1.1 103 x\r\n", "Content-Length: 5\r\n", "X: y\r\n",
            "Transfer-Encoding: chunked\r\n", "Connection: x, close\n", "Keep-Alive: timeout=1\r\n", "\r\n", "\n",
            "Status: 201 x\r\n", "Location: /\r\n", "Expires: 0\r\n", "a b\r\n", "a(b)\r\n", "HTTP/", " ", "\t", ":",
        ]).prop_map(|text| text.as_bytes().to_vec()),
        1 => prop::collection::vec(any::<u8>(), 0..4),
    ];
    let rest = prop::collection::vec(piece, 0..10).prop_map(|pieces| pieces.concat());
    (prop::bool::weighted(0.8), rest).prop_map(|(begins, rest)| {
        let start: &[u8] = if begins { b"HTTP/1.1 200 OK\r\n" } else { b"" };
        [start, &rest].concat()
    })
}

proptest! {
    #[test]
    fn splitting_makes_no_difference(
        input in any_head(),
        form in 0..3,
        head_max in prop_oneof![Just(4096usize), 0..200usize],
    ) {
        let parser = || match form {
            0 => ResponseHeadParser::new(head_max),
            1 => ResponseHeadParser::cgi(head_max),
            _ => ResponseHeadParser::cgi_or_http(head_max),
        };
        let (whole, parts) = parse_with(parser(), &input);
        for cut in 0..=input.len() {
            let (mut parser, mut other) = (parser(), ResponseParts::default());
            let mut result = parser.parse(&input[..cut], &mut other);
            if result == Ok(Status::NeedMore) {
                result = parser.parse(&input, &mut other);
            }
            prop_assert_eq!(result, whole);
            prop_assert_eq!(format!("{:?}", other), format!("{:?}", parts));
        }
        if let Ok(Status::Complete { consumed }) = whole {
            prop_assert!(consumed <= input.len() && (100..1000).contains(&parts.status));
            for field in &parts.fields {
                prop_assert!(!field.value.of(&input).iter().any(|byte| matches!(byte, b'\r' | b'\n' | 0)));
            }
        }
    }
}
