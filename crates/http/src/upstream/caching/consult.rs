//! Asks the cache before a server is asked.

use std::future::poll_fn;
use std::rc::Rc;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use gale_base::http_date;
use gale_base::log_level::Level;
use gale_engine::configuration::ZoneRef;
use gale_protocol::request::{KnownHeader, Method};
use gale_protocol::response::ResponseField;
use gale_runtime::files::likely_device;
use gale_runtime::{Moment, Timer, files, timeout};

use super::batches::detach_with_others;
use super::receive::{announced_length, hot_of};
use super::serve::{Serving, serve_fill, serve_hot, told_length};
use super::{AskedBecause, CacheNote, CacheStatus, Caching, Part, Update, count_use, purge, stored};
use crate::cache::CacheZone;
use crate::cache::fill::{Fill, Stage};
use crate::cache::format::{Meta, VARIES};
use crate::cache::index::{Entry, Kind};
use crate::cache::key::{Id, KEY_BYTES_MAX, id_of, variant_id};
use crate::cache::memory::{self, Hot, HotBody, LOOK_AGAIN};
use crate::cache::policy::vary::append_variant;
use crate::cache::policy::{NotStored, RequestDirectives, Rules, current_age, is_of_later};
use crate::cache::purges::Verdict;
use crate::cache::search::SearchKey;
use crate::cache::settings::{CacheChoice, CachePath, CacheSettings, holds};
use crate::cache::store::{self, OpenError};
use crate::cache::zone::Lookup;
use crate::request::Request;
use crate::request::files::pool_of;
use crate::request::phases::Flow;
use crate::request::subrequest;
use crate::upstream::settings::RetryOn;

/// What came of asking.
pub enum Consulted {
    /// The request has its answer.
    Answer(Flow),
    /// A server is asked; what comes is for the cache, if it is there.
    Ask(Option<Box<Caching>>),
}

/// How many times a request looks again because what it waited for came to nothing.
const LOOKS_MAX: u32 = 8;

/// Answers out of what this worker has in memory, without waiting; `None`: not so.
pub fn try_hit(request: &mut Request, serving: Serving<'_>) -> Option<Flow> {
    let settings = &serving.settings.cache;
    let CacheChoice::Zone(zone) = settings.choice.get_opt()? else { return None };
    let is_plain = matches!(request.method(), Method::Get | Method::Head)
        && settings.bypass.get().is_empty()
        && settings.purge.get().is_empty()
        && !settings.conformance.get().rules().obeys_requests
        && !request.notes.has::<Update>()
        && !request.notes.has::<Part>();
    if !is_plain {
        return None;
    }
    let zone = &zone.cache;
    let own: Rc<[u8]> = settings.key.get_opt()?.template.text(request).into_owned().into();
    let now = gale_runtime::wall_seconds();
    let search = if zone.has_searches() { settings.search_key(request) } else { None };
    let (key, primary) = name_of(zone, &own, search.as_ref(), now);
    let mut id = primary;
    let varies = zone.index.with(&primary, |entry| match entry {
        Some(Entry { kind: Kind::Varies(list), number, .. }) => Some((*list, *number)),
        _ => None,
    });
    if varies.is_some() {
        let Lookup::Varies(names, number) = zone.look(&primary, now) else { return None };
        id = variant_id(&primary, number, &variant_of(request, &names, *settings.normalize_language.get()));
    }
    let hot = memory::find(zone.identity(), &id).filter(|hot| *hot.meta.key == *key)?;
    if hot.meta.is_head_only && !request.is_head() {
        return None;
    }
    let is_fresh = |entry: Option<&mut Entry>| {
        entry.is_some_and(|entry| entry.kind == Kind::Stored && entry.number == hot.meta.number && entry.is_fresh(now))
    };
    if !zone.index.with(&id, is_fresh)
        || judge_purges(zone, &primary, &hot.meta) != Verdict::Valid
        || !is_body_at_hand(request, zone, &hot)
    {
        return None;
    }
    look_whether_still_there(request, zone, &id, &hot);
    zone.index.touch(&id, now);
    let note = CacheNote { key: own, zone: Some(Arc::clone(zone)), ..CacheNote::default() };
    request.notes.put(note);
    request.at_end = Some(count_use);
    Some(serve_hot(request, serving, zone, &hot, CacheStatus::Hit))
}

/// Asks the cache that the location has.
pub async fn consult(request: &mut Request, serving: Serving<'_>) -> Consulted {
    if let Some(Update(caching)) = request.notes.take::<Update>() {
        prepare_to_ask(request, serving, &caching, CacheStatus::Expired);
        return Consulted::Ask(Some(caching));
    }
    if let Some(part) = request.notes.take::<Part>() {
        request.notes.put(CacheNote { asks_for_whole: true, part: Some(part), ..CacheNote::default() });
        return Consulted::Ask(None);
    }
    request.notes.take::<CacheNote>();
    let settings = &serving.settings.cache;
    let zone = match choose(request, settings) {
        Ok(Some(zone)) => zone,
        Ok(None) => return Consulted::Ask(None),
        Err(status) => return Consulted::Answer(Flow::Respond(status)),
    };
    let Some(key) = settings.key.get_opt() else { return Consulted::Ask(None) };
    let key: Rc<[u8]> = key.template.text(request).into_owned().into();
    if holds(&settings.purge, request) {
        return Consulted::Answer(purge::answer(request, serving, &zone, &key).await);
    }
    if !settings.takes(request.method()) {
        request.notes.put(CacheNote { key, ..CacheNote::default() });
        return Consulted::Ask(invalidator(request, settings, &zone));
    }
    if key.len() > KEY_BYTES_MAX {
        request.log(Level::Error, format_args!("the cache key is too long: {} bytes", key.len()));
        return Consulted::Ask(None);
    }
    let primary = id_of(&key);
    let note = CacheNote { key: Rc::clone(&key), zone: Some(Arc::clone(&zone)), ..CacheNote::default() };
    request.notes.put(note);
    request.at_end = Some(count_use);
    let search = settings.search_key(request).map(Rc::new);
    let own = Rc::clone(&key);
    let mut caching = Box::new(Caching {
        zone,
        primary,
        key,
        own,
        search,
        id: primary,
        lead: None,
        may_store: true,
        stale: None,
        is_by_request: false,
        is_stored: false,
        normalizes_language: *settings.normalize_language.get(),
    });
    let asked = Directives::of(request, settings.conformance.get().rules());
    if holds(&settings.bypass, request) || asked.directives.no_store {
        if asked.directives.only_if_cached {
            return Consulted::Answer(Flow::Respond(504));
        }
        caching.may_store = !asked.directives.no_store;
        caching.is_by_request = asked.directives.no_store;
        if caching.may_store {
            // From now on a purge wins over what comes.
            caching.lead = Some(caching.zone.begin_beside(&primary, primary, gale_runtime::now()));
        }
        prepare_to_ask(request, serving, &caching, CacheStatus::Bypass);
        return Consulted::Ask(Some(caching));
    }
    find(request, serving, caching, &asked).await
}

/// Whether the client forbids to store what answers its request. (RFC 9111 §5.2.1.5)
pub(super) fn forbids_storing(request: &Request, rules: Rules) -> bool {
    Directives::of(request, rules).directives.no_store
}

/// What the client has to say about what is stored.
struct Directives {
    directives: RequestDirectives,
}

impl Directives {
    fn of(request: &Request, rules: Rules) -> Directives {
        if !rules.obeys_requests {
            return Directives { directives: RequestDirectives::default() };
        }
        let values = request.fields().filter(|(field, _, _)| field.known == Some(KnownHeader::CacheControl));
        let pragma = request.header(KnownHeader::Pragma);
        Directives { directives: RequestDirectives::parse(values.map(|(_, _, value)| value), pragma) }
    }

    /// Whether an entry that is fresh is fresh enough. (RFC 9111 §5.2.1)
    fn accept_fresh(&self, meta: &Meta, now: u64) -> bool {
        let asked = &self.directives;
        !asked.no_cache
            && asked.max_age.is_none_or(|most| current_age(&meta.lifetime, now) <= most.into())
            && asked.min_fresh.is_none_or(|least| meta.lifetime.is_fresh(now.saturating_add(least.into())))
    }

    /// Whether every entry that is fresh is fresh enough.
    fn accept_any_fresh(&self) -> bool {
        !self.directives.no_cache && self.directives.max_age.is_none() && self.directives.min_fresh.is_none()
    }

    /// Whether one that is stale is good enough.
    fn accept_stale(&self, meta: &Meta, now: u64) -> bool {
        let asked = &self.directives;
        let most = asked.max_stale.unwrap_or(0);
        !asked.no_cache
            && most > 0
            && !is_of_later(meta.lifetime.received, now)
            && !meta.lifetime.must_revalidate
            && asked.max_age.is_none_or(|most| current_age(&meta.lifetime, now) <= most.into())
            && now.saturating_sub(meta.lifetime.fresh_until) <= most.into()
    }
}

/// The cache of the location; none for `off`.
fn choose(request: &Request, settings: &CacheSettings) -> Result<Option<Arc<CacheZone>>, u16> {
    match settings.choice.get_opt() {
        None | Some(CacheChoice::Off) => Ok(None),
        Some(CacheChoice::Zone(zone)) => Ok(Some(Arc::clone(&zone.cache))),
        Some(CacheChoice::Named(template)) => {
            let name = template.text(request);
            if name.is_empty() || &*name == b"off" {
                return Ok(None);
            }
            let known = settings.paths.get_opt().map(Vec::as_slice).unwrap_or_default();
            let named =
                known.iter().find(|path: &&ZoneRef<CachePath>| path.declared().is_some_and(|path| *path.name == *name));
            match named {
                Some(path) => Ok(Some(Arc::clone(&path.cache))),
                None => {
                    request.log(Level::Error, format_args!("cache \"{}\" not found", bstr::BStr::new(&name)));
                    Err(500)
                }
            }
        }
    }
}

/// For a request that changes something: what it changes is taken away when it succeeds. (RFC 9111 §4.4)
fn invalidator(request: &Request, settings: &CacheSettings, zone: &Arc<CacheZone>) -> Option<Box<Caching>> {
    let is_safe = matches!(request.method(), Method::Options | Method::Trace | Method::Propfind);
    if is_safe || !settings.conformance.get().rules().invalidates {
        return None;
    }
    let key = request.notes.get::<CacheNote>().map(|note| Rc::clone(&note.key))?;
    let primary = id_of(&key);
    Some(Box::new(Caching {
        zone: Arc::clone(zone),
        primary,
        own: Rc::clone(&key),
        search: settings.search_key(request).map(Rc::new),
        key,
        id: primary,
        lead: None,
        may_store: false,
        stale: None,
        is_by_request: false,
        is_stored: false,
        normalizes_language: *settings.normalize_language.get(),
    }))
}

/// Looks until there is something to serve, or a server is to be asked.
async fn find(request: &mut Request, serving: Serving<'_>, mut caching: Box<Caching>, asked: &Directives) -> Consulted {
    let settings = &serving.settings.cache;
    if caching.zone.is_ready_soon() {
        let zone = Arc::clone(&caching.zone);
        // If it takes longer, servers answer; nobody else waits for it.
        let is_late = timeout(*settings.disk_timeout.get(), poll_fn(|context| zone.poll_ready(context))).await.is_err();
        if is_late && zone.note_journal_late() {
            zone.disk.note_silent(likely_device(&zone.directory.path), gale_runtime::now());
            let message = format_args!("cache \"{}\" is not read yet, requests go to the upstream", zone.name);
            request.log(Level::Warn, message);
        }
    }
    let began = gale_runtime::now();
    let patience = *settings.lock_timeout.get();
    let mut has_waited = false;
    // The entry that was of no use.
    let mut seen = None;
    for _ in 0..LOOKS_MAX {
        let now = gale_runtime::wall_seconds();
        caching.is_stored = false;
        let (uses, is_uncacheable) = match look(request, &mut caching, now) {
            Lookup::Coming(fill) => {
                if let Some(flow) = serve_coming(request, serving, &caching, &fill, asked, has_waited) {
                    return Consulted::Answer(flow);
                }
                if is_spent(&caching, &fill, now) {
                    caching.zone.end(&fill, &caching.id);
                    continue;
                }
                if let Some(hot) = whole_of(request, &caching, &fill) {
                    let entry = entry_of(&caching, &hot, now);
                    match use_entry(request, serving, &mut caching, &entry, hot, asked, now).await {
                        Used::Answer(flow) => return Consulted::Answer(flow),
                        Used::Ask => {
                            prepare_to_ask(request, serving, &caching, CacheStatus::Expired);
                            return Consulted::Ask(Some(caching));
                        }
                        Used::Gone => continue,
                    }
                }
                (u64::MAX, !fill.is_kept())
            }
            Lookup::Error(status) => {
                Caching::note(request, CacheStatus::Hit);
                return Consulted::Answer(Flow::Respond(status));
            }
            Lookup::Entry(entry) => match open(request, serving, &caching, &entry).await {
                Ok(hot) if hot.meta.is_head_only && !request.is_head() => {
                    seen = Some(entry.number);
                    (u64::MAX, false)
                }
                Ok(hot) => match use_entry(request, serving, &mut caching, &entry, hot, asked, now).await {
                    Used::Answer(flow) => return Consulted::Answer(flow),
                    Used::Ask => {
                        prepare_to_ask(request, serving, &caching, CacheStatus::Expired);
                        return Consulted::Ask(Some(caching));
                    }
                    Used::Gone => continue,
                },
                Err(unread) => {
                    // It cannot be read: another answer takes its place, unless it only takes too long.
                    seen = Some(entry.number);
                    let is_valid = entry.is_fresh(now) && caching.zone.purges.is_empty() && asked.accept_any_fresh();
                    caching.is_stored = unread == Unread::Late && is_valid;
                    (u64::MAX, false)
                }
            },
            Lookup::Nothing { uses, is_uncacheable } => {
                let cold = caching.zone.is_cold() && caching.zone.is_ready() && caching.zone.disk.is_well();
                if cold && let Some(hot) = open_cold(request, serving, &caching).await {
                    if hot.meta.status == VARIES {
                        // A mark: there are variants.
                        memory::forget(caching.zone.identity(), &caching.id);
                        let (names, number) = (hot.meta.variant.to_vec(), hot.meta.variant_number);
                        if caching.zone.note_vary(&caching.id, &names, number, Some(hot.size), now).is_ok() {
                            continue;
                        }
                        // It was purged.
                    } else if judge_purges(&caching.zone, &caching.primary, &hot.meta) != Verdict::Gone {
                        let entry = entry_of(&caching, &hot, now);
                        caching.zone.put(entry.clone());
                        match use_entry(request, serving, &mut caching, &entry, hot, asked, now).await {
                            Used::Answer(flow) => return Consulted::Answer(flow),
                            Used::Ask => {
                                prepare_to_ask(request, serving, &caching, CacheStatus::Expired);
                                return Consulted::Ask(Some(caching));
                            }
                            Used::Gone => continue,
                        }
                    }
                }
                (uses, is_uncacheable)
            }
            Lookup::Varies(..) => (u64::MAX, false),
        };
        if asked.directives.only_if_cached {
            return Consulted::Answer(Flow::Respond(504));
        }
        let is_too_seldom = uses < *settings.min_uses.get();
        if is_too_seldom || is_beyond_range(request, settings) {
            Caching::note(request, CacheStatus::Miss);
            let why = if is_too_seldom { NotStored::MinUses } else { NotStored::RangeOffset };
            Caching::note_not_stored(request, why);
            return Consulted::Ask(None);
        }
        let moment = gale_runtime::now();
        let locks = *settings.lock.get() && !is_uncacheable;
        if !locks {
            caching.lead = Some(caching.zone.begin_beside(&caching.primary, caching.id, moment));
            break;
        }
        match caching.zone.begin(&caching.primary, caching.id, moment, *settings.lock_age.get()) {
            // It has come between the look and now.
            Ok(lead) if caching.zone.has_fresh(&caching.id, seen, now) => drop(lead),
            Ok(lead) => {
                caching.lead = Some(lead);
                break;
            }
            Err(fill) => {
                has_waited = true;
                let left = patience.saturating_sub(moment.since(began));
                if wait_for_head(&fill, left, *settings.lock_age.get()).await {
                    // One that gets no file is not found any more when it has come.
                    if let Some(flow) = serve_coming(request, serving, &caching, &fill, asked, true) {
                        return Consulted::Answer(flow);
                    }
                } else if gale_runtime::now().since(began) >= patience {
                    // As nginx: it is passed on, and not stored.
                    caching.may_store = false;
                    break;
                }
            }
        }
    }
    if caching.lead.is_none() && asked.directives.only_if_cached {
        return Consulted::Answer(Flow::Respond(504));
    }
    if caching.may_store && caching.lead.is_none() {
        caching.lead = Some(caching.zone.begin_beside(&caching.primary, caching.id, gale_runtime::now()));
    }
    prepare_to_ask(request, serving, &caching, CacheStatus::Miss);
    Consulted::Ask(Some(caching))
}

fn count(counter: &std::sync::atomic::AtomicU64) {
    counter.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
}

/// Waits until the head of what another request fetches is known, or comes to nothing. False after this time, or when
/// the other has taken too long.
async fn wait_for_head(fill: &Arc<Fill>, patience: Duration, age_max: Duration) -> bool {
    let ticket = fill.ticket();
    let age_left = age_max.saturating_sub(gale_runtime::now().since(fill.began));
    let mut timer = Timer::after(patience.min(age_left));
    let came = poll_fn(|context| match fill.poll_head(ticket, context) {
        Poll::Ready(_) => Poll::Ready(true),
        Poll::Pending => timer.poll_expired(context).map(|()| false),
    })
    .await;
    fill.leave(ticket);
    came
}

/// What a request with this key of its own is looked for by: that, or the key of what stands for all queries that do
/// not matter, whichever has the later.
fn name_of(zone: &Arc<CacheZone>, own: &Rc<[u8]>, search: Option<&SearchKey>, now: u64) -> (Rc<[u8]>, Id) {
    let own_id = id_of(own);
    let common = search.filter(|_| zone.has_searches()).and_then(|search| {
        let (rules, number) = zone.search(&id_of(&search.mark()), now)?;
        search.entry(&rules, number)
    });
    match common.map(|key| (id_of(&key), key)) {
        Some((id, key)) if zone.newest(&own_id, now) <= zone.newest(&id, now) => (key.into(), id),
        _ => (Rc::clone(own), own_id),
    }
}

/// Looks for the request's variant.
pub(super) fn look(request: &Request, caching: &mut Caching, now: u64) -> Lookup {
    if caching.search.is_some() {
        // It may have come to be known since.
        (caching.key, caching.primary) = name_of(&caching.zone, &caching.own, caching.search.as_deref(), now);
    }
    caching.id = caching.primary;
    match caching.zone.look(&caching.primary, now) {
        Lookup::Varies(names, number) => {
            let variant = variant_of(request, &names, caching.normalizes_language);
            caching.id = variant_id(&caching.primary, number, &variant);
            match caching.zone.look(&caching.id, now) {
                // Variants do not vary; a sum that says so is an accident.
                Lookup::Varies(..) => Lookup::Nothing { uses: u64::MAX, is_uncacheable: true },
                found => found,
            }
        }
        found => found,
    }
}

/// What the request has in the fields that a response depends on, behind their names and a zero.
pub(super) fn variant_of(request: &Request, names: &[u8], normalizes_language: bool) -> Vec<u8> {
    let mut variant = names.to_vec();
    variant.push(0);
    let values = |name: &[u8]| {
        let name = name.to_vec();
        request.fields().filter(move |(_, own, _)| own.eq_ignore_ascii_case(&name)).map(|(_, _, value)| value)
    };
    append_variant(names, values, normalizes_language, &mut variant);
    variant
}

/// Whether what is coming is for this request, too: its fields may decide.
fn is_for(request: &Request, caching: &Caching, meta: &Meta) -> bool {
    let names = meta.variant.split(|&byte| byte == 0).next().unwrap_or_default();
    let variant = || variant_of(request, names, caching.normalizes_language);
    *meta.key == *caching.key && (meta.variant.is_empty() || *meta.variant == *variant())
}

fn serve_coming(
    request: &mut Request,
    serving: Serving<'_>,
    caching: &Caching,
    fill: &Arc<Fill>,
    asked: &Directives,
    has_waited: bool,
) -> Option<Flow> {
    let (meta, length, is_coming) = match fill.stage() {
        Stage::Coming(meta, length) => (meta, length, true),
        // It is only not in its file yet.
        Stage::Whole(meta) => {
            let length = told_length(&meta, fill.received());
            (meta, length, false)
        }
        _ => return None,
    };
    // Another one may be quicker.
    let is_stalled = fill.is_stalled(gale_runtime::now(), *serving.settings.cache.lock_age.get());
    let has_body = !meta.is_head_only || request.is_head();
    let now = gale_runtime::wall_seconds();
    let is_usable = has_body && meta.lifetime.is_fresh(now) && asked.accept_fresh(&meta, now);
    let fits = is_usable
        && !is_stalled
        && fill.can_be_read()
        && is_for(request, caching, &meta)
        && judge_purges(&caching.zone, &caching.primary, &meta) == Verdict::Valid;
    fits.then(|| {
        Caching::note(request, CacheStatus::Hit);
        if is_coming || has_waited {
            count(&caching.zone.counters.collapsed);
            if let Some(note) = request.notes.get_mut::<CacheNote>() {
                note.is_collapsed = true;
            }
        }
        serve_fill(request, serving, (&caching.zone, fill), &meta, length)
    })
}

/// Whether a response that is only kept for a while is of use for nobody any more, and in the way of what is stored.
fn is_spent(caching: &Caching, fill: &Fill, now: u64) -> bool {
    let Some(Stage::Whole(meta)) = fill.is_kept().then(|| fill.stage()) else { return false };
    !meta.lifetime.is_fresh(now) || judge_purges(&caching.zone, &caching.primary, &meta) != Verdict::Valid
}

/// What has come and is not in its file yet, as an entry; `None` if it is not all in memory, or is only kept.
fn whole_of(request: &Request, caching: &Caching, fill: &Arc<Fill>) -> Option<Rc<Hot>> {
    let Some(Stage::Whole(meta)) = (!fill.is_kept()).then(|| fill.stage()) else { return None };
    let is_usable = (!meta.is_head_only || request.is_head()) && is_for(request, caching, &meta);
    hot_of(caching.id, fill, &meta).filter(|_| is_usable).map(Rc::new)
}

enum Used {
    Answer(Flow),
    Ask,
    /// It was purged: there is nothing.
    Gone,
}

/// Uses an entry that was opened: as it is, or stale, or to ask whether it has changed.
async fn use_entry(
    request: &mut Request,
    serving: Serving<'_>,
    caching: &mut Box<Caching>,
    entry: &Entry,
    hot: Rc<Hot>,
    asked: &Directives,
    now: u64,
) -> Used {
    let settings = &serving.settings.cache;
    let zone = Arc::clone(&caching.zone);
    let verdict = judge_purges(&zone, &caching.primary, &hot.meta);
    if verdict == Verdict::Gone {
        if zone.index.remove(&caching.id, |known| known.number == entry.number).is_some() {
            let gone = crate::cache::index::Evicted { id: caching.id, size: entry.size, number: entry.number };
            zone.remove_files(vec![gone], None);
        }
        memory::forget(zone.identity(), &caching.id);
        return Used::Gone;
    }
    if entry.is_fresh(now) && verdict == Verdict::Valid && asked.accept_fresh(&hot.meta, now) {
        return Used::Answer(serve_hot(request, serving, &zone, &hot, CacheStatus::Hit));
    }
    if asked.accept_stale(&hot.meta, now) {
        return Used::Answer(serve_hot(request, serving, &zone, &hot, CacheStatus::Stale));
    }
    if asked.directives.only_if_cached {
        return Used::Answer(Flow::Respond(504));
    }
    let may_be_stale = !entry.must_revalidate && !asked.directives.no_cache;
    let until = u64::from(entry.fresh_until).saturating_add(entry.stale_while_revalidate.into());
    let serves_while_updating =
        may_be_stale && (settings_use(serving, RetryOn::UPDATING) || until >= now && entry.stale_while_revalidate > 0);
    let moment = gale_runtime::now();
    caching.is_by_request = entry.is_fresh(now) && verdict == Verdict::Valid;
    caching.stale = Some(Rc::clone(&hot));
    let age_max = if *settings.lock.get() || serves_while_updating { *settings.lock_age.get() } else { Duration::ZERO };
    match zone.begin(&caching.primary, caching.id, moment, if serves_while_updating { Duration::MAX } else { age_max })
    {
        Ok(lead) => {
            caching.lead = Some(lead);
            if serves_while_updating && *settings.background_update.get() {
                update_in_background(request, caching, &hot);
                return Used::Answer(serve_hot(request, serving, &zone, &hot, CacheStatus::Stale));
            }
            Used::Ask
        }
        Err(_) if serves_while_updating => {
            Used::Answer(serve_hot(request, serving, &zone, &hot, CacheStatus::Updating))
        }
        Err(fill) => {
            if !wait_for_head(&fill, *settings.lock_timeout.get(), *settings.lock_age.get()).await {
                caching.may_store = false;
                return Used::Ask;
            }
            match serve_coming(request, serving, caching, &fill, asked, true) {
                Some(flow) => Used::Answer(flow),
                // It is not to be stored: nobody waits once more.
                None if matches!(fill.stage(), Stage::Nothing) && !zone.has_fresh(&caching.id, None, now) => {
                    caching.lead = Some(zone.begin_beside(&caching.primary, caching.id, gale_runtime::now()));
                    Used::Ask
                }
                // What the index says may have changed since: a 304, for example.
                None => Used::Gone,
            }
        }
    }
}

/// `cache_use_stale`
pub(super) fn settings_use(serving: Serving<'_>, on: RetryOn) -> bool {
    serving.settings.cache_use_stale.get().has(on)
}

/// Has a copy of the request fetch what is stale.
fn update_in_background(request: &mut Request, caching: &mut Caching, hot: &Rc<Hot>) {
    let update = Update(Box::new(Caching {
        zone: Arc::clone(&caching.zone),
        primary: caching.primary,
        key: Rc::clone(&caching.key),
        own: Rc::clone(&caching.own),
        search: caching.search.clone(),
        id: caching.id,
        lead: caching.lead.take(),
        may_store: true,
        stale: Some(Rc::clone(hot)),
        is_by_request: false,
        is_stored: false,
        normalizes_language: caching.normalizes_language,
    }));
    // Too many is in the error log; the next request tries again.
    subrequest::repeat_in_background(request, update);
}

/// Whether it was purged.
pub(super) fn judge_purges(zone: &CacheZone, primary: &Id, meta: &Meta) -> Verdict {
    match zone.purges.is_empty() {
        true => Verdict::Valid,
        false => zone.purges.judge(primary, &meta.key, &meta.tags, meta.number),
    }
}

/// Whether a server is asked for the range that the client wants instead of all of it: `cache_max_range_offset`.
fn is_beyond_range(request: &Request, settings: &CacheSettings) -> bool {
    let Some(&most) = settings.max_range_offset.get_opt() else { return false };
    let Some(value) = request.header(KnownHeader::Range) else { return false };
    if most == u64::MAX {
        return false;
    }
    let is_bytes = value.len() >= 7 && value[..6].eq_ignore_ascii_case(b"bytes=");
    if most == 0 || !is_bytes {
        return most == 0;
    }
    let range = value[6..].trim_ascii_start();
    let digits = range.iter().take_while(|byte| byte.is_ascii_digit()).count();
    let offset = std::str::from_utf8(&range[..digits]).ok().and_then(|digits| digits.parse::<u64>().ok());
    // From the end it is anywhere.
    range.starts_with(b"-") || offset.unwrap_or(u64::MAX) >= most
}

/// Notes how the server is asked.
fn prepare_to_ask(request: &mut Request, serving: Serving<'_>, caching: &Caching, status: CacheStatus) {
    let settings = &serving.settings.cache;
    let key = Rc::clone(&caching.own);
    let zone = Some(Arc::clone(&caching.zone));
    let mut note = CacheNote { status: Some(status), key, zone, asks_for_whole: true, ..CacheNote::default() };
    note.asked_because = if caching.is_by_request {
        Some(AskedBecause::Request)
    } else {
        (caching.id != caching.primary).then_some(AskedBecause::VaryMiss)
    };
    note.converts_head = serving.converts_head && *settings.convert_head.get() && request.is_head();
    let validators = caching.stale.as_ref().filter(|_| status == CacheStatus::Expired && *settings.revalidate.get());
    // nginx: what was not a success has no validators.
    if let Some(hot) = validators.filter(|hot| matches!(hot.meta.status, 200 | 206)) {
        let value = |known| hot.meta.fields.iter().find(|field| field.name.known() == Some(known));
        note.etag = value(ResponseField::ETag).map(|field| (*field.value).into());
        // A server need not know what to make of a date that is none. (RFC 9110 §13.1.3)
        let date = value(ResponseField::LastModified).filter(|field| http_date::parse(&field.value).is_some());
        note.last_modified = date.map(|field| (*field.value).into());
    }
    request.notes.put(note);
}

/// Why an entry is not used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Unread {
    /// Its disk takes too long, or does not answer. It is there.
    Late,
    /// It has gone, is damaged or another one, or its disk fails.
    Unusable,
}

/// Opens an entry: what this worker has in memory, or its file, for which a request waits a bounded time. What is
/// returned can be read, as far as that is known: its head may leave.
async fn open(
    request: &mut Request,
    serving: Serving<'_>,
    caching: &Caching,
    entry: &Entry,
) -> Result<Rc<Hot>, Unread> {
    let began = gale_runtime::now();
    let hot = open_entry(request, serving, caching, entry).await?;
    let HotBody::File(file, at) = &hot.body else { return Ok(hot) };
    if !request.is_head() {
        // Both together take no longer than one of them may.
        let patience = (began, *serving.settings.cache.disk_timeout.get());
        stored::begin_to_read(request, &caching.zone, &hot, (file, *at), patience).await?;
    }
    Ok(hot)
}

async fn open_entry(
    request: &Request,
    serving: Serving<'_>,
    caching: &Caching,
    entry: &Entry,
) -> Result<Rc<Hot>, Unread> {
    let zone = &caching.zone;
    let known = memory::find(zone.identity(), &caching.id);
    let is_it = |hot: &Rc<Hot>| hot.meta.number == entry.number && *hot.meta.key == *caching.key;
    if let Some(hot) = known.filter(is_it) {
        look_whether_still_there(request, zone, &caching.id, &hot);
        return Ok(hot);
    }
    match read(request, serving, caching).await {
        // A mark: there are variants, and this is no response.
        Ok(hot) if hot.meta.status == VARIES => {
            memory::forget(zone.identity(), &caching.id);
            let (names, number) = (hot.meta.variant.to_vec(), hot.meta.variant_number);
            // Purged, or one too many: this is no response in any case.
            let _ = zone.note_vary(&caching.id, &names, number, Some(hot.size), gale_runtime::wall_seconds());
            Err(Unread::Unusable)
        }
        // One that was replaced, and has come back by accident.
        Ok(hot) if hot.meta.number < entry.number => {
            memory::forget(zone.identity(), &caching.id);
            zone.forget(&caching.id, entry.number);
            Err(Unread::Unusable)
        }
        Ok(hot) => {
            if hot.meta.number != entry.number {
                let now = gale_runtime::wall_seconds();
                zone.put(entry_of(caching, &hot, now));
            }
            Ok(hot)
        }
        Err(NotOpened::Gone) => {
            zone.forget(&caching.id, entry.number);
            Err(Unread::Unusable)
        }
        Err(NotOpened::Failed) => Err(Unread::Unusable),
        Err(NotOpened::Late) => Err(Unread::Late),
    }
}

/// Opens what the index does not know yet.
async fn open_cold(request: &Request, serving: Serving<'_>, caching: &Caching) -> Option<Rc<Hot>> {
    read(request, serving, caching).await.ok()
}

fn entry_of(caching: &Caching, hot: &Hot, now: u64) -> Entry {
    let mut entry = Entry::new(caching.id, Kind::Stored, now);
    (entry.number, entry.size) = (hot.meta.number, caching.zone.room_for(hot.size));
    entry.set_lifetime(&hot.meta.lifetime);
    entry
}

/// Why a file was not opened.
enum NotOpened {
    /// There is none, or none to be used.
    Gone,
    /// Its disk takes too long, or does not answer.
    Late,
    Failed,
}

/// Reads the file.
async fn read(request: &Request, serving: Serving<'_>, caching: &Caching) -> Result<Rc<Hot>, NotOpened> {
    let zone = &caching.zone;
    let moment = gale_runtime::now();
    if !zone.disk.may_try(moment) {
        return Err(NotOpened::Late);
    }
    let path = zone.path_of(&caching.id);
    let pool = pool_of(request);
    let device = likely_device(&path);
    let task = {
        let (id, zone) = (caching.id, Arc::clone(zone));
        pool.run_for(device, move || {
            let opened = zone.disk.watch(|| zone.open(&id));
            // A file of which nothing more is read is closed here.
            opened.map(|store::Opened { header, body, blocks, file }| match body {
                Some(bytes) => (header, HotBody::Memory(bytes), blocks),
                None => {
                    // It may be unlinked at any time, as to make room.
                    file.close_in_pool();
                    let start = header.header_length.into();
                    (header, HotBody::File(file, start), blocks)
                }
            })
        })
    };
    let opened = match timeout(*serving.settings.cache.disk_timeout.get(), task).await {
        Err(_) => {
            stored::note_late(request, zone, device, moment);
            return Err(NotOpened::Late);
        }
        Ok(Err(refused)) => {
            request.log(Level::Alert, format_args!("{refused}"));
            return Err(NotOpened::Failed);
        }
        Ok(Ok(opened)) => opened,
    };
    let path = path.display();
    match opened {
        Ok((header, ..)) if *header.meta.key != *caching.key => {
            request.log(Level::Crit, format_args!("cache file \"{path}\" has md5 collision"));
            Err(NotOpened::Failed)
        }
        Ok((header, body, blocks)) => {
            let size = header.file_length();
            let fields = Rc::new(header.meta.fields.clone());
            let seen = std::cell::Cell::new(moment);
            zone.note_number(header.meta.number);
            let length = announced_length(&header.meta).unwrap_or(header.body_length);
            let hot = Rc::new(Hot {
                id: caching.id,
                meta: header.meta,
                fields,
                body,
                blocks: blocks.map(Rc::new),
                length,
                size,
                seen,
            });
            memory::keep(zone.identity(), caching.id, Rc::clone(&hot));
            Ok(hot)
        }
        Err(OpenError::Missing) => Err(NotOpened::Gone),
        Err(OpenError::Foreign) => {
            request.log(Level::Crit, format_args!("cache file \"{path}\" is not one of Gale's"));
            Err(NotOpened::Gone)
        }
        Err(OpenError::Damaged(why)) => {
            count(&zone.counters.damaged);
            request.log(Level::Crit, format_args!("cache file \"{path}\" {why}"));
            Err(NotOpened::Gone)
        }
        Err(OpenError::Io(error)) => {
            count(&zone.counters.disk_errors);
            let error = gale_base::os_error::OsErrorText(&error);
            request.log(Level::Crit, format_args!("open() \"{path}\" failed {error}"));
            Err(NotOpened::Failed)
        }
    }
}

/// Whether the body of an entry can be sent without waiting for its disk.
fn is_body_at_hand(request: &Request, zone: &CacheZone, hot: &Hot) -> bool {
    match &hot.body {
        HotBody::Memory(_) => true,
        HotBody::File(file, at) => request.is_head() || stored::is_readable_now(request, zone, hot, (file, *at)),
    }
}

/// Has a pool look, now and then and only if that cannot wait for the disk, whether somebody has removed the file: then
/// the entry goes. Not on the loop: whoever looks at a name holds the file for that moment, and if it is unlinked just
/// then it is the one to free its blocks.
fn look_whether_still_there(request: &Request, zone: &Arc<CacheZone>, id: &Id, hot: &Hot) {
    let now: Moment = gale_runtime::now();
    if now.since(hot.seen.get()) < LOOK_AGAIN {
        return;
    }
    let Some(look) = zone.begin_look() else { return };
    hot.seen.set(now);
    let (path, id, number) = (zone.path_of(id), *id, hot.meta.number);
    let device = likely_device(&path);
    detach_with_others(pool_of(request), device, move || {
        if let Some(Err(error)) = files::try_stat(&path)
            && error.kind() == std::io::ErrorKind::NotFound
        {
            look.zone().forget(&id, number);
        }
    });
}
