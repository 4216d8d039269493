//! Cache fills in progress: their readers, requests that wait for them or bypass them, and purges.

use std::path::{Path, PathBuf};

use crate::support::{Asked, Backend, Client, Directory, Driver, Response, Server, Setup, with_each_driver};

with_each_driver!(
    requests_wait_for_the_one_that_fetches_the_same,
    readers_of_a_fill_read_at_their_own_pace,
    a_response_is_stored_although_the_memory_that_workers_share_is_full,
    a_response_that_is_stored_is_found_although_an_earlier_one_is_still_coming,
    a_response_goes_into_the_cache_without_its_first_client,
    a_response_goes_into_the_cache_although_its_first_client_leaves_before_the_head,
    slow_first_client_delays_no_others,
    requests_for_uncacheable_responses_do_not_wait_for_each_other,
    a_request_that_has_waited_for_the_lock_timeout_is_answered_and_not_stored,
    a_request_passes_one_that_takes_longer_than_the_lock_age,
    a_response_that_is_cut_off_is_never_stored_as_whole,
    a_purge_during_a_fill_wins,
    a_purge_wins_over_every_request_that_was_sent_before_it,
    client_that_falls_behind_an_unstored_fill_goes_on_from_the_upstream,
    a_file_that_is_being_filled_is_read_without_writing_its_time_of_access,
);

/// Accepts a connection of the proxy and reads its request.
fn accept(backend: &Backend) -> (Client, Asked) {
    let mut behind = backend.accept();
    let asked = behind.request();
    (behind, asked)
}

fn by_hand(driver: Driver, backend: &Backend, more: &str) -> Server {
    setup_by_hand(driver, backend, more).start()
}

fn setup_by_hand(driver: Driver, backend: &Backend, more: &str) -> Setup {
    let text = "proxy_cache_path %DIR%/cache keys_zone=one:1m; proxy_cache_key $uri;
        proxy_cache_disk_timeout 60s; proxy_cache_lock_timeout 60s;
        server { listen %UNIX%; proxy_cache one; add_header X-Cache $upstream_cache_status always;
        location / { proxy_pass http://B; MORE } }";
    Setup::http(driver, &text.replace('B', backend.address()).replace("MORE", more))
}

/// Cache status and body of a response.
fn outcome(response: &Response) -> (&str, &str) {
    (response.header("X-Cache").unwrap_or("-"), response.text())
}

/// All entry files of a directory.
fn files_in(directory: &Path) -> Vec<PathBuf> {
    let files = std::fs::read_dir(directory).into_iter().flatten().flatten();
    files.filter(|file| !file.file_name().to_string_lossy().starts_with('.')).map(|file| file.path()).collect()
}

/// Status of a purge.
fn purge(server: &Server, path: &str) -> u16 {
    server.connect().ask(format!("GET {path} HTTP/1.1\r\nHost: a\r\nX-Purge: 1\r\n\r\n")).status
}

fn requests_wait_for_the_one_that_fetches_the_same(driver: Driver) {
    let backend = Backend::tcp();
    let server = by_hand(driver, &backend, "proxy_cache_lock on;");
    let mut clients: Vec<Client> = (0..5).map(|_| server.connect()).collect();
    clients[0].send("GET /a HTTP/1.1\r\nHost: a\r\n\r\n");
    let (mut behind, _) = accept(&backend);
    clients[1..].iter_mut().for_each(|client| client.send("GET /a HTTP/1.1\r\nHost: a\r\n\r\n"));
    behind.send("HTTP/1.1 200 OK\r\nCache-Control: max-age=60\r\nContent-Length: 2\r\n\r\nab");
    for client in &mut clients {
        assert_eq!(client.response().text(), "ab");
    }
    assert!(backend.is_idle());
    server.stop();
}

fn readers_of_a_fill_read_at_their_own_pace(driver: Driver) {
    let backend = Backend::tcp();
    let server = by_hand(driver, &backend, "proxy_cache_lock on;");
    let mut first = server.connect();
    first.send("GET /a HTTP/1.1\r\nHost: a\r\n\r\n");
    let (mut behind, _) = accept(&backend);
    let piece = vec![b'x'; 300_000];
    behind.send(
        "HTTP/1.1 200 OK\r\nCache-Control: max-age=60\r\nAccept-Ranges: bytes\r\nContent-Length: 900002\r\n\r\n<",
    );
    behind.send(&piece);
    assert_eq!(first.head().header("Content-Length"), Some("900002"));
    assert_eq!(first.take(300_001)[0], b'<');
    // A later client begins at the beginning, which is in the file or in memory.
    let mut second = server.connect();
    second.send("GET /a HTTP/1.1\r\nHost: a\r\n\r\n");
    assert_eq!(second.head().header("X-Cache"), Some("HIT"));
    assert_eq!(second.take(1), b"<");
    let mut third = server.connect();
    third.send("GET /a HTTP/1.1\r\nHost: a\r\nRange: bytes=900000-\r\n\r\n");
    behind.send(&piece);
    behind.send(&piece);
    behind.send(">");
    assert_eq!(first.take(600_001).last(), Some(&b'>'));
    assert_eq!(third.response().text(), "x>");
    assert_eq!(second.take(900_001).last(), Some(&b'>'));
    assert!(backend.is_idle());
    let stored = server.get("/a");
    assert_eq!((stored.header("X-Cache"), stored.body.len()), (Some("HIT"), 900_002));
    server.stop();
}

fn a_response_is_stored_although_the_memory_that_workers_share_is_full(driver: Driver) {
    let backend = Backend::tcp();
    let server = by_hand(driver, &backend, "} location = /limit { test_leases 64m 1000;");
    assert_eq!(server.get("/limit").status, 200);
    let mut first = server.connect();
    first.send("GET /a HTTP/1.1\r\nHost: a\r\n\r\n");
    let (mut behind, _) = accept(&backend);
    behind.send("HTTP/1.1 200 OK\r\nCache-Control: max-age=60\r\nContent-Length: 900000\r\n\r\n");
    assert_eq!(first.head().status, 200);
    for _ in 0..3 {
        behind.send(vec![b'x'; 300_000]);
        assert_eq!(first.take(300_000).last(), Some(&b'x'));
    }
    let stored = server.get("/a");
    assert_eq!((stored.header("X-Cache"), stored.body.len()), (Some("HIT"), 900_000));
    server.stop();
}

fn a_response_that_is_stored_is_found_although_an_earlier_one_is_still_coming(driver: Driver) {
    let (backend, directory) = (Backend::tcp(), Directory::new());
    let place = directory.path().display().to_string();
    let server = setup_by_hand(driver, &backend, "proxy_cache_bypass $arg_by;").replace("%DIR%/cache", &place).start();
    let mut first = server.connect();
    first.send("GET /a HTTP/1.1\r\nHost: a\r\n\r\n");
    let (mut behind, _) = accept(&backend);
    behind.send("HTTP/1.1 200 OK\r\nCache-Control: max-age=60\r\nContent-Length: 5\r\n\r\nfir");
    assert_eq!(first.head().status, 200);
    let mut second = server.connect();
    second.send("GET /a?by=1 HTTP/1.1\r\nHost: a\r\n\r\n");
    let (mut behind_second, _) = accept(&backend);
    behind_second.send("HTTP/1.1 200 OK\r\nCache-Control: max-age=60\r\nContent-Length: 6\r\n\r\nsecond");
    assert_eq!(outcome(&second.response()), ("BYPASS", "second"));
    let is_entry = |path: &PathBuf| path.file_name().is_some_and(|name| name.len() == 32);
    directory.wait_until("it is stored", |directory| files_in(directory.path()).iter().any(is_entry));
    assert_eq!(outcome(&server.get("/a")), ("HIT", "second"));
    behind.send("st");
    assert_eq!(first.take(5), b"first");
    assert_eq!(outcome(&server.get("/a")), ("HIT", "second"));
    server.stop();
}

fn a_response_goes_into_the_cache_without_its_first_client(driver: Driver) {
    let backend = Backend::tcp();
    let server = by_hand(driver, &backend, "");
    let mut first = server.connect();
    first.send("GET /a HTTP/1.1\r\nHost: a\r\n\r\n");
    let (mut behind, _) = accept(&backend);
    behind.send("HTTP/1.1 200 OK\r\nCache-Control: max-age=60\r\nContent-Length: 4\r\n\r\nab");
    assert_eq!(first.head().status, 200);
    drop(first);
    behind.send("cd");
    assert_eq!(server.get("/a").text(), "abcd");
    assert!(backend.is_idle());
    server.stop();
}

fn a_response_goes_into_the_cache_although_its_first_client_leaves_before_the_head(driver: Driver) {
    let backend = Backend::tcp();
    let setup = setup_by_hand(driver, &backend, "proxy_cache_lock on; } location = /looked { return 204;");
    let server = setup.replace("worker_processes 2", "worker_processes 1").start();
    let (mut first, mut second) = (server.connect(), server.connect());
    first.send("GET /a HTTP/1.1\r\nHost: a\r\n\r\n");
    let (mut behind, _) = accept(&backend);
    second.send("GET /a HTTP/1.1\r\nHost: a\r\n\r\n");
    drop(first);
    // The only worker has noticed that when it answers a later request.
    assert_eq!(server.get("/looked").status, 204);
    behind.send("HTTP/1.1 200 OK\r\nCache-Control: max-age=60\r\nContent-Length: 4\r\n\r\nabcd");
    assert_eq!(second.response().text(), "abcd");
    assert_eq!(outcome(&server.get("/a")), ("HIT", "abcd"));
    assert!(backend.is_idle());
    server.stop();
}

fn slow_first_client_delays_no_others(driver: Driver) {
    // More than the window, which the first client would read for many hours.
    const LENGTH: usize = 3 << 20;
    let backend = Backend::tcp();
    let server = by_hand(driver, &backend, "proxy_cache_lock on; if ($http_x_slow) { set $limit_rate 10; }");
    let (mut first, mut second) = (server.connect(), server.connect());
    first.send("GET /a HTTP/1.1\r\nHost: a\r\nX-Slow: 1\r\n\r\n");
    let (mut behind, _) = accept(&backend);
    second.send("GET /a HTTP/1.1\r\nHost: a\r\n\r\n");
    behind.send(format!("HTTP/1.1 200 OK\r\nCache-Control: max-age=60\r\nContent-Length: {LENGTH}\r\n\r\n"));
    assert_eq!(first.head().header("X-Cache"), Some("MISS"));
    behind.send(vec![b'x'; LENGTH]);
    assert_eq!(second.response().body.len(), LENGTH);
    let third = server.get("/a");
    assert_eq!((third.header("X-Cache"), third.body.len()), (Some("HIT"), LENGTH));
    assert!(backend.is_idle());
    drop(first);
    server.stop();
}

/// Responses that could not be stored are remembered: otherwise `proxy_cache_lock` would serialise their requests.
fn requests_for_uncacheable_responses_do_not_wait_for_each_other(driver: Driver) {
    let backend = Backend::tcp();
    let server = by_hand(driver, &backend, "proxy_cache_lock on;");
    let ask = || {
        let mut client = server.connect();
        client.send("GET /a HTTP/1.1\r\nHost: a\r\n\r\n");
        (client, accept(&backend).0)
    };
    let answer = |(client, behind): &mut (Client, Client)| {
        behind.send("HTTP/1.1 200 OK\r\nCache-Control: no-store\r\nContent-Length: 1\r\n\r\na");
        assert_eq!(outcome(&client.response()), ("MISS", "a"));
    };
    answer(&mut ask());
    // All requests reach the server before it answers any.
    let mut waiting: Vec<_> = (0..4).map(|_| ask()).collect();
    waiting.iter_mut().rev().for_each(answer);
    server.stop();
}

/// A second request for the same path is answered before the first one. Returns a function that answers the first one.
fn pass_the_first(server: &Server, backend: &Backend) -> impl FnOnce() {
    let ask = || {
        let mut client = server.connect();
        client.send("GET /a HTTP/1.1\r\nHost: a\r\n\r\n");
        (client, accept(backend).0)
    };
    let answer = |(mut client, mut behind): (Client, Client), body: &str| {
        behind.send(format!("HTTP/1.1 200 OK\r\nCache-Control: max-age=60\r\nContent-Length: 1\r\n\r\n{body}"));
        assert_eq!(outcome(&client.response()), ("MISS", body));
    };
    let (first, second) = (ask(), ask());
    answer(second, "b");
    move || answer(first, "a")
}

fn a_request_that_has_waited_for_the_lock_timeout_is_answered_and_not_stored(driver: Driver) {
    let backend = Backend::tcp();
    let server = by_hand(driver, &backend, "proxy_cache_lock on; proxy_cache_lock_timeout 100ms;");
    let answer_first = pass_the_first(&server, &backend);
    answer_first();
    assert_eq!(outcome(&server.get("/a")), ("HIT", "a"));
    assert!(backend.is_idle());
    server.stop();
}

fn a_request_passes_one_that_takes_longer_than_the_lock_age(driver: Driver) {
    let backend = Backend::tcp();
    let server = by_hand(driver, &backend, "proxy_cache_lock on; proxy_cache_lock_age 100ms;");
    let answer_first = pass_the_first(&server, &backend);
    // It counts: its answer is the stored one.
    assert_eq!(outcome(&server.get("/a")), ("HIT", "b"));
    answer_first();
    assert!(backend.is_idle());
    server.stop();
}

fn a_response_that_is_cut_off_is_never_stored_as_whole(driver: Driver) {
    let backend = Backend::tcp();
    let server = by_hand(driver, &backend, "proxy_cache_valid any 1m;");
    for head in ["Content-Length: 10\r\n\r\nab", "Transfer-Encoding: chunked\r\n\r\n2\r\nab\r\n"] {
        let mut client = server.connect();
        client.send("GET /a HTTP/1.1\r\nHost: a\r\n\r\n");
        let (mut behind, _) = accept(&backend);
        behind.send(format!("HTTP/1.1 200 OK\r\nCache-Control: max-age=60\r\n{head}"));
        assert_eq!(client.head().header("X-Cache"), Some("MISS"));
        drop(behind);
        client.read_to_end();
    }
    assert!(files_in(&server.directory.path().join("cache")).is_empty());
    server.stop();
}

fn a_purge_during_a_fill_wins(driver: Driver) {
    let backend = Backend::tcp();
    let server = by_hand(driver, &backend, "proxy_cache_purge $http_x_purge;");
    let mut first = server.connect();
    first.send("GET /a HTTP/1.1\r\nHost: a\r\n\r\n");
    let (mut behind, _) = accept(&backend);
    behind.send("HTTP/1.1 200 OK\r\nCache-Control: max-age=60\r\nContent-Length: 4\r\n\r\nab");
    assert_eq!(first.head().status, 200);
    assert_eq!(purge(&server, "/a"), 204);
    behind.send("cd");
    assert_eq!(first.take(4), b"abcd");
    let mut second = server.connect();
    second.send("GET /a HTTP/1.1\r\nHost: a\r\n\r\n");
    let (mut behind, _) = accept(&backend);
    behind.send("HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\ne");
    assert_eq!(outcome(&second.response()), ("MISS", "e"));
    server.stop();
}

fn a_purge_wins_over_every_request_that_was_sent_before_it(driver: Driver) {
    let backend = Backend::tcp();
    let server = by_hand(driver, &backend, "proxy_cache_purge $http_x_purge; proxy_cache_bypass $arg_by;");
    let get = |path: &str| {
        let mut client = server.connect();
        client.send(format!("GET {path} HTTP/1.1\r\nHost: a\r\n\r\n"));
        (client, accept(&backend).0)
    };
    let cacheable = "HTTP/1.1 200 OK\r\nCache-Control: max-age=60\r\nContent-Length: 1\r\n\r\na";
    let is_not_stored = |path: &str| {
        let (mut client, mut behind) = get(path);
        behind.send("HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nb");
        assert_eq!(outcome(&client.response()), ("MISS", "b"), "{path}");
    };
    // Before any of the answer has arrived: alone, bypassing a stored response, and for a key with variants.
    for (asked, path) in [("/alone", "/alone"), ("/passed?by=1", "/passed")] {
        let (mut client, mut behind) = get(asked);
        purge(&server, path);
        behind.send(cacheable);
        assert_eq!(client.response().text(), "a");
        is_not_stored(path);
    }
    let (mut client, mut behind) = get("/varies");
    purge(&server, "/varies");
    behind.send(cacheable.replace("Content-Length", "Vary: Accept\r\nContent-Length"));
    assert_eq!(client.response().text(), "a");
    is_not_stored("/varies");
    // Two requests that do not wait for each other.
    let (mut first, mut behind_first) = get("/both");
    let (mut second, mut behind_second) = get("/both");
    purge(&server, "/both");
    behind_first.send(cacheable);
    behind_second.send(cacheable);
    assert_eq!((first.response().text(), second.response().text()), ("a", "a"));
    is_not_stored("/both");
    server.stop();
}

fn client_that_falls_behind_an_unstored_fill_goes_on_from_the_upstream(driver: Driver) {
    const LENGTH: usize = 4 << 20;
    for tag in ["ETag: \"1\"\r\n", "ETag: W/\"1\"\r\n"] {
        let backend = Backend::tcp();
        let text = "proxy_cache_path %DIR%/cache keys_zone=one:1m max_size=100k; proxy_cache_key $uri;
            proxy_cache_disk_timeout 60s; proxy_buffer_size 16k;
            server { listen %UNIX%; proxy_cache one; add_header X-Cache $upstream_cache_status;
            location / { proxy_pass http://B; } }";
        let server = Setup::http(driver, &text.replace('B', backend.address())).start();
        let (mut fast, mut slow) = (server.connect(), server.connect());
        fast.send("GET /a HTTP/1.1\r\nHost: a\r\n\r\n");
        let (mut behind, _) = accept(&backend);
        // The length is only known at the end, so the lack of space is not known before.
        behind.send(format!("HTTP/1.1 200 OK\r\n{tag}Cache-Control: max-age=60\r\nConnection: close\r\n\r\n"));
        assert_eq!(fast.head().status, 200);
        slow.send("GET /a HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n");
        assert_eq!(slow.head().header("X-Cache"), Some("HIT"));
        let mut sender = behind.sender();
        let sending = std::thread::spawn(move || {
            sender.send(vec![b'x'; LENGTH]);
            sender.close_both();
        });
        let mut length = 0;
        while let Some(chunk) = fast.chunk() {
            length += chunk.len();
        }
        assert_eq!(length, LENGTH);
        sending.join().unwrap();
        drop(behind);
        let rest = std::thread::spawn(move || {
            let all = slow.read_to_end();
            // The body without the framing of chunks.
            all.iter().filter(|&&byte| byte == b'x').count()
        });
        if tag.starts_with("ETag: \"") {
            let (mut behind, asked) = accept(&backend);
            assert_eq!(asked.header("If-Range"), Some("\"1\""));
            let from: usize = asked.header("Range").unwrap()["bytes=".len()..].trim_end_matches('-').parse().unwrap();
            let (left, last) = (LENGTH - from, LENGTH - 1);
            let fields = format!("{tag}Content-Range: bytes {from}-{last}/{LENGTH}\r\nContent-Length: {left}");
            behind.send(format!("HTTP/1.1 206 Partial Content\r\n{fields}\r\nConnection: close\r\n\r\n"));
            behind.send(vec![b'x'; left]);
            behind.close_both();
            assert_eq!(rest.join().unwrap(), LENGTH);
        } else {
            assert!(rest.join().unwrap() < LENGTH);
            assert!(backend.is_idle());
        }
        server.stop();
    }
}

fn a_file_that_is_being_filled_is_read_without_writing_its_time_of_access(driver: Driver) {
    let backend = Backend::tcp();
    let server = by_hand(driver, &backend, "");
    let mut client = server.connect();
    client.send("GET /a HTTP/1.1\r\nHost: a\r\n\r\n");
    let (mut behind, _) = accept(&backend);
    behind.send("HTTP/1.1 200 OK\r\nCache-Control: max-age=60\r\nContent-Length: 300001\r\n\r\n");
    behind.send(vec![b'x'; 300_000]);
    assert_eq!(client.head().status, 200);
    let process = format!("/proc/{}", server.worker().as_raw_nonzero());
    let cache = server.directory.path().join("cache");
    let flags = || {
        let descriptors = std::fs::read_dir(format!("{process}/fd")).expect("it runs").flatten();
        let is_of_entry = |name: &std::ffi::OsStr| !name.as_encoded_bytes().starts_with(b".");
        let of_file = descriptors.filter(|descriptor| {
            let file = std::fs::read_link(descriptor.path()).unwrap_or_default();
            file.starts_with(&cache) && file.file_name().is_some_and(is_of_entry)
        });
        let infos = of_file.filter_map(|descriptor| {
            std::fs::read_to_string(format!("{process}/fdinfo/{}", descriptor.file_name().to_str()?)).ok()
        });
        let flags = |info: String| u32::from_str_radix(info.split_once("flags:\t")?.1.split_once('\n')?.0, 8).ok();
        infos.filter_map(flags).find(|flags| flags & libc::O_ACCMODE as u32 == libc::O_RDWR as u32)
    };
    let is_without = |flags: u32| flags & libc::O_NOATIME as u32 != 0;
    server.look_until("the file is written, and no access noted", || flags().is_some_and(is_without));
    behind.send("x");
    assert_eq!(client.take(300_001).last(), Some(&b'x'));
    server.stop();
}
