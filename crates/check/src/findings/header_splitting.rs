//! Values with a line feed chosen by a client: the text after it becomes a header field or request written by the
//! client.

use super::Check;
use crate::report::Severity;
use crate::tree::{Node, Tree};
use crate::variables::{Variables, names_in};

pub const CHECK: Check = Check {
    name: "header_splitting",
    severity: Severity::High,
    advice: "Use $request_uri, which is not decoded, or an expression that matches no line feed: [^/\\s]+ instead of \
             [^/]+.",
    run,
};

fn run(tree: &Tree<'_>, variables: &Variables<'_, '_>, found: &mut dyn FnMut(usize, String)) {
    for (number, node) in tree.nodes.iter().enumerate() {
        let Some(value) = value_in_a_head(node) else { continue };
        let splits = |name: &&str| variables.contents(name, number).newline;
        if let Some(name) = names_in(value).find(splits) {
            let directive = bstr::BStr::new(node.name());
            found(number, format!("${name} may contain a line feed, which would end the field set by \"{directive}\""));
        }
    }
}

/// Returns the argument that a directive writes into the head of a response or request.
fn value_in_a_head<'s>(node: &Node<'s>) -> Option<&'s [u8]> {
    match node.name() {
        b"return" => match node.arg(0) {
            b"301" | b"302" | b"303" | b"307" | b"308" => Some(node.arg(1)),
            url if node.statement.args.len() == 1 && url.contains(&b':') => Some(url),
            _ => None,
        },
        b"add_header" | b"proxy_set_header" | b"grpc_set_header" => Some(node.arg(1)),
        b"proxy_pass" => Some(node.arg(0)),
        _ => None,
    }
}
