//! Services: what runs beside requests, for as long as a configuration has it.
//!
//! A module makes a service from its settings and hands it to [`Builder::add_service`]. Something every ten seconds is
//! a service of one line, [`Context::every`]. A service is a task of an event loop: it must not block, and whatever
//! takes long goes to a thread pool.
//!
//! ```text
//!   built with the configuration ─► every loop has committed ─► runs ─► returns: it is done
//!                                                               │  ▲
//!                                            told of a reload ◄─┤  └── after a pause ◄── panics
//!                                                               │
//!   removed, replaced, or its loop drains: asked to end ◄───────┘
//!      └─► ends, or is dropped after five seconds
//! ```
//!
//! Services are matched by name over a reload. No service keeps a process alive: a loop that drains asks its own to end
//! at once, so that another process can take over what only one may do.
//!
//! [`Builder::add_service`]: crate::configuration::Builder::add_service

mod lock;
mod running;

use std::any::Any;
use std::cell::Cell;
use std::fmt::Display;
use std::future::{Future, poll_fn};
use std::marker::PhantomData;
use std::path::{Path, PathBuf};
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use gale_base::log_level::Level;
use gale_process::{LockHandle, ResourceError, Resources};
use gale_runtime::{now, sleep_until};

use crate::worker::Worker;
use running::Running;

pub use lock::LockShare;
pub(crate) use running::{HeldConfiguration, Services};

/// A service of this type; the value is its settings, complete and immutable.
pub trait Service: Send + Sync + Sized + 'static {
    /// Runs on an event loop until it has no more to do or until [`Context::stopping`]. A panic is logged, and the
    /// service is started again.
    fn run(context: Context<Self>) -> impl Future<Output = ()> + 'static;

    /// Whether the service that runs with the settings `earlier` goes on with these after a reload, and hears of it by
    /// [`Context::changed`]. Otherwise, and after a panic here, it ends, and one with these settings is started.
    fn continues(&self, _earlier: &Self) -> bool {
        false
    }
}

/// How a service reaches what is around it, for as long as it runs: a task that outlives it has no use for this.
pub struct Context<S> {
    running: Rc<Running>,
    /// The last change that [`Context::changed`] told.
    changes_seen: Cell<u64>,
    service: PhantomData<fn() -> S>,
}

impl<S: Service> Context<S> {
    fn new(running: Rc<Running>) -> Context<S> {
        let changes_seen = Cell::new(running.changes());
        Context { running, changes_seen, service: PhantomData }
    }

    /// The name that the service was added by.
    pub fn name(&self) -> &str {
        self.running.name()
    }

    /// The settings now. Those that are kept over [`Context::changed`] may be freed where they are dropped: what takes
    /// long to free belongs on a thread pool then.
    ///
    /// # Panics
    /// The service has ended, and a task that it has spawned asks.
    pub fn settings(&self) -> Arc<S> {
        let any: Arc<dyn Any + Send + Sync> = self.running.service();
        any.downcast().expect("a service goes on with settings of its own type")
    }

    /// The configuration that the service belongs to now, as its type (`Configuration`, which services do not know);
    /// none where there is no whole one, as in tests.
    pub fn configuration<C: Send + Sync + 'static>(&self) -> Option<Arc<C>> {
        self.running.configuration()?.downcast().ok()
    }

    /// What the protocols of this event loop share: resolvers, for example.
    pub fn worker(&self) -> &Rc<Worker> {
        self.running.worker()
    }

    /// A share of the lock of a service that is [`exclusive`](ServiceSpec::exclusive); none for others. What writes in
    /// a thread pool keeps one: the service may be dropped before it, and no other process starts while it writes.
    pub fn lock_share(&self) -> Option<LockShare> {
        self.running.lock_share()
    }

    /// Writes a message to the main error log, behind the name of the service.
    pub fn log(&self, level: Level, message: impl Display) {
        self.running.log(level, &message);
    }

    /// Ready once for every reload that this service goes on over; reloads that follow each other quickly may count as
    /// one.
    pub async fn changed(&self) {
        self.running.changed_since(self.changes_seen.get()).await;
        self.changes_seen.set(self.running.changes());
    }

    /// Whether the service is to end.
    pub fn is_stopping(&self) -> bool {
        self.running.is_stopping()
    }

    /// Ready when the service is to end: it has five seconds for that. `worker_shutdown_timeout` may allow it less.
    pub async fn stopping(&self) {
        self.running.stopping().await;
    }

    /// Waits for `future`, but no longer than until the service is to end: `None` then.
    pub async fn unless_stopping<F: Future>(&self, future: F) -> Option<F::Output> {
        self.running.unless_stopping(future).await
    }

    /// Calls `run` now and then once every `period`, a millisecond at least, until the service is to end. Calls never
    /// overlap: while one takes longer than the period, those that are due are left out. One that is under way when the
    /// service is to end is waited for.
    pub async fn every(&self, period: Duration, mut run: impl AsyncFnMut()) {
        let period = period.max(Duration::from_millis(1));
        let mut due = now();
        while !self.is_stopping() {
            run().await;
            let periods_past = now().since(due).as_nanos() / period.as_nanos();
            due = due + period.saturating_mul(u32::try_from(periods_past + 1).unwrap_or(u32::MAX));
            self.unless_stopping(sleep_until(due)).await;
        }
    }
}

/// A service as a module adds it to a configuration.
pub struct ServiceSpec {
    name: String,
    instances: Instances,
    service: Arc<dyn AnyService>,
}

/// How many of a service run at a time.
#[derive(Clone, PartialEq, Eq, Debug)]
enum Instances {
    OnePerWorker,
    OnePerProcess,
    /// One of all processes that open this lock file.
    One(PathBuf),
}

impl ServiceSpec {
    /// One for every event loop. The name says what runs, for a log and to find the service again over a reload; no
    /// other service of the configuration may have it: `"cache manager one"`.
    pub fn per_worker(name: impl Into<String>, service: impl Service) -> ServiceSpec {
        ServiceSpec { name: name.into(), instances: Instances::OnePerWorker, service: Arc::new(service) }
    }

    /// One for the process, on one of its event loops. While two processes overlap, in an upgrade for example, each has
    /// one.
    pub fn per_process(name: impl Into<String>, service: impl Service) -> ServiceSpec {
        ServiceSpec { name: name.into(), instances: Instances::OnePerProcess, service: Arc::new(service) }
    }

    /// One only, also while two processes overlap: for a service that writes. It runs in the process that holds the
    /// lock of the file `lock_path`, which best lies beside what is written, on a local disk, because the master opens
    /// it; another process takes over when the lock is released. No other service of the configuration may have the
    /// same lock file.
    ///
    /// The lock is released when the service ends, and at the latest five seconds after it was asked to. A task that it
    /// has in a thread pool may take longer than that, and must have a [share](Context::lock_share) of the lock.
    pub fn exclusive(name: impl Into<String>, lock_path: impl Into<PathBuf>, service: impl Service) -> ServiceSpec {
        ServiceSpec { name: name.into(), instances: Instances::One(lock_path.into()), service: Arc::new(service) }
    }

    /// The name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The path of the lock file of an exclusive service.
    pub(crate) fn lock_path(&self) -> Option<&Path> {
        match &self.instances {
            Instances::One(path) => Some(path),
            Instances::OnePerWorker | Instances::OnePerProcess => None,
        }
    }

    /// Opens what the service needs.
    pub(crate) fn open(self, resources: &mut dyn Resources) -> Result<Arc<ConfiguredService>, ResourceError> {
        let lock = self.lock_path().map(|path| resources.lock_file(path)).transpose()?;
        Ok(Arc::new(ConfiguredService { spec: self, lock }))
    }
}

/// A service of a configuration.
pub struct ConfiguredService {
    spec: ServiceSpec,
    lock: Option<LockHandle>,
}

/// Any [`Service`], when its type does not matter.
trait AnyService: Any + Send + Sync {
    fn start(&self, running: Rc<Running>) -> Pin<Box<dyn Future<Output = ()>>>;

    /// [`Service::continues`]; never what is of another type.
    fn continues_any(&self, earlier: &dyn Any) -> bool;
}

impl<S: Service> AnyService for S {
    fn start(&self, running: Rc<Running>) -> Pin<Box<dyn Future<Output = ()>>> {
        Box::pin(S::run(Context::new(running)))
    }

    fn continues_any(&self, earlier: &dyn Any) -> bool {
        earlier.downcast_ref().is_some_and(|earlier| self.continues(earlier))
    }
}

/// Waits for `future`, but no longer than for `end`.
async fn until<F: Future>(future: F, end: impl Future<Output = ()>) -> Option<F::Output> {
    let (mut future, mut end) = (pin!(future), pin!(end));
    poll_fn(|context| match future.as_mut().poll(context) {
        Poll::Ready(output) => Poll::Ready(Some(output)),
        Poll::Pending => end.as_mut().poll(context).map(|()| None),
    })
    .await
}
