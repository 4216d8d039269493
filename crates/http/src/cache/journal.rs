//! The index on disk: a file of records that is read at the start, so that entries are found before their files are.
//!
//! ```text
//!   magic "GALEJRN2" │ record │ record │ …
//!   record           length (2) │ kind (1) │ what it says │ CRC-32 of all before (4)
//! ```
//!
//! Records say what has come, gone or been purged; the later one counts. A record that was cut or damaged ends what is
//! read: what follows it is found by the loader. Nothing here knows files.

use super::index::{Entry, Kind};
use super::key::Id;

/// How a journal begins.
pub const MAGIC: &[u8; 8] = b"GALEJRN2";

/// The longest record, in bytes: its length has two of them.
const RECORD_MAX: usize = u16::MAX as usize;

/// One of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Record {
    /// An entry has come, or has another lifetime.
    Stored {
        /// Its name.
        id: Id,
        /// See `Meta::number`.
        number: u64,
        /// The bytes of its file.
        size: u64,
        /// See [`Entry`]: fresh until, stale while revalidating, stale if error, asked for.
        times: [u32; 4],
        /// It may not be used stale.
        must_revalidate: bool,
    },
    /// What has this key depends on these fields.
    Varies {
        /// The key.
        id: Id,
        /// What variants' names are made of.
        number: u64,
        /// The names.
        names: Vec<u8>,
    },
    /// An entry has gone that had this number.
    Gone {
        /// Its name.
        id: Id,
        /// See `Meta::number`: a later one of the name stays.
        number: u64,
    },
    /// Entries up to this number that have the key are purged, variants included.
    PurgedKey {
        /// The sum of the key.
        id: Id,
        /// The number.
        number: u64,
        /// They become stale.
        is_soft: bool,
    },
    /// Entries up to this number that have the tag are purged.
    PurgedTag {
        /// The tag.
        tag: u64,
        /// The number.
        number: u64,
        /// They become stale.
        is_soft: bool,
    },
    /// Entries up to this number whose keys begin so are purged.
    PurgedPrefix {
        /// The prefix.
        prefix: Vec<u8>,
        /// The number.
        number: u64,
        /// They become stale.
        is_soft: bool,
    },
}

impl Record {
    /// That of an entry with a file.
    pub fn of_entry(entry: &Entry) -> Option<Record> {
        (entry.kind == Kind::Stored).then_some(Record::Stored {
            id: entry.id,
            number: entry.number,
            size: entry.size,
            times: [entry.fresh_until, entry.stale_while_revalidate, entry.stale_if_error, entry.accessed],
            must_revalidate: entry.must_revalidate,
        })
    }

    /// Appends it.
    pub fn write(&self, out: &mut Vec<u8>) {
        let start = out.len();
        out.extend_from_slice(&[0, 0]);
        match self {
            Record::Stored { id, number, size, times, must_revalidate } => {
                out.push(if *must_revalidate { 2 } else { 1 });
                out.extend_from_slice(id);
                out.extend_from_slice(&number.to_le_bytes());
                out.extend_from_slice(&size.to_le_bytes());
                times.iter().for_each(|time| out.extend_from_slice(&time.to_le_bytes()));
            }
            Record::Varies { id, number, names } => {
                out.push(3);
                out.extend_from_slice(id);
                out.extend_from_slice(&number.to_le_bytes());
                out.extend_from_slice(names);
            }
            Record::Gone { id, number } => {
                out.push(4);
                out.extend_from_slice(id);
                out.extend_from_slice(&number.to_le_bytes());
            }
            Record::PurgedKey { id, number, is_soft } => {
                out.push(if *is_soft { 10 } else { 9 });
                out.extend_from_slice(id);
                out.extend_from_slice(&number.to_le_bytes());
            }
            Record::PurgedTag { tag, number, is_soft } => {
                out.push(if *is_soft { 6 } else { 5 });
                out.extend_from_slice(&tag.to_le_bytes());
                out.extend_from_slice(&number.to_le_bytes());
            }
            Record::PurgedPrefix { prefix, number, is_soft } => {
                out.push(if *is_soft { 8 } else { 7 });
                out.extend_from_slice(&number.to_le_bytes());
                out.extend_from_slice(prefix);
            }
        }
        let length = out.len() - start - 2;
        debug_assert!(length <= RECORD_MAX, "who makes records bounds what is in them");
        if length > RECORD_MAX {
            out.truncate(start);
            return;
        }
        out[start..start + 2].copy_from_slice(&(length as u16).to_le_bytes());
        let sum = crc32fast::hash(&out[start..]);
        out.extend_from_slice(&sum.to_le_bytes());
    }

    /// Takes the first record off what was read. `None`: it is not whole, or was damaged.
    pub fn read(bytes: &mut &[u8]) -> Option<Record> {
        let length = usize::from(u16::from_le_bytes(bytes.get(..2)?.try_into().ok()?));
        let end = 2 + length;
        let sum = u32::from_le_bytes(bytes.get(end..end + 4)?.try_into().ok()?);
        if crc32fast::hash(&bytes[..end]) != sum {
            return None;
        }
        let (kind, body) = bytes[2..end].split_first()?;
        let record = Record::decode(*kind, body)?;
        *bytes = &bytes[end + 4..];
        Some(record)
    }

    fn decode(kind: u8, body: &[u8]) -> Option<Record> {
        let long = |at: usize| Some(u64::from_le_bytes(body.get(at..at + 8)?.try_into().ok()?));
        let word = |at: usize| Some(u32::from_le_bytes(body.get(at..at + 4)?.try_into().ok()?));
        let id = || Id::try_from(body.get(..16)?).ok();
        Some(match kind {
            1 | 2 => Record::Stored {
                id: id()?,
                number: long(16)?,
                size: long(24)?,
                times: [word(32)?, word(36)?, word(40)?, word(44)?],
                must_revalidate: kind == 2,
            },
            3 => Record::Varies { id: id()?, number: long(16)?, names: body.get(24..)?.to_vec() },
            4 => Record::Gone { id: id()?, number: long(16)? },
            9 | 10 => Record::PurgedKey { id: id()?, number: long(16)?, is_soft: kind == 10 },
            5 | 6 => Record::PurgedTag { tag: long(0)?, number: long(8)?, is_soft: kind == 6 },
            7 | 8 => Record::PurgedPrefix { number: long(0)?, prefix: body.get(8..)?.to_vec(), is_soft: kind == 8 },
            _ => return None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn records() -> Vec<Record> {
        vec![
            Record::Stored { id: [7; 16], number: 1, size: 2, times: [3, 4, 5, 6], must_revalidate: true },
            Record::Varies { id: [8; 16], number: 9, names: b"accept,x".to_vec() },
            Record::Gone { id: [9; 16], number: 10 },
            Record::PurgedKey { id: [10; 16], number: 11, is_soft: true },
            Record::PurgedKey { id: [11; 16], number: 12, is_soft: false },
            Record::PurgedTag { tag: 5, number: 6, is_soft: true },
            Record::PurgedPrefix { prefix: b"http://a/".to_vec(), number: 6, is_soft: false },
        ]
    }

    #[test]
    fn what_was_written_is_read_up_to_where_it_was_cut() {
        let mut written = Vec::new();
        let mut ends = Vec::new();
        for record in records() {
            record.write(&mut written);
            ends.push(written.len());
        }
        for length in 0..=written.len() {
            let mut rest = &written[..length];
            let read: Vec<Record> = std::iter::from_fn(|| Record::read(&mut rest)).collect();
            let whole = ends.iter().filter(|&&end| end <= length).count();
            assert_eq!(read, records()[..whole], "{length}");
        }
    }

    #[test]
    fn a_record_that_was_changed_ends_it() {
        let mut written = Vec::new();
        records().iter().for_each(|record| record.write(&mut written));
        for at in 0..written.len() {
            let mut changed = written.clone();
            changed[at] ^= 1;
            let mut rest = &changed[..];
            let read: Vec<Record> = std::iter::from_fn(|| Record::read(&mut rest)).collect();
            assert!(read.len() < records().len() && records().starts_with(&read), "{at}");
        }
    }
}
