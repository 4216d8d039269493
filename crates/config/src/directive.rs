//! Rows of the directive tables: everything that is known about a directive.
//!
//! Parsing, inheritance, "did you mean", `-t` and the generated reference all use these rows, so each fact is stated
//! once.
//! Invariant: rows with the same name have disjoint contexts (`server` in `http` and in `upstream`). A test checks it
//! with [`Tables::problems`](crate::Tables::problems).

use crate::store::Store;
use std::fmt;

/// A directive.
pub struct Directive<Cx: 'static> {
    /// Name.
    pub name: &'static str,
    /// Contexts in which it is allowed.
    pub contexts: Contexts,
    /// Number of arguments.
    pub takes: Takes,
    /// Form of its end: `;` or a block.
    pub body: Body,
    /// Arguments used if the directive is absent, as nginx's documentation prints them; `""` for none.
    pub default: &'static str,
    /// Description in one line.
    pub about: &'static str,
    /// Store that applies a statement of this directive.
    pub store: &'static dyn Store<Cx>,
}

// Implemented by hand: `derive` would require `Cx: Clone`.
impl<Cx> Clone for Directive<Cx> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<Cx> Copy for Directive<Cx> {}

impl<Cx> fmt::Debug for Directive<Cx> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Directive")
            .field("name", &self.name)
            .field("contexts", &self.contexts)
            .field("takes", &self.takes)
            .field("body", &self.body)
            .field("default", &self.default)
            .finish_non_exhaustive()
    }
}

/// A set of contexts. A block belongs to one context; a directive's row lists several.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Contexts(u32);

impl Contexts {
    /// No context.
    pub const NOWHERE: Contexts = Contexts(0);
    /// Top level, outside of all blocks.
    pub const MAIN: Contexts = Contexts(1 << 0);
    /// `events { }`
    pub const EVENTS: Contexts = Contexts(1 << 1);
    /// `http { }`
    pub const HTTP: Contexts = Contexts(1 << 2);
    /// `server { }` in `http`
    pub const SERVER: Contexts = Contexts(1 << 3);
    /// `location { }`
    pub const LOCATION: Contexts = Contexts(1 << 4);
    /// `if { }` in a `server`
    pub const IF_IN_SERVER: Contexts = Contexts(1 << 5);
    /// `if { }` in a `location`
    pub const IF_IN_LOCATION: Contexts = Contexts(1 << 6);
    /// `limit_except { }`
    pub const LIMIT_EXCEPT: Contexts = Contexts(1 << 7);
    /// `upstream { }` in `http`
    pub const UPSTREAM: Contexts = Contexts(1 << 8);
    /// `stream { }`
    pub const STREAM: Contexts = Contexts(1 << 9);
    /// `server { }` in `stream`
    pub const STREAM_SERVER: Contexts = Contexts(1 << 10);
    /// `upstream { }` in `stream`
    pub const STREAM_UPSTREAM: Contexts = Contexts(1 << 11);
    /// `mail { }`
    pub const MAIL: Contexts = Contexts(1 << 12);
    /// `server { }` in `mail`
    pub const MAIL_SERVER: Contexts = Contexts(1 << 13);
    /// Every context.
    pub const ANY: Contexts = Contexts((1 << 14) - 1);
    /// `http`, `server` and `location`, where most directives of http are allowed.
    pub const ANYWHERE: Contexts = Contexts::HTTP.or(Contexts::SERVER).or(Contexts::LOCATION);

    /// The union of both sets.
    pub const fn or(self, other: Contexts) -> Contexts {
        Contexts(self.0 | other.0)
    }

    /// Returns `true` if `other` is a subset of this set.
    pub const fn contains(self, other: Contexts) -> bool {
        self.0 & other.0 == other.0
    }

    /// Returns `true` if this set is a subset of `other`.
    pub const fn is_subset(self, other: Contexts) -> bool {
        other.contains(self)
    }

    /// Returns `true` if the sets have a context in common.
    pub const fn overlaps(self, other: Contexts) -> bool {
        self.0 & other.0 != 0
    }

    /// The names of the contexts in nginx's documentation, in its order.
    pub fn names(self) -> impl Iterator<Item = &'static str> {
        CONTEXT_NAMES.iter().filter(move |(context, _)| self.contains(*context)).map(|(_, name)| *name)
    }
}

impl std::ops::BitOr for Contexts {
    type Output = Contexts;

    fn bitor(self, other: Contexts) -> Contexts {
        self.or(other)
    }
}

const CONTEXT_NAMES: [(Contexts, &str); 14] = [
    (Contexts::MAIN, "main"),
    (Contexts::EVENTS, "events"),
    (Contexts::HTTP, "http"),
    (Contexts::SERVER, "server"),
    (Contexts::LOCATION, "location"),
    (Contexts::IF_IN_SERVER, "if in server"),
    (Contexts::IF_IN_LOCATION, "if in location"),
    (Contexts::LIMIT_EXCEPT, "limit_except"),
    (Contexts::UPSTREAM, "upstream"),
    (Contexts::STREAM, "stream"),
    (Contexts::STREAM_SERVER, "server in stream"),
    (Contexts::STREAM_UPSTREAM, "upstream in stream"),
    (Contexts::MAIL, "mail"),
    (Contexts::MAIL_SERVER, "server in mail"),
];

impl fmt::Display for Contexts {
    /// Writes the names, separated by commas; `any` for all of them.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if *self == Contexts::ANY {
            return f.write_str("any");
        }
        for (index, name) in self.names().enumerate() {
            f.write_str(if index > 0 { ", " } else { "" })?;
            f.write_str(name)?;
        }
        Ok(())
    }
}

impl fmt::Debug for Contexts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Contexts({self})")
    }
}

/// Numbers of arguments that a directive accepts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Takes {
    /// One argument: `on` or `off`.
    Flag,
    /// Exactly this number.
    Exactly(u8),
    /// From the first to the second number, both included.
    Between(u8, u8),
    /// One of these numbers: some directives of nginx take one or three.
    OneOf(&'static [u8]),
    /// This number or more.
    AtLeast(u8),
}

impl Takes {
    /// Returns `true` if this number of arguments is accepted.
    pub fn accepts(self, count: usize) -> bool {
        match self {
            Takes::Flag => count == 1,
            Takes::Exactly(wanted) => count == usize::from(wanted),
            Takes::Between(least, most) => (usize::from(least)..=usize::from(most)).contains(&count),
            Takes::OneOf(counts) => counts.iter().any(|&wanted| usize::from(wanted) == count),
            Takes::AtLeast(least) => count >= usize::from(least),
        }
    }
}

impl fmt::Display for Takes {
    /// The wording of a hint: `it takes …`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Takes::Flag => f.write_str("\"on\" or \"off\""),
            Takes::Exactly(0) => f.write_str("no arguments"),
            Takes::Exactly(1) => f.write_str("1 argument"),
            Takes::Exactly(count) => write!(f, "{count} arguments"),
            Takes::Between(least, most) => write!(f, "{least} to {most} arguments"),
            Takes::OneOf(counts) => {
                for (index, count) in counts.iter().enumerate() {
                    let joint = if index == 0 { "" } else { " or " };
                    write!(f, "{joint}{count}")?;
                }
                f.write_str(" arguments")
            }
            Takes::AtLeast(1) => f.write_str("1 or more arguments"),
            Takes::AtLeast(least) => write!(f, "{least} or more arguments"),
        }
    }
}

/// End of a directive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Body {
    /// `;`.
    None,
    /// A block in braces.
    Block,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_sets() {
        let contexts = Contexts::HTTP.or(Contexts::SERVER);
        assert!(contexts.contains(Contexts::HTTP) && !contexts.contains(Contexts::HTTP | Contexts::LOCATION));
        assert!(contexts.is_subset(Contexts::ANYWHERE) && !Contexts::ANYWHERE.is_subset(contexts));
        assert!(contexts.overlaps(Contexts::ANYWHERE) && !contexts.overlaps(Contexts::MAIN));
        assert_eq!(CONTEXT_NAMES.iter().fold(Contexts::NOWHERE, |all, (contexts, _)| all | *contexts), Contexts::ANY);
    }

    #[test]
    fn places_are_named_as_the_documentation_names_them() {
        assert_eq!(
            Contexts::ANYWHERE.or(Contexts::IF_IN_LOCATION).to_string(),
            "http, server, location, if in location"
        );
        assert_eq!(Contexts::ANY.to_string(), "any");
    }

    #[test]
    fn arguments_are_counted() {
        let right = |takes: Takes| (0..5).filter(|&count| takes.accepts(count)).collect::<Vec<_>>();
        assert_eq!(right(Takes::Flag), [1]);
        assert_eq!(right(Takes::Exactly(0)), [0]);
        assert_eq!(right(Takes::Between(1, 3)), [1, 2, 3]);
        assert_eq!(right(Takes::OneOf(&[1, 3])), [1, 3]);
        assert_eq!(right(Takes::AtLeast(3)), [3, 4]);
        assert_eq!(Takes::OneOf(&[1, 3]).to_string(), "1 or 3 arguments");
    }
}
