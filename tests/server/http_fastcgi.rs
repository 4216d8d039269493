//! FastCGI over real sockets: the parameters that an application receives, and the handling of its responses, malformed
//! ones included.

use std::collections::HashMap;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};

use crate::support::http2::Http2;
use crate::support::{self, Directory, Driver, Server, Setup, with_each_driver};

with_each_driver!(
    application_gets_the_parameters,
    parameters_of_a_scope_take_the_place_of_those_around_it,
    repeated_fields_are_one_parameter,
    the_uri_is_split_into_script_and_path_info,
    a_body_of_many_records_arrives,
    a_body_over_http2_that_no_field_announces_is_told_with_its_length,
    chunked_body_unbuffered_is_told_with_its_length,
    output_behind_an_empty_record_is_passed_on,
    statuses_and_fields_are_those_of_the_application,
    an_unbuffered_response_comes_as_it_is_sent,
    messages_go_to_the_error_log,
    a_caught_message_has_the_next_server_tried,
    wrong_responses_are_told_and_answered_with_502,
    a_response_that_breaks_off_breaks_off,
    a_kept_connection_carries_several_requests,
    a_connection_whose_response_did_not_end_is_not_kept,
    a_response_whose_end_is_not_told_is_not_stored,
    variables_name_the_application,
);

/// A request as the application received it.
#[derive(Debug)]
struct Asked {
    /// Number of its connection, counted from 0.
    connection: usize,
    params: Vec<(String, String)>,
    body: Vec<u8>,
    keeps: bool,
}

impl Asked {
    /// Returns the value of a parameter; panics if it occurs twice.
    #[track_caller]
    fn param(&self, name: &str) -> Option<&str> {
        let mut values = self.params.iter().filter(|(own, _)| own == name).map(|(_, value)| &value[..]);
        let value = values.next();
        assert!(values.next().is_none(), "{name} twice: {self:?}");
        value
    }
}

/// A FastCGI application on threads of the test.
struct Application {
    address: SocketAddr,
    asked: Receiver<Asked>,
}

/// Returns the response and whether the connection stays open after it.
type Answer = Arc<dyn Fn(&Asked) -> (Vec<u8>, bool) + Send + Sync>;

impl Application {
    fn start(answer: impl Fn(&Asked) -> (Vec<u8>, bool) + Send + Sync + 'static) -> Application {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("an address");
        let (answer, (sender, asked)): (Answer, _) = (Arc::new(answer), channel());
        std::thread::spawn(move || {
            for (number, stream) in listener.incoming().enumerate() {
                let (answer, sender) = (Arc::clone(&answer), sender.clone());
                std::thread::spawn(move || serve(stream.expect("a connection"), number, &answer, &sender));
            }
        });
        Application { address, asked }
    }

    /// Starts an application that always sends the same response and keeps the connection if the request asks for it.
    fn answering(records: &[Vec<u8>]) -> Application {
        let answer = records.concat();
        Application::start(move |asked| (answer.clone(), asked.keeps))
    }

    #[track_caller]
    fn asked(&self) -> Asked {
        self.asked.recv_timeout(support::DEADLINE).expect("it was asked")
    }
}

fn serve(mut stream: TcpStream, connection: usize, answer: &Answer, sender: &Sender<Asked>) {
    while let Some(asked) = read_request(&mut stream, connection) {
        let (bytes, stays) = answer(&asked);
        let _ = sender.send(asked);
        // The server may have closed the connection already.
        if stream.write_all(&bytes).is_err() || !stays {
            return;
        }
    }
}

fn read_record(stream: &mut TcpStream) -> Option<(u8, Vec<u8>)> {
    let mut header = [0; 8];
    stream.read_exact(&mut header).ok()?;
    assert_eq!((header[0], header[2], header[3]), (1, 0, 1), "version and request");
    let length = usize::from(u16::from_be_bytes([header[4], header[5]]));
    let mut content = vec![0; length + usize::from(header[6])];
    stream.read_exact(&mut content).ok()?;
    content.truncate(length);
    Some((header[1], content))
}

fn read_stream(stream: &mut TcpStream, kind: u8) -> Option<Vec<u8>> {
    let mut all = Vec::new();
    loop {
        let (own, content) = read_record(stream)?;
        assert_eq!(own, kind);
        if content.is_empty() {
            return Some(all);
        }
        all.extend(content);
    }
}

fn read_request(stream: &mut TcpStream, connection: usize) -> Option<Asked> {
    let (kind, begin) = read_record(stream)?;
    assert_eq!((kind, &begin[..2]), (1, &[0, 1][..]), "a responder is asked");
    let bytes = read_stream(stream, 4)?;
    let mut rest = &bytes[..];
    let mut params = Vec::new();
    let length = |rest: &mut &[u8]| {
        let (&first, behind) = rest.split_first().expect("a length");
        if first < 128 {
            *rest = behind;
            return usize::from(first);
        }
        let (four, behind) = rest.split_first_chunk::<4>().expect("a length");
        *rest = behind;
        (u32::from_be_bytes(*four) & 0x7fff_ffff) as usize
    };
    while !rest.is_empty() {
        let (name, value) = (length(&mut rest), length(&mut rest));
        let mut take = |count: usize| {
            let (text, behind) = rest.split_at(count);
            rest = behind;
            String::from_utf8_lossy(text).into_owned()
        };
        params.push((take(name), take(value)));
    }
    let body = read_stream(stream, 5)?;
    Some(Asked { connection, params, body, keeps: begin[2] & 1 == 1 })
}

fn record(kind: u8, content: impl AsRef<[u8]>, padding: u8) -> Vec<u8> {
    let content = content.as_ref();
    let [high, low] = u16::try_from(content.len()).expect("fits").to_be_bytes();
    let mut record = vec![1, kind, 0, 1, high, low, padding, 0];
    record.extend_from_slice(content);
    record.resize(record.len() + usize::from(padding), b'p');
    record
}

fn stdout(text: impl AsRef<[u8]>) -> Vec<u8> {
    record(6, text, 0)
}

fn stderr(text: &str) -> Vec<u8> {
    record(7, text, 0)
}

fn end() -> Vec<u8> {
    record(3, [0; 8], 0)
}

fn usual() -> Vec<Vec<u8>> {
    vec![stdout("Content-Type: text/plain\r\n\r\nhello\n"), stdout(""), end()]
}

fn setup(driver: Driver, application: &Application, text: &str) -> Setup {
    Setup::http(driver, &text.replace("%APP%", &application.address.to_string()))
}

/// Reads one of the packaged files that configurations include.
fn packaged(name: &str) -> Vec<u8> {
    std::fs::read(format!("{}/../../packaging/{name}", env!("CARGO_MANIFEST_DIR"))).expect("it is there")
}

fn application_gets_the_parameters(driver: Driver) {
    let application = Application::answering(&usual());
    let text = "server { listen %UNIX%; server_name Example.COM; root %DIR%/html;
         location / { include fastcgi.conf; fastcgi_param EMPTY ''; fastcgi_param NONE $arg_none if_not_empty;
                      fastcgi_param SOME $arg_some if_not_empty; fastcgi_param HTTP_X_SECRET '';
                      fastcgi_param HTTP_X_REPLACED other; fastcgi_pass %APP%; } }";
    let setup = ["fastcgi.conf", "fastcgi_params"]
        .into_iter()
        .fold(setup(driver, &application, text), |setup, name| setup.file(name, packaged(name)));
    let server = setup.start();
    let fields = "Host: Example.com:81\r\nX-Secret: s\r\nX-Replaced: r\r\nX-Other: o\r\nProxy: p\r\n";
    let response = server.connect().ask(format!("GET /a%20b.php?some=1 HTTP/1.1\r\n{fields}\r\n"));
    assert_eq!((response.status, response.text()), (200, "hello\n"));
    let asked = application.asked();
    let root = server.directory.path().join("html");
    let script = format!("{}/a b.php", root.display());
    let software = concat!("nginx/", env!("CARGO_PKG_VERSION"), " (gale)");
    let expected: &[(&str, Option<&str>)] = &[
        ("SCRIPT_FILENAME", Some(&script)),
        ("SCRIPT_NAME", Some("/a b.php")),
        ("REQUEST_URI", Some("/a%20b.php?some=1")),
        ("QUERY_STRING", Some("some=1")),
        ("REQUEST_METHOD", Some("GET")),
        ("CONTENT_LENGTH", Some("")),
        ("SERVER_PROTOCOL", Some("HTTP/1.1")),
        ("GATEWAY_INTERFACE", Some("CGI/1.1")),
        ("SERVER_SOFTWARE", Some(software)),
        ("SERVER_NAME", Some("example.com")),
        ("HTTPS", None),
        ("EMPTY", Some("")),
        ("NONE", None),
        ("SOME", Some("1")),
        ("HTTP_HOST", Some("example.com:81")),
        ("HTTP_X_SECRET", None),
        ("HTTP_X_REPLACED", Some("other")),
        ("HTTP_X_OTHER", Some("o")),
        // As nginx does; an application that trusts this parameter has to be fixed itself.
        ("HTTP_PROXY", Some("p")),
    ];
    for &(name, value) in expected {
        assert_eq!(asked.param(name), value, "{name}");
    }
    assert!(!asked.keeps && asked.body.is_empty());
    server.stop();
}

fn parameters_of_a_scope_take_the_place_of_those_around_it(driver: Driver) {
    let application = Application::answering(&usual());
    let text = "fastcgi_param A http; fastcgi_param B http;
        server { listen %UNIX%; location / { fastcgi_pass %APP%; }
                 location /own { fastcgi_param B own; fastcgi_pass %APP%; }
                 location /bare { fastcgi_pass_request_headers off; fastcgi_param HTTP_HOST set;
                 fastcgi_pass %APP%; } }";
    let server = setup(driver, &application, text).start();
    let of = |path: &str| {
        server.get(path);
        let params = application.asked().params.into_iter();
        params.collect::<HashMap<_, _>>()
    };
    let (inherited, own, bare) = (of("/"), of("/own"), of("/bare"));
    assert_eq!((inherited.get("A").unwrap(), inherited.get("B").unwrap()), (&"http".to_owned(), &"http".to_owned()));
    assert_eq!((own.get("A"), own.get("B").map(String::as_str)), (None, Some("own")));
    assert_eq!((bare.len(), bare.get("HTTP_HOST").map(String::as_str)), (1, Some("set")));
    server.stop();
}

fn repeated_fields_are_one_parameter(driver: Driver) {
    let application = Application::answering(&usual());
    let text = "server { listen %UNIX%; underscores_in_headers on; location / { fastcgi_pass %APP%; } }";
    let server = setup(driver, &application, text).start();
    let many: String = (0..40).map(|number| format!("X-{number}: {number}\r\nx-{number}: again\r\n")).collect();
    let fields = "Cookie: a=1\r\nX-A: 1\r\nCookie: b=2\r\nx-a: 2\r\nX_A: 3\r\nX-A: 4\r\n";
    server.connect().ask(format!("GET / HTTP/1.1\r\nHost: h\r\n{fields}{many}\r\n"));
    let asked = application.asked();
    assert_eq!(asked.param("HTTP_COOKIE"), Some("a=1; b=2"));
    // Two different fields whose parameters have the same name.
    let values: Vec<&str> = asked.params.iter().filter(|(name, _)| name == "HTTP_X_A").map(|(_, v)| &v[..]).collect();
    assert_eq!(values, ["1, 2, 4", "3"]);
    for number in 0..40 {
        assert_eq!(asked.param(&format!("HTTP_X_{number}")), Some(&format!("{number}, again")[..]));
    }
    server.stop();
}

fn the_uri_is_split_into_script_and_path_info(driver: Driver) {
    let application = Application::answering(&usual());
    let text = "server { listen %UNIX%; fastcgi_index index.php;
        fastcgi_split_path_info ^(/a)(.*)$; fastcgi_split_path_info ^(.+\\.php)(.*)$;
        fastcgi_param SCRIPT $fastcgi_script_name; fastcgi_param INFO $fastcgi_path_info;
        location / { fastcgi_pass %APP%; } }";
    let server = setup(driver, &application, text).start();
    for (path, script, info) in [
        ("/a.php/b/c", "/a.php", "/b/c"),
        ("/a.php", "/a.php", ""),
        ("/dir/", "/dir/index.php", ""),
        ("/other", "/other", ""),
    ] {
        server.get(path);
        let asked = application.asked();
        assert_eq!((asked.param("SCRIPT"), asked.param("INFO")), (Some(script), Some(info)), "{path}");
    }
    server.stop();
}

fn a_body_of_many_records_arrives(driver: Driver) {
    let application = Application::answering(&usual());
    let text = "server { listen %UNIX%; client_body_buffer_size 16k; fastcgi_param LENGTH $content_length;
        location / { fastcgi_pass %APP%; } location /none { fastcgi_pass_request_body off; fastcgi_pass %APP%; } }";
    let server = setup(driver, &application, text).start();
    let body: Vec<u8> = (0..200_000_u32).map(|number| number as u8).collect();
    let mut client = server.connect();
    for path in ["/", "/none"] {
        let head = format!("POST {path} HTTP/1.1\r\nHost: h\r\nContent-Length: {}\r\n\r\n", body.len());
        assert_eq!(client.ask([head.as_bytes(), &body].concat()).status, 200);
        let asked = application.asked();
        assert_eq!(asked.param("LENGTH"), Some("200000"));
        assert!(if path == "/" { asked.body == body } else { asked.body.is_empty() }, "{path}");
    }
    let chunked = "POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n";
    assert_eq!(client.ask(chunked).status, 200);
    let asked = application.asked();
    assert_eq!((asked.param("LENGTH"), &asked.body[..]), (Some("5"), &b"hello"[..]));
    server.stop();
}

fn a_body_over_http2_that_no_field_announces_is_told_with_its_length(driver: Driver) {
    let application = Application::answering(&usual());
    let text = "server { listen %UNIX%; http2 on; fastcgi_param LENGTH $content_length;
        location / { fastcgi_pass %APP%; } }";
    let server = setup(driver, &application, text).start();
    let mut client = Http2::unix(&server);
    for (body, length) in [(&b"hello"[..], "5"), (b"", "0")] {
        assert_eq!(client.post("/", &[], body).status, 200);
        let asked = application.asked();
        assert_eq!((asked.param("LENGTH"), &asked.body[..]), (Some(length), body));
    }
    assert_eq!(client.get("/").status, 200);
    assert_eq!(application.asked().param("LENGTH"), Some(""));
    server.stop();
}

fn output_behind_an_empty_record_is_passed_on(driver: Driver) {
    let head = stdout("Content-Type: text/plain\r\n\r\none ");
    let application = Application::answering(&[head, stdout(""), stdout("two"), stdout(""), end()]);
    let text = "server { listen %UNIX%; location / { fastcgi_keep_conn on; fastcgi_pass %APP%; }
                location /unbuffered { fastcgi_buffering off; fastcgi_pass %APP%; } }";
    let server = setup(driver, &application, text).start();
    let mut client = server.connect();
    for path in ["/", "/", "/unbuffered"] {
        assert_eq!(client.get(path).text(), "one two");
    }
    server.stop();
}

fn chunked_body_unbuffered_is_told_with_its_length(driver: Driver) {
    let application = Application::answering(&usual());
    let text = "server { listen %UNIX%; location / { fastcgi_request_buffering off;
                fastcgi_param CONTENT_LENGTH $content_length; fastcgi_pass %APP%; } }";
    let server = setup(driver, &application, text).start();
    let mut client = server.connect();
    client.send("POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n");
    client.send("1\r\n!\r\n0\r\n\r\n");
    assert_eq!(client.response().text(), "hello\n");
    let asked = application.asked();
    assert_eq!((&asked.body[..], asked.param("CONTENT_LENGTH")), (&b"hello!"[..], Some("6")));
    server.stop();
}

fn statuses_and_fields_are_those_of_the_application(driver: Driver) {
    let application = Application::start(|asked| {
        let text = match asked.param("URI").expect("it is sent") {
            "/missing" => "Status: 404 Gone Fishing\r\nX: y\r\n\r\nnot here",
            "/location" => "Location: http://other/\r\n\r\n",
            "/none" => "Status: 204\r\n\r\n",
            "/length" => "Content-Length: 4\r\nX-Accel-Buffering: no\r\n\r\nbody",
            _ => "Content-Type: text/html\r\n\r\nelse",
        };
        ([stdout(text), stdout(""), end()].concat(), false)
    });
    let text = "server { listen %UNIX%; location / { fastcgi_param URI $uri; fastcgi_pass %APP%; } }";
    let server = setup(driver, &application, text).start();
    let mut client = server.connect();
    let missing = client.get("/missing");
    assert_eq!((missing.status, &missing.reason[..], missing.text()), (404, "Gone Fishing", "not here"));
    assert_eq!((missing.header("X"), missing.header("Status")), (Some("y"), None));
    let location = client.get("/location");
    assert_eq!((location.status, location.header("Location")), (302, Some("http://other/")));
    assert_eq!(client.get("/none").status, 204);
    let length = client.get("/length");
    assert_eq!((length.header("Content-Length"), length.text()), (Some("4"), "body"));
    assert_eq!(length.header("X-Accel-Buffering"), None);
    let head = client.ask("HEAD /length HTTP/1.1\r\nHost: h\r\n\r\n");
    assert_eq!((head.status, head.header("Content-Length")), (200, Some("4")));
    assert_eq!(client.get("/else").text(), "else");
    server.stop();
}

fn an_unbuffered_response_comes_as_it_is_sent(driver: Driver) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("an address");
    let text = format!("location / {{ fastcgi_buffering off; fastcgi_pass {address}; }}");
    let server = Server::start(driver, &text);
    let mut client = server.connect();
    client.send("GET / HTTP/1.1\r\nHost: h\r\n\r\n");
    let (mut stream, _) = listener.accept().expect("a connection");
    read_request(&mut stream, 0).expect("a request");
    stream.write_all(&stdout("X: y\r\n\r\none")).expect("sent");
    assert_eq!(client.chunk_after_head().as_deref(), Some(&b"one"[..]));
    stream.write_all(&stdout("two")).expect("sent");
    assert_eq!(client.chunk().as_deref(), Some(&b"two"[..]));
    stream.write_all(&[stdout(""), end()].concat()).expect("sent");
    assert_eq!(client.chunk(), None);
    server.stop();
}

fn messages_go_to_the_error_log(driver: Driver) {
    let head = stdout("X: y\r\n\r\nbody");
    let application = Application::answering(&[
        stderr("PHP Warning:  first thing in /a.php on line 1\n"),
        head,
        stderr("second thing. \r\n"),
        stdout(""),
        end(),
    ]);
    let server = setup(driver, &application, "server { listen %UNIX%; location / { fastcgi_pass %APP%; } }").start();
    assert_eq!(server.get("/").text(), "body");
    let first = "FastCGI sent in stderr: \"PHP Warning:  first thing in /a.php on line 1\" while reading response \
        header from upstream, client: unix:, server: , request: \"GET / HTTP/1.1\", upstream: \"fastcgi://";
    assert!(server.wait_logged(first).contains("[error]"));
    server.wait_logged("FastCGI sent in stderr: \"second thing\" while reading upstream, ");
    server.stop();
}

fn a_caught_message_has_the_next_server_tried(driver: Driver) {
    let wrong = Application::answering(&[stderr("PHP Fatal error: no memory"), stdout("X: y\r\n\r\nhalf"), end()]);
    let right = Application::answering(&usual());
    let text = format!(
        "upstream both {{ server {} max_fails=0; server {} backup; }}
         server {{ listen %UNIX%; fastcgi_catch_stderr 'PHP Fatal';
             location / {{ fastcgi_pass both; fastcgi_next_upstream invalid_header; }}
             location /alone {{ fastcgi_pass {0}; }} }}",
        wrong.address, right.address
    );
    let server = Setup::http(driver, &text).start();
    assert_eq!(server.get("/").text(), "hello\n");
    assert_eq!(server.get("/alone").status, 502);
    server.wait_logged_times("FastCGI sent in stderr: \"PHP Fatal error: no memory\"", 2);
    server.stop();
}

fn wrong_responses_are_told_and_answered_with_502(driver: Driver) {
    let with = |at: usize, byte: u8| {
        let mut record = stdout("X: y\r\n\r\n");
        record[at] = byte;
        record
    };
    let cases = vec![
        (with(0, 2), "upstream sent unsupported FastCGI protocol version: 2"),
        (with(1, 77), "upstream sent invalid FastCGI record type: 77"),
        (with(2, 1), "upstream sent unexpected FastCGI request id high byte: 1"),
        (with(3, 2), "upstream sent unexpected FastCGI request id low byte: 2"),
        (end(), "upstream sent unexpected FastCGI record: 3"),
        (stdout(""), "upstream prematurely closed FastCGI stdout"),
        (stdout("Status: x\r\n\r\n"), "upstream sent invalid status \"x\""),
        (stdout("a\0: b\r\n\r\n"), "upstream sent invalid header: \"a\\x00...\""),
        (stdout([b'x'; 9000]), "upstream sent too big header"),
        (stdout("X: y\r\n"), "upstream prematurely closed connection"),
        (stdout("X: y\r\n\r\n")[..9].to_vec(), "upstream prematurely closed connection"),
        (b"HTTP/1.1 200 OK\r\n\r\n".to_vec(), "upstream sent unsupported FastCGI protocol version: 72"),
        (Vec::new(), "upstream prematurely closed connection"),
    ];
    let answers: Vec<Vec<u8>> = cases.iter().map(|(answer, _)| answer.clone()).collect();
    let application = Application::start(move |asked| {
        let number: usize = asked.param("CASE").expect("it is sent").parse().expect("a number");
        (answers[number].clone(), false)
    });
    let text = "server { listen %UNIX%; location / { fastcgi_param CASE $arg_case; fastcgi_pass %APP%; } }";
    let server = setup(driver, &application, text).start();
    let mut client = server.connect();
    for (number, (_, message)) in cases.iter().enumerate() {
        assert_eq!(client.get(&format!("/?case={number}")).status, 502, "{message}");
        let line = "while reading response header from upstream, client: unix:, server: , request: \"GET /?case=";
        server.wait_logged(&format!("{message} {line}{number} "));
    }
    server.stop();
}

fn a_response_that_breaks_off_breaks_off(driver: Driver) {
    let application = Application::start(|asked| {
        let head = "Content-Length: 10\r\n\r\n";
        let answer = match asked.param("CASE").expect("it is sent") {
            "closed" => stdout(format!("{head}12345")),
            "ended" => [stdout(format!("{head}12345")), stdout(""), end()].concat(),
            "request" => [stdout(format!("{head}12345")), end()].concat(),
            "cut" => record(6, "X: y\r\n\r\n12345678", 0)[..16].to_vec(),
            _ => [stdout(format!("{head}12345")), record(9, "", 0)].concat(),
        };
        (answer, false)
    });
    let text = "server { listen %UNIX%; location / { fastcgi_param CASE $arg_case; fastcgi_pass %APP%; } }";
    let server = setup(driver, &application, text).start();
    for (case, message) in [
        ("closed", "upstream prematurely closed connection while reading upstream"),
        ("ended", "upstream prematurely closed FastCGI stdout while reading upstream"),
        ("request", "upstream prematurely closed FastCGI request while reading upstream"),
        ("wrong", "upstream sent invalid FastCGI record type: 9 while reading upstream"),
    ] {
        let mut client = server.connect();
        client.send(format!("GET /?case={case} HTTP/1.1\r\nHost: h\r\n\r\n"));
        assert_eq!(client.head().header("Content-Length"), Some("10"), "{case}");
        let body = client.read_to_end();
        assert!(b"12345".starts_with(&body[..]), "{case}: {body:?}");
        server.wait_logged(message);
    }
    // A truncated body without a length must not look complete.
    let mut client = server.connect();
    client.send("GET /?case=cut HTTP/1.1\r\nHost: h\r\n\r\n");
    assert_eq!(client.head().header("Transfer-Encoding"), Some("chunked"));
    let body = client.read_to_end();
    assert!(!String::from_utf8_lossy(&body).contains("0\r\n\r\n"), "{body:?}");
    server.stop();
}

fn a_kept_connection_carries_several_requests(driver: Driver) {
    let application = Application::start(|asked| {
        assert!(asked.keeps);
        let records = [
            stderr("told"),
            record(6, format!("X: y\r\n\r\nconnection {}", asked.connection), 255),
            record(10, "", 255).iter().enumerate().map(|(at, &byte)| if at == 3 { 0 } else { byte }).collect(),
            stdout(""),
            end(),
        ];
        (records.concat(), true)
    });
    let text = "upstream app { server %APP%; keepalive 4; }
        server { listen %UNIX%; location / { fastcgi_keep_conn on; fastcgi_pass app; } }";
    let server = setup(driver, &application, text).start();
    let mut client = server.connect();
    for _ in 0..5 {
        assert_eq!(client.get("/").text(), "connection 0");
    }
    let post = "POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\n\r\nhello";
    assert_eq!(client.ask(post).text(), "connection 0");
    assert_eq!(application.asked.iter().nth(5).expect("the sixth").body, b"hello");
    server.stop();
}

fn a_connection_whose_response_did_not_end_is_not_kept(driver: Driver) {
    let application = Application::start(|asked| {
        let body = format!("X: y\r\nContent-Length: 12\r\n\r\nconnection {}", asked.connection);
        let excess = if asked.connection == 0 { stdout("more than that") } else { Vec::new() };
        ([stdout(body), excess, stdout(""), end()].concat(), true)
    });
    let text = "upstream app { server %APP%; keepalive 4; }
        server { listen %UNIX%; location / { fastcgi_keep_conn on; fastcgi_pass app; } }";
    let server = setup(driver, &application, text).start();
    let mut client = server.connect();
    assert_eq!(client.get("/").text(), "connection 0");
    server.wait_logged("upstream sent more data than specified in \"Content-Length\" header while reading");
    assert_eq!(client.get("/").text(), "connection 1");
    assert_eq!(client.get("/").text(), "connection 1");
    server.stop();
}

fn a_response_whose_end_is_not_told_is_not_stored(driver: Driver) {
    let application = Application::start(|asked| {
        let large = asked.param("CASE").is_some_and(|case| case.starts_with("large"));
        let body = "x".repeat(if large { 60_000 } else { 10 });
        let mut records = [stdout("Cache-Control: max-age=60\r\n\r\n"), stdout(body)].concat();
        if large {
            (0..8).for_each(|_| records.extend(stdout("x".repeat(60_000))));
        }
        if asked.param("CASE").is_some_and(|case| case.ends_with("whole")) {
            records.extend(end());
        }
        (records, false)
    });
    let text = "fastcgi_cache_path %DIR%/cache keys_zone=one:1m;
        server { listen %UNIX%; fastcgi_param CASE $arg_case; fastcgi_cache one; fastcgi_cache_key $arg_case;
                 add_header X-Cache $upstream_cache_status; location / { fastcgi_pass %APP%; } }";
    let server = setup(driver, &application, text).start();
    let mut client = server.connect();
    for (case, length, second) in [
        ("whole", 10, "HIT"),
        ("broken", 10, "MISS"),
        ("large-whole", 540_000, "HIT"),
        ("large-broken", 540_000, "MISS"),
    ] {
        for expected in ["MISS", second] {
            let answer = client.get(&format!("/?case={case}"));
            assert_eq!((answer.body.len(), answer.header("X-Cache")), (length, Some(expected)), "{case}");
        }
    }
    server.stop();
}

fn variables_name_the_application(driver: Driver) {
    let application = Application::answering(&usual());
    let text = "upstream app { server %APP%; }
        server { listen %UNIX%; location / { fastcgi_pass $arg_to; } }";
    let server = setup(driver, &application, text).start();
    let address = application.address;
    for to in [address.to_string(), "app".to_owned()] {
        assert_eq!(server.get(&format!("/?to={to}")).status, 200, "{to}");
    }
    assert_eq!(server.get("/?to=other").status, 500);
    server.wait_logged("no port in upstream \"other\"");
    assert_eq!(server.get("/?to=").status, 500);
    server.wait_logged("no host in upstream \"\"");
    assert_eq!(server.get("/?to=other:80").status, 502);
    server.wait_logged("no resolver defined to resolve other");
    server.stop();
}

#[test]
fn wrong_configurations_are_refused_in_nginx_s_words() {
    let error = |text: &str| {
        let directory = Directory::new();
        directory.write("gale.conf", format!("events {{}} http {{ server {{ listen 8000; {text} }} }}"));
        let output = support::binary(false)
            .args(["-t", "-c"])
            .arg(directory.path().join("gale.conf"))
            .output()
            .expect("it runs");
        assert!(!output.status.success(), "{text}");
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    for (text, message) in [
        ("location / { fastcgi_pass app; }", "[emerg] no port in upstream \"app\" in"),
        ("location / { fastcgi_pass 127.0.0.1:0; }", "invalid port in upstream \"127.0.0.1:0\" in"),
        ("location / { fastcgi_pass a:1; fastcgi_pass a:1; }", "\"fastcgi_pass\" directive is duplicate in"),
        ("fastcgi_pass a:1;", "\"fastcgi_pass\" directive is not allowed here in"),
        ("fastcgi_param A b c;", "invalid parameter \"c\" in"),
        ("fastcgi_param A;", "invalid number of arguments in \"fastcgi_param\" directive in"),
        ("fastcgi_split_path_info ^(.+)$;", "pattern \"^(.+)$\" must have 2 captures in"),
        ("fastcgi_split_path_info (;", "missing closing parenthesis in \"(\""),
        ("fastcgi_next_upstream http_502;", "invalid value \"http_502\" in"),
        ("uwsgi_modifier1 256;", "value must be between 0 and 255 in"),
        ("location / { memcached_pass 127.0.0.1:1; }", "unknown \"memcached_key\" variable"),
        ("memcached_next_upstream invalid_header;", "invalid value \"invalid_header\" in"),
    ] {
        let told = error(text);
        assert!(told.contains(message), "{text}: {told}");
    }
}
