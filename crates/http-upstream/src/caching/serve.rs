//! Answers a request with an entry, or with a response in flight. The head is processed like one from a server.

use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use gale_files::{GrowingReader, Grown, Rung, count_piece, likely_device};
use gale_http::request::Request;
use gale_http::request::body::{Body, BodyError, BodyItem, BodyStream};
use gale_http::request::phases::Flow;
use gale_http::request::response::{FieldList, FieldText};
use gale_http_cache::CacheZone;
use gale_http_cache::fill::{Fill, Found, Stage};
use gale_http_cache::format::Meta;
use gale_http_cache::key::name_of;
use gale_http_cache::memory::{Hot, HotBody};
use gale_http_cache::policy::current_age;
use gale_http_cache::store::SMALL_BODY;
use gale_protocol::response::ResponseField;
use gale_runtime::Bytes;

use super::receive::announced_length;
use super::resume::{Remainder, strong_tag};
use super::stored::{Patience, body_of_file, is_of_disk, note_error, note_late};
use super::{CacheStatus, note_entry, tell_status};
use crate::body::{Flushing, NoBody};
use crate::caching_state::Caching;
use crate::client_head::{copy_head, intercept, obey_head};
use crate::receiving::UpstreamHead;
use crate::record::Records;
use crate::rewriter::HeadRewriter;
use crate::settings::UpstreamSettings;

/// The location's processing of heads.
#[derive(Clone, Copy)]
pub struct Serving<'s> {
    /// The settings of the location.
    pub settings: &'s UpstreamSettings,
    /// Rewrites fields that name the server.
    pub rewriter: &'s dyn HeadRewriter,
    /// True if the module converts a HEAD to GET where the location says so; if false it gets no body.
    pub converts_head: bool,
}

/// Maximum number of bytes of a body read at once.
const PIECE_BYTES: usize = 64 * 1024;

/// Answers with an entry.
pub(super) fn serve_hot(
    request: &mut Request,
    serving: Serving<'_>,
    zone: &Arc<CacheZone>,
    hot: &Rc<Hot>,
    status: CacheStatus,
) -> Flow {
    Caching::note(request, status);
    note_entry(request, zone, hot.id, hot.meta.number);
    let length = told_length(&hot.meta, hot.length);
    let flow = serve_head(request, serving, &hot.meta, Rc::clone(&hot.fields), length, true);
    if let Some(flow) = flow {
        return flow;
    }
    if request.is_head() {
        return Flow::Answer(Body::Stream(Box::new(NoBody(length))));
    }
    Flow::Answer(match &hot.body {
        _ if hot.length == 0 => Body::Empty,
        HotBody::Memory(bytes) => {
            count_piece(Rung::Memory, bytes.len() as u64);
            Body::Bytes(bytes.clone())
        }
        HotBody::File(file, offset) => {
            let disk_timeout = *serving.settings.cache.disk_timeout.get();
            body_of_file(request, zone, hot, (file, *offset), disk_timeout)
        }
    })
}

/// Length to announce for an entry whose body has this length. An answer to HEAD has no body: its head repeats the
/// server's length, or none.
pub(super) fn told_length(meta: &Meta, body_length: u64) -> Option<u64> {
    if meta.is_head_only { announced_length(meta) } else { Some(body_length) }
}

/// Answers with a response in flight.
pub(super) fn serve_fill(
    request: &mut Request,
    serving: Serving<'_>,
    (zone, fill): (&Arc<CacheZone>, &Arc<Fill>),
    meta: &Meta,
    length: Option<u64>,
) -> Flow {
    note_entry(request, zone, name_of(meta), fill.number);
    let fields = Rc::new(meta.fields.clone());
    if let Some(flow) = serve_head(request, serving, meta, fields, length, true) {
        return flow;
    }
    // A complete small response can be served in several ranges.
    let is_whole = matches!(fill.stage(), Stage::Whole(_)) && (1..=SMALL_BODY).contains(&fill.received());
    match is_whole.then(|| received_body(fill)).flatten() {
        Some(bytes) if !request.is_head() => Flow::Answer(Body::Bytes(bytes)),
        _ => body_of_fill(request, serving.settings, (zone, fill), meta, length),
    }
}

/// The received part of a body, if none of it has left memory.
pub(super) fn received_body(fill: &Fill) -> Option<Bytes> {
    Some(match &fill.whole_in_memory()?[..] {
        [] => Bytes::new(),
        [piece] => piece.clone(),
        pieces => pieces.concat().into(),
    })
}

/// The body of a response in flight.
pub(super) fn body_of_fill(
    request: &Request,
    settings: &UpstreamSettings,
    (zone, fill): (&Arc<CacheZone>, &Arc<Fill>),
    meta: &Meta,
    length: Option<u64>,
) -> Flow {
    match length {
        length if request.is_head() => Flow::Answer(Body::Stream(Box::new(NoBody(length)))),
        Some(0) => Flow::Answer(Body::Empty),
        length => {
            let (zone, fill) = (Arc::clone(zone), Arc::clone(fill));
            let disk_timeout = *settings.cache.disk_timeout.get();
            let mut body = FillBody::new(zone, fill, meta, length, disk_timeout);
            body.flushing = Flushing::of(request, true);
            Flow::Answer(Body::Stream(Box::new(body)))
        }
    }
}

/// Creates the head of an answer. Returns another answer if the head demands it.
fn serve_head(
    request: &mut Request,
    serving: Serving<'_>,
    meta: &Meta,
    fields: Rc<FieldList>,
    length: Option<u64>,
    tells_age: bool,
) -> Option<Flow> {
    Records::begin_or_keep(request).set_fields(Rc::clone(&fields));
    if let Some(status) = intercept(request, serving.settings, meta.status, &fields) {
        return Some(Flow::Respond(status));
    }
    if let Some(flow) = obey_head(request, serving.settings, &fields) {
        return Some(flow);
    }
    let head = UpstreamHead { status: meta.status, reason: meta.reason.clone(), length, ..UpstreamHead::default() };
    copy_head(request, serving.settings, serving.rewriter, &head, &fields);
    finish_head(request, serving.settings);
    let rules = serving.settings.cache.conformance.get().rules();
    if tells_age && rules.tells_age {
        let age = current_age(&meta.lifetime, gale_runtime::wall_seconds());
        request.response.set(ResponseField::Age, FieldText::from(age.to_string()));
    }
    // `Date` is hidden by default, because the server's own clock is shown; only hiding it by name counts here.
    let is_hidden = || {
        let names = serving.settings.head.hide_header.get_opt().map(Vec::as_slice).unwrap_or_default();
        names.iter().any(|name| name.eq_ignore_ascii_case(b"Date"))
    };
    if rules.keeps_date
        && let Some(date) = fields.iter().find(|field| field.name.known() == Some(ResponseField::Date))
        && !is_hidden()
    {
        request.response.set(ResponseField::Date, date.value.clone());
    }
    tell_status(request, &serving.settings.cache, Some(&meta.lifetime), false);
    None
}

/// Completes the head of an answer that may come from a cache: conditions are evaluated for it, and ranges are
/// supported. Only a 200 has ranges: with another status, the server's own statement stays.
pub(crate) fn finish_head(request: &mut Request, settings: &UpstreamSettings) {
    let rules = settings.cache.conformance.get().rules();
    let response = &mut request.response;
    response.is_from_upstream = false;
    response.follows_rfc_conditions = rules.rfc_conditions;
    let told = response.field(ResponseField::AcceptRanges);
    let offers_ranges = response.status == 200 && told.map_or(rules.cuts_parts_always, |value| value != b"none");
    if offers_ranges || *settings.response_body.force_ranges.get() {
        response.allows_ranges = true;
        response.remove(ResponseField::AcceptRanges);
    }
}

/// The body of a response in flight, or a part of it.
struct FillBody {
    zone: Arc<CacheZone>,
    fill: Arc<Fill>,
    ticket: u64,
    offset: u64,
    end: u64,
    length: Option<u64>,
    /// Total length, if known.
    total: Option<u64>,
    reader: Option<GrowingReader>,
    patience: Patience,
    /// Entity tag for asking the server for bytes that are in neither memory nor file.
    tag: Option<Rc<[u8]>>,
    /// The rest, from the server.
    remainder: Option<Remainder>,
    flushing: Flushing,
}

impl FillBody {
    fn new(
        zone: Arc<CacheZone>,
        fill: Arc<Fill>,
        meta: &Meta,
        length: Option<u64>,
        disk_timeout: Duration,
    ) -> FillBody {
        fill.join();
        let ticket = fill.ticket();
        let tag = strong_tag(meta);
        let patience = Patience::new(disk_timeout, tag.is_some());
        FillBody {
            zone,
            fill,
            ticket,
            offset: 0,
            end: u64::MAX,
            length,
            total: length,
            reader: None,
            patience,
            tag,
            remainder: None,
            flushing: Flushing::Never,
        }
    }

    fn take(&mut self, mut bytes: Bytes) -> Bytes {
        let rest = usize::try_from(self.end - self.offset).unwrap_or(usize::MAX);
        bytes.truncate(rest.min(bytes.len()));
        self.offset += bytes.len() as u64;
        self.flushing.note_item();
        bytes
    }

    /// Reads from the file. `None` if the bytes are in memory, or there are no more; an error if the disk is late or
    /// fails.
    fn poll_file(&mut self, most: usize, context: &mut Context<'_>) -> Poll<Result<Option<Bytes>, DiskFault>> {
        let Some(reader) = &mut self.reader else { return Poll::Ready(Ok(None)) };
        // These bytes are written already, or they would be in memory: the wait is for the disk alone.
        let read = reader.poll_read(context, most);
        match ready!(self.patience.poll(read, context)) {
            Some(Ok(Grown::Piece(piece))) => {
                // A reader that has caught up reads memory again, or waits for the server and not for the disk.
                self.reader = None;
                Poll::Ready(Ok(Some(self.take(piece))))
            }
            Some(Ok(Grown::Ended(_))) => {
                self.reader = None;
                Poll::Ready(Ok(None))
            }
            Some(Err(error)) if !is_of_disk(error.error()) => {
                Poll::Ready(Err(DiskFault::Other(BodyError::Other(error.to_string()))))
            }
            Some(Err(error)) => Poll::Ready(Err(DiskFault::Failed(error.to_string()))),
            None => Poll::Ready(Err(DiskFault::Late)),
        }
    }

    /// Asks the server for bytes that are in neither memory nor file.
    fn resume(&mut self, request: &Request) -> Result<(), BodyError> {
        self.reader = None;
        let end = if self.end == u64::MAX { self.total } else { Some(self.end) };
        self.remainder = Remainder::ask(request, self.tag.as_ref(), self.offset, end, self.total);
        match self.remainder {
            Some(_) => {
                // The fill need not keep bytes for this reader.
                self.leave();
                Ok(())
            }
            None => Err(BodyError::Short("a response fell behind its fetch and cannot be resumed".to_owned())),
        }
    }

    fn leave(&mut self) {
        if self.ticket != NO_TICKET {
            self.fill.leave(self.ticket);
            self.fill.part();
            self.ticket = NO_TICKET;
        }
    }
}

/// No ticket: tickets begin with 1.
const NO_TICKET: u64 = 0;

/// Reason for which the file of a fill cannot be read.
enum DiskFault {
    /// No fault of the disk: no memory, or no room in a pool.
    Other(BodyError),
    Failed(String),
    Late,
}

impl BodyStream for FillBody {
    fn poll_next(&mut self, request: &Request, context: &mut Context<'_>) -> Poll<Option<Result<BodyItem, BodyError>>> {
        let broken = || Some(Err(BodyError::Short("upstream response for the cache ended prematurely".to_owned())));
        loop {
            if let Some(remainder) = &mut self.remainder {
                return remainder.poll_next(request, context);
            }
            if self.offset >= self.end {
                return Poll::Ready(None);
            }
            let most = usize::try_from(self.end - self.offset).unwrap_or(PIECE_BYTES).min(PIECE_BYTES);
            let must_resume = match ready!(self.poll_file(most, context)) {
                Ok(Some(piece)) => return Poll::Ready(Some(Ok(BodyItem::Bytes(piece)))),
                Ok(None) => false,
                Err(DiskFault::Other(error)) => return Poll::Ready(Some(Err(error))),
                Err(DiskFault::Failed(error)) => {
                    note_error(request, &self.zone, &error);
                    true
                }
                Err(DiskFault::Late) => {
                    let device = likely_device(&self.zone.directory.path);
                    note_late(request, &self.zone, device, self.patience.since());
                    true
                }
            };
            let found = match must_resume {
                true => Poll::Ready(Found::Behind),
                false => self.fill.poll_at(self.ticket, self.offset, most, context),
            };
            let Poll::Ready(found) = found else {
                let flush = self.flushing.take();
                return flush.map_or(Poll::Pending, |flush| Poll::Ready(Some(Ok(flush))));
            };
            match found {
                Found::Bytes(piece) => return Poll::Ready(Some(Ok(BodyItem::Bytes(self.take(piece))))),
                Found::File(file, body_at) if file.written() > body_at + self.offset => {
                    self.reader = Some(file.read_from(body_at + self.offset));
                }
                Found::End => return Poll::Ready(None),
                Found::File(..) | Found::Behind => {
                    if let Err(error) = self.resume(request) {
                        return Poll::Ready(Some(Err(error)));
                    }
                }
                Found::Broken => return Poll::Ready(broken()),
            }
        }
    }

    fn length(&self) -> Option<u64> {
        self.length
    }

    fn can_be_cut(&self) -> bool {
        self.length.is_some()
    }

    fn cut_to(&mut self, range: &std::ops::Range<u64>) -> bool {
        (self.offset, self.end) = (range.start, range.end);
        self.length = Some(range.end - range.start);
        true
    }
}

impl Drop for FillBody {
    fn drop(&mut self) {
        self.leave();
    }
}
