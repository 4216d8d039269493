//! Thread pools of a configuration, by name, with their sizes.
//!
//! A pool belongs to the process. On a reload, a pool of the same name continues with the limits of the newest
//! configuration; one that is in no configuration any more finishes its tasks and ends, which nothing waits for.
//! Building creates the pools but changes none in use; [`ThreadPools::apply`] does that. A thread only starts when
//! there is work. (<https://nginx.org/en/docs/ngx_core_module.html#thread_pool>)

use std::sync::atomic::{AtomicU64, Ordering};

use gale_runtime::ThreadPool;
use parking_lot::Mutex;

use super::ThreadPoolSettings;

/// Pools of a configuration, including `default`.
pub struct ThreadPools {
    pools: Vec<(ThreadPool, Limits)>,
    /// Number of the configuration; later ones are higher.
    serial: u64,
}

/// Limits for all event loops together.
#[derive(Clone, Copy)]
struct Limits {
    threads: usize,
    max_queue: usize,
}

impl ThreadPools {
    /// Creates the pools of these settings, and `default` if it is not among them. The settings are for each event
    /// loop, as nginx's are for each worker process; a pool serves all loops and has the sum.
    pub fn new(settings: &[ThreadPoolSettings], workers: usize) -> ThreadPools {
        static SERIAL: AtomicU64 = AtomicU64::new(1);
        let implicit = ThreadPoolSettings::default();
        let has_default = settings.iter().any(|pool| pool.name == implicit.name);
        let make = |settings: &ThreadPoolSettings| {
            let limits = Limits {
                threads: settings.threads.saturating_mul(workers),
                max_queue: settings.max_queue.saturating_mul(workers),
            };
            (gale_runtime::named_pool(&settings.name, limits.threads, limits.max_queue), limits)
        };
        let pools = settings.iter().chain((!has_default).then_some(&implicit)).map(make).collect();
        ThreadPools { pools, serial: SERIAL.fetch_add(1, Ordering::Relaxed) }
    }

    /// The pool of this name.
    pub fn find(&self, name: &[u8]) -> Option<&ThreadPool> {
        // A linear search is fastest for a handful of names.
        self.pools.iter().map(|(pool, _)| pool).find(|pool| pool.name().as_bytes() == name)
    }

    /// Applies the limits of this configuration, unless a later one was applied already. Does not block.
    pub fn apply(&self) {
        static APPLIED: Mutex<u64> = Mutex::new(0);
        let mut applied = APPLIED.lock();
        if *applied >= self.serial {
            return;
        }
        *applied = self.serial;
        for (pool, limits) in &self.pools {
            pool.resize(limits.threads, limits.max_queue);
        }
    }
}

impl Default for ThreadPools {
    /// `default` alone, for one event loop.
    fn default() -> ThreadPools {
        ThreadPools::new(&[], 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(name: &str, threads: usize, max_queue: usize) -> ThreadPoolSettings {
        ThreadPoolSettings { name: name.to_owned(), threads, max_queue }
    }

    fn limits(pools: &ThreadPools, name: &str) -> (usize, usize) {
        let status = pools.find(name.as_bytes()).expect("it is there").status();
        (status.threads_max, status.queue_max)
    }

    #[test]
    fn pools_go_on_by_name_and_change_when_a_configuration_is_applied() {
        let first = ThreadPools::new(&[settings("engine one", 2, 0), settings("engine two", 3, 30)], 2);
        first.apply();
        assert_eq!((limits(&first, "engine one"), limits(&first, "engine two")), ((4, 0), (6, 60)));
        assert_eq!(limits(&first, "default"), (64, 131_072));
        assert!(first.find(b"engine").is_none());

        let second = ThreadPools::new(&[settings("engine two", 1, 10), settings("default", 5, 50)], 2);
        assert_eq!((limits(&second, "engine two"), limits(&second, "default")), ((6, 60), (64, 131_072)));
        second.apply();
        // A late loop applies the old configuration once more.
        first.apply();
        assert_eq!((limits(&first, "engine two"), limits(&second, "default")), ((2, 20), (10, 100)));
        assert!(second.find(b"engine one").is_none());
        drop(first);
        assert!(gale_runtime::pools().iter().all(|pool| &*pool.name != "engine one"));
    }

    #[test]
    fn limits_beyond_all_numbers_are_no_limits() {
        let pools = ThreadPools::new(&[settings("engine huge", usize::MAX, usize::MAX)], 16);
        assert_eq!(limits(&pools, "engine huge"), (usize::MAX, usize::MAX));
    }
}
