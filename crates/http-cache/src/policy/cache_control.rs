//! Parses `Cache-Control` in responses and requests. (RFC 9111 §5.2, RFC 5861, RFC 9213)
//!
//! Directives are tokens with an optional value, which may be quoted; unknown ones are skipped. Semicolons and spaces
//! separate them as commas do, because servers write `private; max-age=60` and mean it. An invalid number is read as 0,
//! which is the cautious choice; a number that is too large becomes the largest one.

use memchr::memmem;
use sfv::{BareItem, Dictionary, ListEntry, Parser};

/// The fields that a directive applies to.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Named {
    /// The directive is absent.
    #[default]
    Absent,
    /// The whole response.
    All,
    /// These fields, in lower case.
    Fields(Vec<Box<[u8]>>),
}

impl Named {
    /// True if the directive is present, with field names or without.
    pub fn is_present(&self) -> bool {
        *self != Named::Absent
    }

    /// The fields that the directive names.
    pub fn fields(&self) -> &[Box<[u8]>] {
        match self {
            Named::Fields(fields) => fields,
            Named::Absent | Named::All => &[],
        }
    }

    /// Adds the names of a value. A value without names, or with unterminated quotes, is no list: the directive then
    /// applies to the whole response.
    fn add(&mut self, value: Option<&[u8]>) {
        let names = value.into_iter().flat_map(|value| value.split(|&byte| byte == b',')).map(<[u8]>::trim_ascii);
        let names = names.filter(|name| !name.is_empty());
        let mut names = names.map(|name| Box::from(name.to_ascii_lowercase())).peekable();
        match (&mut *self, names.peek()) {
            (Named::All, _) => {}
            (_, None) => *self = Named::All,
            (Named::Fields(fields), Some(_)) => fields.extend(names),
            (Named::Absent, Some(_)) => *self = Named::Fields(names.collect()),
        }
    }
}

/// The directives of a response's `Cache-Control`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ResponseDirectives {
    /// `no-store`
    pub no_store: bool,
    /// `no-cache`
    pub no_cache: Named,
    /// `private`
    pub private: Named,
    /// `public`
    pub public: bool,
    /// `must-revalidate`
    pub must_revalidate: bool,
    /// `proxy-revalidate`
    pub proxy_revalidate: bool,
    /// `must-understand`
    pub must_understand: bool,
    /// `max-age` in seconds.
    pub max_age: Option<u32>,
    /// `s-maxage` in seconds.
    pub s_maxage: Option<u32>,
    /// `stale-while-revalidate` in seconds.
    pub stale_while_revalidate: Option<u32>,
    /// `stale-if-error` in seconds.
    pub stale_if_error: Option<u32>,
    /// True if a number that matters is invalid.
    pub has_invalid_number: bool,
}

/// The directives of a request's `Cache-Control`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RequestDirectives {
    /// `no-store`
    pub no_store: bool,
    /// `no-cache`, or the same in `Pragma`.
    pub no_cache: bool,
    /// `only-if-cached`
    pub only_if_cached: bool,
    /// `max-age` in seconds.
    pub max_age: Option<u32>,
    /// `min-fresh` in seconds.
    pub min_fresh: Option<u32>,
    /// `max-stale` in seconds; the largest number if it has no value.
    pub max_stale: Option<u32>,
}

impl ResponseDirectives {
    /// Parses the values of the field, in order.
    pub fn parse<'v>(values: impl IntoIterator<Item = &'v [u8]>) -> ResponseDirectives {
        ResponseDirectives::of(values.into_iter().flat_map(Directives))
    }

    /// Parses a targeted field, which is a dictionary of structured fields. `None` if it is empty or invalid, and so to
    /// be ignored. (RFC 9213 §2.1)
    pub fn parse_targeted<'v>(values: impl IntoIterator<Item = &'v [u8]>) -> Option<ResponseDirectives> {
        let text = values.into_iter().collect::<Vec<_>>().join(&b", "[..]);
        let members: Dictionary = Parser::new(&text).parse().ok()?;
        if members.is_empty() {
            return None;
        }
        let texts: Vec<_> = members
            .iter()
            .filter_map(|(name, member)| Some((name.as_str(), text_of(name.as_str(), member)?)))
            .collect();
        Some(ResponseDirectives::of(texts.iter().map(|(name, value)| (name.as_bytes(), value.as_deref()))))
    }

    /// Parses the values of the field as nginx does: it searches for words anywhere in a value, even inside of other
    /// words and in quotes. A number ends at a comma, a semicolon or a space, and a later field overrides an earlier
    /// one.
    pub fn search<'v>(values: impl IntoIterator<Item = &'v [u8]>) -> ResponseDirectives {
        let mut found = ResponseDirectives::default();
        for value in values {
            let value = value.to_ascii_lowercase();
            let has = |word: &[u8]| memmem::find(&value, word).is_some();
            found.public |= has(b"public");
            let (no_store, no_cache, private) = (has(b"no-store"), has(b"no-cache"), has(b"private"));
            found.no_store |= no_store;
            if no_cache {
                found.no_cache = Named::All;
            }
            if private {
                found.private = Named::All;
            }
            if no_store || no_cache || private {
                continue;
            }
            let mut is_invalid = false;
            let mut number = |name: &[u8]| {
                let rest = &value[memmem::find(&value, name)? + name.len()..];
                let end = rest.iter().position(|byte| matches!(byte, b',' | b';' | b' ')).unwrap_or(rest.len());
                let seconds = if end == 0 { Some(0) } else { seconds(Some(&rest[..end])) };
                is_invalid |= seconds.is_none();
                Some(seconds.unwrap_or(0))
            };
            if let Some(seconds) = number(b"s-maxage=").or_else(|| number(b"max-age="))
                // A 0 in one field is not overridden by another one.
                && found.max_age != Some(0)
            {
                found.max_age = Some(seconds);
            }
            found.stale_while_revalidate = number(b"stale-while-revalidate=").or(found.stale_while_revalidate);
            found.stale_if_error = number(b"stale-if-error=").or(found.stale_if_error);
            found.has_invalid_number |= is_invalid;
        }
        found
    }

    fn of<'v>(directives: impl Iterator<Item = (&'v [u8], Option<&'v [u8]>)>) -> ResponseDirectives {
        let mut parsed = ResponseDirectives::default();
        let mut numbers_fail = false;
        for (name, value) in directives {
            let mut number = || {
                let seconds = seconds(value);
                numbers_fail |= seconds.is_none();
                seconds.unwrap_or(0)
            };
            match &*name.to_ascii_lowercase() {
                b"no-store" => parsed.no_store = true,
                b"no-cache" => parsed.no_cache.add(value),
                b"private" => parsed.private.add(value),
                b"public" => parsed.public = true,
                b"must-revalidate" => parsed.must_revalidate = true,
                b"proxy-revalidate" => parsed.proxy_revalidate = true,
                b"must-understand" => parsed.must_understand = true,
                // Of a repeated directive the first is used. (§4.2.1)
                b"max-age" => _ = parsed.max_age.get_or_insert(number()),
                b"s-maxage" => _ = parsed.s_maxage.get_or_insert(number()),
                b"stale-while-revalidate" => _ = parsed.stale_while_revalidate.get_or_insert(number()),
                b"stale-if-error" => _ = parsed.stale_if_error.get_or_insert(number()),
                _ => {}
            }
        }
        parsed.has_invalid_number = numbers_fail;
        parsed
    }
}

impl RequestDirectives {
    /// Parses the values of the field. `pragma` is used if there is no `Cache-Control`. (§5.4)
    pub fn parse<'v>(values: impl IntoIterator<Item = &'v [u8]>, pragma: Option<&[u8]>) -> RequestDirectives {
        let mut parsed = RequestDirectives::default();
        let mut has_any = false;
        for (name, value) in values.into_iter().flat_map(Directives) {
            has_any = true;
            match &*name.to_ascii_lowercase() {
                b"no-store" => parsed.no_store = true,
                b"no-cache" => parsed.no_cache = true,
                b"only-if-cached" => parsed.only_if_cached = true,
                b"max-age" => parsed.max_age = Some(seconds(value).unwrap_or(0)),
                b"min-fresh" => parsed.min_fresh = seconds(value),
                b"max-stale" => parsed.max_stale = Some(value.map_or(u32::MAX, |_| seconds(value).unwrap_or(0))),
                _ => {}
            }
        }
        let asks_by_pragma = |pragma: &[u8]| Directives(pragma).any(|(name, _)| name.eq_ignore_ascii_case(b"no-cache"));
        parsed.no_cache |= !has_any && pragma.is_some_and(asks_by_pragma);
        parsed
    }
}

/// Converts a member of a dictionary to the value of a directive, `Some(None)` for one without a value. `None` if the
/// member is false, or of a type that no directive has.
fn text_of(name: &str, member: &ListEntry) -> Option<Option<Vec<u8>>> {
    let ListEntry::Item(item) = member else { return None };
    match &item.bare_item {
        // A quoted number is no number either. (RFC 9213 §2.1)
        BareItem::String(_) | BareItem::Token(_) if is_number(name) => Some(Some(b"none".to_vec())),
        BareItem::Boolean(holds) => holds.then_some(None),
        BareItem::Integer(number) => Some(Some(i64::from(*number).to_string().into_bytes())),
        // No directive has a decimal: it is treated as an invalid number.
        BareItem::Decimal(number) => Some(Some(number.to_string().into_bytes())),
        BareItem::String(text) => Some(Some(text.as_str().into())),
        BareItem::Token(text) => Some(Some(text.as_str().into())),
        _ => None,
    }
}

/// True if the value of the directive must be a number of seconds.
fn is_number(name: &str) -> bool {
    matches!(name, "max-age" | "s-maxage" | "stale-while-revalidate" | "stale-if-error")
}

/// Parses a number of seconds; `None` if it is invalid. (RFC 9111 §1.2.2)
pub(super) fn seconds(value: Option<&[u8]>) -> Option<u32> {
    let digits = value?;
    if digits.is_empty() || !digits.iter().all(u8::is_ascii_digit) {
        return None;
    }
    let text = std::str::from_utf8(digits).ok()?;
    Some(text.parse::<u64>().map_or(i32::MAX as u32, |number| number.min(i32::MAX as u64) as u32))
}

/// Iterates over the directives of a value: names, and values without quotes. An unterminated quoted value is skipped.
struct Directives<'v>(&'v [u8]);

impl<'v> Iterator for Directives<'v> {
    type Item = (&'v [u8], Option<&'v [u8]>);

    fn next(&mut self) -> Option<Self::Item> {
        let is_between = |byte: &u8| matches!(byte, b',' | b';' | b' ' | b'\t');
        loop {
            let start = self.0.iter().position(|byte| !is_between(byte))?;
            let text = &self.0[start..];
            let end = text.iter().position(|byte| is_between(byte) || *byte == b'=').unwrap_or(text.len());
            let (name, rest) = text.split_at(end);
            self.0 = rest;
            let value = rest.trim_ascii_start().strip_prefix(b"=").map(|rest| {
                let rest = rest.trim_ascii_start();
                let (value, rest) = match rest.strip_prefix(b"\"") {
                    Some(quoted) => match memchr::memchr(b'"', quoted) {
                        Some(end) => (&quoted[..end], &quoted[end + 1..]),
                        None => (&b""[..], &b""[..]),
                    },
                    None => rest.split_at(rest.iter().position(is_between).unwrap_or(rest.len())),
                };
                self.0 = rest;
                value
            });
            if !name.is_empty() {
                return Some((name, value));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn response(text: &str) -> ResponseDirectives {
        ResponseDirectives::parse([text.as_bytes()])
    }

    #[test]
    fn directives_are_tokens_with_values_that_may_be_quoted() {
        let parsed = response("Max-Age=60 , s-maxage=\"5\",,public, x=\"a, no-store\", foo");
        assert_eq!((parsed.max_age, parsed.s_maxage, parsed.public, parsed.no_store), (Some(60), Some(5), true, false));
        let parsed = response("no-cache=\"Set-Cookie, X-One\", private");
        assert_eq!(parsed.no_cache, Named::Fields(vec![b"set-cookie".as_slice().into(), b"x-one".as_slice().into()]));
        assert_eq!(parsed.private, Named::All);
        assert_eq!(response("x-no-store, my-max-age=4"), ResponseDirectives::default());
    }

    #[test]
    fn semicolons_and_spaces_separate_directives_as_commas_do() {
        for text in
            ["max-age=60; private", "max-age=60;private", "private max-age=60", "private;max-age = 60", "private;"]
        {
            let parsed = response(text);
            assert_eq!((parsed.private, parsed.has_invalid_number), (Named::All, false), "{text}");
            assert_eq!(parsed.max_age, text.contains("60").then_some(60), "{text}");
        }
        assert!(!response("x=\"a; no-store\"; y").no_store);
    }

    #[test]
    fn nginx_looks_for_words_anywhere() {
        let search = |values: &[&str]| ResponseDirectives::search(values.iter().map(|value| value.as_bytes()));
        let parsed = search(&["my-MAX-AGE=60;stale-while-revalidate=5 stale-if-error=7"]);
        let numbers = (parsed.max_age, parsed.stale_while_revalidate, parsed.stale_if_error);
        assert_eq!(numbers, (Some(60), Some(5), Some(7)));
        assert!(search(&["x=\"no-store\""]).no_store && search(&["x-private"]).private == Named::All);
        assert_eq!(search(&["max-age = 60"]).max_age, None);
        assert_eq!(search(&["max-age=5, s-maxage=6", "max-age=7"]).max_age, Some(7));
        assert_eq!(search(&["max-age=0", "max-age=7"]).max_age, Some(0));
        assert_eq!(search(&["max-age=, x"]).max_age, Some(0));
        for text in ["max-age=\"60\"", "max-age=-1", "max-age=1.5"] {
            assert!(search(&[text]).has_invalid_number, "{text}");
        }
        assert_eq!(search(&["no-store, max-age=60"]).max_age, None);
    }

    #[test]
    fn a_list_without_names_is_about_everything() {
        for text in ["private=\"\"", "private=\" , \"", "private=", "private=\"a", "private=\"a, max-age=60"] {
            assert_eq!(response(text).private, Named::All, "{text}");
        }
        assert_eq!(response("private=\"a,,\"").private, Named::Fields(vec![b"a".as_slice().into()]));
    }

    #[test]
    fn numbers_that_are_none_count_as_zero_and_large_ones_as_the_largest() {
        for text in ["max-age", "max-age=", "max-age=-1", "max-age=1.5", "max-age=a"] {
            let parsed = response(text);
            assert_eq!((parsed.max_age, parsed.has_invalid_number), (Some(0), true), "{text}");
        }
        assert_eq!(response("max-age=99999999999999999999999").max_age, Some(i32::MAX as u32));
        assert_eq!(response("max-age=5, max-age=7").max_age, Some(5));
    }

    #[test]
    fn requests_may_ask_by_pragma_where_nothing_else_is_said() {
        let parse = |values: &[&str], pragma: Option<&str>| {
            RequestDirectives::parse(values.iter().map(|value| value.as_bytes()), pragma.map(str::as_bytes))
        };
        assert!(parse(&[], Some("no-cache")).no_cache);
        assert!(!parse(&["max-age=1"], Some("no-cache")).no_cache);
        assert_eq!(parse(&["max-stale"], None).max_stale, Some(u32::MAX));
        assert_eq!(parse(&["max-stale=5, min-fresh=3"], None).max_stale, Some(5));
        assert!(parse(&["only-if-cached"], None).only_if_cached);
    }

    #[test]
    fn a_targeted_field_is_a_dictionary_or_nothing() {
        let parse = |values: &[&str]| ResponseDirectives::parse_targeted(values.iter().map(|value| value.as_bytes()));
        let parsed = parse(&["max-age=60, private=\"x-a\"", "no-store;because=1, must-revalidate=?0"]).unwrap();
        assert_eq!((parsed.max_age, parsed.no_store, parsed.must_revalidate), (Some(60), true, false));
        assert_eq!(parsed.private, Named::Fields(vec![b"x-a".as_slice().into()]));
        for none in [&[][..], &[""], &["max-age="], &["Max-Age=60"], &["max-age=60,"], &["max-age=60", "\u{0}"], &["="]]
        {
            assert_eq!(parse(none), None, "{none:?}");
        }
        for invalid in ["max-age=-1", "max-age=1.5", "max-age=a", "max-age"] {
            assert!(parse(&[invalid]).unwrap().has_invalid_number, "{invalid}");
        }
    }

    #[test]
    fn hostile_values_end() {
        for text in ["=", ",=,=,", "\"", "a=\"", "a=\"b", "=\"x\"", "\u{0}", ",,,,"] {
            response(text);
            ResponseDirectives::search([text.as_bytes()]);
        }
    }
}
