//! The head of a response, before a codec writes it.
//!
//! Fields that filters use most have a member of their own. The others are in a list, whose names are sent as they were
//! spelled. Texts are stored inline or shared: a typical response allocates nothing.

mod etag;
mod field;

use std::cell::Cell;

use gale_base::http_date;
use gale_protocol::response::ResponseField;
use gale_runtime::Bytes;
use smallvec::SmallVec;

pub use field::{Field, FieldList, FieldName, FieldText};

/// A short text, stored without an allocation.
pub type ShortText = SmallVec<[u8; 48]>;

/// The head of the response that is being made.
#[derive(Clone, Debug, Default)]
pub struct ResponseHead {
    /// The status; 0 until there is one.
    pub status: u16,
    /// `Content-Type`, empty for none.
    pub content_type: ShortText,
    /// `Content-Length` if it is known and to be sent.
    pub content_length: Option<u64>,
    /// Modification time of the content, in seconds since 1970; see [`ResponseHead::last_modified_text`].
    pub last_modified: Option<u64>,
    /// `ETag` with its quotes, empty for none.
    pub etag: ShortText,
    /// `Location`, empty for none. A path is made absolute when it is sent, if `absolute_redirect` is on.
    pub location: Vec<u8>,
    /// True if ranges are supported, which `Accept-Ranges` announces.
    pub allows_ranges: bool,
    /// Every other field, in order.
    pub fields: FieldList,
    /// True if filters send trailers (see `Filter::add_trailers`), which need chunked encoding.
    pub has_trailers: bool,
    /// True if an upstream server, which has seen the request's conditions, sent the response.
    pub is_from_upstream: bool,
    /// True if conditions are evaluated in the order of RFC 9110 §13.2.2, not in nginx's.
    pub follows_rfc_conditions: bool,
    /// True if the response has no `Server` field unless one is set.
    pub omits_server: bool,
    /// Reason phrase other than the usual one, see [`ResponseHead::reason`].
    pub reason: Option<Reason>,
}

/// Reason phrase of an upstream server for its status.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reason {
    /// The status that the phrase belongs to: if the status is replaced, the phrase is not sent.
    pub status: u16,
    /// The phrase, which may be empty.
    pub phrase: Bytes,
}

impl ResponseHead {
    /// Resets everything and keeps the memory.
    pub fn clear(&mut self) {
        let ResponseHead {
            status,
            content_type,
            content_length,
            last_modified,
            etag,
            location,
            allows_ranges,
            fields,
            has_trailers,
            is_from_upstream,
            follows_rfc_conditions,
            omits_server,
            reason,
        } = self;
        *status = 0;
        content_type.clear();
        *content_length = None;
        *last_modified = None;
        etag.clear();
        location.clear();
        *allows_ranges = false;
        fields.clear();
        *has_trailers = false;
        *is_from_upstream = false;
        *follows_rfc_conditions = false;
        *omits_server = false;
        *reason = None;
    }

    /// Memory in bytes that remains allocated after [`ResponseHead::clear`].
    pub(super) fn memory_bytes(&self) -> usize {
        self.location.capacity() + self.fields.memory_bytes()
    }

    /// Removes everything that describes a file or an upstream response, because the body will be another one.
    pub fn clear_entity(&mut self) {
        self.reason = None;
        self.is_from_upstream = false;
        self.follows_rfc_conditions = false;
        self.omits_server = false;
        self.content_type.clear();
        self.content_length = None;
        self.last_modified = None;
        self.etag.clear();
        self.allows_ranges = false;
    }

    /// Removes everything that describes a body, since a 304 has none. `ETag` and `Last-Modified`, which identify the
    /// body that the client has, stay. (RFC 9110 §15.4.5)
    pub fn describe_nothing(&mut self) {
        self.content_type.clear();
        self.content_length = None;
        self.allows_ranges = false;
        self.remove(ResponseField::ContentEncoding);
    }

    /// Removes everything that a change of the body makes untrue: the length, support for ranges, and a strong `ETag`,
    /// which becomes a weak one. (RFC 9110 §8.8.1)
    pub fn will_change(&mut self) {
        self.content_length = None;
        self.allows_ranges = false;
        // An upstream server's own announcement for the body that it sent.
        self.remove(ResponseField::AcceptRanges);
        self.weaken_etag();
    }

    /// Removes `Last-Modified`, including one that an upstream server sent with an error.
    pub fn clear_last_modified(&mut self) {
        self.last_modified = None;
        self.remove(ResponseField::LastModified);
    }

    /// Replaces the status and drops the reason phrase of the old one.
    pub fn replace_status(&mut self, status: u16) {
        self.status = status;
        self.reason = None;
    }

    /// The reason phrase of the status line, if it is not the usual one. Only HTTP/1 has it.
    pub fn reason(&self) -> Option<&[u8]> {
        let reason = self.reason.as_ref().filter(|reason| reason.status == self.status);
        reason.map(|reason| &*reason.phrase)
    }

    /// Adds a field and keeps others of the same name.
    pub fn add(&mut self, name: impl Into<FieldName>, value: impl Into<FieldText>) {
        self.fields.push(Field { name: name.into(), value: value.into() });
    }

    /// Sets a field and removes others of the same name.
    pub fn set(&mut self, name: impl Into<FieldName>, value: impl Into<FieldText>) {
        let name = name.into();
        self.fields.remove_same(&name);
        self.add(name, value);
    }

    /// Removes every field of this kind.
    pub fn remove(&mut self, known: ResponseField) {
        self.fields.remove(known);
    }

    /// True if the list has a field of this kind.
    #[inline]
    pub fn has(&self, known: ResponseField) -> bool {
        self.fields.has(known)
    }

    /// The value of the first field of this kind.
    pub fn field(&self, known: ResponseField) -> Option<&[u8]> {
        if self.has(known) { self.values(known).next() } else { None }
    }

    /// The values of all fields of this kind, in order.
    pub fn values(&self, known: ResponseField) -> impl Iterator<Item = &[u8]> {
        self.fields.iter().filter(move |field| field.name.known() == Some(known)).map(|field| &*field.value)
    }

    /// The first field with this name, ignoring case; for names from a configuration.
    pub fn field_by_name(&self, name: &FieldName) -> Option<&[u8]> {
        self.fields.iter().find(|field| field.name.is_same(name)).map(|field| &*field.value)
    }

    /// True if `Last-Modified` is known and sent. It is sent only if the response is the requested content: the
    /// modification time of an error page, for example, says nothing about that, although `expires modified` counts
    /// from it.
    pub fn tells_last_modified(&self) -> bool {
        self.last_modified.is_some() && matches!(self.status, 200 | 206 | 304)
    }

    /// `Last-Modified` as text, if it is sent.
    pub fn last_modified_text(&self) -> Option<[u8; 29]> {
        self.last_modified.filter(|_| self.tells_last_modified()).map(date_text)
    }
}

/// Number of cached date texts: files requested often have few different times.
const DATES_KEPT: usize = 64;

thread_local! {
    /// Seconds and their text, at the index given by the seconds.
    static DATES: [Cell<(u64, [u8; http_date::LENGTH])>; DATES_KEPT] =
        const { [const { Cell::new((0, *b"Thu, 01 Jan 1970 00:00:00 GMT")) }; DATES_KEPT] };
}

/// An HTTP date, formatted only if the cache slot holds another one.
fn date_text(seconds: u64) -> [u8; http_date::LENGTH] {
    DATES.with(|dates| {
        let place = &dates[(seconds % DATES_KEPT as u64) as usize];
        let (kept, text) = place.get();
        if kept == seconds {
            return text;
        }
        let text = http_date::format(seconds);
        place.set((seconds, text));
        text
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_found_and_replaced_whatever_their_case() {
        let mut head = ResponseHead::default();
        head.add(b"X-One", b"1");
        head.add(b"x-one", b"2");
        assert_eq!(head.field_by_name(&b"X-ONE".into()), Some(&b"1"[..]));
        head.set(b"x-One", b"3");
        assert_eq!(head.fields.len(), 1);
        assert_eq!(head.field_by_name(&b"x-one".into()), Some(&b"3"[..]));
    }

    #[test]
    fn known_fields_keep_their_order_and_spelling_and_are_found_by_number() {
        use ResponseField::{CacheControl, SetCookie, Vary};
        let head_of_upstream = Bytes::from_static(b"set-cookie: a=1");
        let mut head = ResponseHead::default();
        head.add(head_of_upstream.slice(..10), head_of_upstream.slice(12..));
        head.add(CacheControl, b"no-cache");
        head.add(b"SET-COOKIE", b"b=2");
        assert_eq!(head.values(SetCookie).collect::<Vec<_>>(), [b"a=1", b"b=2"]);
        assert_eq!((head.field(SetCookie), head.has(Vary), head.field(Vary)), (Some(&b"a=1"[..]), false, None));
        let names: Vec<&[u8]> = head.fields.iter().map(|field| &*field.name).collect();
        assert_eq!(names, [&b"set-cookie"[..], b"Cache-Control", b"SET-COOKIE"]);
        head.remove(SetCookie);
        assert_eq!((head.has(SetCookie), head.has(CacheControl), head.fields.len()), (false, true, 1));
        head.set(b"cache-control", b"private");
        assert_eq!(head.values(CacheControl).collect::<Vec<_>>(), [b"private"]);
        head.clear();
        assert!(!head.has(CacheControl));
    }

    #[test]
    fn a_reason_phrase_goes_with_the_status_that_it_came_with() {
        let reason = || Some(Reason { status: 404, phrase: Bytes::from_static(b"Gone Fishing") });
        let head = || ResponseHead { status: 404, reason: reason(), ..ResponseHead::default() };
        assert_eq!(head().reason(), Some(&b"Gone Fishing"[..]));
        let take_it_away: [fn(&mut ResponseHead); 4] = [
            |head| head.status = 304,
            |head| head.replace_status(404),
            ResponseHead::clear_entity,
            |head| {
                head.clear();
                head.status = 404;
            },
        ];
        for take_away in take_it_away {
            let mut head = head();
            take_away(&mut head);
            assert_eq!(head.reason(), None);
        }
    }

    #[test]
    fn what_describes_no_body_keeps_what_identifies_it() {
        let mut head = ResponseHead { content_length: Some(5), last_modified: Some(7), ..ResponseHead::default() };
        head.content_type = b"text/plain".as_slice().into();
        head.etag = b"\"tag\"".as_slice().into();
        head.allows_ranges = true;
        head.add(b"content-encoding", b"gzip");
        head.add(ResponseField::Vary, b"Accept-Encoding");
        head.describe_nothing();
        assert_eq!((head.content_length, head.allows_ranges, head.content_type.is_empty()), (None, false, true));
        assert_eq!((&*head.etag, head.last_modified), (&b"\"tag\""[..], Some(7)));
        assert_eq!((head.fields.len(), head.field(ResponseField::Vary)), (1, Some(&b"Accept-Encoding"[..])));
    }

    #[test]
    fn a_body_that_will_change_has_a_weak_etag_and_no_length() {
        let mut head = ResponseHead { content_length: Some(5), allows_ranges: true, ..ResponseHead::default() };
        for (before, after) in [("\"a\"", "W/\"a\""), ("W/\"a\"", "W/\"a\""), ("a", ""), ("", "")] {
            head.etag = before.as_bytes().into();
            head.will_change();
            assert_eq!(&*head.etag, after.as_bytes());
        }
        assert_eq!((head.content_length, head.allows_ranges), (None, false));
    }

    #[test]
    fn last_modified_that_shares_its_place_with_another_is_made_anew() {
        let text = |seconds| {
            let head = ResponseHead { status: 200, last_modified: Some(seconds), ..ResponseHead::default() };
            head.last_modified_text()
        };
        let times = [0, 1, DATES_KEPT as u64, 784_111_777, 784_111_777 + DATES_KEPT as u64, http_date::SECONDS_MAX];
        for seconds in times.into_iter().chain(times).flat_map(|seconds| [seconds, seconds]) {
            assert_eq!(text(seconds), Some(http_date::format(seconds)));
        }
    }
}
