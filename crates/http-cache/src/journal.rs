//! The index on disk: a file of records that is read at the start, so that entries are known before their files are
//! found.
//!
//! ```text
//!   magic "GALEJRN3" │ account │ record │ record │ …
//!   account          purges (4) │ sum of their sums (4) │ the largest number of one (8) │ CRC-32 of all before (4)
//!   record           length (2) │ kind (1) │ content │ CRC-32 of all before (4)
//! ```
//!
//! A record adds, removes or purges entries; a later record overrides an earlier one. A damaged part is skipped, up to
//! the next record with a valid sum ([`Scan`]). The loader finds an entry whose record is lost, and a removed one turns
//! out to be missing when it is opened. A lost purge would let purged responses be served again, so the account counts
//! all purges: if one is missing, everything up to the number of the last purge is regarded as purged. The account is
//! written before the purges. This module does no I/O.

use std::ops::RangeInclusive;

use super::index::{Entry, Kind};
use super::key::{Id, KEY_BYTES_MAX};
use super::policy::no_vary_search::RULES_BYTES_MAX;
use super::policy::vary::NAMES_MAX;

/// First bytes of a journal.
const MAGIC: &[u8; 8] = b"GALEJRN3";

/// First bytes of an older journal, which has no account.
const MAGIC_WITHOUT_ACCOUNT: &[u8; 8] = b"GALEJRN2";

/// Maximum length of a record, in bytes: its length field has two.
const RECORD_MAX: usize = u16::MAX as usize;

/// The length of an account, in bytes.
const ACCOUNT_LENGTH: usize = 20;

/// Offset of the first record.
pub const HEADER_LENGTH: usize = MAGIC.len() + ACCOUNT_LENGTH;

/// Offset of the account.
pub const ACCOUNT_AT: usize = MAGIC.len();

/// Summary of the purges in a journal.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Account {
    /// Number of purges.
    count: u32,
    /// Total of their sums, which detects a purge in the place of another.
    sum: u32,
    /// The largest number of a purge.
    number: u64,
}

impl Account {
    fn note(&mut self, number: u64, sum: u32) {
        self.join(Account { count: 1, sum, number });
    }

    /// Adds the purges of another account.
    pub fn join(&mut self, other: Account) {
        self.count = self.count.wrapping_add(other.count);
        self.sum = self.sum.wrapping_add(other.sum);
        self.number = self.number.max(other.number);
    }

    /// True if there are no purges.
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// The account's bytes in the file.
    pub fn encode(&self) -> [u8; ACCOUNT_LENGTH] {
        let mut out = [0; ACCOUNT_LENGTH];
        out[..4].copy_from_slice(&self.count.to_le_bytes());
        out[4..8].copy_from_slice(&self.sum.to_le_bytes());
        out[8..16].copy_from_slice(&self.number.to_le_bytes());
        let crc = crc32fast::hash(&out[..16]);
        out[16..].copy_from_slice(&crc.to_le_bytes());
        out
    }

    /// Decodes the account in a journal's header; `None` if it is damaged or missing.
    pub fn of_header(header: &[u8]) -> Option<Account> {
        let bytes: &[u8; ACCOUNT_LENGTH] = header.get(ACCOUNT_AT..HEADER_LENGTH)?.try_into().ok()?;
        let word = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"));
        let number = u64::from_le_bytes(bytes[8..16].try_into().expect("eight bytes"));
        (crc32fast::hash(&bytes[..16]) == word(16)).then_some(Account { count: word(0), sum: word(4), number })
    }
}

/// The header of a journal with this account.
pub fn header(account: Account) -> [u8; HEADER_LENGTH] {
    let mut out = [0; HEADER_LENGTH];
    out[..ACCOUNT_AT].copy_from_slice(MAGIC);
    out[ACCOUNT_AT..].copy_from_slice(&account.encode());
    out
}

/// Records to append to a journal.
#[derive(Default)]
pub struct Changes {
    /// The encoded records.
    pub bytes: Vec<u8>,
    /// The purges among them.
    pub purges: Account,
}

impl Changes {
    /// Appends a record.
    pub fn add(&mut self, record: &Record) {
        let before = self.bytes.len();
        record.write(&mut self.bytes);
        if let (Some(number), Some(sum)) = (record.purge_number(), self.bytes[before..].last_chunk()) {
            self.purges.note(number, u32::from_le_bytes(*sum));
        }
    }
}

/// Result of reading a journal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// All records were read.
    Whole,
    /// This many bytes could not be read; all purges were.
    Damaged(u64),
    /// Purges are missing; with the largest number that a purge may have, if it is known.
    Lost(Option<u64>),
}

/// Reads a journal piece by piece.
#[derive(Default)]
pub struct Scan {
    rest: Vec<u8>,
    has_begun: bool,
    /// The account in the file.
    account: Option<Account>,
    /// Summary of the purges that were read.
    found: Account,
    skipped: u64,
    /// True if the file is shorter than a header or has no magic.
    is_cut: bool,
}

impl Scan {
    /// Reads the next bytes; an empty slice means the end of the file.
    pub fn push(&mut self, bytes: &[u8], mut each: impl FnMut(Record)) {
        let is_end = bytes.is_empty();
        self.rest.extend_from_slice(bytes);
        let rest = std::mem::take(&mut self.rest);
        let mut at = 0;
        if !self.has_begun {
            if rest.len() < HEADER_LENGTH && !is_end {
                self.rest = rest;
                return;
            }
            self.has_begun = true;
            at = self.begin(&rest);
        }
        while at < rest.len() {
            match Record::read(&rest[at..]) {
                Read::Record(record, length) => {
                    if let (Some(number), Some(sum)) = (record.purge_number(), rest[..at + length].last_chunk()) {
                        self.found.note(number, u32::from_le_bytes(*sum));
                    }
                    at += length;
                    each(record);
                }
                Read::Longer if !is_end => break,
                Read::Longer | Read::Damaged => {
                    self.skipped += 1;
                    at += 1;
                }
            }
        }
        self.rest = rest;
        self.rest.drain(..at);
    }

    /// Reads the header and returns its length.
    fn begin(&mut self, bytes: &[u8]) -> usize {
        // An account with a valid sum is accepted even if the magic is damaged.
        self.account = Account::of_header(bytes);
        if self.account.is_some() || bytes.starts_with(MAGIC) && bytes.len() >= HEADER_LENGTH {
            HEADER_LENGTH
        } else if bytes.starts_with(MAGIC_WITHOUT_ACCOUNT) {
            MAGIC_WITHOUT_ACCOUNT.len()
        } else {
            self.is_cut = true;
            0
        }
    }

    /// The result, once the whole file was read.
    pub fn outcome(&self) -> Outcome {
        let is_clean = self.skipped == 0 && !self.is_cut;
        let has_all = match self.account {
            Some(account) if is_clean => self.found.count >= account.count,
            Some(account) => (self.found.count, self.found.sum) == (account.count, account.sum),
            // Nothing else is damaged, so no purge is missing.
            None => is_clean,
        };
        match has_all {
            true if is_clean => Outcome::Whole,
            true => Outcome::Damaged(self.skipped),
            false => Outcome::Lost(self.account.map(|account| account.number.max(self.found.number))),
        }
    }
}

/// Result of reading a record.
enum Read {
    /// A record of this length.
    Record(Record, usize),
    /// A record may begin here, but more bytes are needed.
    Longer,
    /// No record.
    Damaged,
}

/// A record of the journal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Record {
    /// An entry was added, or got another lifetime.
    Stored {
        /// The sum that identifies it.
        id: Id,
        /// See `Meta::number`.
        number: u64,
        /// Size of its file, in bytes.
        size: u64,
        /// Times in [`Entry`]: fresh until, stale while revalidating, stale if error, received.
        times: [u32; 4],
        /// True if it must not be used stale.
        must_revalidate: bool,
    },
    /// Responses with this key depend on these request fields.
    Varies {
        /// The key.
        id: Id,
        /// The number that the sums of variants are computed from.
        number: u64,
        /// The names of the fields.
        names: Vec<u8>,
    },
    /// Only some differences between queries matter for the responses of this mark.
    Searches {
        /// The mark.
        id: Id,
        /// The number in the keys of the mark's entries.
        number: u64,
        /// The text of the rules.
        rules: Vec<u8>,
    },
    /// The entry with this number was removed.
    Gone {
        /// The sum that identifies it.
        id: Id,
        /// See `Meta::number`: an entry of the same id with a later number stays.
        number: u64,
    },
    /// Purges the key's entries, and their variants, whose `number` is at most this one.
    PurgedKey {
        /// The sum of the key.
        id: Id,
        /// The number.
        number: u64,
        /// True if they become stale and are not removed.
        is_soft: bool,
    },
    /// Purges the tag's entries whose `number` is at most this one.
    PurgedTag {
        /// The tag.
        tag: u64,
        /// The number.
        number: u64,
        /// True if they become stale and are not removed.
        is_soft: bool,
    },
    /// Purges the entries whose keys begin with the prefix and whose `number` is at most this one.
    PurgedPrefix {
        /// The prefix.
        prefix: Vec<u8>,
        /// The number.
        number: u64,
        /// True if they become stale and are not removed.
        is_soft: bool,
    },
}

impl Record {
    /// The record of a stored response; `None` for other kinds.
    pub fn of_entry(entry: &Entry) -> Option<Record> {
        (entry.kind == Kind::Stored).then_some(Record::Stored {
            id: entry.id,
            number: entry.number,
            size: entry.size,
            times: [entry.fresh_until, entry.stale_while_revalidate, entry.stale_if_error, entry.received],
            must_revalidate: entry.must_revalidate,
        })
    }

    /// Appends the encoded record.
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
            Record::Searches { id, number, rules } => {
                out.push(11);
                out.extend_from_slice(id);
                out.extend_from_slice(&number.to_le_bytes());
                out.extend_from_slice(rules);
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
        debug_assert!(length <= RECORD_MAX, "records are bounded by their writer");
        if length > RECORD_MAX {
            out.truncate(start);
            return;
        }
        out[start..start + 2].copy_from_slice(&(length as u16).to_le_bytes());
        let sum = crc32fast::hash(&out[start..]);
        out.extend_from_slice(&sum.to_le_bytes());
    }

    /// The largest number that it purges; `None` if it is no purge.
    fn purge_number(&self) -> Option<u64> {
        match self {
            Record::PurgedKey { number, .. }
            | Record::PurgedTag { number, .. }
            | Record::PurgedPrefix { number, .. } => Some(*number),
            Record::Stored { .. } | Record::Varies { .. } | Record::Searches { .. } | Record::Gone { .. } => None,
        }
    }

    /// Reads a record at the beginning of the bytes.
    fn read(bytes: &[u8]) -> Read {
        let Some((&[low, high, kind], _)) = bytes.split_first_chunk() else { return Read::Longer };
        let length = usize::from(u16::from_le_bytes([low, high]));
        // Checked before any sum is computed: a damaged part is tried at each byte.
        if !lengths_of(kind).contains(&length) {
            return Read::Damaged;
        }
        let end = 2 + length;
        let Some(sum) = bytes.get(end..end + 4) else { return Read::Longer };
        if crc32fast::hash(&bytes[..end]).to_le_bytes() != sum {
            return Read::Damaged;
        }
        match Record::decode(kind, &bytes[3..end]) {
            Some(record) => Read::Record(record, end + 4),
            None => Read::Damaged,
        }
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
            11 => Record::Searches { id: id()?, number: long(16)?, rules: body.get(24..)?.to_vec() },
            4 => Record::Gone { id: id()?, number: long(16)? },
            9 | 10 => Record::PurgedKey { id: id()?, number: long(16)?, is_soft: kind == 10 },
            5 | 6 => Record::PurgedTag { tag: long(0)?, number: long(8)?, is_soft: kind == 6 },
            7 | 8 => Record::PurgedPrefix { number: long(0)?, prefix: body.get(8..)?.to_vec(), is_soft: kind == 8 },
            _ => return None,
        })
    }
}

/// Valid lengths of a record of this kind, in bytes, without the length field and the sum.
fn lengths_of(kind: u8) -> RangeInclusive<usize> {
    let (least, more) = match kind {
        1 | 2 => (48, 0),
        3 => (24, NAMES_MAX),
        11 => (24, RULES_BYTES_MAX),
        4 | 9 | 10 => (24, 0),
        5 | 6 => (16, 0),
        7 | 8 => (8, KEY_BYTES_MAX),
        #[expect(clippy::reversed_empty_ranges, reason = "there is no such record")]
        _ => return 1..=0,
    };
    1 + least..=1 + least + more
}

#[cfg(test)]
mod tests {
    use super::*;

    fn records() -> Vec<Record> {
        vec![
            Record::Stored { id: [7; 16], number: 1, size: 2, times: [3, 4, 5, 6], must_revalidate: true },
            Record::Varies { id: [8; 16], number: 9, names: b"accept,x".to_vec() },
            Record::Searches { id: [8; 16], number: 10, rules: b"o-a&".to_vec() },
            Record::Gone { id: [9; 16], number: 10 },
            Record::PurgedKey { id: [10; 16], number: 11, is_soft: true },
            Record::PurgedKey { id: [11; 16], number: 12, is_soft: false },
            Record::PurgedTag { tag: 5, number: 6, is_soft: true },
            Record::PurgedPrefix { prefix: b"http://a/".to_vec(), number: 6, is_soft: false },
        ]
    }

    /// A journal of these records.
    fn written(records: &[Record]) -> Vec<u8> {
        let mut changes = Changes::default();
        records.iter().for_each(|record| changes.add(record));
        [&header(changes.purges)[..], &changes.bytes].concat()
    }

    /// Reads a journal in pieces of this length.
    fn read(bytes: &[u8], piece: usize) -> (Vec<Record>, Outcome) {
        let (mut scan, mut records) = (Scan::default(), Vec::new());
        for piece in bytes.chunks(piece).chain([&[][..]]) {
            scan.push(piece, |record| records.push(record));
        }
        (records, scan.outcome())
    }

    #[test]
    fn journal_is_read_in_pieces_of_any_length() {
        let journal = written(&records());
        for piece in 1..=journal.len() {
            assert_eq!(read(&journal, piece), (records(), Outcome::Whole), "{piece}");
        }
        let old = [MAGIC_WITHOUT_ACCOUNT, &journal[HEADER_LENGTH..]].concat();
        assert_eq!(read(&old, 1000), (records(), Outcome::Whole));
        assert_eq!(read(&old[..old.len() - 1], 1000).1, Outcome::Lost(None));
    }

    #[test]
    fn a_record_that_was_changed_is_the_only_one_that_is_not_read() {
        let journal = written(&records());
        let mut ends = vec![HEADER_LENGTH];
        for record in records() {
            let mut bytes = Vec::new();
            record.write(&mut bytes);
            ends.push(ends.last().unwrap() + bytes.len());
        }
        let last_number = records().iter().filter_map(Record::purge_number).max();
        for at in 0..journal.len() {
            for bit in 0..8 {
                let mut changed = journal.clone();
                changed[at] ^= 1 << bit;
                let (found, outcome) = read(&changed, 64);
                let mut expected = records();
                let expected_outcome = match ends.iter().position(|&end| at < end) {
                    // Damage to the magic or the account alone loses nothing.
                    Some(0) => Outcome::Whole,
                    Some(place) => {
                        let lost = expected.remove(place - 1);
                        match lost.purge_number() {
                            Some(_) => Outcome::Lost(last_number),
                            None => Outcome::Damaged((ends[place] - ends[place - 1]) as u64),
                        }
                    }
                    None => unreachable!("it is within"),
                };
                assert_eq!((found, outcome), (expected, expected_outcome), "{at}.{bit}");
            }
        }
    }

    #[test]
    fn a_journal_that_was_cut_tells_whether_purges_are_missing() {
        let journal = written(&records());
        let purges = |records: &[Record]| records.iter().filter(|record| record.purge_number().is_some()).count();
        for length in 0..journal.len() {
            let (found, outcome) = read(&journal[..length], 64);
            assert!(records().starts_with(&found), "{length}");
            let has_all = purges(&found) == purges(&records());
            assert_eq!(matches!(outcome, Outcome::Lost(_)), !has_all, "{length}");
        }
        // A journal with entries only, of which one is lost.
        let entries = written(&records()[..4]);
        let (found, outcome) = read(&entries[..entries.len() - 1], 64);
        assert_eq!((found.len(), matches!(outcome, Outcome::Damaged(_))), (3, true));
    }

    #[test]
    fn one_purge_does_not_stand_for_another() {
        let purge = |tag| Record::PurgedTag { tag, number: 5, is_soft: false };
        let mut journal = written(&[purge(1), purge(2)]);
        let other = written(&[purge(2), purge(3)]);
        // The first purge is damaged, and the records behind it are from another journal.
        journal.extend_from_slice(&other[HEADER_LENGTH + other[HEADER_LENGTH..].len() / 2..]);
        journal[HEADER_LENGTH + 4] ^= 1;
        assert_eq!(read(&journal, 64), (vec![purge(2), purge(3)], Outcome::Lost(Some(5))));
    }

    #[test]
    fn malformed_journal_counts_as_lost() {
        for bytes in [&b""[..], b"GALE", b"something else that is long enough to have a header", &[0; 4096]] {
            assert_eq!(read(bytes, 1000), (vec![], Outcome::Lost(None)));
        }
    }
}
