//! Active health checks (`health_check`, `match`) over real sockets: servers that become unhealthy and healthy again.

use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;

use crate::support::authority;
use crate::support::{Backend, DEADLINE, Driver, Server, Setup, dead_address, http_configuration, with_each_driver};

with_each_driver!(
    an_ill_server_gets_no_requests_until_it_is_well,
    a_server_that_is_not_there_is_ill,
    an_only_server_that_is_ill_gets_no_requests,
    a_mandatory_check_comes_before_the_first_request,
    a_check_asks_as_the_location_does,
    a_match_looks_at_status_header_body_and_variables,
    checks_use_a_connection_again_if_they_are_to,
    checks_speak_tls_as_the_location_does,
    wrong_checks_are_told_in_nginx_s_words,
    a_server_that_failed_too_often_is_told_of,
    a_used_retry_budget_ends_retries,
    a_server_that_stands_out_by_its_errors_is_set_aside_also_after_a_reload,
    wrong_outlier_ejection_is_told,
);

const WELL: &str = "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n";
const ILL: &str = "HTTP/1.1 500 Oh\r\nContent-Length: 0\r\n\r\n";

/// A server that answers requests with its name, and requests for `/health` with the response that the test sets.
struct Peer {
    address: SocketAddr,
    shared: Arc<Shared>,
    /// The connection's number and the request head, for each check.
    checks: Receiver<(usize, String)>,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    name: &'static str,
    /// `None` holds the response back.
    health: Mutex<Option<&'static str>>,
    changed: Condvar,
    is_over: AtomicBool,
}

impl Peer {
    fn start(name: &'static str, health: Option<&'static str>) -> Peer {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let address = listener.local_addr().expect("an address");
        let shared = Arc::new(Shared {
            name,
            health: Mutex::new(health),
            changed: Condvar::new(),
            is_over: AtomicBool::new(false),
        });
        let (sender, checks) = channel();
        let own = Arc::clone(&shared);
        let thread = std::thread::spawn(move || {
            let number = AtomicUsize::new(0);
            for stream in listener.incoming() {
                if own.is_over.load(Ordering::Relaxed) {
                    break;
                }
                let (shared, sender) = (Arc::clone(&own), sender.clone());
                let number = number.fetch_add(1, Ordering::Relaxed);
                std::thread::spawn(move || shared.serve(stream.expect("a connection"), number, &sender));
            }
        });
        Peer { address, shared, checks, thread: Some(thread) }
    }

    /// Sets the response to further checks.
    fn becomes(&self, health: Option<&'static str>) {
        *self.shared.health.lock().unwrap() = health;
        self.shared.changed.notify_all();
    }

    /// Waits for the next check.
    fn check(&self) -> (usize, String) {
        self.checks.recv_timeout(DEADLINE).expect("a check comes")
    }
}

impl Shared {
    /// Answers until the client closes the connection.
    fn serve(&self, stream: TcpStream, number: usize, checks: &Sender<(usize, String)>) -> Option<()> {
        let mut input = BufReader::new(stream.try_clone().ok()?);
        loop {
            let mut head = String::new();
            while !head.ends_with("\r\n\r\n") {
                if input.read_line(&mut head).ok()? == 0 {
                    return None;
                }
            }
            let answer = if head.contains("/health") {
                let _ = checks.send((number, head));
                let health = self.health.lock().unwrap();
                let is_held = |health: &mut Option<_>| health.is_none() && !self.is_over.load(Ordering::Relaxed);
                self.changed.wait_while(health, is_held).unwrap().unwrap_or(WELL).to_owned()
            } else {
                format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{}", self.name.len(), self.name)
            };
            (&stream).write_all(answer.as_bytes()).ok()?;
        }
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        self.shared.is_over.store(true, Ordering::Relaxed);
        self.becomes(Some(WELL));
        drop(TcpStream::connect(self.address));
        self.thread.take().expect("joined once").join().expect("the server did not panic");
    }
}

/// A group of these addresses, and a location that proxies to it and checks it.
fn group(addresses: &[SocketAddr], around: &str, check: &str) -> String {
    let servers: String = addresses.iter().map(|address| format!("server {address} max_fails=0;\n")).collect();
    format!(
        "upstream app {{ {servers} }}
         {around}
         server {{
             listen %UNIX%;
             location / {{ proxy_pass http://app; health_check interval=10ms uri=/health {check}; }}
         }}"
    )
}

/// Names of the servers that answer six requests, without duplicates.
fn asked(server: &Server) -> Vec<String> {
    let mut names: Vec<String> = (0..6).map(|_| server.get("/").text().to_owned()).collect();
    names.sort();
    names.dedup();
    names
}

fn an_ill_server_gets_no_requests_until_it_is_well(driver: Driver) {
    let (one, two) = (Peer::start("one", Some(WELL)), Peer::start("two", Some(WELL)));
    let server = Setup::http(driver, &group(&[one.address, two.address], "", "")).start();
    assert_eq!(asked(&server), ["one", "two"]);
    one.becomes(Some(ILL));
    let line = server.wait_logged("peer is unhealthy");
    let expected = format!(
        "peer is unhealthy while checking status code, health check \"\" of peer {} in upstream \"app\"",
        one.address
    );
    assert!(line.contains(&expected) && line.contains("[warn]"), "{line}");
    assert!(server.log().contains("unexpected status 500 while checking status code, health check"), "{server}");
    assert_eq!(asked(&server), ["two"]);
    one.becomes(Some(WELL));
    server.wait_logged("peer is healthy");
    assert_eq!(asked(&server), ["one", "two"]);
    server.stop();
}

fn a_server_that_is_not_there_is_ill(driver: Driver) {
    let two = Peer::start("two", Some(WELL));
    let (_bound, dead) = dead_address();
    let mut server = Setup::http(driver, &group(&[dead, two.address], "", "fails=2")).start();
    server.wait_logged("peer is unhealthy while connecting to upstream");
    let refused = "connect() failed (111: Connection refused) while connecting to upstream, health check";
    assert!(server.log().matches(refused).count() >= 2, "{server}");
    assert_eq!(asked(&server), ["two"]);
    // The state survives a reload, even before the next check.
    server.reload_http(driver, &group(&[dead, two.address], "", "jitter=1h"));
    assert_eq!(asked(&server), ["two"]);
    // Without checks the server is healthy.
    let group = group(&[dead, two.address], "", "").replace("health_check interval=10ms uri=/health ;", "");
    server.reload_http(driver, &group);
    assert_eq!(asked(&server), ["two"]);
    server.wait_logged("while connecting to upstream, client:");
    server.stop();
}

fn an_only_server_that_is_ill_gets_no_requests(driver: Driver) {
    let one = Peer::start("one", Some(ILL));
    let text = group(&[one.address], "", "").replace("http://app", &format!("http://{}", one.address));
    let server = Setup::http(driver, &text).start();
    server.wait_logged("peer is unhealthy");
    assert_eq!(server.get("/").status, 502);
    server.wait_logged("no live upstreams while connecting to upstream");
    one.becomes(Some(WELL));
    server.wait_logged("peer is healthy");
    assert_eq!(server.get("/").text(), "one");
    server.stop();
}

fn a_mandatory_check_comes_before_the_first_request(driver: Driver) {
    let one = Peer::start("one", None);
    let text = |check: &str| group(&[one.address], "", check);
    let mut server = Setup::http(driver, &text("mandatory")).start();
    one.check();
    assert_eq!(server.get("/").status, 502);
    one.becomes(Some(WELL));
    server.wait_logged("peer is healthy");
    assert_eq!(server.get("/").text(), "one");
    // Checked again after a reload, unless the check is `persistent`.
    one.becomes(None);
    server.reload_http(driver, &text("mandatory"));
    assert_eq!(server.get("/").status, 502);
    one.becomes(Some(WELL));
    server.wait_logged_times("peer is healthy", 2);
    assert_eq!(server.get("/").text(), "one");
    one.becomes(None);
    server.reload_http(driver, &text("mandatory persistent"));
    assert_eq!(server.get("/").text(), "one");
    server.stop();
}

fn a_check_asks_as_the_location_does(driver: Driver) {
    let (one, port) = (Peer::start("one", Some(WELL)), Peer::start("port", Some(WELL)));
    let check = format!(
        "port={}; proxy_set_header Host check.$server_name.test; proxy_set_header X-Remote [$remote_addr];
         proxy_set_header X-Empty $http_cookie; proxy_set_header X-Host $proxy_host",
        port.address.port()
    );
    let text = group(&[one.address], "", &check).replace("listen", "server_name a; listen");
    let server = Setup::http(driver, &text).start();
    let (_, head) = port.check();
    let expected = "GET /health HTTP/1.1\r\nHost: check.a.test\r\nConnection: close\r\nX-Remote: [unix:]\r\n\
                    X-Host: app\r\n\r\n";
    assert_eq!(head, expected);
    assert_eq!(server.get("/").text(), "one");
    server.stop();
}

fn a_match_looks_at_status_header_body_and_variables(driver: Driver) {
    const FINE: &str = "HTTP/1.1 204 Fine\r\nX-Version: 7\r\nX-Kind: good one\r\n\r\n";
    let tests = [
        ("status 200-203 204;", FINE, "HTTP/1.1 205 No\r\nContent-Length: 0\r\n\r\n", "checking status code"),
        ("status ! 200 300-399;", FINE, WELL, "checking status code"),
        ("header X-Version;", FINE, WELL, "checking header"),
        ("header ! X-Version;", WELL, FINE, "checking header"),
        ("header X-Version = 7; header x-kind ~ ^good;", FINE, WELL, "checking header"),
        ("header X-Kind !~ bad; header X-Version != 8;", FINE, WELL, "checking header"),
        (
            "body ~ \"all.is well\"; body !~ trouble;",
            "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nall \r\n7\r\nis well\r\n0\r\n\r\n",
            WELL,
            "checking body",
        ),
        ("require $is_new $upstream_status;", FINE, WELL, "checking required variables"),
    ];
    for (tests, good, bad, action) in tests {
        let one = Peer::start("one", Some(bad));
        let around = format!("map $upstream_http_x_version $is_new {{ 7 1; default 0; }} match fine {{ {tests} }}");
        let server = Setup::http(driver, &group(&[one.address], &around, "match=fine")).start();
        let line = server.wait_logged("peer is unhealthy");
        assert!(line.contains(&format!("while {action}, health check \"fine\" of peer")), "{tests}: {line}");
        one.becomes(Some(good));
        server.wait_logged("peer is healthy");
        assert_eq!(server.get("/").text(), "one", "{tests}");
        server.stop();
    }
}

fn checks_use_a_connection_again_if_they_are_to(driver: Driver) {
    let one = Peer::start("one", Some(WELL));
    let server = Setup::http(driver, &group(&[one.address], "", "keepalive_time=1h")).start();
    let (number, head) = one.check();
    assert!(!head.contains("Connection"), "{head}");
    assert_eq!([(); 3].map(|()| one.check().0), [number; 3]);
    server.stop();
}

fn checks_speak_tls_as_the_location_does(driver: Driver) {
    let authority = authority::Authority::new("authority");
    let pair = authority.ecdsa(&["app.test"]);
    let text = |name: &str| {
        format!(
            "upstream app {{ server unix:%DIR%/tls; }}
             server {{
                 listen unix:%DIR%/tls ssl;
                 ssl_certificate %DIR%/certificate;
                 ssl_certificate_key %DIR%/key;
                 return 200 $request_uri;
             }}
             server {{
                 listen %UNIX%;
                 location / {{
                     proxy_pass https://app;
                     proxy_ssl_trusted_certificate %DIR%/authority;
                     proxy_ssl_verify on;
                     proxy_ssl_name {name};
                     health_check interval=10ms uri=/health mandatory;
                 }}
             }}"
        )
    };
    let setup = Setup::http(driver, &text("app.test"));
    let setup = setup.file("authority", &authority.pem).file("certificate", &pair.certificate).file("key", &pair.key);
    let mut server = setup.start();
    server.wait_logged("peer is healthy");
    assert_eq!(server.get("/page").text(), "/page");
    server.reload_http(driver, &text("other.test"));
    server.wait_logged("peer is unhealthy while SSL handshaking to upstream, health check");
    assert_eq!(server.get("/page").status, 502);
    server.stop();
}

fn wrong_checks_are_told_in_nginx_s_words(driver: Driver) {
    let cases = [
        ("location / { proxy_pass http://a; health_check interval=0; }", "invalid parameter \"interval=0\""),
        ("location / { proxy_pass http://a; health_check fails=0; }", "invalid parameter \"fails=0\""),
        ("location / { proxy_pass http://a; health_check uri=x; }", "invalid parameter \"uri=x\""),
        ("location / { proxy_pass http://a; health_check port=70000; }", "invalid parameter \"port=70000\""),
        (
            "location / { proxy_pass http://a; health_check type=grpc; }",
            "\"health_check\" with \"type=grpc\" requires \"grpc_pass\" in the same location",
        ),
        (
            "location / { grpc_pass $arg_a; health_check type=grpc; }",
            "\"health_check\" cannot be used with variables in \"grpc_pass\"",
        ),
        ("location / { grpc_pass a; health_check; }", "\"health_check\" requires \"proxy_pass\" in the same location"),
        ("location / { grpc_pass a; health_check type=tcp; }", "invalid parameter \"type=tcp\""),
        ("location / { grpc_pass a; health_check type=grpc uri=/x; }", "\"uri\" cannot be used with \"type=grpc\""),
        ("location / { grpc_pass a; health_check type=grpc match=m; }", "\"match\" cannot be used with \"type=grpc\""),
        ("location / { grpc_pass a; health_check type=grpc grpc_status=17; }", "invalid parameter \"grpc_status=17\""),
        ("location / { proxy_pass http://a; health_check grpc_service=x; }", "invalid parameter \"grpc_service=x\""),
        (
            "location / { grpc_pass a; health_check type=grpc; health_check type=grpc; }",
            "\"health_check\" directive is duplicate",
        ),
        ("location / { proxy_pass http://a; health_check fast; }", "invalid parameter \"fast\""),
        ("location / { proxy_pass http://a; health_check persistent; }", "\"persistent\" requires \"mandatory\""),
        ("location / { proxy_pass http://a; health_check; health_check; }", "\"health_check\" directive is duplicate"),
        ("location / { proxy_pass http://a; health_check match=b; }", "unknown match \"b\""),
        ("location / { proxy_pass http://$host; health_check; }", "\"health_check\" cannot be used with variables"),
        ("location / { health_check; }", "\"health_check\" requires \"proxy_pass\""),
        ("} match a { status 20; } server {", "invalid status \"20\""),
        ("} match a { status 300-200; } server {", "invalid status \"300-200\""),
        ("} match a { header; } server {", "invalid number of arguments in \"header\" directive"),
        ("} match a { body = b; } server {", "invalid parameter \"=\""),
        ("} match a { body ~ (; } server {", "pcre2_compile() failed"),
        ("} match a { require b; } server {", "invalid variable name \"b\""),
        ("} match a { length 7; } server {", "unknown directive \"length\""),
        ("} match a { } match a { } server {", "duplicate match \"a\""),
    ];
    for (text, expected) in cases {
        let text = format!("upstream a {{ server unix:a; }} server {{ listen %UNIX%; {text} }}");
        let mut server = Setup::configuration(&http_configuration(driver, &text)).argument("-t").launch();
        assert!(!server.wait_exited().success(), "{text}");
        assert!(server.stderr().contains(expected), "{text}: {}", server.stderr());
    }
}

fn a_server_that_failed_too_often_is_told_of(driver: Driver) {
    let text = "
        upstream app { server unix:%DIR%/dead max_fails=2; server unix:%DIR%/one weight=2; }
        upstream ill { server unix:%DIR%/ill; server unix:%DIR%/one backup; }
        server { listen unix:%DIR%/one; return 200 one; }
        server { listen unix:%DIR%/ill; return 503; }
        server {
            listen %UNIX%;
            location / { proxy_pass http://app; }
            location /ill { proxy_pass http://ill; proxy_next_upstream http_503; }
        }";
    let text = http_configuration(driver, text).replace("worker_processes 2", "worker_processes 1");
    let server = Setup::configuration(&text).start();
    let disabled = "upstream server temporarily disabled while connecting to upstream, client: ";
    (0..3).for_each(|_| assert_eq!(server.get("/").text(), "one"));
    assert!(!server.log().contains(disabled), "{server}");
    (0..3).for_each(|_| assert_eq!(server.get("/").text(), "one"));
    let line = server.wait_logged(disabled);
    assert!(line.contains("[warn]") && line.contains("/dead:/\""), "{line}");
    assert_eq!(server.get("/ill").text(), "one");
    server.wait_logged("upstream server temporarily disabled while reading response header from upstream");
    server.stop();
}

fn a_used_retry_budget_ends_retries(driver: Driver) {
    let text = |budget: &str| {
        let text = format!(
            "upstream app {{
                 server unix:%DIR%/dead max_fails=0;
                 server unix:%DIR%/ill max_fails=0;
                 server unix:%DIR%/one backup;
                 {budget}
             }}
             server {{ listen unix:%DIR%/one; return 200 one; }}
             server {{ listen unix:%DIR%/ill; return 503; }}
             server {{
                 listen %UNIX%;
                 location / {{ proxy_pass http://app; proxy_next_upstream error http_503; }}
             }}"
        );
        http_configuration(driver, &text).replace("worker_processes 2", "worker_processes 1")
    };
    let mut server = Setup::configuration(&text("")).start();
    assert_eq!([(); 4].map(|()| server.get("/").status), [200; 4]);
    // The response or failure at hand is then sent to the client.
    server.reload(&text("retry_budget 0% min=0;"));
    assert_eq!([(); 4].map(|()| server.get("/").status), [502, 503, 502, 503]);
    let told = "retry budget of upstream \"app\" is used up";
    server.wait_logged(told);
    assert_eq!(server.log().matches(told).count(), 1, "{server}");
    // 1 % of one request is no retry; the minimum of one a second is available at once.
    server.reload(&text("retry_budget 1% min=0;"));
    assert_eq!([(); 2].map(|()| server.get("/").status), [502, 503]);
    server.reload(&text("retry_budget 0% min=1;"));
    assert_eq!([(); 4].map(|()| server.get("/").status), [200; 4]);
    server.reload(&text("retry_budget off;"));
    assert_eq!([(); 4].map(|()| server.get("/").status), [200; 4]);
    server.stop();
    for (wrong, expected) in [
        ("20", "invalid parameter \"20\""),
        ("101%", "invalid parameter \"101%\""),
        ("20% 7", "invalid parameter \"7\""),
    ] {
        let mut server = Setup::configuration(&text(&format!("retry_budget {wrong};"))).argument("-t").launch();
        assert!(!server.wait_exited().success(), "{wrong}");
        assert!(server.stderr().contains(expected), "{wrong}: {}", server.stderr());
    }
}

fn a_server_that_stands_out_by_its_errors_is_set_aside_also_after_a_reload(driver: Driver) {
    let answer = |status: &'static str| {
        Backend::tcp()
            .serve(move |_, client| client.try_send(format!("HTTP/1.1 {status}\r\nContent-Length: 0\r\n\r\n")).is_ok())
    };
    let (good, other, bad) = (answer("200 OK"), answer("200 OK"), answer("500 Wrong"));
    let text = |more: &str| {
        format!(
            "upstream app {{ outlier_ejection interval=1s requests=5 latency=100000 time=1h;
                 server {}; server {}; server {}; {more} }}
             server {{ listen %UNIX%; keepalive_requests 1000000000;
                 location / {{ proxy_pass http://app; }} location /api/ {{ api; }} }}",
            good.address, other.address, bad.address
        )
    };
    let mut server = Setup::http(driver, &text("")).start();
    let message = format!("upstream server {} in upstream \"app\" is ejected for 3600 s: 100% of its", bad.address);
    let mut client = server.connect();
    let deadline = std::time::Instant::now() + DEADLINE;
    while !server.log().contains(&message) {
        assert!(std::time::Instant::now() < deadline, "it stands out");
        assert!([200, 500].contains(&client.get("/").status));
    }
    // Apart from requests in flight, the server gets no more, even after a reload that keeps the group or puts its
    // servers into another group.
    let asked = bad.asked().len();
    for reloads in 0..3 {
        let mut client = server.connect();
        (0..30).for_each(|_| assert_eq!(client.get("/").status, 200, "{reloads}"));
        assert_eq!(bad.asked().len(), asked, "{reloads}");
        let report = client.get("/api/9/http/upstreams/app").text().to_owned();
        let states = (report.matches("\"up\"").count(), report.matches("\"state\":\"unavail\"").count());
        assert_eq!(states, (2, 1), "{reloads}: {report}");
        server.reload_http(driver, &text(["", "keepalive 3;", ""][reloads]));
    }
    server.stop();
}

fn wrong_outlier_ejection_is_told(driver: Driver) {
    for (parameters, expected) in [
        ("on", "invalid parameter \"on\""),
        ("errors=20", "invalid parameter \"errors=20\""),
        ("errors=101%", "invalid parameter \"errors=101%\""),
        ("max=0%", "invalid parameter \"max=0%\""),
        ("latency=1", "invalid parameter \"latency=1\""),
        ("time=0", "invalid parameter \"time=0\""),
        ("requests=0", "invalid parameter \"requests=0\""),
        ("; outlier_ejection", "\"outlier_ejection\" directive is duplicate"),
    ] {
        let text = format!("upstream app {{ outlier_ejection {parameters}; server 127.0.0.1:1; }}");
        let mut server = Setup::http(driver, &text).argument("-t").launch();
        assert!(!server.wait_exited().success(), "{parameters}");
        assert!(server.stderr().contains(expected), "{parameters}: {}", server.stderr());
    }
}
