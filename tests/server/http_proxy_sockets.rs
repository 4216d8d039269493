//! proxy: options and addresses of upstream sockets as the kernel reports them, and clients that disconnect.

use std::fs;
use std::net::TcpStream;
use std::process::Command;

use rustix::net::sockopt;
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};

use crate::support::{Backend, Client, Driver, Server, Setup, has_own_network, skip, with_each_driver};

with_each_driver!(
    socket_options_are_those_of_the_location,
    send_lowat_is_accepted_and_changes_nothing,
    connections_come_from_the_address_that_the_location_binds,
    connections_come_from_addresses_of_others_where_the_location_says_transparent,
    a_server_that_the_conditions_do_not_allow_is_not_connected_to,
    conditions_of_every_protocol_hold_before_a_server_is_connected_to,
    the_address_to_connect_from_may_depend_on_the_server_that_was_chosen,
    the_server_is_told_that_the_client_has_left_unless_that_is_to_be_ignored,
);

const OK: &str = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok";

/// Sends a request; returns the client and the backend's connection, which is still to be answered.
fn ask(server: &Server, backend: &Backend, target: &str) -> (Client, Client) {
    let mut client = server.connect();
    client.send(format!("GET {target} HTTP/1.1\r\nHost: h\r\n\r\n"));
    let mut peer = backend.accept();
    peer.request();
    (client, peer)
}

/// The socket of a process at the other end of this connection; `None` if the kernel does not let tests access it.
#[track_caller]
fn other_end(process: Pid, peer: &Client) -> Option<TcpStream> {
    let ends = (Some(peer.remote_address()), Some(peer.local_address()));
    let handle = pidfd_open(process, PidfdFlags::empty()).expect("it runs");
    for entry in fs::read_dir(format!("/proc/{process}/fd")).expect("it runs").flatten() {
        let number = entry.file_name().to_str().and_then(|name| name.parse().ok()).expect("a number");
        match pidfd_getfd(&handle, number, PidfdGetfdFlags::empty()).map(TcpStream::from) {
            Ok(socket) if (socket.local_addr().ok(), socket.peer_addr().ok()) == ends => return Some(socket),
            Err(rustix::io::Errno::PERM | rustix::io::Errno::NOSYS) => {
                skip("the kernel does not give out descriptors of other processes here");
                return None;
            }
            // Not a socket, or closed meanwhile.
            _ => {}
        }
    }
    panic!("{process} has no connection {ends:?}");
}

fn socket_options_are_those_of_the_location(driver: Driver) {
    let backend = Backend::tcp();
    let setup = Setup::server(
        driver,
        "location / { proxy_pass http://ADDRESS; }
         location /on { proxy_socket_keepalive on; proxy_socket_rcvbuf 16k; proxy_socket_sndbuf 24k;
             proxy_pass http://ADDRESS; }",
    );
    let server = setup.replace("ADDRESS", backend.address()).start();
    let options = |target: &str| {
        let (mut client, mut peer) = ask(&server, &backend, target);
        let socket = other_end(server.worker(), &peer)?;
        let found = (
            sockopt::socket_keepalive(&socket).expect("an option"),
            sockopt::socket_recv_buffer_size(&socket).expect("an option"),
            sockopt::socket_send_buffer_size(&socket).expect("an option"),
        );
        peer.send(OK);
        assert_eq!(client.response().text(), "ok");
        Some(found)
    };
    if let (Some((keeps, receives, sends)), Some(set)) = (options("/"), options("/on")) {
        // The kernel doubles the sizes that are set.
        assert_eq!(set, (true, 2 * 16 * 1024, 2 * 24 * 1024));
        assert!(!keeps && receives != set.1 && sends != set.2, "{receives} {sends}");
    }
    server.stop();
}

fn send_lowat_is_accepted_and_changes_nothing(driver: Driver) {
    let backend = Backend::tcp();
    let setup = Setup::server(driver, "location / { proxy_send_lowat 10m; proxy_pass http://ADDRESS; }");
    let server = setup.replace("ADDRESS", backend.address()).start();
    assert!(server.stderr().contains("\"proxy_send_lowat\" is not supported, ignored"), "{}", server.stderr());
    // A request that is much shorter is sent.
    let (mut client, mut peer) = ask(&server, &backend, "/");
    peer.send(OK);
    assert_eq!(client.response().text(), "ok");
    server.stop();
}

fn connections_come_from_the_address_that_the_location_binds(driver: Driver) {
    let backend = Backend::tcp();
    let setup = Setup::server(
        driver,
        "proxy_bind 127.0.0.2; location / { proxy_pass http://ADDRESS; }
         location /variable { proxy_bind $arg_from; proxy_pass http://ADDRESS; }
         location /off { proxy_bind off; proxy_pass http://ADDRESS; }",
    );
    let server = setup.replace("ADDRESS", backend.address()).start();
    for (target, from) in [
        ("/", "127.0.0.2"),
        ("/variable?from=127.0.0.3", "127.0.0.3"),
        ("/variable?from=127.0.0.4", "127.0.0.4"),
        ("/variable", "127.0.0.1"),
        ("/off", "127.0.0.1"),
    ] {
        let (mut client, mut peer) = ask(&server, &backend, target);
        assert_eq!(peer.remote_address().ip().to_string(), from, "{target}");
        peer.send(OK);
        assert_eq!(client.response().text(), "ok");
    }
    server.stop();
}

fn connections_come_from_addresses_of_others_where_the_location_says_transparent(driver: Driver) {
    if !has_own_network() {
        return;
    }
    // Routes packets for addresses of other machines back to this one, as a router in front of the servers does.
    for command in
        ["link set lo up", "route add local 203.0.113.0/24 dev lo table 100", "rule add to 203.0.113.0/24 lookup 100"]
    {
        let done = Command::new("ip").args(command.split(' ')).output();
        if !done.as_ref().is_ok_and(|output| output.status.success()) {
            eprintln!("ip {command}: {done:?}");
            return skip("ip does not set up routes here");
        }
    }
    let backend = Backend::tcp();
    let setup = Setup::server(
        driver,
        "location / { proxy_bind $arg_from transparent; proxy_pass http://ADDRESS; }
         location /own { proxy_bind $arg_from; proxy_pass http://ADDRESS; }",
    );
    let server = setup.replace("ADDRESS", backend.address()).start();
    for from in ["203.0.113.7", "203.0.113.8"] {
        let (mut client, mut peer) = ask(&server, &backend, &format!("/?from={from}"));
        assert_eq!(peer.remote_address().ip().to_string(), from);
        peer.send(OK);
        assert_eq!(client.response().text(), "ok");
    }
    assert_eq!(server.get("/own?from=203.0.113.7").status, 500);
    server.wait_logged("bind() failed (99: Cannot assign requested address) while connecting to upstream");
    server.stop();
}

fn a_server_that_the_conditions_do_not_allow_is_not_connected_to(driver: Driver) {
    let (denied, allowed) = (Backend::tcp_at("127.0.0.5"), Backend::tcp());
    let configuration = format!(
        "geo $upstream_last_addr $allow {{ volatile; default 0; 127.0.0.1 1; }}
         log_format tried '$uri $status $upstream_status $upstream_addr $upstream_last_addr';
         access_log %DIR%/tried.log tried;
         upstream u {{ server {} max_fails=1 fail_timeout=1h; server {} backup; }}
         server {{ listen %UNIX%; proxy_allow_upstream $allow;
             location / {{ proxy_pass http://u; }}
             location /next {{ proxy_next_upstream denied; proxy_pass http://u; }}
             location /both {{ proxy_allow_upstream 1 $allow; proxy_pass http://u; }}
             location /empty {{ proxy_allow_upstream $arg_allow; proxy_pass http://u; }} }}",
        denied.address(),
        allowed.address()
    );
    let server = Setup::http(driver, &configuration).replace("worker_processes 2", "worker_processes 1").start();
    let of_denied = format!("{} 127.0.0.5", denied.address());
    for target in ["/", "/both", "/empty", "/empty?allow=0"] {
        assert_eq!(server.get(target).status, 403, "{target}");
        let path = target.split('?').next().expect("a path");
        server.directory.wait_line("tried.log", &format!("{path} 403 403 {of_denied}"));
    }
    server.wait_logged("access to upstream server is denied while connecting to upstream, client");
    // The next server is tried if the location says so. A denied server is not marked as down, so this repeats.
    for _ in 0..2 {
        let (mut client, mut peer) = ask(&server, &allowed, "/next");
        peer.send("HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok");
        assert_eq!(client.response().text(), "ok");
    }
    let tried = format!("/next 200 403, 200 {}, {} 127.0.0.1", denied.address(), allowed.address());
    server.directory.wait_line("tried.log", &tried);
    assert!(denied.is_idle());
    // Nor is an idle connection to a denied server used.
    let (mut client, mut peer) = ask(&server, &denied, "/empty?allow=1");
    peer.send(OK);
    assert_eq!(client.response().text(), "ok");
    assert_eq!(client.get("/empty").status, 403);
    server.stop();
}

fn conditions_of_every_protocol_hold_before_a_server_is_connected_to(driver: Driver) {
    let backend = Backend::tcp();
    let modules =
        [("proxy", "http://"), ("fastcgi", ""), ("uwsgi", ""), ("scgi", ""), ("memcached", ""), ("grpc", "grpc://")];
    let location = |(name, scheme): (&str, &str)| {
        format!(
            "location /{name} {{ set $memcached_key k; {name}_allow_upstream $arg_allow; {name}_bind_dynamic on;
                 {name}_next_upstream denied; {name}_pass {scheme}{}; }}",
            backend.address()
        )
    };
    let locations = modules.map(location).concat();
    let tunnel = format!(
        "server {{ listen %UNIX%; server_name t; tunnel_allow_upstream \"\"; tunnel_bind_dynamic on;
             tunnel_next_upstream denied; tunnel_pass {}; }}",
        backend.address()
    );
    let text = format!("server {{ listen %UNIX%; {locations} }} {tunnel}");
    let server = Setup::http(driver, &text).start();
    for (name, _) in modules {
        assert_eq!(server.get(&format!("/{name}")).status, 403, "{name}");
    }
    assert_eq!(server.connect().ask("CONNECT t:80 HTTP/1.1\r\nHost: t:80\r\n\r\n").status, 403);
    assert!(backend.is_idle());
    server.stop();
}

fn the_address_to_connect_from_may_depend_on_the_server_that_was_chosen(driver: Driver) {
    let (one, other) = (Backend::tcp_at("127.0.0.5"), Backend::tcp_at("127.0.0.6"));
    let configuration = format!(
        "geo $upstream_last_addr $from {{ volatile; 127.0.0.5 127.0.0.15; 127.0.0.6 127.0.0.16; }}
         upstream u {{ server {}; server {} backup; keepalive 0; }}
         server {{ listen %UNIX%;
             location / {{ proxy_bind $from; proxy_bind_dynamic on; proxy_pass http://u; }} }}",
        one.address(),
        other.address()
    );
    let server = Setup::http(driver, &configuration).start();
    let (mut client, mut peer) = ask(&server, &one, "/");
    assert_eq!(peer.remote_address().ip().to_string(), "127.0.0.15");
    drop(peer);
    // The same request is sent to the other server.
    peer = other.accept();
    peer.request();
    assert_eq!(peer.remote_address().ip().to_string(), "127.0.0.16");
    peer.send(OK);
    assert_eq!(client.response().text(), "ok");
    server.stop();
}

fn the_server_is_told_that_the_client_has_left_unless_that_is_to_be_ignored(driver: Driver) {
    let backend = Backend::tcp();
    let configuration = format!(
        "log_format left '$uri $status $upstream_status'; access_log %DIR%/left.log left;
         upstream u {{ server {}; }}
         server {{ listen %UNIX%; location / {{ proxy_pass http://u; }} location /own {{ return 204; }}
             location /ignored {{ proxy_ignore_client_abort on; proxy_pass http://u; }} }}",
        backend.address()
    );
    let server = Setup::http(driver, &configuration).replace("worker_processes 2", "worker_processes 1").start();
    let (client, mut peer) = ask(&server, &backend, "/told");
    drop(client);
    assert!(peer.is_at_end());
    server.directory.wait_line("left.log", "/told 499 ");
    let (client, mut peer) = ask(&server, &backend, "/ignored");
    drop(client);
    // The worker has seen the client leave once this request is answered.
    assert_eq!(server.get("/own").status, 204);
    assert!(!peer.is_closed());
    peer.send(OK);
    server.directory.wait_line("left.log", "/ignored 200 200");
    // The whole response was read, so that the connection can be reused.
    let mut client = server.connect();
    client.send("GET /ignored/again HTTP/1.1\r\nHost: h\r\n\r\n");
    assert_eq!(peer.request().target, "/ignored/again");
    peer.send(OK);
    assert_eq!(client.response().text(), "ok");
    server.stop();
}
