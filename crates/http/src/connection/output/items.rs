//! Items that wait behind the bytes in memory, and the reading of files.

use std::collections::VecDeque;
use std::io;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use gale_runtime::{Bytes, Moment, Output, poll_copy};
use gale_tls::Transport;

use crate::files::FilePiece;
use crate::files::delivery::{Delivery, FileError, FileOptions, Next};
use crate::request::body::BodyItem;

/// Bytes in memory are moved to the output until so many are there.
const OUTPUT_BYTES: usize = 64 * 1024;

/// See the file's head. The first one is a piece of a file.
///
/// They are in a box, which is there from the first response on that has any. Connections use it again, and tunnels and
/// many others have none.
#[derive(Default)]
pub(super) struct Items(Option<Box<Held>>);

#[derive(Default)]
struct Held {
    queue: VecDeque<BodyItem>,
    /// Delivery of the pieces of files.
    delivery: Delivery,
    /// Bytes of the first piece that go by `sendfile` when the output is empty, as found in this poll.
    sendfile_bytes: u64,
    disk_wait: DiskWait,
}

/// Waits for a disk with nothing else to send.
#[derive(Default)]
struct DiskWait {
    since: Option<Moment>,
    waited: Duration,
}

impl DiskWait {
    fn begin(&mut self) {
        self.since.get_or_insert_with(gale_runtime::now);
    }

    fn end(&mut self) {
        self.waited = self.waited();
        self.since = None;
    }

    fn waited(&self) -> Duration {
        self.waited + self.since.map_or(Duration::ZERO, |since| gale_runtime::now().since(since))
    }
}

impl Items {
    fn held(&mut self) -> &mut Held {
        self.0.get_or_insert_default()
    }

    pub(super) fn set_files(&mut self, files: FileOptions) {
        self.held().delivery.begin_response(files);
    }

    /// Forgets the state of the exchange and of its configuration.
    pub(super) fn forget_files(&mut self) {
        if let Some(held) = &mut self.0 {
            held.delivery.begin_response(FileOptions::default());
            held.sendfile_bytes = 0;
            held.disk_wait = DiskWait::default();
        }
    }

    /// There will be none for long: gives the box back.
    pub(super) fn shrink(&mut self) {
        if self.is_empty() && !self.is_reading() {
            self.0 = None;
        }
    }

    /// Forgets all of them, and a read that is under way.
    pub(super) fn clear(&mut self) {
        if let Some(held) = &mut self.0 {
            held.queue.clear();
            held.delivery = Delivery::default();
            held.sendfile_bytes = 0;
            held.disk_wait.end();
        }
    }

    /// Total wait for a disk with nothing else to send.
    pub(super) fn disk_waited(&self) -> Duration {
        self.0.as_ref().map_or(Duration::ZERO, |held| held.disk_wait.waited())
    }

    pub(super) fn push(&mut self, item: BodyItem) {
        self.held().queue.push_back(item);
    }

    pub(super) fn append(&mut self, text: &[u8]) {
        self.push(BodyItem::Bytes(Bytes::copy_from_slice(text)));
    }

    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.0.as_ref().is_none_or(|held| held.queue.is_empty())
    }

    /// Number of bytes that they stand for.
    pub(super) fn length(&self) -> u64 {
        self.0.as_ref().map_or(0, |held| held.queue.iter().map(BodyItem::length).sum())
    }

    /// `postpone_output`
    pub(super) fn postponed_bytes(&self) -> u64 {
        self.0.as_ref().map_or(0, |held| held.delivery.options().postponed_bytes)
    }

    /// Returns `true` while a piece of the first one is being read.
    #[inline]
    pub(super) fn is_reading(&self) -> bool {
        self.0.as_ref().is_some_and(|held| held.delivery.is_reading())
    }

    /// Returns `true` if the first one follows the bytes in memory at once, or is worth waiting for (`tcp_nopush`).
    pub(super) fn is_followed(&self) -> bool {
        self.0.as_ref().is_some_and(|held| {
            let options = held.delivery.options();
            held.sendfile_bytes > 0 || (options.sendfile && options.nopush)
        })
    }

    /// Number of bytes that are left of the first one.
    pub(super) fn first_length(&self) -> u64 {
        self.first().map_or(0, BodyItem::length)
    }

    /// The name of the first one's file, for messages, quoted.
    pub(super) fn first_name(&self) -> String {
        match self.first() {
            Some(BodyItem::File(piece)) => piece.name(),
            _ => "a file".to_owned(),
        }
    }

    fn first(&self) -> Option<&BodyItem> {
        self.0.as_ref()?.queue.front()
    }

    /// Returns `true` if the first one is a piece of a file that is read only when the socket has room.
    #[inline]
    pub(super) fn waits_for_room(&self) -> bool {
        self.0.as_ref().is_some_and(|held| {
            matches!(held.queue.front(), Some(BodyItem::File(_)))
                && !held.delivery.is_reading()
                && held.delivery.waits_for_room()
        })
    }

    /// The socket takes nothing at the moment.
    pub(super) fn note_full(&mut self) {
        if let Some(held) = &mut self.0 {
            held.delivery.note_full();
        }
    }

    /// Another poll begins: the bytes that may go by `sendfile` are determined again.
    #[inline]
    pub(super) fn look_anew(&mut self) {
        if let Some(held) = &mut self.0 {
            held.sendfile_bytes = 0;
        }
    }

    /// Ready when the next piece of a file may be read. A large one waits for a share of the turn, as sending it would,
    /// and the client's time does not run meanwhile.
    #[inline]
    pub(super) fn poll_budget(&self, output_bytes: usize, context: &mut Context<'_>) -> Poll<()> {
        self.0.as_ref().map_or(Poll::Ready(()), |held| held.poll_budget(output_bytes, context))
    }

    /// Moves bytes in memory to the output, and begins to read the next piece that is not in memory.
    #[inline]
    pub(super) fn fill(&mut self, output: &mut Output) -> io::Result<()> {
        self.0.as_mut().map_or(Ok(()), |held| held.fill(output))
    }

    /// Takes the bytes that have been read of the first one.
    pub(super) fn poll_reading(&mut self, output: &mut Output, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.held().poll_reading(output, context)
    }

    /// Sends on from the first one.
    pub(super) fn poll_sendfile(
        &mut self,
        stream: &Transport,
        context: &mut Context<'_>,
    ) -> Poll<Result<usize, FileError>> {
        self.held().poll_sendfile(stream, context)
    }
}

impl Held {
    fn poll_budget(&self, output_bytes: usize, context: &mut Context<'_>) -> Poll<()> {
        let is_sent_first = output_bytes as u64 > self.delivery.low_water();
        match self.queue.front() {
            Some(BodyItem::File(piece)) if !is_sent_first && !self.delivery.is_reading() => {
                poll_copy(context, usize::try_from(piece.length).unwrap_or(usize::MAX))
            }
            _ => Poll::Ready(()),
        }
    }

    fn fill(&mut self, output: &mut Output) -> io::Result<()> {
        while !self.delivery.is_reading() && self.sendfile_bytes == 0 {
            let queued = output.len_bytes();
            match self.queue.front_mut() {
                None => return Ok(()),
                Some(BodyItem::File(piece)) => {
                    if queued as u64 > self.delivery.low_water() {
                        return Ok(());
                    }
                    let next = match self.delivery.next(piece) {
                        // Again when that has left.
                        Err(error) if error.kind() == io::ErrorKind::OutOfMemory && queued > 0 => return Ok(()),
                        next => next?,
                    };
                    match next {
                        Next::Bytes(bytes) => output.push(bytes),
                        Next::Sendfile(length) => {
                            self.sendfile_bytes = length;
                            return Ok(());
                        }
                        Next::Reading => {}
                    }
                    self.leave_finished_file();
                }
                Some(_) if queued >= OUTPUT_BYTES => return Ok(()),
                Some(_) => {
                    if let Some(BodyItem::Bytes(bytes)) = self.queue.pop_front() {
                        output.push(bytes);
                    }
                }
            }
        }
        Ok(())
    }

    fn poll_reading(&mut self, output: &mut Output, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let starves = output.is_empty();
        let (piece, delivery) = self.first_file();
        let polled = delivery.poll_read(piece, starves, context);
        match polled.is_ready() {
            true => self.disk_wait.end(),
            false if starves => self.disk_wait.begin(),
            false => {}
        }
        let bytes = ready!(polled)?;
        output.push(bytes);
        self.leave_finished_file();
        Poll::Ready(Ok(()))
    }

    fn poll_sendfile(&mut self, stream: &Transport, context: &mut Context<'_>) -> Poll<Result<usize, FileError>> {
        let asked = self.sendfile_bytes;
        let (piece, delivery) = self.first_file();
        let sent =
            ready!(delivery.sendfile(piece, asked, |file, offset, length| {
                stream.poll_sendfile(context, file, offset, length)
            }));
        self.sendfile_bytes = 0;
        self.leave_finished_file();
        Poll::Ready(sent)
    }

    fn first_file(&mut self) -> (&mut FilePiece, &mut Delivery) {
        match self.queue.front_mut() {
            Some(BodyItem::File(piece)) => (piece, &mut self.delivery),
            _ => unreachable!("only a file is not moved to the output"),
        }
    }

    /// Removes a piece of a file of which nothing is left.
    fn leave_finished_file(&mut self) {
        if matches!(self.queue.front(), Some(BodyItem::File(piece)) if piece.length == 0) {
            self.queue.pop_front();
        }
    }
}
