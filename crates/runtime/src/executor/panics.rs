//! Panic boundaries: a panic ends one task, one remote call or one pool task, never the process.
//!
//! Every panic caught here is counted and passed, with its location, to one reporter (the engine's log). A panic
//! outside of a boundary goes to the hook that the process had before.

use std::any::Any;
use std::cell::{Cell, RefCell};
use std::fmt;
use std::future::poll_fn;
use std::io::Write;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Once};
use std::task::Poll;

use parking_lot::RwLock;

/// A panic that was caught.
#[derive(Clone, Debug)]
pub struct Panic {
    /// The kind of code that it ended: `"task"`, `"call"`, `"pool task"`.
    pub what: &'static str,
    /// The panic message.
    pub message: String,
    /// `file:line:column`, where known.
    pub location: String,
}

impl fmt::Display for Panic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} panicked at {}: {}", self.what, self.location, self.message)
    }
}

type Reporter = Arc<dyn Fn(&Panic) + Send + Sync>;

static REPORTER: RwLock<Option<Reporter>> = RwLock::new(None);
static COUNT: AtomicU64 = AtomicU64::new(0);

thread_local! {
    static DEPTH: Cell<u32> = const { Cell::new(0) };
    static LAST_LOCATION: RefCell<Option<String>> = const { RefCell::new(None) };
}

/// Sets the function that reports caught panics. Without one, or when it panics itself, they go to standard error.
pub fn set_panic_reporter(reporter: impl Fn(&Panic) + Send + Sync + 'static) {
    let displaced = REPORTER.write().replace(Arc::new(reporter));
    drop(displaced);
}

/// Number of panics caught in this process.
pub fn panic_count() -> u64 {
    COUNT.load(Ordering::Relaxed)
}

/// Installs a hook that remembers the location of panics inside boundaries; elsewhere the previous hook is called.
pub(crate) fn install() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let previous = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            if DEPTH.with(Cell::get) == 0 {
                return previous(info);
            }
            let location = info.location().map(|location| location.to_string());
            LAST_LOCATION.with(|last| *last.borrow_mut() = location);
        }));
    });
}

/// Runs `f`; a panic in it is reported and returned.
#[inline]
pub(crate) fn boundary<T>(what: &'static str, f: impl FnOnce() -> T) -> Result<T, Panic> {
    DEPTH.with(|depth| depth.set(depth.get() + 1));
    // State that the closure leaves behind is dropped or, if shared, poisons itself.
    let outcome = catch_unwind(AssertUnwindSafe(f));
    DEPTH.with(|depth| depth.set(depth.get() - 1));
    outcome.map_err(|payload| report(what, payload))
}

/// Calls `f`; a panic in it is reported and ends only this call.
pub fn catch_panic_of<T>(f: impl FnOnce() -> T) -> Result<T, Panic> {
    boundary("call", f)
}

/// Runs `future` as if it were a task: a panic in it is reported and ends only this future.
pub async fn catch_panic<T>(future: impl Future<Output = T>) -> Result<T, Panic> {
    let mut future = pin!(future);
    poll_fn(|cx| match boundary("task", || future.as_mut().poll(cx)) {
        Ok(polled) => polled.map(Ok),
        Err(panic) => Poll::Ready(Err(panic)),
    })
    .await
}

#[cold]
fn report(what: &'static str, payload: Box<dyn Any + Send>) -> Panic {
    let message = match (payload.downcast_ref::<&str>(), payload.downcast_ref::<String>()) {
        (Some(text), _) => (*text).to_owned(),
        (_, Some(text)) => text.clone(),
        _ => "(not a text)".to_owned(),
    };
    let location = LAST_LOCATION.with(|last| last.borrow_mut().take()).unwrap_or_else(|| "(unknown place)".to_owned());
    let panic = Panic { what, message, location };
    COUNT.fetch_add(1, Ordering::Relaxed);
    // The panicking code chose the type of the payload, and dropping it may panic again, so it is leaked.
    std::mem::forget(payload);
    if !tell_reporter(&panic) {
        // If even this fails there is no way left to report it.
        let _ = std::io::stderr().write_all(format!("{panic}\n").as_bytes());
    }
    panic
}

/// Calls the reporter. False if there is none or it panics.
fn tell_reporter(panic: &Panic) -> bool {
    // Called without the lock, which the reporter may take itself (to set a successor).
    let Some(reporter) = REPORTER.read().clone() else {
        return false;
    };
    catch_unwind(AssertUnwindSafe(|| reporter(panic))).map_err(std::mem::forget).is_ok()
}
