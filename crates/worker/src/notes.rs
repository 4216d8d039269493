//! Modules' notes on one request, by type.
//!
//! Each module uses a type of its own, so modules cannot collide, and the request knows none of them.

use std::any::{Any, TypeId};
use std::rc::Rc;

/// Notes of one request: at most one value of each type.
#[derive(Default)]
pub struct Notes(Vec<(TypeId, Box<dyn Any>)>);

impl Notes {
    /// The note of type `T`, if there is one.
    pub fn get<T: 'static>(&self) -> Option<&T> {
        let wanted = TypeId::of::<T>();
        let (_, note) = self.0.iter().find(|(id, _)| *id == wanted)?;
        note.downcast_ref()
    }

    /// The note of type `T`, mutable.
    pub fn get_mut<T: 'static>(&mut self) -> Option<&mut T> {
        let wanted = TypeId::of::<T>();
        let (_, note) = self.0.iter_mut().find(|(id, _)| *id == wanted)?;
        note.downcast_mut()
    }

    /// The note of type `T`, mutable; created empty if needed.
    pub fn or_default<T: Default + 'static>(&mut self) -> &mut T {
        let wanted = TypeId::of::<T>();
        let place = self.0.iter().position(|(id, _)| *id == wanted).unwrap_or_else(|| {
            self.0.push((wanted, Box::new(T::default())));
            self.0.len() - 1
        });
        self.0[place].1.downcast_mut().expect("a note is found by its type")
    }

    /// `true` if there is a note of type `T`.
    pub fn has<T: 'static>(&self) -> bool {
        self.get::<T>().is_some()
    }

    /// Stores a note, replacing an earlier one of the same type.
    pub fn put<T: 'static>(&mut self, note: T) {
        match self.get_mut::<T>() {
            Some(earlier) => *earlier = note,
            None => self.0.push((TypeId::of::<T>(), Box::new(note))),
        }
    }

    /// Removes and returns the note of type `T`.
    pub fn take<T: 'static>(&mut self) -> Option<T> {
        let wanted = TypeId::of::<T>();
        let place = self.0.iter().position(|(id, _)| *id == wanted)?;
        let (_, note) = self.0.swap_remove(place);
        note.downcast().ok().map(|note| *note)
    }

    /// `true` if there are no notes.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Frees unused memory.
    pub fn shrink(&mut self) {
        self.0.shrink_to_fit();
    }

    /// Removes all notes, keeping the memory for the next request.
    pub fn clear(&mut self) {
        self.0.clear();
    }
}

/// Notes shared by a request and its subrequests.
#[derive(Default)]
pub struct SharedNotes(Vec<(TypeId, Rc<dyn Any>)>);

impl SharedNotes {
    /// The note of type `T`; created empty if needed.
    pub fn note<T: Default + 'static>(&mut self) -> Rc<T> {
        let wanted = TypeId::of::<T>();
        if let Some((_, note)) = self.0.iter().find(|(id, _)| *id == wanted)
            && let Ok(note) = Rc::clone(note).downcast()
        {
            return note;
        }
        let note = Rc::<T>::default();
        self.0.push((wanted, Rc::<T>::clone(&note)));
        note
    }

    /// `true` if there are no notes.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Removes all notes, keeping the memory for the next request.
    pub fn clear(&mut self) {
        self.0.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shared_note_is_one_until_all_are_forgotten() {
        let mut notes = SharedNotes::default();
        let one = notes.note::<std::cell::Cell<u8>>();
        one.set(7);
        assert_eq!((notes.note::<std::cell::Cell<u8>>().get(), *notes.note::<u32>()), (7, 0));
        notes.clear();
        assert_eq!(notes.note::<std::cell::Cell<u8>>().get(), 0);
    }

    #[derive(Debug, PartialEq)]
    struct Verdict(u8);

    #[test]
    fn a_note_is_found_by_its_type_and_replaced_by_a_later_one() {
        let mut notes = Notes::default();
        assert!(!notes.has::<Verdict>());
        notes.put(Verdict(1));
        notes.put(7_u32);
        notes.put(Verdict(2));
        assert_eq!(notes.get::<Verdict>(), Some(&Verdict(2)));
        assert_eq!(notes.take::<u32>(), Some(7));
        assert_eq!(notes.take::<u32>(), None);
        assert!(notes.has::<Verdict>());
    }
}
