//! The place of a cache and its bounds: the parameters of `proxy_cache_path`.
//! (<https://nginx.org/en/docs/http/ngx_http_proxy_module.html#proxy_cache_path>)

use std::path::PathBuf;
use std::time::Duration;

use super::key::Levels;

/// The parameters of a path that a reload may change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PathOptions {
    /// `inactive`: time after which an entry that is not requested is removed.
    pub inactive: Duration,
    /// `max_size` in bytes.
    pub max_size: u64,
    /// `min_free` in bytes.
    pub min_free: u64,
    /// `manager_files`, `manager_sleep`, `manager_threshold`
    pub manager: Pace,
    /// `loader_files`, `loader_sleep`, `loader_threshold`
    pub loader: Pace,
    /// `purger`: remove files of purged entries in the background.
    pub purger: bool,
    /// `purger_files`, `purger_sleep`, `purger_threshold`
    pub purging: Pace,
}

/// The size of a service's steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pace {
    /// Files per step.
    pub files: u64,
    /// The pause after a step.
    pub sleep: Duration,
    /// Maximum duration of a step.
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
    /// The path of the directory.
    pub path: PathBuf,
    /// `levels`
    pub levels: Levels,
}
