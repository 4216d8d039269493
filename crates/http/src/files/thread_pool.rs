//! Which thread pool a request uses: the NAME in `aio threads=NAME`, which may contain variables.
//!
//! A name without variables is checked when the configuration is read; one with variables when it is needed, and then a
//! pool that is not there is an error of that request alone.
//!
//! And how a request waits for a pool, or for a file: no longer than its client does.

use std::future::{Future, poll_fn};
use std::pin::pin;
use std::task::Poll;
use std::time::Duration;

use bstr::BStr;
use gale_config::{Diagnostic, Word};
use gale_runtime::{ThreadPool, timeout};

use crate::configuration::builder::InHttp;
use crate::request::Request;
use crate::variables::template::Template;
use gale_base::log_level::Level;
use gale_engine::configuration::Builder;

/// The name of a thread pool, compiled.
#[derive(Clone, Debug)]
pub struct PoolName(Template);

impl PoolName {
    /// Compiles a name.
    ///
    /// # Errors
    /// What is wrong with it. That there is no such pool is found out when all of the configuration is known.
    pub fn new(builder: &mut Builder, name: &Word) -> Result<PoolName, Diagnostic> {
        let template = builder.http_mut().template(name)?;
        if let Some(name_bytes) = template.as_constant() {
            builder.need_thread_pool(name_bytes, name.span);
        }
        Ok(PoolName(template))
    }

    /// The pool for this request; `None`, and a line in the error log, when there is none of that name.
    pub fn find(&self, request: &Request) -> Option<ThreadPool> {
        let pools = request.configuration().thread_pools();
        let evaluated;
        let name = match self.0.as_constant() {
            Some(name) => name,
            None => {
                evaluated = self.0.evaluate(request);
                &evaluated
            }
        };
        let pool = pools.find(name);
        if pool.is_none() {
            request.log(Level::Error, format_args!("thread pool \"{}\" not found", BStr::new(name)));
        }
        pool.cloned()
    }
}

/// How long a client that has ended its own direction is waited with, and how often its connection is looked at. Over TCP one
/// that has closed its socket looks the same until something is sent to it; so a disk that hangs would keep them for ever. An
/// hour is longer than anybody waits for an answer.
const HALF_CLOSED_LOOKS: u32 = 3600;
const HALF_CLOSED_LOOK_EVERY: Duration = Duration::from_secs(1);

/// Waits for something, a task of a thread pool say, as long as the client does. `None` when it has left first: then what
/// was waited for is dropped (a task that has not begun is cancelled), and the answer is `Flow::Respond(CLIENT_LEFT)`.
///
/// A client has left when its connection is broken. One that has only ended its own direction, as `nc -N` does, is still
/// answered, as nginx does where it does not look at its clients meanwhile; but not for ever.
pub async fn while_client_stays<F: Future>(request: &Request, awaited: F) -> Option<F::Output> {
    let exchange = request.exchange();
    let mut awaited = pin!(awaited);
    let first = poll_fn(|context| match awaited.as_mut().poll(context) {
        Poll::Ready(output) => Poll::Ready(Some(output)),
        Poll::Pending => exchange.poll_gone(context).map(|()| None),
    });
    if let Some(output) = first.await {
        return Some(output);
    }
    for _ in 0..HALF_CLOSED_LOOKS {
        if exchange.is_broken() {
            break;
        }
        if let Ok(output) = timeout(HALF_CLOSED_LOOK_EVERY, awaited.as_mut()).await {
            return Some(output);
        }
    }
    None
}
