//! Services: background tasks that run as long as a configuration has them.
//!
//! A module creates a service from its settings and passes it to `Builder::add_service`. A periodic task is a service
//! of one line, [`Context::every`]. A service is a task of an event loop: it must not block, and long work belongs in a
//! thread pool.
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
//! Services are matched by name over a reload. No service keeps a process alive: a draining loop asks its services to
//! end at once, so that another process can take over exclusive ones.

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

use crate::Worker;
use running::Running;

pub use lock::LockShare;
pub use running::{HeldConfiguration, Services};

/// A service; the value contains its complete, immutable settings.
pub trait Service: Send + Sync + Sized + 'static {
    /// Runs on an event loop until it is done or [`Context::stopping`] is ready. After a panic, which is logged, the
    /// service is restarted.
    fn run(context: Context<Self>) -> impl Future<Output = ()> + 'static;

    /// `true` if the service that runs with the settings `earlier` continues with these after a reload, notified by
    /// [`Context::changed`]. Otherwise, and after a panic here, it is stopped and a new one is started.
    fn continues(&self, _earlier: &Self) -> bool {
        false
    }
}

/// Access of a service to its environment while it runs. A task that outlives the service must not use it.
pub struct Context<S> {
    running: Rc<Running>,
    /// The last change reported by [`Context::changed`].
    changes_seen: Cell<u64>,
    service: PhantomData<fn() -> S>,
}

impl<S: Service> Context<S> {
    fn new(running: Rc<Running>) -> Context<S> {
        let changes_seen = Cell::new(running.changes());
        Context { running, changes_seen, service: PhantomData }
    }

    /// Name of the service.
    pub fn name(&self) -> &str {
        self.running.name()
    }

    /// Current settings. If they are kept beyond [`Context::changed`], dropping them may free them; if that takes long,
    /// do it in a thread pool.
    ///
    /// # Panics
    /// Panics if the service has ended and a task that it spawned calls this.
    pub fn settings(&self) -> Arc<S> {
        let any: Arc<dyn Any + Send + Sync> = self.running.service();
        any.downcast().expect("a service goes on with settings of its own type")
    }

    /// Configuration that the service belongs to, by its type (`Configuration`, which services do not know); `None`
    /// without a whole one, as in tests.
    pub fn configuration<C: Send + Sync + 'static>(&self) -> Option<Arc<C>> {
        self.running.configuration()?.downcast().ok()
    }

    /// State shared by the protocols of this event loop, such as resolvers.
    pub fn worker(&self) -> &Rc<Worker> {
        self.running.worker()
    }

    /// A share of the lock of an [`exclusive`](ServiceSpec::exclusive) service; `None` for others. A task that writes
    /// in a thread pool needs one: it may outlive the service, and no other process must start while it writes.
    pub fn lock_share(&self) -> Option<LockShare> {
        self.running.lock_share()
    }

    /// Logs a message to the main error log, prefixed by the name of the service.
    pub fn log(&self, level: Level, message: impl Display) {
        self.running.log(level, &message);
    }

    /// Ready once for each reload that this service survives; quick successive reloads may count as one.
    pub async fn changed(&self) {
        self.running.changed_since(self.changes_seen.get()).await;
        self.changes_seen.set(self.running.changes());
    }

    /// `true` if the service should end.
    pub fn is_stopping(&self) -> bool {
        self.running.is_stopping()
    }

    /// Ready when the service should end, which may take five seconds, or less with `worker_shutdown_timeout`.
    pub async fn stopping(&self) {
        self.running.stopping().await;
    }

    /// Waits for `future`; returns `None` if the service should end before that.
    pub async fn unless_stopping<F: Future>(&self, future: F) -> Option<F::Output> {
        self.running.unless_stopping(future).await
    }

    /// Calls `run` now and then once every `period` (at least a millisecond) until the service should end. Calls do not
    /// overlap: if one takes longer than the period, missed ones are skipped. A call in progress is completed.
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

/// A service to be added to a configuration.
pub struct ServiceSpec {
    name: String,
    instances: Instances,
    service: Arc<dyn AnyService>,
}

/// Number of concurrent instances of a service.
#[derive(Clone, PartialEq, Eq, Debug)]
enum Instances {
    OnePerWorker,
    OnePerProcess,
    /// One among all processes that use this lock file.
    One(PathBuf),
}

impl ServiceSpec {
    /// One instance for each event loop. The name identifies the service in logs and over reloads, and must be unique
    /// in the configuration: `"cache manager one"`.
    pub fn per_worker(name: impl Into<String>, service: impl Service) -> ServiceSpec {
        ServiceSpec { name: name.into(), instances: Instances::OnePerWorker, service: Arc::new(service) }
    }

    /// One instance for the process, on one of its event loops. While two processes overlap, as in an upgrade, each has
    /// one.
    pub fn per_process(name: impl Into<String>, service: impl Service) -> ServiceSpec {
        ServiceSpec { name: name.into(), instances: Instances::OnePerProcess, service: Arc::new(service) }
    }

    /// A single instance, even while two processes overlap, for a service that writes. It runs in the process that
    /// holds the lock on `lock_path`; another one takes over when the lock is released. The file should be beside the
    /// data and on a local disk, because the master opens it. No other service of the configuration may have the same
    /// lock file.
    ///
    /// The lock is released when the service ends, at most five seconds after it was asked to. A task in a thread pool
    /// that may take longer needs a [share](Context::lock_share) of the lock.
    pub fn exclusive(name: impl Into<String>, lock_path: impl Into<PathBuf>, service: impl Service) -> ServiceSpec {
        ServiceSpec { name: name.into(), instances: Instances::One(lock_path.into()), service: Arc::new(service) }
    }

    /// Name of the service.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Lock file of an exclusive service.
    pub fn lock_path(&self) -> Option<&Path> {
        match &self.instances {
            Instances::One(path) => Some(path),
            Instances::OnePerWorker | Instances::OnePerProcess => None,
        }
    }

    /// Opens the lock file of an exclusive service.
    ///
    /// # Errors
    /// The lock file cannot be opened.
    pub fn open(self, resources: &mut dyn Resources) -> Result<Arc<ConfiguredService>, ResourceError> {
        let lock = self.lock_path().map(|path| resources.lock_file(path)).transpose()?;
        Ok(Arc::new(ConfiguredService { spec: self, lock }))
    }
}

/// A service of a configuration.
pub struct ConfiguredService {
    spec: ServiceSpec,
    lock: Option<LockHandle>,
}

/// Type-erased [`Service`].
trait AnyService: Any + Send + Sync {
    fn start(&self, running: Rc<Running>) -> Pin<Box<dyn Future<Output = ()>>>;

    /// [`Service::continues`]; `false` for another type.
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

/// Waits for `future`; returns `None` if `end` is ready first.
async fn until<F: Future>(future: F, end: impl Future<Output = ()>) -> Option<F::Output> {
    let (mut future, mut end) = (pin!(future), pin!(end));
    poll_fn(|context| match future.as_mut().poll(context) {
        Poll::Ready(output) => Poll::Ready(Some(output)),
        Poll::Pending => end.as_mut().poll(context).map(|()| None),
    })
    .await
}
