//! Event-loop threads from the control thread's side: orders go in, events come out.
//!
//! Nothing here depends on how a loop waits: orders arrive in the loop's main future through an ordinary `Waker`,
//! between two polls of its tasks, and events leave through a queue with an eventfd. The control thread never waits for
//! a loop.

use std::collections::VecDeque;
use std::future::Future;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::thread;

use parking_lot::Mutex;
use rustix::event::EventfdFlags;

use super::handover::{Arrivals, Successor};
use super::program::{Completion, LoopMain, Program, Worker, WorkerSlot};

/// Maximum number of queued orders for one loop. Each order is sent once in a reload or a stop, and reloads do not
/// overlap; consecutive orders to reopen logs are merged.
const ORDERS_MAX: usize = 64;

/// Order from the control thread to a loop.
pub(super) enum Order<C> {
    /// Start serving.
    Start(Change<C>),
    /// Use another configuration, or another slot.
    Commit(Change<C>),
    /// Every loop has made the last change.
    Settled,
    /// Stop accepting and finish the open connections. `is_last` as in [`Worker::stop_accepting`].
    Drain { is_last: bool, successor: Option<Successor> },
    /// Serve the connections that arrive there, too.
    Receive(Arrivals),
    /// Close connections that still use this configuration or an older one; with `None`, all connections.
    Expire { configuration: Option<Arc<C>> },
    /// Flush the buffers of the log files, which are about to be reopened.
    Reopen,
    /// End the loop now.
    Stop,
}

/// Configuration and slot of a loop from now on.
pub(super) struct Change<C> {
    /// Number of this change, repeated in its event, which may arrive after the change was given up.
    pub number: u64,
    pub slot: WorkerSlot,
    pub configuration: Arc<C>,
}

/// Event from a loop to the control thread.
#[derive(Debug)]
pub(super) enum LoopEvent {
    /// The loop is set up and waits for its first order.
    Ready,
    /// The loop serves, or failed to start.
    Started { number: u64, result: Result<(), String> },
    /// The loop uses the configuration of this change, and removed listeners are drained.
    Committed { number: u64 },
    /// The buffers of the log files are empty.
    Reopened,
    /// The loop accepts no more.
    Draining,
    /// The last connection is closed.
    Drained,
    /// The thread is about to end; an error if that was not ordered.
    Exited(Result<(), String>),
}

/// Events for the control thread: a queue that can be polled. Its length is bounded by the orders: each yields at most
/// two events.
pub(super) struct Events<E> {
    queue: Mutex<VecDeque<E>>,
    signal: OwnedFd,
}

impl<E> Events<E> {
    pub fn new() -> io::Result<Events<E>> {
        let signal = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Events { queue: Mutex::new(VecDeque::new()), signal })
    }

    pub fn push(&self, event: E) {
        self.queue.lock().push_back(event);
        // Fails only when the counter is full; the reader is awake then anyway.
        let _ = rustix::io::write(&self.signal, &1u64.to_ne_bytes());
    }

    pub fn take(&self) -> VecDeque<E> {
        // Cleared first: an event pushed in between is then taken now or signalled again.
        let _ = rustix::io::read(&self.signal, &mut [0u8; 8]);
        std::mem::take(&mut *self.queue.lock())
    }
}

impl<E> AsFd for Events<E> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.signal.as_fd()
    }
}

/// The control thread's handle of one loop.
pub(super) struct LoopHandle<C> {
    mailbox: Arc<Mailbox<C>>,
}

impl<C> LoopHandle<C> {
    /// Gives an order; returns `false` if the queue is full, because the loop is stuck.
    pub fn order(&self, order: Order<C>) -> bool {
        self.mailbox.push(order)
    }
}

/// Starts the thread of one event loop. `report` is called with its events, on that thread.
pub(super) fn spawn<P: Program>(
    program: Arc<P>,
    worker: usize,
    configuration: Arc<P::Configuration>,
    report: impl Fn(LoopEvent) + Send + Sync + 'static,
) -> io::Result<LoopHandle<P::Configuration>> {
    let mailbox = Arc::new(Mailbox { state: Mutex::new(MailboxState { orders: VecDeque::new(), waker: None }) });
    let inside = Arc::clone(&mailbox);
    let report: Arc<dyn Fn(LoopEvent) + Send + Sync> = Arc::new(report);
    thread::Builder::new().name(format!("worker {worker}")).spawn(move || {
        let run = || {
            let main: LoopMain = Box::pin(LoopController::<P> {
                program: Arc::clone(&program),
                mailbox: inside,
                report: Arc::clone(&report),
                announced: false,
                serving: None,
                successor: None,
                unsettled: Vec::new(),
            });
            program.run_loop(worker, configuration, main)
        };
        let result = match catch_unwind(AssertUnwindSafe(run)) {
            Ok(Ok(())) => Ok(()),
            Ok(Err(error)) => Err(format!("event loop of worker {worker} failed: {error}")),
            Err(_) => Err(format!("event loop of worker {worker} panicked")),
        };
        report(LoopEvent::Exited(result));
    })?;
    Ok(LoopHandle { mailbox })
}

struct Mailbox<C> {
    state: Mutex<MailboxState<C>>,
}

struct MailboxState<C> {
    orders: VecDeque<Order<C>>,
    waker: Option<Waker>,
}

impl<C> Mailbox<C> {
    fn push(&self, order: Order<C>) -> bool {
        let waker = {
            let mut state = self.state.lock();
            if matches!((&order, state.orders.back()), (Order::Reopen, Some(Order::Reopen))) {
                // Merged with the queued one: many log files are reopened in several messages.
                return true;
            }
            if state.orders.len() == ORDERS_MAX {
                return false;
            }
            state.orders.push_back(order);
            state.waker.take()
        };
        if let Some(waker) = waker {
            waker.wake();
        }
        true
    }

    fn poll_next(&self, context: &mut Context<'_>) -> Poll<Order<C>> {
        let mut state = self.state.lock();
        match state.orders.pop_front() {
            Some(order) => Poll::Ready(order),
            None => {
                state.waker = Some(context.waker().clone());
                Poll::Pending
            }
        }
    }
}

/// The main future: carries out orders, and completes the operations that they started.
struct LoopController<P: Program> {
    program: Arc<P>,
    mailbox: Arc<Mailbox<P::Configuration>>,
    report: Arc<dyn Fn(LoopEvent) + Send + Sync>,
    announced: bool,
    serving: Option<P::Worker>,
    /// Takes the idle connections once this loop drains.
    successor: Option<Successor>,
    unsettled: Vec<(Settles, Completion)>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Settles {
    Commit {
        number: u64,
    },
    /// The loop accepts no more, and may drain.
    Stop,
    Drain,
    /// Nothing is left to drain, but a pending change may still bring connections.
    DrainAgain,
}

impl<P: Program> Unpin for LoopController<P> {}

impl<P: Program> Future for LoopController<P> {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        if !std::mem::replace(&mut self.announced, true) {
            (self.report)(LoopEvent::Ready);
        }
        let this = &mut *self;
        while let Poll::Ready(order) = this.mailbox.poll_next(context) {
            if this.carry_out(order).is_break() {
                return Poll::Ready(());
            }
        }
        this.settle(context);
        Poll::Pending
    }
}

impl<P: Program> LoopController<P> {
    /// Advances the operations that orders have started, and reports those that are complete. A stop is complete only
    /// after pending changes, which still accept the connections queued on removed sockets.
    fn settle(&mut self, context: &mut Context<'_>) {
        let LoopController { report, serving, unsettled, successor, .. } = self;
        let successor = successor.as_ref();
        let mut changes = 0;
        unsettled.retain_mut(|(settles, quiet)| {
            if let (Settles::DrainAgain, 0, Some(worker)) = (*settles, changes, &mut *serving) {
                (*settles, *quiet) = (Settles::Drain, worker.drain(successor));
            }
            while *settles != Settles::DrainAgain && quiet.as_mut().poll(context).is_ready() {
                match (*settles, &mut *serving) {
                    (Settles::Commit { number }, _) => {
                        report(LoopEvent::Committed { number });
                        return false;
                    }
                    (Settles::Stop, Some(worker)) => {
                        (*settles, *quiet) = (Settles::Drain, worker.drain(successor));
                        report(LoopEvent::Draining);
                    }
                    (Settles::Drain, Some(_)) if changes > 0 => *settles = Settles::DrainAgain,
                    (Settles::Stop | Settles::Drain | Settles::DrainAgain, _) => {
                        report(LoopEvent::Drained);
                        return false;
                    }
                }
            }
            changes += usize::from(matches!(settles, Settles::Commit { .. }));
            true
        });
    }

    fn carry_out(&mut self, order: Order<P::Configuration>) -> std::ops::ControlFlow<()> {
        match (order, &mut self.serving) {
            (Order::Start(Change { number, slot, configuration }), _) => {
                let result = self.program.start(slot, configuration).map(|worker| self.serving = Some(worker));
                (self.report)(LoopEvent::Started { number, result });
            }
            (Order::Commit(Change { number, slot, configuration }), Some(worker)) => {
                self.unsettled.push((Settles::Commit { number }, worker.commit(slot, configuration)));
            }
            // A loop that could not start has nothing to change over or to drain.
            (Order::Commit(Change { number, .. }), None) => (self.report)(LoopEvent::Committed { number }),
            (Order::Settled, serving) => serving.iter_mut().for_each(Worker::settled),
            (Order::Drain { is_last, successor }, Some(worker)) => {
                self.successor = successor;
                self.unsettled.push((Settles::Stop, worker.stop_accepting(is_last)));
            }
            (Order::Drain { .. }, None) => {
                (self.report)(LoopEvent::Draining);
                (self.report)(LoopEvent::Drained);
            }
            (Order::Receive(arrivals), serving) => serving.iter_mut().for_each(|worker| worker.receive(&arrivals)),
            (Order::Expire { configuration }, Some(worker)) => worker.expire(configuration.as_ref()),
            (Order::Expire { .. }, None) => {}
            (Order::Reopen, serving) => {
                if let Some(worker) = serving {
                    worker.reopen();
                }
                (self.report)(LoopEvent::Reopened);
            }
            (Order::Stop, _) => return std::ops::ControlFlow::Break(()),
        }
        std::ops::ControlFlow::Continue(())
    }
}
