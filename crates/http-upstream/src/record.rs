//! Records of the servers that a request was passed to, for the `$upstream_*` variables and for messages.
//! (<https://nginx.org/en/docs/http/ngx_http_upstream_module.html#variables>)

use std::cell::{Cell, Ref, RefCell, RefMut};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use gale_base::packed::{Packer, Unpacker};
use gale_http::request::Request;
use gale_http::request::response::FieldList;
use gale_http::request::slow::{self, AsksUpstream, UpstreamTimes};
use gale_runtime::{Bytes, Moment};
use gale_upstream::PeerName;
use gale_worker::traffic::{Nanos, Served};
use smallvec::SmallVec;

/// One server that was tried.
#[derive(Debug)]
pub struct Attempt {
    /// The server as in `$upstream_addr`; the group's name if no server was available.
    pub peer: Arc<PeerName>,
    /// Beginning of the attempt.
    pub started: Moment,
    /// The response's status, or the one that the failure stands for; 0 before that.
    pub status: u16,
    /// Time in the group's queue, if it waited there.
    pub queue_time: Option<Duration>,
    /// Duration of connecting; 0 for a reused connection.
    pub connect_time: Option<Duration>,
    /// Time until the response's head had arrived.
    pub header_time: Option<Duration>,
    /// Time until the response had ended.
    pub response_time: Option<Duration>,
    /// Length of the response's body, in bytes.
    pub response_length: u64,
    /// Bytes received from the server.
    pub bytes_received: u64,
    /// Bytes sent to the server.
    pub bytes_sent: u64,
}

/// An element of the variables' lists.
#[derive(Debug)]
pub enum Entry {
    /// An attempt at a server.
    Attempt(Attempt),
    /// A colon: another group follows, after an internal redirect.
    Elsewhere,
}

/// All attempts of a request.
#[derive(Debug, Default)]
pub struct Records {
    entries: RefCell<SmallVec<[Entry; 1]>>,
    /// The fields of the last response's head.
    fields: RefCell<HeadFields>,
    /// Its trailers.
    trailers: RefCell<Vec<(Bytes, Bytes)>>,
    /// Time at which the response must have ended.
    deadline: Cell<Option<Moment>>,
}

/// The fields of a response's head, if known.
#[derive(Debug, Default)]
enum HeadFields {
    #[default]
    Unknown,
    Listed(Rc<FieldList>),
    /// Packed, because they are not needed for a long time.
    Packed(Box<[u8]>),
}

impl Records {
    /// The records of a request, if it was passed on.
    pub fn of(request: &Request) -> Option<&Records> {
        request.notes.get::<Rc<Records>>().map(|records| &**records)
    }

    /// The records of a request that is about to be passed on, for the first time or again.
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

    /// Time at which the response must have ended, if there is one.
    pub(super) fn deadline(&self) -> Option<Moment> {
        self.deadline.get()
    }

    pub(super) fn set_deadline(&self, deadline: Moment) {
        self.deadline.set(Some(deadline));
    }

    /// Ends the current attempt, if there is one, as failed with this status.
    pub(super) fn give_up(&self, status: u16) {
        if let Some(Entry::Attempt(attempt)) = self.entries.borrow_mut().last_mut() {
            attempt.status = status;
            attempt.end(gale_runtime::now());
        }
    }

    /// The records of a request that is answered without being passed on.
    pub(super) fn begin_or_keep(request: &mut Request) -> Rc<Records> {
        if let Some(records) = request.notes.get::<Rc<Records>>() {
            return Rc::clone(records);
        }
        let records = Rc::<Records>::default();
        request.notes.put(Rc::clone(&records));
        records
    }

    /// Adds an attempt.
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

    /// All elements, in order.
    pub fn entries(&self) -> Ref<'_, [Entry]> {
        Ref::map(self.entries.borrow(), |entries| &**entries)
    }

    /// The current attempt.
    pub(super) fn last(&self) -> RefMut<'_, Attempt> {
        RefMut::map(self.entries.borrow_mut(), |entries| match entries.last_mut() {
            Some(Entry::Attempt(attempt)) => attempt,
            _ => unreachable!("one was added"),
        })
    }

    /// Updates the current attempt.
    pub(super) fn note(&self, note: impl FnOnce(&mut Attempt, Moment)) {
        note(&mut self.last(), gale_runtime::now());
    }

    /// All fields of the last response's head, including hidden ones.
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

    /// Packs the fields into less memory, for a tunnel, which may be open for days.
    pub(super) fn pack(&self) {
        let fields = &mut *self.fields.borrow_mut();
        if let HeadFields::Listed(listed) = fields {
            let mut packed = Vec::new();
            listed.pack(&mut Packer::new(&mut packed));
            *fields = HeadFields::Packed(packed.into());
        }
    }

    /// The trailers of the last response, once it has ended.
    pub fn trailers(&self) -> Ref<'_, Vec<(Bytes, Bytes)>> {
        self.trailers.borrow()
    }

    pub(super) fn set_trailers(&self, trailers: Vec<(Bytes, Bytes)>) {
        self.trailers.replace(trailers);
    }
}

/// Total times of the servers that a request was passed to. An attempt in progress counts until now.
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
    /// Resets an attempt whose reused connection turned out to have ended before.
    pub(super) fn begin_anew(&mut self, now: Moment) {
        self.started = now;
        (self.connect_time, self.header_time, self.response_time) = (None, None, None);
        self.bytes_sent = 0;
    }

    /// Notes the end of connecting. If it has failed or was abandoned, this ends the attempt.
    pub(super) fn connecting_ended(&mut self, now: Moment) {
        if self.connect_time.is_none() && self.response_time.is_none() {
            self.end(now);
        }
    }

    /// The result for the server's figures. A status that stands for a failure is none.
    pub(super) fn served(&self) -> Served {
        Served {
            code: self.header_time.map(|_| self.status),
            received: self.bytes_received,
            sent: self.bytes_sent,
            first_byte: self.header_time.map(Nanos::from),
            whole: self.response_time.filter(|_| self.header_time.is_some()).map(Nanos::from),
        }
    }

    /// Ends the attempt.
    pub(super) fn end(&mut self, now: Moment) {
        self.response_time.get_or_insert(now.since(self.started));
    }
}
