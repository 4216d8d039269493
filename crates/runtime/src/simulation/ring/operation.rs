//! An entry as the kernel reads it, and the resulting operation.

use std::os::fd::RawFd;

use io_uring::squeue;

use crate::driver::io_uring::ring::Completion;
use crate::executor::slots::Key;

pub(super) struct Operation {
    pub user_data: u64,
    pub target: Target,
    pub what: What,
    pub misses: u8,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Target {
    End(Key),
    Listener(Key),
    /// A descriptor that is not of this world: the loop's inbox.
    Doorbell,
    File(RawFd),
}

#[derive(Clone, Copy)]
pub(super) enum What {
    Poll {
        events: u32,
    },
    /// `left`: `None` = a single receive; otherwise the bytes until the multishot receive ends.
    Receive {
        length: usize,
        left: Option<usize>,
    },
    Send {
        bytes: Bytes,
        /// Hash of the bytes when they were submitted.
        hash: u64,
        sent: usize,
        is_whole: bool,
    },
    Read {
        memory: (u64, usize),
        offset: u64,
    },
}

impl Operation {
    /// The completion after a cancellation.
    pub fn cancelled(&self) -> Completion {
        let result = match self.what {
            What::Send { sent: sent @ 1.., .. } => sent as i32,
            _ => -libc::ECANCELED,
        };
        Completion { user_data: self.user_data, result, flags: 0 }
    }
}

/// Bytes to send, in the driver's memory.
#[derive(Clone, Copy)]
pub(super) enum Bytes {
    Slice(u64, usize),
    Message(u64),
}

/// The result of one step of an operation.
pub(super) enum Step {
    Waits,
    /// It completes something and goes on.
    Tells(Completion),
    Ends(Completion),
}

/// `struct io_uring_sqe`, the fields in use.
pub(super) struct Entry {
    pub opcode: u8,
    pub flags: u8,
    pub priority: u16,
    pub descriptor: RawFd,
    pub offset: u64,
    pub address: u64,
    pub length: u32,
    pub operation_flags: u32,
    pub user_data: u64,
    pub optional_length: u32,
}

impl Entry {
    pub fn parse(entry: &squeue::Entry) -> Entry {
        // SAFETY: an entry is 64 bytes, for which every value is valid.
        let words = unsafe { std::mem::transmute::<squeue::Entry, [u32; 16]>(entry.clone()) };
        let long = |index: usize| u64::from(words[index]) | u64::from(words[index + 1]) << 32;
        Entry {
            opcode: words[0] as u8,
            flags: (words[0] >> 8) as u8,
            priority: (words[0] >> 16) as u16,
            descriptor: words[1] as RawFd,
            offset: long(2),
            address: long(4),
            length: words[6],
            operation_flags: words[7],
            user_data: long(8),
            optional_length: words[11],
        }
    }
}

impl Bytes {
    pub fn length(self) -> usize {
        match self {
            Bytes::Slice(_, length) => length,
            // SAFETY: as in `gather`, at the same times.
            Bytes::Message(_) => unsafe { self.gather() }.len(),
        }
    }

    /// # Safety
    ///
    /// The memory exists.
    pub unsafe fn gather(self) -> Vec<u8> {
        // SAFETY: the caller's promise.
        let copy = |address: *const u8, length| unsafe { std::slice::from_raw_parts(address, length) }.to_vec();
        match self {
            Bytes::Slice(address, length) => copy(address as *const u8, length),
            Bytes::Message(address) => {
                // SAFETY: the caller's promise.
                let header = unsafe { &*(address as *const libc::msghdr) };
                // SAFETY: as above.
                let slices = unsafe { std::slice::from_raw_parts(header.msg_iov, header.msg_iovlen as _) };
                slices.iter().flat_map(|slice| copy(slice.iov_base.cast(), slice.iov_len)).collect()
            }
        }
    }
}
