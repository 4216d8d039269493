//! The limit of leased memory: when it is reached, new requests are rejected, requests in flight are served, and the
//! server recovers. A directive of `test_hooks.rs` lowers the limit, which clients then reach as they would otherwise.

use rustix::process::Signal;

use crate::support::{Client, Driver, Server, Setup, with_each_driver};

with_each_driver!(
    at_the_limit_new_requests_get_503_and_the_others_are_served,
    above_the_limit_connections_are_closed_and_the_rest_is_answered,
    upload_that_gets_no_memory_is_refused_and_logged,
);

/// The limit that `/limit` sets.
const LIMIT: usize = 1 << 20;
/// A request head with this many fields holds a lease of 64 KiB, because it does not fit into one of 20 KiB: 16 such
/// leases reach the limit, and 20 are the most ever given out.
const FIELDS: usize = 3;
const FIELD_BYTES: usize = 10_000;
const FILE_BYTES: usize = 3 << 20;

fn start(driver: Driver) -> Server {
    let text = "large_client_header_buffers 4 16k; client_max_body_size 0; root %DIR%/files;
        location = /hello { return 200 hello; }
        location = /limit { test_leases 1m; }
        location = /count { test_count_body; }
        location = /store { client_body_buffer_size 4m; test_store_body; }";
    let setup = Setup::server(driver, text).replace("worker_processes 2;", "worker_processes 1;");
    setup.file("files/file", contents()).start()
}

fn contents() -> Vec<u8> {
    (0..FILE_BYTES as u32).map(|number| (number.wrapping_mul(2_654_435_761) >> 24) as u8).collect()
}

/// Connections that have been accepted.
#[track_caller]
fn connect_many(server: &Server, count: usize) -> Vec<Client> {
    let mut clients: Vec<_> = (0..count).map(|_| server.connect()).collect();
    clients.iter_mut().for_each(|client| assert_eq!(client.get("/hello").text(), "hello"));
    clients
}

/// Sends most of a request, for which the server holds memory until the rest arrives.
fn begin_request(client: &mut Client) {
    let field = format!("\r\nX: {}", "x".repeat(FIELD_BYTES));
    client.send(format!("GET /hello HTTP/1.1\r\nHost: h{}", field.repeat(FIELDS)));
}

/// Sends the rest of a request; returns `None` if the connection is closed without a response.
fn end_request(client: &mut Client) -> Option<u16> {
    // The write may fail if the connection was closed.
    let _ = client.try_send("\r\nConnection: close\r\n\r\n");
    let received = client.read_to_end();
    let answer = String::from_utf8_lossy(&received);
    let status = answer.strip_prefix("HTTP/1.1 ")?.get(..3)?;
    Some(status.parse().expect("a status"))
}

fn at_the_limit_new_requests_get_503_and_the_others_are_served(driver: Driver) {
    let mut server = start(driver);
    let (mut idle, mut holders) = (connect_many(&server, 20), Vec::new());
    let mut kept = server.connect();
    let mut download = server.connect();
    download.send("GET /file HTTP/1.1\r\nHost: h\r\n\r\n");
    assert_eq!(download.head().status, 200);
    let mut upload = server.connect();
    let head =
        format!("POST /count HTTP/1.1\r\nHost: h\r\nContent-Length: {FILE_BYTES}\r\nExpect: 100-continue\r\n\r\n");
    assert_eq!(upload.ask(head).status, 100);
    assert_eq!(kept.get("/limit").text(), LIMIT.to_string());

    reach_limit(&mut kept, &mut idle, &mut holders);
    let refused = kept.get("/hello");
    assert!(refused.text().contains("503 Service Temporarily Unavailable"));
    server.wait_logged("the worker's memory for buffers is exhausted, client: ");
    assert!(server.log().contains("[alert]"));
    // The accept of this connection was pending while there was memory; no further one is accepted.
    assert_eq!(server.get("/hello").status, 503);
    server.wait_logged("the memory for buffers is exhausted, accepting pauses");
    let mut waiting = server.connect();
    waiting.send("GET /hello HTTP/1.1\r\nHost: h\r\n\r\n");

    assert!(download.take(FILE_BYTES) == contents());
    upload.send(contents());
    let counted = upload.response();
    assert_eq!((counted.status, counted.text().split(' ').next()), (200, Some(&*FILE_BYTES.to_string())));
    // The memory of these two requests is free again.
    reach_limit(&mut kept, &mut idle, &mut holders);
    assert_eq!((download.get("/hello").status, upload.get("/hello").status), (503, 503));

    let answers: Vec<_> = holders.iter_mut().map(end_request).collect();
    assert!(answers.iter().all(|answer| matches!(answer, Some(200 | 503))), "{answers:?}\n{server}");
    assert_eq!((answers.first(), answers.last()), (Some(&Some(503)), Some(&Some(200))), "{answers:?}");
    // Accepting resumed when memory was free; whether any was left for this request is up to chance.
    assert!(matches!(waiting.response().status, 200 | 503));
    for client in [&mut kept, &mut download, &mut upload, &mut server.connect()] {
        assert_eq!(client.get("/hello").text(), "hello");
    }
    server.end(Signal::TERM);
}

/// Begins one request after another until the limit is reached.
#[track_caller]
fn reach_limit(asker: &mut Client, idle: &mut Vec<Client>, holders: &mut Vec<Client>) {
    while asker.get("/hello").status == 200 {
        let mut holder = idle.pop().expect("the limit is reached with fewer");
        begin_request(&mut holder);
        holders.push(holder);
    }
    assert_eq!(asker.get("/hello").status, 503);
}

fn above_the_limit_connections_are_closed_and_the_rest_is_answered(driver: Driver) {
    let mut server = start(driver);
    let mut clients = connect_many(&server, 100);
    assert_eq!(clients[0].get("/limit").text(), LIMIT.to_string());
    clients.iter_mut().for_each(begin_request);
    server.wait_logged("the worker's memory for buffers is exhausted, a connection is closed");
    let answers: Vec<_> = clients.iter_mut().map(end_request).collect();
    assert!(answers.iter().all(|answer| matches!(answer, None | Some(200 | 503))), "{answers:?}");
    let answered = answers.iter().flatten().count();
    assert!((16..100).contains(&answered), "{answered}\n{server}");
    assert_eq!(server.get("/hello").text(), "hello");
    server.end(Signal::TERM);
}

fn upload_that_gets_no_memory_is_refused_and_logged(driver: Driver) {
    let mut server = start(driver);
    let mut other = server.connect();
    assert_eq!(other.get("/limit").text(), LIMIT.to_string());
    let chunk = format!("{LIMIT:x}\r\n{}\r\n", "x".repeat(LIMIT));
    for framed in [
        format!("Content-Length: {}\r\n\r\n{}", 2 * LIMIT, "x".repeat(2 * LIMIT)),
        format!("Transfer-Encoding: chunked\r\n\r\n{}0\r\n\r\n", chunk.repeat(2)),
    ] {
        let mut upload = server.connect();
        upload.send(format!("POST /store HTTP/1.1\r\nHost: h\r\n{framed}"));
        assert_eq!(upload.response().status, 503, "{server}");
        server.wait_logged("request: \"POST /store HTTP/1.1\"");
        assert!(server.log().contains("[alert]") && !server.log().contains("[crit]"), "{server}");
        // The memory of the rejected upload is free again.
        let stored = other.ask(format!(
            "POST /store HTTP/1.1\r\nHost: h\r\nContent-Length: {}\r\n\r\n{}",
            LIMIT / 2,
            "x".repeat(LIMIT / 2)
        ));
        assert!(stored.text().starts_with(&format!("{} memory ", LIMIT / 2)), "{server}");
    }
    server.end(Signal::TERM);
}
