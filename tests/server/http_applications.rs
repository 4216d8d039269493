//! Real applications behind Gale, where Debian's packages are installed: PHP-FPM, uWSGI with Python, memcached, and the
//! examples `application` in Python and in Node and `http2`, whose gRPC service the test plays. A test whose program is
//! missing says so and passes.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Instant;

use rustls::version::TLS13;

use crate::support::authority::Authority;
use crate::support::http2::Http2;
use crate::support::http2_server::Http2Server;
use crate::support::tls::{Session, Tls};
use crate::support::{Backend, DEADLINE, Directory, Driver, Setup, skip, with_each_driver};

with_each_driver!(
    php_fpm_answers,
    uwsgi_with_python_answers,
    memcached_answers,
    an_application_in_python_survives_the_death_of_a_server,
    an_application_in_node_survives_the_death_of_a_server,
    the_example_over_http2_runs,
);

/// A packaged program; ended with the test.
struct Program(Child);

impl Program {
    /// Starts a program and waits for a line of its standard error that contains `ready`.
    #[track_caller]
    fn start(command: &mut Command, ready: &str) -> Program {
        Program::start_and_hear(command, ready).0
    }

    /// Starts a program and also returns that line.
    #[track_caller]
    fn start_and_hear(command: &mut Command, ready: &str) -> (Program, String) {
        let mut child = command.stdin(Stdio::null()).stderr(Stdio::piped()).spawn().expect("it starts");
        let mut lines = BufReader::new(child.stderr.take().expect("piped"));
        let mut all = String::new();
        loop {
            let start = all.len();
            assert!(lines.read_line(&mut all).expect("text") > 0, "it ended: {all}");
            if all[start..].contains(ready) {
                all.drain(..start);
                break;
            }
        }
        // Its later output is drained, so that it never blocks.
        std::thread::spawn(move || std::io::copy(&mut lines, &mut std::io::sink()));
        (Program(child), all)
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let pid = rustix::process::Pid::from_child(&self.0);
        // SIGINT may be ignored if the tests run in the background.
        let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
        let _ = self.0.wait();
    }
}

/// Path of a program that is installed under one of these names.
fn find(names: &[&str]) -> Option<PathBuf> {
    let directories = ["/usr/sbin", "/usr/bin", "/usr/local/sbin", "/usr/local/bin"];
    let mut places = names.iter().flat_map(|name| directories.map(|directory| Path::new(directory).join(name)));
    let found = places.find(|path| path.exists());
    if found.is_none() {
        skip(format!("{} is not installed", names[0]));
    }
    found
}

/// A file of Debian's that configurations include.
fn packaged(name: &str) -> Vec<u8> {
    std::fs::read(format!("{}/../../packaging/{name}", env!("CARGO_MANIFEST_DIR"))).expect("it is there")
}

const PHP: &str = r#"<?php
switch ($_GET['do'] ?? '') {
    case 'log': error_log('told on purpose'); echo 'logged'; break;
    case 'status': http_response_code(418); header('X-Own: yes'); echo 'teapot'; break;
    case 'move': header('Location: /elsewhere'); break;
    case 'long': for ($i = 0; $i < 1000; $i++) echo str_repeat(chr(97 + $i % 26), 1000); break;
    case 'body': echo md5(file_get_contents('php://input')); break;
    default: echo implode('|', [$_SERVER['SCRIPT_NAME'], $_SERVER['PATH_INFO'] ?? '', $_SERVER['HTTP_X_A'] ?? '',
                                $_SERVER['REQUEST_METHOD'], $_POST['field'] ?? '']);
}
"#;

fn php_fpm_answers(driver: Driver) {
    let Some(program) = find(&["php-fpm", "php-fpm8.2", "php-fpm8.4", "php-fpm8.3", "php-fpm8.1", "php-fpm7.4"]) else {
        return;
    };
    let own = Directory::new();
    let socket = own.path().join("fpm.sock");
    let pool = format!(
        "[global]\nerror_log = /proc/self/fd/2\ndaemonize = no\n[www]\nlisten = {}\nlisten.mode = 0666\npm = static\n\
         pm.max_children = 2\ncatch_workers_output = no\nuser = nobody\ngroup = nogroup\n",
        socket.display()
    );
    own.write("fpm.conf", pool);
    let mut command = Command::new(program);
    command.args(["--nodaemonize", "--allow-to-run-as-root", "--fpm-config"]).arg(own.path().join("fpm.conf"));
    let _php = Program::start(&mut command, "ready to handle connections");
    let text = format!(
        "upstream php {{ server unix:{}; keepalive 2; }}
         server {{ listen %UNIX%; root %DIR%/html; index index.php;
             location / {{ try_files $uri $uri/ =404; }}
             location ~ [^/]\\.php(/|$) {{
                 fastcgi_split_path_info ^(.+?\\.php)(/.*)$;
                 try_files $fastcgi_script_name =404;
                 set $path_info $fastcgi_path_info;
                 fastcgi_param PATH_INFO $path_info;
                 fastcgi_index index.php; include fastcgi.conf; fastcgi_keep_conn on; fastcgi_pass php; }} }}",
        socket.display()
    );
    let setup = ["fastcgi.conf", "fastcgi_params"]
        .into_iter()
        .fold(Setup::http(driver, &text), |setup, name| setup.file(name, packaged(name)));
    let server = setup.file("html/index.php", PHP).start();
    let mut client = server.connect();
    let fields = "Host: h\r\nX-A: 1\r\nX-A: 2\r\n";
    let response = client.ask(format!("GET / HTTP/1.1\r\n{fields}\r\n"));
    assert_eq!((response.status, response.text()), (200, "/index.php||1, 2|GET|"));
    assert!(response.header("Content-Type").is_some_and(|kind| kind.starts_with("text/html")), "{response:?}");
    let form = "Content-Type: application/x-www-form-urlencoded\r\nContent-Length: 7\r\n\r\nfield=x";
    let response = client.ask(format!("POST /index.php/a/b HTTP/1.1\r\n{fields}{form}"));
    // `set` keeps the rest of the path after the script: try_files replaces the URI by that of the script.
    assert_eq!(response.text(), "/index.php|/a/b|1, 2|POST|x");
    let teapot = client.get("/index.php?do=status");
    assert_eq!((teapot.status, teapot.text(), teapot.header("X-Own")), (418, "teapot", Some("yes")));
    let moved = client.get("/index.php?do=move");
    assert_eq!((moved.status, moved.header("Location")), (302, Some("/elsewhere")));
    assert_eq!(client.get("/index.php?do=long").body.len(), 1_000_000);
    assert_eq!(client.get("/index.php?do=log").text(), "logged");
    server.wait_logged("FastCGI sent in stderr: \"PHP message: told on purpose\" while reading");
    let body = vec![b'x'; 300_000];
    let head = format!("POST /index.php?do=body HTTP/1.1\r\nHost: h\r\nContent-Length: {}\r\n\r\n", body.len());
    let sum = client.ask([head.as_bytes(), &body].concat());
    assert_eq!(sum.text(), "d408ed46ebcc326f9e7c6bb9c77af1cd");
    assert_eq!(client.get("/none.php").status, 404);
    server.stop();
}

const WSGI: &str = "
def application(environ, start_response):
    length = int(environ.get('CONTENT_LENGTH') or 0)
    body = environ['wsgi.input'].read(length)
    start_response('201 Made', [('Content-Type', 'text/plain'), ('X-Own', 'yes')])
    names = ['REQUEST_METHOD', 'PATH_INFO', 'QUERY_STRING', 'HTTP_X_A']
    yield '|'.join(environ.get(name, '') for name in names).encode()
    yield b'|%d|' % len(body)
    yield body[-5:]
";

fn uwsgi_with_python_answers(driver: Driver) {
    let Some(program) = find(&["uwsgi"]) else { return };
    if !Path::new("/usr/lib/uwsgi/plugins/python3_plugin.so").exists() {
        skip("uwsgi-plugin-python3 is not installed");
        return;
    }
    let own = Directory::new();
    own.write("app.py", WSGI);
    let socket = own.path().join("uwsgi.sock");
    let mut command = Command::new(program);
    command.args(["--plugin", "python3", "--master", "--die-on-term", "--chmod-socket=666", "--socket"]).arg(&socket);
    command.arg("--wsgi-file").arg(own.path().join("app.py"));
    let _uwsgi = Program::start(&mut command, "spawned uWSGI worker 1");
    let text = format!("location / {{ include uwsgi_params; uwsgi_pass unix:{}; }}", socket.display());
    let server = Setup::server(driver, &text).file("uwsgi_params", packaged("uwsgi_params")).start();
    let mut client = server.connect();
    let response = client.ask("GET /a%20b?c=d HTTP/1.1\r\nHost: h\r\nX-A: 1\r\nX-A: 2\r\n\r\n");
    assert_eq!((response.status, &response.reason[..], response.header("X-Own")), (201, "Made", Some("yes")));
    assert_eq!(response.text(), "GET|/a b|c=d|1, 2|0|");
    let body = [vec![b'x'; 100_000], b"hello".to_vec()].concat();
    let head = format!("POST / HTTP/1.1\r\nHost: h\r\nContent-Length: {}\r\n\r\n", body.len());
    assert_eq!(client.ask([head.as_bytes(), &body].concat()).text(), "POST|/|||100005|hello");
    server.stop();
}

fn memcached_answers(driver: Driver) {
    let Some(program) = find(&["memcached"]) else { return };
    let own = Directory::new();
    let socket = own.path().join("memcached.sock");
    let mut command = Command::new(program);
    command.args(["-vv", "-u", "nobody", "-a", "0777", "-s"]).arg(&socket);
    let _memcached = Program::start(&mut command, "server listening");
    let mut values = UnixStream::connect(&socket).expect("it listens");
    let large = vec![b'x'; 500_000];
    let set =
        |key: &str, value: &[u8]| [format!("set {key} 0 0 {}\r\n", value.len()).as_bytes(), value, b"\r\n"].concat();
    values.write_all(&[set("/small", b"value"), set("/large", &large)].concat()).expect("sent");
    let mut stored = [0; 16];
    values.read_exact(&mut stored).expect("an answer");
    assert_eq!(&stored, b"STORED\r\nSTORED\r\n");
    let text = format!(
        "upstream values {{ server unix:{}; keepalive 2; }}
         server {{ listen %UNIX%; set $memcached_key $uri;
             location / {{ memcached_pass values; error_page 404 502 504 = @made; }}
             location @made {{ return 200 made; }} }}",
        socket.display()
    );
    let server = Setup::http(driver, &text).start();
    let mut client = server.connect();
    for _ in 0..3 {
        assert_eq!(client.get("/small").text(), "value");
        assert!(client.get("/large").body == large);
        assert_eq!(client.get("/missing").text(), "made");
    }
    server.stop();
}

const EXAMPLE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/application");

fn an_application_in_python_survives_the_death_of_a_server(driver: Driver) {
    if let Some(python) = find(&["python3"]) {
        survives_the_death_of_a_server(driver, &python, "application.py");
    }
}

fn an_application_in_node_survives_the_death_of_a_server(driver: Driver) {
    if let Some(node) = find(&["node", "nodejs"]) {
        survives_the_death_of_a_server(driver, &node, "application.js");
    }
}

fn survives_the_death_of_a_server(driver: Driver, interpreter: &Path, script: &str) {
    let start = |port: &str| {
        let mut command = Command::new(interpreter);
        command.arg(format!("{EXAMPLE}/{script}")).arg(port);
        let (program, line) = Program::start_and_hear(&mut command, "listening on ");
        (program, line.trim().rsplit(' ').next().expect("a port").to_owned())
    };
    let ((first, first_port), (_second, second_port)) = (start("0"), start("0"));
    let text = std::fs::read_to_string(format!("{EXAMPLE}/gale.conf")).expect("a configuration");
    let text = text
        .replace("127.0.0.1:3001", &format!("127.0.0.1:{first_port}"))
        .replace("127.0.0.1:3002", &format!("127.0.0.1:{second_port}"))
        .replace("127.0.0.1:8080", "%TCP%")
        .replace("error_log stderr notice", "error_log %DIR%/error.log notice")
        .replace("/tmp/application.pid", "%DIR%/pid")
        .replace("events {", &format!("events {{ use {};", driver.name()));
    let server = Setup::configuration(&text).start();
    let answering = || {
        let mut client = server.connect_tcp(1);
        let mut texts: Vec<String> = (0..10).map(|_| client.get("/").text().trim().to_owned()).collect();
        texts.sort();
        texts.dedup();
        texts
    };
    let of = |port: &str| format!("hello from {port}");
    let mut both = vec![of(&first_port), of(&second_port)];
    both.sort();
    assert_eq!(answering(), both);
    let mut socket = server.connect_tcp(1);
    socket.send(
        "GET /socket HTTP/1.1\r\nHost: h\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\
         Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n",
    );
    let agreed = socket.response();
    assert_eq!((agreed.status, agreed.header("Sec-WebSocket-Accept")), (101, Some("s3pPLMBiTxaQ9kYGzzhZRbK+xOo=")));
    socket.send([0x81, 0x82, 1, 2, 3, 4, b'h' ^ 1, b'i' ^ 2]);
    assert_eq!(socket.take(4), [0x81, 2, b'h', b'i']);
    // Clients do not notice that one process has died and come back.
    drop(first);
    assert_eq!(answering(), [of(&second_port)]);
    server.wait_logged(&format!("health check \"\" of peer 127.0.0.1:{first_port} in upstream \"application\""));
    let (_first, port) = start(&first_port);
    assert_eq!(port, first_port);
    server.wait_logged("peer is healthy");
    // Until the end of the WebSocket is known, its server has more connections than the other one.
    drop(socket);
    let deadline = Instant::now() + DEADLINE;
    while answering() != both {
        assert!(Instant::now() < deadline, "both answer again");
    }
    server.stop();
}

/// A site, a members' area, a WebSocket and a gRPC service on one HTTP/2 connection.
fn the_example_over_http2_runs(driver: Driver) {
    let Some(python) = find(&["python3"]) else { return };
    let mut command = Command::new(python);
    command.arg(format!("{EXAMPLE}/application.py")).arg("0");
    let (_application, line) = Program::start_and_hear(&mut command, "listening on ");
    let application = format!("127.0.0.1:{}", line.trim().rsplit(' ').next().expect("a port"));
    let greeter = Backend::tcp();
    let folder = format!("{EXAMPLE}/../http2");
    let text = std::fs::read_to_string(format!("{folder}/gale.conf")).expect("a configuration");
    let text = text
        .replace("127.0.0.1:3001", &application)
        .replace("127.0.0.1:50051", greeter.address())
        .replace("listen 127.0.0.1:8443 ssl", "listen %UNIX% ssl")
        .replace("error_log stderr notice", "error_log %DIR%/error.log notice")
        .replace("/tmp/http2.pid", "%DIR%/pid")
        .replace("worker_processes auto", "worker_processes 1")
        .replace("events {", &format!("events {{ use {};", driver.name()));
    let (authority, members) = (Authority::new("The site's"), Authority::new("Members"));
    let (ecdsa, rsa) = (authority.ecdsa(&["localhost"]), authority.rsa(&["localhost"]));
    let ada = members.ecdsa(&["Ada"]);
    let mut setup = Setup::configuration(&text).argument("-p").argument("%DIR%");
    for (name, contents) in [
        ("certificates/ecdsa.crt", ecdsa.certificate.as_bytes()),
        ("certificates/ecdsa.key", ecdsa.key.as_bytes()),
        ("certificates/rsa.crt", rsa.certificate.as_bytes()),
        ("certificates/rsa.key", rsa.key.as_bytes()),
        ("certificates/members.crt", members.pem.as_bytes()),
        ("site/index.html", &std::fs::read(format!("{folder}/site/index.html")).expect("a page")),
    ] {
        setup = setup.file(name, contents);
    }
    let server = setup.start();
    let path = server.directory.path().join("gale.sock");
    let connect = |tls: Tls| -> Session { tls.alpn(&["h2"]).connect(&path, "localhost").expect("a session") };

    let mut checks = Http2Server::accept(&greeter);
    let asked = checks.whole_request();
    assert_eq!(asked.path, "/grpc.health.v1.Health/Check");
    checks.answer_grpc(asked.stream, b"\0\0\0\0\x02\x08\x01");

    // A client that only verifies RSA signatures gets the other certificate, and is not a member.
    let mut stranger = Tls::rsa_only(&authority).client(&path, "localhost");
    let ask = |path: &str| format!("GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n");
    assert_eq!(stranger.ask(ask("/")).status, 200);
    assert_eq!(stranger.ask(ask("/members/")).status, 403);

    let mut client = Http2::above(connect(Tls::with(&authority, &[&TLS13], Some(&ada))));
    assert!(client.get("/").text().contains("<h1>Over HTTP/2</h1>"));
    assert_eq!(client.get("/members/").text(), "hello CN=Ada\n");
    let call = client.begin("POST", "/example.Greeter/Hello", &[("te", "trailers")], false);
    client.send(call, b"Ada", true);
    let mut calls = Http2Server::accept(&greeter);
    let asked = calls.whole_request();
    assert_eq!((asked.path.as_str(), &asked.body[..]), ("/example.Greeter/Hello", &b"Ada"[..]));
    calls.answer_grpc(asked.stream, b"hello Ada");
    assert_eq!(client.answer(call).text(), "hello Ada");
    let socket = client.connect("websocket", "/socket", &[("sec-websocket-version", "13")]);
    client.read_until(|client| client.answers.get(&socket).is_some_and(|answer| answer.status == 200));
    client.send(socket, &[0x81, 0x82, 1, 2, 3, 4, b'h' ^ 1, b'i' ^ 2], false);
    client.read_until(|client| client.answers[&socket].body == [0x81, 2, b'h', b'i']);
    drop(client);
    server.stop();
}
