//! Choice of the server: by address, by name, by default.

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener};

use crate::support::{Client, Directory, Driver, Server, Setup, skip, with_each_driver};

with_each_driver!(
    the_best_name_decides,
    no_other_server_answers_when_an_expression_cannot_be_run_to_its_end,
    the_first_server_of_an_address_or_the_one_that_says_so_is_the_default,
    servers_share_addresses_of_every_kind,
    a_server_may_listen_on_a_range_of_ports,
    variables_tell_the_addresses,
    settings_before_the_name_is_known_are_those_of_the_default,
    offence_in_a_head_is_answered_by_the_server_that_it_names,
    head_that_breaks_off_is_logged_by_the_server_that_it_names,
);

#[track_caller]
fn ask(client: &mut Client, host: &str) -> String {
    let response = client.ask(format!("GET / HTTP/1.1\r\nHost: {host}\r\n\r\n"));
    assert_eq!(response.status, 200, "{host}");
    response.text().to_owned()
}

fn no_other_server_answers_when_an_expression_cannot_be_run_to_its_end(driver: Driver) {
    let servers = "server { listen %UNIX%; return 200 default; }
         server { listen %UNIX%; server_name ~^(a+)+$; return 200 expression; }";
    let mut server = Setup::http(driver, servers).start();
    assert_eq!(ask(&mut server.connect(), "aaaa"), "expression");
    assert_eq!(ask(&mut server.connect(), "b"), "default");
    let host = format!("{}b", "a".repeat(60));
    let mut client = server.connect();
    let response = client.ask(format!("GET / HTTP/1.1\r\nHost: {host}\r\n\r\n"));
    assert_eq!((response.status, response.header("Connection")), (500, Some("close")));
    client.assert_closed();
    // `end`, not `stop`: the failed expression logs an alert.
    server.end(rustix::process::Signal::TERM);
}

fn the_best_name_decides(driver: Driver) {
    let names = [
        "default.example",
        "exact.example www.exact.example",
        "*.example",
        "*.long.example",
        ".dot.example",
        "mail.*",
        "mail.long.*",
        "~^www\\d+\\.other$",
        "~^(?<name>first)\\.",
        "~^first\\.second\\.",
    ];
    let block = |(number, name): (usize, &&str)| {
        format!("server {{ listen %UNIX%; server_name {name}; return 200 \"{number} $name\"; }}\n")
    };
    let servers: String = names.iter().enumerate().map(block).collect();
    let server = Setup::http(driver, &servers).start();
    let mut client = server.connect();
    let cases = [
        ("exact.example", "exact.example www.exact.example"),
        ("www.EXACT.example:8080", "exact.example www.exact.example"),
        ("exact.example.", "exact.example www.exact.example"),
        ("x.example", "*.example"),
        ("x.y.example", "*.example"),
        ("x.long.example", "*.long.example"),
        ("dot.example", ".dot.example"),
        ("x.dot.example", ".dot.example"),
        ("mail.anything", "mail.*"),
        ("mail.long.anything", "mail.long.*"),
        ("mail.example", "*.example"),
        ("www1.example", "*.example"),
        ("www1.other", "~^www\\d+\\.other$"),
        ("first.other", "~^(?<name>first)\\."),
        ("first.second.other", "~^(?<name>first)\\."),
        ("example", "default.example"),
        ("unknown", "default.example"),
        ("127.0.0.1", "default.example"),
        ("[::1]:80", "default.example"),
    ];
    for (host, name) in cases {
        let answer = ask(&mut client, host);
        let number: usize = answer.split(' ').next().and_then(|word| word.parse().ok()).expect("a number");
        assert_eq!(names[number], name, "{host}");
    }
    assert!(ask(&mut client, "first.other").ends_with(" first"));
    assert!(server.connect().ask("GET / HTTP/1.0\r\n\r\n").text().starts_with("0 "));
    server.stop();
}

fn the_first_server_of_an_address_or_the_one_that_says_so_is_the_default(driver: Driver) {
    let server = Setup::http(
        driver,
        "server { listen %UNIX%; listen %TCP%; server_name one; return 200 one; }
         server { listen %UNIX%; listen %TCP% default_server; server_name two; return 200 two; }
         server { listen %UNIX%; server_name \"\"; return 200 nameless; }",
    )
    .start();
    let (mut unix, mut tcp) = (server.connect(), server.connect_tcp(1));
    assert_eq!((ask(&mut unix, "other"), ask(&mut tcp, "other")), ("one".into(), "two".into()));
    assert_eq!((ask(&mut unix, "two"), ask(&mut tcp, "one")), ("two".into(), "one".into()));
    assert_eq!(unix.ask("GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n").text(), "nameless");
    assert_eq!(tcp.ask("GET / HTTP/1.0\r\n\r\n").text(), "two");
    server.stop();
}

fn servers_share_addresses_of_every_kind(driver: Driver) {
    let server = Setup::http(
        driver,
        "server { listen %TCP%; listen %TCP2%; server_name both; return 200 both; }
         server { listen %TCP2%; server_name second; return 200 second; }
         server { listen %UNIX%; listen unix:%DIR%/other.sock; server_name local; return 200 \"local $server_name\"; }",
    )
    .start();
    let (mut first, mut second) = (server.connect_tcp(1), server.connect_tcp(2));
    // A server cannot be reached by its name on an address that it does not listen on.
    assert_eq!((ask(&mut first, "second"), ask(&mut second, "second")), ("both".into(), "second".into()));
    assert_eq!(ask(&mut server.connect(), "second"), "local local");
    assert_eq!(ask(&mut Client::unix(&server.directory.path().join("other.sock")), "x"), "local local");
    server.stop();
}

fn a_server_may_listen_on_a_range_of_ports(driver: Driver) {
    let addresses = Directory::new();
    let [first, second, third] = [1, 2, 3].map(|number| addresses.address(number));
    let servers = format!(
        "server {{ listen %UNIX%; listen {first}-{}; return 200 $server_port; }}
         server {{ listen {second}; server_name other; return 200 other; }}",
        third.port()
    );
    let server = Setup::http(driver, &servers).start();
    for address in [first, second, third] {
        assert_eq!(ask(&mut Client::tcp(address), "any"), address.port().to_string());
    }
    assert_eq!(ask(&mut Client::tcp(second), "other"), "other");
    server.stop();
}

fn variables_tell_the_addresses(driver: Driver) {
    let text = "return 200 \"$server_addr $server_port $remote_addr $server_name\";";
    let server =
        Setup::http(driver, &format!("server {{ listen %UNIX%; listen %TCP%; server_name Me.EXAMPLE; {text} }}"))
            .start();
    let address = server.directory.address(1);
    let answer = ask(&mut server.connect_tcp(1), "x");
    assert_eq!(answer, format!("{} {} 127.0.0.1 me.example", address.ip(), address.port()));
    let socket = server.directory.path().join("gale.sock");
    assert!(ask(&mut server.connect(), "x").starts_with(&format!("unix:{}", socket.display())));
    server.stop();
}

fn settings_before_the_name_is_known_are_those_of_the_default(driver: Driver) {
    let server = Setup::http(
        driver,
        "server { listen %UNIX%; server_name small; client_header_buffer_size 128; \
         large_client_header_buffers 1 256; return 200 small; }
         server { listen %UNIX%; server_name large; large_client_header_buffers 4 8k; return 200 large; }",
    )
    .start();
    let field = format!("X: {}\r\n", "x".repeat(1000));
    let response = server.connect().ask(format!("GET / HTTP/1.1\r\nHost: large\r\n{field}\r\n"));
    assert_eq!(response.status, 400);
    assert_eq!(ask(&mut server.connect(), "large"), "large");
    server.stop();
}

/// Servers that name themselves in a header field and in error pages, each with a log of its own.
const THREE_SERVERS: &str = "log_format server '$sent_http_x_server $status';
     server { listen %UNIX%; server_name first; access_log %DIR%/first.log server;
              add_header X-Server first always; error_page 400 494 /page; location /page { return 200 first; } }
     server { listen %UNIX%; server_name named; access_log %DIR%/named.log server;
              add_header X-Server named always; error_page 400 494 /page; location /page { return 200 named; } }
     server { listen %UNIX%; server_name \"\"; access_log %DIR%/nameless.log server;
              add_header X-Server nameless always; error_page 400 494 /page; location /page { return 200 nameless; } }";

fn offence_in_a_head_is_answered_by_the_server_that_it_names(driver: Driver) {
    let server = Setup::http(driver, THREE_SERVERS).start();
    let long = format!("GET / HTTP/1.1\r\nHost: named\r\nX: {}\r\n\r\n", "x".repeat(9000));
    let cases = [
        // Once the host is known, its server answers, for any error.
        ("GET / HTTP/1.1\r\nHost: named\r\nContent-Length: x\r\n\r\n", "named"),
        ("GET / HTTP/1.1\r\nContent-Length: x\r\nHost: named\r\n\r\n", "named"),
        ("GET /%zz HTTP/1.1\r\nHost: named\r\n\r\n", "named"),
        ("GET / HTTP/1.1\r\nHost: named\r\nHost: first\r\n\r\n", "named"),
        ("GET / HTTP/1.1\r\nHost: named\r\n folded\r\n\r\n", "named"),
        ("GET http://named/ HTTP/1.1\r\nHost: first\r\nContent-Length: x\r\n\r\n", "named"),
        ("GET http://named/ HTTP/1.1\r\n\r\n", "named"),
        (&long, "named"),
        ("GET / HTTP/1.1\r\n\r\n", "nameless"),
        // Before the host is known, the default server answers.
        ("GET / HTTP/1.1\r\n folded\r\nHost: named\r\n\r\n", "first"),
        ("GET / HTTP/1.1\r\nHost: named/\r\n\r\n", "first"),
        ("GET\r\nHost: named\r\n\r\n", "first"),
    ];
    for (request, name) in cases {
        let mut client = server.connect();
        let response = client.ask(request);
        let shown = (response.status, response.text(), response.header("X-Server"));
        assert_eq!(shown, (400, name, Some(name)), "{request}");
        client.assert_closed();
    }
    for name in ["first", "named", "nameless"] {
        let count = cases.iter().filter(|case| case.1 == name).count();
        let lines = format!("{name} 400\n").repeat(count);
        let log = format!("{name}.log");
        server.directory.wait_until(&format!("{count} lines in {log}"), |directory| {
            directory.try_read(&log).is_some_and(|text| text == lines)
        });
    }
    server.stop();
}

fn head_that_breaks_off_is_logged_by_the_server_that_it_names(driver: Driver) {
    let server = Setup::http(driver, THREE_SERVERS).start();
    let mut client = server.connect();
    client.send("GET / HTTP/1.1\r\nHost: named\r\nX: ");
    drop(client);
    server.directory.wait_line("named.log", "- 400");
    server
        .wait_logged("while reading client request headers, client: unix:, server: named, request: \"GET / HTTP/1.1\"");
    server.stop();
}

#[test]
fn a_specific_address_goes_before_the_wildcard_of_its_port() {
    let server = Setup::http(
        Driver::Epoll,
        "server { listen *:%PORT%; return 200 \"any $server_addr\"; }
         server { listen 127.0.0.1:%PORT%; return 200 specific; }
         server { listen 127.0.0.2:%PORT%; server_name x; return 200 named; }",
    )
    .start();
    let port = server.directory.address(1).port();
    let ask_at = |host: Ipv4Addr| ask(&mut Client::tcp(SocketAddr::from((host, port))), "x");
    assert_eq!(ask_at(Ipv4Addr::LOCALHOST), "specific");
    assert_eq!(ask_at(Ipv4Addr::new(127, 0, 0, 2)), "named");
    assert_eq!(ask_at(Ipv4Addr::new(127, 0, 0, 3)), "any 127.0.0.3");
    server.stop();
}

#[test]
fn ipv6_is_spoken() {
    if TcpListener::bind((Ipv6Addr::LOCALHOST, 0)).is_err() {
        return skip("there is no IPv6");
    }
    let text = "return 200 \"$server_addr $remote_addr\";";
    let start = |listen: &str| -> Server {
        Setup::http(Driver::Epoll, &format!("server {{ listen {listen}; {text} }}")).start()
    };
    let server = start("[::1]:%PORT%");
    let port = server.directory.address(1).port();
    let mut client = Client::tcp((Ipv6Addr::LOCALHOST, port).into());
    assert_eq!(ask(&mut client, "[::1]"), "::1 ::1");
    server.stop();
    let server = start("[::]:%PORT% ipv6only=off");
    let port = server.directory.address(1).port();
    assert_eq!(ask(&mut Client::tcp((Ipv6Addr::LOCALHOST, port).into()), "x"), "::1 ::1");
    let mapped = ask(&mut Client::tcp((Ipv4Addr::LOCALHOST, port).into()), "x");
    assert_eq!(mapped, "::ffff:127.0.0.1 ::ffff:127.0.0.1");
    server.stop();
}
