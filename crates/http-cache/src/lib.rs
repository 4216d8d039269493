//! The cache of HTTP responses (`proxy_cache` and its counterparts): rules, keys, entries, storage, eviction, purges.
//!
//! ```text
//!   policy     what may be stored, and for how long: pure functions over heads and `now`
//!   key        sums that identify entries             search     keys of responses with No-Vary-Search
//!   sums       checks of a body, block by block       format     the file of an entry: a checked header
//!   index      all entries, in memory                 eviction   choice of the entry to evict
//!   fill       a response that arrives, and is read   store      opening and writing files, in a pool
//!   memory     a worker's most requested entries      purges     purges by key, prefix and tag
//!   zone       all of it together, by the zone's name: looking up, committing, removing
//!   journal    the index on disk, for a restart       services   loader, manager and purger
//!   directory  a cache's place and bounds              settings   of a location
//! ```
//!
//! Nothing here knows servers: `http-upstream/src/caching/` consults the cache before it asks a server, and stores the
//! response.

pub mod directory;
pub mod eviction;
pub mod fill;
pub mod format;
pub mod index;
pub mod journal;
pub mod key;
pub mod memory;
pub mod policy;
pub mod purges;
pub mod search;
pub mod services;
pub mod settings;
#[cfg(test)]
#[path = "../../../tests/shared/skips.rs"]
mod skips;
pub mod store;
pub mod sums;
#[cfg(test)]
#[path = "../../../tests/shared/zipf.rs"]
mod zipf;
pub mod zone;

pub use zone::CacheZone;
