//! Descriptors: how many this process may have, and whose turn it is to take nearly all of them.

use std::sync::{Mutex, MutexGuard, Once, PoisonError};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Enough for the largest crowd, and for what else there is.
const WANTED: u64 = 65_536;

/// Lets this process, and what it starts from now on, have as many descriptors as the system allows, and as are wanted:
/// many programs are given a thousand.
pub(super) fn raise_descriptor_limit() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        if getrlimit(Resource::Nofile).maximum.is_some_and(|maximum| maximum < WANTED) {
            // Root may raise it further, where that is not forbidden.
            let _ = setrlimit(Resource::Nofile, Rlimit { current: Some(WANTED), maximum: Some(WANTED) });
        }
        let limit = getrlimit(Resource::Nofile);
        let current = limit.maximum.map_or(WANTED, |maximum| maximum.min(WANTED));
        // Never less than it was given.
        let current = limit.current.map_or(current, |given| given.max(current));
        setrlimit(Resource::Nofile, Rlimit { current: Some(current), ..limit }).expect("up to the maximum");
    });
}

/// How many descriptors this process, and each server that it starts, may have.
pub fn descriptor_limit() -> usize {
    raise_descriptor_limit();
    getrlimit(Resource::Nofile).current.and_then(|limit| usize::try_from(limit).ok()).unwrap_or(usize::MAX)
}

/// Until it is dropped no other test opens thousands of descriptors: all tests share those of this process.
pub fn turn_of_crowds() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}
