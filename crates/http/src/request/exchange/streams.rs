//! A mock of a connection with several exchanges, as in a version of HTTP with streams, and tests of the interface: the
//! bodies interleave, the exchanges share a window that is charged when a frame is built, an exchange that waits for a
//! disk uses nothing of the window, and a reset ends only one exchange.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

use gale_runtime::{Bytes, Moment, SocketAddress};

use super::{BodyLimits, Exchange, Gone, Permit, RequestBodyError, ResponseOptions, ResponseWriter, Sent};
use crate::request::Request;
use crate::request::body::BodyItem;
use gale_engine::connections::ConnectionInfo;
use gale_process::ListenAddress;

/// The client's end of a connection that carries several exchanges.
pub(crate) struct MockConnection {
    /// Number of bytes of all bodies that the client still accepts.
    window: Cell<usize>,
    streams: RefCell<Vec<Rc<Stream>>>,
    /// Frames that the client received: the stream's number, and bytes, or `None` for the end.
    frames: RefCell<Vec<(usize, Option<Bytes>)>>,
}

/// One exchange of such a connection.
pub(crate) struct Stream {
    info: ConnectionInfo,
    state: RefCell<State>,
}

#[derive(Default)]
struct State {
    queue: VecDeque<Bytes>,
    is_started: bool,
    is_ended: bool,
    is_reset: bool,
    wakers: Vec<Waker>,
}

impl MockConnection {
    pub(crate) fn new() -> MockConnection {
        MockConnection { window: Cell::new(0), streams: RefCell::default(), frames: RefCell::default() }
    }

    /// The client opens another stream.
    pub(crate) fn open(&self) -> Rc<Stream> {
        let address = std::net::SocketAddr::from(([127, 0, 0, 1], 8000));
        let listening = Rc::new(ListenAddress::Inet(address));
        let info = ConnectionInfo::new(1, SocketAddress::Inet(address), listening, Moment::from_nanos(0));
        let stream = Rc::new(Stream { info, state: RefCell::default() });
        self.streams.borrow_mut().push(Rc::clone(&stream));
        stream
    }

    /// The client accepts `bytes` more. The streams that have queued bytes build frames in turn.
    pub(crate) fn takes(&self, bytes: usize) {
        self.window.set(self.window.get() + bytes);
        loop {
            let before = self.frames.borrow().len();
            for (number, stream) in self.streams.borrow().iter().enumerate() {
                self.build_frame(number, stream);
            }
            if self.frames.borrow().len() == before {
                return;
            }
        }
    }

    fn build_frame(&self, number: usize, stream: &Stream) {
        let state = &mut *stream.state.borrow_mut();
        if state.is_reset {
            return;
        }
        let frame = match state.queue.front_mut() {
            Some(bytes) if self.window.get() > 0 => {
                let length = bytes.len().min(self.window.get()).min(FRAME_MAX);
                self.window.set(self.window.get() - length);
                let frame = bytes.split_to(length);
                if bytes.is_empty() {
                    state.queue.pop_front();
                }
                Some(frame)
            }
            Some(_) => return,
            None if std::mem::take(&mut state.is_ended) => None,
            None => return,
        };
        self.frames.borrow_mut().push((number, frame));
        state.wakers.drain(..).for_each(Waker::wake);
    }

    /// Returns the frames that the client received since the last call.
    pub(crate) fn got(&self) -> Vec<(usize, Option<Bytes>)> {
        self.frames.take()
    }

    pub(crate) fn window(&self) -> usize {
        self.window.get()
    }
}

/// Maximum length of a frame, in bytes.
const FRAME_MAX: usize = 4;

impl Stream {
    /// The client resets this stream alone.
    pub(crate) fn reset(&self) {
        let mut state = self.state.borrow_mut();
        state.is_reset = true;
        state.queue.clear();
        state.wakers.drain(..).for_each(Waker::wake);
    }

    fn poll_below(&self, low_water: u64, context: &mut Context<'_>) -> Poll<Result<(), Gone>> {
        let mut state = self.state.borrow_mut();
        let queued: u64 = state.queue.iter().map(|bytes| bytes.len() as u64).sum();
        if state.is_reset {
            return Poll::Ready(Err(Gone::ByPeer));
        }
        if queued <= low_water {
            return Poll::Ready(Ok(()));
        }
        state.wakers.push(context.waker().clone());
        Poll::Pending
    }
}

impl Exchange for Stream {
    fn connection(&self) -> &ConnectionInfo {
        &self.info
    }

    fn local_address(&self) -> Option<&SocketAddress> {
        None
    }

    fn interim(&self, _status: u16, _fields: &[(Bytes, Bytes)]) {}

    fn poll_body(
        &self,
        _context: &mut Context<'_>,
        _limits: &BodyLimits,
    ) -> Poll<Result<Option<BodyItem>, RequestBodyError>> {
        Poll::Ready(Ok(None))
    }

    fn body_is_read(&self) -> bool {
        true
    }

    fn received(&self) -> u64 {
        0
    }

    fn poll_gone(&self, context: &mut Context<'_>) -> Poll<()> {
        let mut state = self.state.borrow_mut();
        if state.is_reset {
            return Poll::Ready(());
        }
        state.wakers.push(context.waker().clone());
        Poll::Pending
    }

    fn is_broken(&self) -> bool {
        self.state.borrow().is_reset
    }

    fn is_complete(&self) -> bool {
        let state = self.state.borrow();
        state.is_ended && state.queue.is_empty()
    }

    fn sent(&self) -> Sent {
        Sent::default()
    }

    fn writer(self: Rc<Self>, _permit: Permit) -> Rc<dyn ResponseWriter> {
        self
    }
}

impl ResponseWriter for Stream {
    fn start(&self, _request: &Request, _options: &ResponseOptions) {
        assert!(!std::mem::replace(&mut self.state.borrow_mut().is_started, true), "there is one response");
    }

    fn push(&self, item: BodyItem) {
        let mut state = self.state.borrow_mut();
        assert!(state.is_started && !state.is_ended, "a body lies between start and end");
        match item {
            BodyItem::Bytes(bytes) => state.queue.push_back(bytes),
            other => panic!("the tests push bytes, not {other:?}"),
        }
    }

    fn end(&self) {
        self.state.borrow_mut().is_ended = true;
    }

    fn abort(&self) {
        self.reset();
    }

    fn poll_sent(&self, context: &mut Context<'_>) -> Poll<Result<(), Gone>> {
        self.poll_below(0, context)
    }

    fn poll_ready(&self, low_water: u64, context: &mut Context<'_>) -> Poll<Result<(), Gone>> {
        self.poll_below(low_water, context)
    }

    fn become_tunnel(&self) {}
}

#[cfg(test)]
mod tests {
    use gale_runtime::{EventLoop, LoopOptions, spawn, yield_now};

    use super::*;
    use crate::request::Request;
    use crate::request::body::{Body, BodyError, BodyStream};
    use crate::request::exchange::mock::{request_on, settings};
    use crate::request::respond::start_response;

    /// State of a body whose pieces come from the test, as they would from a disk.
    #[derive(Default)]
    struct Disk {
        pieces: VecDeque<Bytes>,
        has_ended: bool,
        waker: Option<Waker>,
        dropped: bool,
    }

    struct FromDisk(Rc<RefCell<Disk>>);

    impl BodyStream for FromDisk {
        fn poll_next(
            &mut self,
            _request: &Request,
            context: &mut Context<'_>,
        ) -> Poll<Option<Result<BodyItem, BodyError>>> {
            let mut disk = self.0.borrow_mut();
            match disk.pieces.pop_front() {
                Some(piece) => Poll::Ready(Some(Ok(BodyItem::Bytes(piece)))),
                None if disk.has_ended => Poll::Ready(None),
                None => {
                    disk.waker = Some(context.waker().clone());
                    Poll::Pending
                }
            }
        }
    }

    impl Drop for FromDisk {
        fn drop(&mut self) {
            self.0.borrow_mut().dropped = true;
        }
    }

    impl Disk {
        fn gives(disk: &RefCell<Disk>, pieces: &[&'static str], has_ended: bool) {
            let mut disk = disk.borrow_mut();
            disk.pieces.extend(pieces.iter().map(|piece| Bytes::from(*piece)));
            disk.has_ended = has_ended;
            disk.waker.take().into_iter().for_each(Waker::wake);
        }
    }

    /// Sends a response on this stream, in a task of its own. Returns the source of its body.
    fn answer(stream: &Rc<Stream>) -> Rc<RefCell<Disk>> {
        let disk = Rc::new(RefCell::new(Disk::default()));
        let mut request = request_on(Rc::<Stream>::clone(stream), settings());
        request.response.status = 200;
        let body = Body::Stream(Box::new(FromDisk(Rc::clone(&disk))));
        spawn(async move {
            let rest = start_response(&mut request, body).expect("a stream is sent item by item");
            rest.send(&request).await;
        });
        disk
    }

    async fn settle() {
        for _ in 0..10 {
            yield_now().await;
        }
    }

    fn data(number: usize, text: &'static str) -> (usize, Option<Bytes>) {
        (number, Some(text.into()))
    }

    fn run(test: impl AsyncFnOnce(MockConnection)) {
        EventLoop::new(LoopOptions::default()).unwrap().run(test(MockConnection::new()));
    }

    #[test]
    fn bodies_interleave_and_one_that_waits_for_a_disk_holds_nothing_of_the_window() {
        run(async |client| {
            let disks = [(); 3].map(|()| answer(&client.open()));
            Disk::gives(&disks[0], &["aaaaaa"], true);
            Disk::gives(&disks[2], &["cccccc"], true);
            settle().await;
            client.takes(10);
            assert_eq!(client.got(), [data(0, "aaaa"), data(2, "cccc"), data(0, "aa"), (0, None)]);
            client.takes(10);
            assert_eq!(client.got(), [data(2, "cc"), (2, None)]);
            assert_eq!(client.window(), 8, "what the disk has not given takes none of it");
            Disk::gives(&disks[1], &["b"], true);
            settle().await;
            client.takes(0);
            assert_eq!(client.got(), [data(1, "b"), (1, None)]);
        });
    }

    #[test]
    fn a_reset_ends_one_exchange_and_whatever_it_waits_for() {
        run(async |client| {
            let streams = [client.open(), client.open()];
            let disks = [answer(&streams[0]), answer(&streams[1])];
            Disk::gives(&disks[1], &["bb"], false);
            settle().await;
            streams[0].reset();
            settle().await;
            assert!(disks[0].borrow().dropped && !disks[1].borrow().dropped);
            client.takes(10);
            assert_eq!(client.got(), [data(1, "bb")]);
        });
    }

    #[test]
    fn of_a_body_no_more_is_taken_than_is_to_wait_for_the_client() {
        run(async |client| {
            let disk = answer(&client.open());
            let piece: &'static str = Box::leak("x".repeat(10_000).into());
            Disk::gives(&disk, &[piece; 10], true);
            settle().await;
            assert_eq!(disk.borrow().pieces.len(), 8, "two pieces wait for the client");
            client.takes(20_000);
            settle().await;
            assert_eq!(disk.borrow().pieces.len(), 6);
        });
    }
}
