//! slice: a large response is fetched, and cached, in pieces of one size.
//!   slice SIZE;                            http, server, location
//!   $slice_range                           the piece to ask for: bytes=FIRST-LAST
//! (<https://nginx.org/en/docs/http/ngx_http_slice_module.html>)
//!
//! The first piece is the one in which the client's range begins. A server that answers it with 206 is asked for the
//! others in turn, by copies of the request that pass no filters; a piece of another file (another `ETag`, another
//! length), or of another range than was asked for, ends the response. Only pieces that the client wants are asked for.
//!
//! A cache does not keep what is refused here. A piece that comes from a server is judged before it is stored. One that
//! was stored and does not fit is taken out of the cache and asked for once more; if what comes then does not fit
//! either, the file has changed since the first piece was stored, and that one goes.

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
use gale_http::upstream::caching::CacheNote;
use gale_http::variables::Variable;
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

/// What the pieces of a response have in common; the first one is asked for by the client's request itself.
#[derive(Default)]
struct Slicing {
    /// Where the first piece begins, once somebody has asked for the variable.
    first: Cell<Option<u64>>,
    etag: RefCell<ShortText>,
    /// Length of the whole, once the first piece has come.
    total: Cell<Option<u64>>,
}

/// In a copy of the request: where its piece begins.
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

/// Where the first piece begins, in the client's request or in a copy of it that fetches that piece anew.
fn first_of_main(request: &Request) -> Option<u64> {
    if !request.is_main() && !request.repeats_main() {
        return None;
    }
    request.shared_note::<Slicing>().first.get()
}

/// Where the client's range begins; ranges that depend on what the file is begin anywhere.
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
            // It is the first one; what is no part has no pieces.
            None => match first_of_main(request).filter(|_| status == 206) {
                Some(start) => head.check(start, size, None).is_ok(),
                None => true,
            },
        }
    }
}

/// Makes the whole response of the first piece of it.
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

/// The fields by which a piece is judged.
struct Head<'h> {
    status: u16,
    etag: &'h [u8],
    /// `Content-Range`
    range: &'h [u8],
    /// Length of the body, if that is known.
    length: Option<u64>,
}

impl Head<'_> {
    fn of(head: &ResponseHead) -> Head<'_> {
        let range = head.field(ResponseField::ContentRange).unwrap_or_default();
        Head { status: head.status, etag: &head.etag, range, length: head.content_length }
    }

    /// Checks that this is the piece that begins at `start`, and of the same file as the first one. Returns the length
    /// of the whole.
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

/// `bytes FIRST-LAST/TOTAL`, where the total may not be known.
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

/// All pieces, one after the other.
struct Slices {
    slicing: Rc<Slicing>,
    size: u64,
    /// What comes next, and where the part of the whole ends that is wanted.
    position: u64,
    end: u64,
    current: Option<Current>,
}

/// A piece that is being read.
struct Current {
    source: Source,
    /// How far it is read, as a place in the whole.
    offset: u64,
    end: u64,
}

enum Source {
    /// What the request itself was answered with.
    Own(Body),
    /// What a copy of it is answered with.
    Asked { subrequest: Subrequest, is_checked: bool, is_again: bool },
}

impl Slices {
    /// Asks for the piece that comes next; once more, if what came first did not fit.
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

/// The fate of a piece.
enum Verdict {
    Fits,
    AskAgain,
    Ends(BodyError),
}

/// Judges the piece that begins there, and has the cache forget what does not fit.
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
        // The next request fetches its first piece anew.
        request.refuse_response();
    }
    request.log(Level::Error, format_args!("{what}"));
    Verdict::Ends(BodyError::Other(what))
}

/// Whether this status of a piece that does not fit tells that the file has changed since its first piece came: a piece
/// of another file, a whole one, none any more, or one that ends before the piece. A server that fails or refuses says
/// nothing about the file.
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
