//! Filters over real sockets: header fields and trailers that are added, and bodies that are compressed, decompressed
//! and modified.

use std::fs;
use std::io::{Read, Write};
use std::time::{Duration, UNIX_EPOCH};

use flate2::Compression;
use flate2::read::MultiGzDecoder;
use flate2::write::GzEncoder;

use crate::support::{self, Client, Driver, Response, Setup, with_each_driver};

with_each_driver!(
    gzip_is_for_those_that_take_it,
    compressed_response_has_no_length_no_ranges_and_a_weak_tag,
    bodies_of_every_size_are_compressed_whole,
    gzip_skips_responses_that_it_does_not_apply_to,
    gzip_proxied_tells_answers_to_proxies_apart,
    gzip_min_length_is_a_size,
    gzip_disable_knows_browsers,
    gzip_vary_tells_caches,
    every_level_compresses,
    the_ratio_is_logged,
    a_client_that_leaves_ends_the_compressing,
    long_compressions_delay_no_other_requests,
    gunzip_is_for_those_that_do_not_take_gzip,
    damaged_gzip_breaks_the_answer_off,
    a_bomb_is_inflated_as_fast_as_the_client_takes_it,
    gzip_static_sends_the_file_beside,
    strings_are_replaced_wherever_they_stand,
    replacement_changes_the_head,
    not_modified_response_describes_the_body_as_the_200_does,
    last_modified_of_add_header_goes_with_the_file_s_when_the_body_changes,
    filters_stack_in_nginx_s_order,
    headers_are_added_for_the_usual_statuses_or_always,
    levels_inherit_fields_as_they_are_told,
    expires_says_how_long_answers_may_be_kept,
    the_time_of_a_page_that_stands_for_another_is_not_told_and_counted_from,
    trailers_follow_the_body,
    hundreds_of_ranges_cost_no_more_than_the_whole,
    charsets_are_named_for_the_types_that_have_them,
    bytes_of_one_charset_become_those_of_another,
    a_long_body_is_converted_whole,
    subrequests_speak_the_charset_of_the_request,
);

/// Text of random words, so that it compresses.
fn text(length: usize) -> Vec<u8> {
    let words = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta"];
    let mut number = 12345_u32;
    let mut text = String::with_capacity(length + 10);
    while text.len() < length {
        number = number.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        text.push_str(words[(number >> 24) as usize % words.len()]);
        text.push(if number >> 31 == 0 { ' ' } else { '\n' });
    }
    text.truncate(length);
    text.into_bytes()
}

fn gzipped(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

fn gunzipped(bytes: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    MultiGzDecoder::new(bytes).read_to_end(&mut out).expect("gzip");
    out
}

fn ask(client: &mut Client, path: &str, fields: &str) -> Response {
    client.ask(format!("GET {path} HTTP/1.1\r\nHost: h\r\n{fields}\r\n"))
}

fn is_gzip(response: &Response) -> bool {
    response.header("Content-Encoding") == Some("gzip")
}

const ACCEPTED: &str = "Accept-Encoding: gzip\r\n";

fn gzip_is_for_those_that_take_it(driver: Driver) {
    let setup = Setup::server(driver, "root %DIR%/files; gzip on;");
    let server = setup.file("files/page.html", text(5000)).start();
    let mut client = server.connect();
    for (accepts, expected) in [
        ("", false),
        ("Accept-Encoding: gzip\r\n", true),
        ("Accept-Encoding: deflate, GZip;q=0.5\r\n", true),
        ("Accept-Encoding: gzip;q=0\r\n", false),
        ("Accept-Encoding: *\r\n", false),
        ("Accept-Encoding: br\r\nAccept-Encoding: gzip\r\n", false),
    ] {
        let response = ask(&mut client, "/page.html", accepts);
        assert_eq!((response.status, is_gzip(&response)), (200, expected), "{accepts}");
        let body = if expected { gunzipped(&response.body) } else { response.body };
        assert!(body == text(5000), "{accepts}");
    }
    server.stop();
}

fn compressed_response_has_no_length_no_ranges_and_a_weak_tag(driver: Driver) {
    let setup = Setup::server(driver, "root %DIR%/files; gzip on;");
    let server = setup.file("files/page.html", text(5000)).start();
    let mut client = server.connect();
    let plain = ask(&mut client, "/page.html", "");
    let tag = plain.header("ETag").unwrap().to_owned();
    let response = ask(&mut client, "/page.html", &format!("{ACCEPTED}Range: bytes=0-9\r\n"));
    assert_eq!(response.status, 200);
    assert_eq!(response.header("ETag"), Some(&*format!("W/{tag}")));
    assert_eq!(response.header("Last-Modified"), plain.header("Last-Modified"));
    assert_eq!((response.header("Content-Length"), response.header("Accept-Ranges")), (None, None));
    assert!(gunzipped(&response.body) == text(5000));
    let unchanged = ask(&mut client, "/page.html", &format!("{ACCEPTED}If-None-Match: W/{tag}\r\n"));
    assert_eq!((unchanged.status, unchanged.header("Content-Encoding")), (304, None));
    let head = client.ask(format!("HEAD /page.html HTTP/1.1\r\nHost: h\r\n{ACCEPTED}\r\n"));
    assert!(is_gzip(&head) && head.header("Content-Length").is_none());
    // The body ends with the connection, since HTTP/1.0 has no chunks; `gzip_http_version` is 1.1 by default.
    let old = server.connect().ask(format!("GET /page.html HTTP/1.0\r\n{ACCEPTED}\r\n"));
    assert!(!is_gzip(&old) && old.body == text(5000));
    server.stop();
}

fn bodies_of_every_size_are_compressed_whole(driver: Driver) {
    // Short bodies are compressed in one step: up to 125,000 bytes if the whole body is there, else up to 32 KiB.
    let sizes = [1, 19, 20, 1000, 32_768, 32_769, 65_535, 65_536, 65_537, 125_000, 125_001, 1 << 20];
    let locations = "root %DIR%/files; gzip on; gzip_min_length 0; gzip_http_version 1.0;
        location /sendfile { alias %DIR%/files/; sendfile on; }
        location /stream { alias %DIR%/files/; sub_filter no_such_text x; }
        location /little { alias %DIR%/files/; gzip_buffers 4 4k; }
        location = /text { return 200 short; default_type text/html; }";
    let setup = Setup::server(driver, locations).file("files/0.html", "");
    let setup = sizes.iter().fold(setup, |setup, &size| setup.file(&format!("files/{size}.html"), text(size)));
    let server = setup.start();
    let mut client = server.connect();
    for size in [0].iter().chain(&sizes) {
        for prefix in ["", "/sendfile", "/stream", "/little"] {
            let response = ask(&mut client, &format!("{prefix}/{size}.html"), ACCEPTED);
            assert!(is_gzip(&response), "{size}");
            assert!(gunzipped(&response.body) == text(*size), "{size}");
        }
    }
    assert_eq!(gunzipped(&ask(&mut client, "/text", ACCEPTED).body), b"short");
    let old = server.connect().ask(format!("GET /65537.html HTTP/1.0\r\n{ACCEPTED}\r\n"));
    assert!(is_gzip(&old) && gunzipped(&old.body) == text(65_537));
    server.stop();
}

fn gzip_skips_responses_that_it_does_not_apply_to(driver: Driver) {
    let locations = "default_type text/html; gzip on;
        location = /short { return 200 nineteen_characters; }
        location = /twenty { return 200 twenty_characters_in; }
        location = /type { default_type text/plain; return 200 this_is_another_media_type; }
        location = /types { default_type Text/CSS; gzip_types text/css; return 200 this_is_another_media_type; }
        location = /all { default_type image/x-none; gzip_types *; return 200 this_is_another_media_type; }
        location = /parameter { default_type \"text/html; charset=x\"; return 200 this_is_the_same_media_type; }
        location = /encoded { add_header Content-Encoding br; return 200 this_is_encoded_already; }
        location = /403 { return 403; }
        location = /404 { return 404; }
        location = /500 { return 500; }
        location = /created { return 201 this_is_another_status; }
        location = /off { gzip off; return 200 this_is_not_to_be_compressed; }";
    let server = Setup::server(driver, locations).start();
    for (path, expected) in [
        ("/short", false),
        ("/twenty", true),
        ("/type", false),
        ("/types", true),
        ("/all", true),
        ("/parameter", true),
        ("/encoded", false),
        ("/403", true),
        ("/404", true),
        ("/500", false),
        ("/created", false),
        ("/off", false),
    ] {
        assert_eq!(is_gzip(&ask(&mut server.connect(), path, ACCEPTED)), expected, "{path}");
    }
    server.stop();
}

fn gzip_proxied_tells_answers_to_proxies_apart(driver: Driver) {
    let cases = [
        ("off", "", "", false),
        ("any", "", "", true),
        ("any off", "", "", false),
        ("auth", "", "", true),
        ("auth no_etag", "add_header ETag '\"x\"';", "", false),
        ("auth no_etag", "add_header ETag '\"x\"';", "Authorization: Basic eA==\r\n", true),
        ("no_last_modified", "add_header Last-Modified 'Sun, 09 Sep 2001 01:46:40 GMT';", "", false),
        ("no_etag", "add_header Last-Modified 'Sun, 09 Sep 2001 01:46:40 GMT';", "", true),
        ("expired", "expires -1;", "", true),
        ("expired", "expires 1h;", "", false),
        ("no-cache", "expires -1;", "", false),
        ("no-cache", "add_header Cache-Control no-cache;", "", true),
        ("no-store private", "add_header Cache-Control 'max-age=0, private';", "", true),
        ("no-store", "add_header Cache-Control private;", "", false),
        ("no-store", "", "", true),
        // Several conditions of one block add up.
        ("no-store; gzip_proxied private", "add_header Cache-Control private;", "", true),
    ];
    let mut locations = "default_type text/html; gzip on;".to_owned();
    for (number, (when, fields, ..)) in cases.iter().enumerate() {
        let body = "long_enough_to_be_compressed";
        locations += &format!("location = /{number} {{ gzip_proxied {when}; {fields} return 200 {body}; }}\n");
    }
    let server = Setup::server(driver, &locations).start();
    let mut client = server.connect();
    for (number, (when, fields, asked, expected)) in cases.iter().enumerate() {
        let response = ask(&mut client, &format!("/{number}"), &format!("{ACCEPTED}Via: 1.1 proxy\r\n{asked}"));
        assert_eq!(is_gzip(&response), *expected, "{when} {fields} {asked}");
        assert!(is_gzip(&ask(&mut client, &format!("/{number}"), ACCEPTED)), "{when} without a proxy");
    }
    server.stop();
}

fn gzip_min_length_is_a_size(driver: Driver) {
    let setup = Setup::server(driver, "root %DIR%/files; gzip on; gzip_min_length 1k;");
    let server = setup.file("files/1023.html", text(1023)).file("files/1024.html", text(1024)).start();
    let mut client = server.connect();
    assert!(!is_gzip(&ask(&mut client, "/1023.html", ACCEPTED)) && is_gzip(&ask(&mut client, "/1024.html", ACCEPTED)));
    server.stop();
}

fn gzip_disable_knows_browsers(driver: Driver) {
    let locations = "default_type text/html; gzip on; gzip_disable ^Old/ msie6;
        location / { return 200 long_enough_to_be_compressed; }
        location /inner { gzip_disable inner; return 200 long_enough_to_be_compressed; }";
    let server = Setup::server(driver, locations).start();
    let mut client = server.connect();
    for (path, agent, expected) in [
        ("/", "old/1.0", false),
        ("/", "Not Old/1.0", true),
        ("/", "Mozilla/4.0 (compatible; MSIE 6.0; Windows NT 5.0)", false),
        ("/", "Mozilla/4.0 (compatible; MSIE 6.0; Windows NT 5.1; SV1)", true),
        // Regular expressions replace those of the outer level; `msie6` is inherited separately.
        ("/inner", "Old/1.0", true),
        ("/inner", "Inner/1.0", false),
        ("/inner", "Mozilla/4.0 (compatible; MSIE 5.5)", false),
    ] {
        let response = ask(&mut client, path, &format!("{ACCEPTED}User-Agent: {agent}\r\n"));
        assert_eq!(is_gzip(&response), expected, "{path} {agent}");
    }
    server.stop();
}

fn gzip_vary_tells_caches(driver: Driver) {
    let locations = "default_type text/html; gzip on; gzip_vary on;
        location / { return 200 long_enough_to_be_compressed; }
        location /short { return 200 short; }
        location /static { alias %DIR%/files/; gzip_static on; }
        location /silent { gzip_vary off; return 200 long_enough_to_be_compressed; }";
    let setup = Setup::server(driver, locations);
    let server = setup.file("files/both.txt", "plain").file("files/both.txt.gz", gzipped(b"packed")).start();
    let mut client = server.connect();
    for (path, fields, expected) in [
        ("/", ACCEPTED, Some("Accept-Encoding")),
        ("/", "", Some("Accept-Encoding")),
        ("/short", ACCEPTED, None),
        ("/static/both.txt", ACCEPTED, Some("Accept-Encoding")),
        ("/static/both.txt", "", Some("Accept-Encoding")),
        ("/silent", ACCEPTED, None),
    ] {
        assert_eq!(ask(&mut client, path, fields).header("Vary"), expected, "{path} {fields}");
    }
    assert_eq!(ask(&mut client, "/static/both.txt", "").body, b"plain");
    server.stop();
}

fn every_level_compresses(driver: Driver) {
    let levels: String = (1..=9)
        .map(|level| format!("location /{level}/ {{ alias %DIR%/files/; gzip_comp_level {level}; }}\n"))
        .collect();
    let setup = Setup::server(driver, &format!("gzip on; {levels}"));
    // A body that is compressed in one step, and one that is compressed as a stream.
    let sizes = [4000, 200_000];
    let setup = sizes.iter().fold(setup, |setup, &size| setup.file(&format!("files/{size}.html"), text(size)));
    let server = setup.start();
    let mut client = server.connect();
    for size in sizes {
        let lengths = (1..=9).map(|level| {
            let response = ask(&mut client, &format!("/{level}/{size}.html"), ACCEPTED);
            assert!(gunzipped(&response.body) == text(size), "{level}");
            response.body.len()
        });
        let lengths: Vec<usize> = lengths.collect();
        assert!(lengths[8] < lengths[0], "{lengths:?}");
    }
    server.stop();
}

fn the_ratio_is_logged(driver: Driver) {
    let setup = Setup::http(
        driver,
        "log_format ratio 'ratio=$gzip_ratio'; access_log %DIR%/ratio.log ratio;
         server { listen %UNIX%; root %DIR%/files; gzip on; }",
    );
    let server = setup.file("files/page.html", text(5000)).start();
    let mut client = server.connect();
    let packed = ask(&mut client, "/page.html", ACCEPTED).body.len() as f64;
    ask(&mut client, "/page.html", "");
    let line = server.directory.wait_line("ratio.log", "ratio=");
    let ratio: f64 = line.trim().trim_start_matches("ratio=").parse().unwrap_or_else(|_| panic!("{line}"));
    assert!((ratio - 5000.0 / packed).abs() <= 0.005, "{ratio} of {packed}");
    server.directory.wait_line("ratio.log", "ratio=-");
    server.stop();
}

fn a_client_that_leaves_ends_the_compressing(driver: Driver) {
    let setup = Setup::server(driver, "root %DIR%/files; gzip on; location /quick { return 200 quick; }");
    let server = setup.file("files/big.html", text(4 << 20)).start();
    for _ in 0..4 {
        let mut client = server.connect();
        client.send(format!("GET /big.html HTTP/1.1\r\nHost: h\r\n{ACCEPTED}\r\n"));
        assert!(client.chunk_after_head().is_some());
        drop(client);
    }
    assert_eq!(server.get("/quick").text(), "quick");
    server.stop();
}

fn long_compressions_delay_no_other_requests(driver: Driver) {
    let locations = "root %DIR%/files; gzip on; gzip_comp_level 9; location /quick { return 200 quick; }";
    let configuration = support::http_configuration(driver, &format!("server {{ listen %UNIX%; {locations} }}"));
    let setup = Setup::configuration(&configuration.replace("worker_processes 2", "worker_processes 1"));
    // Random text of two letters is the hardest for zlib: a second for each of these bodies.
    let mut number = 1_u64;
    let letters = std::iter::repeat_with(|| {
        number = number.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        b"ab"[(number >> 63) as usize]
    });
    let letters: Vec<u8> = letters.take(500_000).collect();
    let server = setup.file("files/hard.html", &letters).start();
    let mut slow: Vec<Client> = (0..4).map(|_| server.connect()).collect();
    for client in &mut slow {
        client.send(format!("GET /hard.html HTTP/1.1\r\nHost: h\r\n{ACCEPTED}\r\n"));
    }
    let mut quick = server.connect();
    for _ in 0..50 {
        assert_eq!(quick.get("/quick").text(), "quick");
    }
    for client in &mut slow {
        assert!(gunzipped(&client.response().body) == letters);
    }
    // The short requests were answered between the steps, and so before the compressions ended.
    server.directory.wait_until("all logged", |directory| directory.read("access.log").matches("hard").count() == 4);
    let log = server.directory.read("access.log");
    let first_hard = log.lines().position(|line| line.contains("hard")).unwrap();
    assert!(log.lines().take(first_hard).filter(|line| line.contains("quick")).count() == 50, "{log}");
    server.stop();
}

fn gunzip_is_for_those_that_do_not_take_gzip(driver: Driver) {
    let setup = Setup::server(driver, "root %DIR%/files; gzip_static always; gunzip on; gzip_vary on;");
    let packed = gzipped(&text(300_000));
    let twice = [gzipped(b"one"), gzipped(b""), gzipped(b"two")].concat();
    let server = setup.file("files/page.html.gz", &packed).file("files/twice.html.gz", twice).start();
    let mut client = server.connect();
    let response = ask(&mut client, "/page.html", "");
    assert_eq!((response.status, is_gzip(&response)), (200, false));
    assert_eq!((response.header("Content-Length"), response.header("Vary")), (None, Some("Accept-Encoding")));
    assert!(response.header("ETag").unwrap().starts_with("W/"));
    assert!(response.body == text(300_000));
    let response = ask(&mut client, "/page.html", ACCEPTED);
    assert!(is_gzip(&response) && response.body == packed);
    assert_eq!(response.header("Vary"), Some("Accept-Encoding"));
    assert_eq!(ask(&mut client, "/twice.html", "").body, b"onetwo");
    let part = ask(&mut client, "/page.html", &format!("{ACCEPTED}Range: bytes=0-9\r\n"));
    assert_eq!((part.status, &part.body[..]), (206, &packed[..10]));
    server.stop();
}

fn damaged_gzip_breaks_the_answer_off(driver: Driver) {
    let setup = Setup::server(driver, "root %DIR%/files; gzip_static always; gunzip on;");
    let packed = gzipped(&text(300_000));
    let mut damaged = packed.clone();
    let length = damaged.len();
    damaged[length - 5] ^= 1;
    let setup = setup.file("files/short.html.gz", &packed[..length / 2]).file("files/other.html.gz", "no gzip at all");
    let setup = setup.file("files/damaged.html.gz", damaged).file("files/empty.html.gz", "");
    let server = setup.file("files/behind.html.gz", [&packed[..], b"something else"].concat()).start();
    for path in ["/short.html", "/other.html", "/damaged.html", "/behind.html", "/empty.html"] {
        let mut client = server.connect();
        client.send(format!("GET {path} HTTP/1.1\r\nHost: h\r\n\r\n"));
        let rest = client.read_to_end();
        assert!(!rest.ends_with(b"0\r\n\r\n"), "{path}: the client must see that something is missing");
    }
    server.directory.wait_line("error.log", "inflate() ");
    server.stop();
}

fn a_bomb_is_inflated_as_fast_as_the_client_takes_it(driver: Driver) {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
    let megabyte = vec![0; 1 << 20];
    for _ in 0..1024 {
        encoder.write_all(&megabyte).unwrap();
    }
    let setup =
        Setup::server(driver, "root %DIR%/files; gzip_static always; gunzip on; location /quick { return 200 quick; }");
    let server = setup.file("files/bomb.html.gz", encoder.finish().unwrap()).start();
    let mut clients: Vec<Client> = (0..3).map(|_| server.connect()).collect();
    for client in &mut clients {
        client.send("GET /bomb.html HTTP/1.1\r\nHost: h\r\n\r\n");
        assert_eq!(client.chunk_after_head().map(|chunk| chunk.iter().all(|&byte| byte == 0)), Some(true));
    }
    assert_eq!(server.get("/quick").text(), "quick");
    // None of the clients reads on: the inflated data waits in buffers of bounded size.
    let (held, _) = support::resident_memory(server.worker());
    assert!(held < 100 << 20, "{held}");
    drop(clients);
    server.stop();
}

fn gzip_static_sends_the_file_beside(driver: Driver) {
    let locations = "root %DIR%/files; gzip_static on;
        location /always/ { alias %DIR%/files/; gzip_static always; }
        location /off/ { alias %DIR%/files/; gzip_static off; }";
    let packed = gzipped(b"packed");
    let setup = Setup::server(driver, locations).file("files/page.html", "plain").file("files/page.html.gz", &packed);
    let setup = setup.file("files/plain.html", "plain").file("files/only.html.gz", &packed);
    let server = setup.file("files/directory.html.gz/x", "").file("files/directory.html", "plain").start();
    let mut client = server.connect();
    for (path, fields, status, body) in [
        ("/page.html", ACCEPTED, 200, &packed[..]),
        ("/page.html", "", 200, b"plain"),
        ("/plain.html", ACCEPTED, 200, b"plain"),
        ("/directory.html", ACCEPTED, 200, b"plain"),
        ("/only.html", ACCEPTED, 200, &packed),
        ("/always/only.html", "", 200, &packed),
        ("/off/page.html", ACCEPTED, 200, b"plain"),
    ] {
        let response = ask(&mut client, path, fields);
        assert_eq!((response.status, &response.body[..]), (status, body), "{path} {fields}");
        assert_eq!(is_gzip(&response), body == packed, "{path} {fields}");
        assert_eq!(response.header("Content-Type"), Some("text/html"), "{path} {fields}");
        assert_eq!(response.header("Content-Length"), Some(&*body.len().to_string()), "{path} {fields}");
    }
    assert_eq!(ask(&mut client, "/only.html", "").status, 404);
    let post = client.ask("POST /page.html HTTP/1.1\r\nHost: h\r\nContent-Length: 0\r\n\r\n");
    assert_eq!(post.status, 405);
    let tag = ask(&mut client, "/page.html", ACCEPTED).header("ETag").unwrap().to_owned();
    let unchanged = ask(&mut client, "/page.html", &format!("{ACCEPTED}If-None-Match: {tag}\r\n"));
    assert_eq!((unchanged.status, unchanged.header("Content-Encoding")), (304, None));
    server.stop();
}

fn strings_are_replaced_wherever_they_stand(driver: Driver) {
    let locations = "root %DIR%/files; sub_filter NEEDLE [$arg_by];
        location /all/ { alias %DIR%/files/; sub_filter_once off; sub_filter needle pin; sub_filter hay ''; }
        location /variable { default_type text/html; sub_filter $arg_s x; return 200 'a b a'; }
        location /type { default_type text/plain; return 200 needle; }
        location /types { default_type text/plain; sub_filter_types text/plain; return 200 needle; }
        location /long { default_type text/html; sub_filter_once off; sub_filter x %LONG%; return 200 %MANY%; }";
    // Places at both ends of the page and around the ends of the pieces in which a file is read.
    let mut page = vec![b'.'; 200_000];
    let places = [0, 65_529, 65_536 + 6, 131_068, 199_994];
    for place in places {
        page[place..place + 6].copy_from_slice(b"nEEdle");
    }
    let replaced =
        |by: &str, count: usize| String::from_utf8(page.clone()).unwrap().replacen("nEEdle", by, count).into_bytes();
    // The replacement makes the body a thousand times larger.
    let (long, many) = ("y".repeat(3000), "x-".repeat(500));
    let setup = Setup::server(driver, &locations.replace("%LONG%", &long).replace("%MANY%", &many))
        .file("files/page.html", &page);
    let server = setup.file("files/hay.html", "HAYneedleHaY").start();
    let mut client = server.connect();
    assert!(ask(&mut client, "/page.html?by=x", "").body == replaced("[x]", 1));
    assert!(ask(&mut client, "/all/page.html", "").body == replaced("pin", 5));
    assert_eq!(ask(&mut client, "/all/hay.html", "").body, b"pin");
    for (path, body) in [
        ("/variable?s=b", "a x a"),
        ("/variable?s=A", "x b a"),
        ("/variable", "a b a"),
        ("/type", "needle"),
        ("/types?by=2", "[2]"),
    ] {
        assert_eq!(ask(&mut client, path, "").text(), body, "{path}");
    }
    assert!(ask(&mut client, "/long", "").text() == many.replace('x', &long));
    server.stop();
}

fn replacement_changes_the_head(driver: Driver) {
    let locations = "root %DIR%/files; sub_filter a b;
        location /kept/ { alias %DIR%/files/; sub_filter_last_modified on; }";
    let setup = Setup::server(driver, locations).file("files/page.html", "aa").file("files/empty.html", "");
    let server = setup.start();
    let mut client = server.connect();
    let plain = ask(&mut client, "/page.html", "Range: bytes=0-0\r\n");
    assert_eq!((plain.status, plain.text()), (200, "ba"));
    for name in ["Content-Length", "Last-Modified", "ETag", "Accept-Ranges"] {
        assert_eq!(plain.header(name), None, "{name}");
    }
    let kept = ask(&mut client, "/kept/page.html", "");
    assert!(kept.header("ETag").unwrap().starts_with("W/\"") && kept.header("Last-Modified").is_some());
    assert_eq!(ask(&mut client, "/empty.html", "").header("Content-Length"), Some("0"));
    server.stop();
}

/// `add_header` sets the modification time of the file before the body is modified.
fn last_modified_of_add_header_goes_with_the_file_s_when_the_body_changes(driver: Driver) {
    let setup = Setup::server(
        driver,
        "add_header Last-Modified 'Tue, 01 Jan 2030 00:00:00 GMT'; root %DIR%/files; types { } default_type text/html;
         location /sub { alias %DIR%/gale.conf; sub_filter never x; }
         location /ssi { alias %DIR%/gale.conf; ssi on; }
         location /kept { alias %DIR%/gale.conf; sub_filter never x; sub_filter_last_modified on; }
         location /gzip { alias %DIR%/gale.conf; gzip on; }
         location /added { alias %DIR%/gale.conf; add_after_body /text; }
         location /text { return 200 text; }",
    );
    let server = setup.start();
    let mut client = server.connect();
    for (path, is_kept) in [("/sub", false), ("/ssi", false), ("/kept", true), ("/gzip", true), ("/added", true)] {
        let response = ask(&mut client, path, "Accept-Encoding: gzip\r\n");
        let expected = is_kept.then_some("Tue, 01 Jan 2030 00:00:00 GMT");
        assert_eq!((response.status, response.header("Last-Modified")), (200, expected), "{path}");
    }
    server.stop();
}

/// A cache updates the stored response that has the same validators (RFC 9111 §4.3.4), so a 304 carries the validators
/// that the filters left (RFC 9110 §15.4.5).
fn not_modified_response_describes_the_body_as_the_200_does(driver: Driver) {
    let locations = "root %DIR%/files; sub_filter a b; ssi_last_modified on; sub_filter_last_modified on;
        location /none/ { alias %DIR%/files/; sub_filter_last_modified off; }
        location /any/ { alias %DIR%/files/; sub_filter_types *; sub_filter_last_modified off; }
        location /ssi/ { alias %DIR%/files/; sub_filter none none; ssi on; ssi_last_modified off; }
        location /gzip/ { alias %DIR%/files/; gzip on; gzip_min_length 1; gzip_vary on; }
        location /unpacked/ { alias %DIR%/files/packed/; gzip_static always; gunzip on; gzip_vary on; }
        location /added/ { alias %DIR%/files/; add_after_body /other.html; }
        location /expires/ { alias %DIR%/files/; expires 1h; }
        location /as-is/ { alias %DIR%/files/txt/; }";
    let setup = Setup::server(driver, locations).file("files/page.html", "aa <b>").file("files/other.html", "b");
    let setup = setup.file("files/packed/page.html.gz", gzipped(b"aa")).file("files/txt/page.html", "");
    let server = setup.start();
    let mut client = server.connect();
    for place in ["", "/none", "/any", "/ssi", "/gzip", "/unpacked", "/added", "/expires", "/as-is"] {
        let path = format!("{place}/page.html");
        let accepted = if place == "/gzip" { ACCEPTED } else { "" };
        let whole = ask(&mut client, &path, accepted);
        let unchanged = ask(&mut client, &path, &format!("{accepted}If-None-Match: *\r\n"));
        assert_eq!((whole.status, unchanged.status), (200, 304), "{path}");
        for name in ["ETag", "Last-Modified", "Vary", "Cache-Control"] {
            assert_eq!(unchanged.header(name), whole.header(name), "{name} of {path}");
        }
        for name in ["Content-Type", "Content-Length", "Content-Encoding", "Transfer-Encoding", "Accept-Ranges"] {
            assert_eq!(unchanged.header(name), None, "{name} of {path}");
        }
    }
    server.stop();
}

fn filters_stack_in_nginx_s_order(driver: Driver) {
    let locations =
        "root %DIR%/files; gzip_static always; gunzip on; gzip on; sub_filter alpha OMEGA; sub_filter_once off;
        location /plain/ { alias %DIR%/files/; gzip_static off; add_trailer X-Ratio $gzip_ratio; }";
    let setup = Setup::server(driver, locations).file("files/packed.html.gz", gzipped(&text(100_000)));
    let server = setup.file("files/page.html", text(100_000)).start();
    let replaced = String::from_utf8(text(100_000)).unwrap().replace("alpha", "OMEGA").into_bytes();
    let mut client = server.connect();
    // Decompressed, then modified.
    let response = ask(&mut client, "/packed.html", "");
    assert!(!is_gzip(&response) && response.body == replaced);
    // Modified, then compressed, with trailers.
    let response = ask(&mut client, "/plain/page.html", ACCEPTED);
    assert!(is_gzip(&response) && gunzipped(&response.body) == replaced);
    assert_eq!(response.trailers.len(), 1);
    assert!(response.trailers[0].1.parse::<f64>().unwrap() > 1.0);
    server.stop();
}

fn headers_are_added_for_the_usual_statuses_or_always(driver: Driver) {
    let statuses = [200, 201, 204, 301, 302, 303, 307, 308, 400, 404, 500];
    let locations: String =
        statuses.iter().map(|status| format!("location = /{status} {{ return {status}; }}\n")).collect();
    let server = Setup::server(
        driver,
        &format!(
            "add_header X-Usual $status; add_header X-Always $uri always; add_header X-Empty '';
             add_header ETag '\"tag\"'; add_header Last-Modified 'Sun, 09 Sep 2001 01:46:40 GMT';
             {locations} location = /odd {{ add_header Last-Modified soon; return 200; }}"
        ),
    )
    .start();
    for status in statuses {
        let response = server.get(&format!("/{status}"));
        let is_usual = status < 400;
        assert_eq!(response.header("X-Usual"), is_usual.then_some(&*status.to_string()));
        assert_eq!(response.header("X-Always"), Some(&*format!("/{status}")));
        assert_eq!(response.header("ETag"), is_usual.then_some("\"tag\""));
        assert_eq!(response.header("Last-Modified"), is_usual.then_some("Sun, 09 Sep 2001 01:46:40 GMT"));
        assert_eq!(response.header("X-Empty"), None);
    }
    assert_eq!(server.get("/odd").header("Last-Modified"), Some("soon"));
    server.stop();
}

fn levels_inherit_fields_as_they_are_told(driver: Driver) {
    let locations = "add_header X-A server; add_trailer X-T server;
        location /same { return 200; }
        location /own { add_header X-B own; return 200; }
        location /off { add_header_inherit off; return 200; }
        location /merge { add_header_inherit merge; add_header X-B own; add_trailer_inherit off;
            location /merge/inner { add_header X-C inner; return 200; } return 200; }";
    let server = Setup::server(driver, locations).start();
    for (path, expected, trailers) in [
        ("/same", "X-A", 1),
        ("/own", "X-B", 1),
        ("/off", "", 1),
        ("/merge", "X-B X-A", 0),
        ("/merge/inner", "X-C X-B X-A", 0),
    ] {
        let response = server.get(path);
        let names: Vec<&str> =
            response.headers.iter().map(|(name, _)| &**name).filter(|name| name.starts_with("X-")).collect();
        assert_eq!(names.join(" "), expected, "{path}");
        assert_eq!(response.trailers.len(), trailers, "{path}");
    }
    server.stop();
}

fn expires_says_how_long_answers_may_be_kept(driver: Driver) {
    let locations = "root %DIR%/files; expires 1h;
        location /past { expires -1; return 200; }
        location /epoch { expires epoch; return 200; }
        location /max { expires max; add_header Cache-Control public; return 200; }
        location /off { expires off; return 200; }
        location /daily { expires @0h; return 200; }
        location /modified/ { alias %DIR%/files/; expires modified 1000000000; }
        location /variable { expires $arg_e; return 200; }
        location /error { return 500; }";
    let server = Setup::server(driver, locations).file("files/page.html", "x").start();
    let page = fs::File::options().write(true).open(server.directory.path().join("files/page.html")).unwrap();
    page.set_modified(UNIX_EPOCH + Duration::from_secs(1_000_000_000)).unwrap();
    let both = |path: &str| {
        let response = server.get(path);
        let value = |name: &str| {
            let values = response.headers.iter().filter(|(own, _)| own == name).map(|(_, value)| value.as_str());
            values.collect::<Vec<_>>().join("; ")
        };
        (value("Expires"), value("Cache-Control"))
    };
    let texts = |expires: &str, control: &str| (expires.to_owned(), control.to_owned());
    assert_eq!(both("/page.html").1, "max-age=3600");
    assert_eq!(both("/past").1, "no-cache");
    assert_eq!(both("/epoch"), texts("Thu, 01 Jan 1970 00:00:01 GMT", "no-cache"));
    assert_eq!(both("/max"), texts("Thu, 31 Dec 2037 23:55:55 GMT", "max-age=315360000; public"));
    assert_eq!(both("/off"), texts("", ""));
    assert!(both("/daily").1.starts_with("max-age="));
    let (expires, control) = both("/modified/page.html");
    assert_eq!(expires, "Wed, 18 May 2033 03:33:20 GMT");
    assert!(control.starts_with("max-age="), "{control}");
    assert_eq!(both("/variable?e=epoch").1, "no-cache");
    assert_eq!(both("/variable?e=60").1, "max-age=60");
    assert_eq!(both("/variable?e=nonsense"), texts("", ""));
    assert_eq!(both("/error"), texts("", ""));
    server.stop();
}

fn the_time_of_a_page_that_stands_for_another_is_not_told_and_counted_from(driver: Driver) {
    let locations = "root %DIR%/files; expires modified 1000000000;
        location /201/ { error_page 404 =201 /page; }
        location /204/ { error_page 404 =204 /page; }
        location /301/ { error_page 404 =301 /page; }
        location /304/ { error_page 404 =304 /page; }
        location /404/ { error_page 404 /page; }
        location /added/201/ { error_page 404 =201 /set; }
        location /added/204/ { error_page 404 =204 /set; }
        location /added/404/ { error_page 404 /set; }
        location = /odd { alias %DIR%/files/page; add_header Last-Modified 'some day'; }
        location = /set { alias %DIR%/files/page; add_header Last-Modified 'Mon, 28 Sep 1970 06:00:00 GMT' always;
            add_header X-Sent [$sent_http_last_modified] always; }";
    let server = Setup::server(driver, locations).file("files/page", "x").start();
    let page = fs::File::options().write(true).open(server.directory.path().join("files/page")).unwrap();
    page.set_modified(UNIX_EPOCH + Duration::from_secs(1_000_000_000)).unwrap();
    // The values are those of nginx.
    let (own, set) = (Some("Sun, 09 Sep 2001 01:46:40 GMT"), Some("Mon, 28 Sep 1970 06:00:00 GMT"));
    let expires = Some("Wed, 18 May 2033 03:33:20 GMT");
    let expected = [
        ("/page", 200, own, expires),
        ("/201/x", 201, None, expires),
        ("/204/x", 204, None, expires),
        ("/301/x", 301, None, expires),
        ("/304/x", 304, own, expires),
        ("/404/x", 404, None, None),
        ("/set", 200, set, expires),
        ("/added/201/x", 201, set, expires),
        ("/added/204/x", 204, set, expires),
        ("/added/404/x", 404, set, None),
        ("/odd", 200, Some("some day"), expires),
    ];
    for (path, status, modified, expires) in expected {
        let response = server.get(path);
        assert_eq!((response.status, response.header("Last-Modified")), (status, modified), "{path}");
        assert_eq!(response.header("Expires"), expires, "{path}");
        if modified == set {
            assert_eq!(response.header("X-Sent"), Some("[Mon, 28 Sep 1970 06:00:00 GMT]"), "{path}");
        }
    }
    server.stop();
}

fn trailers_follow_the_body(driver: Driver) {
    let locations = "root %DIR%/files;
        add_trailer X-First $host; add_trailer X-Second $sent_trailer_x_first-$sent_http_etag always;
        add_trailer X-Empty '';
        location /plain { chunked_transfer_encoding off; return 200 plain; }
        location /range { alias %DIR%/files/page.html; }";
    let setup = Setup::server(driver, locations).file("files/page.html", text(100_000)).file("files/empty.html", "");
    let server = setup.start();
    let mut client = server.connect();
    for path in ["/page.html", "/empty.html"] {
        let response = ask(&mut client, path, "");
        assert_eq!((response.status, response.header("Content-Length")), (200, None), "{path}");
        let tag = response.header("ETag").unwrap();
        let expected = [("X-First".to_owned(), "h".to_owned()), ("X-Second".to_owned(), format!("h-{tag}"))];
        assert_eq!(response.trailers, expected, "{path}");
    }
    let missing = ask(&mut client, "/missing", "");
    assert_eq!(missing.trailers, [("X-Second".to_owned(), "-".to_owned())]);
    // A 206 has trailers, too; a response without chunks has none.
    let part = ask(&mut client, "/range", "Range: bytes=5-9\r\n");
    assert_eq!((part.status, &part.body[..], part.trailers.len()), (206, &text(10)[5..], 2));
    assert_eq!(ask(&mut client, "/plain", "").header("Content-Length"), Some("5"));
    let head = client.ask("HEAD /page.html HTTP/1.1\r\nHost: h\r\n\r\n");
    assert_eq!(head.header("Content-Length"), Some("100000"));
    let old = server.connect().ask("GET /page.html HTTP/1.0\r\n\r\n");
    assert!(old.body == text(100_000));
    server.stop();
}

fn hundreds_of_ranges_cost_no_more_than_the_whole(driver: Driver) {
    let locations = "root %DIR%/files; large_client_header_buffers 4 16k;
        location /few/ { alias %DIR%/files/; max_ranges 500; }
        location /none/ { alias %DIR%/files/; max_ranges 0; }";
    let server = Setup::server(driver, locations).file("files/page.html", text(100_000)).start();
    let mut client = server.connect();
    let ranges = |list: Vec<String>| format!("Range: bytes={}\r\n", list.join(","));
    let whole = text(100_000);
    for list in [
        vec!["0-".to_owned(); 500],
        vec!["-9223372036854775807".to_owned(); 500],
        vec!["0-0".to_owned(); 1000],
        (0..500).map(|first| format!("{first}-9223372036854775807")).collect(),
    ] {
        let response = ask(&mut client, "/page.html", &ranges(list));
        assert_eq!((response.status, response.header("Accept-Ranges")), (200, Some("bytes")));
        assert!(response.body == whole);
    }
    // As many ranges as `max_ranges` allows are sent, each part with its head.
    let list: Vec<String> = (0..500).map(|number| format!("{}-{}", number * 100, number * 100 + 9)).collect();
    let response = ask(&mut client, "/few/page.html", &ranges(list));
    assert_eq!(response.status, 206);
    let parts = response.text().split("\r\n--").filter_map(|part| part.split_once("\r\n\r\n")).map(|(_, bytes)| bytes);
    let parts: Vec<&str> = parts.collect();
    assert_eq!(parts.len(), 500);
    assert!(parts.iter().enumerate().all(|(number, part)| part.as_bytes() == &whole[number * 100..][..10]));
    let one_more = ranges(vec!["0-0".to_owned(); 501]);
    assert_eq!(ask(&mut client, "/few/page.html", &one_more).status, 200);
    let none = ask(&mut client, "/none/page.html", "Range: bytes=0-9\r\n");
    assert_eq!((none.status, none.header("Accept-Ranges")), (200, None));
    server.stop();
}

/// Ж and € in two single-byte charsets, and letters that are mapped to others.
const MAPS: &str = "charset_map koi8-r utf-8 { F6 D096; A4 E282AC; }
    charset_map koi8-r windows-1251 { F6 C6; }
    charset_map b a { 58 59; }
    types { text/html html; text/foo foo; }";

fn charsets_are_named_for_the_types_that_have_them(driver: Driver) {
    let server = Setup::http(
        driver,
        &format!(
            "{MAPS} charset utf-8;
             server {{ listen %UNIX%; root %DIR%/files;
                 location /any/ {{ charset_types *; }}
                 location /foo/ {{ charset_types text/foo; }}
                 location /off/ {{ charset off; }}
                 location /arg/ {{ charset $arg_c; }}
                 location /if/ {{ if ($arg_c) {{ charset koi8-r; }} }}
                 location /moved/ {{ return 301 /; }}
                 location /named/ {{ types {{ }} default_type 'text/html; charset=koi8-r'; charset b; }} }}"
        ),
    );
    let paths = ["x.html", "x.foo", "any/x.foo", "foo/x.foo", "off/x.html", "arg/x.html", "if/x.html", "named/x"];
    let server = paths.iter().fold(server, |setup, path| setup.file(&format!("files/{path}"), "text")).start();
    let mut client = server.connect();
    let cases = [
        ("/x.html", "text/html; charset=utf-8"),
        ("/x.foo", "text/foo"),
        ("/any/x.foo", "text/foo; charset=utf-8"),
        ("/foo/x.foo", "text/foo; charset=utf-8"),
        ("/off/x.html", "text/html"),
        ("/arg/x.html?c=x", "text/html; charset=x"),
        ("/arg/x.html", "text/html"),
        ("/if/x.html?c=x", "text/html; charset=koi8-r"),
        ("/if/x.html", "text/html; charset=utf-8"),
        ("/moved/", "text/html"),
        ("/missing", "text/html; charset=utf-8"),
        ("/named/x", "text/html; charset=koi8-r"),
    ];
    for (path, content_type) in cases {
        assert_eq!(client.get(path).header("Content-Type"), Some(content_type), "{path}");
    }
    // A response whose charset is only named, not converted, keeps its length and its ranges.
    let part = ask(&mut client, "/x.html", "Range: bytes=1-2\r\n");
    assert_eq!((part.status, part.text()), (206, "ex"));
    server.stop();
}

fn bytes_of_one_charset_become_those_of_another(driver: Driver) {
    let server = Setup::http(
        driver,
        &format!(
            "{MAPS} server {{ listen %UNIX%;
                 location /a/ {{ alias %DIR%/files/; source_charset b; charset a; }}
                 location /same/ {{ alias %DIR%/files/; source_charset KOI8-R; charset koi8-r; }}
                 location /win/ {{ alias %DIR%/files/; source_charset koi8-r; charset Windows-1251; }}
                 location /koi/ {{ alias %DIR%/files/; source_charset windows-1251; charset koi8-r; }}
                 location /utf/ {{ alias %DIR%/files/; source_charset koi8-r; charset utf-8; }}
                 location /from/ {{ alias %DIR%/files/; source_charset utf-8; charset koi8-r; }}
                 location /over/ {{ alias %DIR%/files/; types {{ }} default_type 'text/html; charset=koi8-r';
                     charset utf-8; override_charset on; }}
                 location /packed/ {{ alias %DIR%/files/; gzip_static always; source_charset koi8-r; charset utf-8; }}
                 location /arg/ {{ alias %DIR%/files/; source_charset $arg_s; charset $arg_c; }} }}"
        ),
    )
    .file("files/x.html", "aXb")
    .file("files/koi.html", b"a\xf6\xa4\x80z")
    .file("files/win.html", b"a\xc6\xc0")
    .file("files/utf.html", "aЖ€я\u{1d11e}z")
    .file("files/broken.html", b"a\xd0<b>\xff\xe2\x82")
    .file("files/koi.html.gz", gzipped(b"\xf6"));
    let mut server = server.start();
    let mut client = server.connect();
    let cases: [(&str, &str, &[u8]); 12] = [
        ("/a/x.html", "; charset=a", b"aYb"),
        ("/same/koi.html", "; charset=koi8-r", b"a\xf6\xa4\x80z"),
        ("/win/koi.html", "; charset=Windows-1251", b"a\xc6??z"),
        ("/koi/win.html", "; charset=koi8-r", b"a\xf6?"),
        ("/utf/koi.html", "; charset=utf-8", "aЖ€?z".as_bytes()),
        ("/from/utf.html", "; charset=koi8-r", b"a\xf6\xa4&#1103;&#119070;z"),
        ("/from/broken.html", "; charset=koi8-r", b"a?<b>??"),
        ("/over/koi.html", "; charset=utf-8", "aЖ€?z".as_bytes()),
        ("/arg/koi.html?s=koi8-r&c=utf-8", "; charset=utf-8", "aЖ€?z".as_bytes()),
        ("/arg/x.html?s=other&c=OTHER", "; charset=OTHER", b"aXb"),
        ("/arg/x.html?s=utf-8&c=other", "", b"aXb"),
        ("/arg/x.html?s=utf-8&c=windows-1251", "", b"aXb"),
    ];
    for (path, charset, body) in cases {
        let response = client.get(path);
        assert_eq!(response.header("Content-Type"), Some(&*format!("text/html{charset}")), "{path}");
        assert_eq!(response.body, body, "{path}: {:?}", String::from_utf8_lossy(&response.body));
    }
    server.wait_logged("no \"charset_map\" between the charsets \"utf-8\" and \"other\"");
    server.wait_logged("no \"charset_map\" between the charsets \"utf-8\" and \"windows-1251\"");
    // A conversion between single-byte charsets keeps the length.
    assert_eq!(client.get("/a/x.html").header("Content-Length"), Some("3"));
    let part = ask(&mut client, "/a/x.html", "Range: bytes=1-\r\n");
    assert_eq!((part.status, part.text(), part.header("Content-Range")), (206, "Yb", Some("bytes 1-2/3")));
    let several = ask(&mut client, "/a/x.html", "Range: bytes=0-0,2-2\r\n");
    assert_eq!((several.status, several.text()), (200, "aYb"));
    let longer = client.get("/utf/koi.html");
    assert_eq!((longer.header("Content-Length"), longer.header("Accept-Ranges")), (None, None));
    client.send("HEAD /utf/koi.html HTTP/1.1\r\nHost: h\r\n\r\n");
    assert_eq!(client.response_to_head().header("Content-Type"), Some("text/html; charset=utf-8"));
    // A compressed body cannot be converted.
    let packed = ask(&mut client, "/packed/koi.html", ACCEPTED);
    assert_eq!((packed.header("Content-Type"), &*gunzipped(&packed.body)), (Some("text/html"), &b"\xf6"[..]));
    server.end(rustix::process::Signal::TERM);
}

fn a_long_body_is_converted_whole(driver: Driver) {
    let server = Setup::http(
        driver,
        &format!(
            "{MAPS} server {{ listen %UNIX%;
                 location /utf/ {{ alias %DIR%/files/; source_charset koi8-r; charset utf-8; }}
                 location /from/ {{ alias %DIR%/files/; source_charset utf-8; charset koi8-r; gzip on; }} }}"
        ),
    );
    let count = 300_001;
    let koi: Vec<u8> = b"x\xf6\xa4".iter().copied().cycle().take(count).collect();
    let utf8: String = "xЖ€".chars().cycle().take(count).collect();
    let server = server.file("files/koi.html", &koi).file("files/utf.html", &utf8).start();
    let mut client = server.connect();
    assert!(client.get("/utf/koi.html").body == utf8.as_bytes());
    assert!(client.get("/from/utf.html").body == koi);
    let packed = ask(&mut client, "/from/utf.html", ACCEPTED);
    assert!(is_gzip(&packed) && gunzipped(&packed.body) == koi);
    server.stop();
}

fn subrequests_speak_the_charset_of_the_request(driver: Driver) {
    let server = Setup::http(
        driver,
        &format!(
            "{MAPS} ssi on; server {{ listen %UNIX%; root %DIR%/files;
                 location /page/ {{ source_charset utf-8; charset utf-8; }}
                 location /koi/ {{ source_charset koi8-r; }} }}"
        ),
    )
    .file("files/page/x.html", "Ж<!--#include virtual=\"/koi/part.html\" -->Ж")
    .file("files/koi/part.html", b"[\xf6]")
    .start();
    let page = server.get("/page/x.html");
    assert_eq!((page.text(), page.header("Content-Type")), ("Ж[Ж]Ж", Some("text/html; charset=utf-8")));
    // A request for the part itself is answered without conversion.
    assert_eq!(server.get("/koi/part.html").body, b"[\xf6]");
    server.stop();
}
