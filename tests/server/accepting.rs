//! Accepting connections with the real binary, by every method, while workers stall, change in number, and are full.

use std::fs::{DirEntry, File};
use std::io::{Read, Write};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};

use rustix::fs::{CWD, FileType, Mode};
use rustix::process::{Pid, Signal, kill_process, setpriority_process};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use serde_json::Value;

use crate::support::{
    self, Client, Driver, Server, Setup, descriptors_of, http_configuration, skip, until_in_time, wait_ended,
    with_each_driver,
};

with_each_driver!(
    connections_of_a_stalled_worker_are_answered_by_another,
    a_stall_is_logged_with_its_kind_and_place,
    a_worker_that_is_kept_from_running_says_so,
    with_accept_mutex_a_worker_that_stalls_does_not_keep_its_turn,
    with_accept_mutex_a_full_worker_hands_over,
    accept_mutex_comes_and_goes_with_a_reload,
    sockets_of_workers_that_go_are_adopted_and_given_back,
    connections_at_a_removed_address_need_room,
    clients_are_answered_while_a_new_binary_takes_over,
    memory_is_shared_out_again_when_the_number_of_workers_changes,
    listen_multipath_takes_connections_of_multipath_tcp,
);

/// Enough connections for each of a few workers: the kernel distributes them by a hash of their addresses.
const MANY: usize = 64;

/// A location in which a worker stalls until [`Stalled`] is dropped, and one that answers.
const STALL: &str = "location /stall { test_stall %DIR%/fifo; test_echo; } location / { return 200 hello; }";

/// Makes a FIFO that every user may open.
fn make_fifo(server: &Server) -> PathBuf {
    let path = server.directory.path().join("fifo");
    rustix::fs::mknodat(CWD, &path, FileType::Fifo, Mode::empty(), 0).expect("a FIFO");
    rustix::fs::chmod(&path, Mode::from_raw_mode(0o666)).expect("ours");
    path
}

/// A stalled worker.
struct Stalled {
    writer: File,
    client: Client,
}

impl Stalled {
    /// Stalls the worker of this connection; returns when it stalls.
    fn begin(mut client: Client, fifo: &Path) -> Stalled {
        client.send("GET /stall HTTP/1.1\r\nHost: localhost\r\n\r\n");
        // Opening for writing waits for the reader.
        let writer = File::options().write(true).open(fifo).expect("a FIFO");
        Stalled { writer, client }
    }

    /// Lets the worker continue and returns its connection.
    fn end(mut self) -> Client {
        drop(self.writer);
        assert_eq!(self.client.response().status, 200);
        self.client
    }
}

/// Workers take turns. The delay is so long that it never passes, so no test can depend on it.
const TURNS: &str = "worker_connections 128;\n    accept_mutex on;\n    accept_mutex_delay 1h;";
const NO_TURNS: &str = "worker_connections 128;";

fn connections_of_a_stalled_worker_are_answered_by_another(driver: Driver) {
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
    until_in_time("a stall that begins at once", || {
        let server = Setup::server(driver, &format!("{STALL} location /api/ {{ api; }}")).start();
        let fifo = make_fifo(&server);
        let log = server.log();
        let stalled = Stalled::begin(server.connect(), &fifo);
        // A stall that lasts a second is logged while it lasts.
        let mut kind = String::new();
        server.look_until("a stall that goes on", || {
            let stalls: Value = serde_json::from_str(server.get("/api/9/gale/stalls").text()).expect("JSON");
            let on = stalls.as_array().expect("a list").iter().find(|stall| stall["is_over"] == false);
            kind = on.map(|stall| stall["kind"].as_str().expect("text").to_owned()).unwrap_or_default();
            !kind.is_empty()
        });
        // On a busy machine the worker may have been descheduled before it blocked, which then is the kind. And each
        // kind is logged at most once a minute.
        let is_blocked = kind == "blocked" && !log.contains(": blocked, in ");
        if is_blocked {
            let line = server.wait_logged(" ms so far: blocked, in ");
            let place = "gale_http::connection::HttpConnection::serve";
            assert!(line.contains("[warn]") && line.ends_with(place), "{line}");
        }
        stalled.end();
        server.stop();
        is_blocked.then_some(())
    });
}

fn a_worker_that_is_kept_from_running_says_so(driver: Driver) {
    let processors = sched_getaffinity(None).expect("a mask");
    let mut one = CpuSet::new();
    one.set((0..CpuSet::MAX_CPU).find(|&number| processors.is_set(number)).expect("one"));
    let setup = Setup::server(driver, "root %DIR%/files; gzip on; gzip_min_length 1; gzip_types *;");
    let setup = setup.replace("worker_processes 2", "worker_processes 1");
    let server = setup.file("files/file", vec![7; 4 << 20]).start();
    let worker = worker_thread(server.worker());
    // The worker gets at most a fiftieth of one processor and always has work, so it is descheduled in the middle of a
    // turn.
    sched_setaffinity(Some(worker), &one).expect("ours");
    setpriority_process(Some(worker), 19).expect("ours");
    let is_told = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            sched_setaffinity(None, &one).expect("ours");
            while !is_told.load(Ordering::Relaxed) {
                std::hint::spin_loop();
            }
        });
        scope.spawn(|| {
            let mut client = server.connect();
            while !is_told.load(Ordering::Relaxed) {
                let response = client.ask("GET /file HTTP/1.1\r\nHost: h\r\nAccept-Encoding: gzip\r\n\r\n");
                assert_eq!(response.status, 200);
            }
        });
        let told = catch_unwind(AssertUnwindSafe(|| server.wait_logged(": preempted")));
        is_told.store(true, Ordering::Relaxed);
        let line = told.expect("it is told");
        assert!(line.contains("[info]") && line.contains("worker 0 stalled for "), "{line}");
    });
    server.stop();
}

/// Process number of the first event loop's thread.
fn worker_thread(process: Pid) -> Pid {
    let tasks = std::fs::read_dir(format!("/proc/{process}/task")).expect("it runs").flatten();
    let name = |task: &DirEntry| std::fs::read_to_string(task.path().join("comm")).unwrap_or_default();
    let task = tasks.into_iter().find(|task| name(task) == "worker 0\n").expect("there is one");
    Pid::from_raw(task.file_name().to_str().and_then(|number| number.parse().ok()).expect("a number"))
        .expect("positive")
}

fn with_accept_mutex_a_worker_that_stalls_does_not_keep_its_turn(driver: Driver) {
    let server = Setup::http(driver, &format!("server {{ listen %TCP%; {STALL} }}")).replace(NO_TURNS, TURNS).start();
    let fifo = make_fifo(&server);
    for _ in 0..4 {
        let stalled = Stalled::begin(server.connect_tcp(1), &fifo);
        for _ in 0..MANY {
            assert_eq!(server.connect_tcp(1).get("/").text(), "hello");
        }
        stalled.end();
    }
    server.stop();
}

fn with_accept_mutex_a_full_worker_hands_over(driver: Driver) {
    let text = "server { listen %TCP%; location / { test_worker; } }";
    let few = TURNS.replace("128", "8");
    let server = Setup::http(driver, text).replace(NO_TURNS, &few).start();
    let mut clients = Vec::new();
    let mut workers = Vec::new();
    for _ in 0..16 {
        let mut client = server.connect_tcp(1);
        // Once the first request is answered, half of the second was read too: the connection is never idle.
        let half = "GET / HTTP/1.1\r\nHost: localhost\r\n";
        workers.push(client.ask(format!("{half}\r\n{half}")).text().to_owned());
        clients.push(client);
    }
    for worker in ["0", "1"] {
        assert_eq!(workers.iter().filter(|each| *each == worker).count(), 8, "{workers:?}");
    }
    server.stop();
}

fn accept_mutex_comes_and_goes_with_a_reload(driver: Driver) {
    let text = "server { listen %TCP%; return 200 hello; }";
    let mut server = Setup::http(driver, text).start();
    let without = http_configuration(driver, text);
    let with = without.replace(NO_TURNS, TURNS);
    let alone = with.replace("worker_processes 2;", "worker_processes 1;");
    for configuration in [&with, &without, &with, &alone, &with, &alone, &without] {
        server.reload(configuration);
        for _ in 0..4 {
            assert_eq!(server.connect_tcp(1).get("/").text(), "hello");
        }
    }
    server.stop();
}

/// Threads that open connections with one request each, until they are told to stop.
struct Churn {
    is_over: Arc<AtomicBool>,
    threads: Vec<JoinHandle<usize>>,
}

impl Churn {
    fn begin(server: &Server, threads: usize) -> Churn {
        let is_over = Arc::new(AtomicBool::new(false));
        let address = server.directory.address(1);
        let work = move |is_over: Arc<AtomicBool>| {
            let mut count = 0;
            while !is_over.load(Ordering::Relaxed) {
                let mut client = Client::tcp(address);
                let answer = client.ask("GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n");
                assert_eq!(answer.text(), "hello");
                client.assert_closed();
                assert!(!client.was_reset());
                count += 1;
            }
            count
        };
        let thread = || {
            let is_over = Arc::clone(&is_over);
            thread::spawn(move || work(is_over))
        };
        Churn { threads: (0..threads).map(|_| thread()).collect(), is_over }
    }

    /// Stops the threads and returns the number of connections; each was answered and closed in order.
    fn end(self) -> usize {
        self.is_over.store(true, Ordering::Relaxed);
        self.threads.into_iter().map(|thread| thread.join().expect("all were answered")).sum()
    }
}

/// Settings for this number of workers in one process: in a sandbox those of io_uring would be in another process.
fn in_place(workers: usize) -> String {
    format!("worker_processes {workers}; sandbox off;")
}

fn sockets_of_workers_that_go_are_adopted_and_given_back(driver: Driver) {
    for listen in ["listen %TCP% reuseport;", "listen %TCP%;"] {
        let text = format!("server {{ {listen} return 200 hello; }}");
        let with_workers = |workers: usize| {
            let text = http_configuration(driver, &text);
            text.replace("worker_processes 2;", &in_place(workers))
        };
        let mut server = Setup::configuration(&with_workers(4)).start();
        let worker = server.worker();
        let descriptors = descriptors_of(worker);
        let churn = Churn::begin(&server, 4);
        for _ in 0..3 {
            for workers in [1, 4, 2, 3, 4] {
                server.reload(&with_workers(workers));
                server.connect_tcp(1).get("/");
            }
        }
        assert!(churn.end() > 0);
        assert_eq!(server.worker(), worker);
        // Draining loops keep descriptors for a while. Logging a request triggers the next check.
        server.directory.wait_until("time with as few descriptors as at the start", |_| {
            server.connect_tcp(1).get("/");
            descriptors_of(worker) <= descriptors
        });
        server.stop();
    }
}

/// An incomplete request head.
const HALF: &str = "GET / HTTP/1.1\r\nHost: localhost\r\n";

fn connections_at_a_removed_address_need_room(driver: Driver) {
    let configuration = |listen: &str, answer: &str| {
        let text = http_configuration(driver, &format!("server {{ listen %TCP%; {listen} return 200 {answer}; }}"));
        let text = text.replace("worker_processes 2;", "worker_processes 1;");
        text.replace(NO_TURNS, "worker_connections 8;")
    };
    let mut server = Setup::configuration(&configuration("listen %TCP2%;", "old")).start();
    // The worker began to listen at the other address with room left: the first one there exceeds the limit.
    // limit.
    let mut busy: Vec<Client> = [1, 1, 1, 1, 1, 1, 1, 1, 2].map(|address| server.connect_tcp(address)).into();
    for client in &mut busy {
        // Once the first request is answered, half of the second was read too: the connection is never idle.
        assert_eq!(client.ask(format!("{HALF}\r\n{HALF}")).text(), "old");
    }
    let mut waiting: Vec<Client> = (0..8).map(|_| server.connect_tcp(2)).collect();
    waiting.iter_mut().for_each(|client| client.send(format!("{HALF}\r\n")));
    server.reload(&configuration("", "new"));
    server.wait_logged(&format!("connections waiting at {} are dropped, 9 are open", server.directory.address(2)));
    for client in &mut waiting {
        assert!(client.read_to_end().is_empty(), "accepted although there is no room\n{server}");
    }
    for client in &mut busy {
        client.send("\r\n");
        assert_eq!(client.response().text(), "old");
    }
    busy.truncate(8);
    for client in &mut busy {
        assert_eq!(client.get("/").text(), "new");
    }
    server.stop();
}

fn clients_are_answered_while_a_new_binary_takes_over(driver: Driver) {
    let mut server = Setup::http(driver, "server { listen %TCP%; return 200 hello; }").start();
    // One at a time: a connection that no worker notices would wait for the next one, which never comes.
    let churn = Churn::begin(&server, 1);
    for _ in 0..16 {
        let old = server.pid_in_file();
        kill_process(old, Signal::USR2).expect("it runs");
        server.wait_notified("READY=1");
        kill_process(old, Signal::QUIT).expect("it runs");
        if old == server.pid() {
            assert!(server.wait_exited().success(), "{server}");
        }
        assert!(wait_ended(old));
    }
    assert!(churn.end() > 0);
    kill_process(server.pid_in_file(), Signal::QUIT).expect("it runs");
    server.assert_nothing_left();
}

fn memory_is_shared_out_again_when_the_number_of_workers_changes(driver: Driver) {
    let with_workers = |workers: usize| {
        let text = http_configuration(driver, "server { listen %UNIX%; location / { test_leases; } }");
        text.replace("worker_processes 2;", &in_place(workers))
    };
    let mut server = Setup::configuration(&with_workers(2)).start();
    let worker = server.worker();
    let mut kept = server.connect();
    let share = |client: &mut Client| client.get("/").text().parse::<usize>().expect("a number");
    let half = share(&mut kept);
    server.reload(&with_workers(4));
    assert_eq!(share(&mut kept), half / 2, "on a loop that was there");
    for _ in 0..8 {
        assert_eq!(share(&mut server.connect()), half / 2, "on any loop");
    }
    server.reload(&with_workers(1));
    let whole = share(&mut server.connect());
    assert!(whole / 2 == half, "{whole} for one, {half} for each of two");
    assert_eq!(server.worker(), worker);
    server.stop();
}

fn listen_multipath_takes_connections_of_multipath_tcp(driver: Driver) {
    let Some(_) = multipath_socket() else { return skip("the kernel has no MPTCP") };
    let blocks = |multipath: &str| {
        let blocks = format!(
            "http {{ access_log off; client_body_temp_path %DIR%/body;
                 server {{ listen %TCP% {multipath}; location / {{ return 200 http; }} }} }}
             stream {{ server {{ listen %TCP2% {multipath}; return stream; }}
             server {{ listen %TCP3%; return plain; }} }}"
        );
        support::configuration(driver, &blocks)
    };
    let mut server = Setup::configuration(&blocks("multipath")).start();
    // A server that answers without reading closes at once, so sending a request might fail.
    let ask = |number: usize, question: &str| {
        let mut socket = multipath_socket().expect("there was one");
        rustix::net::connect(&socket, &server.directory.address(number)).expect("it listens");
        socket.write_all(question.as_bytes()).expect("sent");
        let has_paths = !has_fallen_back(&socket);
        let mut answer = String::new();
        socket.read_to_string(&mut answer).expect("an answer");
        (has_paths, answer.split("\r\n\r\n").last().expect("one").to_owned())
    };
    assert_eq!(ask(1, "GET / HTTP/1.0\r\n\r\n"), (true, "http".to_owned()));
    assert_eq!(ask(2, ""), (true, "stream".to_owned()));
    assert_eq!(ask(3, ""), (false, "plain".to_owned()));
    // Clients without multipath TCP are served as before.
    assert_eq!(server.connect_tcp(1).get("/").text(), "http");
    server.reload(&blocks(""));
    server.wait_logged("is with \"multipath\", \"listen\" is without it, ignored until a restart");
    let text = blocks("").replace("listen %TCP3%", "listen %TCP3% udp multipath");
    let mut refused = Setup::configuration(&text).launch();
    assert!(!refused.wait_exited().success());
    assert!(refused.stderr().contains("\"multipath\" parameter is incompatible with \"udp\""), "{refused}");
}

/// A socket of multipath TCP, if the kernel supports it.
fn multipath_socket() -> Option<std::net::TcpStream> {
    use rustix::net::{AddressFamily, SocketFlags, SocketType, ipproto, socket_with};
    let protocol = Some(ipproto::MPTCP);
    let socket = socket_with(AddressFamily::INET, SocketType::STREAM, SocketFlags::CLOEXEC, protocol).ok()?;
    Some(socket.into())
}

/// `true` if the peer does not speak it (`MPTCP_INFO_FLAG_FALLBACK`).
fn has_fallen_back(socket: &std::net::TcpStream) -> bool {
    use std::os::fd::AsRawFd;
    const SOL_MPTCP: libc::c_int = 284;
    const MPTCP_INFO: libc::c_int = 1;
    // Six fields of a byte, two bytes of padding, and the flags.
    let mut info = [0u32; 64];
    let mut length = size_of_val(&info) as libc::socklen_t;
    // SAFETY: the kernel writes at most the given length, which is that of the buffer.
    let result = unsafe {
        libc::getsockopt(socket.as_raw_fd(), SOL_MPTCP, MPTCP_INFO, info.as_mut_ptr().cast(), &raw mut length)
    };
    result != 0 || info[2] & 1 != 0
}
