//! The epoll driver: try first, wait after EAGAIN; one edge-triggered registration per connection, for its life
//! (`connection.rs`). Listening sockets are level-triggered (`listeners.rs`).

mod connection;
mod datagrams;
mod listeners;
mod streams;
#[cfg(test)]
mod tests;

use std::cell::{Cell, RefCell};
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::event::{Timespec, epoll};
use rustix::io::Errno;

use self::connection::Connection;
use self::listeners::Registered;
use super::listening::Listening;
use super::{Driver, FileDriver};
use crate::executor::slots::{Key, Slots};

const INBOX: u64 = u64::MAX;

pub(crate) struct Epoll {
    epoll: OwnedFd,
    connections: RefCell<Slots<Connection>>,
    listeners: RefCell<Slots<Listening<Registered>>>,
    events: RefCell<Vec<epoll::Event>>,
    turn: Cell<u32>,
    /// The last call returned as many events as fit its list.
    was_full: Cell<bool>,
}

/// Marks keys of listeners in epoll's data; generations leave this bit free.
const LISTENER: u64 = 1 << 31;
const _: () = assert!(crate::executor::slots::GENERATION_BITS < 31);

impl Epoll {
    pub fn new(events_max: usize, inbox: BorrowedFd<'_>) -> io::Result<Self> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let flags = epoll::EventFlags::IN | epoll::EventFlags::ET;
        epoll::add(&epoll, inbox, epoll::EventData::new_u64(INBOX), flags)?;
        Ok(Epoll {
            epoll,
            connections: RefCell::new(Slots::new()),
            listeners: RefCell::new(Slots::new()),
            events: RefCell::new(Vec::with_capacity(events_max)),
            turn: Cell::new(0),
            was_full: Cell::new(false),
        })
    }
}

impl FileDriver for Epoll {}

impl Driver for Epoll {
    fn name(&self) -> &'static str {
        "epoll"
    }

    fn has_events(&self) -> bool {
        self.was_full.get()
    }

    fn wait(&self, timeout: Option<Duration>) -> io::Result<usize> {
        let timeout = timeout.map(|timeout| Timespec {
            tv_sec: i64::try_from(timeout.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: timeout.subsec_nanos().into(),
        });
        // Borrowed while wakers run: only this function uses it, and no waker calls it.
        let mut events = self.events.borrow_mut();
        events.clear();
        let result = epoll::wait(&self.epoll, rustix::buffer::spare_capacity(&mut *events), timeout.as_ref());
        self.turn.set(self.turn.get().wrapping_add(1));
        self.was_full.set(events.len() == events.capacity());
        match result {
            Err(Errno::INTR) => return Ok(0),
            other => other?,
        };
        for event in events.iter() {
            let (flags, data) = (event.flags, event.data.u64());
            match data {
                INBOX => {}
                data if data & LISTENER != 0 => self.handle_listener(Key::unpack(data & !LISTENER)),
                data => self.handle_connection(Key::unpack(data), flags),
            }
        }
        Ok(events.len())
    }
}
