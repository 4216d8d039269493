//! Scripted peers: they send and read on one end of a connection, and record the result.
//!
//! A peer reads and sends at the same time, following its script, until the connection has ended for it. It has the
//! patience of its script: if it waits, it does so until the other end gives up.

use std::cell::{Cell, RefCell};
use std::future::{Future, poll_fn};
use std::io;
use std::pin::pin;
use std::rc::Rc;
use std::task::Poll;
use std::time::Duration;

use crate::memory::bytes::Bytes;

use super::random::Random;
use crate::environment::now;
use crate::memory::buffer::Buffer;
use crate::memory::output::Output;
use crate::net::Stream;
use crate::socket::SocketAddress;
use crate::time::{Moment, sleep};

/// Bytes received at once.
const RECEIVE_MAX: usize = 16 * 1024;

/// Returns true for the received bytes that a peer waits for.
pub type Expectation = Rc<dyn Fn(&[u8]) -> bool>;

/// One step of sending.
#[derive(Clone)]
pub enum Sending {
    /// These bytes at once.
    Bytes(Bytes),
    /// These bytes in pieces of at most this size, with random pauses up to this length between some of them.
    Pieces(Bytes, usize, Duration),
    /// Nothing for a while.
    Pause(Duration),
    /// Nothing until all received bytes satisfy this, or the connection has ended.
    Await(Expectation),
    /// Shuts down the write side; reading goes on.
    ShutDown,
    /// Closes the connection, even with unread data.
    Close,
    /// Resets the connection.
    Reset,
}

/// The way in which a peer reads.
#[derive(Clone, Copy, Debug)]
pub enum Reading {
    /// Everything at once.
    Eagerly,
    /// At most this many bytes at once, with pauses of this length.
    Slowly(usize, Duration),
    /// This many bytes, and the rest only after the script has ended.
    Until(usize),
}

/// A script.
#[derive(Clone)]
pub struct Peer {
    /// Steps of sending, one after another. After the last one the peer reads until the other end closes the
    /// connection.
    pub sends: Vec<Sending>,
    /// The way it reads meanwhile.
    pub reads: Reading,
    /// Time after which it gives up and closes.
    pub patience: Duration,
}

/// The end of a connection, as seen by a peer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PeerEnd {
    /// The other end has closed it or shut down its write side. (A reset is reported once, perhaps only to a send in
    /// flight.)
    Closed,
    /// The other end or the network has reset it.
    Reset,
    /// This peer has closed or reset it, as its script says.
    Left,
    /// Its patience ran out.
    GaveUp,
}

/// The record of a peer.
#[derive(Clone, Debug)]
pub struct Transcript {
    /// All received bytes.
    pub received: Vec<u8>,
    /// Time of the last received byte; the beginning if there was none.
    pub last_received: Moment,
    /// Number of the script's bytes that were offered to the connection. The last piece may have left in part, and the
    /// size of that part is unknown.
    pub offered: usize,
    /// The end of the connection.
    pub end: PeerEnd,
    /// Its time.
    pub ended: Moment,
    /// Time at which the last step of the script was done; `None` if it never was.
    pub scripted: Option<Moment>,
    /// The peer's own address.
    pub local: SocketAddress,
}

impl Peer {
    /// A peer that sends these steps and reads eagerly.
    pub fn new(sends: Vec<Sending>) -> Peer {
        Peer { sends, reads: Reading::Eagerly, patience: Duration::from_secs(3600) }
    }

    /// Plays the script on a connection.
    pub async fn play(&self, stream: Stream, random: &Random) -> Transcript {
        let local = stream.local_address().expect("a simulated connection knows its addresses");
        let scene = Scene {
            stream: &stream,
            random,
            received: RefCell::default(),
            last_received: Cell::new(now()),
            offered: Cell::new(0),
            end: Cell::new(None),
            scripted: Cell::new(None),
            is_sending: Cell::new(true),
            is_broken: Cell::new(false),
        };
        let end = {
            let mut sender = pin!(scene.send(&self.sends));
            let mut reader = pin!(scene.read(self.reads));
            let mut patience = pin!(sleep(self.patience));
            let mut is_done = (false, false);
            poll_fn(|cx| {
                if !is_done.1 && reader.as_mut().poll(cx).is_ready() {
                    is_done.1 = true;
                }
                if !is_done.0 && sender.as_mut().poll(cx).is_ready() {
                    is_done.0 = true;
                    scene.is_sending.set(false);
                    // Wakes a reader that waited for the end of the script.
                    cx.waker().wake_by_ref();
                }
                match scene.end.get() {
                    // A reset is reported once: if the sender has seen it, the reader sees an end.
                    Some(PeerEnd::Closed) if scene.is_broken.get() => return Poll::Ready(PeerEnd::Reset),
                    Some(end) if is_done.1 || matches!(end, PeerEnd::Left) => return Poll::Ready(end),
                    _ => {}
                }
                patience.as_mut().poll(cx).map(|()| PeerEnd::GaveUp)
            })
            .await
        };
        let (received, last_received) = (scene.received.take(), scene.last_received.get());
        let (offered, scripted) = (scene.offered.get(), scene.scripted.get());
        if end == PeerEnd::Left && self.sends.iter().any(|step| matches!(step, Sending::Reset)) {
            // Fails only if the connection has gone already.
            let _ = stream.set_linger_reset();
        }
        drop(stream);
        Transcript { received, last_received, offered, end, ended: now(), scripted, local }
    }
}

/// A peer that is playing its script.
struct Scene<'p> {
    stream: &'p Stream,
    random: &'p Random,
    received: RefCell<Vec<u8>>,
    last_received: Cell<Moment>,
    offered: Cell<usize>,
    end: Cell<Option<PeerEnd>>,
    scripted: Cell<Option<Moment>>,
    is_sending: Cell<bool>,
    /// A send has failed.
    is_broken: Cell<bool>,
}

impl Scene<'_> {
    async fn send(&self, steps: &[Sending]) {
        for step in steps {
            let sent = match step {
                Sending::Bytes(bytes) => self.send_bytes(bytes.clone()).await,
                Sending::Pieces(bytes, max, pause) => self.send_pieces(bytes.clone(), *max, *pause).await,
                Sending::Pause(time) => {
                    sleep(*time).await;
                    Ok(())
                }
                Sending::Await(is_expected) => {
                    self.wait_for(&**is_expected).await;
                    Ok(())
                }
                Sending::ShutDown => self.stream.shutdown_write(),
                Sending::Close | Sending::Reset => return self.end.set(Some(PeerEnd::Left)),
            };
            // The reader ends the script.
            if sent.is_err() {
                return self.is_broken.set(true);
            }
        }
        self.scripted.set(Some(now()));
    }

    async fn wait_for(&self, is_expected: &dyn Fn(&[u8]) -> bool) {
        let mut looked_at = None;
        // The reader is part of the same task: whenever it has received something, this is polled too.
        poll_fn(|_| {
            let received = self.received.borrow();
            let is_new = looked_at.replace(received.len()) != Some(received.len());
            if self.end.get().is_some() || is_new && is_expected(&received) { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
    }

    async fn send_bytes(&self, bytes: Bytes) -> io::Result<()> {
        self.offered.set(self.offered.get() + bytes.len());
        let mut output = Output::new();
        output.push(bytes);
        self.stream.send_all(&mut output).await
    }

    async fn send_pieces(&self, mut bytes: Bytes, max: usize, pause: Duration) -> io::Result<()> {
        while !bytes.is_empty() {
            let piece = bytes.split_to(self.random.up_to(bytes.len().min(max)));
            self.send_bytes(piece).await?;
            if self.random.chance(300) {
                sleep(Duration::from_nanos(self.random.below(pause.as_nanos() as u64 + 1))).await;
            }
        }
        Ok(())
    }

    async fn read(&self, reading: Reading) {
        let mut input = Buffer::new();
        loop {
            let max = match reading {
                Reading::Eagerly => RECEIVE_MAX,
                Reading::Slowly(max, pause) => {
                    sleep(pause).await;
                    max
                }
                Reading::Until(length) => {
                    let left = length.saturating_sub(self.received.borrow().len());
                    if left == 0 {
                        poll_fn(|_| if self.is_sending.get() { Poll::Pending } else { Poll::Ready(()) }).await;
                    }
                    if left == 0 { RECEIVE_MAX } else { left.min(RECEIVE_MAX) }
                }
            };
            match self.stream.recv(&mut input, max).await {
                Ok(0) => return self.ends(PeerEnd::Closed),
                Err(_) => return self.ends(PeerEnd::Reset),
                Ok(_) => {
                    self.received.borrow_mut().extend(input.readable());
                    self.last_received.set(now());
                }
            }
            input.consume(input.len());
        }
    }

    fn ends(&self, end: PeerEnd) {
        if self.end.get().is_none() {
            self.end.set(Some(end));
        }
    }
}
