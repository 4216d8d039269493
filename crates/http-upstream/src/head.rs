//! Parses the head of a response as it arrives, for all protocols.
//!
//! Most heads arrive in one piece, so their parsed parts are needed only for a moment. They are kept per thread: the
//! most recently used one is in the processor's caches, and a request that waits for its response owns none.

use std::cell::RefCell;
use std::ops::Deref;

use gale_protocol::ResponseFault;
use gale_protocol::http1::{ResponseHeadParser, ResponseParts, Status};

/// Parses one head after another.
pub(super) struct HeadReader {
    parser: ResponseHeadParser,
    /// Parts of an incomplete head.
    begun: Option<Parts>,
}

/// The parts of a head, in memory that the thread reuses.
pub(super) struct Parts(Option<Box<ResponseParts>>);

thread_local! {
    #[expect(clippy::vec_box, reason = "they stay where they are")]
    static SPARE: RefCell<Vec<Box<ResponseParts>>> = const { RefCell::new(Vec::new()) };
}

/// Maximum number of spare parts. Usually one is in use, and one more for each incomplete head.
const SPARE_MAX: usize = 8;

impl HeadReader {
    pub fn new(parser: ResponseHeadParser) -> HeadReader {
        HeadReader { parser, begun: None }
    }

    /// Parses the received bytes, from the beginning of the head on. A complete head is returned with its length.
    ///
    /// # Errors
    /// The head is invalid.
    pub fn read(&mut self, input: &[u8]) -> Result<Option<(Parts, usize)>, ResponseFault> {
        let mut parts = self.begun.take().unwrap_or_else(Parts::take);
        match self.parser.parse(input, parts.get_mut())? {
            Status::Complete { consumed } => Ok(Some((parts, consumed))),
            Status::NeedMore => {
                self.begun = Some(parts);
                Ok(None)
            }
        }
    }
}

impl Parts {
    fn take() -> Parts {
        Parts(Some(SPARE.with_borrow_mut(Vec::pop).unwrap_or_default()))
    }

    fn get_mut(&mut self) -> &mut ResponseParts {
        self.0.as_mut().expect("there until it is dropped")
    }
}

impl Deref for Parts {
    type Target = ResponseParts;

    fn deref(&self) -> &ResponseParts {
        self.0.as_ref().expect("there until it is dropped")
    }
}

impl Drop for Parts {
    fn drop(&mut self) {
        let Some(parts) = self.0.take() else { return };
        // The spare parts are gone when the thread ends.
        let _ = SPARE.try_with(|spare| {
            let mut spare = spare.borrow_mut();
            if spare.len() < SPARE_MAX {
                spare.push(parts);
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spare() -> usize {
        SPARE.with_borrow(Vec::len)
    }

    #[test]
    fn a_head_in_pieces_keeps_its_parts_and_others_are_read_meanwhile() {
        let reader = || HeadReader::new(ResponseHeadParser::new(4096));
        let (mut slow, mut fast) = (reader(), reader());
        let head = b"HTTP/1.1 201 Made\r\nX: y\r\n\r\n";
        assert!(matches!(slow.read(&head[..22]), Ok(None)));
        for _ in 0..3 {
            let (parts, length) = fast.read(b"HTTP/1.1 200 OK\r\n\r\n").unwrap().unwrap();
            assert_eq!((parts.status, parts.fields.len(), length), (200, 0, 19));
        }
        assert_eq!(spare(), 1, "the same is used each time");
        let (parts, length) = slow.read(head).unwrap().unwrap();
        assert_eq!((parts.status, parts.fields.len(), length), (201, 1, head.len()));
        drop(parts);
        assert_eq!(spare(), 2);
        assert!(fast.read(b"nonsense").is_err() && spare() == 2);
    }
}
