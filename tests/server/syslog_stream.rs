//! Logs sent to a syslog server over TCP and TLS: framing, and servers that are down, hang or are not trusted.

use std::io::{BufReader, Read};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;

use rustls::crypto::aws_lc_rs;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ServerConfig, ServerConnection, StreamOwned};

use crate::support::authority::{Authority, Pair};
use crate::support::{DEADLINE, Driver, Setup, http_configuration, with_each_driver};

with_each_driver!(
    lines_come_over_tcp_with_their_lengths,
    server_that_comes_back_gets_the_lines_logged_meanwhile,
    server_that_hangs_delays_no_request_and_no_other_log,
    lines_come_over_tls_to_a_server_with_the_right_name_alone,
    reload_keeps_the_connection_and_the_master_logs_over_one_of_its_own,
);

/// Receives the messages of a log.
struct Receiver<S: Read>(BufReader<S>);

impl<S: Read> Receiver<S> {
    fn of(stream: S) -> Receiver<S> {
        Receiver(BufReader::new(stream))
    }

    /// Reads `LENGTH MESSAGE`.
    #[track_caller]
    fn message(&mut self) -> String {
        let mut byte = || {
            let mut byte = [0];
            self.0.read_exact(&mut byte).expect("a length");
            byte[0]
        };
        let digits: Vec<u8> = std::iter::repeat_with(&mut byte).take_while(|byte| *byte != b' ').collect();
        let length = String::from_utf8(digits).expect("digits").parse().expect("a number");
        let mut message = vec![0; length];
        self.0.read_exact(&mut message).expect("a message");
        String::from_utf8(message).expect("text")
    }

    /// Reads up to the next message that contains the text.
    #[track_caller]
    fn message_with(&mut self, text: &str) -> String {
        std::iter::repeat_with(|| self.message()).find(|message| message.contains(text)).expect("it comes")
    }
}

fn accept(listener: &TcpListener) -> TcpStream {
    let (stream, _) = listener.accept().expect("it listens");
    stream.set_read_timeout(Some(DEADLINE)).expect("an option");
    stream
}

fn listen() -> (TcpListener, SocketAddr) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let address = listener.local_addr().expect("an address");
    (listener, address)
}

/// A server that logs its requests to `target`.
fn logging_to(driver: Driver, target: &str) -> Setup {
    Setup::http(
        driver,
        &format!(
            "log_format uri '$uri'; server {{ listen %UNIX%; access_log syslog:server={target},tag=t,nohostname uri;
                 location / {{ return 200 ok; }} location /file {{ access_log %DIR%/other.log uri; return 200; }} }}"
        ),
    )
}

fn lines_come_over_tcp_with_their_lengths(driver: Driver) {
    let (listener, address) = listen();
    let server = logging_to(driver, &format!("tcp://{address}")).start();
    server.get("/one");
    let mut receiver = Receiver::of(accept(&listener));
    let message = receiver.message();
    assert!(message.starts_with("<190>") && message.ends_with(" t: /one"), "{message}");
    server.get("/two");
    assert!(receiver.message().ends_with(" t: /two"));
    server.stop();
}

fn server_that_comes_back_gets_the_lines_logged_meanwhile(driver: Driver) {
    let (listener, address) = listen();
    let mut server = logging_to(driver, &format!("tcp://{address}")).start();
    server.get("/before");
    let mut receiver = Receiver::of(accept(&listener));
    assert!(receiver.message().ends_with("/before"));
    drop((receiver, listener));
    // One client and so one loop: the lines of several loops have no order.
    let mut client = server.connect();
    for number in 0..100 {
        assert_eq!(client.get(&format!("/meanwhile/{number}")).status, 200);
    }
    server.wait_logged(&format!(
        "write() to \"syslog:server=tcp://{address}\" failed (111: Connection refused), 0 lines"
    ));
    let listener = TcpListener::bind(address).expect("its own port");
    let mut receiver = Receiver::of(accept(&listener));
    let messages: Vec<String> = std::iter::repeat_with(|| receiver.message()).take(100).collect();
    for (number, message) in messages.iter().enumerate() {
        assert!(message.ends_with(&format!(" /meanwhile/{number}")), "{message}");
    }
    // Ends the server without the check for [alert] lines, since this test expects one.
    server.end(rustix::process::Signal::TERM);
}

fn server_that_hangs_delays_no_request_and_no_other_log(driver: Driver) {
    // The server neither accepts nor reads.
    let (_listener, address) = listen();
    let other = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let text = format!(
        "log_format long '$uri $arg_long$arg_long$arg_long$arg_long'; log_format uri '$uri';
         server {{ listen %UNIX%; large_client_header_buffers 4 32k; access_log syslog:server=tcp://{address} long;
             access_log syslog:server=tcp://{} uri; return 200 ok; }}",
        other.local_addr().expect("an address")
    );
    let mut server = Setup::http(driver, &text).start();
    let mut client = server.connect();
    let target = format!("/x?long={}", "x".repeat(16_000));
    // More than the sockets hold.
    for _ in 0..300 {
        assert_eq!(client.get(&target).status, 200);
    }
    let mut receiver = Receiver::of(accept(&other));
    for _ in 0..300 {
        assert!(receiver.message().ends_with(": /x"));
    }
    server.end(rustix::process::Signal::TERM);
}

fn tls_server(pair: &Pair) -> Arc<ServerConfig> {
    let chain = CertificateDer::pem_slice_iter(pair.certificate.as_bytes()).collect::<Result<_, _>>().expect("PEM");
    let key = PrivateKeyDer::from_pem_slice(pair.key.as_bytes()).expect("PEM");
    let builder = ServerConfig::builder_with_provider(Arc::new(aws_lc_rs::default_provider()));
    let builder = builder.with_safe_default_protocol_versions().expect("versions").with_no_client_auth();
    Arc::new(builder.with_single_cert(chain, key).expect("a pair"))
}

fn lines_come_over_tls_to_a_server_with_the_right_name_alone(driver: Driver) {
    let authority = Authority::new("authority");
    let config = tls_server(&authority.ecdsa(&["log.test"]));
    let (listener, address) = listen();
    let target = |name: &str| format!("tls://{address},name={name},trusted=authority.pem");
    let setup = logging_to(driver, &target("log.test")).file("authority.pem", &authority.pem);
    let mut server = setup.start();
    server.get("/one");
    let connection = ServerConnection::new(Arc::clone(&config)).expect("a configuration");
    let mut receiver = Receiver::of(StreamOwned::new(connection, accept(&listener)));
    assert!(receiver.message().ends_with(" t: /one"));
    let configuration = server.directory.read("gale.conf");
    server.reload(&configuration.replace("name=log.test", "name=other.test"));
    server.get("/secret");
    let connection = ServerConnection::new(config).expect("a configuration");
    let mut refused = StreamOwned::new(connection, accept(&listener));
    let error = refused.read(&mut [0; 100]).expect_err("an alert of the client's");
    assert!(error.to_string().contains("fatal alert"), "{error}");
    server.wait_logged(&format!("write() to \"syslog:server=tls://{address}\" failed (SSL certificate does not match"));
    // Without a readable file of certificates the syslog server is not used.
    server.reload(&configuration.replace("authority.pem", "nothing.pem"));
    server.wait_logged("cannot load trusted certificates \"");
    server.end(rustix::process::Signal::TERM);
}

fn reload_keeps_the_connection_and_the_master_logs_over_one_of_its_own(driver: Driver) {
    let (listener, address) = listen();
    let log = format!("error_log syslog:server=tcp://{address},tag=main notice; events {{");
    let text = http_configuration(driver, "server { listen %UNIX%; root %DIR%/nothing; }").replace("events {", &log);
    let mut server = Setup::configuration(&text).start();
    let of_master = format!(" [notice] {}#", server.pid());
    // The connections of the master and the worker, in either order.
    let connections = [accept(&listener), accept(&listener)].map(Receiver::of);
    let (mut masters, mut workers): (Vec<_>, Vec<_>) = (Vec::new(), Vec::new());
    for mut receiver in connections {
        let first = receiver.message();
        if first.contains(&of_master) { masters.push(receiver) } else { workers.push(receiver) }
    }
    assert_eq!((masters.len(), workers.len()), (1, 1));
    server.reload(&server.directory.read("gale.conf"));
    assert_eq!(server.get("/missing").status, 404);
    let message = workers[0].message_with("/missing");
    assert!(message.starts_with("<187>") && message.contains(" main: 20"), "{message}");
    server.signal(rustix::process::Signal::USR1);
    masters[0].message_with("reopening logs");
    server.stop();
}
