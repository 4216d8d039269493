//! Connections that speak HTTP, by version.

pub mod http1;
