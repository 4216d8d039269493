//! Orders over the control socket, and the answers to them.
//!
//! A reload that is asked for while another goes on begins after it, as with signals; who asked hears of that one.

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

/// The most who are heard at once; of those that have said nothing yet, the first gives way.
const CLIENTS_MAX: usize = 16;

/// The socket, and who has connected to it.
#[derive(Default)]
pub(super) struct Control {
    listener: Option<UnixListener>,
    clients: Vec<Client>,
    /// What the reload that goes on has said so far.
    said: String,
}

struct Client {
    stream: UnixStream,
    stands: Stands,
}

/// What is asked for.
enum Order {
    Reload,
    /// Figures, for who is at the other end.
    Status(UnixStream),
}

/// How far a client's order is.
#[derive(PartialEq, Eq)]
enum Stands {
    /// So much of it has come.
    Reading(Vec<u8>),
    /// The next reload is its.
    Waiting,
    /// The reload that goes on is its.
    UnderWay,
}

/// What a look at a client has brought.
enum Heard {
    /// No whole order.
    Nothing,
    Reload,
    Status,
    /// It has left, or said something else.
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
    /// Begins to listen. A master without a control socket has its signals; the error says why.
    pub fn begin(&mut self) -> Result<(), String> {
        let bound = control::bind(std::process::id());
        self.listener =
            Some(bound.map_err(|error| format!("the control socket cannot be used{}", errno_text(&error)))?);
        Ok(())
    }

    /// What a poll waits for.
    pub fn polled(&self) -> impl Iterator<Item = PollFd<'_>> {
        let listener = self.listener.iter().map(|listener| PollFd::new(listener, PollFlags::IN));
        let clients = self.clients.iter().filter(|client| matches!(client.stands, Stands::Reading(_)));
        listener.chain(clients.map(|client| PollFd::new(&client.stream, PollFlags::IN)))
    }

    /// Takes what has come; returns what is asked for.
    fn hear(&mut self) -> Vec<Order> {
        self.accept();
        let mut orders = Vec::new();
        // At most as many as there may be at once.
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
        // No more in one round than there may be: others are accepted in the next.
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

    /// A reload begins: whoever waits hears how it ends.
    pub fn reload_begins(&mut self) {
        self.said.clear();
        let waiting = self.clients.iter_mut().filter(|client| client.stands == Stands::Waiting);
        waiting.for_each(|client| client.stands = Stands::UnderWay);
    }

    /// The reload that goes on says something of the configuration.
    pub fn say(&mut self, program: &str, level: Level, message: &str) {
        if self.clients.iter().any(|client| client.stands == Stands::UnderWay) {
            self.said.push_str(&format!("{program}: [{}] {message}\n", level.name()));
        }
    }

    /// The reload has ended.
    pub fn reload_ended(&mut self, ending: Ending, text: &str) {
        let said = std::mem::take(&mut self.said);
        self.answer(Stands::UnderWay, ending, &format!("{said}{text}"));
    }

    /// What is still wanted will not be done.
    pub fn refuse_all(&mut self, text: &str) {
        self.reload_ended(Ending::Refused, text);
        self.answer(Stands::Waiting, Ending::Refused, text);
    }

    /// Those that wait are answered by something other than a reload.
    pub fn answer_waiting(&mut self, ending: Ending, text: &str) {
        self.answer(Stands::Waiting, ending, text);
    }

    fn answer(&mut self, stands: Stands, ending: Ending, text: &str) {
        let answer = format!("{}{text}", ending.line());
        self.clients.retain_mut(|client| {
            if client.stands == stands {
                // A report is bounded, and fits into a socket. Whoever has left hears nothing.
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

    /// Has the worker process tell its figures: the master knows none, and waits for nobody who reads them.
    fn pass_on(&mut self, stream: UnixStream) {
        let serving = self.workers.iter_mut().rev().filter(|worker| worker.phase == WorkerPhase::Serving);
        let link = serving.filter_map(|worker| worker.link.as_mut()).next();
        let (why, copy) = match (link, stream.try_clone()) {
            (Some(link), Ok(copy)) => match link.send_status(OwnedFd::from(stream)) {
                Ok(true) => return,
                // A lost link is seen and logged by the next look at it.
                Ok(false) | Err(_) => ("the worker process is busy", Ok(copy)),
            },
            (_, Err(error)) => ("the master process has too many open files", Err(error)),
            (None, copy) => ("no worker process is running", copy),
        };
        // Fits into a fresh socket, and is not waited for.
        let _ = copy.and_then(|mut stream| stream.write_all(format!("{}{why}\n", Ending::Refused.line()).as_bytes()));
    }
}
