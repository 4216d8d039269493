//! RFC 9111 and its kin in tables, a row for each rule: the section, the situation, and what comes of it with each
//! `proxy_cache_conformance`. What is judged by a response's own fields alone is in `cache/policy/table.rs`.

mod support;

use std::sync::atomic::{AtomicU64, Ordering};

use support::{Backend, Client, Driver, Response, Server, Serving, Setup, with_each_driver};

with_each_driver!(
    stored_responses_are_used_as_the_rules_say,
    fields_are_stored_and_updated_as_the_rules_say,
    requests_that_are_not_safe_invalidate_as_the_rules_say,
    uris_that_are_replaced_are_invalidated_by_either_name,
    responses_to_head_freshen_or_invalidate_as_the_rules_say,
);

/// In the order of the tables' columns: the RFC's rules, nginx's, and the default.
const CONFORMANCES: [&str; 3] = ["rfc9111", "nginx", "mixed"];

fn caching(driver: Driver, backend: &Serving, more: &str) -> Server {
    let text = "proxy_cache_path %DIR%/cache keys_zone=one:1m; proxy_cache_key $request_uri;
        proxy_cache_disk_timeout 60s; proxy_cache_lock_timeout 60s;
        server { listen %UNIX%; proxy_cache one; add_header X-Cache $upstream_cache_status always;
        location / { proxy_pass http://B; proxy_cache_revalidate on; MORE } }";
    Setup::http(driver, &text.replace('B', &backend.address).replace("MORE", more)).start()
}

/// A server that answers as the request's `X-Fields` says (fields with bars between them) and `X-Status`; with trailers
/// if there is an `X-Trailers`.
fn origin() -> Serving {
    let count = AtomicU64::new(0);
    Backend::tcp().serve(move |asked, client| {
        let number = count.fetch_add(1, Ordering::SeqCst) + 1;
        let lines =
            |text: &str| text.split('|').filter(|line| !line.is_empty()).map(|line| format!("{line}\r\n")).collect();
        let fields: String = lines(asked.header("X-Fields").unwrap_or_default());
        let status = asked.header("X-Status").unwrap_or("200 OK");
        let has_body = asked.method != "HEAD" && !status.starts_with("304") && !status.starts_with("204");
        let body = match asked.header("X-Trailers") {
            Some(trailers) => format!("Transfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\n{}\r\n", lines(trailers)),
            None if has_body => format!("Content-Length: 10\r\n\r\n{number:010}"),
            None => "\r\n".to_owned(),
        };
        client.send(format!("HTTP/1.1 {status}\r\n{fields}{body}"));
        true
    })
}

/// Asks for a path with these fields, each with its line's end.
fn ask(client: &mut Client, path: &str, fields: &str) -> Response {
    client.ask(format!("GET {path} HTTP/1.1\r\nHost: a\r\n{fields}\r\n"))
}

/// A rule about using what is stored: what is stored before (fields of the request, then of the response), what is
/// asked then (fields of the request), and how the cache is used for that with each `proxy_cache_conformance`; `504` is
/// that status.
struct Row {
    section: &'static str,
    first: &'static str,
    stored: &'static str,
    asked: &'static str,
    rfc: &'static str,
    /// What nginx does, too.
    nginx: &'static str,
    mixed: &'static str,
}

const fn row(
    section: &'static str,
    stored: &'static str,
    asked: &'static str,
    [rfc, nginx, mixed]: [&'static str; 3],
) -> Row {
    Row { section, first: "", stored, asked, rfc, nginx, mixed }
}

/// It comes when it is twenty seconds old, and is fresh for forty.
const YOUNG: &str = "Cache-Control: max-age=60|Age: 20";

/// It comes when it is stale, by thirty seconds; nginx does not look at its age.
const OLD: &str = "Cache-Control: max-age=60|Age: 90|ETag: \"1\"";

#[rustfmt::skip]
const RULES: &[Row] = &[
    row("4: what is fresh is used", YOUNG, "", ["HIT", "HIT", "HIT"]),
    row("4: what is stale is not", OLD, "", ["EXPIRED", "HIT", "EXPIRED"]),
    row("5.2.1.1: max-age, and it is older", YOUNG, "Cache-Control: max-age=10\r\n", ["EXPIRED", "HIT", "HIT"]),
    row("5.2.1.1: max-age, and it is younger", YOUNG, "Cache-Control: max-age=3000\r\n", ["HIT", "HIT", "HIT"]),
    row("5.2.1.2: max-stale, and it is not as stale", OLD, "Cache-Control: max-stale=3000\r\n",
        ["STALE", "HIT", "EXPIRED"]),
    row("5.2.1.2: max-stale, and it is staler", OLD, "Cache-Control: max-stale=10\r\n", ["EXPIRED", "HIT", "EXPIRED"]),
    row("5.2.1.2: max-stale without a number", OLD, "Cache-Control: max-stale\r\n", ["STALE", "HIT", "EXPIRED"]),
    row("4.2.4: must-revalidate, whatever the request says",
        "Cache-Control: max-age=60, must-revalidate|Age: 90|ETag: \"1\"", "Cache-Control: max-stale\r\n",
        ["EXPIRED", "HIT", "EXPIRED"]),
    row("5.2.1.3: min-fresh, and it is not", YOUNG, "Cache-Control: min-fresh=50\r\n", ["EXPIRED", "HIT", "HIT"]),
    row("5.2.1.3: min-fresh, and it is", "Cache-Control: max-age=3600", "Cache-Control: min-fresh=60\r\n",
        ["HIT", "HIT", "HIT"]),
    row("5.2.1.4: no-cache", YOUNG, "Cache-Control: no-cache\r\n", ["EXPIRED", "HIT", "HIT"]),
    row("5.4: Pragma", YOUNG, "Pragma: no-cache\r\n", ["EXPIRED", "HIT", "HIT"]),
    row("5.4: Pragma beside Cache-Control", YOUNG, "Pragma: no-cache\r\nCache-Control: max-age=3000\r\n",
        ["HIT", "HIT", "HIT"]),
    row("5.2.1.5: no-store", YOUNG, "Cache-Control: no-store\r\n", ["BYPASS", "HIT", "HIT"]),
    row("5.2.1.7: only-if-cached, and it is", YOUNG, "Cache-Control: only-if-cached\r\n", ["HIT", "HIT", "HIT"]),
    row("5.2.1.7: only-if-cached, and it is not", "Cache-Control: no-store", "Cache-Control: only-if-cached\r\n",
        ["504", "MISS", "MISS"]),
    row("5.2.1.7: only-if-cached, and it is stale", OLD, "Cache-Control: only-if-cached\r\n",
        ["504", "HIT", "EXPIRED"]),
    row("5.2.1.7: only-if-cached, and it is to be passed by", YOUNG, "Cache-Control: only-if-cached\r\nX-By: 1\r\n",
        ["504", "BYPASS", "BYPASS"]),
    Row { first: "X-A: 1\r\n", ..row("4.1: the same variant", "Cache-Control: max-age=60|Vary: X-A", "X-A: 1\r\n",
        ["HIT", "HIT", "HIT"]) },
    Row { first: "X-A: 1\r\n", ..row("4.1: another variant", "Cache-Control: max-age=60|Vary: X-A", "X-A: 2\r\n",
        ["MISS", "MISS", "MISS"]) },
    Row { first: "X-A: 1\r\n", ..row("4.1: a field that is not there", "Cache-Control: max-age=60|Vary: X-A", "",
        ["MISS", "MISS", "MISS"]) },
    // What a key is about that has the range is in `http_cache_bounds.rs`.
    Row { first: "X-Status: 206 Partial Content\r\n", ..row("3.3: a part does not answer for the whole",
        "Cache-Control: max-age=60|Content-Range: bytes 0-9/20", "", ["MISS", "HIT", "MISS"]) },
    row("4.1: Vary *", "Cache-Control: max-age=60|Vary: *", "", ["MISS", "MISS", "MISS"]),
    row("4.2.4: stale-if-error, and the server fails", "Cache-Control: max-age=60, stale-if-error=3000|Age: 90",
        "X-Status: 503 Oops\r\n", ["STALE", "HIT", "EXPIRED"]),
    row("4.2.4: nothing allows stale use", OLD, "X-Status: 503 Oops\r\n", ["EXPIRED", "HIT", "EXPIRED"]),
    row("4.3.4: a 304 renews it", OLD, "X-Status: 304 Not Modified\r\n", ["REVALIDATED", "HIT", "REVALIDATED"]),
    row("9213 2.2: CDN-Cache-Control", "CDN-Cache-Control: max-age=60|Cache-Control: no-store", "",
        ["HIT", "MISS", "HIT"]),
    row("9213 2.1: an invalid CDN-Cache-Control", "CDN-Cache-Control: no-store=|Cache-Control: max-age=60", "",
        ["HIT", "HIT", "HIT"]),
];

fn stored_responses_are_used_as_the_rules_say(driver: Driver) {
    let backend = origin();
    let mut wrong = Vec::new();
    for rules in CONFORMANCES {
        let server =
            caching(driver, &backend, &format!("proxy_cache_conformance {rules}; proxy_cache_bypass $http_x_by;"));
        let mut client = server.connect();
        for (number, row) in RULES.iter().enumerate() {
            let path = format!("/{number}");
            ask(&mut client, &path, &format!("X-Fields: {}\r\n{}", row.stored, row.first));
            let response = ask(&mut client, &path, row.asked);
            let used = response.header("X-Cache").filter(|used| !used.is_empty()).map(str::to_owned);
            let found = if response.status == 504 { "504".to_owned() } else { used.unwrap_or_default() };
            let expected = match rules {
                "rfc9111" => row.rfc,
                "nginx" => row.nginx,
                _ => row.mixed,
            };
            if found != expected {
                wrong.push(format!("{}, {rules}: {found}, not {expected}", row.section));
            }
            // §4, §5.1
            let tells_age = response.header("Age").is_some();
            if found == "HIT" && rules != "nginx" && !tells_age {
                wrong.push(format!("{}, {rules}: no Age", row.section));
            }
        }
        server.stop();
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// A rule about the fields of a stored response: those with which it came, those of the 304 that confirms it later if
/// there is one, and what a client gets of one of them out of the cache with each `proxy_cache_conformance`; `-` if it
/// is not there.
struct FieldRow {
    section: &'static str,
    stored: &'static str,
    confirmed: Option<&'static str>,
    field: &'static str,
    expected: [&'static str; 3],
}

const fn kept(
    section: &'static str,
    stored: &'static str,
    field: &'static str,
    expected: [&'static str; 3],
) -> FieldRow {
    FieldRow { section, stored, confirmed: None, field, expected }
}

const fn updated(
    section: &'static str,
    stored: &'static str,
    confirmed: &'static str,
    field: &'static str,
    expected: [&'static str; 3],
) -> FieldRow {
    FieldRow { section, stored, confirmed: Some(confirmed), field, expected }
}

#[rustfmt::skip]
const FIELDS: &[FieldRow] = &[
    kept("3.1: a field that nobody knows", "X-New: a", "X-New", ["a"; 3]),
    kept("3.1: all of one name", "X-New: a|X-New: b", "X-New", ["a, b"; 3]),
    kept("3.1: an empty one", "X-New: ", "X-New", [""; 3]),
    // Of the next seven nginx itself sends all but Keep-Alive; no `proxy_cache_conformance` does.
    kept("3.1: what Connection names", "Connection: X-New, close|X-New: a", "X-New", ["-"; 3]),
    kept("3.1: Keep-Alive", "Keep-Alive: timeout=5", "Keep-Alive", ["-"; 3]),
    kept("3.1: Proxy-Connection", "Proxy-Connection: close", "Proxy-Connection", ["-"; 3]),
    kept("3.1: TE", "TE: trailers", "TE", ["-"; 3]),
    kept("3.1: Upgrade", "Upgrade: a", "Upgrade", ["-"; 3]),
    kept("3.1: Proxy-Authenticate", "Proxy-Authenticate: Basic realm=a", "Proxy-Authenticate", ["-"; 3]),
    kept("3.1: Proxy-Authentication-Info", "Proxy-Authentication-Info: a", "Proxy-Authentication-Info", ["-"; 3]),
    kept("3.1: no-cache with a name", "Cache-Control: no-cache=\"x-new\"|X-New: a", "X-New", ["-"; 3]),
    kept("3.1: the others beside that", "Cache-Control: no-cache=\"x-new\"|X-Other: a", "X-Other", ["a", "-", "-"]),
    kept("3.1: private with names", "Cache-Control: private=\"a, x-new\"|X-New: a", "X-New", ["-"; 3]),
    kept("3.1: the others beside that", "Cache-Control: private=\"a, x-new\"|X-Other: a", "X-Other", ["a", "-", "-"]),
    kept("7.3: Set-Cookie", "Set-Cookie: a=b", "Set-Cookie", ["a=b", "-", "-"]),

    updated("3.2: a new field", "", "X-New: a", "X-New", ["a", "-", "a"]),
    updated("3.2: another value", "X-New: a", "X-New: b", "X-New", ["b", "a", "b"]),
    updated("3.2: in any case", "X-New: a", "x-new: b", "X-New", ["b", "a", "b"]),
    updated("3.2: several become one", "X-New: a|X-New: b", "X-New: c", "X-New", ["c", "a, b", "c"]),
    updated("3.2: one becomes several", "X-New: a", "X-New: b|X-New: c", "X-New", ["b, c", "a", "b, c"]),
    updated("3.2: one of which the 304 says nothing", "X-New: a", "X-Other: b", "X-New", ["a"; 3]),
    updated("3.2: Content-Type, which describes the body", "Content-Type: text/a", "Content-Type: text/b",
        "Content-Type", ["text/a"; 3]),
    updated("3.2: Content-Encoding", "Content-Encoding: br", "Content-Encoding: gzip", "Content-Encoding", ["br"; 3]),
    updated("3.2: Content-Encoding, new", "", "Content-Encoding: gzip", "Content-Encoding", ["-"; 3]),
    updated("3.2: Content-Range", "", "Content-Range: bytes 0-0/9", "Content-Range", ["-"; 3]),
    updated("3.2: Content-Length", "X-New: a", "Content-Length: 9000", "X-New", ["a"; 3]),
    updated("3.2, 3.1: what Connection names", "X-New: a", "Connection: X-New|X-New: b", "X-New", ["a"; 3]),
    updated("3.2, 3.1: Keep-Alive", "", "Keep-Alive: timeout=5", "Keep-Alive", ["-"; 3]),
    updated("3.2, 3.1: Proxy-Authenticate", "", "Proxy-Authenticate: Basic realm=a", "Proxy-Authenticate", ["-"; 3]),
    updated("3.2, 3.1: no-cache with a name", "X-New: a", "Cache-Control: max-age=60, no-cache=\"x-new\"|X-New: b",
        "X-New", ["-"; 3]),
    updated("3.2, 7.3: Set-Cookie", "", "Set-Cookie: a=b", "Set-Cookie", ["a=b", "-", "-"]),
    updated("3.2, 4.3.4: a weak tag of the same", "ETag: \"1\"", "ETag: W/\"1\"", "ETag",
        ["W/\"1\"", "\"1\"", "W/\"1\""]),
];

fn values(response: &Response, name: &str) -> String {
    let fields = response.headers.iter().filter(|(own, _)| own.eq_ignore_ascii_case(name));
    let values: Vec<&str> = fields.map(|(_, value)| &**value).collect();
    if values.is_empty() { "-".to_owned() } else { values.join(", ") }
}

fn fields_are_stored_and_updated_as_the_rules_say(driver: Driver) {
    let backend = origin();
    let mut wrong = Vec::new();
    for (rules, column) in CONFORMANCES.into_iter().zip(0..) {
        // What was purged softly is stale, whatever the rules say of ages.
        let more =
            format!("proxy_cache_conformance {rules}; proxy_cache_purge $http_x_purge; proxy_cache_purge_soft on;");
        let server = caching(driver, &backend, &more);
        let mut client = server.connect();
        for (number, row) in FIELDS.iter().enumerate() {
            let path = format!("/{number}");
            let tag = if row.stored.contains("ETag") { "" } else { "|ETag: \"1\"" };
            let stored = format!("{}|Cache-Control: max-age=60{tag}", row.stored);
            ask(&mut client, &path, &format!("X-Fields: {stored}\r\n"));
            if let Some(confirmed) = row.confirmed {
                assert_eq!(ask(&mut client, &path, "X-Purge: 1\r\n").status, 204, "{}, {rules}", row.section);
                let fields = format!("X-Status: 304 Not Modified\r\nX-Fields: {confirmed}\r\n");
                let response = ask(&mut client, &path, &fields);
                assert_eq!(values(&response, "X-Cache"), "REVALIDATED", "{}, {rules}", row.section);
            }
            let response = ask(&mut client, &path, "");
            let found = values(&response, row.field);
            if found != row.expected[column] {
                wrong.push(format!("{}, {rules}: {found}, not {}", row.section, row.expected[column]));
            }
        }
        // 3.1: trailers are no fields of the head, now or later.
        for _ in 0..2 {
            let response =
                ask(&mut client, "/trailers", "X-Fields: Cache-Control: max-age=60\r\nX-Trailers: X-New: a\r\n");
            if values(&response, "X-New") != "-" || response.body != b"a" {
                wrong.push(format!("3.1: trailers, {rules}: {response:?}"));
            }
        }
        server.stop();
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// A rule about requests that are not safe: the method, status and fields of the response, for `/N/a`; what is asked
/// for afterwards, and how the cache is used for that by the RFC's rules, by nginx's, and by default.
struct UnsafeRow {
    section: &'static str,
    method: &'static str,
    status: &'static str,
    fields: &'static str,
    asked: &'static str,
    expected: [&'static str; 3],
}

/// It is taken away, but for nginx, which knows no such rule.
const GOES: [&str; 3] = ["MISS", "HIT", "MISS"];

const STAYS: [&str; 3] = ["HIT"; 3];

const fn after(
    section: &'static str,
    [method, status, fields]: [&'static str; 3],
    asked: &'static str,
    expected: [&'static str; 3],
) -> UnsafeRow {
    UnsafeRow { section, method, status, fields, asked, expected }
}

#[rustfmt::skip]
const UNSAFE: &[UnsafeRow] = &[
    after("4.4: POST", ["POST", "200 OK", ""], "a", GOES),
    after("4.4: PUT", ["PUT", "200 OK", ""], "a", GOES),
    after("4.4: DELETE", ["DELETE", "200 OK", ""], "a", GOES),
    after("4.4: PATCH", ["PATCH", "200 OK", ""], "a", GOES),
    after("4.4: a method that nobody knows", ["CHANGE", "200 OK", ""], "a", GOES),
    after("4.4: OPTIONS is safe", ["OPTIONS", "200 OK", ""], "a", STAYS),
    after("4.4: PROPFIND is safe", ["PROPFIND", "200 OK", ""], "a", STAYS),
    after("4.4: HEAD is safe", ["HEAD", "200 OK", ""], "a", STAYS),
    after("4.4: another success", ["POST", "201 Created", ""], "a", GOES),
    after("4.4: without a body", ["DELETE", "204 No Content", ""], "a", GOES),
    after("4.4: a redirection", ["POST", "303 See Other", "Location: /N/c"], "a", GOES),
    after("4.4: the client's error", ["POST", "404 Not Found", ""], "a", STAYS),
    after("4.4: the server's error", ["POST", "500 Oops", ""], "a", STAYS),
    after("4.4: other URIs", ["POST", "200 OK", ""], "b", STAYS),
    after("4.4: another query", ["POST", "200 OK", ""], "a?b", STAYS),
    after("4.4: Location", ["POST", "201 Created", "Location: http://a/N/b"], "b", GOES),
    after("4.4: Location, a path", ["POST", "303 See Other", "Location: /N/b"], "b", GOES),
    after("4.4: Location with a fragment", ["POST", "303 See Other", "Location: /N/b#c"], "b", GOES),
    after("4.4: Location with a query", ["POST", "303 See Other", "Location: /N/a?b"], "a?b", GOES),
    after("4.4: Content-Location", ["PUT", "200 OK", "Content-Location: http://a/N/b"], "b", GOES),
    after("4.4: Content-Location, a path", ["PUT", "200 OK", "Content-Location: /N/b"], "b", GOES),
    after("4.4: Location, of an error", ["POST", "400 Bad Request", "Location: /N/b"], "b", STAYS),
    after("4.4: another host must not", ["POST", "201 Created", "Location: http://b/N/b"], "b", STAYS),
    after("4.4: nor one that begins so", ["POST", "201 Created", "Location: http://a.b/N/b"], "b", STAYS),
    after("4.4: nor another port", ["POST", "201 Created", "Location: http://a:81/N/b"], "b", STAYS),
    after("4.4: nor another scheme", ["POST", "201 Created", "Location: https://a/N/b"], "b", STAYS),
    after("4.4: nor without a scheme", ["POST", "201 Created", "Location: //b/N/b"], "b", STAYS),
];

fn requests_that_are_not_safe_invalidate_as_the_rules_say(driver: Driver) {
    const FRESH: &str = "X-Fields: Cache-Control: max-age=60";
    let backend = origin();
    let mut wrong = Vec::new();
    for (rules, column) in CONFORMANCES.into_iter().zip(0..) {
        let server = caching(driver, &backend, &format!("proxy_cache_conformance {rules};"));
        for (number, row) in UNSAFE.iter().enumerate() {
            let mut client = server.connect();
            let path = format!("/{number}/{}", row.asked);
            ask(&mut client, &path, &format!("{FRESH}\r\n"));
            let fields = row.fields.replace('N', &number.to_string());
            let fields = format!("X-Status: {}\r\nX-Fields: {fields}\r\nContent-Length: 0\r\n", row.status);
            client.send(format!("{} /{number}/a HTTP/1.1\r\nHost: a\r\n{fields}\r\n", row.method));
            let response = if row.method == "HEAD" { client.response_to_head() } else { client.response() };
            let is_from_upstream = row.status.starts_with(&response.status.to_string());
            let found = values(&ask(&mut client, &path, ""), "X-Cache");
            if found != row.expected[column] || !is_from_upstream {
                wrong.push(format!(
                    "{}, {rules}: {found}, not {}; {}",
                    row.section, row.expected[column], response.status
                ));
            }
        }
        // All variants of a URI.
        let mut client = server.connect();
        let ask_variant = |client: &mut Client, value: &str| {
            values(&ask(client, "/vary", &format!("{FRESH}|Vary: X-A\r\nX-A: {value}\r\n")), "X-Cache")
        };
        for value in ["1", "2"] {
            ask_variant(&mut client, value);
        }
        client.ask("POST /vary HTTP/1.1\r\nHost: a\r\nContent-Length: 0\r\n\r\n");
        let found = ["1", "2"].map(|value| ask_variant(&mut client, value));
        if found != [GOES[column]; 2] {
            wrong.push(format!("4.4: variants, {rules}: {found:?}"));
        }
        server.stop();
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// The same where `proxy_pass` replaces a part of the URI: clients ask for `/O/N/a` of the host `a`, the server `S` is
/// asked for `/I/N/a`.
#[rustfmt::skip]
const REPLACED: &[UnsafeRow] = &[
    after("4.4: the server's URL", ["POST", "201 Created", "Location: http://S/I/N/b"], "b", GOES),
    after("4.4: the server's URL, in capitals", ["POST", "201 Created", "Location: HTTP://S/I/N/b"], "b", GOES),
    after("4.4: the server's path", ["POST", "201 Created", "Location: /I/N/b"], "b", GOES),
    after("4.4: the client's URL", ["POST", "201 Created", "Location: http://a/O/N/b"], "b", GOES),
    after("4.4: the client's path", ["POST", "303 See Other", "Location: /O/N/b#c"], "b", GOES),
    after("4.4: Content-Location, the server's URL", ["PUT", "200 OK", "Content-Location: http://S/I/N/b"], "b", GOES),
    after("4.4: Content-Location, the server's path", ["PUT", "200 OK", "Content-Location: /I/N/b?c"], "b?c", GOES),
    after("4.4: another path of the server", ["POST", "201 Created", "Location: http://S/X/N/b"], "b", STAYS),
    after("4.4: the client's path on the server", ["POST", "201 Created", "Location: http://S/O/N/b"], "b", STAYS),
    after("4.4: another server", ["POST", "201 Created", "Location: http://b/I/N/b"], "b", STAYS),
    after("4.4: the server's other scheme", ["POST", "201 Created", "Location: https://S/I/N/b"], "b", STAYS),
];

fn uris_that_are_replaced_are_invalidated_by_either_name(driver: Driver) {
    const FRESH: &str = "X-Fields: Cache-Control: max-age=60";
    let backend = origin();
    let mut wrong = Vec::new();
    for (rules, column) in CONFORMANCES.into_iter().zip(0..) {
        let text = "proxy_cache_path %DIR%/cache keys_zone=one:1m; proxy_cache_conformance RULES;
            proxy_cache_disk_timeout 60s; proxy_cache_lock_timeout 60s;
            server { listen %UNIX%; proxy_cache one; add_header X-Cache $upstream_cache_status always;
            location /outer-1/ { proxy_pass http://B/inner-1/; }
            location /outer-2/ { proxy_pass http://B/inner-2/; proxy_cache_key $scheme$host$request_uri; }
            location /3/ { proxy_pass http://B/inner$request_uri; }
            location /4/ { proxy_pass http://B/inner$request_uri; proxy_cache_key $request_uri; } }";
        let text = text.replace('B', &backend.address).replace("RULES", rules);
        let server = Setup::http(driver, &text).start();
        // What clients ask for, and what the server is asked for.
        let places = [("outer-1", "inner-1"), ("outer-2", "inner-2"), ("3", "inner/3"), ("4", "inner/4")];
        for ((outer, inner), (row, number)) in
            places.into_iter().flat_map(|place| REPLACED.iter().zip(1..).map(move |row| (place, row)))
        {
            let mut client = server.connect();
            let path = format!("/{outer}/{number}/{}", row.asked);
            ask(&mut client, &path, &format!("{FRESH}\r\n"));
            let fields = row.fields.replace("/N/", &format!("/{number}/"));
            let fields = fields.replace("/O/", &format!("/{outer}/")).replace("/I/", &format!("/{inner}/"));
            let fields = fields.replace("//S/", &format!("//{}/", backend.address));
            let fields = format!("X-Status: {}\r\nX-Fields: {fields}\r\nContent-Length: 0\r\n", row.status);
            let asked = format!("{} /{outer}/{number}/a HTTP/1.1\r\nHost: a\r\n{fields}\r\n", row.method);
            let response = client.ask(asked);
            let is_from_upstream = row.status.starts_with(&response.status.to_string());
            let found = values(&ask(&mut client, &path, ""), "X-Cache");
            if found != row.expected[column] || !is_from_upstream {
                wrong.push(format!("{}, /{outer}/, {rules}: {found}; {}", row.section, response.status));
            }
        }
        server.stop();
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// A rule about a response to HEAD that comes from the server although a response to GET is stored: the fields of that,
/// the status and fields of the one to HEAD; whether a GET afterwards finds it in the cache, and what its `X-New` is
/// (`-` if it is not there), by the RFC's rules, by nginx's, and by default.
struct HeadRow {
    section: &'static str,
    stored: &'static str,
    status: &'static str,
    told: &'static str,
    expected: [&'static str; 3],
}

const fn head(section: &'static str, stored: &'static str, told: &'static str, expected: [&'static str; 3]) -> HeadRow {
    HeadRow { section, stored, status: "200 OK", told, expected }
}

/// What is stored has the fields of the response to HEAD; nginx stores that, which is no answer to a GET.
const UPDATED: [&str; 3] = ["HIT b", "asked -", "HIT b"];

/// The server is asked again.
const STALE: [&str; 3] = ["asked -"; 3];

#[rustfmt::skip]
const HEADS: &[HeadRow] = &[
    head("4.3.5: the same tag", "ETag: \"1\"", "ETag: \"1\"", UPDATED),
    head("4.3.5: another tag", "ETag: \"1\"", "ETag: \"2\"", STALE),
    head("4.3.5: a tag, and none is stored", "X-A: a", "ETag: \"2\"", STALE),
    head("4.3.5: the same date", "Last-Modified: Thu, 26 Nov 2026 03:00:00 GMT",
        "Last-Modified: Thu, 26 Nov 2026 03:00:00 GMT", UPDATED),
    head("4.3.5: another date", "Last-Modified: Thu, 26 Nov 2026 03:00:00 GMT",
        "Last-Modified: Thu, 26 Nov 2026 04:00:00 GMT", STALE),
    head("4.3.5: the same tag and another date", "ETag: \"1\"",
        "ETag: \"1\"|Last-Modified: Thu, 26 Nov 2026 04:00:00 GMT", STALE),
    head("4.3.5: the same length", "X-A: a", "Content-Length: 10", UPDATED),
    head("4.3.5: another length", "ETag: \"1\"", "ETag: \"1\"|Content-Length: 9000", STALE),
    head("4.3.5: nothing to compare", "X-A: a", "X-A: b", UPDATED),
    head("4.3.5: it may not be stored any more", "ETag: \"1\"", "ETag: \"1\"|Cache-Control: no-store",
        ["asked -", "HIT a", "asked -"]),
    head("4.3.5: it depends on other fields", "ETag: \"1\"|Vary: X-A", "ETag: \"1\"|Vary: X-B",
        STALE),
    HeadRow { status: "404 Not Found", ..head("4.3.5: an error", "ETag: \"1\"", "Cache-Control: no-store",
        ["HIT a"; 3]) },
];

/// Whether a response came out of the cache, or the server was asked.
fn used(response: &Response) -> &'static str {
    if values(response, "X-Cache") == "HIT" { "HIT" } else { "asked" }
}

fn responses_to_head_freshen_or_invalidate_as_the_rules_say(driver: Driver) {
    let backend = origin();
    let mut wrong = Vec::new();
    for (rules, column) in CONFORMANCES.into_iter().zip(0..) {
        let more =
            format!("proxy_cache_conformance {rules}; proxy_cache_convert_head off; proxy_cache_bypass $http_x_by;");
        let server = caching(driver, &backend, &more);
        let mut client = server.connect();
        let head = |client: &mut Client, path: &str, fields: &str| {
            client.send(format!("HEAD {path} HTTP/1.1\r\nHost: a\r\n{fields}\r\n"));
            client.response_to_head()
        };
        for (number, row) in HEADS.iter().enumerate() {
            let path = format!("/{number}");
            let stored = format!("X-Fields: Cache-Control: max-age=60|X-New: a|{}\r\n", row.stored);
            ask(&mut client, &path, &stored);
            let lifetime = if row.told.contains("Cache-Control") { "" } else { "|Cache-Control: max-age=60" };
            let told = format!("X-Fields: X-New: b|{}{lifetime}\r\n", row.told);
            let response = head(&mut client, &path, &format!("X-By: 1\r\nX-Status: {}\r\n{told}", row.status));
            if values(&response, "X-Cache") != "BYPASS" || values(&response, "X-New") != "b" {
                wrong.push(format!("{}, {rules}: {response:?}", row.section));
            }
            let response = ask(&mut client, &path, "");
            let found = format!("{} {}", used(&response), values(&response, "X-New"));
            if found != row.expected[column] {
                wrong.push(format!("{}, {rules}: {found}, not {}", row.section, row.expected[column]));
            }
        }
        // One that is stale is fresh again; a HEAD that comes out of the cache changes nothing.
        let stored = format!("X-Fields: {OLD}|X-New: a\r\n");
        ask(&mut client, "/old", &stored);
        head(&mut client, "/old", "X-Fields: ETag: \"1\"|X-New: b|Cache-Control: max-age=60\r\n");
        let response = ask(&mut client, "/old", "");
        let found = format!("{} {}", values(&response, "X-Cache"), values(&response, "X-New"));
        let expected = ["HIT b", "HIT a", "HIT b"][column];
        if found != expected {
            wrong.push(format!("4.3.5: one that is stale, {rules}: {found}, not {expected}"));
        }
        // Only the variant that the HEAD is about.
        for value in ["1", "2"] {
            let stored = "X-Fields: Cache-Control: max-age=60|Vary: X-A|ETag: \"1\"";
            ask(&mut client, "/vary", &format!("{stored}\r\nX-A: {value}\r\n"));
        }
        head(
            &mut client,
            "/vary",
            "X-By: 1\r\nX-A: 1\r\nX-Fields: Vary: X-A|ETag: \"2\"|Cache-Control: max-age=60\r\n",
        );
        let found = ["1", "2"].map(|value| used(&ask(&mut client, "/vary", &format!("X-A: {value}\r\n"))));
        if found != ["asked", "HIT"] {
            wrong.push(format!("4.3.5: variants, {rules}: {found:?}"));
        }
        server.stop();
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
