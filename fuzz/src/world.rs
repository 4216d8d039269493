//! A server in a simulated world, which one fuzzed connection talks to.
//!
//! It opens no socket and writes no file: configurations that come from a target may have the directives in [`SAFE`]
//! only, because pools of a simulation carry out what a directive does to files.

use std::io;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, LazyLock, OnceLock};
use std::time::Duration;

use gale_config::{Files, MemoryFiles, Sources, Statement, parse_text};
use gale_engine::serve::Server;
use gale_files::SimulatedFiles;
use gale_modules::order::ORDER;
use gale_process::{
    Account, BuildRequest, DataHandle, ListenAddress, ListenSpec, Listener, ListenerHandle, LockHandle, LogFile,
    LogHandle, OpenedBy, Program, ResourceError, Resources, Worker, WorkerSlot,
};
use gale_runtime::simulation::{Faults, Peer, Random, Sending, Simulation, Transcript};
use gale_runtime::{EventLoop, LoopOptions, SocketAddress, Stream, leased_bytes, now, sleep};

/// Address of the server.
pub(crate) const ADDRESS: &str = "192.0.2.1:80";

/// Only loop.
const SLOT: WorkerSlot = WorkerSlot { worker: 0, workers: 1 };

/// Longer than any timeout of the server.
const SETTLING: Duration = Duration::from_secs(5000);

/// Directives without effect outside of the world: they write no file and start no thread that lasts.
const SAFE: &[&str] = &[
    "absolute_redirect",
    "add_after_body",
    "add_before_body",
    "add_header",
    "add_trailer",
    "addition_types",
    "alias",
    "allow",
    "auth_delay",
    "break",
    "charset",
    "charset_types",
    "chunked_transfer_encoding",
    "client_header_buffer_size",
    "client_header_timeout",
    "client_max_body_size",
    "default_type",
    "deny",
    "early_hints",
    "empty_gif",
    "error_page",
    "etag",
    "expires",
    "geo",
    "gunzip",
    "gzip",
    "gzip_comp_level",
    "gzip_min_length",
    "gzip_types",
    "if",
    "if_modified_since",
    "ignore_invalid_headers",
    "index",
    "internal",
    "keepalive_disable",
    "keepalive_requests",
    "keepalive_timeout",
    "large_client_header_buffers",
    "limit_except",
    "limit_rate",
    "limit_rate_after",
    "lingering_close",
    "location",
    "map",
    "max_ranges",
    "merge_slashes",
    "msie_padding",
    "port_in_redirect",
    "postpone_output",
    "recursive_error_pages",
    "reset_timedout_connection",
    "return",
    "rewrite",
    "root",
    "satisfy",
    "secure_link",
    "secure_link_md5",
    "send_timeout",
    "server",
    "server_name",
    "server_name_in_redirect",
    "server_tokens",
    "set",
    "split_clients",
    "ssi",
    "ssi_silent_errors",
    "ssi_types",
    "ssi_value_length",
    "sub_filter",
    "sub_filter_last_modified",
    "sub_filter_once",
    "sub_filter_types",
    "try_files",
    "types",
    "underscores_in_headers",
    "userid",
    "userid_name",
    "valid_referers",
];

/// True if a text is a sequence of statements, all of whose directives are safe ones.
pub(crate) fn is_safe(text: &[u8]) -> bool {
    let parsed =
        parse_text(&mut Sources::new(), &mut MemoryFiles::new(), "input", text.to_vec(), Path::new("/nowhere"));
    // With braces that do not match, the rest of the configuration would be in other blocks.
    !parsed.errors.has_errors() && all_safe(&parsed.statements)
}

fn all_safe(statements: &[Statement]) -> bool {
    let is_safe = |statement: &Statement| {
        SAFE.iter().any(|name| name.as_bytes() == &**statement.name.text)
            // Rows of these blocks have names of their own.
            && (matches!(&**statement.name.text, b"map" | b"geo" | b"types" | b"split_clients")
                || all_safe(statement.body()))
    };
    statements.iter().all(is_safe)
}

/// Files of the site.
const SITE: &[(&str, &[u8])] = &[
    ("/www/index.html", b"<p>index</p>"),
    ("/www/page.html", b"<!--#set var='a' value='1' --><!--#include virtual='/small.txt' --><!--#echo var='a' -->"),
    ("/www/small.txt", b"a small file\n"),
];

/// A certificate and its key.
static PAIR: LazyLock<(String, String)> = LazyLock::new(|| {
    let pair = rcgen::generate_simple_self_signed(["localhost".to_owned()]).expect("a certificate");
    (pair.cert.pem(), pair.signing_key.serialize_pem())
});

/// Serves an http block with this text to a client that takes these steps, and returns its record; `None` if the
/// configuration is refused.
///
/// # Panics
/// If a task panics, or if anything is left of the connection.
pub(crate) fn serve(text: &str, sends: Vec<Sending>) -> Option<Transcript> {
    let simulation = Simulation::new(1, Faults::NONE);
    for (path, content) in SITE {
        simulation.add_file(path, content).expect("memory for it");
    }
    let request = BuildRequest {
        program: "gale".to_owned(),
        prefix: "/nowhere/".into(),
        configuration_path: "/nowhere/gale.conf".into(),
        configuration_text: Some(format!("worker_processes 1; events {{ }} http {{ {text} }}")),
        ..BuildRequest::default()
    };
    let server = Server::new(&ORDER);
    let mut resources = SimulatedResources { simulation: &simulation, listeners: Vec::new() };
    let configuration = match server.build(&request, &mut resources) {
        Ok(built) => Arc::new(built.configuration),
        Err(report) => {
            assert!(!report.render("gale").is_empty());
            return None;
        }
    };
    let panics = gale_runtime::panic_count();
    let mut event_loop = EventLoop::simulated(&simulation, LoopOptions::default()).expect("a descriptor");
    let transcript = event_loop.run(async {
        let mut serving = server.start(SLOT, configuration).expect("simulated sockets");
        serving.settled();
        let address = SocketAddress::Inet(ADDRESS.parse().expect("an address"));
        let stream = Stream::connect(&address).await.expect("a network without faults");
        let peer = Peer { patience: SETTLING / 10, ..Peer::new(sends) };
        let transcript = peer.play(stream, &Random::new(1)).await;
        let deadline = now() + SETTLING;
        while serving.connections() > 0 && now() < deadline {
            sleep(Duration::from_secs(1)).await;
        }
        assert_eq!(serving.connections(), 0, "connections are left");
        assert_eq!(leased_bytes(), 0, "memory is left");
        transcript
    });
    assert_eq!(gale_runtime::panic_count(), panics, "a task has panicked");
    Some(transcript)
}

/// Listening sockets of the simulation, a certificate, and nothing else.
struct SimulatedResources<'s> {
    simulation: &'s Simulation,
    listeners: Vec<ListenerHandle>,
}

impl SimulatedResources<'_> {
    fn listen(&mut self, spec: &ListenSpec) -> io::Result<ListenerHandle> {
        if let Some(known) = self.listeners.iter().find(|listener| listener.spec.address == spec.address) {
            return Ok(Arc::clone(known));
        }
        let address = match &spec.address {
            ListenAddress::Inet(address) => SocketAddress::Inet(*address),
            ListenAddress::Unix(path) => SocketAddress::unix(path),
        };
        let sockets = vec![Arc::new(self.simulation.listen(&address)?)];
        let listener = Arc::new(Listener { spec: spec.clone(), sockets, opened_by: OpenedBy::Us });
        self.listeners.push(Arc::clone(&listener));
        Ok(listener)
    }
}

impl Files for SimulatedResources<'_> {
    fn read(&mut self, _path: &Path) -> io::Result<Vec<u8>> {
        Err(io::ErrorKind::NotFound.into())
    }

    fn glob(&mut self, _pattern: &Path) -> io::Result<Vec<PathBuf>> {
        Ok(Vec::new())
    }
}

impl Resources for SimulatedResources<'_> {
    fn listeners(&mut self, specs: &[ListenSpec]) -> Result<Vec<ListenerHandle>, ResourceError> {
        let listened = specs.iter().map(|spec| self.listen(spec));
        listened.collect::<io::Result<_>>().map_err(|error| ResourceError::new(error.to_string()))
    }

    /// All logs share one handle, opened once: a log is never freed in a process.
    fn log_file(&mut self, _path: &Path) -> Result<LogHandle, ResourceError> {
        static LOG: OnceLock<LogHandle> = OnceLock::new();
        let log = LOG.get_or_init(|| Arc::new(LogFile::open(Path::new("/dev/null")).expect("a log")));
        Ok(Arc::clone(log))
    }

    fn lock_file(&mut self, _path: &Path) -> Result<LockHandle, ResourceError> {
        Err(ResourceError::new("no lock files here".to_owned()))
    }

    fn secret(&mut self, path: &Path) -> io::Result<Vec<u8>> {
        match path.to_str() {
            Some("/certificate.pem") => Ok(PAIR.0.clone().into_bytes()),
            Some("/key.pem") => Ok(PAIR.1.clone().into_bytes()),
            _ => Err(io::ErrorKind::NotFound.into()),
        }
    }

    fn data_file(&mut self, _path: &Path) -> io::Result<DataHandle> {
        Err(io::ErrorKind::NotFound.into())
    }

    fn resolve(&mut self, _host: &str) -> io::Result<Vec<IpAddr>> {
        Err(io::ErrorKind::NotFound.into())
    }

    fn account(&mut self, _user: &str, _group: Option<&str>) -> Result<Option<Account>, ResourceError> {
        Ok(None)
    }

    fn directory(&mut self, _path: &Path, _owner: Option<&Account>) -> Result<(), ResourceError> {
        Ok(())
    }
}
