//! `No-Vary-Search`: the differences between the queries of two URIs that a response does not depend on.
//! (draft-ietf-httpbis-no-vary-search)
//!
//! A query is normalised to a form that all equivalent queries share. In some cases queries differ here that the draft
//! calls equivalent, because strictness is simpler: values are compared by their bytes, valid UTF-8 or not, since a
//! site may use another encoding. An invalid or overlong field is ignored.

use std::borrow::Cow;

use sfv::{Dictionary, InnerList, ListEntry, Parser};

/// Maximum length of the field; a longer one is ignored.
const FIELD_BYTES_MAX: usize = 1024;

/// Maximum number of names in it.
const NAMES_MAX: usize = 64;

/// Maximum length of the encoded rules, in bytes, in marks and the journal.
pub const RULES_BYTES_MAX: usize = 2048;

/// Maximum number of parameters of a query; a query with more is not normalised.
const PARAMETERS_MAX: usize = 256;

/// The rules of a field, if they differ from the default.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SearchRules {
    /// True if the order of parameters does not matter.
    ignores_order: bool,
    /// True if only the parameters with these names matter; false if all others do.
    is_list_of_what_matters: bool,
    /// The names, decoded, sorted and without duplicates.
    names: Box<[Box<[u8]>]>,
}

impl SearchRules {
    /// Parses the values of the field. `None` means that every difference matters. (Section 4.1 of the draft)
    pub fn parse<'v>(values: impl IntoIterator<Item = &'v [u8]>) -> Option<SearchRules> {
        let mut text = Vec::new();
        for value in values {
            if !text.is_empty() {
                text.extend_from_slice(b", ");
            }
            text.extend_from_slice(value);
            if text.len() > FIELD_BYTES_MAX {
                return None;
            }
        }
        let dictionary: Dictionary = Parser::new(&text).parse().ok()?;
        let flag = |entry: Option<&ListEntry>| match entry {
            None => Some(false),
            Some(ListEntry::Item(item)) => item.bare_item.as_boolean(),
            Some(ListEntry::InnerList(_)) => None,
        };
        let ignores_order = flag(dictionary.get("key-order"))?;
        let (mut is_list_of_what_matters, mut names) = (false, Vec::new());
        match dictionary.get("params") {
            Some(ListEntry::InnerList(list)) => names = names_in(list)?,
            entry => is_list_of_what_matters = flag(entry)?,
        }
        match dictionary.get("except") {
            None => {}
            Some(ListEntry::InnerList(list)) if is_list_of_what_matters => names = names_in(list)?,
            Some(_) => return None,
        }
        Some(SearchRules::new(ignores_order, is_list_of_what_matters, names)).filter(|rules| {
            let says_something = rules.ignores_order || rules.is_list_of_what_matters || !rules.names.is_empty();
            says_something && rules.encode().len() <= RULES_BYTES_MAX
        })
    }

    fn new(ignores_order: bool, is_list_of_what_matters: bool, mut names: Vec<Box<[u8]>>) -> SearchRules {
        names.sort_unstable();
        names.dedup();
        SearchRules { ignores_order, is_list_of_what_matters, names: names.into() }
    }

    /// Encodes the rules; equal rules have equal texts.
    pub fn encode(&self) -> Vec<u8> {
        let mut out =
            vec![if self.ignores_order { b'o' } else { b'O' }, if self.is_list_of_what_matters { b'+' } else { b'-' }];
        for name in &self.names {
            append_encoded(name, &mut out);
            out.push(b'&');
        }
        out
    }

    /// Decodes a text; `None` if it is invalid.
    pub fn decode(text: &[u8]) -> Option<SearchRules> {
        let (&[order, list], names) = text.split_first_chunk()?;
        let ignores_order = order == b'o';
        let is_list_of_what_matters = list == b'+';
        let names = names.split_inclusive(|&byte| byte == b'&').map(|name| decoded(&name[..name.len() - 1]).into());
        let rules = SearchRules::new(ignores_order, is_list_of_what_matters, names.collect());
        (rules.encode() == text).then_some(rules)
    }

    /// Normalises a query: the result is equal for all equivalent queries. `None` if the query has too many parameters,
    /// and so stands for itself. (Section 5)
    pub fn normalise(&self, query: &[u8]) -> Option<Vec<u8>> {
        let mut parameters = Vec::new();
        for part in query.split(|&byte| byte == b'&').filter(|part| !part.is_empty()) {
            let mut halves = part.splitn(2, |&byte| byte == b'=');
            let (name, value) = (halves.next().unwrap_or_default(), halves.next().unwrap_or_default());
            let name = decoded(name);
            if self.is_listed(&name) != self.is_list_of_what_matters {
                continue;
            }
            if parameters.len() == PARAMETERS_MAX {
                return None;
            }
            parameters.push((name, decoded(value)));
        }
        if self.ignores_order {
            // A stable sort: parameters of the same name keep their order.
            parameters.sort_by(|one, other| one.0.cmp(&other.0));
        }
        let mut out = Vec::with_capacity(query.len());
        for (name, value) in &parameters {
            if !out.is_empty() {
                out.push(b'&');
            }
            append_encoded(name, &mut out);
            out.push(b'=');
            append_encoded(value, &mut out);
        }
        Some(out)
    }

    fn is_listed(&self, name: &[u8]) -> bool {
        let text = String::from_utf8_lossy(name);
        self.names.binary_search_by(|listed| (**listed).cmp(text.as_bytes())).is_ok()
    }
}

/// The names in a list; `None` if an item is no string, or there are too many. (Section 4.3: parse a key)
fn names_in(list: &InnerList) -> Option<Vec<Box<[u8]>>> {
    if list.items.len() > NAMES_MAX {
        return None;
    }
    let names = list.items.iter().map(|item| {
        let decoded = decoded(item.bare_item.as_string()?.as_str().as_bytes());
        Some(String::from_utf8_lossy(&decoded).as_bytes().into())
    });
    names.collect()
}

/// Decodes a name or value: application/x-www-form-urlencoded.
fn decoded(text: &[u8]) -> Cow<'_, [u8]> {
    if !text.iter().any(|byte| matches!(byte, b'%' | b'+')) {
        return Cow::Borrowed(text);
    }
    let digit = |byte: &u8| char::from(*byte).to_digit(16).map(|digit| digit as u8);
    let mut out = Vec::with_capacity(text.len());
    let mut rest = text;
    while let Some((&byte, after)) = rest.split_first() {
        rest = after;
        out.push(match (byte, after) {
            (b'+', _) => b' ',
            (b'%', [high, low, behind @ ..]) => match (digit(high), digit(low)) {
                (Some(high), Some(low)) => {
                    rest = behind;
                    high << 4 | low
                }
                _ => byte,
            },
            _ => byte,
        });
    }
    Cow::Owned(out)
}

fn append_encoded(bytes: &[u8], out: &mut Vec<u8>) {
    const DIGITS: &[u8; 16] = b"0123456789ABCDEF";
    for &byte in bytes {
        match byte {
            b'0'..=b'9' | b'a'..=b'z' | b'A'..=b'Z' | b'-' | b'.' | b'_' | b'~' | b'/' | b':' => out.push(byte),
            _ => out.extend_from_slice(&[b'%', DIGITS[usize::from(byte >> 4)], DIGITS[usize::from(byte & 15)]]),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rules(field: &str) -> Option<SearchRules> {
        SearchRules::parse([field.as_bytes()])
    }

    #[test]
    fn invalid_or_empty_field_counts_as_absent() {
        // The draft's examples, and more.
        let long = format!("params=(\"{}\")", "x".repeat(FIELD_BYTES_MAX));
        let many = format!("params=({})", "\"a\" ".repeat(NAMES_MAX + 1));
        // Each of these bytes takes nine bytes in the encoded rules.
        let swollen = format!("params=(\"{}\")", "%ff".repeat(300));
        for field in [
            "",
            "unknown-key",
            "key-order=\"not a boolean\"",
            "params=\"not a boolean or inner list\"",
            "params=(not-a-string)",
            "params=(\"a\" 1)",
            "params=(\"a\"), except=(\"x\")",
            "params=(), except=()",
            "params=?0, except=(\"x\")",
            "params, except=(not-a-string)",
            "params, except=\"not an inner list\"",
            "params, except=?1",
            "except=(\"x\")",
            "except=()",
            "params=?0",
            "params=()",
            "key-order=?0",
            "key-order=(\"a\")",
            // Invalid structured fields.
            "params=(\"a\"",
            "params=(\"a\",\"b\")",
            "params=(\"a\"\"b\")",
            "params=(\"\u{e9}\")",
            "key-order,",
            "key-order;;",
            "key-order key-order",
            "Key-Order",
            "params = (\"a\")",
            &long,
            &many,
            &swollen,
        ] {
            assert_eq!(rules(field), None, "{field}");
        }
        assert_eq!(SearchRules::parse([]), None);
    }

    #[test]
    fn rules_have_a_text_of_their_own() {
        for fields in [
            ["params=?1", "params"],
            ["key-order=?1", "key-order;a=1;b"],
            ["params, key-order, except=(\"x\")", "key-order, params, except=(\"x\";a),unknown=(1 2)"],
            ["params=(\"b\" \"a\")", "params=(\"a\" \"b\" \"a\")"],
            ["params=(\"%C3%A9+%E6%B0%97\")", "params=(\"%c3%a9%20%E6%B0%97\")"],
            ["params=(\"a\")", "params=(\"b\"), params=(\"a\")"],
            ["key-order=?0, params", "params, except=()"],
        ] {
            let [one, other] = fields.map(|field| rules(field).unwrap_or_else(|| panic!("{field}")));
            assert_eq!((&one, one.encode()), (&other, other.encode()));
            assert_eq!(SearchRules::decode(&one.encode()), Some(one));
        }
        let parts = [&b"key-order"[..], b"params=(\"\")"];
        assert_eq!(SearchRules::parse(parts), rules("key-order, params=(\"\")"));
        let texts =
            ["key-order", "params", "params=(\"\")", "params=(\"&\")", "params, except=(\"a\")", "params=(\"a\")"];
        let texts: std::collections::HashSet<_> =
            texts.into_iter().map(|field| rules(field).unwrap().encode()).collect();
        assert_eq!(texts.len(), 6);
        for text in ["", "o", "o-a", "o-b&a&", "x-", "o-a&a&", "o-%61&"] {
            assert_eq!(SearchRules::decode(text.as_bytes()), None, "{text}");
        }
    }

    #[test]
    fn queries_are_the_same_where_the_draft_says_so() {
        let same = |field: &str, one: &str, other: &str| {
            let rules = rules(field).unwrap();
            rules.normalise(one.as_bytes()) == rules.normalise(other.as_bytes())
        };
        for (field, one, other) in [
            ("key-order", "", "&&"),
            ("key-order", "a=x", "%61=%78"),
            ("key-order", "a=\u{e9}", "a=%C3%A9"),
            ("key-order", "a=x&&&&", "a=x"),
            ("key-order", "a=", "a"),
            ("key-order", "a=%20", "a=+"),
            ("key-order", "b=1&a=2&c", "c&a=2&b=1"),
            ("key-order", "b=1&a=1&a=2", "a=1&b=1&a=2"),
            ("params", "a=1", ""),
            ("params=(\"utm\" \"x\")", "utm=1&a=1&x", "a=1&utm=2&utm=3"),
            ("params=(\"%C3%A9+%E6%B0%97\")", "\u{e9} \u{6c17}=1", "%C3%A9+%E6%B0%97=4"),
            ("params, except=(\"id\")", "id=1&b=2", "c&id=1"),
            ("key-order, params, except=(\"a\" \"b\")", "b=2&x&a=1", "a=1&b=2"),
        ] {
            assert!(same(field, one, other), "{field}: {one} {other}");
        }
        for (field, one, other) in [
            ("key-order", "a=1", "a=2"),
            ("key-order", "a=1&a=2", "a=2&a=1"),
            ("key-order", "a=1", "a=1&a=1"),
            ("key-order", "a=b=c", "a=b"),
            ("key-order", "a%3Db=c", "a=b=c"),
            ("key-order", "a=1%26b=2", "a=1&b=2"),
            ("key-order", "A=1", "a=1"),
            ("key-order", "a=%zz", "a=zz"),
            // Equivalent by the draft, but not on a site with another encoding.
            ("key-order", "a=%E9", "a=%E8"),
            ("params=(\"utm\")", "a=1&b=2", "b=2&a=1"),
            ("params=(\"utm\")", "utm2=1", ""),
            ("params=(\"\")", "=1", "a=1"),
            ("params, except=(\"id\")", "id=1", "id=2"),
            ("params, except=(\"id\")", "id=1", ""),
        ] {
            assert!(!same(field, one, other), "{field}: {one} {other}");
        }
        // A name in another encoding matches the listed name, and is kept.
        let rules = rules("params, except=(\"%E9\")").unwrap();
        assert_ne!(rules.normalise(b"%E9=1"), rules.normalise(b""));
    }

    #[test]
    fn normalised_query_stays_as_it_is() {
        let rules = rules("key-order, params=(\"utm\")").unwrap();
        for query in ["b=%2F%26&a=+%2B&utm", "%", "%4", "=&==", "a&a=&a=1", "%00\u{7f}=\u{0}"] {
            let once = rules.normalise(query.as_bytes()).unwrap();
            assert_eq!(rules.normalise(&once).as_ref(), Some(&once), "{query}");
            assert!(once.iter().all(u8::is_ascii_graphic), "{query}");
        }
        let many = "a&".repeat(PARAMETERS_MAX);
        assert!(rules.normalise(many.as_bytes()).is_some());
        assert_eq!(rules.normalise(format!("{many}a").as_bytes()), None);
    }
}
