//! Entry of a session in its loop's connection table.

use std::cell::{Cell, OnceCell};
use std::rc::Rc;
use std::time::Duration;

use gale_engine::connections::{Connection, ConnectionTable};
use gale_process::{ListenAddress, SocketKind};
use gale_runtime::{Moment, TaskId};

use crate::session::datagrams::DatagramInlet;

/// Time after a datagram from the client before its session may be closed to make room or because the worker drains:
/// the answer may be on its way.
const ANSWER_GRACE: Duration = Duration::from_secs(1);

/// Entry in the table. It is removed when the last handle is dropped.
pub(super) struct Listed {
    table: Rc<ConnectionTable<Listed>>,
    number: Cell<Option<usize>>,
    /// Generation of the configuration that the session began with.
    pub generation: u64,
    /// The address that accepted the session.
    pub address: Rc<ListenAddress>,
    pub kind: SocketKind,
    inlet: OnceCell<DatagramInlet>,
}

impl Listed {
    /// Lists a TCP session, or a UDP session if `inlet` is given.
    pub fn new(
        table: &Rc<ConnectionTable<Listed>>,
        generation: u64,
        address: Rc<ListenAddress>,
        inlet: Option<DatagramInlet>,
    ) -> Rc<Listed> {
        let kind = if inlet.is_some() { SocketKind::Datagram } else { SocketKind::Stream };
        let inlet = inlet.map_or_else(OnceCell::new, OnceCell::from);
        let listed =
            Rc::new(Listed { table: Rc::clone(table), number: Cell::new(None), generation, address, kind, inlet });
        listed.number.set(Some(table.insert(&listed)));
        if let (Some(number), Some(_)) = (listed.number.get(), listed.inlet.get()) {
            table.note_idle(number);
        }
        listed
    }

    /// Sets the task of the session. Aborting the task ends the session.
    pub fn set_task(&self, task: TaskId) {
        if let Some(number) = self.number.get() {
            self.table.set_task(number, task);
        }
    }
}

impl Connection for Listed {
    /// A UDP session has no end that the client could signal, so it may be closed once it has been idle. A TCP
    /// connection is never closed to make room.
    fn may_close_at(&self) -> Option<Moment> {
        self.inlet.get().map(|inlet| inlet.last() + ANSWER_GRACE)
    }
}

impl Drop for Listed {
    fn drop(&mut self) {
        self.number.get().into_iter().for_each(|number| self.table.remove(number));
    }
}
