//! `No-Vary-Search`: responses stored and purged for several queries. (draft-ietf-httpbis-no-vary-search)
//!
//! A response with rules is stored under a key with a normalised query. A mark has the rules for all URIs that differ
//! in the query alone, so that other requests find the response; the latest rules are used. A response without rules is
//! stored under its request's own key.

use std::rc::Rc;
use std::sync::Arc;

use gale_files::likely_device;
use gale_http::request::Request;
use gale_http::request::files::pool_of;
use gale_http::request::response::FieldList;
use gale_http_cache::CacheZone;
use gale_http_cache::format::{Meta, SEARCHES, file_length};
use gale_http_cache::key::{KEY_BYTES_MAX, id_of};
use gale_http_cache::memory;
use gale_http_cache::policy::{NotStored, SearchRules};
use gale_http_cache::search::SearchKey;
use gale_http_cache::store;
use gale_http_cache::zone::Purged;
use gale_runtime::ThreadPool;

use crate::caching_state::Caching;

/// The rules in these fields.
pub(super) fn rules_of(fields: &FieldList) -> Option<SearchRules> {
    let values = fields.iter().filter(|field| field.name.eq_ignore_ascii_case(b"No-Vary-Search"));
    SearchRules::parse(values.map(|field| &*field.value))
}

/// The rules for storing a response for several queries; `None` if it is stored for its own query.
pub(super) fn rules_for(caching: &Caching, fields: &FieldList) -> Option<SearchRules> {
    let search = caching.search.as_ref()?;
    // The number 0 stands for the later one: this only checks that there is a key of valid length.
    rules_of(fields).filter(|rules| search.entry(rules, 0).is_some_and(|key| key.len() <= KEY_BYTES_MAX))
}

/// Sets the key under which a response is stored: with rules, one that other requests share.
///
/// # Errors
/// Purged since the request, replaced by later rules, or no more rules can be recorded.
pub(super) fn name(
    request: &Request,
    caching: &mut Caching,
    rules: Option<SearchRules>,
    number: u64,
    now: u64,
) -> Result<(), NotStored> {
    let Some(search) = caching.search.clone() else { return Ok(()) };
    let Some(rules) = rules else {
        let own_id = id_of(&caching.own);
        if caching.primary != own_id {
            // Requests that wait for it under the common key must not wait for the next one too.
            caching.zone.note_uncacheable(&caching.id, now);
            (caching.key, caching.primary) = (Rc::clone(&caching.own), own_id);
        }
        return Ok(());
    };
    let noted = note(request, &caching.zone, &search, &rules, number, now)?;
    let key = search.entry(&rules, noted).ok_or(NotStored::Invalid)?;
    caching.primary = id_of(&key);
    caching.key = key.into();
    Ok(())
}

/// Records the rules in the index and in a mark on disk for the next process.
fn note(
    request: &Request,
    zone: &Arc<CacheZone>,
    search: &SearchKey,
    rules: &SearchRules,
    number: u64,
    now: u64,
) -> Result<u64, NotStored> {
    let (key, text) = (search.mark(), rules.encode());
    let id = id_of(&key);
    let mark = Meta {
        key: key.into(),
        variant: text.into(),
        variant_number: number,
        status: SEARCHES,
        number,
        ..Meta::default()
    };
    let noted = zone.note_search(&id, &mark.variant, number, Some(file_length(&mark, 0)), now)?;
    if noted == number {
        let path = zone.path_of(&id);
        let temporary = store::new_number();
        let zone = Arc::clone(zone);
        let _ = pool_of(request).detach(likely_device(&path).writes(), move || {
            let written =
                store::write(&path, &mark, &[], temporary).and_then(|file| zone.commit_mark(&id, &mark, file));
            if let Err(error) = written {
                zone.note_store_failure(&path, &error);
            }
        });
    }
    Ok(noted)
}

/// True if a response was requested before a purge that may cover it: it is not stored. Checked after the fill is
/// listed, so that a purge either finds it there or is found here.
pub(super) fn is_purged(zone: &CacheZone, search: &SearchKey, number: u64) -> bool {
    zone.is_search_purged(&id_of(&search.mark()), number)
}

/// Purges the stored responses of this query and equivalent ones.
pub(super) fn purge(zone: &Arc<CacheZone>, search: &SearchKey, is_soft: bool, pool: &ThreadPool) -> Purged {
    let mark = id_of(&search.mark());
    zone.note_search_purge(&mark);
    let key = match zone.search(&mark, gale_runtime::wall_seconds()) {
        Some((rules, number)) => search.entry(&rules, number),
        // The mark may be in a file that is not in the index yet. Its rules are unknown, so all of its entries are
        // purged.
        None if zone.is_cold() => return zone.purge_key(&mark, false, Some(pool)),
        None => None,
    };
    let Some(key) = key else { return Purged { had_any: false, is_noted: false } };
    let id = id_of(&key);
    let purged = zone.purge_key(&id, is_soft, Some(pool));
    if !is_soft {
        memory::forget(zone.identity(), &id);
    }
    purged
}
