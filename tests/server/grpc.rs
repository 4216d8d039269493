//! gRPC (`grpc_pass`): calls of all four kinds, their ends, and real gRPC clients and servers.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;

use gale_protocol::http2::{ErrorCode, StreamId};

use crate::support::authority::Authority;
use crate::support::http2::Http2;
use crate::support::http2_server::Http2Server;
use crate::support::{Backend, Directory, Driver, Server, Setup, skip, with_each_driver};

with_each_driver!(
    a_unary_call_passes_with_its_trailers,
    an_answer_of_trailers_alone_is_the_same_to_the_client,
    a_server_streams_and_is_not_read_ahead_of_its_client,
    a_client_streams_and_its_half_close_reaches_the_server,
    both_sides_stream_at_once,
    body_and_trailers_of_a_request_pass,
    a_deadline_ends_the_waiting,
    errors_of_our_own_have_a_status_of_grpc,
    addresses_come_from_variables_and_unix_sockets,
    requests_of_http1_are_passed_on,
    calls_pass_over_tls,
    checks_ask_by_the_protocol_of_grpc_for_that,
    a_check_without_the_protocol_goes_by_the_status_of_the_call,
    a_call_that_was_not_looked_at_goes_to_another_connection,
    a_real_client_and_server_understand_each_other,
    a_client_and_a_server_in_go_call_thousands_of_times_on_one_connection,
    a_client_and_a_server_in_go_understand_each_other_over_tls,
);

const GRPC: [(&str, &str); 2] = [("content-type", "application/grpc"), ("te", "trailers")];

fn start(driver: Driver, backend: &Backend, location: &str) -> Server {
    let text = format!(
        "upstream u {{ server {}; keepalive 4; }}
         server {{ listen %UNIX%; http2 on; location / {{ grpc_pass grpc://u; {location} }} }}",
        backend.address()
    );
    Setup::http(driver, &text).start()
}

fn pairs(fields: &[(&str, &str)]) -> Vec<(String, String)> {
    fields.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
}

/// Waits until this text of an answer's body has arrived.
fn read_body(client: &mut Http2, stream: StreamId, text: &[u8]) {
    client.read_until(|client| client.answers.get(&stream).is_some_and(|answer| answer.body == text));
}

fn a_unary_call_passes_with_its_trailers(driver: Driver) {
    let backend = Backend::tcp();
    let server = start(driver, &backend, "grpc_set_header X-Own own; add_header X-Added added;");
    let mut client = Http2::unix(&server);
    let stream = client.begin("POST", "/pkg.Service/Method", &GRPC, false);
    client.send(stream, b"question", true);
    let mut upstream = Http2Server::accept(&backend);
    let asked = upstream.whole_request();
    assert_eq!((asked.method.as_str(), asked.path.as_str()), ("POST", "/pkg.Service/Method"));
    let mut headers = asked.headers.clone();
    headers.sort();
    let expected = [("content-type", "application/grpc"), ("host", "u"), ("te", "trailers"), ("x-own", "own")];
    assert_eq!((headers, &asked.body[..]), (pairs(&expected), &b"question"[..]));
    upstream.answer_grpc(asked.stream, b"answer");
    let answer = client.answer(stream);
    assert_eq!((answer.status, answer.text()), (200, "answer"));
    assert_eq!((answer.header("content-type"), answer.header("x-added")), (Some("application/grpc"), Some("added")));
    assert_eq!(answer.trailers, pairs(&[("grpc-status", "0"), ("grpc-message", "fine")]));
    server.stop();
}

fn an_answer_of_trailers_alone_is_the_same_to_the_client(driver: Driver) {
    let backend = Backend::tcp();
    let server = start(driver, &backend, "");
    let mut client = Http2::unix(&server);
    let stream = client.begin("POST", "/a/b", &GRPC, false);
    client.send(stream, b"question", true);
    let mut upstream = Http2Server::accept(&backend);
    let asked = upstream.whole_request();
    let fields = [("content-type", "application/grpc"), ("grpc-status", "5"), ("grpc-message", "not here")];
    upstream.respond(asked.stream, 200, &fields, true);
    let answer = client.answer(stream);
    assert_eq!((answer.status, answer.body.len(), answer.trailers.len()), (200, 0, 0));
    assert_eq!((answer.header("grpc-status"), answer.header("grpc-message")), (Some("5"), Some("not here")));
    server.stop();
}

fn a_server_streams_and_is_not_read_ahead_of_its_client(driver: Driver) {
    let backend = Backend::tcp();
    let server = start(driver, &backend, "");
    let mut client = Http2::unix(&server);
    let stream = client.begin("POST", "/a/b", &GRPC, false);
    client.send(stream, b"question", true);
    let mut upstream = Http2Server::accept(&backend);
    let asked = upstream.whole_request();
    upstream.respond(asked.stream, 200, &GRPC[..1], false);
    let mut all = Vec::new();
    for number in 0..5 {
        let message = format!("message {number} ");
        upstream.send(asked.stream, message.as_bytes(), false);
        all.extend_from_slice(message.as_bytes());
        read_body(&mut client, stream, &all);
    }
    // Far more than all windows together: it arrives as the client reads.
    let large = vec![b'x'; 5_000_000];
    std::thread::scope(|scope| {
        scope.spawn(|| {
            upstream.send(asked.stream, &large, false);
            upstream.trailers(asked.stream, &[("grpc-status", "0")]);
        });
        let answer = client.answer(stream);
        assert_eq!(answer.body.len(), all.len() + large.len());
        assert_eq!(answer.trailers, pairs(&[("grpc-status", "0")]));
    });
    server.stop();
}

fn a_client_streams_and_its_half_close_reaches_the_server(driver: Driver) {
    let backend = Backend::tcp();
    let server = start(driver, &backend, "client_max_body_size 0;");
    let mut client = Http2::unix(&server);
    let stream = client.begin("POST", "/a/b", &GRPC, false);
    let mut upstream = Http2Server::accept(&backend);
    let asked = upstream.request();
    for number in 1..5 {
        client.send(stream, b"part ", false);
        upstream.read_until(|upstream| upstream.asked[&asked.stream].body.len() == number * 5);
    }
    assert!(!upstream.asked[&asked.stream].is_complete);
    let large = vec![b'x'; 5_000_000];
    std::thread::scope(|scope| {
        scope.spawn(|| upstream.read_until(|upstream| upstream.asked[&asked.stream].is_complete));
        client.send(stream, &large, true);
    });
    assert_eq!(upstream.asked[&asked.stream].body.len(), 20 + large.len());
    upstream.answer_grpc(asked.stream, b"all of it");
    assert_eq!(client.answer(stream).text(), "all of it");
    server.stop();
}

fn both_sides_stream_at_once(driver: Driver) {
    let backend = Backend::tcp();
    let server = start(driver, &backend, "");
    let mut client = Http2::unix(&server);
    let stream = client.begin("POST", "/a/b", &GRPC, false);
    let mut upstream = Http2Server::accept(&backend);
    let asked = upstream.request();
    // The answer begins before there is a message of the request.
    upstream.respond(asked.stream, 200, &GRPC[..1], false);
    client.read_until(|client| client.answers.get(&stream).is_some_and(|answer| answer.status == 200));
    let (mut said, mut heard) = (Vec::new(), Vec::new());
    for number in 0..10 {
        let question = format!("question {number} ");
        client.send(stream, question.as_bytes(), number == 9);
        said.extend_from_slice(question.as_bytes());
        upstream.read_until(|upstream| upstream.asked[&asked.stream].body == said);
        let answer = format!("answer {number} ");
        upstream.send(asked.stream, answer.as_bytes(), false);
        heard.extend_from_slice(answer.as_bytes());
        read_body(&mut client, stream, &heard);
    }
    upstream.read_until(|upstream| upstream.asked[&asked.stream].is_complete);
    upstream.send(asked.stream, b"and that is all", false);
    upstream.trailers(asked.stream, &[("grpc-status", "0")]);
    let answer = client.answer(stream);
    assert!(answer.text().ends_with("and that is all") && answer.trailers == pairs(&[("grpc-status", "0")]));
    server.stop();
}

fn body_and_trailers_of_a_request_pass(driver: Driver) {
    let backend = Backend::tcp();
    let server = start(driver, &backend, "");
    let mut client = Http2::unix(&server);
    let stream = client.begin("POST", "/a/b", &GRPC, false);
    client.send(stream, b"question", false);
    client.trailers(stream, &[("x-behind", "it")]);
    let mut upstream = Http2Server::accept(&backend);
    let asked = upstream.whole_request();
    assert_eq!((&asked.body[..], asked.trailers), (&b"question"[..], pairs(&[("x-behind", "it")])));
    upstream.answer_grpc(asked.stream, b"answer");
    assert_eq!(client.answer(stream).text(), "answer");
    server.stop();
}

fn a_deadline_ends_the_waiting(driver: Driver) {
    let backend = Backend::tcp();
    let server = start(driver, &backend, "");
    let mut client = Http2::unix(&server);
    let fields = [GRPC[0], GRPC[1], ("grpc-timeout", "200m")];
    let stream = client.begin("POST", "/a/b", &fields, false);
    client.send(stream, b"question", true);
    let mut upstream = Http2Server::accept(&backend);
    let asked = upstream.request();
    let answer = client.answer(stream);
    assert_eq!((answer.status, answer.header("grpc-status")), (504, Some("4")));
    upstream.read_until(|upstream| upstream.asked[&asked.stream].reset == Some(ErrorCode::CANCEL));
    assert_eq!(asked.header("grpc-timeout"), Some("200m"));
    server.stop();
}

const SERVING: &[u8] = b"\0\0\0\0\x02\x08\x01";
const NOT_SERVING: &[u8] = b"\0\0\0\0\x02\x08\x02";

fn checks_ask_by_the_protocol_of_grpc_for_that(driver: Driver) {
    let backend = Backend::tcp();
    let check = "health_check interval=10ms mandatory keepalive_time=1h type=grpc grpc_service=pkg.Service;";
    let server = start(driver, &backend, &format!("{check} grpc_set_header X-Own own; grpc_read_timeout 1h;"));
    // All checks share a connection of their own, which is kept open.
    let mut checks = Http2Server::accept(&backend);
    let first = checks.whole_request();
    assert_eq!((first.method.as_str(), first.path.as_str()), ("POST", "/grpc.health.v1.Health/Check"));
    assert_eq!(first.body, b"\0\0\0\0\x0d\x0a\x0bpkg.Service");
    let mut headers = first.headers.clone();
    headers.sort();
    let expected = [("content-type", "application/grpc"), ("host", "u"), ("te", "trailers"), ("x-own", "own")];
    assert_eq!(headers, pairs(&expected));
    let mut client = Http2::unix(&server);
    let mut call = || {
        let stream = client.begin("POST", "/a/b", &GRPC, true);
        let answer = client.answer(stream);
        (answer.status, answer.header("grpc-status").map(str::to_owned))
    };
    let refused = (502, Some("14".to_owned()));
    assert_eq!(call(), refused, "it was not checked yet");
    checks.answer_grpc(first.stream, SERVING);
    // A later check arrives once the earlier one was recorded.
    let mut held = checks.whole_request();
    server.wait_logged("peer is healthy, health check \"\" of peer ");
    for (status, fields, message, told) in [
        (200, &[][..], Some(NOT_SERVING), "the service is not serving while checking gRPC status, health check"),
        (200, &[("grpc-status", "5")], None, "unexpected gRPC status \"5\" while checking gRPC status"),
        (503, &[], None, "unexpected status 503 while checking gRPC status"),
        (200, &[("grpc-status", "0")], None, "the service is not serving while checking"),
        (200, &[], None, "no \"grpc-status\" in the response while checking"),
    ] {
        match message {
            Some(message) => checks.answer_grpc(held.stream, message),
            None => checks.respond(held.stream, status, fields, true),
        }
        held = checks.whole_request();
        server.wait_logged(told);
        assert_eq!(call(), refused);
    }
    server.wait_logged("peer is unhealthy while checking gRPC status, health check \"\" of peer ");
    // A connection closed by the server is not a failed check: the check is repeated on another one.
    checks.close();
    let mut checks = Http2Server::accept(&backend);
    let again = checks.whole_request();
    checks.answer_grpc(again.stream, SERVING);
    checks.whole_request();
    server.wait_logged_times("peer is healthy", 2);
    let stream = client.begin("POST", "/a/b", &GRPC, true);
    let mut calls = Http2Server::accept(&backend);
    let asked = calls.whole_request();
    calls.answer_grpc(asked.stream, b"answer");
    assert_eq!(client.answer(stream).text(), "answer");
    server.stop();
}

fn a_check_without_the_protocol_goes_by_the_status_of_the_call(driver: Driver) {
    let backend = Backend::tcp();
    let check = "health_check interval=10ms mandatory type=grpc grpc_status=unimplemented;";
    let server = start(driver, &backend, check);
    // Each check has a connection of its own, which ends with it.
    for _ in 0..2 {
        let mut checks = Http2Server::accept(&backend);
        let asked = checks.whole_request();
        assert_eq!(asked.body, [0; 5]);
        checks.respond(asked.stream, 200, &[("grpc-status", "12")], true);
        checks.read_to_end();
    }
    server.wait_logged("peer is healthy");
    assert!(!server.log().contains("unhealthy"), "{server}");
    server.stop();
}

fn errors_of_our_own_have_a_status_of_grpc(driver: Driver) {
    let backend = Backend::tcp();
    let location = "location /denied { deny all; grpc_pass u; }
                    location /absent { grpc_pass unix:%DIR%/absent.sock; }
                    location /page { deny all; error_page 403 = /made; grpc_pass u; }
                    location /made { default_type application/grpc; add_header grpc-status 9; return 204; }";
    let server = start(driver, &backend, location);
    let mut client = Http2::unix(&server);
    let mut ask = |path: &str, fields: &[(&str, &str)]| {
        let stream = client.begin("POST", path, fields, true);
        client.answer(stream)
    };
    let denied = ask("/denied", &GRPC);
    assert_eq!((denied.status, denied.header("content-type")), (403, Some("application/grpc")));
    assert_eq!((denied.header("grpc-status"), denied.header("grpc-message")), (Some("7"), Some("Forbidden")));
    assert!(denied.body.is_empty());
    let absent = ask("/absent", &[("content-type", "application/grpc+proto")]);
    assert_eq!((absent.status, absent.header("grpc-status")), (502, Some("14")));
    // Other clients than those of gRPC get an error page; configured error pages replace it.
    let page = ask("/denied", &[]);
    assert_eq!((page.status, page.header("grpc-status"), page.body.is_empty()), (403, None, false));
    let made = ask("/page", &GRPC);
    assert_eq!((made.status, made.header("grpc-status")), (204, Some("9")));
    server.stop();
}

fn addresses_come_from_variables_and_unix_sockets(driver: Driver) {
    let server = Setup::http(
        driver,
        "server { listen %UNIX%; http2 on;
                  location / { grpc_pass $arg_where; }
                  location /unix { grpc_pass unix:%DIR%/backend.sock; } }",
    )
    .start();
    let backend = Backend::tcp();
    let mut client = Http2::unix(&server);
    let path = format!("/a?where=grpc://{}", backend.address());
    let stream = client.begin("POST", &path, &GRPC, true);
    let mut upstream = Http2Server::accept(&backend);
    let asked = upstream.request();
    assert_eq!((asked.header("host"), asked.path.as_str()), (Some(backend.address()), path.as_str()));
    upstream.answer_grpc(asked.stream, b"by a variable");
    assert_eq!(client.answer(stream).text(), "by a variable");
    let stream = client.begin("POST", "/unix", &GRPC, true);
    let answer = client.answer(stream);
    assert_eq!((answer.status, answer.header("grpc-status")), (502, Some("14")));
    server.stop();
}

fn requests_of_http1_are_passed_on(driver: Driver) {
    let backend = Backend::tcp();
    let server = start(driver, &backend, "");
    let mut client = server.connect();
    client.send("POST /a HTTP/1.1\r\nHost: x\r\nTE: trailers\r\nContent-Length: 5\r\n\r\nhello");
    let mut upstream = Http2Server::accept(&backend);
    let asked = upstream.whole_request();
    assert_eq!((asked.header("content-length"), &asked.body[..]), (Some("5"), &b"hello"[..]));
    upstream.answer_grpc(asked.stream, b"answer");
    let response = client.response();
    assert_eq!((response.status, response.text()), (200, "answer"));
    server.stop();
}

fn calls_pass_over_tls(driver: Driver) {
    let authority = Authority::new("authority");
    let pair = authority.ecdsa(&["behind.example"]);
    // Gale is its own upstream server: ALPN selects HTTP/2.
    let server = Setup::http(
        driver,
        "server { listen unix:%DIR%/behind.sock ssl; http2 on; ssl_certificate %DIR%/own.crt;
                  ssl_certificate_key %DIR%/own.key;
                  return 200 \"$ssl_alpn_protocol $server_protocol $ssl_server_name\"; }
         server { listen %UNIX%; http2 on; grpc_ssl_server_name on; grpc_ssl_name behind.example;
                  proxy_ssl_server_name on; proxy_ssl_name behind.example;
                  location / { grpc_pass grpcs://unix:%DIR%/behind.sock; }
                  location /proxy { proxy_http_version 2; proxy_pass https://unix:%DIR%/behind.sock; } }",
    )
    .file("own.crt", &pair.certificate)
    .file("own.key", &pair.key)
    .start();
    let mut client = Http2::unix(&server);
    for path in ["/", "/proxy", "/"] {
        assert_eq!(client.get(path).text(), "h2 HTTP/2.0 behind.example");
    }
    server.stop();
}

fn a_call_that_was_not_looked_at_goes_to_another_connection(driver: Driver) {
    let backend = Backend::tcp();
    let server = start(driver, &backend, "");
    let mut client = Http2::unix(&server);
    let stream = client.begin("POST", "/a/b", &GRPC, false);
    client.send(stream, b"question", true);
    let mut one = Http2Server::accept(&backend);
    one.whole_request();
    one.goaway(0, ErrorCode::NO_ERROR);
    let mut other = Http2Server::accept(&backend);
    let asked = other.whole_request();
    assert_eq!(asked.body, b"question");
    other.answer_grpc(asked.stream, b"answer");
    assert_eq!(client.answer(stream).text(), "answer");
    server.stop();
}

/// A program that is ended with the test.
struct Program(Child);

impl Program {
    fn start(command: &mut Command) -> Program {
        Program(command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().expect("it starts"))
    }

    /// Reads the first line of a server's output, its port.
    fn port(&mut self) -> String {
        let mut port = String::new();
        BufReader::new(self.0.stdout.take().expect("a pipe")).read_line(&mut port).expect("a port");
        port.trim().to_owned()
    }

    /// Reads its output to the end.
    fn output(mut self) -> String {
        let text = std::io::read_to_string(self.0.stdout.take().expect("a pipe")).expect("text");
        assert!(self.0.wait().expect("an end").success(), "{text}");
        text
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/grpc")
}

/// Python with a script, where grpcio is installed.
fn python(script: &str) -> Option<Command> {
    let has_grpc = Command::new("python3").args(["-c", "import grpc"]).stderr(Stdio::null()).status();
    if !has_grpc.is_ok_and(|status| status.success()) {
        skip("python3 with grpcio is not installed");
        return None;
    }
    let mut command = Command::new("python3");
    command.arg(folder().join(script));
    Some(command)
}

/// The client and server in Go, where they can be compiled. All tests share one program.
fn go(part: &str) -> Option<Command> {
    static PROGRAM: OnceLock<Option<(Directory, PathBuf)>> = OnceLock::new();
    let compile = || {
        let directory = Directory::new();
        let program = directory.path().join("grpc");
        let mut command = Command::new("go");
        command.args(["build", "-o"]).arg(&program).arg(".").current_dir(folder().join("go"));
        let compiled = command.output().map_err(|error| error.to_string()).and_then(|output| match output.status {
            status if status.success() => Ok(()),
            _ => Err(String::from_utf8_lossy(&output.stderr).into_owned()),
        });
        match compiled {
            Ok(()) => Some((directory, program)),
            Err(error) => {
                eprintln!("{error}");
                skip("Go does not compile tests/grpc/go");
                None
            }
        }
    };
    let (_, program) = PROGRAM.get_or_init(compile).as_ref()?;
    let mut command = Command::new(program);
    command.arg(part);
    Some(command)
}

/// A server that passes calls to this port, in the clear or over TLS.
fn passing(driver: Driver, scheme: &str, port: &str) -> Setup {
    let text = format!(
        "upstream u {{ server 127.0.0.1:{port}; keepalive 4; }}
         server {{ listen %TCP%; listen %TCP2% ssl; http2 on; client_max_body_size 0;
                   ssl_certificate %DIR%/own.crt; ssl_certificate_key %DIR%/own.key;
                   location / {{ grpc_pass {scheme}://u; }}
                   location /denied/ {{ deny all; grpc_pass u; }}
                   location /absent/ {{ grpc_pass unix:%DIR%/absent.sock; }} }}"
    );
    let authority = Authority::new("authority");
    let pair = authority.ecdsa(&["grpc.example"]);
    Setup::http(driver, &text)
        .file("authority.pem", &authority.pem)
        .file("own.crt", &pair.certificate)
        .file("own.key", &pair.key)
}

fn a_real_client_and_server_understand_each_other(driver: Driver) {
    let (Some(mut server), Some(_)) = (python("server.py"), python("client.py")) else { return };
    let mut upstream = Program::start(&mut server);
    let server = passing(driver, "grpc", &upstream.port()).start();
    let authority = server.directory.path().join("authority.pem");
    for (number, arguments) in [(1, None), (2, Some(authority.as_path()))] {
        let mut client = python("client.py").expect("it was there");
        let address = server.directory.address(number).to_string();
        let said = Program::start(client.arg(address).args(arguments)).output();
        let expected = [
            "unary: hello you, trailers ['x-trail=1'], OK",
            "failing: NOT_FOUND no such thing",
            "down: 1000 messages, 1000000 bytes",
            "up: 3000000",
            "both: re 0, re 1, re 2, re 3, re 4, end",
            "deadline: DEADLINE_EXCEEDED",
            "at once: 300 of 300",
            "denied: PERMISSION_DENIED Forbidden",
            "absent: UNAVAILABLE Bad Gateway",
        ];
        assert_eq!(said.lines().collect::<Vec<_>>(), expected);
    }
    server.stop();
}

/// Output of the client in Go on success, without the number of its connections.
const ALL_WELL_IN_GO: [&str; 11] = [
    "unary: 3000 of 3000",
    "at once: 3000 of 3000",
    "down: 2000 messages, 2000000 bytes",
    "up: 3000000",
    "both: 1000 of 1000",
    "large: 3000006",
    "failing: NotFound no such thing",
    "deadline: DeadlineExceeded",
    "cancelled: Canceled",
    "denied: PermissionDenied",
    "absent: Unavailable",
];

/// Runs the client in Go, which measures its path with every answer, for thousands of calls of every kind. Returns the
/// number of its connections, in the clear and over TLS.
fn call_in_go(driver: Driver, mut upstream: Program, scheme: &str, more: &str) -> [usize; 2] {
    let server = passing(driver, scheme, &upstream.port()).replace("http2 on;", &format!("http2 on; {more}")).start();
    let authority = server.directory.path().join("authority.pem");
    let connections = [(1, None), (2, Some(authority.as_path()))].map(|(number, arguments)| {
        let mut client = go("client").expect("it was compiled");
        let address = server.directory.address(number).to_string();
        let said = Program::start(client.arg(address).args(arguments)).output();
        let mut said: Vec<&str> = said.lines().collect();
        let connections = said.pop().and_then(|line| line.strip_prefix("connections: ")).expect("their number");
        // The deadline may expire first at any of the three; the library has one word for 502, 503 and 504.
        if let Some(deadline) = said.iter_mut().find(|line| **line == "deadline: Unavailable") {
            *deadline = "deadline: DeadlineExceeded";
        }
        assert_eq!(said, ALL_WELL_IN_GO);
        connections.parse().expect("a number")
    });
    server.stop();
    connections
}

fn a_client_and_a_server_in_go_call_thousands_of_times_on_one_connection(driver: Driver) {
    let Some(mut server) = go("server") else { return };
    let connections = call_in_go(driver, Program::start(&mut server), "grpc", "keepalive_requests 100000;");
    assert_eq!(connections, [1, 1]);
}

fn a_client_and_a_server_in_go_understand_each_other_over_tls(driver: Driver) {
    let pair = Authority::new("behind").ecdsa(&["behind.example"]);
    let directory = Directory::new();
    directory.write("behind.crt", &pair.certificate);
    directory.write("behind.key", &pair.key);
    let Some(mut server) = go("server") else { return };
    server.arg(directory.path().join("behind.crt")).arg(directory.path().join("behind.key"));
    // After a connection's last request, the thousandth, a client opens another one and loses no call.
    let connections = call_in_go(driver, Program::start(&mut server), "grpcs", "");
    assert!(connections.iter().all(|&connections| connections > 3), "{connections:?}");
}
