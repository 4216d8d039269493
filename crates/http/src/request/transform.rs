//! Transformation of response bodies: the common part of filters that compress or substitute.
//!
//! A filter that only adds or inspects items is a [`BodyStream`] around [`InMemory`]. A filter that changes bytes
//! implements [`Transform`], and [`Transformed`] does the rest. Files are read in bounded pieces without blocking the
//! event loop. Work proceeds in steps that together get a share of the loop's turn. Output leaves in pieces of bounded
//! size; it does not wait while the source pauses, and it leaves before the error that ends the body. Flushes and
//! trailers keep their places. Dropping the body cancels everything.
//!
//! The filter changes the head: see [`ResponseHead::will_change`](crate::request::response::ResponseHead::will_change).

use std::task::{Context, Poll, ready};
use std::time::Duration;

use gale_runtime::{Effort, Lease, charge_units, poll_units};

use crate::files::delivery::FileOptions;
use crate::files::reader::FileReader;
use crate::request::Request;
use crate::request::body::{Body, BodyError, BodyItem, BodyStream, FilePiece};

/// A body that reads pieces of files into memory, so that all its bytes are in memory.
#[derive(Default)]
pub struct InMemory {
    body: Body,
    /// Unread rest of the current piece of a file.
    piece: Option<FilePiece>,
    /// Created for the first piece of a file.
    reader: Option<FileReader>,
}

impl InMemory {
    /// Wraps `body`.
    pub fn new(body: Body) -> InMemory {
        InMemory { body, ..InMemory::default() }
    }

    /// Returns the next item, never a piece of a file; `None` at the end.
    pub fn poll_next(
        &mut self,
        request: &Request,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<BodyItem, BodyError>>> {
        loop {
            if let Some(piece) = &mut self.piece {
                let reader = match &mut self.reader {
                    Some(reader) => reader,
                    none => none.insert(reader_of(request)?),
                };
                let read = ready!(reader.poll_read(piece, context));
                let read = read.map(BodyItem::Bytes).map_err(|error| BodyError::of_file(piece.name(), error));
                if read.is_err() || piece.length == 0 {
                    self.piece = None;
                }
                return Poll::Ready(Some(read));
            }
            match ready!(self.body.poll_next(request, context)) {
                Some(Ok(BodyItem::File(piece))) if piece.length > 0 => self.piece = Some(piece),
                Some(Ok(BodyItem::File(_))) => {}
                item => return Poll::Ready(item),
            }
        }
    }

    /// Returns `true` if the next item waits for nothing but a file.
    fn is_reading(&self) -> bool {
        self.piece.is_some()
    }

    /// See [`BodyStream::poll_ahead`].
    pub fn poll_ahead(&mut self, request: &Request, context: &mut Context<'_>) {
        self.body.poll_ahead(request, context);
    }

    /// See [`BodyStream::patience`].
    pub fn patience(&self, default: Duration) -> Duration {
        self.body.patience(default)
    }
}

/// Returns a reader with the options of the request's location.
fn reader_of(request: &Request) -> Result<FileReader, BodyError> {
    let options = FileOptions::of(request, &request.scope().core);
    options.map(FileReader::new).ok_or_else(|| BodyError::Other("there is no such thread pool".to_owned()))
}

/// Turns the bytes of a body into other bytes.
pub trait Transform {
    /// Computing time per byte: of the input, or of the output if that determines the work.
    fn effort(&self) -> Effort;

    /// Upper limit of the work of a step with these arguments, in bytes. By default it is the length of the input.
    fn units(&self, input: &[u8], _until: Until, _room_bytes: usize) -> usize {
        input.len()
    }

    /// Consumes some of `input` and writes output into `room`, which is never empty. A step that is not done and has
    /// input, or is asked for a pause, flush or end, makes progress: it consumes input, produces output, or works off
    /// bytes kept back.
    ///
    /// # Errors
    /// The input is invalid. The response breaks off.
    fn step(&mut self, input: &[u8], until: Until, room: &mut [u8]) -> Result<Step, BodyError>;
}

/// Goal of a step.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Until {
    /// More input will come.
    MoreInput,
    /// More input will come, but none is available now. Output that is already certain leaves, unless that would make
    /// the whole output longer.
    Pause,
    /// The client waits: all input consumed so far has to become output.
    Flush,
    /// The input has ended.
    End,
}

/// Result of a step.
#[derive(Clone, Copy, Debug)]
pub struct Step {
    /// Bytes of input consumed.
    pub consumed: usize,
    /// Bytes of output produced.
    pub produced: usize,
    /// Work done, as [`Transform::units`] counts it.
    pub units: usize,
    /// `true` if the pause, flush or end is complete.
    pub is_done: bool,
}

/// A body that passes through a [`Transform`].
pub struct Transformed<T> {
    inner: InMemory,
    transform: T,
    room_bytes: usize,
    /// Output that has not left yet: the buffer, and the number of bytes written to it.
    made: Option<(Lease, usize)>,
    state: State,
    /// Input was consumed since the last pause.
    has_taken: bool,
    /// Trailers, which follow the last output.
    trailers: Option<BodyItem>,
}

enum State {
    /// Waiting for the next item.
    Open,
    /// An item, and the number of its bytes consumed so far.
    Taking(BodyItem, usize),
    /// The source has no item at the moment.
    Pausing,
    Paused,
    /// The item (a flush, a subrequest, or the error that ends the body) is passed on after the output of all input
    /// before it.
    Flushing(Result<BodyItem, BodyError>),
    Flushed(Result<BodyItem, BodyError>),
    Ending,
    Ended,
}

/// Smallest and largest size of an output buffer, in bytes. Output leaves when the buffer is full.
pub const ROOM_BYTES: std::ops::RangeInclusive<usize> = 1024..=64 * 1024;

impl<T: Transform> Transformed<T> {
    /// Passes `body` through `transform`. Output leaves in pieces of `room_bytes`, which is clamped to [`ROOM_BYTES`].
    pub fn new(body: Body, transform: T, room_bytes: usize) -> Transformed<T> {
        Transformed {
            inner: InMemory::new(body),
            transform,
            room_bytes: room_bytes.clamp(*ROOM_BYTES.start(), *ROOM_BYTES.end()),
            made: None,
            state: State::Open,
            has_taken: false,
            trailers: None,
        }
    }

    /// Receives the next item of the inner body.
    fn poll_open(&mut self, request: &Request, context: &mut Context<'_>) -> Poll<()> {
        let item = match self.inner.poll_next(request, context) {
            Poll::Ready(item) => item,
            Poll::Pending if self.has_taken && !self.inner.is_reading() => {
                self.has_taken = false;
                self.state = State::Pausing;
                return Poll::Ready(());
            }
            Poll::Pending => return Poll::Pending,
        };
        match item {
            Some(item @ (Ok(BodyItem::Flush | BodyItem::Subrequest(_)) | Err(_))) => self.state = State::Flushing(item),
            Some(Ok(trailers @ BodyItem::Trailers(_))) => self.trailers = Some(trailers),
            Some(Ok(item)) if item.length() > 0 => self.state = State::Taking(item, 0),
            Some(Ok(_)) => {}
            None => self.state = State::Ending,
        }
        Poll::Ready(())
    }

    /// Runs one step as soon as the turn's budget allows it.
    fn poll_step(&mut self, request: &Request, context: &mut Context<'_>) -> Poll<Result<(), BodyError>> {
        let (input, until) = match &self.state {
            State::Taking(item, taken) => (&item.bytes()[*taken..], Until::MoreInput),
            State::Pausing => (&[][..], Until::Pause),
            State::Flushing(_) => (&[][..], Until::Flush),
            _ => (&[][..], Until::End),
        };
        let effort = self.transform.effort();
        let input = &input[..input.len().min(effort.units_at_once())];
        let room_left = self.made.as_ref().map_or(self.room_bytes, |(room, made)| room.len() - made);
        ready!(poll_units(context, effort, self.transform.units(input, until, room_left)));
        let (room, made) = match &mut self.made {
            Some(made) => made,
            none => none.insert((Lease::new(self.room_bytes)?, 0)),
        };
        let step = self.transform.step(input, until, &mut room[*made..]);
        // Not to be cached: the same bytes would fail again.
        let step = step.inspect_err(|_| request.refuse_response())?;
        charge_units(effort, step.units);
        *made += step.produced;
        match &mut self.state {
            State::Taking(item, taken) => {
                *taken += step.consumed;
                self.has_taken = true;
                if *taken == item.bytes().len() {
                    self.state = State::Open;
                }
            }
            State::Pausing if step.is_done => self.state = State::Paused,
            State::Flushing(item) if step.is_done => {
                let item = std::mem::replace(item, Ok(BodyItem::Flush));
                self.state = State::Flushed(item);
            }
            State::Ending if step.is_done => self.state = State::Ended,
            _ => {}
        }
        Poll::Ready(Ok(()))
    }

    /// Takes the output as an item; `None` if there is none.
    fn take_made(&mut self) -> Option<BodyItem> {
        let (mut lease, made) = self.made.take()?;
        lease.truncate(made);
        (made > 0).then(|| BodyItem::Bytes(lease.freeze()))
    }

    fn is_full(&self) -> bool {
        self.made.as_ref().is_some_and(|(room, made)| *made == room.len())
    }
}

impl<T: Transform> BodyStream for Transformed<T> {
    fn poll_next(&mut self, request: &Request, context: &mut Context<'_>) -> Poll<Option<Result<BodyItem, BodyError>>> {
        loop {
            if self.is_full() {
                return Poll::Ready(self.take_made().map(Ok));
            }
            match &mut self.state {
                State::Open => ready!(self.poll_open(request, context)),
                State::Taking(..) | State::Pausing | State::Flushing(_) | State::Ending => {
                    if let Err(error) = ready!(self.poll_step(request, context)) {
                        self.state = State::Flushed(Err(error));
                    }
                }
                State::Paused => {
                    self.state = State::Open;
                    if let Some(made) = self.take_made() {
                        return Poll::Ready(Some(Ok(made)));
                    }
                }
                State::Flushed(_) if self.made.is_some() => {
                    if let Some(made) = self.take_made() {
                        return Poll::Ready(Some(Ok(made)));
                    }
                }
                State::Flushed(item) => {
                    let item = std::mem::replace(item, Ok(BodyItem::Flush));
                    self.state = State::Open;
                    return Poll::Ready(Some(item));
                }
                State::Ended => {
                    let item = self.take_made().or_else(|| self.trailers.take());
                    return Poll::Ready(item.map(Ok));
                }
            }
        }
    }

    fn poll_ahead(&mut self, request: &Request, context: &mut Context<'_>) {
        self.inner.poll_ahead(request, context);
    }

    fn patience(&self, default: Duration) -> Duration {
        self.inner.patience(default)
    }

    fn is_at_end(&self) -> bool {
        matches!(self.state, State::Ended) && self.made.is_none() && self.trailers.is_none()
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::collections::VecDeque;
    use std::future::poll_fn;
    use std::rc::Rc;

    use gale_files::File;
    use gale_runtime::{Bytes, EventLoop, LoopOptions};

    use super::*;

    /// Writes each byte twice, and a dot at the end. The second copy is kept back until the next step.
    #[derive(Default)]
    struct Twice {
        kept: Option<u8>,
        has_ended: bool,
    }

    impl Transform for Twice {
        fn effort(&self) -> Effort {
            Effort { usual_nanos: 100_000, worst_nanos: 100_000 }
        }

        fn step(&mut self, input: &[u8], until: Until, room: &mut [u8]) -> Result<Step, BodyError> {
            assert!(input.len() <= 5 && !room.is_empty());
            let (taken, byte) = match (self.kept.take(), input.first(), until) {
                (Some(kept), ..) => (0, Some(kept)),
                (None, Some(b'!'), _) => return Err(BodyError::Other("refused".to_owned())),
                (None, Some(&first), _) => {
                    self.kept = Some(first);
                    (1, Some(first))
                }
                (None, None, Until::End) if !self.has_ended => {
                    self.has_ended = true;
                    (0, Some(b'.'))
                }
                (None, None, _) => (0, None),
            };
            room[..byte.iter().len()].fill(byte.unwrap_or_default());
            let is_done = self.kept.is_none() && (self.has_ended || until != Until::End);
            Ok(Step { consumed: taken, produced: byte.iter().len(), units: taken, is_done })
        }
    }

    /// Returns the items of the transformed body, each as a string.
    fn items_of(body: Vec<BodyItem>) -> Vec<String> {
        EventLoop::new(LoopOptions::simulated_time()).unwrap().run(async {
            let body = Body::Items(VecDeque::from(body));
            let mut stream = Transformed::new(body, Twice::default(), 0);
            // The request has no location with options for a reader.
            stream.inner.reader = Some(FileReader::default());
            let mut items = Vec::new();
            while let Some(item) = poll_fn(|context| stream.poll_next(&Request::default(), context)).await {
                items.push(match item {
                    Ok(BodyItem::Flush) => "flush".to_owned(),
                    Ok(BodyItem::Trailers(_)) => "trailers".to_owned(),
                    Ok(item) => String::from_utf8(item.bytes().to_vec()).unwrap(),
                    Err(error) => {
                        items.push(error.to_string());
                        break;
                    }
                });
            }
            items
        })
    }

    fn bytes(text: &'static str) -> BodyItem {
        BodyItem::Bytes(Bytes::from_static(text.as_bytes()))
    }

    #[test]
    fn flushes_and_trailers_keep_their_places() {
        let body = vec![bytes("ab"), BodyItem::Flush, bytes(""), BodyItem::Trailers(Vec::new()), bytes("c")];
        assert_eq!(items_of(body), ["aabb", "flush", "cc.", "trailers"]);
        assert_eq!(items_of(vec![]), ["."]);
    }

    #[test]
    fn what_is_made_leaves_in_pieces_of_bounded_size() {
        let items = items_of(vec![BodyItem::Bytes(Bytes::from(vec![b'x'; 2000]))]);
        let lengths: Vec<usize> = items.iter().map(String::len).collect();
        assert_eq!(lengths, [1024, 1024, 1024, 4001 - 3 * 1024]);
    }

    #[test]
    fn what_was_made_leaves_before_an_error() {
        assert_eq!(items_of(vec![bytes("ab"), bytes("c!")]), ["aabbcc", "refused"]);
    }

    /// A source that is pending once for each empty string, records that as an event, and ends with an error.
    struct Pausing(VecDeque<&'static str>, Rc<RefCell<Vec<String>>>);

    impl BodyStream for Pausing {
        fn poll_next(&mut self, _: &Request, context: &mut Context<'_>) -> Poll<Option<Result<BodyItem, BodyError>>> {
            match self.0.pop_front() {
                Some("") => {
                    self.1.borrow_mut().push("pause".to_owned());
                    context.waker().wake_by_ref();
                    Poll::Pending
                }
                Some(text) => Poll::Ready(Some(Ok(bytes(text)))),
                None => Poll::Ready(Some(Err(BodyError::Reset))),
            }
        }
    }

    #[test]
    fn what_was_made_leaves_when_the_source_pauses_or_breaks_off() {
        let events = Rc::<RefCell<Vec<String>>>::default();
        let source = Pausing(VecDeque::from(["ab", "c", "", "d", "", "", "ef"]), Rc::clone(&events));
        let mut stream = Transformed::new(Body::Stream(Box::new(source)), Twice::default(), 0);
        EventLoop::new(LoopOptions::simulated_time()).unwrap().run(async {
            while let Some(Ok(item)) = poll_fn(|context| stream.poll_next(&Request::default(), context)).await {
                events.borrow_mut().push(String::from_utf8(item.bytes().to_vec()).unwrap());
            }
        });
        assert_eq!(*events.borrow(), ["pause", "aabbcc", "pause", "dd", "pause", "eeff"]);
    }

    #[test]
    fn pieces_of_files_are_read() {
        let path = std::env::temp_dir().join(format!("gale-transform-{}", std::process::id()));
        std::fs::write(&path, b"0123456789").unwrap();
        let file = File::from_std(std::fs::File::open(&path).unwrap()).unwrap();
        std::fs::remove_file(&path).unwrap();
        let piece = |offset, length| BodyItem::File(FilePiece { file: file.clone(), offset, length });
        assert_eq!(items_of(vec![piece(2, 3), piece(0, 0), piece(9, 1)]), ["22334499."]);
        let truncated = items_of(vec![piece(8, 3)]);
        // The kernel's name for a deleted file.
        let expected = format!("\"{} (deleted)\" was truncated at 10 while it was being sent", path.display());
        assert_eq!(truncated, ["8899", &expected]);
    }
}
