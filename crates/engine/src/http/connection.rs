//! What is known of a client's connection, whichever protocol it speaks.

use std::cell::{Cell, OnceCell};
use std::rc::Rc;

use gale_runtime::{Moment, SocketAddress};

use crate::process::ListenAddress;

/// A connection of a client.
pub struct ConnectionInfo {
    /// Its number in the process, counted from 1: `$connection`.
    pub number: u64,
    /// The client's address.
    pub remote: SocketAddress,
    /// The address of the listening socket that it came in by.
    pub listening: Rc<ListenAddress>,
    /// When it was accepted.
    pub accepted: Moment,
    /// Requests so far, the current one included: `$connection_requests`.
    pub requests: Cell<u64>,
    /// Our address, once somebody asked.
    pub(crate) local: OnceCell<Box<SocketAddress>>,
    remote_text: OnceCell<Box<str>>,
}

impl ConnectionInfo {
    /// A connection that was just accepted.
    pub fn new(number: u64, remote: SocketAddress, listening: Rc<ListenAddress>, accepted: Moment) -> ConnectionInfo {
        ConnectionInfo {
            number,
            remote,
            listening,
            accepted,
            requests: Cell::new(0),
            local: OnceCell::new(),
            remote_text: OnceCell::new(),
        }
    }

    /// The client's address without its port, as `$remote_addr` has it.
    pub fn remote_text(&self) -> &str {
        self.remote_text.get_or_init(|| match &self.remote {
            SocketAddress::Inet(address) => address.ip().to_string().into(),
            SocketAddress::Unix(_) => "unix:".into(),
        })
    }
}
