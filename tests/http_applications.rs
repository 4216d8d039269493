//! Real applications behind Gale, where Debian's packages are installed: PHP-FPM, uWSGI with Python, memcached. Without
//! one of them its test says so and passes.

mod support;

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use support::{Directory, Driver, Setup, with_each_driver};

with_each_driver!(php_fpm_answers, uwsgi_with_python_answers, memcached_answers);

/// A program of a package, ended with the test.
struct Program(Child);

impl Program {
    /// Starts a program and waits for a line of its standard error that contains `ready`.
    #[track_caller]
    fn start(command: &mut Command, ready: &str) -> Program {
        let mut child = command.stdin(Stdio::null()).stderr(Stdio::piped()).spawn().expect("it starts");
        let mut lines = BufReader::new(child.stderr.take().expect("piped"));
        let mut all = String::new();
        loop {
            let start = all.len();
            assert!(lines.read_line(&mut all).expect("text") > 0, "it ended: {all}");
            if all[start..].contains(ready) {
                break;
            }
        }
        // What it says later is taken, so that it never waits for somebody to read it.
        std::thread::spawn(move || std::io::copy(&mut lines, &mut std::io::sink()));
        Program(child)
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let pid = rustix::process::Pid::from_child(&self.0);
        let _ = rustix::process::kill_process(pid, rustix::process::Signal::INT);
        let _ = self.0.wait();
    }
}

/// A program that is installed under one of these names.
fn find(names: &[&str]) -> Option<PathBuf> {
    let directories = ["/usr/sbin", "/usr/bin", "/usr/local/sbin", "/usr/local/bin"];
    let mut places = names.iter().flat_map(|name| directories.map(|directory| Path::new(directory).join(name)));
    let found = places.find(|path| path.exists());
    if found.is_none() {
        eprintln!("not tested: {} is not installed", names[0]);
    }
    found
}

/// A file of those that configurations include.
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
    // What follows the script is kept by `set`: try_files makes the URI that of the script.
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
        eprintln!("not tested: uwsgi-plugin-python3 is not installed");
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
