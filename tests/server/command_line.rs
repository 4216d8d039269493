//! The command line of the real binary, and valid configurations from the first line to the first answer.

use std::os::unix::process::CommandExt;
use std::process::Stdio;
use std::sync::Arc;

use rustix::process::Signal;

use crate::support::authority::Authority;
use crate::support::tls::{AnyCertificate, Tls};
use crate::support::{self, Directory, Driver, Server, Setup};

const GOOD: &str = "pid %DIR%/pid;\nerror_log %DIR%/error.log;\nevents {}\n";

/// Output of a command, with `%DIR%` in place of the directory's name, and `true` if it succeeded.
#[derive(Debug, PartialEq, Eq)]
struct Outcome {
    success: bool,
    stdout: String,
    stderr: String,
}

/// Runs the binary under this name in the directory.
fn run_as(name: &str, directory: &Directory, words: &[&str]) -> Outcome {
    let path = directory.path().to_str().expect("text");
    let mut command = support::binary(false);
    command.arg0(name).args(words.iter().map(|word| directory.replaced(word))).current_dir(path).stdin(Stdio::null());
    let output = command.output().expect("the binary starts");
    let text = |bytes| String::from_utf8(bytes).expect("text").replace(path, "%DIR%");
    Outcome { success: output.status.success(), stdout: text(output.stdout), stderr: text(output.stderr) }
}

fn run(directory: &Directory, words: &[&str]) -> Outcome {
    run_as("gale", directory, words)
}

/// Makes a directory with this configuration.
fn directory_with(configuration: &str) -> Directory {
    let directory = Directory::new();
    directory.write("gale.conf", directory.replaced(configuration));
    directory
}

fn failure(stderr: &str) -> Outcome {
    Outcome { success: false, stdout: String::new(), stderr: stderr.to_owned() }
}

#[test]
fn a_good_configuration_is_told_so_on_standard_error() {
    let directory = directory_with(GOOD);
    let expected = "gale: the configuration file %DIR%/gale.conf syntax is ok\n\
                    gale: configuration file %DIR%/gale.conf test is successful\n";
    let outcome = run(&directory, &["-t", "-c", "%DIR%/gale.conf"]);
    assert_eq!(outcome, Outcome { success: true, stdout: String::new(), stderr: expected.to_owned() });
}

#[test]
fn quiet_tests_print_only_errors() {
    let directory = directory_with(GOOD);
    let outcome = run(&directory, &["-tq", "-c", "%DIR%/gale.conf"]);
    assert_eq!(outcome, Outcome { success: true, stdout: String::new(), stderr: String::new() });
    directory.write("gale.conf", "events {}\nbogus;\n");
    let outcome = run(&directory, &["-q", "-t", "-c", "%DIR%/gale.conf"]);
    assert!(!outcome.success);
    assert!(outcome.stderr.starts_with("gale: [emerg] unknown directive \"bogus\" in %DIR%/gale.conf:2\n"));
}

#[test]
fn capital_t_prints_every_file_that_was_read() {
    let directory = directory_with("include part.conf;\npid %DIR%/pid;\nerror_log stderr;\nevents {}\n");
    directory.write("part.conf", "worker_processes 1;\n");
    let outcome = run(&directory, &["-T", "-c", "%DIR%/gale.conf"]);
    assert!(outcome.success && outcome.stderr.contains("test is successful"));
    let expected = "# configuration file %DIR%/gale.conf:\n\
                    include part.conf;\npid %DIR%/pid;\nerror_log stderr;\nevents {}\n\n\
                    # configuration file %DIR%/part.conf:\nworker_processes 1;\n\n";
    assert_eq!(outcome.stdout, expected);
}

#[test]
fn a_missing_configuration_file_is_named() {
    let directory = Directory::new();
    let outcome = run(&directory, &["-c", "%DIR%/none.conf"]);
    assert_eq!(outcome, failure("gale: [emerg] open() \"%DIR%/none.conf\" failed (2: No such file or directory)\n"));
}

#[test]
fn why_a_start_failed_is_in_the_error_log_too() {
    let directory = directory_with("events {}\nbogus;\n");
    let start = || run(&directory, &["-c", "%DIR%/gale.conf", "-p", "%DIR%", "-e", "start.log"]);
    assert!(!start().success);
    let line = "unknown directive \"bogus\" in ";
    assert!(directory.read("start.log").contains(line));
    // The valid part of the configuration names an error log of its own.
    directory.write("gale.conf", directory.replaced("pid none/pid;\nerror_log %DIR%/own.log;\nevents {}\n"));
    assert!(!start().success);
    assert!(directory.read("own.log").contains("none/pid\" failed (2: No such file or directory)"));
    assert_eq!(directory.read("start.log").lines().count(), 1);
    // `-t` writes no lines to logs, and a log that cannot be opened changes nothing.
    directory.write("gale.conf", "events {}\nbogus;\n");
    assert!(!run(&directory, &["-t", "-c", "%DIR%/gale.conf", "-p", "%DIR%", "-e", "test.log"]).success);
    assert_eq!(directory.try_read("test.log"), None);
    let outcome = run(&directory, &["-c", "%DIR%/gale.conf", "-p", "%DIR%", "-e", "none/start.log"]);
    assert!(outcome.stderr.starts_with("gale: [emerg] unknown directive"), "{}", outcome.stderr);
}

#[test]
fn directives_on_the_command_line_come_before_the_file() {
    let directory = directory_with(GOOD);
    let test = |text: &str| run(&directory, &["-t", "-c", "%DIR%/gale.conf", "-g", text]);
    assert!(test("worker_processes 2; daemon off;").success);
    let first_line = |text: &str| test(text).stderr.lines().next().unwrap_or_default().to_owned();
    assert_eq!(first_line("pid x;"), "gale: [emerg] \"pid\" directive is duplicate in %DIR%/gale.conf:1");
    assert_eq!(first_line("bogus 1;"), "gale: [emerg] unknown directive \"bogus\" in command line");
    let unfinished = "gale: [emerg] unexpected end of parameter, expecting \";\" in command line";
    assert_eq!(first_line("worker_processes 2"), unfinished);
    assert_eq!(first_line("worker_processes '2;"), unfinished);
    let block = "gale: [emerg] block directives are not supported in -g option in command line";
    assert_eq!(first_line("http {}"), block);
}

#[test]
fn relative_names_begin_at_the_prefix() {
    let directory = directory_with("pid run/pid;\nerror_log run/error.log;\nevents {}\n");
    directory.write("run/keep", "");
    assert!(run(&directory, &["-t", "-p", "%DIR%", "-c", "gale.conf"]).success);
    assert!(directory.path().join("run/error.log").exists());
    // The prefix itself may be relative to the current directory.
    assert!(run(&directory, &["-t", "-p", ".", "-c", "gale.conf"]).success);
}

#[test]
fn the_first_error_log_is_the_one_of_the_command_line() {
    let directory = directory_with("pid %DIR%/pid;\nevents {}\n");
    assert!(run(&directory, &["-t", "-c", "%DIR%/gale.conf", "-e", "%DIR%/first.log"]).success);
    assert!(directory.path().join("first.log").exists());
    assert!(run(&directory, &["-t", "-c", "%DIR%/gale.conf", "-e", "stderr"]).success);
    let outcome = run(&directory, &["-t", "-c", "%DIR%/gale.conf", "-e", "%DIR%/missing/first.log"]);
    assert!(!outcome.success);
    let message = "gale: [emerg] open() \"%DIR%/missing/first.log\" failed (2: No such file or directory)";
    assert!(outcome.stderr.contains(message), "{}", outcome.stderr);
}

#[test]
fn wrong_options_end_with_one_line() {
    let directory = Directory::new();
    let cases: [(&[&str], &str); 12] = [
        (&["-x"], "gale: invalid option: \"x\"\n"),
        (&["-tx"], "gale: invalid option: \"x\"\n"),
        (&["x"], "gale: invalid option: \"x\"\n"),
        (&["-c"], "gale: option \"-c\" requires file name\n"),
        (&["-p"], "gale: option \"-p\" requires directory name\n"),
        (&["-e"], "gale: option \"-e\" requires file name\n"),
        (&["-g"], "gale: option \"-g\" requires parameter\n"),
        (&["-s"], "gale: option \"-s\" requires parameter\n"),
        (&["-s", "kill"], "gale: invalid option: \"-s kill\"\n"),
        (&["serve"], "gale: \"serve\" requires a directory: gale serve DIR\n"),
        (&["serve", "--port", "80"], "gale: invalid option: \"--port\"\n"),
        (&["directives", "--all"], "gale: invalid option: \"--all\"\n"),
    ];
    for (words, message) in cases {
        assert_eq!(run(&directory, words), failure(message), "{words:?}");
    }
}

#[test]
fn help_names_every_option() {
    let directory = Directory::new();
    let outcome = run(&directory, &["-h"]);
    assert!(outcome.success && outcome.stderr.is_empty());
    for option in ["-?,-h", "-v", "-V", "-t", "-T", "-q", "-s signal", "-p prefix", "-e filename", "-c filename", "-g"]
    {
        assert!(outcome.stdout.contains(&format!("\n  {option}")), "{option}: {}", outcome.stdout);
    }
    assert!(outcome.stdout.contains("gale serve DIR"));
    assert!(!run_as("nginx", &directory, &["-h"]).stdout.contains("serve"));
    assert_eq!(run(&directory, &["-?"]), outcome);
    assert_eq!(run(&directory, &["--help"]), outcome);
    assert_eq!(run(&directory, &["-t", "--help"]), outcome);
}

#[test]
fn every_command_explains_its_own_options() {
    let directory = Directory::new();
    let serve = run(&directory, &["serve", "--help"]);
    assert!(serve.success && serve.stderr.is_empty(), "{serve:?}");
    assert!(serve.stdout.starts_with("Usage: gale serve DIR"), "{}", serve.stdout);
    assert!(serve.stdout.contains("\n  --tls "));
    assert!(serve.stdout.contains("\n  --listen ADDRESS ") && serve.stdout.contains("\n  --print-config "));
    let directives = run(&directory, &["directives", "--help"]);
    assert!(directives.success && directives.stderr.is_empty(), "{directives:?}");
    assert!(directives.stdout.contains("\n  --missing "), "{}", directives.stdout);
    for help in ["-h", "-?", "--help"] {
        assert_eq!(run(&directory, &["serve", help]), serve);
        assert_eq!(run(&directory, &["serve", "%DIR%/none", "--listen", "x", help]), serve, "whatever else is wrong");
        assert_eq!(run(&directory, &["directives", help]), directives);
        assert_eq!(run(&directory, &["directives", "--missing", help]), directives);
    }
}

#[test]
fn health_of_a_server_is_the_exit_status() {
    let directory = Directory::new();
    let help = run(&directory, &["health", "--help"]);
    assert!(help.success && help.stdout.starts_with("Usage: gale health "), "{help:?}");

    let server = Setup::http(
        Driver::Epoll,
        "server { listen %UNIX%; listen %TCP%; location / { return 302 /x; } location /no { return 503; } }",
    )
    .start();
    let healthy = |target: &str| run(&server.directory, &["health", target]);
    for target in ["%TCP%", "%TCP%/up", "%UNIX%", "%UNIX%:/up"] {
        let outcome = healthy(target);
        assert!(outcome.success && outcome.stdout.is_empty() && outcome.stderr.is_empty(), "{target}: {outcome:?}");
    }
    for target in ["%TCP%/no", "%UNIX%:/no"] {
        let outcome = healthy(target);
        assert_eq!(
            outcome,
            failure("gale: not healthy: \"HTTP/1.1 503 Service Temporarily Unavailable\"\n"),
            "{target}"
        );
    }
    assert_eq!(healthy("%TCP2%"), failure("gale: not healthy: Connection refused (os error 111)\n"));
    server.stop();
}

#[test]
fn the_version_goes_to_standard_error() {
    let directory = Directory::new();
    let version = format!("gale version: gale/{}\n", env!("CARGO_PKG_VERSION"));
    assert_eq!(run(&directory, &["-v"]), Outcome { success: true, stdout: String::new(), stderr: version.clone() });
    let long = run(&directory, &["-V"]);
    assert!(long.stderr.starts_with(&version) && long.stderr.contains("\nconfigure arguments: "), "{}", long.stderr);
}

#[test]
fn under_nginx_s_name_the_version_has_nginx_s_form() {
    let directory = Directory::new();
    let short = run_as("/usr/sbin/nginx", &directory, &["-v"]).stderr;
    assert!(short.starts_with("nginx version: nginx/1.31.5"), "{short}");
    let long = run_as("nginx", &directory, &["-V"]).stderr;
    let arguments = long.lines().find_map(|line| line.strip_prefix("configure arguments: ")).expect("arguments");
    assert!(arguments.contains("--conf-path=/etc/nginx/nginx.conf"), "{arguments}");
    assert!(arguments.split(' ').all(|word| word.starts_with("--")), "{arguments}");
    // Messages begin with the program's name.
    assert_eq!(run_as("nginx", &directory, &["-x"]).stderr, "nginx: invalid option: \"x\"\n");
    let outcome = run_as("nginx", &directory_with(GOOD), &["-t", "-c", "%DIR%/gale.conf"]);
    assert!(outcome.success && outcome.stderr.starts_with("nginx: the configuration file "), "{}", outcome.stderr);
}

#[test]
fn a_test_leaves_a_running_server_alone() {
    let server = Server::start(Driver::Epoll, "return 200 hello;");
    let outcome = run(&server.directory, &["-t", "-c", "%DIR%/gale.conf"]);
    assert!(outcome.success, "{}", outcome.stderr);
    assert_eq!(server.get("/").text(), "hello");
    assert_eq!(server.pid_in_file(), server.pid());
    server.stop();
}

#[test]
fn signals_are_sent_by_name() {
    let mut server = Server::start(Driver::Epoll, "return 200 hello;");
    let send = |server: &Server, name: &str| {
        let outcome = run(&server.directory, &["-s", name, "-c", "%DIR%/gale.conf"]);
        assert_eq!((outcome.success, &*outcome.stderr), (true, ""), "{name}");
    };
    std::fs::rename(server.directory.path().join("error.log"), server.directory.path().join("old.log")).expect("ours");
    send(&server, "reopen");
    server.directory.wait_until("new error.log", |directory| directory.path().join("error.log").exists());
    send(&server, "reload");
    server.wait_notified("RELOADING=1");
    server.wait_notified("READY=1");
    assert_eq!(server.get("/").text(), "hello");
    send(&server, "quit");
    assert!(server.wait_exited().success());
    server.wait_logged("(SIGQUIT) received");
    server.assert_nothing_left();

    let mut server = Server::start(Driver::Epoll, "return 200 hello;");
    send(&server, "stop");
    assert!(server.wait_exited().success());
    server.wait_logged("(SIGTERM) received");
    server.assert_nothing_left();
}

#[test]
fn signals_without_a_process_give_nginx_s_errors() {
    let directory = directory_with(GOOD);
    let send = || run(&directory, &["-s", "stop", "-c", "%DIR%/gale.conf"]);
    assert_eq!(send(), failure("gale: [error] open() \"%DIR%/pid\" failed (2: No such file or directory)\n"));
    assert!(!directory.path().join("error.log").exists(), "nothing is made on the way");
    directory.write("pid", "");
    assert_eq!(send(), failure("gale: [error] invalid PID number \"\" in \"%DIR%/pid\"\n"));
    directory.write("pid", "12x\n");
    assert_eq!(send(), failure("gale: [error] invalid PID number \"12x\" in \"%DIR%/pid\"\n"));
    // Higher than any process number.
    directory.write("pid", "99999999\n");
    assert_eq!(send(), failure("gale: [alert] kill(99999999, 15) failed (3: No such process)\n"));
    // A broken configuration does not say where the pid file is.
    directory.write("gale.conf", "bogus;");
    assert!(send().stderr.starts_with("gale: [emerg] unknown directive \"bogus\""));
}

#[test]
fn serve_serves_a_directory_until_it_is_interrupted() {
    let directory = Directory::new();
    directory.write("site/index.html", "<p>hello</p>");
    // The user who starts the command may read the directory; if that is root, the worker runs as root, too.
    rustix::fs::chmod(directory.path().join("site"), 0o700.into()).expect("ours");
    let address = directory.address(1);
    let mut child = support::binary(false)
        .args(["serve", &directory.replaced("%DIR%/site"), "--listen", &address.to_string()])
        .current_dir(directory.path())
        .stderr(directory.create("stderr"))
        .spawn()
        .expect("the binary starts");
    let line = directory.wait_line("stderr", "serving ");
    assert!(line.contains(&format!("http://{address}/")), "{line}");
    let response = support::Client::tcp(address).get("/");
    assert_eq!((response.status, response.text()), (200, "<p>hello</p>"));
    assert_eq!(response.header("Content-Type"), Some("text/html"));
    rustix::process::kill_process(rustix::process::Pid::from_child(&child), Signal::INT).expect("it runs");
    assert!(child.wait().expect("it ends").success(), "{}", directory.read("stderr"));
    let entries: Vec<_> = std::fs::read_dir(directory.path().join("site")).expect("there").flatten().collect();
    assert_eq!(entries.len(), 1, "nothing else is left in the directory: {entries:?}");
}

#[test]
fn serve_speaks_tls_with_a_certificate_made_on_the_spot() {
    let directory = Directory::new();
    directory.write("site/index.html", "<p>hello</p>");
    let address = directory.address(1);
    let mut child = support::binary(false)
        .args(["serve", &directory.replaced("%DIR%/site"), "--tls", "--listen", &address.to_string()])
        .current_dir(directory.path())
        .stderr(directory.create("stderr"))
        .spawn()
        .expect("the binary starts");
    let line = directory.wait_line("stderr", "serving ");
    assert!(line.contains(&format!("https://{address}/")), "{line}");
    // The certificate is issued by no authority that clients trust.
    let (authority, shown) = (Authority::new("nobody"), Arc::new(AnyCertificate::default()));
    let connect = |tls: Tls| tls.connect_tcp(address, "localhost");
    let refused = connect(Tls::new(&authority)).err().unwrap().to_string();
    assert!(refused.contains("UnknownIssuer") || refused.contains("CaUsedAsEndEntity"), "{refused}");
    let session = connect(Tls::new(&authority).verified_by(shown)).expect("any certificate will do");
    let mut client = support::Client::above(session);
    let response = client.get("/");
    assert_eq!((response.status, response.text()), (200, "<p>hello</p>"));
    // Plain HTTP is refused on the port of HTTPS.
    assert_eq!(support::Client::tcp(address).get("/").status, 400);
    rustix::process::kill_process(rustix::process::Pid::from_child(&child), Signal::INT).expect("it runs");
    assert!(child.wait().expect("it ends").success(), "{}", directory.read("stderr"));
    let entries: Vec<_> = std::fs::read_dir(directory.path().join("site")).expect("there").flatten().collect();
    assert_eq!(entries.len(), 1, "no key is left in the directory: {entries:?}");
}

#[test]
fn serve_shows_the_dashboard_if_asked_to() {
    let directory = Directory::new();
    directory.write("site/index.html", "hello");
    let address = directory.address(1);
    let mut child = support::binary(false)
        .args(["serve", &directory.replaced("%DIR%/site"), "--dashboard", "--listen", &address.to_string()])
        .current_dir(directory.path())
        .stderr(directory.create("stderr"))
        .spawn()
        .expect("the binary starts");
    let line = directory.wait_line("stderr", "the dashboard is at ");
    assert!(line.contains(&format!("http://{address}/dashboard/, only for this machine")), "{line}");
    let mut client = support::Client::tcp(address);
    assert_eq!(client.get("/").text(), "hello");
    assert!(client.get("/dashboard/").text().contains("<title>Gale</title>"));
    let elsewhere = client.ask("GET /dashboard/figures HTTP/1.1\r\nHost: elsewhere.example\r\n\r\n");
    assert_eq!(elsewhere.status, 403);
    let figures = client.get("/dashboard/figures");
    assert!(figures.text().contains("\"http/server_zones\":{\"site\":{"), "{figures:?}");
    assert!(figures.text().ends_with("\"write\":false}"));
    rustix::process::kill_process(rustix::process::Pid::from_child(&child), Signal::INT).expect("it runs");
    assert!(child.wait().expect("it ends").success(), "{}", directory.read("stderr"));
    let printed = run(&directory, &["serve", "%DIR%/site", "--dashboard", "--listen", "%TCP%", "--print-config"]);
    assert!(
        printed.stdout.contains("allow ::1;\n            allow unix:;\n            deny all;"),
        "{}",
        printed.stdout
    );
}

#[test]
fn serve_refuses_a_path_that_is_no_directory() {
    let directory = Directory::new();
    let expected = "gale: [emerg] \"%DIR%/none\" is not a directory\n";
    assert_eq!(run(&directory, &["serve", "%DIR%/none"]), failure(expected));
    assert_eq!(run(&directory, &["serve", "none"]), failure(expected));
}

#[test]
fn the_configuration_behind_serve_is_one_that_can_be_used() {
    let directory = Directory::new();
    directory.write("a site/index.html", "hello");
    let printed = run(&directory, &["serve", "%DIR%/a site", "--listen", "%TCP%", "--print-config"]);
    assert!(printed.success && printed.stderr.is_empty());
    assert!(printed.stdout.contains("listen 127.") && printed.stdout.contains("root \"%DIR%/a site\";"));
    // The tests' pid file is replaced by one in the directory, where it is removed.
    let own_pid = |line: &str| if line.starts_with("pid ") { "pid %DIR%/pid;".to_owned() } else { line.to_owned() };
    let text: Vec<String> = printed.stdout.lines().map(own_pid).collect();
    directory.write("gale.conf", directory.replaced(&text.join("\n")));
    let outcome = run(&directory, &["-t", "-c", "%DIR%/gale.conf"]);
    assert!(outcome.success, "{}", outcome.stderr);
}

#[test]
fn the_reference_describes_every_directive() {
    let directory = Directory::new();
    let outcome = run(&directory, &["directives"]);
    assert!(outcome.success && outcome.stderr.is_empty());
    assert!(outcome.stdout.contains("\nlisten\n    "), "{}", outcome.stdout);
    assert!(outcome.stdout.contains("\ninclude\n    "), "of the parser: no module has it");
    let pool = "    default: thread_pool default threads=32 max_queue=65536;\n";
    assert!(outcome.stdout.contains(pool), "shown, though a function of its own stores it");
    let names: Vec<&str> =
        outcome.stdout.lines().filter(|line| !line.starts_with([' ', '#']) && !line.is_empty()).collect();
    let contexts = outcome.stdout.lines().filter(|line| line.starts_with("    context: ")).count();
    assert!(names.len() > 80, "{}", names.len());
    assert_eq!(names.len(), contexts);
}

#[test]
fn the_list_of_missing_directives_names_none_that_is_there() {
    let directory = Directory::new();
    let missing = run(&directory, &["directives", "--missing"]);
    assert!(missing.success);
    let words: Vec<&str> = missing.stdout.split([' ', '\n']).collect();
    assert!(words.contains(&"image_filter"), "{}", missing.stdout);
    assert!(!words.contains(&"listen"), "{}", missing.stdout);
    assert!(missing.stdout.contains(" are not\n"));
}

#[test]
fn a_reader_that_leaves_early_is_no_failure() {
    let mut child = support::binary(false).arg("directives").stdout(Stdio::piped()).spawn().expect("the binary starts");
    drop(child.stdout.take());
    assert!(child.wait().expect("it ends").success());
}

/// One of `configs/` with the test's addresses and paths. Settings that the command line offers are given there.
fn own_configuration(name: &str, replacements: &[(&str, &str)]) -> Setup {
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/configs").join(name);
    let mut text = std::fs::read_to_string(path).expect("there");
    for (from, to) in replacements {
        assert!(text.contains(from), "{name} has {from}");
        text = text.replace(from, to);
    }
    Setup::configuration(&text)
}

fn with_own_files(setup: Setup) -> Setup {
    setup
        .argument("-p")
        .argument("%DIR%")
        .argument("-g")
        .argument("daemon off; pid %DIR%/pid; error_log %DIR%/error.log;")
}

#[test]
fn the_media_server_runs() {
    let own = "http {\n    client_body_temp_path %DIR%/body;";
    let setup = own_configuration(
        "media-server.conf",
        &[("listen 8000", "listen %TCP%"), ("/storage", "%DIR%/storage"), ("http {", own)],
    );
    let types = include_str!("../configs/mime.types");
    let setup = setup.file("mime.types", types).file("storage/film.mp4", vec![7; 3_000_000]);
    let server = with_own_files(setup).start();
    let response = server.connect_tcp(1).get("/film.mp4");
    assert_eq!((response.status, response.header("Content-Type")), (200, Some("video/mp4")));
    assert!(response.body.len() == 3_000_000 && response.body.iter().all(|&byte| byte == 7));
    server.stop();
}

#[test]
fn the_two_pools_run() {
    let own = "http {\n    client_body_temp_path %DIR%/body;\n    access_log %DIR%/access.log;";
    let replacements = [("listen 8001", "listen %TCP%"), ("/storage", "%DIR%/storage"), ("http {", own)];
    let setup = own_configuration("pools.conf", &replacements);
    let setup = setup.file("storage/one/a.bin", "one").file("storage/two/a.bin", "two");
    let server = with_own_files(setup).start();
    let mut client = server.connect_tcp(1);
    assert_eq!(client.get("/one/a.bin").text(), "one");
    assert_eq!(client.get("/two/a.bin").text(), "two");
    server.directory.wait_line("access.log", "GET /two/a.bin HTTP/1.1\" 200 3");
    server.stop();
}

#[test]
fn a_bare_200_runs_and_the_driver_is_told_of() {
    let own = "http {\n    client_body_temp_path %DIR%/body;";
    let setup = own_configuration("return200.conf", &[("listen 8005", "listen %TCP%"), ("http {", own)]);
    let server = with_own_files(setup).start();
    let response = server.connect_tcp(1).get("/");
    assert_eq!((response.status, response.header("Content-Length")), (200, Some("0")));
    server.stop();
}

#[test]
fn a_socket_for_each_worker_runs() {
    let own = "http {\n    client_body_temp_path %DIR%/body;";
    let setup = own_configuration("reuseport.conf", &[("listen 8003", "listen %TCP%"), ("http {", own)]);
    let server = with_own_files(setup).start();
    // The kernel distributes connections over the sockets by their ports: all four get some.
    for _ in 0..40 {
        assert_eq!(server.connect_tcp(1).get("/").text(), "OK");
    }
    server.stop();
}

#[test]
fn debian_s_default_configuration_runs_under_nginx_s_name() {
    let read = |name: &str| {
        let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/configs/debian");
        std::fs::read_to_string(folder.join(name)).expect("there")
    };
    // Paths below / become paths below the test's directory, and the user need not be root.
    let own = |text: String| {
        text.replace("user www-data;", "")
            .replace(" /etc/", " %DIR%/etc/")
            .replace(" /run/", " %DIR%/")
            .replace(" /var/log/nginx/", " %DIR%/")
            .replace(" /var/www/", " %DIR%/www/")
            .replace("listen 80 ", "listen %TCP% ")
            .replace("\tlisten [::]:80 default_server;\n", "")
            .replace("http {", "http {\n\tclient_body_temp_path %DIR%/body;")
    };
    let setup = Setup::configuration(&own(read("nginx.conf")))
        .program("nginx")
        .file("etc/nginx/mime.types", include_str!("../configs/mime.types"))
        .template("etc/nginx/sites-enabled/default", &own(read("sites-available/default")))
        .file("www/html/index.nginx-debian.html", "<h1>Welcome</h1>")
        .file("www/html/sub/page.html", "page")
        .argument("-g")
        .argument("daemon off;");
    let server = setup.start();
    let mut client = server.connect_tcp(1);
    assert_eq!(client.get("/").text(), "<h1>Welcome</h1>");
    assert_eq!(client.get("/sub/page.html").text(), "page");
    assert_eq!(client.get("/none").status, 404);
    assert_eq!(client.get("/sub").status, 301);
    let warned = server.stderr();
    assert!(warned.contains("nginx: [warn] \"types_hash_max_size\" directive is accepted"), "{warned}");
    for version in ["TLSv1", "TLSv1.1"] {
        assert!(warned.contains(&format!("nginx: [warn] {version} is not supported")), "{warned}");
    }
    server.stop();
}

/// Commands named in the program's help.
fn commands(directory: &Directory) -> Vec<String> {
    let help = run(directory, &["--help"]).stdout;
    let list = help.lines().find_map(|line| line.trim().strip_prefix("gale ")?.strip_suffix(" --help"));
    let commands: Vec<String> = list.expect("a list").split('|').map(str::to_owned).collect();
    assert!(commands.len() > 5, "{help}");
    commands
}

/// Options explained in the help of a command or of the program; without hyphens, and without those for help.
fn options(directory: &Directory, command: Option<&str>) -> Vec<String> {
    let words: Vec<&str> = command.into_iter().chain(["--help"]).collect();
    let help = run(directory, &words).stdout;
    let options = help.lines().filter_map(|line| line.trim_start().strip_prefix('-'));
    let names = options.filter_map(|line| line.split([' ', ',']).next());
    let names = names.map(|name| name.trim_start_matches('-').to_owned()).filter(|name| name != "?");
    let names: Vec<String> = names.collect();
    assert!(help.contains("-?,-h") && (!names.is_empty() || command == Some("health")), "{help}");
    names
}

fn packaging(name: &str) -> String {
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../packaging");
    std::fs::read_to_string(folder.join(name)).expect("it is there")
}

#[test]
fn completion_knows_every_command_and_option() {
    let directory = Directory::new();
    let shells = ["gale.bash", "_gale", "gale.fish"].map(|name| packaging(&format!("completions/{name}")));
    let commands = commands(&directory);
    for command in [None].into_iter().chain(commands.iter().map(|command| Some(&**command))) {
        let names = options(&directory, command).into_iter().chain(command.map(|_| "help".to_owned()));
        for (name, shell) in names.flat_map(|name| shells.iter().map(move |shell| (name.clone(), shell))) {
            let spellings = [format!("-{name}"), format!(" -s {name} "), format!(" -l {name} ")];
            assert!(spellings.iter().any(|spelling| shell.contains(spelling)), "{name} is missing in\n{shell}");
        }
        assert!(shells.iter().all(|shell| command.is_none_or(|command| shell.contains(command))), "{command:?}");
    }
}

#[test]
fn manual_page_has_the_commands_and_options_of_the_program() {
    let directory = Directory::new();
    let page = packaging("gale.8");
    let synopsis = page.split(".Sh ").find_map(|section| section.strip_prefix("SYNOPSIS\n")).expect("a synopsis");
    // Each form of the command line in turn.
    let forms: Vec<&str> = synopsis.split(".Nm\n").skip(1).collect();
    let command_of = |form: &str| form.lines().find_map(|line| line.strip_prefix(".Cm ")).map(str::to_owned);
    let mut named: Vec<String> = forms.iter().filter_map(|form| command_of(form)).collect();
    let mut commands = commands(&directory);
    named.sort();
    commands.sort();
    assert_eq!(named, commands, "the commands of gale(8) and of --help");
    for command in [None].into_iter().chain(commands.iter().map(|command| Some(&**command))) {
        let own = forms.iter().filter(|form| command_of(form).as_deref() == command);
        let mut told: Vec<String> = own.flat_map(|form| flags(form)).filter(|name| name != "h").collect();
        let mut options = options(&directory, command);
        told.sort();
        options.sort();
        assert_eq!(told, options, "the options of {command:?} in gale(8) and in --help");
        let is_described = |name: &&String| command.is_some() || page.contains(&format!("\n.It Fl {name}"));
        assert_eq!(options.iter().find(|name| !is_described(name)), None);
        assert!(command.is_none_or(|command| page.contains(&format!("\n.It Cm {command}"))), "{command:?}");
    }
}

/// Options after `Fl` in mdoc: `.Op Fl tTq`, `.Op Fl c Ar file`, `.Fl h | v | V`, `.Op Fl -missing | Fl -man`.
fn flags(form: &str) -> Vec<String> {
    let mut flags = Vec::new();
    for line in form.lines().filter(|line| line.contains("Fl ")) {
        let words = line.split("Fl ").skip(1).flat_map(|rest| rest.split(" Ar ").next().unwrap_or("").split(" | "));
        for word in words.map(str::trim).filter(|word| !word.is_empty()) {
            match word.strip_prefix('-') {
                Some(long) => flags.push(long.to_owned()),
                None => flags.extend(word.chars().map(String::from)),
            }
        }
    }
    flags
}
