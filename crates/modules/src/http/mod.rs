//! The modules of the http block.

pub mod access;
pub mod auth_basic;
pub mod core;
pub mod headers;
pub mod index;
pub mod limit_conn;
pub mod limit_req;
mod limits;
pub mod log;
pub mod not_modified;
pub mod range;
pub mod realip;
pub mod rewrite;
pub mod static_files;
#[cfg(debug_assertions)]
pub mod test_hooks;
pub mod try_files;
pub mod variables;
