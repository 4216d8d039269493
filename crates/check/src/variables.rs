//! Analysis of variables: the characters that a client can put into their values.

use std::collections::HashMap;

use bstr::ByteSlice;
use gale_config::Statement;

use crate::expression::{Contents, Expression};
use crate::tree::{Node, Tree};

/// Maximum length of a chain of `set` directives that is followed.
const DEPTH_MAX: u32 = 10;

/// The variables of a configuration.
pub struct Variables<'t, 's> {
    tree: &'t Tree<'s>,
    /// Indices of the `set` statements of each variable.
    set: HashMap<&'s [u8], Vec<usize>>,
    /// Possible contents of named groups; groups of the same name in several expressions are combined.
    named: HashMap<String, Contents>,
}

impl<'t, 's> Variables<'t, 's> {
    pub fn new(tree: &'t Tree<'s>) -> Self {
        let (mut set, mut named) = (HashMap::<_, Vec<_>>::new(), HashMap::<_, Contents>::new());
        for (number, node) in tree.nodes.iter().enumerate() {
            if node.is("set") {
                set.entry(node.arg(0).strip_prefix(b"$").unwrap_or_default()).or_default().push(number);
            }
            let Some(expression) = expression_of(node) else { continue };
            for name in expression.names() {
                let contents = expression.group(|_, of| of == Some(name.as_str())).unwrap_or_default();
                let all = named.entry(name).or_default();
                *all = all.or(contents);
            }
        }
        Variables { tree, set, named }
    }

    /// Returns the characters that a client can put into a variable used in this statement.
    pub fn contents(&self, name: &str, used_in: usize) -> Contents {
        self.contents_within(name, used_in, DEPTH_MAX)
    }

    fn contents_within(&self, name: &str, used_in: usize, depth: u32) -> Contents {
        let any = |newline| Contents { newline, dot: true };
        if name.bytes().all(|byte| byte.is_ascii_digit()) {
            let number = name.parse().unwrap_or(0);
            return self.last_expression(used_in).and_then(|last| last.group(|of, _| of == number)).unwrap_or_default();
        }
        match name {
            // The path is percent-decoded: `%0a` becomes a line feed.
            "uri" | "document_uri" => return any(true),
            "request_uri" | "args" | "query_string" | "host" | "request" => return any(false),
            _ => {}
        }
        if ["http_", "arg_", "cookie_"].iter().any(|prefix| name.starts_with(prefix)) {
            return any(false);
        }
        if let Some(contents) = self.named.get(name) {
            return *contents;
        }
        let mut all = Contents::default();
        let values = self.set.get(name.as_bytes()).filter(|_| depth > 0);
        for &number in values.into_iter().flatten() {
            for variable in names_in(self.tree.nodes[number].arg(1)) {
                all = all.or(self.contents_within(variable, number, depth - 1));
            }
        }
        all
    }

    /// Returns the expression evaluated last before a statement, to which `$1` etc. refer.
    fn last_expression(&self, used_in: usize) -> Option<Expression> {
        let own = self.tree.nodes[used_in];
        if let Some(own) = expression_of(&own) {
            return Some(own);
        }
        // Searches backwards within the block, then the block's own expression, then outwards.
        let mut inner = (used_in, own);
        loop {
            let before = (0..inner.0).rev().take_while(|&number| Some(number) != inner.1.parent);
            let siblings = before.filter(|&number| self.tree.nodes[number].parent == inner.1.parent);
            // Expressions in sibling blocks are ignored: the block was not evaluated or did not match.
            let mut simple = siblings.map(|number| self.tree.nodes[number]).filter(|node| node.is("rewrite"));
            if let Some(expression) = simple.find_map(|node| expression_of(&node)) {
                return Some(expression);
            }
            let parent = inner.1.parent?;
            inner = (parent, self.tree.nodes[parent]);
            if let Some(expression) = expression_of(&inner.1) {
                return Some(expression);
            }
        }
    }
}

/// Returns the regular expression that a statement evaluates.
pub fn expression_of(node: &Node<'_>) -> Option<Expression> {
    match node.name() {
        b"rewrite" => Expression::parse(node.arg(0), false),
        b"location" if node.arg(0) == b"~" || node.arg(0) == b"~*" => {
            Expression::parse(node.arg(1), node.arg(0) == b"~*")
        }
        b"location" => Expression::parse(node.arg(0).strip_prefix(b"~")?.trim_start_with(|c| c == '*'), false),
        b"server_name" => {
            let name = node.statement.args.iter().find_map(|word| word.text.strip_prefix(b"~"))?;
            Expression::parse(name, true)
        }
        b"if" => {
            let (operator, text) = condition(node.statement)?;
            Expression::parse(text, operator == b"~*")
        }
        _ => None,
    }
}

/// Returns the operator and the regular expression of an `if`, if it has one.
pub fn condition(statement: &Statement) -> Option<(&[u8], &[u8])> {
    let operators: [&[u8]; 4] = [b"~", b"~*", b"!~", b"!~*"];
    let at = statement.args.iter().position(|word| operators.contains(&&word.text[..]))?;
    let text: &[u8] = &statement.args.get(at + 1)?.text;
    // After a quoted expression the closing parenthesis is a separate word.
    let is_last = statement.args.len() == at + 2;
    Some((&statement.args[at].text, if is_last { text.strip_suffix(b")")? } else { text }))
}

/// Iterates over the names of the variables in a text.
pub fn names_in(text: &[u8]) -> impl Iterator<Item = &str> {
    text.split(|&byte| byte == b'$').skip(1).filter_map(|rest| {
        let name = match rest.strip_prefix(b"{") {
            Some(rest) => rest.split(|&byte| byte == b'}').next()?,
            None if rest.first()?.is_ascii_digit() => &rest[..1],
            None => {
                let is_part = |byte: &u8| byte.is_ascii_alphanumeric() || *byte == b'_';
                &rest[..rest.iter().position(|byte| !is_part(byte)).unwrap_or(rest.len())]
            }
        };
        name.to_str().ok().filter(|name| !name.is_empty())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variables_are_found_in_a_text() {
        let names: Vec<_> = names_in(b"http://$host${uri}x/$1a?$is_args$$").collect();
        assert_eq!(names, ["host", "uri", "1", "is_args"]);
    }
}
