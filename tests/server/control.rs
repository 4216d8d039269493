//! `gale reload`: commands over the control socket, and their answers.

use std::io::{Read, Write};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixStream};
use std::os::unix::process::CommandExt;
use std::process::{Child, Stdio};

use rustix::process::Signal;

use crate::support::{self, Directory, Driver, IdleProcess, NOBODY, Server, http_configuration, is_root, skip};

fn served(text: &str) -> String {
    http_configuration(Driver::Epoll, &format!("server {{ listen %UNIX%; {text} }}"))
}

fn write(directory: &Directory, configuration: &str) {
    directory.write("gale.conf", directory.replaced(configuration));
}

fn begin(directory: &Directory) -> Child {
    let mut command = support::binary(false);
    command.args(["reload", "-c"]).arg(directory.path().join("gale.conf"));
    command.stdin(Stdio::null()).stderr(Stdio::piped()).spawn().expect("the binary starts")
}

/// Output without the directory's name, and `true` if the new configuration is in force.
fn end(directory: &Directory, child: Child) -> (String, bool) {
    let output = child.wait_with_output().expect("it ends");
    let path = format!("{}/", directory.path().display());
    (String::from_utf8(output.stderr).expect("text").replace(&path, ""), output.status.success())
}

fn reload(directory: &Directory) -> (String, bool) {
    end(directory, begin(directory))
}

const IN_FORCE: &str = "gale: the new configuration is in force\n";

#[test]
fn reload_is_answered_when_it_is_in_force() {
    let server = Server::start(Driver::Epoll, "return 200 one;");
    for text in ["two", "three"] {
        write(&server.directory, &served(&format!("return 200 {text};")));
        assert_eq!(reload(&server.directory), (IN_FORCE.to_owned(), true));
        // No wait in between: the answer means that the new configuration is in force.
        assert_eq!(server.get("/").text(), text);
    }
    server.stop();
}

#[test]
fn errors_and_warnings_are_told_with_line_and_caret() {
    let mut server = Server::start(Driver::Epoll, "return 200 one;");
    write(&server.directory, &served("\n    lissten 80;\n"));
    let (text, is_in_force) = reload(&server.directory);
    assert!(!is_in_force);
    assert!(text.starts_with("gale: [emerg] unknown directive \"lissten\" in gale.conf:"), "{text}");
    assert!(text.contains("\n        lissten 80;\n        ^^^^^^^\n"), "{text}");
    assert!(text.ends_with("gale: the old configuration stays in force\n"), "{text}");
    assert_eq!(server.get("/").text(), "one");

    // An error that only shows when the file is opened.
    write(&server.directory, &served("access_log %DIR%/none/access.log; return 200 two;"));
    let (text, is_in_force) = reload(&server.directory);
    assert!(!is_in_force);
    assert!(text.starts_with("gale: [emerg] open() \"none/access.log\" failed (2: No such file"), "{text}");
    assert!(text.ends_with("gale: the old configuration stays in force\n"), "{text}");
    assert_eq!(server.get("/").text(), "one");

    write(&server.directory, &served("types_hash_max_size 2048; return 200 two;"));
    let (text, is_in_force) = reload(&server.directory);
    let warning = "gale: [warn] \"types_hash_max_size\" directive is accepted but has no effect in gale.conf:";
    assert!(is_in_force && text.starts_with(warning) && text.ends_with(IN_FORCE), "{text}");
    assert_eq!(server.get("/").text(), "two");
    server.end(Signal::TERM);
}

#[test]
fn a_change_that_needs_a_new_process_is_waited_for_too() {
    let server = Server::start(Driver::Epoll, "return 200 one;");
    write(&server.directory, &format!("env GALE_TEST=1;\n{}", served("return 200 two;")));
    assert_eq!(reload(&server.directory), (IN_FORCE.to_owned(), true));
    // The old process answers the connections that it has accepted before.
    while server.get("/").text() != "two" {}
    assert_eq!(server.log().matches("start worker process ").count(), 2, "{}", server.log());
    server.stop();
}

#[test]
fn concurrent_reload_requests_are_all_answered() {
    let server = Server::start(Driver::Epoll, "return 200 one;");
    write(&server.directory, &served("return 200 two;"));
    let asked: Vec<Child> = (0..8).map(|_| begin(&server.directory)).collect();
    for child in asked {
        assert_eq!(end(&server.directory, child), (IN_FORCE.to_owned(), true));
    }
    assert_eq!(server.get("/").text(), "two");
    server.stop();
}

#[test]
fn silent_or_malformed_control_clients_delay_no_reload() {
    let server = Server::start(Driver::Epoll, "return 200 one;");
    let name = format!("gale/control/{}", server.pid_in_file().as_raw_pid());
    let connect = || UnixStream::connect_addr(&SocketAddr::from_abstract_name(&name).expect("a name"));
    let silent: Vec<UnixStream> = (0..40).map(|_| connect().expect("it listens")).collect();
    for order in [&b"stop\n"[..], b"reload now\n", b"\0", &[b'x'; 100_000]] {
        let mut stream = connect().expect("it listens");
        // The server may close before the whole command is sent.
        let _ = stream.write_all(order);
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
        assert_eq!(answer, b"", "{:?}", &order[..order.len().min(20)]);
    }
    // A command in several pieces is accepted.
    let mut stream = connect().expect("it listens");
    stream.write_all(b"rel").expect("sent");
    stream.write_all(b"oad\n").expect("sent");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("text");
    assert_eq!(answer, "done\n");
    drop(silent);
    assert_eq!(reload(&server.directory), (IN_FORCE.to_owned(), true));
    server.stop();
}

#[test]
fn other_users_are_not_let() {
    if !is_root() {
        return skip("only root has another user to become");
    }
    let server = Server::start(Driver::Epoll, "return 200 one;");
    let mut command = support::binary(false);
    command.args(["reload", "-c"]).arg(server.directory.path().join("gale.conf")).uid(NOBODY).gid(NOBODY);
    let output = command.output().expect("the binary starts");
    assert!(!output.status.success());
    let number = server.pid_in_file().as_raw_pid();
    let expected = format!("gale: [error] process {number} did not answer: it is exiting, or access is denied\n");
    assert_eq!(String::from_utf8_lossy(&output.stderr), expected);
    assert!(!server.log().contains("reload requested"), "{}", server.log());
    server.stop();
}

#[test]
fn reload_without_a_server_names_the_cause() {
    let server = Server::start(Driver::Epoll, "return 200 one;");
    let directory = Directory::new();
    write(&directory, &served("return 200 one;"));
    let (text, succeeded) = reload(&directory);
    assert_eq!(text, "gale: [error] open() \"pid\" failed (2: No such file or directory)\n");
    assert!(!succeeded);
    // A process that is not a server.
    let process = IdleProcess::start();
    let number = process.number();
    directory.write("pid", format!("{number}\n"));
    let (text, succeeded) = reload(&directory);
    let expected = format!(
        "gale: [error] connect() to the control socket of process {number} failed (111: Connection refused); \
         \"gale -s reload\" sends a signal and does not wait\n"
    );
    assert_eq!((text, succeeded), (expected, false));
    server.stop();
}

#[test]
fn a_server_that_ends_refuses() {
    let mut server = Server::start(Driver::Epoll, "return 200 one;");
    let mut client = server.connect();
    client.get("/");
    server.signal(Signal::STOP);
    let child = begin(&server.directory);
    // Whichever signal arrives first, the command is answered.
    server.signal(Signal::TERM);
    server.signal(Signal::CONT);
    let (text, _) = end(&server.directory, child);
    assert!(!text.is_empty());
    server.end(Signal::TERM);
}
