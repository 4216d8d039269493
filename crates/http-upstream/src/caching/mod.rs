//! The cache's part in requests that are passed on: it is consulted before the servers, and stores their responses.
//!
//! ```text
//!   consult    the lookup: an answer, or how the servers are asked
//!   opening    opens a stored response: from this worker's memory, or its file
//!   serve      an entry, or a response in flight, as the answer to a request
//!   stored     the body of an entry in a file, and how long a client waits for it
//!   checked    reads it block by block, and verifies each sum
//!   resume     the rest of a response that the disk does not deliver, from its server
//!   receive    a server's response: a 304, an error replaced by a stale response, a response to store
//!   freshen    applies a response to HEAD to the stored response to GET
//!   invalidate invalidation by unsafe requests
//!   feed       the task that reads a server's response into a fill, even without its first client
//!   batches    hands the storing tasks of a turn of the loop to a pool together
//!   purge      requests that purge
//!   search     `No-Vary-Search`: responses stored and purged for several queries
//! ```
//! (<https://nginx.org/en/docs/http/ngx_http_proxy_module.html#proxy_cache>)

mod batches;
mod checked;
mod consult;
mod feed;
mod freshen;
mod invalidate;
mod opening;
mod purge;
mod receive;
mod resume;
mod search;
mod serve;
mod stored;

use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use gale_base::log_level::Level;
use gale_http::request::Request;
use gale_http_cache::CacheZone;
use gale_http_cache::key::{Id, id_of};
use gale_http_cache::memory;
use gale_http_cache::policy::{Lifetime, NotStored};
use gale_http_cache::settings::CacheSettings;
use gale_http_cache::zone::WAYS;
use gale_protocol::request::KnownHeader;

use crate::caching_state::Caching;

pub use consult::{Consulted, consult, try_hit};
pub(super) use receive::{begin, judge, note_of_user, revalidate, serve_stale, tell_error, tell_intercepted};
pub use resume::Part;
pub use serve::Serving;
pub(super) use serve::finish_head;

/// Data about a request's cache for variables and for its module: a note of the request.
#[derive(Clone, Default)]
pub struct CacheNote {
    /// `$upstream_cache_status`
    pub status: Option<CacheStatus>,
    /// `$upstream_cache_key`: the key of the lookup.
    pub key: Rc<[u8]>,
    /// True if the response may be stored: the server is asked for the whole response, even if the client asks for a
    /// range.
    pub asks_for_whole: bool,
    /// True if a HEAD is sent as a GET.
    pub converts_head: bool,
    /// Validator for `If-Modified-Since`.
    pub last_modified: Option<Rc<[u8]>>,
    /// Validator for `If-None-Match`.
    pub etag: Option<Rc<[u8]>>,
    /// The part to ask the server for, by `Range` and `If-Range`.
    pub part: Option<Part>,
    /// Reason for which the response was not stored.
    pub not_stored: Option<NotStored>,
    /// True if the response was read while another request fetched it.
    pub is_collapsed: bool,
    /// Reason for which the server was asked, if the status does not tell it.
    pub asked_because: Option<AskedBecause>,
    /// The cache whose counters are used.
    zone: Option<Arc<CacheZone>>,
    /// The entry of the answer: its id and its number.
    entry: Option<(Id, u64)>,
}

/// Reason for which a server is asked, in the words of `Cache-Status`. (RFC 9211 §2.2)
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AskedBecause {
    /// Only other variants are stored.
    VaryMiss,
    /// The request refuses the stored response, which is fresh.
    Request,
    /// The stored response was stale and was used because the server failed, with this status if it sent one.
    Failed(Option<u16>),
}

fn count(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}

/// Counts a request's use of its cache when the request ends. Bytes that its subrequests got from a cache are counted
/// for them.
fn count_use(request: &Request) {
    let Some(CacheNote { status: Some(status), zone: Some(zone), .. }) = request.notes.get::<CacheNote>() else {
        return;
    };
    let bytes = if request.is_main() {
        let sent = request.sent();
        // If the client has left, not even the whole head may have been sent.
        sent.bytes.saturating_sub(sent.head_bytes).saturating_sub(request.counted_in_parts())
    } else {
        let bytes = request.response.content_length.unwrap_or(0);
        request.count_part(bytes);
        bytes
    };
    zone.counters.uses.count(*status as usize, bytes);
}

/// Notes the entry of the request's answer.
fn note_entry(request: &mut Request, zone: &Arc<CacheZone>, id: Id, number: u64) {
    if let Some(note) = request.notes.get_mut::<CacheNote>() {
        note.zone.get_or_insert_with(|| Arc::clone(zone));
        note.entry = Some((id, number));
        request.call_when_refused(forget_refused);
    }
}

/// Removes the entry of a refused response, or prevents its storing.
fn forget_refused(request: &Request) {
    let Some(CacheNote { zone: Some(zone), entry: Some((id, number)), .. }) = request.notes.get::<CacheNote>() else {
        return;
    };
    zone.discard(id, *number);
    memory::forget(zone.identity(), id);
    request.log(Level::Info, format_args!("the response is not stored in cache \"{}\"", zone.name));
}

/// nginx's words for the result of a lookup.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CacheStatus {
    /// Nothing is stored.
    Miss,
    /// The lookup was skipped.
    Bypass,
    /// The stored response is stale, and the server was asked.
    Expired,
    /// The stored response is stale, and was used.
    Stale,
    /// The stored response is stale, and was used while another request updates it.
    Updating,
    /// The stored response was stale, and the server confirmed it.
    Revalidated,
    /// The stored response was used.
    Hit,
}

impl CacheStatus {
    /// All values, in the order of a cache's figures.
    pub const ALL: [CacheStatus; WAYS] = [
        CacheStatus::Miss,
        CacheStatus::Bypass,
        CacheStatus::Expired,
        CacheStatus::Stale,
        CacheStatus::Updating,
        CacheStatus::Revalidated,
        CacheStatus::Hit,
    ];

    /// True if the answer was stored before the request, or fetched for another request.
    pub fn is_from_cache(self) -> bool {
        !matches!(self, CacheStatus::Miss | CacheStatus::Bypass | CacheStatus::Expired)
    }

    /// The value of `$upstream_cache_status`.
    pub fn name(self) -> &'static str {
        match self {
            CacheStatus::Miss => "MISS",
            CacheStatus::Bypass => "BYPASS",
            CacheStatus::Expired => "EXPIRED",
            CacheStatus::Stale => "STALE",
            CacheStatus::Updating => "UPDATING",
            CacheStatus::Revalidated => "REVALIDATED",
            CacheStatus::Hit => "HIT",
        }
    }
}

impl Caching {
    /// Takes a lead even if other requests fetch the same response.
    fn take_lead_beside(&mut self) {
        self.lead = Some(self.zone.begin_beside(&self.primary, self.id, gale_runtime::now()));
    }

    /// The id for a recorded error: that of the request's own key, since no rules say that it covers other queries.
    fn id_of_errors(&self) -> Id {
        if *self.key == *self.own { self.id } else { id_of(&self.own) }
    }

    /// Notes the reason for which the response will not be stored, for `Cache-Status` and the log.
    fn note_not_stored(request: &mut Request, why: NotStored) {
        if let Some(note) = request.notes.get_mut::<CacheNote>() {
            note.not_stored = Some(why);
        }
        request.log(Level::Info, format_args!("the response is not stored: {}", why.word()));
    }

    /// Notes the cache status.
    fn note(request: &mut Request, status: CacheStatus) {
        match request.notes.get_mut::<CacheNote>() {
            Some(note) => note.status = Some(status),
            None => request.notes.put(CacheNote { status: Some(status), ..CacheNote::default() }),
        }
    }
}

/// Adds `Cache-Status`, if the location names its cache: the cache status, and the reason for not storing. (RFC 9211)
pub(super) fn tell_status(
    request: &mut Request,
    settings: &CacheSettings,
    lifetime: Option<&Lifetime>,
    is_stored: bool,
) {
    let Some(name) = settings.status_name.get_opt().filter(|name| !name.is_empty() && &***name != b"off") else {
        return;
    };
    let Some(note) = request.notes.get::<CacheNote>() else { return };
    let Some(status) = note.status else { return };
    let mut value = name.to_vec();
    let forwarded = match (note.asked_because, status) {
        (Some(AskedBecause::VaryMiss), CacheStatus::Miss) => "; fwd=vary-miss",
        (_, CacheStatus::Miss) => "; fwd=uri-miss",
        (Some(AskedBecause::Request), CacheStatus::Revalidated) => "; fwd=request; fwd-status=304",
        (Some(AskedBecause::Request), CacheStatus::Expired | CacheStatus::Bypass) => "; fwd=request",
        (_, CacheStatus::Bypass) => "; fwd=bypass",
        (Some(AskedBecause::Failed(_)), _) | (_, CacheStatus::Expired) => "; fwd=stale",
        (_, CacheStatus::Revalidated) => "; fwd=stale; fwd-status=304",
        (_, CacheStatus::Stale | CacheStatus::Updating | CacheStatus::Hit) => "; hit",
    };
    value.extend_from_slice(forwarded.as_bytes());
    if let Some(AskedBecause::Failed(Some(status))) = note.asked_because {
        value.extend_from_slice(format!("; fwd-status={status}").as_bytes());
    }
    if note.is_collapsed {
        value.extend_from_slice(b"; collapsed");
    }
    if let Some(lifetime) = lifetime {
        let left = i128::from(lifetime.fresh_until) - i128::from(gale_runtime::wall_seconds());
        value.extend_from_slice(format!("; ttl={left}").as_bytes());
    }
    if is_stored && note.not_stored.is_none() {
        value.extend_from_slice(b"; stored");
    }
    if let Some(why) = note.not_stored {
        value.extend_from_slice(b"; detail=");
        value.extend_from_slice(why.word().as_bytes());
    }
    request.response.add(b"Cache-Status", value);
}

/// Note of a background copy of a request: the state for fetching the response again.
pub(super) struct Update(Box<Caching>);

/// True if the server was asked for the whole response, even if the client asked for a range.
pub(super) fn asks_for_whole(request: &Request) -> bool {
    request.notes.get::<CacheNote>().is_some_and(|note| note.asks_for_whole)
}

/// True if a field of the client is not passed to the server, because the cache asks for the whole response, and with
/// conditions of its own. (nginx's list)
pub fn is_for_cache(note: Option<&CacheNote>, field: Option<KnownHeader>) -> bool {
    note.is_some_and(|note| note.asks_for_whole)
        && matches!(
            field,
            Some(
                KnownHeader::IfModifiedSince
                    | KnownHeader::IfUnmodifiedSince
                    | KnownHeader::IfNoneMatch
                    | KnownHeader::IfMatch
                    | KnownHeader::Range
                    | KnownHeader::IfRange
            )
        )
}
