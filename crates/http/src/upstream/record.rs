//! What is known of the servers that a request was passed to: for the `$upstream_*` variables and for messages.
//! (<https://nginx.org/en/docs/http/ngx_http_upstream_module.html#variables>)

use std::cell::{Cell, Ref, RefCell, RefMut};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use gale_base::packed::{Packer, Unpacker};
use gale_engine::traffic::{Nanos, Served};
use gale_engine::upstream::PeerName;
use gale_runtime::{Bytes, Moment};
use smallvec::SmallVec;

use crate::request::Request;
use crate::request::response::FieldList;
use crate::request::slow::{self, AsksUpstream, UpstreamTimes};

/// One server that was tried.
#[derive(Debug)]
pub struct Attempt {
    /// The server as `$upstream_addr` names it; the group's name if it had none to offer.
    pub peer: Arc<PeerName>,
    /// When it began.
    pub started: Moment,
    /// The response's status, or the one that the failure stands for; 0 as long as there is none.
    pub status: u16,
    /// How long the request waited in the group's queue, if it did.
    pub queue_time: Option<Duration>,
    /// How long connecting took; nothing for a connection that is used again.
    pub connect_time: Option<Duration>,
    /// How long it took until the response's head was there.
    pub header_time: Option<Duration>,
    /// How long it took until the response had ended.
    pub response_time: Option<Duration>,
    /// How long the response's body was, in bytes.
    pub response_length: u64,
    /// What came from the server, in bytes.
    pub bytes_received: u64,
    /// What went to the server, in bytes.
    pub bytes_sent: u64,
}

/// What follows what in the variables.
#[derive(Debug)]
pub enum Entry {
    /// A server.
    Attempt(Attempt),
    /// From here on it is another group, after an internal redirect: a colon.
    Elsewhere,
}

/// All servers that a request was passed to.
#[derive(Debug, Default)]
pub struct Records {
    entries: RefCell<SmallVec<[Entry; 1]>>,
    /// The fields of the last response's head.
    fields: RefCell<HeadFields>,
    /// The fields behind its body.
    trailers: RefCell<Vec<(Bytes, Bytes)>>,
    /// When the response has to have ended.
    deadline: Cell<Option<Moment>>,
}

/// The fields of a response's head, as far as they are known.
#[derive(Debug, Default)]
enum HeadFields {
    #[default]
    Unknown,
    Listed(Rc<FieldList>),
    /// They are not looked at for long.
    Packed(Box<[u8]>),
}

impl Records {
    /// Those of a request, if it was passed on.
    pub fn of(request: &Request) -> Option<&Records> {
        request.notes.get::<Rc<Records>>().map(|records| &**records)
    }

    /// Those of a request that is about to be passed on, perhaps once more.
    pub(super) fn begin(request: &mut Request) -> Rc<Records> {
        if let Some(records) = request.notes.get::<Rc<Records>>() {
            let records = Rc::clone(records);
            records.entries.borrow_mut().push(Entry::Elsewhere);
            records.fields.take();
            records.trailers.take();
            records.deadline.take();
            return records;
        }
        let records = Rc::<Records>::default();
        request.notes.put(Rc::clone(&records));
        if slow::is_noted(request) {
            request.notes.put(AsksUpstream(times));
        }
        records
    }

    /// When the response has to have ended, if there is such a time.
    pub(super) fn deadline(&self) -> Option<Moment> {
        self.deadline.get()
    }

    pub(super) fn set_deadline(&self, deadline: Moment) {
        self.deadline.set(Some(deadline));
    }

    /// The server that is being tried, if there is one, has failed: this status stands for that.
    pub(super) fn give_up(&self, status: u16) {
        if let Some(Entry::Attempt(attempt)) = self.entries.borrow_mut().last_mut() {
            attempt.status = status;
            attempt.end(gale_runtime::now());
        }
    }

    /// Those of a request that is answered without being passed on.
    pub(super) fn begin_or_keep(request: &mut Request) -> Rc<Records> {
        if let Some(records) = request.notes.get::<Rc<Records>>() {
            return Rc::clone(records);
        }
        let records = Rc::<Records>::default();
        request.notes.put(Rc::clone(&records));
        records
    }

    /// Adds a server that is about to be tried.
    pub(super) fn add(&self, peer: Arc<PeerName>, started: Moment) {
        self.entries.borrow_mut().push(Entry::Attempt(Attempt {
            peer,
            started,
            status: 0,
            queue_time: None,
            connect_time: None,
            header_time: None,
            response_time: None,
            response_length: 0,
            bytes_received: 0,
            bytes_sent: 0,
        }));
        self.fields.take();
    }

    /// In their order.
    pub fn entries(&self) -> Ref<'_, [Entry]> {
        Ref::map(self.entries.borrow(), |entries| &**entries)
    }

    /// The server that is being tried.
    pub(super) fn last(&self) -> RefMut<'_, Attempt> {
        RefMut::map(self.entries.borrow_mut(), |entries| match entries.last_mut() {
            Some(Entry::Attempt(attempt)) => attempt,
            _ => unreachable!("one was added"),
        })
    }

    /// Notes something of the server that is being tried.
    pub(super) fn note(&self, note: impl FnOnce(&mut Attempt, Moment)) {
        note(&mut self.last(), gale_runtime::now());
    }

    /// The fields of the last response's head, with those that the client does not get.
    pub fn fields(&self) -> Option<Rc<FieldList>> {
        match &*self.fields.borrow() {
            HeadFields::Unknown => None,
            HeadFields::Listed(fields) => Some(Rc::clone(fields)),
            HeadFields::Packed(packed) => {
                let mut fields = FieldList::default();
                fields.unpack(&mut Unpacker::new(packed));
                Some(Rc::new(fields))
            }
        }
    }

    pub(super) fn set_fields(&self, fields: Rc<FieldList>) {
        self.fields.replace(HeadFields::Listed(fields));
    }

    /// Keeps the fields in less memory: the response is a tunnel, which may be open for days.
    pub(super) fn pack(&self) {
        let fields = &mut *self.fields.borrow_mut();
        if let HeadFields::Listed(listed) = fields {
            let mut packed = Vec::new();
            listed.pack(&mut Packer::new(&mut packed));
            *fields = HeadFields::Packed(packed.into());
        }
    }

    /// The fields behind the last response's body, once that has ended.
    pub fn trailers(&self) -> Ref<'_, Vec<(Bytes, Bytes)>> {
        self.trailers.borrow()
    }

    pub(super) fn set_trailers(&self, trailers: Vec<(Bytes, Bytes)>) {
        self.trailers.replace(trailers);
    }
}

/// The times of the servers that a request was passed to. What is under way counts until now.
fn times(request: &Request) -> UpstreamTimes {
    let mut times = UpstreamTimes::default();
    let Some(records) = Records::of(request) else { return times };
    for entry in &*records.entries() {
        let Entry::Attempt(attempt) = entry else { continue };
        times.connect += attempt.connect_time.unwrap_or_default();
        times.first_byte += attempt.header_time.unwrap_or_default();
        times.whole += attempt.response_time.unwrap_or_else(|| gale_runtime::now().since(attempt.started));
    }
    times
}

impl Attempt {
    /// What has been noted was about a connection that had ended before.
    pub(super) fn begin_anew(&mut self, now: Moment) {
        self.started = now;
        (self.connect_time, self.header_time, self.response_time) = (None, None, None);
        self.bytes_sent = 0;
    }

    /// Connecting has ended; if it has failed or was given up, so has the attempt.
    pub(super) fn connecting_ended(&mut self, now: Moment) {
        if self.connect_time.is_none() && self.response_time.is_none() {
            self.end(now);
        }
    }

    /// How it has gone, for the server's figures. What stands for a failure is no response.
    pub(super) fn served(&self) -> Served {
        Served {
            code: self.header_time.map(|_| self.status),
            received: self.bytes_received,
            sent: self.bytes_sent,
            first_byte: self.header_time.map(Nanos::from),
            whole: self.response_time.filter(|_| self.header_time.is_some()).map(Nanos::from),
        }
    }

    /// Its end, of whatever kind.
    pub(super) fn end(&mut self, now: Moment) {
        self.response_time.get_or_insert(now.since(self.started));
    }
}
