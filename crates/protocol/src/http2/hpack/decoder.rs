//! Decodes blocks of fields: RFC 7541 §3 and §6.
//!
//! A block must be there as a whole; its fields are taken one at a time, so that the caller can stop, count and judge
//! as it goes. A field that nobody wants is still decoded, since the table needs it. Invariant: each field takes at
//! least one byte of the block, and appends no more than the larger of the table's size and eight fifths of the block.

use std::fmt;

use super::integer;
use super::static_table::ENTRIES;
use super::table::DynamicTable;
use super::{ENTRY_OVERHEAD, TABLE_SIZE_DEFAULT, huffman};
use crate::Range32;
use crate::http1::{is_token_byte, skip_text};

/// What is wrong with a block. The table is unknown from there on: a connection error of the type COMPRESSION_ERROR
/// (RFC 9113 §4.3).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum HpackFault {
    /// The block ends within a field: RFC 7541 §5.
    Truncated,
    /// An integer beyond all use: RFC 7541 §5.1.
    IntegerTooLong,
    /// Wrong padding, or the end of the string inside of it: RFC 7541 §5.2.
    InvalidHuffman,
    /// An index of no entry: RFC 7541 §2.3.3.
    InvalidIndex(u32),
    /// The table is to be larger than was allowed: RFC 7541 §6.3.
    SizeUpdateTooLarge(u32),
    /// The table's size changes behind the first field, or a third time: RFC 7541 §4.2.
    MisplacedSizeUpdate,
    /// The table's size was limited and the block does not begin with its change: RFC 7541 §4.2.
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

/// What the bytes of a name are like: RFC 9113 §8.2.1.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum NameKind {
    /// Small letters, digits and "-".
    Plain,
    /// A token with other bytes, of which none is a capital.
    Token,
    /// A colon and small letters, digits and "-".
    Pseudo,
    /// Anything else: capitals, control characters, nothing at all.
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

/// Whether a value can stand in any version of HTTP: no space or tab at its ends (RFC 9113 §8.2.1), and no control
/// character but tabs, which is more than the CR, LF and NUL of that section.
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

/// What was found out about a field, kept with it in the table.
#[derive(Clone, Copy, Debug)]
struct Verdict {
    name: NameKind,
    is_valid_value: bool,
}

/// One field, which has been appended to the caller's text as `name: value`.
#[derive(Clone, Copy, Debug)]
pub struct DecodedField {
    /// The name.
    pub name: Range32,
    /// The value.
    pub value: Range32,
    /// What the name is like.
    pub name_kind: NameKind,
    /// Whether the value can be passed on.
    pub is_valid_value: bool,
    /// The sender wants it never to be indexed on its way: RFC 7541 §6.2.3.
    pub is_never_indexed: bool,
}

impl DecodedField {
    /// What it counts in the size of a list of fields: RFC 9113 §10.5.1.
    pub fn list_size(&self) -> usize {
        self.name.len() + self.value.len() + ENTRY_OVERHEAD
    }
}

/// The decoder of one direction of a connection.
#[derive(Clone, Debug)]
pub struct Decoder {
    table: DynamicTable<Verdict>,
    /// The most that the peer may choose.
    size_limit: u32,
    /// The next block must begin with a change of size.
    needs_size_update: bool,
    /// How many changes of size the current block may still have.
    size_updates_left: u8,
}

impl Default for Decoder {
    fn default() -> Self {
        Self::new(TABLE_SIZE_DEFAULT)
    }
}

impl Decoder {
    /// A decoder whose table may take as many bytes as are usual, or as `size_announced`, which the peer may not have
    /// heard of yet.
    pub fn new(size_announced: u32) -> Self {
        Self {
            table: DynamicTable::new(TABLE_SIZE_DEFAULT),
            size_limit: size_announced.max(TABLE_SIZE_DEFAULT),
            needs_size_update: false,
            size_updates_left: 2,
        }
    }

    /// The peer has acknowledged SETTINGS_HEADER_TABLE_SIZE: RFC 7541 §4.2.
    pub fn handle_size_acknowledged(&mut self, size: u32) {
        self.size_limit = size;
        self.needs_size_update |= self.table.size_max() > size;
    }

    /// A new block begins.
    pub fn begin_block(&mut self) {
        self.size_updates_left = 2;
    }

    /// The dynamic table's size in RFC 7541's measure, in bytes.
    pub fn table_size(&self) -> usize {
        self.table.size()
    }

    /// The field at `*at`, or `None` at the end of the block; `*at` moves behind it. Its text is appended to `out`.
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
