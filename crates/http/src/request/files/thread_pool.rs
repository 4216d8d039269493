//! The thread pool of a request: the NAME in `aio threads=NAME`, which may contain variables.
//!
//! A name without variables is checked when the configuration is read. One with variables is looked up for each
//! request, and a pool that does not exist is an error of that request alone.

use bstr::BStr;
use gale_runtime::ThreadPool;

use crate::request::Request;
use crate::request::variables::template::Template;
use gale_base::log_level::Level;

/// The name of a thread pool, compiled.
#[derive(Clone, Debug)]
pub struct PoolName(pub(crate) Template);

impl PoolName {
    /// The pool for this request. Returns `None` and logs an error if no pool has that name.
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
