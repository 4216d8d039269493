//! The link: messages and bundles between the master and a process it started, over a SOCK_SEQPACKET socket pair.
//!
//! A packet is one JSON message with at most 253 descriptors (SCM_MAX_FD of Linux). A bundle is announced by a message
//! with its memfd, and its descriptors follow in batches. Nothing here blocks: packets that the socket does not accept
//! wait in a bounded outbox. A peer that violates the protocol loses the link. Descriptors that exceed this process's
//! limit cost only their bundle.

use gale_base::log_level::Level;
use std::collections::VecDeque;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType,
};
use serde::{Deserialize, Serialize};

use super::bundle::{Bundle, PROTOCOL_VERSION};
use super::errors::Report;
use super::handover::{Arrivals, Successor};
use super::log_file::LogHandle;
use super::program::BuildRequest;
use super::secrets::SecretSeries;
use super::text;

/// Maximum number of descriptors in one message: SCM_MAX_FD of Linux.
const DESCRIPTORS_PER_MESSAGE_MAX: usize = 253;
/// Maximum number of descriptors in one bundle; more than any process may hold open by default.
const DESCRIPTORS_MAX: usize = 1 << 20;
/// Few, because a path may have 4 KiB, and JSON may need six bytes for one of them.
const PATHS_PER_MESSAGE: usize = 4;
/// Maximum packet size in bytes. Reports and log lines are truncated before.
pub(super) const PACKET_BYTES_MAX: usize = 160 * 1024;
/// Maximum number of packets that wait for a peer which does not read. A bundle of 250,000 descriptors fits.
const OUTBOX_MAX: usize = 1024;
/// Pause of a link when the kernel has no memory for a packet, or too many descriptors are in flight.
const RETRY_PAUSE: Duration = Duration::from_millis(20);
/// Maximum length of a forwarded log line in bytes.
const LOG_LINE_BYTES_MAX: usize = 4096;

#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Message {
    /// A bundle begins; its memfd is attached.
    Bundle { protocol: u32, generation: u64, descriptors: usize },
    /// The next descriptors of the bundle.
    Descriptors,
    /// To the helper: build this. A bundle with the open resources precedes it.
    Build { request: BuildRequest },
    /// To the helper: the bundle has arrived.
    Taken,
    /// To the worker: drain and exit. `is_last`: no other process accepts on its sockets afterwards.
    Quit { is_last: bool },
    /// To the worker: pass idle connections to the attached socket. Precedes `Quit`.
    Successor,
    /// To the worker: take idle connections from the attached socket.
    Arrivals,
    /// To the worker: the attached socket is connected to the page cache helper.
    PageCacheHelper,
    /// To the worker: exit.
    Terminate,
    /// To the worker: poll the listening sockets, because connections may be queued that the kernel did not report to
    /// it.
    Look,
    /// To the worker: number of its predecessors that died and were replaced.
    Respawned { count: u64 },
    /// To the worker: send the statistics to the attached socket.
    Status,
    /// To the worker: use these secrets from now on. Also precedes the first bundle.
    Secrets { series: Vec<SecretSeries> },
    /// To the worker: the attached files replace these logs.
    Reopen { paths: Vec<LogPath> },
    /// From the worker: serving.
    Ready { generation: u64 },
    /// From the worker: it had no free descriptors for reopened logs; send them again.
    ReopenAgain,
    /// From the worker: the configuration is built and is being committed.
    Prepared { generation: u64 },
    /// From worker or helper: the configuration cannot be used.
    Refused { generation: u64, report: Report },
    /// From the worker: every loop uses the configuration, removed listeners are drained.
    Committed { generation: u64 },
    /// From the worker: it is about to stop accepting, and exits after its last connection.
    Leaving,
    /// From the worker: it has closed all its listening sockets.
    AcceptingEnded,
    /// From the worker: its last message.
    Ending,
    /// From the helper: a line for the master's log.
    Log { level: Level, message: String },
}

#[derive(Debug, Serialize, Deserialize)]
pub(super) struct LogPath(#[serde(with = "text::path")] pub PathBuf);

/// A complete message or bundle that has arrived.
pub(super) enum Received {
    Message(Message),
    Bundle(Box<Bundle>),
    /// A bundle arrived, but this process had no free descriptors for all of it (EMFILE).
    BundleLost {
        generation: u64,
    },
    Reopened(Vec<(PathBuf, OwnedFd)>),
    Successor(Successor),
    Arrivals(Arrivals),
    PageCacheHelper(OwnedFd),
    /// Like `BundleLost`, for reopened logs.
    ReopenedLost,
    /// The connection of a client that requests statistics; `None` if there was no free descriptor.
    Status(Option<OwnedFd>),
}

pub(super) struct Link {
    socket: OwnedFd,
    outbox: VecDeque<Packet>,
    /// Time of the next attempt after the kernel failed to take the first packet for a reason that poll(2) does not
    /// report.
    retry_at: Option<Instant>,
    incoming: Option<Incoming>,
    buffer: Vec<u8>,
}

struct Packet {
    bytes: Vec<u8>,
    descriptors: Vec<Arc<OwnedFd>>,
}

/// A bundle that has arrived in part.
struct Incoming {
    generation: u64,
    expected: usize,
    /// Messages with descriptors that have not arrived yet.
    batches: usize,
    /// `None` when something was lost: the remaining messages are only counted.
    contents: Option<(OwnedFd, Vec<OwnedFd>)>,
}

/// Descriptors attached to a packet.
struct Descriptors {
    arrived: Vec<OwnedFd>,
    /// True if this process had no free descriptors for all of them.
    truncated: bool,
}

impl Link {
    /// Returns a new link: our end, and the socket for the other process.
    pub fn pair() -> io::Result<(Link, OwnedFd)> {
        let (ours, theirs) =
            rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
        Ok((Link::new(ours), theirs))
    }

    /// Wraps the socket that a process was started with.
    pub fn new(socket: OwnedFd) -> Link {
        // As large as the system allows; the default already holds one packet.
        let _ = rustix::net::sockopt::set_socket_send_buffer_size(&socket, 4 * PACKET_BYTES_MAX);
        Link { socket, outbox: VecDeque::new(), retry_at: None, incoming: None, buffer: Vec::new() }
    }

    /// Sends a message, or queues it until the socket accepts it.
    ///
    /// # Errors
    /// The link is lost.
    pub fn send(&mut self, message: &Message) -> io::Result<()> {
        self.enqueue(message, Vec::new())?;
        self.flush()
    }

    /// Sends a message with the descriptor it refers to.
    ///
    /// # Errors
    /// The link is lost.
    pub fn send_with(&mut self, message: &Message, descriptor: &Arc<OwnedFd>) -> io::Result<()> {
        self.enqueue(message, vec![Arc::clone(descriptor)])?;
        self.flush()
    }

    /// Sends a message that is useless if delayed: it is dropped while earlier packets are queued, so that it takes no
    /// space from messages that must not be lost.
    ///
    /// The link is lost.
    /// The link is lost.
    pub fn send_unless_waiting(&mut self, message: &Message) -> io::Result<()> {
        if self.outbox.is_empty() { self.send(message) } else { Ok(()) }
    }

    /// Passes on the socket of a client that requests statistics; returns `false` while earlier packets are queued.
    ///
    /// The link is lost.
    /// The link is lost.
    pub fn send_status(&mut self, socket: OwnedFd) -> io::Result<bool> {
        if !self.outbox.is_empty() {
            return Ok(false);
        }
        self.enqueue(&Message::Status, vec![Arc::new(socket)])?;
        self.flush().map(|()| true)
    }

    /// Sends a log line, truncated to `LOG_LINE_BYTES_MAX`.
    pub fn send_log(&mut self, level: Level, message: &str) -> io::Result<()> {
        let end = message.char_indices().map(|(at, _)| at).take_while(|&at| at <= LOG_LINE_BYTES_MAX).last();
        let message = if message.len() > LOG_LINE_BYTES_MAX { &message[..end.unwrap_or(0)] } else { message };
        self.send(&Message::Log { level, message: message.to_owned() })
    }

    /// Sends a bundle with its generation.
    pub fn send_bundle(&mut self, bundle: &Bundle) -> io::Result<()> {
        let (memory, descriptors) = bundle.encode()?;
        // As a whole or not at all: a part is useless to the other process.
        self.make_room(1 + descriptors.len().div_ceil(DESCRIPTORS_PER_MESSAGE_MAX))?;
        let announcement = Message::Bundle {
            protocol: PROTOCOL_VERSION,
            generation: bundle.generation,
            descriptors: descriptors.len(),
        };
        self.enqueue(&announcement, vec![Arc::new(memory)])?;
        for batch in descriptors.chunks(DESCRIPTORS_PER_MESSAGE_MAX) {
            self.enqueue(&Message::Descriptors, batch.to_vec())?;
        }
        self.flush()
    }

    /// Sends reopened log files.
    pub fn send_reopened(&mut self, logs: &[LogHandle]) -> io::Result<()> {
        self.make_room(logs.len().div_ceil(PATHS_PER_MESSAGE))?;
        for batch in logs.chunks(PATHS_PER_MESSAGE) {
            let paths = batch.iter().map(|log| LogPath(log.path().to_owned())).collect();
            self.enqueue(&Message::Reopen { paths }, batch.iter().map(|log| Arc::clone(log.descriptor())).collect())?;
        }
        self.flush()
    }

    /// Returns the next message or bundle, or `None` if none is complete.
    ///
    /// # Errors
    /// `UnexpectedEof`: the peer is gone. Any other error: it violated the protocol. The link is lost in both cases.
    pub fn receive(&mut self) -> io::Result<Option<Received>> {
        loop {
            let Some((message, descriptors)) = self.receive_packet()? else {
                return Ok(None);
            };
            if let Some(received) = self.handle_packet(message, descriptors)? {
                return Ok(Some(received));
            }
        }
    }

    /// Sends queued packets until the socket accepts no more.
    pub fn flush(&mut self) -> io::Result<()> {
        use rustix::io::Errno;
        if self.retry_at.is_some_and(|at| at > Instant::now()) {
            return Ok(());
        }
        self.retry_at = None;
        while let Some(packet) = self.outbox.front() {
            match send_packet(&self.socket, packet) {
                Ok(()) => drop(self.outbox.pop_front()),
                Err(Errno::AGAIN) => break,
                Err(Errno::INTR) => {}
                Err(Errno::NOBUFS | Errno::NOMEM | Errno::TOOMANYREFS) => {
                    self.retry_at = Some(Instant::now() + RETRY_PAUSE);
                    break;
                }
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    /// Time to call `flush` even if poll(2) has reported nothing.
    pub fn retry_at(&self) -> Option<Instant> {
        self.retry_at
    }

    /// Events to poll this link for.
    pub fn interest(&self) -> PollFlags {
        let waits_for_room = !self.outbox.is_empty() && self.retry_at.is_none();
        if waits_for_room { PollFlags::IN | PollFlags::OUT } else { PollFlags::IN }
    }

    /// Waits for a message. Only for processes that have nothing else to do: the helper, and a worker process
    /// before its first bundle.
    pub fn wait(&mut self, deadline: Instant) -> io::Result<Received> {
        loop {
            self.flush()?;
            if let Some(received) = self.receive()? {
                return Ok(received);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(io::ErrorKind::TimedOut.into());
            }
            self.poll(self.interest(), left)?;
        }
    }

    /// Waits until everything is sent. For the helper, before it exits.
    pub fn drain(&mut self, deadline: Instant) -> io::Result<()> {
        loop {
            self.flush()?;
            if self.outbox.is_empty() {
                return Ok(());
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(io::ErrorKind::TimedOut.into());
            }
            self.poll(self.interest() & PollFlags::OUT, left)?;
        }
    }

    fn poll(&self, flags: PollFlags, left: Duration) -> io::Result<()> {
        let retry = self.retry_at.map_or(left, |at| at.saturating_duration_since(Instant::now()));
        poll_one(&self.socket, flags, left.min(retry))
    }

    fn enqueue(&mut self, message: &Message, descriptors: Vec<Arc<OwnedFd>>) -> io::Result<()> {
        let bytes = serde_json::to_vec(message)?;
        debug_assert!(bytes.len() <= PACKET_BYTES_MAX, "messages are cut to fit");
        if bytes.len() > PACKET_BYTES_MAX {
            return Err(io::Error::other("message too long for the link"));
        }
        self.make_room(1)?;
        self.outbox.push_back(Packet { bytes, descriptors });
        Ok(())
    }

    /// Checks that the outbox has space for so many packets. A peer that has read nothing for that long is treated as
    /// dead.
    fn make_room(&self, packets: usize) -> io::Result<()> {
        if self.outbox.len() + packets > OUTBOX_MAX {
            return Err(io::Error::other("the other process does not read its messages"));
        }
        Ok(())
    }

    fn receive_packet(&mut self) -> io::Result<Option<(Message, Descriptors)>> {
        self.buffer.resize(PACKET_BYTES_MAX, 0);
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_PER_MESSAGE_MAX))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
        let mut into = [IoSliceMut::new(&mut self.buffer)];
        let mut received = rustix::net::recvmsg(&self.socket, &mut into, &mut ancillary, flags);
        if matches!(received, Err(rustix::io::Errno::CONNRESET)) {
            // Reported once, before the peer's pending packets, when it has exited without reading all of ours.
            received = rustix::net::recvmsg(&self.socket, &mut into, &mut ancillary, flags);
        }
        let received = match received {
            Ok(received) => received,
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        let arrived: Vec<OwnedFd> = ancillary
            .drain()
            .filter_map(|message| match message {
                RecvAncillaryMessage::ScmRights(descriptors) => Some(descriptors),
                _ => None,
            })
            .flatten()
            .collect();
        if received.bytes == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        if received.flags.contains(ReturnFlags::TRUNC) {
            return Err(broken("packet too long"));
        }
        let message = serde_json::from_slice(&self.buffer[..received.bytes])?;
        // An idle link owns no buffer.
        self.buffer = Vec::new();
        let truncated = received.flags.contains(ReturnFlags::CTRUNC);
        Ok(Some((message, Descriptors { arrived, truncated })))
    }

    fn handle_packet(&mut self, message: Message, descriptors: Descriptors) -> io::Result<Option<Received>> {
        match (message, self.incoming.take()) {
            (Message::Bundle { protocol, generation, descriptors: expected }, None) => {
                if protocol != PROTOCOL_VERSION {
                    return Err(broken(&format!("protocol version {protocol}, expected {PROTOCOL_VERSION}")));
                }
                if expected > DESCRIPTORS_MAX {
                    return Err(broken("too many descriptors"));
                }
                let contents = match descriptors.arrived.into_iter().next() {
                    Some(memory) => Some((memory, Vec::new())),
                    None if descriptors.truncated => None,
                    None => return Err(broken("bundle without memory")),
                };
                let batches = expected.div_ceil(DESCRIPTORS_PER_MESSAGE_MAX);
                self.finish_bundle(Incoming { generation, expected, batches, contents })
            }
            (Message::Descriptors, Some(mut incoming)) => {
                incoming.batches -= 1;
                if descriptors.truncated {
                    incoming.contents = None;
                }
                if let Some((_, sockets_and_logs)) = &mut incoming.contents {
                    sockets_and_logs.extend(descriptors.arrived);
                }
                self.finish_bundle(incoming)
            }
            (Message::Descriptors, None) => Err(broken("descriptors without a bundle")),
            (_, Some(_)) => Err(broken("a bundle was cut short")),
            (Message::Reopen { .. }, None) if descriptors.truncated => Ok(Some(Received::ReopenedLost)),
            (Message::Reopen { paths }, None) if paths.len() == descriptors.arrived.len() => {
                let paths = paths.into_iter().map(|path| path.0);
                Ok(Some(Received::Reopened(paths.zip(descriptors.arrived).collect())))
            }
            // Losing it is harmless: connections are closed instead of being passed, or files are read by threads.
            (Message::Successor | Message::Arrivals | Message::PageCacheHelper, None) if descriptors.truncated => {
                Ok(None)
            }
            (message @ (Message::Successor | Message::Arrivals | Message::PageCacheHelper), None) => {
                let Some(socket) = descriptors.arrived.into_iter().next() else {
                    return Err(broken("a message without its descriptor"));
                };
                Ok(Some(match message {
                    Message::Successor => Received::Successor(Successor::new(socket)),
                    Message::PageCacheHelper => Received::PageCacheHelper(socket),
                    _ => Received::Arrivals(Arrivals::new(socket)),
                }))
            }
            (Message::Status, None) => Ok(Some(Received::Status(descriptors.arrived.into_iter().next()))),
            (Message::Reopen { .. }, None) => Err(broken("paths and descriptors differ in number")),
            (message, None) => Ok(Some(Received::Message(message))),
        }
    }

    fn finish_bundle(&mut self, incoming: Incoming) -> io::Result<Option<Received>> {
        if incoming.batches > 0 {
            self.incoming = Some(incoming);
            return Ok(None);
        }
        let generation = incoming.generation;
        let Some((memory, descriptors)) = incoming.contents else {
            return Ok(Some(Received::BundleLost { generation }));
        };
        if descriptors.len() != incoming.expected {
            return Err(broken("the number of descriptors is not the announced one"));
        }
        let mut bundle = Bundle::decode(memory, descriptors)?;
        bundle.generation = generation;
        Ok(Some(Received::Bundle(Box::new(bundle))))
    }
}

impl AsFd for Link {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

fn send_packet(socket: &OwnedFd, packet: &Packet) -> rustix::io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_PER_MESSAGE_MAX))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    let descriptors: Vec<BorrowedFd<'_>> = packet.descriptors.iter().map(|descriptor| descriptor.as_fd()).collect();
    if !descriptors.is_empty() {
        let fits = ancillary.push(SendAncillaryMessage::ScmRights(&descriptors));
        assert!(fits, "a batch fits into a message");
    }
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    rustix::net::sendmsg(socket, &[IoSlice::new(&packet.bytes)], &mut ancillary, flags)?;
    Ok(())
}

pub(super) fn poll_one(descriptor: &impl AsFd, flags: PollFlags, timeout: std::time::Duration) -> io::Result<()> {
    let timeout = super::signals::timespec(timeout);
    match rustix::event::poll(&mut [PollFd::new(descriptor, flags)], Some(&timeout)) {
        Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

fn broken(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("broken message on the link: {what}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bundle::Record;
    use crate::log_file::LogFile;
    use crate::settings::ProcessSettings;
    use std::time::Duration;

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(10)
    }

    #[test]
    fn three_hundred_descriptors_arrive_in_order() {
        let (mut ours, theirs) = Link::pair().expect("a socket pair");
        let mut theirs = Link::new(theirs);
        let log = |index: usize| {
            let name = format!("log {index}");
            let memory = rustix::fs::memfd_create(&name, rustix::fs::MemfdFlags::CLOEXEC).expect("a memfd");
            rustix::io::write(&memory, name.as_bytes()).expect("written");
            Arc::new(LogFile::shared(format!("/log/{index}").into(), Arc::new(memory)))
        };
        let record = Record { logs: (0..300).map(log).collect(), ..Record::default() };
        let bundle =
            Bundle { generation: 7, request: BuildRequest::default(), settings: ProcessSettings::default(), record };
        ours.send_bundle(&bundle).expect("sent");
        drop(bundle);
        let Received::Bundle(arrived) = theirs.wait(soon()).expect("arrives") else { panic!("not a bundle") };
        assert_eq!((arrived.generation, arrived.record.logs.len()), (7, 300));
        for (index, log) in arrived.record.logs.iter().enumerate() {
            let mut text = [0; 16];
            let length = rustix::io::pread(log, &mut text, 0).expect("read");
            assert_eq!(&text[..length], format!("log {index}").as_bytes());
        }
    }

    #[test]
    fn a_lost_peer_is_noticed_and_a_silent_one_is_not_waited_for() {
        let (mut ours, theirs) = Link::pair().expect("a socket pair");
        assert!(ours.receive().expect("alive").is_none());
        let mut sent = 0;
        while ours.send_log(Level::Notice, &"x".repeat(100_000)).is_ok() {
            sent += 1;
        }
        assert!(sent >= OUTBOX_MAX, "the outbox is filled before the link is given up");
        drop(theirs);
        assert!(ours.receive().is_err());
    }

    #[test]
    fn short_lived_messages_do_not_fill_the_link_of_a_peer_that_does_not_read() {
        let (mut ours, theirs) = Link::pair().expect("a socket pair");
        while ours.outbox.is_empty() {
            ours.send_unless_waiting(&Message::Look).expect("the peer lives");
        }
        for _ in 0..2 * OUTBOX_MAX {
            ours.send_unless_waiting(&Message::Look).expect("the peer lives");
        }
        assert_eq!(ours.outbox.len(), 1);
        ours.send(&Message::Terminate).expect("there is room");
        let mut theirs = Link::new(theirs);
        loop {
            match theirs.wait(soon()).expect("arrives") {
                Received::Message(Message::Look) => ours.flush().expect("the peer lives"),
                Received::Message(Message::Terminate) => break,
                _ => panic!("not sent"),
            }
        }
    }

    #[test]
    fn status_request_is_passed_on_unless_the_peer_does_not_read() {
        let socket = || rustix::fs::memfd_create("socket", rustix::fs::MemfdFlags::CLOEXEC).expect("a memfd");
        let (mut ours, theirs) = Link::pair().expect("a socket pair");
        let mut theirs = Link::new(theirs);
        assert!(ours.send_status(socket()).expect("the peer lives"));
        assert!(matches!(theirs.wait(soon()).expect("arrives"), Received::Status(Some(_))));
        while ours.outbox.is_empty() {
            ours.send_unless_waiting(&Message::Look).expect("the peer lives");
        }
        assert!(!ours.send_status(socket()).expect("the peer lives"));
        assert_eq!(ours.outbox.len(), 1);
    }

    #[test]
    fn a_bundle_is_queued_as_a_whole_or_not_at_all() {
        let (mut ours, theirs) = Link::pair().expect("a socket pair");
        while ours.send_log(Level::Notice, &"x".repeat(4000)).is_ok() && ours.outbox.len() + 1 < OUTBOX_MAX {}
        let waiting = ours.outbox.len();
        let memory = || rustix::fs::memfd_create("log", rustix::fs::MemfdFlags::CLOEXEC).expect("a memfd");
        let log = |index| Arc::new(LogFile::shared(format!("/log/{index}").into(), Arc::new(memory())));
        let record = Record { logs: (0..2).map(log).collect(), ..Record::default() };
        let bundle =
            Bundle { generation: 7, request: BuildRequest::default(), settings: ProcessSettings::default(), record };
        assert!(ours.send_bundle(&bundle).is_err());
        assert_eq!(ours.outbox.len(), waiting);
        drop(theirs);
    }

    #[test]
    fn descriptors_without_a_bundle_break_the_link() {
        let (mut ours, theirs) = Link::pair().expect("a socket pair");
        ours.send(&Message::Descriptors).expect("sent");
        assert!(Link::new(theirs).wait(soon()).is_err());
    }
}
