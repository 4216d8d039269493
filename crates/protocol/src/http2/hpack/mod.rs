//! HPACK, the field compression of HTTP/2: RFC 7541.
//!
//! Decoder and encoder each keep a dynamic table, the state of one direction of a connection: every field block must
//! pass through it, in order, wanted or not. Invariants: no table exceeds its size as defined by RFC 7541; decoding
//! never reads beyond the block; the time for a field is bounded by its length and the size of the table.

mod decoder;
mod encoder;
mod huffman;
mod integer;
mod static_table;
mod table;

pub use decoder::{DecodedField, Decoder, HpackFault, NameKind};
pub use encoder::{Encoder, Indexing};

/// Size of an entry in addition to its text, in bytes: RFC 7541 §4.1.
pub const ENTRY_OVERHEAD: usize = 32;

/// Default size of a dynamic table in bytes: RFC 9113 §6.5.2.
pub const TABLE_SIZE_DEFAULT: u32 = 4096;
