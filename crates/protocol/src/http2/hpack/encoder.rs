//! Encoder for field blocks: RFC 7541 §6.
//!
//! Fields that repeat across messages are added to the dynamic table and take one byte from then on; secret fields and
//! fields that never repeat are not. Lookup uses one probe of a small hash table, which may lose entries: such a field
//! is only encoded longer. Invariant: the table never exceeds the peer's limit or our own.

use super::static_table::{self, ENTRIES, ENTRIES_LENGTH};
use super::table::DynamicTable;
use super::{ENTRY_OVERHEAD, TABLE_SIZE_DEFAULT, huffman, integer};
use crate::response::ResponseField;

/// Indexing of a field.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Indexing {
    /// The field will repeat: it is indexed at once.
    Always,
    /// The field may repeat: it is indexed when it does.
    IfRepeated,
    /// The field is unlikely to repeat.
    Not,
    /// The field is secret: it must not be indexed on any hop (RFC 7541 §7.1.3).
    Never,
}

impl Indexing {
    /// Returns the best choice for a field of a response.
    pub fn of_response(field: Option<ResponseField>) -> Self {
        use ResponseField as F;
        match field {
            Some(F::SetCookie | F::ProxyAuthenticate | F::WwwAuthenticate | F::ProxyAuthenticationInfo) => Self::Never,
            Some(F::Server | F::Date | F::ContentType | F::ContentEncoding | F::CacheControl | F::Vary | F::AltSvc) => {
                Self::Always
            }
            Some(F::AcceptRanges | F::StrictTransportSecurity | F::Via) => Self::Always,
            Some(F::ContentRange | F::Age) => Self::Not,
            _ => Self::IfRepeated,
        }
    }

    /// Returns the best choice for a field of a request; the name is in lower case.
    pub fn of_request(name: &[u8]) -> Self {
        match name {
            b"authorization" | b"proxy-authorization" | b"cookie" => Self::Never,
            b"content-length" | b"content-range" | b"if-modified-since" | b"if-none-match" | b"range" => Self::Not,
            _ => Self::IfRepeated,
        }
    }
}

/// The encoder for one direction of a connection.
#[derive(Clone, Debug)]
pub struct Encoder {
    /// Maximum table size: the smaller of the peer's limit and `size_wanted`.
    size_max: u32,
    size_wanted: u32,
    /// The smallest maximum since the last block, if it changed: RFC 7541 §4.2.
    size_update: Option<u32>,
    /// Allocated when the first field is indexed.
    index: Option<Box<Index>>,
}

#[derive(Clone, Debug)]
struct Index {
    /// Entries, each tagged with the index of its name in the static table, or 0.
    table: DynamicTable<u8>,
    /// Total number of entries ever inserted.
    inserted: u32,
    /// For each name of the static table the number of the newest entry with that name, counted from 1, or 0. Most
    /// fields repeat with the same value, so they are found here.
    latest: [u32; ENTRIES_LENGTH + 1],
    /// Hash table: hash of a field and the number of its entry, or 0. The index is the lowest bits of the hash.
    places: [(u32, u32); PLACES],
    /// Hashes of fields that were seen but not indexed. The index is the lowest bits of the hash.
    seen: [u32; PLACES],
}

const PLACES: usize = 64;

impl Default for Encoder {
    fn default() -> Self {
        Self::new(TABLE_SIZE_DEFAULT)
    }
}

impl Encoder {
    /// Creates an encoder that uses a table of at most that size in bytes; until the peer's settings arrive, at most
    /// 4096.
    pub fn new(size_wanted: u32) -> Self {
        let size_max = size_wanted.min(TABLE_SIZE_DEFAULT);
        let size_update = (size_max < TABLE_SIZE_DEFAULT).then_some(size_max);
        Self { size_max, size_wanted, size_update, index: None }
    }

    /// Handles SETTINGS_HEADER_TABLE_SIZE from the peer.
    pub fn handle_size_allowed(&mut self, size: u32) {
        let size = size.min(self.size_wanted);
        if size == self.size_max {
            return;
        }
        self.size_max = size;
        self.size_update = Some(self.size_update.map_or(size, |smallest| smallest.min(size)));
        if let Some(index) = &mut self.index {
            index.table.set_size_max(size);
        }
    }

    /// Size of the dynamic table in bytes, as defined by RFC 7541 §4.1.
    pub fn table_size(&self) -> usize {
        self.index.as_ref().map_or(0, |index| index.table.size())
    }

    /// Begins a block: writes a size update if the size changed.
    #[inline]
    pub fn begin_block(&mut self, out: &mut Vec<u8>) {
        if let Some(smallest) = self.size_update.take() {
            if smallest < self.size_max {
                integer::write(out, 0x20, 5, smallest as usize);
            }
            integer::write(out, 0x20, 5, self.size_max as usize);
        }
    }

    /// Encodes `:status`.
    #[inline]
    pub fn encode_status(&mut self, status: u16, out: &mut Vec<u8>) {
        match static_table::status_index(status) {
            Some(index) => out.push(0x80 | index),
            None => {
                let digits = [status / 100 % 10, status / 10 % 10, status % 10].map(|digit| b'0' + digit as u8);
                self.encode_named(static_table::STATUS_200, b":status", &digits, Indexing::IfRepeated, out);
            }
        }
    }

    /// Encodes `:method`.
    pub fn encode_method(&mut self, method: &[u8], out: &mut Vec<u8>) {
        match method {
            b"GET" => out.push(0x80 | static_table::METHOD_GET),
            b"POST" => out.push(0x80 | static_table::METHOD_POST),
            _ => self.encode_named(static_table::METHOD_GET, b":method", method, Indexing::IfRepeated, out),
        }
    }

    /// Encodes `:scheme`.
    pub fn encode_scheme(&mut self, scheme: &[u8], out: &mut Vec<u8>) {
        match scheme {
            b"http" => out.push(0x80 | static_table::SCHEME_HTTP),
            b"https" => out.push(0x80 | static_table::SCHEME_HTTPS),
            _ => self.encode_named(static_table::SCHEME_HTTP, b":scheme", scheme, Indexing::Not, out),
        }
    }

    /// Encodes `:authority`.
    pub fn encode_authority(&mut self, authority: &[u8], out: &mut Vec<u8>) {
        self.encode_named(static_table::AUTHORITY, b":authority", authority, Indexing::Always, out);
    }

    /// Encodes `:path`.
    pub fn encode_path(&mut self, path: &[u8], out: &mut Vec<u8>) {
        match path {
            b"/" => out.push(0x80 | static_table::PATH_ROOT),
            _ => self.encode_named(static_table::PATH_ROOT, b":path", path, Indexing::IfRepeated, out),
        }
    }

    /// Encodes a known field of a response.
    #[inline]
    pub fn encode_known(&mut self, field: ResponseField, value: &[u8], out: &mut Vec<u8>) {
        let indexing = Indexing::of_response(Some(field));
        self.encode_named(static_table::field_index(field), field.name().as_bytes(), value, indexing, out);
    }

    /// Encodes any field; capitals in the name are converted to lower case. The caller ensures that the name is a token
    /// and that the value is valid.
    pub fn encode(&mut self, name: &[u8], value: &[u8], indexing: Indexing, out: &mut Vec<u8>) {
        self.encode_named(static_table::name_index(name), name, value, indexing, out);
    }

    /// Encodes a field; `name_index` is the index of its name in the static table, or 0.
    fn encode_named(&mut self, name_index: u8, name: &[u8], value: &[u8], indexing: Indexing, out: &mut Vec<u8>) {
        let wants_index = matches!(indexing, Indexing::Always | Indexing::IfRepeated);
        // An entry that would evict a quarter of the table is not worth it.
        let is_small = name.len() + value.len() + ENTRY_OVERHEAD <= self.size_max as usize / 4;
        if !wants_index || !is_small {
            let pattern = if indexing == Indexing::Never { 0x10 } else { 0 };
            return write_literal(pattern, 4, name_index, name, value, out);
        }
        let size_max = self.size_max;
        let index = self.index.get_or_insert_with(|| Box::new(Index::new(size_max)));
        if let Some(place) = index.find_latest(name_index, value) {
            return integer::write(out, 0x80, 7, ENTRIES.len() + 1 + place);
        }
        let hash = hash(name_index, name, value);
        if let Some(place) = index.find(hash, name, value) {
            return integer::write(out, 0x80, 7, ENTRIES.len() + 1 + place);
        }
        if indexing == Indexing::IfRepeated && index.is_new(hash) {
            return write_literal(0, 4, name_index, name, value, out);
        }
        write_literal(0x40, 6, name_index, name, value, out);
        index.insert(hash, name_index, name, value);
    }
}

impl Index {
    fn new(size_max: u32) -> Self {
        Self {
            table: DynamicTable::new(size_max),
            inserted: 0,
            latest: [0; ENTRIES_LENGTH + 1],
            places: [(0, 0); PLACES],
            seen: [0; PLACES],
        }
    }

    /// Returns the newest entry with a name of the static table, if it has this value.
    #[inline]
    fn find_latest(&self, name_index: u8, value: &[u8]) -> Option<usize> {
        let number = self.latest[name_index as usize];
        if name_index == 0 || number == 0 {
            return None;
        }
        let place = self.inserted.wrapping_sub(number) as usize;
        let (_, found_value, found_name) = self.table.get(place)?;
        (found_value == value && found_name == name_index).then_some(place)
    }

    fn find(&self, hash: u32, name: &[u8], value: &[u8]) -> Option<usize> {
        let (place_hash, number) = self.places[hash as usize % PLACES];
        if place_hash != hash || number == 0 {
            return None;
        }
        let place = self.inserted.wrapping_sub(number) as usize;
        let (found_name, found_value, _) = self.table.get(place)?;
        (found_value == value && name.eq_ignore_ascii_case(found_name)).then_some(place)
    }

    /// Returns `true` if the field has not been seen recently, and remembers it.
    fn is_new(&mut self, hash: u32) -> bool {
        let seen = &mut self.seen[hash as usize % PLACES];
        std::mem::replace(seen, hash) != hash
    }

    fn insert(&mut self, hash: u32, name_index: u8, name: &[u8], value: &[u8]) {
        if self.table.insert(name, value, name_index) {
            self.inserted = self.inserted.wrapping_add(1);
            self.places[hash as usize % PLACES] = (hash, self.inserted);
            self.latest[name_index as usize] = self.inserted;
        }
    }
}

/// Writes a literal; `pattern` contains the bits above the prefix of the name's index.
#[inline]
fn write_literal(pattern: u8, prefix_bits: u32, name_index: u8, name: &[u8], value: &[u8], out: &mut Vec<u8>) {
    integer::write(out, pattern, prefix_bits, name_index as usize);
    if name_index == 0 {
        write_name(name, out);
    }
    write_string(value, out);
}

/// Writes a name in lower case.
fn write_name(name: &[u8], out: &mut Vec<u8>) {
    let mut short = [0; 64];
    match short.get_mut(..name.len()) {
        Some(lower) => {
            lower.copy_from_slice(name);
            lower.make_ascii_lowercase();
            write_string(lower, out);
        }
        None => write_string(&name.to_ascii_lowercase(), out),
    }
}

/// Writes a string, Huffman-coded if that is shorter: RFC 7541 §5.2.
#[inline]
fn write_string(text: &[u8], out: &mut Vec<u8>) {
    let length = huffman::encoded_length(text);
    if length < text.len() {
        integer::write(out, 0x80, 7, length);
        huffman::encode(text, out);
    } else {
        integer::write(out, 0, 7, text.len());
        out.extend_from_slice(text);
    }
}

/// Computes the hash of a field; the case of the name is ignored.
fn hash(name_index: u8, name: &[u8], value: &[u8]) -> u32 {
    const FACTOR: u64 = 0x9e37_79b9_7f4a_7c15;
    let mut hash = u64::from(name_index) << 32 | value.len() as u64;
    let mut mix = |bytes: &[u8], ignored: u64| {
        let mut words = bytes.chunks_exact(8);
        for word in &mut words {
            let word = u64::from_le_bytes(word.try_into().expect("eight bytes")) | ignored;
            hash = (hash ^ word).wrapping_mul(FACTOR).rotate_left(29);
        }
        let mut last = [0; 8];
        last[..words.remainder().len()].copy_from_slice(words.remainder());
        hash = (hash ^ (u64::from_le_bytes(last) | ignored)).wrapping_mul(FACTOR).rotate_left(29);
    };
    if name_index == 0 {
        mix(name, 0x2020_2020_2020_2020);
    }
    mix(value, 0);
    // Never 0, which means "no entry".
    ((hash >> 32) ^ hash) as u32 | 1 << 31
}
