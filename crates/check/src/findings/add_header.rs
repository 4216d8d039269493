//! `add_header` in a block: the fields of outer blocks are no longer added.

use std::collections::BTreeSet;

use bstr::ByteSlice;
use gale_config::Contexts;

use super::Check;
use crate::report::Severity;
use crate::tree::Tree;
use crate::variables::Variables;

pub const LOST: Check = Check {
    name: "add_header_redefinition",
    severity: Severity::Low,
    advice: "Repeat the outer fields there, or set add_header_inherit merge;",
    run: lost,
};

pub const SEVERAL_LINES: Check = Check {
    name: "add_header_multiline",
    severity: Severity::Low,
    advice: "Write the value on one line: clients reject folded fields.",
    run: several_lines,
};

fn lost(tree: &Tree<'_>, _: &Variables<'_, '_>, found: &mut dyn FnMut(usize, String)) {
    let mut last = None;
    for (number, node) in tree.named("add_header") {
        // Reports each block once.
        let Some(block) = node.parent.filter(|_| last.replace(node.parent) != Some(node.parent)) else { continue };
        if merges(tree, number) {
            continue;
        }
        let own = fields(tree, block);
        let outer = tree.ancestors(block).map(|(outer, _)| fields(tree, outer)).find(|fields| !fields.is_empty());
        let missing: Vec<String> = outer.unwrap_or_default().difference(&own).cloned().collect();
        if !missing.is_empty() {
            found(number, format!("fields of the outer level are not sent here: {}", missing.join(", ")));
        }
    }
}

/// Returns the names of the fields that a block adds.
fn fields(tree: &Tree<'_>, block: usize) -> BTreeSet<String> {
    let body = tree.nodes[block].statement.body().iter();
    let added = body.filter(|statement| statement.name.text == "add_header").filter_map(|row| row.args.first());
    added.map(|word| word.text.to_str_lossy().to_ascii_lowercase()).collect()
}

/// Returns `true` if `add_header_inherit merge` applies to the statement.
fn merges(tree: &Tree<'_>, number: usize) -> bool {
    let said = |statement: &gale_config::Statement| {
        (statement.name.text == "add_header_inherit")
            .then(|| statement.args.first().is_some_and(|word| word.text == "merge"))
    };
    tree.ancestors(number).find_map(|(_, block)| block.statement.body().iter().find_map(said)).unwrap_or(false)
}

fn several_lines(tree: &Tree<'_>, _: &Variables<'_, '_>, found: &mut dyn FnMut(usize, String)) {
    for (number, node) in tree.named("add_header") {
        if node.context.overlaps(Contexts::ANYWHERE | Contexts::IF_IN_LOCATION) && node.arg(1).contains(&b'\n') {
            found(number, "the value has several lines".to_owned());
        }
    }
}
