//! A worker's memory of entries that are requested often: the head, ready to be sent, with a small body or an open
//! file. It only saves opening and reading; the index still decides about each request.
//!
//! There are two generations: a requested entry moves to the younger one, and when that is full the older one is
//! dropped. The removal of a file by another program is noticed at the first request after [`LOOK_AGAIN`].

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;
use std::time::Duration;

use gale_files::File;
use gale_http::request::response::FieldList;
use gale_runtime::{Bytes, Moment};

use super::format::Meta;
use super::key::Id;
use super::sums::Blocks;

/// Maximum number of bytes in a worker's memory, heads included.
const BYTES_MAX: usize = 16 << 20;

/// Maximum number of entries: each may hold a descriptor.
const ENTRIES_MAX: usize = 2048;

/// Time for which a file is assumed to exist.
pub const LOOK_AGAIN: Duration = Duration::from_secs(1);

/// An entry that can be sent immediately.
pub struct Hot {
    /// The sum that identifies it.
    pub id: Id,
    /// Everything known about it except its body.
    pub meta: Meta,
    /// The fields, for responses that share them.
    pub fields: Rc<FieldList>,
    /// The body.
    pub body: HotBody,
    /// Sums of the file's blocks and the blocks already checked; `None` if all are checked, or there are no sums.
    pub blocks: Option<Rc<Blocks>>,
    /// Length of the body.
    pub length: u64,
    /// Length of the file.
    pub size: u64,
    /// Time at which the file was last known to exist.
    pub seen: std::cell::Cell<Moment>,
}

/// The body of a [`Hot`] entry.
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

/// Finds an entry; `cache` is the identity of its zone.
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

/// Adds an entry.
pub fn keep(cache: usize, id: Id, hot: Rc<Hot>) {
    let gone = HOT.with_borrow_mut(|generations| generations.add((cache, id), hot));
    drop(gone);
}

/// Removes an entry.
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
    /// The caller drops the result after the borrow has ended, because that closes files.
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
