//! The reference as Markdown pages: one for each module, and an index.

use std::fs;
use std::io;
use std::path::Path;

use gale_check::{Difference, Differences};
use gale_engine::module::{Directive, Module};

use super::{documentation, modules};

const MADE: &str = "<!-- Made by `gale directives --pages`; a test compares it with the program. -->\n";

/// Writes the pages into a directory, creating it if necessary.
pub fn write(directory: &Path) -> io::Result<()> {
    fs::create_dir_all(directory)?;
    let differences = Differences::read();
    let mut index: Vec<(&str, &str, String)> = Vec::new();
    for (module, rows) in modules() {
        fs::write(directory.join(format!("{}.md", module.name)), page(module, &rows, &differences))?;
        index.extend(rows.iter().map(|row| (row.name, module.name, row.contexts.to_string())));
    }
    index.sort();
    let mut text = format!("{MADE}# Directives\n\n| directive | contexts |\n|---|---|\n");
    for (name, module, contexts) in index {
        text.push_str(&format!("| [`{name}`]({module}.md#{name}) | {contexts} |\n"));
    }
    fs::write(directory.join("README.md"), text)
}

fn page(module: &Module, rows: &[&Directive], differences: &Differences) -> String {
    let mut text = format!("{MADE}# {}\n", module.name);
    for row in rows {
        section(&mut text, row, differences);
    }
    text
}

fn section(text: &mut String, row: &Directive, differences: &Differences) {
    text.push_str(&format!("\n## {}\n\n{}\n\n| | |\n|---|---|\n", row.name, row.about));
    if !row.default.is_empty() {
        text.push_str(&format!("| default | `{}` |\n", in_cell(row.default)));
    }
    text.push_str(&format!("| takes | {} |\n| contexts | {} |\n", row.takes, row.contexts));
    for difference in differences.about(row.name, row.contexts) {
        text.push_str(&format!("| in Gale | {} |\n", difference_of(difference)));
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
    let more = difference.more.as_ref().map_or_else(String::new, |more| format!(" ([more](../{more}))"));
    format!("{with}{}{more}", difference.text)
}

/// Escapes the bar, which would begin another cell of the table.
fn in_cell(text: &str) -> String {
    text.replace('|', "\\|")
}
