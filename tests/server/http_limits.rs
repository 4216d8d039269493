//! Limits over real sockets: rate of requests, number of connections, and minimum rate of a body.

use std::time::{Duration, Instant};

use crate::support::{Client, Driver, Server, Setup, http_configuration, with_each_driver};

with_each_driver!(
    requests_over_the_rate_are_refused,
    requests_over_the_rate_are_only_counted_in_a_dry_run,
    requests_within_the_burst_wait_their_turn,
    a_burst_may_pass_at_once_and_the_rest_wait,
    the_strictest_of_several_rates_counts,
    requests_without_a_key_have_no_limit,
    a_request_is_judged_once,
    a_client_that_leaves_waits_no_longer,
    so_many_requests_may_be_under_way_and_no_more,
    requests_under_way_are_only_counted_in_a_dry_run,
    a_client_that_leaves_gives_its_place_back,
    a_panic_gives_its_place_back,
    a_full_zone_forgets_old_keys,
    zones_go_on_over_a_reload,
    a_zone_of_another_size_begins_anew,
    a_zone_keeps_its_key_over_a_reload,
    a_zone_that_was_removed_comes_back_as_a_new_one,
    a_body_that_comes_too_slowly_gets_408,
);

/// A server with locations below `%DIR%/html` that logs the verdicts of both limits to `%DIR%/verdicts.log`.
fn block(zones: &str, text: &str) -> String {
    format!(
        "log_format verdicts '$uri $status $limit_req_status $limit_conn_status';
         access_log %DIR%/access.log; access_log %DIR%/verdicts.log verdicts;
         {zones}
         root %DIR%/html;
         server {{ listen %UNIX%; {text} }}"
    )
}

fn setup(driver: Driver, zones: &str, text: &str) -> Setup {
    let setup = Setup::http(driver, &block(zones, text));
    ["f", "a/f", "b/f", "d/f"].into_iter().fold(setup, |setup, path| setup.file(&format!("html/{path}"), path))
}

#[track_caller]
fn statuses<const N: usize>(client: &mut Client, paths: [&str; N]) -> [u16; N] {
    paths.map(|path| client.get(path).status)
}

#[track_caller]
fn wait_verdict(server: &Server, line: &str) {
    server.directory.wait_line("verdicts.log", line);
}

const BY_ARG: &str = "limit_req_zone $arg_k zone=one:1m rate=1r/m;";

fn requests_over_the_rate_are_refused(driver: Driver) {
    let server = setup(
        driver,
        BY_ARG,
        "location / { limit_req zone=one; }
         location /a/ { limit_req zone=one burst=2 nodelay; limit_req_status 429; limit_req_log_level notice; }",
    )
    .start();
    let mut client = server.connect();
    assert_eq!(statuses(&mut client, ["/f?k=1", "/f?k=1", "/f?k=2", "/f?k=2"]), [200, 503, 200, 503]);
    assert_eq!(statuses(&mut client, ["/a/f?k=3"; 5]), [200, 200, 200, 429, 429]);
    server.wait_logged("[error]");
    server.wait_logged(" by zone \"one\", client: unix:, server: , request: \"GET /f?k=1 HTTP/1.1\"");
    server.wait_logged("limiting requests, excess: ");
    server.wait_logged("[notice]");
    wait_verdict(&server, "/f 200 PASSED -");
    wait_verdict(&server, "/f 503 REJECTED -");
    wait_verdict(&server, "/a/f 429 REJECTED -");
    server.stop();
}

fn requests_over_the_rate_are_only_counted_in_a_dry_run(driver: Driver) {
    let server = setup(
        driver,
        BY_ARG,
        "limit_req_dry_run on; location / { limit_req zone=one; } location /a/ { limit_req zone=one burst=5; }",
    )
    .start();
    let mut client = server.connect();
    assert_eq!(statuses(&mut client, ["/f?k=1", "/f?k=1", "/a/f?k=1"]), [200, 200, 200]);
    server.wait_logged("limiting requests, dry run, excess: ");
    server.wait_logged("delaying request, dry run, excess: ");
    wait_verdict(&server, "/f 200 REJECTED_DRY_RUN -");
    wait_verdict(&server, "/a/f 200 DELAYED_DRY_RUN -");
    server.stop();
}

/// The worker's clock stands still within a turn of its loop: if a turn is delayed, times may be this much shorter.
const SLACK: Duration = Duration::from_millis(100);

fn requests_within_the_burst_wait_their_turn(driver: Driver) {
    let zones = "limit_req_zone $arg_k zone=one:1m rate=5r/s;";
    let server = setup(driver, zones, "location / { limit_req zone=one burst=5; }").start();
    let mut client = server.connect();
    let asked = Instant::now();
    // All at once, so that none comes too late to wait.
    client.send("GET /f?k=1 HTTP/1.1\r\nHost: h\r\n\r\n".repeat(3));
    for number in 0..3 {
        assert_eq!(client.response().status, 200);
        let due = number * Duration::from_millis(200);
        assert!(asked.elapsed() + SLACK >= due, "number {number} after {:?}", asked.elapsed());
    }
    let line = server.wait_logged("delaying request, excess: ");
    assert!(line.contains("[warn]") && line.contains(", by zone \"one\", client: unix:"), "{line}");
    wait_verdict(&server, "/f 200 DELAYED -");
    server.stop();
}

fn a_burst_may_pass_at_once_and_the_rest_wait(driver: Driver) {
    let server = setup(driver, BY_ARG, "location / { limit_req zone=one burst=3 delay=2; }").start();
    let mut client = server.connect();
    assert_eq!(statuses(&mut client, ["/f?k=1"; 3]), [200, 200, 200]);
    // The next request would wait for a minute; the one after it exceeds the burst.
    let mut waiting = server.connect();
    waiting.send("GET /f?k=1 HTTP/1.1\r\nHost: h\r\n\r\n");
    server.wait_logged("delaying request, excess: ");
    assert_eq!(statuses(&mut client, ["/f?k=1"]), [503]);
    server.stop();
}

fn the_strictest_of_several_rates_counts(driver: Driver) {
    let zones = "limit_req_zone $arg_k zone=fast:1m rate=1000r/s; limit_req_zone $arg_s zone=slow:1m rate=1r/m;";
    let server = setup(
        driver,
        zones,
        "location / { limit_req zone=fast burst=100 nodelay; limit_req zone=slow; }
         location /a/ { limit_req zone=slow burst=1 nodelay; limit_req zone=fast burst=100 nodelay; }",
    )
    .start();
    let mut client = server.connect();
    assert_eq!(statuses(&mut client, ["/f?k=1&s=1", "/f?k=1&s=1", "/f?k=1", "/f?s=1"]), [200, 503, 200, 503]);
    // A request that one zone rejects counts in none.
    assert_eq!(statuses(&mut client, ["/a/f?k=1&s=2"; 3]), [200, 200, 503]);
    let line = server.wait_logged("limiting requests");
    assert!(line.contains("by zone \"slow\""), "{line}");
    server.stop();
}

fn requests_without_a_key_have_no_limit(driver: Driver) {
    let zones = format!("{BY_ARG} limit_conn_zone $arg_k zone=conn:1m;");
    let server = setup(driver, &zones, "location / { limit_req zone=one; limit_conn conn 1; }").start();
    let mut client = server.connect();
    assert_eq!(statuses(&mut client, ["/f", "/f?k=", "/f"]), [200, 200, 200]);
    wait_verdict(&server, "/f 200 - -");
    // A key that is too long counts as none.
    let long = format!("/f?k={}", "x".repeat(256));
    assert_eq!(statuses(&mut client, [&long]), [200]);
    server.wait_logged("the value of the \"$arg_k\" key is more than 255 bytes: \"xxx");
    server.stop();
}

fn a_request_is_judged_once(driver: Driver) {
    let server = setup(
        driver,
        BY_ARG,
        "location / { limit_req zone=one; error_page 404 /a/f; }
         location /a/ { limit_req zone=one; }",
    )
    .start();
    let page = server.get("/missing?k=1");
    assert_eq!((page.status, page.text()), (404, "a/f"));
    assert_eq!(server.get("/a/f?k=1").status, 503);
    server.stop();
}

fn a_client_that_leaves_waits_no_longer(driver: Driver) {
    let server = setup(driver, BY_ARG, "location / { limit_req zone=one burst=5; }").start();
    assert_eq!(server.get("/f?k=1").status, 200);
    let mut client = server.connect();
    client.send("GET /f?k=1 HTTP/1.1\r\nHost: h\r\n\r\n");
    server.wait_logged("delaying request");
    drop(client);
    server.wait_logged("client prematurely closed connection, client: unix:");
    wait_verdict(&server, "/f 499 DELAYED -");
    server.stop();
}

/// A request to `/a/f` waits for an hour and holds its place; `/b/f` shares the limit.
const HELD: &str = "location /a/ { limit_conn conn 1; auth_basic realm; auth_basic_user_file none; auth_delay 1h; }
    location /b/ { limit_conn conn 1; }
    location /d/ { limit_conn conn 2; limit_conn_status 429; limit_conn_log_level info; }";

const ONE_KEY: &str = "limit_conn_zone $server_port$arg_k zone=conn:1m; limit_conn_zone all zone=all:32k;";

#[track_caller]
fn hold(server: &Server) -> Client {
    let mut client = server.connect();
    client.send("GET /a/f?k=1 HTTP/1.1\r\nHost: h\r\n\r\n");
    server.wait_logged("delaying unauthorized request");
    client
}

fn so_many_requests_may_be_under_way_and_no_more(driver: Driver) {
    let server = setup(driver, ONE_KEY, HELD).start();
    let mut client = server.connect();
    assert_eq!(statuses(&mut client, ["/b/f?k=3"; 3]), [200, 200, 200]);
    let _held = hold(&server);
    assert_eq!(statuses(&mut client, ["/b/f?k=1", "/b/f?k=2", "/d/f?k=1", "/b/f?k=1"]), [503, 200, 200, 503]);
    let line =
        server.wait_logged("limiting connections by zone \"conn\", client: unix:, server: , request: \"GET /b/f?k=1");
    assert!(line.contains("[error]"), "{line}");
    wait_verdict(&server, "/b/f 200 - PASSED");
    wait_verdict(&server, "/b/f 503 - REJECTED");
    server.stop();
}

fn requests_under_way_are_only_counted_in_a_dry_run(driver: Driver) {
    let server = setup(driver, ONE_KEY, &format!("limit_conn_dry_run on; {HELD}")).start();
    let _held = hold(&server);
    assert_eq!(server.get("/b/f?k=1").status, 200);
    server.wait_logged("limiting connections, dry run, by zone \"conn\"");
    wait_verdict(&server, "/b/f 200 - REJECTED_DRY_RUN");
    server.stop();
}

fn a_client_that_leaves_gives_its_place_back(driver: Driver) {
    let server = setup(driver, ONE_KEY, HELD).start();
    let held = hold(&server);
    assert_eq!(server.get("/b/f?k=1").status, 503);
    drop(held);
    wait_verdict(&server, "/a/f 499 - PASSED");
    assert_eq!(server.get("/b/f?k=1").status, 200);
    server.stop();
}

fn a_panic_gives_its_place_back(driver: Driver) {
    let mut server = setup(
        driver,
        ONE_KEY,
        "limit_conn conn 1;
         location = /now { test_panic; }
         location = /later { test_panic waiting; }
         location / { }",
    )
    .start();
    for path in ["/now", "/later"] {
        let mut client = server.connect();
        client.send(format!("GET {path} HTTP/1.1\r\nHost: h\r\n\r\n"));
        client.assert_closed();
        assert_eq!(server.get("/f").status, 200, "after {path}");
    }
    server.end(rustix::process::Signal::TERM);
}

fn a_full_zone_forgets_old_keys(driver: Driver) {
    let zones = "limit_req_zone $arg_k zone=one:32k rate=1r/m;";
    let server = setup(driver, zones, "location / { limit_req zone=one; }").start();
    let mut client = server.connect();
    assert_eq!(statuses(&mut client, ["/f?k=first"; 2]), [200, 503]);
    for number in 0..600 {
        assert_eq!(client.get(&format!("/f?k={number}")).status, 200, "{number}");
    }
    assert_eq!(statuses(&mut client, ["/f?k=599", "/f?k=first"]), [503, 200]);
    server.stop();
}

const BOTH: &str = "location / { limit_req zone=one; } location /b/ { limit_conn conn 1; }
    location /a/ { limit_conn conn 1; auth_basic realm; auth_basic_user_file none; auth_delay 1h; }";

fn both(size: &str, key: &str) -> String {
    format!("limit_req_zone {key} zone=one:{size} rate=1r/m; limit_conn_zone {key} zone=conn:{size};")
}

fn zones_go_on_over_a_reload(driver: Driver) {
    let mut server = setup(driver, &both("1m", "$arg_k"), BOTH).start();
    let held = hold(&server);
    assert_eq!(server.get("/f?k=1").status, 200);
    for _ in 0..2 {
        server.reload_http(driver, &block(&both("1m", "$arg_k"), BOTH));
        assert_eq!((server.get("/f?k=1").status, server.get("/b/f?k=1").status), (503, 503));
    }
    // A request that began with the first configuration releases its place in the last.
    drop(held);
    wait_verdict(&server, "/a/f 499 - PASSED");
    assert_eq!(server.get("/b/f?k=1").status, 200);
    server.stop();
}

fn a_zone_of_another_size_begins_anew(driver: Driver) {
    let mut server = setup(driver, &both("1m", "$arg_k"), BOTH).start();
    assert_eq!(statuses(&mut server.connect(), ["/f?k=1"; 2]), [200, 503]);
    server.reload_http(driver, &block(&both("2m", "$arg_k"), BOTH));
    assert_eq!(statuses(&mut server.connect(), ["/f?k=1"; 2]), [200, 503]);
    server.stop();
}

fn a_zone_keeps_its_key_over_a_reload(driver: Driver) {
    let mut server = setup(driver, &both("1m", "$arg_k"), BOTH).start();
    assert_eq!(server.get("/f?k=1").status, 200);
    server.reload(&http_configuration(driver, &block(&both("1m", "$uri"), BOTH)));
    server.wait_logged("limit_req \"one\" uses the \"$uri\" key while previously it used the \"$arg_k\" key");
    server.wait_logged("limit_conn_zone \"conn\" uses the \"$uri\" key while previously it used the \"$arg_k\" key");
    assert_eq!(server.get("/f?k=1").status, 503);
    server.end(rustix::process::Signal::TERM);
}

fn a_zone_that_was_removed_comes_back_as_a_new_one(driver: Driver) {
    let mut server = setup(driver, &both("1m", "$arg_k"), BOTH).start();
    let held = hold(&server);
    assert_eq!(server.get("/f?k=1").status, 200);
    // The request in flight holds the zones of the old configuration.
    server.reload_http(driver, &block("", "location / { }"));
    assert_eq!(statuses(&mut server.connect(), ["/f?k=1"; 2]), [200, 200]);
    server.reload_http(driver, &block(&both("1m", "$arg_k$arg_l"), BOTH));
    assert_eq!(server.get("/b/f?k=1").status, 200);
    assert_eq!(statuses(&mut server.connect(), ["/f?k=1"; 2]), [200, 503]);
    drop(held);
    wait_verdict(&server, "/a/f 499 - PASSED");
    server.stop();
}

fn a_body_that_comes_too_slowly_gets_408(driver: Driver) {
    let server = setup(
        driver,
        "",
        "location / { test_store_body; client_body_min_rate 1m after=1ms; }
         location /a/ { test_store_body; client_body_min_rate 1; }
         location /b/ { test_store_body; client_body_min_rate 1 after=1h; client_body_timeout 1ms; }",
    )
    .start();
    let mut client = server.connect();
    client.send("POST /slow HTTP/1.1\r\nHost: h\r\nContent-Length: 10\r\n\r\n12345");
    assert_eq!(client.response().status, 408);
    server.wait_logged("client sends its body too slowly: 5 bytes so far, client: unix:");
    let mut client = server.connect();
    assert_eq!(client.ask("POST /a/quick HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\n\r\n12345").status, 200);
    client.send("POST /b/silent HTTP/1.1\r\nHost: h\r\nContent-Length: 10\r\n\r\n12345");
    assert_eq!(client.response().status, 408);
    server.wait_logged("client timed out, client: unix:");
    server.stop();
}
