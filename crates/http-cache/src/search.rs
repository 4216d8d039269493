//! Keys for responses with `No-Vary-Search`: all equivalent queries have the same key.
//!
//! ```text
//!   a request's key    http://a/x?b=2&utm=1           the mark's key   http://a/x? NUL no-vary-search NUL
//!   an entry's key     http://a/x?b=2 NUL number NUL length of "http://a/x?"
//! ```
//!
//! The *mark* has the rules for all keys that differ in the query alone. Its number is in the keys of its entries, so
//! that changed rules lead to new entries. No key of a request ends with a NUL and a number that its client cannot
//! know.

use super::policy::no_vary_search::SearchRules;

/// The parts of a request's key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SearchKey {
    /// The part before the query, including the question mark.
    before: Vec<u8>,
    query: Vec<u8>,
    after: Vec<u8>,
}

impl SearchKey {
    /// Creates a key of these parts; `None` if `before` or `query` has a `#`, which servers interpret differently.
    pub fn new(before: Vec<u8>, query: Vec<u8>, after: Vec<u8>) -> Option<SearchKey> {
        let is_plain = !before.contains(&b'#') && !query.contains(&b'#');
        is_plain.then_some(SearchKey { before, query, after })
    }

    /// The key of a target; `prefix` is the part of the key before it.
    pub fn of_target(prefix: &[u8], target: &[u8]) -> Option<SearchKey> {
        let (path, query) = split(target);
        SearchKey::new([prefix, path, b"?"].concat(), query.to_vec(), Vec::new())
    }

    /// The key of the mark.
    pub fn mark(&self) -> Vec<u8> {
        [&self.before[..], b"\0no-vary-search\0", &self.after].concat()
    }

    /// The key of an entry by the rules of the mark with this number; `None` if the query cannot be normalised.
    pub fn entry(&self, rules: &SearchRules, number: u64) -> Option<Vec<u8>> {
        let query = rules.normalise(&self.query)?;
        let length = self.before.len();
        Some([&self.before[..], &query, &self.after, format!("\0{number:016x}\0{length:08x}").as_bytes()].concat())
    }
}

/// The path and the query of a target.
pub fn split(target: &[u8]) -> (&[u8], &[u8]) {
    match memchr::memchr(b'?', target) {
        Some(at) => (&target[..at], &target[at + 1..]),
        None => (target, b""),
    }
}

/// The part before the query in the key of an entry with rules; `None` for other keys.
pub fn base_of(key: &[u8]) -> Option<&[u8]> {
    let (rest, end) = key.split_at_checked(key.len().checked_sub(26)?)?;
    if end[0] != 0 || end[17] != 0 {
        return None;
    }
    let length = std::str::from_utf8(&end[18..]).ok().and_then(|digits| usize::from_str_radix(digits, 16).ok())?;
    rest.get(..length)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_stands_for_every_query_that_does_not_matter() {
        let rules = SearchRules::parse([&b"params=(\"utm\")"[..]]).unwrap();
        let key = |target: &str| SearchKey::of_target(b"http://a", target.as_bytes()).unwrap();
        let entry = |target: &str, number| key(target).entry(&rules, number).unwrap();
        assert_eq!(entry("/x?utm=1&b=2", 7), entry("/x?b=2", 7));
        assert_eq!(entry("/x", 7), entry("/x?", 7));
        assert_ne!(entry("/x?b=2", 7), entry("/x?b=2", 8));
        assert_eq!((key("/x?a").mark(), key("/x").mark()), (key("/x").mark(), key("/x?b").mark()));
        assert_ne!(key("/x").mark(), key("/xy").mark());
        assert_eq!(SearchKey::of_target(b"", b"/x?a#b"), None);
        let parts = |after: &str| SearchKey::new(b"/x?".to_vec(), b"".to_vec(), after.into()).unwrap();
        assert_ne!(parts("a").mark(), parts("").mark());
    }
}
