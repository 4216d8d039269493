//! Builds the configuration of an `http` block. The result is in `request/configuration/`, because it holds handlers,
//! filters and texts with variables, which are called with requests.

pub mod builder;
pub mod media_types;
mod subject;
mod thread_pool;

pub use crate::request::configuration::*;
