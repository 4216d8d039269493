//! `status_zone` and the counters of `api`: counted exactly by any worker, and kept until they are reset.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::support::authority::Authority;
use crate::support::tls::Tls;
use crate::support::{
    Backend, Client, Driver, Response, Server, Serving, Setup, configuration, until_in_time, with_each_driver,
};

with_each_driver!(
    requests_are_counted_in_the_zones_of_their_server_and_their_last_location,
    a_request_under_way_is_processing_and_without_an_answer_discarded,
    figures_outlive_a_reload_and_end_with_their_zone,
    a_reset_begins_anew_and_needs_writing,
    peers_are_counted_by_their_answers,
    sessions_and_their_peers_are_counted,
    limits_count_outcomes_of_requests,
    caches_count_how_they_were_used,
    slices_are_uses_of_a_cache_by_themselves,
    handshakes_are_counted,
    name_servers_are_counted,
    fields_select_the_reported_values,
    hostile_names_are_escaped,
    the_server_tells_of_itself,
    loops_and_pools_tell_their_times_as_histograms,
    the_last_stalls_are_told_with_their_tasks,
    listening_sockets_tell_how_many_may_wait,
    handshakes_are_counted_by_the_reason_why_they_fail,
    handshakes_with_peers_are_counted,
    missing_object_is_an_error_object,
    a_worker_process_that_dies_is_counted,
);

const DEADLINE: Duration = Duration::from_secs(120);

/// A configuration with `text` in the http block, and the API on `%TCP%`, where nothing else is counted.
fn with_api(driver: Driver, text: &str) -> Setup {
    Setup::http(driver, &format!("{text} {API}"))
}

const API: &str = "server { listen %TCP%; location /api/ { api write=on; } location /read/ { api; } }";

fn ask(server: &Server, method: &str, path: &str) -> (u16, Value) {
    let response: Response = server.connect_tcp(1).ask(format!("{method} {path} HTTP/1.1\r\nHost: h\r\n\r\n"));
    let value = if response.body.is_empty() { Value::Null } else { serde_json::from_slice(&response.body).unwrap() };
    (response.status, value)
}

fn get(server: &Server, path: &str) -> Value {
    let (status, value) = ask(server, "GET", &format!("/api/9/{path}"));
    assert_eq!(status, 200, "{path}: {value}");
    value
}

/// Reads a path until `is_so` is true, since a loop may update its counters after a response has been sent.
#[track_caller]
fn eventually(server: &Server, path: &str, is_so: impl Fn(&Value) -> bool) -> Value {
    let end = Instant::now() + DEADLINE;
    loop {
        let value = get(server, path);
        if is_so(&value) {
            return value;
        }
        assert!(Instant::now() < end, "{path}: {value:#}");
    }
}

/// True if this many requests have ended and none is in flight.
fn served(requests: u64) -> impl Fn(&Value) -> bool {
    move |zone| {
        let is_over = zone.get("processing").is_none_or(|processing| processing == 0);
        zone["requests"] == zone["response_times"]["count"] && zone["requests"] == requests && is_over
    }
}

/// Sends a request on a connection of its own; returns the bytes sent and received.
fn exchange(server: &Server, request: &str) -> [u64; 2] {
    let mut client = server.connect();
    client.keep_record();
    client.ask(request);
    [request.len() as u64, client.record().len() as u64]
}

fn request(path: &str) -> String {
    format!("GET {path} HTTP/1.1\r\nHost: h\r\n\r\n")
}

fn total(exchanged: &[[u64; 2]]) -> [u64; 2] {
    exchanged.iter().fold([0; 2], |[received, sent], [more, also]| [received + more, sent + also])
}

const SITE: &str = "server { listen %UNIX%; status_zone site;
     location / { status_zone files; return 200 hello;
         location /inner { return 204; }
         location /quiet { status_zone off; return 404; } }
     location /moved { error_page 403 = /inner; return 403; status_zone never; } }
 server { listen %UNIX%; server_name other; status_zone site; return 301 /; }";

fn requests_are_counted_in_the_zones_of_their_server_and_their_last_location(driver: Driver) {
    let server = with_api(driver, SITE).start();
    let hello: Vec<_> = (0..3).map(|_| exchange(&server, &request("/"))).collect();
    let inner = [exchange(&server, &request("/inner")), exchange(&server, &request("/moved"))];
    let quiet = [exchange(&server, &request("/quiet"))];
    let other = [exchange(&server, "GET / HTTP/1.1\r\nHost: other\r\n\r\n")];
    let bad = [exchange(&server, "GET / HTTP/1.1\r\n\r\n")];
    let all = [hello.as_slice(), &inner, &quiet, &other, &bad].concat();
    let zone = eventually(&server, "http/server_zones/site", served(8));
    let [received, sent] = total(&all);
    assert_eq!((&zone["requests"], &zone["processing"], &zone["discarded"]), (&json!(8), &json!(0), &json!(0)));
    assert_eq!((&zone["received"], &zone["sent"]), (&json!(received), &json!(sent)), "{zone:#}");
    let codes = json!({ "200": 3, "204": 2, "301": 1, "400": 1, "404": 1 });
    assert_eq!(
        zone["responses"],
        json!({ "1xx": 0, "2xx": 5, "3xx": 1, "4xx": 2, "5xx": 0, "codes": codes, "total": 8 })
    );
    assert_eq!(zone["first_byte_times"]["count"], 8);
    assert_eq!(zone["response_times"]["buckets"]["inf"], 8);
    let files = eventually(&server, "http/location_zones/files", served(5));
    let [received, sent] = total(&[hello.as_slice(), &inner].concat());
    assert_eq!((&files["received"], &files["sent"]), (&json!(received), &json!(sent)), "{files:#}");
    assert_eq!((&files["requests"], &files["responses"]["codes"]), (&json!(5), &json!({ "200": 3, "204": 2 })));
    assert_eq!(get(&server, "http/location_zones/never")["requests"], 0);
    assert_eq!(get(&server, "http/location_zones?fields="), json!(["files", "never"]));
    server.stop();
}

fn a_request_under_way_is_processing_and_without_an_answer_discarded(driver: Driver) {
    let backend = Backend::tcp();
    let text = format!("server {{ listen %UNIX%; status_zone site; proxy_pass http://{}; }}", backend.address());
    let text = text.replace("proxy_pass", "location / { status_zone all; proxy_pass").replace("; }", "; } }");
    let server = with_api(driver, &text).start();
    let mut client = server.connect();
    client.send(request("/"));
    let mut behind = backend.accept();
    behind.request();
    let zone = eventually(&server, "http/server_zones/site", |zone| zone["processing"] == 1);
    assert_eq!((&zone["requests"], &zone["discarded"], &zone["responses"]["total"]), (&json!(1), &json!(0), &json!(0)));
    drop(client);
    let zone = eventually(&server, "http/server_zones/site", |zone| zone["processing"] == 0);
    assert_eq!((&zone["requests"], &zone["discarded"], &zone["responses"]["total"]), (&json!(1), &json!(1), &json!(0)));
    let all = eventually(&server, "http/location_zones/all", |zone| zone["discarded"] == 1);
    assert_eq!((&all["requests"], &all["responses"]["total"], &all["sent"]), (&json!(1), &json!(0), &json!(0)));
    server.stop();
}

fn figures_outlive_a_reload_and_end_with_their_zone(driver: Driver) {
    let text = |zone: &str| format!("server {{ listen %UNIX%; status_zone {zone}; return 200; }} {API}");
    let mut server = Setup::http(driver, &text("one")).start();
    server.get("/");
    eventually(&server, "http/server_zones/one", served(1));
    server.reload_http(driver, &text("one"));
    server.get("/");
    assert_eq!(eventually(&server, "http/server_zones/one", served(2))["requests"], 2);
    server.reload_http(driver, &text("two"));
    server.get("/");
    eventually(&server, "http/server_zones/two", served(1));
    assert_eq!(ask(&server, "GET", "/api/9/http/server_zones/one").0, 404);
    server.reload_http(driver, &text("one"));
    server.get("/");
    assert_eq!(eventually(&server, "http/server_zones/one", served(1))["requests"], 1);
    server.stop();
}

fn a_reset_begins_anew_and_needs_writing(driver: Driver) {
    let server = with_api(driver, SITE).start();
    server.get("/");
    eventually(&server, "http/server_zones/site", served(1));
    eventually(&server, "http/location_zones/files", served(1));
    let refused = ask(&server, "DELETE", "/read/9/http/server_zones/site");
    assert_eq!((refused.0, &refused.1["error"]["code"]), (405, &json!("MethodDisabled")));
    assert_eq!(ask(&server, "DELETE", "/api/9/http/server_zones/site"), (204, Value::Null));
    let zone = get(&server, "http/server_zones/site");
    assert_eq!((&zone["requests"], &zone["responses"]["total"], &zone["sent"]), (&json!(0), &json!(0), &json!(0)));
    assert_eq!(get(&server, "http/location_zones/files")["requests"], 1);
    server.get("/");
    assert_eq!(eventually(&server, "http/server_zones/site", served(1))["requests"], 1);
    for path in ["connections", "http/requests", "ssl", "http/location_zones/files"] {
        assert_eq!(ask(&server, "DELETE", &format!("/api/9/{path}")).0, 204, "{path}");
    }
    // The request that reads the counter is counted itself.
    assert!(get(&server, "http/requests")["total"].as_u64().is_some_and(|total| total < 8));
    for path in ["nginx", "workers", "http/server_zones", "http", ""] {
        assert_eq!(ask(&server, "DELETE", &format!("/api/9/{path}")).0, 405, "{path}");
    }
    server.stop();
}

fn answering(status: &'static str) -> Serving {
    Backend::tcp()
        .serve(move |_, client| client.try_send(format!("HTTP/1.1 {status}\r\nContent-Length: 5\r\n\r\nhello")).is_ok())
}

fn peers_are_counted_by_their_answers(driver: Driver) {
    let (good, bad) = (answering("200 OK"), answering("500 Oh"));
    let text = format!(
        "upstream app {{ server {}; server {}; }} upstream gone {{ server 127.0.0.1:1 fail_timeout=1h; server {} \
         backup; }}
         server {{ listen %UNIX%; location / {{ proxy_pass http://app; }}
         location /gone {{ proxy_pass http://gone; }} }}",
        good.address, bad.address, good.address
    );
    let server = with_api(driver, &text).start();
    let mut client = server.connect();
    (0..8).for_each(|_| _ = client.get("/"));
    let ended = |peer: &Value, count: u64| peer["active"] == 0 && peer["response_times"]["count"] == count;
    let per_peer = |app: &Value| {
        app["peers"].as_array().unwrap().iter().map(|peer| peer["requests"].as_u64().unwrap()).sum::<u64>()
    };
    let app = eventually(&server, "http/upstreams/app", |app| {
        let peers = app["peers"].as_array().unwrap();
        peers.iter().all(|peer| ended(peer, peer["requests"].as_u64().unwrap())) && per_peer(app) == 8
    });
    let length = |status: &str| format!("HTTP/1.1 {status}\r\nContent-Length: 5\r\n\r\nhello").len() as u64;
    for (peer, (class, code, status)) in
        app["peers"].as_array().unwrap().iter().zip([("2xx", "200", "200 OK"), ("5xx", "500", "500 Oh")])
    {
        let requests = peer["requests"].as_u64().unwrap();
        assert!(requests > 0, "{app:#}");
        assert_eq!(
            (&peer["responses"][class], &peer["responses"]["codes"][code]),
            (&peer["requests"], &peer["requests"])
        );
        assert_eq!(peer["received"], requests * length(status), "{peer:#}");
        assert!(peer["sent"].as_u64().unwrap() > requests * 20 && peer["selected"].is_string());
        assert!(peer["header_time"].is_u64() && peer["response_time"].is_u64());
        assert_eq!((&peer["fails"], &peer["unavail"], &peer["downtime"]), (&json!(0), &json!(0), &json!(0)));
    }
    assert_eq!(client.get("/gone").status, 200);
    let gone = eventually(&server, "http/upstreams/gone", |gone| gone["peers"][1]["response_times"]["count"] == 1);
    let down = &gone["peers"][0];
    assert_eq!((&down["requests"], &down["fails"], &down["unavail"]), (&json!(1), &json!(1), &json!(1)), "{gone:#}");
    assert_eq!((&down["state"], &down["responses"]["total"]), (&json!("unavail"), &json!(0)));
    assert!(down["downstart"].is_string());
    assert_eq!(ask(&server, "DELETE", "/api/9/http/upstreams/app"), (204, Value::Null));
    assert_eq!(per_peer(&get(&server, "http/upstreams/app")), 0);
    server.stop();
}

fn sessions_and_their_peers_are_counted(driver: Driver) {
    let backend = Backend::tcp();
    let blocks = format!(
        "http {{ {API} }} stream {{ upstream db {{ server {}; }}
           server {{ listen %UNIX%; status_zone db; proxy_pass db; }}
           server {{ listen %TCP2%; status_zone text; return hello; }}
           server {{ listen %TCP3%; status_zone text; deny all; return no; }} }}",
        backend.address()
    );
    let server = Setup::configuration(&configuration(driver, &blocks)).start();
    assert_eq!(get(&server, "stream"), json!(["server_zones", "limit_conns", "limit_sessions", "upstreams"]));
    let mut client = server.connect();
    let mut behind = backend.accept();
    client.send("12345");
    assert_eq!(behind.take(5), b"12345");
    behind.send("123");
    assert_eq!(client.take(3), b"123");
    let zone = eventually(&server, "stream/server_zones/db", |zone| zone["processing"] == 1);
    assert_eq!((&zone["connections"], &zone["sessions"]["total"]), (&json!(1), &json!(0)));
    assert_eq!(get(&server, "stream/upstreams/db")["peers"][0]["active"], 1);
    drop(client);
    behind.assert_closed();
    let zone = eventually(&server, "stream/server_zones/db", |zone| zone["processing"] == 0);
    assert_eq!(zone["sessions"], json!({ "2xx": 1, "4xx": 0, "5xx": 0, "total": 1 }));
    assert_eq!((&zone["received"], &zone["sent"], &zone["discarded"]), (&json!(5), &json!(3), &json!(0)));
    let group = eventually(&server, "stream/upstreams/db", |group| group["peers"][0]["active"] == 0);
    let peer = &group["peers"][0];
    assert_eq!((&peer["connections"], &peer["sent"], &peer["received"]), (&json!(1), &json!(5), &json!(3)), "{peer:#}");
    assert!(["connect_time", "first_byte_time", "response_time"].iter().all(|name| peer[*name].is_u64()), "{peer:#}");
    assert_eq!(server.connect_tcp(2).read_to_end(), b"hello");
    assert_eq!(server.connect_tcp(3).read_to_end(), b"");
    let zone = eventually(&server, "stream/server_zones/text", |zone| {
        zone["connections"] == 2 && zone["sessions"]["total"] == 2 && zone["processing"] == 0
    });
    assert_eq!(zone["sessions"], json!({ "2xx": 1, "4xx": 1, "5xx": 0, "total": 2 }));
    assert_eq!((&zone["connections"], &zone["processing"], &zone["sent"]), (&json!(2), &json!(0), &json!(5)));
    assert_eq!(ask(&server, "DELETE", "/api/9/stream/server_zones/text").0, 204);
    assert_eq!(get(&server, "stream/server_zones/text")["connections"], 0);
    let added = server.connect_tcp(1).ask(
        "POST /api/9/stream/upstreams/db/servers HTTP/1.1\r\nHost: h\r\nContent-Length: 27\r\n\r\n\
         {\"server\":\"127.0.0.1:1234\"}",
    );
    assert_eq!(added.status, 201, "{added:?}");
    assert_eq!(get(&server, "stream/upstreams/db/servers").as_array().map(Vec::len), Some(2));
    server.stop();
}

fn limits_count_outcomes_of_requests(driver: Driver) {
    let text = "limit_req_zone $uri zone=rate:64k rate=1r/m; limit_conn_zone $uri zone=conns:64k;
        server { listen %UNIX%; limit_conn conns 5; limit_req zone=rate; location / { return 200; }
            location /files/ { root %DIR%; } location /dry/ { limit_req_dry_run on; root %DIR%; } }";
    let server = with_api(driver, text).start();
    let mut client = server.connect();
    let statuses: Vec<u16> =
        ["/files/a", "/files/a", "/files/a", "/dry/a", "/dry/a"].map(|path| client.get(path).status).to_vec();
    assert_eq!(statuses, [404, 503, 503, 404, 404]);
    assert_eq!(
        get(&server, "http/limit_reqs"),
        json!({ "rate": { "passed": 2, "delayed": 0, "rejected": 2, "delayed_dry_run": 0, "rejected_dry_run": 1 } })
    );
    assert_eq!(get(&server, "http/limit_conns/conns"), json!({ "passed": 3, "rejected": 0, "rejected_dry_run": 0 }));
    let slabs = get(&server, "slabs");
    assert!(slabs["rate"]["pages"]["used"].as_u64() >= Some(1) && slabs["rate"]["entries"] == 2, "{slabs:#}");
    assert_eq!(ask(&server, "DELETE", "/api/9/http/limit_reqs/rate").0, 204);
    assert_eq!(get(&server, "http/limit_reqs/rate")["rejected"], 0);
    server.stop();
}

fn caches_count_how_they_were_used(driver: Driver) {
    let backend = answering("200 OK");
    let text = format!(
        "proxy_cache_path %DIR%/cache keys_zone=one:1m max_size=9m; proxy_cache one; proxy_cache_valid 1h;
         proxy_cache_key $uri; proxy_cache_bypass $arg_bypass;
         server {{ listen %UNIX%; location / {{ proxy_pass http://{}; }} }}",
        backend.address
    );
    let server = with_api(driver, &text).start();
    let mut client = server.connect();
    client.get("/a");
    // The cache is written while the response is sent.
    eventually(&server, "http/caches/one", |cache| cache["miss"]["responses_written"] == 1);
    (0..3).for_each(|_| _ = client.get("/a"));
    client.get("/a?bypass=1");
    let cache = eventually(&server, "http/caches/one", |cache| {
        let bypass = &cache["bypass"];
        // The directory is read while the first requests are answered.
        cache["cold"] == false
            && cache["hit"]["responses"] == 3
            && (&bypass["responses"], &bypass["responses_written"]) == (&json!(1), &json!(1))
    });
    assert_eq!((&cache["miss"]["responses"], &cache["miss"]["bytes"]), (&json!(1), &json!(5)));
    assert_eq!((&cache["hit"]["bytes"], &cache["stale"]["responses"]), (&json!(15), &json!(0)));
    assert_eq!((&cache["max_size"], &cache["cold"]), (&json!(9 << 20), &json!(false)));
    assert_eq!(cache["disk_answers"], true);
    assert_eq!((&cache["entries"], &cache["collapsed"], &cache["disk_errors"]), (&json!(1), &json!(0), &json!(0)));
    assert!(cache["loaded"].is_u64() && cache["disk_timeouts"].is_u64() && cache["evicted"].is_u64());
    assert!(cache["size"].as_u64() > Some(0) && cache["miss"]["bytes_written"].as_u64() > Some(5));
    assert_eq!(ask(&server, "DELETE", "/api/9/http/caches/one").0, 204);
    assert_eq!(get(&server, "http/caches/one?fields=hit"), json!({ "hit": { "responses": 0, "bytes": 0 } }));
    server.stop();
}

fn slices_are_uses_of_a_cache_by_themselves(driver: Driver) {
    let backend = Backend::tcp().serve(|asked, client| {
        let range = asked.header("Range").expect("a range").strip_prefix("bytes=").unwrap();
        let (first, last) = range.split_once('-').unwrap();
        let (first, last): (usize, usize) = (first.parse().unwrap(), last.parse::<usize>().unwrap().min(25));
        let body = &"abcdefghijklmnopqrstuvwxyz"[first..=last];
        let fields = format!("Content-Range: bytes {first}-{last}/26\r\nContent-Length: {}", body.len());
        client.try_send(format!("HTTP/1.1 206 Partial Content\r\n{fields}\r\n\r\n{body}")).is_ok()
    });
    let text = format!(
        "proxy_cache_path %DIR%/cache keys_zone=one:1m; proxy_cache one; proxy_cache_valid any 1h; slice 10;
         proxy_cache_key $uri$slice_range; proxy_set_header Range $slice_range;
         server {{ listen %UNIX%; location / {{ proxy_pass http://{}; }} }}",
        backend.address
    );
    let server = with_api(driver, &text).start();
    let mut client = server.connect();
    assert_eq!(client.get("/").text(), "abcdefghijklmnopqrstuvwxyz");
    eventually(&server, "http/caches/one", |cache| {
        cache["miss"]["responses"] == 3 && cache["miss"]["responses_written"] == 3
    });
    assert_eq!(client.get("/").text(), "abcdefghijklmnopqrstuvwxyz");
    let cache = eventually(&server, "http/caches/one", |cache| cache["hit"]["responses"] == 3);
    assert_eq!((&cache["miss"]["bytes"], &cache["hit"]["bytes"]), (&json!(26), &json!(26)), "{cache:#}");
    server.stop();
}

fn handshakes_are_counted(driver: Driver) {
    let authority = Authority::new("The authority");
    let pair = authority.ecdsa(&["one.test"]);
    let text = "ssl_certificate %DIR%/one.pem; ssl_certificate_key %DIR%/one.key;
        server { listen %UNIX% ssl; server_name one.test; status_zone one; return 200; }
        server { listen %UNIX% ssl default_server; status_zone other; return 200; }
        server { listen %UNIX% ssl; server_name refused.test; status_zone refused; ssl_reject_handshake on; }";
    let server = with_api(driver, text).file("one.pem", &pair.certificate).file("one.key", &pair.key).start();
    let path = server.directory.path().join("gale.sock");
    let tls = Tls::new(&authority);
    for _ in 0..2 {
        let mut client = tls.client(&path, "one.test");
        assert_eq!(client.ask("GET / HTTP/1.1\r\nHost: one.test\r\n\r\n").status, 200);
    }
    let mut hello = Vec::new();
    tls.session("refused.test").write_tls(&mut hello).unwrap();
    let mut refused = server.connect();
    refused.send(&hello);
    refused.read_to_end();
    eventually(&server, "http/server_zones/refused", |zone| zone["ssl"]["handshakes_failed"] == 1);
    let mut garbage = server.connect();
    garbage.send([22, 3, 1, 0, 5, 1, 0, 0, 1, 0]);
    garbage.read_to_end();
    let one = eventually(&server, "http/server_zones/one", served(2));
    assert_eq!((&one["ssl"]["handshakes"], &one["ssl"]["handshakes_failed"]), (&json!(2), &json!(0)));
    let other = eventually(&server, "http/server_zones/other", |zone| zone["ssl"]["handshakes_failed"] == 1);
    assert_eq!((&other["ssl"]["handshakes"], &other["requests"]), (&json!(0), &json!(0)));
    let all = get(&server, "ssl");
    assert_eq!((&all["handshakes"], &all["handshakes_failed"]), (&json!(2), &json!(2)));
    assert_eq!(all["session_reuses"], one["ssl"]["session_reuses"]);
    server.stop();
}

fn name_servers_are_counted(driver: Driver) {
    let socket = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
    let address = socket.local_addr().unwrap();
    let answering = std::thread::spawn(move || {
        let mut query = [0; 512];
        // An empty datagram ends the thread.
        while let Ok((length @ 1.., from)) = socket.recv_from(&mut query) {
            // Turns the query into an answer: no such name.
            (query[2], query[3]) = (0x81, 0x83);
            socket.send_to(&query[..length], from).unwrap();
        }
    });
    let text = format!(
        "resolver {address} ipv6=off status_zone=names;
         server {{ listen %UNIX%; location / {{ proxy_pass http://$arg_host; }} }}"
    );
    let server = with_api(driver, &text).start();
    assert_eq!(get(&server, "resolvers/names")["requests"], json!({ "name": 0, "srv": 0, "addr": 0 }));
    assert_eq!(server.get("/?host=nothing.test").status, 502);
    std::net::UdpSocket::bind("127.0.0.1:0").unwrap().send_to(&[], address).unwrap();
    answering.join().unwrap();
    let names = get(&server, "resolvers/names");
    assert_eq!(names["requests"], json!({ "name": 1, "srv": 0, "addr": 0 }));
    assert_eq!((&names["responses"]["nxdomain"], &names["responses"]["noerror"]), (&json!(1), &json!(0)));
    assert_eq!(ask(&server, "DELETE", "/api/9/resolvers/names").0, 204);
    assert_eq!(get(&server, "resolvers/names")["responses"]["nxdomain"], 0);
    server.stop();
}

fn fields_select_the_reported_values(driver: Driver) {
    let server = with_api(driver, SITE).start();
    assert_eq!(
        get(&server, "http/server_zones?fields=requests,processing"),
        json!({ "site": { "requests": 0, "processing": 0 } })
    );
    assert_eq!(get(&server, "http/server_zones/site?fields=sent"), json!({ "sent": 0 }));
    assert_eq!(get(&server, "http/server_zones?fields="), json!(["site"]));
    assert_eq!(get(&server, "nginx?x=y&fields=%76ersion"), json!({ "version": "1.31.5" }));
    assert_eq!(get(&server, "connections?fields=none"), json!({}));
    server.stop();
}

fn hostile_names_are_escaped(driver: Driver) {
    let text = "server { listen %UNIX%; status_zone 'a\\\"<b>/\\\\\n\u{1f600}'; return 200; }";
    let server = with_api(driver, text).start();
    server.get("/");
    let name = "a\"<b>/\\\n\u{1f600}";
    let zones = get(&server, "http/server_zones?fields=processing");
    let names: Vec<&String> = zones.as_object().unwrap().keys().collect();
    assert_eq!(names, [name]);
    let path = "http/server_zones/a%22%3Cb%3E/%5C%0A%F0%9F%98%80";
    assert_eq!(eventually(&server, path, served(1))["requests"], 1);
    server.stop();
}

fn the_server_tells_of_itself(driver: Driver) {
    let server = with_api(driver, SITE).start();
    let roots = ["nginx", "processes", "connections", "slabs", "http", "resolvers", "ssl", "workers", "gale"];
    assert_eq!(get(&server, ""), json!(roots));
    let nginx = get(&server, "nginx");
    let worker = server.worker().as_raw_nonzero().get();
    assert_eq!((&nginx["pid"], &nginx["ppid"]), (&json!(worker), &json!(server.pid().as_raw_nonzero().get())));
    assert_eq!((&nginx["generation"], &nginx["version"]), (&json!(1), &json!("1.31.5")));
    assert_eq!(nginx["address"], server.directory.address(1).to_string());
    for time in ["load_timestamp", "timestamp"] {
        assert!(nginx[time].as_str().is_some_and(|time| time.len() == 24 && time.ends_with('Z')), "{nginx}");
    }
    let mut idle: Client = server.connect();
    idle.get("/");
    // The active connection is the one of the API request.
    let expected = |connections: &Value| connections["idle"] == 1 && connections["active"] == 1;
    assert_eq!(eventually(&server, "connections", expected)["dropped"], 0);
    let workers = get(&server, "workers");
    let ids: Vec<&Value> = workers.as_array().unwrap().iter().map(|worker| &worker["id"]).collect();
    assert_eq!(ids, [&json!(0), &json!(1)]);
    let total = |of: &dyn Fn(&Value) -> u64| workers.as_array().unwrap().iter().map(of).sum::<u64>();
    assert!(total(&|worker| worker["http"]["requests"]["total"].as_u64().unwrap()) >= 4);
    assert!(total(&|worker| worker["connections"]["accepted"].as_u64().unwrap()) >= 4);
    assert_eq!(get(&server, "workers/1?fields=id,pid"), json!({ "id": 1, "pid": worker }));
    assert_eq!(get(&server, "processes"), json!({ "respawned": 0 }));
    let loops = get(&server, "gale/loops");
    assert!(loops.as_array().is_some_and(|loops| loops.len() == 2 && loops[0]["turns"].as_u64() > Some(0)), "{loops}");
    assert!(get(&server, "gale/pools").is_array());
    let sum = |name: &str| loops.as_array().unwrap().iter().map(|each| each[name].as_u64().unwrap()).sum::<u64>();
    assert_eq!(get(&server, "gale/memory")["leased_max"].as_u64(), Some(sum("leased_max")));
    assert!(sum("leased_max") > 0 && get(&server, "gale/memory")["leased"].is_u64());
    assert!(get(&server, "gale/files")["rungs"]["sendfile"]["pieces"].is_u64());
    server.stop();
}

fn loops_and_pools_tell_their_times_as_histograms(driver: Driver) {
    let server = with_api(driver, SITE).start();
    server.get("/");
    // A long answer is composed on a pool thread.
    get(&server, "http/server_zones");
    let pools = eventually(&server, "gale/pools", |pools| pools[0]["run_times"]["count"].as_u64() > Some(0));
    let loops = get(&server, "gale/loops");
    for times in [&loops[0]["turn_times"], &loops[1]["turn_times"], &pools[0]["wait_times"], &pools[0]["run_times"]] {
        let buckets = times["buckets"].as_object().expect("buckets");
        assert_eq!(buckets["inf"], times["count"], "{times:#}");
        let mut bounds: Vec<(f64, u64)> =
            buckets.iter().map(|(bound, count)| (bound.parse().unwrap(), count.as_u64().unwrap())).collect();
        bounds.sort_by(|one, next| one.0.total_cmp(&next.0));
        assert_eq!((bounds.len(), bounds[0].0, bounds[10].0), (12, 16.384, 17_179_869.184));
        assert!(bounds.is_sorted_by_key(|(_, count)| *count), "{times:#}");
    }
    server.stop();
}

fn the_last_stalls_are_told_with_their_tasks(driver: Driver) {
    // On a busy machine a worker may have stalled before, or may have been descheduled before it blocked.
    until_in_time("a stall that blocks from its beginning", || {
        let text = "server { listen %UNIX%; location /stall { test_stall %DIR%/fifo; test_echo; } }";
        let server = with_api(driver, text).start();
        if !get(&server, "gale/stalls").as_array().expect("a list").is_empty() {
            return None;
        }
        let (stall, mut client, writer) = begin_stall(&server);
        if stall["kind"] != "blocked" {
            return None;
        }
        assert!(stall["task"].as_str().is_some_and(|task| task.contains("gale_")), "{stall:#}");
        assert!(stall["began"].as_str().is_some_and(|time| time.ends_with('Z')), "{stall:#}");
        drop(writer);
        assert_eq!(client.response().status, 200);
        let is_same = |told: &Value| {
            let time = |stall: &Value| stall["time"].as_u64();
            told["is_over"] == true
                && told["kind"] == "blocked"
                && told["worker"] == stall["worker"]
                && time(told) >= time(&stall)
        };
        let has_ended = |stalls: &Value| stalls.as_array().expect("a list").iter().any(is_same);
        let stalls = eventually(&server, "gale/stalls", has_ended);
        assert!(ongoing(&stalls).is_none(), "{stalls:#}");
        server.stop();
        Some(())
    });
}

/// The latest stall that has not ended.
fn ongoing(stalls: &Value) -> Option<Value> {
    stalls.as_array().expect("a list").iter().find(|stall| stall["is_over"] == false).cloned()
}

/// Begins a stall, which the other loop reports; returns it, the client whose request stalls, and the FIFO that it
/// waits for.
fn begin_stall(server: &Server) -> (Value, Client, std::fs::File) {
    let fifo = server.directory.path().join("fifo");
    rustix::fs::mknodat(rustix::fs::CWD, &fifo, rustix::fs::FileType::Fifo, rustix::fs::Mode::empty(), 0).unwrap();
    rustix::fs::chmod(&fifo, rustix::fs::Mode::from_raw_mode(0o666)).unwrap();
    let mut client = server.connect();
    client.send("GET /stall HTTP/1.1\r\nHost: h\r\n\r\n");
    let writer = std::fs::File::options().write(true).open(&fifo).unwrap();
    let stalls = eventually(server, "gale/stalls", |stalls| ongoing(stalls).is_some());
    (ongoing(&stalls).expect("it was seen"), client, writer)
}

fn listening_sockets_tell_how_many_may_wait(driver: Driver) {
    let text = "server { listen %TCP2% backlog=7; listen %TCP3% backlog=9 reuseport; return 200; }";
    let server = with_api(driver, text).start();
    let (shared, own) = (server.directory.address(2).to_string(), server.directory.address(3).to_string());
    let all = |listeners: &Value, address: &str| -> Vec<Value> {
        let listeners = listeners.as_array().unwrap().iter();
        listeners.filter(|listener| listener["address"] == address).cloned().collect()
    };
    let listeners = eventually(&server, "gale/listeners", |listeners| {
        all(listeners, &shared).len() == 1 && all(listeners, &own).len() == 2
    });
    assert_eq!(all(&listeners, &shared), [json!({ "address": shared, "waiting": 0, "waiting_max": 7 })]);
    for (worker, listener) in all(&listeners, &own).into_iter().enumerate() {
        assert_eq!((&listener["worker"], &listener["waiting_max"]), (&json!(worker), &json!(9)));
    }
    server.stop();
}

fn handshakes_are_counted_by_the_reason_why_they_fail(driver: Driver) {
    let authority = Authority::new("The authority");
    let pair = authority.ecdsa(&["one.test"]);
    let text = "ssl_certificate %DIR%/one.pem; ssl_certificate_key %DIR%/one.key; ssl_client_certificate %DIR%/ca.pem;
        server { listen %UNIX% ssl; server_name one.test; ssl_protocols TLSv1.3; ssl_verify_client on;
                 status_zone one; return 200; }";
    let server = with_api(driver, text)
        .file("one.pem", &pair.certificate)
        .file("one.key", &pair.key)
        .file("ca.pem", &authority.pem)
        .start();
    let path = server.directory.path().join("gale.sock");
    let reason = |name: &'static str| {
        eventually(&server, "http/server_zones/one", move |zone| zone["ssl"][name] == 1);
        assert_eq!(get(&server, "ssl")[name], 1, "{name}");
    };
    assert!(Tls::tls12(&authority).connect(&path, "one.test").is_err());
    reason("no_common_protocol");
    // A client that trusts another authority rejects the certificate.
    assert!(Tls::new(&Authority::new("Another one")).connect(&path, "one.test").is_err());
    reason("peer_rejected_cert");
    let refused = Tls::new(&authority).client(&path, "one.test").ask("GET / HTTP/1.1\r\nHost: one.test\r\n\r\n");
    assert_eq!(refused.status, 400, "496 is told as 400");
    let zone = eventually(&server, "http/server_zones/one", |zone| zone["ssl"]["verify_failures"]["no_cert"] == 1);
    assert_eq!((&zone["ssl"]["handshakes_failed"], &zone["ssl"]["no_common_cipher"]), (&json!(2), &json!(0)));
    let others = ["expired_cert", "revoked_cert", "hostname_mismatch", "other"];
    assert!(others.iter().all(|name| zone["ssl"]["verify_failures"][*name] == 0), "{zone:#}");
    server.stop();
}

fn handshakes_with_peers_are_counted(driver: Driver) {
    let authority = Authority::new("The authority");
    let pair = authority.ecdsa(&["one.test"]);
    let text = "ssl_certificate %DIR%/one.pem; ssl_certificate_key %DIR%/one.key; upstream plain { server %TCP3%; }
        upstream app { server %TCP2%; } proxy_ssl_verify on; proxy_ssl_trusted_certificate %DIR%/ca.pem;
        server { listen %TCP2% ssl; return 200 hello; } server { listen %TCP3%; return 200 hello; }
        server { listen %UNIX%; location /right { proxy_ssl_name one.test; proxy_pass https://app; }
                 location /wrong { proxy_ssl_session_reuse off; proxy_ssl_name other.test; proxy_pass https://app; }
                 location /plain { proxy_pass http://plain; } }";
    let server = with_api(driver, text)
        .file("one.pem", &pair.certificate)
        .file("one.key", &pair.key)
        .file("ca.pem", &authority.pem)
        .start();
    for (path, status) in [("/right", 200), ("/wrong", 502), ("/plain", 200)] {
        assert_eq!(server.get(path).status, status, "{path}");
    }
    let group = get(&server, "http/upstreams/app");
    let ssl = &group["peers"][0]["ssl"];
    assert_eq!((&ssl["handshakes"], &ssl["handshakes_failed"]), (&json!(1), &json!(1)), "{group:#}");
    assert_eq!(ssl["verify_failures"]["hostname_mismatch"], 1);
    assert!(get(&server, "http/upstreams/plain")["peers"][0].get("ssl").is_none());
    assert_eq!(ask(&server, "DELETE", "/api/9/http/upstreams/app").0, 204);
    assert_eq!(get(&server, "http/upstreams/app")["peers"][0]["ssl"]["handshakes"], 0);
    server.stop();
}

fn missing_object_is_an_error_object(driver: Driver) {
    let server = with_api(driver, SITE).start();
    for (method, path, status, code) in [
        ("GET", "http/server_zones/none", 404, "ServerZoneNotFound"),
        ("DELETE", "http/server_zones/none", 404, "ServerZoneNotFound"),
        ("GET", "http/location_zones/site", 404, "LocationZoneNotFound"),
        ("GET", "http/caches/none", 404, "CacheNotFound"),
        ("GET", "http/limit_conns/none", 404, "LimitConnNotFound"),
        ("GET", "http/limit_reqs/none", 404, "LimitReqNotFound"),
        ("GET", "resolvers/none", 404, "ResolverZoneNotFound"),
        ("GET", "slabs/none", 404, "SlabNotFound"),
        ("GET", "workers/7", 404, "WorkerNotFound"),
        ("GET", "stream", 404, "PathNotFound"),
        ("GET", "stream/server_zones", 404, "PathNotFound"),
        ("GET", "stream/zone_sync", 404, "PathNotFound"),
        ("DELETE", "stream/upstreams/none", 404, "PathNotFound"),
        ("GET", "http/keyvals", 404, "PathNotFound"),
        ("POST", "http/server_zones/site", 405, "MethodDisabled"),
        ("PATCH", "nginx", 405, "MethodDisabled"),
    ] {
        let (found, error) = ask(&server, method, &format!("/api/9/{path}"));
        assert_eq!((found, &error["error"]["code"]), (status, &json!(code)), "{method} {path}");
        assert!(error["error"]["text"].is_string() && error["request_id"].is_string() && error["href"].is_string());
    }
    server.stop();
}

fn a_worker_process_that_dies_is_counted(driver: Driver) {
    let server = with_api(driver, SITE).start();
    assert_eq!(get(&server, "processes"), json!({ "respawned": 0 }));
    rustix::process::kill_process(server.worker(), rustix::process::Signal::KILL).unwrap();
    server.wait_logged("exited on signal 9");
    server.wait_logged_times("start worker process ", 2);
    // The listening sockets stay open: requests wait for the new process.
    eventually(&server, "processes", |processes| processes["respawned"] == 1);
}
