//! sub: replaces strings in responses.
//!   sub_filter STRING REPLACEMENT;                           http, server, location
//!   sub_filter_once on|off;                                  http, server, location
//!   sub_filter_types TYPE ...;                               http, server, location
//!   sub_filter_last_modified on|off;                         http, server, location
//! (<https://nginx.org/en/docs/http/ngx_http_sub_module.html>)
//!
//! The search ignores case, but only of ASCII letters. Of several strings the one that begins first is replaced; of
//! those that begin at the same place, the first one in the configuration, even if more data is needed to decide. With
//! `sub_filter_once` each string is replaced once.

use std::any::Any;
use std::sync::Arc;

use gale_config::{
    Body as BlockBody, Contexts, Custom, Diagnostic, ManyWith, One, Setting, Statement, Takes, slot, values,
};
use gale_engine::configuration::Builder;
use gale_engine::module::{ConfType, Directive, Module};
use gale_http::configuration::builder::InHttp;
use gale_http::configuration::media_types::MediaTypes;
use gale_http::module::HttpPart;
use gale_http::request::Request;
use gale_http::request::body::{Body, BodyError};
use gale_http::request::filters::Change;
use gale_http::request::transform::{ROOM_BYTES, Step, Transform, Transformed, Until};
use gale_http::variables::template::Template;
use gale_runtime::{Bytes, Effort};

/// See the file's head.
pub static MODULE: Module = Module {
    name: "http_sub_filter",
    directives: DIRECTIVES,
    conf: Some(ConfType { merge, ..ConfType::of::<Conf>() }),
    parts: &[&HttpPart {
        filters: &[&Change { applies: |conf: &Conf| !conf.pairs.is_empty(), run: substitute }],
        ..HttpPart::EMPTY
    }],
};

const DIRECTIVES: &[Directive] = &[
    Directive {
        name: "sub_filter",
        contexts: Contexts::ANYWHERE,
        takes: Takes::Exactly(2),
        body: BlockBody::None,
        default: "",
        about: "Sets a string to replace, regardless of case, and its replacement.",
        store: &Custom(add_pair),
    },
    Directive {
        name: "sub_filter_types",
        contexts: Contexts::ANYWHERE,
        takes: Takes::AtLeast(1),
        body: BlockBody::None,
        default: "text/html",
        about: "Sets the MIME types of responses in which strings are replaced, in addition to text/html; * matches \
                any type.",
        store: &ManyWith { parse: MediaTypes::parse, slot: slot!(Conf, types) },
    },
    Directive {
        name: "sub_filter_once",
        contexts: Contexts::ANYWHERE,
        takes: Takes::Flag,
        body: BlockBody::None,
        default: "on",
        about: "Enables or disables replacing each string only once.",
        store: &One { parse: values::flag, slot: slot!(Conf, once) },
    },
    Directive {
        name: "sub_filter_last_modified",
        contexts: Contexts::ANYWHERE,
        takes: Takes::Flag,
        body: BlockBody::None,
        default: "off",
        about: "Enables or disables preserving Last-Modified, and a weak ETag, of the original response.",
        store: &One { parse: values::flag, slot: slot!(Conf, last_modified) },
    },
];

#[derive(Default)]
struct Conf {
    pairs: Vec<Pair>,
    types: Setting<Vec<MediaTypes>>,
    once: Setting<bool>,
    last_modified: Setting<bool>,
    /// The strings to search for, if none has variables.
    search: Option<Arc<Search>>,
}

#[derive(Clone)]
struct Pair {
    string: Template,
    replacement: Template,
}

/// nginx's maximum number of strings of a level.
const PAIRS_MAX: usize = 255;

fn add_pair(conf: &mut Conf, builder: &mut Builder, statement: &Statement) -> Result<(), Diagnostic> {
    let (string, replacement) = (&statement.args[0], &statement.args[1]);
    if string.text.is_empty() {
        return Err(Diagnostic::emerg("empty search pattern").at(string.span));
    }
    if conf.pairs.len() == PAIRS_MAX {
        return Err(statement.error(format!("number of search patterns exceeds {PAIRS_MAX}")));
    }
    let http = builder.http_mut();
    conf.pairs.push(Pair { string: http.template(string)?, replacement: http.template(replacement)? });
    Ok(())
}

fn merge(conf: &mut dyn Any, parent: Option<&dyn Any>, _: &mut Builder) -> Result<(), Diagnostic> {
    let of_module = "the settings are this module's";
    let conf: &mut Conf = conf.downcast_mut().expect(of_module);
    if let Some(parent) = parent
        && conf.pairs.is_empty()
    {
        let parent: &Conf = parent.downcast_ref().expect(of_module);
        conf.pairs.clone_from(&parent.pairs);
        conf.search.clone_from(&parent.search);
    } else {
        let strings: Option<Vec<&[u8]>> = conf.pairs.iter().map(|pair| pair.string.as_constant()).collect();
        conf.search = strings.filter(|strings| !strings.is_empty()).map(|strings| Arc::new(Search::new(&strings)));
    }
    Ok(())
}

fn substitute(request: &mut Request, conf: &Conf, body: &mut Body) {
    let head = &request.response;
    let length = head.content_length.or_else(|| body.length());
    if length == Some(0) || !MediaTypes::contain(conf.types.get(), &head.content_type) {
        return;
    }
    let (search, pairs) = match &conf.search {
        Some(search) => (Arc::clone(search), conf.pairs.iter().collect()),
        None => {
            // Strings that evaluate to nothing are not searched for.
            let found = conf.pairs.iter().map(|pair| (pair.string.evaluate(request), pair));
            let (strings, pairs): (Vec<_>, Vec<_>) = found.filter(|(string, _)| !string.is_empty()).unzip();
            if strings.is_empty() {
                return;
            }
            let strings: Vec<&[u8]> = strings.iter().map(Vec::as_slice).collect();
            (Arc::new(Search::new(&strings)), pairs)
        }
    };
    let replacement_of = |pair: &Pair| Bytes::from(pair.replacement.evaluate(request));
    let replacements: Vec<Bytes> = pairs.into_iter().map(replacement_of).collect();
    request.response.will_change();
    if !conf.last_modified.get() {
        request.response.clear_last_modified();
        request.response.etag.clear();
    }
    let substitution = Substitution::new(search, replacements, *conf.once.get());
    *body = Body::Stream(Box::new(Transformed::new(std::mem::take(body), substitution, *ROOM_BYTES.end())));
}

/// Search for several strings at once, in lower case.
///
/// Like Horspool's algorithm, with a window as wide as the shortest string: the window's last byte determines the
/// distance to the next place at which a string may begin, or, if that is 0, the strings to compare.
struct Search {
    strings: Vec<Box<[u8]>>,
    /// Length of the shortest string.
    window: usize,
    /// Shifts by the last byte of the window.
    shifts: [u8; 256],
    /// The strings with their bytes at the end of the window, sorted by these bytes, then by the order of the strings.
    by_byte: Vec<(u8, u8)>,
}

/// Result of a search.
enum Found {
    /// The string of this number begins at this place.
    String(usize, usize),
    /// No string begins before this place; more data is needed to decide whether one begins here.
    Nothing(usize),
}

impl Search {
    /// Creates a search for at most 255 strings, none empty.
    fn new(strings: &[&[u8]]) -> Search {
        let strings: Vec<Box<[u8]>> = strings.iter().map(|string| string.to_ascii_lowercase().into()).collect();
        // A shift has to fit into a byte.
        let window = strings.iter().map(|string| string.len()).min().unwrap_or(1).min(255);
        let mut shifts = [window as u8; 256];
        for string in &strings {
            for (place, &byte) in string[..window].iter().enumerate() {
                let shift = &mut shifts[usize::from(byte)];
                *shift = (*shift).min((window - 1 - place) as u8);
            }
        }
        let numbered = strings.iter().enumerate();
        let mut by_byte: Vec<(u8, u8)> = numbered.map(|(number, string)| (string[window - 1], number as u8)).collect();
        by_byte.sort_unstable();
        Search { strings, window, shifts, by_byte }
    }

    /// Searches `text` for the strings that `is_wanted`.
    fn find(&self, text: &[u8], until: Until, is_wanted: impl Fn(usize) -> bool) -> Found {
        let mut at = 0;
        while let Some(&last) = text.get(at + self.window - 1) {
            let last = last.to_ascii_lowercase();
            let shift = self.shifts[usize::from(last)];
            if shift > 0 {
                at += usize::from(shift);
                continue;
            }
            let rest = &text[at..];
            let first = self.by_byte.partition_point(|&(byte, _)| byte < last);
            for &(_, number) in self.by_byte[first..].iter().take_while(|&&(byte, _)| byte == last) {
                let string = &self.strings[usize::from(number)];
                let common = string.len().min(rest.len());
                if !is_wanted(usize::from(number)) || !rest[..common].eq_ignore_ascii_case(&string[..common]) {
                    continue;
                }
                if common == string.len() {
                    return Found::String(usize::from(number), at);
                }
                if until != Until::End {
                    return Found::Nothing(at);
                }
            }
            at += 1;
        }
        match until {
            Until::MoreInput => Found::Nothing(at.min(text.len())),
            Until::Pause | Until::Flush => Found::Nothing(self.first_beginning(text, at.min(text.len()), is_wanted)),
            Until::End => Found::Nothing(text.len()),
        }
    }

    /// Returns the first place from which on the rest of the text is a prefix of a string.
    fn first_beginning(&self, text: &[u8], from: usize, is_wanted: impl Fn(usize) -> bool) -> usize {
        let begins = |at: &usize| {
            let rest = &text[*at..];
            let mut strings = self.strings.iter().enumerate();
            strings.any(|(number, string)| {
                is_wanted(number) && string.len() > rest.len() && string[..rest.len()].eq_ignore_ascii_case(rest)
            })
        };
        (from..text.len()).find(begins).unwrap_or(text.len())
    }

    fn effort(&self) -> Effort {
        // In the worst case every string is compared at every place to its end.
        let worst_nanos = self.strings.iter().map(|string| string.len() as u64).sum::<u64>().max(10);
        Effort { usual_nanos: 3, worst_nanos }
    }
}

/// A body with strings replaced.
///
/// ```text
///   held:  | sent | plain | undecided: as long as the longest string, or the input of one step |
///                 start
/// ```
struct Substitution {
    search: Arc<Search>,
    replacements: Vec<Bytes>,
    /// With `sub_filter_once`: `true` for strings that were replaced.
    is_replaced: Option<Box<[bool]>>,
    held: Vec<u8>,
    start: usize,
    /// Number of held bytes that are sent unchanged.
    plain: usize,
    /// Output behind them: the rest of a replacement, and the number of held bytes that it replaces.
    replacing: Option<(Bytes, usize)>,
    /// `true` if nothing more can be found before more data arrives.
    is_decided: bool,
}

impl Transform for Substitution {
    fn effort(&self) -> Effort {
        self.search.effort()
    }

    /// Counts the held bytes once more if no more input comes for now.
    fn units(&self, input: &[u8], until: Until, _: usize) -> usize {
        match until {
            Until::MoreInput | Until::End => input.len(),
            Until::Pause | Until::Flush => self.held.len() - self.start,
        }
    }

    fn step(&mut self, input: &[u8], until: Until, room: &mut [u8]) -> Result<Step, BodyError> {
        let units = self.units(input, until, room.len());
        let mut step = Step { consumed: 0, produced: self.put(room), units, is_done: false };
        while step.produced < room.len() && !step.is_done {
            if until == Until::MoreInput && self.is_decided {
                if step.consumed > 0 {
                    break;
                }
                self.hold(input);
                step.consumed = input.len();
            }
            self.decide(until);
            step.produced += self.put(&mut room[step.produced..]);
            step.is_done = until != Until::MoreInput && self.is_decided && self.plain == 0;
        }
        Ok(step)
    }
}

impl Substitution {
    fn new(search: Arc<Search>, replacements: Vec<Bytes>, once: bool) -> Substitution {
        Substitution {
            is_replaced: once.then(|| vec![false; replacements.len()].into()),
            search,
            replacements,
            held: Vec::new(),
            start: 0,
            plain: 0,
            replacing: None,
            is_decided: false,
        }
    }

    fn hold(&mut self, input: &[u8]) {
        self.held.drain(..self.start);
        self.start = 0;
        self.held.extend_from_slice(input);
    }

    /// Searches the held bytes for the next string, once the last one was sent.
    fn decide(&mut self, until: Until) {
        if self.replacing.is_some() || self.plain > 0 {
            return;
        }
        let held = &self.held[self.start..];
        let found = match self.is_replaced.as_deref() {
            None => self.search.find(held, until, |_| true),
            Some(replaced) if replaced.iter().all(|&done| done) => Found::Nothing(held.len()),
            Some(replaced) => self.search.find(held, until, |number| !replaced[number]),
        };
        match found {
            Found::String(number, at) => {
                self.plain = at;
                self.replacing = Some((self.replacements[number].clone(), self.search.strings[number].len()));
                self.is_decided = false;
                if let Some(replaced) = &mut self.is_replaced {
                    replaced[number] = true;
                }
            }
            Found::Nothing(before) => {
                self.plain = before;
                self.is_decided = true;
            }
        }
    }

    /// Copies decided output into `room`. Returns its length.
    fn put(&mut self, room: &mut [u8]) -> usize {
        let plain = self.plain.min(room.len());
        room[..plain].copy_from_slice(&self.held[self.start..][..plain]);
        self.start += plain;
        self.plain -= plain;
        let Some((replacement, replaced)) = self.replacing.as_mut().filter(|_| self.plain == 0) else { return plain };
        let room = &mut room[plain..];
        let count = replacement.len().min(room.len());
        room[..count].copy_from_slice(&replacement.split_to(count));
        if replacement.is_empty() {
            self.start += *replaced;
            self.replacing = None;
        }
        plain + count
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Returns the output for an input in pieces, with output buffers of `room` bytes.
    fn replaced(pairs: &[(&str, &str)], once: bool, pieces: &[&[u8]], room: usize) -> Vec<u8> {
        let (strings, replacements): (Vec<_>, Vec<_>) = pairs.iter().copied().unzip();
        let strings: Vec<&[u8]> = strings.iter().map(|string| string.as_bytes()).collect();
        let replacements = replacements.iter().map(|text| Bytes::copy_from_slice(text.as_bytes())).collect();
        let mut substitution = Substitution::new(Arc::new(Search::new(&strings)), replacements, once);
        let mut out = Vec::new();
        let mut room = vec![0; room];
        for piece in pieces {
            let mut piece = *piece;
            while !piece.is_empty() {
                let step = substitution.step(piece, Until::MoreInput, &mut room).unwrap();
                assert!(step.consumed + step.produced > 0);
                out.extend_from_slice(&room[..step.produced]);
                piece = &piece[step.consumed..];
            }
        }
        loop {
            let step = substitution.step(&[], Until::End, &mut room).unwrap();
            out.extend_from_slice(&room[..step.produced]);
            if step.is_done {
                return out;
            }
        }
    }

    /// The same by a naive algorithm.
    fn replaced_naively(pairs: &[(&str, &str)], once: bool, text: &[u8]) -> Vec<u8> {
        let (mut out, mut at, mut done) = (Vec::new(), 0, vec![false; pairs.len()]);
        while at < text.len() {
            let fits = |string: &str| {
                text.get(at..at + string.len()).is_some_and(|part| part.eq_ignore_ascii_case(string.as_bytes()))
            };
            match pairs.iter().enumerate().find(|(number, (string, _))| !(once && done[*number]) && fits(string)) {
                Some((number, (string, replacement))) => {
                    out.extend_from_slice(replacement.as_bytes());
                    at += string.len();
                    done[number] = true;
                }
                None => {
                    out.push(text[at]);
                    at += 1;
                }
            }
        }
        out
    }

    #[test]
    fn strings_are_found_in_any_case_and_across_pieces() {
        let pairs = [("</HEAD>", "<x></head>"), ("b", "")];
        let text = b"<head></hEaD>abc</head";
        for cut in 0..text.len() {
            let pieces = [&text[..cut], &text[cut..]];
            assert_eq!(replaced(&pairs, false, &pieces, 3), b"<head><x></head>ac</head", "{cut}");
        }
    }

    #[test]
    fn a_flush_keeps_the_beginning_of_a_string_only() {
        let search = Arc::new(Search::new(&[b"abcd", b"bcx"]));
        let mut substitution = Substitution::new(search, vec![Bytes::new(), Bytes::new()], false);
        let mut room = [0; 100];
        let step = substitution.step(b"xxabc", Until::MoreInput, &mut room).unwrap();
        assert_eq!((step.consumed, &room[..step.produced]), (5, &b"xx"[..]));
        let step = substitution.step(b"", Until::Flush, &mut room).unwrap();
        assert!(step.is_done && step.produced == 0);
        let step = substitution.step(b"x!", Until::MoreInput, &mut room).unwrap();
        assert_eq!(&room[..step.produced], b"a");
        let step = substitution.step(b"", Until::Flush, &mut room).unwrap();
        assert_eq!((step.is_done, &room[..step.produced]), (true, &b"!"[..]));
    }

    proptest! {
        #[test]
        fn pieces_and_room_change_nothing(
            pairs in prop::collection::vec(("[abAB]{1,6}", "[abAB]{0,5}"), 1..5),
            once: bool,
            pieces in prop::collection::vec("[abABc]{0,9}", 0..8),
            room in 1_usize..20,
        ) {
            let pairs: Vec<(&str, &str)> = pairs.iter().map(|(string, by)| (&**string, &**by)).collect();
            let text = pieces.concat();
            let pieces: Vec<&[u8]> = pieces.iter().map(|piece| piece.as_bytes()).collect();
            let naive = replaced_naively(&pairs, once, text.as_bytes());
            prop_assert_eq!(replaced(&pairs, once, &pieces, room), naive);
        }
    }
}
