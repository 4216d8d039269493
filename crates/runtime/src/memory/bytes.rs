//! Bytes: a piece of immutable memory that may have several readers. Cloned and sliced without a copy, and sent to any
//! thread.
//!
//! Sockets send it, bodies consist of it, and files are read into it and written from it. Its sources:
//!
//! ```text
//!   a lease, frozen           charged to the loop that took it, once for all pieces, until the last one is dropped
//!   a read of a file          charged to the loop that waited for it
//!   a Vec, an owner           not counted
//!   a static                  no memory to count
//! ```
//!
//! Pieces held by other loops would count against the loop that they came from, and a slow client there could exhaust
//! the memory here. So a loop that gives a piece away first moves its charge to the process: [`Bytes::share`].

use std::borrow::Borrow;
use std::fmt;
use std::io;
use std::mem;
use std::ops::{Bound, Deref, Range, RangeBounds};
use std::ptr::NonNull;
use std::slice;
use std::sync::Arc;

use crate::memory::blocks::{self, Block, Charge, Memory};
use crate::memory::buffer::Lease;
use crate::memory::read_memory::ReadMemory;

/// Limit of copies that take a single allocation.
const SHORT_MAX: usize = 48;

/// A piece of immutable memory.
pub struct Bytes {
    start: NonNull<u8>,
    length: usize,
    owner: Owner,
}

/// Keeps the bytes in place.
#[derive(Clone)]
enum Owner {
    Static,
    /// A frozen lease. Dropped by `blocks::drop_shared`.
    Block(Arc<Memory>),
    #[expect(dead_code, reason = "kept, not read")]
    Short(Arc<[u8; SHORT_MAX]>),
    Other(Arc<Other>),
}

enum Other {
    Vec(Vec<u8>),
    /// Memory shared by all that asked for a read, and the charge of one of them.
    Read(Arc<ReadMemory>, Charge),
    Owner(Box<dyn AsRef<[u8]> + Send + Sync>),
}

impl Other {
    fn bytes(&self) -> &[u8] {
        match self {
            Other::Vec(bytes) => bytes,
            Other::Read(bytes, _) => bytes,
            Other::Owner(owner) => (**owner).as_ref(),
        }
    }
}

// SAFETY: the bytes are not written while this or a clone of it exists, and the owner, which keeps them, is `Send` and
// `Sync`.
unsafe impl Send for Bytes {}
// SAFETY: as above.
unsafe impl Sync for Bytes {}

impl Bytes {
    /// No bytes.
    pub const fn new() -> Bytes {
        Bytes::from_static(&[])
    }

    /// Static bytes.
    pub const fn from_static(bytes: &'static [u8]) -> Bytes {
        // SAFETY: a reference is never null.
        let start = unsafe { NonNull::new_unchecked(bytes.as_ptr().cast_mut()) };
        Bytes { start, length: bytes.len(), owner: Owner::Static }
    }

    /// A copy of `bytes`, not charged: for short texts. (Copy longer data to a lease.)
    pub fn copy_from_slice(bytes: &[u8]) -> Bytes {
        match bytes.len() {
            0 => Bytes::new(),
            1..=SHORT_MAX => {
                let mut copy = [0; SHORT_MAX];
                copy[..bytes.len()].copy_from_slice(bytes);
                let copy = Arc::new(copy);
                Bytes { start: NonNull::from(&*copy).cast(), length: bytes.len(), owner: Owner::Short(copy) }
            }
            _ => bytes.to_vec().into(),
        }
    }

    /// The bytes of `owner`, which is dropped with the last of them. `as_ref` must always return the same bytes.
    pub fn from_owner(owner: impl AsRef<[u8]> + Send + Sync + 'static) -> Bytes {
        Bytes::of_other(Other::Owner(Box::new(owner)), ..)
    }

    /// Bytes read into memory that may be shared, with the caller's charge for it.
    pub fn of_read(memory: Arc<ReadMemory>, range: Range<usize>, charge: Charge) -> Bytes {
        debug_assert!(range.len() <= charge.bytes());
        Bytes::of_other(Other::Read(memory, charge), range)
    }

    fn of_other(other: Other, range: impl RangeBounds<usize>) -> Bytes {
        let other = Arc::new(other);
        // Borrowed from the `Arc`, where the value does not move.
        let bytes = other.bytes();
        let bytes = &bytes[within(range, bytes.len())];
        let (start, length) = (NonNull::from(bytes).cast::<u8>(), bytes.len());
        Bytes { start, length, owner: Owner::Other(other) }
    }

    #[inline]
    pub(crate) fn of_block(memory: Arc<Memory>, range: Range<usize>) -> Bytes {
        debug_assert!(range.start <= range.end && range.end <= memory.size());
        // SAFETY: the range lies within the block.
        let start = unsafe { memory.start().add(range.start) };
        Bytes { start, length: range.end - range.start, owner: Owner::Block(memory) }
    }

    /// The bytes in `range`, which must lie within these.
    pub fn slice(&self, range: impl RangeBounds<usize>) -> Bytes {
        let range = within(range, self.length);
        if range.is_empty() {
            return Bytes::new();
        }
        // SAFETY: the range lies within the bytes.
        let start = unsafe { self.start.add(range.start) };
        Bytes { start, length: range.len(), owner: self.owner.clone() }
    }

    /// Removes and returns the first `count` bytes, which must exist.
    pub fn split_to(&mut self, count: usize) -> Bytes {
        if count == self.length {
            return mem::take(self);
        }
        let front = self.slice(..count);
        self.advance(count);
        front
    }

    /// Removes the first `count` bytes, which must exist.
    #[inline]
    pub fn advance(&mut self, count: usize) {
        assert!(count <= self.length, "more is removed than there is");
        // SAFETY: the pointer stays within the bytes, or right behind the last.
        self.start = unsafe { self.start.add(count) };
        self.length -= count;
    }

    /// Keeps the first `length` bytes.
    pub fn truncate(&mut self, length: usize) {
        self.length = self.length.min(length);
    }

    /// Moves the charge for the memory from the loop's account to the process's. Call this before a piece is given to
    /// another loop, which may hold it for long. It applies to all pieces of that memory, and once.
    ///
    /// Errors: `OutOfMemory` at the limit of that account ([`crate::shared_bytes_max`]); nothing has changed then, and
    /// the piece should stay here.
    pub fn share(&self) -> io::Result<()> {
        match &self.owner {
            Owner::Block(memory) => memory.charge().move_to_process(),
            Owner::Other(other) => match &**other {
                Other::Read(_, charge) => charge.move_to_process(),
                Other::Vec(_) | Other::Owner(_) => Ok(()),
            },
            Owner::Static | Owner::Short(_) => Ok(()),
        }
    }

    /// The lease that these bytes were frozen from, if there are no other pieces of it, it is this thread's and was not
    /// `share`d.
    pub fn try_into_lease(mut self) -> Result<Lease, Bytes> {
        let (start, length) = (self.start, self.length);
        match mem::replace(&mut self.owner, Owner::Static) {
            Owner::Block(memory) => match Block::from_shared(memory) {
                Ok(block) => {
                    let begin = start.as_ptr().addr() - block.bytes().as_ptr().addr();
                    Ok(Lease::of_block(block, begin..begin + length))
                }
                Err(memory) => Err(Bytes { start, length, owner: Owner::Block(memory) }),
            },
            owner => Err(Bytes { start, length, owner }),
        }
    }
}

/// The range within `length` bytes. Panics if it is outside.
fn within(range: impl RangeBounds<usize>, length: usize) -> Range<usize> {
    let begin = match range.start_bound() {
        Bound::Included(&begin) => begin,
        Bound::Excluded(&before) => before + 1,
        Bound::Unbounded => 0,
    };
    let end = match range.end_bound() {
        Bound::Included(&last) => last + 1,
        Bound::Excluded(&end) => end,
        Bound::Unbounded => length,
    };
    assert!(begin <= end && end <= length, "{begin}..{end} of {length} bytes");
    begin..end
}

impl Drop for Bytes {
    #[inline]
    fn drop(&mut self) {
        if matches!(self.owner, Owner::Block(_))
            && let Owner::Block(memory) = mem::replace(&mut self.owner, Owner::Static)
        {
            blocks::drop_shared(memory);
        }
    }
}

impl Clone for Bytes {
    #[inline]
    fn clone(&self) -> Bytes {
        Bytes { start: self.start, length: self.length, owner: self.owner.clone() }
    }
}

impl Default for Bytes {
    fn default() -> Bytes {
        Bytes::new()
    }
}

impl Deref for Bytes {
    type Target = [u8];

    #[inline]
    fn deref(&self) -> &[u8] {
        // SAFETY: the owner keeps `length` initialized bytes there, which are not written meanwhile.
        unsafe { slice::from_raw_parts(self.start.as_ptr(), self.length) }
    }
}

impl AsRef<[u8]> for Bytes {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl Borrow<[u8]> for Bytes {
    fn borrow(&self) -> &[u8] {
        self
    }
}

impl Lease {
    /// Makes the bytes immutable, for several readers. Costs nothing: the memory stays where it is.
    #[inline]
    pub fn freeze(self) -> Bytes {
        let (block, range) = self.into_block();
        Bytes::of_block(block.into_shared(), range)
    }
}

impl From<Lease> for Bytes {
    #[inline]
    fn from(lease: Lease) -> Bytes {
        lease.freeze()
    }
}

impl From<Vec<u8>> for Bytes {
    fn from(bytes: Vec<u8>) -> Bytes {
        if bytes.len() <= SHORT_MAX { Bytes::copy_from_slice(&bytes) } else { Bytes::of_other(Other::Vec(bytes), ..) }
    }
}

impl From<Box<[u8]>> for Bytes {
    fn from(bytes: Box<[u8]>) -> Bytes {
        bytes.into_vec().into()
    }
}

impl From<String> for Bytes {
    fn from(text: String) -> Bytes {
        text.into_bytes().into()
    }
}

impl From<&'static [u8]> for Bytes {
    fn from(bytes: &'static [u8]) -> Bytes {
        Bytes::from_static(bytes)
    }
}

impl<const N: usize> From<&'static [u8; N]> for Bytes {
    fn from(bytes: &'static [u8; N]) -> Bytes {
        Bytes::from_static(bytes)
    }
}

impl From<&'static str> for Bytes {
    fn from(text: &'static str) -> Bytes {
        Bytes::from_static(text.as_bytes())
    }
}

impl PartialEq for Bytes {
    fn eq(&self, other: &Bytes) -> bool {
        **self == **other
    }
}

impl Eq for Bytes {}

impl PartialEq<[u8]> for Bytes {
    fn eq(&self, other: &[u8]) -> bool {
        **self == *other
    }
}

impl PartialEq<&[u8]> for Bytes {
    fn eq(&self, other: &&[u8]) -> bool {
        **self == **other
    }
}

impl<const N: usize> PartialEq<[u8; N]> for Bytes {
    fn eq(&self, other: &[u8; N]) -> bool {
        **self == *other
    }
}

impl<const N: usize> PartialEq<&[u8; N]> for Bytes {
    fn eq(&self, other: &&[u8; N]) -> bool {
        **self == **other
    }
}

impl PartialEq<Vec<u8>> for Bytes {
    fn eq(&self, other: &Vec<u8>) -> bool {
        **self == **other
    }
}

impl PartialEq<Bytes> for Vec<u8> {
    fn eq(&self, other: &Bytes) -> bool {
        **self == **other
    }
}

impl PartialEq<&str> for Bytes {
    fn eq(&self, other: &&str) -> bool {
        **self == *other.as_bytes()
    }
}

impl fmt::Debug for Bytes {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "b\"{}\"", self.escape_ascii())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::thread;

    use super::*;
    use crate::{leased_bytes, set_shared_bytes_max, shared_bytes};

    /// On a thread of its own, which has no other leases.
    fn alone(work: impl FnOnce() + Send + 'static) {
        thread::spawn(work).join().unwrap();
    }

    fn frozen(text: &[u8]) -> Bytes {
        Lease::copy_of(text).unwrap().freeze()
    }

    #[test]
    fn frozen_lease_is_charged_once_for_all_pieces_and_reused_after_the_last() {
        alone(|| {
            let bytes = frozen(b"head, body");
            let memory = bytes.as_ptr();
            let (mut copy, piece) = (bytes.clone(), bytes.slice(6..));
            assert_eq!(leased_bytes(), 1024);
            drop(bytes);
            assert_eq!((copy.split_to(4), &copy[..], &piece[..]), (Bytes::from("head"), &b", body"[..], &b"body"[..]));
            assert_eq!(piece.as_ptr(), memory.wrapping_add(6), "without a copy");
            drop(copy);
            assert_eq!(leased_bytes(), 1024);
            drop(piece);
            assert_eq!(leased_bytes(), 0);
            assert_eq!(frozen(b"next").as_ptr(), memory);
            assert_eq!(size_of::<Bytes>(), 32);
        });
    }

    #[test]
    fn piece_dropped_elsewhere_is_given_back_to_its_origin_alone() {
        alone(|| {
            let (bytes, own) = (frozen(&[1; 3000]), frozen(b"own"));
            let piece = bytes.slice(1000..);
            drop(bytes);
            let elsewhere = move || {
                let others = frozen(b"others");
                assert_eq!((piece.len(), leased_bytes()), (2000, 1024));
                drop(piece);
                assert_eq!(leased_bytes(), 1024);
                others
            };
            let others = thread::spawn(elsewhere).join().unwrap();
            assert_eq!(leased_bytes(), 1024);
            drop((own, others));
            assert_eq!(leased_bytes(), 0);
        });
    }

    #[test]
    fn limit_counts_memory_returned_by_other_threads() {
        alone(|| {
            crate::set_leased_bytes_max(4096);
            let bytes = frozen(&[1; 4096]);
            let _last = Lease::new(1).unwrap();
            assert!(crate::leases_exhausted() && Lease::new(1).is_err());
            thread::spawn(move || drop(bytes)).join().unwrap();
            assert!(!crate::leases_exhausted());
            let again = frozen(&[2; 4000]);
            thread::spawn(move || drop(again)).join().unwrap();
            assert!(Lease::new(1).is_ok(), "also who takes asks");
        });
    }

    #[test]
    fn racing_drops_leave_the_accounts_right() {
        alone(|| {
            for _ in 0..300 {
                let bytes = frozen(&[7; 100]);
                let others = [(); 3].map(|()| {
                    let clone = bytes.clone();
                    thread::spawn(move || assert_eq!(clone, [7; 100]))
                });
                drop(bytes);
                others.into_iter().for_each(|other| other.join().unwrap());
                assert_eq!(leased_bytes(), 0);
            }
        });
    }

    #[test]
    fn shared_piece_is_charged_to_the_process_until_it_goes_and_refused_at_its_limit() {
        alone(|| {
            set_shared_bytes_max(5 * 1024);
            let (small, large, late) = (frozen(b"small"), frozen(&[1; 4096]), frozen(b"late"));
            let piece = large.slice(10..20);
            large.share().unwrap();
            piece.share().expect("it counts once");
            assert_eq!((leased_bytes(), shared_bytes()), (2048, 4096));
            small.share().unwrap();
            assert_eq!(late.share().unwrap_err().kind(), io::ErrorKind::OutOfMemory);
            assert_eq!((leased_bytes(), shared_bytes()), (1024, 5120));
            drop((small, large));
            assert_eq!((leased_bytes(), shared_bytes()), (1024, 4096));
            thread::spawn(move || drop(piece)).join().unwrap();
            late.share().unwrap();
            assert_eq!((leased_bytes(), shared_bytes()), (0, 1024));
            let moved_elsewhere = frozen(b"elsewhere");
            thread::spawn(move || moved_elsewhere.share().unwrap()).join().unwrap();
            drop(late);
            assert_eq!((leased_bytes(), shared_bytes()), (0, 0));
            Bytes::from_static(b"not counted").share().unwrap();
            set_shared_bytes_max(0);
        });
    }

    #[test]
    fn only_the_last_piece_on_its_own_thread_becomes_a_lease_again() {
        alone(|| {
            let bytes = frozen(b"0123456789");
            let piece = bytes.slice(2..4);
            let piece = piece.try_into_lease().expect_err("there is another");
            drop(bytes);
            let mut lease = piece.try_into_lease().unwrap();
            assert_eq!((lease.append(b"abc"), &lease[..]), (3, &b"23abc"[..]));
            let elsewhere = lease.freeze();
            let back = thread::spawn(move || elsewhere.try_into_lease().expect_err("not its thread")).join().unwrap();
            back.share().unwrap();
            back.try_into_lease().expect_err("it is charged to the process");
            assert!(Bytes::from("static").try_into_lease().is_err());
        });
    }

    #[test]
    fn owner_goes_with_the_last_piece() {
        static DROPPED: AtomicUsize = AtomicUsize::new(0);
        struct Owner([u8; 8]);
        impl AsRef<[u8]> for Owner {
            fn as_ref(&self) -> &[u8] {
                &self.0
            }
        }
        impl Drop for Owner {
            fn drop(&mut self) {
                DROPPED.fetch_add(1, Ordering::Relaxed);
            }
        }
        let mut bytes = Bytes::from_owner(Owner(*b"12345678"));
        let front = bytes.split_to(3);
        assert_eq!((&front[..], &bytes[..]), (&b"123"[..], &b"45678"[..]));
        drop(bytes);
        assert_eq!(DROPPED.load(Ordering::Relaxed), 0);
        drop(front);
        assert_eq!(DROPPED.load(Ordering::Relaxed), 1);
    }

    #[test]
    fn pieces_agree_with_slices() {
        for length in [0, 1, SHORT_MAX, SHORT_MAX + 1, 1000] {
            let text: Vec<u8> = (0..length).map(|number| number as u8).collect();
            for bytes in [Bytes::copy_from_slice(&text), text.clone().into(), Bytes::from_owner(text.clone())] {
                assert_eq!(bytes, text);
                assert_eq!(bytes.slice(length / 2..), text[length / 2..]);
                assert_eq!(bytes.slice(..length / 2), text[..length / 2]);
                let (mut rest, mut front) = (bytes.clone(), bytes.clone());
                rest.advance(length / 3);
                front.truncate(length / 3);
                assert_eq!([&front[..], &rest[..]].concat(), text);
            }
        }
    }

    #[test]
    #[should_panic(expected = "2..4 of 3 bytes")]
    fn piece_beyond_the_end_is_a_mistake() {
        Bytes::from("abc").slice(2..4);
    }
}
