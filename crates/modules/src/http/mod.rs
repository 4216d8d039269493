//! The modules of the http block.

pub mod access;
pub mod addition;
pub mod auth_basic;
pub mod auth_request;
pub mod autoindex;
pub mod charset;
pub mod client_body;
pub mod core;
pub mod empty_gif;
pub mod geo;
pub mod gunzip;
pub mod gzip;
pub mod gzip_static;
pub mod headers;
pub mod index;
pub mod limit_conn;
pub mod limit_req;
mod limits;
pub mod log;
pub mod map;
pub mod mirror;
pub mod not_modified;
pub mod postpone;
pub mod random_index;
pub mod range;
pub mod realip;
pub mod realpath_root;
pub mod rewrite;
pub mod split_clients;
pub mod ssi;
pub mod static_files;
pub mod stub_status;
pub mod sub;
#[cfg(feature = "test-hooks")]
pub mod test_hooks;
pub mod try_files;
pub mod variables;

use gale_config::{Diagnostic, Statement, Word};

/// The name in `$name`, where a directive makes a variable.
fn variable_name(word: &Word) -> Result<&[u8], Diagnostic> {
    match word.text.strip_prefix(b"$") {
        Some(name) if !name.is_empty() => Ok(name),
        _ => Err(Diagnostic::emerg(format!("invalid variable name \"{}\"", word.text)).at(word.span)),
    }
}

/// A row of a block that holds data (`map`, `geo`): no directive, and no block.
fn check_row(row: &Statement) -> Result<(), Diagnostic> {
    if let Some(error) = &row.broken {
        return Err((**error).clone());
    }
    match row.block {
        None => Ok(()),
        Some(_) => Err(row.error("unexpected \"{\"")),
    }
}
