//! `prometheus`: the server's metrics as scrapers read them, in both formats, with few and with many time series.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use serde_json::json;

use crate::support::{Backend, Driver, Response, Server, Setup, configuration, with_each_driver};

with_each_driver!(
    every_line_is_of_the_format_and_figures_are_those_of_the_server,
    open_metrics_are_told_to_those_that_want_them,
    hostile_and_long_names_are_escaped_and_bounded,
    only_reading_is_answered_and_only_where_it_is_allowed,
    templates_make_samples_of_figures_by_their_paths,
    templates_write_nothing_that_cannot_be_read,
    a_template_of_that_name_takes_the_place_of_all,
    thousands_of_peers_and_zones_are_told_while_others_are_served,
    metrics_are_gathered_in_the_pool,
);

const DEADLINE: Duration = Duration::from_secs(300);

const SCRAPED: &str = "server { listen %TCP%; location /metrics { prometheus; } location /api/ { api write=on; } }";

fn scrape(server: &Server, fields: &str) -> Response {
    let request = format!("GET /metrics HTTP/1.1\r\nHost: h\r\n{fields}\r\n");
    let response = server.connect_tcp(1).ask(request);
    assert_eq!(response.status, 200, "{response:?}");
    response
}

/// Parses the samples of a scrape, by name and labels. Every line is checked.
fn samples(text: &str, is_open: bool) -> BTreeMap<String, f64> {
    let mut samples = BTreeMap::new();
    let (mut families, mut family) = (BTreeSet::new(), String::new());
    let text = if is_open { text.strip_suffix("# EOF\n").expect("the end is told") } else { text };
    assert!(text.ends_with('\n'));
    for line in text.lines() {
        if let Some(described) = line.strip_prefix("# HELP ") {
            family = described.split(' ').next().unwrap().to_owned();
            assert!(families.insert(family.clone()), "{family} is there twice");
            continue;
        }
        if let Some(typed) = line.strip_prefix("# TYPE ") {
            let (name, kind) = typed.split_once(' ').unwrap();
            assert!(name == family && ["counter", "gauge", "histogram", "summary"].contains(&kind), "{line}");
            assert_eq!(kind == "counter" && !is_open, name.ends_with("_total"), "{line}");
            continue;
        }
        assert!(line.starts_with(family.as_str()), "{line} is none of {family}");
        let (name, value) = line.rsplit_once(' ').unwrap();
        let value = value.parse().unwrap_or_else(|_| panic!("{line}"));
        check_labels(name);
        assert!(samples.insert(name.to_owned(), value).is_none(), "{name} is there twice");
    }
    samples
}

/// Checks `name{label="value",…}`, with values escaped.
fn check_labels(name: &str) {
    let is_name =
        |text: &str| text.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'_');
    let Some((metric, labels)) = name.split_once('{') else {
        return assert!(is_name(name), "{name}");
    };
    assert!(is_name(metric), "{name}");
    let mut rest = labels;
    loop {
        let (label, value) = rest.split_once("=\"").unwrap_or_else(|| panic!("{name}"));
        assert!(is_name(label) && !label.is_empty(), "{name}");
        let mut end = None;
        let mut escapes = false;
        for (place, letter) in value.char_indices() {
            match letter {
                _ if std::mem::take(&mut escapes) => assert!("\\\"n".contains(letter), "{name}"),
                '\\' => escapes = true,
                '"' => {
                    end = Some(place);
                    break;
                }
                _ => {}
            }
        }
        rest = &value[end.unwrap_or_else(|| panic!("{name}")) + 1..];
        match rest.strip_prefix(',') {
            Some(more) => rest = more,
            None => return assert_eq!(rest, "}", "{name}"),
        }
    }
}

/// Scrapes until `is_so` is true, since a loop may update its counters after a response has been sent.
#[track_caller]
fn eventually(server: &Server, is_so: impl Fn(&BTreeMap<String, f64>) -> bool) -> BTreeMap<String, f64> {
    let end = Instant::now() + DEADLINE;
    loop {
        let samples = samples(scrape(server, "").text(), false);
        if is_so(&samples) {
            return samples;
        }
        assert!(Instant::now() < end, "{samples:#?}");
    }
}

fn every_line_is_of_the_format_and_figures_are_those_of_the_server(driver: Driver) {
    let backend =
        Backend::tcp().serve(|_, client| client.try_send("HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello").is_ok());
    let blocks = format!(
        "http {{ upstream app {{ server {}; }} {SCRAPED}
            limit_req_zone $uri zone=rate:64k rate=1000r/s; limit_conn_zone $uri zone=conns:64k;
            proxy_cache_path %DIR%/cache keys_zone=one:1m;
            server {{ listen %UNIX%; status_zone site; limit_req zone=rate burst=50 nodelay; limit_conn conns 9;
                location / {{ status_zone proxied; proxy_pass http://app; }}
                location /cached {{ proxy_cache one; proxy_cache_valid 1h; proxy_pass http://app; }}
                location /none {{ return 404; }} }} }}
         stream {{ server {{ listen %TCP2%; status_zone text; return hello; }}
         upstream db {{ server 127.0.0.1:1; }} }}",
        backend.address
    );
    let server = Setup::configuration(&configuration(driver, &blocks)).start();
    let mut client = server.connect();
    for path in ["/", "/", "/none", "/cached", "/cached"] {
        client.get(path);
    }
    assert_eq!(server.connect_tcp(2).read_to_end(), b"hello");
    let response = scrape(&server, "");
    assert_eq!(response.header("Content-Type"), Some("text/plain; version=0.0.4; charset=utf-8"));
    let peer = format!("upstream=\"app\",peer=\"{0}\",server=\"{0}\",id=\"0\"", backend.address);
    let samples = eventually(&server, |samples| {
        samples["gale_http_server_zone_request_seconds_count{zone=\"site\"}"] == 5.0
            && samples["gale_http_server_zone_processing{zone=\"site\"}"] == 0.0
            && samples[&format!("gale_http_peer_responses_total{{{peer},code=\"2xx\"}}")] == 3.0
            && samples[&format!("gale_http_peer_response_seconds_count{{{peer}}}")] == 3.0
            && samples["gale_stream_server_zone_sessions_total{zone=\"text\",code=\"2xx\"}"] == 1.0
    });
    for (name, value) in [
        ("gale_http_server_zone_requests_total{zone=\"site\"}".to_owned(), 5.0),
        ("gale_http_server_zone_processing{zone=\"site\"}".to_owned(), 0.0),
        ("gale_http_server_zone_responses_total{zone=\"site\",code=\"2xx\"}".to_owned(), 4.0),
        ("gale_http_server_zone_responses_by_code_total{zone=\"site\",code=\"404\"}".to_owned(), 1.0),
        ("gale_http_server_zone_request_seconds_bucket{zone=\"site\",le=\"+Inf\"}".to_owned(), 5.0),
        ("gale_http_location_zone_first_byte_seconds_count{zone=\"proxied\"}".to_owned(), 2.0),
        (format!("gale_http_peer_requests_total{{{peer}}}"), 3.0),
        (format!("gale_http_peer_responses_total{{{peer},code=\"2xx\"}}"), 3.0),
        (format!("gale_http_peer_state{{{peer},state=\"up\"}}"), 1.0),
        (format!("gale_http_peer_state{{{peer},state=\"down\"}}"), 0.0),
        (format!("gale_http_peer_response_seconds_count{{{peer}}}"), 3.0),
        ("gale_http_limit_req_total{zone=\"rate\",verdict=\"passed\"}".to_owned(), 4.0),
        ("gale_http_limit_conn_total{zone=\"conns\",verdict=\"passed\"}".to_owned(), 4.0),
        ("gale_http_cache_responses_total{cache=\"one\",status=\"miss\"}".to_owned(), 1.0),
        ("gale_stream_server_zone_sent_bytes_total{zone=\"text\"}".to_owned(), 5.0),
        ("gale_worker_processes_respawned_total".to_owned(), 0.0),
    ] {
        assert_eq!(samples.get(&name), Some(&value), "{name}");
    }
    for name in [
        "gale_loop_turn_seconds_count{worker=\"1\"}",
        "gale_http_requests_total",
        "gale_pool_running{pool=\"default\"}",
    ] {
        assert!(samples.contains_key(name), "{name}");
    }
    server.stop();
}

fn open_metrics_are_told_to_those_that_want_them(driver: Driver) {
    let server =
        Setup::http(driver, &format!("{SCRAPED} server {{ listen %UNIX%; status_zone site; return 200; }}")).start();
    server.get("/");
    let wanted =
        "Accept: application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.3,*/*;q=0.2\r\n";
    let response = scrape(&server, wanted);
    let content_type = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    assert_eq!(response.header("Content-Type"), Some(content_type));
    let samples = samples(response.text(), true);
    assert!(samples.contains_key("gale_http_server_zone_requests_total{zone=\"site\"}"));
    let plain = scrape(&server, "Accept: text/plain\r\n");
    assert_eq!(plain.header("Content-Type"), Some("text/plain; version=0.0.4; charset=utf-8"));
    assert!(!plain.text().contains("# EOF"));
    server.stop();
}

fn hostile_and_long_names_are_escaped_and_bounded(driver: Driver) {
    let long = "x".repeat(3000);
    let text = format!(
        "{SCRAPED} server {{ listen %UNIX%; status_zone 'a\\\"{{b}}=,\\\\\n'; return 200;
            location /one {{ status_zone {long}1; return 200; }}
            location /two {{ status_zone {long}2; return 200; }} }}"
    );
    let server = Setup::http(driver, &text).start();
    let scraped = scrape(&server, "");
    let samples = samples(scraped.text(), false);
    assert!(samples.contains_key("gale_http_server_zone_requests_total{zone=\"a\\\"{b}=,\\\\\\n\"}"), "{samples:#?}");
    let of_locations: Vec<_> =
        samples.keys().filter(|name| name.starts_with("gale_http_location_zone_requests_total")).collect();
    assert!(of_locations.len() == 2 && of_locations.iter().all(|name| name.len() < 350), "{of_locations:?}");
    server.stop();
}

fn only_reading_is_answered_and_only_where_it_is_allowed(driver: Driver) {
    let text =
        "server { listen %UNIX%; location /metrics { prometheus all; } location /closed { deny all; prometheus; } }";
    let server = Setup::http(driver, text).start();
    let ask = |method: &str, path: &str| {
        let mut client = server.connect();
        client.send(format!("{method} {path} HTTP/1.1\r\nHost: h\r\nContent-Length: 0\r\n\r\n"));
        if method == "HEAD" { client.response_to_head() } else { client.response() }
    };
    assert_eq!(ask("POST", "/metrics").status, 405);
    let head = ask("HEAD", "/metrics");
    assert_eq!((head.status, head.body.len()), (200, 0));
    assert_eq!(ask("GET", "/closed").status, 403);
    server.stop();
}

/// Waits until the output of a template, without its first line, satisfies `is_so`.
fn template(server: &Server, is_so: impl Fn(&str) -> bool) -> String {
    let end = Instant::now() + DEADLINE;
    loop {
        let response = scrape(server, "");
        assert_eq!(response.header("Content-Type"), Some("text/plain; version=0.0.4; charset=utf-8"));
        let text = response.text().strip_prefix("# Prometheus template \"mine\"\n").expect("its name").to_owned();
        if is_so(&text) {
            return text;
        }
        assert!(Instant::now() < end, "{text}");
    }
}

fn templates_make_samples_of_figures_by_their_paths(driver: Driver) {
    let text = "map $p8s_value $state { volatile; default 0; up 1; down 3; }
         map $p8s_value $kept { default 7; }
         server { listen %TCP%; location /metrics { prometheus mine; } }
         prometheus_template mine {
             'site_requests_total{zone=\"$1\",how=\"a $2 b\"}' $p8s_value
                 path=~^/http/server_zones/([^/]+)/(requests)$ type=counter 'help=Requests \\\\ of a zone.';
             'zones' $p8s_value path=/http/server_zones/;
             'peer_state{peer=\"$peer\",host=\"$host\"}' $state
                 path=~^/http/upstreams/app/peers/(?<peer>[^/]+)/state$ type=gauge;
             'site_requests_total{zone=\"$1\",how=\"class\"}' $p8s_value
                 path=~^/http/server_zones/([^/]+)/responses/2xx$ 'help=Not this.';
             # A figure is the first row's that it matches.
             'never{zone=\"$1\"}' $p8s_value path=~/http/server_zones/(.*)/requests$;
             'backup{peer=\"$1\"}' ${p8s_value} path=~/peers/([^/]+)/backup$;
             'once{value=\"$p8s_value\",group=\"$1\"}' $kept;
             'nowhere' $p8s_value;
             'name' $p8s_value path=/nginx/build;
             'missing' $p8s_value path=/http/server_zones/none/requests;
             'loops' $p8s_value path=/gale/loops/;
             'stalls{loop=\"$1\"}' $p8s_value path=~^/gale/loops/(\\d+)/turns$;
         }
         upstream app { server 127.0.0.1:1; server 127.0.0.1:1 down; server 127.0.0.1:2 backup; }
         server { listen %UNIX%; status_zone site; return 200; } server { listen %TCP2%; status_zone Other; }";
    let server = Setup::http(driver, text).start();
    (0..3).for_each(|_| assert_eq!(server.get("/").status, 200));
    let text = template(&server, |text| text.contains("how=\"class\"} 3"));
    let (fixed, stalls) = text.split_once("stalls{").expect("the last family");
    assert_eq!(
        fixed,
        "# HELP site_requests_total Requests \\\\ of a zone.\n\
         # TYPE site_requests_total counter\n\
         site_requests_total{zone=\"Other\",how=\"a requests b\"} 0\n\
         site_requests_total{zone=\"site\",how=\"a requests b\"} 3\n\
         site_requests_total{zone=\"Other\",how=\"class\"} 0\n\
         site_requests_total{zone=\"site\",how=\"class\"} 3\n\
         zones 2\n\
         # TYPE peer_state gauge\n\
         peer_state{peer=\"127.0.0.1:1\",host=\"h\"} 1\n\
         peer_state{peer=\"127.0.0.1:1#1\",host=\"h\"} 3\n\
         peer_state{peer=\"127.0.0.1:2\",host=\"h\"} 1\n\
         backup{peer=\"127.0.0.1:1\"} 0\n\
         backup{peer=\"127.0.0.1:1#1\"} 0\n\
         backup{peer=\"127.0.0.1:2\"} 1\n\
         once{value=\"\",group=\"\"} 7\n\
         loops 2\n"
    );
    assert!(stalls.starts_with("loop=\"0\"} ") && stalls.lines().count() == 2, "{stalls}");
    let mut client = server.connect_tcp(1);
    assert_eq!(client.ask("POST /metrics HTTP/1.1\r\nHost: h\r\nContent-Length: 0\r\n\r\n").status, 405);
    server.stop();
}

fn templates_write_nothing_that_cannot_be_read(driver: Driver) {
    let text = "server { listen %TCP%; location /metrics { prometheus mine; } }
         map $http_x $x { volatile; default $http_x; }
         prometheus_template mine {
             'zone_requests{zone=\"$1\",own=\"\\\\\\\"\"}' $p8s_value
                 path=~^/http/server_zones/([^$]+)/requests$ 'help=Two\nlines';
             'given{x=\"$http_x$http_long\"}' $x type=untyped;
             'given{x=\"too\"}' $http_y;
         }
         server { listen %UNIX%; status_zone 'a\\\"{b}=,/\\\\\n'; return 200; }";
    let server = Setup::http(driver, text).start();
    let expected = "# HELP zone_requests Two\\nlines\n\
         zone_requests{zone=\"a\\\"{b}=,/\\\\\\n\",own=\"\\\"\"} 0\n";
    assert_eq!(template(&server, |_| true), expected);
    let of = |fields: &str| scrape(&server, fields).text().lines().skip(3).collect::<Vec<_>>().join("\n");
    assert_eq!(of("X: 5\r\n"), "# TYPE given untyped\ngiven{x=\"5\"} 5");
    assert_eq!(of("X: 5 6\r\nY: -1e-3\r\n"), "# TYPE given untyped\ngiven{x=\"too\"} -1e-3");
    assert_eq!(of("X: 0x5\r\nY: five\r\n"), "");
    assert_eq!(of(&format!("X: 1{}\r\n", "0".repeat(2000))), "", "no number that anybody can hold");
    let long = of(&format!("X: 5\r\nLong: {}\r\n", "0".repeat(2000)));
    assert!(long.starts_with("# TYPE given untyped\ngiven{x=\"5000") && long.ends_with("\"} 5"), "{long}");
    let label = long.split('"').nth(1).expect("a label");
    assert!(label.len() < 300, "{label}");
    server.stop();
}

fn a_template_of_that_name_takes_the_place_of_all(driver: Driver) {
    let text =
        "server { listen %TCP%; location /metrics { prometheus all; location /metrics/own { prometheus own; } } }
         server { listen %UNIX%; location / { prometheus; } }
         prometheus_template all { 'a' $p8s_value path=/http/requests/total; }
         prometheus_template own { }";
    let mut server = Setup::http(driver, text).start();
    let text = scrape(&server, "").text().to_owned();
    assert!(text.starts_with("# Prometheus template \"all\"\na ") && text.lines().count() == 2, "{text}");
    assert_eq!(server.get("/").text().lines().count(), 2);
    assert_eq!(server.connect_tcp(1).get("/metrics/own").text(), "# Prometheus template \"own\"\n");
    server.reload_http(driver, SCRAPED);
    assert!(scrape(&server, "").text().starts_with("# HELP gale_"));
    server.stop();
}

fn thousands_of_peers_and_zones_are_told_while_others_are_served(driver: Driver) {
    const ZONES: usize = 5000;
    const PEERS: usize = 10_000;
    let zones: String =
        (0..ZONES).map(|zone| format!("location /{zone} {{ status_zone z{zone}; return 200; }}\n")).collect();
    let text = format!(
        "upstream app {{ server 127.0.0.1:1; }} {SCRAPED}
         prometheus_template mine {{
             'peer{{peer=\"$1\"}}' $p8s_value path=~^/http/upstreams/app/peers/([^/]+)/requests$;
             'zone{{zone=\"$1\"}}' $p8s_value path=~^/http/location_zones/([^/]+)/requests$; }}
         server {{ listen %UNIX%; location /template {{ prometheus mine; }} {zones}
         location / {{ proxy_pass http://app; }} }}"
    );
    let server = Setup::http(driver, &text).start();
    let address = |number: usize| format!("127.1.{}.{}:80", number / 250, number % 250 + 1);
    let peers: Vec<_> = (0..PEERS).map(|number| json!({ "server": address(number) })).collect();
    let peers = json!(peers).to_string();
    let length = peers.len();
    let request =
        format!("PUT /api/9/http/upstreams/app/servers HTTP/1.1\r\nHost: h\r\nContent-Length: {length}\r\n\r\n{peers}");
    assert_eq!(server.connect_tcp(1).ask(request).status, 200);
    server.get("/4999");
    let end = Instant::now() + DEADLINE;
    while server.connect_tcp(1).get("/api/9/http/location_zones/z4999?fields=requests").text() != "{\"requests\":1}" {
        assert!(Instant::now() < end, "it is counted when it is over");
    }
    let scraped = scrape(&server, "");
    let samples = samples(scraped.text(), false);
    let count = |beginning: &str| samples.keys().filter(|name| name.starts_with(beginning)).count();
    assert_eq!(count("gale_http_peer_requests_total{"), PEERS);
    assert_eq!(count("gale_http_location_zone_requests_total{"), ZONES);
    assert_eq!(samples["gale_http_location_zone_requests_total{zone=\"z4999\"}"], 1.0);
    let of_template = server.get("/template");
    assert_eq!(of_template.text().lines().count(), 1 + PEERS + ZONES);
    assert!(of_template.text().contains("\nzone{zone=\"z4999\"} 1\n"));
    // The API answers as many in JSON.
    let all = server.connect_tcp(1).get("/api/9/http/upstreams/app?fields=peers");
    let all: serde_json::Value = serde_json::from_slice(&all.body).unwrap();
    assert_eq!(all["peers"].as_array().map(Vec::len), Some(PEERS));
    // Other requests are served while a client does not read its scrape.
    let mut slow = server.connect_tcp(1);
    slow.send("GET /metrics HTTP/1.1\r\nHost: h\r\n\r\n");
    (0..20).for_each(|_| assert_eq!(server.get("/7").status, 200));
    drop(slow);
    server.stop();
}

fn metrics_are_gathered_in_the_pool(driver: Driver) {
    // No other task uses the pool.
    let server = Setup::http(driver, SCRAPED).start();
    let before = eventually(&server, |_| true);
    assert!(before["gale_pool_completed_total{pool=\"default\"}"] <= 1.0, "{before:#?}");
    eventually(&server, |samples| samples["gale_pool_completed_total{pool=\"default\"}"] > 1.0);
    server.stop();
}
