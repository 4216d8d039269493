//! `return` together with `allow`, `deny` or `auth_basic`: the response is sent before access is checked.

use super::Check;
use crate::report::Severity;
use crate::tree::Tree;
use crate::variables::Variables;

pub const CHECK: Check = Check {
    name: "return_bypasses_access",
    severity: Severity::Medium,
    advice: "Move the content to a location without return, with try_files or a named location.",
    run,
};

const ACCESS: &[&[u8]] = &[b"allow", b"deny", b"auth_basic", b"auth_request"];

fn run(tree: &Tree<'_>, _: &Variables<'_, '_>, found: &mut dyn FnMut(usize, String)) {
    for (number, node) in tree.named("return") {
        let Some(block) = node.parent.map(|parent| tree.nodes[parent]) else { continue };
        if !block.is("location") || matches!(node.arg(0), b"403" | b"404" | b"444") {
            continue;
        }
        let rule = block.statement.body().iter().find(|statement| ACCESS.contains(&&statement.name.text[..]));
        if let Some(rule) = rule {
            found(number, format!("\"return\" answers every client, before \"{}\" is checked", rule.name.text));
        }
    }
}
