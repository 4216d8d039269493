//! Malformed requests, for tests of the parser and of the requests that a proxy forwards.

#![allow(dead_code, reason = "every test program uses a part of it")]

/// Invalid request lines.
pub const BROKEN_LINES: &[&str] = &[
    "GET  ",
    "GET /a b HTTP/1.0",
    "GET / /",
    "GET /\t HTTP/1.0",
    "GET / HTTP/1.0 x",
    "GET / http/1.0",
    "GET / HTTP",
    "GET / HTTP/",
    "GET / HTTP/1",
    "GET / HTTP/1.",
    "GET / HTTP/.1",
    "GET / HTTP/0.9",
    "GET / HTTP/01.1",
    "GET / HTTP/1.12",
    "GET / HTTP/1.01",
    "GET / HTTP/1.1x",
    "GET / HTTP/1,1",
    "GET / HTTP/a.1",
    "GET / HTTP/-1.1",
    "GET / XTTP/1.1",
    "GET a HTTP/1.1",
    "GET a: HTTP/1.1",
    "GET a:/b HTTP/1.1",
    "GET http://a#f HTTP/1.1",
    "GET http://u@a/ HTTP/1.1",
    "GET http://a:b/ HTTP/1.1",
    "GET http://[::1/ HTTP/1.1",
    "GET ?a HTTP/1.1",
    "GET \\ HTTP/1.1",
    "GET * HTTP/1.1",
    "OPTIONS *x HTTP/1.1",
    "CONNECT / HTTP/1.1",
    "CONNECT a HTTP/1.1",
    "CONNECT a: HTTP/1.1",
    "CONNECT [::1] HTTP/1.1",
    "CONNECT a:1/ HTTP/1.1",
    "CONNECT http://a:1 HTTP/1.1",
];

/// Request lines with an unsupported version.
pub const WRONG_VERSIONS: &[&str] =
    &["GET / HTTP/2.0", "GET / HTTP/3", "GET / HTTP/9x", "GET / HTTP/10.0", "GET / HTTP/11"];

/// Request lines with an invalid host.
pub const WRONG_TARGET_HOSTS: &[&str] = &[
    "GET http:/// HTTP/1.1",
    "GET http://. HTTP/1.1",
    "GET http://a..b HTTP/1.1",
    "CONNECT a:99999 HTTP/1.1",
    "CONNECT :1 HTTP/1.1",
];

/// Invalid values of `Host`.
pub const WRONG_HOSTS: &[&str] = &["", "a b", "a/b", "a..b", "a:x", "a:70000", "a@b", "[::1"];

/// Header lines that parsers interpret differently.
pub const DANGEROUS_LINES: &[&str] = &[
    "Content-Length : 5",
    "Content-Length\t: 5",
    "X : y",
    ": y",
    ":",
    " X: y",
    "\tX: y",
    "X",
    "Transfer-Encoding",
    "X y: z",
    "X\x02: y",
    "X: \x00",
    "X: a\x1bb",
    "X: a\x7fb",
    "X: a\rb",
    "X: a\r\r",
    "Content_Length: 5",
    "Transfer_Encoding: chunked",
    "Transfer-Encoding\u{1}: chunked",
    "Transfer.Encoding: chunked",
    "\"Transfer-Encoding\": chunked",
    "Content-Length\u{a0}: 5",
];

/// Invalid values of `Content-Length`.
pub const WRONG_LENGTHS: &[&str] = &[
    "",
    "-1",
    "+5",
    "5, 5",
    "5 5",
    "0x5",
    "5;",
    "1e3",
    "9223372036854775808",
    "18446744073709551616",
    "99999999999999999999999",
];

/// Values of `Transfer-Encoding` with an unknown coding.
pub const UNKNOWN_CODINGS: &[&str] =
    &["identity", "chunked, identity", "identity, chunked", "xchunked", "gzip", "gzip, chunked", "cow"];

/// Invalid values of `Transfer-Encoding`.
pub const WRONG_CODINGS: &[&str] = &[
    "",
    ",chunked",
    "chunked,",
    "chunked, chunked",
    "chunked, gzip",
    "chunked gzip",
    "\"chunked\"",
    "chunked;q=1",
    "chunked\u{b}",
];

/// Invalid chunked bodies.
pub const WRONG_CHUNKS: &[&str] = &[
    "\r\n",
    "g\r\n",
    " 5\r\n",
    "-5\r\n",
    "+5\r\n",
    "0x5\r\n",
    ";a\r\n",
    "5\n",
    "5\rx",
    "5\r\r\n",
    "5 5\r\n",
    "5;a\n",
    "5;a\rb",
    "5;\0",
    "5;\u{7f}",
    "5,\r\n",
    "4\r\nSEE-THIS\r\n",
    "1\r\nx\n",
    "1\r\nx0",
    "1\r\nx\rx",
    "0\n",
    "0\r\n\rx",
    "1\r\nx\r\n\r\n",
    "fffffffffffffffff\r\n",
    "8000000000000000\r\n",
    "ffffffffffffffff\r\n",
    "00000000000000000\r\n",
];

/// Invalid trailer sections.
pub const WRONG_TRAILERS: &[&str] = &[
    "\n",
    ":\r\n",
    ": x\r\n",
    " x: y\r\n",
    "x\r\n",
    "x y: z\r\n",
    "x : y\r\n",
    "x: y\n",
    "x: y\rz",
    "x: \0",
    "a: b\r\n c\r\n",
];

/// Valid chunked bodies, including unusual ones, and their data.
pub const RIGHT_CHUNKS: &[(&str, &str)] = &[
    ("0\r\n\r\n", ""),
    ("00000\r\n\r\n", ""),
    ("5\r\nhello\r\n0\r\n\r\n", "hello"),
    ("005\r\nhello\r\n1\r\n!\r\n0\r\n\r\n", "hello!"),
    ("A\r\n0123456789\r\na\r\n0123456789\r\n0\r\n\r\n", "01234567890123456789"),
    ("2\r\n\r\n\r\n0\r\n\r\n", "\r\n"),
    ("1;a=b;c=\"d e\"\r\nx\r\n0;last\r\n\r\n", "x"),
    ("1; \ta\r\nx\r\n0\r\n\r\n", "x"),
    ("1\r\nx\r\n0\r\nTrailer: y\r\nB:\r\nC:z\t\r\n\r\n", "x"),
];

/// Bodies that are valid only in responses, and their data.
pub const LENIENT_CHUNKS: &[(&str, &str)] = &[
    ("1 \t;a\r\nx\r\n0\r\n\r\n", "x"),
    ("1  \r\nx\r\n0 \r\n\r\n", "x"),
    ("1;\r\nx\r\n0\r\n\r\n", "x"),
    ("1; \t\r\nx\r\n0\r\n\r\n", "x"),
    ("1;=b\r\nx\r\n0\r\n\r\n", "x"),
];
