//! Listening sockets in a simulated world: the first loop that asks accepts a connection.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use rustix::io::Errno;

use super::{Listening, Simulated};
use crate::driver::ListenerDriver;
use crate::executor::parked::Parked;
use crate::executor::slots::Key;
use crate::simulation::{Event, Named, storm};
use crate::socket::{AcceptOptions, SocketAddress};

impl ListenerDriver for Simulated {
    fn listen(&self, address: &SocketAddress, backlog: i32) -> io::Result<OwnedFd> {
        self.world.listen(address, usize::try_from(backlog).unwrap_or(0))
    }

    fn listener_address(&self, socket: &OwnedFd) -> io::Result<SocketAddress> {
        match self.world.named(socket) {
            Named::Listener(listener) => Ok(self.world.network.borrow_mut().listener_address(listener)),
            Named::End(_) => Err(Errno::INVAL.into()),
        }
    }

    fn attach_listener(&self, socket: Arc<OwnedFd>, _options: AcceptOptions) -> Key {
        let Named::Listener(listener) = self.world.named(&socket) else { panic!("this socket does not listen") };
        let key = self.listeners.borrow_mut().insert(Listening {
            _socket: socket,
            listener,
            will_be_told: false,
            acceptor: Parked::new(),
        });
        self.world.network.borrow_mut().attach_listener(listener, key);
        key
    }

    /// The simulation chooses batches at random.
    fn set_accept_options(&self, _key: Key, _options: AcceptOptions) {}

    fn detach_listener(&self, key: Key) {
        if let Some(listening) = self.listeners.borrow_mut().remove(key) {
            self.world.network.borrow_mut().detach_listener(listening.listener, key);
        }
    }

    fn pause_listener(&self, key: Key) {
        let acceptor = self.listeners.borrow_mut().get_mut(key).and_then(|listening| listening.acceptor.take());
        drop(acceptor);
    }

    fn rearm_shared_listeners(&self) {
        let mut wakers = Vec::new();
        self.listeners.borrow_mut().for_each(|_, listening| wakers.extend(listening.acceptor.take()));
        wakers.into_iter().for_each(Waker::wake);
    }

    fn try_accept(&self, key: Key) -> io::Result<Option<(OwnedFd, SocketAddress)>> {
        let listener = self.listeners.borrow_mut().get_mut(key).expect("an open listener owns its slot").listener;
        self.accept(listener)
    }

    fn poll_accept(&self, key: Key, cx: &mut Context<'_>) -> Poll<io::Result<(OwnedFd, SocketAddress)>> {
        let listener = self.listeners.borrow_mut().get_mut(key).expect("an open listener owns its slot").listener;
        let fate = &self.world.fate;
        let hesitates =
            self.world.network.borrow_mut().has_queued(listener) && fate.strikes(|faults| faults.would_block);
        if !hesitates && let Some(accepted) = self.accept(listener)? {
            return Poll::Ready(Ok(accepted));
        }
        let mut listeners = self.listeners.borrow_mut();
        let listening = listeners.get_mut(key).expect("an open listener owns its slot");
        let is_told = hesitates || fate.strikes(|faults| faults.spurious_wakes);
        if is_told && !std::mem::replace(&mut listening.will_be_told, true) {
            fate.plan(storm(fate), Event::ListenerReady { slot: key });
        }
        let displaced = listening.acceptor.park(cx.waker());
        drop(listeners);
        drop(displaced);
        Poll::Pending
    }
}
