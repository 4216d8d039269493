//! The static table: RFC 7541 appendix A.
//!
//! Index 1 is the first entry; index 0 means "no entry".

use crate::known_field::same_but_for_case;
use crate::response::ResponseField;

pub(super) const ENTRIES_LENGTH: usize = 61;

/// Name and value of every entry.
pub(super) static ENTRIES: [(&str, &str); ENTRIES_LENGTH] = [
    (":authority", ""),
    (":method", "GET"),
    (":method", "POST"),
    (":path", "/"),
    (":path", "/index.html"),
    (":scheme", "http"),
    (":scheme", "https"),
    (":status", "200"),
    (":status", "204"),
    (":status", "206"),
    (":status", "304"),
    (":status", "400"),
    (":status", "404"),
    (":status", "500"),
    ("accept-charset", ""),
    ("accept-encoding", "gzip, deflate"),
    ("accept-language", ""),
    ("accept-ranges", ""),
    ("accept", ""),
    ("access-control-allow-origin", ""),
    ("age", ""),
    ("allow", ""),
    ("authorization", ""),
    ("cache-control", ""),
    ("content-disposition", ""),
    ("content-encoding", ""),
    ("content-language", ""),
    ("content-length", ""),
    ("content-location", ""),
    ("content-range", ""),
    ("content-type", ""),
    ("cookie", ""),
    ("date", ""),
    ("etag", ""),
    ("expect", ""),
    ("expires", ""),
    ("from", ""),
    ("host", ""),
    ("if-match", ""),
    ("if-modified-since", ""),
    ("if-none-match", ""),
    ("if-range", ""),
    ("if-unmodified-since", ""),
    ("last-modified", ""),
    ("link", ""),
    ("location", ""),
    ("max-forwards", ""),
    ("proxy-authenticate", ""),
    ("proxy-authorization", ""),
    ("range", ""),
    ("referer", ""),
    ("refresh", ""),
    ("retry-after", ""),
    ("server", ""),
    ("set-cookie", ""),
    ("strict-transport-security", ""),
    ("transfer-encoding", ""),
    ("user-agent", ""),
    ("vary", ""),
    ("via", ""),
    ("www-authenticate", ""),
];

/// Indexes of the first entry with each name used for pseudo-headers; entries with other values follow it.
pub(super) const AUTHORITY: u8 = 1;
pub(super) const METHOD_GET: u8 = 2;
pub(super) const METHOD_POST: u8 = 3;
pub(super) const PATH_ROOT: u8 = 4;
pub(super) const SCHEME_HTTP: u8 = 6;
pub(super) const SCHEME_HTTPS: u8 = 7;
pub(super) const STATUS_200: u8 = 8;

/// Returns the index of the entry with exactly this status, if there is one.
pub(super) fn status_index(status: u16) -> Option<u8> {
    Some(match status {
        200 => STATUS_200,
        204 => 9,
        206 => 10,
        304 => 11,
        400 => 12,
        404 => 13,
        500 => 14,
        _ => return None,
    })
}

/// Returns the index of a name, case-insensitive, or 0.
pub(super) fn name_index(name: &[u8]) -> u8 {
    let (Some(&first), Some(&last)) = (name.first(), name.last()) else {
        return 0;
    };
    let candidate = SLOTS[slot(name.len(), first, last)];
    if candidate != 0 && same_but_for_case(name, ENTRIES[candidate as usize - 1].0.as_bytes()) { candidate } else { 0 }
}

/// Returns the index of the name of a known field, or 0.
pub(super) fn field_index(field: ResponseField) -> u8 {
    FIELD_INDEXES[field as usize]
}

static FIELD_INDEXES: [u8; ResponseField::ALL.len()] = {
    let mut indexes = [0; ResponseField::ALL.len()];
    let mut field = 0;
    while field < indexes.len() {
        let mut entry = 0;
        while entry < ENTRIES.len() {
            if is_lowercase_of(ENTRIES[entry].0.as_bytes(), ResponseField::ALL[field].name().as_bytes()) {
                indexes[field] = entry as u8 + 1;
            }
            entry += 1;
        }
        field += 1;
    }
    indexes
};

const fn is_lowercase_of(lower: &[u8], name: &[u8]) -> bool {
    if lower.len() != name.len() {
        return false;
    }
    let mut at = 0;
    while at < name.len() {
        if lower[at] != name[at].to_ascii_lowercase() {
            return false;
        }
        at += 1;
    }
    true
}

/// Perfect hash table of names, verified at compile time: the first entry with each name.
static SLOTS: [u8; 256] = {
    let mut slots = [0u8; 256];
    let mut index = ENTRIES.len();
    while index > 0 {
        let name = ENTRIES[index - 1].0.as_bytes();
        let slot = slot(name.len(), name[0], name[name.len() - 1]);
        assert!(
            slots[slot] == 0 || is_lowercase_of(name, ENTRIES[slots[slot] as usize - 1].0.as_bytes()),
            "two names share a slot: choose other factors"
        );
        slots[slot] = index as u8;
        index -= 1;
    }
    slots
};

const fn slot(length: usize, first: u8, last: u8) -> usize {
    (length * LENGTH_FACTOR + (first | 0x20) as usize * FIRST_FACTOR + (last | 0x20) as usize * LAST_FACTOR) & 0xff
}

/// Found by trial.
const LENGTH_FACTOR: usize = 1;
const FIRST_FACTOR: usize = 3;
const LAST_FACTOR: usize = 68;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_found_at_their_first_entry() {
        for (index, (name, _)) in ENTRIES.iter().enumerate() {
            let first = ENTRIES.iter().position(|entry| entry.0 == *name).unwrap();
            assert_eq!(usize::from(name_index(name.as_bytes())), first + 1, "{index}");
            assert_eq!(usize::from(name_index(name.to_uppercase().as_bytes())), first + 1);
        }
        for name in ["", "x", "accepu", "x-forwarded-for", "datf"] {
            assert_eq!(name_index(name.as_bytes()), 0, "{name}");
        }
        assert_eq!(field_index(ResponseField::ContentType), 31);
        assert_eq!(field_index(ResponseField::XAccelRedirect), 0);
        for status in 100..600u16 {
            let expected = ENTRIES.iter().position(|entry| *entry == (":status", status.to_string().as_str()));
            assert_eq!(status_index(status).map(|index| usize::from(index) - 1), expected);
        }
    }
}
