//! Room for what a process must not have too much of: a bound on all of one kind together, shared by all workers. Of texts that
//! are in memory as a whole for as long as somebody sends them, which is as long as the slowest client takes, the bytes are
//! counted, until the last copy goes; of descriptors that are held, each.

use std::sync::atomic::{AtomicUsize, Ordering};

use gale_runtime::Bytes;

/// So much at most.
pub struct Room {
    most: usize,
    taken: AtomicUsize,
}

/// A part of a room, given back when it is dropped.
pub struct Taken {
    room: &'static Room,
    size: usize,
}

/// A text and the room that it takes.
struct Held {
    text: Box<[u8]>,
    _taken: Taken,
}

impl Room {
    /// Room for so much.
    pub const fn new(most: usize) -> Room {
        Room { most, taken: AtomicUsize::new(0) }
    }

    /// Takes room, if there is as much. Where nobody has any, there is room for one text of any length.
    pub fn take(&'static self, size: usize) -> Option<Taken> {
        let with = |before: usize| match before.checked_add(size) {
            Some(after) if before == 0 || after <= self.most => Some(after),
            _ => None,
        };
        let taken = self.taken.fetch_update(Ordering::Relaxed, Ordering::Relaxed, with);
        taken.is_ok().then(|| Taken { room: self, size })
    }

    /// How much is taken.
    pub fn taken(&self) -> usize {
        self.taken.load(Ordering::Relaxed)
    }

    /// Whether all of it is taken.
    pub fn is_full(&self) -> bool {
        self.taken() >= self.most
    }
}

impl Taken {
    /// The text, for which the room was taken: it counts until nobody has any of it.
    pub fn hold(self, text: impl Into<Box<[u8]>>) -> Bytes {
        Bytes::from_owner(Held { text: text.into(), _taken: self })
    }
}

impl AsRef<[u8]> for Held {
    fn as_ref(&self) -> &[u8] {
        &self.text
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        self.room.taken.fetch_sub(self.size, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_takes_its_room_until_nobody_sends_it_any_more() {
        static ROOM: Room = Room::new(10);
        let text = ROOM.take(6).expect("there is room").hold(*b"abcdef");
        let part = text.slice(2..4);
        assert!(ROOM.take(5).is_none());
        drop(ROOM.take(4).expect("there is just as much"));
        assert_eq!(ROOM.taken(), 6, "what is refused or dropped takes none");
        drop(text);
        assert_eq!((&*part, ROOM.taken()), (&b"cd"[..], 6));
        drop(part);
        assert_eq!(ROOM.taken(), 0);
    }

    #[test]
    fn one_text_is_never_too_long() {
        static ROOM: Room = Room::new(10);
        let long = ROOM.take(usize::MAX);
        assert!(long.is_some() && ROOM.is_full() && ROOM.take(0).is_none());
        drop(long);
        assert!(!ROOM.is_full() && ROOM.take(10).is_some());
    }
}
