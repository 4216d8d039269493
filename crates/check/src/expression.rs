//! Analysis of the texts that groups of a regular expression can match.
//!
//! Expressions are PCRE's. An expression with syntax unknown to the parser used here (look-around, back references) is
//! treated as matching nothing of interest, to avoid false reports.

use regex_syntax::ParserBuilder;
use regex_syntax::hir::{Class, Hir, HirKind, Look};

/// A parsed regular expression.
pub struct Expression(Hir);

/// Characters that a matched text may contain.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Contents {
    /// A line feed, which ends a header field.
    pub newline: bool,
    /// A dot, so that the text may be a different domain.
    pub dot: bool,
}

impl Contents {
    /// Returns the union, for a text that comes from one of two sources.
    pub fn or(self, other: Contents) -> Contents {
        Contents { newline: self.newline | other.newline, dot: self.dot | other.dot }
    }
}

impl Expression {
    /// Parses an expression as PCRE would.
    pub fn parse(text: &[u8], ignores_case: bool) -> Option<Expression> {
        let text = std::str::from_utf8(text).ok()?;
        let mut parser = ParserBuilder::new().case_insensitive(ignores_case).utf8(false).build();
        parser.parse(&with_angle_brackets(text)).ok().map(Expression)
    }

    /// The names of its groups.
    pub fn names(&self) -> Vec<String> {
        let mut names = Vec::new();
        visit(&self.0, &mut |hir| {
            if let HirKind::Capture(capture) = hir.kind() {
                names.extend(capture.name.as_deref().map(str::to_owned));
            }
        });
        names
    }

    /// Returns the possible contents of the group with this number or name.
    pub fn group(&self, is_it: impl Fn(u32, Option<&str>) -> bool) -> Option<Contents> {
        let mut found = None;
        visit(&self.0, &mut |hir| {
            if let HirKind::Capture(capture) = hir.kind()
                && is_it(capture.index, capture.name.as_deref())
            {
                found = Some(contents(&capture.sub));
            }
        });
        found
    }

    /// Returns `true` if every match ends at the end of the text.
    pub fn is_anchored_at_end(&self) -> bool {
        let ends = self.0.properties().look_set_suffix();
        ends.contains(Look::End) || ends.contains(Look::EndLF) || ends.contains(Look::EndCRLF)
    }
}

/// Translates `(?'name'...)`, a PCRE syntax for named groups that the parser does not know.
fn with_angle_brackets(text: &str) -> String {
    let mut pieces = text.split("(?'");
    let mut out = pieces.next().unwrap_or_default().to_owned();
    for piece in pieces {
        out.push_str("(?P<");
        out.push_str(&piece.replacen('\'', ">", 1));
    }
    out
}

fn contents(hir: &Hir) -> Contents {
    let mut all = Contents::default();
    visit(hir, &mut |hir| match hir.kind() {
        HirKind::Literal(literal) => {
            all.newline |= literal.0.contains(&b'\n');
            all.dot |= literal.0.contains(&b'.');
        }
        HirKind::Class(class) => {
            all.newline |= has(class, '\n');
            all.dot |= has(class, '.');
        }
        _ => {}
    });
    all
}

fn has(class: &Class, wanted: char) -> bool {
    match class {
        Class::Unicode(class) => class.iter().any(|range| (range.start()..=range.end()).contains(&wanted)),
        Class::Bytes(class) => class.iter().any(|range| (range.start()..=range.end()).contains(&(wanted as u8))),
    }
}

// The recursion is bounded by the parser's limit for nested groups: 250.
fn visit(hir: &Hir, see: &mut impl FnMut(&Hir)) {
    see(hir);
    match hir.kind() {
        HirKind::Repetition(repetition) => visit(&repetition.sub, see),
        HirKind::Capture(capture) => visit(&capture.sub, see),
        HirKind::Concat(parts) | HirKind::Alternation(parts) => parts.iter().for_each(|part| visit(part, see)),
        HirKind::Empty | HirKind::Literal(_) | HirKind::Class(_) | HirKind::Look(_) => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn first(text: &str) -> Contents {
        Expression::parse(text.as_bytes(), false).expect(text).group(|number, _| number == 1).expect("a group")
    }

    #[test]
    fn contents_of_a_group_are_known() {
        assert_eq!(first("^/(.*)$"), Contents { newline: false, dot: true });
        assert_eq!(first("^/([^/]*)"), Contents { newline: true, dot: true });
        assert_eq!(first("^/([a-z]+)/x"), Contents { newline: false, dot: false });
        assert_eq!(first(r"^/((?:a|\s)+)"), Contents { newline: true, dot: false });
        let named = Expression::parse(b"^(?<name>[^.]+)[.]x$", true).expect("an expression");
        assert_eq!(named.names(), ["name"]);
        assert_eq!(named.group(|_, name| name == Some("name")), Some(Contents { newline: true, dot: false }));
        let quoted = Expression::parse(b"^(?'one'[^'.]+)'(?'two'.)", false).expect("an expression");
        assert_eq!(quoted.names(), ["one", "two"]);
    }

    #[test]
    fn expression_that_ends_with_the_text_is_anchored() {
        let is = |text: &str| Expression::parse(text.as_bytes(), false).expect(text).is_anchored_at_end();
        assert!(is("^https://a$") && is("(a$|b$)") && !is("^https://a") && !is("(a$|b)"));
    }

    #[test]
    fn unknown_syntax_gives_no_expression() {
        assert!(Expression::parse(b"(?!x)(.*)", false).is_none() && Expression::parse(b"\xff(", false).is_none());
    }
}
