//! `gale directives`: the reference, generated from the directive tables of the program, and the list of nginx's
//! directives that Gale lacks.

mod manual;
mod pages;

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::path::PathBuf;
use std::process::ExitCode;

use gale_config::{Body, Contexts, Inert, Takes};
use gale_engine::configuration::tables;
use gale_engine::module::{Directive, Module};
use gale_engine::nginx_names::{self, NginxDirective};
use gale_modules::order::ORDER;

/// The row of `include` for the reference. The parser handles `include` itself, so no module has a row for it, and this
/// store is never used. <https://nginx.org/en/docs/ngx_core_module.html#include>
const INCLUDE: Directive = Directive {
    name: "include",
    contexts: Contexts::ANY,
    takes: Takes::Exactly(1),
    body: Body::None,
    default: "",
    about: "Includes a file, or all files that match a pattern.",
    store: &Inert,
};

/// Output of `gale directives`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Form {
    /// The reference as text for a terminal.
    Text,
    /// The directives of nginx that Gale lacks.
    Missing,
    /// The manual page gale.conf(5).
    Manual,
    /// The reference as Markdown pages, written to this directory; nothing is printed.
    Pages(PathBuf),
}

/// Prints the reference, or writes its pages.
pub fn print(form: &Form) -> ExitCode {
    let mut out = io::BufWriter::new(io::stdout().lock());
    let printed = match form {
        Form::Text => reference(&mut out),
        Form::Missing => missing(&mut out),
        Form::Manual => manual::write(&mut out),
        Form::Pages(directory) => pages::write(directory),
    };
    match printed.and_then(|()| out.flush()) {
        // The reader may close the pipe early: `gale directives | head`.
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
            eprintln!("gale: the reference cannot be written: {error}");
            ExitCode::FAILURE
        }
        _ => ExitCode::SUCCESS,
    }
}

/// Returns the modules that have directives, each with its rows sorted by name.
fn modules() -> impl Iterator<Item = (&'static Module, Vec<&'static Directive>)> {
    ORDER.modules.iter().filter(|module| !module.directives.is_empty()).map(|module| {
        let mut rows: Vec<&Directive> = module.directives.iter().collect();
        if module.name == "core" {
            rows.push(&INCLUDE);
        }
        rows.sort_by_key(|row| row.name);
        (*module, rows)
    })
}

/// Returns the URL of nginx's documentation of the directive, if nginx has it in one of these contexts.
fn documentation(row: &Directive) -> Option<String> {
    let folder = if row.contexts.overlaps(STREAM) { "stream" } else { "http" };
    let is_it = |known: &NginxDirective| {
        let of = if known.module.starts_with("stream") { "stream" } else { "http" };
        known.name == row.name && (of == folder || !known.module.starts_with("http"))
    };
    let module = nginx_names::rows().find(is_it)?.module;
    let (protocol, module) = module.split_once('_').unwrap_or(("", module));
    let page = match (protocol, module) {
        ("http" | "stream", "try_files") => "core",
        ("http" | "stream", module) if module.starts_with("upstream") => "upstream",
        ("http" | "stream", "image_filter" | "xslt_filter") => module,
        ("http" | "stream", module) => module.strip_suffix("_filter").unwrap_or(module),
        _ => return Some(format!("https://nginx.org/en/docs/ngx_core_module.html#{}", row.name)),
    };
    Some(format!("https://nginx.org/en/docs/{protocol}/ngx_{protocol}_{page}_module.html#{}", row.name))
}

const STREAM: Contexts = Contexts::STREAM.or(Contexts::STREAM_SERVER).or(Contexts::STREAM_UPSTREAM);

fn reference(out: &mut impl Write) -> io::Result<()> {
    for (module, rows) in modules() {
        writeln!(out, "# {}\n", module.name)?;
        for row in rows {
            describe(out, row)?;
        }
    }
    Ok(())
}

fn describe(out: &mut impl Write, row: &Directive) -> io::Result<()> {
    writeln!(out, "{}", row.name)?;
    writeln!(out, "    {}", row.about)?;
    if !row.default.is_empty() {
        writeln!(out, "    default: {} {};", row.name, row.default)?;
    }
    writeln!(out, "    takes:   {}", row.takes)?;
    writeln!(out, "    context: {}\n", row.contexts)
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
    writeln!(out, "\n{known} of nginx's {} directives are supported, {unknown} are not", known + unknown)
}
