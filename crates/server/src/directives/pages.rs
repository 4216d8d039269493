//! The reference as pages in Markdown, one for each module, and an index.

use std::fs;
use std::io;
use std::path::Path;

use gale_check::{Difference, differences};
use gale_engine::module::{Directive, Module};

use super::{documentation, modules};

const MADE: &str = "<!-- Made by `gale directives --pages`; a test compares it with the program. -->\n";

/// Writes the pages into a directory, which is made if it is not there.
pub fn write(directory: &Path) -> io::Result<()> {
    fs::create_dir_all(directory)?;
    let mut index: Vec<(&str, &str, String)> = Vec::new();
    for (module, rows) in modules() {
        fs::write(directory.join(format!("{}.md", module.name)), page(module, &rows))?;
        index.extend(rows.iter().map(|row| (row.name, module.name, row.contexts.to_string())));
    }
    index.sort();
    let mut text = format!("{MADE}# Directives\n\n| directive | contexts |\n|---|---|\n");
    for (name, module, contexts) in index {
        text.push_str(&format!("| [`{name}`]({module}.md#{name}) | {contexts} |\n"));
    }
    fs::write(directory.join("README.md"), text)
}

fn page(module: &Module, rows: &[&Directive]) -> String {
    let mut text = format!("{MADE}# {}\n", module.name);
    for row in rows {
        section(&mut text, row);
    }
    text
}

fn section(text: &mut String, row: &Directive) {
    text.push_str(&format!("\n## {}\n\n{}\n\n| | |\n|---|---|\n", row.name, row.about));
    if !row.default.is_empty() {
        text.push_str(&format!("| default | `{}` |\n", in_cell(row.default)));
    }
    text.push_str(&format!("| takes | {} |\n| contexts | {} |\n", row.takes, row.contexts));
    for difference in differences(row.name, row.contexts) {
        text.push_str(&format!("| in Gale | {} |\n", difference_of(&difference)));
    }
    if let Some(address) = documentation(row) {
        text.push_str(&format!("| in nginx | [documentation]({address}) |\n"));
    }
}

fn difference_of(difference: &Difference) -> String {
    let with = match difference.arguments() {
        [] => String::new(),
        arguments => format!("with `{}`: ", arguments.join(" ")),
    };
    let more = difference.more.map_or_else(String::new, |more| {
        let page = if more.starts_with('#') { "configuration.md" } else { "" };
        format!(" ([more](../{page}{more}))")
    });
    format!("{with}{}{more}", difference.text)
}

/// A bar would begin another cell.
fn in_cell(text: &str) -> String {
    text.replace('|', "\\|")
}
