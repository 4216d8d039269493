//! The counterpart of [`crate::client`] for HTTP/2: a connection of its own, and one request at a time.

use std::cell::Cell;
use std::future::poll_fn;
use std::rc::Rc;
use std::task::{Context, Poll};

use gale_runtime::{Bytes, SocketAddress, Timer, now, timeout};
use gale_upstream::PoolKey;
use gale_worker::Worker;

use super::connection::Http2Connection;
use super::connections::Destination;
use super::request::Http2Request;
use super::stream::{Head, Lost, Stream, StreamEnd};
use crate::client::{Answer, ClientConnection, ClientError, Patience, Step};

/// Number of bytes of a body taken at once.
const TAKEN_BYTES: usize = 16 * 1024;

/// A connection to a server that speaks HTTP/2. Dropping it closes the connection.
pub struct Http2Client(Rc<Http2Connection>);

impl Http2Client {
    /// Begins HTTP/2 on a new connection. Heads may have at most `head_max` bytes.
    pub fn begin(
        worker: &Rc<Worker>,
        address: &SocketAddress,
        connection: ClientConnection,
        head_max: usize,
    ) -> Http2Client {
        let (transport, counted) = connection.into_parts();
        let destination = Destination::new(PoolKey::new(address, 0), None);
        let connection = Http2Connection::begin(worker, 0, destination, transport, counted, head_max);
        connection.keep();
        Http2Client(connection)
    }

    /// True if the server accepts another request.
    pub fn is_idle(&self) -> bool {
        self.0.has_room()
    }

    /// Sends a request, with a body if there is one, and receives its response, of whose body at most `body_max` bytes
    /// are kept.
    ///
    /// # Errors
    /// The reason for which there is no response.
    pub async fn ask(
        &self,
        request: &Http2Request,
        body: Option<Bytes>,
        body_max: usize,
        patience: Patience,
    ) -> Result<Answer, ClientError> {
        let stream = self.0.begin_request(request, body.is_none()).map_err(|_| ClientError::Closed(Step::Sending))?;
        let mut asked =
            Asked { connection: &self.0, stream, step: Cell::new(Step::ReadingHead), silence: Timer::new() };
        if let Some(body) = body {
            self.0.queue(&asked.stream, body);
            self.0.end_request(&asked.stream, Vec::new());
        }
        let answered = timeout(patience.whole, asked.run(body_max, patience)).await;
        answered.unwrap_or_else(|_| Err(ClientError::TimedOut(asked.step.get())))
    }
}

impl Drop for Http2Client {
    fn drop(&mut self) {
        self.0.close();
    }
}

/// One request and its response. Dropping it resets the stream.
struct Asked<'c> {
    connection: &'c Rc<Http2Connection>,
    stream: Rc<Stream>,
    step: Cell<Step>,
    silence: Timer,
}

impl Drop for Asked<'_> {
    fn drop(&mut self) {
        self.connection.leave(&self.stream);
    }
}

impl Asked<'_> {
    async fn run(&mut self, body_max: usize, patience: Patience) -> Result<Answer, ClientError> {
        let began = now();
        self.silence.set_after(patience.send.max(patience.read));
        let head = loop {
            match poll_fn(|context| self.poll_head(context)).await? {
                Head::Final(head) => break head,
                // Its fields are also in the final response.
                Head::Interim(..) => self.silence.set_after(patience.read),
            }
        };
        let header_time = now().since(began);
        self.step.set(Step::ReadingBody);
        let mut body = Vec::new();
        loop {
            self.silence.set_after(patience.read);
            let Some(piece) = poll_fn(|context| self.poll_piece(context)).await? else { break };
            let room = body_max - body.len();
            body.extend_from_slice(&piece[..piece.len().min(room)]);
            if piece.len() > room {
                break;
            }
        }
        let trailers = self.stream.with(|own| std::mem::take(&mut own.trailers));
        Ok(Answer { head, body, trailers, header_time })
    }

    fn poll_head(&mut self, context: &mut Context<'_>) -> Poll<Result<Head, ClientError>> {
        if let Some(head) = self.stream.with(|own| own.heads.pop_front()) {
            return Poll::Ready(Ok(head));
        }
        match self.stream.ended() {
            Some(end) => Poll::Ready(Err(self.error(&end))),
            None => self.poll_silence(context),
        }
    }

    /// Returns the next bytes of the body; `None` at its end.
    fn poll_piece(&mut self, context: &mut Context<'_>) -> Poll<Result<Option<Bytes>, ClientError>> {
        match self.connection.take(&self.stream, TAKEN_BYTES) {
            Ok(Some(piece)) => return Poll::Ready(Ok(Some(piece))),
            Ok(None) => {}
            Err(error) => return Poll::Ready(Err(ClientError::Failed(self.step.get(), error))),
        }
        match self.stream.ended() {
            Some(StreamEnd::Complete) => Poll::Ready(Ok(None)),
            Some(end) => Poll::Ready(Err(self.error(&end))),
            None => self.poll_silence(context),
        }
    }

    fn poll_silence<T>(&mut self, context: &mut Context<'_>) -> Poll<Result<T, ClientError>> {
        self.stream.register(context);
        self.silence.poll_expired(context).map(|()| {
            self.connection.suspect();
            Err(ClientError::TimedOut(self.step.get()))
        })
    }

    fn error(&self, end: &StreamEnd) -> ClientError {
        let step = self.step.get();
        match end {
            StreamEnd::Unprocessed | StreamEnd::Lost(Lost::Closed) => ClientError::Closed(step),
            StreamEnd::Lost(lost @ (Lost::Failed(..) | Lost::NoMemory)) => ClientError::Failed(step, lost.error()),
            end => ClientError::Malformed(step, end.text()),
        }
    }
}
