//! The sandbox of the worker process: denied and permitted operations, log messages, and reloads that need more.

use std::fs;
use std::net::TcpListener;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use crate::support::{
    self, Directory, Driver, Server, Setup, children_of, http_configuration, landlock, with_each_driver,
};
use rustix::process::{Pid, Signal};

with_each_driver!(
    worker_of_auto_is_restricted_and_master_is_not,
    worker_that_makes_a_fatal_call_dies_and_another_serves,
    unknown_call_fails_and_the_worker_serves_on,
    diagnosis_names_the_call,
    sandbox_off_restricts_nothing,
    rings_after_the_start_are_forbidden_by_on_alone,
    more_event_loops_keep_process_and_zones_under_auto,
    more_event_loops_have_a_new_process_where_on_forbids_their_rings,
    worker_writes_to_its_places_alone,
    releases_are_swapped_and_roots_renamed_under_auto,
    reload_that_writes_elsewhere_has_a_new_process,
    path_that_begins_with_a_variable_leaves_writing_free,
    kernel_without_landlock_is_told_by_auto_and_refused_by_on,
    sandbox_on_restricts_reading_and_connecting,
    sandbox_on_serves_the_places_of_the_configuration,
    kernel_without_ports_of_landlock_is_told_by_on,
);

/// A location that attempts operations that no worker process needs.
const ATTEMPT: &str = "location /attempt { test_attempt $arg_how $arg_what; }";

fn configuration(driver: Driver, main: &str, server: &str) -> String {
    let http = format!("server {{ listen %UNIX%; location / {{ return 200 here; }} {ATTEMPT} {server} }}");
    format!("{main}\n{}", http_configuration(driver, &http))
}

fn start(driver: Driver, main: &str, server: &str) -> Server {
    Setup::configuration(&configuration(driver, main, server)).start()
}

/// The result of an attempt: `done`, or the error number.
#[track_caller]
fn attempt(server: &Server, how: &str, what: &str) -> String {
    server.get(&format!("/attempt?how={how}&what={what}")).text().to_owned()
}

fn status_of(pid: Pid, field: &str) -> String {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).expect("it runs");
    let value = status.lines().find_map(|line| line.strip_prefix(field));
    value.unwrap_or_else(|| panic!("no {field}")).trim().to_owned()
}

/// Makes an attempt that kills the worker process, and waits until another one serves.
#[track_caller]
fn attempt_fatal(server: &Server, how: &str, what: &str) {
    let before = server.worker();
    let mut client = server.connect();
    client.send(format!("GET /attempt?how={how}&what={what} HTTP/1.1\r\nHost: x\r\n\r\n"));
    let death = format!("worker process {before} exited on signal 31");
    let line = server.wait_logged(&death);
    assert!(line.contains("[alert]") && line.contains("a system call that its sandbox forbids"), "{line}");
    assert_eq!(server.get("/").text(), "here");
    assert_ne!(server.worker(), before);
}

fn worker_of_auto_is_restricted_and_master_is_not(driver: Driver) {
    let server = start(driver, "", "");
    let worker = server.worker();
    for task in fs::read_dir(format!("/proc/{worker}/task")).expect("it runs").flatten() {
        let task: i32 = task.file_name().to_str().expect("a number").parse().expect("a number");
        let task = Pid::from_raw(task).expect("positive");
        assert_eq!(status_of(task, "Seccomp:"), "2");
        assert_eq!(status_of(task, "NoNewPrivs:"), "1");
    }
    // The master is as unrestricted as this process, which started it.
    for field in ["Seccomp:", "NoNewPrivs:"] {
        assert_eq!(status_of(server.pid(), field), status_of(rustix::process::getpid(), field));
    }
    server.wait_logged("sandbox auto: system calls restricted");
    server.stop();
}

fn worker_that_makes_a_fatal_call_dies_and_another_serves(driver: Driver) {
    let mut server = start(driver, "", "");
    attempt_fatal(&server, "exec", "/bin/true");
    for call in [libc::SYS_ptrace, libc::SYS_bpf, libc::SYS_setuid, libc::SYS_mount, libc::SYS_process_vm_readv] {
        attempt_fatal(&server, "call", &call.to_string());
    }
    server.end(Signal::TERM);
}

fn unknown_call_fails_and_the_worker_serves_on(driver: Driver) {
    let server = start(driver, "", "");
    let worker = server.worker();
    // The filter cannot inspect clone3; the last number is no system call; chdir is harmless and not needed.
    for call in [libc::SYS_clone3, libc::SYS_chdir, 100_000] {
        assert_eq!(attempt(&server, "call", &call.to_string()), libc::ENOSYS.to_string(), "{call}");
    }
    assert_eq!(server.worker(), worker);
    server.stop();
}

fn diagnosis_names_the_call(driver: Driver) {
    let mut server = start(driver, "sandbox auto diagnose;", "");
    assert_eq!(attempt(&server, "call", "100000"), libc::ENOSYS.to_string());
    server.wait_logged("\"sandbox\": system call 100000 is not allowed, it fails with ENOSYS");
    attempt_fatal(&server, "exec", "/bin/true");
    server.wait_logged(&format!("system call {} (execve) is forbidden, the worker process ends", libc::SYS_execve));
    server.end(Signal::TERM);
}

fn sandbox_off_restricts_nothing(driver: Driver) {
    let server = start(driver, "sandbox off;", "");
    assert_eq!(status_of(server.worker(), "Seccomp:"), "0");
    assert_eq!(status_of(server.worker(), "NoNewPrivs:"), "1", "that is always so");
    // A call that fails for this account on every kernel, and has no effect.
    assert_eq!(attempt(&server, "call", &libc::SYS_chroot.to_string()), libc::EFAULT.to_string());
    assert_eq!(attempt(&server, "exec", "/no/such/program"), libc::ENOENT.to_string());
    assert!(!server.log().contains("sandbox"), "{server}");
    server.stop();
}

fn rings_after_the_start_are_forbidden_by_on_alone(driver: Driver) {
    // The kernel checks the filter before the arguments, which are invalid.
    let setup = libc::SYS_io_uring_setup.to_string();
    let server = start(driver, "", "");
    assert_ne!(attempt(&server, "call", &setup), libc::EPERM.to_string());
    server.stop();
    let Some(_) = landlock() else { return };
    let server = start(driver, "sandbox on;", "");
    server.look_until("end of rings", || attempt(&server, "call", &setup) == libc::EPERM.to_string());
    server.stop();
}

fn more_event_loops_keep_process_and_zones_under_auto(driver: Driver) {
    let zone = "limit_req_zone all zone=z:64k rate=1r/m;";
    let server = "server { listen %UNIX%; location / { return 200 here; } \
                  location /once { limit_req zone=z; root %DIR%; } }";
    let text = http_configuration(driver, &format!("{zone} {server}"));
    let mut server = Setup::configuration(&text).file("once", "once").start();
    assert_eq!(server.get("/once").text(), "once");
    let before = server.worker();
    for workers in [6, 1, 3] {
        server.reload(&text.replace("worker_processes 2;", &format!("worker_processes {workers};")));
        // Each of the loops has the zone as it was.
        for _ in 0..2 * workers {
            assert_eq!(server.get("/once").status, 503);
        }
        assert_eq!(server.worker(), before);
    }
    assert!(!server.log().contains("io_uring is not available"), "{server}");
    server.stop();
}

fn more_event_loops_have_a_new_process_where_on_forbids_their_rings(driver: Driver) {
    let Some(_) = landlock() else { return };
    let mut server = start(driver, "sandbox on;", "");
    let before = server.worker();
    let text = configuration(driver, "sandbox on;", "");
    server.reload(&text.replace("worker_processes 2;", "worker_processes 3;"));
    assert_eq!(server.get("/").text(), "here");
    match driver {
        Driver::Epoll => assert_eq!(server.worker(), before),
        Driver::IoUring => {
            server.wait_logged("a new worker process is needed: its sandbox allows no more rings of io_uring");
            server.look_until("end of the old process", || children_of(server.pid()).len() == 1);
            assert_ne!(server.worker(), before);
        }
    }
    server.reload(&text.replace("worker_processes 2;", "worker_processes 1;"));
    assert_eq!(server.get("/").text(), "here");
    server.stop();
}

fn worker_writes_to_its_places_alone(driver: Driver) {
    let Some(_) = landlock() else { return };
    let elsewhere = Directory::new();
    let foreign = elsewhere.path().join("file");
    let foreign = foreign.to_str().expect("text");
    let server = start(driver, "", "location /files/ { root %DIR%; dav_methods PUT; create_full_put_path on; }");
    let refused = libc::EACCES.to_string();
    assert_eq!(attempt(&server, "write", foreign), refused);
    let own = server.directory.path();
    assert_eq!(attempt(&server, "write", own.join("body/x").to_str().expect("text")), "done", "temporary files");
    assert_eq!(attempt(&server, "write", own.join("x").to_str().expect("text")), "done", "clients may write there");
    let created = server.connect().ask("PUT /files/deep/x HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nhello");
    assert_eq!(created.status, 201);
    assert_eq!(server.directory.read("files/deep/x"), "hello");
    server.wait_logged("writing restricted to 1 directories");
    server.stop();

    let server = start(driver, "sandbox off;", "");
    assert_eq!(attempt(&server, "write", foreign), "done");
    server.stop();
}

fn releases_are_swapped_and_roots_renamed_under_auto(driver: Driver) {
    let setup = Setup::configuration(&configuration(
        driver,
        "",
        "location /site/ { root %DIR%/current; } location /plain/ { root %DIR%/plain; }",
    ));
    let server = setup
        .template("releases/1/site/page", "first")
        .template("releases/2/site/page", "second")
        .template("plain/plain/page", "before")
        .template("next/plain/page", "after")
        .link("releases/1", "current")
        .start();
    let directory = server.directory.path();
    assert_eq!(server.get("/site/page").text(), "first");
    assert_eq!(server.get("/plain/page").text(), "before");
    symlink("releases/2", directory.join("new")).expect("a link");
    fs::rename(directory.join("new"), directory.join("current")).expect("it replaces the old one");
    fs::rename(directory.join("plain"), directory.join("old")).expect("it is there");
    fs::rename(directory.join("next"), directory.join("plain")).expect("it is there");
    assert_eq!(server.get("/site/page").text(), "second");
    assert_eq!(server.get("/plain/page").text(), "after");
    server.stop();
}

fn reload_that_writes_elsewhere_has_a_new_process(driver: Driver) {
    let Some(_) = landlock() else { return };
    let mut server = start(driver, "", "");
    let first = server.worker();
    let elsewhere = Directory::new();
    let make = |path: &Path| {
        fs::create_dir(path).expect("room");
        fs::set_permissions(path, fs::Permissions::from_mode(0o777)).expect("ours");
    };
    let (constant, inside) = (server.directory.path().join("constant"), server.directory.path().join("inside"));
    let outside = elsewhere.path().join("outside");
    [&constant, &inside, &outside].into_iter().for_each(|path| make(path));
    let logged = |server: &Server, path: PathBuf| {
        // An old process may have answered some of the requests.
        server.look_until("line of the log", || {
            assert_eq!(server.get("/").text(), "here");
            fs::read_to_string(&path).is_ok_and(|log| log.contains("GET / "))
        });
    };
    // The master opens this log.
    server.reload(&configuration(driver, "", "access_log %DIR%/constant/log;"));
    logged(&server, constant.join("log"));
    // The directory of the temporary files may be recreated in its parent, which contains this log as well.
    server.reload(&configuration(driver, "", "root %DIR%; access_log %DIR%/inside/$request_method.log;"));
    logged(&server, inside.join("GET.log"));
    assert_eq!(server.worker(), first);

    let mut client = server.connect();
    assert_eq!(client.get("/").text(), "here");
    let log = format!("root %DIR%; access_log {}/$request_method.log;", outside.display());
    let more = configuration(driver, "", &log);
    server.reload(&more);
    server.wait_logged("a new worker process is needed: it writes to other directories");
    assert_eq!(client.get("/").text(), "here", "an idle connection is passed on");
    logged(&server, outside.join("GET.log"));
    server.look_until("end of the old process", || children_of(server.pid()).len() == 1);
    let second = server.worker();
    assert_ne!(second, first);
    // The same configuration needs no other process; another directory of the same name does.
    server.reload(&more);
    assert_eq!(server.worker(), second);
    fs::rename(&outside, elsewhere.path().join("old")).expect("it is there");
    make(&outside);
    server.reload(&more);
    logged(&server, outside.join("GET.log"));
    server.look_until("end of the old process", || children_of(server.pid()).len() == 1);
    assert_ne!(server.worker(), second);
    server.stop();
}

fn path_that_begins_with_a_variable_leaves_writing_free(driver: Driver) {
    let Some(_) = landlock() else { return };
    let elsewhere = Directory::new();
    let server = start(driver, "", "location /x/ { root /$arg_root; dav_methods PUT; }");
    assert_eq!(attempt(&server, "write", elsewhere.path().join("x").to_str().expect("text")), "done");
    let notice = "writing is not restricted: the path begins with a variable in \"dav_methods\"";
    assert_eq!(server.stderr().matches(notice).count(), 1, "{server}");
    server.wait_logged("sandbox auto: system calls restricted, writing not restricted");
    server.stop();
}

fn kernel_without_landlock_is_told_by_auto_and_refused_by_on(driver: Driver) {
    let old = "env GALE_TEST_KERNEL_MAX=5.12;";
    let server = start(driver, old, "");
    server.wait_logged("files not restricted (the kernel has no Landlock, or it is switched off)");
    assert_eq!(status_of(server.worker(), "Seccomp:"), "2");
    server.stop();

    let text = configuration(driver, &format!("{old}\nsandbox on;"), "");
    let mut server = Setup::configuration(&text).launch();
    assert!(!server.wait_exited().success());
    assert!(server.stderr().contains("\"sandbox on\" cannot be had here: the kernel has no Landlock"), "{server}");
}

fn sandbox_on_restricts_reading_and_connecting(driver: Driver) {
    let Some(version) = landlock() else { return };
    // Two listening ports, one of which is in the configuration.
    let [known, unknown] = [(); 2].map(|()| TcpListener::bind("127.0.0.1:0").expect("a port"));
    let [known, unknown] = [known, unknown].map(|listener| (listener.local_addr().expect("bound"), listener));
    let server = format!("location /passed {{ proxy_pass http://{}; }}", known.0);
    let server = start(driver, "sandbox on;", &server);
    let refused = libc::EACCES.to_string();
    assert_eq!(attempt(&server, "read", "/etc/shadow"), refused);
    assert_eq!(attempt(&server, "read", "/etc/passwd"), refused, "its permissions would allow it");
    assert_eq!(attempt(&server, "read", "/proc/self/status"), "done");
    assert_eq!(attempt(&server, "write", "/tmp/somewhere"), refused);
    if version >= 4 {
        assert_eq!(attempt(&server, "connect", &known.0.to_string()), "done");
        assert_eq!(attempt(&server, "connect", &unknown.0.to_string()), refused);
        server.wait_logged("connecting to 1 TCP ports");
    }
    server.stop();

    let server = start(driver, "sandbox auto;", "");
    assert_eq!(attempt(&server, "read", "/etc/passwd"), "done");
    assert_eq!(attempt(&server, "connect", &unknown.0.to_string()), "done");
    server.stop();
}

fn sandbox_on_serves_the_places_of_the_configuration(driver: Driver) {
    let Some(_) = landlock() else { return };
    let locations = "location /root/ { root %DIR%; }
        location /alias/ { alias %DIR%/other/; autoindex on; }
        location /of/ { root %DIR%/hosts/$arg_host; }
        location /secret/ { root %DIR%; auth_basic x; auth_basic_user_file %DIR%/users; }
        location /stored/ { root %DIR%/store; dav_methods PUT DELETE; }";
    let text = configuration(driver, "sandbox on;", locations);
    let setup = Setup::configuration(&text)
        .file("root/page", "of the root")
        .file("other/page", "of the alias")
        .file("hosts/a/of/page", "of a host")
        .file("secret/page", "of a user")
        .file("store/stored/file", "old")
        .file("users", "u:{PLAIN}p\n");
    let mut server = setup.start();
    for name in ["store", "store/stored"] {
        let path = server.directory.path().join(name);
        fs::set_permissions(path, fs::Permissions::from_mode(0o777)).expect("ours");
    }
    assert_eq!(server.get("/root/page").text(), "of the root");
    assert_eq!(server.get("/alias/page").text(), "of the alias");
    assert!(server.get("/alias/").text().contains("page"));
    assert_eq!(server.get("/of/page?host=a").text(), "of a host");
    let secret = "GET /secret/page HTTP/1.1\r\nHost: x\r\nAuthorization: Basic dTpw\r\n\r\n";
    assert_eq!(server.connect().ask(secret).text(), "of a user");
    let put = "PUT /stored/file HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nnew";
    assert_eq!(server.connect().ask(put).status, 204);
    assert_eq!(server.get("/stored/file").text(), "new");
    // Another root needs another process.
    let before = server.worker();
    let elsewhere = Directory::new();
    elsewhere.write("root/page", "of another root");
    let another = format!("location /root/ {{ root {}; }}", elsewhere.path().display());
    server.reload(&text.replace("location /root/ { root %DIR%; }", &another));
    server.wait_logged("a new worker process is needed: it reads from other directories");
    server.look_until("end of the old process", || children_of(server.pid()).len() == 1);
    assert_eq!(server.get("/root/page").text(), "of another root");
    assert_ne!(server.worker(), before);
    server.stop();

    // A path without bounds is an error.
    let unbounded = configuration(driver, "sandbox on;", "location /x/ { root $arg_root; }");
    let mut server = Setup::configuration(&unbounded).launch();
    assert!(!server.wait_exited().success());
    let why = "\"sandbox on\": reading is not restricted: the path begins with a variable in \"root\"";
    assert!(server.stderr().contains(why), "{server}");
}

fn kernel_without_ports_of_landlock_is_told_by_on(driver: Driver) {
    let Some(_) = landlock() else { return };
    let server = start(driver, "env GALE_TEST_KERNEL_MAX=6.1;\nsandbox on;", "");
    server.wait_logged("connecting not restricted (before Linux 6.7)");
    assert_eq!(attempt(&server, "read", "/etc/passwd"), libc::EACCES.to_string());
    server.stop();
}

#[test]
fn version_names_the_features_of_the_kernel() {
    let output = support::binary(false).arg("-V").output().expect("the binary starts");
    let text = String::from_utf8(output.stderr).expect("text");
    let line = text.lines().find_map(|line| line.strip_prefix("sandbox: ")).expect("a row");
    assert!(line.starts_with("system calls (seccomp)"), "{line}");
    if let Some(version) = landlock() {
        assert_eq!(line, format!("system calls (seccomp), files (Landlock {version})"));
    }
}

#[test]
fn words_of_sandbox_are_checked() {
    let refused = |main: &str| {
        let mut server = Setup::configuration(&configuration(Driver::Epoll, main, "")).argument("-t").launch();
        assert!(!server.wait_exited().success(), "{server}");
        server.stderr()
    };
    assert!(refused("sandbox maybe;").contains("invalid value \"maybe\""));
    assert!(refused("sandbox off diagnose;").contains("invalid parameter \"diagnose\""));
    assert!(refused("sandbox on; master_process off;").contains("\"sandbox on\" needs \"master_process on\""));
}
