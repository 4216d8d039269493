//! proxy_store and the like: responses that are stored as files.

use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::time::Instant;

use crate::support::{self, Backend, DEADLINE, Directory, Driver, Server, Setup, with_each_driver};

with_each_driver!(
    a_response_becomes_the_file_of_its_uri,
    files_are_where_the_path_says_and_nowhere_else,
    incomplete_or_other_than_200_response_is_not_stored,
    response_is_stored_although_the_client_leaves,
    a_file_that_cannot_be_written_costs_the_client_nothing,
);

const MODIFIED: &str = "Last-Modified: Sun, 06 Nov 1994 08:49:37 GMT\r\n";

/// A server whose location `/` has `text` in it, besides its backend.
fn store(driver: Driver, backend: &Backend, text: &str) -> Server {
    let text = format!(
        "root %DIR%/html; proxy_temp_path %DIR%/temp; location / {{ proxy_pass http://{}; {text} }}",
        backend.address()
    );
    Setup::server(driver, &text).start()
}

/// Waits until this file has these contents. Its directory may not exist yet.
#[track_caller]
fn wait_for(server: &Server, name: &str, contents: &[u8]) {
    let path = server.directory.path().join(name);
    let until = Instant::now() + DEADLINE;
    while !std::fs::read(&path).is_ok_and(|file| file == contents) {
        assert!(Instant::now() < until, "no {name} in time: {server}");
        std::thread::yield_now();
    }
}

fn a_response_becomes_the_file_of_its_uri(driver: Driver) {
    let backend = Backend::tcp();
    let text = format!(
        "root %DIR%/html; proxy_temp_path %DIR%/temp; location / {{ try_files $uri @fetch; }}
         location @fetch {{ proxy_store on; proxy_store_access group:r all:r; proxy_pass http://{}; }}",
        backend.address()
    );
    let server = Setup::server(driver, &text).start();
    let long = vec![b'l'; 300_000];
    for (path, body) in [("/a/b/short", &b"short"[..]), ("/long", &long), ("/empty", b"")] {
        let mut client = server.connect();
        client.send(format!("GET {path} HTTP/1.1\r\nHost: h\r\n\r\n"));
        let mut at = backend.accept();
        assert_eq!(at.request().target, path);
        at.send(format!("HTTP/1.1 200 OK\r\n{MODIFIED}Content-Length: {}\r\n\r\n", body.len()));
        at.send(body);
        assert_eq!(client.response().body, body);
        wait_for(&server, &format!("html{path}"), body);
        let metadata = std::fs::metadata(server.directory.path().join(format!("html{path}"))).unwrap();
        assert_eq!((metadata.permissions().mode() & 0o777, metadata.mtime()), (0o644, 784_111_777));
        // The backend is gone, the file is served.
        drop(at);
        let again = server.connect().get(path);
        assert_eq!((again.status, again.body.as_slice()), (200, body));
    }
    let directory = std::fs::metadata(server.directory.path().join("html/a/b")).unwrap();
    assert_eq!(directory.permissions().mode() & 0o777, 0o755);
    server.stop();
}

fn files_are_where_the_path_says_and_nowhere_else(driver: Driver) {
    let backend = Backend::tcp().serve(|asked, client| {
        client.send(format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{}", asked.target.len(), asked.target));
        true
    });
    let text = format!(
        "proxy_temp_path %DIR%/temp; location / {{ proxy_pass http://{}; proxy_store %DIR%/own/$arg_name; }}",
        backend.address
    );
    let server = Setup::server(driver, &text).start();
    let mut client = server.connect();
    for path in ["/?name=../../escaped", "/?name=", "/?name=x/", "/?name=a/../../b", "/x?name=plain"] {
        assert_eq!(client.get(path).text(), path);
    }
    wait_for(&server, "own/plain", b"/x?name=plain");
    let own: Vec<_> = std::fs::read_dir(server.directory.path().join("own")).unwrap().collect();
    assert_eq!(own.len(), 1, "{own:?}");
    assert!(!server.directory.path().join("escaped").exists());
    server.wait_logged("unsafe path \"");
    server.stop();
}

fn incomplete_or_other_than_200_response_is_not_stored(driver: Driver) {
    let backend = Backend::tcp();
    let server = store(driver, &backend, "proxy_store on;");
    let answers = [
        ("/404", "HTTP/1.1 404 Not Found\r\nContent-Length: 2\r\n\r\nno"),
        ("/206", "HTTP/1.1 206 Partial Content\r\nContent-Range: bytes 0-1/9\r\nContent-Length: 2\r\n\r\npa"),
        ("/short", "HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nshort"),
        ("/chunks", "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n"),
        ("/last", "HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nlast"),
    ];
    for (path, answer) in answers {
        let mut client = server.connect();
        client.send(format!("GET {path} HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n"));
        let mut at = backend.accept();
        at.request();
        at.send(answer);
        drop(at);
        client.read_to_end();
    }
    wait_for(&server, "html/last", b"last");
    let names: Vec<_> = std::fs::read_dir(server.directory.path().join("html")).unwrap().collect();
    assert_eq!(names.len(), 1, "{names:?}");
    server.stop();
}

fn response_is_stored_although_the_client_leaves(driver: Driver) {
    let backend = Backend::tcp();
    let server = store(driver, &backend, "proxy_store on; access_log %DIR%/own.log;");
    let mut client = server.connect();
    client.send("GET /file HTTP/1.1\r\nHost: h\r\n\r\n");
    let mut at = backend.accept();
    at.request();
    at.send("HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nfirst");
    client.head();
    assert_eq!(client.take(5), b"first");
    drop(client);
    server.directory.wait_until("the request's end", |directory| {
        directory.try_read("own.log").is_some_and(|log| log.contains('\n'))
    });
    at.send("again");
    wait_for(&server, "html/file", b"firstagain");
    server.stop();
}

fn a_file_that_cannot_be_written_costs_the_client_nothing(driver: Driver) {
    let backend = Backend::tcp().serve(|_, client| {
        client.send("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok");
        true
    });
    let text = format!(
        "proxy_temp_path %DIR%/temp; location / {{ proxy_pass http://{}; proxy_store %DIR%/file/in$uri; }}",
        backend.address
    );
    let server = Setup::server(driver, &text).file("file", "is no directory").start();
    assert_eq!(server.connect().get("/x").text(), "ok");
    server.wait_logged("while storing a response");
    server.stop();
}

#[test]
fn wrong_configurations_are_refused_in_nginx_s_words() {
    for (text, message) in [
        ("proxy_store '';", "empty path in"),
        ("proxy_store on; proxy_store off;", "\"proxy_store\" directive is duplicate in"),
        ("proxy_store on; proxy_cache one;", "\"proxy_store\" directive is incompatible with \"proxy_cache\" in"),
        ("proxy_store_access user:x;", "invalid value \"user:x\" in"),
    ] {
        let directory = Directory::new();
        let cache = format!("proxy_cache_path {}/cache keys_zone=one:1m;", directory.path().display());
        let text = format!("events {{}} http {{ {cache} server {{ listen 8000; location / {{ {text} }} }} }}");
        directory.write("gale.conf", text);
        let path = directory.path().join("gale.conf");
        let output = support::binary(false).args(["-t", "-c"]).arg(path).output().expect("it runs");
        let told = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && told.contains(message), "{told}");
    }
}
