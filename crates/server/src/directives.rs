//! `gale directives`: the reference, made from the tables that the program itself
//! lives by, and what nginx has that Gale does not.

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::process::ExitCode;

use gale_config::{Body, Contexts, Inert, Takes};
use gale_engine::configuration::tables;
use gale_engine::module::{Directive, Module};
use gale_engine::nginx_names;
use gale_modules::order::ORDER;

/// The parser puts files in its place, so no module has a row for it, and nothing is ever stored by this one.
/// <https://nginx.org/en/docs/ngx_core_module.html#include>
const INCLUDE: Directive = Directive {
    name: "include",
    contexts: Contexts::ANY,
    takes: Takes::Exactly(1),
    body: Body::None,
    default: "",
    about: "What is written in a file, or in all files that a pattern matches, as if it stood here.",
    store: &Inert,
};

/// Prints the reference, or with `only_missing` what is not built yet.
pub fn print(only_missing: bool) -> ExitCode {
    let mut out = io::stdout().lock();
    let printed = if only_missing { missing(&mut out) } else { reference(&mut out) };
    match printed {
        // Whoever reads may have seen enough: `gale directives | head`.
        Ok(()) => ExitCode::SUCCESS,
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("gale: the reference cannot be printed: {error}");
            ExitCode::FAILURE
        }
    }
}

fn reference(out: &mut impl Write) -> io::Result<()> {
    for module in ORDER.modules.iter().filter(|module| !module.directives.is_empty()) {
        writeln!(out, "# {}\n", module.name)?;
        describe(out, module)?;
    }
    Ok(())
}

fn describe(out: &mut impl Write, module: &Module) -> io::Result<()> {
    let mut rows: Vec<&Directive> = module.directives.iter().collect();
    if module.name == "core" {
        rows.push(&INCLUDE);
    }
    rows.sort_by_key(|row| row.name);
    for row in rows {
        writeln!(out, "{}", row.name)?;
        writeln!(out, "    {}", row.about)?;
        if !row.default.is_empty() {
            writeln!(out, "    default: {} {};", row.name, row.default)?;
        }
        writeln!(out, "    takes:   {}", row.takes)?;
        writeln!(out, "    context: {}\n", row.contexts)?;
    }
    Ok(())
}

fn missing(out: &mut impl Write) -> io::Result<()> {
    let tables = tables(&ORDER);
    let mut by_module: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    let (mut known, mut unknown) = (0, 0);
    for row in nginx_names::rows() {
        if tables.contains(row.name) {
            known += 1;
        } else {
            unknown += 1;
            by_module.entry(row.module).or_default().push(row.name);
        }
    }
    for (module, names) in by_module {
        writeln!(out, "{module}: {}", names.join(" "))?;
    }
    writeln!(out, "\n{known} of nginx's {} directives are understood, {unknown} are missing", known + unknown)
}
