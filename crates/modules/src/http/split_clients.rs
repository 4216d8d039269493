//! split_clients: a request variable that divides clients into groups by a hash. See
//! [`shared::split_clients`](crate::shared::split_clients).
//!   split_clients STRING $VARIABLE { ... }          http
//! (<https://nginx.org/en/docs/http/ngx_http_split_clients_module.html>)

use gale_config::Contexts;
use gale_engine::module::Module;
use gale_http::request::Request;

use crate::shared::split_clients;

/// See the file's head.
pub static MODULE: Module = Module {
    name: "http_split_clients",
    directives: &[split_clients::directive::<Request>(Contexts::HTTP)],
    ..Module::EMPTY
};
