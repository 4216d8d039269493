//! What a server's response means for the cache.

use std::rc::Rc;
use std::sync::Arc;

use gale_protocol::http1::lists_token;
use gale_protocol::request::{KnownHeader, Method};
use gale_protocol::response::ResponseField;
use gale_runtime::Bytes;
use gale_runtime::files::likely_device;

use super::consult::{forbids_storing, settings_use, variant_of};
use super::invalidate::{invalidate, stands_for_get};
use super::resume::{is_part, strong_tag};
use super::serve::{Serving, body_of_fill, finish_head, received_body, serve_hot, told_length};
use super::{AskedBecause, CacheNote, CacheStatus, Caching, note_entry};
use super::{feed, freshen, search};
use crate::cache::CacheZone;
use crate::cache::fill::{Fill, WINDOW_BYTES};
use crate::cache::format::{HEADER_MAX, Meta, file_length, header_length};
use crate::cache::key::{Id, KEY_BYTES_MAX, variant_id};
use crate::cache::memory::{self, Hot, HotBody};
use crate::cache::policy::freshness::{IgnoredFields, Judged, judge as judge_storing};
use crate::cache::policy::vary::Vary;
use crate::cache::policy::{NotStored, Storing};
use crate::cache::purges::tag_hash;
use crate::cache::search::SearchKey;
use crate::cache::settings::{CacheSettings, holds};
use crate::cache::store;
use crate::cache::zone::Lead;
use crate::request::Request;
use crate::request::body::Body;
use crate::request::files::pool_of;
use crate::request::phases::Flow;
use crate::request::response::{Field, FieldList};
use crate::upstream::answering::Answering;
use crate::upstream::attempt::Passing;
use crate::upstream::receiving::{BodyRead, UpstreamHead};
use crate::upstream::settings::{Ignored, RetryOn, UpstreamSettings};

/// Most tags that a response has.
const TAGS_MAX: usize = 256;

/// A response that is to be stored, before its body.
pub(in crate::upstream) struct Stored {
    lead: Lead,
    id: Id,
    meta: Arc<Meta>,
    /// It stands for other queries, too.
    search: Option<Rc<SearchKey>>,
}

/// Answers with something stale in place of a failure, if there is something and the location, or the response when it
/// came, allows that.
pub(in crate::upstream) fn serve_stale(
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

/// A server failed in the end: `cache_valid 502` keeps others from asking it.
pub(in crate::upstream) fn tell_error(passing: &mut Passing<'_>, status: u16) {
    let Some(caching) = passing.caching.take() else { return };
    if let Some(seconds) = passing.settings.cache.valid_for(status).filter(|_| caching.may_store)
        && matches!(status, 502 | 504)
    {
        caching.zone.note_error(&caching.id_of_errors(), status, seconds, gale_runtime::wall_seconds());
    }
}

/// A server's error has a page here: for as long as the response would be stored, others get that page, too.
pub(in crate::upstream) fn tell_intercepted(
    request: &Request,
    passing: &mut Passing<'_>,
    status: u16,
    fields: &FieldList,
) {
    let Some(caching) = passing.caching.take() else { return };
    let now = gale_runtime::wall_seconds();
    if let Storing::Store { lifetime, .. } = judge_fields(request, passing.settings, status, fields, now)
        && caching.may_store
    {
        let seconds = u32::try_from(lifetime.fresh_until.saturating_sub(now)).unwrap_or(u32::MAX);
        caching.zone.note_error(&caching.id_of_errors(), status, seconds, now);
    }
}

/// A 304 to a question of our own: what is stored holds on.
pub(in crate::upstream) fn revalidate(
    request: &mut Request,
    passing: &mut Passing<'_>,
    head: &UpstreamHead,
) -> Option<Flow> {
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
    if has_other_rules || is_about_another(&head.fields, &hot.meta.fields, settings.ignored.has(Ignored::VARY)) {
        // It answers this request, as the server says; the next one gets all of what is there now.
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

/// What is known of a stored response by what a server has said of it since; `None` if that may not be stored.
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
    // What it says of freshness counts first, then what was said before.
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

/// Puts a stored response with another head into its place, if there is the right to.
pub(super) fn put_renewed(
    request: &Request,
    zone: &Arc<CacheZone>,
    lead: Option<Lead>,
    hot: &Hot,
    mut meta: Meta,
) -> Rc<Hot> {
    if let Some(lead) = &lead {
        // It is as new as the question: what was purged softly before is so no more.
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
            // Others use the file as it is until it says the same; whoever waits for the lead finds it fresh.
            zone.renew(&id, hot.meta.number, &renewed.meta.lifetime);
            renew_file(request, zone, id, hot.meta.number, &renewed.meta);
            drop(lead);
        }
        // It was asked beside another request that fetches it.
        (None, _) => {}
    }
    renewed
}

/// Whether a 304 is about another response than the one that is stored: it says so by a strong entity tag, or depends
/// on other fields of the request. (RFC 9111 §4.3.4)
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

/// Stores a small entry once more, with what a 304 has said of it, as if all of it had come: the file of the one before
/// may not even be there yet.
fn store_anew(request: &Request, lead: Lead, id: Id, renewed: &Hot, body: Bytes) {
    if header_length(&renewed.meta) as usize > HEADER_MAX {
        return;
    }
    let zone = Arc::clone(lead.zone());
    let meta = Arc::new(renewed.meta.clone());
    let fill = lead.begin(id, Arc::clone(&meta), told_length(&meta, renewed.length));
    if !body.is_empty() {
        // What is small counts for this loop, if it must.
        let _ = feed::append(&fill, body);
    }
    fill.finish();
    feed::store_whole(pool_of(request), feed::Ending { zone, fill, id }, &meta);
}

/// Has the file's header written anew; if that fails, the next process asks the server once more.
pub(super) fn renew_file(request: &Request, zone: &Arc<CacheZone>, id: Id, number: u64, meta: &Meta) {
    let path = zone.path_of(&id);
    let (zone, meta) = (Arc::clone(zone), meta.clone());
    let _ = pool_of(request).detach(likely_device(&path).writes(), move || {
        if let Err(error) = zone.renew_file(&id, number, &meta) {
            zone.note_store_failure(&path, &error);
        }
    });
}

/// The fields of a 304 take the places of those that are stored. (RFC 9111 §3.2)
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
    // It was as old as that when it came; it is as old as the 304 says now.
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

/// The response is for the client's user alone, who has authenticated the connection to the server.
struct OfUser;

/// Notes that the response is for the client's user alone, although the request may not say so. (RFC 9111 §3.5)
pub(in crate::upstream) fn note_of_user(request: &mut Request) {
    request.notes.put(OfUser);
}

fn judge_fields(request: &Request, settings: &UpstreamSettings, status: u16, fields: &FieldList, now: u64) -> Storing {
    let ignored = settings.ignored;
    let cache = &settings.cache;
    // A response to POST needs a lifetime of its own to be stored. (RFC 9110 §9.3.3)
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

/// Whether a response is to be stored. If not, whoever waits for it asks for himself.
pub(in crate::upstream) fn judge(
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
        // Its number is later than the purge of a moment ago.
        caching.take_lead_beside();
        caching.may_store = true;
    }
    if !caching.may_store {
        // Those who pass the cache by say so themselves.
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
        // Also one that all may have: its connection goes on with its client, and not with a fill.
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
    // A later or slower client finds all of it in memory, or asks the server for the rest.
    let can_be_shared = head.length.is_some_and(|length| length <= WINDOW_BYTES) || strong_tag(&meta).is_some();
    let is_stored = caching.is_stored && id == caching.id && can_be_shared;
    if is_stored {
        // Others read along all the same.
        lead.fill().keep_in_memory();
    }
    if is_stored || !caching.zone.disk.is_well() || caching.zone.is_failing() {
        // It is tried all the same: others read along, and the disk may be well again.
        Caching::note_not_stored(request, NotStored::Disk);
    }
    let search = caching.search.take().filter(|_| caching.key != caching.own);
    Some(Stored { lead, id, meta: Arc::new(meta), search })
}

/// No filter is going to refuse the response.
fn is_accepted(request: &Request, status: u16, fields: &FieldList) -> bool {
    let configuration = Rc::clone(request.configuration());
    let scope = configuration.http().scope(request.scope);
    let mut filters = scope.filters.iter();
    filters.all(|bound| bound.filter.may_be_stored(request, scope.conf(bound.module), status, fields))
}

/// A response is not stored. Whoever waits for it should not wait for the next one, too.
fn refuse(request: &mut Request, caching: &Caching, why: Option<NotStored>, now: u64) -> Option<Stored> {
    caching.zone.note_uncacheable(&caching.id, now);
    if let Some(why) = why {
        Caching::note_not_stored(request, why);
    }
    None
}

/// Whether a part of a response is what the key is about, so that it answers nobody who wants something else: the key
/// has the range. (RFC 9111 §3.3) A key that other queries share has the range of slices alone.
fn stands_for_part(request: &Request, caching: &Caching, cache: &CacheSettings, is_shared: bool) -> bool {
    let has_own_range = || {
        let range = request.header(KnownHeader::Range).filter(|range| !range.is_empty());
        range.is_some_and(|range| memchr::memmem::find(&caching.own, range).is_some())
    };
    cache.key_tells_slices() || !is_shared && (!cache.conformance.get().rules().refuses_parts || has_own_range())
}

/// Notes what the response depends on, in the index and beside the entries: a mark that the next process finds.
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

/// What is stored of the fields: not those of the connection, nor those that must be left out.
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

/// Whether one of the fields of a response is for one connection, or one proxy, alone: it is not stored.
/// (RFC 9111 §3.1, RFC 9110 §7.6.1)
fn is_excepted(field: &Field, all: &FieldList) -> bool {
    let is_known = field.name.known().is_some_and(|known| {
        known.is_of_connection()
            || matches!(known, ResponseField::ProxyAuthenticate | ResponseField::ProxyAuthenticationInfo)
    });
    let connection = || all.iter().filter(|own| own.name.known() == Some(ResponseField::Connection));
    is_known || connection().any(|own| lists_token(&own.value, &field.name))
}

/// `cache_tag_header`: words by which the response may be purged.
fn tags(cache: &CacheSettings, fields: &FieldList) -> Box<[u64]> {
    let Some(name) = cache.tag_header.get_opt().filter(|name| !name.is_empty()) else { return Box::default() };
    let values = fields.iter().filter(|field| field.name.eq_ignore_ascii_case(name));
    let words = values.flat_map(|field| field.value.split(|byte| matches!(byte, b' ' | b',' | b'\t')));
    words.filter(|word| !word.is_empty()).take(TAGS_MAX).map(tag_hash).collect()
}

/// Begins to store a response, which the request reads as it comes.
pub(in crate::upstream) fn begin(
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
                // All of it came with the head.
                let trailers = answering.take_trailers();
                drop(trailers);
                let is_whole = answering.is_whole();
                answering.finish(request);
                let length: u64 = pieces.iter().map(|piece| piece.len() as u64).sum();
                for piece in pieces {
                    // What comes with the head is small: it counts for this loop, if it must.
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

/// How long the body is of which only the head is stored.
pub(super) fn announced_length(meta: &Meta) -> Option<u64> {
    let field = meta.fields.iter().find(|field| field.name.known() == Some(ResponseField::ContentLength));
    field.filter(|_| meta.is_head_only).and_then(|field| gale_base::units::parse_number(&field.value))
}

/// Keeps what is small and came just now where this worker finds it.
fn keep_hot(zone: &Arc<CacheZone>, id: Id, fill: &Fill, meta: &Arc<Meta>) {
    if let Some(hot) = hot_of(id, fill, meta).filter(|_| fill.received() <= store::SMALL_BODY) {
        memory::keep(zone.identity(), id, Rc::new(hot));
    }
}

/// An entry of what has come, if all of it is in memory.
pub(super) fn hot_of(id: Id, fill: &Fill, meta: &Meta) -> Option<Hot> {
    let bytes = received_body(fill)?;
    let fields = Rc::new(meta.fields.clone());
    let size = file_length(meta, bytes.len() as u64);
    let length = announced_length(meta).unwrap_or(bytes.len() as u64);
    let seen = std::cell::Cell::new(gale_runtime::now());
    let body = HotBody::Memory(bytes);
    Some(Hot { id, meta: meta.clone(), fields, body, blocks: None, length, size, seen })
}
