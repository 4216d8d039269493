//! Zones of a configuration by name, and how they are kept over a reload.
//!
//! A zone is a value of any type: a [`Zone`](super::Zone) of counters, or any state that a module shares between
//! workers. The zones of the serving configuration are kept. One that was removed and declared again begins empty, even
//! if requests in flight still use the old one, since only the configurations that name a zone keep it alive.

use std::any::Any;
use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Weak};

use parking_lot::Mutex;

/// Reason why a zone cannot be created.
#[derive(Debug, PartialEq, Eq)]
pub enum ZoneError {
    /// A kept zone has other keys, described by this text, so its entries would be misinterpreted.
    OtherKey(Box<[u8]>),
    /// There is not enough memory.
    NoMemory,
}

/// Zones of one configuration.
#[derive(Default)]
pub struct NamedZones {
    zones: Vec<Named>,
    /// Zones with known occupancy.
    tables: Vec<NamedTable>,
    /// Counters by kind and name.
    figures: HashMap<&'static str, NamedFigures>,
}

type NamedTable = (Box<[u8]>, Arc<dyn Occupied>);

type NamedFigures = BTreeMap<Box<[u8]>, Arc<dyn Any + Send + Sync>>;

/// A zone with a known occupancy.
pub trait Occupied: Send + Sync {
    /// Current occupancy.
    fn occupancy(&self) -> Occupancy;
}

/// Occupancy of a zone.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Occupancy {
    /// Number of entries.
    pub entries: usize,
    /// Bytes used by them.
    pub bytes_used: usize,
    /// Total bytes.
    pub bytes: usize,
}

struct Named {
    kind: &'static str,
    name: Box<[u8]>,
    bytes: usize,
    key_text: Box<[u8]>,
    zone: Arc<dyn Any + Send + Sync>,
}

/// Zones of the serving configuration.
static SERVING: Mutex<Weak<NamedZones>> = Mutex::new(Weak::new());

impl NamedZones {
    /// The serving configuration's zone with this kind, name, size and type, or a new one from `make`, which may use
    /// `bytes` of memory. `key_text` describes its keys, if it has any.
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
        let known = serving.iter().flat_map(|zones| &zones.zones).find(is_same);
        let zone = match known.and_then(|known| Some((known, Arc::clone(&known.zone).downcast::<Z>().ok()?))) {
            Some((known, _)) if *known.key_text != *key_text => {
                return Err(ZoneError::OtherKey(known.key_text.clone()));
            }
            Some((_, zone)) => zone,
            None => {
                // Checked as one allocation, because the parts are allocated without error handling.
                Vec::<u8>::new().try_reserve_exact(bytes).map_err(|_| ZoneError::NoMemory)?;
                Arc::new(make(bytes))
            }
        };
        self.zones.push(Named { kind, name: name.into(), bytes, key_text: key_text.into(), zone: zone.clone() });
        Ok(zone)
    }

    /// Counters with this name, kind and type; those of the serving configuration are kept. A name always means the
    /// same counters.
    pub fn figures<F: Any + Default + Send + Sync>(&mut self, kind: &'static str, name: &[u8]) -> Arc<F> {
        let find = |zones: &NamedZones| {
            let known = zones.figures.get(kind).and_then(|named| named.get(name))?;
            Arc::clone(known).downcast::<F>().ok()
        };
        if let Some(own) = find(self) {
            return own;
        }
        let serving = SERVING.lock().upgrade();
        let figures = serving.and_then(|zones| find(&zones)).unwrap_or_default();
        let named = self.figures.entry(kind).or_default();
        named.insert(name.into(), figures.clone());
        figures
    }

    /// Counters of this kind, sorted by name.
    pub fn figures_of<F: Any + Send + Sync>(&self, kind: &'static str) -> impl Iterator<Item = (&[u8], Arc<F>)> {
        let named = self.figures.get(kind).into_iter().flatten();
        named.filter_map(|(name, figures)| Some((&**name, Arc::clone(figures).downcast().ok()?)))
    }

    /// Zones of this type.
    pub fn of_type<Z: Any + Send + Sync>(&self) -> impl Iterator<Item = (&[u8], Arc<Z>)> {
        self.zones.iter().filter_map(|named| Some((&*named.name, Arc::clone(&named.zone).downcast().ok()?)))
    }

    /// Adds a zone with known occupancy.
    pub(crate) fn add_table(&mut self, name: &[u8], table: Arc<dyn Occupied>) {
        self.tables.push((name.into(), table));
    }

    /// Occupancy of the zones where it is known.
    pub fn tables(&self) -> impl Iterator<Item = (&[u8], Occupancy)> {
        self.tables.iter().map(|(name, table)| (&**name, table.occupancy()))
    }

    /// Makes these the zones to keep.
    pub fn serve(self: &Arc<Self>) {
        *SERVING.lock() = Arc::downgrade(self);
    }

    /// The same, unless a configuration serves already: loops also start for one that may still be refused.
    pub fn serve_first(self: &Arc<Self>) {
        let mut serving = SERVING.lock();
        if serving.strong_count() == 0 {
            *serving = Arc::downgrade(self);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU32;

    use super::super::Zone;
    use super::*;

    const BYTES: usize = 32 * 1024;

    fn get(zones: &mut NamedZones, name: &str, bytes: usize, key: &str) -> Result<Arc<Zone<u32>>, ZoneError> {
        zones.get("test", name.as_bytes(), bytes, key.as_bytes(), Zone::new)
    }

    /// The serving configuration is global to the process, so this is one test.
    #[test]
    fn zones_of_the_serving_configuration_are_reused() {
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

        // The second configuration may still be refused, so its zones do not count.
        Arc::new(second).serve_first();
        let mut without = NamedZones::default();
        get(&mut without, "other", BYTES, "$a").unwrap();
        let text = without.get("test", b"text", BYTES, b"", |bytes| Mutex::new(format!("{bytes}"))).unwrap();
        let without = Arc::new(without);
        without.serve();
        // It was removed: other keys are no error, even though a reference remains.
        let mut third = NamedZones::default();
        assert!(!Arc::ptr_eq(&zone, &get(&mut third, "one", BYTES, "$b").unwrap()));
        assert!(!Arc::ptr_eq(&zone, &get(&mut third, "one", BYTES, "$a").unwrap()));

        // Any type is kept.
        let found = third.get("test", b"text", BYTES, b"", |_| Mutex::new(String::new())).unwrap();
        assert!(Arc::ptr_eq(&text, &found) && *found.lock() == BYTES.to_string());

        // Counters are kept under their kind, name and type as well.
        let figures = third.figures::<AtomicU32>("requests", b"one");
        assert!(Arc::ptr_eq(&figures, &third.figures("requests", b"one")));
        assert!(!Arc::ptr_eq(&figures, &third.figures("requests", b"two")));
        let third = Arc::new(third);
        third.serve();
        let mut fourth = NamedZones::default();
        assert!(Arc::ptr_eq(&figures, &fourth.figures("requests", b"one")));
        assert!(!Arc::ptr_eq(&figures, &fourth.figures("sessions", b"one")));
        let names = |zones: &NamedZones| -> Vec<Vec<u8>> {
            zones.figures_of::<AtomicU32>("requests").map(|(name, _)| name.to_vec()).collect()
        };
        assert_eq!((names(&third), names(&fourth)), (vec![b"one".to_vec(), b"two".to_vec()], vec![b"one".to_vec()]));

        let (address, weak) = (Arc::as_ptr(&zone), Arc::downgrade(&zone));
        drop((first, zone));
        assert!(weak.upgrade().is_none(), "{address:?} is still held");
    }

    #[test]
    fn more_memory_than_there_can_be_is_an_error() {
        assert_eq!(get(&mut NamedZones::default(), "huge", isize::MAX as usize, "$a").err(), Some(ZoneError::NoMemory));
    }
}
