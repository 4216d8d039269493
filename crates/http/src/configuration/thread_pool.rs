//! The NAME in `aio threads=NAME`, as it is written.

use gale_config::{Diagnostic, Word};
use gale_engine::configuration::Builder;

use super::builder::InHttp;
use crate::request::files::thread_pool::PoolName;

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
}
