//! `post_action`: the request made when a request has ended, its variables, and that no client waits for it.

use crate::support::http2::Http2;
use crate::support::{self, Backend, Client, Driver, Server, Setup, with_each_driver};

with_each_driver!(
    post_action_has_the_variables_of_its_request,
    requests_do_not_wait_for_post_actions,
    post_actions_have_a_bound_of_their_own,
    a_path_is_found_as_after_a_redirect,
    method_body_and_servers_are_those_of_the_request,
    unread_body_is_not_sent_to_the_post_action,
    a_client_that_leaves_is_told_of,
    post_action_has_no_post_action,
    requests_without_an_answer_have_nothing_following_them,
    a_missing_location_is_told_of,
    requests_over_http2_have_it_too,
);

/// Reports the variables of the finished request to the backend.
const TELL: &str = "proxy_pass http://BACK/done?uri=$uri&asked=$request_uri&status=$status&sent=$body_bytes_sent&\
                    complete=$request_completion&before=$upstream_status&set=$set;";

fn start(driver: Driver, locations: &str) -> (Backend, Server) {
    let backend = Backend::tcp();
    let text =
        format!("root %DIR%/www; set $set \"\"; {locations}").replace("TELL", TELL).replace("BACK", backend.address());
    // One event loop, so that the request made by `post_action` comes before the next client's.
    let setup = Setup::server(driver, &text).replace("worker_processes 2", "worker_processes 1");
    let server = setup.file("www/page.html", "a page").start();
    (backend, server)
}

/// Answers the next request to the backend and returns it.
fn asked(backend: &Backend) -> support::Asked {
    let mut peer = backend.accept();
    let asked = peer.request();
    answer(&mut peer);
    asked
}

fn answer(peer: &mut Client) {
    peer.send("HTTP/1.1 201 Created\r\nContent-Length: 6\r\n\r\nunseen");
}

fn post_action_has_the_variables_of_its_request(driver: Driver) {
    let locations = "location / { set $set here; post_action @done; } location @done { TELL }";
    let (backend, server) = start(driver, locations);
    let mut client = server.connect();
    assert_eq!(client.get("/page.html?a=b").text(), "a page");
    let target = "/done?uri=/page.html&asked=/page.html?a=b&status=200&sent=6&complete=OK&before=&set=here";
    assert_eq!(asked(&backend).target, target);
    assert_eq!(client.get("/missing").status, 404);
    assert!(asked(&backend).target.contains("uri=/missing&asked=/missing&status=404&"));
    // The request is logged once, with its own status.
    server.directory.wait_line("access.log", "\"GET /missing HTTP/1.1\" 404");
    let log = server.directory.read("access.log");
    assert_eq!(log.lines().filter(|line| line.contains("\" 200 6")).count(), 1, "{log}");
    assert_eq!(log.lines().count(), 2, "{log}");
    server.stop();
}

fn requests_do_not_wait_for_post_actions(driver: Driver) {
    let (backend, server) = start(driver, "location / { post_action @done; } location @done { TELL }");
    let mut client = server.connect();
    let mut peers = Vec::new();
    for _ in 0..3 {
        assert_eq!(client.get("/page.html").text(), "a page");
        let mut peer = backend.accept();
        peer.request();
        peers.push(peer);
    }
    drop(client);
    peers.iter_mut().for_each(answer);
    server.stop();
}

/// Post actions that one client causes hold at most a quarter of the connections.
fn post_actions_have_a_bound_of_their_own(driver: Driver) {
    let backend = Backend::tcp();
    let text = "limit_conn_zone $server_name zone=one:64k; server { listen %UNIX%; limit_conn one 1; root %DIR%/www;
         location / { post_action @done; } location @done { proxy_pass http://BACK; } }";
    let setup = Setup::http(driver, &text.replace("BACK", backend.address())).file("www/page.html", "a page");
    let server = setup.replace("worker_processes 2;", "worker_processes 1;").start();
    let mut client = server.connect();
    for _ in 0..40 {
        // The previous request has released its place in `limit_conn`.
        assert_eq!(client.get("/page.html").text(), "a page");
    }
    server.wait_logged("32 background subrequests are not enough");
    let mut peers: Vec<Client> = (0..32).map(|_| backend.accept()).collect();
    for peer in &mut peers {
        peer.request();
        answer(peer);
    }
    server.stop();
}

fn a_path_is_found_as_after_a_redirect(driver: Driver) {
    let locations = "location / { post_action /after; } location = /after { internal; set $set after; TELL }";
    let (backend, server) = start(driver, locations);
    assert_eq!(server.get("/page.html?a=b").text(), "a page");
    let target = "/done?uri=/after&asked=/page.html?a=b&status=200&sent=6&complete=OK&before=&set=after";
    assert_eq!(asked(&backend).target, target);
    server.stop();
}

fn method_body_and_servers_are_those_of_the_request(driver: Driver) {
    let locations = "location / { post_action @done; proxy_pass http://BACK; } location @done { TELL }";
    let (backend, server) = start(driver, locations);
    let mut client = server.connect();
    client.send("POST /form HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\n\r\nhello");
    let first = asked(&backend);
    assert_eq!((&*first.target, first.text()), ("/form", "hello"));
    assert_eq!(client.response().status, 201);
    let second = asked(&backend);
    assert_eq!((&*second.method, second.text()), ("POST", "hello"));
    assert!(second.target.contains("status=201&sent=6&complete=OK&before=201"), "{}", second.target);
    server.stop();
}

fn unread_body_is_not_sent_to_the_post_action(driver: Driver) {
    let (backend, server) = start(driver, "location / { post_action @done; return 200; } location @done { TELL }");
    let mut client = server.connect();
    assert_eq!(client.ask("POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\n\r\nhello").status, 200);
    let asked = asked(&backend);
    assert_eq!((&*asked.method, &*asked.body), ("POST", &b""[..]));
    server.stop();
}

fn a_client_that_leaves_is_told_of(driver: Driver) {
    let locations = "location / { post_action @done; proxy_pass http://BACK; } location @done { TELL }";
    let (backend, server) = start(driver, locations);
    let mut client = server.connect();
    client.send("GET /slow HTTP/1.1\r\nHost: h\r\n\r\n");
    let mut peer = backend.accept();
    peer.request();
    client.close_both();
    let target = asked(&backend).target;
    assert!(target.contains("uri=/slow&asked=/slow&status=499&sent=0&complete=&"), "{target}");
    server.stop();
}

fn post_action_has_no_post_action(driver: Driver) {
    let locations = "post_action /after; location / { } location = /after { log_subrequest on; TELL }
        location /marker { proxy_pass http://BACK; }";
    let (backend, server) = start(driver, locations);
    assert_eq!(server.get("/page.html").text(), "a page");
    asked(&backend);
    // The request of `post_action` is logged as its location says, and has no post action itself.
    server.directory.wait_line("access.log", "\"GET /page.html HTTP/1.1\" 201");
    let mut client = server.connect();
    client.send("GET /marker HTTP/1.1\r\nHost: h\r\n\r\n");
    assert_eq!(asked(&backend).target, "/marker");
    assert_eq!(client.response().status, 201);
    assert!(asked(&backend).target.contains("asked=/marker&"));
    server.stop();
}

fn requests_without_an_answer_have_nothing_following_them(driver: Driver) {
    let locations = "post_action @done; location / { } location /closed { return 444; } location @done { TELL }";
    let (backend, server) = start(driver, locations);
    for request in ["GET /closed HTTP/1.1\r\nHost: h\r\n\r\n", "nonsense\r\n\r\n"] {
        let mut client = server.connect();
        client.send(request);
        client.read_to_end();
    }
    assert_eq!(server.get("/page.html").text(), "a page");
    assert!(asked(&backend).target.contains("uri=/page.html&"));
    assert_eq!(server.get("/page.html?marker").text(), "a page");
    assert!(asked(&backend).target.contains("asked=/page.html?marker&"));
    server.stop();
}

fn a_missing_location_is_told_of(driver: Driver) {
    let (_backend, server) = start(driver, "location / { post_action @nowhere; }");
    assert_eq!(server.get("/page.html").text(), "a page");
    server.wait_logged("could not find named location \"@nowhere\"");
    server.stop();
}

fn requests_over_http2_have_it_too(driver: Driver) {
    let locations = "http2 on; location / { post_action @done; } location @done { TELL }";
    let (backend, server) = start(driver, locations);
    let mut client = Http2::unix(&server);
    let stream = client.begin("GET", "/page.html", &[], true);
    assert_eq!(client.answer(stream).text(), "a page");
    let target = asked(&backend).target;
    assert!(target.contains("uri=/page.html&asked=/page.html&status=200&"), "{target}");
    assert!(target.contains("&complete=OK&"), "{target}");
    server.stop();
}
