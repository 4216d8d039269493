//! Handles a server's response for the cache.

use std::rc::Rc;
use std::sync::Arc;

use gale_files::likely_device;
use gale_http::request::Request;
use gale_http::request::body::Body;
use gale_http::request::files::pool_of;
use gale_http::request::phases::Flow;
use gale_http::request::response::{Field, FieldList};
use gale_http_cache::CacheZone;
use gale_http_cache::fill::{Fill, WINDOW_BYTES};
use gale_http_cache::format::{HEADER_MAX, Meta, file_length, header_length};
use gale_http_cache::key::{Id, KEY_BYTES_MAX, variant_id};
use gale_http_cache::memory::{self, Hot, HotBody};
use gale_http_cache::policy::freshness::{IgnoredFields, Judged, judge as judge_storing};
use gale_http_cache::policy::vary::Vary;
use gale_http_cache::policy::{NotStored, Storing};
use gale_http_cache::purges::tag_hash;
use gale_http_cache::search::SearchKey;
use gale_http_cache::settings::{CacheSettings, holds};
use gale_http_cache::store;
use gale_http_cache::zone::Lead;
use gale_protocol::http1::lists_token;
use gale_protocol::request::{KnownHeader, Method};
use gale_protocol::response::ResponseField;
use gale_runtime::Bytes;

use super::consult::{forbids_storing, settings_use, variant_of};
use super::invalidate::{invalidate, stands_for_get};
use super::resume::{is_part, strong_tag};
use super::serve::{Serving, body_of_fill, finish_head, received_body, serve_hot, told_length};
use super::{AskedBecause, CacheNote, CacheStatus, note_entry};
use super::{feed, freshen, search};
use crate::answering::Answering;
use crate::caching_state::Caching;
use crate::passing::Passing;
use crate::receiving::{BodyRead, UpstreamHead};
use crate::settings::{Ignored, RetryOn, UpstreamSettings};

/// Maximum number of tags of a response.
const TAGS_MAX: usize = 256;

/// A response that is to be stored, before its body.
pub(crate) struct Stored {
    lead: Lead,
    id: Id,
    meta: Arc<Meta>,
    /// The parts of its key if it stands for other queries too.
    search: Option<Rc<SearchKey>>,
}

/// Answers with a stale response in place of a failure, if there is one and the location or the response itself allows
/// it.
pub(crate) fn serve_stale(
    request: &mut Request,
    passing: &mut Passing<'_>,
    on: RetryOn,
    of_status: Option<u16>,
) -> Option<Flow> {
    let caching = passing.caching.as_mut()?;
    let serving = Serving { settings: passing.settings, rewriter: passing.rewriter, converts_head: false };
    let hot = Rc::clone(caching.stale.as_ref()?);
    let now = gale_runtime::wall_seconds();
    let lifetime = &hot.meta.lifetime;
    let is_server_failure = match of_status {
        None => true,
        Some(status) => status >= 500 && passing.settings.cache.conformance.get().rules().stale_if_error_status,
    };
    let may_if_error = lifetime.stale_if_error > 0 && lifetime.may_be_stale_if_error(now) && is_server_failure;
    let may = !lifetime.must_revalidate && settings_use(serving, on) || may_if_error;
    if !may {
        return None;
    }
    let zone = Arc::clone(&caching.zone);
    passing.caching = None;
    if let Some(note) = request.notes.get_mut::<CacheNote>() {
        note.asked_because = Some(AskedBecause::Failed(of_status));
    }
    Some(serve_hot(request, serving, &zone, &hot, CacheStatus::Stale))
}

/// Records the failure of all servers: with `cache_valid 502`, later requests do not ask them.
pub(crate) fn tell_error(passing: &mut Passing<'_>, status: u16) {
    let Some(caching) = passing.caching.take() else { return };
    if let Some(seconds) = passing.settings.cache.valid_for(status).filter(|_| caching.may_store)
        && matches!(status, 502 | 504)
    {
        caching.zone.note_error(&caching.id_of_errors(), status, seconds, gale_runtime::wall_seconds());
    }
}

/// Records an error of a server that has an error page here: other requests get that page for as long as the response
/// would be stored.
pub(crate) fn tell_intercepted(request: &Request, passing: &mut Passing<'_>, status: u16, fields: &FieldList) {
    let Some(caching) = passing.caching.take() else { return };
    let now = gale_runtime::wall_seconds();
    if let Storing::Store { lifetime, .. } = judge_fields(request, passing.settings, status, fields, now)
        && caching.may_store
    {
        let seconds = u32::try_from(lifetime.fresh_until.saturating_sub(now)).unwrap_or(u32::MAX);
        caching.zone.note_error(&caching.id_of_errors(), status, seconds, now);
    }
}

/// Handles a 304 to a revalidation: the stored response is still valid.
pub(crate) fn revalidate(request: &mut Request, passing: &mut Passing<'_>, head: &UpstreamHead) -> Option<Flow> {
    let note = request.notes.get::<CacheNote>()?;
    let asked = note.etag.is_some() || note.last_modified.is_some();
    if head.status != 304 || !asked || note.status != Some(CacheStatus::Expired) {
        return None;
    }
    let mut caching = passing.caching.take()?;
    let hot = Rc::clone(caching.stale.as_ref()?);
    let settings = passing.settings;
    let serving = Serving { settings, rewriter: passing.rewriter, converts_head: false };
    let has_other_rules = caching.search.is_some()
        && head.fields.iter().any(|field| field.name.eq_ignore_ascii_case(b"No-Vary-Search"))
        && search::rules_of(&head.fields) != search::rules_of(&hot.meta.fields);
    if has_other_rules || is_about_another(&head.fields, &hot.meta.fields, settings.head.ignored.has(Ignored::VARY)) {
        // It answers this request, as the server says; the next request fetches the whole response.
        let zone = Arc::clone(&caching.zone);
        zone.discard(&caching.id, hot.meta.number);
        memory::forget(zone.identity(), &caching.id);
        drop(caching);
        return Some(serve_hot(request, serving, &zone, &hot, CacheStatus::Revalidated));
    }
    let zone = Arc::clone(&caching.zone);
    let renewed = renewed_meta(request, settings, &hot.meta, &head.fields)
        .map_or_else(|| Rc::clone(&hot), |meta| put_renewed(request, &zone, caching.lead.take(), &hot, meta));
    drop(caching);
    Some(serve_hot(request, serving, &zone, &renewed, CacheStatus::Revalidated))
}

/// The head of a stored response after a server's update; `None` if it may not be stored any more.
pub(super) fn renewed_meta(
    request: &Request,
    settings: &UpstreamSettings,
    stored: &Meta,
    fresh: &FieldList,
) -> Option<Meta> {
    let mut meta = stored.clone();
    let rules = settings.cache.conformance.get().rules();
    if rules.updates_fields {
        update_fields(&mut meta.fields, fresh, rules.stores_cookies);
    }
    let now = gale_runtime::wall_seconds();
    // The lifetime of the update is used, or else that of the stored fields.
    let storing = match judge_fields(request, settings, meta.status, fresh, now) {
        Storing::Not(NotStored::NoLifetime) => judge_fields(request, settings, meta.status, &meta.fields, now),
        own => own,
    };
    let Storing::Store { lifetime, left_out, .. } = storing else { return None };
    meta.lifetime = lifetime;
    if !left_out.is_empty() {
        meta.fields = stored_fields(&meta.fields, &left_out, true);
    }
    meta.tags = tags(&settings.cache, &meta.fields);
    Some(meta)
}

/// Replaces the head of a stored response, if the request holds the lead.
pub(super) fn put_renewed(
    request: &Request,
    zone: &Arc<CacheZone>,
    lead: Option<Lead>,
    hot: &Hot,
    mut meta: Meta,
) -> Rc<Hot> {
    if let Some(lead) = &lead {
        // It is as new as the request, so it is no longer covered by an earlier soft purge.
        meta.number = lead.fill().number;
    }
    let body = match &hot.body {
        HotBody::Memory(bytes) => HotBody::Memory(bytes.clone()),
        HotBody::File(file, offset) => HotBody::File(file.clone(), *offset),
    };
    let fields = Rc::new(meta.fields.clone());
    let seen = std::cell::Cell::new(hot.seen.get());
    let (id, blocks) = (hot.id, hot.blocks.clone());
    let renewed = Rc::new(Hot { id, meta, fields, body, blocks, length: hot.length, size: hot.size, seen });
    memory::forget(zone.identity(), &id);
    match (lead, &renewed.body) {
        (Some(lead), HotBody::Memory(bytes)) => {
            store_anew(request, lead, id, &renewed, bytes.clone());
            memory::keep(zone.identity(), id, Rc::clone(&renewed));
        }
        (Some(lead), HotBody::File(..)) => {
            // Other requests use the file as it is until its header is renewed; requests that wait for the lead find
            // the entry fresh.
            zone.renew(&id, hot.meta.number, &renewed.meta.lifetime);
            renew_file(request, zone, id, hot.meta.number, &renewed.meta);
            drop(lead);
        }
        // Without a lead, another request is fetching the response.
        (None, _) => {}
    }
    renewed
}

/// True if a 304 is about another response than the stored one: it has another strong entity tag, or another `Vary`.
/// (RFC 9111 §4.3.4)
pub(super) fn is_about_another(fresh: &FieldList, stored: &FieldList, ignores_vary: bool) -> bool {
    let tag = |fields: &FieldList| {
        fields.iter().find(|field| field.name.known() == Some(ResponseField::ETag)).map(|field| field.value.to_vec())
    };
    let is_other = tag(fresh).filter(|told| told.starts_with(b"\"")).is_some_and(|told| {
        let opaque = |tag: Vec<u8>| tag.strip_prefix(b"W/").map(<[u8]>::to_vec).unwrap_or(tag);
        tag(stored).is_some_and(|stored| opaque(stored) != told)
    });
    let vary = |fields: &FieldList| {
        let values = fields.iter().filter(|field| field.name.known() == Some(ResponseField::Vary));
        Vary::parse(values.map(|field| &*field.value))
    };
    is_other || !ignores_vary && fresh.has(ResponseField::Vary) && vary(fresh) != vary(stored)
}

/// Stores a small entry again with its updated head, as if all of it had arrived: the old file may not exist yet.
fn store_anew(request: &Request, lead: Lead, id: Id, renewed: &Hot, body: Bytes) {
    if header_length(&renewed.meta) as usize > HEADER_MAX {
        return;
    }
    let zone = Arc::clone(lead.zone());
    let meta = Arc::new(renewed.meta.clone());
    let fill = lead.begin(id, Arc::clone(&meta), told_length(&meta, renewed.length));
    if !body.is_empty() {
        // A small piece may count for this loop.
        let _ = feed::append(&fill, body);
    }
    fill.finish();
    feed::store_whole(pool_of(request), feed::Ending { zone, fill, id }, &meta);
}

/// Rewrites the header of the file. If that fails, the next process revalidates once more.
pub(super) fn renew_file(request: &Request, zone: &Arc<CacheZone>, id: Id, number: u64, meta: &Meta) {
    let path = zone.path_of(&id);
    let (zone, meta) = (Arc::clone(zone), meta.clone());
    let _ = pool_of(request).detach(likely_device(&path).writes(), move || {
        if let Err(error) = zone.renew_file(&id, number, &meta) {
            zone.note_store_failure(&path, &error);
        }
    });
}

/// Replaces stored fields by those of a 304. (RFC 9111 §3.2)
fn update_fields(stored: &mut FieldList, fresh: &FieldList, stores_cookies: bool) {
    let is_kept = |field: &Field| {
        let describes_body = matches!(
            field.name.known(),
            Some(
                ResponseField::ContentLength
                    | ResponseField::ContentEncoding
                    | ResponseField::ContentType
                    | ResponseField::ContentRange
            )
        );
        let is_cookie = field.name.known() == Some(ResponseField::SetCookie);
        !describes_body && !is_excepted(field, fresh) && (!is_cookie || stores_cookies)
    };
    // `Age` is that of the 304, not the stored one.
    let is_left = |field: &&Field| field.name.known() != Some(ResponseField::Age);
    let mut fields = FieldList::default();
    for field in stored
        .iter()
        .filter(is_left)
        .filter(|field| !fresh.iter().any(|new| is_kept(new) && new.name.is_same(&field.name)))
    {
        fields.push(field.clone());
    }
    for field in fresh.iter().filter(|field| is_kept(field)) {
        fields.push(field.clone());
    }
    *stored = fields;
}

/// Note: the response is for the client's user alone, because the connection to the server is authenticated.
struct OfUser;

/// Notes that the response is for the client's user alone, even if the request has no credentials. (RFC 9111 §3.5)
pub(crate) fn note_of_user(request: &mut Request) {
    request.notes.put(OfUser);
}

fn judge_fields(request: &Request, settings: &UpstreamSettings, status: u16, fields: &FieldList, now: u64) -> Storing {
    let ignored = settings.head.ignored;
    let cache = &settings.cache;
    // A response to POST needs an explicit lifetime to be stored. (RFC 9110 §9.3.3)
    let may_guess = cache.takes(request.method());
    judge_storing(&Judged {
        status,
        fields,
        now,
        has_authorization: request.notes.has::<OfUser>()
            || request.header(KnownHeader::Authorization).is_some() && !cache.key_tells_users(),
        ignored: IgnoredFields {
            x_accel_expires: ignored.has(Ignored::X_ACCEL_EXPIRES),
            expires: ignored.has(Ignored::EXPIRES),
            cache_control: ignored.has(Ignored::CACHE_CONTROL),
            set_cookie: ignored.has(Ignored::SET_COOKIE),
            vary: ignored.has(Ignored::VARY),
        },
        valid: cache.valid_for(status).filter(|_| may_guess),
        heuristic: cache.heuristic.get_opt().copied().flatten().filter(|_| may_guess),
        rules: cache.conformance.get().rules(),
    })
}

/// Decides whether a response is stored. If not, waiting requests ask the server themselves.
pub(crate) fn judge(
    request: &mut Request,
    passing: &mut Passing<'_>,
    head: &UpstreamHead,
    fields: &FieldList,
    is_buffered: bool,
) -> Option<Stored> {
    let mut caching = passing.caching.take()?;
    let settings = passing.settings;
    let now = gale_runtime::wall_seconds();
    if !settings.cache.takes(request.method()) {
        if (200..400).contains(&head.status) {
            invalidate(request, passing, &caching, fields);
        }
        let rules = settings.cache.conformance.get().rules();
        let is_for_get = request.method() == Method::Post
            && head.status == 200
            && rules.stores_posts
            && caching.key.len() <= KEY_BYTES_MAX
            && !forbids_storing(request, rules)
            && stands_for_get(request, passing, &caching, fields)
            && matches!(judge_fields(request, settings, head.status, fields, now), Storing::Store { .. });
        if !is_for_get {
            return None;
        }
        // Its number is later than that of the purge just before.
        caching.take_lead_beside();
        caching.may_store = true;
    }
    if !caching.may_store {
        // A bypass is noted elsewhere.
        if request.notes.get::<CacheNote>().is_some_and(|note| note.status != Some(CacheStatus::Bypass)) {
            Caching::note_not_stored(request, NotStored::LockTimeout);
        }
        return None;
    }
    let is_head_only = request.is_head() && !converts_head(request);
    let is_kept_out = holds(&settings.cache.no_cache, request);
    let may_freshen = is_head_only && head.status == 200 && !is_kept_out;
    if may_freshen && freshen::by_head(request, &mut caching, settings, fields) || caching.lead.is_none() {
        return None;
    }
    let is_too_large = head.length.is_some_and(|length| length > caching.zone.options().max_size);
    let refused = if is_kept_out {
        Some(NotStored::Excluded)
    } else if request.notes.has::<OfUser>() {
        // Even a public one: the connection belongs to its client, and cannot continue with a fill.
        Some(NotStored::Authorization)
    } else if !is_buffered {
        Some(NotStored::Unbuffered)
    } else if is_too_large {
        Some(NotStored::TooLarge)
    } else {
        None
    };
    if refused.is_some() || head.status < 200 || head.status == 304 {
        return refuse(request, &caching, refused, now);
    }
    let (lifetime, vary, left_out) = match judge_fields(request, settings, head.status, fields, now) {
        Storing::Store { lifetime, vary, left_out } => (lifetime, vary, left_out),
        Storing::Not(why) => return refuse(request, &caching, Some(why), now),
    };
    let rules = search::rules_for(&caching, fields);
    let is_part = || {
        let may_be_none = !settings.cache.conformance.get().rules().refuses_parts;
        stands_for_part(request, &caching, &settings.cache, rules.is_some())
            && (may_be_none || request.is_head() || is_part(fields, head.length))
    };
    if head.status == 206 && !is_part() {
        return refuse(request, &caching, Some(NotStored::Part), now);
    }
    if !is_accepted(request, head.status, fields) {
        return refuse(request, &caching, Some(NotStored::Refused), now);
    }
    let lead = caching.lead.take()?;
    let number = lead.fill().number;
    match search::name(request, &mut caching, rules, number, now) {
        Ok(()) => {}
        Err(NotStored::TooManyRules) => return refuse(request, &caching, Some(NotStored::TooManyRules), now),
        Err(why) => {
            Caching::note_not_stored(request, why);
            return None;
        }
    }
    if let Some(status) = request.notes.get::<CacheNote>().and_then(|note| note.status) {
        lead.fill().set_way(status as usize);
    }
    let mut meta = Meta {
        key: (*caching.key).into(),
        status: head.status,
        reason: head.reason.clone(),
        fields: stored_fields(fields, &left_out, is_head_only),
        is_head_only,
        lifetime,
        number,
        tags: tags(&settings.cache, fields),
        ..Meta::default()
    };
    let mut id = caching.primary;
    if let Vary::Fields(names) = vary {
        meta.variant = variant_of(request, &names, caching.normalizes_language).into();
        meta.variant_number = match note_vary(request, &caching, &names, number, now) {
            Ok(noted) => noted,
            Err(why) => return refuse(request, &caching, Some(why), now),
        };
        id = variant_id(&caching.primary, meta.variant_number, &meta.variant);
    }
    if header_length(&meta) as usize > HEADER_MAX {
        return refuse(request, &caching, Some(NotStored::LongHead), now);
    }
    // A later or slower client must find the whole response in memory, or be able to ask the server for the rest.
    let can_be_shared = head.length.is_some_and(|length| length <= WINDOW_BYTES) || strong_tag(&meta).is_some();
    let is_stored = caching.is_stored && id == caching.id && can_be_shared;
    if is_stored {
        // Other requests read it nevertheless.
        lead.fill().keep_in_memory();
    }
    if is_stored || !caching.zone.disk.is_well() || caching.zone.is_failing() {
        // Storing is tried nevertheless: other requests read the response, and the disk may have recovered.
        Caching::note_not_stored(request, NotStored::Disk);
    }
    let search = caching.search.take().filter(|_| caching.key != caching.own);
    Some(Stored { lead, id, meta: Arc::new(meta), search })
}

/// True if no filter will refuse the response.
fn is_accepted(request: &Request, status: u16, fields: &FieldList) -> bool {
    let configuration = Rc::clone(request.configuration());
    let scope = configuration.http().scope(request.scope);
    let mut filters = scope.filters.iter();
    filters.all(|bound| bound.filter.may_be_stored(request, scope.conf(bound.module), status, fields))
}

/// Refuses to store a response. Requests that wait for it must not wait for the next one too.
fn refuse(request: &mut Request, caching: &Caching, why: Option<NotStored>, now: u64) -> Option<Stored> {
    caching.zone.note_uncacheable(&caching.id, now);
    if let Some(why) = why {
        Caching::note_not_stored(request, why);
    }
    None
}

/// True if the key identifies a part of the response, so that the part answers no other request: the key contains the
/// range. (RFC 9111 §3.3) A key that other queries share contains only the range of slices.
fn stands_for_part(request: &Request, caching: &Caching, cache: &CacheSettings, is_shared: bool) -> bool {
    let has_own_range = || {
        let range = request.header(KnownHeader::Range).filter(|range| !range.is_empty());
        range.is_some_and(|range| memchr::memmem::find(&caching.own, range).is_some())
    };
    cache.key_tells_slices() || !is_shared && (!cache.conformance.get().rules().refuses_parts || has_own_range())
}

/// Records the fields that the response depends on, in the index and in a mark on disk for the next process.
fn note_vary(request: &Request, caching: &Caching, names: &[u8], number: u64, now: u64) -> Result<u64, NotStored> {
    let zone = &caching.zone;
    let mark =
        Meta { key: (*caching.key).into(), variant: names.into(), variant_number: number, number, ..Meta::default() };
    let noted = zone.note_vary(&caching.primary, names, number, Some(file_length(&mark, 0)), now)?;
    if noted == number {
        let primary = caching.primary;
        let path = zone.path_of(&primary);
        let number = store::new_number();
        let zone = Arc::clone(zone);
        let _ = pool_of(request).detach(likely_device(&path).writes(), move || {
            let written =
                store::write(&path, &mark, &[], number).and_then(|file| zone.commit_mark(&primary, &mark, file));
            if let Err(error) = written {
                zone.note_store_failure(&path, &error);
            }
        });
    }
    Ok(noted)
}

pub(super) fn converts_head(request: &Request) -> bool {
    request.notes.get::<CacheNote>().is_some_and(|note| note.converts_head)
}

/// The fields to store: without those of the connection and those to leave out.
fn stored_fields(fields: &FieldList, left_out: &[Box<[u8]>], keeps_length: bool) -> FieldList {
    let mut stored = FieldList::with_capacity(fields.len());
    for field in fields.iter() {
        let is_length = field.name.known() == Some(ResponseField::ContentLength);
        let is_left_out = left_out.iter().any(|name| name.eq_ignore_ascii_case(&field.name));
        if !(is_excepted(field, fields) || is_left_out || is_length && !keeps_length) {
            stored.push(field.clone());
        }
    }
    stored
}

/// True if a field is for one connection or one proxy alone, and is not stored. (RFC 9111 §3.1, RFC 9110 §7.6.1)
fn is_excepted(field: &Field, all: &FieldList) -> bool {
    let is_known = field.name.known().is_some_and(|known| {
        known.is_of_connection()
            || matches!(known, ResponseField::ProxyAuthenticate | ResponseField::ProxyAuthenticationInfo)
    });
    let connection = || all.iter().filter(|own| own.name.known() == Some(ResponseField::Connection));
    is_known || connection().any(|own| lists_token(&own.value, &field.name))
}

/// The tags by which the response may be purged: `cache_tag_header`.
fn tags(cache: &CacheSettings, fields: &FieldList) -> Box<[u64]> {
    let Some(name) = cache.tag_header.get_opt().filter(|name| !name.is_empty()) else { return Box::default() };
    let values = fields.iter().filter(|field| field.name.eq_ignore_ascii_case(name));
    let words = values.flat_map(|field| field.value.split(|byte| matches!(byte, b' ' | b',' | b'\t')));
    words.filter(|word| !word.is_empty()).take(TAGS_MAX).map(tag_hash).collect()
}

/// Begins to store a response, which the request reads while it arrives.
pub(crate) fn begin(
    request: &mut Request,
    passing: &Passing<'_>,
    mut answering: Box<Answering>,
    head: &UpstreamHead,
    stored: Stored,
) -> Flow {
    let Stored { lead, id, meta, search } = stored;
    let is_head_only = meta.is_head_only;
    finish_head(request, passing.settings);
    let zone = Arc::clone(lead.zone());
    let fill = lead.begin(id, Arc::clone(&meta), head.length);
    note_entry(request, &zone, id, fill.number);
    if search.is_some_and(|search| search::is_purged(&zone, &search, fill.number)) {
        fill.purge();
    }
    let mut pieces: Vec<Bytes> = Vec::new();
    loop {
        match answering.read_body() {
            Ok(BodyRead::Piece(piece)) => pieces.push(piece),
            Ok(BodyRead::End) => {
                // The whole body arrived with the head.
                let trailers = answering.take_trailers();
                drop(trailers);
                let is_whole = answering.is_whole();
                answering.finish(request);
                let length: u64 = pieces.iter().map(|piece| piece.len() as u64).sum();
                for piece in pieces {
                    // A small piece may count for this loop.
                    let _ = feed::append(&fill, piece);
                }
                fill.finish();
                if is_whole {
                    if !fill.stays_in_memory() {
                        keep_hot(&zone, id, &fill, &meta);
                    }
                    let ending = feed::Ending { zone: Arc::clone(&zone), fill: Arc::clone(&fill), id };
                    feed::store_whole(pool_of(request), ending, &meta);
                } else {
                    zone.end(&fill, &id);
                }
                let length = if is_head_only { head.length } else { Some(length) };
                if let Some(hot) = hot_of(id, &fill, &meta).filter(|_| !request.is_head())
                    && let HotBody::Memory(bytes) = hot.body
                {
                    return Flow::Answer(Body::Bytes(bytes));
                }
                return body_of_fill(request, passing.settings, (&zone, &fill), &meta, length);
            }
            other => {
                for piece in pieces {
                    let _ = feed::append(&fill, piece);
                }
                let length = head.length;
                let flow = body_of_fill(request, passing.settings, (&zone, &fill), &meta, length);
                feed::start(request, passing.settings, answering, zone, fill, id, meta, other);
                return flow;
            }
        }
    }
}

/// The announced length of the body, if only the head is stored.
pub(super) fn announced_length(meta: &Meta) -> Option<u64> {
    let field = meta.fields.iter().find(|field| field.name.known() == Some(ResponseField::ContentLength));
    field.filter(|_| meta.is_head_only).and_then(|field| gale_base::units::parse_number(&field.value))
}

/// Keeps a small new response in this worker's memory.
fn keep_hot(zone: &Arc<CacheZone>, id: Id, fill: &Fill, meta: &Arc<Meta>) {
    if let Some(hot) = hot_of(id, fill, meta).filter(|_| fill.received() <= store::SMALL_BODY) {
        memory::keep(zone.identity(), id, Rc::new(hot));
    }
}

/// An entry made of a fill, if all of it is in memory.
pub(super) fn hot_of(id: Id, fill: &Fill, meta: &Meta) -> Option<Hot> {
    let bytes = received_body(fill)?;
    let fields = Rc::new(meta.fields.clone());
    let size = file_length(meta, bytes.len() as u64);
    let length = announced_length(meta).unwrap_or(bytes.len() as u64);
    let seen = std::cell::Cell::new(gale_runtime::now());
    let body = HotBody::Memory(bytes);
    Some(Hot { id, meta: meta.clone(), fields, body, blocks: None, length, size, seen })
}
