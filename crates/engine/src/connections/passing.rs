//! Connections that a protocol gives to another address of this loop, as if they had come there.

use std::any::Any;
use std::fmt;
use std::rc::{Rc, Weak};

use gale_process::{IdleNote, ListenAddress};
use gale_protocol::proxy_protocol::ProxyHeader;
use gale_runtime::SocketAddress;

use crate::configuration::protocol::ProtocolWorker;
use crate::listen::covers;
use crate::transport::Transport;
use crate::worker::Worker;

/// Who serves the connections of each address of a loop: a note of its worker.
#[derive(Default)]
struct Receivers {
    receivers: Vec<Receiver>,
    /// Of the connection that is being given to a protocol.
    carried: Option<(Carried, Option<SocketAddress>)>,
}

/// What a connection takes along when it is passed.
#[derive(Default)]
pub struct Carried {
    /// How often that has happened to it, with this time.
    pub passes: u32,
    /// What a proxy has told of it.
    pub proxied: Option<Box<ProxyHeader>>,
    /// What it holds until it ends, such as the places of `limit_conn`.
    pub held: Vec<Box<dyn Any>>,
    /// What it has brought from another process.
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

/// Goes on with an idle connection of another process, if its address is still served, by a protocol that can.
pub(super) fn resume_connection(worker: &Worker, transport: Transport, remote: SocketAddress, note: IdleNote) {
    let Some((receiver, protocol)) = receiver_of(worker, &note.listening) else { return };
    if protocol.resumes() {
        let carried = Carried { resumed: Some(Box::new(note)), ..Carried::default() };
        give(worker, &receiver, protocol, transport, remote, (carried, None));
    }
}

/// Gives a connection to whoever serves those of an address, with what it takes along. If nobody does, both come back.
pub fn pass_connection(
    worker: &Worker,
    address: &ListenAddress,
    transport: Transport,
    remote: SocketAddress,
    carried: Carried,
) -> Result<(), (Transport, Carried)> {
    let Some((receiver, protocol)) = receiver_of(worker, address) else { return Err((transport, carried)) };
    // As if the client had connected to that address. Of a wildcard the connection's own says more.
    let local = match address {
        ListenAddress::Inet(inet) if inet.ip().is_unspecified() => None,
        ListenAddress::Inet(inet) => Some(SocketAddress::Inet(*inet)),
        ListenAddress::Unix(path) => Some(SocketAddress::Unix(Some(path.as_path().into()))),
    };
    give(worker, &receiver, protocol, transport, remote, (carried, local));
    Ok(())
}

/// Who serves the connections of an address.
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
    // Whoever has no place for such a connection has not asked.
    let unused = worker.with_note(|all: &mut Receivers| all.carried.take());
    drop(unused);
}

/// What the connection that a protocol is given now takes along, and our address as it is to see it.
pub(super) fn take_carried(worker: &Worker) -> Option<(Carried, Option<SocketAddress>)> {
    worker.with_note(|all: &mut Receivers| all.carried.take())
}
