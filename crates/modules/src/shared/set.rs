//! set: assigns a value to a variable.
//!   set $VARIABLE VALUE;                                         server, location, if; in stream: server
//! (<https://nginx.org/en/docs/http/ngx_http_rewrite_module.html#set>)

use std::sync::Arc;

use gale_config::{Diagnostic, Statement};
use gale_engine::configuration::Builder;
use gale_engine::variables::subject::Subject;
use gale_engine::variables::template::Template;
use gale_engine::variables::{Definition, VariableId};

use super::variable_name;

/// A `set`.
pub struct Set<S: 'static> {
    /// The variable that is set.
    pub variable: VariableId,
    /// Its new value.
    pub value: Template<S>,
}

impl<S: Subject> Set<S> {
    /// Parses a `set`. Until it runs, the variable has the value that `unset` returns for its name, unless another
    /// module defines it.
    ///
    /// # Errors
    /// A message in nginx's words.
    pub fn parse(
        builder: &mut Builder,
        statement: &Statement,
        unset: impl FnOnce(&[u8]) -> Arc<dyn Definition<S>>,
    ) -> Result<Set<S>, Diagnostic> {
        let [word, value] = statement.args.as_slice() else { unreachable!("two arguments") };
        let name = variable_name(word)?;
        let variables = builder.variables::<S>();
        let value = variables.template(value)?;
        let is_own = value.as_constant().is_some();
        let variable = variables.table.assigned(name, Some(word.span), unset(name), is_own);
        Ok(Set { variable, value })
    }
}
