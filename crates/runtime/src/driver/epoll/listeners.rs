//! Listening sockets.
//!
//! They are level-triggered: after each batch the kernel reports whether there is more, so no accept has to fail. An
//! event without a waiting task unregisters the socket until the next poll, so a pause never spins. Where loops share a
//! socket, the kernel reports each connection to one of them; a loop that stops listening while connections are pending
//! therefore makes the others look for themselves. (Loops of another process that has the same socket are not reached:
//! the next connection wakes them. So a loop that stops listening for good first accepts all pending connections.)

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use rustix::event::epoll;
use rustix::io::Errno;

use super::{Epoll, LISTENER};
use crate::driver::ListenerDriver;
use crate::driver::listening::{Listening, accept};
use crate::executor::slots::Key;
use crate::socket::{AcceptOptions, SocketAddress};

/// True for a listening socket that is registered with epoll.
pub(super) type Registered = bool;

impl Epoll {
    pub(super) fn handle_listener(&self, key: Key) {
        let mut listeners = self.listeners.borrow_mut();
        let Some(listener) = listeners.get_mut(key) else {
            return;
        };
        let acceptor = listener.handle_event();
        if acceptor.is_none() {
            self.unregister(listener);
        }
        drop(listeners);
        acceptor.into_iter().for_each(Waker::wake);
    }

    fn unregister(&self, listener: &mut Listening<Registered>) {
        if !std::mem::take(&mut listener.registration) {
            return;
        }
        // The socket was added and is open, so this cannot fail.
        let _ = epoll::delete(&self.epoll, &*listener.socket);
        listener.pass_on();
    }

    fn add_listener(&self, key: Key, listener: &Listening<Registered>) -> Result<(), Errno> {
        let mut flags = epoll::EventFlags::IN;
        if listener.options.exclusive {
            flags |= epoll::EventFlags::EXCLUSIVE;
        }
        epoll::add(&self.epoll, &*listener.socket, epoll::EventData::new_u64(key.pack() | LISTENER), flags)
    }
}

impl ListenerDriver for Epoll {
    fn attach_listener(&self, socket: Arc<OwnedFd>, options: AcceptOptions) -> Key {
        self.listeners.borrow_mut().insert(Listening::new(socket, options))
    }

    fn set_accept_options(&self, key: Key, options: AcceptOptions) {
        let mut listeners = self.listeners.borrow_mut();
        let Some(listener) = listeners.get_mut(key) else {
            return;
        };
        let acceptor = if listener.set_options(options) && listener.registration {
            self.unregister(listener);
            listener.acceptor.take()
        } else {
            None
        };
        drop(listeners);
        acceptor.into_iter().for_each(Waker::wake);
    }

    fn detach_listener(&self, key: Key) {
        self.pause_listener(key);
        let listener = self.listeners.borrow_mut().remove(key);
        drop(listener);
    }

    fn pause_listener(&self, key: Key) {
        let mut listeners = self.listeners.borrow_mut();
        let Some(listener) = listeners.get_mut(key) else {
            return;
        };
        self.unregister(listener);
        let acceptor = listener.pause();
        drop(listeners);
        drop(acceptor);
    }

    fn rearm_shared_listeners(&self) {
        // Adding reports pending connections; epoll does not allow to modify exclusive registrations.
        self.listeners.borrow_mut().for_each(|key, listener| {
            if listener.registration && listener.options.exclusive {
                let _ = epoll::delete(&self.epoll, &*listener.socket);
                if self.add_listener(key, listener).is_err() {
                    // No kernel memory: the acceptor tries again and gets the error.
                    listener.registration = false;
                    listener.acceptor.take().into_iter().for_each(Waker::wake);
                }
            }
        });
    }

    fn accept_for_another(&self, address: &SocketAddress, socket: Arc<OwnedFd>) {
        let mut wakers = Vec::new();
        self.listeners
            .borrow_mut()
            .for_each(|_, listener| wakers.extend(listener.accept_for_another(address, &socket)));
        wakers.into_iter().for_each(Waker::wake);
    }

    fn try_accept(&self, key: Key) -> io::Result<Option<(OwnedFd, SocketAddress)>> {
        let mut listeners = self.listeners.borrow_mut();
        let listener = listeners.get_mut(key).expect("an open listener owns its slot");
        accept(&listener.socket)
    }

    fn poll_accept(&self, key: Key, cx: &mut Context<'_>) -> Poll<io::Result<(OwnedFd, SocketAddress)>> {
        let mut listeners = self.listeners.borrow_mut();
        let listener = listeners.get_mut(key).expect("an open listener owns its slot");
        if let Some(accepted) = listener.next(self.turn.get(), accept).transpose() {
            return Poll::Ready(accepted);
        }
        if !listener.registration {
            if let Err(errno) = self.add_listener(key, listener) {
                return Poll::Ready(Err(errno.into()));
            }
            listener.registration = true;
        }
        let displaced = listener.acceptor.park(cx.waker());
        let has_more = listener.has_more();
        drop(listeners);
        if has_more {
            cx.waker().wake_by_ref();
        }
        drop(displaced);
        Poll::Pending
    }
}
