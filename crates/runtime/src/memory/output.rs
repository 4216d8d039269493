//! The output queue: owned chunks waiting to be sent, in order.
//!
//! Chunks are [`Bytes`]; small pieces may be copied into one lease with [`Output::append`] or `io::Write`. The queue
//! itself is unbounded: callers check [`Output::len_bytes`].

use std::fmt;
use std::io;

use smallvec::SmallVec;

use crate::memory::buffer::Lease;
use crate::memory::bytes::Bytes;

/// Chunks sent by one system call at most: more than a response head and body need, few enough for the stack.
pub(crate) const SLICES_MAX: usize = 64;

/// Number of sent chunks that stay in place before the rest is moved down.
const GAP_MAX: usize = 32;

/// A queue of owned chunks to send.
#[derive(Default)]
pub struct Output {
    /// `chunks[head..]` are waiting, none of them empty; those before are empty.
    chunks: SmallVec<[Bytes; 3]>,
    head: usize,
    /// Bytes waiting, including those on loan.
    length: usize,
    more_follows: bool,
    loan: Option<Loan>,
}

/// Chunks that a driver has borrowed from the front of a queue to send them: they still count as waiting.
#[derive(Clone, Copy)]
struct Loan {
    /// Distinguishes the loans of a driver.
    ticket: u32,
    length: usize,
}

impl Output {
    /// An empty queue; allocates nothing.
    pub fn new() -> Self {
        Output { chunks: SmallVec::new(), head: 0, length: 0, more_follows: false, loan: None }
    }

    /// Number of waiting bytes.
    #[inline]
    pub fn len_bytes(&self) -> usize {
        self.length
    }

    /// True if no bytes wait.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// Announces that more is sent right after this by other means (a file): the kernel then waits for it before it
    /// sends a packet that is not full (`MSG_MORE`; like `TCP_CORK`, without its two calls). Applies until it is
    /// changed.
    pub fn set_more_follows(&mut self, more_follows: bool) {
        self.more_follows = more_follows;
    }

    /// The value of [`Output::set_more_follows`].
    pub fn more_follows(&self) -> bool {
        self.more_follows
    }

    /// Queues these bytes.
    pub fn push(&mut self, bytes: impl Into<Bytes>) {
        self.push_chunk(bytes.into());
    }

    fn push_chunk(&mut self, bytes: Bytes) {
        if !bytes.is_empty() {
            self.length += bytes.len();
            self.chunks.push(bytes);
        }
    }

    /// Queues a copy of `bytes`, in the memory of the last chunk if that is a lease with room.
    ///
    /// Errors: `OutOfMemory` at the hard limit of leases; nothing is queued then.
    pub fn append(&mut self, bytes: &[u8]) -> io::Result<()> {
        let Some(mut last) = self.take_last_lease() else {
            if !bytes.is_empty() {
                self.push_chunk(Lease::copy_of(bytes)?.freeze());
            }
            return Ok(());
        };
        let length_before = last.len();
        let appended = last.append(bytes);
        // All or nothing: no part must be queued if memory for the rest may be refused.
        let rest = match &bytes[appended..] {
            [] => Ok(None),
            rest => Lease::copy_of(rest).map(Some),
        };
        if rest.is_err() {
            last.truncate(length_before);
        }
        self.length += last.len() - length_before;
        self.chunks.push(last.freeze());
        rest.map(|rest| rest.into_iter().for_each(|rest| self.push_chunk(rest.freeze())))
    }

    /// Takes the last waiting chunk, if it can be written to.
    fn take_last_lease(&mut self) -> Option<Lease> {
        let last = self.chunks.pop()?;
        last.try_into_lease().map_err(|last| self.chunks.push(last)).ok()
    }

    /// Drops all waiting bytes.
    pub fn clear(&mut self) {
        self.chunks.clear();
        self.head = 0;
        self.length = 0;
        self.loan = None;
    }

    /// Lends all waiting bytes to a driver, which sends them in the background. They still count as waiting. (If they
    /// are dropped by `clear` meanwhile, they are sent all the same.)
    pub(crate) fn lend(&mut self, ticket: u32) -> Output {
        debug_assert!(self.loan.is_none());
        let length = self.length;
        let lent = std::mem::take(self);
        (self.length, self.more_follows) = (length, lent.more_follows);
        self.loan = Some(Loan { ticket, length });
        lent
    }

    /// Ends the loan with this ticket: unsent bytes wait in front again. False if this queue has no such loan.
    pub(crate) fn take_back(&mut self, ticket: u32, rest: &mut Output) -> bool {
        let Some(loan) = self.loan.take_if(|loan| loan.ticket == ticket) else {
            return false;
        };
        self.length = self.length - loan.length + rest.length;
        if !rest.is_empty() {
            let newer = std::mem::replace(&mut self.chunks, std::mem::take(&mut rest.chunks));
            // During a loan no bytes are consumed here, so `newer` has no gap.
            self.head = rest.head;
            self.chunks.extend(newer);
        }
        rest.clear();
        true
    }

    /// True if some bytes are on loan.
    pub(crate) fn has_loan(&self) -> bool {
        self.loan.is_some()
    }

    /// Forgets a loan that a driver will not return.
    pub(crate) fn forget_loan(&mut self) {
        if let Some(loan) = self.loan.take() {
            self.length -= loan.length;
        }
    }

    /// The bytes of the first chunk, empty if there is none.
    pub fn first(&self) -> &[u8] {
        self.chunks.get(self.head).map_or(&[], |chunk| chunk)
    }

    /// The waiting chunks, in order.
    pub fn chunks(&self) -> impl Iterator<Item = &[u8]> {
        self.chunks[self.head..].iter().map(|chunk| &**chunk)
    }

    /// Number of waiting chunks.
    pub fn chunk_count(&self) -> usize {
        self.chunks.len() - self.head
    }

    /// Moves the first `count` bytes, which must wait here, to the end of another queue, without a copy.
    pub fn move_to(&mut self, count: usize, other: &mut Output) {
        assert!(count <= self.length, "moved more than there was");
        let mut left = count;
        while left > 0 {
            let chunk = &self.chunks[self.head];
            let length = left.min(chunk.len());
            other.push_chunk(chunk.slice(..length));
            self.consume(length);
            left -= length;
        }
    }

    /// Removes the first `count` bytes, which must wait here.
    pub fn consume(&mut self, count: usize) {
        assert!(count <= self.length, "consumed more than there was");
        debug_assert!(self.loan.is_none(), "bytes on loan cannot be consumed");
        self.length -= count;
        let mut count = count;
        while count > 0 {
            let chunk = &mut self.chunks[self.head];
            let length = chunk.len();
            if count < length {
                chunk.advance(count);
                break;
            }
            count -= length;
            *chunk = Bytes::new();
            self.head += 1;
        }
        if self.head == self.chunks.len() {
            self.chunks.clear();
            self.head = 0;
        } else if self.head >= GAP_MAX {
            self.chunks.drain(..self.head);
            self.head = 0;
        }
    }
}

impl io::Write for Output {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.append(bytes)?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl fmt::Debug for Output {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Output({} bytes in {} chunks)", self.length, self.chunk_count())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(output: &Output) -> Vec<u8> {
        output.chunks().flatten().copied().collect()
    }

    #[test]
    fn bytes_leave_in_the_order_in_which_they_came() {
        let mut output = Output::new();
        output.append(b"head ").unwrap();
        output.append(b"more ").unwrap();
        output.push(b"static ");
        output.push(Bytes::from_static(b""));
        output.push(Bytes::from(b"shared ".to_vec()));
        output.append(b"tail").unwrap();
        assert_eq!(output.chunk_count(), 4);
        assert_eq!(text(&output), b"head more static shared tail");
        output.consume(12);
        assert_eq!(text(&output), b"atic shared tail");
        output.consume(16);
        assert!(output.is_empty() && output.first().is_empty());
    }

    #[test]
    fn rest_of_a_loan_comes_back_in_front() {
        let mut output = Output::new();
        output.append(b"lent ").unwrap();
        output.push(b"away ");
        let mut lent = output.lend(7);
        assert_eq!((output.len_bytes(), output.chunk_count()), (10, 0));
        output.append(b"newer").unwrap();
        lent.consume(7);
        assert!(!output.take_back(6, &mut Output::new()), "another loan");
        assert!(output.take_back(7, &mut lent));
        assert_eq!(text(&output), b"ay newer");
        assert_eq!(output.len_bytes(), 8);
        let mut all = output.lend(8);
        all.consume(8);
        assert!(output.take_back(8, &mut all) && output.is_empty());
        output.push(b"lost");
        let _lost = output.lend(9);
        output.push(b"kept");
        output.forget_loan();
        assert_eq!((text(&output), output.len_bytes()), (b"kept".to_vec(), 4));
    }

    #[test]
    fn many_chunks_are_consumed_piece_by_piece() {
        let mut output = Output::new();
        let mut expected = Vec::new();
        for number in 0..200u8 {
            output.push(Bytes::from(vec![number; 3]));
            expected.extend([number; 3]);
        }
        for _ in 0..599 {
            output.consume(1);
            expected.remove(0);
            assert_eq!(text(&output), expected);
        }
    }

    #[test]
    fn moved_bytes_are_appended() {
        let (mut from, mut to) = (Output::new(), Output::new());
        from.push(b"abc");
        from.push(b"defgh");
        to.push(b"> ");
        from.move_to(5, &mut to);
        from.move_to(0, &mut to);
        assert_eq!((text(&from), text(&to)), (b"fgh".to_vec(), b"> abcde".to_vec()));
        assert_eq!((from.len_bytes(), to.len_bytes()), (3, 7));
    }

    #[test]
    fn appending_fills_the_last_lease_and_goes_on_in_another() {
        let mut output = Output::new();
        for _ in 0..3 {
            output.append(&[7; 500]).unwrap();
        }
        assert_eq!((output.chunk_count(), output.len_bytes()), (2, 1500));
        assert_eq!(text(&output), [7; 1500]);
    }
}
