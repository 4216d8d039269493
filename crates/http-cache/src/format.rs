//! The file of an entry: a checked header, the body as it arrived, and for a long body the sums of its blocks.
//!
//! ```text
//!     0  magic "GALECACH"         16  length of the body     48  lifetime …           88  CRC-32 of the body, or
//!     8  version, 12 length of    24  number                 72  lengths of the           of the table
//!        the header               32  fresh until, received      texts                92  CRC-32 of the header,
//!    96  key | variant | reason | fields, a line each | tags | zeros                      these bytes as zeros
//!        body | table: a sum for each block, version 2 alone (`sums.rs`)
//! ```
//!
//! Version 1, for short bodies, has no table: the sum is the body's. Earlier versions of Gale wrote long bodies in this
//! format too; these are served without a check of their blocks.
//!
//! Numbers are little-endian. A header is accepted only if it is complete, its sum is right, and its lengths agree; a
//! file only if its length is that of header, body and table. Every other file is *foreign* (without the magic, such as
//! nginx's; Gale must not touch it) or *damaged*.

use std::ops::Range;

use gale_http::request::response::{Field, FieldList, FieldName, FieldText};
use gale_protocol::response::ResponseField;
use gale_runtime::Bytes;

use super::policy::Lifetime;
use super::sums::{self, BodySum};

/// First bytes of a file of Gale's.
pub const MAGIC: &[u8; 8] = b"GALECACH";

/// Version in which the header has the sum of the body.
const WITHOUT_TABLE: u32 = 1;

/// Version in which the header has the sum of the table behind the body.
const WITH_TABLE: u32 = 2;

/// Length of the fixed part of a header.
const FIXED: usize = 96;

const HEADER_CRC_AT: usize = 92;

const MUST_REVALIDATE: u8 = 1;
const HAS_REASON: u8 = 2;
const HEAD_ONLY: u8 = 4;

/// Headers end at a multiple of this, so that one that has grown a little still fits.
const ALIGNMENT: usize = 128;

/// Room for a header that grows, with a later date or a longer entity tag.
const SLACK: usize = 32;

/// Maximum length of a header.
pub const HEADER_MAX: usize = 256 * 1024;

/// Maximum length of a body: that of a file system, so that no sum of lengths overflows.
const BODY_MAX: u64 = i64::MAX as u64 / 2;

/// Status of a mark that names the request fields that a response depends on ([`Meta`]).
pub const VARIES: u16 = 0;

/// Status of a mark that tells which differences between queries matter.
pub const SEARCHES: u16 = 1;

/// Everything known about an entry except its body. With status 0 it is a *mark*: responses with this key depend on the
/// request fields that `variant` names, and their variants have the number of the mark. With status 1 it is a mark
/// whose `variant` holds the rules for queries ([`super::search`]).
#[derive(Clone, Debug, Default)]
pub struct Meta {
    /// The text of its key.
    pub key: Box<[u8]>,
    /// The names that `Vary` lists, a zero byte, and the request's values of these fields; empty without `Vary`.
    pub variant: Box<[u8]>,
    /// The number that the sums of variants are computed from.
    pub variant_number: u64,
    /// The status.
    pub status: u16,
    /// The reason phrase, if it is not the usual one.
    pub reason: Option<Bytes>,
    /// The fields as they arrived.
    pub fields: FieldList,
    /// The time for which it may be used.
    pub lifetime: Lifetime,
    /// Later entries have larger numbers; a purge covers entries with smaller ones.
    pub number: u64,
    /// True if only the head is stored: the answer to a HEAD.
    pub is_head_only: bool,
    /// Hashes of the tags by which it may be purged.
    pub tags: Box<[u64]>,
}

/// The decoded header of a file.
#[derive(Clone, Debug)]
pub struct Header {
    /// Everything known about the entry except its body.
    pub meta: Meta,
    /// Offset of the body in the file, in bytes.
    pub header_length: u32,
    /// Length of the body, in bytes.
    pub body_length: u64,
    /// The sum that the body is checked with.
    pub body_sum: BodySum,
}

impl Header {
    /// Position of the table behind the body; `None` if there is none.
    pub fn table(&self) -> Option<Range<u64>> {
        let BodySum::Table(_) = self.body_sum else { return None };
        let start = u64::from(self.header_length) + self.body_length;
        Some(start..start + sums::table_length(self.header_length, self.body_length))
    }

    /// Length of the file, in bytes.
    pub fn file_length(&self) -> u64 {
        self.table().map_or(u64::from(self.header_length) + self.body_length, |table| table.end)
    }
}

/// Reason for which a file is not read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unreadable {
    /// The file was not written by Gale.
    Foreign,
    /// The file was written by Gale and is damaged.
    Damaged,
    /// The header is longer than the bytes read so far: it has this length.
    Longer(usize),
}

/// Length of the header, which is known before the body.
pub fn header_length(meta: &Meta) -> u32 {
    let texts = meta.key.len() + meta.variant.len() + meta.reason.as_ref().map_or(0, |reason| reason.len());
    let fields: usize = meta.fields.iter().map(|field| field.name.len() + field.value.len() + 3).sum();
    let length = FIXED + texts + fields + meta.tags.len() * 8 + SLACK;
    length.next_multiple_of(ALIGNMENT) as u32
}

/// Length of the file.
pub fn file_length(meta: &Meta, body_length: u64) -> u64 {
    let header_length = header_length(meta);
    let table = if body_length > sums::WHOLE_MAX { sums::table_length(header_length, body_length) } else { 0 };
    u64::from(header_length) + body_length + table
}

/// Encodes a header of a length from [`header_length`]. A larger length is filled with zeros.
pub fn encode(meta: &Meta, header_length: u32, body_length: u64, body_sum: BodySum) -> Vec<u8> {
    let mut out = Vec::with_capacity(header_length as usize);
    let mut fields = Vec::with_capacity(256);
    for field in meta.fields.iter() {
        fields.extend_from_slice(&field.name);
        fields.push(b':');
        fields.extend_from_slice(&field.value);
        fields.extend_from_slice(b"\r\n");
    }
    let reason = meta.reason.as_deref().unwrap_or_default();
    let life = &meta.lifetime;
    out.extend_from_slice(MAGIC);
    let (version, sum) = match body_sum {
        BodySum::Whole(sum) => (WITHOUT_TABLE, sum),
        BodySum::Table(sum) => (WITH_TABLE, sum),
    };
    put_u32(&mut out, [version, header_length]);
    for number in [body_length, meta.number, life.fresh_until, life.received] {
        out.extend_from_slice(&number.to_le_bytes());
    }
    put_u32(&mut out, [life.stale_while_revalidate, life.stale_if_error, life.initial_age]);
    out.extend_from_slice(&meta.status.to_le_bytes());
    let has_reason = if meta.reason.is_some() { HAS_REASON } else { 0 };
    let must_revalidate = if life.must_revalidate { MUST_REVALIDATE } else { 0 };
    let head_only = if meta.is_head_only { HEAD_ONLY } else { 0 };
    out.extend_from_slice(&[has_reason | must_revalidate | head_only, 0]);
    out.extend_from_slice(&meta.variant_number.to_le_bytes());
    put_u32(&mut out, [meta.key.len() as u32, meta.variant.len() as u32, fields.len() as u32]);
    out.extend_from_slice(&(reason.len() as u16).to_le_bytes());
    out.extend_from_slice(&(meta.tags.len() as u16).to_le_bytes());
    put_u32(&mut out, [sum, 0]);
    debug_assert_eq!(out.len(), FIXED);
    for text in [&meta.key[..], &meta.variant, reason, &fields] {
        out.extend_from_slice(text);
    }
    for tag in &meta.tags {
        out.extend_from_slice(&tag.to_le_bytes());
    }
    assert!(out.len() <= header_length as usize, "the header is longer than announced");
    out.resize(header_length as usize, 0);
    let crc = crc32fast::hash(&out);
    out[HEADER_CRC_AT..FIXED].copy_from_slice(&crc.to_le_bytes());
    out
}

fn put_u32<const N: usize>(out: &mut Vec<u8>, numbers: [u32; N]) {
    for number in numbers {
        out.extend_from_slice(&number.to_le_bytes());
    }
}

/// Decodes the header at the beginning of a file, of which at least the fixed part has been read.
///
/// # Errors
/// See [`Unreadable`].
pub fn decode(bytes: &[u8]) -> Result<Header, Unreadable> {
    if !bytes.starts_with(MAGIC) {
        return Err(Unreadable::Foreign);
    }
    let mut fixed = Reader(bytes.get(MAGIC.len()..FIXED).ok_or(Unreadable::Damaged)?);
    let body_sum = match fixed.u32() {
        WITHOUT_TABLE => BodySum::Whole,
        WITH_TABLE => BodySum::Table,
        _ => return Err(Unreadable::Foreign),
    };
    let header_length = fixed.u32();
    let length = header_length as usize;
    if !(FIXED..=HEADER_MAX).contains(&length) {
        return Err(Unreadable::Damaged);
    }
    let bytes = bytes.get(..length).ok_or(Unreadable::Longer(length))?;
    let mut sum = crc32fast::Hasher::new();
    sum.update(&bytes[..HEADER_CRC_AT]);
    sum.update(&[0; 4]);
    sum.update(&bytes[FIXED..]);
    if sum.finalize().to_le_bytes() != bytes[HEADER_CRC_AT..FIXED] {
        return Err(Unreadable::Damaged);
    }
    let body_length = fixed.u64();
    if body_length > BODY_MAX {
        return Err(Unreadable::Damaged);
    }
    let number = fixed.u64();
    let (fresh_until, received) = (fixed.u64(), fixed.u64());
    let (stale_while_revalidate, stale_if_error, initial_age) = (fixed.u32(), fixed.u32(), fixed.u32());
    let status = fixed.u16();
    let flags = fixed.u16();
    let variant_number = fixed.u64();
    let (key, variant, fields) = (fixed.u32(), fixed.u32(), fixed.u32());
    let (reason, tags) = (u32::from(fixed.u16()), u32::from(fixed.u16()));
    let body_sum = body_sum(fixed.u32());
    let mut texts = Reader(&bytes[FIXED..]);
    let mut text = |length: u32| texts.take(length as usize).ok_or(Unreadable::Damaged);
    let (key, variant, reason, fields, tags) =
        (text(key)?, text(variant)?, text(reason)?, text(fields)?, text(tags * 8)?);
    let meta = Meta {
        key: key.into(),
        variant: variant.into(),
        variant_number,
        status,
        reason: (flags & u16::from(HAS_REASON) != 0).then(|| Bytes::copy_from_slice(reason)),
        fields: decode_fields(fields).ok_or(Unreadable::Damaged)?,
        lifetime: Lifetime {
            fresh_until,
            stale_while_revalidate,
            stale_if_error,
            must_revalidate: flags & u16::from(MUST_REVALIDATE) != 0,
            received,
            initial_age,
        },
        number,
        is_head_only: flags & u16::from(HEAD_ONLY) != 0,
        tags: tags.chunks_exact(8).map(|tag| u64::from_le_bytes(tag.try_into().expect("eight bytes"))).collect(),
    };
    Ok(Header { meta, header_length, body_length, body_sum })
}

fn decode_fields(text: &[u8]) -> Option<FieldList> {
    let shared = Bytes::copy_from_slice(text);
    let mut list = FieldList::with_capacity(16);
    let mut start = 0;
    while start < text.len() {
        let end = start + memchr::memmem::find(&text[start..], b"\r\n")?;
        let colon = start + memchr::memchr(b':', &text[start..end])?;
        let known = ResponseField::from_name(&text[start..colon]);
        let name = FieldName::part_of(&shared, start..colon, known);
        list.push(Field { name, value: FieldText::part_of(&shared, colon + 1..end) });
        start = end + 2;
    }
    Some(list)
}

/// Reads numbers from the beginning of bytes that are known to be long enough.
struct Reader<'b>(&'b [u8]);

impl<'b> Reader<'b> {
    fn take(&mut self, length: usize) -> Option<&'b [u8]> {
        let (taken, rest) = self.0.split_at_checked(length)?;
        self.0 = rest;
        Some(taken)
    }

    fn fixed<const N: usize>(&mut self) -> [u8; N] {
        let taken = self.take(N).expect("the fixed part is whole");
        taken.try_into().expect("the read has the requested length")
    }

    fn u16(&mut self) -> u16 {
        u16::from_le_bytes(self.fixed())
    }

    fn u32(&mut self) -> u32 {
        u32::from_le_bytes(self.fixed())
    }

    fn u64(&mut self) -> u64 {
        u64::from_le_bytes(self.fixed())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn meta() -> Meta {
        let mut fields = FieldList::default();
        for (name, value) in [("Content-Type", "text/html"), ("X-Own", "a: b"), ("Empty", ""), ("etag", "\"1\"")] {
            fields.push(Field { name: name.as_bytes().into(), value: value.as_bytes().into() });
        }
        let lifetime = Lifetime { fresh_until: 5, received: 3, initial_age: 2, ..Lifetime::default() };
        Meta {
            key: b"http://a/b".as_slice().into(),
            variant: b"accept\0accept:x\n".as_slice().into(),
            variant_number: 9,
            status: 200,
            reason: Some(Bytes::from_static(b"Fine")),
            fields,
            lifetime,
            number: 77,
            is_head_only: true,
            tags: [1, u64::MAX].into(),
        }
    }

    #[test]
    fn written_head_is_read_back() {
        let meta = meta();
        for sum in [BodySum::Whole(99), BodySum::Table(99)] {
            let written = encode(&meta, header_length(&meta), 1234, sum);
            assert_eq!(written.len() % ALIGNMENT, 0);
            let read = decode(&written).unwrap();
            assert_eq!((read.header_length as usize, read.body_length, read.body_sum), (written.len(), 1234, sum));
            assert_eq!(format!("{:?}", read.meta), format!("{meta:?}"));
        }
    }

    #[test]
    fn no_header_that_was_cut_or_changed_is_read() {
        let meta = meta();
        let written = encode(&meta, header_length(&meta), 1234, BodySum::Table(99));
        for length in 0..written.len() {
            assert!(decode(&written[..length]).is_err(), "{length}");
        }
        for at in 0..written.len() {
            for bit in 0..8 {
                let mut changed = written.clone();
                changed[at] ^= 1 << bit;
                assert!(decode(&changed).is_err(), "{at}.{bit}");
            }
        }
    }

    #[test]
    fn files_of_others_are_foreign() {
        assert_eq!(decode(&[5, 0, 0, 0, 0, 0, 0, 0, 1, 2]).unwrap_err(), Unreadable::Foreign);
        assert_eq!(decode(b"").unwrap_err(), Unreadable::Foreign);
        assert_eq!(decode(MAGIC).unwrap_err(), Unreadable::Damaged);
    }
}
