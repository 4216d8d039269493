//! What a worker keeps of entries that are asked for often: the head, ready to be sent, with the body if that is small,
//! else with the open file. The index still decides at every request; this only spares opening and reading.
//!
//! Two generations: what is asked for moves to the younger one, and when that is full the older one goes. A file that
//! somebody has removed is noticed when it was asked for, [`LOOK_AGAIN`] after it was seen.

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;
use std::time::Duration;

use gale_runtime::{Bytes, File, Moment};

use super::format::Meta;
use super::key::Id;
use super::sums::Blocks;
use crate::request::response::FieldList;

/// Most bytes that a worker keeps, heads included.
const BYTES_MAX: usize = 16 << 20;

/// Most entries: each may hold a descriptor.
const ENTRIES_MAX: usize = 2048;

/// How long it is believed that a file is still there.
pub const LOOK_AGAIN: Duration = Duration::from_secs(1);

/// An entry that can be sent at once.
pub struct Hot {
    /// Its name.
    pub id: Id,
    /// What is known of it.
    pub meta: Meta,
    /// The fields, for those who share them.
    pub fields: Rc<FieldList>,
    /// The body.
    pub body: HotBody,
    /// By what the blocks of its file are checked, and which were; none if it is checked already, or cannot be.
    pub blocks: Option<Rc<Blocks>>,
    /// How long the body is.
    pub length: u64,
    /// How long its file is.
    pub size: u64,
    /// When its file was seen last.
    pub seen: std::cell::Cell<Moment>,
}

/// Its body.
pub enum HotBody {
    /// In memory.
    Memory(Bytes),
    /// In a file, from this offset on.
    File(File, u64),
}

impl Hot {
    fn cost(&self) -> usize {
        let body = match &self.body {
            HotBody::Memory(bytes) => bytes.len(),
            HotBody::File(..) => 0,
        };
        let blocks = self.blocks.as_ref().map_or(0, |blocks| blocks.bytes());
        512 + self.meta.key.len() + self.fields.len() * 112 + body + blocks
    }
}

#[derive(Default)]
struct Generations {
    young: HashMap<(usize, Id), Rc<Hot>>,
    old: HashMap<(usize, Id), Rc<Hot>>,
    young_bytes: usize,
}

thread_local! {
    static HOT: RefCell<Generations> = RefCell::default();
}

/// The entry of this name in the cache that the number stands for.
pub fn find(cache: usize, id: &Id) -> Option<Rc<Hot>> {
    let (found, gone) = HOT.with_borrow_mut(|hot| {
        let place = (cache, *id);
        if let Some(found) = hot.young.get(&place) {
            return (Some(Rc::clone(found)), None);
        }
        match hot.old.remove(&place) {
            Some(found) => {
                let gone = hot.add(place, Rc::clone(&found));
                (Some(found), gone)
            }
            None => (None, None),
        }
    });
    drop(gone);
    found
}

/// Keeps an entry.
pub fn keep(cache: usize, id: Id, hot: Rc<Hot>) {
    let gone = HOT.with_borrow_mut(|generations| generations.add((cache, id), hot));
    drop(gone);
}

/// Forgets an entry.
pub fn forget(cache: usize, id: &Id) {
    let gone = HOT.with_borrow_mut(|hot| {
        let young = hot.young.remove(&(cache, *id));
        if let Some(young) = &young {
            hot.young_bytes -= young.cost().min(hot.young_bytes);
        }
        (young, hot.old.remove(&(cache, *id)))
    });
    drop(gone);
}

type Generation = HashMap<(usize, Id), Rc<Hot>>;

impl Generations {
    /// What is returned is dropped without the borrow: files are closed then.
    fn add(&mut self, place: (usize, Id), hot: Rc<Hot>) -> Option<(Option<Rc<Hot>>, Generation)> {
        let mut gone = Generation::new();
        if self.young_bytes + hot.cost() > BYTES_MAX / 2 || self.young.len() >= ENTRIES_MAX / 2 {
            gone = std::mem::replace(&mut self.old, std::mem::take(&mut self.young));
            self.young_bytes = 0;
        }
        self.young_bytes += hot.cost();
        let before = self.young.insert(place, hot);
        if let Some(before) = &before {
            self.young_bytes -= before.cost().min(self.young_bytes);
        }
        (before.is_some() || !gone.is_empty()).then_some((before, gone))
    }
}
