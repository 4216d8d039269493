//! One row of a directive table: all there is to say about a directive.
//!
//! From the rows come parsing, inheritance, "did you mean", `-t` and the generated reference, so a fact stands once.
//! Invariant: rows of the same name have disjoint contexts (`server` in `http` and in `upstream`); a test of the tables
//! checks that, see [`Tables::problems`](crate::Tables::problems).

use crate::store::Store;
use std::fmt;

/// A directive.
pub struct Directive<Cx: 'static> {
    /// Its name, as it is written.
    pub name: &'static str,
    /// Where it may stand.
    pub contexts: Contexts,
    /// How many arguments it takes.
    pub takes: Takes,
    /// Whether a block follows.
    pub body: Body,
    /// The arguments that it has when it is not written, as nginx's documentation prints them; `""` for none.
    pub default: &'static str,
    /// What it does, in one line.
    pub about: &'static str,
    /// What becomes of a statement.
    pub store: &'static dyn Store<Cx>,
}

// By hand: a row is copied whatever it is applied to.
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

/// A set of contexts. A block is one context, a directive's row lists several.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Contexts(u32);

impl Contexts {
    /// No context.
    pub const NOWHERE: Contexts = Contexts(0);
    /// Outside of all blocks.
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
    /// `http`, `server` and `location`, where most of http's directives may stand.
    pub const ANYWHERE: Contexts = Contexts::HTTP.or(Contexts::SERVER).or(Contexts::LOCATION);

    /// Both sets together.
    pub const fn or(self, other: Contexts) -> Contexts {
        Contexts(self.0 | other.0)
    }

    /// Whether every context of `other` is one of these.
    pub const fn contains(self, other: Contexts) -> bool {
        self.0 & other.0 == other.0
    }

    /// Whether every context of this set is one of `other`.
    pub const fn is_subset(self, other: Contexts) -> bool {
        other.contains(self)
    }

    /// Whether the sets share a context.
    pub const fn overlaps(self, other: Contexts) -> bool {
        self.0 & other.0 != 0
    }

    /// The contexts' names as nginx's documentation writes them, in its order.
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
    /// The names with commas between; `any` for all of them.
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

/// How many arguments a directive takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Takes {
    /// One: `on` or `off`.
    Flag,
    /// This many.
    Exactly(u8),
    /// From the first to the second number, both included.
    Between(u8, u8),
    /// One of these numbers: nginx has directives that take one or three.
    OneOf(&'static [u8]),
    /// This many or more.
    AtLeast(u8),
}

impl Takes {
    /// Whether this number of arguments is right.
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
    /// For a hint: `it takes …`.
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

/// How a directive ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Body {
    /// With `;`.
    None,
    /// With a block in braces.
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
