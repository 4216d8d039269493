//! The `Server` field. (<https://nginx.org/en/docs/http/ngx_http_core_module.html#server_tokens>)

use std::borrow::Cow;

use crate::request::Request;
use crate::request::configuration::settings::{CoreSettings, ServerTokens};

/// Returns the value of the `Server` field.
pub fn server_field<'c>(request: &Request, core: &'c CoreSettings) -> Cow<'c, [u8]> {
    match core.server_tokens.get() {
        ServerTokens::On | ServerTokens::Build => Cow::Borrowed(crate::SERVER_WITH_VERSION),
        ServerTokens::Off => Cow::Borrowed(crate::SERVER),
        ServerTokens::Text(text) => match text.as_constant() {
            Some(text) => Cow::Borrowed(text),
            None => Cow::Owned(text.evaluate(request)),
        },
    }
}
