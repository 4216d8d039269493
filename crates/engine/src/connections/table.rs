//! Connections of one protocol on one loop.

use std::cell::RefCell;
use std::rc::{Rc, Weak};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use gale_runtime::{Moment, TaskId};
use gale_worker::{IdleConnections, Search, Worker};
use slab::Slab;

use super::reuse::{ConnectionSlots, Hand};

/// Pause between two looks at the idle connections of a worker that ends.
const CLOSE_PAUSE: Duration = Duration::from_millis(1);

/// A connection in the table.
pub trait Connection: 'static {
    /// Time from which it may be closed to make room or to end the worker; `None` while it is busy.
    fn may_close_at(&self) -> Option<Moment>;
}

/// Connections of one protocol on one loop.
pub struct ConnectionTable<C> {
    worker: Rc<Worker>,
    entries: RefCell<Slab<Entry<C>>>,
    /// Search for idle connections to close when there is no room.
    hand: Hand,
    waiting_for_end: RefCell<Vec<Waker>>,
}

struct Entry<C> {
    task: Option<TaskId>,
    connection: Weak<C>,
}

impl<C: Connection> Entry<C> {
    /// Time from which the connection may be closed to make room; `None` while it is busy or has unprocessed input.
    fn may_close_at(&self) -> Option<Moment> {
        let time = self.connection.upgrade()?.may_close_at()?;
        if self.is_awake() { None } else { Some(time) }
    }

    /// `true` if its task was woken and has not run since.
    fn is_awake(&self) -> bool {
        self.task.is_some_and(gale_runtime::is_awake)
    }
}

impl<C: Connection> ConnectionTable<C> {
    /// An empty table, whose idle connections can be closed to make room in this worker.
    pub fn new(worker: Rc<Worker>) -> Rc<ConnectionTable<C>> {
        let table = Rc::new(ConnectionTable {
            worker,
            entries: RefCell::default(),
            hand: Hand::default(),
            waiting_for_end: RefCell::default(),
        });
        let idle: Rc<dyn IdleConnections> = Rc::<ConnectionTable<C>>::clone(&table);
        table.worker.connections.register(Rc::downgrade(&idle));
        table
    }

    /// State shared by the protocols of this loop.
    pub fn worker(&self) -> &Rc<Worker> {
        &self.worker
    }

    /// Number of open connections.
    pub fn len(&self) -> usize {
        self.entries.borrow().len()
    }

    /// `true` if no connection is open.
    pub fn is_empty(&self) -> bool {
        self.entries.borrow().is_empty()
    }

    /// Adds a connection that was just accepted. Returns its number, valid until [`ConnectionTable::remove`].
    pub fn insert(&self, connection: &Rc<C>) -> usize {
        self.worker.counters.count_accepted();
        self.worker.connections.count_opened();
        self.entries.borrow_mut().insert(Entry { task: None, connection: Rc::downgrade(connection) })
    }

    /// Sets the task of the connection. Aborting the task closes the connection.
    pub fn set_task(&self, number: usize, task: TaskId) {
        if let Some(entry) = self.entries.borrow_mut().get_mut(number) {
            entry.task = Some(task);
        }
    }

    /// Removes a connection that has ended.
    pub fn remove(&self, number: usize) {
        self.worker.counters.count_closed();
        let is_empty = {
            let mut entries = self.entries.borrow_mut();
            entries.remove(number);
            entries.is_empty()
        };
        self.worker.connections.count_closed();
        if is_empty {
            self.wake_waiting_for_end();
        }
    }

    /// Notes that a connection has become idle, so it can make room for another one.
    pub fn note_idle(&self, number: usize) {
        self.hand.note(number);
        self.worker.connections.note_idle();
    }

    /// Examines all connections again, because they may now be closed at other times, for example after a change of the
    /// configuration.
    pub fn look_at_all_again(&self) {
        self.hand.begin_again();
        self.worker.connections.wake_waiting();
    }

    /// Connections selected by `is_chosen`, with their tasks; aborting a task closes its connection. The arguments are
    /// as in [`ConnectionTable::close_some`].
    pub fn some(&self, is_chosen: impl Fn(&C, bool) -> bool) -> Vec<(TaskId, Weak<C>)> {
        let is_chosen = |entry: &Entry<C>| {
            entry.connection.upgrade().is_some_and(|connection| is_chosen(&connection, entry.is_awake()))
        };
        let chosen =
            |entry: &Entry<C>| Some((entry.task.filter(|_| is_chosen(entry))?, Weak::clone(&entry.connection)));
        self.entries.borrow().iter().filter_map(|(_, entry)| chosen(entry)).collect()
    }

    /// Closes the connections selected by `is_chosen`, whose second argument is `true` if the task was woken and has
    /// not run since.
    pub fn close_some(&self, is_chosen: impl Fn(&C, bool) -> bool) {
        // Each abort drops a connection, which removes itself from the table.
        self.some(is_chosen).into_iter().for_each(|(task, _)| gale_runtime::abort(task));
    }

    /// Closes idle connections as soon as they may be closed, until none is idle. Busy ones end by themselves.
    pub fn drain(self: &Rc<Self>) {
        self.close_idle();
        let table = Rc::downgrade(self);
        gale_runtime::spawn(async move {
            while let Some(next) = table.upgrade().and_then(|table| table.next_close()) {
                gale_runtime::sleep_until(next).await;
                if let Some(table) = table.upgrade() {
                    table.close_idle();
                }
                // Lets woken tasks run, and others end.
                gale_runtime::sleep(CLOSE_PAUSE).await;
            }
        });
    }

    /// Time when the next idle connection may be closed.
    fn next_close(&self) -> Option<Moment> {
        let entries = self.entries.borrow();
        entries.iter().filter_map(|(_, entry)| entry.connection.upgrade()?.may_close_at()).min()
    }

    fn close_idle(&self) {
        let now = gale_runtime::now();
        self.close_some(|connection, is_awake| !is_awake && connection.may_close_at().is_some_and(|time| time <= now));
    }

    /// Ready when no connection is open.
    pub fn poll_empty(&self, context: &mut Context<'_>) -> Poll<()> {
        if self.is_empty() {
            return Poll::Ready(());
        }
        self.waiting_for_end.borrow_mut().push(context.waker().clone());
        Poll::Pending
    }

    fn wake_waiting_for_end(&self) {
        self.waiting_for_end.take().into_iter().for_each(Waker::wake);
    }

    fn with_slots<T>(&self, act: impl FnOnce(&ConnectionSlots<'_>) -> T) -> T {
        let entries = self.entries.borrow();
        let may_close_at = |place: usize| entries.get(place).and_then(Entry::may_close_at);
        let (now, turn) = (gale_runtime::now(), gale_runtime::turn());
        act(&ConnectionSlots { count: entries.capacity(), now, turn, may_close_at: &may_close_at })
    }
}

impl<C: Connection> IdleConnections for ConnectionTable<C> {
    fn search(&self) -> Search {
        self.with_slots(|slots| self.hand.find(slots))
    }

    fn close_longest_idle(&self, wanted: usize) {
        let chosen = self.with_slots(|slots| self.hand.longest_idle(slots, wanted));
        let tasks: Vec<TaskId> = {
            let entries = self.entries.borrow();
            chosen.into_iter().filter_map(|slot| entries.get(slot)?.task).collect()
        };
        tasks.into_iter().for_each(gale_runtime::abort);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Small;

    impl Connection for Small {
        fn may_close_at(&self) -> Option<Moment> {
            None
        }
    }

    #[test]
    fn a_place_in_the_table_is_small() {
        // The niche of the task id, all ones, encodes `None`.
        assert_eq!(size_of::<Option<Entry<Small>>>(), 16);
    }
}
