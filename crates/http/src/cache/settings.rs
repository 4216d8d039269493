//! What a configuration says about caches: of each path, and of each location.
//! (<https://nginx.org/en/docs/http/ngx_http_proxy_module.html#proxy_cache_path>)

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use bstr::BString;
use gale_config::Setting;
use gale_engine::configuration::ZoneRef;
use gale_protocol::request::Method;

use super::key::Levels;
use super::policy::Conformance;
use super::policy::freshness::Heuristic;
use super::search::{SearchKey, split};
use super::zone::CacheZone;
use crate::request::Request;
use crate::request::variables::template::{Template, any_is_true};

/// `proxy_cache_path`: where a cache is, and how much of it there may be.
pub struct CachePath {
    /// The name of its zone.
    pub name: BString,
    /// What goes on over a reload.
    pub cache: Arc<CacheZone>,
}

/// The parameters of a path that a reload may change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PathOptions {
    /// `inactive`: what nobody asks for goes after so long.
    pub inactive: Duration,
    /// `max_size` in bytes.
    pub max_size: u64,
    /// `min_free` in bytes.
    pub min_free: u64,
    /// `manager_files`, `manager_sleep`, `manager_threshold`
    pub manager: Pace,
    /// `loader_files`, `loader_sleep`, `loader_threshold`
    pub loader: Pace,
    /// `purger`: whether files of what was purged are looked for.
    pub purger: bool,
    /// `purger_files`, `purger_sleep`, `purger_threshold`
    pub purging: Pace,
}

/// How much a service does at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pace {
    /// Files in a step.
    pub files: u64,
    /// The pause after a step.
    pub sleep: Duration,
    /// How long a step may take.
    pub threshold: Duration,
}

impl Default for Pace {
    fn default() -> Pace {
        Pace { files: 100, sleep: Duration::from_millis(50), threshold: Duration::from_millis(200) }
    }
}

impl Default for PathOptions {
    fn default() -> PathOptions {
        PathOptions {
            inactive: Duration::from_secs(600),
            max_size: u64::MAX,
            min_free: 0,
            manager: Pace::default(),
            loader: Pace::default(),
            purger: false,
            purging: Pace { files: 10, sleep: Duration::from_millis(50), threshold: Duration::from_millis(50) },
        }
    }
}

/// The directory of a cache, and its levels.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CacheDirectory {
    /// The directory.
    pub path: PathBuf,
    /// `levels`
    pub levels: Levels,
}

/// `proxy_cache`: which cache a location has.
#[derive(Clone)]
pub enum CacheChoice {
    /// `off`
    Off,
    /// The one of this zone.
    Zone(ZoneRef<CachePath>),
    /// The one of the zone that this names; none if that is empty or `off`.
    Named(Template),
}

/// `proxy_cache_valid`: for how long responses of some status are fresh.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Valid {
    /// The status, 0 for any.
    pub status: u16,
    /// For how long, in seconds.
    pub seconds: u32,
}

/// `proxy_cache_key`
#[derive(Clone)]
pub struct CacheKey {
    /// The text.
    pub template: Template,
    /// It has what tells users apart: no response to one reaches another.
    pub tells_users: bool,
    /// It has `$slice_range`: a part of a response has a key of its own.
    pub tells_slices: bool,
    /// Where the query is in it, if that is a place of its own.
    pub search: Option<QueryInKey>,
}

/// Where a key has the query.
#[derive(Clone)]
pub struct QueryInKey {
    /// What comes before it.
    pub before: Template,
    /// The query, or the target that it is the end of.
    pub query: Template,
    /// `query` has the path, too.
    pub has_path: bool,
    /// The question mark is there only if there is a query.
    pub lacks_mark: bool,
    /// What comes behind it.
    pub after: Template,
}

impl QueryInKey {
    /// A request's key by its parts.
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

/// What a location says about its cache. The names are those of the directives, without the prefix of their module.
#[derive(Default)]
pub struct CacheSettings {
    /// `cache`
    pub choice: Setting<CacheChoice>,
    /// Every cache that the block has, for names with variables.
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
    /// `cache_disk_timeout`: how long a request waits for its disk.
    pub disk_timeout: Setting<Duration>,
    /// `cache_purge`
    pub purge: Setting<Vec<Vec<Template>>>,
    /// `cache_purge_soft`
    pub purge_soft: Setting<bool>,
    /// `cache_tag_header`: the field of responses that has their tags.
    pub tag_header: Setting<BString>,
    /// `cache_purge_tags`: the tags that a purge is about.
    pub purge_tags: Setting<Template>,
    /// `cache_status_header`: the name that `Cache-Status` has for this cache.
    pub status_name: Setting<BString>,
}

impl CacheSettings {
    /// Whether a cache is configured.
    pub fn is_on(&self) -> bool {
        self.choice.get_opt().is_some_and(|choice| !matches!(choice, CacheChoice::Off))
    }

    /// Whether requests with this method are looked for.
    pub fn takes(&self, method: Method) -> bool {
        self.is_on()
            && match method {
                Method::Get | Method::Head => true,
                method => self.methods.get_opt().is_some_and(|methods| methods & method_bit(method) != 0),
            }
    }

    /// Whether the key tells users apart.
    pub fn key_tells_users(&self) -> bool {
        self.key.get_opt().is_some_and(|key| key.tells_users)
    }

    /// Whether the key tells slices apart.
    pub fn key_tells_slices(&self) -> bool {
        self.key.get_opt().is_some_and(|key| key.tells_slices)
    }

    /// A request's key by its parts, if its query may not matter: `No-Vary-Search` is followed, and the key has a place
    /// for the query.
    pub fn search_key(&self, request: &Request) -> Option<SearchKey> {
        if !*self.no_vary_search.get() {
            return None;
        }
        self.key.get_opt()?.search.as_ref()?.key(request)
    }

    /// For how long `cache_valid` says that a response with this status is fresh, in seconds.
    pub fn valid_for(&self, status: u16) -> Option<u32> {
        let rows = self.valid.get_opt()?;
        rows.iter().flatten().find(|valid| valid.status == 0 || valid.status == status).map(|valid| valid.seconds)
    }
}

/// Whether one of the conditions holds: a text that is neither empty nor `0`.
pub fn holds(conditions: &Setting<Vec<Vec<Template>>>, request: &Request) -> bool {
    conditions.get_opt().is_some_and(|conditions| conditions.iter().any(|texts| any_is_true(texts, request)))
}

/// A method's bit.
pub fn method_bit(method: Method) -> u32 {
    match method {
        Method::Get => 1,
        Method::Head => 2,
        Method::Post => 4,
        _ => 0,
    }
}
