//! Master and worker as processes of the real binary: starting, stopping, reloading, and what may go wrong meanwhile.

mod support;

use support::{Driver, Server, Setup, with_each_driver};

with_each_driver!(a_server_starts_answers_and_stops);

fn a_server_starts_answers_and_stops(driver: Driver) {
    let server = Server::start(driver, "location / { return 200 hello; }");
    let response = server.get("/");
    assert_eq!((response.status, response.text()), (200, "hello"));
    assert_eq!(server.pid_in_file(), server.pid());
    server.stop();
}

#[test]
fn an_ordinary_user_needs_no_rights() {
    let server = Setup::server(Driver::Epoll, "return 200 hello;").unprivileged().start();
    assert_eq!(server.get("/").text(), "hello");
    server.stop();
}

#[test]
fn tcp_addresses_are_the_test_s_own() {
    let server = Setup::http(Driver::Epoll, "server { listen %TCP%; return 200 $host; }").start();
    assert_eq!(server.connect_tcp(1).get("/").status, 200);
    server.stop();
}
