//! Applies a response to HEAD to the stored response to GET, which gets its fields or becomes stale. (RFC 9111 §4.3.5)
//!
//! A HEAD is passed to a server although a response to GET is stored if it is not converted to GET
//! (`proxy_cache_convert_head off`), and the stored response is too old or bypassed (`proxy_cache_bypass`).

use std::rc::Rc;

use gale_base::units;
use gale_http::request::Request;
use gale_http::request::response::FieldList;
use gale_http_cache::fill::Stage;
use gale_http_cache::memory::{self, Hot};
use gale_http_cache::zone::Lookup;
use gale_protocol::response::ResponseField;

use super::consult::look;
use super::receive::{hot_of, is_about_another, put_renewed, renew_file, renewed_meta};
use super::search;
use crate::caching_state::Caching;
use crate::settings::{Ignored, UpstreamSettings};

/// Applies the fields of a HEAD answered with 200. True if a response to GET is stored or in flight: the response to
/// HEAD must not be stored in its place.
pub(super) fn by_head(
    request: &Request,
    caching: &mut Caching,
    settings: &UpstreamSettings,
    fields: &FieldList,
) -> bool {
    if !settings.cache.conformance.get().rules().heads_update {
        return false;
    }
    let now = gale_runtime::wall_seconds();
    let asked = (Rc::clone(&caching.key), caching.primary, caching.id);
    let is_of_get = match look(request, caching, now) {
        Lookup::Coming(fill) => match fill.stage() {
            Stage::Whole(meta) if !meta.is_head_only => {
                // It is complete, but not in its file yet.
                let hot = hot_of(caching.id, &fill, &meta);
                if !hot.is_some_and(|hot| update(request, caching, settings, &hot, fields)) {
                    caching.zone.discard(&caching.id, fill.number);
                    memory::forget(caching.zone.identity(), &caching.id);
                }
                true
            }
            // It is as new as this response.
            Stage::Coming(meta, _) => !meta.is_head_only,
            Stage::Whole(_) | Stage::Asking | Stage::Broken | Stage::Nothing => false,
        },
        Lookup::Entry(entry) => {
            let is_it = |hot: &Rc<Hot>| hot.meta.number == entry.number && *hot.meta.key == *caching.key;
            let hot = caching.stale.clone().filter(is_it);
            match hot.or_else(|| memory::find(caching.zone.identity(), &caching.id).filter(is_it)) {
                Some(hot) if hot.meta.is_head_only => false,
                Some(hot) => {
                    if !update(request, caching, settings, &hot, fields) {
                        end_freshness(request, caching, &hot, now);
                    }
                    true
                }
                // Only its file tells whether it is the same, and that is not read now: the next request revalidates.
                None => {
                    caching.zone.make_stale(&caching.id, entry.number, now);
                    true
                }
            }
        }
        Lookup::Varies(..) | Lookup::Error(_) | Lookup::Nothing { .. } => false,
    };
    if !is_of_get {
        (caching.key, caching.primary, caching.id) = asked;
    }
    is_of_get
}

/// Updates the fields of a stored response, unless it is newer than the request. False if the fields are about another
/// response, or it may not be stored with them.
fn update(
    request: &Request,
    caching: &mut Caching,
    settings: &UpstreamSettings,
    hot: &Hot,
    fields: &FieldList,
) -> bool {
    if caching.lead.as_ref().is_some_and(|lead| hot.meta.number > lead.fill().number) {
        return true;
    }
    let has_other_rules = caching.search.is_some() && search::rules_of(fields) != search::rules_of(&hot.meta.fields);
    let is_same = !has_other_rules
        && is_about_same(fields, hot)
        && !is_about_another(fields, &hot.meta.fields, settings.head.ignored.has(Ignored::VARY));
    let meta = renewed_meta(request, settings, &hot.meta, fields).filter(|_| is_same);
    let is_updated = meta.is_some();
    if let Some(meta) = meta {
        put_renewed(request, &caching.zone, caching.lead.take(), hot, meta);
    }
    is_updated
}

fn end_freshness(request: &Request, caching: &Caching, hot: &Hot, now: u64) {
    let (zone, number) = (&caching.zone, hot.meta.number);
    zone.make_stale(&hot.id, number, now);
    let mut meta = hot.meta.clone();
    meta.lifetime.fresh_until = meta.lifetime.fresh_until.min(now.saturating_sub(1));
    renew_file(request, zone, hot.id, number, &meta);
}

/// True if every validator of the response to HEAD, and its length, are those of the stored response.
fn is_about_same(fields: &FieldList, hot: &Hot) -> bool {
    let told = |list: &FieldList, known| {
        list.iter().find(|field| field.name.known() == Some(known)).map(|field| field.value.to_vec())
    };
    let is_same = |known| told(fields, known).is_none_or(|value| told(&hot.meta.fields, known) == Some(value));
    let length = told(fields, ResponseField::ContentLength);
    hot.meta.status == 200
        && is_same(ResponseField::ETag)
        && is_same(ResponseField::LastModified)
        && length.is_none_or(|length| units::parse_number(&length) == Some(hot.length))
}
