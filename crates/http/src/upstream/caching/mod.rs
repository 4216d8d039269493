//! How requests that are passed on use a cache: it is asked before the servers, and keeps what they answer.
//!
//! ```text
//!   consult    what is there: an answer, or how the servers are asked
//!   opening    a stored response: out of this worker's memory, or its file
//!   serve      an entry, or what is coming, as the answer to a request
//!   stored     the body of an entry in a file, and how long a client waits for it
//!   checked    reading it block by block, each with its sum
//!   resume     the rest of a response that the disk does not give, from its server
//!   receive    a server's response: a 304, an error that something stale stands in for, something to store
//!   freshen    what a response to HEAD says of what is stored
//!   invalidate what a request that changes something takes away
//!   feed       what a server sends, into a fill: the task that goes on without its first client
//!   batches    what a turn of the loop has to store, handed to a pool together
//!   purge      requests that purge
//!   search     `No-Vary-Search`: what is stored, and purged, for more than one query
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
use gale_protocol::request::KnownHeader;

use crate::cache::CacheZone;
use crate::cache::key::{Id, id_of};
use crate::cache::memory::{self, Hot};
use crate::cache::policy::{Lifetime, NotStored};
use crate::cache::search::SearchKey;
use crate::cache::settings::CacheSettings;
use crate::cache::zone::{Lead, WAYS};
use crate::request::Request;

pub use consult::{Consulted, consult, try_hit};
pub(super) use receive::{begin, judge, note_of_user, revalidate, serve_stale, tell_error, tell_intercepted};
pub use resume::Part;
pub use serve::Serving;
pub(super) use serve::finish_head;

/// What a request's variables tell of its cache, and what its module has to know: a note of the request.
#[derive(Clone, Default)]
pub struct CacheNote {
    /// `$upstream_cache_status`
    pub status: Option<CacheStatus>,
    /// `$upstream_cache_key`: what the request is looked for by.
    pub key: Rc<[u8]>,
    /// The response may be stored: the server is asked for all of it, whatever the client asks for.
    pub asks_for_whole: bool,
    /// A HEAD becomes a GET.
    pub converts_head: bool,
    /// What the server is asked to compare with: `If-Modified-Since`.
    pub last_modified: Option<Rc<[u8]>>,
    /// What the server is asked to compare with: `If-None-Match`.
    pub etag: Option<Rc<[u8]>>,
    /// What the server is asked for the rest of: `Range` and `If-Range`.
    pub part: Option<Part>,
    /// Why the response was not stored.
    pub not_stored: Option<NotStored>,
    /// It was read while another request fetched it.
    pub is_collapsed: bool,
    /// Why the server was asked, where the status does not tell it.
    pub asked_because: Option<AskedBecause>,
    /// Where its use is counted.
    zone: Option<Arc<CacheZone>>,
    /// The entry that is its answer, or becomes it: its name and its number.
    entry: Option<(Id, u64)>,
}

/// Why a server is asked, in the words of `Cache-Status`. (RFC 9211 §2.2)
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AskedBecause {
    /// Other variants are stored, and not this one.
    VaryMiss,
    /// The request does not want what is stored, though it is fresh.
    Request,
    /// What is stored was too old. It was used all the same: the server failed, with this status if it had one.
    Failed(Option<u16>),
}

fn count(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}

/// Counts how a request has used its cache, when it is over. What its subrequests have taken from one is theirs.
fn count_use(request: &Request) {
    let Some(CacheNote { status: Some(status), zone: Some(zone), .. }) = request.notes.get::<CacheNote>() else {
        return;
    };
    let of_parts = &request.shared.counted_bytes;
    let bytes = if request.is_main() {
        let sent = request.sent();
        // Of one who has left not even the head may have gone.
        sent.bytes.saturating_sub(sent.head_bytes).saturating_sub(of_parts.get())
    } else {
        let bytes = request.response.content_length.unwrap_or(0);
        of_parts.set(of_parts.get() + bytes);
        bytes
    };
    zone.counters.uses.count(*status as usize, bytes);
}

/// Notes which entry the request's answer is, or becomes.
fn note_entry(request: &mut Request, zone: &Arc<CacheZone>, id: Id, number: u64) {
    if let Some(note) = request.notes.get_mut::<CacheNote>() {
        note.zone.get_or_insert_with(|| Arc::clone(zone));
        note.entry = Some((id, number));
        request.when_refused = Some(forget_refused);
    }
}

/// Takes the entry of a refused response away, or keeps it from coming.
fn forget_refused(request: &Request) {
    let Some(CacheNote { zone: Some(zone), entry: Some((id, number)), .. }) = request.notes.get::<CacheNote>() else {
        return;
    };
    zone.discard(id, *number);
    memory::forget(zone.identity(), id);
    request.log(Level::Info, format_args!("the response is not stored in cache \"{}\"", zone.name));
}

/// nginx's words for how a cache was used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CacheStatus {
    /// It was not there.
    Miss,
    /// Nobody looked.
    Bypass,
    /// It was too old.
    Expired,
    /// It was too old, and used.
    Stale,
    /// It was too old, and used while somebody fetches it anew.
    Updating,
    /// It was too old, and the server says that it has not changed.
    Revalidated,
    /// It was there.
    Hit,
}

impl CacheStatus {
    /// All of them, in the order of a cache's figures.
    pub const ALL: [CacheStatus; WAYS] = [
        CacheStatus::Miss,
        CacheStatus::Bypass,
        CacheStatus::Expired,
        CacheStatus::Stale,
        CacheStatus::Updating,
        CacheStatus::Revalidated,
        CacheStatus::Hit,
    ];

    /// The answer was stored before the request came, or came for another request.
    pub fn is_from_cache(self) -> bool {
        !matches!(self, CacheStatus::Miss | CacheStatus::Bypass | CacheStatus::Expired)
    }

    /// As `$upstream_cache_status` has it.
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

/// What a request that is passed on brings for the cache.
pub struct Caching {
    zone: Arc<CacheZone>,
    /// What the key's text comes to.
    primary: Id,
    key: Rc<[u8]>,
    /// The request's own key; `key` may be that of what stands for other queries, too.
    own: Rc<[u8]>,
    /// The request's own key by its parts, if `No-Vary-Search` is followed.
    search: Option<Rc<SearchKey>>,
    /// What it is looked for by: the key, or a variant of it.
    id: Id,
    /// The right to store what comes, where nobody else has it.
    lead: Option<Lead>,
    /// It may be stored although there is no lead yet.
    may_store: bool,
    /// Something too old.
    stale: Option<Rc<Hot>>,
    /// The request does not want what is fresh.
    is_by_request: bool,
    /// It is stored and fresh, and its disk takes too long: others read what comes, and it is not stored once more.
    is_stored: bool,
    /// `cache_normalize_language`
    normalizes_language: bool,
}

impl Caching {
    /// Takes the right to store what comes, beside other requests that may fetch the same.
    fn take_lead_beside(&mut self) {
        self.lead = Some(self.zone.begin_beside(&self.primary, self.id, gale_runtime::now()));
    }

    /// What an error is noted for: this request's key alone, since no response says that it stands for others.
    fn id_of_errors(&self) -> Id {
        if *self.key == *self.own { self.id } else { id_of(&self.own) }
    }

    /// Notes why the response will not be stored, for `Cache-Status` and the log.
    fn note_not_stored(request: &mut Request, why: NotStored) {
        if let Some(note) = request.notes.get_mut::<CacheNote>() {
            note.not_stored = Some(why);
        }
        request.log(Level::Info, format_args!("the response is not stored: {}", why.word()));
    }

    /// Notes how the cache was used.
    fn note(request: &mut Request, status: CacheStatus) {
        match request.notes.get_mut::<CacheNote>() {
            Some(note) => note.status = Some(status),
            None => request.notes.put(CacheNote { status: Some(status), ..CacheNote::default() }),
        }
    }
}

/// Adds `Cache-Status`, if the location has a name for its cache: how it was used, and why something was not stored.
/// (RFC 9211)
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

/// What a copy of a request in the background finds: it is to fetch this anew.
pub(super) struct Update(Box<Caching>);

/// Whether the server was asked for all of the response, whatever the client asks for.
pub(super) fn asks_for_whole(request: &Request) -> bool {
    request.notes.get::<CacheNote>().is_some_and(|note| note.asks_for_whole)
}

/// Whether a field of the client is not for the server, because the cache wants all of the response, and asks with
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
