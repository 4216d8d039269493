//! A request on a connection that carries nothing else meanwhile: HTTP/1, FastCGI, SCGI, uwsgi, memcached.

use std::io;
use std::task::{Context, Poll, ready};

use gale_http::request::Request;
use gale_protocol::request::Version;
use gale_runtime::Buffer;
use gale_upstream::{Chosen, Pool, PoolKey, PooledConnection};

use crate::failure::{End, READING};
use crate::heading::{Heading, tell_messages};
use crate::passing::{Alone, Passing};
use crate::receiving::{BodyRead, HeadRead, Malformed, ResponseReader, UpstreamHead};
use crate::record::Records;
use crate::sending::{SendError, Sending};
use crate::settings::UpstreamSettings;

/// A connection to a server, with received bytes that were not read yet.
pub(super) struct Connection {
    pub own: Box<PooledConnection>,
    pub input: Buffer,
    /// The server has ended its direction.
    pub has_ended: bool,
    /// Key for keeping the connection; `None` if it is not kept.
    pub key: Option<PoolKey>,
    /// True if it was used before.
    pub is_reused: bool,
    /// True if it is bound to the client's connection.
    pub is_bound: bool,
}

/// A request and its connection, see the head of the file.
pub(super) struct Exclusive {
    /// `None` once the connection is idle again.
    connection: Option<Connection>,
    pub sending: Sending,
    pub reader: Box<dyn ResponseReader>,
}

/// True if connections of this pool may be bound to the client's connection. Requests on HTTP/2 are concurrent, and may
/// come from several users whose requests a proxy combines.
pub(super) fn may_bind(request: &Request, pool: &Pool) -> bool {
    pool.settings().binds_clients && request.version() < Version::Http2
}

impl Exclusive {
    /// Begins to send a request. The value is large, so it is created in place.
    #[inline]
    pub fn begin(passing: &Passing<'_>, wire: &Alone<'_>, connection: Connection) -> Exclusive {
        Exclusive {
            connection: Some(connection),
            sending: Sending::new(
                wire.head.clone(),
                &passing.body,
                wire.framing,
                *passing.settings.exchange.send_timeout.get(),
            ),
            reader: (wire.reader)(),
        }
    }

    /// True if its connection is bound to the client's.
    pub fn is_of_user(&self) -> bool {
        self.connection.as_ref().is_some_and(|connection| connection.is_bound)
    }

    /// True if its connection carried another request before.
    pub fn is_reused(&self) -> bool {
        self.connection.as_ref().is_some_and(|connection| connection.is_reused)
    }

    /// Continues sending, and reads until the head is complete.
    pub fn poll_head(
        &mut self,
        request: &Request,
        settings: &UpstreamSettings,
        records: &Records,
        heading: &mut Heading,
        context: &mut Context<'_>,
    ) -> Poll<Result<Box<UpstreamHead>, End>> {
        let head_max = settings.head_max();
        let read_timeout = *settings.exchange.read_timeout.get();
        let Exclusive { connection, sending, reader } = self;
        let connection = connection.as_mut().expect("the response has not ended");
        if reader.is_tunnel()
            && let Ok(HeadRead::Whole(head)) = reader.read_head(&mut connection.input, false)
        {
            return Poll::Ready(Ok(head));
        }
        loop {
            if heading.broken.is_none() && !sending.is_done() {
                match sending.poll(request, &connection.own.transport, context) {
                    Poll::Pending => {}
                    Poll::Ready(Ok(())) => heading.is_heard = true,
                    // The server may have sent its reason before it closed the connection.
                    Poll::Ready(Err(SendError::Server(error))) => {
                        heading.broken = Some(error);
                        heading.is_heard = true;
                        sending.give_up();
                    }
                    Poll::Ready(Err(error)) => return Poll::Ready(Err(End::Send(error))),
                }
            }
            let room = head_max.saturating_sub(connection.input.len());
            if room == 0 {
                return Poll::Ready(Err(End::Malformed(Malformed("upstream sent too big header".to_owned()))));
            }
            match connection.own.transport.poll_recv(context, &mut connection.input, room) {
                Poll::Ready(Ok(0)) => {
                    connection.has_ended = true;
                    if connection.input.is_empty() {
                        return Poll::Ready(Err(heading.broken.take().map_or(End::Closed, End::Sending)));
                    }
                }
                Poll::Ready(Ok(count)) => {
                    records.last().bytes_received += count as u64;
                    heading.is_heard = true;
                }
                Poll::Ready(Err(error)) => return Poll::Ready(Err(End::Receiving(error))),
                Poll::Pending => {
                    let silence = &mut connection.own.silence;
                    if std::mem::take(&mut heading.is_heard) {
                        silence.set_after(read_timeout);
                    }
                    let waits = sending.is_done() || heading.broken.is_some();
                    if waits && silence.poll_expired(context).is_ready() {
                        return Poll::Ready(Err(heading.broken.take().map_or(End::Silent, End::Sending)));
                    }
                    return Poll::Pending;
                }
            }
            loop {
                let read = reader.read_head(&mut connection.input, connection.has_ended);
                tell_messages(&mut **reader, request, READING);
                match read {
                    Err(malformed) => return Poll::Ready(Err(End::Malformed(malformed))),
                    Ok(HeadRead::Partial) if connection.has_ended => return Poll::Ready(Err(End::Closed)),
                    Ok(HeadRead::Partial) => break,
                    Ok(HeadRead::Interim(status, fields)) => heading.interim.pass(request, settings, status, &fields),
                    Ok(HeadRead::Whole(head)) => return Poll::Ready(Ok(head)),
                }
            }
        }
    }

    /// Keeps the connection after a complete response, if it can be reused. A connection that is authenticated as the
    /// client's user is kept for that client alone, or closed.
    pub fn park(&mut self, request: &Request, chosen: &Chosen, is_authenticated: bool) {
        let Some(mut connection) = self.connection.take() else { return };
        let is_idle = self.sending.is_done() && connection.input.is_empty() && !connection.has_ended;
        if self.reader.keeps_alive() && is_idle {
            connection.own.age.note_request(self.reader.idle_seconds());
            let Connection { own, key, is_bound, .. } = connection;
            let (Some(pool), Some(key)) = (chosen.connections(), key) else { return };
            if !is_bound && !is_authenticated {
                pool.park(&request.worker().common, key, own);
            } else if may_bind(request, pool) {
                pool.bind(request.exchange().connection(), key, own, is_bound);
            }
        }
    }

    /// Reads the next part of the body from the received bytes.
    pub fn read_body(&mut self) -> Result<BodyRead, Malformed> {
        let Exclusive { connection, reader, .. } = self;
        let connection = connection.as_mut().expect("the response has not ended");
        reader.read_body(&mut connection.input, connection.has_ended)
    }

    /// Receives at most `max` bytes; 0 means the end of the connection.
    pub fn poll_receive(&mut self, max: usize, context: &mut Context<'_>) -> Poll<io::Result<usize>> {
        let wanted = self.reader.wants().map_or(max, |wanted| usize::try_from(wanted).unwrap_or(max).clamp(1, max));
        let connection = self.open();
        let received = ready!(connection.own.transport.poll_recv(context, &mut connection.input, wanted))?;
        if received == 0 {
            connection.has_ended = true;
        }
        Poll::Ready(Ok(received))
    }

    /// Sends the rest of the request.
    pub fn poll_send(&mut self, request: &Request, context: &mut Context<'_>) -> Poll<Result<(), SendError>> {
        if self.sending.is_done() {
            return Poll::Ready(Ok(()));
        }
        let stream = &self.connection.as_ref().expect("the response has not ended").own.transport;
        let polled = self.sending.poll(request, stream, context);
        if matches!(polled, Poll::Ready(Err(_))) {
            self.sending.give_up();
        }
        polled
    }

    /// Takes the connection, with the bytes received behind the head, for a tunnel.
    pub fn take_connection(&mut self) -> Connection {
        self.connection.take().expect("the response has not ended")
    }

    fn open(&mut self) -> &mut Connection {
        self.connection.as_mut().expect("the response has not ended")
    }
}
