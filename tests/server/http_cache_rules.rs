//! RFC 9111 and related rules as tables, one row for each rule: the section, the situation, and the outcome with each
//! `proxy_cache_conformance`. Rules on a response's own fields alone are in `http-cache/src/policy/table.rs`.
//!
//! With `GALE_TEST_NGINX=/usr/sbin/nginx` that program gets the same requests, and its answers are compared with the
//! column of nginx.

use std::process::{Child, Command};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use crate::support::{
    self, Backend, Client, Directory, Driver, Response, Server, Serving, Setup, skip, with_each_driver,
};

with_each_driver!(
    responses_are_stored_as_the_rules_say,
    stored_responses_are_used_as_the_rules_say,
    fields_are_stored_and_updated_as_the_rules_say,
    servers_are_asked_about_stored_responses_as_the_rules_say,
    answers_about_stored_responses_are_taken_as_the_rules_say,
    conditions_of_clients_are_answered_as_the_rules_say,
    date_of_stored_response_is_kept_by_the_rfc,
    requests_that_are_not_safe_invalidate_as_the_rules_say,
    uris_that_are_replaced_are_invalidated_by_either_name,
    responses_to_head_freshen_or_invalidate_as_the_rules_say,
);

/// In the order of the tables' columns: the RFC's rules, nginx's, and the default.
const CONFORMANCES: [&str; 3] = ["rfc9111", "nginx", "mixed"];

/// Index of nginx's column.
const OF_NGINX: usize = 1;

/// A table: additional directives of its location for Gale and nginx and for Gale alone, and the function that checks
/// its rows.
struct Table {
    both: &'static str,
    gale: &'static str,
    run: fn(&Tried, &Serving) -> Vec<Found>,
}

/// A row's name and outcome.
struct Found {
    section: String,
    expected: String,
    found: String,
}

impl Found {
    fn new(section: &str, expected: impl Into<String>, found: impl Into<String>) -> Found {
        Found { section: section.to_owned(), expected: expected.into(), found: found.into() }
    }
}

/// Subject of a test: Gale with the rules of a column, or nginx itself.
enum Tried {
    Gale(Server, usize),
    Nginx(Nginx),
}

impl Tried {
    fn connect(&self) -> Client {
        match self {
            Tried::Gale(server, _) => server.connect(),
            Tried::Nginx(nginx) => Client::unix(&nginx.directory.path().join("nginx.sock")),
        }
    }

    fn column(&self) -> usize {
        match self {
            Tried::Gale(_, column) => *column,
            Tried::Nginx(_) => OF_NGINX,
        }
    }

    /// Fields of a response that [`Tried::make_stale`] makes stale, or that is stale a second after it was stored.
    fn lived(&self, fields: &str) -> String {
        let short = if matches!(self, Tried::Nginx(_)) { "|X-Accel-Expires: 1" } else { "" };
        format!("{fields}|Cache-Control: max-age=60{short}")
    }

    /// Makes the stored responses of these paths stale, whatever the rules say about ages. They need the fields of
    /// [`Tried::lived`].
    fn make_stale<'p>(&self, paths: impl Iterator<Item = &'p str>) {
        let mut client = self.connect();
        match self {
            Tried::Gale(..) => {
                for path in paths {
                    assert_eq!(ask(&mut client, path, "X-Purge: 1\r\n").status, 204, "{path}");
                }
            }
            Tried::Nginx(_) => {
                let end = Instant::now() + support::DEADLINE;
                ask(&mut client, "/last", &format!("X-Fields: {}\r\n", self.lived("")));
                while used(&ask(&mut client, "/last", "")) == "HIT" {
                    assert!(Instant::now() < end, "it is not stale in time");
                }
            }
        }
    }
}

/// Checks a table with each `proxy_cache_conformance`.
fn try_each(driver: Driver, table: &Table) {
    let backend = origin();
    let mut wrong = Vec::new();
    for (rules, column) in CONFORMANCES.into_iter().zip(0..) {
        let more = format!("{} {} proxy_cache_conformance {rules};", table.both, table.gale);
        let text = format!("proxy_cache_disk_timeout 60s; proxy_cache_lock_timeout 60s; {}", http(&backend, &more));
        let tried = Tried::Gale(Setup::http(driver, &text).start(), column);
        for Found { section, expected, found } in (table.run)(&tried, &backend) {
            if found != expected {
                wrong.push(format!("{section}, {rules}: {found}, not {expected}"));
            }
        }
        if let Tried::Gale(server, _) = tried {
            server.stop();
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Contents of the http block.
fn http(backend: &Serving, more: &str) -> String {
    let text = "proxy_cache_path %DIR%/cache keys_zone=one:1m; proxy_cache_key $request_uri;
        server { listen %UNIX%; proxy_cache one; add_header X-Cache $upstream_cache_status always;
        proxy_cache_revalidate on; MORE
        location / { proxy_pass http://BEHIND; }
        location /usable/ { proxy_cache_use_stale http_503 error; proxy_pass http://BEHIND; } }";
    text.replace("BEHIND", &backend.address).replace("MORE", more)
}

/// A running nginx.
struct Nginx {
    directory: Directory,
    process: Child,
}

impl Nginx {
    fn start(program: &std::ffi::OsStr, text: &str) -> Nginx {
        let directory = Directory::new();
        let places = ["body", "proxy", "fastcgi", "uwsgi", "scgi"].map(|kind| match kind {
            "body" => "client_body_temp_path %DIR%/body;".to_owned(),
            kind => format!("{kind}_temp_path %DIR%/{kind};"),
        });
        let main = "daemon off; master_process off; pid %DIR%/pid; events {}";
        let places = places.concat();
        let text = format!("{main} http {{ access_log off; keepalive_requests 1000000; {places} {text} }}");
        directory.write("nginx.conf", directory.replaced(&text.replace("%UNIX%", "unix:%DIR%/nginx.sock")));
        let at = |name: &str| directory.path().join(name);
        let mut command = Command::new(program);
        command.arg("-p").arg(directory.path()).arg("-c").arg(at("nginx.conf")).arg("-e").arg(at("error.log"));
        let process = command.spawn().expect("nginx starts");
        let socket = at("nginx.sock");
        directory.wait_until("nginx listens", |_| std::os::unix::net::UnixStream::connect(&socket).is_ok());
        Nginx { directory, process }
    }
}

impl Drop for Nginx {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Intended differences between nginx and `proxy_cache_conformance nginx`, by the beginnings of sections; the first
/// match counts. Decision 0028 has the reasons.
const DIFFERENCES: &[(&str, &str)] = &[
    ("3: a 304 that nobody has asked for", "HIT"),
    ("3.1: what Connection names", "a"),
    ("3.1: Proxy-Connection", "close"),
    ("3.1: TE", "trailers"),
    ("3.1: Upgrade", "a"),
    ("3.1: Proxy-Authenticate", "Basic realm=a"),
    ("3.1: Proxy-Authentication-Info", "a"),
    ("3.2, 3.1: no-cache with a name", "a"),
    ("3.4: a part, and the server says that there are none", "HIT 206"),
    ("4.3.4: a 304 that forbids to store", "REVALIDATED 200, HIT 1"),
    ("4.3.5: it may not be stored any more", "HIT a"),
    ("4.3.5: an error", "HIT a"),
    ("4.3.5: ", "HIT b"),
    ("4.3.5, variant 1", "HIT"),
];

#[test]
fn nginx_agrees_with_its_column() {
    let Some(program) = std::env::var_os("GALE_TEST_NGINX") else {
        skip("GALE_TEST_NGINX names no nginx");
        return;
    };
    let backend = origin();
    let mut wrong = Vec::new();
    for table in [&STORING, &USING, &KEEPING, &ASKING, &TAKING, &CONDITIONAL, &INVALIDATING, &HEAD] {
        let tried = Tried::Nginx(Nginx::start(&program, &http(&backend, table.both)));
        for Found { section, expected, found } in (table.run)(&tried, &backend) {
            let difference = DIFFERENCES.iter().find(|(beginning, _)| section.starts_with(beginning));
            let expected = difference.map_or(&*expected, |(_, found)| found);
            if found != expected {
                wrong.push(format!("{section}: {found}, not {expected}"));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// A server that answers with the request's `X-Fields` (separated by bars) and `X-Status`, and with trailers if there
/// is an `X-Trailers`. The body is `X-Number`, or the number of the request.
fn origin() -> Serving {
    let count = AtomicU64::new(0);
    Backend::tcp().serve(move |asked, client| {
        let count = count.fetch_add(1, Ordering::SeqCst) + 1;
        let number: u64 = asked.header("X-Number").map_or(count, |number| number.parse().unwrap());
        if asked.header("X-Close").is_some() {
            return false;
        }
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

/// Requests a path with these fields, each ending in CR LF.
fn ask(client: &mut Client, path: &str, fields: &str) -> Response {
    client.ask(format!("GET {path} HTTP/1.1\r\nHost: a\r\n{fields}\r\n"))
}

/// A rule about using a stored response: the storing request (fields of request and response), the next request's
/// fields, and the cache status of its answer with each `proxy_cache_conformance`; `504` is that status code.
struct Row {
    section: &'static str,
    /// Location of the request.
    place: &'static str,
    first: &'static str,
    stored: &'static str,
    asked: &'static str,
    expected: [&'static str; 3],
}

const fn row(section: &'static str, stored: &'static str, asked: &'static str, expected: [&'static str; 3]) -> Row {
    Row { section, place: "", first: "", stored, asked, expected }
}

/// A row for the use of stale responses when the server fails.
const fn usable(section: &'static str, stored: &'static str, expected: [&'static str; 3]) -> Row {
    Row { place: "/usable", ..row(section, stored, "X-Status: 503 Oops\r\n", expected) }
}

/// Makes the server close the connection without an answer.
const CLOSES: &str = "X-Close: 1\r\n";

/// The response arrives with an age of twenty seconds and stays fresh for forty more.
const YOUNG: &str = "Cache-Control: max-age=60|Age: 20";

/// The response arrives stale, by thirty seconds; nginx ignores its age.
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
    Row { first: "Cache-Control: no-store\r\n", ..row("5.2.1.5: no-store, and nothing is stored yet", YOUNG, "",
        ["MISS", "HIT", "HIT"]) },
    row("5.2.1.6: no-transform", YOUNG, "Cache-Control: no-transform\r\n", ["HIT", "HIT", "HIT"]),
    row("5.2.3: a directive that nobody knows", YOUNG, "Cache-Control: no-stale\r\n", ["HIT", "HIT", "HIT"]),
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
    // Keys that contain the range are tested in `http_cache_bounds.rs`.
    Row { first: "X-Status: 206 Partial Content\r\n", ..row("3.3: a part does not answer for the whole",
        "Cache-Control: max-age=60|Content-Range: bytes 0-9/20", "", ["MISS", "HIT", "MISS"]) },
    row("4.1: Vary *", "Cache-Control: max-age=60|Vary: *", "", ["MISS", "MISS", "MISS"]),
    row("4.2.4: stale-if-error, and the server fails", "Cache-Control: max-age=60, stale-if-error=3000|Age: 90",
        "X-Status: 503 Oops\r\n", ["STALE", "HIT", "EXPIRED"]),
    row("4.2.4: nothing allows stale use", OLD, "X-Status: 503 Oops\r\n", ["EXPIRED", "HIT", "EXPIRED"]),
    usable("4.2.4: the location allows stale use", OLD, ["STALE", "HIT", "STALE"]),
    usable("5.2.2.2: must-revalidate", "Cache-Control: max-age=60, must-revalidate|Age: 90|ETag: \"1\"",
        ["EXPIRED", "HIT", "STALE"]),
    usable("5.2.2.8: proxy-revalidate", "Cache-Control: max-age=60, proxy-revalidate|Age: 90|ETag: \"1\"",
        ["EXPIRED", "HIT", "STALE"]),
    usable("5.2.2.10: s-maxage", "Cache-Control: s-maxage=60|Age: 90|ETag: \"1\"", ["EXPIRED", "HIT", "STALE"]),
    Row { asked: CLOSES, ..usable("4.2.4: no answer, and the location allows stale use", OLD,
        ["STALE", "HIT", "STALE"]) },
    Row { asked: CLOSES, ..usable("5.2.2.2: must-revalidate, and no answer",
        "Cache-Control: max-age=60, must-revalidate|Age: 90|ETag: \"1\"", ["EXPIRED", "HIT", "STALE"]) },
    Row { asked: CLOSES, ..usable("5.2.2.8: proxy-revalidate, and no answer",
        "Cache-Control: max-age=60, proxy-revalidate|Age: 90|ETag: \"1\"", ["EXPIRED", "HIT", "STALE"]) },
    Row { asked: CLOSES, ..usable("5.2.2.10: s-maxage, and no answer",
        "Cache-Control: s-maxage=60|Age: 90|ETag: \"1\"", ["EXPIRED", "HIT", "STALE"]) },
    Row { asked: CLOSES, ..usable("5.2.2.4: no-cache, and no answer",
        "Cache-Control: no-cache, max-age=60|ETag: \"1\"", ["EXPIRED", "MISS", "MISS"]) },
    row("4.3.4: a 304 renews it", OLD, "X-Status: 304 Not Modified\r\n", ["REVALIDATED", "HIT", "REVALIDATED"]),
    row("9213 2.2: CDN-Cache-Control", "CDN-Cache-Control: max-age=60|Cache-Control: no-store", "",
        ["HIT", "MISS", "HIT"]),
    row("9213 2.1: an invalid CDN-Cache-Control", "CDN-Cache-Control: no-store=|Cache-Control: max-age=60", "",
        ["HIT", "HIT", "HIT"]),
];

const USING: Table = Table { both: "proxy_cache_bypass $http_x_by;", gale: "", run: use_stored };

fn stored_responses_are_used_as_the_rules_say(driver: Driver) {
    try_each(driver, &USING);
}

fn use_stored(tried: &Tried, _: &Serving) -> Vec<Found> {
    let mut client = tried.connect();
    let mut founds = Vec::new();
    for (number, row) in RULES.iter().enumerate() {
        let path = format!("{}/{number}", row.place);
        ask(&mut client, &path, &format!("X-Fields: {}\r\n{}", row.stored, row.first));
        let response = ask(&mut client, &path, row.asked);
        let found = if response.status == 504 { "504".to_owned() } else { values(&response, "X-Cache") };
        // §4, §5.1
        if found == "HIT" && tried.column() != OF_NGINX {
            let told = if response.header("Age").is_some() { "an Age" } else { "none" };
            founds.push(Found::new(row.section, "an Age", told));
        }
        founds.push(Found::new(row.section, row.expected[tried.column()], found));
    }
    founds
}

/// A rule about the fields of a stored response: its original fields, those of a later 304 if there is one, and the
/// value of one field in a hit with each `proxy_cache_conformance`; `-` if the field is absent.
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

/// A softly purged response is stale, whatever the rules say about ages.
const SOFT_PURGES: &str = "proxy_cache_purge $http_x_purge; proxy_cache_purge_soft on;";

const KEEPING: Table = Table { both: "", gale: SOFT_PURGES, run: keep_fields };

fn fields_are_stored_and_updated_as_the_rules_say(driver: Driver) {
    try_each(driver, &KEEPING);
}

fn keep_fields(tried: &Tried, _: &Serving) -> Vec<Found> {
    let mut client = tried.connect();
    let mut founds = Vec::new();
    let rows: Vec<_> = FIELDS.iter().enumerate().map(|(number, row)| (format!("/{number}"), row)).collect();
    let confirmed = || rows.iter().filter_map(|(path, row)| Some((&**path, row.section, row.confirmed?)));
    for (path, row) in &rows {
        let tag = if row.stored.contains("ETag") { "" } else { "|ETag: \"1\"" };
        let stored = format!("{}{tag}", row.stored);
        let stored = match row.confirmed {
            Some(_) => tried.lived(&stored),
            None => format!("{stored}|Cache-Control: max-age=60"),
        };
        ask(&mut client, path, &format!("X-Fields: {stored}\r\n"));
    }
    tried.make_stale(confirmed().map(|(path, ..)| path));
    for (path, section, told) in confirmed() {
        let lifetime = if told.contains("Cache-Control") { "" } else { "|Cache-Control: max-age=60" };
        let fields = format!("X-Status: 304 Not Modified\r\nX-Fields: {told}{lifetime}\r\n");
        let response = ask(&mut client, path, &fields);
        founds.push(Found::new(&format!("confirmed, {section}"), "REVALIDATED", values(&response, "X-Cache")));
    }
    for (path, row) in &rows {
        let response = ask(&mut client, path, "");
        founds.push(Found::new(row.section, row.expected[tried.column()], values(&response, row.field)));
    }
    // Trailers never become fields of the head.
    for _ in 0..2 {
        let asked = "X-Fields: Cache-Control: max-age=60\r\nX-Trailers: X-New: a\r\n";
        let response = ask(&mut client, "/trailers", asked);
        let found = format!("{} {}", values(&response, "X-New"), response.text());
        founds.push(Found::new("3.1: trailers", "- a", found));
    }
    founds
}

/// A rule about storing: the request's method, the status and fields of the response, and the cache status of a GET
/// afterwards.
struct StoringRow {
    section: &'static str,
    method: &'static str,
    status: &'static str,
    fields: &'static str,
    /// Fields of the request.
    asked: &'static str,
    expected: [&'static str; 3],
}

const fn stored(
    section: &'static str,
    [method, status]: [&'static str; 2],
    fields: &'static str,
    expected: [&'static str; 3],
) -> StoringRow {
    StoringRow { section, method, status, fields, asked: "", expected }
}

const FRESH: &str = "Cache-Control: max-age=60";

#[rustfmt::skip]
const STORED: &[StoringRow] = &[
    stored("3: GET", ["GET", "200 OK"], FRESH, ["HIT"; 3]),
    stored("3: HEAD, for which GET is sent", ["HEAD", "200 OK"], FRESH, ["HIT"; 3]),
    stored("3: POST", ["POST", "200 OK"], FRESH, ["MISS"; 3]),
    stored("3: POST, and the URI that its answer is of", ["POST", "200 OK"],
        "Cache-Control: max-age=60|Content-Location: /3", ["HIT", "MISS", "MISS"]),
    stored("3: POST, and the URI of something else", ["POST", "200 OK"],
        "Cache-Control: max-age=60|Content-Location: /elsewhere", ["MISS"; 3]),
    stored("3: POST, and nothing says for how long", ["POST", "200 OK"], "Content-Location: /5", ["MISS"; 3]),
    stored("3: POST that has created something", ["POST", "201 Created"],
        "Cache-Control: max-age=60|Content-Location: /6", ["MISS"; 3]),
    stored("3: PUT", ["PUT", "200 OK"], FRESH, ["MISS"; 3]),
    stored("3: PATCH", ["PATCH", "200 OK"], FRESH, ["MISS"; 3]),
    stored("3: DELETE", ["DELETE", "200 OK"], FRESH, ["MISS"; 3]),
    stored("3: OPTIONS", ["OPTIONS", "200 OK"], FRESH, ["MISS"; 3]),
    stored("3: PROPFIND", ["PROPFIND", "207 Multi-Status"], FRESH, ["MISS"; 3]),
    stored("3: a method that nobody knows", ["CHANGE", "200 OK"], FRESH, ["MISS"; 3]),
    stored("3: no content", ["GET", "204 No Content"], FRESH, ["HIT"; 3]),
    stored("3: a redirection", ["GET", "301 Moved Permanently"], "Cache-Control: max-age=60|Location: /", ["HIT"; 3]),
    stored("3: the client's error", ["GET", "404 Not Found"], FRESH, ["HIT"; 3]),
    stored("3: the server's error", ["GET", "500 Oops"], FRESH, ["HIT"; 3]),
    stored("3: a status that nobody knows", ["GET", "299 New"], FRESH, ["HIT"; 3]),
    stored("3: a 304 that nobody has asked for", ["GET", "304 Not Modified"], FRESH, ["MISS"; 3]),
    stored("3: nothing says for how long", ["GET", "200 OK"], "X-New: a", ["MISS"; 3]),
    stored("3: no-store", ["GET", "200 OK"], "Cache-Control: no-store", ["MISS"; 3]),
    StoringRow { asked: "Cache-Control: no-store\r\n", ..stored("5.2.1.5: POST, and the URI that its answer is of",
        ["POST", "200 OK"], "Cache-Control: max-age=60|Content-Location: /21", ["MISS"; 3]) },
];

const STORING: Table = Table { both: "", gale: "", run: store };

fn responses_are_stored_as_the_rules_say(driver: Driver) {
    try_each(driver, &STORING);
}

fn store(tried: &Tried, _: &Serving) -> Vec<Found> {
    let try_row = |(number, row): (usize, &StoringRow)| {
        let mut client = tried.connect();
        let path = format!("/{number}");
        let (method, status, fields) = (row.method, row.status, row.fields);
        let length = if matches!(method, "GET" | "HEAD") { "" } else { "Content-Length: 0\r\n" };
        let fields = format!("X-Status: {status}\r\nX-Fields: {fields}\r\n{}{length}", row.asked);
        let response = client.ask(format!("{method} {path} HTTP/1.1\r\nHost: a\r\n{fields}\r\n"));
        assert!(status.starts_with(&response.status.to_string()), "{}: {}", row.section, response.status);
        Found::new(row.section, row.expected[tried.column()], values(&ask(&mut client, &path, ""), "X-Cache"))
    };
    STORED.iter().enumerate().map(try_row).collect()
}

/// Date of a stored response in the tables below.
const CHANGED: &str = "Last-Modified: Thu, 26 Nov 2026 03:00:00 GMT";

/// A rule about validation: status and fields of the stored response, the client's fields, and the `If-None-Match` and
/// `If-Modified-Since` that the server gets.
struct AskingRow {
    section: &'static str,
    status: &'static str,
    stored: &'static str,
    asked: &'static str,
    expected: [&'static str; 3],
}

const fn asking(section: &'static str, stored: &'static str, asked: &'static str, expected: &'static str) -> AskingRow {
    AskingRow { section, status: "200 OK", stored, asked, expected: [expected; 3] }
}

#[rustfmt::skip]
const ASKED: &[AskingRow] = &[
    asking("4.3.1: a tag", "ETag: \"1\"", "", "\"1\" -"),
    asking("4.3.1: a weak tag", "ETag: W/\"1\"", "", "W/\"1\" -"),
    asking("4.3.1: a date", CHANGED, "", "- Thu, 26 Nov 2026 03:00:00 GMT"),
    asking("4.3.1: both", "ETag: \"1\"|Last-Modified: Thu, 26 Nov 2026 03:00:00 GMT", "",
        "\"1\" Thu, 26 Nov 2026 03:00:00 GMT"),
    asking("4.3.1: neither", "X-New: a", "", "- -"),
    asking("4.3.1: a date that is none", "Last-Modified: yesterday", "", "- -"),
    asking("4.3.1: the client's conditions are its own", "ETag: \"1\"",
        "If-None-Match: \"2\"\r\nIf-Modified-Since: Thu, 26 Nov 2026 04:00:00 GMT\r\n", "\"1\" -"),
    asking("4.3.1: the client's conditions, and nothing to compare", "X-New: a", "If-None-Match: \"2\"\r\n", "- -"),
    // Validation is not required. (nginx's rule)
    AskingRow { status: "404 Not Found", ..asking("4.3.1: an error", "ETag: \"1\"", "", "- -") },
];

const ASKING: Table = Table { both: "", gale: SOFT_PURGES, run: ask_servers };

fn servers_are_asked_about_stored_responses_as_the_rules_say(driver: Driver) {
    try_each(driver, &ASKING);
}

fn ask_servers(tried: &Tried, backend: &Serving) -> Vec<Found> {
    let mut client = tried.connect();
    let rows: Vec<_> = ASKED.iter().enumerate().map(|(number, row)| (format!("/{number}"), row)).collect();
    for (path, row) in &rows {
        let fields = format!("X-Status: {}\r\nX-Fields: {}\r\n", row.status, tried.lived(row.stored));
        ask(&mut client, path, &fields);
    }
    tried.make_stale(rows.iter().map(|(path, _)| &**path));
    let mut try_row = |(path, row): &(String, &AskingRow)| {
        ask(&mut client, path, row.asked);
        let (_, asked) = backend.asked().pop().expect("a request");
        assert_eq!(asked.target, *path, "{}", row.section);
        let condition = |name: &str| asked.header(name).unwrap_or("-").to_owned();
        let found = format!("{} {}", condition("If-None-Match"), condition("If-Modified-Since"));
        Found::new(row.section, row.expected[tried.column()], found)
    };
    rows.iter().map(&mut try_row).collect()
}

/// A rule about the answer to a validation: its status and fields; the cache status and status of the client's answer;
/// whether the cache has it afterwards, and the number of requests at the server when it was generated.
struct TakingRow {
    section: &'static str,
    status: &'static str,
    fields: &'static str,
    expected: [&'static str; 3],
}

const fn taking(
    section: &'static str,
    status: &'static str,
    fields: &'static str,
    expected: [&'static str; 3],
) -> TakingRow {
    TakingRow { section, status, fields, expected }
}

#[rustfmt::skip]
const TAKEN: &[TakingRow] = &[
    taking("4.3.3: a 304", "304 Not Modified", FRESH, ["REVALIDATED 200, HIT 1"; 3]),
    taking("4.3.4: a 304 that says nothing of how long", "304 Not Modified", "X-New: a", ["REVALIDATED 200, HIT 1"; 3]),
    taking("4.3.4: a 304 that forbids to store", "304 Not Modified", "Cache-Control: no-store",
        ["REVALIDATED 200, asked 3"; 3]),
    taking("4.3.3: another response", "200 OK", "Cache-Control: max-age=60|ETag: \"2\"", ["EXPIRED 200, HIT 2"; 3]),
    taking("4.3.3: another one with the same tag", "200 OK", "Cache-Control: max-age=60|ETag: \"1\"",
        ["EXPIRED 200, HIT 2"; 3]),
    taking("4.3.3: another one that may not be stored", "200 OK", "Cache-Control: no-store",
        ["EXPIRED 200, asked 3"; 3]),
    taking("4.3.3: it has gone", "404 Not Found", "X-New: a", ["EXPIRED 404, asked 3"; 3]),
    taking("4.3.3: it has gone, and that may be stored", "410 Gone", FRESH, ["EXPIRED 410, HIT 2"; 3]),
    taking("4.3.3: the server's error", "500 Oops", "X-New: a", ["EXPIRED 500, asked 3"; 3]),
];

const TAKING: Table = Table { both: "", gale: SOFT_PURGES, run: take_answers };

fn answers_about_stored_responses_are_taken_as_the_rules_say(driver: Driver) {
    try_each(driver, &TAKING);
}

fn take_answers(tried: &Tried, _: &Serving) -> Vec<Found> {
    let mut client = tried.connect();
    let rows: Vec<_> = TAKEN.iter().enumerate().map(|(number, row)| (format!("/{number}"), row)).collect();
    let ask_numbered = |client: &mut Client, path: &str, number: usize, fields: &str| {
        ask(client, path, &format!("X-Number: {number}\r\n{fields}"))
    };
    for (path, _) in &rows {
        ask_numbered(&mut client, path, 1, &format!("X-Fields: {}\r\n", tried.lived("ETag: \"1\"")));
    }
    tried.make_stale(rows.iter().map(|(path, _)| &**path));
    let mut try_row = |(path, row): &(String, &TakingRow)| {
        let fields = format!("X-Status: {}\r\nX-Fields: {}\r\n", row.status, row.fields);
        let first = ask_numbered(&mut client, path, 2, &fields);
        let second = ask_numbered(&mut client, path, 3, "");
        let number = second.text().trim_start_matches('0').to_owned();
        let found = format!("{} {}, {} {number}", values(&first, "X-Cache"), first.status, used(&second));
        Found::new(row.section, row.expected[tried.column()], found)
    };
    rows.iter().map(&mut try_row).collect()
}

/// A rule about a client's conditions on a stored response: status and fields of that, fields of the request, and
/// status of the answer.
struct ConditionRow {
    section: &'static str,
    status: &'static str,
    stored: &'static str,
    asked: &'static str,
    expected: [u16; 3],
}

const fn condition(section: &'static str, asked: &'static str, expected: [u16; 3]) -> ConditionRow {
    let stored = "ETag: \"1\"|Last-Modified: Thu, 26 Nov 2026 03:00:00 GMT|Accept-Ranges: bytes";
    ConditionRow { section, status: "200 OK", stored, asked, expected }
}

#[rustfmt::skip]
const CONDITIONS: &[ConditionRow] = &[
    condition("4.3.2: the same tag", "If-None-Match: \"1\"\r\n", [304; 3]),
    condition("4.3.2: tags are compared weakly", "If-None-Match: W/\"1\"\r\n", [304; 3]),
    condition("4.3.2: another tag", "If-None-Match: \"2\"\r\n", [200; 3]),
    condition("4.3.2: one of several tags", "If-None-Match: \"2\", \"1\"\r\n", [304; 3]),
    condition("4.3.2: any tag", "If-None-Match: *\r\n", [304; 3]),
    condition("4.3.2: the same date", "If-Modified-Since: Thu, 26 Nov 2026 03:00:00 GMT\r\n", [304; 3]),
    condition("4.3.2: an earlier date", "If-Modified-Since: Thu, 26 Nov 2026 02:00:00 GMT\r\n", [200; 3]),
    // `if_modified_since exact`, which is the default; `before` answers with 304.
    condition("4.3.2: a later date", "If-Modified-Since: Thu, 26 Nov 2026 04:00:00 GMT\r\n", [304, 200, 200]),
    condition("4.3.2: a date that is none", "If-Modified-Since: yesterday\r\n", [200; 3]),
    condition("4.3.2: another tag counts before the date",
        "If-None-Match: \"2\"\r\nIf-Modified-Since: Thu, 26 Nov 2026 03:00:00 GMT\r\n", [200; 3]),
    // In nginx's order, which is that of static files, both conditions have to hold.
    condition("4.3.2: the same tag, and an earlier date",
        "If-None-Match: \"1\"\r\nIf-Modified-Since: Thu, 26 Nov 2026 02:00:00 GMT\r\n", [304, 200, 200]),
    condition("4.3.2: If-Match", "If-Match: \"1\"\r\n", [200; 3]),
    condition("4.3.2: If-Match, and it is another one", "If-Match: \"2\"\r\n", [412; 3]),
    condition("4.3.2: If-Unmodified-Since, and it has changed",
        "If-Unmodified-Since: Thu, 26 Nov 2026 02:00:00 GMT\r\n", [412; 3]),
    ConditionRow { stored: "Date: Fri, 26 Nov 2100 03:00:00 GMT", ..condition("4.3.2: the date that it came with",
        "If-Modified-Since: Fri, 26 Nov 2100 03:00:00 GMT\r\n", [304, 200, 200]) },
    // Ranges are not combined (decision 0028); a complete response contains them all.
    condition("3.4: a part of what is stored whole", "Range: bytes=2-3\r\n", [206; 3]),
    ConditionRow { stored: "ETag: \"1\"", ..condition("3.4: a part, though the server offers none",
        "Range: bytes=0-0\r\n", [206, 200, 200]) },
    ConditionRow { stored: "Accept-Ranges: none", ..condition("3.4: a part, and the server says that there are none",
        "Range: bytes=0-0\r\n", [200; 3]) },
    condition("4.3.2: If-Range", "Range: bytes=0-1\r\nIf-Range: \"1\"\r\n", [206; 3]),
    condition("4.3.2: If-Range, and it is another one", "Range: bytes=0-1\r\nIf-Range: \"2\"\r\n", [200; 3]),
    ConditionRow { stored: CHANGED, ..condition("4.3.2: a tag, and none is stored", "If-None-Match: \"1\"\r\n",
        [200; 3]) },
    ConditionRow { stored: "ETag: \"1\"", ..condition("4.3.2: a date, and none is stored",
        "If-Modified-Since: Thu, 26 Nov 2026 03:00:00 GMT\r\n", [200; 3]) },
    ConditionRow { status: "404 Not Found", ..condition("4.3.2: an error is not compared", "If-None-Match: \"1\"\r\n",
        [404; 3]) },
];

const CONDITIONAL: Table = Table { both: "", gale: "", run: answer_conditions };

fn conditions_of_clients_are_answered_as_the_rules_say(driver: Driver) {
    try_each(driver, &CONDITIONAL);
}

fn answer_conditions(tried: &Tried, _: &Serving) -> Vec<Found> {
    let try_row = |(number, row): (usize, &ConditionRow)| {
        // nginx closes the connection after a 412.
        let mut client = tried.connect();
        let path = format!("/{number}");
        let fields = format!("X-Status: {}\r\nX-Fields: {}|{FRESH}\r\n", row.status, row.stored);
        ask(&mut client, &path, &fields);
        let response = ask(&mut client, &path, row.asked);
        let found = format!("{} {}", values(&response, "X-Cache"), response.status);
        Found::new(row.section, format!("HIT {}", row.expected[tried.column()]), found)
    };
    CONDITIONS.iter().enumerate().map(try_row).collect()
}

/// A stored response keeps its original `Date`; by nginx's rules each response has the present date.
fn date_of_stored_response_is_kept_by_the_rfc(driver: Driver) {
    let (backend, date) = (origin(), "Fri, 26 Nov 2100 03:00:00 GMT");
    for (more, is_kept) in [
        ("proxy_cache_conformance rfc9111;", true),
        ("proxy_cache_conformance rfc9111; proxy_hide_header Date;", false),
        ("", false),
        ("proxy_cache_conformance nginx;", false),
    ] {
        let server = Setup::http(driver, &http(&backend, more)).start();
        let mut client = server.connect();
        ask(&mut client, "/a", &format!("X-Fields: Date: {date}|{FRESH}\r\n"));
        let response = ask(&mut client, "/a", "");
        assert_eq!(values(&response, "X-Cache"), "HIT");
        let found = values(&response, "Date");
        assert!(found.len() == date.len() && (found == date) == is_kept, "{more}: {found}");
        server.stop();
    }
}

/// A rule about unsafe requests: method, status and fields of the response, for `/N/a`; the path requested afterwards,
/// and its cache status by the RFC's rules, by nginx's, and by default.
struct UnsafeRow {
    section: &'static str,
    method: &'static str,
    status: &'static str,
    fields: &'static str,
    asked: &'static str,
    expected: [&'static str; 3],
}

/// The entry is invalidated, except by nginx, which has no such rule.
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

const INVALIDATING: Table = Table { both: "", gale: "", run: invalidate };

fn requests_that_are_not_safe_invalidate_as_the_rules_say(driver: Driver) {
    try_each(driver, &INVALIDATING);
}

fn invalidate(tried: &Tried, _: &Serving) -> Vec<Found> {
    let mut founds = Vec::new();
    for (number, row) in UNSAFE.iter().enumerate() {
        let mut client = tried.connect();
        let path = format!("/{number}/{}", row.asked);
        ask(&mut client, &path, &format!("X-Fields: {FRESH}\r\n"));
        let fields = row.fields.replace('N', &number.to_string());
        let fields = format!("X-Status: {}\r\nX-Fields: {fields}\r\nContent-Length: 0\r\n", row.status);
        let response = client.ask(format!("{} /{number}/a HTTP/1.1\r\nHost: a\r\n{fields}\r\n", row.method));
        assert!(row.status.starts_with(&response.status.to_string()), "{}: {}", row.section, response.status);
        let found = values(&ask(&mut client, &path, ""), "X-Cache");
        founds.push(Found::new(row.section, row.expected[tried.column()], found));
    }
    // All variants of a URI.
    let mut client = tried.connect();
    let ask_variant = |client: &mut Client, value: &str| {
        values(&ask(client, "/vary", &format!("X-Fields: {FRESH}|Vary: X-A\r\nX-A: {value}\r\n")), "X-Cache")
    };
    for value in ["1", "2"] {
        ask_variant(&mut client, value);
    }
    client.ask("POST /vary HTTP/1.1\r\nHost: a\r\nContent-Length: 0\r\n\r\n");
    for value in ["1", "2"] {
        founds.push(Found::new("4.4: variants", GOES[tried.column()], ask_variant(&mut client, value)));
    }
    founds
}

/// The same where `proxy_pass` replaces a part of the URI: clients request `/O/N/a` of the host `a`, and the server `S`
/// gets `/I/N/a`.
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
        // Paths in the clients' requests and in those to the server.
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

/// A rule about a response to HEAD from the server although a response to GET is stored: the fields of the latter,
/// status and fields of the former; whether a GET afterwards is a hit, and its `X-New` (`-` if absent), by the RFC's
/// rules, by nginx's, and by default.
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

/// The stored response has the fields of the response to HEAD; nginx stores the latter, which cannot answer a GET.
const UPDATED: [&str; 3] = ["HIT b", "asked -", "HIT b"];

/// The next GET goes to the server.
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

/// `HIT` for a response out of the cache, `asked` for one from the server.
fn used(response: &Response) -> &'static str {
    if values(response, "X-Cache") == "HIT" { "HIT" } else { "asked" }
}

const HEAD: Table =
    Table { both: "proxy_cache_convert_head off; proxy_cache_bypass $http_x_by;", gale: "", run: take_heads };

fn responses_to_head_freshen_or_invalidate_as_the_rules_say(driver: Driver) {
    try_each(driver, &HEAD);
}

fn take_heads(tried: &Tried, _: &Serving) -> Vec<Found> {
    let column = tried.column();
    let mut founds = Vec::new();
    let mut client = tried.connect();
    let head = |client: &mut Client, path: &str, fields: &str| {
        client.ask(format!("HEAD {path} HTTP/1.1\r\nHost: a\r\n{fields}\r\n"))
    };
    // nginx may answer it without a body.
    let get = |path: &str, fields: &str| {
        let mut client = tried.connect();
        client.send(format!("GET {path} HTTP/1.1\r\nHost: a\r\n{fields}\r\n"));
        client.head()
    };
    for (number, row) in HEADS.iter().enumerate() {
        let path = format!("/{number}");
        ask(&mut client, &path, &format!("X-Fields: {FRESH}|X-New: a|{}\r\n", row.stored));
        let lifetime = if row.told.contains("Cache-Control") { "" } else { "|Cache-Control: max-age=60" };
        let told = format!("X-Fields: X-New: b|{}{lifetime}\r\n", row.told);
        let response = head(&mut client, &path, &format!("X-By: 1\r\nX-Status: {}\r\n{told}", row.status));
        let found = format!("{} {}", values(&response, "X-Cache"), values(&response, "X-New"));
        founds.push(Found::new(&format!("HEAD, {}", row.section), "BYPASS b", found));
        let response = get(&path, "");
        let found = format!("{} {}", used(&response), values(&response, "X-New"));
        founds.push(Found::new(row.section, row.expected[column], found));
    }
    // A stale response is fresh again; a HEAD that is a hit changes nothing.
    ask(&mut client, "/old", &format!("X-Fields: {OLD}|X-New: a\r\n"));
    head(&mut client, "/old", "X-Fields: ETag: \"1\"|X-New: b|Cache-Control: max-age=60\r\n");
    let response = get("/old", "");
    let found = format!("{} {}", values(&response, "X-Cache"), values(&response, "X-New"));
    founds.push(Found::new("4.3.5, one that is stale", ["HIT b", "HIT a", "HIT b"][column], found));
    // Only the variant that the HEAD selects.
    for value in ["1", "2"] {
        let stored = "X-Fields: Cache-Control: max-age=60|Vary: X-A|ETag: \"1\"";
        ask(&mut client, "/vary", &format!("{stored}\r\nX-A: {value}\r\n"));
    }
    head(&mut client, "/vary", "X-By: 1\r\nX-A: 1\r\nX-Fields: Vary: X-A|ETag: \"2\"|Cache-Control: max-age=60\r\n");
    for (value, expected) in [("1", "asked"), ("2", "HIT")] {
        let found = used(&get("/vary", &format!("X-A: {value}\r\n")));
        founds.push(Found::new(&format!("4.3.5, variant {value}"), expected, found));
    }
    founds
}
