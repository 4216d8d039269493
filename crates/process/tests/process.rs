//! Tests of master, worker process and reload with real processes: this test program starts itself again as a server.

#[path = "process/fixture.rs"]
mod fixture;
#[path = "../../../tests/shared/skips.rs"]
mod skips;
#[path = "process/toy.rs"]
mod toy;

use std::fs;
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::panic;
use std::process::ExitCode;
use std::time::Instant;

use fixture::{Client, Server, ends, make_fifo, new_directory};
use gale_process::{self, BuildRequest, Command};
use rustix::process::{Pid, Signal};
use skips::skip;
use toy::Toy;

const PLAIN: &str = "listen 127.0.0.1:0\nworkers 2\nanswer one";

const TESTS: &[(&str, fn())] = &[
    ("a_server_starts_serves_and_stops", a_server_starts_serves_and_stops),
    ("a_reload_changes_every_loop_of_the_same_process", a_reload_changes_every_loop_of_the_same_process),
    ("a_connection_survives_reloads", a_connection_survives_reloads),
    ("a_bad_configuration_changes_nothing", a_bad_configuration_changes_nothing),
    (
        "a_configuration_that_only_the_worker_rejects_changes_nothing",
        a_configuration_that_only_the_worker_rejects_changes_nothing,
    ),
    ("signals_during_a_reload_are_taken_up_after_it", signals_during_a_reload_are_taken_up_after_it),
    (
        "removed_listeners_are_closed_although_the_old_configuration_is_held",
        removed_listeners_are_closed_although_the_old_configuration_is_held,
    ),
    ("an_old_configuration_expires", an_old_configuration_expires),
    (
        "reuseport_sockets_are_kept_when_there_are_fewer_workers",
        reuseport_sockets_are_kept_when_there_are_fewer_workers,
    ),
    ("a_killed_worker_is_replaced_on_the_same_sockets", a_killed_worker_is_replaced_on_the_same_sockets),
    ("a_worker_that_panics_is_replaced", a_worker_that_panics_is_replaced),
    ("sigwinch_of_a_resized_terminal_stops_no_worker", sigwinch_of_a_resized_terminal_stops_no_worker),
    ("a_worker_that_is_told_to_leave_is_succeeded_at_once", a_worker_that_is_told_to_leave_is_succeeded_at_once),
    ("a_death_is_noticed_although_the_parent_ignored_them", a_death_is_noticed_although_the_parent_ignored_them),
    ("when_old_and_new_worker_die_another_is_started", when_old_and_new_worker_die_another_is_started),
    ("a_worker_that_a_reload_brought_back_is_kept", a_worker_that_a_reload_brought_back_is_kept),
    ("orders_to_the_whole_service_do_not_end_the_helper", orders_to_the_whole_service_do_not_end_the_helper),
    ("a_broken_standard_error_is_no_panic", a_broken_standard_error_is_no_panic),
    ("quit_waits_for_connections", quit_waits_for_connections),
    ("quit_at_the_start_waits_for_requests_in_flight", quit_at_the_start_waits_for_requests_in_flight),
    ("quit_is_bounded_by_the_shutdown_timeout", quit_is_bounded_by_the_shutdown_timeout),
    ("a_stuck_loop_does_not_hold_up_a_fast_stop", a_stuck_loop_does_not_hold_up_a_fast_stop),
    ("logs_are_reopened_in_the_middle_of_a_reload", logs_are_reopened_in_the_middle_of_a_reload),
    ("a_stuck_loop_does_not_hold_up_a_reload", a_stuck_loop_does_not_hold_up_a_reload),
    ("the_sockets_of_a_loop_that_cannot_start_go_to_others", the_sockets_of_a_loop_that_cannot_start_go_to_others),
    ("loops_hear_of_a_change_when_all_have_carried_it_out", loops_hear_of_a_change_when_all_have_carried_it_out),
    ("logs_are_reopened_in_master_and_worker", logs_are_reopened_in_master_and_worker),
    ("a_worker_without_free_descriptors_keeps_its_link", a_worker_without_free_descriptors_keeps_its_link),
    ("a_worker_that_lost_its_link_is_replaced", a_worker_that_lost_its_link_is_replaced),
    ("three_hundred_descriptors_cross_the_link", three_hundred_descriptors_cross_the_link),
    ("a_worker_without_a_master_serves_until_signalled", a_worker_without_a_master_serves_until_signalled),
    ("the_daemon_answers_when_its_starter_has_returned", the_daemon_answers_when_its_starter_has_returned),
    ("a_start_that_fails_is_seen_on_the_terminal", a_start_that_fails_is_seen_on_the_terminal),
    ("without_a_master_one_process_does_everything", without_a_master_one_process_does_everything),
    ("a_new_binary_takes_over_the_sockets", a_new_binary_takes_over_the_sockets),
    ("a_new_binary_takes_over_every_socket_of_an_address", a_new_binary_takes_over_every_socket_of_an_address),
    ("an_upgrade_can_be_taken_back", an_upgrade_can_be_taken_back),
    ("the_pid_file_of_a_new_binary_is_left_alone", the_pid_file_of_a_new_binary_is_left_alone),
    ("a_change_of_user_needs_a_new_process", a_change_of_user_needs_a_new_process),
    ("socket_files_are_removed_when_no_process_serves_them", socket_files_are_removed_when_no_process_serves_them),
    ("no_socket_file_outlives_a_failed_start", no_socket_file_outlives_a_failed_start),
    ("a_killed_helper_is_no_obstacle_to_the_next_reload", a_killed_helper_is_no_obstacle_to_the_next_reload),
    ("the_pid_file_is_judged_in_nginx_words", the_pid_file_is_judged_in_nginx_words),
];

fn main() -> ExitCode {
    if let Some(role) = gale_process::inherited_role() {
        return gale_process::run_role(role, Toy);
    }
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.as_slice() {
        [toy, path] if toy == "--toy" => {
            let request =
                BuildRequest { program: "toy".into(), configuration_path: path.into(), ..BuildRequest::default() };
            gale_process::start(Toy, request)
        }
        _ => run_tests(&arguments),
    }
}

/// Runs like cargo's own harness, but one test after the other: `--list`, and words that select tests.
fn run_tests(arguments: &[String]) -> ExitCode {
    let words: Vec<&String> = arguments.iter().filter(|argument| !argument.starts_with('-')).collect();
    let selected =
        || TESTS.iter().filter(|(name, _)| words.is_empty() || words.iter().any(|word| name.contains(*word)));
    if arguments.iter().any(|argument| argument == "--list") {
        selected().for_each(|(name, _)| println!("{name}: test"));
        return ExitCode::SUCCESS;
    }
    let mut failed = 0;
    for (name, test) in selected() {
        let begin = Instant::now();
        let passed = panic::catch_unwind(test).is_ok();
        failed += usize::from(!passed);
        println!("test {name} ... {} ({} ms)", if passed { "ok" } else { "FAILED" }, begin.elapsed().as_millis());
    }
    println!("\ntest result: {}. {failed} failed of {}", if failed == 0 { "ok" } else { "FAILED" }, selected().count());
    if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn a_server_starts_serves_and_stops() {
    let mut server = Server::start(PLAIN);
    let answer = server.ask();
    assert_eq!(answer.text, "one");
    assert_ne!(answer.pid, server.pid().as_raw_pid());
    assert_eq!(server.pid_in_file(), server.pid());
    server.wait_logged(&format!("start worker process {}", answer.pid));
    server.signal(Signal::TERM);
    assert!(server.wait_exited().success());
    let us = std::process::id();
    server.wait_logged(&format!("signal 15 (SIGTERM) received from {us}, exiting"));
    server.wait_logged(&format!("worker process {} exited with code 0", answer.pid));
    server.wait_logged(": exit");
    assert!(!server.directory.join("pid").exists());
}

fn a_reload_changes_every_loop_of_the_same_process() {
    let mut server = Server::start(PLAIN);
    let before = server.ask();
    let addresses = server.addresses();
    for workers in [4, 1, 3] {
        let text = format!("workers {workers}");
        server.reload(&format!("listen 127.0.0.1:0\nworkers {workers}\nanswer {text}"));
        for _ in 0..20 {
            let after = server.ask();
            assert_eq!((after.pid, after.text.as_str()), (before.pid, text.as_str()));
            assert!(after.worker < workers);
        }
    }
    assert_eq!(server.addresses(), addresses);
    let us = std::process::id();
    server.wait_logged(&format!("signal 1 (SIGHUP) received from {us}, reconfiguring"));
}

fn a_connection_survives_reloads() {
    let mut server = Server::start("listen 127.0.0.1:0\nworkers 1\nanswer 0");
    let mut client = server.connect();
    let first = client.ask("x");
    for count in 1..10 {
        server.reload(&format!("listen 127.0.0.1:0\nworkers 1\nanswer {count}"));
        let answer = client.ask("x");
        assert_eq!((answer.pid, answer.text), (first.pid, count.to_string()));
    }
}

fn a_bad_configuration_changes_nothing() {
    let mut server = Server::start(PLAIN);
    let before = server.ask();
    for bad in ["lissten 80", "panic", "user no-such-user-here\nlissten"] {
        server.reload(bad);
        let after = server.ask();
        assert_eq!((after.pid, after.text.as_str()), (before.pid, "one"));
    }
    server.wait_logged("[emerg]");
    server.wait_logged("unknown directive \"lissten\" in ");
    server.wait_logged("internal error (panic)");
    server.reload("listen 127.0.0.1:0\nanswer repaired");
    assert_eq!(server.ask().text, "repaired");
}

fn a_configuration_that_only_the_worker_rejects_changes_nothing() {
    let mut server = Server::start(PLAIN);
    let before = server.ask();
    server.reload("listen 127.0.0.1:0\nlisten_unix DIR/new.sock\nworker_panics\nanswer two");
    let after = server.ask();
    assert_eq!((after.pid, after.text.as_str()), (before.pid, "one"));
    assert!(!server.directory.join("new.sock").exists(), "what the rejected one opened is gone");
    server.wait_logged("internal error (panic)");
}

fn signals_during_a_reload_are_taken_up_after_it() {
    let mut server = Server::start(PLAIN);
    for _ in 0..20 {
        server.signal(Signal::HUP);
    }
    server.wait_notified("RELOADING=1");
    server.wait_notified("READY=1");
    server.reload("listen 127.0.0.1:0\nanswer two");
    while server.ask().text != "two" {
        server.wait_notified("READY=1");
    }
}

fn removed_listeners_are_closed_although_the_old_configuration_is_held() {
    let mut server = Server::start("listen 127.0.0.1:0\nlisten 127.0.0.2:0\nworkers 2\nanswer one");
    let second = server.addresses()[1].clone();
    let mut holder = Client::connect(&second);
    assert_eq!(holder.say("hold"), "holding\n");
    server.reload(PLAIN);
    let error = TcpStream::connect(&second).expect_err("nobody listens there any more");
    assert_eq!(error.kind(), std::io::ErrorKind::ConnectionRefused);
    assert_eq!(holder.ask("x").text, "one", "what was open lives on");
}

fn an_old_configuration_expires() {
    let mut server = Server::start("listen 127.0.0.1:0\nshutdown_timeout 50\nworkers 1\nanswer one");
    let mut holder = server.connect();
    assert_eq!(holder.say("hold"), "holding\n");
    server.reload("listen 127.0.0.1:0\nshutdown_timeout 50\nworkers 1\nanswer two");
    holder.wait_closed();
    assert_eq!(server.ask().text, "two");
}

fn reuseport_sockets_are_kept_when_there_are_fewer_workers() {
    let mut server = Server::start("reuseport 4\nworkers 4\nanswer one");
    server.reload("reuseport 1\nworkers 1\nanswer two");
    for _ in 0..40 {
        assert_eq!(server.ask().text, "two", "whichever socket the kernel chooses, somebody accepts");
    }
    server.reload("reuseport 2\nworkers 2\nanswer three");
    for _ in 0..40 {
        assert_eq!(server.ask().text, "three");
    }
}

fn a_killed_worker_is_replaced_on_the_same_sockets() {
    let mut server = Server::start(PLAIN);
    server.reload("listen 127.0.0.1:0\nanswer two");
    fs::write(server.directory.join("conf"), "broken").expect("written");
    for _ in 0..3 {
        let before = server.ask();
        let worker = Pid::from_raw(before.pid).expect("positive");
        rustix::process::kill_process(worker, Signal::KILL).expect("it runs");
        server.wait_logged(&format!("worker process {} exited on signal 9", before.pid));
        let after = server.ask();
        assert_ne!(after.pid, before.pid);
        assert_eq!(after.text, "two", "started from memory, not from the broken file");
    }
}

fn a_worker_that_panics_is_replaced() {
    let mut server = Server::start(PLAIN);
    let before = server.ask();
    server.connect().send("panic");
    server.wait_logged("panicked");
    server.wait_logged(&format!("worker process {} exited with code 2", before.pid));
    assert_ne!(server.ask().pid, before.pid);
}

fn sigwinch_of_a_resized_terminal_stops_no_worker() {
    let mut server = Server::start(PLAIN);
    let before = server.ask().pid;
    kill(before, Signal::WINCH);
    server.signal(Signal::WINCH);
    server.wait_logged(&format!("] {before}: signal 28 (SIGWINCH) received"));
    server.reload("listen 127.0.0.1:0\nanswer two");
    assert_eq!(server.ask().pid, before);
}

fn a_worker_that_is_told_to_leave_is_succeeded_at_once() {
    let mut server = Server::start(PLAIN);
    let mut client = server.connect();
    let old = client.ask("x").pid;
    kill(old, Signal::QUIT);
    let new = server.wait_started_after(old);
    let after = std::iter::repeat_with(|| server.ask()).find(|answer| answer.pid != old).expect("endless");
    assert_eq!(after.pid, new);
    assert_eq!(client.ask("x").pid, old);
}

fn a_death_is_noticed_although_the_parent_ignored_them() {
    let mut server = Server::launch_with(PLAIN, |command| {
        let ignore = || {
            // SAFETY: no handler is installed.
            unsafe { libc::signal(libc::SIGCHLD, libc::SIG_IGN) };
            Ok(())
        };
        // SAFETY: the closure only makes a system call.
        unsafe { command.pre_exec(ignore) };
    });
    server.wait_notified("READY=1");
    let before = server.ask().pid;
    kill(before, Signal::KILL);
    server.wait_logged(&format!("worker process {before} exited on signal 9"));
    assert_ne!(server.ask().pid, before);
}

fn when_old_and_new_worker_die_another_is_started() {
    let mut server = Server::start(PLAIN);
    let old = server.ask().pid;
    server.new_fifo();
    server.begin_reload("listen 127.0.0.1:0\nworking_directory DIR\nwaits worker DIR/fifo\nanswer two");
    let new = server.wait_started_after(old);
    for pid in [old, new] {
        kill(pid, Signal::KILL);
        server.wait_logged(&format!("worker process {pid} exited on signal 9"));
    }
    let after = server.ask();
    assert!(after.pid != old && after.pid != new);
    assert_eq!(after.text, "one");
}

fn a_worker_that_a_reload_brought_back_is_kept() {
    let mut server = Server::launch(&format!("{PLAIN}\ndaemon"));
    server.wait_notified("READY=1");
    server.wait_exited();
    let master = server.pid_in_file();
    let first = server.ask().pid;
    kill(master.as_raw_pid(), Signal::WINCH);
    server.wait_logged(&format!("worker process {first} exited with code 0"));
    kill(master.as_raw_pid(), Signal::HUP);
    server.wait_notified("READY=1");
    let second = server.ask().pid;
    kill(second, Signal::KILL);
    server.wait_logged(&format!("worker process {second} exited on signal 9"));
    assert_ne!(server.ask().pid, second);
    gale_process::send_signal(&server.directory.join("pid"), Command::Stop).expect("it runs");
    assert!(ends(master));
}

fn orders_to_the_whole_service_do_not_end_the_helper() {
    let mut server = Server::start(PLAIN);
    let fifo = server.new_fifo();
    let worker = server.ask().pid;
    server.begin_reload("listen 127.0.0.1:0\nwaits helper DIR/fifo\nanswer two");
    let holding_up = fs::File::options().write(true).open(fifo).expect("the helper reads it");
    let helper = server.helper(worker);
    for signal in [Signal::HUP, Signal::USR1, Signal::USR2, Signal::WINCH] {
        kill(helper, signal);
    }
    drop(holding_up);
    server.wait_notified("READY=1");
    assert_eq!(server.ask().text, "two");
}

fn a_broken_standard_error_is_no_panic() {
    let full = fs::File::options().write(true).open("/dev/full").expect("it exists");
    let mut server = Server::launch_with("lissten", |command| {
        command.stderr(full);
    });
    assert_eq!(server.wait_exited().code(), Some(1));
}

fn kill(pid: i32, signal: Signal) {
    rustix::process::kill_process(Pid::from_raw(pid).expect("positive"), signal).expect("it runs");
}

fn quit_waits_for_connections() {
    let mut server = Server::start(PLAIN);
    let address = server.addresses()[0].clone();
    let mut client = server.connect();
    let worker = client.ask("x").pid;
    server.signal(Signal::QUIT);
    server.wait_notified("STOPPING=1");
    server.wait_logged("gracefully shutting down");
    assert_eq!(client.ask("x").pid, worker, "still answered");
    drop(client);
    assert!(server.wait_exited().success());
    assert!(TcpStream::connect(address).is_err());
    server.wait_logged(&format!("worker process {worker} exited with code 0"));
}

fn quit_at_the_start_waits_for_requests_in_flight() {
    let directory = new_directory();
    let fifo = directory.join("fifo");
    make_fifo(&fifo);
    let waits = format!("start_waits_open {}", fifo.display());
    let mut server = Server::launch(&format!("listen 127.0.0.1:0\nworkers 2\n{waits}\nanswer one"));
    // The second loop serves, while the first one still waits for the FIFO.
    let holding_up = fs::File::options().write(true).open(&fifo).expect("somebody waits");
    let mut client = server.connect();
    let worker = client.ask("x").pid;
    server.signal(Signal::QUIT);
    server.wait_logged("gracefully shutting down");
    assert_eq!(client.ask("x").pid, worker, "still answered");
    drop(holding_up);
    assert_eq!(client.ask("x").pid, worker);
    drop(client);
    assert!(server.wait_exited().success());
    fs::remove_dir_all(directory).expect("ours");
}

fn quit_is_bounded_by_the_shutdown_timeout() {
    let mut server = Server::start("listen 127.0.0.1:0\nshutdown_timeout 50\nanswer one");
    let mut client = server.connect();
    client.ask("x");
    server.signal(Signal::QUIT);
    client.wait_closed();
    assert!(server.wait_exited().success());
}

fn a_stuck_loop_does_not_hold_up_a_fast_stop() {
    let mut server = Server::start(PLAIN);
    server.connect().send("stuck");
    server.signal(Signal::TERM);
    // The loop itself would never end.
    assert!(server.wait_exited().success());
}

fn logs_are_reopened_in_the_middle_of_a_reload() {
    for role in ["helper", "worker"] {
        let mut server = Server::start(PLAIN);
        let (trace, rotated) = (server.directory.join("trace"), server.directory.join("trace.1"));
        let fifo = server.new_fifo();
        let worker = server.ask().pid;
        server.begin_reload(&format!("listen 127.0.0.1:0\ntrace DIR/trace\nwaits_open {role} DIR/fifo\nanswer two"));
        let holding_up = fs::File::options().write(true).open(fifo).expect("somebody waits");
        fs::rename(&trace, &rotated).expect("it was opened before");
        server.signal(Signal::USR1);
        server.wait_logged(&format!("] {worker}: reopening logs"));
        drop(holding_up);
        server.wait_notified("READY=1");
        server.connect().ask("after");
        let text = fs::read_to_string(&trace).unwrap_or_else(|_| panic!("{role}: no new file"));
        assert!(text.ends_with("after\n"), "{role}: {text}");
        assert_eq!(fs::read_to_string(&rotated).expect("the old file"), "", "{role}");
    }
}

fn a_stuck_loop_does_not_hold_up_a_reload() {
    let mut server = Server::start("listen 127.0.0.1:0\nworkers 2\nanswer one");
    server.connect().send("stuck");
    server.reload("listen 127.0.0.1:0\nworkers 2\nanswer two");
    server.wait_logged("is stuck, going on without it");
    assert_eq!(server.ask().text, "two", "the other one accepts from the shared socket");
}

fn the_sockets_of_a_loop_that_cannot_start_go_to_others() {
    let mut server = Server::start("reuseport 1\nanswer one");
    server.reload("reuseport 3\nworkers 3\nstart_fails_at 1\nanswer two");
    server.wait_logged("told to fail");
    for _ in 0..40 {
        assert_eq!(server.ask().text, "two");
    }
    server.reload("reuseport 3\nworkers 3\nanswer three");
    for _ in 0..40 {
        assert_eq!(server.ask().text, "three");
    }
}

fn loops_hear_of_a_change_when_all_have_carried_it_out() {
    const TELLS: &str = "listen 127.0.0.1:0\ntrace DIR/error.log\ntells_settled";
    let directory = new_directory();
    let fifo = directory.join("fifo");
    make_fifo(&fifo);
    let mut server = Server::launch(&format!("{TELLS}\nworkers 2\nstart_waits_open {}\nanswer one", fifo.display()));
    let holding_up = fs::File::options().write(true).open(&fifo).expect("somebody waits");
    // The second loop serves. By its second answer it has carried out all orders that precede its first one.
    let mut client = server.connect();
    assert_eq!((client.ask("x").worker, client.ask("x").worker), (1, 1));
    assert!(!server.logged().contains("has settled"));
    drop(holding_up);
    server.wait_notified("READY=1");
    server.wait_logged("worker 0 has settled with one");
    server.wait_logged("worker 1 has settled with one");
    // The loop that cannot start is not notified.
    server.reload(&format!("{TELLS}\nworkers 3\nstart_fails_at 2\nanswer two"));
    server.wait_logged("worker 0 has settled with two");
    server.wait_logged("worker 1 has settled with two");
    // Nor is the loop that is drained.
    server.reload(&format!("{TELLS}\nworkers 1\nanswer three"));
    server.wait_logged("worker 0 has settled with three");
    server.signal(Signal::TERM);
    assert!(server.wait_exited().success());
    let log = server.logged();
    assert!(!log.contains("worker 2 has settled") && !log.contains("worker 1 has settled with three"), "{log}");
    fs::remove_dir_all(directory).expect("ours");
}

fn logs_are_reopened_in_master_and_worker() {
    let mut server = Server::start("listen 127.0.0.1:0\ntrace DIR/trace\nanswer one");
    let (trace, rotated) = (server.directory.join("trace"), server.directory.join("trace.1"));
    server.connect().ask("before");
    fs::rename(&trace, &rotated).expect("rotated");
    server.connect().ask("between");
    server.signal(Signal::USR1);
    server.wait_logged("reopening logs");
    // The order to the worker precedes this one on the same link.
    server.reload("listen 127.0.0.1:0\ntrace DIR/trace\nanswer two");
    server.connect().ask("after");
    let old = fs::read_to_string(&rotated).expect("the old file");
    assert_eq!(old, "before\nbetween\nworker 0 reopens\n", "what a loop still has goes to the old file");
    assert_eq!(fs::read_to_string(&trace).expect("the new file"), "after\n");
}

fn a_worker_without_free_descriptors_keeps_its_link() {
    let configuration = "listen 127.0.0.1:0\nrlimit_nofile 100\ntrace DIR/trace\nanswer";
    let mut server = Server::start(&format!("{configuration} one"));
    let trace = server.directory.join("trace");
    let mut client = server.connect();
    let before = client.ask("exhaust");
    server.reload(&format!("{configuration} two"));
    assert_eq!(client.ask("x"), before);
    server.wait_logged("too many open files to receive more");
    fs::remove_file(&trace).expect("it was written");
    server.signal(Signal::USR1);
    server.wait_logged("log files could not be reopened");
    client.ask("release");
    server.wait_logged("sending the log files of worker process");
    server.reload(&format!("{configuration} three"));
    let after = client.ask("x");
    assert_eq!((after.pid, after.text.as_str()), (before.pid, "three"));
    assert!(fs::read_to_string(&trace).expect("the new file").ends_with("x\n"));
}

fn a_worker_that_lost_its_link_is_replaced() {
    let mut server = Server::start(PLAIN);
    let mut client = server.connect();
    let old = client.ask("unlink").pid;
    server.wait_logged("runs on without its link to the master");
    server.wait_notified("READY=1");
    assert_eq!(client.ask("x").pid, old, "the old one drains");
    drop(client);
    server.wait_logged(&format!("worker process {old} exited with code 0"));
    assert_ne!(server.ask().pid, old);
    server.reload("listen 127.0.0.1:0\nanswer two");
    assert_eq!(server.ask().text, "two");
}

fn three_hundred_descriptors_cross_the_link() {
    let configuration = format!("{PLAIN}\nlogs 300");
    let mut server = Server::start(&configuration);
    let before = server.ask();
    server.reload(&format!("{configuration}\nanswer two"));
    let after = server.ask();
    assert_eq!((after.pid, after.text.as_str()), (before.pid, "two"));
}

fn a_worker_without_a_master_serves_until_signalled() {
    let mut server = Server::start(PLAIN);
    let before = server.ask();
    server.signal(Signal::KILL);
    server.wait_exited();
    server.wait_logged("the link to the master process was lost");
    assert_eq!(server.ask().pid, before.pid);
    let worker = Pid::from_raw(before.pid).expect("positive");
    rustix::process::kill_process(worker, Signal::QUIT).expect("it runs");
    server.wait_logged("gracefully shutting down");
    assert!(ends(worker));
}

fn the_daemon_answers_when_its_starter_has_returned() {
    let mut server = Server::launch(&format!("{PLAIN}\ndaemon"));
    assert!(server.wait_exited().success());
    assert_eq!(server.ask().text, "one");
    let master = server.pid_in_file();
    assert_ne!(master, server.pid());
    gale_process::send_signal(&server.directory.join("pid"), Command::Quit).expect("it runs");
    assert!(ends(master));
}

fn a_start_that_fails_is_seen_on_the_terminal() {
    for (configuration, expected) in [
        ("lissten 80", "toy: [emerg] unknown directive \"lissten\""),
        ("listen 127.0.0.1:0\nstart_fails", "toy: [emerg] told to fail"),
        ("listen 127.0.0.1:0\nstart_fails\ndaemon", "toy: [emerg] told to fail"),
        ("listen 127.0.0.1:0\nstart_fails\nsingle", "toy: [emerg] told to fail"),
        (
            "listen 127.0.0.1:0\npid /no/such/directory/pid",
            "toy: [emerg] open() \"/no/such/directory/pid\" failed (2: No such file or directory)",
        ),
        ("listen 127.0.0.1:0\npid /no/such/directory/pid\ndaemon", "toy: [emerg] open() \"/no/such/directory/pid\""),
    ] {
        let mut server = Server::launch(configuration);
        assert!(!server.wait_exited().success(), "{configuration}");
        let text = server.stderr();
        assert!(text.contains(expected), "{configuration}: {text}");
        assert!(!server.directory.join("pid").exists(), "{configuration}");
    }
}

fn without_a_master_one_process_does_everything() {
    let mut server = Server::start(&format!("{PLAIN}\nsingle"));
    assert_eq!(server.ask().pid, server.pid().as_raw_pid());
    server.reload("listen 127.0.0.1:0\nworkers 3\nanswer two\nsingle");
    assert_eq!(server.ask().text, "two");
    server.reload("lissten");
    assert_eq!(server.ask().text, "two");
    server.wait_logged("unknown directive \"lissten\" in ");
    server.signal(Signal::QUIT);
    assert!(server.wait_exited().success());
    assert!(!server.directory.join("pid").exists());
}

fn a_new_binary_takes_over_the_sockets() {
    let mut server = Server::start("listen 127.0.0.1:0\nanswer one");
    let address = server.addresses()[0].clone();
    let port = format!("listen {address}\nanswer two");
    // The new binary finds the socket by the address that it is bound to.
    server.reload(&port);
    let old_worker = server.ask().pid;
    assert_eq!(server.ask().text, "two");
    server.signal(Signal::USR2);
    server.wait_notified("READY=1");
    let old_pid = server.pid();
    let new_master = server.pid_in_file();
    assert_ne!(new_master, old_pid);
    assert!(server.directory.join("pid.oldbin").exists());
    server.signal(Signal::QUIT);
    assert!(server.wait_exited().success());
    assert!(!server.directory.join("pid.oldbin").exists());
    let answer = Client::connect(&address).ask("x");
    assert_ne!(answer.pid, old_worker);
    gale_process::send_signal(&server.directory.join("pid"), Command::Stop).expect("it runs");
    assert!(ends(new_master));
}

fn a_new_binary_takes_over_every_socket_of_an_address() {
    let mut server = Server::start("reuseport 4\nworkers 4\nanswer one");
    let address = server.addresses()[0].clone();
    server.reload(&format!("reuseport 4 {address}\nworkers 4\nanswer two"));
    let old_worker = server.ask().pid;
    server.signal(Signal::USR2);
    server.wait_notified("READY=1");
    let new_master = server.pid_in_file();
    // The old master still has them, but none of its processes accepts.
    server.signal(Signal::STOP);
    kill(old_worker, Signal::KILL);
    for _ in 0..60 {
        assert_ne!(Client::connect(&address).ask("x").pid, old_worker);
    }
    server.signal(Signal::QUIT);
    server.signal(Signal::CONT);
    assert!(server.wait_exited().success());
    gale_process::send_signal(&server.directory.join("pid"), Command::Stop).expect("it runs");
    assert!(ends(new_master));
}

fn an_upgrade_can_be_taken_back() {
    let mut server = Server::launch("listen 127.0.0.1:0\nanswer one\ndaemon");
    assert!(server.wait_exited().success());
    server.wait_notified("READY=1");
    let old = server.pid_in_file();
    // Port 0 is another port for the new binary, which does not matter here.
    let address = server.addresses()[0].clone();
    let old_worker = Pid::from_raw(server.ask().pid).expect("positive");
    let tell_old = |signal| rustix::process::kill_process(old, signal).expect("it runs");
    tell_old(Signal::USR2);
    server.wait_notified("READY=1");
    let new = server.pid_in_file();

    tell_old(Signal::WINCH);
    assert!(ends(old_worker));
    tell_old(Signal::USR2);
    server.wait_logged("the changing binary signal is ignored");

    rustix::process::kill_process(new, Signal::QUIT).expect("it runs");
    server.wait_logged(&format!("new binary process {new} exited with code 0"));
    let back = Client::connect(&address).ask("x");
    assert_ne!(back.pid, old_worker.as_raw_pid(), "the old master has a worker process again");
    server.wait_logged(&format!("start worker process {}", back.pid));
    assert_eq!(server.pid_in_file(), old);
    gale_process::send_signal(&server.directory.join("pid"), Command::Stop).expect("it runs");
    assert!(ends(old));
}

fn the_pid_file_of_a_new_binary_is_left_alone() {
    let mut server = Server::start("listen 127.0.0.1:0\nanswer one");
    server.signal(Signal::USR2);
    server.wait_notified("READY=1");
    let new = server.pid_in_file();
    server.reload("listen 127.0.0.1:0\npid DIR/other\nanswer two");
    assert_eq!(server.pid_in_file(), new);
    kill(new.as_raw_pid(), Signal::QUIT);
    server.wait_logged(&format!("new binary process {new} exited with code 0"));
    server.reload("listen 127.0.0.1:0\npid DIR/other\nanswer three");
    let other = fs::read_to_string(server.directory.join("other")).expect("moved as soon as it could be");
    assert_eq!(other.trim_end(), server.pid().to_string());
    assert!(!server.directory.join("pid").exists() && !server.directory.join("pid.oldbin").exists());
}

fn a_change_of_user_needs_a_new_process() {
    if !gale_process::is_super_user() {
        return skip("only root has another user to become");
    }
    let mut server = Server::start("listen 127.0.0.1:0\nanswer one");
    let mut client = server.connect();
    let old = client.ask("x").pid;
    server.reload("listen 127.0.0.1:0\nuser daemon\nanswer two");
    // Both accept until the old process has received its order to drain.
    let new = std::iter::repeat_with(|| server.ask()).find(|answer| answer.pid != old).expect("endless");
    assert_eq!(new.text, "two");
    let status = fs::read_to_string(format!("/proc/{}/status", new.pid)).expect("it runs");
    let identity = status.lines().find(|line| line.starts_with("Uid:")).expect("a user");
    assert!(!identity.split_whitespace().any(|word| word == "0"), "{identity}");
    assert_eq!(client.ask("x").pid, old, "the old one drains");
    drop(client);
    server.wait_logged(&format!("worker process {old} exited with code 0"));
    server.reload("listen 127.0.0.1:0\nuser daemon\nanswer three");
    assert_eq!(server.ask().pid, new.pid);
}

fn socket_files_are_removed_when_no_process_serves_them() {
    let mut server = Server::start("listen 127.0.0.1:0\nlisten_unix DIR/a\nlisten_unix DIR/b\nanswer one");
    let (first, second) = (server.directory.join("a"), server.directory.join("b"));
    assert!(UnixStream::connect(&first).is_ok() && UnixStream::connect(&second).is_ok());
    server.reload("listen 127.0.0.1:0\nlisten_unix DIR/b\nanswer two");
    assert!(!first.exists());
    assert!(UnixStream::connect(&second).is_ok());
    server.signal(Signal::TERM);
    server.wait_exited();
    assert!(!second.exists());
}

fn no_socket_file_outlives_a_failed_start() {
    for configuration in [
        "listen_unix DIR/a\npid /no/such/directory/pid",
        "listen_unix DIR/a\npid /no/such/directory/pid\ndaemon",
        "listen_unix DIR/a\nlisten_unix /no/such/directory/b",
        "listen_unix DIR/a\nstart_fails",
        "listen_unix DIR/a\nstart_fails\nsingle",
    ] {
        let mut server = Server::launch(configuration);
        assert!(!server.wait_exited().success(), "{configuration}");
        assert!(!server.directory.join("a").exists(), "{configuration}");
    }
}

fn a_killed_helper_is_no_obstacle_to_the_next_reload() {
    let mut server = Server::start(PLAIN);
    let fifo = server.new_fifo();
    let worker = server.ask().pid;
    let more = "listen 127.0.0.1:0\nlisten_unix DIR/new.sock\nanswer two";
    server.begin_reload(&format!("{more}\nwaits_open helper DIR/fifo"));
    let holding_up = fs::File::options().write(true).open(fifo).expect("the helper reads it");
    kill(server.helper(worker), Signal::KILL);
    server.wait_notified("READY=1");
    drop(holding_up);
    assert!(server.directory.join("new.sock").exists(), "nobody could remove it");
    server.reload(more);
    assert_eq!(server.ask().text, "two");
    assert!(UnixStream::connect(server.directory.join("new.sock")).is_ok());
}

fn the_pid_file_is_judged_in_nginx_words() {
    let directory = fixture::new_directory();
    let path = directory.join("pid");
    let message = |content: Option<&str>| {
        if let Some(content) = content {
            fs::write(&path, content).expect("written");
        }
        gale_process::send_signal(&path, Command::Reload).expect_err("nobody there").to_string()
    };
    let name = path.display();
    assert_eq!(message(None), format!("[error] open() \"{name}\" failed (2: No such file or directory)"));
    assert_eq!(message(Some("")), format!("[error] invalid PID number \"\" in \"{name}\""));
    assert_eq!(message(Some("12x\n")), format!("[error] invalid PID number \"12x\" in \"{name}\""));
    // Larger than any process number (PID_MAX_LIMIT).
    assert_eq!(message(Some("999999999\n")), "[alert] kill(999999999, 1) failed (3: No such process)");
    fs::remove_dir_all(directory).expect("removed");
}
