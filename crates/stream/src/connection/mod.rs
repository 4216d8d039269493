//! Sessions of an event loop, over TCP and UDP, and their way through the phases.

mod advance;
mod begin;
mod datagrams;
mod handover;
mod listed;
mod tls;
pub mod worker;
