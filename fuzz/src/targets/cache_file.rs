//! Headers of stored responses and the journal of a cache: reading arbitrary bytes stays within them, a value that was
//! read is written back unchanged, and a single flipped bit is detected.

use gale_http_cache::format::{HEADER_MAX, Unreadable, decode, encode, header_length};
use gale_http_cache::journal::{Account, Changes, Outcome, Scan, header};

/// Position of the checksum, at the end of the header's fixed part.
const CRC: std::ops::Range<usize> = 92..96;

/// Runs the target on one input.
pub fn run(data: &[u8]) {
    read_header(data);
    // The same bytes with a correct length and checksum, like a forged file.
    if (CRC.end..=HEADER_MAX).contains(&data.len()) {
        let mut sealed = data.to_vec();
        sealed[..8].copy_from_slice(b"GALECACH");
        sealed[8..12].copy_from_slice(&1_u32.to_le_bytes());
        sealed[12..16].copy_from_slice(&(data.len() as u32).to_le_bytes());
        sealed[CRC].fill(0);
        let sum = crc32fast::hash(&sealed);
        sealed[CRC].copy_from_slice(&sum.to_le_bytes());
        read_header(&sealed);
    }
    read_records(data);
    // The same for a record.
    if let Ok(length) = u16::try_from(data.len()) {
        let mut sealed = [&length.to_le_bytes(), data].concat();
        sealed.extend_from_slice(&crc32fast::hash(&sealed).to_le_bytes());
        read_records(&sealed);
    }
}

fn read_header(bytes: &[u8]) {
    let header = match decode(bytes) {
        Ok(header) => header,
        Err(Unreadable::Longer(length)) => return assert!(length > bytes.len() && length <= HEADER_MAX),
        Err(Unreadable::Foreign | Unreadable::Damaged) => return,
    };
    let length = header.header_length as usize;
    assert!(length <= bytes.len());
    for at in [0, CRC.start, length - 1] {
        let mut changed = bytes.to_vec();
        changed[at] ^= 1;
        assert!(decode(&changed).is_err(), "{at}");
    }
    // The values read fit into a new header and survive another round trip.
    let again_length = header_length(&header.meta);
    let written = encode(&header.meta, again_length, header.body_length, header.body_sum);
    if written.len() > HEADER_MAX {
        return;
    }
    let again = decode(&written).expect("what was written");
    assert_eq!(encode(&again.meta, again_length, again.body_length, again.body_sum), written);
    assert_eq!((again.body_length, again.body_sum), (header.body_length, header.body_sum));
}

fn read_records(bytes: &[u8]) {
    let mut records = Vec::new();
    let mut scan = Scan::default();
    let file = [&header(Account::default())[..], bytes].concat();
    let (first, second) = file.split_at(file.len() / 2);
    // An empty piece marks the end.
    [first, second, &[]].into_iter().for_each(|piece| scan.push(piece, |record| records.push(record)));
    // Records found between damaged bytes form a valid journal.
    let mut changes = Changes::default();
    records.iter().for_each(|record| changes.add(record));
    let file = [&header(changes.purges)[..], &changes.bytes].concat();
    let (mut again, mut scan) = (Vec::new(), Scan::default());
    [&file[..], &[]].into_iter().for_each(|piece| scan.push(piece, |record| again.push(record)));
    assert_eq!((again, scan.outcome()), (records, Outcome::Whole));
}
