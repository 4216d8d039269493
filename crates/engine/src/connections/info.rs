//! Properties of a client's connection, independent of its protocol.

use std::any::Any;
use std::cell::{Cell, OnceCell, RefCell};
use std::ops::Range;
use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use gale_process::ListenAddress;
use gale_protocol::proxy_protocol::{self, ProxyHeader, ProxyOffence};
use gale_runtime::{Buffer, Moment, SocketAddress};
use gale_worker::Worker;
use gale_worker::notes::Notes;

use super::passing::{Carried, take_carried};

/// A client's connection.
pub struct ConnectionInfo {
    /// Number, unique in the process, from 1 on: `$connection`. Each loop takes several at a time.
    pub number: u64,
    /// The client's address.
    pub remote: SocketAddress,
    /// Address of the listening socket that accepted it.
    pub listening: Rc<ListenAddress>,
    /// Time when it was accepted.
    pub accepted: Moment,
    /// Requests so far, including the current one: `$connection_requests`.
    pub requests: Cell<u64>,
    asked: OnceCell<Box<Asked>>,
}

/// Values computed on demand; separate because most connections never need them.
#[derive(Default)]
struct Asked {
    local: OnceCell<SocketAddress>,
    remote_text: OnceCell<Box<str>>,
    proxied: OnceCell<Box<ProxyHeader>>,
    /// State carried along from where the connection was passed on.
    carried: OnceCell<Carried>,
    /// Notes that are dropped with the connection, by type.
    notes: RefCell<Notes>,
}

impl ConnectionInfo {
    /// A connection that was just accepted.
    pub fn new(number: u64, remote: SocketAddress, listening: Rc<ListenAddress>, accepted: Moment) -> ConnectionInfo {
        ConnectionInfo { number, remote, listening, accepted, requests: Cell::new(0), asked: OnceCell::new() }
    }

    /// A connection accepted at this moment, with a new number.
    pub fn accepted(remote: SocketAddress, listening: Rc<ListenAddress>) -> ConnectionInfo {
        ConnectionInfo::new(next_number(), remote, listening, gale_runtime::now())
    }

    /// A connection that reached this loop at this moment, from the kernel or passed on by another address.
    pub fn arrived(worker: &Worker, remote: SocketAddress, listening: Rc<ListenAddress>) -> ConnectionInfo {
        let mut info = ConnectionInfo::accepted(remote, listening);
        if let Some((carried, local)) = take_carried(worker) {
            if let Some(note) = &carried.resumed {
                info.requests.set(note.requests);
                let age = u64::try_from(note.age.as_nanos()).unwrap_or(u64::MAX);
                info.accepted = Moment::from_nanos(info.accepted.as_nanos().saturating_sub(age));
            }
            let asked = info.asked();
            // They are empty, because the connection is new here.
            let _ = asked.carried.set(carried);
            local.into_iter().for_each(|local| _ = asked.local.set(local));
        }
        info
    }

    /// Number of times that it was passed to another address.
    pub fn passes(&self) -> u32 {
        self.asked.get().and_then(|asked| asked.carried.get()).map_or(0, |carried| carried.passes)
    }

    /// Longest idle time, if it came from another process after a request.
    pub fn resumed_idle_max(&self) -> Option<Duration> {
        let note = self.asked.get()?.carried.get()?.resumed.as_ref()?;
        (note.requests > 0).then_some(note.idle_max)
    }

    /// Takes the objects carried along that must live as long as the connection.
    pub fn take_held(&mut self) -> Vec<Box<dyn Any>> {
        let carried = self.asked.get_mut().and_then(|asked| asked.carried.get_mut());
        carried.map(|carried| std::mem::take(&mut carried.held)).unwrap_or_default()
    }

    /// A copy for code that may outlive the connection.
    pub fn copy(&self) -> ConnectionInfo {
        let ConnectionInfo { number, remote, listening, accepted, requests, asked: _ } = self;
        let copy = ConnectionInfo::new(*number, remote.clone(), Rc::clone(listening), *accepted);
        copy.requests.set(requests.get());
        if let Some(header) = self.proxied() {
            copy.set_proxied(Box::new(header.clone()));
        }
        copy
    }

    /// PROXY protocol header of the connection, if it had one.
    pub fn proxied(&self) -> Option<&ProxyHeader> {
        let asked = self.asked.get()?;
        asked.proxied.get().or_else(|| asked.carried.get()?.proxied.as_ref()).map(|header| &**header)
    }

    /// Takes the PROXY protocol header off the received bytes and stores it. Returns `false` while it is incomplete.
    ///
    /// # Errors
    /// The bytes are no such header; messages say `{offence} while reading PROXY protocol`.
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

    fn set_proxied(&self, header: Box<ProxyHeader>) {
        // Set once.
        let _ = self.asked().proxied.set(header);
    }

    /// The client's address without its port: `$remote_addr`.
    pub fn remote_text(&self) -> &str {
        self.asked().remote_text.get_or_init(|| address_text(&self.remote))
    }

    /// The local address; `find` looks it up at the first call.
    pub fn local(&self, find: impl FnOnce() -> Option<SocketAddress>) -> Option<&SocketAddress> {
        let local = &self.asked().local;
        if local.get().is_none() {
            let _ = local.set(find()?);
        }
        local.get()
    }

    /// Calls `f` with the connection's note of this type, which is created empty and dropped with the connection. Not
    /// reentrant.
    pub fn with_note<T: Default + 'static, R>(&self, f: impl FnOnce(&mut T) -> R) -> R {
        f(self.asked().notes.borrow_mut().or_default())
    }

    /// The same if the note exists.
    pub fn with_note_if_any<T: 'static, R>(&self, f: impl FnOnce(&mut T) -> R) -> Option<R> {
        self.asked.get()?.notes.borrow_mut().get_mut().map(f)
    }

    /// `true` if the connection has notes.
    pub fn has_notes(&self) -> bool {
        self.asked.get().is_some_and(|asked| !asked.notes.borrow().is_empty())
    }

    fn asked(&self) -> &Asked {
        self.asked.get_or_init(Box::default)
    }
}

/// Numbers that a loop takes at once.
const NUMBERS_AT_ONCE: u64 = 256;

/// The next connection number of this loop, unique in the process. Each loop takes ranges of numbers, so that loops do
/// not write to one cache line for every connection.
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
