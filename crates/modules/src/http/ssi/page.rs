//! State that all documents of a client's request share: variables, blocks, and the captures of the last regular
//! expression. Its size is bounded, whatever the documents contain.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;

use gale_http::variables::regex::Captures;
use gale_runtime::Bytes;

/// Maximum number of documents that a request includes in all. It stops pages that include themselves several times.
/// The number is nginx's, which counts only those that are not answered yet.
const INCLUDES_MAX: u32 = 65535 - 1000;

/// Maximum size of the blocks and the variables of a request, in bytes.
const BYTES_MAX: usize = 1024 * 1024;

/// Overhead of an entry in the accounting.
const ENTRY_BYTES: usize = 64;

/// The size would exceed its bound.
pub struct TooMuch;

#[derive(Default)]
pub struct Page {
    variables: RefCell<HashMap<Vec<u8>, Bytes>>,
    blocks: RefCell<Vec<(Vec<u8>, Vec<u8>)>>,
    captured: RefCell<(Captures, Vec<u8>)>,
    includes: Cell<u32>,
    bytes: Cell<usize>,
}

impl Page {
    /// Sets a variable; the name is in lower case.
    pub fn set_variable(&self, name: &[u8], value: Bytes) -> Result<(), TooMuch> {
        let mut variables = self.variables.borrow_mut();
        let known = variables.get_mut(name);
        let before = known.as_ref().map_or(0, |value| value.len());
        let bytes = self.bytes.get() - before + value.len();
        let bytes = if known.is_some() { bytes } else { bytes + name.len() + ENTRY_BYTES };
        self.spend_up_to(bytes)?;
        match known {
            Some(known) => *known = value,
            None => {
                variables.insert(name.into(), value);
            }
        }
        Ok(())
    }

    /// Appends the value of a variable or a capture. Returns `false` if there is none.
    pub fn append_variable(&self, name: &[u8], out: &mut Vec<u8>) -> bool {
        if let [digit @ b'0'..=b'9'] = name {
            let (captures, text) = &*self.captured.borrow();
            let number = usize::from(digit - b'0');
            if number < captures.len() {
                out.extend_from_slice(captures.text(text, number).unwrap_or_default());
                return true;
            }
        }
        let variables = self.variables.borrow();
        variables.get(name).map(|value| out.extend_from_slice(value)).is_some()
    }

    /// Sets `$0` to `$9` to the captures of this match in `text`.
    pub fn set_captures(&self, captures: Captures, text: Vec<u8>) {
        self.captured.replace((captures, text));
    }

    /// Begins a block with this name, to which [`Page::append_block`] adds. Returns its number.
    pub fn begin_block(&self, name: Vec<u8>) -> Result<usize, TooMuch> {
        self.spend_up_to(self.bytes.get() + name.len() + ENTRY_BYTES)?;
        let mut blocks = self.blocks.borrow_mut();
        blocks.push((name, Vec::new()));
        Ok(blocks.len() - 1)
    }

    /// Adds to the block of this number: several documents may have an open block at a time.
    pub fn append_block(&self, number: Option<usize>, text: &[u8]) -> Result<(), TooMuch> {
        let mut blocks = self.blocks.borrow_mut();
        let Some((_, block)) = number.and_then(|number| blocks.get_mut(number)) else { return Ok(()) };
        self.spend_up_to(self.bytes.get() + text.len())?;
        block.extend_from_slice(text);
        Ok(())
    }

    /// Empties the block of this number.
    pub fn forget_block(&self, number: usize) {
        if let Some((_, block)) = self.blocks.borrow_mut().get_mut(number) {
            self.bytes.set(self.bytes.get() - block.len());
            *block = Vec::new();
        }
    }

    /// Returns the first block with this name.
    pub fn block(&self, name: &[u8]) -> Option<Bytes> {
        let blocks = self.blocks.borrow();
        let (_, text) = blocks.iter().find(|(known, _)| known == name)?;
        Some(Bytes::copy_from_slice(text))
    }

    /// Counts an included document.
    pub fn count_include(&self) -> Result<(), TooMuch> {
        self.includes.set(self.includes.get() + 1);
        if self.includes.get() > INCLUDES_MAX { Err(TooMuch) } else { Ok(()) }
    }

    fn spend_up_to(&self, bytes: usize) -> Result<(), TooMuch> {
        if bytes > BYTES_MAX {
            return Err(TooMuch);
        }
        self.bytes.set(bytes);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_of_a_page_is_bounded() {
        let page = Page::default();
        let half = Bytes::from(vec![b'x'; BYTES_MAX / 2 - 100]);
        for _ in 0..100 {
            assert!(page.set_variable(b"same", half.clone()).is_ok());
        }
        assert!(page.set_variable(b"other", half.clone()).is_ok());
        assert!(page.set_variable(b"third", half.clone()).is_err());
        assert!(page.begin_block(b"none".to_vec()).is_err() || page.append_block(Some(0), &half).is_err());
        assert!(page.set_variable(b"same", Bytes::new()).is_ok());
        let block = page.begin_block(b"a".to_vec()).ok();
        assert!(page.append_block(block, &[0; 1000]).is_ok() && page.append_block(block, &[0; BYTES_MAX / 2]).is_err());
        page.forget_block(block.unwrap());
        assert_eq!(page.block(b"a").as_deref(), Some(&b""[..]));
        assert!(page.set_variable(b"same", half.slice(500..)).is_ok());
        let empty = Page::default();
        let made = (0..BYTES_MAX).take_while(|number| empty.set_variable(&number.to_be_bytes(), Bytes::new()).is_ok());
        assert!(made.count() < BYTES_MAX / ENTRY_BYTES);
    }

    #[test]
    fn blocks_of_several_documents_grow_side_by_side() {
        let page = Page::default();
        let (one, two) = (page.begin_block(b"one".to_vec()).ok(), page.begin_block(b"two".to_vec()).ok());
        for (number, text) in [(one, "first"), (two, "second"), (None, "lost"), (one, " more")] {
            assert!(page.append_block(number, text.as_bytes()).is_ok());
        }
        assert_eq!(page.block(b"one").as_deref(), Some(&b"first more"[..]));
        assert_eq!(page.block(b"two").as_deref(), Some(&b"second"[..]));
    }

    #[test]
    fn includes_are_counted() {
        let page = Page::default();
        assert!((0..INCLUDES_MAX).all(|_| page.count_include().is_ok()));
        assert!(page.count_include().is_err());
    }
}
