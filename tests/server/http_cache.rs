//! proxy_cache and the like: which responses are stored, for which requests and for how long.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use crate::support::{Backend, Client, Directory, Driver, Response, Server, Serving, Setup, with_each_driver};

with_each_driver!(
    a_response_is_stored_and_found_by_its_key,
    uncacheable_response_is_not_stored,
    heuristic_freshness_is_a_part_of_the_age,
    head_is_answered_from_a_stored_get_and_the_other_way_round,
    answer_without_body_is_the_same_while_and_after_it_is_stored,
    parts_and_conditions_are_answered_out_of_the_cache,
    parts_and_conditions_are_answered_from_a_response_that_is_not_stored,
    accept_ranges_of_an_error_is_kept,
    variants_are_told_apart_by_the_fields_that_vary_names,
    languages_share_a_variant_in_any_order_where_the_location_says_so,
    renewal_by_304_updates_the_stored_response,
    something_stale_is_used_where_that_is_allowed,
    stale_response_is_refreshed_in_the_background,
    a_response_is_stored_when_it_was_asked_for_min_uses_times,
    early_hint_is_not_stored,
    damaged_and_foreign_files_are_never_served,
    unsafe_requests_invalidate_stored_responses,
    purges_are_by_key_prefix_and_tag,
    a_purge_of_a_key_with_variants_holds_after_a_restart,
    a_soft_purge_ends_with_a_304,
    a_304_about_another_response_is_not_merged,
    users_are_kept_apart,
    clients_have_a_say_only_where_the_rfc_counts,
    slices_are_fetched_and_stored_as_they_are_wanted,
    cache_status_tells_how_the_cache_was_used,
    hosts_share_entries_only_where_the_key_says_so,
    default_key_is_the_request_to_the_server,
    requests_in_a_block_have_the_default_key_of_their_location,
    subrequests_have_entries_of_their_own_by_the_default_key,
    a_response_behind_x_accel_redirect_is_not_found_for_the_first_uri,
    keys_that_are_too_long_are_not_cached,
    a_hit_goes_by_sendfile_from_64_kib_on,
    removed_cache_file_is_noticed,
);

/// The http block of a cache in `%DIR%/cache`, with `more` in its location.
fn caching(driver: Driver, backend: &Serving, more: &str) -> Server {
    caching_in(driver, "%DIR%/cache", backend, more).start()
}

fn caching_in(driver: Driver, directory: &str, backend: &Serving, more: &str) -> Setup {
    let text = "proxy_cache_path CACHE keys_zone=one:1m; proxy_cache_key $uri;
        proxy_cache_disk_timeout 60s; proxy_cache_lock_timeout 60s;
        server { listen %UNIX%; proxy_cache one; add_header X-Cache $upstream_cache_status always;
        location / { proxy_pass http://B; MORE } }";
    Setup::http(driver, &text.replace('B', &backend.address).replace("CACHE", directory).replace("MORE", more))
}

/// A server that answers with the request's `X-Fields` (separated by bars) and `X-Status`; the body is the number of
/// the request.
fn origin() -> Serving {
    let count = AtomicU64::new(0);
    Backend::tcp().serve(move |asked, client| {
        let number = count.fetch_add(1, Ordering::SeqCst) + 1;
        let fields: String =
            asked.header("X-Fields").unwrap_or_default().split('|').map(|field| field.to_owned() + "\r\n").collect();
        let status = asked.header("X-Status").unwrap_or("200 OK");
        let body = if status.starts_with("304") { String::new() } else { number.to_string() };
        let length =
            if status.starts_with("304") { String::new() } else { format!("Content-Length: {}\r\n", body.len()) };
        let fields = fields.trim_start_matches("\r\n");
        let body = if asked.method == "HEAD" { String::new() } else { body };
        client.send(format!("HTTP/1.1 {status}\r\n{fields}{length}\r\n{body}"));
        true
    })
}

/// Requests a path with these fields, each ending in CR LF.
fn ask(client: &mut Client, path: &str, fields: &str) -> Response {
    client.ask(format!("GET {path} HTTP/1.1\r\nHost: a\r\n{fields}\r\n"))
}

/// Cache status and body of a response.
fn outcome(response: &Response) -> (&str, &str) {
    (response.header("X-Cache").unwrap_or("-"), response.text())
}

const FRESH: &str = "X-Fields: Cache-Control: max-age=60\r\n";

fn a_response_is_stored_and_found_by_its_key(driver: Driver) {
    let (backend, directory) = (origin(), Directory::new());
    let place = format!("{} levels=1:2", directory.path().display());
    let server = caching_in(driver, &place, &backend, "").start();
    let mut client = server.connect();
    assert_eq!(outcome(&ask(&mut client, "/a", FRESH)), ("MISS", "1"));
    let hit = ask(&mut client, "/a", "");
    assert_eq!(outcome(&hit), ("HIT", "1"));
    assert_eq!(hit.header("Age").map(|age| age.parse::<u64>().is_ok()), Some(true));
    // Another connection, perhaps to the other worker.
    for _ in 0..4 {
        assert_eq!(outcome(&ask(&mut server.connect(), "/a?ignored", "")), ("HIT", "1"));
    }
    assert_eq!(outcome(&ask(&mut client, "/b", FRESH)), ("MISS", "2"));
    assert_eq!(backend.asked().len(), 2);
    server.stop();
    for key in ["/a", "/b"] {
        let name = md5(key);
        let place = directory.path().join(&name[31..]).join(&name[29..31]).join(&name);
        assert!(place.exists(), "it is where nginx would have it");
    }
}

/// All files below a directory.
fn files_in(directory: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for entry in std::fs::read_dir(directory).into_iter().flatten().flatten() {
        match entry.file_type() {
            Ok(kind) if kind.is_dir() => files.extend(files_in(&entry.path())),
            _ if entry.path().extension().is_none() && !entry.file_name().to_string_lossy().starts_with('.') => {
                files.push(entry.path());
            }
            _ => {}
        }
    }
    files
}

fn uncacheable_response_is_not_stored(driver: Driver) {
    let backend = origin();
    let server =
        caching(driver, &backend, "proxy_cache_valid 404 1m; proxy_no_cache $arg_no; proxy_cache_bypass $arg_by;");
    let mut client = server.connect();
    let rows = [
        ("", "MISS"),
        ("X-Fields: Cache-Control: no-store\r\n", "MISS"),
        ("X-Fields: Cache-Control: private, max-age=60\r\n", "MISS"),
        ("X-Fields: Cache-Control: max-age=60|Set-Cookie: a=b\r\n", "MISS"),
        ("X-Fields: Cache-Control: max-age=60|Vary: *\r\n", "MISS"),
        ("X-Fields: Cache-Control: max-age=0\r\n", "MISS"),
        ("X-Fields: Expires: 0\r\n", "MISS"),
        ("X-Fields: Cache-Control: max-age=60|X-Accel-Expires: 0\r\n", "MISS"),
        ("X-Fields: Cache-Control: max-age=60|Age: 61\r\n", "MISS"),
        ("X-Status: 404 Not Found\r\n", "HIT"),
        ("X-Fields: Cache-Control: no-store|X-Accel-Expires: 60\r\n", "HIT"),
        ("X-Fields: Cache-Control: max-age=60\r\n", "HIT"),
        ("X-Fields: Expires: Thu, 31 Dec 2099 23:59:59 GMT\r\n", "HIT"),
    ];
    for (number, (fields, expected)) in rows.iter().enumerate() {
        let path = format!("/{number}");
        let first = ask(&mut client, &path, fields);
        assert_eq!(outcome(&first).0, "MISS", "{fields}");
        assert_eq!(outcome(&ask(&mut client, &path, fields)).0, *expected, "{fields}");
    }
    ask(&mut client, "/no?no=1", FRESH);
    assert_eq!(outcome(&ask(&mut client, "/no", FRESH)).0, "MISS");
    assert_eq!(outcome(&ask(&mut client, "/no?by=1", FRESH)).0, "BYPASS");
    server.stop();
}

fn heuristic_freshness_is_a_part_of_the_age(driver: Driver) {
    let backend = origin();
    let unchanged = "X-Fields: Last-Modified: Sun, 06 Nov 1994 08:49:37 GMT\r\n";
    let server = caching(driver, &backend, "proxy_cache_heuristic 10%;");
    let rows = [("/a", unchanged, "HIT"), ("/b", "", "MISS"), ("/c", "X-Fields: Last-Modified: yesterday\r\n", "MISS")];
    for (path, fields, second) in rows {
        assert_eq!(outcome(&ask(&mut server.connect(), path, fields)).0, "MISS", "{path}");
        assert_eq!(outcome(&ask(&mut server.connect(), path, fields)).0, second, "{path}");
    }
    server.stop();
    for (value, wrong) in [
        ("10", "10"),
        ("0%", "0%"),
        ("101%", "101%"),
        ("x%", "x%"),
        ("on", "on"),
        ("off max=1d", "max=1d"),
        ("10% max=x", "max=x"),
        ("10% least=1d", "least=1d"),
    ] {
        let setup = caching_in(driver, "%DIR%/cache", &backend, &format!("proxy_cache_heuristic {value};"));
        let mut server = setup.argument("-t").launch();
        assert!(!server.wait_exited().success(), "{value}");
        assert!(server.stderr().contains(&format!("invalid value \"{wrong}\"")), "{value}: {}", server.stderr());
    }
}

fn head_is_answered_from_a_stored_get_and_the_other_way_round(driver: Driver) {
    let backend = origin();
    let server = caching(driver, &backend, "");
    let mut client = server.connect();
    let head = |client: &mut Client, path: &str| client.ask(format!("HEAD {path} HTTP/1.1\r\nHost: a\r\n{FRESH}\r\n"));
    let first = head(&mut client, "/a");
    assert_eq!((first.header("X-Cache"), first.header("Content-Length")), (Some("MISS"), Some("1")));
    assert_eq!(outcome(&ask(&mut client, "/a", "")), ("HIT", "1"));
    let second = head(&mut client, "/a");
    assert_eq!((second.header("X-Cache"), second.header("Content-Length")), (Some("HIT"), Some("1")));
    assert_eq!(backend.asked()[0].1.method, "GET");
    server.stop();

    // A response to HEAD never answers a GET.
    let backend = origin();
    let server = caching(driver, &backend, "proxy_cache_convert_head off;");
    let mut client = server.connect();
    head(&mut client, "/a");
    assert_eq!(head(&mut client, "/a").header("X-Cache"), Some("HIT"));
    assert_eq!(outcome(&ask(&mut client, "/a", FRESH)), ("MISS", "2"));
    server.stop();

    // Nor does it change the stored response if it may not be stored itself.
    let backend = origin();
    let server = caching(
        driver,
        &backend,
        "proxy_cache_convert_head off; proxy_cache_bypass $http_x_own;
        proxy_no_cache $http_x_own;",
    );
    let mut client = server.connect();
    assert_eq!(outcome(&ask(&mut client, "/a", FRESH)), ("MISS", "1"));
    let own = "X-Own: 1\r\nX-Fields: Cache-Control: max-age=60|X-User: bob\r\n";
    let told = client.ask(format!("HEAD /a HTTP/1.1\r\nHost: a\r\n{own}\r\n"));
    assert_eq!((told.header("X-Cache"), told.header("X-User")), (Some("BYPASS"), Some("bob")));
    let stored = ask(&mut client, "/a", "");
    assert_eq!((outcome(&stored), stored.header("X-User")), (("HIT", "1"), None));
    server.stop();

    // Nor does it where the configuration names the method: a HEAD that is to be stored is sent as a GET.
    let backend = origin();
    let server = caching(driver, &backend, "proxy_method $request_method;");
    let mut client = server.connect();
    head(&mut client, "/a");
    assert_eq!(outcome(&ask(&mut client, "/a", "")), ("HIT", "1"));
    server.stop();
}

/// Checked when the fill is complete, and from its file.
fn answer_without_body_is_the_same_while_and_after_it_is_stored(driver: Driver) {
    let backend = Backend::tcp().serve(|asked, client| {
        let (status, framing) = match asked.target.split('/').nth(1).unwrap() {
            "length" => ("200 OK", "Content-Length: 4242\r\n"),
            "chunked" => ("200 OK", "Transfer-Encoding: chunked\r\n"),
            "none" => ("204 No Content", ""),
            "moved" => ("301 Moved Permanently", "Location: /elsewhere\r\nContent-Length: 0\r\n"),
            "empty" => ("200 OK", "Content-Length: 0\r\n"),
            _ => unreachable!("{asked:?}"),
        };
        client.send(format!("HTTP/1.1 {status}\r\nCache-Control: max-age=60\r\n{framing}\r\n"));
        true
    });
    let cases = [
        ("HEAD", "length", 200, Some("4242")),
        ("HEAD", "chunked", 200, None),
        ("HEAD", "none", 204, None),
        ("GET", "none", 204, None),
        ("HEAD", "moved", 301, Some("0")),
        ("GET", "moved", 301, Some("0")),
        ("GET", "empty", 200, Some("0")),
    ];
    let directory = Directory::new();
    let place = directory.path().to_str().unwrap();
    // The second process reads them from their files.
    for _ in 0..2 {
        let more = "proxy_cache_convert_head off; proxy_cache_key $request_method$uri;";
        let server = caching_in(driver, place, &backend, more).start();
        for ((method, kind, status, length), number) in cases.iter().flat_map(|case| (0..20).map(move |at| (case, at)))
        {
            let request = format!("{method} /{kind}/{number} HTTP/1.1\r\nHost: a\r\n\r\n");
            let mut clients = [server.connect(), server.connect()];
            for at in 0..4 {
                let response = clients[at % 2].ask(&request);
                let told = (response.status, response.header("Content-Length"), response.text());
                assert_eq!(told, (*status, *length, ""), "{method} {kind}: {response:?}");
            }
        }
        server.stop();
    }
}

/// A server of ten bytes that supports ranges.
fn ten_bytes(cache_control: &'static str) -> Serving {
    Backend::tcp().serve(move |_, client| {
        let fields = "Accept-Ranges: bytes\r\nETag: \"1\"\r\nContent-Length: 10\r\n";
        client.send(format!("HTTP/1.1 200 OK\r\nCache-Control: {cache_control}\r\n{fields}\r\n0123456789"));
        true
    })
}

/// Asserts that this number of requests arrived, each for the whole response and without conditions.
#[track_caller]
fn assert_asked_for_all(backend: &Serving, times: usize) {
    let asked = backend.asked();
    assert_eq!(asked.len(), times);
    assert!(asked.iter().all(|(_, asked)| asked.header("Range").is_none() && asked.header("If-None-Match").is_none()));
}

fn parts_and_conditions_are_answered_out_of_the_cache(driver: Driver) {
    let backend = ten_bytes("max-age=60");
    let server = caching(driver, &backend, "");
    let mut client = server.connect();
    // The first request, too, although the whole response is fetched.
    for _ in 0..2 {
        let part = ask(&mut client, "/a", "Range: bytes=2-4\r\n");
        assert_eq!((part.status, part.text()), (206, "234"));
    }
    // Several ranges are cut from a complete response; during the fill the whole response is sent.
    let mut ask_for_parts = || ask(&mut client, "/a", "Range: bytes=0-1,8-\r\n");
    let parts = (0..1000).map(|_| ask_for_parts()).find(|response| response.status != 200).expect("it becomes whole");
    assert!(parts.status == 206 && parts.text().contains("01") && parts.text().contains("89"), "{parts:?}");
    assert_eq!(ask(&mut client, "/a", "Range: bytes=20-\r\n").status, 416);
    assert_eq!(ask(&mut client, "/a", "If-None-Match: \"1\"\r\n").status, 304);
    assert_eq!(ask(&mut client, "/a", "If-None-Match: \"2\"\r\n").status, 200);
    assert_eq!(ask(&mut client, "/new", "If-None-Match: \"1\"\r\n").status, 304);
    assert_asked_for_all(&backend, 2);
    server.stop();
}

/// Ranges and conditions are not passed on, because the response might be stored.
fn parts_and_conditions_are_answered_from_a_response_that_is_not_stored(driver: Driver) {
    let backend = ten_bytes("no-store");
    let server = caching(driver, &backend, "");
    let mut client = server.connect();
    for _ in 0..2 {
        let part = ask(&mut client, "/a", "Range: bytes=2-4\r\n");
        assert_eq!((part.status, part.text(), part.header("X-Cache")), (206, "234", Some("MISS")));
        assert_eq!(ask(&mut client, "/a", "If-None-Match: \"1\"\r\n").status, 304);
        assert_eq!(ask(&mut client, "/a", "If-Match: \"2\"\r\n").status, 412);
        let whole = ask(&mut client, "/a", "If-None-Match: \"2\"\r\n");
        assert_eq!((whole.status, whole.text()), (200, "0123456789"));
        let head = client.ask("HEAD /a HTTP/1.1\r\nHost: a\r\n\r\n");
        assert_eq!((head.status, head.header("Accept-Ranges")), (200, Some("bytes")));
        let head = client.ask("HEAD /a HTTP/1.1\r\nHost: a\r\nRange: bytes=2-4\r\n\r\n");
        assert_eq!((head.status, head.header("Content-Length")), (206, Some("3")));
    }
    assert_asked_for_all(&backend, 12);
    server.stop();
}

/// The cache cuts no ranges out of errors, so the server's field is kept, stored or not.
fn accept_ranges_of_an_error_is_kept(driver: Driver) {
    let backend = origin();
    let server = caching(driver, &backend, "");
    let mut client = server.connect();
    for (path, rule, last) in [("/kept", "max-age=60", "HIT"), ("/passed", "no-store", "MISS")] {
        let fields = format!("X-Status: 404 Not Found\r\nX-Fields: Cache-Control: {rule}|Accept-Ranges: bytes\r\n");
        for outcome in ["MISS", last] {
            let response = ask(&mut client, path, &(fields.clone() + "Range: bytes=0-0\r\n"));
            assert_eq!((response.status, response.header("X-Cache")), (404, Some(outcome)));
            assert_eq!(response.header("Accept-Ranges"), Some("bytes"), "{path} {outcome}");
        }
    }
    server.stop();
}

fn variants_are_told_apart_by_the_fields_that_vary_names(driver: Driver) {
    let backend = origin();
    let server = caching(driver, &backend, "");
    let mut client = server.connect();
    let mut get = |accept: &str, more: &str| {
        let vary = "X-Fields: Cache-Control: max-age=60|Vary: X-One, Accept";
        let response = ask(&mut client, "/a", &format!("{vary}{more}\r\nAccept: {accept}\r\n"));
        let (status, body) = outcome(&response);
        format!("{status} {body}")
    };
    assert_eq!(get("a", ""), "MISS 1");
    assert_eq!(get("b", ""), "MISS 2");
    assert_eq!((get("a", ""), get("b", "")), ("HIT 1".into(), "HIT 2".into()));
    assert_eq!((get("c, d", ""), get("c ,d", "")), ("MISS 3".into(), "HIT 3".into()));
    server.stop();
}

fn languages_share_a_variant_in_any_order_where_the_location_says_so(driver: Driver) {
    for (more, then) in [("proxy_cache_normalize_language on;", "HIT"), ("", "MISS")] {
        let backend = origin();
        let server = caching(driver, &backend, more);
        let mut client = server.connect();
        let mut ask = |languages: &str| {
            let fields = format!("X-Fields: Cache-Control: max-age=60|Vary: Accept-Language\r\n{languages}\r\n");
            outcome(&ask(&mut client, "/a", &fields)).0.to_owned()
        };
        assert_eq!(ask("Accept-Language: en, de;q=0.5"), "MISS");
        assert_eq!(ask("Accept-Language: EN,de;q=0.5"), then);
        assert_eq!(ask("Accept-Language: de; q=0.5, en"), then);
        assert_eq!(ask("Accept-Language: de, en;q=0.5"), "MISS");
        server.stop();
    }
}

fn renewal_by_304_updates_the_stored_response(driver: Driver) {
    let backend = origin();
    let server = caching(driver, &backend, "proxy_cache_revalidate on;");
    let mut client = server.connect();
    // Stale on arrival for this cache.
    let stale = "X-Fields: Cache-Control: max-age=5|Age: 6|ETag: \"x\"|X-Kept: old|X-New: old\r\n";
    assert_eq!(outcome(&ask(&mut client, "/a", stale)), ("MISS", "1"));
    let renewed = "X-Status: 304 Not Modified\r\nX-Fields: Cache-Control: max-age=60|ETag: \"x\"|X-New: new\r\n";
    let response = ask(&mut client, "/a", renewed);
    assert_eq!(outcome(&response), ("REVALIDATED", "1"));
    assert_eq!((response.header("X-New"), response.header("X-Kept")), (Some("new"), Some("old")));
    assert_eq!(outcome(&ask(&mut client, "/a", "")), ("HIT", "1"));
    assert_eq!(backend.asked()[1].1.header("If-None-Match"), Some("\"x\""));
    server.stop();
}

const STALE: &str = "X-Fields: Cache-Control: max-age=5|Age: 6|ETag: \"x\"\r\n";

fn something_stale_is_used_where_that_is_allowed(driver: Driver) {
    let backend = origin();
    let server = caching(driver, &backend, "proxy_cache_use_stale http_500 error;");
    let mut client = server.connect();
    ask(&mut client, "/a", STALE);
    let failed = "X-Status: 500 Oops\r\n";
    assert_eq!(outcome(&ask(&mut client, "/a", failed)), ("STALE", "1"));
    assert_eq!(ask(&mut client, "/a", "X-Status: 503 Oops\r\n").status, 503);
    assert_eq!(ask(&mut client, "/other", failed).status, 500);
    backend.kill();
    assert_eq!(outcome(&ask(&mut client, "/a", "")), ("STALE", "1"));
    assert_eq!(ask(&mut client, "/other", "").status, 502);
    server.stop();
}

fn stale_response_is_refreshed_in_the_background(driver: Driver) {
    let backend = origin();
    let server = caching(driver, &backend, "proxy_cache_use_stale updating; proxy_cache_background_update on;");
    let mut client = server.connect();
    ask(&mut client, "/a", STALE);
    let first = ask(&mut client, "/a", FRESH);
    assert_eq!(outcome(&first), ("STALE", "1"));
    // The mirrored request reaches the server, and its answer the cache.
    loop {
        let response = ask(&mut client, "/a", "");
        match outcome(&response) {
            ("UPDATING", "1") => {}
            other => break assert_eq!(other, ("HIT", "2")),
        }
    }
    assert_eq!(backend.asked()[1].1.header("X-Fields"), Some("Cache-Control: max-age=60"));
    server.stop();
}

fn a_response_is_stored_when_it_was_asked_for_min_uses_times(driver: Driver) {
    let backend = origin();
    let server = caching(driver, &backend, "proxy_cache_min_uses 3;");
    let mut client = server.connect();
    for (path, number) in [("/a", 1), ("/a", 2), ("/b", 3), ("/a", 4)] {
        assert_eq!(outcome(&ask(&mut client, path, FRESH)), ("MISS", &*number.to_string()));
    }
    for _ in 0..4 {
        assert_eq!(outcome(&ask(&mut server.connect(), "/a", "")), ("HIT", "4"));
    }
    server.stop();
}

fn early_hint_is_not_stored(driver: Driver) {
    for (more, is_told) in [("", false), ("early_hints 1;", true)] {
        let backend = Backend::tcp().serve(|_, client| {
            client.send("HTTP/1.1 103 Early Hints\r\nLink: </a.css>; rel=preload\r\n\r\n");
            client.send("HTTP/1.1 200 OK\r\nCache-Control: max-age=60\r\nContent-Length: 1\r\n\r\na");
            true
        });
        let server = caching(driver, &backend, more);
        let mut client = server.connect();
        client.send("GET /a HTTP/1.1\r\nHost: a\r\n\r\n");
        let mut response = client.response();
        assert_eq!(response.status == 103, is_told, "{response:?}");
        if is_told {
            assert_eq!(response.header("Link"), Some("</a.css>; rel=preload"));
            response = client.response();
        }
        assert_eq!((response.status, outcome(&response), response.header("Link")), (200, ("MISS", "a"), None));
        let hit = client.get("/a");
        assert_eq!((hit.status, outcome(&hit), hit.header("Link")), (200, ("HIT", "a"), None));
        server.stop();
    }
}

fn damaged_and_foreign_files_are_never_served(driver: Driver) {
    let directory = Directory::new();
    let cache = directory.path();
    let backend = origin();
    let serve = || caching_in(driver, cache.to_str().unwrap(), &backend, "").start();
    let server = serve();
    assert_eq!(outcome(&ask(&mut server.connect(), "/a", FRESH)), ("MISS", "1"));
    directory.wait_until("it is stored", |_| files_in(cache).len() == 1);
    server.stop();
    let file = files_in(cache).remove(0);
    let whole = std::fs::read(&file).unwrap();
    assert_eq!(outcome(&ask(&mut serve().connect(), "/a", "")), ("HIT", "1"), "the next process finds it");
    // A file that is damaged or cut anywhere is fetched anew; a few places stand for all, which unit tests check.
    for (number, place) in [9, 60, 100, whole.len() - 1].into_iter().enumerate() {
        let mut damaged = whole.clone();
        if number % 2 == 0 {
            damaged.truncate(place)
        } else {
            damaged[place] ^= 0x20
        }
        std::fs::write(&file, &damaged).unwrap();
        let server = serve();
        let response = ask(&mut server.connect(), "/a", "");
        assert_eq!(response.header("X-Cache"), Some("MISS"), "{place}");
        server.stop();
    }
    let server = serve();
    // A valid file of another key is not used.
    let other = cache.join(md5("/other"));
    std::fs::write(&other, &whole).unwrap();
    assert_eq!(ask(&mut server.connect(), "/other", "").header("X-Cache"), Some("MISS"));
    // Files of nginx are left alone.
    let foreign = cache.join(md5("/foreign"));
    std::fs::write(&foreign, [5, 0, 0, 0, 0, 0, 0, 0, 1, 2, 3]).unwrap();
    assert_eq!(ask(&mut server.connect(), "/foreign", FRESH).header("X-Cache"), Some("MISS"));
    assert_eq!(std::fs::read(&foreign).unwrap(), [5, 0, 0, 0, 0, 0, 0, 0, 1, 2, 3]);
    server.stop();
}

fn md5(text: &str) -> String {
    use md5::{Digest, Md5};
    Md5::digest(text.as_bytes()).iter().map(|byte| format!("{byte:02x}")).collect()
}

fn unsafe_requests_invalidate_stored_responses(driver: Driver) {
    let backend = origin();
    let server = caching(driver, &backend, "");
    let mut client = server.connect();
    let post = |client: &mut Client, fields: &str| {
        client.ask(format!("POST /a HTTP/1.1\r\nHost: a\r\n{fields}Content-Length: 0\r\n\r\n"))
    };
    ask(&mut client, "/a", FRESH);
    ask(&mut client, "/b", FRESH);
    post(&mut client, "X-Status: 500 Oops\r\n");
    assert_eq!(outcome(&ask(&mut client, "/a", "")), ("HIT", "1"), "it has failed");
    post(&mut client, "X-Fields: Location: http://a/b\r\n");
    assert_eq!(outcome(&ask(&mut client, "/a", FRESH)).0, "MISS");
    assert_eq!(outcome(&ask(&mut client, "/b", FRESH)).0, "MISS");
    post(&mut client, "X-Fields: Location: http://other/b\r\n");
    assert_eq!(outcome(&ask(&mut client, "/b", "")).0, "HIT");
    server.stop();
}

fn purges_are_by_key_prefix_and_tag(driver: Driver) {
    let backend = origin();
    let more = "proxy_cache_purge $http_x_purge; proxy_cache_tag_header Surrogate-Key;
        proxy_cache_purge_tags $http_x_tags;";
    let server = caching(driver, &backend, more);
    // While there may be unknown files, no entry counts as absent.
    server.wait_logged("0 entries");
    let mut client = server.connect();
    let tagged = |tags: &str| format!("X-Fields: Cache-Control: max-age=60|Surrogate-Key: {tags}\r\n");
    let mut fill = |paths: &[(&str, &str)]| {
        for (path, tags) in paths {
            ask(&mut client, path, &tagged(tags));
            assert_eq!(outcome(&ask(&mut client, path, "")).0, "HIT");
        }
    };
    fill(&[("/a/1", "red blue"), ("/a/2", "blue"), ("/b", "green")]);
    let purge = |path: &str, fields: &str| ask(&mut server.connect(), path, &format!("X-Purge: 1\r\n{fields}")).status;
    let status = |path: &str| ask(&mut server.connect(), path, "").header("X-Cache").map(str::to_owned);
    assert_eq!((purge("/b", ""), purge("/b", ""), purge("/never", "")), (204, 404, 404));
    assert_eq!((status("/b").as_deref(), status("/a/1").as_deref()), (Some("MISS"), Some("HIT")));
    assert_eq!(purge("/", "X-Tags: red\r\n"), 204);
    assert_eq!((status("/a/1").as_deref(), status("/a/2").as_deref()), (Some("MISS"), Some("HIT")));
    fill(&[("/a/1", "red")]);
    assert_eq!(purge("/a/*", ""), 204);
    assert_eq!((status("/a/1").as_deref(), status("/a/2").as_deref()), (Some("MISS"), Some("MISS")));
    // Later entries are not purged.
    fill(&[("/a/1", "red")]);
    server.stop();
}

fn a_purge_of_a_key_with_variants_holds_after_a_restart(driver: Driver) {
    let (backend, directory) = (origin(), Directory::new());
    let more = "proxy_cache_purge $http_x_purge;";
    let serve = || caching_in(driver, directory.path().to_str().unwrap(), &backend, more).start();
    let varies = "X-Fields: Cache-Control: max-age=60|Vary: Accept\r\nAccept: a\r\n";
    let server = serve();
    assert_eq!(outcome(&ask(&mut server.connect(), "/a", varies)), ("MISS", "1"));
    directory.wait_until("the response and its mark are stored", |_| files_in(directory.path()).len() == 2);
    assert_eq!(outcome(&ask(&mut server.connect(), "/a", varies)), ("HIT", "1"));
    assert_eq!(ask(&mut server.connect(), "/a", "X-Purge: 1\r\n").status, 204);
    server.stop();
    let server = serve();
    assert_eq!(outcome(&ask(&mut server.connect(), "/a", varies)), ("MISS", "2"));
    server.stop();
}

fn a_soft_purge_ends_with_a_304(driver: Driver) {
    let backend = origin();
    let more = "proxy_cache_purge $http_x_purge; proxy_cache_purge_soft on; proxy_cache_revalidate on;
        proxy_cache_tag_header Surrogate-Key; proxy_cache_purge_tags $http_x_tags;";
    let directory = Directory::new();
    let server = caching_in(driver, directory.path().to_str().unwrap(), &backend, more).start();
    let mut client = server.connect();
    let fields = "X-Fields: Cache-Control: max-age=60|Surrogate-Key: t|ETag: \"x\"\r\n";
    for (count, (path, tags)) in (1..).zip([("/tag", "X-Tags: t\r\n"), ("/key", "")]) {
        let number = backend.asked().len() + 1;
        let number = number.to_string();
        assert_eq!(outcome(&ask(&mut client, path, fields)), ("MISS", &*number));
        // A purge also applies to a fill in progress.
        server.look_until("it is stored", || files_in(directory.path()).len() == count);
        assert_eq!(ask(&mut client, path, &format!("X-Purge: 1\r\n{tags}")).status, 204);
        let renewed = ask(&mut client, path, &format!("X-Status: 304 Not Modified\r\n{fields}"));
        assert_eq!(outcome(&renewed), ("REVALIDATED", &*number));
        for _ in 0..4 {
            assert_eq!(outcome(&ask(&mut server.connect(), path, "")), ("HIT", &*number));
        }
    }
    server.stop();
}

fn a_304_about_another_response_is_not_merged(driver: Driver) {
    for (told, more) in [("ETag: \"new\"", ""), ("ETag: \"old\"", "Vary: Accept\r\n")] {
        let backend = Backend::tcp().serve(move |asked, client| {
            let is_first = asked.header("X-First").is_some();
            let response = match asked.header("If-None-Match") {
                Some(_) => format!("304 Not Modified\r\nCache-Control: max-age=60\r\n{told}\r\n{more}\r\n"),
                None if is_first => {
                    "200 OK\r\nCache-Control: max-age=5\r\nAge: 6\r\nETag: \"old\"\r\nContent-Length: 3\r\n\r\nold"
                        .into()
                }
                None => format!("200 OK\r\nCache-Control: max-age=60\r\n{told}\r\n{more}Content-Length: 3\r\n\r\nnew"),
            };
            client.send(format!("HTTP/1.1 {response}"));
            true
        });
        let directory = Directory::new();
        let place = directory.path().to_str().unwrap();
        let server = caching_in(driver, place, &backend, "proxy_cache_revalidate on;").start();
        // While there may be unknown files, a removed entry may be found once more.
        server.wait_logged("0 entries");
        let mut client = server.connect();
        assert_eq!(outcome(&ask(&mut client, "/a", "X-First: 1\r\n")), ("MISS", "old"));
        directory.wait_until("it is stored", |_| files_in(directory.path()).len() == 1);
        let confirmed = ask(&mut client, "/a", "");
        assert_eq!((outcome(&confirmed), confirmed.header("Vary")), (("REVALIDATED", "old"), None));
        // Every entry that exists now is purged.
        assert_eq!(outcome(&ask(&mut client, "/a", "")), ("MISS", "new"), "{told} {more}");
        assert_eq!(outcome(&ask(&mut client, "/a", "")), ("HIT", "new"), "{told} {more}");
        assert_eq!(backend.asked().len(), 3);
        server.stop();
    }
}

fn users_are_kept_apart(driver: Driver) {
    let backend = origin();
    let server = caching(driver, &backend, "");
    let mut client = server.connect();
    let with = |fields: &str| format!("{FRESH}{fields}");
    ask(&mut client, "/a", &with("Authorization: Basic eDp5\r\n"));
    assert_eq!(outcome(&ask(&mut client, "/a", FRESH)), ("MISS", "2"));
    let public = "X-Fields: Cache-Control: public, max-age=60\r\nAuthorization: Basic eDp5\r\n";
    ask(&mut client, "/b", public);
    assert_eq!(outcome(&ask(&mut client, "/b", "")).0, "HIT");
    server.stop();

    let backend = origin();
    let server = caching(driver, &backend, "proxy_cache_conformance nginx;");
    let mut client = server.connect();
    ask(&mut client, "/a", &with("Authorization: Basic eDp5\r\n"));
    let hit = ask(&mut client, "/a", "");
    assert_eq!((outcome(&hit).0, hit.header("Age")), ("HIT", None));
    server.stop();
}

fn clients_have_a_say_only_where_the_rfc_counts(driver: Driver) {
    for (rules, expected) in [("mixed", "HIT"), ("nginx", "HIT"), ("rfc9111", "EXPIRED")] {
        let backend = origin();
        let server = caching(driver, &backend, &format!("proxy_cache_conformance {rules};"));
        let mut client = server.connect();
        ask(&mut client, "/a", FRESH);
        let again = ask(&mut client, "/a", &format!("{FRESH}Cache-Control: no-cache\r\n"));
        assert_eq!(again.header("X-Cache"), Some(expected), "{rules}");
        let cached_only = ask(&mut client, "/none", "Cache-Control: only-if-cached\r\n");
        assert_eq!(cached_only.status == 504, rules == "rfc9111", "{rules}");
        server.stop();
    }
}

fn slices_are_fetched_and_stored_as_they_are_wanted(driver: Driver) {
    // Every slice of a file of 26 bytes; `/other` is another file from its tenth byte on.
    let backend = Backend::tcp().serve(|asked, client| {
        let range = asked.header("Range").expect("a range").strip_prefix("bytes=").unwrap();
        let (first, last) = range.split_once('-').unwrap();
        let (first, last): (usize, usize) = (first.parse().unwrap(), last.parse::<usize>().unwrap().min(25));
        let tag = if asked.target == "/other" && first >= 10 { "2" } else { "1" };
        let fields =
            format!("Cache-Control: max-age=60\r\nETag: \"{tag}\"\r\nContent-Range: bytes {first}-{last}/26\r\n");
        let body = &"abcdefghijklmnopqrstuvwxyz"[first..=last];
        client.send(format!("HTTP/1.1 206 Partial Content\r\n{fields}Content-Length: {}\r\n\r\n{body}", body.len()));
        true
    });
    let more = "slice 10; proxy_cache_key $uri$slice_range; proxy_set_header Range $slice_range;";
    let server = caching(driver, &backend, more);
    let mut client = server.connect();
    let part = ask(&mut client, "/a", "Range: bytes=12-14\r\n");
    assert_eq!((part.status, part.text(), part.header("Content-Range")), (206, "mno", Some("bytes 12-14/26")));
    assert_eq!(backend.asked().len(), 1, "one piece is enough");
    let whole = ask(&mut client, "/a", "");
    assert_eq!((whole.status, whole.text()), (200, "abcdefghijklmnopqrstuvwxyz"));
    assert_eq!(backend.asked().len(), 3, "one of three was there");
    assert_eq!(ask(&mut client, "/a", "Range: bytes=-3\r\n").text(), "xyz");
    assert_eq!(ask(&mut client, "/a", "Range: bytes=8-21\r\n").text(), "ijklmnopqrstuv");
    assert_eq!(ask(&mut client, "/a", "If-None-Match: \"1\"\r\n").status, 304);
    assert_eq!(backend.asked().len(), 3);
    // Slices of two files are never put together.
    let mut other = server.connect();
    other.send("GET /other HTTP/1.1\r\nHost: a\r\n\r\n");
    assert_eq!(other.head().header("Content-Length"), Some("26"));
    assert!(other.read_to_end().len() <= 10);
    server.wait_logged("etag mismatch in slice response");
    server.stop();
}

fn cache_status_tells_how_the_cache_was_used(driver: Driver) {
    let backend = origin();
    let server = caching(driver, &backend, "proxy_cache_status edge; proxy_cache_bypass $arg_by;");
    let mut client = server.connect();
    let mut told = |path: &str, fields: &str| {
        let response = ask(&mut client, path, fields);
        response.header("Cache-Status").unwrap_or("-").split("; ttl=").next().unwrap().to_owned()
    };
    assert_eq!(told("/a", FRESH), "edge; fwd=uri-miss; stored");
    assert_eq!(told("/a", ""), "edge; hit");
    assert_eq!(told("/a?by=1", FRESH), "edge; fwd=bypass; stored");
    assert_eq!(told("/b", "X-Fields: Cache-Control: no-store\r\n"), "edge; fwd=uri-miss; detail=no-store");
    assert_eq!(told("/c", ""), "edge; fwd=uri-miss; detail=no-lifetime");
    let vary = "X-Fields: Cache-Control: max-age=60|Vary: X-A\r\n";
    assert_eq!(told("/v", vary), "edge; fwd=uri-miss; stored");
    assert_eq!(told("/v", &format!("{vary}X-A: 1\r\n")), "edge; fwd=vary-miss; stored");
    server.stop();
    let more = "proxy_cache_status edge; proxy_cache_conformance rfc9111; proxy_cache_use_stale http_503;";
    let server = caching(driver, &backend, more);
    let mut client = server.connect();
    let mut told = |path: &str, fields: &str| {
        let response = ask(&mut client, path, fields);
        response.header("Cache-Status").unwrap_or("-").split("; ttl=").next().unwrap().to_owned()
    };
    told("/a", FRESH);
    assert_eq!(told("/a", &format!("{FRESH}Cache-Control: no-cache\r\n")), "edge; fwd=request; stored");
    told("/stale", "X-Fields: Cache-Control: max-age=60|Age: 90|ETag: \"1\"\r\n");
    assert_eq!(told("/stale", "X-Status: 503 Oops\r\n"), "edge; fwd=stale; fwd-status=503");
    server.stop();
}

fn hosts_share_entries_only_where_the_key_says_so(driver: Driver) {
    let backend = origin();
    // As in nginx, the default key contains the upstream server and not the client's Host.
    for (key, second) in [("$scheme$proxy_host$request_uri", "HIT"), ("$scheme$host$request_uri", "MISS")] {
        let server = caching(driver, &backend, &format!("proxy_cache_key {key}; proxy_set_header Host $host;"));
        let mut client = server.connect();
        let mut of = |host: &str| client.ask(format!("GET /a HTTP/1.1\r\nHost: {host}\r\n{FRESH}\r\n"));
        assert_eq!(of("a").header("X-Cache"), Some("MISS"));
        assert_eq!(of("b").header("X-Cache"), Some(second), "{key}");
        assert_eq!(of("a").header("X-Cache"), Some("HIT"));
        server.stop();
    }
}

/// A cache with the default key before a server that answers with the request's target.
fn with_default_key(driver: Driver, locations: &str) -> (Serving, Server) {
    let backend = Backend::tcp().serve(|asked, client| {
        let (target, redirect) = (&asked.target, asked.target.strip_prefix("/app"));
        let field = redirect.map(|path| format!("X-Accel-Redirect: /inner{path}\r\n")).unwrap_or_default();
        let length = target.len();
        client.send(format!("HTTP/1.1 200 OK\r\n{field}Content-Length: {length}\r\n\r\n{target}"));
        true
    });
    let text = "proxy_cache_path %DIR%/cache keys_zone=one:1m; map $http_x_tenant $tenant { default $http_x_tenant; }
        server { listen %UNIX%; add_header X-Cache $upstream_cache_status always; proxy_cache one;
        proxy_cache_disk_timeout 60s; proxy_cache_lock_timeout 60s; proxy_cache_valid 1h; LOCATIONS }";
    let text = text.replace("LOCATIONS", locations).replace("BEHIND", &backend.address);
    let server = Setup::http(driver, &text).start();
    (backend, server)
}

fn default_key_is_the_request_to_the_server(driver: Driver) {
    let locations = "location /variables/ { proxy_pass http://BEHIND/$tenant$uri; }
        location /rewritten/ { rewrite ^/rewritten/(.*)$ /$tenant/$1 break; proxy_pass http://BEHIND; }
        location /replaced/ { proxy_pass http://BEHIND/r/; }
        location /block/ { proxy_pass http://BEHIND/k/; if ($http_x_tenant) { set $unused 1; } }
        location /elsewhere/ { rewrite ^ /replaced/one?b last; }";
    let (backend, server) = with_default_key(driver, locations);
    let mut client = server.connect();
    let rows = [
        ("/variables/x", "a", "MISS", "/a/variables/x"),
        ("/variables/x", "b", "MISS", "/b/variables/x"),
        ("/variables/x", "a", "HIT", "/a/variables/x"),
        ("/rewritten/x?y", "a", "MISS", "/a/x?y"),
        ("/rewritten/x?y", "b", "MISS", "/b/x?y"),
        ("/rewritten/x?y", "b", "HIT", "/b/x?y"),
        ("/replaced/one?b", "a", "MISS", "/r/one?b"),
        ("/elsewhere/1", "a", "HIT", "/r/one?b"),
        ("/block/1", "a", "MISS", "/k/1"),
        ("/block/2", "a", "MISS", "/k/2"),
        ("/block/2", "b", "HIT", "/k/2"),
    ];
    for (target, tenant, outcome_expected, body) in rows {
        let response = ask(&mut client, target, &format!("X-Tenant: {tenant}\r\n"));
        assert_eq!(outcome(&response), (outcome_expected, body), "{target} for {tenant}");
    }
    assert_eq!(backend.asked().len(), 7);
    server.stop();
}

fn requests_in_a_block_have_the_default_key_of_their_location(driver: Driver) {
    let locations = "location / { proxy_pass http://BEHIND; limit_except GET { allow all; } }";
    let (_backend, server) = with_default_key(driver, locations);
    let mut client = server.connect();
    for path in ["/a", "/b"] {
        assert_eq!(outcome(&ask(&mut client, path, "")), ("MISS", path));
    }
    client.ask("POST /a HTTP/1.1\r\nHost: a\r\nContent-Length: 0\r\n\r\n");
    assert_eq!(outcome(&ask(&mut client, "/a", "")), ("MISS", "/a"), "it has been changed");
    assert_eq!(outcome(&ask(&mut client, "/b", "")), ("HIT", "/b"));
    server.stop();
}

fn subrequests_have_entries_of_their_own_by_the_default_key(driver: Driver) {
    let locations = "location /page { proxy_cache off; ssi on; default_type text/html;
        return 200 '<!--#include virtual=\"/part/a\" -->+<!--#include virtual=\"/part/b\" -->'; }
        location /part/ { proxy_pass http://BEHIND; }";
    let (_backend, server) = with_default_key(driver, locations);
    let mut client = server.connect();
    for _ in 0..2 {
        assert_eq!(client.get("/page").text(), "/part/a+/part/b");
    }
    assert_eq!(outcome(&ask(&mut client, "/part/a", "")), ("HIT", "/part/a"));
    server.stop();
}

fn a_response_behind_x_accel_redirect_is_not_found_for_the_first_uri(driver: Driver) {
    // The application authorises each request.
    let locations = "location /app/ { proxy_no_cache 1; proxy_pass http://BEHIND; }
        location /inner/ { internal; proxy_pass http://BEHIND; }";
    let (backend, server) = with_default_key(driver, locations);
    let mut client = server.connect();
    for outcome_expected in ["MISS", "HIT"] {
        assert_eq!(outcome(&ask(&mut client, "/app/x", "")), (outcome_expected, "/inner/x"));
    }
    let asked = backend.asked().into_iter().map(|(_, asked)| asked.target);
    assert_eq!(asked.collect::<Vec<_>>(), ["/app/x", "/inner/x", "/app/x"]);
    server.stop();
}

fn keys_that_are_too_long_are_not_cached(driver: Driver) {
    let backend = origin();
    let server = caching(driver, &backend, "proxy_cache_key $http_x_key;");
    let mut client = server.connect();
    for (length, second) in [(6000, "HIT"), (7000, "HIT")] {
        let fields = format!("{FRESH}X-Key: {}\r\n", "k".repeat(length));
        assert_eq!(ask(&mut client, "/a", &fields).header("X-Cache"), Some("MISS"), "{length}");
        assert_eq!(ask(&mut client, "/a", &fields).header("X-Cache"), Some(second), "{length}");
    }
    server.stop();
    let server = caching(driver, &backend, "proxy_cache_key $http_x_key$http_x_key$http_x_key;");
    let mut client = server.connect();
    let fields = format!("{FRESH}X-Key: {}\r\n", "k".repeat(7000));
    for _ in 0..2 {
        assert_eq!(ask(&mut client, "/a", &fields).status, 200);
    }
    server.wait_logged("the cache key is too long: 21000 bytes");
    assert!(files_in(&server.directory.path().join("cache")).is_empty());
    server.stop();
}

fn a_hit_goes_by_sendfile_from_64_kib_on(driver: Driver) {
    let backend = Backend::tcp().serve(|asked, client| {
        let length: usize = asked.target.trim_start_matches('/').parse().unwrap();
        let body = "x".repeat(length);
        client.send(format!("HTTP/1.1 200 OK\r\nCache-Control: max-age=600\r\nContent-Length: {length}\r\n\r\n{body}"));
        true
    });
    let server = caching(driver, &backend, "sendfile on; } location = /files { test_files;");
    let sent = |path: &str| {
        let figure = || {
            let text = server.get("/files").text().to_owned();
            let word = text.split_whitespace().find_map(|word| word.strip_prefix("sendfile_bytes=")).expect("a figure");
            word.parse::<u64>().unwrap()
        };
        let before = figure();
        let response = server.get(path);
        (outcome(&response).0 == "HIT").then(|| figure() - before)
    };
    for path in ["/65535", "/65536"] {
        server.get(path);
    }
    server.look_until("both are stored", || files_in(&server.directory.path().join("cache")).len() == 2);
    // A loop that had to wait for its core takes the device for slow, and reads for a while.
    server.look_until("it goes by sendfile", || sent("/65536") == Some(65536));
    assert_eq!(sent("/65535"), Some(0));
    server.stop();
}

fn removed_cache_file_is_noticed(driver: Driver) {
    let backend = origin();
    let server = caching(driver, &backend, "");
    let path = server.directory.path().join("cache");
    ask(&mut server.connect(), "/a", FRESH);
    server.look_until("it is stored", || files_in(&path).len() == 1);
    assert_eq!(outcome(&server.get("/a")), ("HIT", "1"));
    std::fs::remove_file(&files_in(&path)[0]).unwrap();
    server.look_until("it is fetched anew", || outcome(&server.get("/a")).0 == "MISS");
    server.stop();
}
