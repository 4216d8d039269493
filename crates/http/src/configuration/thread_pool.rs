//! Compiles the NAME of `aio threads=NAME`.

use gale_config::{Diagnostic, Word};
use gale_engine::configuration::Builder;

use super::builder::InHttp;
use crate::request::files::thread_pool::PoolName;

impl PoolName {
    /// Compiles a name.
    ///
    /// # Errors
    /// An invalid name. A pool that does not exist is reported once the whole configuration is known.
    pub fn new(builder: &mut Builder, name: &Word) -> Result<PoolName, Diagnostic> {
        let template = builder.http_mut().template(name)?;
        if let Some(name_bytes) = template.as_constant() {
            builder.need_thread_pool(name_bytes, name.span);
        }
        Ok(PoolName(template))
    }
}
