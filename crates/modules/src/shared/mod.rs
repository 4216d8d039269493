//! What is the same for requests and for sessions, written once: a directive's syntax, and what it does to whatever has
//! variables, a connection and notes ([`Subject`](gale_engine::variables::subject::Subject)).
//!
//! Nothing here names a protocol. The module of the same name below `http` is the face: the table of directives with
//! their places, the phases, and what http alone has (a status, a field with addresses).

pub mod access;
pub(crate) mod append;
pub(crate) mod base64;
pub mod geo;
pub mod limit_conn;
pub(crate) mod limits;
pub mod log_format;
pub mod map;
pub mod realip;
pub mod split_clients;
pub mod upstream;

use gale_config::{Diagnostic, Statement, Word};

/// The name in `$name`, where a directive makes a variable.
pub(crate) fn variable_name(word: &Word) -> Result<&[u8], Diagnostic> {
    match word.text.strip_prefix(b"$") {
        Some(name) if !name.is_empty() => Ok(name),
        _ => Err(Diagnostic::emerg(format!("invalid variable name \"{}\"", word.text)).at(word.span)),
    }
}

/// A row of a block that holds data (`map`, `geo`): no directive, and no block.
pub(crate) fn check_row(row: &Statement) -> Result<(), Diagnostic> {
    if let Some(error) = &row.broken {
        return Err((**error).clone());
    }
    match row.block {
        None => Ok(()),
        Some(_) => Err(row.error("unexpected \"{\"")),
    }
}
