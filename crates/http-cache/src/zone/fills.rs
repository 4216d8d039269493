//! Responses being fetched for a cache: their fetching requests, their readers, and the order of two of the same id.

use std::collections::{BTreeSet, HashMap};
use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use gale_runtime::{Bytes, Moment};
use parking_lot::Mutex;

use super::CacheZone;
use crate::fill::{Fill, Stage};
use crate::format::Meta;
use crate::index::Entry;
use crate::key::Id;

/// Maximum size of response bodies that wait in memory for their files: beyond it, further ones are not stored.
pub const UNSTORED_BYTES_MAX: u64 = 128 << 20;

/// Number of locks for the table of fills.
pub(super) const FILL_SHARDS: usize = 16;

/// All fills that may still be stored, in the table or not.
#[derive(Default)]
pub(super) struct InFlight {
    numbers: BTreeSet<u64>,
    /// Number of fills for each key.
    pub(super) keys: HashMap<Id, usize>,
}

/// The fills of an id.
pub(super) struct Listed {
    /// The latest fill.
    pub(super) fill: Arc<Fill>,
    /// The fill before it. It is readable until it is in its file, or the latest is readable or in its file.
    pub(super) before: Option<Arc<Fill>>,
}

/// The right and duty to ask a server for a response to store. If it is dropped before the head has arrived, another
/// request takes over.
pub struct Lead {
    zone: Arc<CacheZone>,
    fill: Arc<Fill>,
    id: Id,
    is_listed: bool,
    has_begun: bool,
}

impl Lead {
    /// The cache.
    pub fn zone(&self) -> &Arc<CacheZone> {
        &self.zone
    }

    /// The fill.
    pub fn fill(&self) -> &Arc<Fill> {
        &self.fill
    }

    /// Notes that the head has arrived, for an entry of this id. From now on, waiting requests for the same response
    /// read it.
    pub fn begin(mut self, id: Id, meta: Arc<Meta>, length: Option<u64>) -> Arc<Fill> {
        self.has_begun = true;
        if self.is_listed && id != self.id {
            unlist(&mut self.zone.fills_of(&self.id).lock(), &self.fill, &self.id);
        }
        // The latest response is kept, even if it was requested later and is already stored.
        let is_later = |entry: Option<&mut Entry>| entry.is_some_and(|entry| entry.number > self.fill.number);
        let mut fills = self.zone.fills_of(&id).lock();
        if !self.zone.index.with(&id, is_later) {
            list(&mut fills, id, &self.fill);
        }
        drop(fills);
        self.fill.begin(meta, length);
        Arc::clone(&self.fill)
    }
}

impl Drop for Lead {
    fn drop(&mut self) {
        if !self.has_begun {
            self.zone.end(&self.fill, &self.id);
            self.fill.give_up();
        }
    }
}

/// A readable fill that was found under its id. It counts as a reader until it is dropped.
pub struct FoundFill(Arc<Fill>);

impl FoundFill {
    /// Called under the lock of the table, so that the fill is not given up in between.
    fn new(fill: &Arc<Fill>) -> FoundFill {
        fill.join();
        FoundFill(Arc::clone(fill))
    }
}

impl Deref for FoundFill {
    type Target = Arc<Fill>;

    fn deref(&self) -> &Arc<Fill> {
        &self.0
    }
}

impl Drop for FoundFill {
    fn drop(&mut self) {
        self.0.part();
    }
}

/// Bytes in memory that are counted against a limit, to be stored or kept instead.
pub struct Reserved {
    zone: Arc<CacheZone>,
    bytes: u64,
}

impl Drop for Reserved {
    fn drop(&mut self) {
        self.zone.unstored_bytes.fetch_sub(self.bytes, Relaxed);
    }
}

impl CacheZone {
    /// Begins to fetch a response, unless another request has been fetching it for less than `age_max`.
    ///
    /// # Errors
    /// The fill of the other request.
    pub fn begin(self: &Arc<Self>, primary: &Id, id: Id, now: Moment, age_max: Duration) -> Result<Lead, FoundFill> {
        let mut fills = self.fills_of(&id).lock();
        if let Some(Listed { fill, .. }) = fills.get(&id)
            && now.since(fill.began) < age_max
            && !fill.is_purged()
            && match fill.stage() {
                Stage::Asking => true,
                Stage::Coming(..) => fill.can_be_read(),
                Stage::Whole(meta) => !fill.is_kept() && meta.lifetime.is_fresh(gale_runtime::wall_seconds()),
                Stage::Broken | Stage::Nothing => false,
            }
        {
            return Err(FoundFill::new(fill));
        }
        let fill = self.new_fill(*primary, now);
        list(&mut fills, id, &fill);
        drop(fills);
        Ok(Lead { zone: Arc::clone(self), fill, id, is_listed: true, has_begun: false })
    }

    /// Begins to fetch a response even if another request is fetching it.
    pub fn begin_beside(self: &Arc<Self>, primary: &Id, id: Id, now: Moment) -> Lead {
        match self.begin(primary, id, now, Duration::MAX) {
            Ok(lead) => lead,
            Err(_) => {
                let fill = self.new_fill(*primary, now);
                Lead { zone: Arc::clone(self), fill, id, is_listed: false, has_begun: false }
            }
        }
    }

    /// The readable fill of this id, whose response is being fetched or is not in its file yet.
    pub(super) fn readable_fill(&self, id: &Id) -> Option<FoundFill> {
        let fills = self.fills_of(id).lock();
        let listed = fills.get(id)?;
        let mut both = std::iter::once(&listed.fill).chain(&listed.before);
        both.find(|fill| fill.can_be_read() && !fill.is_purged()).map(FoundFill::new)
    }

    /// Creates a fill of a key with a new number: later purges cover it.
    fn new_fill(&self, primary: Id, now: Moment) -> Arc<Fill> {
        let mut in_flight = self.in_flight.lock();
        // Under the lock, so that a holder of a later number sees this fill.
        let number = self.next_number();
        in_flight.numbers.insert(number);
        *in_flight.keys.entry(primary).or_default() += 1;
        Arc::new(Fill::new(primary, number, now))
    }

    /// The lowest number of a fill that may still be stored.
    pub fn oldest_in_flight(&self) -> u64 {
        self.in_flight.lock().numbers.first().copied().unwrap_or(u64::MAX)
    }

    /// Ends a fill: it is no longer found, and nothing of it is stored from now on.
    pub fn end(&self, fill: &Fill, id: &Id) {
        unlist(&mut self.fills_of(id).lock(), fill, id);
        self.forget_in_flight(fill);
    }

    /// Like [`CacheZone::end`], for a fill that is not stored and has no reader. Returns whether the fill was ended.
    pub fn end_unread(&self, fill: &Fill, id: &Id) -> bool {
        let mut fills = self.fills_of(id).lock();
        if fill.readers() > 0 {
            return false;
        }
        unlist(&mut fills, fill, id);
        drop(fills);
        self.forget_in_flight(fill);
        true
    }

    fn forget_in_flight(&self, fill: &Fill) {
        let mut in_flight = self.in_flight.lock();
        if in_flight.numbers.remove(&fill.number)
            && let Some(count) = in_flight.keys.get_mut(&fill.primary)
        {
            *count -= 1;
            if *count == 0 {
                in_flight.keys.remove(&fill.primary);
            }
        }
    }

    /// Reserves bytes for data in memory that waits to be stored or requested. `None` if the total would exceed `most`.
    pub fn reserve(self: &Arc<Self>, bytes: u64, most: u64) -> Option<Reserved> {
        let before = self.unstored_bytes.fetch_add(bytes, Relaxed);
        let reserved = Reserved { zone: Arc::clone(self), bytes };
        (before + bytes <= most).then_some(reserved)
    }

    pub(super) fn fills_of(&self, id: &Id) -> &Mutex<HashMap<Id, Listed>> {
        &self.fills[usize::from(id[15]) % FILL_SHARDS]
    }
}

/// Lists a fill as the latest of its id.
fn list(fills: &mut HashMap<Id, Listed>, id: Id, fill: &Arc<Fill>) {
    let before = fills.remove(&id).and_then(|listed| match listed.fill.can_be_read() {
        true => Some(listed.fill),
        false => listed.before,
    });
    let before = before.filter(|before| !Arc::ptr_eq(before, fill));
    fills.insert(id, Listed { fill: Arc::clone(fill), before });
}

pub(super) fn unlist(fills: &mut HashMap<Id, Listed>, fill: &Fill, id: &Id) {
    let Some(listed) = fills.get_mut(id) else { return };
    if std::ptr::eq(&*listed.fill, fill) {
        match listed.before.take() {
            Some(before) => listed.fill = before,
            None => _ = fills.remove(id),
        }
    } else if listed.before.as_deref().is_some_and(|before| std::ptr::eq(before, fill)) {
        listed.before = None;
    }
}

/// Removes the fills of an id up to this number, which is now stored.
pub(super) fn unlist_until(fills: &mut HashMap<Id, Listed>, id: &Id, number: u64) {
    let Some(Listed { fill, before }) = fills.remove(id) else { return };
    let mut newer = std::iter::once(fill).chain(before).filter(|fill| fill.number > number);
    if let Some(fill) = newer.next() {
        fills.insert(*id, Listed { fill, before: newer.next() });
    }
}

/// The length of all pieces.
pub fn total(pieces: &[Bytes]) -> u64 {
    pieces.iter().map(|piece| piece.len() as u64).sum()
}

#[cfg(test)]
mod tests {
    use gale_runtime::simulation::{Faults, Simulation};
    use gale_runtime::{EventLoop, LoopOptions};

    use super::*;
    use crate::directory::{CacheDirectory, PathOptions};
    use crate::key::id_of;

    /// Runs `test` on a loop, with a cache that has no directory.
    fn on_a_loop(test: impl FnOnce(Arc<CacheZone>)) {
        let simulation = Simulation::new(1, Faults::NONE);
        EventLoop::simulated(&simulation, LoopOptions::default()).unwrap().run(async {
            let place = CacheDirectory { path: "/nonexistent".into(), levels: Default::default() };
            test(Arc::new(CacheZone::new("one".into(), place, PathOptions::default(), 1 << 20)));
        });
    }

    #[test]
    fn kept_fill_is_readable_and_delays_no_fetch() {
        on_a_loop(|zone| {
            let (id, now) = (id_of(b"key"), Moment::from_nanos(0));
            let begin = || zone.begin(&id, id, now, Duration::MAX);
            let Ok(lead) = begin() else { panic!("no request fetches it") };
            let mut meta = Meta::default();
            meta.lifetime.fresh_until = u64::MAX;
            let fill = lead.begin(id, Arc::new(meta), None);
            fill.finish();
            assert!(begin().is_err(), "it is being stored");
            fill.keep();
            let Ok(lead) = begin() else { panic!("no request fetches it any longer") };
            let found = zone.readable_fill(&id).expect("it is still there");
            assert!(Arc::ptr_eq(&found, &fill));
            // The next fill replaces it when its head has arrived.
            let next = lead.begin(id, Arc::default(), None);
            assert!(Arc::ptr_eq(&zone.readable_fill(&id).expect("it can be read"), &next));
        });
    }

    #[test]
    fn fill_that_was_found_is_not_given_up_before_it_is_read() {
        on_a_loop(|zone| {
            let (id, now) = (id_of(b"key"), Moment::from_nanos(0));
            let begin = || zone.begin(&id, id, now, Duration::MAX);
            let Ok(lead) = begin() else { panic!("no request fetches it") };
            let Err(waiting) = begin() else { panic!("a request fetches it") };
            let fill = lead.begin(id, Arc::default(), None);
            assert!(!zone.end_unread(&fill, &id));
            let found = zone.readable_fill(&id).expect("it can be read");
            drop(waiting);
            assert!(!zone.end_unread(&fill, &id));
            found.join();
            drop(found);
            assert!(!zone.end_unread(&fill, &id));
            fill.part();
            assert!(zone.end_unread(&fill, &id) && zone.readable_fill(&id).is_none());
        });
    }
}
