//! The place of a connection in the configuration: the address that it came by, and the servers behind that.

use std::num::NonZeroU32;

use gale_engine::configuration::ServerId;
use gale_process::ListenAddress;
use gale_runtime::SocketAddress;

use super::beginning::Beginning;
use super::client::Client;
use crate::request::configuration::settings::CoreSettings;
use crate::request::configuration::{Address, HttpConfiguration};

/// An address of the configuration: its index and one, so that none takes no room.
#[derive(Clone, Copy)]
pub(super) struct AddressIndex(NonZeroU32);

impl AddressIndex {
    pub(super) fn new(index: usize) -> AddressIndex {
        let number = u32::try_from(index + 1).ok().and_then(NonZeroU32::new);
        AddressIndex(number.expect("fewer addresses than 2^32"))
    }

    pub(super) fn index(self) -> usize {
        self.0.get() as usize - 1
    }

    pub(super) fn default_server(self, http: &HttpConfiguration) -> ServerId {
        http.addresses[self.index()].servers.default
    }

    /// The settings before a server has been chosen: those of the default server.
    pub(super) fn core(self, http: &HttpConfiguration) -> &CoreSettings {
        &http.scope(http.server(self.default_server(http)).scope).core
    }
}

impl Client {
    /// The servers behind the connection's address, as the configuration now has it;
    /// `None` when it is not there any more.
    pub(super) fn place(&self, http: &HttpConfiguration) -> Option<AddressIndex> {
        if self.known_generation.get() == http.generation {
            return self.known_place.get();
        }
        // A connection that began otherwise than the address now wants it has no place there any more.
        let is_as_wanted = |place: &AddressIndex| {
            let Address { listening, .. } = &http.addresses[place.index()];
            let wanted = Beginning { proxy_protocol: listening.proxy_protocol, ssl: listening.ssl };
            self.began.get().is_none_or(|began| began == wanted)
        };
        let place = self.find_place(http).filter(is_as_wanted);
        self.known_generation.set(http.generation);
        self.known_place.set(place);
        place
    }

    fn find_place(&self, http: &HttpConfiguration) -> Option<AddressIndex> {
        let listening = http.addresses.iter().position(|address| address.listening.address == *self.info.listening);
        let shares_socket = listening.is_none_or(|index| http.addresses[index].listening.shares_socket);
        if !shares_socket {
            return listening.map(AddressIndex::new);
        }
        let local = match self.local_address()? {
            SocketAddress::Inet(address) => ListenAddress::Inet(*address),
            SocketAddress::Unix(_) => return listening.map(AddressIndex::new),
        };
        http.addresses
            .iter()
            .position(|address| address.listening.address == local)
            .or(listening)
            .map(AddressIndex::new)
    }
}
