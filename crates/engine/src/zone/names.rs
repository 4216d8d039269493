//! The zones of this process, by name: how one goes on over a reload.
//!
//! Nothing here keeps a zone alive: it belongs to the configurations that name it.

use std::any::Any;
use std::sync::{Arc, Weak};

use parking_lot::Mutex;

use super::Zone;

/// Why a zone cannot be had.
#[derive(Debug, PartialEq, Eq)]
pub enum ZoneError {
    /// It goes on from before, with these words about its keys: other ones would mean something else.
    OtherKey(Box<[u8]>),
    /// There is not so much memory.
    NoMemory,
}

struct Named {
    kind: &'static str,
    name: Box<[u8]>,
    bytes: usize,
    key_text: Box<[u8]>,
    zone: Weak<dyn Any + Send + Sync>,
}

static NAMED: Mutex<Vec<Named>> = Mutex::new(Vec::new());

/// The zone of this kind, name and size that a configuration of this process has, or a new one. `key_text` says what its
/// keys are made of.
///
/// # Errors
/// See [`ZoneError`].
pub fn named<V: Send + 'static>(
    kind: &'static str,
    name: &[u8],
    bytes: usize,
    key_text: &[u8],
) -> Result<Arc<Zone<V>>, ZoneError> {
    let mut all = NAMED.lock();
    all.retain(|known| known.zone.strong_count() > 0);
    let is_same = |known: &&Named| known.kind == kind && *known.name == *name && known.bytes == bytes;
    // The youngest: it is the one in use, if an older one is still held by old requests.
    if let Some(known) = all.iter().rev().find(is_same)
        && let Some(zone) = known.zone.upgrade().and_then(|zone| zone.downcast::<Zone<V>>().ok())
    {
        return match *known.key_text == *key_text {
            true => Ok(zone),
            false => Err(ZoneError::OtherKey(known.key_text.clone())),
        };
    }
    // Asked for as one piece first, because it is allocated in several that must not fail.
    Vec::<u8>::new().try_reserve_exact(bytes).map_err(|_| ZoneError::NoMemory)?;
    let zone = Arc::new(Zone::new(bytes));
    let any: Arc<dyn Any + Send + Sync> = zone.clone();
    all.push(Named { kind, name: name.into(), bytes, key_text: key_text.into(), zone: Arc::downgrade(&any) });
    Ok(zone)
}

#[cfg(test)]
mod tests {
    use super::*;

    const BYTES: usize = 32 * 1024;

    fn get(name: &str, bytes: usize, key: &str) -> Result<Arc<Zone<u32>>, ZoneError> {
        named("test", name.as_bytes(), bytes, key.as_bytes())
    }

    #[test]
    fn a_zone_goes_on_while_somebody_has_it() {
        let first = get("goes on", BYTES, "$a").unwrap();
        assert!(Arc::ptr_eq(&first, &get("goes on", BYTES, "$a").unwrap()));
        assert!(!Arc::ptr_eq(&first, &get("other", BYTES, "$a").unwrap()));
        let address = Arc::as_ptr(&first);
        let weak = Arc::downgrade(&first);
        drop(first);
        assert!(weak.upgrade().is_none(), "{address:?} is still held");
    }

    #[test]
    fn another_size_or_kind_is_another_zone_and_another_key_an_error() {
        let first = get("sizes", BYTES, "$a").unwrap();
        let second = get("sizes", 2 * BYTES, "$a").unwrap();
        assert!(!Arc::ptr_eq(&first, &second));
        assert!(Arc::ptr_eq(&first, &get("sizes", BYTES, "$a").unwrap()));
        assert!(named::<u32>("another test", b"sizes", BYTES, b"$b").is_ok());
        assert_eq!(get("sizes", BYTES, "$b").err(), Some(ZoneError::OtherKey(b"$a".as_slice().into())));
    }

    #[test]
    fn more_memory_than_there_can_be_is_an_error() {
        assert_eq!(get("huge", isize::MAX as usize, "$a").err(), Some(ZoneError::NoMemory));
    }
}
