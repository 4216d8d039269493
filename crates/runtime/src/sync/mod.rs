//! Communication between tasks: one value ([`oneshot`]) or a bounded queue ([`mpsc`]) from any thread, and signals
//! between tasks of one loop ([`Notify`]).
//!
//! A lock is held for a few instructions and never while foreign code runs: wakers are called, and values dropped, when
//! it is free again. Wakers of tasks reach their loop through its inbox.

pub mod mpsc;
mod notify;
pub mod oneshot;
pub mod waiters;

pub use notify::{Notified, Notify};

use std::fmt;

/// The other end was dropped.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Closed;

impl fmt::Display for Closed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the other end has gone")
    }
}

impl std::error::Error for Closed {}
