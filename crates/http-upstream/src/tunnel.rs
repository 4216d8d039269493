//! The server's end of a tunnel, after a 101 or a 2xx to CONNECT.
//!
//! A tunnel may be idle for days: it keeps the connection and its record, and buffers only while there are bytes. The
//! state for sending the request and reading the response is freed.

use std::task::{Context, Poll, ready};
use std::time::Duration;

use gale_http::request::body::BodyError;
use gale_http::request::tunnel::Tunnel;
use gale_runtime::{Buffer, Bytes, Output};
use gale_tls::Transport;
use gale_upstream::PooledConnection;
use gale_worker::CountedConnection;

use crate::answering::{Answering, TunnelRecord};
use crate::exclusive::Connection;

/// Maximum number of bytes received at once.
const PIECE_BYTES: usize = 16 * 1024;

/// The server's end of a tunnel, see the head of the file.
pub(super) struct UpstreamTunnel {
    record: TunnelRecord,
    stream: Transport,
    _counted: CountedConnection,
    input: Buffer,
    /// `None` while there is nothing to send.
    output: Option<Box<Output>>,
    has_ended: bool,
    /// True if the client has ended its direction, and the server's is to be ended after the queued bytes.
    is_ending: bool,
    idle_max: Duration,
}

impl UpstreamTunnel {
    /// Creates the tunnel on the connection of an accepted request.
    pub fn new(answering: Box<Answering>, idle_max: Duration) -> UpstreamTunnel {
        let (Connection { own, input, .. }, record) = answering.into_tunnel();
        let PooledConnection { transport, counted, .. } = *own;
        UpstreamTunnel {
            record,
            stream: transport,
            _counted: counted,
            input,
            output: None,
            has_ended: false,
            is_ending: false,
            idle_max,
        }
    }
}

fn lost(error: std::io::Error) -> BodyError {
    match error.kind() {
        std::io::ErrorKind::OutOfMemory => BodyError::NoMemory,
        _ => BodyError::Reset,
    }
}

impl Tunnel for UpstreamTunnel {
    fn poll_read(&mut self, context: &mut Context<'_>) -> Poll<Result<Option<Bytes>, BodyError>> {
        if self.input.is_empty() {
            if self.has_ended {
                return Poll::Ready(Ok(None));
            }
            let received = ready!(self.stream.poll_recv(context, &mut self.input, PIECE_BYTES)).map_err(lost)?;
            if received == 0 {
                self.has_ended = true;
                return Poll::Ready(Ok(None));
            }
            self.record.note_received(received);
        }
        Poll::Ready(Ok(self.input.take_lease().map(gale_runtime::Lease::freeze)))
    }

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), BodyError>> {
        if let Some(output) = &mut self.output {
            while !output.is_empty() {
                let sent = ready!(self.stream.poll_send(context, output)).map_err(lost)?;
                self.record.note_sent(sent);
            }
            self.output = None;
        }
        if std::mem::take(&mut self.is_ending) {
            // Fails if the server has already closed the connection.
            let _ = self.stream.shutdown_write();
        }
        Poll::Ready(Ok(()))
    }

    fn write(&mut self, bytes: Bytes) {
        self.output.get_or_insert_default().push(bytes);
    }

    fn end(&mut self) {
        self.is_ending = true;
    }

    fn idle_max(&self) -> Duration {
        self.idle_max
    }
}
