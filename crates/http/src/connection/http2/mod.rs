//! A connection that speaks HTTP/2 (RFC 9113): its task receives frames, begins requests, and sends what their streams
//! have.
//!
//! ```text
//!   socket ─► input ─► codec ─► requests (request.rs) ─► phases ─► Stream (stream.rs, an Exchange)
//!                        │                                          │ heads, at once
//!                        │ bodies ─► body.rs ─► handlers            │ bodies: a queue for each stream
//!   socket ◄─ output ◄─ frames ◄────────────────────────────────────┘ ◄─ scheduler (writing.rs)
//! ```
//!
//! Only the connection's task touches the socket. A request that is answered without waiting has no task; one that
//! waits has one of its own, which ends with the connection. Windows are charged when a frame is built, for streams
//! with bytes in hand. A response counts as sent when its last frame was built: no more than [`writing::BUILT_MAX`]
//! bytes wait behind that. No state is borrowed while a request is worked on.
//!
//! Bounded are: the streams at once (`http2_max_concurrent_streams`), what clients send before it is read (the
//! windows), what waits to be sent, reads of files ([`writing::READS_MAX`]), and how often a client may be a nuisance
//! (`http2_flood_limits`).

mod body;
mod flow_control;
mod head;
mod receiving;
mod request;
mod shutdown;
mod stream;
mod websocket;
mod writing;

use std::cell::RefCell;
use std::collections::VecDeque;
use std::future::poll_fn;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use gale_protocol::http2::{Connection as Codec, RoundTrip, Scheduler, StreamId};
use gale_runtime::{Buffer, Moment, Output, Timer};

use self::flow_control::Blocked;
use self::receiving::Received;
use self::shutdown::Shutdown;
use self::stream::Stream;
use self::writing::Written;
use crate::connection::client::Client;
use crate::connection::lingering::Lingering;
use crate::connection::{HttpConnection, Stage};
use crate::request::configuration::settings::LingeringClose;
use crate::request::exchange::Gone;

/// See the file's head.
pub(crate) struct Http2 {
    owner: Rc<HttpConnection>,
    /// Size of one receive, in bytes.
    receive_max: usize,
    /// The window that its streams begin with, in bytes.
    stream_window: u32,
    state: RefCell<State>,
}

/// State that the task of the connection and those of its streams share.
struct State {
    codec: Codec,
    /// The streams whose requests are under way, oldest first.
    streams: VecDeque<Rc<Stream>>,
    /// Those that could send something.
    scheduler: Scheduler,
    /// Those of which a piece of a file is being read.
    reading: Vec<StreamId>,
    /// Some of these reads have no waker yet.
    has_begun_to_read: bool,
    /// Streams whose reads wait until fewer are under way.
    waiting_to_read: VecDeque<StreamId>,
    /// Streams that a closed window keeps from sending.
    blocked: Blocked,
    /// Streams that have come to their end without a task.
    finished: Vec<Rc<Stream>>,
    /// Frames that were built last.
    frames: Vec<u8>,
    /// Frames before them, with the bytes of bodies.
    output: Output,
    /// The rest of a frame is missing: the client could not understand anything behind it.
    is_broken: bool,
    /// Time since which the socket has taken nothing.
    unsent_since: Moment,
    /// Start of the wait for the rest of a head.
    head_since: Moment,
    /// Time at which the budgets of nuisances are full again.
    budgets_until: Moment,
    shutdown: Shutdown,
    /// Round-trip time of the client.
    round_trip: RoundTrip,
    /// `send_timeout` of the response that began last.
    send_timeout: Duration,
    /// The task of the connection, and whether it is that which runs.
    waker: Option<Waker>,
    is_polled: bool,
    timer: Timer,
}

/// Longest wait of the last frames of a connection for the socket.
const LAST_WORDS_MAX: Duration = Duration::from_secs(1);

/// End of a connection.
enum Ending {
    /// At once: the client has left, or can be told nothing.
    Close,
    /// After its client has seen the last frames.
    Linger,
}

/// Serves a connection from its preface on, of which `input` may have the beginning, to its last frame. Returns how the
/// connection is read from after that, if it is.
pub(super) async fn serve(owner: Rc<HttpConnection>, mut input: Buffer) -> Option<Lingering> {
    let http2 = Http2::begin(&owner)?;
    owner.enter(Stage::Http2(Rc::downgrade(&http2)));
    let served = Served(Rc::clone(&http2));
    let ending = poll_fn(|context| http2.poll(&mut input, context)).await;
    drop(input);
    // Nothing waits for the answers of the streams any more; their requests end before the last frames are sent.
    http2.lose_streams();
    if let Ending::Linger = ending {
        // The reason of the end is behind bytes that the socket has not taken yet. The wait is bounded, since the
        // client may take nothing.
        let _ = gale_runtime::timeout(LAST_WORDS_MAX, poll_fn(|context| http2.poll_flush(context))).await;
    }
    http2.say_goodbye();
    // Some requests outlive their client.
    poll_fn(|context| http2.poll_streams_ended(context)).await;
    drop(served);
    drop(http2);
    match ending {
        Ending::Close => None,
        Ending::Linger => lingering(&owner.client),
    }
}

/// `lingering_close`, as the default server of the connection's address has it.
fn lingering(client: &Client) -> Option<Lingering> {
    let configuration = client.next_configuration();
    let core = client.place(configuration.http())?.core(configuration.http());
    (*core.lingering_close.get() != LingeringClose::Off).then(|| Lingering::of(core))
}

impl Http2 {
    /// Our settings are the first to be sent. `None` when the connection has no place in the configuration any more.
    fn begin(owner: &Rc<HttpConnection>) -> Option<Rc<Http2>> {
        let client = &owner.client;
        let configuration = client.next_configuration();
        let http = configuration.http();
        let place = client.place(http)?;
        let core = place.core(http);
        let address = &http.addresses[place.index()].http2;
        client.set_nodelay(core);
        let state = State {
            codec: Codec::server(std::sync::Arc::clone(&address.limits)),
            streams: VecDeque::new(),
            scheduler: Scheduler::new(),
            reading: Vec::new(),
            has_begun_to_read: false,
            waiting_to_read: VecDeque::new(),
            blocked: Blocked::default(),
            finished: Vec::new(),
            frames: Vec::new(),
            output: Output::new(),
            is_broken: false,
            unsent_since: Moment::NEVER,
            head_since: Moment::NEVER,
            budgets_until: Moment::from_nanos(0),
            shutdown: Shutdown::default(),
            round_trip: RoundTrip::default(),
            send_timeout: *core.send_timeout.get(),
            waker: None,
            is_polled: false,
            timer: Timer::new(),
        };
        let http2 = Rc::new(Http2 {
            owner: Rc::clone(owner),
            receive_max: address.receive_max,
            stream_window: address.limits.stream_window,
            state: RefCell::new(state),
        });
        client.note_idle();
        Some(http2)
    }

    fn client(&self) -> &Client {
        &self.owner.client
    }

    /// Receives, answers and sends as far as that needs no waiting; ready when the connection has come to its end.
    fn poll(self: &Rc<Self>, input: &mut Buffer, context: &mut Context<'_>) -> Poll<Ending> {
        self.enter(context);
        let polled = self.poll_all(input, context);
        self.leave();
        polled
    }

    fn poll_all(self: &Rc<Self>, input: &mut Buffer, context: &mut Context<'_>) -> Poll<Ending> {
        loop {
            let received = self.receive(input, context);
            self.poll_shutdown();
            let written = self.write_all(context);
            match (&received, written) {
                (Received::Faulty(fault), Written::All | Written::Blocked) => {
                    self.note_fault(*fault);
                    return Poll::Ready(Ending::Linger);
                }
                (Received::Ended, _) | (_, Written::Lost) => {
                    self.note_left();
                    return Poll::Ready(Ending::Close);
                }
                // The frames in answer to the input waited for room.
                (Received::Paused, Written::All) => continue,
                _ => {}
            }
            if self.is_done() {
                return Poll::Ready(Ending::Linger);
            }
            self.note_idle_or_not();
            let is_in_head = matches!(received, Received::Pending) && !input.is_empty();
            return self.poll_deadlines(is_in_head, context);
        }
    }

    /// Reads files and sends, until neither makes progress.
    fn write_all(&self, context: &mut Context<'_>) -> Written {
        loop {
            self.take_what_was_read(context);
            let written = self.write(context);
            // Ends may have something to say, too; and reads that were begun have to be waited for.
            if !self.finish_streams() && !self.state.borrow().has_begun_to_read || written == Written::Lost {
                return written;
            }
        }
    }

    /// The client has left: no stream can be answered.
    fn lose_streams(&self) {
        let streams: Vec<Rc<Stream>> = self.state.borrow().streams.iter().cloned().collect();
        streams.iter().for_each(|stream| stream.lose(Gone::ByPeer));
    }

    /// Ready when no request is under way any more.
    fn poll_streams_ended(&self, context: &mut Context<'_>) -> Poll<()> {
        self.finish_streams();
        let state = &mut *self.state.borrow_mut();
        if state.streams.is_empty() {
            return Poll::Ready(());
        }
        state.waker = Some(context.waker().clone());
        Poll::Pending
    }

    fn enter(&self, context: &mut Context<'_>) {
        let state = &mut *self.state.borrow_mut();
        if state.waker.as_ref().is_none_or(|waker| !waker.will_wake(context.waker())) {
            state.waker = Some(context.waker().clone());
        }
        state.is_polled = true;
        if state.frames.capacity() == 0 {
            state.frames = self.client().connections.take_frames();
        }
    }

    fn leave(&self) {
        let state = &mut *self.state.borrow_mut();
        state.is_polled = false;
        if state.frames.is_empty() && state.streams.is_empty() {
            self.client().connections.give_frames_back(std::mem::take(&mut state.frames));
        }
    }

    /// Has the task of the connection run.
    pub(crate) fn wake(&self) {
        self.state.borrow_mut().wake();
    }

    /// The generation of the oldest configuration of a stream.
    pub(crate) fn oldest_generation(&self) -> Option<u64> {
        self.state.borrow().streams.iter().map(|stream| stream.generation).min()
    }
}

impl State {
    /// Has the task of the connection run, unless that does.
    fn wake(&mut self) {
        if !self.is_polled
            && let Some(waker) = &self.waker
        {
            waker.wake_by_ref();
        }
    }

    fn place_of(&self, id: StreamId) -> Option<usize> {
        self.streams.binary_search_by_key(&id, |stream| stream.id).ok()
    }

    fn find(&self, id: StreamId) -> Option<&Rc<Stream>> {
        self.place_of(id).map(|place| &self.streams[place])
    }

    /// Number of bytes that wait for the socket.
    fn unsent_bytes(&self) -> usize {
        self.output.len_bytes() + self.frames.len()
    }
}

/// A connection that is being served. Its streams end with it, however it ends.
struct Served(Rc<Http2>);

impl Drop for Served {
    fn drop(&mut self) {
        let Served(http2) = self;
        // After a panic there may be a borrow that never ends.
        let Ok(state) = http2.state.try_borrow() else { return };
        let streams: Vec<Rc<Stream>> = state.streams.iter().cloned().collect();
        drop(state);
        if !streams.is_empty() && !std::thread::panicking() {
            http2.say_goodbye();
        }
        for stream in streams {
            stream.lose(Gone::ByPeer);
            stream.end_with_connection();
        }
        // Each holds the connection.
        let finished = std::mem::take(&mut http2.state.borrow_mut().finished);
        drop(finished);
    }
}
