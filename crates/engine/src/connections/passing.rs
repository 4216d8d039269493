//! Passing connections from one protocol to another address of the same loop, as if they had been accepted there.

use std::any::Any;
use std::fmt;
use std::rc::{Rc, Weak};

use gale_process::{IdleNote, ListenAddress};
use gale_protocol::proxy_protocol::ProxyHeader;
use gale_runtime::SocketAddress;
use gale_tls::Transport;
use gale_worker::Worker;

use crate::configuration::protocol::ProtocolWorker;
use crate::listen::covers;

/// Protocols that serve the addresses of a loop: a note of its worker.
#[derive(Default)]
struct Receivers {
    receivers: Vec<Receiver>,
    /// State of the connection that is being passed.
    carried: Option<(Carried, Option<SocketAddress>)>,
}

/// State that a connection carries along when it is passed.
#[derive(Default)]
pub struct Carried {
    /// Times that it was passed, including this one.
    pub passes: u32,
    /// PROXY protocol header.
    pub proxied: Option<Box<ProxyHeader>>,
    /// Objects that must live as long as the connection, such as the places of `limit_conn`.
    pub held: Vec<Box<dyn Any>>,
    /// State from another process.
    pub resumed: Option<Box<IdleNote>>,
}

impl fmt::Debug for Carried {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Carried").field("passes", &self.passes).finish_non_exhaustive()
    }
}

#[derive(Clone)]
struct Receiver {
    address: Rc<ListenAddress>,
    protocol: Weak<dyn ProtocolWorker>,
}

/// Sets the protocols that serve these addresses.
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

/// Continues an idle connection of another process, if its address is still served by a protocol that can resume it.
pub(super) fn resume_connection(worker: &Worker, transport: Transport, remote: SocketAddress, note: IdleNote) {
    let Some((receiver, protocol)) = receiver_of(worker, &note.listening) else { return };
    if protocol.resumes() {
        let carried = Carried { resumed: Some(Box::new(note)), ..Carried::default() };
        give(worker, &receiver, protocol, transport, remote, (carried, None));
    }
}

/// Passes a connection with its state to the protocol of an address. Both are returned if there is none.
pub fn pass_connection(
    worker: &Worker,
    address: &ListenAddress,
    transport: Transport,
    remote: SocketAddress,
    carried: Carried,
) -> Result<(), (Transport, Carried)> {
    let Some((receiver, protocol)) = receiver_of(worker, address) else { return Err((transport, carried)) };
    // As if the client had connected to that address. For a wildcard the connection's own local address is more exact.
    let local = match address {
        ListenAddress::Inet(inet) if inet.ip().is_unspecified() => None,
        ListenAddress::Inet(inet) => Some(SocketAddress::Inet(*inet)),
        ListenAddress::Unix(path) => Some(SocketAddress::Unix(Some(path.as_path().into()))),
    };
    give(worker, &receiver, protocol, transport, remote, (carried, local));
    Ok(())
}

fn receiver_of(worker: &Worker, address: &ListenAddress) -> Option<(Rc<ListenAddress>, Rc<dyn ProtocolWorker>)> {
    let found = worker.with_note(|all: &mut Receivers| {
        let exact = all.receivers.iter().find(|receiver| *receiver.address == *address);
        exact.or_else(|| all.receivers.iter().find(|receiver| covers(&receiver.address, address))).cloned()
    });
    found.and_then(|receiver| Some((receiver.address, receiver.protocol.upgrade()?)))
}

fn give(
    worker: &Worker,
    address: &Rc<ListenAddress>,
    protocol: Rc<dyn ProtocolWorker>,
    transport: Transport,
    remote: SocketAddress,
    carried: (Carried, Option<SocketAddress>),
) {
    worker.with_note(|all: &mut Receivers| all.carried = Some(carried));
    protocol.serve(transport, remote, address, None);
    // A protocol without support for carried state leaves it here.
    let unused = worker.with_note(|all: &mut Receivers| all.carried.take());
    drop(unused);
}

/// Takes the state of the connection being passed, and its local address.
pub(super) fn take_carried(worker: &Worker) -> Option<(Carried, Option<SocketAddress>)> {
    worker.with_note(|all: &mut Receivers| all.carried.take())
}
