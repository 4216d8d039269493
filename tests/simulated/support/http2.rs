//! An HTTP/2 client in a simulated world: requests, windows, and the data received on each stream.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use gale_protocol::http2::hpack::Indexing;
use gale_protocol::http2::{Connection, ErrorCode, Event, Fields, Limits, RequestLine, StreamId};
use gale_runtime::simulation::{Random, Reading};
use gale_runtime::{Buffer, Bytes, Notify, Output, SocketAddress, Stream, now, sleep, spawn};

/// A request in either version of HTTP.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ask {
    pub method: String,
    pub target: String,
    pub fields: Vec<(String, String)>,
    pub body: Vec<u8>,
}

/// Data received on a stream.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Came {
    /// Statuses of all heads, interim ones included.
    pub statuses: Vec<u16>,
    pub body: Vec<u8>,
    /// The server's direction has ended.
    pub is_complete: bool,
    pub reset: Option<ErrorCode>,
}

impl Came {
    /// `true` if nothing more will arrive.
    pub fn is_over(&self) -> bool {
        self.is_complete || self.reset.is_some()
    }
}

/// End of a connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum End {
    /// The server has closed it.
    Closed,
    /// It was reset.
    Reset,
    /// The client has closed it.
    Left,
}

/// A connection with two tasks, which receive and send.
pub struct Http2Client {
    stream: Stream,
    state: RefCell<State>,
    /// Notified of every change.
    news: Notify,
    pub local: SocketAddress,
    /// Received data open the windows again, except on this stream.
    pub held: Cell<Option<StreamId>>,
}

struct State {
    connection: Connection,
    came: BTreeMap<StreamId, Came>,
    out: Vec<u8>,
    goaway: Option<(StreamId, ErrorCode)>,
    end: Option<End>,
    /// Number of running tasks.
    tasks: usize,
}

impl Http2Client {
    /// Starts on a new connection.
    pub fn begin(stream: Stream, window: u32, reads: Reading) -> Rc<Http2Client> {
        let limits = Limits { stream_window: window, connection_window: window + (16 << 20), ..Limits::default() };
        let state = State {
            connection: Connection::client(Arc::new(limits)),
            came: BTreeMap::new(),
            out: Vec::new(),
            goaway: None,
            end: None,
            tasks: 2,
        };
        let local = stream.local_address().expect("a simulated connection knows its addresses");
        let client = Http2Client { stream, state: state.into(), news: Notify::new(), local, held: Cell::new(None) };
        let client = Rc::new(client);
        let (receiver, sender) = (Rc::clone(&client), Rc::clone(&client));
        spawn(async move { receiver.receive(reads).await });
        spawn(async move { sender.send().await });
        client
    }

    /// Begins a request and returns its stream, unless the connection takes no more.
    pub fn ask(&self, ask: &Ask) -> Option<StreamId> {
        let state = &mut *self.state.borrow_mut();
        if state.end.is_some() {
            return None;
        }
        let line = RequestLine {
            method: ask.method.as_bytes(),
            scheme: b"http",
            authority: b"h",
            path: ask.target.as_bytes(),
            protocol: None,
        };
        let State { connection, out, .. } = state;
        connection.poll_control(out);
        let begun = connection.write_request(line, ask.body.is_empty(), out, |writer| {
            for (name, value) in &ask.fields {
                writer.field(name.as_bytes(), value.as_bytes(), Indexing::IfRepeated).expect("a field");
            }
        });
        let stream = begun.ok()?;
        state.came.insert(stream, Came::default());
        self.news.notify_all();
        Some(stream)
    }

    /// Sends a body in pieces of at most `max` bytes, with pauses of at most `pause`. Ends when the server wants no
    /// more of it. Without `ends` the rest of the message is held back.
    pub async fn send_body(&self, id: StreamId, body: &[u8], max: usize, pause: Duration, ends: bool, random: &Random) {
        let mut rest = body;
        while !rest.is_empty() {
            let wanted = random.up_to(rest.len().min(max));
            let sent = {
                let State { connection, out, .. } = &mut *self.state.borrow_mut();
                connection.poll_control(out);
                let Ok(sent) = connection.write_data(id, wanted, ends && wanted == rest.len(), out) else { return };
                out.extend_from_slice(&rest[..sent.length]);
                sent
            };
            if sent.is_blocked() {
                if self.end().is_some() {
                    return;
                }
                self.news.notified().await;
                continue;
            }
            rest = &rest[sent.length..];
            self.news.notify_all();
            if random.chance(300) {
                sleep(Duration::from_nanos(random.below(pause.as_nanos() as u64 + 1))).await;
            }
        }
    }

    /// Resets a stream.
    pub fn reset(&self, id: StreamId) {
        self.state.borrow_mut().connection.reset(id, ErrorCode::CANCEL);
        self.news.notify_all();
    }

    /// Waits until the condition is true of a stream, or nothing more arrives.
    pub async fn until(&self, id: StreamId, is_so: impl Fn(&Came) -> bool) {
        self.wait(|state| state.came[&id].is_over() || is_so(&state.came[&id])).await;
    }

    /// Waits until the connection has ended.
    pub async fn ended(&self) -> End {
        self.wait(|_| false).await;
        self.end().expect("it has")
    }

    async fn wait(&self, is_so: impl Fn(&State) -> bool) {
        loop {
            let has_ended = {
                let state = self.state.borrow();
                state.end.is_some() && state.tasks == 0 || is_so(&state)
            };
            if has_ended {
                return;
            }
            self.news.notified().await;
        }
    }

    /// Closes or resets the connection at once.
    pub fn leave(&self, resets: bool) {
        if resets {
            // It fails if the connection has ended already.
            let _ = self.stream.set_linger_reset();
        }
        self.note_end(End::Left);
    }

    /// Data received on a stream.
    pub fn came(&self, id: StreamId) -> Came {
        self.state.borrow().came[&id].clone()
    }

    pub fn goaway(&self) -> Option<(StreamId, ErrorCode)> {
        self.state.borrow().goaway
    }

    pub fn end(&self) -> Option<End> {
        self.state.borrow().end
    }

    fn note_end(&self, end: End) {
        self.state.borrow_mut().end.get_or_insert(end);
        self.news.notify_all();
    }

    fn note_task_ended(&self) {
        self.state.borrow_mut().tasks -= 1;
        self.news.notify_all();
    }

    /// Sends pending output until the connection ends.
    async fn send(&self) {
        while self.end().is_none() {
            let bytes = {
                let State { connection, out, .. } = &mut *self.state.borrow_mut();
                connection.poll_control(out);
                std::mem::take(out)
            };
            if bytes.is_empty() {
                self.news.notified().await;
                continue;
            }
            let mut output = Output::new();
            output.push(Bytes::from(bytes));
            // A client that leaves does not wait for the rest; the receiver notices when the server has closed.
            before(self.stream.send_all(&mut output), self.left()).await;
        }
        self.note_task_ended();
    }

    /// Receives until the connection ends.
    async fn receive(&self, reads: Reading) {
        let (mut input, mut fields) = (Buffer::new(), Fields::new());
        let end = loop {
            let max = match reads {
                Reading::Slowly(max, pause) => {
                    sleep(pause).await;
                    max
                }
                Reading::Eagerly | Reading::Until(_) => 16 * 1024,
            };
            match before(self.stream.recv(&mut input, max), self.left()).await {
                None => break End::Left,
                Some(Ok(0)) => break End::Closed,
                Some(Ok(_)) => self.take(&mut input, &mut fields),
                Some(Err(_)) => break End::Reset,
            }
        };
        self.note_end(end);
        self.note_task_ended();
    }

    /// Ready when the client has left.
    async fn left(&self) {
        while self.end().is_none() {
            self.news.notified().await;
        }
    }

    fn take(&self, input: &mut Buffer, fields: &mut Fields) {
        let state = &mut *self.state.borrow_mut();
        loop {
            let handled = state.connection.handle_input(input.readable(), fields);
            let handled = handled.unwrap_or_else(|fault| panic!("the server broke a rule: {fault}"));
            let event = handled.event;
            let Some(event) = event else {
                input.consume(handled.consumed);
                break;
            };
            match event {
                Event::Response { stream, end_stream } => {
                    if let Some(came) = state.came.get_mut(&stream) {
                        came.statuses.push(fields.response.status);
                        came.is_complete = end_stream;
                    }
                }
                Event::Data { stream, piece, end_stream } => {
                    if let Some(came) = state.came.get_mut(&stream) {
                        came.body.extend_from_slice(&input.readable()[piece.clone()]);
                        came.is_complete = end_stream;
                    }
                    if self.held.get() != Some(stream) {
                        state.connection.release(stream, piece.len());
                    }
                }
                Event::Trailers { stream } => {
                    state.came.entry(stream).or_default().is_complete = true;
                }
                Event::Reset { stream, code } => state.came.entry(stream).or_default().reset = Some(code),
                Event::Fault { fault, .. } => panic!("the server broke a rule: {fault}"),
                Event::GoAway { last_stream, code, .. } => state.goaway = Some((last_stream, code)),
                _ => {}
            }
            input.consume(handled.consumed);
        }
        self.news.notify_all();
    }
}

/// Result of the first future, or `None` if the second one is ready before.
async fn before<T>(first: impl Future<Output = T>, second: impl Future<Output = ()>) -> Option<T> {
    let (mut first, mut second) = (std::pin::pin!(first), std::pin::pin!(second));
    std::future::poll_fn(|context| {
        if let std::task::Poll::Ready(result) = first.as_mut().poll(context) {
            return std::task::Poll::Ready(Some(result));
        }
        second.as_mut().poll(context).map(|()| None)
    })
    .await
}

/// Relays bytes both ways, each `delay` later, up to the capacity of its memory: a long path with a high bandwidth.
pub fn relay(near: Stream, far: Stream, delay: Duration) {
    let (near, far) = (Rc::new(near), Rc::new(far));
    for (from, to) in [(Rc::clone(&near), Rc::clone(&far)), (far, near)] {
        let under_way = Rc::new(RefCell::new(std::collections::VecDeque::new()));
        let (news, taken) = (Rc::new(Notify::new()), Rc::clone(&under_way));
        let told = Rc::clone(&news);
        spawn(async move {
            let mut input = Buffer::new();
            loop {
                let length = from.recv(&mut input, 64 * 1024).await.unwrap_or(0);
                let piece = Bytes::copy_from_slice(input.readable());
                input.consume(input.len());
                under_way.borrow_mut().push_back((now() + delay, piece));
                told.notify_all();
                if length == 0 {
                    return;
                }
            }
        });
        spawn(async move {
            loop {
                let next = taken.borrow_mut().pop_front();
                let Some((due, piece)) = next else {
                    news.notified().await;
                    continue;
                };
                sleep(due.since(now())).await;
                if piece.is_empty() {
                    // The connection may have ended.
                    let _ = to.shutdown_write();
                    return;
                }
                let mut output = Output::new();
                output.push(piece);
                if to.send_all(&mut output).await.is_err() {
                    return;
                }
            }
        });
    }
}
