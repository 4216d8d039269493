//! `if` in a location creates a location of its own: other directives in it, and some next to it, do not work as
//! written. <https://nginx.org/en/docs/http/ngx_http_rewrite_module.html#if>

use gale_config::Contexts;

use super::Check;
use crate::report::Severity;
use crate::tree::Tree;
use crate::variables::Variables;

pub const CHECK: Check = Check {
    name: "if_trap",
    severity: Severity::Low,
    advice: "Use only return, rewrite … last, set and break in it, and choose by map or by another location.",
    run,
};

const SAFE: &[&str] = &["return", "rewrite", "set", "break", "access_log"];

fn run(tree: &Tree<'_>, _: &Variables<'_, '_>, found: &mut dyn FnMut(usize, String)) {
    let mut last = None;
    for (number, node) in tree.nodes.iter().enumerate() {
        let in_if = node.context == Contexts::IF_IN_LOCATION;
        if in_if && !SAFE.iter().any(|name| node.is(name)) && last.replace(node.parent) != Some(node.parent) {
            let directive = bstr::BStr::new(node.name());
            found(number, format!("if several \"if\" are true, only \"{directive}\" of the last one applies"));
        }
        // If the `if` ends the request, skipping `try_files` is harmless.
        let ends = |statement: &gale_config::Statement| matches!(&statement.name.text[..], b"return" | b"rewrite");
        if node.is("if") && node.context == Contexts::LOCATION && !node.statement.body().iter().any(ends) {
            let beside = node.parent.map(|parent| tree.nodes[parent].statement.body()).unwrap_or_default();
            if beside.iter().any(|statement| statement.name.text == "try_files") {
                found(number, "\"try_files\" of the location is skipped if the condition is true".to_owned());
            }
        }
    }
}
