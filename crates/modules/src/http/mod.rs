//! The modules of the http block.

pub mod autoindex;
pub mod client_body;
pub mod core;
pub mod empty_gif;
pub mod headers;
pub mod index;
pub mod log;
pub mod not_modified;
pub mod random_index;
pub mod range;
pub mod realpath_root;
pub mod rewrite;
pub mod static_files;
pub mod stub_status;
#[cfg(debug_assertions)]
pub mod test_hooks;
pub mod try_files;
pub mod variables;
