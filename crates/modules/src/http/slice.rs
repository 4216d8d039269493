//! slice: large responses are fetched and cached in slices of one size.
//!   slice SIZE;                            http, server, location
//!   $slice_range                           range of the slice to request: bytes=FIRST-LAST
//! (<https://nginx.org/en/docs/http/ngx_http_slice_module.html>)
//!
//! The first slice is the one in which the client's range begins. If the server answers with 206, copies of the
//! request, which pass no filters, fetch the others in turn. A slice of a changed file (another `ETag`, another
//! length), or with another range than requested, ends the response. Only slices that the client needs are fetched.
//!
//! The cache keeps no rejected slice. A slice from a server is checked before it is stored. A stored slice that does
//! not match is removed from the cache and fetched once more; if the new one does not match either, the file has
//! changed since the first slice was stored, and the first slice is removed.

use std::any::Any;
use std::cell::{Cell, RefCell};
use std::ops::Range;
use std::rc::Rc;
use std::task::{Context, Poll, ready};

use gale_base::log_level::Level;
use gale_base::units;
use gale_config::{Body as BlockBody, Contexts, One, Setting, Takes, slot, values};
use gale_engine::module::{ConfType, Directive, Module};
use gale_http::module::HttpPart;
use gale_http::request::Request;
use gale_http::request::body::{Body, BodyError, BodyItem, BodyStream};
use gale_http::request::filters::{Filter, Filtered};
use gale_http::request::response::{FieldList, ResponseHead, ShortText};
use gale_http::request::subrequest::Subrequest;
use gale_http::variables::Variable;
use gale_http_upstream::caching::CacheNote;
use gale_protocol::request::KnownHeader;
use gale_protocol::response::ResponseField;

/// See the file's head.
pub static MODULE: Module = Module {
    name: "http_slice",
    directives: &[Directive {
        name: "slice",
        contexts: Contexts::ANYWHERE,
        takes: Takes::Exactly(1),
        body: BlockBody::None,
        default: "0",
        about: "Sets the size of the slices in which responses are fetched; 0 disables slicing.",
        store: &One { parse: values::size, slot: slot!(Conf, size) },
    }],
    conf: Some(ConfType::of::<Conf>()),
    parts: &[&HttpPart {
        variables: &[Variable::named("slice_range", append_range)],
        filters: &[&Slicer],
        ..HttpPart::EMPTY
    }],
};

#[derive(Default)]
struct Conf {
    size: Setting<u64>,
}

/// State that all slices of a response share; the client's own request fetches the first one.
#[derive(Default)]
struct Slicing {
    /// Start of the first slice, once the variable was used.
    first: Cell<Option<u64>>,
    etag: RefCell<ShortText>,
    /// Length of the whole, once the first slice has arrived.
    total: Cell<Option<u64>>,
}

/// In a copy of the request: start of its slice.
#[derive(Clone, Copy)]
struct Piece(u64);

fn size_for(request: &Request) -> u64 {
    request.scope().conf_of::<Conf>().map_or(0, |conf| *conf.size.get())
}

fn append_range(request: &Request, _: &[u8], out: &mut Vec<u8>) -> bool {
    let size = size_for(request);
    if size == 0 {
        return false;
    }
    let start = match request.notes.get::<Piece>() {
        Some(Piece(start)) => *start,
        None if request.is_main() => {
            let slicing = request.shared_note::<Slicing>();
            let known = slicing.first.get();
            if known.is_none() && request.response.status != 0 {
                return false;
            }
            let start = known.unwrap_or_else(|| first_byte(request) / size * size);
            slicing.first.set(Some(start));
            start
        }
        None => match first_of_main(request) {
            Some(start) => start,
            None => return false,
        },
    };
    out.extend_from_slice(format!("bytes={start}-{}", start.saturating_add(size - 1)).as_bytes());
    true
}

/// Returns the start of the first slice, in the client's request or in a copy that fetches this slice again.
fn first_of_main(request: &Request) -> Option<u64> {
    if !request.is_main() && !request.repeats_main() {
        return None;
    }
    request.shared_note::<Slicing>().first.get()
}

/// Returns the start of the client's range, or 0 for a suffix range and with `If-Range`.
fn first_byte(request: &Request) -> u64 {
    let range = request.header(KnownHeader::Range).filter(|_| request.header(KnownHeader::IfRange).is_none());
    let Some(range) = range.filter(|range| range.len() > 6 && range[..6].eq_ignore_ascii_case(b"bytes=")) else {
        return 0;
    };
    let range = range[6..].trim_ascii_start();
    let digits = range.iter().take_while(|byte| byte.is_ascii_digit()).count();
    units::parse_number(&range[..digits]).unwrap_or(0)
}

struct Slicer;

impl Filter for Slicer {
    fn applies(&self, conf: &dyn Any) -> bool {
        conf.downcast_ref().is_some_and(|conf: &Conf| *conf.size.get() > 0)
    }

    fn apply(&self, request: &mut Request, _conf: &dyn Any, body: &mut Body) -> Filtered {
        put_together(request, body)
    }

    fn may_be_stored(&self, request: &Request, _conf: &dyn Any, status: u16, fields: &FieldList) -> bool {
        let field = |known| fields.iter().find(|field| field.name.known() == Some(known)).map(|field| &*field.value);
        let (etag, range) = (field(ResponseField::ETag), field(ResponseField::ContentRange));
        let length = field(ResponseField::ContentLength).and_then(units::parse_number);
        let head = Head { status, etag: etag.unwrap_or_default(), range: range.unwrap_or_default(), length };
        let size = size_for(request);
        match request.notes.get::<Piece>() {
            Some(Piece(start)) => head.check(*start, size, Some(&request.shared_note::<Slicing>())).is_ok(),
            // The first slice; a response that is not partial has no slices.
            None => match first_of_main(request).filter(|_| status == 206) {
                Some(start) => head.check(start, size, None).is_ok(),
                None => true,
            },
        }
    }
}

/// Turns the first slice into the whole response.
fn put_together(request: &mut Request, body: &mut Body) -> Filtered {
    let size = size_for(request);
    let slicing = request.shared_note::<Slicing>();
    let Some(start) = slicing.first.get().filter(|_| request.is_main()) else { return Filtered::Goes };
    if request.response.status != 206 {
        slicing.first.set(None);
        return Filtered::Goes;
    }
    let total = match Head::of(&request.response).check(start, size, None) {
        Ok(total) => total,
        Err(what) => {
            request.log(Level::Error, format_args!("{what}"));
            request.response.clear();
            return Filtered::Respond(502);
        }
    };
    let head = &mut request.response;
    head.replace_status(200);
    head.content_length = Some(total);
    head.allows_ranges = true;
    head.remove(ResponseField::ContentRange);
    head.remove(ResponseField::AcceptRanges);
    slicing.etag.replace(head.etag.clone());
    slicing.total.set(Some(total));
    let first = Current { source: Source::Own(std::mem::take(body)), offset: start, end: (start + size).min(total) };
    *body = Body::Stream(Box::new(Slices { slicing, size, position: 0, end: total, current: Some(first) }));
    Filtered::Goes
}

/// Fields by which a slice is checked.
struct Head<'h> {
    status: u16,
    etag: &'h [u8],
    /// `Content-Range`.
    range: &'h [u8],
    /// Length of the body, if known.
    length: Option<u64>,
}

impl Head<'_> {
    fn of(head: &ResponseHead) -> Head<'_> {
        let range = head.field(ResponseField::ContentRange).unwrap_or_default();
        Head { status: head.status, etag: &head.etag, range, length: head.content_length }
    }

    /// Checks that this slice begins at `start` and belongs to the same file as the first one. Returns the length of
    /// the whole.
    fn check(&self, start: u64, size: u64, first: Option<&Slicing>) -> Result<u64, String> {
        if self.status != 206 {
            return Err(format!("unexpected status code {} in slice response", self.status));
        }
        if let Some(first) = first {
            let known = first.etag.borrow();
            if !known.is_empty() && **known != *self.etag {
                return Err("etag mismatch in slice response".to_owned());
            }
        }
        let (range, total) = parse_content_range(self.range).ok_or("invalid range in slice response")?;
        let total = total.ok_or("no complete length in slice response")?;
        let end = (start + size).min(total);
        if range.start != start || range.end != end {
            let (found, last) = (range.start, range.end);
            return Err(format!("unexpected range in slice response: {found}-{last}, expected: {start}-{end}"));
        }
        if let Some(length) = self.length.filter(|length| *length != end - start) {
            return Err(format!("a slice has {length} bytes, its range {}", end - start));
        }
        match first.and_then(|first| first.total.get()).filter(|known| *known != total) {
            Some(known) => Err(format!("different complete length in slice response: {total}, expected: {known}")),
            None => Ok(total),
        }
    }
}

/// Parses `bytes FIRST-LAST/TOTAL`, where the total may be unknown.
fn parse_content_range(text: &[u8]) -> Option<(Range<u64>, Option<u64>)> {
    let rest = text.strip_prefix(b"bytes ")?;
    let dash = rest.iter().position(|&byte| byte == b'-')?;
    let slash = rest.iter().position(|&byte| byte == b'/').filter(|&slash| slash > dash)?;
    let number = |text: &[u8]| units::parse_number(text.trim_ascii());
    let (first, last) = (number(&rest[..dash])?, number(&rest[dash + 1..slash])?);
    let total = match rest[slash + 1..].trim_ascii() {
        b"*" => None,
        digits => Some(number(digits)?),
    };
    (first <= last).then_some((first..last.checked_add(1)?, total))
}

/// All slices, one after the other.
struct Slices {
    slicing: Rc<Slicing>,
    size: u64,
    /// Next position, and the end of the wanted range of the whole.
    position: u64,
    end: u64,
    current: Option<Current>,
}

/// The slice that is being read.
struct Current {
    source: Source,
    /// Position in the whole up to which it was read.
    offset: u64,
    end: u64,
}

enum Source {
    /// Response to the client's own request.
    Own(Body),
    /// Response to a copy of it.
    Asked { subrequest: Subrequest, is_checked: bool, is_again: bool },
}

impl Slices {
    /// Fetches the next slice; with `is_again`, because the stored one did not match.
    fn ask(&self, request: &Request, is_again: bool) -> Option<Current> {
        let start = self.position / self.size * self.size;
        let subrequest = Subrequest::repeat(request, Piece(start))?;
        let source = Source::Asked { subrequest, is_checked: false, is_again };
        Some(Current { source, offset: start, end: start + self.size })
    }
}

impl BodyStream for Slices {
    fn poll_next(&mut self, request: &Request, context: &mut Context<'_>) -> Poll<Option<Result<BodyItem, BodyError>>> {
        loop {
            if self.position >= self.end {
                self.current = None;
                return Poll::Ready(None);
            }
            let position = self.position;
            let holds = |current: &Current| (current.offset..current.end).contains(&position);
            if !self.current.as_ref().is_some_and(holds) {
                self.current = self.ask(request, false);
            }
            let Some(current) = &mut self.current else {
                return Poll::Ready(Some(Err(BodyError::Other("a slice could not be requested".to_owned()))));
            };
            let item = match &mut current.source {
                Source::Own(body) => ready!(body.poll_next(request, context)),
                Source::Asked { subrequest, is_checked, is_again } => {
                    if !*is_checked {
                        let (start, is_again) = (current.offset, *is_again);
                        let answer = ready!(subrequest.poll_answer(context));
                        match judge(request, answer, (start, self.size), &self.slicing, is_again) {
                            Verdict::Fits => *is_checked = true,
                            Verdict::AskAgain => {
                                self.current = self.ask(request, true);
                                continue;
                            }
                            Verdict::Ends(error) => return Poll::Ready(Some(Err(error))),
                        }
                    }
                    ready!(subrequest.poll_next(context))
                }
            };
            match item {
                None => {
                    let what = "a slice ended prematurely".to_owned();
                    return Poll::Ready(Some(Err(BodyError::Short(what))));
                }
                Some(Ok(item)) => {
                    let start = current.offset;
                    current.offset += item.length();
                    // A server that announced no length may send more than the range has.
                    if let Some(item) = item.cut(start, &(self.position..self.end.min(current.end))) {
                        self.position += item.length();
                        return Poll::Ready(Some(Ok(item)));
                    }
                }
                error => return Poll::Ready(error),
            }
        }
    }

    fn length(&self) -> Option<u64> {
        Some(self.end - self.position)
    }

    fn can_be_cut(&self) -> bool {
        true
    }

    fn cut_to(&mut self, range: &Range<u64>) -> bool {
        (self.position, self.end) = (range.start, range.end);
        true
    }
}

/// Result of checking a slice.
enum Verdict {
    Fits,
    AskAgain,
    Ends(BodyError),
}

/// Checks the slice at this position, and removes one that does not match from the cache.
fn judge(
    request: &Request,
    answer: Option<&Request>,
    (start, size): (u64, u64),
    slicing: &Slicing,
    is_again: bool,
) -> Verdict {
    let Some(answer) = answer else {
        let what = "missing slice response";
        request.log(Level::Error, format_args!("{what}"));
        return Verdict::Ends(BodyError::Other(what.to_owned()));
    };
    let Err(what) = Head::of(&answer.response).check(start, size, Some(slicing)) else { return Verdict::Fits };
    answer.refuse_response();
    let status = answer.notes.get::<CacheNote>().and_then(|note| note.status);
    if status.is_some_and(|status| status.is_from_cache()) && !is_again {
        request.log(Level::Info, format_args!("{what}, requesting it again"));
        return Verdict::AskAgain;
    }
    if shows_another_file(answer.response.status) {
        // The next request fetches its first slice anew.
        request.refuse_response();
    }
    request.log(Level::Error, format_args!("{what}"));
    Verdict::Ends(BodyError::Other(what))
}

/// Returns `true` if this status of a mismatching slice shows that the file has changed since the first slice was
/// fetched: a slice of another file, a whole file, a missing file, or one that ends before the slice. A server that
/// fails or refuses shows nothing about the file.
fn shows_another_file(status: u16) -> bool {
    matches!(status, 200 | 206 | 404 | 410 | 416)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn content_ranges_are_read_as_the_rfc_writes_them() {
        assert_eq!(parse_content_range(b"bytes 0-1/100"), Some((0..2, Some(100))));
        assert_eq!(parse_content_range(b"bytes  2 - 3 / *"), Some((2..4, None)));
        for wrong in ["", "bytes", "bytes 1/2", "bytes 3-2/9", "bytes */9", "bytes a-b/c", "units 0-1/2", "bytes /1-2"]
        {
            assert_eq!(parse_content_range(wrong.as_bytes()), None, "{wrong}");
        }
    }
}
