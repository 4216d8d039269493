//! Blocks: the memory behind leases and bytes, in size classes, and the accounts that it is charged to.
//!
//! ```text
//!   free list of a thread ──take──► Block in a Lease or Buffer ──freeze──► Arc<Memory> in one or more Bytes
//!        ▲  not charged                charged to the thread                  │ perhaps moved to the process's account
//!        └───── dropped on this thread ◄───────┴──────────────────────────────┤
//!   allocator ◄──────────────────────────────── dropped on another thread ────┘ and returned to the thread's account
//! ```
//!
//! A block belongs for ever to the thread that allocated it, its *origin*, and is reused only there. It is charged
//! whole and once, however many pieces of it there are. The only part of the origin's account that other threads touch
//! is an atomic counter of bytes returned elsewhere, which the origin subtracts when its limit matters.
//!
//! Blocks are zeroed when they are first allocated, but not between uses.

use std::cell::{Cell, RefCell};
use std::io;
use std::marker::PhantomData;
use std::mem::ManuallyDrop;
use std::ptr::{self, NonNull};
use std::rc::Rc;
use std::slice;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicUsize, Ordering, fence};

use crate::memory::limits;

const KIB: usize = 1024;

/// The size classes, in bytes. A larger request gets an allocation of its own.
///
/// The class of 20 KiB is for 16 KiB of data with a frame around: a TLS record as it may be received (5 + 16,384 +
/// 2,048 bytes, RFC 5246 section 6.2.3), a frame of HTTP/2 (9 + 16,384). The allocator has no size between.
pub const LEASE_CLASSES: [usize; 7] = [KIB, 4 * KIB, 16 * KIB, 20 * KIB, 64 * KIB, 256 * KIB, 1024 * KIB];

/// Free blocks of each class that a thread keeps (5 MiB in all); the rest returns to the allocator.
const KEPT_MAX: [usize; LEASE_CLASSES.len()] = [256, 128, 64, 16, 16, 4, 1];

/// The limit of a thread that has set none.
const LEASED_MAX_DEFAULT: usize = 64 * KIB * KIB;

thread_local! {
    /// Leased bytes, without subtracting those returned by other threads since the last [`fold_in`].
    static LEASED: Cell<usize> = const { Cell::new(0) };
    static LEASED_MAX: Cell<usize> = const { Cell::new(LEASED_MAX_DEFAULT) };
    /// Free blocks by class, not charged.
    static FREE: RefCell<[Vec<Arc<Memory>>; LEASE_CLASSES.len()]> =
        const { RefCell::new([const { Vec::new() }; LEASE_CLASSES.len()]) };
    static ACCOUNT: Arc<Account> = Arc::default();
}

/// Bytes charged to the process: those of pieces that were given to other loops.
static SHARED: AtomicUsize = AtomicUsize::new(0);
/// Limit of `SHARED`; 0 = not set.
static SHARED_MAX: AtomicUsize = AtomicUsize::new(0);

/// Bytes leased on this thread now.
pub fn leased_bytes() -> usize {
    fold_in();
    LEASED.get()
}

/// True if the limit of leased bytes is reached: time to stop accepting and to refuse new requests.
pub fn leases_exhausted() -> bool {
    LEASED.get() >= LEASED_MAX.get() && leased_bytes() >= LEASED_MAX.get()
}

/// Limit of leased bytes of this thread.
pub fn leased_bytes_max() -> usize {
    LEASED_MAX.get()
}

/// Sets the limit of leased bytes of this thread.
pub fn set_leased_bytes_max(bytes: usize) {
    LEASED_MAX.set(bytes);
}

/// Sets the limit of the current loop to its part of a quarter of the memory, as one of `loops`: loops come and go.
/// Bytes above a limit that was lowered stay leased until they are returned.
pub fn share_leases(loops: usize) {
    set_leased_bytes_max(limits::share_of_leases(loops));
}

/// Bytes charged to the process because they were given to other loops ([`crate::Bytes::share`]).
pub fn shared_bytes() -> usize {
    SHARED.load(Ordering::Relaxed)
}

/// Limit of [`shared_bytes`]; if none was set, a sixteenth of the memory that the process may use.
pub fn shared_bytes_max() -> usize {
    match SHARED_MAX.load(Ordering::Relaxed) {
        0 => limits::share_of_shared_bytes(),
        bytes => bytes,
    }
}

/// Sets the limit of [`shared_bytes`], for all threads.
pub fn set_shared_bytes_max(bytes: usize) {
    SHARED_MAX.store(bytes, Ordering::Relaxed);
}

/// The part of a thread's account that other threads may touch.
#[derive(Default)]
struct Account {
    /// Bytes returned by other threads that the thread has not subtracted yet.
    given_back: AtomicUsize,
}

impl Account {
    /// The current thread's account; `None` when the thread ends.
    fn current() -> Option<Arc<Account>> {
        ACCOUNT.try_with(Arc::clone).ok()
    }

    fn is_current(&self) -> bool {
        ACCOUNT.try_with(|account| ptr::eq(&raw const **account, self)).unwrap_or(false)
    }
}

/// Subtracts the bytes that other threads have returned.
fn fold_in() {
    let given_back = ACCOUNT.try_with(|account| match account.given_back.load(Ordering::Relaxed) {
        0 => 0,
        _ => account.given_back.swap(0, Ordering::Relaxed),
    });
    LEASED.set(LEASED.get() - given_back.unwrap_or(0));
}

/// Charges `bytes` to the current thread if it stays within `leased_max`.
#[inline]
fn charge(bytes: usize, leased_max: usize) -> io::Result<()> {
    let mut leased = LEASED.get().saturating_add(bytes);
    if leased > leased_max {
        leased = leased_bytes().saturating_add(bytes);
        if leased > leased_max {
            return Err(io::ErrorKind::OutOfMemory.into());
        }
    }
    LEASED.set(leased);
    Ok(())
}

/// Limit above which no memory is leased: a quarter above the one at which callers pause.
fn hard_limit() -> usize {
    LEASED_MAX.get().saturating_add(LEASED_MAX.get() / 4)
}

/// The account that is charged, in [`Charge::holder`].
const NOBODY: u8 = 0;
const ORIGIN: u8 = 1;
const PROCESS: u8 = 2;

/// Bytes charged to an account: that of the thread that took them, or the process's. They are returned when the value
/// is dropped, on any thread.
pub struct Charge {
    origin: Arc<Account>,
    bytes: usize,
    holder: AtomicU8,
}

impl Charge {
    /// Charges the current thread for a lease of this length. Errors: `OutOfMemory` at the hard limit.
    pub fn for_length(length: usize) -> io::Result<Charge> {
        let (_, bytes) = class_and_size(length);
        let origin = Account::current().ok_or(io::ErrorKind::OutOfMemory)?;
        charge(bytes, hard_limit())?;
        Ok(Charge { origin, bytes, holder: AtomicU8::new(ORIGIN) })
    }

    /// Number of bytes charged.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Moves the charge to the process's account. Errors: `OutOfMemory` at that account's limit; then nothing changes.
    pub fn move_to_process(&self) -> io::Result<()> {
        if self.holder.load(Ordering::Relaxed) == PROCESS {
            return Ok(());
        }
        let (bytes, bytes_max) = (self.bytes, shared_bytes_max());
        let with = |shared: usize| shared.checked_add(bytes).filter(|&shared| shared <= bytes_max);
        SHARED
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, with)
            .map_err(|_| io::Error::from(io::ErrorKind::OutOfMemory))?;
        // Another thread may have moved it meanwhile.
        let before = self.holder.swap(PROCESS, Ordering::Relaxed);
        self.give_back(before);
        Ok(())
    }

    #[inline]
    fn give_back_on_origin(&self, holder: u8) {
        match holder {
            ORIGIN => LEASED.set(LEASED.get() - self.bytes),
            holder => self.give_back(holder),
        }
    }

    fn give_back(&self, holder: u8) {
        match holder {
            ORIGIN if self.origin.is_current() => LEASED.set(LEASED.get() - self.bytes),
            ORIGIN => {
                self.origin.given_back.fetch_add(self.bytes, Ordering::Relaxed);
            }
            PROCESS => {
                SHARED.fetch_sub(self.bytes, Ordering::Relaxed);
            }
            _ => {}
        }
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.give_back(self.holder.load(Ordering::Relaxed));
    }
}

/// The memory of a block, and its charge.
pub(crate) struct Memory {
    start: NonNull<u8>,
    size: usize,
    /// The size class; `None` for blocks too large for any, or of an exact size.
    class: Option<u8>,
    charge: Charge,
}

// SAFETY: this value owns the memory as a box does, and a `Block` or a `Bytes` says which of its bytes may be read or
// written. Everything else in it is `Send` and `Sync`.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl Memory {
    fn allocate(class: Option<u8>, size: usize, origin: Arc<Account>) -> Memory {
        let bytes = Box::into_raw(vec![0_u8; size].into_boxed_slice());
        let start = NonNull::new(bytes.cast::<u8>()).expect("a box has an address");
        let charge = Charge { origin, bytes: size, holder: AtomicU8::new(ORIGIN) };
        Memory { start, size, class, charge }
    }

    /// Address of the block.
    pub fn start(&self) -> NonNull<u8> {
        self.start
    }

    pub fn size(&self) -> usize {
        self.size
    }

    pub fn charge(&self) -> &Charge {
        &self.charge
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        let bytes = ptr::slice_from_raw_parts_mut(self.start.as_ptr(), self.size);
        // SAFETY: `allocate` made it from a box of this size, and there are no references left.
        drop(unsafe { Box::from_raw(bytes) });
    }
}

/// The smallest class for `size` bytes. Computed, because every request needs it: the classes have 4^n KiB, with one of
/// 20 KiB between.
#[inline]
pub(crate) fn class_of(size: usize) -> Option<usize> {
    let above_first = size.div_ceil(KIB).saturating_sub(1);
    let power = (usize::BITS - above_first.leading_zeros()).div_ceil(2) as usize;
    let class = power + usize::from(above_first >= 20);
    (class < LEASE_CLASSES.len()).then_some(class)
}

/// Class and size of a block for `length` bytes.
#[inline]
fn class_and_size(length: usize) -> (Option<usize>, usize) {
    let class = class_of(length);
    (class, class.map_or_else(|| length.next_power_of_two(), |class| LEASE_CLASSES[class]))
}

/// A block that its owner may write to, on its thread.
pub(crate) struct Block {
    /// The only reference.
    memory: ManuallyDrop<Arc<Memory>>,
    /// A block stays on the thread whose account is charged.
    _not_send: PhantomData<Rc<()>>,
}

impl Block {
    /// A block of at least `length` bytes. Errors: `OutOfMemory` at the hard limit.
    #[inline]
    pub fn take(length: usize) -> io::Result<Block> {
        Block::take_below(length, hard_limit())
    }

    /// As [`Block::take`], ignoring the limit.
    pub fn take_past_limit(length: usize) -> Block {
        Block::take_below(length, usize::MAX).expect("there is no limit")
    }

    #[inline]
    fn take_below(length: usize, leased_max: usize) -> io::Result<Block> {
        let (class, size) = class_and_size(length);
        charge(size, leased_max)?;
        // A thread that ends has no free blocks any more.
        let kept = class.and_then(|class| FREE.try_with(|free| free.borrow_mut()[class].pop()).ok().flatten());
        let memory = match kept {
            Some(memory) => {
                memory.charge.holder.store(ORIGIN, Ordering::Relaxed);
                memory
            }
            None => Arc::new(Memory::allocate(class.map(|class| class as u8), size, origin_of_new())),
        };
        Ok(Block::of(memory))
    }

    /// A block of exactly `length` bytes, without a class: it returns to the allocator. It ignores the limit, since it
    /// replaces a larger block.
    pub fn exact(length: usize) -> Block {
        charge(length, usize::MAX).expect("there is no limit");
        Block::of(Arc::new(Memory::allocate(None, length, origin_of_new())))
    }

    fn of(memory: Arc<Memory>) -> Block {
        Block { memory: ManuallyDrop::new(memory), _not_send: PhantomData }
    }

    /// The block of this memory, if there are no other pieces of it, and it belongs and is charged to this thread.
    pub fn from_shared(memory: Arc<Memory>) -> Result<Block, Arc<Memory>> {
        if is_only_one(&memory) && memory.charge.holder.load(Ordering::Relaxed) == ORIGIN {
            return Ok(Block::of(memory));
        }
        Err(memory)
    }

    /// The memory, for several readers.
    #[inline]
    pub fn into_shared(self) -> Arc<Memory> {
        let mut block = ManuallyDrop::new(self);
        // SAFETY: the block is neither used nor dropped after this.
        unsafe { ManuallyDrop::take(&mut block.memory) }
    }

    /// Number of bytes.
    #[inline]
    pub fn size(&self) -> usize {
        self.memory.size
    }

    #[inline]
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: all bytes of the block are initialized, and this is the only reference to them: they are not written
        // while borrowed.
        unsafe { slice::from_raw_parts(self.memory.start.as_ptr(), self.memory.size) }
    }

    #[inline]
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and they are not read elsewhere.
        unsafe { slice::from_raw_parts_mut(self.memory.start.as_ptr(), self.memory.size) }
    }
}

impl Drop for Block {
    #[inline]
    fn drop(&mut self) {
        // SAFETY: it is not used after this.
        release(unsafe { ManuallyDrop::take(&mut self.memory) });
    }
}

/// The account for a new block. A thread that is ending charges an account that is never used again.
#[cold]
fn origin_of_new() -> Arc<Account> {
    Account::current().unwrap_or_default()
}

/// True if this is the only reference, on the thread that the block belongs to.
#[inline]
fn is_only_one(memory: &Arc<Memory>) -> bool {
    if Arc::strong_count(memory) != 1 || !memory.charge.origin.is_current() {
        return false;
    }
    // All uses of other references happened before this.
    fence(Ordering::Acquire);
    true
}

/// Drops a reference; if it was the last one, on the block's thread, the block is free for the next lease.
#[inline]
pub(crate) fn drop_shared(memory: Arc<Memory>) {
    if is_only_one(&memory) {
        release(memory);
    }
}

/// Removes the charge of an unreferenced block and keeps it for the next lease. On its own thread.
#[inline]
fn release(memory: Arc<Memory>) {
    let charge = &memory.charge;
    charge.give_back_on_origin(charge.holder.load(Ordering::Relaxed));
    charge.holder.store(NOBODY, Ordering::Relaxed);
    let Some(class) = memory.class else { return };
    let _ = FREE.try_with(|free| {
        let list = &mut free.borrow_mut()[usize::from(class)];
        if list.len() < KEPT_MAX[usize::from(class)] {
            list.push(memory);
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_size_gets_the_smallest_class_that_holds_it() {
        assert_eq!(class_of(0), Some(0));
        for (class, &bytes) in LEASE_CLASSES.iter().enumerate() {
            assert_eq!(class_of(bytes), Some(class));
            assert_eq!(class_of(bytes + 1), Some(class + 1).filter(|&class| class < LEASE_CLASSES.len()));
        }
        assert_eq!(class_of(usize::MAX), None);
    }

    #[test]
    fn a_tls_record_and_an_http2_frame_do_not_take_64_kib() {
        for bytes in [5 + 16 * KIB + 2 * KIB, 9 + 16 * KIB] {
            assert_eq!(class_and_size(bytes).1, 20 * KIB);
        }
    }
}
