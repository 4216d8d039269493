//! The output queue of a connection: bytes in memory, behind them pieces of files, and the items behind these.
//!
//! ```text
//!   push, append ──► items ──fill──► output ──► socket
//!                      │  what was read of a file ▲
//!                      └─ sendfile ───────────────┴─► socket, when the output is empty
//! ```
//!
//! The queue knows nothing of framing: the caller pushes the bytes before and behind an item. The queue sends in
//! [`OutputQueue::poll_sent`], counts the bytes that have left, and gives up when the client takes nothing for
//! `send_timeout`. The ladder (`files/delivery.rs`) chooses the way of a piece of a file to the socket.

pub(super) mod body_queue;
mod items;
mod patience;

use std::io;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use gale_runtime::{Lease, Output, Stream};
use gale_tls::Transport;

use self::items::Items;
use self::patience::Patience;
use crate::files::delivery::{FileError, FileOptions};
use crate::request::body::{BodyError, BodyItem};
use crate::request::exchange::{Gone, Sent};

/// Bytes up to this length are copied behind others.
pub(super) const COPIED_MAX: usize = 4 * 1024;

/// Least size of a file for which packets leave only when they are full (`TCP_CORK`), until the file and the bytes
/// behind it are sent. Otherwise each acknowledgement sends off a packet that is not full, which costs a tenth on
/// loopback. Smaller files lose less by that than the two calls cost.
const CORKED_FROM: u64 = 128 * 1024;

/// Fate of the connection after a response, as far as sending is concerned.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Ending {
    /// The connection stays open. The time at which the last byte leaves does not matter.
    Stays,
    /// The connection is closed at once: its end goes with the last byte.
    Closes,
    /// A later step waits until all has left for certain.
    #[default]
    Waits,
}

/// Progress of the response that is being queued.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Stage {
    /// It has not begun: there are interim responses at most.
    #[default]
    Before,
    /// More will be queued.
    Open,
    /// Nothing more will be queued.
    Ended(Ending),
}

/// See the file's head.
#[derive(Default)]
pub(super) struct OutputQueue {
    /// Bytes in memory: in a box, as the items are and for the same reasons.
    output: Option<Box<Output>>,
    /// So many bytes at the beginning of `output` belong to responses before, and were counted when these were held.
    earlier_bytes: usize,
    /// Items behind `output`. The first one is a piece of a file.
    items: Items,
    is_corked: bool,
    /// The queue must not wait for more.
    flushes: bool,
    stage: Stage,
    /// The socket was given bytes that were queued since the exchange began, or since the last interim response.
    has_left: bool,
    sent: Sent,
    patience: Patience,
    gone: Option<Gone>,
    /// Reason for which the response could not be completed.
    failure: Option<Box<BodyError>>,
    /// Memory is given back as soon as it is empty: nothing is queued for long.
    is_thrifty: bool,
}

/// Filling.
impl OutputQueue {
    /// The response's head follows.
    pub(super) fn begin(&mut self, send_timeout: Duration) {
        self.stage = Stage::Open;
        self.patience.set(send_timeout);
    }

    /// Sets the delivery of files, and the bytes that are gathered before they are sent.
    pub(super) fn set_files(&mut self, files: &FileOptions, stream: &Transport) {
        self.items.set_files(FileOptions { sendfile: files.sendfile && stream.can_sendfile(), ..files.clone() });
    }

    /// Queues a copy of these bytes.
    pub(super) fn append(&mut self, text: &[u8]) {
        if !self.items.is_empty() {
            self.items.append(text);
        } else if self.output().append(text).is_err() {
            // No memory within the worker's bound: the response cannot be completed.
            self.abort();
        }
    }

    /// Queues the bytes or the piece of a file that an item stands for.
    pub(super) fn push(&mut self, item: BodyItem) {
        if !self.items.is_empty() {
            return self.items.push(item);
        }
        match item {
            BodyItem::Bytes(bytes) if bytes.len() <= COPIED_MAX => self.append(&bytes),
            BodyItem::Bytes(bytes) => self.output().push(bytes),
            item @ BodyItem::File(_) => self.items.push(item),
            BodyItem::Flush | BodyItem::Trailers(_) => {}
            BodyItem::Subrequest(_) => unreachable!("`postpone` takes them out"),
        }
    }

    /// Queues responses that were counted as sent when they were held, before everything else, of which there is
    /// nothing yet.
    pub(super) fn push_earlier(&mut self, held: Lease) {
        debug_assert!(self.is_empty());
        self.earlier_bytes = held.len();
        self.output().push(held.freeze());
        self.has_left = true;
    }

    /// The queue must not wait for more.
    pub(super) fn flush(&mut self) {
        self.flushes = true;
    }

    /// Keeps no memory while nothing is queued: there will be nothing to send most of the time, and no files.
    pub(super) fn be_thrifty(&mut self) {
        self.is_thrifty = true;
        self.items.shrink();
    }

    /// Nothing more will be queued.
    pub(super) fn end(&mut self, ending: Ending) {
        self.stage = Stage::Ended(ending);
    }

    /// All of a response was given to the socket, or is held, past the queue: `count` bytes of it.
    pub(super) fn note_past(&mut self, count: usize) {
        self.sent.bytes += count as u64;
        self.has_left = true;
    }

    /// Notes the length of the head, which is the first part of the response.
    pub(super) fn note_head(&mut self, count: usize) {
        self.sent.head_bytes = count as u64;
    }

    /// The response is broken off.
    pub(super) fn abort(&mut self) {
        self.give_up(Gone::Aborted);
    }

    /// The client has gone. The kernel's error is of no further use.
    pub(super) fn fail(&mut self) {
        // The responses before cannot be sent either.
        self.earlier_bytes = 0;
        self.give_up(Gone::ByPeer);
    }

    fn give_up(&mut self, gone: Gone) {
        self.gone.get_or_insert(gone);
        if self.stage == Stage::Ended(Ending::Stays) {
            self.stage = Stage::Ended(Ending::Waits);
        }
    }
}

/// Queries.
impl OutputQueue {
    /// Returns `true` if the response's head was queued.
    pub(super) fn is_begun(&self) -> bool {
        self.stage != Stage::Before
    }

    pub(super) fn is_ended(&self) -> bool {
        matches!(self.stage, Stage::Ended(_))
    }

    /// Returns `true` if nothing is queued.
    pub(super) fn is_empty(&self) -> bool {
        self.output_bytes() == 0 && self.items.is_empty()
    }

    /// Returns `true` if everything has left, to the last byte.
    pub(super) fn is_complete(&self) -> bool {
        self.is_ended() && self.gone.is_none() && self.is_empty()
    }

    /// Returns `true` if nothing is left of any exchange.
    pub(super) fn is_at_rest(&self) -> bool {
        self.gone.is_none() && self.is_empty() && !self.items.is_reading()
    }

    /// Returns `true` if responses before this one have not left.
    pub(super) fn has_earlier(&self) -> bool {
        self.earlier_bytes > 0
    }

    pub(super) fn gone(&self) -> Option<Gone> {
        self.gone
    }

    pub(super) fn sent(&self) -> Sent {
        self.sent
    }

    /// Total wait for a disk with nothing else to send.
    pub(super) fn disk_waited(&self) -> Duration {
        self.items.disk_waited()
    }

    /// Number of bytes in the queue.
    pub(super) fn queued_bytes(&self) -> u64 {
        self.output_bytes() as u64 + self.items.length()
    }

    /// The error of a file because of which the response could not be completed.
    pub(super) fn take_failure(&mut self) -> Option<BodyError> {
        self.failure.take().map(|failure| *failure)
    }

    /// The response cannot be completed: notes the error, to be asked for by [`OutputQueue::take_refused`]; or gives it
    /// back when it is not such a one.
    pub(super) fn refuse(&mut self, error: BodyError) -> Result<(), BodyError> {
        if self.has_left || !matches!(error, BodyError::Overloaded(_)) {
            return Err(error);
        }
        self.failure = Some(Box::new(error));
        self.abort();
        Ok(())
    }

    /// Returns `true` if the response broke off because the server is too busy to read a file, and nothing of it has
    /// left.
    pub(super) fn is_refused(&self) -> bool {
        matches!(self.failure.as_deref(), Some(BodyError::Overloaded(_)))
            && self.gone == Some(Gone::Aborted)
            && !self.has_left
    }

    /// Forgets such a response, so that another one may be begun. Returns the error.
    pub(super) fn take_refused(&mut self) -> Option<BodyError> {
        if !self.is_refused() {
            return None;
        }
        let error = self.take_failure()?;
        let sent = self.sent;
        self.clear();
        self.patience.clear();
        self.gone = None;
        self.rest();
        self.sent = sent;
        Some(error)
    }

    /// Forgets an exchange that has ended and has nothing left to be sent, with the state of its configuration.
    pub(super) fn rest(&mut self) {
        self.stage = Stage::Before;
        self.has_left = false;
        self.sent = Sent::default();
        self.patience.stop();
        self.items.forget_files();
        self.flushes = false;
        self.failure = None;
        self.is_thrifty = false;
    }

    fn output(&mut self) -> &mut Output {
        self.output.get_or_insert_default()
    }

    /// Number of bytes in memory.
    fn output_bytes(&self) -> usize {
        self.output.as_ref().map_or(0, |output| output.len_bytes())
    }

    fn clear(&mut self) {
        if let Some(output) = &mut self.output {
            output.clear();
        }
        self.earlier_bytes = 0;
        self.items.clear();
    }
}

/// Sending.
impl OutputQueue {
    /// As [`OutputQueue::poll_sent`], until no more than `low_water` bytes are left. Bytes that may wait for the next
    /// item are not sent for that, and packets that are not full wait for it: a caller that has no item calls
    /// `poll_sent`.
    pub(super) fn poll_ready(
        &mut self,
        low_water: u64,
        stream: &Transport,
        context: &mut Context<'_>,
    ) -> Poll<Result<(), Gone>> {
        if self.may_gather() {
            return Poll::Ready(Ok(()));
        }
        match self.poll_emptied(stream, context) {
            Poll::Pending if self.queued_bytes() <= low_water => Poll::Ready(Ok(())),
            emptied => emptied,
        }
    }

    /// Returns `true` if so little is queued that it may wait for the next item.
    fn may_gather(&self) -> bool {
        let postponed_bytes = self.items.postponed_bytes();
        self.gone.is_none() && !self.flushes && self.items.is_empty() && (self.output_bytes() as u64) < postponed_bytes
    }

    /// Sends the queue. Ready when all of it has left.
    pub(super) fn poll_sent(&mut self, stream: &Transport, context: &mut Context<'_>) -> Poll<Result<(), Gone>> {
        let emptied = ready!(self.poll_emptied(stream, context));
        self.uncork(stream);
        Poll::Ready(emptied)
    }

    /// As [`OutputQueue::poll_sent`], but the last packet may wait until it is full.
    fn poll_emptied(&mut self, stream: &Transport, context: &mut Context<'_>) -> Poll<Result<(), Gone>> {
        self.items.look_anew();
        loop {
            // The responses before are good, whatever becomes of this one.
            let is_earlier = self.earlier_bytes > 0;
            if let Some(gone) = self.gone
                && !(is_earlier && gone == Gone::Aborted)
            {
                self.clear();
                return Poll::Ready(Err(gone));
            }
            if !is_earlier && self.output_bytes() == 0 && self.items.waits_for_room() {
                match stream.plain().map_or(Poll::Ready(Ok(())), |stream| stream.poll_writable(context)) {
                    Poll::Ready(Ok(())) => self.patience.stop(),
                    Poll::Ready(Err(_)) => {
                        self.fail();
                        continue;
                    }
                    Poll::Pending => {
                        self.note_full(stream);
                        return self.poll_patience(context);
                    }
                }
            }
            if !is_earlier {
                ready!(self.items.poll_budget(self.output_bytes(), context));
                if !self.items.is_empty()
                    && let Err(error) = self.items.fill(self.output.get_or_insert_default())
                {
                    self.fail_with_file(error);
                    continue;
                }
            }
            if !is_earlier
                && self.items.is_reading()
                && let Poll::Ready(result) = self.items.poll_reading(self.output.get_or_insert_default(), context)
            {
                self.patience.stop();
                if let Err(error) = result {
                    self.fail_with_file(error);
                }
                continue;
            }
            if self.is_empty() {
                self.has_left &= self.is_begun();
                self.flushes = false;
                self.patience.clear();
                if self.is_thrifty {
                    self.output = None;
                }
                return Poll::Ready(Ok(()));
            }
            if self.output_bytes() == 0 && self.items.is_reading() {
                self.uncork(stream);
                ready!(self.poll_gone_meanwhile(stream, context));
                self.fail();
                continue;
            }
            self.has_left = true;
            match self.poll_send(stream, context) {
                Poll::Ready(Ok(count)) => self.note_sent(count),
                Poll::Ready(Err(FileError::OfFile(error))) => self.fail_with_file(error),
                Poll::Ready(Err(FileError::OfSocket)) => self.fail(),
                Poll::Pending => {
                    self.note_full(stream);
                    return self.poll_patience(context);
                }
            }
            self.patience.stop();
        }
    }

    /// A send waits. In the clear, a full socket means that the client is slow; of TLS this cannot be told here.
    fn note_full(&mut self, stream: &Transport) {
        if stream.plain().is_some_and(Stream::is_full) {
            self.items.note_full();
        }
    }

    /// Gives the socket the next bytes.
    fn poll_send(&mut self, stream: &Transport, context: &mut Context<'_>) -> Poll<Result<usize, FileError>> {
        let Some(output) = self.output.as_deref_mut().filter(|output| !output.is_empty()) else {
            return self.poll_sendfile(stream, context);
        };
        let more_follows = match self.items.is_empty() {
            // Closing follows, and sends the end in the same packet.
            true => self.stage == Stage::Ended(Ending::Closes),
            // The head leaves with the file that follows at once; `tcp_nopush`: it waits for one that is being read.
            false => self.items.is_followed(),
        };
        // The last bytes of a response: the time at which they leave does not matter.
        if let Stage::Ended(ending @ (Ending::Stays | Ending::Closes)) = self.stage
            && self.items.is_empty()
        {
            match stream.try_send(output, ending == Ending::Closes) {
                Ok(0) => {}
                Ok(count) => return Poll::Ready(Ok(count)),
                Err(_) => return Poll::Ready(Err(FileError::OfSocket)),
            }
        }
        output.set_more_follows(more_follows);
        stream.poll_send(context, output).map_err(|_| FileError::OfSocket)
    }

    /// Sends on from the file behind the output, which is empty.
    fn poll_sendfile(&mut self, stream: &Transport, context: &mut Context<'_>) -> Poll<Result<usize, FileError>> {
        if !self.is_corked && self.items.first_length() >= CORKED_FROM {
            // A Unix socket has no cork: the result is the same, and less quick.
            let _ = stream.set_cork(true);
            self.is_corked = true;
        }
        self.items.poll_sendfile(stream, context)
    }

    /// Lets a packet leave that is not full.
    fn uncork(&mut self, stream: &Transport) {
        if std::mem::take(&mut self.is_corked) {
            // Only a connection that has failed refuses, and has nothing left to send.
            let _ = stream.set_cork(false);
        }
    }

    /// Counts bytes that have left, except those that were counted when they were held.
    fn note_sent(&mut self, count: usize) {
        let earlier = count.min(self.earlier_bytes);
        self.earlier_bytes -= earlier;
        self.sent.bytes += (count - earlier) as u64;
        if earlier > 0 && earlier == count && self.earlier_bytes == 0 {
            // Nothing of this response has gone with them.
            self.has_left = false;
        }
    }

    /// `send_timeout` runs while the client takes nothing.
    fn poll_patience(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Gone>> {
        // An interim response has no timeout of its own: none is known before the head, and the wait for the client's
        // body or for the handler has one. Earlier responses have that of the last of them.
        if !self.is_begun() && self.earlier_bytes == 0 {
            return Poll::Pending;
        }
        ready!(self.patience.poll_ended(context));
        self.gone = Some(Gone::SendTimedOut);
        self.clear();
        Poll::Ready(Err(Gone::SendTimedOut))
    }

    /// The client is not at fault for a slow disk. But after `send_timeout`, a client that has closed its side is not
    /// waited for any more: the disk may never answer. Before that, it may only have ended its own direction.
    fn poll_gone_meanwhile(&mut self, stream: &Transport, context: &mut Context<'_>) -> Poll<()> {
        if !self.is_begun() {
            return Poll::Pending;
        }
        ready!(self.patience.poll_ended(context));
        stream.poll_peer_closed(context)
    }

    /// The server is at fault, not the client: a disk, or a file that has changed.
    fn fail_with_file(&mut self, error: io::Error) {
        self.failure = Some(Box::new(BodyError::of_file(self.items.first_name(), error)));
        self.abort();
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;
    use std::io::Read;
    use std::net::{TcpListener, TcpStream};
    use std::os::unix::net::UnixStream;

    use gale_files::File;
    use gale_runtime::{DriverChoice, EventLoop, LoopOptions, yield_now};
    use rustix::net::sockopt;

    use super::*;
    use crate::files::FilePiece;
    use crate::files::delivery::ReadWay;

    #[test]
    fn response_given_up_behind_others_ends_when_their_client_has_gone() {
        for driver in [DriverChoice::Epoll, DriverChoice::IoUring] {
            let mut event_loop = EventLoop::new(LoopOptions { driver, ..LoopOptions::default() }).expect("a loop");
            let ended = event_loop.run(async {
                let (near, client) = UnixStream::pair().expect("descriptors");
                near.set_nonblocking(true).expect("a socket");
                let stream = Transport::Plain(Stream::from_fd(near.into()).expect("a socket"));
                let mut queue = OutputQueue::default();
                queue.push_earlier(Lease::copy_of(b"the response before").expect("memory"));
                queue.begin(Duration::from_secs(60));
                queue.abort();
                drop(client);
                for _ in 0..10 {
                    let polled = poll_fn(|context| Poll::Ready(queue.poll_sent(&stream, context))).await;
                    if let Poll::Ready(ended) = polled {
                        return Some(ended);
                    }
                    yield_now().await;
                }
                None
            });
            assert!(matches!(ended, Some(Err(Gone::Aborted))), "{driver:?}");
        }
    }

    #[test]
    fn a_connection_stays_corked_between_pieces_of_files_that_follow_at_once() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let client = TcpStream::connect(listener.local_addr().expect("an address")).expect("it listens");
        let server = listener.accept().expect("it has connected").0;
        let looked_at = server.try_clone().expect("a descriptor");
        let is_corked = || sockopt::tcp_cork(&looked_at).expect("a TCP socket");
        let reader =
            std::thread::spawn(move || std::io::copy(&mut (&client).take(3 * CORKED_FROM), &mut std::io::sink()));
        let path = std::env::temp_dir().join(format!("gale-output-{}", std::process::id()));
        std::fs::write(&path, vec![b'x'; 2 * CORKED_FROM as usize]).expect("room");
        let file = std::fs::File::open(&path).expect("it was written");
        std::fs::remove_file(&path).expect("it is there");
        EventLoop::new(LoopOptions::default()).expect("a loop").run(async {
            let stream = Transport::Plain(Stream::from_fd(server.into()).expect("a socket"));
            let file = File::from_std(file).expect("a file");
            let mut queue = OutputQueue::default();
            queue.begin(Duration::from_secs(60));
            // The speed of the disk does not matter.
            queue.set_files(&FileOptions { sendfile: true, way: ReadWay::Blocking, ..FileOptions::default() }, &stream);
            for offset in [0, CORKED_FROM] {
                queue.push(BodyItem::File(FilePiece { file: file.clone(), offset, length: CORKED_FROM }));
                poll_fn(|context| queue.poll_ready(0, &stream, context)).await.expect("the client reads");
                assert!(queue.is_empty() && is_corked(), "{offset}");
            }
            // Nothing follows yet.
            poll_fn(|context| queue.poll_sent(&stream, context)).await.expect("the client reads");
            assert!(!is_corked());
        });
        drop(looked_at);
        assert_eq!(reader.join().expect("no panic").expect("it reads"), 2 * CORKED_FROM);
    }
}
