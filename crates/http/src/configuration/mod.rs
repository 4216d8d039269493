//! From the text of an `http` block to what requests use, which is in `request/configuration/` because it holds what is
//! called with requests: handlers, filters, texts with variables.

pub mod builder;
pub mod media_types;
mod subject;
mod thread_pool;

pub use crate::request::configuration::*;
