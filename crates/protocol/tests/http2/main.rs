//! HTTP/2 by behaviour.

mod connection;
mod peer;
mod rules;
mod split;
