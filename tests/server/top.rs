//! `gale top`: one page of text, a terminal with keys, and the messages without a server.

use std::fs::File;
use std::io::{Read, Write};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::os::unix::process::CommandExt;
use std::process::{Child, Output, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::time::{Duration, Instant};

use rustix::process::Signal;
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{LocalModes, Winsize, tcgetattr, tcsetwinsize};

use crate::support::{
    self, Backend, DEADLINE, Directory, Driver, NOBODY, Server, Serving, Setup, is_root, with_each_driver,
};

with_each_driver!(
    page_has_the_figures_of_the_server,
    a_terminal_shows_views_and_takes_keys,
    figures_are_asked_for_at_a_url,
    readers_that_do_not_read_delay_no_others,
);

fn answering() -> Serving {
    Backend::tcp().serve(|_, client| client.try_send("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok").is_ok())
}

/// A server that has answered some requests, and its backend.
fn start(driver: Driver) -> (Server, Serving) {
    let backend = answering();
    let text = format!(
        "upstream app {{ server {}; server 127.0.0.1:1 down; }}
         server {{ listen %UNIX%; listen %TCP%; status_zone the-site;
             location / {{ proxy_pass http://app; }} location /none {{ return 404; }}
             location /api/ {{ api; }} location /dashboard/ {{ dashboard; }}
             location /private/ {{ api; deny all; }} }}",
        backend.address
    );
    let server = Setup::http(driver, &text).start();
    let mut client = server.connect();
    (0..7).for_each(|_| assert_eq!(client.get("/").status, 200));
    assert_eq!(client.get("/none").status, 404);
    (server, backend)
}

fn top(directory: &Directory, words: &[&str]) -> Output {
    let mut command = support::binary(false);
    command.arg("top").args(words).arg("-c").arg(directory.path().join("gale.conf"));
    command.stdin(Stdio::null()).output().expect("the binary starts")
}

/// Cells of the row with this beginning.
fn row<'t>(text: &'t str, beginning: &str) -> Option<Vec<&'t str>> {
    text.lines()
        .find(|line| line.starts_with(beginning))
        .map(|line| line[beginning.len()..].split_whitespace().collect())
}

/// Prints pages until `is_so` is true, since a loop may update its counters after a response has been sent.
fn page(server: &Server, words: &[&str], is_so: impl Fn(&str) -> bool) -> String {
    let end = Instant::now() + DEADLINE;
    loop {
        let output = top(&server.directory, &[&["--once", "--interval", "0.1"], words].concat());
        let text = String::from_utf8(output.stdout).expect("text");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        if is_so(&text) {
            return text;
        }
        assert!(Instant::now() < end, "{text}");
    }
}

fn page_has_the_figures_of_the_server(driver: Driver) {
    let (server, backend) = start(driver);
    let text = page(&server, &[], |text| row(text, "responses 4xx").is_some_and(|cells| cells[0] == "1"));
    assert!(text.starts_with(concat!("gale-", env!("CARGO_PKG_VERSION"), " (nginx ")), "{text}");
    assert!(text.contains(&format!("process {}, configuration ", server.worker().as_raw_pid())), "{text}");
    assert_eq!(row(&text, "responses 2xx").expect("a row")[0], "7");
    // The figures were not requested over HTTP.
    assert_eq!(row(&text, "requests").expect("a row"), ["8", "0"]);
    assert_eq!(row(&text, "upstream servers up").expect("a row")[..3], ["1", "of", "2"]);
    let zone = row(&text, "the-site").expect("the zone");
    assert_eq!((zone[0], zone[zone.len() - 2]), ("server", "8"));
    assert_eq!(row(&text, "127.0.0.1:1 ").expect("the second server")[0], "down");
    let peer = row(&text, &backend.address).expect("the first server");
    assert_eq!((peer[0], peer[1], peer[2]), ("up", "app", "0"));
    assert!(text.contains("event loops (2)") && text.contains("thread pools ("), "{text}");
    assert!(text.is_ascii() && text.lines().all(|line| !line.ends_with(' ')), "{text}");
    server.stop();
}

fn figures_are_asked_for_at_a_url(driver: Driver) {
    let (server, _backend) = start(driver);
    let base = format!("http://{}", server.directory.address(1));
    for path in ["/api", "/api/", "/api/9/", "/dashboard/"] {
        let url = format!("{base}{path}");
        let text = page(&server, &["--url", &url], |text| row(text, "responses 4xx").is_some());
        assert!(row(&text, "the-site").is_some() && row(&text, "127.0.0.1:1 ").is_some(), "{path}: {text}");
        assert!(text.contains("event loops (2)"), "{path}: {text}");
    }
    for (url, expected) in [
        (format!("{base}/private/"), format!("gale: {base}/private/figures answers with 403\n")),
        (format!("{base}/none"), format!("gale: there is no API at {base}/none\n")),
        ("https://x/api".to_owned(), "gale: \"https://x/api\" does not begin with \"http://\"\n".to_owned()),
    ] {
        let output = top(&server.directory, &["--once", "--url", &url]);
        assert_eq!(
            (output.status.code(), String::from_utf8_lossy(&output.stderr)),
            (Some(1), expected.into()),
            "{url}"
        );
    }
    server.stop();
}

/// A program on a pseudo-terminal, and its screen.
struct OnTerminal {
    child: Child,
    master: File,
    output: Receiver<Vec<u8>>,
    screen: vt100::Parser,
}

impl OnTerminal {
    fn start(directory: &Directory) -> OnTerminal {
        let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC).expect("a terminal");
        grantpt(&master).expect("ours");
        unlockpt(&master).expect("ours");
        let name = ptsname(&master, Vec::new()).expect("a name");
        let terminal = File::options().read(true).write(true).open(name.to_str().expect("text")).expect("it is there");
        let master = File::from(master);
        set_size(&master, 24, 80);
        let mut command = support::binary(false);
        command.args(["top", "--interval", "0.1", "-c"]).arg(directory.path().join("gale.conf"));
        command.env("TERM", "xterm-256color");
        let end = || Stdio::from(terminal.try_clone().expect("a descriptor"));
        command.stdin(end()).stdout(end()).stderr(end());
        // SAFETY: both calls are permitted between fork and exec; they touch no memory.
        unsafe {
            command.pre_exec(|| {
                // A session of its own with this controlling terminal, so that the program gets SIGWINCH.
                if libc::setsid() < 0 || libc::ioctl(0, libc::TIOCSCTTY, 0) < 0 {
                    return Err(std::io::Error::last_os_error());
                }
                Ok(())
            });
        }
        let child = command.spawn().expect("the binary starts");
        let (sender, output) = mpsc::channel();
        let mut reader = master.try_clone().expect("a descriptor");
        std::thread::spawn(move || {
            let mut buffer = [0; 4096];
            while let Ok(count @ 1..) = reader.read(&mut buffer) {
                if sender.send(buffer[..count].to_vec()).is_err() {
                    return;
                }
            }
        });
        OnTerminal { child, master, output, screen: vt100::Parser::new(24, 80, 0) }
    }

    fn press(&mut self, keys: &str) {
        self.master.write_all(keys.as_bytes()).expect("the terminal takes it");
    }

    fn resize(&mut self, rows: u16, columns: u16) {
        self.screen.screen_mut().set_size(rows, columns);
        set_size(&self.master, rows, columns);
    }

    /// Reads output until the screen satisfies `is_so`.
    #[track_caller]
    fn wait(&mut self, is_so: impl Fn(&str) -> bool) -> String {
        let end = Instant::now() + DEADLINE;
        loop {
            let text = self.screen.screen().contents();
            if is_so(&text) {
                return text;
            }
            let left = end.saturating_duration_since(Instant::now());
            match self.output.recv_timeout(left) {
                Ok(bytes) => self.screen.process(&bytes),
                Err(error) => panic!("{error}: {text}"),
            }
        }
    }

    /// The same, and presses an unused key now and then, since an earlier key may be processed only with the next one.
    #[track_caller]
    fn wait_nudging(&mut self, key: &str, is_so: impl Fn(&str) -> bool) {
        let end = Instant::now() + DEADLINE;
        let mut next = Instant::now() + Duration::from_secs(1);
        while !is_so(&self.screen.screen().contents()) {
            if let Ok(bytes) = self.output.recv_timeout(next.saturating_duration_since(Instant::now())) {
                self.screen.process(&bytes);
            }
            if Instant::now() >= next {
                assert!(Instant::now() < end, "{}", self.screen.screen().contents());
                self.press(key);
                next += Duration::from_secs(1);
            }
        }
    }

    /// Waits for a successful exit, and until the terminal is restored.
    #[track_caller]
    fn wait_ended(&mut self) {
        assert!(self.child.wait().expect("it is ours").success());
        while self.screen.screen().alternate_screen() || self.screen.screen().hide_cursor() {
            let bytes = self.output.recv_timeout(DEADLINE).expect("what it has said last");
            self.screen.process(&bytes);
        }
        let modes = tcgetattr(&self.master).expect("a terminal").local_modes;
        assert!(modes.contains(LocalModes::ICANON | LocalModes::ECHO), "{modes:?}");
    }
}

impl Drop for OnTerminal {
    fn drop(&mut self) {
        // Only a failed test leaves the program running. Signals to an ended one are not sent.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn set_size(terminal: &File, rows: u16, columns: u16) {
    let size = Winsize { ws_row: rows, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 };
    tcsetwinsize(terminal, size).expect("a terminal");
}

fn a_terminal_shows_views_and_takes_keys(driver: Driver) {
    let (mut server, backend) = start(driver);
    let mut on = OnTerminal::start(&server.directory);
    let text =
        on.wait(|text| row(text, "responses 4xx").is_some_and(|cells| cells[0] == "1") && text.contains("q quit"));
    assert!(text.starts_with("gale-") && text.lines().count() == 24, "{text}");
    // The figures are updated repeatedly.
    server.get("/none");
    on.wait(|text| row(text, "responses 4xx").is_some_and(|cells| cells[0] == "2"));
    on.press("3");
    let text = on.wait(|text| text.contains("127.0.0.1:1 "));
    assert!(text.contains(&backend.address) && !text.contains("responses 4xx"), "{text}");
    // Sorted by state in reverse order: up comes before down, whatever the addresses.
    on.press("\x1b[C\x1b[C");
    let place = |text: &str, part: &str| text.find(part).unwrap_or(usize::MAX);
    on.wait(|text| place(text, &backend.address) < place(text, "127.0.0.1:1 "));
    on.press("r");
    on.wait(|text| place(text, &backend.address) > place(text, "127.0.0.1:1 "));
    // Shift and Tab selects the previous view.
    on.press("\x1b[Z");
    on.wait(|text| row(text, "the-site").is_some());
    // Columns without room are left out, from the right.
    on.resize(24, 50);
    on.wait(|text| text.contains("4xx/s") && !text.contains("out/s"));
    on.resize(30, 130);
    let wide = on.wait(|text| text.contains("in/s"));
    assert!(wide.lines().last().is_some_and(|line| line.starts_with("q quit")), "{wide}");
    on.resize(3, 20);
    on.wait(|text| text.lines().count() <= 3 && !text.contains("in/s"));
    on.resize(24, 80);
    // A key pressed together with a resize is processed only with the next key: crossterm reports one of the two.
    on.wait(|text| text.lines().last().is_some_and(|line| line.starts_with("q quit")));
    on.press(" ");
    on.wait_nudging("x", |text| text.contains("paused"));
    on.press(" ");
    on.wait(|text| text.lines().last().is_some_and(|line| line.starts_with("q quit")));
    // Keys work without a server.
    server.end(Signal::QUIT);
    on.wait(|text| text.contains("the figures are outdated: "));
    on.press("q");
    on.wait_ended();
}

#[test]
fn control_and_c_ends_it() {
    let server = Server::start(Driver::Epoll, "return 200 one;");
    let mut on = OnTerminal::start(&server.directory);
    on.wait(|text| text.contains("q quit"));
    on.press("\x03");
    on.wait_ended();
    server.stop();
}

fn control_name(pid: u32) -> SocketAddr {
    SocketAddr::from_abstract_name(format!("gale/control/{pid}")).expect("a name")
}

fn readers_that_do_not_read_delay_no_others(driver: Driver) {
    // So many that their figures fit into no socket buffer.
    let servers: String = (1..2000).map(|port| format!("server 127.0.0.1:{port};")).collect();
    let server = Setup::http(driver, &format!("upstream many {{ {servers} }} server {{ listen %UNIX%; }}")).start();
    let address = control_name(server.pid_in_file().as_raw_pid().cast_unsigned());
    let ask = || {
        let mut stream = UnixStream::connect_addr(&address).expect("it listens");
        stream.write_all(b"status\n").expect("sent");
        stream
    };
    let begins = |stream: &mut UnixStream| {
        let mut line = [0; 5];
        stream.read_exact(&mut line).expect("an answer");
        String::from_utf8_lossy(&line).into_owned()
    };
    let mut silent: Vec<UnixStream> = (0..4).map(|_| ask()).collect();
    silent.iter_mut().for_each(|stream| assert_eq!(begins(stream), "done\n"));
    let output = top(&server.directory, &["--once"]);
    let number = server.pid_in_file().as_raw_pid();
    let expected = format!("gale: process {number} sent no figures: too many requests at a time\n");
    assert_eq!((String::from_utf8_lossy(&output.stderr), output.status.code()), (expected.into(), Some(1)));
    // Neither the master nor the loops wait for these readers.
    let reload = support::binary(false).args(["reload", "-c"]).arg(server.directory.path().join("gale.conf")).output();
    assert!(reload.expect("the binary starts").status.success());
    assert_eq!(server.get("/").status, 404);
    // A reader that continues gets all of it, and makes room for another.
    let mut stream = silent.pop().expect("four");
    let mut text = String::new();
    stream.read_to_string(&mut text).expect("text");
    assert!(text.starts_with('{') && text.ends_with('}') && text.contains("127.0.0.1:1999"), "{} bytes", text.len());
    drop(silent);
    let end = Instant::now() + DEADLINE;
    while !top(&server.directory, &["--once", "--interval", "0.1"]).status.success() {
        assert!(Instant::now() < end);
    }
    server.stop();
}

/// Plays the master: sends one answer to each request, until there are none left.
fn pretend(answers: Vec<&'static [u8]>) -> (Directory, std::thread::JoinHandle<()>) {
    let listener = UnixListener::bind_addr(&control_name(std::process::id())).expect("nobody else has our number");
    let directory = Directory::new();
    let text = "pid %DIR%/pid; events { } http { }";
    directory.write("gale.conf", directory.replaced(text));
    directory.write("pid", format!("{}\n", std::process::id()));
    let answer = move || {
        for answer in answers {
            let (mut stream, _) = listener.accept().expect("somebody asks");
            let mut order = [0; 7];
            stream.read_exact(&mut order).expect("an order");
            assert_eq!(&order, b"status\n");
            // The reader may close before the end.
            let _ = stream.write_all(answer);
        }
    };
    (directory, std::thread::spawn(answer))
}

#[test]
fn answers_that_are_none_are_errors() {
    let answers: Vec<(&'static [u8], &str)> = vec![
        (b"", "did not answer: it is exiting, or access is denied"),
        (b"what?", "did not answer: it is exiting, or access is denied"),
        (b"done\n", "sent an empty answer"),
        (b"done\n<html>", "the answer contains no figures: expected value"),
        (b"done\n{\"nginx\":{\"pid\":1}", "the answer contains no figures: EOF"),
        (b"done\n{}", "the answer contains no figures: the version is missing"),
        (b"done\n\xff\xfe", "the answer contains no figures: expected value"),
        (b"refused\nnobody is in\n", "sent no figures: nobody is in"),
        (b"refused\n\x1b[2Jgone\n", "sent no figures: ?[2Jgone"),
    ];
    let (directory, pretending) = pretend(answers.iter().map(|(answer, _)| *answer).collect());
    for (answer, expected) in &answers {
        let output = top(&directory, &["--once", "--interval", "0.1"]);
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.code() == Some(1) && text.starts_with("gale: ") && text.contains(expected), "{text}");
        assert!(output.stdout.is_empty(), "{}", String::from_utf8_lossy(answer));
    }
    pretending.join().expect("it did as it should");
}

#[test]
fn missing_server_or_permission_is_named() {
    let server = Server::start(Driver::Epoll, "return 200 one;");
    let nowhere = Directory::new();
    nowhere.write("gale.conf", nowhere.replaced("pid %DIR%/pid; events { } http { }"));
    let output = top(&nowhere, &[]);
    let path = format!("{}/pid", nowhere.path().display());
    let expected = format!("gale: open() \"{path}\" failed (2: No such file or directory)\n");
    assert_eq!((String::from_utf8_lossy(&output.stderr), output.status.code()), (expected.into(), Some(1)));
    nowhere.write("gale.conf", "nonsense;");
    let output = top(&nowhere, &[]);
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.code() == Some(1) && text.contains("unknown directive \"nonsense\""), "{text}");
    if is_root() {
        let mut command = support::binary(false);
        command.args(["top", "--once", "-c"]).arg(server.directory.path().join("gale.conf")).uid(NOBODY).gid(NOBODY);
        let output = command.output().expect("the binary starts");
        let number = server.pid_in_file().as_raw_pid();
        let expected = format!("gale: process {number} did not answer: it is exiting, or access is denied\n");
        assert_eq!((String::from_utf8_lossy(&output.stderr), output.status.code()), (expected.into(), Some(1)));
    }
    server.stop();
}
