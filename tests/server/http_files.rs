//! Files over real sockets: of every size, whole and in ranges, to fast, slow and disconnecting clients, and paths that
//! cannot be served.

use std::fs::{self, File};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::sync::OnceLock;
use std::time::{Duration, UNIX_EPOCH};

use rustix::process::Signal;

use crate::support::{self, Client, Driver, Response, Server, Setup, with_each_driver};

with_each_driver!(
    files_of_every_size_arrive_whole,
    head_has_the_fields_of_get,
    slow_reader_gets_all_and_delays_no_others,
    a_client_that_disappears_costs_nothing_but_its_connection,
    memory_that_reads_by_threads_have_taken_goes_back,
    a_file_that_shrinks_while_it_is_sent_breaks_the_answer_off,
    a_file_that_grows_or_is_replaced_or_deleted_is_sent_as_it_was,
    parts_of_files_are_sent,
    several_parts_are_sent_as_one_body,
    ranges_that_do_not_apply_are_ignored,
    conditions_decide_between_200_304_and_412,
    settings_decide_about_conditions_and_ranges,
    a_directory_without_its_slash_redirects,
    unservable_file_gets_its_status,
    only_get_and_head_fetch_files,
);

const BIG: usize = 5 << 20;

/// 2001-09-09 01:46:40, the modification time of the files.
const MODIFIED: u64 = 1_000_000_000;
const MODIFIED_TEXT: &str = "Sun, 09 Sep 2001 01:46:40 GMT";

fn pattern(length: usize) -> Vec<u8> {
    (0..length as u32).map(|number| (number.wrapping_mul(2_654_435_761) >> 24) as u8).collect()
}

fn big() -> &'static [u8] {
    static BYTES: OnceLock<Vec<u8>> = OnceLock::new();
    BYTES.get_or_init(|| pattern(BIG))
}

/// Locations that serve the same files, one for each way of sending.
const WAYS: &[(&str, &str)] = &[
    ("/read/", "sendfile off;"),
    ("/sendfile/", "sendfile on;"),
    ("/nopush/", "sendfile on; tcp_nopush on; sendfile_max_chunk 100k;"),
];

fn ways() -> String {
    WAYS.iter().map(|(path, settings)| format!("location {path} {{ alias %DIR%/files/; {settings} }}\n")).collect()
}

fn ask(client: &mut Client, path: &str, fields: &str) -> Response {
    client.ask(format!("GET {path} HTTP/1.1\r\nHost: h\r\n{fields}\r\n"))
}

fn files_of_every_size_arrive_whole(driver: Driver) {
    let sizes = [0, 1, 4095, 4096, 4097, 65_535, 65_536, 65_537, 200_000, BIG];
    let servers = format!("server {{ listen %UNIX%; listen %TCP%; {} }}", ways());
    let setup = sizes
        .iter()
        .fold(Setup::http(driver, &servers), |setup, &size| setup.file(&format!("files/{size}.html"), pattern(size)));
    let server = setup.start();
    for mut client in [server.connect(), server.connect_tcp(1)] {
        for (way, size) in WAYS.iter().flat_map(|(way, _)| sizes.map(|size| (way, size))) {
            let response = client.get(&format!("{way}{size}.html"));
            assert_eq!(response.status, 200, "{way}{size}");
            assert_eq!(response.header("Content-Length"), Some(&*size.to_string()));
            assert_eq!(response.header("Content-Type"), Some("text/html"));
            assert_eq!(response.header("Accept-Ranges"), Some("bytes"));
            assert_eq!(response.header("Connection"), Some("keep-alive"));
            assert!(response.body == pattern(size), "{way}{size}");
        }
    }
    server.stop();
}

fn head_has_the_fields_of_get(driver: Driver) {
    let setup = Setup::server(driver, "root %DIR%/files; location /text { return 200 text; }");
    let server = setup.file("files/empty", "").file("files/page.html", pattern(100_000)).start();
    let mut client = server.connect();
    for path in ["/empty", "/page.html", "/text", "/missing", "/"] {
        let get = client.get(path);
        let head = client.ask(format!("HEAD {path} HTTP/1.1\r\nHost: localhost\r\n\r\n"));
        let without_date = |response: Response| {
            let headers = response.headers.into_iter().filter(|(name, _)| name != "Date");
            (response.status, headers.collect::<Vec<_>>())
        };
        assert_eq!(without_date(head), without_date(get), "{path}");
    }
    server.stop();
}

fn slow_reader_gets_all_and_delays_no_others(driver: Driver) {
    let servers = format!("server {{ listen %UNIX%; {} location / {{ return 200 quick; }} }}", ways());
    let configuration =
        support::http_configuration(driver, &servers).replace("worker_processes 2", "worker_processes 1");
    let server = Setup::configuration(&configuration).file("files/big", big()).start();
    let mut slow: Vec<Client> = WAYS.iter().map(|_| server.connect()).collect();
    for (client, (way, _)) in slow.iter_mut().zip(WAYS) {
        client.send(format!("GET {way}big HTTP/1.1\r\nHost: h\r\n\r\n"));
        assert_eq!(client.head().status, 200);
    }
    for piece in big().chunks(BIG / 10) {
        assert_eq!(server.get("/").text(), "quick");
        slow.iter_mut().for_each(|client| assert!(client.take(piece.len()) == piece));
    }
    slow.iter_mut().for_each(|client| assert_eq!(client.get("/").text(), "quick"));
    server.stop();
}

fn a_client_that_disappears_costs_nothing_but_its_connection(driver: Driver) {
    let servers = format!("server {{ listen %UNIX%; {} location / {{ return 200 quick; }} }}", ways());
    let setup = Setup::http(
        driver,
        &format!(
            "log_format left '$uri $status $body_bytes_sent $request_completion';
        access_log %DIR%/left.log left; {servers}"
        ),
    );
    let server = setup.file("files/big", big()).start();
    for (way, _) in WAYS {
        let mut client = server.connect();
        client.send(format!("GET {way}big HTTP/1.1\r\nHost: h\r\n\r\n"));
        client.take(10_000);
        drop(client);
        let line = server.directory.wait_line("left.log", &format!("{way}big 200 "));
        let sent: usize = line.split(' ').nth(2).and_then(|word| word.parse().ok()).expect("a number");
        assert!((1..BIG).contains(&sent) && !line.ends_with("OK"), "{line}");
    }
    assert_eq!(server.get("/").text(), "quick");
    server.stop();
}

fn memory_that_reads_by_threads_have_taken_goes_back(driver: Driver) {
    const CLIENTS: usize = 40;
    // 4 MiB are kept for the next reads; the rest is for everything else.
    const KEPT_MAX: u64 = 7 << 20;
    // Bypasses the page cache, so that every read is done by a thread.
    let setup = Setup::server(driver, "location /files/ { alias %DIR%/files/; directio 4k; }");
    let server = setup.file("files/big", big()).start();
    let worker = server.worker();
    let fetch = || assert!(ask(&mut server.connect(), "/files/big", "").body == big());
    fetch();
    let before = support::anonymous_memory(worker);
    std::thread::scope(|scope| (0..CLIENTS).for_each(|_| drop(scope.spawn(fetch))));
    let kept = support::anonymous_memory(worker).saturating_sub(before);
    assert!(kept <= KEPT_MAX, "{kept} bytes");
    server.stop();
}

fn a_file_that_shrinks_while_it_is_sent_breaks_the_answer_off(driver: Driver) {
    let mut server = Server::start(driver, &ways());
    for (way, _) in WAYS {
        server.directory.write("files/big", big());
        let mut client = server.connect();
        client.send(format!("GET {way}big HTTP/1.1\r\nHost: h\r\n\r\nGET /read/big HTTP/1.1\r\nHost: h\r\n\r\n"));
        assert_eq!(client.head().header("Content-Length"), Some(&*BIG.to_string()));
        let file = File::options().write(true).open(server.directory.path().join("files/big")).expect("there");
        file.set_len(1000).expect("shorter");
        // The missing bytes are not replaced by others.
        let received = client.read_to_end();
        assert!(received.len() < BIG, "{way}: {}", received.len());
        // The kernel zeroes the pages that it truncates, even while they are read and those that sendfile has queued.
        let differs = received.iter().zip(big()).position(|(got, wanted)| got != wanted && *got != 0);
        let around = differs.map(|place| (place, &received[place..received.len().min(place + 16)]));
        assert_eq!(around, None, "{way}: of {} bytes", received.len());
    }
    server.wait_logged_times("files/big\" was truncated at ", WAYS.len());
    server.wait_logged(" while it was being sent, client: ");
    server.end(Signal::TERM);
}

fn a_file_that_grows_or_is_replaced_or_deleted_is_sent_as_it_was(driver: Driver) {
    let server = Server::start(driver, &ways());
    for (way, _) in WAYS {
        let path = server.directory.path().join("files/big");
        server.directory.write("files/big", big());
        let mut growing = server.connect();
        growing.send(format!("GET {way}big HTTP/1.1\r\nHost: h\r\n\r\n"));
        assert_eq!(growing.head().status, 200);
        File::options().append(true).open(&path).and_then(|file| file.set_len(BIG as u64 + 1000)).expect("longer");
        assert!(growing.take(BIG) == big(), "{way}");
        assert_eq!(growing.get("/missing").status, 404, "{way}");

        let mut replaced = server.connect();
        replaced.send(format!("GET {way}big HTTP/1.1\r\nHost: h\r\n\r\n"));
        assert_eq!(replaced.head().status, 200);
        server.directory.write("files/new", "new");
        fs::rename(server.directory.path().join("files/new"), &path).expect("renamed");
        assert!(replaced.take(BIG) == big(), "{way}");
        assert_eq!(replaced.take(1000), [0; 1000], "{way}");
        assert_eq!(replaced.get(&format!("{way}big")).text(), "new", "{way}");

        server.directory.write("files/big", big());
        let mut deleted = server.connect();
        deleted.send(format!("GET {way}big HTTP/1.1\r\nHost: h\r\n\r\n"));
        assert_eq!(deleted.head().status, 200);
        fs::remove_file(&path).expect("there");
        assert!(deleted.take(BIG) == big(), "{way}");
        assert_eq!(deleted.get(&format!("{way}big")).status, 404, "{way}");
    }
    server.stop();
}

/// A server with `page.txt` of ten bytes and `big` in `files/`, both with a known modification time.
fn dated_files(driver: Driver, text: &str) -> Server {
    let setup = Setup::server(driver, &format!("root %DIR%/files; {text}"));
    let server = setup.file("files/page.txt", "0123456789").file("files/big", big()).start();
    for name in ["page.txt", "big"] {
        let file = File::options().append(true).open(server.directory.path().join("files").join(name));
        file.and_then(|file| file.set_modified(UNIX_EPOCH + Duration::from_secs(MODIFIED))).expect("an old file");
    }
    server
}

fn parts_of_files_are_sent(driver: Driver) {
    let server = dated_files(driver, "sendfile on;");
    let mut client = server.connect();
    let cases = [
        ("0-0", 206, "bytes 0-0/10", "0"),
        ("0-3", 206, "bytes 0-3/10", "0123"),
        ("3-", 206, "bytes 3-9/10", "3456789"),
        ("-3", 206, "bytes 7-9/10", "789"),
        ("-100", 206, "bytes 0-9/10", "0123456789"),
        ("5-100", 206, "bytes 5-9/10", "56789"),
        (" 1 - 2 ", 206, "bytes 1-2/10", "12"),
        ("10-11,2-3", 206, "bytes 2-3/10", "23"),
        ("10-", 416, "bytes */10", ""),
        ("5-4", 416, "bytes */10", ""),
        ("-0", 416, "bytes */10", ""),
        ("x", 416, "bytes */10", ""),
        ("1", 416, "bytes */10", ""),
        ("1-2x", 416, "bytes */10", ""),
        ("99999999999999999999-", 416, "bytes */10", ""),
    ];
    for (range, status, content_range, body) in cases {
        let response = ask(&mut client, "/page.txt", &format!("Range: bytes={range}\r\n"));
        assert_eq!((response.status, response.header("Content-Range")), (status, Some(content_range)), "{range}");
        if status == 206 {
            assert_eq!((response.text(), response.header("Content-Type")), (body, Some("text/plain")), "{range}");
            assert_eq!(response.header("ETag"), Some("\"3b9aca00-a\""));
        } else {
            assert_eq!(
                (response.header("ETag"), response.header("Content-Type")),
                (None, Some("text/html")),
                "{range}"
            );
        }
    }
    let response = ask(&mut client, "/big", "Range: bytes=1000000-4999999\r\n");
    assert!(response.body == big()[1_000_000..5_000_000]);
    let head = client.ask("HEAD /page.txt HTTP/1.1\r\nHost: h\r\nRange: bytes=2-5\r\n\r\n");
    assert_eq!((head.status, head.header("Content-Length")), (206, Some("4")));
    server.stop();
}

fn several_parts_are_sent_as_one_body(driver: Driver) {
    let server = dated_files(driver, "sendfile on;");
    let mut client = server.connect();
    for (path, ranges, parts) in [
        ("/page.txt", "0-1,4-5,-1", vec![0..2, 4..6, 9..10]),
        ("/page.txt", "8-9,0-0", vec![8..10, 0..1]),
        ("/big", "0-99999,200000-4999999", vec![0..100_000, 200_000..5_000_000]),
    ] {
        let whole = if path == "/big" { big().to_vec() } else { b"0123456789".to_vec() };
        let response = ask(&mut client, path, &format!("Range: bytes={ranges}\r\n"));
        assert_eq!(response.status, 206, "{ranges}");
        let content_type = response.header("Content-Type").expect("a type");
        let boundary = content_type.strip_prefix("multipart/byteranges; boundary=").expect("parts");
        let mut expected = Vec::new();
        for part in parts {
            let range = format!("{}-{}/{}", part.start, part.end - 1, whole.len());
            let head = format!("\r\n--{boundary}\r\nContent-Type: text/plain\r\nContent-Range: bytes {range}\r\n\r\n");
            expected.extend(head.bytes());
            expected.extend(&whole[part]);
        }
        expected.extend(format!("\r\n--{boundary}--\r\n").bytes());
        assert!(response.body == expected, "{ranges}");
    }
    // Ranges that add up to more than the file are answered with the whole file.
    let response = ask(&mut client, "/page.txt", "Range: bytes=0-,0-,0-\r\n");
    assert_eq!((response.status, response.text()), (200, "0123456789"));
    server.stop();
}

fn ranges_that_do_not_apply_are_ignored(driver: Driver) {
    let server = dated_files(driver, "location /text { return 200 text; }");
    let mut client = server.connect();
    let whole = ["Range: lines=1-2\r\n", "Range: bytes\r\n", "Range:\r\n"];
    let other =
        ["\"other\"", "W/\"3b9aca00-a\"", "Sun, 09 Sep 2001 01:46:39 GMT", "Sun, 09 Sep 2001 01:46:41 GMT", "?"];
    let other = other.map(|value| format!("Range: bytes=0-3\r\nIf-Range: {value}\r\n"));
    for fields in whole.into_iter().chain(other.iter().map(String::as_str)) {
        let response = ask(&mut client, "/page.txt", fields);
        assert_eq!((response.status, response.text()), (200, "0123456789"), "{fields}");
    }
    for value in ["\"3b9aca00-a\"", MODIFIED_TEXT] {
        let response = ask(&mut client, "/page.txt", &format!("Range: bytes=0-3\r\nIf-Range: {value}\r\n"));
        assert_eq!((response.status, response.text()), (206, "0123"), "{value}");
    }
    let response = ask(&mut client, "/text", "Range: bytes=0-1\r\n");
    assert_eq!((response.status, response.text(), response.header("Accept-Ranges")), (200, "text", None));
    let response = ask(&mut client, "/missing", "Range: bytes=0-1\r\n");
    assert_eq!((response.status, response.header("Content-Range")), (404, None));
    server.stop();
}

fn conditions_decide_between_200_304_and_412(driver: Driver) {
    let server = dated_files(driver, "");
    let mut client = server.connect();
    let (tag, date) = ("\"3b9aca00-a\"", MODIFIED_TEXT);
    let (before, after) = ("Sun, 09 Sep 2001 01:46:39 GMT", "Sun, 09 Sep 2001 01:46:41 GMT");
    let cases = [
        (format!("If-None-Match: {tag}\r\n"), 304),
        (format!("If-None-Match: W/{tag}\r\n"), 304),
        (format!("If-None-Match: \"a\", {tag}\r\n"), 304),
        ("If-None-Match: *\r\n".into(), 304),
        ("If-None-Match: \"a\"\r\n".into(), 200),
        (format!("If-Modified-Since: {date}\r\n"), 304),
        (format!("If-Modified-Since: {before}\r\n"), 200),
        (format!("If-Modified-Since: {after}\r\n"), 200),
        ("If-Modified-Since: nonsense\r\n".into(), 200),
        ("If-Modified-Since: Sunday, 09-Sep-01 01:46:40 GMT\r\n".into(), 304),
        ("If-Modified-Since: Sun Sep  9 01:46:40 2001\r\n".into(), 304),
        (format!("If-None-Match: \"a\"\r\nIf-Modified-Since: {date}\r\n"), 200),
        (format!("If-None-Match: {tag}\r\nIf-Modified-Since: {date}\r\n"), 304),
        (format!("If-Match: {tag}\r\n"), 200),
        ("If-Match: *\r\n".into(), 200),
        (format!("If-Match: W/{tag}\r\n"), 412),
        ("If-Match: \"a\"\r\n".into(), 412),
        (format!("If-Unmodified-Since: {date}\r\n"), 200),
        (format!("If-Unmodified-Since: {before}\r\n"), 412),
        (format!("If-Match: \"a\"\r\nIf-None-Match: {tag}\r\n"), 412),
    ];
    for (fields, status) in &cases {
        let response = ask(&mut client, "/page.txt", fields);
        assert_eq!(response.status, *status, "{fields}");
        if *status == 304 {
            // Fields that identify the file stay, fields that describe the body are removed.
            assert_eq!(
                (response.header("ETag"), response.header("Last-Modified")),
                (Some(tag), Some(date)),
                "{fields}"
            );
            assert_eq!((response.header("Content-Length"), response.header("Content-Type")), (None, None), "{fields}");
        }
        if *status == 412 {
            assert_eq!(
                (response.header("ETag"), response.header("Content-Type")),
                (None, Some("text/html")),
                "{fields}"
            );
        }
    }
    // The condition is evaluated before the range.
    let response = ask(&mut client, "/page.txt", &format!("If-None-Match: {tag}\r\nRange: bytes=0-1\r\n"));
    assert_eq!(response.status, 304);
    server.stop();
}

fn settings_decide_about_conditions_and_ranges(driver: Driver) {
    let server = dated_files(
        driver,
        "location /untagged/ { alias %DIR%/files/; etag off; max_ranges 0; }
         location /before/ { alias %DIR%/files/; if_modified_since before; max_ranges 1; }
         location /never/ { alias %DIR%/files/; if_modified_since off; }
         location /missing { error_page 404 =200 /page.txt; }",
    );
    let mut client = server.connect();
    let response = ask(&mut client, "/untagged/page.txt", "Range: bytes=0-1\r\nIf-None-Match: \"3b9aca00-a\"\r\n");
    assert_eq!((response.status, response.header("ETag"), response.header("Accept-Ranges")), (200, None, None));
    let later = "If-Modified-Since: Sun, 09 Sep 2002 01:46:40 GMT\r\n";
    assert_eq!(ask(&mut client, "/before/page.txt", later).status, 304);
    assert_eq!(ask(&mut client, "/before/page.txt", "Range: bytes=0-1\r\n").text(), "01");
    assert_eq!(ask(&mut client, "/before/page.txt", "Range: bytes=0-1,3-4\r\n").text(), "0123456789");
    let same = format!("If-Modified-Since: {MODIFIED_TEXT}\r\n");
    assert_eq!(ask(&mut client, "/never/page.txt", &same).status, 200);
    assert_eq!(ask(&mut client, "/missing", "").text(), "0123456789");
    server.stop();
}

fn a_directory_without_its_slash_redirects(driver: Driver) {
    let setup = Setup::http(
        driver,
        "root %DIR%/files;
         server { listen %UNIX%; server_name first.example;
             location /named/ { alias %DIR%/files/; server_name_in_redirect on; }
             location /relative/ { alias %DIR%/files/; absolute_redirect off; } }
         server { listen %TCP%; location /portless/ { alias %DIR%/files/; port_in_redirect off; } }",
    );
    let server = setup.file("files/a b/index.html", "index").start();
    let location = |response: Response| {
        assert_eq!((response.status, response.header("Content-Type")), (301, Some("text/html")));
        response.header("Location").expect("a place to go to").to_owned()
    };
    assert_eq!(location(server.get("/a%20b")), "http://localhost/a%20b/");
    assert_eq!(location(server.get("/a%20b?c=d&e")), "http://localhost/a%20b/?c=d&e");
    assert_eq!(location(server.get("/named/a%20b")), "http://first.example/named/a%20b/");
    assert_eq!(location(server.get("/relative/a%20b")), "/relative/a%20b/");
    let address = server.directory.address(1);
    let mut client = server.connect_tcp(1);
    assert_eq!(location(client.get("/a%20b")), format!("http://localhost:{}/a%20b/", address.port()));
    assert_eq!(location(client.get("/portless/a%20b")), "http://localhost/portless/a%20b/");
    let nameless = client.ask("GET /a%20b HTTP/1.0\r\n\r\n");
    assert_eq!(location(nameless), format!("http://{address}/a%20b/"));
    assert_eq!(server.get("/a%20b/").text(), "index");
    server.stop();
}

fn unservable_file_gets_its_status(driver: Driver) {
    let setup = Setup::server(driver, "root %DIR%/files; location /quiet/ { log_not_found off; }");
    let server = setup
        .file("files/page", "a page")
        .file("files/secret", "")
        .file("files/closed/page", "")
        .unprivileged()
        .start();
    let files = server.directory.path().join("files");
    let forbid = |name: &str| fs::set_permissions(files.join(name), fs::Permissions::from_mode(0o000)).expect("ours");
    forbid("secret");
    forbid("closed");
    fs::create_dir(files.join("empty")).expect("a directory");
    symlink("page", files.join("link")).expect("a link");
    symlink("nowhere", files.join("broken")).expect("a link");
    symlink("circle", files.join("circle")).expect("a link");
    rustix::fs::mknodat(rustix::fs::CWD, files.join("fifo"), rustix::fs::FileType::Fifo, 0o666.into(), 0)
        .expect("a FIFO");
    let too_long = format!("/{}", "x".repeat(300));
    let cases = [
        ("/link", 200, ""),
        ("/missing", 404, "open() \"%/missing\" failed (2: No such file or directory)"),
        ("/missing/page", 404, "open() \"%/missing/page\" failed (2: No such file or directory)"),
        ("/missing/", 404, "\"%/missing/index.html\" is not found (2: No such file or directory)"),
        ("/page/more", 404, "open() \"%/page/more\" failed (20: Not a directory)"),
        ("/page/", 404, "\"%/page/index.html\" is not found (20: Not a directory)"),
        ("/broken", 404, "open() \"%/broken\" failed (2: No such file or directory)"),
        (&too_long, 404, "failed (36: File name too long)"),
        ("/quiet/missing", 404, ""),
        ("/fifo", 404, "\"%/fifo\" is not a regular file"),
        ("/circle", 403, "open() \"%/circle\" failed (40: Too many levels of symbolic links)"),
        ("/secret", 403, "open() \"%/secret\" failed (13: Permission denied)"),
        ("/closed/page", 403, "open() \"%/closed/page\" failed (13: Permission denied)"),
        ("/closed/", 403, "\"%/closed/index.html\" is forbidden (13: Permission denied)"),
        ("/empty/", 403, "directory index of \"%/empty/\" is forbidden"),
    ];
    let mut client = server.connect();
    for (path, status, message) in cases {
        let response = client.get(path);
        assert_eq!((response.status, response.header("Connection")), (status, Some("keep-alive")), "{path}");
        if !message.is_empty() {
            server.wait_logged(&message.replace('%', files.to_str().expect("text")));
        }
    }
    assert!(!server.log().contains("/quiet/missing"));
    // Allows an unprivileged user to remove it.
    fs::set_permissions(files.join("closed"), fs::Permissions::from_mode(0o700)).expect("ours");
    server.stop();
}

fn only_get_and_head_fetch_files(driver: Driver) {
    let setup = Setup::server(driver, "root %DIR%/files;");
    let server = setup.file("files/page", "a page").file("files/index.html", "an index").start();
    let mut client = server.connect();
    for method in ["POST", "PUT", "DELETE", "OPTIONS", "PATCH", "PROPFIND", "WHATEVER"] {
        for path in ["/page", "/"] {
            let response = client.ask(format!("{method} {path} HTTP/1.1\r\nHost: h\r\n\r\n"));
            assert_eq!((response.status, response.header("Connection")), (405, Some("keep-alive")), "{method} {path}");
        }
    }
    assert_eq!(client.get("/page").text(), "a page");
    assert_eq!(client.get("/").text(), "an index");
    server.stop();
}
