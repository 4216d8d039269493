//! Which thread pool a request uses: the NAME in `aio threads=NAME`, which may contain variables.
//!
//! A name without variables is checked when the configuration is read; one with variables when it is needed, and then a
//! pool that is not there is an error of that request alone.

use bstr::BStr;
use gale_config::{Diagnostic, Word};
use gale_runtime::ThreadPool;

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
