//! `limit_rate` and `limit_rate_after`: the rate of responses. Only the upper bound of the rate is measured.

use std::time::{Duration, Instant};

use crate::support::{Driver, Server, Setup, with_each_driver};

with_each_driver!(
    a_response_takes_the_seconds_that_its_rate_wants,
    bytes_before_the_limit_are_sent_at_once,
    the_rate_may_depend_on_the_request,
    heads_and_answers_without_a_body_never_wait,
    a_client_that_leaves_a_slow_response_ends_it,
);

const LENGTH: usize = 50_000;

fn server(driver: Driver, text: &str) -> Server {
    Setup::server(driver, &format!("root %DIR%/files; {text}")).file("files/data", vec![b'x'; LENGTH]).start()
}

/// The time that the whole response takes.
#[track_caller]
fn time_for(server: &Server, path: &str) -> Duration {
    let begin = Instant::now();
    let response = server.get(path);
    assert_eq!((response.status, response.body.len()), (200, LENGTH), "{path}");
    assert!(response.body.iter().all(|&byte| byte == b'x'));
    begin.elapsed()
}

/// At 40k a second 50,000 bytes take one second more than the first. The worker's clock stands still within a turn of
/// its loop: if that turn was delayed, less time may have passed for the client.
const SECOND: Duration = Duration::from_millis(500);

fn a_response_takes_the_seconds_that_its_rate_wants(driver: Driver) {
    let text = "x".repeat(4000);
    let server = server(
        driver,
        &format!(
            "limit_rate 40k; location /sendfile/ {{ alias %DIR%/files/; sendfile on; }} \
             location /bytes {{ limit_rate 3k; return 200 {text}; }}"
        ),
    );
    assert!(time_for(&server, "/data") >= SECOND);
    assert!(time_for(&server, "/sendfile/data") >= SECOND);
    let begin = Instant::now();
    assert_eq!(server.get("/bytes").body.len(), 4000);
    assert!(begin.elapsed() >= SECOND);
    server.stop();
}

fn bytes_before_the_limit_are_sent_at_once(driver: Driver) {
    let server = server(
        driver,
        "limit_rate 1; limit_rate_after 51k; location /later/ \
         { alias %DIR%/files/; limit_rate 20k; limit_rate_after 20k; }",
    );
    // At one byte a second it would take most of a day.
    time_for(&server, "/data");
    assert!(time_for(&server, "/later/data") >= SECOND);
    server.stop();
}

fn the_rate_may_depend_on_the_request(driver: Driver) {
    let server = server(driver, "limit_rate $arg_rate; limit_rate_after $arg_after; add_header X-Rate $limit_rate;");
    assert!(time_for(&server, "/data?rate=40k") >= SECOND);
    for path in ["/data", "/data?rate=0", "/data?rate=1&after=1m", "/data?rate=nonsense"] {
        time_for(&server, path);
    }
    server.wait_logged("invalid size \"nonsense\"");
    server.stop();
}

fn heads_and_answers_without_a_body_never_wait(driver: Driver) {
    let server = server(driver, "limit_rate 1; location /empty { return 204; }");
    let mut client = server.connect();
    for _ in 0..3 {
        assert_eq!(client.ask("HEAD /data HTTP/1.1\r\nHost: h\r\n\r\n").header("Content-Length"), Some("50000"));
        assert_eq!(client.get("/empty").status, 204);
    }
    server.stop();
}

fn a_client_that_leaves_a_slow_response_ends_it(driver: Driver) {
    let server = server(driver, "limit_rate 10; limit_rate_after 1k;");
    let mut client = server.connect();
    client.send("GET /data HTTP/1.1\r\nHost: h\r\n\r\n");
    assert_eq!(client.head().status, 200);
    drop(client);
    server.directory.wait_line("access.log", "GET /data");
    server.stop();
}
