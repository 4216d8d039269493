//! Socket activation: a service manager opens the sockets (`LISTEN_FDS`) and keeps them.

use std::net::{TcpListener, TcpStream, UdpSocket};
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};

use rustix::process::Signal;

use crate::support::{
    self, Client, Directory, Driver, Server, Setup, configuration, http_configuration, wait_ended, with_each_driver,
};

with_each_driver![
    sockets_are_used_for_the_addresses_that_they_have,
    unused_socket_is_told_and_kept_for_a_reload,
    unused_socket_is_kept_over_an_upgrade,
    reuseport_opens_more_sockets_beside_a_passed_one,
    without_a_master_sockets_are_kept_all_the_same,
    unusable_passed_sockets_are_named,
];

const HELLO: &str = "server { listen %TCP%; return 200 hello; }";
const OTHER: &str = "server { listen unix:%DIR%/passed.sock; return 200 other; }";
const UNUSED: &str = "the passed socket";

/// The service manager's sockets.
struct Manager {
    tcp: TcpListener,
    unix: UnixListener,
}

impl Manager {
    fn new(directory: &Directory) -> Manager {
        Manager {
            tcp: TcpListener::bind(directory.address(1)).expect("nobody else's"),
            unix: UnixListener::bind(directory.path().join("passed.sock")).expect("a new directory"),
        }
    }

    fn sockets(&self) -> [OwnedFd; 2] {
        [self.tcp.try_clone().expect("a copy").into(), self.unix.try_clone().expect("a copy").into()]
    }

    /// Starts the server with both sockets, and waits until it is ready.
    #[track_caller]
    fn start(driver: Driver, http: &str) -> (Manager, Server) {
        let directory = Directory::new();
        let manager = Manager::new(&directory);
        let mut server = Setup::http(driver, http).launch_in(directory, &manager.sockets());
        server.wait_notified("READY=1");
        (manager, server)
    }
}

#[track_caller]
fn text_at_tcp(server: &Server) -> String {
    server.connect_tcp(1).get("/").text().to_owned()
}

#[track_caller]
fn text_at_unix(server: &Server) -> String {
    Client::unix(&server.directory.path().join("passed.sock")).get("/").text().to_owned()
}

fn sockets_are_used_for_the_addresses_that_they_have(driver: Driver) {
    let directory = Directory::new();
    let manager = Manager::new(&directory);
    let udp = UdpSocket::bind(directory.address(2)).expect("nobody else's");
    // Clients that connect before the server runs wait in the socket's backlog.
    let mut early = Client::of_tcp(TcpStream::connect(directory.address(1)).expect("the manager listens"));
    let mut early_unix = Client::of(UnixStream::connect(directory.path().join("passed.sock")).expect("it listens"));
    let datagrams = UdpSocket::bind("127.0.0.1:0").expect("any port");
    datagrams.set_read_timeout(Some(support::DEADLINE)).expect("an option");
    datagrams.send_to(b"ping", directory.address(2)).expect("sent");

    let http = format!("http {{ access_log off; client_body_temp_path %DIR%/body; {HELLO} {OTHER} }}");
    let stream = "stream { server { listen %TCP2% udp; return datagram; } }";
    let setup = Setup::configuration(&configuration(driver, &format!("{http}\n{stream}")));
    let [tcp, unix] = manager.sockets();
    let sockets = [unix, udp.into(), tcp];
    let mut server = setup.environment("LISTEN_FDNAMES", "site:names:").launch_in(directory, &sockets);
    server.wait_notified("READY=1");

    assert_eq!(early.get("/").text(), "hello");
    assert_eq!(early_unix.get("/").text(), "other");
    let mut answer = [0; 16];
    let length = datagrams.recv(&mut answer).expect("an answer");
    assert_eq!(&answer[..length], b"datagram");
    let said = server.stderr();
    for text in ["#3 \"site\", unix:", "#4 \"names\", 127.", "#5 \"\", 127."] {
        assert!(said.contains(text), "{said}");
    }
    assert!(!said.contains(UNUSED), "{said}");

    // The manager's sockets, and the socket file, outlive the server.
    server.signal(Signal::QUIT);
    assert!(server.wait_exited().success(), "{server}");
    TcpStream::connect(server.directory.address(1)).expect("the manager still listens");
    UnixStream::connect(server.directory.path().join("passed.sock")).expect("the manager still listens");
}

fn unused_socket_is_told_and_kept_for_a_reload(driver: Driver) {
    let (_manager, mut server) = Manager::start(driver, HELLO);
    assert_eq!(text_at_tcp(&server), "hello");
    let path = server.directory.path().join("passed.sock");
    assert!(server.stderr().contains(&format!("[warn] no \"listen\" for the passed socket unix:{}", path.display())));

    // No other process could open it.
    let mut waiting = Client::unix(&path);
    server.reload_http(driver, OTHER);
    assert_eq!(waiting.get("/").text(), "other");
    server.wait_logged(&format!("no \"listen\" for the passed socket {}", server.directory.address(1)));

    let mut waiting = server.connect_tcp(1);
    server.reload_http(driver, &format!("{HELLO} {}", OTHER.replace("other", "both")));
    assert_eq!(waiting.get("/").text(), "hello");
    assert_eq!(text_at_unix(&server), "both");
    // A refused reload changes nothing and removes no file.
    server.reload_http(driver, "nonsense;");
    assert_eq!(text_at_unix(&server), "both");
    server.reload_http(driver, HELLO);
    assert!(path.exists(), "the file is the manager's");

    // A new worker process has the sockets of the old one.
    let worker = server.worker();
    rustix::process::kill_process(worker, Signal::KILL).expect("it runs");
    assert!(wait_ended(worker));
    assert_eq!(text_at_tcp(&server), "hello");
    server.signal(Signal::QUIT);
    assert!(server.wait_exited().success(), "{server}");
    assert!(path.exists(), "the file is the manager's");
}

fn unused_socket_is_kept_over_an_upgrade(driver: Driver) {
    let (_manager, mut server) = Manager::start(driver, HELLO);
    let old = server.pid();
    server.signal(Signal::USR2);
    server.wait_notified("READY=1");
    let new = server.pid_in_file();
    assert_ne!(new, old);
    server.signal(Signal::QUIT);
    assert!(server.wait_exited().success(), "{server}");
    assert_eq!(text_at_tcp(&server), "hello");

    server.directory.write("gale.conf", server.directory.replaced(&http_configuration(driver, OTHER)));
    rustix::process::kill_process(new, Signal::HUP).expect("it runs");
    server.wait_logged("the new configuration is in force");
    assert_eq!(text_at_unix(&server), "other");
    rustix::process::kill_process(new, Signal::QUIT).expect("it runs");
    assert!(wait_ended(new));
    assert!(server.directory.path().join("passed.sock").exists(), "the file is the manager's");
}

fn reuseport_opens_more_sockets_beside_a_passed_one(driver: Driver) {
    let reuseport = HELLO.replace("%TCP%", "%TCP% reuseport");
    let (_manager, mut server) = Manager::start(driver, &reuseport);
    let ask_often = |server: &Server| (0..40).for_each(|_| assert_eq!(text_at_tcp(server), "hello"));
    ask_often(&server);
    server.reload_http(driver, HELLO);
    ask_often(&server);
    server.reload_http(driver, OTHER);
    server.reload_http(driver, &reuseport);
    // A new binary has all sockets that are accepted from, and no others.
    server.signal(Signal::USR2);
    server.wait_notified("READY=1");
    let new = server.pid_in_file();
    server.signal(Signal::QUIT);
    assert!(server.wait_exited().success(), "{server}");
    ask_often(&server);
    rustix::process::kill_process(new, Signal::QUIT).expect("it runs");
    assert!(wait_ended(new));
    TcpStream::connect(server.directory.address(1)).expect("the manager still listens");
}

fn without_a_master_sockets_are_kept_all_the_same(driver: Driver) {
    let directory = Directory::new();
    let manager = Manager::new(&directory);
    let one_process = |http: &str| format!("master_process off;\n{}", http_configuration(driver, http));
    let mut server = Setup::configuration(&one_process(HELLO)).launch_in(directory, &manager.sockets());
    server.wait_notified("READY=1");
    assert_eq!(text_at_tcp(&server), "hello");
    server.reload(&one_process(OTHER));
    assert_eq!(text_at_unix(&server), "other");
    server.reload(&one_process(HELLO));
    assert_eq!(text_at_tcp(&server), "hello");
    server.reload(&one_process(OTHER));
    assert_eq!(text_at_unix(&server), "other");
    server.signal(Signal::QUIT);
    assert!(server.wait_exited().success(), "{server}");
    assert!(server.directory.path().join("passed.sock").exists(), "the file is the manager's");
}

fn unusable_passed_sockets_are_named(driver: Driver) {
    let directory = Directory::new();
    let manager = Manager::new(&directory);
    let connection = TcpStream::connect(manager.tcp.local_addr().expect("bound")).expect("it listens");
    let file = directory.create("file");
    let setup = Setup::http(driver, "server { listen %UNIX%; return 200 hello; }");
    let mut server = setup.launch_in(directory, &[connection.into(), file.into()]);
    server.wait_notified("READY=1");
    let said = server.stderr();
    assert!(said.contains("[crit] the inherited socket #3 does not listen, passed as \"\", ignored"), "{said}");
    assert!(said.contains("getsockname() of the inherited socket #4 failed (88: "), "{said}");
    assert_eq!(server.get("/").text(), "hello");
    server.stop();

    // Too many; not a number; for another process.
    let cases = [
        ("LISTEN_FDS", "4", "getsockname() of the inherited socket #6 failed"),
        ("LISTEN_FDS", "two", "[emerg] invalid LISTEN_FDS environment variable \"two\", ignoring"),
        ("LISTEN_PID", "own", "[emerg] invalid LISTEN_PID environment variable \"own\", ignoring"),
        ("LISTEN_PID", "1", ""),
    ];
    for (name, value, message) in cases {
        let directory = Directory::new();
        let manager = Manager::new(&directory);
        let setup = Setup::http(driver, "server { listen %UNIX%; return 200 hello; }").environment(name, value);
        let mut server = setup.launch_in(directory, &manager.sockets());
        server.wait_notified("READY=1");
        let said = server.stderr();
        assert!(said.contains(message), "{said}");
        assert_eq!(said.contains(UNUSED), value == "4", "{said}");
        assert_eq!(server.get("/").text(), "hello");
        server.stop();
    }
}

#[test]
fn test_of_a_configuration_takes_no_sockets() {
    let directory = Directory::new();
    let manager = Manager::new(&directory);
    let text = http_configuration(Driver::Epoll, &format!("{HELLO} {OTHER}"));
    let mut test = Setup::configuration(&text).argument("-t").launch_in(directory, &manager.sockets());
    assert!(test.wait_exited().success(), "{test}");
    assert!(!test.stderr().contains("passed"), "{test}");
    assert!(test.directory.path().join("passed.sock").exists(), "the file is the manager's");
}
