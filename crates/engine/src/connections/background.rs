//! Background tasks of a protocol on one loop, for which no connection waits: the subrequests of `mirror`.

use std::cell::{Cell, RefCell};
use std::future::Future;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

use gale_runtime::TaskId;
use gale_worker::Worker;
use slab::Slab;

/// Background tasks of one loop.
pub struct BackgroundTasks {
    worker: Rc<Worker>,
    tasks: RefCell<Slab<Background>>,
    /// Tasks whose request has ended.
    left_behind: Cell<usize>,
    waiting_for_end: RefCell<Vec<Waker>>,
}

/// A task that no connection waits for.
struct Background {
    task: Option<TaskId>,
    /// Generation of the configuration that it began with.
    generation: u64,
}

impl BackgroundTasks {
    /// Creates an empty set.
    pub fn new(worker: Rc<Worker>) -> Rc<BackgroundTasks> {
        Rc::new(BackgroundTasks {
            worker,
            tasks: RefCell::default(),
            left_behind: Cell::new(0),
            waiting_for_end: RefCell::default(),
        })
    }

    /// Most tasks: the number of connections.
    pub fn max(&self) -> usize {
        self.worker.connections.max()
    }

    /// Most tasks whose requests have ended: a quarter of the number of connections. Each may need a connection to a
    /// server, and one client can start many, one after the other.
    pub fn left_behind_max(&self) -> usize {
        self.max().div_ceil(4)
    }

    /// As [`BackgroundTasks::spawn`], for a task whose request has ended for its client.
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

    /// Spawns a task that no connection waits for, for an exchange with the configuration of this generation. `false`
    /// if there are too many already.
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
        // The task has not run yet, so its entry still exists.
        if let Some(entry) = self.tasks.borrow_mut().get_mut(number) {
            entry.task = Some(task);
        }
        true
    }

    /// Aborts the tasks of exchanges with this generation of the configuration or an older one.
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

/// Counts a task as left behind while it exists.
struct LeftBehind(Rc<BackgroundTasks>);

impl Drop for LeftBehind {
    fn drop(&mut self) {
        self.0.left_behind.set(self.0.left_behind.get() - 1);
    }
}

/// Entry of a task, removed however the task ends.
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
