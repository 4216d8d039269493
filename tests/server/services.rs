//! Services of the real binary: tasks beside requests, over reloads, with several workers and several processes.

use std::fs;

use rustix::process::{Pid, Signal};

use crate::support::{Driver, Server, Setup, http_configuration, is_root, skip, wait_ended};

/// A whole configuration that begins with these directives.
fn configuration(main: &str) -> String {
    let text = http_configuration(Driver::Epoll, "server { listen %UNIX%; return 200 hello; }");
    format!("{main}\n{}", text.replace("worker_processes 2;", "worker_processes 3;"))
}

/// Lines of the error log with this text so far.
fn lines(server: &Server, text: &str) -> Vec<String> {
    server.log().lines().filter(|line| line.contains(text)).map(str::to_owned).collect()
}

fn writer_of(line: &str) -> i32 {
    let number = line.split("] ").nth(1).and_then(|rest| rest.split('#').next());
    number.and_then(|number| number.parse().ok()).unwrap_or_else(|| panic!("no process in {line}"))
}

#[track_caller]
fn wait_logged_by(server: &Server, pid: Pid, text: &str) {
    server.directory.wait_until(&format!("\"{text}\" by {pid} in error.log"), |directory| {
        let log = directory.try_read("error.log").unwrap_or_default();
        log.lines().any(|line| line.contains(text) && writer_of(line) == pid.as_raw_pid())
    });
}

fn kill(pid: Pid, signal: Signal) {
    rustix::process::kill_process(pid, signal).expect("it runs");
}

#[test]
fn service_runs_once_per_process_or_once_per_worker() {
    let main = "test_service one period=10ms; test_service each period=10ms per=worker;";
    let server = Setup::configuration(&configuration(main)).start();
    for worker in 0..3 {
        server.wait_logged(&format!("each: run 5 on worker {worker}"));
    }
    server.wait_logged("one: run 20 on worker");
    let one = lines(&server, "one: run ");
    assert!(one.iter().all(|line| line.contains("on worker 0")), "{server}");
    assert_eq!(lines(&server, "one: run 1 ").len(), 1, "{server}");
    assert_eq!(lines(&server, "each: run 1 ").len(), 3, "{server}");
    server.stop();
}

#[test]
fn service_is_kept_renewed_or_ended_by_a_reload() {
    let main = |text: &str| {
        format!(
            "test_service kept continues period=10ms text={text};
             test_service renewed period=10ms text={text};
             test_service told continues on=reload text={text};
             test_service counted zone=counts:32k period=10ms text={text};"
        )
    };
    let first = format!("{} test_service removed period=10ms;", main("before"));
    let mut server = Setup::configuration(&configuration(&first)).start();
    for name in ["kept", "renewed", "counted", "removed"] {
        server.wait_logged(&format!("{name}: run 3 on worker 0"));
    }
    server.reload(&configuration(&main("after")));
    server.wait_logged("told: run 1 on worker 0 after");
    server.wait_logged("renewed: run 2 on worker 0 after");
    server.wait_logged("removed: ended");
    server.directory.wait_until("runs of what goes on", |directory| {
        let log = directory.try_read("error.log").unwrap_or_default();
        let has_run_after =
            |name: &str| log.lines().any(|line| line.contains(&format!("{name}: run ")) && line.ends_with(" after"));
        has_run_after("kept") && has_run_after("counted")
    });
    // One service over both configurations, one whose state is kept in a zone, and two services one after the other.
    assert_eq!((lines(&server, "kept: run 1 ").len(), lines(&server, "kept: ended").len()), (1, 0), "{server}");
    assert_eq!((lines(&server, "counted: run 1 ").len(), lines(&server, "counted: ended").len()), (1, 1), "{server}");
    let renewed = lines(&server, "renewed: ");
    let end = renewed.iter().position(|line| line.contains("ended")).expect("it was replaced");
    assert!(renewed[..end].iter().all(|line| line.ends_with(" before")), "{server}");
    assert!(renewed[end + 1].ends_with("run 1 on worker 0 after"), "{server}");
    assert!(lines(&server, "removed: ").last().is_some_and(|line| line.ends_with("ended")), "{server}");
    server.stop();
}

#[test]
fn service_per_worker_follows_the_number_of_workers() {
    let one_worker = |main: &str| configuration(main).replace("worker_processes 3;", "worker_processes 1;");
    let main = "test_service one continues period=10ms; test_service each continues period=10ms per=worker;";
    let mut server = Setup::configuration(&configuration(main)).start();
    for worker in 0..3 {
        server.wait_logged(&format!("each: run 1 on worker {worker}"));
    }
    server.reload(&one_worker(main));
    server.wait_logged_times("each: ended", 2);
    server.reload(&configuration(main));
    server.wait_logged_times("each: run 1 ", 5);
    assert_eq!(lines(&server, "each: run 1 on worker 0").len(), 1, "{server}");
    assert_eq!((lines(&server, "one: run 1 ").len(), lines(&server, "one: ended").len()), (1, 0), "{server}");
    server.stop();
}

#[test]
fn service_holds_up_no_graceful_stop() {
    let main = "test_service rare period=1h; test_service told on=reload;";
    let mut server = Setup::configuration(&configuration(main)).start();
    server.wait_logged("rare: run 1 on worker 0");
    server.end(Signal::QUIT);
    assert_eq!(lines(&server, "rare: ended").len(), 1, "{server}");
    assert_eq!(lines(&server, "told: ended").len(), 1, "{server}");
    assert_eq!(lines(&server, "has not stopped").len(), 0, "{server}");
}

#[test]
fn service_that_panics_is_restarted_and_disturbs_no_request() {
    let mut server = Setup::configuration(&configuration("test_service breaks panics=2 period=10ms;")).start();
    let mut client = server.connect();
    assert_eq!(client.get("/").text(), "hello");
    server.wait_logged("breaks: the service panicked, restarting it in 1 s");
    server.wait_logged_times("breaks: run 2 ", 2);
    assert_eq!(client.get("/").text(), "hello");
    server.end(Signal::TERM);
}

#[test]
fn service_of_no_use_ends_the_start_with_its_place() {
    let cases = [
        ("test_service one; test_service one per=worker;", "duplicate service \"one\" in "),
        ("test_service one lock=%DIR%/l; test_service two lock=%DIR%/l;", "/l\" belongs to service \"one\" in "),
        ("test_service one lock=%DIR%/none/lock;", "none/lock\" failed (2: No such file or directory) in "),
    ];
    for (main, message) in cases {
        let mut server = Setup::configuration(&configuration(main)).launch();
        assert!(!server.wait_exited().success());
        assert!(server.stderr().contains(message), "{}", server.stderr());
    }
}

/// Checks that no process ran the service `one` before the previous process had ended it.
fn assert_no_overlap(server: &Server) {
    let mut runs = None;
    for line in lines(server, "one: ") {
        let writer = writer_of(&line);
        if line.contains("one: ended") {
            assert_eq!(runs.take(), Some(writer), "{server}");
        } else if line.contains("one: run ") {
            assert_eq!(*runs.get_or_insert(writer), writer, "{server}");
        }
    }
}

#[test]
fn exclusive_service_goes_from_the_old_binary_to_the_new_one() {
    let mut server = Setup::configuration(&configuration("test_service one lock=%DIR%/one.lock period=10ms;")).start();
    let old = server.pid();
    let old_worker = server.worker();
    wait_logged_by(&server, old_worker, "one: run 3 on worker 0");
    kill(old, Signal::USR2);
    server.wait_notified("READY=1");
    let new = server.pid_in_file();
    let new_worker = server.worker();
    let lock = server.directory.path().join("one.lock");
    let waits = format!("one: waiting for the lock \"{}\", which another process holds", lock.display());
    wait_logged_by(&server, new_worker, &waits);
    assert!(lines(&server, "one: run ").iter().all(|line| writer_of(line) == old_worker.as_raw_pid()), "{server}");
    kill(old, Signal::QUIT);
    wait_logged_by(&server, new_worker, "one: acquired the lock");
    wait_logged_by(&server, new_worker, "one: run 3 on worker 0");
    assert_no_overlap(&server);
    assert!(server.wait_exited().success(), "{server}");
    kill(new, Signal::QUIT);
    assert!(wait_ended(new));
    server.assert_nothing_left();
}

#[test]
fn exclusive_service_goes_to_the_next_worker_process() {
    // The first process ends at its timeout, so that the processes overlap.
    let slow = "worker_shutdown_timeout 1s; test_service one stuck lock=%DIR%/one.lock period=10ms;";
    let main = "test_service one lock=%DIR%/one.lock period=10ms;";
    let mut server = Setup::configuration(&configuration(slow)).start();
    let first = server.worker();
    wait_logged_by(&server, first, "one: run 3 on worker 0");
    // This reload needs another process, which serves while the first one drains.
    server.reload(&configuration(&format!("env ANOTHER=one; {main}")));
    assert!(wait_ended(first));
    let second = server.worker();
    assert_ne!(first, second);
    wait_logged_by(&server, second, "one: run 3 on worker 0");
    assert_no_overlap(&server);
    // A reload in place opens the lock file again, and keeps the lock.
    server.reload(&configuration(&format!("env ANOTHER=one; {main} test_service other;")));
    server.wait_logged("other: run 1");
    server.wait_logged_times("one: run 1 ", 3);
    // The kernel releases the lock of a dead process.
    kill(second, Signal::KILL);
    assert!(wait_ended(second));
    server.wait_logged_times("start worker process ", 3);
    server.wait_logged_times("one: run 1 ", 4);
    server.end(Signal::QUIT);
}

#[test]
fn worker_of_another_user_needs_no_right_to_the_lock_file() {
    if !is_root() {
        return skip("only root has another user to become");
    }
    let main = "user nobody nogroup; test_service one lock=%DIR%/closed/one.lock period=10ms;";
    let setup = Setup::configuration(&configuration(main)).file("closed/nothing", "");
    let server = setup.launch();
    let closed = server.directory.path().join("closed");
    rustix::fs::chmod(&closed, 0o700.into()).expect("ours");
    server.wait_logged("one: run 2 on worker 0");
    let status = fs::read_to_string(format!("/proc/{}/status", server.worker())).expect("it runs");
    assert!(!status.lines().any(|line| line == "Uid:\t0\t0\t0\t0"), "{status}");
    server.stop();
}
