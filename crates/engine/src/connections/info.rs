//! What is known of a client's connection, whichever protocol it speaks.

use std::any::Any;
use std::cell::{Cell, OnceCell, RefCell};
use std::ops::Range;
use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use gale_protocol::proxy_protocol::{self, ProxyHeader, ProxyOffence};
use gale_runtime::{Buffer, Moment, SocketAddress};

use gale_process::ListenAddress;

use super::passing::{Carried, take_carried};
use crate::notes::Notes;
use crate::worker::Worker;

/// A connection of a client.
pub struct ConnectionInfo {
    /// Its number in the process, from 1 on: `$connection`. Each loop takes several at a time.
    pub number: u64,
    /// The client's address.
    pub remote: SocketAddress,
    /// The address of the listening socket that it came in by.
    pub listening: Rc<ListenAddress>,
    /// When it was accepted.
    pub accepted: Moment,
    /// Requests so far, the current one included: `$connection_requests`.
    pub requests: Cell<u64>,
    asked: OnceCell<Box<Asked>>,
}

/// What is known once somebody has asked; apart, because most connections are never asked.
#[derive(Default)]
struct Asked {
    local: OnceCell<SocketAddress>,
    remote_text: OnceCell<Box<str>>,
    proxied: OnceCell<Box<ProxyHeader>>,
    /// What it has brought with it from where it was passed on.
    carried: OnceCell<Carried>,
    /// What is to end with it, by type.
    notes: RefCell<Notes>,
}

impl ConnectionInfo {
    /// A connection that was just accepted.
    pub fn new(number: u64, remote: SocketAddress, listening: Rc<ListenAddress>, accepted: Moment) -> ConnectionInfo {
        ConnectionInfo { number, remote, listening, accepted, requests: Cell::new(0), asked: OnceCell::new() }
    }

    /// A connection that was accepted at this moment, with a number of its own in the process.
    pub fn accepted(remote: SocketAddress, listening: Rc<ListenAddress>) -> ConnectionInfo {
        ConnectionInfo::new(next_number(), remote, listening, gale_runtime::now())
    }

    /// A connection that this loop was given at this moment, by the kernel or by another address that has passed it on.
    pub fn arrived(worker: &Worker, remote: SocketAddress, listening: Rc<ListenAddress>) -> ConnectionInfo {
        let mut info = ConnectionInfo::accepted(remote, listening);
        if let Some((carried, local)) = take_carried(worker) {
            if let Some(note) = &carried.resumed {
                info.requests.set(note.requests);
                let age = u64::try_from(note.age.as_nanos()).unwrap_or(u64::MAX);
                info.accepted = Moment::from_nanos(info.accepted.as_nanos().saturating_sub(age));
            }
            let asked = info.asked();
            // They are empty: the connection is new here.
            let _ = asked.carried.set(carried);
            local.into_iter().for_each(|local| _ = asked.local.set(local));
        }
        info
    }

    /// How often it was passed to another address.
    pub fn passes(&self) -> u32 {
        self.asked.get().and_then(|asked| asked.carried.get()).map_or(0, |carried| carried.passes)
    }

    /// How long it may be idle, if it has come from another process after a request.
    pub fn resumed_idle_max(&self) -> Option<Duration> {
        let note = self.asked.get()?.carried.get()?.resumed.as_ref()?;
        (note.requests > 0).then_some(note.idle_max)
    }

    /// What it has brought with it to hold until it ends.
    pub fn take_held(&mut self) -> Vec<Box<dyn Any>> {
        let carried = self.asked.get_mut().and_then(|asked| asked.carried.get_mut());
        carried.map(|carried| std::mem::take(&mut carried.held)).unwrap_or_default()
    }

    /// The same connection, for what may outlive it.
    pub fn copy(&self) -> ConnectionInfo {
        let ConnectionInfo { number, remote, listening, accepted, requests, asked: _ } = self;
        let copy = ConnectionInfo::new(*number, remote.clone(), Rc::clone(listening), *accepted);
        copy.requests.set(requests.get());
        if let Some(header) = self.proxied() {
            copy.set_proxied(Box::new(header.clone()));
        }
        copy
    }

    /// What a proxy told of the connection by the PROXY protocol, if it told anything.
    pub fn proxied(&self) -> Option<&ProxyHeader> {
        let asked = self.asked.get()?;
        asked.proxied.get().or_else(|| asked.carried.get()?.proxied.as_ref()).map(|header| &**header)
    }

    /// Takes the header of the PROXY protocol off the beginning of what has come, and keeps what it tells. False while
    /// it is not whole.
    ///
    /// # Errors
    /// There is something else, which messages tell as `{offence} while reading PROXY protocol`.
    pub fn take_proxy_header(&self, input: &mut Buffer) -> Result<bool, ProxyOffence> {
        match proxy_protocol::parse(input.readable())? {
            proxy_protocol::Status::NeedMore => Ok(false),
            proxy_protocol::Status::Complete { consumed, header } => {
                input.consume(consumed);
                header.into_iter().for_each(|header| self.set_proxied(header));
                Ok(true)
            }
        }
    }

    /// A proxy has told this.
    fn set_proxied(&self, header: Box<ProxyHeader>) {
        // It is told once.
        let _ = self.asked().proxied.set(header);
    }

    /// The client's address without its port, as `$remote_addr` has it.
    pub fn remote_text(&self) -> &str {
        self.asked().remote_text.get_or_init(|| address_text(&self.remote))
    }

    /// Our address, which `find` looks up when it is asked for the first time.
    pub fn local(&self, find: impl FnOnce() -> Option<SocketAddress>) -> Option<&SocketAddress> {
        let local = &self.asked().local;
        if local.get().is_none() {
            let _ = local.set(find()?);
        }
        local.get()
    }

    /// Does something with what is noted of the connection, which ends with it; an empty note at first. One at a time.
    pub fn with_note<T: Default + 'static, R>(&self, f: impl FnOnce(&mut T) -> R) -> R {
        f(self.asked().notes.borrow_mut().or_default())
    }

    /// The same if there is such a note.
    pub fn with_note_if_any<T: 'static, R>(&self, f: impl FnOnce(&mut T) -> R) -> Option<R> {
        self.asked.get()?.notes.borrow_mut().get_mut().map(f)
    }

    /// Whether something may end with it.
    pub fn has_notes(&self) -> bool {
        self.asked.get().is_some_and(|asked| !asked.notes.borrow().is_empty())
    }

    fn asked(&self) -> &Asked {
        self.asked.get_or_init(Box::default)
    }
}

/// How many numbers a loop takes at once.
const NUMBERS_AT_ONCE: u64 = 256;

/// The next number of this loop, which no other connection of the process has. Each loop numbers its connections in
/// order and takes numbers for many at once, so that loops do not write to one cache line for every connection.
fn next_number() -> u64 {
    static TAKEN: AtomicU64 = AtomicU64::new(1);
    thread_local! {
        static OWN: Cell<Range<u64>> = const { Cell::new(0..0) };
    }
    OWN.with(|own| {
        let mut numbers = own.take();
        let number = numbers.next().unwrap_or_else(|| {
            let first = TAKEN.fetch_add(NUMBERS_AT_ONCE, Ordering::Relaxed);
            numbers = first + 1..first + NUMBERS_AT_ONCE;
            first
        });
        own.set(numbers);
        number
    })
}

/// An address without its port.
pub fn address_text(address: &SocketAddress) -> Box<str> {
    match address {
        SocketAddress::Inet(address) => address.ip().to_string().into(),
        SocketAddress::Unix(_) => "unix:".into(),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use std::thread;

    use super::*;

    #[test]
    fn connections_of_all_loops_have_different_numbers() {
        let count = 3 * NUMBERS_AT_ONCE as usize;
        let threads = [(); 4].map(|()| thread::spawn(move || (0..count).map(|_| next_number()).collect::<Vec<_>>()));
        let numbers = threads.map(|thread| thread.join().unwrap());
        assert!(numbers.iter().all(|own| own.is_sorted()), "in order on each");
        let all: HashSet<u64> = numbers.iter().flatten().copied().collect();
        assert_eq!(all.len(), 4 * count);
        assert!(!all.contains(&0));
    }
}
