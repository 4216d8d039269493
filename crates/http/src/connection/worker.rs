//! Http's part of an event loop: its connections, and memory that they use again and again.
//!
//! Everything here belongs to one event loop. No state of a request is shared with another worker.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll};

use gale_base::http_date;
use gale_engine::configuration::Configuration;
use gale_engine::connections::{ConnectionInfo, ConnectionTable};
use gale_engine::listen::covers;
use gale_engine::protocol::{Protocol, ProtocolWorker};
use gale_process::{ListenAddress, ListenerHandle, Successor};
use gale_protocol::http2::Fields;
use gale_runtime::SocketAddress;
use gale_tls::TlsStream;
use gale_tls::Transport;
use gale_worker::Worker;

use crate::connection::HttpConnection;
use crate::connection::handover::pass_idle;
use crate::connection::http1::Transfer;
use crate::request::configuration::HttpConfiguration;
use crate::request::worker::{Configured, HttpWorker, SPARES_MAX};

/// Bounds of the memory for frames that is kept: number of buffers, and bytes of each.
const SPARE_FRAMES_MAX: usize = 16;
const SPARE_FRAMES_BYTES_MAX: usize = 256 * 1024;

/// The `Date` field before a date is filled in, and the place of the date.
const DATE_LINE: [u8; DATE_LINE_BYTES] = *b"Date: Thu, 01 Jan 1970 00:00:00 GMT\r\n";
const DATE_VALUE: std::ops::Range<usize> = 6..35;
const DATE_LINE_BYTES: usize = 37;

/// See the file's head.
pub struct HttpConnections {
    /// State that all requests share.
    pub(crate) worker: Rc<HttpWorker>,
    /// The connections.
    pub(crate) table: Rc<ConnectionTable<HttpConnection>>,
    #[expect(clippy::vec_box, reason = "a transfer stays where it is")]
    spare_transfers: RefCell<Vec<Box<Transfer>>>,
    /// The fields of the message that was decoded last in HTTP/2.
    pub(crate) fields: RefCell<Fields>,
    /// Configurations of next exchanges that are not the current one, by the connections' numbers in the table. Few
    /// connections have one, and only around a reload.
    pub(super) kept_configurations: RefCell<BTreeMap<usize, Rc<Configured>>>,
    /// Memory for frames, of connections that have none to send.
    spare_frames: RefCell<Vec<Vec<u8>>>,
    /// The second that the line was made for, and the line.
    date_line: RefCell<(u64, [u8; DATE_LINE_BYTES])>,
    /// A response head is put together here before it is queued.
    pub(crate) scratch: RefCell<Vec<u8>>,
}

impl HttpConnections {
    /// None are open; the first exchanges use `configuration`.
    pub fn new(common: Rc<Worker>, configuration: Rc<Configured>) -> Rc<HttpConnections> {
        Rc::new(HttpConnections {
            table: ConnectionTable::new(Rc::clone(&common)),
            worker: HttpWorker::new(common, configuration),
            spare_transfers: RefCell::default(),
            fields: RefCell::default(),
            kept_configurations: RefCell::default(),
            spare_frames: RefCell::default(),
            date_line: RefCell::new((u64::MAX, DATE_LINE)),
            scratch: RefCell::default(),
        })
    }

    /// State for an exchange of HTTP/1: a spare one, or a new one.
    pub(crate) fn take_transfer(&self) -> Box<Transfer> {
        self.spare_transfers.borrow_mut().pop().unwrap_or_default()
    }

    /// Takes a transfer back of which nothing is left.
    pub(crate) fn give_transfer_back(&self, transfer: Box<Transfer>) {
        let mut spare = self.spare_transfers.borrow_mut();
        if spare.len() < SPARES_MAX {
            spare.push(transfer);
        }
    }

    /// Memory for frames.
    pub(crate) fn take_frames(&self) -> Vec<u8> {
        self.spare_frames.borrow_mut().pop().unwrap_or_default()
    }

    /// Takes it back when nothing is in it.
    pub(crate) fn give_frames_back(&self, frames: Vec<u8>) {
        let mut spare = self.spare_frames.borrow_mut();
        if spare.len() < SPARE_FRAMES_MAX && (1..=SPARE_FRAMES_BYTES_MAX).contains(&frames.capacity()) {
            spare.push(frames);
        }
    }

    /// Appends the `Date` field with its line end, made once a second.
    pub(crate) fn append_date_line(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.date_line());
    }

    /// Value of the `Date` field.
    pub(crate) fn date(&self) -> [u8; http_date::LENGTH] {
        let line = self.date_line();
        *line[DATE_VALUE].first_chunk().expect("a date has its place in the line")
    }

    fn date_line(&self) -> [u8; DATE_LINE_BYTES] {
        let now = gale_runtime::wall_seconds();
        let (made, line) = &mut *self.date_line.borrow_mut();
        if *made != now {
            *made = now;
            line[DATE_VALUE].copy_from_slice(&http_date::format(now));
        }
        *line
    }
}

impl HttpConnections {
    /// Wakes the connections that tell their clients before they end. Their tasks find out whether they have to.
    fn wake_multiplexed(&self) {
        let multiplexed = self.table.some(|connection, _| connection.is_multiplexed());
        multiplexed.iter().filter_map(|(_, connection)| connection.upgrade()).for_each(|it| it.wake_if_multiplexed());
    }
}

/// Returns `true` if connections to this socket may have to speak TLS.
fn speaks_tls(http: &HttpConfiguration, socket: &ListenAddress) -> bool {
    let is_there = |address: &ListenAddress| address == socket || covers(socket, address);
    http.speaks_tls
        && http.addresses.iter().any(|address| address.listening.ssl && is_there(&address.listening.address))
}

impl Protocol for HttpConfiguration {
    fn name(&self) -> &'static str {
        "http"
    }

    fn listeners(&self) -> Vec<ListenerHandle> {
        self.addresses.iter().map(|address| Arc::clone(&address.listening.listener)).collect()
    }

    fn start(&self, worker: &Rc<Worker>, configuration: &Arc<Configuration>) -> Rc<dyn ProtocolWorker> {
        HttpConnections::new(Rc::clone(worker), Configured::new(Arc::clone(configuration)))
    }
}

impl ProtocolWorker for HttpConnections {
    fn commit(&self, configuration: &Arc<Configuration>) {
        let old = self.worker.commit(Configured::new(Arc::clone(configuration)));
        // These would get no answer any more: better closed now than under a request.
        let configuration = self.worker.configuration();
        self.table.close_some(|connection, is_awake| {
            if connection.has_place(&configuration) {
                return false;
            }
            // A request that has begun, or may have, is answered by the old configuration, even if the task has not run
            // yet.
            let may_have_begun = connection.client.may_have_begun() || is_awake;
            if may_have_begun || connection.is_multiplexed() {
                connection.client.begin_with(&old);
            }
            // A client of HTTP/2 is told first.
            !may_have_begun && !connection.is_multiplexed()
        });
        self.table.look_at_all_again();
        self.wake_multiplexed();
    }

    fn serve(
        self: Rc<Self>,
        transport: Transport,
        remote: SocketAddress,
        address: &Rc<ListenAddress>,
        configuration: Option<&Arc<Configuration>>,
    ) {
        let info = ConnectionInfo::arrived(&self.worker.common, remote, Rc::clone(address));
        let first = configuration.map(|configuration| Configured::new(Arc::clone(configuration)));
        let speaks_tls = |configured: &Configured| speaks_tls(configured.http(), address);
        let speaks_tls = match &first {
            Some(first) => speaks_tls(first),
            None => self.worker.with_configuration(speaks_tls),
        };
        let transport = match transport {
            Transport::Plain(socket) if speaks_tls => Transport::Tls(Box::new(TlsStream::new(socket))),
            transport => transport,
        };
        let resumed_idle_max = info.resumed_idle_max();
        if resumed_idle_max.is_some() && transport.tls().is_some() {
            // Its address wants TLS by now.
            return;
        }
        let connection = Rc::new(HttpConnection::new(info, transport, Rc::clone(&self)));
        resumed_idle_max.into_iter().for_each(|idle_max| connection.resume(idle_max));
        let number = self.table.insert(&connection);
        connection.client.set_listed(number);
        first.iter().for_each(|first| connection.client.begin_with(first));
        self.table.set_task(number, gale_runtime::spawn(connection.serve()));
    }

    fn drain(self: Rc<Self>, successor: Option<&Successor>) {
        self.worker.drain();
        match successor {
            Some(successor) => pass_idle(&self, successor),
            None => self.table.drain(),
        }
        self.wake_multiplexed();
    }

    fn resumes(&self) -> bool {
        true
    }

    fn poll_closed(&self, context: &mut Context<'_>) -> Poll<()> {
        // Both, so that both wake this.
        let (connections, background) = (self.table.poll_empty(context), self.worker.background.poll_empty(context));
        if connections.is_ready() && background.is_ready() { Poll::Ready(()) } else { Poll::Pending }
    }

    fn expire(&self, configuration: Option<&Configuration>) {
        let newest = match configuration {
            None => u64::MAX,
            Some(configuration) => match configuration.protocol::<HttpConfiguration>() {
                Some(http) => http.generation,
                // No exchange began with it.
                None => return,
            },
        };
        let is_expired = |generation: Option<u64>| generation.is_some_and(|generation| generation <= newest);
        self.table.close_some(|connection, _| {
            configuration.is_none()
                || is_expired(connection.exchange_generation())
                || is_expired(connection.client.next_generation())
        });
        self.worker.background.expire(newest);
    }

    fn connection_count(&self) -> usize {
        self.table.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request::respond;

    /// Size of the future of an asynchronous function, which is not called.
    fn future_bytes<A, F: Future>(_function: impl FnOnce(A) -> F) -> usize {
        size_of::<F>()
    }

    #[test]
    fn a_connection_is_small_and_an_exchange_is_not_much_larger() {
        let connection = future_bytes(HttpConnection::serve);
        let exchange = future_bytes(|(request, step)| respond::finish_and_send(request, step));
        let state = size_of::<HttpConnection>();
        println!("futures: connection {connection} bytes, exchange {exchange} bytes; HttpConnection {state} bytes");
        // Allocated for each idle connection: just within the allocator's classes of 64 and 192 bytes.
        assert!(connection <= 64, "the connection's future has {connection} bytes");
        assert!(state + 2 * size_of::<usize>() <= 192, "the connection has {state} bytes");
        assert!(exchange <= 512, "the exchange's future has {exchange} bytes");
    }
}
