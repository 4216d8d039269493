//! Master and worker as processes of the real binary: start, stop, reload, upgrade, and faults in between.

use std::collections::BTreeSet;
use std::fs;
use std::io::Write;
use std::net::TcpListener;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::os::unix::net::UnixListener;
use std::time::{Duration, Instant};

use rustix::fs::{CWD, FileType, OFlags};
use rustix::process::{Pid, Resource, Signal};

use crate::support::{
    self, Client, DEADLINE, Driver, Gate, Server, Setup, SmallDisk, cpu_time, http_configuration, is_root, skip,
    until_in_time, wait_ended, with_each_driver,
};

with_each_driver!(
    a_server_starts_answers_and_stops,
    a_graceful_stop_lets_a_request_finish,
    last_answers_leave_before_their_loop_ends,
    last_answers_leave_before_a_worker_is_taken_away,
    unread_last_answers_end_at_the_shutdown_timeout,
    an_answer_under_way_comes_whole_although_its_connection_ends,
    fast_stop_waits_for_no_client,
    a_connection_survives_reloads_and_sees_each,
    a_broken_file_changes_nothing_and_is_told_of,
    a_removed_address_is_closed_and_a_new_one_opened,
    silent_connection_accepted_before_a_change_is_answered,
    logs_are_reopened_under_their_names,
    workers_killed_in_a_row_are_replaced_at_once,
    killed_worker_is_replaced_and_no_client_is_refused,
    the_number_of_workers_follows_the_configuration,
    descriptors_may_run_out,
    room_for_descriptors_is_made_before_the_loops_start,
    no_process_leaves_a_core_file_unless_the_configuration_says_so,
    connections_may_run_out,
    shutdown_timeout_ends_unfinished_requests,
    a_panic_costs_one_connection,
    one_process_does_everything_without_a_master,
    a_new_binary_takes_over,
    an_upgrade_closes_no_idle_connection,
    a_process_that_is_told_to_leave_before_its_successor_serves_waits_for_it,
    the_master_keeps_the_name_that_it_was_started_by,
    a_reload_that_needs_a_new_process_closes_no_idle_connection,
    unread_log_pipe_delays_no_requests,
    event_loops_stay_on_the_processors_of_the_configuration,
);

fn kill(pid: Pid, signal: Signal) {
    rustix::process::kill_process(pid, signal).expect("it runs");
}

/// Processors that the threads of this name may use, as the kernel writes them.
fn processors_of(process: Pid, thread_name: &str) -> Vec<String> {
    let threads = fs::read_dir(format!("/proc/{process}/task")).expect("it runs").flatten();
    let statuses = threads.filter_map(|thread| fs::read_to_string(thread.path().join("status")).ok());
    let field = |status: &str, name: &str| -> Option<String> {
        Some(status.lines().find_map(|line| line.strip_prefix(name))?.trim().to_owned())
    };
    statuses
        .filter(|status| field(status, "Name:").as_deref() == Some(thread_name))
        .filter_map(|status| field(&status, "Cpus_allowed_list:"))
        .collect()
}

/// Processors that the two event loops may use. A thread started by a loop has the loop's name until it first runs,
/// which may take long on a busy machine: so each name is looked up until only one thread has it.
#[track_caller]
fn processors_of_loops(server: &Server) -> [String; 2] {
    let worker = server.worker();
    ["worker 0", "worker 1"].map(|name| {
        let mut found = Vec::new();
        server.look_until(&format!("only thread {name}"), || {
            found = processors_of(worker, name);
            found.len() == 1
        });
        found.remove(0)
    })
}

fn event_loops_stay_on_the_processors_of_the_configuration(driver: Driver) {
    // The last of the processors that this process may use.
    let allowed = fs::read_to_string("/proc/self/status").expect("this process");
    let allowed = allowed.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:")).expect("a list").trim();
    let last: usize = allowed.rsplit([',', '-']).next().expect("one").parse().expect("a number");
    let text = "upstream backend { server unix:%DIR%/behind.sock; keepalive 4; }
        server { listen unix:%DIR%/behind.sock; return 200; }
        server { listen %UNIX%; location = /slow { test_pool default %DIR%/gate; }
                 location = /passed { proxy_pass http://backend; } location / { return 200; } }";
    let anywhere = http_configuration(driver, text);
    let configuration = |affinity: String| format!("worker_cpu_affinity {affinity};\n{anywhere}");
    let mask = format!("1{}", "0".repeat(last));
    let mut server = Setup::configuration(&configuration(format!("{mask} {mask} {mask}"))).start();
    assert!(server.stderr().contains("is not equal to the number of \"worker_cpu_affinity\" masks"), "{server}");
    let worker = server.worker();
    assert_eq!(processors_of_loops(&server), [last.to_string(), last.to_string()]);
    server.wait_logged(&format!("sched_setaffinity(): using cpu #{last}"));
    // Other threads are not pinned, whichever loop has started them.
    let gate = Gate::new(&server);
    let mut client = server.connect();
    client.send("GET /slow HTTP/1.1\r\nHost: h\r\n\r\n");
    let task = gate.task();
    let are_anywhere = |thread_name: &str| processors_of(worker, thread_name).iter().all(|list| list == allowed);
    assert!(!processors_of(worker, "pool default").is_empty());
    // A new thread gets its name before it leaves the processors of the loop that started it.
    server.look_until("threads anywhere", || are_anywhere("pool default") && are_anywhere("log"));
    drop(task);
    assert_eq!(client.response().status, 200);
    assert_eq!(server.get("/passed").status, 200);
    // The idle connection is parked after a moment.
    let begin = Instant::now();
    while processors_of(worker, "idle streams") != [allowed] || processors_of(worker, "watchdog") != [allowed] {
        assert_eq!(server.get("/").status, 200);
        assert!(begin.elapsed() < DEADLINE, "{:?} {server}", processors_of(worker, "idle streams"));
    }
    // A reload changes the processors.
    server.reload(&anywhere);
    assert_eq!(server.worker(), worker);
    assert_eq!(processors_of_loops(&server), [allowed, allowed]);
    server.reload(&configuration("auto".to_owned()));
    let singles = processors_of_loops(&server);
    assert!(singles.iter().all(|list| list.parse::<usize>().is_ok()), "{singles:?}");
    server.stop();
}

/// A request without its end.
const HALF: &str = "GET / HTTP/1.1\r\nHost: localhost\r\n";

/// The directive of the support's configurations, and its replacement in tests that need all connections in one place.
const TWO_WORKERS: &str = "worker_processes 2;";
const ONE_WORKER: &str = "worker_processes 1;";

fn a_server_starts_answers_and_stops(driver: Driver) {
    let server = Server::start(driver, "location / { return 200 hello; }");
    let response = server.get("/");
    assert_eq!((response.status, response.text()), (200, "hello"));
    assert_eq!(server.pid_in_file(), server.pid());
    server.stop();
}

#[cfg(all(target_arch = "x86_64", target_env = "gnu"))]
#[test]
fn a_worker_tells_its_c_library_about_the_processor_unless_the_configuration_does() {
    const VARIABLE: &str = "GLIBC_TUNABLES=";
    let text = http_configuration(Driver::Epoll, "server { listen %UNIX%; return 200 $pid; }");
    let told = |server: &Server| {
        let pid = server.get("/").text().to_owned();
        let environment = fs::read_to_string(format!("/proc/{pid}/environ")).unwrap_or_default();
        environment.split('\0').filter_map(|entry| Some(entry.strip_prefix(VARIABLE)?.to_owned())).collect::<Vec<_>>()
    };
    let processors = fs::read_to_string("/proc/cpuinfo").expect("Linux");
    let is_amd = processors.contains("AuthenticAMD");
    let family =
        processors.lines().find_map(|line| line.strip_prefix("cpu family")?.rsplit(' ').next()?.parse::<u32>().ok());
    let mut server = Setup::configuration(&text).start();
    assert_eq!(told(&server).len(), usize::from(is_amd && family.is_some_and(|family| family >= 25)));
    server.reload(&format!("env GLIBC_TUNABLES=glibc.malloc.tcache_count=7;\n{text}"));
    server.directory.wait_until("another worker", |_| told(&server) == ["glibc.malloc.tcache_count=7"]);
    server.stop();
}

#[test]
fn a_ring_that_the_kernel_refuses_is_replaced_and_the_log_says_why() {
    // No io_uring at all, and one that is no better than epoll if the best method is asked for.
    for (driver, kernel_max, level) in [("use io_uring;", "5.0", "[warn]"), ("", "6.0", "[notice]")] {
        let setup = Setup::server(Driver::IoUring, "return 200 hello;").replace("use io_uring;", driver);
        let environment = format!("daemon off;\nenv GALE_TEST_KERNEL_MAX={kernel_max};");
        let server = setup.replace("daemon off;", &environment).start();
        // Logged by both workers, with the reason. (This kernel may have a reason of its own.)
        server.wait_logged_times("io_uring is not available (", 2);
        server.wait_logged_times("), epoll is used", 2);
        assert!(server.wait_logged("io_uring is not available (").contains(level), "{server}");
        let mut client = server.connect();
        for _ in 0..3 {
            assert_eq!(client.get("/").text(), "hello");
        }
        server.stop();
    }
}

#[test]
fn another_event_method_gets_a_new_worker_process() {
    let mut server = Setup::server(Driver::Epoll, "return 200 epoll;").start();
    server.wait_logged("using the \"epoll\" event method");
    let first = server.worker();
    let mut client = server.connect();
    assert_eq!(client.get("/").text(), "epoll");
    let configuration = server.directory.read("gale.conf");
    server.reload(&configuration.replace("use epoll;", "use io_uring;").replace("200 epoll", "200 ring"));
    // A message about io_uring, which this kernel may or may not allow.
    server.wait_logged("io_uring");
    // The old process ends when its connections have ended or moved to the new one.
    server.wait_logged(&format!("worker process {first} exited with code 0"));
    server.wait_logged(": the new configuration is in force");
    assert_eq!((server.get("/").text(), client.get("/").text()), ("ring", "ring"));
    assert_ne!(server.worker(), first);
    server.stop();
}

#[test]
fn an_ordinary_user_needs_no_rights() {
    let server = Setup::server(Driver::Epoll, "return 200 hello;").unprivileged().start();
    assert_eq!(server.get("/").text(), "hello");
    server.stop();
}

fn a_graceful_stop_lets_a_request_finish(driver: Driver) {
    let mut server = Setup::server(driver, "return 200 hello;").replace(TWO_WORKERS, ONE_WORKER).start();
    let mut idle = server.connect();
    assert_eq!(idle.get("/").header("Connection"), Some("keep-alive"));
    let mut busy = server.connect();
    busy.send(HALF);
    // The only worker has begun the busy request once it answers a later connection.
    assert_eq!(server.get("/").status, 200);
    server.signal(Signal::QUIT);
    idle.assert_closed();
    busy.send("\r\n");
    let response = busy.response();
    assert_eq!((response.text(), response.header("Connection")), ("hello", Some("close")));
    busy.assert_closed();
    assert!(server.wait_exited().success(), "{server}");
    server.assert_nothing_left();
}

fn with_small_sockets(driver: Driver) -> String {
    let answer = format!("server {{ listen %TCP% sndbuf=4k; return 200 {}; }}", "a".repeat(ANSWER_BYTES));
    http_configuration(driver, &answer)
}

/// Clients that have requested more than the sockets hold, and have read nothing. With io_uring all of it counts as
/// sent, and their connections are idle.
fn ask_for_more(server: &Server) -> Vec<Client> {
    let clients = (0..CLIENTS).map(|_| {
        let mut client = Client::tcp_with_small_buffer(server.directory.address(1));
        // Data that a connection has waited for arrives by the ring, and its later responses are sent by it.
        for _ in 0..WARM {
            assert_eq!(client.get("/").body.len(), ANSWER_BYTES);
            assert_eq!(server.connect_tcp(1).get("/").status, 200);
        }
        client.send(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n".repeat(8));
        client
    });
    let clients = clients.collect();
    // A worker has answered all that it can once it answers a later connection.
    for _ in 0..LATER {
        assert_eq!(server.connect_tcp(1).get("/").status, 200);
    }
    clients
}

const ANSWER_BYTES: usize = 3000;
const CLIENTS: usize = 8;
const WARM: usize = 2;
const LATER: usize = 4;

/// Ends the server and checks that every logged response has arrived complete.
fn assert_logged_arrived(mut server: Server, clients: Vec<Client>) {
    let body = "a".repeat(ANSWER_BYTES);
    let mut taken = 2 * WARM * CLIENTS + LATER;
    for mut client in clients {
        let answers = String::from_utf8(client.read_to_end()).expect("text");
        assert_eq!(answers.matches(&body).count(), answers.matches("HTTP/1.1 200").count(), "all are whole");
        taken += answers.matches(&body).count();
    }
    assert!(server.wait_exited().success(), "{server}");
    assert_eq!(server.directory.read("access.log").lines().count(), taken);
}

fn last_answers_leave_before_their_loop_ends(driver: Driver) {
    let server = Setup::configuration(&with_small_sockets(driver)).replace(TWO_WORKERS, ONE_WORKER).start();
    let clients = ask_for_more(&server);
    server.signal(Signal::QUIT);
    server.wait_logged("gracefully shutting down");
    assert_logged_arrived(server, clients);
}

fn last_answers_leave_before_a_worker_is_taken_away(driver: Driver) {
    let configuration = with_small_sockets(driver);
    let mut server = Setup::configuration(&configuration).start();
    let clients = ask_for_more(&server);
    server.reload(&configuration.replace(TWO_WORKERS, ONE_WORKER));
    server.signal(Signal::QUIT);
    server.wait_logged("gracefully shutting down");
    assert_logged_arrived(server, clients);
}

fn unread_last_answers_end_at_the_shutdown_timeout(driver: Driver) {
    let setup = Setup::configuration(&with_small_sockets(driver)).replace(TWO_WORKERS, ONE_WORKER);
    let mut server = setup.replace("daemon off;", "daemon off;\nworker_shutdown_timeout 200ms;").start();
    let clients = ask_for_more(&server);
    server.end(Signal::QUIT);
    drop(clients);
}

/// A client of a kept connection may have sent its next request already, which must not cost it the response.
fn an_answer_under_way_comes_whole_although_its_connection_ends(driver: Driver) {
    const LARGE_BYTES: usize = 8 << 20;
    let both = "server { listen %TCP%; listen %UNIX%; root %DIR%; }";
    for why in ["reload", "stop", "close"] {
        let setup = Setup::http(driver, both).file("large", vec![b'x'; LARGE_BYTES]);
        let mut server = setup.start();
        let mut client = Client::tcp_with_small_buffer(server.directory.address(1));
        let wanted = if why == "close" { "close" } else { "keep-alive" };
        let request = format!("GET /large HTTP/1.1\r\nHost: localhost\r\nConnection: {wanted}\r\n\r\n");
        client.send(&request);
        assert_eq!(client.head().header("Connection"), Some(wanted));
        match why {
            "reload" => server.reload_http(driver, "server { listen %UNIX%; root %DIR%; }"),
            "stop" => {
                server.signal(Signal::QUIT);
                server.wait_logged("gracefully shutting down");
            }
            _ => {}
        }
        client.send(&request);
        assert_eq!(client.read_to_end().len(), LARGE_BYTES, "{why}");
        assert!(!client.was_reset());
        drop(client);
        match why {
            "stop" => assert!(server.wait_exited().success()),
            _ => server.end(Signal::QUIT),
        }
    }
}

fn fast_stop_waits_for_no_client(driver: Driver) {
    let mut server = Server::start(driver, "return 200 hello;");
    let mut busy = server.connect();
    busy.send(HALF);
    server.end(Signal::INT);
    busy.assert_closed();
}

fn a_connection_survives_reloads_and_sees_each(driver: Driver) {
    let mut server = Server::start(driver, "return 200 0;");
    let worker = server.worker();
    let mut client = server.connect();
    for number in 1..=20 {
        server.reload_http(driver, &format!("server {{ listen %UNIX%; return 200 {number}; }}"));
        assert_eq!(client.get("/").text(), number.to_string());
        server.wait_logged_times(": the new configuration is in force", number);
    }
    assert_eq!(server.log().matches("the new configuration is in force").count(), 20);
    assert_eq!(server.worker(), worker, "reloads take place in the same process");
    server.stop();
}

fn a_broken_file_changes_nothing_and_is_told_of(driver: Driver) {
    let mut server = Server::start(driver, "return 200 old;");
    server.reload("events {}\nhttp {\n    server {\n        lissten 80;\n    }\n}\n");
    let path = server.directory.path().join("gale.conf");
    let line = server.wait_logged("[emerg]");
    assert!(line.ends_with(&format!("unknown directive \"lissten\" in {}:4", path.display())), "{line}");
    let line = server.wait_logged(": the old configuration stays in force");
    assert!(line.contains(" [error] "), "{line}");
    assert_eq!(server.get("/").text(), "old");
    server.reload_http(driver, "server { listen %UNIX%; access_log %DIR%/missing/log; return 200 new; }");
    server.wait_logged("missing/log\" failed (2: No such file or directory)");
    assert_eq!(server.get("/").text(), "old");
    fs::remove_file(&path).expect("ours");
    kill(server.pid(), Signal::HUP);
    server.wait_notified("RELOADING=1");
    server.wait_notified("READY=1");
    assert_eq!(server.get("/").text(), "old");
    assert!(!server.log().contains("the new configuration is in force"));
    server.reload_http(driver, "server { listen %UNIX%; return 200 new; }");
    assert_eq!(server.get("/").text(), "new");
    server.wait_logged(": the new configuration is in force");
    assert_eq!(server.log().matches("the old configuration stays in force").count(), 3);
    server.end(Signal::TERM);
}

fn a_removed_address_is_closed_and_a_new_one_opened(driver: Driver) {
    let both = "server { listen %TCP%; listen %UNIX%; return 200 one; }";
    let mut server = Setup::http(driver, both).start();
    let mut kept = server.connect();
    let mut removed = server.connect_tcp(1);
    assert_eq!((kept.get("/").text(), removed.get("/").text()), ("one", "one"));
    server.reload_http(driver, "server { listen %TCP2%; return 200 two; } server { listen %UNIX%; return 200 three; }");
    assert_eq!(server.connect_tcp(2).get("/").text(), "two");
    assert_eq!(kept.get("/").text(), "three");
    let refused = std::net::TcpStream::connect(server.directory.address(1)).expect_err("nobody listens there any more");
    assert_eq!(refused.kind(), std::io::ErrorKind::ConnectionRefused);
    // The connection to the removed address ends, at the latest with its next response.
    if removed.try_send(format!("{HALF}\r\n")).is_ok() {
        let rest = removed.read_to_end();
        assert!(rest.is_empty() || rest.starts_with(b"HTTP/1.1 200 "), "{}", String::from_utf8_lossy(&rest));
    }
    server.reload_http(driver, "server { listen %TCP2%; return 200 four; }");
    assert!(!server.directory.path().join("gale.sock").exists(), "its file goes with a Unix socket");
    assert_eq!(server.connect_tcp(2).get("/").text(), "four");
    server.stop();
}

/// The kernel holds back connections of deferred sockets until data arrives.
fn silent_connection_accepted_before_a_change_is_answered(driver: Driver) {
    let start = || Setup::http(driver, "server { listen %TCP%; listen %UNIX%; return 200 one; }").start();
    until_in_time("the requests after a reload", || {
        let mut server = start();
        let (clients, begin) = connect_silent(&server);
        server.begin_reload(&http_configuration(driver, "server { listen %UNIX%; return 200 two; }"));
        while server.get("/").text() != "two" {
            assert!(begin.elapsed() < DEADLINE, "{server}");
        }
        let answers = ask_silent(clients, begin)?;
        assert!(answers.iter().all(|answer| answer == "one"), "{answers:?} {server}");
        server.wait_reloaded();
        server.stop();
        Some(())
    });
    until_in_time("the requests after a graceful stop", || {
        let mut server = start();
        let (clients, begin) = connect_silent(&server);
        server.signal(Signal::QUIT);
        server.wait_logged("gracefully shutting down");
        let answers = ask_silent(clients, begin)?;
        assert!(answers.iter().all(|answer| answer == "one"), "{answers:?} {server}");
        assert!(server.wait_exited().success());
        Some(())
    });
}

/// Opens connections that send nothing; also returns the time when all of them were open.
fn connect_silent(server: &Server) -> (Vec<Client>, Instant) {
    ((0..100).map(|_| server.connect_tcp(1)).collect(), Instant::now())
}

/// Sends requests on these connections and returns the responses; `None` if that is too late: a connection that is
/// silent for more than a second after the server has left the address may be dropped.
#[track_caller]
fn ask_silent(mut clients: Vec<Client>, begin: Instant) -> Option<Vec<String>> {
    let sent: Vec<_> = clients.iter_mut().map(|client| client.try_send("GET / HTTP/1.1\r\nHost: h\r\n\r\n")).collect();
    if begin.elapsed() > Duration::from_secs(1) {
        return None;
    }
    sent.into_iter().for_each(|sent| sent.expect("no connection was reset"));
    Some(clients.iter_mut().map(|client| client.response().text().to_owned()).collect())
}

fn logs_are_reopened_under_their_names(driver: Driver) {
    let server = Server::start(driver, "return 200 hello;");
    server.get("/before");
    server.directory.wait_line("access.log", "GET /before");
    for name in ["error.log", "access.log"] {
        let path = server.directory.path().join(name);
        fs::rename(&path, path.with_extension("old")).expect("ours");
    }
    kill(server.pid(), Signal::USR1);
    // The worker reopens the access log, last of all.
    server.directory.wait_until("a new access.log", |directory| {
        directory.path().join("access.log").exists() && directory.path().join("error.log").exists()
    });
    let is_open = |server: &Server| {
        let wanted = server.directory.path().join("access.log");
        let entries = fs::read_dir(format!("/proc/{}/fd", server.worker())).expect("it runs").flatten();
        entries.filter_map(|entry| fs::read_link(entry.path()).ok()).any(|target| target == wanted)
    };
    // The worker has reopened the log once a later request is logged there; at most one request is in flight.
    let mut number = 0;
    server.directory.wait_until("a line in the new access.log", |directory| {
        number += 1;
        server.get(&format!("/after/{number}"));
        directory.try_read("access.log").is_some_and(|text| text.contains("GET /after/"))
    });
    assert!(is_open(&server));
    assert!(server.directory.read("access.old").contains("GET /before"));
    server.stop();
}

fn workers_killed_in_a_row_are_replaced_at_once(driver: Driver) {
    let mut server = Server::start(driver, "return 200 hello;");
    // No more workers than may die before they are ready: they answer before the master learns that they are ready.
    for _ in 0..4 {
        let worker = server.worker();
        kill(worker, Signal::KILL);
        server.wait_logged(&format!("worker process {worker} exited on signal 9"));
        assert_eq!(server.get("/").text(), "hello");
    }
    assert!(!server.log().contains("worker processes keep dying"), "{server}");
    server.end(Signal::TERM);
}

fn killed_worker_is_replaced_and_no_client_is_refused(driver: Driver) {
    let mut server = Server::start(driver, "return 200 hello;");
    for _ in 0..3 {
        let worker = server.worker();
        kill(worker, Signal::KILL);
        // The master also holds the listening socket, so clients wait in its queue.
        let mut client = server.connect();
        client.try_send(format!("{HALF}\r\n")).expect("queued");
        let answered = client.read_some_or_end();
        if answered.is_empty() {
            // Accepted by the old worker before the signal arrived.
            assert_eq!(server.get("/").text(), "hello");
        }
        server.wait_logged(&format!("worker process {worker} exited on signal 9"));
        assert_ne!(server.worker(), worker);
    }
    assert_eq!(server.get("/").text(), "hello");
    server.end(Signal::TERM);
}

#[test]
fn a_worker_without_a_master_serves_until_it_is_told() {
    let server = Server::start(Driver::Epoll, "return 200 hello;");
    let worker = server.worker();
    let mut client = server.connect();
    kill(server.pid(), Signal::KILL);
    assert_eq!(client.get("/").text(), "hello");
    assert_eq!(server.get("/").text(), "hello");
    kill(worker, Signal::QUIT);
    assert!(wait_ended(worker));
}

#[test]
fn an_address_in_use_is_tried_again_and_then_told() {
    let server = Setup::http(Driver::Epoll, "server { listen %TCP%; }");
    let directory = support::Directory::new();
    let holder = TcpListener::bind(directory.address(1)).expect("ours");
    let address = directory.address(1).to_string();
    let mut server = server.replace("%TCP%", &address).launch();
    assert_eq!(server.wait_exited().code(), Some(1));
    let stderr = server.stderr();
    let message = format!("gale: [emerg] bind() to {address} failed (98: Address already in use)\n");
    assert_eq!(stderr.matches(&message).count(), 5, "{stderr}");
    assert!(stderr.ends_with("gale: [emerg] still could not bind()\n"), "{stderr}");
    let log = server.log();
    assert_eq!(log.matches("failed (98: Address already in use)\n").count(), 5, "{log}");
    assert!(log.ends_with(": still could not bind()\n"), "{log}");
    server.assert_nothing_left();
    drop(holder);
}

#[test]
fn socket_file_of_another_process_is_not_removed() {
    let directory = support::Directory::new();
    let path = directory.path().join("other.sock");
    let _holder = UnixListener::bind(&path).expect("ours");
    let text = format!("server {{ listen unix:{}; }}", path.display());
    let mut server = Setup::http(Driver::Epoll, &text).launch();
    assert_eq!(server.wait_exited().code(), Some(1));
    assert!(server.stderr().contains("failed (98: Address already in use)"), "{}", server.stderr());
    assert!(path.exists());
    server.assert_nothing_left();
}

#[test]
fn a_daemon_serves_when_its_starter_has_ended() {
    let text = http_configuration(Driver::Epoll, "server { listen %UNIX%; return 200 hello; }");
    let text = text.replace("daemon off;", "daemon on;");
    let mut server = Setup::configuration(&text).launch();
    assert!(server.wait_exited().success(), "{server}");
    assert_eq!(server.get("/").text(), "hello");
    let master = server.pid_in_file();
    assert_ne!(master, server.pid());
    assert_eq!(server.stderr(), "");
    server.wait_notified("READY=1");
    server.reload(&text.replace("hello", "again"));
    assert_eq!(server.get("/").text(), "again");
    kill(master, Signal::QUIT);
    server.assert_nothing_left();
}

#[test]
fn a_daemon_that_cannot_start_says_so_on_the_terminal() {
    let text = "daemon on;\npid %DIR%/missing/pid;\nerror_log %DIR%/error.log;\nevents {}\n";
    let mut server = Setup::configuration(text).launch();
    assert_eq!(server.wait_exited().code(), Some(1));
    assert!(server.stderr().contains("missing/pid\" failed (2: No such file or directory)"), "{server}");
    assert!(server.log().contains("missing/pid\" failed (2: No such file or directory)"), "{server}");
    server.assert_nothing_left();
}

fn one_process_does_everything_without_a_master(driver: Driver) {
    let text = http_configuration(driver, "server { listen %UNIX%; return 200 hello; }");
    let text = format!("master_process off;\n{text}");
    let mut server = Setup::configuration(&text).start();
    assert_eq!(server.get("/").text(), "hello");
    assert_eq!(support::children_of(server.pid()), []);
    let mut client = server.connect();
    server.reload(&text.replace("hello", "again"));
    assert_eq!(client.get("/").text(), "again");
    server.wait_logged(": the new configuration is in force");
    server.reload("bogus;");
    assert_eq!(client.get("/").text(), "again");
    server.wait_logged(": the old configuration stays in force");
    server.end(Signal::QUIT);
}

fn loops_of(pid: Pid) -> BTreeSet<String> {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).expect("it runs").flatten();
    let names = tasks.filter_map(|task| fs::read_to_string(task.path().join("comm")).ok());
    names.map(|name| name.trim_end().to_owned()).filter(|name| name.starts_with("worker ")).collect()
}

fn the_number_of_workers_follows_the_configuration(driver: Driver) {
    let text = http_configuration(driver, "server { listen %UNIX%; listen %TCP% reuseport; return 200 hello; }");
    let with = |count: usize| text.replace(TWO_WORKERS, &format!("worker_processes {count};"));
    let mut server = Setup::configuration(&with(1)).start();
    let worker = server.worker();
    let mut clients = vec![server.connect()];
    for count in [4, 2, 3, 1] {
        server.reload(&with(count));
        if count > 2 {
            // No connection is lost when workers are added; a worker that is removed closes its idle ones.
            assert_eq!(loops_of(server.worker()).len(), count, "{server}");
            for client in &mut clients {
                assert_eq!(client.get("/").text(), "hello", "with {count}\n{server}");
            }
        }
        // Connections in the queue of a removed worker's socket are taken over by the other workers.
        clients = (0..20).map(|_| server.connect_tcp(1)).chain((0..4).map(|_| server.connect())).collect();
        for client in &mut clients {
            assert_eq!(client.get("/").text(), "hello", "with {count}\n{server}");
        }
    }
    // Further loops make their rings in the same process; see `sandbox.rs`.
    assert_eq!(server.worker(), worker, "{server}");
    server.stop();
}

/// User IDs of a process: real, effective, saved, file system.
fn users_of(pid: Pid) -> Vec<u32> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).expect("it runs");
    let line = status.lines().find_map(|line| line.strip_prefix("Uid:")).expect("users");
    line.split_whitespace().map(|number| number.parse().expect("a number")).collect()
}

#[test]
fn the_worker_of_root_is_the_user_of_the_configuration() {
    if !is_root() {
        return skip("only root has another user to become");
    }
    let daemon = fs::read_to_string("/etc/passwd").expect("users").lines().find_map(|line| {
        let mut fields = line.split(':');
        (fields.next() == Some("daemon")).then(|| fields.nth(1).expect("a number").parse::<u32>().expect("a number"))
    });
    let Some(daemon) = daemon else { return skip("there is no user daemon") };
    let text = http_configuration(Driver::Epoll, "server { listen %UNIX%; root %DIR%/files; }");
    let setup = Setup::configuration(&format!("user daemon;\n{text}"));
    let server = setup.file("files/open", "open").file("files/closed", "closed").start();
    let closed = server.directory.path().join("files/closed");
    rustix::fs::chmod(&closed, 0o600.into()).expect("ours");
    assert_eq!(users_of(server.pid()), [0; 4]);
    assert_eq!(users_of(server.worker()), [daemon; 4]);
    assert_eq!(server.get("/open").text(), "open");
    assert_eq!(server.get("/closed").status, 403);
    server.wait_logged("files/closed\" failed (13: Permission denied)");
    assert_eq!(fs::metadata(server.directory.path().join("body")).expect("made").uid(), daemon);
    // The master has opened the logs; the worker could not.
    assert_eq!(fs::metadata(server.directory.path().join("error.log")).expect("made").uid(), 0);
    server.stop();
}

#[test]
fn worker_of_root_runs_as_nobody_by_default() {
    let server = Server::start(Driver::Epoll, "return 200 hello;");
    let own = rustix::process::geteuid().as_raw();
    assert_eq!(users_of(server.worker()), [if is_root() { support::NOBODY } else { own }; 4]);
    server.stop();
}

#[test]
fn the_user_directive_of_an_ordinary_user_is_warned_of() {
    let text = http_configuration(Driver::Epoll, "server { listen %UNIX%; return 200 hello; }");
    let server = Setup::configuration(&format!("user root;\n{text}")).unprivileged().start();
    assert_eq!(server.get("/").text(), "hello");
    let warning = "gale: [warn] the \"user\" directive makes sense only if the master process runs with super-user \
                   privileges, ignored in ";
    assert!(server.stderr().contains(warning), "{}", server.stderr());
    server.stop();
}

#[test]
fn log_on_a_full_disk_stops_no_request() {
    let text =
        http_configuration(Driver::Epoll, "server { listen %UNIX%; root %DIR%; location = /x { return 200 x; } }");
    let text = text.replace("%DIR%/error.log info", "/dev/full info").replace("%DIR%/access.log", "/dev/full");
    let mut server = Setup::configuration(&text).start();
    let mut client = server.connect();
    for number in 0..400 {
        assert_eq!(client.get(&format!("/missing/{number}")).status, 404);
        assert_eq!(client.get("/x").text(), "x");
    }
    server.reload(&text.replace("200 x", "200 y"));
    assert_eq!(client.get("/x").text(), "y");
    server.end(Signal::TERM);
}

/// A FIFO whose buffer is full.
struct FullFifo {
    directory: support::Directory,
    /// Open for reading, too, so that opening it does not fail.
    _ends: fs::File,
}

impl FullFifo {
    fn make() -> FullFifo {
        let directory = support::Directory::new();
        let path = directory.path().join("fifo");
        rustix::fs::mknodat(CWD, &path, FileType::Fifo, 0o600.into(), 0).expect("a FIFO");
        let mut ends = fs::File::options()
            .read(true)
            .write(true)
            .custom_flags(OFlags::NONBLOCK.bits() as i32)
            .open(&path)
            .expect("ours");
        let full = std::iter::repeat_with(|| ends.write(&[b'\n'; 4096])).find_map(Result::err).expect("it has an end");
        assert_eq!(full.kind(), std::io::ErrorKind::WouldBlock);
        FullFifo { directory, _ends: ends }
    }

    fn path(&self) -> std::path::PathBuf {
        self.directory.path().join("fifo")
    }
}

fn unread_log_pipe_delays_no_requests(driver: Driver) {
    for master in ["on", "off"] {
        let fifo = FullFifo::make();
        let text = |answer: &str| {
            let locations = format!("location = /pid {{ return 200 $pid; }} location / {{ return 200 {answer}; }}");
            let text = http_configuration(driver, &format!("server {{ listen %UNIX%; {locations} }}"));
            let text = text.replace("%DIR%/error.log", fifo.path().to_str().expect("text"));
            format!("master_process {master};\n{text}")
        };
        let mut server = Setup::configuration(&text("0")).start();
        let mut client = server.connect();
        for number in 1..=3 {
            server.reload(&text(&number.to_string()));
            assert_eq!(client.get("/").text(), number.to_string());
            // The error should be logged, and cannot be.
            server.reload("bogus;");
            assert_eq!(client.get("/").text(), number.to_string());
            kill(server.pid(), Signal::USR1);
        }
        if master == "on" {
            let worker = |server: &Server| Pid::from_raw(server.get("/pid").text().parse().expect("a number"));
            for _ in 0..3 {
                let before = worker(&server).expect("positive");
                kill(before, Signal::KILL);
                assert!(wait_ended(before));
                assert_ne!(worker(&server), Some(before));
                assert_eq!(server.get("/").text(), "3");
            }
        }
        server.end(if driver == Driver::Epoll { Signal::TERM } else { Signal::QUIT });
    }
}

/// A server that responds with `hello` and logs to a small disk; `LOG` in `access_log` stands for the file.
fn logging_to_a_small_disk(
    directory: &support::Directory,
    access_log: &str,
) -> Option<(Server, SmallDisk, std::path::PathBuf)> {
    let disk = SmallDisk::mount(&directory.path().join("disk"), 64)?;
    let log = disk.path().join("access.log");
    let access_log = access_log.replace("LOG", log.to_str().expect("text"));
    let text = http_configuration(Driver::Epoll, "server { listen %UNIX%; return 200 hello; }");
    let server = Setup::configuration(&text.replace("access_log %DIR%/access.log", &access_log)).start();
    Some((server, disk, log))
}

#[test]
fn a_log_goes_on_when_a_full_disk_has_room_again() {
    let directory = support::Directory::new();
    let Some((mut server, disk, log)) = logging_to_a_small_disk(&directory, "access_log LOG") else { return };
    let mut client = server.connect();
    disk.fill();
    for number in 0..400 {
        assert_eq!(client.get(&format!("/full/{number}")).text(), "hello");
    }
    disk.make_room();
    // Lines that found no room are lost; later ones are written as soon as there is some.
    let end = Instant::now() + support::DEADLINE;
    let watch = support::Watch::new(disk.path());
    while !fs::read_to_string(&log).expect("there").contains("GET /room") {
        assert_eq!(client.get("/room").text(), "hello");
        assert!(watch.wait(end), "nothing is written any more");
    }
    server.end(Signal::TERM);
}

/// The log may lack the end of its last line.
#[test]
fn a_log_that_is_opened_anew_after_a_full_disk_begins_with_a_line() {
    // A page of memory does not hold a whole number of such lines.
    let access_log = "log_format nine '$status-line'; access_log LOG nine";
    let directory = support::Directory::new();
    let Some((mut server, disk, log)) = logging_to_a_small_disk(&directory, access_log) else { return };
    let mut client = server.connect();
    let end = Instant::now() + support::DEADLINE;
    let mut log_until = |is_there: &dyn Fn(&[u8]) -> bool| {
        while !fs::read(&log).is_ok_and(|lines| is_there(&lines)) {
            assert_eq!(client.get("/").text(), "hello");
            assert!(Instant::now() < end, "nothing is written any more");
        }
    };
    log_until(&|lines| !lines.is_empty());
    disk.fill();
    log_until(&|lines| !lines.ends_with(b"\n"));
    fs::rename(&log, disk.path().join("access.log.1")).expect("ours");
    kill(server.pid(), Signal::USR1);
    let descriptors = format!("/proc/{}/fd", server.worker().as_raw_nonzero());
    let is_new = |entry: fs::DirEntry| fs::read_link(entry.path()).is_ok_and(|target| target == log);
    let has_new = || fs::read_dir(&descriptors).expect("it runs").flatten().any(is_new);
    while !has_new() {
        assert!(Instant::now() < end, "the log is not opened anew");
    }
    disk.make_room();
    log_until(&|lines| !lines.is_empty());
    assert_eq!(fs::read_to_string(&log).expect("there").lines().next(), Some("200-line"));
    server.end(Signal::TERM);
}

fn core_bytes_max(pid: Pid) -> u64 {
    let limits = fs::read_to_string(format!("/proc/{pid}/limits")).expect("it runs");
    let line = limits.lines().find_map(|line| line.strip_prefix("Max core file size")).expect("a limit");
    let soft = line.split_whitespace().next().expect("a number");
    soft.parse().unwrap_or(u64::MAX)
}

fn no_process_leaves_a_core_file_unless_the_configuration_says_so(driver: Driver) {
    let limit = rustix::process::getrlimit(Resource::Core);
    let text = http_configuration(driver, "server { listen %UNIX%; return 200 hello; }");
    let mut server = Setup::configuration(&text).may_leave_core_files().start();
    for pid in [server.pid(), server.worker()] {
        assert!(core_bytes_max(pid) <= 1, "{}", core_bytes_max(pid));
    }
    let wanted = limit.maximum.unwrap_or(u64::MAX).min(1 << 20);
    let worker = server.worker();
    server.reload(&format!("worker_rlimit_core {wanted};\n{text}"));
    assert!(wait_ended(worker));
    assert_eq!(core_bytes_max(server.worker()), wanted);
    server.stop();
}

fn room_for_descriptors_is_made_before_the_loops_start(driver: Driver) {
    const LIMIT: usize = 4096;
    let text = http_configuration(driver, "server { listen %UNIX%; return 200 hello; }");
    let text = text.replace(TWO_WORKERS, &format!("worker_processes 1;\nworker_rlimit_nofile {LIMIT};"));
    let mut server = Setup::configuration(&text).start();
    let status =
        std::fs::read_to_string(format!("/proc/{}/status", server.worker().as_raw_nonzero())).expect("it runs");
    let size = status.lines().find_map(|line| line.strip_prefix("FDSize:")).expect("proc(5)");
    assert!(size.trim().parse::<usize>().expect("a number") >= LIMIT, "{status}");
    server.end(Signal::TERM);
}

fn descriptors_may_run_out(driver: Driver) {
    const LIMIT: usize = 64;
    let text = http_configuration(driver, "server { listen %UNIX%; return 200 hello; }");
    let text = text.replace(TWO_WORKERS, &format!("worker_processes 1;\nworker_rlimit_nofile {LIMIT};"));
    let mut server = Setup::configuration(&text).start();
    let worker = server.worker();
    let mut clients: Vec<Client> = Vec::new();
    for _ in 0..LIMIT + 16 {
        let mut client = server.connect();
        client.send(HALF);
        clients.push(client);
    }
    server.wait_logged("accept4() failed (24: Too many open files)");
    // The worker waits before it retries; retries without pauses would use the whole time until two further messages.
    let (begin, used) = (Instant::now(), cpu_time(worker));
    let complaints = |directory: &support::Directory| {
        directory.try_read("error.log").unwrap_or_default().matches("accept4() failed").count()
    };
    let before = complaints(&server.directory);
    server.directory.wait_until("two more complaints", |directory| complaints(directory) >= before + 2);
    let (elapsed, used) = (begin.elapsed(), cpu_time(worker) - used);
    assert!(used <= elapsed / 2 + Duration::from_millis(100), "{used:?} of {elapsed:?}");
    // Accepted connections are served, and make room for those in the queue.
    for mut client in clients {
        client.send("Connection: close\r\n\r\n");
        assert_eq!(client.response().text(), "hello");
    }
    assert_eq!(server.get("/").text(), "hello");
    assert_eq!(server.worker(), worker);
    server.end(Signal::TERM);
}

fn connections_may_run_out(driver: Driver) {
    let text = http_configuration(driver, "server { listen %UNIX%; return 200 hello; }");
    let text = text.replace(TWO_WORKERS, ONE_WORKER);
    let text = text.replace("worker_connections 128;", "worker_connections 8;");
    let server = Setup::configuration(&text).start();
    let mut busy: Vec<Client> = Vec::new();
    for _ in 0..8 {
        let mut client = server.connect();
        // Once the first request is answered, the half of the second has been read, too.
        assert_eq!(client.ask(format!("{HALF}\r\n{HALF}")).text(), "hello");
        busy.push(client);
    }
    let mut waiting = server.connect();
    waiting.send(format!("{HALF}\r\n"));
    server.wait_logged("8 worker_connections are not enough");
    let mut first = busy.remove(0);
    first.send("Connection: close\r\n\r\n");
    assert_eq!(first.response().text(), "hello");
    assert_eq!(waiting.response().text(), "hello");
    // An idle connection is closed only when another client needs its place.
    assert_eq!(waiting.get("/").text(), "hello");
    assert_eq!(server.get("/").text(), "hello");
    waiting.assert_closed();
    // A connection that becomes idle makes room for a waiting client.
    let mut last = server.connect();
    last.send(HALF);
    last.send("Connection: close\r\n\r\n");
    assert_eq!(last.response().text(), "hello");
    let mut next = server.connect();
    assert_eq!(next.ask(format!("{HALF}\r\n{HALF}")).text(), "hello");
    let mut waiting = server.connect();
    waiting.send(format!("{HALF}\r\n"));
    next.send("\r\n");
    assert_eq!(next.response().text(), "hello");
    assert_eq!(waiting.response().text(), "hello");
    next.assert_closed();
    server.stop();
}

fn shutdown_timeout_ends_unfinished_requests(driver: Driver) {
    let setup = Setup::server(driver, "return 200 hello;").replace(TWO_WORKERS, ONE_WORKER);
    let mut server = setup.replace("daemon off;", "daemon off;\nworker_shutdown_timeout 200ms;").start();
    let mut busy = server.connect();
    busy.send(HALF);
    assert_eq!(server.get("/").status, 200);
    let begin = Instant::now();
    server.end(Signal::QUIT);
    // Less than the timeout: a loop's clock stands still within a turn, which may be delayed.
    assert!(begin.elapsed() >= Duration::from_millis(100), "not before its time");
    busy.assert_closed();
}

fn a_new_binary_takes_over(driver: Driver) {
    let mut server = Server::start(driver, "return 200 hello;");
    let old = server.pid();
    kill(old, Signal::USR2);
    server.wait_notified("READY=1");
    let new = server.pid_in_file();
    assert_ne!(new, old);
    assert_eq!(server.directory.read("pid.oldbin").trim_end(), old.to_string());
    kill(old, Signal::QUIT);
    assert!(server.wait_exited().success(), "{server}");
    assert_eq!(server.get("/").text(), "hello");
    assert!(!server.directory.path().join("pid.oldbin").exists());
    kill(new, Signal::QUIT);
    assert!(wait_ended(new));
    server.assert_nothing_left();
}

/// Upgrades the binary of a server; returns the process ID of the new master.
fn upgrade(server: &mut Server) -> Pid {
    let old = server.pid();
    kill(old, Signal::USR2);
    server.wait_notified("READY=1");
    let new = server.pid_in_file();
    assert_ne!(new, old);
    kill(old, Signal::QUIT);
    new
}

fn the_master_keeps_the_name_that_it_was_started_by(driver: Driver) {
    let server = Setup::http(driver, "server { listen %UNIX%; return 200; }").start();
    let name = |pid: Pid| std::fs::read_to_string(format!("/proc/{}/comm", pid.as_raw_nonzero())).expect("it runs");
    assert_eq!((name(server.pid()).trim_end(), name(server.worker()).trim_end()), ("gale", "gale worker"));
    server.stop();
}

fn an_upgrade_closes_no_idle_connection(driver: Driver) {
    const CLIENTS: usize = 100;
    let answer = "return 200 \"$pid $connection_requests\";";
    let text = format!("keepalive_min_timeout 1h; listen %TCP%; listen %TCP2% proxy_protocol; {answer}");
    let mut server = Server::start(driver, &text);
    let mut clients: Vec<Client> =
        (0..CLIENTS).map(|number| if number % 2 == 0 { server.connect() } else { server.connect_tcp(1) }).collect();
    let worker = server.worker().to_string();
    for client in &mut clients {
        assert_eq!(client.get("/").text(), format!("{worker} 1"));
    }
    let mut proxied = server.connect_tcp(2);
    proxied.send("PROXY TCP4 192.0.2.1 192.0.2.2 1 2\r\n");
    assert_eq!(proxied.get("/").text(), format!("{worker} 1"));
    let new = upgrade(&mut server);
    server.directory.wait_until("passed connections", |directory| {
        let passed = |line: &str| -> Option<usize> {
            let (before, _) = line.split_once(" idle connections were passed")?;
            before.rsplit(' ').next()?.parse().ok()
        };
        directory.read("error.log").lines().filter_map(passed).sum::<usize>() == CLIENTS
    });
    let successor = clients[0].get("/").text().trim_end_matches(" 2").to_owned();
    assert!(successor != worker && !successor.contains(' '), "{successor}");
    for client in &mut clients[1..] {
        assert_eq!(client.get("/").text(), format!("{successor} 2"));
        assert_eq!(client.get("/").text(), format!("{successor} 3"));
    }
    // A connection whose state the successor would need is closed with its response.
    let last = proxied.get("/");
    assert_eq!((last.text(), last.header("Connection")), (&*format!("{worker} 2"), Some("close")));
    proxied.assert_closed();
    assert!(server.wait_exited().success(), "{server}");
    drop(clients);
    kill(new, Signal::QUIT);
    assert!(wait_ended(new));
    server.assert_nothing_left();
}

fn a_process_that_is_told_to_leave_before_its_successor_serves_waits_for_it(driver: Driver) {
    let mut server = Server::start(driver, "return 200 \"$pid $connection_requests\";");
    let mut client = server.connect();
    let (old, worker) = (server.pid(), server.worker().to_string());
    assert_eq!(client.get("/").text(), format!("{worker} 1"));
    kill(old, Signal::USR2);
    // The PID is written before the new master has a worker process. A successor that already serves may take the
    // connection.
    server.directory.wait_until("new pid file", |directory| {
        directory.try_read("pid").is_some_and(|pid| !pid.is_empty() && pid.trim_end() != old.to_string())
    });
    let new = server.pid_in_file();
    kill(new, Signal::STOP);
    kill(old, Signal::QUIT);
    server.wait_logged(", shutting down");
    assert!(client.get("/").text().ends_with(" 2"));
    kill(new, Signal::CONT);
    server.wait_notified("READY=1");
    server.wait_logged("1 idle connections were passed to the new worker process");
    let answer = client.get("/").text().to_owned();
    assert!(answer.ends_with(" 3") && !answer.starts_with(&worker), "{answer}");
    assert!(server.wait_exited().success(), "{server}");
    drop(client);
    kill(new, Signal::QUIT);
    assert!(wait_ended(new));
    server.assert_nothing_left();
}

fn a_reload_that_needs_a_new_process_closes_no_idle_connection(driver: Driver) {
    let text = http_configuration(driver, "server { listen %UNIX%; return 200 \"$pid $connection_requests\"; }");
    let mut server = Setup::configuration(&text).start();
    let mut client = server.connect();
    let worker = server.worker().to_string();
    assert_eq!(client.get("/").text(), format!("{worker} 1"));
    server.reload(&format!("env ANOTHER=1;\n{text}"));
    server.wait_logged("1 idle connections were passed to the new worker process");
    let answer = client.get("/").text().to_owned();
    assert!(answer.ends_with(" 2") && !answer.starts_with(&worker), "{answer}");
    server.stop();
}

fn a_panic_costs_one_connection(driver: Driver) {
    let mut server = Server::start(driver, "location /panic { test_panic; } location / { return 200 hello; }");
    let worker = server.worker();
    let mut other = server.connect();
    assert_eq!(other.get("/").text(), "hello");
    for _ in 0..3 {
        let mut client = server.connect();
        client.send("GET /panic HTTP/1.1\r\nHost: localhost\r\n\r\n");
        client.assert_closed();
    }
    server.wait_logged("panicked at ");
    assert_eq!(other.get("/").text(), "hello");
    assert_eq!(server.worker(), worker);
    server.end(Signal::TERM);
}

#[test]
fn a_pid_file_moves_at_a_reload() {
    let mut server = Server::start(Driver::Epoll, "return 200 hello;");
    let text = http_configuration(Driver::Epoll, "server { listen %UNIX%; return 200 hello; }");
    server.reload(&text.replace("%DIR%/pid", "%DIR%/other.pid"));
    assert_eq!(server.directory.read("other.pid").trim_end(), server.pid().to_string());
    assert!(!server.directory.path().join("pid").exists());
    server.end(Signal::TERM);
    assert!(!server.directory.path().join("other.pid").exists());
}

#[test]
fn the_error_log_moves_at_a_reload() {
    let mut server = Server::start(Driver::Epoll, "return 200 hello;");
    let text = http_configuration(Driver::Epoll, "server { listen %UNIX%; root %DIR%; }");
    server.reload(&text.replace("%DIR%/error.log", "%DIR%/other.log"));
    assert_eq!(server.get("/missing").status, 404);
    let line = server.directory.wait_line("other.log", "/missing\" failed (2: No such file or directory)");
    assert!(line.contains(&format!(" [error] {}#", server.worker())), "{line}");
    assert!(line.contains("request: \"GET /missing HTTP/1.1\", host: \"localhost\""), "{line}");
    server.end(Signal::TERM);
}

#[test]
fn signals_that_come_together_are_all_taken_up() {
    let mut server = Server::start(Driver::Epoll, "return 200 hello;");
    for _ in 0..10 {
        server.signal(Signal::HUP);
        server.signal(Signal::USR1);
    }
    server.reload_http(Driver::Epoll, "server { listen %UNIX%; return 200 last; }");
    let mut client = server.connect();
    // The notification may be for an earlier reload; the last configuration is applied in the end.
    while client.get("/").text() != "last" {
        server.wait_notified("READY=1");
    }
    server.stop();
}
