//! The cache of responses: `proxy_cache` and its like. What an entry is, where it is found, how it comes and goes.
//!
//! ```text
//!   policy     what may be stored, and for how long: pure functions over heads and `now`
//!   key        what names an entry                    search     keys of what has No-Vary-Search
//!   sums       checks of a body, block by block       format     the file of an entry: a checked header
//!   index      which entries there are, in memory     eviction   which one goes
//!   fill       a response that comes, and is read     store      opening and writing files, in a pool
//!   memory     what a worker keeps of the hot ones    purges     what was purged, by key, prefix and tag
//!   zone       all of it together, by the zone's name: looking up, committing, removing
//!   journal    the index on disk, for a restart       services   loader, manager and purger
//!   settings   what a configuration says
//! ```
//!
//! Nothing here knows servers: `upstream/caching/` asks here before it asks them, and brings what they answer.

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
pub mod store;
pub mod sums;
pub mod zone;

pub use zone::CacheZone;
