//! What a protocol does on one loop without a connection that waits for it: the subrequests of `mirror`.

use std::cell::{Cell, RefCell};
use std::future::Future;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

use gale_runtime::TaskId;
use slab::Slab;

use crate::worker::Worker;

/// See the file's head.
pub struct BackgroundTasks {
    worker: Rc<Worker>,
    tasks: RefCell<Slab<Background>>,
    /// How many of them a request has left behind.
    left_behind: Cell<usize>,
    waiting_for_end: RefCell<Vec<Waker>>,
}

/// A task that no connection waits for.
struct Background {
    task: Option<TaskId>,
    /// The configuration that it began with.
    generation: u64,
}

impl BackgroundTasks {
    /// None are running.
    pub fn new(worker: Rc<Worker>) -> Rc<BackgroundTasks> {
        Rc::new(BackgroundTasks {
            worker,
            tasks: RefCell::default(),
            left_behind: Cell::new(0),
            waiting_for_end: RefCell::default(),
        })
    }

    /// How many tasks there may be: as many as connections.
    pub fn max(&self) -> usize {
        self.worker.connections.max()
    }

    /// How many tasks requests may have left behind: as many as a quarter of the connections. Each may need a
    /// connection to a server, and one client can begin many of them, one after the other.
    pub fn left_behind_max(&self) -> usize {
        self.max().div_ceil(4)
    }

    /// As [`BackgroundTasks::spawn`], of what a request leaves behind that has ended for its client.
    pub fn leave_behind(self: &Rc<Self>, generation: u64, work: impl Future<Output = ()> + 'static) -> bool {
        if self.left_behind.get() >= self.left_behind_max() {
            return false;
        }
        let left = LeftBehind(Rc::clone(self));
        self.left_behind.set(self.left_behind.get() + 1);
        self.spawn(generation, async move {
            let _left = left;
            work.await;
        })
    }

    /// Does something that no connection waits for, for an exchange that began with the configuration of that
    /// generation. `false` when there is too much of that already.
    pub fn spawn(self: &Rc<Self>, generation: u64, work: impl Future<Output = ()> + 'static) -> bool {
        if self.tasks.borrow().len() >= self.max() {
            return false;
        }
        let number = self.tasks.borrow_mut().insert(Background { task: None, generation });
        let listed = Listed { tasks: Rc::clone(self), number };
        let task = gale_runtime::spawn(async move {
            let _listed = listed;
            work.await;
        });
        // The task has not run yet: it is there to be found.
        if let Some(entry) = self.tasks.borrow_mut().get_mut(number) {
            entry.task = Some(task);
        }
        true
    }

    /// Ends what is done for exchanges that began with the configuration of this generation or an older one.
    pub fn expire(&self, newest: u64) {
        let expired = |background: &Background| background.generation <= newest;
        let tasks: Vec<TaskId> = {
            let tasks = self.tasks.borrow();
            tasks.iter().filter(|(_, entry)| expired(entry)).filter_map(|(_, entry)| entry.task).collect()
        };
        tasks.into_iter().for_each(gale_runtime::abort);
    }

    /// Ready when all tasks have ended.
    pub fn poll_empty(&self, context: &mut Context<'_>) -> Poll<()> {
        if self.tasks.borrow().is_empty() {
            return Poll::Ready(());
        }
        self.waiting_for_end.borrow_mut().push(context.waker().clone());
        Poll::Pending
    }
}

/// Counts among those that requests have left behind.
struct LeftBehind(Rc<BackgroundTasks>);

impl Drop for LeftBehind {
    fn drop(&mut self) {
        self.0.left_behind.set(self.0.left_behind.get() - 1);
    }
}

/// The place of a task, from which it is taken however the task ends.
struct Listed {
    tasks: Rc<BackgroundTasks>,
    number: usize,
}

impl Drop for Listed {
    fn drop(&mut self) {
        self.tasks.tasks.borrow_mut().remove(self.number);
        self.tasks.waiting_for_end.take().into_iter().for_each(Waker::wake);
    }
}
