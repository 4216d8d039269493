//! HPACK, the compression of fields in HTTP/2: RFC 7541.
//!
//! A decoder and an encoder keep a dynamic table each, which is the state of one direction of a connection: every block
//! of fields passes through it, in order, wanted or not. Invariants: no table exceeds its size in RFC 7541's measure,
//! nothing is decoded beyond the block's own bytes, and the time that a field takes is bounded by its length and the
//! table's size.

mod decoder;
mod encoder;
mod huffman;
mod integer;
mod static_table;
mod table;

pub use decoder::{DecodedField, Decoder, HpackFault, NameKind};
pub use encoder::{Encoder, Indexing};

/// What an entry costs besides its text, in bytes: RFC 7541 §4.1.
pub const ENTRY_OVERHEAD: usize = 32;

/// The size of a dynamic table that nobody has spoken about, in bytes: RFC 9113 §6.5.2.
pub const TABLE_SIZE_DEFAULT: u32 = 4096;
