//! From the text of a `stream` block to what sessions use, which is in `session/configuration.rs` because it holds what
//! is called with sessions: handlers, texts with variables.

pub mod builder;
mod subject;

pub use crate::session::configuration::*;
