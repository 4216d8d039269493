//! The zones of a configuration, by name: how one goes on over a reload.
//!
//! A zone is a value of any type: a [`Zone`](super::Zone) of counters, or whatever a module shares between its workers.
//! What goes on is what the configuration has that serves. A zone that was removed and comes back begins anew, even
//! while requests of before still hold what it was: nobody but the configurations that name a zone keeps it alive.

use std::any::Any;
use std::sync::{Arc, Weak};

use parking_lot::Mutex;

/// Why a zone cannot be had.
#[derive(Debug, PartialEq, Eq)]
pub enum ZoneError {
    /// It goes on from before, with these words about its keys: other ones would mean something else.
    OtherKey(Box<[u8]>),
    /// There is not so much memory.
    NoMemory,
}

/// The zones that one configuration has.
#[derive(Default)]
pub struct NamedZones(Vec<Named>);

struct Named {
    kind: &'static str,
    name: Box<[u8]>,
    bytes: usize,
    key_text: Box<[u8]>,
    zone: Arc<dyn Any + Send + Sync>,
}

/// Those of the configuration that serves.
static SERVING: Mutex<Weak<NamedZones>> = Mutex::new(Weak::new());

impl NamedZones {
    /// The zone of this kind, name, size and type that the configuration which serves has, or the one that `make`
    /// makes, which is to take `bytes` of memory at most. `key_text` says what its keys are made of, if it has any.
    ///
    /// # Errors
    /// See [`ZoneError`].
    pub fn get<Z: Any + Send + Sync>(
        &mut self,
        kind: &'static str,
        name: &[u8],
        bytes: usize,
        key_text: &[u8],
        make: impl FnOnce(usize) -> Z,
    ) -> Result<Arc<Z>, ZoneError> {
        let serving = SERVING.lock().upgrade();
        let is_same = |known: &&Named| known.kind == kind && *known.name == *name && known.bytes == bytes;
        let known = serving.iter().flat_map(|zones| &zones.0).find(is_same);
        let zone = match known.and_then(|known| Some((known, Arc::clone(&known.zone).downcast::<Z>().ok()?))) {
            Some((known, _)) if *known.key_text != *key_text => {
                return Err(ZoneError::OtherKey(known.key_text.clone()));
            }
            Some((_, zone)) => zone,
            None => {
                // Asked for as one piece first, because it is allocated in several that must not fail.
                Vec::<u8>::new().try_reserve_exact(bytes).map_err(|_| ZoneError::NoMemory)?;
                Arc::new(make(bytes))
            }
        };
        self.0.push(Named { kind, name: name.into(), bytes, key_text: key_text.into(), zone: zone.clone() });
        Ok(zone)
    }

    /// From now on these are the zones that go on.
    pub fn serve(self: &Arc<Self>) {
        *SERVING.lock() = Arc::downgrade(self);
    }

    /// The same, unless a configuration serves already: loops start for one that may still be refused.
    pub fn serve_first(self: &Arc<Self>) {
        let mut serving = SERVING.lock();
        if serving.strong_count() == 0 {
            *serving = Arc::downgrade(self);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::Zone;
    use super::*;

    const BYTES: usize = 32 * 1024;

    fn get(zones: &mut NamedZones, name: &str, bytes: usize, key: &str) -> Result<Arc<Zone<u32>>, ZoneError> {
        zones.get("test", name.as_bytes(), bytes, key.as_bytes(), Zone::new)
    }

    /// What serves is the process's: one test, so that no two set it at the same time.
    #[test]
    fn what_goes_on_is_what_the_configuration_that_serves_has() {
        let mut first = NamedZones::default();
        let zone = get(&mut first, "one", BYTES, "$a").unwrap();
        let first = Arc::new(first);
        first.serve_first();

        let mut second = NamedZones::default();
        assert!(Arc::ptr_eq(&zone, &get(&mut second, "one", BYTES, "$a").unwrap()));
        assert!(!Arc::ptr_eq(&zone, &get(&mut second, "one", 2 * BYTES, "$a").unwrap()));
        assert!(!Arc::ptr_eq(&zone, &get(&mut second, "other", BYTES, "$a").unwrap()));
        assert!(second.get("another test", b"one", BYTES, b"$b", Zone::<u32>::new).is_ok());
        // Another type under the same name is another zone.
        let names = second.get("test", b"one", BYTES, b"$a", |_| Mutex::new(vec!["a"])).unwrap();
        names.lock().push("b");
        let refused = get(&mut second, "one", BYTES, "$b").err();
        assert_eq!(refused, Some(ZoneError::OtherKey(b"$a".as_slice().into())));

        // The second one may still be refused: what it has does not count.
        Arc::new(second).serve_first();
        let mut without = NamedZones::default();
        get(&mut without, "other", BYTES, "$a").unwrap();
        let text = without.get("test", b"text", BYTES, b"", |bytes| Mutex::new(format!("{bytes}"))).unwrap();
        let without = Arc::new(without);
        without.serve();
        // It was removed, and although somebody still has it, another key is nobody's mistake.
        let mut third = NamedZones::default();
        assert!(!Arc::ptr_eq(&zone, &get(&mut third, "one", BYTES, "$b").unwrap()));
        assert!(!Arc::ptr_eq(&zone, &get(&mut third, "one", BYTES, "$a").unwrap()));

        // Any type goes on.
        let found = third.get("test", b"text", BYTES, b"", |_| Mutex::new(String::new())).unwrap();
        assert!(Arc::ptr_eq(&text, &found) && *found.lock() == BYTES.to_string());

        let (address, weak) = (Arc::as_ptr(&zone), Arc::downgrade(&zone));
        drop((first, zone));
        assert!(weak.upgrade().is_none(), "{address:?} is still held");
    }

    #[test]
    fn more_memory_than_there_can_be_is_an_error() {
        assert_eq!(get(&mut NamedZones::default(), "huge", isize::MAX as usize, "$a").err(), Some(ZoneError::NoMemory));
    }
}
