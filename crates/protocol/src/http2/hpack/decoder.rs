//! Decoder for field blocks: RFC 7541 §3 and §6.
//!
//! A block must be complete. Its fields are decoded one at a time, so that the caller can count and check them or stop.
//! Unwanted fields must be decoded too, since they update the dynamic table. Invariant: each field takes at least one
//! byte of the block, and appends at most the size of the table or eight fifths of the block, whichever is larger.

use std::fmt;

use super::integer;
use super::static_table::ENTRIES;
use super::table::DynamicTable;
use super::{ENTRY_OVERHEAD, TABLE_SIZE_DEFAULT, huffman};
use crate::Range32;
use crate::http1::{is_token_byte, skip_text};

/// An error in a block. The state of the table is unknown after it, so it is a connection error of type
/// COMPRESSION_ERROR (RFC 9113 §4.3).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum HpackFault {
    /// The block ends within a field: RFC 7541 §5.
    Truncated,
    /// An integer larger than supported: RFC 7541 §5.1.
    IntegerTooLong,
    /// Invalid padding, or the EOS symbol within a string: RFC 7541 §5.2.
    InvalidHuffman,
    /// An index without entry: RFC 7541 §2.3.3.
    InvalidIndex(u32),
    /// A table size above the allowed maximum: RFC 7541 §6.3.
    SizeUpdateTooLarge(u32),
    /// A size update after the first field, or a third one: RFC 7541 §4.2.
    MisplacedSizeUpdate,
    /// The table size was reduced, and the block does not begin with a size update: RFC 7541 §4.2.
    MissingSizeUpdate,
}

impl fmt::Display for HpackFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Truncated => f.write_str("header block with incorrect length"),
            Self::IntegerTooLong => f.write_str("header field with too long length value"),
            Self::InvalidHuffman => f.write_str("invalid encoded header field"),
            Self::InvalidIndex(0) => f.write_str("invalid hpack table index 0"),
            Self::InvalidIndex(index) => write!(f, "out of bound hpack table index: {index}"),
            Self::SizeUpdateTooLarge(size) => write!(f, "invalid table size update: {size}"),
            Self::MisplacedSizeUpdate => f.write_str("misplaced table size update"),
            Self::MissingSizeUpdate => f.write_str("header block without table size update"),
        }
    }
}

impl std::error::Error for HpackFault {}

/// Class of a field name: RFC 9113 §8.2.1.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum NameKind {
    /// Lower-case letters, digits and "-".
    Plain,
    /// A token with other characters, but without capitals.
    Token,
    /// A colon followed by lower-case letters, digits and "-".
    Pseudo,
    /// Anything else: capitals, control characters, an empty name.
    Invalid,
}

impl NameKind {
    fn of(name: &[u8]) -> Self {
        let is_plain = |byte: &u8| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'-');
        match name {
            [] => Self::Invalid,
            [b':', rest @ ..] if !rest.is_empty() && rest.iter().all(is_plain) => Self::Pseudo,
            name if name.iter().all(is_plain) => Self::Plain,
            name if name.iter().all(|byte| is_token_byte(*byte) && !byte.is_ascii_uppercase()) => Self::Token,
            _ => Self::Invalid,
        }
    }
}

/// Returns `true` if a value is valid in every version of HTTP: no space or tab at its ends (RFC 9113 §8.2.1), and no
/// control characters except tabs, which is stricter than that section (CR, LF, NUL).
fn is_valid_value(value: &[u8]) -> bool {
    let is_space = |byte: Option<&u8>| matches!(byte, Some(b' ' | b'\t'));
    if is_space(value.first()) || is_space(value.last()) {
        return false;
    }
    let mut at = skip_text(value, 0);
    while value.get(at) == Some(&b'\t') {
        at = skip_text(value, at + 1);
    }
    at == value.len()
}

/// Results of the checks of a field, stored with its table entry.
#[derive(Clone, Copy, Debug)]
struct Verdict {
    name: NameKind,
    is_valid_value: bool,
}

/// A decoded field, appended to the caller's text as `name: value`.
#[derive(Clone, Copy, Debug)]
pub struct DecodedField {
    /// Name.
    pub name: Range32,
    /// Value.
    pub value: Range32,
    /// Class of the name.
    pub name_kind: NameKind,
    /// `true` if the value can be forwarded.
    pub is_valid_value: bool,
    /// `true` if the sender forbids indexing on all hops: RFC 7541 §6.2.3.
    pub is_never_indexed: bool,
}

impl DecodedField {
    /// Size of the field in a field list: RFC 9113 §10.5.1.
    pub fn list_size(&self) -> usize {
        self.name.len() + self.value.len() + ENTRY_OVERHEAD
    }
}

/// The decoder for one direction of a connection.
#[derive(Clone, Debug)]
pub struct Decoder {
    table: DynamicTable<Verdict>,
    /// Maximum table size that the peer may choose.
    size_limit: u32,
    /// The next block must begin with a size update.
    needs_size_update: bool,
    /// Number of size updates that the current block may still contain.
    size_updates_left: u8,
}

impl Default for Decoder {
    fn default() -> Self {
        Self::new(TABLE_SIZE_DEFAULT)
    }
}

impl Decoder {
    /// Creates a decoder whose maximum table size is the default or `size_announced`, whichever is larger: the peer may
    /// not have received our settings yet.
    pub fn new(size_announced: u32) -> Self {
        Self {
            table: DynamicTable::new(TABLE_SIZE_DEFAULT),
            size_limit: size_announced.max(TABLE_SIZE_DEFAULT),
            needs_size_update: false,
            size_updates_left: 2,
        }
    }

    /// Handles the peer's acknowledgement of SETTINGS_HEADER_TABLE_SIZE: RFC 7541 §4.2.
    pub fn handle_size_acknowledged(&mut self, size: u32) {
        self.size_limit = size;
        self.needs_size_update |= self.table.size_max() > size;
    }

    /// Begins a new block.
    pub fn begin_block(&mut self) {
        self.size_updates_left = 2;
    }

    /// Size of the dynamic table in bytes, as defined by RFC 7541 §4.1.
    pub fn table_size(&self) -> usize {
        self.table.size()
    }

    /// Decodes the field at `*at` and moves `*at` behind it, or returns `None` at the end of the block. The text of the
    /// field is appended to `out`.
    pub fn next_field(
        &mut self,
        block: &[u8],
        at: &mut usize,
        out: &mut Vec<u8>,
    ) -> Result<Option<DecodedField>, HpackFault> {
        let first = loop {
            let Some(&first) = block.get(*at) else {
                return Ok(None);
            };
            if first & 0xe0 != 0x20 {
                break first;
            }
            self.update_size(integer::read(block, at, 5)?)?;
        };
        if self.needs_size_update {
            return Err(HpackFault::MissingSizeUpdate);
        }
        self.size_updates_left = 0;
        if first & 0x80 != 0 {
            let index = integer::read(block, at, 7)?;
            return self.indexed(index, out).map(Some);
        }
        let (is_incremental, prefix_bits) = if first & 0x40 != 0 { (true, 6) } else { (false, 4) };
        let start = out.len();
        let name_kind = match integer::read(block, at, prefix_bits)? {
            0 => {
                read_string(block, at, out)?;
                NameKind::of(&out[start..])
            }
            index => {
                let (name, _, verdict) = self.entry(index)?;
                out.extend_from_slice(name);
                verdict.name
            }
        };
        let name = Range32::new(start, out.len());
        out.extend_from_slice(b": ");
        let value_start = out.len();
        read_string(block, at, out)?;
        let value = Range32::new(value_start, out.len());
        let is_valid_value = is_valid_value(value.of(out));
        if is_incremental {
            self.table.insert(name.of(out), value.of(out), Verdict { name: name_kind, is_valid_value });
        }
        let is_never_indexed = !is_incremental && first & 0x10 != 0;
        Ok(Some(DecodedField { name, value, name_kind, is_valid_value, is_never_indexed }))
    }

    fn indexed(&self, index: u32, out: &mut Vec<u8>) -> Result<DecodedField, HpackFault> {
        let (name, value, verdict) = self.entry(index)?;
        let start = out.len();
        out.reserve(name.len() + value.len() + 2);
        out.extend_from_slice(name);
        out.extend_from_slice(b": ");
        out.extend_from_slice(value);
        let value_start = start + name.len() + 2;
        Ok(DecodedField {
            name: Range32::new(start, start + name.len()),
            value: Range32::new(value_start, out.len()),
            name_kind: verdict.name,
            is_valid_value: verdict.is_valid_value,
            is_never_indexed: false,
        })
    }

    fn entry(&self, index: u32) -> Result<(&[u8], &[u8], Verdict), HpackFault> {
        let fault = HpackFault::InvalidIndex(index);
        let place = (index as usize).checked_sub(1).ok_or(fault)?;
        if let Some((name, value)) = ENTRIES.get(place) {
            let kind = if index <= PSEUDO_LAST { NameKind::Pseudo } else { NameKind::Plain };
            return Ok((name.as_bytes(), value.as_bytes(), Verdict { name: kind, is_valid_value: true }));
        }
        self.table.get(place - ENTRIES.len()).ok_or(fault)
    }

    fn update_size(&mut self, size: u32) -> Result<(), HpackFault> {
        if self.size_updates_left == 0 {
            return Err(HpackFault::MisplacedSizeUpdate);
        }
        if size > self.size_limit {
            return Err(HpackFault::SizeUpdateTooLarge(size));
        }
        self.size_updates_left -= 1;
        self.needs_size_update = false;
        self.table.set_size_max(size);
        Ok(())
    }
}

/// The last entry of the static table whose name is a pseudo-header.
const PSEUDO_LAST: u32 = 14;

/// Appends the string literal at `*at`: RFC 7541 §5.2.
fn read_string(block: &[u8], at: &mut usize, out: &mut Vec<u8>) -> Result<(), HpackFault> {
    let is_huffman = block.get(*at).ok_or(HpackFault::Truncated)? & 0x80 != 0;
    let length = integer::read(block, at, 7)? as usize;
    let text = block.get(*at..*at + length).ok_or(HpackFault::Truncated)?;
    *at += length;
    if is_huffman {
        return huffman::decode(text, out);
    }
    out.extend_from_slice(text);
    Ok(())
}
