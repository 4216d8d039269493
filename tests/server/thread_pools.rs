//! Thread pools through the real binary: named pools, their limits, reloads, and their end.
//!
//! The directive `test_pool` makes a pool's thread connect to a Unix socket of the test and wait there until it is
//! released: so a test knows that a task has begun, and decides when it ends.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use rustix::mount::{MountFlags, UnmountFlags};
use rustix::process::Signal;

use crate::support::{
    Client, Directory, Driver, Gate, NO_MOUNTS, Server, Setup, Task, has_own_mounts, http_configuration, skip,
    with_each_driver,
};

with_each_driver!(
    without_a_queue_as_many_run_as_there_are_threads_for_each_worker,
    a_queue_holds_so_many_and_overflows_in_nginxs_words,
    pools_are_independent_and_may_be_named_by_variables,
    a_client_that_leaves_takes_its_task_along,
    a_client_that_has_only_ended_its_own_direction_is_answered,
    a_look_at_a_file_waits_no_longer_than_its_client_and_fails_when_the_pool_is_full,
    an_upload_waits_for_a_pool_that_is_full,
    a_panic_in_a_pool_costs_one_request,
    a_device_that_hangs_leaves_half_of_its_pool,
    file_system_that_never_answers_delays_no_other_requests,
    a_reload_changes_adds_and_removes_pools,
    reloads_under_load_lose_no_task,
    a_task_that_hangs_does_not_hold_up_the_end,
);

/// `test_pool` in three forms, and the state of the pools. One worker, unless a test says otherwise: bytes that one
/// connection has sent before another is answered have been processed.
const LOCATIONS: &str = "
    keepalive_requests 1000000;
    location = /one { test_pool one %DIR%/gate; }
    location = /any { test_pool $arg_pool %DIR%/gate; }
    location = /device { test_pool one %DIR%/gate $arg_device; }
    location = /pools { test_pools; }
";

fn configuration(driver: Driver, pools: &str) -> String {
    let text = http_configuration(driver, &format!("server {{ listen %UNIX%; {LOCATIONS} }}"));
    format!("{pools}\n{}", text.replace("worker_processes 2;", "worker_processes 1;"))
}

#[track_caller]
fn start(driver: Driver, pools: &str) -> (Server, Gate) {
    let server = Setup::configuration(&configuration(driver, pools)).start();
    let gate = Gate::new(&server);
    (server, gate)
}

/// Sends a request without waiting for the response.
fn ask(server: &Server, path: &str) -> Client {
    let mut client = server.connect();
    client.send(format!("GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n"));
    client
}

#[track_caller]
fn assert_done(client: &mut Client) {
    let response = client.response();
    assert_eq!((response.status, response.text()), (200, "done"));
}

/// The line about this pool in the state of the pools.
fn state_of(server: &Server, pool: &str) -> Option<String> {
    let text = server.get("/pools").text().to_owned();
    text.lines().find(|line| line.starts_with(&format!("{pool} "))).map(str::to_owned)
}

#[track_caller]
fn assert_state(server: &Server, pool: &str, expected: &[&str]) {
    let state = state_of(server, pool).expect("a pool of that name");
    for part in expected {
        assert!(state.split(' ').any(|found| found == *part), "no {part}: {state}");
    }
}

fn without_a_queue_as_many_run_as_there_are_threads_for_each_worker(driver: Driver) {
    let text = configuration(driver, "thread_pool one threads=2 max_queue=0;");
    let text = text.replace("worker_processes 1;", "worker_processes 2;");
    let server = Setup::configuration(&text).start();
    let gate = Gate::new(&server);
    let mut clients: Vec<Client> = (0..4).map(|_| ask(&server, "/one")).collect();
    let tasks: Vec<Task> = (0..4).map(|_| gate.task()).collect();
    assert_eq!(server.get("/one").status, 500);
    server.wait_logged("[error]");
    server.wait_logged("thread pool \"one\" queue overflow: 0 tasks waiting");
    assert_state(&server, "one", &["threads_max=4", "queue_max=0", "running=4", "waiting=0", "refused=1"]);
    assert_state(&server, "default", &["threads_max=64", "queue_max=131072"]);
    drop(tasks);
    clients.iter_mut().for_each(assert_done);
    assert!(gate.is_empty());
    server.stop();
}

fn a_queue_holds_so_many_and_overflows_in_nginxs_words(driver: Driver) {
    let (server, gate) = start(driver, "thread_pool one threads=1 max_queue=2;");
    let mut clients = vec![ask(&server, "/one?1")];
    let mut first = gate.task();
    assert_eq!(first.says(), "1");
    for waiting in 2..4 {
        clients.push(ask(&server, &format!("/one?{waiting}")));
        assert_state(&server, "one", &["running=1", &format!("waiting={}", waiting - 1)]);
    }
    assert_eq!(server.get("/one").status, 500);
    server.wait_logged("thread pool \"one\" queue overflow: 2 tasks waiting");
    assert!(gate.is_empty());
    drop(first);
    // In the order of their arrival.
    assert_eq!(gate.task().says(), "2");
    assert_eq!(gate.task().says(), "3");
    clients.iter_mut().for_each(assert_done);
    assert_state(&server, "one", &["running=0", "waiting=0", "completed=3", "refused=1", "waited=3", "ran=3"]);
    server.stop();
}

fn pools_are_independent_and_may_be_named_by_variables(driver: Driver) {
    let (server, gate) = start(driver, "thread_pool one threads=1 max_queue=0; thread_pool two threads=1 max_queue=0;");
    let pools = ["one", "two", "default"];
    let mut clients = pools.map(|pool| ask(&server, &format!("/any?pool={pool}")));
    let tasks = pools.map(|_| gate.task());
    assert_eq!(server.get("/any?pool=two").status, 500);
    server.wait_logged("thread pool \"two\" queue overflow: 0 tasks waiting");
    assert_eq!(server.get("/any?pool=three").status, 500);
    server.wait_logged("thread pool \"three\" not found");
    drop(tasks);
    clients.iter_mut().for_each(assert_done);
    server.stop();
}

#[test]
fn a_pool_that_is_named_and_not_there_is_an_error_of_the_configuration() {
    let text = configuration(Driver::Epoll, "thread_pool other threads=1;");
    let mut server = Setup::configuration(&text).launch();
    assert!(!server.wait_exited().success());
    let stderr = server.stderr();
    let line = text.lines().position(|line| line.contains("test_pool one")).expect("there") + 1;
    let expected =
        format!("[emerg] unknown thread pool \"one\" in {}/gale.conf:{line}", server.directory.path().display());
    assert!(stderr.contains(&expected), "{stderr}");
}

fn a_client_that_leaves_takes_its_task_along(driver: Driver) {
    let (server, gate) = start(driver, "thread_pool one threads=1 max_queue=1;");
    let mut running = ask(&server, "/one?running");
    let first = gate.task();
    let waiting = ask(&server, "/one?leaves");
    assert_state(&server, "one", &["waiting=1"]);
    drop(waiting);
    server.directory.wait_line("access.log", "GET /one?leaves HTTP/1.1\" 499 0");
    assert_state(&server, "one", &["running=1", "waiting=0"]);
    // Its place is free, and its task is never run.
    let mut next = ask(&server, "/one?next");
    drop(first);
    assert_eq!(gate.task().says(), "next");
    assert_done(&mut running);
    assert_done(&mut next);
    assert_state(&server, "one", &["completed=2", "cancelled=1", "refused=0"]);
    assert!(gate.is_empty());
    server.stop();
}

fn a_client_that_has_only_ended_its_own_direction_is_answered(driver: Driver) {
    let (server, gate) = start(driver, "thread_pool one threads=1 max_queue=1;");
    let mut running = ask(&server, "/one?running");
    let first = gate.task();
    let mut waiting = ask(&server, "/one?waiting");
    for client in [&running, &waiting] {
        client.finish_sending();
    }
    assert_state(&server, "one", &["running=1", "waiting=1"]);
    drop(first);
    drop(gate.task());
    assert_done(&mut running);
    assert_done(&mut waiting);
    server.stop();
}

fn a_look_at_a_file_waits_no_longer_than_its_client_and_fails_when_the_pool_is_full(driver: Driver) {
    // The pool's threads compare the owners of links.
    let tried = "location = /page { root %DIR%; disable_symlinks if_not_owner; try_files $uri =404; }";
    let text = configuration(driver, "thread_pool one threads=1; thread_pool default threads=1 max_queue=1;")
        .replace("location = /one", &format!("{tried} location = /one"));
    let server = Setup::configuration(&text).file("file", "a page").start();
    std::os::unix::fs::symlink("file", server.directory.path().join("page")).expect("a link");
    let gate = Gate::new(&server);
    let mut running = ask(&server, "/any?pool=default");
    let first = gate.task();
    let waiting = ask(&server, "/page?leaves");
    assert_state(&server, "default", &["running=1", "waiting=1"]);
    assert_eq!(server.get("/page").status, 500, "nobody has looked whether it is there");
    drop(waiting);
    server.directory.wait_line("access.log", "GET /page?leaves HTTP/1.1\" 499 0");
    assert_state(&server, "default", &["running=1", "waiting=0"]);
    drop(first);
    assert_done(&mut running);
    assert_eq!(server.get("/page").text(), "a page");
    server.stop();
}

fn an_upload_waits_for_a_pool_that_is_full(driver: Driver) {
    let upload = "location = /upload { client_body_in_file_only clean; proxy_pass http://%UNIX%:/taken; }
        location = /taken { return 200 taken; }";
    let text = configuration(driver, "thread_pool one threads=1; thread_pool default threads=1 max_queue=0;")
        .replace("location = /one", &format!("{upload} location = /one"));
    let server = Setup::configuration(&text).start();
    let gate = Gate::new(&server);
    let mut running = ask(&server, "/any?pool=default");
    let only_thread = gate.task();
    let upload = |length: usize| {
        let head = format!("POST /upload HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length}\r\n\r\n");
        head + &"b".repeat(length)
    };
    let mut client = server.connect();
    // As much as may wait to be written.
    client.send(upload(100_000));
    server.directory.wait_until("a refused task", |_| {
        !state_of(&server, "default").expect("the default pool").contains("refused=0")
    });
    drop(only_thread);
    assert_done(&mut running);
    assert_eq!(client.response().text(), "taken");
    // The thread that has written may still be busy when the next write comes.
    for _ in 0..20 {
        client.send(upload(300_000));
        let response = client.response();
        assert_eq!((response.status, response.text()), (200, "taken"));
    }
    server.stop();
}

fn a_panic_in_a_pool_costs_one_request(driver: Driver) {
    let (mut server, gate) = start(driver, "thread_pool one threads=1;");
    let mut panics = ask(&server, "/one?panic");
    assert_eq!(gate.task().says(), "panic");
    assert_eq!(panics.response().status, 500);
    server.wait_logged("pool task panicked at ");
    let mut works = ask(&server, "/one?works");
    assert_eq!(gate.task().says(), "works");
    assert_done(&mut works);
    assert_state(&server, "one", &["completed=2", "panicked=1"]);
    server.end(Signal::TERM);
}

fn a_device_that_hangs_leaves_half_of_its_pool(driver: Driver) {
    let (server, gate) = start(driver, "thread_pool one threads=2 max_queue=2;");
    let mut hanging: Vec<Client> = (0..2).map(|_| ask(&server, "/device?device=1")).collect();
    let tasks: Vec<Task> = (0..2).map(|_| gate.task()).collect();
    for waiting in 1..3 {
        hanging.push(ask(&server, "/device?device=1"));
        assert_state(&server, "one", &["running=2", &format!("waiting={waiting}")]);
    }
    assert_eq!(server.get("/device?device=1").status, 500);
    server.wait_logged("thread pool \"one\" queue overflow: 2 tasks waiting");
    for _ in 0..10 {
        let mut other = ask(&server, "/device?device=2");
        drop(gate.task());
        assert_done(&mut other);
    }
    assert_state(&server, "one", &["running=2", "waiting=2", "completed=10"]);
    drop(tasks);
    (0..2).for_each(|_| drop(gate.task()));
    hanging.iter_mut().for_each(assert_done);
    server.stop();
}

/// A mounted file system without a server: operations on it hang until this is dropped.
struct DeadFileSystem {
    directory: Directory,
    connection: Option<fs::File>,
}

impl DeadFileSystem {
    /// Returns `None`, with a skip, if mounting is not permitted, as in some containers.
    fn mount() -> Option<DeadFileSystem> {
        let mounted = DeadFileSystem::try_mount();
        if mounted.is_none() {
            skip(NO_MOUNTS);
        }
        mounted
    }

    fn try_mount() -> Option<DeadFileSystem> {
        let connection = fs::File::options().read(true).write(true).open("/dev/fuse").ok()?;
        let directory = Directory::new();
        let point = directory.path().join("dead");
        fs::create_dir(&point).expect("ours");
        let options = format!(
            "fd={},rootmode=40000,user_id=0,group_id=0,allow_other",
            std::os::fd::AsRawFd::as_raw_fd(&connection)
        );
        let options = std::ffi::CString::new(options).expect("without NUL");
        rustix::mount::mount("gale-test", &point, "fuse", MountFlags::NOSUID | MountFlags::NODEV, Some(&*options))
            .ok()?;
        Some(DeadFileSystem { directory, connection: Some(connection) })
    }

    fn point(&self) -> PathBuf {
        self.directory.path().join("dead")
    }

    /// Makes all pending and further operations fail.
    fn end(&mut self) {
        self.connection = None;
    }
}

impl Drop for DeadFileSystem {
    fn drop(&mut self) {
        let _ = rustix::mount::unmount(self.point(), UnmountFlags::DETACH);
    }
}

fn file_system_that_never_answers_delays_no_other_requests(driver: Driver) {
    if !has_own_mounts() {
        return;
    }
    let Some(mut dead) = DeadFileSystem::mount() else { return };
    let text = format!(
        "location /dead/ {{ root {}; }} location /alive/ {{ root %DIR%; }} location = /store {{ test_store_body; }}
         client_body_buffer_size 1k;",
        dead.directory.path().display(),
    );
    let pools = "thread_pool default threads=4; thread_pool one threads=1;";
    let configuration = configuration(driver, pools).replace(LOCATIONS, &format!("{LOCATIONS}{text}"));
    let server = Setup::configuration(&configuration).file("alive/file", "alive").start();
    let gate = Gate::new(&server);
    // Twice as many as there are threads.
    let mut stuck: Vec<Client> = (0..8).map(|number| ask(&server, &format!("/dead/{number}"))).collect();
    server.directory.wait_until("file system that does not answer", |_| {
        state_of(&server, "default").is_some_and(|state| state.contains("running=4 waiting=4"))
    });
    for _ in 0..10 {
        assert_eq!(server.get("/alive/file").text(), "alive");
        let mut client = server.connect();
        let body = "x".repeat(5000);
        let stored =
            client.ask(format!("POST /store HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5000\r\n\r\n{body}"));
        assert!(stored.text().starts_with("5000 file "), "{stored:?}");
        let mut other = ask(&server, "/any?pool=default");
        drop(gate.task());
        assert_done(&mut other);
    }
    // The thread of the last task may still be counted when its client has the response.
    server.directory.wait_until("pool as before", |_| {
        state_of(&server, "default").is_some_and(|state| state.contains("running=4 waiting=4"))
    });
    // Some clients disconnect, the others receive the error.
    drop(stuck.drain(..4));
    dead.end();
    for client in &mut stuck {
        assert_eq!(client.response().status, 500);
    }
    server.stop();
}

#[test]
fn nor_does_it_hold_up_the_end_of_the_server() {
    if !has_own_mounts() {
        return;
    }
    let Some(dead) = DeadFileSystem::mount() else { return };
    let text = format!("location /dead/ {{ root {}; }}", dead.directory.path().display());
    let text =
        configuration(Driver::Epoll, "thread_pool one threads=1;").replace(LOCATIONS, &format!("{LOCATIONS}{text}"));
    let server = Setup::configuration(&text).start();
    let _stuck = ask(&server, "/dead/file");
    server.directory.wait_until("file system that does not answer", |_| {
        state_of(&server, "default").is_some_and(|state| state.contains("running=1"))
    });
    server.stop();
}

fn a_reload_changes_adds_and_removes_pools(driver: Driver) {
    let (mut server, gate) = start(driver, "thread_pool one threads=1; thread_pool old threads=1;");
    let mut clients = vec![ask(&server, "/one?1"), ask(&server, "/any?pool=old")];
    let mut tasks = vec![gate.task(), gate.task()];
    clients.push(ask(&server, "/one?2"));
    assert_state(&server, "one", &["running=1", "waiting=1"]);
    // With a second thread the waiting task begins, and the running one continues.
    server.reload(&configuration(driver, "thread_pool one threads=2 max_queue=5; thread_pool new threads=1;"));
    let mut second = gate.task();
    assert_eq!(second.says(), "2");
    tasks.push(second);
    assert_state(&server, "one", &["threads_max=2", "queue_max=5", "running=2", "waiting=0"]);
    clients.push(ask(&server, "/any?pool=new"));
    tasks.push(gate.task());
    // A removed pool finishes the tasks of requests that began with it.
    assert_eq!(server.get("/any?pool=old").status, 500);
    server.wait_logged("thread pool \"old\" not found");
    assert_state(&server, "old", &["running=1"]);
    // Fewer threads than running tasks: no task begins until a thread is free.
    server.reload(&configuration(driver, "thread_pool one threads=1; thread_pool new threads=1;"));
    clients.push(ask(&server, "/one?3"));
    assert_state(&server, "one", &["threads_max=1", "queue_max=65536", "running=2", "waiting=1"]);
    assert!(gate.is_empty());
    drop(tasks);
    assert_eq!(gate.task().says(), "3");
    clients.iter_mut().for_each(assert_done);
    // The old configuration is dropped within about a second, and the pool with it.
    server.directory.wait_until("end of the old pool", |_| state_of(&server, "old").is_none());
    assert_state(&server, "one", &["completed=3", "refused=0"]);
    server.stop();
}

fn reloads_under_load_lose_no_task(driver: Driver) {
    let (mut server, gate) = start(driver, "thread_pool one threads=1; thread_pool extra threads=1;");
    let socket = server.directory.path().join("gale.sock");
    let (is_over, all_answered, done) = (AtomicBool::new(false), AtomicBool::new(false), AtomicU32::new(0));
    std::thread::scope(|scope| {
        // Releases every task, up to the first one after the last client's response.
        let opener = scope.spawn(|| {
            let mut is_last = false;
            while !is_last {
                let task = gate.task();
                // Of a task that a client waits for this is false: the flag is set when all clients have ended.
                is_last = all_answered.load(Ordering::SeqCst);
                drop(task);
            }
        });
        let clients: Vec<_> = ["one", "extra", "default", "one"]
            .into_iter()
            .map(|pool| {
                let (socket, is_over, done): (&Path, _, _) = (&socket, &is_over, &done);
                scope.spawn(move || {
                    let mut client = Client::unix(socket);
                    while !is_over.load(Ordering::SeqCst) {
                        let response = client.get(&format!("/any?pool={pool}"));
                        assert_eq!((response.status, response.text()), (200, "done"), "in {pool}");
                        done.fetch_add(1, Ordering::SeqCst);
                    }
                })
            })
            .collect();
        for number in 1..=10 {
            let before = done.load(Ordering::SeqCst);
            let queue = number * 10;
            let pools = match number % 3 {
                0 => format!("thread_pool one threads=1 max_queue={queue}; thread_pool extra threads=3;"),
                1 => {
                    format!("thread_pool extra threads=1; thread_pool one threads=4; thread_pool p{number} threads=1;")
                }
                _ => {
                    "thread_pool one threads=2; thread_pool extra threads=1; thread_pool default threads=2;".to_owned()
                }
            };
            server.reload(&configuration(driver, &pools));
            // Some tasks of every configuration.
            server.directory.wait_until("tasks after a reload", |_| done.load(Ordering::SeqCst) > before + 10);
        }
        is_over.store(true, Ordering::SeqCst);
        for client in clients {
            client.join().expect("every answer was right");
        }
        // One more request, which ends the gate's thread.
        all_answered.store(true, Ordering::SeqCst);
        let mut last = ask(&server, "/one");
        assert_done(&mut last);
        opener.join().expect("it ends");
    });
    assert_state(&server, "one", &["running=0", "waiting=0", "refused=0", "cancelled=0"]);
    server.stop();
}

fn a_task_that_hangs_does_not_hold_up_the_end(driver: Driver) {
    for signal in [Signal::TERM, Signal::QUIT] {
        let (mut server, gate) = start(driver, "thread_pool one threads=1;");
        let client = ask(&server, "/one?hangs");
        let mut hanging = gate.task();
        assert_eq!(hanging.says(), "hangs");
        let waiting = ask(&server, "/one?waits");
        assert_state(&server, "one", &["running=1", "waiting=1"]);
        // A graceful stop waits for clients, and none are left.
        drop((client, waiting));
        server.directory.wait_line("access.log", "GET /one?hangs HTTP/1.1\" 499 0");
        server.directory.wait_line("access.log", "GET /one?waits HTTP/1.1\" 499 0");
        server.end(signal);
        // The thread held on until the process ended.
        hanging.wait_closed();
        assert!(gate.is_empty());
    }
}
