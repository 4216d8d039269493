//! Traces (`otel_…`): spans that a collector receives over gRPC and HTTP, propagation of contexts, and collectors that
//! are down, slow, or answer garbage.

use std::collections::BTreeMap;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use gale_protocol::http2::{ErrorCode, StreamId};
use rustix::process::Signal;

use crate::support::authority::Authority;
use crate::support::http2::Http2;
use crate::support::http2_server::Http2Server;
use crate::support::otlp;
use crate::support::otlp::{Export, Span};
use crate::support::{self, Backend, Client, DEADLINE, Driver, Server, Serving, Setup, with_each_driver};

with_each_driver!(
    spans_have_the_attributes_of_nginx_over_grpc,
    spans_go_over_http_on_one_connection,
    spans_of_http2_and_http09_have_their_version,
    a_collector_is_spoken_to_over_tls_and_unix_sockets,
    batches_are_sent_when_they_are_full_and_at_the_end,
    a_batch_is_sent_at_the_interval,
    settings_of_a_reload_apply_to_waiting_spans,
    exporter_removed_by_a_reload_sends_waiting_spans,
    spans_of_requests_under_way_at_the_end_are_sent,
    contexts_are_taken_passed_on_both_or_neither,
    a_context_that_is_none_is_not_believed,
    requests_are_sampled_by_a_variable,
    requests_are_sampled_by_chance,
    an_id_is_made_for_a_request_without_a_span_where_it_is_told,
    request_has_one_span_with_any_outcome,
    names_and_attributes_come_from_variables,
    malformed_utf8_in_attributes_is_replaced,
    a_collector_that_is_gone_costs_the_spans_alone,
    silent_collector_delays_no_requests,
    garbage_of_a_collector_is_told_and_the_next_batch_tries_anew,
    a_collector_that_speaks_something_else_is_left,
    spans_that_a_collector_refuses_count_as_dropped,
);

const TRACE: &str = "0af7651916cd43dd8448eb211c80319c";
const PARENT: &str = "b9c7c989f97918e1";
const STATE: &str = "congo=ucfJifl5GOE,rojo=00f067aa0ba902b7";

/// A collector over HTTP that accepts every export.
struct Collector {
    serving: Serving,
    exports: Receiver<Export>,
}

impl Collector {
    fn new() -> Collector {
        Collector::answering(b"")
    }

    fn answering(body: &'static [u8]) -> Collector {
        let (sender, exports) = channel();
        let serving = Backend::tcp().serve(move |asked, client| {
            let answer = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n", body.len());
            client.send([answer.as_bytes(), body].concat());
            sender.send(otlp::export(&asked.body)).is_ok()
        });
        Collector { serving, exports }
    }

    /// An `otel_exporter` block that sends each span at once.
    fn block(&self) -> String {
        self.block_with("batch_size 1; interval 1h;")
    }

    fn block_with(&self, rows: &str) -> String {
        format!("otel_exporter {{ endpoint http://{}/v1/traces; {rows} }}", self.serving.address)
    }

    #[track_caller]
    fn export(&self) -> Export {
        self.exports.recv_timeout(DEADLINE).expect("spans in time")
    }

    /// Waits for the next span, which is exported alone.
    #[track_caller]
    fn span(&self) -> Span {
        let mut export = self.export();
        assert_eq!(export.spans.len(), 1, "{export:?}");
        export.spans.remove(0)
    }
}

/// One event loop, since each loop has its own batches.
fn setup(driver: Driver, text: &str) -> Setup {
    Setup::http(driver, text).replace("worker_processes 2;", "worker_processes 1;")
}

fn configuration(driver: Driver, text: &str) -> String {
    support::http_configuration(driver, text).replace("worker_processes 2;", "worker_processes 1;")
}

fn grpc_block(backend: &Backend, rows: &str) -> String {
    format!("otel_exporter {{ endpoint {}; batch_size 1; {rows} }}", backend.address())
}

/// An empty gRPC response.
const NOTHING: &[u8] = b"\0\0\0\0\0";

fn pairs(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
    pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
}

fn spans_have_the_attributes_of_nginx_over_grpc(driver: Driver) {
    let backend = Backend::tcp();
    let exporter = grpc_block(&backend, "header X-API-Token own; header Authorization \"Basic value\";");
    let server = setup(
        driver,
        &format!(
            "{exporter} otel_trace on; otel_resource_attr my.name 'my value';
             server {{ listen %TCP%; server_name .example.com;
                       location /ok {{ return 200 OK; }} location /err {{ return 503; }} }}"
        ),
    )
    .start();
    let mut client = server.connect_tcp(1);
    let before = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    let request = "POST /ok/x?y HTTP/1.1\r\nHost: a.example.com\r\nUser-Agent: own\r\nContent-Length: 3\r\n\r\nabc";
    assert_eq!(client.ask(request).text(), "OK");
    let mut collector = Http2Server::accept(&backend);
    let asked = collector.whole_request();
    assert_eq!(asked.method, "POST");
    assert_eq!(asked.path, "/opentelemetry.proto.collector.trace.v1.TraceService/Export");
    assert_eq!((asked.header("content-type"), asked.header("te")), (Some("application/grpc"), Some("trailers")));
    assert_eq!((asked.header("x-api-token"), asked.header("authorization")), (Some("own"), Some("Basic value")));
    let export = otlp::grpc_export(&asked.body);
    assert_eq!(export.resource, pairs(&[("my.name", "my value"), ("service.name", "unknown_service:nginx")]));
    assert_eq!(export.scope_name, "gale");
    let [span] = &export.spans[..] else { panic!("{export:?}") };
    assert_eq!((span.name.as_str(), span.kind, span.status), ("/ok", 2, 0));
    assert_eq!((span.parent_id.as_str(), span.trace_state.as_str()), ("", ""));
    let (start, end) = (Duration::from_nanos(span.start), Duration::from_nanos(span.end));
    // The wall clock may be adjusted, but not by hours.
    assert!(start <= end && start + Duration::from_secs(3600) > before, "{span:?}");
    let address = server.directory.address(1);
    let expected = [
        ("http.method", "POST"),
        ("http.target", "/ok/x?y"),
        ("http.route", "/ok"),
        ("http.scheme", "http"),
        ("http.flavor", "1.1"),
        ("http.user_agent", "own"),
        ("http.request_content_length", "3"),
        ("http.response_content_length", "2"),
        ("http.status_code", "200"),
        ("net.host.name", "example.com"),
        ("net.host.port", &address.port().to_string()),
        ("net.sock.peer.addr", "127.0.0.1"),
        ("net.sock.peer.port", &client.local_address().port().to_string()),
    ];
    let mut expected = pairs(&expected);
    expected.insert("net.sock.peer.addr".to_owned(), client.local_address().ip().to_string());
    assert_eq!(span.attributes, expected);
    collector.answer_grpc(asked.stream, NOTHING);
    // The connection is reused, and the failed request has an error status.
    assert_eq!(client.get("/err").status, 503);
    let asked = collector.whole_request();
    let export = otlp::grpc_export(&asked.body);
    assert_eq!((export.spans[0].status, export.spans[0].attribute("http.status_code")), (2, "503"));
    assert!(!export.spans[0].attributes.contains_key("http.user_agent"));
    collector.answer_grpc(asked.stream, NOTHING);
    assert!(backend.is_idle());
    server.stop();
}

fn spans_go_over_http_on_one_connection(driver: Driver) {
    let backend = Backend::tcp();
    let server = setup(
        driver,
        &format!(
            "otel_exporter {{ endpoint http://{}/own/v1/traces?x; batch_size 1; header X-Own own; }}
             otel_service_name mine; otel_resource_attr service.name other;
             server {{ listen %UNIX%; otel_trace 1; location / {{ return 200 a; }} }}",
            backend.address()
        ),
    )
    .start();
    let mut client = server.connect();
    let mut collector = None::<Client>;
    for _ in 0..3 {
        client.get("/");
        let collector = collector.get_or_insert_with(|| backend.accept());
        let asked = collector.request();
        assert_eq!((asked.method.as_str(), asked.target.as_str()), ("POST", "/own/v1/traces?x"));
        assert_eq!(asked.header("Content-Type"), Some("application/x-protobuf"));
        assert_eq!((asked.header("Host"), asked.header("X-Own")), (Some(backend.address()), Some("own")));
        let export = otlp::export(&asked.body);
        assert_eq!(export.resource, pairs(&[("service.name", "mine")]));
        let span = &export.spans[0];
        // A Unix socket has no port.
        assert_eq!((span.name.as_str(), span.attribute("net.sock.peer.addr")), ("/", "unix:"));
        for name in ["net.host.port", "net.sock.peer.port"] {
            assert!(!span.attributes.contains_key(name), "{span:?}");
        }
        collector.send("HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n");
    }
    assert!(backend.is_idle());
    server.stop();
}

fn spans_of_http2_and_http09_have_their_version(driver: Driver) {
    let collector = Collector::new();
    let text = format!(
        "{} server {{ listen %UNIX%; http2 on; otel_trace on; location / {{ return 200 ab; }} }}",
        collector.block()
    );
    let server = setup(driver, &text).start();
    assert_eq!(Http2::unix(&server).get("/two").text(), "ab");
    let span = collector.span();
    assert_eq!((span.attribute("http.flavor"), span.attribute("http.target")), ("2.0", "/two"));
    let mut client = server.connect();
    client.send("GET /nine\r\n");
    assert_eq!(client.read_to_end(), b"ab");
    let span = collector.span();
    assert_eq!((span.attributes.get("http.flavor"), span.attribute("http.target")), (None, "/nine"));
    server.stop();
}

fn a_collector_is_spoken_to_over_tls_and_unix_sockets(driver: Driver) {
    let authority = Authority::new("authority");
    let pair = authority.ecdsa(&["localhost"]);
    let backend = Backend::tcp();
    // Gale terminates TLS in front of the collector; its certificate is verified.
    let text = format!(
        "EXPORTER
         server {{ listen %TCP% ssl; http2 on; ssl_certificate %DIR%/own.crt; ssl_certificate_key %DIR%/own.key;
                   location / {{ grpc_pass grpc://{}; }} }}
         server {{ listen %UNIX%; otel_trace on; location / {{ return 200 a; }} }}
         server {{ listen unix:%DIR%/collector.sock; http2 on; location / {{ grpc_pass grpc://{}; }} }}",
        backend.address(),
        backend.address()
    );
    let of = |endpoint: &str, rows: &str| {
        let exporter = format!("otel_exporter {{ endpoint {endpoint}; batch_size 1; interval 1h; {rows} }}");
        text.replace("EXPORTER", &exporter)
    };
    let mut server = setup(driver, &of("https://localhost:%PORT%", "trusted_certificate own.ca;"))
        .file("own.crt", &pair.certificate)
        .file("own.key", &pair.key)
        .file("own.ca", &authority.pem)
        .start();
    // The collector's name resolves to another address than the test's own.
    server.get("/");
    server.wait_logged("OTel export failure: ");
    let other = authority.ecdsa(&[&server.directory.address(1).ip().to_string()]);
    server.directory.write("own.crt", &other.certificate);
    server.directory.write("own.key", &other.key);
    server.reload(&configuration(driver, &of("https://%TCP%", "trusted_certificate own.ca;")));
    server.get("/tls");
    let mut collector = Http2Server::accept(&backend);
    let asked = collector.whole_request();
    assert_eq!(otlp::grpc_export(&asked.body).spans[0].attribute("http.target"), "/tls");
    collector.answer_grpc(asked.stream, NOTHING);
    // This certificate is not signed by the trusted one.
    server.reload(&configuration(driver, &of("https://%TCP%", "trusted_certificate own.crt;")));
    server.get("/");
    server.wait_logged_times("OTel export failure: ", 2);
    server.reload(&configuration(driver, &of("unix:%DIR%/collector.sock", "")));
    server.get("/unix");
    // The reload opens another connection.
    let mut collector = Http2Server::accept(&backend);
    let asked = collector.whole_request();
    assert_eq!(otlp::grpc_export(&asked.body).spans[0].attribute("http.target"), "/unix");
    collector.answer_grpc(asked.stream, NOTHING);
    server.stop();
}

fn batches_are_sent_when_they_are_full_and_at_the_end(driver: Driver) {
    let collector = Collector::new();
    let exporter = collector.block_with("batch_size 3; batch_count 3; interval 1h;");
    let mut server =
        setup(driver, &format!("{exporter} otel_trace on; server {{ listen %UNIX%; location / {{ return 200 a; }} }}"))
            .start();
    let mut client = server.connect();
    for number in 0..7 {
        client.get(&format!("/{number}"));
    }
    let targets =
        |export: Export| export.spans.iter().map(|span| span.attribute("http.target").to_owned()).collect::<Vec<_>>();
    assert_eq!(targets(collector.export()), ["/0", "/1", "/2"]);
    assert_eq!(targets(collector.export()), ["/3", "/4", "/5"]);
    drop(client);
    server.end(Signal::QUIT);
    assert_eq!(targets(collector.export()), ["/6"]);
}

fn a_batch_is_sent_at_the_interval(driver: Driver) {
    let collector = Collector::new();
    let exporter = collector.block_with("interval 10ms;");
    let server =
        setup(driver, &format!("{exporter} otel_trace on; server {{ listen %UNIX%; location / {{ return 200 a; }} }}"))
            .start();
    for path in ["/1", "/2"] {
        server.get(path);
        assert_eq!(collector.span().attribute("http.target"), path);
    }
    server.stop();
}

fn settings_of_a_reload_apply_to_waiting_spans(driver: Driver) {
    let (one, other) = (Collector::new(), Collector::new());
    let text = |exporter: String| {
        format!("{exporter} otel_trace on; server {{ listen %UNIX%; location / {{ return 200 a; }} }}")
    };
    let mut server = setup(driver, &text(one.block_with("interval 1h;"))).start();
    server.get("/before");
    server.reload(&configuration(driver, &text(other.block_with("interval 1h; batch_size 1;"))));
    assert_eq!(other.span().attribute("http.target"), "/before");
    server.get("/after");
    assert_eq!(other.span().attribute("http.target"), "/after");
    assert_eq!(one.serving.connection_count(), 0);
    server.stop();
}

fn exporter_removed_by_a_reload_sends_waiting_spans(driver: Driver) {
    let collector = Collector::new();
    let text = "server { listen %UNIX%; location / { return 200 a; } }";
    let exporter = collector.block_with("interval 1h;");
    let mut server = setup(driver, &format!("{exporter} otel_trace on; {text}")).start();
    server.get("/before");
    server.reload(&configuration(driver, text));
    assert_eq!(collector.span().attribute("http.target"), "/before");
    server.get("/after");
    server.stop();
}

fn spans_of_requests_under_way_at_the_end_are_sent(driver: Driver) {
    let (collector, backend) = (Collector::new(), Backend::tcp());
    let mut server = setup(
        driver,
        &format!(
            "{} otel_trace on; server {{ listen %UNIX%; location / {{ proxy_pass http://{}; }} }}",
            collector.block_with("interval 1h;"),
            backend.address()
        ),
    )
    .start();
    let mut client = server.connect();
    client.send("GET /slow HTTP/1.1\r\nHost: h\r\n\r\n");
    let mut behind = backend.accept();
    behind.request();
    server.signal(Signal::QUIT);
    server.wait_logged("gracefully shutting down");
    behind.send("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok");
    assert_eq!(client.response().text(), "ok");
    assert_eq!(collector.span().attribute("http.target"), "/slow");
    assert!(server.wait_exited().success());
}

fn traced(path: &str, fields: &str) -> String {
    format!("GET {path} HTTP/1.1\r\nHost: h\r\n{fields}\r\n")
}

/// Fields of a client that is part of a trace.
fn parent_fields() -> String {
    format!("Traceparent: 00-{TRACE}-{PARENT}-01\r\nTracestate: {STATE}\r\n")
}

/// A location for each kind of context, all proxied to the backend.
fn contexts(driver: Driver, collector: &Collector, behind: &str) -> Server {
    let locations: String = ["ignore", "extract", "inject", "propagate"]
        .map(|kind| format!("location /{kind} {{ otel_trace_context {kind}; proxy_pass http://{behind}; }}"))
        .concat();
    let variables = "\"$otel_trace_id $otel_span_id $otel_parent_id $otel_parent_sampled\"";
    let text = format!(
        "{} otel_trace on; server {{ listen %UNIX%; add_header X-Otel {variables}; {locations}
         location /fields {{ otel_trace_context propagate; return 200 '$http_traceparent $http_tracestate'; }} }}",
        collector.block()
    );
    setup(driver, &text).start()
}

fn contexts_are_taken_passed_on_both_or_neither(driver: Driver) {
    let (collector, backend) = (Collector::new(), Backend::tcp().serve(answer_empty));
    let server = contexts(driver, &collector, &backend.address);
    let mut client = server.connect();
    for (number, (kind, has_parent)) in ["ignore", "extract", "inject", "propagate"]
        .into_iter()
        .flat_map(|kind| [(kind, false), (kind, true)])
        .enumerate()
    {
        let fields = if has_parent { parent_fields() } else { String::new() };
        let response = client.ask(traced(&format!("/{kind}"), &fields));
        let span = collector.span();
        let (_, asked) = backend.asked()[number].clone();
        let (extracts, injects) = (["extract", "propagate"].contains(&kind), ["inject", "propagate"].contains(&kind));
        let takes = extracts && has_parent;
        assert_eq!(span.trace_id == TRACE, takes, "{kind}");
        assert_eq!(span.parent_id, if takes { PARENT } else { "" }, "{kind}");
        assert_eq!(span.trace_state, if takes { STATE } else { "" }, "{kind}");
        let made = format!("00-{}-{}-01", span.trace_id, span.span_id);
        let sent = format!("00-{TRACE}-{PARENT}-01");
        let passed = if injects { Some(&*made) } else { Some(&*sent).filter(|_| has_parent) };
        assert_eq!(asked.header("traceparent"), passed, "{kind}");
        let state = if injects { takes } else { has_parent };
        assert_eq!(asked.header("tracestate"), state.then_some(STATE), "{kind}");
        let sampled = if takes { "1" } else { "0" };
        let told = format!("{} {} {} {sampled}", span.trace_id, span.span_id, span.parent_id);
        assert_eq!(response.header("X-Otel"), Some(&*told), "{kind}");
    }
    // Modules see the same fields as upstream servers.
    let response = client.ask(traced("/fields", &parent_fields()));
    let span = collector.span();
    assert_eq!(response.text(), format!("00-{TRACE}-{}-01 {STATE}", span.span_id));
    server.stop();
}

fn answer_empty(_: &support::Asked, client: &mut Client) -> bool {
    client.send("HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n");
    true
}

fn a_context_that_is_none_is_not_believed(driver: Driver) {
    let (collector, backend) = (Collector::new(), Backend::tcp().serve(answer_empty));
    let server = contexts(driver, &collector, &backend.address);
    let mut client = server.connect();
    let right = format!("00-{TRACE}-{PARENT}-01");
    let long = "x".repeat(3000);
    let wrong = [
        "Traceparent:\r\n".to_owned(),
        format!("Traceparent: {right}\r\nTraceparent: {right}\r\n"),
        format!("Traceparent: {right}{long}\r\n"),
        format!("Traceparent: 00-{}-{PARENT}-01\r\n", "0".repeat(32)),
        format!("Traceparent: 00-{TRACE}-{}-01\r\n", "\u{fffd}".repeat(8)),
        format!("Traceparent: ff-{TRACE}-{PARENT}-01\r\n"),
        format!("Traceparent: {}\r\n", "-".repeat(55)),
        format!("Traceparent: {}\r\n", "-".repeat(3000)),
    ];
    for (number, fields) in wrong.iter().enumerate() {
        let response = client.ask(traced("/propagate", &format!("{fields}Tracestate: {STATE}\r\n")));
        assert_eq!(response.status, 200, "{fields}");
        let span = collector.span();
        assert!(span.trace_id != TRACE && span.parent_id.is_empty() && span.trace_state.is_empty(), "{fields}");
        let (_, asked) = backend.asked()[number].clone();
        let made = format!("00-{}-{}-01", span.trace_id, span.span_id);
        assert_eq!((asked.header("traceparent"), asked.header("tracestate")), (Some(&*made), None), "{fields}");
    }
    // All `tracestate` fields form one list, which is ignored if it is malformed.
    let state = |fields: &str| format!("traceparent: {right}\r\n{fields}");
    for (fields, expected) in [
        (state("tracestate: a=1\r\nTraceState: b=2\r\n"), "a=1,b=2"),
        (state("tracestate: a=1,=\r\n"), ""),
        (state(&format!("tracestate: {}\r\n", "a=1,".repeat(40))), ""),
    ] {
        client.ask(traced("/propagate", &fields));
        let span = collector.span();
        assert_eq!((span.trace_id.as_str(), span.trace_state.as_str()), (TRACE, expected), "{fields}");
        let (_, asked) = backend.asked().pop().unwrap();
        assert_eq!(asked.header("tracestate").unwrap_or_default(), expected);
    }
    server.stop();
}

fn requests_are_sampled_by_a_variable(driver: Driver) {
    let collector = Collector::new();
    let server = setup(
        driver,
        &format!(
            "{} split_clients $otel_trace_id $sampler {{ 50% on; * off; }}
             server {{ listen %UNIX%; otel_trace $sampler; otel_trace_context propagate;
                       location / {{ return 200 \"$sampler $http_traceparent\"; }} }}",
            collector.block()
        ),
    )
    .start();
    let mut client = server.connect();
    let mut counts = [0; 2];
    for number in 1..=40 {
        let fields = format!("traceparent: 00-{number:032x}-{PARENT}-01\r\n");
        let text = client.ask(traced("/", &fields)).text().to_owned();
        let (sampler, told) = text.split_once(' ').unwrap();
        let is_on = sampler == "on";
        assert!(told.starts_with(&format!("00-{number:032x}-")), "{text}");
        assert!(told.ends_with(if is_on { "-01" } else { "-00" }), "{text}");
        counts[usize::from(is_on)] += 1;
        if is_on {
            assert_eq!(collector.span().trace_id, format!("{number:032x}"));
        }
    }
    assert!(counts.iter().all(|&count| count > 5), "{counts:?}");
    server.stop();
}

fn requests_are_sampled_by_chance(driver: Driver) {
    let collector = Collector::new();
    let server = setup(
        driver,
        &format!(
            "{} server {{ listen %UNIX%; otel_trace_context inject;
             location /some {{ otel_trace 50%; return 200 $http_traceparent; }}
             location /all {{ otel_trace 100%; return 200 $http_traceparent; }}
             location /none {{ otel_trace 0%; return 200 $http_traceparent; }} }}",
            collector.block()
        ),
    )
    .start();
    let mut client = server.connect();
    let mut is_traced = |path: &str| {
        let text = client.get(path).text().to_owned();
        let is_traced = text.ends_with("-01");
        assert!(is_traced || text.ends_with("-00"), "{text}");
        if is_traced {
            assert_eq!(collector.span().trace_id, text[3..35]);
        }
        is_traced
    };
    // Two hundred equal decisions by chance are practically impossible.
    let some: Vec<bool> = (0..200).map(|_| is_traced("/some")).collect();
    assert!(some.contains(&true) && some.contains(&false));
    assert!((0..20).all(|_| is_traced("/all")) && !(0..20).any(|_| is_traced("/none")));
    server.stop();
}

fn an_id_is_made_for_a_request_without_a_span_where_it_is_told(driver: Driver) {
    let collector = Collector::new();
    let server = setup(
        driver,
        &format!(
            "{} server {{ listen %UNIX%; otel_trace 0%; location / {{ return 200 \"$otel_trace_id $otel_trace_id\"; }}
             location /extracting {{ otel_trace_context extract; return 200 \"$otel_trace_id $otel_parent_id\"; }} }}",
            collector.block()
        ),
    )
    .start();
    let mut client = server.connect();
    let text = client.get("/").text().to_owned();
    let (first, second) = text.split_once(' ').expect("two ids");
    assert!(first.len() == 32 && first == second, "{text}");
    assert_ne!(client.get("/").text(), text);
    assert_eq!(client.ask(traced("/extracting", &parent_fields())).text(), format!("{TRACE} {PARENT}"));
    server.stop();
}

fn request_has_one_span_with_any_outcome(driver: Driver) {
    let collector = Collector::new();
    let server = setup(
        driver,
        &format!(
            "{} otel_trace on; server {{ listen %UNIX%; error_page 404 /page; rewrite ^/server/ /ok;
             location /ok {{ return 200 ok; }}
             location /rewritten {{ rewrite ^ /ok last; }}
             location /tried {{ try_files /nothing /ok; }}
             location /named {{ try_files /nothing @name; }} location @name {{ return 200 named; }}
             location /error {{ return 404; }} location /page {{ return 200 page; }}
             location /from {{ otel_trace on; rewrite ^ /off last; }}
             location /off {{ otel_trace off; return 200 off; }}
             location /to {{ otel_trace off; rewrite ^ /ok last; }}
             location /ssi {{ ssi on; default_type text/html; try_files /nothing /page.html; }}
             location /page.html {{ ssi on; default_type text/html; root %DIR%; }}
             location ~ \\.end$ {{ return 200 end; }} }}",
            collector.block()
        ),
    )
    .file("page.html", "<!--#include virtual=\"/ok\" -->!")
    .start();
    let mut client = server.connect();
    for (path, name, text) in [
        ("/ok", "/ok", "ok"),
        ("/server/x", "/ok", "ok"),
        ("/rewritten", "/ok", "ok"),
        ("/tried", "/ok", "ok"),
        ("/named", "@name", "named"),
        ("/error", "/page", "page"),
        ("/from", "/off", "off"),
        ("/ssi", "/page.html", "ok!"),
        ("/x.end", "\\.end$", "end"),
    ] {
        // `/to` switches tracing off, and the redirect does not switch it on.
        assert_eq!(client.get("/to").text(), "ok");
        assert_eq!(client.get(path).text(), text, "{path}");
        let span = collector.span();
        assert_eq!((span.name.as_str(), span.attribute("http.route")), (name, name), "{path}");
        assert_eq!(span.attribute("http.target"), path);
    }
    server.stop();
}

fn names_and_attributes_come_from_variables(driver: Driver) {
    let collector = Collector::new();
    let server = setup(
        driver,
        &format!(
            "{} otel_trace on; otel_span_attr of.http $host;
             server {{ listen %UNIX%; otel_span_name \"$request_method of $uri\";
             location / {{ return 200 a; }}
             location /own {{ otel_span_name constant; otel_span_attr done $request_completion;
                 otel_span_attr http.response.header.content.type $sent_http_content_type;
                 otel_span_attr http.request.header.x.own $http_x_own; return 200 a; }} }}",
            collector.block()
        ),
    )
    .start();
    server.get("/x");
    let span = collector.span();
    assert_eq!((span.name.as_str(), span.attribute("of.http")), ("GET of /x", "localhost"));
    server.get("/own");
    let span = collector.span();
    assert_eq!((span.name.as_str(), span.attribute("done")), ("constant", "OK"));
    assert_eq!(span.attribute("http.response.header.content.type"), "[text/plain]");
    assert_eq!((span.attribute("http.request.header.x.own"), span.attributes.get("of.http")), ("[]", None));
    server.stop();
}

fn malformed_utf8_in_attributes_is_replaced(driver: Driver) {
    let collector = Collector::new();
    let text =
        format!("{} otel_trace on; server {{ listen %UNIX%; location / {{ return 200 a; }} }}", collector.block());
    let server = setup(driver, &text).start();
    let mut client = server.connect();
    let request = b"GET /\xff\xfe?\xe9 HTTP/1.1\r\nHost: h\r\nUser-Agent: \xc3\xa9\xc3\r\n\r\n";
    assert_eq!(client.ask(request).text(), "a");
    let span = collector.span();
    assert_eq!(span.attribute("http.target"), "/\u{fffd}\u{fffd}?\u{fffd}");
    assert_eq!(span.attribute("http.user_agent"), "\u{e9}\u{fffd}");
    server.stop();
}

/// Number of spans exported and dropped so far.
fn counts(client: &mut Client) -> (u64, u64) {
    let text = client.get("/metrics").text().to_owned();
    let count = |result: &str| {
        let name = format!("gale_otel_spans_total{{result=\"{result}\"}} ");
        let line = text.lines().find_map(|line| line.strip_prefix(&name)).expect("a figure");
        line.parse().expect("a number")
    };
    (count("exported"), count("dropped"))
}

/// A server with the counts of spans at `/metrics`.
fn counted(exporter: &str) -> String {
    let figures = "location = /metrics { otel_trace off; prometheus; }";
    format!("{exporter} otel_trace on; server {{ listen %UNIX%; location / {{ return 200 a; }} {figures} }}")
}

fn a_collector_that_is_gone_costs_the_spans_alone(driver: Driver) {
    let backend = Backend::tcp();
    let exporter = grpc_block(&backend, "interval 1h;");
    drop(backend);
    let server = setup(driver, &counted(&exporter)).start();
    let mut client = server.connect();
    for number in 1..=5 {
        assert_eq!(client.get("/").text(), "a");
        while counts(&mut client) != (0, number) {}
    }
    server.wait_logged("OTel export failure: connect() failed (111: Connection refused) while connecting to collector");
    server.wait_logged("OTel dropped records: ");
    // Logged once an interval.
    assert_eq!(server.log().matches("OTel export failure").count(), 1, "{server}");
    assert_eq!(server.log().matches("OTel dropped records: 1\n").count(), 1, "{server}");
    server.stop();
}

fn silent_collector_delays_no_requests(driver: Driver) {
    let backend = Backend::tcp();
    let exporter = format!(
        "otel_exporter {{ endpoint http://{}/; batch_size 2; batch_count 3; interval 1h; }}",
        backend.address()
    );
    let server = setup(driver, &counted(&exporter)).start();
    let mut client = server.connect();
    let mut collector = None;
    for _ in 0..10 {
        assert_eq!(client.get("/").text(), "a");
        assert_eq!(client.get("/").text(), "a");
        let _ = collector.get_or_insert_with(|| {
            let mut collector = backend.accept();
            collector.request();
            collector
        });
    }
    // Two spans are in flight, four are queued.
    assert_eq!(counts(&mut client), (0, 14));
    let mut collector = collector.unwrap();
    for number in 0..3 {
        if number > 0 {
            assert_eq!(otlp::export(&collector.request().body).spans.len(), 2);
        }
        collector.send("HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n");
    }
    while counts(&mut client) != (6, 14) {}
    server.stop();
}

fn garbage_of_a_collector_is_told_and_the_next_batch_tries_anew(driver: Driver) {
    type Answer = fn(&mut Http2Server, StreamId);
    fn trailers(collector: &mut Http2Server, stream: StreamId, fields: &[(&str, &str)]) {
        collector.respond(stream, 200, fields, true);
    }
    let answers: [(Answer, &str); 7] = [
        (|collector, stream| collector.answer_grpc(stream, b"\0\0\0\0\x05abc"), "invalid response"),
        (|collector, stream| collector.answer_grpc(stream, b"\0\0\0\0\x02\x0a\xff"), "invalid response"),
        (|collector, stream| collector.answer_grpc(stream, b"\x01\0\0\0\0"), "invalid response"),
        (|collector, stream| collector.respond(stream, 503, &[], true), "unexpected status 503"),
        (|collector, stream| trailers(collector, stream, &[]), "no \"grpc-status\" in the response"),
        (
            |collector, stream| {
                trailers(collector, stream, &[("grpc-status", "14"), ("grpc-message", "not%20n\u{f6}w")])
            },
            "gRPC status 14 (not%20n\\xc3\\xb6w)",
        ),
        (|collector, stream| collector.reset(stream, ErrorCode::INTERNAL_ERROR), " while reading response header"),
    ];
    for (answer, expected) in answers {
        let backend = Backend::tcp();
        let server = setup(driver, &counted(&grpc_block(&backend, "interval 1h;"))).start();
        let mut client = server.connect();
        client.get("/");
        let mut collector = Http2Server::accept(&backend);
        let asked = collector.whole_request();
        answer(&mut collector, asked.stream);
        assert!(server.wait_logged("OTel export failure: ").contains(expected), "{expected}\n{server}");
        while counts(&mut client) != (0, 1) {}
        client.get("/");
        if expected.starts_with(" while") {
            // A connection whose stream was reset is not used for another request.
            collector = Http2Server::accept(&backend);
        }
        let asked = collector.whole_request();
        collector.answer_grpc(asked.stream, NOTHING);
        while counts(&mut client) != (1, 1) {}
        server.stop();
    }
}

fn a_collector_that_speaks_something_else_is_left(driver: Driver) {
    for endpoint in ["ADDRESS", "http://ADDRESS/v1/traces"] {
        let backend = Backend::tcp();
        let endpoint = endpoint.replace("ADDRESS", backend.address());
        let exporter = format!("otel_exporter {{ endpoint {endpoint}; batch_size 1; interval 1h; }}");
        let server = setup(driver, &counted(&exporter)).start();
        let mut client = server.connect();
        for number in 1..=3 {
            assert_eq!(client.get("/").text(), "a");
            let mut collector = backend.accept();
            collector.send("\0\u{1}garbage\r\n".repeat(100));
            while counts(&mut client) != (0, number) {}
        }
        server.wait_logged("OTel export failure: ");
        server.stop();
    }
}

fn spans_that_a_collector_refuses_count_as_dropped(driver: Driver) {
    let collector = Collector::answering(b"\x0a\x0a\x08\x02\x12\x06no\r\n\xc3\xa9");
    let exporter = collector.block_with("batch_size 3; interval 1h;");
    let server = setup(driver, &counted(&exporter)).start();
    let mut client = server.connect();
    for _ in 0..3 {
        client.get("/");
    }
    assert_eq!(collector.export().spans.len(), 3);
    while counts(&mut client) != (1, 2) {}
    server.wait_logged("OTel export failure: 2 spans rejected (no\\r\\n\\xc3\\xa9)");
    server.stop();
}
