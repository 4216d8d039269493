//! Accepting connections with the real binary: every way there is, while workers stall, change in number, and are full.

mod support;

use std::fs::File;
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, FileType, Mode};
use support::{Client, Driver, HAS_TEST_HOOKS, Server, Setup, with_each_driver};

with_each_driver!(connections_of_a_stalled_worker_are_answered_by_another, a_stall_is_logged_with_its_kind_and_place,);

/// More than enough that the kernel gives each of a few workers some: it spreads connections by a hash of their addresses.
const MANY: usize = 64;

/// A location in which a worker stalls until [`Stalled`] is dropped, and one that answers.
const STALL: &str = "location /stall { test_stall %DIR%/fifo; test_echo; } location / { return 200 hello; }";

/// A FIFO that everybody may open.
fn make_fifo(server: &Server) -> PathBuf {
    let path = server.directory.path().join("fifo");
    rustix::fs::mknodat(CWD, &path, FileType::Fifo, Mode::empty(), 0).expect("a FIFO");
    rustix::fs::chmod(&path, Mode::from_raw_mode(0o666)).expect("ours");
    path
}

/// A worker that stalls.
struct Stalled {
    writer: File,
    client: Client,
}

impl Stalled {
    /// Returns when the worker of this connection stalls.
    fn begin(mut client: Client, fifo: &Path) -> Stalled {
        client.send("GET /stall HTTP/1.1\r\nHost: localhost\r\n\r\n");
        // Opening it for writing waits for the reader.
        let writer = File::options().write(true).open(fifo).expect("a FIFO");
        Stalled { writer, client }
    }

    /// Lets it go on, and returns its connection.
    fn end(mut self) -> Client {
        drop(self.writer);
        assert_eq!(self.client.response().status, 200);
        self.client
    }
}

fn connections_of_a_stalled_worker_are_answered_by_another(driver: Driver) {
    if !HAS_TEST_HOOKS {
        return;
    }
    for listen in ["listen %TCP% reuseport;", "listen %TCP%;"] {
        let server = Setup::http(driver, &format!("server {{ {listen} {STALL} }}")).start();
        let fifo = make_fifo(&server);
        for _ in 0..4 {
            let stalled = Stalled::begin(server.connect_tcp(1), &fifo);
            for _ in 0..MANY {
                assert_eq!(server.connect_tcp(1).get("/").text(), "hello");
            }
            let mut client = stalled.end();
            assert_eq!(client.get("/").text(), "hello");
        }
        server.stop();
    }
}

fn a_stall_is_logged_with_its_kind_and_place(driver: Driver) {
    if !HAS_TEST_HOOKS {
        return;
    }
    let server = Setup::server(driver, STALL).start();
    let fifo = make_fifo(&server);
    let stalled = Stalled::begin(server.connect(), &fifo);
    // One that lasts for a second is told of while it goes on.
    let line = server.wait_logged(" ms so far: blocked, in ");
    assert!(line.contains("[warn]") && line.ends_with("gale_engine::http::worker::serve"), "{line}");
    stalled.end();
    server.stop();
}
