//! Settings of caches: of each path, and of each location.
//! (<https://nginx.org/en/docs/http/ngx_http_proxy_module.html#proxy_cache_path>)

use std::sync::Arc;
use std::time::Duration;

use bstr::BString;
use gale_config::Setting;
use gale_engine::configuration::ZoneRef;
use gale_http::request::Request;
use gale_http::request::variables::template::{Template, any_is_true};
use gale_protocol::request::Method;

use super::policy::Conformance;
use super::policy::freshness::Heuristic;
use super::search::{SearchKey, split};
use super::zone::CacheZone;

/// `proxy_cache_path`: the place of a cache and its bounds.
pub struct CachePath {
    /// The name of its zone.
    pub name: BString,
    /// The cache itself, which continues over a reload.
    pub cache: Arc<CacheZone>,
}

/// `proxy_cache`: the cache of a location.
#[derive(Clone)]
pub enum CacheChoice {
    /// `off`
    Off,
    /// The cache of this zone.
    Zone(ZoneRef<CachePath>),
    /// The cache of the zone with the evaluated name; none if that is empty or `off`.
    Named(Template),
}

/// `proxy_cache_valid`: lifetime of responses with a status.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Valid {
    /// The status, 0 for any.
    pub status: u16,
    /// Lifetime, in seconds.
    pub seconds: u32,
}

/// `proxy_cache_key`
#[derive(Clone)]
pub struct CacheKey {
    /// The text.
    pub template: Template,
    /// True if the key distinguishes users, so that no response to one user reaches another.
    pub tells_users: bool,
    /// True if the key contains `$slice_range`, so that each part of a response has its own key.
    pub tells_slices: bool,
    /// Position of the query in the key, if it is separate.
    pub search: Option<QueryInKey>,
}

/// Position of the query in a key.
#[derive(Clone)]
pub struct QueryInKey {
    /// The part before it.
    pub before: Template,
    /// The query, or the target that ends with it.
    pub query: Template,
    /// True if `query` includes the path.
    pub has_path: bool,
    /// True if the question mark is only there with a query.
    pub lacks_mark: bool,
    /// The part behind it.
    pub after: Template,
}

impl QueryInKey {
    /// The parts of a request's key.
    pub fn key(&self, request: &Request) -> Option<SearchKey> {
        let mut before = self.before.evaluate(request);
        let mut query = self.query.evaluate(request);
        if self.has_path {
            let (path, rest) = split(&query);
            before.extend_from_slice(path);
            query = rest.to_vec();
        }
        if self.lacks_mark {
            before.push(b'?');
        }
        SearchKey::new(before, query, self.after.evaluate(request))
    }
}

/// Cache settings of a location. The names are those of the directives, without the prefix of their module.
#[derive(Default)]
pub struct CacheSettings {
    /// `cache`
    pub choice: Setting<CacheChoice>,
    /// All caches of the block, for names with variables.
    pub paths: Setting<Vec<ZoneRef<CachePath>>>,
    /// `cache_key`
    pub key: Setting<CacheKey>,
    /// `cache_valid`
    pub valid: Setting<Vec<Vec<Valid>>>,
    /// `cache_heuristic`
    pub heuristic: Setting<Option<Heuristic>>,
    /// `cache_methods`: bits of [`Method`].
    pub methods: Setting<u32>,
    /// `cache_min_uses`
    pub min_uses: Setting<u64>,
    /// `cache_bypass`
    pub bypass: Setting<Vec<Vec<Template>>>,
    /// `no_cache`
    pub no_cache: Setting<Vec<Vec<Template>>>,
    /// `cache_lock`
    pub lock: Setting<bool>,
    /// `cache_lock_timeout`
    pub lock_timeout: Setting<Duration>,
    /// `cache_lock_age`
    pub lock_age: Setting<Duration>,
    /// `cache_background_update`
    pub background_update: Setting<bool>,
    /// `cache_revalidate`
    pub revalidate: Setting<bool>,
    /// `cache_convert_head`
    pub convert_head: Setting<bool>,
    /// `cache_max_range_offset` in bytes.
    pub max_range_offset: Setting<u64>,
    /// `cache_conformance`
    pub conformance: Setting<Conformance>,
    /// `cache_no_vary_search`
    pub no_vary_search: Setting<bool>,
    /// `cache_normalize_language`
    pub normalize_language: Setting<bool>,
    /// `cache_disk_timeout`: maximum time for which a request waits for the disk.
    pub disk_timeout: Setting<Duration>,
    /// `cache_purge`
    pub purge: Setting<Vec<Vec<Template>>>,
    /// `cache_purge_soft`
    pub purge_soft: Setting<bool>,
    /// `cache_tag_header`: name of the response field with the tags.
    pub tag_header: Setting<BString>,
    /// `cache_purge_tags`: the tags to purge.
    pub purge_tags: Setting<Template>,
    /// `cache_status_header`: name of this cache in `Cache-Status`.
    pub status_name: Setting<BString>,
}

impl CacheSettings {
    /// True if a cache is configured.
    pub fn is_on(&self) -> bool {
        self.choice.get_opt().is_some_and(|choice| !matches!(choice, CacheChoice::Off))
    }

    /// True if requests with this method are looked up.
    pub fn takes(&self, method: Method) -> bool {
        self.is_on()
            && match method {
                Method::Get | Method::Head => true,
                method => self.methods.get_opt().is_some_and(|methods| methods & method_bit(method) != 0),
            }
    }

    /// True if the key distinguishes users.
    pub fn key_tells_users(&self) -> bool {
        self.key.get_opt().is_some_and(|key| key.tells_users)
    }

    /// True if the key distinguishes slices.
    pub fn key_tells_slices(&self) -> bool {
        self.key.get_opt().is_some_and(|key| key.tells_slices)
    }

    /// The parts of a request's key, if its query may be normalised: `No-Vary-Search` is on, and the query has a
    /// position of its own in the key.
    pub fn search_key(&self, request: &Request) -> Option<SearchKey> {
        if !*self.no_vary_search.get() {
            return None;
        }
        self.key.get_opt()?.search.as_ref()?.key(request)
    }

    /// Lifetime that `cache_valid` gives to a status, in seconds.
    pub fn valid_for(&self, status: u16) -> Option<u32> {
        let rows = self.valid.get_opt()?;
        rows.iter().flatten().find(|valid| valid.status == 0 || valid.status == status).map(|valid| valid.seconds)
    }
}

/// True if one of the conditions holds: a text that is neither empty nor `0`.
pub fn holds(conditions: &Setting<Vec<Vec<Template>>>, request: &Request) -> bool {
    conditions.get_opt().is_some_and(|conditions| conditions.iter().any(|texts| any_is_true(texts, request)))
}

/// The bit of a method.
pub fn method_bit(method: Method) -> u32 {
    match method {
        Method::Get => 1,
        Method::Head => 2,
        Method::Post => 4,
        _ => 0,
    }
}
