//! The cache's state for a request that is passed on.

use std::rc::Rc;
use std::sync::Arc;

use gale_http_cache::CacheZone;
use gale_http_cache::key::Id;
use gale_http_cache::memory::Hot;
use gale_http_cache::search::SearchKey;
use gale_http_cache::zone::Lead;

/// The cache's state for a request that is passed on.
pub struct Caching {
    pub(crate) zone: Arc<CacheZone>,
    /// The sum of the key.
    pub(crate) primary: Id,
    pub(crate) key: Rc<[u8]>,
    /// The request's own key; `key` may be one that equivalent queries share.
    pub(crate) own: Rc<[u8]>,
    /// The parts of the request's own key, if `No-Vary-Search` is on.
    pub(crate) search: Option<Rc<SearchKey>>,
    /// The id of the lookup: that of the key, or of a variant.
    pub(crate) id: Id,
    /// The right to store the response.
    pub(crate) lead: Option<Lead>,
    /// True if the response may be stored, even without a lead yet.
    pub(crate) may_store: bool,
    /// A stale response.
    pub(crate) stale: Option<Rc<Hot>>,
    /// True if the request refuses a fresh response.
    pub(crate) is_by_request: bool,
    /// True if a fresh response is stored whose disk is too slow: other requests read this response while it arrives,
    /// and it is not stored again.
    pub(crate) is_stored: bool,
    /// `cache_normalize_language`
    pub(crate) normalizes_language: bool,
}
