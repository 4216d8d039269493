//! range: byte ranges of responses.
//!   Range: bytes=FIRST-LAST | FIRST- | -LAST_BYTES, ...         206, or 416
//!   If-Range: ETAG | DATE                                       if it does not match, the whole
//! (RFC 9110 §14; <https://nginx.org/en/docs/http/ngx_http_core_module.html#max_ranges>)
//!
//! There are no directives: `max_ranges` belongs to the core module. Only a response of status 200 with a known length
//! is cut, and only if its handler allows it. Ranges are sent in the requested order, overlapping or not, but if they
//! are together longer than the whole, the whole is sent: so a request cannot make the server send more than that. From
//! a body that can be read only once, such as another server's, a single range can be sent.

use std::collections::VecDeque;
use std::io::Write;
use std::ops::Range;
use std::task::{Context, Poll, ready};
use std::time::Duration;
use std::vec;

use gale_base::http_date;
use gale_engine::module::Module;
use gale_http::module::HttpPart;
use gale_http::request::Request;
use gale_http::request::body::{Body, BodyError, BodyItem, BodyStream, FilePiece};
use gale_http::request::filters::{Filtered, Judge};
use gale_http::request::response::ResponseHead;
use gale_protocol::byte_ranges::{Asked, parse};
use gale_protocol::request::{KnownHeader, Version};
use gale_protocol::response::ResponseField;
use gale_runtime::Bytes;

/// See the file's head.
pub static MODULE: Module = Module {
    name: "http_range_filter",
    parts: &[&HttpPart { filters: &[&Judge { applies: |_: &()| true, run: cut }], ..HttpPart::EMPTY }],
    ..Module::EMPTY
};

fn cut(request: &mut Request, _conf: &(), body: &mut Body) -> Filtered {
    if !request.response.allows_ranges || !request.is_main() {
        return Filtered::Goes;
    }
    let max_ranges = *request.scope().core.max_ranges.get();
    let head = &request.response;
    let may_be_cut = head.status == 200 && max_ranges > 0 && request.version() != Version::Http09;
    let Some(total) = body.length().filter(|_| may_be_cut && (body.can_be_cut() || body.can_leave_out())) else {
        request.response.allows_ranges = false;
        return Filtered::Goes;
    };
    let asked = match request.header(KnownHeader::Range) {
        Some(value) if still_holds(request.header(KnownHeader::IfRange), head) => parse(value, total, max_ranges),
        _ => Asked::Whole,
    };
    match asked {
        Asked::Whole => Filtered::Goes,
        // A body that is generated while it is sent cannot be read again.
        Asked::Parts(ranges) if ranges.len() > 1 && !has_parts(body, &ranges[0]) => Filtered::Goes,
        Asked::Parts(ranges) => {
            let boundary = gale_runtime::random_u64();
            let whole = std::mem::take(body);
            *body = send_parts(&mut request.response, whole, total, ranges, boundary);
            Filtered::Goes
        }
        Asked::Impossible => {
            request.response.clear();
            request.response.add(ResponseField::ContentRange, format!("bytes */{total}"));
            Filtered::Respond(416)
        }
    }
}

/// Returns `true` if several ranges of a body, of which this is one, can be sent.
fn has_parts(body: &Body, range: &Range<u64>) -> bool {
    match body {
        Body::Stream(stream) => stream.part(range).is_some(),
        _ => true,
    }
}

/// Returns `true` if the ranges apply to this version of the response. (RFC 9110 §13.1.5)
///
/// Unlike in nginx, and as the RFC demands, a weak tag never matches: ranges of two responses that are only
/// semantically equivalent cannot be combined.
fn still_holds(if_range: Option<&[u8]>, head: &ResponseHead) -> bool {
    match if_range {
        None => true,
        Some(tag) if tag.len() >= 2 && tag.ends_with(b"\"") => tag == &*head.etag && !tag.starts_with(b"W/"),
        Some(date) => head.last_modified.is_some() && http_date::parse(date) == head.last_modified,
    }
}

/// Makes the response a partial one: sets its head and returns its body.
fn send_parts(head: &mut ResponseHead, body: Body, total: u64, ranges: Vec<Range<u64>>, boundary: u64) -> Body {
    head.status = 206;
    head.allows_ranges = false;
    if let [range] = &*ranges {
        head.set(ResponseField::ContentRange, format!("bytes {}-{}/{total}", range.start, range.end - 1));
        head.content_length = Some(range.end - range.start);
        return part(body, range);
    }
    let source = Source::of(body);
    let boundary = format!("{boundary:020}");
    let mut before_range = format!("\r\n--{boundary}\r\n").into_bytes();
    if !head.content_type.is_empty() {
        before_range.extend_from_slice(b"Content-Type: ");
        // As in a head, no value may contain a line end.
        before_range.extend(head.content_type.iter().map(|&byte| match byte {
            b'\r' | b'\n' | 0 => b' ',
            byte => byte,
        }));
        before_range.extend_from_slice(b"\r\n");
    }
    before_range.extend_from_slice(b"Content-Range: bytes ");
    head.remove(ResponseField::ContentRange);
    head.content_type = format!("multipart/byteranges; boundary={boundary}").as_bytes().into();
    let ranges = ranges.into_iter();
    let end = Some(format!("\r\n--{boundary}--\r\n").into());
    let parts = Parts { source, total, ranges, before_range, current: Body::Empty, end };
    head.content_length = Some(parts.length());
    Body::Stream(Box::new(parts))
}

/// Returns one range of a body, in its simplest form.
fn part(body: Body, range: &Range<u64>) -> Body {
    match body {
        Body::Stream(inner) if inner.can_leave_out() => {
            Body::Stream(Box::new(OnePart { inner, skip: range.start, left: range.end - range.start }))
        }
        Body::Stream(mut stream) => {
            if !stream.cut_to(range) {
                stream.cut(&mut |inner| part(inner, range));
            }
            Body::Stream(stream)
        }
        body => Source::of(body).part(range.clone()),
    }
}

/// One range of a body that can be read only once: bytes before it are dropped, and bytes behind it are not read.
struct OnePart {
    inner: Box<dyn BodyStream>,
    /// Number of bytes left before the range.
    skip: u64,
    /// Number of bytes left in the range.
    left: u64,
}

impl OnePart {
    /// Returns the part of an item that lies in the range, if there is any.
    fn trim(&mut self, item: BodyItem) -> Option<BodyItem> {
        let piece = match item {
            BodyItem::Bytes(bytes) => Piece::Bytes(bytes),
            BodyItem::File(piece) => Piece::File(piece),
            BodyItem::Flush => return Some(BodyItem::Flush),
            BodyItem::Trailers(_) | BodyItem::Subrequest(_) => return None,
        };
        let first = self.skip.min(piece.length());
        let last = piece.length().min(first + self.left);
        self.skip -= first;
        self.left -= last - first;
        (last > first).then(|| piece.slice(first..last))
    }
}

impl BodyStream for OnePart {
    fn poll_next(&mut self, request: &Request, context: &mut Context<'_>) -> Poll<Option<Result<BodyItem, BodyError>>> {
        while self.left > 0 {
            match ready!(self.inner.poll_next(request, context)) {
                Some(Ok(item)) => {
                    if let Some(item) = self.trim(item) {
                        return Poll::Ready(Some(Ok(item)));
                    }
                }
                // A body shorter than announced: the body itself or the length of the response reports that.
                end => return Poll::Ready(end),
            }
        }
        Poll::Ready(None)
    }

    fn poll_ahead(&mut self, request: &Request, context: &mut Context<'_>) {
        if self.left > 0 {
            self.inner.poll_ahead(request, context);
        }
    }

    fn is_at_end(&self) -> bool {
        self.left == 0
    }

    fn patience(&self, default: Duration) -> Duration {
        self.inner.patience(default)
    }

    fn length(&self) -> Option<u64> {
        Some(self.left)
    }
}

/// A body of several ranges, made one range at a time: thousands of small ranges take no more memory than their
/// numbers.
///
/// ```text
///   CRLF --BOUNDARY CRLF
///   Content-Type: TYPE CRLF
///   Content-Range: bytes FIRST-LAST/TOTAL CRLF CRLF
///   the part                                           ... the next parts ...
///   CRLF --BOUNDARY-- CRLF
/// ```
struct Parts {
    source: Source,
    total: u64,
    ranges: vec::IntoIter<Range<u64>>,
    /// Head of a part up to its range.
    before_range: Vec<u8>,
    /// Rest of the current part.
    current: Body,
    /// Bytes after the last part.
    end: Option<Bytes>,
}

impl Parts {
    /// Returns the length of the whole in bytes, before any is taken.
    fn length(&self) -> u64 {
        let parts = self.ranges.as_slice().iter();
        let parts: u64 = parts.map(|range| self.head_of(range).len() as u64 + range.end - range.start).sum();
        parts + self.end.as_ref().map_or(0, |end| end.len() as u64)
    }

    fn head_of(&self, range: &Range<u64>) -> Vec<u8> {
        let mut head = Vec::with_capacity(self.before_range.len() + 64);
        head.extend_from_slice(&self.before_range);
        write!(head, "{}-{}/{}\r\n\r\n", range.start, range.end - 1, self.total)
            .expect("writing to memory cannot fail");
        head
    }
}

impl BodyStream for Parts {
    fn poll_next(&mut self, request: &Request, context: &mut Context<'_>) -> Poll<Option<Result<BodyItem, BodyError>>> {
        if let Some(item) = ready!(self.current.poll_next(request, context)) {
            return Poll::Ready(Some(item));
        }
        let item = match self.ranges.next() {
            Some(range) => {
                let head = self.head_of(&range);
                self.current = self.source.part(range);
                Some(head.into())
            }
            None => self.end.take(),
        };
        Poll::Ready(item.map(|bytes| Ok(BodyItem::Bytes(bytes))))
    }
}

/// A body whose bytes can be read repeatedly and in any order.
enum Source {
    /// Its pieces, each with its position.
    Pieces(Vec<(u64, Piece)>),
    /// A stream that returns ranges of itself.
    Stream(Box<dyn BodyStream>),
}

#[derive(Clone)]
enum Piece {
    Bytes(Bytes),
    File(FilePiece),
}

impl Source {
    /// Takes a body of known length apart. Items without content (flushes, trailers) are left out: they belong to the
    /// whole.
    fn of(body: Body) -> Source {
        match body {
            Body::Bytes(bytes) => Source::Pieces(vec![(0, Piece::Bytes(bytes))]),
            Body::File(piece) => Source::Pieces(vec![(0, Piece::File(piece))]),
            Body::Items(items) => Source::of_items(items),
            Body::Stream(stream) => Source::Stream(stream),
            Body::Empty => Source::Pieces(Vec::new()),
        }
    }

    fn of_items(items: VecDeque<BodyItem>) -> Source {
        let (mut pieces, mut position) = (Vec::new(), 0);
        for item in items {
            let length = item.length();
            let piece = match item {
                BodyItem::Bytes(bytes) => Piece::Bytes(bytes),
                BodyItem::File(piece) => Piece::File(piece),
                BodyItem::Flush | BodyItem::Trailers(_) | BodyItem::Subrequest(_) => continue,
            };
            pieces.push((position, piece));
            position += length;
        }
        Source::Pieces(pieces)
    }

    /// Returns `range` alone, in its simplest form.
    fn part(&self, range: Range<u64>) -> Body {
        let pieces = match self {
            Source::Pieces(pieces) => pieces,
            Source::Stream(stream) => return stream.part(&range).unwrap_or_default(),
        };
        let mut items: VecDeque<BodyItem> = items(pieces, range).collect();
        match items.pop_front() {
            Some(BodyItem::Bytes(bytes)) if items.is_empty() => Body::Bytes(bytes),
            Some(BodyItem::File(piece)) if items.is_empty() => Body::File(piece),
            Some(item) => {
                items.push_front(item);
                Body::Items(items)
            }
            None => Body::Empty,
        }
    }
}

/// Returns the items of `range`.
fn items(pieces: &[(u64, Piece)], range: Range<u64>) -> impl Iterator<Item = BodyItem> {
    let first = pieces.partition_point(|(start, piece)| start + piece.length() <= range.start);
    let end = range.end;
    let within = pieces[first..].iter().take_while(move |(start, _)| *start < end);
    within.map(move |(start, piece)| {
        let last = piece.length().min(range.end - start);
        piece.slice(range.start.saturating_sub(*start)..last)
    })
}

impl Piece {
    fn length(&self) -> u64 {
        match self {
            Piece::Bytes(bytes) => bytes.len() as u64,
            Piece::File(piece) => piece.length,
        }
    }

    /// Returns the bytes in `range`, which lies within the piece.
    fn slice(&self, range: Range<u64>) -> BodyItem {
        match self {
            // Bytes in memory can be counted with a usize.
            Piece::Bytes(bytes) => BodyItem::Bytes(bytes.slice(range.start as usize..range.end as usize)),
            Piece::File(FilePiece { file, offset, .. }) => {
                let (offset, length) = (offset + range.start, range.end - range.start);
                BodyItem::File(FilePiece { file: file.clone(), offset, length })
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::task::Waker;

    use gale_files::File;
    use gale_runtime::Lease;
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn if_range_must_name_this_very_response() {
        let etag = b"\"tag\"".as_slice().into();
        let head = ResponseHead { etag, last_modified: Some(784_111_777), ..ResponseHead::default() };
        let holds = |value: &[u8]| still_holds(Some(value), &head);
        assert!(still_holds(None, &head));
        assert!(holds(b"\"tag\""));
        assert!(holds(b"Sun, 06 Nov 1994 08:49:37 GMT"));
        for other in [&b"\"other\""[..], b"W/\"tag\"", b"Sun, 06 Nov 1994 08:49:38 GMT", b"soon", b"\"", b""] {
            assert!(!holds(other), "{}", bstr::BStr::new(other));
        }
        let weak = ResponseHead { etag: b"W/\"tag\"".as_slice().into(), ..ResponseHead::default() };
        assert!(!still_holds(Some(b"W/\"tag\""), &weak));
        assert!(!still_holds(Some(b"soon"), &weak), "no date against no date");
    }

    const TEXT: &[u8] = b"0123456789abcdefghij";

    fn head() -> ResponseHead {
        let content_type = b"text/plain".as_slice().into();
        ResponseHead { status: 200, content_type, allows_ranges: true, ..ResponseHead::default() }
    }

    fn file() -> Body {
        let path =
            std::env::temp_dir().join(format!("gale-range-{}-{:?}", std::process::id(), std::thread::current().id()));
        std::fs::write(&path, [b"before", TEXT, b"after"].concat()).unwrap();
        let file = File::from_std(std::fs::File::open(&path).unwrap()).unwrap();
        std::fs::remove_file(&path).unwrap();
        Body::File(FilePiece { file, offset: 6, length: TEXT.len() as u64 })
    }

    /// Returns the same text as every kind of body, and as items of every division.
    fn bodies() -> Vec<Body> {
        let lease = Lease::copy_of(&TEXT[3..9]).unwrap();
        let Body::File(piece) = file() else { unreachable!() };
        let piece = FilePiece { offset: piece.offset + 9, length: piece.length - 9, ..piece };
        let items = [
            BodyItem::Bytes(TEXT[..3].into()),
            BodyItem::Flush,
            BodyItem::Bytes(lease.freeze()),
            BodyItem::File(piece),
        ];
        vec![Body::Bytes(TEXT.into()), file(), Body::Items(items.into())]
    }

    fn contents(mut body: Body) -> Vec<u8> {
        let mut contents = Vec::new();
        let mut context = Context::from_waker(Waker::noop());
        while let Poll::Ready(Some(item)) = body.poll_next(&Request::default(), &mut context) {
            match item.unwrap() {
                BodyItem::Bytes(bytes) => contents.extend_from_slice(&bytes),
                BodyItem::File(FilePiece { file, offset, length }) => {
                    let mut piece = vec![0; length as usize];
                    assert_eq!(file.read_blocking(offset, &mut piece).unwrap() as u64, length);
                    contents.extend_from_slice(&piece);
                }
                other => panic!("{other:?}"),
            }
        }
        contents
    }

    fn parts(head: &mut ResponseHead, body: Body, ranges: &[Range<u64>]) -> Vec<u8> {
        contents(send_parts(head, body, TEXT.len() as u64, ranges.to_vec(), 7))
    }

    #[test]
    fn one_part_is_the_body_itself() {
        for body in bodies() {
            let mut head = head();
            head.add(b"content-range", b"of another body");
            let ranges = std::slice::from_ref(&(2..11));
            assert_eq!(parts(&mut head, body, ranges), b"23456789a");
            assert_eq!((head.status, head.content_length, head.allows_ranges), (206, Some(9), false));
            assert_eq!(head.field(ResponseField::ContentRange), Some(&b"bytes 2-10/20"[..]));
            assert_eq!((head.fields.len(), &*head.content_type), (1, &b"text/plain"[..]));
        }
    }

    #[test]
    fn several_parts_are_framed_as_nginx_frames_them() {
        let expected = "\r\n--00000000000000000007\r\nContent-Type: text/plain\r\nContent-Range: bytes 0-1/20\r\n\r\n01\
            \r\n--00000000000000000007\r\nContent-Type: text/plain\r\nContent-Range: bytes 8-19/20\r\n\r\n89abcdefghij\
            \r\n--00000000000000000007--\r\n";
        for body in bodies() {
            let mut head = head();
            let sent = parts(&mut head, body, &[0..2, 8..20]);
            assert_eq!(String::from_utf8(sent).unwrap(), expected);
            assert_eq!((head.status, head.content_length), (206, Some(expected.len() as u64)));
            assert_eq!(&*head.content_type, b"multipart/byteranges; boundary=00000000000000000007");
            assert_eq!(head.field(ResponseField::ContentRange), None);
        }
    }

    #[test]
    fn a_part_of_something_without_a_type_has_none() {
        let mut head = ResponseHead { content_type: Default::default(), ..head() };
        let sent = parts(&mut head, Body::Bytes(TEXT.into()), &[0..1, 1..2]);
        assert!(!String::from_utf8(sent).unwrap().contains("Content-Type"));
    }

    proptest! {
        #[test]
        fn every_part_has_the_bytes_of_its_range(first in 0..20_u64, length in 1..20_u64) {
            let range = first..(first + length).min(20);
            let expected = &TEXT[range.start as usize..range.end as usize];
            for body in bodies() {
                prop_assert_eq!(contents(Source::of(body).part(range.clone())), expected);
            }
        }

        #[test]
        fn announced_length_matches_the_sent_bytes(firsts in prop::collection::vec(0..20_u64, 2..9)) {
            let ranges: Vec<_> = firsts.into_iter().map(|first| first..20).collect();
            for body in bodies() {
                let mut head = head();
                let sent = parts(&mut head, body, &ranges);
                prop_assert_eq!(head.content_length, Some(sent.len() as u64));
            }
        }
    }
}
