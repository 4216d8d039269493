//! The modules of the http block.

pub mod access;
pub mod addition;
pub mod auth_basic;
pub mod auth_request;
pub mod core;
pub mod gunzip;
pub mod gzip;
pub mod gzip_static;
pub mod headers;
pub mod index;
pub mod limit_conn;
pub mod limit_req;
mod limits;
pub mod log;
pub mod mirror;
pub mod not_modified;
pub mod postpone;
pub mod range;
pub mod realip;
pub mod rewrite;
pub mod ssi;
pub mod static_files;
pub mod sub;
#[cfg(debug_assertions)]
pub mod test_hooks;
pub mod try_files;
pub mod variables;
