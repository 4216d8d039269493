//! Which thread pool a request uses: the NAME in `aio threads=NAME`, which may contain variables.
//!
//! A name without variables is checked when the configuration is read; one with variables when it is needed, and then a
//! pool that is not there is an error of that request alone.
//!
//! And how a request waits for a pool: no longer than its client does.

use std::future::{Future, poll_fn};
use std::pin::pin;
use std::task::Poll;

use bstr::BStr;
use gale_config::{Diagnostic, Word};
use gale_runtime::{PoolError, PoolTask, ThreadPool};

use super::request::Request;
use super::template::Template;
use crate::configuration::Builder;
use crate::process::Level;

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

/// Waits for a task of a thread pool as long as the client does. `None` when it has left first (a client that has ended its
/// own direction counts as one, as it does for nginx's proxied requests): the task is cancelled if it has not begun. The
/// answer is `Flow::Respond(CLIENT_LEFT)` then.
pub async fn while_client_stays<T>(request: &Request, task: PoolTask<T>) -> Option<Result<T, PoolError>> {
    let exchange = request.exchange();
    let mut task = pin!(task);
    poll_fn(|context| match task.as_mut().poll(context) {
        Poll::Ready(result) => Poll::Ready(Some(result)),
        Poll::Pending => exchange.poll_gone(context).map(|()| None),
    })
    .await
}
