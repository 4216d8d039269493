//! servers: the programs compared, their configurations, and starting and stopping them.
//!
//! Every server runs without an access log, in its own folder, and serves the same three paths: `/return` with two
//! bytes, `/file` with a file of 1 KiB, and (nginx and Gale) `/generation` with the number of its configuration. Only
//! processes started by this harness are killed. Invariant: a `Running` has answered a request correctly.

use std::fs;
use std::net::TcpListener;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant, SystemTime};

use rustix::process::{Pid, Signal, kill_process};

use crate::certificate::Certificate;
use crate::client::load;
use crate::interpreter::OneRequest;
use crate::location;
use crate::process::{self, Process};

pub const SMALL_BODY: &[u8] = b"ok";
pub const FILE_BYTES: usize = 1024;
/// Files of the measurement `files`: name of the case, path, and length.
pub const FILES: [(&str, &str, usize); 4] = [
    ("1k", "/file", FILE_BYTES),
    ("10k", "/file-10k", 10 << 10),
    ("64k", "/file-64k", 64 << 10),
    ("4m", "/file-4m", 4 << 20),
];

/// Idle connections that a server keeps to the backend: as many as there are clients.
const PROXIED_IDLE_MAX: u32 = 512;

const START_TIME_LIMIT: Duration = Duration::from_secs(10);
/// The same for a server under a program that makes it many times slower, with a large configuration.
const START_TIME_LIMIT_UNDER: Duration = Duration::from_secs(300);
const STOP_TIME_LIMIT: Duration = Duration::from_secs(5);
pub const POLL_INTERVAL: Duration = Duration::from_millis(1);

/// Varnish caches in its own memory.
const VARNISH_STORAGE: &str = "malloc,256m";

/// haproxy, too. Total size in megabytes, and size of a response in bytes.
const HAPROXY_CACHE: &str = "cache cached\n    total-max-size 256\n    max-object-size 8388608\n    max-age 3600\n";

const HAPROXY_CACHE_RULES: &str = "    http-request cache-use cached\n\
    \x20   http-response set-header Cache-Control max-age=3600\n    http-response cache-store cached\n";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Floor,
    Nginx,
    Gale,
    H2o,
    Haproxy,
    Varnish,
}

#[derive(Debug, Clone)]
pub struct Program {
    pub label: String,
    pub kind: Kind,
    pub binary: PathBuf,
    /// Argument of `use`, if given.
    pub driver: Option<String>,
    /// With nginx's cache of open files, which is off by default.
    pub open_file_cache: bool,
    /// With `listen … deferred` (TCP_DEFER_ACCEPT), which is the default of h2o: a connection is accepted only when its
    /// request has arrived.
    pub deferred: bool,
    /// Version reported by the binary; empty until `resolve`.
    pub version: String,
    /// Supports key exchange with X25519MLKEM768. For nginx this depends on its library.
    pub has_hybrid_keys: bool,
}

/// Distribution of connections to workers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Accepting {
    /// One socket, which wakes all workers.
    Shared,
    /// A socket for each worker.
    Reuseport,
    /// One socket, used in turns.
    Mutex,
}

impl Accepting {
    pub fn name(self) -> &'static str {
        match self {
            Accepting::Shared => "shared",
            Accepting::Reuseport => "reuseport",
            Accepting::Mutex => "accept_mutex on",
        }
    }
}

#[derive(Debug, Clone)]
pub struct Setting {
    /// One request per connection. (The floor has a separate mode for this.)
    pub is_short: bool,
    pub cores: Option<Vec<usize>>,
    pub floor_body_bytes: usize,
    pub workers: usize,
    /// User of the workers of nginx and Gale, if this program runs as root.
    pub user: &'static str,
    pub accepting: Accepting,
    /// Number of connections that it must support.
    pub connections_max: usize,
    /// Run as one process, under the program with these arguments if there are any.
    pub alone_under: Option<Vec<String>>,
    /// Start with the program with these arguments, which then executes the server.
    pub under: Option<Vec<String>>,
    /// Additional directives of nginx and Gale for the http block and the server block.
    pub http: String,
    pub server: String,
    pub blocks: String,
    /// Local port of the backend for `/proxied`, for `/unbuffered` (without buffering), and for WebSockets at
    /// `/tunnel`.
    pub backend: Option<u16>,
    /// Request of the floor to its backend instead, over a new connection each time.
    pub floor_request: Option<OneRequest>,
    /// The other servers cache responses of the backend: `/cached`. For nginx and Gale the cache is in their
    /// directives.
    pub caches: bool,
    /// Reloads will follow, which some servers must know when they start.
    pub reloads: bool,
    /// Certificate for an additional port with TLS.
    pub certificate: Option<Arc<Certificate>>,
    pub handshakes: Handshakes,
}

#[derive(Debug, Clone, Copy, Default)]
pub struct Handshakes {
    /// Sessions cannot be resumed: there are no tickets and no session cache. (wrk resumes them if possible.)
    pub are_full: bool,
    pub are_of_12: bool,
    /// Use X25519MLKEM768 in place of X25519.
    pub are_hybrid: bool,
}

impl Default for Setting {
    fn default() -> Setting {
        Setting {
            is_short: false,
            cores: None,
            floor_body_bytes: SMALL_BODY.len(),
            workers: 1,
            user: "root",
            accepting: Accepting::Shared,
            connections_max: 4096,
            alone_under: None,
            under: None,
            http: String::new(),
            server: String::new(),
            blocks: String::new(),
            backend: None,
            floor_request: None,
            caches: false,
            reloads: false,
            certificate: None,
            handshakes: Handshakes::default(),
        }
    }
}

/// Ports without TLS, and with TLS if there is a certificate.
#[derive(Debug, Clone, Copy)]
struct Ports {
    clear: u16,
    tls: u16,
}

/// A running server. It is stopped on drop.
#[derive(Debug)]
pub struct Running {
    pub label: String,
    pub address: String,
    /// Address with TLS, if there is a certificate.
    pub tls_address: Option<String>,
    /// The process that was started: the master, if there is one.
    pub root: Process,
    program: Program,
    setting: Setting,
    directory: PathBuf,
    ports: Ports,
    child: Child,
}

impl Program {
    pub fn new(label: &str, kind: Kind, binary: &Path) -> Program {
        Program {
            label: label.to_owned(),
            kind,
            binary: binary.to_owned(),
            driver: None,
            open_file_cache: false,
            deferred: false,
            version: String::new(),
            has_hybrid_keys: kind == Kind::Gale,
        }
    }

    /// Returns the program with `use DRIVER`, and a label with the driver.
    pub fn with_driver(self, driver: &str) -> Program {
        Program { label: format!("{} {driver}", self.label), driver: Some(driver.to_owned()), ..self }
    }

    /// Returns true if `--servers LABEL` selects this program: `gale` selects Gale with every driver.
    pub fn answers_to(&self, label: &str) -> bool {
        self.label == label || self.label.split(' ').next() == Some(label)
    }

    /// Finds the binary and its version. Fails if it cannot be started.
    pub fn resolve(&self) -> Result<Program, String> {
        let mut program = self.clone();
        if self.kind == Kind::Floor {
            program.binary = std::env::current_exe().map_err(|error| format!("floor: {error}"))?;
            program.version = format!("recv + send, {}", self.floor_driver());
            return Ok(program);
        }
        if self.binary.components().count() > 1 {
            // A path and not a name in PATH. It must be absolute, because servers run in other folders.
            let found = fs::canonicalize(&self.binary);
            program.binary = found.map_err(|error| format!("{}: {error}", self.binary.display()))?;
        }
        let option = match self.kind {
            Kind::H2o => "--version",
            Kind::Nginx | Kind::Varnish => "-V",
            Kind::Floor | Kind::Gale | Kind::Haproxy => "-v",
        };
        let output = Command::new(&program.binary).arg(option).output();
        let output = output.map_err(|error| format!("{}: {error}", self.binary.display()))?;
        let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
        program.version = text.lines().next().unwrap_or("says no version").trim().to_owned();
        if let Some(library) = text.lines().find_map(|line| line.strip_prefix("built with ")) {
            program.has_hybrid_keys = library.contains("AWS-LC") || library.contains("BoringSSL");
            program.version += &format!(", {}", library.split(" (running").next().unwrap_or(library));
        }
        Ok(program)
    }

    /// Starts the server and waits until it answers.
    pub fn start(&self, setting: Setting) -> Result<Running, String> {
        let directory = fresh_directory(&self.label)?;
        let ports = Ports { clear: free_port()?, tls: free_port()? };
        let fault = |error: std::io::Error| format!("{}: {error}", directory.display());
        fs::create_dir(directory.join("html")).map_err(fault)?;
        fs::write(directory.join("html/return"), SMALL_BODY).map_err(fault)?;
        for (_, path, bytes) in FILES {
            write_read_before(&directory.join("html").join(&path[1..]), &letters(bytes)).map_err(fault)?;
        }
        for page in location::PAGES {
            let path = directory.join("html").join(&page.path[1..]);
            fs::create_dir_all(path.parent().expect("it is in a folder")).map_err(fault)?;
            write_read_before(&path, &location::html(page.bytes)).map_err(fault)?;
        }
        self.write_configuration(&directory, ports, 0, &setting)?;
        let output = fs::File::create(directory.join("output")).map_err(fault)?;
        let mut command = self.command(&directory, ports.clear, &setting);
        command.current_dir(&directory).stdin(Stdio::null());
        command.stdout(output.try_clone().map_err(fault)?).stderr(output);
        let child = match &setting.cores {
            Some(cores) => process::spawn_pinned(&mut command, cores)?,
            None => command.spawn().map_err(|error| format!("{}: {error}", self.binary.display()))?,
        };
        let root = Process::find(child.id()).ok_or_else(|| format!("{} ended at once", self.label))?;
        let address = format!("127.0.0.1:{}", ports.clear);
        let tls_address = setting.certificate.as_ref().map(|_| format!("127.0.0.1:{}", ports.tls));
        let (label, program) = (self.label.clone(), self.clone());
        let mut running = Running { label, address, tls_address, root, program, setting, directory, ports, child };
        running.wait_until_it_answers()?;
        Ok(running)
    }

    /// Returns the floor's driver, named as in Gale's `use`.
    fn floor_driver(&self) -> &str {
        self.driver.as_deref().unwrap_or("epoll")
    }

    fn command(&self, directory: &Path, port: u16, setting: &Setting) -> Command {
        let mut command = match setting.alone_under.as_ref().or(setting.under.as_ref()) {
            None => Command::new(&self.binary),
            Some(words) => {
                let mut command = Command::new(&words[0]);
                command.args(&words[1..]).arg(&self.binary);
                command
            }
        };
        match self.kind {
            Kind::Floor => {
                let mode = match (setting.is_short, self.deferred) {
                    (false, _) => "keep-alive",
                    (true, false) => "close",
                    (true, true) => "close-deferred",
                };
                let (port, body_bytes) = (port.to_string(), setting.floor_body_bytes.to_string());
                match (&setting.floor_request, setting.backend.filter(|_| !setting.caches)) {
                    (None, None) => command.args(["floor", &port, self.floor_driver(), mode, &body_bytes]),
                    (None, Some(backend)) => command.args(["relay", &port, self.floor_driver(), &backend.to_string()]),
                    (Some(request), _) => {
                        command.args(["floor-reconnecting", &port, self.floor_driver(), &body_bytes]);
                        command.arg(&request.socket).arg(&request.file)
                    }
                };
            }
            Kind::Nginx | Kind::Gale => {
                command.arg("-p").arg(directory).arg("-c").arg(directory.join("server.conf"));
                command.arg("-e").arg(directory.join("error.log"));
            }
            Kind::H2o => {
                command.arg("-c").arg(directory.join("server.conf"));
            }
            Kind::Haproxy => {
                // A reload needs a master.
                command.arg(if setting.reloads { "-W" } else { "-db" }).arg("-f").arg(directory.join("server.conf"));
            }
            Kind::Varnish => {
                let listens = format!("127.0.0.1:{port}");
                command.args(["-F", "-a", &listens, "-s", VARNISH_STORAGE, "-p", "thread_pools=1", "-j", "none"]);
                command.arg("-f").arg(directory.join("server.conf")).arg("-n").arg(directory.join("varnish"));
            }
        }
        command
    }

    /// Replaces the configuration atomically.
    fn write_configuration(
        &self,
        directory: &Path,
        ports: Ports,
        generation: u32,
        setting: &Setting,
    ) -> Result<(), String> {
        let text = self.configuration(directory, ports, generation, setting);
        let (new, path) = (directory.join("server.conf.new"), directory.join("server.conf"));
        fs::write(&new, text)
            .and_then(|()| fs::rename(&new, &path))
            .map_err(|error| format!("{}: {error}", path.display()))
    }

    fn configuration(&self, directory: &Path, ports: Ports, generation: u32, setting: &Setting) -> String {
        let directory = directory.display();
        let port = ports.clear;
        let is_root = rustix::process::geteuid().is_root();
        let Setting { workers, connections_max, http, server, blocks, handshakes, .. } = setting;
        let where_true = |is_so: bool, text: &'static str| if is_so { text } else { "" };
        match self.kind {
            Kind::Floor => String::new(),
            Kind::Nginx | Kind::Gale => {
                let user = if is_root { format!("user {};\n", setting.user) } else { String::new() };
                let alone = if setting.alone_under.is_some() { "master_process off;\n" } else { "" };
                let driver = self.driver.as_ref().map_or(String::new(), |driver| format!("use {driver}; "));
                let cache = if self.open_file_cache { "    open_file_cache max=100;\n" } else { "" };
                let (listen, mutex) = match setting.accepting {
                    Accepting::Shared => ("", ""),
                    Accepting::Reuseport => (" reuseport", ""),
                    Accepting::Mutex => ("", "accept_mutex on; "),
                };
                let deferred = if self.deferred { " deferred" } else { "" };
                let tls = setting.certificate.as_ref().map_or_else(String::new, |certificate| {
                    // One group for all servers, so that all do the same work.
                    format!(
                        "        listen 127.0.0.1:{} ssl{listen};\n        ssl_ecdh_curve {};\n{}{}\
                         \x20       ssl_certificate {};\n        ssl_certificate_key {};\n",
                        ports.tls,
                        if handshakes.are_hybrid { "X25519MLKEM768" } else { "X25519" },
                        where_true(handshakes.are_full, "        ssl_session_tickets off; ssl_session_cache off;\n"),
                        where_true(handshakes.are_of_12, "        ssl_protocols TLSv1.2;\n"),
                        certificate.chain().display(),
                        certificate.key().display()
                    )
                });
                let (group, proxied) = setting.backend.map_or_else(Default::default, |backend| {
                    let pass = "proxy_pass http://backend; proxy_http_version 1.1; proxy_set_header Connection \"\";";
                    (
                        format!(
                            "    upstream backend {{ server 127.0.0.1:{backend}; keepalive {PROXIED_IDLE_MAX}; }}\n"
                        ),
                        format!(
                            "        location = /proxied {{ {pass} }}\n\
                             \x20       location = /unbuffered {{ {pass} proxy_buffering off; }}\n"
                        ),
                    )
                });
                format!(
                    "{user}daemon off;\n{alone}worker_processes {workers};\npid {directory}/server.pid;\n\
                     error_log {directory}/error.log notice;\n\
                     events {{ {driver}{mutex}worker_connections {connections_max}; }}\n\
                     http {{\n    access_log off;\n    default_type application/octet-stream;\n    sendfile on;\n\
                     \x20   keepalive_timeout 3600s;\n    keepalive_time 24h;\n    keepalive_requests 1000000000;\n\
                     {cache}\
                     \x20   {http}\n{group}\
                     \x20   server {{\n        listen 127.0.0.1:{port}{listen}{deferred};\n        root \
                     {directory}/html;\n{tls}\
                     \x20       {server}\n{proxied}\
                     \x20       location = /return {{ return 200 \"ok\"; }}\n\
                     \x20       location = /generation {{ return 200 \"{generation}\"; }}\n    }}\n}}\n{blocks}\n"
                )
            }
            Kind::H2o => {
                let user = if is_root { "user: root\n" } else { "" };
                let proxied = setting.backend.map_or_else(String::new, |backend| {
                    let to = |path: &str| {
                        format!("      {path}:\n        proxy.reverse.url: http://127.0.0.1:{backend}{path}\n")
                    };
                    to("/proxied") + &to("/unbuffered") + &to("/tunnel") + "        proxy.websocket: ON\n"
                });
                let tls = setting.certificate.as_ref().map_or_else(String::new, |certificate| {
                    format!(
                        "{}listen:\n  host: 127.0.0.1\n  port: {}\n  ssl:\n    certificate-file: {}\n    key-file: {}\n\
                         {}",
                        where_true(handshakes.are_full, "ssl-session-resumption:\n  mode: off\n"),
                        ports.tls,
                        certificate.chain().display(),
                        certificate.key().display(),
                        where_true(handshakes.are_of_12, "    max-version: TLSv1.2\n"),
                    )
                });
                format!(
                    "{user}num-threads: {workers}\nmax-connections: {connections_max}\n\
                     listen:\n  host: 127.0.0.1\n  port: {port}\n{tls}\
                     http1-request-timeout: 3600\nerror-log: {directory}/error.log\n\
                     hosts:\n  default:\n    paths:\n{proxied}      /:\n        file.dir: {directory}/html\n"
                )
            }
            // Its strict limits assume two descriptors per connection; here a connection needs one, or two with a
            // proxy.
            Kind::Haproxy => {
                let (rule, backend) = setting.backend.map_or_else(Default::default, |backend| {
                    // It stores only responses with an explicit lifetime.
                    let (cache, rules) = if setting.caches { (HAPROXY_CACHE, HAPROXY_CACHE_RULES) } else { ("", "") };
                    (
                        "    use_backend origin if { path /proxied /unbuffered /tunnel /cached }\n",
                        format!(
                            "{cache}backend origin\n    http-reuse always\n{rules}    server one 127.0.0.1:{backend}\n"
                        ),
                    )
                });
                let tls = setting.certificate.as_ref().map_or_else(String::new, |certificate| {
                    let both = certificate.both().display();
                    let full = where_true(handshakes.are_full, " no-tls-tickets");
                    let of_12 = where_true(handshakes.are_of_12, " ssl-max-ver TLSv1.2");
                    format!(
                        "    bind 127.0.0.1:{} ssl crt {both} curves X25519 alpn h2,http/1.1{full}{of_12}\n",
                        ports.tls
                    )
                });
                let no_sessions = where_true(handshakes.are_full, "    tune.ssl.cachesize 0\n");
                format!(
                    "global\n    nbthread {workers}\n    maxconn {connections_max}\n    no strict-limits\n{no_sessions}\
                     defaults\n    mode http\n    timeout client 3600s\n    timeout http-keep-alive 3600s\n\
                     \x20   timeout connect 5s\n    timeout server 5s\n    timeout tunnel 3600s\n\
                     frontend bench\n    bind 127.0.0.1:{port}\n{tls}\
                     \x20   http-request return status 200 content-type application/octet-stream \
                     file {directory}/html/file if {{ path /file }}\n\
                     \x20   http-request return status 200 content-type text/plain string ok if {{ path /return }}\n\
                     \x20   http-request return status 200 content-type text/plain string {generation} \
                     if {{ path /generation }}\n\
                     {rule}{backend}{blocks}"
                )
            }
            Kind::Varnish => {
                let backend = setting.backend.map_or("backend origin none;\n".to_owned(), |backend| {
                    format!("backend origin {{ .host = \"127.0.0.1\"; .port = \"{backend}\"; }}\n")
                });
                format!(
                    "vcl 4.1;\n{backend}\
                     sub vcl_recv {{ if (req.url == \"/return\") {{ return (synth(200)); }} return (hash); }}\n\
                     sub vcl_synth {{ set resp.body = \"ok\"; return (deliver); }}\n\
                     sub vcl_backend_response {{ set beresp.ttl = 1h; return (deliver); }}\n"
                )
            }
        }
    }
}

impl Running {
    pub fn certificate(&self) -> Option<&Path> {
        self.setting.certificate.as_ref().map(|certificate| certificate.chain())
    }

    /// Returns true if it may lose signals, as haproxy's master does while it restarts.
    pub fn loses_signals(&self) -> bool {
        self.program.kind == Kind::Haproxy
    }

    /// Writes the configuration with a new number and signals the master.
    pub fn reload(&self, generation: u32) -> Result<(), String> {
        self.program.write_configuration(&self.directory, self.ports, generation, &self.setting)?;
        let is_haproxy = self.program.kind == Kind::Haproxy;
        send_signal(self.root, if is_haproxy { Signal::USR2 } else { Signal::HUP })
    }

    /// Returns the server's prefix; its configuration is `server.conf`.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    pub fn html(&self) -> PathBuf {
        self.directory.join("html")
    }

    pub fn set_http(&mut self, http: String) {
        self.setting.http = http;
    }

    pub fn error_log(&self) -> String {
        String::from_utf8_lossy(&fs::read(self.directory.join("error.log")).unwrap_or_default()).into_owned()
    }

    /// Returns the last lines of the error log, for error messages.
    pub fn error_log_end(&self) -> String {
        const LINES_MAX: usize = 10;
        let text: String = ["error.log", "output"]
            .iter()
            .map(|name| fs::read(self.directory.join(name)).unwrap_or_default())
            .map(|bytes| String::from_utf8_lossy(&bytes).into_owned())
            .collect();
        let lines: Vec<&str> = text.lines().collect();
        lines[lines.len().saturating_sub(LINES_MAX)..].join("\n")
    }

    fn wait_until_it_answers(&mut self) -> Result<(), String> {
        let time_limit = if self.setting.alone_under.is_some() { START_TIME_LIMIT_UNDER } else { START_TIME_LIMIT };
        let deadline = Instant::now() + time_limit;
        loop {
            let answer = load::request_once(&self.address, "/return", START_TIME_LIMIT);
            let right = match (&answer, self.program.kind) {
                (Ok(body), Kind::Floor) => body.len() == self.setting.floor_body_bytes,
                (Ok(body), _) => body == SMALL_BODY,
                (Err(_), _) => false,
            };
            if right {
                return Ok(());
            }
            let ended = self.child.try_wait().ok().flatten();
            if ended.is_some() || Instant::now() >= deadline {
                let how = ended.map_or("does not answer".to_owned(), |status| format!("ended: {status}"));
                return Err(format!("{} {how}; last answer {answer:?}\n{}", self.label, self.error_log_end()));
            }
            std::thread::sleep(POLL_INTERVAL);
        }
    }
}

impl Running {
    /// Stops the server, which must be one process, until it is sent CONT. Returns when it has stopped.
    pub fn pause(&self) -> Result<(), String> {
        send_signal(self.root, Signal::STOP)?;
        let deadline = Instant::now() + STOP_TIME_LIMIT;
        while !self.root.is_stopped() {
            if Instant::now() >= deadline {
                return Err(format!("{} does not stop", self.label));
            }
            std::thread::yield_now();
        }
        Ok(())
    }

    /// Sends this signal and waits until the server has exited. valgrind lets no other thread run while one waits in
    /// `io_uring_enter`, so connections are opened meanwhile to wake it.
    pub fn end(mut self, signal: Signal) -> Result<(), String> {
        const CALL_INTERVAL: Duration = Duration::from_millis(100);
        send_signal(self.root, signal)?;
        let deadline = Instant::now() + STOP_TIME_LIMIT;
        while self.child.try_wait().ok().flatten().is_none() {
            if Instant::now() >= deadline {
                return Err(format!("{} does not end\n{}", self.label, self.error_log_end()));
            }
            std::thread::sleep(CALL_INTERVAL);
            let _ = load::Connection::open(&self.address);
        }
        Ok(())
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let tree = self.root.tree();
        let _ = send_signal(self.root, Signal::TERM);
        let deadline = Instant::now() + STOP_TIME_LIMIT;
        while tree.iter().any(|process| process.is_alive()) && Instant::now() < deadline {
            std::thread::sleep(POLL_INTERVAL);
            let _ = self.child.try_wait();
        }
        for process in tree {
            let _ = send_signal(process, Signal::KILL);
        }
        let _ = self.child.wait();
        let _ = fs::remove_dir_all(&self.directory);
    }
}

/// Sends a signal to a process, unless it has exited.
pub fn send_signal(process: Process, signal: Signal) -> Result<(), String> {
    let fault = |what: &str| format!("signal to {}: {what}", process.id);
    if !process.is_alive() {
        return Err(fault("it has ended"));
    }
    let id = Pid::from_raw(process.id as i32).ok_or_else(|| fault("no such number"))?;
    kill_process(id, signal).map_err(|error| fault(&error.to_string()))
}

pub fn file_body() -> Vec<u8> {
    letters(FILE_BYTES)
}

/// Returns letters, so that a shifted or truncated body is noticed.
pub fn letters(length: usize) -> Vec<u8> {
    (0..length).map(|index| b'a' + (index % 23) as u8).collect()
}

/// Writes a file whose next read does not update its access time, as if it had been read before. The update waits for
/// the disk, which is not part of measurements with everything in memory. (Under valgrind it may never finish: a thread
/// that waits in `io_uring_enter` keeps valgrind from running the others.)
fn write_read_before(path: &Path, content: &[u8]) -> std::io::Result<()> {
    fs::write(path, content)?;
    let read_at = SystemTime::now() + Duration::from_secs(3600);
    fs::File::open(path)?.set_times(fs::FileTimes::new().set_accessed(read_at))
}

fn fresh_directory(label: &str) -> Result<PathBuf, String> {
    static COUNT: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
    let count = COUNT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    let label: String = label.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '-' }).collect();
    let path = std::env::temp_dir().join(format!("gale-bench-{}-{count}-{label}", std::process::id()));
    fs::create_dir(&path).map_err(|error| format!("{}: {error}", path.display()))?;
    Ok(path)
}

/// Ports below the default range of ephemeral ports.
const PORTS: Range<u16> = 20_000..32_000;

/// Returns a port that is free now and outside the range of ephemeral ports.
pub fn free_port() -> Result<u16, String> {
    static TRIED: AtomicU32 = AtomicU32::new(0);
    let mut ports = (0..PORTS.len() as u32).map(|_| {
        let number = std::process::id().wrapping_mul(97).wrapping_add(TRIED.fetch_add(1, Ordering::Relaxed));
        PORTS.start + (number % PORTS.len() as u32) as u16
    });
    ports.find(|&port| TcpListener::bind(("127.0.0.1", port)).is_ok()).ok_or_else(|| "no free port".to_owned())
}
