//! A session as the table of its loop sees it.

use std::cell::{Cell, OnceCell};
use std::rc::Rc;
use std::time::Duration;

use gale_engine::connections::{Connection, ConnectionTable};
use gale_process::{ListenAddress, SocketKind};
use gale_runtime::{Moment, TaskId};

use crate::session::datagrams::DatagramInlet;

/// How long a session over UDP is left alone after its client has sent something, when there is no room or the worker
/// ends: its answer may be on its way.
const ANSWER_GRACE: Duration = Duration::from_secs(1);

/// A session in the table, until the last handle of it is dropped.
pub(super) struct Listed {
    table: Rc<ConnectionTable<Listed>>,
    number: Cell<Option<usize>>,
    /// Of the configuration that it began with.
    pub generation: u64,
    /// Where it came in.
    pub address: Rc<ListenAddress>,
    pub kind: SocketKind,
    inlet: OnceCell<DatagramInlet>,
}

impl Listed {
    /// Lists a session over TCP, or, with an inlet, over UDP.
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

    /// Aborting this task ends the session.
    pub fn set_task(&self, task: TaskId) {
        if let Some(number) = self.number.get() {
            self.table.set_task(number, task);
        }
    }
}

impl Connection for Listed {
    /// Over UDP a session is over when nothing comes any more, which nobody says. A connection is never closed for
    /// another one.
    fn may_close_at(&self) -> Option<Moment> {
        self.inlet.get().map(|inlet| inlet.last() + ANSWER_GRACE)
    }
}

impl Drop for Listed {
    fn drop(&mut self) {
        self.number.get().into_iter().for_each(|number| self.table.remove(number));
    }
}
