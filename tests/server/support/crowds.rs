//! The limit of descriptors, and a lock for tests that use nearly all of them.

use std::sync::{Mutex, MutexGuard, Once, PoisonError};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Enough for the largest crowd and everything else.
const WANTED: u64 = 65_536;

/// Raises the limit of descriptors of this process and its children to [`WANTED`], as far as the system allows: many
/// programs start with a limit of a thousand.
pub(super) fn raise_descriptor_limit() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        if getrlimit(Resource::Nofile).maximum.is_some_and(|maximum| maximum < WANTED) {
            // Root may also raise the hard limit, unless that is forbidden.
            let _ = setrlimit(Resource::Nofile, Rlimit { current: Some(WANTED), maximum: Some(WANTED) });
        }
        let limit = getrlimit(Resource::Nofile);
        let current = limit.maximum.map_or(WANTED, |maximum| maximum.min(WANTED));
        // Never lower than the limit at the start.
        let current = limit.current.map_or(current, |given| given.max(current));
        setrlimit(Resource::Nofile, Rlimit { current: Some(current), ..limit }).expect("up to the maximum");
    });
}

/// Limit of descriptors of this process and of each server that it starts.
pub fn descriptor_limit() -> usize {
    raise_descriptor_limit();
    getrlimit(Resource::Nofile).current.and_then(|limit| usize::try_from(limit).ok()).unwrap_or(usize::MAX)
}

/// While this guard is held no other test opens thousands of descriptors: all tests share those of this process.
pub fn turn_of_crowds() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}
