//! Behaviour of HTTP/2.

mod connection;
mod peer;
mod rules;
mod split;
