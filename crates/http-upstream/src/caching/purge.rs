//! Requests that purge, `proxy_cache_purge`: by key, by prefix if the key ends with an asterisk, or by tags.
//! (<https://nginx.org/en/docs/http/ngx_http_proxy_module.html#proxy_cache_purge>)
//!
//! The index decides, so the answer is immediate: 204 if there was an entry, or may have been one (prefixes and tags),
//! 404 if there was none. Responses in flight are purged too. The answer waits for the journal, for at most the disk
//! timeout, so that the purge holds even if the process dies.

use std::sync::Arc;

use gale_base::log_level::Level;
use gale_http::request::Request;
use gale_http::request::body::Body;
use gale_http::request::files::pool_of;
use gale_http::request::phases::Flow;
use gale_http_cache::CacheZone;
use gale_http_cache::journal::Record;
use gale_http_cache::key::{KEY_BYTES_MAX, id_of};
use gale_http_cache::memory;
use gale_http_cache::purges::tag_hash;
use gale_http_cache::services::write_now;
use gale_http_cache::settings::CacheSettings;
use gale_runtime::Bytes;

use super::search;
use super::serve::Serving;

/// Performs the purge that the request asks for.
pub(super) async fn answer(request: &mut Request, serving: Serving<'_>, zone: &Arc<CacheZone>, key: &[u8]) -> Flow {
    let settings = &serving.settings.cache;
    let is_soft = *settings.purge_soft.get();
    let tags = settings.purge_tags.get_opt().map(|tags| tags.evaluate(request)).unwrap_or_default();
    let mut words = tags.split(|byte| matches!(byte, b' ' | b',')).filter(|word| !word.is_empty()).peekable();
    if words.peek().is_some() {
        let number = zone.next_number();
        zone.purge_all(words.map(|word| Record::PurgedTag { tag: tag_hash(word), number, is_soft }));
        write(request, settings, zone).await;
        return done(request);
    }
    if key.len() > KEY_BYTES_MAX {
        // No entry has such a key.
        return Flow::Respond(404);
    }
    if let Some(prefix) = key.strip_suffix(b"*") {
        let number = zone.next_number();
        zone.purge_all([Record::PurgedPrefix { prefix: prefix.into(), number, is_soft }]);
        write(request, settings, zone).await;
        return done(request);
    }
    let id = id_of(key);
    let pool = pool_of(request);
    let mut purged = zone.purge_key(&id, is_soft, Some(&pool));
    if let Some(search) = settings.search_key(request) {
        purged.join(search::purge(zone, &search, is_soft, &pool));
    }
    if purged.is_noted {
        write(request, settings, zone).await;
    }
    if !is_soft {
        memory::forget(zone.identity(), &id);
    }
    // As long as the index does not know all files, there may be an entry.
    if purged.had_any || zone.is_cold() { done(request) } else { Flow::Respond(404) }
}

/// Waits for the journal to be written, for at most the disk timeout. A process that does not manage the directory
/// writes no journal: the managing process learns nothing of its purges.
async fn write(request: &Request, settings: &CacheSettings, zone: &Arc<CacheZone>) {
    let name = &zone.name;
    if !zone.is_managed() {
        let what = "applies to this process only, which does not manage the directory";
        request.log(Level::Warn, format_args!("a purge of cache \"{name}\" {what}"));
    } else if !write_now(zone, *settings.disk_timeout.get()).await {
        request.log(Level::Warn, format_args!("a purge of cache \"{name}\" is in effect, but not in its journal yet"));
    }
}

fn done(request: &mut Request) -> Flow {
    request.response.status = 204;
    Flow::Answer(Body::Bytes(Bytes::new()))
}
