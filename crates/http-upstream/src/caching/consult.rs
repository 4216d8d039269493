//! Consults the cache before a server is asked.

use std::future::poll_fn;
use std::rc::Rc;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use gale_base::http_date;
use gale_base::log_level::Level;
use gale_engine::configuration::ZoneRef;
use gale_files::likely_device;
use gale_http::request::Request;
use gale_http::request::phases::Flow;
use gale_http::request::subrequest;
use gale_http_cache::CacheZone;
use gale_http_cache::fill::{Fill, Stage};
use gale_http_cache::format::{Meta, VARIES};
use gale_http_cache::index::{Entry, Evicted, Kind};
use gale_http_cache::key::{Id, KEY_BYTES_MAX, id_of, variant_id};
use gale_http_cache::memory::{self, Hot};
use gale_http_cache::policy::Verdict;
use gale_http_cache::policy::decision::{
    Age, Allowed, Coming, Decision, Found, Meanwhile, Missing, Renewed, Revalidation, StorePlan, Stored,
    accepts_any_fresh, decide, is_served_while_it_comes,
};
use gale_http_cache::policy::vary::append_variant;
use gale_http_cache::policy::{RequestDirectives, Rules};
use gale_http_cache::search::SearchKey;
use gale_http_cache::settings::{CacheChoice, CachePath, CacheSettings, holds};
use gale_http_cache::zone::{FoundFill, Lookup};
use gale_protocol::request::{KnownHeader, Method};
use gale_protocol::response::ResponseField;
use gale_runtime::{Moment, Timer, timeout};

use super::opening::{Unread, entry_of, is_body_at_hand, look_whether_still_there, open, open_cold};
use super::receive::hot_of;
use super::serve::{Serving, serve_fill, serve_hot, told_length};
use super::{AskedBecause, CacheNote, CacheStatus, Part, Update, count, count_use, purge};
use crate::caching_state::Caching;
use crate::settings::RetryOn;

/// Result of consulting the cache.
pub enum Consulted {
    /// The answer of the request.
    Answer(Flow),
    /// A server has to be asked; with the state for storing its response, if that is possible.
    Ask(Option<Box<Caching>>),
}

/// Maximum number of lookups of a request whose waits for other requests had no result.
const LOOKS_MAX: u32 = 8;

/// Answers from this worker's memory, without waiting; `None` if that is not possible.
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
    request.call_at_end(count_use);
    Some(serve_hot(request, serving, zone, &hot, CacheStatus::Hit))
}

/// Consults the cache of the location.
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
    request.call_at_end(count_use);
    let search = settings.search_key(request).map(Rc::new);
    let own = Rc::clone(&key);
    let caching = Box::new(Caching {
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
    let asked = directives_of(request, settings.conformance.get().rules());
    if holds(&settings.bypass, request) || asked.no_store {
        return bypass(request, serving, caching, &asked);
    }
    find(request, serving, caching, &asked).await
}

/// Asks a server without a lookup.
fn bypass(
    request: &mut Request,
    serving: Serving<'_>,
    mut caching: Box<Caching>,
    asked: &RequestDirectives,
) -> Consulted {
    let allowed = allowed_for(request, serving);
    match decide(Found::<Opened>::Bypassed, asked, &allowed, gale_runtime::wall_seconds()) {
        Decision::Refuse(status) => Consulted::Answer(Flow::Respond(status)),
        decision => {
            caching.may_store = !matches!(decision, Decision::Fetch(StorePlan::Unstored));
            caching.is_by_request = !caching.may_store;
            if caching.may_store {
                // From now on a purge covers the response.
                caching.take_lead_beside();
            }
            prepare_to_ask(request, serving, &caching, CacheStatus::Bypass);
            Consulted::Ask(Some(caching))
        }
    }
}

/// True if the client forbids storing the response to its request. (RFC 9111 §5.2.1.5)
pub(super) fn forbids_storing(request: &Request, rules: Rules) -> bool {
    directives_of(request, rules).no_store
}

/// `Cache-Control` and `Pragma` of the client; empty if the rules ignore them.
fn directives_of(request: &Request, rules: Rules) -> RequestDirectives {
    if !rules.obeys_requests {
        return RequestDirectives::default();
    }
    let values = request.fields().filter(|(field, _, _)| field.known == Some(KnownHeader::CacheControl));
    let pragma = request.header(KnownHeader::Pragma);
    RequestDirectives::parse(values.map(|(_, _, value)| value), pragma)
}

/// Settings of the location, as they apply to the request.
fn allowed_for(request: &Request, serving: Serving<'_>) -> Allowed {
    let settings = &serving.settings.cache;
    Allowed {
        stale_while_updating: settings_use(serving, RetryOn::UPDATING),
        background_update: *settings.background_update.get(),
        lock: *settings.lock.get(),
        min_uses: *settings.min_uses.get(),
        is_beyond_range: is_beyond_range(request, settings),
    }
}

/// The cache of the location; `None` for `off`.
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

/// For an unsafe request, whose success invalidates stored responses. (RFC 9111 §4.4)
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

/// Outcome of a performed decision.
enum Performed {
    /// The request has its answer.
    Answer(Flow),
    /// A server has to be asked; with the cache status.
    Ask(CacheStatus),
    /// A server has to be asked, and the response is not stored.
    Pass,
    /// The entry was removed, or the fetch of another request has ended.
    LookAgain,
}

/// State of a request's lookups.
struct Search {
    began: Moment,
    /// True if it has waited for another request's fetch.
    has_waited: bool,
    /// Number of the stored response that could not be used.
    unusable: Option<u64>,
}

/// Looks up until a response can be served, or a server has to be asked.
async fn find(
    request: &mut Request,
    serving: Serving<'_>,
    mut caching: Box<Caching>,
    asked: &RequestDirectives,
) -> Consulted {
    wait_for_journal(request, serving, &caching.zone).await;
    let mut search = Search { began: gale_runtime::now(), has_waited: false, unusable: None };
    for _ in 0..LOOKS_MAX {
        let performed = match find_candidate(request, serving, &mut caching, asked, &mut search).await {
            Candidate::LookAgain => Performed::LookAgain,
            Candidate::Coming(fill) => use_coming(request, serving, &mut caching, fill, asked, &mut search).await,
            Candidate::Found(found) => perform(request, serving, &mut caching, found, asked, &mut search).await,
        };
        match performed {
            Performed::Answer(flow) => return Consulted::Answer(flow),
            Performed::Ask(status) => {
                prepare_to_ask(request, serving, &caching, status);
                return Consulted::Ask(Some(caching));
            }
            Performed::Pass => return Consulted::Ask(None),
            Performed::LookAgain => {}
        }
    }
    // No fetch of another request has led to a usable response.
    if asked.only_if_cached {
        return Consulted::Answer(Flow::Respond(504));
    }
    caching.take_lead_beside();
    prepare_to_ask(request, serving, &caching, CacheStatus::Miss);
    Consulted::Ask(Some(caching))
}

/// Waits until the journal of the cache is read. After a timeout servers are asked, and no later request waits.
async fn wait_for_journal(request: &Request, serving: Serving<'_>, zone: &Arc<CacheZone>) {
    if !zone.is_ready_soon() {
        return;
    }
    let patience = *serving.settings.cache.disk_timeout.get();
    let is_late = timeout(patience, poll_fn(|context| zone.poll_ready(context))).await.is_err();
    if is_late && zone.note_journal_late() {
        zone.disk.note_silent(likely_device(&zone.directory.path), gale_runtime::now());
        let message = format_args!("cache \"{}\" is not loaded yet, requests are passed to the upstream", zone.name);
        request.log(Level::Warn, message);
    }
}

/// A stored response, opened.
struct Opened {
    entry: Entry,
    hot: Rc<Hot>,
}

/// Result of one lookup.
enum Candidate {
    Found(Found<Opened>),
    /// A response in flight. This counts as a reader until it is dropped.
    Coming(FoundFill),
    /// The cache has a new entry: another lookup finds more.
    LookAgain,
}

/// Looks up once, and opens the stored response.
async fn find_candidate(
    request: &mut Request,
    serving: Serving<'_>,
    caching: &mut Caching,
    asked: &RequestDirectives,
    search: &mut Search,
) -> Candidate {
    let now = gale_runtime::wall_seconds();
    caching.is_stored = false;
    let unusable = Candidate::Found(Found::Missing(Missing::Unusable { is_uncacheable: false }));
    match look(request, caching, now) {
        Lookup::Coming(fill) => Candidate::Coming(fill),
        Lookup::Error(status) => Candidate::Found(Found::Error(status)),
        Lookup::Entry(entry) => match open(request, serving, caching, &entry).await {
            Ok(hot) if hot.meta.is_head_only && !request.is_head() => {
                search.unusable = Some(entry.number);
                unusable
            }
            Ok(hot) => Candidate::Found(found_stored(caching, entry, hot, now)),
            Err(unread) => {
                // A new response replaces it, unless only its disk is late.
                search.unusable = Some(entry.number);
                let is_valid = entry.is_fresh(now) && caching.zone.purges.is_empty() && accepts_any_fresh(asked);
                caching.is_stored = unread == Unread::Late && is_valid;
                unusable
            }
        },
        Lookup::Nothing { uses, is_uncacheable } => find_cold(request, serving, caching, now)
            .await
            .unwrap_or(Candidate::Found(Found::Missing(Missing::Unknown { uses, is_uncacheable }))),
        Lookup::Varies(..) => unusable,
    }
}

/// Opens a file that the loader has not reached yet.
async fn find_cold(request: &Request, serving: Serving<'_>, caching: &Caching, now: u64) -> Option<Candidate> {
    let zone = &caching.zone;
    if !(zone.is_cold() && zone.is_ready() && zone.disk.is_well()) {
        return None;
    }
    let hot = open_cold(request, serving, caching).await?;
    if hot.meta.status == VARIES {
        // The file is a mark: there are variants.
        memory::forget(zone.identity(), &caching.id);
        let (names, number) = (hot.meta.variant.to_vec(), hot.meta.variant_number);
        let is_noted = zone.note_vary(&caching.id, &names, number, Some(hot.size), now).is_ok();
        // Otherwise the mark was purged.
        return is_noted.then_some(Candidate::LookAgain);
    }
    if judge_purges(zone, &caching.primary, &hot.meta) == Verdict::Gone {
        return None;
    }
    let entry = entry_of(caching, &hot, now);
    zone.put(entry.clone());
    Some(Candidate::Found(found_stored(caching, entry, hot, now)))
}

fn found_stored(caching: &Caching, entry: Entry, hot: Rc<Hot>, now: u64) -> Found<Opened> {
    let renewed = Renewed {
        is_fresh: entry.is_fresh(now),
        fresh_until: entry.fresh_until.into(),
        stale_while_revalidate: entry.stale_while_revalidate,
        must_revalidate: entry.must_revalidate,
    };
    let purged = judge_purges(&caching.zone, &caching.primary, &hot.meta);
    Found::Stored(Stored { lifetime: hot.meta.lifetime, renewed, purged }, Opened { entry, hot })
}

/// Uses a response in flight: while it arrives, or like a stored one if all of it is in memory.
async fn use_coming(
    request: &mut Request,
    serving: Serving<'_>,
    caching: &mut Caching,
    fill: FoundFill,
    asked: &RequestDirectives,
    search: &mut Search,
) -> Performed {
    let now = gale_runtime::wall_seconds();
    if let Some(flow) = serve_coming(request, serving, caching, &fill, asked, search.has_waited) {
        return Performed::Answer(flow);
    }
    if is_spent(caching, &fill, now) {
        caching.zone.end(&fill, &caching.id);
        return Performed::LookAgain;
    }
    let found = match whole_of(request, caching, &fill) {
        Some(hot) => found_stored(caching, entry_of(caching, &hot, now), hot, now),
        None => Found::Missing(Missing::Unusable { is_uncacheable: !fill.is_kept() }),
    };
    // An unsuitable response loses its reader before it is fetched again.
    let _reader = matches!(found, Found::Stored(..)).then_some(fill);
    perform(request, serving, caching, found, asked, search).await
}

/// Decides, and performs the decision.
async fn perform(
    request: &mut Request,
    serving: Serving<'_>,
    caching: &mut Caching,
    found: Found<Opened>,
    asked: &RequestDirectives,
    search: &mut Search,
) -> Performed {
    let allowed = allowed_for(request, serving);
    match decide(found, asked, &allowed, gale_runtime::wall_seconds()) {
        Decision::Serve(Opened { hot, .. }, age) => {
            let status = match age {
                Age::Fresh => CacheStatus::Hit,
                Age::Stale => CacheStatus::Stale,
            };
            Performed::Answer(serve_hot(request, serving, &caching.zone, &hot, status))
        }
        Decision::ServeError(status) => {
            Caching::note(request, CacheStatus::Hit);
            Performed::Answer(Flow::Respond(status))
        }
        Decision::Refuse(status) => Performed::Answer(Flow::Respond(status)),
        Decision::Remove(Opened { entry, .. }) => {
            remove(caching, &entry);
            Performed::LookAgain
        }
        Decision::Revalidate(Opened { hot, .. }, revalidation) => {
            revalidate(request, serving, caching, hot, revalidation, asked).await
        }
        Decision::Pass(why) => {
            Caching::note(request, CacheStatus::Miss);
            Caching::note_not_stored(request, why);
            Performed::Pass
        }
        Decision::Fetch(StorePlan::Alone) => fetch_alone(request, serving, caching, asked, search).await,
        Decision::Fetch(StorePlan::Beside) => {
            caching.take_lead_beside();
            Performed::Ask(CacheStatus::Miss)
        }
        Decision::Fetch(StorePlan::Unstored) => {
            caching.may_store = false;
            Performed::Ask(CacheStatus::Miss)
        }
    }
}

/// Removes a stored response that was purged.
fn remove(caching: &Caching, entry: &Entry) {
    let zone = &caching.zone;
    if zone.index.remove(&caching.id, |known| known.number == entry.number).is_some() {
        let gone = Evicted { id: caching.id, size: entry.size, number: entry.number };
        zone.remove_files(vec![gone], None);
    }
    memory::forget(zone.identity(), &caching.id);
}

/// Fetches a response for all requests for it, or waits for the request that does (`cache_lock`).
async fn fetch_alone(
    request: &mut Request,
    serving: Serving<'_>,
    caching: &mut Caching,
    asked: &RequestDirectives,
    search: &mut Search,
) -> Performed {
    let settings = &serving.settings.cache;
    let (patience, age_max) = (*settings.lock_timeout.get(), *settings.lock_age.get());
    let now = gale_runtime::now();
    let fill = match caching.zone.begin(&caching.primary, caching.id, now, age_max) {
        // It was stored since the lookup.
        Ok(_) if caching.zone.has_fresh(&caching.id, search.unusable, gale_runtime::wall_seconds()) => {
            return Performed::LookAgain;
        }
        Ok(lead) => {
            caching.lead = Some(lead);
            return Performed::Ask(CacheStatus::Miss);
        }
        Err(fill) => fill,
    };
    search.has_waited = true;
    if wait_for_head(&fill, patience.saturating_sub(now.since(search.began)), age_max).await {
        // A response without a file is no longer found once it is complete.
        return match serve_coming(request, serving, caching, &fill, asked, true) {
            Some(flow) => Performed::Answer(flow),
            None => Performed::LookAgain,
        };
    }
    if gale_runtime::now().since(search.began) < patience {
        return Performed::LookAgain;
    }
    // As in nginx, the request is passed on and its response is not stored.
    caching.may_store = false;
    Performed::Ask(CacheStatus::Miss)
}

/// Revalidates a stored response, by this request or another one.
async fn revalidate(
    request: &mut Request,
    serving: Serving<'_>,
    caching: &mut Caching,
    hot: Rc<Hot>,
    Revalidation { meanwhile, is_by_request }: Revalidation,
    asked: &RequestDirectives,
) -> Performed {
    let settings = &serving.settings.cache;
    let zone = Arc::clone(&caching.zone);
    caching.is_by_request = is_by_request;
    caching.stale = Some(Rc::clone(&hot));
    let age_max = match meanwhile {
        Meanwhile::ServeAll | Meanwhile::ServeOthers => Duration::MAX,
        Meanwhile::Wait if *settings.lock.get() => *settings.lock_age.get(),
        Meanwhile::Wait => Duration::ZERO,
    };
    let fill = match zone.begin(&caching.primary, caching.id, gale_runtime::now(), age_max) {
        Ok(lead) => {
            caching.lead = Some(lead);
            if meanwhile == Meanwhile::ServeAll {
                update_in_background(request, caching, &hot);
                return Performed::Answer(serve_hot(request, serving, &zone, &hot, CacheStatus::Stale));
            }
            return Performed::Ask(CacheStatus::Expired);
        }
        Err(_) if meanwhile != Meanwhile::Wait => {
            return Performed::Answer(serve_hot(request, serving, &zone, &hot, CacheStatus::Updating));
        }
        Err(fill) => fill,
    };
    if !wait_for_head(&fill, *settings.lock_timeout.get(), *settings.lock_age.get()).await {
        caching.may_store = false;
        return Performed::Ask(CacheStatus::Expired);
    }
    match serve_coming(request, serving, caching, &fill, asked, true) {
        Some(flow) => Performed::Answer(flow),
        // It is not to be stored, so this request does not wait again.
        None if matches!(fill.stage(), Stage::Nothing)
            && !zone.has_fresh(&caching.id, None, gale_runtime::wall_seconds()) =>
        {
            caching.take_lead_beside();
            Performed::Ask(CacheStatus::Expired)
        }
        // The index may have changed since, by a 304 for example.
        None => Performed::LookAgain,
    }
}

/// Waits until the head of another request's fetch is known, or that has failed. False after `patience`, or if the
/// fetch is older than `age_max`.
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

/// The key and sum to look up for a request with this key of its own: that key, or the common key of equivalent
/// queries, whichever has the newer response.
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

/// Looks up the request's variant.
pub(super) fn look(request: &Request, caching: &mut Caching, now: u64) -> Lookup {
    if caching.search.is_some() {
        // Rules may have been stored since.
        (caching.key, caching.primary) = name_of(&caching.zone, &caching.own, caching.search.as_deref(), now);
    }
    caching.id = caching.primary;
    match caching.zone.look(&caching.primary, now) {
        Lookup::Varies(names, number) => {
            let variant = variant_of(request, &names, caching.normalizes_language);
            caching.id = variant_id(&caching.primary, number, &variant);
            match caching.zone.look(&caching.id, now) {
                // A variant has no variants: this is an accidental collision of sums.
                Lookup::Varies(..) => Lookup::Nothing { uses: u64::MAX, is_uncacheable: true },
                found => found,
            }
        }
        found => found,
    }
}

/// The names of the fields that a response depends on, a zero byte, and the request's values of these fields.
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

/// True if a response in flight suits the request: its fields may decide.
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
    asked: &RequestDirectives,
    has_waited: bool,
) -> Option<Flow> {
    let (meta, length, is_coming) = match fill.stage() {
        Stage::Coming(meta, length) => (meta, length, true),
        // It is complete, but not in its file yet.
        Stage::Whole(meta) => {
            let length = told_length(&meta, fill.received());
            (meta, length, false)
        }
        _ => return None,
    };
    // Another fetch may be faster than a stalled one.
    let is_stalled = fill.is_stalled(gale_runtime::now(), *serving.settings.cache.lock_age.get());
    let has_body = !meta.is_head_only || request.is_head();
    let coming = Coming {
        lifetime: meta.lifetime,
        purged: judge_purges(&caching.zone, &caching.primary, &meta),
        is_readable: has_body && !is_stalled && fill.can_be_read() && is_for(request, caching, &meta),
    };
    let fits = is_served_while_it_comes(&coming, asked, gale_runtime::wall_seconds());
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

/// True if a response that is only kept for a while cannot be used any more, and hides the stored one.
fn is_spent(caching: &Caching, fill: &Fill, now: u64) -> bool {
    let Some(Stage::Whole(meta)) = fill.is_kept().then(|| fill.stage()) else { return false };
    !meta.lifetime.is_fresh(now) || judge_purges(&caching.zone, &caching.primary, &meta) != Verdict::Valid
}

/// A complete response that is not in its file yet, as an entry; `None` if it is not all in memory, or is only kept.
fn whole_of(request: &Request, caching: &Caching, fill: &Arc<Fill>) -> Option<Rc<Hot>> {
    let Some(Stage::Whole(meta)) = (!fill.is_kept()).then(|| fill.stage()) else { return None };
    let is_usable = (!meta.is_head_only || request.is_head()) && is_for(request, caching, &meta);
    hot_of(caching.id, fill, &meta).filter(|_| is_usable).map(Rc::new)
}

/// `cache_use_stale`
pub(super) fn settings_use(serving: Serving<'_>, on: RetryOn) -> bool {
    serving.settings.stale.cache_use_stale.get().has(on)
}

/// Repeats the request in the background to fetch a stale response.
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
    // A refusal is logged; the next request tries again.
    subrequest::repeat_in_background(request, update);
}

/// Effect of purges on a response.
pub(super) fn judge_purges(zone: &CacheZone, primary: &Id, meta: &Meta) -> Verdict {
    match zone.purges.is_empty() {
        true => Verdict::Valid,
        false => zone.purges.judge(primary, &meta.key, &meta.tags, meta.number),
    }
}

/// True if a server is asked for the client's range and not for the whole response: `cache_max_range_offset`.
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
    // A range from the end may begin anywhere.
    range.starts_with(b"-") || offset.unwrap_or(u64::MAX) >= most
}

/// Notes how the server is to be asked.
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
    // As in nginx, only a success is revalidated by its validators.
    if let Some(hot) = validators.filter(|hot| matches!(hot.meta.status, 200 | 206)) {
        let value = |known| hot.meta.fields.iter().find(|field| field.name.known() == Some(known));
        note.etag = value(ResponseField::ETag).map(|field| (*field.value).into());
        // A server need not accept an invalid date. (RFC 9110 §13.1.3)
        let date = value(ResponseField::LastModified).filter(|field| http_date::parse(&field.value).is_some());
        note.last_modified = date.map(|field| (*field.value).into());
    }
    request.notes.put(note);
}
