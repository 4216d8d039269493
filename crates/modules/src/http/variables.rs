//! Variables of the http core: of a request, its connection, its response, and the time.
//! (<https://nginx.org/en/docs/http/ngx_http_core_module.html#variables>)
//!
//! Values are appended in place; nothing here waits. `$request_body`, `$request_body_file` and `$realpath_root` are in
//! `client_body.rs` and `realpath_root.rs`.

use bstr::BStr;
use gale_base::log_level::Level;
use gale_base::units;
use gale_engine::module::Module;
use gale_http::module::HttpPart;
use gale_http::request::Request;
use gale_http::request::files;
use gale_http::variables::Variable;
use gale_protocol::request::{KnownHeader, Scheme, Version};
use gale_protocol::uri::Form;
use gale_runtime::TcpInfo;

use super::auth_basic::append_user;
use crate::shared::append::{
    append, append_hex, append_joined, append_number, append_padded, append_port, append_seconds,
};
use crate::shared::variables::variables;

/// Variables that requests share with the subjects of other protocols.
pub static COMMON: Module = Module {
    name: "http_core",
    parts: &[&HttpPart { variables: &variables::<Request>(), ..HttpPart::EMPTY }],
    ..Module::EMPTY
};

pub(crate) const VARIABLES: &[Variable] = &[
    // The request.
    Variable::named("request", |request, _, out| append_present(out, request_line(request))),
    Variable::named("request_method", |request, _, out| append_present(out, request.shown_method())),
    Variable::named("request_uri", |request, _, out| append_present(out, request_uri(request))),
    Variable::named("server_protocol", |request, _, out| append_present(out, protocol(request))),
    Variable::named("uri", append_uri),
    Variable::named("document_uri", append_uri),
    Variable::named("args", |request, _, out| append_present(out, &request.args))
        .assigned_by(|request, value| request.args = value.to_vec()),
    Variable::named("query_string", |request, _, out| append_present(out, &request.args)),
    Variable::named("is_args", |request, _, out| append(out, if request.args.is_empty() { b"" } else { b"?" })),
    Variable::family("arg_", |request, name, out| append_found(out, argument(&request.args, name))),
    Variable::family("cookie_", |request, name, out| append_found(out, cookie(request, name))),
    Variable::named("host", |request, _, out| append(out, host(request))),
    Variable::named("request_port", |request, _, out| append_port(out, request_port(request))),
    Variable::named("is_request_port", |request, _, out| {
        append(out, if request_port(request).is_some() { b":" } else { b"" })
    }),
    Variable::named("scheme", |request, _, out| append(out, request.exchange().scheme().name().as_bytes())),
    Variable::named("https", |request, _, out| {
        append(out, if request.exchange().scheme() == Scheme::Https { b"on" } else { b"" })
    }),
    Variable::named("remote_user", |request, _, out| {
        request.header(KnownHeader::Authorization).is_some_and(|value| append_user(value, out))
    }),
    Variable::named("request_id", |request, _, out| append_hex(out, &request.id())),
    Variable::named("request_length", |request, _, out| append_number(out, request.received())),
    Variable::named("request_time", |request, _, out| {
        append_seconds(out, gale_runtime::now().since(request.arrival.started))
    }),
    Variable::named("request_completion", |request, _, out| {
        append(out, if request.exchange().is_complete() { b"OK" } else { b"" })
    }),
    Variable::named("content_length", append_content_length),
    Variable::named("content_type", |request, _, out| append_known(request, KnownHeader::ContentType, b", ", out)),
    Variable::named("http_host", |request, _, out| append_known(request, KnownHeader::Host, b", ", out)),
    Variable::named("http_user_agent", |request, _, out| append_known(request, KnownHeader::UserAgent, b", ", out)),
    Variable::named("http_referer", |request, _, out| append_known(request, KnownHeader::Referer, b", ", out)),
    Variable::named("http_cookie", |request, _, out| append_known(request, KnownHeader::Cookie, b"; ", out)),
    Variable::family("http_", |request, name, out| {
        let fields = request.fields().filter(|(_, field, _)| is_folded(field, name));
        append_joined(out, fields.map(|(_, _, value)| value), b", ")
    }),
    // Its file.
    Variable::named("document_root", |request, _, out| files::directory_of(request, out)).own(),
    Variable::named("request_filename", |request, _, out| files::find_path(request, out).is_ok()),
    // The connection.
    Variable::named("remote_addr", |request, _, out| append(out, request.remote_text().as_bytes())),
    Variable::named("server_name", |request, _, out| append(out, server_name(request))),
    Variable::named("connection_requests", |request, _, out| append_number(out, request.arrival.number_on_connection)),
    Variable::named("connection_time", |request, _, out| {
        append_seconds(out, gale_runtime::now().since(request.connection().accepted))
    }),
    Variable::named("tcpinfo_rtt", |request, _, out| append_tcp(request, out, |info| info.rtt)),
    Variable::named("tcpinfo_rttvar", |request, _, out| append_tcp(request, out, |info| info.rtt_variance)),
    Variable::named("tcpinfo_snd_cwnd", |request, _, out| append_tcp(request, out, |info| info.congestion_window)),
    Variable::named("tcpinfo_rcv_space", |request, _, out| append_tcp(request, out, |info| info.receive_space)),
    Variable::named("pipe", |request, _, out| append(out, if request.arrival.is_pipelined { b"p" } else { b"." })),
    Variable::named("limit_rate", |request, _, out| append_number(out, request.known_limit_rate()))
        .assigned_by(set_limit_rate),
    // The response.
    Variable::named("status", |request, _, out| append_status(out, status(request))),
    Variable::named("bytes_sent", |request, _, out| append_number(out, request.sent().bytes)),
    Variable::named("body_bytes_sent", |request, _, out| {
        let sent = request.sent();
        append_number(out, sent.bytes.saturating_sub(sent.head_bytes))
    }),
    Variable::named("sent_http_content_type", |request, _, out| append_present(out, &request.response.content_type)),
    Variable::named("sent_http_content_length", |request, _, out| {
        request.response.content_length.is_some_and(|length| append_number(out, length))
    }),
    Variable::named("sent_http_last_modified", |request, _, out| {
        request.response.last_modified_text().is_some_and(|text| append(out, &text))
            || append_sent(request, b"last_modified", out)
    }),
    Variable::named("sent_http_location", |request, _, out| {
        append_present(out, &request.response.location) || append_sent(request, b"location", out)
    }),
    Variable::named("sent_http_etag", |request, _, out| {
        append_present(out, &request.response.etag) || append_sent(request, b"etag", out)
    }),
    Variable::named("sent_http_accept_ranges", |request, _, out| {
        (request.response.allows_ranges && append(out, b"bytes")) || append_sent(request, b"accept_ranges", out)
    }),
    Variable::named("sent_http_connection", |request, _, out| append(out, sent_connection(request))),
    Variable::named("sent_http_keep_alive", |request, _, out| {
        let told = request.scope().core.keepalive_timeout.get().told();
        told.filter(|_| is_kept(request)).is_some_and(|time| {
            out.extend_from_slice(b"timeout=");
            append_number(out, time.as_secs())
        })
    }),
    Variable::named("sent_http_transfer_encoding", |request, _, out| is_chunked(request) && append(out, b"chunked")),
    Variable::family("sent_http_", append_sent),
    Variable::family("sent_trailer_", append_sent_trailer),
];

/// Returns the client's request line, even if it is invalid.
fn request_line(request: &Request) -> &[u8] {
    match request.request_line() {
        b"" => first_line(request.head.readable()),
        line => line,
    }
}

fn first_line(head: &[u8]) -> &[u8] {
    let is_line_end = |byte: &u8| matches!(byte, b'\r' | b'\n');
    let start = head.iter().position(|byte| !is_line_end(byte)).unwrap_or(head.len());
    let line = &head[start..];
    &line[..line.iter().position(is_line_end).unwrap_or(line.len())]
}

/// Returns the target from its path on: nginx leaves out the scheme and the host of an absolute form.
pub(super) fn request_uri(request: &Request) -> &[u8] {
    let target = request.target();
    if request.parsed.target.form != Form::Absolute {
        return target;
    }
    let before = request.parsed.target.path.start().saturating_sub(request.parsed.target_range.start());
    match target.get(before..) {
        None | Some(b"") => b"/",
        Some(path) => path,
    }
}

/// Appends the URI. A refused path is empty; without a path the variable has no value.
fn append_uri(request: &Request, _: &[u8], out: &mut Vec<u8>) -> bool {
    append_present(out, &request.uri) || !request.parsed.target.path.is_empty()
}

pub(super) fn protocol(request: &Request) -> &[u8] {
    request.parsed.version_range.of_lenient(request.head.readable())
}

fn host(request: &Request) -> &[u8] {
    if request.host.is_empty() { server_name(request) } else { &request.host }
}

/// Returns the first name; `.example.com` counts as `example.com`.
pub(super) fn server_name(request: &Request) -> &[u8] {
    let name = &*request.server().name;
    name.strip_prefix(b".").unwrap_or(name)
}

fn request_port(request: &Request) -> Option<u16> {
    request.parsed.authority?.port
}

fn set_limit_rate(request: &mut Request, value: &[u8]) {
    match units::parse_size(value) {
        Some(per_second) => request.set_limit_rate(per_second),
        None => request.log(Level::Error, format_args!("invalid $limit_rate \"{}\"", BStr::new(value))),
    }
}

fn append_tcp(request: &Request, out: &mut Vec<u8>, value: fn(&TcpInfo) -> u32) -> bool {
    request.exchange().tcp_info().is_some_and(|info| append_number(out, value(&info).into()))
}

/// Returns `true` if the body's length is unknown, so that it is sent in chunks or ends with the connection.
fn has_unknown_length(request: &Request) -> bool {
    let status = request.response.status;
    status >= 200 && !matches!(status, 204 | 304) && !request.is_head() && request.response.content_length.is_none()
}

fn is_chunked(request: &Request) -> bool {
    has_unknown_length(request)
        && request.version() == Version::Http11
        && *request.scope().core.chunked_transfer_encoding.get()
}

fn sent_connection(request: &Request) -> &'static [u8] {
    match request.response.status {
        101 => b"upgrade",
        _ if is_kept(request) => b"keep-alive",
        _ => b"close",
    }
}

/// Returns `true` if the response keeps the connection open.
fn is_kept(request: &Request) -> bool {
    request.exchange().keeps_connection(request)
        && !request.worker().is_draining()
        && (is_chunked(request) || !has_unknown_length(request))
}

/// Returns the first argument of this name, whatever its case; it must have a value, though that may be empty.
pub(crate) fn argument<'a>(args: &'a [u8], name: &[u8]) -> Option<&'a [u8]> {
    if name.is_empty() {
        return None;
    }
    args.split(|&byte| byte == b'&').find_map(|argument| {
        let (found, rest) = argument.split_at_checked(name.len())?;
        rest.strip_prefix(b"=").filter(|_| found.eq_ignore_ascii_case(name))
    })
}

fn cookie<'r>(request: &'r Request, name: &[u8]) -> Option<&'r [u8]> {
    let lines = request.parsed.values(request.head.readable(), KnownHeader::Cookie);
    lines.into_iter().find_map(|line| cookie_of_line(line, name))
}

/// Returns a cookie's value, parsed as in nginx: names ignore case, spaces before them and around `=` are skipped, and
/// values are unchanged.
pub(super) fn cookie_of_line<'l>(line: &'l [u8], name: &[u8]) -> Option<&'l [u8]> {
    if name.is_empty() {
        return None;
    }
    line.split(|&byte| byte == b';').enumerate().find_map(|(number, pair)| {
        let pair = if number == 0 { pair } else { skip_spaces(pair) };
        let (found, rest) = pair.split_at_checked(name.len())?;
        let value = skip_spaces(rest).strip_prefix(b"=")?;
        found.eq_ignore_ascii_case(name).then(|| skip_spaces(value))
    })
}

fn skip_spaces(text: &[u8]) -> &[u8] {
    let spaces = text.iter().take_while(|&&byte| byte == b' ').count();
    &text[spaces..]
}

/// Returns `true` if a variable's name stands for this field: in lower case, with `_` for `-`.
pub(super) fn is_folded(field: &[u8], folded: &[u8]) -> bool {
    let fold = |byte: &u8| if *byte == b'-' { b'_' } else { byte.to_ascii_lowercase() };
    field.len() == folded.len() && field.iter().map(fold).eq(folded.iter().copied())
}

/// Appends a value that counts as missing when it is empty, as in nginx.
fn append_present(out: &mut Vec<u8>, text: &[u8]) -> bool {
    out.extend_from_slice(text);
    !text.is_empty()
}

fn append_found(out: &mut Vec<u8>, text: Option<&[u8]>) -> bool {
    text.is_some_and(|text| append(out, text))
}

/// Appends the values of all fields of one kind.
fn append_known(request: &Request, known: KnownHeader, separator: &[u8], out: &mut Vec<u8>) -> bool {
    append_joined(out, request.parsed.values(request.head.readable(), known), separator)
}

/// Appends the values of all fields of this name that a module added to the response.
fn append_sent(request: &Request, name: &[u8], out: &mut Vec<u8>) -> bool {
    let fields = request.response.fields.iter().filter(|field| is_folded(&field.name, name));
    append_joined(out, fields.map(|field| &*field.value), b", ")
}

fn append_sent_trailer(request: &Request, name: &[u8], out: &mut Vec<u8>) -> bool {
    let trailers = request.trailers();
    append_joined(out, trailers.iter().filter(|(own, _)| is_folded(own, name)).map(|(_, value)| &**value), b", ")
}

/// Returns the status as far as it is known: in an `error_page` that of the error, until the page has its own.
pub(super) fn status(request: &Request) -> u16 {
    request.outcome.status_override.unwrap_or(request.response.status)
}

fn append_status(out: &mut Vec<u8>, status: u16) -> bool {
    append_padded(out, status.into(), 3);
    true
}

/// Appends the client's `Content-Length`, or the length of a chunked body that was read.
fn append_content_length(request: &Request, _: &[u8], out: &mut Vec<u8>) -> bool {
    match request.header(KnownHeader::ContentLength) {
        Some(length) => append(out, length),
        // Over HTTP/2 a body needs no such field.
        None if request.declared_body_length().is_some() => false,
        None => request.body.as_ref().is_some_and(|body| append_number(out, body.length())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shared::append::tests::text;

    #[test]
    fn no_name_is_defined_twice() {
        let mut names: Vec<_> = VARIABLES.iter().map(|variable| (variable.name, variable.is_prefix)).collect();
        names.sort_unstable();
        assert!(names.windows(2).all(|pair| pair[0] != pair[1]));
        assert!(
            names.iter().all(|(name, _)| name.bytes().all(|byte| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'_')))
        );
    }

    #[test]
    fn names_of_fields_are_folded_as_in_nginx() {
        assert!(is_folded(b"X-Forwarded-For", b"x_forwarded_for"));
        assert!(is_folded(b"x_under_score", b"x_under_score"));
        assert!(!is_folded(b"X-Forwarded", b"x_forwarded_for"));
        assert!(!is_folded(b"X.Dot", b"x_dot"));
    }

    #[test]
    fn a_status_has_three_digits() {
        assert_eq!(text(|out| append_status(out, 9)).unwrap(), "009");
        assert_eq!(text(|out| append_status(out, 404)).unwrap(), "404");
    }

    #[test]
    fn several_values_are_joined_and_none_is_no_value() {
        let join = |values: &[&[u8]], separator| text(|out| append_joined(out, values.iter().copied(), separator));
        assert_eq!(join(&[], b", "), None);
        assert_eq!(join(&[b""], b", "), Some(String::new()));
        assert_eq!(join(&[b"a", b"b", b"c"], b", "), Some("a, b, c".to_owned()));
        assert_eq!(join(&[b"a=1", b"b=2"], b"; "), Some("a=1; b=2".to_owned()));
    }

    #[test]
    fn arguments_are_found_by_name_in_any_case() {
        let find = |args: &'static str, name: &str| argument(args.as_bytes(), name.as_bytes());
        assert_eq!(find("a=1&B=2&b=3", "b"), Some(&b"2"[..]));
        assert_eq!(find("aa=1&a=2", "a"), Some(&b"2"[..]));
        assert_eq!(find("a=x=y", "a"), Some(&b"x=y"[..]));
        assert_eq!(find("a=&b", "a"), Some(&b""[..]));
        assert_eq!(find("a=&b", "b"), None);
        assert_eq!(find("", "a"), None);
        assert_eq!(find("=1", ""), None);
    }

    #[test]
    fn cookies_are_found_with_blanks_around() {
        let find = |line: &'static str, name: &str| cookie_of_line(line.as_bytes(), name.as_bytes());
        assert_eq!(find("a=1; b=2", "b"), Some(&b"2"[..]));
        assert_eq!(find("a=1;b = 2 ;c=3", "b"), Some(&b"2 "[..]));
        assert_eq!(find("SID=x=y", "sid"), Some(&b"x=y"[..]));
        assert_eq!(find("ab=1; a=2", "a"), Some(&b"2"[..]));
        assert_eq!(find("a; b=2", "a"), None);
        assert_eq!(find("a=1", ""), None);
    }

    #[test]
    fn a_line_that_is_no_request_is_shown_as_it_came() {
        assert_eq!(first_line(b"\r\n\x16\x03\x01 x\r\nrest"), b"\x16\x03\x01 x");
        assert_eq!(first_line(b"GET /"), b"GET /");
        assert_eq!(first_line(b"\r\n"), b"");
    }
}
