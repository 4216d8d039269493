//! Active health checks of stream (`health_check`, `match`) over real sockets: servers that become unhealthy and
//! healthy again.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use crate::support::authority::Authority;
use crate::support::{Driver, Server, Setup, stream_configuration, with_each_driver};

with_each_driver!(
    an_ill_server_gets_no_sessions_until_it_is_well,
    a_server_that_is_not_there_is_ill,
    a_mandatory_check_comes_before_the_first_session,
    servers_over_udp_are_asked_by_datagrams,
    checks_speak_tls_where_sessions_do,
    another_port_may_be_asked,
    wrong_checks_are_refused,
);

/// A server that answers `PING` as the test says, and `WHO?` with its name.
struct Peer {
    address: SocketAddr,
    is_well: Arc<AtomicBool>,
}

impl Peer {
    fn start(name: &'static [u8; 1], is_well: bool) -> Peer {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("an address");
        let is_well = Arc::new(AtomicBool::new(is_well));
        let health = Arc::clone(&is_well);
        // The thread ends with the process.
        thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                let (mut stream, health) = (stream, Arc::clone(&health));
                thread::spawn(move || {
                    let mut question = [0; 4];
                    // Ends when the client closes the connection.
                    while stream.read_exact(&mut question).is_ok() {
                        let answer: &[u8] = match &question {
                            b"PING" if health.load(Ordering::SeqCst) => b"+PONG\r\n",
                            b"PING" => b"-LOADING\r\n",
                            _ => name,
                        };
                        if stream.write_all(answer).is_err() {
                            break;
                        }
                    }
                });
            }
        });
        Peer { address, is_well }
    }

    fn set_well(&self, is_well: bool) {
        self.is_well.store(is_well, Ordering::SeqCst);
    }
}

/// Name of the server of a new session.
fn served_by(server: &Server) -> Vec<u8> {
    let mut client = server.connect();
    client.send("WHO?");
    client.take(1)
}

const PING: &str = r#"match ping { send PING; expect "+PONG"; }"#;

fn an_ill_server_gets_no_sessions_until_it_is_well(driver: Driver) {
    let (one, other) = (Peer::start(b"1", true), Peer::start(b"2", true));
    let text = format!(
        "{PING} upstream group {{ server {}; server {}; }}
         server {{ listen %UNIX%; proxy_pass group; health_check interval=20ms fails=2 passes=2 match=ping; }}",
        one.address, other.address
    );
    let server = Setup::stream(driver, &text).start();
    one.set_well(false);
    server.wait_logged(&format!(
        "peer is unhealthy while reading response from upstream, health check \"ping\" of peer {} in upstream \
         \"group\"",
        one.address
    ));
    server.wait_logged("unexpected data while reading response from upstream, health check \"ping\"");
    for _ in 0..6 {
        assert_eq!(served_by(&server), b"2");
    }
    one.set_well(true);
    server.wait_logged(&format!("peer is healthy, health check \"ping\" of peer {}", one.address));
    other.set_well(false);
    server.wait_logged(&format!("health check \"ping\" of peer {} in upstream \"group\"", other.address));
    server.wait_logged_times("peer is unhealthy", 2);
    for _ in 0..6 {
        assert_eq!(served_by(&server), b"1");
    }
}

fn a_server_that_is_not_there_is_ill(driver: Driver) {
    let there = Peer::start(b"1", true);
    // An address without a listener: other tests use other addresses.
    let text = format!(
        "upstream group {{ server %TCP2%; server {}; }}
         server {{ listen %UNIX%; proxy_pass group; health_check interval=20ms; }}",
        there.address
    );
    let server = Setup::stream(driver, &text).start();
    server.wait_logged("peer is unhealthy while connecting to upstream");
    server.wait_logged("connect() failed (111: Connection refused) while connecting to upstream, health check \"\"");
    for _ in 0..6 {
        assert_eq!(served_by(&server), b"1");
    }
    assert!(!server.log().contains("refused) while connecting to upstream, client"), "no session has tried it");
}

fn a_mandatory_check_comes_before_the_first_session(driver: Driver) {
    let peer = Peer::start(b"1", false);
    let text = format!(
        "{PING} upstream group {{ server {}; }}
         server {{ listen %UNIX%; proxy_pass group; health_check interval=20ms mandatory match=ping; }}",
        peer.address
    );
    let server = Setup::stream(driver, &text).start();
    server.connect().assert_closed();
    server.wait_logged("no live upstreams while connecting to upstream");
    peer.set_well(true);
    server.wait_logged("peer is healthy");
    assert_eq!(served_by(&server), b"1");
}

fn servers_over_udp_are_asked_by_datagrams(driver: Driver) {
    let socket = UdpSocket::bind("127.0.0.1:0").expect("a port");
    let address = socket.local_addr().expect("an address");
    let is_well = Arc::new(AtomicBool::new(true));
    let health = Arc::clone(&is_well);
    thread::spawn(move || {
        let mut bytes = [0; 16];
        while let Ok((length, from)) = socket.recv_from(&mut bytes) {
            assert_eq!(bytes[..length], [0x01, b'?', 0xff]);
            let answer: &[u8] = if health.load(Ordering::SeqCst) { b"I am OK" } else { b"I am not" };
            let _ = socket.send_to(answer, from);
        }
    });
    let text = format!(
        r#"match question {{ send "\x01?\xFF"; expect ~* "am ok$"; }}
         upstream group {{ server {address}; }}
         server {{ listen %TCP% udp; proxy_pass group; health_check udp interval=20ms mandatory match=question; }}"#
    );
    let server = Setup::stream(driver, &text).start();
    server.wait_logged("peer is healthy, health check \"question\"");
    is_well.store(false, Ordering::SeqCst);
    server.wait_logged("peer is unhealthy while reading response from upstream, health check \"question\"");
}

fn checks_speak_tls_where_sessions_do(driver: Driver) {
    let authority = Authority::new("The authority");
    let pair = authority.ecdsa(&["behind.test"]);
    let text = "match greeting { expect 'behind.test '; }
        server { listen %UNIX%; proxy_pass %TCP%; proxy_ssl on; proxy_ssl_verify on; proxy_ssl_server_name on;
                 proxy_ssl_name behind.test; proxy_ssl_trusted_certificate %DIR%/authority.pem;
                 health_check interval=20ms mandatory match=greeting; }
        server { listen %TCP% ssl; ssl_certificate %DIR%/own.pem; ssl_certificate_key %DIR%/own.key;
                 return '$ssl_server_name $ssl_protocol'; }";
    let setup = Setup::stream(driver, text).file("authority.pem", &authority.pem);
    let server = setup.file("own.pem", &pair.certificate).file("own.key", &pair.key).start();
    server.wait_logged("peer is healthy, health check \"greeting\"");
    assert_eq!(server.connect().read_to_end(), b"behind.test TLSv1.3");
}

fn another_port_may_be_asked(driver: Driver) {
    let peer = Peer::start(b"1", true);
    let asked = Peer::start(b"2", true);
    let text = format!(
        "{PING} server {{ listen %UNIX%; proxy_pass {};
                   health_check interval=20ms mandatory persistent jitter=5ms port={} match=ping; }}",
        peer.address,
        asked.address.port()
    );
    let server = Setup::stream(driver, &text).start();
    server.wait_logged(&format!("peer is healthy, health check \"ping\" of peer {}", peer.address));
    assert_eq!(served_by(&server), b"1");
    asked.set_well(false);
    server.wait_logged("peer is unhealthy");
}

fn wrong_checks_are_refused(driver: Driver) {
    let cases = [
        ("health_check interval=0; proxy_pass %TCP2%;", "invalid parameter \"interval=0\""),
        ("health_check uri=/; proxy_pass %TCP2%;", "invalid parameter \"uri=/\""),
        ("health_check match=none; proxy_pass %TCP2%;", "unknown match \"none\""),
        ("health_check persistent; proxy_pass %TCP2%;", "\"persistent\" requires \"mandatory\" parameter"),
        ("health_check; return x;", "\"health_check\" requires \"proxy_pass\" in the same server"),
        ("health_check; proxy_pass $server_addr;", "cannot be used with variables in \"proxy_pass\""),
        ("health_check udp; proxy_pass %TCP2%;", "requires a match with \"send\" and \"expect\""),
        ("health_check; health_check; proxy_pass %TCP2%;", "\"health_check\" directive is duplicate"),
    ];
    for (text, message) in cases {
        let text = stream_configuration(driver, &format!("server {{ listen %UNIX%; {text} }}"));
        let mut refused = Setup::configuration(&text).launch();
        assert!(!refused.wait_exited().success(), "{text}");
        assert!(refused.stderr().contains(message), "{text}: {}", refused.stderr());
    }
    for (text, message) in [
        ("match a { expect x; } match a { }", "duplicate match \"a\""),
        ("match a { expect ! x; }", "invalid parameter \"!\""),
        ("match a { send; }", "invalid number of arguments in \"send\" directive"),
        ("match a { expect x; expect y; }", "\"expect\" directive is duplicate"),
        ("match a { status 200; }", "unknown directive \"status\""),
    ] {
        let mut refused = Setup::configuration(&stream_configuration(driver, text)).launch();
        assert!(!refused.wait_exited().success(), "{text}");
        assert!(refused.stderr().contains(message), "{text}: {}", refused.stderr());
    }
}
