//! Directives of caches and stored responses in proxy, fastcgi, scgi and uwsgi: `proxy_cache_path`,
//! `fastcgi_cache_path` and so on.
//! (<https://nginx.org/en/docs/http/ngx_http_proxy_module.html#proxy_cache_path>)

use std::sync::Arc;
use std::time::Duration;

use bstr::ByteSlice;
use gale_base::units;
use gale_config::{Diagnostic, Setting, Statement, Word, values};
use gale_engine::configuration::{Builder, ZoneRef, ZoneSize};
use gale_engine::variables::is_name_byte;
use gale_http::configuration::builder::InHttp;
use gale_http::variables::template::Template;
use gale_http_cache::CacheZone;
use gale_http_cache::directory::{CacheDirectory, PathOptions};
use gale_http_cache::key::Levels;
use gale_http_cache::policy::Conformance;
use gale_http_cache::policy::freshness::Heuristic;
use gale_http_cache::services::CacheService;
use gale_http_cache::settings::{CacheChoice, CacheKey, CachePath, QueryInKey, Valid, method_bit};
use gale_http_upstream::settings::{CacheSettings, HasGroup, RetryOn, StoreSettings, UpstreamOf};
use gale_http_upstream::store_settings::StoreTo;
use gale_protocol::request::Method;
use gale_spool::TempPath;
use gale_worker::service::ServiceSpec;

/// Makes the rows of the groups that belong to copies of responses.
macro_rules! cache_rows {
    (CacheSettings, $conf:ty, $prefix:literal) => {
        $crate::http::upstream_rows::rows!(CacheSettings, $conf, $prefix, [
            in Contexts::HTTP, "_cache_path", Takes::AtLeast(2), "",
                "Sets the path and other parameters of a cache.", ManyWith { cache_path } paths;
            "_cache", Takes::Exactly(1), "",
                "Sets the zone used for caching; off disables caching.", OneWith { cache } choice;
            "_cache_key", Takes::Exactly(1), "",
                "Defines the key for caching.", OneWith { cache_key } key;
            "_cache_valid", Takes::AtLeast(1), "",
                "Sets the caching time for different response codes.", Many { cache_valid } valid;
            "_cache_heuristic", Takes::Between(1, 2), "off",
                "Sets the caching time of responses that have only Last-Modified, as a percentage of their age: off \
                 or N% [max=TIME].",
                One { cache_heuristic } heuristic;
            "_cache_methods", Takes::AtLeast(1), "GET HEAD",
                "Sets the request methods whose responses are cached.", Updated { cache_methods } methods;
            "_cache_min_uses", Takes::Exactly(1), "1",
                "Sets the number of requests after which a response is cached.", One { values::number } min_uses;
            "_cache_bypass", Takes::AtLeast(1), "",
                "Defines conditions under which a response is not taken from the cache: at least one value is \
                 non-empty and not 0.",
                ManyWith { conditions } bypass;
            "_no_cache", Takes::AtLeast(1), "",
                "Defines conditions under which a response is not saved to the cache: at least one value is non-empty \
                 and not 0.",
                ManyWith { conditions } no_cache;
            "_cache_lock", Takes::Flag, "off",
                "Enables or disables the cache lock: only one request at a time populates a new cache item.",
                One { values::flag } lock;
            "_cache_lock_timeout", Takes::Exactly(1), "5s",
                "Sets how long a request waits for the cache lock.", One { values::time_ms } lock_timeout;
            "_cache_lock_age", Takes::Exactly(1), "5s",
                "Sets the age of a cache lock after which one more request is passed to the server.",
                One { values::time_ms } lock_age;
            "_cache_background_update", Takes::Flag, "off",
                "Enables or disables updating an expired cache item in the background while the stale response is \
                 returned.",
                One { values::flag } background_update;
            "_cache_revalidate", Takes::Flag, "off",
                "Enables or disables revalidation of expired cache items by conditional requests.",
                One { values::flag } revalidate;
            "_cache_convert_head", Takes::Flag, "on",
                "Enables or disables the conversion of HEAD to GET for caching.", One { values::flag } convert_head;
            "_cache_max_range_offset", Takes::Exactly(1), "",
                "Sets the offset beyond which range requests are passed to the server and not cached.",
                One { values::offset } max_range_offset;
            "_cache_conformance", Takes::Exactly(1), "mixed",
                "Sets the rules that apply where nginx and RFC 9111 differ: mixed, nginx or rfc9111.",
                One { cache_conformance } conformance;
            "_cache_no_vary_search", Takes::Flag, "off",
                "Enables or disables No-Vary-Search, by which responses name parts of the query string that do not \
                 change them.",
                One { values::flag } no_vary_search;
            "_cache_normalize_language", Takes::Flag, "off",
                "Enables or disables comparison of Accept-Language regardless of case, order and repetitions.",
                One { values::flag } normalize_language;
            "_cache_disk_timeout", Takes::Exactly(1), "250ms",
                "Sets how long a request waits for the disk of the cache before it is passed to the server.",
                One { values::time_ms } disk_timeout;
            "_cache_purge", Takes::AtLeast(1), "",
                "Defines conditions under which a request purges the items with its cache key: at least one value is \
                 non-empty and not 0.",
                ManyWith { conditions } purge;
            "_cache_purge_soft", Takes::Flag, "off",
                "Enables or disables soft purges, which mark cache items stale instead of removing them.",
                One { values::flag } purge_soft;
            "_cache_purge_tags", Takes::Exactly(1), "",
                "Sets the tags whose items a purge request purges, instead of its cache key.",
                OneWith { template } purge_tags;
            "_cache_tag_header", Takes::Exactly(1), "",
                "Sets the response header field that lists the cache tags of a response.",
                One { values::string } tag_header;
            "_cache_status", Takes::Exactly(1), "off",
                "Sets the name of the cache in the Cache-Status response header field; off sends no such field.",
                One { values::string } status_name;
        ])
    };
    (StaleSettings, $conf:ty, $prefix:literal) => {
        $crate::http::upstream_rows::rows!(StaleSettings, $conf, $prefix, [
            "_cache_use_stale", Takes::AtLeast(1), "off",
                "Sets the cases in which a stale cached response is used.", Updated { cache_use_stale } cache_use_stale;
        ])
    };
    (StoreSettings, $conf:ty, $prefix:literal) => {
        $crate::http::upstream_rows::rows!(StoreSettings, $conf, $prefix, [
            "_store", Takes::Exactly(1), "off",
                "Enables saving of responses to files: on for the path of the URI, or a path; off disables it.",
                OneWith { store } to;
            "_store_access", Takes::Between(1, 3), "user:rw",
                "Sets access permissions for saved responses.", One { store_access } access;
        ])
    };
}

pub(crate) use cache_rows;

/// Minimum size of an index: nginx's two pages.
const ZONE_BYTES_MIN: usize = 2 * 4096;

/// Returns the directive that declares the caches of a directive's module: modules do not share cache zones.
fn declared_by(statement: &Statement) -> &'static str {
    match statement.name.text.split(|&byte| byte == b'_').next().unwrap_or_default() {
        b"fastcgi" => "fastcgi_cache_path",
        b"scgi" => "scgi_cache_path",
        b"uwsgi" => "uwsgi_cache_path",
        _ => "proxy_cache_path",
    }
}

/// Parses `proxy_cache_path PATH keys_zone=NAME:SIZE [PARAMETER ...];`.
pub(crate) fn cache_path(builder: &mut Builder, statement: &Statement) -> Result<ZoneRef<CachePath>, Diagnostic> {
    let directory = &statement.args[0];
    let text = directory.text.strip_suffix(b"/").unwrap_or(&directory.text);
    let path = builder.full_path(text);
    let mut levels = Levels::new();
    let mut zone = None;
    let mut options = PathOptions::default();
    for word in &statement.args[1..] {
        let (name, value) = word.text.split_once_str("=").unwrap_or((&word.text, b""));
        let invalid = |what: &str| Diagnostic::emerg(format!("invalid {what} \"{}\"", word.text)).at(word.span);
        let value_error =
            |name: &str| Diagnostic::emerg(format!("invalid {name} value \"{}\"", word.text)).at(word.span);
        let number = |name: &str| units::parse_number(value).ok_or_else(|| value_error(name));
        let time = |name: &str| units::parse_time(value).ok_or_else(|| value_error(name));
        match name {
            // As in nginx an empty value is ignored.
            b"levels" if &**word.text == b"levels=" => {}
            b"levels" => levels = parse_levels(value).ok_or_else(|| invalid("\"levels\""))?,
            b"use_temp_path" if matches!(value, b"on" | b"off") => {}
            b"use_temp_path" => {
                let message = format!("invalid use_temp_path value \"{}\", it must be \"on\" or \"off\"", word.text);
                return Err(Diagnostic::emerg(message).at(word.span));
            }
            b"keys_zone" => zone = Some(parse_zone(word, value)?),
            b"inactive" => {
                options.inactive = units::parse_time_seconds(value).ok_or_else(|| value_error("inactive"))?;
            }
            b"max_size" => options.max_size = units::parse_offset(value).ok_or_else(|| value_error("max_size"))?,
            b"min_free" => options.min_free = units::parse_offset(value).ok_or_else(|| value_error("min_free"))?,
            b"loader_files" => options.loader.files = number("loader_files")?,
            b"loader_sleep" => options.loader.sleep = time("loader_sleep")?,
            b"loader_threshold" => options.loader.threshold = time("loader_threshold")?,
            b"manager_files" => options.manager.files = number("manager_files")?,
            b"manager_sleep" => options.manager.sleep = time("manager_sleep")?,
            b"manager_threshold" => options.manager.threshold = time("manager_threshold")?,
            b"purger" => options.purger = flag(value).ok_or_else(|| value_error("purger"))?,
            b"purger_files" => options.purging.files = number("purger_files")?,
            b"purger_sleep" => options.purging.sleep = time("purger_sleep")?,
            b"purger_threshold" => options.purging.threshold = time("purger_threshold")?,
            _ => return Err(invalid("parameter")),
        }
    }
    let Some(size) = zone else {
        let message = format!("\"{}\" must have \"keys_zone\" parameter", statement.name.text);
        return Err(Diagnostic::emerg(message).at(statement.span));
    };
    let kind = declared_by(statement);
    let declared = builder.declare_zone::<CachePath>(kind, &size, statement.span)?;
    if declared.declared().is_some() {
        return Err(Diagnostic::emerg(format!("duplicate zone \"{}\"", size.name)).at(statement.span));
    }
    let directories = &mut builder.http_mut().cache_directories;
    if let Some((_, other)) = directories.iter().find(|(known, _)| *known == path) {
        let message = format!("the same path name \"{}\" is used by zone \"{other}\"", path.display());
        return Err(Diagnostic::emerg(message).at(directory.span));
    }
    directories.push((path.clone(), size.name.clone()));
    let place = CacheDirectory { path: path.clone(), levels: levels.clone() };
    let shown = [path.as_os_str().as_encoded_bytes(), b" ", &levels[..]].concat();
    let made = options.clone();
    let name = size.name.clone();
    let make = |bytes| CacheZone::new(name, place, made, bytes);
    let cache: Arc<CacheZone> = size.hold_for(builder, kind, "cache", &shown, statement.span, make)?;
    let service = CacheService { zone: Arc::clone(&cache), options };
    builder.add_service(ServiceSpec::per_process(format!("cache manager {}", size.name), service), statement.span)?;
    let mut temp_path = Setting::default();
    temp_path.set(TempPath { path: path.into(), levels }, Some(directory.span));
    builder.http_mut().temp_paths.push(temp_path);
    declared.declare(CachePath { name: size.name, cache });
    Ok(declared)
}

fn flag(value: &[u8]) -> Option<bool> {
    match value {
        b"on" => Some(true),
        b"off" => Some(false),
        _ => None,
    }
}

/// Parses `1:2`: up to three levels of one or two digits each.
fn parse_levels(text: &[u8]) -> Option<Levels> {
    let levels: Option<Levels> = text
        .split(|&byte| byte == b':')
        .map(|level| match level {
            b"1" => Some(1),
            b"2" => Some(2),
            _ => None,
        })
        .collect();
    levels.filter(|levels| levels.len() <= 3)
}

fn parse_zone(word: &Word, value: &[u8]) -> Result<ZoneSize, Diagnostic> {
    let invalid = || Diagnostic::emerg(format!("invalid keys zone size \"{}\"", word.text)).at(word.span);
    let (name, size) = value.split_once_str(":").ok_or_else(invalid)?;
    let bytes = units::parse_size(size).and_then(|bytes| usize::try_from(bytes).ok()).ok_or_else(invalid)?;
    if bytes < ZONE_BYTES_MIN {
        return Err(Diagnostic::emerg(format!("keys zone \"{}\" is too small", word.text)).at(word.span));
    }
    Ok(ZoneSize { name: name.into(), bytes })
}

/// Parses `proxy_cache ZONE|off;`.
pub(crate) fn cache(builder: &mut Builder, statement: &Statement) -> Result<CacheChoice, Diagnostic> {
    let word = &statement.args[0];
    if &**word.text == b"off" {
        return Ok(CacheChoice::Off);
    }
    let template = builder.http_mut().template(word)?;
    if template.as_constant().is_none() {
        return Ok(CacheChoice::Named(template));
    }
    builder.zone(declared_by(statement), &word.text, word.span).map(CacheChoice::Zone)
}

/// Variables that make a key different for each user.
const OF_USERS: &[&str] = &["http_authorization"];

/// Parses `proxy_cache_key TEXT;`.
pub(crate) fn cache_key(builder: &mut Builder, statement: &Statement) -> Result<CacheKey, Diagnostic> {
    key_of(builder, &statement.args[0])
}

fn key_of(builder: &mut Builder, word: &Word) -> Result<CacheKey, Diagnostic> {
    let template = builder.http_mut().template(word)?;
    let search = search_place(builder, word)?;
    let text = &word.text;
    let names = |name: &&str| text.contains_str(format!("${name}")) || text.contains_str(format!("${{{name}"));
    let (tells_users, tells_slices) = (OF_USERS.iter().any(names), names(&"slice_range"));
    Ok(CacheKey { template, tells_users, tells_slices, search })
}

/// Splits a key at the last mention of the query string, into the texts before and after it. Thus the query can be left
/// out of the key; other parts that depend on it still distinguish requests.
fn search_place(builder: &mut Builder, word: &Word) -> Result<Option<QueryInKey>, Diagnostic> {
    let Some((before, variable, after)) = last_query(&word.text) else { return Ok(None) };
    let has_path = variable.contains_str("_uri");
    let without_mark = [&b"$is_args"[..], b"${is_args}"].iter().find_map(|mark| before.strip_suffix(*mark));
    let mut part = |text: &[u8]| builder.http_mut().template(&Word { text: text.into(), ..word.clone() });
    Ok(Some(QueryInKey {
        before: part(without_mark.unwrap_or(before))?,
        query: part(variable)?,
        has_path,
        lacks_mark: has_path || without_mark.is_some(),
        after: part(after)?,
    }))
}

/// Splits a text at the last variable that is the query string or ends with it.
fn last_query(text: &[u8]) -> Option<(&[u8], &[u8], &[u8])> {
    text.rfind_iter(b"$").find_map(|at| {
        let rest = &text[at + 1..];
        let (name, length) = match rest.strip_prefix(b"{") {
            Some(inner) => (&inner[..inner.find_byte(b'}')?], inner.find_byte(b'}')? + 2),
            None => {
                let length = rest.iter().take_while(|&&byte| is_name_byte(byte)).count();
                (&rest[..length], length)
            }
        };
        let end = at + 1 + length;
        let has_query = matches!(name, b"request_uri" | b"proxy_uri" | b"args" | b"query_string");
        has_query.then(|| (&text[..at], &text[at..end], &text[end..]))
    })
}

/// Parses `proxy_cache_valid [STATUS ...] TIME;`.
pub(crate) fn cache_valid(statement: &Statement) -> Result<Vec<Valid>, Diagnostic> {
    let (time, statuses) = statement.args.split_last().expect("it takes at least one");
    let invalid_time = || Diagnostic::emerg(format!("invalid time value \"{}\"", time.text)).at(time.span);
    let duration: Duration = units::parse_time_seconds(&time.text).ok_or_else(invalid_time)?;
    let seconds = u32::try_from(duration.as_secs()).unwrap_or(u32::MAX);
    if statuses.is_empty() {
        return Ok([200, 301, 302].map(|status| Valid { status, seconds }).into());
    }
    let status_of = |word: &Word| match units::parse_number(&word.text) {
        _ if &**word.text == b"any" => Ok(0),
        Some(status @ 100..=599) => Ok(status as u16),
        _ => Err(Diagnostic::emerg(format!("invalid status \"{}\"", word.text)).at(word.span)),
    };
    statuses.iter().map(|word| status_of(word).map(|status| Valid { status, seconds })).collect()
}

/// Parses `proxy_cache_methods METHOD ...;`.
pub(crate) fn cache_methods(
    builder: &mut Builder,
    statement: &Statement,
    earlier: Option<&u32>,
) -> Result<u32, Diagnostic> {
    let words = [Method::Get, Method::Head, Method::Post].map(method_bit);
    let words = [("GET", words[0]), ("HEAD", words[1]), ("POST", words[2])];
    values::bitmask(statement, &words, earlier, &mut builder.diagnostics)
}

/// Parses texts, of which one that is neither empty nor `0` fulfils the condition.
pub(crate) fn conditions(builder: &mut Builder, statement: &Statement) -> Result<Vec<Template>, Diagnostic> {
    statement.args.iter().map(|word| builder.http_mut().template(word)).collect()
}

/// Parses `proxy_cache_use_stale`.
pub(crate) fn cache_use_stale(
    builder: &mut Builder,
    statement: &Statement,
    earlier: Option<&RetryOn>,
) -> Result<RetryOn, Diagnostic> {
    let words = RetryOn::WORDS.iter().filter(|(text, _)| !matches!(*text, "non_idempotent" | "denied"));
    crate::http::upstream_rows::retry_on(builder, statement, earlier, &words.copied().collect::<Vec<_>>())
}

/// Parses `proxy_cache_conformance`.
pub(crate) fn cache_conformance(statement: &Statement) -> Result<Conformance, Diagnostic> {
    let choices = [("mixed", Conformance::Mixed), ("nginx", Conformance::Nginx), ("rfc9111", Conformance::Rfc9111)];
    values::enumeration(statement, &choices)
}

/// Default maximum of a heuristic freshness lifetime: a day, the age above which caches used to add a warning (RFC 9111
/// §4.2.2).
const HEURISTIC_SECONDS_MAX: u32 = 86_400;

/// Parses `proxy_cache_heuristic off | PERCENT% [max=TIME];`.
pub(crate) fn cache_heuristic(statement: &Statement) -> Result<Option<Heuristic>, Diagnostic> {
    let [first, rest @ ..] = &statement.args[..] else { unreachable!("it takes at least one") };
    let invalid = |word: &Word| Diagnostic::emerg(format!("invalid value \"{}\"", word.text)).at(word.span);
    if &**first.text == b"off" {
        return rest.first().map_or(Ok(None), |word| Err(invalid(word)));
    }
    let percent =
        first.text.strip_suffix(b"%").and_then(units::parse_number).filter(|percent| (1..=100).contains(percent));
    let percent = percent
        .ok_or_else(|| invalid(first).hint("a percentage of the time since the last modification: 1% to 100%"))?;
    let mut seconds_max = HEURISTIC_SECONDS_MAX;
    if let Some(word) = rest.first() {
        let time = word.text.strip_prefix(b"max=").and_then(units::parse_time_seconds).ok_or_else(|| invalid(word))?;
        seconds_max = u32::try_from(time.as_secs()).unwrap_or(u32::MAX);
    }
    Ok(Some(Heuristic { percent: percent as u32, seconds_max }))
}

/// Parses `proxy_store on|off|PATH;`.
pub(crate) fn store(builder: &mut Builder, statement: &Statement) -> Result<StoreTo, Diagnostic> {
    let word = &statement.args[0];
    Ok(match &**word.text {
        b"off" => StoreTo::Off,
        b"on" => StoreTo::Document,
        b"" => return Err(Diagnostic::emerg("empty path").at(word.span)),
        _ => StoreTo::Path(builder.http_mut().template(word)?, builder.full_path(b"").into()),
    })
}

/// Parses `proxy_store_access user:RIGHTS [group:RIGHTS] [all:RIGHTS];`.
pub(crate) use gale_http::files::placing::parse_permissions as store_access;

/// Completes the settings of a scope; `parent` are those of the outer scope. `default_key` is the key if none is
/// configured.
///
/// # Errors
/// The scope has both a cache and `…_store`.
pub(crate) fn complete<P: HasGroup<CacheSettings> + HasGroup<StoreSettings>>(
    upstream: &mut UpstreamOf<P>,
    parent: Option<&UpstreamOf<P>>,
    builder: &mut Builder,
    default_key: Option<&str>,
) -> Result<(), Diagnostic> {
    let prefix = P::PREFIX;
    if upstream.store.is_on() && upstream.cache.is_on() {
        let store = upstream.store.to.span();
        let own_store = store != parent.and_then(|parent| parent.store.to.span());
        let own_cache = upstream.cache.choice.span() != parent.and_then(|parent| parent.cache.choice.span());
        match (own_store, own_cache) {
            (true, true) => {
                let message = format!("\"{prefix}_store\" directive is incompatible with \"{prefix}_cache\"");
                return Err(Diagnostic::emerg(message).at_opt(store));
            }
            // The setting of the inner scope wins.
            (true, false) => upstream.group_mut::<CacheSettings>().choice.set(CacheChoice::Off, store),
            (false, _) => upstream.group_mut::<StoreSettings>().to.set(StoreTo::Off, store),
        }
    }
    let settings: &mut CacheSettings = upstream.group_mut();
    if settings.is_on() && !settings.key.is_set() {
        match default_key {
            Some(key) => {
                let key = key_of(builder, &Statement::synthetic(key, Vec::new()).name)?;
                settings.key.set(key, None);
            }
            None => {
                let message = format!("no \"{prefix}_cache_key\" for \"{prefix}_cache\"");
                let hint = "without a key, nothing is cached here";
                builder.note([Diagnostic::warn(message).at_opt(settings.choice.span()).hint(hint)]);
            }
        }
    }
    Ok(())
}
