//! The server's end of a tunnel, after a 101 or a 2xx to CONNECT.

use std::task::{Context, Poll, ready};
use std::time::Duration;

use gale_runtime::{Buffer, Bytes, Output};

use crate::request::body::BodyError;
use crate::request::tunnel::Tunnel;
use crate::upstream::answering::Answering;

/// Most that is received at once, in bytes.
const PIECE_BYTES: usize = 16 * 1024;

/// See the file's head.
pub(super) struct UpstreamTunnel {
    answering: Box<Answering>,
    input: Buffer,
    output: Output,
    has_ended: bool,
    /// The client has ended its direction, and the server is to be told when it has all.
    is_ending: bool,
    idle_max: Duration,
}

impl UpstreamTunnel {
    /// The connection on which a server has agreed.
    pub fn new(mut answering: Box<Answering>, idle_max: Duration) -> UpstreamTunnel {
        let input = answering.take_input();
        UpstreamTunnel { answering, input, output: Output::new(), has_ended: false, is_ending: false, idle_max }
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
            let received = ready!(self.answering.poll_receive_into(&mut self.input, PIECE_BYTES, context));
            if received.map_err(lost)? == 0 {
                self.has_ended = true;
                return Poll::Ready(Ok(None));
            }
        }
        Poll::Ready(Ok(self.input.take_lease().map(gale_runtime::Lease::freeze)))
    }

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), BodyError>> {
        while !self.output.is_empty() {
            ready!(self.answering.poll_send_from(&mut self.output, context)).map_err(lost)?;
        }
        if std::mem::take(&mut self.is_ending) {
            // It has closed the connection already.
            let _ = self.answering.shutdown_write();
        }
        Poll::Ready(Ok(()))
    }

    fn write(&mut self, bytes: Bytes) {
        self.output.push(bytes);
    }

    fn end(&mut self) {
        self.is_ending = true;
    }

    fn idle_max(&self) -> Duration {
        self.idle_max
    }
}
