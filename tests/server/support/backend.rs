//! An upstream server: a test accepts its connections and answers by hand, or threads answer every request.

use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::Instant;

use super::client::Client;
use super::{DEADLINE, directory};

/// A listening socket and its address as written in a configuration.
pub struct Backend {
    listener: Listener,
    address: String,
}

enum Listener {
    Tcp(TcpListener),
    Unix(UnixListener),
}

/// A request as received. The parser is strict: ambiguous framing fails the test.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Asked {
    pub method: String,
    pub target: String,
    pub version: String,
    /// Header fields in order; names as they were sent.
    pub headers: Vec<(String, String)>,
    pub body: Vec<u8>,
    /// Trailer fields of a chunked body.
    pub trailers: Vec<(String, String)>,
}

/// A backend whose requests are answered by threads.
pub struct Serving {
    pub address: String,
    /// The listening socket.
    socket: OwnedFd,
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct Shared {
    asked: Mutex<Vec<(usize, Asked)>>,
    connections: Mutex<Vec<Client>>,
    is_over: AtomicBool,
}

impl Backend {
    /// Listens at a free port of 127.0.0.1.
    pub fn tcp() -> Backend {
        Backend::tcp_at("127.0.0.1")
    }

    /// Listens at a free port of this address.
    pub fn tcp_at(ip: &str) -> Backend {
        let listener = TcpListener::bind((ip, 0)).expect("a free port");
        let address = listener.local_addr().expect("an address").to_string();
        Backend { listener: Listener::Tcp(listener), address }
    }

    /// Listens at a new Unix socket.
    pub fn unix(path: &Path) -> Backend {
        let listener = UnixListener::bind(path).expect("a socket");
        // The worker may run as another user.
        std::fs::set_permissions(path, PermissionsExt::from_mode(0o777)).expect("ours");
        Backend { listener: Listener::Unix(listener), address: format!("unix:{}", path.display()) }
    }

    /// Address in the form that `proxy_pass http://` takes.
    pub fn address(&self) -> &str {
        &self.address
    }

    /// Accepts the next connection.
    #[track_caller]
    pub fn accept(&self) -> Client {
        let is_there = directory::wait_readable_any(self, None::<&TcpListener>, Instant::now() + DEADLINE);
        assert!(is_there, "nobody has connected in time");
        self.accept_now()
    }

    /// Accepts the next TCP connection, for a protocol above it.
    #[track_caller]
    pub fn accept_tcp(&self) -> TcpStream {
        let is_there = directory::wait_readable_any(self, None::<&TcpListener>, Instant::now() + DEADLINE);
        assert!(is_there, "nobody has connected in time");
        let Listener::Tcp(listener) = &self.listener else { panic!("not over TCP") };
        let stream = listener.accept().expect("somebody is there").0;
        stream.set_read_timeout(Some(DEADLINE)).expect("an option");
        stream.set_write_timeout(Some(DEADLINE)).expect("an option");
        stream
    }

    /// `true` if no connection waits to be accepted.
    pub fn is_idle(&self) -> bool {
        !directory::is_readable(self)
    }

    #[track_caller]
    fn accept_now(&self) -> Client {
        self.try_accept().expect("somebody is there")
    }

    fn try_accept(&self) -> std::io::Result<Client> {
        Ok(match &self.listener {
            Listener::Tcp(listener) => Client::of_tcp(listener.accept()?.0),
            Listener::Unix(listener) => Client::of(listener.accept()?.0),
        })
    }

    /// Answers each connection in a thread of its own, until `answer` returns that the connection is to end.
    pub fn serve(self, answer: impl Fn(&Asked, &mut Client) -> bool + Send + Sync + 'static) -> Serving {
        let (shared, address, answer) = (Arc::<Shared>::default(), self.address.clone(), Arc::new(answer));
        let socket = self.as_fd().try_clone_to_owned().expect("a descriptor");
        let state = Arc::clone(&shared);
        let thread = std::thread::spawn(move || {
            for number in 0.. {
                let Some(mut client) = self.accept_or_end() else { break };
                if state.is_over.load(Ordering::SeqCst) {
                    break;
                }
                let (state, answer) = (Arc::clone(&state), Arc::clone(&answer));
                client.keep_record();
                lock(&state.connections).push(client.sender());
                std::thread::spawn(move || {
                    while let Some(asked) = client.request_or_end() {
                        lock(&state.asked).push((number, asked.clone()));
                        if !answer(&asked, &mut client) {
                            break;
                        }
                    }
                    client.close_both();
                });
            }
        });
        Serving { address, socket, shared, thread: Some(thread) }
    }

    /// Accepts a connection without a deadline; `None` when the socket is shut down.
    fn accept_or_end(&self) -> Option<Client> {
        loop {
            match self.try_accept() {
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                accepted => return accepted.ok(),
            }
        }
    }
}

impl AsFd for Backend {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match &self.listener {
            Listener::Tcp(listener) => listener.as_fd(),
            Listener::Unix(listener) => listener.as_fd(),
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

impl Serving {
    /// All requests so far, each with the number of its connection.
    pub fn asked(&self) -> Vec<(usize, Asked)> {
        lock(&self.shared.asked).clone()
    }

    /// Number of connections accepted so far.
    pub fn connection_count(&self) -> usize {
        lock(&self.shared.connections).len()
    }

    /// Closes every connection and the listening socket, as a killed process does.
    pub fn kill(mut self) {
        self.end();
    }

    fn end(&mut self) {
        let Some(thread) = self.thread.take() else { return };
        self.shared.is_over.store(true, Ordering::SeqCst);
        for connection in lock(&self.shared.connections).iter() {
            connection.close_both();
        }
        // Wakes the thread.
        let _ = rustix::net::shutdown(&self.socket, rustix::net::Shutdown::Both);
        thread.join().expect("the backend did not panic");
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        self.end();
    }
}

impl Asked {
    /// Value of the field with this name, which may occur at most once.
    #[track_caller]
    pub fn header(&self, name: &str) -> Option<&str> {
        let mut values = self.headers.iter().filter(|(own, _)| own.eq_ignore_ascii_case(name)).map(|(_, value)| value);
        let first = values.next();
        assert!(values.next().is_none(), "{name} twice: {self:?}");
        first.map(String::as_str)
    }

    /// The fields as lines of the form `Name: value`.
    pub fn fields(&self) -> String {
        self.headers.iter().map(|(name, value)| format!("{name}: {value}\n")).collect()
    }

    /// The body as text.
    pub fn text(&self) -> &str {
        std::str::from_utf8(&self.body).expect("a body of text")
    }
}

impl Client {
    /// Reads the next request on an accepted connection.
    #[track_caller]
    pub fn request(&mut self) -> Asked {
        self.request_or_end().expect("a request and not the end of the connection")
    }

    /// Reads the next request; `None` when the connection ends instead.
    #[track_caller]
    pub fn request_or_end(&mut self) -> Option<Asked> {
        let mut asked = self.request_head_or_end()?;
        let coding = asked.header("Transfer-Encoding").map(str::to_owned);
        let length = asked.header("Content-Length").map(|text| text.parse().expect("a length"));
        match (coding.as_deref(), length) {
            (None, None) => {}
            (None, Some(length)) => asked.body = self.take(length),
            (Some("chunked"), None) => {
                while let Some(data) = self.chunk() {
                    asked.body.extend(data);
                }
                asked.trailers = self.take_fields();
            }
            _ => panic!("framed in two ways, or in an unknown one: {asked:?}"),
        }
        Some(asked)
    }

    /// Reads the head of the next request and leaves the body to the caller.
    #[track_caller]
    pub fn request_head(&mut self) -> Asked {
        self.request_head_or_end().expect("a request and not the end of the connection")
    }

    #[track_caller]
    fn request_head_or_end(&mut self) -> Option<Asked> {
        if self.is_at_end() {
            return None;
        }
        let line = self.take_line();
        let words: Vec<&str> = line.split(' ').collect();
        let [method, target, version] = words[..] else { panic!("no request line: {line:?}") };
        assert!(version == "HTTP/1.1" || version == "HTTP/1.0", "no version: {line:?}");
        let (method, target, version) = (method.to_owned(), target.to_owned(), version.to_owned());
        let headers = self.take_fields();
        Some(Asked { method, target, version, headers, body: Vec::new(), trailers: Vec::new() })
    }
}
