//! All directives of the program: finds the row for a statement, or the exact error.
//!
//! Applies nothing; the caller does, with the store of the row. Invariant: the checks are made in nginx's order (name,
//! context, block, number of arguments), so that the first error of a statement is the one that nginx reports.

use crate::diagnostic::Diagnostic;
use crate::directive::{Body, Contexts, Directive, Takes};
use crate::statement::Statement;
use crate::store;
use crate::suggest;
use std::collections::BTreeMap;

/// The directives of all modules.
pub struct Tables<Cx: 'static> {
    rows: BTreeMap<&'static str, Vec<Found<Cx>>>,
    /// All directives of nginx, to tell a misspelled name from a missing feature.
    nginx_names: &'static [&'static str],
}

/// A row and the module to which it belongs.
pub struct Found<Cx: 'static> {
    /// The number that the caller assigned to the module's table.
    pub owner: usize,
    /// The row.
    pub directive: &'static Directive<Cx>,
}

impl<Cx> Clone for Found<Cx> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<Cx> Copy for Found<Cx> {}

impl<Cx> std::fmt::Debug for Found<Cx> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Found").field("owner", &self.owner).field("directive", self.directive).finish()
    }
}

/// The parser handles `include`; only malformed ones stay in the tree.
const INCLUDE: &str = "include";

/// U+FEFF in UTF-8, which some editors write at the beginning of a file.
const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";

impl<Cx> Tables<Cx> {
    /// Joins the tables of all modules; the caller assigns a number to each. `nginx_names` lists all directives of
    /// nginx.
    pub fn new(
        modules: impl IntoIterator<Item = (usize, &'static [Directive<Cx>])>,
        nginx_names: &'static [&'static str],
    ) -> Self {
        let mut rows: BTreeMap<&'static str, Vec<Found<Cx>>> = BTreeMap::new();
        for (owner, directives) in modules {
            for directive in directives {
                rows.entry(directive.name).or_default().push(Found { owner, directive });
            }
        }
        Tables { rows, nginx_names }
    }

    /// Returns the row for a statement in a block of that context. Context, block and number of arguments are checked.
    ///
    /// # Errors
    /// The error of a broken statement, or in nginx's words: unknown directive, not allowed here, not terminated by
    /// `;`, no opening `{`, invalid number of arguments.
    pub fn find(&self, statement: &Statement, context: Contexts) -> Result<Found<Cx>, Diagnostic> {
        if let Some(error) = &statement.broken {
            return Err((**error).clone());
        }
        let name: &[u8] = &statement.name.text;
        if name == INCLUDE.as_bytes() {
            return Err(self.misshapen_include(statement));
        }
        let rows = std::str::from_utf8(name).ok().and_then(|name| self.rows.get(name));
        let Some(rows) = rows else {
            return Err(self.unknown(statement, context));
        };
        let Some(found) = rows.iter().find(|row| row.directive.contexts.overlaps(context)) else {
            return Err(not_allowed_here(statement, rows));
        };
        self.check_shape(statement, found.directive.body, found.directive.takes)?;
        Ok(*found)
    }

    /// Adds a hint to an error of a statement's arguments if one of them is most likely the next directive.
    pub fn explain(&self, statement: &Statement, error: Diagnostic) -> Diagnostic {
        match self.forgotten_semicolon(statement) {
            Some(hint) if error.hint.is_none() => error.hint(hint),
            _ => error,
        }
    }

    /// All rows, sorted by name.
    pub fn iter(&self) -> impl Iterator<Item = Found<Cx>> + '_ {
        self.rows.values().flatten().copied()
    }

    /// Returns `true` if there is a row with that name.
    pub fn contains(&self, name: &str) -> bool {
        name == INCLUDE || self.rows.contains_key(name)
    }

    /// Returns `true` if nginx has a directive with that name.
    pub fn is_of_nginx(&self, name: &str) -> bool {
        name == INCLUDE || self.nginx_names.contains(&name)
    }

    /// Iterates over the directives of nginx that these tables lack, in the order of the list.
    pub fn missing(&self) -> impl Iterator<Item = &'static str> + '_ {
        self.nginx_names.iter().copied().filter(|name| !self.contains(name))
    }

    /// Returns the errors of the tables themselves, one line each; a test asserts that there are none.
    ///
    /// An error is: rows of the same name that share a context, a default that cannot be parsed or has a wrong number
    /// of arguments, a row without a description.
    pub fn problems(&self, cx: &mut Cx) -> Vec<String> {
        let mut problems = Vec::new();
        for Found { directive, .. } in self.iter() {
            let name = directive.name;
            if directive.about.is_empty() || directive.about.contains('\n') {
                problems.push(format!("{name}: what it does is not one line"));
            }
            if directive.contexts == Contexts::NOWHERE {
                problems.push(format!("{name}: may stand nowhere"));
            }
            if directive.default.is_empty() {
                continue;
            }
            match store::default_statement(name, directive.default) {
                Ok(statement) if !directive.takes.accepts(statement.args.len()) => {
                    problems.push(format!("{name}: the default has a wrong number of arguments"));
                }
                _ => {
                    if let Err(error) = directive.store.check_default(cx, name, directive.default) {
                        problems.push(format!("{name}: the default does not parse: {}", error.message));
                    }
                }
            }
        }
        for (name, rows) in &self.rows {
            let mut taken = Contexts::NOWHERE;
            for row in rows {
                if taken.overlaps(row.directive.contexts) {
                    problems.push(format!("{name}: two rows share a context"));
                }
                taken = taken | row.directive.contexts;
            }
        }
        problems
    }

    fn unknown(&self, statement: &Statement, context: Contexts) -> Diagnostic {
        let name: &[u8] = &statement.name.text;
        let error = statement.error(format!("unknown directive \"{}\"", statement.name.text));
        if name.starts_with(BYTE_ORDER_MARK) {
            return error.hint("the file begins with a byte order mark; save it as UTF-8 without one");
        }
        if name.contains(&b'}') {
            return error.hint("an expression that contains \"{\", \"}\" or \";\" must be written in quotes");
        }
        if name == b"ssl" {
            return error.hint("nginx has removed it; use the parameter \"ssl\" of \"listen\" instead");
        }
        if self.nginx_names.iter().any(|known| known.as_bytes() == name) {
            return error.hint("nginx supports this directive, Gale does not yet");
        }
        let here = self.iter().map(|row| row.directive).filter(|row| row.contexts.overlaps(context));
        let nearest = suggest::nearest(name, here.map(|row| row.name))
            .or_else(|| suggest::nearest(name, self.rows.keys().copied()))
            .or_else(|| suggest::nearest(name, self.nginx_names.iter().copied()));
        match nearest {
            Some(nearest) => error.hint(format!("did you mean \"{nearest}\"?")),
            None => error,
        }
    }

    fn misshapen_include(&self, statement: &Statement) -> Diagnostic {
        match self.check_shape(statement, Body::None, Takes::Exactly(1)) {
            Err(error) => error,
            // A well-formed `include` is handled by the parser, so a synthetic one is an error.
            Ok(()) => statement.directive_error("is not allowed here"),
        }
    }

    fn check_shape(&self, statement: &Statement, body: Body, takes: Takes) -> Result<(), Diagnostic> {
        let name = &statement.name.text;
        let error = match (body, &statement.block) {
            (Body::None, Some(_)) => statement
                .error(format!("directive \"{name}\" is not terminated by \";\""))
                .hint(format!("\"{name}\" takes no block")),
            (Body::Block, None) => statement.error(format!("directive \"{name}\" has no opening \"{{\"")),
            _ if takes.accepts(statement.args.len()) => return Ok(()),
            _ => statement
                .error(format!("invalid number of arguments in \"{name}\" directive"))
                .hint(format!("\"{name}\" takes {takes}")),
        };
        Err(match self.forgotten_semicolon(statement) {
            Some(hint) => error.hint(hint),
            None => error,
        })
    }

    /// Returns a hint if an argument starts a line and is the name of a directive: most likely it is the next
    /// directive.
    fn forgotten_semicolon(&self, statement: &Statement) -> Option<String> {
        let is_directive = |text: &[u8]| std::str::from_utf8(text).is_ok_and(|name| self.contains(name));
        let next = statement.args.iter().find(|arg| arg.starts_line && !arg.quoted && is_directive(&arg.text))?;
        Some(format!("a \";\" seems to be missing before \"{}\"", next.text))
    }
}

fn not_allowed_here<Cx>(statement: &Statement, rows: &[Found<Cx>]) -> Diagnostic {
    let contexts = rows.iter().fold(Contexts::NOWHERE, |all, row| all | row.directive.contexts);
    let name = &statement.name.text;
    statement.directive_error("is not allowed here").hint(format!("\"{name}\" is allowed in: {contexts}"))
}
