//! split_clients: a session variable that divides clients into groups by a hash. See
//! [`shared::split_clients`](crate::shared::split_clients).
//!   split_clients STRING $VARIABLE { ... }          stream
//! (<https://nginx.org/en/docs/stream/ngx_stream_split_clients_module.html>)

use gale_config::Contexts;
use gale_engine::module::Module;
use gale_stream::session::Session;

use crate::shared::split_clients;

/// See the file's head.
pub static MODULE: Module = Module {
    name: "stream_split_clients",
    directives: &[split_clients::directive::<Session>(Contexts::STREAM)],
    ..Module::EMPTY
};
