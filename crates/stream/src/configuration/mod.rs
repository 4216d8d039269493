//! Builds the configuration that sessions use from a `stream` block. The types are in `session/configuration.rs`,
//! because they hold handlers and texts with variables, which take a session.

pub mod builder;
mod subject;

pub use crate::session::configuration::*;
