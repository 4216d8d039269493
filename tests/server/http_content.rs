//! Content that modules generate: directory listings, a random file, a picture of one pixel, and counters of
//! connections and requests.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::os::unix::fs::symlink;
use std::path::Path;
use std::time::{Duration, UNIX_EPOCH};

use crate::support::{Driver, Response, Server, Setup, with_each_driver};

with_each_driver!(
    a_directory_is_listed_as_nginx_lists_it,
    a_list_has_the_form_that_the_location_wants,
    times_in_a_list_are_local_if_that_is_wanted,
    only_directories_are_listed,
    lists_are_for_get_and_head,
    an_index_file_comes_before_the_list,
    a_random_file_answers_and_every_file_has_its_turn,
    a_random_index_takes_only_files,
    the_picture_is_a_gif_of_one_pixel,
    the_numbers_are_those_of_all_workers,
    connections_that_read_write_and_wait_are_told_apart,
    fields_of_a_response_keep_their_order_and_spelling,
    a_reason_phrase_survives_until_the_status_is_replaced,
);

/// Makes a directory with a file, a link to it, a directory, a dangling link, and names that need escaping.
fn fill(directory: &Path) {
    fs::create_dir_all(directory.join("sub<&>dir")).unwrap();
    for (name, length) in [("file", 3), ("b \"quoted\"", 20_000), ("a?b%", 0), (".hidden", 1), ("tab\tname", 1)] {
        let file = File::create(directory.join(name)).unwrap();
        file.set_len(length).unwrap();
        file.set_modified(UNIX_EPOCH + Duration::from_secs(1_000_000_000)).unwrap();
    }
    symlink("file", directory.join("link")).unwrap();
    symlink("nowhere", directory.join("zz")).unwrap();
}

/// Date in a listing after the names of files with a known time.
const FILE_TIME: &str = "09-Sep-2001 01:46";

fn a_directory_is_listed_as_nginx_lists_it(driver: Driver) {
    let server = Server::start(driver, "root %DIR%; autoindex on; location /rounded/ { autoindex_exact_size off; }");
    fill(&server.directory.path().join("list"));
    fill(&server.directory.path().join("rounded"));
    let response = server.get("/list/");
    assert_eq!((response.status, response.header("Content-Type")), (200, Some("text/html")));
    let lines: Vec<&str> = response.text().split_terminator("\r\n").collect();
    assert_eq!(
        lines[..4],
        [
            "<html>",
            "<head><title>Index of /list/</title></head>",
            "<body>",
            "<h1>Index of /list/</h1><hr><pre><a href=\"../\">../</a>",
        ]
    );
    let link =
        |href: &str, name: &str, width: usize| format!("<a href=\"{href}\">{name}</a>{}", " ".repeat(50 - width));
    assert!(lines[4].starts_with(&link("sub%3C%26%3Edir/", "sub&lt;&amp;&gt;dir/", 10)), "{}", lines[4]);
    assert!(lines[4].ends_with("                  -"), "{}", lines[4]);
    assert_eq!(
        lines[5..9],
        [
            format!("{} {FILE_TIME}                   0", link("a%3Fb%25", "a?b%", 4)),
            format!("{} {FILE_TIME}               20000", link("b%20%22quoted%22", "b &quot;quoted&quot;", 10)),
            format!("{} {FILE_TIME}                   3", link("file", "file", 4)),
            format!("{} {FILE_TIME}                   3", link("link", "link", 4)),
        ]
    );
    assert!(lines[9].starts_with(&link("tab%09name", "tab\tname", 8)));
    assert!(lines[10].starts_with(&link("zz", "zz", 2)) && lines[10].ends_with(" 7"), "{}", lines[10]);
    assert_eq!(lines[11..], ["</pre><hr></body>", "</html>"]);
    let rounded = server.get("/rounded/");
    assert!(rounded.text().contains(&format!(" {FILE_TIME}     20K\r\n")), "{}", rounded.text());
    assert!(rounded.text().contains(&format!(" {FILE_TIME}       3\r\n")), "{}", rounded.text());
    server.stop();
}

fn a_list_has_the_form_that_the_location_wants(driver: Driver) {
    let forms: String = ["json", "jsonp", "xml"]
        .iter()
        .map(|form| format!("location /{form}/ {{ alias %DIR%/list/; autoindex_format {form}; }}\n"))
        .collect();
    let server = Server::start(driver, &format!("autoindex on; {forms}"));
    let list = server.directory.path().join("list");
    fs::create_dir_all(&list).unwrap();
    let file = File::create(list.join("a\"\\b\n<")).unwrap();
    file.set_len(12).unwrap();
    file.set_modified(UNIX_EPOCH + Duration::from_secs(1_000_000_000)).unwrap();

    let expect = |path: &str, media_type: &str, text: &str| {
        let response = server.get(path);
        assert_eq!((response.status, response.header("Content-Type")), (200, Some(media_type)), "{path}");
        assert_eq!(response.text(), text, "{path}");
    };
    let json = "[\r\n{ \"name\":\"a\\\"\\\\b\\n<\", \"type\":\"file\", \"mtime\":\"Sun, 09 Sep 2001 01:46:40 GMT\", \
                \"size\":12 }\r\n]";
    expect("/json/", "application/json", json);
    expect("/jsonp/", "application/json", json);
    let call = format!("/* callback */\r\nshow.it({json});");
    expect("/jsonp/?callback=show.it", "application/javascript", &call);
    let xml = "<?xml version=\"1.0\"?>\r\n<list>\r\n<file mtime=\"2001-09-09T01:46:40Z\" size=\"12\">a&quot;\\b\n\
        &lt;</file>\r\n\
               </list>\r\n";
    expect("/xml/", "text/xml; charset=utf-8", xml);
    for callback in ["a()", "%3C", &"a".repeat(129)] {
        assert_eq!(server.get(&format!("/jsonp/?callback={callback}")).status, 400, "{callback}");
    }
    server.wait_logged("client sent invalid callback name: \"a()\"");
    server.wait_logged("client sent too long callback name: \"aaa");
    server.stop();
}

fn times_in_a_list_are_local_if_that_is_wanted(driver: Driver) {
    let setup = Setup::server(driver, "root %DIR%; autoindex on; location /local/ { autoindex_localtime on; }");
    let server = setup.environment("TZ", "XYZ5").start();
    fill(&server.directory.path().join("world"));
    fill(&server.directory.path().join("local"));
    assert!(server.get("/world/").text().contains(&format!(" {FILE_TIME} ")));
    assert!(server.get("/local/").text().contains(" 08-Sep-2001 20:46 "));
    server.stop();
}

fn only_directories_are_listed(driver: Driver) {
    let server =
        Setup::server(driver, "root %DIR%/files; autoindex on; index;").replace("index;", "").file("files/x", "");
    let server = server.start();
    let statuses = ["/nowhere/", "/x/", "/x"].map(|path| server.get(path).status);
    assert_eq!(statuses, [404, 404, 200]);
    server.stop();
}

fn lists_are_for_get_and_head(driver: Driver) {
    let server = Setup::server(driver, "root %DIR%/files; autoindex on;").file("files/x", "").start();
    let mut client = server.connect();
    let post = client.ask("POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 0\r\n\r\n");
    assert_eq!(post.status, 403);
    let get = client.get("/");
    let head = client.ask("HEAD / HTTP/1.1\r\nHost: h\r\n\r\n");
    assert_eq!((head.status, head.header("Content-Length")), (200, get.header("Content-Length")));
    server.stop();
}

fn an_index_file_comes_before_the_list(driver: Driver) {
    let setup = Setup::server(driver, "root %DIR%/files; autoindex on; location /off/ { autoindex off; }");
    let server = setup.file("files/index.html", "the index").file("files/sub/x", "").file("files/off/x", "").start();
    assert_eq!(server.get("/").text(), "the index");
    assert!(server.get("/sub/").text().contains("href=\"x\""));
    assert_eq!(server.get("/off/").status, 403);
    server.stop();
}

fn a_random_file_answers_and_every_file_has_its_turn(driver: Driver) {
    let files = ["one", "two", "three"];
    let setup = Setup::server(driver, "location / { root %DIR%/files; random_index on; }");
    let server = files.iter().fold(setup, |setup, name| setup.file(&format!("files/{name}"), name)).start();
    let mut client = server.connect();
    let mut seen = BTreeSet::new();
    // The probability that one of three files is missing after 200 requests is 10^-35.
    for _ in 0..200 {
        seen.insert(client.get("/").text().to_owned());
        if seen.len() == files.len() {
            break;
        }
    }
    assert_eq!(seen, files.map(str::to_owned).into());
    server.stop();
}

fn a_random_index_takes_only_files(driver: Driver) {
    let setup = Setup::server(driver, "location / { root %DIR%/files; random_index on; }");
    let server = setup.file("files/sub/.hidden", "hidden").file("files/other/deep/x", "").start();
    symlink("nowhere", server.directory.path().join("files/other/link")).unwrap();
    let statuses = ["/sub/", "/other/", "/missing/"].map(|path| server.get(path).status);
    assert_eq!(statuses, [403, 403, 404]);
    server.stop();
}

fn the_picture_is_a_gif_of_one_pixel(driver: Driver) {
    let server = Server::start(driver, "location / { empty_gif; }");
    let mut client = server.connect();
    let response = client.get("/anything");
    assert_eq!((response.status, response.header("Content-Type")), (200, Some("image/gif")));
    assert_eq!(response.header("Last-Modified"), Some("Mon, 28 Sep 1970 06:00:00 GMT"));
    assert_eq!((response.body.len(), &response.body[..10]), (43, &b"GIF89a\x01\0\x01\0"[..]));
    assert_eq!(client.ask("POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 0\r\n\r\n").status, 405);
    let fields = "If-Modified-Since: Mon, 28 Sep 1970 06:00:00 GMT\r\n";
    assert_eq!(client.ask(format!("GET / HTTP/1.1\r\nHost: h\r\n{fields}\r\n")).status, 304);
    server.stop();
}

/// Numbers of a `stub_status` answer, in the order of the text.
fn numbers(response: &Response) -> Vec<u64> {
    response.text().split_whitespace().filter_map(|word| word.parse().ok()).collect()
}

fn the_numbers_are_those_of_all_workers(driver: Driver) {
    let server = Server::start(driver, "location /status { stub_status; } location / { return 200 ok; }");
    for _ in 0..10 {
        server.get("/");
    }
    let mut client = server.connect();
    let first = client.get("/status");
    assert_eq!(first.header("Content-Type"), Some("text/plain"));
    let [_, accepted, handled, requests, ..] = numbers(&first)[..] else { panic!("{}", first.text()) };
    assert_eq!((accepted, handled, requests), (11, 11, 11));
    assert_eq!(numbers(&client.get("/status"))[3], 12);
    assert_eq!(client.ask("POST /status HTTP/1.1\r\nHost: h\r\nContent-Length: 0\r\n\r\n").status, 405);
    server.stop();
}

fn connections_that_read_write_and_wait_are_told_apart(driver: Driver) {
    let variables = "$connections_active $connections_reading $connections_writing $connections_waiting";
    let text = format!("location /status {{ stub_status; }} location / {{ return 200 \"{variables}\"; }}");
    let server = Setup::server(driver, &text).replace("worker_processes 2", "worker_processes 1").start();
    let mut waiting = server.connect();
    waiting.get("/");
    let mut reading = server.connect();
    reading.send("GET / HTTP/1.1\r\nHost: ");
    let mut client = server.connect();
    // The kernel decides when the worker notices the connection that is being read.
    let status = loop {
        let status = client.get("/status");
        if numbers(&status)[4] == 1 {
            break status;
        }
    };
    assert!(
        status.text().starts_with("Active connections: 3 \nserver accepts handled requests\n 3 3 "),
        "{}",
        status.text()
    );
    assert!(status.text().ends_with(" \nReading: 1 Writing: 1 Waiting: 1 \n"), "{}", status.text());
    assert_eq!(client.get("/").text(), "3 1 1 1");
    reading.send("h\r\n\r\n");
    assert_eq!(reading.response().text(), "3 0 1 2");
    // An incomplete head does not count for ever.
    reading.send("GET / HTTP/1.1\r\n");
    while numbers(&client.get("/status"))[4] != 1 {}
    drop(reading);
    while numbers(&client.get("/status"))[4] != 0 {}
    server.stop();
}

fn fields_of_a_response_keep_their_order_and_spelling(driver: Driver) {
    let long = "x".repeat(300);
    let locations = format!(
        "location / {{ add_header set-COOKIE own; gzip on; gzip_min_length 0; gzip_types *; add_header X-Long {long};
         test_head 200 OK set-cookie:a=1 x-LOWER:1 SET-COOKIE:b=2 vary:Accept-Encoding X-Long:{long}
         server:somebody Date:yesterday content-encoding:br Set-Cookie:a=1; }}"
    );
    let server = Server::start(driver, &locations);
    let response = server.connect().ask("GET / HTTP/1.1\r\nHost: h\r\nAccept-Encoding: gzip\r\n\r\n");
    assert_eq!((response.status, response.text()), (200, "hello"));
    let fields: Vec<(&str, &str)> =
        response.headers.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
    assert_eq!(
        fields,
        [
            ("Content-Length", "5"),
            ("Connection", "keep-alive"),
            ("set-cookie", "a=1"),
            ("x-LOWER", "1"),
            ("SET-COOKIE", "b=2"),
            ("vary", "Accept-Encoding"),
            ("X-Long", &long),
            ("server", "somebody"),
            ("Date", "yesterday"),
            ("content-encoding", "br"),
            ("Set-Cookie", "a=1"),
            ("set-COOKIE", "own"),
            ("X-Long", &long),
        ]
    );
    server.stop();
}

fn a_reason_phrase_survives_until_the_status_is_replaced(driver: Driver) {
    let locations = "location / { test_head 404 'Gone Fishing' X-A:1; }
        location /empty { test_head 200 ''; } location /unknown { test_head 299 'Quite Fine'; }
        location /ends { test_head 200 'one\\r\\nX-B: 2'; }
        location /replaced { error_page 404 =202 /200; return 404; } location /200 { test_head 200 Fine; }
        location /page { error_page 404 /404; return 404; } location /404 { test_head 404 Own; }";
    let server = Server::start(driver, locations);
    let mut client = server.connect();
    let cases = [
        ("/", 404, "Gone Fishing"),
        ("/empty", 200, ""),
        ("/unknown", 299, "Quite Fine"),
        // The value cannot end its line.
        ("/ends", 200, "one  X-B: 2"),
        // An error page of the server replaces it.
        ("/?intercept", 404, "Not Found"),
        ("/replaced", 202, "Accepted"),
        ("/page", 404, "Not Found"),
    ];
    for (target, status, reason) in cases {
        let response = client.get(target);
        assert_eq!((response.status, &*response.reason), (status, reason), "{target}");
        assert_eq!(response.header("X-B"), None);
    }
    server.stop();
}
