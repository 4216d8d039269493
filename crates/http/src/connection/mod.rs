//! Connections that speak HTTP, by version, and those of one event loop together.

pub mod http1;
mod output;
pub mod worker;
