//! Attempts to connect a session to servers, for the `$upstream_*` variables and for messages.
//! (<https://nginx.org/en/docs/stream/ngx_stream_upstream_module.html#variables>)

use std::cell::{Ref, RefCell, RefMut};
use std::sync::Arc;
use std::time::Duration;

use gale_runtime::Moment;
use gale_upstream::PeerName;
use gale_worker::traffic::{Nanos, Served};
use smallvec::SmallVec;

/// An attempt with one server.
#[derive(Debug)]
pub struct Attempt {
    /// Value of `$upstream_addr`: the server, or the group's name if the group had no server to offer.
    pub peer: Arc<PeerName>,
    /// Start of the attempt.
    pub started: Moment,
    /// Time to connect.
    pub connect_time: Option<Duration>,
    /// Time to the first byte from the server.
    pub first_byte_time: Option<Duration>,
    /// Time to the end of the attempt.
    pub session_time: Option<Duration>,
    /// Bytes received from the server.
    pub bytes_received: u64,
    /// Bytes sent to the server.
    pub bytes_sent: u64,
}

impl Attempt {
    /// Returns the result for the server's statistics.
    pub fn served(&self) -> Served {
        Served {
            code: None,
            received: self.bytes_received,
            sent: self.bytes_sent,
            first_byte: self.first_byte_time.map(Nanos::from),
            whole: self.session_time.filter(|_| self.connect_time.is_some()).map(Nanos::from),
        }
    }

    /// Records the end of the attempt.
    pub fn end(&mut self, now: Moment) {
        self.session_time.get_or_insert(now.since(self.started));
    }
}

/// All attempts of a session.
#[derive(Debug, Default)]
pub struct Attempts(RefCell<Option<Tried>>);

/// Attempts of a session that is passed to servers.
#[derive(Debug, Default)]
pub struct Tried(SmallVec<[Attempt; 1]>);

impl Attempts {
    /// Marks the session as passed to servers.
    pub fn begin(&self) {
        self.0.borrow_mut().get_or_insert_default();
    }

    /// Returns the attempts, or `None` if the session is not passed to servers.
    pub fn begun(&self) -> Option<Ref<'_, Tried>> {
        Ref::filter_map(self.0.borrow(), Option::as_ref).ok()
    }

    /// Adds an attempt that begins at `started`.
    pub fn add(&self, peer: Arc<PeerName>, started: Moment) {
        self.0.borrow_mut().get_or_insert_default().0.push(Attempt {
            peer,
            started,
            connect_time: None,
            first_byte_time: None,
            session_time: None,
            bytes_received: 0,
            bytes_sent: 0,
        });
    }

    /// Returns the current attempt.
    ///
    /// # Panics
    /// If there is no attempt.
    pub fn last(&self) -> RefMut<'_, Attempt> {
        let tried = RefMut::map(self.0.borrow_mut(), |tried| tried.get_or_insert_default());
        RefMut::map(tried, |tried| tried.0.last_mut().expect("one was added"))
    }
}

impl Tried {
    /// Iterates over the attempts in order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &Attempt> {
        self.0.iter()
    }

    /// Returns the server of the last attempt.
    pub fn peer(&self) -> Option<&str> {
        self.0.last().map(|attempt| &**attempt.peer)
    }

    /// Bytes received from the server of the last attempt.
    pub fn received(&self) -> u64 {
        self.0.last().map_or(0, |attempt| attempt.bytes_received)
    }

    /// Bytes sent to the server of the last attempt.
    pub fn sent(&self) -> u64 {
        self.0.last().map_or(0, |attempt| attempt.bytes_sent)
    }
}
