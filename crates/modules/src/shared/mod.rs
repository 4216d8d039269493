//! Modules that are the same for requests and for sessions: the syntax of directives, and their effect on a
//! [`Subject`], which has variables, a connection and notes.
//!
//! Nothing here names a protocol. The module of the same name in `http` or `stream` has the table of directives with
//! their contexts, the phases, and protocol-specific parts, such as a status or a header field with addresses.

pub mod access;
pub mod access_log;
pub(crate) mod append;
pub(crate) mod base64;
pub mod figures;
pub mod geo;
pub mod geoip;
pub mod health_check;
pub mod limit_conn;
pub mod limit_req;
pub(crate) mod limits;
pub mod log_format;
pub mod map;
pub mod realip;
pub mod set;
pub mod split_clients;
pub mod ssl;
pub(crate) mod tls_client;
pub mod upstream;
pub mod variables;

use gale_config::{Diagnostic, Statement, Word};
use gale_engine::configuration::Builder;
use gale_engine::module::Directive;
use gale_engine::variables::subject::Subject;
use gale_engine::variables::template::SizeTemplate;

/// Joins the rows of several tables, `N` in all.
pub(crate) const fn join<const N: usize>(tables: &[&[Directive]]) -> [Directive; N] {
    let mut rows = [tables[0][0]; N];
    let (mut count, mut table) = (0, 0);
    while table < tables.len() {
        let mut row = 0;
        while row < tables[table].len() {
            rows[count] = tables[table][row];
            count += 1;
            row += 1;
        }
        table += 1;
    }
    assert!(count == N, "the number of rows");
    rows
}

/// Counts the rows of several tables.
pub(crate) const fn count(tables: &[&[Directive]]) -> usize {
    let (mut rows, mut table) = (0, 0);
    while table < tables.len() {
        rows += tables[table].len();
        table += 1;
    }
    rows
}

/// Parses a size, which may have variables.
pub(crate) fn size_template<S: Subject>(
    builder: &mut Builder,
    statement: &Statement,
) -> Result<SizeTemplate<S>, Diagnostic> {
    let text = builder.variables::<S>().template(&statement.args[0])?;
    SizeTemplate::new(text).ok_or_else(|| statement.directive_error("invalid value").at(statement.args[0].span))
}

/// Returns the name in `$name`, where a directive defines a variable.
pub(crate) fn variable_name(word: &Word) -> Result<&[u8], Diagnostic> {
    match word.text.strip_prefix(b"$") {
        Some(name) if !name.is_empty() => Ok(name),
        _ => Err(Diagnostic::emerg(format!("invalid variable name \"{}\"", word.text)).at(word.span)),
    }
}

/// Checks a row of a data block (`map`, `geo`): it has no block of its own.
pub(crate) fn check_row(row: &Statement) -> Result<(), Diagnostic> {
    if let Some(error) = &row.broken {
        return Err((**error).clone());
    }
    match row.block {
        None => Ok(()),
        Some(_) => Err(row.error("unexpected \"{\"")),
    }
}
