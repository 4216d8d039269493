//! Orders over the control socket, and the answers to them.
//!
//! A reload that is requested while another one runs starts after it, as with signals; the client gets the result of
//! its own reload.

use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};

use gale_base::log_level::Level;
use rustix::event::{PollFd, PollFlags};

use super::Master;
use super::workers::WorkerPhase;
use crate::control::{self, Ending, RELOAD, STATUS};
use crate::errors::errno_text;
use crate::program::Program;

/// Maximum number of connected clients. When it is reached, the first client that has not sent a complete order is
/// dropped.
const CLIENTS_MAX: usize = 16;

#[derive(Default)]
pub(super) struct Control {
    listener: Option<UnixListener>,
    clients: Vec<Client>,
    /// Messages logged so far by the running reload.
    said: String,
}

struct Client {
    stream: UnixStream,
    stands: Stands,
}

enum Order {
    Reload,
    /// Request for the worker's statistics, to be written to this connection.
    Status(UnixStream),
}

/// State of a client's order.
#[derive(PartialEq, Eq)]
enum Stands {
    /// The part of the order received so far.
    Reading(Vec<u8>),
    /// Gets the result of the next reload.
    Waiting,
    /// Gets the result of the running reload.
    UnderWay,
}

/// Result of reading from a client.
enum Heard {
    /// The order is still incomplete.
    Nothing,
    Reload,
    Status,
    /// The client has disconnected or sent something else.
    End,
}

impl Client {
    fn hear(&mut self) -> Heard {
        let Stands::Reading(order) = &mut self.stands else { return Heard::Nothing };
        let mut buffer = [0; if RELOAD.len() > STATUS.len() { RELOAD.len() } else { STATUS.len() }];
        match self.stream.read(&mut buffer) {
            Ok(0) => return Heard::End,
            Ok(count) => order.extend_from_slice(&buffer[..count]),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Heard::Nothing,
            Err(_) => return Heard::End,
        }
        if order == RELOAD {
            self.stands = Stands::Waiting;
            return Heard::Reload;
        }
        match order {
            order if order == STATUS => Heard::Status,
            order if RELOAD.starts_with(order) || STATUS.starts_with(order) => Heard::Nothing,
            _ => Heard::End,
        }
    }
}

impl Control {
    /// Opens the control socket. A master without one still obeys signals; the error is the text for the log.
    pub fn begin(&mut self) -> Result<(), String> {
        let bound = control::bind(std::process::id());
        self.listener =
            Some(bound.map_err(|error| format!("the control socket cannot be used{}", errno_text(&error)))?);
        Ok(())
    }

    pub fn polled(&self) -> impl Iterator<Item = PollFd<'_>> {
        let listener = self.listener.iter().map(|listener| PollFd::new(listener, PollFlags::IN));
        let clients = self.clients.iter().filter(|client| matches!(client.stands, Stands::Reading(_)));
        listener.chain(clients.map(|client| PollFd::new(&client.stream, PollFlags::IN)))
    }

    /// Accepts clients and reads from them; returns the complete orders.
    fn hear(&mut self) -> Vec<Order> {
        self.accept();
        let mut orders = Vec::new();
        // `CLIENTS_MAX` bounds this loop.
        for mut client in std::mem::take(&mut self.clients) {
            match client.hear() {
                Heard::Reload => orders.push(Order::Reload),
                Heard::Status => {
                    orders.push(Order::Status(client.stream));
                    continue;
                }
                Heard::Nothing => {}
                Heard::End => continue,
            }
            self.clients.push(client);
        }
        orders
    }

    fn accept(&mut self) {
        let Some(listener) = &self.listener else { return };
        // Bounds the work of one round: further clients are accepted in the next one.
        for _ in 0..CLIENTS_MAX {
            let Ok((stream, _)) = listener.accept() else { return };
            if !control::is_permitted(&stream) || stream.set_nonblocking(true).is_err() {
                continue;
            }
            if self.clients.len() == CLIENTS_MAX {
                let silent = self.clients.iter().position(|client| matches!(client.stands, Stands::Reading(_)));
                let Some(silent) = silent else { continue };
                self.clients.remove(silent);
            }
            self.clients.push(Client { stream, stands: Stands::Reading(Vec::new()) });
        }
    }

    /// Marks waiting clients as part of the reload that starts now.
    pub fn reload_begins(&mut self) {
        self.said.clear();
        let waiting = self.clients.iter_mut().filter(|client| client.stands == Stands::Waiting);
        waiting.for_each(|client| client.stands = Stands::UnderWay);
    }

    /// Adds a message of the running reload to its answer.
    pub fn say(&mut self, program: &str, level: Level, message: &str) {
        if self.clients.iter().any(|client| client.stands == Stands::UnderWay) {
            self.said.push_str(&format!("{program}: [{}] {message}\n", level.name()));
        }
    }

    /// Answers the clients of the reload that has ended.
    pub fn reload_ended(&mut self, ending: Ending, text: &str) {
        let said = std::mem::take(&mut self.said);
        self.answer(Stands::UnderWay, ending, &format!("{said}{text}"));
    }

    /// Refuses the running reload and those that are waiting.
    pub fn refuse_all(&mut self, text: &str) {
        self.reload_ended(Ending::Refused, text);
        self.answer(Stands::Waiting, Ending::Refused, text);
    }

    /// Answers the waiting clients when something other than a reload fulfils their request.
    pub fn answer_waiting(&mut self, ending: Ending, text: &str) {
        self.answer(Stands::Waiting, ending, text);
    }

    fn answer(&mut self, stands: Stands, ending: Ending, text: &str) {
        let answer = format!("{}{text}", ending.line());
        self.clients.retain_mut(|client| {
            if client.stands == stands {
                // The report is bounded and fits into the socket's buffer. A disconnected client is ignored.
                let _ = client.stream.write_all(answer.as_bytes());
            }
            client.stands != stands
        });
    }
}

impl<P: Program> Master<P> {
    pub(super) fn handle_control(&mut self) {
        for order in self.control.hear() {
            match order {
                Order::Reload => {
                    self.log.write(Level::Notice, "reload requested over the control socket, reconfiguring");
                    self.reconfigure();
                }
                Order::Status(stream) => self.pass_on(stream),
            }
        }
    }

    /// Passes the connection to the worker process, which writes its statistics to it. The master has none itself and
    /// does not wait for slow readers.
    fn pass_on(&mut self, stream: UnixStream) {
        let serving = self.workers.iter_mut().rev().filter(|worker| worker.phase == WorkerPhase::Serving);
        let link = serving.filter_map(|worker| worker.link.as_mut()).next();
        let (why, copy) = match (link, stream.try_clone()) {
            (Some(link), Ok(copy)) => match link.send_status(OwnedFd::from(stream)) {
                Ok(true) => return,
                // A lost link is logged when it is next read.
                Ok(false) | Err(_) => ("the worker process is busy", Ok(copy)),
            },
            (_, Err(error)) => ("the master process has too many open files", Err(error)),
            (None, copy) => ("no worker process is running", copy),
        };
        // Fits into the buffer of a fresh socket, so it does not block.
        let _ = copy.and_then(|mut stream| stream.write_all(format!("{}{why}\n", Ending::Refused.line()).as_bytes()));
    }
}

/// Body of the fuzz target `control_socket`: a client sends these bytes in pieces, and is understood only if they begin
/// with an order.
#[doc(hidden)]
pub fn read_order(bytes: &[u8], piece_length: usize) {
    let (stream, mut theirs) = UnixStream::pair().expect("descriptors");
    stream.set_nonblocking(true).expect("a socket");
    let mut client = Client { stream, stands: Stands::Reading(Vec::new()) };
    for piece in bytes.chunks(piece_length) {
        theirs.write_all(piece).expect("room");
        match client.hear() {
            Heard::Nothing => {}
            Heard::Reload => return assert!(bytes.starts_with(RELOAD)),
            Heard::Status => return assert!(bytes.starts_with(STATUS)),
            // Bytes that come together with the end of an order are no part of one.
            Heard::End => return assert!(bytes != RELOAD && bytes != STATUS),
        }
    }
}
