//! Asks the server for the rest of a response that the disk does not deliver, by `Range` and `If-Range`.
//!
//! Parts of two responses are combined only if both have the same strong entity tag (RFC 9110 §13.1.5), and only if the
//! part is exactly the requested one. A server may instead send the whole response, with the same length: the part that
//! the client already has is then skipped. Anything else aborts the response, and the client notices that.

use std::ops::Range;
use std::rc::Rc;
use std::task::{Context, Poll, ready};

use gale_base::log_level::Level;
use gale_base::units;
use gale_http::request::Request;
use gale_http::request::body::{BodyError, BodyItem};
use gale_http::request::response::{FieldList, ResponseHead};
use gale_http::request::subrequest::Subrequest;
use gale_http_cache::format::Meta;
use gale_protocol::request::Method;
use gale_protocol::response::ResponseField;

/// The part that a copy of a request asks its server for: a note of that copy.
#[derive(Clone)]
pub struct Part {
    /// `Range`
    pub range: Rc<[u8]>,
    /// `If-Range`
    pub if_range: Rc<[u8]>,
}

/// The strong entity tag of a response of which a part can be requested; `None` if it has no such tag, or is a part
/// itself.
pub(super) fn strong_tag(meta: &Meta) -> Option<Rc<[u8]>> {
    if meta.status != 200 || meta.is_head_only {
        return None;
    }
    tag_of(&meta.fields)
}

fn tag_of(fields: &FieldList) -> Option<Rc<[u8]>> {
    let tag = fields.iter().find(|field| field.name.known() == Some(ResponseField::ETag))?;
    (tag.value.len() > 2 && tag.value.starts_with(b"\"")).then(|| (*tag.value).into())
}

/// The rest of a response, from a server.
pub(super) struct Remainder {
    subrequest: Subrequest,
    tag: Rc<[u8]>,
    offset: u64,
    /// End of the wanted part, and the total length, if they are known.
    end: Option<u64>,
    total: Option<u64>,
    /// Offset of the next bytes from the server; `None` until its head was checked.
    position: Option<u64>,
    /// True if the server sends the whole response.
    is_all: bool,
}

impl Remainder {
    /// Asks for the part from `offset` to `end`, if that is known. `None` if the response has no strong entity tag or
    /// is not for a GET, or no subrequest can be made.
    pub fn ask(
        request: &Request,
        tag: Option<&Rc<[u8]>>,
        offset: u64,
        end: Option<u64>,
        total: Option<u64>,
    ) -> Option<Remainder> {
        let tag = tag.filter(|_| request.method() == Method::Get)?;
        let last = end.map(|end| (end - 1).to_string()).unwrap_or_default();
        let range = format!("bytes={offset}-{last}").into_bytes().into();
        let subrequest = Subrequest::repeat(request, Part { range, if_range: Rc::clone(tag) })?;
        Some(Remainder { subrequest, tag: Rc::clone(tag), offset, end, total, position: None, is_all: false })
    }

    /// Returns the next bytes; `None` at the end.
    pub fn poll_next(
        &mut self,
        request: &Request,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<BodyItem, BodyError>>> {
        if self.position.is_none() {
            let checked = match ready!(self.subrequest.poll_answer(context)) {
                Some(answer) => check(&answer.response, &self.tag, self.offset, self.end, self.total),
                None => Err("no answer".to_owned()),
            };
            match checked {
                Ok(sent) => {
                    (self.position, self.end, self.is_all) = (Some(sent.from), Some(sent.wanted_to), sent.is_all)
                }
                Err(what) => {
                    let message = format!("{what} for the rest of a cached response");
                    request.log(Level::Error, format_args!("{message}"));
                    return Poll::Ready(Some(Err(BodyError::Other(message))));
                }
            }
        }
        let (mut position, end) = (self.position.unwrap_or(self.offset), self.end.unwrap_or(self.offset));
        loop {
            if self.is_all && self.offset == end {
                // The rest of the whole response is not wanted.
                return Poll::Ready(None);
            }
            match ready!(self.subrequest.poll_next(context)) {
                Some(Ok(item)) if item.length() == 0 => return Poll::Ready(Some(Ok(item))),
                Some(Ok(item)) if self.is_all || position + item.length() <= end => {
                    let start = position;
                    position += item.length();
                    self.position = Some(position);
                    if let Some(item) = item.cut(start, &(self.offset..end)) {
                        self.offset += item.length();
                        return Poll::Ready(Some(Ok(item)));
                    }
                }
                Some(Err(error)) => return Poll::Ready(Some(Err(error))),
                None if self.offset == end => return Poll::Ready(None),
                _ => {
                    let what = "the rest of a cached response differs from its announced length".to_owned();
                    return Poll::Ready(Some(Err(BodyError::Short(what))));
                }
            }
        }
    }
}

/// The range that a server sends.
#[derive(Debug, PartialEq, Eq)]
struct Sent {
    from: u64,
    /// End of the wanted part.
    wanted_to: u64,
    is_all: bool,
}

/// Checks that an answer contains the requested part: as that part, or as the whole response.
fn check(head: &ResponseHead, tag: &[u8], offset: u64, end: Option<u64>, total: Option<u64>) -> Result<Sent, String> {
    if !matches!(head.status, 200 | 206) {
        return Err(format!("unexpected status {}", head.status));
    }
    // A server without support for If-Range may send a part of another response.
    if *head.etag != *tag {
        return Err("a different entity tag".to_owned());
    }
    if head.status == 200 {
        let is_other_length = head.content_length.zip(total).is_some_and(|(told, known)| told != known);
        if is_other_length {
            return Err("another length".to_owned());
        }
        let wanted_to = end.or(total).or(head.content_length).ok_or("no complete length")?;
        return Ok(Sent { from: 0, wanted_to, is_all: true });
    }
    let text = head.field(ResponseField::ContentRange).unwrap_or_default();
    let (range, told) = parse_content_range(text).ok_or("an invalid range")?;
    let expected = end.or(told).ok_or("no complete length")?;
    let is_other_total = told.zip(total).is_some_and(|(told, known)| told != known);
    if range != (offset..expected) || is_other_total {
        return Err("another range".to_owned());
    }
    Ok(Sent { from: offset, wanted_to: expected, is_all: false })
}

/// True if a response with status 206 is a single part with the length that it announces, or has several parts.
pub(super) fn is_part(fields: &FieldList, length: Option<u64>) -> bool {
    let field = |known| fields.iter().find(|field| field.name.known() == Some(known)).map(|field| &*field.value);
    match field(ResponseField::ContentRange) {
        Some(range) => parse_content_range(range)
            .is_some_and(|(range, _)| length.is_none_or(|length| length == range.end - range.start)),
        None => field(ResponseField::ContentType)
            .is_some_and(|kind| kind.len() >= 20 && kind[..20].eq_ignore_ascii_case(b"multipart/byteranges")),
    }
}

/// Parses `bytes FIRST-LAST/TOTAL`; the total may be unknown.
fn parse_content_range(text: &[u8]) -> Option<(Range<u64>, Option<u64>)> {
    let rest = text.strip_prefix(b"bytes ")?;
    let (range, total) = split_at(rest, b'/')?;
    let (first, last) = split_at(range, b'-')?;
    let (first, last) = (units::parse_number(first)?, units::parse_number(last)?);
    let total = match total {
        b"*" => None,
        digits => Some(units::parse_number(digits)?),
    };
    (first <= last).then_some((first..last.checked_add(1)?, total))
}

fn split_at(text: &[u8], mark: u8) -> Option<(&[u8], &[u8])> {
    let at = memchr::memchr(mark, text)?;
    Some((text[..at].trim_ascii(), text[at + 1..].trim_ascii()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_part_that_was_asked_for_is_one_or_all_of_the_same_response() {
        let head = |status, tag: &str, range: &str| {
            let mut head = ResponseHead { status, etag: tag.as_bytes().into(), ..ResponseHead::default() };
            head.set(ResponseField::ContentRange, range.to_owned());
            head
        };
        let judge = |head: &ResponseHead, end| check(head, b"\"a\"", 10, end, Some(20));
        let part = |wanted_to| Ok(Sent { from: 10, wanted_to, is_all: false });
        assert_eq!(judge(&head(206, "\"a\"", "bytes 10-19/20"), Some(20)), part(20));
        assert_eq!(judge(&head(206, "\"a\"", "bytes 10-14/*"), Some(15)), part(15));
        assert_eq!(judge(&head(206, "\"a\"", "bytes 10-19/20"), None), part(20));
        let all = |length| ResponseHead { content_length: length, ..head(200, "\"a\"", "") };
        assert_eq!(judge(&all(Some(20)), Some(15)), Ok(Sent { from: 0, wanted_to: 15, is_all: true }));
        assert_eq!(judge(&all(None), None), Ok(Sent { from: 0, wanted_to: 20, is_all: true }));
        assert!(judge(&all(Some(21)), Some(20)).is_err(), "another response");
        for wrong in [
            head(200, "\"b\"", ""),
            head(404, "\"a\"", "bytes 10-19/20"),
            head(206, "\"b\"", "bytes 10-19/20"),
            head(206, "", "bytes 10-19/20"),
            head(206, "W/\"a\"", "bytes 10-19/20"),
            head(206, "\"a\"", "bytes 10-18/20"),
            head(206, "\"a\"", "bytes 9-19/20"),
            head(206, "\"a\"", "bytes 10-19/21"),
            head(206, "\"a\"", "bytes 19-10/20"),
            head(206, "\"a\"", ""),
        ] {
            assert!(judge(&wrong, Some(20)).is_err(), "{wrong:?}");
        }
        assert!(judge(&head(206, "\"a\"", "bytes 10-19/*"), None).is_err(), "the complete length is unknown");
    }
}
