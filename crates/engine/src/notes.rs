//! What modules write down about one request, by type.
//!
//! A module's note is a type of its own, so that two modules can never collide
//! and the request structure knows of neither.

use std::any::{Any, TypeId};
use std::rc::Rc;

/// The notes of one request: at most one value of each type.
#[derive(Default)]
pub struct Notes(Vec<(TypeId, Box<dyn Any>)>);

impl Notes {
    /// The note of type `T`, if one was put.
    pub fn get<T: 'static>(&self) -> Option<&T> {
        let wanted = TypeId::of::<T>();
        let (_, note) = self.0.iter().find(|(id, _)| *id == wanted)?;
        note.downcast_ref()
    }

    /// The note of type `T`, to be changed.
    pub fn get_mut<T: 'static>(&mut self) -> Option<&mut T> {
        let wanted = TypeId::of::<T>();
        let (_, note) = self.0.iter_mut().find(|(id, _)| *id == wanted)?;
        note.downcast_mut()
    }

    /// The note of type `T`, to be changed; an empty one at first.
    pub fn or_default<T: Default + 'static>(&mut self) -> &mut T {
        let wanted = TypeId::of::<T>();
        let place = self.0.iter().position(|(id, _)| *id == wanted).unwrap_or_else(|| {
            self.0.push((wanted, Box::new(T::default())));
            self.0.len() - 1
        });
        self.0[place].1.downcast_mut().expect("found by its type")
    }

    /// Whether there is a note of type `T`.
    pub fn has<T: 'static>(&self) -> bool {
        self.get::<T>().is_some()
    }

    /// Puts a note; an earlier one of the same type is replaced.
    pub fn put<T: 'static>(&mut self, note: T) {
        match self.get_mut::<T>() {
            Some(earlier) => *earlier = note,
            None => self.0.push((TypeId::of::<T>(), Box::new(note))),
        }
    }

    /// Takes the note of type `T` away.
    pub fn take<T: 'static>(&mut self) -> Option<T> {
        let wanted = TypeId::of::<T>();
        let place = self.0.iter().position(|(id, _)| *id == wanted)?;
        let (_, note) = self.0.swap_remove(place);
        note.downcast().ok().map(|note| *note)
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Keeps memory for no more than there are.
    pub fn shrink(&mut self) {
        self.0.shrink_to_fit();
    }

    /// Forgets everything, keeping the memory for the next request.
    pub fn clear(&mut self) {
        self.0.clear();
    }
}

/// The notes that a request and its subrequests have in common.
#[derive(Default)]
pub struct SharedNotes(Vec<(TypeId, Rc<dyn Any>)>);

impl SharedNotes {
    /// The note of type `T`: an empty one at first.
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

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Forgets everything, keeping the memory for the next request.
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
