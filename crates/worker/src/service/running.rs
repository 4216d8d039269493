//! Services that run on one event loop: starts them, notifies them of reloads, stops them, and restarts them after a
//! panic.
//!
//! Each has a task, and state shared by the task, its context and the loop. A service waits for the end of an earlier
//! one with the same name, so two never run at the same time.

use std::any::Any;
use std::cell::{Cell, Ref, RefCell};
use std::fmt::Display;
use std::future::Future;
use std::io;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use gale_base::log_level::Level;
use gale_base::os_error::OsErrorText;
use gale_process::{LockHandle, TryLockError, WorkerSlot};
use gale_runtime::{Notify, TaskId, abort, catch_panic, catch_panic_of, default_pool, now, sleep, spawn};

use super::lock::{HeldLock, LockShare};
use super::{AnyService, ConfiguredService, Instances, until};
use crate::Worker;

/// Time that a service may take to end: enough to write a file, while a drain is not delayed much beyond its
/// connections.
const STOP_TIME_MAX: Duration = Duration::from_secs(5);

/// First pause before a panicked service is restarted; doubled each time.
const RESTART_PAUSE_MIN: Duration = Duration::from_secs(1);

/// Longest pause. After running for this long, a service starts again with the shortest pause.
const RESTART_PAUSE_MAX: Duration = Duration::from_secs(60);

/// Interval of attempts to take a lock held by another process; the kernel does not report its release.
const LOCK_TRY_PAUSE: Duration = Duration::from_secs(1);

/// Reference to a configuration, so that the process's control thread frees it with its services, not an event loop.
pub type HeldConfiguration = Arc<dyn Any + Send + Sync>;

/// Services of one event loop.
#[derive(Default)]
pub struct Services {
    running: Vec<Rc<Running>>,
    is_stopped: bool,
}

impl Services {
    /// Runs the services for this slot: notifies those that continue, ends removed ones and starts new ones.
    /// `configuration` is that of the services.
    pub fn settle(
        &mut self,
        slot: WorkerSlot,
        worker: &Rc<Worker>,
        services: &[Arc<ConfiguredService>],
        configuration: &HeldConfiguration,
    ) {
        if self.is_stopped {
            return;
        }
        self.running.retain(|running| !(running.is_stopping() && running.has_ended.get()));
        let wanted: Vec<&Arc<ConfiguredService>> = services.iter().filter(|service| service.runs_at(slot)).collect();
        for running in self.running.iter().filter(|running| !running.is_stopping()) {
            match wanted.iter().find(|service| running.continues_as(service)) {
                Some(service) => running.change(service, configuration),
                None => running.stop(),
            }
        }
        for service in wanted {
            let same = |running: &&Rc<Running>| running.name() == service.spec.name;
            let latest = self.running.iter().rfind(same);
            if latest.is_none_or(|latest| latest.is_stopping()) {
                let before = latest.map(Rc::clone);
                let running = Running::new(service, worker, configuration);
                running.task.set(Some(spawn(supervise(Rc::clone(&running), before))));
                self.running.push(running);
            }
        }
    }

    /// Asks all services to end; none is started any more.
    pub fn stop(&mut self) {
        self.is_stopped = true;
        self.running.iter().for_each(|running| running.stop());
    }

    /// Ready when all services that run now have ended.
    pub fn ended(&self) -> impl Future<Output = ()> + 'static {
        let running = self.running.clone();
        async move {
            for running in running {
                running.ended().await;
            }
        }
    }

    /// Aborts all services.
    pub fn abort(&mut self) {
        self.is_stopped = true;
        for running in self.running.drain(..) {
            running.is_stopping.set(true);
            running.task.take().into_iter().for_each(abort);
        }
    }
}

impl ConfiguredService {
    fn runs_at(&self, slot: WorkerSlot) -> bool {
        match self.spec.instances {
            Instances::OnePerWorker => slot.worker < slot.workers,
            // The first slot exists as long as the process serves, always on the same loop.
            Instances::OnePerProcess | Instances::One(_) => slot.worker == 0,
        }
    }

    /// `true` if the service that runs as `earlier` continues as this one.
    fn continues(&self, earlier: &ConfiguredService) -> bool {
        let settings: &dyn Any = &*earlier.spec.service;
        (&self.spec.name, &self.spec.instances) == (&earlier.spec.name, &earlier.spec.instances)
            && self.spec.service.continues_any(settings)
    }
}

/// A service on this loop, from its start until it has ended and is unreferenced.
pub(super) struct Running {
    /// `None` once it was asked to end and has ended. Until then the next configuration checks whether it continues.
    service: RefCell<Option<Arc<ConfiguredService>>>,
    /// `None` after the end, because a configuration may be large.
    configuration: RefCell<Option<HeldConfiguration>>,
    /// Set while an exclusive service runs.
    lock: RefCell<Option<LockShare>>,
    worker: Rc<Worker>,
    name: Box<str>,
    /// Number of changes of the configuration.
    changes: Cell<u64>,
    is_stopping: Cell<bool>,
    has_ended: Cell<bool>,
    /// Notified on a change of the three fields above.
    news: Notify,
    task: Cell<Option<TaskId>>,
}

impl Running {
    fn new(service: &Arc<ConfiguredService>, worker: &Rc<Worker>, configuration: &HeldConfiguration) -> Rc<Running> {
        Rc::new(Running {
            service: RefCell::new(Some(Arc::clone(service))),
            configuration: RefCell::new(Some(Arc::clone(configuration))),
            lock: RefCell::new(None),
            worker: Rc::clone(worker),
            name: service.spec.name.as_str().into(),
            changes: Cell::new(0),
            is_stopping: Cell::new(false),
            has_ended: Cell::new(false),
            news: Notify::new(),
            task: Cell::new(None),
        })
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    pub fn worker(&self) -> &Rc<Worker> {
        &self.worker
    }

    pub fn service(&self) -> Arc<dyn AnyService> {
        Arc::clone(&self.configured().spec.service)
    }

    pub fn configuration(&self) -> Option<HeldConfiguration> {
        self.configuration.borrow().clone()
    }

    fn configured(&self) -> Ref<'_, Arc<ConfiguredService>> {
        Ref::map(self.service.borrow(), |service| service.as_ref().expect("there until the service has ended"))
    }

    pub fn lock_share(&self) -> Option<LockShare> {
        self.lock.borrow().clone()
    }

    pub fn log(&self, level: Level, message: &dyn Display) {
        self.worker.error_log().write(level, None, &format_args!("{}: {message}", self.name));
    }

    pub fn changes(&self) -> u64 {
        self.changes.get()
    }

    pub fn is_stopping(&self) -> bool {
        self.is_stopping.get()
    }

    pub async fn changed_since(&self, changes: u64) {
        self.wait_for(|running| running.changes.get() != changes).await;
    }

    pub async fn stopping(&self) {
        self.wait_for(Running::is_stopping).await;
    }

    pub async fn unless_stopping<F: Future>(&self, future: F) -> Option<F::Output> {
        until(future, self.stopping()).await
    }

    async fn ended(&self) {
        self.wait_for(|running| running.has_ended.get()).await;
    }

    async fn wait_for(&self, is_true: impl Fn(&Running) -> bool) {
        while !is_true(self) {
            self.news.notified().await;
        }
    }

    /// `true` if it continues as `service`. A panic counts as `false`.
    fn continues_as(&self, service: &ConfiguredService) -> bool {
        catch_panic_of(|| service.continues(&self.configured())).unwrap_or_else(|_told| {
            self.log(Level::Alert, &"the service panicked during a reload and is stopped");
            false
        })
    }

    fn change(&self, service: &Arc<ConfiguredService>, configuration: &HeldConfiguration) {
        self.service.replace(Some(Arc::clone(service)));
        if !self.has_ended.get() {
            self.configuration.replace(Some(Arc::clone(configuration)));
        }
        self.changes.set(self.changes.get() + 1);
        self.news.notify_all();
    }

    fn stop(&self) {
        self.is_stopping.set(true);
        if self.has_ended.get() {
            self.service.take();
        }
        self.news.notify_all();
    }
}

/// Guard that marks the end, however the task ends.
struct End(Rc<Running>);

impl Drop for End {
    fn drop(&mut self) {
        let Running { service, has_ended, is_stopping, lock, configuration, news, .. } = &*self.0;
        has_ended.set(true);
        lock.take();
        if is_stopping.get() {
            // Before the configuration, which is freed together with its services.
            service.take();
        }
        configuration.take();
        news.notify_all();
    }
}

/// Task of a service, which waits for the end of `before`.
async fn supervise(running: Rc<Running>, before: Option<Rc<Running>>) {
    let end = End(running);
    let running = &end.0;
    if let Some(before) = before {
        before.ended().await;
    }
    let overdue = async {
        running.stopping().await;
        sleep(STOP_TIME_MAX).await;
    };
    if until(run(running), overdue).await.is_none() {
        let seconds = STOP_TIME_MAX.as_secs();
        running.log(Level::Warn, &format_args!("the service has not stopped within {seconds} seconds"));
    }
}

/// Runs the service, once it has its lock, until it returns or should end.
async fn run(running: &Rc<Running>) {
    let lock = running.configured().lock.clone();
    if let Some(lock) = lock {
        let Some(held) = take_lock(running, &lock).await else { return };
        running.lock.replace(Some(LockShare::new(held)));
    }
    let mut pause = RESTART_PAUSE_MIN;
    while !running.is_stopping() {
        let begun = now();
        let service = running.service();
        let Err(_told) = catch_panic(async { service.start(Rc::clone(running)).await }).await else { break };
        if now().since(begun) >= RESTART_PAUSE_MAX {
            pause = RESTART_PAUSE_MIN;
        }
        let seconds = pause.as_secs();
        running.log(Level::Alert, &format_args!("the service panicked, restarting it in {seconds} s"));
        if running.unless_stopping(sleep(pause)).await.is_none() {
            break;
        }
        pause = (pause * 2).min(RESTART_PAUSE_MAX);
    }
    let share = running.lock.take();
    if let Some(lock) = share.and_then(LockShare::into_last) {
        // Released before the successor tries it. If the pool refuses the task, dropping the lock releases it later.
        let _ = default_pool().run(move || lock.release()).await;
    }
}

/// Waits for the lock; `None` if the service should end before that.
async fn take_lock(running: &Running, lock: &LockHandle) -> Option<HeldLock> {
    // The last logged reason; the inner `None` means that the pool refused.
    let mut told: Option<Option<TryLockError>> = None;
    loop {
        let wanted = Arc::clone(lock);
        let tried = default_pool().run(move || wanted.try_lock().map(HeldLock::new)).await;
        let path = lock.path().display();
        let (refusal, level, message) = match tried {
            Ok(Ok(guard)) => {
                if told.is_some() {
                    running.log(Level::Notice, &format_args!("acquired the lock \"{path}\""));
                }
                return Some(guard);
            }
            Ok(Err(refusal)) => {
                let (level, message) = match refusal {
                    TryLockError::HeldHere => {
                        (Level::Notice, format!("waiting for the lock \"{path}\", which this process still holds"))
                    }
                    TryLockError::HeldElsewhere => {
                        (Level::Notice, format!("waiting for the lock \"{path}\", which another process holds"))
                    }
                    TryLockError::Failed(code) => {
                        let error = io::Error::from_raw_os_error(code);
                        (Level::Alert, format!("flock() \"{path}\" failed {}", OsErrorText(&error)))
                    }
                };
                (Some(refusal), level, message)
            }
            Err(error) => (None, Level::Alert, format!("the lock \"{path}\" cannot be acquired: {error}")),
        };
        if told.replace(refusal) != Some(refusal) {
            running.log(level, &message);
        }
        running.unless_stopping(sleep(LOCK_TRY_PAUSE)).await?;
    }
}
