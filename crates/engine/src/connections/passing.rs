//! Connections that a protocol gives to another address of this loop, as if they had come there.

use std::rc::{Rc, Weak};

use gale_process::ListenAddress;
use gale_runtime::SocketAddress;

use crate::configuration::protocol::ProtocolWorker;
use crate::listen::covers;
use crate::transport::Transport;
use crate::worker::Worker;

/// Who serves the connections of each address of a loop: a note of its worker.
#[derive(Default)]
struct Receivers {
    receivers: Vec<Receiver>,
    /// How often the connection was passed that is being given to a protocol.
    passes: u32,
}

#[derive(Clone)]
struct Receiver {
    address: Rc<ListenAddress>,
    protocol: Weak<dyn ProtocolWorker>,
}

/// From now on these protocols serve the connections of these addresses.
pub(crate) fn set_receivers<'p>(
    worker: &Worker,
    receivers: impl Iterator<Item = (ListenAddress, &'p Rc<dyn ProtocolWorker>)>,
) {
    let receiver = |(address, protocol): (ListenAddress, &Rc<dyn ProtocolWorker>)| Receiver {
        address: Rc::new(address),
        protocol: Rc::downgrade(protocol),
    };
    let receivers = receivers.map(receiver).collect();
    worker.with_note(|all: &mut Receivers| all.receivers = receivers);
}

/// Gives a connection to whoever serves those of an address; `passes` is how often that has happened to it, with this
/// time. The result is the connection if nobody does.
pub fn pass_connection(
    worker: &Worker,
    address: &ListenAddress,
    transport: Transport,
    remote: SocketAddress,
    passes: u32,
) -> Option<Transport> {
    let found = worker.with_note(|all: &mut Receivers| {
        let exact = all.receivers.iter().find(|receiver| *receiver.address == *address);
        exact.or_else(|| all.receivers.iter().find(|receiver| covers(&receiver.address, address))).cloned()
    });
    let Some((receiver, protocol)) = found.and_then(|receiver| Some((receiver.address, receiver.protocol.upgrade()?)))
    else {
        return Some(transport);
    };
    worker.with_note(|all: &mut Receivers| all.passes = passes);
    protocol.serve(transport, remote, &receiver, None);
    worker.with_note(|all: &mut Receivers| all.passes = 0);
    None
}

/// How often the connection was passed that a protocol is given now.
pub fn passes_so_far(worker: &Worker) -> u32 {
    worker.with_note(|all: &mut Receivers| all.passes)
}
