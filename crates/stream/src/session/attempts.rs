//! What is known of the servers that a session was passed to: for the `$upstream_*` variables and for messages.
//! (<https://nginx.org/en/docs/stream/ngx_stream_upstream_module.html#variables>)

use std::cell::{Ref, RefCell, RefMut};
use std::sync::Arc;
use std::time::Duration;

use gale_engine::traffic::{Nanos, Served};
use gale_engine::upstream::PeerName;
use gale_runtime::Moment;
use smallvec::SmallVec;

/// One server that was tried.
#[derive(Debug)]
pub struct Attempt {
    /// The server as `$upstream_addr` names it; the group's name if it had none to offer.
    pub peer: Arc<PeerName>,
    /// When it began.
    pub started: Moment,
    /// How long connecting took.
    pub connect_time: Option<Duration>,
    /// How long it took until the first byte had come.
    pub first_byte_time: Option<Duration>,
    /// How long the session with the server took.
    pub session_time: Option<Duration>,
    /// What came from the server, in bytes.
    pub bytes_received: u64,
    /// What went to the server, in bytes.
    pub bytes_sent: u64,
}

impl Attempt {
    /// How it has gone, for the server's figures.
    pub fn served(&self) -> Served {
        Served {
            code: None,
            received: self.bytes_received,
            sent: self.bytes_sent,
            first_byte: self.first_byte_time.map(Nanos::from),
            whole: self.session_time.filter(|_| self.connect_time.is_some()).map(Nanos::from),
        }
    }

    /// Its end, of whatever kind.
    pub fn end(&mut self, now: Moment) {
        self.session_time.get_or_insert(now.since(self.started));
    }
}

/// All servers that a session was passed to.
#[derive(Debug, Default)]
pub struct Attempts(RefCell<Option<Tried>>);

/// That of a session which is passed on.
#[derive(Debug, Default)]
pub struct Tried(SmallVec<[Attempt; 1]>);

impl Attempts {
    /// The session is about to be passed on.
    pub fn begin(&self) {
        self.0.borrow_mut().get_or_insert_default();
    }

    /// Those of a session that is passed on.
    pub fn begun(&self) -> Option<Ref<'_, Tried>> {
        Ref::filter_map(self.0.borrow(), Option::as_ref).ok()
    }

    /// Adds a server that is about to be tried.
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

    /// The server that is being tried.
    ///
    /// # Panics
    /// None was added.
    pub fn last(&self) -> RefMut<'_, Attempt> {
        let tried = RefMut::map(self.0.borrow_mut(), |tried| tried.get_or_insert_default());
        RefMut::map(tried, |tried| tried.0.last_mut().expect("one was added"))
    }
}

impl Tried {
    /// In their order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &Attempt> {
        self.0.iter()
    }

    /// The server that is being tried.
    pub fn peer(&self) -> Option<&str> {
        self.0.last().map(|attempt| &**attempt.peer)
    }

    /// What came from the last server, in bytes.
    pub fn received(&self) -> u64 {
        self.0.last().map_or(0, |attempt| attempt.bytes_received)
    }

    /// What went to the last server, in bytes.
    pub fn sent(&self) -> u64 {
        self.0.last().map_or(0, |attempt| attempt.bytes_sent)
    }
}
